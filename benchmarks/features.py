"""Attention by features against exact attention and other packages. Results are checked before they are timed.

    python benchmarks/features.py [--only scaling|crossover|quality|peers] [--seconds 1] [--threads 2]
                                  [--processor-time]

"scaling": time and peak memory of causal calls from T = 4096 to 262144, one head, and the slope of log time over log T
(1: linear). "crossover": the length from which features are faster than exact attention on the native engine, 8 heads;
between two lengths it is interpolated linearly in the logarithms. "quality": the distance of FAVOR+ from softmax, and
that of performer-pytorch. "peers": performer-pytorch and linear-attention-transformer at T = 1024 and 4096. All in
float32 with D = 64, and 256 features for FAVOR+. Values are standard normal, queries and keys half of that, because
FAVOR+ needs small ones. A section takes about a minute.

Before regard is timed, its output (in training also the gradients) is compared with the definition, the whole matrix of
weights in float64. So is performer-pytorch's output with the same directions. "quality" fails if regard's mean distance
from softmax over several draws is larger than performer-pytorch's. linear-attention-transformer has another map of as
many features (softmax of q, exp of k; causal rows do not see their own bucket), so it is timed but not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import measure
import regard
from measure import Spread
from regard import timing
from regard.features import Features, LinearAttention, Performer
from run import machine

D, M = 64, 256
LENGTHS = (4096, 16384, 65536, 262144)
MAPS: dict[str, Callable[[], Features]] = {
    "LinearAttention()": LinearAttention,
    f"Performer({D}, {M})": lambda: Performer(D, M, generator=torch.Generator().manual_seed(0)),
}


def inputs(T: int, H: int, train: bool = False) -> list[Tensor]:
    g = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(1, H, T, D, generator=g) for _ in range(3))
    return [t.requires_grad_(train) for t in (0.5 * q, 0.5 * k, v)]


def job(attention: Callable[..., Tensor], given: list[Tensor], train: bool) -> Callable[[], object]:
    if not train:

        def forward() -> object:
            with torch.no_grad():
                return attention(*given)

        return forward
    grad = torch.ones_like(given[0])
    return lambda: torch.autograd.grad(attention(*given), given, grad)


# --- the definition ---------------------------------------------------------------------------------------------------


def weights(phi_q: Tensor, phi_k: Tensor, causal: bool) -> Tensor:
    w = phi_q @ phi_k.mT
    w = w.tril() if causal else w
    return w / w.sum(-1, keepdim=True)


def by_definition(module: Features, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q, k, v = q.double(), k.double(), v.double()
    if isinstance(module, LinearAttention):
        return weights(torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1, causal) @ v
    assert isinstance(module, Performer)
    w, q, k = module.projection.double(), q * D**-0.25, k * D**-0.25  # type: ignore[union-attr]
    fq, fk = ((x @ w.mT - x.square().sum(-1, keepdim=True) / 2).exp() for x in (q, k))
    return weights(fq, fk, causal) @ v


def distance(found: Tensor, exact: Tensor) -> float:
    """The relative distance in the mean square."""
    return float((found.double() - exact).norm() / exact.norm())


def gate(module: Features, causal: bool, train: bool) -> None:
    given = inputs(1000, 2, train)
    q, k, v = given
    out, exact = module(q, k, v, causal), by_definition(module, q, k, v, causal)
    pairs = [(out, exact)]
    if train:
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        found, wanted = torch.autograd.grad(out, given, grad), torch.autograd.grad(exact, given, grad.double())
        pairs += zip(found, wanted, strict=True)
    error = max(distance(a.detach(), b.detach().double()) for a, b in pairs)
    if not error < 1e-5:
        raise SystemExit(f"WRONG: the error of {module!r} is {error:.1e}: nothing is timed")


# --- scaling ----------------------------------------------------------------------------------------------------------


def scaling(seconds: float) -> None:
    print("\n| causal, one head | pass | " + " | ".join(f"T = {T}" for T in LENGTHS) + " | slope |")
    print("|---|---|" + "---|" * (len(LENGTHS) + 1))
    for name, make in MAPS.items():
        module = make()
        for train in (False, True):
            gate(module, True, train)
            middles, cells = [], []
            for T, mib in zip(LENGTHS, peaks(name, train), strict=True):
                given = inputs(T, 1, train)
                once = job(lambda q, k, v, module=module: module(q, k, v, True), given, train)
                spread = Spread.of(measure.interleave({"": once}, seconds, least=3)[""])
                middles.append(spread.middle)
                cells.append(f"{_time(spread)}, {'?' if mib is None else f'{mib:.0f} MiB'}")
            print(f"| `{name}` | {_pass(train)} | {' | '.join(cells)} | {slope(LENGTHS, middles):.2f} |", flush=True)


def slope(lengths: tuple[int, ...], times: list[float]) -> float:
    """The slope of the straight line through (log T, log time), by least squares."""
    x = torch.tensor([math.log(T) for T in lengths], dtype=torch.float64)
    y = torch.tensor([math.log(t) for t in times], dtype=torch.float64)
    x = x - x.mean()
    return float(x @ (y - y.mean()) / (x @ x))


def peaks(name: str, train: bool) -> list[float | None]:
    """For each length, peak MiB beyond the inputs, results included; measured in a process of its own."""
    order = json.dumps({"name": name, "train": train, "threads": torch.get_num_threads()})
    try:
        return [*measure.peaks_printed_by(__file__, "--memory", order, timeout=300)[-len(LENGTHS) :]]
    except (subprocess.SubprocessError, ValueError):
        return [None] * len(LENGTHS)


def only_memory(order: dict[str, Any]) -> None:
    torch.set_num_threads(order["threads"])
    module = MAPS[order["name"]]()
    for T in (600, *LENGTHS):  # the small one loads libraries and starts threads
        once = job(lambda q, k, v: module(q, k, v, True), inputs(T, 1, order["train"]), order["train"])
        print(measure.peak_of(once))


# --- crossover --------------------------------------------------------------------------------------------------------


def crossover(seconds: float) -> None:
    lengths = (256, 512, 1024, 2048, 4096)
    print("\n| 8 heads | pass | " + " | ".join(f"T = {T}" for T in lengths) + " | faster from T = |")
    print("|---|---|" + "---|" * (len(lengths) + 1))
    for causal in (True, False):
        for train in (False, True):
            ratios: dict[str, list[float]] = {name: [] for name in MAPS}
            shown: dict[str, list[str]] = {name: [] for name in MAPS}
            modules = {name: make() for name, make in MAPS.items()}
            for module in modules.values():
                gate(module, causal, train)
            for T in lengths:
                given = inputs(T, 8, train)
                jobs = {"exact": job(partial(regard.attention, is_causal=causal), given, train)}
                for name, module in modules.items():
                    jobs[name] = job(partial(module, is_causal=causal), given, train)
                times = measure.interleave(jobs, seconds, least=3)
                for name in MAPS:
                    spread = Spread.of([a / b for a, b in zip(times["exact"], times[name], strict=True)])
                    ratios[name].append(spread.middle)
                    shown[name].append(f"{spread.middle:.2f} [{spread.low:.2f}, {spread.high:.2f}]")
            for name in MAPS:
                kind = "causal" if causal else "full"
                at = crossing(lengths, ratios[name])
                print(f"| `{name}`, {kind} | {_pass(train)} | {' | '.join(shown[name])} | {at} |", flush=True)


def crossing(lengths: tuple[int, ...], ratios: list[float]) -> str:
    """The length from which exact time / features' time stays above 1."""
    if ratios[-1] < 1:
        return f"> {lengths[-1]}"
    n = max((i for i, r in enumerate(ratios) if r < 1), default=-1)
    if n < 0:
        return f"< {lengths[0]}"
    share = -math.log(ratios[n]) / (math.log(ratios[n + 1]) - math.log(ratios[n]))
    return f"{lengths[n] * (lengths[n + 1] / lengths[n]) ** share:.0f}"


