"""Records as `Inspection.to_json()` writes them, measured on a small transformer with random weights and a few
constructed heads: a sink, a previous-token head, a peaked one, a diffuse one, an induction head."""

from __future__ import annotations

import base64
import functools
import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import regard
from regard import AuxRequest

TEXT = (
    "The cat sat on the mat and the dog lay on the rug . When the cat sat on the mat the dog lay on the rug , and "
    "when the dog lay on the rug the cat sat on the mat . Nobody knew why the cat sat there , or why the dog lay "
    "there , but every day the cat sat on the mat and the dog lay on the rug ."
)
STATISTICS = [
    "entropy",
    "kl",
    "score_variance",
    "max_scores",
    "max_weight",
    "collision",
    "support",
    "first_key_mass",
    "lse",
    "value_spread",
]
TEMPERATURES = [0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0]
WINDOW, TOP, QUERIES, BLOCK = 48, 8, 24, 2


@functools.cache
def inspection(
    layers: int = 6, heads: int = 8, seed: int = 0, text: str = TEXT, views: bool = True, gain: float = 1.0
) -> dict[str, Any]:
    """A record, which is cached: `copy.deepcopy` it before changing it. Without `views`: no paths, window or top keys.

    `gain` multiplies the scores of the random heads: sqrt(32) is the effect of a missing scale.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = text.split(" ")
    tokens = [tokens[0], *(" " + t for t in tokens[1:])]
    vocabulary = {t: i for i, t in enumerate(dict.fromkeys(tokens))}
    ids = torch.tensor([vocabulary[t] for t in tokens])
    T, D = len(tokens), 32
    width = heads * D
    hidden = torch.randn(len(vocabulary), width, generator=generator)[ids]
    entries, by_position, paths, windows, top = [], {"entropy": [], "first_key_mass": []}, ([], []), [], ([], [])
    maps = []
    edges = [0, *(2**i for i in range(T.bit_length()))]
    edges[-1] = T
    queries = sorted({round(i * (T - 1) / (QUERIES - 1)) for i in range(QUERIES)})
    position = torch.arange(T)
    for layer in range(layers):
        x = torch.nn.functional.layer_norm(hidden, (width,))
        weights = torch.randn(3, width, width, generator=generator) / math.sqrt(width)
        q, k, v = (
            (x @ w).unflatten(-1, (heads, D)).transpose(0, 1)[None].contiguous() for w in weights
        )  # [1, H, T, D]
        q = q * torch.empty(heads, 1, 1).uniform_(0.2, 8, generator=generator) * gain
        _construct_heads(layer, q, k, v, ids)
        out, aux = regard.attention(q, k, v, is_causal=True, return_aux=AuxRequest(**dict.fromkeys(STATISTICS, True)))
        rows = {name: getattr(aux, name)[0] for name in STATISTICS}  # [H, T]
        n = position + 1.0
        rows["normalized_entropy"] = torch.where(n > 1, rows["entropy"] / n.log().clamp(min=1e-9), math.nan)
        norm = out[0].norm(dim=-1)
        rows["relative_norm"] = norm / norm.mean(0)
        near = torch.stack([position, (position - 1).clamp(min=0)], -1)
        at = regard.weights_at(q, k, near, is_causal=True)[0]
        rows["self_token"] = at[..., 0]
        rows["previous_token"] = torch.where(position > 0, at[..., 1], math.nan)
        rows["induction"] = _induction(q, k, ids)
        for h in range(heads):
            entries.append(_summary(layer, h, {name: values[h] for name, values in rows.items()}))
            for name, bins in by_position.items():
                bins.append([_round(rows[name][h, a:b].mean()) for a, b in pairwise(edges)])
        if views:
            _views(q, k, queries, paths, windows, top)
            maps += _maps(q, k)
        mixed = out[0].transpose(0, 1).flatten(1)
        hidden = hidden + mixed @ torch.randn(width, width, generator=generator) / math.sqrt(width)
    null = (position + 1.0).log()
    spans = list(pairwise(edges))
    record: dict[str, Any] = {
        "format": "regard-inspection",
        "version": 2,
        "provenance": {
            "model": f"random-{layers}x{heads}", "model_type": "test", "layers": layers, "heads": heads,
            "kv_heads": heads, "head_dim": D, "parameters": 4 * layers * width**2, "dtype": "float32", "tokens": T,
            "sequences": 1, "longest": T, "problem": "Transport(KL(), prior=Causal())", "backend": "native",
            "isa": None, "threads": torch.get_num_threads(), "regard": regard.__version__, "torch": torch.__version__,
            "transformers": None, "python": "3", "date": "2026-01-01T00:00:00Z", "seconds": 0.5,
            "text": "cat and dog", "begins_with": text,
        },
        "statistics": list(entries[0]["mean"]),
        "heads": entries,
        "positions": {
            "edges": edges, "rows": [b - a for a, b in spans],
            "null_entropy": [[_round(null[a:b].mean()) for a, b in spans]] * len(entries), "values": by_position,
        },
        "findings": [],
    }  # fmt: skip
    if views:
        record["paths"] = {
            "temperature": TEMPERATURES,
            "entropy": paths[0],
            "expected_score": paths[1],
            "rows": len(queries),
        }
        record["window"] = {"start": 0, "tokens": tokens[:WINDOW], "weights": windows}
        texts = ["".join(tokens[i : i + BLOCK]) for i in range(0, T, BLOCK)]
        record["map"] = {"block": BLOCK, "length": T, "texts": texts, "weights": maps}
        seen = sorted({j for head in top[0] for row in head for j in row} | set(queries))
        record["top_keys"] = {
            "queries": queries, "keys": top[0], "weights": top[1], "tokens": {str(j): tokens[j] for j in seen},
        }  # fmt: skip
    return record


def tiled(record: dict[str, Any], layers: int, heads: int) -> dict[str, Any]:
    """The heads of a record, repeated to a model of another size, without paths, window and top keys."""
    entries = record["heads"]
    numbers = [(layer, head) for layer in range(layers) for head in range(heads)]
    chosen = [i % len(entries) for i in range(len(numbers))]
    positions = record["positions"]
    values = {name: [bins[i] for i in chosen] for name, bins in positions["values"].items()}
    kept = {name: part for name, part in record.items() if name not in ("paths", "window", "map", "top_keys")}
    return {
        **kept,
        "provenance": {**record["provenance"], "model": f"tiled-{layers}x{heads}", "layers": layers, "heads": heads},
        "heads": [{**entries[i], "layer": layer, "head": h} for i, (layer, h) in zip(chosen, numbers, strict=True)],
        "positions": {**positions, "values": values, "null_entropy": [positions["null_entropy"][i] for i in chosen]},
    }


def _construct_heads(layer: int, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> None:
    """In layer 0: previous token, diffuse, sink, own token. In layer 1: induction, a dormant sink. In layer 2: a head
    with scores as large as without 1/sqrt(D), and a sink."""
    T, D = q.shape[-2:]
    heads = q.shape[1]
    if layer == 0:
        angle = torch.arange(T)[:, None] * torch.logspace(0, -2, D // 2)[None]  # a rotary code of the position
        code = torch.cat([angle.cos(), angle.sin()], -1)
        before = torch.cat([(angle - angle[1:2]).cos(), (angle - angle[1:2]).sin()], -1)
        q[0, 0], k[0, 0] = 12 * before, 2 * code
        q[0, 1] *= 0.01
        if heads > 2:
            _sink(q[0, 2], k[0, 2], 4.0)
        if heads > 3:
            q[0, 3], k[0, 3] = 12 * code, 2 * code
    if layer == 1:
        names = torch.nn.functional.normalize(
            torch.randn(int(ids.max()) + 2, D, generator=torch.Generator().manual_seed(1)), dim=-1
        )
        q[0, 0] = 40 * names[ids]
        k[0, 0] = names[torch.cat([ids.new_tensor([int(ids.max()) + 1]), ids[:-1]])]
        k[0, 0] *= 1.2
        _sink(q[0, 1], k[0, 1], 6.0)
        v[0, 1, 0] *= 0.02
    if layer == 2:
        q[0, 0] *= 60 / q[0, 0].std()
        _sink(q[0, 1], k[0, 1], 2.0)


def _sink(q: Tensor, k: Tensor, strength: float) -> None:
    q[:, 0] = strength
    k[:, 0] = 0
    k[0, 0] = strength * 4


def _induction(q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
    """Weight on the keys right after earlier copies of the query's token, [H, T]; NaN where there is no copy."""
    names = ids.tolist()
    copies = [[j + 1 for j in range(i) if names[j] == names[i]] for i in range(len(names))]
    most = max(len(c) for c in copies)
    index = torch.tensor([c + [0] * (most - len(c)) for c in copies])
    valid = torch.tensor([[True] * len(c) + [False] * (most - len(c)) for c in copies])
    weights = regard.weights_at(q, k, index, is_causal=True)[0] * valid
    return torch.where(valid.any(-1), weights.sum(-1), math.nan)


