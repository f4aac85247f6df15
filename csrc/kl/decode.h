// The two products of decoding, which has few rows and many keys.
//
// Memory sets the pace here, and one lane per row would leave most lanes empty. So lanes go along d, rows and outputs
// are not transposed, and keys and values of 16 bits are widened in registers.
//   decode_scores: panel[j][i]  = sum_d  q[i][d] * k[j][d]
//   decode_gather: o[i][d]     += sum_j  panel[j][i] * v[j][d]
#pragma once
#include <type_traits>

#include "engine/elements.h"
#include "engine/vector.h"

namespace {

// Load 2N elements of a row as two vectors. For bfloat16 these are the even and the odd elements, taken from the halves
// of 32 bits: one instruction each, where widening in order takes three. So where keys and values are bfloat16, queries
// and outputs are in that order too (`deinterleave`), and the outputs are brought back at the end (`interleave`).
template <class R, class T> INLINE void load_two_vectors(const T *p, Vec<R> &a, Vec<R> &b) {
  a = load_wide(p), b = load_wide(p + Simd<R>::N);
}
template <> INLINE void load_two_vectors<float, Bf16>(const Bf16 *p, Vec<float> &a, Vec<float> &b) {
  typedef uint32_t Loose __attribute__((vector_size(BYTES), aligned(2), may_alias));
  const auto both = *(const Loose *)p;  // little-endian: the even element is the lower half
  a = (Vec<float>)(both << 16), b = (Vec<float>)(both & 0xffff0000u);
}
template <class R, class T> INLINE void deinterleave(R *rows, int64_t n, int64_t D) {
  constexpr int N = Simd<R>::N;
  if (!std::is_same<T, Bf16>::value) return;
  for (int64_t i = 0; i < n; ++i)
    for (R *at = rows + i * D, *end = at + D / (2 * N) * (2 * N); at < end; at += 2 * N) {
      R copy[2 * N];
      memcpy(copy, at, sizeof copy);
      for (int u = 0; u < N; ++u) at[u] = copy[2 * u], at[N + u] = copy[2 * u + 1];
    }
}
template <class R, class T> INLINE void interleave(R *rows, int64_t n, int64_t D) {
  constexpr int N = Simd<R>::N;
  if (!std::is_same<T, Bf16>::value) return;
  for (int64_t i = 0; i < n; ++i)
    for (R *at = rows + i * D, *end = at + D / (2 * N) * (2 * N); at < end; at += 2 * N) {
      R copy[2 * N];
      memcpy(copy, at, sizeof copy);
      for (int u = 0; u < N; ++u) at[2 * u] = copy[u], at[2 * u + 1] = copy[N + u];
    }
}

template <class T> INLINE void prefetch_row(const T *row, int64_t D) {
  for (int64_t d = 0; d < D; d += 64 / (int64_t)sizeof(T)) __builtin_prefetch(row + d);
}

template <class R, class T, int KEYS>
INLINE void decode_score_tile(const R *q, int64_t D, const T *k, int64_t stride, R *panel, int64_t L) {
  constexpr int N = Simd<R>::N;
  Vec<R> sum[KEYS][4] = {};
  int64_t d = 0;
  for (; d + 2 * N <= D; d += 2 * N) {
    Vec<R> x[KEYS], y[KEYS];
#pragma GCC unroll 4
    for (int j = 0; j < KEYS; ++j) load_two_vectors<R, T>(k + j * stride + d, x[j], y[j]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Vec<R> a = load(q + i * D + d), b = load(q + i * D + d + N);
#pragma GCC unroll 4
      for (int j = 0; j < KEYS; ++j) sum[j][i] += a * x[j];
#pragma GCC unroll 4
      for (int j = 0; j < KEYS; ++j) sum[j][i] += b * y[j];
    }
  }
  for (; d + N <= D; d += N) {
    Vec<R> x[KEYS];
#pragma GCC unroll 4
    for (int j = 0; j < KEYS; ++j) x[j] = load_wide(k + j * stride + d);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Vec<R> a = load(q + i * D + d);
#pragma GCC unroll 4
      for (int j = 0; j < KEYS; ++j) sum[j][i] += a * x[j];
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < KEYS; ++j) {
    R total[4];
    add_lanes(sum[j], total);
    for (int64_t rest = d; rest < D; ++rest)
      for (int i = 0; i < 4; ++i) total[i] += q[i * D + rest] * (R)widen(k[j * stride + rest]);
    memcpy(panel + j * L, total, sizeof total);
  }
}

// When keys are prefetched: elements of 16 bits while the values of the block before are summed, larger ones some rows
// ahead of their scores. Measured with keys in memory: the other way round, float32 is a quarter slower and bfloat16 a
// tenth. (A prefetch beyond the last key does no harm.)
template <class T> constexpr bool BLOCK_AHEAD = sizeof(T) == 2;
constexpr int64_t ROWS_AHEAD = 8;

// Four rows at a time: `rows` and L are multiples of four. The values of this block are prefetched on the way. SIZE:
// the usual head sizes are compile-time constants, so that the loop along d is unrolled; 0 for any other size.
template <class R, class T, int64_t SIZE = 0>
void decode_scores(const R *q, int64_t rows, int64_t D, const T *k, int64_t k_stride, int64_t keys, R *panel, int64_t L,
                   const T *v, int64_t v_stride, int64_t Dv) {
  if constexpr (SIZE == 0) {
    if (D == 64 && Dv == 64) return decode_scores<R, T, 64>(q, rows, D, k, k_stride, keys, panel, L, v, v_stride, Dv);
    if (D == 128 && Dv == 128)
      return decode_scores<R, T, 128>(q, rows, D, k, k_stride, keys, panel, L, v, v_stride, Dv);
  } else {
    D = Dv = SIZE;
  }
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2) {
    for (int64_t next = j; next < j + 2; ++next) {
      if (!BLOCK_AHEAD<T>) prefetch_row(k + (next + ROWS_AHEAD) * k_stride, D);
      prefetch_row(v + next * v_stride, Dv);
    }
    for (int64_t i = 0; i < rows; i += 4)
      decode_score_tile<R, T, 2>(q + i * D, D, k + j * k_stride, k_stride, panel + j * L + i, L);
  }
  for (; j < keys; ++j)
    for (int64_t i = 0; i < rows; i += 4)
      decode_score_tile<R, T, 1>(q + i * D, D, k + j * k_stride, k_stride, panel + j * L + i, L);
}

