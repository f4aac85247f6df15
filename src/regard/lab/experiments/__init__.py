"""The experiments, one file each.

To add an experiment:

1. Write `experiments/NAME.py` with an `EXPERIMENT = Experiment(name="NAME", ...)` (`..experiment` describes its fields:
   two configurations and the functions `settings`, `measure` and `conclude`).
2. Add "NAME" to `NAMES` below.

`regard lab run NAME --quick` then runs it in seconds, and `regard lab list` shows it. To record its verdicts, run it
in full with `regard lab run NAME` and write docs/lab.md with `python -m regard.lab.results runs`.
"""

from __future__ import annotations

import importlib

from ..experiment import Experiment, LabError

NAMES = (
    "baseline",
    "scaling",
    "normalizer",
    "temperature",
    "recall",
    "matching",
    "sampling",
    "masking",
    "sharpness",
    "sinks",
    "priors",
    "forgetting",
    "variance",
)


def load(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in NAMES:
        raise LabError(f"NAME: expected one of {', '.join(NAMES)}, got {name!r}")
    return importlib.import_module(f".{name}", __name__).EXPERIMENT
