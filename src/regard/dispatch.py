"""One call of `attention`, from its arguments to its results: lower, choose a solver and a backend, compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .form import Form
from .lowering import lower
from .solvers import solver_for
from .statistics import AuxOutput, requested

# Functions that are called after each call of `attention`, with its form, a function that computes statistics of that
# form (names -> results), and its output [B, H, Tq, Dv]. The list is empty except while a `Monitor` samples a step.
observers: list[Callable[[Form, Callable[[tuple[str, ...]], dict[str, Tensor]], Tensor], None]] = []


def attend(
    return_aux: object, backend: str, query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> Tensor | tuple[Tensor, AuxOutput]:
    """What `attention` returns. `options` are the further arguments of `lower`, in its order."""
    form = lower(query, key, value, *options)
    statistics = requested(return_aux)
    results = compute(form, ("out", *statistics), backend)
    out = results["out"]
    for observe in observers:
        observe(form, lambda names: compute(form, names), out)
    assert form.query is not None
    dtype = form.output_dtype or form.query.dtype  # autocast may have changed the query's dtype
    if out.dtype != dtype:
        out = out.to(dtype)
    out = unfold(out, query, key, value)
    if return_aux is None:
        return out
    return out, AuxOutput(**{name: unfold(results[name], query, key, value) for name in statistics})


def compute(form: Form, names: tuple[str, ...], backend: str = "auto") -> dict[str, Tensor]:
    """Output and statistics of a lowered problem."""
    solver = solver_for(form)
    chosen, _ = solver.choose(form, names, backend)
    return solver.attend(chosen, form, names)


def unfold(result: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[B, H, ...] -> the caller's leading dimensions."""
    rank = max(query.dim(), key.dim(), value.dim())
    if rank == 4:
        return result
    if rank == 3:
        return result.squeeze(0)
    if rank == 2:
        return result.squeeze(0).squeeze(0)
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    return result.unflatten(0, batch)
