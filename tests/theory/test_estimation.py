"""Multipliers of keys, error bars, evidence, temperatures from choices: against definitions, and by simulation."""

import functools
import inspect
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard import ALiBi, AuxRequest, Bias, Causal, FermiDirac, Free, Rows, Transport, Tsallis
from regard.estimation import student_quantile
from support.cases import assert_close, build, by_backend, by_case, skip_unless_served
from support.memory import PEAK, reads_peak
from support.reference import truth

double = torch.float64
some = settings(deadline=None, max_examples=40, derandomize=True)
by_engine = pytest.mark.parametrize("backend", ["native", "torch"])


def normal(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=double)


def chosen(logits, seed=0):
    """One key per row, drawn from softmax of the logits."""
    p = logits.softmax(-1).flatten(0, -2)
    return torch.multinomial(p, 1, generator=torch.Generator().manual_seed(seed)).view(logits.shape[:-1])


# --- key_scale --------------------------------------------------------------------------------------------------------


@by_case
@by_backend
def test_key_scale_multiplies_keys(case, backend):
    built = build(case)
    skip_unless_served(backend, built)
    multiplier = normal(case.B, case.H, case.Tk, seed=1)
    group = case.H // case.Hkv
    keys = built.key.repeat_interleave(group, 1) * multiplier[..., None]
    expected = truth(built.query, keys, built.value.repeat_interleave(group, 1), **built.arguments)
    out = regard.attention(
        built.query, built.key, built.value, **built.arguments, key_scale=multiplier, backend=backend
    )
    assert_close(out, expected.out, double, 10 * case.sensitivity)


@pytest.mark.parametrize(
    "shape", [(), (1,), (6,), (2, 6), (4, 6), (4, 1), (2, 2, 6), (2, 4, 6), (1, 4, 6), (2, 1, 6), (2, 4, 1)], ids=str
)
def test_key_scale_shapes(shape):
    """One for each query head or key/value head, and shapes that broadcast to either."""
    q, k, v = normal(2, 4, 5, 8), normal(2, 2, 6, 8, seed=1), normal(2, 2, 6, 3, seed=2)
    multiplier = normal(*shape, seed=3)
    full = multiplier.repeat_interleave(2, -2) if len(shape) > 1 and shape[-2] == 2 else multiplier
    expected = regard.attention(
        q, k.repeat_interleave(2, 1) * full.expand(2, 4, 6)[..., None], v.repeat_interleave(2, 1)
    )
    assert torch.allclose(regard.attention(q, k, v, enable_gqa=True, key_scale=multiplier), expected, atol=1e-12)


def test_key_scale_follows_the_callers_dimensions():
    q, k, multiplier = normal(3, 2, 4, 5, 8), normal(3, 1, 4, 5, 8, seed=1), normal(3, 1, 4, 5, seed=2)
    expected = regard.attention(q, k * multiplier[..., None], k)
    assert torch.allclose(regard.attention(q, k, k, key_scale=multiplier), expected, atol=1e-12)
    flat = regard.attention(q[0, 0, 0], k[0, 0, 0], k[0, 0, 0], key_scale=multiplier[0, 0, 0])
    assert torch.allclose(flat, expected[0, 0, 0], atol=1e-12)
    assert regard.attention(q, k[..., :0, :], k[..., :0, :], key_scale=torch.ones(0)).count_nonzero() == 0


@by_backend
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_key_scale_gradient(backend, heads):
    tensors = [normal(1, 4, 2, 2), normal(1, 2, 4, 2, seed=1), normal(1, 2, 4, 1, seed=2), normal(1, heads, 4, seed=3)]
    tensors = [t.requires_grad_() for t in tensors]

    def attend(q, k, v, multiplier):
        return regard.attention(q, k, v, is_causal=True, enable_gqa=True, key_scale=multiplier, backend=backend)

    assert torch.autograd.gradcheck(attend, tensors)
    if backend != "sdpa":
        problem = Transport(Tsallis(1.5), temperature=0.7)
        assert torch.autograd.gradcheck(
            lambda q, k, v, m: regard.attention(
                q, k, v, enable_gqa=True, problem=problem, key_scale=m, backend=backend
            ),
            tensors,
        )


