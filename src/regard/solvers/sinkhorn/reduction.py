"""Reduce a problem with both marginals to its rows: the keys' prices become one more prior."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import autograd
from ..._compat import forward_mode, transforms_active
from ...form import ColumnSettings, Form
from .gradient import PricesFunction
from .ladder import Prices, solve
from .marginals import Marginals
from .views import one_sided, plan_only, transposed


@dataclass
class ReducedToRows:
    """A problem reduced to its rows: the plan is that of the one-sided `form`, with each row multiplied by `row`."""

    form: Form
    row: Tensor | None  # [B, H, Tq] where it is not form.mass
    marginals: Marginals
    gamma: Tensor  # [B, H, Tk]; the mean over each document is 0, unless the columns are relaxed
    iterations: Tensor  # [B, H]


def reduce_to_rows(backend: str, form: Form) -> ReducedToRows:
    """Find the keys' prices (differentiable) and put them into the prior of a one-sided problem."""
    if transforms_active() or forward_mode():
        raise NotImplementedError(
            "RowsAndColumns has no torch.func transforms and no forward mode: use reverse mode (backward)"
        )
    settings, wide = form.columns, False
    assert settings is not None
    marginals = Marginals.of(backend, form)
    if settings.iterations is None:
        with torch.no_grad():
            found = solve(backend, form, marginals, settings)
            if marginals.balanced:
                exact = marginals.detached()
                found.gamma = exact.centred(found.gamma, exact.column)
        _report(found, settings)
        wide, iterations = found.wide, found.iterations
        narrow = plan_only(form)
        slots = {
            n: t
            for n, t in narrow.tensors().items()
            if n not in ("value", "row_mass", "column_mass", "marginal_parameter")
        }
        gamma: Tensor = PricesFunction.apply(  # type: ignore[assignment]
            narrow.without_tensors(), tuple(slots), backend, (settings.max_iterations, settings.tolerance), found,
            marginals.detached(), marginals.row, marginals.column, marginals.kappa, *slots.values(),
        )  # fmt: skip
        if marginals.balanced:  # the values stay, the derivative is that of the centred prices
            gamma = marginals.centred(gamma, marginals.column)
    else:
        gamma = _unrolled(backend, form, marginals, settings.iterations)
        iterations = torch.full(form.shape[:2], settings.iterations, device=gamma.device)
    rows = one_sided(form.widened() if wide else form, gamma, marginals.live)
    return ReducedToRows(rows, marginals.row if form.row_mass is not None else None, marginals, gamma, iterations)


def _report(found: Prices, settings: ColumnSettings) -> None:
    """Warn if columns were not met, or raise if the problem is `strict`."""
    off = found.share
    missed = ~(off <= settings.tolerance)  # NaN counts as missed
    if not bool(missed.any()):
        return
    where, worst = int(missed.sum()), float(off.max())
    amount = f"{worst:.2e} of the mass is" if worst < math.inf else "more of the mass than float64 can resolve may be"
    text = (
        f"RowsAndColumns: after {int(found.iterations.max())} iterations {amount} in a wrong column (tolerance "
        f"{settings.tolerance:.0e}) in {where} of {off.numel()} heads: {_reason(found, missed)}"
    )
    if settings.strict:
        raise RuntimeError(text)
    warnings.warn(text, stacklevel=2)


def _reason(found: Prices, missed: Tensor) -> str:
    """Why heads [B, H] missed their columns."""
    if bool(found.share.isnan().any()):
        return "scores, prior or marginals contain NaN or inf"
    others = missed & ~found.impossible
    reason = "the temperature is small, or masks and marginals leave no plan that meets them"
    if bool((others & found.stuck).any()):
        reason = f"the search stopped making progress; {reason}"
    if not found.proof or not bool(found.impossible.any()):
        return reason
    return found.proof if not bool(others.any()) else f"{found.proof}; in {int(others.sum())} others, {reason}"


def _unrolled(backend: str, form: Form, marginals: Marginals, iterations: int) -> Tensor:
    """gamma after a fixed number of normalisations, without the last normalisation of the rows. Autograd records each
    pass."""
    queries, keys = marginals.row > 0, marginals.live
    log_row = torch.where(queries, marginals.row, 1.0).log()
    log_column = torch.where(keys, marginals.column, 1.0).log()
    gamma = torch.zeros_like(marginals.column)
    narrow = plan_only(form)
    turned = plan_only(transposed(narrow))
    for _ in range(iterations // 2):
        lse = autograd.run(backend, one_sided(narrow, gamma, keys), ("lse",))["lse"]
        phi = torch.where(queries, lse, 0.0) - log_row
        received = autograd.run(backend, one_sided(turned, phi, queries), ("lse",))["lse"]
        gamma = torch.where(keys, torch.where(keys, received, 0.0) - log_column, 0.0) / (1 + marginals.kappa)
    return gamma
