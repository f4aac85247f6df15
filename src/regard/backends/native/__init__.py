"""The native CPU engine: `Native` (backend.py), its record (engine.py, records.py), and attention by features."""

from .backend import Native

__all__ = ["Native"]
