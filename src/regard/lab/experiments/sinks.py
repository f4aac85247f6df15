"""Attention sinks: do a null key, relaxed rows or a sparse plan prevent the first key from collecting mass?"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...nn import Transformer
from ...nn.attention import Problem
from ...operator import attention
from ...problem import Free, Rows, Transport
from ...regularizers import KL, FermiDirac, Tsallis
from ...statistics import AuxRequest
from ..experiment import Cell, Conclusion, Config, Experiment, Figure, Outcomes, Series, Table
from ..judging import MEASURED, Interval, interval, judge_effect, withhold
from ..training import Batch, Training, mean_loss, text_batches, train, validation

SINK = 0.3  # a head has a sink if the first key receives at least this share of its mass
SOURCE = "Guo et al. 2024 (arXiv 2410.13835), Xiao et al. 2023 (arXiv 2309.17453)"


class NullKey(nn.Module):
    """Softmax with a learned null key in every head, which takes mass and has no value."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.score = nn.Parameter(torch.zeros(heads))

    def forward(self) -> Transport:
        return Transport(KL(), marginal=Rows(sink=self.score))


RULES = ["softmax", "null key", "relaxed rows", "entmax-1.5", "sigmoid"]


def problem_named(rule: str, heads: int, length: int) -> Problem:
    problems = {
        "softmax": Transport(),
        "relaxed rows": Transport(marginal=Rows(relax=1.0)),
        "entmax-1.5": Transport(Tsallis(1.5)),
        "sigmoid": Transport(FermiDirac(), marginal=Free(offset=-math.log(length))),
    }
    return NullKey(heads) if rule == "null key" else problems[rule]


# --- bigram-backcopy --------------------------------------------------------------------------------------------------


def transitions(config: Config) -> Tensor:
    """The probabilities of the next symbol after each symbol, [symbols, symbols]; the same for all models."""
    draws = torch.randn(config["symbols"], config["symbols"], generator=torch.Generator().manual_seed(0))
    return (2 * draws).softmax(-1)


def backcopy(count: int, config: Config, generator: torch.Generator) -> Batch:
    """A start mark, then a Markov chain. After a trigger (one of the first symbols) the symbol before it is repeated.

    Only the queries at triggers need the context; at all other places a head has nothing to look for.
    """
    symbols, length = config["symbols"], config["length"]
    chances = transitions(config)
    row = [torch.full((count,), symbols), torch.randint(symbols, (count,), generator=generator)]
    for _ in range(length - 1):
        drawn = torch.multinomial(chances[row[-1]], 1, generator=generator)[:, 0]
        copies = (row[-1] < config["triggers"]) & (row[-2] < symbols)
        row.append(torch.where(copies, row[-2], drawn))
    tokens = torch.stack(row, 1)
    return tokens[:, :-1], tokens[:, 1:]


# --- measuring --------------------------------------------------------------------------------------------------------


def settings(config: Config) -> list[str]:
    tasks = [f"backcopy, {n} layer{'' if n == 1 else 's'}" for n in config["depths"]]
    return [f"{task}: {rule}" for task in [*tasks, "text"] for rule in RULES]


