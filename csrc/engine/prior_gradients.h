// Gradients of the structured terms of a prior (prior_terms.h), from G = dL/dlog(pi) of a block of keys and rows.
//
//   table       dL/dtable[d]   = the sum of G along the diagonal of distance d
//   factors     dL/da_i        = sum_j G_ij b_j,    dL/db_j = sum_i G_ij a_i
//   a function  dL/dc[at]      = the sum of G_ij dlog(pi_ij)/dc[at] over the pairs that read c[at]
// A density, a decay and biases need sums over rows, keys or pairs only, which the kernels have.
#pragma once
#include "engine/prior_terms.h"

namespace {

struct PriorGradients {
  bool some;
  explicit PriorGradients(const Problem &p)
      : some(p.relative_g || p.d_query_factor || p.d_key_factor || p.captured_g) {}
};

// A compiled function (src/regard/compiled/pairs.py) that adds G times the derivatives of log pi to the sums of a unit
// of work. Each chunk, batch entry and key/value head has its own sums; where they are shared, each chunk.
template <class R>
using PriorGradient = void (*)(const void *captured, int64_t b, const int64_t *head, const int64_t *position,
                               int64_t first, int64_t keys, int64_t vectors, const R *g, const void *sums,
                               int64_t unit);

template <class R, int NV>
void add_function_gradients(const Problem &p, const Rows<R, NV> &rows, int64_t chunk, int64_t first, int64_t keys,
                            const R *g) {
  const int64_t unit = p.captured_shared ? chunk : (chunk * p.B + rows.b) * p.Hkv + rows.kv;
  const auto call = (PriorGradient<R>)p.function_gradient;
  call((const void *)p.captured, rows.b, rows.head, rows.positions(p).at, first, keys, NV, g,
       (const void *)p.captured_g, unit);
}

// Where the sums of a table begin: each chunk, batch entry and head has its own.
inline double *relative_sums(const Problem &p, int64_t chunk, int64_t b, int64_t head) {
  return (double *)p.relative_g + ((chunk * p.B + b) * p.H + head) * (2 * p.reach + 1);
}

// Add one pair of row `lane` and key j.
template <class R, int NV>
void add_pair_gradients(const Problem &p, const Rows<R, NV> &rows, int64_t chunk, int lane, int64_t j, R g) {
  const int64_t head = rows.head[lane];
  if (p.captured_g) {
    R panel[Simd<R>::N * NV] = {};
    panel[lane] = g;
    add_function_gradients(p, rows, chunk, j, 1, panel);
  }
  if (p.relative_g) {
    const int64_t distance = max_of(-p.reach, min_of(p.reach, j - rows.query[lane] - p.offset));
    relative_sums(p, chunk, rows.b, head)[distance + p.reach] += g;
  }
  const Tensor &a = p.query_factor, &b = p.key_factor;
  R *da = (R *)p.d_query_factor + (chunk * p.B * p.H * p.Tq + rows.flat(p, lane)) * p.rank;
  R *db = (R *)p.d_key_factor + ((rows.b * p.H + head) * p.Tk + j) * p.rank;
  for (int64_t c = 0; c < p.rank && p.d_query_factor; ++c)
    da[c] += g * element<R>(b.data, b.type, b.s0 * rows.b + b.s1 * head + b.s2 * j + b.s3 * c);
  for (int64_t c = 0; c < p.rank && p.d_key_factor; ++c)
    db[c] += g * element<R>(a.data, a.type, rows.at(a, lane) + a.s3 * c);
}

// sums[keys - 1 + d] = the sum of panel[j][j + d] over j, for d from 1 - keys to L - 1. Entries of a diagonal are L + 1
// apart in memory, so neighbouring diagonals are vectors. Where a vector leaves the panel, it is cut: it may read up to
// a vector before or behind the panel.
template <class R, int L> void sum_diagonals(int64_t keys, const R *panel, R *sums) {
  constexpr int N = Simd<R>::N;
  using V = Vec<R>;
  using M = Mask<R>;
  using I = typename Simd<R>::I;
  M lanes;
  for (int i = 0; i < N; ++i) lanes[i] = i;
  for (int64_t d = 1 - keys; d < L; d += N) {
    V sum = {};
    const int64_t from = max_of((int64_t)0, 1 - N - d), to = min_of(keys, L - d);  // some lane is inside
    const int64_t whole = min_of(to, max_of(from, -d)), end = max_of(whole, min_of(to, L - N + 1 - d));  // all are
    const auto cut = [&](int64_t j) {
      const M lane = lanes + (I)(j + d);
      const V x = load(panel + j * (L + 1) + d);
      sum += ((lane >= 0) & (lane < (I)L)) ? x : V{};
    };
    for (int64_t j = from; j < whole; ++j) cut(j);
    for (int64_t j = whole; j < end; ++j) sum += load(panel + j * (L + 1) + d);
    for (int64_t j = end; j < to; ++j) cut(j);
    store(sums + keys - 1 + d, sum);
  }
}

// Add a panel of G, [keys][L]. The rows are consecutive, and lanes without a row hold 0.
template <class R, int NV>
void add_prior_gradients(const Problem &p, const Rows<R, NV> &rows, int64_t chunk, int64_t first, int64_t keys,
                         const R *g) {
  constexpr int N = Simd<R>::N, L = N * NV;
  const int64_t head = rows.head[0];
  if (p.captured_g) add_function_gradients(p, rows, chunk, first, keys, g);
  if (p.relative_g) {
    R sums[GATE_KEYS + L + N];  // by distance, in decreasing order, as in add_relative
    sum_diagonals<R, L>(keys, g, sums);
    double *to = relative_sums(p, chunk, rows.b, head) + p.reach, above = 0, below = 0;
    const int64_t nearest = first + keys - 1 - (rows.query[0] + p.offset);
    const DistanceRange range(nearest, keys + L - 1, p.reach);
    int64_t t = 0;
    for (; t < range.above; ++t) above += sums[t];
    for (; t < range.within; ++t) to[nearest - t] += sums[t];
    for (; t < range.all; ++t) below += sums[t];
    to[p.reach] += above, to[-p.reach] += below;
  }
  if (!(p.d_query_factor || p.d_key_factor)) return;
  for (int64_t from = 0; from < p.rank; from += RANK_STEP) {
    const int64_t columns = min_of(RANK_STEP, p.rank - from);
    if (p.d_query_factor) {
      R of_keys[GATE_KEYS * RANK_STEP], sums[RANK_STEP * L];
      int64_t stride;
      const R *b = factor_rows<R>(p, rows.b, head, first, keys, from, columns, of_keys, stride);
      memset(sums, 0, sizeof sums);
      gather<R, NV>(g, b, stride, keys, columns, sums);
      for (int i = 0; i < rows.n; ++i) {
        R *to = (R *)p.d_query_factor + (chunk * p.B * p.H * p.Tq + rows.flat(p, i)) * p.rank + from;
        for (int64_t c = 0; c < columns; ++c) to[c] += sums[c * L + i];
      }
    }
    if (p.d_key_factor) {
      R lanes[RANK_STEP * L], of_rows[L * RANK_STEP], sums[GATE_KEYS * RANK_STEP];
      factor_lanes<R, NV>(p, rows, from, columns, (R)1, lanes);
      memset(of_rows, 0, sizeof of_rows), memset(sums, 0, keys * RANK_STEP * sizeof(R));
      for (int i = 0; i < rows.n; ++i)
        for (int64_t c = 0; c < columns; ++c) of_rows[i * RANK_STEP + c] = lanes[c * L + i];
      scatter<R, L>(g, of_rows, RANK_STEP, keys, sums);
      R *to = (R *)p.d_key_factor + ((rows.b * p.H + head) * p.Tk + first) * p.rank + from;
      for (int64_t j = 0; j < keys; ++j)
        for (int64_t c = 0; c < columns; ++c) to[j * p.rank + c] += sums[j * RANK_STEP + c];
    }
  }
}

}  // namespace
