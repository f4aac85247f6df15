"""Rows and columns: the plan of Sinkhorn attention and its gradient, against POT, OTT-JAX and closed forms."""

import functools
import math
import os
import subprocess
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ott.geometry import geometry
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn as ott_sinkhorn

import regard
from regard import ALiBi, AuxRequest, Bias, Documents, Free, Rows, RowsAndColumns, Transport, Window
from regard.backends import BACKENDS as registry
from support.memory import PEAK, reads_peak
from support.sinkhorn import BACKENDS, F64, by_backend, call, dense, draw, tight

jax.config.update("jax_enable_x64", True)
pytestmark = pytest.mark.each_isa


# --- other libraries --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [1.0, 0.1, 0.01, 0.001])
def test_equal_to_pot(epsilon):
    """Plan, value and gradient; POT gives the gradient of its value by the envelope theorem: the plan."""
    x, y = torch.rand(2, 8, 2, generator=torch.Generator().manual_seed(9), dtype=F64)
    scores = (-(torch.cdist(x, y[:6]) ** 2)).requires_grad_()
    a = torch.rand(8, generator=torch.Generator().manual_seed(2), dtype=F64) + 0.5
    b = torch.rand(6, generator=torch.Generator().manual_seed(3), dtype=F64) + 0.5
    b = b / b.sum() * a.sum()
    expected = torch.from_numpy(
        ot.sinkhorn(
            a.numpy(), b.numpy(), -scores.detach().numpy(), epsilon, "sinkhorn_log", numItermax=200000, stopThr=1e-12
        )
    )
    plan = regard.solve(scores, Transport(marginal=tight(row=a, column=b), temperature=epsilon))
    assert (plan.weights - expected).abs().max() < 1e-8
    mine = plan.certificate()
    primal = (expected * scores.detach() - epsilon * torch.xlogy(expected, expected)).sum()
    assert math.isclose(float(mine.primal), float(primal), rel_tol=1e-8) and abs(float(mine.gap)) < 1e-9
    assert regard.certify(scores, expected, plan.problem).holds(1e-7)
    # The value is the dual's, too, and its derivative in the scores is the plan.
    value = (plan.dual * a).sum() + (plan.column_dual * b).sum()
    assert math.isclose(float(value.detach()), float(primal), rel_tol=1e-8)
    (gradient,) = torch.autograd.grad(value, scores)
    assert (gradient - expected).abs().max() < 1e-8


@functools.cache
def ott():
    """(cost, epsilon, weight) -> gradient of <plan, weight>, plan, whether it converged; compiled once."""

    def loss(cost, epsilon, weight):
        problem = linear_problem.LinearProblem(geometry.Geometry(cost_matrix=cost, epsilon=epsilon))
        found = ott_sinkhorn.Sinkhorn(threshold=1e-12, max_iterations=200000, lse_mode=True)(problem)
        return (found.matrix * weight).sum(), (found.matrix, found.converged)

    return jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.parametrize("epsilon", [1.0, 0.1, 0.01, 0.001])
def test_equal_to_ott(epsilon):
    """Plan, value, and the gradient of a loss of the plan, which OTT finds by implicit differentiation."""
    x, y = torch.rand(2, 8, 2, generator=torch.Generator().manual_seed(4), dtype=F64)
    cost, weight = torch.cdist(x, y[:6]) ** 2, draw(8, 6, seed=5)
    by_them, (matrix, converged) = map_arrays(ott()(cost.numpy(), epsilon, weight.numpy()))
    assert bool(converged)
    scores = (-cost).requires_grad_()
    plan = regard.solve(scores, Transport(marginal=tight(row=1 / 8), temperature=epsilon))
    assert (plan.weights - matrix).abs().max() < 1e-8
    value = float(((plan.dual / 8).sum() + (plan.column_dual / 6).sum()).detach())
    assert math.isclose(
        value, float(-(matrix * cost).sum() - epsilon * torch.xlogy(matrix, matrix).sum()), rel_tol=1e-7
    )
    (gradient,) = torch.autograd.grad((plan.weights * weight).sum(), scores)
    assert (gradient + by_them).abs().max() < 1e-6 * max(1.0, float(by_them.abs().max()))


