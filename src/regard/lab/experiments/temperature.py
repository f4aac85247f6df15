"""A learned temperature for every head: does it help, and which layers become sharp?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ... import hf
from ...nn import Temperature
from ...problem import Transport
from .. import smollm2
from ..experiment import Cell, Conclusion, Config, Experiment, Figure, Outcomes, Series, Table
from ..judging import Judged, interval, judge_effect
from ..training import Batch, Training, perplexity_change, plan_statistics, text_model, train, train_on_text

SOURCE = "003, “The Temperature Knob”"
UNTOUCHED, TEMPERATURES, GAINS = (f"{smollm2.NAME}, {how}" for how in ("untouched", "temperatures", "gains"))


def settings(config: Config) -> list[str]:
    of = {smollm2.OWN: ["fixed", "learned"], smollm2.NAME: [UNTOUCHED, TEMPERATURES, GAINS]}
    return [setting for model in smollm2.models(config) for setting in of[model]]


def measure(cell: Cell) -> dict[str, Any]:
    return retrofitted(cell) if cell.setting.startswith(smollm2.NAME) else own(cell)


# --- a small model of our own -----------------------------------------------------------------------------------------


class Learned(nn.Module):
    """Softmax with a learned temperature for each head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.temperature = Temperature(heads)

    def forward(self) -> Transport:
        return Transport(temperature=self.temperature())


def own(cell: Cell) -> dict[str, Any]:
    heads = cell.config["heads"]
    learned = cell.setting == "learned"
    model = text_model(cell, problem=(lambda layer: Learned(heads)) if learned else None)
    trained = train_on_text(cell, model)
    taus = [[1.0] * heads if p is None else p.temperature.flatten().tolist() for p in model.problems()]  # type: ignore[union-attr]
    pieces = cell.corpus.batch(8, cell.config["length"], torch.Generator().manual_seed(1), "validation")
    entropy = plan_statistics(model, pieces[:, :-1], "entropy")["entropy"]
    return {
        "val": trained.last("val"),
        "temperatures": taus,
        "entropy": entropy.mean(1).tolist(),
        "seconds": trained.seconds,
    }


# --- SmolLM2 ----------------------------------------------------------------------------------------------------------


class Gain(nn.Module):
    """A factor for each head's output: like a temperature it is one positive number per head, 1 at the start."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.log_gain = nn.Parameter(torch.zeros(heads))

    def forward(self, projection: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        """A hook before the output projection, whose input has the heads side by side, [B, T, H * D]."""
        heads = args[0].unflatten(-1, (self.log_gain.shape[0], -1))
        return ((heads * self.log_gain.exp()[:, None]).flatten(-2),)


class Frozen(nn.Module):
    """A model of which only the added parameters are trained. Checkpoints hold only these, as all others are fixed."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return smollm2.loss_of(self.model(input_ids=tokens, use_cache=False).logits, targets)

    def learned(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.learned().items()}

    def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> None:  # type: ignore[override]
        learned = self.learned()
        if learned.keys() != state_dict.keys():
            raise ValueError(f"state_dict: expected {', '.join(learned)}, got {', '.join(state_dict)}")
        with torch.no_grad():
            for name, parameter in learned.items():
                parameter.copy_(state_dict[name])


@contextmanager
def adaptable(model: Any, setting: str) -> Iterator[Frozen]:
    """Inside, the model has the parameters that the setting trains, and the others are frozen; then it is restored."""
    training, attentions = model.training, hf.attentions(model).values()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = []
    if setting == TEMPERATURES:
        hf.retrofit(model, learn="temperature", freeze=True)
    else:
        model.requires_grad_(False)
    if setting == GAINS:
        for attention in attentions:
            attention.gain = Gain(model.config.num_attention_heads)
            hooks.append(attention.o_proj.register_forward_pre_hook(attention.gain))  # type: ignore[union-attr]
    try:
        yield Frozen(model)
    finally:
        model.train(training)
        if setting == TEMPERATURES:
            hf.unretrofit(model)
        if setting == GAINS:
            for attention, hook in zip(attentions, hooks, strict=True):
                hook.remove()
                del attention.gain
        for parameter in trainable:
            parameter.requires_grad_(True)


