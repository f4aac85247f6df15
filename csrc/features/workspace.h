// The working memory of one thread for attention by features, with a chunk of keys and a chunk of queries in it; and
// what the forward and the backward pass share: features of rows, values, levels.
#pragma once
#include "engine/transpose.h"
#include "features/call.h"
#include "features/products.h"

namespace {

// to[d][i] = from[i][d], and 0 in lanes without a row.
template <class R> void transpose_rows(const R *from, int64_t stride, int64_t n, int64_t D, R *to, int64_t to_stride) {
  constexpr int64_t PIECE = 64, N = Simd<R>::N;
  for (int64_t first = 0; first < n; first += PIECE) {
    const int64_t some = min_of(PIECE, n - first);
    const R *rows[PIECE];
    R ones[PIECE];
    for (int64_t i = 0; i < some; ++i) rows[i] = from + (first + i) * stride, ones[i] = 1;
    for (int64_t i = to_lanes(rows, ones, some, D, to + first, to_stride); i < some; ++i)
      for (int64_t d = 0; d < D; ++d) to[d * to_stride + first + i] = rows[i][d];
  }
  for (int64_t i = n; i < (n + N - 1) / N * N; ++i)
    for (int64_t d = 0; d < D; ++d) to[d * to_stride + i] = 0;
}

template <class R> struct FeatureWorkspace {
  using V = Vec<R>;
  static constexpr int64_t N = Simd<R>::N;
  const FeatureCall<R> &call;
  const Problem &p;
  R *start, *run, *local;                    // states
  R *phi_q, *phi_k, *dphi, *more;            // [CHUNK][Ms]
  R *phi_qt, *phi_kt;                        // [M][Cs]
  R *v, *scaled, *out, *g;                   // [CHUNK][Vs]
  R *vt, *gt, *scaled_t;                     // [Dv + 1][Cs]
  R *pairs, *slopes;                         // [CHUNK][Cs]
  R *x_q, *x_k, *dx;                         // [CHUNK][Ds]
  R *turned;                                 // [M][Vs]
  R *level, *top, *weight, *inverse, *mass;  // [Cs]
  uint8_t kept[CHUNK];
  const R *q_rows, *k_rows;  // the inputs as R: in place, or copied
  int64_t q_stride, k_stride;

  FeatureWorkspace(const FeatureCall<R> &call, char *scratch) : call(call), p(call.p) {
    Arena a{scratch};
    const int64_t Ms = call.Ms, Cs = call.Cs, Vs = call.Vs, Ds = call.Ds, size = call.state_size();
    start = a.take<R>(size), run = a.take<R>(size), local = a.take<R>(size);
    phi_q = a.take<R>(CHUNK * Ms), phi_k = a.take<R>(CHUNK * Ms), dphi = a.take<R>(CHUNK * Ms);
    more = a.take<R>(CHUNK * Ms), phi_qt = a.take<R>(call.M * Cs), phi_kt = a.take<R>(call.M * Cs);
    v = a.take<R>(CHUNK * Vs), scaled = a.take<R>(CHUNK * Vs), out = a.take<R>(CHUNK * Vs), g = a.take<R>(CHUNK * Vs);
    vt = a.take<R>((p.Dv + 1) * Cs), gt = a.take<R>((p.Dv + 1) * Cs), scaled_t = a.take<R>((p.Dv + 1) * Cs);
    pairs = a.take<R>(CHUNK * Cs), slopes = a.take<R>(CHUNK * Cs);
    x_q = a.take<R>(CHUNK * Ds), x_k = a.take<R>(CHUNK * Ds), dx = a.take<R>(CHUNK * Ds),
    turned = a.take<R>(call.M * Vs);
    level = a.take<R>(Cs), top = a.take<R>(Cs), weight = a.take<R>(Cs), inverse = a.take<R>(Cs), mass = a.take<R>(Cs);
  }

  // phi of n rows of x, and their levels if `levels` is not null.
  void features(const R *x, int64_t stride, int64_t n, R *phi, R *levels) {
    const int64_t M = call.M, Ms = call.Ms;
    if (call.projected) product<R>(n, M, p.D, x, stride, call.to_features, Ms, Set<R>{phi, Ms});
    for (int64_t i = 0; i < n; ++i) {
      R *row = phi + i * Ms;
      if (!call.projected) {
        p.map == ELU ? map_row<ELU>(x + i * stride, row) : map_row<RELU>(x + i * stride, row);
      } else if (p.map == RELU) {
        for (int64_t m = 0; m < M; m += N) store(row + m, vmax(load(row + m), V{}));
      } else {
        for (int64_t m = M; m % N; ++m) row[m] = -INF<R>;
        V most_of = load(row);
        for (int64_t m = N; m < M; m += N) most_of = vmax(load(row + m), most_of);
        R top = most_of[0];
        for (int r = 1; r < N; ++r) top = max_of(top, (R)most_of[r]);
        for (int64_t m = 0; m < M; m += N) store(row + m, vexp2(load(row + m) - top));
        if (levels) levels[i] = top - square(x + i * stride) * (R)(p.scale / 2 * LOG2E);
      }
    }
  }
  // The map of one row, where it is a map of the input itself.
  template <Map MAP> INLINE void map_row(const R *x, R *row) const {
    constexpr int U = 4;
    const R root = call.root;
    const auto map = [&](auto &y) __attribute__((always_inline)) {
      constexpr int n = sizeof y / sizeof *y;
      for (int u = 0; u < n; ++u) y[u] *= root;
      if (MAP == RELU) {
        for (int u = 0; u < n; ++u) y[u] = vmax(y[u], V{});
        return;
      }
      V t[n], e[n];
      for (int u = 0; u < n; ++u) t[u] = -vmax(V{}, -y[u]) * (R)LOG2E;
      vexp2<true>(t, e);
      for (int u = 0; u < n; ++u) y[u] = vmax(y[u] + (R)1, e[u]);  // exp(y) >= y + 1
    };
    int64_t d = 0;
    for (; d + U * N <= call.M; d += U * N) {
      V y[U];
      for (int u = 0; u < U; ++u) y[u] = load(x + d + u * N);
      map(y);
      for (int u = 0; u < U; ++u) store(row + d + u * N, y[u]);
    }
    for (; d < call.M; d += N) {
      R rest[N] = {};
      const int64_t some = min_of(N, call.M - d);
      for (int64_t r = 0; r < some; ++r) rest[r] = x[d + r];
      V y[1] = {load(rest)};
      map(y);
      store(row + d, y[0]);
      for (int64_t r = some; r < N; ++r) row[d + r] = 0;
    }
  }
  R square(const R *x) const {
    V sums = {};
    int64_t d = 0;
    for (; d + N <= p.D; d += N) sums += load(x + d) * load(x + d);
    R total = 0;
    for (int r = 0; r < N; ++r) total += sums[r];
    for (; d < p.D; ++d) total += x[d] * x[d];
    return total;
  }
  // to[i] = <rows[i], z> for padded rows of M. Four rows at a time: up to three beyond n are read and written.
  void dots(const R *rows, int64_t n, const R *z, R *to) const {
    for (int64_t i = 0; i < n; i += 4) {
      V sums[4] = {};
      for (int64_t m = 0; m < call.M; m += N) {
        const V y = load(z + m);
        for (int u = 0; u < 4; ++u) sums[u] += load(rows + (i + u) * call.Ms + m) * y;
      }
      add_lanes<R>(sums, to + i);
    }
  }
  // to[d] = from[d] * factor for n elements; exactly 0 where the factor is 0.
  static INLINE void write(const R *from, R factor, int64_t n, R *to) {
    int64_t d = 0;
    if (factor == 0) {
      memset(to, 0, n * sizeof(R));
      return;
    }
    for (; d + N <= n; d += N) store(to + d, load(from + d) * factor);
    for (; d < n; ++d) to[d] = from[d] * factor;
  }

  void take_queries(int64_t b, int64_t h, Span s) {
    q_rows = as_rows<R>(p.query, b, h, s.q, s.nq, p.D, x_q, q_stride);
    features(q_rows, q_stride, s.nq, phi_q, nullptr);
  }
  // Keys with their levels, and values with a 1 appended. A masked key has phi = 0 and a value of 0.
  void take_keys(int64_t b, int64_t kv, Span s) {
    k_rows = as_rows<R>(p.key, b, kv, s.k, s.nk, p.D, x_k, k_stride);
    for (int64_t j = 0; j < s.nk; ++j) level[j] = 0, kept[j] = 1;
    features(k_rows, k_stride, s.nk, phi_k, call.levels ? level : nullptr);
    const Tensor &t = p.value;
    for (int64_t j = 0; j < s.nk; ++j) {
      R *row = v + j * call.Vs;
      if (p.mask) kept[j] = ((const uint8_t *)p.mask.data)[p.mask.s0 * b + (s.k + j) * p.mask.s3];
      if (kept[j]) {
        copy<R>(t.data, t.type, t.s0 * b + t.s1 * kv + (s.k + j) * t.s2, t.s3, p.Dv, row, 1, (R)1);
        for (int64_t d = p.Dv + 1; d < call.Vs; ++d) row[d] = 0;
        row[p.Dv] = 1;
      } else {
        memset(row, 0, call.Vs * sizeof(R)), memset(phi_k + j * call.Ms, 0, call.Ms * sizeof(R));
        level[j] = -INF<R>;
      }
    }
    for (int64_t j = s.nk; j < call.Cs; ++j) level[j] = -INF<R>;
  }
  // The largest level among the keys of each row.
  void find_tops(Span s, R shift) {
    R highest = shift;
    for (int64_t i = 0; i < s.nq; ++i) {
      if (i < s.nk) highest = max_of(highest, level[i]);
      top[i] = highest;
    }
  }
  static R finite(R x) { return x == -INF<R> ? 0 : x; }

  // row[j] *= 2^(level_j - top): the factor between products of features and weights.
  void rescale_row(R *row, int64_t from, int64_t to, R highest) const {
    for (int64_t j = from; j < to; j += N) store(row + j, load(row + j) * vexp2(load(level + j) - finite(highest)));
  }
  void scale_rows(const R *from, int64_t stride, int64_t n, R *to) const {  // to[j] = weight[j] * from[j]
    for (int64_t j = 0; j < n; ++j)
      for (int64_t d = 0; d < stride; d += N) store(to + j * stride + d, load(from + j * stride + d) * weight[j]);
  }

  // In features/forward.h:
  void absorb(Span s, R *one, R *two);
  void absorb_block(int64_t b, int64_t kv, Span block, R *state);
  void emit_block(int64_t b, int64_t kv, Span block, R *state, R *sum);

  // In features/backward.h:
  void take_gradients(int64_t b, int64_t h, Span s);
  void absorb_turned(const R *at, const R *phi, int64_t n, R shift, R *one, R *two);
  void absorb_keys(Span s, R *one, R *two);
  void absorb_queries(Span s, R *one, R *two);
  void chain(const R *phi, const R *x, int64_t stride, int64_t n, bool key, R *to);
  void absorb_block_keys(int64_t b, int64_t kv, Span block, R *state);
  void emit_block_queries(int64_t b, int64_t kv, Span block, R *state, R *sum);
  void absorb_block_queries(int64_t b, int64_t kv, Span block, R *state);
  void emit_block_keys(int64_t b, int64_t kv, Span block, R *state, R *sum);
};

}  // namespace
