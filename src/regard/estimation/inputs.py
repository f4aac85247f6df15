"""Arguments that `estimate` and `evidence` share, and their checks."""

from __future__ import annotations

from .._validate import describe, number
from ..arguments import PlanOptions
from ..problem import Transport


class EstimationOptions(PlanOptions, total=False):
    """The options of `attention` without dropout, which would change the statistics."""

    backend: str


def as_transport(problem: Transport | None) -> Transport:
    """The problem, or softmax for None."""
    if problem is None:
        return Transport()
    if not isinstance(problem, Transport):
        raise TypeError(f"problem: expected a Transport, got {describe(problem)}")
    return problem


def check_level(level: float) -> float:
    return number("level", level, "a probability strictly between 0 and 1", lambda x: 0 < x < 1)
