"""The geometry of a plan on scores: each theorem on random inputs from Hypothesis."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import regard
from regard import KL, AuxRequest, FermiDirac, Free, Rows, Transport, Tsallis
from regard import geometry as geo
from support.geometry import close, draw, every_problem, few, problems, seeds, sizes, smooth, tau_of

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
