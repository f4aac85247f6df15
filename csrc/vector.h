// Vectors of the widest kind this translation unit is compiled for, by GCC's vector extensions (clang has them too).
// Everything lives in an unnamed namespace: the file is compiled once per instruction set, and no symbol may be shared.
#pragma once
#include <cstdint>
#include <cstring>
#include <math.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// The register tile: TILE_KEYS keys x 3 vectors of rows. SCATTER_*: see tiles.h.
#if defined(__AVX512F__)
constexpr int BYTES = 64, TILE_KEYS = 8, SCATTER_VECTORS = 4;
#elif defined(__AVX2__)
constexpr int BYTES = 32, TILE_KEYS = 4, SCATTER_VECTORS = 2;
#elif defined(__aarch64__)
constexpr int BYTES = 16, TILE_KEYS = 8, SCATTER_VECTORS = 4;
#else
constexpr int BYTES = 16, TILE_KEYS = 4, SCATTER_VECTORS = 2;
#endif

template <class R> struct IntegerOf;
template <> struct IntegerOf<float> { using type = int32_t; };
template <> struct IntegerOf<double> { using type = int64_t; };

template <class R> struct Simd {
  static constexpr int N = BYTES / sizeof(R);
  using I = typename IntegerOf<R>::type;
  typedef R V __attribute__((vector_size(BYTES)));
  typedef R Loose __attribute__((vector_size(BYTES), aligned(sizeof(R)), may_alias));
  typedef I M __attribute__((vector_size(BYTES)));
};

template <class R> using Vec = typename Simd<R>::V;
template <class R> using Mask = typename Simd<R>::M;

#define INLINE inline __attribute__((always_inline))

template <class R> INLINE Vec<R> load(const R *p) { return *(const typename Simd<R>::Loose *)p; }
template <class R> INLINE void store(R *p, Vec<R> v) { *(typename Simd<R>::Loose *)p = v; }
template <class R> INLINE Vec<R> all(R x) { return x - Vec<R>{}; }  // x + 0 would cost an addition: -0 + 0 = 0

template <int C> struct Count {  // a number as a type
  static constexpr int value = C;
};

template <class T> INLINE T least(T a, T b) { return a < b ? a : b; }
template <class T> INLINE T most(T a, T b) { return a > b ? a : b; }

