"""Temperatures that meet a budget (`MatchKL`, `MatchEntropy`), and the path along the temperature."""

import math
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard import ALiBi, AuxRequest, Bias, Causal, FermiDirac, MatchEntropy, MatchKL, Rows, Transport, Tsallis, Window
from regard.backends import BACKENDS
from regard.lowering import lower
from regard.solvers.budget.gradient import match
from support.memory import PEAK, reads_peak

D = torch.float64
seeds = st.integers(0, 2**31)
modest = settings(max_examples=15, deadline=None, derandomize=True)
REQUEST = AuxRequest(kl=True, entropy=True, max_weight=True)


def draw(seed, *shape, scale=1.0, dtype=D):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=D)).to(dtype)


def statistics(weights, log_prior):
    """KL to the normalised prior, and entropy, of rows."""
    share = log_prior.log_softmax(-1)
    logs = torch.where(weights > 0, weights, 1.0).log()
    return (weights * (logs - torch.where(weights > 0, share, 0.0))).sum(-1), -(weights * logs).sum(-1)


def bisect(scores, log_prior, budget):
    """The plan whose KL is the budget, by bisection of ln beta: slow and simple."""
    low, high = torch.full(scores.shape[:-1], -60.0, dtype=D), torch.full(scores.shape[:-1], 60.0, dtype=D)
    plan = scores
    for _ in range(200):
        middle = (low + high) / 2
        plan = ((scores - scores.amax(-1, keepdim=True)) * middle.exp()[..., None] + log_prior).softmax(-1)
        short = statistics(plan, log_prior)[0] < budget
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    return plan


def hardest(scores, log_prior):
    """KL of the hard plan."""
    best = scores == scores.amax(-1, keepdim=True)
    return -torch.where(best, log_prior.log_softmax(-1), -math.inf).logsumexp(-1)


@modest
@given(seeds, st.integers(2, 40), st.floats(0.01, 0.99), st.sampled_from([0.01, 1.0, 30.0]), st.booleans())
def test_solve_meets_the_budget(seed, n, share, scale, weighted):
    scores, log_prior = draw(seed, 4, n, scale=scale), draw(seed + 1, 4, n) * weighted
    budget = share * hardest(scores, log_prior)
    problem = Transport(prior=Bias(log_prior), temperature=MatchKL(budget[..., None]))
    plan = regard.solve(scores, problem)
    kl, _ = statistics(plan.weights, log_prior)
    assert torch.allclose(kl, budget, rtol=1e-10, atol=1e-13)
    assert torch.allclose(plan.weights, bisect(scores, log_prior, budget), atol=1e-7)
    assert plan.certificate().holds(1e-8)
    if not weighted:  # the same plan by its entropy
        entropy = MatchEntropy((math.log(n) - budget)[..., None])
        assert torch.allclose(regard.solve(scores, Transport(temperature=entropy)).weights, plan.weights, atol=1e-7)


@modest
@given(seeds, st.integers(2, 20), st.floats(0.01, 0.8), st.floats(1.01, 1.5))
def test_a_larger_budget_buys_a_higher_score(seed, n, share, more):
    scores, log_prior = draw(seed, 3, n), draw(seed + 1, n)
    budget = share * hardest(scores, log_prior.expand(3, n))[..., None]
    small, large = (
        (regard.solve(scores, Transport(prior=Bias(log_prior), temperature=MatchKL(b))).weights * scores).sum(-1)
        for b in (budget, more * budget)
    )
    assert (large > small - 1e-9).all()


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_budgets_out_of_reach_give_the_nearest_plan(backend):
    if backend == "native":
        pytest.importorskip("regard._native")
    eye = torch.eye(5, dtype=D)[None, None]
    scores = torch.tensor([[3.0, 1.0, 3.0, 0.0, -2.0], [0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0]], dtype=D)
    log_prior = torch.tensor([0.0, 0.0, math.log(3), 0.0, 0.0], dtype=D)
    uniform, prior = torch.full((5,), 0.2, dtype=D), log_prior.softmax(-1)

    def plan(temperature, prior=None):
        problem = Transport(prior=prior, temperature=temperature)
        weights = regard.attention(scores[None, None], eye, eye, scale=1.0, problem=problem, backend=backend)[0, 0]
        assert torch.allclose(weights, regard.solve(scores, problem).weights, atol=1e-12)
        return weights

    one_hot = torch.eye(5, dtype=D)[4]
    tied = torch.tensor([0.5, 0.0, 0.5, 0.0, 0.0], dtype=D)
    for cold in (MatchKL(100.0), MatchKL(math.log(5) + 1e-3), MatchEntropy(0.0), MatchEntropy(-1.0)):
        weights = plan(cold)
        assert torch.allclose(weights[0], tied, atol=1e-7) and torch.allclose(weights[2], one_hot, atol=1e-7)
        assert torch.allclose(weights[1], uniform)
    for hot in (MatchKL(0.0), MatchKL(-1.0), MatchEntropy(9.0), MatchEntropy(math.log(5))):
        assert torch.allclose(plan(hot), uniform.expand(3, 5), atol=1e-15 if hot != MatchEntropy(math.log(5)) else 1e-7)
    assert torch.allclose(plan(MatchKL(0.0), Bias(log_prior)), prior.expand(3, 5), atol=1e-15)
    weighted = plan(MatchKL(50.0), Bias(log_prior))
    by_prior = torch.tensor([0.25, 0.0, 0.75, 0.0, 0.0], dtype=D)
    assert torch.allclose(weighted[0], by_prior, atol=1e-7) and torch.allclose(weighted[2], one_hot, atol=1e-7)
    # between log(5/2), the most with a tie, and log 5, the most with one best key: only the last row can meet it
    half = statistics(plan(MatchKL(1.2)), torch.zeros(3, 5, dtype=D))[0]
    assert torch.allclose(half, torch.tensor([math.log(2.5), 0.0, 1.2], dtype=D), atol=1e-10)


CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "gqa, window": {"enable_gqa": True, "prior": Window(20, 0)},
    "float mask, softcap": {"mask": True, "softcap": 3.0},
    "ALiBi": {"prior": Causal() * ALiBi(torch.tensor([0.1, 0.2, 0.0, 0.4]))},
    "weighted, float mask": {"bias": True, "mask": True},
}


def arguments(case, dtype, Tq=70):
    options = dict(CASES[case])
    prior, mask, bias = options.pop("prior", None), options.pop("mask", False), options.pop("bias", False)
    heads = 2 if "enable_gqa" in options else 4
    q, k, v = (
        draw(1, 2, 4, Tq, 16, dtype=dtype),
        draw(2, 2, heads, Tq, 16, dtype=dtype),
        draw(3, 2, heads, Tq, 8, dtype=dtype),
    )
    if mask:
        float_mask = draw(4, Tq, Tq, dtype=torch.float32)
        options["attn_mask"] = float_mask.masked_fill(float_mask < -1.5, -math.inf)
    if bias:
        prior = Bias(draw(5, 4, 1, Tq, dtype=torch.float32))
    return (q, k, v), options, prior


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_attention_meets_the_budget(case, dtype):
    """The plan that the solver finds, read in full by `weights_at` in the compute dtype, meets the budget."""
    (q, k, v), options, prior = arguments(case, dtype)
    rules = [MatchKL(0.3), MatchKL(torch.tensor([0.05, 0.5, 1.0, 2.0], dtype=dtype).view(4, 1, 1))]
    if not (prior is not None and ("ALiBi" in repr(prior) or "Bias" in repr(prior))):
        rules.append(MatchEntropy(1.0))
    for rule in rules:
        problem = Transport(prior=prior, temperature=rule)
        out, aux = regard.attention(q, k, v, problem=problem, return_aux=REQUEST, **options)
        assert out.isfinite().all() and out.dtype == dtype
        got = getattr(aux, rule.statistic)
        target = (
            torch.as_tensor(rule.budget, dtype=None if torch.is_tensor(rule.budget) else D)
            .to(got.dtype)
            .reshape(-1, 1)
            .expand(2, 4, 70)
        )
        hard = (aux.max_weight > 1 - 1e-6) | (aux.kl < 1e-6)  # rows that meet it at no temperature
        met = (got - target).abs() <= (1e-8 if dtype == D else 1e-4)  # rounding at a low temperature
        assert (met | hard).all(), (rule, (got - target).abs()[~hard].max())
        assert (
            met[..., 35:].all() or case == "ALiBi"
        )  # late rows can meet it, except under a prior that is nearly hard itself
        assert (got - target).abs()[..., 35:].median() < (1e-11 if dtype == D else 1e-6)
        if dtype == D:
            defined = regard.attention(q, k, v, problem=problem, backend="torch", **options)
            assert torch.allclose(out, defined, atol=1e-6)
        if dtype == torch.float32:  # computed in float64, without the rounding of the statistics
            doubled = Transport(prior=prior, temperature=rule)
            _, exact = regard.attention(
                *(t.double() for t in (q, k, v)), problem=doubled, return_aux=REQUEST, **options
            )
            index = torch.arange(70).expand(2, 4, 70, 70)
            ours, theirs = (
                regard.weights_at(a, b, index, problem=problem, **options)
                for a, b in ((q, k), (q.double(), k.double()))
            )
            assert (ours - theirs).abs().max() < 2e-5
            assert ((getattr(exact, rule.statistic) - target).abs()[..., 35:].median() < 1e-7).all()


