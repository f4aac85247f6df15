"""The native CPU engine: fused kernels (csrc/) behind the backend protocol. O(T) memory, statistics from the same pass.

Here a Form becomes the flat record that csrc/problem.h declares: addresses, strides (0 where a dimension broadcasts)
and numbers. Outputs are allocated here, working memory in csrc/module.cpp; the kernels allocate nothing. The extension
is loaded on first use.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import struct
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..checks import KNOWN_TYPES
from ..form import Form, output_shapes

_TYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int64: 4,
    torch.bool: 5,
}
_FAMILIES = {"kl": 0, "tsallis": 1, "fermi_dirac": 2}
_MARGINALS = {"rows": 0, "sink": 1, "relax": 2, "free": 3}
_UNBOUNDED = 2**40  # a band's open side
_SMALL = 2**21  # multiply-adds that one thread does sooner than it wakes another
_PRIORS = 4  # log-priors that a record holds
_CENTRED = 1.25  # Tsallis orders below this are computed as a distance from KL, where the price is to be found
_PRICE = ("dual", "peak", "rest")  # the plan can be made again from these
# The record's first fields, in order: every call has them, so they are written in one go.
_HEAD = (
    *("threads", "compute", "B", "H", "Hkv", "Tq", "Tk", "D", "Dv", "left", "right", "offset", "family"),
    *("marginal", "threshold"),
    *("scale", "softcap", "mass", "kept_scale", "level_value", "temperature_value", "alpha_value"),
    *("centred", "scratch", "query", "key", "value"),
)
# The form's other tensors (their name in the record is the same), and outputs that a backward pass may look at.
_TENSORS = ("score_bias", "mask", "slopes", "query_ids", "key_ids", "dropout_key", "level", "temperature", "alpha")
_SAVED = {name: f"saved_{name}" for name in ("out", "lse", "entropy", "tilt", "tilt_log", "mass", "lists", *_PRICE)}
# A statistic's field where its name is taken.
_FIELDS = {"value": "free_energy", "mass": "mass_sent", "value_spread": "spread"}


_loaded: tuple[Any, str] | None = None


def _extension() -> tuple[Any, str]:
    """The compiled module, or None and why. (Not functools.cache: torch.compile warns at it.)"""
    global _loaded
    if _loaded is None:
        try:
            from .. import _native  # type: ignore[attr-defined]  # torch is imported: its OpenMP runtime is the one that the module finds

            _loaded = _native, ""
        except ImportError as error:
            if "REGARD_ISA" in str(error):  # asked for by name: no other backend takes its place
                raise ValueError(str(error)) from None
            missing = importlib.util.find_spec("regard._native") is None
            reason = "was not built (no C++ compiler at installation?)" if missing else f"does not load: {error}"
            _loaded = None, f"the native engine {reason}"
            warnings.warn(f"regard runs on slower backends: {_loaded[1]}", stacklevel=2)
    return _loaded


class _Layout:
    """Where each field lies in the record, and what writes it there: write(record, at, *values)."""

    def __init__(self, fields: list[list[str]]) -> None:
        self.fields: dict[str, tuple[Any, int]] = {}
        letters, size = "", 0
        for name, kind in fields:
            letter = {"int": "q", "real": "d", "tensor": "6q"}[kind]
            packer = struct.Struct("=" + letter)
            self.fields[name] = packer.pack_into, size
            letters, size = letters + letter, size + packer.size
        assert tuple(self.fields)[: len(_HEAD)] == _HEAD
        after = self.fields["score_bias"][1]
        self.head = struct.Struct("=" + letters[: letters.index("6q")] + "6q6q6q")
        assert self.head.size == after
        self.blank = bytes(size - after)


@cache
def _layout() -> _Layout:
    return _Layout(_extension()[0].fields())


class _Record:
    """One call's record, field by field."""

    def __init__(self, *head: float) -> None:
        layout = _layout()
        self.fields, self.record = layout.fields, bytearray(layout.head.pack(*head) + layout.blank)

    def put(self, name: str, *values: float) -> None:
        write, at = self.fields[name]
        write(self.record, at, *values)

    def tensor(self, name: str, tensor: Tensor) -> None:
        """A tensor that broadcasts where a size is 1."""
        strides = tensor.stride()
        if 1 in tensor.shape:
            strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape, strides, strict=True)]
        if len(strides) == 3:
            strides = (*strides, 0)
        write, at = self.fields[name]
        write(self.record, at, tensor.data_ptr(), _TYPES[tensor.dtype], *strides)


