"""Training, the same in every experiment: AdamW, warmup and cosine decay, validation on fixed pieces of text.

The model is on the cell's device. Batches are drawn on the CPU, so that they are the same for every device, and moved.

Training can be stopped after any step and continues bit for bit as if it had not been. A checkpoint holds the weights,
the optimizer's moments, the states of all random generators and the sums behind the next line of metrics.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..nn import Transformer
from ..operator import attention
from ..statistics import AuxRequest
from . import distributed
from .corpus import Corpus
from .experiment import Cell, Config, Stopped
from .judging import Interval, interval

Batch = tuple[Tensor, Tensor]  # tokens and targets, [B, T] each; a negative target is ignored


@dataclass(frozen=True)
class Training:
    """The settings of a training. The defaults are nanoGPT's for small models."""

    steps: int
    every: int  # steps between two lines of metrics
    rate: float = 1e-3
    floor: float = 0.1  # the final learning rate, relative to the highest
    warmup: int = 100
    decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 1.0

    def rate_at(self, step: int) -> float:
        if step < self.warmup:
            return self.rate * (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))

    @classmethod
    def of(cls, config: Config) -> Training:
        """The settings that a configuration names; the others have their defaults."""
        return cls(**{name: config[name] for name in cls.__dataclass_fields__ if name in config})


def optimizer_for(model: nn.Module, training: Training) -> torch.optim.AdamW:
    """AdamW. Weight decay acts on the matrices of layers and embeddings only, not on a learned temperature or prior."""
    decaying, others = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = name.endswith("weight") and parameter.dim() >= 2
            (decaying if decays else others).append(parameter)
    groups = [{"params": decaying, "weight_decay": training.decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=training.rate, betas=training.betas)


@dataclass(frozen=True)
class Trained:
    """The metrics of a training. A loss that is not finite ends the training at step `diverged_at`."""

    metrics: list[dict[str, Any]]
    seconds: float
    diverged_at: int | None

    def last(self, name: str) -> float:
        """A metric at the end; inf if the training diverged."""
        value = None if self.diverged_at is not None else self.metrics[-1][name]
        return math.inf if value is None else value


def train(
    cell: Cell,
    model: Transformer,
    training: Training,
    draw: Callable[[torch.Generator], Batch],
    evaluate: Callable[[Transformer], dict[str, float]],
    save_every: float = 30.0,
) -> Trained:
    """Train the model of a cell, from its checkpoint if it has one.

    `draw` makes a batch from a generator that depends on the seed alone, so all settings see the same batches.
    `evaluate` is called every `training.every` steps; its results are logged with the training loss since then.
    Several processes (`distributed`) share every batch. With precision bf16 products are computed in bfloat16
    (autocast), while weights, moments and sums stay in float32.
    """
    model.to(cell.device)
    optimizer = optimizer_for(model, training)
    loss_of = distributed.loss_of(model)
    generator = torch.Generator().manual_seed(cell.seed)
    step, total, norms, seen, seconds, diverged_at = 0, 0.0, 0.0, 0, 0.0, None
    found = cell.restore()
    if found is not None:
        facts = found[1]
        _load_state(found[0], model, optimizer, generator, cell.device)
        step, total, norms, seen = facts["step"], facts["total"], facts["norms"], facts["seen"]
        seconds, diverged_at = facts["seconds"], facts["diverged_at"]
    began = saved = time.perf_counter()

    def save() -> None:
        passed = seconds + time.perf_counter() - began
        facts = {"step": step, "total": total, "norms": norms, "seen": seen}
        state = _state(model, optimizer, generator, cell.device)
        cell.checkpoint(state, {**facts, "seconds": passed, "diverged_at": diverged_at})

    model.train()
    while diverged_at is None:
        if (step % training.every == 0 or step == training.steps) and not (found and step == found[1]["step"]):
            model.eval()
            with torch.no_grad(), _precision(cell):
                record = {"step": step, **evaluate(model)}
            model.train()
            if seen:
                record |= {"loss": total / seen, "gradient": norms / seen}
            cell.log(record)
            total, norms, seen = 0.0, 0.0, 0
        found = None
        if step == training.steps:
            break
        if distributed.from_first(cell.stopping()):
            save()
            raise Stopped
        if time.perf_counter() - saved > save_every:  # each process has its own clock; only the first writes
            save()
            saved = time.perf_counter()
        tokens, targets = (distributed.share(t).to(cell.device) for t in draw(generator))
        for group in optimizer.param_groups:
            group["lr"] = training.rate_at(step)
        optimizer.zero_grad()
        with _precision(cell):
            loss = loss_of(tokens, targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), training.clip).item()
        (value,) = distributed.mean(loss.item())
        if not (math.isfinite(value) and math.isfinite(norm)):
            diverged_at = step
            cell.log({"step": step, "diverged": True})
            break
        optimizer.step()
        step, total, norms, seen = step + 1, total + value, norms + norm, seen + 1
        cell.advance(step, training.steps)
    save()
    distributed.wait_for_all()
    return Trained(cell.metrics(), seconds + time.perf_counter() - began, diverged_at)


