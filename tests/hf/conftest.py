"""The fixtures of the tests of transformers models."""

from support.stock import calls, no_dense

__all__ = ["calls", "no_dense"]
