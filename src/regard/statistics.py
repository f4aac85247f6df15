"""The statistics of a plan. Each is defined once, by its formula on a block of solved rows.

Notation: y = s/tau, natural logarithms, sums over admissible keys. With a sink, `lse`, `entropy`, `kl`, `max_weight`,
`collision` and `score_variance` count the null key as a key of score b and prior 1; the others do not. Where the mass
is not 1 (relaxed, free, Rows(mass)), `entropy`, `kl` and `score_variance` are of the plan divided by its mass.
A row with no admissible key has lse, dual and max_scores -inf and everything else 0.

For a plan with both marginals (RowsAndColumns) the same formulas hold for its rows. `dual` is the price f of a query;
the prices of each document's keys are measured from their mean (weighted by what they receive), unless the columns are
relaxed. `value` is the row's share of the optimum, sum_j p_ij (f_i + g_j), without the penalty of relaxed columns.
Three statistics exist for such plans only: `column_dual`, `column_residual` and `iterations`.

A statistic is one function with the decorator `statistic`, which makes it a field of AuxRequest and AuxOutput and
states its shape. A backend that has no kernel for it declines it by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ._compat import pytree
from ._display import Displayed
from ._validate import Scalar, may_be_zero
from .convex import x_log_x
from .form import Form
from .problem import RowsAndColumns, TemperatureRule, Transport
from .regularizers import Regularizer

# --- the rows that a statistic is computed from -----------------------------------------------------------------------


@dataclass
class Solution:
    """A block of solved rows. Scores, log-priors and weights hold 0 where a key is not admissible."""

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
    rates: Tensor | None = None  # [B, H, Tq, Tk], w/tau: the derivative of a weight by its score at a fixed price
    slack: Tensor | None = None  # [B, H, Tq, 1], kappa/tau; None in free rows, where it is infinite
    output: Tensor | None = None  # [B, H, Tq, Dv], before dropout
    values: Tensor | None = None  # [B, Hkv, Tk, Dv]
    silent: Tensor | None = None  # the density where it is 0 and the key is read, 0 elsewhere: it has a derivative
    silent_scores: Tensor | None = None  # [B, H, Tq, Tk], the scores of those keys, 0 elsewhere

    @property
    def null_score(self) -> Tensor:
        return torch.as_tensor(self.form.marginal_parameter, dtype=self.scores.dtype, device=self.scores.device)

    def where_admissible(self, x: Tensor, other: float) -> Tensor:
        return x if self.admissible is None else torch.where(self.admissible, x, other)

    def with_null(self, keys: Tensor, null: Tensor) -> Tensor:
        """A quantity per key, with that of the null key appended if there is one."""
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


# --- what a statistic is ----------------------------------------------------------------------------------------------

Formula = Callable[[Solution], Tensor]


class Statistic(NamedTuple):
    """One entry of the table."""

    formula: Formula
    per: str  # one number per "query", per "key" or per "head"
    differentiable: bool
    undefined: Callable[[Form], str | None] | None  # why a problem has no such statistic; None: every problem has it


STATISTICS: dict[str, Statistic] = {}


def statistic(
    *, per: str = "query", differentiable: bool = False, undefined: Callable[[Form], str | None] | None = None
) -> Callable[[Formula], Formula]:
    """Make a function of solved rows a statistic. Its name is the statistic's, its docstring the definition."""

    def register(formula: Formula) -> Formula:
        STATISTICS[formula.__name__] = Statistic(formula, per, differentiable, undefined)
        return formula

    return register


def _at_temperature_zero(name: str) -> Callable[[Form], str | None]:
    return lambda form: f"{name} is not defined at temperature 0" if form.known_hard else None


def _lse_undefined(form: Form) -> str | None:
    if form.family != "kl":
        name = repr(form.regularizer)
        return f"lse is defined for KL only, not for {name} (dual and value are defined for every problem)"
    return _at_temperature_zero("lse")(form) if form.hard else None


# --- the statistics ---------------------------------------------------------------------------------------------------


