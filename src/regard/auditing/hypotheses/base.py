"""What hypotheses are made of: `Hypothesis`, a list that collects them, and changes of one part of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...priors import Prior
from ...problem import Rows, TemperatureRule
from ..calls import Call

Change = Callable[[Call], Call | None]


@dataclass(frozen=True)
class Hypothesis:
    """A mistake: the name of the finding, the diagnosis in one sentence, and the call that computes it."""

    name: str
    sentence: str
    change: Change


class Hypotheses(list[Hypothesis]):
    """The hypotheses of one file."""

    def add(self, name: str, sentence: str, *changes: Change) -> None:
        self.extend(Hypothesis(name, sentence, change) for change in changes)

    def __call__(self, name: str, sentence: str) -> Callable[[Change], Change]:
        """A decorator for a change."""

        def register(change: Change) -> Change:
            self.add(name, sentence, change)
            return change

        return register


def sink_of(call: Call) -> Tensor | None:
    rows = call.problem.marginal
    if not isinstance(rows, Rows) or rows.sink is None:
        return None
    return rows.sink if isinstance(rows.sink, Tensor) else call.query.new_full((call.query.shape[1],), rows.sink)


def temperature_of(call: Call) -> Tensor | float | None:
    tau = call.problem.temperature
    return None if isinstance(tau, TemperatureRule) else tau


def only_masks(mask: Tensor | None) -> bool:
    """Whether a mask only masks: bool, or float with 0 and numbers that mask."""
    if mask is None:
        return False
    return mask.dtype == torch.bool or bool(((mask == 0) | (mask < -1e4)).all())


def kept(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > -1e4


def with_prior(kind: type[Prior], change: Callable[[object, Call], Prior | bool | None]) -> Change:
    """A change of each factor of one type. False: the change does not apply; None removes the factor."""

    def changed(call: Call) -> Call | None:
        factors: list[Prior] = []
        found = False
        for factor in call.factors:
            new = change(factor, call) if isinstance(factor, kind) else factor
            if new is False:
                return None
            found = found or isinstance(factor, kind)
            if isinstance(new, Prior):
                factors.append(new)
        return call.with_factors(factors) if found else None

    return changed
