"""What a teaser is: the part that was left out, tables of the results, and the answer in sentences."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

import regard
from regard import KL, FermiDirac, Transport, Tsallis

INF = math.inf
FAMILY = {
    "softmax": KL(),
    "1.5-entmax": Tsallis(1.5),
    "sparsemax": Tsallis(2.0),
    "3-entmax": Tsallis(3.0),
    "soft top-1": FermiDirac(),
}


@dataclass(frozen=True)
class Exhibit:
    """A table of results."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class Teaser:
    number: int
    question: str
    dropped: str  # the part of the problem, or of the arithmetic, that is left out
    exhibits: list[Exhibit]
    answer: list[str]


def gap(scores: Tensor, weights: Tensor, problem: Transport) -> float:
    """How far the weights are from the optimum of the problem, as the certificate measures it."""
    return float(regard.certify(scores, weights, problem).gap)


def exact(x: float, style: str = "f") -> str:
    """The number in three decimals (style "f") or two digits ("g"); "0" only if it is 0 up to rounding."""
    return "0" if abs(x) < 1e-9 else f"{x:.3f}" if style == "f" else f"{x:.2g}"
