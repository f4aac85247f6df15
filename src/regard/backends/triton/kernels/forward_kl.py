"""Forward pass of KL (softmax and its relatives) in one walk over the keys.

    for each block of BM queries:
      for each block of BN keys that some of them may read:
        x <- log2(e) s/tau + log2(pi)                      [BM, BN]
        m <- the largest x so far;  t <- x - m;  weights 2^t
        z, e1, e2 <- sums of the weights, of weights t, of weights t^2, rescaled as m grows
        o <- sums of weights v

Row sums become statistics in ../statistics.py. Each group of sums is compiled only where it is asked for:
MOMENTS: e1. SQUARES: e2. SCORES: sums of the scores themselves, from an anchor, where a prior separates them from x.
COUNTS: admissible keys, sum of squared weights, weight of the first key. PRIOR: the prior's own mass. SPREAD: |v|^2.
"""

import triton
import triton.language as tl

from .tiles import (
    LN2,
    LOG2E,
    LOWEST,
    NOTHING,
    admissible,
    dropout_factor,
    key_tile,
    key_tiles,
    load_keys,
    load_squares,
    load_values,
    load_vectors,
    log_prior,
    precise_product,
    product,
    program,
    row_count,
    row_parameter,
    scores,
)

FAR = tl.constexpr(-16384.0)  # a shift of the maximum beyond which old sums are 0


@triton.jit
def walk(
    p, b, h, kv, block, rows, q, c, squares, start, stop, state,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, WEIGHTED: tl.constexpr, MOMENTS: tl.constexpr,
    SQUARES: tl.constexpr, SCORES: tl.constexpr, COUNTS: tl.constexpr, PRIOR: tl.constexpr, SPREAD: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr, PAD: tl.constexpr, PADV: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr, RISING: tl.constexpr,
):  # fmt: skip
    """One walk over the tiles start ... stop, which adds to the sums of `state`. MASKED: some pairs may not be read."""
    # Without other parts the score is a multiple of the product, and so is the largest one of a row.
    PLAIN: tl.constexpr = (
        not MASKED and not WEIGHTED and not COUNTS and RISING and p.softcap is None and p.score_bias is None
    )
    o, m, z, e1, e2, s1, s2, anchor, top, count, collision, first, prior_top, prior_sum, spread = state
    for n in tl.range(start, stop):
        j = key_tile(p, b, h, block, n, BN)
        cols = j + tl.arange(0, BN)
        k = load_keys(p, b, kv, j, D, PAD, BN, MASKED)
        i, at_cols = rows[:, None], cols[None, :]
        inside = (i < p.Tq) & (at_cols < p.Tk)
        products = product(q, tl.trans(k), PRECISION, WIDEN)
        if PLAIN:
            s = products
            factor = c * p.scale
            highest = tl.max(s, 1) * factor
            x = s * factor[:, None]
        else:
            s, _ = scores(p, products, b, h, i, at_cols, inside, MASKED)
            x = s * c[:, None]
        if WEIGHTED:
            prior = log_prior(p, b, h, i, at_cols, inside)
            x += prior
        ok = inside
        if MASKED:
            ok = admissible(p, b, h, i, at_cols, LEFT, RIGHT)
            if p.density is not None:
                # A key of density 0 has no weight, but its score shows if it is NaN.
                x = tl.where(prior == NOTHING, tl.where(s == s, NOTHING, s), x)
            if p.density is None:
                x = tl.maximum(x, LOWEST, propagate_nan=tl.PropagateNan.ALL)
            x = tl.where(ok, x, NOTHING)
        if not PLAIN:
            highest = tl.max(x, 1)
        new = tl.maximum(m, highest, propagate_nan=tl.PropagateNan.ALL)
        shifted = new
        if MASKED:
            shifted = tl.where(new == NOTHING, 0.0, new)
        t = x - shifted[:, None]
        weights = tl.math.exp2(t)
        shift = m - shifted
        old = tl.math.exp2(shift)
        shift = tl.maximum(shift, FAR)
        if MOMENTS:
            moved = t
            if MASKED:
                moved = tl.where(x == NOTHING, 0.0, t)
            part = weights * moved
            if SQUARES:
                e2 = old * (e2 + shift * (2 * e1 + shift * z)) + tl.sum(part * moved, 1)
            e1 = old * (e1 + shift * z) + tl.sum(part, 1)
        if SCORES:
            own = s
            if MASKED:
                own = tl.where(x == NOTHING, NOTHING, s)
            best = tl.max(own, 1)
            anchor = tl.where((top == NOTHING) & (best > NOTHING), best, anchor)
            top = tl.maximum(top, best, propagate_nan=tl.PropagateNan.ALL)
            away = s - anchor[:, None]
            if MASKED:
                away = tl.where(weights == 0, 0.0, away)
            part = weights * away
            s1 = old * s1 + tl.sum(part, 1)
            s2 = old * s2 + tl.sum(part * away, 1)
        if COUNTS:
            count += tl.sum((x != NOTHING).to(tl.float32) if MASKED else inside.to(tl.float32), 1)
            collision = old * old * collision + tl.sum(weights * weights, 1)
            first = tl.where(j == 0, tl.sum(tl.where((cols == 0)[None, :], x, 0.0), 1), first)
        if PRIOR and WEIGHTED:
            own = prior
            if MASKED:
                own = tl.where(ok, prior, NOTHING)
            best = tl.maximum(prior_top, tl.max(own, 1))
            safe = tl.where(best == NOTHING, 0.0, best)
            prior_sum = prior_sum * tl.math.exp2(prior_top - safe) + tl.sum(tl.math.exp2(own - safe[:, None]), 1)
            prior_top = best
        z = z * old + tl.sum(weights, 1)
        if SPREAD:
            square = load_squares(squares, p, b, kv, cols)
            spread = spread * old + tl.sum(weights * square[None, :], 1)
        sent = weights
        if p.dropout_key is not None:
            sent = weights * dropout_factor(p, b, h, i, at_cols)
        v = load_values(p, b, kv, j, DV, PADV, BN, MASKED)
        if SPREAD:  # the spread is a difference of squares: rounded weights would lose its digits
            o = precise_product(sent, v, PRECISION, WIDEN, o * old[:, None])
        else:
            o = product(sent.to(p.value.data.dtype.element_ty), v, PRECISION, WIDEN, o * old[:, None])
        m = new
    return o, m, z, e1, e2, s1, s2, anchor, top, count, collision, first, prior_top, prior_sum, spread


