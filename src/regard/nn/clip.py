"""QK-clip: scale the query and key weights of heads whose scores are too large."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .._validate import describe, number, positive


@torch.no_grad()
def qk_clip_(
    attention: nn.Module, max_scores: Any, threshold: float = 100.0, *, softcap: float | None = None
) -> Tensor:
    """Scale the query and key weights, in place, of each head whose largest score exceeds the threshold, so that its
    largest score becomes the threshold. The other heads are not changed. Returns the factor on each head's scores, [H].

    This is Kimi K2's QK-clip: queries and keys are each scaled by the square root of threshold / max. Where query heads
    share keys (GQA), the queries are scaled by the whole factor, because other heads read the same keys. Weights,
    biases and `bias_k` are scaled. Rotary embeddings are linear, so they do not interfere.

    `attention`: a `MultiheadAttention` (torch's or regard's), GPT-2's with `c_attn`, or a module with `q_proj` and
    `k_proj` or `query` and `key`. A norm after the projection undoes the scale of the weights. If it has weights for
    each head (OLMo 2), these are scaled instead; if the heads share its weights (Qwen 3, Gemma 3), it raises.
    `max_scores`: the aux statistic of that name, [H] or [..., H, Tq], or a layer of an `Inspection`. It is the largest
    score with the scale applied, before the temperature. It includes a float mask or position bias, which is not
    scaled. Under a softcap (Gemma 2's is found; otherwise pass `softcap`) the score before the cap is scaled such that
    the capped one becomes the threshold.
    """
    threshold = number("threshold", threshold, "a positive, finite number", positive)
    maxima = _maxima(max_scores)
    weights = _weights_of(attention, len(maxima))
    cap = getattr(attention, "attn_logit_softcapping", None) if softcap is None else softcap
    factor = _factor(maxima, threshold, None if cap is None else number("softcap", cap, "a positive number", positive))
    for head in factor.lt(1).nonzero().flatten().tolist():
        share = float(factor[head])
        for part in weights.queries:
            part.rows(head).mul_(math.sqrt(share) if weights.keys else share)
        for part in weights.keys:
            part.rows(head).mul_(math.sqrt(share))
    return factor


def _maxima(max_scores: Any) -> Tensor:
    """The largest score of each head, [H], in float64."""
    if hasattr(max_scores, "maxima") and hasattr(max_scores, "channels"):  # a layer of an Inspection
        if "max_scores" not in max_scores.channels:
            raise ValueError(f"max_scores: expected a layer with recorded max_scores, got {max_scores.channels}")
        max_scores = max_scores.maxima[max_scores.channels.index("max_scores")]
    if not isinstance(max_scores, Tensor) or not max_scores.is_floating_point() or max_scores.dim() < 1:
        raise TypeError(
            f"max_scores: expected a floating-point tensor [H] or [..., H, Tq], or an Inspection's layer, got "
            f"{describe(max_scores)}"
        )
    maxima = max_scores.detach().double().cpu()
    if maxima.dim() > 1:
        maxima = maxima.movedim(-2, 0).flatten(1).amax(1)
    if bool((maxima.isnan() | (maxima == math.inf)).any()):
        raise ValueError(f"max_scores: expected numbers, got {maxima.tolist()}")
    return maxima


def _factor(maxima: Tensor, threshold: float, softcap: float | None) -> Tensor:
    """By which factor the score before a softcap is scaled, [H]; 1 for heads within the threshold."""
    over = maxima > threshold
    if softcap is None:
        return torch.where(over, threshold / maxima, 1.0)
    if bool((over & (maxima >= softcap * (1 - 1e-6))).any()):
        raise ValueError(
            f"max_scores: expected less than the softcap {softcap:g}, got {float(maxima.max()):g}, which does not "
            f"determine the score before the cap"
        )
    target = math.atanh(threshold / softcap) if threshold < softcap else math.inf
    return torch.where(over, target / torch.atanh(torch.where(over, maxima, 0.0) / softcap), 1.0)


class _Part(NamedTuple):
    """A tensor in which each head has `size` consecutive entries along `dim`, the first head's from `begin`."""

    tensor: Tensor
    size: int
    begin: int = 0
    dim: int = 0

    def rows(self, head: int) -> Tensor:
        return self.tensor.narrow(self.dim, self.begin + head * self.size, self.size)


class _Weights(NamedTuple):
    """The tensors that scale the queries and the keys."""

    queries: list[_Part]
    keys: list[_Part]  # empty where query heads share keys


def _weights_of(attention: Any, heads: int) -> _Weights:
    """The weights that produce the queries and the keys of each head."""
    name = type(attention).__name__
    own = getattr(attention, "num_heads", None) or getattr(attention, "num_attention_heads", None)
    own = own or getattr(getattr(attention, "config", None), "num_attention_heads", None)
    if own is not None and own != heads:
        raise ValueError(f"max_scores: expected one for each of {name}'s {own} heads, got {heads}")
    if parametrize.is_parametrized(attention):
        raise ValueError(f"attention: expected plain weights, got parametrized ones in {name}")
    if isinstance(attention, nn.MultiheadAttention):
        return _packed(attention)
    if isinstance(getattr(attention, "c_attn", None), nn.Module) and not getattr(
        attention, "is_cross_attention", False
    ):
        (weight, bias), E = _plain("c_attn", attention.c_attn, transposed=True), attention.split_size
        size = E // heads
        queries, keys = ([_Part(weight, size, at, dim=1), _Part(bias, size, at)] for at in (0, E))
        return _Weights(queries, keys)
    for query, key in (("q_proj", "k_proj"), ("query", "key")):
        if isinstance(getattr(attention, query, None), nn.Module) and hasattr(attention, key):
            return _separate(attention, query, key, heads)
    raise TypeError(
        f"attention: expected a MultiheadAttention or a module with q_proj and k_proj, query and key, or c_attn, "
        f"got {name}"
    )


def _packed(attention: nn.MultiheadAttention) -> _Weights:
    """Of torch.nn.MultiheadAttention, which has all projections in one tensor, or three without modules."""
    E, size = attention.embed_dim, attention.head_dim
    if attention.in_proj_weight is not None:
        queries, keys = [_Part(attention.in_proj_weight, size)], [_Part(attention.in_proj_weight, size, E)]
    else:
        queries, keys = [_Part(attention.q_proj_weight, size)], [_Part(attention.k_proj_weight, size)]
    if attention.in_proj_bias is not None:
        queries.append(_Part(attention.in_proj_bias, size))
        keys.append(_Part(attention.in_proj_bias, size, E))
    if attention.bias_k is not None:  # an additional key
        keys.append(_Part(attention.bias_k, size, dim=-1))
    return _Weights(queries, keys)


_NORMED = re.compile(r"(^|_)(q|k|qk|query|key)(_|$)")  # names of norms that act on queries or keys


def _separate(attention: Any, query: str, key: str, heads: int) -> _Weights:
    """Of a module with one linear layer for the queries and one for the keys."""
    for name, child in attention.named_children():
        a_norm = "norm" in f"{name}{type(child).__name__}".lower() and not isinstance(child, nn.Identity)
        if a_norm and name not in ("q_norm", "k_norm") and _NORMED.search(name):
            raise ValueError(f"attention: expected no norm after the projections but q_norm and k_norm, got {name}")
    parts: list[list[_Part]] = []
    size = 0
    for name, norm_name in ((query, "q_norm"), (key, "k_norm")):
        tensors = _plain(name, getattr(attention, name))
        width = tensors[0].shape[0]
        size = size or width // heads
        head_dim = getattr(attention, "head_dim", size)
        if size != head_dim or width % size:
            raise ValueError(
                f"attention: expected {heads} heads of {head_dim} in {type(attention).__name__}.{name}, "
                f"got {width} rows"
            )
        norm = getattr(attention, norm_name, None)
        if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity):
            tensors = _norm(norm_name, norm, width)
        parts.append([_Part(tensor, size) for tensor in tensors])
    shared = attention.get_submodule(key).weight.shape[0] // size != heads
    return _Weights(parts[0], [] if shared else parts[1])


