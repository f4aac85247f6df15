"""Whether a registered problem fits a call of any length, which generation makes: one query more each time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._validate import concrete, describe
from ..priors import Bias, Documents, Prior
from ..problem import Budget, Free, Rows, RowsAndColumns, Transport

_PER_HEAD = "a tensor per head, [H, 1, 1], fits every length"
_POSITIONS = "a prior that follows from positions (Causal, Window, ALiBi) fits every length"
_PACKED = "position_ids that begin again at 0 separate packed sequences without a prior, at every length"


class _Sized(NamedTuple):
    """A tensor of a problem that is made for one number of queries or keys."""

    name: str
    tensor: Tensor
    queries: int | None  # None: any number
    keys: int | None
    remedy: str


def check_lengths(problem: Transport | None, Tq: int, Tk: int) -> None:
    """Raise if a tensor of the problem is made for another number of queries or keys than those of this call."""
    for part in () if problem is None else _sized(problem):
        if part.queries in (None, Tq) and part.keys in (None, Tk):
            continue
        made_for = [f"{n} {what}" for n, what in ((part.queries, "queries"), (part.keys, "keys")) if n is not None]
        raise ValueError(
            f"problem: expected tensors that fit every call of the model (generate() adds one key with each token), "
            f"got {part.name}={describe(part.tensor)}, which is for {' and '.join(made_for)}, in a call with Tq={Tq}, "
            f"Tk={Tk}; {part.remedy}"
        )


def _sized(problem: Transport) -> Iterator[_Sized]:
    for prior in () if problem.prior is None else problem.prior.factors():
        if isinstance(prior, Bias):
            queries, keys = _size(prior.log_prior, -2), _size(prior.log_prior, -1)
            yield _Sized("Bias(log_prior)", prior.log_prior, queries, keys, _POSITIONS)
        if isinstance(prior, Documents):
            T = prior.query_ids.shape[-1]
            yield _Sized("Documents(query_ids)", prior.query_ids, T, T if prior.key_ids is None else None, _PACKED)
            if prior.key_ids is not None:
                yield _Sized("Documents(key_ids)", prior.key_ids, None, prior.key_ids.shape[-1], _PACKED)
    for name, value in _row_parameters(problem):
        if isinstance(value, Tensor):
            yield _Sized(name, value, _size(value, -2), None, _PER_HEAD)
    marginal = problem.marginal
    if isinstance(marginal, RowsAndColumns):
        if isinstance(marginal.row, Tensor):
            yield _Sized("RowsAndColumns(row)", marginal.row, _size(marginal.row, -1), None, "a number fits all")
        if marginal.column is not None:
            keys = _size(marginal.column, -1)
            yield _Sized("RowsAndColumns(column)", marginal.column, None, keys, "None fits every length")


def _row_parameters(problem: Transport) -> Iterator[tuple[str, Any]]:
    """What broadcasts to [B, H, Tq, 1]."""
    regularizer, marginal, temperature = problem.regularizer, problem.marginal, problem.temperature
    assert regularizer is not None
    for name, value in regularizer.parameters.items():
        yield f"{type(regularizer).__name__}({name})", value
    if isinstance(marginal, Rows):
        yield "Rows(sink)", marginal.sink
        yield "Rows(relax)", marginal.relax
    if isinstance(marginal, Free):
        yield "Free(offset)", marginal.offset
    if isinstance(temperature, Budget):
        yield f"{type(temperature).__name__}(budget)", temperature.budget
    else:
        yield "temperature", temperature


def _size(tensor: Tensor, dim: int) -> int | None:
    """The size of a dimension counted from the end; None if it broadcasts."""
    size = tensor.shape[dim] if tensor.dim() >= -dim else 1
    return None if size == 1 else size


def follows_positions(prior: Prior | None) -> bool:
    return prior is not None and any(factor.positioned for factor in prior.factors())


def keys_so_far(mask: Tensor) -> int:
    """The number of keys up to the position of the one query of a decoding step, from its mask [B, H, 1, Tk].

    A static cache has empty keys after it. The last key that a query may read is its own."""
    if not concrete(mask):
        raise ValueError(
            "problem: expected a prior that does not depend on positions for a compiled step with a dense mask, whose "
            "values are not known, got one that does"
        )
    allowed = mask if mask.dtype == torch.bool else mask > -torch.inf
    own = torch.where(allowed, torch.arange(1, mask.shape[-1] + 1, device=mask.device), 0).amax(-1)
    if int(own.min()) != int(own.max()):
        raise ValueError(
            f"problem: expected one position for the new tokens of all sequences, because the prior depends on "
            f"positions, got {sorted(set(own.flatten().tolist()))}"
        )
    return int(own.max())
