"""What a row of the table of cases is, and the tensors that it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard import Density, LowRank, Transport


@dataclass
class Maker:
    """Makes the tensors of a case: drawn in float64, rounded to the dtype under test, listed if they need a
    gradient."""

    case: Case
    dtype: torch.dtype
    generator: torch.Generator
    leaves: dict[str, Tensor] = field(default_factory=dict)

    def normal(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        return self._leaf(name, torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale)

    def uniform(self, name: str, low: float, high: float, *shape: int) -> Tensor:
        return self._leaf(name, torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low)

    def mask(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) < 0.7

    def index(self, below: int, *shape: int) -> Tensor:
        return torch.randint(-1, below, shape, generator=self.generator)

    def factors(self, query_shape: tuple[int, ...], key_shape: tuple[int, ...], name: str = "factor") -> LowRank:
        return LowRank(
            self.normal(f"query {name}", *query_shape, scale=0.5), self.normal(f"key {name}", *key_shape, scale=0.5)
        )

    def silent(self, *shape: int) -> Density:
        """Densities of 0 and 1, which need no gradient: finite differences cannot step below 0."""
        return Density(self.mask(*shape).to(self.dtype))

    def _leaf(self, name: str, tensor: Tensor) -> Tensor:
        self.leaves[name] = tensor.to(self.dtype).requires_grad_()
        return self.leaves[name]


@dataclass(frozen=True)
class Case:
    name: str
    problem: Callable[[Maker], Transport] | None = None
    arguments: Callable[[Maker], dict] = lambda make: {}
    B: int = 2
    H: int = 4
    Hkv: int = 4
    Tq: int = 7
    Tk: int = 7
    D: int = 8
    Dv: int = 8
    strided: bool = False
    # How much more than softmax the plan amplifies a relative error of the scores (steep links do).
    sensitivity: float = 1.0