def test_float32_budget_is_met_beyond_float32_statistics():
    """KL of the plan at the temperature found, in float64: small budgets to 1e-5, others to 1e-6."""
    q, k = draw(1, 1, 2, 200, 32, dtype=torch.float32), draw(2, 1, 2, 200, 32, dtype=torch.float32)
    scores = q.double() @ k.double().mT / math.sqrt(32)
    for budget, tolerance in ((1e-3, 1e-5), (0.3, 1e-6), (2.0, 1e-6), (4.0, 1e-6)):
        problem = Transport(temperature=MatchKL(budget))
        form, _ = match(regard.select_backend(q, k, k).backend, lower(q, k, k, problem=problem))
        plan = (scores / form.temperature.double()).softmax(-1)
        kl, _ = statistics(plan, torch.zeros_like(plan))
        assert ((kl / budget - 1).abs() < tolerance).all()


def test_few_passes(monkeypatch):
    """The search needs few passes. More than this means that it no longer converges as it should."""
    backend = regard.select_backend(*(torch.zeros(1, 1, 2, 2),) * 3).backend
    passes, forward = [], BACKENDS[backend].forward
    monkeypatch.setattr(
        BACKENDS[backend], "forward", lambda form, names: passes.append(form.shape[2]) or forward(form, names)
    )
    q, k, v = (draw(n, 1, 4, 300, 32, dtype=torch.float32) for n in range(3))
    for budget in (0.05, 1.0, 3.0):
        passes.clear()
        regard.attention(q, k, v, problem=Transport(temperature=MatchKL(budget)))
        assert sum(passes) <= 9 * 300, passes


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    "kind", ["kl", "entropy, causal", "softcap and float mask", "bias", "ALiBi", "bias and float mask"]
)
def test_gradients(kind, backend):
    if backend == "native":
        pytest.importorskip("regard._native")
    q, k, v = draw(1, 1, 2, 3, 2), draw(2, 1, 1, 4, 2), draw(3, 1, 1, 4, 2)
    leaves = {"q": q, "k": k, "v": v, "budget": torch.tensor([[[[0.12]], [[0.2]]]], dtype=D)}
    if "mask" in kind:
        leaves["mask"] = draw(4, 3, 4)
    if kind.startswith("bias"):
        leaves["bias"] = 0.5 * draw(5, 2, 1, 4)
    if kind == "ALiBi":
        leaves["slopes"] = torch.tensor([0.1, 0.3], dtype=D)
    if kind.startswith("entropy"):
        leaves["budget"] = torch.tensor([[[[0.5]], [[0.3]]]], dtype=D)  # the first row has one key

    def outcome(*tensors):
        given = dict(zip(leaves, tensors, strict=True))
        prior = Bias(given["bias"]) if "bias" in given else None
        if "slopes" in given:
            prior = ALiBi(given["slopes"], "bottom_right")
        rule = (MatchEntropy if kind.startswith("entropy") else MatchKL)(given["budget"])
        out, aux = regard.attention(
            given["q"],
            given["k"],
            given["v"],
            given.get("mask"),
            is_causal="causal" in kind,
            enable_gqa=True,
            softcap=2.0 if "softcap" in kind else None,
            problem=Transport(prior=prior, temperature=rule),
            return_aux=AuxRequest(entropy=True),
            backend=backend,
        )
        return out, aux.entropy

    inputs = tuple(t.requires_grad_() for t in leaves.values())
    assert torch.autograd.gradcheck(outcome, inputs, atol=1e-6, rtol=1e-4, fast_mode=True)


