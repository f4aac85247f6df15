"""Attention by features in PyTorch operations: sums over keys, chunk by chunk, in O(T) time and memory.

Causal rows are computed by chunks: within a chunk the weights are computed pair by pair, and all keys before the chunk
are summed in a `State`. When a gradient is needed and there are more features than inputs, the features are computed
again in the backward pass instead of being stored.

Exponentials stay in range without an epsilon. phi is stored as features in [0, 1] times exp(log-scale), with one
log-scale per row. A query's log-scale cancels. The log-scales of keys are taken relative to the largest one *so far*,
and the sums are rescaled when a larger one comes. So a future key cannot make a past one underflow, and the result does
not depend on where the sequence is cut into chunks or steps. A row without admissible keys, or whose weights are all 0,
gives 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._compat import transforms_active
from .._validate import compute_dtype

CHUNK = 64  # causal rows whose weights are computed pair by pair
WORKING = 2**19  # features computed at once, over all heads, so that they stay in the cache

# phi(x) for x [..., T, D]: features [..., T, M], and log-scales [..., T, 1] or None where they are all 0
FeatureMap = Callable[[Tensor], tuple[Tensor, Tensor | None]]


class State(NamedTuple):
    """The sum over the keys and values so far, sum_j exp(log-scale_j - shift) phi_j [v_j, 1]^T; `step` carries it."""

    total: Tensor  # [B, Hkv, M, Dv + 1]
    shift: Tensor  # [B, Hkv, 1, 1], the largest log-scale so far; -inf before the first key


def attend(
    features: FeatureMap,
    q: Tensor,  # [B, Hkv, G, Tq, D]
    k: Tensor,  # [B, Hkv, Tk, D]
    v: Tensor,  # [B, Hkv, Tk, Dv]
    keep: Tensor | None,  # [B|1, 1, Tk, 1]
    *,
    causal: bool,
    offset: int,
    chunk: int | None = None,
    past: State | None = None,
) -> tuple[Tensor, Tensor, State]:
    """Rows [B, Hkv, G, Tq, Dv], the log of their mass [B, Hkv, G, Tq] and the state after the last key, in the compute
    dtype. Causal query i sees the past state and the keys up to i + offset."""
    B, Hkv, G, Tq, _ = q.shape
    if causal:
        k, v, keep = first_keys(k, v, keep, offset + Tq)
    Tk, Dv = v.shape[2:]
    dtype = compute_dtype(q.dtype)
    M = features(k[..., :0, :].to(dtype))[0].shape[-1]
    size = chunk or CHUNK
    many = size * max(1, WORKING // (max(1, B * Hkv * G) * M * size))  # rows at once
    total = torch.zeros(B, Hkv, M, Dv + 1, dtype=dtype, device=q.device)
    state: State = past or State(total, torch.full((B, Hkv, 1, 1), -math.inf, dtype=dtype, device=q.device))
    recompute = (
        q.shape[-1] < M
        and torch.is_grad_enabled()
        and any(t.requires_grad for t in (q, k, v, *state))
        and max(Tq, Tk) > many
        and not torch.compiler.is_compiling()
        and not transforms_active()
    )

    def call(function: Callable[..., Any], *args: Any) -> Any:
        if recompute:
            return checkpoint(function, features, *args, use_reentrant=False, preserve_rng_state=False)
        return function(features, *args)

    # Cut with split: the gradients of many slices would be as many tensors of full length, T^2 numbers to add.
    before = offset if causal else Tk  # keys that every query sees
    first, own = _lengths(before, many), _lengths(Tk - before, many, size)
    ks, vs = k.split(first + own, 2), v.split(first + own, 2)
    kept = [None] * len(ks) if keep is None else keep.split(first + own, 2)
    for n in range(len(first)):
        state = call(_absorb, state, ks[n], vs[n], kept[n])
    own += _lengths(Tq - (Tk - before), many) if causal else _lengths(Tq, many)  # queries that see all keys
    rows: list[Tensor] = []
    masses: list[Tensor] = []
    for n, queries in enumerate(q.split(own, 3), len(first)):
        if n < len(ks):
            out, mass, state = call(_causal_rows, state, queries, ks[n], vs[n], kept[n], size)
        else:
            out, mass = call(_read, state, queries)
        rows.append(out)
        masses.append(mass)
    if not rows:
        return q.new_zeros(B, Hkv, G, 0, Dv, dtype=dtype), q.new_zeros(B, Hkv, G, 0, dtype=dtype), state
    if len(rows) == 1:
        return rows[0], masses[0], state
    return torch.cat(rows, 3), torch.cat(masses, 3), state


def first_keys(k: Tensor, v: Tensor, keep: Tensor | None, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Without the keys from `count` on, which no causal query sees."""
    if k.shape[2] <= count:
        return k, v, keep
    return k[:, :, :count], v[:, :, :count], None if keep is None else keep[:, :, :count]


