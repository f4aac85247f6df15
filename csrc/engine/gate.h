// From raw products to exponents: priors, masks, documents, biases, softcap.
//
// For a block of keys and a block of rows, `fill_gate` computes the gate: the log-prior in base 2 of each pair, or -inf
// where the row may not read the key. It reports CLOSED where no row may read any of the keys, so that the block is
// skipped, OPEN where the gate is 0 everywhere, so that it need not be added, and WEIGHTED where it masks no pair, so
// that no weight needs a check for 0. `apply_bias_and_mask` then turns the panel of raw products into exponents x
// (rows.h). Keys that no row reads may hold anything, NaN included. `live` marks the keys that some row reads, and
// products with values go over runs of these only (`for_each_live_run`), because 0 * NaN is NaN.
#pragma once
#include "engine/prior_terms.h"
#include "engine/rows.h"

namespace {

enum Gate { CLOSED, OPEN, WEIGHTED, PARTLY };

// Fill gate[j][lane] for keys first ... first + keys - 1. `bias` receives the additive float mask, if there is one, and
// `spare` is overwritten. CLOSED, OPEN: see above; the gate was not written. WEIGHTED, PARTLY: it was, and live[j] is
// set where some row reads key j. (Where only the band is given, every key of [lo, hi) is read by some row.)
template <class R, int NV>
Gate fill_gate(const Problem &p, const Terms &terms, const Rows<R, NV> &rows, int64_t first, int64_t keys, R *gate,
               R *bias, R *spare, uint8_t *live) {
  using G = Rows<R, NV>;
  using V = typename G::V;
  using M = typename G::M;
  constexpr int N = G::N, L = G::L;
  const bool edge = first < rows.all_lo || first + keys > rows.all_hi;
  bool documents = false;
  if (terms.documents) {
    const int64_t *ids = (const int64_t *)p.key_ids.data + p.key_ids.s0 * rows.b;
    int64_t low = INT64_MAX, high = INT64_MIN;
    for (int64_t j = first; j < first + keys; ++j)
      low = min_of(low, ids[j * p.key_ids.s3]), high = max_of(high, ids[j * p.key_ids.s3]);
    if (high < 0 || high < rows.least_document || low > rows.most_document) return CLOSED;
    documents = !(low == high && rows.least_document == low && rows.most_document == low);
  }
  bool tiles = false;
  if (p.tile_map) {
    const TileState state = tiles_of(p, rows, first, keys);
    if (!state.some) return CLOSED;
    tiles = !state.every;
  }
  if (p.selected && !some_selected(p, rows, first, keys)) return CLOSED;
  const bool masked = documents || tiles || p.selected || terms.bias || terms.mask || terms.n_priors;
  if (!(edge || masked || terms.prior)) return OPEN;

  using I = typename Simd<R>::I;
  const I right = (I)min_of(p.right, (int64_t)1 << 30), left = (I)min_of(p.left, (int64_t)1 << 30);
  const bool structured = p.relative || p.query_factor || p.decay_query;
  const bool others = edge || masked || p.slopes || structured;
  const bool fresh = !edge && !p.slopes && structured;   // a structured term fills the gate
  const bool filled = fresh || (p.function && !others);  // or a function alone does
  for (int64_t j = 0; j < keys && !filled; ++j)
    for (int n = 0; n < NV; ++n) {
      const M distance = (I)(first + j) - rows.position[n];
      V x = {};
      if (p.slopes) x -= rows.slope[n] * __builtin_convertvector(distance < 0 ? -distance : distance, V);
      if (edge) x = ((distance > right) | (distance < -left)) ? broadcast(-INF<R>) : x;
      store(gate + j * L + n * N, x);
    }
  if (p.relative) add_relative(p, rows, first, keys, gate, fresh);
  if (p.query_factor) add_low_rank(p, rows, first, keys, gate, spare, fresh && !p.relative);
  if (p.decay_query) add_decay(p, rows, first, keys, gate, fresh && !p.relative && !p.query_factor);
  for (int t = 0; t < terms.n_priors; ++t) {
    rows.fill(*terms.priors[t], first, keys, spare);
    for (int64_t at = 0; at < keys * L; at += N) {
      const V x = load(spare + at), g = load(gate + at);
      const M shut = (x == -INF<R>) | (g == -INF<R>);
      store(gate + at, shut ? broadcast(-INF<R>) : vmax(broadcast(LOWEST<R>), g + x * (R)LOG2E));
    }
  }
  if (terms.bias) {
    rows.fill(p.score_bias, first, keys, bias);
    for (int64_t at = 0; at < keys * L; at += N) {
      const M shut = load(bias + at) == -INF<R>;
      store(gate + at, shut ? broadcast(-INF<R>) : load(gate + at));
    }
  }
  if (terms.mask) {
    rows.fill(p.mask, first, keys, spare);
    for (int64_t at = 0; at < keys * L; at += N) {
      const M shut = load(spare + at) == (R)0;
      store(gate + at, shut ? broadcast(-INF<R>) : load(gate + at));
    }
  }
  if (documents) {
    const int64_t *ids = (const int64_t *)p.key_ids.data + p.key_ids.s0 * rows.b;
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t id = ids[(first + j) * p.key_ids.s3];
      for (int i = 0; i < L; ++i)
        if (id != rows.document[i] || id < 0) gate[j * L + i] = -INF<R>;
    }
  }
  if (tiles) mask_by_tiles(p, rows, first, keys, gate);
  if (p.selected) mask_unselected(p, rows, first, keys, gate);
  if (p.function) {
    add_function(p, rows, first, keys, gate, live, !others);
    if (terms.density) add_density(p, rows, first, keys, gate, spare);
    return memchr(live, 1, keys) ? PARTLY : CLOSED;
  }
  if (!masked) {
    memset(live, 1, keys);
    if (terms.density) add_density(p, rows, first, keys, gate, spare);
    return edge || terms.density ? PARTLY : WEIGHTED;
  }
  bool open = false;
  for (int64_t j = 0; j < keys; ++j) {
    M some = {};
    for (int n = 0; n < NV; ++n) some |= load(gate + j * L + n * N) != -INF<R>;  // a NaN prior counts as read
    open |= live[j] = any(some);
  }
  if (terms.density) add_density(p, rows, first, keys, gate, spare);  // a key of density 0 is read all the same
  return open ? PARTLY : CLOSED;
}