def map_arrays(tree):
    return jax.tree.map(lambda x: torch.from_numpy(np.asarray(x).copy()), tree)


def test_unbalanced_equal_to_pot():
    """POT relaxes both sides. With a large penalty on its rows its plan is the same."""
    scores, tau, rho = draw(6, 7, seed=6), 0.4, 0.8
    expected = ot.unbalanced.sinkhorn_unbalanced(
        np.ones(6),
        np.full(7, 6 / 7),
        -scores.numpy(),
        tau,
        (float("inf"), rho),
        reg_type="entropy",
        numItermax=100000,
        stopThr=1e-14,
    )
    plan = regard.solve(scores, Transport(marginal=tight(relax=rho), temperature=tau))
    assert np.abs(plan.weights.numpy() - expected).max() < 1e-8


@pytest.mark.parametrize(
    ("epsilon", "backend"), [(1.0, "torch"), (0.05, "torch"), *((e, BACKENDS[-1]) for e in (1.0, 0.1, 0.01, 0.001))]
)
def test_attention_equals_the_stored_plan(epsilon, backend):
    """Also for float32 inputs: the solver uses float64 where float32 cannot resolve the tolerance."""
    q, k, v = draw(1, 2, 10, 4), draw(1, 2, 7, 4, seed=1), draw(1, 2, 7, 3, seed=2)
    problem = Transport(marginal=RowsAndColumns(tolerance=1e-9), temperature=epsilon)
    expected = regard.solve(q @ k.mT / 2, problem).weights @ v
    for dtype, allowed in ((F64, 1e-6), (torch.float32, 1e-4)):
        mine = (t.to(dtype) for t in (q, k, v))
        exact = expected
        if dtype != F64:  # at small temperatures the rounding of queries and keys changes the problem
            q2, k2, v2 = (t.to(dtype).double() for t in (q, k, v))
            exact = regard.solve(q2 @ k2.mT / 2, problem).weights @ v2
        out, aux = regard.attention(
            *mine, problem=problem, backend=backend, return_aux=AuxRequest(column_residual=True, key_mass=True)
        )
        assert out.dtype == dtype and (out - exact).abs().max() < allowed
        assert aux.column_residual.sum() < 1e-7 and (aux.key_mass - 10 / 7).abs().max() < 1e-5


# --- the gradient -----------------------------------------------------------------------------------------------------

SETTINGS = {
    "balanced": {},
    "relaxed": {"relax": True},
    "three steps": {"iterations": 3},
    "five steps, relaxed": {"iterations": 5, "relax": True},
}


