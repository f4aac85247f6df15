// The terms of a prior that have structure: a table by distance, factors of low rank, a decay, a density, a function of
// the user's; and two masks, selected keys and a map of tiles.
//
// Each `add_...` adds the logarithm in base 2 of its term to the gate (gate.h), for a block of keys and a block of rows.
// With `fresh` it writes its term instead: nothing is in the gate yet. Masks write -inf. Where the rows of a block are consecutive queries of one head, terms are vectors along the rows; any
// other block takes them one by one.
#pragma once
#include "engine/rows.h"
#include "engine/tiles.h"

namespace {

constexpr int64_t GATE_KEYS = 96;  // the most keys of one block
constexpr int64_t RANK_STEP = 16;  // columns of the factors that are multiplied at once
constexpr int64_t TILE = 64;       // queries and keys of a tile (src/regard/tiles.py)

// The distances nearest, nearest - 1, ... as three ranges of their number t: those from `reach` on (t < above), those in
// between (t < within), and those up to -reach.
struct DistanceRange {
  int64_t above, within, all;
  DistanceRange(int64_t nearest, int64_t count, int64_t reach) : all(count) {
    above = max_of((int64_t)0, min_of(count, nearest - reach + 1));
    within = max_of(above, min_of(count, nearest + reach));
  }
};

// A table by distance. For consecutive rows, key j of the block and row i read entry j - i: the entries that occur are
// laid out in decreasing order once, and each key reads its rows from there.
template <class R, int NV>
void add_relative(const Problem &p, const Rows<R, NV> &rows, int64_t first, int64_t keys, R *gate, bool fresh) {
  constexpr int N = Simd<R>::N, L = N * NV;
  using V = Vec<R>;
  const int64_t reach = p.reach;
  const auto entry = [&](int lane, int64_t distance) {
    const int64_t at = max_of(-reach, min_of(reach, distance)) + reach;
    return (R)LOG2E * element<R>(p.relative.data, p.relative.type,
                                 p.relative.s0 * rows.b + p.relative.s1 * rows.head[lane] + at * p.relative.s3);
  };
  if (rows.consecutive) {
    R entries[GATE_KEYS + L];
    const int64_t nearest = first + keys - 1 - (rows.query[0] + p.offset);  // of the last key and the first row
    const DistanceRange range(nearest, keys + L - 1, reach);
    const R above = entry(0, reach), below = entry(0, -reach);
    int64_t t = 0;
    for (; t < range.above; ++t) entries[t] = above;
    for (; t < range.within; ++t) entries[t] = entry(0, nearest - t);
    for (; t < range.all; ++t) entries[t] = below;
    for (int64_t j = 0; j < keys; ++j)
      for (int n = 0; n < NV; ++n) {
        R *at = gate + j * L + n * N;
        const V term = load(entries + keys - 1 - j + n * N);
        store(at, fresh ? term : load(at) + term);
      }
    return;
  }
  if (fresh) memset(gate, 0, keys * L * sizeof(R));
  for (int i = 0; i < L; ++i)
    for (int64_t j = 0; j < keys; ++j) gate[j * L + i] += entry(i, first + j - (rows.query[i] + p.offset));
}

// Columns from ... of a factor of the rows, as lanes: to[c][lane]; zeros beyond the rank.
template <class R, int NV>
void factor_lanes(const Problem &p, const Rows<R, NV> &rows, int64_t from, int64_t columns, R factor, R *to) {
  constexpr int L = Simd<R>::N * NV;
  const Tensor &t = p.query_factor;
  for (int i = 0; i < L; ++i) copy<R>(t.data, t.type, rows.at(t, i) + from * t.s3, t.s3, columns, to + i, L, factor);
}
// The same of the keys, as rows that are `stride` apart: in place where possible, else copied to `spare`.
template <class R>
const R *factor_rows(const Problem &p, int64_t b, int64_t head, int64_t first, int64_t keys, int64_t from,
                     int64_t columns, R *spare, int64_t &stride) {
  const Tensor &t = p.key_factor;
  const int64_t at = t.s0 * b + t.s1 * head + t.s2 * first + t.s3 * from;
  stride = t.s2;
  if (readable_in_place<R>(t, columns)) return (const R *)t.data + at;
  stride = RANK_STEP;
  for (int64_t j = 0; j < keys; ++j)
    copy<R>(t.data, t.type, at + j * t.s2, t.s3, columns, spare + j * RANK_STEP, 1, (R)1);
  return spare;
}

template <class R, int NV>
void add_low_rank(const Problem &p, const Rows<R, NV> &rows, int64_t first, int64_t keys, R *gate, R *spare,
                  bool fresh) {
  constexpr int N = Simd<R>::N, L = N * NV;
  bool one_head = true;
  for (int i = 1; i < L; ++i) one_head &= rows.head[i] == rows.head[0];
  if (fresh && !one_head) memset(gate, 0, keys * L * sizeof(R));
  for (int64_t from = 0; from < p.rank; from += RANK_STEP) {
    const int64_t columns = min_of(RANK_STEP, p.rank - from);
    R lanes[RANK_STEP * L], of_keys[GATE_KEYS * RANK_STEP];
    factor_lanes<R, NV>(p, rows, from, columns, (R)LOG2E, lanes);
    for (int i = 0; i < L;) {  // the rows of one head at a time: heads may have keys of their own
      const int64_t head = rows.head[i];
      int end = i;
      while (end < L && rows.head[end] == head) ++end;
      int64_t stride;
      const R *b = factor_rows<R>(p, rows.b, head, first, keys, from, columns, of_keys, stride);
      const bool alone = fresh && one_head && from == 0;
      scores<R, NV, false>(lanes, b, stride, columns, keys, alone ? gate : spare);
      if (alone) break;
      if (one_head)
        for (int64_t at = 0; at < keys * L; at += N) store(gate + at, load(gate + at) + load(spare + at));
      else
        for (int64_t j = 0; j < keys; ++j)
          for (int lane = i; lane < end; ++lane) gate[j * L + lane] += spare[j * L + lane];
      i = end;
    }
  }
}

// A decay is a difference of two cumulative sums, which grow with the sequence. Both are measured from that of the first
// row, in float64: the differences of a block are small numbers again.
template <class R, int NV>
void add_decay(const Problem &p, const Rows<R, NV> &rows, int64_t first, int64_t keys, R *gate, bool fresh) {
  constexpr int N = Simd<R>::N, L = N * NV;
  using V = Vec<R>;
  const double *own = (const double *)p.decay_query.data, *of_keys = (const double *)p.decay_key.data;
  const auto key_at = [&](int lane, int64_t j) {
    return of_keys[p.decay_key.s0 * rows.b + p.decay_key.s1 * rows.head[lane] + (first + j) * p.decay_key.s3];
  };
  bool one_head = true;
  for (int i = 1; i < L; ++i) one_head &= rows.head[i] == rows.head[0];
  const double reference = own[rows.at(p.decay_query, 0)];
  if (one_head) {
    V from[NV];
    for (int i = 0; i < L; ++i) from[i / N][i % N] = (R)((own[rows.at(p.decay_query, i)] - reference) * LOG2E);
    for (int64_t j = 0; j < keys; ++j) {
      const V to = broadcast((R)((key_at(0, j) - reference) * LOG2E));
      for (int n = 0; n < NV; ++n) {
        R *at = gate + j * L + n * N;
        store(at, fresh ? from[n] - to : load(at) + (from[n] - to));
      }
    }
    return;
  }
  if (fresh) memset(gate, 0, keys * L * sizeof(R));
  for (int i = 0; i < L; ++i)
    for (int64_t j = 0; j < keys; ++j) gate[j * L + i] += (R)((own[rows.at(p.decay_query, i)] - key_at(i, j)) * LOG2E);
}

// A function of the user's, compiled into a library of its own (src/regard/compiled/pairs.py): it adds log pi of the keys
// first ... first + keys - 1 and of `vectors` vectors of rows, whose heads and positions are given, to the gate. -inf in
// either stays -inf. live[j] is set where some row reads key j. `fresh`: the gate counts as 0, whatever it holds.
template <class R>
using PriorFunction = void (*)(const void *captured, int64_t b, const int64_t *head, const int64_t *position,
                               int64_t first, int64_t keys, int64_t vectors, R *gate, uint8_t *live, int64_t fresh);

template <class R, int NV>
void add_function(const Problem &p, const Rows<R, NV> &rows, int64_t first, int64_t keys, R *gate, uint8_t *live,
                  bool fresh) {
  const auto call = (PriorFunction<R>)p.function;
  call((const void *)p.captured, rows.b, rows.head, rows.positions(p).at, first, keys, NV, gate, live, fresh);
}

// The density itself, [keys][L].
template <class R, int NV>
void fill_density(const Problem &p, const Rows<R, NV> &rows, int64_t first, int64_t keys, R *panel) {
  rows.fill(p.density, first, keys, panel);
}

// A key of density 0 has no weight, but it is read. Forward: its gate is LOWEST, which `apply_bias_and_mask` turns into
// -inf, or into NaN where the score is NaN. Backward (`density_least`): it counts with a tiny density, from which the
// gradient by the density follows.
template <class R, int NV>
void add_density(const Problem &p, const Rows<R, NV> &rows, int64_t first, int64_t keys, R *gate, R *spare) {
  constexpr int N = Simd<R>::N, L = N * NV;
  using V = Vec<R>;
  fill_density(p, rows, first, keys, spare);
  const V least = broadcast((R)p.density_least);
  for (int64_t at = 0; at < keys * L; at += N) {
    const V g = load(gate + at), density = vmax(least, load(spare + at));
    const V sum = vmax(broadcast(LOWEST<R>), g + (R)LOG2E * vlog(density > 0 ? density : broadcast((R)1)));
    store(gate + at, g == -INF<R> ? g : density == 0 ? broadcast(LOWEST<R>) : sum);
  }
}

// --- masks ------------------------------------------------------------------------------------------------------------

// Lists of selected blocks are in any order, with repetitions, and negative entries select nothing.

// Whether some row selected a key of the block.
template <class R, int NV> bool some_selected(const Problem &p, const Rows<R, NV> &rows, int64_t first, int64_t keys) {
  const int64_t from = first / p.selected_block, to = (first + keys - 1) / p.selected_block;
  for (int i = 0; i < rows.n; ++i) {
    const int64_t *index = (const int64_t *)p.selected.data + rows.at(p.selected, i);
    bool some = false;
    for (int64_t at = 0; at < p.selections; ++at)
      some |= (index[at * p.selected.s3] >= from) & (index[at * p.selected.s3] <= to);
    if (some) return true;
  }
  return false;
}

template <class R, int NV>
void mask_unselected(const Problem &p, const Rows<R, NV> &rows, int64_t first, int64_t keys, R *gate) {
  constexpr int L = Simd<R>::N * NV;
  const int64_t from = first / p.selected_block, to = (first + keys - 1) / p.selected_block;
  for (int i = 0; i < L; ++i) {
    const int64_t *index = (const int64_t *)p.selected.data + rows.at(p.selected, i);
    bool selected[GATE_KEYS] = {};  // by block: there are at most as many blocks as keys
    for (int64_t at = 0; at < p.selections; ++at) {
      const int64_t block = index[at * p.selected.s3];
      if (block >= from && block <= to) selected[block - from] = true;
    }
    for (int64_t j = 0; j < keys; ++j)
      if (!selected[(first + j) / p.selected_block - from]) gate[j * L + i] = -INF<R>;
  }
}

struct TileState {
  bool some, every;  // whether some pair, or every pair, of a block may be read
};

template <class R, int NV> TileState tiles_of(const Problem &p, const Rows<R, NV> &rows, int64_t first, int64_t keys) {
  const int64_t *map = (const int64_t *)p.tile_map.data;
  TileState state = {false, true};
  for (int i = 0; i < rows.n;) {
    const int64_t base = p.tile_map.s0 * rows.b + p.tile_map.s1 * rows.head[i] + p.tile_map.s2 * (rows.query[i] / TILE);
    for (int64_t tile = first / TILE; tile <= (first + keys - 1) / TILE; ++tile) {
      const int64_t number = map[base + tile * p.tile_map.s3];
      state.some |= number != 0, state.every &= number == 1;
    }
    const int64_t tile = rows.query[i] / TILE, head = rows.head[i];
    while (i < rows.n && rows.head[i] == head && rows.query[i] / TILE == tile) ++i;
  }
  return state;
}

template <class R, int NV>
void mask_by_tiles(const Problem &p, const Rows<R, NV> &rows, int64_t first, int64_t keys, R *gate) {
  constexpr int N = Simd<R>::N, L = N * NV;
  using M = Mask<R>;
  using I = typename Simd<R>::I;
  const int64_t *map = (const int64_t *)p.tile_map.data;
  const uint64_t *tiles = (const uint64_t *)p.tiles;
  const auto word = [&](int lane, int64_t row_tile, int64_t key) -> uint64_t {
    const int64_t number = map[p.tile_map.s0 * rows.b + p.tile_map.s1 * rows.head[lane] + p.tile_map.s2 * row_tile +
                               p.tile_map.s3 * (key / TILE)];
    return tiles[number * TILE + key % TILE];
  };
  if (!rows.consecutive) {
    for (int i = 0; i < L; ++i)
      for (int64_t j = 0; j < keys; ++j)
        if (!(word(i, rows.query[i] / TILE, first + j) >> (rows.query[i] % TILE) & 1)) gate[j * L + i] = -INF<R>;
    return;
  }
  // The bits of consecutive rows lie in one word of a tile, or in two: L is at most 48.
  const int64_t row_tile = rows.query[0] / TILE, last_tile = rows.query[rows.n - 1] / TILE, skip = rows.query[0] % TILE;
  M bit;
  for (int i = 0; i < N; ++i) bit[i] = (I)1 << i;
  for (int64_t j = 0; j < keys; ++j) {
    uint64_t bits = word(0, row_tile, first + j) >> skip;
    if (last_tile > row_tile) bits |= word(0, last_tile, first + j) << (TILE - skip);
    for (int n = 0; n < NV; ++n) {
      const M own = (M{} + (I)(bits >> (n * N) & (((uint64_t)1 << N) - 1))) & bit;
      R *at = gate + j * L + n * N;
      store(at, own == 0 ? broadcast(-INF<R>) : load(at));
    }
  }
}

}  // namespace
