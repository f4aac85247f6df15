"""`regard lab list`, `run` and `report`: the experiments, their progress and their verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ...doctor import SettingError
from ...lab.experiment import LabError
from ...lab.experiments import NAMES, load
from ...lab.judging import MEASURED, NOT_SIGNIFICANT, REFUTED
from ...lab.page import read_conclusions, to_html
from ...lab.session import Display, RunRequest, run_experiments
from ..terminal import check_outputs, fail, plain_table, write_outputs

COLOURS = {MEASURED: "green", NOT_SIGNIFICANT: "dim", REFUTED: "red"}


def list_experiments() -> None:
    """List the experiments and their questions."""
    table = plain_table()
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("question")
    table.add_column("source")
    for name in NAMES:
        experiment = load(name)
        table.add_row(name, Text(experiment.question), Text(experiment.source, style="dim"))
    Console().print(table)


def run_experiment(
    name: Annotated[str, typer.Argument(help="An experiment that `regard lab list` shows, or all.")],
    quick: Annotated[bool, typer.Option("--quick", help="Run for seconds only, too little for a verdict.")] = False,
    text: Annotated[Path | None, typer.Option(help="Learn from this file, not from Python's standard library.")] = None,
    out: Annotated[Path, typer.Option(help="The folder of all runs; each experiment has its own inside.")] = Path(
        "runs"
    ),
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change the configuration: name=value; repeatable.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the earlier run and start again.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the cells and the threads.")] = 1,
    ray: Annotated[bool, typer.Option("--ray", help="Compute the cells on a Ray cluster, or on a local Ray.")] = False,
    ray_address: Annotated[
        str | None, typer.Option(help="The cluster's address; by default Ray looks for one, or starts its own.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:n, or auto (a GPU if there is one).")] = "cpu",
    precision: Annotated[
        Literal["fp32", "bf16"], typer.Option(help="bf16: products in bfloat16, weights and sums in float32.")
    ] = "fp32",
) -> None:
    """Run an experiment: every setting with every seed, then the verdicts.

    After Ctrl-C the same command continues from the last step.
    """
    request = RunRequest(name, quick, text, out, changes or [], fresh, workers, ray, ray_address, device, precision)
    try:
        finished = run_experiments(request, TerminalDisplay())
    except (LabError, SettingError) as error:
        fail(error)
    except OSError as error:
        if error.filename is None or not Path(error.filename).resolve().is_relative_to(out.resolve()):
            raise
        fail(f"--out: expected a folder that can be written, got {error.filename}: {error.strerror}")
    raise typer.Exit(0 if finished else 130)


def report_experiments(
    runs: Annotated[Path, typer.Argument(help="The folder of all runs.")] = Path("runs"),
    out: Annotated[Path, typer.Option(help="Write the page, one HTML file, to this path.")] = Path("lab.html"),
) -> None:
    """Write one HTML page with the verdicts and figures of all runs."""
    check_outputs({"--out": out})
    records = read_conclusions(runs)
    if not records:
        fail(f"{runs}: expected a folder with finished runs, got none")
    write_outputs({"--out": (out, lambda: to_html(records), "report")}, Console())


# --- what a run shows -------------------------------------------------------------------------------------------------


class TerminalDisplay(Display):
    """Two progress bars, for the cells and for the steps of the current cell, and the conclusion of each experiment."""

    def __init__(self) -> None:
        self._console, self._errors = Console(), Console(stderr=True)
        self._bars: Progress | None = None
        self._cells = self._steps = TaskID(0)

    @contextmanager
    def running(self, experiment: str, cells: int, finished: int) -> Iterator[None]:
        columns = TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), _Rate(), TimeRemainingColumn()
        with Progress(*columns, console=self._errors, transient=True) as self._bars:
            self._cells = self._bars.add_task(experiment, total=cells, completed=finished)
            self._steps = self._bars.add_task("", total=None, visible=False)
            yield
        self._bars = None

    def cell(self, description: str) -> None:
        assert self._bars is not None
        self._bars.reset(self._steps, description=description, total=None, visible=True)

    def steps(self, done: int, total: int, description: str | None = None) -> None:
        assert self._bars is not None
        self._bars.update(self._steps, description=description, completed=done, total=total or None, visible=True)

    def cell_finished(self) -> None:
        assert self._bars is not None
        self._bars.advance(self._cells)

    def concluded(self, record: dict[str, Any]) -> None:
        show_conclusion(record, self._console)

    def stopped(self) -> None:
        self._errors.print(Text("stopped; the same command continues from here"))


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.1f}/s", style="progress.data.speed")


def show_conclusion(record: dict[str, Any], console: Console) -> None:
    """The tables of an experiment, and its verdicts with their notes; the note of a quick run is shown once."""
    quick = record["profile"] == "quick"
    console.print(Text.assemble((record["name"], "bold"), f"  {record['question']}"))
    for found in record["tables"]:
        table = plain_table(title=found["title"], title_justify="left")
        for name in found["header"]:
            table.add_column(name)
        for row in found["rows"]:
            table.add_row(*map(Text, row))
        console.print(table)
        console.print()
    table = plain_table(expand=True)
    table.add_column("claim", ratio=4)
    table.add_column("measured", ratio=6)
    table.add_column("verdict", width=15)
    for found in record["verdicts"]:
        measured = Text(found["effect"])
        if found["note"] and not quick:
            measured.append(f"\n{found['note']}", "dim")
        table.add_row(Text(found["claim"]), measured, Text(found["verdict"], style=COLOURS[found["verdict"]]))
    console.print(table)
    if quick and record["verdicts"]:
        console.print(Text(record["verdicts"][0]["note"], "dim"))
    console.print()
