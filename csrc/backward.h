// Backward, KL: nothing of the plan was kept; it is made again from the saved dual (kept in two parts).
//
//   task = a key/value head and a chunk of keys. For each query head that reads it, for each batch of row blocks:
//     Q^T, dO^T (lanes = rows) and Q, dO as rows; b = the baseline from <dO, O>
//     for each block of keys in the chunk, for each block of rows that may read it:
//       p  <- 2^(x - peak - rest);  U <- dO V^T;  G <- p (u - A - B log2 p)      [keys][L]   (theory: the advantage; A, B below)
//       dV <- dV + P dO;  dK <- dK + G Q;  dQ^T <- dQ^T + G^T K
// A chunk owns its keys, so dK and dV are summed in one fixed order; rows get one part of dQ per chunk, added in order later.
// The number of chunks depends on the shape alone. G = tau dL/ds; scale and 1/tau are multiplied into the rows of Q and into
// dQ at its end. With mu = (mass of the plan)/(mass of the distribution) and incoming gradients of lse and entropy H:
//   dL/ds_j = (p_j/tau) [u_j - b + (g_lse - g_H (log p_j - log mu + H))/mu]
#pragma once
#include "forward.h"
#include "links.h"
#include "lists.h"

namespace {

constexpr int64_t BACK_KEYS = 96;    // keys per block
constexpr int64_t WINDOW_KEYS = 256;  // keys at least that a row's list is read for at a time
constexpr int64_t BATCH_ROWS = 960;  // rows per batch: their transposes stay in the second-level cache

// A block of rows in the backward pass.
template <class R> struct BackRows {
  static constexpr int NV = 3, L = Simd<R>::N * NV;
  using V = Vec<R>;
  Rows<R, NV> rows;
  V peak[NV], rest[NV];             // the dual in base 2, in two parts; rest is +inf in a row without keys: p = 0
  V a[NV], b[NV], edge[NV], per_mass[NV];
  V inverse_tau[NV], lambda[NV];    // lambda: the dual as it is, not in base 2
  V sum_g[NV], sum_gs[NV], sum_gd[NV], sum_ps[NV], sum_pd[NV], sum_gp[NV], sum_ga[NV];
  R dot[L];
  Mask<R> remote[NV];               // rows that rest on their prior alone (panel.h)
  V lift[NV];
  bool some_remote, has_lift;
  bool idle;  // some row has no key
  ListedKeys keys;            // the rows' lists, if they were kept (lists.h)
  const R *x;
  int64_t next[L], end[L];  // in them: the first key not yet visited, and where the list ends
  R *qt, *dot_t, *q, *d_out, *dqt;  // Q^T (rows with lists: Q), dO^T, scale/tau Q, dO, dQ^T
  R *dq;                            // not KL: what single pairs give to dQ
};

template <class R> struct BackPanels {
  static constexpr int64_t SIZE = BACK_KEYS * BackRows<R>::L;
  R *x, *u, *gate, *bias, *score, *slope, *spare, *kept, *dk, *dv, *k_spare, *v_spare, *k_padded, *v_padded;
  uint8_t *live;
  uint64_t *bits;  // lanes that give some weight to each key
  BackPanels(Arena &arena, const Problem &p) {
    R **panels[] = {&x, &u, &gate, &bias, &score, &slope, &spare, &kept};
    for (R **panel : panels) *panel = arena.take<R>(SIZE);
    dk = arena.take<R>(BACK_KEYS * padded<R>(p.D)), dv = arena.take<R>(BACK_KEYS * padded<R>(p.Dv));
    k_spare = arena.take<R>(BACK_KEYS * p.D), v_spare = arena.take<R>(BACK_KEYS * p.Dv);
    k_padded = arena.take<R>(BACK_KEYS * padded<R>(p.D)), v_padded = arena.take<R>(BACK_KEYS * padded<R>(p.Dv));
    live = arena.take<uint8_t>(BACK_KEYS), bits = arena.take<uint64_t>(BACK_KEYS);
  }
  static int64_t bytes(const Problem &p) {
    return (8 * SIZE + BACK_KEYS * (2 * padded<R>(p.D) + 2 * padded<R>(p.Dv) + p.D + p.Dv)) * (int64_t)sizeof(R) +
           9 * BACK_KEYS + 1280;
  }
};

template <class R> INLINE R of_row(const Tensor &t, int64_t at) { return element<R>(t.data, t.type, at); }

template <class R> INLINE R dot(const R *a, const R *b, int64_t n) {
  constexpr int N = Simd<R>::N;
  Vec<R> even = {}, odd = {};
  int64_t d = 0;
  for (; d + 2 * N <= n; d += 2 * N)
    even = multiply_add(load(a + d), load(b + d), even), odd = multiply_add(load(a + d + N), load(b + d + N), odd);
  for (; d + N <= n; d += N) even = multiply_add(load(a + d), load(b + d), even);
  even += odd;
  R total = 0;
  for (int i = 0; i < N; ++i) total += even[i];
  for (; d < n; ++d) total = multiply_add(a[d], b[d], total);
  return total;
}
// The same with a row of a tensor.
template <class R> R dot(const R *a, const Tensor &t, int64_t at, int64_t n) {
  if (t.s3 == 1 && t.type == (sizeof(R) == 4 ? regard::F32 : regard::F64)) return dot(a, (const R *)t.data + at, n);
  R total = 0;
  for (int64_t d = 0; d < n; ++d) total += a[d] * of_row<R>(t, at + d * t.s3);
  return total;
}

template <class R> void prepare_link(const Problem &p, BackRows<R> &r);
template <class R> void take_lists(const Problem &p, BackRows<R> &r, int64_t lo);
template <class R, class Link>
void pull_link(const Problem &p, const Terms &terms, BackRows<R> &r, int64_t first, int64_t keys, const R *k,
               int64_t k_stride, const R *v, int64_t v_stride, R *dk, R *dv, BackPanels<R> &s);

// Transposes, the baseline, what the row adds to its advantage.
template <class R> void prepare(const Problem &p, const Terms &terms, BackRows<R> &r) {
  constexpr int N = Simd<R>::N, L = BackRows<R>::L;
  const Rows<R, 3> &rows = r.rows;
  const int64_t Dp = padded<R>(p.D), Dvp = padded<R>(p.Dv);
  r.idle = false;
  if (!r.keys) memset(r.dqt, 0, L * p.D * sizeof(R));
  memset(r.q, 0, L * Dp * sizeof(R)), memset(r.d_out, 0, L * Dvp * sizeof(R));
  const auto factor = [&](int i) { return rows.factor(p, terms, i); };
  if (r.keys)
    rows.gather_rows(p.query, p.D, r.qt, Dp, factor);
  else
    rows.transpose(p.query, p.D, r.qt, factor);
  for (int i = 0; i < rows.n; ++i)
    copy<R>(p.query.data, p.query.type, rows.at(p.query, i), p.query.s3, p.D, r.q + i * Dp, 1,
            (R)p.scale / rows.temperature[i]);
  if (p.grad_out) {
    if (!r.keys) rows.transpose(p.grad_out, p.Dv, r.dot_t, [](int) { return (R)1; });
    for (int i = 0; i < rows.n; ++i)
      copy<R>(p.grad_out.data, p.grad_out.type, rows.at(p.grad_out, i), p.grad_out.s3, p.Dv, r.d_out + i * Dvp, 1, (R)1);
  }
  for (int n = 0; n < 3; ++n) r.peak[n] = Vec<R>{}, r.rest[n] = all(INF<R>), r.a[n] = r.b[n] = r.inverse_tau[n] = r.lambda[n] = Vec<R>{};
  for (int n = 0; n < 3; ++n)
    r.sum_g[n] = r.sum_gs[n] = r.sum_gd[n] = r.sum_ps[n] = r.sum_pd[n] = r.sum_gp[n] = r.sum_ga[n] = Vec<R>{};
  if (p.family != regard::KL) return prepare_link(p, r);
  for (int i = 0; i < rows.n; ++i) {
    const int n = i / N, lane = i % N;
    const R tau = rows.temperature[i], level = rows.level[i];
    const R dual = p.saved_dual ? of_row<R>(p.saved_dual, rows.at(p.saved_dual, i)) : 0;
    const R sent = p.grad_out ? dot(r.d_out + i * Dvp, p.saved_out, rows.at(p.saved_out, i), p.Dv) : 0;
    r.dot[i] = sent;
    r.inverse_tau[n][lane] = 1 / tau, r.lambda[n][lane] = dual;
    const R peak = of_row<R>(p.saved_peak, rows.at(p.saved_peak, i));
    if (peak == -INF<R>) {  // no key may be read, and the query may hold anything
      memset(r.q + i * Dp, 0, Dp * sizeof(R));
      r.idle = true;
      continue;
    }
    r.peak[n][lane] = peak, r.rest[n][lane] = of_row<R>(p.saved_rest, rows.at(p.saved_rest, i));
    R log_mu = 0, base = sent;
    if (p.marginal == regard::ROWS && p.mass != 1) log_mu = (R)::log(p.mass), base = sent / (R)p.mass;
    if (p.marginal == regard::RELAX) log_mu = dual / level, base = sent / (R)::exp(log_mu) * (level / (level + tau));
    if (p.marginal == regard::FREE) base = 0;
    if (p.marginal == regard::FREE && p.saved_lse)
      log_mu = of_row<R>(p.saved_lse, rows.at(p.saved_lse, i)) + level / tau;
    const R inverse_mu = log_mu == 0 ? 1 : (R)::exp(-log_mu);
    R add = p.grad_lse ? of_row<R>(p.grad_lse, rows.at(p.grad_lse, i)) : 0;
    if (p.grad_entropy) {
      const R g = of_row<R>(p.grad_entropy, rows.at(p.grad_entropy, i));
      add -= g * (of_row<R>(p.saved_entropy, rows.at(p.saved_entropy, i)) - log_mu);
      r.b[n][lane] = g * inverse_mu * (R)LN2;
    }
    if (log_mu > -INF<R>) r.a[n][lane] = base - add * inverse_mu;
  }
}

// One block of keys for one block of rows.
template <class R>
void pull(const Problem &p, const Terms &terms, BackRows<R> &r, int64_t first, int64_t keys, const R *k, int64_t k_stride,
          const R *v, int64_t v_stride, R *dk, R *dv, BackPanels<R> &s) {
  constexpr int NV = 3, N = Simd<R>::N, L = N * NV;
  using V = Vec<R>;
  const Rows<R, NV> &rows = r.rows;
  const Gate gate = open_gate(p, terms, rows, first, keys, s.gate, s.bias, s.spare, s.live);
  if (gate == CLOSED) return;
  const uint8_t *live = gate == PARTLY ? s.live : nullptr;
  const bool scored = p.row_gs && !terms.folded;
  scores<R, NV, false>(r.qt, k, k_stride, p.D, keys, s.x);
  if (gate == PARTLY || !terms.folded)
    dress(p, terms, rows, keys, s.x, gate == PARTLY ? s.gate : nullptr, s.bias, scored ? s.score : nullptr,
          terms.capped ? s.slope : nullptr);
  if (p.grad_out)
    scores<R, NV, false>(r.dot_t, v, v_stride, p.Dv, keys, s.u);
  else
    memset(s.u, 0, keys * L * sizeof(R));
  const R *weights = s.x;  // what dV is made of: p, or what dropout left of it
  for (int n = 0; n < NV; ++n) {
    const V peak = r.peak[n], rest = r.rest[n], a = r.a[n], b = r.b[n];
    const auto some = [&](int64_t j, auto count, auto exact) {
      constexpr int U = decltype(count)::value;
      constexpr bool ZERO = decltype(exact)::value;
      V t[U], w[U];
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u)
        t[u] = vmax(all(FLOOR<R, ZERO>), load(s.x + (j + u) * L + n * N) - peak - rest);
      vexp2<ZERO>(t, w);
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) {
        const int64_t at = (j + u) * L + n * N;
        V utility = load(s.u + at);
        if (p.dropout_key) {
          const V kept = rows.kept(p, first + j + u, n);
          utility *= kept;
          store(s.kept + at, w[u] * kept);
        }
        V g = w[u] * (utility - a - b * t[u]);
        if (ZERO) g = w[u] == 0 ? V{} : g;  // a key that is not read may hold anything; a NaN weight stays
        store(s.x + at, w[u]), store(s.u + at, g);
      }
    };
    int64_t j = 0;
    if (p.row_gs)  // s - lambda, for the temperature
      for (int64_t at = n * N; at < keys * L; at += L)
        store(s.score + at, terms.folded ? (load(s.x + at) - peak - rest) / rows.c[n] : load(s.score + at) - r.lambda[n]);
    if (live || rows.n < L || r.idle) {
      for (; j + 4 <= keys; j += 4) some(j, Count<4>(), Count<true>());
      for (; j < keys; ++j) some(j, Count<1>(), Count<true>());
    } else {
      for (; j + 4 <= keys; j += 4) some(j, Count<4>(), Count<false>());
      for (; j < keys; ++j) some(j, Count<1>(), Count<false>());
    }
  }
  if (p.dropout_key) weights = s.kept;

  if (p.row_g || p.row_gp || p.row_gs || p.row_gd || p.key_g || p.key_ds || p.dense_g || p.dense_ds || p.key_mass) {
    using I = typename Simd<R>::I;
    for (int64_t j = 0; j < keys; ++j) {
      R key_g = 0, key_ds = 0, key_mass = 0;
      for (int n = 0; n < NV; ++n) {
        const int64_t at = j * L + n * N;
        const V g = load(s.u + at), ds = g * r.inverse_tau[n];
        r.sum_g[n] += g;
        if (p.row_gs) {
          const V w = load(s.x + at), score = w == 0 ? V{} : load(s.score + at);
          r.sum_gs[n] += g * score, r.sum_ps[n] += w * score;
        }
        if (p.row_gd) {
          const Mask<R> distance = (I)(first + j) - rows.position[n];
          const V away = __builtin_convertvector(distance < 0 ? -distance : distance, V);
          r.sum_gd[n] += g * away, r.sum_pd[n] += load(s.x + at) * away;
        }
        for (int i = 0; i < N; ++i) {
          key_g += g[i], key_ds += ds[i];
          if (p.key_mass && n * N + i < rows.n) key_mass += s.x[at + i];
        }
        for (int i = 0; i < N && n * N + i < rows.n; ++i) {
          const int row = n * N + i;
          if (p.dense_g)
            ((R *)p.dense_g.data)[rows.at(p.dense_g, row) + (first + j) * p.dense_g.s3] += g[i];
          if (p.dense_ds)
            ((R *)p.dense_ds.data)[rows.at(p.dense_ds, row) + (first + j) * p.dense_ds.s3] += ds[i];
        }
      }
      const int64_t at = (rows.b * p.H + rows.head[0]) * p.Tk + first + j;
      if (p.key_g) ((R *)p.key_g)[at] += key_g;
      if (p.key_ds) ((R *)p.key_ds)[at] += key_ds;
      if (p.key_mass) ((R *)p.key_mass)[at] += key_mass;
    }
  }

  if (p.dv && p.grad_out) scatter<R, L>(weights, r.d_out, padded<R>(p.Dv), keys, dv);
  if (!(p.dq || p.dk)) return;
  if (terms.capped)
    for (int64_t at = 0; at < keys * L; at += N) store(s.u + at, load(s.u + at) * load(s.slope + at));
  if (live && terms.capped)
    for (int64_t at = 0; at < keys * L; at += N) store(s.u + at, load(s.x + at) == 0 ? V{} : load(s.u + at));
  if (p.dk) scatter<R, L>(s.u, r.q, padded<R>(p.D), keys, dk);
  if (p.dq)
    each_run(live, keys, [&](int64_t from, int64_t to) {
      gather<R, NV>(s.u + from * L, k + from * k_stride, k_stride, to - from, p.D, r.dqt);
    });
}

