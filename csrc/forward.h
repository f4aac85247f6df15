// Forward, KL: one pass over the keys per block of rows, all of a row's statistics in its lane.
//
//   for each block of L rows (lanes), for each block of keys that some row may read:
//     gate  <- the prior in base 2, if it does something here      [keys][L]
//     x     <- exponents: Q K^T, softcap, bias, temperature, gate   [keys][L]
//     m'    <- max x, if that is far above m: then what was summed is scaled by 2^(m - m'); else m
//     p     <- 2^(x - m'); sum p, p t, p t^2 with t = x - m'        (entropy and variance: two multiply-adds)
//     O^T   <- O^T + P^T V                                          [Dv][L]
//   at the end each row turns its sums into output, dual and statistics.
// Few rows over many keys (decoding): query heads that share a key head become rows of one block, and the keys are split
// into a number of parts that depends on the shape alone; parts are merged in order, so threads never change a result.
// Rows that fit one vector (NV = 1) have their products from few.h, and O lies in rows: [L][Dv].
#pragma once
#include "few.h"
#include "rows.h"

namespace {

// Keys per block. Few rows (NV = 1): a block's values wait in the first-level cache for their turn, 4 KiB of them at
// D = 64 (from memory: float32 by 32 keys is a tenth slower).
template <int NV> constexpr int64_t KEY_BLOCK = NV == 1 ? 32 : 96;
template <int NV, class T> constexpr int64_t KEY_STEP = NV == 1 && sizeof(T) > 2 ? 16 : KEY_BLOCK<NV>;
// How far exponents may lie above what they are measured from before the sums are brought to a new reference, which
// takes a sweep over O: that would be most blocks of keys, since some row among L mostly finds a larger score.
constexpr int SLACK = 4;
constexpr int64_t ROW_BLOCKS = 4;  // blocks of rows that share a block of keys while it is in the cache

struct Wanted {
  bool moments, collision, apart, prior_mass, count, first, spread, drop;
  Wanted(const Problem &p, const Terms &terms) {
    moments = p.entropy || p.score_variance || p.kl || p.cost;
    collision = p.collision, count = p.support || p.kl || p.free_energy;
    apart = terms.prior && (p.score_variance || p.kl || p.cost || p.max_scores);
    prior_mass = terms.prior && (p.kl || (p.free_energy && p.marginal >= regard::RELAX));
    first = p.first_key_mass, spread = p.spread, drop = (bool)p.dropout_key;
  }
};

// O <- r O, for vector n of a block's rows.
template <class R, int NV> INLINE void rescale(R *o, int64_t Dv, int n, Vec<R> r) {
  constexpr int N = Simd<R>::N, L = N * NV;
  if (NV == 1)
    for (int i = 0; i < L; ++i)
      for (int64_t d = 0; d < Dv; ++d) o[i * Dv + d] *= r[i];
  else
    for (int64_t d = 0; d < Dv; ++d) store(o + d * L + n * N, r * load(o + d * L + n * N));
}

// What a block of rows has summed so far. Weights are relative to 2^m, scores to the anchor (that of the heaviest key).
template <class R, int NV> struct State {
  using V = Vec<R>;
  V m[NV], high[NV];                     // the reference, at most SLACK below the largest x; the largest x
  V l[NV], e1[NV], e2[NV];               // sums of p, p t, p t^2
  V collision[NV], count[NV], first[NV], spread[NV];
  V top[NV], anchor[NV], y1[NV], y2[NV];  // max s; sums of p (s - anchor), p (s - anchor)^2
  V prior_top[NV], prior_sum[NV];         // of the prior's mass

  void clear() {
    memset((void *)this, 0, sizeof *this);
    for (int n = 0; n < NV; ++n) m[n] = high[n] = top[n] = first[n] = prior_top[n] = all(-INF<R>);
  }

  static V difference(V a, V b) {  // a - b for exponents a <= b, never NaN, bounded
    return a == -INF<R> ? V{} : vmax(all((R)-1000), a - b);
  }

  // Everything relative to a larger reference.
  V raise(int n, V to) {
    const V safe = to == -INF<R> ? V{} : to, r = vexp2(m[n] - safe), shift = difference(m[n], safe);
    e2[n] = r * (e2[n] + shift * ((R)2 * e1[n] + shift * l[n]));
    e1[n] = r * (e1[n] + shift * l[n]);
    l[n] *= r, y1[n] *= r, y2[n] *= r, spread[n] *= r, collision[n] *= r * r;
    m[n] = to;
    return r;
  }
  void move_anchor(int n, V to) {
    const V shift = anchor[n] - to;
    y2[n] += shift * ((R)2 * y1[n] + shift * l[n]);
    y1[n] += shift * l[n];
    anchor[n] = to;
  }
  V raise_prior(int n, V to) {
    const V safe = to == -INF<R> ? V{} : to, r = vexp2(prior_top[n] - safe);
    prior_sum[n] *= r;
    prior_top[n] = to;
    return safe;
  }

  // Add what another part of the keys gave to the same rows.
  void merge(State &other, R *ot, R *other_ot, int64_t Dv) {
    constexpr int L = Simd<R>::N * NV;
    for (int n = 0; n < NV; ++n) {
      const V to = vmax(m[n], other.m[n]);
      const V heavier = m[n] >= other.m[n] ? anchor[n] : other.anchor[n];
      move_anchor(n, heavier), other.move_anchor(n, heavier);
      const V r = raise(n, to), q = other.raise(n, to);
      rescale<R, NV>(ot, Dv, n, r), rescale<R, NV>(other_ot, Dv, n, q);
      l[n] += other.l[n], e1[n] += other.e1[n], e2[n] += other.e2[n];
      collision[n] += other.collision[n], count[n] += other.count[n], spread[n] += other.spread[n];
      y1[n] += other.y1[n], y2[n] += other.y2[n];
      first[n] = vmax(first[n], other.first[n]), top[n] = vmax(top[n], other.top[n]);
      high[n] = vmax(high[n], other.high[n]);
      const V prior = vmax(prior_top[n], other.prior_top[n]);
      raise_prior(n, prior), other.raise_prior(n, prior);
      prior_sum[n] += other.prior_sum[n];
    }
    for (int64_t at = 0; at < L * Dv; ++at) ot[at] += other_ot[at];
  }
};

// A thread's panels.
template <class R, int NV> struct Panels {
  static constexpr int64_t SIZE = KEY_BLOCK<NV> * Simd<R>::N * NV;
  R *x, *gate, *bias, *score, *spare;
  uint8_t *live;
  explicit Panels(Arena &arena)
      : x(arena.take<R>(SIZE)), gate(arena.take<R>(SIZE)), bias(arena.take<R>(SIZE)), score(arena.take<R>(SIZE)),
        spare(arena.take<R>(SIZE)), live(arena.take<uint8_t>(KEY_BLOCK<NV>)) {}
};

// x -> p in place, for one vector of rows; the block's sums are made apart and then added: shorter chains of rounding.
template <class R, int NV, bool MOMENTS, bool ZERO>
__attribute__((noinline)) void weigh(State<R, NV> &state, int n, Vec<R> safe, int64_t keys, R *x) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  V l = {}, e1 = {}, e2 = {};
  const auto some = [&](int64_t j, auto count) {
    constexpr int U = decltype(count)::value;
    V t[U], p[U];
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) t[u] = vmax(all(FLOOR<R, ZERO>), load(x + (j + u) * L + n * N) - safe);
    vexp2<ZERO>(t, p);
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      store(x + (j + u) * L + n * N, p[u]);
      l += p[u];
      if (MOMENTS) {
        const V pt = p[u] * t[u];
        e1 += pt;
        e2 += pt * t[u];
      }
    }
  };
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2) some(j, Count<2>());  // four at once do not fit 16 registers
  for (; j < keys; ++j) some(j, Count<1>());
  state.l[n] += l;
  if (MOMENTS) state.e1[n] += e1, state.e2[n] += e2;
}

