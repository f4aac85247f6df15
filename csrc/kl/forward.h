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
// change a result. Rows that fit one vector (NV = 1) take their products from decode.h, and O is in rows: [L][Dv].
#pragma once
#include "engine/arena.h"
#include "engine/gate.h"
#include "engine/partition.h"
#include "engine/threads.h"
#include "engine/tiles.h"
#include "kl/decode.h"
#include "kl/results.h"
#include "kl/running_sums.h"

namespace {

// Keys per block. For few rows (NV = 1) their values, 4 KiB at D = 64, stay in the first-level cache until they are
// used. Measured with keys in memory: float32 with 32 keys instead of 16 is a tenth slower.
template <int NV> constexpr int64_t KEY_BLOCK = NV == 1 ? 32 : 96;
template <int NV, class T> constexpr int64_t KEY_STEP = NV == 1 && sizeof(T) > 2 ? 16 : KEY_BLOCK<NV>;
// How far x may exceed the reference m before the sums are rescaled to a new one. Rescaling is a pass over O. Without
// slack it would happen in most blocks of keys, because one of the L rows mostly finds a larger score.
constexpr int SLACK = 4;
constexpr int64_t ROW_BLOCKS = 4;  // blocks of rows that share a block of keys while it is in the cache

// The panels of one thread.
template <class R, int NV> struct Panels {
  static constexpr int64_t SIZE = KEY_BLOCK<NV> * Simd<R>::N * NV;
  R *x, *gate, *bias, *score, *spare;
  uint8_t *live;
  explicit Panels(Arena &arena)
      : x(arena.take<R>(SIZE)),
        gate(arena.take<R>(SIZE)),
        bias(arena.take<R>(SIZE)),
        score(arena.take<R>(SIZE)),
        spare(arena.take<R>(SIZE)),
        live(arena.take<uint8_t>(KEY_BLOCK<NV>)) {}
  // Panels for lists of `n` keys, which have no prior.
  Panels(Arena &arena, int64_t n)
      : x(arena.take<R>(n * Simd<R>::N * NV)),
        gate(arena.take<R>(n * Simd<R>::N * NV)),
        bias(nullptr),
        score(nullptr),
        spare(nullptr),
        live(nullptr) {}
};

// x -> p in place, for one vector of rows. The sums of a block are computed on their own and then added, which makes
// the chains of rounding errors shorter.
template <class R, int NV, bool MOMENTS, bool ZERO>
__attribute__((noinline)) void exponentiate(RunningSums<R, NV> &sums, int n, Vec<R> safe, int64_t keys, R *x) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  V l = {}, e1 = {}, e2 = {};
  const auto some = [&](int64_t j, auto count) {
    constexpr int U = decltype(count)::value;
    V t[U], p[U];
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) t[u] = vmax(broadcast(FLOOR<R, ZERO>), load(x + (j + u) * L + n * N) - safe);
    vexp2<ZERO>(t, p);
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      store(x + (j + u) * L + n * N, p[u]);
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
    if (gate == OPEN)
      want.moments ? exponentiate<R, NV, true, false>(sums, n, safe, keys, x)
                   : exponentiate<R, NV, false, false>(sums, n, safe, keys, x);
    else
      want.moments ? exponentiate<R, NV, true, true>(sums, n, safe, keys, x)
                   : exponentiate<R, NV, false, true>(sums, n, safe, keys, x);
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
      if (gate == OPEN)
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

// One block of keys for one block of rows; k and v point at key `first`. T is their type: R unless NV = 1.
template <class R, int NV, class T>
void attend(const Problem &p, const Terms &terms, const RequestedStatistics &want, const Rows<R, NV> &rows,
            RunningSums<R, NV> &sums, const R *qt, R *ot, int64_t first, int64_t keys, const T *k, int64_t k_stride,
            const T *v, int64_t v_stride, Panels<R, NV> &panels) {
  constexpr int L = Simd<R>::N * NV;
  R *x = panels.x;
  const Gate gate = fill_gate(p, terms, rows, first, keys, panels.gate, panels.bias, panels.spare, panels.live);
  if (gate == CLOSED) return;
  Vec<R> tops[NV];
  for (int n = 0; n < NV; ++n) tops[n] = broadcast(-INF<R>);
  const bool plain = NV > 1 && gate == OPEN && terms.folded;  // the product finds the largest x on its way
  const int64_t some = (rows.n + 3) / 4 * 4;                  // rows, rounded up as decode.h needs it
  if constexpr (NV == 1)
    decode_scores(qt, some, p.D, k, k_stride, keys, x, L, v, v_stride, p.Dv);
  else if (plain)
    scores<R, NV, true>(qt, k, k_stride, p.D, keys, x, tops);
  else
    scores<R, NV, false>(qt, k, k_stride, p.D, keys, x);
  if (gate == PARTLY || !terms.folded)
    apply_bias_and_mask(p, terms, rows, keys, x, gate == PARTLY ? panels.gate : nullptr, panels.bias,
                        want.apart ? panels.score : nullptr, (R *)nullptr);
  absorb(p, want, rows, sums, ot, first, (const int32_t *)nullptr, keys, gate, plain, tops, panels);
  if (p.out)
    for_each_live_run(gate == PARTLY ? panels.live : nullptr, keys, [&](int64_t from, int64_t to) {
      if constexpr (NV == 1)
        decode_gather(x + from * L, L, some, v + from * v_stride, v_stride, to - from, p.Dv, ot,
                      k + (keys + from) * k_stride, k_stride, p.D);
      else
        gather<R, NV>(x + from * L, v + from * v_stride, v_stride, to - from, p.Dv, ot);
    });
}

// The partition of the forward pass.
template <class R, int NV> struct ForwardPartition : WorkPartition<R, NV> {
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
  // Memory of a block of rows: transposed queries, transposed output, sums.
  int64_t block_bytes(const Problem &p) const {
    return L * (p.D + p.Dv) * sizeof(R) + sizeof(Rows<R, NV>) + sizeof(RunningSums<R, NV>) + 512;
  }
  int64_t thread_bytes(const Problem &p) const {
    return task_blocks * block_bytes(p) + (5 * Panels<R, NV>::SIZE + KEY_BLOCK<NV> * (p.D + p.Dv)) * sizeof(R) +
           KEY_BLOCK<NV> + 1024;
  }
  int64_t part_bytes(const Problem &p) const {
    return splits > 1 ? (L * p.Dv * (int64_t)sizeof(R) + (int64_t)sizeof(RunningSums<R, NV>) + 63) / 64 * 64 : 0;
  }
  int64_t parts() const { return units * tasks * task_blocks * splits; }
  int64_t bytes(const Problem &p) const { return p.threads * thread_bytes(p) + parts() * part_bytes(p) + 128; }
};

template <class R, int NV, class T> void run_forward_kl(const Problem &p) {
  using RowsOf = Rows<R, NV>;
  using SumsOf = RunningSums<R, NV>;
  const Terms terms(p);
  const RequestedStatistics want(p, terms);
  const ForwardPartition<R, NV> partition(p);
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
    R *k_spare = arena.take<R>(KEY_BLOCK<NV> * p.D), *v_spare = arena.take<R>(KEY_BLOCK<NV> * p.Dv);
    RowsOf *rows[ROW_BLOCKS];
    SumsOf *sums[ROW_BLOCKS];
    R *qt[ROW_BLOCKS], *ot[ROW_BLOCKS];
    int64_t lo = p.Tk, hi = 0;
    const int64_t first_block = task * partition.task_blocks,
                  blocks = min_of(partition.task_blocks, all_blocks - first_block);
    for (int64_t g = 0; g < blocks; ++g) {
      rows[g] = arena.take<RowsOf>(1), sums[g] = arena.take<SumsOf>(1);
      qt[g] = arena.take<R>(L * p.D), ot[g] = arena.take<R>(L * p.Dv);
      partition.place_block(p, *rows[g], unit, first_block + g);
      sums[g]->clear();
      memset(ot[g], 0, L * p.Dv * sizeof(R));
      if constexpr (NV == 1) {
        rows[g]->gather_rows(p.query, p.D, qt[g], p.D, [&](int i) { return rows[g]->factor(p, terms, i); });
        deinterleave<R, T>(qt[g], rows[g]->n, p.D);
      } else
        rows[g]->transpose(p.query, p.D, qt[g], [&](int i) { return rows[g]->factor(p, terms, i); });
      lo = min_of(lo, rows[g]->lo), hi = max_of(hi, rows[g]->hi);
    }
    lo = max_of(lo, split * partition.keys), hi = min_of(hi, (split + 1) * partition.keys);
    for (int64_t from = lo; from < hi; from += KEY_STEP<NV, T>) {
      const int64_t keys = min_of(KEY_STEP<NV, T>, hi - from);
      int64_t k_stride, v_stride;
      const T *k = as_rows<R, T>(p.key, rows[0]->b, rows[0]->kv, from, keys, p.D, k_spare, k_stride);
      const T *v = as_rows<R, T>(p.value, rows[0]->b, rows[0]->kv, from, keys, p.Dv, v_spare, v_stride);
      for (int64_t g = 0; g < blocks; ++g) {
        const int64_t a = max_of(from, rows[g]->lo), z = min_of(from + keys, rows[g]->hi);
        if (a < z)
          attend(p, terms, want, *rows[g], *sums[g], qt[g], ot[g], a, z - a, k + (a - from) * k_stride, k_stride,
                 v + (a - from) * v_stride, v_stride, panels);
      }
    }
    for (int64_t g = 0; g < blocks; ++g) {
      if (partition.splits == 1) {
        if (NV == 1) interleave<R, T>(ot[g], rows[g]->n, p.Dv);
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
    if (NV == 1) interleave<R, T>(ot, rows.n, p.Dv);
    write_results(p, terms, rows, *sums, ot);
  });
}

}  // namespace
