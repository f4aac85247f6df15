"""Softmax on the native engine against PyTorch's own: interleaved in one process, medians and spread of the ratio.

python benchmarks/native_softmax.py [--backward] [--threads N] [T ...]
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

import regard
from regard import AuxRequest

TELEMETRY = AuxRequest(lse=True, entropy=True, max_scores=True, score_variance=True)


def timed(f):
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def compare(ours, theirs, rounds):
    for _ in range(2):
        ours()
        theirs()
    a, b = [], []
    for _ in range(rounds):
        a.append(timed(ours))
        b.append(timed(theirs))
    ratios = sorted(y / x for x, y in zip(a, b, strict=True))
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    return statistics.median(a), statistics.median(b), statistics.median(ratios), low, high


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("T", nargs="*", type=int, default=[1024, 2048, 4096])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for T in args.T:
        for causal in (False, True):
            q, k, v = (torch.randn(1, args.heads, T, args.dim, requires_grad=args.backward) for _ in range(3))
            grad = torch.randn(1, args.heads, T, args.dim)

            def ours(q=q, k=k, v=v, causal=causal, grad=grad):
                out, _ = regard.attention(q, k, v, is_causal=causal, return_aux=TELEMETRY, backend="native")
                return torch.autograd.grad(out, (q, k, v), grad) if args.backward else (out,)

            def theirs(q=q, k=k, v=v, causal=causal, grad=grad):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                return torch.autograd.grad(out, (q, k, v), grad) if args.backward else (out,)

            for x, y in zip(ours(), theirs(), strict=True):
                assert (x - y).abs().max() < 1e-4, "wrong: no speed is reported"
            a, b, ratio, low, high = compare(ours, theirs, args.rounds)
            flops = 4 * args.heads * T * T * args.dim * (3.5 if args.backward else 1) / (2 if causal else 1)
            kind = "causal" if causal else "full"
            print(
                f"T={T} D={args.dim} {kind}: native {a * 1e3:.1f} ms ({flops / a / 1e9:.0f} GF/s), "
                f"sdpa {b * 1e3:.1f} ms, ratio {ratio:.2f} [{low:.2f}, {high:.2f}]"
            )


if __name__ == "__main__":
    main()
