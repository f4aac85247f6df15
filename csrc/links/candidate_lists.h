// Lists of candidates: the keys that may have weight, one list per row.
//
// Where few keys have weight, each row keeps the keys whose x is not below a bound of its price. The lists are the
// lanes of a short panel (`LinkPanels::list`), so that search and weights use the same code for panels and lists. They
// grow as blocks of keys come (`append_candidates`), shrink when the bound has risen (`prune_lists`), are padded to
// equal lengths (`pad_lists`), and are finally summed with the values (`sum_listed_values`) and saved for the backward
// pass (`save_sparse_rows`).
#pragma once
#include <type_traits>

#include "engine/listed_values.h"
#include "engine/sparse_rows.h"
#include "engine/tiles.h"
#include "links/link_workspace.h"

namespace {

template <class R> using LaneBits = std::conditional_t<(Simd<R>::N > 8), uint16_t, uint8_t>;  // the lanes of one vector
// Which lanes of the vectors of a block have candidates. All comparisons come first and all candidates after them: with
// both in one loop, each key would cost a mispredicted branch.
template <class R, int NV> struct CandidateBits {
  using Bits = LaneBits<R>;
  static constexpr int64_t BITS = 8 * sizeof(Bits);
  Bits bits[PANEL_KEYS * NV + 64 / BITS];

  // Call f(j * L + lane) for each candidate.
  template <class F> INLINE void each(int64_t keys, F f) {
    memset(bits + keys * NV, 0, sizeof(uint64_t));
    for (int64_t v = 0; v < keys * NV; v += 64 / BITS) {
      uint64_t word;
      memcpy(&word, bits + v, sizeof word);
      for (; word; word &= word - 1) {
        const int bit = __builtin_ctzll(word);
        f((v + bit / BITS) * Simd<R>::N + bit % BITS);
      }
    }
  }
};

template <class R, int NV> bool has_room(const LinkPanels<R, NV> &s, int64_t keys) {
  int32_t longest = 0;
  for (int32_t length : s.length) longest = max_of(longest, length);
  return longest + keys <= s.room;
}

// Append those of panel rows at ... at + keys - 1 (keys first ...) whose x is not below the price. Returns false if
// there is no room, or if a price is NaN.
template <class R, int NV>
bool append_candidates(LinkPanels<R, NV> &s, const Vec<R> *price, int rows, int64_t first, int64_t at, int64_t keys) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  if (!has_room(s, keys)) return false;
  CandidateBits<R, NV> found;
  V bound[NV];           // above -inf, so that no masked key is found
  Mask<R> row[NV] = {};  // lanes without a row are never candidates
  for (int n = 0; n < NV; ++n) {
    bound[n] = vmax(broadcast(LOWEST<R>), price[n]);
    for (int i = 0; i < N && n * N + i < rows; ++i) {
      row[n][i] = -1;
      if (bound[n][i] != bound[n][i]) return false;  // NaN among the scores: all keys count
    }
  }
  const R *x = s.x + at * L;
  for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) {
      // Not below, instead of above: a NaN is found, and so is the best key where rounding brings the bound of a large
      // score up to it.
      found.bits[j * NV + n] = (LaneBits<R>)lanes_of((Mask<R>)(~(load(x + j * L + n * N) < bound[n]) & row[n]));
    }
  found.each(keys, [&](int64_t place) {
    const int64_t j = place / L, i = place % L, to = (int64_t)s.length[i]++ * L + i;
    s.list[to] = x[place], s.index[to] = (int32_t)(first + j);
    if (s.prior) s.list_prior[to] = s.prior[at * L + place];
  });
  return true;
}

