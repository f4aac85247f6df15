// Forward pass of attention by features (call.h has the formulas): S and z as a running state, chunk by chunk.
#pragma once
#include "features/workspace.h"

namespace {

// Add the keys of a chunk to one or two states; needs phi_kt.
template <class R> inline void FeatureWorkspace<R>::absorb(Span s, R *one, R *two) {
  const int64_t M = call.M, Ms = call.Ms, Vs = call.Vs;
  R highest = -INF<R>;
  for (int64_t j = 0; j < s.nk; ++j) highest = max_of(highest, level[j]);
  if (highest == -INF<R>) return;
  const R *values = v;
  for (int64_t j = 0; j < s.nk; ++j) weight[j] = exp2_difference(level[j], highest);
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

template <class R> inline void FeatureWorkspace<R>::absorb_block(int64_t b, int64_t kv, Span block, R *state) {
  for (int64_t c = 0; c < call.chunks(block); ++c) {
    const Span s = call.chunk(block, c);
    if (!s.nk) continue;
    take_keys(b, kv, s);
    transpose_rows(phi_k, call.Ms, s.nk, call.M, phi_kt, call.Cs);
    absorb(s, state, (R *)nullptr);
  }
}

template <class R> inline void FeatureWorkspace<R>::emit_block(int64_t b, int64_t kv, Span block, R *state, R *sum) {
  const int64_t Ms = call.Ms, Vs = call.Vs, Cs = call.Cs, M = call.M;
  for (int64_t c = 0; c < call.chunks(block); ++c) {
    const Span s = call.chunk(block, c);
    const R *S = state + HEADER, *z = S + M * Vs, shift = state[0];
    if (s.nk) {
      take_keys(b, kv, s);
      transpose_rows(phi_k, Ms, s.nk, M, phi_kt, Cs);
    }
    find_tops(s, shift);
    for (int64_t h = kv * call.group; h < (kv + 1) * call.group; ++h) {
      take_queries(b, h, s);
      product<R>(s.nq, p.Dv, M, phi_q, Ms, S, Vs, Set<R>{out, Vs});
      dots(phi_q, s.nq, z, mass);
      if (call.levels) {
        for (int64_t i = 0; i < s.nq; ++i) weight[i] = exp2_difference(shift, finite(top[i])), mass[i] *= weight[i];
        scale_rows(out, Vs, s.nq, out);
      }
      for (int64_t i = 0; s.nk && i < s.nq; i += TILE_ROWS) {
        const int64_t rows = min_of(TILE_ROWS, s.nq - i), keys = min_of(i + rows, s.nk);
        product<R>(rows, keys, M, phi_q + i * Ms, Ms, phi_kt, Cs, Set<R>{pairs + i * Cs, Cs});
        for (int64_t r = i; r < i + rows; ++r) {
          R *row = pairs + r * Cs;
          if (call.levels) rescale_row(row, 0, keys, top[r]);
          V total = {};
          for (int64_t j = r + 1; j < (keys + N - 1) / N * N; ++j) row[j] = 0;
          for (int64_t j = 0; j < keys; j += N) total += load(row + j);
          for (int l = 0; l < N; ++l) mass[r] += total[l];
        }
        product<R>(rows, p.Dv, keys, pairs + i * Cs, Cs, v, Vs, Add<R>{out + i * Vs, Vs});
      }
      const int64_t at = (b * p.H + h) * p.Tq + s.q;
      for (int64_t i = 0; i < s.nq; ++i) {
        const R share = mass[i] >= TINY<R> ? 1 / mass[i] : 0;
        write(out + i * Vs, share, p.Dv, (R *)p.out + (at + i) * p.Dv);
        if (p.mass_sent) ((R *)p.mass_sent)[at + i] = mass[i], ((R *)p.peak)[at + i] = top[i];
      }
    }
    if (s.nk) absorb(s, state, sum);
  }
}

}  // namespace
