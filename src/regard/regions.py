"""Priors of 0 and 1 that are no band: `Prefix` and `Blocks`. Like unions (`a | b` in priors.py), they are lowered to a
map of tiles (tiles.py), which kernels walk."""

from __future__ import annotations

import torch
from torch import Tensor

from ._validate import broadcastable, check_device, check_type, check_values, describe, is_integer
from .priors import PlanShape, Region
from .tiles import SIZE


class Prefix(Region):
    """The keys below `n`, for every query: an int, or an integer tensor [B] with one number for each batch entry."""

    n: int | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.n, Tensor):
            if self.n.is_floating_point() or self.n.dtype == torch.bool or self.n.dim() > 1:
                raise TypeError(f"Prefix(n): expected an int or an integer tensor [B], got {describe(self.n)}")
        elif not is_integer(self.n) or self.n < 0:
            raise ValueError(f"Prefix(n): expected an int >= 0 or an integer tensor [B], got {describe(self.n)}")

    def _length(self, shape: PlanShape) -> Tensor:
        """[B|1]"""
        if not isinstance(self.n, Tensor):
            return torch.tensor([self.n], device=shape.device)
        n = self.n.reshape(-1).long()
        check_type("Prefix(n)", self.n)
        check_device("Prefix(n)", self.n, shape.device)
        if len(n) not in (1, shape.B):
            raise ValueError(
                f"Prefix(n): expected a number for each batch entry, B={shape.B}, got {list(self.n.shape)}"
            )
        check_values("Prefix(n)", n, "numbers >= 0", lambda x: x >= 0)
        return n

    def admits(self, shape: PlanShape, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        n = self._length(shape)
        return (j < n[b % len(n)]) & (i >= 0)

    def tile_bounds(self, shape: PlanShape) -> tuple[Tensor, Tensor]:
        first = torch.arange(0, shape.Tk, SIZE, device=shape.device)
        n = self._length(shape)[:, None, None, None]
        return first < n, (first + SIZE).clamp(max=shape.Tk) <= n


class Blocks(Region):
    """A block-sparse mask: query i reads key j if map[..., i // size, j // size]. `map` is a bool tensor
    [B|1, H|1, ceil(Tq/size), ceil(Tk/size)]."""

    map: Tensor
    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.map, Tensor) or self.map.dtype != torch.bool:
            raise TypeError(f"Blocks(map): expected a bool tensor, got {describe(self.map)}")
        if self.map.dim() < 2:
            raise ValueError(f"Blocks(map): expected shape [..., H, Tq/size, Tk/size], got {list(self.map.shape)}")
        if not is_integer(self.size) or self.size < 1:
            raise ValueError(f"Blocks(size): expected a positive int, got {describe(self.size)}")

    def _fitted(self, shape: PlanShape) -> Tensor:
        down, across = -(-shape.Tq // self.size), -(-shape.Tk // self.size)
        fitted = broadcastable("Blocks(map)", self.map, shape.lead, down, across, shape.device)
        if tuple(fitted.shape[2:]) != (down, across):
            raise ValueError(
                f"Blocks(map): expected {down} x {across} blocks of size {self.size}, got {list(self.map.shape)}"
            )
        return fitted

    def admits(self, shape: PlanShape, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        blocks = self._fitted(shape)
        return blocks[b % blocks.shape[0], h % blocks.shape[1], i // self.size, j // self.size]

    def tile_bounds(self, shape: PlanShape) -> tuple[Tensor, Tensor]:
        """A tile may overlap several blocks: sums over rectangles of the map count those that are set."""
        blocks = self._fitted(shape)
        sums = torch.nn.functional.pad(blocks.long().cumsum(2).cumsum(3), (1, 0, 1, 0))

        def ends(T: int) -> tuple[Tensor, Tensor]:
            first = torch.arange(0, T, SIZE, device=shape.device)
            return first // self.size, (torch.clamp(first + SIZE, max=T) - 1) // self.size + 1

        (top, bottom), (left, right) = ends(shape.Tq), ends(shape.Tk)
        total = sums[:, :, bottom][..., right] - sums[:, :, top][..., right]
        total = total - sums[:, :, bottom][..., left] + sums[:, :, top][..., left]
        area = (bottom - top)[:, None] * (right - left)
        return total > 0, total == area
