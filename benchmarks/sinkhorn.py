"""Sinkhorn attention (`RowsAndColumns`) against POT's and geomloss' batched log-domain solvers.

    python benchmarks/sinkhorn.py --case attention|cold|points [--length 2048] [--heads 8] [--rounds 1]
    python benchmarks/sinkhorn.py --memory                      # peak memory, each in a process of its own

Each implementation gets queries, keys and values and gives outputs; the peers' cost matrix is computed from the same
scores. All stop at the same tolerance, the share of the mass in a wrong column (half of the L1 distance). POT tests, at
every tenth iteration, the L2 distance of masses 1/T, so its tolerance is tolerance * 2.5 / sqrt(T), which is equivalent
for errors like noise. geomloss has no test: it takes a given number of steps from a large temperature to the problem's.

The check: the prices of each result, inserted into the Gibbs formula in float64, meet both marginals within twice the
tolerance. A plan of that form that meets them is the optimum, so nothing else has to be compared. A peer is stopped
after the number of iterations that takes several times as long as regard. If it fails the check then, it has not
converged, and the ratio is printed as "more than".
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import measure
import regard
from regard import AuxRequest, RowsAndColumns, Transport

TOLERANCE = 1e-5
GOAL = 5.0  # times as fast as either peer
PATIENCE = {"POT": 12.0, "geomloss": 10.0}  # a peer is stopped after this many times regard's time
PROBE = 5  # iterations that are timed to estimate the time of one


@dataclass(frozen=True)
class Case:
    name: str
    what: str
    temperature: float
    scale: float
    query: Tensor  # [1, H, T, D]
    key: Tensor
    value: Tensor


def make(name: str, T: int, H: int) -> Case:
    g = torch.Generator().manual_seed(0)
    value = torch.randn(1, H, T, 64, generator=g)
    if name == "points":  # two clouds in a square, |x - y|^2: the prices absorb what depends on x or y alone
        x, y = (torch.rand(1, H, T, 2, generator=g) ** power for power in (1.0, 1.5))
        return Case(name, "points in the plane, epsilon 0.01", 0.01, 2.0, x - 0.5, y - 0.5, value)
    q, k = (torch.randn(1, H, T, 64, generator=g) for _ in range(2))
    if name == "cold":
        return Case(name, "attention, epsilon 0.3", 0.3, 1 / 8, q, k, value)
    return Case(name, "attention, epsilon 1", 1.0, 1 / 8, q, k, value)


Prices = tuple[Tensor, Tensor]  # f [H, T] and g [H, T] of p = exp((s - f - g)/tau), rows and columns of sum 1


def ours(case: Case) -> tuple[Tensor, Prices]:
    problem = Transport(marginal=RowsAndColumns(tolerance=TOLERANCE, strict=True), temperature=case.temperature)
    out, aux = regard.attention(
        case.query,
        case.key,
        case.value,
        scale=case.scale,
        problem=problem,
        return_aux=AuxRequest(dual=True, column_dual=True),
    )
    assert aux.dual is not None and aux.column_dual is not None
    return out, (aux.dual[0], aux.column_dual[0])


def pot(case: Case, iterations: int) -> tuple[Tensor, Prices]:
    import ot

    T = case.query.shape[2]
    scores = (case.query @ case.key.mT)[0] * case.scale
    found = ot.batch.bregman_log_projection_batch(
        scores / case.temperature,
        torch.full(scores.shape[:2], 1 / T),
        torch.full(scores.shape[:2], 1 / T),
        max_iter=iterations,
        tol=TOLERANCE * 2.5 / math.sqrt(T),
    )
    u, v = found["potentials"]
    out = T * found["T"] @ case.value[0]
    return out[None], (-case.temperature * (u + math.log(T)), -case.temperature * v)


def geomloss(case: Case, iterations: int) -> tuple[Tensor, Prices]:
    from geomloss import ot  # pyright: ignore[reportMissingImports]

    T = case.query.shape[2]
    cost = -(case.query @ case.key.mT)[0] * case.scale
    found: Any = ot.solve_batch(cost, reg=case.temperature, max_iter=iterations)
    out = T * found.plan @ case.value[0]
    # The plan of geomloss is exp((f + g - C)/eps) / T^2.
    return out[None], (case.temperature * math.log(T) - found.potential_a, -found.potential_b)


def residual(case: Case, prices: Prices, head: int = 0) -> float:
    """The larger share of the mass in a wrong row or column, in float64."""
    q, k = case.query[0, head].double(), case.key[0, head].double()
    f, g = (p[head].double() for p in prices)
    plan = ((q @ k.T * case.scale - f[:, None] - g) / case.temperature).exp()
    return max(float((plan.sum(dim) - 1).abs().mean()) / 2 for dim in (0, 1))


def worst(case: Case, prices: Prices) -> float:
    return max(residual(case, prices, head) for head in (0, case.query.shape[1] - 1))


@dataclass(frozen=True)
class Time:
    """Elapsed seconds, and seconds of all processors together."""

    wall: float
    work: float


def timed(job: Callable[[], tuple[Tensor, Prices]]) -> tuple[Time, Prices]:
    began, worked = time.perf_counter(), time.process_time()
    _, prices = job()
    return Time(time.perf_counter() - began, time.process_time() - worked), prices


def contest(case: Case, rounds: int) -> bool:
    """Check, time and print all implementations; True if every goal was reached.

    regard runs before and after each peer, and a peer's ratio is to the mean of the two times."""
    peers = {"POT": pot, "geomloss": geomloss}
    small = make(case.name, 64, 1)
    ours(small)  # warm up
    for solver in peers.values():
        solver(small, PROBE)
    each = {name: timed(functools.partial(solver, case, PROBE))[0].wall / PROBE for name, solver in peers.items()}
    alone = functools.partial(ours, case)
    own, prices = timed(alone)
    off = worst(case, prices)
    print(f"  regard    {own.wall:7.2f} s ({own.work:6.2f} s of processors), residual {off:.1e}", flush=True)
    if not off <= 2 * TOLERANCE:
        raise SystemExit(f"regard fails the check: {off:.1e} > {2 * TOLERANCE:.0e}")
    limits = {name: math.ceil(PATIENCE[name] * own.wall / each[name]) for name in peers}
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    arrived: dict[str, bool] = {}
    for _ in range(rounds):
        for name, solver in peers.items():
            theirs, prices = timed(functools.partial(solver, case, limits[name]))
            after, _ = timed(alone)
            ratios[name].append((2 * theirs.wall / (own.wall + after.wall), 2 * theirs.work / (own.work + after.work)))
            own = after
            if name in arrived:
                continue
            off = worst(case, prices)
            arrived[name] = off <= 2 * TOLERANCE
            there = "" if arrived[name] else f": not converged after {limits[name]} iterations"
            print(f"  {name:<9} {theirs.wall:7.2f} s ({theirs.work:6.2f} s of processors), residual {off:.1e}{there}")
            print(f"  regard    {own.wall:7.2f} s ({own.work:6.2f} s of processors)", flush=True)
    reached = True
    for name, found in ratios.items():
        wall, work = (statistics.median(r) for r in zip(*found, strict=True))
        more = "" if arrived[name] else "more than "
        print(f"  regard is {more}{wall:.1f} times as fast as {name} ({work:.1f} in processors' time; {rounds} rounds)")
        reached &= wall >= GOAL
    return reached


