// From the running sums of a row to its output, dual and statistics.
#pragma once
#include "engine/rows.h"
#include "engine/transpose.h"
#include "kl/running_sums.h"

namespace {

// The definitions of statistics.py in closed form, one vector of rows at a time.
template <class R, int NV>
void write_results(const Problem &p, const Terms &terms, const Rows<R, NV> &rows, const RunningSums<R, NV> &sums,
                   const R *ot) {
  using V = Vec<R>;
  using M = Mask<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  const auto exp2 = [](V x) { return map_lanes(x, [](R t) { return exp2_of(t); }); };
  const auto log2 = [](V x) { return map_lanes(x, [](R t) { return log2_of(t); }); };
  R share[L];
  const R mass = (R)p.mass, log_mass = (R)::log2(p.mass);
  const bool sink = p.marginal == regard::SINK, narrow = sizeof(R) == 4;
  const V zero = {}, nothing = broadcast(-INF<R>);
  for (int n = 0; n * N < rows.n; ++n) {
    const int lanes = min_of(N, rows.n - n * N);
    int64_t at[N];
    for (int i = 0; i < lanes; ++i) at[i] = rows.flat(p, n * N + i);
    const auto put = [&](int64_t to, V value) {
      if (to)
        for (int i = 0; i < lanes; ++i) ((R *)to)[at[i]] = value[i];
    };
    const V m = sums.m[n], l = sums.l[n], c = rows.c[n];
    const V tau = load(rows.temperature + n * N), level = load(rows.level + n * N);
    // A row is invalid if a weight is NaN (the largest x need not show that), or if all of its scores are -inf: 0/0.
    M invalid = l != l;
    if (const M lowest = (m <= LOWEST<R>)&(l > 0); (p.marginal == regard::ROWS || narrow) && any(lowest))
      for (int i = 0; i < lanes; ++i)  // a score at the lowest number comes from a float mask, or exceeds the range
        if (lowest[i] && (m[i] == -INF<R> || (narrow && !terms.bias) || !rows.finite(p.query, p.D, n * N + i)))
          invalid[i] = -1;
    const V null_x = sink ? level * c : nothing;
    if (sink && narrow) invalid |= ((null_x == INF<R>) | (null_x == -INF<R>)) & (level - level == (R)0);
    // Few rows are added in another order than in the passes that may follow (partition.h).
    if (NV == 1 && narrow && p.peak && !terms.bias) invalid |= (m > (R)0x1p18) | ((m < (R)-0x1p18) & (m > -INF<R>));
    if (any(invalid)) report_beyond<R>(p);
    const V nan = broadcast(NOT_A_NUMBER<R>);
    const M keys = (m > -INF<R>) | invalid;
    // The distribution 2^(x - top) / total, the null key included.
    const V top = invalid ? nan : m > null_x ? m : null_x;
    const V real = keys ? (sink ? exp2(m - top) : (R)1 + (m - top)) : zero;  // without a sink: 1, or NaN
    const V null = sink ? exp2(null_x - top) : zero;
    const V total = l * real + null, log_total = log2(total);
    const M some = sink ? ~M{} : keys;
    const V lse = some ? (R)LN2 * (top + log_total) : nothing;
    const V part = some ? real / total : zero;  // the probability of a key, per weight
    const V null_part = sink ? null / total : zero;
    // The plan: p = weight * factor.
    V factor = part * mass, dual = some ? tau * lse : nothing, value = dual;
    if (p.marginal == regard::ROWS && p.mass != 1) {
      dual -= tau * ((R)LN2 * log_mass);
      value = dual * mass;
    }
    // The two parts of the dual. Their sum would lose log_total where all x are near the lowest number.
    V peak = some ? top : nothing, rest = log_total;
    if (p.marginal == regard::ROWS) rest -= log_mass;
    V prior_mass = sums.count[n], log_prior_mass = p.kl ? log2(prior_mass) : zero;
    if (terms.prior && (p.kl || p.free_energy)) {
      log_prior_mass = keys ? sums.prior_top[n] + log2(sums.prior_sum[n]) : nothing;
      prior_mass = keys ? exp2(log_prior_mass) : zero;
    }
    if (p.marginal == regard::RELAX) {
      rest = (top + log_total) * (level / (tau + level)) - top;
      dual = dual * (level / (tau + level));
      const V sent = keys ? exp2(dual / level * (R)LOG2E) : zero;
      factor = part * sent;
      value = (tau + level) * sent - tau * prior_mass - level;
    } else if (p.marginal == regard::FREE) {
      dual = -level, peak = invalid ? nan : zero, rest = invalid ? nan : -level * c;
      factor = invalid ? nan : keys ? exp2(m + level * c) : zero;
      value = tau * (factor * l - prior_mass);
    }
    store(share + n * N, factor);
    put(p.lse, lse), put(p.dual, dual), put(p.peak, peak), put(p.rest, rest), put(p.free_energy, value);
    if (p.entropy || p.kl || p.score_variance || p.cost) {
      const V shift = keys ? m - top : zero, null_shift = sink ? null_x - top : zero;
      const V e1 = sums.e1[n], e2 = sums.e2[n], y1 = sums.y1[n], y2 = sums.y2[n], anchor = sums.anchor[n];
      const V mean = part * (e1 + shift * l) + null_part * null_shift;
      const V entropy = some ? (R)LN2 * (log_total - mean) : zero;
      put(p.entropy, entropy < (R)0 ? zero : entropy);
      if (p.kl) {
        const V log_prior = terms.prior ? (keys ? part * (l * (m - c * anchor) + e1 - c * y1) : zero) : zero;
        if (sink) log_prior_mass = log2(exp2(log_prior_mass) + (R)1);
        const V kl = some ? (R)LN2 * (log_prior_mass - log_prior) - entropy : zero;
        put(p.kl, kl < (R)0 ? zero : kl);
      }
      if (p.score_variance) {
        V variance;
        if (terms.prior) {
          const V away = sink ? (keys ? level - anchor : zero) : zero;
          // Within the keys, and between them and the null key: squares around the anchor, which is a key, would lose
          // all digits where a far null key has the mass.
          const V mean_y = keys ? y1 / l : zero, within = keys ? y2 / l - mean_y * mean_y : zero, sent = part * l;
          const V gap = away - mean_y;
          variance = sent * ((within < (R)0 ? zero : within) + null_part * gap * gap) / (tau * tau);
        } else {
          const V square = part * (e2 + shift * ((R)2 * e1 + shift * l)) + null_part * null_shift * null_shift;
          variance = (R)(LN2 * LN2) * (square - mean * mean);
        }
        put(p.score_variance, some & ~(variance < (R)0) ? variance : zero);
      }
      if (p.cost) {
        const V sum = terms.prior ? anchor * l + y1 : (m * l + e1) / c;
        put(p.cost, keys ? -factor * sum : zero);
      }
    }
    const V high = sums.high[n];
    put(p.max_scores, invalid ? nan : terms.prior ? sums.top[n] : keys ? high / c : nothing);
    if (p.max_weight) {
      const V weight = keys ? factor * exp2(high - m) : factor;  // vmax keeps a NaN weight
      put(p.max_weight, vmax(null_part, weight));
    }
    put(p.collision, factor * factor * sums.collision[n] + null_part * null_part);
    put(p.support, invalid ? nan : sums.count[n]);
    if (p.first_key_mass) put(p.first_key_mass, keys ? factor * exp2(sums.first[n] - m) : zero);
    put(p.mass_sent, factor * l);
    put(p.spread, factor * sums.spread[n]);
  }
  if (p.out) {
    R *out[L];
    for (int i = 0; i < rows.n; ++i) out[i] = (R *)p.out + rows.flat(p, i) * p.Dv;
    if (NV > 1) return to_rows(ot, L, share, rows.n, p.Dv, out);
    for (int i = 0; i < rows.n; ++i)
      for (int64_t d = 0; d < p.Dv; ++d) out[i][d] = ot[i * p.Dv + d] * share[i];
  }
}

}  // namespace
