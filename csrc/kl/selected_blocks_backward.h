// Backward pass of KL over selected blocks of keys (selected_blocks.h).
//
//   for each chunk of keys, for each query head that reads them, for some rows of it:
//     prepare what each row adds to its gradient, as kl/backward.h does
//     for each segment of keys, for each group of the rows that selected it:
//       x <- Q K^T;  u <- dO V^T                                 [rows][keys]
//       p <- 2^(x - peak - rest);  G <- p (u - a - b log2 p)
//       dV += P^T dO;  dK += G^T Q;  dQ += G K
// Q is multiplied by scale log2(e)/tau, so dK lacks a factor ln(2), which it is multiplied by at the end. A chunk owns
// its keys, and rows get one part of dQ per chunk (engine/backward_walk.h).
#pragma once
#include "kl/backward.h"
#include "kl/selected_blocks.h"

namespace {

template <class R> struct TurnedBackwardPartition {
  int64_t rows, keys;  // rows of a head that are served together; keys in a chunk, which are whole blocks
  explicit TurnedBackwardPartition(const Problem &p) : rows(rows_together(p)) {
    keys = (p.Tk + p.chunks - 1) / p.chunks;
    keys = (keys + p.selected_block - 1) / p.selected_block * p.selected_block;
  }
  static constexpr int NUMBERS = 9;  // arrays in TurnedRows
  int64_t thread_bytes(const Problem &p) const {
    constexpr int64_t L = BackwardRows<R>::L;
    const int64_t Dp = padded<R>(p.D), Dvp = padded<R>(p.Dv), widest = max_of(Dp, Dvp);
    const int64_t numbers = GROUP_ROWS * (Dp + Dvp + widest + 2 * SEGMENT_KEYS) + SEGMENT_KEYS * (Dp + Dvp) + L * Dvp +
                            NUMBERS * (rows + L);
    return (RowsOfBlocks::bytes(p) + Segment<R>::bytes(p) + numbers * (int64_t)sizeof(R) +
            (int64_t)sizeof(BackwardRows<R>) + 32 * 64) /
           64 * 64;
  }
  int64_t bytes(const Problem &p) const { return p.threads * thread_bytes(p) + 128; }
};

// What prepare_kl knows of each row, and the sums of each row, one array for each.
template <class R> struct TurnedRows {
  R *factor, *inverse_tau, *peak, *rest, *a, *b, *sum_g, *sum_gs, *sum_ps;
  TurnedRows(Arena &arena, int64_t rows) {
    R **numbers[] = {&factor, &inverse_tau, &peak, &rest, &a, &b, &sum_g, &sum_gs, &sum_ps};
    for (R **some : numbers) *some = arena.take<R>(rows);
  }

  void prepare(const Problem &p, const Terms &terms, int64_t b_, int64_t h, int64_t chunk, int64_t first, int64_t count,
               BackwardRows<R> &r, R *q, R *d_out) {
    constexpr int NV = 3, N = Simd<R>::N, L = N * NV;
    const int64_t Dvp = padded<R>(p.Dv);
    r.q = q, r.d_out = d_out, r.keys = {};
    for (int64_t at = 0; at < count; at += L) {
      r.rows.place(p, b_, h / (p.H / p.Hkv), h, false, first + at, min_of((int64_t)L, count - at));
      if (p.grad_out) r.rows.gather_rows(p.grad_out, p.Dv, d_out, Dvp, [](int) { return (R)1; });
      for (int n = 0; n < NV; ++n)
        r.peak[n] = Vec<R>{}, r.rest[n] = broadcast(INF<R>), r.a[n] = r.b[n] = r.inverse_tau[n] = Vec<R>{};
      prepare_kl<R>(p, r);
      for (int i = 0; i < r.rows.n; ++i) {
        const int n = i / N, lane = i % N;
        factor[at + i] = r.rows.factor(p, terms, i), inverse_tau[at + i] = r.inverse_tau[n][lane];
        peak[at + i] = r.peak[n][lane], rest[at + i] = r.rest[n][lane];
        a[at + i] = r.a[n][lane], b[at + i] = r.b[n][lane];
        sum_g[at + i] = sum_gs[at + i] = sum_ps[at + i] = 0;
        put(p.row_dot, chunk * p.B * p.H * p.Tq + r.rows.flat(p, i), r.dot[i]);
      }
    }
  }
};

// A group of n rows and a segment: x becomes p and u becomes G; the sums that were requested follow.
template <class R>
void weigh_group(const Problem &p, int64_t b, int64_t h, int64_t base, const int32_t *group, int64_t n,
                 const Segment<R> &keys, TurnedRows<R> &rows, bool sums, R *x, R *u) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N;
  const int64_t width = keys.width;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = group[i];
    R *weights = x + i * width, *utility = u + i * width;
    const bool masked = keys.mask(Band(p, base + row), weights);
    const R peak = rows.peak[row], rest = rows.rest[row], a = rows.a[row], slope = rows.b[row];
    V g_sum = {}, gs_sum = {}, ps_sum = {};
    const auto some = [&](int64_t j, auto count, auto exact) __attribute__((always_inline)) {
      constexpr int U = decltype(count)::value;
      constexpr bool ZERO = decltype(exact)::value;
      V t[U], w[U], score[U];
#pragma GCC unroll 8
      for (int m = 0; m < U; ++m) {
        score[m] = load(weights + j + m * N) - peak - rest;
        t[m] = vmax(broadcast(FLOOR<R, ZERO>), score[m]);
      }
      vexp2<ZERO>(t, w);
#pragma GCC unroll 8
      for (int m = 0; m < U; ++m) {
        V g = w[m] * (load(utility + j + m * N) - a - slope * t[m]);
        if (ZERO) g = w[m] == 0 ? V{} : g;  // the value of a masked key may be anything; a NaN weight stays NaN
        store(weights + j + m * N, w[m]), store(utility + j + m * N, g);
        if (!sums) continue;
        const V s = w[m] == 0 ? V{} : score[m];
        g_sum += g, gs_sum += g * s, ps_sum += w[m] * s;
      }
    };
    const auto all = [&](auto exact) __attribute__((always_inline)) {
      int64_t j = 0;
      for (; j + 4 * N <= width; j += 4 * N) some(j, Constant<4>(), exact);
      for (; j < width; j += N) some(j, Constant<1>(), exact);
    };
    masked ? all(Constant<true>()) : all(Constant<false>());
    if (!sums) continue;
    const R unit = rows.factor[row] / (R)p.scale;  // from scores to x
    rows.sum_g[row] += sum_of_lanes<R>(g_sum);
    rows.sum_gs[row] += sum_of_lanes<R>(gs_sum) / unit, rows.sum_ps[row] += sum_of_lanes<R>(ps_sum) / unit;
    if (p.key_mass) {
      R *mass = (R *)p.key_mass + (b * p.H + h) * p.Tk + keys.first;
      for (int64_t j = 0; j < keys.keys; ++j) mass[j] += weights[j];
    }
  }
}

