// Sums of values over the list of a row: the keys that it reads, one by one.
#pragma once
#include "engine/elements.h"
#include "engine/tiles.h"

namespace {

// to[d] = the sum of p v over the list of a row, and with BASELINE also the sum of w v: each value is loaded once for
// both. Values far ahead are prefetched, because the processor cannot predict which key comes next.
template <class R, bool BASELINE, int U>
INLINE void sum_listed_part(const R *p, const R *w, const int32_t *index, int64_t step, int64_t n, const R *v,
                            int64_t stride, int64_t ahead, R *to, R *baseline) {
  constexpr int N = Simd<R>::N, FAR = 24;
  using V = Vec<R>;
  V a[U] = {}, b[U] = {};
  for (int64_t k = 0; k < n; ++k) {
    if (k + FAR < n) {
      const R *next = v + index[(k + FAR) * step] * stride;
      for (int64_t d = 0; d < ahead; d += 64 / (int64_t)sizeof(R)) __builtin_prefetch(next + d);
    }
    const R *row = v + index[k * step] * stride;
    const V x = broadcast(p[k * step]), y = BASELINE ? broadcast(w[k * step]) : V{};
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      const V value = load(row + u * N);
      a[u] += x * value;
      if (BASELINE) b[u] += y * value;
    }
  }
  for (int u = 0; u < U; ++u) {
    store(to + u * N, a[u]);
    if (BASELINE) store(baseline + u * N, b[u]);
  }
}
template <class R, bool BASELINE>
void sum_listed_values(const R *p, const R *w, const int32_t *index, int64_t step, int64_t n, const R *v,
                       int64_t stride, int64_t Dv, R *to, R *baseline) {
  constexpr int N = Simd<R>::N, U = BASELINE ? 4 : 8;
  int64_t d = 0;
  for (; d + U * N <= Dv; d += U * N)
    sum_listed_part<R, BASELINE, U>(p, w, index, step, n, v + d, stride, d ? 0 : Dv, to + d, baseline + d);
  for (; d + 4 * N <= Dv && U > 4; d += 4 * N)
    sum_listed_part<R, BASELINE, 4>(p, w, index, step, n, v + d, stride, d ? 0 : Dv, to + d, baseline + d);
  for (; d + N <= Dv; d += N)
    sum_listed_part<R, BASELINE, 1>(p, w, index, step, n, v + d, stride, d ? 0 : Dv, to + d, baseline + d);
  for (; d < Dv; ++d) {
    R a = 0, b = 0;
    for (int64_t k = 0; k < n; ++k) {
      const R value = v[index[k * step] * stride + d];
      a += p[k * step] * value;
      if (BASELINE) b += w[k * step] * value;
    }
    to[d] = a;
    if (BASELINE) baseline[d] = b;
  }
}

// The same for values of any type and stride. Entries of a list are `step` apart. w and baseline: null if not requested.
template <class R>
void sum_list(const Problem &p, int64_t b, int64_t kv, const R *weights, const R *w, const int32_t *index, int64_t step,
              int64_t n, R *spare, R *to, R *baseline) {
  const Tensor &value = p.value;
  const int64_t base = value.s0 * b + value.s1 * kv;
  if (readable_in_place<R>(value, p.Dv)) {
    const R *v = (const R *)value.data + base;
    if (w) return sum_listed_values<R, true>(weights, w, index, step, n, v, value.s2, p.Dv, to, baseline);
    return sum_listed_values<R, false>(weights, w, index, step, n, v, value.s2, p.Dv, to, baseline);
  }
  memset(to, 0, p.Dv * sizeof(R));
  if (w) memset(baseline, 0, p.Dv * sizeof(R));
  for (int64_t k = 0; k < n; ++k) {
    copy<R>(value.data, value.type, base + index[k * step] * value.s2, value.s3, p.Dv, spare, 1, (R)1);
    for (int64_t d = 0; d < p.Dv; ++d) to[d] += weights[k * step] * spare[d];
    if (w)
      for (int64_t d = 0; d < p.Dv; ++d) baseline[d] += w[k * step] * spare[d];
  }
}

}  // namespace
