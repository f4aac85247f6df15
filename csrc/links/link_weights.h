// Weights at the price that was found, and the sums over them that statistics need.
#pragma once
#include "links/link_workspace.h"
#include "links/links.h"

namespace {

// Sums of p log p and w log p over a piece of the panel. Logarithms are relative to the heaviest weight so far:
// otherwise their sums would lose digits in a row of many similar keys, or of very little mass.
template <class R, int NV>
void add_logs(RowSums<R, NV> &sums, int n, Vec<R> top, int64_t from, int64_t to, const R *p, const R *w) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  const V before = sums.heaviest[n], heaviest = vmax(before, top),
          safe = heaviest > TINY<R> ? heaviest : broadcast((R)1);
  const V shift = before > TINY<R> ? vlog(vmax(broadcast(TINY<R>), before / safe)) : V{};
  V plog = {}, wlog = {};
  for (int64_t j = from; j < to; ++j) {
    const V q = load(p + j * L + n * N), log_p = q > TINY<R> ? vlog(vmax(broadcast(TINY<R>), q / safe)) : V{};
    plog += q * log_p;
    if (w) wlog += load(w + j * L + n * N) * log_p;
  }
  sums.plog[n] += shift * sums.mass[n] + plog, sums.wlog[n] += shift * sums.slope[n] + wlog;
  sums.heaviest[n] = heaviest;
}

// sum of pi f(g) over a piece of the panel, for a compiled link. Keys without weight have f(0).
template <class R>
Vec<R> sum_divergence(const Compiled<R> &link, int n, const R *g, int64_t from, int64_t to, const R *x,
                      const R *prior) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N;
  R f[PANEL_KEYS * N];
  const int64_t L = link.lanes;
  const auto block = link.block(n, to - from, 1, g, N, nullptr, nullptr, f, nullptr);
  link.divergence(&block);
  V sum = {};
  for (int64_t j = from; j < to; ++j) {
    const V value = load(f + (j - from) * N);
    const V term = prior ? value * exp2_bounded(load(prior + j * L + n * N)) : value;
    sum += load(x + j * L + n * N) == -INF<R> ? V{} : term;
  }
  return sum;
}

// Whether a key has weight. For a compiled link its weight q alone decides.
template <class R, class Link> INLINE Mask<R> counts_key(const Link &link, Vec<R> d, Vec<R> q) {
  if constexpr (Link::COMPILED)
    return (Mask<R>)(q > 0);
  else
    return link.has_weight(d);
}

