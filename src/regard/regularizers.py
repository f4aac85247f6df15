"""The regularisers: each a convex f, given by f itself, its link g = (f')^-1 and the link's slope.

A solver needs nothing else: the plan is p = pi * g((s - lambda)/tau), and its gradient depends on w = pi * g'.
"""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ._pytree import Part
from ._validate import Scalar, check_scalar, concrete, describe
from .agreement import examine
from .convex import conjugate_bound, derivative_of, x_log_x

_FAMILIES: dict[str, type[Regularizer]] = {}  # by name, as their classes are defined


class Regularizer(Part, abstract=True):
    """A convex f and the inverse of f': the plan is p = pi * link(t), t = (s - lambda)/tau - origin.

    A subclass gives a `family` name and three formulas: `f`, `link` (g, zero below its range) and `slope` (g'). Solver,
    gradient, statistics and certificate follow. Its fields are its parameters: each is a number or a tensor (per head
    [H], or broadcast to [B, H, Tq, 1]), may require grad, and reaches the formulas as a number or [B|1, H|1, Tq|1, 1].
    `domains` gives the open interval of each. The argument of f is the ratio p / pi. Without a prior pi = 1 for every
    key (not 1/n), so that the ratio is p.
    """

    family: ClassVar[str]
    domains: ClassVar[dict[str, tuple[str, float, float]]] = {}  # parameter -> (in words, above, below)
    ceiling = math.inf  # the supremum of link; without an annotation, because FDivergence makes it a field
    full_support = False  # whether link > 0 everywhere: every admissible key has some weight
    signed = False  # whether plans may be negative; a field of FDivergence, too

    _anonymous: ClassVar[bool] = False  # whether each object has a family of its own, as FDivergence

    def __init_subclass__(cls, abstract: bool = False, anonymous: bool = False) -> None:
        cls._anonymous = cls._anonymous or anonymous
        if not abstract and not cls._anonymous:
            _check_class(cls)
        super().__init_subclass__(abstract)
        if "family" in cls.__dict__:
            _FAMILIES[cls.family] = cls

    def __post_init__(self) -> None:
        for name, (text, above, below) in self.domains.items():
            check_scalar(f"{type(self).__name__}({name})", getattr(self, name), text, lambda x: above < x < below)  # noqa: B023

    @property
    def parameters(self) -> dict[str, Scalar]:
        """The fields by name, in order."""
        fields = self.__dict__
        return {name: fields[name] for name in self._names}

    @classmethod
    def unchecked(cls, *parameters: Scalar) -> Regularizer:
        """The regulariser with these parameters, which are not checked."""
        return object.__new__(cls).with_parameters(dict(zip(cls._names, parameters, strict=True)))

    def with_parameters(self, parameters: dict[str, Scalar]) -> Regularizer:
        """The same regulariser with other parameters, which are not checked."""
        made = object.__new__(type(self))
        for name, value in (self.__dict__ | parameters).items():
            object.__setattr__(made, name, value)
        return made

    @property
    def origin(self) -> Scalar:
        """Where t begins: moves the coordinate in which link and slope are written, for accuracy."""
        return 0.0

    @property
    def power(self) -> Scalar:
        """The power of the mass in which the row equation is nearly linear (0: its logarithm). Affects speed only."""
        return 0.0

    def f(self, ratio: Tensor) -> Tensor:
        raise NotImplementedError

    def link(self, t: Tensor) -> Tensor:
        raise NotImplementedError

    def slope(self, t: Tensor) -> Tensor:
        raise NotImplementedError

    def inverse(self, log_ratio: Tensor) -> Tensor:
        """A start for searches: some t, if possible the one where link(t) = exp(log_ratio)."""
        return torch.zeros_like(log_ratio)

    def absorb(self, log_scale: Tensor, temperature: Scalar) -> tuple[Tensor, Scalar, Scalar] | None:
        """Trade a common factor exp(c) of the prior for another temperature and a shift of lambda.

        Returns (the part of c that was traded, new temperature, shift), or None if there is no such trade."""
        return None

    def weights(self, t: Tensor, log_prior: Tensor | None) -> Tensor:
        """p = pi * link(t)."""
        return self.link(t) if log_prior is None else log_prior.exp() * self.link(t)

    def weights_and_slopes(self, t: Tensor, log_prior: Tensor | None) -> tuple[Tensor, Tensor]:
        """p and w = pi * link'(t). The gradient depends on the regulariser through w alone."""
        slopes = self.slope(t) if log_prior is None else log_prior.exp() * self.slope(t)
        return self.weights(t, log_prior), slopes

    def conjugate(self, t: Tensor) -> Tensor:
        """An upper bound of f*, from f alone: valid even if link were wrong. The certificate rests on it."""
        return conjugate_bound(self.f, t + self.origin, self.link(t), self.signed)


