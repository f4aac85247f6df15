"""Plans with both marginals must not be causal: what a key receives depends on later queries.

`refuse_causal` raises for a prior or mask that is causal, which would leak the future into earlier rows.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from ._validate import concrete
from .form import Form

CAUSAL = (
    "{}: RowsAndColumns does not allow a causal prior (Causal, Window with right <= 0, is_causal, a mask or Bias that "
    "admits nothing above the diagonal): what a key receives depends on later queries, so the columns would read the "
    "future"
)


def refuse_causal_tensor(name: str, mask: Tensor) -> None:
    """Raise if a mask, float mask or log-prior [B|1, H|1, Tq|1, Tk|1] is causal in some head. Warn if it holds numbers
    that look like -inf and are finite."""
    if not concrete(mask) or not mask.numel():
        return
    plain = mask.dtype == torch.bool
    Tq, Tk = mask.shape[2:]
    refuse_causal(name, Form(mask=mask) if plain else Form(score_bias=mask), Tq, Tk, mask.device)
    if not plain and _masked_up_to(mask) > -math.inf:
        warnings.warn(
            f"{name}: RowsAndColumns expects -inf (or a bool mask) for masked keys, got numbers down to "
            f"{_lowest(mask):.3g}: they count as scores, and a key receives its column sum at any score",
            stacklevel=2,
        )


# A float mask uses -65504, -1e9 or the most negative number in place of -inf. Numbers above this threshold are scores.
_MASK_THRESHOLD = -1e4


def _lowest(mask: Tensor) -> float:
    mask = mask.detach()
    return float(torch.where(mask > -math.inf, mask, math.inf).min())


def _masked_up_to(mask: Tensor) -> float:
    """The threshold at and below which an entry of a float mask counts as masked; -inf if the mask has none.

    Such entries are far below all others: none is within a factor of 500. (A large cost has other values between.)"""
    lowest = _lowest(mask)
    if not lowest <= _MASK_THRESHOLD:
        return -math.inf
    mask = mask.detach()
    if lowest == torch.finfo(mask.dtype).min:
        return lowest
    between = (mask > lowest / 2) & (mask < lowest / 1000)
    return -math.inf if bool(between.any()) else lowest / 2


def refuse_causal(name: str, form: Form, Tq: int, Tk: int, device: torch.device) -> None:
    """Raise if the prior of a form is causal in some head, where its values can be read: it admits keys below the
    diagonal and none above, and the column constraint has an effect."""
    masks = (form.mask, form.score_bias, *form.log_priors, form.query_ids, form.tile_map)
    tensors = [t for t in masks if t is not None]
    if Tq != Tk or Tq < 2 or not tensors or not all(concrete(t) for t in tensors):
        return
    floats = [_one_of_each(t) for t in (form.score_bias, *form.log_priors) if t is not None]
    limits = [_masked_up_to(t) for t in floats]
    prior = Form(log_priors=floats, query_ids=form.query_ids, key_ids=form.key_ids)
    prior.mask = None if form.mask is None else _one_of_each(form.mask)
    prior.left, prior.right, prior.offset = form.left, form.right, form.offset
    prior.tile_map, prior.tiles = form.tile_map, form.tiles
    below: Any = False  # [B|1, H|1] each
    above: Any = False
    choice: Any = False
    others: Any = False
    for start in range(0, Tq, 256):
        rows = slice(start, min(Tq, start + 256))
        size = rows.stop - start
        block = prior.cut(slice(None), slice(None), rows, slice(0, Tk))
        allowed = block.admissible(size, Tk, device)
        assert allowed is not None
        for bias, limit in zip(block.log_priors, limits, strict=True):
            allowed = allowed & (bias > limit)
        allowed = allowed.expand(*allowed.shape[:2], size, Tk) if allowed.dim() == 4 else allowed.expand(1, 1, size, Tk)
        above |= allowed.triu(1 + start).flatten(2).any(-1)
        if bool(torch.as_tensor(above).all()):
            return
        below |= allowed.tril(start - 1).flatten(2).any(-1)
        # A query with a single key sends all its mass there. If only the last query reads keys, no query is later.
        choice |= (allowed.sum(-1) > 1).any(-1)
        others |= allowed[:, :, : size - (rows.stop == Tq)].flatten(2).any(-1)
    if bool((below & ~above & choice & others).any()):
        raise ValueError(CAUSAL.format(name))


def _one_of_each(tensor: Tensor) -> Tensor:
    """One copy of a batch or head that was expanded, without a gradient."""
    tensor = tensor.detach()
    for dim in (0, 1):
        if tensor.shape[dim] > 1 and tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
