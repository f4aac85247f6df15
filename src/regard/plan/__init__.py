"""The plan itself: solved in full with a certificate, read in parts if it is too large to store, or along
temperatures."""

from .certificates import Certificate, Plan, certify, solve
from .readout import block_mass, pool_rows, solved_rows, topk, weights_at
from .temperatures import Path, path

__all__ = [
    "Certificate",
    "Path",
    "Plan",
    "block_mass",
    "certify",
    "path",
    "pool_rows",
    "solve",
    "solved_rows",
    "topk",
    "weights_at",
]
