"""Rows and columns (`RowsAndColumns`): the keys' prices, found by passes of any backend over the one-sided problem.

With prices g of the keys the plan is p_ij = pi_ij exp((s_ij - f_i - g_j)/tau). Given gamma = g/tau, exp(-gamma) is one
more prior over the keys and the rows are attention's own. Given the queries' prices, the columns are the same problem
with queries and keys exchanged. So every step of the solver is a pass of the one-sided backends, and no Tq x Tk matrix
is ever stored.

    views        a two-sided problem as one-sided ones          ladder     falling temperatures
    marginals    what queries ship and keys receive             anderson   Sinkhorn's iteration, sped up
    stage        one pair of passes; the dual's Hessian         newton     where the iteration hardly moves
    gradient     the implicit function theorem                  feasibility   proofs that there is no plan

Here the solved problem is brought back to its rows (`reduce`), and the statistics are made from them (`run`).
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..form import Form
from ..problem import RowsAndColumns
from ..statistics import DIFFERENTIABLE
from .gradient import PricesFunction
from .ladder import NEEDED, Prices, solve
from .marginals import Marginals
from .views import detached, from_scores, one_sided, own_head, per_head, plan_only, transposed, widened

__all__ = ["NEEDED", "Marginals", "Solved", "from_scores", "one_sided", "reduce", "run"]


@dataclass
class Solved:
    """A problem reduced to its rows: the plan is that of the one-sided `form`, with each row multiplied by `row`."""

    form: Form
    row: Tensor | None  # [B, H, Tq] where it is not form.mass
    marginals: Marginals
    gamma: Tensor  # [B, H, Tk], each document's mean 0 where nothing else fixes it
    iterations: Tensor  # [B, H]


def reduce(backend: str, form: Form, settings: RowsAndColumns) -> Solved:
    """Find the keys' prices (differentiable) and put them into the prior of a one-sided problem."""
    if torch._C._are_functorch_transforms_active() or ops.forward_mode():
        raise NotImplementedError(
            "RowsAndColumns has no torch.func transforms and no forward mode: use reverse mode (backward)"
        )
    marginals = Marginals.of(backend, form)
    wide = False
    if settings.iterations is None:
        with torch.no_grad():
            found = solve(backend, form, marginals, settings)
            if marginals.balanced:
                exact = marginals.detached()
                found.gamma = exact.centred(found.gamma, exact.column)
        _report(found, settings)
        wide, iterations = found.wide, found.iterations
        narrow = plan_only(form)
        slots = {n: t for n, t in narrow.tensors().items() if n not in ("value", "row_mass", "column_mass", "level")}
        gamma: Tensor = PricesFunction.apply(  # type: ignore[assignment]
            ops._skeleton(narrow), tuple(slots), backend, (settings.max_iterations, settings.tolerance), found,
            marginals.detached(), marginals.row, marginals.column, marginals.kappa, *slots.values(),
        )  # fmt: skip
        if marginals.balanced:  # no change of value, but the derivative of the centred prices
            gamma = marginals.centred(gamma, marginals.column)
    else:
        gamma = _unrolled(backend, form, marginals, settings.iterations)
        iterations = torch.full(form.shape[:2], settings.iterations, device=gamma.device)
    rows = one_sided(widened(form) if wide else form, gamma, marginals.live)
    return Solved(rows, marginals.row if form.row_mass is not None else None, marginals, gamma, iterations)


