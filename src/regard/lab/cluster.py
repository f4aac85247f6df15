"""Computes the cells of a run on a Ray cluster. Each cell is one task on one node, so the results are the same.

Nodes need no common file system. The files of a cell travel with the task: to the node when the cell starts, and back
when it is finished or stopped, including its checkpoint. A cell that was stopped on one node can therefore continue on
another. If a node fails, the work of its cells since they started is lost, and Ray starts them again elsewhere.
"""

from __future__ import annotations

import json
import logging
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .._files import write
from .experiment import LabError, Stopped
from .provenance import versions
from .runner import Run

REPORT_INTERVAL = 0.5  # seconds between two reports of a cell to the driver
SAME = ("regard", "sources", "torch", "python")  # versions that node and driver must share; on the CPU also "isa"

Files = dict[str, bytes]


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Inside, Ray is connected to the cluster of that address, to one that Ray finds, or to one of its own here."""
    try:
        import ray
    except ImportError as problem:
        raise LabError(f"--ray: Ray cannot be loaded ({problem}); pip install 'regard[ray]' brings it") from None
    if ray.is_initialized():  # by the caller
        yield
        return
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, ValueError) as problem:
        where = "a Ray of its own" if address is None else f"the Ray of {address}"
        raise LabError(f"--ray: expected to reach {where}: {problem}") from None
    try:
        yield
    finally:
        ray.shutdown()


def device_named(name: str) -> torch.device:
    """The device of each cell: "cpu", "cuda" (one GPU of its own), or "auto", a GPU if the cluster has any."""
    import ray

    if name == "auto":
        name = "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(
            f"expected auto, cpu or cuda with --ray, which gives every cell a GPU of its own, got {name!r}"
        )
    return torch.device(name)


def _board() -> Any:
    """An actor to which running cells report their steps, and from which they read whether to stop.

    The class is local so that Ray sends it by value: the actor's process need not load PyTorch.
    """
    import ray

    class Board:
        def __init__(self) -> None:
            self.steps: dict[Any, tuple[int, int]] = {}
            self.stopped = False

        def report(self, cell: Any, done: int, total: int) -> bool:
            self.steps[cell] = done, total
            return self.stopped

        def forget(self, cell: Any) -> None:
            self.steps.pop(cell, None)

        def read(self) -> dict[Any, tuple[int, int]]:
            return self.steps

        def stop(self) -> None:
            self.stopped = True

    return ray.remote(num_cpus=0)(Board).remote()


# --- on a node --------------------------------------------------------------------------------------------------------


def _measure(
    run: Run, expected: dict[str, Any], setting: str, seed: int, files: Files, board: Any, interval: float
) -> Files:
    """Compute one cell, from its checkpoint if it has one, and return its files.

    "result.json" is among them if the cell is finished; there are none if it was stopped before it started.
    """
    import ray

    torch.set_num_threads(expected["threads"])
    here = versions(run.device, run.precision)
    for name in (*SAME, *(("isa",) if run.device.type == "cpu" else ())):
        if here[name] != expected[name]:
            raise LabError(f"node {platform.node()}: expected {name} = {expected[name]!r}, got {here[name]!r}")
    last, done, total, stop = 0.0, 0, 0, False

    def stopping() -> bool:
        nonlocal last, stop
        if not stop and time.monotonic() - last > interval:
            stop = bool(ray.get(board.report.remote((setting, seed), done, total)))
            last = time.monotonic()
        return stop

    def advance(now: int, of: int) -> None:
        nonlocal done, total
        done, total = now, of

    if stopping():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        run = replace(run, folder=Path(folder))
        cell = run.folder_of(setting, seed)
        cell.mkdir(parents=True)
        for name, content in files.items():
            (cell / name).write_bytes(content)
        with suppress(Stopped):
            run.measure(setting, seed, advance, stopping)
        found = {path.name: path.read_bytes() for path in cell.iterdir()}
    board.forget.remote((setting, seed))
    return found | {"versions.json": (json.dumps(here, indent=2) + "\n").encode()}


# --- on the driver ----------------------------------------------------------------------------------------------------


def measure_on_cluster(
    run: Run,
    cell_finished: Callable[[], object] = lambda: None,
    stopping: Callable[[], bool] = lambda: False,
    steps: Callable[[int, int, int], object] = lambda cells, done, total: None,
) -> bool:
    """Compute every cell that is not finished; False if `stopping()` came first.

    `cell_finished` is called after each cell, and `steps` with the number of running cells and the sum of their steps.
    A cell takes as many CPUs as PyTorch has threads here, and a GPU if the run's device is one.
    """
    import ray
    from ray.exceptions import RayError

    left = [cell for cell in run.cells() if run.result(*cell) is None]
    if not left:
        return True
    threads, gpus = torch.get_num_threads(), int(run.device.type == "cuda")
    _check_nodes(threads, gpus)
    _ = run.corpus.tokens  # encoded once, before it is sent
    board = _board()
    task = ray.remote(num_cpus=threads, num_gpus=gpus)(_measure)
    given, expected = ray.put(run), versions(run.device, run.precision)
    waiting = {task.remote(given, expected, *cell, _files(run, cell), board, REPORT_INTERVAL): cell for cell in left}
    finished, failure, stopped = True, None, False
    while waiting:
        done, _ = ray.wait(list(waiting), timeout=REPORT_INTERVAL)
        for future in done:
            cell = waiting.pop(future)
            try:
                if _keep(run, cell, ray.get(future)):
                    cell_finished()
                else:
                    finished = False
            except RayError as problem:
                failure = failure or _explained(cell, problem)
        if (stopping() or failure) and not stopped:
            stopped = True
            ray.get(board.stop.remote())  # running cells return a checkpoint, waiting cells do not start
        reported: Any = ray.get(board.read.remote())
        sums = [sum(numbers) for numbers in zip(*reported.values(), strict=True)] if reported else [0, 0]
        steps(len(reported), *sums)
    if failure is not None:
        raise failure
    return finished


def _check_nodes(cpus: int, gpus: int) -> None:
    """Raise if no node has this many CPUs and GPUs: Ray would wait for one without end."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
        there = "; ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise LabError(
            f"--ray: expected a node with {cpus} CPUs (the threads of one cell: OMP_NUM_THREADS sets them) and {gpus} "
            f"GPUs, got {there or 'none'}"
        )


def _files(run: Run, cell: tuple[str, int]) -> Files:
    """The files that an earlier run left of a cell."""
    folder = run.folder_of(*cell)
    names = ("metrics.jsonl", "checkpoint.safetensors")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


def _keep(run: Run, cell: tuple[str, int], files: Files) -> bool:
    """Write the files that came back, the result last; whether the cell is finished."""
    folder = run.folder_of(*cell)
    if not files:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: name == "result.json"):
        write(folder / name, files[name])
    return "result.json" in files


def _explained(cell: tuple[str, int], problem: Exception) -> LabError:
    """The error of a node, with its traceback unless it is a `LabError`."""
    cause = getattr(problem, "cause", None)
    message = str(cause) if isinstance(cause, LabError) else f"failed on the cluster\n{problem}"
    return LabError(f"{cell[0]}, seed {cell[1]}: {message}")
