"""How a function is called and what it returns: the conventions of PyTorch's function, FlexAttention, functions on
packed sequences, and transformers' attention functions.

A convention passes the inputs of a case and reads the result as (output [B, H, Tq, Dv], lse [B, H, Tq] or None). A
case that it has no arguments for raises `Inexpressible`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .._validate import describe
from ..priors import Alignment, Causal, Documents, Window
from ..problem import Free, Rows, TemperatureRule, Transport
from ..regularizers import KL
from .calls import Call, prior_matrix
from .cases import Inputs

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Inexpressible(Exception):
    """The convention has no argument for something in the case."""


class Convention:
    """Passes inputs, reads results."""

    name: str
    alignment: Alignment | None = None  # of a causal prior that has none
    passed: frozenset[str] = frozenset(("attn_mask", "is_causal", "scale", "enable_gqa", "sink"))

    def arguments(self, inputs: Inputs) -> Arguments:
        raise NotImplementedError

    def results(self, found: Any, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """The output and, if the function returns one, lse."""
        B, H, Tq, _ = inputs.query.shape
        out, rest = (found[0], found[1:]) if isinstance(found, tuple | list) and found else (found, ())
        if not isinstance(out, Tensor):
            raise TypeError(f"the function returned {describe(found)}, expected a tensor or a tuple with one in front")
        lse = None
        for other in rest:
            candidate = other if isinstance(other, Tensor) else getattr(other, "lse", None)
            if isinstance(candidate, Tensor) and candidate.is_floating_point() and lse is None:
                if candidate.shape == (B, H, Tq):
                    lse = candidate
                elif candidate.shape == (B, H, Tq, 1):
                    lse = candidate[..., 0]
        return out, lse


class SDPA(Convention):
    """As `torch.nn.functional.scaled_dot_product_attention`, by keyword, with `sink=` [H] beside its arguments."""

    name = "sdpa"
    alignment: Alignment | None = "top_left"

    def arguments(self, inputs: Inputs) -> Arguments:
        _refuse_lengths(inputs, self.name)
        given = {
            "attn_mask": inputs.attn_mask,
            "is_causal": inputs.is_causal or None,
            "scale": inputs.scale,
            "enable_gqa": inputs.enable_gqa or None,
            "sink": inputs.sink,
        }
        kwargs = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
        return (), kwargs | {name: value for name, value in given.items() if value is not None}


class Flex(Convention):
    """As `flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa)`. Masks, priors, softcap and
    temperature are passed as mods."""

    name = "flex"
    alignment: Alignment | None = "top_left"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.wants_lse = _names_argument(function, "return_lse")

    def arguments(self, inputs: Inputs) -> Arguments:
        from torch.nn.attention.flex_attention import create_block_mask

        _refuse_lengths(inputs, self.name)
        problem, query = inputs.problem, inputs.query
        if not isinstance(problem.regularizer, KL) or problem.marginal != Rows():
            raise Inexpressible("flex: mods change scores of a softmax only")
        temperature, cap = problem.temperature, inputs.softcap
        if isinstance(temperature, Tensor | TemperatureRule):
            raise Inexpressible("flex: expected a temperature that is a number")
        B, H, Tq, _ = query.shape
        Tk = inputs.key.shape[2]
        mask, bias = inputs.attn_mask, None
        if mask is not None and mask.dtype != torch.bool:
            mask, bias = None, mask.expand(B, H, Tq, Tk)
        prior = _dense_prior(inputs)  # [B, H, Tq, Tk]
        keep = prior > 0 if mask is None else (prior > 0) & mask
        weighted = prior.where(keep, 1.0).log().to(query.dtype)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            score = score if cap is None else cap * torch.tanh(score / cap)
            score = score if bias is None else score + bias[b, h, i, j]
            return score / temperature + weighted[b, h, i, j]

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return keep[b, h, i, j]

        kwargs: dict[str, Any] = {"scale": inputs.scale, "enable_gqa": inputs.enable_gqa}
        if bool(keep.all()):
            kwargs["block_mask"] = None
        else:
            kwargs["block_mask"] = create_block_mask(mask_mod, B, H, Tq, Tk, device=str(query.device))
        changes = cap is not None or bias is not None or temperature != 1 or bool((weighted != 0).any())
        kwargs["score_mod"] = score_mod if changes else None
        if self.wants_lse:
            kwargs["return_lse"] = True
        return (query, inputs.key, inputs.value), kwargs


class Varlen(Convention):
    """As flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=,
    causal=, window_size=, softcap=, sink=): sequences packed to [total, H, D]; causal is aligned bottom-right."""

    name = "varlen"
    alignment: Alignment | None = "bottom_right"

    def arguments(self, inputs: Inputs) -> Arguments:
        mask, query, key = inputs.attn_mask, inputs.query, inputs.key
        B, _, Tq, _ = query.shape
        Tk = key.shape[2]
        query_lengths = torch.full((B,), Tq, device=query.device)
        key_lengths = torch.full((B,), Tk, device=query.device)
        if inputs.lengths is not None:
            query_lengths = key_lengths = inputs.lengths
        elif mask is not None:
            is_padding = mask.dtype == torch.bool and mask.shape[1:3] == (1, 1)
            key_lengths = mask[:, 0, 0].sum(-1) if is_padding else key_lengths
            if not is_padding or not torch.equal(mask[:, 0, 0], _prefix(key_lengths, Tk)) or inputs.is_causal:
                raise Inexpressible("varlen: masks are passed as lengths of sequences")
        kwargs: dict[str, Any] = {}
        if inputs.scale is not None:
            kwargs["softmax_scale"] = inputs.scale
        if inputs.is_causal:
            kwargs["causal"] = True
        for factor in () if inputs.problem.prior is None else inputs.problem.prior.factors():
            if isinstance(factor, Window):
                kwargs["window_size"] = tuple(-1 if side is None else side for side in (factor.left, factor.right))
        if inputs.softcap is not None:
            kwargs["softcap"] = inputs.softcap
        if inputs.sink is not None:
            kwargs["sink"] = inputs.sink
        packed = (_pack(query, query_lengths), _pack(key, key_lengths), _pack(inputs.value, key_lengths))
        lengths = (_boundaries(query_lengths), _boundaries(key_lengths))
        return (*packed, *lengths, int(query_lengths.max()), int(key_lengths.max())), kwargs

    def results(self, found: Any, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        B, H, Tq, _ = inputs.query.shape
        out, rest = (found[0], found[1:]) if isinstance(found, tuple | list) and found else (found, ())
        lengths = torch.full((B,), Tq) if inputs.lengths is None else inputs.lengths
        total = int(lengths.sum())
        if not isinstance(out, Tensor) or out.dim() != 3 or out.shape[:2] != (total, H):
            raise TypeError(f"the function returned {describe(out)}, expected the shape [{total}, {H}, Dv]")
        lse = None
        for other in rest:
            if isinstance(other, Tensor) and other.is_floating_point() and other.shape in ((H, total), (total, H)):
                packed = other.mT if other.shape == (H, total) else other
                lse = _unpack(packed[..., None], lengths, Tq)[..., 0]
        return _unpack(out, lengths, Tq), lse


class Transformers(Convention):
    """As an attention function of Hugging Face transformers: (module, query, key, value, attention_mask, scaling=,
    dropout=, sliding_window=, softcap=, s_aux=) -> (output [B, Tq, H, Dv], weights). The causal mask and windows are in
    the mask, as transformers passes them."""

    name = "transformers"
    alignment: Alignment | None = "bottom_right"

    def __init__(self, function: Callable[..., Any], boolean: bool = False) -> None:
        self.boolean = boolean

    def arguments(self, inputs: Inputs) -> Arguments:
        _refuse_lengths(inputs, self.name)
        query = inputs.query
        keep, bias = _dense_prior(inputs, structural=True) > 0, None
        if inputs.attn_mask is not None:
            if inputs.attn_mask.dtype == torch.bool:
                keep = keep & inputs.attn_mask
            else:
                bias = inputs.attn_mask
        if not bool(keep.any(-1).all()):
            raise Inexpressible("transformers: its masks leave every query at least one key")
        lowest = torch.finfo(query.dtype).min
        mask = torch.where(keep, 0.0, lowest).to(query.dtype)
        if bias is not None:
            if not bool(bias.isfinite().all()) or bool((bias <= torch.finfo(torch.float16).min).any()):
                raise Inexpressible("transformers: a mask has finite numbers, or its lowest one for a masked key")
            mask = torch.where(keep, mask + bias, lowest)
        module = _module(inputs)
        kwargs: dict[str, Any] = {"dropout": 0.0, "scaling": inputs.scale or query.shape[-1] ** -0.5}
        for factor in () if inputs.problem.prior is None else inputs.problem.prior.factors():
            if isinstance(factor, Window) and factor.left is not None:
                kwargs["sliding_window"] = factor.left + 1
        if inputs.softcap is not None:
            kwargs["softcap"] = inputs.softcap
        if inputs.sink is not None:
            kwargs["s_aux"] = inputs.sink
        masked = mask if bias is not None or not bool(keep.all()) else None
        if masked is not None and masked.shape[1] != 1 and bool((keep == keep[:, :1]).all()) and bias is None:
            masked = masked[:, :1]
        return (module, query, inputs.key, inputs.value, masked), kwargs

    def results(self, found: Any, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        out = found[0] if isinstance(found, tuple | list) and found else found
        if not isinstance(out, Tensor) or out.dim() != 4:
            raise TypeError(f"the function returned {describe(out)}, expected [B, Tq, H, Dv]")
        return out.transpose(1, 2), None


class Custom(Convention):
    """A function of the caller that maps inputs to (args, kwargs)."""

    name = "your own"
    alignment: Alignment | None = "top_left"

    def __init__(self, convert: Callable[..., Any]) -> None:
        self.convert = convert

    def arguments(self, inputs: Inputs) -> Arguments:
        _refuse_lengths(inputs, self.name)
        found = self.convert(inputs)
        is_pair = isinstance(found, tuple) and len(found) == 2
        if not is_pair or not isinstance(found[0], tuple | list) or not isinstance(found[1], dict):
            raise TypeError(f"convention: expected it to return (args, kwargs), got {describe(found)}")
        return tuple(found[0]), found[1]


def convention_for(given: object, function: Callable[..., Any]) -> Convention:
    made: dict[str, Callable[[], Convention]] = {
        "sdpa": SDPA,
        "flex": lambda: Flex(function),
        "varlen": Varlen,
        "transformers": lambda: Transformers(function),
    }
    if isinstance(given, str) and given in made:
        return made[given]()
    if callable(given):
        return Custom(given)
    expected = ", ".join(f'"{name}"' for name in made)
    raise ValueError(f"convention: expected {expected} or a function of a case, got {describe(given)}")


def taken_arguments(function: Callable[..., Any], convention: Convention) -> frozenset[str]:
    """Which of the arguments that a case may have the function takes, as far as its signature says."""
    if not isinstance(convention, SDPA):
        return convention.passed
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # PyTorch's own function has none
        return convention.passed
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return convention.passed
    return convention.passed & {parameter.name for parameter in parameters}


def _names_argument(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _refuse_lengths(inputs: Inputs, name: str) -> None:
    if inputs.lengths is not None:
        raise Inexpressible(f"{name}: lengths of sequences are not passed")


def _dense_prior(inputs: Inputs, structural: bool = False) -> Tensor:
    """The prior as a matrix [B, H, Tq, Tk]. `structural`: only causal masks, windows and documents."""
    problem = inputs.problem
    factors = () if problem.prior is None else problem.prior.factors()
    if structural:
        factors = tuple(factor for factor in factors if isinstance(factor, Causal | Window | Documents))
    query, key, value = (t.detach().cpu().double() for t in (inputs.query, inputs.key, inputs.value))
    call = Call(query, key, value, Transport(marginal=Free())).with_factors(list(factors))
    return prior_matrix(call).to(inputs.query.device)


def _module(inputs: Inputs) -> nn.Module:
    """A stand-in for the attention module of a model."""
    module = nn.Module()
    module.is_causal = False  # type: ignore[assignment]
    module.num_key_value_groups = inputs.query.shape[1] // inputs.key.shape[1]  # type: ignore[assignment]
    module.layer_idx = 0  # type: ignore[assignment]
    module.scaling = inputs.scale or inputs.query.shape[-1] ** -0.5  # type: ignore[assignment]
    module.config = SimpleNamespace(_attn_implementation="eager")  # type: ignore[assignment]
    if inputs.sink is not None:
        module.__dict__["sinks"] = inputs.sink  # gpt-oss reads the sinks of the module
    return module.eval()


def _prefix(lengths: Tensor, T: int) -> Tensor:
    return torch.arange(T, device=lengths.device) < lengths[:, None]


def _pack(tensor: Tensor, lengths: Tensor) -> Tensor:
    """[B, H, T, D] without padding as [total, H, D]."""
    keep = _prefix(lengths, tensor.shape[2])
    return tensor.transpose(1, 2)[keep]


def _unpack(packed: Tensor, lengths: Tensor, T: int) -> Tensor:
    """[total, H, D] as [B, H, T, D], with zeros for padding."""
    keep = _prefix(lengths, T).to(packed.device)
    index = (keep.flatten().cumsum(0) - 1).clamp(min=0).view_as(keep)
    rows = packed[index] if len(packed) else packed.new_zeros(*keep.shape, *packed.shape[1:])
    return rows.where(keep[..., None, None], 0.0).transpose(1, 2)


def _boundaries(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
