// A prefilter in 16 bits: which keys may have weight in a row.
//
// Where few keys have weight, most scores are computed only to be compared with the price. Products of 16-bit integers
// are faster than those of floats, and their error is bounded: with q = q' + e and k = k' + f, where q' and k' are the
// rounded vectors,
//   |<q, k> - <q', k'>| <= |e| |k| + |q'| |f|.
// So the prefilter finds every key that products of floats would find. Those found get their score in floats
// afterwards. A rounded number is an integer times a step, the grain: one for each row, and one for each block of keys.
// Lanes are rows, and each lane of 32 bits has two neighbours in d.
#pragma once
#include <math.h>

#include "engine/elements.h"
#include "engine/tiles.h"

namespace {

constexpr int64_t PREFILTER_KEYS = 96;  // keys of a block, which share a grain; blocks begin at multiples of this
constexpr int PREFILTER_TILE = 3;       // keys x 3 vectors of rows: one more would not fit into 16 registers

#if defined(__x86_64__)
constexpr bool HAS_PREFILTER = true;
using Ints = Mask<float>;
// a + the sum of the two products in each lane. The empty `asm` keeps the compiler from reassociating the sums, which
// would take more registers than there are.
INLINE Ints add_pairs(Ints a, Ints x, Ints y) {
#if defined(__AVX512BW__)
  a += (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)y);
  asm("" : "+v"(a));
#elif defined(__AVX2__)
  a += (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)y);
  asm("" : "+x"(a));
#else
  a += (Ints)_mm_madd_epi16((__m128i)x, (__m128i)y);
  asm("" : "+x"(a));
#endif
  return a;
}
#else
constexpr bool HAS_PREFILTER = false;
using Ints = Mask<float>;
INLINE Ints add_pairs(Ints a, Ints, Ints) { return a; }
#endif

INLINE int64_t int16_pairs_of(int64_t D) { return (D + 1) / 2; }
// The largest integer such that the sum of D of its squares fits into 31 bits.
INLINE float levels(int64_t D) { return floorf(min_of(32767.0f, sqrtf(2.1e9f / (float)(2 * int16_pairs_of(D))))); }

struct Grain {
  float size;        // the step; NaN if a number or the length is not finite
  float norm, lost;  // the length of the row (or of the longest of a block), and of its rounding error
};
INLINE float grain_of(float top, int64_t D) { return max_of(top / levels(D), 1.2e-38f); }  // 1/grain is finite

INLINE float largest(const float *from, int64_t D) {  // of the absolute values; NaN if one is not finite
  constexpr int N = Simd<float>::N;
  Vec<float> tops = {}, checks = {};
  int64_t d = 0;
  for (; d + N <= D; d += N) {
    const Vec<float> x = load(from + d);
    tops = vmax(tops, vmax(x, -x)), checks += x * 0.0f;
  }
  float top = 0, check = 0;
  for (int n = 0; n < N; ++n) top = max_of(top, (float)tops[n]), check += checks[n];
  for (; d < D; ++d) top = max_of(top, __builtin_fabsf(from[d])), check += from[d] * 0.0f;
  return top + check;
}

// Round D numbers to integers of one grain. `norm` and `lost` are the sums of squares of the numbers and of the
// rounding errors, in grains: so neither overflows or underflows.
INLINE void round_row(const float *from, int64_t D, float size, int16_t *to, float &norm, float &lost) {
  constexpr int N = Simd<float>::N;
  typedef int16_t Half __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
  const float inverse = 1 / size;
  Vec<float> norms = {}, losses = {};
  int64_t d = 0;
  for (; d + N <= D; d += N) {
    const Vec<float> x = load(from + d) * inverse, whole = (x + 12582912.0f) - 12582912.0f, rest = x - whole;
    *(Half *)(to + d) = __builtin_convertvector(__builtin_convertvector(whole, Mask<float>), Half);
    norms += x * x, losses += rest * rest;
  }
  norm = lost = 0;
  for (int n = 0; n < N; ++n) norm += norms[n], lost += losses[n];
  for (; d < D; ++d) {
    const float x = from[d] * inverse, whole = __builtin_rintf(x), rest = x - whole;
    to[d] = (int16_t)whole;
    norm += x * x, lost += rest * rest;
  }
}

// The keys of a head in 16 bits.
struct PrefilterKeys {
  int16_t *keys;  // [Tk][2 pairs]
  Grain *grains;  // one for each block

  static int64_t blocks(const Problem &p) { return (p.Tk + PREFILTER_KEYS - 1) / PREFILTER_KEYS; }
  static int64_t bytes(const Problem &p) {  // for one head
    const int64_t size = p.Tk * int16_pairs_of(p.D) * 4 + blocks(p) * (int64_t)sizeof(Grain);
    return (size + 63) / 64 * 64;
  }
  PrefilterKeys(const Problem &p, char *at)
      : keys((int16_t *)at), grains((Grain *)(at + p.Tk * int16_pairs_of(p.D) * 4)) {}

