"""`Views`: details of one sequence for the report. A window of each plan, a map of the whole plan by blocks, the keys
that single queries read most, and the effect of a change of temperature on these queries."""

from __future__ import annotations

import base64
import math
from typing import Any

import torch
from torch import Tensor

from ..backends import reference
from ..form import Form
from ..lowering import lower
from ..plan import path, pool_rows, solved_rows
from ..priors import Bias
from ..problem import RowsAndColumns, TemperatureRule, Transport
from .numbers import json_number, json_numbers
from .token_texts import TokenTexts

WINDOW = 48  # queries and keys of the window
CELLS, FEWEST_CELLS = 128, 32  # blocks of queries and of keys in the map, at most and at least
MAP_BYTES = 3_000_000  # of all maps of a model: with many heads the maps have fewer cells
BLOCK_TEXT = 80  # characters of the text of a block
QUERIES, TOP = 24, 8  # number of queries whose top keys are shown, and of their keys
PATHS = 8  # number of queries over which the paths are means
TEMPERATURES = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0)


class Views:
    """Filled layer by layer by one forward pass; `finish` adds the text of the tokens.

    The views exist only if all layers read the same sequence. There are none if the lengths differ (an encoder and a
    decoder), if a layer computes attention twice, or if there is padding.
    """

    def __init__(self, layers: int = 1) -> None:
        """`layers`: how many the model has."""
        self.layer_count = layers
        self.length: int | None = None
        self.block = 0  # queries, and keys, of a cell of the map; 0: the window shows the whole sequence
        self.given_up = False
        self.queries: list[int] = []
        self.path_queries: list[int] = []
        self.layers: dict[str, dict[str, list[Any]]] = {}  # lists by head

    def state(self) -> dict[str, Any]:
        """What was added so far, for a run file."""
        return vars(self) | {"layers": dict(self.layers)}

    @classmethod
    def resumed(cls, state: dict[str, Any]) -> Views:
        """The views that `state` described."""
        views = cls()  # all fields are in the state
        vars(views).update(state, layers=dict(state["layers"]))
        return views

    def give_up(self) -> None:
        """The sequence has no views."""
        self.given_up = True

    def add(self, name: str, call: dict[str, Any], plan: dict[str, Any]) -> None:
        """Add the heads of a layer. `call`: the arguments of `attention`; `plan`: those on which the plan depends."""
        Tq, Tk = call["query"].shape[2], call["key"].shape[2]
        if self.length is None:
            self.length, self.block = Tq, _block(Tq, self.layer_count * call["query"].shape[1])
        if self.given_up or name in self.layers or Tq != Tk or Tq != self.length:
            return self.give_up()
        size = min(WINDOW, Tq)
        self.queries = sorted({round(i * (Tq - 1) / (QUERIES - 1)) for i in range(QUERIES)})
        self.path_queries = self.queries[:: -math.ceil(len(self.queries) / PATHS)]  # the last query is one of them
        form, shipped = solved_rows(**plan)
        window = _rows(form, shipped, slice(0, size), size)[1][..., :size]
        windows = [_encoded(head.flatten()) for head in _roots(window)]
        best_keys = []
        for i in self.queries:  # one by one: `topk` would compute the rows of all queries
            start, row = _rows(form, shipped, slice(i, i + 1), min(TOP, Tk))
            best, index = row[:, 0].topk(min(TOP, Tk))
            best_keys.append((best.cpu(), index.cpu() + start))
        weights, keys = (torch.stack(part, 1) for part in zip(*best_keys, strict=True))  # [H, queries, n]
        shares = [[[json_number(w, digits=4) for w in row] for row in head] for head in weights.tolist()]
        found = {"windows": windows, "keys": keys.tolist(), "weights": shares}
        if self.block:
            found["maps"] = _maps(form, shipped, self.block)
        paths = _temperature_paths(call, self.path_queries)
        if paths is not None:
            found |= {"entropy": paths[0], "expected_score": paths[1]}
        self.layers[name] = found
        return None

    def finish(self, names: list[str], tokens: TokenTexts | None) -> dict[str, Any]:
        """The views of the layers, in this order; an empty dict unless every layer has been added."""
        if self.given_up or not names or set(names) != set(self.layers):
            return {}
        parts = {part: [head for name in names for head in self.layers[name].get(part, [])] for part in _PARTS}
        size = math.isqrt(len(base64.b64decode(parts["windows"][0])))
        text = TokenTexts([]) if tokens is None else tokens
        shown = sorted({j for head in parts["keys"] for row in head for j in row} | set(self.queries))
        found: dict[str, Any] = {
            "window": {
                "start": 0,
                "tokens": [text.of(j) for j in range(size)],
                "parts": text.parts_among(range(size)),
                "weights": parts["windows"],
            },
            "top_keys": {
                "queries": self.queries,
                "keys": parts["keys"],
                "weights": parts["weights"],
                "tokens": {str(j): text.of(j) for j in shown},
                "parts": text.parts_among(shown),
            },
        }
        if self.block and self.length is not None:
            blocks = range(0, self.length, self.block)
            texts = [text.between(start, start + self.block, BLOCK_TEXT) for start in blocks]
            found["map"] = {"block": self.block, "length": self.length, "texts": texts, "weights": parts["maps"]}
        if len(parts["entropy"]) == len(parts["windows"]):
            lines = {part: parts[part] for part in ("entropy", "expected_score")}
            found["paths"] = {"temperature": list(TEMPERATURES), **lines, "rows": len(self.path_queries)}
        return found


