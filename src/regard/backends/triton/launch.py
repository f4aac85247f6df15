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
from .schedule import schedule

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


def run(form: Form, module: str, kernel: str, problem: Any, *arguments: Any, **constants: Any) -> None:
    """Start a kernel of BM queries per program on the device of the form, with the blocks that it visits."""
    size = tile(form, kernel)
    B, H, Tq, _ = form.shape
    if parts(form):
        order, counts = schedule(form, size["BM"], size["BN"])
        problem = problem._replace(rows_order=operand(order), rows_counts=operand(counts))
    _start(form, module, kernel, B * H * -(-Tq // size["BM"]), (problem, *arguments), constants | size)


def run_by_key(form: Form, kernel: str, problem: Any, *arguments: Any, **constants: Any) -> None:
    """The same with BN keys of a key head per program."""
    assert form.key is not None
    size = tile(form, kernel)
    B, _, _, Tk = form.shape
    if parts(form):
        order, counts = schedule(form, size["BM"], size["BN"], by_key=True)
        problem = problem._replace(columns_order=operand(order), columns_counts=operand(counts))
    programs = B * form.key.shape[1] * -(-Tk // size["BN"])
    _start(form, "backward", kernel, programs, (problem, *arguments), constants | size)


def run_pairs(form: Form, n: int, problem: Any, *arguments: Any, **constants: Any) -> None:
    """The same with BM x BN pairs per program, for n queries."""
    size = tile(form, "by_pairs")
    B, H, _, Tk = form.shape
    programs = B * H * -(-n // size["BM"]) * -(-Tk // size["BN"])
    _start(form, "backward", "by_pairs", programs, (problem, *arguments), constants | size)


def _start(
    form: Form, module: str, kernel: str, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    assert form.query is not None
    # Triton takes the current device, whatever the tensors are on. For a CPU tensor this does nothing.
    with torch.cuda.device_of(form.query):
        getattr(kernels(module), kernel)[(programs,)](*arguments, **constants)


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
        rows_order=None,
        rows_counts=None,
        columns_order=None,
        columns_counts=None,
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
        "PARTS": parts(form),
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


def link_options(form: Form) -> dict[str, Any]:
    """The arguments that the kernels of a link are compiled for. In float32 the logarithm keeps all its digits."""
    assert form.query is not None
    fast = form.query.dtype != torch.float32 and form.query.is_cuda and torch.version.hip is None
    return {"LINK": link(form), "FAST": fast and not interpreting()}


def tile(form: Form, kernel: str) -> dict[str, Any]:
    """Queries and keys of a tile, and how a kernel is launched."""
    assert form.query is not None and form.value is not None
    _, _, Tq, Tk = form.shape
    if interpreting():  # the cost is per operation on a tile
        return {"BM": min(64, power_of_two(Tq)), "BN": min(64, power_of_two(Tk))}
    half = form.query.dtype != torch.float32 and form.value.dtype != torch.float32
    size = max(form.query.shape[3], form.value.shape[3])
    return configuration(kernel, Tq, size, half, torch.version.hip is not None, link(form))


# Queries and keys of a tile, warps and stages of a kernel, by the largest head size. tests/gpu/ahead_of_time.py reads
# registers, stack and shared memory of each from the machine code.
_TILES = {
    "forward_kl": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)},
    "forward_link": {64: (128, 64, 8, 2), 128: (64, 64, 8, 1), 256: (64, 32, 8, 1)},
    "find_price": {64: (64, 32, 4, 3), 128: (64, 32, 4, 2), 256: (64, 32, 8, 1)},
    "by_rows": {64: (128, 64, 8, 2), 128: (128, 32, 8, 2), 256: (64, 32, 8, 1)},
    "by_columns": {64: (32, 128, 8, 1), 128: (64, 64, 8, 1), 256: (32, 64, 8, 1)},
}
_SMALL = {64: (64, 32, 4, 2), 128: (64, 32, 8, 2), 256: (64, 32, 8, 1)}  # AMD, float32 and rare kernels


def configuration(
    kernel: str, Tq: int, D: int, half: bool = True, hip: bool = False, link: str = "kl"
) -> dict[str, Any]:
    """The launch of a kernel for this head size."""
    long = kernel == "forward_link" and link == "centred"  # this link needs more registers
    size = 64 if D <= 64 else 128 if D <= 128 else 256
    table = _TILES[kernel] if kernel in _TILES and half and not hip and not long else _SMALL
    BM, BN, warps, stages = table[size]
    if Tq <= 16:
        BM, BN, warps, stages = 16, 64 if half else 32, 4, 2 if D <= 128 and half else 1
    return {"BM": BM, "BN": BN, "num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


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
