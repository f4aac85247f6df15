"""Fit one inverse temperature to each group of rows: the root of a decreasing function of one number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .calibration import Calibration
from .observations import CONVERGED, Observations, log_weights


class _Likelihood:
    """The mean log-likelihood of the rows of each group as a function of its beta, less the ridge."""

    def __init__(self, observed: Observations, ridge: float) -> None:
        """`observed`: [G, R, Tk], R rows in each of G groups."""
        s, self.admissible, self.targets = observed
        self.ridge = ridge
        self.used = (self.targets > 0).any(-1)  # [G, R]
        self.rows = self.used.sum(-1).clamp(min=1)
        top = torch.where(self.admissible, s, -math.inf).amax(-1, keepdim=True)
        self.scores = torch.where(self.admissible, s - top, 0.0)  # <= 0; p does not depend on a shift of the row
        self.spread = torch.where(self.used, -self.scores.amin(-1), 0.0).sum(-1) / self.rows  # [G]
        self.target_mean = (self.targets * self.scores).sum((-2, -1)) / self.rows  # [G], E_target[s]

    def slope_and_curvature(self, beta: Tensor) -> tuple[Tensor, Tensor]:
        """The derivative in a finite beta [G], and minus the second derivative."""
        p = log_weights(beta[:, None, None] * self.scores, self.admissible).exp()
        expected = (p * self.scores).sum(-1, keepdim=True)
        variance = (p * (self.scores - expected) ** 2).sum(-1)
        slope = self.target_mean - self._mean(expected.squeeze(-1)) - self.ridge * (beta - 1)
        return slope, self._mean(variance) + self.ridge

    def value(self, beta: Tensor) -> Tensor:
        """The mean log-likelihood without the ridge; beta [G] may be inf."""
        hard = (beta == math.inf)[:, None, None]
        soft = beta.clamp(max=1e300)[:, None, None] * self.scores
        logits = torch.where(hard, torch.where(self.scores < 0, -math.inf, 0.0), soft)
        logs = log_weights(logits, self.admissible)
        return self._mean(torch.where(self.targets > 0, self.targets * logs, 0.0).sum(-1))

    def _mean(self, per_row: Tensor) -> Tensor:
        return torch.where(self.used, per_row, 0.0).sum(-1) / self.rows


def fit_temperatures(per: str, observed: Observations, ridge: float, max_iterations: int) -> Calibration:
    """One beta for each group of rows [G, R, Tk]."""
    likelihood = _Likelihood(observed, ridge)
    spread = likelihood.spread
    uninformative = spread == 0
    separable = ~uninformative & ~((likelihood.targets > 0) & (likelihood.scores < 0)).any(-1).any(-1)
    if ridge > 0:
        separable = torch.zeros_like(separable)
    slope, _ = likelihood.slope_and_curvature(torch.zeros_like(spread))
    anticorrelated = ~uninformative & ~separable & (slope <= 1e-15 * spread)
    settled = uninformative | separable | anticorrelated

    beta, slope, iterations = _bracketed_newton(likelihood, settled, max_iterations)
    beta = torch.where(separable, math.inf, torch.where(uninformative, 1.0, beta))
    at_infinity = likelihood.target_mean.abs()
    residual = torch.where(separable, at_infinity, torch.where(uninformative, 0.0, slope.abs()))

    def shaped(x: Tensor) -> Tensor:
        return x[0] if per == "global" else x

    return Calibration(
        per,
        beta=shaped(beta),
        residual=shaped(residual),
        separable=shaped(separable),
        anticorrelated=shaped(anticorrelated),
        uninformative=shaped(uninformative),
        log_likelihood=shaped(likelihood.value(beta)),
        log_likelihood_before=shaped(likelihood.value(torch.ones_like(beta))),
        converged=bool((anticorrelated | (residual <= CONVERGED * spread)).all()),
        iterations=iterations,
        rows=int(likelihood.used.sum()),
    )


def _bracketed_newton(likelihood: _Likelihood, settled: Tensor, max_iterations: int) -> tuple[Tensor, Tensor, int]:
    """Newton's method from beta = 0 in every group that is not `settled`: (beta, slope there, iterations).

    A step that leaves the bracket [low, high] is replaced by the bracket's middle; from iteration 30 on, every second
    step is. Before an upper end is known, beta doubles.
    """
    spread = likelihood.spread
    beta = torch.zeros_like(spread)
    low, high = torch.zeros_like(beta), torch.full_like(beta, math.inf)
    iteration = 0
    while True:
        slope, curvature = likelihood.slope_and_curvature(beta)
        low, high = torch.where(slope >= 0, beta, low), torch.where(slope <= 0, beta, high)
        newton = beta + slope / curvature
        small = (slope.abs() <= 1e-15 * spread) | ((newton - beta).abs() <= 1e-13 * beta)
        done = settled | small | (high - low <= 4e-16 * low)
        if bool(done.all()) or iteration == max_iterations:
            return beta, slope, iteration
        outside = ~((newton > low) & (newton < high))  # True for NaN, too
        if iteration >= 30 and iteration % 2:
            outside = outside | high.isfinite()
        middle = torch.where(high.isfinite(), (low + high) / 2, 2 * beta + 1 / spread)
        beta = torch.where(done, beta, torch.where(outside, middle, newton))
        iteration += 1
