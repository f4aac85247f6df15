"""Whether f, link and slope of an `FDivergence` agree: `examine` compares them on a grid of points, in float64.

A check that fails raises ValueError. The message names the wrong argument and the point where it is wrong.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ._validate import describe
from .convex import LARGEST, value_and_derivative

Function = Callable[[Tensor], Tensor]

# Relative tolerances. link(t) may differ from the inverse of f' by CLOSE of the ratio, and by the effect of a change of
# t by NOISE, because terms of f' may cancel. Outside of the ratios from 1e-4 to 1e4, formulas such as log(exp(x) - 1)
# lose more digits: there the two tolerances are ROUGH and CLOSE. Below the ratio 1e-12 and above 1e6 only the limits of
# f' and link are checked.
CLOSE, NOISE, ROUGH = 1e-6, 1e-9, 1e-3


class Examined(NamedTuple):
    """What `examine` finds out about functions that agree."""

    upper: float  # link counts as inf at and above it
    signed: bool  # link inverts f' at negative ratios, too: plans may be negative
    ceiling: float  # the largest ratio, or inf
    full_support: bool  # link is positive everywhere, because f' falls without bound towards the ratio 0


def examine(f: Function, link: Function, slope: Function, lower: float) -> Examined:
    """Raise ValueError, with the point of failure, unless f' inverts link, slope is link' and lower is the infimum."""
    try:
        return _examine(f, link, slope, lower)
    except ValueError as error:
        if not isinstance(error.__cause__, RuntimeError):
            raise
        for device in _captured_devices(f, link, slope):  # the functions may hold tensors of another device
            if device.type == "meta" and type(torch.empty(1, device=device)) is Tensor:
                return Examined(math.inf, False, math.inf, False)  # meta tensors have no values to compare
            try:
                return _examine(_moved(f, device), _moved(link, device), _moved(slope, device), lower)
            except ValueError as other:
                if not isinstance(other.__cause__, RuntimeError):
                    raise
        raise


def _moved(function: Function, device: torch.device) -> Function:
    return lambda x: function(x.to(device)).to("cpu")


def _captured_devices(*functions: object) -> list[torch.device]:
    """Devices other than the CPU on which the functions hold tensors."""
    held: list[object] = []
    for function in functions:
        while isinstance(function, functools.partial):
            held += [*function.args, *function.keywords.values()]
            function = function.func
        if isinstance(function, torch.nn.Module):
            held += [*function.parameters(), *function.buffers()]
        elif inspect.isfunction(function) or inspect.ismethod(function):
            names = inspect.getclosurevars(function)
            held += [*names.nonlocals.values(), *names.globals.values(), getattr(function, "__self__", None)]
    found = {t.device for t in held if isinstance(t, Tensor)}
    return sorted((device for device in found if device.type != "cpu"), key=str)


def _examine(f: Function, link: Function, slope: Function, lower: float) -> Examined:
    ratios, derivatives = _ratios(f, lower)
    t, y = _inverts(f, link, lower, ratios, derivatives)
    negative = _below(f, link, slope, lower, ratios, derivatives)
    upper = _above(f, link, ratios, derivatives)
    for points in (t[(y >= 1e-4) & (y <= 1e2)], negative):
        if points is not None:
            _differentiates(link, slope, lower, points)
    _elementwise(f, link, slope, lower, ratios, derivatives)
    if link(t).requires_grad:
        warnings.warn(
            "FDivergence(link): it holds a tensor that requires a gradient and will not get one: f, link and slope "
            "hold constants. A parameter is a field of a class that derives from regard.regularizers.Regularizer",
            stacklevel=5,
        )
    full_support = lower == -math.inf and not _settled(ratios, derivatives)
    return Examined(upper, negative is not None, _ceiling(link, ratios, derivatives), full_support)


def _wrong(name: str, expected: str, got: str) -> ValueError:
    return ValueError(f"FDivergence({name}): expected {expected}, got {got}")


def _show(x: Tensor | float) -> str:
    return f"{float(x):.9g}"


def _call(name: str, function: Function, x: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            found = function(x)
    except Exception as error:
        kind = str(x.dtype).removeprefix("torch.")
        what = f"a function of a {kind} tensor on the CPU"
        if name == "slope":
            what += ", or a link that autograd can differentiate"
        raise _wrong(name, what, f"{type(error).__name__}: {error}") from error
    if not isinstance(found, Tensor) or found.shape != x.shape or found.dtype != x.dtype:
        raise _wrong(name, f"{describe(x)}, as its argument", describe(found))
    return found.detach()


def _derivative(f: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    try:
        return value_and_derivative(f, x)
    except RuntimeError as error:
        raise _wrong("f", "a function that autograd can differentiate", f"{type(error).__name__}: {error}") from error


def _tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _ratios(f: Function, lower: float) -> tuple[Tensor, Tensor]:
    """Ratios at which f is finite, and f' there. Raises unless f is strictly convex and f' is above lower."""
    tiny = 10 ** _tensor(-300, -200, -150, -100, -50, -30, -20, -16)
    huge = 10 ** _tensor(7, 8, 10, 12, 16, 20, 30, 50, 100, 150, 200, 300)
    x = torch.cat([tiny, 10 ** torch.linspace(-12, 6, 145, dtype=torch.float64, device="cpu"), huge])
    _call("f", f, x)
    value, t = _derivative(f, x)
    finite = value.isfinite() & t.isfinite()
    domain = finite.nonzero().flatten()
    if not len(domain) or x[domain[0]] > 1e-4:
        raise _wrong("f", "finite values and derivatives on an interval that begins at 0", f"none at x = {_show(1e-4)}")
    first, last = int(domain[0]), int(domain[-1])
    rises = finite[1:] & finite[:-1] & (t[1:] >= t[:-1] - NOISE * torch.maximum(t[1:].abs(), t[:-1].abs()))
    while x[first] < 0.99e-12 and not bool(rises[first : len(tiny)].all()):
        first += 1
    while x[last] > 1.01e6 and not bool(rises[-len(huge) - 1 : last].all()):
        last -= 1
    if not bool(finite[first : last + 1].all()):
        hole = first + int((~finite[first : last + 1]).nonzero()[0])
        at = f"at x = {_show(x[hole])}"
        raise _wrong("f", "finite values", f"{_show(value[hole])} with the derivative {_show(t[hole])} {at}")
    x, value, t = (part[first : last + 1] for part in (x, value, t))

    size = torch.maximum(t[1:].abs(), t[:-1].abs())
    falls = t[1:] < t[:-1] - NOISE * size
    # At large ratios f' may be constant to rounding. If it rises later, f has a straight piece, where link would jump.
    straight = (t[1:] - t[:-1] <= 1e-13 * size) & (x[:-1] >= 0.1) & (t[-1] - t[1:] > CLOSE * size)
    for bad in (falls, straight):
        if bool(bad.any()):
            i = _typical(bad)
            got = f"f' = {_show(t[i])} at x = {_show(x[i])} and {_show(t[i + 1])} at x = {_show(x[i + 1])}"
            raise _wrong("f", "a strictly convex function, f' increasing", got)
    rise, dx = value[1:] - value[:-1], x[1:] - x[:-1]
    slack = NOISE * (value[1:].abs() + value[:-1].abs() + size * dx)
    untrue = ((rise < t[:-1] * dx - slack) | (rise > t[1:] * dx + slack)) & (x[:-1] >= 1e-4) & (x[1:] <= 1e3)
    if bool(untrue.any()):
        i = _typical(untrue)
        between = f"between x = {_show(x[i])} and {_show(x[i + 1])}"
        got = f"{_show(t[i])} and {_show(t[i + 1])}, and a mean rise of {_show(rise[i] / dx[i])} {between}"
        raise _wrong("f", "a convex function whose derivative autograd finds", got)
    if bool(t[0] < lower - NOISE * (1 + abs(lower))):
        raise _wrong("lower", f"the infimum of f', at most {_show(t[0])}", _show(lower))
    return x, t


def _typical(bad: Tensor, distance: Tensor | None = None) -> int:
    """The wrong point that a message shows: the one with the least distance, or the middle one."""
    places = bad.nonzero().flatten()
    return int(places[len(places) // 2] if distance is None else places[distance[places].argmin()])


def _inverts(f: Function, link: Function, lower: float, ratios: Tensor, derivatives: Tensor) -> tuple[Tensor, Tensor]:
    """Check that f'(link(t)) = t and that link increases: at f' of every ratio, between these, and close to lower."""
    t = derivatives[(ratios >= 0.99e-12) & (ratios <= 1.01e6)]
    inner = derivatives[(ratios >= 1e-4) & (ratios <= 1e2)]
    at_one = derivatives[ratios <= 1][-1]
    t = torch.cat([t, *(inner[:-1] + share * inner.diff() for share in (1 / 3, 2 / 3))])
    if lower > -math.inf:
        close = lower + max(1.0, abs(lower)) * _tensor(1e-9, 1e-6, 1e-3)
        t = torch.cat([t, close[(close > derivatives[0]) & (close < at_one)]])
    top = derivatives[-1]
    if ratios[-1] < 0.99e6:  # ratios are bounded: check also where link is close to the largest one
        t = torch.cat([t, top + max(1.0, abs(float(top))) * _tensor(1e-3, 0.1, 1, 10, 1000)])
    else:  # f' may be bounded: skip the points where it equals its supremum to rounding
        t = t[t < top - NOISE * top.abs()]
    t = t[(t > lower) & t.isfinite()].unique()
    y = _call("link", link, t)
    if not bool(y.isfinite().all()):
        i = _typical(~y.isfinite())
        raise _wrong(
            "link", f"finite values in the range of f', {_range(derivatives)}", f"{_show(y[i])} at t = {_show(t[i])}"
        )
    step = t.diff() > NOISE * t[1:].abs()
    falls = y.diff() < -NOISE * y[:-1].abs()
    flat = step & (y.diff() <= 0) & (y[1:] > 0) & (t[1:] <= derivatives[-1])
    distance = (t - at_one).abs()
    wrong = torch.zeros_like(falls) if bool(falls.any()) else _misses(f, t, y)
    if bool(wrong.any()):
        i = _typical(wrong, distance)
        raise _mismatch(f, t[i], y[i])
    bad = falls if bool(falls.any()) else flat
    if bool(bad.any()):
        i = _typical(bad, distance)
        got = f"{_show(y[i])} at t = {_show(t[i])} and {_show(y[i + 1])} at t = {_show(t[i + 1])}"
        raise _wrong("link", "an increasing function", got)
    return t, y


def _range(derivatives: Tensor) -> str:
    return f"{_show(derivatives[0])} to {_show(derivatives[-1])}"


def _mismatch(f: Function, t: Tensor, y: Tensor) -> ValueError:
    _, found = _derivative(f, y.reshape(1))
    return _wrong("link", "f'(link(t)) = t", f"f'({_show(y)}) = {_show(found)} at t = {_show(t)}")


def _misses(f: Function, t: Tensor, y: Tensor) -> Tensor:
    """True where y is not the inverse of f' at t within rounding. f' a little below y must not exceed t, and f' a
    little above y must reach t. So the tolerance grows with the conditioning of f'."""
    usual = (y.abs() >= 1e-4) & (y.abs() <= 1e4)
    step = torch.where(usual, CLOSE, ROUGH) * y.abs()
    more = torch.where(y < 0, y + step, (y + step).clamp(min=1 / LARGEST))  # y = 0 may be an underflow
    value, derivative = _derivative(f, torch.cat([y - step, more]))
    derivative = torch.where(value.isfinite() & ~derivative.isnan(), derivative, math.nan)
    below, above = derivative.chunk(2)
    slack = torch.where(usual, NOISE, CLOSE) * t.abs()
    above = torch.where(above.isnan() & ~below.isnan(), math.inf, above)  # beyond the largest ratio
    below = torch.where(below.isnan() & (y.abs() < 1e-100), -math.inf, below)  # f' overflows, or y is 0
    return ~((below <= t + slack) & (t - slack <= above))