def _lengths(length: int, many: int, size: int = 1) -> list[int]:
    """Lengths of the pieces: as often as possible `many`, then whole chunks of `size`, then the rest."""
    pieces = [many] * (length // many)
    left = length % many
    return [*pieces, *(n for n in (left - left % size, left % size) if n > 0)] if length > 0 else []


def _absorb(features: FeatureMap, state: State, k: Tensor, v: Tensor, keep: Tensor | None) -> State:
    """The state with these keys added."""
    phi, level = _key_features(features, state, k, keep)
    v = _with_ones(v, state)
    if level is None:
        return State(state.total + phi.mT @ v, torch.zeros_like(state.shift))
    highest = level.amax(2, keepdim=True)
    return _joined(state, State(phi.mT @ (v * (level - _finite(highest)).exp()), highest))


def _read(features: FeatureMap, state: State, q: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of queries that see the state and no other key."""
    phi, own = features(q.flatten(2, 3).to(state.total.dtype))
    return _quotient(phi @ state.total, state.shift, own, q.shape)


def _causal_rows(
    features: FeatureMap, state: State, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, size: int
) -> tuple[Tensor, Tensor, State]:
    """Rows of queries that see the state and, causally, these keys; and the state with these keys added.

    If the rows are a whole number R of chunks of `size`, the R chunks are computed together; otherwise they are one.
    """
    G, rows = q.shape[2:4]
    size = size if k.shape[2] == rows and rows % size == 0 else rows
    R = rows // size
    phi_q, own = features(q.flatten(2, 3).to(state.total.dtype))
    phi_k, level = _key_features(features, state, k, keep)
    phi_q = phi_q.unflatten(2, (G, R, size)).transpose(2, 3).flatten(3, 4)  # [B, Hkv, R, G * size, M]
    phi_k = phi_k.unflatten(2, (R, -1))  # [B, Hkv, R, size, M]
    v = _with_ones(v, state).unflatten(2, (R, -1))
    pairs = phi_q @ phi_k.mT
    if level is None:
        state, before = _scan(state, phi_k.mT @ v, None)
        pairs = pairs.unflatten(3, (G, size)).tril().flatten(3, 4)
        sums, top = pairs @ v + phi_q @ before.total, before.shift
    else:
        level = level.unflatten(2, (R, -1))
        highest = level.amax(3, keepdim=True)
        state, before = _scan(state, phi_k.mT @ (v * (level - _finite(highest)).exp()), highest)
        top = torch.cummax(level, 3).values.maximum(before.shift)  # the largest log-scale that the row sees
        if top.shape[3] < size:
            top = torch.cat([top, top[:, :, :, -1:].expand(-1, -1, -1, size - top.shape[3], -1)], 3)
        seen = torch.ones(size, level.shape[3], dtype=torch.bool, device=q.device).tril()
        ratio = torch.where(seen, level.mT - _finite(top), -math.inf).exp()
        carried = (before.shift - _finite(top)).exp()
        if G > 1:
            ratio, carried, top = (t.repeat(1, 1, 1, G, 1) for t in (ratio, carried, top))
        sums = (pairs * ratio) @ v + (phi_q @ before.total) * carried
    sums, top = (_in_order(t, G) for t in (sums, top.expand(*sums.shape[:-1], 1)))
    out, mass = _quotient(sums, top, own, q.shape)
    return out, mass, state


def _scan(state: State, sums: Tensor, highest: Tensor | None) -> tuple[State, State]:
    """Add R chunks one after the other: the state after all of them, and the states before each.

    `sums` [B, Hkv, R, M, Dv + 1] are relative to the chunks' highest log-scales [B, Hkv, R, 1, 1]."""
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


def _key_features(features: FeatureMap, state: State, k: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Features and log-scales of keys: 0 and -inf where a key is masked."""
    phi, level = features(k.to(state.total.dtype))
    if keep is not None:
        phi = torch.where(keep, phi, 0.0)
        level = None if level is None else torch.where(keep, level, -math.inf)
    return phi, level


def _quotient(sums: Tensor, shift: Tensor, own: Tensor | None, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Rows [B, Hkv, G, Tq, Dv] = sums of values over their mass, and the log of the mass; 0 and -inf without mass.

    `own` is the queries' log-scale, which only the log of the mass depends on."""
    mass = sums[..., -1:]
    good = mass >= torch.finfo(mass.dtype).tiny
    out = sums[..., :-1] / torch.where(good, mass, math.inf)
    log = torch.where(good, mass, 1.0).log() + _finite(shift)
    log = torch.where(good, log if own is None else log + own, -math.inf)
    return out.unflatten(2, shape[2:4]), log.squeeze(-1).unflatten(2, shape[2:4])


def _joined(one: State, other: State) -> State:
    """The state of the keys of both."""
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
    """0 in place of -inf (no keys yet), because -inf minus -inf would be NaN."""
    return torch.where(shift == -math.inf, 0.0, shift)
