// How the rows of a call are partitioned into units and blocks. This depends on the shape alone, never on the number of
// threads, so that every number of threads gives the same bits.
//
// A unit is one head of one batch entry. Where few queries share a key head (grouped queries while decoding), the unit
// is the key head instead, and its block has the rows of all query heads that read it: keys and values are read once
// for all.
#pragma once
#include "engine/rows.h"

namespace {

template <class R, int NV> struct WorkPartition {
  static constexpr int64_t L = Simd<R>::N * NV;
  bool packed;          // whether a unit has the rows of all query heads that read one key head
  int64_t units, rows;  // units of the call; rows of each unit
  int64_t blocks;       // blocks of L rows in each unit

  explicit WorkPartition(const Problem &p) {
    const int64_t group = p.H / p.Hkv;
    packed = group > 1 && p.Tq < 16;
    units = p.B * (packed ? p.Hkv : p.H), rows = packed ? p.Tq * group : p.Tq;
    blocks = (rows + L - 1) / L;
  }
  // Fill in rows first ... first + count - 1 of a unit.
  void place(const Problem &p, Rows<R, NV> &r, int64_t unit, int64_t first, int64_t count) const {
    const int64_t group = p.H / p.Hkv, heads = packed ? p.Hkv : p.H;
    const int64_t b = unit / heads, h = packed ? unit % heads * group : unit % heads;
    r.place(p, b, h / group, h, packed, first, count);
  }
  void place_block(const Problem &p, Rows<R, NV> &r, int64_t unit, int64_t block) const {
    place(p, r, unit, block * L, min_of(L, rows - block * L));
  }
};

// Vectors in a block of rows of the forward pass of KL: three, or fewer where the rows do not fill them. Decoding (one
// vector) takes rows by fours, so a vector must hold four. It adds in another order than the other passes, and float64
// does not use it: scores may be so large that only equal bits will do.
template <class R> int row_vectors(const Problem &p) {
  constexpr int64_t N = Simd<R>::N;
  const int64_t group = p.H / p.Hkv, rows = group > 1 && p.Tq < 16 ? group * p.Tq : p.Tq;
  if (rows <= N && N >= 4 && sizeof(R) == 4) return 1;
  return rows <= 2 * N || (rows > 3 * N && rows <= 4 * N) ? 2 : 3;
}

// Links and readouts have blocks of one vector or of three.
template <class R> bool few_rows(const Problem &p) { return p.Tq * (p.H / p.Hkv) <= Simd<R>::N; }

}  // namespace
