// Gradients pair by pair, where few pairs of a block of rows and a block of keys have weight.
//
// A link (links/links.h; for KL kl/exponential.h) gives p and w = dp/dt of a pair from d, the distance of its x from the
// price. With the utility u = <dO, v> and the baseline of the row, G = w (u - baseline) is added to the gradients.
#pragma once
#include "engine/backward_walk.h"

namespace {

// The rows of a block in whole vectors, 0 beyond D, for single pairs.
template <class R>
const R *padded_rows(const R *from, int64_t stride, int64_t keys, int64_t D, R *spare, int64_t &padded_stride) {
  const int64_t Dp = padded<R>(D);
  if (D == Dp) {
    padded_stride = stride;
    return from;
  }
  for (int64_t j = 0; j < keys; ++j) {
    memcpy(spare + j * Dp, from + j * stride, D * sizeof(R));
    for (int64_t d = D; d < Dp; ++d) spare[j * Dp + d] = 0;
  }
  padded_stride = Dp;
  return spare;
}

// The factor from p (u - b) to its part of dL/dalpha: beta^2 (1 - 1/y - log y).
template <class R, class Link> INLINE Vec<R> alpha_factor(const Link &link, Vec<R> d, int n) {
  using V = Vec<R>;
  if constexpr (Link::PRICED && !Link::COMPILED) {
    const V safe = d > (R)1e-30 - Link::ORIGIN ? d : broadcast((R)1 - Link::ORIGIN), beta = link.beta(n);
    return beta * beta * (Link::ORIGIN ? safe / (safe + (R)1) - vlog1p(safe) : (R)1 - (R)1 / safe - vlog(safe));
  } else {
    return V{};
  }
}

// What single pairs of a block of keys and a block of rows add to the gradients.
template <class R, class Link> struct Pairs {
  static constexpr int NV = 3, N = Simd<R>::N;
  using V = Vec<R>;
  const Problem &p;
  const Link &link;
  BackwardRows<R> &r;
  const int64_t first;  // the first key of the block
  const R *k, *v;       // rows in whole vectors
  const int64_t k_stride, v_stride;
  R *const dk, *const dv;
  const bool sums;  // whether more than dq, dk and dv is requested
  const int64_t Dp = padded<R>(p.D), Dvp = padded<R>(p.Dv);

  // G = tau dL/ds of row i and key first + j, whose utility is u and whose x lies d above the price. `weight` is p; it
  // becomes the factor on dO in the gradient of the value. All sums over pairs are updated here.
  INLINE R advantage(int i, int64_t j, R u, R d, R &weight, R w, R alpha_factor) const {
    const Rows<R, NV> &rows = r.rows;
    const int n = i / N, lane = i % N;
    const R kept = p.dropout_key ? rows.dropout_factor_at(p, first + j, i) : 1, p_ij = weight;
    u = kept * u - r.a[n][lane];
    weight *= kept;
    if (p.grad_entropy && p_ij > TINY<R>) u -= r.b[n][lane] * log_of(max_of(TINY<R>, p_ij * r.per_mass[n][lane]));
    const R g = w * u;
    if (sums) {
      const int64_t key_at = (rows.b * p.H + rows.head[0]) * p.Tk + first + j;
      const R gp = p_ij * u, ds = g * r.inverse_tau[n][lane];
      r.sum_g[n][lane] += g;
      if (p.row_gs) r.sum_gs[n][lane] += g * d / rows.c[n][lane];
      if (p.row_ps) r.sum_ps[n][lane] += p_ij * d / rows.c[n][lane];
      if (p.row_gd) {
        const int64_t away = first + j - rows.position[n][lane];
        r.sum_gd[n][lane] += gp * (R)(away < 0 ? -away : away);
      }
      if (p.row_ga) r.sum_ga[n][lane] += gp * alpha_factor;
      if (p.key_g) ((R *)p.key_g)[key_at] += gp;
      if (p.key_ds) ((R *)p.key_ds)[key_at] += ds;
      if (p.key_mass) ((R *)p.key_mass)[key_at] += p_ij;
      if (p.dense_g) ((R *)p.dense_g.data)[rows.at(p.dense_g, i) + (first + j) * p.dense_g.s3] += gp;
      if (p.dense_ds) ((R *)p.dense_ds.data)[rows.at(p.dense_ds, i) + (first + j) * p.dense_ds.s3] += ds;
      if (PriorGradients(p).some) add_pair_gradients(p, rows, r.chunk, i, first + j, gp);
      r.sum_gp[n][lane] += gp;
    }
    return g;
  }

  // Add one pair; slope: the derivative of the softcap.
  INLINE void add_pair(int i, int64_t j, R d, R weight, R w, R alpha_factor, R slope) const {
    if (!(w > 0) && !(w != w)) return;
    const R u = p.grad_out ? dot(r.d_out + i * Dvp, v + j * v_stride, Dvp) : 0;
    const R g = slope * advantage(i, j, u, d, weight, w, alpha_factor);
    if (p.density && of_row<R>(p.density, r.rows.at(p.density, i) + (first + j) * p.density.s3) == 0) return;
    if (p.dv && p.grad_out) add_scaled(weight, r.d_out + i * Dvp, Dvp, dv + j * Dvp);
    if (p.dk) add_scaled(g, r.q + i * Dp, Dp, dk + j * Dp);
    if (p.dq) add_scaled(g, k + j * k_stride, Dp, r.dq + i * Dp);
  }

  static constexpr int SOME = 16;  // pairs whose rows stay in the first-level cache from one product to the next

  // Add the pairs in the list of row i up to key `limit`.
  void add_listed_pairs(int i, int64_t limit) const {
    const int n = i / N, lane = i % N;
    const R *q = r.q + i * Dp, *d_out = r.d_out + i * Dvp;
    const R peak = r.peak[n][lane], rest = r.rest[n][lane], a = r.a[n][lane];
    const Link one = link.of_row(n, lane);
    const bool plain = !(sums || p.dropout_key || p.grad_entropy);
    for (int64_t at = r.next[i];;) {
      int pairs = 0;
      int64_t j[SOME];
      for (; pairs < SOME && at < r.end[i] && r.keys[at] < limit; ++at) j[pairs++] = r.keys[at] - first;
      if (!pairs) break;
      r.next[i] = at;
      R x[SOME] = {}, u[SOME] = {}, weight[SOME], g[SOME];
      // Where a price was solved for, x must agree with it to the last bit, because weights are differences.
      if (r.x)
        for (int t = 0; t < pairs; ++t) x[t] = r.x[at - pairs + t];
      else if constexpr (!Link::PRICED)
        dots(r.qt + i * Dp, Dp, pairs, x, [&](int64_t t, int) { return k + j[t] * k_stride; });
      else
        chains(r.qt + i * Dp, Dp, pairs, x, [&](int64_t t, int) { return k + j[t] * k_stride; });
      if (p.grad_out) dots(d_out, Dvp, pairs, u, [&](int64_t t, int) { return v + j[t] * v_stride; });
      for (int t = 0; t < pairs; t += N) {
        const V d = load(x + t) - peak + rest;
        V p_row, w_row, alpha = {};
        one.at(n, d, p_row, w_row);
        const Mask<R> none = (w_row <= 0);  // below the price by rounding
        store(weight + t, none ? V{} : p_row), store(g + t, none ? V{} : w_row * (load(u + t) - a));
        if (plain) continue;
        if (p.row_ga) alpha = alpha_factor<R>(one, d, n);
        for (int m = 0; m < N && t + m < pairs; ++m)
          if (!none[m]) g[t + m] = advantage(i, j[t + m], u[t + m], d[m], weight[t + m], w_row[m], alpha[m]);
      }
      for (int t = 0; t < pairs && p.dv && p.grad_out; ++t) add_scaled(weight[t], d_out, Dvp, dv + j[t] * Dvp);
      for (int t = 0; t < pairs && p.dk; ++t) add_scaled(g[t], q, Dp, dk + j[t] * Dp);
      if (p.dq)
        for (int64_t d = 0; d < Dp; d += N) {
          V sum = load(r.dq + i * Dp + d);
#pragma GCC unroll 1
          for (int t = 0; t < pairs; ++t) sum += g[t] * load(k + j[t] * k_stride + d);
          store(r.dq + i * Dp + d, sum);
        }
    }
  }
};

// Whether a call requests sums over rows, keys or pairs, besides the gradients of queries, keys and values.
inline bool sums_requested(const Problem &p) {
  return p.row_g || p.row_gp || p.row_gs || p.row_gd || p.row_ga || p.row_gl || p.key_g || p.key_ds || p.dense_g ||
         p.dense_ds || p.key_mass || PriorGradients(p).some;
}

template <class R, class Link>
Pairs<R, Link> pairs_of(const Problem &p, const Link &link, BackwardRows<R> &r, int64_t first, int64_t keys, const R *k,
                        int64_t k_stride, const R *v, int64_t v_stride, R *dk, R *dv, BackwardPanels<R> &s, bool sums) {
  int64_t k_padded, v_padded;
  const R *k_rows = padded_rows(k, k_stride, keys, p.D, s.k_padded, k_padded);
  const R *v_rows = padded_rows(v, v_stride, keys, p.Dv, s.v_padded, v_padded);
  return {p, link, r, first, k_rows, v_rows, k_padded, v_padded, dk, dv, sums};
}

}  // namespace
