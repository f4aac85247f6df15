"""Solvers: which passes of a backend solve which kind of problem."""

from __future__ import annotations

from ..form import Form
from .base import Solver
from .budget import BudgetSolver
from .rows import RowSolver
from .sinkhorn import SinkhornSolver

__all__ = ["Solver", "solver_for"]

_ROWS, _BUDGET, _COLUMNS = RowSolver(), BudgetSolver(), SinkhornSolver()


def solver_for(form: Form) -> Solver:
    """The solver of a lowered problem."""
    if form.marginal == "columns":
        return _COLUMNS
    return _ROWS if form.matched is None else _BUDGET