def unsupported(form: Form, names: tuple[str, ...]) -> str | None:
    """Why the native engine cannot serve the problem, or None."""
    module, reason = _extension()
    if module is None:
        return reason
    assert form.query is not None
    if not form.query.is_cpu:
        return f"runs on the CPU only (query is on {form.query.device})"
    for tensor in (form.query, form.key, form.value):  # lowering has checked the others
        if type(tensor) not in KNOWN_TYPES:
            return f"reads memory, which a subclass of Tensor need not have (got a {type(tensor).__name__})"
    if form.family not in _FAMILIES:
        return "has kernels for KL, Tsallis and Fermi-Dirac only"
    if form.marginal not in _MARGINALS:
        return "solves rows only (regard.attention brings rows and columns to rows)"
    if form.family == "fermi_dirac" and form.marginal != "free":
        return "has Fermi-Dirac with a free marginal only"
    if form.hard:
        return "has no temperature 0"
    if isinstance(form.temperature, float) and form.temperature < 1e-30 and form.dtype == torch.float32:
        return "has no temperature below 1e-30 in float32 (scores would overflow)"
    if len(form.log_priors) > _PRIORS:
        return f"multiplies at most {_PRIORS} biases (got {len(form.log_priors)})"
    if form.first_query or form.first_key:
        return "serves whole plans, not blocks of one"
    return None


def saved(form: Form, names: tuple[str, ...]) -> tuple[str, ...]:
    """What backward wants from forward besides the caller's statistics."""
    if form.family == "kl":  # the dual itself is asked for by few gradients
        rows = form.marginal == "relax" or not isinstance(form.level, float) or not isinstance(form.temperature, float)
        return _PRICE if rows or form.slopes is not None else ("peak", "rest")
    centre = ("tilt",) if form.marginal != "free" else ()
    if "entropy" in names:
        centre += ("tilt_log",) if form.marginal != "free" else ("mass",)
    return _PRICE + centre + (("lists",) if _may_list(form) else ())


def _may_list(form: Form) -> bool:
    """Whether rows may have lists of their few keys, from which backward makes the plan again (csrc/lists.h)."""
    _, _, Tq, Tk = form.shape
    plain = form.slopes is None and not form.log_priors and form.score_bias is None and not form.softcap
    return plain and form.family == "tsallis" and form.marginal in ("rows", "sink") and Tq >= 16 and Tk >= 512


def _centred(form: Form) -> bool:
    """Whether y = (alpha - 1)(s - lambda)/tau is computed as its distance from 1 (csrc/links.h)."""
    least = float(form.alpha.detach().min()) if isinstance(form.alpha, Tensor) else form.alpha
    return least < _CENTRED and form.marginal != "free"


def _record(form: Form) -> _Record:
    query, key, value = form.query, form.key, form.value
    assert query is not None and key is not None and value is not None
    B, H, Tq, D = query.shape
    _, Hkv, Tk, Dv = value.shape
    element = _TYPES[query.dtype]
    record = _Record(
        1 if B * H * Tq * Tk * (D + Dv) < _SMALL else torch.get_num_threads(),
        1 if element == 1 else 0,  # float64 is computed in itself, all else in float32
        B,
        H,
        Hkv,
        Tq,
        Tk,
        D,
        Dv,
        _UNBOUNDED if form.left is None else form.left,
        _UNBOUNDED if form.right is None else form.right,
        form.offset,
        _FAMILIES[form.family],
        _MARGINALS[form.marginal],
        int(form.dropout_p * 2**32),
        form.scale,
        form.softcap or 0.0,
        form.mass,
        1 / (1 - form.dropout_p) if form.dropout_p < 1 else 0.0,
        form.level if isinstance(form.level, float) else 0.0,
        form.temperature if isinstance(form.temperature, float) else 0.0,
        form.alpha if isinstance(form.alpha, float) else 0.0,
        form.family == "tsallis" and _centred(form),
        0,  # scratch: the module gives it
        *(query.data_ptr(), element, *query.stride()),
        *(key.data_ptr(), element, *key.stride()),
        *(value.data_ptr(), element, *value.stride()),
    )
    slots = form.__dict__
    for name in _TENSORS:
        tensor = slots[name]
        if tensor is not None and not isinstance(tensor, float):
            record.tensor(name, tensor)
    for n, prior in enumerate(form.log_priors):
        record.tensor(f"prior{n}", prior)
    return record


