"""Experiments on generated tasks: a model learns from batches that never repeat, and its accuracy is compared by rule.

The setting of such a cell is "TASK: RULE".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..nn import Transformer
from .experiment import Cell, Config, Figure, Outcomes, Series, Table
from .judging import interval
from .training import Batch, Training, train

Task = Callable[[int, Config, torch.Generator], Batch]  # (number of sequences, configuration, generator) -> batch


def task_settings(tasks: Mapping[str, Task], config: Config) -> list[str]:
    return [f"{task}: {rule}" for task in tasks for rule in config["rules"]]


def measure_task(cell: Cell, tasks: Mapping[str, Task], model_for: Callable[[str, int], Transformer]) -> dict[str, Any]:
    """Train a model on the cell's task; its accuracy on sequences that are the same for every rule and seed.

    `model_for(rule, length)` creates the model for sequences of this length.
    """
    name, rule = cell.setting.split(": ")
    task, config = tasks[name], cell.config
    tested = [t.to(cell.device) for t in task(config["evaluate"], config, torch.Generator().manual_seed(10**6))]
    torch.manual_seed(cell.seed)
    model = model_for(rule, tested[0].shape[1])

    def evaluate(model: Transformer) -> dict[str, float]:
        return {"accuracy": accuracy(model, *tested)}

    trained = train(cell, model, Training.of(config), lambda g: task(config["batch"], config, g), evaluate)
    return {"accuracy": trained.metrics[-1].get("accuracy") or 0.0, "seconds": trained.seconds}


@torch.no_grad()
def accuracy(model: Transformer, tokens: Tensor, targets: Tensor) -> float:
    """The share of targets that are the likeliest prediction; negative targets are not counted."""
    counted = targets >= 0
    return (model(tokens).argmax(-1) == targets)[counted].float().mean().item()


def accuracies(outcomes: Outcomes, tasks: list[str], title: str) -> tuple[list[Table], list[Figure]]:
    """The accuracy of every rule at every task: at the end, during training, and of all seeds in one figure."""
    rules = outcomes.config["rules"]

    def found(task: str, rule: str) -> list[float]:
        return outcomes.values(f"{task}: {rule}", "accuracy")

    rows = [[rule, *(interval(found(task, rule)).brief() for task in tasks)] for rule in rules]
    figures = [
        Figure(
            f"{task.capitalize()}: accuracy while training",
            "step",
            "accuracy",
            [outcomes.curve(f"{task}: {rule}", "accuracy", rule) for rule in rules],
        )
        for task in tasks
    ]
    spread = [Series(rule, [], [x for task in tasks for x in found(task, rule)]) for rule in rules]
    figures.append(Figure(title, "accuracy", "", spread, kind="dots", reference=1.0))
    return [Table("Accuracy at the end", ["rule", *tasks], rows)], figures