def _precision(cell: Cell) -> AbstractContextManager[object]:
    return torch.autocast(cell.device.type, torch.bfloat16) if cell.precision == "bf16" else nullcontext()


def _state(
    model: nn.Module, optimizer: torch.optim.AdamW, generator: torch.Generator, device: torch.device
) -> dict[str, Tensor]:
    """Everything on which the next step depends, as named tensors."""
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for number, moments in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{number}.{name}": tensor for name, tensor in moments.items()}
    if device.type == "cuda":  # the generator of dropout
        state["random.device"] = torch.cuda.get_rng_state(device)
    return state | {"random.global": torch.get_rng_state(), "random.batches": generator.get_state()}


def _load_state(
    state: dict[str, Tensor],
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    generator: torch.Generator,
    device: torch.device,
) -> None:
    model.load_state_dict({n.removeprefix("model."): t for n, t in state.items() if n.startswith("model.")})
    moments: dict[int, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if name.startswith("optimizer."):
            _, number, moment = name.split(".")
            moments.setdefault(int(number), {})[moment] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    torch.set_rng_state(state["random.global"])
    generator.set_state(state["random.batches"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["random.device"], device)


# --- text -------------------------------------------------------------------------------------------------------------


def text_model(cell: Cell, **changes: Any) -> Transformer:
    """A model of the configured size for the cell's text. Where shapes agree, the same seed gives the same weights."""
    config = cell.config
    torch.manual_seed(cell.seed)
    sizes = {name: config[name] for name in ("layers", "heads", "width") if name in config}
    return Transformer(len(cell.corpus.characters), config["length"], **{**sizes, **changes})


def text_batches(cell: Cell) -> Callable[[torch.Generator], Batch]:
    def draw(generator: torch.Generator) -> Batch:
        pieces = cell.corpus.batch(cell.config["batch"], cell.config["length"], generator)
        return pieces[:, :-1], pieces[:, 1:]

    return draw


def validation(corpus: Corpus, count: int, length: int) -> Tensor:
    """The same pieces of text for every model and seed, [count, length + 1], on the CPU."""
    return corpus.batch(count, length, torch.Generator().manual_seed(0), "validation")


def mean_loss(model: Transformer, pieces: Tensor, at_once: int = 32) -> float:
    """Validation loss in nats per character."""
    device = model.token.weight.device
    with torch.no_grad():
        losses = [model.loss(part.to(device)).item() * len(part) for part in pieces.split(at_once)]
    return math.fsum(losses) / len(pieces)


def train_on_text(
    cell: Cell,
    model: Transformer,
    also: Callable[[Transformer, Tensor], dict[str, float]] | None = None,
) -> Trained:
    """Train on the cell's text as configured. "val" is the loss on `evaluate` pieces of the held-out part.

    `also` computes further metrics from a few of those pieces, [8, length].
    """
    pieces = validation(cell.corpus, cell.config["evaluate"], cell.config["length"]).to(cell.device)

    def evaluate(model: Transformer) -> dict[str, float]:
        found = {"val": mean_loss(model, pieces)}
        return found if also is None else found | also(model, pieces[:8, :-1])

    return train(cell, model, Training.of(cell.config), text_batches(cell), evaluate)


def plan_statistics(model: Transformer, tokens: Tensor, *names: str) -> dict[str, Tensor]:
    """Statistics of every head's plan, by their names in `AuxRequest`, averaged over the queries: [layers, H] each."""
    request = AuxRequest(**dict.fromkeys(names, True))
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    tokens = tokens.to(model.token.weight.device)
    with torch.no_grad():
        for (q, k, v), problem in zip(model.heads(tokens), model.problems(tokens), strict=True):
            _, aux = attention(q, k, v, is_causal=True, problem=problem, return_aux=request)
            for name in names:
                found[name].append(getattr(aux, name).mean((0, 2)))
    return {name: torch.stack(layers) for name, layers in found.items()}


def perplexity_change(a: Sequence[float], b: Sequence[float]) -> Interval:
    """How much higher the perplexity of the losses a is than that of b, seed by seed: 0.05 is 5 % worse."""
    return interval([_relative(x - y) for x, y in zip(a, b, strict=True)])


def _relative(difference: float) -> float:
    return math.inf if difference >= 700 else math.expm1(difference)  # NaN if both diverged
