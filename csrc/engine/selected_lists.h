// Selected keys as lists: the keys that each row selected, one by one.
//
// Rows that select different keys share no tile, so their products are computed pair by pair, and the cost follows the
// number of selected keys. Lists are used where nothing but the band masks keys besides, and x is the product alone.
// Elsewhere a selection is a mask (prior_terms.h).
#pragma once
#include "engine/prior_terms.h"
#include "engine/tiles.h"

namespace {

inline int64_t longest_selection(const Problem &p) { return p.selections * p.selected_block; }

inline bool lists_selection(const Problem &p) {
  if (!p.selected) return false;
  // Parameters of compiled links are differentiated by tiles. Lists leave out keys of slope 0, as at a ceiling.
  if (p.family == regard::COMPILED && (p.row_gl || p.link_ceiling < 1e300)) return false;
  const Terms terms(p);
  const bool plain = terms.folded && !(terms.prior || terms.mask || terms.documents || p.tile_map);
  return plain && p.Tq >= 16 && 3 * longest_selection(p) <= p.Tk;
}

// One bit for each block finds repetitions and sorts. This many words at a time, so that they fit the stack.
constexpr int64_t SELECTED_WORDS = 1024;

// Write the keys of one row that it selected and may read by its band, `step` apart, each once. Returns how many.
// SORTED: in increasing order; otherwise as they come, which saves a pass over the bits.
template <bool SORTED, class R, int NV>
int64_t selected_keys(const Problem &p, const Rows<R, NV> &rows, int lane, int32_t *to, int64_t step) {
  const int64_t *index = (const int64_t *)p.selected.data + rows.at(p.selected, lane);
  const int64_t where = rows.query[lane] + p.offset, size = p.selected_block, next = p.selected.s3;
  const int64_t low = max_of((int64_t)0, where - p.left), high = min_of(p.Tk, where + p.right + 1);
  const int64_t blocks = (p.Tk + size - 1) / size;
  int64_t n = 0;
  const auto add = [&](int64_t block) {
    if (size == 1) {
      if (block >= low && block < high) to[n++ * step] = (int32_t)block;
      return;
    }
    const int64_t from = max_of(low, block * size), end = min_of(high, (block + 1) * size);
    for (int64_t key = from; key < end; ++key) to[n++ * step] = (int32_t)key;
  };
  bool ascending = true;
  for (int64_t at = 1; at < p.selections && ascending; ++at) ascending = index[at * next] > index[(at - 1) * next];
  if (ascending) {
    for (int64_t at = 0; at < p.selections; ++at)
      if (index[at * next] >= 0) add(index[at * next]);
    return n;
  }
  if (!SORTED && blocks <= SELECTED_WORDS * 64) {
    uint64_t seen[SELECTED_WORDS];
    memset(seen, 0, (blocks + 63) / 64 * 8);
    for (int64_t at = 0; at < p.selections; ++at) {
      const int64_t block = index[at * next];
      if (block < 0 || block >= blocks) continue;
      uint64_t &word = seen[block / 64];
      const uint64_t bit = (uint64_t)1 << (block % 64);
      if (!(word & bit)) add(block);
      word |= bit;
    }
    return n;
  }
  for (int64_t first = 0; first < blocks; first += SELECTED_WORDS * 64) {
    uint64_t bits[SELECTED_WORDS];
    const int64_t words = min_of(SELECTED_WORDS, (blocks - first + 63) / 64);
    memset(bits, 0, words * 8);
    for (int64_t at = 0; at < p.selections; ++at) {
      const int64_t block = index[at * next] - first;
      if (block >= 0 && block < words * 64) bits[block / 64] |= (uint64_t)1 << (block % 64);
    }
    for (int64_t word = 0; word < words; ++word)
      for (uint64_t rest = bits[word]; rest; rest &= rest - 1) add(first + word * 64 + __builtin_ctzll(rest));
  }
  return n;
}

// to[t] = <q, k> for the keys of a list. q has whole vectors. EXACT: summed as `scores` does. `spare` has 16 rows of Dp.
template <class R, bool EXACT>
void score_list(const Problem &p, int64_t b, int64_t kv, const R *q, const int32_t *index, int64_t step, int64_t n,
                R *spare, R *to) {
  const Tensor &key = p.key;
  const int64_t base = key.s0 * b + key.s1 * kv, Dp = padded<R>(p.D);
  const bool as_is = readable_in_place<R>(key, p.D) && p.D == Dp;
  const auto row = [&](int64_t t, int u) -> const R * {
    const int64_t at = base + index[t * step] * key.s2;
    if (as_is) return (const R *)key.data + at;
    R *copied = spare + u * Dp;
    copy<R>(key.data, key.type, at, key.s3, p.D, copied, 1, (R)1);
    for (int64_t d = p.D; d < Dp; ++d) copied[d] = 0;
    return copied;
  };
  if (EXACT)
    chains(q, Dp, n, to, row);
  else
    dots(q, Dp, n, to, row);
}

}  // namespace