// One block of keys for one block of rows; k and v point at key `first`. T: what they are stored as; R unless NV = 1.
template <class R, int NV, class T>
void attend(const Problem &p, const Terms &terms, const Wanted &want, const Rows<R, NV> &rows, State<R, NV> &state,
            const R *qt, R *ot, int64_t first, int64_t keys, const T *k, int64_t k_stride, const T *v, int64_t v_stride,
            Panels<R, NV> &panels) {
  using V = Vec<R>;
  using M = Mask<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  R *x = panels.x;
  const Gate gate = open_gate(p, terms, rows, first, keys, panels.gate, panels.bias, panels.spare, panels.live);
  if (gate == CLOSED) return;
  V tops[NV];
  for (int n = 0; n < NV; ++n) tops[n] = all(-INF<R>);
  const bool plain = NV > 1 && gate == OPEN && terms.folded;  // the product finds the largest on its way
  const int64_t some = (rows.n + 3) / 4 * 4;                   // rows, as few.h counts them
  if constexpr (NV == 1)
    few_scores(qt, some, p.D, k, k_stride, keys, x, L, v, v_stride, p.Dv);
  else if (plain)
    scores<R, NV, true>(qt, k, k_stride, p.D, keys, x, tops);
  else
    scores<R, NV, false>(qt, k, k_stride, p.D, keys, x);
  if (gate == PARTLY || !terms.folded)
    dress(p, terms, rows, keys, x, gate == PARTLY ? panels.gate : nullptr, panels.bias,
          want.apart ? panels.score : nullptr, (R *)nullptr);

  for (int n = 0; n < NV; ++n) {
    if (!plain)
      for (int64_t j = 0; j < keys; ++j) tops[n] = vmax(tops[n], load(x + j * L + n * N));
    const V high = vmax(state.high[n], tops[n]);
    state.high[n] = high;
    if (want.first && first == 0) state.first[n] = load(x + n * N);
    // The anchor goes with the heaviest key; where none is wanted, the reference may stay behind.
    const M higher = high > state.m[n] + (R)(want.apart ? 0 : SLACK);
    const V to = higher ? high : state.m[n];
    if (want.apart) {
      V anchor = state.anchor[n];
      for (int64_t j = 0; j < keys; ++j) {
        const V s = load(panels.score + j * L + n * N), e = load(x + j * L + n * N);
        state.top[n] = e > -INF<R> ? vmax(state.top[n], s) : state.top[n];
        anchor = (higher & (e == to)) ? s : anchor;
      }
      state.move_anchor(n, anchor);
    }
    if (any(higher)) {
      const V r = state.raise(n, to);
      rescale<R, NV>(ot, p.Dv, n, r);
    }
    const V safe = to == -INF<R> ? V{} : to;
    if (gate == OPEN)
      want.moments ? weigh<R, NV, true, false>(state, n, safe, keys, x) : weigh<R, NV, false, false>(state, n, safe, keys, x);
    else
      want.moments ? weigh<R, NV, true, true>(state, n, safe, keys, x) : weigh<R, NV, false, true>(state, n, safe, keys, x);
    if (want.apart) {
      V y1 = {}, y2 = {};
      for (int64_t j = 0; j < keys; ++j) {
        const V w = load(x + j * L + n * N);
        const V s = w > 0 ? load(panels.score + j * L + n * N) - state.anchor[n] : V{};
        y1 += w * s, y2 += w * s * s;
      }
      state.y1[n] += y1, state.y2[n] += y2;
    }
    if (want.collision)
      for (int64_t j = 0; j < keys; ++j) state.collision[n] += load(x + j * L + n * N) * load(x + j * L + n * N);
    if (want.spread) {
      const R *squares = (const R *)p.squares.data + p.squares.s0 * rows.b + p.squares.s1 * rows.kv;
      for (int64_t j = 0; j < keys; ++j) state.spread[n] += load(x + j * L + n * N) * squares[first + j];
    }
    if (want.count) {
      if (gate == OPEN)
        state.count[n] += (R)keys;
      else
        for (int64_t j = 0; j < keys; ++j)
          state.count[n] -= __builtin_convertvector(load(panels.gate + j * L + n * N) > -INF<R>, V);
    }
    if (want.prior_mass) {
      V top = state.prior_top[n];
      for (int64_t j = 0; j < keys; ++j) top = vmax(top, load(panels.gate + j * L + n * N));
      const V safe = state.raise_prior(n, top);
      for (int64_t j = 0; j < keys; ++j) state.prior_sum[n] += vexp2(load(panels.gate + j * L + n * N) - safe);
    }
    if (want.drop)
      for (int64_t j = 0; j < keys; ++j) {
        R *at = x + j * L + n * N;
        store(at, load(at) * rows.kept(p, first + j, n));
      }
  }
  if (p.out)
    each_run(gate == PARTLY ? panels.live : nullptr, keys, [&](int64_t from, int64_t to) {
      if constexpr (NV == 1)
        few_gather(x + from * L, L, some, v + from * v_stride, v_stride, to - from, p.Dv, ot,
                   k + (keys + from) * k_stride, k_stride, p.D);
      else
        gather<R, NV>(x + from * L, v + from * v_stride, v_stride, to - from, p.Dv, ot);
    });
}

