"""Runs an experiment: every setting with every seed is a cell with a folder of its own.

A finished cell is not computed again, and an interrupted one continues from its checkpoint. The files of a run:

    config.json      configuration and text             cells/SETTING/SEED/metrics.jsonl           logged in training
    versions.json    what computed it                                      checkpoint.safetensors  the latest state
    conclusion.json  verdicts, tables and figures                          result.json             the cell's results
                                                                           versions.json           of a Ray node
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .._files import write
from . import distributed
from .corpus import Corpus
from .experiment import CPU, Cell, Config, Experiment, LabError, Outcome, Outcomes, Precision, finite, read_lines
from .judging import NOT_SIGNIFICANT
from .provenance import versions


def cell_folder(run: Path, setting: str, seed: int) -> Path:
    """The folder of one cell, inside that of its run."""
    return run / "cells" / "".join(c if c.isalnum() or c in "-." else "_" for c in setting) / str(seed)


def read_outcome(run: Path, setting: str, seed: int) -> Outcome | None:
    """The results of a cell, or None if it is not finished."""
    folder = cell_folder(run, setting, seed)
    if not (folder / "result.json").exists():
        return None
    result = json.loads((folder / "result.json").read_text("utf-8"))
    return Outcome(setting, seed, result, read_lines(folder / "metrics.jsonl"))


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
        """All cells, seed by seed, so that an interrupted run has complete comparisons."""
        settings = self.experiment.settings(self.config)
        return [(setting, seed) for seed in range(self.config["seeds"]) for setting in settings]

    def folder_of(self, setting: str, seed: int) -> Path:
        return cell_folder(self.folder, setting, seed)

    def _request(self) -> dict[str, Any]:
        about = {"name": self.corpus.name, "characters": len(self.corpus.text), "sha256": self.corpus.digest}
        return {"experiment": self.experiment.name, "profile": self.profile, "config": self.config, "corpus": about}

    def open(self) -> None:
        """Create the folder, or check that it holds this run, started with the same configuration and versions."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, mine in (
            ("config.json", self._request()),
            ("versions.json", versions(self.device, self.precision)),
        ):
            path = self.folder / name
            if not path.exists():
                write(path, json.dumps(mine, indent=2) + "\n")
                continue
            there = json.loads(path.read_text("utf-8"))
            mine = json.loads(json.dumps(mine))
            if there != mine:
                difference = _first_difference(there, mine)
                raise LabError(f"{path}: this run was started with {difference}; use another --out, or --fresh")

    def result(self, setting: str, seed: int) -> Outcome | None:
        """The results of a cell, or None if it is not finished."""
        return read_outcome(self.folder, setting, seed)

    def measure(
        self,
        setting: str,
        seed: int,
        advance: Callable[[int, int], None] = lambda done, total: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Compute one cell, from its checkpoint if it has one. Raises `Stopped` if `stopping()` becomes true first."""
        folder = self.folder_of(setting, seed)
        folder.mkdir(parents=True, exist_ok=True)
        cell = Cell(setting, seed, self.config, self.corpus, folder, advance, stopping, self.device, self.precision)
        torch.manual_seed(seed)
        result = finite(self.experiment.measure(cell))
        if distributed.rank() == 0:
            write(folder / "result.json", json.dumps(result, indent=2) + "\n")
        distributed.wait_for_all()

    def outcomes(self) -> Outcomes:
        """The cells of those seeds for which every setting is finished."""
        settings, found = self.experiment.settings(self.config), []
        for seed in range(self.config["seeds"]):
            row = [self.result(setting, seed) for setting in settings]
            found += [o for o in row if o is not None] if None not in row else []
        return Outcomes(found, self.config)

    def conclude(self) -> dict[str, Any] | None:
        """Judge the finished cells and write conclusion.json; None if no seed is complete."""
        outcomes = self.outcomes()
        if not outcomes.seeds:
            return None
        about = self.experiment
        concluded = finite(asdict(about.conclude(outcomes)))
        if self.profile == "quick":
            note = "A quick run shows that the experiment works; it is too small for a verdict."
            for judged in concluded["verdicts"]:
                judged |= {"verdict": NOT_SIGNIFICANT, "note": note}
        written = {
            "name": about.name,
            "question": about.question,
            "source": about.source,
            "about": about.about,
            "command": self.command,
            "complete": len(outcomes.seeds) == self.config["seeds"],
            "seeds": outcomes.seeds,
            **self._request(),
            "versions": json.loads((self.folder / "versions.json").read_text("utf-8")),
            **concluded,
        }
        text = json.dumps(written, indent=1, allow_nan=False, ensure_ascii=False)
        write(self.folder / "conclusion.json", text + "\n")
        return written


def _first_difference(there: dict[str, Any], mine: dict[str, Any]) -> str:
    """The first value that differs, by its path."""
    for name in sorted({*there, *mine}):
        a, b = there.get(name), mine.get(name)
        if isinstance(a, dict) and isinstance(b, dict) and a != b:
            return f"{name}.{_first_difference(a, b)}"
        if a != b:
            return f"{name} = {a!r}, not {b!r}"
    raise AssertionError("the two are equal")
