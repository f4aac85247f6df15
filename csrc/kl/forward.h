// Forward pass of KL (softmax and its relatives): one pass over the keys for each block of rows.
//
//   for each block of L rows (lanes), for each block of keys that some row may read:
//     gate  <- the log-prior in base 2, if there is one here              [keys][L]
//     x     <- exponents: Q K^T, softcap, bias, temperature, gate         [keys][L]
//     m'    <- max x if that is far above m, else m; all sums are scaled by 2^(m - m')
//     p     <- 2^(x - m'); sums of p, p t, p t^2 with t = x - m'          (for entropy and variance)
//     O^T   <- O^T + P^T V                                                [Dv][L]
//   At the end each row turns its sums into output, dual and statistics (results.h).
// Decoding has few rows and many keys. There, query heads that share a key head are rows of one block, and the keys are
// split into parts. The number of parts depends on the shape alone and they are merged in order, so threads never
// change a result. Both products are in forward_products.h, for rows that fit one vector, for bfloat16 and for the rest.
#pragma once
#include "engine/arena.h"
#include "engine/gate.h"
#include "engine/partition.h"
#include "engine/threads.h"
#include "kl/forward_products.h"
#include "kl/results.h"
#include "kl/running_sums.h"

namespace {

// How far x may exceed the reference m before the sums are rescaled to a new one. Rescaling is a pass over O. Without
// slack it would happen in most blocks of keys, because one of the L rows mostly finds a larger score.
constexpr int SLACK = 4;
constexpr int64_t ROW_BLOCKS = 4;  // blocks of rows that share a block of keys while it is in the cache

// Where weights are stored: in place of x, or rounded and in pairs of keys (bf16_tiles.h).
template <class R, int L> struct InPlace {
  R *x;
  template <int U> INLINE void put(int64_t j, const Vec<R> (&p)[U]) {
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) store(x + (j + u) * L, p[u]);
  }
  template <int NV> void add_to(RunningSums<R, NV> &, int) const {}
};
template <int L> struct InPairs {
  Pair *pairs;
  Vec<float> used = {};
  template <int U> INLINE void put(int64_t j, const Vec<float> (&p)[U]) {  // j is even
    const PairVec both = round_pairs(p[0], U > 1 ? p[U - 1] : Vec<float>{});
    store_pairs(pairs + j / 2 * L, both);
    used = add_pairs(used, both);
  }
  template <int NV> void add_to(RunningSums<float, NV> &sums, int n) const { sums.used[n] += used; }
};

// x -> p for one vector of rows. The sums of a block are computed on their own and then added, which makes the chains of
// rounding errors shorter.
template <class R, int NV, bool MOMENTS, bool ZERO, class Place>
__attribute__((noinline)) void exponentiate(RunningSums<R, NV> &sums, int n, Vec<R> safe, int64_t keys, const R *x,
                                            Place place) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  V l = {}, e1 = {}, e2 = {};
  const auto some = [&](int64_t j, auto count) {
    constexpr int U = decltype(count)::value;
    V t[U], p[U];
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) t[u] = vmax(broadcast(FLOOR<R, ZERO>), load(x + (j + u) * L + n * N) - safe);
    vexp2<ZERO>(t, p);
    place.put(j, p);
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      l += p[u];
      if (MOMENTS) {
        const V pt = p[u] * t[u];
        e1 += pt;
        e2 += pt * t[u];
      }
    }
  };
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2) some(j, Constant<2>());  // four at once do not fit into 16 registers
  for (; j < keys; ++j) some(j, Constant<1>());
  sums.l[n] += l;
  if (MOMENTS) sums.e1[n] += e1, sums.e2[n] += e2;
  place.add_to(sums, n);
}

