"""Quantiles of Student's t distribution, which PyTorch does not have."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SERIES = 1000  # the finite sum is used up to this many degrees of freedom, an expansion beyond


def student_quantile(level: float, freedom: Tensor) -> Tensor:
    """The t with P(|T| <= t) = level, for whole degrees of freedom: a float64 vector on the CPU.

    Up to 1000 degrees of freedom the probability is a finite sum, which is inverted. Beyond, the expansion of the
    quantile in powers of 1/freedom (Abramowitz and Stegun 26.7.5) is exact to rounding.
    """
    z = math.sqrt(2) * float(torch.tensor(level, dtype=torch.float64).erfinv())  # the normal quantile
    corrections = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    quantile = torch.full_like(freedom, z)
    for k, c in enumerate(corrections):
        quantile += c / freedom ** (k + 1)
    few = freedom <= _SERIES
    quantile[few] = _invert_series(level, freedom[few])
    return quantile


def _invert_series(level: float, freedom: Tensor) -> Tensor:
    """The quantile from the finite sum for the probability (Abramowitz and Stegun 26.7.3-4).

    With t = sqrt(freedom) tan(angle) the probability is concave and increasing in the angle. Newton's method from
    angle 0 therefore increases to the root and never overshoots it.
    """
    n, k = freedom[:, None], torch.arange(_SERIES // 2, dtype=torch.float64)
    odd = n % 2
    # sum_k c_k cos^(2k) (odd: cos^(2k+1)), where c_k / c_(k-1) = (2k - 1)/(2k) (odd: 2k/(2k + 1)) and c_0 = 1
    ratios = torch.where(k > 0, (2 * k - 1 + odd) / (2 * k + odd).clamp(min=1), 1.0)
    terms = torch.where(k < n // 2, ratios.cumprod(-1), 0.0)
    slope_at_0 = 2 * (torch.lgamma((n + 1) / 2) - torch.lgamma(n / 2)).exp() / math.sqrt(math.pi)
    angle = torch.zeros_like(n)
    for _ in range(100):
        cos = angle.cos()
        total = angle.sin() * (terms * cos ** (2 * k + odd)).sum(-1, keepdim=True)
        probability = torch.where(odd == 1, (angle + total) * (2 / math.pi), total)
        step = ((level - probability) / (slope_at_0 * cos ** (n - 1))).clamp(min=0)
        angle = angle + step
        if not bool((step > 1e-16 * angle).any()):
            break
    return (n.sqrt() * angle.tan()).squeeze(-1)
