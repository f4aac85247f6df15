"""Exact weights on chosen keys, and which keys a query may read: what the recorder adds to attention's statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import hf
from ..form import Form
from ..operator import attention
from ..plan import weights_at
from ..priors import Documents, Prior, Window
from ..problem import Rows, Transport
from ..statistics import AuxRequest
from .layers import PATTERNS

_PLAN = ("query", "key", "attn_mask", "scale", "enable_gqa", "problem", "softcap")


def plan_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `regard.attention` on which the plan depends: all but the values and the dropout."""
    return {name: call[name] for name in _PLAN}


def pattern_weights(plan: dict[str, Any], lse: Tensor | None, place: hf.Place) -> dict[str, Tensor]:
    """The weights [B, H, Tq] of the channels PATTERNS; NaN where a query has no such key."""
    query, first = plan["query"], place.first
    B, H, Tq, _ = query.shape
    none = torch.full((B, H, Tq), torch.nan, dtype=torch.float32, device=query.device)
    if Tq != plan["key"].shape[2] or place.is_cross:  # a cache, or the keys of another sequence
        return dict.fromkeys(PATTERNS, none)
    own = torch.arange(Tq, device=query.device)
    begins = own[None] == (torch.zeros_like(own)[None] if first is None else first.to(own.device))  # [B|1, Tq]
    near = weights_at(index=torch.stack([own, (own - 1).clamp(min=0)], -1), **plan).float()
    previous = torch.where(begins[:, None], torch.nan, near[..., 1])
    induction = None if lse is None else _induction_weights(plan, lse, place.tokens, begins)
    induction = none if induction is None else induction
    return {"self_token": near[..., 0], "previous_token": previous, "induction": induction}


def _induction_weights(plan: dict[str, Any], lse: Tensor, tokens: Tensor | None, begins: Tensor) -> Tensor | None:
    """The mass on the keys that follow an earlier copy of the query's token; None where it is not defined.

    A key belongs to the "document" of the token before it, and a query to that of its own token. The mass is then the
    ratio of two normalizers: over the keys of the query's document, and over all keys.
    """
    problem = plan["problem"] or Transport()
    rows = isinstance(problem.marginal, Rows) and problem.marginal.relax is None and problem.marginal.mass == 1
    if tokens is None or not rows:
        return None
    tokens = tokens.to(lse.device)
    before = torch.where(begins, -1, tokens.roll(1, 1))  # the token before each key, in its own sequence
    copies = with_prior(problem, Documents(tokens, before))
    # Only keys up to the query's own: what follows a later copy is not induction.
    causal = with_prior(copies, Window(None, 0))
    past = Transport(copies.regularizer, prior=causal.prior, marginal=Rows(), temperature=copies.temperature)
    restricted: dict[str, Any] = {**plan, "problem": past}
    chosen = attention(**restricted, value=plan["key"][..., :1], return_aux=AuxRequest(lse=True))[1].lse
    assert chosen is not None
    return torch.where(chosen > -torch.inf, (chosen - lse).exp(), torch.nan)


def with_prior(problem: Transport, prior: Prior) -> Transport:
    """The problem with one more factor of its prior."""
    product = prior if problem.prior is None else problem.prior * prior
    return Transport(problem.regularizer, prior=product, marginal=problem.marginal, temperature=problem.temperature)


def sees_first_key(form: Form, first: Tensor | None = None) -> Tensor:
    """Which queries may read the first key of their sequence (broadcasts to [B, H, Tq]). A window may hide it, and a
    cache may have dropped it. `first` as in `Place`."""
    B, H, Tq, _ = form.shape
    assert form.query is not None
    device = form.query.device
    if first is None:
        mask = form.cut(slice(0, B), slice(0, H), slice(0, Tq), slice(0, 1)).admissible(Tq, 1, device)
        if mask is None:
            return torch.ones(Tq, dtype=torch.bool, device=device)
        return mask.expand(*mask.shape[:-2], Tq, 1)[..., 0]
    seen = torch.zeros(B, H, Tq, dtype=torch.bool, device=device)
    for b, row in enumerate(first.expand(B, Tq)):
        keys, lengths = row.unique_consecutive(return_counts=True)
        stops = lengths.cumsum(0).tolist()
        for key, start, stop in zip(keys.tolist(), [0, *stops], stops, strict=False):
            if key >= 0:
                block = form.cut(slice(b, b + 1), slice(0, H), slice(start, stop), slice(key, key + 1))
                mask = block.admissible(stop - start, 1, device)
                seen[b, :, start:stop] = True if mask is None else mask.expand(1, H, stop - start, 1)[0, ..., 0]
    return seen


def count_admissible(form: Form, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """The number of keys that each query may read [B, H|1, Tq], and of (real) queries that may read each key
    [B, H|1, Tk]."""
    assert form.query is not None
    B, H, Tq, Tk = form.shape
    device = form.query.device
    by_query, by_key = [], torch.zeros(B, 1, Tk, device=device)
    for start in range(0, Tq, 256):
        rows = slice(start, min(Tq, start + 256))
        size = rows.stop - start
        mask = form.cut(slice(0, B), slice(0, H), rows, slice(0, Tk)).admissible(size, Tk, device)
        mask = torch.ones(1, 1, size, Tk, dtype=torch.bool, device=device) if mask is None else mask
        mask = mask.expand(B, mask.shape[-3] if mask.dim() > 2 else 1, size, Tk)
        by_query.append(mask.sum(-1))
        if real is not None:
            mask = mask & real[:, None, rows, None]
        by_key = by_key + mask.sum(-2)
    return torch.cat(by_query, -1), by_key
