"""Whether a registered problem fits a call of any length, which generation makes: one query more each time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._validate import concrete, describe
from ..priors import Bias, Documents, Prior
from ..problem import Free, Rows, RowsAndColumns, TemperatureRule, Transport
from ..regions import Blocks
from ..structured import Decay, Density, LowRank, Selected

_PER_HEAD = "a tensor per head, [H, 1, 1], fits every length"
_POSITIONS = "a prior that follows from positions (Causal, Window, ALiBi, Relative) fits every length"
_REGIONS = "Causal, Window, Prefix and their unions fit every length"
_PACKED = "position_ids that begin again at 0 separate packed sequences without a prior, at every length"


class _Lengths(NamedTuple):
    """The lengths that a tensor fits: comparisons, because a compiled call has lengths that are not numbers."""

    first: int
    last: int

    def fit(self, length: int) -> bool:
        return self.first <= length <= self.last


class _Sized(NamedTuple):
    """A tensor of a problem that is made for one number of queries or keys."""

    name: str
    tensor: Tensor
    queries: _Lengths | None  # None: any number
    keys: _Lengths | None
    remedy: str


def check_lengths(problem: Transport | None, Tq: int, Tk: int) -> None:
    """Raise if a tensor of the problem is made for another number of queries or keys than those of this call."""
    for part in () if problem is None else _sized(problem):
        sides = (part.queries, Tq, "queries"), (part.keys, Tk, "keys")
        if all(fitting is None or fitting.fit(length) for fitting, length, _ in sides):
            continue
        made_for = [f"{_shown(fitting)} {what}" for fitting, _, what in sides if fitting is not None]
        raise ValueError(
            f"problem: expected tensors that fit every call of the model (generate() adds one key with each token), "
            f"got {part.name}={describe(part.tensor)}, which is for {' and '.join(made_for)}, in a call with Tq={Tq}, "
            f"Tk={Tk}; {part.remedy}"
        )


def _shown(lengths: _Lengths) -> str:
    return str(lengths.first) if lengths.first == lengths.last else f"{lengths.first} to {lengths.last}"


def _sized(problem: Transport) -> Iterator[_Sized]:
    for prior in () if problem.prior is None else problem.prior.leaves():
        yield from _sized_prior(prior)
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


def _sized_prior(prior: Prior) -> Iterator[_Sized]:
    if isinstance(prior, Bias):
        yield _pairs("Bias(log_prior)", prior.log_prior)
    if isinstance(prior, Density):
        yield _pairs("Density(prior)", prior.prior)
    if isinstance(prior, Documents):
        T = _exactly(prior.query_ids, -1)
        yield _Sized("Documents(query_ids)", prior.query_ids, T, T if prior.key_ids is None else None, _PACKED)
        if prior.key_ids is not None:
            yield _Sized("Documents(key_ids)", prior.key_ids, None, _exactly(prior.key_ids, -1), _PACKED)
    if isinstance(prior, LowRank):
        queries, keys = prior.query_factor, prior.key_factor
        yield _Sized("LowRank(query_factor)", queries, _exactly(queries, -2), None, _POSITIONS)
        yield _Sized("LowRank(key_factor)", keys, None, _exactly(keys, -2), _POSITIONS)
    if isinstance(prior, Decay):
        yield _Sized("Decay(log_forget)", prior.log_forget, None, _exactly(prior.log_forget, -1), _POSITIONS)
    if isinstance(prior, Selected):
        yield _Sized("Selected(index)", prior.index, _exactly(prior.index, -2), None, _REGIONS)
    if isinstance(prior, Blocks):
        queries, keys = (
            _Lengths((blocks - 1) * prior.size + 1, blocks * prior.size) for blocks in prior.map.shape[-2:]
        )
        yield _Sized("Blocks(map)", prior.map, queries, keys, _REGIONS)


def _pairs(name: str, tensor: Tensor) -> _Sized:
    return _Sized(name, tensor, _size(tensor, -2), _size(tensor, -1), _POSITIONS)


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
    if not isinstance(temperature, TemperatureRule):
        yield "temperature", temperature
        return
    for field in dataclasses.fields(temperature):  # type: ignore[arg-type]
        yield f"{type(temperature).__name__}({field.name})", getattr(temperature, field.name)


def _size(tensor: Tensor, dim: int) -> _Lengths | None:
    """The only length that a dimension, counted from the end, fits; None if it broadcasts."""
    return None if tensor.dim() < -dim or tensor.shape[dim] == 1 else _exactly(tensor, dim)


def _exactly(tensor: Tensor, dim: int) -> _Lengths:
    return _Lengths(tensor.shape[dim], tensor.shape[dim])


def follows_positions(prior: Prior | None) -> bool:
    return prior is not None and any(leaf.positioned for leaf in prior.leaves())


def keys_so_far(mask: Tensor) -> int:
    """The number of keys up to the position of the one query of a decoding step, from its mask [B, H, 1, Tk].

    A static cache has empty keys after it. The last key that a query may read is its own."""
    if not concrete(mask):
        raise ValueError(
            "problem: expected a prior that does not depend on positions for a compiled step with a dense mask, whose "
            "values are not known, got one that does; use a dynamic cache, or generate(disable_compile=True)"
        )
    own = last_key(mask)
    if int(own.min()) != int(own.max()):
        raise ValueError(
            f"problem: expected one position for the new tokens of all sequences, because the prior depends on "
            f"positions, got {sorted(set(own.flatten().tolist()))}"
        )
    return int(own.max())


def last_key(mask: Tensor) -> Tensor:
    """The number of keys up to the last one that each query may read, from a mask [B, H, Tq, Tk]."""
    allowed = mask if mask.dtype == torch.bool else mask > -torch.inf
    return torch.where(allowed, torch.arange(1, mask.shape[-1] + 1, device=mask.device), 0).amax(-1)
