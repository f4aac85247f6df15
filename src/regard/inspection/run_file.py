"""The run file of an inspection: one safetensors file. Its metadata contain what is not a tensor, as JSON.

A file has the sums of the finished batches and, as `Partial`, those of the batch under way. It is replaced in one step,
so a process that is killed during a write leaves the file before it. Version 2 added the batch under way and a checksum
of the content. Version 1 is read as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _files
from ..statistics import ROW_STATISTICS
from .layers import PARTS, Layer

VERSION, READABLE = 2, (1, 2)
_METADATA, _CHECKSUM = "regard.inspection", "regard.checksum"
_PLAIN = ("about", "batches", "digest", "patterns", "views")  # fields of an Inspection that are stored as they are


@dataclass(eq=False)
class Partial:
    """A batch whose forward pass is under way. Its first attention calls are recorded."""

    digest: str  # of all batches up to this one
    calls: int  # number of recorded calls
    layers: list[Layer]  # the sums of the finished batches and of these calls
    views: dict[str, Any] | None  # `Views.state()`, if the batch has views


def write(path: str | Path, fields: Mapping[str, Any]) -> None:
    """Write the fields of an `Inspection`. An existing file is replaced in one step, or kept."""
    from safetensors.torch import save

    partial = fields["partial"]
    tensors = {"version": torch.tensor([VERSION]), **_tensors("", fields["layers"])}
    header: dict[str, Any] = {name: fields[name] for name in _PLAIN}
    header |= {"statistics": fields["statistics"], "layers": _headers(fields["layers"]), "partial": None}
    if partial is not None:
        tensors |= _tensors("partial.", partial.layers)
        rest = {"digest": partial.digest, "calls": partial.calls, "views": partial.views}
        header["partial"] = rest | {"layers": _headers(partial.layers)}
    text = json.dumps(header)
    _files.write(path, save(tensors, metadata={_METADATA: text, _CHECKSUM: _checksum(text, tensors)}))


def read(path: str | Path) -> dict[str, Any]:
    """The fields of the `Inspection` that `write` wrote. Raises a ValueError for another file or a damaged one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if _METADATA not in metadata:
                raise ValueError("it has no inspection")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        version = int(tensors["version"])
        text = metadata[_METADATA]
        if version in READABLE and version > 1 and metadata.get(_CHECKSUM) != _checksum(text, tensors):
            raise ValueError("its content does not match its checksum")
        header = json.loads(text) if version in READABLE else {}
        if version in READABLE:
            return _fields(header, tensors)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"path: expected a run file that Inspection.save wrote, got {str(path)!r}, which is another file or a "
            f"damaged one ({reason}). To begin again, delete it or choose another file"
        ) from None
    known = " or ".join(map(str, READABLE))
    raise ValueError(f"path: expected a run file of version {known}, got version {version} in {str(path)!r}")


def _fields(header: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    begun = header.get("partial")
    if begun is not None:
        layers = _layers("partial.", begun["layers"], tensors)
        begun = Partial(begun["digest"], begun["calls"], layers, begun["views"])
    return {
        **{name: header[name] for name in _PLAIN},
        "statistics": tuple(name for name in ROW_STATISTICS if name in header["statistics"]),
        "layers": _layers("", header["layers"], tensors),
        "partial": begun,
    }


def _tensors(prefix: str, layers: list[Layer]) -> dict[str, Tensor]:
    return {
        f"{prefix}{n}.{part}": getattr(layer, part).contiguous().clone()
        for n, layer in enumerate(layers)
        for part in PARTS
    }


def _headers(layers: list[Layer]) -> list[list[Any]]:
    return [[layer.name, layer.index, layer.heads, layer.channels, layer.calls] for layer in layers]


def _layers(prefix: str, headers: list[list[Any]], tensors: dict[str, Tensor]) -> list[Layer]:
    return [
        Layer(
            name, index, heads, tuple(channels), calls=calls, **{part: tensors[f"{prefix}{n}.{part}"] for part in PARTS}
        )
        for n, (name, index, heads, channels, calls) in enumerate(headers)
    ]


def _checksum(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
