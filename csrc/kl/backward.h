// Backward pass of KL, in the walk of engine/backward_walk.h.
//
// For a block of keys and a block of rows, with utilities U = dO V^T:
//   p <- 2^(x - peak - rest);  G <- p (u - a - b log2 p)      [keys][L]
//   dV += P^T dO;  dK += G^T Q;  dQ += G K
// G = tau dL/ds is the weight times its advantage: utility minus a baseline. a and b depend on the row alone. With
// mu = (mass of the plan)/(mass of the distribution), the baseline <dO, O>/mu of the row, and incoming gradients g_lse
// of lse and g_H of the entropy H:
//   dL/ds_j = (p_j/tau) [u_j - baseline + (g_lse - g_H (log p_j - log mu + H))/mu]
#pragma once
#include "engine/backward_walk.h"
#include "engine/pairs.h"
#include "kl/exponential.h"

namespace {

// a, b and the dual of each row.
template <class R> void prepare_kl(const Problem &p, BackwardRows<R> &r) {
  constexpr int N = Simd<R>::N;
  const Rows<R, 3> &rows = r.rows;
  const int64_t Dp = padded<R>(p.D), Dvp = padded<R>(p.Dv);
  if (r.keys) memset(r.dq, 0, BackwardRows<R>::L * Dp * sizeof(R));
  for (int i = 0; i < rows.n; ++i) {
    const int n = i / N, lane = i % N;
    const R tau = rows.temperature[i], level = rows.level[i];
    const R dual = p.saved_dual ? of_row<R>(p.saved_dual, rows.at(p.saved_dual, i)) : 0;
    const R sent = p.grad_out ? dot(r.d_out + i * Dvp, p.saved_out, rows.at(p.saved_out, i), p.Dv) : 0;
    r.dot[i] = sent;
    r.inverse_tau[n][lane] = 1 / tau, r.lambda[n][lane] = dual;
    const R peak = of_row<R>(p.saved_peak, rows.at(p.saved_peak, i));
    if (peak == -INF<R>) {  // no key may be read, so the query may hold anything
      memset(r.q + i * Dp, 0, Dp * sizeof(R));
      r.idle = true;
      continue;
    }
    r.peak[n][lane] = peak, r.rest[n][lane] = of_row<R>(p.saved_rest, rows.at(p.saved_rest, i));
    if (is_beyond(peak, (R)r.rest[n][lane])) report_beyond<R>(p);
    R log_mu = 0, base = sent;
    if (p.marginal == regard::ROWS && p.mass != 1) log_mu = (R)::log(p.mass), base = sent / (R)p.mass;
    if (p.marginal == regard::RELAX) log_mu = dual / level, base = sent / (R)::exp(log_mu) * (level / (level + tau));
    if (p.marginal == regard::FREE) base = 0;
    if (p.marginal == regard::FREE && p.saved_lse)
      log_mu = of_row<R>(p.saved_lse, rows.at(p.saved_lse, i)) + level / tau;
    const R inverse_mu = log_mu == 0 ? 1 : log_mu > -INF<R> ? (R)::exp(-log_mu) : 0;  // 0: all densities are 0
    R add = p.grad_lse ? of_row<R>(p.grad_lse, rows.at(p.grad_lse, i)) : 0;
    if (p.grad_entropy) {
      const R g = of_row<R>(p.grad_entropy, rows.at(p.grad_entropy, i));
      add -= g * (of_row<R>(p.saved_entropy, rows.at(p.saved_entropy, i)) - log_mu);
      r.b[n][lane] = g * inverse_mu * (R)LN2;
    }
    if (log_mu > -INF<R>) r.a[n][lane] = base - add * inverse_mu;
    if (r.keys)  // as pairs.h has it: d = x - peak + rest, and b is on natural logarithms
      r.rest[n][lane] = -r.rest[n][lane], r.b[n][lane] *= (R)LOG2E, r.per_mass[n][lane] = 1;
  }
}

// The products with the weights and with G, both rounded: dV += P^T dO, dK += G^T Q, dQ += G K.
inline void add_pair_products(const Problem &p, const BackwardRows<float> &r, int64_t keys, const uint8_t *live,
                              const float *weights, float *dk, float *dv, BackwardPanels<float> &s) {
  constexpr int NV = 3, N = Simd<float>::N, L = N * NV;
  PairPanels &to = s.pairs;
  if (p.dv && p.grad_out) {
    for (int64_t at = 0; at < keys * L; at += N) store_rounded(to.p_rows + at, load(weights + at));
    pair_scatter<L>(to.p_rows, (const Pair *)r.d_out, padded<float>(p.Dv), keys, dv);
  }
  if (!(p.dq || p.dk)) return;
  for (int64_t j = 0; j < keys; ++j)
    for (int n = 0; n < NV; ++n) {
      const int64_t at = j * L + n * N;
      const Vec<float> g = load(s.u + at) * (r.inverse_tau[n] * (float)p.scale);
      store(s.u + at, g);
      store_rounded(to.g_rows + at, g);
    }
  if (p.dk) pair_scatter<L>(to.g_rows, (const Pair *)r.q, padded<float>(p.D), keys, dk);
  if (p.dq) {
    const int64_t odd = to.skip % 2;
    pair_keys<NV>(s.u, odd, keys, to.g, nullptr);
    const Pair *k = admit(to.k + to.skip / 2 * p.D, p.D, odd, keys, live, to.k_admitted);
    pair_gather<NV>(to.g, k, p.D, (odd + keys + 1) / 2, p.D, r.dqt);
  }
}

// One block of keys for one block of rows.
template <class R, class T>
void backward_block_kl(const Problem &p, const Terms &terms, BackwardRows<R> &r, int64_t first, int64_t keys,
                       const T *k, int64_t k_stride, const T *v, int64_t v_stride, R *dk, R *dv, BackwardPanels<R> &s) {
  constexpr int NV = 3, N = Simd<R>::N, L = N * NV;
  using V = Vec<R>;
  const Rows<R, NV> &rows = r.rows;
  if constexpr (!PAIRED<T>)
    if (r.keys) {
      const Exponential<R> link(p, rows);
      const Pairs<R, Exponential<R>> pairs =
          pairs_of<R>(p, link, r, first, keys, k, k_stride, v, v_stride, dk, dv, s, sums_requested(p));
      for (int i = 0; i < rows.n; ++i) pairs.add_listed_pairs(i, first + keys);
      return;
    }
  const Gate gate = fill_gate(p, terms, rows, first, keys, s.gate, s.bias, s.spare, s.live);
  if (gate == CLOSED) return;
  const uint8_t *live = gate == PARTLY ? s.live : nullptr;
  const bool scored = p.row_gs && !terms.folded;
  if constexpr (PAIRED<T>)
    pair_scores<NV, false>((const Pair *)r.qt, r.score_factor, k, k_stride, even(p.D), keys, s.x);
  else
    scores<R, NV, false>(r.qt, k, k_stride, p.D, keys, s.x);
  if (gate != OPEN || !terms.folded)
    apply_bias_and_mask(p, terms, rows, keys, s.x, gate != OPEN ? s.gate : nullptr, s.bias, scored ? s.score : nullptr,
                        terms.capped ? s.slope : nullptr);
  if (!p.grad_out) {
    memset(s.u, 0, keys * L * sizeof(R));
  } else if constexpr (PAIRED<T>) {
    const V one[NV] = {broadcast((R)1), broadcast((R)1), broadcast((R)1)};
    pair_scores<NV, false>((const Pair *)r.d_out_t, one, v, v_stride, even(p.Dv), keys, s.u);
  } else {
    scores<R, NV, false>(r.d_out_t, v, v_stride, p.Dv, keys, s.u);
  }
  const R *weights = s.x;  // the weights in dV: p, after dropout if there is any
  for (int n = 0; n < NV; ++n) {
    const V peak = r.peak[n], rest = r.rest[n], a = r.a[n], b = r.b[n];
    const auto some = [&](int64_t j, auto count, auto exact) {
      constexpr int U = decltype(count)::value;
      constexpr bool ZERO = decltype(exact)::value;
      V t[U], w[U];
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) t[u] = vmax(broadcast(FLOOR<R, ZERO>), load(s.x + (j + u) * L + n * N) - peak - rest);
      vexp2<ZERO>(t, w);
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) {
        const int64_t at = (j + u) * L + n * N;
        V utility = load(s.u + at);
        if (p.dropout_key) {
          const V kept = rows.dropout_factor(p, first + j + u, n);
          utility *= kept;
          store(s.kept + at, w[u] * kept);
        }
        V g = w[u] * (utility - a - b * t[u]);
        if (ZERO) g = w[u] == 0 ? V{} : g;  // the value of a masked key may be anything; a NaN weight stays NaN
        store(s.x + at, w[u]), store(s.u + at, g);
      }
    };
    int64_t j = 0;
    if (p.row_gs)  // s - lambda, for the gradient of the temperature
      for (int64_t at = n * N; at < keys * L; at += L)
        store(s.score + at,
              terms.folded ? (load(s.x + at) - peak - rest) / rows.c[n] : load(s.score + at) - r.lambda[n]);
    if (live || rows.n < L || r.idle) {
      for (; j + 4 <= keys; j += 4) some(j, Constant<4>(), Constant<true>());
      for (; j < keys; ++j) some(j, Constant<1>(), Constant<true>());
    } else {
      for (; j + 4 <= keys; j += 4) some(j, Constant<4>(), Constant<false>());
      for (; j < keys; ++j) some(j, Constant<1>(), Constant<false>());
    }
  }
  if (p.dropout_key) weights = s.kept;

  if (sums_requested(p)) {
    using I = typename Simd<R>::I;
    for (int64_t j = 0; j < keys; ++j) {
      V key_g = {}, key_ds = {};
      R key_mass = 0;
      for (int n = 0; n < NV; ++n) {
        const int64_t at = j * L + n * N;
        const V g = load(s.u + at), ds = g * r.inverse_tau[n];
        r.sum_g[n] += g;
        if (p.row_gs) {
          const V w = load(s.x + at), score = w == 0 ? V{} : load(s.score + at);
          r.sum_gs[n] += g * score, r.sum_ps[n] += w * score;
        }
        if (p.row_gd) {
          const Mask<R> distance = (I)(first + j) - rows.position[n];
          const V away = __builtin_convertvector(distance < 0 ? -distance : distance, V);
          r.sum_gd[n] += g * away, r.sum_pd[n] += load(s.x + at) * away;
        }
        key_g += g, key_ds += ds;
        for (int i = 0; i < N && p.key_mass && n * N + i < rows.n; ++i) key_mass += s.x[at + i];
        for (int i = 0; i < N && (p.dense_g || p.dense_ds) && n * N + i < rows.n; ++i) {
          const int row = n * N + i;
          if (p.dense_g) ((R *)p.dense_g.data)[rows.at(p.dense_g, row) + (first + j) * p.dense_g.s3] += g[i];
          if (p.dense_ds) ((R *)p.dense_ds.data)[rows.at(p.dense_ds, row) + (first + j) * p.dense_ds.s3] += ds[i];
        }
      }
      const int64_t at = (rows.b * p.H + rows.head[0]) * p.Tk + first + j;
      if (p.key_g) ((R *)p.key_g)[at] += sum_of_lanes<R>(key_g);
      if (p.key_ds) ((R *)p.key_ds)[at] += sum_of_lanes<R>(key_ds);
      if (p.key_mass) ((R *)p.key_mass)[at] += key_mass;
    }
  }

  if (PriorGradients(p).some) add_prior_gradients(p, rows, r.chunk, first, keys, s.u);
  if (terms.density) clear_silent_keys(p, r, first, keys, s);

  if constexpr (!PAIRED<T>)
    if (p.dv && p.grad_out) scatter<R, L>(weights, r.d_out, padded<R>(p.Dv), keys, dv);
  if (terms.capped && (p.dq || p.dk))
    for (int64_t at = 0; at < keys * L; at += N) store(s.u + at, load(s.u + at) * load(s.slope + at));
  if (live && terms.capped && (p.dq || p.dk))
    for (int64_t at = 0; at < keys * L; at += N) store(s.u + at, load(s.x + at) == 0 ? V{} : load(s.u + at));
  if constexpr (PAIRED<T>) {
    add_pair_products(p, r, keys, live, weights, dk, dv, s);
  } else {
    if (p.dk) scatter<R, L>(s.u, r.q, padded<R>(p.D), keys, dk);
    if (p.dq)
      for_each_live_run(live, keys, [&](int64_t from, int64_t to) {
        gather<R, NV>(s.u + from * L, k + from * k_stride, k_stride, to - from, p.D, r.dqt);
      });
  }
}

}  // namespace
