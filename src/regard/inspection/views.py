"""Close looks at one sequence, for the report: a window of the plan, the keys that single queries read most, and what
a change of temperature would do to them."""

from __future__ import annotations

import base64
import math
from typing import Any

import torch
from torch import Tensor

from ..backends import reference
from ..form import Form
from ..lowering import lower
from ..plan import path, solved_rows
from ..priors import Bias
from ..problem import Budget, RowsAndColumns, Transport
from .result import _numbers

WINDOW, TOP, QUERIES, PATHS = 48, 8, 24, 8  # keys and queries; keys; queries; queries
TEMPERATURES = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0)


class Views:
    """Filled layer by layer from the first pass; `finish` adds the tokens' text.

    They are for models whose layers all read one sequence: where lengths differ (an encoder and a decoder), where a
    layer is called twice or where there is padding, there are none.
    """

    def __init__(self) -> None:
        self.length: int | None = None
        self.refused = False
        self.queries: list[int] = []
        self.sampled: list[int] = []  # for the paths
        self.layers: dict[str, dict[str, list[Any]]] = {}  # lists by head

    def refuse(self) -> None:
        self.refused = True

    def add(self, name: str, call: dict[str, Any], plan: dict[str, Any]) -> None:
        """The heads of a layer: `call` are the arguments of `attention`, `plan` those without the values."""
        Tq, Tk = call["query"].shape[2], call["key"].shape[2]
        self.length = self.length or Tq
        if self.refused or name in self.layers or Tq != Tk or Tq != self.length:
            return self.refuse()
        size = min(WINDOW, Tq)
        self.queries = sorted({round(i * (Tq - 1) / (QUERIES - 1)) for i in range(QUERIES)})
        self.sampled = self.queries[:: -math.ceil(len(self.queries) / PATHS)]  # from the last one
        form, shipped = solved_rows(**plan)
        window = _rows(form, shipped, slice(0, size), size)[1][..., :size]
        roots = (255 * window.clamp(0, 1).sqrt()).round().byte().cpu()
        windows = [base64.b64encode(bytes(head.flatten().tolist())).decode() for head in roots]
        found = []
        for i in self.queries:  # alone: topk of the whole plan would be a pass over all of it
            start, row = _rows(form, shipped, slice(i, i + 1), min(TOP, Tk))
            best, index = row[:, 0].topk(min(TOP, Tk))
            found.append((best.cpu(), index.cpu() + start))
        weights, keys = (torch.stack(part, 1) for part in zip(*found, strict=True))  # [H, queries, n]
        shares = [[[float(f"{w:.4g}") for w in row] for row in head] for head in weights.tolist()]
        self.layers[name] = {"windows": windows, "keys": keys.tolist(), "weights": shares}
        along = _along(call, self.sampled)
        if along is not None:
            self.layers[name] |= {"entropy": along[0], "expected_score": along[1]}
        return None

    def finish(self, names: list[str], tokens: list[str] | None) -> dict[str, Any]:
        """The views of the layers, in this order; none unless each has been seen."""
        if self.refused or not names or set(names) != set(self.layers):
            return {}
        parts = {part: [head for name in names for head in self.layers[name].get(part, [])] for part in _PARTS}
        size = math.isqrt(len(base64.b64decode(parts["windows"][0])))
        text = tokens or []
        shown = {j for head in parts["keys"] for row in head for j in row} | set(self.queries)

        def name(j: int) -> str:
            return text[j] if j < len(text) else f"#{j}"

        found: dict[str, Any] = {
            "window": {"start": 0, "tokens": [name(j) for j in range(size)], "weights": parts["windows"]},
            "top_keys": {
                "queries": self.queries,
                "keys": parts["keys"],
                "weights": parts["weights"],
                "tokens": {str(j): name(j) for j in sorted(shown)},
            },
        }
        if len(parts["entropy"]) == len(parts["windows"]):
            lines = {part: parts[part] for part in ("entropy", "expected_score")}
            found["paths"] = {"temperature": list(TEMPERATURES), **lines, "rows": len(self.sampled)}
        return found


_PARTS = ("windows", "keys", "weights", "entropy", "expected_score")


def _rows(form: Form, shipped: Tensor | None, queries: slice, least: int) -> tuple[int, Tensor]:
    """The weights [H, n, keys] of the first sequence's queries, over the keys they reach (and at least so many), and
    the first of those keys. `shipped` [B, H, Tq]: by what rows are multiplied."""
    H, Tk = form.shape[1], form.shape[3]
    reach = form.key_range(queries)
    start = max(0, min(reach.start, Tk - least))
    block = form.cut(slice(0, 1), slice(0, H), queries, slice(start, max(reach.stop, start + least)))
    weights = reference.attend(block, ("weights",))["weights"][0]
    return start, weights if shipped is None else weights * shipped[0, :, queries, None]


def _along(call: dict[str, Any], queries: list[int]) -> tuple[list[Any], list[Any]] | None:
    """Mean entropy and expected score of the first sequence's chosen queries at multiples of their temperature, each
    a list by head; None where the temperature is not one number, or a row not a problem of its own."""
    problem = call["problem"] or Transport()
    if isinstance(problem.marginal, RowsAndColumns):
        return None
    if isinstance(problem.temperature, Tensor | Budget) or not problem.temperature:
        return None
    form = lower(**call)
    _, H, _, Tk = form.shape
    scores, priors = [], []
    for i in queries:
        row = form.cut(slice(0, 1), slice(0, H), slice(i, i + 1), slice(0, Tk))
        found, _ = reference.scores_of(row)
        allowed = row.admissible(1, Tk, found.device)
        prior = row.log_prior(1, Tk, found.dtype, found.device)
        scores.append(found if allowed is None else found.masked_fill(~allowed, -math.inf))
        priors.append(torch.zeros_like(found) if prior is None else prior.expand_as(found))
    stacked, prior = torch.cat(scores, 2)[0], torch.cat(priors, 2)[0]  # [H, n, Tk]
    bare = Transport(
        problem.regularizer, prior=Bias(prior) if bool((prior != 0).any()) else None, marginal=problem.marginal
    )
    found = path(stacked, float(problem.temperature) * torch.tensor(TEMPERATURES), bare)
    entropy, expected = found.entropy.mean(-1).mT, found.expected_score.mean(-1).mT  # [H, temperatures]
    return [_numbers(row) for row in entropy], [_numbers(row) for row in expected]
