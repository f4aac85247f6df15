// Matrix products, tile by tile in registers. A panel is [keys][L]: one row per key, and L rows of the plan as lanes.
//   scores:  panel[j][:]  = sum_d  at[d][:] * b[j][d]       Q K^T and dO V^T
//   gather:  ct[d][:]    += sum_j  panel[j][:] * b[j][d]    P V and dS K, transposed: [d][L]
//   scatter: c[j][d]     += sum_i  panel[j][i] * a[i][d]    P^T dO and dS^T Q, lanes along d
// and for single pairs of a row and a key:
//   dots:    to[t]        = sum_d  a[d] * b[t][d]
//   chains:  the same products summed in the order of `scores`, so that both agree to the last bit
// Only the left operand, a block of rows, is ever transposed. Keys and values are read as they are stored. A tile keeps
// as many sums as there are registers; `#pragma GCC unroll` makes the compiler keep them there.
#pragma once
#include "engine/transpose.h"
#include "engine/vector.h"

namespace {

// Four steps per iteration: the branch at the end of a loop of 64 is mispredicted, that of a loop of 16 is not.
template <class F> INLINE void by_four(int64_t n, const F &step) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) step(i), step(i + 1), step(i + 2), step(i + 3);
  for (; i < n; ++i) step(i);
}

template <class R, int NV, int KEYS, bool TOP>
INLINE void score_tile(const R *at, const R *b, int64_t stride, int64_t D, R *panel, Vec<R> *top) {
  constexpr int N = Simd<R>::N, L = N * NV;
  Vec<R> sum[KEYS][NV] = {};
  const auto step = [&](int64_t d) __attribute__((always_inline)) {
    Vec<R> a[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) a[n] = load(at + d * L + n * N);
#pragma GCC unroll 16
    for (int k = 0; k < KEYS; ++k) {
      const Vec<R> x = broadcast(b[k * stride + d]);
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) sum[k][n] = multiply_add(a[n], x, sum[k][n]);
    }
  };
  by_four(D, step);
#pragma GCC unroll 8
  for (int n = 0; n < NV; ++n) {
    Vec<R> most = sum[0][n];
#pragma GCC unroll 16
    for (int k = 0; k < KEYS; ++k) {
      store(panel + k * L + n * N, sum[k][n]);
      if (TOP && k) most = vmax(most, sum[k][n]);
    }
    if (TOP) top[n] = vmax(top[n], most);
  }
}

// The number of keys (or dimensions) in a tile of NV vectors: as many as fill the registers with sums.
template <int NV> constexpr int DEEP = TILE_KEYS * 3 / NV;

// TOP: `top` becomes the largest score of each lane, too.
template <class R, int NV, bool TOP>
void scores(const R *at, const R *b, int64_t stride, int64_t D, int64_t keys, R *panel, Vec<R> *top = nullptr) {
  constexpr int KEYS = DEEP<NV>, L = Simd<R>::N * NV;
  int64_t j = 0;
  for (; j + KEYS <= keys; j += KEYS) score_tile<R, NV, KEYS, TOP>(at, b + j * stride, stride, D, panel + j * L, top);
  if (KEYS > 4)
    for (; j + 4 <= keys; j += 4) score_tile<R, NV, 4, TOP>(at, b + j * stride, stride, D, panel + j * L, top);
  for (; j < keys; ++j) score_tile<R, NV, 1, TOP>(at, b + j * stride, stride, D, panel + j * L, top);
}

template <class R, int NV, int DIMS>
INLINE void gather_tile(const R *panel, const R *b, int64_t stride, int64_t keys, R *ct) {
  constexpr int N = Simd<R>::N, L = N * NV;
  Vec<R> sum[DIMS][NV] = {};
  const auto step = [&](int64_t j) __attribute__((always_inline)) {
    Vec<R> p[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) p[n] = load(panel + j * L + n * N);
#pragma GCC unroll 16
    for (int k = 0; k < DIMS; ++k) {
      const Vec<R> x = broadcast(b[j * stride + k]);
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) sum[k][n] += p[n] * x;
    }
  };
  by_four(keys, step);
#pragma GCC unroll 16
  for (int k = 0; k < DIMS; ++k)
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) store(ct + k * L + n * N, load(ct + k * L + n * N) + sum[k][n]);
}

template <class R, int NV> void gather(const R *panel, const R *b, int64_t stride, int64_t keys, int64_t D, R *ct) {
  constexpr int DIMS = DEEP<NV>, L = Simd<R>::N * NV;
  int64_t d = 0;
  for (; d + DIMS <= D; d += DIMS) gather_tile<R, NV, DIMS>(panel, b + d, stride, keys, ct + d * L);
  if (DIMS > 4)
    for (; d + 4 <= D; d += 4) gather_tile<R, NV, 4>(panel, b + d, stride, keys, ct + d * L);
  for (; d < D; ++d) gather_tile<R, NV, 1>(panel, b + d, stride, keys, ct + d * L);
}