@statistic(differentiable=True, undefined=_lse_undefined)
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
    total = (x - top).exp().sum(-1, keepdim=True) + _silent_total(rows, top)
    none = total <= 0  # false for NaN, which stays NaN
    total_log = torch.where(none, 1.0, total).log()
    return torch.where(none, -math.inf, total_log + top).squeeze(-1)


def _silent_total(rows: Solution, top: Tensor) -> Tensor | float:
    """What keys of density 0 add to sum_j pi_j exp(y_j - top): 0, with a derivative by the density."""
    if rows.silent is None or rows.silent_scores is None:
        return 0.0
    x = rows.silent_scores / rows.temperature - top
    x = x if rows.log_prior is None else x + rows.log_prior
    highest = math.log(torch.finfo(x.dtype).max)  # such a key may be far above the others: 0 * inf would be NaN
    return (rows.silent * torch.where(x > highest, highest, x).exp()).sum(-1, keepdim=True)


@statistic()
def dual(rows: Solution) -> Tensor:
    """lambda, the price of the row's mass (KL rows: tau * lse; free: minus the offset)."""
    return rows.dual.squeeze(-1)


def divergence(rows: Solution, weights: Tensor, null: Tensor | None) -> Tensor:
    """D_f(p || pi). KL rows (plain or with a sink) drop the constant sum(pi) - mass: then their value is tau * lse."""
    prior = torch.ones_like(weights) if rows.log_prior is None else rows.log_prior.exp().expand_as(weights)
    prior = rows.where_admissible(prior, 0.0)
    ratio = weights / torch.where(prior > 0, prior, 1)
    ceiling = rows.regularizer.ceiling
    beyond = ratio > ceiling * (1 + 1e-6)  # infinitely far, too; a smaller excess is rounding
    ratio = ratio.clamp(max=ceiling)
    if rows.form.family == "kl" and rows.form.marginal in ("rows", "sink"):
        log_prior = 0.0 if rows.log_prior is None else rows.log_prior
        terms = x_log_x(weights) - weights * log_prior
        null_terms = None if null is None else x_log_x(null)
    else:
        terms = prior * rows.regularizer.f(torch.where(prior > 0, ratio, 1))
        null_terms = None if null is None else rows.regularizer.f(null)
    # Mass where the prior is 0 is infinitely far from it.
    terms = torch.where(prior > 0, torch.where(beyond, math.inf, terms), torch.where(weights == 0, 0.0, math.inf))
    total = terms.sum(-1)
    return total if null_terms is None else total + null_terms.squeeze(-1)


def primal(rows: Solution, weights: Tensor, null: Tensor | None) -> Tensor:
    """The objective of any plan: <p, s> - tau D_f(p || pi), with the terms of a null key, an offset or a relaxation."""
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
        total = total - rho * (x_log_x(mass) - mass + 1)
    spread = divergence(rows, weights, null)
    if not isinstance(tau, Tensor):
        return total - tau * spread if tau else total
    return torch.where(tau > 0, total - tau * spread, total)


@statistic()
def value(rows: Solution) -> Tensor:
    """F, the optimum (KL rows: tau * lse); -inf where a row must send mass and has no admissible key."""
    result = primal(rows, rows.weights, rows.null)
    return torch.where(rows.dual.squeeze(-1) == -math.inf, _without_keys(rows, result), result)


def _without_keys(rows: Solution, result: Tensor) -> Tensor:
    infeasible = rows.form.marginal == "rows" and rows.regularizer.ceiling == math.inf
    return torch.full_like(result, -math.inf) if infeasible else result


@statistic(differentiable=True)
def entropy(rows: Solution) -> Tensor:
    """-sum_j p_j log p_j."""
    return -x_log_x(rows.distribution()).sum(-1)


