// Forward pass of KL over selected blocks of keys (selected_blocks.h).
//
//   for some rows of a head, for each segment of keys, for each group of the rows that selected it:
//     x  <- Q K^T                        [rows][keys]
//     m' <- max(m, max x)                of each row, from one segment to the next
//     p  <- 2^(x - m');  the sums of the row <- 2^(m - m') times themselves, plus those of p
//     O  <- 2^(m - m') O + P V           in the output itself
//   At the end each row turns its sums into output, dual and statistics (results.h).
#pragma once
#include "engine/partition.h"
#include "engine/threads.h"
#include "kl/results.h"
#include "kl/row_weights.h"
#include "kl/selected_blocks.h"

namespace {

template <class R> struct TurnedPartition {
  int64_t rows, ranges;  // rows of a head that are served together; how often
  explicit TurnedPartition(const Problem &p) : rows(rows_together(p)), ranges((p.Tq + rows - 1) / rows) {}
  static constexpr int SUMS = 9;  // arrays in TurnedSums
  int64_t thread_bytes(const Problem &p) const {
    constexpr int64_t L = Simd<R>::N * 3;
    const int64_t numbers =
        GROUP_ROWS * (1 + padded<R>(p.D) + SEGMENT_KEYS + padded<R>(p.Dv)) + L * p.Dv + SUMS * rows + 2 * L;
    return (RowsOfBlocks::bytes(p) + Segment<R>::bytes(p) + numbers * (int64_t)sizeof(R) + (int64_t)sizeof(Rows<R, 3>) +
            (int64_t)sizeof(RunningSums<R, 3>) + 32 * 64) /
           64 * 64;
  }
  int64_t bytes(const Problem &p) const { return p.threads * thread_bytes(p) + 128; }
};

// The running sums of rows (running_sums.h), one array for each sum.
template <class R> struct TurnedSums {
  R *m, *l, *e1, *e2, *collision, *count, *first, *spread, *factor;
  TurnedSums(Arena &arena, int64_t rows) {
    R **sums[] = {&m, &l, &e1, &e2, &collision, &count, &first, &spread, &factor};
    for (R **sum : sums) *sum = arena.take<R>(rows);
  }
  void clear(int64_t rows) {
    R *zero[] = {l, e1, e2, collision, count, spread};
    for (R *sum : zero) memset(sum, 0, rows * sizeof(R));
    for (int64_t i = 0; i < rows; ++i) m[i] = first[i] = -INF<R>;
  }
};

// A group of n rows and a segment: x becomes p, the sums of the rows follow, and `scale` receives the factors on O.
template <class R>
void absorb_group(const Problem &p, const RequestedStatistics &want, int64_t b, int64_t kv, int64_t base,
                  const int32_t *rows, int64_t n, const Segment<R> &keys, TurnedSums<R> &sums, R *x, R *scale) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N;
  const int64_t width = keys.width;
  R to[GROUP_ROWS], shift[GROUP_ROWS + N] = {};
  bool masked[GROUP_ROWS];
  for (int64_t i = 0; i < n; ++i) {
    R *row = x + i * width;
    masked[i] = keys.mask(Band(p, base + rows[i]), row);
    V top = load(row);
    for (int64_t j = N; j < width; j += N) top = vmax(top, load(row + j));
    const R m = sums.m[rows[i]];
    to[i] = max_of(m, top_lane<R>(top));
    if (to[i] != to[i]) to[i] = m;  // max_of may give either of its arguments; the weights are NaN anyway
    shift[i] = m == -INF<R> ? (to[i] == -INF<R> ? 0 : (R)-1000) : max_of((R)-1000, m - to[i]);
    if (want.first && keys.first == 0) sums.first[rows[i]] = row[0];
  }
  for (int64_t i = 0; i < n; i += N) store(scale + i, vexp2(load(shift + i)));
  V l[4];
  for (int64_t i = 0; i < n; i += 4) {
    for (int64_t u = 0; u < 4; ++u) {
      l[u] = V{};
      if (i + u >= n) continue;
      const int64_t row = rows[i + u];
      const R safe = to[i + u] == -INF<R> ? 0 : to[i + u], r = scale[i + u];
      R *weights = x + (i + u) * width;
      V e1 = {}, e2 = {};
      if (want.moments) {
        l[u] = exponentiate_row<R, true, true>(weights, width, safe, e1, e2);
        const R by = shift[i + u], before = sums.l[row];
        sums.e2[row] = r * (sums.e2[row] + by * (2 * sums.e1[row] + by * before)) + sum_of_lanes<R>(e2);
        sums.e1[row] = r * (sums.e1[row] + by * before) + sum_of_lanes<R>(e1);
      } else {
        l[u] = masked[i + u] ? exponentiate_row<R, true, false>(weights, width, safe, e1, e2)
                             : exponentiate_row<R, false, false>(weights, width, safe, e1, e2);
      }
      sums.m[row] = to[i + u];
      if (want.collision) {
        V squares = {};
        for (int64_t j = 0; j < width; j += N) squares += load(weights + j) * load(weights + j);
        sums.collision[row] = r * r * sums.collision[row] + sum_of_lanes<R>(squares);
      }
      if (want.spread) {
        const R *squares = (const R *)p.squares.data + p.squares.s0 * b + p.squares.s1 * kv + keys.first;
        R sum = 0;
        for (int64_t j = 0; j < keys.keys; ++j) sum += weights[j] * squares[j];
        sums.spread[row] = r * sums.spread[row] + sum;
      }
      if (want.count) {
        const Band band(p, base + row);
        const int64_t read = min_of(keys.first + keys.keys, band.hi) - max_of(keys.first, band.lo);
        sums.count[row] += (R)max_of((int64_t)0, read);
      }
    }
    R added[4];
    add_lanes<R>(l, added);
    for (int64_t u = 0; u < 4 && i + u < n; ++u) sums.l[rows[i + u]] = scale[i + u] * sums.l[rows[i + u]] + added[u];
  }
}

