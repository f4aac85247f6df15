"""The feature maps: elu(x) + 1, FAVOR+ and ReLU."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._validate import describe, is_integer
from .base import Features
from .fused import Kernel
from .projections import ProjectedFeatures


class _EluPlusOne(torch.autograd.Function):
    """elu(x) + 1, computed as x + 1 or exp(x): elu(x) + 1 itself loses all digits where x is very negative.

    The derivative is min(phi, 1): one pass over memory, where PyTorch's derivatives of the parts take eight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.maximum(x + 1, x.clamp(max=0).exp())  # exp(x) >= x + 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.saved_tensors[0].clamp(max=1)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # type: ignore[override]
        return tangent * ctx.saved_tensors[0].clamp(max=1)


class LinearAttention(Features):
    """phi(x) = elu(x) + 1: the linear transformer (Katharopoulos et al. 2020). `scale` is 1 unless given."""

    def features(self, x: Tensor, scale: float | None) -> tuple[Tensor, Tensor | None]:
        if scale is not None:
            x = x * math.sqrt(scale)
        if torch.compiler.is_compiling():  # Dynamo takes no Function with a jvp; the compiler fuses these operations
            return torch.where(x > 0, x + 1, x.clamp(max=0).exp()), None
        return _EluPlusOne.apply(x), None

    def kernel(self, shape: torch.Size) -> Kernel | None:
        return Kernel("elu", 1.0) if type(self).features is LinearAttention.features else None


class Performer(ProjectedFeatures):
    """FAVOR+ (Choromanski et al. 2021): phi(x)_r = exp(<w_r, x'> - |x'|^2 / 2) / sqrt(m), x' = x sqrt(scale), whose
    <phi(q), phi(k)> has the mean exp(scale <q, k>) over draws of w. `scale` is 1/sqrt(D) unless given.

    `num_features` is m (None: about D log D). With `redraw_interval`, new directions are drawn after that many calls
    in training mode; `redraw()` draws them at once. `orthogonal=False` draws them independently, which has a larger
    variance.
    """

    def __init__(
        self,
        dim: int,
        num_features: int | None = None,
        *,
        orthogonal: bool = True,
        redraw_interval: int | None = None,
        generator: torch.Generator | None = None,
        chunk: int | None = None,
    ) -> None:
        if not is_integer(dim) or dim < 1:
            raise ValueError(f"dim: expected a positive int, the head size, got {describe(dim)}")
        if num_features is None:
            num_features = dim * max(1, round(math.log(dim)))  # a whole number of orthogonal blocks
        super().__init__(dim, num_features, orthogonal, redraw_interval, generator, chunk)

    def features(self, x: Tensor, scale: float | None) -> tuple[Tensor, Tensor | None]:
        scale = 1 / math.sqrt(x.shape[-1]) if scale is None else scale
        logits = self.project(x, scale)
        half_square = x.square().sum(-1, keepdim=True) * (scale / 2)
        level = (logits.detach().amax(-1, keepdim=True) - half_square).detach()
        return logits.sub_(half_square + level).exp_(), level

    def kernel(self, shape: torch.Size) -> Kernel | None:
        return self.kernel_of(Performer, "exp", 1 / math.sqrt(shape[-1]), shape)


class ReLUFeatures(ProjectedFeatures):
    """phi(x) = relu(x), or with `dim` and `num_features` relu of that many random projections, whose <phi(q), phi(k)>
    / m has the mean |q| |k| (sin t + (pi - t) cos t) / 2 pi, t the angle: the arc-cosine kernel (Cho and Saul 2009).

    This takes O(T) time; relu(q k^T) with normalized rows does not. A query whose features are all 0 gives 0. `scale`
    is 1 unless given, and changes `lse` only.
    """

    def __init__(
        self,
        dim: int | None = None,
        num_features: int | None = None,
        *,
        orthogonal: bool = True,
        redraw_interval: int | None = None,
        generator: torch.Generator | None = None,
        chunk: int | None = None,
    ) -> None:
        if (dim is None) != (num_features is None) or (dim is None and redraw_interval is not None):
            raise ValueError(
                "ReLUFeatures: expected dim and num_features, or neither and no redraw_interval, "
                f"got dim={describe(dim)}, num_features={describe(num_features)}, redraw_interval={redraw_interval!r}"
            )
        super().__init__(dim, num_features, orthogonal, redraw_interval, generator, chunk)

    def features(self, x: Tensor, scale: float | None) -> tuple[Tensor, Tensor | None]:
        return self.project(x, scale).relu(), None

    def kernel(self, shape: torch.Size) -> Kernel | None:
        return self.kernel_of(ReLUFeatures, "relu", 1.0, shape)
