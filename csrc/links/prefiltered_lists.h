// Fill the lists of candidates by the prefilter in 16 bits (int16_prefilter.h); and scores of a block of keys.
#pragma once
#include "engine/gate.h"
#include "links/price_search.h"

namespace {

// Count the keys that each row may read; gate: null where it is open.
template <class R, int NV> void count_admissible(RowSums<R, NV> &sums, int64_t keys, const R *gate) {
  constexpr int N = Simd<R>::N, L = N * NV;
  for (int n = 0; n < NV; ++n) {
    if (!gate) sums.admissible[n] += (R)keys;
    for (int64_t j = 0; j < keys && gate; ++j)
      sums.admissible[n] -= __builtin_convertvector(load(gate + j * L + n * N) > -INF<R>, Vec<R>);
  }
}

// x of a block of keys, into the panel, and the largest of each row.
template <class R, int NV>
void score_block(const Problem &p, const Terms &terms, const Rows<R, NV> &rows, int64_t first, int64_t keys, R *gate,
                 LinkPanels<R, NV> &s, R *x, Vec<R> *top) {
  constexpr int N = Simd<R>::N, L = N * NV;
  int64_t stride;
  const R *k = as_rows(p.key, rows.b, rows.kv, first, keys, p.D, s.k_spare, stride);
  if (!gate && terms.folded) return scores<R, NV, true>(s.qt, k, stride, p.D, keys, x, top);
  scores<R, NV, false>(s.qt, k, stride, p.D, keys, x);
  apply_bias_and_mask(p, terms, rows, keys, x, gate, s.bias, (R *)nullptr, (R *)nullptr);
  for (int n = 0; n < NV; ++n)
    for (int64_t j = 0; j < keys; ++j) top[n] = vmax(top[n], load(x + j * L + n * N));
}

// Fill the lists of the rows from key `from` to the end. The prefilter is used for the blocks of keys that every row
// may read in full: then no row depends on keys that it may not read, which share a grain. Other blocks are scored in
// float. Returns false if there is no room, or if some number is not finite; panels and sums are then restored.
template <int NV, class Link>
bool list_by_prefilter(const Problem &p, const Terms &terms, const RequestedLinkStatistics &want,
                       const Rows<float, NV> &rows, const Link &link, const PrefilterKeys &prefilter_keys, int64_t from,
                       LinkPanels<float, NV> &s, RowSums<float, NV> &sums) {
  using V = Vec<float>;
  constexpr int N = Simd<float>::N, L = N * NV;
  rows.gather_rows(p.query, p.D, s.q, padded<float>(p.D), [&](int i) { return rows.factor(p, terms, i); });
  if (!s.coarse.fill(s.q, padded<float>(p.D), rows.n, p.D, s.coarse_spare)) return false;
  const RowSums<float, NV> before = sums;
  const int64_t known = s.rows, words = int16_pairs_of(p.D);
  int32_t lengths[L];
  memcpy(lengths, s.length, sizeof lengths);
  const auto no = [&] {
    sums = before, s.rows = known;
    memcpy(s.length, lengths, sizeof lengths);
    return false;
  };
  V off[NV] = {};  // the error of products in 16 bits; keys before `from` have their scores in float
  CandidateBits<float, NV> found;
  StepCounts counts;
  int64_t stage = 2 * known;
  for (int64_t first = from, next; first < rows.hi; first = next) {
    next = min_of(rows.hi, (first / PREFILTER_KEYS + 1) * PREFILTER_KEYS);
    const int64_t keys = next - first;
    const Gate open = fill_gate(p, terms, rows, first, keys, s.gate, s.bias, s.spare, s.live + s.rows);
    if (open == CLOSED) continue;
    float *gate = open >= WEIGHTED ? s.gate : nullptr;
    V price[NV];  // or the largest score, which must be found even where a null key takes all of the mass
    for (int n = 0; n < NV; ++n) price[n] = sums.price_bound[n] < sums.top[n] ? sums.price_bound[n] : sums.top[n];
    bool whole = first % PREFILTER_KEYS == 0 && (next % PREFILTER_KEYS == 0 || next == p.Tk);
    for (int64_t v = 0; v < keys * NV && gate && whole; ++v) whole = !any(load(gate + v * N) == -INF<float>);
    if (whole) {
      const Grain &grain = prefilter_keys.grains[first / PREFILTER_KEYS];
      if (!(grain.size >= 0) || !has_room(s, keys)) return no();
      s.coarse.find(grain, p.D, prefilter_keys.keys + first * 2 * words, keys, price, rows.n, off, s.sums, found.bits);
      float size[L], top[L];
      for (int i = 0; i < L; ++i) size[i] = s.coarse.size[i] * grain.size;
      for (int n = 0; n < NV; ++n) store(top + n * N, sums.top[n]);
      found.each(keys, [&](int64_t place) {
        const int64_t j = place / L, i = place % L, to = (int64_t)s.length[i]++ * L + i;
        const float x = (float)s.sums[place] * size[i];
        s.list[to] = x, s.index[to] = (int32_t)(first + j);
        top[i] = max_of(top[i], x);
      });
      for (int n = 0; n < NV; ++n) sums.top[n] = load(top + n * N);
    } else {
      float *x = s.x + s.rows * L;
      score_block(p, terms, rows, first, keys, gate, s, x, sums.top);
      for (int64_t v = 0; v < keys * NV; ++v) {
        const V at = load(x + v * N);
        if (any((at - at != 0) & (at != -INF<float>))) return no();
      }
      for (int n = 0; n < NV; ++n) price[n] -= off[n];
      if (!append_candidates(s, price, rows.n, first, s.rows, keys)) return no();
    }
    best_single_key_price(p, link, keys, s.x, (const float *)nullptr, sums);
    if (want.admissible) count_admissible(sums, keys, gate);
    s.rows += keys;
    if (s.rows < stage) continue;
    stage = 2 * s.rows;
    if (stage < rows.hi - rows.lo) search(p, rows, link, s, sums, true, 2, 0, counts);
  }
  search(p, rows, link, s, sums, true, 2, 0, counts);
  for (V &far : off) {
    if (any(far - far != 0)) return no();
    far *= 2.0f;  // both x and the price may be off
  }
  prune_lists(p, rows, s, sums, off, before.top);
  return true;
}

}  // namespace
