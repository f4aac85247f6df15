"""`evidence`: how far each row of a plan is from the uniform row, and how many draws it takes to see it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from .._display import Displayed
from .._validate import may_be_zero
from ..arguments import takes_options
from ..operator import attention
from ..problem import Rows, RowsAndColumns, TemperatureRule, Transport
from ..regularizers import KL
from ..statistics import AuxRequest
from .inputs import EstimationOptions, as_transport, check_level


@dataclass(frozen=True, eq=False, repr=False)
class Evidence(Displayed):
    """Evidence of each row against the null hypothesis "no key is special"; both tensors are [B, H, Tq].

    kl      KL divergence of the row from the uniform row over its admissible keys, in nats: log n - entropy
    draws   how many keys one has to draw from the row until a likelihood-ratio test tells it from the uniform row with
            error `level` (Stein's lemma): log(1/level)/kl on average, to first order; inf where kl is 0
    """

    kl: Tensor
    draws: Tensor
    level: float


@takes_options(EstimationOptions)
def evidence(query: Tensor, key: Tensor, *, level: float = 0.05, **options: Unpack[EstimationOptions]) -> Evidence:
    """Evidence of each row against "no key is special"; there are no values.

    `level` is the error probability of the test whose number of draws is returned.
    Options: `attn_mask`, `is_causal`, `scale`, `enable_gqa`, `problem`, `softcap`, `key_scale`, `score` and `backend`,
    as for `attention`.

    A row whose mass is not 1 (sink, relaxed, free, Rows(mass)) is divided by its mass first, over the real keys. A sink
    is supported for KL only, where that quotient is softmax. The null hypothesis is uniform even where the prior is
    not; the statistic `kl` of `attention` measures from the prior. A kl below the rounding error of the compute dtype
    is 0. A row that sends no mass, or has at most one admissible key, has kl 0 and draws inf. For KL, `kl` is
    differentiable.
    """
    level = check_level(level)
    problem = as_transport(options.get("problem"))
    if isinstance(problem.marginal, RowsAndColumns):
        raise ValueError(f"problem: expected rows that do not depend on one another, got {problem!r}")
    exponential = isinstance(problem.regularizer, KL)
    if exponential:  # divided by their mass, the rows of every marginal are softmax
        problem = Transport(problem.regularizer, prior=problem.prior, temperature=problem.temperature)
    elif isinstance(problem.marginal, Rows) and problem.marginal.sink is not None:
        raise ValueError(f"problem: expected no sink (only KL may have one), got {problem!r}")
    options["problem"] = problem
    given = problem.temperature
    every_key_has_mass = exponential and not isinstance(given, TemperatureRule) and not may_be_zero(given)
    request = AuxRequest(entropy=True, support=every_key_has_mass, mass=not every_key_has_mass)
    _, aux = attention(query, key, _one_column(key), **options, return_aux=request)
    assert aux.entropy is not None
    sends: Tensor | bool = True
    keys = aux.support
    if not every_key_has_mass:
        assert aux.mass is not None
        sends, keys = aux.mass > 0, _count_keys(query, key, problem, options)
    assert keys is not None
    most = keys.clamp(min=1).log()
    kl = most - aux.entropy
    kl = torch.where((kl > 16 * torch.finfo(kl.dtype).eps * (1 + most)) & sends, kl, 0.0)
    return Evidence(kl, math.log(1 / level) / kl.detach(), level)


@torch.no_grad()
def _count_keys(query: Tensor, key: Tensor, problem: Transport, options: EstimationOptions) -> Tensor | None:
    """Admissible keys per row: the support of softmax with scores 0, computed with head size 1 so that it is cheap."""
    query, key = _one_column(query), _one_column(key)
    prior = Transport(prior=problem.prior)
    zeros: EstimationOptions = {**options, "problem": prior, "scale": 1.0, "softcap": None, "key_scale": None}
    return attention(query, key, key, **zeros, return_aux=AuxRequest(support=True))[1].support


def _one_column(tensor: Tensor) -> Tensor:
    """Zeros [..., T, 1] for a tensor [..., T, D]. Anything else is returned as it is, and `attention` raises on it."""
    return tensor.new_zeros(*tensor.shape[:-1], 1) if isinstance(tensor, Tensor) and tensor.dim() > 1 else tensor
