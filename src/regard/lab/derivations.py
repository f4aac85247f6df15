"""The claims of the four documents that derive softmax (000, 001, 002 and 004), each with its check.

s are scores, τ = 1/β the temperature, p the plan (the attention weights), u the utility ⟨∂L/∂o, v⟩ of each key.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import KL, AuxRequest, Bias, Causal, Transport, Tsallis, Window

from .teasers import without_sign
from .verdicts import (
    Finding,
    agree,
    certified,
    collect,
    draw,
    how_close,
    increasing,
    judged,
    multiply_adds,
    prints,
    says,
    show,
    tensor,
    tick,
    untestable,
)

S = tensor(2.8, 1.2, 0.5, 3.1)
TAU = 0.7


def entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q)."""
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)


def weights(scores: Tensor, temperature: float = 1.0) -> Tensor:
    return regard.solve(scores, Transport(temperature=temperature)).weights


def random_plans(*shape: int, seed: int = 0) -> Tensor:
    return draw(*shape, seed=seed, scale=1.5).softmax(-1)


def tangents(constraints: Tensor) -> Tensor:
    """An orthonormal basis [n, k] of the directions that leave every row of `constraints` [m, n] unchanged."""
    _, singular, v = torch.linalg.svd(constraints, full_matrices=True)
    return v[int((singular > 1e-9).sum()) :].T


# --- 000: softmax as entropic optimal transport -----------------------------------------------------------------------

_000_TOP, _000_INTRO = "TL;DR", "Derivation"
_000_1, _000_2 = "1. The Optimization Objective", "2. Lagrangian Formulation"
_000_3, _000_4 = "3. First-Order Optimality Conditions", "4. Solution Derivation"

no_firm_basis = untestable(
    "000", _000_TOP, "“lacking a firm mathematical basis”", "A judgement on a field; there is nothing to compute."
)


@says("000", _000_TOP, "softmax is “the exact solution to an entropy-regularized optimal transport problem”")
def exact_solution_of_transport() -> Finding:
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


@says("000", _000_INTRO, "softmax is “the unique solution”")
def unique_solution() -> Finding:
    p = random_plans(1000, 4)
    gap = regard.certify(S.expand_as(p), p, Transport(temperature=TAU)).gap
    best = weights(S, TAU)
    short = TAU * divergence(p, best.expand_as(p))
    tied = regard.certify(tensor(1, 1).expand(2, 2), torch.eye(2).double(), Transport(temperature=0.0)).gap
    return judged(
        f"Of 1000 random plans each falls short by τ·KL(p‖softmax) ({how_close(gap, short)}), so by 0 for softmax "
        f"alone. It takes τ > 0: at τ = 0 both one-hot plans of two tied keys have gap {show(tied, 0)}.",
        agree(gap, short) and bool((gap > 0).all()),
    )


@says("000", _000_INTRO, "“balancing the maximization of similarity against … entropy”")
def balances() -> Finding:
    taus = [0.1, 0.3, 1.0, 3.0, 10.0]
    plans = torch.stack([weights(S, t) for t in taus])
    similarity, h = plans @ S, entropy(plans)
    return judged(
        f"τ = 0.1 … 10: similarity falls {show(similarity[[0, -1]])}, entropy rises {show(h[[0, -1]])}, both at "
        "every step.",
        increasing(-similarity) and increasing(h),
    )


@says("000", _000_INTRO, "“Scaled Dot-Product Attention” is this problem")
def scaled_attention_is_the_problem() -> Finding:
    q, k = draw(1, 1, 5, 16, seed=1), draw(1, 1, 7, 16, seed=2)
    read = F.scaled_dot_product_attention(q, k, torch.eye(7).double()[None, None])
    p = weights(q @ k.mT, math.sqrt(16))
    return judged(f"PyTorch's SDPA and the plan at τ = √d_k on raw dot products {how_close(read, p)}.", agree(read, p))


@says("000", _000_1, "“simplex constraint Σ p = 1”")
def simplex_constraint() -> Finding:
    softmax, free_sign = weights(S), regard.solve(S, Transport(without_sign())).weights
    return judged(
        f"The simplex is Σ p = 1 and p ≥ 0. Entropy brings p > 0 along (smallest weight {softmax.min():.3f}); with "
        f"Σ p²/2 in its place the printed constraint alone gives {show(free_sign)}.",
        bool((free_sign >= 0).all()) and bool((softmax > 0).all()),
        bool((softmax > 0).all()),
    )


def _lagrangian(p: Tensor, multiplier: Tensor) -> Tensor:
    """As printed in 000."""
    return -(p * S).sum() + TAU * (p * p.log()).sum() + multiplier * (1 - p.sum())


@says("000", _000_2, "L = −Σ p (q·k) + τ Σ p log p + λ(1 − Σ p)")
def lagrangian() -> Finding:
    plan = regard.solve(S, Transport(temperature=TAU))
    p = plan.weights.clone().requires_grad_()
    multiplier = (TAU - plan.dual).requires_grad_()
    by_p, by_multiplier = torch.autograd.grad(_lagrangian(p, multiplier), (p, multiplier))
    slope = torch.cat([by_p, by_multiplier[None]])
    return judged(
        f"Stationary at the softmax plan with λ = τ − τ log Z = {TAU - plan.dual:.3f}: its gradient and 0 "
        f"{how_close(slope, torch.zeros_like(slope))}.",
        agree(slope, torch.zeros_like(slope)),
    )


@says("000", _000_3, "∂L/∂p = −q·k + τ(1 + log p) − λ")
def derivative_of_the_lagrangian() -> Finding:
    p, multiplier = random_plans(4, seed=3).requires_grad_(), tensor(0.3)[0]
    (found,) = torch.autograd.grad(_lagrangian(p, multiplier), p)
    printed = -S + TAU * (1 + p.log()) - multiplier
    return judged(f"Autograd and the formula, at a random p: {how_close(found, printed)}.", agree(found, printed))


