"""Plans along a range of temperatures: `path`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import statistics
from .._display import Displayed
from .._validate import describe
from ..backends.row_equation import solve_rows
from ..lowering import lower_scores
from ..problem import RowsAndColumns, Transport


@dataclass(frozen=True, eq=False, repr=False)
class Path(Displayed):
    """Rows along a range of temperatures: each field is [n, ...rows], one slice per temperature (itself [n]).

    expected_score  sum_j p_j s_j
    entropy, kl     of the plan, and to the normalised prior
    variance        Var_p(s/tau): for KL rows the slope of kl in -log tau, and of entropy in log tau if the prior is 0/1
    value           the optimum F, a soft maximum of the scores
    """

    temperature: Tensor
    expected_score: Tensor
    entropy: Tensor
    kl: Tensor
    variance: Tensor
    value: Tensor


_FORMULAS = {
    "expected_score": lambda rows: -statistics.cost(rows),
    "entropy": statistics.entropy,
    "kl": statistics.kl,
    "variance": statistics.score_variance,
    "value": statistics.value,
}


def path(scores: Tensor, temperatures: Tensor | Sequence[float], problem: Transport | None = None) -> Path:
    """The plans of scores [..., Tk] or [..., H, Tq, Tk] at each of n temperatures (0 is hard routing, if the problem
    allows it), which replace the problem's own. Differentiable in the scores; stores one plan at a time."""
    problem = Transport() if problem is None else problem
    if not isinstance(problem, Transport):
        raise TypeError(f"problem: expected a Transport, got {describe(problem)}")
    if isinstance(problem.marginal, RowsAndColumns):
        raise NotImplementedError(f"problem: path follows rows one by one, got {problem.marginal!r}")
    try:
        given = torch.as_tensor(temperatures, dtype=None if isinstance(temperatures, Tensor) else torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"temperatures: expected n numbers, [n], got {describe(temperatures)}") from None
    if given.dim() != 1 or given.dtype == torch.bool or given.is_complex():
        raise ValueError(f"temperatures: expected n numbers, [n], got {describe(temperatures)}")
    given = given if given.is_floating_point() else given.double()
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores: expected a floating-point tensor, got {describe(scores)}")
    found: dict[str, list[Tensor]] = {name: [] for name in _FORMULAS}
    for temperature in given.to(scores.device).unbind():
        form, folded = lower_scores(scores, replace(problem, temperature=temperature))
        rows = solve_rows(form, folded, order=2)
        for name, formula in _FORMULAS.items():
            found[name].append(formula(rows).reshape(scores.shape[:-1]))
    empty = scores.new_zeros((0, *scores.shape[:-1]))
    return Path(given, **{name: torch.stack(parts) if parts else empty for name, parts in found.items()})
