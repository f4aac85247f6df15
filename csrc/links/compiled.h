// A link that was compiled from a user's formulas (compiled_link.h), in the form of links.h: x = s/tau, and d = t.
#pragma once
#include "engine/rows.h"
#include "links/compiled_link.h"

namespace {

template <class R> struct Compiled {
  using V = Vec<R>;
  static constexpr int N = Simd<R>::N, P = regard::LINK_PARAMETERS;
  static constexpr bool PRICED = true, CONVEX = false, COMPILED = true;
  const regard::LinkFunction<R> link, divergence, derivatives;
  const R lower, upper, ceiling;
  const int64_t lanes;
  R parameters[P * 3 * N];  // [P][lanes]

  template <int NV>
  Compiled(const Problem &p, const Rows<R, NV> &rows)
      : link((regard::LinkFunction<R>)p.link),
        divergence((regard::LinkFunction<R>)p.link_divergence),
        derivatives((regard::LinkFunction<R>)p.link_derivatives),
        lower((R)p.link_lower),
        upper((R)p.link_upper),
        ceiling((R)p.link_ceiling),
        lanes(N * NV) {
    for (int64_t m = 0; m < p.link_parameters; ++m)
      memcpy(parameters + m * lanes, rows.parameters[m], lanes * sizeof(R));
  }
  INLINE Compiled of_row(int n, int lane) const {
    Compiled one = *this;
    for (int m = 0; m < P; ++m)
      for (int i = 0; i < N; ++i) one.parameters[m * lanes + n * N + i] = parameters[m * lanes + n * N + lane];
    return one;
  }
  // A block of `rows` rows, `stride` numbers apart, of the vectors from n on.
  regard::LinkBlock<R> block(int n, int64_t rows, int64_t vectors, const R *x, int64_t stride, const V *anchor,
                             const V *h, R *first, R *second) const {
    return {rows,
            vectors,
            stride,
            vectors * N,
            rows * vectors * N,
            lanes,
            x,
            (const R *)anchor,
            (const R *)h,
            parameters + n * N,
            first,
            second};
  }
  void at(int n, V d, V &p, V &w) const {
    const V none = {};
    R x[N], g[N], slope[N];
    store(x, d);
    const auto one = block(n, 1, 1, x, N, &none, &none, g, slope);
    link(&one);
    p = load(g), w = load(slope);
  }
  static INLINE void multiply_prior(V log_prior, V &p, V &w) {
    const V root = root_of(log_prior);  // twice: the prior itself may be too small for a number
    p = p == 0 ? p : p * root * root, w = w == 0 ? w : w * root * root;
  }
  void times_prior(int n, V d, V log_prior, V &p, V &w) const {
    at(n, d, p, w);
    multiply_prior(log_prior, p, w);
  }
  V divergence_at(int n, V ratio) const {
    R x[N], f[N];
    store(x, ratio);
    const auto one = block(n, 1, 1, x, N, nullptr, nullptr, f, nullptr);
    divergence(&one);
    return load(f);
  }
  INLINE V beta(int) const { return broadcast((R)1); }

  // Some t inside of the range.
  R inside() const {
    const R point = max_of((R)0, lower + 1);
    if (point < upper) return point;
    return lower < upper - 1 ? upper - 1 : (lower + upper) / 2;
  }

  // Some t at which the link is at least `mass`, and not much more: the h at which one key alone has the mass. INF where
  // the link does not reach it.
  V headroom(int n, V mass) const {
    if (!any((Mask<R>)(mass < ceiling))) return broadcast(INF<R>);
    constexpr int STEPS = sizeof(R) == 4 ? 64 : 520;  // up to FULL
    V high = broadcast(inside()), low = high, width = broadcast((R)1), g, w;
    for (int step = 0; step < STEPS; ++step, width *= (R)4) {
      at(n, high, g, w);
      const Mask<R> short_of = (g < mass) & (high < FULL<R>);
      if (!any(short_of)) break;
      low = short_of ? high : low;
      const V up = high + width;
      high = short_of ? (up < upper ? up : broadcast(upper)) : high;
    }
    const Mask<R> never = ~(g >= mass);
    width = broadcast((R)1);
    for (int step = 0; step < STEPS; ++step, width *= (R)4) {
      at(n, low, g, w);
      const Mask<R> beyond = (g >= mass) & (low > lower) & (low > -FULL<R>)&~never;
      if (!any(beyond)) break;
      high = beyond ? low : high;
      const V down = low - width;
      low = beyond ? vmax(broadcast(lower), down) : low;
    }
    for (int step = 0; step < 12; ++step) {
      const V middle = low * (R)0.5 + high * (R)0.5;
      at(n, middle, g, w);
      const Mask<R> enough = g >= mass;
      high = enough ? middle : high, low = enough ? low : middle;
    }
    return never ? broadcast(INF<R>) : high;
  }

  // The power of the mass in which the equation is nearly linear around t: 1 - g g''/g'^2, which is 1/beta for t^beta
  // and 0 (the logarithm) for exp. It affects the number of steps only.
  V power_at(int n, V t) const {
    const V room = vmin(broadcast((R)1), vmin(t - lower, upper - t)), by = (R)0.03125 * room;
    V g, w, before, after, unused;
    at(n, t, g, w), at(n, t - by, unused, before), at(n, t + by, unused, after);
    const V power = (R)1 - g * (after - before) / ((R)2 * by * w * w);
    return power == power ? vmax(broadcast((R)-1), vmin(broadcast((R)1), power)) : V{};
  }
  static INLINE V vmin(V a, V b) { return -vmax(-a, -b); }
};

// g and g' of a panel's rows, evaluated at once by a compiled link. Links of the engine itself are evaluated in place.
template <class R, class Link, int ROWS, int VECTORS> struct Evaluated {
  void fill(const Link &, int, int64_t, const R *, int64_t, const Vec<R> *, const Vec<R> *) {}
  template <bool PRIOR>
  INLINE void get(const Link &link, int64_t, int n, int, Vec<R> d, const R *prior, Vec<R> &p, Vec<R> &w) const {
    if (PRIOR)
      link.times_prior(n, d, load(prior), p, w);
    else
      link.at(n, d, p, w);
  }
};
template <class R, int ROWS, int VECTORS> struct Evaluated<R, Compiled<R>, ROWS, VECTORS> {
  static constexpr int N = Simd<R>::N;
  alignas(64) R g[ROWS * VECTORS * N], slope[ROWS * VECTORS * N];
  // `rows` rows, `stride` numbers apart; vectors n ... n + VECTORS - 1.
  void fill(const Compiled<R> &link, int n, int64_t rows, const R *x, int64_t stride, const Vec<R> *anchor,
            const Vec<R> *h) {
    const auto block = link.block(n, rows, VECTORS, x, stride, anchor, h, g, slope);
    link.link(&block);
  }
  // p and w of vector `own` of row j, times the prior.
  template <bool PRIOR>
  INLINE void get(const Compiled<R> &link, int64_t j, int, int own, Vec<R>, const R *prior, Vec<R> &p,
                  Vec<R> &w) const {
    p = load(g + (j * VECTORS + own) * N), w = load(slope + (j * VECTORS + own) * N);
    if (PRIOR) link.multiply_prior(load(prior), p, w);
  }
};

}  // namespace
