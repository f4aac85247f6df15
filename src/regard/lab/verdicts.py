"""What a claim is, and how a computation becomes a verdict on it.

A claim is a sentence or a printed number, where it stands, and a check that computes it anew. A verdict is never
written down: it follows from comparing what the document says with what came out. Printed numbers are compared at the
precision they are printed with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

HOLDS = "holds"
CORRECTED = "holds with correction"
FAILS = "fails"
UNTESTABLE = "not testable"
VERDICTS = (HOLDS, CORRECTED, FAILS, UNTESTABLE)


class Finding(NamedTuple):
    """What was computed, in words, and what follows for the claim."""

    computed: str
    verdict: str


Check = Callable[[tuple[str, ...]], Finding]  # takes the printed numbers, if the claim has any


@dataclass(frozen=True)
class Claim:
    """One sentence or printed number of a document. Without a check it cannot be tested, and `reason` says why."""

    source: str  # the document's number
    section: str
    text: str  # a short quotation; {} stands for the printed numbers
    printed: tuple[str, ...] = ()
    check: Check | None = None
    reason: str = ""
    name: str = ""

    @property
    def says(self) -> str:
        return typeset(self.text.format(", ".join(self.printed)))

    def judge(self) -> Finding:
        return Finding(self.reason, UNTESTABLE) if self.check is None else self.check(self.printed)


# --- stating claims ---------------------------------------------------------------------------------------------------


def says(source: str, section: str, text: str) -> Callable[[Callable[[], Finding]], Claim]:
    """A sentence; the function below it finds out whether it is true."""
    return lambda check: Claim(source, section, text, check=lambda _: check())


def prints(source: str, section: str, text: str, printed: str) -> Callable[[Callable[[], Tensor]], Claim]:
    """Printed numbers; the function below computes what they should be."""

    def claim(compute: Callable[[], Tensor]) -> Claim:
        def check(numbers: tuple[str, ...]) -> Finding:
            true = compute().tolist()
            digits = max(map(_decimals, numbers)) + 1
            percent = all(number.endswith("%") for number in numbers)
            shown = [f"{x:.{digits}%}" for x in true] if percent else [show(true, digits)]
            return judged(", ".join(shown), all_match(numbers, true))

        return Claim(source, section, text, tuple(printed.split()), check)

    return claim


def prints_and_says(source: str, section: str, text: str, printed: str) -> Callable[[Check], Claim]:
    """Printed numbers whose check is more than one comparison: the function below gets them."""
    return lambda check: Claim(source, section, text, tuple(printed.split()), check)


def untestable(source: str, section: str, text: str, reason: str) -> Claim:
    return Claim(source, section, text, reason=reason)


def collect(namespace: Mapping[str, Any]) -> list[Claim]:
    """A module's claims in the order they are written, each named by its variable."""
    return [replace(value, name=name) for name, value in namespace.items() if isinstance(value, Claim)]


# --- from numbers to verdicts -----------------------------------------------------------------------------------------


def judged(computed: str, as_said: bool, repaired: bool = False) -> Finding:
    """Holds as it was said; or only after the repair that `computed` names; or fails."""
    return Finding(typeset(computed), HOLDS if as_said else CORRECTED if repaired else FAILS)


_NUMBER = re.compile(r"~?(-?\d+(?:\.(\d+))?)(k|%)?")


def _parse(printed: str) -> re.Match:
    found = _NUMBER.fullmatch(printed)
    if found is None:
        raise ValueError(f"printed: expected a number such as 0.28, ~1.0, 22k or -100%, got {printed!r}")
    return found


def _decimals(printed: str) -> int:
    return len(_parse(printed)[2] or "")


def matches(printed: str, true: float) -> bool:
    """Whether the true number, rounded to the printed precision, is the printed one ("22k" is printed to thousands)."""
    number, _, unit = _parse(printed).groups()
    scale = {"k": 1000.0, "%": 0.01, None: 1.0}[unit]
    half = 0.5 * 10.0 ** -_decimals(printed)
    return abs(true / scale - float(number)) <= half * (1 + 1e-9)


def all_match(printed: Sequence[str], true: Sequence[float]) -> bool:
    if len(printed) != len(true):
        raise ValueError(f"printed: expected {len(true)} numbers, got {len(printed)}")
    return all(map(matches, printed, true))


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the size of b where that exceeds 1; what is not finite is infinitely far."""
    if not a.numel():
        raise ValueError("a: expected a tensor with elements, got none to compare")
    a, b = a.detach(), b.detach()
    far = float((a - b).abs().max())
    return far / max(1.0, float(b.abs().max())) if math.isfinite(far) else math.inf


EXACT = 1e-10  # float64, with room for other machines' last digits: what is shown must not depend on them


def agree(a: Tensor, b: Tensor, tolerance: float = EXACT) -> bool:
    return distance(a, b) <= tolerance


def how_close(a: Tensor, b: Tensor, tolerance: float = EXACT) -> str:
    far = distance(a, b)
    return f"agree to {tolerance:.0e}" if far <= tolerance else f"differ by {far:.2g}"


def typeset(text: str) -> str:
    """A minus before a number as the sign it is (1e-10 and 1.5-entmax stay)."""
    return re.sub(r"(?<![\w.)])-(?=\d)", "−", text)


def tick(true: bool) -> str:
    return "✓" if true else "✗"


def certified(optimal: bool) -> str:
    return "certified optimal (gap below 1e-10)" if optimal else "not optimal"


def show(numbers: Iterable[float] | Tensor, decimals: int = 3) -> str:
    """0.377, 0.076, ...; never -0.000."""
    values = numbers.flatten().tolist() if isinstance(numbers, Tensor) else list(numbers)
    shown = (f"{float(x):.{decimals}f}" if round(float(x), decimals) else f"{0:.{decimals}f}" for x in values)
    return typeset(", ".join(shown))


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Standard normal numbers in float64, the same every time."""
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def increasing(numbers: Iterable[float] | Tensor) -> bool:
    values = torch.as_tensor(numbers, dtype=torch.float64).flatten()
    return bool((values.diff() > 0).all())


def multiply_adds(compute: Callable[[], Any]) -> int:
    """How many a computation does, counted by torch."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        compute()
    return counter.get_total_flops() // 2