def test_gradients_of_solve():
    scores, budget, bias = draw(1, 3, 5), torch.full((3, 1), 0.2, dtype=D), 0.3 * draw(2, 5)

    def weights(scores, budget, bias):
        return regard.solve(scores, Transport(prior=Bias(bias), temperature=MatchKL(budget))).weights

    assert torch.autograd.gradcheck(weights, tuple(t.requires_grad_() for t in (scores, budget, bias)), atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_at_a_limit_have_clean_gradients(dtype):
    """Early causal rows cannot meet the budget. Their values get a gradient, their queries and keys get none."""
    q, k, v = (draw(n, 1, 2, 40, 8, dtype=dtype).requires_grad_() for n in range(3))
    budget = torch.tensor(2.0, dtype=D, requires_grad=True)
    out = regard.attention(q, k, v, is_causal=True, problem=Transport(temperature=MatchKL(budget)))
    early = torch.autograd.grad(out[:, :, :6].float().square().sum(), (q, k, v, budget), retain_graph=True)
    assert all(g.abs().max() < 1e-5 for g in (early[0], early[1])) and early[3] == 0
    chosen = torch.nn.functional.one_hot(
        (q.float() @ k.float().mT)[:, :, :6].masked_fill(torch.ones(6, 40).tril() == 0, -math.inf).argmax(-1), 40
    )
    expected = chosen.float().mT @ (2 * out[:, :, :6].float())
    assert torch.allclose(early[2].float(), expected, rtol=2e-2, atol=1e-5)
    everything = torch.autograd.grad(out.float().square().sum(), (q, k, v, budget))
    assert all(g.isfinite().all() for g in everything) and everything[3] != 0
    no_keys = torch.zeros(40, 40, dtype=torch.bool)
    no_keys[5:, 3] = True
    for rule in (MatchKL(0.5), MatchKL(0.0), MatchEntropy(0.5)):
        out = regard.attention(q, k, v, attn_mask=no_keys, problem=Transport(temperature=rule))
        assert (out[:, :, :5] == 0).all() and torch.equal(out[:, :, 5:], v[:, :, 3:4].expand(-1, -1, 35, -1))
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().sum(), (q, k, v)))


def test_float32_gradients_agree_with_float64():
    """For rows that meet their budget and rows at a limit, under priors with and without weights."""
    for prior in (Causal(), Causal() * ALiBi(0.3)):
        found = []
        for dtype, backend in ((torch.float32, "auto"), (D, "torch")):
            q, k, v = (draw(n, 1, 2, 40, 8, dtype=torch.float32).to(dtype).requires_grad_() for n in range(3))
            out = regard.attention(q, k, v, problem=Transport(prior=prior, temperature=MatchKL(1.0)), backend=backend)
            found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
        for mine, exact in zip(*found, strict=True):
            assert (
                (mine - exact).abs().max() / exact.abs().max()
            ) < 5e-4  # rows nearly at their limit amplify rounding


def test_dropout_keeps_its_mask():
    q, k, v = (draw(n, 1, 2, 20, 8).requires_grad_() for n in range(3))
    problem = Transport(temperature=MatchKL(1.0))
    outs = []
    for backend in ("auto", "torch"):
        torch.manual_seed(0)
        out = regard.attention(q, k, v, is_causal=True, dropout_p=0.3, problem=problem, backend=backend)
        outs.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    assert all(torch.allclose(a, b, atol=1e-8) for a, b in zip(*outs, strict=True))


def test_reading_single_weights():
    (q, k, v), options, prior = arguments("gqa, window", torch.float32, 30)
    problem = Transport(prior=prior, temperature=MatchKL(0.7))
    index = torch.arange(30).expand(2, 4, 30, 30)
    weights = regard.weights_at(q, k, index, problem=problem, **options)
    values = v.repeat_interleave(2, 1)
    out = regard.attention(q, k, v, problem=problem, **options)
    assert torch.allclose(weights @ values, out, atol=1e-5)
    top, keys = regard.topk(q, k, 3, problem=problem, **options)
    assert torch.allclose(weights.gather(-1, keys), top, atol=1e-6)
    assert torch.allclose(top, weights.topk(3).values, atol=1e-6)
    pooled = regard.block_mass(q, k, 10, problem=problem, **options)
    assert torch.allclose(pooled, weights.unflatten(2, (3, 10)).unflatten(4, (3, 10)).sum(-1).mean(3), atol=1e-5)