@says("000", _000_3, "“set it to zero (KKT condition)”")
def karush_kuhn_tucker() -> Finding:
    soft, sparse = regard.solve(S, Transport(temperature=TAU)), regard.solve(S, Transport(Tsallis(2.0)))
    # The multipliers of p ≥ 0, which the printed condition leaves out: τ f′(p) + λ − s.
    softmax_needs = TAU * soft.weights.log() + soft.dual - S
    sparsemax_needs = sparse.weights + sparse.dual - S
    return judged(
        f"KKT also has multipliers of p ≥ 0. For softmax they and 0 {how_close(softmax_needs, 0 * S)}, so that the "
        f"derivative alone decides; sparsemax needs them: {show(sparsemax_needs, 1)}.",
        agree(softmax_needs, 0 * S) and float(sparsemax_needs.max()) > 0.1,
    )


@says("000", _000_4, "τ log p = q·k + λ − τ")
def rearranged() -> Finding:
    plan = regard.solve(S, Transport(temperature=TAU))
    multiplier = TAU - plan.dual
    left, right = TAU * plan.weights.log(), S + multiplier - TAU
    return judged(
        f"With λ = τ − τ log Z = {multiplier:.3f} both sides {how_close(left, right)} "
        f"(regard's dual has the other sign and origin: τ log Z = {plan.dual:.3f}).",
        agree(left, right) and agree(plan.dual, TAU * (S / TAU).logsumexp(-1)),
    )


@says("000", _000_4, "“exp((λ − τ)/τ) is constant for all j”, it is 1/Z")
def scaling_factor() -> Finding:
    plan = regard.solve(S, Transport(temperature=TAU))
    factor = plan.weights / (S / TAU).exp()
    with_multiplier = ((TAU - plan.dual - TAU) / TAU).exp()
    inverse = 1 / (S / TAU).exp().sum()
    return judged(
        f"p/exp(s/τ) of the four keys, exp((λ − τ)/τ) and 1/Z = {inverse:.5f}: they "
        f"{how_close(torch.cat([factor, with_multiplier[None]]), inverse.expand(5))}.",
        agree(factor, inverse.expand(4)) and agree(with_multiplier, inverse),
    )


@says("000", _000_4, "p* = exp(q·k/τ) / Σ exp(q·k/τ)")
def canonical_softmax() -> Finding:
    s, taus = draw(50, 6, seed=4, scale=3), [0.2, 0.7, 1.0, 5.0]
    solved = torch.stack([weights(s, t) for t in taus])
    formula = torch.stack([(s / t).exp() / (s / t).exp().sum(-1, keepdim=True) for t in taus])
    return judged(
        f"The solved plan and the formula, 50 rows at τ = 0.2 … 5: {how_close(solved, formula)}.",
        agree(solved, formula),
    )


# --- 001: SDPA as one-sided entropic optimal transport, the abstract --------------------------------------------------

_ABSTRACT = "Abstract"


def _backward() -> tuple[Tensor, Tensor, Tensor, float]:
    """A row of PyTorch's own attention with an arbitrary loss: plan, utility, ∂L/∂s, τ."""
    q, k, v, g = draw(1, 8, seed=5), draw(6, 8, seed=6), draw(6, 3, seed=7), draw(1, 3, seed=8)
    tau = math.sqrt(8)
    # A float mask is added to the scaled score s/τ: its gradient is τ ∂L/∂s.
    mask = torch.zeros(1, 6, dtype=torch.float64, requires_grad=True)
    out = F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], attn_mask=mask[None, None])
    (slope,) = torch.autograd.grad((out[0, 0] * g).sum(), mask)
    return weights(q @ k.mT, tau), g @ v.mT, slope / tau, tau


@says("001", _ABSTRACT, "the forward pass is “the exact solution to a degenerate, one-sided” EOT problem")
def forward_is_optimal() -> Finding:
    q, k = draw(2, 2, 6, 8, seed=1), draw(2, 2, 6, 8, seed=2)
    p = regard.attention(q, k, torch.eye(6).double().expand(2, 2, 6, 6), is_causal=True)
    s = q @ k.mT / math.sqrt(8)
    optimal = regard.certify(s, p, Transport(prior=Causal())).holds(1e-10)
    alone = torch.stack([weights(row) for row in s.flatten(0, 2)]).reshape(s.shape)
    return judged(
        f"24 causal rows of attention, {certified(optimal)}. Degenerate: nothing couples the rows; "
        f"solved together or one by one they {how_close(weights(s), alone)}.",
        optimal and agree(weights(s), alone),
    )


@says("001", _ABSTRACT, "“maximizes similarity while being maximally entropic”")
def maximal_in_both() -> Finding:
    p = weights(S)
    similarity, h = float(p @ S), float(entropy(p))
    directions = tangents(torch.stack([torch.ones_like(S), S]))
    moved = torch.cat([p + sign * 0.01 * d for d in directions.T for sign in (1, -1)]).reshape(-1, 4)
    entropic = bool((entropy(moved) < h).all())
    return judged(
        f"Neither: similarity {similarity:.2f} of at most {S.max():.2f}, entropy {h:.2f} of at most "
        f"{math.log(4):.2f}. True of plans with equal similarity: moving along them lowers the entropy "
        f"{tick(entropic)}.",
        similarity > float(S.max()) - 1e-6 and h > math.log(4) - 1e-6,
        entropic,
    )


@says("001", _ABSTRACT, "backpropagation “is mathematically identical to an advantage-based policy gradient”")
def backward_is_policy_gradient() -> Finding:
    p, u, slope, tau = _backward()
    policy = p / tau * (u - (p * u).sum(-1, keepdim=True))
    return judged(
        f"Autograd through PyTorch's SDPA and (p/τ)(u − E[u]): {how_close(slope, policy)}.", agree(slope, policy)
    )


def _estimator_variance(p: Tensor, u: Tensor, baseline: Tensor) -> Tensor:
    """Exact total variance of (u_J − b)(e_J − p), J drawn from p."""
    each = (u - baseline)[..., None] * (torch.eye(p.shape[-1]).double() - p[..., None, :])  # [..., J, component]
    mean = (p[..., None] * each).sum(-2)
    return (p * each.square().sum(-1)).sum(-1) - mean.square().sum(-1)


