"""The compiled engine (csrc/): loading it, and the record through which a call reaches it.

A call is one flat record of addresses, strides (0 where a dimension broadcasts) and numbers, whose fields
csrc/engine/problem.h declares. The engine allocates no results: their memory is in the record.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._compat import constant_when_traced
from ...compiled import pairs

TYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int64: 4,
    torch.bool: 5,
}
UNBOUNDED = 2**40  # the open side of a band
SMALL = 2**21  # multiply-adds that one thread finishes before a second thread could start
# The first fields of the record, in order. Every call has them, so they are written at once.
_HEAD = (
    *("threads", "compute", "B", "H", "Hkv", "Tq", "Tk", "D", "Dv", "left", "right", "offset", "family"),
    *("marginal", "threshold"),
    *("scale", "softcap", "mass", "kept_scale", "level_value", "temperature_value", "alpha_value"),
    *("centred", "scratch", "query", "key", "value"),
)

REMEDY = (
    "Install a C++17 compiler, then regard again: pip install -v --force-reinstall --no-deps . "
    "(-v shows the compiler's messages)."
)

_loaded: tuple[Any, str] | None = None
_warned = False
_INSIDE = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))  # a warning points to a line outside


def extension() -> tuple[Any, str]:
    """The compiled module and "", or None and the reason. (functools.cache would make torch.compile warn.)"""
    global _loaded
    if _loaded is None:
        try:
            # PyTorch is loaded already, so the module finds PyTorch's OpenMP runtime.
            from ... import _native  # type: ignore[attr-defined]

            _loaded = _native, ""
        except ImportError as error:
            if "REGARD_ISA" in str(error):  # the user named an instruction set: do not fall back
                raise ValueError(str(error)) from None
            absent = importlib.util.find_spec("regard._native") is None
            reason = "was not built (no C++ compiler at installation?)" if absent else f"does not load: {error}"
            _loaded = None, f"the native engine {reason}"
    return _loaded


@constant_when_traced  # torch.compile cannot trace an import that fails
def missing() -> str | None:
    """Why there is no engine, or None."""
    module, reason = extension()
    return reason if module is None else None


@constant_when_traced
def amx() -> bool:
    """Whether the processor multiplies tiles of bfloat16 numbers. REGARD_AMX=1 or 0 overrides what it says."""
    forced = os.environ.get("REGARD_AMX", "")
    if forced not in ("", "0", "1"):
        raise ValueError(f"REGARD_AMX: expected 0 or 1, got {forced}")
    return forced == "1" if forced else _machine_has_amx()


@cache
def _machine_has_amx() -> bool:
    module, _ = extension()
    return module is not None and module.amx_bf16()


@constant_when_traced
def uncompiled(function: str) -> str | None:
    """Why the function of a prior cannot be compiled, or None. Compiles it if this was not done before."""
    return pairs.unavailable(function, extension()[0].isa())


def warn_if_missing(query: Tensor) -> None:
    """Warn, once in a process, that attention on the CPU is slow because there is no engine. Not while it is traced."""
    global _warned
    if torch.compiler.is_compiling() or _warned or not query.is_cpu or (reason := missing()) is None:
        return
    _warned = True
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"regard uses its slower CPU backends: {reason}. {REMEDY}", stacklevel=level)


class _Layout:
    """The place of each field in the record, and the function that writes it: write(record, at, *values)."""

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
    return _Layout(extension()[0].fields())


class Record:
    """The record of one call."""

    def __init__(self, *head: float) -> None:
        layout = _layout()
        self.kept: list[Any] = []  # memory that the record points to
        self.fields, self.record = layout.fields, bytearray(layout.head.pack(*head) + layout.blank)

    def keep(self, *objects: object) -> None:
        """Keep what the record holds addresses of for as long as the record."""
        self.kept += objects

    def put(self, name: str, *values: float) -> None:
        write, at = self.fields[name]
        write(self.record, at, *values)

    def numbers(self, name: str, numbers: list[int]) -> None:
        """Write the address of an array of integers, which the record keeps."""
        array = struct.pack(f"={len(numbers)}q", *numbers)
        self.kept.append(ctypes.create_string_buffer(array, len(array)))
        self.put(name, ctypes.addressof(self.kept[-1]))

    def tensor(self, name: str, tensor: Tensor) -> None:
        """Write the address, type and strides of a tensor. It broadcasts where its size is 1."""
        strides = tensor.stride()
        if 1 in tensor.shape:
            strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape, strides, strict=True)]
        if len(strides) == 3:
            strides = (*strides, 0)
        write, at = self.fields[name]
        write(self.record, at, tensor.data_ptr(), TYPES[tensor.dtype], *strides)
