"""The native engine in place of PyTorch's own CPU kernel: `accelerated`, and the implementation "regard" of
`torch.nn.attention.activate_flash_attention_impl`.

`F.scaled_dot_product_attention` chooses a kernel. On the CPU its fast choice is one operator, `FORWARD`, whose gradient
is the operator `BACKWARD`. While regard is active, both names lead to the functions `_forward` and `_backward` below.
They run under PyTorch's autograd, autocast, transforms and compiler. Their results have the dtype, shape and memory
layout of PyTorch's own. A call that the engine does not serve, or that would not be faster on it, is passed to
PyTorch's kernel.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ._compat import CPU_ATTENTION as FORWARD
from ._compat import CPU_ATTENTION_BACKWARD as BACKWARD
from ._compat import Override, offer_flash_attention
from ._validate import compute_dtype
from .backends import BACKENDS
from .backends.native.engine import REMEDY, missing
from .form import Form

__all__ = ["Calls", "accelerated", "calls", "offer"]

_ENGINE = BACKENDS["native"]
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_PRICE = ("peak", "rest")  # the engine's logsumexp: base 2, in two parts
_LOWEST = -1e30  # a logsumexp below it has no digits left for the number of keys
_Stock = Callable[..., Any]  # PyTorch's kernel


@dataclass
class Calls:
    """How many calls PyTorch made since regard was imported: those that the engine served, and those that went on to
    PyTorch's kernel, by the reason."""

    forward: int = 0
    backward: int = 0
    stock: Counter[str] = field(default_factory=Counter)
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(self, which: str, reason: str | None = None) -> None:
        with self._lock:  # += is not atomic
            if reason is None:
                setattr(self, which, getattr(self, which) + 1)
            else:
                self.stock[reason] += 1


calls = Calls()


# --- the two kernels --------------------------------------------------------------------------------------------------


