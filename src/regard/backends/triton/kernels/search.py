"""The price of each row: the root of the row equation, for a block of queries at once.

The equation is: mass(h) + null key = mass of the marginal (or exp(dual/rho) where it is relaxed), where mass(h) is the
sum of p over the keys at headroom h, in which it increases. The search begins at the price that the best key alone
would pay, takes Newton steps on a power of the mass, for which the equation is nearly linear, keeps a bracket, and
bisects where a step leaves it. A row is done when its mass agrees with the target to the last digits, or h does not
move any more. Each step is one pass over the keys; the number of steps is decided by the rows, never fixed.
"""

import triton
import triton.language as tl

from .links import factor_of, link, single_key_room
from .tiles import (
    LOG2E,
    LOWEST,
    NOTHING,
    admissible,
    key_tile,
    key_tiles,
    load_keys,
    load_vectors,
    log_prior,
    product,
    program,
    row_parameter,
    scores,
)

EPS = tl.constexpr(1.1920929e-07)
INF = tl.constexpr(float("inf"))
HIGHEST = tl.constexpr(3.0e38)  # a headroom; the price of a row that needs more is not a 32-bit number
MOST = tl.constexpr(200)  # passes; a bracket of 32-bit numbers is empty long before


@triton.jit
def tile_of_x(
    p, q, b, h, kv, rows, j, c,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, WEIGHTED: tl.constexpr, D: tl.constexpr,
    PAD: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """x = c s, -inf where a pair is masked or its density is 0, and log2 pi."""
    cols = j + tl.arange(0, BN)
    k = load_keys(p, b, kv, j, D, PAD, BN, MASKED)
    i, cols = rows[:, None], cols[None, :]
    inside = (i < p.Tq) & (cols < p.Tk)
    s, _ = scores(p, product(q, tl.trans(k), PRECISION, WIDEN), b, h, i, cols, inside, MASKED)
    x = s * c[:, None]
    prior = tl.zeros(inside.shape, tl.float32)
    if WEIGHTED:
        prior = log_prior(p, b, h, i, cols, inside)
    if MASKED:
        x = tl.maximum(x, LOWEST, propagate_nan=tl.PropagateNan.ALL)
        if p.density is not None:
            x = tl.where(prior == NOTHING, tl.where(s == s, NOTHING, s), x)
        x = tl.where(admissible(p, b, h, i, cols, LEFT, RIGHT), x, NOTHING)
    return x, prior


@triton.jit
def look(
    p, b, h, kv, block, rows, q, c, alpha, start, stop, state,
    MASKED: tl.constexpr, LINK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, WEIGHTED: tl.constexpr,
    D: tl.constexpr, PAD: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The largest x, the price that the best key alone would pay, the mass of the prior, and NaN where an x is NaN."""
    top, price, prior_mass, invalid = state
    for n in tl.range(start, stop):
        j = key_tile(p, b, h, block, n, BN)
        x, prior = tile_of_x(p, q, b, h, kv, rows, j, c, MASKED, LEFT, RIGHT, WEIGHTED, D, PAD, BN, PRECISION, WIDEN)
        best = tl.max(x, 1)
        if not MASKED:
            best = tl.maximum(best, LOWEST)  # the score of a key that may be read
            invalid += tl.sum(x * 0.0, 1)
        else:
            invalid += tl.sum(tl.where(x == x, 0.0, x), 1)
        top = tl.maximum(top, best)
        if LINK == "sigmoid":
            prior_mass += tl.sum(tl.where(x == NOTHING, 0.0, tl.math.exp2(prior)), 1)
        elif WEIGHTED:
            room = single_key_room(p.mass * 1.0, prior, alpha[:, None])
            price = tl.maximum(price, tl.max(tl.where(x == NOTHING, NOTHING, tl.maximum(x - room, LOWEST)), 1))
    return top, price, prior_mass, invalid


@triton.jit
def step(
    p, b, h, kv, block, rows, q, c, beta, anchor, headroom, start, stop, state,
    MASKED: tl.constexpr, LINK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, WEIGHTED: tl.constexpr,
    D: tl.constexpr, PAD: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """The mass at a headroom, and its derivative."""
    taken, slope = state
    for n in tl.range(start, stop):
        j = key_tile(p, b, h, block, n, BN)
        x, prior = tile_of_x(p, q, b, h, kv, rows, j, c, MASKED, LEFT, RIGHT, WEIGHTED, D, PAD, BN, PRECISION, WIDEN)
        d = x - anchor[:, None] + headroom[:, None]
        if MASKED:
            d = tl.where(x == NOTHING, NOTHING, d)
        weights, w = link(d, prior, beta[:, None], LINK, WEIGHTED, FAST)
        taken += tl.sum(weights, 1)
        slope += tl.sum(w, 1)
    return taken, slope


@triton.jit
def find_price(
    p, peaks, rests, passes,
    MARGINAL: tl.constexpr, LINK: tl.constexpr, PARTS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, PADV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """`peaks`, `rests` [B, H, Tq]: the anchor and the headroom of each row. `passes` [programs]: steps that were
    taken."""
    ORIGIN: tl.constexpr = 1.0 if LINK == "centred" else 0.0
    CONVEX: tl.constexpr = (LINK == "sparsemax" or LINK == "entmax") and MARGINAL != "relax"
    block, head = program(p.Tq, BM)
    b, h = head // p.H, head % p.H
    kv = h // p.group
    rows = block * BM + tl.arange(0, BM)
    ok = rows < p.Tq
    q = load_vectors(p.query, b, h, rows, ok, D, PAD)
    tau = row_parameter(p.temperature, p.temperature_value, b, h, rows, p.Tq, BM)
    alpha = row_parameter(p.alpha, p.alpha_value, b, h, rows, p.Tq, BM)
    level = row_parameter(p.level, p.level_value, b, h, rows, p.Tq, BM)
    c = factor_of(alpha, tau, LINK)
    beta = 1.0 / (alpha - 1.0)
    start, full_, rest, stop = key_tiles(p, b, h, block, LEFT, RIGHT, BM, BN)
    zero = tl.zeros((BM,), tl.float32)
    mass = zero + p.mass

    # The largest x, the price that the best key alone would pay, and the mass of the prior.
    top = zero + NOTHING
    price = zero + NOTHING
    state = (top, price, zero, zero)
    if LEFT or PARTS:
        state = look(
            p, b, h, kv, block, rows, q, c, alpha, start, full_, state, True, LINK, LEFT, RIGHT,
            WEIGHTED, D, PAD, BN, PRECISION, WIDEN,
        )  # fmt: skip
    state = look(
        p, b, h, kv, block, rows, q, c, alpha, full_, rest, state, False, LINK, LEFT, RIGHT,
        WEIGHTED, D, PAD, BN, PRECISION, WIDEN,
    )  # fmt: skip
    if not PARTS:
        state = look(
            p, b, h, kv, block, rows, q, c, alpha, rest, stop, state, True, LINK, LEFT, RIGHT,
            WEIGHTED, D, PAD, BN, PRECISION, WIDEN,
        )  # fmt: skip
    top, price, prior_mass, invalid = state
    if LINK != "sigmoid" and not WEIGHTED:
        price = tl.maximum(top - single_key_room(mass, zero, alpha), LOWEST)
        price = tl.where(top == NOTHING, NOTHING, price)
    anchor = tl.where(invalid != invalid, float("nan"), top)  # a maximum does not show NaN on every device
    null_x = zero + NOTHING
    if MARGINAL == "sink":
        null_x = level * c
        price = tl.maximum(price, null_x - single_key_room(mass, zero, alpha))
        anchor = tl.maximum(anchor, null_x, propagate_nan=tl.PropagateNan.ALL)
    idle = (anchor == NOTHING) | ~ok
    anchor = tl.where(idle, 0.0, anchor)
    null_x = null_x - anchor
    full = idle & False
    if LINK == "sigmoid":
        price = anchor
        full = prior_mass <= mass  # the keys together can take at most the mass: p = pi
    room = tl.where(idle | (price == NOTHING), 0.0, anchor - price - ORIGIN)
    if MARGINAL == "relax":
        # One key alone has log pi + beta log y = lambda/rho at a price lambda, so y is at most 1, or c rho times the
        # rest. With a tiny prior that is far less than for a fixed mass.
        scale = c * level
        most = anchor + scale * (tl.math.log2(tl.maximum(room + ORIGIN, 1e-37)) * 0.6931471805599453 / (alpha - 1.0))
        room = tl.minimum(room, tl.maximum(1.0, most) - ORIGIN)
    headroom = room
    low = zero - INF
    if LINK != "sigmoid" and MARGINAL != "relax":
        low = zero - ORIGIN  # there no key has weight
    high = zero + INF
    width = tl.abs(headroom) + 1.0
    done = idle | full | (anchor != anchor)
    steps = 0
    while (tl.min(done.to(tl.int32), 0) == 0) & (steps < MOST):
        found = (zero, zero)
        if LEFT or PARTS:
            found = step(
                p, b, h, kv, block, rows, q, c, beta, anchor, headroom, start, full_, found, True, LINK, LEFT, RIGHT,
                WEIGHTED, D, PAD, BN, PRECISION, WIDEN, FAST,
            )  # fmt: skip
        found = step(
            p, b, h, kv, block, rows, q, c, beta, anchor, headroom, full_, rest, found, False, LINK, LEFT, RIGHT,
            WEIGHTED, D, PAD, BN, PRECISION, WIDEN, FAST,
        )  # fmt: skip
        if not PARTS:
            found = step(
                p, b, h, kv, block, rows, q, c, beta, anchor, headroom, rest, stop, found, True, LINK, LEFT, RIGHT,
                WEIGHTED, D, PAD, BN, PRECISION, WIDEN, FAST,
            )  # fmt: skip
        taken, slope = found
        if MARGINAL == "sink":
            weights, w = link(null_x + headroom, zero, beta, LINK, False, FAST)
            taken += weights
            slope += w
        target = mass
        if MARGINAL == "relax":
            dual = (anchor - headroom - ORIGIN) / c
            target = tl.math.exp2(tl.minimum(dual / level * LOG2E, 120.0))
            log_ratio = tl.math.log2(tl.maximum(taken / target, 1e-37)) * 0.6931471805599453
            move = -log_ratio / (slope / ((alpha - 1.0) * taken) + 1.0 / (c * level))
        elif LINK == "sigmoid":
            move = (target - taken) / (slope * 0.6931471805599453)
        else:
            ratio = taken / target
            root = tl.math.exp2((alpha - 1.0) * tl.math.log2(tl.maximum(ratio, 1e-37)))
            less = root - 1.0
            if LINK == "centred":  # the root is too close to 1 there
                e = (alpha - 1.0) * tl.math.log2(tl.maximum(ratio, 1e-37)) * 0.6931471805599453
                series = e * (1.0 + e * 0.5 * (1.0 + e * (1.0 / 3) * (1.0 + e * 0.25 * (1.0 + e * 0.2))))
                less = tl.where(tl.abs(e) < 1e-2, series, less)
            move = -less * (ratio / root) * target / slope
        ratio = taken / target
        gap = tl.abs(ratio - 1.0)
        low = tl.where((ratio <= 1.0) & (headroom > low), headroom, low)
        high = tl.where((ratio >= 1.0) & (headroom < high), headroom, high)
        following = headroom + move
        size = tl.abs(headroom)
        # Where the equation is nearly linear, one more step squares a distance this small. Else go on until h stays.
        last = gap < (3e-5 if CONVEX else 2 * EPS)
        last = last | ((tl.abs(move) <= size * EPS) & (gap < 1e-3)) | (ratio != ratio)
        open_ = (high == INF) | (low == -INF)
        bad = ~((following > low) & (following < high)) & ~last
        shut = ~open_ & (high - low <= size * (2 * EPS))
        middle = 0.5 * low + 0.5 * high
        grown = tl.where(ratio < 1.0, headroom + width, headroom - width)
        following = tl.where(bad, tl.where(open_, grown, middle), following)
        width = tl.where(bad & open_, width * 4.0, width)
        if not CONVEX:
            following = tl.where((steps >= 30) & (steps % 2 == 1) & ~open_ & ~last, middle, following)
        following = tl.minimum(following, HIGHEST)
        following = tl.where((shut & bad) | (ratio != ratio), headroom, following)
        beyond = (headroom == HIGHEST) & (ratio < 1.0)
        following = tl.where(beyond, float("nan"), following)  # not silently another plan
        headroom = tl.where(done, headroom, following)
        done = done | last | shut | beyond
        steps += 1
    flat = head.to(tl.int64) * p.Tq + rows
    headroom = tl.where(full, INF, headroom)
    tl.store(peaks + flat, tl.where(idle, NOTHING, anchor), mask=ok)
    tl.store(rests + flat, tl.where(idle, NOTHING, headroom), mask=ok)
    if passes is not None:
        tl.store(passes + tl.program_id(0), steps)
