"""The temperature of trained heads, changed at inference: the loss of each layer when it is sharpened or softened."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import hf
from ...inspection import inspect
from ...nn import Transformer
from ...operator import attention
from ...problem import Transport
from ...statistics import AuxRequest
from .. import smollm2
from ..configuration import require_temperatures
from ..experiment import Cell, Conclusion, Config, Experiment, Figure, Outcomes, Series, Stopped, Table
from ..judging import interval, judge_effect
from ..training import mean_loss, text_model, train_on_text, validation

SOURCE = "003, “The Temperature Knob”: interpretability"
COMPARED = (0.5, 2.0)  # temperatures


def settings(config: Config) -> list[str]:
    require_temperatures(config, *COMPARED)
    return smollm2.models(config)


def measure(cell: Cell) -> dict[str, Any]:
    return of_smollm2(cell) if cell.setting == smollm2.NAME else own(cell)


def sweep(
    loss_at: Callable[[Tensor, int], float], shape: tuple[int, ...], places: list[tuple[int, int]], config: Config
) -> dict[str, Any]:
    """The loss at τ = 1, with τ changed in all heads, in one layer, and in the heads at `places` (layer, head).

    `loss_at(temperatures, first)` has temperatures [layers, H] that are 1 in the layers before `first`.
    """

    def changed(layer: int, head: int | slice, tau: float) -> float:
        temperatures = torch.ones(shape)
        temperatures[layer, head] = tau
        return loss_at(temperatures, layer)

    every = slice(None)
    return {
        "base": loss_at(torch.ones(shape), 0),
        "all": [loss_at(torch.full(shape, tau), 0) for tau in config["temperatures"]],
        "layers": [[changed(n, every, tau) for tau in config["layer_temperatures"]] for n in range(shape[0])],
        "sharper": [changed(*place, 0.5) for place in places],
        "softer": [changed(*place, 2.0) for place in places],
    }


# --- a small model of our own -----------------------------------------------------------------------------------------


def own(cell: Cell) -> dict[str, Any]:
    config = cell.config
    model = text_model(cell)
    train_on_text(cell, model)
    model.eval()
    pieces = validation(cell.corpus, config["evaluate"], config["length"]).to(cell.device)
    shape = config["layers"], config["heads"]

    def loss_at(temperatures: Tensor, first: int) -> float:
        """The loss with these temperatures, [layers, H]."""
        for block, tau in zip(model.blocks, temperatures.to(cell.device), strict=True):
            block.attention.problem = Transport(temperature=tau[:, None, None])  # type: ignore[union-attr]
        loss = mean_loss(model, pieces)
        for block in model.blocks:
            block.attention.problem = None  # type: ignore[union-attr]
        return loss

    places = [(layer, head) for layer in range(shape[0]) for head in range(shape[1])]
    entropy, variance = head_statistics(model, pieces[:16, :-1])
    return sweep(loss_at, shape, places, config) | {"entropy": entropy, "score_variance": variance}


def head_statistics(model: Transformer, tokens: Tensor) -> tuple[list[float], list[float]]:
    """The mean entropy / log n and the mean score variance (dH/d ln τ) of each head, layer by layer."""
    entropies, variances = [], []
    counts = torch.arange(2, tokens.shape[1] + 1, dtype=torch.float32, device=tokens.device)
    for q, k, v in model.heads(tokens):
        _, aux = attention(q, k, v, is_causal=True, return_aux=AuxRequest(entropy=True, score_variance=True))
        assert aux.entropy is not None and aux.score_variance is not None
        entropies += (aux.entropy[..., 1:] / counts.log()).mean((0, 2)).tolist()
        variances += aux.score_variance[..., 1:].mean((0, 2)).tolist()
    return entropies, variances


# --- SmolLM2 ----------------------------------------------------------------------------------------------------------


def of_smollm2(cell: Cell) -> dict[str, Any]:
    """The same sweep over all heads and over the layers of SmolLM2, and over one head of each layer.

    One head per layer, because each of the 270 heads costs as much as a layer. The seed chooses the heads and the text.
    """
    model, tokenizer = smollm2.loaded()
    config, generator = cell.config, torch.Generator().manual_seed(cell.seed)
    count, length = config["smollm2_pieces"], config["length"]
    pieces = smollm2.pieces(cell.corpus, tokenizer, count, length, generator, "validation")
    statistics = inspect(model, pieces[:, :-1], statistics=("entropy", "score_variance"))
    entropy, variance = statistics.mean("normalized_entropy"), statistics.mean("score_variance")
    shape = entropy.shape  # layers, heads
    places = [(n, (n + cell.seed) % shape[1]) for n in range(shape[0])]
    total = 1 + len(config["temperatures"]) + shape[0] * (len(config["layer_temperatures"]) + 2)
    known = [record["loss"] for record in cell.metrics()]  # losses that a stopped cell has computed already
    done = 0

    def loss_at(temperatures: Tensor, first: int) -> float:
        nonlocal done
        if done == len(known):
            if cell.stopping():
                raise Stopped
            known.append(tempered.loss_at(temperatures, first))
            cell.log({"step": done, "loss": known[done]})
        done += 1
        cell.advance(done, total)
        return known[done - 1]

    hf.retrofit(model, learn="temperature", freeze=True)
    try:
        tempered = TemperedLlama(model, pieces)
        return sweep(loss_at, shape, places, config) | {
            "heads": [head for _, head in places],
            "entropy": [entropy[place].item() for place in places],
            "score_variance": [variance[place].item() for place in places],
        }
    finally:
        hf.unretrofit(model)


class TemperedLlama:
    """The loss of a retrofitted Llama on pieces of text, [B, T + 1], at other temperatures."""

    def __init__(self, model: Any, pieces: Tensor) -> None:
        self.model, self.targets = model, pieces[:, 1:]
        with torch.no_grad():
            seen = model(input_ids=pieces[:, :-1], use_cache=False, output_hidden_states=True).hidden_states
        self.inputs = seen[:-1]  # the input of each layer at τ = 1; the last hidden state is the output

    def loss_at(self, temperatures: Tensor, first: int = 0) -> float:
        """The loss with these temperatures, [layers, H]. Those of the layers before `first` must be 1: the outputs of
        these layers are known and are not computed again."""
        layers = self.model.model.layers
        with torch.no_grad():
            for layer, tau in zip(layers, temperatures, strict=True):
                layer.self_attn.retrofit.log_temperature.copy_(tau.log())
            self.model.model.layers = layers[first:]
            try:
                logits = self.model(inputs_embeds=self.inputs[first], use_cache=False).logits
            finally:
                self.model.model.layers = layers
        return smollm2.loss_of(logits, self.targets).item()


# --- conclusions ------------------------------------------------------------------------------------------------------


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's correlation, that of the ranks. Equal numbers share the mean of their ranks; NaN if all are equal."""
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
            judge_effect(
                "A trained model needs the temperature it was trained with",
                "ours",
                f"{name}: loss at τ = {tau:g} in all heads minus loss at τ = 1, nats",
                interval([o.result["all"][taus.index(tau)] - o.result["base"] for o in each]),
                (0.0, math.inf),
            )
            for tau in COMPARED
        ]
        results = [o.result for o in each]
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
            judge_effect(
                "Temperature reveals which heads rely on specific tokens: the peaked ones suffer when softened",
                SOURCE,
                f"{name}: rank correlation over heads of entropy with (loss when softened − loss when sharpened)",
                interval(committed),
                (-1.0, 0.0),
            ),
            judge_effect(
                "Heads whose score variance is large are those that a temperature moves",
                "ours: score variance is dH/d ln τ",
                f"{name}: rank correlation over heads of score variance with the larger of the two losses",
                interval(sensitive),
                (0.0, 1.0),
            ),
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
    return Conclusion(verdicts, tables, figures)


