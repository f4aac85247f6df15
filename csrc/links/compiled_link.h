// What a link that was compiled from a user's formulas exports, and the loop around its formulas.
//
// The engine calls such a link through the addresses in the record, for a block of pairs at a time. The generated source
// (src/regard/backends/native/links.py) includes this file and gives the formulas as a struct:
//   LOWER, UPPER   link counts as 0 at and below LOWER, and as inf at and above UPPER
//   CEILING        the supremum of link, or inf; it is reached where t is FULL or more
//   link           t and the parameters -> g(t) and g'(t)
//   divergence     the ratio p/pi and the parameters -> f
//   derivatives    t and the parameters -> dg/d(parameter) of each
#pragma once
#include "engine/vector_math.h"

namespace regard {

// rows x vectors of x, each row `stride` numbers after the one before; t = x - anchor + h. anchor, h and parameters have
// one number per lane of a row; `parameter_stride` is between two parameters. Results are `out_stride` apart from row to
// row, and `plane` apart from parameter to parameter.
template <class R> struct LinkBlock {
  int64_t rows, vectors, stride, out_stride, plane, parameter_stride;
  const R *x, *anchor, *h, *parameters;
  R *first, *second;  // g and g'; or f; or the derivatives
};

template <class R> using LinkFunction = void (*)(const LinkBlock<R> *);

}  // namespace regard

namespace {

template <class R>
constexpr R FULL = sizeof(R) == 4 ? (R)1e37 : (R)1e300;  // t of rows whose keys are all at the ceiling

// For each vector of a block: f(place of the result, t or ratio, parameters).
template <class R, int P, bool SHIFTED, class F> INLINE void each_vector(const regard::LinkBlock<R> &b, F f) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N;
  for (int64_t n = 0; n < b.vectors; ++n) {
    V parameters[P ? P : 1], anchor = {}, h = {};
    for (int m = 0; m < P; ++m) parameters[m] = load(b.parameters + m * b.parameter_stride + n * N);
    if (SHIFTED) anchor = load(b.anchor + n * N), h = load(b.h + n * N);
    for (int64_t j = 0; j < b.rows; ++j) {
      V x = load(b.x + j * b.stride + n * N);
      if (SHIFTED) x = x - anchor + h;
      f(j * b.out_stride + n * N, x, parameters);
    }
  }
}

// The functions that a generated library exports.
template <class R, class Formulas> INLINE void link_of(const regard::LinkBlock<R> &b) {
  using V = Vec<R>;
  each_vector<R, Formulas::PARAMETERS, true>(
      b, [&](int64_t to, V t, const V *parameters) __attribute__((always_inline)) {
        V g, slope;
        Formulas::link(t, parameters, g, slope);
        const V none = t != t ? t : V{};  // NaN stays
        if (Formulas::UPPER < INF<double>) {
          const Mask<R> above = t >= (R)Formulas::UPPER;
          g = above ? broadcast(INF<R>) : g, slope = above ? V{} : slope;
        }
        if (Formulas::CEILING < INF<double>) {
          const Mask<R> full = t >= FULL<R>;
          g = full ? broadcast((R)Formulas::CEILING) : g, slope = full ? V{} : slope;
        }
        const Mask<R> inside = t > (R)Formulas::LOWER;  // not at -inf: a masked key
        store(b.first + to, inside ? g : none), store(b.second + to, inside ? slope : none);
      });
}
template <class R, class Formulas> INLINE void divergence_of(const regard::LinkBlock<R> &b) {
  using V = Vec<R>;
  each_vector<R, Formulas::PARAMETERS, false>(
      b, [&](int64_t to, V ratio, const V *parameters) __attribute__((always_inline)) {
        V value;
        Formulas::divergence(ratio, parameters, value);
        store(b.first + to, value);
      });
}
template <class R, class Formulas> INLINE void derivatives_of(const regard::LinkBlock<R> &b) {
  using V = Vec<R>;
  constexpr int P = Formulas::PARAMETERS;
  each_vector<R, P, true>(b, [&](int64_t to, V t, const V *parameters) __attribute__((always_inline)) {
    V by[P ? P : 1];
    Formulas::derivatives(t, parameters, by);
    Mask<R> inside = t > (R)Formulas::LOWER;
    if (Formulas::UPPER < INF<double>) inside &= t < (R)Formulas::UPPER;
    if (Formulas::CEILING < INF<double>) inside &= t < FULL<R>;
    for (int m = 0; m < P; ++m) store(b.first + m * b.plane + to, inside ? by[m] : t != t ? t : V{});
  });
}

}  // namespace
