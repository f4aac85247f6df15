// Matrix products of bfloat16 numbers by dot products of pairs (`vdpbf16ps` with AVX-512, `bfdot` on ARM): a lane adds
// a0 b0 + a1 b1 to its sum in float32. The products are those of tiles.h. The index that is summed over runs in pairs, of 32 bits each.
//   pair_scores:  panel[j][:]  = factor[:] * sum_d  at[d][:] * b[j][d]    at: pairs along d, [D/2][L]; b as it is stored
//   pair_gather:  ct[d][:]    += sum_j  weights[j][:] * b[j][d]           both in pairs of keys, [keys/2][L], [keys/2][D]
//   pair_scatter: c[j][d]     += sum_i  panel[j][i] * a[i][d]             panel: [keys][L]; a: pairs of rows, [L/2][D]
// What is a score in every kernel: one chain of dot products along d, and at its end the factor of the row in float32
// (a scaled query would have to be rounded to bfloat16). So a score is the same number wherever it is computed. Weights
// and their gradients are rounded to bfloat16 before their products. The instructions take subnormal numbers as 0.
//
// Pairs of keys must not mix keys that are read with keys that are not, because 0 * NaN is NaN: `admit` clears the
// latter in a copy.
#pragma once
#include "engine/elements.h"
#include "engine/rows.h"
#include "engine/tiles.h"

namespace {

using Pair = uint32_t;  // two bfloat16 numbers; the first is the lower half

INLINE int64_t even(int64_t n) { return (n + 1) / 2 * 2; }

// The primitives. Without the instruction they are only for tests: no kernel of such an engine uses them.
typedef Pair PairVec __attribute__((vector_size(BYTES)));
typedef Pair LoosePairs __attribute__((vector_size(BYTES), aligned(2), may_alias));

INLINE PairVec load_pairs(const void *p) { return *(const LoosePairs *)p; }
INLINE void store_pairs(void *to, PairVec pairs) { *(LoosePairs *)to = pairs; }
INLINE PairVec broadcast_pair(const void *p) {
  Pair both;
  memcpy(&both, p, sizeof both);
  return PairVec{} + both;
}
#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
INLINE Vec<float> add_dot(Vec<float> sum, PairVec a, PairVec b) {
  return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
// Two vectors, rounded to bfloat16: lane i of the result is the pair (a[i], b[i]).
INLINE PairVec round_pairs(Vec<float> a, Vec<float> b) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
  return (PairVec)_mm512_permutexvar_epi16(_mm512_load_si512(order), both);
}
// One vector, rounded to bfloat16 in order: neighbouring lanes are pairs.
INLINE void store_rounded(Bf16 *to, Vec<float> a) {
  _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)a));
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool HAS_PAIRS = true;
INLINE Vec<float> add_dot(Vec<float> sum, PairVec a, PairVec b) {
  const bfloat16x8_t x = vreinterpretq_bf16_u32((uint32x4_t)a), y = vreinterpretq_bf16_u32((uint32x4_t)b);
  return (Vec<float>)vbfdotq_f32((float32x4_t)sum, x, y);
}
INLINE uint16x4_t rounded(Vec<float> x) { return vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)x)); }
INLINE PairVec round_pairs(Vec<float> a, Vec<float> b) {
  return (PairVec)vmovl_u16(rounded(a)) | (PairVec)vshll_n_u16(rounded(b), 16);
}
INLINE void store_rounded(Bf16 *to, Vec<float> a) { vst1_u16((uint16_t *)to, rounded(a)); }
#else
constexpr bool HAS_PAIRS = false;
INLINE Vec<float> add_dot(Vec<float> sum, PairVec a, PairVec b) {
  sum += (Vec<float>)(a & 0xffff0000u) * (Vec<float>)(b & 0xffff0000u);
  return sum + (Vec<float>)(a << 16) * (Vec<float>)(b << 16);
}
INLINE PairVec rounded(Vec<float> x) {  // in the lower half
  const PairVec bits = (PairVec)x, nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return ((PairVec)(x == x) & nearest) | (~(PairVec)(x == x) & 0x7fc0);
}
INLINE PairVec round_pairs(Vec<float> a, Vec<float> b) { return rounded(a) | rounded(b) << 16; }
INLINE void store_rounded(Bf16 *to, Vec<float> a) {
  const PairVec x = rounded(a);
  for (int n = 0; n < Simd<float>::N; ++n) to[n].bits = (uint16_t)x[n];
}
#endif
// The sum of both halves of each pair, added to `sum`.
INLINE Vec<float> add_pairs(Vec<float> sum, PairVec pairs) {
  Pair ones = 0x3f803f80u;
#if defined(__aarch64__)
  __asm__("" : "+r"(ones));  // GCC 12 writes a vector of this constant as 1.0 in float16
#endif
  return add_dot(sum, pairs, PairVec{} + ones);
}

