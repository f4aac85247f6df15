"""What a user declares: an attention as a transport problem.

Each query ships mass to the keys so that similarity is high and the plan stays close to a prior:

    maximise over p >= 0    sum_j p_j s_j  -  tau * sum_j pi_j f(p_j / pi_j)      subject to a marginal

`Transport` names the four parts: the regulariser (f), the prior (pi), the marginal and the temperature (tau).
Nothing here computes on a tensor until a solver asks; the objects are frozen, comparable and hashable by structure
(tensors by identity) and registered as pytrees whose leaves are their tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .parts import Part, describe, is_integer, is_number

Scalar = float | Tensor
Alignment = Literal["top_left", "bottom_right"]


def _check_scalar(name: str, value: object, expected: str, valid: Callable[[float], bool]) -> None:
    """A number must satisfy `valid`; a tensor must be floating (its values are checked where it is used)."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(f"{name}: expected a number or a floating-point tensor, got {describe(value)}")
    elif not is_number(value):
        raise TypeError(f"{name}: expected a number or a floating-point tensor, got {describe(value)}")
    elif not valid(value):  # type: ignore[arg-type]
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


# --- regularisers -----------------------------------------------------------------------------------------------------


class Regularizer(Part, abstract=True):
    """A convex f with f' inverted: the plan is p = pi * link(t), t = (s - lambda)/tau - origin.

    A subclass gives three formulas: `f`, `link` (g, zero below its range) and `slope` (g'). `origin` moves the
    coordinate in which link and slope are written, for accuracy. `ceiling` is the supremum of link where it has one.
    """

    family: ClassVar[str]
    ceiling: ClassVar[float] = math.inf

    @property
    def origin(self) -> Scalar:
        return 0.0

    @property
    def power(self) -> Scalar:
        """The power of the mass in which the row equation is nearly straight (0: its logarithm); only speed."""
        return 0.0

    def f(self, ratio: Tensor) -> Tensor:
        raise NotImplementedError

    def link(self, t: Tensor) -> Tensor:
        raise NotImplementedError

    def slope(self, t: Tensor) -> Tensor:
        raise NotImplementedError

    def inverse(self, log_ratio: Tensor) -> Tensor:
        """Some t, if possible the one where link(t) = exp(log_ratio): where a search may begin."""
        return torch.zeros_like(log_ratio)

    def absorb(self, log_scale: Tensor, temperature: Scalar) -> tuple[Tensor, Scalar, Scalar] | None:
        """How a common factor exp(c) of the prior can be traded for another temperature and a shift of lambda: (c, as
        much of it as fits), new temperature, shift. None if it cannot."""
        return None

    def weights(self, t: Tensor, log_prior: Tensor | None) -> Tensor:
        """p = pi * link(t)."""
        return self.link(t) if log_prior is None else log_prior.exp() * self.link(t)

    def weights_and_slopes(self, t: Tensor, log_prior: Tensor | None) -> tuple[Tensor, Tensor]:
        """p and w = pi * link'(t): all that the gradient needs to know of a regulariser."""
        slopes = self.slope(t) if log_prior is None else log_prior.exp() * self.slope(t)
        return self.weights(t, log_prior), slopes

    def conjugate(self, t: Tensor) -> Tensor:
        """f*, from f*(eta) = eta g(eta) - f(g(eta))."""
        ratio = self.link(t)
        return (t + self.origin) * ratio - self.f(ratio)


class KL(Regularizer):
    """Kullback-Leibler to the prior: softmax."""

    family: ClassVar[str] = "kl"

    def f(self, ratio: Tensor) -> Tensor:
        return torch.xlogy(ratio, ratio) - ratio + 1

    def link(self, t: Tensor) -> Tensor:
        return t.exp()

    def slope(self, t: Tensor) -> Tensor:
        return t.exp()

    def inverse(self, log_ratio: Tensor) -> Tensor:
        return log_ratio

    def absorb(self, log_scale: Tensor, temperature: Scalar) -> tuple[Tensor, Scalar, Scalar]:
        return log_scale, temperature, temperature * log_scale

    def weights(self, t: Tensor, log_prior: Tensor | None) -> Tensor:
        # In one exponential: a tiny prior may meet a huge exp(t).
        return t.exp() if log_prior is None else (t + log_prior).exp()

    def weights_and_slopes(self, t: Tensor, log_prior: Tensor | None) -> tuple[Tensor, Tensor]:
        weights = self.weights(t, log_prior)
        return weights, weights


