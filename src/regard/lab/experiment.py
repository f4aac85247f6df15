"""What an experiment declares (`Experiment`), what it receives (`Cell`), and what it returns (`Conclusion`).

An experiment compares settings. Every setting is run with every seed; one such run is a cell. `measure` computes one
cell, and `conclude` judges the claims from the results of all cells.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .._files import write
from . import distributed
from .corpus import Corpus
from .judging import Judged

Config = dict[str, Any]
Precision = Literal["fp32", "bf16"]
CPU = torch.device("cpu")


class LabError(Exception):
    """A request that the lab cannot carry out. The message states the reason and is shown without a traceback."""


class Stopped(Exception):
    """A cell was stopped on request before it was finished; its checkpoint is written."""


# --- what an experiment declares --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """One file of `experiments`. `quick` and `full` are its configurations: plain numbers, words and lists, by name.

    `settings` names what is compared; `measure` runs one setting with one seed and returns its results by name;
    `conclude` judges the claims from all results. Every configuration has "seeds", the number of seeds.
    """

    name: str
    question: str
    source: str
    about: str
    quick: Config
    full: Config
    settings: Callable[[Config], list[str]]
    measure: Callable[[Cell], dict[str, Any]]
    conclude: Callable[[Outcomes], Conclusion]


# --- what it receives -------------------------------------------------------------------------------------------------


@dataclass
class Cell:
    """One setting with one seed: its configuration, its folder, and callbacks for progress and stopping."""

    setting: str
    seed: int
    config: Config
    corpus: Corpus
    folder: Path
    advance: Callable[[int, int], None] = lambda done, total: None
    stopping: Callable[[], bool] = lambda: False
    device: torch.device = CPU  # of the model; random numbers are drawn on the CPU, so that all devices get the same
    precision: Precision = "fp32"

    @property
    def _metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl; numbers that are not finite become null."""
        if distributed.rank() != 0:
            return
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(record)) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self._metrics)

    def checkpoint(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Save the state of the cell. The previous checkpoint is replaced only when the new one is complete."""
        if distributed.rank() != 0:
            return
        from safetensors.torch import save  # optional: only runs need it

        facts = {**facts, "lines": len(self.metrics())}
        content = save({n: t.contiguous() for n, t in tensors.items()}, {"facts": json.dumps(facts)})
        write(self.folder / "checkpoint.safetensors", content)

    def restore(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The tensors and facts of the last checkpoint, if there is one.

        Metrics that were logged after the checkpoint are removed, because they will be logged again.
        """
        from safetensors import safe_open

        path = self.folder / "checkpoint.safetensors"
        if not path.exists():
            if distributed.rank() == 0:
                self._metrics.unlink(missing_ok=True)
            return None
        with safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if distributed.rank() == 0:
            lines = self._metrics.read_text("utf-8").splitlines(keepends=True) if self._metrics.exists() else []
            write(self._metrics, "".join(lines[: facts["lines"]]))
        return tensors, facts


def finite(value: Any) -> Any:
    """The value with None in place of every number that is not finite, which JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON Lines file; none if the file does not exist."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


# --- what its cells give ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A finished cell."""

    setting: str
    seed: int
    result: dict[str, Any]
    metrics: list[dict[str, Any]]


class Outcomes:
    """The finished cells of an experiment: every setting with the same seeds."""

    def __init__(self, outcomes: list[Outcome], config: Config) -> None:
        self._by_cell = {(o.setting, o.seed): o for o in outcomes}
        self.config = config
        self.settings = list(dict.fromkeys(o.setting for o in outcomes))
        self.seeds = sorted({o.seed for o in outcomes})

    def each(self, setting: str) -> list[Outcome]:
        """The cells of one setting, by seed."""
        return [self._by_cell[setting, seed] for seed in self.seeds]

    def values(self, setting: str, name: str) -> list[float]:
        """One result of a setting, by seed. A result that was not finite is stored as null and read as inf."""
        return [math.inf if o.result[name] is None else o.result[name] for o in self.each(setting)]

    def curve(self, setting: str, name: str, label: str | None = None) -> Series:
        """A metric over the steps: the mean, the lowest and the highest over the seeds."""
        columns: dict[int, list[float]] = {}
        for outcome in self.each(setting):
            for record in outcome.metrics:
                if record.get(name) is not None:
                    columns.setdefault(record["step"], []).append(record[name])
        steps = [step for step in sorted(columns) if len(columns[step]) == len(self.seeds)]
        kept = [columns[step] for step in steps]
        return Series(
            label or setting,
            [float(s) for s in steps],
            [math.fsum(c) / len(c) for c in kept],
            [min(c) for c in kept],
            [max(c) for c in kept],
        )


# --- what it returns --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Series:
    """A line through points, with its spread if it has one. A value that is not finite leaves a gap."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


@dataclass(frozen=True)
class Figure:
    """Lines over x, or (kind "dots") one row per series: a dot at every y, a bar from low to high around their mean."""

    title: str
    x: str
    y: str
    series: list[Series]
    kind: Literal["lines", "dots"] = "lines"
    log_x: bool = False
    log_y: bool = False
    reference: float | None = None  # a value to compare with, drawn as a dashed line


@dataclass(frozen=True)
class Conclusion:
    """The verdicts, tables and figures of an experiment whose cells are finished."""

    verdicts: list[Judged]
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
