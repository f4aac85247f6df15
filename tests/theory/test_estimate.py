"""Estimates with error bars, and evidence per row: against definitions, and by simulation."""

import functools
import math
import subprocess
import sys

import pytest
import torch

import regard
from regard import ALiBi, AuxRequest, Bias, Causal, FermiDirac, Free, Rows, Transport, Tsallis
from regard.estimation import student_quantile
from support.cases import build, by_case, skip_unless_served
from support.memory import PEAK, reads_peak
from support.reference import truth
from support.tolerance import assert_close

double = torch.float64
by_engine = pytest.mark.parametrize("backend", ["native", "torch"])


def normal(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=double)


# --- estimate ---------------------------------------------------------------------------------------------------------


def quadrature(t, freedom):
    """P(|T| <= t) by Simpson's rule in the angle, where the density is a power of a cosine: an independent formula."""
    angle = torch.linspace(0, math.atan(t / math.sqrt(freedom)), 20001, dtype=double)
    height = angle.cos() ** (freedom - 1)
    weights = torch.full_like(angle, 2.0)
    weights[1::2] = 4.0
    weights[0] = weights[-1] = 1.0
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return 2 * constant * float((weights * height).sum() * angle[1]) / 3


TABLE = {  # two-sided, from any textbook
    0.8: {1: 3.078, 2: 1.886, 5: 1.476, 10: 1.372, 30: 1.310, 120: 1.289},
    0.95: {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228},
    0.99: {1: 63.657, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 10: 3.169, 30: 2.750, 120: 2.617},
    0.999: {1: 636.619, 2: 31.599, 3: 12.924, 5: 6.869, 10: 4.587, 30: 3.646, 120: 3.373},
}


def test_students_quantile():
    for level, row in TABLE.items():
        got = student_quantile(level, torch.tensor(list(row), dtype=double))
        assert torch.allclose(got, torch.tensor(list(row.values()), dtype=double), rtol=0, atol=6e-4)
    freedom = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 49, 50, 999, 1000, 1001, 5000], dtype=double)
    for level in (1e-3, 0.5, 0.95, 0.999):
        for t, n in zip(student_quantile(level, freedom).tolist(), freedom.tolist(), strict=True):
            assert quadrature(t, n) == pytest.approx(level, rel=1e-10), (level, n)
    z = math.sqrt(2) * float(torch.tensor(0.95, dtype=double).erfinv())
    assert student_quantile(0.95, torch.tensor([1e12], dtype=double)).item() == pytest.approx(z, rel=1e-11)


def test_students_quantile_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    freedom = torch.arange(1, 3000, dtype=double)
    for level in (0.01, 0.5, 0.95, 0.9999):
        expected = torch.from_numpy(stats.t.ppf((1 + level) / 2, freedom.numpy()))
        assert torch.allclose(student_quantile(level, freedom), expected, rtol=1e-9, atol=0)


