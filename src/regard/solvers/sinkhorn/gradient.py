"""The gradient of the prices, by the implicit function theorem.

What column j receives, c_j, must be t_j. With the rows eliminated, d(t - c)/d gamma is the symmetric matrix M of
`stage`. From dL/dgamma conjugate gradients find x = M^-1 dL/dgamma, and then

    dL/dtheta += d/dtheta sum_j x_j (c_j - t_j)    at fixed gamma,

which is one more backward pass of the one-sided problem with the values x.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ... import autograd
from ...autograd.batched import one_by_one
from ...form import Form
from ...problem import RowsAndColumns
from .ladder import Prices
from .marginals import Marginals
from .stage import Laplacian, Stage
from .views import one_sided, own_head, per_head

DEFAULT = RowsAndColumns.tolerance  # above it, the gradient is computed to a tenth of the caller's tolerance,
COARSEST = 1e-3  # but at least to this


class PricesFunction(torch.autograd.Function):
    """apply(form without tensors, slots, backend, limits, found, marginals, row, column, kappa, *tensors) -> gamma.

    The tensors of the marginals are given once more, as arguments that autograd sees."""

    @staticmethod
    def forward(
        ctx: Any,
        form: Form,
        slots: tuple,
        backend: str,
        limits: tuple[int, float],  # steps and tolerance
        found: Prices,
        marginals: Marginals,
        row: Tensor,
        column: Tensor,
        kappa: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.form, ctx.slots, ctx.backend, ctx.limits = form, slots, backend, limits
        ctx.wide, ctx.groups, ctx.complete = found.wide, marginals.groups, marginals.complete
        gamma = found.gamma.clone()
        ctx.save_for_backward(gamma, row, column, kappa, *tensors)
        return gamma

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        gamma, *given = ctx.saved_tensors
        needs = ctx.needs_input_grad[6:]

        def pull(grad: Tensor) -> list[Tensor]:
            leaves = [t.detach().requires_grad_(need) for t, need in zip(given, needs, strict=True)]
            marginals = Marginals(leaves[0], leaves[1], leaves[2], ctx.groups, ctx.complete)
            form = ctx.form.with_tensors(dict(zip(ctx.slots, leaves[3:], strict=True)))
            precision = 1e-9 if ctx.wide else 1e-13 if form.dtype == torch.float64 else 1e-6
            x = _solve_linear(Stage(ctx.backend, form, marginals, ctx.wide), gamma, grad, precision, *ctx.limits)
            with torch.enable_grad():
                rows = one_sided(form.widened() if ctx.wide else form, gamma, marginals.live)
                rows = dataclasses.replace(rows, value=per_head(rows, x))
                sent = own_head(rows, autograd.run(ctx.backend, rows, ("out",))["out"])
                off = (marginals.row * sent).sum() - (marginals.target(gamma) * x).sum()
                needed = [leaf for leaf in leaves if leaf.requires_grad]
                return list(torch.autograd.grad(off, needed, allow_unused=True, materialize_grads=True))

        found = iter(one_by_one(pull, (grad,)))
        return (None,) * 6 + tuple(next(found) if need else None for need in needs)


def _solve_linear(stage: Stage, gamma: Tensor, rhs: Tensor, precision: float, limit: int, tolerated: float) -> Tensor:
    """x = M^-1 rhs, with a warning where conjugate gradients do not converge."""
    tolerance = max(precision, min(COARSEST, (tolerated - DEFAULT) / 10))
    found = Laplacian(stage, stage.at(gamma)).solve(rhs, tolerance, limit)
    off = float(found.off.max()) if found.off.numel() else 0.0
    if off > min(100 * tolerance, 10 * COARSEST):
        warnings.warn(
            f"RowsAndColumns: the linear system of the gradient has a relative residual of {off:.1e} "
            f"(expected {tolerance:.0e}): it is nearly singular at this temperature",
            stacklevel=2,
        )
    return found.x
