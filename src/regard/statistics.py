"""What can be read off a plan: each statistic once, by its defining formula on a block of solved rows.

Notation: y = s/tau, natural logarithms, sums over admissible keys. With a sink, `lse`, `entropy`, `kl`, `max_weight`,
`collision` and `score_variance` count the null key as a key of score b and prior 1; the others do not. Where the mass
is not 1 (relaxed, free, Rows(mass)), `entropy`, `kl` and `score_variance` are of the plan divided by its mass.
A row with no admissible key has lse, dual and max_scores -inf and everything else 0.

Of a plan with both marginals (RowsAndColumns) the same formulas are taken over its rows; `dual` is the price f of a
query, with the prices of each document's keys measured from their mean (weighted by what they receive; relaxed prices
as they are), and `value` the row's share of the optimum, sum_j p_ij (f_i + g_j): without relaxation's price of the
columns. Three statistics are of such plans only:

    column_dual      g, the price of each key's mass, [B, H, Tk]
    column_residual  how far each key is from its marginal (relaxed: from what its price asks for), [B, H, Tk]
    iterations       that it took, each two passes over the keys, [B, H]
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .checks import may_be_zero
from .form import Form, known_hard
from .parts import Scalar
from .problem import Budget, RowsAndColumns, Transport
from .regularizers import KL, Regularizer


@dataclass(frozen=True)
class AuxRequest:
    """Which statistics `attention(return_aux=...)` should return; see `regard.statistics` for each definition."""

    lse: bool = False
    dual: bool = False
    value: bool = False
    entropy: bool = False
    kl: bool = False
    max_scores: bool = False
    max_weight: bool = False
    score_variance: bool = False
    collision: bool = False
    support: bool = False
    first_key_mass: bool = False
    mass: bool = False
    cost: bool = False
    value_spread: bool = False
    key_mass: bool = False
    column_dual: bool = False
    column_residual: bool = False
    iterations: bool = False

    @classmethod
    def all(cls, problem: object = None) -> AuxRequest:
        """Every statistic that is defined for the problem (a Transport; None is softmax)."""
        problem = Transport() if problem is None else problem
        if not isinstance(problem, Transport):
            raise TypeError(f"problem: expected a Transport, got {problem!r}")
        hard = not isinstance(problem.temperature, Budget) and may_be_zero(problem.temperature)
        missing = {"lse": hard or not isinstance(problem.regularizer, KL), "score_variance": hard}
        missing |= dict.fromkeys(COLUMNS, not isinstance(problem.marginal, RowsAndColumns))
        return cls(**{f.name: not missing.get(f.name, False) for f in fields(cls)})


@dataclass(eq=False)
class AuxOutput:
    """The statistics asked for, [*batch, H, Tq] (of keys: [*batch, H, Tk], iterations: [*batch, H]); the others are
    None."""

    lse: Tensor | None = None
    dual: Tensor | None = None
    value: Tensor | None = None
    entropy: Tensor | None = None
    kl: Tensor | None = None
    max_scores: Tensor | None = None
    max_weight: Tensor | None = None
    score_variance: Tensor | None = None
    collision: Tensor | None = None
    support: Tensor | None = None
    first_key_mass: Tensor | None = None
    mass: Tensor | None = None
    cost: Tensor | None = None
    value_spread: Tensor | None = None
    key_mass: Tensor | None = None
    column_dual: Tensor | None = None
    column_residual: Tensor | None = None
    iterations: Tensor | None = None


def _flatten(aux: AuxOutput) -> tuple[list[Tensor], tuple[str, ...]]:
    names = tuple(name for name in (*NAMES, *COLUMNS) if getattr(aux, name) is not None)
    return [getattr(aux, name) for name in names], names


pytree.register_pytree_node(
    AuxOutput,
    _flatten,
    lambda tensors, names: AuxOutput(**dict(zip(names, tensors, strict=True))),
    serialized_type_name="regard.AuxOutput",
    to_dumpable_context=json.dumps,
    from_dumpable_context=lambda text: tuple(json.loads(text)),
)

COLUMNS = ("column_dual", "column_residual", "iterations")  # of plans with both marginals
NAMES = tuple(f.name for f in fields(AuxRequest) if f.name not in COLUMNS)  # of every plan, but where `undefined`
DIFFERENTIABLE = ("out", "lse", "entropy")


def requested(return_aux: object) -> tuple[str, ...]:
    """The names in an AuxRequest: ours, or PyTorch's (lse, max_scores)."""
    if return_aux is None:
        return ()
    if isinstance(return_aux, AuxRequest):
        return tuple(name for name in (*NAMES, *COLUMNS) if getattr(return_aux, name))
    if type(return_aux).__name__ == "AuxRequest" and hasattr(return_aux, "lse") and hasattr(return_aux, "max_scores"):
        return tuple(name for name in ("lse", "max_scores") if getattr(return_aux, name))
    raise TypeError(f"return_aux: expected an AuxRequest or None, got {return_aux!r}")


