"""Backward pass, without atomics: one kernel owns blocks of queries, another blocks of keys.

Both compute the plan of a tile again from the saved price (plan.py), and u = dL/dout V^T:

    by_rows:     dQ += scale G/tau K       and sums of G over the keys of each row
    by_columns:  dK += scale (G/tau)^T Q,  dV += P^T dL/dout,  and sums over the queries of each key

Each sum runs in a fixed order, so results are the same bits in every run.
"""

import triton
import triton.language as tl

from .links import by_alpha, factor_of
from .plan import advantages, plan
from .tiles import (
    NOTHING,
    admissible,
    distances,
    dropout_factor,
    key_tile,
    key_tiles,
    load_block,
    load_keys,
    load_values,
    load_vectors,
    product,
    program,
    query_tile,
    query_tiles,
    readable,
    row_count,
    row_parameter,
)


@triton.jit
def walk_keys(
    p, b, h, kv, block, rows, q, d_out, c, alpha, beta, peak, rest, a, slope_b, dual, start, stop, state,
    MASKED: tl.constexpr, GRAD: tl.constexpr, DQ: tl.constexpr, SUMS: tl.constexpr, LINK: tl.constexpr,
    ENTROPY: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, WEIGHTED: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, PAD: tl.constexpr, PADV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One walk over the tiles start ... stop of a block of queries. MASKED: some pairs may not be read."""
    total, sum_g, sum_gs, sum_gd, sum_ps, sum_pd, sum_gp, sum_ga = state
    for n in tl.range(start, stop):
        j = key_tile(p, b, h, block, n, BN)
        cols = j + tl.arange(0, BN)
        k = load_keys(p, b, kv, j, D, PAD, BN, MASKED)
        i, at_cols = rows[:, None], cols[None, :]
        weights, w, d, s, slope = plan(
            p, product(q, tl.trans(k), PRECISION, WIDEN), b, h, i, at_cols, c[:, None], beta[:, None], peak[:, None],
            rest[:, None], MASKED, LINK, LEFT, RIGHT, WEIGHTED, FAST,
        )  # fmt: skip
        u = tl.zeros((BM, BN), tl.float32)
        if GRAD:
            u = product(d_out, tl.trans(load_values(p, b, kv, j, DV, PADV, BN, MASKED)), PRECISION, WIDEN)
            if p.dropout_key is not None:
                u = u * dropout_factor(p, b, h, i, at_cols)
        advantage = advantages(weights, d, u, a[:, None], slope_b[:, None], LINK, ENTROPY)
        g = w * advantage
        if MASKED:
            g = tl.where(w == 0, 0.0, g)  # a masked pair has none, whatever its utility is
        if SUMS:
            gp = tl.where(weights == 0, 0.0, weights * advantage)
            away = s - dual[:, None]
            if LINK != "kl":
                away = d / c[:, None]  # from the origin of the link: the rest is known
            if LINK != "kl" and LINK != "sigmoid":
                sum_ga += tl.sum(tl.where(weights == 0, 0.0, gp * by_alpha(d, alpha[:, None], LINK)), 1)
            away = tl.where(w == 0, 0.0, away)
            distance = tl.abs(distances(p, i, at_cols)).to(tl.float32)
            sum_g += tl.sum(g, 1)
            sum_gs += tl.sum(g * away, 1)
            sum_gd += tl.sum(gp * distance, 1)
            sum_gp += tl.sum(gp, 1)
            sum_ps += tl.sum(weights * away, 1)
            sum_pd += tl.sum(weights * distance, 1)
        if DQ:
            ds = g * slope
            total = product(ds.to(p.key.data.dtype.element_ty), k, PRECISION, WIDEN, total)
    return total, sum_g, sum_gs, sum_gd, sum_ps, sum_pd, sum_gp, sum_ga


@triton.jit
def by_rows(
    p, grad, peaks, rests, row_a, row_b, duals, dq, sums,
    SUMS: tl.constexpr, LINK: tl.constexpr, ENTROPY: tl.constexpr, PARTS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, WEIGHTED: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, PAD: tl.constexpr, PADV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """`grad` is dL/dout as an operand, or None. `sums` [7, B, H, Tq], as row_gradient.py names them:
    of G, G (s - dual), dL/dlog(pi) |distance|, p (s - dual), p |distance|, dL/dlog(pi), dL/dalpha."""
    GRAD: tl.constexpr = grad is not None
    DQ: tl.constexpr = dq is not None
    block, head = program(p.Tq, BM)
    if RIGHT:
        block = tl.cdiv(p.Tq, BM) - 1 - block  # the longest rows first
    b, h = head // p.H, head % p.H
    kv = h // p.group
    rows = block * BM + tl.arange(0, BM)
    ok = rows < p.Tq
    flat = head.to(tl.int64) * p.Tq + rows
    peak = tl.load(peaks + flat, mask=ok, other=0.0)
    rest = tl.load(rests + flat, mask=ok, other=0.0)
    a = tl.load(row_a + flat, mask=ok, other=0.0)
    slope_b = tl.load(row_b + flat, mask=ok, other=0.0)
    tau = row_parameter(p.temperature, p.temperature_value, b, h, rows, p.Tq, BM)
    alpha = row_parameter(p.alpha, p.alpha_value, b, h, rows, p.Tq, BM)
    beta = 1.0 / (alpha - 1.0)
    c = factor_of(alpha, tau, LINK)
    q = load_vectors(p.query, b, h, rows, ok, D, PAD)
    zero = tl.zeros((BM,), tl.float32)
    d_out = zero
    if GRAD:
        d_out = load_vectors(grad, b, h, rows, ok, DV, PADV).to(p.value.data.dtype.element_ty)
    dual = zero
    if SUMS:
        dual = tl.load(duals + flat, mask=ok, other=0.0)
        dual = tl.where(dual == NOTHING, 0.0, dual)
    state = (tl.zeros((BM, PAD), tl.float32), zero, zero, zero, zero, zero, zero, zero)
    start, full, rest_, stop = key_tiles(p, b, h, block, LEFT, RIGHT, BM, BN)
    if LEFT or PARTS:
        state = walk_keys(
            p, b, h, kv, block, rows, q, d_out, c, alpha, beta, peak, rest, a, slope_b, dual, start, full, state,
            True, GRAD, DQ, SUMS, LINK, ENTROPY, LEFT, RIGHT, WEIGHTED, D, DV, PAD, PADV, BM, BN, PRECISION, WIDEN,
            FAST,
        )  # fmt: skip
    state = walk_keys(
        p, b, h, kv, block, rows, q, d_out, c, alpha, beta, peak, rest, a, slope_b, dual, full, rest_, state,
        False, GRAD, DQ, SUMS, LINK, ENTROPY, LEFT, RIGHT, WEIGHTED, D, DV, PAD, PADV, BM, BN, PRECISION, WIDEN, FAST,
    )  # fmt: skip
    if not PARTS:
        state = walk_keys(
            p, b, h, kv, block, rows, q, d_out, c, alpha, beta, peak, rest, a, slope_b, dual, rest_, stop, state,
            True, GRAD, DQ, SUMS, LINK, ENTROPY, LEFT, RIGHT, WEIGHTED, D, DV, PAD, PADV, BM, BN, PRECISION, WIDEN,
            FAST,
        )  # fmt: skip
    total, sum_g, sum_gs, sum_gd, sum_ps, sum_pd, sum_gp, sum_ga = state
    if dq is not None:
        columns = tl.arange(0, PAD)
        total = total * (p.scale / tau)[:, None]
        tl.store(dq + flat[:, None] * D + columns[None, :], total, mask=ok[:, None] & (columns < D)[None, :])
    if SUMS:
        n_rows = row_count(p, BM)
        tl.store(sums + flat, sum_g, mask=ok)
        tl.store(sums + n_rows + flat, sum_gs, mask=ok)
        tl.store(sums + 2 * n_rows + flat, sum_gd, mask=ok)
        tl.store(sums + 3 * n_rows + flat, sum_ps, mask=ok)
        tl.store(sums + 4 * n_rows + flat, sum_pd, mask=ok)
        tl.store(sums + 5 * n_rows + flat, sum_gp, mask=ok)
        tl.store(sums + 6 * n_rows + flat, sum_ga, mask=ok)


@triton.jit
def walk_queries(
    p, grad, peaks, rests, row_a, row_b, b, h, block, cols, k, v, start, stop, state,
    MASKED: tl.constexpr, GRAD: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DV_: tl.constexpr,
    BY_KEY: tl.constexpr, LINK: tl.constexpr, ENTROPY: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    WEIGHTED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, PADV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One walk over the tiles start ... stop of a block of keys. MASKED: some pairs may not be read."""
    sum_k, sum_v, sum_g, sum_p = state
    for n in tl.range(start, stop):
        i = query_tile(p, b, h, block, n, BM)
        rows = i + tl.arange(0, BM)
        ok = rows < p.Tq
        if not MASKED:
            ok = tl.full((BM,), True, tl.int1)
        flat = (b * p.H + h).to(tl.int64) * p.Tq + rows
        peak = tl.load(peaks + flat, mask=ok, other=NOTHING)
        rest = tl.load(rests + flat, mask=ok, other=0.0)
        tau = row_parameter(p.temperature, p.temperature_value, b, h, rows, p.Tq, BM)
        alpha = row_parameter(p.alpha, p.alpha_value, b, h, rows, p.Tq, BM)
        c = factor_of(alpha, tau, LINK)
        read = ok & (peak != NOTHING)  # a query without keys may hold NaN
        q = load_vectors(p.query, b, h, rows, read, D, PAD) if MASKED else load_block(p.query, b, h, i, D, PAD, BM)
        # Tiles are keys by queries here: the weights are then the left side of the products, as they are.
        at_rows, at_cols = rows[None, :], cols[:, None]
        weights, w, d, _, slope = plan(
            p, product(k, tl.trans(q), PRECISION, WIDEN), b, h, at_rows, at_cols, c[None, :],
            (1.0 / (alpha - 1.0))[None, :], peak[None, :], rest[None, :], MASKED, LINK, LEFT, RIGHT, WEIGHTED, FAST,
        )  # fmt: skip
        if BY_KEY:
            sum_p += tl.sum(weights, 1)
        if ROWS:
            u = tl.zeros((BN, BM), tl.float32)
            kept = 1.0
            if p.dropout_key is not None:
                kept = dropout_factor(p, b, h, at_rows, at_cols)
            if GRAD:
                if MASKED:
                    d_out = load_vectors(grad, b, h, rows, read, DV, PADV).to(p.value.data.dtype.element_ty)
                else:
                    d_out = load_block(grad, b, h, i, DV, PADV, BM).to(p.value.data.dtype.element_ty)
                u = product(v, tl.trans(d_out), PRECISION, WIDEN) * kept
                if DV_:
                    sent = (weights * kept).to(p.value.data.dtype.element_ty)
                    sum_v = product(sent, d_out, PRECISION, WIDEN, sum_v)
            a = tl.load(row_a + flat, mask=ok, other=0.0)
            slope_b = tl.zeros((BM,), tl.float32)
            if ENTROPY:
                slope_b = tl.load(row_b + flat, mask=ok, other=0.0)
            advantage = advantages(weights, d, u, a[None, :], slope_b[None, :], LINK, ENTROPY)
            g = w * advantage
            if MASKED:
                g = tl.where(w == 0, 0.0, g)
            if BY_KEY:
                sum_g += tl.sum(tl.where(weights == 0, 0.0, weights * advantage), 1)
            if DK:
                ds = g * slope
                if p.temperature is not None:
                    ds = ds * (1.0 / tau)[None, :]
                sum_k = product(ds.to(p.query.data.dtype.element_ty), q, PRECISION, WIDEN, sum_k)
    return sum_k, sum_v, sum_g, sum_p


@triton.jit
def by_columns(
    p, grad, peaks, rests, row_a, row_b, dk, dv, key_g, key_mass,
    LINK: tl.constexpr, ENTROPY: tl.constexpr, PARTS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, WEIGHTED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PAD: tl.constexpr, PADV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One program for BN keys of one key head; it adds the query heads of its group one after the other.

    dk, dv [B, Hkv, Tk, D|DV]; key_g, key_mass [B, H, Tk]: sums over queries of dL/dlog(pi) and of p.
    None: not asked for."""
    GRAD: tl.constexpr = grad is not None
    ROWS: tl.constexpr = row_a is not None
    DK: tl.constexpr = dk is not None
    DV_: tl.constexpr = dv is not None
    BY_KEY: tl.constexpr = key_g is not None or key_mass is not None
    block, head = program(p.Tk, BN)
    kv_heads = p.H // p.group
    b, kv = head // kv_heads, head % kv_heads
    cols = block * BN + tl.arange(0, BN)
    k = load_keys(p, b, kv, block * BN, D, PAD, BN, True)
    v = load_values(p, b, kv, block * BN, DV, PADV, BN, True)
    sum_k = tl.zeros((BN, PAD), tl.float32)
    sum_v = tl.zeros((BN, PADV), tl.float32)
    for member in range(p.group):
        h = kv * p.group + member
        state = (sum_k, sum_v, tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32))
        start, full, rest_, stop = query_tiles(p, b, h, block, LEFT, RIGHT, BM, BN)
        if RIGHT or PARTS:
            state = walk_queries(
                p, grad, peaks, rests, row_a, row_b, b, h, block, cols, k, v, start, full, state,
                True, GRAD, ROWS, DK, DV_, BY_KEY, LINK, ENTROPY, LEFT, RIGHT, WEIGHTED, D, DV, PAD, PADV, BM, BN,
                PRECISION, WIDEN, FAST,
            )  # fmt: skip
        state = walk_queries(
            p, grad, peaks, rests, row_a, row_b, b, h, block, cols, k, v, full, rest_, state,
            False, GRAD, ROWS, DK, DV_, BY_KEY, LINK, ENTROPY, LEFT, RIGHT, WEIGHTED, D, DV, PAD, PADV, BM, BN,
            PRECISION, WIDEN, FAST,
        )  # fmt: skip
        if not PARTS:
            state = walk_queries(
                p, grad, peaks, rests, row_a, row_b, b, h, block, cols, k, v, rest_, stop, state,
                True, GRAD, ROWS, DK, DV_, BY_KEY, LINK, ENTROPY, LEFT, RIGHT, WEIGHTED, D, DV, PAD, PADV, BM, BN,
                PRECISION, WIDEN, FAST,
            )  # fmt: skip
        sum_k, sum_v, sum_g, sum_p = state
        at_key = (b * p.H + h).to(tl.int64) * p.Tk + cols
        inside = cols < p.Tk
        if key_g is not None:
            tl.store(key_g + at_key, sum_g, mask=inside)
        if key_mass is not None:
            tl.store(key_mass + at_key, sum_p, mask=inside)
    inside = (cols < p.Tk)[:, None]
    used = readable(p, b, kv, cols)[:, None]  # other keys have no gradient, even where a query holds NaN
    own = head.to(tl.int64) * p.Tk + cols
    if dk is not None:
        columns = tl.arange(0, PAD)
        factor = p.scale
        if p.temperature is None:
            factor = p.scale / p.temperature_value
        found = tl.where(used, sum_k * factor, 0.0)
        tl.store(dk + own[:, None] * D + columns[None, :], found, mask=inside & (columns < D)[None, :])
    if dv is not None:
        columns = tl.arange(0, PADV)
        found = tl.where(used, sum_v, 0.0)
        tl.store(dv + own[:, None] * DV + columns[None, :], found, mask=inside & (columns < DV)[None, :])


@triton.jit
def by_pairs(
    p, grad, peaks, rests, row_a, row_b, pairs, from_row, n_rows, AS_SCORE: tl.constexpr, AS_PLAN: tl.constexpr,
    LINK: tl.constexpr, ENTROPY: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, WEIGHTED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PAD: tl.constexpr, PADV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """dL/dlog(pi) of single pairs (AS_SCORE: dL/ds; AS_PLAN: the weights), for `n_rows` queries from `from_row` on:
    [B, H, n_rows, Tk]."""
    block, number = program(n_rows, BM)
    tiles = tl.cdiv(p.Tk, BN)
    tile, head = number % tiles, number // tiles
    b, h = head // p.H, head % p.H
    kv = h // p.group
    rows = from_row + block * BM + tl.arange(0, BM)
    cols = tile * BN + tl.arange(0, BN)
    ok = (rows < p.Tq) & (rows < from_row + n_rows)
    flat = head.to(tl.int64) * p.Tq + rows
    peak = tl.load(peaks + flat, mask=ok, other=NOTHING)
    rest = tl.load(rests + flat, mask=ok, other=0.0)
    tau = row_parameter(p.temperature, p.temperature_value, b, h, rows, p.Tq, BM)
    alpha = row_parameter(p.alpha, p.alpha_value, b, h, rows, p.Tq, BM)
    c = factor_of(alpha, tau, LINK)
    q = load_vectors(p.query, b, h, rows, ok, D, PAD)
    k = load_keys(p, b, kv, tile * BN, D, PAD, BN, True)
    weights, w, d, _, _ = plan(
        p, product(q, tl.trans(k), PRECISION, WIDEN), b, h, rows[:, None], cols[None, :], c[:, None],
        (1.0 / (alpha - 1.0))[:, None], peak[:, None], rest[:, None], True, LINK, LEFT, RIGHT, WEIGHTED, FAST,
    )  # fmt: skip
    found = weights
    if not AS_PLAN:
        u = tl.zeros((BM, BN), tl.float32)
        if grad is not None:
            d_out = load_vectors(grad, b, h, rows, ok, DV, PADV).to(p.value.data.dtype.element_ty)
            u = product(d_out, tl.trans(load_values(p, b, kv, tile * BN, DV, PADV, BN, True)), PRECISION, WIDEN)
            if p.dropout_key is not None:
                u = u * dropout_factor(p, b, h, rows[:, None], cols[None, :])
        a = tl.load(row_a + flat, mask=ok, other=0.0)
        slope_b = tl.load(row_b + flat, mask=ok, other=0.0)
        advantage = advantages(weights, d, u, a[:, None], slope_b[:, None], LINK, ENTROPY)
        found = tl.where(weights == 0, 0.0, weights * advantage)
        if AS_SCORE:
            found = tl.where(w == 0, 0.0, w * advantage) / tau[:, None]
    place = (head.to(tl.int64) * n_rows + (rows - from_row))[:, None] * p.Tk + cols[None, :]
    tl.store(pairs + place, found, mask=ok[:, None] & (cols < p.Tk)[None, :])


@triton.jit
def find_readable(p, found, LEFT: tl.constexpr, RIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """found [B, Hkv, Tk]: 1 where some query of the key head may read the key."""
    block, head = program(p.Tk, BN)
    kv_heads = p.H // p.group
    b, kv = head // kv_heads, head % kv_heads
    cols = block * BN + tl.arange(0, BN)
    read = tl.zeros((BN,), tl.int32)
    for member in range(p.group):
        h = kv * p.group + member
        start, _, _, stop = query_tiles(p, b, h, block, LEFT, RIGHT, BM, BN)
        for n in tl.range(start, stop):
            rows = query_tile(p, b, h, block, n, BM) + tl.arange(0, BM)
            ok = admissible(p, b, h, rows[:, None], cols[None, :], LEFT, RIGHT)
            read = tl.maximum(read, tl.max(ok.to(tl.int32), 0))
    tl.store(found + head.to(tl.int64) * p.Tk + cols, read.to(tl.uint8), mask=cols < p.Tk)