def maximum_likelihood(theta, values):
    """v and beta that maximise the product of Gaussians of precision beta theta_i (seed 004, Eq. 2-4), by LBFGS."""
    v = torch.zeros(values.shape[-1], dtype=double, requires_grad=True)
    log_beta = torch.zeros((), dtype=double, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [v, log_beta], max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def loss():
        optimizer.zero_grad()
        precision = theta[:, None] * log_beta.exp()
        density = 0.5 * (precision / (2 * math.pi)).log() - 0.5 * precision * (v - values) ** 2
        total = -density.sum()
        total.backward()
        return total

    optimizer.step(loss)
    return v.detach(), float(log_beta.detach().exp())


@by_engine
def test_estimate_maximises_the_likelihood(backend):
    q, k, v = normal(1, 2, 3, 4), normal(1, 2, 6, 4, seed=1), normal(1, 2, 6, 3, seed=2)
    bias = normal(6, seed=3)
    found = regard.estimate(q, k, v, scale=0.9, problem=Transport(prior=Bias(bias), temperature=0.8), backend=backend)
    for h in range(2):
        for i in range(3):
            theta = (0.9 * (k[0, h] @ q[0, h, i]) / 0.8 + bias).exp()
            value, beta = maximum_likelihood(theta, v[0, h])
            assert torch.allclose(found.value[0, h, i], value, atol=1e-7)
            assert found.precision_scale[0, h, i].item() == pytest.approx(beta, rel=1e-6)
            assert found.log_precision[0, h, i].item() == pytest.approx(math.log(beta * theta.sum()), abs=1e-6)
            assert found.variance[0, h, i].item() == pytest.approx(1 / (beta * theta.sum().item()), rel=1e-6)


@by_engine
def test_estimate_equals_its_formulas(backend):
    """beta = n Dv / sum theta |v - value|^2, where n keys are admissible under masks, priors and grouped heads."""
    q, k, v = normal(2, 4, 7, 8), normal(2, 2, 7, 8, seed=1), normal(2, 2, 7, 3, seed=2)
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=double)
    mask = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[:, :, 4] = False  # no key at all
    problem = Transport(prior=Causal() * ALiBi(slopes))
    found = regard.estimate(q, k, v, attn_mask=mask, enable_gqa=True, problem=problem, softcap=2.0, backend=backend)
    exact = truth(q, k, v, attn_mask=mask, problem=problem, softcap=2.0)
    theta = (exact.scores + exact.log_prior).exp()
    n = (exact.log_prior > -math.inf).sum(-1)
    away = ((v.repeat_interleave(2, 1)[:, :, None] - exact.out[..., None, :]) ** 2).sum(-1)
    beta = torch.where(n >= 2, 3 * n / (theta * away).sum(-1), math.nan)
    variance = 1 / (beta * theta.sum(-1))
    assert torch.equal(found.keys, n.double()) and {0, 1, 2} < set(n.flatten().tolist())
    close = functools.partial(torch.allclose, rtol=1e-9, atol=0, equal_nan=True)
    assert close(found.precision_scale, beta) and close(found.variance, variance)
    assert torch.allclose(found.log_precision, -variance.log(), atol=1e-9, equal_nan=True)
    assert (found.value[n == 0] == 0).all() and found.variance[n < 2].isnan().all()
    low, high = found.interval()
    assert low.shape == found.value.shape and low[n < 2].isnan().all() and (low < high)[n >= 2].all()


def simulated(n, d, draws, beta=0.7, seed=0):
    """Keys, queries and, for each draw, values from the model; the true v is (1, 2, ..., d)."""
    q, k = normal(1, 1, 1, 4, seed=seed), normal(1, 1, n, 4, seed=seed + 1)
    theta = (0.5 * (q @ k.mT)).exp()[0, 0, 0]  # scale 1/sqrt(4)
    true = torch.arange(1, d + 1, dtype=double)
    values = true + normal(draws, 1, n, d, seed=seed + 2) / (beta * theta)[:, None].sqrt()
    return q.expand(draws, -1, -1, -1), k.expand(draws, -1, -1, -1), values, true, 1 / (beta * theta.sum())


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("n", range(2, 9))
def test_intervals_cover_at_the_stated_rate(n, d):
    draws = 20000
    q, k, v, true, variance = simulated(n, d, draws, seed=10 * n)
    found = regard.estimate(q, k, v)
    for level in (0.5, 0.95):
        low, high = found.interval(level)
        covered = ((low <= true) & (true <= high)).double().mean((0, 1, 2))  # each coordinate
        assert ((covered - level).abs() < 4 * math.sqrt(level * (1 - level) / draws)).all(), covered
    # the variance itself: of the estimate over the draws, and the unbiased one on average
    assert torch.allclose(found.value.var(0).flatten(), variance, rtol=5 * math.sqrt(2 / draws))
    unbiased = found.variance * n / (n - 1)
    relative = math.sqrt(2 / ((n - 1) * d * draws))
    assert unbiased.mean().item() == pytest.approx(variance.item(), rel=4 * relative)