// The largest log-prior of each row over all of its keys. The buffers have room for `keys` keys.
template <class R, int NV>
void largest_priors(const Problem &p, const Terms &terms, const Rows<R, NV> &rows, int64_t keys, R *gate, R *bias,
                    R *spare, uint8_t *live, Vec<R> *top) {
  constexpr int N = Simd<R>::N, L = N * NV;
  for (int n = 0; n < NV; ++n) top[n] = broadcast(-INF<R>);
  for (int64_t first = rows.lo; first < rows.hi; first += keys) {
    const int64_t some = min_of(keys, rows.hi - first);
    if (fill_gate(p, terms, rows, first, some, gate, bias, spare, live) == CLOSED) continue;
    for (int64_t j = 0; j < some; ++j)
      for (int n = 0; n < NV; ++n) top[n] = vmax(top[n], load(gate + j * L + n * N));
  }
}

// From raw products to x, in place. If given, `score` receives the scores s and `slope` the derivative of the softcap.
// gate: null where it is open. A density of 0 becomes -inf in it.
template <class R, int NV>
void apply_bias_and_mask(const Problem &p, const Terms &terms, const Rows<R, NV> &rows, int64_t keys, R *x, R *gate,
                         const R *bias, R *score, R *slope) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  const R cap = (R)p.softcap;
  const bool apart = p.family != regard::KL;
  for (int64_t j = 0; j < keys; ++j)
    for (int n = 0; n < NV; ++n) {
      const int64_t at = j * L + n * N;
      V s = load(x + at);
      if (!terms.folded) {
        if (terms.capped) {
          s = vtanh(s);
          if (slope) store(slope + at, (R)1 - s * s);
          s *= cap;
        }
        if (terms.bias) s += load(bias + at);
        if (score) store(score + at, s);
        s *= rows.c[n];
      }
      if (gate) {
        V g = load(gate + at);
        if (terms.density) {
          const typename Simd<R>::M silent = g == LOWEST<R>;
          g = silent ? (s == s ? broadcast(-INF<R>) : s) : g;
          store(gate + at, silent ? broadcast(-INF<R>) : g);
        }
        if (apart) s = g == g ? s : g;  // a prior that is NaN makes x NaN
        s = g == -INF<R> ? g : vmax(broadcast(LOWEST<R>), apart ? s : s + g);
      }
      store(x + at, s);
    }
}

// Call f(from, to) for each run of keys that some row reads; one run if `live` is null.
template <class F> INLINE void for_each_live_run(const uint8_t *live, int64_t keys, F f) {
  if (!live) return f((int64_t)0, keys);
  for (int64_t j = 0; j < keys;) {
    if (!live[j]) {
      ++j;
      continue;
    }
    const int64_t from = j;
    while (j < keys && live[j]) ++j;
    f(from, j);
  }
}

}  // namespace
