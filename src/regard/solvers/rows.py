"""One-sided problems: one pass of a backend, and certificates of single rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import autograd
from ..backends.row_equation import solve_rows
from ..form import Form
from ..statistics import Solution, primal
from .base import DensePlan, Reduced, Solver


class RowSolver(Solver):
    """Every row is a problem of its own."""

    def attend(self, backend: str, form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
        return autograd.run(backend, form, names)

    def reduce(self, form: Form) -> Reduced:
        return Reduced(form)

    def solve(self, form: Form, scores: Tensor) -> DensePlan:
        rows = solve_rows(form, scores, order=2)
        return DensePlan(rows.weights[..., : scores.shape[-1]], rows.dual.squeeze(-1))

    def certify(self, form: Form, scores: Tensor, weights: Tensor) -> dict[str, Tensor]:
        best = solve_rows(form, scores, order=2)
        # Rows without any key are solved with one masked key in its place.
        return judge_rows(best, torch.nn.functional.pad(weights, (0, best.weights.shape[-1] - weights.shape[-1])))


def judge_rows(best: Solution, p: Tensor) -> dict[str, Tensor]:
    """Primal of p, dual at best's lambda, and the residuals, each [B, H, Tq]."""
    form, price = best.form, best.dual.squeeze(-1)
    mass = p.sum(-1)
    signed = best.regularizer.signed
    null = (1 - mass if signed else (1 - mass).clamp(min=0))[..., None] if form.marginal == "sink" else None
    achieved = primal(best, p if signed else p.clamp(min=0), null)
    # A row whose plan does not depend on the price (no admissible key, all keys full) has one plan: its value is the
    # bound.
    fixed = price == -math.inf
    if best.regularizer.ceiling == math.inf:  # -inf may also be a failed search: check the keys
        fixed = fixed & (best.where_admissible(torch.ones_like(p), 0.0).sum(-1) == 0)
    bound = torch.where(fixed, primal(best, best.weights, best.null), dual_value(best))
    row_residual = torch.zeros_like(mass) if signed else (-p).clamp(min=0).sum(-1)
    if form.marginal == "rows":
        row_residual = row_residual + (mass - torch.where(fixed, best.weights.sum(-1), form.mass)).abs()
    elif form.marginal == "sink" and not signed:
        row_residual = row_residual + (mass - 1).clamp(min=0)
    return {
        "primal": achieved,
        "dual": bound,
        "gap": bound - achieved,
        "row_residual": row_residual,
        "stationarity": (p - best.weights).abs().amax(-1),
    }


def dual_value(best: Solution) -> Tensor:
    """lambda m + tau sum_j pi_j f*((s_j - lambda)/tau), an upper bound at any lambda (relaxed: see theory).

    KL, Tsallis and Fermi-Dirac have exact conjugates. Those of other regularisers are bounded from above by f alone.
    """
    form, regularizer = best.form, best.regularizer
    price = torch.where(best.dual == -math.inf, 0.0, best.dual)  # any price gives a bound; rows without keys need none
    parameter = best.null_score

    def conjugate(scores: Tensor) -> Tensor:
        return regularizer.conjugate((scores - price) / best.temperature - regularizer.origin)

    prior = torch.ones_like(best.scores) if best.log_prior is None else best.log_prior.exp().expand_as(best.scores)
    prior = best.where_admissible(prior, 0.0)
    if form.family == "kl":  # pi exp(t) in one exponential, as in the plan
        t = best.where_admissible((best.scores - price) / best.temperature, 0.0)
        spread = best.where_admissible(regularizer.weights(t, best.log_prior), 0.0) - prior
    else:
        spread = prior * best.where_admissible(conjugate(best.scores), 0.0)
    total = spread.sum(-1, keepdim=True)
    if form.marginal == "sink":
        total = total + conjugate(parameter)
    if form.family == "kl" and form.marginal in ("rows", "sink"):  # add the constant that their primal omits
        total = total + prior.sum(-1, keepdim=True) + (form.marginal == "sink") - form.mass
    tau = torch.as_tensor(form.temperature, dtype=total.dtype)
    total = torch.where(tau == 0, 0.0, total * tau)  # hard routing: the divergence has no weight, even if infinite
    if form.marginal == "relax":
        total = total + parameter * torch.expm1(price / parameter)
    elif form.marginal != "free":
        total = total + price * form.mass
    return total.squeeze(-1)
