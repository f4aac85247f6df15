"""Small float64 tensors, comparisons between them and their printed form, shared by the claims and the teasers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

EXACT = 1e-10  # for float64; wide enough that what is printed does not depend on the machine's last digits


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Standard normal numbers in float64, times `scale`; the same seed gives the same numbers."""
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- comparing --------------------------------------------------------------------------------------------------------


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest |b| where that exceeds 1; inf if a difference is not finite."""
    if not a.numel():
        raise ValueError("a: expected a tensor with elements, got none to compare")
    a, b = a.detach(), b.detach()
    far = float((a - b).abs().max())
    return far / max(1.0, float(b.abs().max())) if math.isfinite(far) else math.inf


def agree(a: Tensor, b: Tensor, tolerance: float = EXACT) -> bool:
    return distance(a, b) <= tolerance


def increasing(numbers: Iterable[float] | Tensor) -> bool:
    values = torch.as_tensor(numbers, dtype=torch.float64).flatten()
    return bool((values.diff() > 0).all())


def multiply_adds(compute: Callable[[], Any]) -> int:
    """The number of multiply-adds of a computation, counted by PyTorch."""
    with FlopCounterMode(display=False) as counter:
        compute()
    return counter.get_total_flops() // 2


# --- printing ---------------------------------------------------------------------------------------------------------


def show(numbers: Iterable[float] | Tensor, decimals: int = 3) -> str:
    """0.377, 0.076, ...; never -0.000."""
    values = numbers.flatten().tolist() if isinstance(numbers, Tensor) else list(numbers)
    shown = (f"{float(x):.{decimals}f}" if round(float(x), decimals) else f"{0:.{decimals}f}" for x in values)
    return typeset(", ".join(shown))


def how_close(a: Tensor, b: Tensor, tolerance: float = EXACT) -> str:
    """ "agree to 1e-10", or "differ by 0.3"."""
    far = distance(a, b)
    return f"agree to {tolerance:.0e}" if far <= tolerance else f"differ by {far:.2g}"


def tick(true: bool) -> str:
    return "✓" if true else "✗"


def certified(optimal: bool) -> str:
    return "certified optimal (gap below 1e-10)" if optimal else "not optimal"


def typeset(text: str) -> str:
    """The text with a true minus sign before numbers; the hyphens of 1e-10 and 1.5-entmax stay."""
    return re.sub(r"(?<![\w.)])-(?=\d)", "−", text)


def markdown_row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