_PARTS = ("windows", "maps", "keys", "weights", "entropy", "expected_score")


def _block(length: int, heads: int) -> int:
    """The size of a block, so that the maps of all heads are small enough; 0 if the window shows the whole sequence."""
    if length <= WINDOW:
        return 0
    affordable = math.isqrt(2 * MAP_BYTES // heads)  # a causal map is a triangle
    return -(-length // max(FEWEST_CELLS, min(CELLS, affordable)))


def _maps(form: Form, shipped: Tensor | None, block: int) -> list[str]:
    """By head: the mass between blocks of the first sequence, as bytes by row. A causal map has only the keys up to the
    query."""
    B, H, Tq, Tk = form.shape
    if B > 1:
        form = form.cut(slice(0, 1), slice(0, H), slice(0, Tq), slice(0, Tk))
        shipped = None if shipped is None else shipped[:1]
    roots = _roots(pool_rows(form, shipped, block)[0])
    below = torch.ones(roots.shape[1:], dtype=torch.bool).tril()
    return [_encoded(head.flatten() if bool(head[~below].any()) else head[below]) for head in roots]


def _roots(weights: Tensor) -> Tensor:
    """Weights as bytes: 255 times their square root, so that small weights are not lost."""
    return (255 * weights.clamp(0, 1).sqrt()).round().byte().cpu()


def _encoded(bytes_: Tensor) -> str:
    return base64.b64encode(bytes_.numpy().tobytes()).decode()


def _rows(form: Form, shipped: Tensor | None, queries: slice, least: int) -> tuple[int, Tensor]:
    """The weights [H, n, keys] of some queries of the first sequence over the keys that they reach (at least `least`
    keys), preceded by the number of the first of these keys. `shipped` [B, H, Tq]: a factor for each row."""
    H, Tk = form.shape[1], form.shape[3]
    reach = form.key_range(queries)
    start = max(0, min(reach.start, Tk - least))
    block = form.cut(slice(0, 1), slice(0, H), queries, slice(start, max(reach.stop, start + least)))
    weights = reference.attend(block, ("weights",))["weights"][0]
    return start, weights if shipped is None else weights * shipped[0, :, queries, None]


def _temperature_paths(call: dict[str, Any], queries: list[int]) -> tuple[list[Any], list[Any]] | None:
    """The mean entropy and the mean expected score of some queries of the first sequence at multiples of their
    temperature, each a list by head. None if the temperature is not a number, or if the rows are coupled."""
    problem = call["problem"] or Transport()
    if isinstance(problem.marginal, RowsAndColumns):
        return None
    if isinstance(problem.temperature, Tensor | TemperatureRule) or not problem.temperature:
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
    return [json_numbers(row) for row in entropy], [json_numbers(row) for row in expected]
