"""Timing of functions that take turns: seconds by rounds, and the spread of a ratio."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Job = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """The median, and the interval that holds the middle 80 %."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        return cls(tenths[0], statistics.median(values), tenths[-1])


clock = time.perf_counter  # use time.process_time, on one thread, if others use the machine


def seconds(job: Job) -> float:
    began = clock()
    job()
    return clock() - began


def interleave(jobs: dict[str, Job], budget: float, least: int = 5, most: int = 200) -> dict[str, list[float]]:
    """Seconds of each job in each round.

    All jobs run in every round, so that a disturbance of the machine affects all of them. Every other round runs in
    reverse order, so that no job always follows the same one."""
    for job in jobs.values():
        job()  # warm up
    spent = sum(seconds(job) for job in jobs.values())
    rounds = max(least, min(most, int(budget / max(spent, 1e-9))))
    return take_turns(jobs, rounds)


def take_turns(jobs: Mapping[str, Job], rounds: int) -> dict[str, list[float]]:
    """As `interleave`, with a given number of rounds and without a warm-up, for jobs that take long."""
    order = list(jobs.items())
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for n in range(rounds):
        for name, job in reversed(order) if n % 2 else order:
            times[name].append(seconds(job))
    return times
