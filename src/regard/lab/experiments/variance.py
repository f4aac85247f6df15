"""Whether the advantage's baseline reduces the variance of the gradient, on the gradients of a model in training.

Attention's backward pass is the exact policy gradient dL/ds_j = p_j (u_j − E_p[u]) / τ. Its estimate from one key J
drawn from p (REINFORCE) is (u_J − b)(e_J − p) / τ, unbiased for every b. The variance of the estimate is computed
exactly, as a sum over all keys: with b = E_p[u], as in the backward pass, and with b = 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import geometry
from ...nn import Transformer
from ...operator import attention
from ..experiment import Cell, Conclusion, Config, Experiment, Figure, LabError, Outcomes, Series, Table
from ..judging import decide, interval, judge_effect
from ..training import text_model, train_on_text

SOURCE = "001, the abstract"


def settings(config: Config) -> list[str]:
    return ["softmax"]


class Listener:
    """Attention that stores its inputs, its output and the gradient of the output while `listening` is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.listening = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out = attention(q, k, v, is_causal=is_causal)
        if self.listening:
            out.retain_grad()
            self.calls.append((q, k, v, out))
        return out


def rows_of(model: Transformer, listener: Listener, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The scores (−inf in the future) and utilities ⟨dL/do, v⟩ of each layer, [B, H, T, T], for the mean loss."""
    listener.calls, listener.listening = [], True
    with torch.enable_grad():
        model.loss(tokens).backward()
    listener.listening = False
    model.zero_grad()
    found = []
    for q, k, v, out in listener.calls:
        assert out.grad is not None
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).detach().double()
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        found.append((scores.masked_fill(future, -math.inf), (out.grad @ v.mT).detach().double()))
    listener.calls = []
    return found


def variances(scores: Tensor, utility: Tensor) -> tuple[Tensor, Tensor]:
    """The variance of one draw, summed over the components: with the baseline E_p[u], and without. Rows [..., T]."""
    p = scores.softmax(-1)
    # |e_J − p|² = 1 − 2 p_J + Σ p²
    norms = 1 - 2 * p + p.square().sum(-1, keepdim=True)
    baseline = (p * utility).sum(-1, keepdim=True)
    mean = (p * (utility - baseline)).square().sum(-1)  # |gradient|²
    return tuple((p * (utility - b).square() * norms).sum(-1) - mean for b in (baseline, 0.0))  # type: ignore[return-value]


def measure(cell: Cell) -> dict[str, Any]:
    listener = Listener()
    model = text_model(cell, attention=listener)
    layers = cell.config["layers"]

    def also(model: Transformer, tokens: Tensor) -> dict[str, float]:
        found: dict[str, float] = {}
        with_, without, worse, count = 0.0, 0.0, 0.0, 0
        for layer, (scores, utility) in enumerate(rows_of(model, listener, tokens)):
            a, b = (v[..., 1:] for v in variances(scores, utility))  # the first query has one key, so its variance is 0
            found[f"ratio_{layer}"] = (a.sum() / b.sum()).item()
            with_, without = with_ + a.sum().item(), without + b.sum().item()
            worse, count = worse + (a > b).sum().item(), count + a.numel()
        return found | {"ratio": with_ / without, "worse": worse / count}

    trained = train_on_text(cell, model, also)
    # A training that diverged has the records up to that step.
    curve = [record for record in trained.metrics if record.get("ratio") is not None]
    if not curve:
        raise LabError(f"{cell.setting}, seed {cell.seed}: the loss was not finite before anything was measured")
    return {
        "first": curve[0]["ratio"],
        "last": curve[-1]["ratio"],
        "mean": math.fsum(record["ratio"] for record in curve) / len(curve),
        "worse": curve[-1]["worse"],
        "layers": [curve[-1][f"ratio_{n}"] for n in range(layers)],
        "sampler_error": sampler_error(cell, model, listener) if trained.diverged_at is None else math.nan,
        "val": trained.last("val"),
        "diverged_at": trained.diverged_at,
    }


def sampler_error(cell: Cell, model: Transformer, listener: Listener) -> float:
    """The largest relative difference of the exact variance and a sampler's, on a few rows of the trained model."""
    tokens = cell.corpus.tokens[None, : cell.config["length"] + 1].to(cell.device)
    scores, utility = (
        t[0, 0, -8:].cpu() for t in rows_of(model, listener, tokens)[0]
    )  # on the CPU, like the generator
    generator = torch.Generator().manual_seed(cell.seed)
    sampled = [
        geometry.sampled_policy_gradient(
            scores, utility, samples=cell.config["draws"], baseline=b, generator=generator
        )[1]
        for b in (True, False)
    ]
    exact = variances(scores, utility)
    return max((s / e - 1).abs().max().item() for s, e in zip(sampled, exact, strict=True))


def conclude(outcomes: Outcomes) -> Conclusion:
    ratio = interval(outcomes.values("softmax", "mean"))
    worse = interval(outcomes.values("softmax", "worse"))
    verdicts = [
        judge_effect(
            "The gradient is a variance-reduced update rule",
            SOURCE,
            "variance with the baseline, relative to that without, over the training",
            ratio,
            (0.0, 1.0),
            null=1.0,
        ),
        decide(
            "The baseline always reduces the variance",
            "often said of baselines",
            f"rows where it raises the variance, at the end: {worse.scaled(100).words(' %')}",
            all(w == 0 for w in outcomes.values("softmax", "worse")),
            "Known not to be a law: p = (.9, .1), u = (1, 0) has variance .0018 without and .115 with it.",
        ),
    ]
    each = outcomes.each("softmax")
    errors = [e for e in outcomes.values("softmax", "sampler_error") if math.isfinite(e)]
    layers = range(len(each[0].result["layers"]))
    rows = [[f"layer {n}", interval([o.result["layers"][n] for o in each]).brief()] for n in layers]
    rows += [
        ["all, first step", interval(outcomes.values("softmax", "first")).brief()],
        ["all, last step", interval(outcomes.values("softmax", "last")).brief()],
    ]
    tables = [
        Table("Variance with the baseline, relative to that without", ["", "ratio"], rows),
        Table(
            "The exact variance against a sampler's",
            ["largest relative difference", "draws"],
            [[f"{max(errors):.3f}" if errors else "every training diverged", str(outcomes.config["draws"])]],
        ),
    ]
    figures = [
        Figure(
            "Variance with the baseline / without",
            "step",
            "",
            [outcomes.curve("softmax", f"ratio_{n}", f"layer {n}") for n in layers],
            reference=1.0,
        ),
        Figure("Share of rows where the baseline raises it", "step", "", [outcomes.curve("softmax", "worse")]),
        Figure(
            "Mean over the training",
            "variance ratio",
            "",
            [Series("all layers", [], [ratio.mean], [ratio.low], [ratio.high])],
            kind="dots",
            reference=1.0,
        ),
    ]
    return Conclusion(verdicts, tables, figures)


EXPERIMENT = Experiment(
    name="variance",
    question="Does the advantage's baseline reduce the gradient's variance?",
    source=SOURCE,
    about="While a small character model is trained, the scores and the utilities of every row are taken from its real "
    "gradients, and the variance of one sampled key is computed exactly, with and without the baseline.",
    quick={
        "seeds": 2, "steps": 30, "every": 15, "warmup": 5, "rate": 3e-3, "batch": 8, "length": 24, "layers": 2,
        "heads": 2, "width": 32, "evaluate": 8, "draws": 20000,
    },
    full={
        "seeds": 3, "steps": 800, "every": 80, "warmup": 50, "rate": 2e-3, "batch": 16, "length": 64, "layers": 3,
        "heads": 4, "width": 64, "evaluate": 64, "draws": 100000,
    },
    settings=settings,
    measure=measure,
    conclude=conclude,
)  # fmt: skip
