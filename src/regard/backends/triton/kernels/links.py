"""Regularisers other than KL, each given by its link g: p = pi g(t) and w = dp/dt = pi g'(t), t = (s - lambda)/tau.

Tsallis: g(t) = y^beta with y = (alpha - 1) t where positive, else 0, and beta = 1/(alpha - 1). Kernels compute with
x = (alpha - 1) s/tau and a price in two parts: y = x - peak + rest + origin. origin is 1 for alpha near 1 ("centred"),
where y is close to 1 and its distance from 1 is what matters; else it is 0. Fermi-Dirac: g is the sigmoid,
x = log2(e) s/tau, and x - peak + rest is t in base 2.

LINK is "sparsemax" (alpha = 2), "entmax" (1.5), "power" (any alpha), "centred" (alpha near 1) or "sigmoid".
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .tiles import LOG2E, NOTHING

SMALL = tl.constexpr(1e-37)


@triton.jit
def factor_of(alpha, tau, LINK: tl.constexpr):
    """c with x = c s."""
    if LINK == "kl" or LINK == "sigmoid":
        return (1.0 / tau) * LOG2E
    return (alpha - 1.0) / tau


@triton.jit
def log1p(x):
    """log2(1 + x), with the digits of a small x."""
    u = 1.0 + x
    exact = tl.math.log2(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0))  # the rounding of u cancels
    return tl.where(u == 1.0, x * LOG2E, exact)


@triton.jit
def log2(x, FAST: tl.constexpr):
    """FAST: the device's own approximation, to 22 bits, in place of a polynomial of 17 operations."""
    if FAST:
        return libdevice.fast_log2f(x)
    return tl.math.log2(x)


@triton.jit
def log2_y(d, LINK: tl.constexpr, FAST: tl.constexpr):
    """log2 y, or -inf where y is not positive. NaN stays NaN."""
    if LINK == "centred":
        inside = ~(d <= -1.0 + 6e-8)
        return tl.where(inside, log1p(tl.where(inside, d, 0.0)), NOTHING)
    return tl.where(d <= SMALL, NOTHING, log2(tl.maximum(d, SMALL, propagate_nan=tl.PropagateNan.ALL), FAST))


@triton.jit
def link(d, prior, beta, LINK: tl.constexpr, WEIGHTED: tl.constexpr, FAST: tl.constexpr):
    """p and w at a distance d from the price; `prior` is log2 pi. beta = 1/(alpha - 1) broadcasts to the tile.

    p is NaN where d is; w may be a number there."""
    if LINK == "sigmoid":
        below = tl.minimum(d, 0.0)
        e = tl.math.exp2(-tl.abs(d))
        q = 1.0 / (1.0 + e)
        p = tl.math.exp2(below + prior) * q if WEIGHTED else tl.math.exp2(below) * q
        p = tl.where(d == NOTHING, 0.0, p)
        w = p * tl.where(d > 0, e * q, q)
    elif LINK == "sparsemax":
        y = tl.maximum(d, 0.0, propagate_nan=tl.PropagateNan.ALL)
        p = y
        w = tl.where(d > 0, 1.0, 0.0)
        if WEIGHTED:
            root = tl.math.exp2(0.5 * prior)  # the prior itself may be too small for a number
            p = tl.where(d <= 0, 0.0, (y * root) * root)
            w = tl.where(d > 0, root * root, 0.0)
    elif LINK == "entmax":
        y = tl.maximum(d, 0.0, propagate_nan=tl.PropagateNan.ALL)
        p = y * y
        w = y
        if WEIGHTED:
            root = tl.math.exp2(0.5 * prior)  # the prior itself may be too small for a number
            part = tl.where(d <= 0, 0.0, y * root)
            p = part * part
            w = tl.where(d > 0, part * root, 0.0)
    else:
        log_y = log2_y(d, LINK, FAST)
        log_p = log_y * beta
        log_w = log_y * (beta - 1.0)  # below 1 for alpha > 2, where w grows as y falls
        if WEIGHTED:
            log_p += prior
            log_w += prior
        p = tl.math.exp2(log_p)
        w = tl.math.exp2(log_w)
        w = tl.where(log_y == NOTHING, 0.0, w)
    return p, w


@triton.jit
def has_weight(d, prior, LINK: tl.constexpr, WEIGHTED: tl.constexpr):
    """Whether the exact plan gives a key weight, even one that is too small for a number."""
    some = d > 0.0
    if LINK == "centred":
        some = d > -1.0 + 6e-8
    if LINK == "sigmoid":
        some = d != NOTHING
    if WEIGHTED:
        some = some & (prior != NOTHING)
    return some


@triton.jit
def single_key_room(mass, prior, alpha):
    """The y at which one key alone has the mass."""
    return tl.math.exp2((alpha - 1.0) * (tl.math.log2(mass) - prior))


@triton.jit
def by_alpha(d, alpha, LINK: tl.constexpr):
    """The factor from dL/dlog(pi) of a pair to its part of dL/dalpha: beta^2 (1 - 1/y - log y)."""
    beta = 1.0 / (alpha - 1.0)
    if LINK == "centred":
        safe = tl.where(d > -1.0 + 1e-7, d, 0.0)
        return beta * beta * (safe / (safe + 1.0) - log1p(safe) * 0.6931471805599453)
    safe = tl.where(d > 1e-30, d, 1.0)
    return beta * beta * (1.0 - 1.0 / safe - tl.math.log2(safe) * 0.6931471805599453)
