// Products of bfloat16 numbers in pairs (engine/bf16_tiles.h) against plain loops in double, for sizes at and around
// every tile; that a score has the same bits in every tile; and that keys which are not read do not take part.
#include "checks.h"
#include "engine/bf16_tiles.h"
#include "engine/vector_math.h"

namespace {

constexpr int N = Simd<float>::N;
constexpr double GUARD = -77;  // stands behind every result

// Round to the nearest bfloat16 number, ties to even, one by one.
uint16_t nearest(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return x != x ? (uint16_t)0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
double value(Bf16 x) { return widen_bf16(x.bits); }
double half_of(Pair pair, int half) { return widen_bf16((uint16_t)(pair >> 16 * half)); }

std::vector<Bf16> halves(checks::Random &random, int64_t n) {
  std::vector<Bf16> result(n);
  for (Bf16 &x : result) x.bits = nearest((float)random.uniform(-1, 1));
  return result;
}
std::vector<float> guarded(int64_t n) { return std::vector<float>(n + 64, (float)GUARD); }
void check_guard(const std::vector<float> &x) {
  for (size_t i = x.size() - 64; i < x.size(); ++i) CHECK_SAME(x[i], GUARD, (double)i);
}
// Sums of n products of numbers below 1. The instruction rounds each product of a pair and their sum.
double tolerance(int64_t n) { return (double)EPS<float> * (double)(2 * n + 4); }

// Rows in pairs along d, transposed.
template <int NV> std::vector<Pair> lanes_of_rows(const std::vector<Bf16> &rows, int64_t D) {
  constexpr int L = N * NV;
  std::vector<Pair> at(D / 2 * L);
  for (int i = 0; i < L; ++i)
    for (int64_t d = 0; d < D / 2; ++d) memcpy(&at[d * L + i], &rows[i * D + 2 * d], 4);
  return at;
}

template <int NV> void test_scores(int64_t keys, int64_t D) {
  constexpr int L = N * NV;
  checks::Random random(keys * 100 + D);
  const int64_t stride = D + 3;  // odd: pairs need not be aligned
  const auto rows = halves(random, L * D), b = halves(random, keys * stride);
  const auto at = lanes_of_rows<NV>(rows, D);
  Vec<float> factor[NV], top[NV];
  for (int i = 0; i < L; ++i) factor[i / N][i % N] = (float)random.uniform(-2, 2);
  for (auto &x : top) x = broadcast(-INF<float>);
  auto panel = guarded(keys * L), plain = guarded(keys * L);
  pair_scores<NV, true>(at.data(), factor, b.data(), stride, D, keys, panel.data(), top);
  pair_scores<NV, false>(at.data(), factor, b.data(), stride, D, keys, plain.data());
  for (int i = 0; i < L; ++i) {
    const float f = factor[i / N][i % N];
    double largest = -checks::INFINITE;
    for (int64_t j = 0; j < keys; ++j) {
      double sum = 0, size = 0;
      for (int64_t d = 0; d < D; ++d) {
        const double term = value(rows[i * D + d]) * value(b[j * stride + d]);
        sum += term, size += std::fabs(term);
      }
      CHECK_CLOSE(panel[j * L + i], f * sum, tolerance(D), std::fabs(f) * size + 1e-30, j);
      CHECK_SAME(plain[j * L + i], panel[j * L + i], j);
      largest = std::fmax(largest, panel[j * L + i]);
    }
    CHECK_SAME(top[i / N][i % N], largest, i);
  }
  check_guard(panel), check_guard(plain);

  // The rows of the first vector again, in a narrower block: the same bits.
  if constexpr (NV > 1) {
    const auto first = lanes_of_rows<1>(rows, D);
    std::vector<float> again(keys * N);
    pair_scores<1, false>(first.data(), factor, b.data(), stride, D, keys, again.data());
    for (int64_t j = 0; j < keys; ++j)
      for (int i = 0; i < N; ++i) CHECK_SAME(again[j * N + i], panel[j * L + i], j);
  }
}

template <int NV> void test_gather(int64_t keys, int64_t D) {
  constexpr int L = N * NV;
  checks::Random random(keys * 100 + D + 1);
  const int64_t stride = D + 3;
  const auto b = halves(random, (keys + 1) * stride);
  const auto weights = random.numbers<float>(keys * L, 0, 1), before = random.numbers<float>(D * L);
  for (int64_t odd = 0; odd < 2; ++odd) {  // the first key may be the second half of its pair
    const int64_t n = (keys + odd + 1) / 2, skip = odd * stride;
    std::vector<Pair> values((n + 1) * D), spare((n + 1) * D), paired(n * L);
    pair_rows(b.data() + stride - skip, stride, keys + odd, D, values.data(), D);
    Vec<float> used[NV] = {};
    pair_keys<NV>(weights.data(), odd, keys, paired.data(), used);
    const Pair *read = admit(values.data(), D, odd, keys, nullptr, spare.data());
    CHECK((read == values.data()) == (!odd && keys % 2 == 0));
    auto ct = guarded(D * L);
    for (int64_t at = 0; at < D * L; ++at) ct[at] = before[at];
    pair_gather<NV>(paired.data(), read, D, n, D, ct.data());
    for (int i = 0; i < L; ++i) {
      double total = 0;
      for (int64_t j = 0; j < keys; ++j) total += widen_bf16(nearest(weights[j * L + i]));
      CHECK_CLOSE(used[i / N][i % N], total, tolerance(keys), total, i);
      for (int64_t d = 0; d < D; ++d) {
        double sum = before[d * L + i], size = 1;
        for (int64_t j = 0; j < keys; ++j) {
          const double term = (double)widen_bf16(nearest(weights[j * L + i])) * value(b[(j + 1) * stride + d]);
          sum += term, size += std::fabs(term);
        }
        CHECK_CLOSE(ct[d * L + i], sum, tolerance(keys), size, d);
      }
    }
    check_guard(ct);
  }
}

template <int L> void test_scatter(int64_t keys, int64_t D) {
  checks::Random random(keys * 100 + D + 2);
  const int64_t stride = (D + N - 1) / N * N, rows = L - 3;  // the last rows do not exist
  const auto panel = halves(random, keys * L), a = halves(random, rows * D);
  std::vector<Pair> paired(L / 2 * stride);
  pair_rows(a.data(), D, rows, D, paired.data(), stride);
  auto c = guarded(keys * stride);
  for (int64_t at = 0; at < keys * stride; ++at) c[at] = 0;
  pair_scatter<L>(panel.data(), paired.data(), stride, keys, c.data());
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t d = 0; d < stride; ++d) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < rows && d < D; ++i) {
        const double term = value(panel[j * L + i]) * value(a[i * D + d]);
        sum += term, size += std::fabs(term);
      }
      CHECK_CLOSE(c[j * stride + d], sum, tolerance(L), size, d);
    }
  check_guard(c);
}

