"""Checks of the arguments of `regard.geometry`."""

from __future__ import annotations

import torch
from torch import Tensor

from .._validate import describe
from ..form import Form
from ..problem import Budget, Transport


def check_floating(name: str, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor, got {describe(tensor)}")
    return tensor


def broadcast_like(name: str, tensor: Tensor, other: str, model: Tensor) -> Tensor:
    """The tensor, expanded to the shape of `model`, the argument called `other`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {describe(tensor)}")
    try:
        return tensor.expand(model.shape)
    except RuntimeError:
        raise ValueError(
            f"{name}: expected a shape that broadcasts to that of {other}, {list(model.shape)}, "
            f"got {list(tensor.shape)}"
        ) from None


def check_tangent(name: str, tangent: Tensor, shape: torch.Size, device: torch.device) -> None:
    check_floating(name, tangent)
    if tangent.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tangent.shape)}")
    if tangent.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {tangent.device}")


def check_temperature(problem: Transport | None, form: Form) -> None:
    """Raises for a temperature that depends on the scores, and for 0."""
    if problem is not None and isinstance(problem.temperature, Budget):
        raise ValueError(
            f"temperature: expected a number or a tensor (the metric is that of a fixed temperature), "
            f"got {problem.temperature!r}"
        )
    if form.known_hard:
        raise ValueError("temperature: expected temperature > 0 (at 0 the plan does not move), got 0")
