"""Forward pass of regularisers with a link, from the price of each row (search.py): output, sums and baseline.

    for each block of BM queries:
      for each block of BN keys:
        p, w <- link(x - peak + rest)
        o <- sums of p v;  o_w <- sums of w v, for the baseline of the gradient

Row sums become statistics in ../statistics.py, each group only where it is asked for.
"""

import triton
import triton.language as tl

from .links import factor_of, has_weight, link
from .search import tile_of_x
from .tiles import (
    NOTHING,
    dropout_factor,
    key_tile,
    key_tiles,
    load_squares,
    load_values,
    load_vectors,
    precise_product,
    product,
    program,
    row_count,
    row_parameter,
)


@triton.jit
def walk(
    p, b, h, kv, block, rows, q, c, beta, anchor, rest, idle, squares, start, stop, state,
    MASKED: tl.constexpr, LINK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, WEIGHTED: tl.constexpr,
    LOGS: tl.constexpr, SCORES: tl.constexpr, COUNTS: tl.constexpr, VALUE: tl.constexpr, SPREAD: tl.constexpr,
    TOP: tl.constexpr, OUT: tl.constexpr, BASELINE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PAD: tl.constexpr, PADV: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """One walk over the tiles start ... stop, which adds to the sums of `state`. MASKED: some pairs may not be read."""
    ORIGIN: tl.constexpr = 1.0 if LINK == "centred" else 0.0
    (o, o_w, mass, slope, logs, w_logs, s1, s2, count, support, collision, first, heaviest, prior_mass, log_prior,
    value,
     spread, top, reference) = state  # fmt: skip
    for n in tl.range(start, stop):
        j = key_tile(p, b, h, block, n, BN)
        cols = j + tl.arange(0, BN)
        x, prior = tile_of_x(p, q, b, h, kv, rows, j, c, MASKED, LEFT, RIGHT, WEIGHTED, D, PAD, BN, PRECISION, WIDEN)
        some = x != NOTHING
        d = x - anchor[:, None] + rest[:, None]
        if MASKED:
            d = tl.where(some & ~idle[:, None], d, NOTHING)
        weights, w = link(d, prior, beta[:, None], LINK, WEIGHTED, FAST)
        if MASKED:
            weights = tl.where(some, weights, 0.0)
            w = tl.where(some, w, 0.0)
        mass += tl.sum(weights, 1)
        slope += tl.sum(w, 1)
        if TOP or SCORES:
            best = tl.max(x, 1)
        if TOP:
            heaviest = tl.maximum(heaviest, tl.max(weights, 1))
        if LOGS:
            log_p = tl.math.log2(tl.where(weights > 0, weights, 1.0))
            logs += tl.sum(weights * log_p, 1)
            w_logs += tl.sum(w * log_p, 1)
            if WEIGHTED:
                log_prior += tl.sum(tl.where(weights > 0, weights * prior, 0.0), 1)
        if SCORES:
            reference = tl.where((top == NOTHING) & (best > NOTHING), best, reference)
            away = tl.where(weights > 0, x - reference[:, None], 0.0)
            s1 += tl.sum(weights * away, 1)
            s2 += tl.sum(weights * away * away, 1)
        if TOP or SCORES:
            top = tl.maximum(top, best)
        if COUNTS:
            count += tl.sum(some.to(tl.float32), 1)
            support += tl.sum((some & has_weight(d, prior, LINK, WEIGHTED)).to(tl.float32), 1)
            collision += tl.sum(weights * weights, 1)
            first = tl.where(j == 0, tl.sum(tl.where((cols == 0)[None, :], weights, 0.0), 1), first)
            prior_mass += tl.sum(tl.where(some, tl.math.exp2(prior), 0.0), 1)
        if VALUE:
            if LINK == "sigmoid":
                plus = tl.maximum(d, 0.0) + tl.math.log2(1.0 + tl.math.exp2(-tl.abs(d)))
                value += tl.sum(tl.where(some, plus * tl.math.exp2(prior), 0.0), 1)
            else:
                value += tl.sum(tl.where(weights > 0, weights * (d + ORIGIN), 0.0), 1)
        if SPREAD:
            spread += tl.sum(weights * load_squares(squares, p, b, kv, cols)[None, :], 1)
        if p.dropout_key is not None:
            kept = dropout_factor(p, b, h, rows[:, None], cols[None, :])
            weights = weights * kept
            w = w * kept
        if OUT:
            v = load_values(p, b, kv, j, DV, PADV, BN, MASKED)
            if SPREAD:  # the spread is a difference of squares: rounded weights would lose its digits
                o = precise_product(weights, v, PRECISION, WIDEN, o)
            else:
                o = product(weights.to(p.value.data.dtype.element_ty), v, PRECISION, WIDEN, o)
            if BASELINE:
                o_w = product(w.to(p.value.data.dtype.element_ty), v, PRECISION, WIDEN, o_w)
    return (
        o, o_w, mass, slope, logs, w_logs, s1, s2, count, support, collision, first, heaviest, prior_mass, log_prior,
        value, spread, top, reference,
    )  # fmt: skip


@triton.jit
def forward_link(
    p, peaks, rests, out, baseline, sums, squares,
    MARGINAL: tl.constexpr, LINK: tl.constexpr, PARTS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    WEIGHTED: tl.constexpr, LOGS: tl.constexpr, SCORES: tl.constexpr, COUNTS: tl.constexpr, VALUE: tl.constexpr,
    SPREAD: tl.constexpr,
    TOP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, PADV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """`out`, `baseline` [B, H, Tq, DV]: sums of p v and w v, or None; `sums` [17, B, H, Tq]. The price of free rows is
    known, and is stored here."""
    OUT: tl.constexpr = out is not None
    BASELINE: tl.constexpr = baseline is not None
    block, head = program(p.Tq, BM)
    b, h = head // p.H, head % p.H
    kv = h // p.group
    rows = block * BM + tl.arange(0, BM)
    ok = rows < p.Tq
    flat = head.to(tl.int64) * p.Tq + rows
    tau = row_parameter(p.temperature, p.temperature_value, b, h, rows, p.Tq, BM)
    alpha = row_parameter(p.alpha, p.alpha_value, b, h, rows, p.Tq, BM)
    level = row_parameter(p.level, p.level_value, b, h, rows, p.Tq, BM)
    c = factor_of(alpha, tau, LINK)
    beta = 1.0 / (alpha - 1.0)
    if MARGINAL == "free":
        peak = tl.zeros((BM,), tl.float32)
        rest = level * c
    else:
        peak = tl.load(peaks + flat, mask=ok, other=NOTHING)
        rest = tl.load(rests + flat, mask=ok, other=NOTHING)
    idle = peak == NOTHING
    anchor = tl.where(idle, 0.0, peak)
    q = load_vectors(p.query, b, h, rows, ok, D, PAD)
    zero = tl.zeros((BM,), tl.float32)
    nothing = zero + NOTHING
    state = (
        tl.zeros((BM, PADV), tl.float32), tl.zeros((BM, PADV), tl.float32), zero, zero, zero, zero, zero, zero, zero,
        zero, zero, zero, zero, zero, zero, zero, zero, nothing, zero,
    )  # fmt: skip
    start, full, rest_, stop = key_tiles(p, b, h, block, LEFT, RIGHT, BM, BN)
    if LEFT or PARTS:
        state = walk(
            p, b, h, kv, block, rows, q, c, beta, anchor, rest, idle, squares, start, full, state, True, LINK, LEFT,
            RIGHT,
            WEIGHTED, LOGS, SCORES, COUNTS, VALUE, SPREAD, TOP, OUT, BASELINE, D, DV, PAD, PADV, BN, PRECISION, WIDEN,
            FAST,
        )  # fmt: skip
    state = walk(
        p, b, h, kv, block, rows, q, c, beta, anchor, rest, idle, squares, full, rest_, state, False, LINK, LEFT, RIGHT,
        WEIGHTED, LOGS, SCORES, COUNTS, VALUE, SPREAD, TOP, OUT, BASELINE, D, DV, PAD, PADV, BN, PRECISION, WIDEN,
        FAST,
    )  # fmt: skip
    if not PARTS:
        state = walk(
            p, b, h, kv, block, rows, q, c, beta, anchor, rest, idle, squares, rest_, stop, state, True, LINK, LEFT,
            RIGHT,
            WEIGHTED, LOGS, SCORES, COUNTS, VALUE, SPREAD, TOP, OUT, BASELINE, D, DV, PAD, PADV, BN, PRECISION, WIDEN,
            FAST,
        )  # fmt: skip
    (o, o_w, mass, slope, logs, w_logs, s1, s2, count, support, collision, first, heaviest, prior_mass, log_prior,
    value,
     spread, top, reference) = state  # fmt: skip
    columns = tl.arange(0, PADV)
    inside = ok[:, None] & (columns < DV)[None, :]
    if out is not None:
        tl.store(out + flat[:, None] * DV + columns[None, :], o, mask=inside)
        if baseline is not None:
            tl.store(baseline + flat[:, None] * DV + columns[None, :], o_w, mask=inside)
    if MARGINAL == "free":
        tl.store(peaks + flat, tl.where(mass == mass, peak, mass), mask=ok)  # NaN shows in every gradient of its row
        tl.store(rests + flat, rest, mask=ok)
    n_rows = row_count(p, BM)
    tl.store(sums + flat, mass, mask=ok)
    tl.store(sums + n_rows + flat, slope, mask=ok)
    if TOP:
        tl.store(sums + 2 * n_rows + flat, top, mask=ok)
        tl.store(sums + 3 * n_rows + flat, heaviest, mask=ok)
    if LOGS:
        tl.store(sums + 4 * n_rows + flat, logs, mask=ok)
        tl.store(sums + 5 * n_rows + flat, w_logs, mask=ok)
        tl.store(sums + 6 * n_rows + flat, log_prior, mask=ok)
    if SCORES:
        tl.store(sums + 7 * n_rows + flat, s1, mask=ok)
        tl.store(sums + 8 * n_rows + flat, s2, mask=ok)
        tl.store(sums + 9 * n_rows + flat, reference, mask=ok)
    if COUNTS:
        tl.store(sums + 10 * n_rows + flat, count, mask=ok)
        tl.store(sums + 11 * n_rows + flat, support, mask=ok)
        tl.store(sums + 12 * n_rows + flat, collision, mask=ok)
        tl.store(sums + 13 * n_rows + flat, first, mask=ok)
        tl.store(sums + 14 * n_rows + flat, prior_mass, mask=ok)
    if VALUE:
        tl.store(sums + 15 * n_rows + flat, value, mask=ok)
    if SPREAD:
        tl.store(sums + 16 * n_rows + flat, spread, mask=ok)