@says("001", _ABSTRACT, "an advantage-based update is “variance-reduced”")
def variance_reduced() -> Finding:
    p, u = tensor(0.9, 0.1), tensor(1.0, 0.0)
    plain, based = (float(_estimator_variance(p, u, b)) for b in (tensor(0), (p @ u)[None]))
    many, utilities = random_plans(2000, 6, seed=9), draw(2000, 6, seed=10)
    expected = (many * utilities).sum(-1, keepdim=True)
    shrinks = _estimator_variance(many, utilities, expected) < _estimator_variance(many, utilities, 0 * expected)
    share = float(shrinks.double().mean())
    return judged(
        f"Usual, not a law: smaller in {share:.0%} of 2000 random rows, but p = (0.9, 0.1), u = (1, 0) has variance "
        f"{plain:.4f} without and {based:.4f} with the baseline. Backpropagation samples nothing: its variance is 0.",
        bool(shrinks.all()) and based < plain,
        share > 0.5,
    )


def _fisher(p: Tensor, tau: float) -> Tensor:
    return (torch.diag(p) - torch.outer(p, p)) / tau**2


@says("001", _ABSTRACT, "the forward pass “induces a specific information geometry”, the Fisher matrix")
def fisher_geometry() -> Finding:
    def log_partition(s: Tensor) -> Tensor:
        return regard.solve(s, Transport(temperature=TAU)).dual / TAU

    hessian = torch.autograd.functional.hessian(log_partition, S)
    assert isinstance(hessian, Tensor)
    fisher = _fisher(weights(S, TAU), TAU)
    return judged(
        f"Hessian of log Z and Fisher matrix (diag p − ppᵀ)/τ²: {how_close(hessian, fisher, 1e-8)}; the potential "
        f"τ log Z itself has τ times that.",
        agree(hessian, fisher, 1e-8),
    )


@says("001", _ABSTRACT, "this geometry “dictates the precise form of the learning gradient”")
def fisher_dictates_the_gradient() -> Finding:
    p, u, slope, tau = _backward()
    formula = tau * _fisher(p[0], tau) @ u[0]
    return judged(
        f"∂L/∂s and τ·Fisher·u {how_close(slope[0], formula)}: the metric times the utility.", agree(slope[0], formula)
    )


@says("001", _ABSTRACT, "“a rational, manifold-aware learning update”")
def manifold_aware() -> Finding:
    u = tensor(1.0, -1.0, 0.5)
    steps, natural = [], []
    for gap in (1.0, 20.0):
        p = weights(tensor(gap, 0, 0))
        fisher = _fisher(p, 1.0)
        steps.append(fisher @ u)
        natural.append(_apply_inverse(fisher, steps[-1]))
    tangent = max(abs(float(g.sum())) for g in steps) < 1e-12
    spread = natural[1] - natural[1].mean()
    return judged(
        f"If that means the natural gradient, no: gaps of 1 and 20 give |∂L/∂s| = {steps[0].norm():.2f} and "
        f"{steps[1].norm():.0e}, the natural gradient {natural[0].norm():.2f} and {spread.norm():.2f}. The update "
        f"does stay on the simplex: it sums to 0 {tick(tangent)}.",
        agree(steps[1], natural[1], 1e-3),
        tangent,
    )


def _apply_inverse(fisher: Tensor, x: Tensor) -> Tensor:
    """Fisher⁺ x in the basis that sums to 0, where Fisher is invertible."""
    basis = tangents(torch.ones(1, 3, dtype=torch.float64))
    return basis @ torch.linalg.solve(basis.T @ fisher @ basis, basis.T @ x)


heuristic_form = untestable(
    "001", _ABSTRACT, "the form “is often motivated by heuristics”", "A remark on papers; nothing to compute."
)

# --- 002: Why Softmax? ------------------------------------------------------------------------------------------------

_INTRODUCTION, _TESTING, _MOTIVATION = "Introduction", "Softmax as hypothesis testing", "Motivation"
_KL_VIEW, _INTERPRETATION = "A KL-constrained view", "Interpretation"
_BETAS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@says("002", _INTRODUCTION, "a token attends to “all tokens before it {{ h_i : i < t }}”")
def strictly_the_past() -> Finding:
    q, k, v = (draw(1, 1, 5, 4, seed=i) for i in (1, 2, 3))
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    strict = regard.attention(q, k, v, problem=Transport(prior=Window(None, -1)))
    inclusive = regard.attention(q, k, v, problem=Transport(prior=Window(None, 0)))
    return judged(
        f"i ≤ t: the token itself is included in PyTorch's causal attention ({how_close(inclusive, causal)}). With "
        f"i < t the first token has no key: its output is {show(strict[0, 0, 0].abs().max()[None], 0)}.",
        agree(strict, causal),
        agree(inclusive, causal),
    )


@says("002", _INTRODUCTION, "“q, k ∈ R^d_k and d_k < d_model”")
def keys_are_smaller() -> Finding:
    h, ranks, optimal = draw(10, 8, seed=1), [], []
    for d_k in (3, 8):
        w_q, w_k = draw(8, d_k, seed=2), draw(8, d_k, seed=3)
        s = h @ w_q @ (h @ w_k).mT
        ranks.append(int(torch.linalg.matrix_rank(s)))
        optimal.append(regard.certify(s, weights(s)).holds(1e-9))
    return judged(
        f"A convention: d_k = 3 of d_model = 8 gives scores of rank {ranks[0]}, d_k = d_model of rank {ranks[1]}; the "
        f"weights are optimal either way {tick(all(optimal))}.",
        not optimal[1],
        all(optimal) and ranks == [3, 8],
    )


@says("002", _INTRODUCTION, "O = Σ π v with π = exp(β k·q)/Σ exp(β k·q)")
def update_of_the_stream() -> Finding:
    q, k, v = draw(1, 1, 5, 4, seed=1), draw(1, 1, 7, 4, seed=2), draw(1, 1, 7, 3, seed=3)
    beta = 0.3
    z = (beta * q @ k.mT).exp()
    o = z / z.sum(-1, keepdim=True) @ v
    found = regard.attention(q, k, v, scale=beta)
    inside = bool(((o >= v.amin(2, keepdim=True)) & (o <= v.amax(2, keepdim=True))).all())
    return judged(
        f"The formula and attention with scale β {how_close(o, found)}; every output lies between the smallest and "
        f"largest value {tick(inside)}: an average.",
        agree(o, found) and inside,
    )


