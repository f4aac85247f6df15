"""An experiment's configuration with the changes that `--set` requests, checked before anything is written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from .experiment import Config, Experiment, LabError


def configured(experiment: Experiment, quick: bool, changes: Mapping[str, str]) -> Config:
    """The quick or the full configuration with some values changed; each new value is given as text."""
    config = dict(experiment.quick if quick else experiment.full)
    for name, text in changes.items():
        if name not in config:
            raise LabError(f"--set: expected one of {', '.join(config)}, got {name!r}")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        if isinstance(config[name], float) and type(value) is int:
            value = float(value)
        if type(value) is not type(config[name]):
            raise LabError(f"--set {name}: expected {_kind(config[name])} such as {config[name]!r}, got {text!r}")
        config[name] = value
    if config["seeds"] < 1:
        raise LabError(f"--set seeds: expected at least 1, got {config['seeds']}")
    experiment.settings(config)  # raises if the experiment cannot run with these values
    return config


def _kind(value: object) -> str:
    return {int: "a whole number", float: "a number", list: "a JSON list", str: "a word"}[type(value)]


def require_temperatures(config: Config, *required: float) -> None:
    """Raise unless the configured temperatures are valid and contain those that a verdict compares."""
    found = config["temperatures"]
    if not all(isinstance(tau, int | float) and not isinstance(tau, bool) and 0 <= tau < math.inf for tau in found):
        raise LabError(f"--set temperatures: expected finite numbers >= 0, got {found}")
    if not set(required) <= set(found):
        wanted = ", ".join(f"{tau:g}" for tau in required)
        raise LabError(f"--set temperatures: expected {wanted} among them, which the verdicts compare, got {found}")
