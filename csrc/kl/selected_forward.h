// Forward pass of KL over lists of selected keys (engine/selected_lists.h).
//
//   for each row:
//     x <- <q, k> of its own keys
//     p <- 2^(x - max x), and the sums of the row
//     O <- the sum of p v
//   For each block of L rows, sums become output, dual and statistics (results.h).
#pragma once
#include "engine/arena.h"
#include "engine/listed_values.h"
#include "engine/partition.h"
#include "engine/selected_lists.h"
#include "engine/threads.h"
#include "kl/results.h"
#include "kl/row_weights.h"

namespace {

template <class R> struct SelectedPartition : WorkPartition<R, 3> {
  using Base = WorkPartition<R, 3>;
  using Base::L;
  explicit SelectedPartition(const Problem &p) : Base(p) {}
  int64_t thread_bytes(const Problem &p) const {
    const int64_t n = longest_selection(p) + 16, numbers = n + (L + 16) * padded<R>(p.D) + (L + 2) * p.Dv;
    return (numbers * (int64_t)sizeof(R) + n * 4 + (int64_t)sizeof(Rows<R, 3>) + (int64_t)sizeof(RunningSums<R, 3>) +
            64 * 16) /
           64 * 64;
  }
  int64_t bytes(const Problem &p) const { return p.threads * thread_bytes(p) + 128; }
};

// x -> p for row i, whose n keys are in `index`, and its sums. Beyond n, x has room for whole vectors.
template <class R>
void weigh_list(const Problem &p, const RequestedStatistics &want, const Rows<R, 3> &rows, int i, const int32_t *index,
                int64_t n, R *x, RunningSums<R, 3> &sums) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N;
  const int v = i / N, lane = i % N;
  const int64_t width = padded<R>(n);
  for (int64_t t = n; t < width; ++t) x[t] = -INF<R>;
  V tops = broadcast(-INF<R>);
  for (int64_t t = 0; t < width; t += N) tops = vmax(tops, load(x + t));
  const R top = top_lane<R>(tops), safe = top == -INF<R> ? 0 : top;
  if (want.first)
    for (int64_t t = 0; t < n; ++t)
      if (index[t] == 0) sums.first[v][lane] = x[t];
  V e1 = {}, e2 = {};
  const V l = want.moments ? exponentiate_row<R, true, true>(x, width, safe, e1, e2)
                           : exponentiate_row<R, true, false>(x, width, safe, e1, e2);
  sums.m[v][lane] = sums.high[v][lane] = top, sums.l[v][lane] = sum_of_lanes<R>(l);
  sums.e1[v][lane] = sum_of_lanes<R>(e1), sums.e2[v][lane] = sum_of_lanes<R>(e2);
  sums.count[v][lane] = (R)n;
  if (want.collision) {
    V squares = {};
    for (int64_t t = 0; t < width; t += N) squares += load(x + t) * load(x + t);
    sums.collision[v][lane] = sum_of_lanes<R>(squares);
  }
  if (want.spread) {
    const R *squares = (const R *)p.squares.data + p.squares.s0 * rows.b + p.squares.s1 * rows.kv;
    R sum = 0;
    for (int64_t t = 0; t < n; ++t) sum += x[t] * squares[index[t]];
    sums.spread[v][lane] = sum;
  }
  if (want.drop)
    for (int64_t t = 0; t < n; ++t) x[t] *= rows.dropout_factor_at(p, index[t], i);
}

template <class R> void run_forward_selected(const Problem &p) {
  constexpr int NV = 3, N = Simd<R>::N, L = N * NV;
  const Terms terms(p);
  const RequestedStatistics want(p, terms);
  const SelectedPartition<R> partition(p);
  const int64_t longest = longest_selection(p) + 16, Dp = padded<R>(p.D);
  char *scratch = scratch_of(p);
  parallel(p.threads, partition.units * partition.blocks, [&](int64_t job, int64_t thread) {
    Arena arena{scratch + thread * partition.thread_bytes(p)};
    Rows<R, NV> &rows = *arena.take<Rows<R, NV>>(1);
    RunningSums<R, NV> &sums = *arena.take<RunningSums<R, NV>>(1);
    R *x = arena.take<R>(longest);
    int32_t *index = arena.take<int32_t>(longest);
    R *q = arena.take<R>(L * Dp), *spare = arena.take<R>(16 * Dp);
    R *ot = arena.take<R>(L * p.Dv), *out = arena.take<R>(p.Dv), *value = arena.take<R>(p.Dv);
    partition.place_block(p, rows, job / partition.blocks, partition.blocks - 1 - job % partition.blocks);
    sums.clear();
    memset(ot, 0, L * p.Dv * sizeof(R));
    rows.gather_rows(p.query, p.D, q, Dp, [&](int i) { return rows.factor(p, terms, i); });
    for (int i = 0; i < rows.n; ++i) {
      const int64_t n = selected_keys<false>(p, rows, i, index, (int64_t)1);
      if (!n) continue;
      score_list<R, false>(p, rows.b, rows.kv, q + i * Dp, index, (int64_t)1, n, spare, x);
      weigh_list(p, want, rows, i, index, n, x, sums);
      if (!p.out) continue;
      sum_list<R>(p, rows.b, rows.kv, x, nullptr, index, (int64_t)1, n, value, out, nullptr);
      for (int64_t d = 0; d < p.Dv; ++d) ot[d * L + i] = out[d];
    }
    write_results(p, terms, rows, sums, ot);
  });
}

}  // namespace