def test_backends_and_errors():
    q, k, v = (draw(n, 1, 2, 6, 4) for n in range(3))
    problem = Transport(temperature=MatchKL(0.5))
    choice = regard.select_backend(q, k, v, problem=problem)
    assert choice.backend in ("native", "torch")
    with pytest.raises(NotImplementedError, match=r"sdpa.*kl, score_variance"):
        regard.attention(q, k, v, problem=problem, backend="sdpa")
    for regularizer, marginal in ((Tsallis(1.5), None), (FermiDirac(), Rows(mass=2.0)), (None, Rows(sink=0.0))):
        with pytest.raises(ValueError, match="MatchKL expects KL"):
            Transport(regularizer, marginal=marginal, temperature=MatchKL(1.0))
    with pytest.raises(ValueError, match="MatchEntropy expects a prior of 0 and 1"):
        Transport(prior=Causal() * ALiBi(0.1), temperature=MatchEntropy(1.0))
    with pytest.raises(ValueError, match="MatchEntropy expects a prior of 0 and 1"):
        regard.attention(q, k, v, problem=Transport(prior=Bias(draw(1, 6)), temperature=MatchEntropy(1.0)))
    allowed = torch.tensor([0, 0, -math.inf, 0, 0, 0], dtype=D)
    _, aux = regard.attention(
        q, k, v, problem=Transport(prior=Bias(allowed), temperature=MatchEntropy(1.0)), return_aux=REQUEST
    )
    assert torch.allclose(aux.entropy, torch.ones_like(aux.entropy))
    with pytest.raises(ValueError, match=r"MatchKL\(budget\).*finite"):
        MatchKL(math.nan)
    with pytest.raises(TypeError, match=r"MatchEntropy\(budget\)"):
        MatchEntropy("one")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"MatchKL\(budget\): expected a number or a shape"):
        regard.attention(q, k, v, problem=Transport(temperature=MatchKL(torch.ones(5, 1, 1))))
    with pytest.raises(ValueError, match=r"MatchKL\(budget\): expected finite numbers, got nan"):
        regard.attention(q, k, v, problem=Transport(temperature=MatchKL(torch.tensor(math.nan))))
    assert repr(problem) == "Transport(KL(), temperature=MatchKL(0.5))"
    assert problem == Transport(temperature=MatchKL(0.5)) and hash(problem) == hash(Transport(temperature=MatchKL(0.5)))
    assert problem != Transport(temperature=MatchEntropy(0.5))
    tensor = torch.tensor(0.5)
    assert torch.utils._pytree.tree_leaves(Transport(temperature=MatchKL(tensor))) == [tensor]


