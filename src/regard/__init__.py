"""regard: attention, declared as a transport problem."""

from . import geometry as geometry  # a module, not a name of __all__
from .estimation import Calibration, Estimate, Evidence, calibrate, estimate, evidence
from .operator import Choice, attention, select_backend
from .plan import Certificate, Path, Plan, block_mass, certify, path, solve, topk, weights_at
from .problem import ALiBi, Bias, Causal, Documents, Free, MatchEntropy, MatchKL, Rows, Transport, Window
from .regularizers import KL, FDivergence, FermiDirac, Tsallis
from .statistics import AuxOutput, AuxRequest

__version__ = "0.1.0"

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
    "MatchEntropy",
    "MatchKL",
    "Path",
    "Plan",
    "Rows",
    "Transport",
    "Tsallis",
    "Window",
    "attention",
    "block_mass",
    "calibrate",
    "certify",
    "estimate",
    "evidence",
    "path",
    "select_backend",
    "solve",
    "topk",
    "weights_at",
]