template <class R, class T, int NV>
INLINE void decode_gather_tile(const R *panel, int64_t L, const T *v, int64_t stride, int64_t keys, R *o, int64_t Dv,
                               const T *next, int64_t next_stride) {
  constexpr int N = Simd<R>::N;
  Vec<R> sum[4][NV] = {};
  for (int64_t j = 0; j < keys; ++j) {
    if (next) prefetch_row(next + j * next_stride, NV * N);
    Vec<R> x[NV];
    if constexpr (NV == 2)
      load_two_vectors<R, T>(v + j * stride, x[0], x[1]);
    else
      x[0] = load_wide(v + j * stride);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Vec<R> p = broadcast(panel[j * L + i]);
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) sum[i][n] += p * x[n];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) store(o + i * Dv + n * N, load(o + i * Dv + n * N) + sum[i][n]);
}

// `next`: the keys after these, of D elements each, which may be prefetched.
template <class R, class T>
void decode_gather(const R *panel, int64_t L, int64_t rows, const T *v, int64_t stride, int64_t keys, int64_t Dv, R *o,
                   const T *next, int64_t next_stride, int64_t D) {
  const auto ahead = [&](int64_t i, int64_t d) { return BLOCK_AHEAD<T> && i == 0 && d < D ? next + d : nullptr; };
  constexpr int N = Simd<R>::N;
  int64_t d = 0;
  for (; d + 2 * N <= Dv; d += 2 * N)
    for (int64_t i = 0; i < rows; i += 4)
      decode_gather_tile<R, T, 2>(panel + i, L, v + d, stride, keys, o + i * Dv + d, Dv, ahead(i, d), next_stride);
  for (; d + N <= Dv; d += N)
    for (int64_t i = 0; i < rows; i += 4)
      decode_gather_tile<R, T, 1>(panel + i, L, v + d, stride, keys, o + i * Dv + d, Dv, ahead(i, d), next_stride);
  for (; d < Dv; ++d)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < keys; ++j) o[i * Dv + d] += panel[j * L + i] * (R)widen(v[j * stride + d]);
}

}  // namespace
