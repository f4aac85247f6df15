"""`estimate`: attention's output as a maximum-likelihood weighted mean, with its variance.

The values that one query reads are observations of the same vector v with different precision: v_i ~ N(v, I/(beta
theta_i)). The precision theta_i = pi_i exp(s_i/tau) is the weight of key i before softmax normalizes it, so the
maximum-likelihood v is attention's output. The spread of the values around it determines beta and the error bar.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from .._display import Displayed
from .._validate import concrete, is_number
from ..arguments import takes_options
from ..operator import attention
from ..problem import Rows
from ..regularizers import KL
from ..statistics import AuxRequest
from .inputs import EstimationOptions, as_transport, check_level
from .student import student_quantile


@dataclass(frozen=True, eq=False, repr=False)
class Estimate(Displayed):
    """The result of `estimate`: one row per query, in the caller's leading dimensions (written here as B, H).

    value             [B, H, Tq, Dv], attention's output: the maximum-likelihood v
    variance          [B, H, Tq], of each coordinate of value; maximum likelihood makes it too small for few keys,
                      which `interval` corrects
    log_precision     [B, H, Tq], lse + log precision_scale = -log variance
    precision_scale   [B, H, Tq], the maximum-likelihood beta
    keys              [B, H, Tq], the number of admissible keys

    All fields but value have the compute dtype. A row with fewer than two admissible keys has no spread, so variance,
    log_precision and precision_scale are NaN there. A row without any key has value 0.
    """

    value: Tensor
    variance: Tensor
    log_precision: Tensor
    precision_scale: Tensor
    keys: Tensor

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """(low, high), each [B, H, Tq, Dv]: each coordinate of v lies between them with probability `level`.

        The width is that of Student's t with (keys - 1) Dv degrees of freedom and the unbiased variance. It is exact
        for two or more keys and NaN for fewer. The probability holds for each coordinate by itself, not for all
        coordinates at once.
        """
        level = check_level(level)
        extra = (self.keys - 1).clamp(min=1)
        freedom, place = (extra.double() * self.value.shape[-1]).cpu().unique(return_inverse=True)
        width = student_quantile(level, freedom)[place].to(self.variance)
        half = (width * (self.variance * self.keys / extra).sqrt())[..., None]
        value = self.value.to(half.dtype)
        return value - half, value + half


@takes_options(EstimationOptions)
def estimate(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[EstimationOptions]) -> Estimate:
    """The attended value as a maximum-likelihood estimate, with its variance.

    Options: `attn_mask`, `is_causal`, `scale`, `enable_gqa`, `problem`, `softcap`, `key_scale`, `score` and `backend`,
    as for `attention`.

    The model is v_i ~ N(v, I/(beta theta_i)) with theta_i = pi_i exp(s_i/tau), so a prior and a float mask change the
    precision, too. It requires KL with rows that sum to 1; any other problem raises. With n admissible keys,

        beta = n Dv / sum_i theta_i |v_i - value|^2,    variance = 1/(beta sum_i theta_i) = value_spread / (n Dv).

    `value` is differentiable; the other fields and the width of an interval are not.
    A spread below the rounding error of |v_i|^2 (one key has nearly all the weight) is not resolved.
    """
    problem = options["problem"] = as_transport(options.get("problem"))
    if not isinstance(problem.regularizer, KL) or problem.marginal != Rows():
        raise ValueError(f"problem: expected KL() with Rows() (weights as precisions of an average), got {problem!r}")
    if _known_zero(problem.temperature):
        raise ValueError("problem: expected temperature > 0 (at 0 every precision is infinite), got temperature 0")
    request = AuxRequest(lse=True, support=True, value_spread=True)
    out, aux = attention(query, key, value, **options, return_aux=request)
    assert aux.lse is not None and aux.support is not None and aux.value_spread is not None
    keys, lse = aux.support, aux.lse.detach()
    spread = torch.where(keys >= 2, aux.value_spread.detach().clamp(min=0), math.nan)
    variance = spread / (keys * value.shape[-1])
    return Estimate(out, variance, -variance.log(), (-lse - variance.log()).exp(), keys)


def _known_zero(temperature: object) -> bool:
    """Whether some temperature is 0, as far as its values can be read."""
    if isinstance(temperature, Tensor):
        return concrete(temperature) and bool((temperature == 0).any())
    return is_number(temperature) and temperature == 0
