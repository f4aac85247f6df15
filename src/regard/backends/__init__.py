"""The backends, in the order in which "auto" tries them, and the choice between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .._validate import describe
from ..form import Form
from .base import READOUT, Backend
from .native import Native, warn_if_missing
from .reference import Reference
from .sdpa import Stock
from .triton import Triton

__all__ = ["BACKENDS", "READOUT", "REFERENCE", "Backend", "Choice", "choose", "fused_statistics"]

REFERENCE = Reference()
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Native(), Triton(), Stock(), REFERENCE)}


@dataclass(frozen=True)
class Choice:
    """The backend that serves a call, and why each backend before it was not chosen."""

    backend: str
    reasons: dict[str, str] = field(default_factory=dict)


def choose(form: Form, names: tuple[str, ...], backend: str = "auto") -> tuple[str, dict[str, str]]:
    """The backend for a problem of rows and these outputs, and why each backend before it was not chosen. Raises if a
    backend is named that cannot serve them."""
    if backend != "auto":
        if backend not in BACKENDS:
            known = ", ".join(f'"{name}"' for name in ("auto", *BACKENDS))
            raise ValueError(f"backend: expected one of {known}, got {describe(backend)}")
        reason = BACKENDS[backend].unsupported(form, names)
        if reason is not None:
            raise NotImplementedError(f'backend "{backend}" cannot serve this problem: {reason}')
        return backend, {}
    reasons: dict[str, str] = {}
    for name, candidate in BACKENDS.items():
        reason = candidate.unsupported(form, names) or candidate.unwise(form, names)
        if reason is None:
            return name, reasons
        reasons[name] = reason
        assert form.query is not None
        warn_if_missing(form.query)
    raise NotImplementedError(f"no backend can serve this problem: {reasons}")


def fused_statistics() -> tuple[str, ...]:
    """The statistics of the first backend of the registry. A request for another one runs on a slower backend."""
    return next(iter(BACKENDS.values())).statistics
