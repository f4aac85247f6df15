"""QK-clip: scale the query and key weights of heads whose scores are too large."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, overload

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .._validate import describe, number, positive


class RecordedLayer(Protocol):
    """A layer of an `Inspection`."""

    name: str
    channels: tuple[str, ...]
    maxima: Tensor  # [channels, H]


class Recorded(Protocol):
    """An `Inspection`."""

    statistics: tuple[str, ...]

    @property
    def layers(self) -> Sequence[RecordedLayer]: ...


@overload
def qk_clip_(
    attention: nn.Module,
    max_scores: Mapping[str, Any] | Recorded,
    threshold: float = 100.0,
    *,
    softcap: float | None = None,
) -> dict[str, Tensor]: ...


@overload
def qk_clip_(
    attention: nn.Module,
    max_scores: Tensor | RecordedLayer,
    threshold: float = 100.0,
    *,
    softcap: float | None = None,
) -> Tensor: ...


@torch.no_grad()
def qk_clip_(
    attention: nn.Module, max_scores: Any, threshold: float = 100.0, *, softcap: float | None = None
) -> Tensor | dict[str, Tensor]:
    """Scale the query and key weights, in place, of each head whose largest score exceeds the threshold, so that its
    largest score becomes the threshold. The other heads are not changed. Returns the factor on each head's scores, [H].

    This is Kimi K2's QK-clip: queries and keys are each scaled by the square root of threshold / max. Where query heads
    share keys (GQA), the queries are scaled by the whole factor, because other heads read the same keys. In multi-head
    latent attention (MLA) the parts without rotation are scaled by the square root, and of the rotated parts only the
    queries, by the whole factor: all heads share the rotated keys. Weights, biases and `bias_k` are scaled. Rotary
    embeddings are linear, so they do not interfere.

    `attention`: a `MultiheadAttention` (torch's or regard's), or a module with `q_proj` and `k_proj`, `query` and
    `key`, a joint projection (`c_attn`, `qkv_proj`, `qkv`, `Wqkv`, `query_key_value`), or `q_b_proj` and `kv_b_proj`
    (MLA). A norm after the projection undoes the scale of the weights. If it has weights for each head (OLMo 2), these
    are scaled instead; if the heads share its weights (Qwen 3, Gemma 3), it raises.
    `max_scores`: the aux statistic of that name, [H] or [..., H, Tq], or a layer of an `Inspection`. It is the largest
    score with the scale applied, before the temperature. It includes a float mask or position bias, which is not
    scaled. Under a softcap (Gemma 2's is found; otherwise pass `softcap`) the score before the cap is scaled such that
    the capped one becomes the threshold.

    A whole model: pass it with an `Inspection` of it (of `regard.watch` or `regard.inspect`), or with a dict of
    `max_scores` by the name of the attention. Returns a dict of factors. If a layer cannot be clipped, an error names
    it, and no layer is changed. A clipped layer changes the inputs of the layers after it, whose scores may be above
    the threshold in the next step; `regard.hf.qk_clip_` repeats the passes until none is.
    """
    threshold = number("threshold", threshold, "a positive, finite number", positive)
    by_name = _by_name(max_scores)
    if by_name is None:
        factor, parts = _clip(attention, max_scores, threshold, softcap)
        _scale_heads(factor, parts)
        return factor
    clips = {}
    for name, scores in by_name.items():
        try:
            module = attention.get_submodule(name)
        except AttributeError:
            raise ValueError(
                f"max_scores: expected names of modules of {type(attention).__name__}, got {name!r}"
            ) from None
        try:
            clips[name] = _clip(module, scores, threshold, softcap)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {str(error).removeprefix('attention: ')}") from None
    for factor, parts in clips.values():
        _scale_heads(factor, parts)
    return {name: factor for name, (factor, _) in clips.items()}


def _by_name(max_scores: Any) -> dict[str, Any] | None:
    """The scores of each attention of a model; None if they are those of one attention."""
    if isinstance(max_scores, Mapping):
        return dict(max_scores)
    if hasattr(max_scores, "layers") and hasattr(max_scores, "statistics"):  # an Inspection
        return {layer.name: layer for layer in max_scores.layers}
    return None


def _clip(attention: nn.Module, max_scores: Any, threshold: float, softcap: float | None) -> tuple[Tensor, list[_Part]]:
    """The factor on each head's scores, and the weights to scale."""
    maxima = _maxima(max_scores)
    parts = _parts_of(attention, len(maxima))
    cap = getattr(attention, "attn_logit_softcapping", None) if softcap is None else softcap
    cap = None if cap is None else number("softcap", cap, "a positive number", positive)
    return _factor(maxima, threshold, cap), parts


def _scale_heads(factor: Tensor, parts: list[_Part]) -> None:
    for head in factor.lt(1).nonzero().flatten().tolist():
        for part in parts:
            part.of_head(head).mul_(float(factor[head]) ** part.power)


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


HALF, WHOLE = 0.5, 1.0  # queries and keys share the factor, or the queries take all of it


class _Part(NamedTuple):
    """A tensor that scales the queries or keys of each head by the factor to the `power`.

    A head has `size` consecutive entries along `dim`, the first one from `begin`, each other one `step` after the one
    before it (0: `size`)."""

    tensor: Tensor
    size: int
    begin: int = 0
    dim: int = 0
    step: int = 0
    power: float = HALF

    def of_head(self, head: int) -> Tensor:
        return self.tensor.narrow(self.dim, self.begin + head * (self.step or self.size), self.size)


def _parts_of(attention: Any, heads: int) -> list[_Part]:
    """The weights that produce the queries and the keys of each head."""
    name = type(attention).__name__
    config = getattr(attention, "config", None)
    own = getattr(attention, "num_heads", None) or getattr(attention, "num_attention_heads", None)
    own = own or getattr(config, "num_attention_heads", None)
    if own is not None and own != heads:
        raise ValueError(f"max_scores: expected one for each of {name}'s {own} heads, got {heads}")
    if parametrize.is_parametrized(attention):
        raise ValueError(f"attention: expected plain weights, got parametrized ones in {name}")
    clamp = getattr(attention, "clip_qkv", None) or getattr(config, "clip_qkv", None)
    if clamp is not None:
        raise ValueError(f"attention: expected projections that are not clamped, got clip_qkv={clamp}")
    if isinstance(attention, nn.MultiheadAttention):
        return _packed(attention)

    def has(*names: str) -> bool:
        return all(isinstance(getattr(attention, n, None), nn.Module) for n in names)

    if has("kv_b_proj") and (has("q_b_proj") or has("q_proj")):
        return _latent(attention, heads)
    if has("c_attn") and not getattr(attention, "is_cross_attention", False):
        (weight, bias), E = _plain("c_attn", attention.c_attn, transposed=True), attention.split_size
        size = E // heads
        return [part for at in (0, E) for part in (_Part(weight, size, at, dim=1), _Part(bias, size, at))]
    for joint, together in (("qkv_proj", False), ("qkv", False), ("Wqkv", False), ("query_key_value", True)):
        if has(joint):
            return _joint(attention, joint, heads, together)
    for query, key in (("q_proj", "k_proj"), ("query", "key")):
        if has(query) and hasattr(attention, key):
            return _separate(attention, query, key, heads)
    raise TypeError(
        f"attention: expected a MultiheadAttention or a module with q_proj and k_proj, query and key, a joint "
        f"projection (c_attn, qkv_proj, qkv, Wqkv, query_key_value), or q_b_proj and kv_b_proj, got {name}"
    )


def _packed(attention: nn.MultiheadAttention) -> list[_Part]:
    """Of torch.nn.MultiheadAttention, which has all projections in one tensor, or three without modules."""
    E, size = attention.embed_dim, attention.head_dim
    if attention.in_proj_weight is not None:
        parts = [_Part(attention.in_proj_weight, size), _Part(attention.in_proj_weight, size, E)]
    else:
        parts = [_Part(attention.q_proj_weight, size), _Part(attention.k_proj_weight, size)]
    if attention.in_proj_bias is not None:
        parts += [_Part(attention.in_proj_bias, size), _Part(attention.in_proj_bias, size, E)]
    if attention.bias_k is not None:  # an additional key
        parts.append(_Part(attention.bias_k, size, dim=-1))
    return parts


def _latent(attention: Any, heads: int) -> list[_Part]:
    """Of multi-head latent attention. Of each head's queries and keys the first part is not rotated; the rotated part
    of the keys belongs to all heads."""
    _check_norms(attention, before=("q_a_", "kv_a_"))
    plain, rotated, value = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim
    query = "q_b_proj" if isinstance(getattr(attention, "q_b_proj", None), nn.Module) else "q_proj"
    parts = []
    for name, step in ((query, plain + rotated), ("kv_b_proj", plain + value)):
        for tensor in _plain(name, getattr(attention, name)):
            if tensor.shape[0] != heads * step:
                raise ValueError(f"attention: expected {heads} heads of {step} in {name}, got {tensor.shape[0]} rows")
            parts.append(_Part(tensor, plain, step=step))
            if name == query:
                parts.append(_Part(tensor, rotated, plain, step=step, power=WHOLE))
    return parts


def _joint(attention: Any, name: str, heads: int, together: bool) -> list[_Part]:
    """Of a module with one linear layer for queries, keys and values: all queries before all keys, or the queries,
    keys and values of a head `together`."""
    _check_norms(attention)
    tensors = _plain(name, getattr(attention, name))
    width = tensors[0].shape[0]
    size = getattr(attention, "head_dim", None) or width // (3 * heads)
    key_heads, rest = divmod(width - heads * size, 2 * size)
    if rest or key_heads < 1 or heads % key_heads or (together and key_heads != heads):
        raise ValueError(f"attention: expected {heads} heads of {size} in {name}, got {width} rows")
    starts, step = ((0, size), 3 * size) if together else ((0, heads * size), size)
    if key_heads != heads:
        return [_Part(tensor, size, step=step, power=WHOLE) for tensor in tensors]
    return [_Part(tensor, size, begin, step=step) for tensor in tensors for begin in starts]


def _separate(attention: Any, query: str, key: str, heads: int) -> list[_Part]:
    """Of a module with one linear layer for the queries and one for the keys."""
    _check_norms(attention, after=("q_norm", "k_norm"))
    found: list[list[Tensor]] = []
    widths = []
    for name, norm_name in ((query, "q_norm"), (key, "k_norm")):
        tensors = _plain(name, getattr(attention, name))
        width = tensors[0].shape[0]
        widths.append(width)
        size = widths[0] // heads
        head_dim = getattr(attention, "head_dim", size)
        if size != head_dim or width % size:
            raise ValueError(
                f"attention: expected {heads} heads of {head_dim} in {type(attention).__name__}.{name}, "
                f"got {width} rows"
            )
        norm = getattr(attention, norm_name, None)
        if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity):
            tensors = _norm(norm_name, norm, width)
        found.append(tensors)
    size = widths[0] // heads
    if widths[0] != widths[1]:
        return [_Part(tensor, size, power=WHOLE) for tensor in found[0]]
    return [_Part(tensor, size) for tensors in found for tensor in tensors]


_NORMED = re.compile(r"(^|_)(q|k|qk|query|key)(_|$)")  # names of norms that act on queries or keys


def _check_norms(attention: nn.Module, after: tuple[str, ...] = (), before: tuple[str, ...] = ()) -> None:
    """Raise for a norm of queries or keys that is neither one of `after`, which the caller scales, nor one whose name
    begins with one of `before`: its result goes through the projection that is scaled."""
    for name, child in attention.named_children():
        a_norm = "norm" in f"{name}{type(child).__name__}".lower() and not isinstance(child, nn.Identity)
        if a_norm and _NORMED.search(name) and name not in after and not name.startswith(before):
            allowed = f" but {' and '.join(after)}" if after else ""
            raise ValueError(f"attention: expected no norm after the projections{allowed}, got {name}")


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
