// What a block of rows keeps for the backward pass where few keys have weight: which, row by row and in order. Then backward
// needs no Q K^T of all keys. The block's rows share their room in a [B, H, Tq, some]: L and flags, where each row's list
// begins and the last one ends (L + 1 integers), the keys, in 16 bits if that is enough, and x where there is room: else it
// is made again (`chains`). 0 instead of L: nothing was kept, there were too many or no lists.
#pragma once
#include "engine/rows.h"

namespace {

struct SparseKeys {
  const void *at = nullptr;
  bool wide;

  int64_t operator[](int64_t i) const { return wide ? ((const int32_t *)at)[i] : ((const uint16_t *)at)[i]; }
  explicit operator bool() const { return at; }
};

template <class R, int L> struct SparseRows {
  int32_t *const at;
  const bool wide;
  const int64_t bytes;  // for keys and x

  static constexpr int64_t HEAD = L + 2;
  static constexpr int32_t WITH_X = 256, PREFILTERED = 512;  // PREFILTERED: tests want to know
  template <class Rows>
  SparseRows(const Problem &p, const Tensor &t, const Rows &rows)
      : at((int32_t *)((R *)t.data + rows.at(t, 0))),
        wide(p.Tk > 65536),
        bytes(rows.n * t.s2 * (int64_t)sizeof(R) - HEAD * 4) {}

  int64_t room(bool with_x) const {  // keys
    const int64_t key = wide ? 4 : 2;
    return with_x ? (bytes - 8) / (key + (int64_t)sizeof(R)) : bytes / key;
  }
  bool some() const { return bytes > 0 && (at[0] & 255) == L; }
  bool with_x() const { return at[0] & WITH_X; }
  int32_t *ends() const { return at + 1; }  // list i is ends()[i] ... ends()[i + 1] - 1
  void put(int64_t i, int64_t key) const {
    if (wide)
      at[HEAD + i] = (int32_t)key;
    else
      ((uint16_t *)(at + HEAD))[i] = (uint16_t)key;
  }
  SparseKeys keys() const { return {at + HEAD, wide}; }
  R *x() const {  // behind the keys, where a number may lie
    const int64_t end = HEAD * 4 + room(true) * (wide ? 4 : 2);
    return (R *)((char *)at + (end + 7) / 8 * 8);
  }
};

}  // namespace