void test_rounding() {
  checks::Random random(3);
  for (int round = 0; round < 200; ++round) {
    Vec<float> a, b;
    for (int i = 0; i < N; ++i) {
      uint32_t bits[2] = {random.bits() * 2, random.bits() * 2 + 1};
      for (uint32_t &x : bits) {
        if (round % 3 == 0) x = (x & 0xffff0000u) | 0x8000u;    // a tie
        if ((x >> 23 & 0xff) == 0) x |= 0x00800000u;            // not subnormal
        if (round % 10 == 9) x |= 0x7f800000u | (x & 1) << 22;  // infinity or NaN
      }
      float both[2];
      memcpy(both, bits, 8);
      a[i] = both[0], b[i] = both[1];
    }
    const PairVec pairs = round_pairs(a, b);
    Bf16 rounded[N];
    store_rounded(rounded, a);
    for (int i = 0; i < N; ++i) {
      CHECK_SAME(half_of(pairs[i], 0), (double)widen_bf16(nearest(a[i])), i);
      CHECK_SAME(half_of(pairs[i], 1), (double)widen_bf16(nearest(b[i])), i);
      CHECK_SAME(value(rounded[i]), (double)widen_bf16(nearest(a[i])), i);
    }
  }
}

// Rows of a tensor, in any layout and type.
void test_rows(int64_t D, int64_t step, bool single) {
  checks::Random random(D * 10 + step);
  const auto numbers = random.numbers<float>(D * step + 1);
  const auto small = halves(random, D * step + 1);
  Tensor t = {};
  t.data = single ? (int64_t)numbers.data() : (int64_t)small.data();
  t.type = single ? regard::F32 : regard::BF16, t.s3 = step;
  std::vector<Bf16> to(even(D) + 1, Bf16{0x1234});
  round_row(t, 0, D, to.data());
  for (int64_t d = 0; d < D; ++d) CHECK_SAME(to[d].bits, single ? nearest(numbers[d * step]) : small[d * step].bits, d);
  if (D % 2) CHECK_SAME(to[D].bits, 0, D);
  CHECK_SAME(to[even(D)].bits, 0x1234, D);
}

// A key that is not read may hold NaN: it must not reach a sum through its pair.
void test_admission() {
  constexpr int64_t KEYS = 9, D = 5;
  checks::Random random(4);
  auto b = halves(random, KEYS * D);
  uint8_t live[KEYS];
  for (int64_t j = 0; j < KEYS; ++j) {
    live[j] = j % 3 != 1;
    for (int64_t d = 0; d < D && !live[j]; ++d) b[j * D + d].bits = 0x7fc0;
  }
  std::vector<Pair> pairs((KEYS + 1) / 2 * D), spare(pairs.size());
  pair_rows(b.data(), D, KEYS, D, pairs.data(), D);
  const Pair *read = admit(pairs.data(), D, 0, KEYS, live, spare.data());
  for (int64_t j = 0; j < KEYS + 1; ++j)
    for (int64_t d = 0; d < D; ++d) {
      const double expected = j < KEYS && live[j] ? value(b[j * D + d]) : 0;
      CHECK_SAME(half_of(read[j / 2 * D + d], j % 2), expected, j);
    }
}

}  // namespace

void test_bf16_tiles() {
  for (int64_t keys : {1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 23, 24, 25, 31, 96})
    for (int64_t D : {2, 4, 6, 8, 10, 16, 34, 64}) {
      test_scores<1>(keys, D), test_scores<2>(keys, D), test_scores<3>(keys, D);
      test_gather<2>(keys, D), test_gather<2>(keys, D + 1), test_gather<3>(keys, D), test_gather<3>(keys, D - 1);
      test_scatter<3 * N>(keys, D), test_scatter<3 * N>(keys, D + 1);
    }
  test_rounding();
  for (int64_t D : {1, 2, 3, 7, 16, 17, 33, 64})
    for (int64_t step : {1, 3}) test_rows(D, step, false), test_rows(D, step, true);
  test_admission();
}
