"""Mistakes with scale, softcap, temperature, regulariser and heads."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...problem import Rows, TemperatureRule, Transport
from ...regularizers import KL
from ..calls import Call, Solved, Solver
from .base import Change, Hypotheses, temperature_of

SCORES = Hypotheses()


def _with_scale(change: Callable[[float, Call], float | None]) -> Change:
    def changed(call: Call) -> Call | None:
        new = change(call.scale_factor, call)
        return None if new is None or math.isclose(new, call.scale_factor) else call.change(scale=new)

    return changed


SCORES.add("scale-missing", "the scores are not scaled", _with_scale(lambda s, c: 1.0))
SCORES.add(
    "scale-twice",
    "the scale is applied twice",
    _with_scale(lambda s, c: s * s),
    _with_scale(lambda s, c: s * c.query.shape[-1] ** -0.5),
)
SCORES.add(
    "scale-ignored",
    "the argument scale is ignored: the scores are scaled by the default 1/sqrt(D)",
    _with_scale(lambda s, c: c.query.shape[-1] ** -0.5),
)
SCORES.add(
    "scale-inverted",
    "the scores are divided by the scale",
    _with_scale(lambda s, c: 1 / s),
)
SCORES.add(
    "scale-dimension",
    "the scale is that of another dimension: 1/D, or 1/sqrt of the values' dimension",
    _with_scale(lambda s, c: c.value.shape[-1] ** -0.5),
    _with_scale(lambda s, c: 1 / c.query.shape[-1]),
)


def _cap_after_mask(masked_stay: bool) -> Change:
    """c * tanh((s + mask) / c). `masked_stay`: what a mask hides stays hidden, otherwise its score is -c."""

    def changed(call: Call) -> Call | None:
        cap = call.softcap
        if cap is None or call.mask is None:
            return None

        def compute(call: Call, solve: Solver) -> Solved:
            scores, mask = call.scores(), call.mask
            assert mask is not None
            keep = mask if mask.dtype == torch.bool else mask != -math.inf
            bias = torch.zeros_like(scores) if mask.dtype == torch.bool else mask.masked_fill(~keep, 0.0)
            capped = cap * ((scores + bias) / cap).tanh()
            capped = capped if masked_stay else capped.where(keep, -cap)
            return solve(call.with_scores(capped, call.repeated(call.value)).change(mask=keep if masked_stay else None))

        return call.change(compute=compute)

    return changed


def _cap_before_scale(call: Call) -> Call | None:
    """scale * c * tanh(qk / c)."""
    cap, scale = call.softcap, call.scale_factor
    if cap is None:
        return None

    def compute(call: Call, solve: Solver) -> Solved:
        raw = call.scores() / scale
        return solve(call.with_scores(scale * cap * (raw / cap).tanh(), call.repeated(call.value)))

    return call.change(compute=compute)


def _cap_without_gradient(call: Call) -> Call | None:
    cap = call.softcap
    if cap is None:
        return None

    def compute(call: Call, solve: Solver) -> Solved:
        scores = call.scores()
        capped = cap * (scores / cap).tanh()
        return solve(call.with_scores(scores + (capped - scores).detach(), call.repeated(call.value)))

    return call.change(compute=compute)


SCORES.add(
    "softcap-dropped", "this is attention without its softcap", lambda c: c.change(softcap=None) if c.softcap else None
)
SCORES.add("softcap-order", "the softcap is applied after the mask", _cap_after_mask(False), _cap_after_mask(True))
SCORES.add("softcap-order", "the softcap is applied before the scale", _cap_before_scale)
SCORES.add("softcap-gradient", "the softcap acts on the output but not on the gradient", _cap_without_gradient)


def _with_temperature(change: Callable[[Tensor | float], Tensor | float]) -> Change:
    def changed(call: Call) -> Call | None:
        tau = temperature_of(call)
        if tau is None or (not isinstance(tau, Tensor) and tau in (0, 1)):
            return None
        return call.change_problem(temperature=change(tau))

    return changed


SCORES.add("temperature-dropped", "this is attention at temperature 1", _with_temperature(lambda t: 1.0))
SCORES.add("temperature-inverted", "the scores are multiplied by the temperature", _with_temperature(lambda t: 1 / t))
SCORES.add("temperature-twice", "the scores are divided by the temperature twice", _with_temperature(lambda t: t * t))
SCORES.add(
    "temperature-gradient",
    "the temperature acts on the output but receives no gradient",
    _with_temperature(lambda t: t.detach() if isinstance(t, Tensor) else t),
)
SCORES.add(
    "temperature-dropped",
    "the rule for the temperature is ignored",
    lambda c: c.change_problem(temperature=1.0) if isinstance(c.problem.temperature, TemperatureRule) else None,
)


@SCORES("regularizer-dropped", "this is softmax instead of the declared regulariser")
def _(call: Call) -> Call | None:
    if isinstance(call.problem.regularizer, KL):
        return None
    problem = call.problem
    return call.change(
        problem=Transport(KL(), prior=problem.prior, marginal=problem.marginal, temperature=problem.temperature)
    )


@SCORES("marginal-dropped", "the rows sum to 1, against the declared marginal")
def _(call: Call) -> Call | None:
    rows = call.problem.marginal
    if isinstance(rows, Rows) and rows.relax is None and rows.mass == 1:
        return None
    return call.change_problem(marginal=Rows())


@SCORES(
    "gqa-order", "key heads are repeated as whole blocks: query head h reads key head h % Hkv instead of h // group"
)
def _(call: Call) -> Call | None:
    H, Hkv = call.query.shape[1], call.key.shape[1]
    if Hkv in (1, H):
        return None
    return call.change(key=call.key.repeat(1, H // Hkv, 1, 1), value=call.value.repeat(1, H // Hkv, 1, 1))


@SCORES("gqa-order", "the values' heads are repeated as whole blocks, the keys' heads are not")
def _(call: Call) -> Call | None:
    H, Hkv = call.query.shape[1], call.key.shape[1]
    if Hkv in (1, H):
        return None
    return call.change(key=call.repeated(call.key), value=call.value.repeat(1, H // Hkv, 1, 1))
