"""A learned temperature for every head: does it help, and which layers become sharp?"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ...nn import Temperature
from ...problem import Transport
from ..judging import interval, judge
from ..runner import Cell, Conclusion, Config, Experiment, Figure, Outcomes, Series, Table
from ..training import perplexity_change, plan_statistics, text_model, train_on_text

SOURCE = "003, “The Temperature Knob”"


class Learned(nn.Module):
    """Softmax with a temperature for each head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.temperature = Temperature(heads)

    def forward(self) -> Transport:
        return Transport(temperature=self.temperature())


def settings(config: Config) -> list[str]:
    return ["fixed", "learned"]


def measure(cell: Cell) -> dict[str, Any]:
    heads = cell.config["heads"]
    learned = cell.setting == "learned"
    model = text_model(cell, problem=(lambda layer: Learned(heads)) if learned else None)
    trained = train_on_text(cell, model)
    taus = [[1.0] * heads if p is None else p.temperature.flatten().tolist() for p in model.problems()]  # type: ignore[union-attr]
    pieces = cell.corpus.batch(8, cell.config["length"], torch.Generator().manual_seed(1), "validation")
    entropy = plan_statistics(model, pieces[:, :-1], "entropy")["entropy"]
    return {
        "val": trained.last("val"),
        "temperatures": taus,
        "entropy": entropy.mean(1).tolist(),
        "seconds": trained.seconds,
    }


def layer_means(temperatures: list[list[float]]) -> list[float]:
    """The mean of each layer's logarithms."""
    return [math.fsum(math.log(tau) for tau in layer) / len(layer) for layer in temperatures]


def slope(y: list[float]) -> float:
    """Of a straight line through the layers, per layer."""
    x = [n - (len(y) - 1) / 2 for n in range(len(y))]
    return math.fsum(a * b for a, b in zip(x, y, strict=True)) / math.fsum(a * a for a in x)


def curvature(y: list[float]) -> float:
    """First and last layer minus those between, in the mean: positive for a U."""
    return (y[0] + y[-1]) / 2 - math.fsum(y[1:-1]) / (len(y) - 2)


def conclude(outcomes: Outcomes) -> Conclusion:
    gain = perplexity_change(outcomes.values("fixed", "val"), outcomes.values("learned", "val"))
    each = [layer_means(o.result["temperatures"]) for o in outcomes.each("learned")]
    spread = []
    for outcome in outcomes.each("learned"):
        logs = [math.log(tau) for layer in outcome.result["temperatures"] for tau in layer]
        spread.append(math.sqrt(math.fsum(x * x for x in logs) / len(logs)))
    verdicts = [
        judge(
            "Learned per-head temperatures improve performance by 1-3 %",
            SOURCE,
            "perplexity of fixed temperatures above that of learned ones",
            gain,
            (0.01, 0.03),
            percent=True,
        ),
        judge(
            "Lower layers learn higher temperatures, upper layers lower ones",
            SOURCE,
            "rise of log τ per layer",
            interval([slope(y) for y in each]),
            (-math.inf, 0.0),
        ),
    ]
    if len(each[0]) > 2:
        verdicts.append(
            judge(
                "Temperatures follow a U over the layers",
                "modded-nanogpt's learned temperatures",
                "log τ of the outer layers minus that of the inner ones",
                interval([curvature(y) for y in each]),
                (0.0, math.inf),
            )
        )
    layers = range(len(each[0]))
    taus = [[math.exp(y[n]) for y in each] for n in layers]
    rows = [
        [
            f"layer {n}",
            interval(taus[n]).brief(),
            *(interval([o.result["entropy"][n] for o in outcomes.each(s)]).brief() for s in ("fixed", "learned")),
        ]
        for n in layers
    ]
    table = Table(
        f"After training (heads' log τ differ from 0 by {interval(spread).brief()} in the root mean square)",
        ["", "τ (geometric mean over heads)", "entropy, fixed (nats)", "entropy, learned (nats)"],
        rows,
    )
    found = [interval(t) for t in taus]
    figures = [
        Figure(
            "Learned temperature by layer",
            "layer",
            "τ",
            [
                Series(
                    "mean over heads and seeds",
                    [float(n) for n in layers],
                    [f.mean for f in found],
                    [min(t) for t in taus],
                    [max(t) for t in taus],
                )
            ],
            reference=1.0,
        ),
        Figure("Validation loss", "step", "nats", [outcomes.curve(s, "val") for s in outcomes.settings]),
    ]
    return Conclusion(verdicts, [table], figures)


EXPERIMENT = Experiment(
    name="temperature",
    question="What do heads make of a temperature of their own?",
    source=SOURCE,
    about="Small character models with τ = 1 and with a τ learned for every head, from the same weights and on the "
    "same batches. The temperatures do not decay.",
    quick={
        "seeds": 2, "steps": 30, "every": 15, "warmup": 5, "rate": 3e-3, "batch": 8, "length": 32, "layers": 3,
        "heads": 2, "width": 32, "evaluate": 16,
    },
    full={
        "seeds": 5, "steps": 1000, "every": 100, "warmup": 50, "rate": 2e-3, "batch": 16, "length": 64, "layers": 4,
        "heads": 4, "width": 64, "evaluate": 256,
    },
    settings=settings,
    measure=measure,
    conclude=conclude,
)  # fmt: skip
