"""Judging one call whose arguments and output are given, as an attention layer of a model received them.

Only the output is compared: there is no loss. The allowed error follows the same rule as in outcomes.py.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from .calls import Call, admissible, peaks, solve_exactly, solve_plainly, weights_of
from .diagnosis import REJECTED, both
from .hypotheses import HYPOTHESES, Change
from .outcomes import ALLOWED, FLOOR


@dataclass(frozen=True)
class Verdict:
    error: float
    allowed: float

    @property
    def right(self) -> bool:
        return self.error <= self.allowed


def in_dtype(call: Call, dtype: torch.dtype) -> Call:
    """The same call with tensors of another floating dtype."""
    mask = call.mask if call.mask is None or call.mask.dtype == torch.bool else call.mask.to(dtype)
    return call.change(query=call.query.to(dtype), key=call.key.to(dtype), value=call.value.to(dtype), mask=mask)


def compared_rows(call: Call, real: Tensor | None) -> Tensor:
    """The rows that have a meaning, [B, H, Tq]: real queries with at least one admissible key."""
    rows = admissible(call).any(-1)
    return rows if real is None else rows & real[:, None]


def judge(call: Call, expected: Tensor, got: Tensor, dtype: torch.dtype, rows: Tensor) -> Verdict:
    """Whether `got` is `expected`, the output of the definition for `call` (float64), to rounding in `dtype`."""
    with torch.no_grad():
        plain = solve_plainly(in_dtype(call, dtype))[0].double()
        largest = (1 + peaks(call))[..., None]
        floor = (weights_of(call).abs() * largest) @ call.repeated(call.value).nan_to_num(0, 0, 0).abs()
    loss = _largest(plain - expected, rows)
    allowed = ALLOWED * loss + FLOOR.get(dtype, 1.0) * torch.finfo(dtype).eps * _largest(floor, rows)
    return Verdict(_largest(got.double() - expected, rows), allowed)


def explain(call: Call, got: Tensor, dtype: torch.dtype, rows: Tensor, allowed: float) -> list[tuple[str, str]]:
    """The names and sentences of the wrong attentions that give `got`, to rounding. If none does alone, those of the
    first two that do together, where each drops something."""
    found: dict[str, str] = {}
    for hypothesis in HYPOTHESES:
        if hypothesis.name not in found and _gives(hypothesis.change, call, got, dtype, rows, allowed):
            found[hypothesis.name] = hypothesis.sentence
    if found:
        return list(found.items())
    dropping = [h for h in HYPOTHESES if h.name.endswith("-dropped")]
    for first, second in itertools.combinations(dropping, 2):
        if first.name != second.name and _gives(both(first, second), call, got, dtype, rows, allowed):
            return [
                (one.name, f"{one.sentence} (together with {other.name})")
                for one, other in ((first, second), (second, first))
            ]
    return []


def _gives(change: Change, call: Call, got: Tensor, dtype: torch.dtype, rows: Tensor, allowed: float) -> bool:
    """Whether the changed call has this output."""
    try:
        with torch.no_grad():
            changed = change(call)
            if changed is None:
                return False
            expected = solve_exactly(changed)[0]
            if _largest(got.double() - expected, rows) > REJECTED * allowed:
                return False
            verdict = judge(changed if changed.compute is None else call, expected, got, dtype, rows)
    except (ValueError, TypeError, RuntimeError):  # the change has no meaning for this call
        return False
    return verdict.error <= max(verdict.allowed, allowed)


def _largest(error: Tensor, rows: Tensor) -> float:
    """The largest absolute entry in these rows; NaN counts as infinite."""
    chosen = error[rows.expand(error.shape[:3])]
    return float(chosen.abs().nan_to_num(torch.inf, torch.inf).max()) if chosen.numel() else 0.0
