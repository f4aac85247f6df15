// From the sums of a row to its dual, statistics and the factors of its output.
#pragma once
#include "links/link_workspace.h"
#include "links/links.h"

namespace {

// The definitions of statistics.py, one row at a time. `read`: whether every row may read some key. share,
// baseline_share: the factors on the sums of p v and of w v.
template <class R, int NV, class Link>
void write_link_results(const Problem &p, const Terms &terms, const RequestedLinkStatistics &want,
                        const Rows<R, NV> &rows, const Link &link, const RowSums<R, NV> &sums, bool read, R *share,
                        R *baseline_share) {
  constexpr int N = Simd<R>::N;
  using V = Vec<R>;
  for (int i = 0; i < rows.n; ++i) {
    const int n = i / N, lane = i % N;
    const int64_t at = rows.flat(p, i);
    const R tau = rows.temperature[i], level = rows.level[i], c = rows.c[n][lane], alpha = rows.power[i] + 1;
    const R anchor = sums.anchor[n][lane], h = sums.h[n][lane], mass = sums.mass[n][lane];
    const bool free = p.marginal == regard::FREE, sink = p.marginal == regard::SINK;
    const bool relax = p.marginal == regard::RELAX;
    const R top = sums.top[n][lane];
    // Invalid: NaN among the weights, or no score above -inf (a float mask may bring it to the lowest number): 0/0.
    const bool narrow = sizeof(R) == 4;
    bool invalid = mass != mass || top != top || (narrow && top == INF<R>);
    if ((p.marginal == regard::ROWS || narrow) && top <= LOWEST<R>)
      invalid |= top == -INF<R> ? read : (narrow && !terms.bias) || !rows.finite(p.query, p.D, i);
    if (sink && narrow) invalid |= level - level == 0 && level * c - level * c != 0;
    if (invalid) report_beyond<R>(p);
    if (Link::COMPILED && !free && !sums.full[n][lane] && h > -INF<R>)
      invalid |= h >= FULL<R> || h <= -FULL<R>;  // no price gives the row its mass
    if (invalid) {
      const int64_t results[] = {p.dual,       p.peak,       p.rest,           p.mass_sent, p.entropy,
                                 p.tilt_log,   p.kl,         p.score_variance, p.cost,      p.free_energy,
                                 p.max_scores, p.max_weight, p.collision,      p.support,   p.first_key_mass,
                                 p.spread};
      share[i] = baseline_share[i] = NOT_A_NUMBER<R>;
      for (int64_t result : results) put(result, at, share[i]);
      if (free) put(p.dual, at, -level);  // the dual of a free row is given
      continue;
    }
    const bool prior_only = sums.prior_only[n][lane], keys = top > -INF<R>, full = sums.full[n][lane];
    const bool some = !full && (free || prior_only || h > -INF<R> || h != h);
    R null = 0, null_w = 0, null_x = 0;
    if (sink) {
      V p0, w0;
      null_x = level * c - anchor;
      link.at(n, broadcast(null_x + h), p0, w0);
      null = p0[lane], null_w = w0[lane];
    }
    const R prior_offset = sums.prior_offset[n][lane],
            y = prior_only ? exp2_of((sums.share[n][lane] - prior_offset) * rows.power[i]) : 0;
    const R dual = !some ? -INF<R> : free ? -level : prior_only ? -y / c : (anchor - h - dual_shift<R, Link>()) / c;
    // The rounding error of the price is distributed in proportion to the weights.
    const R all_mass = mass + null;
    R scale = (free || relax || full || !(all_mass > 0)) ? 1 : (R)p.mass / all_mass;
    share[i] = scale;
    put(p.dual, at, dual);
    put(p.peak, at,
        prior_only     ? INF<R>
        : some || full ? anchor
                       : -INF<R>),
        put(p.rest, at, prior_only ? (R)sums.share[n][lane] : h);
    put(p.mass_sent, at, mass * scale);
    R kappa = 0;
    if (relax && some) kappa = tau * exp_of(dual / level) / level;
    const R slope = sums.slope[n][lane] + null_w + kappa;
    baseline_share[i] = slope > TINY<R> ? 1 / slope : 0;  // the inverse of a smaller slope would overflow
    const R total = all_mass > 0 ? all_mass : 1;
    R entropy = 0;
    if (want.entropy && all_mass > 0) {
      const R most_p = (R)sums.heaviest[n][lane] > TINY<R> ? (R)sums.heaviest[n][lane] : 1;
      const R log_null = null > 0 ? log_of(null / most_p) : 0;
      entropy = log_of(total / most_p) - (sums.plog[n][lane] + null * log_null) / total;
      const R negative = -entropy;
      entropy = entropy < 0 ? 0 : entropy;
      put(p.entropy, at, entropy);
      if (want.baseline_log) {
        // With the mass that the backward pass uses, not the one that was summed: the two must cancel there.
        const R w_sum = sums.slope[n][lane] + null_w, sent = relax ? exp_of(-dual / level) : 1 / (R)p.mass;
        R sum = sums.wlog[n][lane] + null_w * log_null + (entropy + log_of(most_p * sent)) * w_sum;
        if (!(sent < INF<R>)) sum = 0;
        put(p.tilt_log, at, sum * baseline_share[i]);
      }
      if (p.kl) {
        R prior_mass = sums.admissible[n][lane], log_prior_mass = log_of(prior_mass);
        if (terms.prior)
          log_prior_mass = (R)LN2 * (sums.prior_top[n][lane] - prior_offset + log2_of(sums.prior_sum[n][lane]));
        if (sink) log_prior_mass = keys ? log_of(exp_of(log_prior_mass) + 1) : 0;
        const R kl = negative - (R)LN2 * sums.log_prior[n][lane] / total + log_prior_mass;
        put(p.kl, at, kl < 0 ? 0 : kl);
      }
    } else {
      put(p.entropy, at, (R)0), put(p.tilt_log, at, (R)0), put(p.kl, at, (R)0);
    }
    const R y1 = sums.y1[n][lane], reference = sums.reference[n][lane];
    if (p.score_variance) {
      // Within the keys, and between them and the null key, which may be far from the reference.
      const R mean = mass > 0 ? y1 / mass : 0, within = sums.y2[n][lane] - y1 * mean;
      const R gap = sink ? null_x - reference - mean : 0;
      const R variance = ((within < 0 ? 0 : within) + mass * null / total * gap * gap) / total;
      put(p.score_variance, at, all_mass > 0 ? variance / (c * c * tau * tau) : 0);
    }
    const R score_sum = mass > 0 ? scale * (y1 + (anchor + reference) * mass) / c : 0;  // of p s
    put(p.cost, at, -score_sum);
    if (p.free_energy) {
      R value;
      if (p.family == regard::FERMI_DIRAC) {
        value = tau * (R)LN2 * sums.soft[n][lane];
      } else if constexpr (Link::COMPILED) {
        value = tau * (R)sums.energy[n][lane];  // sum of p t - pi f(p/pi); rows without a dual: of -pi f(p/pi)
        if (sink)
          value += tau * ((null > 0 ? null * (null_x + h) : 0) - (R)link.divergence_at(n, broadcast(null))[lane]);
        if (relax) value += level * ((some ? exp_of(dual / level) : 0) - 1);
        if (full) value += score_sum;
        if (sink || (p.marginal == regard::ROWS && (some || (!full && p.link_ceiling == INF<double>))))
          value += (R)p.mass * dual;
      } else {
        R energy = sums.energy[n][lane];
        if (null > 0) energy += null * (null_x + h + dual_shift<R, Link>());
        value = tau / alpha * energy;  // the value of the dual problem, which hardly depends on the error of the price
        if (relax) value += level * ((some ? exp_of(dual / level) : 0) - 1);
        if (sink || p.marginal == regard::ROWS) value += (R)p.mass * dual;
        if (prior_only) value = -tau * (R)p.mass * y / (alpha * (alpha - 1));
      }
      put(p.free_energy, at, value);
    }
    put(p.max_scores, at, keys ? top / c : -INF<R>);
    put(p.max_weight, at, scale * max_of((R)sums.heaviest[n][lane], null));
    put(p.collision, at, scale * scale * (sums.collision[n][lane] + null * null));
    const bool all_keys = p.family == regard::FERMI_DIRAC || (Link::COMPILED && p.link_full_support);
    put(p.support, at, all_keys ? sums.admissible[n][lane] : sums.support[n][lane]);
    put(p.first_key_mass, at, scale * sums.first[n][lane]);
    put(p.spread, at, scale * sums.spread[n][lane]);
  }
}

}  // namespace