// The larger of each pair; b where one is NaN, so a limit goes first to let NaN through.
#if defined(__AVX512F__)
INLINE Vec<float> vmax(Vec<float> a, Vec<float> b) { return (Vec<float>)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE Vec<double> vmax(Vec<double> a, Vec<double> b) { return (Vec<double>)_mm512_max_pd((__m512d)a, (__m512d)b); }
#elif defined(__AVX2__)
INLINE Vec<float> vmax(Vec<float> a, Vec<float> b) { return (Vec<float>)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE Vec<double> vmax(Vec<double> a, Vec<double> b) { return (Vec<double>)_mm256_max_pd((__m256d)a, (__m256d)b); }
#else
template <class V> INLINE V vmax(V a, V b) { return a > b ? a : b; }
#endif

// a b + c, rounded once where the machine can. For sums that must be equal to the last bit wherever they are made: which
// products a compiler fuses by itself depends on what surrounds them (clang fuses none that is used twice).
#if defined(__AVX512F__)
INLINE Vec<float> multiply_add(Vec<float> a, Vec<float> b, Vec<float> c) {
  return (Vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
INLINE Vec<double> multiply_add(Vec<double> a, Vec<double> b, Vec<double> c) {
  return (Vec<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
#elif defined(__FMA__)
INLINE Vec<float> multiply_add(Vec<float> a, Vec<float> b, Vec<float> c) {
  return (Vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
INLINE Vec<double> multiply_add(Vec<double> a, Vec<double> b, Vec<double> c) {
  return (Vec<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
#elif defined(__aarch64__)
INLINE Vec<float> multiply_add(Vec<float> a, Vec<float> b, Vec<float> c) {
  return (Vec<float>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
INLINE Vec<double> multiply_add(Vec<double> a, Vec<double> b, Vec<double> c) {
  return (Vec<double>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}
#else
template <class V> INLINE V multiply_add(V a, V b, V c) { return a * b + c; }
#endif
#if defined(__FMA__) || defined(__aarch64__)
INLINE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }
#endif

template <class M> INLINE bool any(M mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  bool found = false;
  for (unsigned n = 0; n < sizeof(M) / sizeof(mask[0]); ++n) found |= mask[n] != 0;
  return found;
#endif
}

// Bit i: whether lane i of a mask is set.
template <class M> INLINE unsigned lanes_of(M mask) {
  constexpr unsigned N = sizeof(M) / sizeof(mask[0]);
#if defined(__AVX512F__)
  if (N == 16) return _mm512_movepi32_mask((__m512i)mask);
  return _mm512_movepi64_mask((__m512i)mask);
#elif defined(__AVX2__)
  if (N == 8) return (unsigned)_mm256_movemask_ps((__m256)mask);
  return (unsigned)_mm256_movemask_pd((__m256d)mask);
#else
  unsigned bits = 0;
  for (unsigned n = 0; n < N; ++n) bits |= (unsigned)(mask[n] != 0) << n;
  return bits;
#endif
}

// The sums over the lanes of four vectors.
template <class R> INLINE void add_lanes(const Vec<R> (&x)[4], R *to) {
#if defined(__AVX2__)
  if constexpr (sizeof(R) == 4) {
    __m256 y[4];
    for (int i = 0; i < 4; ++i) {
#if defined(__AVX512F__)
      const __m512 z = (__m512)x[i];
      y[i] = _mm256_add_ps(_mm512_castps512_ps256(z), _mm512_extractf32x8_ps(z, 1));
#else
      y[i] = (__m256)x[i];
#endif
    }
    const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(y[0], y[1]), _mm256_hadd_ps(y[2], y[3]));
    _mm_storeu_ps((float *)to, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
    return;
  }
#endif
  for (int i = 0; i < 4; ++i) {
    R sum = 0;
    for (int n = 0; n < Simd<R>::N; ++n) sum += x[i][n];
    to[i] = sum;
  }
}

template <class R> constexpr R INF = (R)__builtin_inf();
template <class R> constexpr R NOT_A_NUMBER = (R)__builtin_nan("");
template <class R> constexpr R LOWEST = sizeof(R) == 4 ? (R)-3.402823466e38 : (R)-1.7976931348623157e308;
constexpr double LOG2E = 1.4426950408889634074, LN2 = 0.69314718055994530942;

// 2^t for t <= 0 or so: degree 5 (relative error 1.7e-7), NaN stays NaN. U vectors at once, step by step. ZERO: exactly 0
// below 2^-126, for any t; else t must be at least -126.
template <bool ZERO, int U> INLINE void vexp2(const Vec<float> (&t)[U], Vec<float> (&p)[U]) {
  using M = Mask<float>;
  using Bits = uint32_t __attribute__((vector_size(sizeof(M))));  // unsigned: what is shifted may wrap around
  Vec<float> shifted[U], f[U];
#define EACH _Pragma("GCC unroll 8") for (int u = 0; u < U; ++u)
  // 1.5 * 2^23 + 127: the sum's low bits are t rounded to an integer, as a float's exponent has it.
  EACH shifted[u] = t[u] + 12583039.0f;
  EACH f[u] = t[u] - (shifted[u] - 12583039.0f);
  EACH p[u] = f[u] * 0.001326471498823669f + 0.009671513510714606f;
  EACH p[u] = p[u] * f[u] + 0.05550733783773515f;
  EACH p[u] = p[u] * f[u] + 0.24022242066381747f;
  EACH p[u] = p[u] * f[u] + 0.6931469775710566f;
  EACH p[u] = p[u] * f[u] + 1.0f;
  EACH p[u] *= (Vec<float>)((Bits)shifted[u] << 23);  // a product: adding to the bits would make a number of a NaN
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

// The rational function that Eigen uses: a few units in the last place.
INLINE Vec<float> vtanh(Vec<float> x) {
  using V = Vec<float>;
  x = vmax(all(-7.90531110763549805f), -vmax(all(-7.90531110763549805f), -x));
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

// How far an exponent may lie below the largest: where some key is not admissible (x = -inf) a bound that keeps p t finite
// and p = 0; else the bound at which the exponential needs no care (p = 2^-126 instead of 0).
template <class R, bool ZERO> constexpr R FLOOR = sizeof(R) == 4 ? (ZERO ? -200 : -126) : (ZERO ? -2000 : -1000);

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

// to[d][i] = from[i][d] * factor[i] for n rows of D; `to` has rows of `stride`. Whole blocks of 8 x 8; returns the rows done.
INLINE int64_t to_lanes(const float *const *from, const float *factor, int64_t n, int64_t D, float *to, int64_t stride) {
  int64_t i = 0;
#if defined(__AVX2__)
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
#endif
  return i;
}
INLINE int64_t to_lanes(const double *const *, const double *, int64_t, int64_t, double *, int64_t) { return 0; }

// The other way: to[i][d] = from[d][i] * factor[i].
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
        for (int u = 0; u < 8; ++u) r[u] = _mm256_mul_ps(_mm256_loadu_ps((const float *)from + (d + u) * stride + i), f);
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

// Reading any element type.
INLINE float widen_bf16(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
INLINE float widen_f16(uint16_t x) {
#if defined(__F16C__)
  return _cvtsh_ss(x);
#elif defined(__aarch64__)
  __fp16 h;
  memcpy(&h, &x, 2);
  return h;
#else
  const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff;
  float y;
  uint32_t bits;
  if (rest >= 0x7c00) {
    bits = sign | 0x7f800000 | ((rest & 0x3ff) << 13);  // infinity, NaN
    memcpy(&y, &bits, 4);
  } else {
    bits = rest << 13;  // the exponent's bias is mended by a multiplication, which mends subnormals too
    memcpy(&y, &bits, 4);
    y *= 0x1p112f;
    memcpy(&bits, &y, 4);
    bits |= sign;
    memcpy(&y, &bits, 4);
  }
  return y;
#endif
}

// Eight or so elements in a register, whatever they are stored as.
struct Bf16 { uint16_t bits; };
struct F16 { uint16_t bits; };
template <class R> INLINE R widen(R x) { return x; }
INLINE float widen(Bf16 x) { return widen_bf16(x.bits); }
INLINE float widen(F16 x) { return widen_f16(x.bits); }
INLINE Vec<float> load_wide(const float *p) { return load(p); }
INLINE Vec<double> load_wide(const double *p) { return load(p); }
INLINE Vec<float> load_wide(const Bf16 *p) {
  typedef uint16_t Half __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
  typedef uint32_t Whole __attribute__((vector_size(BYTES)));
  return (Vec<float>)(__builtin_convertvector(*(const Half *)p, Whole) << 16);
}
INLINE Vec<float> load_wide(const F16 *p) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
  return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
  Vec<float> x;
  for (int n = 0; n < Simd<float>::N; ++n) x[n] = widen_f16(p[n].bits);
  return x;
#endif
}

template <class R> INLINE R element(int64_t data, int64_t type, int64_t at) {
  switch (type) {
    case regard::F32: return (R)((const float *)data)[at];
    case regard::F64: return (R)((const double *)data)[at];
    case regard::BF16: return (R)widen_bf16(((const uint16_t *)data)[at]);
    case regard::F16: return (R)widen_f16(((const uint16_t *)data)[at]);
    default: return (R)((const uint8_t *)data)[at];
  }
}

// n elements, `step` apart, to every `stride`-th place of `to`, times `factor`.
template <class R, class T, class F>
INLINE void copy_as(const T *from, int64_t step, int64_t n, R *to, int64_t stride, R factor, F widen) {
  if (step == 1 && stride == 1)
    for (int64_t j = 0; j < n; ++j) to[j] = (R)widen(from[j]) * factor;
  else
    for (int64_t j = 0; j < n; ++j) to[j * stride] = (R)widen(from[j * step]) * factor;
}
template <class R>
void copy(int64_t data, int64_t type, int64_t at, int64_t step, int64_t n, R *to, int64_t stride, R factor) {
  switch (type) {
    case regard::F32: return copy_as((const float *)data + at, step, n, to, stride, factor, [](float x) { return x; });
    case regard::F64: return copy_as((const double *)data + at, step, n, to, stride, factor, [](double x) { return x; });
    case regard::BF16: {
#if defined(__AVX2__)
      if (step == 1 && stride == 1 && sizeof(R) == 4) {
        const uint16_t *from = (const uint16_t *)data + at;
        int64_t j = 0;
        for (; j + 8 <= n; j += 8) {
          const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + j)));
          _mm256_storeu_ps((float *)to + j, _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)),
                                                          _mm256_set1_ps((float)factor)));
        }
        for (; j < n; ++j) to[j] = (R)widen_bf16(from[j]) * factor;
        return;
      }
#endif
      return copy_as((const uint16_t *)data + at, step, n, to, stride, factor, widen_bf16);
    }
    case regard::F16: {
#if defined(__F16C__)
      if (step == 1 && stride == 1 && sizeof(R) == 4) {
        const uint16_t *from = (const uint16_t *)data + at;
        int64_t j = 0;
        for (; j + 8 <= n; j += 8)
          _mm256_storeu_ps((float *)to + j,
                           _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + j))),
                                         _mm256_set1_ps((float)factor)));
        for (; j < n; ++j) to[j] = (R)widen_f16(from[j]) * factor;
        return;
      }
#endif
      return copy_as((const uint16_t *)data + at, step, n, to, stride, factor, widen_f16);
    }
    default: return copy_as((const uint8_t *)data + at, step, n, to, stride, factor, [](uint8_t x) { return x; });
  }
}

}  // namespace