@says("002", _INTRODUCTION, "“π_i = softmax(β k_i·q)”")
def softmax_of_a_number() -> Finding:
    one, row = regard.solve(S[:1]).weights, regard.solve(S).weights
    return judged(
        f"Softmax of the single number 2.8 is {one.item():.0f}. It is a function of the whole row: component 1 of "
        f"softmax(2.8, 1.2, 0.5, 3.1) is {row[0]:.3f}.",
        agree(one, row[:1]),
        agree(row, S.exp() / S.exp().sum()),
    )


@says("002", _INTRODUCTION, "“information between positions can become more and more mixed”")
def mixing() -> Finding:
    x = draw(1, 1, 8, 4, seed=4)

    def layers(x: Tensor, depth: int) -> Tensor:
        for _ in range(depth):
            x = x + regard.attention(x, x, x, problem=Transport(prior=Window(1)))
        return x[0, 0, -1].sum()

    reached = []
    for depth in (1, 2, 3, 4):
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(layers(leaf, depth), leaf)
        reached.append(int((slope[0, 0].abs().amax(-1) > 0).sum()))
    return judged(
        "Layers that see one token back: the last position depends on "
        f"{', '.join(map(str, reached))} tokens after 1 … 4 layers.",
        increasing(reached),
    )


looking_for = untestable(
    "002",
    _INTRODUCTION,
    "the query is what a token is “looking for”, keys are what is “advertised”",
    "An interpretation; it predicts no number.",
)


@says("002", _TESTING, "without a reason “to prefer one index over another” …")
def no_preference() -> Finding:
    plans = torch.stack([weights(torch.full((5,), 1.7).double(), 1 / b) for b in _BETAS])
    return judged(
        f"Equal scores give the uniform null at every β (weights {show(plans[0, :1], 2)} of 5 keys; "
        f"{how_close(plans, torch.full_like(plans, 0.2))}).",
        agree(plans, torch.full_like(plans, 0.2)),
    )


testing_is_unfinished = untestable(
    "002",
    _TESTING,
    "the section's argument",
    "It breaks off before its argument (and refers to an equation that is not there); what can be tested is in the "
    "rows on KL below.",
)


@says("002", _TESTING, "“The limit β → ∞ produces hard routing.”")
def hard_limit() -> Finding:
    hard = weights(S, 0.0)
    apart = [float((weights(S, 1 / b) - hard).abs().max()) for b in (10.0, 100.0, 1000.0)]
    bound = [3 * math.exp(-0.3 * b) for b in (10.0, 100.0, 1000.0)]
    tied = weights(tensor(2, 2, 1), 0.0)
    converges = all(a <= b for a, b in zip(apart, bound, strict=True)) and apart[-1] < 1e-12
    return judged(
        f"Distance to argmax at β = 10, 100: {apart[0]:.3f}, {apart[1]:.0e}; below (n − 1)exp(−β·gap) always "
        f"{tick(converges)}. Tied keys share: {show(tied, 1)}.",
        converges and agree(tied, tensor(0.5, 0.5, 0)),
    )


@says("002", _TESTING, "π* = argmax Σ π z − (1/β) KL(π‖u)")
def maximiser() -> Finding:
    s, beta = draw(200, 5, seed=5, scale=2), 1.7
    null = Bias(torch.full((5,), -math.log(5), dtype=torch.float64))
    p = (beta * s).softmax(-1)
    optimal = regard.certify(s, p, Transport(KL(), prior=null, temperature=1 / beta)).holds(1e-10)
    return judged(
        f"softmax(βz) for 200 rows, with u as prior and τ = 1/β: {certified(optimal)}. The argmax is "
        "the whole plan, not its component i.",
        optimal,
    )


@says("002", _MOTIVATION, "“attention weights are usually written as” exp(βz)/Σ exp(βz)")
def usual_weights() -> Finding:
    q, k = draw(1, 1, 4, 9, seed=6), draw(1, 1, 6, 9, seed=7)
    read = F.scaled_dot_product_attention(q, k, torch.eye(6).double()[None, None])
    p = weights(q @ k.mT, 3.0)
    return judged(f"PyTorch's SDPA is that with β = 1/√d_k: {how_close(read, p)}.", agree(read, p))


@says("002", _KL_VIEW, "“KL-constrained”")
def constrained_or_penalised() -> Finding:
    mild, wild = tensor(0.3, 0.1, 0), tensor(3, 1, 0)
    null = torch.full((3,), 1 / 3, dtype=torch.float64)

    def evidence(s: Tensor, beta: float) -> float:
        return float(divergence(weights(s, 1 / beta), null))

    spent = [evidence(mild, 1.7), evidence(wild, 1.7)]
    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if middle == 0 or evidence(wild, middle) < spent[1] else (low, middle)
    return judged(
        f"Penalised: the same β = 1.7 spends {spent[0]:.3f} nats on one row and {spent[1]:.3f} on another. A budget "
        f"picks one β per row: {spent[1]:.3f} nats gives back β = {low:.3f}.",
        abs(spent[0] - spent[1]) < 1e-6,
        abs(low - 1.7) < 1e-6,
    )


@says("002", _KL_VIEW, "u is “uniform … over admissible indices”")
def null_over_admissible() -> Finding:
    q, k, v = (draw(1, 1, 6, 4, seed=i) for i in (1, 2, 3))
    _, aux = regard.attention(q, k, v, is_causal=True, return_aux=AuxRequest(kl=True, entropy=True))
    assert aux.kl is not None and aux.entropy is not None
    by_hand = torch.arange(1, 7).double().log() - aux.entropy[0, 0]
    p = regard.solve(q @ k.mT, Transport(prior=Causal())).weights
    outside = float(p.triu(1).abs().max())
    return judged(
        f"A causal plan has mass {outside:.0f} elsewhere, and its KL and log(number admissible) − entropy "
        f"{how_close(aux.kl[0, 0], by_hand)}.",
        outside == 0 and agree(aux.kl[0, 0], by_hand),
    )


@says("002", _KL_VIEW, "“π* ∝ exp(βz), which recovers softmax”")
def proportional_to_exp() -> Finding:
    s = draw(100, 5, seed=8, scale=2)
    null = Bias(torch.full((5,), -math.log(5), dtype=torch.float64))
    p = regard.solve(s, Transport(prior=null, temperature=1 / 1.7)).weights
    ratio = p / (1.7 * s).exp()
    flat = ratio / ratio.mean(-1, keepdim=True)
    return judged(
        f"p/exp(βz) is one number per row, for 100 rows: relative to their means they and 1 "
        f"{how_close(flat, torch.ones_like(flat))}.",
        agree(flat, torch.ones_like(flat)),
    )