// Rows first ... first + count - 1 of a head.
template <class R>
void attend_turned(const Problem &p, const Terms &terms, const RequestedStatistics &want, int64_t b, int64_t h,
                   int64_t first, int64_t count, Arena arena) {
  constexpr int NV = 3, N = Simd<R>::N, L = N * NV;
  const int64_t kv = h / (p.H / p.Hkv), Dp = padded<R>(p.D), Dvp = padded<R>(p.Dv);
  RowsOfBlocks lists(arena, p);
  Segment<R> keys(arena, p, false);
  TurnedSums<R> sums(arena, rows_together(p));
  R *q = arena.take<R>(GROUP_ROWS * Dp), *x = arena.take<R>(GROUP_ROWS * SEGMENT_KEYS);
  R *o = arena.take<R>(GROUP_ROWS * Dvp), *ot = arena.take<R>(L * p.Dv);
  R *scale = arena.take<R>(GROUP_ROWS + N);
  Rows<R, NV> &rows = *arena.take<Rows<R, NV>>(1);
  RunningSums<R, NV> &block = *arena.take<RunningSums<R, NV>>(1);
  R *out = p.out ? (R *)p.out + ((b * p.H + h) * p.Tq + first) * p.Dv : nullptr;

  lists.fill(p, b, h, first, count, 0, blocks_of_keys(p));
  sums.clear(count);
  if (out) memset(out, 0, count * p.Dv * sizeof(R));
  for (int64_t i = 0; i < count; ++i) {
    const Tensor &t = p.temperature;
    const R tau = t ? element<R>(t.data, t.type, b * t.s0 + h * t.s1 + (first + i) * t.s2) : (R)p.temperature_value;
    sums.factor[i] = (R)p.scale * ((R)LOG2E / tau);
  }
  const int64_t q_at = b * p.query.s0 + h * p.query.s1 + first * p.query.s2;
  for_each_segment(p, 0, p.Tk, [&](int64_t key, int64_t n_keys, int64_t c) {
    const int32_t *entries = lists.entries + lists.starts[c];
    const int64_t all = lists.starts[c + 1] - lists.starts[c];
    if (!all || stopped_early()) return;
    keys.pack(p, b, kv, key, n_keys, first, entries, all);
    for (int64_t from = 0; from < all; from += GROUP_ROWS) {
      const int64_t n = min_of(GROUP_ROWS, all - from);
      const int32_t *group = entries + from;
      gather_group(p.query, q_at, group, n, p.D, Dp, q, [&](int32_t row) { return sums.factor[row]; });
      row_product<R, false, false>(q, Dp, n, keys.k_lanes, keys.width, p.D, x, keys.width, keys.width);
      absorb_group(p, want, b, kv, first, group, n, keys, sums, x, scale);
      if (!out) continue;
      row_product<R, false, false>(x, keys.width, n, keys.v, Dvp, n_keys, o, Dvp, Dvp);
      for (int64_t i = 0; i < n; ++i) {
        R *to = out + group[i] * p.Dv;
        const R *from = o + i * Dvp, r = scale[i];
        for (int64_t d = 0; d < p.Dv; ++d) to[d] = r * to[d] + from[d];
      }
    }
  });
  for (int64_t at = 0; at < count; at += L) {
    const int64_t n = min_of((int64_t)L, count - at);
    rows.place(p, b, kv, h, false, first + at, n);
    block.clear();
    for (int64_t i = 0; i < n; ++i) {
      const int v = (int)i / N, lane = (int)i % N;
      block.m[v][lane] = block.high[v][lane] = sums.m[at + i], block.l[v][lane] = sums.l[at + i];
      block.e1[v][lane] = sums.e1[at + i], block.e2[v][lane] = sums.e2[at + i];
      block.collision[v][lane] = sums.collision[at + i], block.count[v][lane] = sums.count[at + i];
      block.first[v][lane] = sums.first[at + i], block.spread[v][lane] = sums.spread[at + i];
      for (int64_t d = 0; d < p.Dv && out; ++d) ot[d * L + i] = out[(at + i) * p.Dv + d];
    }
    write_results(p, terms, rows, block, ot);
  }
}

template <class R> void run_forward_turned(const Problem &p) {
  const Terms terms(p);
  const RequestedStatistics want(p, terms);
  const TurnedPartition<R> partition(p);
  char *scratch = scratch_of(p);
  parallel(p.threads, p.B * p.H * partition.ranges, [&](int64_t job, int64_t thread) {
    const int64_t unit = job / partition.ranges, range = partition.ranges - 1 - job % partition.ranges;
    const int64_t first = range * partition.rows;
    attend_turned<R>(p, terms, want, unit / p.H, unit % p.H, first, min_of(partition.rows, p.Tq - first),
                     Arena{scratch + thread * partition.thread_bytes(p)});
  });
}

}  // namespace