# --- peers ------------------------------------------------------------------------------------------------------------


def performer_pytorch(causal: bool, projection: Tensor | None = None) -> Callable[..., Tensor]:
    from performer_pytorch import FastAttention  # pyright: ignore[reportMissingImports]

    with contextlib.redirect_stdout(io.StringIO()):  # it prints that it has no CUDA code
        attention: Any = FastAttention(D, M, causal=causal)
    if projection is not None:
        attention.projection_matrix.copy_(projection)
    return attention


def linear_attention_transformer(causal: bool) -> Callable[..., Tensor]:
    from linear_attention_transformer import (  # pyright: ignore[reportMissingImports]
        linear_attention_transformer as package,
    )

    return package.causal_linear_attn if causal else package.linear_attn


def installed() -> bool:
    for package in ("performer-pytorch", "linear-attention-transformer"):
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            print(f"\n{package} is not installed")
            return False
    return True


def quality(_: float, draws: int = 20) -> None:
    """The distance of FAVOR+ from softmax for several sizes of queries and keys, and that of the uniform plan.

    The relative variance of one feature is exp(|q' + k'|^2) - 1. With large inputs a few features dominate and the
    output is noise, unless it is biased to the uniform plan (performer-pytorch adds 1e-4 to each feature).
    """
    if not installed():
        return
    print("\n| quality, causal | distance from softmax | performer-pytorch | uniform plan |\n|---|---|---|---|")
    q, k, v = inputs(512, 2)
    for size in (0.25, 0.5, 1.0):
        x, y = 2 * size * q, 2 * size * k
        exact = regard.attention(x.double(), y.double(), v.double(), is_causal=True)
        uniform = distance(regard.attention(0 * x, y, v, is_causal=True), exact)
        ours, theirs = [], []
        for n in range(draws):
            module = Performer(D, M, generator=torch.Generator().manual_seed(n))
            with torch.no_grad():
                ours.append(distance(module(x, y, v, True), exact))
                torch.manual_seed(n)
                theirs.append(distance(performer_pytorch(True)(x, y, v), exact))
        a, b = torch.tensor(ours), torch.tensor(theirs)
        print(
            f"| {size} x normal, {draws} draws | {float(a.mean()):.3f} ± {float(a.std()):.3f} | "
            f"{float(b.mean()):.3f} ± {float(b.std()):.3f} | {uniform:.3f} |"
        )
        error = float((a.var() / draws + b.var() / draws).sqrt())
        if size <= 0.5 and float(a.mean()) > float(b.mean()) + 4 * error:
            raise SystemExit("WRONG: further from softmax than performer-pytorch")


