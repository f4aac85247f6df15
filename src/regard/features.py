"""Attention in linear time: kernels of low rank in place of exp(score).

A feature map phi >= 0 gives query i and key j the weight <phi(q_i), phi(k_j)>, and the product becomes associative:

    out_i = sum_j <phi(q_i), phi(k_j)> v_j / sum_j <phi(q_i), phi(k_j)>  =  phi(q_i) S / phi(q_i) z,
    S = sum_j phi(k_j) v_j^T,  z = sum_j phi(k_j):  M numbers per column of v, however many keys.

`LinearAttention` (elu + 1), `ReLUFeatures` and `Performer` differ in phi alone. The rows of their plans sum to 1, but
they are not optima of a transport problem, so there is no `Transport` for them. The mean of `Performer`'s kernel over
draws is exp(scale <q, k>): numerator and denominator are unbiased, their quotient is in the limit of many features.

Causal rows go by chunks: within a chunk the weights are computed pair by pair, all keys before it are in S and z. In
training, features that outnumber the inputs are computed again in backward; time and memory are O(T) both ways. On the
CPU the native engine does it all in one kernel (csrc/linear.h); what it declines, PyTorch does, by the code below.

Exponentials are kept in range without an epsilon. phi is held as features in [0, 1] times exp(log-scale), one per row.
A query's own cancels. Keys' are taken relative to the largest one *so far*, and what was summed is rescaled when a
larger one comes: a future key cannot push a past one into underflow, and a cut into chunks or steps changes nothing.
A row without admissible keys, or whose weights are all 0, gives 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_legacy_batchedtensor  # type: ignore[import-not-found]
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ._compat import forward_mode
from ._validate import autocast, check_device, check_tensors, describe, finite, fold, is_integer, leading_shape, number
from .backends.native import features as engine
from .statistics import AuxOutput, requested

CHUNK = 64  # causal rows whose weights are computed pair by pair
WORKING = 2**19  # features held at once, of all heads: what stays in the cache

STATISTICS = ("lse", "first_key_mass", "mass", "key_mass")


class State(NamedTuple):
    """The keys and values so far, as `step` carries them: sum_j exp(log-scale_j - shift) phi_j [v_j, 1]^T."""

    total: Tensor  # [B, Hkv, M, Dv + 1]
    shift: Tensor  # [B, Hkv, 1, 1], the largest log-scale so far; -inf before the first key


class Features(nn.Module):
    """What the feature maps share: called as (query, key, value, is_causal=False), [..., H, T, D] each.

    `chunk` is the number of causal rows that PyTorch computes together (None: from the batch; the native engine has a
    size of its own); it does not change the result. A map of your own gives `features`.
    """

    def __init__(self, *, chunk: int | None = None) -> None:
        super().__init__()
        if chunk is not None and (not is_integer(chunk) or chunk < 1):
            raise ValueError(f"chunk: expected a positive int or None, got {describe(chunk)}")
        self.chunk = chunk

    def features(self, x: Tensor, scale: float | None) -> tuple[Tensor, Tensor | None]:
        """phi(x) for x [..., T, D] as features [..., T, M] times exp(log-scale), [..., T, 1] without gradient, or None
        where it is 0. Each side of the product takes the root of `scale`."""
        raise NotImplementedError

    def log_constant(self) -> float:
        """The log of a constant factor of <phi(q), phi(k)> that `features` leaves out: the plan does not see it."""
        return 0.0

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
        """query [..., H, Tq, D], key [..., Hkv, Tk, D], value [..., Hkv, Tk, Dv] -> [..., H, Tq, Dv], query's dtype.

        `is_causal`, `scale` and `enable_gqa` as in `regard.attention`; `alignment` "bottom_right" makes causal queries
        the last ones of the keys' sequence. `key_mask` [Tk] or [B, Tk] is True where a key may be read; others may hold
        NaN. With `return_aux=AuxRequest(...)` the result is (output, AuxOutput); defined are `lse` (the log of the
        denominator), `mass`, `first_key_mass` and `key_mass`: the others need every single weight. `backend` is "auto",
        "native" or "torch"; one that is named and cannot serve the call raises, and never falls back.
        """
        query, key, value = autocast(query, key, value)
        check_tensors(query, key, value)
        lead = leading_shape(query, key, value, enable_gqa)
        names = _checked(return_aux)
        if alignment not in ("top_left", "bottom_right"):
            raise ValueError(f'alignment: expected "top_left" or "bottom_right", got {describe(alignment)}')
        if not isinstance(is_causal, bool):
            raise TypeError(f"is_causal: expected a bool, got {describe(is_causal)}")
        Tq, Tk, Dv = query.shape[-2], key.shape[-2], value.shape[-1]
        offset = Tk - Tq if alignment == "bottom_right" else 0
        if is_causal and offset < 0:
            raise ValueError(f"alignment: expected no more queries than keys, got Tq={Tq}, Tk={Tk}")
        if self._choose(backend, names, query, key, value) == "native":
            rows = self._fused(query, key, value, key_mask, lead, scale, is_causal, offset)
            return _squeezed(rows.to(query.dtype).reshape(*lead, Tq, Dv), query, key, value)
        q, k, v, keep = self._prepare(query, key, value, key_mask, lead, "key_mass" in names)
        if "first_key_mass" in names:  # one more column of values: 1 for the first key
            v = torch.cat([v, (torch.arange(Tk, device=v.device) == 0).to(v)[:, None].expand(*v.shape[:3], 1)], -1)
        key_mass = None
        if "key_mass" in names:  # another column's gradient is the sum of the weights that it gets
            tap = torch.zeros(*v.shape[:3], 1, dtype=v.dtype, device=v.device, requires_grad=True)
            with torch.enable_grad():
                rows, _, _ = self._attend(q.detach(), k.detach(), tap, keep, scale, is_causal, offset)
                (key_mass,) = torch.autograd.grad(rows.sum(), tap)
        rows, log_mass, _ = self._attend(q, k, v, keep, scale, is_causal, offset)
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
        """The next rows of a causal sequence: (output, state after them). `state` is what the step before gave.

        Any number of tokens may come at once, as many queries as keys; each costs the same, however many came before.
        """
        query, key, value = autocast(query, key, value)
        check_tensors(query, key, value)
        lead = leading_shape(query, key, value, enable_gqa)
        if query.shape[-2] != key.shape[-2]:
            raise ValueError(f"key: expected {query.shape[-2]} rows, one for each query, got {list(key.shape)}")
        q, k, v, keep = self._prepare(query, key, value, key_mask, lead, False)
        if state is not None and (not isinstance(state, State) or state.total.shape[:2] != k.shape[:2]):
            raise ValueError(
                f"state: expected what step gave for [B, Hkv] = {list(k.shape[:2])}, got {describe(state)}"
            )
        if state is not None and state.total.shape[-1] != v.shape[-1] + 1:
            raise ValueError(f"value: expected Dv={state.total.shape[-1] - 1}, as before, got {list(value.shape)}")
        rows, _, state = self._attend(q, k, v, keep, scale, True, 0, state)
        out = rows.to(query.dtype).reshape(*lead, query.shape[-2], value.shape[-1])
        return _squeezed(out, query, key, value), state

    # --- the native engine ------------------------------------------------------------------------------------------

    def _choose(self, backend: str, names: tuple[str, ...], *tensors: Tensor) -> str:
        if backend not in ("auto", "native", "torch"):
            raise ValueError(f'backend: expected "auto", "native" or "torch", got {describe(backend)}')
        if backend == "torch":
            return backend
        reason = self._declined(names, tensors)
        if reason is not None and backend == "native":
            raise NotImplementedError(f'backend "native" cannot serve this problem: {reason}')
        return "native" if reason is None else "torch"

    def _declined(self, names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> str | None:
        """Why the native engine does not serve a call, or None."""
        if torch.compiler.is_compiling():
            return "is not for torch.compile, which takes PyTorch's operations apart"
        if names:
            return "computes no statistics of features"
        if _kernel(self) is None:
            return f"has no kernel for the features of {type(self).__name__}"
        if torch._C._are_functorch_transforms_active() or forward_mode():
            return "serves neither transforms of torch.func nor forward mode"
        if torch._C._len_torch_dispatch_stack():
            return "is not seen by modes that watch every operator, as tracing does"
        if any(type(t) not in (Tensor, nn.Parameter) or not t.is_cpu for t in tensors):
            return "runs on plain CPU tensors only"
        projection = getattr(self, "projection", None)
        if projection is not None and projection.requires_grad:
            return "has no gradient of the directions"
        return engine.unavailable()

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        lead: tuple[int, ...],
        scale: float | None,
        causal: bool,
        offset: int,
    ) -> Tensor:
        """Rows [B, H, Tq, Dv] by the native engine, in the compute dtype."""
        kernel, usual, directed = _kernel(self)  # type: ignore[misc]
        q, k, v = _folded(query, key, value, lead)
        keep = _keep(key_mask, lead, key.shape[-2], query)
        scale = usual(q.shape[3]) if scale is None else number("scale", scale, "a finite number", finite)
        if scale < 0:
            q, scale = -q, -scale
        projection = None
        if directed:
            dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
            projection = self.directed(q, dtype)  # type: ignore[attr-defined]
        seen = offset + q.shape[2] if causal else k.shape[2]
        if k.shape[2] > seen:  # keys that nobody sees
            k, v, keep = k[:, :, :seen], v[:, :, :seen], None if keep is None else keep[:, :, :seen]
        call = engine.Call(kernel, scale, causal, offset)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            return _Fused.apply(self, call, q, k, v, projection, keep)  # type: ignore[return-value]
        return engine.forward(call, q, k, v, projection, keep)[0]

    # --- the sums ---------------------------------------------------------------------------------------------------

    def _prepare(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, lead: tuple[int, ...], apart: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """query [B, Hkv, G, Tq, D], key and value [B, Hkv, Tk, .] and the mask [B|1, 1, Tk, 1] (masked keys read as 0).
        `apart` gives each query head keys of its own."""
        q, k, v = _folded(query, key, value, lead)
        H, heads = q.shape[1], k.shape[1]
        if apart and heads != H:
            k, v, heads = k.repeat_interleave(H // heads, 1), v.repeat_interleave(H // heads, 1), H
        keep = _keep(key_mask, lead, key.shape[-2], query)
        if keep is not None:
            k, v = torch.where(keep, k, 0.0), torch.where(keep, v, 0.0)
        return q.unflatten(1, (heads, H // heads)), k, v, keep

    def _attend(
        self,
        q: Tensor,  # [B, Hkv, G, Tq, D]
        k: Tensor,  # [B, Hkv, Tk, D]
        v: Tensor,  # [B, Hkv, Tk, Dv]
        keep: Tensor | None,  # [B|1, 1, Tk, 1]
        scale: float | None,
        causal: bool,
        offset: int,
        past: State | None = None,
    ) -> tuple[Tensor, Tensor, State]:
        """Rows [B, Hkv, G, Tq, Dv], log of their mass [B, Hkv, G, Tq] and the state after the last key, in the compute
        dtype. Causal query i sees the state and the keys up to i + offset."""
        if scale is not None:
            scale = number("scale", scale, "a finite number", finite)
            if scale < 0:  # exp(-|s| qk) is the kernel of -q
                q, scale = -q, -scale
        B, Hkv, G, Tq, _ = q.shape
        if causal and v.shape[2] > offset + Tq:  # keys that nobody sees
            k, v = k[:, :, : offset + Tq], v[:, :, : offset + Tq]
            keep = None if keep is None else keep[:, :, : offset + Tq]
        Tk, Dv = v.shape[2:]
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        M = self.features(k[..., :0, :].to(dtype), scale)[0].shape[-1]
        size = self.chunk or CHUNK
        many = size * max(1, WORKING // (max(1, B * Hkv * G) * M * size))  # rows at once
        total = torch.zeros(B, Hkv, M, Dv + 1, dtype=dtype, device=q.device)
        state: State = past or State(total, torch.full((B, Hkv, 1, 1), -math.inf, dtype=dtype, device=q.device))
        # Features that are more than the inputs are computed again in backward, from the state before their chunks.
        again = (
            q.shape[-1] < M
            and torch.is_grad_enabled()
            and any(t.requires_grad for t in (q, k, v, *state))
            and max(Tq, Tk) > many
            and not torch.compiler.is_compiling()
            and not torch._C._are_functorch_transforms_active()
        )

        def call(chunk: Callable[..., Any], *args: Any) -> Any:
            if again:
                return checkpoint(chunk, *args, use_reentrant=False, preserve_rng_state=False)
            return chunk(*args)

        # Cut with split: the gradient of many slices would be as many tensors of full length, T^2 numbers to add.
        before = offset if causal else Tk  # keys that every query sees
        first, own = _cut(before, many), _cut(Tk - before, many, size)
        ks, vs = k.split(first + own, 2), v.split(first + own, 2)
        kept = [None] * len(ks) if keep is None else keep.split(first + own, 2)
        for n in range(len(first)):
            state = call(self._absorb, state, ks[n], vs[n], kept[n], scale)
        own += _cut(Tq - (Tk - before), many) if causal else _cut(Tq, many)  # queries that see all keys
        rows: list[Tensor] = []
        masses: list[Tensor] = []
        for n, queries in enumerate(q.split(own, 3), len(first)):
            if n < len(ks):
                out, mass, state = call(self._chunks, state, queries, ks[n], vs[n], kept[n], scale, size)
            else:
                out, mass = call(self._read, state, queries, scale)
            rows.append(out)
            masses.append(mass)
        if not rows:
            return q.new_zeros(B, Hkv, G, 0, Dv, dtype=dtype), q.new_zeros(B, Hkv, G, 0, dtype=dtype), state
        if len(rows) == 1:
            return rows[0], masses[0], state
        return torch.cat(rows, 3), torch.cat(masses, 3), state

    def _absorb(self, state: State, k: Tensor, v: Tensor, keep: Tensor | None, scale: float | None) -> State:
        """The state with these keys in it."""
        phi, level = self._keys(state, k, keep, scale)
        v = _with_ones(v, state)
        if level is None:
            return State(state.total + phi.mT @ v, torch.zeros_like(state.shift))
        highest = level.amax(2, keepdim=True)
        return _joined(state, State(phi.mT @ (v * (level - _finite(highest)).exp()), highest))

    def _read(self, state: State, q: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """Rows of queries that see just what is in the state."""
        phi, own = self.features(q.flatten(2, 3).to(state.total.dtype), scale)
        sums = phi @ state.total
        return self._quotient(sums, state.shift, own, q.shape)

    def _chunks(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scale: float | None, size: int
    ) -> tuple[Tensor, Tensor, State]:
        """Rows of queries that see the state and, causally, these keys; and the state with them.

        Chunks of `size` rows go together, R at a time, as far as they are whole.
        """
        G, rows = q.shape[2:4]
        size = size if k.shape[2] == rows and rows % size == 0 else rows
        R = rows // size
        phi_q, own = self.features(q.flatten(2, 3).to(state.total.dtype), scale)
        phi_k, level = self._keys(state, k, keep, scale)
        phi_q = phi_q.unflatten(2, (G, R, size)).transpose(2, 3).flatten(3, 4)  # [B, Hkv, R, G * size, M]
        phi_k = phi_k.unflatten(2, (R, -1))  # [B, Hkv, R, size, M]
        v = _with_ones(v, state).unflatten(2, (R, -1))
        pairs = phi_q @ phi_k.mT
        if level is None:
            state, before = self._scan(state, phi_k.mT @ v, None)
            pairs = pairs.unflatten(3, (G, size)).tril().flatten(3, 4)
            sums, top = pairs @ v + phi_q @ before.total, before.shift
        else:
            level = level.unflatten(2, (R, -1))
            highest = level.amax(3, keepdim=True)
            state, before = self._scan(state, phi_k.mT @ (v * (level - _finite(highest)).exp()), highest)
            # relative to the largest key that the row sees
            top = torch.cummax(level, 3).values.maximum(before.shift)
            if top.shape[3] < size:
                top = torch.cat([top, top[:, :, :, -1:].expand(-1, -1, -1, size - top.shape[3], -1)], 3)
            seen = torch.ones(size, level.shape[3], dtype=torch.bool, device=q.device).tril()
            ratio = torch.where(seen, level.mT - _finite(top), -math.inf).exp()
            carried = (before.shift - _finite(top)).exp()
            if G > 1:
                ratio, carried, top = (t.repeat(1, 1, 1, G, 1) for t in (ratio, carried, top))
            sums = (pairs * ratio) @ v + (phi_q @ before.total) * carried
        sums, top = (_in_order(t, G) for t in (sums, top.expand(*sums.shape[:-1], 1)))
        out, mass = self._quotient(sums, top, own, q.shape)
        return out, mass, state

    def _scan(self, state: State, sums: Tensor, highest: Tensor | None) -> tuple[State, State]:
        """The state after chunks with these sums [B, Hkv, R, M, Dv + 1], relative to their highest log-scales
        [B, Hkv, R, 1, 1]; and the states before each."""
        totals, shifts = [], []
        for n, chunk in enumerate(sums.unbind(2)):
            totals.append(state.total)
            shifts.append(state.shift)
            if highest is None:
                state = State(state.total + chunk, torch.zeros_like(state.shift))
            else:
                state = _joined(state, State(chunk, highest[:, :, n]))
        if len(totals) == 1:
            return state, State(totals[0].unsqueeze(2), shifts[0].unsqueeze(2))
        return state, State(torch.stack(totals, 2), torch.stack(shifts, 2))

    def _keys(self, state: State, k: Tensor, keep: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor | None]:
        """Features and log-scales of keys; a masked one has neither."""
        phi, level = self.features(k.to(state.total.dtype), scale)
        if keep is not None:
            phi = torch.where(keep, phi, 0.0)
            level = None if level is None else torch.where(keep, level, -math.inf)
        return phi, level

    def _quotient(self, sums: Tensor, shift: Tensor, own: Tensor | None, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Values by mass [B, Hkv, G, Tq, Dv], and the mass's log; 0 and -inf where there is none."""
        mass = sums[..., -1:]
        good = mass >= torch.finfo(mass.dtype).tiny
        out = sums[..., :-1] / torch.where(good, mass, math.inf)
        log = torch.where(good, mass, 1.0).log() + _finite(shift)
        log = torch.where(good, log if own is None else log + own, -math.inf)
        return out.unflatten(2, shape[2:4]), log.squeeze(-1).unflatten(2, shape[2:4])


