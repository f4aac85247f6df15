"""The priors: a weight pi >= 0 for every pair of query and key, which the plan stays close to. Zero masks a pair.

A prior is one class. Its method `terms` gives the same prior as a few plain fields, `PriorTerms`, that every backend
reads. Products of priors combine these fields. So a new prior needs nothing but its class. This file has the base
class, products and unions, and the classic priors. structured.py has those with tables and factors, regions.py
`Prefix` and `Blocks`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from . import tiles
from ._pytree import Part
from ._validate import (
    Scalar,
    broadcastable,
    check_device,
    check_scalar,
    check_type,
    check_values,
    concrete,
    describe,
    finite,
    is_integer,
    row_parameter,
)

Alignment = Literal["top_left", "bottom_right"]


@dataclass(frozen=True)  # not a NamedTuple: Dynamo of PyTorch 2.8 does not trace the properties of one
class PlanShape:
    """The plan that a prior is for: [*lead, Tq, Tk], where lead ends with the heads; compute dtype and device.

    Query i is at key position i + offset."""

    lead: tuple[int, ...]
    Tq: int
    Tk: int
    dtype: torch.dtype
    device: torch.device
    offset: int = 0
    kv_heads: int = 0  # key/value heads, where they are known

    @property
    def B(self) -> int:
        return math.prod(self.lead[:-1])

    @property
    def H(self) -> int:
        return self.lead[-1]


class PriorTerms(NamedTuple):
    """A prior in the fields that backends read. Query i is at key position i + offset.

    The pair (i, j) is masked unless -left <= j - position <= right, the ids agree and are not negative, log_prior is
    above -inf, j // selected_block is selected, and the region admits the pair. Elsewhere log pi is the sum of the
    terms that are given: log_prior, -slopes * |j - position|, relative[j - position] (clamped),
    <query_factor_i, key_factor_j>, decay_query_i - decay_key_j, log density, function(b, h, position, j).
    """

    left: int | None = None
    right: int | None = None
    slopes: Tensor | None = None  # [1, H|1, 1, 1]
    log_prior: Tensor | None = None  # broadcasts to [B, H, Tq, Tk]
    query_ids: Tensor | None = None  # [B|1, 1, Tq, 1]
    key_ids: Tensor | None = None  # [B|1, 1, 1, Tk]
    relative: Tensor | None = None  # [1, H|1, 1, 2R + 1]
    query_factor: Tensor | None = None  # [B|1, H|1, Tq, r]
    key_factor: Tensor | None = None  # [B|1, H|1, Tk, r]
    decay_query: Tensor | None = None  # [B|1, H|1, Tq, 1], float64
    decay_key: Tensor | None = None  # [B|1, H|1, 1, Tk], float64
    density: Tensor | None = None  # broadcasts to [B, H, Tq, Tk]
    selected: Tensor | None = None  # [B|1, H|1, Tq, n], blocks of keys; -1 is none
    selected_block: int = 1
    region: Prior | None = None  # a prior of 0 and 1 that becomes a map of tiles (tiles.py)
    function: str | None = None  # a graph as text (compiled/pairs.py)
    captured: tuple[Tensor, ...] = ()  # that the graph reads: compute dtype, int64 or bool
    untraced: str | None = None  # why a function became a dense log_prior


class Prior(Part, abstract=True):
    """A weight pi >= 0 for every pair of query and key, never normalised; 0 masks. Priors multiply with `*`."""

    positioned: ClassVar[bool] = False  # whether it depends on positions: then it has a field `alignment`
    weighted: ClassVar[bool] = False  # whether it has other values than 0 and 1 by construction
    binary: ClassVar[bool] = False  # whether its values are 0 and 1 by construction: it has `admits`, and `|` takes it

    def __init_subclass__(cls, abstract: bool = False) -> None:
        if cls.positioned and not abstract and "alignment" not in cls.__annotations__ and not hasattr(cls, "alignment"):
            raise TypeError(f"{cls.__name__}: expected a field `alignment`, because it depends on positions; got none")
        super().__init_subclass__(abstract)

    def __mul__(self, other: Prior) -> Prior:
        if not isinstance(other, Prior):
            return NotImplemented
        return Product(self.factors() + other.factors())

    def __or__(self, other: Prior) -> Prior:
        if not isinstance(other, Prior):
            return NotImplemented
        return Union(self.alternatives() + other.alternatives())

    def factors(self) -> tuple[Prior, ...]:
        return (self,)

    def alternatives(self) -> tuple[Prior, ...]:
        return (self,)

    def leaves(self) -> tuple[Prior, ...]:
        """The priors that this one is made of, through products and unions."""
        return (self,)

    def admits(self, shape: PlanShape, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Priors of 0 and 1: True where query i may read key j, for indices that broadcast."""
        raise NotImplementedError(f"prior: {self!r} is no prior of 0 and 1")

    def tile_bounds(self, shape: PlanShape) -> tuple[Tensor, Tensor]:
        """Priors of 0 and 1: where a tile (tiles.py) may have an admissible pair, and where all its pairs are for
        certain. Both broadcast to [B, H, tiles of queries, tiles of keys]. The default is certain of nothing."""
        nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=shape.device)
        return ~nothing, nothing

    def terms(self, shape: PlanShape) -> PriorTerms:
        """The prior of a plan of this shape, as fields that backends read. Raises if it does not fit."""
        raise NotImplementedError(f"prior: no solver for {self!r}")


