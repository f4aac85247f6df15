"""The cost of inspection: whole models with and without statistics. Results are checked before they are timed.

    python benchmarks/inspection.py [cost] [memory] [gpt-oss] [--full] [--length 2048] [--rounds 5] [--clock cpu]

cost      SmolLM2-135M, 30 layers, one sequence: its stock forward pass (sdpa), the same on regard, with every statistic
          but key_mass, and with key_mass. Goal: with statistics at most 1.10 times sdpa.
memory    The peak of one pass beyond the loaded model, in a process of its own: `regard.inspect` against eager
          attention with `output_attentions=True`. If the latter does not fit into memory, the size of its matrices
          alone is computed, and the row is marked as computed.
gpt-oss   A small model with random weights: eager, its only stock attention on a CPU, against regard; forward, and
          forward with backward.

All jobs run in every round. The table shows medians and the middle 80 % of the rounds, both of times and of ratios
within a round. Results are written to benchmarks/results/inspection.csv.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import measure
import regard
from measure import Spread, take_turns
from regard import timing
from regard.statistics import ROW_STATISTICS
from report import interval, short
from run import machine

PARTS = ("cost", "memory", "gpt-oss")
QUIET = {"use_cache": False, "logits_to_keep": 1}


@dataclass
class Row:
    case: str
    T: int
    implementation: str
    seconds: Spread | None = None
    ratio: Spread | None = None  # its time divided by the stock time in the same round
    gib: float | None = None
    verdict: str = ""

    def line(self) -> str:
        cells = [self.case, str(self.T), self.implementation, _shown(self.seconds), _shown(self.ratio)]
        cells += ["" if self.gib is None else f"{self.gib:.2f}", self.verdict]
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)) + " |"


WIDTHS = (22, 5, 22, 19, 19, 6, 0)
HEADING = "| " + " | ".join(
    name.ljust(width)
    for name, width in zip(
        ("case", "T", "implementation", "s (10–90 %)", "÷ stock (10–90 %)", "GiB", ""), WIDTHS, strict=True
    )
)


def _shown(spread: Spread | None) -> str:
    return "" if spread is None else interval(spread.low, spread.middle, spread.high)


class Wrong(Exception):
    """An implementation computes something else, so nothing is timed."""


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def rows_of(case: str, T: int, times: dict[str, list[float]], stock: str) -> list[Row]:
    rows = []
    for implementation, spent in times.items():
        ratios = [a / b for a, b in zip(spent, times[stock], strict=True)]
        rows.append(
            Row(case, T, implementation, Spread.of(spent), None if implementation == stock else Spread.of(ratios))
        )
    return rows


def tokens(T: int, vocabulary: int) -> Tensor:
    return torch.randint(3, vocabulary, (1, T), generator=torch.Generator().manual_seed(0))


# --- cost of the statistics -------------------------------------------------------------------------------------------


def load() -> Any:
    transformers.logging.set_verbosity_error()
    regard.hf.register()
    return regard.hf.load("smollm2")[0]


def passes(model: Any, ids: Tensor) -> dict[str, Callable[[], Any]]:
    """One forward pass each; the last two also give an Inspection."""

    def stock(implementation: str) -> Callable[[], Any]:
        def once() -> Any:
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                return model(ids, **QUIET).logits

        return once

    def watched(statistics: tuple[str, ...] | None) -> Callable[[], Any]:
        def once() -> Any:
            model.set_attn_implementation("sdpa")
            with torch.no_grad(), regard.watch(model, statistics=statistics) as seen:
                return model(ids, **QUIET).logits, seen

        return once

    return {
        "sdpa": stock("sdpa"),
        "regard": stock("regard"),
        "with statistics": watched(None),
        "with key_mass too": watched(ROW_STATISTICS),
    }


def check_statistics(model: Any, T: int = 200) -> None:
    """Compare the logits of each pass, and the entropy of every head, with those of eager attention."""
    ids = tokens(T, 40000)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = model(ids, use_cache=False, output_attentions=True)
    weights = torch.cat(plain.attentions).double()  # [layers, H, T, T]
    entropy = -torch.xlogy(weights, weights).sum(-1).mean(-1)
    for implementation, once in passes(model, ids).items():
        found = once()
        logits, seen = found if isinstance(found, tuple) else (found, None)
        gap = float((logits[0, -1] - plain.logits[0, -1]).abs().max() / plain.logits[0, -1].abs().max())
        if not gap < 1e-3:
            raise Wrong(f"cost: the logits of {implementation!r} are off by {gap:.1e}")
        if seen is not None and not torch.allclose(seen.mean("entropy"), entropy, rtol=1e-3, atol=1e-3):
            raise Wrong(f"cost: the entropies of {implementation!r} are off")


def cost(lengths: list[int], rounds: int | None) -> Iterator[Row]:
    model = load()
    check_statistics(model)
    for T in lengths:
        jobs = passes(model, tokens(T, 40000))
        if T <= 4096:
            jobs["with statistics"]()  # warm
        times = take_turns(jobs, rounds or (5 if T <= 4096 else 3))
        for row in rows_of("SmolLM2, forward", T, times, "sdpa"):
            if row.implementation == "with statistics" and row.ratio is not None:
                row.verdict = f"goal <= 1.10 {'reached' if row.ratio.middle <= 1.10 else 'not reached'}"
            yield row


# --- memory -----------------------------------------------------------------------------------------------------------


def matrices(T: int, layers: int = 30, heads: int = 9) -> float:
    """GiB of the weights that output_attentions=True returns, float32."""
    return layers * heads * T**2 * 4 / 2**30


def only_memory(order: str) -> None:
    """Print the peak of one pass; runs in a process of its own."""
    wanted = json.loads(order)
    torch.set_num_threads(wanted["threads"])
    model, ids = load(), tokens(wanted["T"], 40000)

    def eager(ids: Tensor) -> None:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            model(ids, output_attentions=True, **QUIET)

    job = eager if wanted["implementation"] == "eager" else lambda ids: regard.inspect(model, ids)
    job(ids[:, :64])  # loads libraries and starts threads
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # otherwise memory that loading freed is used again and not counted
    print(measure.peak_of(lambda: job(ids)))


def memory(lengths: list[int]) -> Iterator[Row]:
    for T in lengths:
        for implementation in ("inspect", "eager"):
            named = "regard.inspect" if implementation == "inspect" else "output_attentions"
            row = Row("SmolLM2, peak memory", T, named)
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
            if implementation == "eager" and 1.3 * matrices(T) > 0.6 * free:
                row.gib = matrices(T)
                row.verdict = f"computed, not run: its matrices alone, {free:.0f} GiB are free"
            else:
                order = json.dumps({"implementation": implementation, "T": T, "threads": torch.get_num_threads()})
                command = [sys.executable, __file__, "--memory", order]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                row.gib = float(done.stdout.strip().splitlines()[-1]) / 1024
                row.verdict = "measured"
            yield row


# --- gpt-oss ----------------------------------------------------------------------------------------------------------


def gpt_oss(lengths: list[int], rounds: int | None) -> Iterator[Row]:
    transformers.logging.set_verbosity_error()
    regard.hf.register()
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=128,
        num_local_experts=2,
        num_experts_per_tok=2,  # all of them, so that rounding cannot change the routing
        max_position_embeddings=8192,
    )
    model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()  # type: ignore[union-attr]

    def job(implementation: str, ids: Tensor, train: bool) -> Callable[[], list[Tensor]]:
        def once() -> list[Tensor]:
            model.set_attn_implementation(implementation)
            if not train:
                with torch.no_grad():
                    return [model(ids, use_cache=False).logits]
            model.zero_grad()
            out = model(ids, labels=ids, use_cache=False)
            out.loss.backward()
            return [out.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

        return once

    for T in lengths:
        ids = tokens(T, 1024)
        for train in (False, True):
            model.train(train)
            case = "gpt-oss, training step" if train else "gpt-oss, forward"
            jobs = {name: job(name, ids, train) for name in ("eager", "regard")}
            plain, found = (once() for once in jobs.values())
            gap = max(float((a - b).norm() / a.norm().clamp(min=1e-9)) for a, b in zip(plain, found, strict=True))
            if not gap < 1e-3:
                raise Wrong(f"{case}, T = {T}: regard and eager differ by {gap:.1e}")
            for row in rows_of(case, T, take_turns(jobs, rounds or 5), "eager"):
                if row.ratio is not None:
                    row.verdict = f"{short(1 / row.ratio.middle)} times as fast as eager"
                yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--full", action="store_true", help="also longer texts (half an hour)")
    parser.add_argument("--length", type=int, help="this length only")
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: processor time on one thread, for a machine that others use",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        only_memory(options.memory)
        return 0
    timing.clock = CLOCKS[options.clock]
    torch.set_num_threads(1 if options.clock == "cpu" else options.threads)  # waiting threads would use processor time
    lengths = {
        "cost": [2048, 8192] if options.full else [2048],
        "memory": [1024, 2048, 4096, 8192] if options.full else [1024, 2048],
        "gpt-oss": [1024, 2048, 4096] if options.full else [1024],
    }
    if options.length:
        lengths = {part: [options.length] for part in PARTS}
    about = machine() | {"clock": options.clock}
    print("\n".join(f"# {name}: {value}" for name, value in about.items()))
    print(f"{HEADING} |\n|" + "|".join("-" * (width + 2) if width else "---" for width in WIDTHS) + "|", flush=True)
    rows: list[Row] = []
    try:
        for part in options.parts or PARTS:
            made = {
                "cost": lambda: cost(lengths["cost"], options.rounds),
                "memory": lambda: memory(lengths["memory"]),
                "gpt-oss": lambda: gpt_oss(lengths["gpt-oss"], options.rounds),
            }[part]()
            for row in made:
                rows.append(row)
                print(row.line(), flush=True)
    except Wrong as wrong:
        print(f"FAILED: {wrong}")
        return 1
    except KeyboardInterrupt:
        print("\nstopped: the results so far are kept", file=sys.stderr)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "inspection.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*asdict(Row("", 0, "")), *about])
        writer.writeheader()
        writer.writerows(asdict(row) | about for row in rows)
    print("\nwritten:", options.out / "inspection.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
