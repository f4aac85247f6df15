"""The geometry of a plan: each theorem on random inputs from Hypothesis, each streaming function against its dense
definition."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import regard
from regard import KL, AuxRequest, Bias, Causal, Documents, FermiDirac, Free, Rows, Transport, Tsallis
from regard import geometry as geo
from regard.backends import BACKENDS, reference
from support.cases import CASES, build, custom
from support.memory import PEAK, reads_peak
from support.reference import truth

OWN = custom()
REGULARIZERS = [KL(), Tsallis(1.2), Tsallis(1.5), Tsallis(2.0), Tsallis(3.0), FermiDirac(), OWN]
MARGINALS = [Rows(), Rows(mass=2.5), Rows(sink=0.3), Rows(relax=0.8), Free(0.4)]
every_problem = pytest.mark.parametrize(
    "problem",
    [Transport(r, marginal=m, temperature=0.7) for r in REGULARIZERS for m in MARGINALS],
    ids=lambda p: f"{type(p.regularizer).__name__} {getattr(p.regularizer, 'alpha', '')} {p.marginal}",
)
few = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
sizes = st.integers(2, 9)


def draw(seed, *shape, scale=2.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def problems(choose, marginals=MARGINALS, n=9):
    """Every regularizer and marginal; no prior, or one with a masked key; one temperature, or one for each head."""
    seed = choose(seeds)
    log_prior = draw(seed, n, scale=1.0)
    log_prior[seed % n] = -math.inf
    tau = choose(st.floats(0.3, 3.0))
    per_head = torch.tensor([[[tau]], [[1.0]]], dtype=torch.float64)
    return Transport(
        choose(st.sampled_from(REGULARIZERS)),
        prior=choose(st.sampled_from([None, Bias(log_prior)])),
        marginal=choose(st.sampled_from(marginals)),
        temperature=choose(st.sampled_from([tau, per_head])),
    )


def tau_of(problem):
    """The temperature as [H, 1, 1, 1] (or a number)."""
    tau = problem.temperature
    return tau[..., None] if isinstance(tau, torch.Tensor) else tau


def smooth(scores, problem):
    """Whether no key is about to enter or leave the support, where derivatives do not exist."""
    near = [regard.solve(scores + h * draw(7, *scores.shape, scale=1.0), problem).weights > 0 for h in (-1e-4, 1e-4)]
    return bool((near[0] == near[1]).all())


def close(a, b, tolerance=1e-9):
    return a.shape == b.shape and bool(((a - b).abs() <= tolerance * (1 + b.abs().max())).all())


# --- on scores --------------------------------------------------------------------------------------------------------


@few
@given(problems(), seeds)
def test_the_policy_gradient_equals_autograd(problem, seed):
    scores, utility = draw(seed, 2, 3, 9).requires_grad_(), draw(seed + 1, 2, 3, 9)
    (expected,) = torch.autograd.grad((regard.solve(scores, problem).weights * utility).sum(), scores)
    found = geo.policy_gradient(scores.detach(), utility, problem)
    assert close(found, expected), problem
    # = tau M u
    assert close(found, (geo.potential_hessian(scores.detach(), problem) @ utility[..., None]).squeeze(-1)), problem


@few
@given(problems(), seeds)
def test_rows_of_the_gradient_sum_to_zero_exactly_when_kappa_is_zero(problem, seed):
    scores, utility = draw(seed, 2, 3, 9), draw(seed + 1, 2, 3, 9).abs() + 0.1
    gradient = geo.policy_gradient(scores, utility, problem)
    total, marginal = gradient.sum(-1), problem.marginal
    if isinstance(marginal, Rows) and marginal.relax is None and marginal.sink is None:
        assert (total.abs() <= 1e-12 * (1 + gradient.abs().sum(-1))).all()
    elif isinstance(problem.regularizer, KL | FermiDirac) or not isinstance(marginal, Rows) or marginal.relax:
        moves = (regard.solve(scores, problem).weights > 0).any(-1)  # free rows may be empty
        assert (total[moves] > 0).all()  # kappa b, with b > 0


def test_advantage():
    weights, utility = draw(0, 5, 8).softmax(-1), draw(1, 5, 8)
    found = geo.advantage(weights, utility)
    assert close(found, utility - (weights * utility).sum(-1, keepdim=True), 1e-14)
    assert (weights * found).sum(-1).abs().max() < 1e-14
    assert close(geo.advantage(3 * weights, utility), found, 1e-14)
    assert torch.equal(geo.advantage(torch.zeros(4), torch.arange(4.0)), torch.arange(4.0))
    # The utility of a key of weight 0 does not affect the others.
    assert torch.equal(
        geo.advantage(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1.0, 3.0, math.nan]))[:2], torch.tensor([-1.0, 1.0])
    )
    p = weights.log()
    assert close(geo.policy_gradient(p, utility, None), weights * found, 1e-12)


@settings(few, max_examples=20)
@given(problems(n=4), seeds)
def test_the_hessian_of_the_potential(problem, seed):
    scores = draw(seed, 2, 1, 4)
    assume(smooth(scores, problem))
    eye = torch.eye(4, dtype=torch.float64)

    def potential(s):
        request = AuxRequest(value=True)
        return regard.attention(
            s[None], eye[None, None], eye[None, None], scale=1.0, problem=problem, return_aux=request
        )[1].value.sum()

    expected = torch.func.hessian(potential)(scores)  # [2, 1, 4, 2, 1, 4]; rows are independent
    expected = torch.stack([expected[h, 0, :, h, 0] for h in range(2)])[:, None]
    assert close(geo.potential_hessian(scores, problem), expected, 1e-7), problem


@few
@given(seeds, sizes, st.floats(0.3, 3))
def test_fisher_is_the_hessian_of_lse_and_the_potentials_is_tau_times_it(seed, n, tau):
    scores = draw(seed, n)
    p, problem = (scores / tau).softmax(-1), Transport(temperature=tau)
    information = geo.fisher(p, tau)
    assert close(information, torch.func.hessian(lambda s: (s / tau).logsumexp(-1))(scores), 1e-12)
    assert close(geo.potential_hessian(scores, problem), tau * information, 1e-12)
    assert close(information.diagonal().sum(), (1 - p.square().sum()) / tau**2, 1e-12)
    # ... and the covariance of the score function
    score = (torch.eye(n, dtype=torch.float64) - p) / tau
    assert close(information, torch.einsum("j,ja,jb->ab", p, score, score), 1e-12)


def test_fisher_with_a_temperature_per_row():
    p, tau = draw(0, 3, 4, 5).softmax(-1), draw(1, 3, 1, 1).exp()
    assert close(geo.fisher(p, tau), torch.stack([geo.fisher(p[i], float(tau[i])) for i in range(3)]), 1e-14)


@few
@given(problems([Rows(), Rows(mass=2.5)]), seeds)
def test_the_rank_of_the_metric_is_the_support_less_one(problem, seed):
    scores = draw(seed, 2, 3, 9)
    weights = regard.solve(scores, problem).weights
    gradient = geo.potential_hessian(scores, problem)
    for matrix, p in zip(gradient.reshape(-1, 9, 9), weights.reshape(-1, 9), strict=True):
        support = p > 0
        moves = matrix.diagonal() > 0
        if not moves.any():  # one key, or all are full
            assert matrix.abs().max() == 0
            continue
        inside = matrix[support][:, support]
        rates = geo.policy_gradient(scores, torch.ones_like(scores), problem)  # of a constant: 0, as it must be
        assert rates.abs().max() < 1e-9
        scaled = inside / inside.diagonal().sqrt()[:, None] / inside.diagonal().sqrt()  # rank does not change
        assert torch.linalg.matrix_rank(scaled, tol=1e-7) == support.sum() - 1
        assert (matrix[~support] == 0).all()


@few
@given(problems(), seeds)
def test_the_natural_gradient_is_the_pseudoinverse_of_the_metric(problem, seed):
    scores, utility = draw(seed, 2, 3, 9, scale=1.0), draw(seed + 1, 2, 3, 9)
    hessian = geo.potential_hessian(scores, problem)
    # Only a well-conditioned metric has a pseudoinverse that can be computed.
    values = torch.linalg.eigvalsh(hessian).abs()
    top = values.amax(-1, keepdim=True)
    assume(bool(((values > 1e-6 * top) | (values < 1e-13 * top) | (top == 0)).all()))
    metric = hessian / tau_of(problem)
    gradient = geo.policy_gradient(scores, utility, problem)
    expected = (torch.linalg.pinv(metric, rtol=1e-9, hermitian=True) @ gradient[..., None]).squeeze(-1)
    found = geo.natural_gradient(scores, utility, problem)
    assert close(found, expected, 1e-6), problem
    # tau u up to a constant per row, on the support
    support = found != 0
    tau = problem.temperature * torch.ones(2, 3, 1, dtype=torch.float64)
    constant = torch.where(support, found - tau * utility, math.nan)
    spread = constant.nan_to_num(nan=-math.inf).amax(-1) - constant.nan_to_num(nan=math.inf).amin(-1)
    assert (spread[support.any(-1)] < 1e-9).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_natural_gradient_does_not_vanish_with_saturation(dtype):
    utility = torch.tensor([1.0, -2.0, 0.5], dtype=dtype)
    for height in (0.0, 10.0, 1000.0):
        scores = torch.tensor([height, 0.0, 0.0], dtype=dtype)
        plain, natural = geo.policy_gradient(scores, utility), geo.natural_gradient(scores, utility)
        assert torch.allclose(natural, utility - utility.mean())
    assert plain.abs().max() == 0  # the plain gradient vanishes
    # exact zeros of entmax stay 0
    assert torch.equal(
        geo.natural_gradient(torch.tensor([5.0, 5.1, 0.0]), torch.tensor([1.0, 3.0, 7.0]), Transport(Tsallis(2.0))),
        torch.tensor([-1.0, 1.0, 0.0]),
    )


def enumerated(scores, utility, problem, baseline):
    """Mean and total variance of the estimate from one draw, by a sum over all outcomes; for one row."""
    tau, hessian = problem.temperature, geo.potential_hessian(scores, problem)
    free = isinstance(problem.marginal, Free)
    if free:
        rates, total = hessian.diagonal(), hessian.diagonal().sum()
    else:  # dp/ds = diag r - r r^T/R gives both: rows sum to r (R - sum r)/R
        plan = regard.solve(scores, problem)
        t = (scores - plan.dual) / tau
        rates = problem.regularizer.slope(t - problem.regularizer.origin) / tau
        rates = torch.where(plan.weights > 0, rates, 0.0)
        marginal, slack = problem.marginal, 0.0
        if marginal.sink is not None:
            null = (torch.tensor(marginal.sink, dtype=torch.float64) - plan.dual) / tau - problem.regularizer.origin
            slack = problem.regularizer.slope(null) / tau
        elif marginal.relax is not None:
            slack = (plan.dual / marginal.relax).exp() / marginal.relax
        total = rates.sum() + slack
    rho = rates / total
    b = (rho * utility).sum() if baseline and not free else 0.0
    n = len(scores)
    draws = [total * (utility[j] - b) * (torch.eye(n, dtype=torch.float64)[j] - (0 if free else rho)) for j in range(n)]
    draws.append(total * (0 - b) * -rho)  # no key
    chances = torch.cat([rho, (1 - rho.sum()).clamp(min=0)[None]])
    draws = torch.stack(draws)
    mean = (chances[:, None] * draws).sum(0)
    return mean, (chances[:, None] * (draws - mean) ** 2).sum()


@every_problem
@pytest.mark.parametrize("baseline", [True, False])
def test_the_sampled_gradient_is_unbiased_and_has_the_reported_variance(problem, baseline):
    scores, utility = draw(3, 6, scale=0.5), draw(4, 6) + 1
    exact = geo.policy_gradient(scores, utility, problem)
    mean, variance = enumerated(scores, utility, problem, baseline)
    assert close(mean, exact, 1e-10)
    samples = 40000
    generator = torch.Generator().manual_seed(0)
    found, measured = geo.sampled_policy_gradient(scores, utility, problem, samples, baseline, generator)
    assert (found - exact).norm() <= 4 * (variance / samples).sqrt()
    assert abs(measured - variance) <= 0.1 * variance


def test_the_sampled_gradient_of_softmax_is_reinforce():
    """The draws themselves, one at a time: (u_J - b) times the gradient of log p_J."""
    scores, utility, tau = draw(0, 5, scale=0.5), draw(1, 5), 0.6
    log_p = (scores / tau).log_softmax(-1)
    b = (log_p.exp() * utility).sum()
    per_key = torch.func.jacrev(lambda s: (s / tau).log_softmax(-1))(scores)
    singles = []
    for seed in range(200):
        single, variance = geo.sampled_policy_gradient(
            scores, utility, Transport(temperature=tau), 1, generator=torch.Generator().manual_seed(seed)
        )
        assert variance.isnan()
        singles.append(single)
        assert any(close(single, (utility[j] - b) * per_key[j], 1e-12) for j in range(5))
    many = torch.stack(singles)
    generator = torch.Generator().manual_seed(0)
    _, measured = geo.sampled_policy_gradient(
        scores.expand(200, 5), utility, Transport(temperature=tau), 500, generator=generator
    )
    assert abs(many.var(0).sum() / measured.mean() - 1) < 0.3


def test_a_baseline_may_raise_the_variance():
    """The counterexample of theory.md, section 3; and usually a baseline lowers the variance."""
    p, u = torch.tensor([0.9, 0.1], dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)
    variances = []
    for baseline, expected in ((False, 0.0018), (True, 0.1152)):
        assert abs(enumerated(p.log(), u, Transport(), baseline)[1] - expected) < 1e-12
        generator = torch.Generator().manual_seed(1)
        _, variance = geo.sampled_policy_gradient(p.log(), u, None, 400000, baseline, generator)
        assert abs(variance / expected - 1) < 0.05
        variances.append(variance)
    assert variances[0] < variances[1]
    scores, utility = draw(0, 100, 8, scale=1.0), draw(1, 100, 8) + 3
    with_it, without = (geo.sampled_policy_gradient(scores, utility, None, 4000, b)[1] for b in (True, False))
    assert (with_it < without).double().mean() > 0.9


def test_rows_without_keys_and_nan_in_masked_utilities():
    scores = torch.tensor([[0.0, 1.0, -math.inf], [-math.inf] * 3])
    utility = torch.tensor([1.0, 2.0, math.nan])
    for problem in (
        Transport(),
        Transport(Tsallis(1.5)),
        Transport(marginal=Rows(sink=0.0)),
        Transport(marginal=Free()),
    ):
        for found in (
            geo.policy_gradient(scores, utility, problem),
            geo.natural_gradient(scores, utility, problem),
            *geo.sampled_policy_gradient(scores, utility, problem, 16, generator=torch.Generator().manual_seed(0)),
            geo.potential_hessian(scores, problem),
        ):
            assert found.isfinite().all() and (found[1] == 0).all() and found[0].abs().max() > 0
            assert (found[..., 2] == 0).all() if found.dim() > 1 else True
    assert geo.policy_gradient(torch.zeros(3, 0), torch.zeros(3, 0)).shape == (3, 0)


# --- on queries and keys ----------------------------------------------------------------------------------------------


def dense_scores(built):
    """Scores with all masks applied, keys for each query head, the scale and the problem."""
    arguments = dict(built.arguments)
    q, k = built.query.detach(), built.key.detach()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scale = arguments.get("scale") or 1 / math.sqrt(q.shape[-1])
    s = q @ k.mT * scale
    mask = arguments.get("attn_mask")
    if mask is not None:
        mask = mask.detach()
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    if arguments.get("is_causal"):
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return s, k, scale, arguments.get("problem")


UNCAPPED = [c for c in CASES if not any(word in c.name for word in ("softcap", "cosine", "euclidean"))]


@pytest.mark.parametrize("case", UNCAPPED, ids=lambda c: c.name)
def test_products_equal_their_dense_definition(case):
    built = build(case)
    s, k, scale, problem = dense_scores(built)
    t = draw(5, *built.query.shape)
    hessian = geo.potential_hessian(s, problem)
    along = torch.einsum("bhjd,bhid->bhij", k, t)
    expected = scale**2 * torch.einsum("bhij,bhjd->bhid", torch.einsum("bhijl,bhil->bhij", hessian, along), k)
    found = geo.free_energy_hvp(built.query, built.key, t, **built.arguments)
    assert close(found, expected), case.name
    tau = truth(built.query, built.key, built.value, **built.arguments).tau
    assert close(geo.fisher_vector_product(built.query, built.key, t, **built.arguments), expected / tau), case.name


def test_products_use_the_native_engine(monkeypatch):
    pytest.importorskip("regard._native", reason="the native engine was not built")
    calls = []
    backward = BACKENDS["native"].backward
    monkeypatch.setattr(
        BACKENDS["native"],
        "backward",
        lambda form, needed, *rest: (calls.append(needed), backward(form, needed, *rest))[1],
    )
    q, k, t = (draw(i, 1, 2, 6, 4).float() for i in range(3))
    for problem in (None, Transport(Tsallis(1.5), temperature=torch.full((2, 1, 1), 0.5))):
        geo.fisher_vector_product(q, k, t, problem, is_causal=True)
        geo.free_energy_hvp(q, k, t, problem)
    assert calls == [("query",)] * 4  # no other gradient is computed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_at_lower_precision(dtype):
    q, k, t = (draw(i, 2, 2, 9, 8, scale=1.0).to(dtype) for i in range(3))
    found = geo.fisher_vector_product(q, k, t, Transport(temperature=0.5))
    expected = geo.fisher_vector_product(q.double(), k.double(), t.double(), Transport(temperature=0.5))
    assert found.dtype == dtype
    assert close(found.double(), expected, 1e-5 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize(
    "problem", [Transport(), Transport(Tsallis(1.5), temperature=0.6), Transport(marginal=Free(0.1))]
)
def test_the_hvp_is_that_of_the_free_energy(problem):
    q, k, t = draw(0, 1, 2, 3, 4, scale=1.0), draw(1, 1, 2, 5, 4, scale=1.0), draw(2, 1, 2, 3, 4)

    def free_energy(a):
        return regard.attention(a, k, k, problem=problem, return_aux=AuxRequest(value=True))[1].value.sum()

    _, expected = torch.func.jvp(torch.func.grad(free_energy), (q,), (t,))
    assert close(geo.free_energy_hvp(q, k, t, problem), expected, 1e-10)


def test_products_are_differentiable_and_keep_the_callers_shape():
    q, k, t = (draw(i, 3, 4).requires_grad_() for i in range(3))
    assert torch.autograd.gradcheck(lambda *a: geo.fisher_vector_product(*a), (q, k, t), fast_mode=True)
    five = [draw(i, 2, 3, 2, 4, 5) for i in range(3)]
    folded = [x.flatten(0, 1) for x in five]
    tau = draw(9, 6, 1, 4, 1).exp()
    for problem in (None, Transport(temperature=tau)):
        found = geo.fisher_vector_product(*five, problem)
        assert torch.equal(found.flatten(0, 1), geo.fisher_vector_product(*folded, problem))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_jvp_is_the_adjoint_of_the_gradient(case):
    """<g, J t> = <J^T g, t>, checked against the backward pass, which has a formula of its own."""
    built = build(case)
    tangents = [draw(i, *x.shape, scale=1.0) for i, x in enumerate((built.query, built.key, built.value))]
    inputs = [x.detach().requires_grad_() for x in (built.query, built.key, built.value)]
    expected = regard.attention(*inputs, **built.arguments)
    g = draw(8, *expected.shape, scale=1.0)
    gradients = torch.autograd.grad(expected, inputs, g)
    with torch.no_grad():
        out, tangent = geo.jvp(*inputs, tuple(tangents), **built.arguments)
        assert torch.equal(out, expected)  # from the same backend
        pairs = [(x * t).sum() for x, t in zip(gradients, tangents, strict=True)]
        assert close((g * tangent).sum(), sum(pairs), 1e-9)
        for i in range(3):
            one = [t if i == n else None for n, t in enumerate(tangents)]
            assert close((g * geo.jvp(*inputs, tuple(one), **built.arguments)[1]).sum(), pairs[i], 1e-9)


def test_jvp_without_tangents():
    q, k, v = (draw(i, 1, 2, 3, 4) for i in range(3))
    out, tangent = geo.jvp(q, k, v, (None, None, None))
    assert torch.equal(out, regard.attention(q, k, v)) and torch.equal(tangent, torch.zeros_like(out))


# --- natural attention ------------------------------------------------------------------------------------------------


def natural_scores(scores, utility, problem, damping):
    """What natural_attention gives to the scores: with one-hot keys the query is the scores."""
    n = scores.shape[-1]
    eye = torch.eye(n, dtype=scores.dtype).expand(*scores.shape[:-2], n, n)
    query = scores.clone().requires_grad_()
    out = geo.natural_attention(query, eye, eye, damping=damping, scale=1.0, problem=problem)
    return torch.autograd.grad(out, query, utility)[0]


@few
@given(problems(), seeds, st.floats(-4, 3))
def test_natural_attention_solves_the_damped_metric(problem, seed, log_damping):
    scores, utility, damping = draw(seed, 2, 3, 9), draw(seed + 1, 2, 3, 9), 10**log_damping
    hessian, gradient = geo.potential_hessian(scores, problem), geo.policy_gradient(scores, utility, problem)
    metric = hessian / tau_of(problem) + damping * torch.eye(9, dtype=torch.float64)
    expected = torch.linalg.solve(metric, gradient[..., None]).squeeze(-1)
    assert close(natural_scores(scores, utility, problem, damping), expected, 1e-8), problem


@every_problem
def test_natural_attention_at_large_and_small_damping(problem):
    scores, utility = draw(0, 1, 3, 6, scale=0.5), draw(1, 1, 3, 6)
    plain = geo.policy_gradient(scores, utility, problem)
    assert close(1e9 * natural_scores(scores, utility, problem, 1e9), plain, 1e-6)
    natural = geo.natural_gradient(scores, utility, problem)
    assert close(natural_scores(scores, utility, problem, 1e-20), natural, 1e-5)


@pytest.mark.parametrize("problem", [None, Transport(Tsallis(1.5), prior=Causal(), temperature=0.7)])
def test_natural_attention_passes_the_scores_gradient_on(problem):
    q, k, v = (draw(i, 2, 3, 7, 4, scale=1.0).requires_grad_() for i in range(3))
    g, damping = draw(5, 2, 3, 7, 4), 0.05
    out = geo.natural_attention(q, k, v, damping=damping, problem=problem)
    plain = regard.attention(q, k, v, problem=problem)
    assert torch.equal(out, plain)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), g)
    assert close(dv, torch.autograd.grad(plain, v, g)[0], 1e-12)
    scores = (q @ k.mT / 2).detach()
    ds = natural_scores(scores, g @ v.detach().mT, problem, damping)
    assert close(dq, ds @ k / 2, 1e-12) and close(dk, ds.mT @ q / 2, 1e-12)
    some = torch.autograd.grad(geo.natural_attention(q.detach(), k, v.detach(), damping=damping, problem=problem), k, g)
    assert close(some[0], dk, 1e-14)
    gradient = torch.func.grad(lambda a: (geo.natural_attention(a, k, v, damping=damping, problem=problem) * g).sum())
    assert close(gradient(q.detach()), dq, 1e-14)


def test_natural_attention_near_one_hot():
    """In float32, where 1 - p has no digits left, every key's result agrees with float64."""
    scores = torch.tensor([[[18.0, 0.0, 1.0, -3.0]]])
    utility = torch.tensor([[[0.3, 1.0, -0.7, 2.0]]])
    for damping in (1e-12, 1e-6, 1e-3, 1.0, 1e3):
        exact = natural_scores(scores.double(), utility.double(), None, damping)
        found = natural_scores(scores, utility, None, damping)
        assert ((found - exact).abs() <= 1e-5 * exact.abs()).all(), damping