def check_alignment(name: str, alignment: object) -> None:
    if alignment not in (None, "top_left", "bottom_right"):
        raise ValueError(f'{name}(alignment): expected "top_left", "bottom_right" or None, got {describe(alignment)}')


def check_floating(name: str, tensor: object) -> None:
    """Raise unless the field of a prior is a floating-point tensor."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor, got {describe(tensor)}")


class Product(Prior):
    """A product of priors, the result of `*`."""

    parts: tuple[Prior, ...]

    def factors(self) -> tuple[Prior, ...]:
        return self.parts

    def leaves(self) -> tuple[Prior, ...]:
        return tuple(leaf for part in self.parts for leaf in part.leaves())

    def admits(self, shape: PlanShape, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return _all_of([part.admits(shape, b, h, i, j) for part in self.parts])

    def tile_bounds(self, shape: PlanShape) -> tuple[Tensor, Tensor]:
        some, every = zip(*(part.tile_bounds(shape) for part in self.parts), strict=True)
        return _all_of(some), _all_of(every)

    def __repr__(self) -> str:
        return " * ".join(f"({part!r})" if len(part.alternatives()) > 1 else repr(part) for part in self.parts)


def _all_of(masks: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.logical_and, masks)


class Region(Prior, abstract=True):
    """A prior of 0 and 1 that is lowered to a map of tiles, which kernels walk."""

    binary: ClassVar[bool] = True

    def terms(self, shape: PlanShape) -> PriorTerms:
        return PriorTerms(region=self)


class Union(Region):
    """Admissible where one of the parts is, the result of `|`. The parts are priors of 0 and 1."""

    parts: tuple[Prior, ...]

    def __post_init__(self) -> None:
        for leaf in self.leaves():
            if not leaf.binary:
                raise ValueError(
                    f"prior: `|` expects priors of 0 and 1 (Causal, Window, Documents, Prefix, Blocks, Selected, their "
                    f"products and unions), got {leaf!r}"
                )

    def alternatives(self) -> tuple[Prior, ...]:
        return self.parts

    def leaves(self) -> tuple[Prior, ...]:
        return tuple(leaf for part in self.parts for leaf in part.leaves())

    def admits(self, shape: PlanShape, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return _one_of([part.admits(shape, b, h, i, j) for part in self.parts])

    def tile_bounds(self, shape: PlanShape) -> tuple[Tensor, Tensor]:
        some, every = zip(*(part.tile_bounds(shape) for part in self.parts), strict=True)
        return _one_of(some), _one_of(every)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


def _one_of(masks: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.logical_or, masks)


def _band_admits(shape: PlanShape, i: Tensor, j: Tensor, left: int | None, right: int | None) -> Tensor:
    distance = j - i - shape.offset
    admitted = torch.ones_like(distance, dtype=torch.bool)
    if right is not None:
        admitted = admitted & (distance <= right)
    return admitted if left is None else admitted & (distance >= -left)


def _band_bounds(shape: PlanShape, left: int | None, right: int | None) -> tuple[Tensor, Tensor]:
    """From the smallest and the largest distance of key and query in each tile."""
    queries, keys = (_tile_ends(T, shape.device) for T in (shape.Tq, shape.Tk))
    nearest = keys[0] - queries[1][:, None] - shape.offset
    farthest = keys[1] - queries[0][:, None] - shape.offset
    some = every = torch.ones_like(nearest, dtype=torch.bool)
    if right is not None:
        some, every = some & (nearest <= right), every & (farthest <= right)
    if left is not None:
        some, every = some & (farthest >= -left), every & (nearest >= -left)
    return some[None, None], every[None, None]


def _tile_ends(T: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first and the last index of each tile."""
    first = torch.arange(0, T, tiles.SIZE, device=device)
    return first, (first + tiles.SIZE).clamp(max=T) - 1


