// The search for the price (price_search.h) with a compiled link, of which only values are known.
//
// The link increases, and may be bounded above, bounded in its argument (`upper`), or positive everywhere. So the search
// finds its beginning by evaluating the link, and its bracket may be open on both sides.
#pragma once
#include "links/compiled.h"
#include "links/link_workspace.h"

namespace {

// The best key of each row for a compiled link, by x + log(pi), which is `single_key_price` here. Its price is found when
// a search begins, because a compiled link has no inverse.
template <class R, int NV>
void best_single_key_price(const Problem &, const Compiled<R> &, int64_t keys, const R *x, const R *prior,
                           RowSums<R, NV> &sums) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  for (int n = 0; n < NV; ++n) {
    if (!prior) {
      sums.best_x[n] = sums.single_key_price[n] = sums.top[n];
      continue;
    }
    for (int64_t j = 0; j < keys; ++j) {
      const V at = load(x + j * L + n * N), value = at + (R)LN2 * load(prior + j * L + n * N);
      const Mask<R> better = (value > sums.single_key_price[n]) & (at != -INF<R>);
      sums.single_key_price[n] = better ? value : sums.single_key_price[n];
      sums.best_x[n] = better ? at : sums.best_x[n];
    }
  }
}

// Begin a search with a compiled link: at the price that the best key alone would pay, or somewhere in the range of the
// link where it cannot take the mass. The bracket is open on both sides, but where `lower` bounds it.
template <class R, int NV>
void begin_search(const Problem &p, const Rows<R, NV> &rows, const Compiled<R> &link, RowSums<R, NV> &sums) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N;
  for (int n = 0; n < NV; ++n) {
    for (int i = 0; i < N; ++i) sums.level[n][i] = rows.level[n * N + i];
    V anchor = sums.best_x[n], top = sums.top[n], log_prior = sums.single_key_price[n] - anchor;
    Mask<R> idle = (top == -INF<R>) | sums.full[n];
    if (p.marginal == regard::SINK) {  // the null key has the prior 1
      const V null = sums.level[n] * rows.c[n];
      const Mask<R> better = (null > sums.single_key_price[n]) | idle;
      anchor = better ? null : anchor, log_prior = better ? V{} : log_prior, top = vmax(top, null);
      sums.null_x[n] = null - anchor, idle = Mask<R>{};
    }
    anchor = idle ? V{} : anchor;
    log_prior = log_prior == log_prior ? log_prior : V{};
    const V room = link.headroom(n, (R)p.mass * exp2_bounded((R)-LOG2E * log_prior));
    const V h = room < INF<R> ? room : broadcast(link.inside());
    sums.power[n] = link.power_at(n, h), sums.anchor[n] = anchor, sums.reached[n] = room < INF<R>;
    sums.low[n] = idle ? V{} : link.lower > -INF<R> ? anchor - top + link.lower : broadcast(-INF<R>);
    sums.high[n] = broadcast(INF<R>), sums.width[n] = broadcast((R)16);
    if (link.lower > -INF<R> && p.marginal != regard::RELAX) {
      const V price = anchor - room + link.lower;
      sums.price_bound[n] = (~idle & (price > sums.price_bound[n])) ? price : sums.price_bound[n];
    }
    sums.h[n] = idle ? broadcast(-INF<R>) : h;
    sums.done[n] = idle;
  }
}

