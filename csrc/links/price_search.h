// The price of each row: the root of the row equation, for all rows of a block at once.
//
// The equation is: mass(h) + null key = mass of the marginal (or exp(dual/rho) where it is relaxed), where mass(h) is
// the sum of p over the keys at headroom h. It increases with h. The search begins at the price that the best key alone
// would pay, which is above the solution in h; takes Newton steps on a power of the mass, for which the equation is
// nearly linear; keeps a bracket; and bisects where a step leaves it. With many keys, a sample of them gives a first
// guess. A row is done when its mass agrees with the target to the last digits, or h does not move any more. Each step
// that is sure to be above also gives a lower bound of the price, which decides which keys are candidates.
#pragma once
#include "links/candidate_lists.h"
#include "links/compiled_search.h"
#include "links/link_workspace.h"
#include "links/links.h"

namespace {

// Sums of p and w at headroom h over every `stride`-th of the first `rows` rows of a panel, scaled as if the others
// were like them; and how many keys have weight.
template <class R, int NV, class Link, bool PRIOR>
void sum_weights(const Link &link, int64_t rows, int64_t stride, const R *x, const R *prior, const Vec<R> *anchor,
                 const Vec<R> *h, Vec<R> *mass_at_h, Vec<R> *slope, Vec<R> *count) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  V p_sum[NV] = {}, w_sum[NV] = {};
  Mask<R> some[NV] = {};
  for (int64_t from = 0; from < rows; from += 64 * stride) {  // in pieces, for shorter chains of rounding errors
    const int64_t to = min_of(rows, from + 64 * stride);
    V p_part[NV] = {}, w_part[NV] = {};
    Evaluated<R, Link, 64, NV> evaluated;
    evaluated.fill(link, 0, (to - from + stride - 1) / stride, x + from * L, stride * L, anchor, h);
    for (int64_t j = from; j < to; j += stride)
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) {
        const V d = load(x + j * L + n * N) - anchor[n] + h[n];
        V p, w;
        evaluated.template get<PRIOR>(link, (j - from) / stride, n, n, d, prior + j * L + n * N, p, w);
        p_part[n] += p, w_part[n] += w;
        some[n] -= (Mask<R>)(p > 0);
      }
    for (int n = 0; n < NV; ++n) p_sum[n] += p_part[n], w_sum[n] += w_part[n];
  }
  const int64_t summed = (rows + stride - 1) / stride;
  const R scale = rows ? (R)rows / (R)summed : 1;
  for (int n = 0; n < NV; ++n)
    mass_at_h[n] = scale * p_sum[n], slope[n] = scale * w_sum[n],
    count[n] = scale * __builtin_convertvector(some[n], V);
}

// The price at which each key of a block alone would have the mass. The key with the highest is the anchor of its row.
template <class R, int NV, class Link>
void best_single_key_price(const Problem &p, const Link &link, int64_t keys, const R *x, const R *prior,
                           RowSums<R, NV> &sums) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  const V mass = broadcast((R)p.mass), log_mass = (R)LOG2E * vlog(mass);
  for (int n = 0; n < NV; ++n) {
    if (!prior) {  // the key with the largest score has the highest price
      sums.anchor[n] = sums.top[n];
      sums.price_bound[n] = vmax(sums.price_bound[n], sums.top[n] - link.headroom(n, mass) - Link::ORIGIN);
      continue;
    }
    for (int64_t j = 0; j < keys; ++j) {
      const V at = load(x + j * L + n * N),
              room = exp2_bounded((log_mass - load(prior + j * L + n * N)) / link.beta(n));
      const V price = at == -INF<R> ? at : vmax(broadcast(LOWEST<R>), at - room);
      const Mask<R> better = price > sums.single_key_price[n];
      sums.single_key_price[n] = better ? price : sums.single_key_price[n],
      sums.anchor[n] = better ? at : sums.anchor[n];
      sums.price_bound[n] = vmax(sums.price_bound[n], price);
    }
  }
}