template <class R> INLINE void put(int64_t to, int64_t at, R value) {
  if (to) ((R *)to)[at] = value;
}

// f of each lane: the C library's functions, which are exact enough and know every special case.
template <class V, class F> INLINE V each(V x, F f) {
  for (unsigned i = 0; i < sizeof(V) / sizeof(x[0]); ++i) x[i] = f(x[i]);
  return x;
}

// From sums to results: the definitions of statistics.py in closed form, a vector of rows at a time.
template <class R, int NV>
void finish(const Problem &p, const Terms &terms, const Rows<R, NV> &rows, const State<R, NV> &state, const R *ot) {
  using V = Vec<R>;
  using M = Mask<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  const auto exp2 = [](V x) { return each(x, [](R t) { return exp2_of(t); }); };
  const auto log2 = [](V x) { return each(x, [](R t) { return log2_of(t); }); };
  R share[L];
  const R mass = (R)p.mass, log_mass = (R)::log2(p.mass);
  const bool sink = p.marginal == regard::SINK;
  const V zero = {}, nothing = all(-INF<R>);
  for (int n = 0; n * N < rows.n; ++n) {
    const int lanes = least(N, rows.n - n * N);
    int64_t at[N];
    for (int i = 0; i < lanes; ++i) at[i] = rows.flat(p, n * N + i);
    const auto put = [&](int64_t to, V value) {
      if (to)
        for (int i = 0; i < lanes; ++i) ((R *)to)[at[i]] = value[i];
    };
    const V m = state.m[n], l = state.l[n], c = rows.c[n];
    const V tau = load(rows.temperature + n * N), level = load(rows.level + n * N);
    // A row is invalid if a weight is NaN (which the largest x need not show), or if all of its scores are -inf: 0/0.
    M invalid = l != l;
    if (const M lowest = (m <= LOWEST<R>) & (l > 0); p.marginal == regard::ROWS && any(lowest))
      for (int i = 0; i < lanes; ++i)  // at the lowest number: from a mask, or from the query
        if (lowest[i] && (m[i] == -INF<R> || !rows.finite(p.query, p.D, n * N + i))) invalid[i] = -1;
    const V nan = all(NOT_A_NUMBER<R>);
    const M keys = (m > -INF<R>) | invalid;
    // The distribution: 2^(x - top) / total, the null key included.
    const V null_x = sink ? level * c : nothing, top = invalid ? nan : m > null_x ? m : null_x;
    const V real = keys ? (sink ? exp2(m - top) : (R)1 + (m - top)) : zero;  // without a sink 1, or NaN
    const V null = sink ? exp2(null_x - top) : zero;
    const V total = l * real + null, log_total = log2(total);
    const M some = sink ? ~M{} : keys;
    const V lse = some ? (R)LN2 * (top + log_total) : nothing;
    const V part = some ? real / total : zero;  // of the distribution, per weight
    const V null_part = sink ? null / total : zero;
    // The plan: p = weight * factor.
    V factor = part * mass, dual = some ? tau * lse : nothing, value = dual;
    if (p.marginal == regard::ROWS && p.mass != 1) {
      dual -= tau * ((R)LN2 * log_mass);
      value = dual * mass;
    }
    // Kept apart for the backward pass: where all x are near the lowest number, their sum would lose log_total.
    V peak = some ? top : nothing, rest = log_total;
    if (p.marginal == regard::ROWS) rest -= log_mass;
    V prior_mass = state.count[n], log_prior_mass = p.kl ? log2(prior_mass) : zero;
    if (terms.prior && (p.kl || p.free_energy)) {
      log_prior_mass = keys ? state.prior_top[n] + log2(state.prior_sum[n]) : nothing;
      prior_mass = keys ? exp2(log_prior_mass) : zero;
    }
    if (p.marginal == regard::RELAX) {
      rest = (top + log_total) * (level / (tau + level)) - top;
      dual = dual * (level / (tau + level));
      const V sent = keys ? exp2(dual / level * (R)LOG2E) : zero;
      factor = part * sent;
      value = (tau + level) * sent - tau * prior_mass - level;
    } else if (p.marginal == regard::FREE) {
      dual = -level, peak = zero, rest = -level * c;
      factor = invalid ? nan : keys ? exp2(m + level * c) : zero;
      value = tau * (factor * l - prior_mass);
    }
    store(share + n * N, factor);
    put(p.lse, lse), put(p.dual, dual), put(p.peak, peak), put(p.rest, rest), put(p.free_energy, value);
    if (p.entropy || p.kl || p.score_variance || p.cost) {
      const V shift = keys ? m - top : zero, null_shift = sink ? null_x - top : zero;
      const V e1 = state.e1[n], e2 = state.e2[n], y1 = state.y1[n], y2 = state.y2[n], anchor = state.anchor[n];
      const V mean = part * (e1 + shift * l) + null_part * null_shift;
      const V entropy = some ? (R)LN2 * (log_total - mean) : zero;
      put(p.entropy, entropy < (R)0 ? zero : entropy);
      if (p.kl) {
        const V log_prior = terms.prior ? (keys ? part * (l * (m - c * anchor) + e1 - c * y1) : zero) : zero;
        if (sink) log_prior_mass = log2(exp2(log_prior_mass) + (R)1);
        const V kl = some ? (R)LN2 * (log_prior_mass - log_prior) - entropy : zero;
        put(p.kl, kl < (R)0 ? zero : kl);
      }
      if (p.score_variance) {
        V variance;
        if (terms.prior) {
          const V away = sink ? (keys ? level - anchor : zero) : zero;
          const V mean_y = part * y1 + null_part * away, square = part * y2 + null_part * away * away;
          variance = (square - mean_y * mean_y) / (tau * tau);
        } else {
          const V square = part * (e2 + shift * ((R)2 * e1 + shift * l)) + null_part * null_shift * null_shift;
          variance = (R)(LN2 * LN2) * (square - mean * mean);
        }
        put(p.score_variance, some & ~(variance < (R)0) ? variance : zero);
      }
      if (p.cost) {
        const V sum = terms.prior ? anchor * l + y1 : (m * l + e1) / c;
        put(p.cost, keys ? -factor * sum : zero);
      }
    }
    const V high = state.high[n];
    put(p.max_scores, invalid ? nan : terms.prior ? state.top[n] : keys ? high / c : nothing);
    if (p.max_weight) {
      const V weight = keys ? factor * exp2(high - m) : factor;  // vmax: NaN stays
      put(p.max_weight, vmax(null_part, weight));
    }
    put(p.collision, factor * factor * state.collision[n] + null_part * null_part);
    put(p.support, invalid ? nan : state.count[n]);
    if (p.first_key_mass) put(p.first_key_mass, keys ? factor * exp2(state.first[n] - m) : zero);
    put(p.mass_sent, factor * l);
    put(p.spread, factor * state.spread[n]);
  }
  if (p.out) {
    R *out[L];
    for (int i = 0; i < rows.n; ++i) out[i] = (R *)p.out + rows.flat(p, i) * p.Dv;
    if (NV > 1) return to_rows(ot, L, share, rows.n, p.Dv, out);
    for (int i = 0; i < rows.n; ++i)
      for (int64_t d = 0; d < p.Dv; ++d) out[i][d] = ot[i * p.Dv + d] * share[i];
  }
}

