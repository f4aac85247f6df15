// Backward pass of regularizers with a link (links.h), in the walk of engine/backward_walk.h.
//
// With p and w = dp/dt of each pair, and utilities U = dO V^T:
//   dL/ds_j = (w_j/tau) (u_j - b),  dL/dlog pi_j = p_j (u_j - b),  b = sum w u / (sum w + kappa)
// The baseline b is <dO, baseline value>, where the forward pass saved the baseline value sum w v / (sum w + kappa)
// (the record calls it `tilt`). kappa is not 0 for relaxed rows only. Three paths give the same gradients. Rows with
// saved lists (engine/sparse_rows.h) take only the pairs in these. In a block where few pairs have weight, all but Q
// K^T is done pair by pair. In any other block, whole tiles are multiplied.
#pragma once
#include "engine/backward_walk.h"
#include "engine/pairs.h"
#include "links/links.h"

namespace {

// Below this share of the pairs of a block, single pairs cost less than the four products of tiles.
constexpr double SPARSE_PAIRS = 0.25;

// a, b and the dual of each row: a pair's advantage is u - a - b log(p/mass).
template <class R> void prepare_link(const Problem &p, BackwardRows<R> &r) {
  constexpr int N = Simd<R>::N;
  const Rows<R, 3> &rows = r.rows;
  const int64_t Dp = padded<R>(p.D), Dvp = padded<R>(p.Dv);
  const bool free = p.marginal == regard::FREE;
  memset(r.dq, 0, BackwardRows<R>::L * Dp * sizeof(R));
  for (int n = 0; n < 3; ++n) {
    r.peak[n] = r.per_mass[n] = Vec<R>{}, r.rest[n] = broadcast(-INF<R>), r.edge[n] = broadcast(INF<R>);
    r.prior_only[n] = Mask<R>{};
  }
  r.some_prior_only = r.has_prior_offset = false;
  for (int i = 0; i < rows.n; ++i) {
    const int n = i / N, lane = i % N;
    const R level = rows.level[i], peak = of_row<R>(p.saved_peak, rows.at(p.saved_peak, i));
    r.inverse_tau[n][lane] = 1 / rows.temperature[i];
    if (peak == -INF<R>) {  // no key may be read, so the query may hold anything
      memset(r.q + i * Dp, 0, Dp * sizeof(R));
      r.idle = true;
      continue;
    }
    r.peak[n][lane] = peak, r.rest[n][lane] = of_row<R>(p.saved_rest, rows.at(p.saved_rest, i));
    if (is_beyond(peak, (R)r.rest[n][lane])) report_beyond<R>(p);
    R base = 0;
    const int64_t baseline_at = rows.at(p.saved_tilt, i);
    if (p.grad_out && !free && r.keys) {  // summed as utilities are: in a row of one key they cancel
      R *baseline = r.d_out_t, sums[4];
      copy<R>(p.saved_tilt.data, p.saved_tilt.type, baseline_at, p.saved_tilt.s3, p.Dv, baseline, 1, (R)1);
      for (int64_t d = p.Dv; d < Dvp; ++d) baseline[d] = 0;
      dots(r.d_out + i * Dvp, Dvp, 1, sums, [&](int64_t, int) { return baseline; });
      base = sums[0];
    } else if (p.grad_out && !free) {
      base = dot(r.d_out + i * Dvp, p.saved_tilt, baseline_at, p.Dv);
    }
    R add = 0;
    if (p.grad_entropy) {
      R per_mass = 1 / (R)p.mass;
      if (p.marginal == regard::RELAX) per_mass = exp_of(-of_row<R>(p.saved_dual, rows.at(p.saved_dual, i)) / level);
      const bool full = p.family == regard::COMPILED && r.rest[n][lane] >= FULL<R>;  // not the mass of the marginal
      if (free || full) per_mass = 1 / of_row<R>(p.saved_mass, rows.at(p.saved_mass, i));
      if (!(per_mass < INF<R>)) per_mass = 0;  // a row without mass
      const R g = of_row<R>(p.grad_entropy, rows.at(p.grad_entropy, i)) * per_mass;
      if (!free) base -= g * of_row<R>(p.saved_tilt_log, rows.at(p.saved_tilt_log, i));
      add = g * of_row<R>(p.saved_entropy, rows.at(p.saved_entropy, i));
      r.b[n][lane] = g, r.per_mass[n][lane] = per_mass;
    }
    if (peak == INF<R> && p.family == regard::TSALLIS) {  // a row that has its prior's weights (price_search.h)
      memset(r.q + i * Dp, 0, Dp * sizeof(R));
      r.peak[n][lane] = r.inverse_tau[n][lane] = 0, r.edge[n][lane] = -INF<R>;
      r.prior_only[n][lane] = -1, r.some_prior_only = true;
      r.dot[i] = base, r.a[n][lane] = base + add;
      continue;
    }
    const R h = r.rest[n][lane];
    const R origin = p.family == regard::COMPILED ? (R)-p.link_lower : p.centred ? 1 : 0;
    const R size = (peak < 0 ? -peak : peak) + (h < 0 ? -h : h) + (origin < 0 ? -origin : origin);
    // Pairs with x at or below the edge have no weight. It is a little lower, for rounding: the weights decide then.
    r.edge[n][lane] = peak - h - origin - 4 * EPS<R> * size;
    r.dot[i] = base;
    r.a[n][lane] = base + add;
  }
}

// What the pairs of a panel add to dL/d(parameter) of a compiled link: pi dg/d(parameter) (u - b).
template <class R, class Link> struct LinkDerivatives {
  LinkDerivatives(const Problem &, const Link &, int, int64_t, const R *, const BackwardRows<R> &) {}
  INLINE void add(int64_t, Vec<R>, const R *, BackwardRows<R> &) const {}
};
template <class R> struct LinkDerivatives<R, Compiled<R>> {
  static constexpr int N = Simd<R>::N;
  int64_t parameters = 0, keys;
  int n;
  R by[regard::LINK_PARAMETERS * BACKWARD_KEYS * N];  // [parameters][keys][N]
  LinkDerivatives(const Problem &p, const Compiled<R> &link, int n, int64_t keys, const R *x, const BackwardRows<R> &r)
      : keys(keys), n(n) {
    if (!p.row_gl) return;
    parameters = p.link_parameters;
    const auto block = link.block(n, keys, 1, x + n * N, link.lanes, &r.peak[n], &r.rest[n], by, nullptr);
    link.derivatives(&block);
  }
  void add(int64_t j, Vec<R> utility, const R *prior, BackwardRows<R> &r) const {
    for (int64_t m = 0; m < parameters; ++m) {
      const Vec<R> slope = load(by + (m * keys + j) * N);
      const Vec<R> part = slope * utility * (prior ? exp2_bounded(load(prior)) : broadcast((R)1));
      r.sum_gl[m][n] += slope == 0 ? Vec<R>{} : part;  // the value of a masked key may be anything
    }
  }
};

// One block of keys for one block of rows.
template <class R, class Link>
void backward_block_link(const Problem &p, const Terms &terms, BackwardRows<R> &r, int64_t first, int64_t keys,
                         const R *k, int64_t k_stride, const R *v, int64_t v_stride, R *dk, R *dv,
                         BackwardPanels<R> &s) {
  constexpr int NV = 3, N = Simd<R>::N, L = N * NV;
  using V = Vec<R>;
  using I = typename Simd<R>::I;
  const Rows<R, NV> &rows = r.rows;
  const Link link(p, rows);
  const bool sums = sums_requested(p);
  const auto single_pairs = [&] {
    return pairs_of<R>(p, link, r, first, keys, k, k_stride, v, v_stride, dk, dv, s, sums);
  };
  if (r.keys) {
    const Pairs<R, Link> pairs = single_pairs();
    for (int i = 0; i < rows.n; ++i) pairs.add_listed_pairs(i, first + keys);
    return;
  }

  if (r.some_prior_only && !r.has_prior_offset) {
    largest_priors(p, terms, rows, BACKWARD_KEYS, s.gate, s.bias, s.spare, s.live, r.prior_offset);
    r.has_prior_offset = true;
  }
  const Gate gate = fill_gate(p, terms, rows, first, keys, s.gate, s.bias, s.spare, s.live);
  if (gate == CLOSED) return;
  const uint8_t *live = gate >= WEIGHTED ? s.live : nullptr;
  const R *prior = terms.prior ? s.gate : nullptr;
  scores<R, NV, false>(r.qt, k, k_stride, p.D, keys, s.x);
  if (gate >= WEIGHTED || !terms.folded)
    apply_bias_and_mask(p, terms, rows, keys, s.x, gate >= WEIGHTED ? s.gate : nullptr, s.bias, (R *)nullptr,
                        terms.capped ? s.slope : nullptr);
  const int64_t Dp = padded<R>(p.D), Dvp = padded<R>(p.Dv);

  int64_t pairs = keys * L;
  if (Link::PRICED) {
    pairs = 0;
    for (int64_t j = 0; j < keys; ++j) {
      Mask<R> some[NV], any_lane = {};
      for (int n = 0; n < NV; ++n) {
        const V x = load(s.x + j * L + n * N);
        any_lane |= some[n] = ~(x <= r.edge[n]) & (x != -INF<R>);  // a NaN counts as a pair
      }
      s.bits[j] = 0;
      if (!any(any_lane)) continue;
      for (int n = 0; n < NV; ++n) s.bits[j] |= (uint64_t)lanes_of(some[n]) << (n * N);
      pairs += __builtin_popcountll(s.bits[j]);
    }
    if (!pairs) return;
  }
  // p and w of a vector of pairs; returns the distance from the price. Masked keys stay masked, whatever the price is.
  // Row j of the panel, vector n, is row `at` of `evaluated`, vector `own`.
  const auto weights_at = [&](const auto &evaluated, int64_t at, int own, int64_t j, int n, V &weight, V &w) {
    const int64_t place = j * L + n * N;
    const V x = load(s.x + place);
    V d = x == -INF<R> ? x : x - r.peak[n] + r.rest[n];
    if (prior)
      evaluated.template get<true>(link, at, n, own, d, prior + place, weight, w);
    else
      evaluated.template get<false>(link, at, n, own, d, prior, weight, w);
    if (r.some_prior_only && prior) {
      const V own = x == x ? exp2_bounded(load(prior + place) - r.prior_offset[n] + r.rest[n]) : x;
      weight = r.prior_only[n] ? own : weight, w = r.prior_only[n] ? own : w, d = r.prior_only[n] ? V{} : d;
    }
    return d;
  };
  const auto distance_of = [&](int64_t j, int n) {
    const Mask<R> distance = (I)(first + j) - rows.position[n];
    return __builtin_convertvector(distance < 0 ? -distance : distance, V);
  };

  const bool by_pairs = !(Link::COMPILED && (p.row_gl || p.link_ceiling < INF<double>));  // see selected_lists.h
  if (Link::PRICED && by_pairs && (double)pairs <= SPARSE_PAIRS * keys * L) {
    const Pairs<R, Link> few = single_pairs();
    for (int64_t j = 0; j < keys; ++j) {
      if (!s.bits[j]) continue;
      V ps[NV], ws[NV], alphas[NV] = {};
      Evaluated<R, Link, 1, NV> row;
      row.fill(link, 0, 1, s.x + j * L, L, r.peak, r.rest);
      for (int n = 0; n < NV; ++n) {
        const V d = weights_at(row, 0, n, j, n, ps[n], ws[n]);
        store(s.x + j * L + n * N, d);
        if (p.row_ga) alphas[n] = alpha_factor<R>(link, d, n);
      }
      for (uint64_t bits = s.bits[j]; bits; bits &= bits - 1) {
        const int i = __builtin_ctzll(bits), n = i / N, lane = i % N;
        if (i >= rows.n) break;
        few.add_pair(i, j, s.x[j * L + i], ps[n][lane], ws[n][lane], alphas[n][lane],
                     terms.capped ? s.slope[j * L + i] : 1);
      }
    }
    return;
  }

  if (p.grad_out)
    scores<R, NV, false>(r.d_out_t, v, v_stride, p.Dv, keys, s.u);
  else
    memset(s.u, 0, keys * L * sizeof(R));
  for (int n = 0; n < NV; ++n) {
    const V a = r.a[n], b = r.b[n];
    Evaluated<R, Link, BACKWARD_KEYS, 1> evaluated;
    evaluated.fill(link, n, keys, s.x + n * N, L, &r.peak[n], &r.rest[n]);
    LinkDerivatives<R, Link> derivatives(p, link, n, keys, s.x, r);
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = j * L + n * N;
      V weight, w, utility = load(s.u + at);
      const V d = weights_at(evaluated, j, 0, j, n, weight, w);
      if (p.dropout_key) {
        const V kept = rows.dropout_factor(p, first + j, n);
        utility *= kept;
        store(s.kept + at, weight * kept);
      }
      utility -= a;
      if (p.grad_entropy)
        utility -= weight > TINY<R> ? b * vlog(vmax(broadcast(TINY<R>), weight * r.per_mass[n])) : V{};
      const V g = (w == 0) ? V{} : w * utility;  // the value of a masked key may be anything
      if (sums) {
        const V gp = (weight == 0) ? V{} : weight * utility, ds = g * r.inverse_tau[n];
        r.sum_g[n] += g, r.sum_gp[n] += gp;
        if (p.row_gs) r.sum_gs[n] += w == 0 ? V{} : g * d / rows.c[n];  // from ORIGIN: the rest is known
        if (p.row_gd) r.sum_gd[n] += gp * distance_of(j, n);
        if (p.row_ga) r.sum_ga[n] += weight == 0 ? V{} : gp * alpha_factor<R>(link, d, n);
        if (p.row_gl) derivatives.add(j, utility, prior ? prior + at : nullptr, r);
        R key_g = 0, key_ds = 0, key_mass = 0;
        for (int lane = 0; lane < N && n * N + lane < rows.n; ++lane) {
          const int i = n * N + lane;
          key_g += gp[lane], key_ds += ds[lane], key_mass += weight[lane];
          if (p.dense_g) ((R *)p.dense_g.data)[rows.at(p.dense_g, i) + (first + j) * p.dense_g.s3] += gp[lane];
          if (p.dense_ds) ((R *)p.dense_ds.data)[rows.at(p.dense_ds, i) + (first + j) * p.dense_ds.s3] += ds[lane];
        }
        const int64_t key_at = (rows.b * p.H + rows.head[0]) * p.Tk + first + j;
        if (p.key_g) ((R *)p.key_g)[key_at] += key_g;
        if (p.key_ds) ((R *)p.key_ds)[key_at] += key_ds;
        if (p.key_mass) ((R *)p.key_mass)[key_at] += key_mass;
      }
      if (sums && prior) store(s.gate + at, (weight == 0) ? V{} : weight * utility);  // G, where the prior was
      store(s.x + at, weight);
      store(s.u + at, terms.capped ? (w == 0 ? V{} : g * load(s.slope + at)) : g);
    }
  }
  if (PriorGradients(p).some) add_prior_gradients(p, rows, r.chunk, first, keys, s.gate);
  if (terms.density) clear_silent_keys(p, r, first, keys, s);
  if (p.dv && p.grad_out) scatter<R, L>(p.dropout_key ? s.kept : s.x, r.d_out, Dvp, keys, dv);
  if (p.dk) scatter<R, L>(s.u, r.q, Dp, keys, dk);
  if (p.dq)
    for_each_live_run(live, keys, [&](int64_t from, int64_t to) {
      gather<R, NV>(s.u + from * L, k + from * k_stride, k_stride, to - from, p.D, r.dqt);
    });
}

}  // namespace