class _Fused(torch.autograd.Function):
    """apply(module, call, q, k, v, projection, keep) -> rows. The second derivative, and a gradient under a transform,
    are those of PyTorch's path."""

    @staticmethod
    def forward(ctx: Any, module: Features, call: engine.Call, *tensors: Any) -> Tensor:  # type: ignore[override]
        outputs = engine.forward(call, *tensors)
        q, k, v, projection, keep = tensors
        if projection is not None:
            projection = projection.clone()  # a redraw before backward writes new ones into it
        ctx.module, ctx.call = module, call
        ctx.save_for_backward(q, k, v, projection, keep, *outputs)
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        q, k, v, projection, keep, *outputs = ctx.saved_tensors
        call, needed = ctx.call, ctx.needs_input_grad[2:5]
        batched = is_legacy_batchedtensor(grad)  # by is_grads_batched
        transformed = torch._C._are_functorch_transforms_active() or forward_mode()
        if not (torch.is_grad_enabled() or batched or transformed):
            found = engine.backward(call, q, k, v, projection, keep, tuple(outputs), grad, needed)
            return (None, None, *found, None, None)
        wanted = [t for t, need in zip((q, k, v), needed, strict=True) if need]

        def rows(*varied: Tensor) -> Tensor:
            given = iter(varied)
            q_k_v = (next(given) if need else t for t, need in zip((q, k, v), needed, strict=True))
            kwargs = {
                "scale": call.scale,
                "enable_gqa": True,
                "key_mask": None if keep is None else keep.expand(q.shape[0], -1, -1, -1)[:, 0, :, 0],
                "alignment": "bottom_right" if call.causal and call.offset else "top_left",
                "backend": "torch",
            }
            buffers = {} if projection is None else {"projection": projection}
            return functional_call(ctx.module, buffers, (*q_k_v, call.causal), kwargs).to(grad.dtype)

        if batched:  # which torch.func does not take
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in wanted]
                found = iter(torch.autograd.grad(rows(*leaves), leaves, grad))
        else:
            _, pull = torch.func.vjp(rows, *wanted)  # type: ignore[misc]
            found = iter(pull(grad))
        return (None, None, *(next(found) if need else None for need in needed), None, None)


