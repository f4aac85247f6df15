// Backward pass of attention by features (call.h has the formulas).
//
// Two sweeps (sweep.h). From the first block to the last, a running sum of phi(k_j) u_j^T gives dphi(q) and so dQ. From
// the last block to the first, a running sum of phi(q_i) g_i^T gives dphi(k) and dV. Both states are stored transposed:
// [Dv + 1][Ms].
#pragma once
#include "features/workspace.h"

namespace {

// g = [dout, -<dout, out>] / mass, for the rows of a chunk.
template <class R> inline void FeatureWorkspace<R>::take_gradients(int64_t b, int64_t h, Span s) {
  const Tensor &t = p.grad_out;
  const int64_t at = (b * p.H + h) * p.Tq + s.q;
  for (int64_t i = 0; i < s.nq; ++i) {
    const R total = ((const R *)p.saved_mass.data)[at + i], *done = (const R *)p.saved_out.data + (at + i) * p.Dv;
    top[i] = ((const R *)p.saved_peak.data)[at + i];
    inverse[i] = total >= TINY<R> ? 1 / total : 0;
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

// Add the sum over n rows of at[:][i] weight_i phi_i to one or two transposed states.
template <class R>
inline void FeatureWorkspace<R>::absorb_turned(const R *at, const R *phi, int64_t n, R shift, R *one, R *two) {
  const int64_t Cs = call.Cs;
  if (shift == -INF<R>) return;
  if (call.levels) {
    for (int64_t d = 0; d <= p.Dv; ++d)
      for (int64_t i = 0; i < n; i += N) store(scaled_t + d * Cs + i, load(at + d * Cs + i) * load(weight + i));
    at = scaled_t;
  }
  product<R>(p.Dv + 1, call.M, n, at, Cs, phi, call.Ms, JoinBoth<R>{{one, call.Ms, shift}, {two, call.Ms, shift}});
}

template <class R> inline void FeatureWorkspace<R>::absorb_keys(Span s, R *one, R *two) {
  R highest = -INF<R>;
  for (int64_t j = 0; j < s.nk; ++j) highest = max_of(highest, level[j]);
  for (int64_t j = 0; j < call.Cs; ++j) weight[j] = j < s.nk ? exp2_difference(level[j], highest) : 0;
  absorb_turned(vt, phi_k, s.nk, highest, one, two);
}

template <class R>
inline void FeatureWorkspace<R>::absorb_queries(Span s, R *one, R *two) {  // row i has the factor 2^-top_i
  R highest = -INF<R>;
  for (int64_t i = 0; i < s.nq; ++i)
    if (inverse[i] != 0) highest = max_of(highest, -top[i]);
  for (int64_t i = 0; i < call.Cs; ++i) weight[i] = i < s.nq && inverse[i] != 0 ? exp2_difference(-top[i], highest) : 0;
  absorb_turned(gt, phi_q, s.nq, highest, one, two);
}

// From dphi (which is overwritten) to dx, rows of D.
template <class R>
inline void FeatureWorkspace<R>::chain(const R *phi, const R *x, int64_t stride, int64_t n, bool key, R *to) {
  const int64_t Ms = call.Ms, D = p.D;
  for (int64_t i = 0; i < n; ++i) {
    R *d = dphi + i * Ms;
    V sums = {};
    for (int64_t m = 0; m < call.M; m += N) {
      const V f = load(phi + i * Ms + m);
      V y = load(d + m);
      if (p.map == ELU) y *= -vmax(-f, broadcast((R)-1));
      if (p.map == RELU) y = f > (R)0 ? y : V{};
      if (p.map == EXP) y *= f;
      store(d + m, y), sums += y;
    }
    R total = 0;
    for (int r = 0; r < N; ++r) total += sums[r];
    weight[i] = total;
    if (!call.projected) write(d, call.root, D, to + i * D);
  }
  if (call.projected) {
    product<R>(n, D, call.M, dphi, Ms, call.from_features, call.Ds, Set<R>{dx, call.Ds});
    for (int64_t i = 0; i < n; ++i) {
      // In the gradient of a query, |x|^2 cancels: numerator and denominator have the same factor.
      const R share = call.levels && key ? weight[i] * (R)p.scale : 0;
      for (int64_t m = 0; m < D; ++m)
        to[i * D + m] = dx[i * call.Ds + m] - (share == 0 ? 0 : share * x[i * stride + m]);
    }
  }
  if (key)
    for (int64_t i = 0; i < n; ++i)
      if (!kept[i]) memset(to + i * D, 0, D * sizeof(R));
}

template <class R> inline void FeatureWorkspace<R>::absorb_block_keys(int64_t b, int64_t kv, Span block, R *state) {
  for (int64_t c = 0; c < call.chunks(block); ++c) {
    const Span s = call.chunk(block, c);
    if (!s.nk) continue;
    take_keys(b, kv, s);
    transpose_rows(v, call.Vs, s.nk, p.Dv + 1, vt, call.Cs);
    absorb_keys(s, state, (R *)nullptr);
  }
}

template <class R>
inline void FeatureWorkspace<R>::emit_block_queries(int64_t b, int64_t kv, Span block, R *state, R *sum) {
  const int64_t Ms = call.Ms, Vs = call.Vs, Cs = call.Cs, M = call.M, U = p.Dv + 1;
  for (int64_t c = 0; c < call.chunks(block); ++c) {
    const Span s = call.chunk(block, c);
    const R shift = state[0];
    if (s.nk) {
      take_keys(b, kv, s);
      transpose_rows(v, Vs, s.nk, U, vt, Cs);
    }
    for (int64_t h = kv * call.group; h < (kv + 1) * call.group; ++h) {
      take_queries(b, h, s);
      take_gradients(b, h, s);
      product<R>(s.nq, M, U, g, Vs, state + HEADER, Ms, Set<R>{dphi, Ms});
      if (call.levels) {
        for (int64_t i = 0; i < s.nq; ++i) weight[i] = exp2_difference(shift, finite(top[i]));
        scale_rows(dphi, Ms, s.nq, dphi);
      }
      for (int64_t i = 0; s.nk && i < s.nq; i += TILE_ROWS) {
        const int64_t rows = min_of(TILE_ROWS, s.nq - i), keys = min_of(i + rows, s.nk);
        product<R>(rows, keys, U, g + i * Vs, Vs, vt, Cs, Set<R>{pairs + i * Cs, Cs});
        for (int64_t r = i; r < i + rows; ++r) {
          R *row = pairs + r * Cs;
          if (call.levels) rescale_row(row, 0, keys, top[r]);
          for (int64_t j = r + 1; j < keys; ++j) row[j] = 0;
        }
        product<R>(rows, M, keys, pairs + i * Cs, Cs, phi_k, Ms, Add<R>{dphi + i * Ms, Ms});
      }
      chain(phi_q, q_rows, q_stride, s.nq, false, (R *)p.dq + ((b * p.H + h) * p.Tq + s.q) * p.D);
    }
    if (s.nk) absorb_keys(s, state, sum);
  }
}

template <class R> inline void FeatureWorkspace<R>::absorb_block_queries(int64_t b, int64_t kv, Span block, R *state) {
  for (int64_t c = call.chunks(block) - 1; c >= 0; --c) {
    const Span s = call.chunk(block, c);
    for (int64_t h = kv * call.group; s.nq && h < (kv + 1) * call.group; ++h) {
      take_queries(b, h, s);
      take_gradients(b, h, s);
      transpose_rows(g, call.Vs, s.nq, p.Dv + 1, gt, call.Cs);
      absorb_queries(s, state, (R *)nullptr);
    }
  }
}

template <class R>
inline void FeatureWorkspace<R>::emit_block_keys(int64_t b, int64_t kv, Span block, R *state, R *sum) {
  const int64_t Ms = call.Ms, Vs = call.Vs, Cs = call.Cs, M = call.M, U = p.Dv + 1;
  for (int64_t c = call.chunks(block) - 1; c >= 0; --c) {
    const Span s = call.chunk(block, c);
    R *dv = out, *dk = more;
    if (s.nk) {
      take_keys(b, kv, s);
      product<R>(s.nk, M, U, v, Vs, state + HEADER, Ms, Set<R>{dk, Ms});
      transpose_rows(state + HEADER, Ms, p.Dv, M, turned, Vs);
      product<R>(s.nk, p.Dv, M, phi_k, Ms, turned, Vs, Set<R>{dv, Vs});
      if (call.levels) {  // no key's level is above the top of a later row, so the factor is at most 1
        for (int64_t j = 0; j < s.nk; ++j) weight[j] = state[0] == -INF<R> ? 0 : exp2_difference(level[j], -state[0]);
        scale_rows(dk, Ms, s.nk, dk), scale_rows(dv, Vs, s.nk, dv);
      }
    }
    for (int64_t h = kv * call.group; s.nq && h < (kv + 1) * call.group; ++h) {
      take_queries(b, h, s);
      take_gradients(b, h, s);
      transpose_rows(g, Vs, s.nq, U, gt, Cs);
      if (s.nk) transpose_rows(phi_q, Ms, s.nq, M, phi_qt, Cs);
      for (int64_t j = 0; j < s.nk; j += TILE_ROWS) {
        const int64_t rows = min_of(TILE_ROWS, s.nk - j), from = j / N * N, queries = s.nq - from;
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

}  // namespace