@says("002", _INTERPRETATION, "“The KL term bounds distinguishability from a null hypothesis.”")
def kl_bounds_distinguishability() -> Finding:
    s, beta, n = draw(2000, 8, seed=9, scale=2), 1.5, 8
    p = weights(s, 1 / beta)
    kl = divergence(p, torch.full_like(p, 1 / n))
    variation = (p - 1 / n).abs().sum(-1) / 2
    bought = beta * ((p * s).sum(-1) - s.mean(-1))
    pinsker, paid = bool((variation <= (kl / 2).sqrt()).all()), bool((kl <= bought).all())
    return judged(
        f"2000 rows: no test tells the plan from the null by more than √(KL/2) in one draw {tick(pinsker)}, and KL is "
        f"at most β times the similarity gained {tick(paid)}. Telling them apart at level 5 % takes about log(20)/KL "
        f"draws, here {math.log(20) / float(kl.median()):.1f} in the median row.",
        pinsker and paid,
    )


@says("002", _INTERPRETATION, "“Large β allows sharper routing; small β enforces caution.”")
def beta_sharpens() -> Finding:
    kl = torch.stack([math.log(4) - entropy(weights(S, 1 / b)) for b in _BETAS])
    cautious = float(divergence(weights(S, 1e6), torch.full_like(S, 0.25)))
    return judged(
        f"KL to the null grows with β = {_BETAS[0]} … {_BETAS[-1]:.0f}: {show(kl, 2)} nats; as β → 0 it is "
        f"{cautious:.0f}.",
        increasing(kl) and abs(cautious) < 1e-9,
    )


# --- 004: maximum likelihood and maximum entropy ----------------------------------------------------------------------

_SOFTMAX, _FIGURE, _LIKELIHOOD = "Estimation of Softmax Function", "Figure 1", "Maximum Likelihood Estimation"
_ENTROPY, _CONCLUSION, _APPENDIX = "Maximum Entropy Approach", "Conclusion", "Appendix A"

ALPHA, BETA = 0.6, 2.5
_Q, _K, _V = draw(4, seed=1), draw(5, 4, seed=2), draw(5, 3, seed=3)


def _precision() -> Tensor:
    """θ of Eq. 3."""
    return (ALPHA * _K @ _Q).exp()


def _log_density(observed: Tensor, v: Tensor, theta: Tensor) -> Tensor:
    """log g of Eq. 2."""
    return 0.5 * (theta * BETA / (2 * math.pi)).log() - theta * BETA / 2 * (v - observed) ** 2


def _attention(scale: float = ALPHA, values: Tensor = _V) -> Tensor:
    return regard.attention(_Q[None, None, None], _K[None, None], values[None, None], scale=scale)[0, 0, 0]


def _integral(density: Tensor, at: Tensor) -> float:
    return float(torch.trapezoid(density, at))


@says("004", "Title", "“Deriving the Scaled-Dot-Function”")
def scale_is_not_derived() -> Finding:
    alphas = (0.1, 1 / math.sqrt(4), 2.0)
    estimates, outputs = [], []
    for alpha in alphas:
        theta = (alpha * _K @ _Q).exp()
        estimates.append((theta[:, None] * _V).sum(0) / theta.sum())
        outputs.append(_attention(alpha))
    likely = agree(torch.stack(estimates), torch.stack(outputs))
    return judged(
        f"The form, not the scale: for α = 0.1, 1/√d and 2 alike the estimate and attention with scale α "
        f"{how_close(torch.stack(estimates), torch.stack(outputs))}; nothing singles out 1/√d.",
        not likely,
        likely,
    )


@says("004", "Abstract, Conclusion", "values, keys “and the query vector” are modelled as Gaussian")
def only_values_are_random() -> Finding:
    at = torch.linspace(-60, 60, 200001, dtype=torch.float64)
    theta = tensor(0.8)
    over_values = _integral(_log_density(at, tensor(2.0), theta).exp(), at)
    # one-dimensional key, q = 1, α = 1, and v − v_i = 2
    over_keys = _integral(_log_density(tensor(0.0), tensor(2.0), at.clamp(max=40).exp()).exp(), at)
    return judged(
        f"Only the values: Eq. 2 integrates to {over_values:.3f} over v_i, but over k_i (at |v − v_i| = 2) to "
        f"{over_keys:.3f}. Keys and query are given.",
        abs(over_values - 1) < 1e-6 and abs(over_keys - 1) < 1e-3,
        abs(over_values - 1) < 1e-6,
    )


@says("004", _SOFTMAX, "“v, q, and k all reside in” R^d")
def values_share_the_dimension() -> Finding:
    wide = draw(5, 9, seed=4)
    p = weights(ALPHA * _K @ _Q)
    try:
        found = _attention(values=wide)
    except (ValueError, RuntimeError) as refused:
        return judged(f"Values of another dimension are refused: {refused}", True)
    return judged(
        f"Only q and k must: with d = 4 and values in R^{wide.shape[1]} attention and Σ w v "
        f"{how_close(found, p @ wide)}.",
        False,
        agree(found, p @ wide),
    )


@says("004", _SOFTMAX, "q, k and v are “low-dimensional projections” of x, R^d a subspace of R^m")
def projections() -> Finding:
    w, x = draw(3, 10, seed=12), draw(10, 50, seed=13)
    onto = torch.linalg.pinv(w) @ w  # the orthogonal projection on the subspace that w sees
    seen = int(torch.linalg.matrix_rank(onto))
    return judged(
        f"A map from R^10 to R^3 sees x through a projection on a subspace of dimension {seen}: W x and W P x "
        f"{how_close(w @ x, w @ onto @ x)}, and P P and P {how_close(onto @ onto, onto)}.",
        seen == 3 and agree(w @ x, w @ onto @ x) and agree(onto @ onto, onto),
    )


