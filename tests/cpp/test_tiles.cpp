// Products of matrices (engine/tiles.h, kl/decode.h, features/products.h) against plain loops in double, for sizes at
// and around every tile; and that nothing beyond the result is written.
#include "checks.h"
#include "engine/tiles.h"
#include "engine/vector_math.h"
#include "features/products.h"
#include "kl/decode.h"

namespace {

constexpr double GUARD = -77;  // stands behind every result

template <class R> std::vector<R> guarded(int64_t n) { return std::vector<R>(n + 64, (R)GUARD); }
template <class R> void check_guard(const std::vector<R> &x) {
  for (size_t i = x.size() - 64; i < x.size(); ++i) CHECK_SAME(x[i], GUARD, (double)i);
}
// Sums of n products of numbers below 1: each rounding is at most eps/2 of the sum so far.
template <class R> double tolerance(int64_t n) { return (double)EPS<R> * (double)(n + 2); }

template <class R, int NV> void test_panels(int64_t keys, int64_t D) {
  constexpr int64_t L = Simd<R>::N * NV;
  checks::Random random(keys * 100 + D);
  const int64_t stride = D + 3;
  const auto at = random.numbers<R>(D * L), b = random.numbers<R>(keys * stride + 1);
  auto panel = guarded<R>(keys * L);
  const auto expected = [&](int64_t j, int64_t i) {
    double sum = 0;
    for (int64_t d = 0; d < D; ++d) sum += (double)at[d * L + i] * b[j * stride + d];
    return sum;
  };
  Vec<R> top[NV];
  for (auto &x : top) x = broadcast(-INF<R>);
  scores<R, NV, true>(at.data(), b.data(), stride, D, keys, panel.data(), top);
  for (int64_t i = 0; i < L; ++i) {
    double largest = -checks::INFINITE;
    for (int64_t j = 0; j < keys; ++j) {
      CHECK_CLOSE(panel[j * L + i], expected(j, i), tolerance<R>(D), 1, j);
      largest = std::fmax(largest, panel[j * L + i]);
    }
    CHECK_SAME(top[i / Simd<R>::N][i % Simd<R>::N], largest, i);
  }
  check_guard(panel);
  if constexpr (NV == 3) {
    auto plain = guarded<R>(keys * L);
    scores<R, NV, false>(at.data(), b.data(), stride, D, keys, plain.data());
    for (int64_t i = 0; i < keys * L; ++i) CHECK_SAME(plain[i], panel[i], i);
  }

  // Each score again, pair by pair: equal to the last bit. Rows are padded with zeros to whole vectors.
  const int64_t padded = (D + 15) / 16 * 16;
  std::vector<R> a(padded), rows(keys * padded + 1);
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t d = 0; d < D; ++d) rows[j * padded + d] = b[j * stride + d];
  const auto row = [&](int64_t t, int) { return rows.data() + t * padded; };
  for (int64_t i = 0; i < L; i += 5) {
    for (int64_t d = 0; d < D; ++d) a[d] = at[d * L + i];
    std::vector<R> again(keys + 16), dotted(keys + 4);
    chains(a.data(), padded, keys, again.data(), row);
    dots(a.data(), padded, keys, dotted.data(), row);
    for (int64_t j = 0; j < keys; ++j) {
      CHECK_SAME(again[j], panel[j * L + i], j);
      CHECK_CLOSE(dotted[j], expected(j, i), tolerance<R>(D), 1, j);
      CHECK_CLOSE(dot(a.data(), row(j, 0), D), expected(j, i), tolerance<R>(D), 1, j);
    }
  }

  auto ct = guarded<R>(D * L);
  for (int64_t i = 0; i < D * L; ++i) ct[i] = at[i];
  gather<R, NV>(panel.data(), b.data(), stride, keys, D, ct.data());
  for (int64_t d = 0; d < D; ++d)
    for (int64_t i = 0; i < L; ++i) {
      double sum = at[d * L + i], size = 1;
      for (int64_t j = 0; j < keys; ++j) {
        sum += (double)panel[j * L + i] * b[j * stride + d], size += std::fabs((double)panel[j * L + i]);
      }
      CHECK_CLOSE(ct[d * L + i], sum, tolerance<R>(keys), size, d);
    }
  check_guard(ct);

  auto c = guarded<R>(keys * padded);
  const auto left = random.numbers<R>(L * padded), before = random.numbers<R>(keys * padded + 1);
  for (int64_t i = 0; i < keys * padded; ++i) c[i] = before[i];
  scatter<R, L>(panel.data(), left.data(), padded, keys, c.data());
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t d = 0; d < padded; ++d) {
      double sum = before[j * padded + d], size = 1;
      for (int64_t i = 0; i < L; ++i) {
        sum += (double)panel[j * L + i] * left[i * padded + d], size += std::fabs((double)panel[j * L + i]);
      }
      CHECK_CLOSE(c[j * padded + d], sum, tolerance<R>(L), size, d);
    }
  check_guard(c);

  auto scaled = guarded<R>(padded);
  for (int64_t d = 0; d < padded; ++d) scaled[d] = left[d];
  add_scaled((R)0.5, left.data() + padded, padded, scaled.data());
  for (int64_t d = 0; d < padded; ++d) CHECK_CLOSE(scaled[d], left[d] + 0.5 * left[padded + d], (double)EPS<R>, 2, d);
  check_guard(scaled);
}