// The gradients from one chunk of keys of one key/value head.
template <class R>
void backward_turned(const Problem &p, const Terms &terms, int64_t b, int64_t kv, int64_t chunk, Arena arena) {
  constexpr int64_t L = BackwardRows<R>::L;
  static_assert(L <= GROUP_ROWS, "prepare_kl clears rows of q");
  const TurnedBackwardPartition<R> partition(p);
  const int64_t group_heads = p.H / p.Hkv, Dp = padded<R>(p.D), Dvp = padded<R>(p.Dv), block = p.selected_block;
  const int64_t lo = min_of(p.Tk, chunk * partition.keys), hi = min_of(p.Tk, lo + partition.keys);
  const bool sums = sums_requested(p), d_values = p.dv && p.grad_out;
  RowsOfBlocks lists(arena, p);
  Segment<R> keys(arena, p, true);
  TurnedRows<R> rows(arena, partition.rows);
  BackwardRows<R> &r = *arena.take<BackwardRows<R>>(1);
  R *d_out_rows = arena.take<R>(L * Dvp), *q = arena.take<R>(GROUP_ROWS * Dp), *d_out = arena.take<R>(GROUP_ROWS * Dvp);
  R *x = arena.take<R>(GROUP_ROWS * SEGMENT_KEYS), *u = arena.take<R>(GROUP_ROWS * SEGMENT_KEYS);
  R *dq_part = arena.take<R>(GROUP_ROWS * max_of(Dp, Dvp));
  R *dk = arena.take<R>(SEGMENT_KEYS * Dp), *dv = arena.take<R>(SEGMENT_KEYS * Dvp);
  const int64_t first_key = (b * p.Hkv + kv) * p.Tk;
  if (p.dk) memset((R *)p.dk + (first_key + lo) * p.D, 0, (hi - lo) * p.D * sizeof(R));
  if (p.dv) memset((R *)p.dv + (first_key + lo) * p.Dv, 0, (hi - lo) * p.Dv * sizeof(R));
  for (int64_t h = kv * group_heads; h < (kv + 1) * group_heads; ++h)
    for (int64_t first = 0; first < p.Tq && !stopped_early(); first += partition.rows) {
      const int64_t count = min_of(partition.rows, p.Tq - first), least = lo / block;
      const int64_t at = ((chunk * p.B + b) * p.H + h) * p.Tq + first;  // of the rows in results
      R *dq = p.dq ? (R *)p.dq + at * p.D : nullptr;
      if (dq) memset(dq, 0, count * p.D * sizeof(R));
      rows.prepare(p, terms, b, h, chunk, first, count, r, q, d_out_rows);
      lists.fill(p, b, h, first, count, least, max_of(least, (hi + block - 1) / block));
      const int64_t q_at = b * p.query.s0 + h * p.query.s1 + first * p.query.s2;
      const int64_t d_out_at = b * p.grad_out.s0 + h * p.grad_out.s1 + first * p.grad_out.s2;
      for_each_segment(p, lo, hi, [&](int64_t key, int64_t n_keys, int64_t c) {
        const int32_t *entries = lists.entries + lists.starts[c - least];
        const int64_t all = lists.starts[c - least + 1] - lists.starts[c - least];
        if (!all || stopped_early()) return;
        keys.pack(p, b, kv, key, n_keys, first, entries, all);
        const int64_t width = keys.width;
        if (p.dk) memset(dk, 0, n_keys * Dp * sizeof(R));
        if (d_values) memset(dv, 0, n_keys * Dvp * sizeof(R));
        for (int64_t from = 0; from < all; from += GROUP_ROWS) {
          const int64_t n = min_of(GROUP_ROWS, all - from);
          const int32_t *group = entries + from;
          gather_group(p.query, q_at, group, n, p.D, Dp, q, [&](int32_t row) { return rows.factor[row]; });
          row_product<R, false, false>(q, Dp, n, keys.k_lanes, width, p.D, x, width, width);
          if (p.grad_out) {
            gather_group(p.grad_out, d_out_at, group, n, p.Dv, Dvp, d_out, [](int32_t) { return (R)1; });
            row_product<R, false, false>(d_out, Dvp, n, keys.v_lanes, width, p.Dv, u, width, width);
          } else {
            memset(u, 0, n * width * sizeof(R));
          }
          weigh_group(p, b, h, first, group, n, keys, rows, sums, x, u);
          if (d_values) row_product<R, true, true>(x, width, n_keys, d_out, Dvp, n, dv, Dvp, Dvp);
          if (p.dk) row_product<R, true, true>(u, width, n_keys, q, Dp, n, dk, Dp, Dp);
          if (!dq) continue;
          row_product<R, false, false>(u, width, n, keys.k, Dp, n_keys, dq_part, Dp, Dp);
          for (int64_t i = 0; i < n; ++i) {
            R *to = dq + group[i] * p.D;
            const R *part = dq_part + i * Dp, factor = (R)p.scale * rows.inverse_tau[group[i]];
            for (int64_t d = 0; d < p.D; ++d) to[d] += part[d] * factor;
          }
        }
        for (int64_t j = 0; j < n_keys; ++j) {
          const int64_t to = first_key + key + j;
          if (p.dk)
            for (int64_t d = 0; d < p.D; ++d) ((R *)p.dk)[to * p.D + d] += (R)LN2 * dk[j * Dp + d];
          if (d_values)
            for (int64_t d = 0; d < p.Dv; ++d) ((R *)p.dv)[to * p.Dv + d] += dv[j * Dvp + d];
        }
      });
      for (int64_t i = 0; i < count; ++i) {
        const R peak = rows.peak[i];
        if (dq && peak != peak)  // an invalid row, even if all of its weights are 0
          for (int64_t d = 0; d < p.D; ++d) dq[i * p.D + d] = peak;
        put(p.row_g, at + i, rows.sum_g[i]), put(p.row_gp, at + i, rows.sum_g[i]);
        put(p.row_gs, at + i, rows.sum_gs[i]), put(p.row_ps, at + i, rows.sum_ps[i]);
      }
    }
}

template <class R> void run_backward_turned(const Problem &p) {
  const Terms terms(p);
  const TurnedBackwardPartition<R> partition(p);
  char *scratch = scratch_of(p);
  parallel(p.threads, p.B * p.Hkv * p.chunks, [&](int64_t job, int64_t thread) {
    const int64_t unit = job / p.chunks, chunk = job % p.chunks;
    backward_turned<R>(p, terms, unit / p.Hkv, unit % p.Hkv, chunk,
                       Arena{scratch + thread * partition.thread_bytes(p)});
  });
}

}  // namespace