def test_the_maximum_likelihood_interval_is_too_short():
    """theory.md: 60 % at n = 2, d = 1 for a nominal 95 %."""
    q, k, v, true, _ = simulated(2, 1, 20000)
    found = regard.estimate(q, k, v)
    covered = ((found.value.squeeze(-1) - true).abs() <= 1.959964 * found.variance.sqrt()).double().mean().item()
    assert covered == pytest.approx(2 / math.pi * math.atan(1.959964 / math.sqrt(2)), abs=0.014)
    assert 0.58 < covered < 0.62


@by_engine
def test_estimate_at_the_edges(backend):
    q, k, v = normal(1, 1, 3, 4), normal(1, 1, 5, 4, seed=1), normal(1, 1, 5, 2, seed=2)
    plain = regard.estimate(q, k, v, backend=backend)
    # Scores whose exponentials overflow do not change the variance.
    shifted = regard.estimate(q, k, v, attn_mask=torch.full((5,), 5000.0, dtype=double), backend=backend)
    assert torch.allclose(shifted.variance, plain.variance) and torch.allclose(shifted.value, plain.value)
    assert torch.allclose(shifted.log_precision, plain.log_precision) and (shifted.precision_scale == 0).all()
    # Values far from the origin.
    far = regard.estimate(q.float(), k.float(), v.float() + 1000, backend=backend)
    assert torch.allclose(far.variance.double(), plain.variance, rtol=1e-2)
    # Values that agree.
    same = regard.estimate(q, k, torch.ones_like(v), backend=backend)
    assert (same.variance < 1e-30).all() and (same.log_precision > 60).all()
    none = regard.estimate(q, k[:, :, :0], v[:, :, :0], backend=backend)
    assert none.variance.isnan().all() and none.log_precision.isnan().all() and (none.value == 0).all()
    half = regard.estimate(q.bfloat16(), k.bfloat16(), v.bfloat16(), backend=backend)
    assert half.value.dtype == torch.bfloat16 and half.variance.dtype == half.interval()[0].dtype == torch.float32


def test_what_is_differentiable():
    tensors = [t.requires_grad_() for t in (normal(1, 2, 3, 4), normal(1, 2, 5, 4, seed=1), normal(1, 2, 5, 2, seed=2))]
    found = regard.estimate(*tensors, is_causal=True)
    out = regard.attention(*tensors, is_causal=True)
    for field in (found.variance, found.log_precision, found.precision_scale):
        assert not field.requires_grad
    got = torch.autograd.grad(found.value.sin().sum(), tensors)
    assert all(map(torch.allclose, got, torch.autograd.grad(out.sin().sum(), tensors)))


def test_estimate_compiles():
    q, k, v = (normal(1, 2, 5, 4, seed=n) for n in range(3))
    torch._dynamo.reset()
    function = lambda q, k, v: regard.estimate(q, k, v).variance + regard.evidence(q, k).kl  # noqa: E731
    assert torch.allclose(torch.compile(function, fullgraph=True, backend="aot_eager")(q, k, v), function(q, k, v))
    torch._dynamo.reset()


# --- evidence ---------------------------------------------------------------------------------------------------------


@by_case
@by_engine
def test_evidence_equals_its_definition(case, backend):
    built = build(case)
    skip_unless_served(backend, built, ("entropy",))
    problem = built.arguments.get("problem", Transport())
    exact = truth(built.query, built.key, built.value, **built.arguments)
    n = (exact.log_prior > -math.inf).sum(-1)
    p = exact.weights / exact.weights.sum(-1, keepdim=True)
    expected = torch.where(p > 0, p * (p * n[..., None]).log(), 0.0).sum(-1)
    if problem.regularizer != regard.KL() and getattr(problem.marginal, "sink", None) is not None:
        with pytest.raises(ValueError, match="problem: expected no sink"):
            regard.evidence(built.query, built.key, **built.arguments, backend=backend)
        return
    found = regard.evidence(built.query, built.key, **built.arguments, level=0.01, backend=backend)
    assert_close(found.kl, expected, double, 100 * case.sensitivity)
    assert (found.kl >= 0).all() and found.level == 0.01
    assert torch.equal(found.draws, math.log(100) / found.kl)


