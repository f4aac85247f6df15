// Selected blocks of keys, turned around: for each block of keys, the rows that selected it.
//
// Rows that select different blocks share no tile of consecutive rows. But the rows that selected one block of keys,
// gathered from wherever they are, have dense products with it. A block is cut into segments of keys. For a segment:
//   pack its keys and values once: rows, and transposed, with lanes = keys
//   for each group of its rows: S = Q K^T [rows][keys], then what forward or backward pass make of it
// Everything is stored by rows, so rows need not be transposed, and their results are added to them in place. Segments
// follow one another in the order of the keys, so the order of all sums depends on the shape and the selection alone.
#pragma once
#include "engine/arena.h"
#include "engine/selected_lists.h"
#include "engine/tiles.h"

namespace {

constexpr int64_t SEGMENT_KEYS = 64;      // keys in a segment
constexpr int64_t GROUP_ROWS = 48;        // rows in a group
constexpr int64_t SHORTEST_BLOCK = 32;    // blocks of fewer keys are read as lists
constexpr int64_t ENTRY_BYTES = 1 << 22;  // of the rows of all blocks, in one thread
constexpr int64_t FEWEST_ROWS = 1024;     // rows of a head that are served together
constexpr int64_t ROWS_OF_A_BLOCK = 64;   // so many of them select a block on average, if there are enough

inline int64_t blocks_of_keys(const Problem &p) { return (p.Tk + p.selected_block - 1) / p.selected_block; }

// Whether a selection is served by its blocks. Packing a block must be worth while, so some rows must select it.
inline bool turns_selection(const Problem &p) {
  return p.family == regard::KL && !p.dropout_key && lists_selection(p) && p.selected_block >= SHORTEST_BLOCK &&
         p.Tq * p.selections >= 8 * blocks_of_keys(p);
}

// How many rows of a head are served together.
inline int64_t rows_together(const Problem &p) {
  const int64_t wanted = ROWS_OF_A_BLOCK * blocks_of_keys(p) / max_of(p.selections, (int64_t)1);
  const int64_t room = ENTRY_BYTES / 4 / max_of(p.selections, (int64_t)1);
  const int64_t rows = min_of(max_of(wanted, FEWEST_ROWS), max_of(room, (int64_t)1));
  return min_of((rows + GROUP_ROWS - 1) / GROUP_ROWS * GROUP_ROWS, p.Tq);
}

// The range of keys that a query may read by its band.
struct Band {
  int64_t lo, hi;
  Band(const Problem &p, int64_t query)
      : lo(max_of((int64_t)0, query + p.offset - p.left)), hi(min_of(p.Tk, query + p.offset + p.right + 1)) {}
};

// The rows first ... first + count - 1 of a head by the blocks that they selected, from block `least` to `end` - 1:
// those of block c are entries[starts[c - least]] ... in increasing order, as numbers from 0.
struct RowsOfBlocks {
  int32_t *entries, *starts, *seen;
  static int64_t bytes(const Problem &p) {
    return 4 * (rows_together(p) * p.selections + 2 * blocks_of_keys(p) + 2) + 3 * 64;
  }
  RowsOfBlocks(Arena &arena, const Problem &p)
      : entries(arena.take<int32_t>(rows_together(p) * p.selections)),
        starts(arena.take<int32_t>(blocks_of_keys(p) + 2)),
        seen(arena.take<int32_t>(blocks_of_keys(p))) {}