class Tsallis(Regularizer):
    """Tsallis entropy of order alpha > 1: alpha-entmax, with exact zeros. 2 is sparsemax; 1 is softmax's limit."""

    alpha: Scalar

    family: ClassVar[str] = "tsallis"

    def __post_init__(self) -> None:
        _check_scalar("Tsallis(alpha)", self.alpha, "alpha > 1 (KL() is the limit alpha = 1)", _above_one)

    @property
    def origin(self) -> Scalar:
        # Near alpha = 1, t is measured from f'(1) = 1/(alpha - 1): then link(t) -> exp(t), with nothing cancelling.
        return 1 / (self.alpha - 1) if self._centred else 0.0

    @property
    def _centred(self) -> bool:
        return isinstance(self.alpha, Tensor) or self.alpha < 1.25

    @property
    def power(self) -> Scalar:
        return self.alpha - 1

    def f(self, ratio: Tensor) -> Tensor:
        return ratio**self.alpha / (self.alpha * (self.alpha - 1))

    def _is(self, alpha: float) -> bool:
        return not isinstance(self.alpha, Tensor) and self.alpha == alpha

    def _log_ratio(self, t: Tensor) -> tuple[Tensor, Tensor]:
        base = (self.alpha - 1) * t
        if self._centred:
            inside = base > -1
            return inside, torch.where(inside, base, 0.0).log1p() / (self.alpha - 1)
        inside = base > 0
        return inside, torch.where(inside, base, 1.0).log() / (self.alpha - 1)

    def absorb(self, log_scale: Tensor, temperature: Scalar) -> tuple[Tensor, Scalar, Scalar]:
        power = self.alpha - 1
        most = 60 / (power.detach() if isinstance(power, Tensor) else power)  # exp(60) fits float32
        log_scale = torch.minimum(torch.maximum(log_scale, -most + 0 * log_scale), most + 0 * log_scale)
        return log_scale, temperature * (-power * log_scale).exp(), 0.0

    def inverse(self, log_ratio: Tensor) -> Tensor:
        power = self.alpha - 1
        return (torch.expm1 if self._centred else torch.exp)(power * log_ratio) / power

    def link(self, t: Tensor) -> Tensor:
        if self._is(2.0):
            return t.relu()
        if self._is(1.5):
            return (t / 2).relu().square()
        inside, log_ratio = self._log_ratio(t)
        return torch.where(inside, log_ratio.exp(), 0.0)

    def slope(self, t: Tensor) -> Tensor:
        if self._is(2.0):
            return (t > 0).to(t.dtype)
        if self._is(1.5):
            return (t / 2).relu()
        inside, log_ratio = self._log_ratio(t)
        return torch.where(inside, ((2 - self.alpha) * log_ratio).exp(), 0.0)


class FermiDirac(Regularizer):
    """Fermi-Dirac entropy, 0 <= p <= pi: soft top-m with `Rows(mass=m)`, sigmoid attention with `Free()`."""

    family: ClassVar[str] = "fermi_dirac"
    ceiling: ClassVar[float] = 1.0

    def f(self, ratio: Tensor) -> Tensor:
        return torch.xlogy(ratio, ratio) + torch.xlogy(1 - ratio, 1 - ratio)

    def link(self, t: Tensor) -> Tensor:
        return t.sigmoid()

    def slope(self, t: Tensor) -> Tensor:
        return t.sigmoid() * (-t).sigmoid()

    def inverse(self, log_ratio: Tensor) -> Tensor:
        low = log_ratio.clamp(max=-1e-3)
        return low - torch.log1p(-low.exp())

    def weights(self, t: Tensor, log_prior: Tensor | None) -> Tensor:
        return t.sigmoid() if log_prior is None else (torch.nn.functional.logsigmoid(t) + log_prior).exp()

    def weights_and_slopes(self, t: Tensor, log_prior: Tensor | None) -> tuple[Tensor, Tensor]:
        weights = self.weights(t, log_prior)
        return weights, weights * (-t).sigmoid()

    def conjugate(self, t: Tensor) -> Tensor:
        return torch.nn.functional.softplus(t, threshold=1e4)


