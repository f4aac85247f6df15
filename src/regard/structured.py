"""Priors with structure: their logarithm is a table, a product of factors or a difference, never a Tq x Tk matrix.

Each gives its gradient the same way. With G_ij = dL/dlog(pi_ij) = p_ij (u_ij - b_i), a table sums G along diagonals,
factors sum it with the other factor, a decay sums it over rows and over keys (theory.md).
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from . import tiles
from ._validate import broadcastable, check_device, check_type, check_values, concrete, describe, is_integer
from .priors import Alignment, PlanShape, Prior, PriorTerms, check_alignment, check_floating


class Relative(Prior):
    """log pi = table[h, clamp(j - position_i, -R, R) + R]: one number for each distance from query to key.

    `table` [H, 2R + 1] or [2R + 1] (one for all heads) has the entry of distance 0 in its middle. Distances beyond R
    count as R. The position of query i is i + offset, with the offset as in `Causal`.
    """

    positioned: ClassVar[bool] = True
    weighted: ClassVar[bool] = True
    table: Tensor
    alignment: Alignment | None = None

    def __post_init__(self) -> None:
        check_floating("Relative(table)", self.table)
        if self.table.dim() not in (1, 2) or self.table.shape[-1] % 2 == 0:
            raise ValueError(
                f"Relative(table): expected shape [H, 2R + 1] or [2R + 1], the distances -R ... R, got "
                f"{list(self.table.shape)}"
            )
        check_alignment("Relative", self.alignment)

    @classmethod
    def t5(
        cls, weights: Tensor, bidirectional: bool, max_distance: int = 128, alignment: Alignment | None = None
    ) -> Relative:
        """The relative position bias of T5. `weights` [buckets, H] has one row for each bucket of distances.

        Distances from `max_distance` on share one bucket, so the table has 2 max_distance + 1 entries.
        """
        check_floating("Relative.t5(weights)", weights)
        if weights.dim() != 2:
            raise ValueError(f"Relative.t5(weights): expected shape [buckets, H], got {list(weights.shape)}")
        least = 4 if bidirectional else 2
        if weights.shape[0] < least or not is_integer(max_distance) or max_distance < weights.shape[0] // 2:
            raise ValueError(
                f"Relative.t5: expected at least {least} buckets and max_distance >= buckets / 2, got "
                f"{weights.shape[0]} buckets, max_distance={max_distance}"
            )
        distance = torch.arange(-max_distance, max_distance + 1, device=weights.device)  # key minus query
        return cls(weights[_t5_bucket(distance, bidirectional, weights.shape[0], max_distance)].mT, alignment)

    def terms(self, shape: PlanShape) -> PriorTerms:
        table = self.table if self.table.dim() == 2 else self.table[None]
        check_type("Relative(table)", table)
        check_device("Relative(table)", table, shape.device)
        if table.shape[0] not in (1, shape.H):
            raise ValueError(
                f"Relative(table): expected one row for each head, H={shape.H}, or one for all, got "
                f"{list(self.table.shape)}"
            )
        check_values("Relative(table)", table, "finite numbers (mask distances with Window)", torch.isfinite)
        return PriorTerms(relative=table.to(shape.dtype)[None, :, None])


def add_tables(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two tables [1, H|1, 1, 2R + 1]. The shorter one repeats its ends."""
    reach = max(one.shape[3], other.shape[3]) // 2

    def longer(table: Tensor) -> Tensor:
        more = reach - table.shape[3] // 2
        ends = (table[..., :1].expand(-1, -1, -1, more), table, table[..., -1:].expand(-1, -1, -1, more))
        return torch.cat(ends, 3) if more else table

    return longer(one) + longer(other)