def _check_class(cls: type[Regularizer]) -> None:
    """Raise for a class without its formulas, or with the family of another class."""
    formulas, family = ("f", "link", "slope"), getattr(cls, "family", "")
    missing = [name for name in formulas if getattr(cls, name) is getattr(Regularizer, name)]
    missing = missing if family else ["family", *missing]
    if missing:
        raise TypeError(f"{cls.__name__}: expected `family`, `f`, `link` and `slope`, got no {', '.join(missing)}")
    taken = _FAMILIES.get(family, cls)
    if "family" not in cls.__dict__:  # it is solved as the class that it extends
        changed = [name for name in formulas if name in cls.__dict__]
        if changed:
            raise TypeError(f"{cls.__name__}: expected a `family` of its own, got {family!r} and its own {changed[0]}")
    # A class that is defined again, as in a notebook, has the same name and module.
    elif (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"family: expected a name that is not taken, got {family!r}, which is {taken}")


def _exact_conjugate(regularizer: Regularizer, t: Tensor) -> Tensor:
    """f*(eta) = eta g(eta) - f(g(eta)), for the formulas of this file, whose link is the inverse of f'."""
    ratio = regularizer.link(t)
    return (t + regularizer.origin) * ratio - regularizer.f(ratio)


class KL(Regularizer):
    """Kullback-Leibler to the prior: softmax."""

    family: ClassVar[str] = "kl"
    full_support: ClassVar[bool] = True

    def f(self, ratio: Tensor) -> Tensor:
        return x_log_x(ratio) - ratio + 1

    def link(self, t: Tensor) -> Tensor:
        return t.exp()

    def slope(self, t: Tensor) -> Tensor:
        return t.exp()

    def inverse(self, log_ratio: Tensor) -> Tensor:
        return log_ratio

    def absorb(self, log_scale: Tensor, temperature: Scalar) -> tuple[Tensor, Scalar, Scalar]:
        return log_scale, temperature, temperature * log_scale

    def weights(self, t: Tensor, log_prior: Tensor | None) -> Tensor:
        # One exponential, because exp(t) may overflow where the prior is tiny.
        return t.exp() if log_prior is None else (t + log_prior).exp()

    def weights_and_slopes(self, t: Tensor, log_prior: Tensor | None) -> tuple[Tensor, Tensor]:
        weights = self.weights(t, log_prior)
        return weights, weights

    def conjugate(self, t: Tensor) -> Tensor:
        return _exact_conjugate(self, t)


class Tsallis(Regularizer):
    """Tsallis entropy of order alpha > 1: alpha-entmax, with exact zeros. 2 is sparsemax; the limit 1 is softmax."""

    alpha: Scalar

    family: ClassVar[str] = "tsallis"
    domains: ClassVar = {"alpha": ("alpha > 1", 1.0, math.inf)}

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
            inside = ~(base <= -1)  # NaN stays NaN
            return inside, torch.where(inside, base, 0.0).log1p() / (self.alpha - 1)
        inside = ~(base <= 0)
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

    def conjugate(self, t: Tensor) -> Tensor:
        return _exact_conjugate(self, t)


class FermiDirac(Regularizer):
    """Fermi-Dirac entropy, 0 <= p <= pi: soft top-m with `Rows(mass=m)`, sigmoid attention with `Free()`."""

    family: ClassVar[str] = "fermi_dirac"
    ceiling: ClassVar[float] = 1.0
    full_support: ClassVar[bool] = True

    def f(self, ratio: Tensor) -> Tensor:
        return x_log_x(ratio) + x_log_x(1 - ratio)

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