def measure(cell: Cell) -> dict[str, Any]:
    task, rule = cell.setting.split(": ")
    config, text = cell.config, task == "text"
    layers = max(config["depths"]) if text else int(task.split()[1])
    length, heads = config["length"], config["heads"]
    torch.manual_seed(cell.seed)
    model = Transformer(
        len(cell.corpus.characters) if text else config["symbols"] + 1,
        length,
        layers=layers,
        heads=heads,
        width=config["width"],
        problem=lambda layer: problem_named(rule, heads, length),
    )
    tested = torch.Generator().manual_seed(10**6)
    if text:
        pieces = validation(cell.corpus, config["evaluate"], length)
        tokens = pieces[:, :-1]
    else:
        batch = backcopy(config["evaluate"], config, tested)
        pieces, tokens = torch.cat([batch[0], batch[1][:, -1:]], 1), batch[0]
    pieces, tokens = pieces.to(cell.device), tokens.to(cell.device)
    resting = torch.ones_like(tokens, dtype=torch.bool) if text else (tokens >= config["triggers"])
    resting[:, : length // 4] = False  # with few keys each one has a large share

    def evaluate(model: Transformer) -> dict[str, float]:
        mass = first_key_mass(model, tokens, resting)
        return {"val": mean_loss(model, pieces), "first": mass.mean().item(), "worst": mass.max().item()}

    draw = text_batches(cell) if text else lambda generator: backcopy(config["batch"], config, generator)
    trained = train(cell, model, Training.of(config), draw, evaluate)
    return {name: trained.last(name) for name in ("val", "first", "worst")}


def first_key_mass(model: Transformer, tokens: Tensor, at: Tensor) -> Tensor:
    """The share of the first key in the mass of a row, averaged over the queries in `at`: [layers, H].

    The share is relative to the mass of the real keys. The mass of a null key, and what relaxed rows or a sigmoid do
    not assign, is not counted; so a rule that only assigns less mass has not removed the sink. The share of a row
    without mass is 0.
    """
    found = []
    for (q, k, v), problem in zip(model.heads(tokens), model.problems(), strict=True):
        request = AuxRequest(first_key_mass=True, mass=True)
        _, aux = attention(q, k, v, is_causal=True, problem=problem, return_aux=request)
        assert aux.first_key_mass is not None and aux.mass is not None
        share = torch.where(aux.mass > 0, aux.first_key_mass / aux.mass, 0.0)
        found.append((share * at[:, None]).sum((0, 2)) / at.sum())
    return torch.stack(found)


# --- conclusions ------------------------------------------------------------------------------------------------------


def conclude(outcomes: Outcomes) -> Conclusion:
    tasks = list(dict.fromkeys(setting.split(": ")[0] for setting in outcomes.settings))
    verdicts, rows, dots = [], [], []
    for task in tasks:
        grown = judge_effect(
            f"Softmax grows attention sinks: some head puts more than {SINK} of its mass on the first key",
            SOURCE,
            f"{task}: first-key share of the strongest head",
            interval(outcomes.values(f"{task}: softmax", "worst")),
            (SINK, 1.0),
            null=SINK,
        )
        verdicts.append(grown)
        for rule in RULES[1:]:
            removed = judge_effect(
                f"{rule[0].upper()}{rule[1:]} removes attention sinks: no head keeps more than {SINK}",
                "gpt-oss, softmax-1, sparse attention: commonly said",
                f"{task}: first-key share of the strongest head, {rule}",
                interval(outcomes.values(f"{task}: {rule}", "worst")),
                (-math.inf, SINK),
                same=True,
            )
            if grown.verdict != MEASURED:
                removed = withhold(removed, "No sink grew with softmax beyond doubt: there is nothing to remove.")
            verdicts.append(removed)
        for rule in RULES:
            worst: Interval = interval(outcomes.values(f"{task}: {rule}", "worst"))
            dots.append(Series(f"{task}: {rule}", [], [worst.mean], [worst.low], [worst.high]))
            found = [interval(outcomes.values(f"{task}: {rule}", name)) for name in ("val", "first", "worst")]
            rows.append([f"{task}: {rule}", *(f.brief() for f in found)])
    tables = [Table("After training", ["", "loss (nats)", "first-key share, mean", "strongest head"], rows)]
    figures = [
        Figure(
            f"{task}: first-key share of the strongest head",
            "step",
            "share",
            [outcomes.curve(f"{task}: {rule}", "worst", rule) for rule in RULES],
            reference=SINK,
        )
        for task in tasks
    ]
    figures.append(Figure("At the end", "first-key share of the strongest head", "", dots, kind="dots", reference=SINK))
    return Conclusion(verdicts, tables, figures)


EXPERIMENT = Experiment(
    name="sinks",
    question="Does a null key, a relaxed row or a sparse plan remove attention sinks?",
    source=SOURCE,
    about="Bigram-backcopy: a Markov chain in which a head has something to do only after a trigger, known to grow "
    "sinks on the start mark; and text. Measured is the first key's share of what real keys get, where there is "
    "nothing to look for.",
    quick={
        "seeds": 1, "steps": 10, "every": 5, "warmup": 3, "rate": 3e-3, "batch": 8, "length": 16, "heads": 2,
        "width": 16, "depths": [1], "symbols": 8, "triggers": 2, "evaluate": 8,
    },
    full={
        "seeds": 3, "steps": 700, "every": 70, "warmup": 50, "rate": 3e-3, "batch": 32, "length": 48, "heads": 2,
        "width": 64, "depths": [1, 3], "symbols": 32, "triggers": 4, "evaluate": 64,
    },
    settings=settings,
    measure=measure,
    conclude=conclude,
)  # fmt: skip