def test_evidence_is_against_the_uniform_plan():
    """Under a weighted prior the statistic `kl` is another quantity."""
    q, k = normal(1, 2, 5, 4), normal(1, 2, 6, 4, seed=1)
    problem = Transport(prior=Bias(normal(6, seed=2)))
    p = regard.solve(q @ k.mT / 2, problem).weights
    expected = (p * (6 * p).log()).sum(-1)
    assert torch.allclose(regard.evidence(q, k, problem=problem).kl, expected, atol=1e-12)
    _, aux = regard.attention(q, k, k, problem=problem, return_aux=AuxRequest(kl=True))
    assert not torch.allclose(aux.kl, expected, atol=1e-2)


@by_engine
def test_a_uniform_plan_is_no_evidence(backend):
    for dtype in (torch.float32, torch.float64):
        q, k = torch.zeros(1, 1, 3000, 8, dtype=dtype), torch.randn(1, 1, 3000, 8, dtype=dtype)
        found = regard.evidence(q, k, is_causal=True, backend=backend)
        assert (found.kl == 0).all() and (found.draws == math.inf).all() and found.kl.dtype == dtype


def test_evidence_of_rows_with_at_most_one_key():
    q, k = normal(1, 1, 3, 4), normal(1, 1, 4, 4, seed=1)
    mask = torch.tensor([[True] * 4, [False] * 4, [False, True, False, False]])
    for problem in (None, Transport(Tsallis(1.5)), Transport(temperature=0.0)):
        found = regard.evidence(q, k, attn_mask=mask, problem=problem)
        assert (found.kl[0, 0, 1:] == 0).all() and (found.draws[0, 0, 1:] == math.inf).all() and found.kl[0, 0, 0] > 0
    empty = regard.evidence(q, k, problem=Transport(Tsallis(2.0), marginal=Free(-1e3)))  # ReLU: the rows send no mass
    assert (empty.kl == 0).all() and (empty.draws == math.inf).all()
    assert (regard.evidence(q, k[:, :, :0]).kl == 0).all()


def test_evidence_of_hard_routing():
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0]).view(1, 1, 6, 1)
    assert regard.evidence(q, k, problem=Transport(temperature=0.0)).kl.item() == pytest.approx(math.log(3), rel=1e-6)
    tau = torch.tensor([0.0, 1.0]).view(2, 1, 1)
    mixed = regard.evidence(q.expand(1, 2, 1, 1), k.expand(1, 2, 6, 1), scale=1.0, problem=Transport(temperature=tau))
    alone = regard.evidence(q, k, scale=1.0)
    assert torch.allclose(mixed.kl.flatten(), torch.tensor([math.log(3), alone.kl.item()]), rtol=1e-5)


def test_evidence_is_differentiable():
    q, k = normal(1, 2, 3, 4).requires_grad_(), normal(1, 2, 4, 4, seed=1).requires_grad_()
    for problem in (None, Transport(prior=Bias(normal(4, seed=2)), marginal=Rows(sink=0.3))):
        assert torch.autograd.gradcheck(lambda q, k, problem=problem: regard.evidence(q, k, problem=problem).kl, (q, k))