@pytest.mark.parametrize(
    ("how", "backend"), [("balanced", "torch"), ("three steps", "torch"), *((how, BACKENDS[-1]) for how in SETTINGS)]
)
def test_gradient_of_everything(how, backend):
    leaves = {
        "query": draw(1, 2, 4, 3),
        "key": draw(1, 1, 3, 3, seed=1),
        "value": draw(1, 1, 3, 2, seed=2),
        "tau": torch.tensor([0.5, 0.9], dtype=F64).view(2, 1, 1),
        "row": draw(2, 4, seed=3).exp(),
        "column": draw(1, 3, seed=4).exp(),
        "bias": draw(2, 4, 3, seed=5),
        "mask": draw(4, 3, seed=6),
        "slopes": draw(2, seed=7).exp(),
        "rho": torch.tensor([0.6, 1.1], dtype=F64),
    }
    leaves["column"] = leaves["column"] / leaves["column"].sum() * leaves["row"].sum(-1, keepdim=True)
    inputs = [t.clone().requires_grad_() for t in leaves.values()]

    def run(query, key, value, tau, row, column, bias, mask, slopes, rho):
        chosen = dict(SETTINGS[how])
        if "relax" in chosen:
            chosen["relax"] = rho
        problem = Transport(
            prior=Bias(bias) * ALiBi(slopes, "top_left"),
            marginal=tight(row=row, column=column, **chosen),
            temperature=tau,
        )
        out, aux = regard.attention(
            query, key, value, attn_mask=mask, problem=problem, enable_gqa=True, softcap=4.0, backend=backend,
            return_aux=AuxRequest(lse=True, entropy=True),
        )  # fmt: skip
        return out, aux.lse, aux.entropy

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@by_backend
@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_gradient_is_as_good_as_the_tolerance(backend, tau, monkeypatch):
    """With a larger tolerance the gradient is about that precise and takes less time."""
    engine, passes = registry[backend], []
    forward = engine.forward
    monkeypatch.setattr(engine, "forward", lambda *given: passes.append(1) or forward(*given))

    def gradient(tolerance):
        q, k, v = (draw(1, 2, 24, 8, seed=n, dtype=torch.float32, grad=True) for n in range(3))
        problem = Transport(marginal=RowsAndColumns(tolerance=tolerance), temperature=tau)
        out = regard.attention(q, k, v, problem=problem, backend=backend)
        passes.clear()
        (out * draw(*out.shape, seed=5, dtype=torch.float32)).sum().backward()
        return torch.cat([t.grad.flatten() for t in (q, k, v)]), len(passes)

    (best, most), (coarse, few), (fine, _) = (gradient(tolerance) for tolerance in (1e-6, 1e-3, 1e-4))
    assert 1e-7 < (coarse - best).norm() / best.norm() < 0.05 and (fine - best).norm() / best.norm() < 0.005
    assert few < most


@by_backend
def test_batches_of_gradients(backend):
    """`is_grads_batched` gives the same as one call for each gradient."""
    q, k, v = (draw(1, 2, 5, 3, seed=n, grad=True) for n in range(3))
    row = draw(2, 5, seed=3).exp().requires_grad_()
    out = regard.attention(q, k, v, problem=Transport(marginal=tight(row=row)), backend=backend)
    grads = draw(3, *out.shape, seed=4)
    together = torch.autograd.grad(out, (q, k, v, row), grads, is_grads_batched=True, retain_graph=True)
    for n, grad in enumerate(grads):
        alone = torch.autograd.grad(out, (q, k, v, row), grad, retain_graph=True)
        for many, one in zip(together, alone, strict=True):
            assert (many[n] - one).abs().max() < 1e-12


def test_gradient_of_the_prices():
    scores = draw(4, 5, grad=True)
    for marginal in (tight(), tight(relax=0.7)):
        problem = Transport(marginal=marginal, temperature=0.5)

        def duals(s, problem=problem):
            plan = regard.solve(s, problem)
            return plan.dual, plan.column_dual

        assert torch.autograd.gradcheck(duals, (scores,), fast_mode=True)


def test_gradient_of_default_columns_with_learned_rows():
    """The default columns share what the rows send, so they depend on the rows."""
    q, k, v = draw(1, 1, 4, 3), draw(1, 1, 5, 3, seed=1), draw(1, 1, 5, 2, seed=2)
    row = draw(1, 4, seed=3).exp().requires_grad_()
    run = lambda row: regard.attention(q, k, v, problem=Transport(marginal=tight(row=row)))  # noqa: E731
    assert torch.autograd.gradcheck(run, (row,))


@by_backend
def test_gradient_at_small_temperature_and_float32(backend):
    q, k, v = draw(1, 2, 9, 4), draw(1, 2, 6, 4, seed=1), draw(1, 2, 6, 3, seed=2)
    found = []
    for dtype in (F64, torch.float32):
        leaves = [t.to(torch.float32).to(dtype).requires_grad_() for t in (q, k, v)]
        problem = Transport(marginal=RowsAndColumns(tolerance=1e-9), temperature=0.05)
        out = regard.attention(*leaves, problem=problem, backend=backend)
        found.append(torch.autograd.grad((out * draw(1, 2, 9, 3, seed=3).to(dtype)).sum(), leaves))
    for exact, got in zip(*found, strict=True):
        assert (exact - got).abs().max() < 2e-4 * max(1.0, float(exact.abs().max()))


