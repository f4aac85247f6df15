"""Measurements: paired ratios with an interval, peak memory, and the machine's limits. Rounds: regard.timing."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from regard.backends.native import engine
from regard.timing import Job, Spread, interleave, seconds, take_turns  # noqa: F401 - for the benchmarks


def paired_cost(on: Job, off: Job, budget: float) -> tuple[float, float, float]:
    """The relative cost of `on` beyond `off`: (low, median, high) of the 95 % interval.

    The median of the rounds' ratios is robust to outliers; the interval is a bootstrap over the rounds."""
    times = interleave({"on": on, "off": off}, budget, least=15, most=400)
    logs = [math.log(a / b) for a, b in zip(times["on"], times["off"], strict=True)]
    r = random.Random(0)
    medians = sorted(statistics.median(r.choices(logs, k=len(logs))) for _ in range(1000))
    return tuple(math.exp(x) - 1 for x in (medians[25], statistics.median(logs), medians[974]))  # type: ignore[return-value]


# --- the machine's limits ---------------------------------------------------------------------------------------------


def matrix_rate(rounds: int = 5, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Operations per second of torch.mm on matrices of 2048 x 2048 (on a GPU 8192 x 8192)."""
    gpu = torch.device(device).type == "cuda"
    n = 8192 if gpu else 2048
    a = torch.randn(n, n, device=device, dtype=dtype)

    def product() -> None:
        torch.mm(a, a)
        if gpu:
            torch.cuda.synchronize(device)

    product()
    return 2 * n**3 / min(seconds(product) for _ in range(rounds))


def fma_rate() -> float | None:
    """Operations per second of multiply-adds on registers, on all threads; None without the engine."""
    module, _ = engine.extension()
    return None if module is None else module.fma_rate(torch.get_num_threads(), 0.3)


def read_bandwidth() -> float:
    """Bytes per second that all threads read from memory: a sum over 256 MiB."""
    big = torch.ones(2**26)
    big.sum()
    return big.numel() * 4 / min(seconds(lambda: big.sum()) for _ in range(5))


# --- memory -----------------------------------------------------------------------------------------------------------


def peak_of(job: Job) -> float:
    """The peak growth of the process during the job in MiB: outputs, gradients and working memory, not the inputs.

    Linux records the largest resident size so far (VmHWM); writing 5 to clear_refs resets it to the current one.
    """
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    job()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise OSError(f"no {field}")


def memory(case: object, implementation: str, timeout: float) -> float | None:
    """The peak of one run in a new process, where no freed memory of earlier runs is used again."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    order = json.dumps({"case": asdict(case), "implementation": implementation, "threads": torch.get_num_threads()})  # type: ignore[call-overload]
    try:
        return peaks_printed_by(Path(__file__).with_name("run.py"), "--memory", order, timeout=timeout)[-1]
    except (subprocess.SubprocessError, ValueError, IndexError):
        return None


def peaks_printed_by(script: str | Path, *arguments: str, timeout: float | None = None) -> list[float]:
    """The numbers that a script prints in a new process, which is set up for `peak_of`.

    Large blocks are requested from the system and returned when freed, so that the allocator's cache does not count."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=True)
    return [float(number) for number in done.stdout.split()]