template <class R> struct BackCut {
  static constexpr int L = BackRows<R>::L;
  int64_t batch, keys;  // blocks of rows per batch, keys per chunk
  explicit BackCut(const Problem &p) {
    batch = least(BATCH_ROWS / L, (p.Tq + L - 1) / L);
    keys = (p.Tk + p.chunks - 1) / p.chunks;
    keys = (keys + BACK_KEYS - 1) / BACK_KEYS * BACK_KEYS;
  }
  int64_t block_bytes(const Problem &p) const {
    return L * (4 * padded<R>(p.D) + 2 * padded<R>(p.Dv)) * (int64_t)sizeof(R) + (int64_t)sizeof(BackRows<R>) + 512;
  }
  int64_t thread_bytes(const Problem &p) const {
    return (batch * block_bytes(p) + BackPanels<R>::bytes(p) + 63) / 64 * 64;
  }
  int64_t bytes(const Problem &p) const { return p.threads * thread_bytes(p) + 128; }
};

// Everything that chunk `chunk` of the keys gets from and gives to the query heads h ... h + heads - 1 of one batch entry.
template <class R, class Pull>
void pull_chunk(const Problem &p, const Terms &terms, int64_t b, int64_t kv, int64_t chunk, Arena arena, Pull pull_block) {
  constexpr int L = BackRows<R>::L, N = Simd<R>::N;
  const bool linked = p.family != regard::KL;
  const BackCut<R> cut(p);
  const int64_t group = p.H / p.Hkv, Dp = padded<R>(p.D), Dvp = padded<R>(p.Dv);
  const int64_t lo = chunk * cut.keys, hi = least(p.Tk, lo + cut.keys);
  const int64_t first_row = (b * p.Hkv + kv) * p.Tk + lo, own = most((int64_t)0, hi - lo);
  if (p.dk) memset((R *)p.dk + first_row * p.D, 0, own * p.D * sizeof(R));
  if (p.dv) memset((R *)p.dv + first_row * p.Dv, 0, own * p.Dv * sizeof(R));
  BackPanels<R> panels(arena, p);
  const Arena rest = arena;
  const bool as_they_lie = rows_of<R>(p.key, p.D) && rows_of<R>(p.value, p.Dv) && p.D == Dp && p.Dv == Dvp;
  BackRows<R> *blocks[BATCH_ROWS / L];
  for (int64_t h = kv * group; h < (kv + 1) * group; ++h)
    for (int64_t batch = 0; batch < p.Tq && !halted(); batch += cut.batch * L) {
      const int64_t n_blocks = least(cut.batch, (p.Tq - batch + L - 1) / L);
      arena = rest;
      int64_t from = hi, to = lo, pairs = 0;
      for (int64_t g = 0; g < n_blocks; ++g) {
        BackRows<R> &r = *(blocks[g] = arena.take<BackRows<R>>(1));
        r.qt = arena.take<R>(L * Dp), r.dot_t = arena.take<R>(L * p.Dv), r.dqt = arena.take<R>(L * p.D);
        r.q = arena.take<R>(L * Dp), r.d_out = arena.take<R>(L * Dvp);
        r.dq = linked ? arena.take<R>(L * Dp) : nullptr;
        const int64_t first = batch + g * L;
        r.rows.place(p, b, kv, h, false, first, least((int64_t)L, p.Tq - first));
        r.keys = {};
        if (p.saved_lists && !halted()) take_lists(p, r, lo);
        prepare(p, terms, r);
        if (r.keys && as_they_lie) {
          for (int i = 0; i < L; ++i) pairs += r.end[i] - r.next[i];
          continue;
        }
        from = least(from, most(lo, r.rows.lo)), to = most(to, least(hi, r.rows.hi));
      }
      if (as_they_lie && pairs) {
        // In windows of keys, so that they stay in the cache from row to row; wide enough to have some pairs of each row.
        const int64_t window = most(WINDOW_KEYS, (p.Tk - lo) * 8 * n_blocks * L / pairs);
        for (int64_t j = lo; j < hi; j += window)
          for (int64_t g = 0; g < n_blocks; ++g) {
            if (!blocks[g]->keys) continue;
            int64_t k_stride, v_stride;
            const int64_t keys = least(window, hi - j), at = (b * p.Hkv + kv) * p.Tk + j;
            const R *k = as_rows(p.key, b, kv, j, keys, p.D, panels.k_spare, k_stride);
            const R *v = as_rows(p.value, b, kv, j, keys, p.Dv, panels.v_spare, v_stride);
            pull_block(p, terms, *blocks[g], j, keys, k, k_stride, v, v_stride, (R *)p.dk + at * p.D,
                       (R *)p.dv + at * p.Dv, panels);
          }
      }
      for (int64_t j = from; j < to; j += BACK_KEYS) {
        const int64_t keys = least(BACK_KEYS, to - j);
        int64_t k_stride, v_stride;
        const R *k = as_rows(p.key, b, kv, j, keys, p.D, panels.k_spare, k_stride);
        const R *v = as_rows(p.value, b, kv, j, keys, p.Dv, panels.v_spare, v_stride);
        memset(panels.dk, 0, keys * Dp * sizeof(R)), memset(panels.dv, 0, keys * Dvp * sizeof(R));
        for (int64_t g = 0; g < n_blocks; ++g) {
          BackRows<R> &r = *blocks[g];
          const int64_t a = most(j, r.rows.lo), z = least(j + keys, r.rows.hi), skip = a - j;
          if (a < z && !(r.keys && as_they_lie))
            pull_block(p, terms, r, a, z - a, k + skip * k_stride, k_stride, v + skip * v_stride, v_stride,
                       panels.dk + skip * Dp, panels.dv + skip * Dvp, panels);
        }
        for (int64_t i = 0; i < keys; ++i) {
          const int64_t at = (b * p.Hkv + kv) * p.Tk + j + i;
          if (p.dk)
            for (int64_t d = 0; d < p.D; ++d) ((R *)p.dk)[at * p.D + d] += panels.dk[i * Dp + d];
          if (p.dv)
            for (int64_t d = 0; d < p.Dv; ++d) ((R *)p.dv)[at * p.Dv + d] += panels.dv[i * Dvp + d];
        }
      }
      for (int64_t g = 0; g < n_blocks; ++g) {
        const BackRows<R> &r = *blocks[g];
        R *dq[L], factor[L];
        for (int i = 0; i < r.rows.n; ++i) {
          const int64_t at = chunk * p.B * p.H * p.Tq + r.rows.flat(p, i);
          const bool remote = linked && r.remote[i / N][i % N];
          dq[i] = (R *)p.dq + at * p.D, factor[i] = remote ? 0 : (R)p.scale / r.rows.temperature[i];
          const R peak = r.peak[i / N][i % N];
          if (peak != peak) factor[i] = peak;  // an invalid row, even if all of its weights are 0
          put(p.row_dot, at, r.dot[i]);
          put(p.row_g, at, remote ? 0 : (R)r.sum_g[i / N][i % N]);
          put(p.row_gp, at, linked ? r.sum_gp[i / N][i % N] : r.sum_g[i / N][i % N]);
          put(p.row_ga, at, r.sum_ga[i / N][i % N]);
          put(p.row_gs, at, r.sum_gs[i / N][i % N]);
          put(p.row_gd, at, r.sum_gd[i / N][i % N]);
          put(p.row_ps, at, r.sum_ps[i / N][i % N]);
          put(p.row_pd, at, r.sum_pd[i / N][i % N]);
        }
        if (p.dq && !r.keys) to_rows(r.dqt, L, factor, r.rows.n, p.D, dq);
        if (p.dq && linked)
          for (int i = 0; i < r.rows.n; ++i)
            for (int64_t d = 0; d < p.D; ++d) dq[i][d] = (r.keys ? 0 : dq[i][d]) + r.dq[i * Dp + d] * factor[i];
      }
    }
}