// Add `keys` rows of the panel x to the sums, and turn x into weights. Row j is key first + j or, if `index` is given, a
// key of its own in each lane. tops: the largest x, if it is known already (`plain`).
template <class R, int NV>
void absorb(const Problem &p, const RequestedStatistics &want, const Rows<R, NV> &rows, RunningSums<R, NV> &sums, R *ot,
            int64_t first, const int32_t *index, int64_t keys, Gate gate, bool plain, Vec<R> *tops,
            Panels<R, NV> &panels) {
  using V = Vec<R>;
  using M = Mask<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  R *x = panels.x;
  for (int n = 0; n < NV; ++n) {
    if (!plain)
      for (int64_t j = 0; j < keys; ++j) tops[n] = vmax(tops[n], load(x + j * L + n * N));
    const V high = vmax(sums.high[n], tops[n]);
    sums.high[n] = high;
    if (want.first && index) {  // lists are in increasing order of the keys
      for (int i = 0; i < N; ++i)
        if (index[n * N + i] == 0) sums.first[n][i] = x[n * N + i];
    } else if (want.first && first == 0) {
      sums.first[n] = load(x + n * N);
    }
    // The anchor moves with the heaviest key. Where no anchor is needed, the reference may stay up to SLACK below.
    const M higher = high > sums.m[n] + (R)(want.apart ? 0 : SLACK);
    const V to = higher ? high : sums.m[n];
    if (want.apart) {
      V anchor = sums.anchor[n];
      for (int64_t j = 0; j < keys; ++j) {
        const V s = load(panels.score + j * L + n * N), e = load(x + j * L + n * N);
        sums.top[n] = e > -INF<R> ? vmax(sums.top[n], s) : sums.top[n];
        anchor = (higher & (e == to)) ? s : anchor;
      }
      sums.move_anchor(n, anchor);
    }
    if (any(higher)) {
      const V r = sums.raise(n, to);
      rescale<R, NV>(ot, p.Dv, n, r);
    }
    const V safe = to == -INF<R> ? V{} : to;
    const auto exponentiate_to = [&](auto place) {
      if (gate != PARTLY)
        want.moments ? exponentiate<R, NV, true, false>(sums, n, safe, keys, x, place)
                     : exponentiate<R, NV, false, false>(sums, n, safe, keys, x, place);
      else
        want.moments ? exponentiate<R, NV, true, true>(sums, n, safe, keys, x, place)
                     : exponentiate<R, NV, false, true>(sums, n, safe, keys, x, place);
    };
    if constexpr (HAS_PAIRS && sizeof(R) == 4 && NV > 1)
      panels.pairs ? exponentiate_to(InPairs<L>{panels.pairs + n * N}) : exponentiate_to(InPlace<R, L>{x + n * N});
    else
      exponentiate_to(InPlace<R, L>{x + n * N});
    if (want.apart) {
      V y1 = {}, y2 = {};
      for (int64_t j = 0; j < keys; ++j) {
        const V w = load(x + j * L + n * N);
        const V s = w > 0 ? load(panels.score + j * L + n * N) - sums.anchor[n] : V{};
        y1 += w * s, y2 += w * s * s;
      }
      sums.y1[n] += y1, sums.y2[n] += y2;
    }
    if (want.collision)
      for (int64_t j = 0; j < keys; ++j) sums.collision[n] += load(x + j * L + n * N) * load(x + j * L + n * N);
    if (want.spread) {
      const R *squares = (const R *)p.squares.data + p.squares.s0 * rows.b + p.squares.s1 * rows.kv;
      for (int64_t j = 0; j < keys; ++j) {
        V square;
        if (index)
          for (int i = 0; i < N; ++i) square[i] = squares[index[j * L + n * N + i]];
        else
          square = broadcast(squares[first + j]);
        sums.spread[n] += load(x + j * L + n * N) * square;
      }
    }
    if (want.count) {
      if (gate != PARTLY)
        sums.count[n] += (R)keys;
      else
        for (int64_t j = 0; j < keys; ++j)
          sums.count[n] -= __builtin_convertvector(load(panels.gate + j * L + n * N) > -INF<R>, V);
    }
    if (want.prior_mass) {
      V top = sums.prior_top[n];
      for (int64_t j = 0; j < keys; ++j) top = vmax(top, load(panels.gate + j * L + n * N));
      const V safe = sums.raise_prior(n, top);
      for (int64_t j = 0; j < keys; ++j) sums.prior_sum[n] += vexp2(load(panels.gate + j * L + n * N) - safe);
    }
    if (want.drop)
      for (int64_t j = 0; j < keys; ++j)
        for (int i = 0; i < N; ++i) {
          const int64_t at = j * L + n * N + i;
          x[at] *= rows.dropout_factor_at(p, index ? (int64_t)index[at] : first + j, n * N + i);
        }
  }
}

