"""The contract of a solver. `solver_for(form)` in __init__.py is the only place that chooses a solver.

A solver finds the plan of a lowered problem with passes of a backend over its rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from ..backends import choose
from ..form import Form
from ..statistics import undefined


class Reduced(NamedTuple):
    """A solved problem as one-sided rows: its plan is that of `form`, each row multiplied by `row`."""

    form: Form
    row: Tensor | None = None  # [B, H, Tq]; None: every row by 1


class DensePlan(NamedTuple):
    """A plan in memory, with its prices."""

    weights: Tensor  # [B, H, Tq, Tk]
    dual: Tensor  # [B, H, Tq]
    column_dual: Tensor | None = None  # [B, H, Tk]


class Solver(ABC):
    """How one kind of problem is solved."""

    def rows(self, form: Form) -> Form:
        """The kind of one-sided problem that a backend must serve."""
        return form

    def required_outputs(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The outputs that a backend must have, so that the solver can compute `names`."""
        return names

    def choose(self, form: Form, names: tuple[str, ...], backend: str = "auto") -> tuple[str, dict[str, str]]:
        """The backend for these outputs, and why each backend before it was not chosen."""
        for name in names:
            if name != "out" and (reason := undefined(name, form)) is not None:
                raise ValueError(f"return_aux: {reason}")
        return choose(self.rows(form), self.required_outputs(names), backend)

    @abstractmethod
    def attend(self, backend: str, form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Output and statistics; `out`, `lse` and `entropy` are differentiable."""

    @abstractmethod
    def reduce(self, form: Form) -> Reduced:
        """The problem as rows at fixed prices and temperatures, outside of autograd."""

    @abstractmethod
    def solve(self, form: Form, scores: Tensor) -> DensePlan:
        """The plan of scores [B, H, Tq, Tk], differentiable."""

    @abstractmethod
    def certify(self, form: Form, scores: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Evidence that weights [B, H, Tq, Tk] are (or are not) the plan of these scores: the fields of `Certificate`,
        one number per row [B, H, Tq] (of plans with both marginals one per head [B, H], or per key [B, H, Tk])."""