def retrofitted(cell: Cell) -> dict[str, Any]:
    """SmolLM2 unchanged, or with one number per head trained on the cell's text. The seed draws the pieces of text, the
    same for all settings."""
    model, tokenizer = smollm2.loaded()
    config = {name.removeprefix("smollm2_"): v for name, v in cell.config.items() if name.startswith("smollm2_")}
    count, length, generator = config["pieces"], config["length"], torch.Generator().manual_seed(cell.seed)
    held_out = smollm2.pieces(cell.corpus, tokenizer, count, length, generator, "validation")

    def evaluate(adapted: Any) -> dict[str, float]:
        parts = held_out.split(config["batch"])
        losses = [adapted.loss(part[:, :-1], part[:, 1:]).item() * len(part) for part in parts]
        return {"val": math.fsum(losses) / len(held_out)}

    def draw(generator: torch.Generator) -> Batch:
        piece = smollm2.pieces(cell.corpus, tokenizer, config["batch"], length, generator)
        return piece[:, :-1], piece[:, 1:]

    with adaptable(model, cell.setting) as adapted:
        if cell.setting == UNTOUCHED:
            with torch.no_grad():
                return evaluate(adapted)
        subject: Any = adapted  # it has what `train` needs of a Transformer
        trained = train(cell, subject, Training.of(config), draw, evaluate)
        factors = [p.detach().exp().tolist() for p in adapted.learned().values()]
    name = "temperatures" if cell.setting == TEMPERATURES else "gains"
    return {"val": trained.last("val"), name: factors, "seconds": trained.seconds}


# --- conclusions ------------------------------------------------------------------------------------------------------


def layer_means(temperatures: list[list[float]]) -> list[float]:
    """The mean of log τ over the heads of each layer."""
    return [math.fsum(math.log(tau) for tau in layer) / len(layer) for layer in temperatures]


def slope(y: list[float]) -> float:
    """The slope, per layer, of a straight line through the layers."""
    x = [n - (len(y) - 1) / 2 for n in range(len(y))]
    return math.fsum(a * b for a, b in zip(x, y, strict=True)) / math.fsum(a * a for a in x)