def peers(seconds: float) -> None:
    if not installed():
        return
    print("\n| 8 heads | against | T | regard | peer | times as fast [10 %, 90 %] |\n|---|---|---|---|---|---|")
    for T in (1024, 4096):
        for causal in (False, True):
            for train in (False, True):
                given = inputs(T, 8, train)
                for name, make in MAPS.items():
                    module = make()
                    if causal and T > 1024 and isinstance(module, Performer):
                        continue  # performer-pytorch stores T x m x D numbers several times: many GiB
                    gate(module, causal, train)
                    if isinstance(module, Performer):
                        peer, implementation = performer_pytorch(causal, module.projection), "performer-pytorch"
                        q, k, v = inputs(256, 2)
                        error = distance(peer(q, k, v), by_definition(module, q, k, v, causal))
                        if not error < 0.05:
                            raise SystemExit(f"WRONG: the error of {implementation} is {error:.1e}")
                    else:
                        peer, implementation = linear_attention_transformer(causal), "linear-attention-transformer"
                    jobs = {
                        "regard": job(partial(module, is_causal=causal), given, train),
                        "peer": job(peer, given, train),
                    }
                    times = measure.interleave(jobs, seconds, least=3)
                    ratio = Spread.of([a / b for a, b in zip(times["peer"], times["regard"], strict=True)])
                    what = f"`{name}`, {'causal' if causal else 'full'}, {_pass(train)}"
                    both = " | ".join(_time(Spread.of(times[implementation])) for implementation in ("regard", "peer"))
                    fast = f"**{ratio.middle:.2f}** [{ratio.low:.2f}, {ratio.high:.2f}]"
                    print(f"| {what} | {implementation} | {T} | {both} | {fast} |", flush=True)


def _pass(train: bool) -> str:
    return "training" if train else "forward"


def _time(spread: Spread) -> str:
    return f"{spread.middle:.2f} s" if spread.middle >= 1 else f"{1e3 * spread.middle:.3g} ms"


SECTIONS = {"scaling": scaling, "crossover": crossover, "quality": quality, "peers": peers}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--seconds", type=float, default=1.0, help="time for the rounds of one case")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--processor-time", action="store_true", help="processor time on one thread, for a machine that others use"
    )
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        only_memory(json.loads(options.memory))
        return 0
    if options.processor_time:
        options.threads, timing.clock = 1, time.process_time
    torch.set_num_threads(options.threads)
    print("\n".join(f"# {name}: {value}" for name, value in machine().items()))
    for name, section in SECTIONS.items():
        if options.only in (None, name):
            section(options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