def test_key_scale_in_functions_that_read_a_plan():
    q, k, multiplier = normal(2, 4, 6, 8), normal(2, 2, 6, 8, seed=1), normal(4, 6, seed=2)
    scaled = k.repeat_interleave(2, 1) * multiplier[..., None]
    arguments = {"is_causal": True, "problem": Transport(temperature=0.5)}
    index = torch.tensor([0, 3])
    for window in (
        lambda k, **more: regard.weights_at(q, k, index, **arguments, **more),
        lambda k, **more: regard.topk(q, k, 1, **arguments, **more)[0],
        lambda k, **more: regard.block_mass(q, k, 4, **arguments, **more),
        lambda k, **more: regard.evidence(q, k, **arguments, **more).kl,
        lambda k, **more: regard.estimate(q, k, k[..., :3] * 0 + 1, **arguments, **more).value,
    ):
        assert torch.allclose(window(k, enable_gqa=True, key_scale=multiplier), window(scaled), atol=1e-12)
    assert regard.select_backend(q, k, k, enable_gqa=True, key_scale=multiplier).backend in ("native", "sdpa")


@by_backend
def test_nan_in_masked_keys_does_not_spread(backend):
    q, k, v = normal(2, 4, 5, 8), normal(2, 2, 6, 8, seed=1), normal(2, 2, 6, 3, seed=2)
    mask = torch.arange(6) != 3
    results = []
    for masked in (0.0, math.nan, math.inf):
        key = torch.where(mask[:, None], k, masked).requires_grad_()
        multiplier = normal(4, 6, seed=3).requires_grad_()
        arguments = {"attn_mask": mask, "enable_gqa": True, "backend": backend}
        out = regard.attention(q, key, v, key_scale=multiplier, **arguments)
        results.append([out, *torch.autograd.grad(out.sin().sum(), (key, multiplier))])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_key_scale_compiles_and_transforms():
    q, k, v, multiplier = (
        normal(2, 4, 5, 8),
        normal(2, 4, 5, 8, seed=1),
        normal(2, 4, 5, 3, seed=2),
        normal(4, 5, seed=3),
    )
    function = lambda m: regard.attention(q, k, v, key_scale=m).sin().sum()  # noqa: E731
    multiplier.requires_grad_()
    (expected,) = torch.autograd.grad(function(multiplier), multiplier)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(multiplier)
    assert torch.allclose(torch.autograd.grad(compiled, multiplier)[0], expected)
    torch._dynamo.reset()
    assert torch.allclose(torch.func.grad(function)(multiplier.detach()), expected)
    several = torch.stack([multiplier.detach(), 2 * multiplier.detach()])
    assert torch.allclose(torch.vmap(function)(several)[1], function(several[1]))


def test_key_scale_keeps_the_dtype():
    q, k, v, multiplier = (normal(1, 2, 5, 8, seed=n).float() for n in range(4))
    multiplier = multiplier[..., 0].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = regard.attention(q, k, v, key_scale=multiplier)
    half = [t.bfloat16() for t in (q, k, v)]
    assert mixed.dtype == torch.bfloat16 and torch.equal(mixed, regard.attention(*half, key_scale=multiplier))
    (gradient,) = torch.autograd.grad(mixed.float().sum(), multiplier)
    assert gradient.dtype == torch.float32
    # The product is computed in float32 and rounded once.
    once = (half[1].float() * multiplier[..., None]).bfloat16()
    assert torch.equal(mixed, regard.attention(half[0], once, half[2]))


