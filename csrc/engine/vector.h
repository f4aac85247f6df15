// Vectors of the widest registers that this translation unit is compiled for.
//
// They are GCC's vector extensions, which clang has too: arithmetic and comparisons work lane by lane, and a comparison
// gives a mask (all bits of a lane set, or none). Vec<R> holds Simd<R>::N numbers of type R, Mask<R> as many integers
// of the same size. What the extensions lack is here: loads and stores without alignment, a maximum with a defined
// result for NaN, fused multiply-adds, and questions about a mask. Everything is in an unnamed namespace, because the
// engine is compiled once for each instruction set: a function with external linkage would be merged by the linker, and
// the wrong instructions might be kept. For the same reason no template of the standard library is used where numbers
// are computed (min_of instead of std::min).
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// The register tile of the products has TILE_KEYS keys x 3 vectors of rows; SCATTER_VECTORS is the width of a tile in
// `scatter` (tiles.h).
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
template <> struct IntegerOf<float> {
  using type = int32_t;
};
template <> struct IntegerOf<double> {
  using type = int64_t;
};

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
template <class R> INLINE Vec<R> broadcast(R x) { return x - Vec<R>{}; }  // x + 0 would need an addition: -0 + 0 is 0

template <int C> struct Constant {  // an integer as a type, to pass to a generic lambda
  static constexpr int value = C;
};

template <class T> INLINE T min_of(T a, T b) { return a < b ? a : b; }
template <class T> INLINE T max_of(T a, T b) { return a > b ? a : b; }

// The larger of each pair. The result is b where one of them is NaN, so vmax(limit, x) keeps the NaN of x.
#if defined(__AVX512F__)
INLINE Vec<float> vmax(Vec<float> a, Vec<float> b) { return (Vec<float>)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE Vec<double> vmax(Vec<double> a, Vec<double> b) { return (Vec<double>)_mm512_max_pd((__m512d)a, (__m512d)b); }
#elif defined(__AVX2__)
INLINE Vec<float> vmax(Vec<float> a, Vec<float> b) { return (Vec<float>)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE Vec<double> vmax(Vec<double> a, Vec<double> b) { return (Vec<double>)_mm256_max_pd((__m256d)a, (__m256d)b); }
#else
template <class V> INLINE V vmax(V a, V b) { return a > b ? a : b; }
#endif

// a b + c, rounded once where the processor can. Sums that must agree to the last bit between two kernels use it: which
// other products are fused is the compiler's choice and depends on the code around them.
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

// Bit i of the result is set where lane i of the mask is.
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

// to[i] = the sum over the lanes of x[i].
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

template <class R> INLINE R sum_of_lanes(Vec<R> x) {
  R sum = 0;
  for (int n = 0; n < Simd<R>::N; ++n) sum += x[n];
  return sum;
}

}  // namespace
