"""Tiles of a plan: products, scores, the prior and which pairs are admissible, for a block of queries and keys.

`rows` are BM queries and `cols` are BN keys. Functions of pairs get them as [BM, 1] and [1, BN], or the other way round
in kernels that own keys, as [1, BM] and [BN, 1]: a tile is what both broadcast to. `inside` is True for pairs of the
plan: tiles at the edge reach beyond it. Logarithms are in base 2.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.0e38)  # stands for scores near the lowest number, which would overflow
NOTHING = tl.constexpr(float("-inf"))
SIDE = tl.constexpr(64)  # queries and keys of one entry of a tile map (regard/tiles.py)


@triton.jit
def program(T, SIZE: tl.constexpr):
    """The block of SIZE rows and the head that this program owns. The grid has one axis: the others of a GPU hold at
    most 65535 programs."""
    blocks = tl.cdiv(T, SIZE)
    number = tl.program_id(0)
    return number % blocks, number // blocks


@triton.jit
def row_count(p, BM: tl.constexpr):
    """B H Tq in 64 bits, in a kernel with one program for BM queries."""
    return (tl.num_programs(0) // tl.cdiv(p.Tq, BM)).to(tl.int64) * p.Tq


@triton.jit
def product(a, b, PRECISION: tl.constexpr, WIDEN: tl.constexpr, add=None):
    """a @ b (+ add) with float32 sums. WIDEN: the interpreter multiplies bfloat16 as integers, so convert first."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), add, input_precision=PRECISION)
    return tl.dot(a, b, add, input_precision=PRECISION)


@triton.jit
def precise_product(weights, v, PRECISION: tl.constexpr, WIDEN: tl.constexpr, add):
    """weights @ v + add with all digits of the weights: where values are bfloat16 or float16, in three parts."""
    if v.dtype == tl.float32:
        return product(weights, v, PRECISION, WIDEN, add)
    high = weights.to(v.dtype)
    rest = weights - high.to(tl.float32)
    middle = rest.to(v.dtype)
    low = (rest - middle.to(tl.float32)).to(v.dtype)
    add = product(low, v, PRECISION, WIDEN, add)
    add = product(middle, v, PRECISION, WIDEN, add)
    return product(high, v, PRECISION, WIDEN, add)


@triton.jit
def at(operand, b, h, i, j):
    """Addresses of the entries (b, h, i, j), which broadcast against each other. In 64 bits."""
    place = b.to(tl.int64) * operand.b + h.to(tl.int64) * operand.h
    return operand.data + place + i.to(tl.int64) * operand.i + j.to(tl.int64) * operand.j