def test_key_scale_is_keyword_only():
    functions = (regard.attention, regard.select_backend, regard.weights_at, regard.topk, regard.block_mass)
    for function in (*functions, regard.estimate, regard.evidence):
        parameter = inspect.signature(function).parameters["key_scale"]
        assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default is None


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_masks_lowest_number_is_not_admissible(dtype):
    scores = normal(200, 6).to(dtype)
    chosen = (scores[:, :4] / 2).softmax(-1).multinomial(1, generator=torch.Generator().manual_seed(0)).squeeze(-1)
    forbidden, lowest = scores.clone(), scores.clone()
    forbidden[:, 4:], lowest[:, 4:] = -math.inf, torch.finfo(dtype).min
    fits = [regard.calibrate(x, chosen) for x in (forbidden, lowest)]
    assert float(fits[0].temperature) == pytest.approx(float(fits[1].temperature)) and fits[1].converged


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
    """After that many draws the mean log-likelihood ratio is log(1/level). So the ratio exceeds this threshold about half
    of the time, and under the null hypothesis with probability `level` at most."""
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


# --- calibrate --------------------------------------------------------------------------------------------------------


def moments(scores, targets, beta):
    """E_target[s] and E_model[s] of each row and key, from their definitions; integer targets."""
    p = (beta * scores).softmax(-1)
    t = torch.nn.functional.one_hot(targets, scores.shape[-1]).double()
    s = torch.where(scores == -math.inf, 0.0, scores)
    return t * s, p * s


