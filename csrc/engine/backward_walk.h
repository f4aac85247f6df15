// The walk of the backward pass over keys and rows, shared by all regularizers.
//
// No weight of the forward pass was saved: weights are computed again from the dual of each row, which was saved in two
// parts.
//   A task has one key/value head and one chunk of its keys. For each query head that reads it, for each batch of rows:
//     prepare Q^T and dO^T (lanes = rows), Q and dO as rows, and what each row adds to its gradient (`prepare`)
//     for each block of keys in the chunk, for each block of rows that may read it (`block`):
//       p, then dV += P^T dO, dK += G^T Q, dQ += G K, where G = tau dL/ds
// A chunk owns its keys, so dK and dV are summed in one fixed order. Rows get one part of dQ per chunk; Python adds the
// parts in order. The number of chunks depends on the shape alone, so threads never change a result. The factors scale
// and 1/tau are multiplied into the rows of Q, and into dQ at the end. kl/backward.h and links/backward.h implement
// `prepare` and `block`.
// T is the type of keys and values in the products: R, or Bf16 for the products of bf16_tiles.h. There, rows of Q and dO
// are pairs as well, and the factors scale and 1/tau are multiplied into G before it is rounded.
#pragma once
#include "engine/arena.h"
#include "engine/bf16_tiles.h"
#include "engine/gate.h"
#include "engine/prior_gradients.h"
#include "engine/rows.h"
#include "engine/selected_lists.h"
#include "engine/sparse_rows.h"
#include "engine/threads.h"
#include "engine/tiles.h"

