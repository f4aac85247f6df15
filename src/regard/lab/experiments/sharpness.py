"""The temperature of trained heads, moved at inference: what each layer loses when it is sharpened or softened."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...nn import Transformer
from ...operator import attention
from ...problem import Transport
from ...statistics import AuxRequest
from ..judging import interval, judge
from ..runner import Cell, Conclusion, Config, Experiment, Figure, Outcomes, Refused, Series, Table, need_temperatures
from ..training import mean_loss, text_model, train_on_text, validation

SOURCE = "003, “The Temperature Knob”: interpretability"
COMPARED = (0.5, 2.0)  # temperatures


def settings(config: Config) -> list[str]:
    need_temperatures(config, *COMPARED)
    return config["models"]


def measure(cell: Cell) -> dict[str, Any]:
    return smollm2(cell) if cell.setting == "SmolLM2" else own(cell)


# --- a small model of our own -----------------------------------------------------------------------------------------


def own(cell: Cell) -> dict[str, Any]:
    config = cell.config
    model = text_model(cell)
    train_on_text(cell, model)
    model.eval()
    pieces = validation(cell.corpus, config["evaluate"], config["length"]).to(cell.device)
    shape = config["layers"], config["heads"]

    def loss_at(temperatures: Tensor) -> float:
        """With a temperature for every head, [layers, H]."""
        for block, tau in zip(model.blocks, temperatures.to(cell.device), strict=True):
            block.attention.problem = Transport(temperature=tau[:, None, None])  # type: ignore[union-attr]
        loss = mean_loss(model, pieces)
        for block in model.blocks:
            block.attention.problem = None  # type: ignore[union-attr]
        return loss

    def moved(layer: int, head: int | slice, tau: float) -> float:
        temperatures = torch.ones(shape)
        temperatures[layer, head] = tau
        return loss_at(temperatures)

    every = slice(None)
    places = [(layer, head) for layer in range(shape[0]) for head in range(shape[1])]
    entropy, variance = head_statistics(model, pieces[:16, :-1])
    return {
        "base": loss_at(torch.ones(shape)),
        "all": [loss_at(torch.full(shape, tau)) for tau in config["temperatures"]],
        "layers": [[moved(n, every, tau) for tau in config["layer_temperatures"]] for n in range(shape[0])],
        "sharper": [moved(*place, 0.5) for place in places],
        "softer": [moved(*place, 2.0) for place in places],
        "entropy": entropy,
        "score_variance": variance,
    }


def head_statistics(model: Transformer, tokens: Tensor) -> tuple[list[float], list[float]]:
    """Each head's mean entropy relative to log n, and its mean score variance (dH/d ln τ), layer by layer."""
    entropies, variances = [], []
    counts = torch.arange(2, tokens.shape[1] + 1, dtype=torch.float32, device=tokens.device)
    for q, k, v in model.heads(tokens):
        _, aux = attention(q, k, v, is_causal=True, return_aux=AuxRequest(entropy=True, score_variance=True))
        assert aux.entropy is not None and aux.score_variance is not None
        entropies += (aux.entropy[..., 1:] / counts.log()).mean((0, 2)).tolist()
        variances += aux.score_variance[..., 1:].mean((0, 2)).tolist()
    return entropies, variances


# --- SmolLM2 ----------------------------------------------------------------------------------------------------------


def smollm2(cell: Cell) -> dict[str, Any]:
    """The same sweep over the layers of a real language model, on pieces of the cell's text."""
    try:
        from ... import hf

        model, tokenizer = hf.load("smollm2")
    except (ImportError, OSError, ValueError) as problem:
        raise Refused(f'models: SmolLM2 cannot be loaded ({problem}); --set models=["own"] leaves it out') from None
    config = cell.config
    length, count = config["length"], config["smollm2_pieces"]
    held_out = cell.corpus.text[cell.corpus.split :]
    begins = torch.randint(len(held_out) - 8 * length, (count,), generator=torch.Generator().manual_seed(cell.seed))
    pieces = torch.stack(
        [torch.tensor(tokenizer(held_out[b : b + 8 * length])["input_ids"][:length]) for b in begins.tolist()]
    )
    layers = list(range(len(model.model.layers)))
    done, total = 0, 1 + len(config["temperatures"]) + len(layers) * len(config["layer_temperatures"])

    def loss_at(tau: float, which: list[int]) -> float:
        nonlocal done
        with _temperature(hf, model, tau, which), torch.no_grad():
            loss = model(input_ids=pieces, labels=pieces).loss.item()
        done += 1
        cell.advance(done, total)
        return loss

    return {
        "base": loss_at(1.0, []),
        "all": [loss_at(tau, layers) for tau in config["temperatures"]],
        "layers": [[loss_at(tau, [n]) for tau in config["layer_temperatures"]] for n in layers],
    }


