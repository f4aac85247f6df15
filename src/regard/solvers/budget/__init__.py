"""Temperatures that meet a budget (`MatchKL`, `MatchEntropy`): one number per row, found in a few passes over the keys.

With beta = 1/tau the divergence of a KL row from its prior rises from 0 to that of the hard plan, and

    d KL(p || pi) / d ln beta = Var_p(y),    y = s/tau.

One pass of any backend computes both KL and Var for all rows. So Newton's method inside a bracket (search.py) finds
beta without storing the plan. An entropy h over n equal keys is the budget log n - h. The gradient is that of the
implicit function: where KL(tau, theta) = c, d tau = (tau / Var_p(y)) (d_theta KL - dc).

    search    Newton for all rows                   passes     its passes over queries and keys, and the gradient
    scores    the same for scores in memory         gradient   the search as a differentiable function
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import autograd
from ..._compat import transforms_active
from ..._validate import concrete
from ...backends import BACKENDS, READOUT, choose
from ...backends.row_equation import solve_rows
from ...form import Form
from ...statistics import DIFFERENTIABLE
from ..base import DensePlan, Reduced
from ..rows import RowSolver
from .gradient import match
from .passes import MEASURED, rows_of
from .scores import match_scores
from .search import span_of

__all__ = ["BudgetSolver"]


class BudgetSolver(RowSolver):
    """Rows whose temperatures are found from a budget."""

    def required_outputs(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return (*names, *MEASURED)

    def attend(self, backend: str, form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
        form, hard = match(backend, form)
        if form.weighted and BACKENDS[backend].rounds_cold_priors and form.dtype != torch.float64:
            results = _attend(backend, form.widened(), hard, names)
            return {name: result.to(form.dtype) for name, result in results.items()}
        return _attend(backend, form, hard, names)

    def reduce(self, form: Form) -> Reduced:
        backend, _ = choose(form, (READOUT,))
        with torch.no_grad():
            return Reduced(match(backend, form)[0])

    def solve(self, form: Form, scores: Tensor) -> DensePlan:
        form, hard = match_scores(form, scores)
        rows = solve_rows(form, scores, order=2)
        weights, dual = (torch.where(hard, t.detach(), t) for t in (rows.weights, rows.dual))  # hard rows are constant
        return DensePlan(weights[..., : scores.shape[-1]], dual.squeeze(-1))

    def certify(self, form: Form, scores: Tensor, weights: Tensor) -> dict[str, Tensor]:
        return super().certify(match_scores(form, scores)[0], scores, weights)


def _attend(backend: str, form: Form, hard: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    results = autograd.run(backend, form, names)
    recording = torch.is_grad_enabled() and any(result.requires_grad for result in results.values())
    if not recording and not transforms_active():
        return results
    # The plan of a hard row is constant, but rounding divided by a temperature near 0 would look like a gradient. So
    # the gradient of these rows is dropped. A second pass over them gives the gradient of the values.
    rows = slice(0, form.shape[2])
    if concrete(hard):
        found = span_of(hard.squeeze(-1))
        if found is None:
            return results
        rows = found if form.dropout_key is None else rows
    for name in DIFFERENTIABLE:
        if name in results and name != "out":
            results[name] = torch.where(hard.squeeze(-1), results[name].detach(), results[name])
    if "out" in results:
        frozen = form.with_tensors({n: t.detach() for n, t in form.tensors().items() if n != "value"})
        still = autograd.run(backend, rows_of(frozen, rows), ("out",))["out"]
        out = results["out"]
        pieces = [
            out[:, :, : rows.start],
            torch.where(hard[:, :, rows], still, out[:, :, rows]),
            out[:, :, rows.stop :],
        ]
        results["out"] = torch.cat(pieces, 2)
    return results
