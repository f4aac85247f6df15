"""Convex functions of one variable, given as Python functions: derivatives, and a bound of the conjugate.

`conjugate_bound` bounds f*(eta) = sup_x eta x - f(x) from above and uses f alone. Certificates need this bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ._compat import forward_mode, transforms_active

Function = Callable[[Tensor], Tensor]

LARGEST = 1e300  # ratios beyond it count as infinite, and below its inverse as 0


def x_log_x(x: Tensor) -> Tensor:
    """x log x for x >= 0, with derivative 0 where x = 0 (that of `torch.xlogy(x, x)` is NaN there). NaN stays NaN."""
    none = x <= 0
    return torch.where(none, 0.0, x * torch.where(none, 1.0, x).log())


def value_and_derivative(f: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    """f(x) and f'(x) by autograd, both without a graph."""
    with torch.inference_mode(False), torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        value = f(x)
        (derivative,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), derivative


def derivative_of(link: Function, t: Tensor) -> Tensor:
    """link'(t), differentiable in t as often as link is."""
    if transforms_active() or forward_mode():
        return torch.func.vjp(link, t)[1](torch.ones_like(t))[0]
    # The same by plain autograd: the first use of torch.func imports the compiler, which takes seconds.
    again = torch.is_grad_enabled() and t.requires_grad
    with torch.inference_mode(False), torch.enable_grad():
        x = t if again else t.detach().clone().requires_grad_()  # a copy: autograd cannot save inference tensors
        (derivative,) = torch.autograd.grad(link(x).sum(), x, create_graph=again)
    return derivative


class _Point(NamedTuple):
    """A ratio x, its coordinate u, and the concave h(x) = eta x - f(x) there with its derivative.

    An end of the domain has h = -inf and a derivative of +inf (lower end) or -inf (upper end): it has no tangent.
    """

    u: Tensor
    x: Tensor
    h: Tensor
    slope: Tensor

    def where(self, condition: Tensor, other: _Point) -> _Point:
        return _Point(*(torch.where(condition, a, b) for a, b in zip(self, other, strict=True)))


def conjugate_bound(f: Function, eta: Tensor, start: Tensor, signed: bool = False) -> Tensor:
    """An upper bound of f*(eta) = sup eta x - f(x) over x >= 0 (`signed`: over all x) for convex f, or +inf.

    h(x) = eta x - f(x) is concave, so two tangents bound it wherever h rises at the one and falls at the other. The
    search for such a pair begins around `start`, and bisection tightens the bound to rounding. The bound is valid for
    any `start`, which affects only the time: two evaluations of f are enough if it is the maximum.
    """
    to, back = (torch.asinh, torch.sinh) if signed else (torch.log, torch.exp)
    last = math.log(LARGEST)
    start = start.nan_to_num(nan=1.0) if signed else start.nan_to_num(nan=1.0).clamp(min=0)
    u = to(start).clamp(-last, last)
    middle = 0.0 if signed else _inner_point(f, eta)

    def at(u: Tensor) -> _Point:
        x = back(u)
        value, derivative = value_and_derivative(f, x)
        h, slope = eta * x - value, eta - derivative
        end = torch.where(x > middle, -math.inf, math.inf).to(slope.dtype)  # the side on which x leaves the domain
        slope = torch.where(value.isfinite() & ~derivative.isnan(), slope, end)
        h = torch.where(value.isfinite(), h, -math.inf)
        # Below the smallest ratio only 0 is left; beyond the largest nothing is known about f.
        low_end, high_end = (u <= -last) & ((slope < 0) | (not signed)), (u >= last) & (slope > 0)
        x = torch.where(high_end, math.inf, torch.where(low_end, -math.inf if signed else 0.0, x))
        h = torch.where(low_end | high_end, -math.inf, h)
        slope = torch.where(high_end, -math.inf, torch.where(low_end, math.inf, slope))
        return _Point(u, x, h, slope)

    def excess(low: _Point, high: _Point) -> Tensor:
        """How far the tangents' intersection lies above the better end, at most: d / (1/h'(low) - 1/h'(high))."""
        rise, fall = low.slope.clamp(min=0).abs(), high.slope.clamp(max=0).abs()  # abs: not -0
        return (high.x - low.x) / (1 / rise + 1 / fall)

    reach = 1e-8
    low, high = at((u - reach).clamp(min=-last)), at((u + reach).clamp(max=last))
    while bool(((low.slope < 0) | (high.slope > 0)).any()):
        reach *= 4
        too_high, too_low = low.slope < 0, high.slope > 0
        below, above = at((u - reach).clamp(min=-last)), at((u + reach).clamp(max=last))
        low, high = below.where(too_high, high.where(too_low, low)), low.where(too_high, above.where(too_low, high))
    eps = torch.finfo(eta.dtype).eps
    for _ in range(100):
        best = torch.maximum(low.h, high.h).nan_to_num(neginf=0.0)
        loose = (excess(low, high) > eps * (1 + best.abs())) & (high.x - low.x).isfinite()
        if not bool(loose.any()):
            break
        between = at((low.u + high.u) / 2)
        rises = between.slope >= 0
        low, high = between.where(loose & rises, low), between.where(loose & ~rises, high)
    bound = torch.maximum(low.h, high.h) + excess(low, high)
    return torch.where((high.x - low.x).isfinite(), bound, math.inf + eta)  # NaN stays NaN


def _inner_point(f: Function, like: Tensor) -> float:
    """A ratio inside the domain of f, an interval that begins at 0. Parameters of f may add dimensions before x."""
    x = 10 ** torch.linspace(-12, 6, 37, dtype=like.dtype, device=like.device)
    with torch.no_grad():
        inside = x[f(x).reshape(-1, len(x)).isfinite().all(0)]
    return float(inside[len(inside) // 2]) if len(inside) else 1.0
