"""The parameters that `retrofit` adds to one attention of a trained model: per head, a temperature, a null key, and how
much distance counts."""

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
RECORD = "regard_retrofit"  # the entry of a model's configuration that lists the learned parts
_LOG_ZERO = -1e4  # stands for log(0), the log weight of an absent null key: exp(-1e4) is 0, and -inf would give NaN


class Retrofit(nn.Module):
    """Learnable parameters of one attention, each of shape [H]. All start at 0, where they change nothing.

    temperature: the problem's own temperature times exp(log_temperature).
    sink: a null key with this score and this prior weight, that is `Rows(sink=null_score + tau * log(null_weight))`.
    bias: `ALiBi(slopes)`, log pi = -slope * distance.

    Why the null key has a weight: a score alone would have to start at -inf to have no effect, and near -inf its
    gradient vanishes together with its mass. The mass is nearly proportional to the weight, so a weight can start at 0.
    There the loss falls by <dL/dout, out> * exp(score / tau - lse) per row. A negative weight counts as 0, and receives
    a gradient only if gradient descent would increase it.
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
        """The problem's own temperature times the learned factor, [H, 1, 1]."""
        return own if self.log_temperature is None else own * _compute(self.log_temperature).exp()[:, None, None]

    def sink_score(self, temperature: Scalar) -> Tensor | None:
        """The score that a null key of prior weight 1 would need to have the same effect, [H, 1, 1] (or the shape of
        the temperature); None if no head has a null key.

        Under torch.compile the values are not read, so the result is never None there.
        """
        if self.null_weight is None or self.null_score is None:
            return None
        weight = _compute(self.null_weight)[:, None, None]
        present = weight > 0
        if not torch.compiler.is_compiling() and not present.any():
            return None
        log_weight = torch.where(present, torch.where(present, weight, 1.0).log(), _LOG_ZERO)
        return _compute(self.null_score)[:, None, None] + temperature * log_weight

    def kept_mass(self, lse: Tensor, temperature: Scalar) -> Tensor:
        """The share of its mass that a KL row keeps beside the null key, from its lse without the null key [B, H, Tq].

        The output without the null key times this share equals the output with `sink_score`, but it is also
        differentiable at weight 0.
        """
        assert self.null_weight is not None and self.null_score is not None
        weight = _NotNegative.apply(_compute(self.null_weight)[:, None])
        odds = (_compute(self.null_score)[:, None, None] / temperature).squeeze(-1) - lse
        return 1 / (1 + weight * odds.clamp(max=80.0).exp())  # above 80 the share is 0, and exp would overflow

    def extra_repr(self) -> str:
        return ", ".join(f"{name}: [{p.shape[0]}]" for name, p in self.named_parameters())


class _NotNegative(torch.autograd.Function):
    """max(x, 0). Below 0 a gradient passes if gradient descent would increase x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return torch.where((x >= 0) | (grad < 0), grad, 0.0)


def retrofit_of(module: nn.Module, allow_lost: bool = False) -> Retrofit | None:
    """The parameters that `retrofit` added to this attention, or None.

    Raises if the model's configuration lists learned parameters that the module does not have, unless `allow_lost`.
    """
    found = getattr(module, "retrofit", None)
    if isinstance(found, Retrofit):
        return found
    if not allow_lost:
        check_not_lost(getattr(module, "config", None))
    return None


def check_not_lost(config: Any) -> None:
    """Raise if this configuration lists learned parameters; called where the model has none."""
    if (learned := getattr(config, RECORD, None)) is not None:
        raise ValueError(
            f"model: expected the learned parameters of its retrofitted checkpoint ({', '.join(learned)}), got a model "
            f"that was loaded without them: regard.hf.from_pretrained loads it with them, regard.hf.unretrofit drops "
            f"them"
        )


def _compute(parameter: Tensor) -> Tensor:
    return parameter.to(compute_dtype(parameter.dtype))
