// The two products of the forward pass of KL, S = Q K^T and O += P V, in three ways.
//
//   LaneProducts   rows as lanes, numbers of R (tiles.h)
//   DecodeProducts few rows, lanes along d, keys and values of T as they are stored (decode.h)
//   PairProducts   rows as lanes, bfloat16 in pairs (bf16_tiles.h)
// One object per thread. `take_rows` prepares the queries of a block of rows, `take_keys` a block of keys. Then `scores`
// and `gather` are the products with `keys` of these keys, from the one at `skip` on. A query has query_size elements of
// R, the output is [Dv][L] or, for few rows, [L][Dv]. `finish` completes the output of a block of rows.
#pragma once
#include "engine/arena.h"
#include "engine/bf16_tiles.h"
#include "engine/gate.h"
#include "engine/tiles.h"
#include "kl/decode.h"
#include "kl/running_sums.h"

namespace {

// Keys per block. For few rows (NV = 1) their values, 4 KiB at D = 64, stay in the first-level cache until they are
// used. Measured with keys in memory: float32 with 32 keys instead of 16 is a tenth slower.
template <int NV> constexpr int64_t KEY_BLOCK = NV == 1 ? 32 : 96;

// The panels of one thread.
template <class R, int NV> struct Panels {
  static constexpr int64_t SIZE = KEY_BLOCK<NV> * Simd<R>::N * NV;
  R *x, *gate, *bias, *score, *spare;
  uint8_t *live;
  Pair *pairs = nullptr;  // receives the weights in pairs of keys instead of x, if nothing but the product needs them
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

// The rows of a block of keys and of their values.
template <class R, int NV, class T> struct KeyRows {
  static constexpr int L = Simd<R>::N * NV;
  const T *k, *v;
  int64_t k_stride, v_stride;
  R *k_spare, *v_spare;
  KeyRows(Arena &arena, const Problem &p)
      : k_spare(arena.take<R>(KEY_BLOCK<NV> * p.D)), v_spare(arena.take<R>(KEY_BLOCK<NV> * p.Dv)) {}
  static int64_t bytes(const Problem &p) { return KEY_BLOCK<NV> * (p.D + p.Dv) * (int64_t)sizeof(R) + 128; }
  static int64_t query_size(const Problem &p) { return L * p.D; }
  void take_keys(const Problem &p, int64_t b, int64_t kv, int64_t from, int64_t keys) {
    k = as_rows<R, T>(p.key, b, kv, from, keys, p.D, k_spare, k_stride);
    v = as_rows<R, T>(p.value, b, kv, from, keys, p.Dv, v_spare, v_stride);
  }
};

template <class R_, int NV> struct LaneProducts : KeyRows<R_, NV, R_> {
  using R = R_;
  using Base = KeyRows<R, NV, R>;
  using Base::Base, Base::k, Base::k_stride, Base::v, Base::v_stride, Base::L;
  static constexpr int VECTORS = NV;
  static constexpr int64_t KEY_STEP = KEY_BLOCK<NV>;

  void take_rows(const Problem &p, const Terms &terms, const Rows<R, NV> &rows, R *q) const {
    rows.transpose(p.query, p.D, q, [&](int i) { return rows.factor(p, terms, i); });
  }
  // plain: `tops` receives the largest score of each row.
  void scores(const Problem &p, const Rows<R, NV> &, const R *q, int64_t skip, int64_t keys, R *x, bool plain,
              Vec<R> *tops) const {
    if (plain)
      ::scores<R, NV, true>(q, k + skip * k_stride, k_stride, p.D, keys, x, tops);
    else
      ::scores<R, NV, false>(q, k + skip * k_stride, k_stride, p.D, keys, x);
  }
  void gather(const Problem &p, const Rows<R, NV> &, RunningSums<R, NV> &, int64_t skip, int64_t keys,
              const uint8_t *live, Panels<R, NV> &panels, R *ot) const {
    for_each_live_run(live, keys, [&](int64_t from, int64_t to) {
      ::gather<R, NV>(panels.x + from * L, v + (skip + from) * v_stride, v_stride, to - from, p.Dv, ot);
    });
  }
  void prepare(Panels<R, NV> &, const RequestedStatistics &, int64_t) const {}
  static void finish(const Problem &, const Rows<R, NV> &, const RunningSums<R, NV> &, R *) {}
};

template <class R_, class T> struct DecodeProducts : KeyRows<R_, 1, T> {
  using R = R_;
  using Base = KeyRows<R, 1, T>;
  using Base::Base, Base::k, Base::k_stride, Base::v, Base::v_stride, Base::L;
  static constexpr int VECTORS = 1;
  static constexpr int64_t KEY_STEP = sizeof(T) > 2 ? 16 : KEY_BLOCK<1>;

  static int64_t by_fours(const Rows<R, 1> &rows) { return (rows.n + 3) / 4 * 4; }  // as decode.h needs them
  void take_rows(const Problem &p, const Terms &terms, const Rows<R, 1> &rows, R *q) const {
    rows.gather_rows(p.query, p.D, q, p.D, [&](int i) { return rows.factor(p, terms, i); });
    deinterleave<R, T>(q, rows.n, p.D);
  }
  void scores(const Problem &p, const Rows<R, 1> &rows, const R *q, int64_t skip, int64_t keys, R *x, bool,
              Vec<R> *) const {
    decode_scores(q, by_fours(rows), p.D, k + skip * k_stride, k_stride, keys, x, (int64_t)L, v + skip * v_stride,
                  v_stride, p.Dv);
  }
  void gather(const Problem &p, const Rows<R, 1> &rows, RunningSums<R, 1> &, int64_t skip, int64_t keys,
              const uint8_t *live, Panels<R, 1> &panels, R *o) const {
    for_each_live_run(live, keys, [&](int64_t from, int64_t to) {
      decode_gather(panels.x + from * L, (int64_t)L, by_fours(rows), v + (skip + from) * v_stride, v_stride, to - from,
                    p.Dv, o, k + (skip + keys + from) * k_stride, k_stride, p.D);
    });
  }
  void prepare(Panels<R, 1> &, const RequestedStatistics &, int64_t) const {}
  static void finish(const Problem &p, const Rows<R, 1> &rows, const RunningSums<R, 1> &, R *o) {
    interleave<R, T>(o, rows.n, p.Dv);
  }
};

// Whether P V must be in float32, although its inputs are not. The spread of the values is the difference of a statistic
// and the square of the output. The gradients of parameters, which are in float32, are sums of terms that cancel but for
// rounding, if the baseline of the row is right, and that is taken from the output.
inline bool needs_exact_output(const Problem &p) {
  const bool parameters = p.score_bias || p.prior0 || p.slopes || p.level || p.temperature || p.relative ||
                          p.query_factor || p.decay_query || p.density || p.function;
  return p.spread || (p.peak && parameters);  // with `peak`, a gradient may follow
}

// The factors of the scores are at the beginning of a query. The output is divided by the sum of the weights as they
// were rounded for the product, so that it remains an average of values. All else has the sum before rounding.
template <int NV> struct PairProducts {
  using R = float;
  static constexpr int VECTORS = NV, N = Simd<R>::N, L = N * NV;
  static constexpr int64_t KEY_STEP = KEY_BLOCK<NV>, PAIRS = KEY_STEP / 2 + 1;
  const Bf16 *k;
  int64_t k_stride;
  Bf16 *k_spare, *v_spare, *q_spare;
  Pair *v, *v_admitted, *weights;
  const bool exact;
  R *v_exact;
  const R *v_rows;
  int64_t v_stride;
  bool again;  // whether statistics or dropout need the weights in float32, before they are rounded

  PairProducts(Arena &arena, const Problem &p)
      : k_spare(arena.take<Bf16>(KEY_STEP * even(p.D))),
        v_spare(arena.take<Bf16>(KEY_STEP * even(p.Dv))),
        q_spare(arena.take<Bf16>(L * even(p.D))),
        v(arena.take<Pair>(PAIRS * p.Dv)),
        v_admitted(arena.take<Pair>(PAIRS * p.Dv)),
        weights(arena.take<Pair>(PAIRS * L)),
        exact(needs_exact_output(p)),
        v_exact(exact ? arena.take<R>(KEY_STEP * p.Dv) : nullptr) {}
  static int64_t bytes(const Problem &p) {
    return (KEY_STEP * (even(p.D) + even(p.Dv)) + L * even(p.D)) * (int64_t)sizeof(Bf16) +
           PAIRS * (2 * p.Dv + L) * (int64_t)sizeof(Pair) +
           (needs_exact_output(p) ? KEY_STEP * p.Dv : 0) * (int64_t)sizeof(R) + 7 * 64;
  }
  static int64_t query_size(const Problem &p) { return L + L * even(p.D) / 2; }

  void take_rows(const Problem &p, const Terms &terms, const Rows<R, NV> &rows, R *q) const {
    for (int i = 0; i < L; ++i) q[i] = rows.factor(p, terms, i);
    pair_lanes<NV>(rows, p.query, p.D, (Pair *)(q + L), q_spare);
  }
  void take_keys(const Problem &p, int64_t b, int64_t kv, int64_t from, int64_t keys) {
    k = rows_of_pairs(p.key, b, kv, from, keys, p.D, k_spare, k_stride);
    if (!p.out) return;
    if (exact) {
      v_rows = as_rows<R>(p.value, b, kv, from, keys, p.Dv, v_exact, v_stride);
      return;
    }
    int64_t stride;
    const Bf16 *rows = rows_of_pairs(p.value, b, kv, from, keys, p.Dv, v_spare, stride);
    pair_rows(rows, stride, keys, p.Dv, v, p.Dv);
  }
  void scores(const Problem &p, const Rows<R, NV> &, const R *q, int64_t skip, int64_t keys, R *x, bool plain,
              Vec<R> *tops) const {
    const Vec<R> *factor = (const Vec<R> *)q;
    const Pair *at = (const Pair *)(q + L);
    if (plain)
      pair_scores<NV, true>(at, factor, k + skip * k_stride, k_stride, even(p.D), keys, x, tops);
    else
      pair_scores<NV, false>(at, factor, k + skip * k_stride, k_stride, even(p.D), keys, x);
  }
  void prepare(Panels<R, NV> &panels, const RequestedStatistics &want, int64_t skip) {
    again = exact || want.apart || want.collision || want.drop || skip % 2;
    panels.pairs = again ? nullptr : weights;
  }
  void gather(const Problem &p, const Rows<R, NV> &, RunningSums<R, NV> &sums, int64_t skip, int64_t keys,
              const uint8_t *live, Panels<R, NV> &panels, R *ot) const {
    if (exact)
      return for_each_live_run(live, keys, [&](int64_t from, int64_t to) {
        ::gather<R, NV>(panels.x + from * L, v_rows + (skip + from) * v_stride, v_stride, to - from, p.Dv, ot);
      });
    const int64_t odd = skip % 2;
    if (again) pair_keys<NV>(panels.x, odd, keys, weights, p.dropout_key ? nullptr : sums.used);
    const Pair *values = admit(v + skip / 2 * p.Dv, p.Dv, odd, keys, live, v_admitted);
    pair_gather<NV>(weights, values, p.Dv, (odd + keys + 1) / 2, p.Dv, ot);
  }
  static void finish(const Problem &p, const Rows<R, NV> &, const RunningSums<R, NV> &sums, R *ot) {
    for (int n = 0; n < NV; ++n)
      rescale<R, NV>(ot, p.Dv, n, sums.used[n] > (R)0 ? sums.l[n] / sums.used[n] : broadcast((R)1));
  }
};

}  // namespace
