"""Regularisers of the literature, written by hand as a user would: f, link, slope (or None) and lower."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from regard import FDivergence
from regard._validate import Scalar
from regard.regularizers import Regularizer


def x_log_x(x: Tensor) -> Tensor:
    return torch.xlogy(x, x)


def alpha_divergence(a: float) -> tuple:
    lower = -1 / (a - 1) if a > 1 else -math.inf
    return (
        lambda x: (x**a - a * x - (1 - a)) / (a * (a - 1)),
        lambda t: (1 + (a - 1) * t) ** (1 / (a - 1)),
        None,
        lower,
    )


def huber_link(t: Tensor) -> Tensor:
    """The inverse of f' = x below 1 and 2 x - 1 above: a kink at t = 1."""
    return torch.where(t < 1, t, (t + 1) / 2)


def newton_root(t: Tensor) -> Tensor:
    """The inverse of log(x) + x, Wright's omega, by Newton's method on y + exp(y) = t."""
    y = torch.where(t > 1, torch.where(t > 1, t, 1.0).log(), t)
    for _ in range(6):
        e = y.exp()
        y = y - (y + e - t) / (1 + e)
    return y.exp()


# name -> (f, link, slope, lower)
DIVERGENCES: dict[str, tuple] = {
    "kl": (lambda x: x_log_x(x) - x + 1, torch.exp, torch.exp),
    "chi-squared": (lambda x: (x - 1) ** 2 / 2, lambda t: t + 1, torch.ones_like, -1.0),
    "entmax 1.5": (lambda x: x**1.5 / 0.75, lambda t: (t / 2).relu().square(), lambda t: (t / 2).relu(), 0.0),
    "squared plus entropy": (
        lambda x: x_log_x(x) - x + x * x / 2,
        newton_root,
        lambda t: 1 / (1 + 1 / newton_root(t)),
    ),
    "jensen-shannon": (lambda x: x_log_x(x) - (x + 1) * ((x + 1) / 2).log(), lambda t: 1 / (2 * (-t).exp() - 1)),
    "reverse kl": (lambda x: x - 1 - x.log(), lambda t: 1 / (1 - t), lambda t: (1 - t) ** -2),
    "hellinger": (lambda x: (x.sqrt() - 1) ** 2, lambda t: (1 - t) ** -2),
    "le cam": (lambda x: (x - 1) ** 2 / (x + 1), lambda t: 2 / (1 - t).sqrt() - 1, None, -3.0),
    "alpha 0.5": alpha_divergence(0.5),
    "alpha 3": alpha_divergence(3.0),
    "huber": (lambda x: torch.where(x < 1, x * x / 2, x * x - x + 0.5), huber_link, None, 0.0),
    "fermi-dirac": (lambda x: x_log_x(x) + x_log_x(1 - x), torch.sigmoid),
    "bose-einstein": (lambda x: x_log_x(x) - x_log_x(1 + x), lambda t: 1 / torch.expm1(-t)),
    "exponential": (torch.exp, torch.log, None, 1.0),
}


def divergence(name: str) -> FDivergence:
    return FDivergence(*DIVERGENCES[name])


class Order(Regularizer):
    """Tsallis' entropy by hand, of an order that may be learned."""

    order: Scalar

    family: ClassVar[str] = "order of the tests"
    domains: ClassVar = {"order": ("order > 1", 1.0, math.inf)}

    def f(self, ratio: Tensor) -> Tensor:
        return ratio**self.order / (self.order * (self.order - 1))

    def _base(self, t: Tensor) -> tuple[Tensor, Tensor]:
        base = (self.order - 1) * t
        inside = ~(base <= 0)
        return inside, torch.where(inside, base, 1.0)

    def link(self, t: Tensor) -> Tensor:
        inside, base = self._base(t)
        return torch.where(inside, base ** (1 / (self.order - 1)), 0.0)

    def slope(self, t: Tensor) -> Tensor:
        inside, base = self._base(t)
        return torch.where(inside, base ** (1 / (self.order - 1) - 1), 0.0)


class Mixture(Regularizer):
    """Stiffness times the entropy of a shifted ratio: two parameters, and a weight everywhere."""

    stiffness: Scalar
    shift: Scalar = 0.0

    family: ClassVar[str] = "mixture of the tests"
    full_support: ClassVar[bool] = True

    def f(self, ratio: Tensor) -> Tensor:
        return self.stiffness * (x_log_x(ratio) - ratio) + self.shift * ratio

    def link(self, t: Tensor) -> Tensor:
        return ((t - self.shift) / self.stiffness).exp()

    def slope(self, t: Tensor) -> Tensor:
        return self.link(t) / self.stiffness
