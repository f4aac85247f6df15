"""Plans with both marginals in memory: `solve` and `certify` for scores that are given."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._validate import Scalar
from ...backends import READOUT, choose
from ...backends.row_equation import solve_rows
from ...form import Form
from ...statistics import Solution
from .marginals import Marginals
from .reduction import reduce_to_rows
from .views import from_scores, one_sided


@dataclass(frozen=True)
class TwoSidedPlan:
    """A solved plan with both marginals, in full."""

    rows: Solution  # of the one-sided problem at the keys' prices
    marginals: Marginals
    temperature: Scalar  # number or [B|1, H|1, 1]
    relax: Scalar | None
    weights: Tensor  # [B, H, Tq, Tk]
    dual: Tensor  # f [B, H, Tq]
    column_dual: Tensor  # g [B, H, Tk]


def solve_scores(form: Form, scores: Tensor) -> TwoSidedPlan:
    """The plan of scores [B, H, Tq, Tk] that are in memory. Differentiable."""
    form = from_scores(form, scores)
    backend, _ = choose(one_sided(form), (READOUT,))
    solved = reduce_to_rows(backend, form)
    rows = solve_rows(solved.form, scores.to(solved.form.dtype), order=2)
    a = solved.marginals.row.to(rows.dual.dtype)
    tau, rho = (t.squeeze(3) if isinstance(t, Tensor) else t for t in (form.temperature, form.marginal_parameter))
    weights = rows.weights[..., : scores.shape[3]] * (a / solved.form.mass)[..., None]
    dual = rows.dual.squeeze(-1)
    dual = torch.where(a > 0, dual + tau * (math.log(solved.form.mass) - torch.where(a > 0, a, 1.0).log()), dual)
    relax = rho if isinstance(rho, Tensor) or rho > 0 else None
    narrow = {"weights": weights, "dual": dual, "column_dual": solved.gamma * tau}
    return TwoSidedPlan(rows, solved.marginals, tau, relax, **{n: t.to(scores.dtype) for n, t in narrow.items()})


def judge_plan(best: TwoSidedPlan, p: Tensor) -> dict[str, Tensor]:
    """Primal and dual of the whole plan, <p, s> - tau sum p log(p/pi) - rho KL(columns || b), and its residuals."""
    tau, a, b = best.temperature, best.marginals.row, best.marginals.column
    f, g = torch.where(a > 0, best.dual, 0.0), best.column_dual
    received = p.sum(-2)
    ratio = torch.xlogy(p.clamp(min=0), p.clamp(min=0))
    form = best.rows.form
    form = dataclasses.replace(form, log_priors=form.log_priors[:-1])  # the last log-prior holds the keys' prices
    log_prior = form.log_prior(p.shape[2], p.shape[3], p.dtype, p.device)
    if log_prior is not None:
        ratio = ratio - torch.where(p > 0, p * log_prior, 0.0)
    allowed = best.rows.where_admissible(torch.ones_like(p), 0.0) if p.numel() else p
    allowed = allowed * (a > 0)[..., None] * (b > 0)[:, :, None]
    ratio = torch.where((allowed == 0) & (p > 0), math.inf, ratio)  # mass where the pair is masked
    t = torch.as_tensor(tau, dtype=p.dtype)
    achieved = (p * best.rows.scores).sum((-1, -2)) - (t * ratio.sum(-1)).sum(-1)
    bound = (a * f).sum(-1)
    if best.relax is None:
        bound = bound + (b * g).sum(-1)
        column_residual = (received - b).abs()
    else:
        rho = torch.as_tensor(best.relax, dtype=p.dtype)
        bound = bound + (rho * b * torch.expm1(g / rho)).sum(-1)
        spread = torch.xlogy(received, received / torch.where(b > 0, b, 1.0)) - received + b
        achieved = achieved - (rho * torch.where(b > 0, spread, torch.where(received > 0, math.inf, 0.0))).sum(-1)
        column_residual = torch.zeros_like(b)
    return {
        "primal": achieved,
        "dual": bound,
        "gap": bound - achieved,
        "row_residual": (-p).clamp(min=0).sum(-1) + (p.sum(-1) - a).abs(),
        "stationarity": (p - best.weights).abs().amax(-1) if p.numel() else torch.zeros_like(a),
        "column_residual": column_residual,
    }