def _forward(
    stock: _Stock,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp [B, H, Tq], the latter in the layout [B, Tq, H]."""
    form, reason = _form(query, key, value, dropout_p, is_causal, attn_mask, scale)
    if form is not None and small(query, key, backward=False):
        form, reason = None, "small"
    if form is None:
        calls.count("stock", reason)
        return stock(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    results = _ENGINE.forward(form, ("out", "lse"))
    calls.count("forward")
    out, lse = results["out"], results["lse"]
    if out.dtype != query.dtype or not query.is_contiguous():
        out = torch.empty_like(query).copy_(out)
    if attn_mask is not None:
        lse.masked_fill_(lse == -math.inf, 0.0)  # PyTorch's number for a row without keys
    return out, _by_position(lse)


def _backward(
    stock: _Stock,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value, in the layout [B, T, H, D]."""
    form, reason = _form(query, key, value, dropout_p, is_causal, attn_mask, scale)
    if form is not None and small(query, key, backward=True):
        form, reason = None, "small"
    elif form is not None and not _results_of(query, grad_out, out, logsumexp):
        form, reason = None, "not the results of a forward pass"
    if form is None:
        calls.count("stock", reason)
        arguments = (grad_out, query, key, value, out, logsumexp, dropout_p, is_causal)
        return stock(*arguments, attn_mask=attn_mask, scale=scale)
    if attn_mask is not None and bool((logsumexp < _LOWEST).any()):
        price = _ENGINE.forward(form, _PRICE)
    else:
        price = _price(logsumexp)
    slots = ("query", "key", "value")
    found = _ENGINE.backward(form, slots, price | {"out": out}, {"out": grad_out})
    calls.count("backward")
    return tuple(_by_position(found[slot]) for slot in slots)


def _price(logsumexp: Tensor) -> dict[str, Tensor]:
    """The logsumexp as the engine saves it. Two parts, so that base 2 costs no digits; both are inf where it is beyond
    the range in base 2, which makes the engine use float64."""
    exact = logsumexp.double() * math.log2(math.e)
    peak = exact.to(logsumexp.dtype)
    return {"peak": peak, "rest": (exact - peak).to(logsumexp.dtype).masked_fill_(peak == math.inf, math.inf)}


def _by_position(tensor: Tensor) -> Tensor:
    """The same numbers, with heads and positions exchanged in memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


# --- which calls are served -------------------------------------------------------------------------------------------


def _form(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
) -> tuple[Form | None, str]:
    """The problem of a call, or None and why PyTorch's kernel serves it."""
    shape, kv_shape = query.shape, key.shape
    if dropout_p != 0:
        return None, "dropout"
    if len(shape) != 4 or len(kv_shape) != 4 or value.shape != kv_shape:
        return None, "shape"
    B, H, Tq, D = shape
    _, Hkv, Tk, _ = kv_shape
    if 0 in shape or 0 in kv_shape or kv_shape[0] != B or kv_shape[3] != D or H % Hkv:
        return None, "shape"
    if query.dtype not in _TYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        return None, "dtype"
    if query.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        return None, "layout"
    if scale is None:
        scale = 1 / math.sqrt(D)
    elif not math.isfinite(scale):
        return None, "scale"
    form = Form(query=query, key=key, value=value, scale=scale, right=0 if is_causal else None)
    if attn_mask is not None:
        if attn_mask.dim() == 2:
            attn_mask = attn_mask[None, None]
        fits = attn_mask.dim() == 4 and all(n in (1, m) for n, m in zip(attn_mask.shape, (B, H, Tq, Tk), strict=True))
        if is_causal or not fits or attn_mask.dtype not in (torch.float32, query.dtype) or not attn_mask.is_cpu:
            return None, "mask"
        form.score_bias = attn_mask
    names = ("out", "lse")
    reason = _ENGINE.unsupported(form, names) or _ENGINE.unwise(form, ("out",))
    return (form, "") if reason is None else (None, reason)


def small(query: Tensor, key: Tensor, backward: bool) -> bool:
    """Whether PyTorch's kernel is as fast or faster, by the number of multiply-adds in the scores. A call of the engine
    takes longer to begin, its backward pass needs a tile of queries, and one query per key head is bound by memory."""
    (B, H, Tq, D), (_, Hkv, Tk, _) = query.shape, key.shape
    work, half = B * H * Tq * Tk * D, query.dtype.itemsize == 2
    if backward:
        return Tq < (16 if half else 32) or work < (2**16 if half else 2**21)
    if half:
        return work < 2**17
    return work < (2**21 if Tq * H == Hkv else 2**19)


def _results_of(query: Tensor, grad_out: Tensor, out: Tensor, logsumexp: Tensor) -> bool:
    """Whether the tensors of a backward call have the shapes and dtypes that its forward call gave."""
    same = out.shape == query.shape == grad_out.shape and out.dtype == query.dtype == grad_out.dtype
    return same and logsumexp.shape == query.shape[:3] and logsumexp.dtype == compute_dtype(query.dtype)


# --- activation -------------------------------------------------------------------------------------------------------


class Activation:
    """Regard in place of PyTorch's kernel, until `remove`. Several may exist: the last one that goes restores
    PyTorch's."""

    _lock = threading.Lock()
    _number = 0
    _override: Override | None = None

    def __init__(self) -> None:
        if (reason := missing()) is not None:
            raise RuntimeError(f"regard cannot take the place of PyTorch's attention kernel: {reason}. {REMEDY}")
        with self._lock:
            if Activation._number == 0:
                Activation._override = Override({FORWARD: _forward, BACKWARD: _backward})
            Activation._number += 1
        self._active = True

    def remove(self) -> None:
        """Restore PyTorch's kernel, unless another activation exists. A second call does nothing."""
        with self._lock:
            if not self._active:
                return
            self._active = False
            Activation._number -= 1
            if Activation._number == 0 and Activation._override is not None:
                Activation._override.remove()
                Activation._override = None


@contextlib.contextmanager
def accelerated() -> Iterator[Calls]:
    """A context in which PyTorch's own attention runs on the native engine, wherever it would use its fast CPU kernel.

    `F.scaled_dot_product_attention`, `nn.MultiheadAttention`, `nn.TransformerEncoder` and every model that uses them
    are then faster, eager or compiled, in training and inference, without a change to their code. Results are those
    of PyTorch up to rounding. The context holds for all threads of the process; contexts may be nested, and PyTorch's
    kernel is restored when the last one ends. It gives the counts `regard.acceleration.calls`.

    `torch.nn.attention.activate_flash_attention_impl("regard")` is the same without an end, or until
    `restore_flash_attention_impl()`.
    """
    activation = Activation()
    try:
        yield calls
    finally:
        activation.remove()


def offer() -> None:
    """Register "regard" with PyTorch, which calls `Activation` when a user activates it."""
    offer_flash_attention("regard", Activation)