// Begin a search, at the highest known bound of the price.
template <class R, int NV, class Link>
void begin_search(const Problem &p, const Rows<R, NV> &rows, const Link &link, RowSums<R, NV> &sums) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N;
  for (int n = 0; n < NV; ++n) {
    V &anchor = sums.anchor[n], &price_bound = sums.price_bound[n], top = sums.top[n];
    for (int i = 0; i < N; ++i) sums.level[n][i] = rows.level[n * N + i];
    if (p.marginal == regard::SINK) {  // the null key may have the highest price
      const V null = sums.level[n] * rows.c[n], price = null - link.headroom(n, broadcast((R)p.mass)) - Link::ORIGIN;
      const Mask<R> better = (price > price_bound) | (anchor == -INF<R>);
      anchor = better ? null : anchor, price_bound = vmax(price_bound, price), top = vmax(top, null);
      sums.null_x[n] = null - (anchor == -INF<R> ? V{} : anchor);
    }
    const Mask<R> idle = price_bound == -INF<R>;  // decided by the bound: the anchor may be left from an earlier search
    anchor = idle ? V{} : anchor;
    sums.low[n] = idle ? V{} : anchor - top - Link::ORIGIN, sums.high[n] = broadcast(INF<R>);
    V h = anchor - price_bound - Link::ORIGIN;
    if (p.marginal == regard::RELAX) {
      // The key of the anchor alone has, at a price lambda, log pi + beta log y = lambda/rho with y = anchor - c
      // lambda. So y is at most 1, or c rho times the rest. Where the prior is tiny that is far less than for a fixed
      // mass.
      const V scale = rows.c[n] * sums.level[n], room = vmax(broadcast(TINY<R>), anchor - price_bound);
      const V most_y = anchor + scale * (link.beta(n) * vlog(room) - vlog(broadcast((R)p.mass)));
      h = -vmax(-h, Link::ORIGIN - vmax(broadcast((R)1), most_y));
    }
    sums.h[n] = idle ? broadcast(-INF<R>) : h;
    sums.width[n] = sums.h[n] - sums.low[n] + (R)1;
    sums.done[n] = idle;
  }
}

struct StepCounts {  // of one step
  double total;      // keys with weight, of all rows
  int64_t longest;   // most keys with weight in one row
  bool above;        // whether all h were above their solution
};

