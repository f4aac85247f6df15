"""How many keys each query may read, and the temperature that follows from it (`ByKeys`).

A band, documents and masks per key are counted in O(T log T). Lists of keys and maps of tiles are counted pair by pair
where they admit any. For any other prior all pairs are counted, block by block.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import tiles
from ._compat import forward_mode, transforms_active
from ._validate import Scalar, check_values, row_parameter
from .compiled.pairs import log_prior_at
from .form import Form
from .priors import PlanShape
from .problem import ByKeys

_PAIRS = 2**17  # that are counted at once


def lower_by_keys(form: Form, rule: ByKeys, shape: PlanShape) -> Tensor | None:
    """Set the temperature of each row, [B|1, H|1, Tq, 1]. Returns what the scores are to be multiplied by, or None.

    Scores s, the parameter m of the marginal and the temperature tau count only as s/tau and m/tau. So a change of
    1/tau is a change of s and m by the same factor. The factor that is returned is 1, and it has the derivatives of the
    rule; then the temperature has none. Through the temperature they would lose digits where 1/tau is small, because
    sums of G (s - price) cancel when prices grow as tau, and at 1/tau = 0 there would be none.
    """

    def parameter(name: str, value: Scalar) -> Tensor:
        if not isinstance(value, Tensor):
            value = torch.full((1, 1, 1, 1), float(value), dtype=shape.dtype, device=shape.device)
        fitted = row_parameter(f"ByKeys({name})", value, shape.B, shape.H, shape.Tq, shape.dtype, shape.device, True)
        assert isinstance(fitted, Tensor)
        return fitted

    slope, offset, power = (parameter(name, getattr(rule, name)) for name in ("slope", "offset", "power"))
    check_values("ByKeys(power)", power, "power > 0", lambda x: (x > 0) & x.isfinite())
    with torch.no_grad():
        count = admissible_keys(form)
        several = count > 1
        log_count = torch.where(several, count, 2).to(shape.dtype).log()
    inverse = offset + slope * torch.where(several, log_count**power, 0.0)
    check_values("temperature", inverse, "ByKeys with 1/temperature >= 0", lambda x: (x >= 0) & x.isfinite())
    # 1/temperature = 0 is the limit of high temperatures, where the plan is the prior's own to rounding.
    form.temperature = 1 / inverse.clamp(min=_LEAST[shape.dtype])
    if not _differentiated(inverse):
        return None
    if form.softcap is None and form.score_bias is None:
        form.temperature = form.temperature.detach()
        return 1 + (inverse - inverse.detach()) * form.temperature
    # In a row of one key the power is constant, and under plain rows so is the plan: there a limit needs no gradient.
    varied = several if form.marginal == "rows" or not offset.requires_grad else torch.ones_like(several)
    check_values(
        "temperature",
        torch.where(varied, inverse, 1.0),
        "ByKeys with 1/temperature > 0 where it needs a gradient and there is a softcap or a float attn_mask",
        lambda x: x > 0,
    )
    return None


class _Carry(torch.autograd.Function):
    """query * factor where factor is 1: the query itself, without a copy, with the gradient of the product."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(query, factor)
        return query.view_as(query)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), (query, factor) = grads, ctx.saved_tensors
        by_row = (grad[..., None, :] @ query[..., None]).squeeze(-1)
        again = torch.is_grad_enabled()  # a second derivative depends on the factor
        return grad * factor if again else grad, by_row.sum_to_size(factor.shape)


def times_one(query: Tensor, factor: Tensor) -> Tensor:
    """query * factor for a factor of 1 that has a gradient."""
    if torch.compiler.is_compiling() or transforms_active() or forward_mode():
        return query * factor
    out: Tensor = _Carry.apply(query, factor)  # type: ignore[assignment]
    return out


