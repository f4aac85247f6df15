"""Runs an experiment: every setting with every seed is a cell with a folder of its own.

A finished cell is never computed again, and one that was interrupted goes on from its checkpoint. What a run leaves:

    config.json      what was asked, on which text        cells/SETTING/SEED/metrics.jsonl          as it was trained
    versions.json    of what computed it                                     checkpoint.safetensors where it stands
    conclusion.json  verdicts, tables and figures                            result.json            what came out
                                                                             versions.json          of a Ray node
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .. import __version__
from . import distributed
from .corpus import Corpus
from .judging import NOT_SIGNIFICANT, Judged

Config = dict[str, Any]
Precision = Literal["fp32", "bf16"]
CPU = torch.device("cpu")


class Refused(Exception):
    """What was asked cannot be done; the message says why."""


class Stopped(Exception):
    """A cell was left unfinished on request, its checkpoint written."""


# --- what an experiment is --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Series:
    """A line through points, with its spread if it has one. Not finite: a gap."""

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
    reference: float | None = None  # a value of y to compare with


@dataclass(frozen=True)
class Conclusion:
    """What an experiment says once its cells are done."""

    verdicts: list[Judged]
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


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
        """One setting's cells, by seed."""
        return [self._by_cell[setting, seed] for seed in self.seeds]

    def values(self, setting: str, name: str) -> list[float]:
        """A result of one setting, by seed; what was not finite was written as null, and is inf."""
        return [math.inf if o.result[name] is None else o.result[name] for o in self.each(setting)]

    def curve(self, setting: str, name: str, label: str | None = None) -> Series:
        """A metric over the steps: its mean over the seeds, its lowest and its highest."""
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