def forward(form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Output and statistics."""
    module, _ = _extension()
    assert form.query is not None
    results = _empty(form, names)
    if form.query.numel() == 0 and 0 in form.query.shape[:3]:
        return {n: t.zero_() for n, t in results.items()}
    if (
        "value_spread" in names and form.dropout_key is not None
    ):  # it wants the output before dropout: a pass of its own
        plain = dataclasses.replace(form, dropout_p=0.0, dropout_key=None)
        rest = tuple(name for name in names if name != "value_spread")
        found = forward(form, rest) | forward(plain, ("value_spread",))
        return {name: found[name] for name in names}
    record = _record(form)
    for name, result in results.items():
        if name == "lists":
            record.tensor(name, result)
        elif name != "key_mass":
            record.put(_FIELDS.get(name, name), result.data_ptr())
    if "key_mass" in names:  # the sweep makes the plan again
        for name in _PRICE:
            if name not in names:
                results[name] = torch.empty(form.shape[:3], dtype=form.dtype)
                record.put(name, results[name].data_ptr())
    centre = squares = None
    if "value_spread" in names:
        centre, squares = _centred_squares(form)
        record.tensor("squares", squares)
        if "out" not in names:
            results["out"] = torch.empty(output_shapes(form, ("out",))["out"], dtype=form.dtype)
            record.put("out", results["out"].data_ptr())
        if "mass" not in names:
            results["mass"] = torch.empty(form.shape[:3], dtype=form.dtype)
            record.put("mass_sent", results["mass"].data_ptr())
    module.forward(record.record)
    if centre is not None:
        # sum p |v|^2 - |o|^2 from a centre that keeps the digits under a large common offset
        centre = centre.repeat_interleave(form.group, 1)
        short = 1 - results["mass"]
        if form.marginal == "rows":  # known exactly, and multiplied by what may be large
            short = torch.where(results["mass"] == 0, 1.0, 1 - form.mass)
        missing = short * (centre**2).sum(-1)
        results["value_spread"] += missing - ((results["out"] - centre) ** 2).sum(-1)
    if "key_mass" in names:
        _sweep(form, {"key_mass": results["key_mass"].zero_()}, results, {})
    return {name: results[name] for name in names}


def _empty(form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Room for the output and statistics."""
    results: dict[str, Tensor] = {}
    assert form.query is not None
    last, last_shape, dtype = form.query, None, form.dtype
    if type(last) is Tensor and last.dtype is dtype and last.is_contiguous():
        last_shape = last.shape
    for name, shape in output_shapes(form, names).items():
        if last_shape == shape:  # empty_like has less to look at than empty
            last = torch.empty_like(last)
        else:
            last, last_shape = torch.empty(shape, dtype=dtype), shape
        results[name] = last
    return results


def _centred_squares(form: Form) -> tuple[Tensor, Tensor]:
    """A point amid the values [B, Hkv, 1, Dv], and each key's squared distance to it [B, Hkv, 1, Tk]."""
    assert form.value is not None
    value = form.value.detach().to(form.dtype)
    read = _readable(form) & value.isfinite()  # keys that nobody reads may hold anything
    count = read.sum(2, keepdim=True).clamp(min=1)
    centre = torch.where(read, value / count, 0.0).sum(2, keepdim=True)
    squares = torch.where(value.isfinite(), value - centre, 0.0).square().sum(-1)
    return centre, squares.clamp(max=torch.finfo(form.dtype).max)[:, :, None].contiguous()


def _readable(form: Form) -> Tensor:
    """The keys that somebody may read, as each part of the problem says for itself: [B|1, Hkv|1, Tk, 1]."""
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
            if keys.shape[1] > heads:
                keys = keys.unflatten(1, (heads, -1)).any(2)
            read = read & keys[..., None]
    return read if form.key_ids is None else read & (form.key_ids >= 0).mT


def backward(
    form: Form, needed: tuple[str, ...], outputs: dict[str, Tensor], grads: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of the needed slots; what the kernel sums per row, key or pair is brought to each slot's own shape."""
    tensors = form.tensors()
    B, H, Tq, Tk = form.shape
    if 0 in (B, H, Tq):
        return {slot: torch.zeros_like(tensors[slot]) for slot in needed}
    if form.family == "kl" and form.marginal == "free" and "lse" not in outputs and {"entropy", "lse"} & set(grads):
        outputs = outputs | forward(form, ("lse",))

    kinds = {slot: _kind(form, slot, tensors[slot]) for slot in needed}
    wanted = {field for kind in kinds.values() for field in kind}
    chunks = _chunks(form, not wanted.isdisjoint(("dense_g", "dense_ds")))
    found: dict[str, Tensor] = {}
    parts = (chunks,) if chunks > 1 else ()
    for field in wanted:
        if field == "dq":
            found[field] = torch.empty((*parts, *tensors["query"].shape), dtype=form.dtype)
        elif field in ("dk", "dv"):
            found[field] = torch.empty(tensors["key" if field == "dk" else "value"].shape, dtype=form.dtype)
        elif field.startswith("row"):
            found[field] = torch.empty((*parts, B, H, Tq), dtype=form.dtype)
        elif field.startswith("key"):
            found[field] = torch.zeros((B, H, Tk), dtype=form.dtype)
        else:  # as large as the user's own
            shapes = [tensors[slot].shape for slot in needed if kinds[slot] == (field,)]
            found[field] = torch.zeros(torch.broadcast_shapes(*shapes), dtype=form.dtype)
    _sweep(form, found, outputs, grads, chunks)
    for field in wanted if parts else ():
        if field == "dq" or (field.startswith("row") and field != "row_dot"):
            total = found[field][0]
            for part in found[field][1:]:
                total += part
            found[field] = total
        elif field == "row_dot":
            found[field] = found[field][0]

    results = {}
    for slot in needed:
        grad = _slot_gradient(form, slot, kinds[slot][0], found, outputs, grads)
        if grad.shape != tensors[slot].shape:
            grad = grad.sum_to_size(tensors[slot].shape)
        results[slot] = grad if grad.dtype == tensors[slot].dtype else grad.to(tensors[slot].dtype)
    return results


# The kernel's sums that a slot's gradient is made of: with KL, and with other regularisers.
_SUMS_KL = {
    "query": ("dq",),
    "key": ("dk",),
    "value": ("dv",),
    "slopes": ("row_gd", "row_pd", "row_g", "row_dot"),
    "temperature": ("row_gs", "row_g", "row_ps", "row_dot"),
    "level": ("row_dot",),
}
_SUMS_LINK = {
    "query": ("dq",),
    "key": ("dk",),
    "value": ("dv",),
    "slopes": ("row_gd",),
    "temperature": ("row_gs", "row_g", "row_dot"),
    "alpha": ("row_ga", "row_g", "row_dot"),
    "level": ("row_g", "row_dot"),
}


def _kind(form: Form, slot: str, tensor: Tensor) -> tuple[str, ...]:
    """The kernel's sums that a slot's gradient is made of; a bias's depend on how it broadcasts."""
    fixed = (_SUMS_KL if form.family == "kl" else _SUMS_LINK).get(slot)
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
    """Into how many chunks of keys a backward pass is cut: by the shape alone, never by the number of threads."""
    assert form.query is not None and form.key is not None
    B, _, _, Tk = form.shape
    if Tk <= 512:
        return 1
    room = 2**26 // max(1, form.query.numel() * form.dtype.itemsize)
    wanted = 16 if dense else -(-16 // max(1, B * form.key.shape[1]))
    return max(1, min(wanted, room, -(-Tk // 512)))


def _sweep(
    form: Form, fields: dict[str, Tensor], outputs: dict[str, Tensor], grads: dict[str, Tensor], chunks: int = 0
) -> None:
    """Make the plan again from its dual and fill the fields."""
    module, _ = _extension()
    record = _record(form)
    record.put("chunks", chunks or _chunks(form, False))
    for name, output in outputs.items():
        if name in _SAVED:
            record.tensor(_SAVED[name], output)
    for name, grad in grads.items():
        record.tensor(f"grad_{name}", grad)
    for field, tensor in fields.items():
        if field.startswith("dense"):
            record.tensor(field, tensor)
        else:
            record.put(field, tensor.data_ptr())
    module.backward(record.record)


# --- windows on the plan ----------------------------------------------------------------------------------------------


def topk(form: Form, n: int) -> tuple[Tensor, Tensor]:
    """The n largest weights of each row and their keys, [B, H, Tq, n]; equal weights by key."""
    weights = torch.empty((*form.shape[:3], n), dtype=form.dtype)
    keys = torch.empty((*form.shape[:3], n), dtype=torch.long)
    _read(form, weights, picks=n, picked_weights=weights.data_ptr(), picked_keys=keys.data_ptr())
    return weights, keys


def weights_at(form: Form, index: Tensor) -> Tensor:
    """The weights of chosen keys: int64 [B, H, Tq, n] -> [B, H, Tq, n]."""
    weights = torch.empty(index.shape, dtype=form.dtype)
    _read(form, weights, index, picks=index.shape[3], picked_weights=weights.data_ptr())
    return weights


def block_sums(form: Form, block: int) -> Tensor:
    """The plan's sums over blocks, [B, H, ceil(Tq/block), ceil(Tk/block)]."""
    B, H, Tq, Tk = form.shape
    sums = torch.zeros((B, H, -(-Tq // block), -(-Tk // block)), dtype=form.dtype)
    _read(form, sums, block=min(block, max(Tq, Tk)), block_sums=sums.data_ptr())
    return sums


def _read(form: Form, result: Tensor, index: Tensor | None = None, **fields: int) -> None:
    """Find each row's price, make the plan again from it, and fill what the fields ask for."""
    if not result.numel():
        return
    assert form.key is not None
    module, _ = _extension()
    form = dataclasses.replace(form, value=form.key[..., :0])  # nobody asks for an output
    price = forward(form, _PRICE)
    record = _record(form)
    for name in _PRICE:
        record.tensor(_SAVED[name], price[name])
    if index is not None:
        record.tensor("index", index)
    for field, value in fields.items():
        record.put(field, value)
    module.reading(record.record)


# --- gradients of single slots ----------------------------------------------------------------------------------------


def _row(x: Any) -> Any:
    """A row's parameter as the kernel's sums are: [B|1, H|1, Tq|1], or a number."""
    return x.squeeze(-1) if isinstance(x, Tensor) else x


def _slot_gradient(
    form: Form, slot: str, kind: str, found: dict[str, Tensor], outputs: dict[str, Tensor], grads: dict[str, Tensor]
) -> Tensor:
    """dL/dslot, broadcast: with G = tau dL/ds (of the null key too) everything follows by the chain rule."""
    if form.family != "kl" and slot in ("slopes", "level", "temperature", "alpha"):
        return _link_gradient(form, slot, found, outputs, grads)
    if slot in ("slopes", "level", "temperature"):
        tau, level, dual, dot = _row(form.temperature), _row(form.level), outputs["dual"], found["row_dot"]
        idle = dual == -torch.inf
        g_lse: Any = grads.get("lse", 0.0)
        expected: Any = g_lse  # sum of G, the null key's included, in exact arithmetic
        mass: Any = form.mass
        null: Any = 0.0  # the null key's G, weight and s - dual
        null_weight: Any = 0.0
        null_score: Any = 0.0
        by_level: Any = 0.0
        if form.marginal == "sink":
            null_score = level - dual
            null_weight = (null_score / tau).exp()
            null = g_lse - dot
            if "entropy" in grads:
                null = null - grads["entropy"] * (outputs["entropy"] + null_score / tau)
            null = null_weight * null
            by_level = null / tau
        elif form.marginal == "relax":
            by_level = torch.where(idle, 0.0, -dot * dual / (level * (tau + level)))
            expected = expected + dot * (tau / (tau + level))
            mass = torch.where(idle, 1.0, (dual / level).exp())
        elif form.marginal == "free":
            by_level = dot / tau
            expected = expected + dot
            mass = (outputs["lse"] + level / tau).exp() if "lse" in outputs else torch.zeros_like(dot)
        if slot == "level":
            return by_level[..., None]
        # What the baseline's rounding let through, to be taken out at the centre of the plan. (Free rows have no
        # baseline: there it is the rounding of what lse and entropy add, if they do.)
        excess: Any = found["row_g"] + null - expected
        excess = torch.where(mass > 1e-30, excess / mass, 0.0) if form.marginal == "free" else excess / mass
        if slot == "slopes":
            return torch.where(idle, 0.0, found["row_pd"] * excess - found["row_gd"])[..., None]
        # Envelope theorem: dL/dtau = -(sum G (s - dual) + dual * g_lse)/tau^2 for every marginal, null key included.
        by_tau = found["row_gs"] + null * null_score - (found["row_ps"] + null_weight * null_score) * excess
        by_tau = by_tau + torch.where(idle, 0.0, dual) * g_lse
        return torch.where(idle, 0.0, -by_tau / tau**2)[..., None]
    if kind in ("row_g", "row_gp"):
        total = found[kind]
        return (total / _row(form.temperature) if slot == "score_bias" else total)[..., None]
    if kind.startswith("key_"):
        return found[kind][:, :, None]
    return found[kind]


def _link_gradient(
    form: Form, slot: str, found: dict[str, Tensor], outputs: dict[str, Tensor], grads: dict[str, Tensor]
) -> Tensor:
    """dL/dslot of a row's parameter where the regulariser is not KL; the kernel's sums lack the null key's part."""
    if slot == "slopes":
        return -found["row_gd"][..., None]
    tau, level, alpha, dual = _row(form.temperature), _row(form.level), _row(form.alpha), outputs["dual"]
    baseline, idle = found["row_dot"], dual == -torch.inf
    y: Any = 1.0
    p: Any = 0.0
    advantage: Any = 0.0
    gain: Any = 0.0
    mass: Any = 0.0
    if form.marginal == "sink":
        # y, p and w of the null key, and its advantage: it has no value, so only the entropy may want it.
        y = ((alpha - 1) * (level - dual) / tau).clamp(min=0)
        inside, y = ~(y <= 0), torch.where(y <= 0, 1.0, y)  # NaN stays
        p = y ** (1 / (alpha - 1))
        advantage = -baseline
        if "entropy" in grads:
            advantage = advantage - grads["entropy"] * (y.log() / (alpha - 1) + outputs["entropy"])  # p may be 0
        advantage = torch.where(inside, advantage, 0.0)
        gain = p / y * advantage
    # What the keys' G add up to, in exact arithmetic.
    total: Any = 0.0
    if form.marginal == "sink":
        total = -gain
    elif form.marginal == "relax":
        mass = torch.where(idle, 0.0, (dual / level).exp())
        total = torch.where(idle, 0.0, baseline * tau * mass / level)
    elif form.marginal == "free":
        total = found["row_g"]
    if slot == "level":
        if form.marginal == "sink":
            result = gain / tau
        elif form.marginal == "relax":
            result = torch.where(idle, 0.0, -baseline * mass * dual / level**2)
        else:
            result = total / tau
    elif slot == "temperature":
        by_score = found["row_gs"]  # the sum of G (s - lambda), less a known part
        if form.family == "tsallis" and _centred(form):
            by_score = by_score + total * tau / (alpha - 1)
        if form.marginal == "sink":
            by_score = by_score + gain * (level - dual)
        result = -by_score / tau**2
    else:
        result = found["row_ga"]
        if form.marginal != "free":
            # What the baseline's rounding let through is taken out as if all keys were like the best one.
            best = outputs["rest"].double() + float(_centred(form))
            best = torch.where(best > 0, best, 1.0)
            change = (best - 1 - best * best.log()) / (alpha - 1) ** 2
            result = result - (found["row_g"] - total) * change.to(form.dtype)
        if form.marginal == "sink":
            y = y.double()
            result = result + p * advantage * (1 - 1 / y - y.log()).to(form.dtype) / (alpha - 1) ** 2
        elif form.marginal != "rows":  # the sum moves lambda + tau/(alpha - 1) with alpha; here lambda itself counts
            result = result + total / (alpha - 1) ** 2
    return result[..., None]
