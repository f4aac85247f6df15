"""The cells of a run on several processes of this machine: each computes whole cells, so results are the same."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

import torch

from .runner import Run, Stopped

_given: dict[str, Any] = {}  # what a worker was started with
_busy = threading.Lock()


def _begin(run: Run, stop: Any, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process says when to stop
    torch.set_num_threads(threads)
    _given.update(run=run, stop=stop)
    threading.Thread(target=_end_with_the_first, daemon=True).start()


def _end_with_the_first() -> None:
    """A first process that was killed tells nobody: its workers write their checkpoints and end by themselves."""
    first = multiprocessing.parent_process()
    assert first is not None
    first.join()
    _given["stop"].set()
    with _busy:
        os._exit(1)


def _measure(setting: str, seed: int) -> bool:
    """Whether the cell was finished."""
    with _busy:
        if _given["stop"].is_set():  # it was on its way here already, and would leave a checkpoint of no steps
            return False
        try:
            _given["run"].measure(setting, seed, stopping=_given["stop"].is_set)
        except Stopped:
            return False
        return True


def measure_all(
    run: Run,
    workers: int,
    advanced: Callable[[], object] = lambda: None,
    stopping: Callable[[], bool] = lambda: False,
) -> bool:
    """Compute every cell that is not finished; False if it was to stop before. `advanced` is told of each that is."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    left = [cell for cell in run.cells() if run.result(*cell) is None]
    if stopping():
        return not left
    given = (run, stop, torch.get_num_threads())
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=given) as pool:
        waiting: set[Future[bool]] = {pool.submit(_measure, *cell) for cell in left}
        finished = True
        while waiting:
            done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                finished &= not future.cancelled() and future.result()
                advanced()
            if stopping() and not stop.is_set():
                stop.set()  # those that run write a checkpoint, those that wait never begin
                finished = False
                for future in waiting:
                    future.cancel()
    return finished