def _differentiated(tensor: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return tensor.requires_grad
    return (torch.is_grad_enabled() and tensor.requires_grad) or transforms_active() or forward_mode()


_LEAST = {torch.float32: 1e-12, torch.float64: 1e-24}


def admissible_keys(form: Form) -> Tensor:
    """The number of keys with pi > 0 of each row, [B|1, H|1, Tq, 1]."""
    assert form.query is not None
    Tq, Tk = form.shape[2:]
    device = form.query.device
    if Tq == 0 or Tk == 0:
        return torch.zeros(1, 1, Tq, 1, dtype=torch.long, device=device)
    masks = [bias != -math.inf for bias in (form.score_bias, *form.log_priors) if bias is not None]
    masks += [] if form.mask is None else [form.mask]
    masks += [] if form.density is None else [form.density > 0]
    structured = form.selected is not None or form.tile_map is not None or form.function is not None
    if structured or any(mask.shape[2] > 1 for mask in masks):
        return _count_pairs(form)
    position = torch.arange(Tq, device=device) + form.offset
    first = torch.zeros_like(position) if form.left is None else (position - form.left).clamp(0, Tk)
    stop = torch.full_like(position, Tk) if form.right is None else (position + form.right + 1).clamp(0, Tk)
    stop = torch.maximum(first, stop)
    if form.query_ids is None or form.key_ids is None:
        if not masks:
            return (stop - first)[None, None, :, None]
        keys = masks[0]
        for mask in masks[1:]:
            keys = keys & mask
        keys = keys.expand(*keys.shape[:2], 1, Tk)
        before = torch.nn.functional.pad(keys.long().cumsum(3), (1, 0))
        return (before[..., stop] - before[..., first]).mT
    # Number the keys by document and position. The keys of a document inside a band are then a range.
    keys, queries = form.key_ids, form.query_ids.mT  # [B|1, 1, 1, T]
    for mask in masks:
        keys = torch.where(mask, keys, -1)
    shape = torch.broadcast_shapes(keys.shape[:3], queries.shape[:3])
    keys, queries = keys.expand(*shape, Tk).contiguous(), queries.expand(*shape, Tq)
    code = torch.where(keys < 0, -1, keys * (Tk + 1) + torch.arange(Tk, device=device)).sort(-1).values
    ends = [torch.searchsorted(code, (queries * (Tk + 1) + end).contiguous()) for end in (first, stop)]
    return torch.where(queries < 0, 0, ends[1] - ends[0]).mT


def _count_pairs(form: Form) -> Tensor:
    """Count pair by pair: of the listed keys, else of the tiles that are not empty, else of the whole plan."""
    B, H, Tq, Tk = form.shape
    assert form.query is not None
    device = form.query.device
    if form.selected is not None:
        return _count_listed(form, form.selected)
    if form.tile_map is not None:
        return _count_tiles(form, form.tile_map)
    step = max(1, _PAIRS // max(1, B * H * Tk))
    counts = [_count_rectangle(form, range(start, min(Tq, start + step))) for start in range(0, Tq, step)]
    return torch.cat(counts, 2) if counts else torch.zeros(1, 1, 0, 1, dtype=torch.long, device=device)


def _count_rectangle(form: Form, queries: range) -> Tensor:
    B, H, _, Tk = form.shape
    assert form.query is not None
    block = form.cut(slice(0, B), slice(0, H), slice(queries.start, queries.stop), slice(0, Tk))
    allowed = block.admissible(len(queries), Tk, form.query.device)
    if block.density is not None:
        allowed = block.density > 0 if allowed is None else allowed & (block.density > 0)
    assert allowed is not None
    return allowed.expand(*torch.broadcast_shapes(allowed.shape, (1, 1, len(queries), Tk))).sum(-1, keepdim=True)


def _count_tiles(form: Form, tile_map: Tensor) -> Tensor:
    Tq, Tk = form.shape[2:]
    full = tile_map.expand(*_leading(form), *tile_map.shape[2:])
    count = torch.zeros(*full.shape[:2], full.shape[2] * tiles.SIZE, dtype=torch.long, device=full.device)
    within = torch.arange(tiles.SIZE, device=full.device)
    for part in full.nonzero().split(max(1, _PAIRS // tiles.SIZE**2)):
        b, h, down, across = part.unbind(1)
        i, j = down[:, None] * tiles.SIZE + within, across[:, None] * tiles.SIZE + within  # [n, 64]
        lead = (b[:, None, None], h[:, None, None])
        allowed = _admits(form, *lead, i.clamp(max=Tq - 1)[:, :, None], j.clamp(max=Tk - 1)[:, None, :])
        allowed = allowed & (j < Tk)[:, None, :]
        count.index_put_((b[:, None], h[:, None], i), allowed.sum(2), accumulate=True)
    return count[:, :, :Tq, None]


def _count_listed(form: Form, selected: Tensor) -> Tensor:
    Tq, Tk = form.shape[2:]
    shape = torch.broadcast_shapes((*_leading(form), Tq), selected.shape[:3])
    lists = selected.expand(*shape, selected.shape[3])
    step = max(1, _PAIRS // max(1, shape[0] * shape[1] * selected.shape[3] * form.selected_block))
    b = torch.arange(shape[0], device=lists.device)[:, None, None, None]
    h = torch.arange(shape[1], device=lists.device)[:, None, None]
    within = torch.arange(form.selected_block, device=lists.device)
    counts = []
    for start in range(0, Tq, step):
        part = lists[:, :, start : start + step].sort(-1).values
        again = torch.nn.functional.pad(part[..., 1:] == part[..., :-1], (1, 0))
        part = torch.where(again | (part < 0), Tk, part)  # beyond the keys
        i = torch.arange(start, start + part.shape[2], device=lists.device)[:, None]
        j = (part[..., None] * form.selected_block + within).flatten(3)
        allowed = _admits(form, b, h, i, j.clamp(max=Tk - 1)) & (j < Tk)
        counts.append(allowed.sum(-1, keepdim=True))
    return torch.cat(counts, 2) if counts else torch.zeros(*shape[:2], 0, 1, dtype=torch.long, device=lists.device)


def _leading(form: Form) -> tuple[int, int]:
    """[B|1, H|1]: over which batch entries and heads the count may vary."""
    parts = [form.mask, form.score_bias, *form.log_priors, form.density, form.query_ids, form.key_ids]
    parts += [form.selected, form.tile_map]
    own = (1, 1) if form.function is None else form.shape[:2]
    batch, heads = torch.broadcast_shapes(own, *(part.shape[:2] for part in parts if part is not None))
    return batch, heads


def _admits(form: Form, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Whether pi > 0 at these pairs, but for `selected`. The indices broadcast against each other."""

    def at(tensor: Tensor) -> Tensor:
        return tensor[tuple(x if size > 1 else 0 for x, size in zip((b, h, i, j), tensor.shape, strict=True))]

    distance = j - i - form.offset
    allowed = distance == distance
    if form.left is not None:
        allowed = allowed & (distance >= -form.left)
    if form.right is not None:
        allowed = allowed & (distance <= form.right)
    if form.mask is not None:
        allowed = allowed & at(form.mask)
    for bias in (form.score_bias, *form.log_priors):
        if bias is not None:
            allowed = allowed & (at(bias) != -math.inf)
    if form.function is not None:
        found = log_prior_at(form.function, form.captured, (b, h, i + form.offset, j), form.dtype)
        allowed = allowed & (found != -math.inf)
    if form.density is not None:
        allowed = allowed & (at(form.density) > 0)
    if form.query_ids is not None and form.key_ids is not None:
        ids = at(form.query_ids)
        allowed = allowed & (ids == at(form.key_ids)) & (ids >= 0)
    if form.tile_map is not None and form.tiles is not None:
        number = form.tile_map[b % form.tile_map.shape[0], h % form.tile_map.shape[1], i // tiles.SIZE, j // tiles.SIZE]
        allowed = allowed & ((form.tiles[number, j % tiles.SIZE] >> (i % tiles.SIZE)) & 1).bool()
    return allowed