def _plain(name: str, layer: nn.Module, transposed: bool = False) -> list[Tensor]:
    """Weight and bias of an ordinary linear layer; raises for quantized or parametrized ones."""
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    plain = type(layer).__name__ == "Conv1D" if transposed else isinstance(layer, nn.Linear)
    if (
        not plain
        or parametrize.is_parametrized(layer)
        or not isinstance(weight, Tensor)
        or not weight.is_floating_point()
    ):
        kind = "Conv1D" if transposed else "Linear"
        raise TypeError(f"attention: expected a plain {kind} for {name}, got {type(layer).__name__}")
    return [weight] if bias is None else [weight, bias]


def _norm(name: str, norm: nn.Module, width: int) -> list[Tensor]:
    """The weights of a norm that has its own for each head; raises for other norms."""
    tensors = dict(norm.named_parameters())
    if any(p.shape != (width,) for p in tensors.values()) or "weight" not in tensors:
        raise ValueError(
            f"attention: expected no norm that all heads share, got {name}, which undoes the scale of a head's weights "
            f"(the norm's own weights bound the scores)"
        )
    ones = torch.ones(1, width, dtype=tensors["weight"].dtype, device=tensors["weight"].device)
    nothing = {n: torch.zeros_like(p) for n, p in tensors.items()}
    if bool(torch.func.functional_call(norm, nothing, ones).any()):  # it is not weight * normed + bias
        raise ValueError(f"attention: expected a norm that its weight multiplies, got {type(norm).__name__}")
    return list(tensors.values())
