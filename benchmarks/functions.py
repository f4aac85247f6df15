"""What a function of the user's costs: compiling it, loading it in a later process, and against the reference backend.

    python benchmarks/functions.py [--heads 2] [--T 4096] [--threads 2]

The prior is -slope_h log(1 + |i - j|), with causal softmax and D = 64. Both processes time `select_backend`, which
compiles or loads the library; importing PyTorch and regard is not included. benchmarks/structured.py has the ratios to
plain softmax.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

import torch

import measure
import regard
from regard import Causal, Transport

D = 64
PROCESS = """
import time, torch, regard
x, slopes = torch.randn(1, 2, 8, 4), torch.rand(2)
began = time.perf_counter()
prior = regard.prior(lambda b, h, i, j: -slopes[h] * torch.log1p((i - j).abs()))
traced = time.perf_counter()
assert regard.select_backend(x, x, x, problem=regard.Transport(prior=prior)).backend == "native"
print(1e3 * (traced - began), 1e3 * (time.perf_counter() - traced))
"""


def processes() -> None:
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"REGARD_CACHE": os.path.join(cache, "functions")}
        for name in ("first process, compiles", "later process, loads"):
            found = subprocess.run(
                [sys.executable, "-c", PROCESS], env=environment, capture_output=True, text=True, check=True
            )
            traced, ready = map(float, found.stdout.split())
            print(f"| {name:26} | traced in {traced:7.1f} ms | ready in {ready:8.1f} ms |", flush=True)


def against_the_reference(T: int, H: int) -> None:
    inputs = [torch.randn(1, H, T, D, requires_grad=True) for _ in range(3)]
    slopes = torch.rand(H, requires_grad=True)
    problem = Transport(prior=regard.prior(lambda b, h, i, j: -slopes[h] * torch.log1p((i - j).abs())) * Causal())
    grad = torch.randn(1, H, T, D)

    def train(backend: str) -> list[torch.Tensor]:
        out = regard.attention(*inputs, problem=problem, backend=backend)
        return [out, *torch.autograd.grad(out, [*inputs, slopes], grad)]

    for mine, exact in zip(train("native"), train("torch"), strict=True):
        error = float(((mine - exact).abs().max() / exact.abs().max()).detach())
        if not error <= 1e-4:
            sys.exit(f"the two backends differ by {error:.1e} of the largest entry")
    times = {}
    for backend in ("native", "torch"):
        times[backend] = min(_clocked(lambda b=backend: train(b)) for _ in range(3))
    print(f"| T = {T}, {H} heads, forward and backward | native {1e3 * times['native']:.0f} ms | ", end="")
    print(f"reference {1e3 * times['torch']:.0f} ms | {times['torch'] / times['native']:.1f} times |")


def _clocked(job: measure.Job) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--T", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    processes()
    against_the_reference(given.T, given.heads)


if __name__ == "__main__":
    main()
