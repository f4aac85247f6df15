"""Whole models with PyTorch's own attention, and the same while `regard.accelerated()` is active; checked before timed.

    python benchmarks/models.py [smollm2] [bert] [vit] [whisper] [--full] [--rounds 7] [--clock cpu]

smollm2   SmolLM2-135M with its weights: prefill, and a training step
bert      BERT-base, an encoder of 12 layers and 12 heads, random weights: forward, and a training step
vit       ViT-base, 197 tokens for an image, random weights: forward, and a training step
whisper   The encoder of Whisper-base, 1500 positions, random weights: forward, and a training step

Each case runs in float32 and bfloat16. Nothing but the kernel differs: both jobs run the same model object in turns, in
one process. A case is timed only if its outputs and gradients are as near to float32's as PyTorch's own (float32: as
near to those of PyTorch as rounding allows), and if the engine served every attention that it is meant for. The table
shows medians and the middle 80 % of the rounds, of times and of ratios within a round. results/models.csv has them.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import regard
from measure import Spread, take_turns
from regard import timing
from regard.acceleration import calls
from report import interval, short
from run import machine

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Wrong(Exception):
    """A model computes something else, so nothing is timed."""


@dataclass(frozen=True)
class Case:
    model: str
    T: int
    batch: int = 1
    train: bool = False
    full: bool = False  # only with --full
    goals: tuple[tuple[str, float], ...] = ()  # dtype and the least ratio

    @property
    def name(self) -> str:
        return f"{self.model}, {'training step' if self.train else 'forward'}"


CASES = (
    Case("SmolLM2", 512),
    Case("SmolLM2", 2048),
    Case("SmolLM2", 4096, goals=(("bfloat16", 1.5),)),
    Case("SmolLM2", 512, train=True),
    Case("SmolLM2", 2048, train=True, full=True),
    Case("BERT-base", 64, batch=8, full=True),
    Case("BERT-base", 512, batch=2),
    Case("BERT-base", 64, batch=8, train=True, goals=(("float32", 0.97),)),
    Case("BERT-base", 128, batch=4, train=True, full=True, goals=(("float32", 0.97),)),
    Case("BERT-base", 512, batch=2, train=True, goals=(("float32", 1.05),)),
    Case("ViT-base", 197, batch=4),
    Case("ViT-base", 197, batch=4, train=True),
    Case("Whisper-base encoder", 1500),
    Case("Whisper-base encoder", 1500, train=True),
)
PARTS = {"smollm2": "SmolLM2", "bert": "BERT-base", "vit": "ViT-base", "whisper": "Whisper-base encoder"}


@dataclass
class Row:
    case: str
    dtype: str
    T: int
    batch: int
    stock: Spread
    accelerated: Spread
    ratio: Spread  # stock / accelerated, within a round
    verdict: str = ""

    def line(self) -> str:
        cells = [self.case, self.dtype, f"{self.batch} × {self.T}", *map(_shown, (self.stock, self.accelerated))]
        cells += [_shown(self.ratio), self.verdict]
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)) + " |"


WIDTHS = (35, 8, 9, 19, 19, 19, 0)
HEADING = "| " + " | ".join(
    name.ljust(width)
    for name, width in zip(
        ("case", "dtype", "tokens", "PyTorch, s (10–90 %)", "accelerated, s", "times as fast", ""), WIDTHS, strict=True
    )
)


def _shown(spread: Spread) -> str:
    return interval(spread.low, spread.middle, spread.high)


# --- models -----------------------------------------------------------------------------------------------------------


def smollm2() -> Any:
    model = regard.hf.load("smollm2")[0]
    model.set_attn_implementation("sdpa")
    return model


def bert() -> Any:
    config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForMaskedLM(config)


def vit() -> Any:
    return transformers.ViTModel(transformers.ViTConfig(), add_pooling_layer=False)


def whisper() -> Any:
    config = transformers.WhisperConfig(
        d_model=512,
        encoder_layers=6,
        encoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_layers=1,  # not used
        decoder_attention_heads=8,
    )
    return transformers.WhisperModel(config).get_encoder()


MAKERS = {"SmolLM2": smollm2, "BERT-base": bert, "ViT-base": vit, "Whisper-base encoder": whisper}


CHECKED = 256  # tokens whose logits are compared: those of a single token are off by more than twice PyTorch's error in
# one of ten cases, and by less than half of it as often


def arguments(case: Case, dtype: torch.dtype, logits: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    if case.model == "ViT-base":
        return {"pixel_values": torch.randn(case.batch, 3, 224, 224, generator=generator).to(dtype)}
    if case.model.startswith("Whisper"):
        return {"input_features": torch.randn(case.batch, 80, 2 * case.T, generator=generator).to(dtype)}
    ids = torch.randint(3, 30000, (case.batch, case.T), generator=generator)
    if case.model == "SmolLM2":
        return {"input_ids": ids, "use_cache": False} | ({"labels": ids} if case.train else {"logits_to_keep": logits})
    return {"input_ids": ids} | ({"labels": ids} if case.train else {})


def job(model: Any, case: Case, given: dict[str, Any]) -> Callable[[], list[Tensor]]:
    """One pass; its output, and the gradients of a training step."""

    def forward() -> Tensor:
        results = model(**given)
        return results.loss if "labels" in given else results[0]

    def once() -> list[Tensor]:
        if not case.train:
            with torch.no_grad():
                return [forward()]
        model.zero_grad()
        out = forward()
        (out if out.dim() == 0 else out.float().square().mean()).backward()
        return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    return once


def cast(model: Any, dtype: torch.dtype) -> Any:
    """`model.to(dtype)`, which transformers does not allow for models that were read from a GGUF file."""
    return torch.nn.Module.to(model, dtype)


def accelerated(once: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    def faster() -> list[Tensor]:
        with regard.accelerated():
            return once()

    return faster


# --- check and time ---------------------------------------------------------------------------------------------------


def gap(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative difference of the tensors, by their norms."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-6)) for a, b in pairs)


def check(model: Any, case: Case, dtype: torch.dtype) -> None:
    """Raise `Wrong` unless the accelerated pass is as near to the exact one as PyTorch's own, and was served."""
    given = arguments(case, dtype, CHECKED)
    stock = [t.clone() for t in job(model, case, given)()]
    before = calls.forward, calls.backward
    found = [t.clone() for t in accelerated(job(model, case, given))()]
    layers = model.config.num_hidden_layers
    expected = layers, layers if case.train else 0
    if (calls.forward - before[0], calls.backward - before[1]) != expected:
        raise Wrong(f"{case.name}, {dtype}: expected {expected} calls of the engine, left to PyTorch: {calls.stock}")
    if dtype == torch.float32:
        allowed, error = 1e-3, gap(found, stock)
    else:
        exact = [t.clone() for t in job(cast(model, torch.float32), case, arguments(case, torch.float32, CHECKED))()]
        cast(model, dtype)
        allowed, error = 2 * gap(stock, exact), gap(found, exact)
    if not error <= allowed:
        raise Wrong(f"{case.name}, {dtype}: off by {error:.1e}, allowed {allowed:.1e}")