@statistic()
def kl(rows: Solution) -> Tensor:
    """KL divergence to the prior normalised over the admissible keys."""
    p = rows.distribution()
    log_prior = torch.zeros_like(rows.scores) if rows.log_prior is None else rows.log_prior.expand_as(rows.scores)
    log_prior = rows.with_null(log_prior, torch.zeros_like(rows.dual))
    none = p <= 0  # false for NaN, which stays NaN
    total = torch.where(none, 0.0, p * (torch.where(none, 1.0, p).log() - log_prior)).sum(-1)
    log_mass = rows.log_prior_mass().squeeze(-1)
    return torch.where(p.sum(-1) <= 0, 0.0, total + log_mass).clamp(min=0)


@statistic()
def max_scores(rows: Solution) -> Tensor:
    """Largest admissible score s, before the temperature (null key excluded)."""
    return rows.where_admissible(rows.scores, -math.inf).amax(-1)


@statistic()
def max_weight(rows: Solution) -> Tensor:
    """Largest p."""
    top = rows.weights.amax(-1)
    return top if rows.null is None else torch.maximum(top, rows.null.squeeze(-1))


@statistic(undefined=_at_temperature_zero("score_variance"))
def score_variance(rows: Solution) -> Tensor:
    """Var_p(y): how strongly the entropy depends on the temperature."""
    p = rows.distribution()
    scores = rows.scores
    if rows.null is not None:
        scores = rows.with_null(scores, rows.null_score)
    # Centred before squaring, first at the heaviest key: a common offset must not cost digits.
    anchor = scores.gather(-1, p.argmax(-1, keepdim=True))
    y = torch.where(p > 0, (scores - anchor) / rows.temperature, 0.0)
    mean = (p * y).sum(-1, keepdim=True)
    return (p * (y - mean) ** 2).sum(-1)


@statistic()
def collision(rows: Solution) -> Tensor:
    """sum_j p_j^2. Its inverse is an effective number of keys."""
    total = (rows.weights**2).sum(-1)
    return total if rows.null is None else total + rows.null.squeeze(-1) ** 2


@statistic()
def support(rows: Solution) -> Tensor:
    """Number of keys with p > 0 in the exact plan. Under KL and Fermi-Dirac these are all admissible keys."""
    weights = rows.weights
    count = (weights > 0).to(weights.dtype).sum(-1)
    if rows.regularizer.full_support:
        counted, count = count, rows.where_admissible(torch.ones_like(weights), 0.0).sum(-1)
        if rows.form.hard:
            cold = torch.as_tensor(rows.form.temperature, device=count.device) == 0
            count = torch.where(cold.squeeze(-1) if cold.dim() else cold, counted, count)
    return torch.where(weights.isnan().any(-1), math.nan, count)


@statistic()
def first_key_mass(rows: Solution) -> Tensor:
    """p of key 0."""
    first = rows.weights[..., 0]
    return first if rows.form.first_key == 0 else torch.zeros_like(first)


@statistic()
def mass(rows: Solution) -> Tensor:
    """sum_j p_j over real keys."""
    return rows.weights.sum(-1)


@statistic()
def cost(rows: Solution) -> Tensor:
    """-sum_j p_j s_j, the transport cost."""
    return -(rows.weights * rows.scores).sum(-1)


@statistic()
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
    elif rows.form.marginal == "rows" and rows.regularizer.ceiling == math.inf:
        # The mass is known exactly. Its rounding error would be multiplied by the centre, which may be huge.
        short = torch.where(mass > 0, 1 - rows.form.mass, 1.0)
    missing = short * (centre**2).sum(-1)
    return second - ((rows.output - centre) ** 2).sum(-1) + missing


@statistic(per="key")
def key_mass(rows: Solution) -> Tensor:
    """sum_i p_ij over queries: [B, H, Tk]."""
    return rows.weights.sum(-2)


# --- statistics of plans with both marginals --------------------------------------------------------------------------


def _columns_only(name: str) -> Callable[[Form], str | None]:
    text = f"{name} is defined for RowsAndColumns only: other plans have no constraint on their columns"
    return lambda form: None if form.marginal == "columns" else text


def _no_formula(rows: Solution) -> Tensor:
    raise NotImplementedError(
        "the solver for both marginals computes this statistic; it has no formula for single rows"
    )


