"""Forget gates and temperatures that follow the length: trained on short text, tested on text up to eight times as
long."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...nn import Context
from ...priors import ALiBi
from ...problem import ByKeys, Transport
from ...structured import Decay
from ..experiment import Cell, Conclusion, Config, Experiment, Outcomes
from ..judging import Judged, differences, interval, judge_effect
from ..longer_text import FULL, QUICK, losses_by_length, shown_by_length
from .priors import slopes

FORGETTING = "Lin et al. 2025 (arXiv 2503.02130)"
SCALABLE = "Nakanishi 2025 (arXiv 2501.19399)"
LINEAR = "Press et al. 2021 (arXiv 2108.12409)"
TIMES = (1, 2, 4, 8)


class ForgetGates(nn.Module):
    """Forgetting attention: a gate in (0, 1) for each head and position, from the layer's input. log pi of a key is the
    sum of the logarithms of the gates after it. All gates start at 1/2."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(heads, width)), nn.Parameter(torch.zeros(heads))

    def forward(self, context: Context) -> Transport:
        gates = F.linear(context.hidden_states, self.weight, self.bias)  # [B, T, H]
        return Transport(prior=Decay(F.logsigmoid(gates).transpose(1, 2)))


class ScalableSoftmax(nn.Module):
    """1/temperature = slope * log n, with a learned slope per head. It starts at 1 for n = `length` keys."""

    def __init__(self, heads: int, length: int) -> None:
        super().__init__()
        self.log_slope = nn.Parameter(torch.full((heads,), -math.log(math.log(length))))

    def forward(self) -> Transport:
        return Transport(temperature=ByKeys(self.log_slope.exp()))


def settings(config: Config) -> list[str]:
    return ["softmax", "scalable softmax", "ALiBi", "forget gates"]


def measure(cell: Cell) -> dict[str, Any]:
    config, heads = cell.config, cell.config["heads"]
    problem: Any = {
        "softmax": None,
        "scalable softmax": lambda layer: ScalableSoftmax(heads, config["length"]),
        "ALiBi": Transport(prior=ALiBi(slopes(heads).to(cell.device))),
        "forget gates": lambda layer: ForgetGates(heads, config["width"]),
    }[cell.setting]
    return {"losses": losses_by_length(cell, TIMES, problem=problem)}


def conclude(outcomes: Outcomes) -> Conclusion:
    def losses(setting: str, times: int) -> list[float]:
        return [o.result["losses"][TIMES.index(times)] for o in outcomes.each(setting)]

    def lost(setting: str, times: int) -> list[float]:
        """What the longer text costs, seed by seed."""
        return [long - short for long, short in zip(losses(setting, times), losses(setting, 1), strict=True)]

    verdicts: list[Judged] = []
    for setting, source in (("forget gates", FORGETTING), ("ALiBi", LINEAR)):
        for times in TIMES[1:]:
            claim = f"With {setting}, a model trained on short text reads longer text as well (within 0.02 nats)"
            what = f"loss at {times}x the training length minus that at 1x, nats"
            effect = interval(lost(setting, times))
            verdicts.append(judge_effect(claim, source, what, effect, (-math.inf, 0.02), null=0.02))
    for times in TIMES[1:]:
        claim = "Longer text costs scalable softmax less than softmax"
        what = f"what {times}x the training length costs softmax minus what it costs scalable softmax, nats"
        effect = differences(lost("softmax", times), lost("scalable softmax", times))
        verdicts.append(judge_effect(claim, SCALABLE, what, effect, (0.0, math.inf)))
    for other in ("softmax", "ALiBi"):
        claim = f"Forget gates that depend on the text learn more than {other}, at the training length"
        effect = differences(losses(other, 1), losses("forget gates", 1))
        what = f"loss with {other} minus loss with forget gates, nats"
        verdicts.append(judge_effect(claim, FORGETTING, what, effect, (0.0, math.inf)))

    return Conclusion(verdicts, *shown_by_length(outcomes, TIMES, "attention"))


EXPERIMENT = Experiment(
    name="forgetting",
    question="Do forget gates and a temperature by length carry to longer text?",
    source=f"{FORGETTING}; {SCALABLE}; {LINEAR}",
    about="Small character models without position embeddings, so that only the attention tells near from far. The "
    "forget gates are computed from the layer's input, one per head and position. The same unseen text is read in "
    "pieces of one to eight times the training length.",
    quick=dict(QUICK),
    full=dict(FULL),
    settings=settings,
    measure=measure,
    conclude=conclude,
)