template <class R, int L, int KEYS, int NV> INLINE void scatter_tile(const R *panel, const R *a, int64_t stride, R *c) {
  constexpr int N = Simd<R>::N;
  Vec<R> sum[KEYS][NV];
#pragma GCC unroll 16
  for (int k = 0; k < KEYS; ++k)
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) sum[k][n] = load(c + k * stride + n * N);
  const auto step = [&](int64_t i) __attribute__((always_inline)) {
    Vec<R> x[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) x[n] = load(a + i * stride + n * N);
#pragma GCC unroll 16
    for (int k = 0; k < KEYS; ++k) {
      const Vec<R> p = broadcast(panel[k * L + i]);
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) sum[k][n] += x[n] * p;
    }
  };
  by_four(L, step);
#pragma GCC unroll 16
  for (int k = 0; k < KEYS; ++k)
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) store(c + k * stride + n * N, sum[k][n]);
}

// The rows of a and c have `stride` elements, a multiple of the vector length.
template <class R, int L> void scatter(const R *panel, const R *a, int64_t stride, int64_t keys, R *c) {
  constexpr int N = Simd<R>::N, NV = SCATTER_VECTORS;
  int64_t d = 0;
  for (; d + NV * N <= stride; d += NV * N) {
    int64_t j = 0;
    for (; j + 6 <= keys; j += 6) scatter_tile<R, L, 6, NV>(panel + j * L, a + d, stride, c + j * stride + d);
    for (; j + 2 <= keys; j += 2) scatter_tile<R, L, 2, NV>(panel + j * L, a + d, stride, c + j * stride + d);
    for (; j < keys; ++j) scatter_tile<R, L, 1, NV>(panel + j * L, a + d, stride, c + j * stride + d);
  }
  for (; d < stride; d += N) {
    int64_t j = 0;
    for (; j + 6 <= keys; j += 6) scatter_tile<R, L, 6, 1>(panel + j * L, a + d, stride, c + j * stride + d);
    for (; j < keys; ++j) scatter_tile<R, L, 1, 1>(panel + j * L, a + d, stride, c + j * stride + d);
  }
}

// to[t] = <a, row(t)> for t < n, where D is a multiple of the vector length. `to` has room for a multiple of four.
// row(t, u) returns the address of row t; u is its place among those that are read together.
template <class R, class F> INLINE void dots(const R *a, int64_t D, int64_t n, R *to, F row) {
  constexpr int N = Simd<R>::N;
  for (int64_t t = 0; t < n; t += 4) {
    const R *b[4];
    for (int u = 0; u < 4; ++u) b[u] = row(min_of(t + u, n - 1), u);
    Vec<R> sum[4] = {};
    for (int64_t d = 0; d < D; d += N) {
      const Vec<R> x = load(a + d);
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) sum[u] = multiply_add(x, load(b[u] + d), sum[u]);
    }
    add_lanes<R>(sum, to + t);
  }
}

// The same, but each sum adds one product after the other, as in `scores`: both agree to the last bit. `to` has room
// for a multiple of 16. Lanes are pairs. There are two vectors of them: one is transposed while the other is summed.
template <class R, class F> INLINE void chains(const R *a, int64_t D, int64_t n, R *to, F row) {
  constexpr int PAIRS = 8;
  for (int64_t t = 0; t < n; t += 2 * PAIRS) {
    const R *b[2 * PAIRS];
    for (int u = 0; u < 2 * PAIRS; ++u) b[u] = row(min_of(t + u, n - 1), u);
#if defined(__AVX2__)
    if constexpr (sizeof(R) == 4) {
      __m256 sum[2] = {};
      for (int64_t d = 0; d < D; d += 8)
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          __m256 x[PAIRS];
          for (int u = 0; u < PAIRS; ++u) x[u] = _mm256_loadu_ps(b[half * PAIRS + u] + d);
          transpose8(x);
          for (int u = 0; u < PAIRS; ++u) sum[half] = _mm256_fmadd_ps(x[u], _mm256_broadcast_ss(a + d + u), sum[half]);
        }
      _mm256_storeu_ps(to + t, sum[0]), _mm256_storeu_ps(to + t + PAIRS, sum[1]);
      continue;
    }
#endif
    R sum[2 * PAIRS] = {};
    for (int64_t d = 0; d < D; ++d)
      for (int u = 0; u < 2 * PAIRS; ++u) sum[u] = multiply_add(a[d], b[u][d], sum[u]);
    memcpy(to + t, sum, sizeof sum);
  }
}

template <class R> INLINE R dot(const R *a, const R *b, int64_t n) {
  constexpr int N = Simd<R>::N;
  Vec<R> even = {}, odd = {};
  int64_t d = 0;
  for (; d + 2 * N <= n; d += 2 * N)
    even = multiply_add(load(a + d), load(b + d), even), odd = multiply_add(load(a + d + N), load(b + d + N), odd);
  for (; d + N <= n; d += N) even = multiply_add(load(a + d), load(b + d), even);
  even += odd;
  R total = 0;
  for (int i = 0; i < N; ++i) total += even[i];
  for (; d < n; ++d) total = multiply_add(a[d], b[d], total);
  return total;
}

template <class R> INLINE void add_scaled(R factor, const R *from, int64_t n, R *to) {
  constexpr int N = Simd<R>::N, U = 4;
  const Vec<R> f = broadcast(factor);
  int64_t d = 0;
  for (; d + U * N <= n; d += U * N)
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) store(to + d + u * N, load(to + d + u * N) + f * load(from + d + u * N));
  for (; d < n; d += N) store(to + d, load(to + d) + f * load(from + d));
}

}  // namespace
