"""The attention function that transformers calls, expressed as a call of the public `regard.attention`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .._validate import Scalar, concrete, describe
from ..features import Features
from ..operator import attention
from ..priors import ALiBi, Bias, Causal, Documents, Prior, Window
from ..problem import Rows, RowsAndColumns, TemperatureRule, Transport
from ..regularizers import KL
from ..statistics import AuxOutput, AuxRequest
from .biases import RelativeBias, read_bias
from .factories import Factory, Seen
from .lengths import check_lengths, follows_positions, keys_so_far, last_key
from .masks import StructuredMask
from .parameters import Retrofit, retrofit_of

# Arguments that transformers passes to every attention function and that do not change what ours must compute: other
# parts of the model read them, or only other implementations do.
HARMLESS = frozenset(
    (
        "cache_position",
        "deterministic",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "use_cache",
    )
)


def attention_function(
    problem: Transport | Features | Factory | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of a registered name. Returns the output [B, Tq, H, Dv] and None for the weights."""
    if isinstance(problem, Features):
        call = as_features_call(module, as_call(None, module, query, key, value, attention_mask, **kwargs))
        return problem(**call).transpose(1, 2).contiguous(), None
    call = as_call(problem, module, query, key, value, attention_mask, **kwargs)
    return attend(module, call)[0].transpose(1, 2).contiguous(), None


def attend(module: nn.Module, call: dict[str, Any], request: AuxRequest | None = None) -> tuple[Tensor, AuxOutput]:
    """`attention(**call)` and its statistics, where `call` is what `as_call` returned for this module.

    If the weight of a learned null key (`retrofit`) may need a gradient, the output is computed without the null key
    and multiplied by the mass that the null key leaves. The numbers are the same, and a weight of 0 gets a gradient.
    """
    retrofit = retrofit_of(module)
    request = AuxRequest() if request is None else request
    if retrofit is None or retrofit.null_weight is None or not torch.is_grad_enabled():
        return attention(**call, return_aux=request)
    problem = call["problem"] or Transport()
    without = Transport(problem.regularizer, prior=problem.prior, temperature=problem.temperature)
    without_null: dict[str, Any] = {**call, "problem": without}
    out, aux = attention(**without_null, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None and not isinstance(problem.temperature, TemperatureRule)
    out = (out * retrofit.kept_mass(aux.lse, problem.temperature).unsqueeze(-1)).to(out.dtype)
    if request != AuxRequest():  # the statistics are those of the plan with the null key, before dropout
        whole: dict[str, Any] = {**call, "dropout_p": 0.0}
        _, aux = attention(**whole, return_aux=request)
    return out, aux


def counted_keys(module: nn.Module, problem: Transport, keys: Tensor) -> Tensor:
    """The number of keys of each row, its null key included.

    A learned null key counts by its weight (at most 1), so that a small weight changes the number little.
    """
    retrofit = retrofit_of(module)
    if retrofit is not None and retrofit.null_weight is not None:
        null = retrofit.null_weight.detach().to(keys.dtype).clamp(0, 1)[:, None]
        return torch.where(keys > 1, keys + null, keys)
    return keys + (isinstance(problem.marginal, Rows) and problem.marginal.sink is not None)


def as_call(
    problem: Transport | Factory | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | RelativeBias | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool | None = None,
    regard_seen: Seen | None = None,
    **others: Any,
) -> dict[str, Any]:
    """The arguments that transformers passes to an attention function, as the arguments of `regard.attention`. A
    factory builds the problem of this call."""
    if output_attentions:
        raise ValueError(
            "output_attentions: expected False, got True; regard keeps no Tq x Tk matrix (regard.inspect, regard.topk "
            'and regard.block_mass read the plan without it; attn_implementation="eager" stores it)'
        )
    unknown = sorted(name for name, given in others.items() if given is not None and name not in HARMLESS)
    if unknown:
        raise TypeError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which regard does not know and "
            f"which may change the result"
        )
    retrofit = retrofit_of(module)
    Tq, Tk = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    factors: list[Prior] = []
    mask: Tensor | None = None
    if attention_mask is None:
        if Tq > 1 and causal and Tk != Tq:  # the prefill of a static cache: the keys after the first Tq are empty
            Tk = Tq
        if Tq > 1 and causal:
            factors.append(Causal())
        if sliding_window is not None and Tk > sliding_window:
            right = 0 if causal else sliding_window - 1
            factors.append(Window(sliding_window - 1, right, "bottom_right" if Tq != Tk else None))
    elif isinstance(attention_mask, StructuredMask) and attention_mask.fits(Tq, Tk):
        factors, Tk = attention_mask.priors()
    else:
        mask = attention_mask.dense() if isinstance(attention_mask, StructuredMask) else attention_mask
        if mask.dtype != torch.bool:
            mask = _with_infinity(mask)
    cross = getattr(module, "is_cross_attention", False) or (regard_seen is not None and regard_seen.is_cross)
    step = Tq == 1 < Tk and causal and not cross  # of decoding
    if isinstance(problem, Factory):
        if step and mask is not None and mask.shape[-1] > 1 and concrete(mask):
            Tk = max(1, int(last_key(mask).max()))  # a static cache has empty keys after it
            mask = mask[..., :Tk]
        problem = problem.build(module, query, key, Tk, regard_seen, attention_mask, others.get("position_ids"))
    if step and problem is not None and follows_positions(problem.prior):
        # A decoding step: the query is at the position of the last key that it may read.
        if mask is not None and mask.shape[-1] > 1:
            Tk = keys_so_far(mask)
            mask = mask[..., :Tk]
        factors.append(Causal("bottom_right"))
    if attention_mask is not None and problem is not None and isinstance(problem.marginal, RowsAndColumns):
        factors += _without_padding_queries(module, attention_mask, mask, Tq, Tk)
    if Tk != key.shape[2]:
        key, value = key[:, :, :Tk], value[:, :, :Tk]
    check_lengths(problem, Tq, Tk)
    if retrofit is not None and retrofit.slopes is not None:
        factors.append(_distance_prior(retrofit.slopes, Tq, Tk, mask, bool(causal)))
    relative, bias = read_bias(position_bias, problem, _temperature(problem, retrofit), Tq, Tk)
    factors += relative
    if bias is not None:
        mask = bias if mask is None else _biased(mask, bias)
    if cu_seq_lens_q is not None:
        keys = cu_seq_lens_k if cu_seq_lens_k is not None else cu_seq_lens_q
        factors.append(Documents.from_cu_seqlens(cu_seq_lens_q, keys, query_length=Tq, key_length=Tk))
    return {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": mask,
        "dropout_p": dropout,
        "scale": scaling,
        "enable_gqa": query.shape[1] != key.shape[1],
        "problem": _combined(problem, factors, s_aux, retrofit),
        "softcap": softcap,
    }


