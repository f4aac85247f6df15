"""See inside a model: `inspect` runs it over inputs, `watch` listens to your own loop; both give an `Inspection`."""

from .findings import Finding, Thresholds
from .recorder import inspect, watch
from .result import Inspection

__all__ = ["Finding", "Inspection", "Thresholds", "inspect", "watch"]