template <int NV, int KEYS, bool TOP>
INLINE void pair_score_tile(const Pair *at, const Vec<float> *factor, const Bf16 *b, int64_t stride, int64_t pairs,
                            float *panel, Vec<float> *top) {
  constexpr int N = Simd<float>::N, L = N * NV;
  Vec<float> sum[KEYS][NV] = {};
  const auto step = [&](int64_t d) __attribute__((always_inline)) {
    PairVec a[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) a[n] = load_pairs(at + d * L + n * N);
#pragma GCC unroll 32
    for (int k = 0; k < KEYS; ++k) {
      const PairVec x = broadcast_pair(b + k * stride + 2 * d);
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) sum[k][n] = add_dot(sum[k][n], a[n], x);
    }
  };
  by_four(pairs, step);
#pragma GCC unroll 8
  for (int n = 0; n < NV; ++n) {
    Vec<float> most = broadcast(-__builtin_inff());
#pragma GCC unroll 32
    for (int k = 0; k < KEYS; ++k) {
      const Vec<float> x = sum[k][n] * factor[n];
      store(panel + k * L + n * N, x);
      if (TOP) most = vmax(most, x);
    }
    if (TOP) top[n] = vmax(top[n], most);
  }
}

// D is even. TOP: `top` becomes the largest score of each lane, too.
template <int NV, bool TOP>
void pair_scores(const Pair *at, const Vec<float> *factor, const Bf16 *b, int64_t stride, int64_t D, int64_t keys,
                 float *panel, Vec<float> *top = nullptr) {
  constexpr int KEYS = DEEP<NV>, L = Simd<float>::N * NV;
  int64_t j = 0;
  for (; j + KEYS <= keys; j += KEYS)
    pair_score_tile<NV, KEYS, TOP>(at, factor, b + j * stride, stride, D / 2, panel + j * L, top);
  for (; j + 4 <= keys; j += 4)
    pair_score_tile<NV, 4, TOP>(at, factor, b + j * stride, stride, D / 2, panel + j * L, top);
  for (; j < keys; ++j) pair_score_tile<NV, 1, TOP>(at, factor, b + j * stride, stride, D / 2, panel + j * L, top);
}

template <int NV, int DIMS>
INLINE void pair_gather_tile(const Pair *weights, const Pair *b, int64_t stride, int64_t pairs, float *ct) {
  constexpr int N = Simd<float>::N, L = N * NV;
  Vec<float> sum[DIMS][NV] = {};
  const auto step = [&](int64_t j) __attribute__((always_inline)) {
    PairVec p[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) p[n] = load_pairs(weights + j * L + n * N);
#pragma GCC unroll 16
    for (int k = 0; k < DIMS; ++k) {
      const PairVec x = broadcast_pair(b + j * stride + k);
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) sum[k][n] = add_dot(sum[k][n], p[n], x);
    }
  };
  by_four(pairs, step);
#pragma GCC unroll 16
  for (int k = 0; k < DIMS; ++k)
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) store(ct + k * L + n * N, load(ct + k * L + n * N) + sum[k][n]);
}

