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
      V mass = {}, slope = {}, y1 = {}, y2 = {}, energy = {}, soft = {}, log_prior = {}, top = {};
      for (int64_t j = from; j < to; ++j) {
        const int64_t at = j * L + n * N;
        const V d = load(x + at) - anchor;
        V w, q;
        if (!BARE && prior)
          link.times_prior(n, d + h, load(prior + at), q, w);
        else
          link.at(n, d + h, q, w);
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
        if (want.energy) energy += (q > 0) & ~sums.prior_only[n] ? q * (d + h + Link::ORIGIN) : V{};
        if (want.soft) {
          const V t = d + h, e = vexp2(-vmax(t, -t)), plus = vmax(V{}, t) + (R)LOG2E * vlog1p(e);
          soft += t > -INF<R> ? (prior ? plus * exp2_bounded(load(prior + at)) : plus) : V{};
        }
        top = vmax(top, q);
        if (want.log_prior) log_prior += q > 0 ? q * (load(prior + at) - sums.prior_offset[n]) : V{};
        if constexpr (Link::PRICED)
          if (want.support)
            sums.support[n] -= __builtin_convertvector(link.has_weight(d + h) | ((q > 0) & sums.prior_only[n]), V);
      }
      if (!BARE) {
        if (want.entropy) add_logs(sums, n, top, from, to, x, want.baseline_log ? w_panel : nullptr);
        sums.y1[n] += y1, sums.y2[n] += y2, sums.energy[n] += energy, sums.soft[n] += soft;
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
