"""Laws that hold for every problem, on inputs that Hypothesis chooses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard import KL, AuxRequest, Bias, FermiDirac, Free, Rows, Transport, Tsallis

settings.register_profile("regard", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("regard")

seeds = st.integers(0, 2**31)
sizes = st.integers(1, 24)
alphas = st.floats(1.01, 4.0)
temperatures = st.floats(0.05, 10.0)
regularizers = st.one_of(st.just(KL()), st.builds(Tsallis, alphas), st.just(FermiDirac()))
marginals = st.one_of(
    st.just(Rows()),
    st.builds(lambda b: Rows(sink=b), st.floats(-5, 5)),
    st.builds(lambda r: Rows(relax=r), st.floats(0.1, 10)),
    st.builds(lambda m: Rows(mass=m), st.floats(0.2, 5)),
    st.builds(Free, st.floats(-3, 3)),
)


def draw(seed, *shape, scale=2.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def problems(draw_from, rows_only=False):
    regularizer, tau = draw_from(regularizers), draw_from(temperatures)
    marginal = Rows() if rows_only else draw_from(marginals)
    return Transport(regularizer, marginal=marginal, temperature=tau)


@given(problems(), seeds, sizes)
def test_the_optimum_is_certified(problem, seed, n):
    """KKT and duality: no gap, the marginal met, every weight stationary."""
    prior = Bias(draw(seed + 1, n, scale=1.0))
    problem = Transport(problem.regularizer, prior=prior, marginal=problem.marginal, temperature=problem.temperature)
    plan = regard.solve(draw(seed, 3, n), problem)
    certificate = plan.certificate()
    assert certificate.holds(1e-8), f"{problem}\n{certificate}"
    assert (plan.weights >= 0).all()


@given(problems(), seeds, st.integers(2, 16))
def test_no_other_plan_is_better(problem, seed, n):
    """Weak duality: any plan that meets the marginal has primal <= dual."""
    scores = draw(seed, 4, n)
    best = regard.solve(scores, problem)
    other = best.weights * draw(seed + 1, 4, n, scale=0.5).exp()
    marginal = problem.marginal
    if isinstance(problem.regularizer, FermiDirac):
        other = other.clamp(max=1)
    if isinstance(marginal, Rows) and marginal.relax is None and marginal.sink is None:
        # A mixture of feasible plans is feasible: swap the keys' weights and mix.
        other = 0.7 * best.weights + 0.3 * best.weights.flip(-1)
    elif isinstance(marginal, Rows) and marginal.sink is not None:
        other = other / other.sum(-1, keepdim=True).clamp(min=1)
    certificate = regard.certify(scores, other, problem)
    assert (certificate.gap >= -1e-9 * (1 + certificate.dual.abs())).all()
    assert (certificate.row_residual <= 1e-9).all()


@given(problems(rows_only=True), seeds, sizes, st.floats(-100, 100))
def test_shift_invariance(problem, seed, n, shift):
    scores = draw(seed, 3, n)
    one, two = regard.solve(scores, problem), regard.solve(scores + shift, problem)
    assert torch.allclose(one.weights, two.weights, atol=1e-8)
    assert torch.allclose(one.dual + shift, two.dual, atol=1e-6)


@given(problems(), seeds, st.integers(2, 20))
def test_permutation_equivariance(problem, seed, n):
    scores, order = draw(seed, 3, n), torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    straight, permuted = regard.solve(scores, problem), regard.solve(scores[:, order], problem)
    assert torch.allclose(straight.weights[:, order], permuted.weights, atol=1e-9)


@given(regularizers, seeds, st.integers(2, 12))
def test_cold_limit_is_hard_routing(regularizer, seed, n):
    scores = draw(seed, 5, n)
    margin = scores.sort(-1).values.diff(dim=-1)[:, -1].min()
    cold = regard.solve(scores, Transport(regularizer, temperature=float(margin) / 1000)).weights
    hard = regard.solve(scores, Transport(regularizer, temperature=0.0)).weights
    assert torch.equal(hard, torch.nn.functional.one_hot(scores.argmax(-1), n).double())
    assert torch.allclose(cold, hard, atol=1e-6)


@given(seeds, st.integers(2, 12))
def test_hot_limit_is_the_prior(seed, n):
    scores, log_prior = draw(seed, 5, n), draw(seed + 1, n)
    hot = regard.solve(scores, Transport(prior=Bias(log_prior), temperature=1e9)).weights
    assert torch.allclose(hot, log_prior.softmax(-1).expand_as(hot), atol=1e-7)


@given(seeds, st.integers(2, 12), st.sampled_from([1e-6, 1e-9]))
def test_alpha_to_one_is_softmax(seed, n, distance):
    scores = draw(seed, 5, n)
    near = regard.solve(scores, Transport(Tsallis(1 + distance))).weights
    assert torch.allclose(near, scores.softmax(-1), atol=200 * distance)


@given(seeds, st.integers(2, 12))
def test_other_limits_are_softmax(seed, n):
    scores = draw(seed, 5, n)
    for marginal in (Rows(relax=1e12), Rows(sink=-1e4)):
        assert torch.allclose(regard.solve(scores, Transport(marginal=marginal)).weights, scores.softmax(-1), atol=1e-8)


@given(seeds, st.integers(2, 12))
def test_relaxed_to_zero_is_free(seed, n):
    scores = draw(seed, 5, n, scale=0.5)
    for regularizer in (KL(), Tsallis(1.5)):
        tight = regard.solve(scores, Transport(regularizer, marginal=Rows(relax=1e-9))).weights
        assert torch.allclose(tight, regard.solve(scores, Transport(regularizer, marginal=Free())).weights, atol=1e-6)


@given(problems(), seeds, st.integers(1, 10))
def test_priors_multiply(problem, seed, n):
    """A product of priors is the prior of the sum of their logarithms."""
    scores, one, two = draw(seed, 4, n), draw(seed + 1, n, scale=1.0), draw(seed + 2, 4, 1, scale=1.0)

    def weights(prior):
        return regard.solve(
            scores,
            Transport(problem.regularizer, prior=prior, marginal=problem.marginal, temperature=problem.temperature),
        ).weights

    product = weights(Bias(one) * Bias(two))
    assert torch.allclose(product, weights(Bias(one + two)), atol=1e-9)
    assert torch.allclose(product, weights(Bias(two) * Bias(one)), atol=1e-9)


@given(seeds, st.integers(2, 30), st.data())
def test_keys_may_be_split_and_merged(seed, n, data):
    """Attention over two halves of the keys, merged by lse, is attention over all."""
    cut = data.draw(st.integers(1, n - 1))
    q, k, v = draw(seed, 1, 2, 3, 4), draw(seed + 1, 1, 2, n, 4), draw(seed + 2, 1, 2, n, 5)
    whole = regard.attention(q, k, v)
    parts = [
        regard.attention(q, k[:, :, piece], v[:, :, piece], return_aux=AuxRequest(lse=True))
        for piece in (slice(0, cut), slice(cut, n))
    ]
    share = torch.stack([aux.lse for _, aux in parts]).softmax(0)
    assert torch.allclose(whole, sum(s[..., None] * out for s, (out, _) in zip(share, parts, strict=True)))


@given(problems(), seeds, st.integers(2, 16))
def test_an_inadmissible_key_is_an_absent_key(problem, seed, n):
    scores = draw(seed, 4, n)
    forbid = torch.zeros(n, dtype=torch.float64)
    forbid[n // 2] = -math.inf
    masked = regard.solve(
        scores,
        Transport(problem.regularizer, prior=Bias(forbid), marginal=problem.marginal, temperature=problem.temperature),
    )
    keep = torch.arange(n) != n // 2
    assert (masked.weights[:, ~keep] == 0).all()
    assert torch.allclose(masked.weights[:, keep], regard.solve(scores[:, keep], problem).weights, atol=1e-9)


@given(problems(), seeds, st.integers(2, 16))
def test_the_gradient_is_an_advantage(problem, seed, n):
    """dL/ds = (w/tau)(u - b); row sums vanish exactly where the marginal is a constraint (theory, section 3)."""
    scores, utility = draw(seed, 4, n).requires_grad_(), draw(seed + 1, 4, n)
    (gradient,) = torch.autograd.grad((regard.solve(scores, problem).weights * utility).sum(), scores)
    marginal = problem.marginal
    if isinstance(marginal, Rows) and marginal.sink is None and marginal.relax is None:
        assert torch.allclose(
            gradient.sum(-1), torch.zeros(4, dtype=torch.float64), atol=1e-8 * (1 + gradient.abs().max().item())
        )


# --- the same laws, of the native engine in float32 -------------------------------------------------------------------


def native_plan(scores, problem):
    """Weights [rows, n] and statistics of the native engine: with unit keys and values the plan is the output."""
    pytest.importorskip("regard._native", reason="the native engine was not built")
    n = scores.shape[1]
    eye = torch.eye(n).expand(1, 1, n, n)
    request = AuxRequest(dual=True, value=True, mass=True, entropy=True)
    out, aux = regard.attention(
        scores.float()[None, None], eye, eye, scale=1.0, problem=problem, return_aux=request, backend="native"
    )
    return out[0, 0].double(), {
        name: getattr(aux, name)[0, 0].double() for name in ("dual", "value", "mass", "entropy")
    }


native_problems = st.one_of(
    st.builds(
        lambda alpha, marginal, tau: Transport(Tsallis(alpha), marginal=marginal, temperature=tau),
        st.floats(1.1, 3.0),
        st.one_of(
            st.just(Rows()),
            st.builds(lambda b: Rows(sink=b), st.floats(-3, 3)),
            st.builds(lambda r: Rows(relax=r), st.floats(0.5, 10)),
            st.builds(lambda m: Rows(mass=m), st.floats(0.2, 5)),
        ),
        st.floats(0.2, 5.0),
    ),
    st.builds(
        lambda b, tau: Transport(FermiDirac(), marginal=Free(b), temperature=tau), st.floats(-3, 3), temperatures
    ),
)
long = st.one_of(sizes, st.integers(600, 900))  # both ways of storing weights


@settings(max_examples=60)
@given(native_problems, seeds, long)
def test_native_weights_are_optimal(problem, seed, n):
    """The certificate in float64 has no gap and the marginal is met, also with the dual and value of the engine."""
    scores = draw(seed, 3, n).float().double()
    weights, aux = native_plan(scores, problem)
    certificate = regard.certify(scores, weights, problem)
    size = 1 + certificate.dual.abs() + weights.sum(-1) * scores.abs().amax()
    assert (certificate.gap.abs() <= 2e-5 * size).all(), f"{problem}\n{certificate}"
    assert (certificate.row_residual <= 2e-5 * (1 + weights.sum(-1))).all(), f"{problem}\n{certificate}"
    assert (weights >= 0).all() and torch.allclose(weights.sum(-1), aux["mass"], rtol=1e-5, atol=1e-6)
    best = regard.solve(scores, problem)
    assert torch.allclose(aux["value"], certificate.dual, rtol=2e-5, atol=2e-5 * float(size.max()))
    assert torch.allclose(aux["dual"], best.dual.reshape(-1), rtol=1e-4, atol=1e-4)


@settings(max_examples=60)
@given(st.floats(1.02, 3.0), st.floats(0.2, 5), temperatures, seeds, long)
def test_native_rows_sum_to_their_mass(alpha, mass, tau, seed, n):
    weights, aux = native_plan(draw(seed, 3, n), Transport(Tsallis(alpha), marginal=Rows(mass=mass), temperature=tau))
    assert torch.allclose(weights.sum(-1), torch.full((3,), mass, dtype=torch.float64), rtol=1e-5)
    assert torch.allclose(aux["mass"], torch.full((3,), mass, dtype=torch.float64), rtol=1e-6)


@settings(max_examples=60)
@given(seeds, long)
def test_native_alpha_to_one_is_softmax(seed, n):
    """p = y^1000 there. To first order in alpha - 1 a weight is off by (t^2 - mean t^2)/2 of itself, t = log p."""
    scores = draw(seed, 3, n, scale=1.0)
    weights, aux = native_plan(scores, Transport(Tsallis(1.001)))
    limit = scores.softmax(-1)
    t = limit.log()
    bound = 0.001 * limit * (t**2 + (limit * t**2).sum(-1, keepdim=True)) + 1e-6
    assert ((weights - limit).abs() <= bound).all()
    assert torch.allclose(aux["entropy"], -(limit * t).sum(-1), rtol=0.02, atol=1e-3)


@settings(max_examples=60)
@given(st.sampled_from([1.05, 1.3, 1.5, 2.0, 2.5]), seeds, st.one_of(st.integers(2, 24), st.integers(600, 900)))
def test_native_cold_limit_is_hard_routing(alpha, seed, n):
    scores = draw(seed, 5, n).float().double()
    margin = scores.sort(-1).values.diff(dim=-1)[:, -1].min().clamp(min=1e-4)
    weights, _ = native_plan(scores, Transport(Tsallis(alpha), temperature=float(margin) / 1000))
    clear = scores.sort(-1).values.diff(dim=-1)[:, -1] >= margin
    hard = torch.nn.functional.one_hot(scores.argmax(-1), n).double()
    assert torch.allclose(weights[clear], hard[clear], atol=1e-6)
