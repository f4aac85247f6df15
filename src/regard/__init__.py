"""regard: attention, declared as a transport problem."""

import importlib
from typing import TYPE_CHECKING, Any

from . import acceleration
from ._version import __version__ as __version__
from .acceleration import accelerated
from .function_priors import from_flex, prior
from .operator import Choice, attention, select_backend
from .plan import Certificate, Path, Plan, block_mass, certify, path, solve, topk, weights_at
from .priors import ALiBi, Bias, Causal, Documents, Window
from .problem import ByKeys, Free, MatchEntropy, MatchKL, Rows, RowsAndColumns, Transport
from .regions import Blocks, Prefix
from .regularizers import KL, FDivergence, FermiDirac, Tsallis
from .statistics import AuxOutput, AuxRequest
from .structured import Decay, Density, LowRank, Relative, Selected

if TYPE_CHECKING:  # loaded when first used, so that `import regard` is quick; `_LAZY` and `_MODULES` say the same
    from . import auditing as auditing
    from . import estimation as estimation
    from . import features as features
    from . import geometry as geometry
    from . import hf as hf
    from . import inspection as inspection
    from . import nn as nn
    from . import testing as testing
    from .auditing import Audit, audit
    from .estimation import Calibration, Estimate, Evidence, calibrate, estimate, evidence
    from .inspection import Inspection, Monitor, inspect, watch

_MODULES = ("auditing", "estimation", "features", "geometry", "hf", "inspection", "lab", "nn", "testing")
_LAZY = {
    **dict.fromkeys(("Audit", "audit"), ".auditing"),
    **dict.fromkeys(("Calibration", "Estimate", "Evidence", "calibrate", "estimate", "evidence"), ".estimation"),
    **dict.fromkeys(("Inspection", "Monitor", "inspect", "watch"), ".inspection"),
}

__all__ = [
    "KL",
    "ALiBi",
    "Audit",
    "AuxOutput",
    "AuxRequest",
    "Bias",
    "Blocks",
    "ByKeys",
    "Calibration",
    "Causal",
    "Certificate",
    "Choice",
    "Decay",
    "Density",
    "Documents",
    "Estimate",
    "Evidence",
    "FDivergence",
    "FermiDirac",
    "Free",
    "Inspection",
    "LowRank",
    "MatchEntropy",
    "MatchKL",
    "Monitor",
    "Path",
    "Plan",
    "Prefix",
    "Relative",
    "Rows",
    "RowsAndColumns",
    "Selected",
    "Transport",
    "Tsallis",
    "Window",
    "accelerated",
    "attention",
    "audit",
    "block_mass",
    "calibrate",
    "certify",
    "estimate",
    "evidence",
    "from_flex",
    "inspect",
    "path",
    "prior",
    "select_backend",
    "solve",
    "topk",
    "watch",
    "weights_at",
]

acceleration.offer()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _LAZY:
        globals()[name] = found = getattr(importlib.import_module(_LAZY[name], __name__), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_LAZY})
