"""Precise selection: tasks whose answer is at one place of the context, for softmax and its replacements."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...nn import Transformer
from ..experiment import Cell, Conclusion, Config, Experiment, Outcomes
from ..judging import Interval, Judged, differences, interval, judge_effect, withhold
from ..rules import attention_named, draw_directions
from ..tasks import accuracies, measure_task, task_settings
from ..training import Batch

SOURCE = "003, brain teaser #3: “Real-world case study”"
LINEAR = ("linear (elu + 1)", "Performer", "ReLU features")
SOLVED = 0.9  # the mean accuracy of softmax above which a task counts as a test of selection


def recall(count: int, config: Config, generator: torch.Generator) -> Batch:
    """Multi-query associative recall: pairs of a key and a value, then every key again in another order; the target is
    its value.

    Tokens [count, 2 pairs]. A pair is one token, so that one attention step suffices: the task tests whether the model
    finds the place. Tokens 0, 1, ... are the values, then come the keys, then the pairs; the keys of the pairs differ.
    """
    pairs, symbols, kinds = config["pairs"], config["symbols"], config["values"]
    keys = torch.rand(count, symbols, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(kinds, (count, pairs), generator=generator)
    again = torch.rand(count, pairs, generator=generator).argsort(1)
    tokens = torch.cat([kinds + symbols + keys * kinds + values, kinds + keys.gather(1, again)], 1)
    return tokens, torch.cat([torch.full_like(values, -1), values.gather(1, again)], 1)


def copying(count: int, config: Config, generator: torch.Generator) -> Batch:
    """A random word, a mark, and the word again; the targets are the letters of the second copy."""
    length, symbols = config["pairs"], config["symbols"]
    word = torch.randint(symbols, (count, length), generator=generator)
    mark = torch.full((count, 1), symbols)
    tokens = torch.cat([word, mark, word], 1)
    targets = torch.full_like(tokens, -1)
    targets[:, length:-1] = word
    return tokens, targets


def addition(count: int, config: Config, generator: torch.Generator) -> Batch:
    """a + b = c with the lowest digit first, so that each digit of c needs two places and a carry."""
    digits = config["digits"]
    a, b = (torch.randint(10**digits, (count,), generator=generator) for _ in range(2))
    powers = 10 ** torch.arange(digits + 1)
    a_, b_, c_ = (n[:, None] // powers % 10 for n in (a, b, a + b))
    plus, equals = torch.full((count, 1), 10), torch.full((count, 1), 11)
    tokens = torch.cat([a_[:, :-1], plus, b_[:, :-1], equals, c_], 1)
    targets = torch.full_like(tokens, -1)
    targets[:, 2 * digits + 1 : -1] = c_
    return tokens, targets


TASKS = {"recall": recall, "copying": copying, "addition": addition}
ABOUT = {"recall": "fact retrieval", "copying": "few-shot learning", "addition": "arithmetic"}


def settings(config: Config) -> list[str]:
    return task_settings(TASKS, config)


def measure(cell: Cell) -> dict[str, Any]:
    config = cell.config

    def model_for(rule: str, length: int) -> Transformer:
        sizes = {name: config[name] for name in ("layers", "heads", "width")}
        vocabulary = config["values"] + config["symbols"] * (config["values"] + 1)
        attention = attention_named(rule, {**config, "length": length})
        return draw_directions(Transformer(vocabulary, length, **sizes, **attention), cell.seed)

    return measure_task(cell, TASKS, model_for)


def conclude(outcomes: Outcomes) -> Conclusion:
    rules = outcomes.config["rules"]

    def gap(task: str, rule: str) -> Interval:
        return differences(*(outcomes.values(f"{task}: {r}", "accuracy") for r in ("softmax", rule)))

    def judged(claim: str, source: str, task: str, rule: str) -> Judged:
        what = f"{task}: accuracy of softmax minus that of {rule}, in points of 1"
        found = judge_effect(claim, source, what, gap(task, rule), (0.02, math.inf))
        solved = interval(outcomes.values(f"{task}: softmax", "accuracy")).mean
        if solved > SOLVED:
            return found
        return withhold(found, f"Softmax itself does not solve the task (accuracy {solved:.2f}): it tells nothing.")

    verdicts = [
        judged(f"Linear attention underperforms at precise token selection ({ABOUT[task]})", SOURCE, task, rule)
        for task in TASKS
        for rule in LINEAR
        if rule in rules
    ]
    verdicts += [
        judged(
            "ReLU with normalised rows lacks the ability to focus sharply",
            "003, brain teaser #3, option 3",
            task,
            "ReLU, normalised",
        )
        for task in TASKS
        if "ReLU, normalised" in rules
    ]
    return Conclusion(verdicts, *accuracies(outcomes, list(TASKS), "All tasks and seeds"))


RULES = ["softmax", "entmax-1.5", "ReLU, normalised", *LINEAR]

EXPERIMENT = Experiment(
    name="recall",
    question="Does linear attention fail where one token must be found?",
    source=SOURCE,
    about="Small models learn three tasks without end, every batch new: to recall the value of a key, to copy a random "
    "word, to add two numbers. Only the tokens that the context determines are asked for.",
    quick={
        "seeds": 1, "steps": 12, "every": 6, "warmup": 3, "rate": 3e-3, "batch": 16, "layers": 2, "heads": 2,
        "width": 32, "pairs": 4, "symbols": 4, "values": 2, "digits": 1, "decay": 0.1, "evaluate": 64, "rules": RULES,
    },
    full={
        "seeds": 3, "steps": 800, "every": 80, "warmup": 50, "rate": 3e-3, "batch": 32, "layers": 2, "heads": 4,
        "width": 64, "pairs": 16, "symbols": 16, "values": 4, "digits": 3, "decay": 0.01, "evaluate": 512,
        "rules": RULES,
    },
    settings=settings,
    measure=measure,
    conclude=conclude,
)  # fmt: skip
