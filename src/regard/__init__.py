"""regard: attention, declared as a transport problem."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from . import geometry as geometry  # a module, not a name of __all__
from ._version import __version__ as __version__
from .estimation import Calibration, Estimate, Evidence, calibrate, estimate, evidence
from .inspection import Inspection, Monitor, inspect, watch
from .operator import Choice, attention, select_backend
from .plan import Certificate, Path, Plan, block_mass, certify, path, solve, topk, weights_at
from .priors import ALiBi, Bias, Causal, Documents, Window
from .problem import Free, MatchEntropy, MatchKL, Rows, RowsAndColumns, Transport
from .regularizers import KL, FDivergence, FermiDirac, Tsallis
from .statistics import AuxOutput, AuxRequest

if TYPE_CHECKING:
    from . import features as features
    from . import hf as hf
    from . import nn as nn

__all__ = [
    "KL",
    "ALiBi",
    "AuxOutput",
    "AuxRequest",
    "Bias",
    "Calibration",
    "Causal",
    "Certificate",
    "Choice",
    "Documents",
    "Estimate",
    "Evidence",
    "FDivergence",
    "FermiDirac",
    "Free",
    "Inspection",
    "MatchEntropy",
    "MatchKL",
    "Monitor",
    "Path",
    "Plan",
    "Rows",
    "RowsAndColumns",
    "Transport",
    "Tsallis",
    "Window",
    "attention",
    "block_mass",
    "calibrate",
    "certify",
    "estimate",
    "evidence",
    "inspect",
    "path",
    "select_backend",
    "solve",
    "topk",
    "watch",
    "weights_at",
]


def __getattr__(name: str) -> ModuleType:
    if name in ("features", "hf", "nn"):  # imported when used: hf needs transformers
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