template <int NV>
void pair_gather(const Pair *weights, const Pair *b, int64_t stride, int64_t pairs, int64_t D, float *ct) {
  constexpr int DIMS = DEEP<NV>, L = Simd<float>::N * NV;
  int64_t d = 0;
  for (; d + DIMS <= D; d += DIMS) pair_gather_tile<NV, DIMS>(weights, b + d, stride, pairs, ct + d * L);
  for (; d + 4 <= D; d += 4) pair_gather_tile<NV, 4>(weights, b + d, stride, pairs, ct + d * L);
  for (; d < D; ++d) pair_gather_tile<NV, 1>(weights, b + d, stride, pairs, ct + d * L);
}

template <int L, int KEYS, int NV>
INLINE void pair_scatter_tile(const Bf16 *panel, const Pair *a, int64_t stride, float *c) {
  constexpr int N = Simd<float>::N;
  Vec<float> sum[KEYS][NV];
#pragma GCC unroll 16
  for (int k = 0; k < KEYS; ++k)
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) sum[k][n] = load(c + k * stride + n * N);
  const auto step = [&](int64_t i) __attribute__((always_inline)) {
    PairVec x[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) x[n] = load_pairs(a + i * stride + n * N);
#pragma GCC unroll 16
    for (int k = 0; k < KEYS; ++k) {
      const PairVec p = broadcast_pair(panel + k * L + 2 * i);
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) sum[k][n] = add_dot(sum[k][n], x[n], p);
    }
  };
  by_four(L / 2, step);
#pragma GCC unroll 16
  for (int k = 0; k < KEYS; ++k)
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) store(c + k * stride + n * N, sum[k][n]);
}

// The rows of a and c have `stride` elements, a multiple of the vector length.
template <int L> void pair_scatter(const Bf16 *panel, const Pair *a, int64_t stride, int64_t keys, float *c) {
  constexpr int N = Simd<float>::N, NV = SCATTER_VECTORS;
  int64_t d = 0;
  for (; d + NV * N <= stride; d += NV * N) {
    int64_t j = 0;
    for (; j + 6 <= keys; j += 6) pair_scatter_tile<L, 6, NV>(panel + j * L, a + d, stride, c + j * stride + d);
    for (; j + 2 <= keys; j += 2) pair_scatter_tile<L, 2, NV>(panel + j * L, a + d, stride, c + j * stride + d);
    for (; j < keys; ++j) pair_scatter_tile<L, 1, NV>(panel + j * L, a + d, stride, c + j * stride + d);
  }
  for (; d < stride; d += N) {
    int64_t j = 0;
    for (; j + 6 <= keys; j += 6) pair_scatter_tile<L, 6, 1>(panel + j * L, a + d, stride, c + j * stride + d);
    for (; j < keys; ++j) pair_scatter_tile<L, 1, 1>(panel + j * L, a + d, stride, c + j * stride + d);
  }
}

// One row of a tensor in bfloat16, with a 0 behind it where D is odd.
INLINE void round_row(const Tensor &t, int64_t at, int64_t D, Bf16 *to) {
  if (D % 2) to[D].bits = 0;
  if (t.type == regard::BF16) {
    const uint16_t *from = (const uint16_t *)t.data + at;
    if (t.s3 == 1)
      memcpy(to, from, D * sizeof(Bf16));
    else
      for (int64_t d = 0; d < D; ++d) to[d].bits = from[d * t.s3];
    return;
  }
  constexpr int N = Simd<float>::N;
  int64_t d = 0;
  for (; t.type == regard::F32 && t.s3 == 1 && d + N <= D; d += N)
    store_rounded(to + d, load((const float *)t.data + at + d));
  for (; d < D; d += N) {
    float some[N] = {};
    Bf16 rounded[N];
    const int64_t n = min_of((int64_t)N, D - d);
    for (int64_t i = 0; i < n; ++i) some[i] = element<float>(t.data, t.type, at + (d + i) * t.s3);
    store_rounded(rounded, load(some));
    memcpy(to + d, rounded, n * sizeof(Bf16));
  }
}

