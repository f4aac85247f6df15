"""The native CPU engine: fused kernels (csrc/) behind the backend protocol. O(T) memory, statistics from the same pass.

Here a Form becomes the flat record that csrc/problem.h declares: addresses, strides (0 where a dimension broadcasts) and
numbers. Outputs and working memory are allocated here; the kernels allocate nothing. The extension is loaded on first use.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..form import Form, output_shapes

_TYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int64: 4,
    torch.bool: 5,
}
_MARGINALS = {"rows": 0, "sink": 1, "relax": 2, "free": 3}
_UNBOUNDED = 2**40  # a band's open side
_PRIORS = 4  # log-priors that a record holds
# A statistic's field where its name is taken.
_FIELDS = {"value": "free_energy", "mass": "mass_sent", "value_spread": "spread"}


@cache
def _extension() -> tuple[Any, str]:
    """The compiled module, or None and why."""
    try:
        from .. import _native  # torch is imported: its OpenMP runtime is the one that the module finds
    except ImportError as error:
        return None, f"the native engine was not built: {error}"
    return _native, ""


class _Layout:
    """Where each field lies in the record."""

    def __init__(self, fields: list[list[str]]) -> None:
        self.at: dict[str, int] = {}
        formats, blank = [], []
        for name, kind in fields:
            self.at[name] = len(blank)
            count, letter = {"int": (1, "q"), "real": (1, "d"), "tensor": (6, "q")}[kind]
            formats.append(letter * count)
            blank += [0.0 if kind == "real" else 0] * count
        self.blank, self.pack = blank, struct.Struct("=" + "".join(formats)).pack


@cache
def _layout() -> _Layout:
    return _Layout(_extension()[0].fields())


class _Record:
    """One call's record, field by field."""

    def __init__(self) -> None:
        layout = _layout()
        self.at, self.values, self.pack = layout.at, layout.blank.copy(), layout.pack

    def put(self, name: str, value: float) -> None:
        self.values[self.at[name]] = value

    def tensor(self, name: str, tensor: Tensor | None) -> None:
        if tensor is None:
            return
        strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        start = self.at[name]
        self.values[start : start + 2 + len(strides)] = [tensor.data_ptr(), _TYPES[tensor.dtype], *strides]

    def bytes(self) -> bytes:
        return self.pack(*self.values)


def unsupported(form: Form, names: tuple[str, ...]) -> str | None:
    """Why the native engine cannot serve the problem, or None."""
    module, reason = _extension()
    if module is None:
        return reason
    assert form.query is not None
    if form.query.device.type != "cpu":
        return f"runs on the CPU only (query is on {form.query.device})"
    if form.family != "kl":
        return f"has no kernel for {form.regularizer!r} yet"
    if form.hard:
        return "has no temperature 0"
    if len(form.log_priors) > _PRIORS:
        return f"multiplies at most {_PRIORS} biases (got {len(form.log_priors)})"
    if "key_mass" in names:
        return "has no key_mass yet"
    if "value_spread" in names and form.dropout_p > 0:
        return "has no value_spread under dropout"
    if form.first_query or form.first_key:
        return "serves whole plans, not blocks of one"
    if torch.is_grad_enabled() and any(t.requires_grad for t in form.tensors().values()):
        return "has no gradient yet"
    if torch.autograd.forward_ad._current_level >= 0:
        return "has no forward mode"
    return None


def _record(form: Form) -> _Record:
    assert form.query is not None and form.key is not None and form.value is not None
    record = _Record()
    B, H, Tq, Tk = form.shape
    numbers = {
        "threads": torch.get_num_threads(),
        "compute": _TYPES[form.dtype],
        "B": B,
        "H": H,
        "Hkv": form.key.shape[1],
        "Tq": Tq,
        "Tk": Tk,
        "D": form.query.shape[3],
        "Dv": form.value.shape[3],
        "left": _UNBOUNDED if form.left is None else form.left,
        "right": _UNBOUNDED if form.right is None else form.right,
        "offset": form.offset,
        "marginal": _MARGINALS[form.marginal],
        "scale": form.scale,
        "softcap": form.softcap or 0.0,
        "mass": form.mass,
    }
    for name, number in numbers.items():
        record.put(name, number)
    for name in ("query", "key", "value", "score_bias", "mask", "slopes", "query_ids", "key_ids"):
        record.tensor(name, getattr(form, name))
    for n, prior in enumerate(form.log_priors):
        record.tensor(f"prior{n}", prior)
    for name, scalar in (("level", form.level), ("temperature", form.temperature)):
        if isinstance(scalar, Tensor):
            record.tensor(name, scalar)
        else:
            record.put(f"{name}_value", scalar)
    if form.dropout_key is not None:
        record.tensor("dropout_key", form.dropout_key)
        record.put("threshold", int(form.dropout_p * 2**32))
        record.put("kept_scale", 1 / (1 - form.dropout_p) if form.dropout_p < 1 else 0.0)
    return record


def forward(form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Output and statistics."""
    module, _ = _extension()
    assert form.query is not None and form.value is not None
    shapes = output_shapes(form, names)
    results = {n: torch.empty(s, dtype=form.dtype) for n, s in shapes.items()}
    if 0 in form.shape[:3]:
        return {n: t.zero_() for n, t in results.items()}
    record = _record(form)
    for name, result in results.items():
        record.put(_FIELDS.get(name, name), result.data_ptr())
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
    packed = record.bytes()
    scratch = torch.empty(module.forward_scratch(packed), dtype=torch.uint8)
    module.forward(packed, scratch.data_ptr())
    if centre is not None:
        # sum p |v|^2 - |o|^2 from a centre that keeps the digits under a large common offset
        centre = centre.repeat_interleave(form.group, 1)
        missing = (1 - results["mass"]) * (centre**2).sum(-1)
        results["value_spread"] += missing - ((results["out"] - centre) ** 2).sum(-1)
    return {name: results[name] for name in names}


def _centred_squares(form: Form) -> tuple[Tensor, Tensor]:
    """A point amid the values [B, Hkv, 1, Dv], and each key's squared distance to it [B, Hkv, 1, Tk]."""
    assert form.value is not None
    value = form.value.detach().to(form.dtype)
    value = torch.where(value.isfinite(), value, 0.0)  # keys that nobody reads may hold anything
    centre = value.mean(2, keepdim=True) if value.shape[2] else value.sum(2, keepdim=True)
    return centre, ((value - centre) ** 2).sum(-1)[:, :, None].contiguous()