# The arguments of an operator cannot be callables. A live FDivergence is passed by its name.
_DECLARED: weakref.WeakValueDictionary[str, FDivergence] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class FDivergence(Regularizer, anonymous=True):
    """Your own regulariser: convex `f`, `link` = the inverse of f', `slope` = link's derivative.

    `link` counts as 0 at and below `lower`, the infimum of f'. Without `slope`, autograd differentiates link. All
    three map a tensor to a tensor of the same shape and dtype, element by element. f is also evaluated at 0:
    write x log x as torch.xlogy(x, x), which is 0 there, not NaN.

    link and slope decide the plan and its gradient; values and certificates are computed from f alone. Construction
    therefore compares the functions on a grid, in float64: f' (by autograd) increases and inverts link, slope is
    link's derivative, lower is the infimum of f'. If not, ValueError names the argument and the point. Where values
    cannot be read (under vmap and other transforms, on meta tensors) nothing is compared.

    Construction also determines four facts. `upper`: where f' is bounded above, link counts as inf at and above that
    bound. `ceiling`: where ratios are bounded, the largest one. `full_support`: whether link is positive everywhere.
    `signed`: if lower is -inf, f'(0) is finite and link inverts f' at negative ratios, too, then p >= 0 is dropped and
    plans may be negative. Tensors that the functions hold are constants: they get no gradient. (Parameters that do are
    the fields of a `Regularizer` of your own.)
    """

    user_f: Callable[[Tensor], Tensor]
    user_link: Callable[[Tensor], Tensor]
    user_slope: Callable[[Tensor], Tensor] | None = None
    lower: float = -math.inf
    upper: float = math.inf
    ceiling: float = math.inf
    full_support: bool = False
    signed: bool = False

    def __init__(
        self,
        f: Callable[[Tensor], Tensor],
        link: Callable[[Tensor], Tensor],
        slope: Callable[[Tensor], Tensor] | None = None,
        lower: float = -math.inf,
    ) -> None:
        for name, value in (("f", f), ("link", link), ("slope", slope)):
            if not callable(value) and not (name == "slope" and value is None):
                raise TypeError(f"FDivergence({name}): expected a callable, got {describe(value)}")
        if isinstance(lower, bool) or not isinstance(lower, (int, float)) or math.isnan(lower) or lower == math.inf:
            raise ValueError(f"FDivergence(lower): expected a number below inf, got {describe(lower)}")
        fields = {"user_f": f, "user_link": link, "user_slope": slope, "lower": float(lower)}
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._declare()
        # Dynamo must not trace the check, even where it breaks its graph. (`disable` would import Dynamo.)
        examined: Any = torch.compiler.disable(_examined) if "torch._dynamo" in sys.modules else _examined
        examined(self)

    def arguments(self) -> dict[str, Any]:
        return {"f": self.user_f, "link": self.user_link, "slope": self.user_slope, "lower": self.lower}

    # A copy gets a family name of its own, since a name belongs to one object of one process. It is not checked again.

    def __getstate__(self) -> dict[str, Any]:
        return dict(zip(self._names, self._values(), strict=True))

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        self._declare()

    def _declare(self) -> None:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "FDivergence: construct it outside of the compiled function, because it holds Python callables"
            )
        object.__setattr__(self, "family", f"custom {next(_numbers)}")
        _DECLARED[self.family] = self

    @property
    def parameters(self) -> dict[str, Scalar]:
        return {}

    def f(self, ratio: Tensor) -> Tensor:
        return self.user_f(ratio)

    def link(self, t: Tensor) -> Tensor:
        linked = self._within(lambda t: _Linked.apply(self, t), t)
        return linked if self.upper == math.inf else torch.where(t >= self.upper, math.inf, linked)

    def slope(self, t: Tensor) -> Tensor:
        return self._within(self.derivative, t)

    def derivative(self, t: Tensor) -> Tensor:
        """link's derivative where link is defined: slope, or by autograd."""
        return derivative_of(self.user_link, t) if self.user_slope is None else self.user_slope(t)

    def _within(self, function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
        """function(t) where lower < t < upper, 0 elsewhere. NaN stays NaN."""
        outside = t <= self.lower
        if self.upper < math.inf:
            outside = outside | (t >= self.upper)
        return torch.where(outside, 0.0, function(torch.where(outside, self._inside, t)))

    @property
    def _inside(self) -> float:
        """A point at which link is defined. It replaces points outside of the range, where the result is not used."""
        point = max(0.0, self.lower + 1)
        if point < self.upper:
            return point
        return self.upper - 1 if self.lower < self.upper - 1 else (self.lower + self.upper) / 2


def _examined(divergence: FDivergence) -> None:
    if concrete(torch.empty(0, device="cpu")):
        found = examine(divergence.user_f, divergence.user_link, divergence.derivative, divergence.lower)
        for name, value in found._asdict().items():
            object.__setattr__(divergence, name, value)


class _Linked(torch.autograd.Function):
    """A user's link, differentiated by its `derivative` (to any order, as far as that is differentiable)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(divergence: FDivergence, t: Tensor) -> Tensor:
        linked = divergence.user_link(t)
        return linked.clone() if linked is t else linked  # a Function must not return its input itself

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.divergence, t = inputs
        ctx.save_for_backward(t)
        ctx.save_for_forward(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        return None, grad * ctx.divergence.derivative(ctx.saved_tensors[0])

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor) -> Tensor:  # type: ignore[override]
        return tangent * ctx.divergence.derivative(ctx.saved_tensors[0])


def regularizer_of(family: str, parameters: Sequence[Scalar], checked: bool = True) -> Regularizer:
    """The regulariser of a lowered problem, which holds its family and its parameters."""
    if family in _FAMILIES:
        kind = _FAMILIES[family]
        if checked:
            return kind(*parameters)
        return kind.unchecked(*parameters)
    if family in _DECLARED:
        return _DECLARED[family]
    raise RuntimeError(f"the FDivergence {family!r} no longer exists: keep it alive while its operator is used")
