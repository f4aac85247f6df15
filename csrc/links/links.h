// Regularisers other than KL, each by its link: p = pi g(t), w = pi g'(t), t = (s - lambda)/tau.
//
// Tsallis: g(t) = y^beta with y = (alpha - 1) t where positive, beta = 1/(alpha - 1), and g'(t) = y^(beta - 1). The
// kernels work in x = (alpha - 1) s/tau, measured from the row's anchor, and with the row's headroom h: y = x + h + ORIGIN.
// ORIGIN is 1 near alpha = 1, where y is all but 1 and what counts is its distance from 1.
// Fermi-Dirac: g is the sigmoid; x = log2(e) s/tau, and x + h is t in base 2.
#pragma once
#include "engine/rows.h"
#include "engine/vector_math.h"

namespace {

// Each link: `at` gives p and w (without the prior) at x + h; `of_row` has one row in all lanes. Those whose price is to be
// found (PRICED) have also `rise`, Newton's step in h that brings taken = r * mass to the mass, times slope/mass, in the
// power of the mass in which the equation is straight (theory: the norm form); `headroom`, the h at which one key takes the
// mass; beta; and `inside`, whether a key has weight (which may be too small for a number). CONVEX: a step from above stays
// above.
// Where all of a row's priors are tiny, y is large: y meets one root of the prior before it meets the other, and a prior
// itself may be smaller than the smallest number.
template <class R> struct Sparsemax {  // alpha = 2
  using V = Vec<R>;
  static constexpr bool PRICED = true, CONVEX = true;
  static constexpr R ORIGIN = 0;
  template <int NV> Sparsemax(const Rows<R, NV> &) {}
  INLINE Sparsemax of_row(int, int) const { return *this; }
  INLINE Mask<R> has_weight(V d) const { return d > 0; }
  INLINE void at(int, V d, V &p, V &w) const { p = vmax(V{}, d), w = d > 0 ? broadcast((R)1) : p; }  // p: 0 or NaN
  INLINE void times_prior(int n, V d, V log_prior, V &p, V &w) const {
    const V root = root_of(log_prior);
    at(n, d, p, w);
    p = p * root * root, w = d <= 0 ? V{} : w * root * root;
  }
  INLINE V newton_step(int, V r) const { return (R)1 - r; }
  INLINE V headroom(int, V mass) const { return mass; }  // y where p = mass
  INLINE V beta(int) const { return broadcast((R)1); }
};

template <class R> struct Entmax {  // alpha = 1.5
  using V = Vec<R>;
  static constexpr bool PRICED = true, CONVEX = true;
  static constexpr R ORIGIN = 0;
  template <int NV> Entmax(const Rows<R, NV> &) {}
  INLINE Entmax of_row(int, int) const { return *this; }
  INLINE Mask<R> has_weight(V d) const { return d > 0; }
  INLINE void at(int, V d, V &p, V &w) const { w = vmax(V{}, d), p = w * w; }
  INLINE void times_prior(int, V d, V log_prior, V &p, V &w) const {
    const V root = root_of(log_prior), part = vmax(V{}, d) * root;  // p = part^2
    p = d <= 0 ? V{} : part * part, w = d <= 0 ? V{} : part * root;
  }
  INLINE V newton_step(int, V r) const {
    const V f = vsqrt(r);
    return ((R)1 - f) * f;
  }
  INLINE V headroom(int, V mass) const { return vsqrt(mass); }
  INLINE V beta(int) const { return broadcast((R)2); }
};

// Any alpha; its value may differ from row to row.
template <class R, int FROM> struct Power {
  using V = Vec<R>;
  static constexpr bool PRICED = true, CONVEX = false;
  static constexpr R ORIGIN = FROM;
  V beta_[3], inverse[3];
  template <int NV> Power(const Rows<R, NV> &rows) {
    for (int n = 0; n < NV; ++n)
      for (int i = 0; i < Simd<R>::N; ++i)
        inverse[n][i] = rows.power[n * Simd<R>::N + i], beta_[n][i] = 1 / inverse[n][i];
  }
  INLINE Power of_row(int n, int lane) const {
    Power one = *this;
    one.beta_[n] = broadcast((R)beta_[n][lane]), one.inverse[n] = broadcast((R)inverse[n][lane]);
    return one;
  }
  INLINE Mask<R> has_weight(V d) const { return d > (ORIGIN ? (R)-1 + EPS<R> / 2 : TINY<R>); }
  INLINE V log2_y(V d, Mask<R> in) const {
    return (R)LOG2E * (ORIGIN ? vlog1p(in ? d : V{}) : vlog(in ? d : broadcast((R)1)));
  }
  INLINE void at(int n, V d, V &p, V &w) const { times_prior(n, d, V{}, p, w); }
  // In one exponential each: y^beta may be anything.
  INLINE void times_prior(int n, V d, V log_prior, V &p, V &w) const {
    const Mask<R> in = has_weight(d) & (log_prior > -INF<R>);
    const V log_y = log2_y(d, in), log_p = beta_[n] * log_y + log_prior;
    const V out = d != d ? d : V{};
    p = in ? exp2_bounded(log_p) : out;
    w = in ? exp2_bounded(log_p - log_y) : out;
  }
  INLINE V newton_step(int n, V r) const {
    const V e = inverse[n] * vlog(vmax(broadcast(TINY<R>), r)), f = exp2_bounded((R)LOG2E * e);
    const V series = e * ((R)1 + e * (R)0.5 * ((R)1 + e * (R)(1.0 / 3) * ((R)1 + e * (R)0.25 * ((R)1 + e * (R)0.2))));
    const V f_less_1 = ((e < (R)1e-2) & (e > (R)-1e-2)) ? series : f - (R)1;  // f itself is too near 1 there
    return -f_less_1 * r / f;
  }
  INLINE V headroom(int n, V mass) const {
    const V y = exp2_bounded(inverse[n] * (R)LOG2E * vlog(mass));
    return ORIGIN ? y - (R)1 : y;
  }
  INLINE V beta(int n) const { return beta_[n]; }
};

template <class R> struct Sigmoid {  // with a free marginal only
  using V = Vec<R>;
  static constexpr bool PRICED = false;
  static constexpr R ORIGIN = 0;
  template <int NV> Sigmoid(const Rows<R, NV> &) {}
  INLINE Sigmoid of_row(int, int) const { return *this; }
  INLINE void at(int n, V t, V &p, V &w) const { times_prior(n, t, V{}, p, w); }
  INLINE void times_prior(int, V t, V log_prior, V &p, V &w) const {
    const V below = -vmax(V{}, -t), e = vexp2(below - vmax(V{}, t)), q = (R)1 / ((R)1 + e);  // e = 2^-|t|
    p = t == -INF<R> ? V{} : t != t ? t : exp2_bounded(below + log_prior) * q;
    w = p * (t > 0 ? e * q : q);
  }
};

// f(link type's tag) with the link that the call's alpha asks for.
template <class L> struct Tag {
  using Link = L;
};
template <class R, class F> void with_link(const Problem &p, F f) {
  if (p.family == regard::FERMI_DIRAC) return f(Tag<Sigmoid<R>>());
  if (!p.alpha && p.alpha_value == 2) return f(Tag<Sparsemax<R>>());
  if (!p.alpha && p.alpha_value == 1.5) return f(Tag<Entmax<R>>());
  return p.centred ? f(Tag<Power<R, 1>>()) : f(Tag<Power<R, 0>>());
}

}  // namespace
