"""What is known of a device: the file that `regard doctor --device` writes after it has checked the kernels there.

"auto" takes the kernels on a device only if the file says that these kernels were right on it: with this version of
regard, of its kernels, of PyTorch and of Triton.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..._compat import constant_when_traced
from ..._files import write
from ..._version import __version__
from ...compiled import library


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def identity() -> dict[str, str]:
    """What the file of a device is valid for. If one of these changes, the device must be checked again."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "not installed"
    return {"regard": __version__, "kernels": _kernels(), "torch": torch.__version__, "triton": triton}


@cache
def _kernels() -> str:
    """A hash of the files of this backend."""
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def path(device: torch.device) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return library.directory() / "devices" / f"{name}.json"


def save(device: torch.device, facts: dict[str, Any]) -> Path:
    place = path(device)
    place.parent.mkdir(parents=True, exist_ok=True)
    write(place, json.dumps({"valid_for": identity(), "device": device_name(device)} | facts, indent=2) + "\n")
    forget()
    return place


@cache
def load(device: torch.device) -> dict[str, Any] | str:
    """The content of the device's file, or the reason why there is none for these kernels."""
    remedy = f"regard doctor --device {device.type} checks it"
    place = path(device)
    try:
        facts = json.loads(place.read_text("utf-8"))
        valid_for, passed = facts["valid_for"], facts["passed"]
    except FileNotFoundError:
        return f"was not checked on this device, {device_name(device)} ({remedy})"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"cannot read {place}: {type(error).__name__}: {error} ({remedy})"
    changed = [name for name, now in identity().items() if valid_for.get(name) != now]
    if changed:
        return f"was checked on this device with another version of {', '.join(changed)} ({remedy} again)"
    if passed is not True:
        return f"failed its check on this device ({place} lists the cases)"
    return facts


def forget() -> None:
    """Read the files again at the next call."""
    load.cache_clear()
    not_checked.cache_clear()


@constant_when_traced
@cache
def not_checked(device: torch.device) -> str | None:
    """Why "auto" does not take the kernels on this device, or None."""
    found = load(device)
    return found if isinstance(found, str) else None