  void fill(const Problem &p, int64_t b, int64_t h, int64_t first, int64_t count, int64_t least, int64_t end) {
    const int64_t blocks = end - least;
    memset(starts, 0, (blocks + 2) * 4);
    // A row may name a block more than once, and one that its band excludes.
    const auto for_each_entry = [&](auto found) {
      for (int64_t c = 0; c < blocks; ++c) seen[c] = -1;
      for (int64_t row = 0; row < count; ++row) {
        const int64_t *index =
            (const int64_t *)p.selected.data + b * p.selected.s0 + h * p.selected.s1 + (first + row) * p.selected.s2;
        const Band band(p, first + row);
        for (int64_t at = 0; at < p.selections; ++at) {
          const int64_t block = index[at * p.selected.s3], c = block - least;
          if (c < 0 || c >= blocks || seen[c] == row) continue;
          seen[c] = (int32_t)row;
          if (block * p.selected_block < band.hi && (block + 1) * p.selected_block > band.lo && band.lo < band.hi)
            found(c, (int32_t)row);
        }
      }
    };
    for_each_entry([&](int64_t c, int32_t) { ++starts[c + 2]; });
    for (int64_t c = 0; c < blocks; ++c) starts[c + 2] += starts[c + 1];
    for_each_entry([&](int64_t c, int32_t row) { entries[starts[c + 1]++] = row; });
  }
};

// One tile of a product of rows: c[m][lanes] = sum_k a(m, k) b[k][lanes], where a(m, k) is a[m * step + k] or, DOWN,
// a[k * step + m]. ADD: c is added to.
template <class R, int ROWS, int NV, bool ADD, bool DOWN>
INLINE void row_tile(const R *a, int64_t step, const R *b, int64_t b_stride, int64_t depth, R *c, int64_t c_stride) {
  constexpr int N = Simd<R>::N;
  Vec<R> sum[ROWS][NV] = {};
  if (ADD)
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) sum[m][n] = load(c + m * c_stride + n * N);
  const auto one = [&](int64_t k) __attribute__((always_inline)) {
    Vec<R> x[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) x[n] = load(b + k * b_stride + n * N);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const Vec<R> factor = broadcast(DOWN ? a[k * step + m] : a[m * step + k]);
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) sum[m][n] = multiply_add(x[n], factor, sum[m][n]);
    }
  };
  by_four(depth, one);
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) store(c + m * c_stride + n * N, sum[m][n]);
}

template <class R, int NV, bool ADD, bool DOWN>
void row_product_part(const R *a, int64_t step, int64_t rows, const R *b, int64_t b_stride, int64_t depth, R *c,
                      int64_t c_stride) {
  constexpr int U = 6;
  const int64_t next = DOWN ? 1 : step;
  int64_t m = 0;
  for (; m + U <= rows; m += U)
    row_tile<R, U, NV, ADD, DOWN>(a + m * next, step, b, b_stride, depth, c + m * c_stride, c_stride);
  for (; m + 2 <= rows; m += 2)
    row_tile<R, 2, NV, ADD, DOWN>(a + m * next, step, b, b_stride, depth, c + m * c_stride, c_stride);
  for (; m < rows; ++m)
    row_tile<R, 1, NV, ADD, DOWN>(a + m * next, step, b, b_stride, depth, c + m * c_stride, c_stride);
}

// The whole product. `width`, a multiple of the vector length, is how many elements the rows of b and c have.
template <class R, bool ADD, bool DOWN>
__attribute__((noinline)) void row_product(const R *a, int64_t step, int64_t rows, const R *b, int64_t b_stride,
                                           int64_t depth, R *c, int64_t c_stride, int64_t width) {
  constexpr int N = Simd<R>::N, NV = SCATTER_VECTORS;
  int64_t d = 0;
  for (; d + NV * N <= width; d += NV * N)
    row_product_part<R, NV, ADD, DOWN>(a, step, rows, b + d, b_stride, depth, c + d, c_stride);
  for (; NV > 2 && d + 2 * N <= width; d += 2 * N)
    row_product_part<R, 2, ADD, DOWN>(a, step, rows, b + d, b_stride, depth, c + d, c_stride);
  for (; d < width; d += N) row_product_part<R, 1, ADD, DOWN>(a, step, rows, b + d, b_stride, depth, c + d, c_stride);
}

