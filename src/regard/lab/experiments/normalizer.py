"""Replacements of softmax: which rules train at all, with what loss, and how fast."""

from __future__ import annotations

import math
from typing import Any

from ..experiment import Cell, Conclusion, Config, Experiment, Figure, Outcomes, Series, Table
from ..judging import decide, interval, judge_effect
from ..rules import attention_named, draw_directions
from ..training import perplexity_change, text_model, train_on_text

SOURCE = "003, brain teasers #1 and #3"


def settings(config: Config) -> list[str]:
    return config["rules"]


def measure(cell: Cell) -> dict[str, Any]:
    model = text_model(cell, **attention_named(cell.setting, cell.config))
    trained = train_on_text(cell, draw_directions(model, cell.seed))
    losses = [record["val"] for record in trained.metrics if record.get("val") is not None]
    return {
        "val": trained.last("val"),
        "best": min(losses),
        "diverged_at": trained.diverged_at,
        "steps_per_second": cell.config["steps"] / trained.seconds if trained.diverged_at is None else 0.0,
    }


def conclude(outcomes: Outcomes) -> Conclusion:
    worse = {
        rule: perplexity_change(outcomes.values(rule, "val"), outcomes.values("softmax", "val"))
        for rule in outcomes.settings
    }
    what = "perplexity above softmax's"

    def claim(rule: str, text: str, claimed: tuple[float, float], note: str = "") -> list:
        if rule not in worse:
            return []
        return [judge_effect(text, SOURCE, f"{rule}: {what}", worse[rule], claimed, percent=True, note=note)]

    verdicts = [
        *claim(
            "ReLU, normalised",
            "ReLU + normalization: performance degrades 5-15 %",
            (0.05, 0.15),
            "Performance is read as perplexity of text.",
        ),
        *claim("ReLU features", "Linear attention with ReLU degrades 5-15 %", (0.05, 0.15), "The rule that is O(T)."),
        *claim("linear (elu + 1)", "Linear Transformers underperform softmax", (0.0, math.inf)),
        *claim("Performer", "Performers underperform softmax", (0.0, math.inf)),
        *claim("entmax-1.5", "Exact zeros lose information", (0.0, math.inf), "Said of ReLU; entmax has them too."),
    ]
    if "raw dot products" in worse:
        diverged = [o.result["diverged_at"] for o in outcomes.each("raw dot products")]
        verdicts.append(
            decide(
                "Raw dot products explode during training; this simply doesn't work in practice",
                SOURCE,
                f"diverged in {sum(d is not None for d in diverged)} of {len(diverged)} seeds; {what}: "
                f"{worse['raw dot products'].scaled(100).words(' %')}",
                all(d is not None for d in diverged),
                "Gradients were clipped at norm 1, and LayerNorm reads what attention wrote.",
            )
        )
    if "row sum" in worse:
        verdicts += claim(
            "row sum", "Dividing by the row sum fails to train or gives mediocre results", (0.05, math.inf)
        )
    rows = []
    for rule in outcomes.settings:
        each = outcomes.each(rule)
        diverged = sum(o.result["diverged_at"] is not None for o in each)
        rows.append(
            [
                rule,
                interval(outcomes.values(rule, "val")).brief(),
                "-" if rule == "softmax" else worse[rule].scaled(100).brief(1),
                f"{diverged} of {len(each)}",
                interval(outcomes.values(rule, "steps_per_second")).brief(1),
            ]
        )
    table = Table(
        "After training", ["rule", "loss (nats)", "perplexity above softmax's, %", "diverged", "steps per second"], rows
    )
    others = [rule for rule in outcomes.settings if rule != "softmax"]
    figures = [
        Figure("Validation loss", "step", "nats", [outcomes.curve(rule, "val") for rule in outcomes.settings]),
        Figure(
            "Perplexity above softmax's",
            "%",
            "",
            [Series(r, [], *([100 * x] for x in (worse[r].mean, worse[r].low, worse[r].high))) for r in others],
            kind="dots",
            reference=0.0,
        ),
    ]
    return Conclusion(verdicts, [table], figures)


RULES = [
    "softmax",
    "entmax-1.5",
    "sparsemax",
    "sigmoid",
    "ReLU, normalised",
    "ReLU features",
    "linear (elu + 1)",
    "Performer",
    "row sum",
    "raw dot products",
]

EXPERIMENT = Experiment(
    name="normalizer",
    question="What happens if softmax is replaced, or left out?",
    source=SOURCE,
    about="The same small character model is trained with each rule, from the same weights and on the same batches.",
    quick={
        "seeds": 1, "steps": 30, "every": 15, "warmup": 5, "rate": 3e-3, "batch": 8, "length": 32, "layers": 2,
        "heads": 2, "width": 32, "evaluate": 16, "rules": RULES,
    },
    full={
        "seeds": 3, "steps": 800, "every": 100, "warmup": 50, "rate": 2e-3, "batch": 16, "length": 64, "layers": 2,
        "heads": 4, "width": 64, "evaluate": 128, "rules": RULES,
    },
    settings=settings,
    measure=measure,
    conclude=conclude,
)  # fmt: skip
