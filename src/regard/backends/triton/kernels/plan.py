"""The plan of a tile from the price of its rows: what every pass after the forward pass starts from.

A row's price is saved in two parts, `peak` and `rest`. For KL the weight of a pair is 2^(x - peak - rest), with
x = log2(e) s/tau + log2(pi). For other regularisers it is link(x - peak + rest) (links.py). The gradient of a pair is
G = tau dL/ds = w (u - a - b log2 p), where u is the utility <dL/dout, v>, w = dp/dt (KL: p), and the numbers a and b
belong to the row (../gradients.py).
"""

import triton
import triton.language as tl

from .links import link
from .tiles import LOWEST, NOTHING, admissible, log_prior, scores


@triton.jit
def plan(
    p, products, b, h, rows, cols, c, beta, peak, rest,
    MASKED: tl.constexpr, LINK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, WEIGHTED: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Of pairs with these products <q, k>: the weight p, w, the distance from the price, the score, and the derivative
    of the softcap. p and w are 0 where a pair is masked. Numbers of a row are given in the shape of `rows` (tiles.py).
    MASKED: some pairs may not be read."""
    inside = (rows < p.Tq) & (cols < p.Tk)
    s, slope = scores(p, products, b, h, rows, cols, inside, MASKED)
    x = s * c
    prior = tl.zeros(inside.shape, tl.float32)
    if WEIGHTED:
        prior = log_prior(p, b, h, rows, cols, inside)
        if LINK == "kl":
            x += prior
    if MASKED:
        ok = admissible(p, b, h, rows, cols, LEFT, RIGHT)
        live = ok & (peak != NOTHING)
        if p.density is None:
            x = tl.maximum(x, LOWEST, propagate_nan=tl.PropagateNan.ALL)
        else:
            x = tl.where(prior == NOTHING, tl.where(s == s, NOTHING, s), x)
    if LINK == "kl":
        d = x - peak - rest
        if MASKED:
            d = tl.where(live, d, NOTHING)
        weights = tl.math.exp2(d)
        w = weights
    else:
        d = x - peak + rest
        if MASKED:
            d = tl.where(live & (x != NOTHING), d, NOTHING)
        weights, w = link(d, prior, beta, LINK, WEIGHTED, FAST)
        if MASKED:
            weights = tl.where(d == NOTHING, 0.0, weights)
            w = tl.where(d == NOTHING, 0.0, w)
    return weights, w, d, s, slope


@triton.jit
def advantages(weights, d, u, a, b, LINK: tl.constexpr, ENTROPY: tl.constexpr):
    """u - a - b log2 p of each pair."""
    found = u - a
    if ENTROPY:
        log_p = d
        if LINK != "kl":
            log_p = tl.math.log2(tl.where(weights > 0, weights, 1.0))
        found = found - b * tl.where(weights == 0, 0.0, log_p)
    return found
