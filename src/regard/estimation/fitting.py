"""`calibrate`: fit temperatures, or multipliers of keys, to the choices that were observed."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from .._validate import describe, is_integer, number
from .calibration import Calibration
from .multipliers import fit_multipliers
from .observations import read_observations
from .temperatures import fit_temperatures


@torch.no_grad()
def calibrate(
    scores: Tensor,
    targets: Tensor,
    *,
    per: Literal["global", "head", "key"] = "global",
    ridge: float = 0.0,
    max_iterations: int = 100,
) -> Calibration:
    """Fit inverse temperatures to observed choices by maximum likelihood: p_j ~ exp(beta s_j), beta >= 0.

    scores [..., Tk]: -inf marks a key that is not admissible, as does a score below half the dtype's lowest number,
    which some masks use. targets: chosen keys, integers [...], or distributions over keys [..., Tk]. A row is left out
    where its target is negative, or a distribution of zeros.

        per="global"   one beta
        per="head"     one for each head of scores [..., H, Tq, Tk] (the third dimension from the end)
        per="key"      one multiplier for each key, p_j ~ exp(lambda_j s_j), of either sign

    The likelihood is concave, and at its maximum the moments match: E_target[s] = E_model[s] ("key": for each key by
    itself). It is found by Newton's method in float64, safeguarded by a bracket or a line search. If there is no
    maximum, or none with beta >= 0, the result reports it: see `Calibration`. `ridge` subtracts ridge/2 (beta - 1)^2
    from the mean log-likelihood, which then always has a maximum. "key" stores a Tk x Tk matrix. If several keys'
    multipliers have to go to infinity together, "key" detects it numerically, which is not a proof.
    """
    if per not in ("global", "head", "key"):
        raise ValueError(f'per: expected "global", "head" or "key", got {describe(per)}')
    ridge = number("ridge", ridge, "a finite number >= 0", lambda x: 0 <= x < math.inf)
    if not is_integer(max_iterations) or max_iterations < 1:
        raise ValueError(f"max_iterations: expected a positive int, got {describe(max_iterations)}")
    observed = read_observations(scores, targets)
    if per == "key":
        return fit_multipliers(observed.map(lambda x: x.reshape(-1, x.shape[-1])), ridge, max_iterations)
    if per == "global":
        return fit_temperatures(per, observed.map(lambda x: x.reshape(1, -1, x.shape[-1])), ridge, max_iterations)
    if scores.dim() < 3:
        raise ValueError(f'scores: expected shape [..., H, Tq, Tk] for per="head", got {list(scores.shape)}')
    return fit_temperatures(per, observed.map(lambda x: x.movedim(-3, 0).flatten(1, -2)), ridge, max_iterations)