// One block of rows and `keys` of the keys that `products` has, from the one at `skip` on, which is key `first`.
template <class Products, class R, int NV>
void attend(const Problem &p, const Terms &terms, const RequestedStatistics &want, const Rows<R, NV> &rows,
            RunningSums<R, NV> &sums, const R *q, R *ot, int64_t first, int64_t skip, int64_t keys, Products &products,
            Panels<R, NV> &panels) {
  const Gate gate = fill_gate(p, terms, rows, first, keys, panels.gate, panels.bias, panels.spare, panels.live);
  if (gate == CLOSED) return;
  Vec<R> tops[NV];
  for (int n = 0; n < NV; ++n) tops[n] = broadcast(-INF<R>);
  const bool plain = NV > 1 && gate == OPEN && terms.folded;  // the product finds the largest x on its way
  products.scores(p, rows, q, skip, keys, panels.x, plain, tops);
  if (gate != OPEN || !terms.folded)
    apply_bias_and_mask(p, terms, rows, keys, panels.x, gate != OPEN ? panels.gate : nullptr, panels.bias,
                        want.apart ? panels.score : nullptr, (R *)nullptr);
  products.prepare(panels, want, skip);
  absorb(p, want, rows, sums, ot, first, (const int32_t *)nullptr, keys, gate, plain, tops, panels);
  if (p.out) products.gather(p, rows, sums, skip, keys, gate == PARTLY ? panels.live : nullptr, panels, ot);
}

// The partition of the forward pass.
template <class Products> struct ForwardPartition : WorkPartition<typename Products::R, Products::VECTORS> {
  using R = typename Products::R;
  static constexpr int NV = Products::VECTORS;
  using Base = WorkPartition<R, NV>;
  using Base::blocks, Base::L, Base::units;
  int64_t task_blocks, tasks;  // blocks of rows in one task; tasks of a unit
  int64_t splits, keys;        // parts of the keys, and keys in each part

  explicit ForwardPartition(const Problem &p) : Base(p) {
    // Few rows are all in one task, so that the keys are read once.
    task_blocks = min_of(ROW_BLOCKS, p.Tq < 16 ? blocks : max_of((int64_t)1, units * blocks / 32));
    tasks = (blocks + task_blocks - 1) / task_blocks;
    splits = min_of((64 + units * tasks - 1) / (units * tasks), max_of((int64_t)1, p.Tk / 512));
    if (units * tasks >= 32) splits = 1;
    keys = (p.Tk + splits - 1) / splits;
    keys = (keys + KEY_BLOCK<NV> - 1) / KEY_BLOCK<NV> * KEY_BLOCK<NV>;
  }
  // Memory of a block of rows: queries, output, sums.
  int64_t block_bytes(const Problem &p) const {
    return (Products::query_size(p) + L * p.Dv) * sizeof(R) + sizeof(Rows<R, NV>) + sizeof(RunningSums<R, NV>) + 512;
  }
  int64_t thread_bytes(const Problem &p) const {
    return task_blocks * block_bytes(p) + 5 * Panels<R, NV>::SIZE * sizeof(R) + Products::bytes(p) + KEY_BLOCK<NV> +
           1024;
  }
  int64_t part_bytes(const Problem &p) const {
    return splits > 1 ? (L * p.Dv * (int64_t)sizeof(R) + (int64_t)sizeof(RunningSums<R, NV>) + 63) / 64 * 64 : 0;
  }
  int64_t parts() const { return units * tasks * task_blocks * splits; }
  int64_t bytes(const Problem &p) const { return p.threads * thread_bytes(p) + parts() * part_bytes(p) + 128; }
};

