"""The native CPU engine as a backend: fused kernels (csrc/) with O(T) memory, statistics in the forward pass.

Outputs are allocated here, working memory in csrc/module.cpp. Backward computes the plan again from its price.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from ..._compat import PLAIN_TENSOR_TYPES
from ..._validate import concrete
from ...compiled.cpp import POSITIONS
from ...form import Form
from ..base import READOUT, Backend
from ..row_gradient import PARAMETERS, SUMS_KL, SUMS_LINK, SUMS_OWN, RowGradient, row_value
from .engine import amx, extension, missing, uncompiled
from .links import bounded, link_missing, link_of, lists_keys, value_missing
from .records import FAMILIES, LOG_PRIORS, MARGINALS, centred, function_address, record_of

_LIST_ROOM = 128  # numbers that a row may store for backward about its few keys
_PRICE = ("dual", "peak", "rest")  # the plan can be computed again from these
# The statistics that the kernels compute, and other outputs, by the name of their field in the record.
_STATISTICS = {
    **{name: name for name in ("lse", "dual", "entropy", "kl", "max_scores", "max_weight", "score_variance")},
    **{name: name for name in ("collision", "support", "first_key_mass", "cost", "key_mass")},
    "value": "free_energy",
    "mass": "mass_sent",
    "value_spread": "spread",
}
_FIELDS = _STATISTICS | {"baseline_value": "tilt", "baseline_log": "tilt_log"}
# Outputs that a backward pass may read.
_SAVED = {
    **{name: f"saved_{name}" for name in ("out", "lse", "entropy", "mass", "lists", *_PRICE)},
    "baseline_value": "saved_tilt",
    "baseline_log": "saved_tilt_log",
}
_SUMS = {
    "query": ("dq",),
    "key": ("dk",),
    "value": ("dv",),
    "relative": ("relative_g",),
    "query_factor": ("d_query_factor",),
    "key_factor": ("d_key_factor",),
    "decay_query": ("row_gp",),
    "decay_key": ("key_g",),
}
_CAPTURED_SUMS = 2**24  # float64 sums over the elements of captured tensors that a backward pass may hold
_DENSITY_LEAST = 2.0**-60  # stands for a density of 0 in a backward pass: dL/dpi is the sum of dL/dlog(pi), over pi


class Native(Backend):
    """backend="native"."""

    name: ClassVar[str] = "native"
    statistics: ClassVar[tuple[str, ...]] = tuple(_STATISTICS)
    rounds_cold_priors: ClassVar[bool] = True

    def unsupported(self, form: Form, names: tuple[str, ...]) -> str | None:
        """Why the engine cannot serve the problem, or None."""
        reason = missing()
        if reason is not None:
            return reason
        assert form.query is not None
        if not form.query.is_cpu:
            return f"runs on the CPU only (query is on {form.query.device})"
        for tensor in (form.query, form.key, form.value):  # lowering has checked the others
            if type(tensor) not in PLAIN_TENSOR_TYPES:
                return f"reads memory, which a subclass of Tensor need not have (got a {type(tensor).__name__})"
        if form.marginal not in MARGINALS:
            return "solves rows only (regard.attention reduces rows and columns to rows)"
        if form.family == "fermi_dirac" and form.marginal != "free":
            return "has Fermi-Dirac with a free marginal only"
        if form.hard:
            return "has no temperature 0"
        if len(form.log_priors) > LOG_PRIORS:
            return f"multiplies at most {LOG_PRIORS} biases (got {len(form.log_priors)})"
        if form.first_query or form.first_key or form.first_batch or form.first_head:
            return "serves whole plans, not blocks of one"
        if form.family not in FAMILIES:
            reason = link_missing(form) or (value_missing(form) if "value" in names else None)
            if reason is not None:
                return f"cannot compile the regulariser: {reason}"
        if form.untraced is not None:
            return f"compiles the function of a prior, but {form.untraced}"
        if form.function is not None:
            if max(form.shape[2], form.shape[3]) >= POSITIONS:
                return f"compiles functions for fewer than {POSITIONS} positions"
            if any(sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) >= 2**31 for t in form.captured):
                return "reads captured tensors of fewer than 2^31 numbers"
            if (reason := uncompiled(form.function)) is not None:
                return f"compiles the function of a prior, but {reason}"
        for name in names:
            if name == READOUT:
                if not all(map(concrete, form.tensors().values())):
                    return "reads memory, which traced tensors do not have"
            elif name != "out" and name not in _STATISTICS:
                return f"has no kernel for the statistic {name}"
        return None

    def unwise(self, form: Form, names: tuple[str, ...]) -> str | None:
        """Why "auto" leaves plain softmax in bfloat16 to PyTorch on some processors."""
        if names == ("out",) and _plain_bfloat16(form) and amx():
            return "has no kernels for AMX, which PyTorch uses for plain softmax in bfloat16"
        return None

    def saved(self, form: Form, names: tuple[str, ...]) -> tuple[str, ...]:
        """The price, from which backward computes the plan again, and the terms of the baseline."""
        if form.family == "kl":  # only the gradients of parameters need the dual itself
            parameters = (
                form.marginal == "relax"
                or not isinstance(form.marginal_parameter, float)
                or not isinstance(form.temperature, float)
            )
            return _PRICE if parameters or form.slopes is not None else ("peak", "rest")
        centre = ("baseline_value",) if form.marginal != "free" else ()
        if "entropy" in names:
            centre += ("baseline_log",) if form.marginal != "free" else ("mass",)
            if form.marginal == "rows" and form.family not in FAMILIES and bounded(form):  # full rows send less
                centre += ("mass",)
        return _PRICE + centre + (("lists",) if _may_list(form) else ())

    def saved_shapes(self, form: Form) -> dict[str, tuple[int, ...]]:
        assert form.query is not None and form.value is not None
        rows = tuple(form.query.shape[:3])
        return {"baseline_value": (*rows, form.value.shape[3]), "lists": (*rows, _LIST_ROOM)}

    def forward(self, form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Output and statistics."""
        module, _ = extension()
        assert form.query is not None
        results = self._empty(form, names)
        if form.query.numel() == 0 and 0 in form.query.shape[:3]:
            return {n: t.zero_() for n, t in results.items()}
        if "value_spread" in names and form.dropout_key is not None:
            # value_spread is defined by the output before dropout, which needs a second pass.
            plain = dataclasses.replace(form, dropout_p=0.0, dropout_key=None)
            rest = tuple(name for name in names if name != "value_spread")
            found = self.forward(form, rest) | self.forward(plain, ("value_spread",))
            return {name: found[name] for name in names}
        record = record_of(form)
        for name, result in results.items():
            if name == "lists":
                record.tensor(name, result)
            elif name != "key_mass":
                record.put(_FIELDS.get(name, name), result.data_ptr())
        if "key_mass" in names:  # summed by a backward sweep, which starts from the price
            for name in _PRICE:
                if name not in names:
                    results[name] = torch.empty(form.shape[:3], dtype=form.dtype)
                    record.put(name, results[name].data_ptr())
        centre = squares = None
        if "value_spread" in names:
            centre, squares = _centred_squares(form)
            record.tensor("squares", squares)
            if "out" not in names:
                results["out"] = torch.empty(self.output_shapes(form, ("out",))["out"], dtype=form.dtype)
                record.put("out", results["out"].data_ptr())
            if "mass" not in names:
                results["mass"] = torch.empty(form.shape[:3], dtype=form.dtype)
                record.put("mass_sent", results["mass"].data_ptr())
        beyond = module.forward(record.record)
        if centre is not None:
            # sum p |v|^2 - |o|^2 from a centre that keeps the digits under a large common offset
            centre = centre.repeat_interleave(form.group, 1)
            short = 1 - results["mass"]
            if form.marginal == "rows" and form.regularizer.ceiling == math.inf:
                # The mass is known exactly; the factor below may be large.
                short = torch.where(results["mass"] == 0, 1.0, 1 - form.mass)
            missing = short * (centre**2).sum(-1)
            results["value_spread"] += missing - ((results["out"] - centre) ** 2).sum(-1)
        if "key_mass" in names:
            _sweep(form, {"key_mass": results["key_mass"].zero_()}, results, {})
        found = {name: results[name] for name in names}
        return self._beyond_float32(form, found, results.get("rest")) if beyond else found

    def _beyond_float32(self, form: Form, results: dict[str, Tensor], rest: Tensor | None) -> dict[str, Tensor]:
        """The results, where rows that are NaN in float32 (scores or temperatures near the end of its range, or NaN
        in the inputs) are computed again in float64. `peak` and `rest` of such a row do not fit into float32: inf
        there makes a backward pass use float64, too."""
        names = tuple(results) if "key_mass" not in results else (*(n for n in results if n != "rest"), "rest")
        exact = self.forward(form.widened(), names)
        found = {}
        for name, result in results.items():
            if name == "lists":  # a backward pass in float64 makes its own
                found[name] = result
                continue
            value = exact[name].to(result.dtype)
            if name in ("peak", "rest"):
                value = value.masked_fill(~value.isnan(), math.inf)
            lost = result.isnan()
            if name == "key_mass" and rest is not None:  # a sum over rows
                lost = (rest.isnan() & ~exact["rest"].isnan()).any(2, keepdim=True)
            found[name] = torch.where(lost, value, result)
        return found

    def _empty(self, form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Uninitialised memory for the output and statistics."""
        results: dict[str, Tensor] = {}
        assert form.query is not None
        last, last_shape, dtype = form.query, None, form.dtype
        if type(last) is Tensor and last.dtype is dtype and last.is_contiguous():
            last_shape = last.shape
        for name, shape in self.output_shapes(form, names).items():
            if last_shape == shape:  # empty_like takes less time than empty
                last = torch.empty_like(last)
            else:
                last, last_shape = torch.empty(shape, dtype=dtype), shape
            results[name] = last
        return results

    def backward(
        self, form: Form, needed: tuple[str, ...], outputs: dict[str, Tensor], grads: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The kernel computes sums per row, key or pair. The gradient of each slot is computed from these sums."""
        tensors = form.tensors()
        B, H, Tq, Tk = form.shape
        if 0 in (B, H, Tq):
            return {slot: torch.zeros_like(tensors[slot]) for slot in needed}
        if form.family == "kl" and form.marginal == "free" and "lse" not in outputs and {"entropy", "lse"} & set(grads):
            outputs = outputs | self.forward(form, ("lse",))

        others = tuple(slot for slot in needed if slot != "density")
        if len(others) < len(needed) and not {"query", "key", "value"}.issuperset(others):
            # For the gradient of the density, a density of 0 counts as a tiny one. In a row whose other priors are tiny
            # as well this is not negligible, so it must not enter other sums: these take a pass of their own.
            parts = (self.backward(form, slots, outputs, grads) for slots in (others, ("density",)))
            return dict(pair for part in parts for pair in part.items())
        kinds = {slot: _kind(form, slot, tensors[slot]) for slot in needed}
        wanted = {field for kind in kinds.values() for field in kind}
        chunks = _chunks(form, not wanted.isdisjoint(("dense_g", "dense_ds")))
        captured = {field: tensors[field].numel() for field in wanted if field.startswith("captured.")}
        chunks, units = _units(form, chunks, sum(captured.values()))
        found: dict[str, Tensor] = {}
        parts = (chunks,) if chunks > 1 else ()
        for field in wanted:
            if field == "dq":
                found[field] = torch.empty((*parts, *tensors["query"].shape), dtype=form.dtype)
            elif field in ("dk", "dv"):
                found[field] = torch.empty(tensors["key" if field == "dk" else "value"].shape, dtype=form.dtype)
            elif field == "relative_g":
                assert form.relative is not None
                found[field] = torch.zeros((*parts, B, H, 1, form.relative.shape[3]), dtype=torch.float64)
            elif field in ("d_query_factor", "d_key_factor"):
                assert form.query_factor is not None
                rows = (*parts, B, H, Tq) if field == "d_query_factor" else (B, H, Tk)
                found[field] = torch.zeros((*rows, form.query_factor.shape[3]), dtype=form.dtype)
            elif field == "row_gl":
                shape = (*parts, len(link_of(form).arguments(form)), B, H, Tq)
                found[field] = torch.empty(shape, dtype=form.dtype)
            elif field in captured:
                found[field] = torch.zeros((units, *tensors[field].shape), dtype=torch.float64)
            elif field.startswith("row"):
                found[field] = torch.empty((*parts, B, H, Tq), dtype=form.dtype)
            elif field.startswith("key"):
                found[field] = torch.zeros((B, H, Tk), dtype=form.dtype)
            else:  # the shape of the user's own tensor
                shapes = [tensors[slot].shape for slot in needed if kinds[slot] == (field,)]
                found[field] = torch.zeros(torch.broadcast_shapes(*shapes), dtype=form.dtype)
        if _sweep(form, found, outputs, grads, chunks, _DENSITY_LEAST if "density" in needed else 0.0):
            exact = form.widened()  # rows that float32 cannot hold (`_beyond_float32`)
            outputs = self.forward(exact, tuple(outputs))
            grads = {name: grad.double() for name, grad in grads.items()}
            gradients = self.backward(exact, needed, outputs, grads)
            return {slot: gradient.to(tensors[slot].dtype) for slot, gradient in gradients.items()}
        for field in captured:
            found[field] = _in_order(found[field])
        for field in wanted if parts else ():
            if field in ("dq", "relative_g", "d_query_factor") or (field.startswith("row") and field != "row_dot"):
                found[field] = _in_order(found[field])
            elif field == "row_dot":
                found[field] = found[field][0]

        results = {}
        rows = None
        for slot in needed:
            if slot in PARAMETERS:
                rows = rows or RowGradient(form, found, outputs, grads, centred(form))
                grad = rows.of(slot)
            else:
                grad = _from_sums(form, slot, kinds[slot][0], found)
            if grad.shape != tensors[slot].shape:
                grad = grad.sum_to_size(tensors[slot].shape)
            results[slot] = grad if grad.dtype == tensors[slot].dtype else grad.to(tensors[slot].dtype)
        return results

    def topk(self, form: Form, n: int) -> tuple[Tensor, Tensor]:
        """As the contract; equal weights are ordered by key."""
        weights = torch.empty((*form.shape[:3], n), dtype=form.dtype)
        keys = torch.empty((*form.shape[:3], n), dtype=torch.long)
        self._read(form, weights, picks=n, picked_weights=weights.data_ptr(), picked_keys=keys.data_ptr())
        return weights, keys

    def weights_at(self, form: Form, index: Tensor) -> Tensor:
        weights = torch.empty(index.shape, dtype=form.dtype)
        self._read(form, weights, index, picks=index.shape[3], picked_weights=weights.data_ptr())
        return weights

    def block_sums(self, form: Form, block: int) -> Tensor:
        B, H, Tq, Tk = form.shape
        sums = torch.zeros((B, H, -(-Tq // block), -(-Tk // block)), dtype=form.dtype)
        self._read(form, sums, block=min(block, max(Tq, Tk)), block_sums=sums.data_ptr())
        return sums

    def _read(self, form: Form, result: Tensor, index: Tensor | None = None, **fields: int) -> None:
        """Find each row's price, compute the plan again from it, and fill the fields."""
        if not result.numel():
            return
        assert form.key is not None
        module, _ = extension()
        form = dataclasses.replace(form, value=form.key[..., :0])  # no output is needed
        price = self.forward(form, _PRICE)
        if form.dtype == torch.float32 and bool((price["rest"] == math.inf).any()):  # `_beyond_float32`
            form, narrow = form.widened(), result
            result = torch.zeros_like(narrow, dtype=form.dtype)
            fields = {n: result.data_ptr() if v == narrow.data_ptr() else v for n, v in fields.items()}
            self._read(form, result, index, **fields)
            narrow.copy_(result)
            return
        record = record_of(form)
        for name in _PRICE:
            record.tensor(_SAVED[name], price[name])
        if index is not None:
            record.tensor("index", index)
        for field, value in fields.items():
            record.put(field, value)
        module.reading(record.record)


def _plain_bfloat16(form: Form) -> bool:
    """Whether PyTorch's fused kernel serves the problem: softmax in bfloat16, causal or without any prior, of a size
    at which it takes matrix products."""
    assert form.query is not None and form.value is not None
    _, _, Tq, Tk = form.shape
    if form.query.dtype != torch.bfloat16 or form.family != "kl" or form.marginal != "rows" or form.mass != 1:
        return False
    if form.softcap is not None or form.dropout_p > 0 or form.hard or not isinstance(form.temperature, float):
        return False
    causal = form.left is None and form.right == 0 and form.offset == 0
    masks = (form.mask, form.score_bias, form.query_ids, form.selected, form.tile_map)
    plain = not form.weighted and all(mask is None for mask in masks) and (causal or form.left is form.right is None)
    return plain and form.query.shape[-1] == form.value.shape[-1] and min(Tq, Tk) >= 64


def _may_list(form: Form) -> bool:
    """Whether forward may store lists of the keys with weight, so that backward need not search them
    (sparse_rows.h)."""
    _, _, Tq, Tk = form.shape
    plain = not form.weighted and form.score_bias is None and not form.softcap
    large = form.marginal in ("rows", "sink") and Tq >= 16 and Tk >= 512
    return plain and large and (form.family == "tsallis" or (form.family not in FAMILIES and lists_keys(form)))


def _centred_squares(form: Form) -> tuple[Tensor, Tensor]:
    """A point among the values [B, Hkv, 1, Dv], and each key's squared distance to it [B, Hkv, 1, Tk]."""
    assert form.value is not None
    value = form.value.detach().to(form.dtype)
    read = _readable(form) & value.isfinite()  # keys that are masked for every query may hold NaN
    count = read.sum(2, keepdim=True).clamp(min=1)
    centre = torch.where(read, value / count, 0.0).sum(2, keepdim=True)
    squares = torch.where(value.isfinite(), value - centre, 0.0).square().sum(-1)
    return centre, squares.clamp(max=torch.finfo(form.dtype).max)[:, :, None].contiguous()


def _readable(form: Form) -> Tensor:
    """Keys that no single part of the prior masks for every query: [B|1, Hkv|1, Tk, 1]."""
    assert form.key is not None
    heads, (_, _, Tq, Tk) = form.key.shape[1], form.shape
    position = torch.arange(Tk)[:, None] - form.offset
    read = torch.ones(1, 1, Tk, 1, dtype=torch.bool)
    if form.left is not None:
        read = read & (position >= -form.left)
    if form.right is not None:
        read = read & (position < Tq + form.right)
    for tensor in (form.mask, form.score_bias, *form.log_priors):
        if tensor is not None:
            keys = (tensor if tensor.dtype == torch.bool else tensor != -math.inf).any(2)
            read = read & _of_key_heads(keys, heads)[..., None]
    if form.tile_map is not None and form.tiles is not None:
        keys = (form.tiles[form.tile_map] != 0).any(2).flatten(2)[..., :Tk]  # [B|1, H|1, Tk]
        read = read & _of_key_heads(keys, heads)[..., None]
    if form.selected is not None:
        blocks = -(-Tk // form.selected_block)
        some = torch.zeros(*form.selected.shape[:2], blocks + 1, dtype=torch.bool)
        some.scatter_(2, torch.where(form.selected < 0, blocks, form.selected).flatten(2), True)
        keys = some[..., :blocks].repeat_interleave(form.selected_block, 2)[..., :Tk]
        read = read & _of_key_heads(keys, heads)[..., None]
    return read if form.key_ids is None else read & (form.key_ids >= 0).mT


def _of_key_heads(keys: Tensor, heads: int) -> Tensor:
    """What some query head reads of each key, by key heads: [B|1, heads|1, Tk]."""
    return keys.unflatten(1, (heads, -1)).any(2) if keys.shape[1] > heads else keys


def _kind(form: Form, slot: str, tensor: Tensor) -> tuple[str, ...]:
    """The sums from which the gradient of a slot is computed. For a bias they depend on how it broadcasts."""
    if slot.startswith("captured."):
        return (slot,)
    sums = SUMS_KL if form.family == "kl" else SUMS_LINK if form.family in FAMILIES else SUMS_OWN
    fixed = (_SUMS | sums).get(slot)
    if fixed is not None:
        return fixed
    _, _, Tq, Tk = form.shape
    score = slot == "score_bias"
    if tensor.shape[3] == 1 and Tk > 1:
        return ("row_g",) if score else ("row_gp",)
    if tensor.shape[2] == 1 and Tq > 1:
        return ("key_ds",) if score else ("key_g",)
    return ("dense_ds",) if score else ("dense_g",)


def _chunks(form: Form, dense: bool) -> int:
    """The number of chunks of keys in a backward pass. It depends on the shape alone, so results do not depend on the
    number of threads."""
    assert form.query is not None and form.key is not None
    B, _, _, Tk = form.shape
    if Tk <= 512:
        return 1
    room = 2**26 // max(1, form.query.numel() * form.dtype.itemsize)
    wanted = 16 if dense else -(-16 // max(1, B * form.key.shape[1]))
    return max(1, min(wanted, room, -(-Tk // 512)))


def _units(form: Form, chunks: int, captured: int) -> tuple[int, int]:
    """The number of chunks, and of units of work with sums of their own over the elements of captured tensors: each
    batch entry and key/value head of each chunk, or, if these would take too much memory, each chunk."""
    assert form.key is not None
    heads = form.shape[0] * form.key.shape[1]
    if chunks * heads * captured <= _CAPTURED_SUMS:
        return chunks, chunks * heads
    chunks = max(1, min(chunks, _CAPTURED_SUMS // captured))
    return chunks, chunks


def _in_order(parts: Tensor) -> Tensor:
    """The sum over the first dimension, in a fixed order."""
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


def _sweep(
    form: Form,
    fields: dict[str, Tensor],
    outputs: dict[str, Tensor],
    grads: dict[str, Tensor],
    chunks: int = 0,
    density_least: float = 0.0,
) -> bool:
    """Compute the plan again from its price and fill the fields. A density counts as at least `density_least`. Returns
    whether some row needs float64."""
    module, _ = extension()
    record = record_of(form)
    record.put("chunks", chunks or _chunks(form, False))
    for name, output in outputs.items():
        if name in _SAVED:
            record.tensor(_SAVED[name], output)
    for name, grad in grads.items():
        record.tensor(f"grad_{name}", grad)
    if density_least:
        record.put("density_least", density_least)
    assert form.key is not None
    sums = [fields.get(f"captured.{n}") for n in range(len(form.captured))]
    if form.function is not None and any(part is not None for part in sums):
        units = next(len(part) for part in sums if part is not None)
        record.put("function_gradient", function_address(form, form.function, "scatter"))
        record.numbers("captured_g", [n for t in sums for n in ((0, 0) if t is None else (t.data_ptr(), t[0].numel()))])
        record.put("captured_shared", units == chunks and form.shape[0] * form.key.shape[1] > 1)
    for field, tensor in fields.items():
        if field.startswith("captured."):
            continue
        if field.startswith("dense"):
            record.tensor(field, tensor)
        else:
            record.put(field, tensor.data_ptr())
    return module.backward(record.record)


def _from_sums(form: Form, slot: str, kind: str, found: dict[str, Tensor]) -> Tensor:
    """The gradient of a tensor slot, from sums per row, per key or per pair."""
    total = found[kind]
    if kind in ("row_g", "row_gp"):
        total = (total / row_value(form.temperature) if slot == "score_bias" else total)[..., None]
    elif kind.startswith("key_"):
        total = total[:, :, None]
    if slot == "decay_key":
        return -total
    if slot == "density":
        assert form.density is not None
        return total.sum_to_size(form.density.shape) / form.density.clamp(min=_DENSITY_LEAST)
    return total
