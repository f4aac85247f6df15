// What the forward pass of KL sums over the keys of a row, and which of the sums a call needs.
//
// Weights are relative to 2^m. When m rises, all sums are rescaled (`raise`). Scores are relative to the anchor, the
// score of the heaviest key so far (`move_anchor`): differences from it lose no digits.
#pragma once
#include "engine/gate.h"
#include "engine/vector_math.h"

namespace {

struct RequestedStatistics {
  bool moments, collision, apart, prior_mass, count, first, spread, drop;
  RequestedStatistics(const Problem &p, const Terms &terms) {
    moments = p.entropy || p.score_variance || p.kl || p.cost;
    collision = p.collision, count = p.support || p.kl || p.free_energy;
    apart = terms.prior && (p.score_variance || p.kl || p.cost || p.max_scores);
    prior_mass = terms.prior && (p.kl || (p.free_energy && p.marginal >= regard::RELAX));
    first = p.first_key_mass, spread = p.spread, drop = (bool)p.dropout_key;
  }
};

// O <- r O, for vector n of a block of rows.
template <class R, int NV> INLINE void rescale(R *o, int64_t Dv, int n, Vec<R> r) {
  constexpr int N = Simd<R>::N, L = N * NV;
  if (NV == 1)
    for (int i = 0; i < L; ++i)
      for (int64_t d = 0; d < Dv; ++d) o[i * Dv + d] *= r[i];
  else
    for (int64_t d = 0; d < Dv; ++d) store(o + d * L + n * N, r * load(o + d * L + n * N));
}

// The sums of a block of rows.
template <class R, int NV> struct RunningSums {
  using V = Vec<R>;
  V m[NV], high[NV];        // the reference, at most SLACK below the largest x; the largest x
  V l[NV], e1[NV], e2[NV];  // sums of p, p t, p t^2 with t = x - m
  V used[NV];               // the sum of p as rounded for the product with values, where it is (bf16_tiles.h)
  V collision[NV], count[NV], first[NV], spread[NV];
  V top[NV], anchor[NV], y1[NV], y2[NV];  // max s; sums of p (s - anchor), p (s - anchor)^2
  V prior_top[NV], prior_sum[NV];         // the mass of the prior is prior_sum 2^prior_top

  void clear() {
    memset((void *)this, 0, sizeof *this);
    for (int n = 0; n < NV; ++n) m[n] = high[n] = top[n] = first[n] = prior_top[n] = broadcast(-INF<R>);
  }

  static V difference(V a, V b) {  // a - b for exponents a <= b; bounded, never NaN
    return a == -INF<R> ? V{} : vmax(broadcast((R)-1000), a - b);
  }

  // Rescale all sums to a larger reference. Returns the factor.
  V raise(int n, V to) {
    const V safe = to == -INF<R> ? V{} : to, r = vexp2(m[n] - safe), shift = difference(m[n], safe);
    e2[n] = r * (e2[n] + shift * ((R)2 * e1[n] + shift * l[n]));
    e1[n] = r * (e1[n] + shift * l[n]);
    l[n] *= r, used[n] *= r, y1[n] *= r, y2[n] *= r, spread[n] *= r, collision[n] *= r * r;
    m[n] = to;
    return r;
  }
  void move_anchor(int n, V to) {
    const V shift = anchor[n] - to;
    y2[n] += shift * ((R)2 * y1[n] + shift * l[n]);
    y1[n] += shift * l[n];
    anchor[n] = to;
  }
  V raise_prior(int n, V to) {
    const V safe = to == -INF<R> ? V{} : to, r = vexp2(prior_top[n] - safe);
    prior_sum[n] *= r;
    prior_top[n] = to;
    return safe;
  }

  // Add the sums over another part of the keys of the same rows.
  void merge(RunningSums &other, R *ot, R *other_ot, int64_t Dv) {
    constexpr int L = Simd<R>::N * NV;
    for (int n = 0; n < NV; ++n) {
      const V to = vmax(m[n], other.m[n]);
      const V heavier = m[n] >= other.m[n] ? anchor[n] : other.anchor[n];
      move_anchor(n, heavier), other.move_anchor(n, heavier);
      const V r = raise(n, to), q = other.raise(n, to);
      rescale<R, NV>(ot, Dv, n, r), rescale<R, NV>(other_ot, Dv, n, q);
      l[n] += other.l[n], used[n] += other.used[n], e1[n] += other.e1[n], e2[n] += other.e2[n];
      collision[n] += other.collision[n], count[n] += other.count[n], spread[n] += other.spread[n];
      y1[n] += other.y1[n], y2[n] += other.y2[n];
      first[n] = vmax(first[n], other.first[n]), top[n] = vmax(top[n], other.top[n]);
      high[n] = vmax(high[n], other.high[n]);
      const V prior = vmax(prior_top[n], other.prior_top[n]);
      raise_prior(n, prior), other.raise_prior(n, prior);
      prior_sum[n] += other.prior_sum[n];
    }
    for (int64_t at = 0; at < L * Dv; ++at) ot[at] += other_ot[at];
  }
};

}  // namespace
