"""Random directions, and feature maps that are functions of projections on them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import in_backward
from .._validate import describe, is_integer
from . import fused
from .base import Features


def directions(
    num_features: int, dim: int, *, orthogonal: bool = True, generator: torch.Generator | None = None
) -> Tensor:
    """Random rows [num_features, dim] in float64, each standard normal; `orthogonal` within blocks of dim rows.

    An orthogonal block is Haar-distributed: it is the Q of a Gaussian matrix's QR decomposition after the signs of R's
    diagonal, which depend on the algorithm, are made positive (Mezzadri 2007). Each row gets the length of an
    independent Gaussian vector (chi): with rows of the fixed length sqrt(dim) the features would be biased.
    """
    device = "cpu" if generator is None else generator.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator, device=device)

    if not orthogonal:
        return normal(num_features, dim)
    Q, R = torch.linalg.qr(normal(-(-num_features // dim), dim, dim))
    Q = Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return Q.flatten(0, 1)[:num_features] * normal(num_features, dim).norm(dim=-1, keepdim=True)


class ProjectedFeatures(Features):
    """Features of `num_features` random projections (see `directions`), or of the input itself if `dim` is None.

    The directions are a buffer. It is part of the state dict, has float32 at least, and is used in the input's dtype
    and on its device.
    """

    projection: Tensor | None  # [M, D]
    calls: Tensor

    def __init__(
        self,
        dim: int | None,
        num_features: int | None,
        orthogonal: bool,
        redraw_interval: int | None,
        generator: torch.Generator | None,
        chunk: int | None,
    ) -> None:
        super().__init__(chunk=chunk)
        for name, value in (("dim", dim), ("num_features", num_features), ("redraw_interval", redraw_interval)):
            if value is not None and (not is_integer(value) or value < 1):
                raise ValueError(f"{name}: expected a positive int, got {describe(value)}")
        self.dim, self.num_features, self.orthogonal = dim, num_features, orthogonal
        self.redraw_interval = redraw_interval
        if dim is None or num_features is None:
            self.register_buffer("projection", None)
            return
        self.register_buffer("projection", torch.empty(num_features, dim, dtype=torch.float32))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))  # in training, since the last redraw
        self.redraw(generator)

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new directions (None: from PyTorch's generator). Results of the old ones, such as a `State`, cannot be
        combined with the new ones."""
        if self.projection is None or self.dim is None or self.num_features is None:
            raise RuntimeError(f"redraw: {type(self).__name__}() has no random directions")
        drawn = directions(self.num_features, self.dim, orthogonal=self.orthogonal, generator=generator)
        self.projection.copy_(drawn)
        self.calls.zero_()

    def begin_forward(self) -> None:
        # Activation checkpointing repeats a forward call in the backward pass: it must see the same directions.
        if self.training and self.redraw_interval is not None and not in_backward():
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    "redraw_interval: expected None under torch.compile; call redraw() between the steps of training"
                )
            if self.calls >= self.redraw_interval:
                self.redraw()
            self.calls += 1

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        kept = self.projection
        super()._apply(fn, recurse)
        now = self.projection
        if kept is not None and now is not None and now.dtype in (torch.float16, torch.bfloat16):
            self.projection = kept.to(now.device)  # in half precision they would no longer be what was drawn
        return self

    def project(self, x: Tensor, scale: float | None) -> Tensor:
        """sqrt(scale) <w_r, x>, or sqrt(scale) x without directions."""
        w = self.directions_for(x.shape)
        if w is None:
            return x if scale is None else x * math.sqrt(scale)
        w = w.to(x.device, x.dtype)
        return x @ (w if scale is None else w * math.sqrt(scale)).mT

    def directions_for(self, shape: torch.Size) -> Tensor | None:
        """The directions [M, D] for queries or keys [..., D]; None without directions."""
        if self.projection is not None and shape[-1] != self.dim:
            raise ValueError(f"query: expected head size D={self.dim}, as {self!r}, got {list(shape)}")
        return self.projection

    def kernel_of(
        self, kind: type[ProjectedFeatures], name: str, scale: float, shape: torch.Size
    ) -> fused.Kernel | None:
        """The engine's kernel `name`, which is that of the class `kind`; None if a subclass has changed the map."""
        if type(self).features is not kind.features or type(self).project is not ProjectedFeatures.project:
            return None
        return fused.Kernel(name, scale, self.directions_for(shape))

    def log_constant(self) -> float:
        return 0.0 if self.num_features is None else -math.log(self.num_features)

    def extra_repr(self) -> str:
        return "" if self.dim is None else f"dim={self.dim}, num_features={self.num_features}"
