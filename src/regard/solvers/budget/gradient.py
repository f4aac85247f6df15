"""The search as a differentiable function: an autograd Function in eager mode, an operator for compilers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..._compat import autograd_inside, forward_mode
from ...autograd.batched import batch_by_loop, one_by_one
from ...autograd.library import SCHEMA, by_argument, from_arguments, save_for_backward, to_arguments
from ...form import Form
from .passes import find_temperatures, gradients_of
from .search import HARD

_NO_VMAP = "MatchKL, MatchEntropy: vmap is not supported; fold its dimension into the batch instead"


class Match(torch.autograd.Function):
    """apply(form, slots, backend, *tensors) -> temperatures, states. The tensors fill the form's slots."""

    @staticmethod
    def forward(form: Form, slots: tuple, backend: str, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        return find_temperatures(backend, form.with_tensors(dict(zip(slots, tensors, strict=True))))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.form, ctx.slots, ctx.backend, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple:  # type: ignore[override]
        needed = tuple(s for s, need in zip(ctx.slots, ctx.needs_input_grad[3:], strict=True) if need)
        how = (ctx.form, ctx.slots, ctx.backend, needed)
        saved = ctx.saved_tensors
        gradients = one_by_one(lambda grad: MatchBackward.apply(how, grad, *saved), (grad,))
        found = dict(zip(needed, gradients, strict=True))
        return (None,) * 3 + tuple(found.get(slot) for slot in ctx.slots)

    @staticmethod
    def vmap(*_: Any) -> tuple:  # type: ignore[override]
        raise NotImplementedError(_NO_VMAP)


class MatchBackward(torch.autograd.Function):
    """apply(how, gradient, *slots, temperatures, states) -> gradients of the needed slots."""

    @staticmethod
    def forward(how: tuple, grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        form, slots, backend, needed = how
        *given, temperature, state = tensors
        form = form.with_tensors(dict(zip(slots, given, strict=True)))
        found = gradients_of(backend, needed, form, temperature, state, grad)
        return tuple(found[slot] for slot in needed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple:
        raise NotImplementedError("MatchKL, MatchEntropy: a temperature that meets a budget has first derivatives only")

    @staticmethod
    def vmap(*_: Any) -> tuple:  # type: ignore[override]
        raise NotImplementedError(_NO_VMAP)


@torch.library.custom_op("regard::match", mutates_args=(), schema=f"(str backend, {SCHEMA}) -> (Tensor, Tensor)")
def match_op(backend: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    return find_temperatures(backend, from_arguments(arguments))


@match_op.register_fake
def _(backend: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    form = from_arguments(arguments)
    assert form.query is not None
    shape = (*form.shape[:3], 1)
    return form.query.new_empty(shape, dtype=form.dtype), form.query.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op(
    "regard::match_backward",
    mutates_args=(),
    schema=f"(str backend, str needed, Tensor grad, Tensor matched_temperature, Tensor state, {SCHEMA}) -> Tensor[]",
)
def match_backward_op(
    backend: str, needed: str, grad: Tensor, matched_temperature: Tensor, state: Tensor, *arguments: Any
) -> list[Tensor]:
    slots = tuple(needed.split(","))
    with autograd_inside():
        found = gradients_of(backend, slots, from_arguments(arguments), matched_temperature, state, grad)
    return [found[slot] for slot in slots]


@match_backward_op.register_fake
def _(
    backend: str, needed: str, grad: Tensor, matched_temperature: Tensor, state: Tensor, *arguments: Any
) -> list[Tensor]:
    tensors = from_arguments(arguments).tensors()
    return [torch.empty_like(tensors[slot], memory_format=torch.contiguous_format) for slot in needed.split(",")]


batch_by_loop(torch.ops.regard.match_backward.default)


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.backend, *arguments = inputs
    save_for_backward(ctx, tuple(arguments), output)


def _pull(ctx: Any, grad: Tensor, _: Any) -> tuple:
    *tensors, temperature, state = ctx.saved_tensors
    form = ctx.form.with_tensors(dict(zip(ctx.slots, tensors, strict=True)))
    gradients = torch.ops.regard.match_backward(
        ctx.backend, ",".join(ctx.needed), grad, temperature, state, *to_arguments(form)
    )
    return (None, *by_argument(form, dict(zip(ctx.needed, gradients, strict=True))))


match_op.register_autograd(_pull, setup_context=_setup)


def match(backend: str, form: Form) -> tuple[Form, Tensor]:
    """The form at the temperatures that meet the budget, and where [B, H, Tq, 1] they stand for 0. Differentiable."""
    assert form.key is not None
    if forward_mode():
        raise NotImplementedError("MatchKL, MatchEntropy: no forward mode; use reverse mode, or give the temperature")
    assert form.budget is not None and form.matched is not None
    # The plan alone: no values, no dropout.
    narrow = dataclasses.replace(
        form, value=form.key.detach()[..., :0], temperature=1.0, dropout_p=0.0, dropout_key=None
    )
    if torch.compiler.is_compiling():
        temperature, state = torch.ops.regard.match(backend, *to_arguments(narrow))
    else:
        slots = narrow.tensors()
        outcome = Match.apply(narrow.without_tensors(), tuple(slots), backend, *slots.values())
        temperature, state = outcome  # type: ignore[misc]
    return dataclasses.replace(form, temperature=temperature, hard=False, budget=None, matched=None), state == HARD