def test_natural_attention_in_blocks(monkeypatch):
    q, k, v = (draw(i, 2, 2, 40, 4, scale=1.0).requires_grad_() for i in range(3))
    results = []
    for block in (2**21, 200):
        monkeypatch.setattr(reference, "BLOCK", block)
        out = geo.natural_attention(q, k, v, damping=0.1, is_causal=True)
        results.append(torch.autograd.grad(out.sin().sum(), (q, k, v)))
    assert all(close(a, b, 1e-12) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("regularizer", [KL(), Tsallis(1.5), FermiDirac(), OWN], ids=lambda r: type(r).__name__)
def test_empty_rows_and_nan_in_masked_keys_do_not_spread(regularizer, dtype):
    """Query 5 has no admissible key; keys 4 and 5, which are masked for every query, hold NaN and inf."""
    problem = Transport(
        regularizer, prior=Documents(torch.tensor([0, 0, 0, 1, -1, -1]), torch.tensor([0, 0, 1, 1, 7, -1]))
    )
    q, k, v, t = (draw(i, 1, 2, 6, 4, scale=0.7).to(dtype) for i in range(4))
    q[:, :, 5] = math.nan
    for x in (k, v):
        x[:, :, 4], x[:, :, 5] = math.nan, math.inf
    products = [geo.fisher_vector_product(q, k, t, problem), geo.free_energy_hvp(q, k, t, problem)]
    dk, dv = t.clone(), t.clone()
    dk[:, :, 4:], dv[:, :, 4:] = math.nan, math.nan
    products.append(geo.jvp(q, k, v, (t, dk, dv), problem)[1])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = geo.natural_attention(*leaves, damping=0.1, problem=problem)
    gradients = torch.autograd.grad(out.sum(), leaves)
    for found in (*products, out, *gradients):
        assert found.isfinite().all() and found[:, :, :2].abs().max() > 0
        assert (found[:, :, 5] == 0).all()


# --- errors, memory ---------------------------------------------------------------------------------------------------


def test_errors():
    s, q = torch.zeros(3, 4), torch.zeros(1, 2, 3, 4, requires_grad=True)
    hard = Transport(temperature=0.0)
    for wrong in (
        lambda: geo.policy_gradient(s, s, hard),
        lambda: geo.natural_gradient(s, s, hard),
        lambda: geo.potential_hessian(s, hard),
        lambda: geo.sampled_policy_gradient(s, s, hard),
        lambda: geo.fisher_vector_product(q, q, q, hard),
        lambda: geo.free_energy_hvp(q, q, q, hard),
        lambda: geo.natural_attention(q, q, q, damping=1.0, problem=hard),
        lambda: geo.fisher(s, 0.0),
        lambda: geo.fisher(s, torch.tensor(math.nan)),
    ):
        with pytest.raises(ValueError, match="temperature: expected"):
            wrong()
    for damping in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="damping: expected a positive"):
            geo.natural_attention(q, q, q, damping=damping)
    with pytest.raises(TypeError, match="damping: expected a number"):
        geo.natural_attention(q, q, q, damping=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="utility: expected a shape"):
        geo.policy_gradient(s, torch.zeros(5))
    with pytest.raises(TypeError, match="scores: expected a floating"):
        geo.policy_gradient(torch.zeros(3, dtype=torch.long), torch.zeros(3))
    with pytest.raises(TypeError, match="weights: expected a floating"):
        geo.advantage([1.0], s)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="samples: expected a positive int"):
        geo.sampled_policy_gradient(s, s, None, 0)
    with pytest.raises(ValueError, match="tangent: expected shape"):
        geo.fisher_vector_product(q, q, q[..., :2])
    with pytest.raises(ValueError, match=r"tangents\[1\]: expected shape"):
        geo.jvp(q, q, q, (None, q[:, :, :1], None))
    with pytest.raises(TypeError, match="tangents: expected"):
        geo.jvp(q, q, q, (q,))  # type: ignore[arg-type]
    learned = Transport(temperature=torch.ones((), requires_grad=True))
    with pytest.raises(NotImplementedError, match="temperature"):
        geo.natural_attention(q, q, q, damping=1.0, problem=learned)
    (gradient,) = torch.autograd.grad(geo.natural_attention(q, q, q, damping=1.0).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="has no derivative"):
        gradient.sum().backward()


