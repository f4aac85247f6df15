"""Temperatures of rows whose scores are in memory."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..._validate import concrete
from ...backends.row_equation import solve_rows
from ...form import PRIOR_SLOTS, Form
from ...statistics import entropy, kl, score_variance
from .search import HARD, INSIDE, as_kl, coldest_like, search, temperatures_from


def match_scores(form: Form, scores: Tensor) -> tuple[Form, Tensor]:
    """The form of rows with given scores [B, H, Tq, Tk], at the temperatures that meet the budget, and where
    [B, H, Tq, 1] they stand for 0. Has first derivatives only."""
    B, H, Tq, Tk = scores.shape
    target, statistic = form.budget, form.matched
    assert target is not None and statistic is not None
    form = dataclasses.replace(form, hard=False, budget=None, matched=None)
    if not all(map(concrete, (scores, target, *form.tensors().values()))):
        raise NotImplementedError(
            "MatchKL, MatchEntropy: solve and certify search in eager mode only, outside of transforms"
        )
    fixed = form.detached()
    fixed = fixed.with_tensors({n: t.double() for n, t in fixed.tensors().items() if n in PRIOR_SLOTS})

    def measure(temperature: Tensor, rows: slice, exact: bool) -> tuple[Tensor, Tensor]:
        everything = (slice(0, B), slice(0, H), rows, slice(0, Tk))
        part = dataclasses.replace(fixed.cut(*everything), temperature=temperature[..., None])
        solved = solve_rows(part, scores.detach()[:, :, rows].double())
        return kl(solved), score_variance(solved)

    with torch.no_grad():
        admissible = form.admissible(Tq, Tk, scores.device)
        count = (
            torch.full((), Tk, device=scores.device) if admissible is None else admissible.expand(B, H, Tq, Tk).sum(-1)
        )
        wanted = as_kl(statistic, target.double(), count).expand(B, H, Tq).clone()
        x, state = search(
            measure, lambda rows: measure(coldest_like(wanted[:, :, rows]), rows, True)[0], wanted, torch.float64
        )
        temperature = temperatures_from(x, state, wanted, scores.dtype)
        _, variance = measure((-x).exp(), slice(0, Tq), True)
    inside, hard = (state == INSIDE)[..., None], (state == HARD)[..., None]
    if torch.is_grad_enabled():
        # One more Newton step: its value is 0, its derivative is that of the root.
        sign, formula = (-1.0, entropy) if statistic == "entropy" else (1.0, kl)
        solved = solve_rows(dataclasses.replace(form, temperature=temperature), scores, order=2)
        off = sign * (formula(solved)[..., None] - target)
        rate = torch.where(inside, temperature.double() / variance[..., None], 0.0).to(scores.dtype)
        moved = temperature + torch.where(inside, off - off.detach(), 0.0) * rate
        temperature = torch.where(inside, moved, temperature)
    return dataclasses.replace(form, temperature=temperature), hard
