"""Attention whose backward pass gives the scores a damped natural gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from .._validate import number, positive
from ..autograd.batched import one_by_one
from ..backends import reference, row_equation
from ..form import Form
from ..lowering import lower
from ..problem import Transport
from .inputs import check_temperature

_INPUTS = ("query", "key", "value")


def natural_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    damping: float,
    scale: float | None = None,
    is_causal: bool = False,
    problem: Transport | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`attention` whose backward pass gives the scores the damped natural gradient (M + damping)^-1 dL/ds of each row.

    So what query and key receive is not the gradient; what value receives is. With e = damping tau^2 and
    w' = w e/(w + e), the inverse (by Sherman and Morrison's formula) is the policy gradient with w' for w, scaled:

        (M + damping)^-1 dL/ds_j = w'_j/(damping tau) (u_j - sum w' u / (sum w' + kappa))

    This form has no cancellation. For large damping it tends to 1/damping times the plain gradient, for small damping
    to `natural_gradient`. Tensors of the problem may not require a gradient, and there is no second derivative.
    """
    damping = number("damping", damping, "a positive, finite number", positive)
    form = lower(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, problem=problem)
    check_temperature(problem, form)
    for slot, tensor in form.tensors().items():
        if tensor.requires_grad and slot not in _INPUTS:
            raise NotImplementedError(
                f"problem: natural_attention has gradients for query, key and value only, "
                f"got a {slot} that requires one (detach it)"
            )
    fixed = form.with_tensors(dict.fromkeys(_INPUTS))  # type: ignore[arg-type]
    assert form.query is not None
    out = _Natural.apply(fixed, damping, form.query, form.key, form.value)
    return dispatch.unfold(out.to(form.query.dtype), query, key, value)  # type: ignore[union-attr]


class _Natural(torch.autograd.Function):
    """apply(form, damping, query, key, value) -> output."""

    @staticmethod
    def forward(form: Form, damping: float, *tensors: Tensor) -> Tensor:
        with torch.no_grad():
            return dispatch.compute(form.with_tensors(dict(zip(_INPUTS, tensors, strict=True))), ("out",))["out"]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.form, ctx.damping, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        needed = tuple(n for n, need in zip(_INPUTS, ctx.needs_input_grad[2:], strict=True) if need)
        how, saved = (ctx.form, ctx.damping, needed), ctx.saved_tensors
        found = one_by_one(lambda grad: _NaturalBackward.apply(*how, grad, *saved), (grad,))
        by_name = dict(zip(needed, found, strict=True))
        return None, None, *(by_name.get(name) for name in _INPUTS)


class _NaturalBackward(torch.autograd.Function):
    """A Function of its own, so that it receives plain tensors under a transform of torch.func."""

    @staticmethod
    def forward(form: Form, damping: float, needed: tuple, grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        form = form.with_tensors(dict(zip(_INPUTS, tensors, strict=True)))
        totals = {name: torch.zeros_like(form.tensors()[name], dtype=form.dtype) for name in needed}
        if 0 in form.shape:
            return tuple(totals[name].to(grad.dtype) for name in needed)
        with reference.full_precision(form):
            for where in reference.blocks(form):
                block = form.cut(*where)
                if not block.shape[3]:
                    continue
                for name, part in _natural_block(block, damping, needed, grad[where[:3]].to(form.dtype)).items():
                    form.cut_slot(name, totals[name], *where).add_(part)
        return tuple(totals[name].to(form.tensors()[name].dtype) for name in needed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        raise NotImplementedError("natural_attention: its natural gradient has no derivative")


def _natural_block(form: Form, damping: float, needed: tuple, grad: Tensor) -> dict[str, Tensor]:
    """What query, key and value receive from a block of rows with output gradient [B, H, Tq, Dv]."""
    leaves = {n: t.detach().to(form.dtype).requires_grad_() for n, t in form.tensors().items() if n in needed}
    with torch.enable_grad():
        scores, value = reference.scores_of(form.with_tensors(leaves))
    with torch.no_grad():
        rows = row_equation.solve_rows(form, scores.detach(), rates=True)
        assert rows.rates is not None
        B, H, Tq, Tk = scores.shape
        utility = (grad.reshape(B, value.shape[1], -1, value.shape[3]) @ value.mT).view(B, H, Tq, Tk)
        heat = damping * rows.temperature
        damped = rows.rates * heat / (rows.rates + heat)  # w'/tau
        natural = damped / damping * row_equation.centred(damped, rows.slack, utility)
    with torch.enable_grad():
        out = reference.transport(rows.weights, value)
        pairs = [(y, g) for y, g in ((scores, natural), (out, grad)) if y.requires_grad]
        found = torch.autograd.grad([y for y, _ in pairs], list(leaves.values()), [g for _, g in pairs])
    return dict(zip(leaves, found, strict=True))
