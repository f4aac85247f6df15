// What a block of rows keeps for the backward pass where few keys have weight: each row's keys, in order, and their x.
// Then backward needs no Q K^T. The block's rows share their room in a [B, H, Tq, some]: L, where each row's list begins and
// the last one ends (L + 1 numbers), the keys, their x. 0 instead of L: nothing was kept, there were too many or no lists.
#pragma once
#include "rows.h"

namespace {

template <class R, int L> struct Lists {
  R *const at;
  const int64_t room;  // pairs

  static constexpr int64_t HEAD = L + 2, MOST_KEYS = (int64_t)1 << 24;  // a float is exact up to there
  template <class Rows>
  Lists(const Tensor &t, const Rows &rows) : at((R *)t.data + rows.at(t, 0)), room((rows.n * t.s2 - HEAD) / 2) {}

  bool some() const { return room > 0 && at[0] == (R)L; }
  R *ends() const { return at + 1; }  // list i is ends()[i] ... ends()[i + 1] - 1
  R *keys() const { return at + HEAD; }
  R *x() const { return at + HEAD + room; }
};

}  // namespace
