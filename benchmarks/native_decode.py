"""Decoding on the native engine against PyTorch's: few queries over a long cache, and the share of read bandwidth."""

import itertools
import time

import torch
import torch.nn.functional as F

import regard


def best(functions, rounds=15):
    times = [[] for _ in functions]
    for _ in range(rounds):
        for f, t in zip(functions, times, strict=True):
            start = time.perf_counter()
            f()
            t.append(time.perf_counter() - start)
    return [sorted(t)[len(t) // 2] for t in times]


def main():
    torch.set_num_threads(2)
    big = torch.randn(2**26)
    for dtype in (torch.float32, torch.bfloat16):
        for D, Tk, Tq in itertools.product((64, 128), (4096, 32768), (1, 4)):
            q = torch.randn(1, 32, Tq, D).to(dtype)
            k, v = (torch.randn(1, 8, Tk, D).to(dtype) for _ in range(2))
            exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
            wrong = (regard.attention(q, k, v, enable_gqa=True, backend="native") - exact).abs().max()
            assert wrong < (1e-5 if dtype == torch.float32 else 5e-3), "wrong: no speed is reported"
            (read,) = best([big.sum], 5)  # near each case: what the memory gives changes from minute to minute
            bandwidth = big.numel() * 4 / read
            a, b = best(
                [
                    lambda q=q, k=k, v=v: regard.attention(q, k, v, enable_gqa=True, backend="native"),
                    lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
                ]
            )
            size = 2 * k.numel() * k.element_size()
            print(
                f"{dtype} D={D} Tk={Tk} Tq={Tq}: native {a * 1e3:.2f} ms ({size / a / bandwidth:.0%} of "
                f"{bandwidth / 1e9:.1f} GB/s), sdpa {b * 1e3:.2f} ms, ratio {b / a:.2f}"
            )


if __name__ == "__main__":
    main()