// Remove keys from the lists whose x is more than `off` below the price bound. Where x came from the prefilter in 16
// bits, it is computed again as all other passes do; then `exact` is given, the largest x of the keys before those.
template <class R, int NV>
void prune_lists(const Problem &p, const Rows<R, NV> &rows, LinkPanels<R, NV> &s, RowSums<R, NV> &sums,
                 const Vec<R> *off, const Vec<R> *exact = nullptr) {
  constexpr int N = Simd<R>::N, L = N * NV, FAR = 16;
  const int64_t base = p.key.s0 * rows.b + p.key.s1 * rows.kv, Dp = padded<R>(p.D);
  const bool as_is = readable_in_place<R>(p.key, p.D) && p.D == Dp;
  R *x = s.x, *spare = s.q + L * Dp;  // the panel is not needed any more
  int32_t *index = s.picked;
  memset(spare, 0, 16 * Dp * sizeof(R));
  for (int i = 0; i < L; ++i) {
    if (i >= rows.n) {
      s.length[i] = 0;
      continue;
    }
    const R price_bound = sums.price_bound[i / N][i % N], far = off[i / N][i % N];
    // Where a null key takes all of the mass, the largest score must still be found.
    const R bound = min_of(price_bound, (R)sums.top[i / N][i % N]) - far;
    int64_t n = 0;
    for (int64_t k = 0; k < s.length[i]; ++k) {  // without a branch, which would be mispredicted
      const R at = s.list[k * L + i];
      x[n] = at, index[n] = s.index[k * L + i];
      if (s.prior) s.list_prior[n * L + i] = s.list_prior[k * L + i];
      n += !(at < bound);
    }
    s.length[i] = (int32_t)n;
    if (exact) {
      chains(s.q + i * Dp, Dp, n, x, [&](int64_t k, int u) -> const R * {
        const int64_t at = base + index[k] * p.key.s2;
        if (!as_is) {
          copy<R>(p.key.data, p.key.type, at, p.key.s3, p.D, spare + u * Dp, 1, (R)1);
          return spare + u * Dp;
        }
        if (k + FAR < n) {  // the processor cannot predict which key comes next, but the list is known
          const R *next = (const R *)p.key.data + base + index[k + FAR] * p.key.s2;
          for (int64_t d = 0; d < p.D; d += 64 / (int64_t)sizeof(R)) __builtin_prefetch(next + d);
        }
        return (const R *)p.key.data + at;
      });
      Vec<R> tops = broadcast(-INF<R>);
      for (int64_t k = n; k < n + N; ++k) x[k] = -INF<R>;
      for (int64_t k = 0; k < n; k += N) tops = vmax(tops, load(x + k));
      R top = exact[i / N][i % N];
      for (int k = 0; k < N; ++k) top = max_of(top, (R)tops[k]);
      sums.top[i / N][i % N] = sums.anchor[i / N][i % N] = top, sums.price_bound[i / N][i % N] = price_bound - far;
      sums.best_x[i / N][i % N] = sums.single_key_price[i / N][i % N] = top;
    }
    for (int64_t k = 0; k < n; ++k) s.list[k * L + i] = x[k], s.index[k * L + i] = index[k];
  }
}

// Pad the lists to the length of the longest, which is returned. Entries of the padding have no weight.
template <class R, int NV> int64_t pad_lists(LinkPanels<R, NV> &s) {
  constexpr int L = Simd<R>::N * NV;
  int64_t longest = 0;
  for (int i = 0; i < L; ++i) longest = max_of(longest, (int64_t)s.length[i]);
  for (int i = 0; i < L; ++i)
    for (int64_t k = s.length[i]; k < longest; ++k) {
      s.list[k * L + i] = -INF<R>, s.index[k * L + i] = 0;
      if (s.prior) s.list_prior[k * L + i] = 0;
    }
  return longest;
}

// Save the lists for the backward pass once the price is known, without the keys that have no weight.
// A key has weight where its x is above the price by more than -origin.
template <class R, int NV>
void save_sparse_rows(const Problem &p, const Rows<R, NV> &rows, const LinkPanels<R, NV> &s, const RowSums<R, NV> &sums,
                      R origin, bool listed, bool prefiltered) {
  constexpr int N = Simd<R>::N, L = N * NV;
  const SparseRows<R, L> lists(p, p.lists, rows);
  int64_t n = 0, candidates = 0;
  for (int i = 0; i < rows.n && listed; ++i) candidates += s.length[i];
  const bool with_x = candidates <= lists.room(true);
  bool room = listed;
  for (int i = 0; i < L && room; ++i) {
    lists.ends()[i] = (int32_t)n;
    if (i >= rows.n) continue;
    const R anchor = sums.anchor[i / N][i % N], h = sums.h[i / N][i % N];
    const R sum = sums.price_bound[i / N][i % N] + sums.top[i / N][i % N] + anchor + h;
    room = sum == sum && n + s.length[i] <= lists.room(with_x);  // after a NaN, the list may be empty
    for (int64_t k = 0; k < s.length[i] && room; ++k) {
      const R d = s.list[k * L + i] - anchor + h;
      lists.put(n, s.index[k * L + i]);
      if (with_x) lists.x()[n] = s.list[k * L + i];
      n += d > -origin, room = d == d;
    }
  }
  lists.at[0] = room ? L + (with_x ? lists.WITH_X : 0) + (prefiltered ? lists.PREFILTERED : 0) : 0;
  if (room) lists.ends()[L] = (int32_t)n;
}

}  // namespace