def _folded(query: Tensor, key: Tensor, value: Tensor, lead: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, Tq, D], [B, Hkv, Tk, D], [B, Hkv, Tk, Dv]"""
    heads = max(t.shape[-3] if t.dim() > 2 else 1 for t in (key, value))
    return fold(query, lead, lead[-1]), fold(key, lead, heads), fold(value, lead, heads)


def _keep(key_mask: Tensor | None, lead: tuple[int, ...], Tk: int, query: Tensor) -> Tensor | None:
    """The mask as [B|1, 1, Tk, 1]."""
    if key_mask is None:
        return None
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        raise TypeError(f"key_mask: expected a bool tensor, True where a key may be read, got {describe(key_mask)}")
    check_device("key_mask", key_mask, query.device)
    shape = (*lead[:-1], Tk)
    if key_mask.shape != shape and key_mask.shape != (Tk,):
        raise ValueError(f"key_mask: expected shape {[Tk]} or {list(shape)}, got {list(key_mask.shape)}")
    return key_mask.reshape(-1, 1, Tk, 1)


def _cut(length: int, many: int, size: int = 1) -> list[int]:
    """Lengths of the pieces: `many`, what is left in whole chunks of `size`, and the rest."""
    pieces = [many] * (length // many)
    left = length % many
    return [*pieces, *(n for n in (left - left % size, left % size) if n > 0)] if length > 0 else []


def _joined(one: State, other: State) -> State:
    """The keys of both."""
    shift = one.shift.maximum(other.shift)
    scale = (one.shift - _finite(shift)).exp(), (other.shift - _finite(shift)).exp()
    return State(one.total * scale[0] + other.total * scale[1], shift)


def _in_order(t: Tensor, G: int) -> Tensor:
    """[B, Hkv, R, G * size, x] -> [B, Hkv, G * R * size, x]"""
    return t.unflatten(3, (G, -1)).transpose(2, 3).flatten(2, 4)


def _with_ones(v: Tensor, state: State) -> Tensor:
    """[v, 1]: the last column sums to the denominator."""
    v = v.to(state.total.dtype)
    return torch.cat([v, v.new_ones(1).expand(*v.shape[:3], 1)], -1)


def _finite(shift: Tensor) -> Tensor:
    """0 for the -inf of no keys, whose difference with itself would be NaN."""
    return torch.where(shift == -math.inf, 0.0, shift)


def _squeezed(result: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Without the head dimension that inputs [T, D] do not have."""
    return result.squeeze(0) if max(query.dim(), key.dim(), value.dim()) == 2 else result


