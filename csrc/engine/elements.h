// Elements of tensors, whatever type they are stored in: one at a time, as vectors, as copied rows.
//
// A kernel computes in R (float or double). Tensors may hold float32, float64, bfloat16, float16 or bool. `element`
// reads one number, `copy` converts a row and multiplies it by a factor, `load_wide` loads a vector. `as_rows` gives
// the rows of a block of keys: a pointer into the tensor where its type and strides allow, else into a copy.
#pragma once
#include "engine/problem.h"
#include "engine/vector.h"

namespace {

using regard::Problem;
using regard::Tensor;

// Numbers of 16 bits as float.
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
    bits = sign | 0x7f800000 | ((rest & 0x3ff) << 13);  // infinity or NaN
    memcpy(&y, &bits, 4);
  } else {
    bits = rest << 13;  // a multiplication corrects the bias of the exponent, which also normalizes subnormal numbers
    memcpy(&y, &bits, 4);
    y *= 0x1p112f;
    memcpy(&bits, &y, 4);
    bits |= sign;
    memcpy(&y, &bits, 4);
  }
  return y;
#endif
}

// Tags for elements of 16 bits, and vectors of them as float.
struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
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

// Copy n elements that are `step` apart to every `stride`-th place of `to`, times `factor`.
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
    case regard::F64:
      return copy_as((const double *)data + at, step, n, to, stride, factor, [](double x) { return x; });
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
          _mm256_storeu_ps((float *)to + j, _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + j))),
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

// Whether the rows of a tensor can be read in place as elements of R.
template <class R> INLINE bool readable_in_place(const Tensor &t, int64_t D) {
  return t.type == (sizeof(R) == 4 ? regard::F32 : regard::F64) && (t.s3 == 1 || D == 1);
}
template <> INLINE bool readable_in_place<Bf16>(const Tensor &t, int64_t D) {
  return t.type == regard::BF16 && (t.s3 == 1 || D == 1);
}
template <> INLINE bool readable_in_place<F16>(const Tensor &t, int64_t D) {
  return t.type == regard::F16 && (t.s3 == 1 || D == 1);
}

// Rows first ... first + keys - 1 of keys (or values) as T: in place where possible, else copied to `spare` (T = R).
template <class R, class T = R>
const T *as_rows(const Tensor &t, int64_t b, int64_t kv, int64_t first, int64_t keys, int64_t D, R *spare,
                 int64_t &stride) {
  const int64_t at = t.s0 * b + t.s1 * kv + t.s2 * first;
  if (sizeof(T) != sizeof(R) || readable_in_place<T>(t, D)) {
    stride = t.s2;
    return (const T *)t.data + at;
  }
  for (int64_t j = 0; j < keys; ++j) copy<R>(t.data, t.type, at + j * t.s2, t.s3, D, spare + j * D, 1, (R)1);
  stride = D;
  return (const T *)spare;
}

}  // namespace