// The rows of a tensor, transposed in pairs: to[d/2][lane], and 0 in lanes without a row.
// `spare` has L rows of even(D) and receives the rows as they are, rounded.
template <int NV> void pair_lanes(const Rows<float, NV> &rows, const Tensor &t, int64_t D, Pair *to, Bf16 *spare) {
  constexpr int L = Rows<float, NV>::L;
  const int64_t width = even(D);
  for (int i = 0; i < rows.n; ++i) round_row(t, rows.at(t, i), D, spare + i * width);
  if (rows.n < L) memset(to, 0, L * width / 2 * sizeof(Pair));
  for (int i = 0; i < rows.n; ++i)
    for (int64_t d = 0; d < width / 2; ++d) memcpy(to + d * L + i, spare + i * width + 2 * d, sizeof(Pair));
}

// Pairs of rows: to[j/2][d] = (rows[j][d], rows[j + 1][d]), with 0 for a row that is missing and beyond D. The rows of
// `to` are to_stride apart.
INLINE void pair_rows(const Bf16 *rows, int64_t stride, int64_t n, int64_t D, Pair *to, int64_t to_stride) {
  for (int64_t j = 0; j < n; j += 2, to += to_stride) {
    const Bf16 *a = rows + j * stride, *b = a + stride;
    if (j + 1 < n)
      for (int64_t d = 0; d < D; ++d) to[d] = a[d].bits | (Pair)b[d].bits << 16;
    else
      for (int64_t d = 0; d < D; ++d) to[d] = a[d].bits;
    for (int64_t d = D; d < to_stride; ++d) to[d] = 0;
  }
}

// Rows first ... first + keys - 1 of keys (or values), of an even number of elements each: in place, or else copied to
// `spare` with a 0 behind them.
INLINE const Bf16 *rows_of_pairs(const Tensor &t, int64_t b, int64_t kv, int64_t first, int64_t keys, int64_t D,
                                 Bf16 *spare, int64_t &stride) {
  const int64_t at = t.s0 * b + t.s1 * kv + t.s2 * first;
  if (t.s3 == 1 && D % 2 == 0) {
    stride = t.s2;
    return (const Bf16 *)t.data + at;
  }
  stride = even(D);
  for (int64_t j = 0; j < keys; ++j) round_row(t, at + j * t.s2, D, spare + j * stride);
  return spare;
}

// Keys in pairs, of which only some are read: `keys` of them, from the half `odd` of the first pair on, where `live` is
// set (all, if it is null). Returns the pairs themselves if no other key is in them, else a copy with 0 in its place.
INLINE const Pair *admit(const Pair *pairs, int64_t D, int64_t odd, int64_t keys, const uint8_t *live, Pair *spare) {
  bool whole = !odd && keys % 2 == 0;
  if (live)
    for (int64_t j = 0; j < keys; ++j) whole &= live[j];
  if (whole) return pairs;
  const auto reads = [&](int64_t j) { return j >= 0 && j < keys && (!live || live[j]); };
  for (int64_t j = -odd, at = 0; j < keys; j += 2, at += D) {
    const Pair mask = (reads(j) ? 0xffffu : 0u) | (reads(j + 1) ? 0xffff0000u : 0u);
    for (int64_t d = 0; d < D; ++d) spare[at + d] = pairs[at + d] & mask;
  }
  return spare;
}

// A panel of weights in pairs of keys, as `admit` has them. If `used` is given, the rounded weights are added to it.
template <int NV> void pair_keys(const float *panel, int64_t odd, int64_t keys, Pair *to, Vec<float> *used) {
  constexpr int N = Simd<float>::N, L = N * NV;
  for (int64_t j = -odd; j < keys; j += 2, to += L)
    for (int n = 0; n < NV; ++n) {
      const Vec<float> a = j < 0 ? Vec<float>{} : load(panel + j * L + n * N);
      const Vec<float> b = j + 1 < keys ? load(panel + (j + 1) * L + n * N) : Vec<float>{};
      const PairVec pairs = round_pairs(a, b);
      store_pairs(to + n * N, pairs);
      if (used) used[n] = add_pairs(used[n], pairs);
    }
}

// Whether products with keys of type T are those above.
template <class T> constexpr bool PAIRED = false;
template <> constexpr bool PAIRED<Bf16> = true;

}  // namespace