def measured(case: Case, dtype: str, model: Any, rounds: int) -> Row:
    cast(model, DTYPES[dtype]).train(case.train)
    check(model, case, DTYPES[dtype])
    once = job(model, case, arguments(case, DTYPES[dtype]))
    times = take_turns({"stock": once, "accelerated": accelerated(once)}, rounds)
    ratios = Spread.of([a / b for a, b in zip(times["stock"], times["accelerated"], strict=True)])
    row = Row(case.name, dtype, case.T, case.batch, Spread.of(times["stock"]), Spread.of(times["accelerated"]), ratios)
    goal = dict(case.goals).get(dtype)
    if goal is not None:
        row.verdict = f"goal >= {short(goal)} {'reached' if ratios.middle >= goal else 'not reached'}"
    return row


def rows(models: list[str], dtypes: list[str], full: bool, rounds: int) -> Iterator[Row]:
    transformers.logging.set_verbosity_error()
    for name in models:
        torch.manual_seed(0)
        model = MAKERS[name]()
        for dtype in dtypes:
            for case in CASES:
                if case.model == name and (full or not case.full):
                    yield measured(case, dtype, model, rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--dtype", choices=DTYPES, help="this one only")
    parser.add_argument("--full", action="store_true", help="more lengths")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: processor time on one thread, for a machine that others use",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    timing.clock = CLOCKS[options.clock]
    torch.set_num_threads(1 if options.clock == "cpu" else options.threads)  # waiting threads would use processor time
    about = machine() | {"clock": options.clock}
    print("\n".join(f"# {name}: {value}" for name, value in about.items()))
    print(f"{HEADING} |\n|" + "|".join("-" * (width + 2) if width else "---" for width in WIDTHS) + "|", flush=True)
    done: list[Row] = []
    try:
        dtypes = [options.dtype] if options.dtype else list(DTYPES)
        for row in rows([PARTS[name] for name in options.models or PARTS], dtypes, options.full, options.rounds):
            done.append(row)
            print(row.line(), flush=True)
    except Wrong as wrong:
        print(f"FAILED: {wrong}")
        return 1
    except KeyboardInterrupt:
        print("\nstopped: the results so far are kept", file=sys.stderr)
    options.out.mkdir(parents=True, exist_ok=True)
    spread = Spread(0.0, 0.0, 0.0)
    with (options.out / "models.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*asdict(Row("", "", 0, 0, spread, spread, spread)), *about])
        writer.writeheader()
        writer.writerows(asdict(row) | about for row in done)
    print("\nwritten:", options.out / "models.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
