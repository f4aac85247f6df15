"""What a claim is, and how its check becomes a verdict.

A claim is a sentence or a printed number, its place in a document, and a check that computes what is true. Verdicts are
not stored: each one follows from comparing the document with the computed result. A printed number is compared at the
precision with which it is printed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from ..numbers import show, typeset

HOLDS = "holds"
CORRECTED = "holds with correction"
FAILS = "fails"
UNTESTABLE = "not testable"
VERDICTS = (HOLDS, CORRECTED, FAILS, UNTESTABLE)

NEEDS_TRAINING = "It carries no source, and only training can tell: a hypothesis that needs an experiment."


class CheckResult(NamedTuple):
    """What a check computed, in words, and the verdict that follows."""

    computed: str
    verdict: str


Check = Callable[[tuple[str, ...]], CheckResult]  # takes the printed numbers of the claim, if it has any


@dataclass(frozen=True)
class Claim:
    """One sentence or printed number of a document. A claim without a check cannot be tested; `reason` states why."""

    source: str  # the document's number
    section: str
    text: str  # a short quotation; {} stands for the printed numbers
    printed: tuple[str, ...] = ()
    check: Check | None = None
    reason: str = ""
    name: str = ""

    @property
    def says(self) -> str:
        """The quotation with its printed numbers."""
        return typeset(self.text.format(", ".join(self.printed)))

    def judge(self) -> CheckResult:
        return CheckResult(self.reason, UNTESTABLE) if self.check is None else self.check(self.printed)


# --- stating claims ---------------------------------------------------------------------------------------------------


def says(source: str, section: str, text: str) -> Callable[[Callable[[], CheckResult]], Claim]:
    """Decorator: a sentence. The decorated function computes whether it is true."""
    return lambda check: Claim(source, section, text, check=lambda _: check())


def prints(source: str, section: str, text: str, printed: str) -> Callable[[Callable[[], Tensor]], Claim]:
    """Decorator: printed numbers. The decorated function computes the true numbers."""

    def claim(compute: Callable[[], Tensor]) -> Claim:
        def check(numbers: tuple[str, ...]) -> CheckResult:
            true = compute().tolist()
            digits = max(map(_decimals, numbers)) + 1
            percent = all(number.endswith("%") for number in numbers)
            shown = [f"{x:.{digits}%}" for x in true] if percent else [show(true, digits)]
            return judged(", ".join(shown), all_match(numbers, true))

        return Claim(source, section, text, tuple(printed.split()), check)

    return claim


def prints_and_says(source: str, section: str, text: str, printed: str) -> Callable[[Check], Claim]:
    """Decorator: printed numbers whose check is more than one comparison. The decorated function receives them."""
    return lambda check: Claim(source, section, text, tuple(printed.split()), check)


def untestable(source: str, section: str, text: str, reason: str) -> Claim:
    """A claim that no computation can decide, with the reason."""
    return Claim(source, section, text, reason=reason)


def collect(namespace: Mapping[str, Any]) -> list[Claim]:
    """The claims of a module in the order of the file, each named after its variable."""
    return [replace(value, name=name) for name, value in namespace.items() if isinstance(value, Claim)]


# --- from numbers to verdicts -----------------------------------------------------------------------------------------


def judged(computed: str, as_said: bool, repaired: bool = False) -> CheckResult:
    """Holds as stated; holds with the correction that `computed` names; or fails."""
    return CheckResult(typeset(computed), HOLDS if as_said else CORRECTED if repaired else FAILS)


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
