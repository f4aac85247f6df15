"""Computes the cells of a run on several processes of this machine.

A cell is computed by one process from beginning to end, so the results are those of a run without workers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

import torch

from .experiment import Stopped
from .runner import Run

_given: dict[str, Any] = {}  # the run and the stop event that a worker process received when it started
_busy = threading.Lock()


def _begin(run: Run, stop: Any, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the first process decides when to stop
    torch.set_num_threads(threads)
    _given.update(run=run, stop=stop)
    threading.Thread(target=_exit_with_first_process, daemon=True).start()


def _exit_with_first_process() -> None:
    """When the first process has ended, let the current cell write its checkpoint, then exit.

    A first process that is killed cannot notify its workers, so each worker watches it.
    """
    first = multiprocessing.parent_process()
    assert first is not None
    first.join()
    _given["stop"].set()
    with _busy:
        os._exit(1)


def _measure(setting: str, seed: int) -> bool:
    """Compute one cell in a worker process; whether it was finished."""
    with _busy:
        if _given["stop"].is_set():  # sent before the stop; starting it would only leave a checkpoint of no steps
            return False
        try:
            _given["run"].measure(setting, seed, stopping=_given["stop"].is_set)
        except Stopped:
            return False
        return True


def measure_on_workers(
    run: Run,
    workers: int,
    cell_finished: Callable[[], object] = lambda: None,
    stopping: Callable[[], bool] = lambda: False,
) -> bool:
    """Compute every unfinished cell and call `cell_finished` after each; False if `stopping()` came first."""
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
                cell_finished()
            if stopping() and not stop.is_set():
                stop.set()  # running cells write a checkpoint, waiting cells do not start
                finished = False
                for future in waiting:
                    future.cancel()
    return finished