@triton.jit
def forward_kl(
    p, out, peak, rest, lse, sums, squares,
    MARGINAL: tl.constexpr, PARTS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, WEIGHTED: tl.constexpr,
    MOMENTS: tl.constexpr, SQUARES: tl.constexpr, SCORES: tl.constexpr, COUNTS: tl.constexpr, PRIOR: tl.constexpr,
    SPREAD: tl.constexpr, RISING: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, PADV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One program for BM queries of one head. PARTS: there are masks beside the band.

    `out` [B, H, Tq, DV]; `peak`, `rest`, `lse` [B, H, Tq] or None; `sums` [14, B, H, Tq] or None."""
    block, head = program(p.Tq, BM)
    if RIGHT:
        block = tl.cdiv(p.Tq, BM) - 1 - block  # the longest rows first
    b, h = head // p.H, head % p.H
    kv = h // p.group
    rows = block * BM + tl.arange(0, BM)
    q = load_vectors(p.query, b, h, rows, rows < p.Tq, D, PAD)
    tau = row_parameter(p.temperature, p.temperature_value, b, h, rows, p.Tq, BM)
    c = (1.0 / tau) * LOG2E
    zero = tl.zeros((BM,), tl.float32)
    nothing = zero + NOTHING
    state = (
        tl.zeros((BM, PADV), tl.float32), nothing, zero, zero, zero, zero, zero, zero, nothing, zero, zero, nothing,
        nothing, zero, zero,
    )  # fmt: skip
    start, full, rest_, stop = key_tiles(p, b, h, block, LEFT, RIGHT, BM, BN)
    if LEFT or PARTS:
        state = walk(
            p, b, h, kv, block, rows, q, c, squares, start, full, state, True, LEFT, RIGHT, WEIGHTED, MOMENTS, SQUARES,
            SCORES, COUNTS, PRIOR, SPREAD, D, DV, PAD, PADV, BN, PRECISION, WIDEN, RISING,
        )  # fmt: skip
    state = walk(
        p, b, h, kv, block, rows, q, c, squares, full, rest_, state, False, LEFT, RIGHT, WEIGHTED, MOMENTS, SQUARES,
        SCORES, COUNTS, PRIOR, SPREAD, D, DV, PAD, PADV, BN, PRECISION, WIDEN, RISING,
    )  # fmt: skip
    if not PARTS:
        state = walk(
            p, b, h, kv, block, rows, q, c, squares, rest_, stop, state, True, LEFT, RIGHT, WEIGHTED, MOMENTS, SQUARES,
            SCORES, COUNTS, PRIOR, SPREAD, D, DV, PAD, PADV, BN, PRECISION, WIDEN, RISING,
        )  # fmt: skip
    o, m, z, e1, e2, s1, s2, anchor, top, count, collision, first, prior_top, prior_sum, spread = state

    # The plan is p = weights * factor.
    level = row_parameter(p.level, p.level_value, b, h, rows, p.Tq, BM)
    invalid = (z != z) | (m != m)
    keys = (z > 0) | invalid
    total_top = m
    null_x = nothing
    total = z
    if MARGINAL == "sink":
        null_x = level * c
        total_top = tl.maximum(m, null_x, propagate_nan=tl.PropagateNan.ALL)
        total = z * tl.where(keys, tl.math.exp2(m - total_top), 0.0) + tl.math.exp2(null_x - total_top)
    some = keys
    if MARGINAL == "sink":
        some = keys | (null_x == null_x)
    log_total = tl.math.log2(tl.where(some, total, 1.0))
    safe_top = tl.where(some, total_top, 0.0)
    safe_top = tl.where(invalid, float("nan"), safe_top)  # the maximum ignores NaN, and -inf would mean "no key"
    lse2 = safe_top + log_total
    shift = tl.where(keys, m - safe_top, NOTHING)
    factor = tl.math.exp2(shift - log_total)
    remainder = log_total
    shown = safe_top
    if MARGINAL == "rows":
        factor = factor * p.mass
        remainder = log_total - tl.math.log2(p.mass * 1.0)
    if MARGINAL == "relax":
        remainder = lse2 * (level / (tau + level)) - safe_top
        factor = tl.where(keys, tl.math.exp2(m - safe_top - remainder), 0.0)
    if MARGINAL == "free":
        factor = tl.where(keys, tl.math.exp2(m + level * c), 0.0)
        shown = zero
        remainder = -level * c
    o = o * factor[:, None]
    ok = rows < p.Tq
    flat = head.to(tl.int64) * p.Tq + rows
    columns = tl.arange(0, PADV)
    if out is not None:
        tl.store(
            out + flat[:, None] * DV + columns[None, :], tl.where(keys[:, None], o, 0.0),
            mask=ok[:, None] & (columns < DV)[None, :],
        )  # fmt: skip
    if peak is not None:
        idle = ~some
        if MARGINAL == "free":
            idle = ~keys
        tl.store(peak + flat, tl.where(idle, NOTHING, shown), mask=ok)
        tl.store(rest + flat, remainder, mask=ok)
    if lse is not None:
        tl.store(lse + flat, tl.where(some, lse2 * LN2, NOTHING), mask=ok)
    if sums is not None:
        n_rows = row_count(p, BM)
        tl.store(sums + flat, m, mask=ok)
        tl.store(sums + n_rows + flat, z, mask=ok)
        tl.store(sums + 2 * n_rows + flat, factor, mask=ok)
        if MOMENTS:
            tl.store(sums + 3 * n_rows + flat, e1, mask=ok)
            if SQUARES:
                tl.store(sums + 4 * n_rows + flat, e2, mask=ok)
        if SCORES:
            tl.store(sums + 5 * n_rows + flat, s1, mask=ok)
            tl.store(sums + 6 * n_rows + flat, s2, mask=ok)
            tl.store(sums + 7 * n_rows + flat, anchor, mask=ok)
            tl.store(sums + 8 * n_rows + flat, top, mask=ok)
        if COUNTS:
            tl.store(sums + 9 * n_rows + flat, count, mask=ok)
            tl.store(sums + 10 * n_rows + flat, collision, mask=ok)
            tl.store(sums + 11 * n_rows + flat, first, mask=ok)
        if PRIOR and WEIGHTED:
            tl.store(sums + 12 * n_rows + flat, prior_top + tl.math.log2(prior_sum), mask=ok)
        if SPREAD:
            tl.store(sums + 13 * n_rows + flat, spread, mask=ok)
