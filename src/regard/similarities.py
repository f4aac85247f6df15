"""Scores other than the dot product, as dot products of other vectors.

    "cosine"      <q, k> / (|q| |k|)     unit vectors
    "euclidean"   -|q - k|^2 / 2         q' = [q - c, -|q - c|^2 / 2, 1],    k' = [k - c, 1, -|k - c|^2 / 2]

So no solver and no backend knows these scores, and all of them serve every problem. The vectors have the compute dtype:
rounded to half precision, a norm would lose more than the product of half vectors does.

The euclidean score does not depend on the centre c, but its rounding error does: it is eps |q - c| |k - c|, where the
distance itself may be small. c is the mean of the queries. Then the error is at most that of a distance between the
queries, also if queries and keys have a large common offset. c must not depend on the keys, because masked keys may
hold any numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._validate import compute_dtype, default_scale, describe

SCORES = ("dot", "cosine", "euclidean")


def check_score(score: object) -> None:
    if not isinstance(score, str) or score not in SCORES:
        raise ValueError(f'score: expected "dot", "cosine" or "euclidean", got {describe(score)}')


def scale_of(score: str, D: int) -> float:
    """The default of `scale` for vectors of size D."""
    return 1.0 if score == "cosine" else default_scale(D)


def as_dot_products(score: str, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [B, H, Tq, D'] and [B, Hkv, Tk, D'] in the compute dtype, whose dot products are the scores."""
    dtype = compute_dtype(query.dtype)
    (query, queries_hold), (key, keys_hold) = _finite(query.to(dtype)), _finite(key.to(dtype))
    if score == "cosine":
        query, key = torch.nn.functional.normalize(query, dim=-1), torch.nn.functional.normalize(key, dim=-1)
    else:
        centre = _mean(query.detach(), queries_hold, key.shape[1])  # [B, Hkv, 1, D]; constant: no score depends on it
        group = query.shape[1] // max(1, key.shape[1])
        query = query - (centre if group == 1 else centre.repeat_interleave(group, 1))
        key = key - centre
        query = torch.cat([query, -query.square().sum(-1, keepdim=True) / 2, torch.ones_like(query[..., :1])], -1)
        key = torch.cat([key, torch.ones_like(key[..., :1]), -key.square().sum(-1, keepdim=True) / 2], -1)
    return torch.where(queries_hold, query, math.nan), torch.where(keys_hold, key, math.nan)


def _finite(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors with 0 in place of those that are not finite, and which ones are finite, [..., 1].

    A key that is masked for every query may hold NaN. Its gradient is 0, which the formulas above would multiply by
    that NaN."""
    hold = vectors.isfinite().all(-1, keepdim=True)
    return torch.where(hold, vectors, 0.0), hold


def _mean(query: Tensor, hold: Tensor, heads: int) -> Tensor:
    """The mean of the finite queries that share a key head, [B, heads, 1, D]."""
    total, count = query.sum(2, keepdim=True), hold.sum(2, keepdim=True)
    if query.shape[1] != heads:
        total, count = (t.unflatten(1, (heads, -1)).sum(2) for t in (total, count))
    return total / count.clamp(min=1)
