"""A lower bound on the entropy, as a loss term that stabilizes attention in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._validate import describe, finite, not_negative, number


def entropy_floor(
    entropy: Tensor,
    floor: float,
    *,
    keys: Tensor | None = None,
    relative: bool = False,
    rows: Tensor | None = None,
    power: float = 1.0,
) -> Tensor:
    """A loss term: the mean amount by which the rows' entropies are below the floor; 0 if none is.

    `entropy`: the differentiable aux statistic, [..., H, Tq]. `floor`: in nats. `keys`: the number of keys that each
    row may read (aux `support` of a softmax). With it, a floor above log(keys) is lowered to log(keys), and with
    `relative` the floor is a share of log(keys). A row with one key always has entropy 0, so with `keys` it does not
    count. Rows where `rows` (bool) is False, such as padding, do not count either. `power=2` squares the shortfall, so
    that the gradient is small near the floor.

    The gradient of the entropy vanishes at a one-hot row. So the floor prevents collapse, but it does not undo it.
    """
    if not isinstance(entropy, Tensor) or not entropy.is_floating_point():
        raise TypeError(f"entropy: expected a floating-point tensor, got {describe(entropy)}")
    floor = number("floor", floor, "a number >= 0", not_negative)
    power = number("power", power, "a number >= 1", lambda p: finite(p) and p >= 1)
    if relative and keys is None:
        raise ValueError("keys: expected a tensor with relative=True, got None")
    if relative and floor > 1:
        raise ValueError(f"floor: expected a share of at most 1, got {floor:g}")
    counted = torch.ones((), dtype=torch.bool, device=entropy.device) if rows is None else rows
    if counted.dtype != torch.bool:
        raise TypeError(f"rows: expected a bool tensor, got {describe(rows)}")
    target: Any = floor
    if keys is not None:
        most = keys.clamp(min=1).to(entropy.dtype).log()
        target = floor * most if relative else most.clamp(max=floor)
        counted = counted & (keys > 1)
    counted = counted.expand_as(entropy)
    # `where` comes before pow, so that a NaN in a row that is left out does not reach the gradient
    missing = torch.where(counted, target - entropy, 0.0).relu()
    missing = missing if power == 1 else missing**power
    return missing.sum() / counted.sum().clamp(min=1)
