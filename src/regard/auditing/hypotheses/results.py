"""Mistakes with lse and with gradients, where the output is right."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...problem import Rows, TemperatureRule
from ...regularizers import KL
from ..calls import Call, Solved, Solver
from .base import Change, Hypotheses, sink_of

RESULTS = Hypotheses()


def _with_lse(change: Callable[[Tensor, Call], Tensor]) -> Change:
    def changed(call: Call) -> Call | None:
        if not call.has_lse:
            return None

        def compute(call: Call, solve: Solver) -> Solved:
            out, lse = solve(call)
            return out, None if lse is None else change(lse, call)

        return call.change(compute=compute)

    return changed


@RESULTS("lse-sink", "lse does not contain the sink")
def _(call: Call) -> Call | None:
    if sink_of(call) is None or not call.has_lse:
        return None

    def compute(call: Call, solve: Solver) -> Solved:
        return solve(call)[0], solve(call.change_problem(marginal=Rows()))[1]

    return call.change(compute=compute)


RESULTS.add("lse-base", "lse is in base 2, not in nats", _with_lse(lambda lse, c: lse / math.log(2)))
RESULTS.add("lse-gradient", "lse has no gradient", _with_lse(lambda lse, c: lse.detach()))
RESULTS.add("lse-sign", "lse has the wrong sign", _with_lse(lambda lse, c: -lse))


def _detached(name: str) -> Change:
    return lambda call: call.change(**{name: getattr(call, name).detach()})


for _name in ("query", "key", "value"):
    RESULTS.add(f"{_name}-gradient", f"the {_name} receives no gradient", _detached(_name))


@RESULTS("gradient-baseline", "the gradient of the scores lacks its baseline: the normalisation is not differentiated")
def _(call: Call) -> Call | None:
    if not isinstance(call.problem.regularizer, KL) or isinstance(call.problem.temperature, TemperatureRule):
        return None
    tau = call.problem.temperature

    def compute(call: Call, solve: Solver) -> Solved:
        scores = call.capped(call.scores())
        weights, lse = solve(call.with_scores(scores))
        moved = scores - scores.detach()
        if call.mask is not None and call.mask.dtype != torch.bool:
            moved = moved + (call.mask - call.mask.detach()).nan_to_num(0)
        moved = moved / tau
        return (weights.detach() * moved.exp()) @ call.repeated(call.value), lse

    return call.change(compute=compute)


def _scaled_gradient(power: int) -> Change:
    """The output is right; the gradient of the scores by query and key has the scale to this power."""

    def changed(call: Call) -> Call | None:
        factor = call.scale_factor

        def compute(call: Call, solve: Solver) -> Solved:
            right = call.scores()
            wrong = right * factor ** (power - 1)
            return solve(call.with_scores(call.capped(wrong + (right - wrong).detach()), call.repeated(call.value)))

        return call.change(compute=compute)

    return changed


RESULTS.add("scale-gradient", "the gradient lacks the scale", _scaled_gradient(0))
RESULTS.add("scale-gradient", "the gradient has the scale twice", _scaled_gradient(2))
