"""See inside a model: `inspect` runs it over inputs, `watch` listens to your own loop; both give an `Inspection`."""

from .recorder import inspect, watch
from .result import Inspection

__all__ = ["Inspection", "inspect", "watch"]