def undefined(name: str, form: Form) -> str | None:
    """Why this problem has no such statistic, or None."""
    if name in COLUMNS and form.marginal != "columns":
        return f"{name} is defined for RowsAndColumns only: other plans have no constraint on their columns"
    if name == "lse" and form.family != "kl":
        return (
            f"lse is defined for KL only, not for {form.regularizer!r} (dual and value are defined for every problem)"
        )
    if name in ("lse", "score_variance") and known_hard(form):
        return f"{name} is not defined at temperature 0"
    return None


@dataclass
class Solution:
    """A block of solved rows. Scores and log-priors hold 0 where a key is not admissible, weights too."""

    form: Form
    regularizer: Regularizer
    temperature: Scalar  # number or [B|1, H|1, Tq|1, 1]; 1 in a row of hard routing
    scores: Tensor  # [B, H, Tq, Tk]
    weights: Tensor  # [B, H, Tq, Tk], before dropout
    dual: Tensor  # [B, H, Tq, 1], lambda
    mu: Tensor  # [B, H, Tq, 1], the solver's own coordinate of lambda
    log_prior: Tensor | None  # broadcasts to [B, H, Tq, Tk]
    admissible: Tensor | None  # broadcasts to [B, H, Tq, Tk]
    null: Tensor | None  # [B, H, Tq, 1], weight of the null key
    rates: Tensor | None = None  # [B, H, Tq, Tk], w/tau: what a score moves its own weight by, at a fixed price
    slack: Tensor | None = None  # [B, H, Tq, 1], kappa/tau; None in free rows, where it is infinite
    output: Tensor | None = None  # [B, H, Tq, Dv], before dropout
    values: Tensor | None = None  # [B, Hkv, Tk, Dv]

    @property
    def null_score(self) -> Tensor:
        return torch.as_tensor(self.form.level, dtype=self.scores.dtype, device=self.scores.device)

    def where_admissible(self, x: Tensor, other: float) -> Tensor:
        return x if self.admissible is None else torch.where(self.admissible, x, other)

    def with_null(self, keys: Tensor, null: Tensor) -> Tensor:
        """A quantity per key, with the null key's behind it if there is one."""
        if self.null is None:
            return keys
        return torch.cat([keys, null.expand(*keys.shape[:-1], 1)], -1)

    def distribution(self) -> Tensor:
        """p / sum(p), the null key included; 0 in a row without mass."""
        p = self.weights if self.null is None else self.with_null(self.weights, self.null)
        total = p.sum(-1, keepdim=True)
        return p / torch.where(total > 0, total, 1)

    def log_prior_mass(self) -> Tensor:
        """log sum of pi over admissible keys (null key included): [B, H, Tq, 1]."""
        log_prior = torch.zeros_like(self.scores) if self.log_prior is None else self.log_prior.expand_as(self.scores)
        log_prior = self.where_admissible(log_prior, -math.inf)
        return self.with_null(log_prior, torch.zeros_like(self.dual)).logsumexp(-1, keepdim=True)


def lse(rows: Solution) -> Tensor:
    """log sum_j pi_j exp(y_j)."""
    x = rows.scores / rows.temperature
    if rows.log_prior is not None:
        x = x + rows.log_prior
    x = rows.where_admissible(x, -math.inf)
    if rows.null is not None:
        x = rows.with_null(x, rows.null_score / rows.temperature)
    top = x.detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)  # a row without keys: log 0, and a gradient of 0
    total = (x - top).exp().sum(-1, keepdim=True)
    none = total <= 0  # false for NaN, which stays
    total_log = torch.where(none, 1.0, total).log()
    return torch.where(none, -math.inf, total_log + top).squeeze(-1)