EXPERIMENT = Experiment(
    name="sharpness",
    question="Do trained heads commit, or hedge?",
    source=SOURCE,
    about="The temperature of a trained model is moved at inference, in all heads, in one layer, in one head (of "
    "SmolLM2: in one head of each layer, another one for each seed), and the loss on held-out text is measured: x nats "
    "above another are a perplexity exp(x) times as high. SmolLM2 may have met Python's source before.",
    quick={
        "seeds": 2, "steps": 60, "every": 30, "warmup": 5, "rate": 3e-3, "batch": 8, "length": 32, "layers": 2,
        "heads": 2, "width": 32, "evaluate": 16, "models": ["own"], "smollm2_pieces": 1,
        "temperatures": [0.5, 1.0, 2.0], "layer_temperatures": [0.5, 2.0],
    },
    full={
        "seeds": 3, "steps": 1500, "every": 150, "warmup": 50, "rate": 2e-3, "batch": 16, "length": 128, "layers": 3,
        "heads": 4, "width": 64, "evaluate": 64, "models": ["own", "SmolLM2"], "smollm2_pieces": 3,
        "temperatures": [0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0],
        "layer_temperatures": [0.5, 0.7, 1.4, 2.0],
    },
    settings=settings,
    measure=measure,
    conclude=conclude,
)  # fmt: skip
