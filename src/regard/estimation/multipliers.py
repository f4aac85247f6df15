"""Fit one multiplier to each key: maximize a concave function of Tk numbers.

If the likelihood has no maximum, there is a direction d along which it grows for ever: no target's d_j s_j becomes
smaller than the largest of its row, and that of some other keys does. In the limit those keys have no mass in that row.
They are removed from the row, and the other keys are fitted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .calibration import Calibration
from .observations import CONVERGED, Observations, log_weights


class _Likelihood:
    """The mean log-likelihood of rows [R, Tk] as a function of the multipliers [Tk], less the ridge."""

    def __init__(self, observed: Observations, ridge: float) -> None:
        used = (observed.targets > 0).any(-1)
        self.scores, self.admissible, self.targets = observed.map(lambda x: x[used])
        self.ridge = ridge
        self.rows = max(1, len(self.scores))
        self.size = self.scores.abs().sum(0) / self.rows  # [Tk], the size of each key's moment

    def value(self, beta: Tensor) -> Tensor:
        """The mean log-likelihood without the ridge."""
        logs = log_weights(beta * self.scores, self.admissible)
        return torch.where(self.targets > 0, self.targets * logs, 0.0).sum() / self.rows

    def objective(self, beta: Tensor) -> Tensor:
        return self.value(beta) - self.ridge / 2 * ((beta - 1) ** 2).sum()

    def weights(self, beta: Tensor) -> Tensor:
        return log_weights(beta * self.scores, self.admissible).exp() if len(self.scores) else self.scores

    def gradient(self, p: Tensor, beta: Tensor) -> Tensor:
        """Of the objective at beta, where the weights are p."""
        return ((self.targets - p) * self.scores).sum(0) / self.rows - self.ridge * (beta - 1)

    def newton_step(self, p: Tensor, gradient: Tensor) -> Tensor:
        moments = p * self.scores
        hessian = torch.diag((moments * self.scores).sum(0)) - moments.mT @ moments
        identity = torch.eye(len(gradient), dtype=torch.float64)
        return _solve(hessian / self.rows + self.ridge * identity, gradient)

    def gaps(self, direction: Tensor) -> Tensor:
        """How far the logit of each admissible key is below the largest of its row, if logits are direction_j s_j."""
        return _gaps(direction * self.scores, self.admissible)


def fit_multipliers(observed: Observations, ridge: float, max_iterations: int) -> Calibration:
    """One multiplier for each key from rows [R, Tk]."""
    likelihood = _Likelihood(observed, ridge)
    (R, Tk), scores = likelihood.scores.shape, likelihood.scores
    uninformative = ~(_contested(likelihood.admissible) & (scores != 0)).any(0)
    beta = torch.ones(Tk, dtype=torch.float64)
    before = likelihood.value(beta)
    infinite = torch.zeros(Tk, dtype=torch.float64)  # -1, 0 or 1: the sign of a multiplier that is infinite
    while ridge == 0:  # single keys whose multiplier is infinite; this test is exact
        direction = _receding_keys(scores, likelihood.admissible, likelihood.targets)
        gaps = likelihood.gaps(direction)
        if not bool((gaps > 0).any()):
            break
        infinite = torch.where(infinite == 0, direction, infinite)
        likelihood.admissible = likelihood.admissible & (gaps == 0)

    gradient, done, iteration = torch.zeros_like(beta), False, 0
    for iteration in range(max_iterations + 1):
        p = likelihood.weights(beta)
        gradient = likelihood.gradient(p, beta)
        if done or iteration == max_iterations:
            break
        step = likelihood.newton_step(p, gradient)
        move = float(likelihood.gaps(step).amax()) if R else 0.0  # the largest change of a logit within its row
        if ridge == 0 and move > 0.1 and bool((gradient.abs() <= 1e-6 * likelihood.size).all()):
            # The gradient vanishes, but the maximum is far away: it may be at infinity.
            found = _receding_direction((step, beta), scores, likelihood.admissible, likelihood.targets)
            if found is not None:
                direction, likelihood.admissible = found
                infinite = torch.where(infinite == 0, direction, infinite)
                continue
        done = move <= 1e-9  # this step squares the error, which is then below rounding
        beta = beta + _step_length(likelihood, beta, step, gradient) * step
    residual = gradient.abs()
    return Calibration(
        "key",
        beta=torch.where(infinite != 0, infinite * math.inf, beta),
        residual=residual,
        separable=infinite != 0,
        anticorrelated=torch.zeros(Tk, dtype=torch.bool),
        uninformative=uninformative,
        log_likelihood=likelihood.value(beta),
        log_likelihood_before=before,
        converged=done and bool((residual <= CONVERGED * likelihood.size).all()),
        iterations=iteration,
        rows=R,
    )


def _step_length(likelihood: _Likelihood, beta: Tensor, step: Tensor, gradient: Tensor) -> float:
    """The largest of 1, 1/2, 1/4 ... for which the objective rises enough (Armijo's condition, within rounding)."""
    length, now, rise = 1.0, float(likelihood.objective(beta)), float(gradient @ step)
    rounding = 1e-14 * (1 + abs(now))
    while length > 1e-10 and not likelihood.objective(beta + length * step) >= now + 1e-4 * length * rise - rounding:
        length /= 2
    return length


def _contested(admissible: Tensor) -> Tensor:
    """Admissible keys of the rows that have at least two."""
    return admissible & (admissible.sum(-1, keepdim=True) > 1)


def _gaps(z: Tensor, admissible: Tensor) -> Tensor:
    """How far each admissible key is below the largest of its row; 0 for the others."""
    top = torch.where(admissible, z, -math.inf).amax(-1, keepdim=True)
    return torch.where(admissible, top - z, 0.0)


def _receding_keys(s: Tensor, admissible: Tensor, t: Tensor) -> Tensor:
    """1 (or -1) for each key whose multiplier can go to inf (or -inf) without lowering any target; [Tk]."""
    contested = _contested(admissible)

    def harmless(s: Tensor) -> Tensor:
        harm = torch.where(t >= 1, s < 0, torch.where(t <= 0, s > 0, s != 0))
        return ~(contested & harm).any(0) & (contested & (s != 0)).any(0)

    return harmless(s).double() - harmless(-s).double()


def _receding_direction(
    directions: tuple[Tensor, ...], s: Tensor, admissible: Tensor, t: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The first of these directions that lowers other keys but no target, within rounding.

    Gives its signs, and the keys that it does not lower; None if there is no such direction."""
    for direction in directions:
        z = torch.where(admissible, direction * s, 0.0)
        gaps, reach = _gaps(z, admissible), z.abs().amax(-1, keepdim=True)
        lowered = gaps > 1e-5 * reach + 1e-8 * reach.amax()
        if bool(lowered.any()) and not bool((lowered & (t > 0)).any()):
            moving = z.abs().amax(0) > 1e-5 * reach.amax()
            return torch.where(moving, direction.sign(), 0.0), admissible & ~lowered
    return None


def _solve(hessian: Tensor, gradient: Tensor) -> Tensor:
    """hessian^-1 gradient by Cholesky. The matrix may be singular: its diagonal is scaled to 1, and the smallest of a
    few dampings is added with which the factorization succeeds."""
    unit = hessian.diagonal().clamp(min=0).sqrt()
    unit = torch.where(unit > 0, unit, 1.0)
    scaled, identity = hessian / unit / unit[:, None], torch.eye(len(unit), dtype=torch.float64)
    for damping in (1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2):
        factor, failed = torch.linalg.cholesky_ex(scaled + damping * identity)
        if not int(failed):
            return torch.cholesky_solve((gradient / unit)[:, None], factor)[:, 0] / unit
    return gradient / unit**2
