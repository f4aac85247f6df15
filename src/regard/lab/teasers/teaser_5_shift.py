"""Brain teaser 5: softmax without the shift by the row maximum.

The document lists this teaser in its contents, but does not contain it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import regard

from ..numbers import show, tensor
from ..variants import naive_softmax
from .teaser import Exhibit, Teaser

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
MANY = 4096


def last_good(good: Callable[[Tensor], bool], dtype: torch.dtype, start: float, end: float) -> float:
    """The last number of this dtype, from start towards end, for which `good` is true; found by bisection."""
    inside, outside = (torch.tensor(x, dtype=dtype).item() for x in (start, end))
    if not good(torch.tensor(inside, dtype=dtype)) or good(torch.tensor(outside, dtype=dtype)):
        raise ValueError(f"start, end: expected the property at {start} and not at {end}")
    while True:
        middle = torch.tensor((inside + outside) / 2, dtype=dtype).item()
        if middle in (inside, outside):
            return inside
        if good(torch.tensor(middle, dtype=dtype)):
            inside = middle
        else:
            outside = middle


@dataclass(frozen=True)
class Limits:
    """The scores between which the formula without the shift works in a dtype."""

    single: float  # largest score whose exp is finite; above it a row of one key is inf/inf = NaN
    sum: float  # largest common score of MANY keys whose sum is finite; above it the weights are 0 instead of 1/n
    floor: float  # smallest common score whose exp is not 0; below it a row is 0/0 = NaN
    gap: float  # with the shift: the lowest score, relative to the best key, whose weight is not 0


def limits(dtype: torch.dtype) -> Limits:
    def weight(below: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(below), below]).softmax(-1)[1]

    return Limits(
        last_good(lambda x: bool(naive_softmax(x[None]).isfinite().all()), dtype, 0.0, 2000.0),
        last_good(lambda x: bool(x.expand(MANY).exp().sum().isfinite()), dtype, 0.0, 2000.0),
        last_good(lambda x: bool(naive_softmax(x[None]).isfinite().all()), dtype, 0.0, -2000.0),
        last_good(lambda x: bool(weight(x) > 0), dtype, 0.0, -2000.0),
    )


def removed_shift() -> Teaser:
    rows, after = [], []
    for name, dtype in DTYPES.items():
        found = limits(dtype)
        rows.append((name, *(show([x], 1) for x in (found.single, found.sum, found.floor, found.gap))))
        high = 2 * found.single
        s = torch.tensor([high, high - 1], dtype=dtype)
        q, k, v = s[None, None, None], torch.eye(2, dtype=dtype)[None, None], torch.eye(2, dtype=dtype)[None, None]
        ours = regard.attention(q, k, v, scale=1.0)[0, 0, 0]
        between = torch.full((MANY,), (found.single + found.sum) / 2, dtype=dtype)
        after.append(
            (
                name,
                f"({show(s.double(), 1)})",
                show(naive_softmax(s).double(), 2),
                show(ours.double(), 2),
                f"{float(naive_softmax(between).double().sum()):.0f}",
                f"{float(regard.solve(between).weights.double().sum()):.0f}",
            )
        )
    exact = naive_softmax(tensor(1, 0))
    return Teaser(
        5,
        "What if we remove the shifting trick?",
        "No part of the problem: p = exp(s − λ), and the shift subtracts a part of λ before exp instead of dividing "
        "after it. Dropped is the guarantee that exp(s) is representable.",
        [
            Exhibit(
                f"Where exp(s)/Σexp(s) breaks, found by bisection (n = {MANY} for the sum; last column: with the "
                "shift)",
                ("dtype", "NaN above", "sum is inf above", "NaN below", "shifted: weight 0 below"),
                rows,
            ),
            Exhibit(
                f"Beyond these limits, without and with the shift; on the right the mass of {MANY} equal keys above "
                "the second limit",
                ("dtype", "scores", "no shift", "regard", "mass, no shift", "mass, regard"),
                after,
            ),
        ],
        [
            (
                f"Exactly, scores (x, x − 1) have weights {show(exact, 2)} for every x: softmax is unchanged by a "
                "shift, so the shift costs nothing. (s/Σs is not, and cannot be shifted: teaser 1.)"
            ),
            (
                "Above the first limit one key suffices for ∞/∞ = NaN. Above the second, lower limit there is no NaN, "
                "which is worse: Σ is inf, all weights are 0 and the row silently loses its mass. Below the third, Σ = "
                "0 and 0/0 = NaN."
            ),
            (
                "With the shift the best key has exp(0) = 1, so 1 ≤ Σ ≤ n: neither limit can be reached. Only weights "
                "that are too small for the dtype underflow to 0 (last column)."
            ),
        ],
    )
