"""The experiments, one file each."""

from __future__ import annotations

import importlib

from ..runner import Experiment, Refused

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
    "variance",
)


def load(name: str) -> Experiment:
    if name not in NAMES:
        raise Refused(f"NAME: expected one of {', '.join(NAMES)}, got {name!r}")
    return importlib.import_module(f".{name}", __name__).EXPERIMENT
