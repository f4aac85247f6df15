"""Single weights of a plan that is too large to store: `weights_at`, `topk` and `block_mass`."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from .._validate import compute_dtype, describe, is_integer
from ..arguments import PlanOptions, takes_options
from ..backends import BACKENDS, READOUT, REFERENCE, Backend, choose
from ..form import Form
from ..lowering import lower
from ..solvers import solver_for
from ..solvers.base import Reduced


@takes_options(PlanOptions)
def weights_at(query: Tensor, key: Tensor, index: Tensor, **options: Unpack[PlanOptions]) -> Tensor:
    """The weights of chosen keys: integers that broadcast to [..., H, Tq, n] -> [..., H, Tq, n]. Not differentiable.

    The options are those of `attention` that decide the plan."""
    backend, form, lead, row = _solved(query, key, options)
    B, H, Tq, Tk = form.shape
    if not isinstance(index, Tensor) or index.is_floating_point() or index.dtype == torch.bool:
        raise TypeError(f"index: expected an integer tensor, got {describe(index)}")
    if index.device != query.device:
        raise ValueError(f"index: expected a tensor on {query.device}, as query, got one on {index.device}")
    n = index.shape[-1] if index.dim() else 1
    try:
        index = index.expand(*lead, Tq, n).reshape(B, H, Tq, n).long()
    except RuntimeError:
        raise ValueError(
            f"index: expected a shape that broadcasts to {[*lead, Tq, n]}, got {list(index.shape)}"
        ) from None
    if bool(((index < 0) | (index >= Tk)).any()):
        raise ValueError(f"index: expected keys in [0, {Tk}), got {int(index.min())} to {int(index.max())}")
    return _scaled(backend.weights_at(form, index), row, query).reshape(*lead, Tq, n)


@takes_options(PlanOptions)
def topk(query: Tensor, key: Tensor, n: int, **options: Unpack[PlanOptions]) -> tuple[Tensor, Tensor]:
    """The n largest weights of each row and their keys: (weights, indices), [..., H, Tq, n]. Not differentiable.

    Where a row has fewer than n keys with mass, its other weights are 0 and their indices are arbitrary other keys. The
    options are those of `attention` that decide the plan.
    """
    backend, form, lead, row = _solved(query, key, options)
    Tq, Tk = form.shape[2:]
    if not is_integer(n) or not 0 <= n <= Tk:
        raise ValueError(f"n: expected an int from 0 to Tk={Tk}, got {describe(n)}")
    weights, indices = backend.topk(form, int(n))
    return _scaled(weights, row, query).reshape(*lead, Tq, n), indices.reshape(*lead, Tq, n)


@takes_options(PlanOptions)
def block_mass(query: Tensor, key: Tensor, block: int, **options: Unpack[PlanOptions]) -> Tensor:
    """The plan pooled to blocks: the mean over a block's queries of the mass sent to each block of keys.

    [..., H, ceil(Tq/block), ceil(Tk/block)]; a row sums to its queries' mean mass, 1 for plain rows. Not
    differentiable. The options are those of `attention` that decide the plan.
    """
    _, form, lead, row = _solved(query, key, options)
    if not is_integer(block) or block < 1:
        raise ValueError(f"block: expected a positive int, got {describe(block)}")
    pooled = _narrow(pool_rows(form, row, int(block)), query)
    return pooled.reshape(*lead, *pooled.shape[2:])


@takes_options(PlanOptions)
def solved_rows(query: Tensor, key: Tensor, **options: Unpack[PlanOptions]) -> Reduced:
    """The plan as rows at fixed prices and temperatures, and the factor [B, H, Tq] of each row (None: 1)."""
    form = lower(query, key, key, **options)
    return solver_for(form).reduce(form)


def pool_rows(form: Form, row: Tensor | None, block: int) -> Tensor:
    """`block_mass` of the rows that `solved_rows` gives, [B, H, ceil(Tq/block), ceil(Tk/block)]."""
    assert form.query is not None
    backend = BACKENDS[choose(form, (READOUT,))[0]]
    pooled = backend.block_sums(form, block) if row is None else REFERENCE.block_sums(form, block, row)
    Tq, rows = form.shape[2], pooled.shape[2]
    sizes = torch.full((rows,), block, device=form.query.device)
    if rows:
        sizes[-1] = Tq - (rows - 1) * block
    return pooled / sizes[:, None]


def _solved(query: Tensor, key: Tensor, options: PlanOptions) -> tuple[Backend, Form, tuple[int, ...], Tensor | None]:
    """A backend that reads the plan, the plan's rows, the caller's leading dimensions, and the factor of each row."""
    form, row = solved_rows(query, key, **options)
    rank = max(query.dim(), key.dim())
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    lead = (*batch, form.shape[1]) if rank > 2 else ()
    return BACKENDS[choose(form, (READOUT,))[0]], form, lead, row


def _scaled(weights: Tensor, row: Tensor | None, query: Tensor) -> Tensor:
    """The weights [B, H, Tq, n] times the factor of their row."""
    return _narrow(weights if row is None else weights * row[..., None], query)


def _narrow(weights: Tensor, query: Tensor) -> Tensor:
    """In the compute dtype, where the plan had to be found in float64."""
    return weights if weights.dtype == compute_dtype(query.dtype) else weights.to(compute_dtype(query.dtype))
