"""nanoGPT's published setting for a CPU: its loss, and the time of a training step relative to stock attention."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...nn import Transformer
from ..experiment import Cell, Conclusion, Config, Experiment, Figure, Outcomes, Series, Stopped, Table
from ..judging import differences, interval, judge_effect
from ..training import Training, optimizer_for, text_model, train_on_text

SOURCE = "nanoGPT's README: Shakespeare by characters, on a CPU"
SHAKESPEARE = (
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"  # sha256 of tinyshakespeare's input.txt
)
PUBLISHED = 1.88


def settings(config: Config) -> list[str]:
    return ["regard", "stock SDPA", "time"]


def stock_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def measure(cell: Cell) -> dict[str, Any]:
    if cell.setting == "time":
        return {"ratios": {str(length): time_ratios(cell, length) for length in cell.config["lengths"]}}
    model = text_model(cell, attention=stock_attention if cell.setting == "stock SDPA" else None)
    trained = train_on_text(cell, model)
    return {
        "val": trained.last("val"),
        "seconds": trained.seconds,
        "shakespeare": cell.corpus.digest == SHAKESPEARE,
    }


def time_ratios(cell: Cell, length: int) -> list[float]:
    """The time of some training steps with regard relative to stock attention: a ratio for each turn."""
    config = cell.config
    training = Training.of(config)
    sides = []
    for attend in (None, stock_attention):
        torch.manual_seed(cell.seed)
        sizes = {name: config[name] for name in ("layers", "heads", "width")}
        model = Transformer(len(cell.corpus.characters), length, **sizes, attention=attend).to(cell.device)
        sides.append((model, optimizer_for(model, training)))
    generator = torch.Generator().manual_seed(cell.seed)

    def steps(side: int, pieces: list[Tensor]) -> float:
        model, optimizer = sides[side]
        _synchronize(cell.device)
        began = time.perf_counter()
        for piece in pieces:
            optimizer.zero_grad()
            model.loss(piece).backward()
            optimizer.step()
        _synchronize(cell.device)
        return time.perf_counter() - began

    found = []
    for turn in range(config["turns"] + 1):
        if cell.stopping():
            raise Stopped
        drawn = (cell.corpus.batch(config["batch"], length, generator) for _ in range(config["turn_steps"]))
        pieces = [piece.to(cell.device) for piece in drawn]
        order = (0, 1) if turn % 2 else (1, 0)
        times = {side: steps(side, pieces) for side in order}
        if turn:  # the first turn warms up
            found.append(times[0] / times[1])
    return found


def _synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def conclude(outcomes: Outcomes) -> Conclusion:
    ours, theirs = (outcomes.values(s, "val") for s in ("regard", "stock SDPA"))
    verdicts = [
        judge_effect(
            "With regard a model learns what it learns with stock attention (within 0.02 nats)",
            "ours",
            "loss with regard minus loss with stock SDPA, nats",
            differences(ours, theirs),
            (-0.02, 0.02),
            same=True,
        )
    ]
    if outcomes.each("regard")[0].result["shakespeare"]:
        verdicts.append(
            judge_effect(
                f"Validation loss {PUBLISHED} on tinyshakespeare (within 0.03)",
                SOURCE,
                f"loss minus {PUBLISHED}, nats",
                interval([x - PUBLISHED for x in ours]),
                (-0.03, 0.03),
                same=True,
            )
        )
    lengths = outcomes.config["lengths"]
    medians = {n: [median(o.result["ratios"][str(n)]) for o in outcomes.each("time")] for n in lengths}
    verdicts += [
        judge_effect(
            f"Training with regard is never slower than with stock SDPA at T = {n} (within 3 %)",
            "ours",
            "time of a training step relative to stock SDPA, median over turns",
            interval(medians[n]),
            (0.0, 1.03),
            null=1.03,
        )
        for n in lengths
        if n >= 256
    ]
    rows = [[s, interval(outcomes.values(s, "val")).brief()] for s in ("regard", "stock SDPA")]
    ratio_rows = [[f"T = {n}", interval(medians[n]).brief()] for n in lengths]
    tables = [
        Table("Validation loss (nats per character)", ["attention", "loss"], rows),
        Table("Time of a training step, regard / stock SDPA", ["", "ratio"], ratio_rows),
    ]
    every = {n: [x for o in outcomes.each("time") for x in o.result["ratios"][str(n)]] for n in lengths}
    figures = [
        Figure("Validation loss", "step", "nats", [outcomes.curve(s, "val") for s in ("regard", "stock SDPA")]),
        Figure(
            "Time of a training step, every turn",
            "regard / stock SDPA",
            "",
            [Series(f"T = {n}", [], every[n]) for n in lengths],
            kind="dots",
            reference=1.0,
        ),
    ]
    return Conclusion(verdicts, tables, figures)


EXPERIMENT = Experiment(
    name="baseline",
    question="Does training with regard give nanoGPT's published loss, in no more time?",
    source=SOURCE,
    about="The published CPU setting: 4 layers, 4 heads, width 128, 64 characters, batches of 12, 2000 steps, no "
    "dropout. Give it tinyshakespeare with --text to compare with the published loss. The time is taken in turns.",
    quick={
        "seeds": 1, "steps": 10, "every": 5, "warmup": 3, "rate": 1e-3, "batch": 4, "length": 32, "layers": 2,
        "heads": 2, "width": 32, "evaluate": 8, "lengths": [32, 64], "turns": 2, "turn_steps": 1,
    },
    full={
        "seeds": 3, "steps": 2000, "every": 250, "warmup": 100, "rate": 1e-3, "batch": 12, "length": 64, "layers": 4,
        "heads": 4, "width": 128, "evaluate": 240, "lengths": [64, 256, 512], "turns": 10, "turn_steps": 3,
    },
    settings=settings,
    measure=measure,
    conclude=conclude,
)  # fmt: skip
