"""`Call`: everything that decides the result of one attention, and two ways to compute it.

`solve_exactly` is the definition: the reference backend, in float64. `solve_plainly` is what an author without a
kernel would write: the matrix of scores in the dtype of the inputs, the weights rounded to that dtype, one more matrix
product. Its distance from the definition is what arithmetic in that dtype loses on these inputs. A hypothesis (a wrong
attention) is a function from one `Call` to another.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..operator import attention
from ..priors import Prior
from ..problem import Free, Rows, TemperatureRule, Transport
from ..regularizers import KL
from ..statistics import AuxRequest

Solved = tuple[Tensor, Tensor | None]  # output [B, H, Tq, Dv] and lse [B, H, Tq], None if the problem has none
Solver = Callable[["Call"], Solved]


@dataclass(frozen=True)
class Call:
    """The arguments of one attention. `compute`: how a wrong attention computes it, where no change of the other
    fields says so; it receives this call (without `compute`) and the solver."""

    query: Tensor  # [B, H, Tq, D]
    key: Tensor  # [B, Hkv, Tk, D]
    value: Tensor  # [B, Hkv, Tk, Dv]
    problem: Transport
    mask: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    compute: Callable[[Call, Solver], Solved] | None = None

    def change(self, **fields: object) -> Call:
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    def change_problem(self, **parts: object) -> Call:
        return self.change(problem=dataclasses.replace(self.problem, **parts))  # type: ignore[arg-type]

    @property
    def has_lse(self) -> bool:
        rows = self.problem.marginal
        return isinstance(self.problem.regularizer, KL) and isinstance(rows, Rows) and rows.relax is None

    @property
    def scale_factor(self) -> float:
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def factors(self) -> tuple[Prior, ...]:
        return () if self.problem.prior is None else self.problem.prior.factors()

    def with_factors(self, factors: list[Prior]) -> Call:
        prior: Prior | None = None
        for factor in factors:
            prior = factor if prior is None else prior * factor
        return self.change_problem(prior=prior)

    def repeated(self, tensor: Tensor) -> Tensor:
        """Keys or values with one head for each query head."""
        return tensor.repeat_interleave(self.query.shape[1] // tensor.shape[1], 1)

    def scores(self) -> Tensor:
        """[B, H, Tq, Tk], before softcap and masks."""
        return self.query @ self.repeated(self.key).mT * self.scale_factor

    def capped(self, scores: Tensor) -> Tensor:
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()

    def with_scores(self, scores: Tensor, value: Tensor | None = None) -> Call:
        """The same problem with these scores [B, H, Tq, Tk]. `value` None: the identity, so that the output is the
        weights."""
        B, H, _, Tk = scores.shape
        eye = torch.eye(Tk, dtype=scores.dtype, device=scores.device).expand(B, H, Tk, Tk)
        return self.change(
            query=scores, key=eye, value=eye if value is None else value, scale=1.0, softcap=None, compute=None
        )


def solve_exactly(call: Call) -> Solved:
    """The definition, on the reference backend."""
    if call.compute is not None:
        return call.compute(_without_nan(call.change(compute=None)), solve_exactly)
    return _solve(call)


def solve_plainly(call: Call) -> Solved:
    """The same by plain operations in the dtype of the inputs, each rounded to it."""
    if call.compute is not None:
        return call.compute(call.change(compute=None), solve_plainly)
    call = _without_nan(call)
    weights, lse = _solve(call.with_scores(call.capped(call.scores())))
    return weights @ call.repeated(call.value), lse


def _without_nan(call: Call) -> Call:
    """With 0 for NaN and inf in keys and values: plain operations multiply masked ones by 0."""
    return call.change(key=call.key.nan_to_num(0, 0, 0), value=call.value.nan_to_num(0, 0, 0))


def _solve(call: Call) -> Solved:
    options = {
        "attn_mask": call.mask,
        "scale": call.scale,
        "softcap": call.softcap,
        "enable_gqa": call.query.shape[1] != call.key.shape[1],
        "problem": call.problem,
        "backend": "torch",
    }
    out, aux = attention(
        call.query, call.key, call.value, **options, return_aux=AuxRequest(lse=call.has_lse and _soft(call.problem))
    )
    return out, aux.lse


def _soft(problem: Transport) -> bool:
    """Whether the temperature is certainly above 0: hard routing has no lse."""
    tau = problem.temperature
    return isinstance(tau, TemperatureRule) or (bool((tau > 0).all()) if isinstance(tau, Tensor) else tau > 0)


def weights_of(call: Call) -> Tensor:
    """The plan of the definition, [B, H, Tq, Tk]."""
    with torch.no_grad():
        clean = _without_nan(call)
        return _solve(clean.with_scores(clean.capped(clean.scores())))[0]


def prior_matrix(call: Call) -> Tensor:
    """The prior of every pair, [B, H, Tq, Tk]: the plan of a free softmax whose scores are all 0."""
    with torch.no_grad():
        B, H, Tq, _ = call.query.shape
        level = call.with_scores(call.query.new_zeros(B, H, Tq, call.key.shape[2])).change(mask=None)
        return _solve(level.change(problem=Transport(prior=call.problem.prior, marginal=Free())))[0]


def admissible(call: Call) -> Tensor:
    """Which keys each query may read, [B, H, Tq, Tk]."""
    allowed = prior_matrix(call) > 0
    if call.mask is None:
        return allowed
    return allowed & (call.mask if call.mask.dtype == torch.bool else call.mask != -math.inf)


def peaks(call: Call) -> Tensor:
    """The absolute value of the largest exponent of each row, s/tau + log pi, [B, H, Tq]; 0 for a row that is empty or
    has nothing but lowest numbers."""
    with torch.no_grad():
        clean = _without_nan(call)
        tau = clean.problem.temperature
        x = clean.capped(clean.scores())
        if clean.mask is not None and clean.mask.dtype != torch.bool:
            x = x + clean.mask
        if isinstance(tau, Tensor) or (isinstance(tau, int | float) and tau > 0):
            x = x / tau
        x = x + prior_matrix(clean).log()
        if clean.mask is not None and clean.mask.dtype == torch.bool:
            x = x.masked_fill(~clean.mask, -math.inf)
        largest = x.amax(-1).abs()
        return largest.where(largest < 1e6, 0.0)
