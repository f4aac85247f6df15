"""Functions of users, compiled: tracing (tracing.py, graph.py), C++ text (cpp.py), cached libraries (library.py)."""

from . import pairs
from .graph import BOOL, INT, REAL, Graph, SideEffect, Untraceable, adjoints, derivative, evaluate
from .library import Library, Unavailable, load
from .tracing import Traced, trace

__all__ = [
    "BOOL",
    "INT",
    "REAL",
    "Graph",
    "Library",
    "SideEffect",
    "Traced",
    "Unavailable",
    "Untraceable",
    "adjoints",
    "derivative",
    "evaluate",
    "load",
    "pairs",
    "trace",
]