def as_features_call(module: nn.Module, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `regard.attention` as those of a module of `regard.features`. Raises if there are none."""
    if retrofit_of(module) is not None:
        raise ValueError("attn_implementation: expected a Transport for a retrofitted model, got features")
    problem, mask, keep = call["problem"] or Transport(), call["attn_mask"], None
    causal: dict[str, Any] = {}
    for name, given in (("dropout", call["dropout_p"] or None), ("softcap", call["softcap"])):
        if given is not None:
            raise ValueError(f"{name}: expected none for attention by features, got {given!r}")
    if problem.marginal != Rows():
        raise ValueError("s_aux: expected a model without sinks for attention by features, got one with sinks")
    if mask is not None:
        key_mask_only = mask.dtype == torch.bool and mask.shape[1] == 1 and mask.shape[2] == 1
        if not key_mask_only:
            raise ValueError(
                "attention_mask: expected a causal or bidirectional model, padded or not, for attention by features, "
                f"got a mask {describe(mask)}"
            )
        keep = mask[:, 0, 0]
    for factor in () if problem.prior is None else problem.prior.factors():
        if isinstance(factor, Causal):
            causal = {"is_causal": True, "alignment": factor.alignment or "top_left"}
        elif isinstance(factor, Documents) and factor.key_ids is not None and not bool(factor.query_ids.any()):
            keep = factor.key_ids >= 0  # padding: all queries see the same keys
        else:
            raise ValueError(
                "attention_mask: expected a causal or bidirectional model, padded or not, for attention by features, "
                f"got {factor!r}"
            )
    batch = call["key"].shape[0]
    if keep is not None and keep.dim() == 2 and keep.shape[0] != batch:
        keep = keep.expand(batch, -1)
    return {name: call[name] for name in ("query", "key", "value", "scale", "enable_gqa")} | {"key_mask": keep} | causal


def _without_padding_queries(module: nn.Module, given: Tensor, mask: Tensor | None, Tq: int, Tk: int) -> list[Prior]:
    """With both marginals, the rows of padding must have no mass either. In self-attention a position that is masked
    for every query is padding; the prior returned here removes it as a query."""
    if Tq != Tk or getattr(module, "is_cross_attention", False):
        return []
    if mask is None:
        assert isinstance(given, StructuredMask)
        if given.padding is None:
            return []
        real = given.padding[:, :Tk]
    else:
        allowed = mask if mask.dtype == torch.bool else mask != -math.inf
        real = allowed.expand(*allowed.shape[:2], Tq, Tk).any(2).any(1)
    return [Documents(real.long() - 1, torch.zeros(Tk, dtype=torch.long, device=real.device))]


def _biased(mask: Tensor, bias: Tensor) -> Tensor:
    return torch.where(mask, bias, -math.inf) if mask.dtype == torch.bool else mask + bias


def _with_infinity(mask: Tensor) -> Tensor:
    """A float mask with -inf for masked entries, which transformers marks with the lowest number of the dtype."""
    return torch.where(mask <= torch.finfo(mask.dtype).min / 2, -math.inf, mask)


def _combined(
    problem: Transport | None, factors: list[Prior], sink: Tensor | None, retrofit: Retrofit | None
) -> Transport | None:
    """The problem with these additional priors, this sink and the learned parameters of `retrofit`."""
    if not factors and sink is None and retrofit is None:
        return problem
    problem = Transport() if problem is None else problem
    prior, marginal, temperature = problem.prior, problem.marginal, _temperature(problem, retrofit)
    for factor in factors:
        prior = factor if prior is None else prior * factor
    if sink is not None:
        if not _has_plain_rows(problem):
            raise ValueError(f"s_aux: expected a problem with plain Rows() for a model with sinks, got {problem!r}")
        marginal = Rows(sink=sink)
    if retrofit is not None and retrofit.null_weight is not None:
        if sink is not None:
            raise ValueError('learn: expected no "sink" for a model that passes sinks of its own (s_aux)')
        plain = _has_plain_rows(problem) and isinstance(problem.regularizer, KL)
        if not plain or isinstance(temperature, TemperatureRule):
            raise ValueError(
                f'learn: expected a problem with KL() and plain Rows() for "sink" (elsewhere a null key of weight 0 '
                f"has no gradient), got {problem!r}"
            )
        score = retrofit.sink_score(temperature)
        marginal = marginal if score is None else Rows(sink=score)
    return Transport(problem.regularizer, prior=prior, marginal=marginal, temperature=temperature)


def _temperature(problem: Transport | None, retrofit: Retrofit | None) -> Scalar | TemperatureRule:
    """The temperature of a problem with the learned factor of `retrofit`."""
    temperature = 1.0 if problem is None else problem.temperature
    if retrofit is None or retrofit.log_temperature is None:
        return temperature
    if isinstance(temperature, TemperatureRule):
        raise ValueError(f'learn: expected a problem with a temperature for "temperature", got {problem!r}')
    return retrofit.temperature(temperature)


def _has_plain_rows(problem: Transport) -> bool:
    rows = problem.marginal
    return isinstance(rows, Rows) and rows.mass == 1 and rows.sink is None and rows.relax is None


def _distance_prior(slopes: Tensor, Tq: int, Tk: int, mask: Tensor | None, causal: bool) -> Prior:
    """log pi = -slope * distance between positions of one sequence."""
    if Tq == Tk:
        return ALiBi(slopes)
    if not causal:
        raise ValueError(
            f'learn: expected queries and keys of one sequence for "bias", got {Tq} queries and {Tk} keys that are not '
            f"causal"
        )
    if mask is None:  # a cache whose last key is that of the last query
        return ALiBi(slopes, "bottom_right")
    # One step with a dense mask, or a static cache under torch.compile: the last key that a query may read is its own.
    allowed = mask if mask.dtype == torch.bool else mask > -math.inf
    keys = torch.arange(Tk, device=slopes.device)
    own = torch.where(allowed, keys, 0).amax(-1, keepdim=True)
    return Bias(-slopes[:, None, None] * (own - keys).abs())