def _views(q: Tensor, k: Tensor, queries: list[int], paths: tuple, windows: list, top: tuple) -> None:
    T, D = q.shape[-2:]
    scores = (q @ k.mT)[0] / math.sqrt(D)
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    plan = regard.solve(scores[..., :WINDOW, :WINDOW]).weights
    weights, keys = regard.topk(q, k, TOP, is_causal=True)
    for h in range(q.shape[1]):
        entropies, expected = [], []
        for temperature in TEMPERATURES:
            p = regard.solve(scores[h, queries], regard.Transport(temperature=temperature)).weights
            entropies.append(_round(torch.special.entr(p).sum(-1).mean()))
            expected.append(_round((p * scores[h, queries].nan_to_num(neginf=0)).sum(-1).mean()))
        paths[0].append(entropies)
        paths[1].append(expected)
        levels = (255 * plan[h].sqrt()).round().to(torch.uint8)
        windows.append(base64.b64encode(levels.numpy().tobytes()).decode())
        top[0].append([keys[0, h, i].tolist() for i in queries])
        top[1].append([[_round(w) for w in weights[0, h, i]] for i in queries])


def _maps(q: Tensor, k: Tensor) -> list[str]:
    """By head: the lower triangle of the mass between blocks, as bytes."""
    roots = (255 * regard.block_mass(q, k, BLOCK, is_causal=True)[0].sqrt()).round().to(torch.uint8)
    below = torch.ones(roots.shape[1:], dtype=torch.bool).tril()
    return [base64.b64encode(head[below].numpy().tobytes()).decode() for head in roots]


def _summary(layer: int, head: int, rows: dict[str, Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "layer": layer,
        "head": head,
        "rows": len(rows["entropy"]),
        "mean": {},
        "max": {},
        "min": {},
    }
    for name, values in rows.items():
        values = values[~values.isnan()]
        for kind in ("mean", "max", "min"):
            found[kind][name] = _round(getattr(values, kind)()) if len(values) else None
    return found


def _round(value: Tensor) -> float | None:
    number = float(value)
    return float(f"{number:.5g}") if math.isfinite(number) else None
