"""Models that were trained on short text and read longer text: their losses by length, as a table and a figure."""

from __future__ import annotations

import math

import torch

from ..nn import Transformer
from .experiment import Cell, Config, Figure, Outcomes, Series, Table
from .judging import interval
from .training import mean_loss, text_model, train_on_text, validation

# The models and their training, in the two profiles of an experiment.
QUICK: Config = {
    "seeds": 2, "steps": 30, "every": 15, "warmup": 5, "rate": 3e-3, "batch": 8, "length": 16, "layers": 2,
    "heads": 2, "width": 32, "evaluate": 8,
}  # fmt: skip
FULL: Config = {
    "seeds": 3, "steps": 1500, "every": 150, "warmup": 50, "rate": 2e-3, "batch": 16, "length": 64, "layers": 3,
    "heads": 4, "width": 64, "evaluate": 64,
}  # fmt: skip


def losses_by_length(cell: Cell, times: tuple[int, ...], **changes: object) -> list[float]:
    """Train a model without position embeddings on pieces of `length` characters. Returns its loss on pieces that are
    `times` as long.

    The text is the same for every length: windows of the longest, read whole and cut into equal parts."""
    model: Transformer = text_model(cell, positions=None, **changes)
    train_on_text(cell, model)
    model.eval()
    longest = cell.config["length"] * max(times)
    pieces = validation(cell.corpus, cell.config["evaluate"], longest)
    losses = []
    for factor in times:
        T = cell.config["length"] * factor
        cut = torch.cat([pieces[:, n * T : (n + 1) * T + 1] for n in range(longest // T)])
        losses.append(mean_loss(model, cut, at_once=max(1, 32 // factor)))
    return losses


def shown_by_length(outcomes: Outcomes, times: tuple[int, ...], what: str) -> tuple[list[Table], list[Figure]]:
    """The losses of every setting, whose result is {"losses": losses_by_length(...)}; `what` heads the settings."""
    rows, lines = [], []
    for setting in outcomes.settings:
        columns = [[o.result["losses"][n] for o in outcomes.each(setting)] for n in range(len(times))]
        rows.append([setting, *(interval(column).brief() for column in columns)])
        means = [math.fsum(c) / len(c) for c in columns]
        ends = [min(c) for c in columns], [max(c) for c in columns]
        lines.append(Series(setting, [float(t) for t in times], means, *ends))
    figures = [
        Figure("Loss on the same text in longer pieces", "length / training length", "nats", lines, log_x=True),
        Figure("Validation loss while training", "step", "nats", [outcomes.curve(s, "val") for s in outcomes.settings]),
    ]
    return [Table("Loss (nats per character)", [what, *(f"{t}x" for t in times)], rows)], figures