def test_dropout_leaves_the_plan_alone():
    """Weights are dropped from the plan, as in every other problem; its marginals are those before dropout."""
    q, k = draw(1, 2, 8, 4), draw(1, 2, 8, 4, seed=1)
    problem = Transport(marginal=tight())
    weights = regard.solve(q @ k.mT / 2, problem).weights
    torch.manual_seed(0)
    dropped = regard.attention(q, k, torch.eye(8, dtype=F64).expand(1, 2, 8, 8), dropout_p=0.4, problem=problem)
    kept = dropped != 0
    assert 0.4 < kept.double().mean() < 0.8
    assert (dropped[kept] - (weights / 0.6)[kept]).abs().max() < 1e-9


# --- properties -------------------------------------------------------------------------------------------------------

sizes = st.integers(1, 6)
seeds = st.integers(0, 10**6)
temperatures = st.sampled_from([0.05, 0.3, 1.0, 4.0])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(sizes, sizes, seeds, temperatures)
def test_marginals_gap_and_symmetries(Tq, Tk, seed, tau):
    scores, prior = draw(Tq, Tk, seed=seed), draw(Tq, Tk, seed=seed + 1)
    a = draw(Tq, seed=seed + 2).exp()
    b = draw(Tk, seed=seed + 3).exp()
    b = b / b.sum() * a.sum()
    problem = Transport(prior=Bias(prior), marginal=tight(row=a, column=b), temperature=tau)
    plan = regard.solve(scores, problem)
    p = plan.weights
    assert (p.sum(-1) - a).abs().max() < 1e-12 and (p.sum(-2) - b).abs().max() < 1e-10
    certificate = plan.certificate()
    assert certificate.holds(1e-8) and float(certificate.gap) > -1e-9
    # A worse plan that meets both marginals has a larger gap.
    other = a[:, None] * b / a.sum()
    assert float(regard.certify(scores, other, problem).gap) >= float(certificate.gap) - 1e-9
    # Offsets of whole rows and columns of the scores or the prior change the prices only.
    shifted = regard.solve(scores + draw(Tq, 1, seed=seed + 4) + draw(Tk, seed=seed + 5), problem).weights
    assert (shifted - p).abs().max() < 1e-8
    # Permutations of queries and keys permute the plan.
    g = torch.Generator().manual_seed(seed)
    i, j = torch.randperm(Tq, generator=g), torch.randperm(Tk, generator=g)
    turned = Transport(prior=Bias(prior[i][:, j]), marginal=tight(row=a[i], column=b[j]), temperature=tau)
    assert (regard.solve(scores[i][:, j], turned).weights - p[i][:, j]).abs().max() < 1e-8
    # Queries and keys can be exchanged.
    flipped = Transport(prior=Bias(prior.T), marginal=tight(row=b, column=a), temperature=tau)
    assert (regard.solve(scores.T, flipped).weights.T - p).abs().max() < 1e-8


@settings(max_examples=10, deadline=None, derandomize=True)
@given(seeds, temperatures)
def test_limits_of_relaxation(seed, tau):
    scores = draw(2, 5, 4, seed=seed)
    balanced = regard.solve(scores, Transport(marginal=tight(), temperature=tau)).weights
    hard = regard.solve(scores, Transport(marginal=tight(relax=1e9), temperature=tau)).weights
    assert (hard - balanced).abs().max() < 1e-6
    rows = regard.solve(scores, Transport(temperature=tau)).weights
    free = regard.solve(scores, Transport(marginal=tight(relax=1e-9), temperature=tau)).weights
    assert (free - rows).abs().max() < 1e-6


