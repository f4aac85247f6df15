// Attention by features: row i weighs key j with <phi(q_i), phi(k_j)>, phi >= 0 (regard/features.py states the maths).
//   forward:   out_i = phi(q_i) S / phi(q_i) z,   S = sum_j phi(k_j) v_j^T,  z = sum_j phi(k_j) over the keys that i sees
//   backward:  with g_i = [dout_i, -<dout_i, out_i>] / mass_i and u_j = [v_j, 1]
//     dphi(q_i) = sum_j <g_i, u_j> phi(k_j),  dphi(k_j) = sum_i <g_i, u_j> phi(q_i),  dv_j = sum_i w_ij g_i:
//     the first from a running sum of phi(k_j) u_j^T, the others from one of phi(q_i) g_i^T that runs from the end.
//
// Causal rows go by chunks: pairs within a chunk one by one, all that came before from the running state. What is summed is
// computed anew in backward. phi(x) of FAVOR+ is held as features in [0, 1] times 2^level; a row's sums are relative to the
// largest level that it sees (`top`), a state's to the largest in it (`shift`).
//
// Chunks make blocks. The state at the beginning of a block is the sum of whole blocks, each summed from zero. So a block's sum
// may be computed beside the rows of the block (one thread goes through a head) or in a pass before (blocks of one head on
// several threads): the same numbers either way.
#pragma once
#include "rows.h"

namespace {

enum Map : int64_t { ELU = 0, RELU = 1, EXP = 2 };

constexpr int64_t CHUNK = 48, TILE_ROWS = 6;  // rows of a chunk, and of its pairs that are computed together
constexpr int64_t CHUNKS = 8, BLOCKS = 64;     // chunks of a block at least, and blocks of a head at most

// --- products: c[i][d] from sum_k a[i][k] b[k][d], lanes along d; `put(i, d, sum)` says what becomes of a sum -----------

template <class R, int ROWS, int NV, class Put>
INLINE void product_tile(const R *a, int64_t as, const R *b, int64_t bs, int64_t depth, int64_t i, int64_t d,
                         const Put &put) {
  constexpr int N = Simd<R>::N;
  Vec<R> sum[ROWS][NV] = {};
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    Vec<R> x[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) x[n] = load(b + k * bs + n * N);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const Vec<R> y = all(a[r * as + k]);
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) sum[r][n] += x[n] * y;
    }
  };
  by_four(depth, step);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) put(i + r, d + n * N, sum[r][n]);
}

template <class R, int NV, class Put>
INLINE void product_columns(int64_t rows, int64_t depth, const R *a, int64_t as, const R *b, int64_t bs, int64_t d,
                            const Put &put) {
  int64_t i = 0;
  for (; i + 6 <= rows; i += 6) product_tile<R, 6, NV>(a + i * as, as, b + d, bs, depth, i, d, put);
  for (; i + 4 <= rows; i += 4) product_tile<R, 4, NV>(a + i * as, as, b + d, bs, depth, i, d, put);
  for (; i < rows; ++i) product_tile<R, 1, NV>(a + i * as, as, b + d, bs, depth, i, d, put);
}

// `columns` is rounded up to whole vectors: rows of b and c are padded.
template <class R, class Put>
void product(int64_t rows, int64_t columns, int64_t depth, const R *a, int64_t as, const R *b, int64_t bs, const Put &put) {
  constexpr int N = Simd<R>::N, NV = SCATTER_VECTORS;
  int64_t d = 0;
  for (; d + (NV - 1) * N < columns; d += NV * N) product_columns<R, NV>(rows, depth, a, as, b, bs, d, put);
  for (; d < columns; d += N) product_columns<R, 1>(rows, depth, a, as, b, bs, d, put);
}

template <class R> struct Set {
  R *c;
  int64_t cs;
  INLINE void operator()(int64_t i, int64_t d, Vec<R> sum) const { store(c + i * cs + d, sum); }
};
template <class R> struct Add {
  R *c;
  int64_t cs;
  INLINE void operator()(int64_t i, int64_t d, Vec<R> sum) const { store(c + i * cs + d, load(c + i * cs + d) + sum); }
};

// --- sizes --------------------------------------------------------------------------------------------------------------

// A state: its shift, then the matrix, then (forward) z.
constexpr int64_t HEADER = 16;

struct Span { int64_t q, nq, k, nk; };  // queries and keys of a block or chunk

