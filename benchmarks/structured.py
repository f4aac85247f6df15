"""What structured priors cost on the native engine, as ratios to plain causal softmax on the same engine.

    python benchmarks/structured.py [--heads 8] [--seconds 4] [--only selected] [--threads 2] [--memory]

Each case is first compared, at a small size and with its gradients, with the same prior given as a dense bias in float64
on the reference backend. One that is wrong is not timed, and the run fails. Then the case and plain causal softmax run in
interleaved rounds, forward alone and forward with backward. "x softmax" is the time of the case over the time of softmax
in the same round, with the middle 80 % of the rounds. --memory prints the peak memory of forward and backward at
T = 65536 with one head, beyond the inputs, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import measure
import regard
from regard import (
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
)
from regard.lowering import lower

D = 64
TOLERANCE = 2e-5  # of the largest entry, in float32


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[int, int], tuple[Transport, list[Tensor]]]  # (T, heads) -> the problem and what needs a gradient
    goal: str
    at_most: float | None = None  # times softmax, forward and backward
    at_least: float | None = None  # times as fast as softmax, forward and training
    T: int = 4096
    peer: str = "softmax"


def _leaf(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).requires_grad_()


def relative(T: int, H: int) -> tuple[Transport, list[Tensor]]:
    table = _leaf(H, 2 * T - 1)
    return Transport(prior=Relative(table) * Causal()), [table]


def t5(T: int, H: int) -> tuple[Transport, list[Tensor]]:
    weights = _leaf(32, H)
    return Transport(prior=Relative.t5(weights, bidirectional=False) * Causal()), [weights]


def decay(T: int, H: int) -> tuple[Transport, list[Tensor]]:
    gates = torch.nn.functional.logsigmoid(torch.randn(1, H, T) + 4).detach().requires_grad_()
    return Transport(prior=Decay(gates)), [gates]


def low_rank(T: int, H: int) -> tuple[Transport, list[Tensor]]:
    factors = [_leaf(1, H, T, 8, scale=0.3), _leaf(1, H, T, 8, scale=0.3)]
    return Transport(prior=LowRank(*factors) * Causal()), factors


def density(T: int, H: int) -> tuple[Transport, list[Tensor]]:
    soft = torch.rand(H, 1, T).requires_grad_()
    return Transport(prior=Density(soft) * Causal()), [soft]


def _selection(T: int, H: int, n: int, block: int) -> Tensor:
    """n different blocks for each query, among those that are not in its future; the own block is one of them."""
    last = torch.arange(T)[:, None] // block
    draws = (torch.rand(1, H, T, 4 * n) * (last + 1)).long()
    return torch.cat([last.expand(1, H, T, 1), draws], -1)[..., :n]


def selected_blocks(T: int, H: int) -> tuple[Transport, list[Tensor]]:
    return Transport(prior=Selected(_selection(T, H, 4, T // 64), T // 64) * Causal()), []


def selected_keys(T: int, H: int) -> tuple[Transport, list[Tensor]]:
    return Transport(prior=Selected(_selection(T, H, T // 16, 1)) * Causal()), []


def entmax_selected(T: int, H: int) -> tuple[Transport, list[Tensor]]:
    return Transport(Tsallis(1.5), prior=Selected(_selection(T, H, 4, T // 64), T // 64) * Causal()), []


def union(T: int, H: int) -> tuple[Transport, list[Tensor]]:
    return Transport(prior=Causal() * (Window(T // 64) | Prefix(T // 256))), []


def by_keys(T: int, H: int) -> tuple[Transport, list[Tensor]]:
    slope = torch.full((H,), 0.3).requires_grad_()
    return Transport(prior=Causal(), temperature=ByKeys(slope)), [slope]


CASES = [
    Case("Relative, every distance", relative, "<= 1.25", at_most=1.25),
    Case("Relative.t5", t5, "<= 1.25", at_most=1.25),
    Case("Decay", decay, "<= 1.25", at_most=1.25),
    Case("LowRank, r = 8", low_rank, "<= 1.25", at_most=1.25),
    Case("Density per key", density, ""),
    Case("ByKeys", by_keys, "<= 1.05", at_most=1.05),
    Case("Selected, 4 of 64 blocks", selected_blocks, ">= 4 times as fast", at_least=4.0),
    Case("Selected, 256 single keys", selected_keys, ">= 1.5 times as fast", at_least=1.5),
    Case("Selected, 4 of 64 blocks, entmax", entmax_selected, ""),
    Case("Window(256) | Prefix(64)", union, ">= 10 times as fast", at_least=10.0, T=16384),
]


def _inputs(T: int, H: int) -> list[Tensor]:
    return [torch.randn(1, H, T, D).requires_grad_() for _ in range(3)]


def check(case: Case) -> str | None:
    """What is wrong with a case, or None: outputs and gradients against a dense bias in float64."""
    torch.manual_seed(0)
    T, H = 256, 2
    problem, leaves = case.make(T, H)
    given = _inputs(T, H)
    out = regard.attention(*given, problem=problem, backend="native")
    grad = torch.randn_like(out)
    mine = [out, *torch.autograd.grad(out, [*given, *leaves], grad)]

    wide = {leaf: leaf.detach().double().requires_grad_() for leaf in leaves}
    same = regard._pytree.pytree.tree_map(lambda leaf: wide.get(leaf, leaf), problem)
    doubles = [tensor.detach().double().requires_grad_() for tensor in given]
    form = lower(*doubles, problem=same)
    allowed, log_prior = form.admissible(T, T, out.device), form.log_prior(T, T, torch.float64, out.device)
    dense = torch.zeros(1, H, T, T, dtype=torch.float64) if log_prior is None else log_prior.expand(1, H, T, T)
    if allowed is not None:
        dense = torch.where(allowed, dense, -math.inf)
    definition = Transport(same.regularizer, prior=Bias(dense), temperature=form.temperature)
    out = regard.attention(*doubles, problem=definition, backend="torch")
    exact = [out, *torch.autograd.grad(out, [*doubles, *wide.values()], grad.double())]
    for name, a, b in zip(("out", "dq", "dk", "dv", *(f"leaf {n}" for n in range(9))), mine, exact, strict=False):
        error = float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3))
        if not error <= TOLERANCE:
            return f"{name} is off by {error:.1e} of its largest entry"
    return None


def jobs(case: Case, H: int) -> dict[str, measure.Job]:
    problem, leaves = case.make(case.T, H)
    given = _inputs(case.T, H)
    plain, grad = Transport(prior=Causal()), torch.randn(1, H, case.T, D)

    def forward(problem: Transport) -> object:
        with torch.no_grad():
            return regard.attention(*given, problem=problem, backend="native")

    def train(problem: Transport, leaves: list[Tensor]) -> object:
        out = regard.attention(*given, problem=problem, backend="native")
        return torch.autograd.grad(out, [*given, *leaves], grad)

    return {
        "forward": lambda: forward(problem),
        "softmax forward": lambda: forward(plain),
        "training": lambda: train(problem, leaves),
        "softmax training": lambda: train(plain, []),
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
    T = 65536
    problem, leaves = case.make(T, 1)
    given = _inputs(T, 1)
    before = measure.peak_memory()
    out = regard.attention(*given, problem=problem, backend="native")
    torch.autograd.grad(out, [*given, *leaves], torch.ones_like(out))
    return (measure.peak_memory() - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.peak:
        print(json.dumps(peak(given.peak)))
        return
    cases = [case for case in CASES if given.only.lower() in case.name.lower()]
    if given.memory:
        for case in cases:
            command = [sys.executable, __file__, "--peak", case.name, "--threads", str(given.threads)]
            found = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            print(f"| {case.name:33} | {found:7.0f} MiB |", flush=True)
        return
    print(
        "| case | T | forward, ms | x softmax | training, ms | x softmax | goal | verdict |\n|---|---|---|---|---|---|---|---|"
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