@says("004", _SOFTMAX, "the score is “the cross-correlation value, which is the inner product”")
def cross_correlation() -> Finding:
    full = F.conv1d(_Q[None, None], _K[:1, None], padding=3)[0, 0]
    inner = _K[0] @ _Q
    return judged(
        f"The cross-correlation at lag 0, one of its {len(full)} values: it and q·k = {inner:.3f} "
        f"{how_close(full[3], inner)}.",
        agree(full[3], inner),
    )


@says("004", _FIGURE, "the output is “the weighted summation of the value vectors”, sequence length 3")
def figure_one() -> Finding:
    w = (ALPHA * _K[:3] @ _Q).softmax(-1)
    by_hand = sum((w[i] * _V[i] for i in range(3)), torch.zeros(3, dtype=torch.float64))
    out = regard.attention(_Q[None, None, None], _K[None, None, :3], _V[None, None, :3], scale=ALPHA)[0, 0, 0]
    return judged(f"w1 v1 + w2 v2 + w3 v3 and attention {how_close(by_hand, out)}.", agree(by_hand, out))


@prints("004", _SOFTMAX, "e is “approximately equal to {}”", "2.71828")
def number_e() -> Tensor:
    return tensor(1.0).exp()


@says("004", _SOFTMAX, "Eq. 1, α “a positive scaling factor”")
def equation_1() -> Finding:
    w = (ALPHA * _K @ _Q).exp() / (ALPHA * _K @ _Q).exp().sum()
    read = _attention(values=torch.eye(5).double())
    return judged(f"Eq. 1 and attention with scale = α {how_close(read, w)}.", agree(read, w))


@says("004", _SOFTMAX, "a larger α gives weights “more concentrated”, a smaller “more uniform”")
def alpha_concentrates() -> Finding:
    alphas = (0.1, 0.3, 1.0, 3.0)
    spread = torch.stack([_attention(a, torch.eye(5).double()) for a in alphas])
    h = entropy(spread)
    return judged(
        f"Entropy at α = 0.1 … 3: {show(h, 2)} (uniform: {math.log(5):.2f}); largest weight "
        f"{show(spread.amax(-1), 2)}.",
        increasing(-h) and increasing(spread.amax(-1)),
    )


@says("004", _SOFTMAX, "“positive weights w that sum to 1”")
def positive_and_normalised() -> Finding:
    far = tensor(0, -1000)
    w, logs = weights(far), bool(far.log_softmax(-1).isfinite().all())
    total = weights(draw(100, 9, seed=5, scale=3)).sum(-1)
    return judged(
        f"The sums and 1 {how_close(total, torch.ones_like(total))}. Positive in exact arithmetic only: scores (0, "
        f"−1000) give {show(w, 0)} even in float64, while the log-weights are finite {tick(logs)}.",
        bool((w > 0).all()),
        logs and agree(total, torch.ones_like(total)),
    )


@says("004", _SOFTMAX, "“amplifying the weights of key vectors that are most similar”, suppressing others")
def amplifies_the_similar() -> Finding:
    s = draw(500, 7, seed=6)
    p = weights(s)
    ordered = bool((s.argsort(-1) == p.argsort(-1)).all())
    ends = bool((p.amax(-1) > 1 / 7).all()) and bool((p.amin(-1) < 1 / 7).all())
    return judged(
        f"500 rows: weights are ordered as the scores {tick(ordered)}, the most similar key has more and the least "
        f"similar less than the uniform share 1/n {tick(ends)}.",
        ordered and ends,
    )


@says("004", _SOFTMAX, "goal: “to derive the softmax function” from maximum likelihood")
def exponential_is_assumed() -> Finding:
    linear = tensor(3.0, 2.0, 1.0)  # θ = s in place of Eq. 3
    v = draw(3, seed=7)

    def slope(theta: Tensor, at: Tensor) -> Tensor:
        return -(BETA * theta * (at - v)).sum()

    simple = (linear / linear.sum()) @ v
    exponential = linear.softmax(-1) @ v
    both = max(abs(float(slope(linear, simple))), abs(float(slope(linear.exp(), exponential)))) < 1e-10
    return judged(
        f"Weights θ/Σθ are derived, for any θ; the exponential is put in by Eq. 3. With θ = s = (3, 2, 1) the same "
        f"argument yields s/Σs = {show(linear / linear.sum())} (both stationary {tick(both)}).",
        not both,
        both,
    )


@says("004", _LIKELIHOOD, "drop the coordinate index “without loss of generality”")
def coordinates_decouple() -> Finding:
    theta = _precision()
    one_by_one = torch.stack([(theta * _V[:, j]).sum() / theta.sum() for j in range(3)])
    joint = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    likelihood = _log_density(_V, joint, theta[:, None]).sum()
    (g,) = torch.autograd.grad(likelihood, joint)
    newton = g / (BETA * theta.sum())  # exact: the likelihood is quadratic
    return judged(
        f"Maximising over all coordinates at once and one by one {how_close(newton, one_by_one)}. (An estimate of β "
        "does need all n·d of them.)",
        agree(newton, one_by_one),
    )


@says("004", _LIKELIHOOD, "Eq. 2 is a Gaussian with variance exp(−α q·k)/β")
def equation_2() -> Finding:
    at = torch.linspace(-60, 60, 200001, dtype=torch.float64)
    theta, v = _precision()[0], tensor(0.4)
    g = _log_density(at, v, theta).exp()
    mass, mean = _integral(g, at), _integral(at * g, at)
    spread = _integral((at - mean) ** 2 * g, at)
    variance = math.exp(-ALPHA * float(_K[0] @ _Q)) / BETA
    return judged(
        f"By quadrature: integral {mass:.4f}, variance {spread:.4f}; exp(−α q·k)/β = {variance:.4f}.",
        abs(mass - 1) < 1e-8 and abs(spread - variance) < 1e-8,
    )


def _means() -> tuple[float, float]:
    """The mean of Eq. 2 as a density of v_i (at v = 0.4), and as one of v (at v_i = −1.1)."""
    at = torch.linspace(-60, 60, 200001, dtype=torch.float64)
    theta = _precision()[0]
    of_observed = _integral(at * _log_density(at, tensor(0.4), theta).exp(), at)
    of_v = _integral(at * _log_density(tensor(-1.1), at, theta).exp(), at)
    return of_observed, of_v


