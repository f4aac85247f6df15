"""Rows and columns (`RowsAndColumns`): the keys' prices, found by passes of any backend over the one-sided problem.

With prices g of the keys the plan is p_ij = pi_ij exp((s_ij - f_i - g_j)/tau). Given gamma = g/tau, exp(-gamma) is one
more prior over the keys and the rows are attention's own. Given the queries' prices, the columns are the same problem
with queries and keys exchanged. So every step of the solver is a pass of the one-sided backends, and no Tq x Tk matrix
is ever stored.

    views        a two-sided problem as one-sided ones          ladder        falling temperatures
    marginals    what queries send and keys receive             anderson      Sinkhorn's iteration, accelerated
    stage        one pair of passes; the dual's Hessian         newton        where the iteration is too slow
    gradient     the implicit function theorem                  feasibility   proofs that there is no plan
    reduction    the solved problem as rows                     statistics    output and statistics from these rows
    certificate  plans in memory and their certificates
"""

from __future__ import annotations

import dataclasses
import warnings

import torch
from torch import Tensor

from ...backends import READOUT, choose
from ...form import Form
from ...statistics import COLUMN_STATISTICS
from ..base import DensePlan, Reduced, Solver
from .certificate import judge_plan, solve_scores
from .ladder import NEEDED
from .reduction import reduce_to_rows
from .statistics import attend
from .views import one_sided

__all__ = ["SinkhornSolver"]


class SinkhornSolver(Solver):
    """Each query sends a mass and each key receives one."""

    def rows(self, form: Form) -> Form:
        rows = one_sided(form)
        assert form.query is not None
        prices = form.query.new_zeros((1, 1, 1, 1), dtype=form.dtype)
        rows.log_priors = [*rows.log_priors, prices]
        return rows

    def required_outputs(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return (*(name for name in names if name not in COLUMN_STATISTICS), *NEEDED)

    def attend(self, backend: str, form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
        return attend(backend, form, names)

    def reduce(self, form: Form) -> Reduced:
        backend, _ = choose(one_sided(form), (READOUT,))
        with torch.no_grad():
            solved = reduce_to_rows(backend, form)
        return Reduced(solved.form, None if solved.row is None else solved.row.to(solved.form.dtype))

    def solve(self, form: Form, scores: Tensor) -> DensePlan:
        found = solve_scores(form, scores)
        return DensePlan(found.weights, found.dual, found.column_dual)

    def certify(self, form: Form, scores: Tensor, weights: Tensor) -> dict[str, Tensor]:
        # Any prices give a bound. The search has a small tolerance of its own, so that the bound is tight.
        assert form.columns is not None
        closely = form.columns._replace(iterations=None, tolerance=1e-10, strict=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            best = solve_scores(dataclasses.replace(form, columns=closely), scores)
        return judge_plan(best, weights)