template <class Products> void run_forward_kl(const Problem &p) {
  using R = typename Products::R;
  constexpr int NV = Products::VECTORS;
  using RowsOf = Rows<R, NV>;
  using SumsOf = RunningSums<R, NV>;
  const Terms terms(p);
  const RequestedStatistics want(p, terms);
  const ForwardPartition<Products> partition(p);
  constexpr int L = RowsOf::L;
  char *scratch = scratch_of(p);
  char *parts = scratch + p.threads * partition.thread_bytes(p) / 64 * 64 + 64;
  const int64_t part_bytes = partition.part_bytes(p), jobs = partition.units * partition.tasks * partition.splits;
  const int64_t all_blocks = partition.blocks;

  parallel(p.threads, jobs, [&](int64_t job, int64_t thread) {
    const int64_t split = job % partition.splits,
                  task = partition.tasks - 1 - job / partition.splits % partition.tasks;  // longest rows first
    const int64_t unit = job / partition.splits / partition.tasks;
    Arena arena{scratch + thread * (partition.thread_bytes(p) / 64 * 64)};
    Panels<R, NV> panels(arena);
    if (NV == 1) memset(panels.x, 0, Panels<R, NV>::SIZE * sizeof(R));  // lanes without a row are never written
    Products products(arena, p);
    RowsOf *rows[ROW_BLOCKS];
    SumsOf *sums[ROW_BLOCKS];
    R *q[ROW_BLOCKS], *ot[ROW_BLOCKS];
    int64_t lo = p.Tk, hi = 0;
    const int64_t first_block = task * partition.task_blocks,
                  blocks = min_of(partition.task_blocks, all_blocks - first_block);
    for (int64_t g = 0; g < blocks; ++g) {
      rows[g] = arena.take<RowsOf>(1), sums[g] = arena.take<SumsOf>(1);
      q[g] = arena.take<R>(Products::query_size(p)), ot[g] = arena.take<R>(L * p.Dv);
      partition.place_block(p, *rows[g], unit, first_block + g);
      sums[g]->clear();
      memset(ot[g], 0, L * p.Dv * sizeof(R));
      products.take_rows(p, terms, *rows[g], q[g]);
      lo = min_of(lo, rows[g]->lo), hi = max_of(hi, rows[g]->hi);
    }
    lo = max_of(lo, split * partition.keys), hi = min_of(hi, (split + 1) * partition.keys);
    for (int64_t from = lo; from < hi; from += Products::KEY_STEP) {
      const int64_t keys = min_of(Products::KEY_STEP, hi - from);
      products.take_keys(p, rows[0]->b, rows[0]->kv, from, keys);
      for (int64_t g = 0; g < blocks; ++g) {
        const int64_t a = max_of(from, rows[g]->lo), z = min_of(from + keys, rows[g]->hi);
        if (a < z) attend(p, terms, want, *rows[g], *sums[g], q[g], ot[g], a, a - from, z - a, products, panels);
      }
    }
    for (int64_t g = 0; g < blocks; ++g) {
      if (partition.splits == 1) {
        Products::finish(p, *rows[g], *sums[g], ot[g]);
        write_results(p, terms, *rows[g], *sums[g], ot[g]);
      } else {
        char *part =
            parts + ((unit * partition.tasks * partition.task_blocks + first_block + g) * partition.splits + split) *
                        part_bytes;
        memcpy(part, sums[g], sizeof(SumsOf));
        memcpy(part + sizeof(SumsOf), ot[g], L * p.Dv * sizeof(R));
      }
    }
  });
  if (partition.splits == 1) return;
  parallel(p.threads, partition.units * all_blocks, [&](int64_t job, int64_t) {
    const int64_t unit = job / all_blocks, block = job % all_blocks;
    RowsOf rows;
    partition.place_block(p, rows, unit, block);
    char *part = parts + (unit * partition.tasks * partition.task_blocks + block) * partition.splits * part_bytes;
    SumsOf *sums = (SumsOf *)part;
    R *ot = (R *)(part + sizeof(SumsOf));
    for (int64_t split = 1; split < partition.splits; ++split) {
      char *other = part + split * part_bytes;
      sums->merge(*(SumsOf *)other, ot, (R *)(other + sizeof(SumsOf)), p.Dv);
    }
    Products::finish(p, rows, *sums, ot);
    write_results(p, terms, rows, *sums, ot);
  });
}

}  // namespace
