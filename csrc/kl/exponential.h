// KL as a link (links/links.h): p = w = 2^d, where d is the distance of x from the dual in base 2. The prior is a part of
// x.
#pragma once
#include "engine/rows.h"
#include "engine/vector_math.h"

namespace {

template <class R> struct Exponential {
  using V = Vec<R>;
  static constexpr bool PRICED = false, COMPILED = false;  // the dual is in closed form
  static constexpr R ORIGIN = 0;
  template <int NV> Exponential(const Problem &, const Rows<R, NV> &) {}
  INLINE Exponential of_row(int, int) const { return *this; }
  INLINE void at(int, V d, V &p, V &w) const { p = w = exp2_bounded(d); }
  INLINE void times_prior(int n, V d, V, V &p, V &w) const { at(n, d, p, w); }
};

}  // namespace
