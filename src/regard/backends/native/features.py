"""The engine's kernels for attention by features (csrc/features/): the map, the sums and the quotient in one pass.

Backward needs the rows' masses and references, and computes features and running sums again: O(T) memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .engine import SMALL, TYPES, UNBOUNDED, Record, extension, missing, warn_if_missing

MAPS = {"elu": 0, "relu": 1, "exp": 2}


class Call(NamedTuple):
    """The settings of a call on query [B, H, Tq, D], key [B, Hkv, Tk, D] and value [B, Hkv, Tk, Dv]."""

    map: str  # one of MAPS
    scale: float  # not negative
    causal: bool
    offset: int  # causal row i reads the keys up to i + offset; Tk is at most Tq + offset


def unavailable(query: Tensor) -> str | None:
    """Why there is no engine, or None. Warns the first time."""
    warn_if_missing(query)
    return missing()


def _record(
    call: Call, query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None, keep: Tensor | None
) -> Record:
    """`projection` [M, D]; `keep` bool [B|1, 1, Tk, 1], True where a key may be read."""
    B, H, Tq, D = query.shape
    _, Hkv, Tk, Dv = value.shape
    M = D if projection is None else projection.shape[0]
    element = TYPES[query.dtype]
    record = Record(
        1 if B * (H * Tq + Hkv * Tk) * M * (D + Dv) < 4 * SMALL else torch.get_num_threads(),
        1 if element == 1 else 0,
        *(B, H, Hkv, Tq, Tk, D, Dv),
        *(UNBOUNDED, 0 if call.causal else UNBOUNDED, call.offset),
        *(0, 0, 0),
        call.scale,
        *(0.0,) * 6,
        *(0, 0),
        *(query.data_ptr(), element, *query.stride()),
        *(key.data_ptr(), element, *key.stride()),
        *(value.data_ptr(), element, *value.stride()),
    )
    record.put("map", MAPS[call.map])
    record.put("features", M)
    if projection is not None:
        record.tensor("projection", projection[None, None])
    if keep is not None:
        record.tensor("mask", keep.transpose(2, 3))
    return record


def forward(
    call: Call, query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None, keep: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [B, H, Tq, Dv], their mass and its unit (a power of two) [B, H, Tq], in the compute dtype."""
    module, _ = extension()
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = torch.empty(*query.shape[:3], value.shape[3], dtype=dtype)
    mass, peak = torch.empty(2, *query.shape[:3], dtype=dtype).unbind()
    if mass.numel():
        record = _record(call, query, key, value, projection, keep)
        for name, result in (("out", out), ("mass_sent", mass), ("peak", peak)):
            record.put(name, result.data_ptr())
        module.features(record.record)
    return out, mass, peak


def backward(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor | None,
    keep: Tensor | None,
    outputs: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    needed: tuple[bool, bool, bool],
) -> list[Tensor | None]:
    """Gradients of query, key and value as far as they are needed, in their dtype."""
    module, _ = extension()
    out, mass, peak = outputs
    results: list[Any] = [
        torch.empty(t.shape, dtype=out.dtype) if need else None
        for t, need in zip((query, key, value), needed, strict=True)
    ]
    if not mass.numel():
        return [None if t is None else t.zero_() for t in results]
    record = _record(call, query, key, value, projection, keep)
    for name, tensor in (("saved_out", out), ("saved_mass", mass), ("saved_peak", peak), ("grad_out", grad)):
        record.tensor(name, tensor)
    for name, result in zip(("dq", "dk", "dv"), results, strict=True):
        if result is not None:
            record.put(name, result.data_ptr())
    module.features_backward(record.record)
    return [None if t is None else t.to(query.dtype) for t in results]