// The weights of `keys` panel rows, in place, with the sums of the statistics. w_panel receives w if the gradient's
// baseline is requested, else it is null. Row j is key first + j or, if `index` is given, a key of its own in each
// lane. The sums over pieces are computed on their own and then added, which makes the chains of rounding errors
// shorter.
template <class R, int NV, class Link>
void compute_weights(const Problem &p, const RequestedLinkStatistics &want, const Rows<R, NV> &rows, const Link &link,
                     RowSums<R, NV> &sums, int64_t first, const int32_t *index, int64_t keys, R *x, const R *prior,
                     R *w_panel) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  const R *squares = (const R *)p.squares.data + p.squares.s0 * rows.b + p.squares.s1 * rows.kv;
  for (int n = 0; n < NV; ++n) {
    const V h = sums.h[n], anchor = sums.anchor[n], reference = sums.reference[n];
    const auto compute_piece = [&](int64_t from, int64_t to, auto bare) __attribute__((always_inline)) {
      constexpr bool BARE = decltype(bare)::value;  // only the weights are requested
      Evaluated<R, Link, PANEL_KEYS, 1> evaluated;
      evaluated.fill(link, n, to - from, x + from * L + n * N, L, &anchor, &h);
      V divergence_sum = {};
      if constexpr (Link::COMPILED)
        if (want.energy) divergence_sum = sum_divergence(link, n, evaluated.g, from, to, x, prior);
      V mass = {}, slope = {}, y1 = {}, y2 = {}, energy = {}, soft = {}, log_prior = {}, top = {};
      for (int64_t j = from; j < to; ++j) {
        const int64_t at = j * L + n * N;
        const V d = load(x + at) - anchor;
        V w, q;
        if (!BARE && prior)
          evaluated.template get<true>(link, j - from, n, 0, d + h, prior + at, q, w);
        else
          evaluated.template get<false>(link, j - from, n, 0, d + h, prior, q, w);
        if (!BARE && sums.some_prior_only) {
          const V own = d == d ? exp2_bounded(load(prior + at) - sums.prior_offset[n] + sums.share[n]) : d;
          q = sums.prior_only[n] ? own : q;
          w = sums.prior_only[n] ? own : w;  // up to a factor
        }
        mass += q, slope += w;
        store(x + at, q);
        if (w_panel) store(w_panel + at, w);
        if (BARE) continue;
        if (want.moments) {
          const V away = q > 0 ? d - reference : V{};
          y1 += q * away, y2 += q * away * away;
        }
        if (want.energy)
          energy += (q > 0) & ~sums.prior_only[n] & ~sums.full[n] ? q * (d + h + dual_shift<R, Link>()) : V{};
        if (want.soft) {
          const V t = d + h, e = vexp2(-vmax(t, -t)), plus = vmax(V{}, t) + (R)LOG2E * vlog1p(e);
          soft += t > -INF<R> ? (prior ? plus * exp2_bounded(load(prior + at)) : plus) : V{};
        }
        top = vmax(top, q);
        if (want.log_prior) log_prior += q > 0 ? q * (load(prior + at) - sums.prior_offset[n]) : V{};
        if constexpr (Link::PRICED)
          if (want.support)
            sums.support[n] -=
                __builtin_convertvector(counts_key<R>(link, d + h, q) | ((q > 0) & sums.prior_only[n]), V);
      }
      if (!BARE) {
        if (want.entropy) add_logs(sums, n, top, from, to, x, want.baseline_log ? w_panel : nullptr);
        sums.y1[n] += y1, sums.y2[n] += y2, sums.energy[n] += energy - divergence_sum, sums.soft[n] += soft;
        sums.log_prior[n] += log_prior;
      }
      sums.mass[n] += mass, sums.slope[n] += slope;
    };
    const bool bare = !(prior || want.moments || want.energy || want.soft || want.entropy || want.support);
    for (int64_t from = 0; from < keys; from += PANEL_KEYS) {
      const int64_t to = min_of(keys, from + PANEL_KEYS);
      bare ? compute_piece(from, to, Constant<true>()) : compute_piece(from, to, Constant<false>());
      if (want.collision || want.spread) {
        V collision = {}, spread = {};
        for (int64_t j = from; j < to; ++j) {
          const V q = load(x + j * L + n * N);
          if (want.collision) collision += q * q;
          if (!want.spread) continue;
          V square;
          for (int i = 0; i < N; ++i) square[i] = squares[index ? (int64_t)index[j * L + n * N + i] : first + j];
          spread += q * square;
        }
        sums.collision[n] += collision, sums.spread[n] += spread;
      }
    }
    if (want.top)
      for (int64_t j = 0; j < keys; ++j) sums.heaviest[n] = vmax(sums.heaviest[n], load(x + j * L + n * N));
    if (want.first && keys) {  // lists are in increasing order of the keys
      for (int i = 0; i < N; ++i)
        if (index ? index[n * N + i] == 0 : first == 0) sums.first[n][i] = x[n * N + i];
    }
    if (want.drop)
      for (int64_t j = 0; j < keys; ++j)
        for (int i = 0; i < N; ++i) {
          const int64_t at = j * L + n * N + i;
          const R kept = rows.dropout_factor_at(p, index ? (int64_t)index[at] : first + j, n * N + i);
          x[at] *= kept;
          if (w_panel) w_panel[at] *= kept;
        }
  }
}

}  // namespace
