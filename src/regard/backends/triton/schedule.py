"""Which tiles a kernel visits where masks are not a band: no empty one, and no mask in full ones.

Masks are looked at once, by tiles of BM queries and BN keys. `bounds` says of each tile whether some pair of it may be
admissible, and whether every pair is. Both answers may err to the safe side: a tile that is called mixed costs time and
changes nothing. The kernels get a list for each block of queries (or of keys): first the mixed tiles, then the full
ones. A list is never read beyond its count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...form import Form
from ...tiles import SIZE


def schedule(form: Form, BM: int, BN: int, by_key: bool = False) -> tuple[Tensor, Tensor]:
    """For each block of queries the blocks of keys [B|1, H|1, ceil(Tq/BM), ceil(Tk/BN)], mixed ones first, and their
    numbers [.., 2]: the mixed ones, and both kinds. `by_key`: for each block of keys the blocks of queries."""
    some, every = bounds(form, BM, BN)
    if by_key:
        some, every = some.mT, every.mT
    kind = torch.where(some, every.int(), 2)  # 0 mixed, 1 full, 2 empty
    order = kind.argsort(dim=-1, stable=True).int()
    counts = torch.stack([(kind == 0).sum(-1), (kind < 2).sum(-1)], -1).int()
    return order, counts


def bounds(form: Form, BM: int, BN: int) -> tuple[Tensor, Tensor]:
    """Of each tile [B|1, H|1, ceil(Tq/BM), ceil(Tk/BN)]: may some pair be admissible, and is every pair."""
    assert form.query is not None
    _, _, Tq, Tk = form.shape
    device = form.query.device
    first_row = torch.arange(0, Tq, BM, device=device)[:, None]
    first_col = torch.arange(0, Tk, BN, device=device)[None, :]
    last_row, last_col = (first_row + BM).clamp(max=Tq) - 1, (first_col + BN).clamp(max=Tk) - 1
    inside = (first_row + BM <= Tq) & (first_col + BN <= Tk)
    some, every = torch.ones_like(inside)[None, None], inside[None, None]
    nearest, farthest = first_col - last_row - form.offset, last_col - first_row - form.offset  # key minus query
    if form.left is not None:
        some, every = some & (farthest >= -form.left), every & (nearest >= -form.left)
    if form.right is not None:
        some, every = some & (nearest <= form.right), every & (farthest <= form.right)
    if form.score_bias is not None or form.log_priors or form.density is not None:
        every = every & False  # -inf masks a pair, and is looked for in the kernel only
    for found in (_of_mask(form, BM, BN), _of_ids(form, BM, BN), _of_selection(form, BM, BN), _of_map(form, BM, BN)):
        if found is not None:
            some, every = some & found[0], every & found[1]
    return some, every


def _blocks(t: Tensor, dim: int, size: int, fill: int) -> Tensor:
    """A dimension cut into blocks of `size`, which follow as a dimension of their own; the last block is filled up."""
    short = -t.shape[dim] % size
    if short:
        shape = list(t.shape)
        shape[dim] = short
        t = torch.cat([t, t.new_full(shape, fill)], dim)
    return t.unflatten(dim, (-1, size))


def _of_mask(form: Form, BM: int, BN: int) -> tuple[Tensor, Tensor] | None:
    if form.mask is None:
        return None
    some = every = form.mask
    if form.mask.shape[3] > 1:
        some, every = _blocks(some, 3, BN, False).any(4), _blocks(every, 3, BN, True).all(4)
    if form.mask.shape[2] > 1:
        some, every = _blocks(some, 2, BM, False).any(3), _blocks(every, 2, BM, True).all(3)
    return some, every


def _of_ids(form: Form, BM: int, BN: int) -> tuple[Tensor, Tensor] | None:
    """Documents: two ranges of ids that do not overlap have no pair, and two equal ranges of one id every pair."""
    if form.query_ids is None or form.key_ids is None:
        return None
    most = torch.iinfo(form.query_ids.dtype).max

    def ranges(ids: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        cut = _blocks(ids.flatten(2), 2, size, -1)
        named = cut >= 0
        return torch.where(named, cut, most).amin(-1), cut.amax(-1), cut.amin(-1)

    low, high, least = (t[..., :, None] for t in ranges(form.query_ids, BM))
    key_low, key_high, key_least = (t[..., None, :] for t in ranges(form.key_ids, BN))
    some = (low <= key_high) & (key_low <= high)
    return some, (least == high) & (key_least == key_high) & (high == key_high) & (high >= 0)


def _of_selection(form: Form, BM: int, BN: int) -> tuple[Tensor, Tensor] | None:
    if form.selected is None:
        return None
    _, _, Tq, Tk = form.shape
    size, chosen = form.selected_block, form.selected.long()
    down, across = -(-Tq // BM), -(-Tk // BN)
    # The first and the last tile that a selected block touches, and those between them.
    first, last = chosen * size // BN, ((chosen + 1) * size - 1).clamp(max=Tk - 1) // BN
    some = torch.zeros((*chosen.shape[:2], down, across + 1), dtype=torch.bool, device=chosen.device)
    block = torch.arange(chosen.shape[2], device=chosen.device)[:, None].expand(chosen.shape[2:]) // BM
    if chosen.shape[2] == 1:  # one list for all queries
        block = torch.zeros_like(block)
    for step in range(-(-size // BN) + 1):
        tile = torch.where((chosen >= 0) & (first + step <= last), first + step, across)  # the last place is not used
        place = (block * (across + 1) + tile).flatten(2)
        some = some.flatten(2).scatter(2, place, True).unflatten(2, (down, across + 1))
    some = some[..., :across]
    if chosen.shape[2] == 1:
        some = some[:, :, :1]
    return some, torch.zeros_like(some)


def _of_map(form: Form, BM: int, BN: int) -> tuple[Tensor, Tensor] | None:
    if form.tile_map is None:
        return None
    some, every = form.tile_map != 0, form.tile_map == 1
    _, _, Tq, Tk = form.shape
    for dim, size, length in ((2, BM, Tq), (3, BN, Tk)):
        count = -(-length // size)
        if size >= SIZE:
            some = _blocks(some, dim, size // SIZE, False).any(dim + 1)
            every = _blocks(every, dim, size // SIZE, True).all(dim + 1)
        else:
            at = torch.arange(count, device=some.device) * size // SIZE
            some, every = some.index_select(dim, at), every.index_select(dim, at)
    return some, every
