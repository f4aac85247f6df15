"""The operators `torch.ops.regard.attend` and `attend_backward`, for torch.compile and tracing.

A compiler treats an operator as one node: it needs a schema, the shapes of the results (a fake) and a gradient. The
schema is derived from the fields of `Form`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from .._compat import autograd_inside
from ..backends import BACKENDS
from ..form import Form
from ..statistics import DIFFERENTIABLE
from .batched import batch_by_loop

_TYPES = {
    "Tensor | None": "Tensor? {0}",
    "list[Tensor]": "Tensor[] {0}",
    "Scalar": "float {0}, Tensor? {0}_tensor",
    "list[Scalar]": "float[] {0}, Tensor[] {0}_tensors",  # NaN in the list of numbers marks the place of a tensor
    "float": "float {0}",
    "float | None": "float? {0}",
    "int": "SymInt {0}",
    "int | None": "SymInt? {0}",
    "str": "str {0}",
    "str | None": "str? {0}",
    "bool": "bool {0}",
}
_FIELDS = tuple((f.name, str(f.type)) for f in dataclasses.fields(Form) if str(f.type) in _TYPES)
SCHEMA = ", ".join(_TYPES[kind].format(name) for name, kind in _FIELDS)


def to_arguments(form: Form) -> list[Any]:
    """A form as the arguments of an operator."""
    arguments: list[Any] = []
    for name, kind in _FIELDS:
        value = getattr(form, name)
        if kind == "Scalar":
            arguments += [0.0, value] if isinstance(value, Tensor) else [value, None]
        elif kind == "list[Scalar]":
            arguments.append([math.nan if isinstance(part, Tensor) else part for part in value])
            arguments.append([part for part in value if isinstance(part, Tensor)])
        else:
            arguments.append(value)
    return arguments


def from_arguments(arguments: tuple) -> Form:
    """The form that `to_arguments` was given."""
    values, rest = {}, iter(arguments)
    for name, kind in _FIELDS:
        value = next(rest)
        if kind == "Scalar":
            tensor = next(rest)
            value = value if tensor is None else tensor
        elif kind == "list[Scalar]":
            tensors = iter(next(rest))
            value = [next(tensors) if math.isnan(part) else part for part in value]
        values[name] = list(value) if kind == "list[Tensor]" else value
    return Form(**values)


@torch.library.custom_op("regard::attend", mutates_args=(), schema=f"(str backend, str names, {SCHEMA}) -> Tensor[]")
def attend_op(backend: str, names: str, *arguments: Any) -> list[Tensor]:
    outputs = tuple(names.split(","))
    results = BACKENDS[backend].forward(from_arguments(arguments), outputs)
    return [results[name] for name in outputs]


@attend_op.register_fake
def _(backend: str, names: str, *arguments: Any) -> list[Tensor]:
    form = from_arguments(arguments)
    assert form.query is not None
    shapes = BACKENDS[backend].output_shapes(form, tuple(names.split(",")))
    return [form.query.new_empty(shape, dtype=form.dtype) for shape in shapes.values()]


@torch.library.custom_op(
    "regard::attend_backward",
    mutates_args=(),
    schema="(str backend, str names, str incoming, str needed, Tensor[] outputs, Tensor[] grads, "
    f"{SCHEMA}) -> Tensor[]",
)
def attend_backward_op(
    backend: str, names: str, incoming: str, needed: str, outputs: list[Tensor], grads: list[Tensor], *arguments: Any
) -> list[Tensor]:
    slots = tuple(needed.split(","))
    by_name = dict(zip(names.split(","), outputs, strict=True))
    by_grad = dict(zip(incoming.split(","), grads, strict=True))
    with autograd_inside():
        found = BACKENDS[backend].backward(from_arguments(arguments), slots, by_name, by_grad)
    return [found[slot] for slot in slots]


@attend_backward_op.register_fake
def _(
    backend: str, names: str, incoming: str, needed: str, outputs: list[Tensor], grads: list[Tensor], *arguments: Any
) -> list[Tensor]:
    tensors = from_arguments(arguments).tensors()
    return [torch.empty_like(tensors[slot], memory_format=torch.contiguous_format) for slot in needed.split(",")]


def save_for_backward(ctx: Any, arguments: tuple, output: tuple | list[Tensor]) -> None:
    """Keep a form, given as an operator's arguments, and what the operator returned."""
    form = from_arguments(arguments)
    tensors = form.tensors()
    ctx.slots = tuple(tensors)
    ctx.needed = tuple(slot for slot, tensor in tensors.items() if tensor.requires_grad)
    ctx.form = form.without_tensors()
    ctx.save_for_backward(*tensors.values(), *output)


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    ctx.backend, ctx.names, *arguments = inputs
    save_for_backward(ctx, tuple(arguments), output)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grads: list[Tensor | None]) -> tuple:
    n = len(ctx.slots)
    saved = ctx.saved_tensors
    form = ctx.form.with_tensors(dict(zip(ctx.slots, saved[:n], strict=True)))
    incoming = {
        name: g for name, g in zip(ctx.names.split(","), grads, strict=True) if g is not None and name in DIFFERENTIABLE
    }
    found = {}
    if incoming and ctx.needed:
        found = dict(
            zip(
                ctx.needed,
                torch.ops.regard.attend_backward(
                    ctx.backend,
                    ctx.names,
                    ",".join(incoming),
                    ",".join(ctx.needed),
                    list(saved[n:]),
                    list(incoming.values()),
                    *to_arguments(form),
                ),
                strict=True,
            )
        )
    return (None, None, *by_argument(form, found))


def by_argument(form: Form, found: dict[str, Tensor]) -> list[Any]:
    """Gradients by slot, in the order of the schema."""
    ordered: list[Any] = []
    for name, kind in _FIELDS:
        if kind.startswith("list["):
            parts = getattr(form, name)
            grads = [found.get(f"{name}.{i}") for i, part in enumerate(parts) if isinstance(part, Tensor)]
            # PyTorch expects None for a list of numbers, and an empty list for an empty one.
            ordered += [grads] if kind == "list[Tensor]" else [None if parts else [], grads]
        else:
            ordered += [None, found.get(name)] if kind == "Scalar" else [found.get(name)]
    return ordered


attend_op.register_autograd(_gradient, setup_context=_setup)
batch_by_loop(torch.ops.regard.attend_backward.default)


def with_saved(backend: str, form: Form, names: tuple[str, ...]) -> tuple[str, ...]:
    """The outputs to compute if a gradient may follow."""
    return (*names, *(name for name in BACKENDS[backend].saved(form, names) if name not in names))


def run_compiled(backend: str, form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Output and statistics by the operator."""
    computed = with_saved(backend, form, names)
    outputs = torch.ops.regard.attend(backend, ",".join(computed), *to_arguments(form))
    results = dict(zip(computed, outputs, strict=True))
    return {n: results[n] if n in DIFFERENTIABLE else results[n].detach() for n in names}
