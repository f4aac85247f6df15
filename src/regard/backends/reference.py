"""The reference backend: the definition of every one-sided problem in plain PyTorch, on any device and in any dtype.

`attend` computes scores, solves the rows (row_equation.py) and multiplies the weights with the values. `forward` and
`backward` walk over blocks of queries and hold one block of the plan at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor

from ..form import Form
from ..statistics import ROW_STATISTICS, STATISTICS, Solution
from .base import Backend
from .row_equation import solve_rows

BLOCK = 2**21  # weights held at once (in a handful of buffers): 8 MiB each in float32


def scores_of(form: Form) -> tuple[Tensor, Tensor]:
    """Scores [B, H, Tq, Tk] and values [B, Hkv, Tk, Dv] in the compute dtype. Keys masked for every query are 0."""
    assert form.query is not None and form.key is not None and form.value is not None
    B, H, Tq, Tk = form.shape
    Hkv = form.key.shape[1]
    query, key, value = (t.to(form.dtype) for t in (form.query, form.key, form.value))
    admissible = form.admissible(Tq, Tk, query.device)
    if admissible is not None:
        # A key that is masked for every query may hold NaN, and 0 * NaN is NaN. It is replaced by zeros, and so is a
        # query without admissible keys.
        admissible = admissible.expand(*torch.broadcast_shapes(admissible.shape, (1, 1, 1, 1)))  # four dimensions
        query = torch.where(admissible.any(3, keepdim=True), query, 0.0)
        read = admissible.any(2)  # [B|1, H|1, Tk|1]
        if read.shape[1] > 1:
            read = read.unflatten(1, (Hkv, form.group)).any(2)
        key = torch.where(read[..., None], key, 0.0)
        value = torch.where(read[..., None], value, 0.0)
    grouped = query.reshape(B, Hkv, form.group * Tq, query.shape[-1])
    scores = (grouped @ key.mT).view(B, H, Tq, Tk) * form.scale
    if form.softcap is not None:
        scores = form.softcap * (scores / form.softcap).tanh()
    if form.score_bias is not None:
        scores = scores + form.score_bias.to(form.dtype)
    return scores, value


def attend(form: Form, names: tuple[str, ...], mu: Tensor | None = None, order: int = 1) -> dict[str, Tensor]:
    """Output and statistics of a form whose plan is held in memory as a whole. Differentiable; `mu` and `order` as in
    `solve_rows`. Without keys the weights have one column, which is cut off."""
    scores, value = scores_of(form)
    rows = solve_rows(form, scores, mu, order)
    results = {}
    if "out" in names or "value_spread" in names:
        rows.values, rows.output = value, transport(rows.weights, value)
    for name in names:
        if name == "out":
            results[name] = rows.output if form.dropout_key is None else transport(dropped(rows), value)
        elif name == "key_mass":
            results[name] = STATISTICS[name].formula(rows)[..., : value.shape[2]]
        elif name == "mu":
            results[name] = rows.mu.squeeze(-1)
        elif name == "weights":
            results[name] = rows.weights[..., : value.shape[2]]
        else:
            results[name] = STATISTICS[name].formula(rows)
    return results


def transport(weights: Tensor, value: Tensor) -> Tensor:
    B, H, Tq = weights.shape[:3]
    Hkv, Tk, Dv = value.shape[1:]
    grouped = weights[..., :Tk].reshape(B, Hkv, H // max(1, Hkv) * Tq, Tk)
    return (grouped @ value).view(B, H, Tq, Dv)


def dropped(rows: Solution) -> Tensor:
    form = rows.form
    kept = form.kept(rows.weights.shape[2], rows.weights.shape[3], rows.weights.device)
    scale = 1 / (1 - form.dropout_p) if form.dropout_p < 1 else 0.0
    return torch.where(kept, rows.weights * scale, 0.0)


class Reference(Backend):
    """backend="torch"."""

    name: ClassVar[str] = "torch"
    statistics: ClassVar[tuple[str, ...]] = ROW_STATISTICS
    differentiable: ClassVar[tuple[str, ...]] = ("out", *ROW_STATISTICS)

    def unsupported(self, form: Form, names: tuple[str, ...]) -> str | None:
        return None  # it serves every problem

    def saved(self, form: Form, names: tuple[str, ...]) -> tuple[str, ...]:
        return ("mu",)

    def forward(self, form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Output and statistics, block by block."""
        assert form.query is not None
        results = {n: form.query.new_zeros(s, dtype=form.dtype) for n, s in self.output_shapes(form, names).items()}
        with torch.no_grad(), full_precision(form):
            for b, h, i, j in blocks(form):
                for name, part in attend(form.cut(b, h, i, j), names).items():
                    if name == "key_mass":
                        results[name][b, h, j] += part
                    else:
                        results[name][b, h, i] = part
        return results

    def backward(
        self, form: Form, needed: tuple[str, ...], outputs: dict[str, Tensor], grads: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Gradients of the needed slots, block by block."""
        names = tuple(grads)
        # Inference mode would record nothing here, and every gradient would be 0.
        with torch.inference_mode(False), full_precision(form), torch.enable_grad():
            tensors, outputs, grads = (_recordable(given) for given in (form.tensors(), outputs, grads))
            form = form.with_tensors(tensors)
            wide = {name: torch.promote_types(tensors[name].dtype, form.dtype) for name in needed}
            totals = {name: torch.zeros_like(tensors[name], dtype=wide[name]) for name in needed}
            for where in blocks(form):
                block = form.cut(*where)
                leaves = {n: t.detach().to(wide[n]).requires_grad_() for n, t in block.tensors().items() if n in needed}
                mu = outputs["mu"][where[:3]].detach()[..., None]
                results = attend(block.with_tensors(leaves), names, mu)
                varied = [n for n in names if results[n].requires_grad]  # without keys, lse and entropy are constants
                if not varied:
                    continue
                incoming = [grads[n][where[:3]].to(form.dtype) for n in varied]
                sources = list(leaves.values())
                found = torch.autograd.grad([results[n] for n in varied], sources, incoming, allow_unused=True)
                for name, grad in zip(leaves, found, strict=True):
                    if grad is not None:
                        form.cut_slot(name, totals[name], *where).add_(grad)
            return {name: total.to(tensors[name].dtype) for name, total in totals.items()}

    # Reading single weights, block by block.

    def topk(self, form: Form, n: int) -> tuple[Tensor, Tensor]:
        assert form.query is not None
        weights = torch.zeros((*form.shape[:3], n), dtype=form.dtype, device=form.query.device)
        keys = torch.zeros((*form.shape[:3], n), dtype=torch.long, device=form.query.device)
        for b, h, i, j, block in _weight_blocks(form, at_least=n):
            weights[b, h, i], found = block.topk(n, -1)
            keys[b, h, i] = found + j.start
        return weights, keys

    def weights_at(self, form: Form, index: Tensor) -> Tensor:
        found = torch.zeros(index.shape, dtype=form.dtype, device=index.device)
        for b, h, i, j, weights in _weight_blocks(form):
            local = index[b, h, i] - j.start
            inside = (local >= 0) & (local < weights.shape[-1])
            if weights.shape[-1]:
                found[b, h, i] = torch.where(inside, weights.gather(-1, torch.where(inside, local, 0)), 0.0)
        return found

    def block_sums(self, form: Form, block: int, row: Tensor | None = None) -> Tensor:
        """As the contract; `row` [B, H, Tq] multiplies each row."""
        assert form.query is not None
        B, H, Tq, Tk = form.shape
        columns = -(-Tk // block)
        pooled = torch.zeros(B, H, -(-Tq // block), columns, dtype=form.dtype, device=form.query.device)
        for b, h, i, j, weights in _weight_blocks(form):
            weights = weights if row is None else weights * row[b, h, i, None]
            padded = torch.nn.functional.pad(weights, (j.start, columns * block - j.stop))
            by_key = padded.unflatten(-1, (columns, block)).sum(-1)
            owner = torch.arange(i.start, i.stop, device=weights.device) // block
            pooled[b, h] = pooled[b, h].index_add(2, owner, by_key)
        return pooled


def blocks(form: Form) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Blocks of about BLOCK weights: whole batches and heads while they fit, then ranges of queries.

    Yielded with queries innermost, then heads, then batch; keys are those inside the band of the queries.
    """
    B, H, Tq, Tk = form.shape
    least_rows = min(Tq, 64)  # with fewer rows per block all keys would be read too often
    group, room = max(1, form.group), BLOCK // max(1, Tk)
    heads = min(H, max(1, room // max(1, least_rows * group)) * group)
    batch = max(1, room // max(1, least_rows * H)) if heads == H else 1
    queries = max(1, room // max(1, heads * min(B, batch)))
    for b in range(0, B, batch):
        for h in range(0, H, max(1, heads)):
            for i in range(0, Tq, queries):
                rows = slice(i, min(Tq, i + queries))
                keys = _rounded(form.key_range(rows), Tk)
                yield slice(b, min(B, b + batch)), slice(h, min(H, h + heads)), rows, keys


def _rounded(keys: slice, Tk: int) -> slice:
    """The range, extended to one of a few lengths, because buffers of many sizes would fragment the allocator."""
    length = keys.stop - keys.start
    grid = max(64, 2 ** (length.bit_length() - 3))
    start = max(0, min(keys.start, Tk - -(-length // grid) * grid))
    return slice(start, min(Tk, start + -(-(keys.stop - start) // grid) * grid))


def _weight_blocks(form: Form, at_least: int = 0) -> Iterator[tuple[slice, slice, slice, slice, Tensor]]:
    """The plan block by block, each over `at_least` keys or more."""
    Tk = form.shape[3]
    with torch.no_grad():
        for b, h, i, j in blocks(form):
            start = max(0, min(j.start, Tk - at_least))
            j = slice(start, max(j.stop, start + at_least))
            yield b, h, i, j, attend(form.cut(b, h, i, j), ("weights",))["weights"]


def full_precision(form: Form) -> AbstractContextManager:
    """A context without autocast, because the compute dtype is already chosen."""
    assert form.query is not None
    device = form.query.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def _recordable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with copies of those made in inference mode, which autograd cannot record."""
    return {name: t.clone() if t.is_inference() else t for name, t in tensors.items()}
