// Transposes between rows in memory and lanes of a panel, each multiplied by a factor on the way.
//
// In float32 with AVX2 they go by blocks of 8 x 8 in registers; otherwise element by element.
#pragma once
#include "engine/vector.h"

namespace {

#if defined(__AVX2__)
INLINE void transpose8(__m256 (&r)[8]) {
  __m256 t[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}
#endif

// to[d][i] = from[i][d] * factor[i] for n rows of D elements; the rows of `to` are `stride` apart. Only whole blocks of
// 8 rows are done: returns how many rows that was, and the caller does the rest.
template <class R> INLINE int64_t to_lanes(const R *const *, const R *, int64_t, int64_t, R *, int64_t) { return 0; }
#if defined(__AVX2__)
INLINE int64_t to_lanes(const float *const *from, const float *factor, int64_t n, int64_t D, float *to,
                        int64_t stride) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    int64_t d = 0;
    for (; d + 8 <= D; d += 8) {
      __m256 r[8];
      for (int u = 0; u < 8; ++u) r[u] = _mm256_mul_ps(_mm256_loadu_ps(from[i + u] + d), _mm256_set1_ps(factor[i + u]));
      transpose8(r);
      for (int u = 0; u < 8; ++u) _mm256_storeu_ps(to + (d + u) * stride + i, r[u]);
    }
    for (; d < D; ++d)
      for (int u = 0; u < 8; ++u) to[d * stride + i + u] = from[i + u][d] * factor[i + u];
  }
  return i;
}
#endif

// The inverse: to[i][d] = from[d][i] * factor[i], for all n rows.
template <class R>
INLINE void to_rows(const R *from, int64_t stride, const R *factor, int64_t n, int64_t D, R *const *to) {
  int64_t i = 0;
#if defined(__AVX2__)
  if (sizeof(R) == 4)
    for (; i + 8 <= n; i += 8) {
      int64_t d = 0;
      const __m256 f = _mm256_loadu_ps((const float *)factor + i);
      for (; d + 8 <= D; d += 8) {
        __m256 r[8];
        for (int u = 0; u < 8; ++u)
          r[u] = _mm256_mul_ps(_mm256_loadu_ps((const float *)from + (d + u) * stride + i), f);
        transpose8(r);
        for (int u = 0; u < 8; ++u) _mm256_storeu_ps((float *)to[i + u] + d, r[u]);
      }
      for (; d < D; ++d)
        for (int u = 0; u < 8; ++u) to[i + u][d] = from[d * stride + i + u] * factor[i + u];
    }
#endif
  for (; i < n; ++i)
    for (int64_t d = 0; d < D; ++d) to[i][d] = from[d * stride + i] * factor[i];
}

}  // namespace