@says("004", _LIKELIHOOD, "“v is the mean value of the Gaussian distribution”")
def mean_is_v() -> Finding:
    mean, _ = _means()
    return judged(f"By quadrature at v = 0.4, the mean of v_i is {mean:.4f}.", abs(mean - 0.4) < 1e-8)


@says("004", _LIKELIHOOD, "“The mean value of the Gaussian distribution is v_i*”")
def mean_is_observed() -> Finding:
    mean, swapped = _means()
    return judged(
        f"At v = 0.4, v_i = −1.1 the mean of the density of v_i is {mean:.4f}. v_i is the mean only if the same "
        f"formula is read as a density of v ({swapped:.4f}), which is not Eq. 2.",
        abs(mean + 1.1) < 1e-8,
        abs(swapped + 1.1) < 1e-8,
    )


@says("004", _LIKELIHOOD, "the variance “doesn't depend on the index coordinate index i”")
def variance_depends_on_i() -> Finding:
    variances = 1 / (_precision() * BETA)
    spread = float(variances.max() - variances.min())
    return judged(
        f"i is the time index, and the variance does depend on it: {show(variances, 2)} for five keys. It has no "
        "coordinate index (j) to depend on.",
        spread < 1e-12,
        spread > 0.01 and variances.shape == (5,),
    )


@says("004", _LIKELIHOOD, "Eq. 4: the joint density is a product, its log a sum")
def equation_4() -> Finding:
    v, theta = tensor(0.4), _precision()
    product = _log_density(_V[:, 0], v, theta).exp().prod().log()
    reference = torch.distributions.Normal(v, (theta * BETA).rsqrt()).log_prob(_V[:, 0]).sum()
    return judged(
        f"log Π g and Σ log g of torch's own normal distribution {how_close(product, reference)}.",
        agree(product, reference),
    )


@says("004", _LIKELIHOOD, "Eq. 5–6: ∂ log g/∂v = −βθ(v − v_i)")
def equation_6() -> Finding:
    v, theta = tensor(0.4).requires_grad_(), _precision()
    (found,) = torch.autograd.grad(_log_density(_V[:, 0], v, theta).sum(), v)
    formula = (-BETA * theta * (v - _V[:, 0])).sum()[None]
    return judged(f"Autograd and the formula, summed over i: {how_close(found, formula)}.", agree(found, formula))


@says("004", _LIKELIHOOD, "Eq. 7–9: v = Σ θ v_i / Σ θ maximises the likelihood")
def equation_9() -> Finding:
    theta = _precision()
    best = ((theta * _V[:, 0]).sum() / theta.sum())[None]

    def likelihood(v: Tensor) -> Tensor:
        return _log_density(_V[:, 0], v[:, None], theta).sum(-1)

    around = best + torch.linspace(-3, 3, 601, dtype=torch.float64)
    top = float(around[likelihood(around).argmax()])
    return judged(
        f"Eq. 9 gives {best.item():.3f}; the likelihood on a grid of 601 points around it is largest at {top:.3f}, and "
        f"nowhere above {tick(bool((likelihood(around) <= likelihood(best) + 1e-12).all()))}.",
        abs(top - best.item()) < 1e-9 and bool((likelihood(around) <= likelihood(best) + 1e-12).all()),
    )


@says("004", _LIKELIHOOD, "Eq. 10–11: these weights are softmax, the estimate is attention's output")
def equation_11() -> Finding:
    theta = _precision()
    p = theta / theta.sum()
    estimate = p @ _V
    return judged(
        f"θ/Σθ and regard's plan {how_close(p, weights(ALPHA * _K @ _Q))}; Σ w v and attention "
        f"{how_close(estimate, _attention())}.",
        agree(p, weights(ALPHA * _K @ _Q)) and agree(estimate, _attention()),
    )


@says("004", _LIKELIHOOD, "“exp(α q·k) represents the inverse of variance σ²”")
def inverse_variance() -> Finding:
    theta = _precision()
    variance = 1 / (theta * BETA)
    return judged(
        f"Up to β: with β = {BETA}, 1/σ² is {float((1 / variance / theta)[0]):.1f} times exp(α q·k).",
        agree(1 / variance, theta),
        agree(1 / variance, BETA * theta),
    )


@says("004", _LIKELIHOOD, "Eq. 12: θ = 1/(σ²β)")
def equation_12() -> Finding:
    # σ² from the density itself: twice the drop of log g one unit from its top is 1/σ².
    theta = _precision()
    drop = _log_density(tensor(0.0), tensor(0.0), theta) - _log_density(tensor(0.0), tensor(1.0), theta)
    variance = 1 / (2 * drop)
    return judged(
        f"θ and 1/(σ²β), with σ² measured on Eq. 2, {how_close(1 / (variance * BETA), theta)}.",
        agree(1 / (variance * BETA), theta),
    )


@says("004", _LIKELIHOOD, "softmax weights by the inverse variance, “β can be canceled”")
def beta_cancels() -> Finding:
    plans = []
    for beta in (0.1, 1.0, 40.0):
        precision = beta * _precision()
        plans.append(precision / precision.sum())
    found = torch.stack(plans)
    p = weights(ALPHA * _K @ _Q).expand_as(found)
    return judged(f"(1/σ²)/Σ(1/σ²) at β = 0.1, 1, 40 and regard's plan {how_close(found, p)}.", agree(found, p))


@says("004", _LIKELIHOOD, "w_i is “the contribution of each value vector v_i to the final output”")
def contribution() -> Finding:
    jacobian = torch.autograd.functional.jacobian(lambda v: _attention(values=v), _V)
    assert isinstance(jacobian, Tensor)
    p = weights(ALPHA * _K @ _Q)
    expected = torch.eye(3).double()[:, None, :] * p[None, :, None]
    return judged(f"∂o/∂v_i and w_i times the identity {how_close(jacobian, expected)}.", agree(jacobian, expected))


