// Gradients of the structured terms of a prior (prior_terms.h), from G = dL/dlog(pi) of a block of keys and rows.
//
//   table       dL/dtable[d]   = the sum of G along the diagonal of distance d
//   factors     dL/da_i        = sum_j G_ij b_j,    dL/db_j = sum_i G_ij a_i
// A density, a decay and biases need sums over rows, keys or pairs only, which the kernels have.
#pragma once
#include "engine/prior_terms.h"

namespace {

struct PriorGradients {
  bool some;
  explicit PriorGradients(const Problem &p) : some(p.relative_g || p.d_query_factor || p.d_key_factor) {}
};

// Where the sums of a table begin: each chunk, batch entry and head has its own.
inline double *relative_sums(const Problem &p, int64_t chunk, int64_t b, int64_t head) {
  return (double *)p.relative_g + ((chunk * p.B + b) * p.H + head) * (2 * p.reach + 1);
}

// Add one pair of row `lane` and key j.
template <class R, int NV>
void add_pair_gradients(const Problem &p, const Rows<R, NV> &rows, int64_t chunk, int lane, int64_t j, R g) {
  const int64_t head = rows.head[lane];
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

// Add a panel of G, [keys][L]. The rows are consecutive, and lanes without a row hold 0.
template <class R, int NV>
void add_prior_gradients(const Problem &p, const Rows<R, NV> &rows, int64_t chunk, int64_t first, int64_t keys,
                         const R *g) {
  constexpr int N = Simd<R>::N, L = N * NV;
  const int64_t head = rows.head[0];
  if (p.relative_g) {
    R sums[GATE_KEYS + L];  // by distance, in decreasing order, as in add_relative
    memset(sums, 0, (keys + L) * sizeof(R));
    for (int64_t j = 0; j < keys; ++j)
      for (int n = 0; n < NV; ++n) {
        R *at = sums + keys - 1 - j + n * N;
        store(at, load(at) + load(g + j * L + n * N));
      }
    double *to = relative_sums(p, chunk, rows.b, head) + p.reach;
    const int64_t nearest = first + keys - 1 - (rows.query[0] + p.offset);
    for (int64_t t = 0; t < keys + L - 1; ++t) to[max_of(-p.reach, min_of(p.reach, nearest - t))] += sums[t];
  }
  if (!(p.d_query_factor || p.d_key_factor)) return;
  for (int64_t from = 0; from < p.rank; from += RANK_STEP) {
    const int64_t columns = min_of(RANK_STEP, p.rank - from);
    if (p.d_query_factor) {
      R of_keys[GATE_KEYS * RANK_STEP], sums[RANK_STEP * L];
      factor_rows<R>(p, rows.b, head, first, keys, from, columns, of_keys);
      memset(sums, 0, sizeof sums);
      gather<R, NV>(g, of_keys, RANK_STEP, keys, columns, sums);
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
