"""backend="triton": fused kernels for GPUs, written in Triton. triton itself is imported by the first call."""

from .backend import Triton

__all__ = ["Triton"]