namespace {

constexpr int64_t BACKWARD_KEYS = 96;    // keys per block
constexpr int64_t WINDOW_KEYS = 256;     // at least so many keys at a time, where rows have saved lists
constexpr int64_t BATCH_ROWS = 960;      // rows per batch: their transposes fit the second-level cache
constexpr int64_t LIST_BYTES = 1 << 21;  // of the lists of selected keys of a batch

// A block of rows in the backward pass.
template <class R> struct BackwardRows {
  static constexpr int NV = 3, L = Simd<R>::N * NV;
  using V = Vec<R>;
  Rows<R, NV> rows;
  int64_t chunk;             // of keys, which the sums are of
  V peak[NV], rest[NV];      // the dual in base 2, in two parts. Rows without keys have rest = +inf (KL) or -inf: p = 0
  V a[NV], b[NV];            // see kl/backward.h and links/backward.h
  V edge[NV], per_mass[NV];  // not KL: pairs with x at or below `edge` have no weight; 1/mass
  V inverse_tau[NV], lambda[NV];  // lambda: the dual itself, not in base 2
  V sum_g[NV], sum_gs[NV], sum_gd[NV], sum_ps[NV], sum_pd[NV], sum_gp[NV], sum_ga[NV];
  V sum_gl[regard::LINK_PARAMETERS][NV];
  R dot[L];
  Mask<R> prior_only[NV];  // rows that have the weights of their prior (links/price_search.h)
  V prior_offset[NV];
  bool some_prior_only, has_prior_offset;
  bool idle;        // whether some row has no key
  SparseKeys keys;  // the saved lists of the rows, if any (sparse_rows.h)
  const R *x;
  int64_t next[L], end[L];            // the first key not yet visited, and the end of the list
  R *qt, *d_out_t, *q, *d_out, *dqt;  // Q^T (rows with lists: Q), dO^T, scale/tau Q, dO, dQ^T
  R *dq;                              // not KL: what single pairs add to dQ
  V score_factor[NV];                 // bfloat16 only, where qt, d_out_t, q and d_out are pairs (bf16_tiles.h)
};

// What the products of bfloat16 need besides: the keys in pairs, those of them that are read, G in pairs of keys, P and
// G in pairs of rows, and rows before they are paired.
struct PairPanels {
  static constexpr int64_t PAIRS = BACKWARD_KEYS / 2 + 1, L = BackwardRows<float>::L;
  Pair *k, *k_admitted, *g;
  Bf16 *p_rows, *g_rows, *spare;
  int64_t skip;  // the place of the block's first key among the keys in pairs
  void take(Arena &arena, const Problem &p) {
    k = arena.take<Pair>(PAIRS * p.D), k_admitted = arena.take<Pair>(PAIRS * p.D), g = arena.take<Pair>(PAIRS * L);
    p_rows = arena.take<Bf16>(BACKWARD_KEYS * L), g_rows = arena.take<Bf16>(BACKWARD_KEYS * L);
    spare = arena.take<Bf16>(L * even(max_of(p.D, p.Dv)));
  }
  static int64_t bytes(const Problem &p) {
    return PAIRS * (2 * p.D + L) * (int64_t)sizeof(Pair) +
           (2 * BACKWARD_KEYS * L + L * even(max_of(p.D, p.Dv))) * (int64_t)sizeof(Bf16) + 6 * 64;
  }
};

template <class R> struct BackwardPanels {
  static constexpr int64_t SIZE = BACKWARD_KEYS * BackwardRows<R>::L;
  R *x, *u, *gate, *bias, *score, *slope, *spare, *kept, *dk, *dv, *k_spare, *v_spare, *k_padded, *v_padded;
  uint8_t *live;
  uint64_t *bits;  // the lanes that give weight to each key
  PairPanels pairs;
  BackwardPanels(Arena &arena, const Problem &p, bool paired) {
    if (paired) pairs.take(arena, p);
    R **panels[] = {&x, &u, &gate, &bias, &score, &slope, &spare, &kept};
    for (R **panel : panels) *panel = arena.take<R>(SIZE);
    dk = arena.take<R>(BACKWARD_KEYS * padded<R>(p.D)), dv = arena.take<R>(BACKWARD_KEYS * padded<R>(p.Dv));
    k_spare = arena.take<R>(BACKWARD_KEYS * p.D), v_spare = arena.take<R>(BACKWARD_KEYS * p.Dv);
    k_padded = arena.take<R>(BACKWARD_KEYS * padded<R>(p.D)), v_padded = arena.take<R>(BACKWARD_KEYS * padded<R>(p.Dv));
    live = arena.take<uint8_t>(BACKWARD_KEYS), bits = arena.take<uint64_t>(BACKWARD_KEYS);
  }
  static int64_t bytes(const Problem &p, bool paired) {
    return (paired ? PairPanels::bytes(p) : 0) +
           (8 * SIZE + BACKWARD_KEYS * (2 * padded<R>(p.D) + 2 * padded<R>(p.Dv) + p.D + p.Dv)) * (int64_t)sizeof(R) +
           9 * BACKWARD_KEYS + 1280;
  }
};

// What differs between the regularizers. `prepare` fills in a, b and the dual of each row. `block` adds what one block
// of keys and one block of rows contribute to the gradients: k and v point at key `first`, dk and dv at its sums.
template <class R, class T> struct BackwardKernels {
  void (*prepare)(const Problem &p, BackwardRows<R> &r);
  void (*block)(const Problem &p, const Terms &terms, BackwardRows<R> &r, int64_t first, int64_t keys, const T *k,
                int64_t k_stride, const T *v, int64_t v_stride, R *dk, R *dv, BackwardPanels<R> &s);
};

// The dot product of a and a row of a tensor that begins at element `at`.
template <class R> R dot(const R *a, const Tensor &t, int64_t at, int64_t n) {
  if (t.s3 == 1 && t.type == (sizeof(R) == 4 ? regard::F32 : regard::F64)) return dot(a, (const R *)t.data + at, n);
  R total = 0;
  for (int64_t d = 0; d < n; ++d) total += a[d] * of_row<R>(t, at + d * t.s3);
  return total;
}

// Point r at the saved lists of its rows, from key `lo` on.
template <class R> void open_sparse_rows(const Problem &p, BackwardRows<R> &r, int64_t lo) {
  constexpr int L = BackwardRows<R>::L;
  const SparseRows<R, L> lists(p, p.saved_lists, r.rows);
  if (!lists.some()) return;
  r.keys = lists.keys(), r.x = lists.with_x() ? lists.x() : nullptr;
  for (int i = 0; i < L; ++i) {
    r.end[i] = lists.ends()[i + 1];
    int64_t from = lists.ends()[i], to = r.end[i];
    while (from < to) {
      const int64_t middle = (from + to) / 2;
      if (r.keys[middle] < lo)
        from = middle + 1;
      else
        to = middle;
    }
    r.next[i] = from;
  }
}

// Point r at the lists of the keys that its rows selected, from key `lo` on. `to` has room for all of them.
template <class R> void open_selected_rows(const Problem &p, BackwardRows<R> &r, int64_t lo, int32_t *to) {
  constexpr int L = BackwardRows<R>::L;
  const int64_t longest = longest_selection(p);
  r.keys = {to, true}, r.x = nullptr;
  for (int i = 0; i < L; ++i) {
    int32_t *list = to + i * longest;
    const int64_t n = i < r.rows.n ? selected_keys<true>(p, r.rows, i, list, (int64_t)1) : 0;
    int64_t from = 0;
    while (from < n && list[from] < lo) ++from;
    r.next[i] = i * longest + from, r.end[i] = i * longest + n;
  }
}

// Q and dO in pairs: transposed, and in pairs of rows in place of the rows themselves.
inline void pair_backward_rows(const Problem &p, const Terms &terms, BackwardRows<float> &r, Bf16 *spare) {
  constexpr int NV = 3, N = Simd<float>::N, L = N * NV;
  const Rows<float, NV> &rows = r.rows;
  const auto both = [&](const Tensor &t, int64_t D, float *transposed, float *pairs) {
    pair_lanes<NV>(rows, t, D, (Pair *)transposed, spare);
    for (int i = 0; i < rows.n; ++i)  // a query that reads no key may hold anything
      if (&t == &p.query && of_row<float>(p.saved_peak, rows.at(p.saved_peak, i)) == -INF<float>)
        memset(spare + i * even(D), 0, even(D) * sizeof(Bf16));
    memset(pairs, 0, L / 2 * padded<float>(D) * sizeof(Pair));
    pair_rows(spare, even(D), rows.n, D, (Pair *)pairs, padded<float>(D));
  };
  both(p.query, p.D, r.qt, r.q);
  if (p.grad_out) both(p.grad_out, p.Dv, r.d_out_t, r.d_out);
  for (int i = 0; i < L; ++i) r.score_factor[i / N][i % N] = rows.factor(p, terms, i);
}

// Transposes and copies of Q and dO, then `prepare`.
template <class R, class T>
void prepare_rows(const Problem &p, const Terms &terms, const BackwardKernels<R, T> &kernels, BackwardRows<R> &r,
                  BackwardPanels<R> &s) {
  constexpr int L = BackwardRows<R>::L;
  const Rows<R, 3> &rows = r.rows;
  const int64_t Dp = padded<R>(p.D), Dvp = padded<R>(p.Dv);
  r.idle = false;
  if (!r.keys) memset(r.dqt, 0, L * p.D * sizeof(R));
  memset(r.q, 0, L * Dp * sizeof(R)), memset(r.d_out, 0, L * Dvp * sizeof(R));
  const auto factor = [&](int i) { return rows.factor(p, terms, i); };
  if (r.keys)
    rows.gather_rows(p.query, p.D, r.qt, Dp, factor);
  else if (!PAIRED<T>)
    rows.transpose(p.query, p.D, r.qt, factor);
  for (int i = 0; i < rows.n && !PAIRED<T>; ++i)
    copy<R>(p.query.data, p.query.type, rows.at(p.query, i), p.query.s3, p.D, r.q + i * Dp, 1,
            (R)p.scale / rows.temperature[i]);
  if (p.grad_out) {
    if (!r.keys && !PAIRED<T>) rows.transpose(p.grad_out, p.Dv, r.d_out_t, [](int) { return (R)1; });
    for (int i = 0; i < rows.n; ++i)
      copy<R>(p.grad_out.data, p.grad_out.type, rows.at(p.grad_out, i), p.grad_out.s3, p.Dv, r.d_out + i * Dvp, 1,
              (R)1);
  }
  for (int n = 0; n < 3; ++n)
    r.peak[n] = Vec<R>{}, r.rest[n] = broadcast(INF<R>), r.a[n] = r.b[n] = r.inverse_tau[n] = r.lambda[n] = Vec<R>{};
  for (int n = 0; n < 3; ++n)
    r.sum_g[n] = r.sum_gs[n] = r.sum_gd[n] = r.sum_ps[n] = r.sum_pd[n] = r.sum_gp[n] = r.sum_ga[n] = Vec<R>{};
  for (auto &sums : r.sum_gl)
    for (Vec<R> &sum : sums) sum = Vec<R>{};
  kernels.prepare(p, r);
  if constexpr (PAIRED<T>) pair_backward_rows(p, terms, r, s.pairs.spare);
}

// Clear what keys of density 0 add to the gradients of queries, keys and values: they have no weight. Their part in the
// gradient of the density is known by then.
template <class R>
void clear_silent_keys(const Problem &p, const BackwardRows<R> &r, int64_t first, int64_t keys, BackwardPanels<R> &s) {
  constexpr int N = Simd<R>::N, L = BackwardRows<R>::L;
  fill_density(p, r.rows, first, keys, s.spare);
  R *panels[] = {s.x, s.u, s.kept};
  for (int64_t at = 0; at < keys * L; at += N) {
    const Mask<R> silent = load(s.spare + at) == (R)0;
    for (R *panel : panels) {
      const Vec<R> x = load(panel + at);
      store(panel + at, (silent & (x == x)) ? Vec<R>{} : x);
    }
  }
}

template <class R, class T> struct BackwardPartition {
  static constexpr int L = BackwardRows<R>::L;
  int64_t batch, keys;  // blocks of rows per batch, keys per chunk
  bool selected;        // whether rows have lists of the keys that they selected
  explicit BackwardPartition(const Problem &p) : selected(lists_selection(p)) {
    batch = min_of(BATCH_ROWS / L, (p.Tq + L - 1) / L);
    if (selected) batch = max_of((int64_t)1, min_of(batch, LIST_BYTES / (L * longest_selection(p) * 4)));
    keys = (p.Tk + p.chunks - 1) / p.chunks;
    keys = (keys + BACKWARD_KEYS - 1) / BACKWARD_KEYS * BACKWARD_KEYS;
  }
  int64_t block_bytes(const Problem &p) const {
    return L * (4 * padded<R>(p.D) + 2 * padded<R>(p.Dv)) * (int64_t)sizeof(R) + (int64_t)sizeof(BackwardRows<R>) +
           512 + (selected ? L * longest_selection(p) * 4 : 0);
  }
  int64_t thread_bytes(const Problem &p) const {
    return (batch * block_bytes(p) + BackwardPanels<R>::bytes(p, PAIRED<T>) + 63) / 64 * 64;
  }
  int64_t bytes(const Problem &p) const { return p.threads * thread_bytes(p) + 128; }
};

// Whether some row may read a key of a chunk by band and map of tiles. If none may, rows need no preparation.
template <class R> bool reads_chunk(const Problem &p, const BackwardRows<R> &r, int64_t lo, int64_t hi) {
  const int64_t from = max_of(lo, r.rows.lo), to = min_of(hi, r.rows.hi);
  return from < to && (!p.tile_map || tiles_of(p, r.rows, from, to - from).some);
}

// What rows that read no key of a chunk add to the gradients.
template <class R> void write_nothing(const Problem &p, const BackwardRows<R> &r, int64_t chunk) {
  const int64_t rows = p.B * p.H * p.Tq, first = r.rows.flat(p, 0), at = chunk * rows + first;
  const auto clear = [&](int64_t to, int64_t place, int64_t each) {
    if (to) memset((R *)to + place * each, 0, r.rows.n * each * sizeof(R));
  };
  clear(p.dq, at, p.D);
  const int64_t sums[] = {p.row_g, p.row_gs, p.row_gd, p.row_ps, p.row_pd, p.row_gp, p.row_ga};
  for (int64_t sum : sums) clear(sum, at, 1);
  for (int64_t m = 0; m < p.link_parameters; ++m) clear(p.row_gl, (chunk * p.link_parameters + m) * rows + first, 1);
}

// The gradients from one chunk of keys of one key/value head.
template <class R, class T>
void backward_chunk(const Problem &p, const Terms &terms, int64_t b, int64_t kv, int64_t chunk, Arena arena,
                    const BackwardKernels<R, T> &kernels) {
  constexpr int L = BackwardRows<R>::L, N = Simd<R>::N;
  const BackwardPartition<R, T> partition(p);
  const bool linked = p.family != regard::KL, by_pairs = linked || partition.selected;
  const int64_t group = p.H / p.Hkv, Dp = padded<R>(p.D), Dvp = padded<R>(p.Dv);
  const int64_t lo = chunk * partition.keys, hi = min_of(p.Tk, lo + partition.keys);
  const int64_t first_row = (b * p.Hkv + kv) * p.Tk + lo, own = max_of((int64_t)0, hi - lo);
  if (p.dk) memset((R *)p.dk + first_row * p.D, 0, own * p.D * sizeof(R));
  if (p.dv) memset((R *)p.dv + first_row * p.Dv, 0, own * p.Dv * sizeof(R));
  BackwardPanels<R> panels(arena, p, PAIRED<T>);
  const Arena rest = arena;
  const bool as_they_lie =
      !PAIRED<T> && readable_in_place<R>(p.key, p.D) && readable_in_place<R>(p.value, p.Dv) && p.D == Dp && p.Dv == Dvp;
  BackwardRows<R> *blocks[BATCH_ROWS / L];
  for (int64_t h = kv * group; h < (kv + 1) * group; ++h)
    for (int64_t batch = 0; batch < p.Tq && !stopped_early(); batch += partition.batch * L) {
      const int64_t end = min_of(p.Tq, batch + partition.batch * L);
      arena = rest;
      int64_t from = hi, to = lo, pairs = 0, n_blocks = 0;
      for (int64_t first = batch; first < end; first += L) {
        Arena room = arena;
        BackwardRows<R> &r = *(blocks[n_blocks] = arena.take<BackwardRows<R>>(1));
        r.rows.place(p, b, kv, h, false, first, min_of((int64_t)L, p.Tq - first));
        if (!p.row_dot && !reads_chunk(p, r, lo, hi)) {
          write_nothing(p, r, chunk);
          arena = room;
          continue;
        }
        ++n_blocks;
        r.qt = arena.take<R>(L * Dp), r.d_out_t = arena.take<R>(L * p.Dv), r.dqt = arena.take<R>(L * p.D);
        r.q = arena.take<R>(L * Dp), r.d_out = arena.take<R>(L * Dvp);
        r.dq = by_pairs ? arena.take<R>(L * Dp) : nullptr;
        r.keys = {}, r.chunk = chunk;
        if (p.saved_lists && !stopped_early()) open_sparse_rows(p, r, lo);
        if (partition.selected && !r.keys) open_selected_rows(p, r, lo, arena.take<int32_t>(L * longest_selection(p)));
        prepare_rows(p, terms, kernels, r, panels);
        if (r.keys && as_they_lie) {
          for (int i = 0; i < L; ++i) pairs += r.end[i] - r.next[i];
          continue;
        }
        from = min_of(from, max_of(lo, r.rows.lo)), to = max_of(to, min_of(hi, r.rows.hi));
      }
      if (as_they_lie && pairs) {
        // In windows of keys, which stay in the cache from row to row, wide enough for some pairs of each row.
        const int64_t window = max_of(WINDOW_KEYS, (p.Tk - lo) * 8 * n_blocks * L / pairs);
        for (int64_t j = lo; j < hi; j += window)
          for (int64_t g = 0; g < n_blocks; ++g) {
            if (!blocks[g]->keys) continue;
            int64_t k_stride, v_stride;
            const int64_t keys = min_of(window, hi - j), at = (b * p.Hkv + kv) * p.Tk + j;
            const T *k = as_rows<R, T>(p.key, b, kv, j, keys, p.D, panels.k_spare, k_stride);
            const T *v = as_rows<R, T>(p.value, b, kv, j, keys, p.Dv, panels.v_spare, v_stride);
            kernels.block(p, terms, *blocks[g], j, keys, k, k_stride, v, v_stride, (R *)p.dk + at * p.D,
                          (R *)p.dv + at * p.Dv, panels);
          }
      }
      for (int64_t j = from; j < to; j += BACKWARD_KEYS) {
        const int64_t keys = min_of(BACKWARD_KEYS, to - j);
        int64_t k_stride, v_stride;
        const T *k, *v;
        if constexpr (PAIRED<T>) {
          k = rows_of_pairs(p.key, b, kv, j, keys, p.D, (Bf16 *)panels.k_spare, k_stride);
          v = rows_of_pairs(p.value, b, kv, j, keys, p.Dv, (Bf16 *)panels.v_spare, v_stride);
          if (p.dq) pair_rows(k, k_stride, keys, p.D, panels.pairs.k, p.D);
        } else {
          k = as_rows<R, T>(p.key, b, kv, j, keys, p.D, panels.k_spare, k_stride);
          v = as_rows<R, T>(p.value, b, kv, j, keys, p.Dv, panels.v_spare, v_stride);
        }
        memset(panels.dk, 0, keys * Dp * sizeof(R)), memset(panels.dv, 0, keys * Dvp * sizeof(R));
        for (int64_t g = 0; g < n_blocks; ++g) {
          BackwardRows<R> &r = *blocks[g];
          const int64_t a = max_of(j, r.rows.lo), z = min_of(j + keys, r.rows.hi), skip = a - j;
          panels.pairs.skip = skip;
          if (a < z && !(r.keys && as_they_lie))
            kernels.block(p, terms, r, a, z - a, k + skip * k_stride, k_stride, v + skip * v_stride, v_stride,
                          panels.dk + skip * Dp, panels.dv + skip * Dvp, panels);
        }
        for (int64_t i = 0; i < keys; ++i) {
          const int64_t at = (b * p.Hkv + kv) * p.Tk + j + i;
          if (p.dk)
            for (int64_t d = 0; d < p.D; ++d) ((R *)p.dk)[at * p.D + d] += panels.dk[i * Dp + d];
          if (p.dv)
            for (int64_t d = 0; d < p.Dv; ++d) ((R *)p.dv)[at * p.Dv + d] += panels.dv[i * Dvp + d];
        }
      }
      for (int64_t g = 0; g < n_blocks; ++g) {
        const BackwardRows<R> &r = *blocks[g];
        R *dq[L], factor[L];
        for (int i = 0; i < r.rows.n; ++i) {
          const int64_t at = chunk * p.B * p.H * p.Tq + r.rows.flat(p, i);
          const bool prior_only = linked && r.prior_only[i / N][i % N];
          dq[i] = (R *)p.dq + at * p.D;
          factor[i] = prior_only ? 0 : PAIRED<T> ? 1 : (R)p.scale / r.rows.temperature[i];
          const R peak = r.peak[i / N][i % N];
          if (peak != peak) factor[i] = peak;  // an invalid row, even if all of its weights are 0
          put(p.row_dot, at, r.dot[i]);
          put(p.row_g, at, prior_only ? 0 : (R)r.sum_g[i / N][i % N]);
          put(p.row_gp, at, linked ? r.sum_gp[i / N][i % N] : r.sum_g[i / N][i % N]);
          put(p.row_ga, at, r.sum_ga[i / N][i % N]);
          for (int64_t m = 0; m < p.link_parameters; ++m)
            put(p.row_gl, (chunk * p.link_parameters + m) * p.B * p.H * p.Tq + r.rows.flat(p, i),
                (R)r.sum_gl[m][i / N][i % N]);
          put(p.row_gs, at, r.sum_gs[i / N][i % N]);
          put(p.row_gd, at, r.sum_gd[i / N][i % N]);
          put(p.row_ps, at, r.sum_ps[i / N][i % N]);
          put(p.row_pd, at, r.sum_pd[i / N][i % N]);
        }
        if (p.dq && !r.keys) to_rows(r.dqt, L, factor, r.rows.n, p.D, dq);
        if (p.dq && by_pairs)
          for (int i = 0; i < r.rows.n; ++i)
            for (int64_t d = 0; d < p.D; ++d) dq[i][d] = (r.keys ? 0 : dq[i][d]) + r.dq[i * Dp + d] * factor[i];
      }
    }
}

template <class R, class T> void run_backward(const Problem &p, const BackwardKernels<R, T> &kernels) {
  const Terms terms(p);
  const BackwardPartition<R, T> partition(p);
  char *scratch = scratch_of(p);
  // Where batch entries or heads add to the same gradient, one task does them one after the other.
  const bool shared = p.captured_shared || (p.dense_g && (!p.dense_g.s0 || !p.dense_g.s1)) ||
                      (p.dense_ds && (!p.dense_ds.s0 || !p.dense_ds.s1));
  const int64_t units = p.B * p.Hkv, turns = shared ? units : 1;
  parallel(p.threads, units * p.chunks / turns, [&](int64_t job, int64_t thread) {
    for (int64_t turn = 0; turn < turns; ++turn) {
      const int64_t unit = shared ? turn : job / p.chunks, chunk = shared ? job : job % p.chunks;
      const Arena arena{scratch + thread * partition.thread_bytes(p)};
      backward_chunk<R, T>(p, terms, unit / p.Hkv, unit % p.Hkv, chunk, arena, kernels);
    }
  });
}

}  // namespace