@by_backend
def test_priors_masks_and_shapes_against_the_stored_plan(backend):
    """All options that affect scores or prior, with shared keys and unequal lengths."""
    q, k, v = draw(2, 4, 6, 3), draw(2, 2, 8, 3, seed=1), draw(2, 2, 8, 5, seed=2)
    mask, bias, tau = draw(4, 6, 8, seed=3), draw(2, 1, 1, 8, seed=4), torch.tensor([0.4, 0.7, 1.0, 1.5], dtype=F64)
    mask[:, 2, 3] = -math.inf
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=F64)
    problem = Transport(
        prior=Bias(bias) * ALiBi(slopes, "bottom_right") * Window(5, 4, "bottom_right"),
        marginal=tight(),
        temperature=tau.view(4, 1, 1),
    )
    out, aux = regard.attention(
        q, k, v, attn_mask=mask, problem=problem, softcap=2.0, enable_gqa=True, backend=backend,
        return_aux=AuxRequest.all(problem),
    )  # fmt: skip
    keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = 2 * (q @ keys.mT / math.sqrt(3) / 2).tanh() + mask
    distance = torch.arange(8) - torch.arange(6)[:, None] - 2
    log_prior = bias - slopes.view(4, 1, 1) * distance.abs()
    log_prior = log_prior.masked_fill((distance < -5) | (distance > 4), -math.inf)
    temperature = tau.view(4, 1, 1)
    p = dense(scores / temperature + log_prior)
    assert (out - p @ values).abs().max() < 1e-8

    # Statistics by their definitions.
    def xlogp(x):
        return torch.xlogy(p, p).sum(-1)

    admissible = p > 0
    finite = torch.where(admissible, scores, 0.0)
    assert (aux.entropy + xlogp(p)).abs().max() < 1e-8
    assert (aux.cost + (p * finite).sum(-1)).abs().max() < 1e-8
    assert (aux.key_mass - p.sum(-2)).abs().max() < 1e-8 and (aux.mass - 1).abs().max() < 1e-9
    assert (aux.max_weight - p.amax(-1)).abs().max() < 1e-8 and (aux.collision - (p**2).sum(-1)).abs().max() < 1e-8
    assert torch.equal(aux.support, admissible.sum(-1).double())
    log_pi = torch.where(admissible, log_prior, 0.0)
    value = (p * finite).sum(-1) - temperature.squeeze(-1) * (torch.xlogy(p, p) - p * log_pi).sum(-1)
    assert (aux.value - value).abs().max() < 1e-8
    prior_mass = torch.where(admissible, log_prior, -math.inf).logsumexp(-1)
    assert (aux.kl - ((torch.xlogy(p, p) - p * log_pi).sum(-1) + prior_mass)).abs().max() < 1e-8
    assert (
        aux.lse - torch.where(admissible, scores / temperature + log_prior, -math.inf).logsumexp(-1)
    ).abs().max() < 1e-9
    prices = (finite - aux.dual[..., None] - aux.column_dual[:, :, None]) / temperature[..., :] + log_pi
    assert (torch.where(admissible, prices.exp(), 0.0) - p).abs().max() < 1e-8
    spread = (p * (values**2).sum(-1)[:, :, None]).sum(-1) - (out**2).sum(-1)
    assert (aux.value_spread - spread).abs().max() < 1e-8
    # Single weights of the plan.
    plan = {"attn_mask": mask, "problem": problem, "softcap": 2.0, "enable_gqa": True}
    assert (regard.weights_at(q, k, torch.arange(8), **plan) - p).abs().max() < 1e-8
    weights, _ = regard.topk(q, k, 3, **plan)
    assert (weights - p.topk(3, -1).values).abs().max() < 1e-8
    pooled = p.unflatten(-1, (2, 4)).sum(-1)
    assert (
        regard.block_mass(q, k, 4, **plan) - torch.stack([pooled[:, :, :4].mean(2), pooled[:, :, 4:].mean(2)], 2)
    ).abs().max() < 1e-8