def outer(layers: int) -> int:
    """How many layers on each side count as outer: a sixth, and at least one."""
    return max(1, layers // 6)


def curvature(y: list[float]) -> float:
    """The mean of the outer layers minus that of the inner ones: positive for a U."""
    n = outer(len(y))
    return math.fsum(y[:n] + y[-n:]) / (2 * n) - math.fsum(y[n:-n]) / (len(y) - 2 * n)


def patterns(each: list[list[float]], of: str = "") -> list[Judged]:
    """The verdicts on log τ over the layers, given by seed and layer; `of` names the model."""
    found = [
        judge_effect(
            "Lower layers learn higher temperatures, upper layers lower ones",
            SOURCE,
            f"{of}rise of log τ per layer",
            interval([slope(y) for y in each]),
            (-math.inf, 0.0),
        )
    ]
    if len(each[0]) > 2:
        n = outer(len(each[0]))
        which = "the outer layers" if n == 1 else f"the outer layers ({n} on each side)"
        found.append(
            judge_effect(
                "Temperatures follow a U over the layers",
                "modded-nanogpt's learned temperatures",
                f"{of}log τ of {which} minus that of the inner ones",
                interval([curvature(y) for y in each]),
                (0.0, math.inf),
            )
        )
    return found


def root_mean_square(layers: list[list[float]]) -> float:
    """The root mean square of the logarithms."""
    logs = [math.log(x) for layer in layers for x in layer]
    return math.sqrt(math.fsum(x * x for x in logs) / len(logs))


def over_layers(title: str, each: list[list[float]]) -> Figure:
    """The geometric mean over the heads of each layer, with its spread over the seeds."""
    taus = [[math.exp(y[n]) for y in each] for n in range(len(each[0]))]
    line = Series(
        "mean over heads and seeds",
        [float(n) for n in range(len(taus))],
        [interval(t).mean for t in taus],
        [min(t) for t in taus],
        [max(t) for t in taus],
    )
    return Figure(title, "layer", "τ", [line], reference=1.0)


def conclude(outcomes: Outcomes) -> Conclusion:
    parts = [
        part(outcomes)
        for setting, part in (("learned", of_own), (TEMPERATURES, of_smollm2))
        if setting in outcomes.settings
    ]
    return Conclusion(
        *([x for part in parts for x in getattr(part, name)] for name in ("verdicts", "tables", "figures"))
    )


def of_own(outcomes: Outcomes) -> Conclusion:
    gain = perplexity_change(outcomes.values("fixed", "val"), outcomes.values("learned", "val"))
    each = [layer_means(o.result["temperatures"]) for o in outcomes.each("learned")]
    spread = [root_mean_square(o.result["temperatures"]) for o in outcomes.each("learned")]
    verdicts = [
        judge_effect(
            "Learned per-head temperatures improve performance by 1-3 %",
            SOURCE,
            "perplexity of fixed temperatures above that of learned ones",
            gain,
            (0.01, 0.03),
            percent=True,
        ),
        *patterns(each),
    ]
    rows = [
        [
            f"layer {n}",
            interval([math.exp(y[n]) for y in each]).brief(),
            *(interval([o.result["entropy"][n] for o in outcomes.each(s)]).brief() for s in ("fixed", "learned")),
        ]
        for n in range(len(each[0]))
    ]
    table = Table(
        f"After training (heads' log τ differ from 0 by {interval(spread).brief()} in the root mean square)",
        ["", "τ (geometric mean over heads)", "entropy, fixed (nats)", "entropy, learned (nats)"],
        rows,
    )
    curves = [outcomes.curve(s, "val") for s in ("fixed", "learned")]
    figures = [
        over_layers("Learned temperature by layer", each),
        Figure("Validation loss", "step", "nats", curves),
    ]
    return Conclusion(verdicts, [table], figures)


def of_smollm2(outcomes: Outcomes) -> Conclusion:
    untouched, learned, gains = (outcomes.values(s, "val") for s in (UNTOUCHED, TEMPERATURES, GAINS))
    each = [layer_means(o.result["temperatures"]) for o in outcomes.each(TEMPERATURES)]
    verdicts = [
        judge_effect(
            "Learned per-head temperatures improve performance by 1-3 %",
            SOURCE,
            f"{smollm2.NAME}: perplexity untouched above that with temperatures fine-tuned",
            perplexity_change(untouched, learned),
            (0.01, 0.03),
            percent=True,
            note="The claim is about reasoning tasks; this is the prediction of the next token.",
        ),
        judge_effect(
            "What helps is the temperature, not that some numbers per head were fitted to the text",
            "ours",
            f"{smollm2.NAME}: perplexity with as many gains fine-tuned above that with temperatures",
            perplexity_change(gains, learned),
            (0.0, math.inf),
            percent=True,
        ),
        *patterns(each, f"{smollm2.NAME}: "),
    ]
    rows = [[UNTOUCHED, interval([math.exp(x) for x in untouched]).brief(2), "", ""]]
    for setting, losses, name in ((TEMPERATURES, learned, "temperatures"), (GAINS, gains, "gains")):
        above = perplexity_change(untouched, losses).scaled(100)
        moved = interval([root_mean_square(o.result[name]) for o in outcomes.each(setting)])
        rows.append([setting, interval([math.exp(x) for x in losses]).brief(2), above.brief(2), moved.brief()])
    table = Table(
        f"{smollm2.NAME}, perplexity per token of text that was not trained on",
        ["", "perplexity", "untouched above it, %", "logarithms differ from 0, root mean square"],
        rows,
    )
    curves = [outcomes.curve(s, "val") for s in (TEMPERATURES, GAINS)]
    figures = [
        over_layers(f"{smollm2.NAME}: learned temperature by layer", each),
        Figure(f"{smollm2.NAME}: validation loss", "step", "nats per token", curves),
    ]
    return Conclusion(verdicts, [table], figures)


EXPERIMENT = Experiment(
    name="temperature",
    question="What do heads make of a temperature of their own?",
    source=SOURCE,
    about="Small character models with τ = 1 and with a τ learned for every head, from the same weights and on the "
    "same batches. The temperatures do not decay. SmolLM2 gets a τ for every head, and nothing else of it is trained; "
    "beside it stand the untouched model and one with as many numbers elsewhere, a gain for every head's output, "
    "trained in the same way. Seeds draw the pieces that are read; the model is one and the same, and may have met "
    "Python's source before.",
    quick={
        "seeds": 2, "steps": 30, "every": 15, "warmup": 5, "rate": 3e-3, "batch": 8, "length": 32, "layers": 3,
        "heads": 2, "width": 32, "evaluate": 16, "models": ["own"], "smollm2_steps": 4, "smollm2_every": 2,
        "smollm2_warmup": 1, "smollm2_rate": 1e-2, "smollm2_batch": 2, "smollm2_length": 32, "smollm2_pieces": 4,
    },
    full={
        "seeds": 4, "steps": 1000, "every": 100, "warmup": 50, "rate": 2e-3, "batch": 16, "length": 64, "layers": 4,
        "heads": 4, "width": 64, "evaluate": 256, "models": ["own", "SmolLM2"], "smollm2_steps": 24,
        "smollm2_every": 12, "smollm2_warmup": 2, "smollm2_rate": 2e-2, "smollm2_batch": 4, "smollm2_length": 128,
        "smollm2_pieces": 16,
    },
    settings=settings,
    measure=measure,
    conclude=conclude,
)  # fmt: skip