template <class R> void backward_as(const Problem &p) {
  const Terms terms(p);
  const BackCut<R> cut(p);
  char *scratch = (char *)((p.scratch + 63) / 64 * 64);
  // Where batch entries or heads add up in one dense gradient, they take turns within a task.
  const bool shared = (p.dense_g && (!p.dense_g.s0 || !p.dense_g.s1)) || (p.dense_ds && (!p.dense_ds.s0 || !p.dense_ds.s1));
  const int64_t units = p.B * p.Hkv, turns = shared ? units : 1;
  parallel(p.threads, units * p.chunks / turns, [&](int64_t job, int64_t thread) {
    for (int64_t turn = 0; turn < turns; ++turn) {
      const int64_t unit = shared ? turn : job / p.chunks, chunk = shared ? job : job % p.chunks;
      const Arena arena{scratch + thread * cut.thread_bytes(p)};
      const auto chunk_by = [&](auto pull_block) {
        pull_chunk<R>(p, terms, unit / p.Hkv, unit % p.Hkv, chunk, arena, pull_block);
      };
      if (p.family == regard::KL)
        chunk_by(pull<R>);
      else
        with_link<R>(p, [&](auto tag) { chunk_by(pull_link<R, typename decltype(tag)::Link>); });
    }
  });
}

}  // namespace
