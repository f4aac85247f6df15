// Forward pass of KL over lists of selected keys (engine/selected_lists.h).
//
//   for each block of L rows (lanes), for each row:
//     x <- <q, k> of its own keys                   [longest list][L]
//   then the sums and weights of all rows at once, as for a block of keys (`absorb`), and for each row
//     O <- the sum of its weights and values
#pragma once
#include "engine/listed_values.h"
#include "engine/selected_lists.h"
#include "kl/forward.h"

namespace {

template <class R> struct SelectedPartition : WorkPartition<R, 3> {
  using Base = WorkPartition<R, 3>;
  using Base::L;
  explicit SelectedPartition(const Problem &p) : Base(p) {}
  int64_t thread_bytes(const Problem &p) const {
    const int64_t n = longest_selection(p) + 16, numbers = 2 * n * L + n + (L + 16) * padded<R>(p.D) + (L + 1) * p.Dv;
    return (numbers * (int64_t)sizeof(R) + n * L * 4 + (int64_t)sizeof(Rows<R, 3>) +
            (int64_t)sizeof(RunningSums<R, 3>) + 64 * 16) /
           64 * 64;
  }
  int64_t bytes(const Problem &p) const { return p.threads * thread_bytes(p) + 128; }
};

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
    Panels<R, NV> panels(arena, longest);
    int32_t *index = arena.take<int32_t>(longest * L);
    R *q = arena.take<R>(L * Dp), *spare = arena.take<R>(16 * Dp), *products = arena.take<R>(longest);
    R *ot = arena.take<R>(L * p.Dv), *out = arena.take<R>(p.Dv);
    partition.place_block(p, rows, job / partition.blocks, partition.blocks - 1 - job % partition.blocks);
    sums.clear();
    memset(ot, 0, L * p.Dv * sizeof(R));
    rows.gather_rows(p.query, p.D, q, Dp, [&](int i) { return rows.factor(p, terms, i); });
    int64_t length[L] = {}, n = 0;
    for (int i = 0; i < rows.n; ++i) {
      length[i] = selected_keys(p, rows, i, index + i, (int64_t)L);
      score_list<R, false>(p, rows.b, rows.kv, q + i * Dp, index + i, (int64_t)L, length[i], spare, products);
      for (int64_t t = 0; t < length[i]; ++t) panels.x[t * L + i] = products[t], panels.gate[t * L + i] = 0;
      n = max_of(n, length[i]);
    }
    bool full = true;
    for (int i = 0; i < L; ++i) {
      full &= length[i] == n;
      for (int64_t t = length[i]; t < n; ++t)
        panels.x[t * L + i] = panels.gate[t * L + i] = -INF<R>, index[t * L + i] = 0;
    }
    Vec<R> tops[NV];
    for (int v = 0; v < NV; ++v) tops[v] = broadcast(-INF<R>);
    if (n) absorb(p, want, rows, sums, ot, 0, index, n, full ? OPEN : PARTLY, false, tops, panels);
    for (int i = 0; i < rows.n && p.out; ++i) {
      sum_list<R>(p, rows.b, rows.kv, panels.x + i, nullptr, index + i, (int64_t)L, length[i], spare, out, nullptr);
      for (int64_t d = 0; d < p.Dv; ++d) ot[d * L + i] = out[d];
    }
    write_results(p, terms, rows, sums, ot);
  });
}

}  // namespace
