"""What structured priors cost on the native engine, as ratios to plain causal softmax on the same engine.

    python benchmarks/structured.py [--heads 8] [--seconds 4] [--only selected] [--threads 2] [--memory] [--cpu]

Each case is first compared, at a small size and with its gradients, with the same prior given as a dense bias in
float64 on the reference backend. One that is wrong is not timed, and the run fails. Then the case and plain causal
softmax run in interleaved rounds, forward alone and forward with backward. "x softmax" is the time of the case over the
time of softmax in the same round, with the middle 80 % of the rounds. --cpu measures processor time on one thread, for
a machine that others use, too. --memory prints the peak memory of forward and backward at T = 65536 with one head,
beyond the inputs, each in a process of its own.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import measure
import regard
from regard import (
    KL,
    Bias,
    ByKeys,
    Causal,
    Decay,
    Density,
    LowRank,
    Prefix,
    Relative,
    Selected,
    Transport,
    Tsallis,
    Window,
    timing,
)
from regard.lowering import lower
from regard.problem import Regularizer

D = 64
TOLERANCE = 2e-5  # of the largest entry, in float32


@dataclass(frozen=True)
class Case:
    name: str
    draw: Callable[[int, int], list[Tensor]]  # (T, heads) -> the tensors of the problem
    problem: Callable[..., Transport]  # of those tensors
    goal: str
    at_most: float | None = None  # times softmax, forward and backward
    at_least: float | None = None  # times as fast as softmax, forward and training
    T: int = 4096


def gates(T: int, H: int) -> list[Tensor]:
    return [torch.nn.functional.logsigmoid(torch.randn(1, H, T) + 4)]


def factors(T: int, H: int) -> list[Tensor]:
    return [0.3 * torch.randn(1, H, T, 8), 0.3 * torch.randn(1, H, T, 8)]


def selection(T: int, H: int, n: int, block: int) -> Tensor:
    """n blocks for each query, among those that are not in its future; the own block is one of them."""
    last = torch.arange(T)[:, None] // block
    draws = (torch.rand(1, H, T, n - 1) * (last + 1)).long()
    return torch.cat([last.expand(1, H, T, 1), draws], -1)


def four_blocks(T: int, H: int) -> list[Tensor]:
    return [selection(T, H, 4, T // 64)]


def of_blocks(index: Tensor, regularizer: Regularizer | None = None) -> Transport:
    T = index.shape[2]
    return Transport(regularizer or KL(), prior=Selected(index, T // 64) * Causal())


def by_distance(slopes: Tensor) -> Transport:
    return Transport(prior=regard.prior(lambda b, h, i, j: -slopes[h] * (i - j).abs()) * Causal())


def by_log_distance(slopes: Tensor) -> Transport:
    return Transport(prior=regard.prior(lambda b, h, i, j: -slopes[h] * torch.log1p((i - j).abs())) * Causal())


def by_table(table: Tensor) -> Transport:
    return Transport(prior=regard.prior(lambda b, h, i, j: table[h, (i - j).clamp(min=0)]) * Causal())


CASES = [
    Case("function: slope per head", lambda T, H: [torch.rand(H)], by_distance, "<= 1.3", at_most=1.3),
    Case("function: log of distance", lambda T, H: [torch.rand(H)], by_log_distance, "<= 1.3", at_most=1.3),
    Case("function: table by distance", lambda T, H: [torch.randn(H, T)], by_table, "<= 1.3", at_most=1.3),
    Case(
        "Relative, every distance",
        lambda T, H: [torch.randn(H, 2 * T - 1)],
        lambda table: Transport(prior=Relative(table) * Causal()),
        "<= 1.25",
        at_most=1.25,
    ),
    Case(
        "Relative.t5",
        lambda T, H: [torch.randn(32, H)],
        lambda weights: Transport(prior=Relative.t5(weights, bidirectional=False) * Causal()),
        "<= 1.25",
        at_most=1.25,
    ),
    Case("Decay", gates, lambda forget: Transport(prior=Decay(forget)), "<= 1.25", at_most=1.25),
    Case(
        "LowRank, r = 8",
        factors,
        lambda query, key: Transport(prior=LowRank(query, key) * Causal()),
        "<= 1.25",
        at_most=1.25,
    ),
    Case("Density per key", lambda T, H: [torch.rand(H, 1, T)], lambda pi: Transport(prior=Density(pi) * Causal()), ""),
    Case(
        "ByKeys",
        lambda T, H: [torch.full((H,), 0.3)],
        lambda slope: Transport(prior=Causal(), temperature=ByKeys(slope)),
        "<= 1.05",
        at_most=1.05,
    ),
    Case("Selected, 4 of 64 blocks", four_blocks, of_blocks, ">= 4 times as fast", at_least=4.0),
    Case(
        "Selected, 256 single keys",
        lambda T, H: [selection(T, H, min(256, T // 16), 1)],
        lambda index: Transport(prior=Selected(index) * Causal()),
        ">= 1.5 times as fast",
        at_least=1.5,
    ),
    Case("Selected, 4 of 64 blocks, entmax", four_blocks, lambda index: of_blocks(index, Tsallis(1.5)), ""),
    Case(
        "Window(256) | Prefix(64)",
        lambda T, H: [],
        lambda: Transport(prior=Causal() * (Window(256) | Prefix(64))),
        ">= 10 times as fast",
        at_least=10.0,
        T=16384,
    ),
]


def learned(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def _inputs(T: int, H: int) -> list[Tensor]:
    return [torch.randn(1, H, T, D).requires_grad_() for _ in range(3)]


def _leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.requires_grad_(tensor.is_floating_point()) for tensor in tensors]


def check(case: Case) -> str | None:
    """What is wrong with a case, or None: outputs and gradients against a dense bias in float64."""
    torch.manual_seed(0)
    T, H = 512, 2
    tensors, given = _leaves(case.draw(T, H)), _inputs(T, H)
    out = regard.attention(*given, problem=case.problem(*tensors), backend="native")
    grad = torch.randn_like(out)
    mine = [out, *torch.autograd.grad(out, [*given, *learned(tensors)], grad)]

    wide = _leaves([t.detach().double() if t.is_floating_point() else t for t in tensors])
    q, k, v = doubles = [tensor.detach().double().requires_grad_() for tensor in given]
    problem = case.problem(*wide)
    form = lower(q, k, v, problem=problem)
    allowed, log_prior = form.admissible(T, T, out.device), form.log_prior(T, T, torch.float64, out.device)
    dense = torch.zeros(1, H, T, T, dtype=torch.float64) if log_prior is None else log_prior.expand(1, H, T, T)
    if allowed is not None:
        dense = torch.where(allowed, dense, -math.inf)
    definition = Transport(problem.regularizer, prior=Bias(dense), temperature=problem.temperature)
    out = regard.attention(*doubles, problem=definition, backend="torch")
    exact = [out, *torch.autograd.grad(out, [*doubles, *learned(wide)], grad.double())]
    names = ("the output", "dq", "dk", "dv", *(f"the gradient of tensor {n}" for n in range(len(tensors))))
    for name, a, b in zip(names, mine, exact, strict=False):
        error = float(((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3)).detach())
        if not error <= TOLERANCE:
            return f"{name} is off by {error:.1e} of its largest entry"
    return None


def jobs(case: Case, H: int) -> dict[str, measure.Job]:
    tensors, given = _leaves(case.draw(case.T, H)), _inputs(case.T, H)
    plain, grad = Transport(prior=Causal()), torch.randn(1, H, case.T, D)

    def forward(make: Callable[[], Transport]) -> object:
        with torch.no_grad():
            return regard.attention(*given, problem=make(), backend="native")

    def train(make: Callable[[], Transport], leaves: list[Tensor]) -> object:
        out = regard.attention(*given, problem=make(), backend="native")
        return torch.autograd.grad(out, [*given, *leaves], grad)

    def mine() -> Transport:
        return case.problem(*tensors)

    return {
        "forward": lambda: forward(mine),
        "softmax forward": lambda: forward(lambda: plain),
        "training": lambda: train(mine, learned(tensors)),
        "softmax training": lambda: train(lambda: plain, []),
    }


def time_case(case: Case, H: int, seconds: float) -> None:
    times = measure.interleave(jobs(case, H), seconds)
    cells = []
    reached = []
    for kind in ("forward", "training"):
        ratio = measure.Spread.of([a / b for a, b in zip(times[kind], times[f"softmax {kind}"], strict=True)])
        milliseconds = 1e3 * measure.Spread.of(times[kind]).middle
        cells.append(f"{milliseconds:8.1f} | {ratio.middle:6.3f} ({ratio.low:.3f}-{ratio.high:.3f})")
        if case.at_least is not None:
            reached.append(1 / ratio.middle >= case.at_least)
        elif case.at_most is not None and kind == "training":
            reached.append(ratio.middle <= case.at_most)
    verdict = "" if not reached else "reached" if all(reached) else "not reached"
    print(f"| {case.name:33} | {case.T:6} | {' | '.join(cells)} | {case.goal:20} | {verdict} |", flush=True)


def peak(name: str) -> float:
    """MiB beyond the inputs of one forward and backward pass at T = 65536, in this process."""
    case = next(case for case in CASES if case.name == name)

    def training(T: int) -> measure.Job:
        tensors, given = _leaves(case.draw(T, 1)), _inputs(T, 1)
        grad = torch.randn(1, 1, T, D)

        def train() -> object:
            out = regard.attention(*given, problem=case.problem(*tensors), backend="native")
            return torch.autograd.grad(out, [*given, *learned(tensors)], grad)

        return train

    training(256)()  # the first call also loads modules, which are not memory of a call
    return measure.peak_of(training(65536))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="processor time on one thread")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cpu:
        given.threads, timing.clock = 1, time.process_time
    torch.set_num_threads(given.threads)
    if given.peak:
        print(peak(given.peak))
        return
    cases = [case for case in CASES if given.only.lower() in case.name.lower()]
    if given.memory:
        for case in cases:
            order = ("--peak", case.name, "--threads", str(given.threads))
            found = measure.peaks_printed_by(__file__, *order)[-1]
            print(f"| {case.name:33} | {found:7.0f} MiB |", flush=True)
        return
    print(
        "| case | T | forward, ms | x softmax | training, ms | x softmax | goal | verdict |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    wrong = 0
    for case in cases:
        fault = check(case)
        if fault is not None:
            print(f"| {case.name}: {fault} |", flush=True)
            wrong += 1
            continue
        torch.manual_seed(0)
        time_case(case, given.heads if case.T < 8192 else 2, given.seconds)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
