"""See inside a model: `inspect` runs it over inputs, `watch` listens to your own loop; both give an `Inspection`.
`Monitor` listens to a training run."""

from .findings import Finding, Thresholds
from .monitor import Monitor
from .recorder import inspect, watch
from .result import Inspection

__all__ = ["Finding", "Inspection", "Monitor", "Thresholds", "inspect", "watch"]
