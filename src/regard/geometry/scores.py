"""Functions of scores or weights, which store the plan: its gradient, its metric, and the natural gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._validate import Scalar, check_scalar, check_values, describe, is_integer, positive
from ..backends import row_equation
from ..form import Form
from ..lowering import lower_scores
from ..problem import Transport
from .inputs import broadcast_like, check_floating, check_temperature


def advantage(weights: Tensor, utility: Tensor) -> Tensor:
    """u - b: how much better each key is than the row's average b = sum w u / sum w; both arguments are [..., Tk].

    For weights that sum to 1, b is the expected utility. A row whose weights are all 0 has b = 0.
    """
    weights, utility = check_floating("weights", weights), broadcast_like("utility", utility, "weights", weights)
    total = weights.sum(-1, keepdim=True)
    spent = (weights * torch.where(weights == 0, 0.0, utility)).sum(-1, keepdim=True)
    return utility - torch.where(total == 0, 0.0, spent / torch.where(total == 0, 1.0, total))


def policy_gradient(scores: Tensor, utility: Tensor, problem: Transport | None = None) -> Tensor:
    """The exact dL/ds [..., Tk] for u = dL/dp, by the closed form (w/tau) (u - sum w u / (sum w + kappa)).

    A row of it sums to 0 if and only if kappa = 0, that is if the row of the plan must sum to its mass.
    """
    utility = broadcast_like("utility", utility, "scores", check_floating("scores", scores))
    rows = _rows(scores, problem)
    return (rows.rates * row_equation.centred(rows.rates, rows.slack, utility)).to(scores.dtype)


def sampled_policy_gradient(
    scores: Tensor,
    utility: Tensor,
    problem: Transport | None = None,
    samples: int = 1024,
    baseline: bool = True,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The score-function (REINFORCE) estimate of `policy_gradient` from sampled keys: (gradient, variance).

    A key J is drawn with probability rho = w / (sum w + kappa) (KL rows: the plan itself). The remaining probability is
    that of no key, which has utility 0: it belongs to the null key, or to the slack of relaxed rows. One draw estimates

        (sum w + kappa)/tau * (u_J - b) * (e_J - rho)          (KL rows: (u_J - b) times the gradient of log p_J)

    without bias for any b: `baseline=False` sets b = 0, `baseline=True` uses the b of the exact gradient. Free rows are
    not a distribution and have no baseline: their estimate is (sum w)/tau * u_J e_J with rho = w / sum w.

    gradient [..., Tk] is the mean over the samples. variance [...] is that of one draw, measured over the samples and
    summed over the keys; divide it by `samples` for the variance of the gradient. It is NaN for one sample.
    """
    utility = broadcast_like("utility", utility, "scores", check_floating("scores", scores))
    if not is_integer(samples) or samples < 1:
        raise ValueError(f"samples: expected a positive int, got {describe(samples)}")
    if not isinstance(baseline, bool):
        raise TypeError(f"baseline: expected a bool, got {describe(baseline)}")
    rows = _rows(scores, problem)
    rates, slack = rows.rates, rows.slack
    free = slack is None
    slack = torch.zeros_like(rates[..., :1]) if slack is None else slack
    utility = torch.where(rates > 0, utility, 0.0)
    total = rates.sum(-1, keepdim=True) + slack  # (sum w + kappa)/tau
    moves = total > 0
    chances = torch.cat([rates, slack], -1) / torch.where(moves, total, 1.0)
    b = (chances[..., :-1] * utility).sum(-1, keepdim=True) if baseline and not free else torch.zeros_like(total)
    gains = total * (torch.cat([utility, torch.zeros_like(b)], -1) - b)  # of each outcome; the last one is no key

    # A row with total 0 has gains of 0 for every outcome, so any distribution will do.
    drawable = torch.where(moves, chances, 1.0).reshape(-1, chances.shape[-1])
    drawn = torch.multinomial(drawable, samples, replacement=True, generator=generator)
    counts = torch.zeros_like(drawable).scatter_add_(1, drawn, torch.ones_like(drawn, dtype=rates.dtype))
    shares = counts.view_as(chances) / samples
    hits, rho = (shares * gains)[..., :-1], chances[..., :-1]
    if free:
        gradient, square = hits, (hits * gains[..., :-1]).sum(-1)
    else:
        gradient = hits - rho * (shares * gains).sum(-1, keepdim=True)
        # |e_j - rho|^2 over the keys; the last outcome has no e.
        norms = torch.cat([1 - 2 * rho, torch.zeros_like(b)], -1) + rho.square().sum(-1, keepdim=True)
        square = (shares * gains.square() * norms).sum(-1)
    spread = (square - gradient.square().sum(-1)).clamp(min=0)
    variance = spread * (samples / (samples - 1)) if samples > 1 else torch.full_like(spread, torch.nan)
    return gradient.to(scores.dtype), variance.to(scores.dtype)


