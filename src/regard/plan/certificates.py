"""Small problems solved in full, with a certificate: `solve` and `certify`."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .._compat import tree_map
from .._display import Displayed, html_table
from .._validate import describe
from ..lowering import lower_scores
from ..problem import Transport
from ..solvers import solver_for


@dataclass(frozen=True, eq=False, repr=False)
class Certificate:
    """Evidence in float64 that a plan is (or is not) the optimum. One number per row, [..., Tq].

    primal          the objective of the plan: <p, s> - tau D(p || pi), with D computed from f
    dual            an upper bound on the objective of any plan: the dual function at the solver's price lambda
    gap             dual - primal: how much better a plan could be, at most
    row_residual    how far the row is from its marginal (and from p >= 0, unless the regulariser is signed)
    stationarity    largest distance of a weight from the solver's own plan, pi g((s - lambda)/tau)
    column_residual how far each column is from its marginal, [..., Tk]: RowsAndColumns only

    What is proven: primal <= dual for every plan that meets its marginals, so no plan is better by more than the gap.
    The proof needs a convex f and any price. It relies neither on the solver nor, for an `FDivergence`, on its link and
    slope: f* is bounded from above with tangents of f. Where f* has no finite bound at this price, the dual is inf and
    the certificate does not hold. All arithmetic is float64, so the gap is exact to rounding.

    The rows of a plan with both marginals are one problem: there primal, dual and gap are one number per plan, [...].
    """

    primal: Tensor
    dual: Tensor
    gap: Tensor
    row_residual: Tensor
    stationarity: Tensor
    column_residual: Tensor | None = None

    def worst(self) -> dict[str, float]:
        """The largest absolute gap, residuals and stationarity over all rows (NaN counts as the largest)."""
        residuals = {"gap": self.gap, "row_residual": self.row_residual, "stationarity": self.stationarity}
        if self.column_residual is not None:
            residuals["column_residual"] = self.column_residual
        return {n: float(r.abs().max()) if r.numel() else 0.0 for n, r in residuals.items()}

    def holds(self, tolerance: float = 1e-5) -> bool:
        """Whether every row is optimal within the tolerance (the gap relative to the size of the optimum)."""
        scale = 1 + self.dual.abs().nan_to_num(posinf=0.0)
        good = [self.gap.abs() <= tolerance * scale, self.row_residual <= tolerance, self.stationarity <= tolerance]
        if self.column_residual is not None:
            good.append(self.column_residual <= tolerance)
        return all(bool(part.all()) for part in good)

    def __str__(self) -> str:
        width = 13 if self.column_residual is None else 15
        return "\n".join([self._title(), *(f"  {name:<{width}} {text}" for name, text in self._numbers())])

    def __repr__(self) -> str:
        shown = [f"{name}={value:.3g}" for name, value in self.worst().items()]
        return f"Certificate(rows={list(self.row_residual.shape)}, {', '.join(shown)})"

    def _repr_html_(self) -> str:
        return html_table(self._title(), self._numbers())

    def _title(self) -> str:
        n = self.row_residual.numel()
        return f"Certificate of {n} row{'s' if n != 1 else ''} (worst row)"

    def _numbers(self) -> list[tuple[str, str]]:
        """Each field in one number, or as a range."""
        found, worst = [], self.worst()
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in worst:
                found.append((f.name, f"{worst[f.name]:.3e}"))
            elif value is not None and value.numel() == 1:
                found.append((f.name, f"{float(value):.9g}"))
            elif value is not None and value.numel():
                found.append((f.name, f"{float(value.min()):.9g} to {float(value.max()):.9g}"))
        return found


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Displayed):
    """A solved problem: `weights` [..., Tk] or [..., Tq, Tk] and one dual variable per row, both differentiable.

    With both marginals `column_dual` [..., Tk] has the keys' prices (each document's mean 0, unless relaxed)."""

    weights: Tensor
    dual: Tensor
    scores: Tensor
    problem: Transport
    column_dual: Tensor | None = None

    def certificate(self) -> Certificate:
        """Evidence that the plan is optimal."""
        return certify(self.scores, self.weights, self.problem)


def solve(scores: Tensor, problem: Transport | None = None) -> Plan:
    """The optimal plan for scores [..., Tk] or [..., H, Tq, Tk], with its dual. Differentiable; stores the plan."""
    problem = Transport() if problem is None else problem
    form, folded = lower_scores(scores, problem)
    found = solver_for(form).solve(form, folded)
    return Plan(
        weights=found.weights.reshape(scores.shape).to(scores.dtype),
        dual=found.dual.reshape(scores.shape[:-1]),
        scores=scores,
        problem=problem,
        column_dual=None if found.column_dual is None else found.column_dual.reshape(_per_key(scores)),
    )


def certify(scores: Tensor, weights: Tensor, problem: Transport | None = None) -> Certificate:
    """The certificate of any weights for these scores, with the dual that the solver finds in float64."""
    problem = Transport() if problem is None else problem
    if not isinstance(scores, Tensor) or not isinstance(weights, Tensor) or weights.shape != scores.shape:
        raise ValueError(
            f"weights: expected a tensor of the scores' shape, got {describe(weights)} for {describe(scores)}"
        )
    with torch.no_grad():
        # On the CPU, because other devices may have no float64.
        on_cpu = tree_map(lambda t: t.detach().cpu(), problem)
        form, folded = lower_scores(scores.detach().cpu(), on_cpu, torch.float64)
        p = weights.detach().cpu().reshape(folded.shape).double()
        found = solver_for(form).certify(form, folded, p)
        by_rank = {3: scores.shape[:-1], 2: scores.shape[:-2]}  # [B, H, Tq] and [B, H]
        shapes = {name: by_rank[part.dim()] for name, part in found.items()} | {"column_residual": _per_key(scores)}
        return Certificate(**{name: part.reshape(shapes[name]) for name, part in found.items()})


def _per_key(scores: Tensor) -> tuple[int, ...]:
    return (*scores.shape[:-2], scores.shape[-1])