def _settled(ratios: Tensor, derivatives: Tensor) -> bool:
    """Whether f' has a finite limit at the ratio 0."""
    bottom = float(derivatives[0])
    return abs(bottom - float(derivatives[ratios <= ratios[0].sqrt()][-1])) <= CLOSE * (1 + abs(bottom))


def _below(
    f: Function, link: Function, slope: Function, lower: float, ratios: Tensor, derivatives: Tensor
) -> Tensor | None:
    """Check link below f' of the smallest ratio. There link and slope are 0 or nearly 0, and the result is None. Or
    link is negative and inverts f' at negative ratios, too: then the result is f' at such ratios, in rising order."""
    bottom = float(derivatives[0])
    settled = _settled(ratios, derivatives)
    size = max(1.0, abs(bottom))
    if lower > -math.inf:
        if bottom - lower <= NOISE * (1 + abs(lower)):
            return None
        t = lower + (bottom - lower) * _tensor(1e-6, 0.01, 0.5, 0.99)
    else:
        t = bottom - size * _tensor(1000, 10, 1, 0.1, 1e-3)
    t = t[t.isfinite() & (t > lower)]
    y = _call("link", link, t)
    seen = y > -math.inf  # not an overflow
    if lower == -math.inf and settled and bool((y < 0).all()) and not bool(_misses(f, t[seen], y[seen]).any()):
        negative = -ratios[(ratios >= 1e-4) & (ratios <= 1e2)].flip(0)
        value, t = _derivative(f, negative)
        y = _call("link", link, t)
        wrong = _misses(f, t, y) | ~value.isfinite()
        if bool(wrong.any()):
            raise _mismatch(f, t[_typical(wrong)], y[_typical(wrong)])
        return t
    good = (y >= 0) & (y <= 10 * ratios[0])
    if not bool(good.all()):
        i = _typical(~good)
        shown = _show(bottom if abs(bottom) > 1e-100 else 0.0)
        expected = f"the infimum of f', {'' if settled else 'at most '}{shown}"
        raise _wrong("lower", expected, f"{_show(lower)}, where link gives {_show(y[i])} at t = {_show(t[i])}")
    zero = t[(y == 0) & settled]  # relu, for example, is 0 below the range of f' without `lower`
    found = _call("slope", slope, zero)
    if bool((found != 0).any()):
        i = _typical(found != 0)
        raise _wrong("slope", "0 where link is 0", f"{_show(found[i])} at t = {_show(zero[i])}")
    return None