@by_backend
def test_rows_that_send_unequal_masses(backend):
    q, k, v = draw(1, 2, 5, 3), draw(1, 2, 4, 3, seed=1), draw(1, 2, 4, 3, seed=2)
    row = draw(2, 5, seed=3).exp()
    row[:, 1] = 0.0
    column = torch.tensor([1.0, 0.0, 2.0, 1.0], dtype=F64) * row.sum(-1, keepdim=True) / 4
    problem = Transport(marginal=tight(row=row, column=column))
    out, aux = regard.attention(
        q, k, v, problem=problem, backend=backend,
        return_aux=AuxRequest(mass=True, key_mass=True, collision=True, value=True, value_spread=True, dual=True),
    )  # fmt: skip
    plan = regard.solve(q @ k.mT / math.sqrt(3), problem)
    p = plan.weights
    assert (p.sum(-1) - row).abs().max() < 1e-10 and (p.sum(-2) - column).abs().max() < 1e-10
    assert (out - p @ v).abs().max() < 1e-9
    assert (aux.mass - row).abs().max() < 1e-10 and (aux.key_mass - column).abs().max() < 1e-10
    assert (aux.collision - (p**2).sum(-1)).abs().max() < 1e-10
    spread = (p * (v**2).sum(-1)[:, :, None]).sum(-1) - (out**2).sum(-1)
    assert (aux.value_spread - spread).abs().max() < 1e-9
    assert (regard.weights_at(q, k, torch.arange(4), problem=problem) - p).abs().max() < 1e-9
    assert (regard.block_mass(q, k, 5, problem=problem)[..., 0, 0] - p.sum((-1, -2)) / 5).abs().max() < 1e-9
    assert plan.certificate().holds(1e-8)


# --- documents and padding --------------------------------------------------------------------------------------------


@by_backend
def test_documents_are_independent_and_padding_has_no_effect(backend):
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, -1, -1])
    keys = torch.tensor([0, 0, 1, 1, 1, -1, 0, 7])
    q, k, v = (t.requires_grad_() for t in (draw(1, 2, 9, 4), draw(1, 2, 8, 4, seed=1), draw(1, 2, 8, 3, seed=2)))
    invalid = [t.detach().clone() for t in (q, k, v)]
    invalid[0][:, :, 7:] = math.nan
    for t in invalid[1:]:
        t[:, :, [5, 7]] = math.nan
    invalid = [t.requires_grad_() for t in invalid]
    problem = Transport(prior=Documents(ids, keys), marginal=tight())
    out, aux = regard.attention(
        *invalid, problem=problem, backend=backend, return_aux=AuxRequest(key_mass=True, column_residual=True)
    )
    gradients = torch.autograd.grad(out.square().sum(), invalid)
    assert all(g.isfinite().all() for g in gradients)
    assert torch.equal(out[:, :, 7:], torch.zeros_like(out[:, :, 7:]))
    expected = torch.tensor([1, 1, 4 / 3, 4 / 3, 4 / 3, 0, 1, 0], dtype=F64)
    assert (aux.key_mass - expected).abs().max() < 1e-10 and aux.column_residual.sum() < 1e-9
    for document in (0, 1):
        i, j = ids == document, keys == document
        alone = [t.detach()[:, :, where].requires_grad_() for t, where in ((q, i), (k, j), (v, j))]
        by_itself = regard.attention(*alone, problem=Transport(marginal=tight()), backend=backend)
        assert (out[:, :, i] - by_itself).abs().max() < 1e-9
        for g, own, where in zip(
            gradients, torch.autograd.grad(by_itself.square().sum(), alone), (i, j, j), strict=True
        ):
            assert (g[:, :, where] - own).abs().max() < 1e-8


