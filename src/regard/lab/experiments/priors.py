"""Priors over distance: models trained on short text are tested on text up to four times as long."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...operator import attention
from ...priors import ALiBi, Bias
from ...problem import Transport
from ..experiment import Cell, Conclusion, Config, Experiment, Outcomes
from ..judging import interval, judge_effect
from ..longer_text import FULL, QUICK, losses_by_length, shown_by_length

SOURCE = "Press et al. 2021 (arXiv 2108.12409); priors as in 002"
TIMES = (1, 2, 4)


class OffsetPrior(nn.Module):
    """Softmax with a learned prior per head: a number for each distance below `length`, whose last holds beyond."""

    def __init__(self, heads: int, length: int) -> None:
        super().__init__()
        self.log_prior = nn.Parameter(torch.zeros(heads, length))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        positions = torch.arange(q.shape[2], device=q.device)
        distance = (positions[:, None] - positions).clamp(0, self.log_prior.shape[1] - 1)
        problem = Transport(prior=Bias(self.log_prior[:, distance]))  # [H, T, T]
        return attention(q, k, v, is_causal=is_causal, problem=problem)


def slopes(heads: int) -> Tensor:
    """The slopes of the ALiBi paper: 2^(-8/H), 2^(-16/H), ..."""
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


def settings(config: Config) -> list[str]:
    return ["uniform", "ALiBi", "learned offsets"]


def measure(cell: Cell) -> dict[str, Any]:
    config = cell.config
    changes: dict[str, Any] = {
        "uniform": {},
        "ALiBi": {"problem": Transport(prior=ALiBi(slopes(config["heads"]).to(cell.device)))},
        "learned offsets": {"attention": OffsetPrior(config["heads"], config["length"])},
    }[cell.setting]
    return {"losses": losses_by_length(cell, TIMES, **changes)}


def conclude(outcomes: Outcomes) -> Conclusion:
    def lost(prior: str, times: int) -> list[float]:
        place = TIMES.index(times)
        return [o.result["losses"][place] - o.result["losses"][0] for o in outcomes.each(prior)]

    verdicts = []
    for times in TIMES[1:]:
        what = f"loss at {times}x the training length minus that at 1x, nats"
        for prior in ("ALiBi", "learned offsets"):
            verdicts.append(  # noqa: PERF401
                judge_effect(
                    f"With {prior}, a model trained on short text reads longer text as well (within 0.02 nats)",
                    SOURCE,
                    what,
                    interval(lost(prior, times)),
                    (-math.inf, 0.02),
                    null=0.02,
                )
            )
        verdicts.append(
            judge_effect(
                "With a uniform prior and no positions it does not",
                SOURCE,
                what,
                interval(lost("uniform", times)),
                (0.02, math.inf),
                null=0.02,
            )
        )
    return Conclusion(verdicts, *shown_by_length(outcomes, TIMES, "prior"))


EXPERIMENT = Experiment(
    name="priors",
    question="Which prior over distance carries to longer text?",
    source=SOURCE,
    about="Small character models without position embeddings, so that only the prior tells near from far. The same "
    "unseen text is read in pieces of one, two and four times the training length.",
    quick=dict(QUICK),
    full=dict(FULL),
    settings=settings,
    measure=measure,
    conclude=conclude,
)