def _above(f: Function, link: Function, ratios: Tensor, derivatives: Tensor) -> float:
    """The t at and above which link counts as inf: inf itself, unless f' is bounded and link is finite beyond."""
    if ratios[-1] < 0.99e6:
        return math.inf
    far = ratios >= 0.99e6
    x, t = ratios[far], derivatives[far]
    y = _call("link", link, t)
    agrees = ((y - x).abs() <= ROUGH * x).long().cumprod(0)
    i = max(int(agrees.sum()) - 1, 0)
    top = float(t[i])
    beyond = torch.cat([t[i + 1 :], top + max(1.0, abs(top)) * _tensor(1e-3, 0.1, 1, 10, 1000)])
    beyond = beyond[beyond.isfinite() & (beyond > top)]
    found = _call("link", link, beyond)
    rising = (found >= x[i] * (1 - ROUGH)) & (torch.cat([found[:1], found[:-1]]) <= found)
    if int(agrees.sum()) == len(x) and bool(rising.all()):
        return math.inf
    supremum = float(t[-1])
    if abs(supremum - float(derivatives[ratios <= ratios[-1].sqrt()][-1])) <= CLOSE * (1 + abs(supremum)):
        return top  # f' has a supremum, and reaches it here to rounding
    if int(agrees.sum()) < len(x):
        raise _mismatch(f, t[i + 1], y[i + 1])
    j = _typical(~rising)
    raise _wrong(
        "link",
        "an increasing function",
        f"{_show(x[i])} at t = {_show(top)} and {_show(found[j])} at t = {_show(beyond[j])}",
    )


