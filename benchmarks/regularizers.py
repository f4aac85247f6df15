"""What a regulariser of the user's own costs on the native engine, as ratios to built-in ones and to the reference.

    python benchmarks/regularizers.py [--T 4096] [--seconds 10] [--threads 1]

Each regulariser is first compared with the reference backend in float64, with its gradients, at T = 300. One that is
wrong is not timed, and the run fails. Then all of them run in interleaved rounds, causal, D = 64, float32, forward with
backward. A ratio is of the same round; the interval holds the middle 80 % of the rounds. The goal is for dense plans,
which entmax has with small scores; sparsemax and chi-squared have sparse ones there, too. The reference backend runs a
quarter of the length once, and its time is multiplied by 16.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import measure
import regard
from regard import FDivergence, Transport, Tsallis, timing
from regard.regularizers import Regularizer

TOLERANCE = 2e-5  # of the largest entry, in float32


def own_entmax() -> FDivergence:
    return FDivergence(lambda x: x**1.5 / 0.75, lambda t: (t / 2).square(), lambda t: t / 2, lower=0.0)


CASES: dict[str, tuple[Regularizer, str | None, float | None]] = {  # regulariser, compared with, goal
    "Tsallis(1.5)": (Tsallis(1.5), None, None),
    "Tsallis(2.0)": (Tsallis(2.0), None, None),
    "entmax 1.5 by hand": (own_entmax(), "Tsallis(1.5)", 1.3),
    "the same, slope derived": (
        FDivergence(lambda x: x**1.5 / 0.75, lambda t: (t / 2) ** 2, lower=0.0),
        "Tsallis(1.5)",
        1.3,
    ),
    "chi-squared": (
        FDivergence(lambda x: (x - 1) ** 2 / 2, lambda t: t + 1, torch.ones_like, lower=-1.0),
        "Tsallis(2.0)",
        None,
    ),
    "Jensen-Shannon": (
        FDivergence(
            lambda x: torch.xlogy(x, x) - (x + 1) * ((x + 1) / 2).log(),
            lambda t: 1 / (2 * (-t).exp() - 1),
            lambda t: 2 * (-t).exp() / (2 * (-t).exp() - 1) ** 2,
        ),
        "Tsallis(1.5)",
        None,
    ),
}


def job(regularizer: Regularizer, x: list[torch.Tensor], scale: float, backend: str) -> list[torch.Tensor]:
    """Output and gradients."""
    problem = Transport(regularizer)
    out = regard.attention(*x, is_causal=True, scale=scale / 8, problem=problem, backend=backend)
    return [out, *torch.autograd.grad(out.square().sum(), x)]


def wrong(regularizer: Regularizer, scale: float) -> float:
    """The largest error in float32, relative to the largest entry."""
    x = [torch.randn(1, 2, 300, 64) for _ in range(3)]
    found = job(regularizer, [t.clone().requires_grad_() for t in x], scale, "native")
    truth = job(regularizer, [t.double().requires_grad_() for t in x], scale, "torch")
    pairs = zip(found, truth, strict=True)
    return max(float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max()) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--T", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.threads == 1:
        timing.clock = time.process_time  # others may use the machine
    status = 0
    good = {}
    for name, (regularizer, _, _) in CASES.items():
        errors = [wrong(regularizer, scale) for scale in (0.1, 1.0)]
        if max(errors) > TOLERANCE:
            print(f"{name}: WRONG, errors {errors}")
            status = 1
        else:
            good[name] = regularizer
    x = [torch.randn(1, 1, options.T, 64).requires_grad_() for _ in range(3)]
    part = [t.detach()[:, :, : options.T // 4].clone().requires_grad_() for t in x]
    print(f"{'regulariser':<26}{'scores':<8}{'ms':>9}  {'x built-in':<22}{'x faster than torch':<20}")
    for scale, size in ((0.1, "small"), (1.0, "large")):
        jobs: dict[str, measure.Job] = {
            n: (lambda r=r, scale=scale: job(r, x, scale, "native")) for n, r in good.items()
        }
        times = measure.interleave(jobs, options.seconds)
        for name in good:
            _, other, goal = CASES[name]
            milliseconds = 1000 * measure.Spread.of(times[name]).middle
            slow = 16 * measure.seconds(lambda name=name, scale=scale: job(good[name], part, scale, "torch"))
            shown = f"{slow * 1000 / milliseconds:.0f}"
            if other not in times:
                print(f"{name:<26}{size:<8}{milliseconds:>9.1f}  {'':<22}{shown:<20}")
                continue
            ratio = measure.Spread.of([a / b for a, b in zip(times[name], times[other], strict=True)])
            met = "" if goal is None or size != "small" else " met" if ratio.middle <= goal else " MISSED"
            text = f"{ratio.middle:.2f} ({ratio.low:.2f}-{ratio.high:.2f}){met}"
            print(f"{name:<26}{size:<8}{milliseconds:>9.1f}  {text:<22}{shown:<20}")
    return status


if __name__ == "__main__":
    sys.exit(main())
