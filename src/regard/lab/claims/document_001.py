"""The claims of document 001, the abstract of a paper: attention as one-sided entropic optimal transport.

s are scores, τ the temperature, p the plan (the attention weights) and u the utility ⟨∂L/∂o, v⟩ of each key.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import Causal, Transport

from ..numbers import agree, certified, draw, how_close, tensor, tick
from .claim import CheckResult, collect, judged, says, untestable
from .rows import EXAMPLE, TAU, entropy, random_plans, tangents, weights

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
def forward_is_optimal() -> CheckResult:
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
def maximal_in_both() -> CheckResult:
    p = weights(EXAMPLE)
    similarity, h = float(p @ EXAMPLE), float(entropy(p))
    directions = tangents(torch.stack([torch.ones_like(EXAMPLE), EXAMPLE]))
    moved = torch.cat([p + sign * 0.01 * d for d in directions.T for sign in (1, -1)]).reshape(-1, 4)
    entropic = bool((entropy(moved) < h).all())
    return judged(
        f"Neither: similarity {similarity:.2f} of at most {EXAMPLE.max():.2f}, entropy {h:.2f} of at most "
        f"{math.log(4):.2f}. True of plans with equal similarity: moving along them lowers the entropy "
        f"{tick(entropic)}.",
        similarity > float(EXAMPLE.max()) - 1e-6 and h > math.log(4) - 1e-6,
        entropic,
    )


@says("001", _ABSTRACT, "backpropagation “is mathematically identical to an advantage-based policy gradient”")
def backward_is_policy_gradient() -> CheckResult:
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
def variance_reduced() -> CheckResult:
    p, u = tensor(0.9, 0.1), tensor(1.0, 0.0)
    plain, based = (float(_estimator_variance(p, u, b)) for b in (tensor(0), (p @ u)[None]))
    many, utilities = random_plans(2000, 6, seed=9), draw(2000, 6, seed=10)
    expected = (many * utilities).sum(-1, keepdim=True)
    shrinks = _estimator_variance(many, utilities, expected) < _estimator_variance(many, utilities, 0 * expected)
    share = float(shrinks.double().mean())
    return judged(
        f"Usually, not always: it is smaller in {share:.0%} of 2000 random rows, but p = (0.9, 0.1), u = (1, 0) has "
        f"variance {plain:.4f} without and {based:.4f} with the baseline. Backpropagation does not sample, so its "
        "variance is 0.",
        bool(shrinks.all()) and based < plain,
        share > 0.5,
    )


def _fisher(p: Tensor, tau: float) -> Tensor:
    return (torch.diag(p) - torch.outer(p, p)) / tau**2


@says("001", _ABSTRACT, "the forward pass “induces a specific information geometry”, the Fisher matrix")
def fisher_geometry() -> CheckResult:
    def log_partition(s: Tensor) -> Tensor:
        return regard.solve(s, Transport(temperature=TAU)).dual / TAU

    hessian = torch.autograd.functional.hessian(log_partition, EXAMPLE)
    assert isinstance(hessian, Tensor)
    fisher = _fisher(weights(EXAMPLE, TAU), TAU)
    return judged(
        f"Hessian of log Z and Fisher matrix (diag p − ppᵀ)/τ²: {how_close(hessian, fisher, 1e-8)}; the potential "
        f"τ log Z itself has τ times that.",
        agree(hessian, fisher, 1e-8),
    )


@says("001", _ABSTRACT, "this geometry “dictates the precise form of the learning gradient”")
def fisher_dictates_the_gradient() -> CheckResult:
    p, u, slope, tau = _backward()
    formula = tau * _fisher(p[0], tau) @ u[0]
    return judged(
        f"∂L/∂s and τ·Fisher·u {how_close(slope[0], formula)}: the metric times the utility.", agree(slope[0], formula)
    )


@says("001", _ABSTRACT, "“a rational, manifold-aware learning update”")
def manifold_aware() -> CheckResult:
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

CLAIMS = collect(globals())