def peak(implementation: str, T: int, H: int) -> float:
    """Peak MiB beyond the inputs, in a process of its own."""
    try:
        return measure.peaks_printed_by(__file__, "--peak", implementation, "--length", str(T), "--heads", str(H))[-1]
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.stderr) from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("attention", "cold", "points"), action="append")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peak", choices=("regard", "training", "POT", "geomloss"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        case = make("attention", options.length, options.heads)
        small = make("attention", 64, 1)

        def training(case: Case) -> None:
            q, k, v = (t.requires_grad_() for t in (case.query, case.key, case.value))
            problem = Transport(marginal=RowsAndColumns(tolerance=TOLERANCE))
            regard.attention(q, k, v, scale=case.scale, problem=problem).sum().backward()

        jobs = {
            "regard": ours,
            "training": training,
            "POT": lambda case: pot(case, 5),
            "geomloss": lambda case: geomloss(case, 5),
        }
        jobs[options.peak](small)  # loads libraries, so that they do not count
        print(measure.peak_of(lambda: jobs[options.peak](case)))
        return
    print(f"T = {options.length}, H = {options.heads}, {torch.get_num_threads()} threads, tolerance {TOLERANCE:.0e}")
    if options.memory:
        for implementation in ("regard", "training", "POT", "geomloss"):
            sizes = [peak(implementation, T, options.heads) for T in (options.length // 2, options.length)]
            print(
                f"  {implementation:<9} {sizes[0]:7.0f} MiB at T = {options.length // 2}, "
                f"{sizes[1]:7.0f} at T = {options.length}"
            )
        return
    reached = True
    for name in options.case or ("attention", "cold", "points"):
        case = make(name, options.length, options.heads)
        print(case.what)
        reached &= contest(case, options.rounds)
    print("every goal reached" if reached else f"not {GOAL:.0f} times as fast in every case")


if __name__ == "__main__":
    main()
