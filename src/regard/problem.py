"""What a user declares: an attention as a transport problem.

Each query ships mass to the keys so that similarity is high and the plan stays close to a prior:

    maximise over p >= 0    sum_j p_j s_j  -  tau * sum_j pi_j f(p_j / pi_j)      subject to a marginal

`Transport` names the four parts: the regulariser (f), the prior (pi), the marginal and the temperature (tau).
Nothing here computes on a tensor until a solver asks; the objects are frozen, comparable and hashable by structure
(tensors by identity) and registered as pytrees whose leaves are their tensors.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .parts import Part, Scalar, check_scalar, describe, finite, is_integer, not_negative, positive
from .regularizers import KL, Regularizer

Alignment = Literal["top_left", "bottom_right"]


# --- marginals --------------------------------------------------------------------------------------------------------


class Marginal(Part, abstract=True):
    """What the rows (and columns) of the plan must sum to."""


class Rows(Marginal):
    """Each query ships `mass` (sum_j p_j = mass).

    `sink` adds a null key of that score (a number, or per head): it takes mass and returns nothing.
    `relax` replaces the constraint by a penalty relax * KL(sum_j p_j || 1). At most one of the three may be set.
    """

    mass: float = 1.0
    sink: Scalar | None = None
    relax: Scalar | None = None

    def __post_init__(self) -> None:
        if isinstance(self.mass, Tensor):
            raise TypeError(f"Rows(mass): expected a number, got {describe(self.mass)}")
        check_scalar("Rows(mass)", self.mass, "a positive, finite number", positive)
        if self.sink is not None:
            check_scalar("Rows(sink)", self.sink, "a finite number", finite)
        if self.relax is not None:
            check_scalar("Rows(relax)", self.relax, "a positive, finite number", positive)
        if (self.mass != 1) + (self.sink is not None) + (self.relax is not None) > 1:
            raise ValueError(f"Rows: mass other than 1, sink and relax exclude one another, got {self!r}")


class Free(Marginal):
    """No constraint on the rows: p = pi * g((s + offset) / tau)."""

    offset: Scalar = 0.0

    def __post_init__(self) -> None:
        check_scalar("Free(offset)", self.offset, "a finite number", finite)


class RowsAndColumns(Marginal):
    """Each query ships `row` and each key receives `column`: attention as optimal transport (Sinkhorn), KL only.

    The plan is p_ij = pi_ij exp((s_ij - f_i - g_j)/tau), one price per query and one per key. `row` is a number or a
    tensor that broadcasts to [..., H, Tq] (None: 1); `column` is a tensor that broadcasts to [..., H, Tk] (None: the
    keys of a document share equally what its queries ship: Tq/Tk each). Queries that may read nothing ship nothing and
    keys that nobody may read receive nothing. `relax` replaces the columns' constraint by a penalty
    relax * KL(column sums || column). All three may require grad.

    The rows are met exactly. The columns are, to `tolerance`: no more than that share of a document's mass is in a
    wrong column; after `max_iterations` a warning tells what is, or with `strict` an error. The gradient is that of the
    solution (implicit differentiation), solved to rounding, or where more than 1e-6 is tolerated, to a tenth of that.
    `iterations=n` instead stops after n normalisations - rows, columns, rows, ...
    rows, so n is odd; 1 is softmax, 3 or 5 is Sinkformer's setting - and its gradient is that of those n steps.

    Causal priors, and masks that are causal, are refused: what a key receives from later queries would tell earlier
    ones of the future.
    """

    row: Scalar | None = None
    column: Tensor | None = None
    tolerance: float = 1e-6
    max_iterations: int = 1000
    relax: Scalar | None = None
    iterations: int | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if self.row is not None:
            check_scalar("RowsAndColumns(row)", self.row, "a positive, finite number", positive)
        if self.column is not None and not (isinstance(self.column, Tensor) and self.column.is_floating_point()):
            raise TypeError(
                f"RowsAndColumns(column): expected a floating-point tensor that broadcasts to [..., H, Tk] or None, "
                f"got {describe(self.column)}"
            )
        if self.relax is not None:
            check_scalar("RowsAndColumns(relax)", self.relax, "a positive, finite number", positive)
        if isinstance(self.tolerance, Tensor):
            raise TypeError(f"RowsAndColumns(tolerance): expected a number, got {describe(self.tolerance)}")
        check_scalar("RowsAndColumns(tolerance)", self.tolerance, "a positive, finite number", positive)
        if not is_integer(self.max_iterations) or self.max_iterations < 1:
            raise ValueError(
                f"RowsAndColumns(max_iterations): expected a positive int, got {describe(self.max_iterations)}"
            )
        if self.iterations is not None and (
            not is_integer(self.iterations) or self.iterations < 1 or not self.iterations % 2
        ):
            raise ValueError(
                f"RowsAndColumns(iterations): expected an odd positive int (rows are normalised first and last) or "
                f"None, got {describe(self.iterations)}"
            )
        if not isinstance(self.strict, bool):
            raise TypeError(f"RowsAndColumns(strict): expected a bool, got {describe(self.strict)}")


# --- priors -----------------------------------------------------------------------------------------------------------


class Prior(Part, abstract=True):
    """A reference measure pi over the keys, never normalised; zero forbids. Priors multiply with `*`."""

    def __mul__(self, other: Prior) -> Prior:
        if not isinstance(other, Prior):
            return NotImplemented
        return Product(self.factors() + other.factors())

    def factors(self) -> tuple[Prior, ...]:
        return (self,)


def _check_alignment(name: str, alignment: object) -> None:
    if alignment not in (None, "top_left", "bottom_right"):
        raise ValueError(f'{name}(alignment): expected "top_left", "bottom_right" or None, got {describe(alignment)}')


class Product(Prior):
    """Priors multiplied together: what `*` makes."""

    parts: tuple[Prior, ...]

    def factors(self) -> tuple[Prior, ...]:
        return self.parts

    def __repr__(self) -> str:
        return " * ".join(map(repr, self.parts))


class Causal(Prior):
    """Query i, at key position i + offset, sees keys up to its own position.

    The offset is 0 for "top_left" (PyTorch's is_causal) and Tk - Tq for "bottom_right" (a cache's view). Left unset,
    the alignment is taken from the other priors of the product; unset everywhere needs Tq = Tk.
    """

    alignment: Alignment | None = None

    def __post_init__(self) -> None:
        _check_alignment("Causal", self.alignment)


class Window(Prior):
    """Keys from `left` before the query to `right` after it, both ends included; None is unbounded."""

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


class ALiBi(Prior):
    """log pi = -slope_h * |i + offset - j|, slopes [H] or a number; the offset as in `Causal`."""

    slopes: Scalar
    alignment: Alignment | None = None

    def __post_init__(self) -> None:
        check_scalar("ALiBi(slopes)", self.slopes, "a finite number", finite)
        _check_alignment("ALiBi", self.alignment)


class Bias(Prior):
    """pi = exp(log_prior), any tensor that broadcasts to [B, H, Tq, Tk]; -inf forbids."""

    log_prior: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.log_prior, Tensor) or not self.log_prior.is_floating_point():
            raise TypeError(f"Bias(log_prior): expected a floating-point tensor, got {describe(self.log_prior)}")


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


# --- budgets ----------------------------------------------------------------------------------------------------------


class Budget(Part, abstract=True):
    """A rule that stands for the temperature: each row takes the one at which a statistic of its plan is the budget."""

    statistic: ClassVar[str]
    budget: Scalar

    def __post_init__(self) -> None:
        check_scalar(f"{type(self).__name__}(budget)", self.budget, "a finite number", finite)


class MatchKL(Budget):
    """Each row's temperature is the one at which KL(p || pi / sum(pi)) = budget.

    This is the constrained form: of all plans that stray from the prior by at most `budget` nats, the one of highest
    expected score. `budget` is a number or a tensor that broadcasts to [B, H, Tq, 1], and may require grad.

    A budget that a row cannot meet gives the nearest plan that it can: 0 or less the prior itself (temperature near
    infinity), more than the hard plan has (log of sum(pi) / pi of the best keys) hard routing, to rounding: the best
    key, or equal ones by their priors. In such a row the plan does not move: only the values get a gradient.
    A masked key must be forbidden (a bool mask, -inf): a very low score is still a score of an admissible key.
    """

    statistic: ClassVar[str] = "kl"


class MatchEntropy(Budget):
    """Each row's temperature is the one at which its entropy -sum(p log p) is the budget, as `MatchKL` otherwise.

    Only for priors of 0 and 1 (masks, bands, documents): under a weighted prior entropy is not monotone in the
    temperature. More than log n (n admissible keys) gives the uniform plan, less than the best keys' ties hard routing.
    """

    statistic: ClassVar[str] = "entropy"


# --- the problem ------------------------------------------------------------------------------------------------------


class Transport(Part):
    """An attention: regulariser, prior, marginal and temperature. None means `KL()`, no prior, `Rows()`.

    `temperature` is a number or a tensor that broadcasts to [B, H, Tq, 1] (per head: [H, 1, 1]); 0 is hard routing.
    For KL rows it may be a budget that each row's temperature is to meet: `MatchKL(c)`, `MatchEntropy(h)`.
    """

    regularizer: Regularizer | None = None
    _: dataclasses.KW_ONLY
    prior: Prior | None = None
    marginal: Marginal | None = None
    temperature: Scalar | Budget = 1.0

    def __post_init__(self) -> None:
        # Dynamo cannot build an object whose defaults are objects: None is replaced here.
        if self.regularizer is None:
            object.__setattr__(self, "regularizer", KL())
        if self.marginal is None:
            object.__setattr__(self, "marginal", Rows())
        for name, value, kind in (
            ("regularizer", self.regularizer, Regularizer),
            ("marginal", self.marginal, Marginal),
            ("prior", self.prior, Prior | None),
        ):
            if not isinstance(value, kind):
                hint = f" (did you mean {value.__name__}()?)" if isinstance(value, type) else ""
                raise TypeError(f"Transport({name}): expected a {name}, got {describe(value)}{hint}")
        if isinstance(self.temperature, Budget):
            self._check_budget()
        else:
            check_scalar("Transport(temperature)", self.temperature, "a finite number >= 0", not_negative)

    def _check_budget(self) -> None:
        name = type(self.temperature).__name__
        if not isinstance(self.regularizer, KL) or self.marginal != Rows():
            raise ValueError(
                f"Transport(temperature): {name} expects KL() with plain Rows(), where the divergence rises with "
                f"1/temperature; got {self.regularizer!r}, {self.marginal!r}"
            )
        factors = () if self.prior is None else self.prior.factors()
        if isinstance(self.temperature, MatchEntropy) and any(isinstance(f, ALiBi) for f in factors):
            raise ValueError(
                "Transport(temperature): MatchEntropy expects a prior of 0 and 1, where entropy rises with the "
                f"temperature; got {self.prior!r} (MatchKL takes any prior)"
            )

    def __repr__(self) -> str:
        shown = [repr(self.regularizer)]
        if self.prior is not None:
            shown.append(f"prior={self.prior!r}")
        if self.marginal != Rows():
            shown.append(f"marginal={self.marginal!r}")
        if isinstance(self.temperature, Tensor | Budget) or self.temperature != 1:
            shown.append(f"temperature={describe(self.temperature)}")
        return f"Transport({', '.join(shown)})"