@pytest.mark.parametrize("scale", [0.1, 0.3])
def test_the_number_of_draws_by_simulation(scale):
    """After that many draws the mean log-likelihood ratio is log(1/level). So the ratio exceeds this threshold in about
    half of the cases, and under the null hypothesis with probability `level` at most."""
    q, k, level, tests = normal(1, 1, 1, 4), normal(1, 1, 20, 4, seed=1), 0.05, 4000
    found = regard.evidence(q, k, scale=scale, level=level)
    p = regard.solve(scale * (q @ k.mT)[0, 0, 0]).weights
    ratio, draws = (20 * p).log(), round(found.draws.item())
    assert draws > 5

    def ratios(weights, seed):
        keys = torch.multinomial(weights.expand(tests, -1), draws, True, generator=torch.Generator().manual_seed(seed))
        return ratio[keys].sum(-1)

    plan, null = ratios(p, 0), ratios(torch.full_like(p, 1 / 20), 1)
    error = plan.std().item() / math.sqrt(tests)
    assert plan.mean().item() == pytest.approx(draws * found.kl.item(), abs=4 * error)
    assert draws * found.kl.item() == pytest.approx(math.log(1 / level), abs=found.kl.item())
    assert 0.35 < (plan > math.log(1 / level)).double().mean() < 0.65
    assert (null > math.log(1 / level)).double().mean() < level


MEMORY = (
    PEAK
    + """
import torch, regard
from regard import *
torch.set_num_threads(1)
T = 16384
q, k = torch.randn(1, 1, T, 16), torch.randn(1, 1, T, 16)
run = lambda n: (regard.evidence(q[:, :, :n], k[:, :, :n], problem=Transport(Tsallis(1.5), prior=Causal())),
                 regard.estimate(q[:, :, :n], k[:, :, :n], k[:, :, :n], is_causal=True).interval())
run(256)
before = peak()
results = run(T)
assert results[0].kl.shape == (1, 1, T)
print(peak() - before)
"""
)


@reads_peak
def test_memory_of_16k_tokens():
    """Under 100 MiB, where the plan alone would take 1024."""
    pytest.importorskip("regard._native", reason="the native engine was not built")
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < 100, f"{done.stdout} MiB"


# --- bad input --------------------------------------------------------------------------------------------------------

q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 3)


def estimate(*problem, **arguments):
    return lambda: regard.estimate(q, k, v, enable_gqa=True, problem=Transport(*problem, **arguments))


ERRORS = {
    "entmax": (estimate(Tsallis(1.5)), ValueError, r"problem: expected KL\(\) with Rows\(\).*Tsallis"),
    "sink": (estimate(marginal=Rows(sink=0.0)), ValueError, r"problem: expected KL\(\).*sink=0.0"),
    "relaxed": (estimate(marginal=Rows(relax=1.0)), ValueError, r"problem: expected KL\(\).*relax"),
    "mass": (estimate(marginal=Rows(mass=2.0)), ValueError, r"problem: expected KL\(\)"),
    "free": (estimate(marginal=Free()), ValueError, r"problem: expected KL\(\).*Free"),
    "hard": (estimate(temperature=0.0), ValueError, "problem: expected temperature > 0"),
    "hard rows": (estimate(temperature=torch.tensor([[[0.0]]])), ValueError, "problem: expected temperature > 0"),
    "not a problem": (lambda: regard.estimate(q, q, q, problem="softmax"), TypeError, "problem: expected a Transport"),
    "no value": (lambda: regard.estimate(q, q, None), TypeError, "value: expected a tensor, got None"),
    "level": (lambda: regard.estimate(q, q, q).interval(95), ValueError, "level: expected a probability.*got 95"),
    "level 1": (lambda: regard.estimate(q, q, q).interval(1.0), ValueError, "level: expected a probability"),
    "level type": (lambda: regard.estimate(q, q, q).interval("high"), TypeError, "level: expected a number"),
    "evidence level": (lambda: regard.evidence(q, q, level=0.0), ValueError, "level: expected a probability.*got 0.0"),
    "evidence query": (lambda: regard.evidence(None, q), TypeError, "query: expected a tensor, got None"),
    "evidence key": (lambda: regard.evidence(q, [1]), TypeError, "key: expected a tensor"),
    "evidence heads": (lambda: regard.evidence(q, k), ValueError, "key: expected 4 heads"),
    "evidence sink": (
        lambda: regard.evidence(q, q, problem=Transport(FermiDirac(), marginal=Rows(sink=0.0))),
        ValueError,
        "problem: expected no sink",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name):
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        call()