class Causal(Prior):
    """Query i, at key position i + offset, sees keys up to its own position.

    The offset is 0 for "top_left" (PyTorch's is_causal) and Tk - Tq for "bottom_right" (decoding with a cache). If
    `alignment` is None, that of the other priors of the product holds; if all are None, Tq must equal Tk.
    """

    positioned: ClassVar[bool] = True
    binary: ClassVar[bool] = True
    alignment: Alignment | None = None

    def __post_init__(self) -> None:
        check_alignment("Causal", self.alignment)

    def terms(self, shape: PlanShape) -> PriorTerms:
        return PriorTerms(right=0)

    def admits(self, shape: PlanShape, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return _band_admits(shape, i, j, None, 0)

    def tile_bounds(self, shape: PlanShape) -> tuple[Tensor, Tensor]:
        return _band_bounds(shape, None, 0)


class Window(Prior):
    """Keys from `left` before the query to `right` after it, both ends included; None is unbounded."""

    positioned: ClassVar[bool] = True
    binary: ClassVar[bool] = True
    left: int | None
    right: int | None = 0
    alignment: Alignment | None = None

    def __post_init__(self) -> None:
        for name, value in (("left", self.left), ("right", self.right)):
            if value is not None and not is_integer(value):
                raise TypeError(f"Window({name}): expected an int or None, got {describe(value)}")
        if self.left is not None and self.right is not None and self.right < -self.left:
            raise ValueError(f"Window: expected right >= -left, got {self!r}, which admits no key")
        check_alignment("Window", self.alignment)

    def terms(self, shape: PlanShape) -> PriorTerms:
        return PriorTerms(left=self.left, right=self.right)

    def admits(self, shape: PlanShape, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return _band_admits(shape, i, j, self.left, self.right)

    def tile_bounds(self, shape: PlanShape) -> tuple[Tensor, Tensor]:
        return _band_bounds(shape, self.left, self.right)


class ALiBi(Prior):
    """log pi = -slope_h * |i + offset - j|, slopes [H] or a number; the offset as in `Causal`."""

    positioned: ClassVar[bool] = True
    weighted: ClassVar[bool] = True
    slopes: Scalar
    alignment: Alignment | None = None

    def __post_init__(self) -> None:
        check_scalar("ALiBi(slopes)", self.slopes, "a finite number", finite)
        check_alignment("ALiBi", self.alignment)

    def terms(self, shape: PlanShape) -> PriorTerms:
        slopes, H = self.slopes, shape.H
        if not isinstance(slopes, Tensor):
            slopes = torch.full((1,), float(slopes), dtype=shape.dtype, device=shape.device)
        if slopes.numel() != 1 and slopes.numel() != H:
            raise ValueError(f"ALiBi(slopes): expected a number or shape [H={H}], got {list(slopes.shape)}")
        slopes = row_parameter(
            "ALiBi(slopes)", slopes.reshape(-1), shape.B, H, shape.Tq, shape.dtype, shape.device, per_head=True
        )
        check_values("ALiBi(slopes)", slopes, "finite slopes", torch.isfinite)
        assert isinstance(slopes, Tensor)
        return PriorTerms(slopes=slopes)


class Bias(Prior):
    """pi = exp(log_prior), any tensor that broadcasts to [B, H, Tq, Tk]; -inf masks a pair."""

    log_prior: Tensor

    def __post_init__(self) -> None:
        check_floating("Bias(log_prior)", self.log_prior)

    def terms(self, shape: PlanShape) -> PriorTerms:
        fitted = broadcastable("Bias(log_prior)", self.log_prior, shape.lead, shape.Tq, shape.Tk, shape.device)
        return PriorTerms(log_prior=fitted)


class Documents(Prior):
    """Packed sequences: a query sees the keys of its own document. ids [T] or [B, T]; negative ids are padding."""

    binary: ClassVar[bool] = True
    query_ids: Tensor
    key_ids: Tensor | None = None

    def __post_init__(self) -> None:
        for name, ids in (("query_ids", self.query_ids), ("key_ids", self.key_ids)):
            if ids is None and name == "key_ids":
                continue
            if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
                raise TypeError(f"Documents({name}): expected an integer tensor, got {describe(ids)}")
            if ids.dim() not in (1, 2):
                raise ValueError(f"Documents({name}): expected shape [T] or [B, T], got {list(ids.shape)}")

    @classmethod
    def from_cu_seqlens(
        cls,
        query: Tensor,
        key: Tensor | None = None,
        *,
        query_length: int | None = None,
        key_length: int | None = None,
    ) -> Documents:
        """From cumulative lengths [0, n1, n1 + n2, ...]; positions past the last boundary are padding.

        The lengths default to the last boundary; give them where tensors are padded (and under torch.compile).
        """
        ids = _ids_from_boundaries("query", query, query_length)
        return cls(ids) if key is None else cls(ids, _ids_from_boundaries("key", key, key_length))

    def terms(self, shape: PlanShape) -> PriorTerms:
        queries, keys = self._fitted(shape)
        return PriorTerms(query_ids=queries[:, None, :, None], key_ids=keys[:, None, None, :])

    def admits(self, shape: PlanShape, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        queries, keys = self._fitted(shape)
        own = queries[b % len(queries), i]
        return (own == keys[b % len(keys), j]) & (own >= 0)

    def tile_bounds(self, shape: PlanShape) -> tuple[Tensor, Tensor]:
        """From the range of the ids in each tile."""
        (least, most), (key_least, key_most) = (_tile_ranges(ids) for ids in self._fitted(shape))
        least, most, key_least, key_most = least[..., None], most[..., None], key_least[:, None], key_most[:, None]
        some = (least <= key_most) & (key_least <= most) & (most >= 0)
        every = (least == most) & (key_least == key_most) & (least == key_least) & (least >= 0)
        return some[:, None], every[:, None]

    def _fitted(self, shape: PlanShape) -> tuple[Tensor, Tensor]:
        """The ids of queries and keys, [B|1, T]."""
        B, Tq, Tk = shape.B, shape.Tq, shape.Tk
        if self.key_ids is None and Tq != Tk:
            raise ValueError(f"Documents(key_ids): expected key ids where Tq != Tk, got None with Tq={Tq}, Tk={Tk}")
        key_ids = self.query_ids if self.key_ids is None else self.key_ids
        sides = []
        for name, ids, T in (("query_ids", self.query_ids, Tq), ("key_ids", key_ids, Tk)):
            if ids.shape[-1] != T or (ids.dim() == 2 and ids.shape[0] != 1 and ids.shape[0] != B):
                raise ValueError(f"Documents({name}): expected shape [{T}] or [{B}, {T}], got {list(ids.shape)}")
            check_type(f"Documents({name})", ids)
            check_device(f"Documents({name})", ids, shape.device)
            sides.append((ids if ids.dim() == 2 else ids[None]).long())
        return sides[0], sides[1]


def _tile_ranges(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest id in each tile, [B|1, tiles]."""
    missing = -ids.shape[1] % tiles.SIZE
    padded = torch.cat([ids, ids[:, -1:].expand(-1, missing)], 1) if missing else ids
    parts = padded.unflatten(1, (-1, tiles.SIZE))
    return parts.amin(2), parts.amax(2)


def _ids_from_boundaries(name: str, boundaries: Tensor, length: int | None) -> Tensor:
    where = f"Documents.from_cu_seqlens({name})"
    if not isinstance(boundaries, Tensor) or boundaries.is_floating_point() or boundaries.dtype == torch.bool:
        raise TypeError(f"{where}: expected an integer tensor, got {describe(boundaries)}")
    if boundaries.dim() != 1 or boundaries.shape[0] < 1:
        raise ValueError(f"{where}: expected shape [documents + 1], got {list(boundaries.shape)}")
    if not torch.compiler.is_compiling() and (boundaries[0] != 0 or (boundaries.diff() < 0).any()):
        raise ValueError(f"{where}: expected boundaries that start at 0 and never fall, got {boundaries.tolist()}")
    total = int(boundaries[-1]) if length is None else length
    position = torch.arange(total, device=boundaries.device)
    ids = torch.searchsorted(boundaries.to(position.dtype), position, right=True) - 1
    return torch.where(position < boundaries[-1], ids, -1)


def join_ids(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combine two packings: the (query, key) ids of pairs of documents. Negative ids stay padding."""
    (queries, keys), (other_queries, other_keys) = first, second
    if concrete(queries):  # number the ids of one packing from 0, so that a pair of ids fits into one integer
        _, small = torch.unique(torch.cat([queries.flatten(), keys.flatten()]), return_inverse=True)
        n = queries.numel()
        queries = torch.where(queries < 0, -1, small[:n].view_as(queries))
        keys = torch.where(keys < 0, -1, small[n:].view_as(keys))
    base = torch.maximum(queries.max(), keys.max()) + 1

    def pair(ids: Tensor, others: Tensor) -> Tensor:
        return torch.where((others < 0) | (ids < 0), -1, others * base + ids)

    return pair(queries, other_queries), pair(keys, other_keys)


# Version 0.1 had these classes in regard.problem. Its checkpoints name them so.
torch.serialization.add_safe_globals(
    [(kind, f"regard.problem.{kind.__name__}") for kind in (ALiBi, Bias, Causal, Documents, Product, Window)]
)
