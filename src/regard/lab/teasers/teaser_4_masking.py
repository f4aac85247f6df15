"""Brain teaser 4: a causal mask without softmax."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import regard
from regard import KL, Causal, FermiDirac, Transport, Tsallis

from ..numbers import distance, draw, show, tensor, tick
from ..variants import by_sum
from .teaser import FAMILY, INF, Exhibit, Teaser, exact


def only_masking() -> Teaser:
    past, below = tensor(2.8, 1.2), tensor(-1, -2)
    to_zero, to_infinity = tensor(0, 0), tensor(-INF, -INF)

    def row(name: str, rule: Callable[[Tensor], Tensor], masked: Tensor) -> tuple[str, ...]:
        return (name, *(show(rule(torch.cat([s, masked])), 2) for s in (past, below)))

    def optimum(regularizer, tau: float = 3.0) -> Callable[[Tensor], Tensor]:
        return lambda s: regard.solve(s, Transport(regularizer, temperature=tau)).weights

    attempts = Exhibit(
        "Two past keys and two future ones, masked",
        ("rule", "past scores 2.8, 1.2", "past scores −1, −2"),
        [
            row("s/Σs, mask −∞", by_sum, to_infinity),
            row("s/Σs, mask 0", by_sum, to_zero),
            row("softmax, mask 0", lambda s: regard.solve(s).weights, to_zero),
            row("softmax, mask −∞", lambda s: regard.solve(s).weights, to_infinity),
            row("1.5-entmax at τ = 3, mask −∞", optimum(Tsallis(1.5)), to_infinity),
            row("sparsemax at τ = 3, mask −∞", optimum(Tsallis(2.0)), to_infinity),
        ],
    )
    q, k, v = (draw(1, 1, 6, 4, seed=i) for i in (1, 2, 3))
    k2, v2 = k.clone(), v.clone()
    k2[:, :, 5], v2[:, :, 5] = 1.0, -1.0

    def leak(problem: Transport) -> str:
        before, after = (regard.attention(q, x, y, problem=problem)[:, :, :5] for x, y in ((k, v), (k2, v2)))
        return exact(distance(after, before))

    leaks = Exhibit(
        "The prior's zeros: how far another last token moves the earlier outputs",
        ("regulariser", "no prior", "prior=Causal()"),
        [
            (name, leak(Transport(r)), leak(Transport(r, prior=Causal())))
            for name, r in (("softmax", KL()), ("1.5-entmax", Tsallis(1.5)), ("sparsemax", Tsallis(2.0)))
        ],
    )
    masked = torch.cat([past, to_infinity])
    softmax_leak = float(regard.solve(torch.cat([below, to_zero])).weights[2:].sum())
    zero = all(
        bool((regard.solve(masked, Transport(r)).weights[2:] == 0).all())
        for r in FAMILY.values()
        if not isinstance(r, FermiDirac)
    )
    return Teaser(
        4,
        "What if we only use masking without softmax?",
        "s/Σs has no prior, so there is no place for a mask; without the zeros of a prior the future leaks.",
        [attempts, leaks],
        [
            (
                "A mask is a prior of 0, and p = π·g((s − λ)/τ) is 0 there for every regulariser, with or without an "
                f"exponential {tick(zero)}."
            ),
            (
                f"Masked to 0, s/Σs keeps the future out, but past scores of −1, −2 give weights "
                f"{show(by_sum(below), 2)}: the sum, its temperature, is {show([float(below.sum())], 0)}, and the "
                f"order is reversed (the document prints −0.33, −0.67). Softmax with a mask of 0 leaks "
                f"{softmax_leak:.0%} of such a row: 0 is a score like any other."
            ),
        ],
    )
