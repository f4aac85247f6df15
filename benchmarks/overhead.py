"""What a call costs besides its arithmetic: tiny problems, where PyTorch's own attention is the yardstick.

Interleaved in one process; median and spread (10 % to 90 %) over rounds, each the mean of a few calls.

python benchmarks/overhead.py [--threads N] [--rounds N] [T ...]
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

import regard
from regard import AuxRequest, Causal, Transport

CALLS = 20  # per round: long enough for the clock
TELEMETRY = AuxRequest(lse=True, entropy=True, max_scores=True, score_variance=True)
KINDS = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal, problem": {"problem": Transport(prior=Causal())},
    "plain, statistics": {"return_aux": TELEMETRY},
    "causal, statistics": {"is_causal": True, "return_aux": TELEMETRY},
}


def timed(f):
    start = time.perf_counter()
    for _ in range(CALLS):
        f()
    return (time.perf_counter() - start) / CALLS * 1e6


def shown(times):
    times = sorted(times)
    low, high = times[len(times) // 10], times[-1 - len(times) // 10]
    return f"{statistics.median(times):6.1f} us [{low:.1f}, {high:.1f}]"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("T", nargs="*", type=int, default=[16])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for T in args.T:
        for grad in (False, True):
            q, k, v = (torch.randn(1, 8, T, 64, requires_grad=grad) for _ in range(3))
            incoming = torch.randn(1, 8, T, 64)

            def finish(out, q=q, k=k, v=v, grad=grad, incoming=incoming):
                return torch.autograd.grad(out, (q, k, v), incoming) if grad else (out,)

            for name, arguments in KINDS.items():

                def ours(q=q, k=k, v=v, arguments=arguments, finish=finish):
                    result = regard.attention(q, k, v, backend="native", **arguments)
                    return finish(result[0] if "return_aux" in arguments else result)

                def theirs(q=q, k=k, v=v, causal="causal" in name, finish=finish):
                    return finish(F.scaled_dot_product_attention(q, k, v, is_causal=causal))

                for x, y in zip(ours(), theirs(), strict=True):
                    assert (x - y).abs().max() < 1e-4, "wrong: no speed is reported"
                timed(ours)  # warm
                timed(theirs)
                a, b = [], []
                for _ in range(args.rounds):
                    a.append(timed(ours))
                    b.append(timed(theirs))
                kind = "forward + backward" if grad else "forward"
                print(f"T={T} {kind}, {name}: native {shown(a)}, sdpa {shown(b)}")


if __name__ == "__main__":
    main()
