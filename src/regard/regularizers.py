"""The regularisers: each a convex f, given by f itself, its link g = (f')^-1 and the link's slope.

A solver needs nothing else: the plan is p = pi * g((s - lambda)/tau), and w = pi * g' is all that its gradient needs.
"""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .agreement import examine
from .checks import concrete
from .convex import conjugate_bound, derivative_of
from .parts import Part, Scalar, above_one, check_scalar, describe


class Regularizer(Part, abstract=True):
    """A convex f with f' inverted: the plan is p = pi * link(t), t = (s - lambda)/tau - origin.

    A subclass gives three formulas: `f`, `link` (g, zero below its range) and `slope` (g'). `origin` moves the
    coordinate in which link and slope are written, for accuracy. `ceiling` is the supremum of link where it has one.
    `signed` says that plans may be negative: the problem has no constraint p >= 0.
    """

    family: ClassVar[str]
    ceiling: ClassVar[float] = math.inf
    signed = False  # without an annotation: a field of FDivergence, of no other

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
        """f*, from f*(eta) = eta g(eta) - f(g(eta)): exact where link is the inverse of f', too small elsewhere."""
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
        check_scalar("Tsallis(alpha)", self.alpha, "alpha > 1 (KL() is the limit alpha = 1)", above_one)

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

    `link` counts as 0 at and below `lower`, the infimum of f'. Without `slope`, autograd differentiates link. All
    three map a tensor to a tensor of the same shape and dtype, element by element. f(0) is read, too, where a weight is
    0: write x log x as torch.xlogy(x, x), which is 0 there, not NaN.

    link and slope decide the plan and its gradient; values and certificates are computed from f alone. Construction
    therefore compares the functions on a grid, in float64: f' (by autograd) increases and inverts link, slope is
    link's derivative, lower is the infimum of f'. If not, ValueError names the argument and the point. Where values
    cannot be read (under vmap and other transforms, on meta tensors) nothing is compared.

    Construction also finds out two things. `upper`: where f' is bounded above, link counts as inf at and above that
    bound. `signed`: if lower is -inf, f'(0) is finite and link inverts f' at negative ratios, too, then p >= 0 is
    dropped and plans may be negative. Tensors that the functions hold are constants: they get no gradient.
    """

    user_f: Callable[[Tensor], Tensor]
    user_link: Callable[[Tensor], Tensor]
    user_slope: Callable[[Tensor], Tensor] | None = None
    lower: float = -math.inf
    upper: float = math.inf
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
        if isinstance(lower, bool) or not isinstance(lower, int | float) or math.isnan(lower) or lower == math.inf:
            raise ValueError(f"FDivergence(lower): expected a number below inf, got {describe(lower)}")
        fields = {"user_f": f, "user_link": link, "user_slope": slope, "lower": float(lower)}
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._declare()
        # Where Dynamo breaks its graph, it must not trace the check either. (disable would import Dynamo.)
        examined: Any = torch.compiler.disable(_examined) if "torch._dynamo" in sys.modules else _examined
        examined(self)

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
                "FDivergence: build it outside of the compiled function, it holds Python callables"
            )
        object.__setattr__(self, "family", f"custom {next(_numbers)}")
        _DECLARED[self.family] = self

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

    def conjugate(self, t: Tensor) -> Tensor:
        """An upper bound of f*, from f alone: valid even if link were wrong."""
        return conjugate_bound(self.user_f, t, self.link(t), self.signed)

    def _within(self, function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
        """function(t) where lower < t < upper, 0 elsewhere. NaN stays NaN."""
        outside = t <= self.lower
        if self.upper < math.inf:
            outside = outside | (t >= self.upper)
        return torch.where(outside, 0.0, function(torch.where(outside, self._inside, t)))

    @property
    def _inside(self) -> float:
        """Some point of link's range, to evaluate at where the result is thrown away."""
        point = max(0.0, self.lower + 1)
        if point < self.upper:
            return point
        return self.upper - 1 if self.lower < self.upper - 1 else (self.lower + self.upper) / 2


def _examined(divergence: FDivergence) -> None:
    if concrete(torch.empty(0, device="cpu")):
        found = examine(divergence.user_f, divergence.user_link, divergence.derivative, divergence.lower)
        object.__setattr__(divergence, "upper", found.upper)
        object.__setattr__(divergence, "signed", found.signed)


class _Linked(torch.autograd.Function):
    """A user's link, differentiated by its `derivative` (to any order, as far as that is differentiable)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(divergence: FDivergence, t: Tensor) -> Tensor:
        linked = divergence.user_link(t)
        return linked.clone() if linked is t else linked  # an input may not be an output as it is

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
