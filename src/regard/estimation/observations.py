"""The observations that `calibrate` fits: scores and the keys that were chosen, checked and in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._validate import describe

CONVERGED = 1e-9  # a residual counts as 0 below this, relative to the size of the scores


class Observations(NamedTuple):
    """Three tensors of one shape [..., Tk]."""

    scores: Tensor  # 0 at keys that are not admissible
    admissible: Tensor
    targets: Tensor  # distributions; 0 in rows that are left out

    def map(self, function: Callable[[Tensor], Tensor]) -> Observations:
        return Observations(*map(function, self))


def read_observations(scores: Tensor, targets: Tensor) -> Observations:
    """Check the arguments of `calibrate`, and turn chosen keys into distributions."""
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        raise TypeError(f"scores: expected a floating-point tensor, got {describe(scores)}")
    if scores.dim() < 1 or scores.shape[-1] == 0:
        raise ValueError(f"scores: expected shape [..., Tk] with Tk > 0, got {list(scores.shape)}")
    if not isinstance(targets, Tensor) or targets.dtype == torch.bool or targets.is_complex():
        raise TypeError(f"targets: expected integers or floating-point distributions, got {describe(targets)}")
    s = scores.detach().cpu().double()
    if bool((s.isnan() | (s == math.inf)).any()):
        raise ValueError("scores: expected finite numbers or -inf, got NaN or inf")
    distributions = targets.is_floating_point()
    shape = scores.shape if distributions else scores.shape[:-1]
    if targets.shape != shape:
        kind = "distributions" if distributions else "integers"
        raise ValueError(f"targets: expected {kind} of shape {list(shape)}, got {describe(targets)}")
    t = _normalized(targets) if distributions else _one_hot(targets, s)
    admissible = s > torch.finfo(scores.dtype).min / 2  # masks add -inf or the dtype's lowest number
    if bool(((t > 0) & ~admissible).any()):
        raise ValueError("targets: expected admissible keys, got one whose score is -inf (or a mask's lowest number)")
    return Observations(torch.where(admissible, s, 0.0), admissible, t)


def _normalized(targets: Tensor) -> Tensor:
    """Distributions in float64 that sum to 1; rows of zeros stay 0."""
    t = targets.detach().cpu().double()
    total = t.sum(-1, keepdim=True)
    tolerance = 1e-3 if targets.dtype in (torch.float32, torch.float64) else 2e-2
    good = ((total - 1).abs() <= tolerance) | (t == 0).all(-1, keepdim=True)
    if not bool(good.all()) or bool((t < 0).any()):
        raise ValueError("targets: expected rows >= 0 that sum to 1 (or are all 0, to be left out), got others")
    return t / torch.where(total > 0, total, 1.0)


def _one_hot(targets: Tensor, scores: Tensor) -> Tensor:
    """Chosen keys as distributions; rows with a negative target are 0."""
    t, Tk = targets.detach().cpu(), scores.shape[-1]
    if bool((t >= Tk).any()):
        raise ValueError(f"targets: expected keys below Tk={Tk} (negative: left out), got {int(t.max())}")
    return torch.zeros_like(scores).scatter(-1, t.clamp(min=0).long()[..., None], (t >= 0).double()[..., None])


def log_weights(logits: Tensor, admissible: Tensor) -> Tensor:
    """log p over the admissible keys, -inf at the others (finite in a row without any)."""
    logits = torch.where(admissible, logits, -math.inf)
    return torch.where(admissible.any(-1, keepdim=True), logits, 0.0).log_softmax(-1)