def test_padding_by_a_bool_mask():
    q, k, v = draw(2, 2, 6, 4), draw(2, 2, 6, 4, seed=1), draw(2, 2, 6, 3, seed=2)
    real = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    mask = real[:, None, None] & real[:, None, :, None]
    out, aux = regard.attention(
        q, k, v, mask, problem=Transport(marginal=tight()), return_aux=AuxRequest(key_mass=True)
    )
    alone = regard.attention(q[1:, :, :4], k[1:, :, :4], v[1:, :, :4], problem=Transport(marginal=tight()))
    assert (out[1:, :, :4] - alone).abs().max() < 1e-9
    assert (aux.key_mass - real[:, None].double()).abs().max() < 1e-9


def test_empty_problems():
    problem = Transport(marginal=RowsAndColumns())
    for Tq, Tk in ((0, 4), (4, 0)):
        out = regard.attention(
            torch.ones(1, 2, Tq, 3), torch.ones(1, 2, Tk, 3), torch.ones(1, 2, Tk, 3), problem=problem
        )
        assert out.shape == (1, 2, Tq, 3) and not out.any()


# --- a fixed number of steps ------------------------------------------------------------------------------------------


@by_backend
@pytest.mark.parametrize("n", [1, 3, 5])
def test_sinkformer(n, backend):
    """K^0 = exp(s), then rows and columns are normalised in turn: softmax after one, Sinkformer's 3 or 5."""
    q, k, v = draw(1, 2, 6, 4), draw(1, 2, 6, 4, seed=1), draw(1, 2, 6, 3, seed=2)
    kernel = (q @ k.mT / 2).exp()
    for step in range(n):
        kernel = kernel / kernel.sum(-1 if step % 2 == 0 else -2, keepdim=True)
    problem = Transport(marginal=RowsAndColumns(iterations=n))
    out, aux = regard.attention(q, k, v, problem=problem, backend=backend, return_aux=AuxRequest(iterations=True))
    assert (out - kernel @ v).abs().max() < 1e-12 and bool((aux.iterations == n).all())
    if n == 1:
        assert (out - regard.attention(q, k, v)).abs().max() < 1e-12
    else:
        assert not regard.certify(q @ k.mT / 2, kernel, problem).holds(1e-6)


@by_backend
def test_column_sums_are_those_of_the_plan(backend):
    """With unequal rows, shared keys, and too few steps to meet the columns."""
    q, k, v = draw(2, 4, 6, 3), draw(2, 2, 5, 3, seed=1), draw(2, 2, 5, 2, seed=2)
    row = draw(4, 6, seed=3).exp()
    problem = Transport(marginal=RowsAndColumns(row=row, iterations=3))
    request = AuxRequest(column_residual=True, key_mass=True)
    with torch.inference_mode():
        _, aux = regard.attention(q, k, v, problem=problem, enable_gqa=True, backend=backend, return_aux=request)
    p = regard.solve(q @ k.repeat_interleave(2, 1).mT / math.sqrt(3), problem).weights
    assert (aux.key_mass - p.sum(-2)).abs().max() < 1e-12
    residual = (p.sum(-2) - row.sum(-1, keepdim=True) / 5).abs()
    assert (aux.column_residual - residual).abs().max() < 1e-12 and residual.max() > 1e-3
    for Tq, Tk in ((0, 5), (6, 0)):
        empty = (q[:, :, :Tq], k[:, :, :Tk], v[:, :, :Tk])
        few = Transport(marginal=RowsAndColumns(row=row[:, :Tq]))
        _, aux = regard.attention(*empty, problem=few, enable_gqa=True, backend=backend, return_aux=request)
        assert aux.column_residual.shape == (2, 4, Tk) and not aux.column_residual.any()


def test_statistics_of_columns_need_a_two_sided_plan():
    for name in ("column_dual", "column_residual", "iterations"):
        with pytest.raises(ValueError, match=f"return_aux: {name} is defined for RowsAndColumns only"):
            call(return_aux=AuxRequest(**{name: True}))
        assert getattr(AuxRequest.all(Transport(marginal=RowsAndColumns())), name)
        assert not getattr(AuxRequest.all(), name)


