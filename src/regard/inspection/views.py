"""Close looks at one sequence, for the report: a window of the plan, the keys that single queries read most, and what
a change of temperature would do to them."""

from __future__ import annotations

import base64
import math
from typing import Any

import torch
from torch import Tensor

from ..backends import torch as definition
from ..form import lower
from ..plan import path, topk, weights_at
from ..problem import Bias, Transport

WINDOW, TOP, QUERIES, PATHS = 48, 8, 24, 8  # keys and queries; keys; queries; queries
TEMPERATURES = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0)


class Views:
    """Filled layer by layer from the first pass; `finish` adds the tokens' text."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.queries: list[int] = []
        self.sampled: list[int] = []  # for the paths
        self.windows: list[str] = []
        self.keys: list[Any] = []
        self.weights: list[Any] = []
        self.entropies: list[Any] = []
        self.scores: list[Any] = []

    def add(self, call: dict[str, Any], plan: dict[str, Any]) -> None:
        """The heads of a layer: `call` are the arguments of `attention`, `plan` those without the values."""
        Tq, Tk = call["query"].shape[2], call["key"].shape[2]
        size = min(WINDOW, Tq, Tk)
        self.queries = sorted({round(i * (Tq - 1) / (QUERIES - 1)) for i in range(QUERIES)})
        self.sampled = self.queries[:: math.ceil(len(self.queries) / PATHS)][::-1]
        chosen = torch.tensor(self.queries)
        window = weights_at(index=torch.arange(size, device=call["key"].device), **plan)[0, :, :size]
        for head in (255 * window.clamp(0, 1).sqrt()).round().byte().cpu():
            self.windows.append(base64.b64encode(bytes(head.flatten().tolist())).decode())
        weights, keys = (found[0][:, chosen].cpu() for found in topk(n=min(TOP, Tk), **plan))
        self.keys += keys.tolist()
        self.weights += [[[float(f"{w:.4g}") for w in row] for row in head] for head in weights.tolist()]
        along = _along(call, self.sampled)
        self.entropies += along[0]
        self.scores += along[1]

    def finish(self, tokens: list[str] | None) -> dict[str, Any]:
        if not self.windows:
            return {}
        size = math.isqrt(len(base64.b64decode(self.windows[0])))
        text = tokens or []
        shown = {j for head in self.keys for row in head for j in row} | set(self.queries)

        def name(j: int) -> str:
            return text[j] if j < len(text) else f"#{j}"

        return {
            "paths": {
                "temperature": list(TEMPERATURES),
                "entropy": self.entropies,
                "expected_score": self.scores,
                "rows": len(self.sampled),
            },
            "window": {"start": 0, "tokens": [name(j) for j in range(size)], "weights": self.windows},
            "top_keys": {
                "queries": self.queries,
                "keys": self.keys,
                "weights": self.weights,
                "tokens": {str(j): name(j) for j in sorted(shown)},
            },
        }


def _along(call: dict[str, Any], queries: list[int]) -> tuple[list[Any], list[Any]]:
    """Mean entropy and expected score of the first sequence's chosen queries at multiples of their temperature, each
    a list by head."""
    form = lower(**call)
    _, H, _, Tk = form.shape
    problem = call["problem"] or Transport()
    scores, priors = [], []
    for i in queries:
        row = form.cut(slice(0, 1), slice(0, H), slice(i, i + 1), slice(0, Tk))
        found, _ = definition.scores_of(row)
        allowed = row.admissible(1, Tk, found.device)
        prior = row.log_prior(1, Tk, found.dtype, found.device)
        scores.append(found if allowed is None else found.masked_fill(~allowed, -math.inf))
        priors.append(torch.zeros_like(found) if prior is None else prior.expand_as(found))
    stacked, prior = torch.cat(scores, 2)[0], torch.cat(priors, 2)[0]  # [H, n, Tk]
    own = form.temperature
    if isinstance(own, Tensor):  # per head or query: into the scores
        own = own.expand(*form.shape[:3], 1)[0][:, queries]
    bare = Transport(
        problem.regularizer, prior=Bias(prior) if bool((prior != 0).any()) else None, marginal=problem.marginal
    )
    found = path(stacked / own, torch.tensor(TEMPERATURES), bare)
    entropy, expected = found.entropy.mean(-1).mT, found.expected_score.mean(-1).mT  # [H, temperatures]
    return _listed(entropy), _listed(expected)


def _listed(table: Tensor) -> list[Any]:
    return [[float(f"{x:.5g}") if math.isfinite(x) else None for x in row] for row in table.tolist()]
