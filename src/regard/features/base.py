"""`Features`, the base class of the feature maps: checks of a call, the choice of the backend, and statistics."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from .._validate import autocast, check_device, check_tensors, describe, finite, fold, is_integer, leading_shape, number
from ..statistics import AuxOutput, requested
from . import fused, sums
from .sums import State

STATISTICS = ("lse", "first_key_mass", "mass", "key_mass")


class Features(nn.Module):
    """Base class of the feature maps. A module is called as (query, key, value, is_causal=False), [..., H, T, D] each.

    `chunk` is the number of causal rows whose weights PyTorch computes pair by pair (None: 64). It does not change the
    result, and the native engine ignores it. To define another map, override `features`.
    """

    def __init__(self, *, chunk: int | None = None) -> None:
        super().__init__()
        if chunk is not None and (not is_integer(chunk) or chunk < 1):
            raise ValueError(f"chunk: expected a positive int or None, got {describe(chunk)}")
        self.chunk = chunk

    def features(self, x: Tensor, scale: float | None) -> tuple[Tensor, Tensor | None]:
        """phi(x) for x [..., T, D] as features [..., T, M] times exp(log-scale).

        The log-scale is [..., T, 1] without gradient, or None where it is 0. Queries and keys each take the square
        root of `scale`, which is not negative."""
        raise NotImplementedError

    def log_constant(self) -> float:
        """The log of a constant factor of <phi(q), phi(k)> that `features` leaves out. Only `lse` depends on it."""
        return 0.0

    def kernel(self, shape: torch.Size) -> fused.Kernel | None:
        """The native engine's kernel of this map for queries of this shape, if there is one."""
        return None

    def begin_forward(self) -> None:
        """Called at the start of each `forward`; random features draw new directions here."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        key_mask: Tensor | None = None,
        alignment: str = "top_left",
        return_aux: object = None,
        backend: str = "auto",
    ) -> Any:
        """query [..., H, Tq, D], key [..., Hkv, Tk, D], value [..., Hkv, Tk, Dv] -> [..., H, Tq, Dv] in query's dtype.

        `is_causal`, `scale` and `enable_gqa` are as in `regard.attention`. `alignment="bottom_right"` aligns the last
        causal query with the last key. `key_mask` [Tk] or [B, Tk] is True where a key may be read; masked keys may hold
        NaN. With `return_aux=AuxRequest(...)` the result is (output, AuxOutput). Available are `lse` (the log of the
        denominator), `mass`, `first_key_mass` and `key_mass`; the other statistics need every single weight. `backend`
        is "auto", "native" or "torch"; a named backend that cannot serve the call raises and never falls back.
        """
        self.begin_forward()
        query, key, value = autocast(query, key, value)
        check_tensors(query, key, value)
        lead = leading_shape(query, key, value, enable_gqa)
        names = _checked(return_aux)
        Tq, Tk, Dv = query.shape[-2], key.shape[-2], value.shape[-1]
        offset = _offset(is_causal, alignment, Tq, Tk)
        kernel = self._native_kernel(backend, names, (query, key, value))
        q, k, v, keep = _folded(query, key, value, key_mask, lead)
        q, scale = _with_positive_scale(q, scale)
        if kernel is not None:
            rows = fused.attend(self, kernel, q, k, v, keep, scale=scale, causal=is_causal, offset=offset)
            return _squeezed(rows.to(query.dtype).reshape(*lead, Tq, Dv), query, key, value)

        q, k, v = _grouped(q, k, v, keep, apart="key_mass" in names)
        attend = functools.partial(sums.attend, self._map(scale), causal=is_causal, offset=offset, chunk=self.chunk)
        if "first_key_mass" in names:  # one more column of values: 1 for the first key
            v = torch.cat([v, (torch.arange(Tk, device=v.device) == 0).to(v)[:, None].expand(*v.shape[:3], 1)], -1)
        key_mass = None
        if "key_mass" in names:  # the gradient of one more column of values is the sum of the weights on each key
            tap = torch.zeros(*v.shape[:3], 1, dtype=v.dtype, device=v.device, requires_grad=True)
            with torch.enable_grad():
                rows, _, _ = attend(q.detach(), k.detach(), tap, keep)
                (key_mass,) = torch.autograd.grad(rows.sum(), tap)
        rows, log_mass, _ = attend(q, k, v, keep)
        rows, log_mass = rows.reshape(*lead, Tq, rows.shape[-1]), log_mass.reshape(*lead, Tq)
        out = _squeezed(rows[..., :Dv].to(query.dtype), query, key, value)
        if return_aux is None:
            return out
        found = {"lse": log_mass + self.log_constant(), "mass": (log_mass > -math.inf).to(log_mass.dtype)}
        if "first_key_mass" in names:
            found["first_key_mass"] = rows[..., Dv].detach()
        if key_mass is not None:
            found["key_mass"] = key_mass.reshape(*lead, Tk)
        return out, AuxOutput(**{name: _squeezed(found[name], query, key, value) for name in names})

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: State | None = None,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """The next rows of a causal sequence: (output, state after them). `state` is the one that the last step gave.

        Any number of tokens may be given at once, with as many queries as keys. The cost of a token does not depend on
        how many came before it.
        """
        query, key, value = autocast(query, key, value)
        check_tensors(query, key, value)
        lead = leading_shape(query, key, value, enable_gqa)
        if query.shape[-2] != key.shape[-2]:
            raise ValueError(f"key: expected {query.shape[-2]} rows, one for each query, got {list(key.shape)}")
        q, k, v, keep = _folded(query, key, value, key_mask, lead)
        _check_state(state, k, value)
        q, scale = _with_positive_scale(q, scale)
        q, k, v = _grouped(q, k, v, keep)
        rows, _, state = sums.attend(
            self._map(scale), q, k, v, keep, causal=True, offset=0, chunk=self.chunk, past=state
        )
        out = rows.to(query.dtype).reshape(*lead, query.shape[-2], value.shape[-1])
        return _squeezed(out, query, key, value), state

    def _map(self, scale: float | None) -> sums.FeatureMap:
        return lambda x: self.features(x, scale)

    def _native_kernel(self, backend: str, names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> fused.Kernel | None:
        """The engine's kernel if the engine computes the call, None if PyTorch does."""
        if backend not in ("auto", "native", "torch"):
            raise ValueError(f'backend: expected "auto", "native" or "torch", got {describe(backend)}')
        if backend == "torch":
            return None
        kernel = reason = None
        if torch.compiler.is_compiling():
            reason = "does not serve torch.compile, which needs PyTorch's operations"
        elif names:
            reason = "computes no statistics of features"
        elif (kernel := self.kernel(tensors[0].shape)) is None:
            reason = f"has no kernel for the features of {type(self).__name__}"
        else:
            reason = fused.declined(kernel, tensors)
        if reason is None:
            return kernel
        if backend == "native":
            raise NotImplementedError(f'backend "native" cannot serve this problem: {reason}')
        return None