def _report(found: Prices, settings: RowsAndColumns) -> None:
    """Warn where the columns were not met, or raise if the caller asked for that."""
    off = found.share
    missed = ~(off <= settings.tolerance)  # NaN counts as missed
    if not bool(missed.any()):
        return
    where, worst = int(missed.sum()), float(off.max())
    amount = f"{worst:.2e} of the mass is" if worst < math.inf else "more of the mass than float64 can tell may be"
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
    """gamma after a fixed number of normalisations, except for the last one of the rows. Autograd records each pass."""
    queries, keys = marginals.row > 0, marginals.live
    log_row = torch.where(queries, marginals.row, 1.0).log()
    log_column = torch.where(keys, marginals.column, 1.0).log()
    gamma = torch.zeros_like(marginals.column)
    narrow = plan_only(form)
    turned = plan_only(transposed(narrow))
    for _ in range(iterations // 2):
        lse = ops.run(backend, one_sided(narrow, gamma, keys), ("lse",))["lse"]
        phi = torch.where(queries, lse, 0.0) - log_row
        received = ops.run(backend, one_sided(turned, phi, queries), ("lse",))["lse"]
        gamma = torch.where(keys, torch.where(keys, received, 0.0) - log_column, 0.0) / (1 + marginals.kappa)
    return gamma


_SCALED = ("max_weight", "first_key_mass", "mass", "cost")  # proportional to what a row ships


def run(backend: str, form: Form, names: tuple[str, ...], settings: RowsAndColumns) -> dict[str, Tensor]:
    """Output and statistics (defined in `statistics`), computed from those of the one-sided plan."""
    solved = reduce(backend, form, settings)
    rows, a = solved.form, solved.row
    asked = set(names) - {"lse", "value", "kl", "column_dual", "column_residual", "iterations"}
    if a is not None:
        asked -= {"key_mass"}
        if "value_spread" in names:
            asked |= {"out"}
    if "value" in names:
        asked |= {"dual"}
    if "kl" in names:
        asked |= {"cost", "support"}
    found = ops.run(backend, rows, tuple(sorted(asked))) if asked else {}
    results = {name: found[name] for name in names if name in found}
    if a is not None:
        scale = a.to(rows.dtype)
        if "value_spread" in results:  # a sum p |v|^2 - |a o|^2
            results["value_spread"] = scale * found["value_spread"] + (scale - scale**2) * (found["out"] ** 2).sum(-1)
        for name in results:
            if name in _SCALED:
                results[name] = results[name] * scale
        if "out" in results:
            results["out"] = results["out"] * scale[..., None]
        if "collision" in results:
            results["collision"] = results["collision"] * scale**2
    with torch.no_grad():
        results |= _others(backend, form, names, solved, found)
    if "lse" in names:  # of the scores and the prior alone
        results["lse"] = ops.run(backend, one_sided(plan_only(form)), ("lse",))["lse"]
    return {n: (r if n in DIFFERENTIABLE else r.detach()).to(form.dtype) for n, r in results.items()}


def _column_sums(engine: Any, rows: Form, a: Tensor) -> Tensor:
    """What each key receives, sum_i a_i p_ij [B, H, Tk], summed over the plan's own weights.

    exp(L - gamma) would be the same number, but has no true digits where prices are large. The sum is computed as the
    gradient of sum_ij a_i p_ij x_j in the values x."""
    B, H, _, Tk = rows.shape
    group = rows.group
    with torch.no_grad():
        rows = dataclasses.replace(rows, value=per_head(rows, a.new_zeros(B, H, Tk)))
        own = torch.eye(group, dtype=rows.dtype, device=a.device).repeat(H // group, 1)  # [H, group]: each head its own
        incoming = {"out": a.to(rows.dtype)[..., None] * own[:, None]}
        outputs = engine.forward(rows, ("out", *(n for n in engine.saved(rows, ("out",)) if n != "out")))
        found = engine.backward(rows, ("value",), outputs, incoming)["value"]  # [B, Hkv, Tk, group]
    return found.mT.reshape(B, H, Tk).double()


def _others(
    backend: str, form: Form, names: tuple[str, ...], solved: Solved, found: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The statistics that the one-sided plan does not have, or defines by another prior."""
    engine, rows, marginals = ops.BACKENDS[backend], plan_only(solved.form), solved.marginals.detached()
    rows = detached(rows)
    gamma, a = solved.gamma.detach().double(), marginals.row
    tau: Any = solved.form.temperature
    tau = tau.detach().squeeze(3) if isinstance(tau, Tensor) else tau
    none = found.get("dual", a) == -math.inf
    results = {}
    price = found.get("dual", a) + tau * (math.log(solved.form.mass) - torch.where(a > 0, a, 1.0).log())  # f
    if "dual" in names:
        results["dual"] = torch.where(none, found["dual"], price)
    if "value" in names or "kl" in names:  # the sum of the prices of a row's keys, for a row of mass 1
        keys = per_head(rows, gamma)
        paid = own_head(rows, engine.forward(dataclasses.replace(rows, value=keys), ("out",))["out"])
        if "value" in names:
            results["value"] = torch.where(none, -math.inf, a * (torch.where(none, 0.0, price) + tau * paid))
        if "kl" in names:
            lse = engine.forward(rows, ("lse",))["lse"]
            bare = one_sided(plan_only(form).without_scores())
            prior = found["support"].log() if not form.weighted else engine.forward(bare, ("lse",))["lse"]
            mean = -found["cost"] / (solved.form.mass * tau)
            total = mean - paid - lse + prior
            results["kl"] = torch.where(found["support"] > 0, total, 0.0).clamp(min=0)
    if ("key_mass" in names and solved.row is not None) or "column_residual" in names:
        mass = _column_sums(engine, rows, a)
        if "key_mass" in names and solved.row is not None:
            results["key_mass"] = mass
        if "column_residual" in names:
            results["column_residual"] = (mass - marginals.target(gamma)).abs()
    if "column_dual" in names:
        results["column_dual"] = gamma * tau
    if "iterations" in names:
        results["iterations"] = solved.iterations
    return results
