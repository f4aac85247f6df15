"""The effect of the scale 1/√d, which depends on the initialisation of queries and keys and on the size of a head."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from ... import geometry
from ...nn import Transformer
from ...nn.transformer import Attention
from ...operator import attention
from ...problem import Transport
from ...statistics import AuxRequest
from ..experiment import Cell, Conclusion, Config, Experiment, Figure, Outcomes, Series, Table
from ..judging import MEASURED, Interval, interval, judge_effect, ratios, verdict, withhold
from ..training import perplexity_change, text_model, train_on_text

SOURCE = "003, brain teaser #2"
INITS = {"0.02": 0.02, "pytorch": "pytorch", "unit": "unit"}
RESCUES = ("natural gradient", "QK-norm")


def name_of(init: str, size: int, how: str) -> str:
    return f"init {init}, d {size}, {how}"


def settings(config: Config) -> list[str]:
    found = [name_of(i, d, how) for i in INITS for d in config["sizes"] for how in ("scaled", "unscaled")]
    return found + [name_of("unit", max(config["sizes"]), how) for how in RESCUES]


def measure(cell: Cell) -> dict[str, Any]:
    init, size, how = (part.split(" ", 1)[1] if n < 2 else part for n, part in enumerate(cell.setting.split(", ")))
    D = int(size)
    changes: dict[str, Any] = {"init": INITS[init], "heads": cell.config["width"] // D}
    unscaled = Transport(temperature=1 / math.sqrt(D))  # together with the usual scale this is softmax(qk)
    if how == "natural gradient":
        changes["attention"] = natural(cell.config["damping"])
    elif how != "scaled":
        changes |= {"problem": unscaled, "qk_norm": how == "QK-norm"}
    model = text_model(cell, **changes)
    problem = unscaled if how != "scaled" else None

    def also(model: Transformer, tokens: Tensor) -> dict[str, float]:
        return saturation(model, tokens, problem)

    trained = train_on_text(cell, model, also)
    return {
        "val": trained.last("val"),
        "curve": [[r["step"], r["val"]] for r in trained.metrics if r.get("val") is not None],
        **{name: trained.metrics[0][name] for name in ("entropy", "saturated", "spread")},
        "entropy_after": trained.last("entropy"),
        "seconds": trained.seconds,
    }


def natural(damping: float) -> Attention:
    """softmax(qk) whose scores get the damped natural gradient, times the damping.

    With e = damping, the weight of a key in the gradient is w e/(w + e): about w if w is small, and never above e. In a
    saturated row the keys with almost no weight then count as much as the others.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        q, k = (
            damping * t + (t - damping * t).detach() for t in (q, k)
        )  # equals t, and scales its gradient by the damping
        return geometry.natural_attention(q, k, v, damping=damping, is_causal=is_causal, scale=1.0)

    return attend


def saturation(model: Transformer, tokens: Tensor, problem: Transport | None) -> dict[str, float]:
    """Over all heads: mean entropy / log n, the share of rows with a weight above 0.9, and the spread of the scores."""
    entropies, saturated, spreads = [], [], []
    counts = torch.arange(1, tokens.shape[1] + 1, dtype=torch.float32, device=tokens.device)
    for q, k, v in model.heads(tokens):
        request = AuxRequest(entropy=True, max_weight=True)
        _, aux = attention(q, k, v, is_causal=True, problem=problem, return_aux=request)
        assert aux.entropy is not None and aux.max_weight is not None
        entropies.append((aux.entropy[..., 1:] / counts[1:].log()).mean())
        saturated.append((aux.max_weight[..., 1:] > 0.9).float().mean())
        temperature = 1.0 if problem is None else problem.temperature
        assert isinstance(temperature, float)
        spreads.append((q @ k.mT / math.sqrt(q.shape[-1]) / temperature).std())
    names = ("entropy", "saturated", "spread")
    return {n: torch.stack(v).mean().item() for n, v in zip(names, (entropies, saturated, spreads), strict=True)}


def steps_to(curve: list[list[float]], loss: float) -> float:
    """The step at which a loss was reached, interpolated between two measurements; inf if it was not reached.

    At least 1, so that a loss that was reached from the beginning does not cause a division by 0.
    """
    for (a, high), (b, low) in itertools.pairwise(curve):
        if low <= loss:
            return max(1.0, a + (b - a) * max(0.0, high - loss) / max(1e-12, high - low))
    return math.inf


def slowdown(outcomes: Outcomes, slow: str, fast: str) -> Interval:
    """How many times as many steps `slow` needs for the loss that both reach (the worse of the two final losses).

    A run that diverged (val is null) does not reach it.
    """
    steps: tuple[list[float], list[float]] = ([], [])
    for pair in zip(outcomes.each(slow), outcomes.each(fast), strict=True):
        ends = [o.result["val"] for o in pair]
        reached = max((end for end in ends if end is not None), default=math.nan)
        for found, outcome, end in zip(steps, pair, ends, strict=True):
            found.append(math.inf if end is None else steps_to(outcome.result["curve"], reached))
    return ratios(*steps)