// One step of the rows of vector n, from their mass and its derivative at h. `all_keys`: they are of all keys, not of a
// sample. `above` becomes false if some h is below its solution.
template <class R, int NV, class Link>
void move_price(const Problem &p, const Rows<R, NV> &rows, const Link &link, int n, Vec<R> mass, Vec<R> slope,
                int iteration, bool all_keys, RowSums<R, NV> &sums, bool &above) {
  using V = Vec<R>;
  using M = Mask<R>;
  const bool relax = p.marginal == regard::RELAX, convex = Link::CONVEX && !relax;
  const V h = sums.h[n];
  V &low = sums.low[n], &high = sums.high[n], &width = sums.width[n];
  V target = broadcast((R)p.mass), move;
  if (relax) {
    const V dual = (sums.anchor[n] - h - Link::ORIGIN) / rows.c[n], by_h = (R)1 / (rows.c[n] * sums.level[n]);
    target = exp2_bounded((R)LOG2E * dual / sums.level[n]);
    move = -vlog(vmax(broadcast(TINY<R>), mass / target)) / (link.beta(n) * slope / mass + by_h);
  } else {
    move = link.newton_step(n, mass / target) * target / slope;
  }
  const V ratio = mass / target, away = ratio - (R)1, distance = away < 0 ? -away : away;
  above &= !any((ratio < (R)1) & ~sums.done[n]);
  low = ((ratio <= (R)1) & (h > low)) ? h : low;
  high = ((ratio >= (R)1) & (h < high)) ? h : high;
  V next = h + move;
  // Where the equation is nearly linear, one more step squares a distance this small. Else go on until h stays.
  const V size = h < 0 ? -h : h, moved = move < 0 ? -move : move;
  M last = distance < (convex ? (sizeof(R) == 4 ? (R)3e-5 : (R)1e-8) : (R)2 * EPS<R>);
  last |= ((moved <= EPS<R> * size) & (distance < (R)1e-3)) | (ratio != ratio);
  const M open = high == INF<R>, bad = ~((next > low) & (next < high)) & ~last;
  const M shut = ~open & (high - low <= (R)2 * EPS<R> * size);
  const V middle = low * (R)0.5 + high * (R)0.5;
  next = bad ? (open ? h + width : middle) : next;
  width = bad & open ? width * (R)4 : width;
  next = ((shut & bad) | (ratio != ratio)) ? h : next;  // the mass of a relaxed row may be too small for a ratio
  if (!convex && iteration >= 30 && iteration % 2) next = (open | last) ? next : middle;
  // Convex equations: a step from above stays above. Others: only the bracket is sure. A little lower, for rounding.
  const M sure = (ratio >= (R)1) & ~bad & (convex ? ~M{} : M{});
  const V anchor = sums.anchor[n];
  const V bound = (sure ? next : high) + (R)16 * EPS<R> * (size + Link::ORIGIN + (anchor < 0 ? -anchor : anchor));
  const V price = anchor - bound - Link::ORIGIN;
  if (all_keys)
    sums.price_bound[n] = (~sums.done[n] & ~open & (price > sums.price_bound[n])) ? price : sums.price_bound[n];
  sums.h[n] = sums.done[n] ? h : next;
  sums.done[n] |= last | shut;
}

// One step of the search over a panel (or lists), or over a sample of it. Returns whether all rows are done. The lower
// bounds of the price are updated where all keys were summed (stride 1).
template <class R, int NV, class Link>
bool search_step(const Problem &p, const Rows<R, NV> &rows, const Link &link, int64_t panel_rows, int64_t stride,
                 const R *x, const R *prior, int iteration, RowSums<R, NV> &sums, StepCounts &counts) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N;
  const bool sink = p.marginal == regard::SINK;
  V mass_at_h[NV], slope[NV], count[NV];
  if (prior)
    sum_weights<R, NV, Link, true>(link, panel_rows, stride, x, prior, sums.anchor, sums.h, mass_at_h, slope, count);
  else
    sum_weights<R, NV, Link, false>(link, panel_rows, stride, x, prior, sums.anchor, sums.h, mass_at_h, slope, count);
  bool settled = true;
  counts = {0, 0, true};
  for (int n = 0; n < NV; ++n) {
    const V h = sums.h[n];
    for (int i = 0; i < N; ++i)
      if (n * N + i < rows.n)
        counts.total += count[n][i], counts.longest = max_of(counts.longest, (int64_t)count[n][i]);
    if (sink) {
      V p0, w0;
      link.at(n, sums.null_x[n] + h, p0, w0);
      mass_at_h[n] += p0, slope[n] += w0;
    }
    move_price(p, rows, link, n, mass_at_h[n], slope[n], iteration, stride == 1, sums, counts.above);
    settled &= !any(~sums.done[n]);
  }
  return settled;
}

// Whether rows may turn to lists: keys below some x have no weight, and nothing depends on all keys, as the value and a
// ceiling do.
template <class Link> bool lists_keys(const Problem &p, const Link &link) {
  if constexpr (Link::COMPILED)
    return link.lower > -INF<double> && link.ceiling == INF<double> && !p.free_energy;
  else
    return true;
}