  // Round block g; `spare` has room for its keys.
  void fill(const Problem &p, int64_t b, int64_t kv, int64_t g, float *spare) const {
    const int64_t first = g * PREFILTER_KEYS, n = min_of(PREFILTER_KEYS, p.Tk - first), width = 2 * int16_pairs_of(p.D);
    int64_t stride;
    const float *k = as_rows(p.key, b, kv, first, n, p.D, spare, stride);
    Grain &grain = grains[g];
    float top = 0;
    for (int64_t j = 0; j < n; ++j) {
      const float size = largest(k + j * stride, p.D);
      if (size != size) {
        grain.size = size;
        return;
      }
      top = max_of(top, size);
    }
    grain = {grain_of(top, p.D), 0, 0};
    for (int64_t j = 0; j < n; ++j) {
      int16_t *to = keys + (first + j) * width;
      float norm, lost;
      round_row(k + j * stride, p.D, grain.size, to, norm, lost);
      if (p.D < width) to[p.D] = 0;
      grain.norm = max_of(grain.norm, norm), grain.lost = max_of(grain.lost, lost);
    }
    grain.norm = sqrtf(grain.norm) * grain.size, grain.lost = sqrtf(grain.lost) * grain.size;
    grain.size += 0 * grain.norm;
  }
};

// panel[j][L] = the products of key j and the rows at[pairs][L]; bits[j * NV + n] = the lanes where they are above
// their bound.
template <int NV, class Bits>
__attribute__((noinline)) void compare_int16(const int32_t *at, const int16_t *k, int64_t words, int64_t keys,
                                             const Ints *bound, int32_t *panel, Bits *bits) {
  constexpr int N = Simd<float>::N, L = N * NV;
  const auto tile = [&](int64_t j, auto count) __attribute__((always_inline)) {
    constexpr int KEYS = decltype(count)::value;
    const int16_t *b = k + j * 2 * words;
    Ints sum[KEYS][NV] = {};
    const auto step = [&](int64_t w) __attribute__((always_inline)) {
      Ints a[NV];
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) memcpy(&a[n], at + w * L + n * N, sizeof a[n]);
#pragma GCC unroll 4
      for (int t = 0; t < KEYS; ++t) {
        int32_t pair;
        memcpy(&pair, b + 2 * (t * words + w), 4);
        const Ints x = pair - Ints{};
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) sum[t][n] = add_pairs(sum[t][n], a[n], x);
      }
    };
    by_four(words, step);
#pragma GCC unroll 4
    for (int t = 0; t < KEYS; ++t)
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) {
        memcpy(panel + (j + t) * L + n * N, &sum[t][n], sizeof sum[t][n]);
        bits[(j + t) * NV + n] = (Bits)lanes_of((Ints)(sum[t][n] > bound[n]));
      }
  };
  int64_t j = 0;
  for (; j + PREFILTER_TILE <= keys; j += PREFILTER_TILE) tile(j, Constant<PREFILTER_TILE>());
  for (; j < keys; ++j) tile(j, Constant<1>());
}

// A block of rows in 16 bits: lanes are rows, [pairs][L].
template <int NV> struct PrefilterRows {
  static constexpr int N = Simd<float>::N, L = N * NV;
  using V = Vec<float>;
  int32_t *pairs;
  float size[L], norm[L], lost[L];  // see Grain

  // Round n rows of D elements; `spare` has room for one. Returns false if a number or a length is not finite.
  bool fill(const float *q, int64_t stride, int64_t n, int64_t D, int16_t *spare) {
    const int64_t words = int16_pairs_of(D);
    memset(spare, 0, words * 4), memset(pairs, 0, words * L * 4);
    memset(size, 0, sizeof size), memset(norm, 0, sizeof norm), memset(lost, 0, sizeof lost);
    for (int i = 0; i < n; ++i) {
      const float top = largest(q + i * stride, D);
      if (top != top) return false;
      size[i] = grain_of(top, D);
      round_row(q + i * stride, D, size[i], spare, norm[i], lost[i]);
      norm[i] = sqrtf(norm[i]) * size[i], lost[i] = sqrtf(lost[i]) * size[i];
      if (0 * norm[i] != 0) return false;
      for (int64_t w = 0; w < words; ++w) memcpy(pairs + w * L + i, spare + 2 * w, 4);
    }
    return true;
  }

  // `off` becomes the largest error so far of products with the keys of a block. Lane bits in found[j * NV + n] are set
  // for the rows whose exact product with key j may reach the price, where the price itself may be off as much. Lanes
  // from n on are never set.
  template <class Bits>
  void find(const Grain &keys_grain, int64_t D, const int16_t *k, int64_t keys, const V *price, int64_t n, V *off,
            int32_t *panel, Bits *found) const {
    const int64_t words = int16_pairs_of(D);
    const float floats = (float)(D + 8) * 1.2e-7f * keys_grain.norm;  // times a row's length: the error in float
    Ints bound[NV];
    for (int v = 0; v < NV; ++v) {
      const V e = load(lost + v * N), whole = load(norm + v * N) + e;
      const V here = 1.001f * (e * keys_grain.norm + whole * (keys_grain.lost + floats));
      off[v] = vmax(off[v], here);
      const V least_sum = (price[v] - off[v] - here) / (load(size + v * N) * keys_grain.size);
      const V sum = -vmax(broadcast(-3e9f), -vmax(broadcast(-3e9f), least_sum));
      // A little lower, for rounding. All products are within +-2.1e9. Where the bound is NaN, every key is found.
      const V limit = -vmax(broadcast(-2.14e9f), -vmax(broadcast(-2.14e9f), sum - 1.0f - 1e-6f * vmax(sum, -sum)));
      bound[v] = __builtin_convertvector(sum == sum ? limit : broadcast(-2.14e9f), Ints);
      for (int i = 0; i < N; ++i)
        if (v * N + i >= n) bound[v][i] = INT32_MAX;
    }
    compare_int16<NV>(pairs, k, words, keys, bound, panel, found);
  }
};

}  // namespace