def _checked(return_aux: object) -> tuple[str, ...]:
    names = requested(return_aux)
    for name in names:
        if name not in STATISTICS:
            raise ValueError(
                f"return_aux: {name} needs every single weight, which attention by features never has; "
                f"defined are {', '.join(STATISTICS)}"
            )
    return names


# --- the maps ---------------------------------------------------------------------------------------------------------


class _EluPlusOne(torch.autograd.Function):
    """x + 1 or exp(x); elu(x) + 1 in so many words has no digits left where x is very negative. The slope is
    min(phi, 1): one pass, where PyTorch's own derivatives of the parts take eight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.maximum(x + 1, x.clamp(max=0).exp())  # exp(x) >= x + 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.saved_tensors[0].clamp(max=1)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # type: ignore[override]
        return tangent * ctx.saved_tensors[0].clamp(max=1)


class LinearAttention(Features):
    """phi(x) = elu(x) + 1: the linear transformer (Katharopoulos et al. 2020). `scale` is 1 unless given."""

    def features(self, x: Tensor, scale: float | None) -> tuple[Tensor, Tensor | None]:
        if scale is not None:
            x = x * math.sqrt(scale)
        if torch.compiler.is_compiling():  # which takes no function with a jvp, and fuses the passes by itself
            return torch.where(x > 0, x + 1, x.clamp(max=0).exp()), None
        return _EluPlusOne.apply(x), None


def directions(
    num_features: int, dim: int, *, orthogonal: bool = True, generator: torch.Generator | None = None
) -> Tensor:
    """Random rows [num_features, dim] in float64, each standard normal; `orthogonal` within blocks of dim of them.

    An orthogonal block is Haar-distributed: Q of a Gaussian matrix's QR, once the signs of R's diagonal, an accident of
    the algorithm, are made positive (Mezzadri 2007). Each row gets the length of a Gaussian vector of its own (chi):
    with rows all sqrt(dim) long the features would be biased.
    """
    device = "cpu" if generator is None else generator.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator, device=device)

    if not orthogonal:
        return normal(num_features, dim)
    Q, R = torch.linalg.qr(normal(-(-num_features // dim), dim, dim))
    Q = Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return Q.flatten(0, 1)[:num_features] * normal(num_features, dim).norm(dim=-1, keepdim=True)


class _Random(Features):
    """Features of `num_features` random projections (see `directions`), or of the input itself if there are none.

    The directions are a buffer: saved, kept in float32 at least, used in the input's dtype and on its device.
    """

    projection: Tensor | None  # [M, D]
    calls: Tensor

    def __init__(
        self,
        dim: int | None,
        num_features: int | None,
        orthogonal: bool,
        redraw_interval: int | None,
        generator: torch.Generator | None,
        chunk: int | None,
    ) -> None:
        super().__init__(chunk=chunk)
        for name, value in (("dim", dim), ("num_features", num_features), ("redraw_interval", redraw_interval)):
            if value is not None and (not is_integer(value) or value < 1):
                raise ValueError(f"{name}: expected a positive int, got {describe(value)}")
        self.dim, self.num_features, self.orthogonal = dim, num_features, orthogonal
        self.redraw_interval = redraw_interval
        if dim is None or num_features is None:
            self.register_buffer("projection", None)
            return
        self.register_buffer("projection", torch.empty(num_features, dim, dtype=torch.float32))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))  # in training, since the last redraw
        self.redraw(generator)

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw the directions anew (None: from PyTorch's generator). What was computed with the old ones, a `State`
        among it, does not go with the new ones."""
        if self.projection is None or self.dim is None or self.num_features is None:
            raise RuntimeError(f"redraw: {type(self).__name__}() has no random directions")
        drawn = directions(self.num_features, self.dim, orthogonal=self.orthogonal, generator=generator)
        self.projection.copy_(drawn)
        self.calls.zero_()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Not while a backward pass repeats a forward one (activation checkpointing): it must see the same directions.
        if self.training and self.redraw_interval is not None and torch._C._current_graph_task_id() == -1:
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    "redraw_interval: expected None under torch.compile; call redraw() between the steps of training"
                )
            if self.calls >= self.redraw_interval:
                self.redraw()
            self.calls += 1
        return super().forward(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        kept = self.projection
        super()._apply(fn, recurse)
        now = self.projection
        if kept is not None and now is not None and now.dtype in (torch.float16, torch.bfloat16):
            self.projection = kept.to(now.device)  # rounded so far they are not what was drawn
        return self

    def project(self, x: Tensor, scale: float | None) -> Tensor:
        """sqrt(scale) <w_r, x>, or sqrt(scale) x without directions."""
        w = self.directed(x, x.dtype)
        if w is None:
            return x if scale is None else x * math.sqrt(scale)
        return x @ (w if scale is None else w * math.sqrt(scale)).mT

    def directed(self, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The directions [M, D] for x, if there are any."""
        if self.projection is None:
            return None
        if x.shape[-1] != self.dim:
            raise ValueError(f"query: expected head size D={self.dim}, as {self!r}, got {list(x.shape)}")
        return self.projection.to(x.device, dtype)

    def log_constant(self) -> float:
        return 0.0 if self.num_features is None else -math.log(self.num_features)

    def extra_repr(self) -> str:
        return "" if self.dim is None else f"dim={self.dim}, num_features={self.num_features}"


class Performer(_Random):
    """FAVOR+ (Choromanski et al. 2021): phi(x)_r = exp(<w_r, x'> - |x'|^2 / 2) / sqrt(m), x' = x sqrt(scale), whose
    <phi(q), phi(k)> has the mean exp(scale <q, k>) over draws of w. `scale` is 1/sqrt(D) unless given.

    `num_features`: m (None: near D log D). With `redraw_interval` the directions are drawn anew after so many calls in
    training mode; `redraw()` does it at once. `orthogonal=False` draws them independently: more variance.
    """

    def __init__(
        self,
        dim: int,
        num_features: int | None = None,
        *,
        orthogonal: bool = True,
        redraw_interval: int | None = None,
        generator: torch.Generator | None = None,
        chunk: int | None = None,
    ) -> None:
        if not is_integer(dim) or dim < 1:
            raise ValueError(f"dim: expected a positive int, the head size, got {describe(dim)}")
        if num_features is None:
            num_features = dim * max(1, round(math.log(dim)))  # in whole blocks
        super().__init__(dim, num_features, orthogonal, redraw_interval, generator, chunk)

    def features(self, x: Tensor, scale: float | None) -> tuple[Tensor, Tensor | None]:
        scale = 1 / math.sqrt(x.shape[-1]) if scale is None else scale
        logits = self.project(x, scale)
        half_square = x.square().sum(-1, keepdim=True) * (scale / 2)
        level = (logits.detach().amax(-1, keepdim=True) - half_square).detach()
        return logits.sub_(half_square + level).exp_(), level


class ReLUFeatures(_Random):
    """phi(x) = relu(x), or with `dim` and `num_features` relu of as many random projections, whose <phi(q), phi(k)> / m
    has the mean |q| |k| (sin t + (pi - t) cos t) / 2 pi, t the angle: the arc-cosine kernel (Cho and Saul 2009).

    This is O(T); relu(q k^T) with normalised rows is not. A query that no feature sees gives 0. `scale` is 1 unless
    given, and changes `lse` only.
    """

    def __init__(
        self,
        dim: int | None = None,
        num_features: int | None = None,
        *,
        orthogonal: bool = True,
        redraw_interval: int | None = None,
        generator: torch.Generator | None = None,
        chunk: int | None = None,
    ) -> None:
        if (dim is None) != (num_features is None) or (dim is None and redraw_interval is not None):
            raise ValueError(
                "ReLUFeatures: expected dim and num_features, or neither and no redraw_interval, "
                f"got dim={describe(dim)}, num_features={describe(num_features)}, redraw_interval={redraw_interval!r}"
            )
        super().__init__(dim, num_features, orthogonal, redraw_interval, generator, chunk)

    def features(self, x: Tensor, scale: float | None) -> tuple[Tensor, Tensor | None]:
        return self.project(x, scale).relu(), None


def _kernel(module: Features) -> tuple[str, Callable[[int], float], bool] | None:
    """The native engine's name for a module's map, its usual scale and whether it has directions: of the classes here,
    not of one derived from them that has another map."""
    kind = type(module)
    if kind.features is LinearAttention.features:
        return "elu", lambda _: 1.0, False
    if isinstance(module, _Random) and type(module).project is _Random.project:
        if kind.features is Performer.features:
            return "exp", lambda D: 1 / math.sqrt(D), True
        if kind.features is ReLUFeatures.features:
            return "relu", lambda _: 1.0, True
    return None