// How the work is cut: by the shape alone.
template <class R, int NV> struct Cut {
  static constexpr int L = Simd<R>::N * NV;
  bool packed;
  int64_t units, rows, blocks, tasks, splits, keys;

  explicit Cut(const Problem &p) {
    const int64_t group = p.H / p.Hkv;
    packed = group > 1 && p.Tq < 16;
    units = p.B * (packed ? p.Hkv : p.H), rows = packed ? p.Tq * group : p.Tq;
    const int64_t blocks_of_rows = (rows + L - 1) / L;
    // Few rows: all of them in one task, so that the keys are read once.
    blocks = least(ROW_BLOCKS, p.Tq < 16 ? blocks_of_rows : most((int64_t)1, units * blocks_of_rows / 32));
    tasks = (blocks_of_rows + blocks - 1) / blocks;
    splits = least((64 + units * tasks - 1) / (units * tasks), most((int64_t)1, p.Tk / 512));
    if (units * tasks >= 32) splits = 1;
    keys = (p.Tk + splits - 1) / splits;
    keys = (keys + KEY_BLOCK<NV> - 1) / KEY_BLOCK<NV> * KEY_BLOCK<NV>;
  }
  // A block of rows: transposed queries, transposed output, sums.
  int64_t block_bytes(const Problem &p) const {
    return L * (p.D + p.Dv) * sizeof(R) + sizeof(Rows<R, NV>) + sizeof(State<R, NV>) + 512;
  }
  int64_t thread_bytes(const Problem &p) const {
    return blocks * block_bytes(p) + (5 * Panels<R, NV>::SIZE + KEY_BLOCK<NV> * (p.D + p.Dv)) * sizeof(R) + KEY_BLOCK<NV> + 1024;
  }
  int64_t part_bytes(const Problem &p) const {
    return splits > 1 ? (L * p.Dv * (int64_t)sizeof(R) + (int64_t)sizeof(State<R, NV>) + 63) / 64 * 64 : 0;
  }
  int64_t parts() const { return units * tasks * blocks * splits; }
  int64_t bytes(const Problem &p) const { return p.threads * thread_bytes(p) + parts() * part_bytes(p) + 128; }

  void place(const Problem &p, Rows<R, NV> &r, int64_t unit, int64_t block) const {
    const int64_t group = p.H / p.Hkv, heads = packed ? p.Hkv : p.H;
    const int64_t b = unit / heads, h = packed ? unit % heads * group : unit % heads;
    r.place(p, b, h / group, h, packed, block * L, least((int64_t)L, rows - block * L));
  }
};