@dataclass(frozen=True)
class Experiment:
    """One file of `experiments`. `quick` and `full` are its configurations: plain numbers and lists, by name.

    `settings` names what is compared; `measure` runs one setting with one seed and returns numbers by name; `conclude`
    judges the claims from all of them.
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


# --- one cell ---------------------------------------------------------------------------------------------------------


@dataclass
class Cell:
    """One setting with one seed: where it writes, and whom it tells."""

    setting: str
    seed: int
    config: Config
    corpus: Corpus
    folder: Path
    advance: Callable[[int, int], None] = lambda done, total: None
    stopping: Callable[[], bool] = lambda: False
    device: torch.device = CPU  # of the model; random numbers are drawn on the CPU, the same for all devices
    precision: Precision = "fp32"

    @property
    def _metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def log(self, record: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl; what is not finite becomes null."""
        if distributed.rank() != 0:
            return
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(record)) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        return _lines(self._metrics)

    def checkpoint(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Write where the cell stands; the old checkpoint stays until the new one is complete."""
        if distributed.rank() != 0:
            return
        from safetensors.torch import save_file

        facts = {**facts, "lines": len(self.metrics())}
        path = self.folder / "checkpoint.safetensors"
        partial = path.with_suffix(".partial")
        save_file({n: t.contiguous() for n, t in tensors.items()}, partial, {"facts": json.dumps(facts)})
        os.replace(partial, path)

    def restore(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What the last checkpoint holds, if there is one; metrics logged after it are dropped, they come again."""
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
            self._metrics.write_text("".join(lines[: facts["lines"]]), encoding="utf-8")
        return tensors, facts


def finite(value: Any) -> Any:
    """The same with None for every number that is not finite: JSON has none of them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def folder_of(run: Path, setting: str, seed: int) -> Path:
    """Where a run has one of its cells."""
    return run / "cells" / "".join(c if c.isalnum() or c in "-." else "_" for c in setting) / str(seed)


def outcome(run: Path, setting: str, seed: int) -> Outcome | None:
    """What a cell gave, if it is finished."""
    folder = folder_of(run, setting, seed)
    if not (folder / "result.json").exists():
        return None
    result = json.loads((folder / "result.json").read_text("utf-8"))
    return Outcome(setting, seed, result, _lines(folder / "metrics.jsonl"))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """An experiment with a configuration, a text and a folder."""

    experiment: Experiment
    config: Config
    corpus: Corpus
    folder: Path
    profile: str = "full"
    command: str = ""
    device: torch.device = CPU
    precision: Precision = "fp32"

    def cells(self) -> list[tuple[str, int]]:
        """Seed by seed, so that an interrupted run has whole comparisons."""
        settings = self.experiment.settings(self.config)
        return [(setting, seed) for seed in range(self.config["seeds"]) for setting in settings]

    def folder_of(self, setting: str, seed: int) -> Path:
        return folder_of(self.folder, setting, seed)

    def _asked(self) -> dict[str, Any]:
        about = {"name": self.corpus.name, "characters": len(self.corpus.text), "sha256": self.corpus.digest}
        return {"experiment": self.experiment.name, "profile": self.profile, "config": self.config, "corpus": about}

    def open(self) -> None:
        """Make the folder, or see that it holds the same run, begun with the same versions."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, mine in (
            ("config.json", self._asked()),
            ("versions.json", versions(self.device, self.precision)),
        ):
            path = self.folder / name
            if not path.exists():
                path.write_text(json.dumps(mine, indent=2) + "\n", encoding="utf-8")
                continue
            there = json.loads(path.read_text("utf-8"))
            mine = json.loads(json.dumps(mine))
            if there != mine:
                raise Refused(
                    f"{path}: this run was begun with {_difference(there, mine)}; use another --out, or --fresh"
                )

    def result(self, setting: str, seed: int) -> Outcome | None:
        """What a cell gave, if it is finished."""
        return outcome(self.folder, setting, seed)

    def measure(
        self,
        setting: str,
        seed: int,
        advance: Callable[[int, int], None] = lambda done, total: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Compute one cell, or go on with it. Raises `Stopped` if it is to stop before it is finished."""
        folder = self.folder_of(setting, seed)
        folder.mkdir(parents=True, exist_ok=True)
        cell = Cell(setting, seed, self.config, self.corpus, folder, advance, stopping, self.device, self.precision)
        torch.manual_seed(seed)
        result = finite(self.experiment.measure(cell))
        if distributed.rank() == 0:
            partial = folder / "result.partial"
            partial.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
            os.replace(partial, folder / "result.json")
        distributed.agree(None)

    def outcomes(self) -> Outcomes:
        """The seeds for which every setting is finished."""
        settings, found = self.experiment.settings(self.config), []
        for seed in range(self.config["seeds"]):
            row = [self.result(setting, seed) for setting in settings]
            found += [o for o in row if o is not None] if None not in row else []
        return Outcomes(found, self.config)

    def conclude(self) -> dict[str, Any] | None:
        """Judge what is finished and write conclusion.json; None if no seed is complete."""
        outcomes = self.outcomes()
        if not outcomes.seeds:
            return None
        about = self.experiment
        concluded = finite(asdict(about.conclude(outcomes)))
        if self.profile == "quick":
            for judged in concluded["verdicts"]:
                judged |= {"verdict": NOT_SIGNIFICANT, "note": "A quick run shows that all works, and decides nothing."}
        written = {
            "name": about.name,
            "question": about.question,
            "source": about.source,
            "about": about.about,
            "command": self.command,
            "complete": len(outcomes.seeds) == self.config["seeds"],
            "seeds": outcomes.seeds,
            **self._asked(),
            "versions": json.loads((self.folder / "versions.json").read_text("utf-8")),
            **concluded,
        }
        text = json.dumps(written, indent=1, allow_nan=False, ensure_ascii=False)
        (self.folder / "conclusion.json").write_text(text + "\n", encoding="utf-8")
        return written


def _difference(there: dict[str, Any], mine: dict[str, Any]) -> str:
    """The first thing that differs, by its path."""
    for name in sorted({*there, *mine}):
        a, b = there.get(name), mine.get(name)
        if isinstance(a, dict) and isinstance(b, dict) and a != b:
            return f"{name}.{_difference(a, b)}"
        if a != b:
            return f"{name} = {a!r}, not {b!r}"
    raise AssertionError("nothing differs")


@cache
def sources() -> str:
    """A hash of the package's Python files, by name and content, as this process found them first."""
    package, found = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        found.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()


@cache
def engine() -> str | None:
    """A hash of the compiled engine, as this process found it first; None if it was not built. Its sources are not in
    `sources`, and those at hand need not be those that it was built from."""
    found = importlib.util.find_spec("regard._native")
    if found is None or found.origin is None:
        return None
    return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()


def versions(device: torch.device = CPU, precision: Precision = "fp32") -> dict[str, Any]:
    """What may change a result's last digits, or the result. `threads` is the number that computes one cell."""
    from .. import doctor

    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return {
        "regard": __version__,
        "sources": sources(),
        "engine": engine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": doctor.machine()["cpu"],
        "isa": doctor.engine().get("isa", "none"),
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "precision": precision,
        "threads": torch.get_num_threads(),
        "processes": distributed.processes(),
    }


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C only makes the given function say True; the second one interrupts."""
    import signal

    asked = False

    def ask(*_: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print("finishing this step (Ctrl-C again: at once) ...", file=sys.stderr)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def configured(experiment: Experiment, quick: bool, changes: Mapping[str, str]) -> Config:
    """A profile's configuration with some values changed, each given as text."""
    config = dict(experiment.quick if quick else experiment.full)
    for name, text in changes.items():
        if name not in config:
            raise Refused(f"--set: expected one of {', '.join(config)}, got {name!r}")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        if isinstance(config[name], float) and type(value) is int:
            value = float(value)
        if type(value) is not type(config[name]):
            raise Refused(f"--set {name}: expected {_kind(config[name])} such as {config[name]!r}, got {text!r}")
        config[name] = value
    if config["seeds"] < 1:
        raise Refused(f"--set seeds: expected at least 1, got {config['seeds']}")
    experiment.settings(config)  # refuses what the experiment cannot do, before anything is written
    return config


def need_temperatures(config: Config, *needed: float) -> None:
    """See that the configured temperatures are some, and that those a verdict compares are among them."""
    found = config["temperatures"]
    if not all(isinstance(tau, int | float) and not isinstance(tau, bool) and 0 <= tau < math.inf for tau in found):
        raise Refused(f"--set temperatures: expected finite numbers >= 0, got {found}")
    if not set(needed) <= set(found):
        wanted = ", ".join(f"{tau:g}" for tau in needed)
        raise Refused(f"--set temperatures: expected {wanted} among them, which the verdicts compare, got {found}")


def _kind(value: object) -> str:
    return {int: "a whole number", float: "a number", list: "a JSON list", str: "a word"}[type(value)]