def dual(rows: Solution) -> Tensor:
    """lambda, the price of the row's mass (KL rows: tau * lse; free: minus the offset)."""
    return rows.dual.squeeze(-1)


def divergence(rows: Solution, weights: Tensor, null: Tensor | None) -> Tensor:
    """D_f(p || pi). KL rows (plain or with a sink) drop the constant sum(pi) - mass: then their value is tau * lse."""
    prior = torch.ones_like(weights) if rows.log_prior is None else rows.log_prior.exp().expand_as(weights)
    prior = rows.where_admissible(prior, 0.0)
    ratio = weights / torch.where(prior > 0, prior, 1)
    ceiling = rows.regularizer.ceiling
    beyond = ratio > ceiling * (1 + 1e-6)  # infinitely far, too; within that, rounding
    ratio = ratio.clamp(max=ceiling)
    if rows.form.family == "kl" and rows.form.marginal in ("rows", "sink"):
        log_prior = 0.0 if rows.log_prior is None else rows.log_prior
        terms = torch.xlogy(weights, weights) - weights * log_prior
        null_terms = None if null is None else torch.xlogy(null, null)
    else:
        terms = prior * rows.regularizer.f(torch.where(prior > 0, ratio, 1))
        null_terms = None if null is None else rows.regularizer.f(null)
    # Mass where the prior has none is infinitely far from it.
    terms = torch.where(prior > 0, torch.where(beyond, math.inf, terms), torch.where(weights == 0, 0.0, math.inf))
    total = terms.sum(-1)
    return total if null_terms is None else total + null_terms.squeeze(-1)


def primal(rows: Solution, weights: Tensor, null: Tensor | None) -> Tensor:
    """What a plan (any plan) achieves: <p, s> - tau D_f(p || pi), with the null key's share or relaxation's price."""
    tau = rows.form.temperature
    tau = tau.squeeze(-1) if isinstance(tau, Tensor) else tau
    total = (weights * rows.scores).sum(-1)
    level = rows.null_score
    if null is not None:
        total = total + (null * level).squeeze(-1)
    mass = weights.sum(-1)
    if rows.form.marginal == "free":
        total = total + mass * (level.squeeze(-1) if level.dim() else level)
    if rows.form.marginal == "relax":
        rho = level.squeeze(-1) if level.dim() else level
        total = total - rho * (torch.xlogy(mass, mass) - mass + 1)
    spread = divergence(rows, weights, null)
    if not isinstance(tau, Tensor):
        return total - tau * spread if tau else total
    return torch.where(tau > 0, total - tau * spread, total)


def value(rows: Solution) -> Tensor:
    """F, the optimum (KL rows: tau * lse); -inf where the rows must ship mass and no key may take it."""
    result = primal(rows, rows.weights, rows.null)
    return torch.where(rows.dual.squeeze(-1) == -math.inf, _without_keys(rows, result), result)


def _without_keys(rows: Solution, result: Tensor) -> Tensor:
    infeasible = rows.form.marginal == "rows" and rows.regularizer.ceiling == math.inf
    return torch.full_like(result, -math.inf) if infeasible else result


def entropy(rows: Solution) -> Tensor:
    """-sum_j p_j log p_j."""
    p = rows.distribution()
    none = p <= 0  # false for NaN, which stays
    return -torch.where(none, 0.0, p * torch.where(none, 1.0, p).log()).sum(-1)


def kl(rows: Solution) -> Tensor:
    """KL divergence to the prior normalised over the admissible keys."""
    p = rows.distribution()
    log_prior = torch.zeros_like(rows.scores) if rows.log_prior is None else rows.log_prior.expand_as(rows.scores)
    log_prior = rows.with_null(log_prior, torch.zeros_like(rows.dual))
    none = p <= 0  # false for NaN, which stays
    total = torch.where(none, 0.0, p * (torch.where(none, 1.0, p).log() - log_prior)).sum(-1)
    log_mass = rows.log_prior_mass().squeeze(-1)
    return torch.where(p.sum(-1) <= 0, 0.0, total + log_mass).clamp(min=0)


