"""What computed a run: versions, hashes of the sources and of the engine, processor, device and threads."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .. import __version__, doctor
from . import distributed
from .experiment import CPU, Precision


@cache
def sources_hash() -> str:
    """A hash of the names and contents of the package's Python files, as they were at the first call."""
    package, found = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        found.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()


@cache
def engine_hash() -> str | None:
    """A hash of the compiled engine, as it was at the first call; None if it was not built.

    `sources_hash` does not cover the engine: its C++ sources are not part of the package, and those at hand may have
    changed since the engine was built.
    """
    found = importlib.util.find_spec("regard._native")
    if found is None or found.origin is None:
        return None
    return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()


def versions(device: torch.device = CPU, precision: Precision = "fp32") -> dict[str, Any]:
    """Everything that can change a result, if only in its last digits. `threads` is the number of threads of a cell."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return {
        "regard": __version__,
        "sources": sources_hash(),
        "engine": engine_hash(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": doctor.machine()["cpu"],
        "isa": doctor.engine().get("isa", "none"),
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "precision": precision,
        "threads": torch.get_num_threads(),
        "processes": distributed.processes(),
    }
