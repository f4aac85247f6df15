"""Numbers as JSON and as text."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def json_number(value: float | Tensor, digits: int = 5) -> float | None:
    """A number with this many significant digits; None for NaN and infinities, which JSON does not have."""
    value = float(value)
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def json_numbers(tensor: Tensor) -> list[Any]:
    return [json_number(value) for value in tensor.tolist()]


def short(value: float) -> str:
    """Three significant digits, for messages."""
    return f"{value:.3g}"


def in_units(n: int) -> str:
    """A count with three digits and its unit: 735K, 22.6M, 1.24B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if n >= 0.9995 * size:
            return f"{float(f'{n / size:.3g}'):g}{unit}"
    return str(n)


def count_of(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
