// Products of matrices with lanes along the columns: c[i][d] from sum_k a[i][k] b[k][d].
//
// A functor `put(i, d, sum)` receives each vector of sums: `Set` stores it, `Add` adds it, and states have their own
// (call.h).
#pragma once
#include "engine/tiles.h"

namespace {

template <class R, int ROWS, int NV, class Put>
INLINE void product_tile(const R *a, int64_t as, const R *b, int64_t bs, int64_t depth, int64_t i, int64_t d,
                         const Put &put) {
  constexpr int N = Simd<R>::N;
  Vec<R> sum[ROWS][NV] = {};
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    Vec<R> x[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) x[n] = load(b + k * bs + n * N);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const Vec<R> y = broadcast(a[r * as + k]);
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) sum[r][n] += x[n] * y;
    }
  };
  by_four(depth, step);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) put(i + r, d + n * N, sum[r][n]);
}

template <class R, int NV, class Put>
INLINE void product_columns(int64_t rows, int64_t depth, const R *a, int64_t as, const R *b, int64_t bs, int64_t d,
                            const Put &put) {
  int64_t i = 0;
  for (; i + 6 <= rows; i += 6) product_tile<R, 6, NV>(a + i * as, as, b + d, bs, depth, i, d, put);
  for (; i + 4 <= rows; i += 4) product_tile<R, 4, NV>(a + i * as, as, b + d, bs, depth, i, d, put);
  for (; i < rows; ++i) product_tile<R, 1, NV>(a + i * as, as, b + d, bs, depth, i, d, put);
}

// `columns` is rounded up to whole vectors: the rows of b and c are padded.
template <class R, class Put>
void product(int64_t rows, int64_t columns, int64_t depth, const R *a, int64_t as, const R *b, int64_t bs,
             const Put &put) {
  constexpr int N = Simd<R>::N, NV = SCATTER_VECTORS;
  int64_t d = 0;
  for (; d + (NV - 1) * N < columns; d += NV * N) product_columns<R, NV>(rows, depth, a, as, b, bs, d, put);
  for (; d < columns; d += N) product_columns<R, 1>(rows, depth, a, as, b, bs, d, put);
}

template <class R> struct Set {
  R *c;
  int64_t cs;
  INLINE void operator()(int64_t i, int64_t d, Vec<R> sum) const { store(c + i * cs + d, sum); }
};
template <class R> struct Add {
  R *c;
  int64_t cs;
  INLINE void operator()(int64_t i, int64_t d, Vec<R> sum) const { store(c + i * cs + d, load(c + i * cs + d) + sum); }
};

}  // namespace
