"""The cells of a run on a Ray cluster: each is a task, computed whole on one node, so results are the same.

Nodes need no common file system. What a cell's folder holds travels with the task: to the node when it begins, and back
when it is finished or stopped, with its checkpoint; so a cell that was stopped on one node goes on on another. What a
node that dies had computed is lost, and Ray begins that cell again elsewhere.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .runner import Refused, Run, Stopped, versions

PATIENCE = 0.5  # seconds between two words of a cell to the driver
SAME = ("regard", "sources", "torch", "python")  # what a node must share with the driver, and "isa" on the CPU

Files = dict[str, bytes]


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Inside, Ray is there: the cluster of that address, one that Ray finds by itself, or one of this machine alone."""
    try:
        import ray
    except ImportError as problem:
        raise Refused(f"--ray: Ray cannot be loaded ({problem}); pip install 'regard[ray]' brings it") from None
    if ray.is_initialized():  # by whoever called us
        yield
        return
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, ValueError) as problem:
        where = "a Ray of its own" if address is None else f"the Ray of {address}"
        raise Refused(f"--ray: expected to reach {where}: {problem}") from None
    try:
        yield
    finally:
        ray.shutdown()


def device_named(name: str) -> torch.device:
    """What a cell computes on: "cpu", "cuda" (one GPU of its own), or "auto", a GPU if the cluster has any."""
    import ray

    if name == "auto":
        name = "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(
            f"expected auto, cpu or cuda with --ray, which gives every cell a GPU of its own, got {name!r}"
        )
    return torch.device(name)


def _board() -> Any:
    """An actor with which running cells speak: they say how far they are, and read whether to stop.

    Its class is local: so Ray sends it to its process as it is, which need not load PyTorch.
    """
    import ray

    class Board:
        def __init__(self) -> None:
            self.steps: dict[Any, tuple[int, int]] = {}
            self.stopped = False

        def tell(self, cell: Any, done: int, total: int) -> bool:
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
    run: Run, wanted: dict[str, Any], setting: str, seed: int, files: Files, board: Any, patience: float
) -> Files:
    """Compute one cell, or go on with it: its files, "result.json" among them if it is finished; none if not begun."""
    import ray

    torch.set_num_threads(wanted["threads"])
    here = versions(run.device, run.precision)
    for name in (*SAME, *(("isa",) if run.device.type == "cpu" else ())):
        if here[name] != wanted[name]:
            raise Refused(f"node {platform.node()}: expected {name} = {wanted[name]!r}, got {here[name]!r}")
    last, done, total, stop = 0.0, 0, 0, False

    def stopping() -> bool:
        nonlocal last, stop
        if not stop and time.monotonic() - last > patience:
            stop = bool(ray.get(board.tell.remote((setting, seed), done, total)))
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


def measure_all(
    run: Run,
    advanced: Callable[[], object] = lambda: None,
    stopping: Callable[[], bool] = lambda: False,
    steps: Callable[[int, int, int], object] = lambda cells, done, total: None,
) -> bool:
    """Compute every cell that is not finished; False if it was to stop before. `advanced` is told of each that is,
    `steps` of the cells that run, and of their steps together.

    A cell takes as many CPUs as PyTorch has threads here, and a GPU if the run's device is one.
    """
    import ray
    from ray.exceptions import RayError

    left = [cell for cell in run.cells() if run.result(*cell) is None]
    if not left:
        return True
    threads, gpus = torch.get_num_threads(), int(run.device.type == "cuda")
    _see_that_a_node_has(threads, gpus)
    _ = run.corpus.tokens  # encoded once, here
    board = _board()
    task = ray.remote(num_cpus=threads, num_gpus=gpus)(_measure)
    given, wanted = ray.put(run), versions(run.device, run.precision)
    waiting = {task.remote(given, wanted, *cell, _files(run, cell), board, PATIENCE): cell for cell in left}
    finished, failure, stopped = True, None, False
    while waiting:
        done, _ = ray.wait(list(waiting), timeout=PATIENCE)
        for future in done:
            cell = waiting.pop(future)
            try:
                if _keep(run, cell, ray.get(future)):
                    advanced()
                else:
                    finished = False
            except RayError as problem:
                failure = failure or _explained(cell, problem)
        if (stopping() or failure) and not stopped:
            stopped = True
            ray.get(board.stop.remote())  # those that run come back with a checkpoint, those that wait do not begin
        told: Any = ray.get(board.read.remote())
        steps(len(told), *(sum(numbers) for numbers in zip(*told.values(), strict=True)) if told else (0, 0))
    if failure is not None:
        raise failure
    return finished


def _see_that_a_node_has(cpus: int, gpus: int) -> None:
    """Ray would wait for such a node for ever."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
        there = "; ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise Refused(
            f"--ray: expected a node with {cpus} CPUs (the threads of one cell: OMP_NUM_THREADS sets them) and {gpus} "
            f"GPUs, got {there or 'none'}"
        )


def _files(run: Run, cell: tuple[str, int]) -> Files:
    """What an earlier run left of a cell."""
    folder = run.folder_of(*cell)
    names = ("metrics.jsonl", "checkpoint.safetensors")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


def _keep(run: Run, cell: tuple[str, int], files: Files) -> bool:
    """Write what came back; whether the cell is finished: its result is written last."""
    folder = run.folder_of(*cell)
    if not files:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: name == "result.json"):
        partial = folder / f"{name}.partial"
        partial.write_bytes(files[name])
        os.replace(partial, folder / name)
    return "result.json" in files


def _explained(cell: tuple[str, int], problem: Exception) -> Refused:
    """What went wrong on a node, with the traceback from there if it is not a refusal."""
    cause = getattr(problem, "cause", None)
    said = str(cause) if isinstance(cause, Refused) else f"failed on the cluster\n{problem}"
    return Refused(f"{cell[0]}, seed {cell[1]}: {said}")
