"""Carries out `regard lab run`: opens the run of each experiment, computes its cells and concludes.

A `Display` receives the progress; that of the command line draws progress bars and tables.
"""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import cluster, distributed
from .configuration import configured
from .corpus import Corpus, from_file, standard_library
from .experiment import LabError, Precision, Stopped
from .experiments import NAMES, load
from .runner import Run
from .workers import measure_on_workers


@dataclass(frozen=True)
class RunRequest:
    """The arguments of `regard lab run`."""

    name: str  # of an experiment, or "all"
    quick: bool = False
    text: Path | None = None  # to learn from; None is Python's standard library
    out: Path = Path("runs")
    changes: Sequence[str] = ()  # of the configuration, each as name=value
    fresh: bool = False
    workers: int = 1
    ray: bool = False
    ray_address: str | None = None
    device: str = "cpu"
    precision: Precision = "fp32"


class Display:
    """Receives the progress of a session. This one shows nothing; the command line derives its own."""

    def running(self, experiment: str, cells: int, finished: int) -> AbstractContextManager[object]:
        """A context that lasts while the cells of one experiment are computed; `finished` of them are done already."""
        return nullcontext()

    def cell(self, description: str) -> None:
        """A cell has started."""

    def steps(self, done: int, total: int, description: str | None = None) -> None:
        """The training steps of the current cell; a description names the group of cells to which they belong."""

    def cell_finished(self) -> None: ...

    def concluded(self, record: dict[str, Any]) -> None:
        """The conclusion.json of an experiment."""

    def stopped(self) -> None:
        """The session was interrupted; the same command continues it."""


def run_experiments(request: RunRequest, display: Display) -> bool:
    """Run one experiment, or all; False if it was interrupted. Under torchrun every process calls this."""
    _check_sharing(request)
    if request.workers > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // request.workers))
    with _device(request) as device:
        first = distributed.rank() == 0
        if not first:
            display = Display()
        experiments = [load(name) for name in (NAMES if request.name == "all" else (request.name,))]
        corpus = _corpus(request)
        for experiment in experiments:
            config = configured(experiment, request.quick, _changes(request.changes))
            folder = request.out / (experiment.name + ("-quick" if request.quick else ""))
            command = _command(experiment.name, request, device)
            profile = "quick" if request.quick else "full"
            run = Run(experiment, config, corpus, folder, profile, command, device, request.precision)
            if first:
                _open(run, request.fresh)
            distributed.wait_for_all()
            finished = _measure_cells(run, request, display)
            record = run.conclude() if first else None
            if record is not None:
                display.concluded(record)
            if not finished:
                display.stopped()
                return False
    return True


def _check_sharing(request: RunRequest) -> None:
    """Raise if the request combines ways to share the work that exclude each other."""
    if (request.workers > 1 or request.ray) and distributed.requested_processes() > 1:
        expected = "--ray: expected no" if request.ray else "--workers: expected 1"
        raise LabError(f"{expected} under torchrun, whose processes share each batch")
    if request.workers > 1 and request.ray:
        raise LabError("--workers: expected 1 with --ray, where the cluster decides how many cells run at once")
    if request.ray_address is not None and not request.ray:
        raise LabError("--ray-address: expected none without --ray")


@contextmanager
def _device(request: RunRequest) -> Iterator[torch.device]:
    """The device of the run. Inside, Ray is connected, or the processes of torchrun have joined."""
    with cluster.connected(request.ray_address) if request.ray else nullcontext():
        try:
            named = cluster.device_named if request.ray else distributed.device_named
            found = named(request.device)
        except ValueError as problem:
            raise LabError(f"--device: {problem}") from None
        if not request.ray:
            distributed.join(found)
        yield found
        distributed.leave()


def _open(run: Run, fresh: bool) -> None:
    if fresh and run.folder.exists():
        if not (run.folder / "config.json").exists():
            raise LabError(f"{run.folder}: expected the folder of a run, got one without config.json; not deleted")
        shutil.rmtree(run.folder)
    run.open()


def _corpus(request: RunRequest) -> Corpus:
    if request.text is None:
        return standard_library(200_000 if request.quick else 4_000_000)
    try:
        return from_file(request.text)
    except (OSError, ValueError) as problem:
        raise LabError(f"--text: {problem}") from None


def _changes(changes: Sequence[str]) -> dict[str, str]:
    found = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise LabError(f"--set: expected name=value, got {change!r}")
        found[name] = value
    return found


def _command(name: str, request: RunRequest, device: torch.device) -> str:
    """The command that computes the same results, for the run's record."""
    words = ["regard", "lab", "run", name, *(["--quick"] if request.quick else [])]
    words += ["--text", request.text.name] if request.text is not None else []
    words += ["--device", device.type] if device.type != "cpu" else []
    words += ["--precision", request.precision] if request.precision != "fp32" else []
    return shlex.join([*words, *(word for change in request.changes for word in ("--set", change))])


def _measure_cells(run: Run, request: RunRequest, display: Display) -> bool:
    """Compute the cells that are not finished; False if it was interrupted."""
    cells = run.cells()
    shared = request.workers > 1 or request.ray
    finished = sum(run.result(*cell) is not None for cell in cells) if shared else 0
    with interruptible() as stopping, display.running(run.experiment.name, len(cells), finished):
        if request.workers > 1:
            return measure_on_workers(run, request.workers, display.cell_finished, stopping)
        if request.ray:

            def steps(running: int, done: int, total: int) -> None:
                display.steps(done, total, f"steps of {running} cells")

            try:
                return cluster.measure_on_cluster(run, display.cell_finished, stopping, steps)
            except KeyboardInterrupt:
                return False
        return _measure_in_turn(run, cells, display, stopping)


def _measure_in_turn(run: Run, cells: list[tuple[str, int]], display: Display, stopping: Callable[[], bool]) -> bool:
    for setting, seed in cells:
        if distributed.from_first(stopping()):
            return False
        if distributed.from_first(run.result(setting, seed) is None):
            display.cell(f"{setting}, seed {seed}")
            try:
                run.measure(setting, seed, display.steps, stopping)
            except (Stopped, KeyboardInterrupt):
                return False
        display.cell_finished()
    return True


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C makes the given function return True, and the second one interrupts."""
    requested = False

    def interrupt(*_: Any) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        print("finishing this step (press Ctrl-C again to stop at once) ...", file=sys.stderr)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: requested
    finally:
        signal.signal(signal.SIGINT, before)
