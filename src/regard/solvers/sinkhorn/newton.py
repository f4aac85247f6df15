"""Newton's method on the dual, for plans on which Sinkhorn's iteration is too slow.

At small temperatures a plan falls into groups of queries and keys that exchange almost nothing. Moving mass between two
groups takes a common change of all prices in one group, and Sinkhorn's steps make it in tiny pieces. One step of
Newton, M x = c - t (`Laplacian`), makes the whole change. A step consists of

1. conjugate gradients for x, with M damped by a fraction of diag(c) so that nearly separate groups do not move too far;
2. a line search along x: the dual is convex, so a point where it still falls along x is lower than the start;
3. one step of Sinkhorn's, which corrects keys that receive almost nothing: Newton's quadratic model is wrong there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .feasibility import Infeasibility
from .stage import Found, Laplacian, Stage, State

REACH = 30.0  # the largest change of a price in one step, in units of tau
PRODUCTS = 200  # of conjugate gradients in one step
TRIES = 12  # of the line search
LONGER = 4.0  # by this factor, where a step was too short
STEPS = 30  # stop after so many steps in which the residual has not fallen by 1 %


def newton(
    stage: Stage, gamma: Tensor, tolerance: float, limit: Tensor, done: Tensor, infeasibility: Infeasibility
) -> Found:
    """Improve the heads [B, H] that are not done, until their share is below the tolerance, stops falling, or their
    limit [B, H] leaves no room for another step."""
    Tk = gamma.shape[-1]
    state = stage.at(gamma)
    iterations = (~done).long()
    arrived = stuck = torch.zeros_like(done)
    best, mark, since = state, state.share, torch.zeros_like(iterations)
    for number in range(int(limit.max())):
        blind = state.blind(tolerance)
        arrived = arrived | (~done & ~blind & (state.share <= tolerance))
        best = state.where(~done & ~blind & (state.share < best.share), best)
        better = state.share < 0.99 * mark
        mark, since = torch.where(better, state.share, mark), torch.where(better, number, since)
        stuck = stuck | (~done & ~arrived & (blind | (number - since >= STEPS) | ~state.share.isfinite()))
        left = limit - iterations - TRIES - 2  # for conjugate gradients
        done = done | arrived | stuck | (left <= 0)
        done = done | infeasibility.look(stage, state, number, tolerance, done)
        if bool(done.all()):
            break
        damping = 0.1 * state.share.clamp(max=1e-3)
        system = Laplacian(stage, state, damping[..., None])
        products = left.clamp(max=min(2 * Tk + 10, PRODUCTS))
        found = system.solve(state.residual, state.share.clamp(max=1e-2), products, done)
        x = found.x * (REACH / found.x.abs().amax(-1, keepdim=True).clamp(min=REACH))
        following, tried = _search(stage, state, x, done)
        following = stage.at(_centred(stage, stage.normalised(following)))
        state = state.where(done, following)
        iterations += torch.where(done, 0, found.products + tried + 2)  # the Laplacian's diagonal, Sinkhorn's step
    return Found(best, arrived, iterations, stuck=stuck)


def _search(stage: Stage, state: State, x: Tensor, done: Tensor) -> tuple[State, Tensor]:
    """A state along x with a lower dual (the given state where there is none), and how many were tried, [B, H].

    Along a change of price between two groups that exchange nothing yet, the dual falls in a straight line and then
    turns. So a step after which it falls as steeply as before is made longer; one that is too long is made shorter."""
    slope = -(state.residual * x).sum(-1)  # [B, H], the dual's derivative at 0
    found, accepted = state, done | ~(slope < 0)
    lowered = torch.zeros_like(done)
    length = torch.ones_like(slope)
    tried = torch.zeros_like(done, dtype=torch.long)
    for _ in range(TRIES):
        if bool(accepted.all()):
            break
        trial = stage.at(state.gamma + length[..., None] * x)
        tried += ~accepted
        here = -(trial.residual * x).sum(-1)
        lower = (here <= 0) | (trial.dual <= state.dual + 1e-4 * length * slope)
        # Near the optimum rounding hides that the dual falls. There a derivative that has halved is enough.
        level = trial.dual <= state.dual + 1e-12 * (1 + state.dual.abs())
        lower = lower | (level & (here <= 0.5 * slope.abs()))
        good = ~accepted & trial.share.isfinite() & lower
        found = trial.where(good, found)
        steep = good & (here < 0.9 * slope) & (lowered | (length == 1))
        accepted = accepted | (good & ~steep) | (lowered & ~good)
        lowered = lowered | good
        shorter = slope.abs() / (slope.abs() + here.clamp(min=0))  # where a line through the two slopes is 0
        length = length * torch.where(steep, LONGER, shorter.nan_to_num(0.1).clamp(0.1, 0.5))
    return found, tried


def _centred(stage: Stage, gamma: Tensor) -> Tensor:
    """Prices without their mean over each document, unless the columns are relaxed. The mean has no effect and costs
    digits."""
    return stage.marginals.centred(gamma, stage.marginals.column) if stage.marginals.balanced else gamma
