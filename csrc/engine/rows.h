// A block of rows: L rows of the plan that read one key/value head, one row per lane.
//
// `Rows` holds what depends on the row alone: which head and query it is, its temperature and other parameters, and the
// band of keys that it may read. gate.h turns raw products <q, k> into exponents x with these:
//   KL:     x = (s/tau + log pi) log2(e): in base 2, the prior included
//   others: x = c s, with c = (alpha - 1)/tau (Tsallis), log2(e)/tau (Fermi-Dirac) or 1/tau (compiled links); the
//           prior is kept apart, as its logarithm in base 2
// x is -inf where a key is masked. Where no bias, softcap or (KL) prior is given, scale and c are multiplied into the
// query instead (`Terms::folded`), and the raw product is x.
#pragma once
#include "engine/elements.h"
#include "engine/problem.h"
#include "engine/transpose.h"
#include "engine/vector_math.h"

namespace {

// Which terms a problem has. This is decided once per call.
struct Terms {
  bool bias, mask, documents, prior, capped, density;
  bool folded;  // x is the raw product, because scale and temperature are multiplied into the query
  const Tensor *priors[regard::PRIORS];
  int n_priors;

  explicit Terms(const Problem &p)
      : bias(p.score_bias),
        mask(p.mask),
        documents(p.query_ids),
        capped(p.softcap != 0),
        density(p.density),
        n_priors(0) {
    prior = p.slopes || p.relative || p.query_factor || p.decay_query || p.density || p.function;
    const Tensor *given[] = {&p.prior0, &p.prior1, &p.prior2, &p.prior3};
    for (const Tensor *t : given)
      if (*t) priors[n_priors++] = t, prior = true;
    folded = !(bias || (prior && p.family == regard::KL) || capped);
  }
};

// D rounded up to whole vectors.
template <class R> constexpr int64_t padded(int64_t D) { return (D + Simd<R>::N - 1) / Simd<R>::N * Simd<R>::N; }

template <class R, int NV> struct Rows {
  static constexpr int N = Simd<R>::N, L = N * NV;
  using V = Vec<R>;
  using M = Mask<R>;

  V c[NV];                                   // the factor from scores to x, see above
  V slope[NV];                               // of ALiBi, times log2(e)
  M position[NV];                            // of the query among the keys
  M hash[NV];                                // of (dropout key, query), for dropout; only the low 32 bits are used
  R temperature[L], level[L], power[L];      // level: the parameter of the marginal; power: Tsallis' alpha - 1
  R parameters[regard::LINK_PARAMETERS][L];  // of a compiled link
  int n;                                     // rows that exist; the lanes beyond repeat the last row
  bool consecutive;                          // whether the rows are consecutive queries of one head
  int64_t b, kv, head[L], query[L], document[L], least_document, most_document;
  int64_t lo, hi;          // the range of keys that some row may read by its band
  int64_t all_lo, all_hi;  // the range of keys that every row may read by its band

  int64_t at(const Tensor &t, int lane) const { return t.s0 * b + t.s1 * head[lane] + t.s2 * query[lane]; }
  // The position of each row among the keys, as compiled functions take it.
  struct Positions {
    int64_t at[L];
  };
  Positions positions(const Problem &p) const {
    Positions found;
    for (int i = 0; i < L; ++i) found.at[i] = query[i] + p.offset;
    return found;
  }
  // The index of a row in a contiguous [B, H, Tq].
  int64_t flat(const Problem &p, int lane) const { return (b * p.H + head[lane]) * p.Tq + query[lane]; }

  // Fill in rows first ... first + count - 1 of head h. Packed: rows of all heads that read `kv` are numbered one head
  // after the other, and h is the first of these heads.
  void place(const Problem &p, int64_t b_, int64_t kv_, int64_t h, bool packed, int64_t first, int64_t count) {
    b = b_, kv = kv_, n = (int)count;
    consecutive = !packed || first / p.Tq == (first + count - 1) / p.Tq;
    int64_t low = INT64_MAX, high = INT64_MIN;
    for (int i = 0; i < L; ++i) {
      const int64_t row = first + min_of((int64_t)i, count - 1);
      head[i] = packed ? h + row / p.Tq : h;
      query[i] = packed ? row % p.Tq : row;
      temperature[i] = p.temperature ? element<R>(p.temperature.data, p.temperature.type, at(p.temperature, i))
                                     : (R)p.temperature_value;
      level[i] = p.level ? element<R>(p.level.data, p.level.type, at(p.level, i)) : (R)p.level_value;
      power[i] = p.alpha ? element<R>(p.alpha.data, p.alpha.type, at(p.alpha, i)) - 1 : (R)(p.alpha_value - 1);
      const R unit = p.family == regard::TSALLIS ? power[i] : p.family == regard::COMPILED ? (R)1 : (R)LOG2E;
      c[i / N][i % N] = unit / temperature[i];
      slope[i / N][i % N] = p.slopes ? (R)LOG2E * element<R>(p.slopes.data, p.slopes.type, at(p.slopes, i)) : 0;
      const int64_t where = query[i] + p.offset;
      position[i / N][i % N] = (typename Simd<R>::I)where;
      low = min_of(low, where), high = max_of(high, where);
    }
    const Tensor *given[] = {&p.link_parameter0, &p.link_parameter1, &p.link_parameter2, &p.link_parameter3};
    for (int64_t m = 0; m < p.link_parameters; ++m)
      for (int i = 0; i < L; ++i) parameters[m][i] = element<R>(given[m]->data, given[m]->type, at(*given[m], i));
    lo = max_of(low - p.left, (int64_t)0), hi = min_of(high + p.right + 1, p.Tk);
    if (p.left + p.right < 0) hi = lo;  // an empty band
    all_lo = high - p.left, all_hi = low + p.right + 1;
    if (p.query_ids) {
      least_document = INT64_MAX, most_document = INT64_MIN;
      for (int i = 0; i < L; ++i) {
        document[i] = ((const int64_t *)p.query_ids.data)[at(p.query_ids, i)];
        least_document = min_of(least_document, document[i]), most_document = max_of(most_document, document[i]);
      }
    }
    if (p.dropout_key)
      for (int i = 0; i < L; ++i) {
        const uint32_t key = (uint32_t)((const int64_t *)p.dropout_key.data)[at(p.dropout_key, i)];
        hash[i / N][i % N] = (typename Simd<R>::I)mix(key ^ mix((uint32_t)query[i] + 0x9E3779B9u));
      }
  }

  static uint32_t mix(uint32_t a) {  // the finalizer of MurmurHash3
    a = (a ^ (a >> 16)) * 0x85EBCA6Bu;
    a = (a ^ (a >> 13)) * 0xC2B2AE35u;
    return a ^ (a >> 16);
  }

  // The factor that dropout puts on the weight of key j in a row: 1/(1-p) or 0.
  R dropout_factor_at(const Problem &p, int64_t j, int lane) const {
    const uint32_t key = mix((uint32_t)j + 0x9E3779B9u);
    return (int64_t)mix((uint32_t)hash[lane / N][lane % N] ^ key) >= p.threshold ? (R)p.kept_scale : 0;
  }
  V dropout_factor(const Problem &p, int64_t j, int n) const {
    V result;
    for (int i = 0; i < N; ++i) result[i] = dropout_factor_at(p, j, n * N + i);
    return result;
  }

  // The factor on the query before its products with keys.
  R factor(const Problem &p, const Terms &terms, int lane) const {
    if (terms.folded) return (R)p.scale * c[lane / N][lane % N];
    return terms.capped ? (R)(p.scale / p.softcap) : (R)p.scale;
  }

  // The rows of a tensor, transposed: to[d][lane] = t[row][d] * factor, and 0 in lanes without a row.
  template <class F> void transpose(const Tensor &t, int64_t D, R *to, F factor) const {
    int i = 0;
    if (t.type == (sizeof(R) == 4 ? regard::F32 : regard::F64) && t.s3 == 1) {
      const R *from[L];
      R factors[L];
      for (int r = 0; r < n; ++r) from[r] = (const R *)t.data + at(t, r), factors[r] = factor(r);
      i = (int)to_lanes(from, factors, n, D, to, L);
    }
    for (; i < n; ++i) copy<R>(t.data, t.type, at(t, i), t.s3, D, to + i, L, factor(i));
    for (int i = n; i < L; ++i)
      for (int64_t d = 0; d < D; ++d) to[d * L + i] = 0;
  }

  bool finite(const Tensor &t, int64_t D, int lane) const {
    R sum = 0;
    for (int64_t d = 0; d < D; ++d) sum += 0 * element<R>(t.data, t.type, at(t, lane) + d * t.s3);
    return sum == 0;
  }

  // The rows of a tensor: to[lane][d] = t[row][d] * factor, and 0 beyond D and in lanes without a row. The rows of `to`
  // are `stride` apart.
  template <class F> void gather_rows(const Tensor &t, int64_t D, R *to, int64_t stride, F factor) const {
    memset(to, 0, L * stride * sizeof(R));
    for (int i = 0; i < n; ++i) copy<R>(t.data, t.type, at(t, i), t.s3, D, to + i * stride, 1, factor(i));
  }
  // panel[j][lane] = t[row][first + j], for a tensor that broadcasts to the plan.
  void fill(const Tensor &t, int64_t first, int64_t keys, R *panel) const {
    bool same = true;
    for (int i = 1; i < L; ++i) same &= at(t, i) == at(t, 0);
    if (same) {
      for (int64_t j = 0; j < keys; ++j) {
        const V x = broadcast(element<R>(t.data, t.type, at(t, 0) + (first + j) * t.s3));
        for (int n = 0; n < NV; ++n) store(panel + j * L + n * N, x);
      }
    } else {
      for (int i = 0; i < L; ++i) copy<R>(t.data, t.type, at(t, i) + first * t.s3, t.s3, keys, panel + i, L, (R)1);
    }
  }
};

// A row whose scores exceed the range of float32 is NaN, and the caller is told to compute it in float64. What a backward
// pass reads of such a row is `is_beyond`.
template <class R> INLINE void report_beyond(const Problem &p) {
  if (sizeof(R) == 4 && p.beyond) __atomic_store_n((int64_t *)p.beyond, 1, __ATOMIC_RELAXED);
}
template <class R> INLINE bool is_beyond(R peak, R rest) { return sizeof(R) == 4 && peak == INF<R> && rest == INF<R>; }

template <class R> INLINE R of_row(const Tensor &t, int64_t at) { return element<R>(t.data, t.type, at); }
template <class R> INLINE void put(int64_t to, int64_t at, R value) {
  if (to) ((R *)to)[at] = value;
}

}  // namespace
