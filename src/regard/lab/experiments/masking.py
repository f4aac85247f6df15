"""Training without a mask of −∞: the loss falls, because the future leaks, and the model cannot write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...nn import Transformer
from ..experiment import Cell, Conclusion, Config, Experiment, Figure, Outcomes, Series, Table
from ..judging import decide, differences, interval, judge_effect
from ..training import text_model, train_on_text, validation
from ..variants import mask_to_zero, no_mask

SOURCE = "003, “Causal Masking” and brain teaser #4"
ATTENTIONS = {"minus infinity": None, "mask to zero": mask_to_zero, "no mask": no_mask}


def settings(config: Config) -> list[str]:
    return list(ATTENTIONS)


def measure(cell: Cell) -> dict[str, Any]:
    model = text_model(cell, attention=ATTENTIONS[cell.setting])
    trained = train_on_text(cell, model)
    model.eval()
    pieces = validation(cell.corpus, cell.config["prefixes"], cell.config["length"]).to(cell.device)
    apparent, honest = losses(model, pieces)
    return {"apparent": apparent, "honest": honest, "leak": leak(model, pieces), "seconds": trained.seconds}


@torch.no_grad()
def losses(model: Transformer, pieces: Tensor) -> tuple[float, float]:
    """The loss of the same predictions with the rest of the text as input, and with no input after them.

    The second is the loss when the model writes: then the future does not exist yet.
    """
    tokens, targets = pieces[:, :-1], pieces[:, 1:]
    T = tokens.shape[1]
    positions = torch.arange(T // 2, T - 1, max(1, T // 16))  # not the last, which has no future
    inside = model(tokens)[:, positions]
    alone = torch.stack([model(tokens[:, : i + 1])[:, -1] for i in positions.tolist()], 1)
    wanted = targets[:, positions]
    apparent, honest = (-x.log_softmax(-1).gather(-1, wanted[..., None]).mean().item() for x in (inside, alone))
    return apparent, honest


@torch.no_grad()
def leak(model: Transformer, pieces: Tensor) -> float:
    """The mean change (total variation) of the predictions in the first half when the second half is another text."""
    tokens = pieces[:, :-1]
    half = tokens.shape[1] // 2
    other = torch.cat([tokens[:, :half], tokens.roll(1, 0)[:, half:]], 1)
    change = model(tokens)[:, :half].softmax(-1) - model(other)[:, :half].softmax(-1)
    return change.abs().sum(-1).mean().item() / 2


def conclude(outcomes: Outcomes) -> Conclusion:
    gaps = {s: differences(outcomes.values(s, "honest"), outcomes.values(s, "apparent")) for s in ATTENTIONS}
    worse = {
        s: differences(outcomes.values(s, "honest"), outcomes.values("minus infinity", "honest")) for s in ATTENTIONS
    }
    largest = max(outcomes.values("minus infinity", "leak"))
    verdicts = [
        judge_effect(
            "No masking → information leakage from future tokens",
            SOURCE,
            "loss when writing minus loss in training, nats per character",
            gaps["no mask"],
            (0.01, float("inf")),
        ),
        judge_effect(
            "Scores of the future set to 0 instead of −∞ let it through",
            SOURCE,
            "loss when writing minus loss in training, nats per character",
            gaps["mask to zero"],
            (0.01, float("inf")),
            note="exp(0) = 1: each future key has the weight of a key of score 0. All get the same one, so what leaks "
            "is a mean over the future, not a chosen token.",
        ),
        decide(
            "−∞ masking is clean: the future receives exactly zero weight",
            SOURCE,
            f"largest change of any prediction when the future is another text: {largest:g}",
            largest == 0,
        ),
    ]
    names = ("apparent", "honest", "leak")
    rows = [[s, *(interval(outcomes.values(s, name)).brief() for name in names)] for s in ATTENTIONS]
    table = Table(
        "Nats per character, and how far a prediction moves when the future is another text",
        ["the future is masked by", "loss in training", "loss when writing", "leak (total variation)"],
        rows,
    )
    figures = [
        Figure("Validation loss while training", "step", "nats", [outcomes.curve(s, "val") for s in ATTENTIONS]),
        Figure(
            "Loss when writing, above that of a causal model",
            "nats per character",
            "",
            [Series(s, [], [w.mean], [w.low], [w.high]) for s, w in worse.items() if s != "minus infinity"],
            kind="dots",
            reference=0.0,
        ),
    ]
    return Conclusion(verdicts, [table], figures)


EXPERIMENT = Experiment(
    name="masking",
    question="What leaks when the future is not masked, or masked by 0 instead of −∞?",
    source=SOURCE,
    about="A small character model is trained with three ways to mask. Its loss is measured twice on the same "
    "predictions: inside a text, as in training, and with nothing after the prediction, as in writing.",
    quick={
        "seeds": 1, "steps": 60, "every": 30, "warmup": 10, "rate": 3e-3, "batch": 8, "length": 32, "layers": 2,
        "heads": 2, "width": 32, "evaluate": 16, "prefixes": 16,
    },
    full={
        "seeds": 3, "steps": 800, "every": 100, "warmup": 50, "rate": 2e-3, "batch": 16, "length": 64, "layers": 2,
        "heads": 4, "width": 64, "evaluate": 128, "prefixes": 128,
    },
    settings=settings,
    measure=measure,
    conclude=conclude,
)  # fmt: skip