// A segment of keys in working memory: keys and values as rows of whole vectors and transposed. Keys that no row of the
// segment may read are 0, because they may hold anything.
template <class R> struct Segment {
  int64_t first, keys, width;  // width: keys in whole vectors
  R *k, *v, *k_lanes, *v_lanes;
  const int64_t Dp, Dvp;
  Segment(Arena &arena, const Problem &p, bool backward)
      : k(arena.take<R>(SEGMENT_KEYS * padded<R>(p.D))),
        v(arena.take<R>(SEGMENT_KEYS * padded<R>(p.Dv))),
        k_lanes(arena.take<R>(SEGMENT_KEYS * p.D)),
        v_lanes(backward ? arena.take<R>(SEGMENT_KEYS * p.Dv) : nullptr),
        Dp(padded<R>(p.D)),
        Dvp(padded<R>(p.Dv)) {}
  static int64_t bytes(const Problem &p) {
    return SEGMENT_KEYS * (padded<R>(p.D) + padded<R>(p.Dv) + p.D + p.Dv) * (int64_t)sizeof(R) + 4 * 64;
  }
  bool whole(const Band &band) const { return band.lo <= first && band.hi >= first + keys; }

  // rows: those that selected the segment's block, from the row `base` of the head on.
  void pack(const Problem &p, int64_t b, int64_t kv, int64_t first_, int64_t keys_, int64_t base, const int32_t *rows,
            int64_t count) {
    first = first_, keys = keys_, width = padded<R>(keys);
    bool live[SEGMENT_KEYS] = {};
    bool all = false;
    for (int64_t i = 0; i < count && !all; ++i) all = whole(Band(p, base + rows[i]));
    for (int64_t i = 0; i < count && !all; ++i) {
      const Band band(p, base + rows[i]);
      for (int64_t j = max_of((int64_t)0, band.lo - first); j < min_of(keys, band.hi - first); ++j) live[j] = true;
    }
    const auto take = [&](const Tensor &t, int64_t D, R *to, int64_t stride) {
      for (int64_t j = 0; j < keys; ++j) {
        R *row = to + j * stride;
        const bool read = all || live[j];
        if (read) copy<R>(t.data, t.type, b * t.s0 + kv * t.s1 + (first + j) * t.s2, t.s3, D, row, 1, (R)1);
        for (int64_t d = read ? D : 0; d < stride; ++d) row[d] = 0;
      }
    };
    const auto turn = [&](const R *from, int64_t stride, int64_t D, R *to) {
      const R *row[SEGMENT_KEYS];
      R one[SEGMENT_KEYS];
      for (int64_t j = 0; j < keys; ++j) row[j] = from + j * stride, one[j] = 1;
      for (int64_t j = to_lanes(row, one, keys, D, to, width); j < keys; ++j)
        for (int64_t d = 0; d < D; ++d) to[d * width + j] = row[j][d];
      for (int64_t d = 0; d < D && keys < width; ++d)
        for (int64_t j = keys; j < width; ++j) to[d * width + j] = 0;
    };
    take(p.key, p.D, k, Dp), turn(k, Dp, p.D, k_lanes);
    take(p.value, p.Dv, v, Dvp);
    if (v_lanes) turn(v, Dvp, p.Dv, v_lanes);
  }

  // x <- -inf where a row may not read a key of the segment, and in lanes without a key. Returns whether there are such.
  bool mask(const Band &band, R *x) const {
    if (whole(band) && keys == width) return false;
    for (int64_t j = 0; j < width; ++j)
      if (j >= keys || first + j < band.lo || first + j >= band.hi) x[j] = -INF<R>;
    return true;
  }
};

// Call f(first, keys, block) for each segment of the keys lo ... hi - 1.
template <class F> void for_each_segment(const Problem &p, int64_t lo, int64_t hi, F f) {
  for (int64_t from = lo; from < hi;) {
    const int64_t block = from / p.selected_block, end = min_of(hi, (block + 1) * p.selected_block);
    for (int64_t j = from; j < end; j += SEGMENT_KEYS) f(j, min_of(SEGMENT_KEYS, end - j), block);
    from = end;
  }
}

// Rows of a tensor that begins at element `at`, in whole vectors, each with a factor.
template <class R, class F>
void gather_group(const Tensor &t, int64_t at, const int32_t *rows, int64_t n, int64_t D, int64_t Dp, R *to, F factor) {
  for (int64_t i = 0; i < n; ++i) {
    copy<R>(t.data, t.type, at + rows[i] * t.s2, t.s3, D, to + i * Dp, 1, factor(rows[i]));
    for (int64_t d = D; d < Dp; ++d) to[i * Dp + d] = 0;
  }
}

}  // namespace
