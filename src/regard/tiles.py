"""Masks as a map of tiles: which pairs of query and key are admissible, stored by tiles of 64 x 64 pairs.

Unions of priors (`a | b`, `Prefix`, `Blocks`) have no closed form as a band, so they are lowered to this map. An entry
of `tile_map` [B|1, H|1, ceil(Tq/64), ceil(Tk/64)] is the number of a tile: 0 is empty, 1 is full, and any other number
is a row of `tiles` [n, 64]. Bit q of `tiles[number, k]` is set if query q of the tile may read its key k. Kernels skip
empty tiles and need no mask in full ones, so the cost follows the admissible area. The map takes one number per tile,
and the mixed tiles 512 bytes each.

`build` asks each prior first for bounds per tile (`tile_bounds`) and evaluates single pairs (`admits`) only in tiles
that the bounds leave open. Maps are cached: the same prior and shape give the same tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

import torch
from torch import Tensor

from ._compat import pytree, version_of

SIZE = 64
_AT_ONCE = 256  # tiles whose pairs are evaluated together: a few buffers of 8 MiB
_CACHED = 16
_cache: OrderedDict[Any, tuple[Tensor, Tensor]] = OrderedDict()


class Admission(Protocol):
    """A prior of 0 and 1 (priors.py). `shape` is a PlanShape."""

    def admits(self, shape: Any, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor: ...

    def tile_bounds(self, shape: Any) -> tuple[Tensor, Tensor]: ...


def tile_map(prior: Admission, shape: Any) -> tuple[Tensor, Tensor]:
    """The map and the tiles of a prior of 0 and 1, from the cache if it was built before."""
    # A part hashes its tensors by identity. Their versions tell whether they were changed in place since.
    leaves = [leaf for leaf in pytree.tree_leaves(prior) if isinstance(leaf, Tensor)]
    if any(leaf.is_inference() for leaf in leaves):  # such a tensor has no version
        return build(prior, shape)
    key = (prior, tuple(version_of(leaf) for leaf in leaves), shape)
    if key not in _cache:
        _cache[key] = build(prior, shape)
        if len(_cache) > _CACHED:
            _cache.popitem(last=False)
    _cache.move_to_end(key)
    return _cache[key]


@torch.no_grad()
def build(prior: Admission, shape: Any) -> tuple[Tensor, Tensor]:
    """The map and the tiles of a prior of 0 and 1."""
    down, across = -(-shape.Tq // SIZE), -(-shape.Tk // SIZE)
    some, every = prior.tile_bounds(shape)
    batch, heads = torch.broadcast_shapes(some.shape, every.shape)[:2]
    some, every = some.expand(batch, heads, down, across), every.expand(batch, heads, down, across)
    numbers = every.long()
    mixed = (some & ~every).nonzero()  # [n, 4]
    fixed = torch.tensor([[0] * SIZE, [-1] * SIZE], device=shape.device)  # the empty tile and the full one
    if not len(mixed):
        return numbers, fixed
    within = torch.arange(SIZE, device=shape.device)
    weights = torch.ones((), dtype=torch.long, device=shape.device) << within
    packed = []
    for part in mixed.split(_AT_ONCE):
        b, h, down_index, across_index = (x[:, None, None] for x in part.unbind(1))
        i, j = down_index * SIZE + within[:, None], across_index * SIZE + within  # [n, 64, 1], [n, 1, 64]
        outside = (i >= shape.Tq) | (j >= shape.Tk)
        last = (i.clamp(max=shape.Tq - 1), j.clamp(max=shape.Tk - 1))
        # A pair outside of the plan is never read. It counts as its nearest neighbour, so that edge tiles can be full.
        admitted = prior.admits(shape, b, h, *last).expand_as(outside)
        packed.append((admitted.mT * weights).sum(-1))  # the 64 powers of two are the bits of one integer
    tiles = torch.cat(packed)
    which = torch.arange(2, 2 + len(tiles), device=shape.device)
    which = torch.where((tiles == 0).all(1), 0, torch.where((tiles == -1).all(1), 1, which))
    numbers[tuple(mixed.unbind(1))] = which
    return numbers, torch.cat([fixed, tiles])


def transposed(numbers: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
    """The map and the tiles with queries and keys exchanged."""
    within = torch.arange(SIZE, device=tiles.device)
    weights = torch.ones((), dtype=torch.long, device=tiles.device) << within
    # words[n, k] has bit q; the turned ones have bit k in place q.
    turned = [(((part[:, :, None] >> within) & 1).mT * weights).sum(-1) for part in tiles.split(_AT_ONCE)]
    return numbers.mT.contiguous(), torch.cat(turned)


def expand(numbers: Tensor, tiles: Tensor, queries: range, keys: range) -> Tensor:
    """The mask of these queries and keys, [B|1, H|1, Tq, Tk]."""
    first_down, first_across = queries.start // SIZE, keys.start // SIZE
    part = numbers[:, :, first_down : -(-queries.stop // SIZE), first_across : -(-keys.stop // SIZE)]
    words = tiles[part]  # [B|1, H|1, down, across, 64 keys]
    bits = (words[..., None] >> torch.arange(SIZE, device=tiles.device)) & 1  # and 64 queries
    mask = bits.bool().permute(0, 1, 2, 5, 3, 4).flatten(4, 5).flatten(2, 3)
    down, across = queries.start - first_down * SIZE, keys.start - first_across * SIZE
    return mask[:, :, down : down + len(queries), across : across + len(keys)]
