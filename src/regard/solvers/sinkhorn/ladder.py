"""The keys' prices: a ladder of falling temperatures, on each rung Sinkhorn's iteration and, where it fails, Newton.

A problem at a low temperature is approached from a higher one, whose plan is not peaked. The prices g = tau gamma of
one rung are nearly right for the next rung, but only if the rung was solved: from wrong prices no method recovers
quickly.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...form import ColumnSettings, Form
from .anderson import iterate
from .feasibility import Infeasibility
from .marginals import Marginals
from .newton import newton
from .stage import Found, Stage
from .views import one_sided

FACTOR = 4.0  # between the temperatures of two rungs
WARM = 3e-3  # the share of the mass in a wrong column at which a rung counts as solved
PEAKED = 0.5  # rows with less than this share of the largest possible entropy need a ladder
PEAKEDNESS = ("lse", "entropy", "support")  # statistics of the first pass
SPREAD = ("score_variance", "max_scores", "cost")  # more statistics, if a ladder is needed
NEEDED = PEAKEDNESS + SPREAD  # statistics that a backend must have besides the caller's


@dataclass
class Prices:
    """The keys' prices, and how far they are from meeting the columns."""

    gamma: Tensor  # [B, H, Tk], float64
    share: Tensor  # [B, H], of the mass in a wrong column, in the worst document
    iterations: Tensor  # [B, H], pairs of passes
    wide: bool  # the passes had to be in float64
    stuck: Tensor  # [B, H], stopped because the share no longer fell
    impossible: Tensor  # [B, H], proven to have no plan
    proof: str = ""  # the proof for the first of them


def solve(backend: str, form: Form, marginals: Marginals, settings: ColumnSettings) -> Prices:
    """Find the prices, outside of autograd."""
    return _Search(backend, form, marginals, settings.max_iterations).run(settings.tolerance)


class _Search:
    """One search for prices. It counts iterations, collects proofs, and stays in float64 once float32 was not
    enough."""

    def __init__(self, backend: str, form: Form, marginals: Marginals, limit: int) -> None:
        self.backend, self.form, self.marginals, self.limit = backend, form, marginals, limit
        self.wide = form.dtype == torch.float64
        self.iterations = torch.zeros(form.shape[:2], dtype=torch.long, device=marginals.row.device)
        self.infeasibility = Infeasibility(self.stage())

    def stage(self, heat: Tensor | None = None) -> Stage:
        return Stage(self.backend, self.form, self.marginals, self.wide, heat)

    def run(self, tolerance: float) -> Prices:
        gamma = torch.zeros_like(self.marginals.column, dtype=torch.float64).detach()
        if 0 in self.form.shape:
            none = torch.zeros_like(self.iterations, dtype=torch.bool)
            return Prices(gamma, gamma.sum(-1), self.iterations, False, none, none)
        lse, heats = self._ladder()
        for heat, ratio in heats:
            if bool((self.left() > 1).any()):  # one iteration is kept for the problem itself
                gamma = self._reach(gamma, WARM, 1, heat).state.gamma
            gamma = gamma * ratio  # g stays, tau falls
        found = self._reach(gamma, tolerance, lse=None if heats else lse)
        state, blind = found.state, found.state.blind(tolerance)
        share = state.share.masked_fill(blind, math.inf)
        wide = self.wide and self.form.dtype != torch.float64
        stuck = torch.zeros_like(blind) if found.stuck is None else found.stuck
        proven = self.infeasibility
        return Prices(state.gamma, share, self.iterations, wide, stuck, proven.heads, proven.reason)

    def _reach(
        self, gamma: Tensor, tolerance: float, kept: int = 0, heat: Tensor | None = None, lse: Tensor | None = None
    ) -> Found:
        """Solve one rung: Sinkhorn's iteration, in float64 if needed, then Newton. `kept` iterations of each head's
        limit are not used."""
        found = self._count(iterate(self.stage(heat), gamma, tolerance, self.left(kept), self.infeasibility, lse))
        if found.coarse and bool((self.left(kept) > 0).any()):
            self.wide = True  # for all later rungs: they are colder and need more digits
            gamma = found.state.gamma
            found = self._count(iterate(self.stage(heat), gamma, tolerance, self.left(kept), self.infeasibility))
        done = found.arrived | self.infeasibility.heads | (self.left(kept) <= 0)
        if bool(done.all()):
            return found
        stage = self.stage(heat)
        return self._count(newton(stage, found.state.gamma, tolerance, self.left(kept), done, self.infeasibility))

    def left(self, kept: int = 0) -> Tensor:
        """The number of iterations that each head may still make, [B, H]."""
        return self.limit - kept - self.iterations

    def _count(self, found: Found) -> Found:
        self.iterations += found.iterations
        return found

    def _ladder(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The rows' lse without prices, and the rungs above the problem's own temperature: each a factor [B, H, 1, 1]
        to the temperature, and its ratio [B, H, 1] to the next. There are none where no head has peaked rows."""
        stage = self.stage()
        rows = one_sided(stage.form, torch.zeros_like(stage.marginals.column), stage.marginals.live)
        found = stage.engine.forward(rows, PEAKEDNESS)
        log_keys = found["support"].clamp(min=1).log()
        peaked = found["entropy"].sum(-1) < PEAKED * log_keys.sum(-1)
        if not bool(peaked.any()):
            return found["lse"], []
        # The ladder begins at the spread of the scores under the prior alone, measured at an extreme temperature.
        hot = 1e6
        flat = stage.engine.forward(dataclasses.replace(rows, temperature=hot), SPREAD)
        above = torch.where(found["support"] > 0, flat["max_scores"] + flat["cost"], 0.0)
        spread = torch.maximum(flat["score_variance"].sqrt() * hot, above / 4).amax(-1)  # [B, H]
        tau = rows.temperature.squeeze(3).squeeze(2) if isinstance(rows.temperature, Tensor) else rows.temperature
        ratio = torch.where(peaked, spread / tau, 1.0).double().nan_to_num(1.0, 1.0, 1.0).clamp(min=1.0)
        steps = math.ceil(float(ratio.max().log()) / math.log(FACTOR))
        step = (ratio ** (1 / max(1, steps)))[:, :, None, None]
        return found["lse"], [(step ** (steps - n), step.squeeze(3)) for n in range(steps)]