template <class R, int NV, class T> void forward_as(const Problem &p) {
  using RowsOf = Rows<R, NV>;
  using StateOf = State<R, NV>;
  const Terms terms(p);
  const Wanted want(p, terms);
  const Cut<R, NV> cut(p);
  constexpr int L = RowsOf::L;
  char *scratch = (char *)((p.scratch + 63) / 64 * 64);
  char *parts = scratch + p.threads * cut.thread_bytes(p) / 64 * 64 + 64;
  const int64_t part_bytes = cut.part_bytes(p), jobs = cut.units * cut.tasks * cut.splits;
  const int64_t all_blocks = (cut.rows + L - 1) / L;

  parallel(p.threads, jobs, [&](int64_t job, int64_t thread) {
    const int64_t split = job % cut.splits, task = cut.tasks - 1 - job / cut.splits % cut.tasks;  // longest rows first
    const int64_t unit = job / cut.splits / cut.tasks;
    Arena arena{scratch + thread * (cut.thread_bytes(p) / 64 * 64)};
    Panels<R, NV> panels(arena);
    if (NV == 1) memset(panels.x, 0, Panels<R, NV>::SIZE * sizeof(R));  // lanes without a row are not written
    R *k_spare = arena.take<R>(KEY_BLOCK<NV> * p.D), *v_spare = arena.take<R>(KEY_BLOCK<NV> * p.Dv);
    RowsOf *rows[ROW_BLOCKS];
    StateOf *state[ROW_BLOCKS];
    R *qt[ROW_BLOCKS], *ot[ROW_BLOCKS];
    int64_t lo = p.Tk, hi = 0;
    const int64_t first_block = task * cut.blocks, blocks = least(cut.blocks, all_blocks - first_block);
    for (int64_t g = 0; g < blocks; ++g) {
      rows[g] = arena.take<RowsOf>(1), state[g] = arena.take<StateOf>(1);
      qt[g] = arena.take<R>(L * p.D), ot[g] = arena.take<R>(L * p.Dv);
      cut.place(p, *rows[g], unit, first_block + g);
      state[g]->clear();
      memset(ot[g], 0, L * p.Dv * sizeof(R));
      if constexpr (NV == 1) {
        rows[g]->gather_rows(p.query, p.D, qt[g], p.D, [&](int i) { return rows[g]->factor(p, terms, i); });
        even_odd<R, T>(qt[g], rows[g]->n, p.D);
      } else
        rows[g]->transpose(p.query, p.D, qt[g], [&](int i) { return rows[g]->factor(p, terms, i); });
      lo = least(lo, rows[g]->lo), hi = most(hi, rows[g]->hi);
    }
    lo = most(lo, split * cut.keys), hi = least(hi, (split + 1) * cut.keys);
    for (int64_t from = lo; from < hi; from += KEY_STEP<NV, T>) {
      const int64_t keys = least(KEY_STEP<NV, T>, hi - from);
      int64_t k_stride, v_stride;
      const T *k = as_rows<R, T>(p.key, rows[0]->b, rows[0]->kv, from, keys, p.D, k_spare, k_stride);
      const T *v = as_rows<R, T>(p.value, rows[0]->b, rows[0]->kv, from, keys, p.Dv, v_spare, v_stride);
      for (int64_t g = 0; g < blocks; ++g) {
        const int64_t a = most(from, rows[g]->lo), z = least(from + keys, rows[g]->hi);
        if (a < z)
          attend(p, terms, want, *rows[g], *state[g], qt[g], ot[g], a, z - a, k + (a - from) * k_stride, k_stride,
                 v + (a - from) * v_stride, v_stride, panels);
      }
    }
    for (int64_t g = 0; g < blocks; ++g) {
      if (cut.splits == 1) {
        if (NV == 1) in_order<R, T>(ot[g], rows[g]->n, p.Dv);
        finish(p, terms, *rows[g], *state[g], ot[g]);
      } else {
        char *part = parts + ((unit * cut.tasks * cut.blocks + first_block + g) * cut.splits + split) * part_bytes;
        memcpy(part, state[g], sizeof(StateOf));
        memcpy(part + sizeof(StateOf), ot[g], L * p.Dv * sizeof(R));
      }
    }
  });
  if (cut.splits == 1) return;
  parallel(p.threads, cut.units * all_blocks, [&](int64_t job, int64_t) {
    const int64_t unit = job / all_blocks, block = job % all_blocks;
    RowsOf rows;
    cut.place(p, rows, unit, block);
    char *part = parts + (unit * cut.tasks * cut.blocks + block) * cut.splits * part_bytes;
    StateOf *state = (StateOf *)part;
    R *ot = (R *)(part + sizeof(StateOf));
    for (int64_t split = 1; split < cut.splits; ++split) {
      char *other = part + split * part_bytes;
      state->merge(*(StateOf *)other, ot, (R *)(other + sizeof(StateOf)), p.Dv);
    }
    if (NV == 1) in_order<R, T>(ot, rows.n, p.Dv);
    finish(p, terms, rows, *state, ot);
  });
}

}  // namespace
