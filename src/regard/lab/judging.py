"""From paired runs to a verdict: measured, not significant, or refuted.

An effect is one number per seed, from two runs that differ only in the setting. Its interval is Student's t over the
seeds. A claim states the range in which the effect lies:

    refuted          the interval and the claimed range have no point in common
    measured         the mean is in the range, and the interval excludes "no effect"
    not significant  otherwise: the interval contains "no effect", or it leaves the size of the effect open

A claim that two settings are equal within a range is measured only if the whole interval is inside (`equivalent`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..estimation import student_quantile

MEASURED, NOT_SIGNIFICANT, REFUTED = "measured", "not significant", "refuted"
VERDICTS = (MEASURED, NOT_SIGNIFICANT, REFUTED)
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % confidence interval."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return self.words()

    def words(self, unit: str = "") -> str:
        """2.1 % [1.9, 2.3], 3 seeds"""
        if self.n < 2:
            return f"{self.mean:.3g}{unit} (one seed)"
        return f"{self.mean:.3g}{unit} [{self.low:.3g}, {self.high:.3g}], {self.n} seeds"

    def brief(self, digits: int = 3) -> str:
        """2.24 ± 0.01: the mean and half of the interval (of an asymmetric one the larger half)."""
        if not math.isfinite(self.mean):
            return "not finite"
        half = max(self.high - self.mean, self.mean - self.low)
        return f"{self.mean:.{digits}f}" if self.n < 2 else f"{self.mean:.{digits}f} ± {half:.{digits}f}"

    def scaled(self, factor: float) -> Interval:
        return Interval(factor * self.mean, factor * self.low, factor * self.high, self.n)


def interval(numbers: Sequence[float], level: float = LEVEL) -> Interval:
    """The mean and Student's t interval; the interval of one number is the whole line."""
    n = len(numbers)
    if n == 0:
        raise ValueError("numbers: expected at least one, got none")
    mean = sum(numbers) / n
    if n > 1 and len(set(numbers)) == 1:
        return Interval(mean, mean, mean, n)  # also if all are infinite, because every run diverged
    if n == 1 or not math.isfinite(mean):
        return Interval(mean, -math.inf, math.inf, n)
    variance = math.fsum((x - mean) ** 2 for x in numbers) / (n - 1)
    t = float(student_quantile(level, torch.tensor([n - 1.0], dtype=torch.float64)))
    half = t * math.sqrt(variance / n)
    return Interval(mean, mean - half, mean + half, n)


def differences(a: Sequence[float], b: Sequence[float]) -> Interval:
    """a − b, seed by seed."""
    return interval([x - y for x, y in _pairs(a, b)])


def ratios(a: Sequence[float], b: Sequence[float]) -> Interval:
    """a / b, seed by seed; averaged and bounded as logarithms, so that a/b and b/a agree. Each is in [0, inf]."""
    logs = interval([_log(x) - _log(y) for x, y in _pairs(a, b)])
    return Interval(_exp(logs.mean), _exp(logs.low), _exp(logs.high), logs.n)


def _log(x: float) -> float:
    return -math.inf if x == 0 else math.log(x)


def _exp(x: float) -> float:
    return math.inf if x > 709 else math.exp(x)


def _pairs(a: Sequence[float], b: Sequence[float]) -> list[tuple[float, float]]:
    if len(a) != len(b):
        raise ValueError(f"a, b: expected one number per seed in each, got {len(a)} and {len(b)}")
    return list(zip(a, b, strict=True))


def verdict(effect: Interval, claimed: tuple[float, float], null: float = 0.0) -> str:
    """The verdict on a claim that an effect lies in `claimed`; `null` is the value of no effect."""
    if math.isnan(effect.mean):
        return NOT_SIGNIFICANT
    if _disjoint(effect, claimed):
        return REFUTED
    return MEASURED if _differs(effect, null) and claimed[0] <= effect.mean <= claimed[1] else NOT_SIGNIFICANT


def equivalent(effect: Interval, claimed: tuple[float, float]) -> str:
    """The verdict on a claim that an effect is not outside `claimed`: the whole interval must be inside."""
    if math.isnan(effect.mean):
        return NOT_SIGNIFICANT
    if _disjoint(effect, claimed):
        return REFUTED
    return MEASURED if claimed[0] <= effect.low and effect.high <= claimed[1] else NOT_SIGNIFICANT


def _disjoint(effect: Interval, claimed: tuple[float, float]) -> bool:
    low, high = claimed
    if low > high:
        raise ValueError(f"claimed: expected (low, high), got {claimed}")
    return effect.high < low or effect.low > high


def _differs(effect: Interval, null: float) -> bool:
    return not effect.low <= null <= effect.high


@dataclass(frozen=True)
class Judged:
    """A claim, the measured effect, and the verdict."""

    claim: str
    source: str
    effect: str  # in words, with the spread
    verdict: str
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge_effect(
    claim: str,
    source: str,
    what: str,
    effect: Interval,
    claimed: tuple[float, float],
    *,
    null: float = 0.0,
    same: bool = False,
    percent: bool = False,
    note: str = "",
) -> Judged:
    """Judge a claim that an effect lies in the range `claimed`; the effect is given in words too (`percent`: in %).

    With `same` the claim is that there is no effect outside the range (`equivalent`), and `null` is not used.
    """
    shown = effect.scaled(100).words(" %") if percent else effect.words()
    found = equivalent(effect, claimed) if same else verdict(effect, claimed, null)
    if found == NOT_SIGNIFICANT and not same and not math.isnan(effect.mean) and _differs(effect, null):
        note = f"{note} An effect, but its size is not settled.".strip()
    return Judged(claim, source, f"{what}: {shown}", found, note)


def withhold(judged: Judged, why: str) -> Judged:
    """The claim without a verdict, because its precondition was not met."""
    return replace(judged, verdict=NOT_SIGNIFICANT, note=why)


def decide(claim: str, source: str, effect: str, holds: bool, note: str = "") -> Judged:
    """Judge a claim that allows no exception: one counterexample decides, without statistics."""
    return Judged(claim, source, effect, MEASURED if holds else REFUTED, note)
