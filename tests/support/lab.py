"""Helpers for the tests of the lab: a text to train on, a made-up experiment, and the files of a cell."""

import json
import math
from pathlib import Path

from regard.lab.corpus import Corpus
from regard.lab.experiment import Conclusion, Experiment, Figure, Series, Table
from regard.lab.judging import differences, judge_effect
from regard.lab.runner import Run
from regard.lab.training import text_model, train_on_text

TEXT = Corpus("abc", "the cat sat on the mat. " * 200)

CONFIG = {
    "seeds": 2, "steps": 12, "every": 5, "warmup": 2, "batch": 4, "length": 8, "layers": 1, "heads": 2, "width": 8,
    "evaluate": 4,
}  # fmt: skip


def measure(cell):
    # Dropout uses the global generator, which is part of the state.
    trained = train_on_text(cell, text_model(cell, dropout=0.1 if cell.setting == "dropout" else 0.0))
    return {"val": trained.last("val"), "worst": math.inf, "seconds": trained.seconds}


def conclude(outcomes):
    effect = differences(outcomes.values("dropout", "val"), outcomes.values("none", "val"))
    lines = Figure("Loss <b>", "step", "nats", [outcomes.curve(s, "val") for s in outcomes.settings])
    dots = Figure("Loss", "nats", "", [Series("none", [], outcomes.values("none", "val"))], kind="dots", reference=2.0)
    table = Table("T", ["a", "b"], [["x & y", "<script>alert(1)</script>"]])
    return Conclusion([judge_effect("dropout hurts", "us", "loss", effect, (0, math.inf))], [table], [lines, dots])


EXPERIMENT = Experiment(
    "made-up", "?", "us", "a test", CONFIG, CONFIG, lambda c: ["none", "dropout"], measure, conclude
)


def made_up_run(folder: Path) -> Run:
    """A run of the made-up experiment, with its folder opened."""
    run = Run(EXPERIMENT, dict(CONFIG), TEXT, folder, "full", "regard lab run made-up")
    run.open()
    return run


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a cell, without the times in its result and in the header of its checkpoint."""
    from safetensors.torch import load_file

    found = {"metrics": (folder / "metrics.jsonl").read_bytes()}
    found |= {n: t.numpy().tobytes() for n, t in load_file(folder / "checkpoint.safetensors").items()}
    result = json.loads((folder / "result.json").read_text())
    return found | {"result": json.dumps({**result, "seconds": 0}).encode()}
