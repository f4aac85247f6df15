"""The metrics of a sampled training step: from the sums of a layer to quantiles over its heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .events import Heads
from .layers import Layer

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
NAMED = {"normalized_entropy": "entropy_norm", "max_scores": "max_score"}  # the usual names on dashboards
LOWEST = ("entropy", "entropy_norm")  # for these the lowest head matters, for the others the highest
ALIAS = "max_attention_logit"  # Megatron's name for the largest score of all

Layout = tuple[str, int, tuple[str, ...]]  # of a layer: its name, number of heads and channels


def layout_of(layer: Layer) -> Layout:
    return layer.name, layer.heads, layer.channels


def over_positions(layer: Layer) -> Layer:
    """The layer with the sums over all positions in place of one per bin."""
    total = layer.copy()
    total.sums, total.counts, total.rows = layer.sums.sum(0), layer.counts.sum(0), layer.rows.sum(0)
    return total


def _channel(layer: Layer, name: str) -> Tensor:
    """[H]: the mean over rows (the maximum for `max_scores`); NaN for a head without rows."""
    n = layer.channels.index(name)
    if name == "max_scores":
        return torch.where(layer.counts[n] > 0, layer.maxima[n], math.nan)
    return layer.sums[n] / layer.counts[n]


def metrics_of(layers: list[Layer]) -> dict[str, float]:
    """The quantiles of each layer over its heads, by name."""
    digits = max(2, len(str(max(layer.index for layer in layers))))
    found: dict[str, float] = {}
    for channel in layers[0].channels:
        if channel == "log_keys":
            continue
        name = NAMED.get(channel, channel)
        for layer in layers:
            label = f"attn/{name}/L{layer.index:0{digits}d}"
            values = _channel(layer, channel)
            values = values[~values.isnan()]
            if not len(values):
                continue
            if channel == "max_scores":
                found[label] = float(values.max())
                continue
            for quantile, share in QUANTILES.items():
                found[f"{label}_{quantile}"] = float(values.quantile(share))
            if name in LOWEST:
                found[f"{label}_min"] = float(values.min())
            else:
                found[f"{label}_max"] = float(values.max())
    scores = [value for name, value in found.items() if name.startswith("attn/max_score/")]
    if scores:
        found[ALIAS] = max(scores)
    return found


def heads_of(layer: Layer) -> Heads:
    """The numbers that the event rules read."""
    entropy = _channel(layer, "normalized_entropy")
    known = entropy[~entropy.isnan()]
    lower = float(known.quantile(QUANTILES["p10"])) if len(known) else math.nan
    return Heads(layer.index, entropy.tolist(), lower, _channel(layer, "max_scores").tolist())
