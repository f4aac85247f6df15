// What compiled functions of users are made of (src/regard/compiled/cpp.py writes calls of these).
//
// Real numbers are Vec<R>, truth values Mask<R>. Integers are Mask<R>, too, where they are known to fit 32 bits, and
// Wide<R> (64 bits in each lane) elsewhere. Functions here are defined for every argument: infinities, NaN, negative and
// subnormal numbers give what the C library gives. Those that end in `_exactly` call the C library lane by lane; they
// serve what is rounded or compared afterwards, where an error in the last place could change the result.
#pragma once
#include "engine/vector_math.h"

namespace {

template <class R> struct WideOf {
  typedef int64_t type __attribute__((vector_size(8 * Simd<R>::N)));
};
template <class R> using Wide = typename WideOf<R>::type;

// A captured tensor: its address, sizes and strides in elements.
struct Captured {
  int64_t data, sizes[8], strides[8];
};

// --- conversions ------------------------------------------------------------------------------------------------------

template <class R> INLINE Wide<R> wide(Mask<R> x) { return __builtin_convertvector(x, Wide<R>); }
template <class R> INLINE Mask<R> narrow(Wide<R> x) { return __builtin_convertvector(x, Mask<R>); }
template <class R> INLINE Vec<R> real_of_narrow(Mask<R> x) { return __builtin_convertvector(x, Vec<R>); }
template <class R> INLINE Vec<R> real_of_wide(Wide<R> x) { return __builtin_convertvector(x, Vec<R>); }
template <class R> INLINE Vec<R> real_of_truth(Mask<R> x) { return x ? broadcast((R)1) : Vec<R>{}; }
template <class R> INLINE Mask<R> narrow_of_truth(Mask<R> x) { return x & 1; }
// Towards zero. What does not fit 64 bits, NaN included, becomes the least integer, as in PyTorch on x86.
template <class R> INLINE Wide<R> wide_of_real(Vec<R> x) {
  Wide<R> to;
  for (int n = 0; n < Simd<R>::N; ++n) to[n] = x[n] > (R)-9.2e18 && x[n] < (R)9.2e18 ? (int64_t)x[n] : INT64_MIN;
  return to;
}

// --- integers ---------------------------------------------------------------------------------------------------------

template <class I> INLINE I int_abs(I x) { return x < 0 ? -x : x; }
template <class I> INLINE I int_sign(I x) { return (x < 0) - (x > 0); }
template <class I> INLINE I int_minimum(I x, I y) { return x < y ? x : y; }
template <class I> INLINE I int_maximum(I x, I y) { return x > y ? x : y; }
template <class I> INLINE I int_remainder(I x, int64_t by) {  // by != 0; the sign of the result is that of `by`
  using T = decltype(x[0] + 0);
  const T d = (T)by;
  if (by > 0 && (by & (by - 1)) == 0) return x & (I{} + (T)(by - 1));
  I rest = x % d;
  return (rest != 0) & ((rest < 0) != (I{} + d < 0)) ? rest + d : rest;
}
template <class I> INLINE I int_trunc_divide(I x, int64_t by) { return x / (decltype(x[0] + 0))by; }
template <class I> INLINE I int_floor_divide(I x, int64_t by) {
  using T = decltype(x[0] + 0);
  if (by > 0 && (by & (by - 1)) == 0) return x >> (T)__builtin_ctzll((uint64_t)by);
  const I quotient = x / (T)by, rest = x - quotient * (T)by;
  return (rest != 0) & ((rest < 0) != (I{} + (T)by < 0)) ? quotient - 1 : quotient;
}

// --- real numbers -----------------------------------------------------------------------------------------------------

template <class V> INLINE V minimum(V x, V y) { return x != x ? x : y != y ? y : x < y ? x : y; }
template <class V> INLINE V maximum(V x, V y) { return x != x ? x : y != y ? y : x > y ? x : y; }
template <class V> INLINE V absolute(V x) {
  using R = decltype(x[0] + 0);
  return (V)((Mask<R>)x & (Mask<R>{} + (typename Simd<R>::I)(sizeof(R) == 4 ? 0x7fffffff : 0x7fffffffffffffff)));
}
template <class V> INLINE V sign(V x) {
  using R = decltype(x[0] + 0);
  return x > 0 ? V{} + (R)1 : x < 0 ? V{} - (R)1 : x != x ? x : V{};
}
template <class V> INLINE V relu(V x) { return x < 0 ? V{} : x; }

#define BY_LANES(name, call)                                             \
  INLINE Vec<float> name(Vec<float> x) {                                 \
    return map_lanes(x, [](float t) { return __builtin_##call##f(t); }); \
  }                                                                      \
  INLINE Vec<double> name(Vec<double> x) {                               \
    return map_lanes(x, [](double t) { return __builtin_##call(t); });   \
  }
#define PAIRS_BY_LANES(name, expression)                                                   \
  template <class V> INLINE V name(V x, V y) {                                             \
    for (unsigned n = 0; n < sizeof(V) / sizeof(x[0]); ++n) x[n] = expression(x[n], y[n]); \
    return x;                                                                              \
  }
BY_LANES(floor_of, floor)
BY_LANES(ceil_of, ceil)
BY_LANES(round_of, nearbyint)  // to the nearest even number
BY_LANES(trunc_of, trunc)
BY_LANES(root, sqrt)
BY_LANES(exp_exactly, exp)
BY_LANES(exp2_exactly, exp2)
BY_LANES(expm1_exactly, expm1)
BY_LANES(log_exactly, log)
BY_LANES(log2_exactly, log2)
BY_LANES(log1p_exactly, log1p)
BY_LANES(tanh_exactly, tanh)
BY_LANES(erf_exactly, erf)
BY_LANES(sin_exactly, sin)
BY_LANES(cos_exactly, cos)
BY_LANES(atan_exactly, atan)

INLINE float remainder_of(float x, float y) {
  const float rest = __builtin_fmodf(x, y);
  return rest != 0 && (y < 0) != (rest < 0) ? rest + y : rest;
}
INLINE double remainder_of(double x, double y) {
  const double rest = __builtin_fmod(x, y);
  return rest != 0 && (y < 0) != (rest < 0) ? rest + y : rest;
}
// floor(x / y) of the exact quotient, which the rounded quotient may exceed. As PyTorch computes it.
template <class R> INLINE R floor_quotient(R x, R y) {
  if (y == 0) return x / y;
  const R rest = sizeof(R) == 4 ? (R)__builtin_fmodf((float)x, (float)y) : (R)__builtin_fmod(x, y);
  R quotient = (x - rest) / y;
  if (rest != 0 && (y < 0) != (rest < 0)) quotient -= 1;
  if (quotient == 0) return __builtin_copysign((R)0, x / y);
  const R down = (R)__builtin_floor(quotient);
  return quotient - down > (R)0.5 ? down + 1 : down;
}
INLINE float power_of(float x, float y) { return __builtin_powf(x, y); }
INLINE double power_of(double x, double y) { return __builtin_pow(x, y); }
template <class R> INLINE R x_log_y(R x, R y) { return y != y ? y : x == 0 ? (R)0 : x * log_of(y); }
PAIRS_BY_LANES(remainder_of_reals, remainder_of)
PAIRS_BY_LANES(floor_divide_reals, floor_quotient)
PAIRS_BY_LANES(power, power_of)
PAIRS_BY_LANES(xlogy, x_log_y)
#undef BY_LANES
#undef PAIRS_BY_LANES

// 2^t. In float32 above 126, in two factors, because the polynomial ends at 127; numbers below 2^-126 become 0.
INLINE Vec<float> exp2_anywhere(Vec<float> t) {
  const Vec<float> most = broadcast(129.0f);
  t = t > most ? most : t;
  const Mask<float> large = t > 126.0f;
  return vexp2(large ? t - 2.0f : t) * (large ? broadcast(4.0f) : broadcast(1.0f));
}
INLINE Vec<double> exp2_anywhere(Vec<double> t) { return exp2_exactly(t); }
// e^x = 2^t (1 + r ln 2), where t + r is x log2(e) in two parts.
INLINE Vec<float> exp_anywhere(Vec<float> x) {
  constexpr float high = 1.44269504f,
                  low = (float)(LOG2E - 1.44269504088896340736 + (1.44269504088896340736 - (double)high));
  const Vec<float> t = x * high, r = multiply_add(x, broadcast(high), -t) + x * low;
  const Vec<float> p = exp2_anywhere(t);
  return (t > -150.0f) & (t < 129.0f) ? p + p * (r * (float)LN2) : p;
}
INLINE Vec<double> exp_anywhere(Vec<double> x) { return exp_exactly(x); }
INLINE Vec<float> log_anywhere(Vec<float> y) {
  const Mask<float> small = y < TINY<float>;
  const Vec<float> scaled = small ? y * 16777216.0f : y;
  const Vec<float> x =
      vlog(scaled > 0 ? scaled : broadcast(1.0f)) - (small ? broadcast(16.635532333438686f) : Vec<float>{});
  return y != y            ? y
         : y < 0           ? broadcast(NOT_A_NUMBER<float>)
         : y == 0          ? broadcast(-INF<float>)
         : y == INF<float> ? y
                           : x;
}
INLINE Vec<double> log_anywhere(Vec<double> y) { return log_exactly(y); }
INLINE Vec<float> log2_anywhere(Vec<float> y) { return log_anywhere(y) * (float)LOG2E; }
INLINE Vec<double> log2_anywhere(Vec<double> y) { return log2_exactly(y); }
// log(1 + x) = log(u) + (x - (u - 1))/u with u = 1 + x rounded.
INLINE Vec<float> log1p_anywhere(Vec<float> x) {
  const Vec<float> u = x + 1.0f, rest = (x - (u - 1.0f)) / u;
  return log_anywhere(u) + (((u > 0) & (u < INF<float>)) ? rest : Vec<float>{});
}
INLINE Vec<double> log1p_anywhere(Vec<double> x) { return log1p_exactly(x); }
INLINE Vec<float> tanh_anywhere(Vec<float> x) { return vtanh(x); }
INLINE Vec<double> tanh_anywhere(Vec<double> x) { return tanh_exactly(x); }
// 1/(1 + e^-x), by the exponential of a negative number.
template <class V> INLINE V sigmoid(V x) {
  using R = decltype(x[0] + 0);
  const V e = exp_anywhere(-absolute(x)), p = (R)1 / (e + (R)1);
  return x < 0 ? e * p : p;
}
// log(1 + e^x) = max(x, 0) + log1p(e^-|x|).
template <class V> INLINE V softplus(V x) {
  const V rest = log1p_anywhere(exp_anywhere(-absolute(x)));
  return relu(x) + rest;
}
template <class V> INLINE V reciprocal_root(V x) {
  using R = decltype(x[0] + 0);
  return (R)1 / root(x);
}

// --- captured tensors -------------------------------------------------------------------------------------------------

// Where the elements of a captured tensor are, in elements from its beginning: fewer than 2^31, so that they fit the lanes
// of a mask. A negative index counts from the end; one outside of the tensor sets `invalid`, and element 0 is read.
template <class R> INLINE Mask<R> place(Mask<R> x, int64_t size, int64_t stride, Mask<R> &invalid) {
  using I = typename Simd<R>::I;
  x = x < 0 ? x + (I)size : x;
  const Mask<R> outside = (x < 0) | (x >= (I)size);
  invalid |= outside;
  return (x & ~outside) * (I)stride;
}
template <class R> INLINE Mask<R> place_wide(Wide<R> x, int64_t size, int64_t stride, Mask<R> &invalid) {
  x = x < 0 ? x + size : x;
  const Wide<R> outside = (x < 0) | (x >= size);
  invalid |= narrow<R>(outside);
  return narrow<R>((x & ~outside) * stride);
}

template <class R> INLINE Mask<R> lane_numbers() {
  Mask<R> x;
  for (int n = 0; n < Simd<R>::N; ++n) x[n] = n;
  return x;
}
// How the lanes of a vector of places lie in memory. Consecutive queries often read consecutive elements, or one.
enum Lie { ANYHOW, ONE, ASCENDING };
template <class R> INLINE Lie lie_of(Mask<R> at) {
  const Mask<R> step = at - (Mask<R>{} + at[0]);
  return !any(step != lane_numbers<R>()) ? ASCENDING : !any(step) ? ONE : ANYHOW;
}

INLINE Vec<float> gathered(const float *from, Mask<float> at) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_i32gather_ps((__m512i)at, from, 4);
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_i32gather_ps(from, (__m256i)at, 4);
#else
  Vec<float> x;
  for (int n = 0; n < Simd<float>::N; ++n) x[n] = from[at[n]];
  return x;
#endif
}
INLINE Vec<double> gathered(const double *from, Mask<double> at) {
  Vec<double> x;
  for (int n = 0; n < Simd<double>::N; ++n) x[n] = from[at[n]];
  return x;
}
template <class R> INLINE Vec<R> read_reals(const Captured &c, Mask<R> at) {
  const R *from = (const R *)c.data;
  const Lie lie = lie_of<R>(at);
  return lie == ASCENDING ? load(from + at[0]) : lie == ONE ? broadcast(from[at[0]]) : gathered(from, at);
}
template <class R> INLINE Wide<R> read_integers(const Captured &c, Mask<R> at) {
  const int64_t *from = (const int64_t *)c.data;
  if (!any(at - (Mask<R>{} + at[0]))) return Wide<R>{} + from[at[0]];
  Wide<R> x;
  for (int n = 0; n < Simd<R>::N; ++n) x[n] = from[at[n]];
  return x;
}
template <class R> INLINE Mask<R> read_truths(const Captured &c, Mask<R> at) {
  Mask<R> x;
  for (int n = 0; n < Simd<R>::N; ++n) x[n] = ((const uint8_t *)c.data)[at[n]] ? -1 : 0;
  return x;
}

// Add each lane to the sum of its place.
template <class R> INLINE void add_sum(double *sums, Mask<R> at, Vec<R> g) {
  double total = 0;
  for (int n = 0; n < Simd<R>::N; ++n) total += g[n];
  sums[at[0]] += total;
}
template <class R> INLINE void add_each(double *sums, Mask<R> at, Vec<R> g) {
  typedef double Loose __attribute__((vector_size(8 * Simd<R>::N), aligned(8), may_alias));
  typedef double Doubles __attribute__((vector_size(8 * Simd<R>::N)));
  const Lie lie = lie_of<R>(at);
  if (lie == ASCENDING) {
    Loose *to = (Loose *)(sums + at[0]);
    *to = *to + __builtin_convertvector(g, Doubles);
  } else if (lie == ONE) {
    add_sum<R>(sums, at, g);
  } else {
    for (int n = 0; n < Simd<R>::N; ++n) sums[at[n]] += g[n];
  }
}

}  // namespace