@says("004", _LIKELIHOOD, "“weighting factors may be sparse”, a “sparsity property”")
def softmax_is_not_sparse() -> Finding:
    s = draw(1, 1, 1, 64, seed=8, scale=0.7)
    v, eye = torch.ones(1, 1, 64, 1, dtype=torch.float64), torch.eye(64).double()[None, None]
    supports, taking_part = [], []
    for problem in (Transport(), Transport(Tsallis(1.5))):
        _, aux = regard.attention(
            s, eye, v, scale=1.0, problem=problem, return_aux=AuxRequest(support=True, collision=True)
        )
        assert aux.support is not None and aux.collision is not None
        supports.append(int(aux.support))
        taking_part.append(1 / float(aux.collision))
    return judged(
        f"Concentrated, not sparse: of 64 keys {supports[0]} have a positive weight, though only {taking_part[0]:.1f} "
        f"take part (1/Σw²). Exact zeros need another regulariser: 1.5-entmax keeps {supports[1]}.",
        supports[0] < 64,
        taking_part[0] < 16 and supports[1] < 64,
    )


@says("004", _LIKELIHOOD, "sparsity is “achieved through the use of the Gaussian modeling”")
def gaussian_does_not_concentrate() -> Finding:
    s = tensor(6, 5, 1, 0.5)
    linear, exponential = s / s.sum(), weights(s)
    counts = [float(1 / (p * p).sum()) for p in (linear, exponential)]
    return judged(
        f"Through Eq. 3: the same Gaussian model with θ = s lets {counts[0]:.1f} of 4 keys take part, with θ = exp(s) "
        f"{counts[1]:.1f}.",
        abs(counts[0] - counts[1]) < 0.1,
        counts[1] < counts[0],
    )


def _multiplications(queries: int, keys: int, d: int) -> int:
    return multiply_adds(lambda: torch.ones(queries, d) @ torch.ones(d, keys))


@says("004", _LIKELIHOOD, "the weights of one query cost “O(T)”")
def cost_of_one_query() -> Finding:
    base, longer, wider = _multiplications(1, 512, 64), _multiplications(1, 1024, 64), _multiplications(1, 512, 128)
    return judged(
        f"O(T·d): T = 512, d = 64 takes {base} multiply-adds, {longer / base:.0f} times as many at twice the T and "
        f"{wider / base:.0f} times at twice the d.",
        longer == 2 * base and wider == base,
        longer == 2 * base and wider == 2 * base,
    )


@says("004", "Maximum Likelihood Estimation, Conclusion", "all weights cost O(T·T), “a quadratic dependence” on T")
def cost_of_all_queries() -> Finding:
    base, longer = _multiplications(512, 512, 64), _multiplications(1024, 1024, 64)
    return judged(
        f"Twice the T takes {longer / base:.0f} times the multiply-adds (a factor d beside it).", longer == 4 * base
    )


@says("004", _ENTROPY, "Eq. 13–16: substituting the features gives exp(λ_i q·k_i)/Σ exp(λ_j q·k_j)")
def equation_16() -> Finding:
    s, multipliers = _K @ _Q, draw(5, seed=9)
    features = torch.diag(s)  # f_i(y): row i, column y
    p = (multipliers @ features).softmax(-1)
    formula = (multipliers * s).exp() / (multipliers * s).exp().sum()
    scaled = regard.attention(
        _Q[None, None, None], (multipliers[:, None] * _K)[None, None], torch.eye(5).double()[None, None], scale=1.0
    )[0, 0, 0]
    return judged(
        f"Both sides {how_close(p, formula)}. λ_i scales key i: attention with keys λ_i k_i and Eq. 16 "
        f"{how_close(scaled, formula)}.",
        agree(p, formula) and agree(scaled, formula),
    )


@says("004", _ENTROPY, "with λ_i = α “Eq. 16 is the same as Eq. 1”")
def equal_multipliers() -> Finding:
    s = _K @ _Q
    sixteen = (ALPHA * torch.ones_like(s) * s).softmax(-1)
    one = _attention(values=torch.eye(5).double())
    return judged(f"They {how_close(sixteen, one)}.", agree(sixteen, one))


@says("004", _ENTROPY, "softmax follows from “the maximum entropy approach” with the features of Eq. 15")
def maximum_entropy() -> Finding:
    s = _K @ _Q
    total = torch.ones(1, 5, dtype=torch.float64)
    own = tangents(torch.cat([torch.diag(s), total]))
    shared = tangents(torch.cat([s[None], total]))
    p = weights(s, 1 / ALPHA)
    moved = torch.stack([p + sign * 0.01 * d for d in shared.T for sign in (1, -1)])
    largest = bool((entropy(moved) < entropy(p)).all())
    return judged(
        f"With a feature per key their means fix one query's weights: {own.shape[1]} directions are left for entropy "
        f"to choose from. With the single feature q·k_y {shared.shape[1]} are left, and softmax has the largest "
        f"entropy {tick(largest)}.",
        own.shape[1] > 0,
        shared.shape[1] == 3 and largest,
    )


@says("004", _APPENDIX, "a1, a2 and the cosine")
def appendix_vectors() -> Finding:
    x, y = _K[0], _K[1]
    inner = (x * y).sum()
    cosine = inner / ((x * x).sum().sqrt() * (y * y).sum().sqrt())
    reference = F.cosine_similarity(x, y, dim=0)
    found = torch.stack([x @ y, y @ x, x.norm() ** 2, reference])
    expected = torch.stack([inner, inner, (x * x).sum(), cosine])
    return judged(
        f"The formulas and PyTorch's dot, norm and cosine {how_close(found, expected)}.", agree(found, expected)
    )


@says("004", _APPENDIX, "log g = ½ log(θβ/2π) − (θβ/2)(v − v_i)²")
def appendix_log_density() -> Finding:
    v, theta = tensor(0.4), _precision()
    printed = _log_density(_V[:, 0], v, theta)
    reference = torch.distributions.Normal(v, (theta * BETA).rsqrt()).log_prob(_V[:, 0])
    return judged(
        f"It and torch's normal distribution {how_close(printed, reference)} (read its left side as log g(v_i | v, "
        "q)).",
        agree(printed, reference),
    )


@says("004", _APPENDIX, "the definition of softmax")
def appendix_softmax() -> Finding:
    s = draw(50, 6, seed=11, scale=3)
    formula = s.exp() / s.exp().sum(-1, keepdim=True)
    return judged(f"It and regard's plan {how_close(weights(s), formula)}.", agree(weights(s), formula))


new_explanation = untestable(
    "004", "Abstract, Conclusion", "“may lead to a better understanding”", "A hope; nothing to compute."
)

CLAIMS = collect(globals())
