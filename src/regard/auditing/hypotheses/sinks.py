"""Mistakes with sinks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...problem import Rows
from ...regularizers import KL
from ..calls import Call, Solved, Solver
from .base import Change, Hypotheses, sink_of, temperature_of

SINKS = Hypotheses()


def _with_sink(change: Callable[[Tensor, Call], Tensor | None]) -> Change:
    def changed(call: Call) -> Call | None:
        sink = sink_of(call)
        new = None if sink is None else change(sink, call)
        return None if new is None else call.change_problem(marginal=Rows(sink=new))

    return changed


def _divided_once_less(sink: Tensor, call: Call) -> Tensor | None:
    tau = temperature_of(call)
    if tau is None or (not isinstance(tau, Tensor) and tau == 1):
        return None
    return sink * (tau if not isinstance(tau, Tensor) else tau.reshape(-1)[: len(sink)])


@SINKS("sink-dropped", "this is attention without its sink")
def _(call: Call) -> Call | None:
    return None if sink_of(call) is None else call.change_problem(marginal=Rows())


SINKS.add("sink-gradient", "the sink acts on the output but receives no gradient", _with_sink(lambda s, c: s.detach()))


@SINKS("sink-gradient", "the sink rescales the output by an lse that has no gradient, so query and key miss a term")
def _(call: Call) -> Call | None:
    sink, tau = sink_of(call), temperature_of(call)
    if sink is None or tau is None or not isinstance(call.problem.regularizer, KL):
        return None

    def compute(call: Call, solve: Solver) -> Solved:
        out, lse = solve(call.change_problem(marginal=Rows()))
        assert lse is not None
        level = sink / tau if not isinstance(tau, Tensor) else sink[:, None] / tau[..., 0]
        level = level[:, None] if level.dim() == 1 else level
        total = torch.logaddexp(lse.detach(), level.expand_as(lse))
        kept = (lse.detach() - total).exp().nan_to_num(0)
        return out * kept[..., None].to(out.dtype), total

    return call.change(compute=compute)


SINKS.add("sink-temperature", "the sink is not divided by the temperature", _with_sink(_divided_once_less))
SINKS.add(
    "sink-scaled",
    "the sink is multiplied by the scale, as if it were a dot product",
    _with_sink(lambda s, c: s * c.scale_factor),
)
SINKS.add("sink-sign", "the sink has the wrong sign", _with_sink(lambda s, c: -s))
SINKS.add(
    "sink-heads",
    "the heads have one another's sinks",
    _with_sink(lambda s, c: s.flip(0) if len(s) > 1 else None),
    _with_sink(lambda s, c: s.roll(1) if len(s) > 2 else None),
    _with_sink(lambda s, c: s[:1].expand_as(s) if len(s) > 1 else None),
    _with_sink(lambda s, c: s.mean().expand_as(s) if len(s) > 1 else None),
)


@SINKS("sink-value", "the sink's mass is added to the output as if its value were the mean of the values")
def _(call: Call) -> Call | None:
    if sink_of(call) is None:
        return None

    def compute(call: Call, solve: Solver) -> Solved:
        out, lse = solve(call)
        ones = torch.ones_like(call.value[..., :1])
        mass, _ = solve(call.change(value=ones))
        return out + (1 - mass) * call.repeated(call.value).mean(2, keepdim=True), lse

    return call.change(compute=compute)
