"""What a trained attention may learn anew, per head: its temperature, a null key, how much distance counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._validate import Scalar, compute_dtype

PARAMETERS = {
    "temperature": ("log_temperature",),
    "sink": ("null_weight", "null_score"),
    "bias": ("slopes",),
}
_NOWHERE = -1e4  # a null key of weight 0 has the score -inf: exp of this, too, is 0


class Retrofit(nn.Module):
    """Parameters [H] of one attention. At 0, where they begin, they change nothing.

    temperature: the problem's own times exp(log_temperature).
    sink: a null key of this score and prior weight, that is `Rows(sink=null_score + tau * log(null_weight))`.
    bias: `ALiBi(slopes)`, log pi = -slope * distance.

    A null key's score alone could not begin at "no effect": that is -inf, and near it the gradient vanishes as the mass
    does. Its mass is nearly proportional to its weight, which can: there the loss falls by <dL/dout, out> *
    exp(score / tau - lse) per row. A weight below 0 counts as 0, and gets a gradient only if that leads upwards.
    """

    log_temperature: nn.Parameter | None
    null_weight: nn.Parameter | None
    null_score: nn.Parameter | None
    slopes: nn.Parameter | None

    def __init__(
        self, heads: int, learn: tuple[str, ...], dtype: torch.dtype | None = None, device: Any = None
    ) -> None:
        super().__init__()
        for part, names in PARAMETERS.items():
            for name in names:
                fresh = nn.Parameter(torch.zeros(heads, dtype=dtype, device=device)) if part in learn else None
                self.register_parameter(name, fresh)

    def temperature(self, own: Scalar) -> Scalar:
        """The problem's own temperature, times the learned one: [H, 1, 1]."""
        return own if self.log_temperature is None else own * _wide(self.log_temperature).exp()[:, None, None]

    def null_level(self, temperature: Scalar) -> Tensor | None:
        """The null key's score if its prior weight were 1, [H, 1, 1] (or as the temperature); None if no head has one.

        (Under torch.compile, where values are not looked at, there is always one.)
        """
        if self.null_weight is None or self.null_score is None:
            return None
        weight = _wide(self.null_weight)[:, None, None]
        there = weight > 0
        if not torch.compiler.is_compiling() and not there.any():
            return None
        logarithm = torch.where(there, torch.where(there, weight, 1.0).log(), _NOWHERE)
        return _wide(self.null_score)[:, None, None] + temperature * logarithm

    def kept(self, lse: Tensor, temperature: Scalar) -> Tensor:
        """The share of its mass that a KL row keeps beside the null key, from its lse without it [B, H, Tq]: its output
        is multiplied by this. The same as by `null_level`, and differentiable at weight 0."""
        assert self.null_weight is not None and self.null_score is not None
        weight = _NotNegative.apply(_wide(self.null_weight)[:, None])
        odds = (_wide(self.null_score)[:, None, None] / temperature).squeeze(-1) - lse
        return 1 / (1 + weight * odds.clamp(max=80.0).exp())  # beyond 80 nothing is kept, and exp would overflow

    def extra_repr(self) -> str:
        return ", ".join(f"{name}: [{p.shape[0]}]" for name, p in self.named_parameters())


class _NotNegative(torch.autograd.Function):
    """max(x, 0); below 0 a gradient passes if descent along it leads back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return torch.where((x >= 0) | (grad < 0), grad, 0.0)


def _wide(parameter: Tensor) -> Tensor:
    return parameter.to(compute_dtype(parameter.dtype))
