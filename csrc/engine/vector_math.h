// Exponentials, logarithms and tanh of vectors, and the constants they need.
//
// In float32 these are polynomials with an error of a few units in the last place at most; each function states its
// domain. In float64 they call the C library lane by lane. NaN gives NaN unless stated otherwise. The functions that
// end in `_of` take one number and always call the C library: they serve what is computed once per row.
#pragma once
#include <math.h>

#include "engine/vector.h"

namespace {

template <class R> constexpr R INF = (R)__builtin_inf();
template <class R> constexpr R NOT_A_NUMBER = (R)__builtin_nan("");
template <class R> constexpr R LOWEST = sizeof(R) == 4 ? (R)-3.402823466e38 : (R)-1.7976931348623157e308;
constexpr double LOG2E = 1.4426950408889634074, LN2 = 0.69314718055994530942;

// 2^t for t <= 0 (t may be as large as 127), by a polynomial of degree 5 with a relative error of 1.7e-7. NaN gives
// NaN. U vectors are computed at once, step by step, so that their latencies overlap. ZERO: the result is exactly 0
// where t < -126, for any t. Without ZERO, t must be at least -126.
template <bool ZERO, int U> INLINE void vexp2(const Vec<float> (&t)[U], Vec<float> (&p)[U]) {
  using M = Mask<float>;
  using Bits = uint32_t __attribute__((vector_size(sizeof(M))));  // unsigned, because the shift may overflow
  Vec<float> shifted[U], f[U];
#define EACH _Pragma("GCC unroll 8") for (int u = 0; u < U; ++u)
  // 1.5 * 2^23 + 127: the low bits of the sum are t rounded to an integer, biased as in the exponent of a float.
  EACH shifted[u] = t[u] + 12583039.0f;
  EACH f[u] = t[u] - (shifted[u] - 12583039.0f);
  EACH p[u] = f[u] * 0.001326471498823669f + 0.009671513510714606f;
  EACH p[u] = p[u] * f[u] + 0.05550733783773515f;
  EACH p[u] = p[u] * f[u] + 0.24022242066381747f;
  EACH p[u] = p[u] * f[u] + 0.6931469775710566f;
  EACH p[u] = p[u] * f[u] + 1.0f;
  EACH p[u] *= (Vec<float>)((Bits)shifted[u] << 23);  // a product: an addition to the bits would turn NaN into a number
  if (ZERO) EACH p[u] = (Vec<float>)((M)p[u] & ~(t[u] < -126.0f));
#undef EACH
}
template <bool ZERO, int U> INLINE void vexp2(const Vec<double> (&t)[U], Vec<double> (&p)[U]) {
  for (int u = 0; u < U; ++u) {
    p[u] = t[u];
    for (int n = 0; n < Simd<double>::N; ++n) p[u][n] = ::exp2(t[u][n]);
  }
}
template <class V> INLINE V vexp2(V t) {
  const V in[1] = {t};
  V out[1];
  vexp2<true>(in, out);
  return out[0];
}
INLINE float exp2_of(float t) { return ::exp2f(t); }
INLINE double exp2_of(double t) { return ::exp2(t); }
INLINE float exp_of(float t) { return ::expf(t); }
INLINE double exp_of(double t) { return ::exp(t); }
INLINE float log_of(float t) { return ::logf(t); }
INLINE double log_of(double t) { return ::log(t); }
INLINE float log2_of(float t) { return ::log2f(t); }
INLINE double log2_of(double t) { return ::log2(t); }

// The rational function that Eigen uses, clamped at +-7.9, where tanh rounds to 1: a few units in the last place.
INLINE Vec<float> vtanh(Vec<float> x) {
  using V = Vec<float>;
  x = vmax(broadcast(-7.90531110763549805f), -vmax(broadcast(-7.90531110763549805f), -x));
  const V z = x * x;
  V top = z * -2.76076847742355e-16f + 2.00018790482477e-13f;
  top = top * z + -8.60467152213735e-11f;
  top = top * z + 5.12229709037114e-08f;
  top = top * z + 1.48572235717979e-05f;
  top = top * z + 6.37261928875436e-04f;
  top = top * z + 4.89352455891786e-03f;
  V bottom = z * 1.19825839466702e-06f + 1.18534705686654e-04f;
  bottom = bottom * z + 2.26843463243900e-03f;
  bottom = bottom * z + 4.89352518554385e-03f;
  return x * top / bottom;
}
INLINE Vec<double> vtanh(Vec<double> x) {
  for (int n = 0; n < Simd<double>::N; ++n) x[n] = ::tanh(x[n]);
  return x;
}

// The lower bound of exponents before they are exponentiated. With ZERO (some key is masked, x = -inf) p becomes 0 and
// p t stays finite. Without, the bound is the smallest t that vexp2 accepts, and p is 2^-126 instead of 0.
template <class R, bool ZERO> constexpr R FLOOR = sizeof(R) == 4 ? (ZERO ? -200 : -126) : (ZERO ? -2000 : -1000);

// The natural logarithm of a normal number y > 0, by the polynomial of Cephes: one or two units in the last place.
INLINE Vec<float> vlog(Vec<float> y) {
  using V = Vec<float>;
  using M = Mask<float>;
  const M bits = (M)y - 0x3f3504f3;  // the mantissa is taken from sqrt(1/2) to sqrt(2)
  const M exponent = bits >> 23;
  const V f = (V)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f, e = __builtin_convertvector(exponent, V), z = f * f;
  V q = f * 7.0376836292e-2f - 1.1514610310e-1f;
  q = q * f + 1.1676998740e-1f;
  q = q * f - 1.2420140846e-1f;
  q = q * f + 1.4249322787e-1f;
  q = q * f - 1.6668057665e-1f;
  q = q * f + 2.0000714765e-1f;
  q = q * f - 2.4999993993e-1f;
  q = q * f + 3.3333331174e-1f;
  return (q * f * z + e * -2.12194440e-4f - 0.5f * z) + f + e * 0.693359375f;
}
INLINE Vec<double> vlog(Vec<double> y) {
  for (int n = 0; n < Simd<double>::N; ++n) y[n] = ::log(y[n]);
  return y;
}
// log(1 + d) for d > -1, accurate also where d is small.
INLINE Vec<float> vlog1p(Vec<float> d) {
  const Vec<float> u = d + 1.0f;
  return vlog(u) + (d - (u - 1.0f)) / u;
}
INLINE Vec<double> vlog1p(Vec<double> d) {
  for (int n = 0; n < Simd<double>::N; ++n) d[n] = ::log1p(d[n]);
  return d;
}
INLINE Vec<float> vsqrt(Vec<float> x) {
  for (int n = 0; n < Simd<float>::N; ++n) x[n] = ::sqrtf(x[n]);
  return x;
}
INLINE Vec<double> vsqrt(Vec<double> x) {
  for (int n = 0; n < Simd<double>::N; ++n) x[n] = ::sqrt(x[n]);
  return x;
}
template <class R> constexpr R TINY = sizeof(R) == 4 ? (R)1.1754943508e-38 : (R)2.2250738585072014e-308;
template <class R> constexpr R EPS = sizeof(R) == 4 ? (R)1.1920929e-7 : (R)2.220446049250313e-16;
// 2^t for any t. Above, t is clamped to the largest exponent: a larger one would overflow into the sign bit.
template <class V> INLINE V exp2_bounded(V t) {
  constexpr double most = sizeof(t[0]) == 4 ? 127 : 1023;
  return vexp2((V)(-vmax(V{} - (decltype(t[0] + 0))most, -t)));
}

// The square root of a prior that is given as its logarithm in base 2. It is clamped so that its square is finite.
template <class V> INLINE V root_of(V log_prior) {
  using R = decltype(log_prior[0] + 0);
  return exp2_bounded((V)(-vmax(V{} - (R)(sizeof(R) == 4 ? 63.5 : 511.5), (R)-0.5 * log_prior)));
}

// f of each lane. With functions of the C library this is exact enough for results and covers every special case.
template <class V, class F> INLINE V map_lanes(V x, F f) {
  for (unsigned i = 0; i < sizeof(V) / sizeof(x[0]); ++i) x[i] = f(x[i]);
  return x;
}

}  // namespace