// The headroom of each row, from the panel or from lists. Turns to lists when at most `share` of the keys have weight
// (and no row has many more). Returns whether there are lists now. `counts`: of the last step.
template <class R, int NV, class Link>
bool search(const Problem &p, const Rows<R, NV> &rows, const Link &link, LinkPanels<R, NV> &s, RowSums<R, NV> &sums,
            bool listed, int iterations, double share, StepCounts &counts) {
  const bool may_list = p.marginal != regard::RELAX && share > 0 && lists_keys(p, link);
  int64_t list_rows = listed ? pad_lists(s) : 0;
  begin_search(p, rows, link, sums);
  if (!listed && s.rows >= SAMPLE * 32) {  // a first guess from a sample: Newton's method may begin anywhere
    for (int iteration = 0; iteration < 8; ++iteration)
      if (search_step<R, NV, Link>(p, rows, link, s.rows, SAMPLE, s.x, s.prior, iteration, sums, counts)) break;
    Vec<R> guess[NV];
    for (int n = 0; n < NV; ++n) guess[n] = sums.h[n];
    begin_search(p, rows, link, sums);
    for (int n = 0; n < NV; ++n) {
      Mask<R> better = guess[n] < sums.h[n];
      if constexpr (Link::COMPILED) {  // where the search does not begin above the solution, any guess is better
        const Mask<R> found = (guess[n] > -FULL<R>)&(guess[n] < FULL<R>);
        better = found & (p.marginal == regard::RELAX ? found : better | ~sums.reached[n]);
      }
      sums.h[n] = better & ~sums.done[n] ? guess[n] : sums.h[n];
    }
  }
  for (int iteration = 0; iteration < iterations; ++iteration) {
    const bool settled = search_step<R, NV, Link>(p, rows, link, listed ? list_rows : s.rows, 1, listed ? s.list : s.x,
                                                  listed ? s.list_prior : s.prior, iteration, sums, counts);
    const bool few = counts.total <= share * s.rows * rows.n && 0.8 * counts.longest <= share * s.rows;
    if (!listed && may_list && counts.above && few) {
      memset(s.length, 0, sizeof s.length);
      listed = true;
      for (int64_t g = 0; g < s.n_segments && listed; ++g)
        listed =
            append_candidates(s, sums.price_bound, rows.n, s.segments[g].first, s.segments[g].at, s.segments[g].keys);
      list_rows = listed ? pad_lists(s) : 0;
    }
    if (settled) break;
  }
  return listed;
}

// Find rows of a fixed mass whose priors are all so small that y would be too large for the scores to count, or for a
// number. Such a row has the weights of its prior, p = pi mass/sum(pi), and needs no search. Logarithms of its prior
// are relative to the largest (`prior_offset`); its `share` is log2(mass/sum(pi)), relative to the same.
template <class R, int NV, class Link>
void find_prior_only_rows(const Problem &p, const Link &link, const LinkPanels<R, NV> &s, RowSums<R, NV> &sums) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  constexpr R FAR = sizeof(R) == 4 ? 64 : 512;  // of log2 y
  for (int n = 0; n < NV; ++n) {
    V top = broadcast(-INF<R>), sum = {};
    for (int64_t j = 0; j < s.rows; ++j) top = vmax(top, load(s.prior + j * L + n * N));
    const V log_mass = (R)LOG2E * vlog(broadcast((R)p.mass)), far = FAR * link.beta(n);
    const Mask<R> keys = top > -INF<R>;  // rows that may read some key
    if (!any(keys & (log_mass - top > far))) continue;
    const V safe = top == -INF<R> ? V{} : top;
    for (int64_t j = 0; j < s.rows; ++j) sum += vexp2(load(s.prior + j * L + n * N) - safe);
    const V share = log_mass - (R)LOG2E * vlog(vmax(broadcast(TINY<R>), sum));
    const Mask<R> prior_only = keys & (share - top > far);
    sums.prior_only[n] = prior_only, sums.some_prior_only |= any(prior_only);
    sums.share[n] = share, sums.prior_offset[n] = prior_only ? top : V{};
    sums.price_bound[n] = prior_only ? broadcast(-INF<R>) : sums.price_bound[n];
  }
}

}  // namespace