@contextmanager
def _temperature(hf: Any, model: Any, tau: float, which: list[int]) -> Iterator[None]:
    """Inside, these layers' heads have another temperature."""
    usual = hf.register("regard")
    moved = hf.register("regard-lab", Transport(temperature=tau))
    attentions = [layer.self_attn for layer in model.model.layers]
    before = model.config._attn_implementation
    model.set_attn_implementation(usual)
    try:
        for n in which:
            attentions[n].config = copy.copy(model.config)
            attentions[n].config._attn_implementation = moved
        yield
    finally:
        for n in which:
            attentions[n].config = model.config
        model.set_attn_implementation(before)


# --- what it says -----------------------------------------------------------------------------------------------------


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's: the correlation of the ranks. Equal numbers share the mean of theirs; nan if all are equal."""
    x, y = (_ranks(torch.tensor(v, dtype=torch.float64)) for v in (a, b))
    x, y = x - x.mean(), y - y.mean()
    return (x @ y / (x.square().sum() * y.square().sum()).sqrt()).item()


def _ranks(numbers: Tensor) -> Tensor:
    below, equal = numbers[:, None] > numbers, numbers[:, None] == numbers
    return below.sum(1) + (equal.sum(1) - 1) / 2


def conclude(outcomes: Outcomes) -> Conclusion:
    taus = outcomes.config["temperatures"]
    verdicts, tables, figures = [], [], []
    for name in outcomes.settings:
        each = outcomes.each(name)
        verdicts += [
            judge(
                "A trained model needs the temperature it was trained with",
                "ours",
                f"{name}: loss at τ = {tau:g} in all heads minus loss at τ = 1, nats",
                interval([o.result["all"][taus.index(tau)] - o.result["base"] for o in each]),
                (0.0, math.inf),
            )
            for tau in COMPARED
        ]
        columns = [[o.result["all"][n] - o.result["base"] for o in each] for n in range(len(taus))]
        low, high = [min(c) for c in columns], [max(c) for c in columns]
        line = Series("all layers", taus, [math.fsum(c) / len(c) for c in columns], low, high)
        figures.append(Figure(f"{name}: loss above that at τ = 1", "τ", "nats", [line], log_x=True, reference=0.0))
        layers = range(len(each[0].result["layers"]))
        moved = outcomes.config["layer_temperatures"]
        lost = [
            [[o.result["layers"][n][m] - o.result["base"] for o in each] for n in layers] for m in range(len(moved))
        ]
        lines = [
            Series(f"τ = {tau:g}", [float(n) for n in layers], [math.fsum(v) / len(v) for v in lost[m]])
            for m, tau in enumerate(moved)
        ]
        title = f"{name}: loss when one layer's temperature is moved"
        figures.append(Figure(title, "layer", "nats above", lines, reference=0.0))
        worst = sorted(layers, key=lambda n: -max(math.fsum(values[n]) for values in lost))[:8]
        tables.append(
            Table(
                f"{name}: the layers that lose most, nats above the loss at τ = 1",
                ["", *(f"τ = {tau:g}" for tau in moved)],
                [[f"layer {n}", *(interval(values[n]).brief(4) for values in lost)] for n in sorted(worst)],
            )
        )
    if "own" in outcomes.settings:
        results = [o.result for o in outcomes.each("own")]
        committed = [
            rank_correlation(r["entropy"], [a - b for a, b in zip(r["softer"], r["sharper"], strict=True)])
            for r in results
        ]
        sensitive = [
            rank_correlation(
                r["score_variance"],
                [max(a, b) - r["base"] for a, b in zip(r["softer"], r["sharper"], strict=True)],
            )
            for r in results
        ]
        verdicts += [
            judge(
                "Temperature reveals which heads rely on specific tokens: the peaked ones suffer when softened",
                SOURCE,
                "rank correlation over heads of entropy with (loss when softened − loss when sharpened)",
                interval(committed),
                (-1.0, 0.0),
            ),
            judge(
                "Heads whose score variance is large are those that a temperature moves",
                "ours: score variance is dH/d ln τ",
                "rank correlation over heads of score variance with the larger of the two losses",
                interval(sensitive),
                (0.0, 1.0),
            ),
        ]
    return Conclusion(verdicts, tables, figures)


EXPERIMENT = Experiment(
    name="sharpness",
    question="Do trained heads commit, or hedge?",
    source=SOURCE,
    about="The temperature of a trained model is moved at inference, in all heads, in one layer, in one head, and the "
    "loss on unseen text is measured.",
    quick={
        "seeds": 2, "steps": 60, "every": 30, "warmup": 5, "rate": 3e-3, "batch": 8, "length": 32, "layers": 2,
        "heads": 2, "width": 32, "evaluate": 16, "models": ["own"], "smollm2_pieces": 1,
        "temperatures": [0.5, 1.0, 2.0], "layer_temperatures": [0.5, 2.0],
    },
    full={
        "seeds": 3, "steps": 1500, "every": 150, "warmup": 50, "rate": 2e-3, "batch": 16, "length": 128, "layers": 3,
        "heads": 4, "width": 64, "evaluate": 64, "models": ["own", "SmolLM2"], "smollm2_pieces": 2,
        "temperatures": [0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0],
        "layer_temperatures": [0.5, 0.7, 1.4, 2.0],
    },
    settings=settings,
    measure=measure,
    conclude=conclude,
)  # fmt: skip
