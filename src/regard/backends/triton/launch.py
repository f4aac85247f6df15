"""A `Form` as the record that the kernels read, and the sizes of the tiles."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..._compat import constant_when_traced
from ..._validate import Scalar
from ...form import Form

MARGINALS = ("rows", "sink", "relax", "free")
LARGEST_HEAD = 256


def interpreting() -> bool:
    """Whether Triton interprets the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@constant_when_traced
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def kernels(name: str) -> Any:
    """A module of kernels. Importing one imports triton."""
    return importlib.import_module(f"{__package__}.kernels.{name}")


def run(form: Form, module: str, kernel: str, programs: int, *arguments: Any, **constants: Any) -> None:
    """Start a kernel on the device of the form. (Triton takes the current device, whatever the tensors are on.)"""
    assert form.query is not None
    with torch.cuda.device_of(form.query):  # does nothing for a CPU tensor
        getattr(kernels(module), kernel)[(programs,)](*arguments, **constants, **tile(form))


def blocks(form: Form) -> tuple[int, int]:
    """The programs of a kernel that owns blocks of queries, and of one that owns blocks of keys."""
    assert form.key is not None
    B, H, Tq, Tk = form.shape
    size = tile(form)
    return B * H * -(-Tq // size["BM"]), B * form.key.shape[1] * -(-Tk // size["BN"])


def operand(tensor: Tensor | None) -> Any:
    """A tensor of four dimensions as its address and strides; None stays None."""
    if tensor is None:
        return None
    strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    return kernels("operands").Operand(tensor, *strides)


def number(value: Scalar) -> float:
    """A parameter that is a number, or 0 where it is a tensor."""
    return value if isinstance(value, float) else 0.0


def tensor(value: Scalar) -> Any:
    return operand(value) if isinstance(value, Tensor) else None


def record(form: Form, readable: Tensor | None) -> Any:
    """The problem. `readable` [B|1, Hkv|1, 1, Tk]: keys that some query may read."""
    query, key, value = form.query, form.key, form.value
    assert query is not None and key is not None and value is not None
    _, H, Tq, Tk = form.shape
    farthest = Tq + Tk + abs(form.offset)  # no pair is farther apart; a wider window would overflow 32 bits
    alpha: Scalar = form.parameters[0] if form.parameters else 0.0

    def vectors(t: Tensor) -> Any:
        return kernels("operands").Operand(t, *t.stride())

    return kernels("operands").Problem(
        query=vectors(query),
        key=vectors(key),
        value=vectors(value),
        readable=operand(readable),
        score_bias=operand(form.score_bias),
        mask=operand(form.mask),
        log_priors=tuple(operand(t) for t in form.log_priors),
        slopes=operand(form.slopes),
        relative=operand(form.relative),
        reach=None if form.relative is None else form.relative.shape[3] // 2,
        query_factor=operand(form.query_factor),
        key_factor=operand(form.key_factor),
        rank=None if form.query_factor is None else form.query_factor.shape[3],
        decay_query=operand(form.decay_query),
        decay_key=operand(form.decay_key),
        density=operand(form.density),
        selected=operand(form.selected),
        selections=None if form.selected is None else form.selected.shape[3],
        selected_block=form.selected_block,
        tile_map=operand(form.tile_map),
        tiles=form.tiles,
        query_ids=operand(form.query_ids),
        key_ids=operand(form.key_ids),
        dropout_key=operand(form.dropout_key),
        temperature=tensor(form.temperature),
        level=tensor(form.marginal_parameter),
        alpha=tensor(alpha),
        temperature_value=number(form.temperature),
        level_value=number(form.marginal_parameter),
        alpha_value=number(alpha),
        scale=form.scale,
        softcap=form.softcap,
        mass=form.mass,
        threshold=int(form.dropout_p * 2**32),
        kept_scale=1 / (1 - form.dropout_p) if form.dropout_p < 1 else 0.0,
        H=H,
        group=form.group,
        Tq=Tq,
        Tk=Tk,
        left=None if form.left is None else min(form.left, farthest),
        right=None if form.right is None else min(form.right, farthest),
        offset=form.offset,
    )


def parts(form: Form) -> bool:
    """Whether pairs may be masked by anything but the band."""
    masks = (form.mask, form.score_bias, form.query_ids, form.selected, form.tile_map, form.density)
    return bool(form.log_priors) or any(mask is not None for mask in masks)


def reads_every_key(form: Form) -> bool:
    """Whether it is known without looking that each key is read by some query."""
    _, _, Tq, Tk = form.shape
    first = form.left is None or form.offset - form.left <= 0
    last = form.right is None or Tq - 1 + form.offset + form.right >= Tk - 1
    return first and last and not parts(form)


def power_of_two(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def options(form: Form) -> dict[str, Any]:
    """The arguments that every kernel is compiled for."""
    assert form.query is not None and form.value is not None
    D, DV = form.query.shape[3], form.value.shape[3]
    return {
        "LEFT": form.left is not None,
        "RIGHT": form.right is not None,
        "WEIGHTED": form.weighted,
        "D": D,
        "DV": DV,
        "PAD": power_of_two(D),
        "PADV": power_of_two(DV),
        "PRECISION": "ieee",
        "WIDEN": interpreting(),
    }


def tile(form: Form) -> dict[str, Any]:
    """Queries and keys of a tile, and how a kernel is launched."""
    assert form.query is not None and form.value is not None
    _, _, Tq, Tk = form.shape
    if interpreting():  # the cost is per operation on a tile
        return {"BM": min(64, power_of_two(Tq)), "BN": min(64, power_of_two(Tk))}
    return configuration(Tq, max(form.query.shape[3], form.value.shape[3]))


def configuration(Tq: int, D: int) -> dict[str, Any]:
    """The launch of a kernel for this head size. tests/gpu/ahead_of_time.py checks registers and memory."""
    rows = 16 if Tq <= 16 else 64
    warps, stages = 4 if D <= 64 else 8, 3 if D <= 64 else 2 if D <= 128 else 1
    return {"BM": rows, "BN": 32, "num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


def link(form: Form) -> str:
    """The name of the regulariser's kernel: "kl", or a link of kernels/links.py."""
    if form.family != "tsallis":
        return {"kl": "kl", "fermi_dirac": "sigmoid"}[form.family]
    alpha = form.parameters[0]
    if not isinstance(alpha, Tensor) and alpha in (1.5, 2.0):
        return "entmax" if alpha == 1.5 else "sparsemax"
    return "centred" if centred(form) else "power"


def centred(form: Form) -> bool:
    """Whether (alpha - 1)(s - lambda)/tau is computed as its distance from 1: for alpha near 1, where a price is
    searched for."""
    if form.family != "tsallis" or form.marginal == "free":
        return False
    alpha = form.parameters[0]
    return (float(alpha.detach().min()) if isinstance(alpha, Tensor) else alpha) < 1.25