def by_lbfgs(scores, targets, shape):
    """An oracle: beta of this shape that maximizes the mean log-likelihood, by PyTorch's LBFGS."""
    scores = scores.clamp(min=-1e4)  # 0 * inf has no derivative
    beta = torch.ones(shape, dtype=double, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [beta], max_iter=1000, tolerance_grad=1e-13, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def loss():
        optimizer.zero_grad()
        log_p = (beta * scores).log_softmax(-1)
        total = -log_p.gather(-1, targets[..., None]).mean()
        total.backward()
        return total

    optimizer.step(loss)
    return beta.detach()


SHAPES = {"global": (), "head": (3, 1, 1), "key": (6,)}


@pytest.mark.parametrize("per", SHAPES)
def test_calibrate_maximises_the_likelihood(per):
    scores = normal(2, 3, 100, 6)
    truly = torch.tensor([0.5, 1.0, 2.0], dtype=double).view(3, 1, 1)
    targets = chosen(truly * scores)
    found = regard.calibrate(scores, targets, per=per)
    expected = by_lbfgs(scores, targets, SHAPES[per])
    assert found.beta.shape == expected.flatten().shape if per != "global" else found.beta.shape == ()
    assert torch.allclose(found.beta, expected.view_as(found.beta), rtol=1e-6)
    assert torch.equal(found.temperature, 1 / found.beta)
    assert found.converged and not found.separable.any() and found.rows == 600 and 0 < found.iterations < 20
    # the certificate, computed independently
    observed, modelled = moments(scores, targets, found.beta.view(SHAPES[per]))
    over = {"global": (0, 1, 2, 3), "head": (0, 2, 3), "key": (0, 1, 2)}[per]
    rows = 200 if per == "head" else 600
    missed = (observed.sum(over) - modelled.sum(over)).abs() / rows
    assert (missed < 1e-12).all() and (found.residual < 1e-12).all()
    before, after = (-torch.nn.functional.cross_entropy((b * scores).flatten(0, -2), targets.flatten())
                     for b in (torch.ones(()), found.beta.view(SHAPES[per])))  # fmt: skip
    assert torch.allclose(found.log_likelihood_before.mean(), before)
    assert torch.allclose(found.log_likelihood.mean(), after) and after > before


@pytest.mark.parametrize("temperature", [0.1, 0.7, 3.0])
def test_a_known_temperature_is_recovered(temperature):
    scores = normal(20000, 8, seed=3)
    found = regard.calibrate(scores, chosen(scores / temperature))
    p = (scores / temperature).softmax(-1)
    variance = (p * scores**2).sum(-1) - (p * scores).sum(-1) ** 2
    error = 1 / variance.sum().sqrt().item()  # Cramer-Rao
    assert found.beta.item() == pytest.approx(1 / temperature, abs=4 * error) and error < 0.05 / temperature


def test_distributions_as_targets():
    """The fit recovers the temperatures, or the key multipliers, of the softmax that is the target."""
    scores = normal(2, 3, 40, 5)
    tau = torch.tensor([0.2, 1.0, 7.0], dtype=double)
    found = regard.calibrate(scores, (scores / tau.view(3, 1, 1)).softmax(-1), per="head")
    assert torch.allclose(found.temperature, tau, rtol=1e-10)
    assert torch.allclose(
        regard.calibrate(scores[0], (scores[0] / 0.3).softmax(-1), per="head").temperature, tau * 0 + 0.3
    )
    multipliers = torch.tensor([2.0, 0.5, -1.0, 1.0, 0.0], dtype=double)
    found = regard.calibrate(scores, (scores * multipliers).softmax(-1), per="key")
    assert torch.allclose(found.beta, multipliers, atol=1e-9) and found.converged
    half = regard.calibrate(scores.bfloat16(), (scores.bfloat16().float() / 0.5).softmax(-1).bfloat16())
    assert half.beta.dtype == double and half.temperature.item() == pytest.approx(0.5, rel=0.02)


def test_calibrated_multipliers_fit_attention():
    """The result of `calibrate` can be passed to attention as it is."""
    q, k = normal(1, 1, 50, 4), normal(1, 1, 6, 4, seed=1)
    wanted = torch.tensor([1.5, 0.5, 1.0, -0.5, 2.0, 1.0], dtype=double)
    plan = lambda multiplier: regard.weights_at(q, k, torch.arange(6), key_scale=multiplier)  # noqa: E731
    found = regard.calibrate(q @ k.mT / 2, plan(wanted), per="key")
    assert torch.allclose(plan(found.beta), plan(wanted), atol=1e-10)
    warm = regard.calibrate(q @ k.mT / 2, regard.weights_at(q, k, torch.arange(6), problem=Transport(temperature=0.4)))
    assert warm.temperature.item() == pytest.approx(0.4, rel=1e-9)


def test_keys_that_are_not_admissible():
    scores = normal(300, 5, seed=1)
    scores[:150, 3:] = -math.inf
    targets = chosen(1.7 * scores, seed=2)
    padded = torch.cat([scores, torch.full((300, 2), -math.inf, dtype=double)], -1)
    for per in ("global", "key"):
        plain, wide = regard.calibrate(scores, targets, per=per), regard.calibrate(padded, targets, per=per)
        beta = wide.beta if per == "global" else wide.beta[:5]
        assert torch.allclose(plain.beta, beta, rtol=1e-10) and plain.converged and wide.converged
    assert wide.uninformative.tolist() == [False] * 5 + [True] * 2 and (wide.beta[5:] == 1).all()
    assert regard.calibrate(scores, targets).beta.item() == pytest.approx(
        by_lbfgs(scores, targets, ()).item(), rel=1e-6
    )


def test_rows_left_out():
    scores = normal(60, 4, seed=2)
    targets = chosen(scores)
    some_targets = torch.where(torch.arange(60) % 3 == 0, -1, targets)
    scores[3] = -math.inf  # allowed, because the row is left out
    for per in ("global", "key"):
        used = torch.arange(60) % 3 != 0
        expected = regard.calibrate(scores[used], targets[used], per=per)
        found = regard.calibrate(scores, some_targets, per=per)
        assert torch.allclose(found.beta, expected.beta, rtol=1e-12) and found.rows == expected.rows == 40
        assert torch.allclose(found.log_likelihood, expected.log_likelihood)
    spread = torch.nn.functional.one_hot(some_targets.clamp(min=0), 4) * (some_targets >= 0)[:, None]
    assert torch.equal(regard.calibrate(scores, spread.double()).beta, regard.calibrate(scores, some_targets).beta)
    for per in ("global", "key"):
        nothing = regard.calibrate(scores, torch.full((60,), -1), per=per)
        assert nothing.rows == 0 and nothing.uninformative.all() and (nothing.beta == 1).all() and nothing.converged


@some
@given(st.integers(0, 2**31), st.floats(0.01, 100), st.floats(-50, 50), st.sampled_from(["global", "head"]))
def test_shifts_and_scales(seed, factor, shift, per):
    """A shift of a row does not change beta; multiplying the scores by c divides it by c."""
    scores = normal(2, 3, 20, 5, seed=seed)
    targets = chosen(0.8 * scores, seed=seed)
    plain = regard.calibrate(scores, targets, per=per)
    shifted = regard.calibrate(scores + shift * normal(2, 3, 20, 1, seed=seed + 1), targets, per=per)
    scaled = regard.calibrate(factor * scores, targets, per=per)
    assert plain.converged and shifted.converged and scaled.converged
    assert torch.allclose(shifted.beta, plain.beta, rtol=1e-8, atol=1e-10)
    assert torch.allclose(scaled.beta * factor, plain.beta, rtol=1e-8, atol=1e-10)
    assert torch.equal(scaled.separable, plain.separable) and torch.equal(scaled.anticorrelated, plain.anticorrelated)
    assert (plain.log_likelihood >= plain.log_likelihood_before - 1e-12).all()


@some
@given(st.integers(0, 2**31), st.floats(0.1, 10), st.integers(2, 6))
def test_multipliers_scale_and_match_their_moments(seed, factor, keys):
    scores = normal(40, keys, seed=seed)
    targets = chosen(scores, seed=seed)
    plain, scaled = (regard.calibrate(c * scores, targets, per="key") for c in (1.0, factor))
    assert plain.converged and scaled.converged and torch.equal(plain.separable, scaled.separable)
    assert torch.allclose(scaled.beta * factor, plain.beta, rtol=1e-6, atol=1e-8)
    if not plain.separable.any():
        observed, modelled = moments(scores, targets, plain.beta)
        assert ((observed - modelled).mean(0).abs() < 1e-9).all()


def test_separable_choices_are_reported():
    scores = normal(3, 50, 4)
    targets = scores.argmax(-1)
    targets[1] = chosen(scores[1])
    found = regard.calibrate(scores, targets, per="head")
    assert found.separable.tolist() == [True, False, True] and found.converged
    assert found.temperature[[0, 2]].tolist() == [0, 0] and 0.5 < found.temperature[1] < 2
    assert found.log_likelihood[0] == 0 and found.residual[0] == 0
    text = str(found)
    assert "separable" in text and "head 0, 2" in text and "temperature 0" in text
    # a single row that contradicts makes the answer finite, however large it is
    targets[0, 0] = scores[0, 0].argmin()
    nearly = regard.calibrate(scores, targets, per="head")
    assert not nearly.separable[0] and 0 < nearly.temperature[0] < math.inf and nearly.residual[0] < 1e-12
    # ties at the top are shared
    tied = regard.calibrate(torch.tensor([[1.0, 1.0, 0.0]] * 4), torch.tensor([0, 1, 1, 0]))
    assert tied.separable and tied.log_likelihood.item() == pytest.approx(-math.log(2))
    # a ridge makes it finite: its gradient is the difference of the moments
    ridged = regard.calibrate(scores[2], scores[2].argmax(-1), ridge=0.01)
    observed, modelled = moments(scores[2], scores[2].argmax(-1), ridged.beta)
    assert not ridged.separable and ridged.converged
    assert (observed - modelled).sum(-1).mean().item() == pytest.approx(0.01 * (ridged.beta.item() - 1), abs=1e-12)


def test_anticorrelated_scores():
    scores = normal(200, 5)
    found = regard.calibrate(scores, chosen(-2 * scores))
    assert found.anticorrelated and found.beta == 0 and found.temperature == math.inf and found.converged
    assert found.log_likelihood.item() == pytest.approx(-math.log(5)) and found.residual > 0.1
    assert "temperature inf" in str(found) and not found.separable
    uniform = regard.calibrate(scores, torch.full_like(scores, 0.2))
    assert uniform.temperature == math.inf and uniform.residual < 1e-12
    both = regard.calibrate(
        torch.stack([scores, scores]), torch.stack([scores.argmin(-1), scores.argmax(-1)]), per="head"
    )
    assert both.anticorrelated.tolist() == [True, False] and both.separable.tolist() == [False, True]


def test_scores_without_information():
    scores = normal(2, 30, 1).expand(2, 30, 4).clone()
    scores[1] += normal(30, 4, seed=1)
    targets = torch.stack([chosen(scores[0]), chosen(scores[1])])
    found = regard.calibrate(scores, targets, per="head")
    assert found.uninformative.tolist() == [True, False] and found.beta[0] == 1 and not found.separable.any()
    assert "uninformative" in str(found) and "head 0:" in str(found) and found.converged
    # rows without information do not change the result of the others
    alone = regard.calibrate(scores[1], targets[1])
    assert regard.calibrate(scores, targets).beta.item() == pytest.approx(alone.beta.item(), rel=1e-12)


def test_a_key_that_is_never_chosen():
    scores = normal(100, 4).abs() + 0.1
    targets = chosen(torch.where(torch.arange(4) == 2, -math.inf, scores))
    found = regard.calibrate(scores, targets, per="key")
    assert found.separable.tolist() == [False, False, True, False] and found.beta[2] == -math.inf
    keys = torch.tensor([0, 1, 3])
    without = regard.calibrate(scores[:, keys], torch.searchsorted(keys, targets), per="key")
    assert torch.allclose(found.beta[keys], without.beta, rtol=1e-8) and found.converged
    assert torch.allclose(found.log_likelihood, without.log_likelihood) and "key 2: the likelihood" in str(found)
    ridged = regard.calibrate(scores, targets, per="key", ridge=1e-3)
    observed, modelled = moments(scores, targets, ridged.beta)
    assert not ridged.separable.any() and ridged.converged
    assert torch.allclose((observed - modelled).mean(0), 1e-3 * (ridged.beta - 1), atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_keys_that_separate_together(seed):
    """No key separates alone; two do together, beside two that have a finite answer."""
    scores = torch.full((500, 4), -math.inf, dtype=double)
    scores[:200, :2], scores[200:, 2:] = normal(200, 2, seed=seed), normal(300, 2, seed=seed + 100)
    targets = torch.cat([(2 * scores[:200, 0] < scores[:200, 1]).long(), 2 + chosen(scores[200:, 2:], seed)])
    found = regard.calibrate(scores, targets, per="key")
    assert found.separable.tolist() == [True, True, False, False] and found.converged
    rest = regard.calibrate(scores[200:, 2:], targets[200:] - 2, per="key")
    assert torch.allclose(found.beta[2:], rest.beta, rtol=1e-6) and (found.beta[:2] == math.inf).all()
    assert found.log_likelihood.item() == pytest.approx(0.6 * rest.log_likelihood.item(), rel=1e-6)
    # A single row that contradicts makes it finite, however small its scores are.
    scores[0, :2] *= 1e-3
    targets[0] = 1 - targets[0]
    nearly = regard.calibrate(scores, targets, per="key")
    assert not nearly.separable.any() and nearly.converged and nearly.beta[0] > 50


def test_the_report_and_too_few_steps():
    scores = normal(200, 5)
    targets = chosen(3 * scores)
    text = str(regard.calibrate(scores, targets))
    for word in (
        "one temperature from 200 rows",
        "temperature  ",
        "log-likelihood",
        "->",
        "moments match",
        "converged",
    ):
        assert word in text
    for per in ("global", "key"):
        short = regard.calibrate(scores, targets, per=per, max_iterations=1)
        assert not short.converged and short.iterations == 1 and "NO, after 1 step" in str(short)
        assert (short.residual > 1e-6).any()
    assert "Calibration per key" in str(regard.calibrate(scores, targets, per="key"))


# --- bad input --------------------------------------------------------------------------------------------------------

q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 3)
s, t = torch.randn(7, 5), torch.zeros(7).long()


def attend(multiplier):
    return lambda: regard.attention(q, k, v, enable_gqa=True, key_scale=multiplier)


def estimate(*problem, **arguments):
    return lambda: regard.estimate(q, k, v, enable_gqa=True, problem=Transport(*problem, **arguments))


def calibrate(scores=s, targets=t, **arguments):
    return lambda: regard.calibrate(scores, targets, **arguments)


ERRORS = {
    "number": (attend(2.0), TypeError, "key_scale: expected a floating-point tensor, got 2.0"),
    "integers": (
        attend(torch.ones(6).int()),
        TypeError,
        "key_scale: expected a floating-point tensor, got Tensor.int32",
    ),
    "keys": (attend(torch.ones(5)), ValueError, r"key_scale: expected.*\[2, 4, 6\] or \[2, 2, 6\], got \[5\]"),
    "heads": (attend(torch.ones(3, 6)), ValueError, r"key_scale: expected.*got \[3, 6\]"),
    "rank": (attend(torch.ones(1, 2, 4, 6)), ValueError, r"key_scale: expected.*got \[1, 2, 4, 6\]"),
    "nan": (attend(torch.tensor([1.0, math.nan, 1, 1, 1, 1])), ValueError, "key_scale: expected finite.*got nan"),
    "device": (attend(torch.ones(6, device="meta")), ValueError, "key_scale: expected a tensor on cpu"),
    "windows": (
        lambda: regard.topk(q, k, 1, enable_gqa=True, key_scale=torch.ones(5)),
        ValueError,
        "key_scale: expected",
    ),
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
    "scores": (calibrate([1.0]), TypeError, "scores: expected a floating-point tensor"),
    "integer scores": (calibrate(s.int()), TypeError, "scores: expected a floating-point tensor"),
    "no keys": (calibrate(s[:, :0]), ValueError, r"scores: expected shape \[..., Tk\] with Tk > 0"),
    "infinite scores": (calibrate(torch.full((7, 5), math.inf)), ValueError, "scores: expected finite numbers or -inf"),
    "targets": (calibrate(targets=[0] * 7), TypeError, "targets: expected integers or"),
    "bool targets": (calibrate(targets=s > 0), TypeError, "targets: expected integers or"),
    "targets' shape": (calibrate(targets=t[:3]), ValueError, r"targets: expected integers of shape \[7\], got"),
    "distributions' shape": (
        calibrate(targets=t.float()),
        ValueError,
        r"targets: expected distributions of shape \[7, 5\]",
    ),
    "index": (calibrate(targets=t + 5), ValueError, "targets: expected keys below Tk=5.*got 5"),
    "not a distribution": (
        calibrate(targets=s.softmax(-1) / 2),
        ValueError,
        "targets: expected rows >= 0 that sum to 1",
    ),
    "negative": (calibrate(targets=s / s.sum(-1, keepdim=True)), ValueError, "targets: expected rows >= 0"),
    "nan targets": (calibrate(targets=s * math.nan), ValueError, "targets: expected rows >= 0"),
    "forbidden": (calibrate(torch.full((7, 5), -math.inf)), ValueError, "targets: expected admissible keys"),
    "per": (calibrate(per="layer"), ValueError, 'per: expected "global", "head" or "key", got \'layer\''),
    "heads of what": (calibrate(per="head"), ValueError, r"scores: expected shape \[..., H, Tq, Tk\].*got \[7, 5\]"),
    "ridge": (calibrate(ridge=-1.0), ValueError, "ridge: expected a finite number >= 0, got -1.0"),
    "steps": (calibrate(max_iterations=0), ValueError, "max_iterations: expected a positive int, got 0"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name):
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        call()
