"""The native CPU engine: the backend `Native` (backend.py), the record of a call (engine.py, records.py), and attention
by features (features.py)."""

from .backend import Native
from .engine import warn_if_missing

__all__ = ["Native", "warn_if_missing"]