def closed(broken: float, rescued: float, scaled: float) -> float:
    """The share of the gap between two losses that a third one closes; NaN if there is no gap."""
    if not broken > scaled:
        return math.nan
    if broken == math.inf:  # the limit
        return 0.0 if rescued == math.inf else 1.0
    return (broken - rescued) / (broken - scaled)


def conclude(outcomes: Outcomes) -> Conclusion:
    sizes, large = outcomes.config["sizes"], max(outcomes.config["sizes"])
    verdicts, rows, dots = [], [], []
    for init in INITS:
        for size in sizes:
            scaled, unscaled = (name_of(init, size, how) for how in ("scaled", "unscaled"))
            worse = perplexity_change(outcomes.values(unscaled, "val"), outcomes.values(scaled, "val"))
            slower = slowdown(outcomes, unscaled, scaled)
            dots.append(Series(f"init {init}, d {size}", [], *([100 * x] for x in (worse.mean, worse.low, worse.high))))
            rows.append(
                [
                    f"init {init}, d {size}",
                    *(interval(outcomes.values(unscaled, n)).brief(2) for n in ("spread", "entropy", "saturated")),
                    worse.scaled(100).brief(1),
                    slower.brief(2),
                ]
            )
            if size != large:
                continue
            where = f"init {init}, d {size}"
            verdicts += [
                judge_effect(
                    "Unscaled, training is 3-5x slower",
                    SOURCE,
                    f"{where}: times as many steps to equal loss",
                    slower,
                    (3.0, 5.0),
                    null=1.0,
                ),
                judge_effect(
                    "Unscaled, perplexity is 10-20 % worse",
                    SOURCE,
                    f"{where}: perplexity above the scaled model's",
                    worse,
                    (0.10, 0.20),
                    percent=True,
                ),
            ]
    broken, scaled = (outcomes.values(name_of("unit", large, how), "val") for how in ("unscaled", "scaled"))
    breaks = verdict(perplexity_change(broken, scaled), (0.0, math.inf)) == MEASURED
    for how in RESCUES:
        rescued = outcomes.values(name_of("unit", large, how), "val")
        judged = judge_effect(
            f"{how[0].upper()}{how[1:]} rescues an unscaled model: at least half of what it lost",
            "001 (information geometry)" if how == "natural gradient" else "common practice",
            f"init unit, d {large}: share of the loss between unscaled and scaled that is won back",
            interval([closed(*losses) for losses in zip(broken, rescued, scaled, strict=True)]),
            (0.5, math.inf),
            null=0.5,
            percent=True,
        )
        if not breaks:
            judged = withhold(judged, "The unscaled model is not worse beyond doubt: there is nothing to rescue.")
        verdicts.append(judged)
    table = Table(
        "Without 1/√d: at the first step, and what it cost in the end",
        [
            "",
            "spread of scores",
            "entropy / log n",
            "rows above 0.9",
            "perplexity, % worse",
            "steps to equal loss, times",
        ],
        rows,
    )
    shown = [name_of("unit", large, how) for how in ("scaled", "unscaled", *RESCUES)]
    figures = [
        Figure(f"Init unit, d {large}: validation loss", "step", "nats", [outcomes.curve(s, "val") for s in shown]),
        Figure("Perplexity without 1/√d", "% above the scaled model's", "", dots, kind="dots", reference=0.0),
        Figure(f"Init unit, d {large}: entropy / log n", "step", "", [outcomes.curve(s, "entropy") for s in shown[:3]]),
        Figure("Gradient norm before clipping", "step", "", [outcomes.curve(s, "gradient") for s in shown], log_y=True),
    ]
    return Conclusion(verdicts, [table], figures)


EXPERIMENT = Experiment(
    name="scaling",
    question="What breaks without 1/√d?",
    source=SOURCE,
    about="Small character models with and without the scale, over three initialisations and two head sizes; the worst "
    "case also with two remedies that leave the scale out: the natural gradient and normalised queries and keys.",
    quick={
        "seeds": 1, "steps": 20, "every": 10, "warmup": 5, "rate": 3e-3, "batch": 8, "length": 32, "layers": 2,
        "width": 32, "sizes": [8, 32], "evaluate": 16, "damping": 1e-3,
    },
    full={
        "seeds": 3, "steps": 600, "every": 50, "warmup": 50, "rate": 2e-3, "batch": 16, "length": 64, "layers": 2,
        "width": 64, "sizes": [16, 64], "evaluate": 128, "damping": 1e-3,
    },
    settings=settings,
    measure=measure,
    conclude=conclude,
)  # fmt: skip
