"""What `regard lab run` does: the cells one after another behind a progress bar, and the verdicts in a table."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from . import cluster, distributed
from .corpus import Corpus, from_file, standard_library
from .experiments import NAMES, load
from .judging import MEASURED, NOT_SIGNIFICANT, REFUTED
from .runner import Precision, Refused, Run, Stopped, configured, interruptible
from .workers import measure_all

COLOURS = {MEASURED: "green", NOT_SIGNIFICANT: "dim", REFUTED: "red"}


def run_all(
    name: str,
    quick: bool,
    text: Path | None,
    out: Path,
    changes: Sequence[str],
    fresh: bool,
    workers: int,
    errors: Console,
    console: Console,
    *,
    ray: bool = False,
    ray_address: str | None = None,
    device: str = "cpu",
    precision: Precision = "fp32",
) -> bool:
    """Run one experiment, or all; False if it was interrupted. Under torchrun, all processes call this."""
    if (workers > 1 or ray) and distributed.asked() > 1:
        asked = "--ray: expected no" if ray else "--workers: expected 1"
        raise Refused(f"{asked} under torchrun, whose processes share each batch")
    if workers > 1 and ray:
        raise Refused("--workers: expected 1 with --ray, where the cluster says how many cells run at once")
    if ray_address is not None and not ray:
        raise Refused("--ray-address: expected none without --ray")
    if workers > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    with _device(device, ray, ray_address) as on:
        if distributed.rank() != 0:
            errors, console = Console(quiet=True), Console(quiet=True)
        experiments = [load(n) for n in (NAMES if name == "all" else (name,))]
        corpus = _corpus(text, quick)
        profile = "quick" if quick else "full"
        for experiment in experiments:
            config = configured(experiment, quick, _changes(changes))
            folder = out / (experiment.name + ("-quick" if quick else ""))
            command = _command(experiment.name, quick, text, changes, on, precision)
            run = Run(experiment, config, corpus, folder, profile, command, on, precision)
            if distributed.rank() == 0:
                _open(run, fresh)
            distributed.agree(None)
            finished = _run(run, workers, ray, errors)
            concluded = run.conclude() if distributed.rank() == 0 else None
            if concluded is not None:
                show(concluded, console)
            if not finished:
                errors.print(Text("stopped; the same command goes on from here"))
                return False
    return True


@contextmanager
def _device(name: str, ray: bool, address: str | None) -> Iterator[torch.device]:
    """What to compute on; inside, Ray is there, or the other processes of torchrun are joined."""
    with cluster.connected(address) if ray else nullcontext():
        try:
            found = cluster.device_named(name) if ray else distributed.device_named(name)
        except ValueError as problem:
            raise Refused(f"--device: {problem}") from None
        if not ray:
            distributed.join(found)
        yield found


def _open(run: Run, fresh: bool) -> None:
    if fresh and run.folder.exists():
        if not (run.folder / "config.json").exists():
            raise Refused(f"{run.folder}: expected the folder of a run, got one without config.json; not deleted")
        shutil.rmtree(run.folder)
    run.open()


def _corpus(text: Path | None, quick: bool) -> Corpus:
    if text is None:
        return standard_library(200_000 if quick else 4_000_000)
    try:
        return from_file(text)
    except (OSError, ValueError) as problem:
        raise Refused(f"--text: {problem}") from None


def _changes(changes: Sequence[str]) -> dict[str, str]:
    found = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise Refused(f"--set: expected name=value, got {change!r}")
        found[name] = value
    return found


def _command(
    name: str, quick: bool, text: Path | None, changes: Sequence[str], device: torch.device, precision: Precision
) -> str:
    words = ["regard", "lab", "run", name, *(["--quick"] if quick else [])]
    words += ["--text", text.name] if text is not None else []
    words += ["--device", device.type] if device.type != "cpu" else []
    words += ["--precision", precision] if precision != "fp32" else []
    return shlex.join([*words, *(word for change in changes for word in ("--set", change))])


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.1f}/s", style="progress.data.speed")


def _run(run: Run, workers: int, ray: bool, errors: Console) -> bool:
    cells = run.cells()
    columns = TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), _Rate(), TimeRemainingColumn()
    with interruptible() as stopping, Progress(*columns, console=errors, transient=True) as bars:
        whole = bars.add_task(run.experiment.name, total=len(cells))
        if workers > 1 or ray:
            bars.update(whole, completed=sum(run.result(*cell) is not None for cell in cells))
        if workers > 1:
            return measure_all(run, workers, lambda: bars.advance(whole), stopping)
        step = bars.add_task("", total=None)
        if ray:

            def steps(cells: int, done: int, total: int) -> None:
                bars.update(step, description=f"steps of {cells} cells", completed=done, total=total or None)

            try:
                return cluster.measure_all(run, lambda: bars.advance(whole), stopping, steps)
            except KeyboardInterrupt:
                return False
        for setting, seed in cells:
            if distributed.agree(stopping()):
                return False
            if distributed.agree(run.result(setting, seed) is None):
                bars.reset(step, description=f"{setting}, seed {seed}", total=None)
                try:
                    run.measure(
                        setting, seed, lambda done, total: bars.update(step, completed=done, total=total), stopping
                    )
                except (Stopped, KeyboardInterrupt):
                    return False
            bars.advance(whole)
    return True


def show(record: dict[str, Any], console: Console) -> None:
    """A run's tables and verdicts, in the terminal."""
    console.print(Text.assemble((record["name"], "bold"), f"  {record['question']}"))
    for found in record["tables"]:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0), title=found["title"])
        table.title_justify = "left"
        for name in found["header"]:
            table.add_column(name)
        for row in found["rows"]:
            table.add_row(*map(Text, row))
        console.print(table)
        console.print()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0), expand=True)
    table.add_column("claim", ratio=4)
    table.add_column("measured", ratio=6)
    table.add_column("verdict", width=15)
    for found in record["verdicts"]:
        colour = COLOURS[found["verdict"]]
        table.add_row(Text(found["claim"]), Text(found["effect"]), Text(found["verdict"], style=colour))
    console.print(table)
    console.print()