# Callables cannot travel through an operator's schema; the name of a live FDivergence can.
_DECLARED: weakref.WeakValueDictionary[str, FDivergence] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class FDivergence(Regularizer):
    """Your own regulariser: convex `f`, `link` = the inverse of f', `slope` = link's derivative.

    `link` counts as 0 at and below `lower`, the infimum of f'. link and slope decide the plan and its gradient;
    f enters values and certificates. All three map a tensor to a tensor of the same shape, element by element.
    """

    user_f: Callable[[Tensor], Tensor]
    user_link: Callable[[Tensor], Tensor]
    user_slope: Callable[[Tensor], Tensor]
    lower: float = -math.inf

    def __init__(
        self,
        f: Callable[[Tensor], Tensor],
        link: Callable[[Tensor], Tensor],
        slope: Callable[[Tensor], Tensor],
        lower: float = -math.inf,
    ) -> None:
        for name, value in (("f", f), ("link", link), ("slope", slope)):
            if not callable(value):
                raise TypeError(f"FDivergence({name}): expected a callable, got {describe(value)}")
        if isinstance(lower, bool) or not isinstance(lower, int | float) or math.isnan(lower) or lower == math.inf:
            raise ValueError(f"FDivergence(lower): expected a number below inf, got {describe(lower)}")
        for name, value in (("user_f", f), ("user_link", link), ("user_slope", slope), ("lower", float(lower))):
            object.__setattr__(self, name, value)
        self._declare()

    def __reduce__(self) -> tuple:
        # A copy is declared anew: a name means something in one process, for one object.
        return FDivergence, (self.user_f, self.user_link, self.user_slope, self.lower)

    def _declare(self) -> None:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "FDivergence: build it outside of the compiled function, it holds Python callables"
            )
        object.__setattr__(self, "family", f"custom {next(_numbers)}")
        _DECLARED[self.family] = self

    def f(self, ratio: Tensor) -> Tensor:
        return self.user_f(ratio)

    def link(self, t: Tensor) -> Tensor:
        inside = t > self.lower
        return torch.where(inside, _Linked.apply(self, torch.where(inside, t, self._inside)), 0.0)

    def slope(self, t: Tensor) -> Tensor:
        inside = t > self.lower
        return torch.where(inside, self.user_slope(torch.where(inside, t, self._inside)), 0.0)

    @property
    def _inside(self) -> float:
        """Some point of link's range, to evaluate at where the result is thrown away."""
        return max(0.0, self.lower + 1)


class _Linked(torch.autograd.Function):
    """A user's link, differentiated by the user's slope (to any order, as far as slope is differentiable)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(divergence: FDivergence, t: Tensor) -> Tensor:
        return divergence.user_link(t)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.divergence, t = inputs
        ctx.save_for_backward(t)
        ctx.save_for_forward(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        return None, grad * ctx.divergence.user_slope(ctx.saved_tensors[0])

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor) -> Tensor:  # type: ignore[override]
        return tangent * ctx.divergence.user_slope(ctx.saved_tensors[0])


# --- marginals --------------------------------------------------------------------------------------------------------


def _finite(x: float) -> bool:
    return -math.inf < x < math.inf  # Dynamo cannot trace math.isfinite of a symbolic float


def _positive(x: float) -> bool:
    return 0 < x < math.inf


def _not_negative(x: float) -> bool:
    return 0 <= x < math.inf


def _above_one(x: float) -> bool:
    return 1 < x < math.inf


class Marginal(Part, abstract=True):
    """What the rows of the plan must sum to."""


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
        _check_scalar("Rows(mass)", self.mass, "a positive, finite number", _positive)
        if self.sink is not None:
            _check_scalar("Rows(sink)", self.sink, "a finite number", _finite)
        if self.relax is not None:
            _check_scalar("Rows(relax)", self.relax, "a positive, finite number", _positive)
        if (self.mass != 1) + (self.sink is not None) + (self.relax is not None) > 1:
            raise ValueError(f"Rows: mass other than 1, sink and relax exclude one another, got {self!r}")


class Free(Marginal):
    """No constraint on the rows: p = pi * g((s + offset) / tau)."""

    offset: Scalar = 0.0

    def __post_init__(self) -> None:
        _check_scalar("Free(offset)", self.offset, "a finite number", _finite)


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
        _check_scalar("ALiBi(slopes)", self.slopes, "a finite number", _finite)
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


# --- the problem ------------------------------------------------------------------------------------------------------


class Transport(Part):
    """An attention: regulariser, prior, marginal and temperature. None means `KL()`, no prior, `Rows()`.

    `temperature` is a number or a tensor that broadcasts to [B, H, Tq, 1] (per head: [H, 1, 1]); 0 is hard routing.
    """

    regularizer: Regularizer | None = None
    _: dataclasses.KW_ONLY
    prior: Prior | None = None
    marginal: Marginal | None = None
    temperature: Scalar = 1.0

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
        _check_scalar("Transport(temperature)", self.temperature, "a finite number >= 0", _not_negative)

    def __repr__(self) -> str:
        shown = [repr(self.regularizer)]
        if self.prior is not None:
            shown.append(f"prior={self.prior!r}")
        if self.marginal != Rows():
            shown.append(f"marginal={self.marginal!r}")
        if isinstance(self.temperature, Tensor) or self.temperature != 1:
            shown.append(f"temperature={describe(self.temperature)}")
        return f"Transport({', '.join(shown)})"


def regularizer_of(family: str, alpha: Scalar) -> Regularizer:
    """The regulariser a lowered problem names."""
    if family == "kl":
        return KL()
    if family == "tsallis":
        return Tsallis(alpha)
    if family == "fermi_dirac":
        return FermiDirac()
    if family in _DECLARED:
        return _DECLARED[family]
    raise RuntimeError(f"the FDivergence {family!r} of this problem is gone: keep it alive while its operator is used")
