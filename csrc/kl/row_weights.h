// From x to weights where keys are in lanes: one row at a time.
#pragma once
#include "engine/vector_math.h"

namespace {

// The largest lane; a NaN may get lost.
template <class R> INLINE R top_lane(Vec<R> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(R) == 4) return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX2__)
  if constexpr (sizeof(R) == 4) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }
#endif
  R top = x[0];
  for (int n = 1; n < Simd<R>::N; ++n) top = max_of(top, x[n]);
  return top;
}

// x -> p for one row, by the reference `safe`. Returns the sum of p in lanes. `width` is a multiple of their number.
template <class R, bool ZERO, bool MOMENTS>
INLINE Vec<R> exponentiate_row(R *x, int64_t width, R safe, Vec<R> &e1, Vec<R> &e2) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N;
  V l = {};
  const auto some = [&](int64_t j, auto count) __attribute__((always_inline)) {
    constexpr int U = decltype(count)::value;
    V t[U], p[U];
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) t[u] = vmax(broadcast(FLOOR<R, ZERO>), load(x + j + u * N) - safe);
    vexp2<ZERO>(t, p);
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      store(x + j + u * N, p[u]);
      l += p[u];
      if (MOMENTS) e1 += p[u] * t[u], e2 += p[u] * t[u] * t[u];
    }
  };
  int64_t j = 0;
  for (; j + 4 * N <= width; j += 4 * N) some(j, Constant<4>());
  for (; j < width; j += N) some(j, Constant<1>());
  return l;
}

}  // namespace