def fisher(weights: Tensor, temperature: Scalar = 1.0) -> Tensor:
    """Fisher information of the scores of a softmax row, tau^-2 (diag p - p p^T): [..., Tk] -> [..., Tk, Tk].

    If the weights sum to less than 1, the rest is the weight of a null key. A tensor `temperature` broadcasts to
    [..., 1].
    """
    weights = check_floating("weights", weights)
    if weights.dim() < 1:
        raise ValueError(f"weights: expected shape [..., Tk], got {list(weights.shape)}")
    check_scalar("temperature", temperature, "a positive, finite number", positive)
    check_values("temperature", temperature, "temperature > 0", lambda tau: (tau > 0) & tau.isfinite())
    if isinstance(temperature, Tensor) and temperature.dim():
        try:
            temperature = temperature.expand(*weights.shape[:-1], 1)[..., None]
        except RuntimeError:
            raise ValueError(
                f"temperature: expected a shape that broadcasts to {[*weights.shape[:-1], 1]}, "
                f"got {list(temperature.shape)}"
            ) from None
    off = -weights[..., :, None] * weights[..., None, :]
    matrix = torch.diagonal_scatter(off, weights * (1 - weights), 0, -2, -1)
    return (matrix / temperature**2).to(weights.dtype)


def potential_hessian(scores: Tensor, problem: Transport | None = None) -> Tensor:
    """The Hessian of the potential F, which is dp/ds, tau times the metric: [..., Tk] -> [..., Tk, Tk].

    It is (diag w - w w^T / (sum w + kappa))/tau. For KL rows it is tau times `fisher`, the Hessian of F/tau = lse.
    """
    rows = _rows(check_floating("scores", scores), problem)
    rates, slack = rows.rates, rows.slack
    if slack is None:
        return torch.diag_embed(rates).to(scores.dtype)
    total = rates.sum(-1, keepdim=True) + slack
    shares = rates / torch.where(total > 0, total, 1.0)
    off = torch.diagonal_scatter(-rates[..., :, None] * shares[..., None, :], torch.zeros_like(rates), 0, -2, -1)
    # The diagonal comes from the sum of the others: w (1 - w/sum w) would lose its digits in a row near one-hot.
    return torch.diagonal_scatter(off, shares * slack - off.sum(-1), 0, -2, -1).to(scores.dtype)


def natural_gradient(scores: Tensor, utility: Tensor, problem: Transport | None = None) -> Tensor:
    """M^+ dL/ds, the direction of steepest ascent in the plan's own metric, [..., Tk]; 0 outside of the support.

    Where the rows must sum to their mass, a common shift of the scores does not change the plan. The pseudoinverse M^+
    (Moore and Penrose) then gives tau (u - the unweighted mean of u over the support). For other marginals a shift
    changes the plan, and the result is tau u. It does not vanish where the plan saturates. Under KL and Fermi-Dirac the
    support is the set of admissible keys.
    """
    utility = broadcast_like("utility", utility, "scores", check_floating("scores", scores))
    rows = _rows(scores, problem)
    strict = rows.form.family in ("kl", "fermi_dirac")  # every admissible key has weight > 0, which may underflow
    support = rows.admissible if strict else rows.rates > 0
    support = support & (rows.rates > 0).any(-1, keepdim=True)
    utility = torch.where(support, utility, 0.0)
    if rows.slack is not None:
        singular = rows.form.marginal == "rows" if strict else rows.slack == 0
        count = support.sum(-1, keepdim=True).clamp(min=1)
        utility = utility - torch.where(support & singular, utility.sum(-1, keepdim=True) / count, 0.0)
    return (rows.temperature * utility).to(scores.dtype)


@dataclass
class _Rows:
    """The solution of each row, in the caller's shape."""

    form: Form
    rates: Tensor  # [..., Tk], w/tau
    slack: Tensor | None  # [..., 1], kappa/tau; None if infinite
    temperature: Scalar  # a number or [..., 1]
    admissible: Tensor  # [..., Tk]


def _rows(scores: Tensor, problem: Transport | None) -> _Rows:
    form, folded = lower_scores(scores, Transport() if problem is None else problem)
    check_temperature(problem, form)
    rows = row_equation.solve_rows(form, folded, order=2, rates=True)
    rates, slack, temperature, admissible = rows.rates, rows.slack, rows.temperature, rows.admissible
    assert rates is not None and admissible is not None  # scores may be -inf, so there is always a mask
    lead, Tk = scores.shape[:-1], scores.shape[-1]
    if slack is not None:
        slack = slack.reshape(*lead, 1)
    if isinstance(temperature, Tensor):
        temperature = temperature.expand(*folded.shape[:3], 1).reshape(*lead, 1)
    admissible = admissible.expand(rates.shape)[..., :Tk].reshape(scores.shape)
    return _Rows(form, rates[..., :Tk].reshape(scores.shape), slack, temperature, admissible)