def test_transforms():
    q, k, v = (draw(n, 1, 2, 6, 4) for n in range(3))
    budget = torch.tensor(0.6, dtype=D)

    def loss(q, k, v, budget):
        return regard.attention(q, k, v, is_causal=True, problem=Transport(temperature=MatchKL(budget))).square().sum()

    leaves = [t.clone().requires_grad_() for t in (q, k, v, budget)]
    expected = torch.autograd.grad(loss(*leaves), leaves, create_graph=False)
    for found in (
        torch.func.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, budget),
        torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), leaves),
    ):
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, expected, strict=True))
    (gradient,) = torch.autograd.grad(loss(*leaves), leaves[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.autograd.grad(gradient.sum(), leaves[0])
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.func.vmap(lambda q: loss(q, k, v, budget))(torch.stack([q, q]))
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(lambda q: loss(q, k, v, budget), (q,), (q,))


@reads_peak
def test_memory_is_linear():
    """T = 16k: the matrix of one head would take 1 GiB."""
    pytest.importorskip("regard._native")
    script = """
        import torch, regard
        from regard import AuxRequest, MatchKL, Transport
        q, k, v = (torch.randn(1, 1, 64, 8) for _ in range(3))
        problem = Transport(temperature=MatchKL(1.0))
        regard.attention(q, k, v, problem=problem)
        before = peak()
        q, k, v = (torch.randn(1, 1, 16384, 8, requires_grad=True) for _ in range(3))
        out, aux = regard.attention(q, k, v, is_causal=True, problem=problem, return_aux=AuxRequest(kl=True))
        out.square().sum().backward()
        assert (aux.kl[..., 16:] - 1).abs().max() < 1e-4, (aux.kl[..., 16:] - 1).abs().max()
        assert q.grad.isfinite().all() and k.grad.abs().max() > 0
        print(peak() - before)
    """
    result = subprocess.run([sys.executable, "-c", PEAK + textwrap.dedent(script)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 0 < float(result.stdout) < 200


# --- the path ---------------------------------------------------------------------------------------------------------


@modest
@given(seeds, st.integers(2, 12), st.floats(0.2, 3.0), st.booleans())
def test_slopes_of_the_path(seed, n, tau, weighted):
    """dKL/d ln beta = Var for any prior, dH/d ln tau = Var for 0/1 priors; E[s] and value by tau: the value's is -D."""
    scores, log_prior = draw(seed, 3, n), draw(seed + 1, n) * weighted
    problem = Transport(prior=Bias(log_prior))
    temperature = torch.tensor([tau], dtype=D, requires_grad=True)
    path = regard.path(scores, temperature, problem)

    def by_log_tau(x):
        return torch.stack([torch.autograd.grad(row, temperature, retain_graph=True)[0][0] for row in x[0]]) * tau

    assert torch.allclose(by_log_tau(path.kl), -path.variance[0], atol=1e-9)
    assert torch.allclose(by_log_tau(path.expected_score), -tau * path.variance[0], atol=1e-9)
    divergence = path.kl - log_prior.logsumexp(-1)
    assert torch.allclose(by_log_tau(path.value), -tau * divergence[0], atol=1e-9)
    if not weighted:
        assert torch.allclose(by_log_tau(path.entropy), path.variance[0], atol=1e-9)


@modest
@given(seeds, st.integers(2, 12), st.sampled_from([None, Tsallis(1.5), Tsallis(2.0)]))
def test_the_expected_score_falls_with_the_temperature(seed, n, regularizer):
    scores = draw(seed, 2, n).requires_grad_()
    path = regard.path(scores, [0.0, 0.01, 0.3, 1.0, 5.0, 1e6], Transport(regularizer, temperature=7.0))
    assert path.kl.shape == (6, 2) and path.temperature.tolist() == [0.0, 0.01, 0.3, 1.0, 5.0, 1e6]
    assert (path.expected_score.diff(dim=0) <= 1e-9).all()
    assert torch.allclose(path.expected_score[0], scores.amax(-1)) and torch.allclose(path.value[0], scores.amax(-1))
    assert (path.entropy[0] == 0).all() and (path.variance[0] == 0).all()
    assert torch.allclose(path.expected_score[-1], scores.mean(-1), atol=1e-4)
    assert torch.allclose(path.entropy[-1], torch.full((2,), math.log(n), dtype=D), atol=1e-6)
    (gradient,) = torch.autograd.grad(path.value[3].sum(), scores)
    plan = regard.solve(scores, Transport(regularizer)).weights
    assert torch.allclose(gradient, plan, atol=1e-9)


def test_path_errors():
    with pytest.raises(ValueError, match=r"temperatures: expected n numbers, \[n\]"):
        regard.path(draw(1, 4), torch.tensor(1.0))
    with pytest.raises(ValueError, match="temperature"):
        regard.path(draw(1, 4), [1.0, -1.0])
    assert regard.path(draw(1, 3, 4), []).kl.shape == (0, 3)


@pytest.mark.parametrize("budget", [1e-6, 1e-3, 0.3, 1.0])
def test_weighted_priors_in_float32(budget):
    """Plan and gradient in float32 against the reference in float64, with rows of one key and budgets out of reach."""
    torch.manual_seed(0)
    q, k, v, weight = (torch.randn(2, 4, 12, 8) for _ in range(4))
    slopes = torch.tensor([0.5, 1.0, 2.0, 4.0])
    found = {}
    for name, dtype, backend in (("found", torch.float32, "auto"), ("truth", torch.float64, "torch")):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        problem = Transport(prior=Causal() * ALiBi(slopes.to(dtype)), temperature=MatchKL(budget))
        out, aux = regard.attention(*leaves, problem=problem, return_aux=AuxRequest(kl=True), backend=backend)
        found[name] = (aux.kl, *torch.autograd.grad((out * weight.to(dtype)).sum(), leaves))
    for n, (got, expected) in enumerate(zip(*found.values(), strict=True)):
        bound = 1e-4 if n == 0 else 1e-4 * expected.abs().max()
        assert (got - expected).abs().max() < bound, (n, (got - expected).abs().max(), bound)


def test_a_common_offset_does_not_matter():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 8, dtype=torch.float64) for _ in range(3))
    problem = Transport(prior=Bias(torch.randn(8, 8, dtype=torch.float64)), temperature=MatchKL(0.8))
    offset = torch.full((8, 8), 1e3, dtype=torch.float64)
    kl = [
        regard.attention(q, k, v, m, scale=1e-4, problem=problem, return_aux=AuxRequest(kl=True))[1].kl
        for m in (None, offset)
    ]
    assert torch.allclose(*kl, atol=1e-4)