MEMORY = (
    PEAK
    + """
import torch, regard
from regard import Causal, Transport, Tsallis, Window
torch.set_num_threads(1)
geo, T = regard.geometry, 16384
softmax, entmax = Transport(prior=Causal()), Transport(Tsallis(1.5), prior=Causal())
near = Transport(prior=Causal() * Window(1023))  # large enough that stored weights would show, and quick

def everything(*tensors):
    q, k, v, t = tensors
    with torch.no_grad():
        geo.fisher_vector_product(q, k, t, softmax)
        geo.free_energy_hvp(q, k, t, entmax)
        geo.jvp(q, k, v, (t, None, v), near)
    geo.natural_attention(q, k, v, damping=0.1, problem=near).sum().backward()

tensors = [torch.randn(1, 1, T, 16, requires_grad=True) for _ in range(4)]
everything(*(t[:, :, :256] for t in tensors))
before = peak()
everything(*tensors)
print(peak() - before)
"""
)


@reads_peak
def test_memory_of_16k_tokens():
    """The plan alone would take 1024 MiB, and an autograd graph of the windowed plan more than 400."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert 0 < float(done.stdout) < 200, f"{done.stdout} MiB"


def test_natural_attention_with_shared_key_heads():
    torch.manual_seed(0)
    q = torch.randn(2, 4, 5, 3, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 2, 6, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    shared = regard.geometry.natural_attention(q, k, v, damping=0.1, enable_gqa=True)
    each = regard.geometry.natural_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), damping=0.1)
    weight = torch.randn_like(shared)
    for got, expected in zip(
        *(torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (shared, each)), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_fisher_raises_for_a_wrong_temperature():
    with pytest.raises(ValueError, match="temperature"):
        regard.geometry.fisher(torch.rand(2, 3, 5), torch.ones(2))
