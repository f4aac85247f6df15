"""The priors: a weight pi >= 0 for every pair of query and key, which the plan stays close to. Zero masks a pair.

A prior is one class. Its method `terms` gives the same prior as a few plain fields, `PriorTerms`, that every backend
reads. Products of priors combine these fields. So a new prior needs nothing but its class.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ._pytree import Part
from ._validate import (
    Scalar,
    broadcastable,
    check_device,
    check_scalar,
    check_type,
    check_values,
    concrete,
    describe,
    finite,
    is_integer,
    row_parameter,
)

Alignment = Literal["top_left", "bottom_right"]


class PlanShape(NamedTuple):
    """The plan that a prior is for: [*lead, Tq, Tk], where lead ends with the heads; compute dtype and device.

    Query i is at key position i + offset."""

    lead: tuple[int, ...]
    Tq: int
    Tk: int
    dtype: torch.dtype
    device: torch.device
    offset: int = 0

    @property
    def B(self) -> int:
        return math.prod(self.lead[:-1])

    @property
    def H(self) -> int:
        return self.lead[-1]


class PriorTerms(NamedTuple):
    """A prior in the fields that backends read. Query i is at key position i + offset.

    The pair (i, j) is masked unless -left <= j - position <= right, the ids agree and are not negative, and log_prior
    is above -inf. Elsewhere log pi = log_prior - slopes * |j - position|.
    """

    left: int | None = None
    right: int | None = None
    slopes: Tensor | None = None  # [1, H|1, 1, 1]
    log_prior: Tensor | None = None  # broadcasts to [B, H, Tq, Tk]
    query_ids: Tensor | None = None  # [B|1, 1, Tq, 1]
    key_ids: Tensor | None = None  # [B|1, 1, 1, Tk]


class Prior(Part, abstract=True):
    """A weight pi >= 0 for every pair of query and key, never normalised; 0 masks. Priors multiply with `*`."""

    positioned: ClassVar[bool] = False  # whether it depends on positions: then it has a field `alignment`
    weighted: ClassVar[bool] = False  # whether it has other values than 0 and 1 by construction

    def __init_subclass__(cls, abstract: bool = False) -> None:
        if cls.positioned and not abstract and "alignment" not in cls.__annotations__ and not hasattr(cls, "alignment"):
            raise TypeError(f"{cls.__name__}: expected a field `alignment`, because it depends on positions; got none")
        super().__init_subclass__(abstract)

    def __mul__(self, other: Prior) -> Prior:
        if not isinstance(other, Prior):
            return NotImplemented
        return Product(self.factors() + other.factors())

    def factors(self) -> tuple[Prior, ...]:
        return (self,)

    def terms(self, shape: PlanShape) -> PriorTerms:
        """The prior of a plan of this shape, as fields that backends read. Raises if it does not fit."""
        raise NotImplementedError(f"prior: no solver for {self!r}")


def _check_alignment(name: str, alignment: object) -> None:
    if alignment not in (None, "top_left", "bottom_right"):
        raise ValueError(f'{name}(alignment): expected "top_left", "bottom_right" or None, got {describe(alignment)}')


class Product(Prior):
    """A product of priors, the result of `*`."""

    parts: tuple[Prior, ...]

    def factors(self) -> tuple[Prior, ...]:
        return self.parts

    def __repr__(self) -> str:
        return " * ".join(map(repr, self.parts))


class Causal(Prior):
    """Query i, at key position i + offset, sees keys up to its own position.

    The offset is 0 for "top_left" (PyTorch's is_causal) and Tk - Tq for "bottom_right" (decoding with a cache). If
    `alignment` is None, that of the other priors of the product holds; if all are None, Tq must equal Tk.
    """

    positioned: ClassVar[bool] = True
    alignment: Alignment | None = None

    def __post_init__(self) -> None:
        _check_alignment("Causal", self.alignment)

    def terms(self, shape: PlanShape) -> PriorTerms:
        return PriorTerms(right=0)


class Window(Prior):
    """Keys from `left` before the query to `right` after it, both ends included; None is unbounded."""

    positioned: ClassVar[bool] = True
    left: int | None
    right: int | None = 0
    alignment: Alignment | None = None

    def __post_init__(self) -> None:
        for name, value in (("left", self.left), ("right", self.right)):
            if value is not None and not is_integer(value):
                raise TypeError(f"Window({name}): expected an int or None, got {describe(value)}")
        if self.left is not None and self.right is not None and self.right < -self.left:
            raise ValueError(f"Window: expected right >= -left, got {self!r}, which admits no key")
        _check_alignment("Window", self.alignment)

    def terms(self, shape: PlanShape) -> PriorTerms:
        return PriorTerms(left=self.left, right=self.right)


class ALiBi(Prior):
    """log pi = -slope_h * |i + offset - j|, slopes [H] or a number; the offset as in `Causal`."""

    positioned: ClassVar[bool] = True
    weighted: ClassVar[bool] = True
    slopes: Scalar
    alignment: Alignment | None = None

    def __post_init__(self) -> None:
        check_scalar("ALiBi(slopes)", self.slopes, "a finite number", finite)
        _check_alignment("ALiBi", self.alignment)

    def terms(self, shape: PlanShape) -> PriorTerms:
        slopes, H = self.slopes, shape.H
        if not isinstance(slopes, Tensor):
            slopes = torch.full((1,), float(slopes), dtype=shape.dtype, device=shape.device)
        if slopes.numel() != 1 and slopes.numel() != H:
            raise ValueError(f"ALiBi(slopes): expected a number or shape [H={H}], got {list(slopes.shape)}")
        slopes = row_parameter(
            "ALiBi(slopes)", slopes.reshape(-1), shape.B, H, shape.Tq, shape.dtype, shape.device, per_head=True
        )
        check_values("ALiBi(slopes)", slopes, "finite slopes", torch.isfinite)
        assert isinstance(slopes, Tensor)
        return PriorTerms(slopes=slopes)


class Bias(Prior):
    """pi = exp(log_prior), any tensor that broadcasts to [B, H, Tq, Tk]; -inf masks a pair."""

    log_prior: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.log_prior, Tensor) or not self.log_prior.is_floating_point():
            raise TypeError(f"Bias(log_prior): expected a floating-point tensor, got {describe(self.log_prior)}")

    def terms(self, shape: PlanShape) -> PriorTerms:
        fitted = broadcastable("Bias(log_prior)", self.log_prior, shape.lead, shape.Tq, shape.Tk, shape.device)
        return PriorTerms(log_prior=fitted)


class Documents(Prior):
    """Packed sequences: a query sees the keys of its own document. ids [T] or [B, T]; negative ids are padding."""

    query_ids: Tensor
    key_ids: Tensor | None = None

    def __post_init__(self) -> None:
        for name, ids in (("query_ids", self.query_ids), ("key_ids", self.key_ids)):
            if ids is None and name == "key_ids":
                continue
            if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
                raise TypeError(f"Documents({name}): expected an integer tensor, got {describe(ids)}")
            if ids.dim() not in (1, 2):
                raise ValueError(f"Documents({name}): expected shape [T] or [B, T], got {list(ids.shape)}")

    @classmethod
    def from_cu_seqlens(
        cls,
        query: Tensor,
        key: Tensor | None = None,
        *,
        query_length: int | None = None,
        key_length: int | None = None,
    ) -> Documents:
        """From cumulative lengths [0, n1, n1 + n2, ...]; positions past the last boundary are padding.

        The lengths default to the last boundary; give them where tensors are padded (and under torch.compile).
        """
        ids = _ids_from_boundaries("query", query, query_length)
        return cls(ids) if key is None else cls(ids, _ids_from_boundaries("key", key, key_length))

    def terms(self, shape: PlanShape) -> PriorTerms:
        B, Tq, Tk = shape.B, shape.Tq, shape.Tk
        if self.key_ids is None and Tq != Tk:
            raise ValueError(f"Documents(key_ids): expected key ids where Tq != Tk, got None with Tq={Tq}, Tk={Tk}")
        key_ids = self.query_ids if self.key_ids is None else self.key_ids
        sides = []
        for name, ids, T in (("query_ids", self.query_ids, Tq), ("key_ids", key_ids, Tk)):
            if ids.shape[-1] != T or (ids.dim() == 2 and ids.shape[0] != 1 and ids.shape[0] != B):
                raise ValueError(f"Documents({name}): expected shape [{T}] or [{B}, {T}], got {list(ids.shape)}")
            check_type(f"Documents({name})", ids)
            check_device(f"Documents({name})", ids, shape.device)
            sides.append((ids if ids.dim() == 2 else ids[None]).long())
        return PriorTerms(query_ids=sides[0][:, None, :, None], key_ids=sides[1][:, None, None, :])


def _ids_from_boundaries(name: str, boundaries: Tensor, length: int | None) -> Tensor:
    where = f"Documents.from_cu_seqlens({name})"
    if not isinstance(boundaries, Tensor) or boundaries.is_floating_point() or boundaries.dtype == torch.bool:
        raise TypeError(f"{where}: expected an integer tensor, got {describe(boundaries)}")
    if boundaries.dim() != 1 or boundaries.shape[0] < 1:
        raise ValueError(f"{where}: expected shape [documents + 1], got {list(boundaries.shape)}")
    if not torch.compiler.is_compiling() and (boundaries[0] != 0 or (boundaries.diff() < 0).any()):
        raise ValueError(f"{where}: expected boundaries that start at 0 and never fall, got {boundaries.tolist()}")
    total = int(boundaries[-1]) if length is None else length
    position = torch.arange(total, device=boundaries.device)
    ids = torch.searchsorted(boundaries.to(position.dtype), position, right=True) - 1
    return torch.where(position < boundaries[-1], ids, -1)


def join_ids(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combine two packings: the (query, key) ids of pairs of documents. Negative ids stay padding."""
    (queries, keys), (other_queries, other_keys) = first, second
    if concrete(queries):  # number the ids of one packing from 0, so that a pair of ids fits into one integer
        _, small = torch.unique(torch.cat([queries.flatten(), keys.flatten()]), return_inverse=True)
        n = queries.numel()
        queries = torch.where(queries < 0, -1, small[:n].view_as(queries))
        keys = torch.where(keys < 0, -1, small[n:].view_as(keys))
    base = torch.maximum(queries.max(), keys.max()) + 1

    def pair(ids: Tensor, others: Tensor) -> Tensor:
        return torch.where((others < 0) | (ids < 0), -1, others * base + ids)

    return pair(queries, other_queries), pair(keys, other_keys)


# Version 0.1 had these classes in regard.problem. Its checkpoints name them so.
torch.serialization.add_safe_globals(
    [(kind, f"regard.problem.{kind.__name__}") for kind in (ALiBi, Bias, Causal, Documents, Product, Window)]
)