template <class R> struct FeatureCall {
  static constexpr int64_t N = Simd<R>::N;
  const Problem &p;
  int64_t M, heads, group;
  int64_t Ms, Ds, Vs, Cs;  // the lengths of padded rows
  int64_t before;          // keys that every row sees
  int64_t block_rows, first_blocks, row_blocks;
  bool backward, projected, levels, by_head;
  R root;
  R *to_features = nullptr, *from_features = nullptr, *states = nullptr;  // shared: [D][Ms], [M][Ds], [heads][blocks + 1]

  // Whole vectors, an odd number of them: rows a power of two apart would share the cache's sets.
  static int64_t pitch(int64_t n) { return ((n + N - 1) / N | 1) * N; }

  FeatureCall(const Problem &p, bool backward)
      : p(p), M(p.features), heads(p.B * p.Hkv), group(p.H / p.Hkv), Ms(pitch(p.features)), Ds(pitch(p.D)),
        Vs(pitch(p.Dv + 1)), Cs(pitch(CHUNK)), before(p.right == 0 ? p.offset : p.Tk),
        block_rows(CHUNK * most(CHUNKS, (before + p.Tq) / (BLOCKS * CHUNK) + 1)),
        first_blocks((before + block_rows - 1) / block_rows), row_blocks((p.Tq + block_rows - 1) / block_rows),
        backward(backward), projected(p.projection), levels(p.map == EXP), root((R)sqrt(p.scale)) {
    by_head = p.threads <= 1 || heads % p.threads == 0 || heads >= 4 * p.threads;
  }

  int64_t blocks() const { return first_blocks + row_blocks; }
  int64_t state_size() const { return HEADER + most(M * Vs + Ms, (p.Dv + 1) * Ms); }
  int64_t shared() const {
    return 64 + (projected ? p.D * Ms + M * Ds : 0) + (by_head ? 0 : heads * (blocks() + 1) * state_size());
  }
  int64_t desk_size() const {
    const int64_t size = 3 * state_size() + 4 * CHUNK * Ms + 2 * M * Cs + 4 * CHUNK * Vs + 3 * (p.Dv + 1) * Cs +
                         2 * CHUNK * Cs + 3 * CHUNK * Ds + M * Vs + 5 * Cs;
    return (size + 32 * 64 + 63) / 64 * 64;
  }
  int64_t bytes() const { return 128 + (shared() + p.threads * desk_size()) * (int64_t)sizeof(R); }

  Span block(int64_t n) const {
    const int64_t size = block_rows;
    if (n < first_blocks) return {0, 0, n * size, least(size, before - n * size)};
    const int64_t q = (n - first_blocks) * size, k = before + q;
    return {q, least(size, p.Tq - q), k, most((int64_t)0, least(size, p.Tk - k))};
  }
  static int64_t chunks(Span s) { return (most(s.nq, s.nk) + CHUNK - 1) / CHUNK; }
  static Span chunk(Span s, int64_t c) {
    const int64_t at = c * CHUNK;
    return {s.q + at, most((int64_t)0, least(CHUNK, s.nq - at)), s.k + at, most((int64_t)0, least(CHUNK, s.nk - at))};
  }

  // The projection in both directions, padded with zeros; exponents are to the base 2.
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

template <class R> INLINE R power(R from, R to) { return from == -INF<R> ? 0 : exp2_of(from - to); }

// Into `state` (may be null), which is relative to its shift, goes what is relative to `shift`.
template <class R> struct Join {
  R *matrix;
  int64_t cs;
  R kept = 1, taken = 1;
  Join(R *state, int64_t cs, R shift) : matrix(state ? state + HEADER : nullptr), cs(cs) {
    if (!state) return;
    const R both = most(state[0], shift);
    kept = power(state[0], both), taken = power(shift, both), state[0] = both;
  }
  INLINE void operator()(int64_t i, int64_t d, Vec<R> sum) const {
    if (matrix) store(matrix + i * cs + d, load(matrix + i * cs + d) * kept + sum * taken);
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

// --- one thread's table: a chunk of keys, a chunk of queries ------------------------------------------------------------

// to[d][i] = from[i][d], lanes without a row 0.
template <class R> void flip(const R *from, int64_t stride, int64_t n, int64_t D, R *to, int64_t to_stride) {
  constexpr int64_t PIECE = 64, N = Simd<R>::N;
  for (int64_t first = 0; first < n; first += PIECE) {
    const int64_t some = least(PIECE, n - first);
    const R *rows[PIECE];
    R ones[PIECE];
    for (int64_t i = 0; i < some; ++i) rows[i] = from + (first + i) * stride, ones[i] = 1;
    for (int64_t i = to_lanes(rows, ones, some, D, to + first, to_stride); i < some; ++i)
      for (int64_t d = 0; d < D; ++d) to[d * to_stride + first + i] = rows[i][d];
  }
  for (int64_t i = n; i < (n + N - 1) / N * N; ++i)
    for (int64_t d = 0; d < D; ++d) to[d * to_stride + i] = 0;
}

template <class R> struct Desk {
  using V = Vec<R>;
  static constexpr int64_t N = Simd<R>::N;
  const FeatureCall<R> &call;
  const Problem &p;
  R *start, *run, *local;             // states
  R *phi_q, *phi_k, *dphi, *more;     // [CHUNK][Ms]
  R *phi_qt, *phi_kt;                 // [M][Cs]
  R *v, *scaled, *out, *g;            // [CHUNK][Vs]
  R *vt, *gt, *scaled_t;              // [Dv + 1][Cs]
  R *pairs, *slopes;                  // [CHUNK][Cs]
  R *x_q, *x_k, *dx;                  // [CHUNK][Ds]
  R *turned;                          // [M][Vs]
  R *level, *top, *weight, *inverse, *mass;  // [Cs]
  uint8_t kept[CHUNK];
  const R *q_rows, *k_rows;  // where the inputs are, as R
  int64_t q_stride, k_stride;

  Desk(const FeatureCall<R> &call, char *scratch) : call(call), p(call.p) {
    Arena a{scratch};
    const int64_t Ms = call.Ms, Cs = call.Cs, Vs = call.Vs, Ds = call.Ds, size = call.state_size();
    start = a.take<R>(size), run = a.take<R>(size), local = a.take<R>(size);
    phi_q = a.take<R>(CHUNK * Ms), phi_k = a.take<R>(CHUNK * Ms), dphi = a.take<R>(CHUNK * Ms);
    more = a.take<R>(CHUNK * Ms), phi_qt = a.take<R>(call.M * Cs), phi_kt = a.take<R>(call.M * Cs);
    v = a.take<R>(CHUNK * Vs), scaled = a.take<R>(CHUNK * Vs), out = a.take<R>(CHUNK * Vs), g = a.take<R>(CHUNK * Vs);
    vt = a.take<R>((p.Dv + 1) * Cs), gt = a.take<R>((p.Dv + 1) * Cs), scaled_t = a.take<R>((p.Dv + 1) * Cs);
    pairs = a.take<R>(CHUNK * Cs), slopes = a.take<R>(CHUNK * Cs);
    x_q = a.take<R>(CHUNK * Ds), x_k = a.take<R>(CHUNK * Ds), dx = a.take<R>(CHUNK * Ds), turned = a.take<R>(call.M * Vs);
    level = a.take<R>(Cs), top = a.take<R>(Cs), weight = a.take<R>(Cs), inverse = a.take<R>(Cs), mass = a.take<R>(Cs);
  }

  // phi of n rows of x, and their levels (null: nobody asks).
  void features(const R *x, int64_t stride, int64_t n, R *phi, R *levels) {
    const int64_t M = call.M, Ms = call.Ms;
    if (call.projected) product<R>(n, M, p.D, x, stride, call.to_features, Ms, Set<R>{phi, Ms});
    for (int64_t i = 0; i < n; ++i) {
      R *row = phi + i * Ms;
      if (!call.projected) {
        p.map == ELU ? map_row<ELU>(x + i * stride, row) : map_row<RELU>(x + i * stride, row);
      } else if (p.map == RELU) {
        for (int64_t m = 0; m < M; m += N) store(row + m, vmax(load(row + m), V{}));
      } else {
        for (int64_t m = M; m % N; ++m) row[m] = -INF<R>;
        V most_of = load(row);
        for (int64_t m = N; m < M; m += N) most_of = vmax(load(row + m), most_of);
        R top = most_of[0];
        for (int r = 1; r < N; ++r) top = most(top, (R)most_of[r]);
        for (int64_t m = 0; m < M; m += N) store(row + m, vexp2(load(row + m) - top));
        if (levels) levels[i] = top - square(x + i * stride) * (R)(p.scale / 2 * LOG2E);
      }
    }
  }
  // The map of one row, of the input itself.
  template <Map MAP> INLINE void map_row(const R *x, R *row) const {
    constexpr int U = 4;
    const R root = call.root;
    const auto map = [&](auto &y) __attribute__((always_inline)) {
      constexpr int n = sizeof y / sizeof *y;
      for (int u = 0; u < n; ++u) y[u] *= root;
      if (MAP == RELU) {
        for (int u = 0; u < n; ++u) y[u] = vmax(y[u], V{});
        return;
      }
      V t[n], e[n];
      for (int u = 0; u < n; ++u) t[u] = -vmax(V{}, -y[u]) * (R)LOG2E;
      vexp2<true>(t, e);
      for (int u = 0; u < n; ++u) y[u] = vmax(y[u] + (R)1, e[u]);  // exp(y) >= y + 1
    };
    int64_t d = 0;
    for (; d + U * N <= call.M; d += U * N) {
      V y[U];
      for (int u = 0; u < U; ++u) y[u] = load(x + d + u * N);
      map(y);
      for (int u = 0; u < U; ++u) store(row + d + u * N, y[u]);
    }
    for (; d < call.M; d += N) {
      R rest[N] = {};
      const int64_t some = least(N, call.M - d);
      for (int64_t r = 0; r < some; ++r) rest[r] = x[d + r];
      V y[1] = {load(rest)};
      map(y);
      store(row + d, y[0]);
      for (int64_t r = some; r < N; ++r) row[d + r] = 0;
    }
  }
  R square(const R *x) const {
    V sums = {};
    int64_t d = 0;
    for (; d + N <= p.D; d += N) sums += load(x + d) * load(x + d);
    R total = 0;
    for (int r = 0; r < N; ++r) total += sums[r];
    for (; d < p.D; ++d) total += x[d] * x[d];
    return total;
  }
  // to[i] = <rows[i], z>, padded rows of M; four at a time, the last ones of which may be beyond the n.
  void dots(const R *rows, int64_t n, const R *z, R *to) const {
    for (int64_t i = 0; i < n; i += 4) {
      V sums[4] = {};
      for (int64_t m = 0; m < call.M; m += N) {
        const V y = load(z + m);
        for (int u = 0; u < 4; ++u) sums[u] += load(rows + (i + u) * call.Ms + m) * y;
      }
      add_lanes<R>(sums, to + i);
    }
  }
  // to[d] = from[d] * factor, n of them; exactly 0 where the factor is.
  static INLINE void write(const R *from, R factor, int64_t n, R *to) {
    int64_t d = 0;
    if (factor == 0) {
      memset(to, 0, n * sizeof(R));
      return;
    }
    for (; d + N <= n; d += N) store(to + d, load(from + d) * factor);
    for (; d < n; ++d) to[d] = from[d] * factor;
  }

  void take_queries(int64_t b, int64_t h, Span s) {
    q_rows = as_rows<R>(p.query, b, h, s.q, s.nq, p.D, x_q, q_stride);
    features(q_rows, q_stride, s.nq, phi_q, nullptr);
  }
  // Keys with their levels, values with a 1 behind; one that is masked has phi = 0 and whatever else finite.
  void take_keys(int64_t b, int64_t kv, Span s) {
    k_rows = as_rows<R>(p.key, b, kv, s.k, s.nk, p.D, x_k, k_stride);
    for (int64_t j = 0; j < s.nk; ++j) level[j] = 0, kept[j] = 1;
    features(k_rows, k_stride, s.nk, phi_k, call.levels ? level : nullptr);
    const Tensor &t = p.value;
    for (int64_t j = 0; j < s.nk; ++j) {
      R *row = v + j * call.Vs;
      if (p.mask) kept[j] = ((const uint8_t *)p.mask.data)[p.mask.s0 * b + (s.k + j) * p.mask.s3];
      if (kept[j]) {
        copy<R>(t.data, t.type, t.s0 * b + t.s1 * kv + (s.k + j) * t.s2, t.s3, p.Dv, row, 1, (R)1);
        for (int64_t d = p.Dv + 1; d < call.Vs; ++d) row[d] = 0;
        row[p.Dv] = 1;
      } else {
        memset(row, 0, call.Vs * sizeof(R)), memset(phi_k + j * call.Ms, 0, call.Ms * sizeof(R));
        level[j] = -INF<R>;
      }
    }
    for (int64_t j = s.nk; j < call.Cs; ++j) level[j] = -INF<R>;
  }
  // The largest level that each row sees.
  void find_tops(Span s, R shift) {
    R highest = shift;
    for (int64_t i = 0; i < s.nq; ++i) {
      if (i < s.nk) highest = most(highest, level[i]);
      top[i] = highest;
    }
  }
  static R finite(R x) { return x == -INF<R> ? 0 : x; }

  // --- forward ---

  void absorb(Span s, R *one, R *two) {  // the chunk's keys, into two states; phi_kt is there
    const int64_t M = call.M, Ms = call.Ms, Vs = call.Vs;
    R highest = -INF<R>;
    for (int64_t j = 0; j < s.nk; ++j) highest = most(highest, level[j]);
    if (highest == -INF<R>) return;
    const R *values = v;
    for (int64_t j = 0; j < s.nk; ++j) weight[j] = power(level[j], highest);
    if (call.levels) {
      scale_rows(v, Vs, s.nk, scaled);
      values = scaled;
    }
    const JoinBoth<R> join{{one, Vs, highest}, {two, Vs, highest}};
    product<R>(M, p.Dv, s.nk, phi_kt, call.Cs, values, Vs, join);
    for (int64_t m = 0; m < M; m += N) {
      V sum = {};
      for (int64_t j = 0; j < s.nk; ++j) sum += load(phi_k + j * Ms + m) * weight[j];
      join(0, M * Vs + m, sum);
    }
  }
  void scale_rows(const R *from, int64_t stride, int64_t n, R *to) const {  // by `weight`
    for (int64_t j = 0; j < n; ++j)
      for (int64_t d = 0; d < stride; d += N) store(to + j * stride + d, load(from + j * stride + d) * weight[j]);
  }

  void absorb_block(int64_t b, int64_t kv, Span block, R *state) {
    for (int64_t c = 0; c < call.chunks(block); ++c) {
      const Span s = call.chunk(block, c);
      if (!s.nk) continue;
      take_keys(b, kv, s);
      flip(phi_k, call.Ms, s.nk, call.M, phi_kt, call.Cs);
      absorb(s, state, (R *)nullptr);
    }
  }

  void emit_block(int64_t b, int64_t kv, Span block, R *state, R *sum) {
    const int64_t Ms = call.Ms, Vs = call.Vs, Cs = call.Cs, M = call.M;
    for (int64_t c = 0; c < call.chunks(block); ++c) {
      const Span s = call.chunk(block, c);
      const R *S = state + HEADER, *z = S + M * Vs, shift = state[0];
      if (s.nk) {
        take_keys(b, kv, s);
        flip(phi_k, Ms, s.nk, M, phi_kt, Cs);
      }
      find_tops(s, shift);
      for (int64_t h = kv * call.group; h < (kv + 1) * call.group; ++h) {
        take_queries(b, h, s);
        product<R>(s.nq, p.Dv, M, phi_q, Ms, S, Vs, Set<R>{out, Vs});
        dots(phi_q, s.nq, z, mass);
        if (call.levels) {
          for (int64_t i = 0; i < s.nq; ++i) weight[i] = power(shift, finite(top[i])), mass[i] *= weight[i];
          scale_rows(out, Vs, s.nq, out);
        }
        for (int64_t i = 0; s.nk && i < s.nq; i += TILE_ROWS) {
          const int64_t rows = least(TILE_ROWS, s.nq - i), keys = least(i + rows, s.nk);
          product<R>(rows, keys, M, phi_q + i * Ms, Ms, phi_kt, Cs, Set<R>{pairs + i * Cs, Cs});
          for (int64_t r = i; r < i + rows; ++r) {
            R *row = pairs + r * Cs;
            if (call.levels) dress_row(row, 0, keys, top[r]);
            V total = {};
            for (int64_t j = r + 1; j < (keys + N - 1) / N * N; ++j) row[j] = 0;
            for (int64_t j = 0; j < keys; j += N) total += load(row + j);
            for (int l = 0; l < N; ++l) mass[r] += total[l];
          }
          product<R>(rows, p.Dv, keys, pairs + i * Cs, Cs, v, Vs, Add<R>{out + i * Vs, Vs});
        }
        const int64_t at = (b * p.H + h) * p.Tq + s.q;
        for (int64_t i = 0; i < s.nq; ++i) {
          const R share = mass[i] >= TINY ? 1 / mass[i] : 0;
          write(out + i * Vs, share, p.Dv, (R *)p.out + (at + i) * p.Dv);
          if (p.mass_sent) ((R *)p.mass_sent)[at + i] = mass[i], ((R *)p.peak)[at + i] = top[i];
        }
      }
      if (s.nk) absorb(s, state, sum);
    }
  }
  static constexpr R TINY = sizeof(R) == 4 ? (R)1.17549435e-38 : (R)2.2250738585072014e-308;

  // row[j] *= 2^(level_j - top): what is between the features and the weights.
  void dress_row(R *row, int64_t from, int64_t to, R highest) const {
    for (int64_t j = from; j < to; j += N) store(row + j, load(row + j) * vexp2(load(level + j) - finite(highest)));
  }

  // --- backward ---

  // g: [dout, -<dout, out>] / mass, rows of a head.
  void take_gradients(int64_t b, int64_t h, Span s) {
    const Tensor &t = p.grad_out;
    const int64_t at = (b * p.H + h) * p.Tq + s.q;
    for (int64_t i = 0; i < s.nq; ++i) {
      const R total = ((const R *)p.saved_mass.data)[at + i], *done = (const R *)p.saved_out.data + (at + i) * p.Dv;
      top[i] = ((const R *)p.saved_peak.data)[at + i];
      inverse[i] = total >= TINY ? 1 / total : 0;
      R *row = g + i * call.Vs;
      if (inverse[i] == 0) {
        memset(row, 0, call.Vs * sizeof(R));
        continue;
      }
      copy<R>(t.data, t.type, t.s0 * b + t.s1 * h + (s.q + i) * t.s2, t.s3, p.Dv, row, 1, inverse[i]);
      V sums = {};
      int64_t d = 0;
      for (; d + N <= p.Dv; d += N) sums += load(row + d) * load(done + d);
      R product = 0;
      for (int r = 0; r < N; ++r) product += sums[r];
      for (; d < p.Dv; ++d) product += row[d] * done[d];
      row[p.Dv] = -product;
      for (d = p.Dv + 1; d < call.Vs; ++d) row[d] = 0;
    }
  }

  // Into transposed states [Dv + 1][Ms]: sum over n rows of at[:][i] weight_i phi_i.
  void absorb_turned(const R *at, const R *phi, int64_t n, R shift, R *one, R *two) {
    const int64_t Cs = call.Cs;
    if (shift == -INF<R>) return;
    if (call.levels) {
      for (int64_t d = 0; d <= p.Dv; ++d)
        for (int64_t i = 0; i < n; i += N) store(scaled_t + d * Cs + i, load(at + d * Cs + i) * load(weight + i));
      at = scaled_t;
    }
    product<R>(p.Dv + 1, call.M, n, at, Cs, phi, call.Ms,
               JoinBoth<R>{{one, call.Ms, shift}, {two, call.Ms, shift}});
  }
  void absorb_keys(Span s, R *one, R *two) {
    R highest = -INF<R>;
    for (int64_t j = 0; j < s.nk; ++j) highest = most(highest, level[j]);
    for (int64_t j = 0; j < call.Cs; ++j) weight[j] = j < s.nk ? power(level[j], highest) : 0;
    absorb_turned(vt, phi_k, s.nk, highest, one, two);
  }
  void absorb_queries(Span s, R *one, R *two) {  // a row counts 2^-top
    R highest = -INF<R>;
    for (int64_t i = 0; i < s.nq; ++i)
      if (inverse[i] != 0) highest = most(highest, -top[i]);
    for (int64_t i = 0; i < call.Cs; ++i) weight[i] = i < s.nq && inverse[i] != 0 ? power(-top[i], highest) : 0;
    absorb_turned(gt, phi_q, s.nq, highest, one, two);
  }

  // From dphi (destroyed) to dx, rows of D.
  void chain(const R *phi, const R *x, int64_t stride, int64_t n, bool key, R *to) {
    const int64_t Ms = call.Ms, D = p.D;
    for (int64_t i = 0; i < n; ++i) {
      R *d = dphi + i * Ms;
      V sums = {};
      for (int64_t m = 0; m < call.M; m += N) {
        const V f = load(phi + i * Ms + m);
        V y = load(d + m);
        if (p.map == ELU) y *= -vmax(-f, all((R)-1));
        if (p.map == RELU) y = f > (R)0 ? y : V{};
        if (p.map == EXP) y *= f;
        store(d + m, y), sums += y;
      }
      R total = 0;
      for (int r = 0; r < N; ++r) total += sums[r];
      weight[i] = total;
      if (!call.projected)
        write(d, call.root, D, to + i * D);
    }
    if (call.projected) {
      product<R>(n, D, call.M, dphi, Ms, call.from_features, call.Ds, Set<R>{dx, call.Ds});
      for (int64_t i = 0; i < n; ++i) {
        // A query's own |x|^2 cancels in the quotient.
        const R share = call.levels && key ? weight[i] * (R)p.scale : 0;
        for (int64_t m = 0; m < D; ++m) to[i * D + m] = dx[i * call.Ds + m] - (share == 0 ? 0 : share * x[i * stride + m]);
      }
    }
    if (key)
      for (int64_t i = 0; i < n; ++i)
        if (!kept[i]) memset(to + i * D, 0, D * sizeof(R));
  }

  void absorb_block_keys(int64_t b, int64_t kv, Span block, R *state) {
    for (int64_t c = 0; c < call.chunks(block); ++c) {
      const Span s = call.chunk(block, c);
      if (!s.nk) continue;
      take_keys(b, kv, s);
      flip(v, call.Vs, s.nk, p.Dv + 1, vt, call.Cs);
      absorb_keys(s, state, (R *)nullptr);
    }
  }
  void emit_block_queries(int64_t b, int64_t kv, Span block, R *state, R *sum) {
    const int64_t Ms = call.Ms, Vs = call.Vs, Cs = call.Cs, M = call.M, U = p.Dv + 1;
    for (int64_t c = 0; c < call.chunks(block); ++c) {
      const Span s = call.chunk(block, c);
      const R shift = state[0];
      if (s.nk) {
        take_keys(b, kv, s);
        flip(v, Vs, s.nk, U, vt, Cs);
      }
      for (int64_t h = kv * call.group; h < (kv + 1) * call.group; ++h) {
        take_queries(b, h, s);
        take_gradients(b, h, s);
        product<R>(s.nq, M, U, g, Vs, state + HEADER, Ms, Set<R>{dphi, Ms});
        if (call.levels) {
          for (int64_t i = 0; i < s.nq; ++i) weight[i] = power(shift, finite(top[i]));
          scale_rows(dphi, Ms, s.nq, dphi);
        }
        for (int64_t i = 0; s.nk && i < s.nq; i += TILE_ROWS) {
          const int64_t rows = least(TILE_ROWS, s.nq - i), keys = least(i + rows, s.nk);
          product<R>(rows, keys, U, g + i * Vs, Vs, vt, Cs, Set<R>{pairs + i * Cs, Cs});
          for (int64_t r = i; r < i + rows; ++r) {
            R *row = pairs + r * Cs;
            if (call.levels) dress_row(row, 0, keys, top[r]);
            for (int64_t j = r + 1; j < keys; ++j) row[j] = 0;
          }
          product<R>(rows, M, keys, pairs + i * Cs, Cs, phi_k, Ms, Add<R>{dphi + i * Ms, Ms});
        }
        chain(phi_q, q_rows, q_stride, s.nq, false, (R *)p.dq + ((b * p.H + h) * p.Tq + s.q) * p.D);
      }
      if (s.nk) absorb_keys(s, state, sum);
    }
  }

  void absorb_block_queries(int64_t b, int64_t kv, Span block, R *state) {
    for (int64_t c = call.chunks(block) - 1; c >= 0; --c) {
      const Span s = call.chunk(block, c);
      for (int64_t h = kv * call.group; s.nq && h < (kv + 1) * call.group; ++h) {
        take_queries(b, h, s);
        take_gradients(b, h, s);
        flip(g, call.Vs, s.nq, p.Dv + 1, gt, call.Cs);
        absorb_queries(s, state, (R *)nullptr);
      }
    }
  }
  void emit_block_keys(int64_t b, int64_t kv, Span block, R *state, R *sum) {
    const int64_t Ms = call.Ms, Vs = call.Vs, Cs = call.Cs, M = call.M, U = p.Dv + 1;
    for (int64_t c = call.chunks(block) - 1; c >= 0; --c) {
      const Span s = call.chunk(block, c);
      R *dv = out, *dk = more;
      if (s.nk) {
        take_keys(b, kv, s);
        product<R>(s.nk, M, U, v, Vs, state + HEADER, Ms, Set<R>{dk, Ms});
        flip(state + HEADER, Ms, p.Dv, M, turned, Vs);
        product<R>(s.nk, p.Dv, M, phi_k, Ms, turned, Vs, Set<R>{dv, Vs});
        if (call.levels) {  // no key is above a later row's top: at most 1
          for (int64_t j = 0; j < s.nk; ++j) weight[j] = state[0] == -INF<R> ? 0 : power(level[j], -state[0]);
          scale_rows(dk, Ms, s.nk, dk), scale_rows(dv, Vs, s.nk, dv);
        }
      }
      for (int64_t h = kv * call.group; s.nq && h < (kv + 1) * call.group; ++h) {
        take_queries(b, h, s);
        take_gradients(b, h, s);
        flip(g, Vs, s.nq, U, gt, Cs);
        if (s.nk) flip(phi_q, Ms, s.nq, M, phi_qt, Cs);
        for (int64_t j = 0; j < s.nk; j += TILE_ROWS) {
          const int64_t rows = least(TILE_ROWS, s.nk - j), from = j / N * N, queries = s.nq - from;
          product<R>(rows, queries, M, phi_k + j * Ms, Ms, phi_qt + from, Cs, Set<R>{pairs + j * Cs + from, Cs});
          product<R>(rows, queries, U, v + j * Vs, Vs, gt + from, Cs, Set<R>{slopes + j * Cs + from, Cs});
          for (int64_t r = j; r < j + rows; ++r) {
            R *w = pairs + r * Cs, *dw = slopes + r * Cs;
            for (int64_t i = from; call.levels && kept[r] && i < s.nq; i += N) {
              const V ratio = vexp2(level[r] - load(top + i));
              store(w + i, load(w + i) * ratio), store(dw + i, load(dw + i) * ratio);
            }
            for (int64_t i = from; i < r; ++i) w[i] = dw[i] = 0;
          }
          product<R>(rows, p.Dv, queries, pairs + j * Cs + from, Cs, g + from * Vs, Vs, Add<R>{dv + j * Vs, Vs});
          product<R>(rows, M, queries, slopes + j * Cs + from, Cs, phi_q + from * Ms, Ms, Add<R>{dk + j * Ms, Ms});
        }
        absorb_queries(s, state, sum);
      }
      const int64_t at = (b * p.Hkv + kv) * p.Tk + s.k;
      if (p.dv)
        for (int64_t j = 0; j < s.nk; ++j) memcpy((R *)p.dv + (at + j) * p.Dv, dv + j * Vs, p.Dv * sizeof(R));
      if (p.dk && s.nk) {
        R *const spare = dphi;
        dphi = dk;
        chain(phi_k, k_rows, k_stride, s.nk, true, (R *)p.dk + at * p.D);
        dphi = spare;
      }
    }
  }
};

// --- who does what ------------------------------------------------------------------------------------------------------

// A sweep over the blocks, from the first to the last or back. Block n has sources that go into the state (`absorbs`),
// targets that read it (`emits`), or both.
enum Sweep { ROWS_FORWARD, QUERIES_BACKWARD, KEYS_BACKWARD };

template <class R, Sweep SWEEP> struct Way {
  const FeatureCall<R> &call;
  static constexpr bool FROM_END = SWEEP == KEYS_BACKWARD;

  Span block(int64_t n) const { return call.block(FROM_END ? call.blocks() - 1 - n : n); }
  bool absorbs(Span s) const { return FROM_END ? s.nq : s.nk; }
  bool emits(Span s) const { return FROM_END ? s.nk : s.nq; }

  void absorb(Desk<R> &desk, int64_t head, Span s, R *state) const {
    const int64_t b = head / call.p.Hkv, kv = head % call.p.Hkv;
    clear(state, call.state_size());
    if (SWEEP == ROWS_FORWARD) desk.absorb_block(b, kv, s, state);
    if (SWEEP == QUERIES_BACKWARD) desk.absorb_block_keys(b, kv, s, state);
    if (SWEEP == KEYS_BACKWARD) desk.absorb_block_queries(b, kv, s, state);
  }
  void emit(Desk<R> &desk, int64_t head, Span s, R *state, R *sum) const {
    const int64_t b = head / call.p.Hkv, kv = head % call.p.Hkv;
    if (sum) clear(sum, call.state_size());
    if (SWEEP == ROWS_FORWARD) desk.emit_block(b, kv, s, state, sum);
    if (SWEEP == QUERIES_BACKWARD) desk.emit_block_queries(b, kv, s, state, sum);
    if (SWEEP == KEYS_BACKWARD) desk.emit_block_keys(b, kv, s, state, sum);
  }
};

template <class R, Sweep SWEEP> void sweep(const FeatureCall<R> &call, char *desks) {
  const Way<R, SWEEP> way{call};
  const int64_t size = call.state_size(), blocks = call.blocks(), threads = call.p.threads;
  const int64_t desk_bytes = call.desk_size() * (int64_t)sizeof(R);
  if (call.by_head) {
    parallel(threads, call.heads, [&](int64_t head, int64_t thread) {
      Desk<R> desk(call, desks + thread * desk_bytes);
      clear(desk.start, size);
      for (int64_t n = 0; n < blocks && !halted(); ++n) {
        const Span s = way.block(n);
        const bool on = n + 1 < blocks && way.absorbs(s);  // the last one's sum is for nobody
        if (way.emits(s)) {
          memcpy(desk.run, desk.start, size * sizeof(R));
          way.emit(desk, head, s, desk.run, on ? desk.local : nullptr);
        } else if (on) {
          way.absorb(desk, head, s, desk.local);
        }
        if (on) join_states(desk.start, desk.local, size);
      }
    });
    return;
  }
  const auto state = [&](int64_t head, int64_t n) { return call.states + (head * (blocks + 1) + n) * size; };
  parallel(threads, call.heads * blocks, [&](int64_t job, int64_t thread) {
    Desk<R> desk(call, desks + thread * desk_bytes);
    const Span s = way.block(job % blocks);
    if (job % blocks + 1 < blocks && way.absorbs(s)) way.absorb(desk, job / blocks, s, state(job / blocks, job % blocks));
  });
  parallel(threads, call.heads, [&](int64_t head, int64_t thread) {
    Desk<R> desk(call, desks + thread * desk_bytes);
    clear(desk.start, size);
    for (int64_t n = 0; n < blocks; ++n) {  // sums become what was before them
      const bool on = n + 1 < blocks && way.absorbs(way.block(n));
      if (on) memcpy(desk.local, state(head, n), size * sizeof(R));
      memcpy(state(head, n), desk.start, size * sizeof(R));
      if (on) join_states(desk.start, desk.local, size);
    }
  });
  parallel(threads, call.heads * blocks, [&](int64_t job, int64_t thread) {
    Desk<R> desk(call, desks + thread * desk_bytes);
    const Span s = way.block(job % blocks);
    if (way.emits(s)) way.emit(desk, job / blocks, s, state(job / blocks, job % blocks), nullptr);
  });
}

template <class R> int64_t features_scratch_as(const Problem &p) { return FeatureCall<R>(p, true).bytes(); }

template <class R> void features_as(const Problem &p, bool backward) {
  FeatureCall<R> call(p, backward);
  Arena arena{(char *)((p.scratch + 63) / 64 * 64)};
  call.pack(arena);
  if (!call.by_head) call.states = arena.take<R>(call.heads * (call.blocks() + 1) * call.state_size());
  if (!backward) return sweep<R, ROWS_FORWARD>(call, arena.next);
  if (p.dq) sweep<R, QUERIES_BACKWARD>(call, arena.next);
  if (p.dk || p.dv) sweep<R, KEYS_BACKWARD>(call, arena.next);
}

}  // namespace
