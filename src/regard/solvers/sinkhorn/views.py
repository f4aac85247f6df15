"""Views of a two-sided problem as one-sided ones, which any backend can solve.

With prices gamma of the keys (in units of the temperature), exp(-gamma) is one more prior over the keys, and the rows
are ordinary attention. With queries and keys exchanged, the columns are ordinary attention, too.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from ... import tiles
from ...form import Form


def one_sided(form: Form, gamma: Tensor | None = None, live: Tensor | None = None) -> Form:
    """The rows of the plan at prices gamma [B, H, Tk]. Keys that are not live have an infinite price."""
    log_priors = form.log_priors
    if gamma is not None and live is not None:
        bias = torch.where(live, -gamma.to(form.dtype), -math.inf)
        log_priors = [*log_priors, bias[:, :, None]]
    return dataclasses.replace(
        form, marginal="rows", marginal_parameter=0.0, row_mass=None, column_mass=None, log_priors=log_priors
    )


def transposed(form: Form) -> Form:
    """The plan with queries and keys exchanged. No tensor is copied, except keys that several query heads share and
    maps of tiles."""
    query, key = form.query, form.key
    assert query is not None and key is not None

    def turned(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.mT

    assert form.selected is None  # lowering makes a map of tiles of it
    tile_map, tile_words = form.tile_map, form.tiles
    if tile_map is not None and tile_words is not None:
        tile_map, tile_words = tiles.transposed(tile_map, tile_words)
    return dataclasses.replace(
        form,
        query=key if form.group == 1 else key.repeat_interleave(form.group, 1),
        key=query,
        value=query[..., :0],
        score_bias=turned(form.score_bias),
        mask=turned(form.mask),
        log_priors=[t.mT for t in form.log_priors],
        relative=None if form.relative is None else form.relative.flip(3),
        query_factor=form.key_factor,
        key_factor=form.query_factor,
        density=turned(form.density),
        tile_map=tile_map,
        tiles=tile_words,
        query_ids=turned(form.key_ids),
        key_ids=turned(form.query_ids),
        left=form.right,
        right=form.left,
        offset=-form.offset,
        row_mass=turned(form.column_mass),
        column_mass=turned(form.row_mass),
    )


def plan_only(form: Form) -> Form:
    """The problem without values and without dropout, each row of mass 1."""
    assert form.key is not None
    return dataclasses.replace(form, value=form.key[..., :0], mass=1.0, dropout_p=0.0, dropout_key=None)


def heated(form: Form, heat: Tensor | None) -> Form:
    """The same problem at `heat` [B, H, 1, 1] times its temperature."""
    return form if heat is None else dataclasses.replace(form, temperature=(form.temperature * heat).to(form.dtype))


def squared(form: Form) -> Form:
    """The problem whose unnormalised weights pi exp(s/tau) are the squares of this one's."""
    slopes = None if form.slopes is None else 2 * form.slopes
    return dataclasses.replace(
        form,
        temperature=form.temperature / 2,
        log_priors=[2 * t for t in form.log_priors],
        slopes=slopes,
        relative=None if form.relative is None else 2 * form.relative,
        query_factor=None if form.query_factor is None else 2 * form.query_factor,
        density=None if form.density is None else form.density.square(),
    )


def with_prices_as_feature(form: Form, prices: Tensor) -> Form:
    """The rows at prices [B, H, Tk], given as one more feature of queries and keys (one for each head of a group).

    The result equals that of `one_sided`; the native backend is faster without a log-prior.
    """
    query, key = form.query, form.key
    assert query is not None and key is not None
    tau: Any = form.temperature.squeeze(3) if isinstance(form.temperature, Tensor) else form.temperature
    features = per_head(form, -prices * (tau / form.scale))  # [B, Hkv, Tk, group]
    own = torch.eye(form.group, dtype=query.dtype, device=query.device).repeat(key.shape[1], 1)  # [H, group]
    own = own[:, None].expand(*query.shape[:3], form.group)
    form = dataclasses.replace(form, query=torch.cat([query, own], -1), key=torch.cat([key, features], -1))
    return one_sided(form)


def per_head(form: Form, x: Tensor) -> Tensor:
    """Numbers of each key for each query head, [B, H, Tk], as values [B, Hkv, Tk, group]."""
    B, H, Tk = x.shape
    return x.view(B, H // form.group, form.group, Tk).mT.to(form.dtype)


def own_head(form: Form, out: Tensor) -> Tensor:
    """Select each head's own entry of outputs [B, H, Tq, group] of such values: [B, H, Tq]."""
    B, H, Tq, group = out.shape
    return out.view(B, H // group, group, Tq, group).diagonal(dim1=2, dim2=4).mT.reshape(B, H, Tq)


def from_scores(form: Form, scores: Tensor) -> Form:
    """A problem whose scores [B, H, Tq, Tk] are stored, as one of queries and keys without features."""
    B, H, Tq, Tk = scores.shape
    query, key = scores.new_empty(B, H, Tq, 0), scores.new_empty(B, H, Tk, 0)
    return dataclasses.replace(form, query=query, key=key, value=key, score_bias=scores)
