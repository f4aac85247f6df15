// Elements of every type (engine/elements.h) and transposes (engine/transpose.h) against plain loops.
#include "checks.h"
#include "engine/elements.h"
#include "engine/transpose.h"

namespace {

// A float16 or bfloat16 by its definition: sign, exponent, mantissa.
double by_definition(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1), bias = (1 << (exponent_bits - 1)) - 1;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? checks::NAN_ : sign * checks::INFINITE;
  const double fraction = std::ldexp((double)mantissa, -mantissa_bits);
  return sign * std::ldexp(exponent ? 1 + fraction : fraction, (exponent ? exponent : 1) - bias);
}

void test_numbers_of_16_bits() {
  constexpr int N = Simd<float>::N;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    CHECK_SAME(widen_f16((uint16_t)bits), by_definition((uint16_t)bits, 5, 10), bits);
    CHECK_SAME(widen_bf16((uint16_t)bits), by_definition((uint16_t)bits, 8, 7), bits);
  }
  F16 halves[N + 1];
  Bf16 brains[N + 1];
  for (uint32_t first = 0; first + N < 65536; first += 7 * N) {
    for (int i = 0; i <= N; ++i) halves[i].bits = brains[i].bits = (uint16_t)(first + i);
    const Vec<float> a = load_wide(halves + 1), b = load_wide(brains + 1);
    for (int i = 0; i < N; ++i) {
      CHECK_SAME(a[i], widen(halves[i + 1]), first + i);
      CHECK_SAME(b[i], widen(brains[i + 1]), first + i);
    }
  }
}

// `element` and `copy` of one type, with steps and strides; T holds the bits of an element.
template <class R, class T> void test_type(int64_t type, double (*value)(T)) {
  checks::Random random(type + 1);
  T from[80];
  for (T &x : from) {
    const double number = random.uniform(-3, 3);
    if (type == regard::F32 || type == regard::F64)
      x = (T)number;
    else if (type == regard::BOOL)
      x = (T)(number > 0);
    else
      x = (T)(0x3000 + random.bits() % 0x1000);  // ordinary numbers in both types of 16 bits
  }
  for (int64_t n = 0; n < 21; ++n)
    for (int64_t step = 1; step <= 3; ++step)
      for (int64_t stride = 1; stride <= 3; stride += 2) {
        R to[80];
        for (R &x : to) x = -7;
        copy<R>((int64_t)from, type, 2, step, n, to + 1, stride, (R)0.5);
        for (int64_t j = 0; j < 79; ++j) {
          const bool written = j % stride == 0 && j / stride < n;
          const double expected = written ? (R)value(from[2 + j / stride * step]) * 0.5 : -7;
          CHECK_SAME(to[1 + j], expected, j);
        }
        CHECK_SAME(to[0], -7, n);
      }
  for (int64_t at = 0; at < 80; ++at) CHECK_SAME(element<R>((int64_t)from, type, at), (R)value(from[at]), at);
}

template <class R> void test_types() {
  test_type<R, float>(regard::F32, [](float x) { return (double)x; });
  test_type<R, double>(regard::F64, [](double x) { return x; });
  test_type<R, uint16_t>(regard::BF16, [](uint16_t x) { return by_definition(x, 8, 7); });
  test_type<R, uint16_t>(regard::F16, [](uint16_t x) { return by_definition(x, 5, 10); });
  test_type<R, uint8_t>(regard::BOOL, [](uint8_t x) { return (double)x; });
}

// Rows of a tensor are read in place where they can be, and copied otherwise.
template <class R> void test_rows() {
  constexpr int64_t T = 9, D = 5;
  checks::Random random(4);
  const auto numbers = random.numbers<R>(T * D * 2);
  for (int64_t inner = 1; inner <= 2; ++inner) {
    const Tensor t = {(int64_t)numbers.data(), sizeof(R) == 4 ? regard::F32 : regard::F64, 0, 0, D * inner, inner};
    R spare[T * D];
    int64_t stride = 0;
    const R *rows = as_rows<R>(t, 0, 0, 2, 4, D, spare, stride);
    CHECK((rows == spare) == (inner == 2));
    for (int64_t j = 0; j < 4; ++j)
      for (int64_t d = 0; d < D; ++d) CHECK_SAME(rows[j * stride + d], numbers[(2 + j) * D * inner + d * inner], j);
  }
}

template <class R> void test_transposes() {
  checks::Random random(5);
  for (int64_t n = 0; n <= 19; ++n)
    for (int64_t D = 1; D <= 19; ++D) {
      const auto numbers = random.numbers<R>(n * D + 1), factor = random.numbers<R>(n + 1);
      std::vector<const R *> from(n + 1);
      for (int64_t i = 0; i < n; ++i) from[i] = numbers.data() + i * D;
      const int64_t stride = n + 3;
      std::vector<R> lanes(D * stride + 1, (R)-7);
      const int64_t done = to_lanes(from.data(), factor.data(), n, D, lanes.data(), stride);
      CHECK(done >= 0 && done <= n);
      for (int64_t d = 0; d < D; ++d)
        for (int64_t i = 0; i < stride; ++i)
          CHECK_SAME(lanes[d * stride + i], i < done ? (R)(from[i][d] * factor[i]) : (R)-7, i);
      for (int64_t i = 0; i < n; ++i)
        for (int64_t d = 0; d < D; ++d) lanes[d * stride + i] = from[i][d];
      std::vector<R> back(n * (D + 1) + 1, (R)-7);
      std::vector<R *> to(n + 1);
      for (int64_t i = 0; i < n; ++i) to[i] = back.data() + i * (D + 1);
      to_rows(lanes.data(), stride, factor.data(), n, D, to.data());
      for (int64_t i = 0; i < n; ++i)
        for (int64_t d = 0; d <= D; ++d) CHECK_SAME(to[i][d], d < D ? (R)(from[i][d] * factor[i]) : (R)-7, d);
    }
}

}  // namespace

void test_elements() {
  test_numbers_of_16_bits();
  test_types<float>(), test_types<double>();
  test_rows<float>(), test_rows<double>();
  test_transposes<float>(), test_transposes<double>();
}