def _checked(return_aux: object) -> tuple[str, ...]:
    """The names of the statistics that are requested; raises if features do not have one of them."""
    names = requested(return_aux)
    for name in names:
        if name not in STATISTICS:
            raise ValueError(
                f"return_aux: {name} needs every single weight, which attention by features never computes; "
                f"available are {', '.join(STATISTICS)}"
            )
    return names


def _offset(is_causal: bool, alignment: str, Tq: int, Tk: int) -> int:
    """Causal query i sees the keys up to i + offset."""
    if alignment not in ("top_left", "bottom_right"):
        raise ValueError(f'alignment: expected "top_left" or "bottom_right", got {describe(alignment)}')
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal: expected a bool, got {describe(is_causal)}")
    offset = Tk - Tq if alignment == "bottom_right" else 0
    if is_causal and offset < 0:
        raise ValueError(f"alignment: expected no more queries than keys, got Tq={Tq}, Tk={Tk}")
    return offset


def _folded(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, lead: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """query [B, H, Tq, D], key [B, Hkv, Tk, D], value [B, Hkv, Tk, Dv] and the mask as [B|1, 1, Tk, 1]."""
    heads = max(t.shape[-3] if t.dim() > 2 else 1 for t in (key, value))
    q, k, v = fold(query, lead, lead[-1]), fold(key, lead, heads), fold(value, lead, heads)
    if key_mask is None:
        return q, k, v, None
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        raise TypeError(f"key_mask: expected a bool tensor, True where a key may be read, got {describe(key_mask)}")
    check_device("key_mask", key_mask, query.device)
    Tk = key.shape[-2]
    shape = (*lead[:-1], Tk)
    if key_mask.shape != shape and key_mask.shape != (Tk,):
        raise ValueError(f"key_mask: expected shape {[Tk]} or {list(shape)}, got {list(key_mask.shape)}")
    return q, k, v, key_mask.reshape(-1, 1, Tk, 1)


def _with_positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float | None]:
    """A negative scale as a positive one of -q: exp(-|scale| qk) is the kernel of -q."""
    if scale is None:
        return q, None
    scale = number("scale", scale, "a finite number", finite)
    return (-q, -scale) if scale < 0 else (q, scale)


def _grouped(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, apart: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """query [B, Hkv, G, Tq, D], key and value [B, Hkv, Tk, .] with 0 in masked keys.

    `apart` repeats keys and values for each query head, so that G is 1."""
    H, heads = q.shape[1], k.shape[1]
    if apart and heads != H:
        k, v, heads = k.repeat_interleave(H // heads, 1), v.repeat_interleave(H // heads, 1), H
    if keep is not None:
        k, v = torch.where(keep, k, 0.0), torch.where(keep, v, 0.0)
    return q.unflatten(1, (heads, H // heads)), k, v


def _check_state(state: State | None, k: Tensor, value: Tensor) -> None:
    if state is None:
        return
    if not isinstance(state, State) or state.total.shape[:2] != k.shape[:2]:
        raise ValueError(f"state: expected what step gave for [B, Hkv] = {list(k.shape[:2])}, got {describe(state)}")
    if state.total.shape[-1] != value.shape[-1] + 1:
        raise ValueError(f"value: expected Dv={state.total.shape[-1] - 1}, as before, got {list(value.shape)}")


def _squeezed(result: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Without the head dimension that inputs [T, D] do not have."""
    return result.squeeze(0) if max(query.dim(), key.dim(), value.dim()) == 2 else result
