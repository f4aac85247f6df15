// Attention by features: row i gives key j the weight <phi(q_i), phi(k_j)>, phi >= 0 (regard/features.py has the
// maths).
//   forward:   out_i = phi(q_i) S / phi(q_i) z, with S = sum_j phi(k_j) v_j^T and z = sum_j phi(k_j) over i's keys
//   backward:  with g_i = [dout_i, -<dout_i, out_i>] / mass_i and u_j = [v_j, 1]
//     dphi(q_i) = sum_j <g_i, u_j> phi(k_j),  dphi(k_j) = sum_i <g_i, u_j> phi(q_i),  dv_j = sum_i w_ij g_i:
//     the first from a running sum of phi(k_j) u_j^T, the others from one of phi(q_i) g_i^T that runs from the end.
//
// Causal rows are computed in chunks: within a chunk pair by pair, everything before it from the running sum (the
// state). The backward pass computes all features again. In FAVOR+, phi(x) is stored as features in [0, 1] times
// 2^level. The sums of a row are relative to the largest level among its keys (`top`), a state is relative to the
// largest level in it (`shift`).
//
// Chunks form blocks. The state at the beginning of a block is a sum over whole blocks, each of which is summed from
// zero. So the sum of a block may be computed together with the rows of the block (one thread per head), or in a pass
// before (several threads per head): both give the same bits.
#pragma once
#include "engine/arena.h"
#include "engine/elements.h"
#include "engine/vector_math.h"

namespace {

enum Map : int64_t { ELU = 0, RELU = 1, EXP = 2 };

constexpr int64_t CHUNK = 48, TILE_ROWS = 6;  // rows of a chunk; rows of its pairs that are computed together
constexpr int64_t CHUNKS = 8, BLOCKS = 64;    // at least so many chunks in a block; at most so many blocks in a head

// A state has its shift, padding up to HEADER, then the matrix, then (forward pass) z.
constexpr int64_t HEADER = 16;

struct Span {
  int64_t q, nq, k, nk;
};  // queries and keys of a block or chunk

template <class R> struct FeatureCall {
  static constexpr int64_t N = Simd<R>::N;
  const Problem &p;
  int64_t M, heads, group;
  int64_t Ms, Ds, Vs, Cs;  // the lengths of padded rows: features, D, Dv + 1, CHUNK
  int64_t before;          // keys that every row reads
  int64_t block_rows, first_blocks, row_blocks;
  bool backward, projected, levels, by_head;
  R root;
  R *to_features = nullptr, *from_features = nullptr,
    *states = nullptr;  // shared: [D][Ms], [M][Ds], [heads][blocks + 1]

  // Whole vectors, and an odd number of them: rows a power of two apart would compete for the same sets of the cache.
  static int64_t pitch(int64_t n) { return ((n + N - 1) / N | 1) * N; }

  FeatureCall(const Problem &p, bool backward)
      : p(p),
        M(p.features),
        heads(p.B * p.Hkv),
        group(p.H / p.Hkv),
        Ms(pitch(p.features)),
        Ds(pitch(p.D)),
        Vs(pitch(p.Dv + 1)),
        Cs(pitch(CHUNK)),
        before(p.right == 0 ? p.offset : p.Tk),
        block_rows(CHUNK * max_of(CHUNKS, (before + p.Tq) / (BLOCKS * CHUNK) + 1)),
        first_blocks((before + block_rows - 1) / block_rows),
        row_blocks((p.Tq + block_rows - 1) / block_rows),
        backward(backward),
        projected(p.projection),
        levels(p.map == EXP),
        root((R)sqrt(p.scale)) {
    by_head = p.threads <= 1 || heads % p.threads == 0 || heads >= 4 * p.threads;
  }

  int64_t blocks() const { return first_blocks + row_blocks; }
  int64_t state_size() const { return HEADER + max_of(M * Vs + Ms, (p.Dv + 1) * Ms); }
  int64_t shared() const {
    return 64 + (projected ? p.D * Ms + M * Ds : 0) + (by_head ? 0 : heads * (blocks() + 1) * state_size());
  }
  int64_t workspace_size() const {
    const int64_t size = 3 * state_size() + 4 * CHUNK * Ms + 2 * M * Cs + 4 * CHUNK * Vs + 3 * (p.Dv + 1) * Cs +
                         2 * CHUNK * Cs + 3 * CHUNK * Ds + M * Vs + 5 * Cs;
    return (size + 32 * 64 + 63) / 64 * 64;
  }
  int64_t bytes() const { return 128 + (shared() + p.threads * workspace_size()) * (int64_t)sizeof(R); }

  Span block(int64_t n) const {
    const int64_t size = block_rows;
    if (n < first_blocks) return {0, 0, n * size, min_of(size, before - n * size)};
    const int64_t q = (n - first_blocks) * size, k = before + q;
    return {q, min_of(size, p.Tq - q), k, max_of((int64_t)0, min_of(size, p.Tk - k))};
  }
  static int64_t chunks(Span s) { return (max_of(s.nq, s.nk) + CHUNK - 1) / CHUNK; }
  static Span chunk(Span s, int64_t c) {
    const int64_t at = c * CHUNK;
    return {s.q + at, max_of((int64_t)0, min_of(CHUNK, s.nq - at)), s.k + at,
            max_of((int64_t)0, min_of(CHUNK, s.nk - at))};
  }

  // The projection in both directions, padded with zeros. With `levels`, exponents are in base 2.
  void pack(Arena &arena) {
    if (!projected) return;
    to_features = arena.take<R>(p.D * Ms), from_features = arena.take<R>(M * Ds);
    memset(to_features, 0, p.D * Ms * sizeof(R)), memset(from_features, 0, M * Ds * sizeof(R));
    const Tensor &w = p.projection;
    const R factor = root * (levels ? (R)LOG2E : 1);
    for (int64_t m = 0; m < M; ++m) {
      copy<R>(w.data, w.type, m * w.s2, w.s3, p.D, to_features + m, Ms, factor);
      if (backward) copy<R>(w.data, w.type, m * w.s2, w.s3, p.D, from_features + m * Ds, 1, root);
    }
  }
};

template <class R> INLINE R exp2_difference(R from, R to) { return from == -INF<R> ? 0 : exp2_of(from - to); }

// Adds sums that are relative to `shift` to a state, which is relative to its own. A null state is skipped.
template <class R> struct Join {
  R *matrix;
  int64_t cs;
  R kept = 1, mass_at_h = 1;
  Join(R *state, int64_t cs, R shift) : matrix(state ? state + HEADER : nullptr), cs(cs) {
    if (!state) return;
    const R both = max_of(state[0], shift);
    kept = exp2_difference(state[0], both), mass_at_h = exp2_difference(shift, both), state[0] = both;
  }
  INLINE void operator()(int64_t i, int64_t d, Vec<R> sum) const {
    if (matrix) store(matrix + i * cs + d, load(matrix + i * cs + d) * kept + sum * mass_at_h);
  }
};
template <class R> struct JoinBoth {
  Join<R> run, local;
  INLINE void operator()(int64_t i, int64_t d, Vec<R> sum) const { run(i, d, sum), local(i, d, sum); }
};

template <class R> void clear(R *state, int64_t size) { memset(state, 0, size * sizeof(R)), state[0] = -INF<R>; }
template <class R> void join_states(R *to, const R *from, int64_t size) {
  if (from[0] == -INF<R>) return;
  const Join<R> join(to, 0, from[0]);
  for (int64_t i = HEADER; i < size; i += Simd<R>::N) join(0, i - HEADER, load(from + i));
}

}  // namespace
