// Vectors and their functions (engine/vector.h, engine/vector_math.h) against the C library in long double.
#include "checks.h"
#include "engine/vector_math.h"

namespace {

using checks::INFINITE;
using checks::NAN_;

template <class R> constexpr bool SINGLE = sizeof(R) == 4;

// f of one number, in all lanes.
template <class R, class F> R one(F f, double x) {
  const Vec<R> y = f(broadcast((R)x));
  for (int i = 1; i < Simd<R>::N; ++i) CHECK_SAME(y[i], y[0], x);
  return y[0];
}

// Call f for numbers from low to high, evenly spaced; all of them are numbers of type R.
template <class R, class F> void sweep_range(double low, double high, int steps, F f) {
  for (int i = 0; i <= steps; ++i) f((double)(R)(low + (high - low) * i / steps));
}

// The same for powers of two times a mantissa, so that all magnitudes appear.
template <class R, class F> void sweep_magnitudes(int low, int high, F f) {
  checks::Random random(3);
  for (int exponent = low; exponent <= high; ++exponent)
    for (int i = 0; i < 20; ++i) f((double)(R)std::ldexp(random.uniform(1, 2), exponent));
}

template <class R> void test_lanes() {
  constexpr int N = Simd<R>::N;
  R from[2 * N + 1], to[2 * N + 1] = {};
  for (int i = 0; i <= 2 * N; ++i) from[i] = (R)(i * i - 7);
  for (int shift = 0; shift <= N; ++shift) {  // without alignment
    store(to + shift, load(from + shift));
    for (int i = 0; i < N; ++i) CHECK_SAME(to[shift + i], from[shift + i], i);
  }
  const Vec<R> minus_zero = broadcast((R)-0.0);
  CHECK(std::signbit((double)minus_zero[0]));

  // The maximum is its second argument where one of them is NaN.
  const auto larger = [](double a, double b) { return (double)vmax(broadcast((R)a), broadcast((R)b))[0]; };
  CHECK_SAME(larger(2, 3), 3, 0);
  CHECK_SAME(larger(3, 2), 3, 0);
  CHECK_SAME(larger(-INFINITE, -5), -5, 0);
  CHECK_SAME(larger(2, NAN_), NAN_, 0);
  CHECK_SAME(larger(NAN_, 2), 2, 0);

  for (unsigned bits = 0; bits < (1u << min_of(N, 8)); ++bits) {
    Mask<R> mask = {};
    for (int i = 0; i < N; ++i) mask[i] = bits >> (i % 8) & 1 ? -1 : 0;
    unsigned expected = 0;
    for (int i = 0; i < N; ++i) expected |= (unsigned)(mask[i] != 0) << i;
    CHECK_SAME(lanes_of(mask), expected, bits);
    CHECK(any(mask) == (expected != 0));
  }

  checks::Random random(1);
  Vec<R> x[4];
  R sums[4];
  double expected[4] = {};
  for (int k = 0; k < 4; ++k)
    for (int i = 0; i < N; ++i) x[k][i] = (R)random.uniform(-1, 1), expected[k] += x[k][i];
  add_lanes<R>(x, sums);
  for (int k = 0; k < 4; ++k) CHECK_CLOSE(sums[k], expected[k], N * (double)EPS<R>, 1, k);

  for (int i = 0; i < 1000; ++i) {
    const R a = (R)random.uniform(-1, 1), b = (R)random.uniform(-1, 1), c = (R)random.uniform(-1, 1);
    const double found = multiply_add(broadcast(a), broadcast(b), broadcast(c))[0];
#if defined(__FMA__) || defined(__aarch64__)
    CHECK_SAME(found, std::fma(a, b, c), i);  // rounded once
#else
    CHECK_CLOSE(found, (double)a * b + c, 2 * (double)EPS<R>, 1, i);
#endif
  }
}

template <class R> void test_exp2() {
  const auto zero = [](Vec<R> t) { return vexp2(t); };
  const auto bounded = [](Vec<R> t) { return exp2_bounded(t); };
  const double tolerance = SINGLE<R> ? 2e-7 : 4e-16, lowest = SINGLE<R> ? -126 : -1022;
  const auto check = [&](double t) {
    const double truth = (double)std::exp2((long double)t);
    CHECK_CLOSE(one<R>(zero, t), truth, tolerance, -1, t);
    CHECK_CLOSE(one<R>(bounded, t), truth, tolerance, -1, t);
  };
  sweep_range<R>(lowest, SINGLE<R> ? 126 : 1023, 20000, check);
  sweep_magnitudes<R>(-30, 5, check);
  sweep_magnitudes<R>(-30, 5, [&](double t) { check(-t); });
  CHECK_SAME(one<R>(zero, 0), 1, 0);
  CHECK_SAME(one<R>(zero, NAN_), NAN_, 0);
  CHECK_SAME(one<R>(bounded, NAN_), NAN_, 0);
  for (double t : {-INFINITE, -1e30, -5000.0}) {
    CHECK_SAME(one<R>(zero, t), 0, t);
    CHECK_SAME(one<R>(bounded, t), 0, t);
  }
  if (SINGLE<R>)  // no subnormal results
    sweep_range<R>(-400, -126.01, 2000, [&](double t) { CHECK_SAME(one<R>(zero, t), 0, t); });
  const double largest = std::ldexp(1.0, SINGLE<R> ? 127 : 1023);
  for (double t : {INFINITE, 1e30, 5000.0, SINGLE<R> ? 127.5 : 1023.5})
    CHECK_CLOSE(one<R>(bounded, t), largest, tolerance, -1, t);

  // Several vectors at once, and without the comparison that makes tiny results 0: the same numbers.
  checks::Random random(2);
  for (int i = 0; i < 100; ++i) {
    Vec<R> t[4], p[4];
    for (auto &x : t)
      for (int n = 0; n < Simd<R>::N; ++n) x[n] = (R)random.uniform(-126, 0);
    vexp2<false>(t, p);
    for (int u = 0; u < 4; ++u) {
      const Vec<R> single = vexp2(t[u]);
      for (int n = 0; n < Simd<R>::N; ++n) CHECK_SAME(p[u][n], single[n], t[u][n]);
    }
  }
  const auto root = [](Vec<R> x) { return root_of(x); };
  sweep_range<R>(lowest, -lowest, 2000, [&](double x) {
    CHECK_CLOSE(one<R>(root, x), (double)std::exp2((long double)x / 2), 2 * tolerance, -1, x);
  });
  CHECK(std::isfinite(one<R>(root, 1e30) * one<R>(root, 1e30)));
  CHECK_SAME(one<R>(root, -INFINITE), 0, 0);
}

template <class R> void test_logarithms() {
  const auto log = [](Vec<R> y) { return vlog(y); };
  const auto log1p = [](Vec<R> d) { return vlog1p(d); };
  const double tolerance = 2 * (double)EPS<R>;
  const auto check = [&](double y) { CHECK_CLOSE(one<R>(log, y), (double)std::log((long double)y), tolerance, -1, y); };
  sweep_magnitudes<R>(SINGLE<R> ? -126 : -1022, SINGLE<R> ? 127 : 1023, check);
  sweep_range<R>(0.5, 2, 20000, check);
  check(TINY<R>);
  CHECK_SAME(one<R>(log, 1), 0, 1);
  const auto check1p = [&](double d) {
    CHECK_CLOSE(one<R>(log1p, d), (double)std::log1p((long double)d), 2 * tolerance, -1, d);
  };
  sweep_magnitudes<R>(-100, 100, check1p);
  sweep_magnitudes<R>(-100, -2, [&](double d) { check1p(-d); });
  sweep_range<R>(-0.999, 3, 20000, check1p);
  CHECK_SAME(one<R>(log1p, 0), 0, 0);
}

template <class R> void test_others() {
  const auto tanh = [](Vec<R> x) { return vtanh(x); };
  const auto check = [&](double x) {
    CHECK_CLOSE(one<R>(tanh, x), (double)std::tanh((long double)x), 4 * (double)EPS<R>, -1, x);
    CHECK_SAME(one<R>(tanh, -x), -one<R>(tanh, x), x);
  };
  sweep_magnitudes<R>(-30, 7, check);
  sweep_range<R>(0, 12, 20000, check);
  for (double x : {INFINITE, 1e30}) CHECK_CLOSE(one<R>(tanh, x), 1, 4 * (double)EPS<R>, -1, x);
  CHECK_SAME(one<R>(tanh, NAN_), NAN_, 0);

  const auto sqrt = [](Vec<R> x) { return vsqrt(x); };
  sweep_magnitudes<R>(-100, 100, [&](double x) { CHECK_SAME(one<R>(sqrt, x), (double)(R)std::sqrt(x), x); });
  CHECK_SAME(one<R>(sqrt, 0), 0, 0);
  CHECK_SAME(one<R>(sqrt, std::numeric_limits<R>::denorm_min()), (R)std::sqrt(std::numeric_limits<R>::denorm_min()), 0);
  CHECK_SAME(one<R>(sqrt, -1), NAN_, 0);
}

template <class R> void test_all() {
  test_lanes<R>();
  test_exp2<R>();
  test_logarithms<R>();
  test_others<R>();
}

}  // namespace

void test_vector_math() {
  test_all<float>();
  test_all<double>();
}