def test_requests_that_have_no_meaning_raise():
    q, problem = draw(1, 2, 5, 4), Transport(marginal=RowsAndColumns())
    for run in (
        lambda: regard.path(draw(3, 4), [1.0], problem),
        lambda: regard.evidence(q, q, problem=problem),
        lambda: regard.estimate(q, q, q, problem=problem),
        lambda: regard.geometry.fisher_vector_product(q, q, q, problem=problem),
        lambda: torch.func.grad(lambda q: regard.attention(q, q, q, problem=problem).sum())(q),
        lambda: torch.func.vmap(lambda q: regard.attention(q, q, q, problem=problem))(q[None]),
    ):
        with pytest.raises((ValueError, NotImplementedError)):
            run()


def test_copies_repr_and_pytree():
    row = torch.ones(3)
    part = RowsAndColumns(row, relax=0.5)
    assert part == RowsAndColumns(row, relax=0.5) and hash(part) == hash(RowsAndColumns(row, relax=0.5))
    assert repr(part) == "RowsAndColumns(Tensor(float32, [3]), relax=0.5)"
    leaves, spec = torch.utils._pytree.tree_flatten(Transport(marginal=part))
    assert leaves[-1] is row or row in leaves
    assert torch.utils._pytree.tree_unflatten(leaves, spec).marginal == part
    assert Transport(marginal=part) != Transport(marginal=Rows()) and Transport(marginal=Free()) != Transport(
        marginal=part
    )


def test_compiled_with_a_break_in_the_graph():
    q, k, v = (draw(1, 2, 6, 4, seed=n, dtype=torch.float32, grad=True) for n in range(3))

    def run(q, k, v):
        return regard.attention(2 * q, k, v, problem=Transport(marginal=RowsAndColumns())).square()

    expected = run(q, k, v)
    got = torch.compile(run, backend="aot_eager")(q, k, v)
    assert torch.allclose(got, expected)
    for a, b in zip(
        torch.autograd.grad(got.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-6)


@reads_peak
@pytest.mark.skipif("native" not in BACKENDS, reason="the native engine was not built")
def test_memory_is_linear():
    """No Tq x Tk buffer: a plan of 4096 x 4096 in float32 would be 64 MiB for each of two heads."""
    code = PEAK + (
        "import torch, regard\n"
        "q, k, v = (torch.randn(1, 2, 4096, 8, requires_grad=True) for _ in range(3))\n"
        "p = regard.Transport(marginal=regard.RowsAndColumns(tolerance=1e-2))\n"
        "regard.attention(q[:, :, :64], k[:, :, :64], v[:, :, :64], problem=p).sum().backward()\n"
        "before = peak()\n"
        "regard.attention(q, k, v, problem=p).sum().backward()\n"
        "print(peak() - before)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < float(found.stdout) < 64


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def test_bidirectional_models():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    name = regard.hf.register("two-sided", Transport(marginal=RowsAndColumns()))
    model = transformers.BertModel(transformers.BertConfig(vocab_size=32, **sizes)).eval()
    model.set_attn_implementation(name)
    ids = torch.randint(32, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).last_hidden_state
        alone = model(ids[1:, :5]).last_hidden_state
        assert (padded[1, :5] - alone[0]).abs().max() < 1e-5  # padding neither sends nor receives mass
    seen = regard.inspect(
        model, {"input_ids": ids, "attention_mask": mask}, statistics=["entropy", "key_mass", "value"]
    )
    table = seen.to_pandas()
    assert np.allclose(table["key_mass"], table["key_mass"].iloc[0], atol=1e-4) and min(table["entropy"]) > 0
    image = transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=4, **sizes))
    image.set_attn_implementation(name)
    image(torch.randn(1, 3, 16, 16)).last_hidden_state.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in image.parameters() if p.grad is not None)
    causal = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    causal.set_attn_implementation(name)
    with pytest.raises(ValueError, match="read the future"):
        causal(ids)
