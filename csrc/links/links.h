// Regularizers other than KL, each given by its link g: p = pi g(t) and w = dp/dt = pi g'(t), with t = (s -
// lambda)/tau, where lambda is the price of the row.
//
// Tsallis: g(t) = y^beta with y = (alpha - 1) t where positive, else 0; beta = 1/(alpha - 1); g'(t) = y^(beta - 1). The
// kernels compute with x = (alpha - 1) s/tau relative to the anchor of the row and with its headroom h: y = x + h +
// ORIGIN. ORIGIN is 1 for alpha near 1 (`Problem::centred`), where y is close to 1 and its distance from 1 is what
// matters; else it is 0. Fermi-Dirac: g is the sigmoid; x = log2(e) s/tau, and x + h is t in base 2. Links of a user's
// own formulas are in compiled.h.
#pragma once
#include "engine/rows.h"
#include "engine/vector_math.h"
#include "links/compiled.h"

namespace {

// What a link has:
//   at           p and w, without the prior, at d = x + h
//   times_prior  the same times the prior, which is given as its logarithm in base 2
//   of_row       the link with the parameters of one row in all lanes
// Links whose price must be solved for (PRICED) also have:
//   newton_step  the step of Newton's method in h from mass r * target to the target, times slope/target; it is taken
//                on the power of the mass in which the equation is closest to linear
//   headroom     the h at which one key alone has the mass
//   beta         the exponent
//   has_weight   whether a key has weight, even one that is too small for a number
//   CONVEX       whether a step that begins above the solution stays above
// Where all priors of a row are tiny, y is large. So y is multiplied by one root of the prior and then by the other: a
// prior itself may be below the smallest number.
template <class R> struct Sparsemax {  // alpha = 2
  using V = Vec<R>;
  static constexpr bool PRICED = true, CONVEX = true, COMPILED = false;
  static constexpr R ORIGIN = 0;
  template <int NV> Sparsemax(const Problem &, const Rows<R, NV> &) {}
  INLINE Sparsemax of_row(int, int) const { return *this; }
  INLINE Mask<R> has_weight(V d) const { return d > 0; }
  INLINE void at(int, V d, V &p, V &w) const { p = vmax(V{}, d), w = d > 0 ? broadcast((R)1) : p; }  // p: 0, NaN
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
  static constexpr bool PRICED = true, CONVEX = true, COMPILED = false;
  static constexpr R ORIGIN = 0;
  template <int NV> Entmax(const Problem &, const Rows<R, NV> &) {}
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

// Any alpha, which may differ from row to row.
template <class R, int FROM> struct Power {
  using V = Vec<R>;
  static constexpr bool PRICED = true, CONVEX = false, COMPILED = false;
  static constexpr R ORIGIN = FROM;
  V beta_[3], inverse[3];
  template <int NV> Power(const Problem &, const Rows<R, NV> &rows) {
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
  // One exponential each, because y^beta alone may overflow.
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
    const V f_less_1 = ((e < (R)1e-2) & (e > (R)-1e-2)) ? series : f - (R)1;  // f itself is too close to 1 there
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
  static constexpr bool PRICED = false, COMPILED = false;
  static constexpr R ORIGIN = 0;
  template <int NV> Sigmoid(const Problem &, const Rows<R, NV> &) {}
  INLINE Sigmoid of_row(int, int) const { return *this; }
  INLINE void at(int n, V t, V &p, V &w) const { times_prior(n, t, V{}, p, w); }
  INLINE void times_prior(int, V t, V log_prior, V &p, V &w) const {
    const V below = -vmax(V{}, -t), e = vexp2(below - vmax(V{}, t)), q = (R)1 / ((R)1 + e);  // e = 2^-|t|
    p = t == -INF<R> ? V{} : t != t ? t : exp2_bounded(below + log_prior) * q;
    w = p * (t > 0 ? e * q : q);
  }
};

// What the x of a key must exceed for the key to have weight is anchor - h - origin: for compiled links, where t is
// `lower` (-inf: every key has weight).
template <class R, class Link> INLINE R origin_of(const Link &link) {
  if constexpr (Link::COMPILED)
    return -link.lower;
  else
    return Link::ORIGIN;
}
// The dual is (anchor - h - shift)/c.
template <class R, class Link> constexpr R dual_shift() {
  if constexpr (Link::COMPILED)
    return 0;
  else
    return Link::ORIGIN;
}

// Call f with the tag of the link that the call's alpha and family select.
template <class L> struct Tag {
  using Link = L;
};
template <class R, class F> void with_link(const Problem &p, F f) {
  if (p.family == regard::FERMI_DIRAC) return f(Tag<Sigmoid<R>>());
  if (p.family == regard::COMPILED) return f(Tag<Compiled<R>>());
  if (!p.alpha && p.alpha_value == 2) return f(Tag<Sparsemax<R>>());
  if (!p.alpha && p.alpha_value == 1.5) return f(Tag<Entmax<R>>());
  return p.centred ? f(Tag<Power<R, 1>>()) : f(Tag<Power<R, 0>>());
}

}  // namespace
