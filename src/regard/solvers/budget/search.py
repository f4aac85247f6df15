"""The search for ln(1/tau) of all rows at once: Newton inside a bracket, on a divergence that rises with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

INSIDE, FIXED, HARD = 0, 1, 2  # a row that meets its budget; one whose plan is the prior; one at the hard limit
_PASSES = 40  # a limit that only rows stopped by rounding reach


def _hottest(dtype: torch.dtype) -> float:
    """A temperature that stands for infinity: the plan is the prior to rounding."""
    return 1e100 if dtype == torch.float64 else 1e15


def _coldest(dtype: torch.dtype) -> float:
    """The lowest temperature. Squares of s/tau do not overflow there."""
    return 1e-100 if dtype == torch.float64 else 1e-15


# measure(temperature, rows, exact) -> KL, Var_p(y); all [B, H, rows]; exact: in float64
Measure = Callable[[Tensor, slice, bool], tuple[Tensor, Tensor]]


def search(
    measure: Measure,
    hardest: Callable[[slice], Tensor],  # KL of the hard plan of these rows, in float64
    budget: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """ln beta of each row [B, H, Tq] and its state (INSIDE, FIXED or HARD); all in float64.

    Newton works on the logarithm of KL / (KL_hard - KL) as a function of ln beta, which is nearly linear at both
    ends. KL_hard, of the hard plan, is measured only for rows that are still below their budget after four passes. Rows
    that cannot meet their budget stop as close to the hard plan as rounding can resolve: backward computes the plan
    again at that temperature. `tolerance` bounds the last Newton step, so the error is about its square.
    """
    x = torch.zeros_like(budget)
    most = torch.full_like(budget, math.inf)  # KL of the hard plan, where it is known
    state = torch.where(budget <= 0, FIXED, INSIDE)
    looked = False
    negligible = 1e-9 if dtype == torch.float64 else 1e-8  # of the hard plan's KL
    # (in float64?, tolerance, passes): a float32 pass computes a KL to about 1e-6, so the last one is in float64.
    stages = [(True, 1e-5, _PASSES)] if dtype == torch.float64 else [(False, 2e-2, 8), (True, 1e-3, _PASSES)]
    for stage, (exact, tolerance, passes) in enumerate(stages):
        noise = 1e-13 if exact else 3e-6
        low, high = torch.full_like(x, -math.inf), torch.full_like(x, math.inf)
        active = state != FIXED
        for number in range(passes):
            rows = span_of(active)
            if rows is None:
                break
            kl, variance = measure((-x[:, :, rows]).exp(), rows, exact)
            part = _Newton(x[:, :, rows], low[:, :, rows], high[:, :, rows], budget[:, :, rows], most[:, :, rows])
            going = active[:, :, rows]
            following, settled = part.step(kl.double(), variance.double(), noise, tolerance)
            arrived = (state[:, :, rows] == HARD) & (kl >= part.most * (1 - 30 * negligible))
            x[:, :, rows] = torch.where(going & ~arrived & ~kl.isnan(), following, x[:, :, rows])
            active[:, :, rows] = going & ~settled & ~arrived & ~kl.isnan()
            doubtful = active & (high == math.inf)
            if (number >= 3 or stage) and not looked and (rows := span_of(doubtful)) is not None:
                looked = True
                most[:, :, rows] = hardest(rows)
                nearest = most * (1 - negligible)
                beyond = doubtful & (budget >= nearest)
                state = torch.where(beyond, torch.where(most <= 1e-9, FIXED, HARD), state)
                budget = torch.where(state == HARD, nearest, budget)
                active = active & (state != FIXED)
    x = torch.where(
        (state == FIXED) & (budget > 0), 0.0, x
    )  # one key, or equal ones: every temperature gives the same plan
    return x, state


def span_of(rows: Tensor) -> slice | None:
    """The range of queries of [B, H, Tq] from the first to the last that is True in some head; None if none is."""
    found = rows.any(0).any(0).nonzero()
    return slice(int(found[0]), int(found[-1]) + 1) if found.numel() else None


@dataclasses.dataclass
class _Newton:
    """One step of all rows; `low` and `high` bracket the root and are narrowed in place."""

    x: Tensor  # ln beta
    low: Tensor
    high: Tensor
    budget: Tensor
    most: Tensor

    def step(self, kl: Tensor, variance: Tensor, noise: float, tolerance: float) -> tuple[Tensor, Tensor]:
        """The next ln beta, and whether it is the last."""
        x, low, high, budget, most = self.x, self.low, self.high, self.budget, self.most
        low.copy_(torch.where(kl < budget, torch.maximum(low, x), low))
        high.copy_(torch.where(kl > budget, torch.minimum(high, x), high))
        known = most < math.inf
        room = torch.where(known, torch.maximum(most - kl, 1e-12 * most), 1.0)
        left = torch.where(known, torch.maximum(most - budget, 1e-12 * most), 1.0)
        near = torch.where(kl < noise, torch.maximum(kl, variance / 2), kl)  # KL = Var/2 near beta = 0
        near = near.clamp(min=1e-300)
        slope = variance * (1 / near + torch.where(known, 1 / room, 0.0))
        newton = ((budget.clamp(min=1e-300) / near).log() + (room / left).log()) / slope
        unsure = ~newton.isfinite() | ((newton == 0) & (kl != budget))
        newton = torch.where(unsure, torch.where(kl < budget, 2.0, -2.0), newton)
        following = x + newton.clamp(-3.0, 3.0)
        bracketed = low.isfinite() & high.isfinite()
        outside = bracketed & ((following <= low) | (following >= high))
        following = torch.where(outside, (low + high) / 2, following)
        aim = torch.minimum(budget, torch.where(known, left, math.inf))
        close = (kl - budget).abs() <= 1e-2 * aim + noise
        settled = (close & ~outside & (newton.abs() <= tolerance)) | (kl == budget)
        settled = settled | (bracketed & (high - low <= tolerance**2))
        return torch.where(kl == budget, x, following), settled


def coldest_like(like: Tensor) -> Tensor:
    return torch.full_like(like, _coldest(torch.float64))


def temperatures_from(x: Tensor, state: Tensor, budget: Tensor, dtype: torch.dtype) -> Tensor:
    """Temperatures [B, H, Tq, 1] in the compute dtype."""
    temperature = (-x).exp().clamp(_coldest(dtype), _hottest(dtype))
    return torch.where((state == FIXED) & (budget <= 0), _hottest(dtype), temperature).to(dtype)[..., None]


def as_kl(statistic: str, target: Tensor, count: Tensor) -> Tensor:
    """The budget as a divergence [B|1, H|1, Tq|1]; an entropy h over `count` equal keys is log(count) - h."""
    target = target.squeeze(-1)
    if statistic == "kl":
        return target
    return torch.where(count > 0, count.double().clamp(min=1).log() - target, 0.0)
