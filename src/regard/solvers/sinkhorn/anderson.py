"""Sinkhorn's iteration, sped up by Anderson's mixing.

The plain iteration gamma <- `Stage.normalised` always lowers the dual. Mixing extrapolates from the last steps and is
much faster, but may overshoot: a mixed step that lowers neither the residual nor the dual is undone. The method is fast
where the iteration contracts at all. Where plans are nearly permutations it makes almost no progress. Then it stops
early, and `newton` continues.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .feasibility import Infeasibility
from .stage import Found, Stage

MEMORY = 20  # number of earlier steps that the mixing uses
SLOW = 40  # stop after so many iterations in which the residual has not halved
FLOAT32 = torch.finfo(torch.float32).eps / 2


def iterate(
    stage: Stage,
    gamma: Tensor,
    tolerance: float,
    limit: Tensor,
    infeasibility: Infeasibility,
    lse: Tensor | None = None,
) -> Found:
    """Iterate until each head's share is below the tolerance, stops falling, or the head's limit [B, H] is reached.

    In float32 the tolerance is raised to what float32 can resolve; the result is then marked `coarse`."""
    marginals = stage.marginals
    B, H, Tk = gamma.shape
    weight = marginals.column / marginals.column.sum(-1, keepdim=True).clamp(min=1e-300)
    moves, changes = (gamma.new_zeros(B, H, MEMORY, Tk) for _ in range(2))  # of gamma, and of the step
    infinite = torch.full((B, H), math.inf, dtype=gamma.dtype, device=gamma.device)
    share, dual = infinite, infinite  # of the last accepted state
    fresh = torch.ones(B, H, dtype=torch.bool, device=gamma.device)  # no earlier step to compare with
    arrived, done = ~fresh, limit <= 0
    iterations = torch.zeros(B, H, dtype=torch.long, device=gamma.device)
    mark, marked = infinite, iterations.clone()  # the share to be halved, and the iteration since which this is tried
    before, fallback, accepted = (gamma, torch.zeros_like(gamma)), gamma, None
    coarse = False
    for number in range(max(1, int(limit.max()))):
        state = stage.at(gamma, lse if number == 0 else None)
        iterations += ~done
        if number == 0 and not stage.wide:
            floor = FLOAT32 * float(state.size.max())
            if floor > tolerance:
                coarse, tolerance = True, max(tolerance, 16 * floor)
        blind = state.blind(tolerance)
        shown = state.share.masked_fill(blind, math.inf)
        better = ~blind & ((shown < share) | (state.dual < dual - 1e-13 * (1 + dual.abs())))
        good = fresh | better
        accepted = state if accepted is None else state.where(good & ~done, accepted)
        arrived = arrived | (good & ~done & (shown <= tolerance))  # false for NaN
        halved = shown < mark / 2
        mark, marked = torch.where(halved, shown, mark), torch.where(halved, number, marked)
        slow = (number - marked >= SLOW) | (iterations >= limit)
        done = arrived | slow | infeasibility.look(stage, state, number, tolerance, arrived)
        if bool(done.all()):
            break
        share, dual = torch.where(good, shown, share), torch.where(good, state.dual, dual)
        step = stage.normalised(state) - gamma
        step = marginals.centred(step, weight) if marginals.balanced else step
        slot = number % MEMORY
        known = (good & ~fresh)[..., None]
        moves[:, :, slot] = torch.where(known, gamma - before[0], 0.0)
        changes[:, :, slot] = torch.where(known, step - before[1], 0.0)
        lost = ~good[..., None, None]  # after a bad step: the plain step from the last good state, with cleared memory
        moves, changes = moves.masked_fill(lost, 0.0), changes.masked_fill(lost, 0.0)
        before = gamma, step
        following = torch.where(good[..., None], gamma + step - _mix(moves, changes, step, weight), fallback)
        fallback = torch.where(good[..., None], gamma + step, fallback)
        fresh = ~good
        gamma = torch.where(done[..., None], gamma, following)
    assert accepted is not None
    coarse = coarse or (not stage.wide and not bool((arrived | infeasibility.heads).all()))
    return Found(accepted, arrived, iterations, coarse)


def _mix(moves: Tensor, changes: Tensor, step: Tensor, weight: Tensor) -> Tensor:
    """What Anderson's mixing subtracts from gamma + step: (moves + changes) theta, where theta is the least-squares fit
    of the step by its changes. Cleared memory is 0, and so is its theta."""
    weighted = changes * weight[:, :, None]
    matrix = weighted @ changes.mT  # [B, H, m, m]
    # Each change is scaled by its own size: early changes are larger by many orders of magnitude.
    units = matrix.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    units = torch.where(units > 0, units, 1.0)
    matrix = matrix / (units[..., None] * units[..., None, :])
    ridge = torch.where(matrix.diagonal(dim1=-2, dim2=-1) > 0, 1e-12, 1.0)
    matrix = matrix + torch.diag_embed(ridge)
    theta = torch.linalg.solve_ex(matrix, (weighted @ step[..., None]) / units[..., None])[0] / units[..., None]
    return ((moves + changes).mT @ theta).squeeze(-1).nan_to_num(0.0, 0.0, 0.0)
