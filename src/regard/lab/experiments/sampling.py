"""The temperature of the output: how certain, varied and repetitive the text is that a model writes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..configuration import require_temperatures
from ..experiment import Cell, Conclusion, Config, Experiment, Figure, Outcomes, Series, Table
from ..judging import Interval, differences, interval, judge_effect
from ..training import text_model, train_on_text, validation

SOURCE = "003, “The Temperature Knob”"
COMPARED = (0.5, 1.0, 1.5)  # temperatures
MEASURES = {
    "entropy": "entropy of the next character, nats",
    "distinct": "different 4-grams, share",
    "repetition": "8-grams written before, share",
    "agreement": "first characters that two samples share",
}


def settings(config: Config) -> list[str]:
    require_temperatures(config, *COMPARED)
    return ["text"]


def measure(cell: Cell) -> dict[str, Any]:
    config = cell.config
    model = text_model(cell)
    trained = train_on_text(cell, model)
    model.eval()
    pieces = validation(cell.corpus, config["prompts"], config["length"]).to(cell.device)
    with torch.no_grad():
        logits = model(pieces[:, :-1])
    prompts = pieces[:, : config["length"] // 2].repeat(2, 1)  # two samples of each
    results: dict[str, list[float]] = {name: [] for name in MEASURES}
    example = []
    for tau in config["temperatures"]:
        generator = torch.Generator().manual_seed(cell.seed)
        written = model.generate(prompts, config["characters"], tau, generator)[:, prompts.shape[1] :]
        results["entropy"].append(entropy(logits, tau))
        results["distinct"].append(distinct(written, 4))
        results["repetition"].append(repetition(written, 8))
        results["agreement"].append(agreement(*written.chunk(2)))
        example.append(cell.corpus.decode(written[0, :60]))
    return {"val": trained.last("val"), "temperatures": config["temperatures"], **results, "example": example}


def entropy(logits: Tensor, temperature: float) -> float:
    """Mean entropy of softmax(logits / temperature); 0 at temperature 0."""
    if temperature == 0:
        return 0.0
    logs = (logits / temperature).log_softmax(-1)
    return -(logs.exp() * logs).sum(-1).mean().item()


def _grams(tokens: Tensor, n: int) -> list[list[tuple[int, ...]]]:
    return [[tuple(g) for g in row.unfold(0, n, 1).tolist()] for row in tokens]


def distinct(tokens: Tensor, n: int) -> float:
    """The number of different n-grams in all rows, relative to the number of n-grams."""
    grams = [gram for row in _grams(tokens, n) for gram in row]
    return len(set(grams)) / len(grams)


def repetition(tokens: Tensor, n: int) -> float:
    """The mean share of n-grams that occur earlier in the same row."""
    return math.fsum(1 - len(set(row)) / len(row) for row in _grams(tokens, n)) / len(tokens)


def agreement(a: Tensor, b: Tensor) -> float:
    """The mean length of the common beginning of two rows."""
    return (a == b).cumprod(1).sum(1).float().mean().item()


def conclude(outcomes: Outcomes) -> Conclusion:
    temperatures = outcomes.config["temperatures"]
    each = outcomes.each("text")

    def column(name: str, tau: float) -> list[float]:
        return [o.result[name][temperatures.index(tau)] for o in each]

    def change(name: str, high: float, low: float) -> Interval:
        return differences(column(name, high), column(name, low))

    low, one, high = COMPARED
    verdicts = [
        judge_effect(
            "Higher temperature = more diverse outputs",
            SOURCE,
            f"share of different 4-grams, τ = {high:g} minus τ = 1",
            change("distinct", high, one),
            (0.0, math.inf),
        ),
        judge_effect(
            "Lower temperature = more focused, deterministic outputs",
            SOURCE,
            f"first characters that two samples share, τ = {low:g} minus τ = 1",
            change("agreement", low, one),
            (0.0, math.inf),
        ),
        judge_effect(
            "Low temperatures make a model repeat itself",
            "common experience",
            f"share of 8-grams written before, τ = {low:g} minus τ = 1",
            change("repetition", low, one),
            (0.0, math.inf),
        ),
    ]
    rows = [[f"{tau:g}", *(interval(column(name, tau)).brief() for name in MEASURES)] for tau in temperatures]
    examples = [[f"{tau:g}", repr(each[0].result["example"][n])] for n, tau in enumerate(temperatures)]
    figures = []
    for name, label in MEASURES.items():
        columns = [column(name, tau) for tau in temperatures]
        means, low, high = ([f(c) for c in columns] for f in (lambda c: math.fsum(c) / len(c), min, max))
        line = Series(name, temperatures, means, low, high)
        figures.append(Figure(name.capitalize(), "τ", label, [line]))
    tables = [Table("By temperature", ["τ", *MEASURES.values()], rows), Table("Written", ["τ", "begins"], examples)]
    return Conclusion(verdicts, tables, figures)


EXPERIMENT = Experiment(
    name="sampling",
    question="What does the temperature of the output do to the text?",
    source=SOURCE,
    about="A small character model is trained, and continues pieces of text that it has not seen, twice each, at "
    "several temperatures of its output.",
    quick={
        "seeds": 2, "steps": 60, "every": 30, "warmup": 5, "rate": 3e-3, "batch": 8, "length": 32, "layers": 2,
        "heads": 2, "width": 32, "evaluate": 16, "prompts": 8, "characters": 40, "temperatures": [0.0, 0.5, 1.0, 1.5],
    },
    full={
        "seeds": 3, "steps": 2000, "every": 200, "warmup": 50, "rate": 2e-3, "batch": 16, "length": 64, "layers": 3,
        "heads": 4, "width": 96, "evaluate": 128, "prompts": 32, "characters": 300,
        "temperatures": [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0],
    },
    settings=settings,
    measure=measure,
    conclude=conclude,
)  # fmt: skip
