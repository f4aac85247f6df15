"""The optimum F(s) = max_p <p, s> - tau D(p || pi) is a potential: a convex soft maximum whose gradient is the plan.
Its limits are hard routing (tau -> 0) and the prior (tau -> infinity); their rates are tested, too. All in float64."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard import KL, Bias, FermiDirac, Free, Rows, Transport, Tsallis

D = torch.float64
modest = settings(deadline=None, max_examples=20, derandomize=True)

seeds = st.integers(0, 2**31)
sizes = st.integers(2, 16)
taus = st.floats(0.05, 10.0)
regularizers = st.one_of(st.just(KL()), st.builds(Tsallis, st.floats(1.05, 3.0)), st.just(FermiDirac()))
marginals = st.one_of(
    st.just(Rows()),
    st.builds(lambda b: Rows(sink=b), st.floats(-3, 3)),
    st.builds(lambda r: Rows(relax=r), st.floats(0.3, 10)),
    st.builds(Free, st.floats(-3, 3)),
)


def draw(seed, *shape, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def value(scores, problem, tau):
    """F, differentiable in the scores and in tau."""
    return regard.path(scores, torch.as_tensor(tau, dtype=D).reshape(1), problem).value[0]


def separated(scores, gap):
    """The scores, with the best one of each row moved to `gap` above the second."""
    top = scores.topk(2, -1)
    return scores.scatter(-1, top.indices[..., :1], top.values[..., 1:] + gap)


# --- a soft maximum ---------------------------------------------------------------------------------------------------


@modest
@given(seeds, sizes, taus)
def test_kl_is_a_soft_maximum(seed, n, tau):
    """max s <= F <= max s + tau log n; equality on the right where all scores are equal."""
    scores = draw(seed, 4, n, scale=3.0)
    soft, top = value(scores, Transport(), tau), scores.amax(-1)
    assert (soft >= top - 1e-12).all() and (soft <= top + tau * math.log(n) + 1e-12).all()
    flat = value(torch.ones(n, dtype=D), Transport(), tau)
    assert torch.allclose(flat, torch.tensor(1 + tau * math.log(n), dtype=D))


@modest
@given(seeds, sizes, taus, st.floats(1.05, 3.0))
def test_tsallis_lies_below_the_maximum(seed, n, tau, alpha):
    """D >= 0 here, and at most 1/(alpha (alpha - 1)) at a single key: max s - tau/(alpha (alpha - 1)) <= F <= max s."""
    scores = draw(seed, 4, n, scale=3.0)
    soft, top = value(scores, Transport(Tsallis(alpha)), tau), scores.amax(-1)
    assert (soft <= top + 1e-9).all() and (soft >= top - tau / (alpha * (alpha - 1)) - 1e-9).all()


@modest
@given(seeds, sizes, taus, regularizers, marginals, st.floats(0.05, 0.95))
def test_convex_in_the_scores(seed, n, tau, regularizer, marginal, share):
    problem = Transport(regularizer, prior=Bias(draw(seed + 2, n)), marginal=marginal)
    one, two = draw(seed, 4, n), draw(seed + 1, 4, n)
    between = value(share * one + (1 - share) * two, problem, tau)
    chord = share * value(one, problem, tau) + (1 - share) * value(two, problem, tau)
    assert (between <= chord + 1e-9 * (1 + chord.abs())).all()


@modest
@given(seeds, sizes, taus, st.floats(1.01, 3.0))
def test_monotone_in_the_temperature(seed, n, tau, more):
    """dF/dtau = -D: F increases where D <= 0 (KL with 0/1 priors: D = -H) and decreases where D >= 0 (Tsallis; KL with
    a normalized prior)."""
    scores = draw(seed, 4, n)
    assert (value(scores, Transport(), more * tau) >= value(scores, Transport(), tau) - 1e-12).all()
    normalised = Bias(draw(seed + 1, n).log_softmax(-1))
    for problem in (Transport(prior=normalised), Transport(Tsallis(1.5)), Transport(Tsallis(2.0))):
        assert (value(scores, problem, more * tau) <= value(scores, problem, tau) + 1e-12).all()


@modest
@given(seeds, sizes, taus, regularizers, marginals)
def test_envelope(seed, n, tau, regularizer, marginal):
    """dF/ds = p and dF/dtau = -D(p || pi) = (F - <p, s> - the marginal's own share)/tau, for every regularizer."""
    scores = draw(seed, 3, n).requires_grad_()
    temperature = torch.tensor(tau, dtype=D, requires_grad=True)
    prior = Bias(0.5 * draw(seed + 1, n))
    plan = regard.solve(scores.detach(), Transport(regularizer, prior=prior, marginal=marginal, temperature=tau))
    soft = value(scores, Transport(regularizer, prior=prior, marginal=marginal), temperature)
    by_score, by_tau = torch.autograd.grad(soft.sum(), (scores, temperature))
    assert torch.allclose(by_score, plan.weights, atol=1e-8)
    assert plan.certificate().holds(1e-8)
    p, mass = plan.weights, plan.weights.sum(-1)
    achieved = (p * scores.detach()).sum(-1)
    if isinstance(marginal, Rows) and marginal.sink is not None:
        achieved = achieved + (1 - mass) * marginal.sink
    elif isinstance(marginal, Rows) and marginal.relax is not None:
        achieved = achieved - marginal.relax * (torch.xlogy(mass, mass) - mass + 1)
    elif isinstance(marginal, Free):
        achieved = achieved + mass * marginal.offset
    divergence = (achieved - soft.detach()) / tau
    assert torch.allclose(by_tau, -divergence.sum(), atol=1e-7 * (1 + float(divergence.abs().sum())))


@pytest.mark.parametrize(
    ("problem", "scores", "tau"),
    [
        (Transport(FermiDirac(), marginal=Free(1.0)), [3.0, 0.5], 0.0625),
        (Transport(), [0.0, 200.0], 0.05),
        (Transport(marginal=Free(0.0)), [-200.0, 1.0], 0.1),
        (Transport(marginal=Rows(relax=1.0)), [-200.0, 1.0], 0.1),
        (Transport(marginal=Rows(sink=0.0)), [-200.0, 1.0], 0.1),
    ],
)
def test_envelope_where_a_weight_is_at_its_bound(problem, scores, tau):
    """dF/ds = p also where p is 0 or pi to rounding: there the slope of x log x is infinite, and 0 times it NaN."""
    scores = torch.tensor(scores, dtype=D, requires_grad=True)
    (gradient,) = torch.autograd.grad(value(scores, problem, tau), scores)
    expected = regard.solve(scores.detach(), dataclasses.replace(problem, temperature=tau)).weights
    assert torch.allclose(gradient, expected, atol=1e-12)


@modest
@given(seeds, sizes, taus)
def test_lse_has_the_plan_as_gradient(seed, n, tau):
    """d lse/d s = p/tau, and F = tau lse."""
    scores, eye = draw(seed, 1, 1, 3, n).requires_grad_(), torch.eye(n, dtype=D)[None, None]
    problem = Transport(temperature=tau)
    _, aux = regard.attention(
        scores, eye, eye, scale=1.0, problem=problem, return_aux=regard.AuxRequest(lse=True, value=True)
    )
    (gradient,) = torch.autograd.grad(aux.lse.sum(), scores)
    assert torch.allclose(gradient, regard.solve(scores.detach(), problem).weights / tau, atol=1e-10)
    assert torch.allclose(aux.value, tau * aux.lse)


# --- tau -> 0 ---------------------------------------------------------------------------------------------------------


@modest
@given(seeds, sizes, st.floats(0.05, 2.0), st.floats(0.02, 1.0))
def test_kl_tends_to_hard_routing_exponentially(seed, n, gap, tau):
    """1 - p_max <= (n - 1) exp(-gap/tau), and 0 <= F - max s <= tau (n - 1) exp(-gap/tau)."""
    scores = separated(draw(seed, 4, n), gap)
    problem = Transport(temperature=tau)
    plan = regard.solve(scores, problem)
    bound = (n - 1) * math.exp(-gap / tau)
    assert (1 - plan.weights.amax(-1) <= bound + 1e-15).all()
    excess = value(scores, Transport(), tau) - scores.amax(-1)
    assert (excess >= -1e-14).all() and (excess <= tau * bound + 1e-14).all()
    assert plan.certificate().holds(1e-9)


@modest
@given(seeds, sizes, st.floats(0.05, 2.0), st.floats(1.1, 3.0))
def test_tsallis_is_hard_below_a_threshold(seed, n, gap, alpha):
    """With p = [(alpha - 1)(s - lambda)/tau]_+^(1/(alpha - 1)), the best key has all the mass if and only if the second
    one's bracket is not positive at p_max = 1: if tau <= (alpha - 1) gap. Sparsemax (alpha = 2): tau <= gap."""
    scores = separated(draw(seed, 4, n), gap)
    threshold = (alpha - 1) * gap
    hard = torch.nn.functional.one_hot(scores.argmax(-1), n).to(D)
    below = regard.solve(scores, Transport(Tsallis(alpha), temperature=0.999 * threshold))
    above = regard.solve(scores, Transport(Tsallis(alpha), temperature=1.05 * threshold))
    assert torch.equal(below.weights > 0, hard > 0) and torch.allclose(below.weights, hard, atol=1e-12)
    assert ((above.weights > 0).sum(-1) > 1).all()
    assert below.certificate().holds(1e-9) and above.certificate().holds(1e-9)


@modest
@given(seeds, st.integers(3, 12), st.integers(2, 3), st.sampled_from([KL(), Tsallis(1.5), Tsallis(2.0)]))
def test_ties_share_equally(seed, n, ties, regularizer):
    scores = draw(seed, 4, n)
    best = scores.amax(-1, keepdim=True) + 0.5
    scores = torch.cat([scores[:, ties:], best.expand(-1, ties)], -1)
    expected = torch.cat([torch.zeros(4, n - ties, dtype=D), torch.full((4, ties), 1 / ties, dtype=D)], -1)
    for tau in (0.0, 1e-3):
        plan = regard.solve(scores, Transport(regularizer, temperature=tau))
        assert torch.allclose(plan.weights, expected, atol=1e-12)
        assert plan.certificate().holds(1e-9)


# --- tau -> infinity --------------------------------------------------------------------------------------------------


@modest
@given(seeds, sizes, st.sampled_from([1e3, 1e5]))
def test_kl_tends_to_the_prior(seed, n, tau):
    """p_j = q_j (1 + (s_j - E_q[s])/tau) + O(1/tau^2), q the normalized prior; KL = Var_q(s)/(2 tau^2) to first order;
    F - tau log sum(pi) -> E_q[s]."""
    scores, log_prior = draw(seed, 4, n), draw(seed + 1, n)
    q = log_prior.softmax(-1)
    mean = (q * scores).sum(-1, keepdim=True)
    plan = regard.solve(scores, Transport(prior=Bias(log_prior), temperature=tau))
    spread = scores.abs().amax() + 1
    assert ((plan.weights - q * (1 + (scores - mean) / tau)).abs() <= 4 * (spread / tau) ** 2).all()
    path = regard.path(scores, [tau], Transport(prior=Bias(log_prior)))
    variance = (q * (scores - mean) ** 2).sum(-1)
    assert ((path.kl[0] - variance / (2 * tau**2)).abs() <= 8 * (spread / tau) ** 3 + 1e-14).all()
    rest = path.value[0] - tau * log_prior.logsumexp(-1)
    assert ((rest - mean.squeeze(-1)).abs() <= spread**2 / tau + 1e-9 * tau).all()
    assert plan.certificate().holds(1e-9)


@modest
@given(seeds, sizes, st.floats(1.2, 3.0), st.sampled_from([1e3, 1e5]))
def test_tsallis_tends_to_the_uniform_plan(seed, n, alpha, tau):
    """Around p = 1/n with w = n^(alpha - 2): p_j = 1/n + n^(alpha - 2)(s_j - mean s)/tau + O(1/tau^2)."""
    scores = draw(seed, 4, n)
    plan = regard.solve(scores, Transport(Tsallis(alpha), temperature=tau))
    first = 1 / n + n ** (alpha - 2) * (scores - scores.mean(-1, keepdim=True)) / tau
    spread = (scores.abs().amax() + 1) * n ** (alpha - 1) / tau
    assert ((plan.weights - first).abs() <= 10 * spread**2 / n + 1e-12).all()
    assert plan.certificate().holds(1e-8)


@pytest.mark.parametrize("regularizer", [KL(), Tsallis(1.5), Tsallis(2.0)])
def test_path_ends(regularizer):
    """At temperature 0 the expected score is the maximum, at a high one the mean."""
    scores = draw(1, 3, 9)
    path = regard.path(scores, [0.0, 1e-4, 1e7], Transport(regularizer))
    assert torch.allclose(path.expected_score[0], path.expected_score[1]) and torch.allclose(
        path.expected_score[2], scores.mean(-1), atol=1e-5
    )