ROW_STATISTICS = tuple(STATISTICS)
STATISTICS |= {
    # g, the price of each key's mass
    "column_dual": Statistic(_no_formula, "key", False, _columns_only("column_dual")),
    # how far each key is from its marginal (relaxed: from the mass that its price implies)
    "column_residual": Statistic(_no_formula, "key", False, _columns_only("column_residual")),
    # the iterations of the solver, each two passes over the keys
    "iterations": Statistic(_no_formula, "head", False, _columns_only("iterations")),
}
COLUMN_STATISTICS = tuple(name for name in STATISTICS if name not in ROW_STATISTICS)
DIFFERENTIABLE = ("out", *(name for name, found in STATISTICS.items() if found.differentiable))


def undefined(name: str, form: Form) -> str | None:
    """Why this problem has no such statistic, or None."""
    reason = STATISTICS[name].undefined
    if reason is None:
        return None
    return reason(form)


# --- requesting statistics --------------------------------------------------------------------------------------------


def _all(cls: type[AuxRequest], problem: object = None) -> AuxRequest:
    """Every statistic that is defined for the problem (a Transport; None is softmax)."""
    problem = Transport() if problem is None else problem
    if not isinstance(problem, Transport):
        raise TypeError(f"problem: expected a Transport, got {problem!r}")
    hard = not isinstance(problem.temperature, TemperatureRule) and may_be_zero(problem.temperature)
    assert problem.regularizer is not None
    form = Form(family=problem.regularizer.family, declared=problem.regularizer, hard=hard)
    form.marginal = "columns" if isinstance(problem.marginal, RowsAndColumns) else "rows"
    return cls(**{name: undefined(name, form) is None for name in STATISTICS})


if TYPE_CHECKING:  # the fields are made from the table above: type checkers see only their types

    class AuxRequest:
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(self, **statistics: bool) -> None: ...
        @classmethod
        def all(cls, problem: object = None) -> AuxRequest: ...
        def __getattr__(self, name: str) -> bool: ...

    class AuxOutput(Displayed):
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(self, **statistics: Tensor) -> None: ...
        def __getattr__(self, name: str) -> Tensor | None: ...

else:
    AuxRequest = make_dataclass(
        "AuxRequest",
        [(name, bool, False) for name in STATISTICS],
        namespace={
            "__module__": __name__,
            "__doc__": "Which statistics `attention(return_aux=...)` returns; `regard.statistics` defines each.",
            "all": classmethod(_all),
        },
        frozen=True,
    )
    AuxOutput = make_dataclass(
        "AuxOutput",
        [(name, Tensor | None, None) for name in STATISTICS],
        namespace={
            "__module__": __name__,
            "__doc__": "The requested statistics, [*batch, H, Tq] (per key: [*batch, H, Tk], iterations: [*batch, H]). "
            "The others are None.",
        },
        bases=(Displayed,),
        eq=False,
        repr=False,
    )


def _flatten(aux: AuxOutput) -> tuple[list[Tensor], tuple[str, ...]]:
    names = tuple(name for name in STATISTICS if getattr(aux, name) is not None)
    return [getattr(aux, name) for name in names], names


pytree.register_pytree_node(
    AuxOutput,
    _flatten,
    lambda tensors, names: AuxOutput(**dict(zip(names, tensors, strict=True))),
    serialized_type_name="regard.AuxOutput",
    to_dumpable_context=json.dumps,
    from_dumpable_context=lambda text: tuple(json.loads(text)),
)


def requested(return_aux: object) -> tuple[str, ...]:
    """The names in an AuxRequest: regard's, or PyTorch's (lse, max_scores)."""
    if return_aux is None:
        return ()
    if isinstance(return_aux, AuxRequest):
        return tuple(name for name in STATISTICS if getattr(return_aux, name))
    if type(return_aux).__name__ == "AuxRequest" and hasattr(return_aux, "lse") and hasattr(return_aux, "max_scores"):
        return tuple(name for name in ("lse", "max_scores") if getattr(return_aux, name))
    raise TypeError(f"return_aux: expected an AuxRequest or None, got {return_aux!r}")