def _t5_bucket(distance: Tensor, bidirectional: bool, buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance from query to key: exact up to half of the buckets, logarithmic beyond."""
    first = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        first = torch.where(distance > 0, buckets, 0)
        away = distance.abs()
    else:
        away = (-distance).clamp(min=0)
    exact = buckets // 2
    ratio = (away.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return first + torch.where(away < exact, away, far)


class LowRank(Prior):
    """log pi = <query_factor_i, key_factor_j>, with factors [..., H|1, Tq, r] and [..., H|Hkv|1, Tk, r]."""

    weighted: ClassVar[bool] = True
    query_factor: Tensor
    key_factor: Tensor

    def __post_init__(self) -> None:
        for name in ("query_factor", "key_factor"):
            factor = getattr(self, name)
            check_floating(f"LowRank({name})", factor)
            if factor.dim() < 2:
                raise ValueError(f"LowRank({name}): expected shape [..., T, r], got {list(factor.shape)}")
        if self.query_factor.shape[-1] != self.key_factor.shape[-1]:
            raise ValueError(
                f"LowRank: expected factors of one rank r, got {self.query_factor.shape[-1]} and "
                f"{self.key_factor.shape[-1]}"
            )

    def terms(self, shape: PlanShape) -> PriorTerms:
        r, key_factor, H = self.query_factor.shape[-1], self.key_factor, shape.H
        query_factor = broadcastable("LowRank(query_factor)", self.query_factor, shape.lead, shape.Tq, r, shape.device)
        heads = key_factor.shape[-3] if key_factor.dim() > 2 else 1
        # One factor for the query heads that share a key head. Scores alone do not tell how many key heads there are.
        shared = heads == shape.kv_heads if shape.kv_heads else heads > 0 and H % heads == 0
        if heads not in (1, H) and shared:
            key_factor = key_factor.repeat_interleave(H // heads, -3)
        key_factor = broadcastable("LowRank(key_factor)", key_factor, shape.lead, shape.Tk, r, shape.device)
        for name, factor, T in (("query_factor", query_factor, shape.Tq), ("key_factor", key_factor, shape.Tk)):
            if factor.shape[2] != T:
                raise ValueError(f"LowRank({name}): expected T={T} rows, got {list(getattr(self, name).shape)}")
            check_values(f"LowRank({name})", factor, "finite numbers", torch.isfinite)
        return PriorTerms(query_factor=query_factor.to(shape.dtype), key_factor=key_factor.to(shape.dtype))


class Decay(Prior):
    """log pi = the sum of log_forget over the keys after j, up to the query's own position: forgetting attention.

    `log_forget` [..., H|1, Tk] holds the logarithm of a forget gate for each key, at most 0. Keys after the query's
    position are masked. The sums are differences of cumulative sums in float64: they stay exact in long sequences.
    """

    positioned: ClassVar[bool] = True
    weighted: ClassVar[bool] = True
    log_forget: Tensor
    alignment: Alignment | None = None

    def __post_init__(self) -> None:
        check_floating("Decay(log_forget)", self.log_forget)
        if self.log_forget.dim() < 1:
            raise ValueError("Decay(log_forget): expected shape [..., H, Tk] or [Tk], got []")
        check_alignment("Decay", self.alignment)

    def terms(self, shape: PlanShape) -> PriorTerms:
        given = self.log_forget
        if given.shape[-1] != shape.Tk:
            raise ValueError(
                f"Decay(log_forget): expected one number for each key, Tk={shape.Tk}, got {list(given.shape)}"
            )
        gates = broadcastable("Decay(log_forget)", given[..., None, :], shape.lead, 1, shape.Tk, shape.device)
        check_values("Decay(log_forget)", gates, "finite numbers <= 0", lambda x: (x <= 0) & x.isfinite())
        total = gates.double().cumsum(-1)
        # A query beyond the last key has no gate of its own: what follows the last key forgets nothing.
        position = (torch.arange(shape.Tq, device=shape.device) + shape.offset).clamp(0, max(0, shape.Tk - 1))
        own = total[..., position] if shape.Tk else total.new_zeros(1, 1, 1, shape.Tq)
        return PriorTerms(right=0, decay_query=own.mT, decay_key=total)


class Density(Prior):
    """pi itself: a tensor >= 0 that broadcasts to [B, H, Tq, Tk], such as a soft mask in [0, 1].

    A key of density 0 has weight 0, but its gradient is alive: dL/dpi is finite there. So such a key is read, and NaN
    in it shows. A query whose keys all have density 0 is an empty row.
    """

    weighted: ClassVar[bool] = True
    prior: Tensor

    def __post_init__(self) -> None:
        check_floating("Density(prior)", self.prior)

    def terms(self, shape: PlanShape) -> PriorTerms:
        density = broadcastable("Density(prior)", self.prior, shape.lead, shape.Tq, shape.Tk, shape.device)
        check_values("Density(prior)", density, "finite numbers >= 0", lambda x: (x >= 0) & x.isfinite())
        return PriorTerms(density=density.to(shape.dtype))


class Selected(Prior):
    """Each query reads the keys that it selected: key j is admissible if j // block is in index[i].

    `index` is an integer tensor [B|1, H|1, Tq, n]. Entries of -1 select nothing, and repeated ones count once.
    """

    binary: ClassVar[bool] = True
    index: Tensor
    block: int = 1

    def __post_init__(self) -> None:
        index = self.index
        if not isinstance(index, Tensor) or index.is_floating_point() or index.dtype == torch.bool:
            raise TypeError(f"Selected(index): expected an integer tensor, got {describe(index)}")
        if index.dim() < 2:
            raise ValueError(f"Selected(index): expected shape [..., H, Tq, n], got {list(index.shape)}")
        if not is_integer(self.block) or self.block < 1:
            raise ValueError(f"Selected(block): expected a positive int, got {describe(self.block)}")

    def _fitted(self, shape: PlanShape) -> Tensor:
        """[B|1, H|1, Tq, n]"""
        index = broadcastable("Selected(index)", self.index, shape.lead, shape.Tq, self.index.shape[-1], shape.device)
        if index.shape[2] != shape.Tq:
            raise ValueError(
                f"Selected(index): expected one row for each query, Tq={shape.Tq}, got {list(self.index.shape)}"
            )
        blocks = -(-shape.Tk // self.block)
        ends = torch.stack(index.aminmax()) if index.numel() and concrete(index) else index  # faster than every entry
        check_values(
            "Selected(index)", ends, f"-1, or blocks of keys below {blocks}", lambda x: (x >= -1) & (x < blocks)
        )
        return index.long()

    def terms(self, shape: PlanShape) -> PriorTerms:
        index = self._fitted(shape)
        if index.shape[3] == 0:  # a tensor without memory would stand for no selection
            index = index.new_full((*index.shape[:3], 1), -1)
        return PriorTerms(selected=index, selected_block=self.block)

    def admits(self, shape: PlanShape, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        index, keys = self._fitted(shape), j // self.block
        rows = index[b % index.shape[0], h % index.shape[1], i]  # [..., n]
        found = torch.zeros(torch.broadcast_shapes(rows.shape[:-1], j.shape), dtype=torch.bool, device=shape.device)
        for n in range(rows.shape[-1]):
            found = found | (rows[..., n] == keys)
        return found

    def tile_bounds(self, shape: PlanShape) -> tuple[Tensor, Tensor]:
        """A selected block covers a range of tiles: +1 where it begins and -1 where it ends, summed along the keys."""
        index, size = self._fitted(shape), tiles.SIZE
        down, across = -(-shape.Tq // size), -(-shape.Tk // size)
        first = torch.where(index < 0, across, index * self.block // size)
        last = torch.where(index < 0, across - 1, (((index + 1) * self.block).clamp(max=shape.Tk) - 1) // size)
        row = torch.arange(shape.Tq, device=shape.device)[:, None] // size * (across + 1)
        change = torch.zeros(*index.shape[:2], down * (across + 1), dtype=torch.long, device=shape.device)
        ones = torch.ones_like(index).flatten(2)
        change.scatter_add_(2, (row + first).flatten(2), ones).scatter_add_(2, (row + last + 1).flatten(2), -ones)
        some = change.unflatten(2, (down, across + 1))[..., :across].cumsum(3) > 0
        return some, torch.zeros_like(some)