@triton.jit
def load_squares(squares, p, b, kv, cols):
    """|v - centre|^2 of keys, from [B, Hkv, Tk]."""
    place = (b * (p.H // p.group) + kv).to(tl.int64) * p.Tk + cols
    return tl.load(squares + place, mask=cols < p.Tk, other=0.0)


@triton.jit
def load_tile(operand, b, h, rows, cols, inside, other):
    """A tile of an operand."""
    return tl.load(at(operand, b, h, rows, cols), mask=inside, other=other)


@triton.jit
def load_vectors(operand, b, h, rows, keep, D: tl.constexpr, PAD: tl.constexpr):
    """Rows of queries, keys or values, [rows, PAD]; 0 where `keep` is False and beyond D."""
    columns = tl.arange(0, PAD)
    mask = keep[:, None]
    if D != PAD:
        mask = mask & (columns < D)[None, :]
    return tl.load(at(operand, b, h, rows[:, None], columns[None, :]), mask=mask, other=0.0)


@triton.jit
def load_block(operand, b, h, first, D: tl.constexpr, PAD: tl.constexpr, SIZE: tl.constexpr):
    """SIZE rows of queries, keys or values from `first` on, [SIZE, PAD]. All of them must exist.

    Only one address depends on `first`, so a loop computes the others once."""
    columns = tl.arange(0, PAD)
    start = b.to(tl.int64) * operand.b + h.to(tl.int64) * operand.h + first.to(tl.int64) * operand.i
    offsets = tl.arange(0, SIZE)[:, None].to(tl.int64) * operand.i + columns[None, :].to(tl.int64) * operand.j
    if D != PAD:
        return tl.load(operand.data + start + offsets, mask=(columns < D)[None, :], other=0.0)
    return tl.load(operand.data + start + offsets)


@triton.jit
def row_parameter(operand, value, b, h, rows, Tq, BM: tl.constexpr):
    """A parameter of each row in float32: an operand [B|1, H|1, Tq|1, 1], or a number."""
    if operand is not None:
        found = tl.load(at(operand, b, h, rows, rows * 0), mask=rows < Tq, other=1.0)
        return found.to(tl.float32)
    return tl.full((BM,), 0.0, tl.float32) + value


@triton.jit
def load_keys(p, b, kv, j, D: tl.constexpr, PAD: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr):
    """BN keys from j on, [BN, PAD]. One that no query may read counts as 0, because it may hold NaN."""
    if not MASKED:
        return load_block(p.key, b, kv, j, D, PAD, BN)
    cols = j + tl.arange(0, BN)
    return load_vectors(p.key, b, kv, cols, readable(p, b, kv, cols), D, PAD)


@triton.jit
def load_values(p, b, kv, j, DV: tl.constexpr, PAD: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr):
    if not MASKED:
        return load_block(p.value, b, kv, j, DV, PAD, BN)
    cols = j + tl.arange(0, BN)
    return load_vectors(p.value, b, kv, cols, readable(p, b, kv, cols), DV, PAD)


@triton.jit
def readable(p, b, kv, cols):
    inside = cols < p.Tk
    if p.readable is not None:
        inside = inside & (tl.load(at(p.readable, b, kv, cols * 0, cols), mask=inside, other=0) != 0)
    return inside


# --- scores -----------------------------------------------------------------------------------------------------------


@triton.jit
def tanh(x):
    e = tl.math.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 - square * (0.33333333 - 0.13333333 * square))  # 1 - e would lose digits
    return tl.where(tl.abs(x) < 0.05, near, tl.where(x < 0, -far, far))


@triton.jit
def scores(p, products, b, h, rows, cols, inside, MASKED: tl.constexpr):
    """The scores s of pairs with these products <q, k>, and the derivative of the softcap (1 without one)."""
    s = products * p.scale
    slope = 1.0
    if p.softcap is not None:
        capped = tanh(s / p.softcap)
        s = p.softcap * capped
        slope = 1.0 - capped * capped
    if p.score_bias is not None:
        s += load_tile(p.score_bias, b, h, rows, cols, inside, 0.0).to(tl.float32)
    if MASKED:
        s = tl.maximum(s, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    return s, slope


# --- the prior --------------------------------------------------------------------------------------------------------


@triton.jit
def distances(p, rows, cols):
    """Key position minus query position."""
    return cols - (rows + p.offset)


@triton.jit
def admissible(p, b, h, rows, cols, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Which pairs may be read. A key of density 0 is read, too."""
    inside = (rows < p.Tq) & (cols < p.Tk)
    ok = inside
    if LEFT:
        ok = ok & (distances(p, rows, cols) >= -p.left)
    if RIGHT:
        ok = ok & (distances(p, rows, cols) <= p.right)
    if p.mask is not None:
        ok = ok & (load_tile(p.mask, b, h, rows, cols, inside, 0) != 0)
    if p.score_bias is not None:
        ok = ok & (load_tile(p.score_bias, b, h, rows, cols, inside, 0.0) != NOTHING)
    for n in tl.static_range(len(p.log_priors)):
        ok = ok & (load_tile(p.log_priors[n], b, h, rows, cols, inside, 0.0) != NOTHING)
    if p.query_ids is not None:
        own = tl.load(at(p.query_ids, b, h, rows, rows * 0), mask=rows < p.Tq, other=-1)
        theirs = tl.load(at(p.key_ids, b, h, cols * 0, cols), mask=cols < p.Tk, other=-1)
        ok = ok & (own == theirs) & (own >= 0)
    if p.selected is not None:
        listed = ok & False
        for n in range(p.selections):
            block = tl.load(at(p.selected, b, h, rows, rows * 0 + n), mask=rows < p.Tq, other=-1)
            listed = listed | (block == cols // p.selected_block)
        ok = ok & listed
    if p.tile_map is not None:
        number = tl.load(at(p.tile_map, b, h, rows // SIDE, cols // SIDE), mask=inside, other=0)
        word = tl.load(p.tiles + number * SIDE + cols % SIDE, mask=inside, other=0)
        ok = ok & (((word >> (rows % SIDE).to(tl.int64)) & 1) != 0)
    return ok


@triton.jit
def log_prior(p, b, h, rows, cols, inside):
    """log2 pi of all terms, for the pairs inside of the plan. A density of 0 gives -inf."""
    total = tl.zeros(inside.shape, tl.float32)
    for n in tl.static_range(len(p.log_priors)):
        total += load_tile(p.log_priors[n], b, h, rows, cols, inside, 0.0).to(tl.float32)
    if p.slopes is not None:
        slope = tl.load(at(p.slopes, b, h, rows, rows * 0), mask=rows < p.Tq, other=0.0).to(tl.float32)
        total -= slope * tl.abs(distances(p, rows, cols)).to(tl.float32)
    if p.relative is not None:
        entry = tl.minimum(tl.maximum(distances(p, rows, cols), -p.reach), p.reach) + p.reach
        total += tl.load(at(p.relative, b, h, entry * 0, entry), mask=inside, other=0.0).to(tl.float32)
    if p.query_factor is not None:
        for n in range(p.rank):
            own = tl.load(at(p.query_factor, b, h, rows, rows * 0 + n), mask=rows < p.Tq, other=0.0).to(tl.float32)
            theirs = tl.load(at(p.key_factor, b, h, cols, cols * 0 + n), mask=cols < p.Tk, other=0.0).to(tl.float32)
            total += own * theirs
    if p.decay_query is not None:
        # Both sums are large and their difference is not: measure them from the sum of one row, in float64.
        first = tl.minimum(tl.min(rows), p.Tq - 1)
        start = tl.load(at(p.decay_query, b, h, first, first * 0))
        own = tl.load(at(p.decay_query, b, h, rows, rows * 0), mask=rows < p.Tq, other=0.0) - start
        theirs = tl.load(at(p.decay_key, b, h, cols * 0, cols), mask=cols < p.Tk, other=0.0) - start
        # A masked key may be ahead of the query, where the sum would be positive and might overflow.
        total += tl.minimum(own.to(tl.float32) - theirs.to(tl.float32), 0.0)
    total = total * LOG2E
    if p.density is not None:
        total += tl.math.log2(load_tile(p.density, b, h, rows, cols, inside, 1.0).to(tl.float32))
    return total


@triton.jit
def key_tiles(p, b, h, block, LEFT: tl.constexpr, RIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The blocks of BN keys that a block of queries visits, as places n in four parts: mixed up to a1, then full up to
    a2, then mixed up to a3. Every pair of a full tile is admissible and inside of the plan.

    With a schedule, place n is an entry of it (`key_tile`); without one it is the number of a block."""
    if p.rows_order is not None:
        counts = at(p.rows_counts, b, h, block, 0 * block)
        mixed = tl.load(counts)
        both = tl.load(counts + p.rows_counts.j)
        return 0, mixed, both, both
    first = block * BM
    last = tl.minimum(first + BM, p.Tq) - 1
    start = 0
    stop = p.Tk
    full = 0
    rest = p.Tk // BN
    if LEFT:
        start = tl.maximum(first + p.offset - p.left, 0) // BN
        full = tl.maximum(tl.cdiv(tl.maximum(last + p.offset - p.left, 0), BN), start)
    if RIGHT:
        stop = tl.minimum(tl.maximum(last + p.offset + p.right + 1, 0), p.Tk)
        rest = tl.minimum(tl.maximum(first + p.offset + p.right + 1, 0) // BN, rest)
    stop = tl.maximum(tl.cdiv(stop, BN), start)
    full = tl.minimum(full, stop)
    rest = tl.maximum(rest, full)
    return start, full, rest, stop


@triton.jit
def key_tile(p, b, h, block, n, BN: tl.constexpr):
    """The first key of place n."""
    if p.rows_order is not None:
        n = tl.load(at(p.rows_order, b, h, block, n + 0 * block))
    return n * BN


@triton.jit
def query_tiles(p, b, h, block, LEFT: tl.constexpr, RIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The blocks of BM queries that a block of keys visits, as `key_tiles`."""
    if p.columns_order is not None:
        counts = at(p.columns_counts, b, h, block, 0 * block)
        mixed = tl.load(counts)
        both = tl.load(counts + p.columns_counts.j)
        return 0, mixed, both, both
    first = block * BN
    last = tl.minimum(first + BN, p.Tk) - 1
    start = 0
    stop = p.Tq
    full = 0
    rest = tl.where(first + BN <= p.Tk, p.Tq // BM, 0)
    if RIGHT:  # query i reads key j from i = j - right - offset on
        start = tl.maximum(first - p.right - p.offset, 0) // BM
        full = tl.maximum(tl.cdiv(tl.maximum(last - p.right - p.offset, 0), BM), start)
    if LEFT:
        stop = tl.minimum(tl.maximum(last + p.left - p.offset + 1, 0), p.Tq)
        rest = tl.minimum(tl.maximum(first + p.left - p.offset + 1, 0) // BM, rest)
    stop = tl.maximum(tl.cdiv(stop, BM), start)
    full = tl.minimum(full, stop)
    rest = tl.maximum(rest, full)
    return start, full, rest, stop


@triton.jit
def query_tile(p, b, h, block, n, BM: tl.constexpr):
    """The first query of place n."""
    if p.columns_order is not None:
        n = tl.load(at(p.columns_order, b, h, block, n + 0 * block))
    return n * BM


# --- dropout ----------------------------------------------------------------------------------------------------------


@triton.jit
def mixed(a):
    """MurmurHash3's finaliser in 32 bits, as in regard/_dropout.py."""
    a = (a ^ (a >> 16)) * 0x85EBCA6B
    a = (a ^ (a >> 13)) * 0xC2B2AE35
    return a ^ (a >> 16)


@triton.jit
def dropout_factor(p, b, h, rows, cols):
    """0 where a weight is dropped, else 1/(1 - dropout)."""
    state = tl.load(at(p.dropout_key, b, h, b * 0, b * 0)).to(tl.uint32)
    of_row = mixed(state ^ mixed(rows.to(tl.uint32) + 0x9E3779B9))
    hashed = mixed(of_row ^ mixed(cols.to(tl.uint32) + 0x9E3779B9))
    return tl.where(hashed >= p.threshold.to(tl.uint32), p.kept_scale, 0.0)