template <class R, int NV> void test_panels_of_all_sizes() {
  constexpr int64_t TILE = DEEP<NV>;
  for (int64_t keys :
       {(int64_t)0, (int64_t)1, (int64_t)2, (int64_t)3, (int64_t)5, TILE - 1, TILE, TILE + 1, 2 * TILE + 3})
    for (int64_t D :
         {(int64_t)1, (int64_t)2, (int64_t)3, (int64_t)4, (int64_t)7, TILE, TILE + 1, TILE + 5, (int64_t)33})
      test_panels<R, NV>(keys, D);
}

// Numbers that bfloat16 and float16 hold exactly: small multiples of 1/8.
template <class T> T exact(double x) { return (T)x; }
template <> Bf16 exact<Bf16>(double x) {
  const float f = (float)x;
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return {(uint16_t)(bits >> 16)};
}
template <> F16 exact<F16>(double x) {
  for (uint32_t bits = 0; bits < 65536; ++bits)
    if (widen_f16((uint16_t)bits) == x) return {(uint16_t)bits};
  return {0x7e00};
}

template <class R, class T> void test_decode(int64_t rows, int64_t keys, int64_t D) {
  constexpr int64_t L = 8;
  checks::Random random(keys * 100 + D);
  T grid[17];
  for (int i = 0; i < 17; ++i) grid[i] = exact<T>((i - 8) / 8.0);
  const int64_t stride = D + 2;
  std::vector<T> k((keys + 16) * stride), v(k.size());  // prefetches go beyond the keys
  for (T &x : k) x = grid[random.bits() % 17];
  for (T &x : v) x = grid[random.bits() % 17];
  const auto q = random.numbers<R>(L * D), panel = random.numbers<R>(keys * L + 1);
  auto mixed = q;
  deinterleave<R, T>(mixed.data(), rows, D);
  auto found = guarded<R>(keys * L);
  decode_scores<R, T>(mixed.data(), rows, D, k.data(), stride, keys, found.data(), L, v.data(), stride, D);
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t i = 0; i < L; ++i) {
      double sum = 0;
      for (int64_t d = 0; d < D; ++d) sum += (double)q[i * D + d] * (double)widen(k[j * stride + d]);
      if (i < rows)
        CHECK_CLOSE(found[j * L + i], sum, tolerance<R>(D), 1, j);
      else
        CHECK_SAME(found[j * L + i], GUARD, j);
    }
  check_guard(found);

  auto out = guarded<R>(rows * D);
  for (int64_t i = 0; i < rows * D; ++i) out[i] = 0;
  decode_gather<R, T>(panel.data(), L, rows, v.data(), stride, keys, D, out.data(), k.data(), stride, D);
  interleave<R, T>(out.data(), rows, D);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t d = 0; d < D; ++d) {
      double sum = 0;
      for (int64_t j = 0; j < keys; ++j) sum += (double)panel[j * L + i] * (double)widen(v[j * stride + d]);
      CHECK_CLOSE(out[i * D + d], sum, tolerance<R>(keys), 1, d);
    }
  check_guard(out);
}

template <class R, class T> void test_decode_of_all_sizes() {
  for (int64_t rows : {4, 8})
    for (int64_t keys : {0, 1, 2, 3, 9})
      for (int64_t D : {1, 3, 8, 15, 16, 17, 31, 32, 33, 47, 64, 80, 128}) test_decode<R, T>(rows, keys, D);
}

template <class R> void test_products(int64_t rows, int64_t columns, int64_t depth) {
  constexpr int64_t N = Simd<R>::N;
  checks::Random random(rows * 100 + columns);
  const int64_t stride = (columns + N - 1) / N * N;
  const auto a = random.numbers<R>(rows * depth + 1), b = random.numbers<R>(depth * stride + 1);
  for (bool add : {false, true}) {
    auto c = guarded<R>(rows * stride);
    for (int64_t i = 0; i < rows * stride; ++i) c[i] = (R)0.25;
    if (add)
      product<R>(rows, columns, depth, a.data(), depth, b.data(), stride, Add<R>{c.data(), stride});
    else
      product<R>(rows, columns, depth, a.data(), depth, b.data(), stride, Set<R>{c.data(), stride});
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t d = 0; d < columns; ++d) {
        double sum = add ? 0.25 : 0;
        for (int64_t k = 0; k < depth; ++k) sum += (double)a[i * depth + k] * b[k * stride + d];
        CHECK_CLOSE(c[i * stride + d], sum, tolerance<R>(depth), 1, d);
      }
    check_guard(c);
  }
}

template <class R> void test_all() {
  if (sizeof(R) == 4) test_panels_of_all_sizes<float, 1>(), test_panels_of_all_sizes<float, 2>();
  test_panels_of_all_sizes<R, 3>();
  constexpr int64_t N = Simd<R>::N, WIDE = N * SCATTER_VECTORS;
  for (int64_t rows : {1, 3, 4, 5, 6, 7, 11, 13})
    for (int64_t columns : {(int64_t)1, N - 1, N, N + 1, WIDE - 1, WIDE, WIDE + 1, 2 * WIDE + N})
      for (int64_t depth : {0, 1, 3, 4, 9}) test_products<R>(rows, columns, depth);
}

}  // namespace

void test_tiles() {
  test_all<float>();
  test_all<double>();
  test_decode_of_all_sizes<float, float>();
  test_decode_of_all_sizes<float, Bf16>();
  test_decode_of_all_sizes<float, F16>();
  if constexpr (Simd<double>::N >= 4) test_decode_of_all_sizes<double, double>();
}
