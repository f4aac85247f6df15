// The keys that have weight, saved by a block of rows for the backward pass, row by row and in increasing order.
//
// Where few keys have weight, the backward pass then needs no Q K^T of all keys. The L rows of a block share their part
// of a tensor [B, H, Tq, some] as one buffer:
//   1 integer        L and flags; 0 if nothing was saved, because there were no lists or they did not fit
//   L + 1 integers   where the list of each row begins, and where the last one ends
//   keys             in 16 bits where that is enough for all keys, else in 32
//   x                of each key, if there is room; otherwise it is computed again (`chains` in tiles.h)
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
  const int64_t bytes;  // room for keys and x

  static constexpr int64_t HEAD = L + 2;
  static constexpr int32_t WITH_X = 256, PREFILTERED = 512;  // PREFILTERED is for tests only
  template <class Rows>
  SparseRows(const Problem &p, const Tensor &t, const Rows &rows)
      : at((int32_t *)((R *)t.data + rows.at(t, 0))),
        wide(p.Tk > 65536),
        bytes(rows.n * t.s2 * (int64_t)sizeof(R) - HEAD * 4) {}

  int64_t room(bool with_x) const {  // how many keys fit
    const int64_t key = wide ? 4 : 2;
    return with_x ? (bytes - 8) / (key + (int64_t)sizeof(R)) : bytes / key;
  }
  bool some() const { return bytes > 0 && (at[0] & 255) == L; }
  bool with_x() const { return at[0] & WITH_X; }
  int32_t *ends() const { return at + 1; }  // the list of row i is at ends()[i] ... ends()[i + 1] - 1
  void put(int64_t i, int64_t key) const {
    if (wide)
      at[HEAD + i] = (int32_t)key;
    else
      ((uint16_t *)(at + HEAD))[i] = (uint16_t)key;
  }
  SparseKeys keys() const { return {at + HEAD, wide}; }
  R *x() const {  // behind the keys, aligned
    const int64_t end = HEAD * 4 + room(true) * (wide ? 4 : 2);
    return (R *)((char *)at + (end + 7) / 8 * 8);
  }
};

}  // namespace
