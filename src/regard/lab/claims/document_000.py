"""The claims of document 000, a post: softmax as the solution of an entropy-regularized transport problem.

s are scores, τ the temperature and p the plan (the attention weights).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import Transport, Tsallis

from ..numbers import agree, certified, draw, how_close, increasing, show, tensor
from ..variants import without_sign
from .claim import CheckResult, collect, judged, says, untestable
from .rows import EXAMPLE, TAU, divergence, entropy, random_plans, weights

_TOP, _DERIVATION = "TL;DR", "Derivation"
_OBJECTIVE, _LAGRANGIAN = "1. The Optimization Objective", "2. Lagrangian Formulation"
_CONDITIONS, _SOLUTION = "3. First-Order Optimality Conditions", "4. Solution Derivation"

no_firm_basis = untestable(
    "000", _TOP, "“lacking a firm mathematical basis”", "A judgement on a field; there is nothing to compute."
)


@says("000", _TOP, "softmax is “the exact solution to an entropy-regularized optimal transport problem”")
def exact_solution_of_transport() -> CheckResult:
    s = draw(6, 6, scale=1.5)
    p = s.softmax(-1)
    columns = p.sum(0)
    optimal = regard.certify(s, p).holds(1e-10)
    return judged(
        f"Of the one-sided problem: {certified(optimal)}. Transport proper also fixes what each key "
        f"receives; a 6 × 6 softmax gives its keys from {columns.min():.2f} to {columns.max():.2f}.",
        optimal and agree(columns, torch.ones(6, dtype=torch.float64), 1e-2),
        optimal,
    )


@says("000", _DERIVATION, "softmax is “the unique solution”")
def unique_solution() -> CheckResult:
    p = random_plans(1000, 4)
    gap = regard.certify(EXAMPLE.expand_as(p), p, Transport(temperature=TAU)).gap
    best = weights(EXAMPLE, TAU)
    short = TAU * divergence(p, best.expand_as(p))
    tied = regard.certify(tensor(1, 1).expand(2, 2), torch.eye(2).double(), Transport(temperature=0.0)).gap
    return judged(
        f"Of 1000 random plans each falls short by τ·KL(p‖softmax) ({how_close(gap, short)}), so by 0 for softmax "
        f"alone. This needs τ > 0: at τ = 0 both one-hot plans of two tied keys have gap {show(tied, 0)}.",
        agree(gap, short) and bool((gap > 0).all()),
    )


@says("000", _DERIVATION, "“balancing the maximization of similarity against … entropy”")
def balances() -> CheckResult:
    taus = [0.1, 0.3, 1.0, 3.0, 10.0]
    plans = torch.stack([weights(EXAMPLE, t) for t in taus])
    similarity, h = plans @ EXAMPLE, entropy(plans)
    return judged(
        f"τ = 0.1 … 10: similarity falls {show(similarity[[0, -1]])}, entropy rises {show(h[[0, -1]])}, both at "
        "every step.",
        increasing(-similarity) and increasing(h),
    )


@says("000", _DERIVATION, "“Scaled Dot-Product Attention” is this problem")
def scaled_attention_is_the_problem() -> CheckResult:
    q, k = draw(1, 1, 5, 16, seed=1), draw(1, 1, 7, 16, seed=2)
    read = F.scaled_dot_product_attention(q, k, torch.eye(7).double()[None, None])
    p = weights(q @ k.mT, math.sqrt(16))
    return judged(f"PyTorch's SDPA and the plan at τ = √d_k on raw dot products {how_close(read, p)}.", agree(read, p))


@says("000", _OBJECTIVE, "“simplex constraint Σ p = 1”")
def simplex_constraint() -> CheckResult:
    softmax, free_sign = weights(EXAMPLE), regard.solve(EXAMPLE, Transport(without_sign())).weights
    return judged(
        f"The simplex is Σ p = 1 and p ≥ 0. Entropy brings p > 0 along (smallest weight {softmax.min():.3f}); with "
        f"Σ p²/2 in its place the printed constraint alone gives {show(free_sign)}.",
        bool((free_sign >= 0).all()) and bool((softmax > 0).all()),
        bool((softmax > 0).all()),
    )


def _lagrangian(p: Tensor, multiplier: Tensor) -> Tensor:
    """As printed in 000."""
    return -(p * EXAMPLE).sum() + TAU * (p * p.log()).sum() + multiplier * (1 - p.sum())


@says("000", _LAGRANGIAN, "L = −Σ p (q·k) + τ Σ p log p + λ(1 − Σ p)")
def lagrangian() -> CheckResult:
    plan = regard.solve(EXAMPLE, Transport(temperature=TAU))
    p = plan.weights.clone().requires_grad_()
    multiplier = (TAU - plan.dual).requires_grad_()
    by_p, by_multiplier = torch.autograd.grad(_lagrangian(p, multiplier), (p, multiplier))
    slope = torch.cat([by_p, by_multiplier[None]])
    return judged(
        f"Stationary at the softmax plan with λ = τ − τ log Z = {TAU - plan.dual:.3f}: its gradient and 0 "
        f"{how_close(slope, torch.zeros_like(slope))}.",
        agree(slope, torch.zeros_like(slope)),
    )


@says("000", _CONDITIONS, "∂L/∂p = −q·k + τ(1 + log p) − λ")
def derivative_of_the_lagrangian() -> CheckResult:
    p, multiplier = random_plans(4, seed=3).requires_grad_(), tensor(0.3)[0]
    (found,) = torch.autograd.grad(_lagrangian(p, multiplier), p)
    printed = -EXAMPLE + TAU * (1 + p.log()) - multiplier
    return judged(f"Autograd and the formula, at a random p: {how_close(found, printed)}.", agree(found, printed))


@says("000", _CONDITIONS, "“set it to zero (KKT condition)”")
def karush_kuhn_tucker() -> CheckResult:
    soft, sparse = regard.solve(EXAMPLE, Transport(temperature=TAU)), regard.solve(EXAMPLE, Transport(Tsallis(2.0)))
    # The multipliers of p ≥ 0, which the printed condition leaves out: τ f′(p) + λ − s.
    softmax_needs = TAU * soft.weights.log() + soft.dual - EXAMPLE
    sparsemax_needs = sparse.weights + sparse.dual - EXAMPLE
    return judged(
        f"KKT also has multipliers of p ≥ 0. For softmax they and 0 {how_close(softmax_needs, 0 * EXAMPLE)}, so that "
        f"the derivative alone decides; sparsemax needs them: {show(sparsemax_needs, 1)}.",
        agree(softmax_needs, 0 * EXAMPLE) and float(sparsemax_needs.max()) > 0.1,
    )


@says("000", _SOLUTION, "τ log p = q·k + λ − τ")
def rearranged() -> CheckResult:
    plan = regard.solve(EXAMPLE, Transport(temperature=TAU))
    multiplier = TAU - plan.dual
    left, right = TAU * plan.weights.log(), EXAMPLE + multiplier - TAU
    return judged(
        f"With λ = τ − τ log Z = {multiplier:.3f} both sides {how_close(left, right)} "
        f"(regard's dual has the other sign and origin: τ log Z = {plan.dual:.3f}).",
        agree(left, right) and agree(plan.dual, TAU * (EXAMPLE / TAU).logsumexp(-1)),
    )


@says("000", _SOLUTION, "“exp((λ − τ)/τ) is constant for all j”, it is 1/Z")
def scaling_factor() -> CheckResult:
    plan = regard.solve(EXAMPLE, Transport(temperature=TAU))
    factor = plan.weights / (EXAMPLE / TAU).exp()
    with_multiplier = ((TAU - plan.dual - TAU) / TAU).exp()
    inverse = 1 / (EXAMPLE / TAU).exp().sum()
    return judged(
        f"p/exp(s/τ) of the four keys, exp((λ − τ)/τ) and 1/Z = {inverse:.5f}: they "
        f"{how_close(torch.cat([factor, with_multiplier[None]]), inverse.expand(5))}.",
        agree(factor, inverse.expand(4)) and agree(with_multiplier, inverse),
    )


@says("000", _SOLUTION, "p* = exp(q·k/τ) / Σ exp(q·k/τ)")
def canonical_softmax() -> CheckResult:
    s, taus = draw(50, 6, seed=4, scale=3), [0.2, 0.7, 1.0, 5.0]
    solved = torch.stack([weights(s, t) for t in taus])
    formula = torch.stack([(s / t).exp() / (s / t).exp().sum(-1, keepdim=True) for t in taus])
    return judged(
        f"The solved plan and the formula, 50 rows at τ = 0.2 … 5: {how_close(solved, formula)}.",
        agree(solved, formula),
    )


CLAIMS = collect(globals())