// One step of a vector of rows with a compiled link, from their mass and its derivative at h: Newton's method on a power
// of the mass, at most `width` far while the bracket is open on that side, and bisection where it leaves the bracket.
template <class R, int NV>
void move_price(const Problem &p, const Rows<R, NV> &rows, const Compiled<R> &link, int n, Vec<R> mass, Vec<R> slope,
                int iteration, bool all_keys, RowSums<R, NV> &sums, bool &above) {
  using V = Vec<R>;
  using M = Mask<R>;
  constexpr R CLOSE = sizeof(R) == 4 ? (R)3.4e-5 : (R)1.5e-9;  // a step from here squares the distance
  constexpr R STILL = sizeof(R) == 4 ? (R)6.4e-6 : (R)1.8e-12;
  const V h = sums.h[n], anchor = sums.anchor[n], known = vmax(broadcast(TINY<R>), mass);
  V &low = sums.low[n], &high = sums.high[n], &width = sums.width[n];
  V ratio, move;
  if (p.marginal == regard::RELAX) {
    const V logarithm = vlog(known) - (anchor - h) / (rows.c[n] * sums.level[n]);  // of mass/target
    ratio = mass != mass ? mass : mass == INF<R> ? mass : exp2_bounded((R)LOG2E * logarithm);
    move = -logarithm / (slope / known + (R)1 / (rows.c[n] * sums.level[n]));
  } else {
    ratio = mass / (R)p.mass;
    const V logarithm = vlog(known / (R)p.mass), e = sums.power[n] * logarithm;
    const V small = (R)1 + e * (R)0.5 * ((R)1 + e * (R)(1.0 / 3) * ((R)1 + e * (R)0.25));
    const V power = exp2_bounded((R)LOG2E * e), mean = ((e < (R)1e-2) & (e > (R)-1e-2)) ? small : (power - (R)1) / e;
    move = -logarithm * mean / power * known / slope;  // from mass^power to target^power
  }
  const V away = ratio - (R)1, distance = away < 0 ? -away : away, size = h < 0 ? -h : h;
  above &= !any((ratio < (R)1) & ~sums.done[n]);
  low = ((ratio <= (R)1) & (h > low)) ? h : low;
  high = ((ratio >= (R)1) & (h < high)) ? h : high;
  const V moved = move < 0 ? -move : move, still = vmax(broadcast(STILL), EPS<R> * size);
  const M last = (distance <= (R)2 * EPS<R>) | ((distance < CLOSE) & (moved <= still)) |
                 ((distance < (R)1e-3) & (moved <= EPS<R> * size)) | (ratio != ratio);
  const M up = ratio < (R)1, open = up ? high == INF<R> : low == -INF<R>;
  V next = h + move;
  const M inside = (next > low) & (next < high) & (~open | (moved <= width)), bad = ~inside & ~last;
  const M shut = (high - low <= (R)2 * EPS<R> * size);
  const V middle = low * (R)0.5 + high * (R)0.5;
  next = bad ? (open ? (up ? h + width : h - width) : middle) : next;
  width = bad & open ? width * (R)4 : width;
  if (iteration >= 30 && iteration % 2) next = ((high == INF<R>) | (low == -INF<R>) | last) ? next : middle;
  // Close to `upper` the mass may be infinite at one number and too small at the one below.
  next = ((shut & bad) | ~(next - next == 0)) ? (ratio == INF<R> ? low : h) : next;
  if (all_keys && link.lower > -INF<R>) {  // only the bracket is sure; a little lower, for rounding
    const V bound =
        high + (R)16 * EPS<R> * (size + (link.lower < 0 ? -link.lower : link.lower) + (anchor < 0 ? -anchor : anchor));
    const V price = anchor - bound + link.lower;
    sums.price_bound[n] = (~sums.done[n] & (high < INF<R>)&(price > sums.price_bound[n])) ? price : sums.price_bound[n];
  }
  sums.h[n] = sums.done[n] ? h : next;
  sums.done[n] |= last | shut | (size >= FULL<R>);  // a mass that no price reaches
}

// Find rows whose keys together can take at most the mass, for links with a ceiling: there p = ceiling pi.
template <class R, int NV> void find_full_rows(const Problem &p, const LinkPanels<R, NV> &s, RowSums<R, NV> &sums) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  for (int n = 0; n < NV; ++n) {
    V most = {};
    for (int64_t j = 0; j < s.rows; ++j) {
      const V x = load(s.x + j * L + n * N),
              prior = s.prior ? exp2_bounded(load(s.prior + j * L + n * N)) : x - x + (R)1;
      most += x == -INF<R> ? V{} : x == x ? prior : x;  // NaN: not full
    }
    sums.full[n] = (most * (R)p.link_ceiling <= (R)p.mass) & (sums.top[n] != -INF<R>);
  }
}

}  // namespace