def max_scores(rows: Solution) -> Tensor:
    """Largest admissible score s, before the temperature (null key excluded)."""
    return rows.where_admissible(rows.scores, -math.inf).amax(-1)


def max_weight(rows: Solution) -> Tensor:
    """Largest p."""
    top = rows.weights.amax(-1)
    return top if rows.null is None else torch.maximum(top, rows.null.squeeze(-1))


def score_variance(rows: Solution) -> Tensor:
    """Var_p(y): how much the entropy answers to the temperature."""
    p = rows.distribution()
    scores = rows.scores
    if rows.null is not None:
        scores = rows.with_null(scores, rows.null_score)
    # Centred before squaring, first at the heaviest key: a common offset must not cost digits.
    anchor = scores.gather(-1, p.argmax(-1, keepdim=True))
    y = torch.where(p > 0, (scores - anchor) / rows.temperature, 0.0)
    mean = (p * y).sum(-1, keepdim=True)
    return (p * (y - mean) ** 2).sum(-1)


def collision(rows: Solution) -> Tensor:
    """sum_j p_j^2; its inverse counts the keys that take part."""
    total = (rows.weights**2).sum(-1)
    return total if rows.null is None else total + rows.null.squeeze(-1) ** 2


def support(rows: Solution) -> Tensor:
    """Number of keys with p > 0, of the exact plan: under KL and Fermi-Dirac every admissible key has some."""
    weights = rows.weights
    count = (weights > 0).to(weights.dtype).sum(-1)
    if rows.form.family in ("kl", "fermi_dirac"):
        counted, count = count, rows.where_admissible(torch.ones_like(weights), 0.0).sum(-1)
        if rows.form.hard:
            cold = torch.as_tensor(rows.form.temperature, device=count.device) == 0
            count = torch.where(cold.squeeze(-1) if cold.dim() else cold, counted, count)
    return torch.where(weights.isnan().any(-1), math.nan, count)


def first_key_mass(rows: Solution) -> Tensor:
    """p of key 0."""
    first = rows.weights[..., 0]
    return first if rows.form.first_key == 0 else torch.zeros_like(first)


def mass(rows: Solution) -> Tensor:
    """sum_j p_j over real keys."""
    return rows.weights.sum(-1)


def cost(rows: Solution) -> Tensor:
    """-sum_j p_j s_j, the transport cost."""
    return -(rows.weights * rows.scores).sum(-1)


def value_spread(rows: Solution) -> Tensor:
    """sum_j p_j |v_j|^2 - |o|^2."""
    assert rows.values is not None and rows.output is not None
    group = rows.weights.shape[1] // max(1, rows.values.shape[1])
    # Values are measured from their mean: |v|^2 and |o|^2 would cancel under a large common offset.
    centre = rows.values.mean(2, keepdim=True) if rows.values.shape[2] else rows.values.sum(2, keepdim=True)
    squares = ((rows.values - centre) ** 2).sum(-1).repeat_interleave(group, 1)  # [B, H, Tk]
    centre = centre.repeat_interleave(group, 1)
    n = squares.shape[-1]
    second = (rows.weights[..., :n] * squares[:, :, None]).sum(-1)
    mass = rows.weights.sum(-1)
    short = 1 - mass
    if rows.null is not None:
        short = rows.null.squeeze(-1)
    elif (
        rows.form.marginal == "rows" and rows.regularizer.ceiling == math.inf
    ):  # known exactly, and what follows may be huge
        short = torch.where(mass > 0, 1 - rows.form.mass, 1.0)
    missing = short * (centre**2).sum(-1)
    return second - ((rows.output - centre) ** 2).sum(-1) + missing


def key_mass(rows: Solution) -> Tensor:
    """sum_i p_ij over queries: [B, H, Tk]."""
    return rows.weights.sum(-2)


STATISTICS: dict[str, Callable[[Solution], Tensor]] = {
    f.__name__: f
    for f in (
        lse,
        dual,
        value,
        entropy,
        kl,
        max_scores,
        max_weight,
        score_variance,
        collision,
        support,
        first_key_mass,
        mass,
        cost,
        value_spread,
        key_mass,
    )
}
assert tuple(STATISTICS) == NAMES
