"""Attention against PyTorch's own, forward and backward, in one interleaved run.

    python benchmarks/attention.py [--rounds 15] [--length 512] [--heads 8] [--size 64] [--threads 2]

Each row is one problem on one backend. Before anything is timed, its output and gradients are compared with float64
(stock attention for plain softmax, the definition otherwise): a row that fails is not timed, and the run fails. Within
a round the peer (stock attention, causal if the problem is) runs right before it. The ratio is its time by the peer's
in that round, so below 1 is faster; shown are the median over the rounds and the quartiles.
"""

import argparse
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import ALiBi, AuxRequest, Causal, FermiDirac, Free, Rows, Transport, Tsallis, Window

TOLERANCE = 1e-4  # relative to the largest element; far above rounding in float32, far below a mistake

Attention = Callable[..., Tensor]


def run(attention: Attention, inputs: list[Tensor]) -> list[Tensor]:
    """Output and gradients."""
    out = attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out.sum(), inputs)]


def error(attention: Attention, reference: Attention, inputs: list[Tensor]) -> float:
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    pairs = zip(run(attention, inputs), run(reference, doubles), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs)


def seconds(attention: Attention, inputs: list[Tensor]) -> float:
    began = time.perf_counter()
    run(attention, inputs)
    return time.perf_counter() - began


def served_by(**arguments) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = regard.attention(q, k, v, **arguments)
        return result[0] if isinstance(result, tuple) else result

    return attention


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "rounds": 15,
        "length": 512,
        "heads": 8,
        "size": 64,
        "threads": torch.get_num_threads(),
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    shape = (1, options.heads, options.length, options.size)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    query, key, value = inputs
    causal = Causal()
    slopes = torch.tensor([2.0 ** -(h + 1) for h in range(options.heads)])
    cases: dict[str, dict] = {
        "softmax": {},
        "softmax, causal": {"is_causal": True},
        "softmax, causal, lse and entropy": {"is_causal": True, "return_aux": AuxRequest(lse=True, entropy=True)},
        "window and ALiBi, causal": {"problem": Transport(prior=causal * Window(127) * ALiBi(slopes))},
        "sink, causal": {"problem": Transport(prior=causal, marginal=Rows(sink=0.0))},
        "sigmoid, causal": {"problem": Transport(FermiDirac(), prior=causal, marginal=Free(-math.log(options.length)))},
        "entmax 1.5, causal": {"problem": Transport(Tsallis(1.5), prior=causal)},
        "sparsemax, causal": {"problem": Transport(Tsallis(2.0), prior=causal)},
    }

    print(
        f"# {platform.machine()}, {options.threads} threads, PyTorch {torch.__version__}, regard {regard.__version__}"
    )
    print(f"# float32, B, H, T, D = {', '.join(map(str, shape))}; forward and backward, {options.rounds} rounds")
    print(f"{'problem':<34}{'backend':<9}{'error':>9}{'ms':>9}{'ratio':>8}   quartiles")
    failed = False
    for name, arguments in cases.items():
        is_causal = "causal" in name

        def peer(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = is_causal) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

        for backend in regard.operator.BACKENDS:
            try:
                regard.select_backend(query, key, value, **arguments, backend=backend)
            except NotImplementedError:
                continue
            attention = served_by(**arguments, backend=backend)
            reference = served_by(**arguments, backend="torch") if "problem" in arguments else peer
            wrong = error(attention, reference, inputs)
            if not wrong <= TOLERANCE:
                failed = True
                print(f"{name:<34}{backend:<9}{wrong:9.1e}  WRONG: not timed")
                continue
            seconds(peer, inputs)  # warm
            rounds = [(seconds(peer, inputs), seconds(attention, inputs)) for _ in range(options.rounds)]
            ratios = [mine / stock for stock, mine in rounds]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            spent = 1e3 * statistics.median(mine for _, mine in rounds)
            print(f"{name:<34}{backend:<9}{wrong:9.1e}{spent:9.1f}{middle:8.2f}   {low:.2f} to {high:.2f}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