def _ceiling(link: Function, ratios: Tensor, derivatives: Tensor) -> float:
    """The largest ratio: the limit of link where f is finite on a bounded interval only, else inf."""
    if ratios[-1] >= 0.99e6:
        return math.inf
    top = float(derivatives[-1])
    found = _call("link", link, top + max(1.0, abs(top)) * _tensor(100, 1000, 1e4))
    # Where f only overflows, as exp does, link goes on rising.
    return float(found[-1]) if bool((found - found[-1] == 0).all()) else math.inf


def _differentiates(link: Function, slope: Function, lower: float, t: Tensor) -> None:
    """Check that slope lies between the difference quotients of link on both sides."""
    h = 1e-3 * torch.minimum(t[1:-1] - t[:-2], t[2:] - t[1:-1])
    t = t[1:-1]
    usable = (h > 1e-8 * t.abs()) & (t - h > lower)
    t, h = t[usable], h[usable]
    found = _call("slope", slope, t)
    before, at, after = (_call("link", link, x) for x in (t - h, t, t + h))
    left, right = (at - before) / (t - (t - h)), (after - at) / ((t + h) - t)
    slack = 1e-5 * torch.maximum(left.abs(), right.abs())
    good = (found >= torch.minimum(left, right) - slack) & (found <= torch.maximum(left, right) + slack)
    if not bool(good.all()):
        i = _typical(~good)
        expected = f"the derivative of link, {_show((left[i] + right[i]) / 2)}"
        raise _wrong("slope", expected, f"{_show(found[i])} at t = {_show(t[i])}")


def _elementwise(
    f: Function, link: Function, slope: Function, lower: float, ratios: Tensor, derivatives: Tensor
) -> None:
    """Check that each element is computed by itself (in another shape and order, too), and float32 in float32."""
    inner = (ratios >= 0.1) & (ratios <= 2)
    x, t = ratios[inner], derivatives[inner]
    inner_t = t[(t > lower) & (t.float() > lower)]
    for name, function, given in (("f", f, x), ("link", link, inner_t), ("slope", slope, inner_t)):
        given = given[: len(given) // 2 * 2]
        flat = _call(name, function, given)
        shaped = _call(name, function, given.flip(0).reshape(-1, 1, 2)).flatten().flip(0)
        same = (flat - shaped).abs() <= NOISE * flat.abs()
        if not bool(same.all()):
            i = _typical(~same)
            point = f"at {'x' if name == 'f' else 't'} = {_show(given[i])} among other points in another order"
            raise _wrong(name, f"a function of each element, {_show(flat[i])}", f"{_show(shaped[i])} {point}")
        single = _call(name, function, given.float())
        if not bool(single.isfinite().all()):
            i = _typical(~single.isfinite())
            raise _wrong(name, "finite values in float32", f"{_show(single[i])} at {_show(given[i])}")
