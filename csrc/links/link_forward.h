// Forward pass of regularizers with a link (links.h): the price of a row is solved for before its weights are known.
//
//   for each block of L rows (lanes):
//     x <- Q K^T of all keys that some row may read, as one panel [keys][L] (one per thread: O(T) memory)
//     h <- Newton's method on the mass at headroom h, all rows at once (price_search.h)
//     p <- weights and statistics, and w, the weights of the gradient's baseline (link_weights.h)
//     O <- P^T V
// Where few keys have weight, each row has a list instead (candidate_lists.h). The price only rises as keys are added.
// So the price of the first keys is a bound: later keys below it are left out as they come. The bound is raised
// whenever the number of keys has doubled. Each block of rows decides on its own. Where x is the product alone, most of
// these products are computed in 16 bits (int16_prefilter.h). Rows of a free marginal have a given price: there the
// panel is one block of keys, and there is no search.
#pragma once
#include "engine/selected_lists.h"
#include "engine/threads.h"
#include "links/link_results.h"
#include "links/link_weights.h"
#include "links/prefiltered_lists.h"

namespace {

// Fill the lists of the rows with the keys that they selected.
template <class R, int NV, class Link>
void list_selection(const Problem &p, const Terms &terms, const RequestedLinkStatistics &want, const Rows<R, NV> &rows,
                    const Link &link, LinkPanels<R, NV> &s, RowSums<R, NV> &sums) {
  constexpr int N = Simd<R>::N, L = N * NV;
  const int64_t Dp = padded<R>(p.D);
  R *products = s.x, *spare = s.q + L * Dp;  // the panel is not needed
  rows.gather_rows(p.query, p.D, s.q, Dp, [&](int i) { return rows.factor(p, terms, i); });
  memset(s.length, 0, sizeof s.length);
  for (int i = 0; i < rows.n; ++i) {
    const int64_t n = selected_keys<true>(p, rows, i, s.index + i, (int64_t)L);
    score_list<R, true>(p, rows.b, rows.kv, s.q + i * Dp, s.index + i, (int64_t)L, n, spare, products);
    R top = -INF<R>;
    for (int64_t t = 0; t < n; ++t) {
      s.list[t * L + i] = products[t];
      top = !(products[t] <= top) ? products[t] : top;  // keeps a NaN
    }
    s.length[i] = (int32_t)n, sums.top[i / N][i % N] = top;
    if (want.admissible) sums.admissible[i / N][i % N] = (R)n;
  }
  best_single_key_price(p, link, 0, s.x, (const R *)nullptr, sums);
}

// One block of rows, from queries to results. `prefilter_keys`: the keys of the head in 16 bits, or null.
template <class R, int NV, class Link>
void attend_link(const Problem &p, const Terms &terms, const RequestedLinkStatistics &want, const Rows<R, NV> &rows,
                 LinkPanels<R, NV> &s, RowSums<R, NV> &sums, const PrefilterKeys *prefilter_keys) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  const Link link(p, rows);
  const bool free = p.marginal == regard::FREE;
  memset((void *)&sums, 0, sizeof sums);
  memset(s.ot, 0, L * p.Dv * sizeof(R)), memset(s.baseline_t, 0, L * p.Dv * sizeof(R));
  for (int n = 0; n < NV; ++n) {
    sums.anchor[n] = sums.single_key_price[n] = sums.price_bound[n] = sums.top[n] = sums.prior_top[n] =
        broadcast(-INF<R>);
    if (free)
      for (int i = 0; i < N; ++i)
        sums.anchor[n][i] = 0, sums.h[n][i] = rows.level[n * N + i] * rows.c[n][i] - dual_shift<R, Link>();
  }
  rows.transpose(p.query, p.D, s.qt, [&](int i) { return rows.factor(p, terms, i); });
  s.rows = s.n_segments = 0;
  R *const w_panel = want.baseline_value ? s.w : nullptr;
  const auto finish_segment = [&](const typename LinkPanels<R, NV>::Segment &segment) {  // weights, and P^T V
    R *x = s.x + segment.at * L;
    const R *prior = s.prior ? s.prior + segment.at * L : nullptr;
    compute_weights(p, want, rows, link, sums, segment.first, nullptr, segment.keys, x, prior, w_panel);
    if (!p.out) return;
    int64_t stride;
    const R *v = as_rows(p.value, rows.b, rows.kv, segment.first, segment.keys, p.Dv, s.v_spare, stride);
    for_each_live_run(segment.partly ? s.live + segment.at : nullptr, segment.keys, [&](int64_t from, int64_t to) {
      gather<R, NV>(x + from * L, v + from * stride, stride, to - from, p.Dv, s.ot);
      if (want.baseline_value) gather<R, NV>(s.w + from * L, v + from * stride, stride, to - from, p.Dv, s.baseline_t);
    });
  };
  bool listed = false, may_list = p.marginal != regard::RELAX && lists_keys(p, link), read = false;
  StepCounts counts;
  bool prefiltered = false;
  int64_t next_stage = STAGE;
  if constexpr (Link::PRICED)
    if (p.marginal != regard::RELAX && !free && lists_selection(p)) {
      list_selection(p, terms, want, rows, link, s, sums);
      listed = true;
    }
  for (int64_t first = rows.lo; first < rows.hi && !prefiltered && !(listed && !s.rows); first += PANEL_KEYS) {
    const int64_t keys = min_of(PANEL_KEYS, rows.hi - first);
    R *x = s.x + s.rows * L, *gate = s.prior ? s.prior + s.rows * L : s.gate;
    const Gate open = fill_gate(p, terms, rows, first, keys, gate, s.bias, s.spare, s.live + s.rows);
    if (open == CLOSED) continue;
    read |= open == OPEN;
    score_block(p, terms, rows, first, keys, open >= WEIGHTED ? gate : nullptr, s, x, sums.top);
    if constexpr (Link::PRICED)
      if (!free) best_single_key_price(p, link, keys, x, s.prior ? gate : nullptr, sums);
    if (want.admissible) count_admissible(sums, keys, open >= WEIGHTED ? x : nullptr);
    for (int n = 0; n < NV; ++n) {
      if (want.prior_mass) {
        V top = sums.prior_top[n];
        for (int64_t j = 0; j < keys; ++j) top = vmax(top, load(gate + j * L + n * N));
        const V safe = top == -INF<R> ? V{} : top;
        sums.prior_sum[n] *= vexp2(sums.prior_top[n] - safe), sums.prior_top[n] = top;
        for (int64_t j = 0; j < keys; ++j) sums.prior_sum[n] += vexp2(load(gate + j * L + n * N) - safe);
      }
    }
    const typename LinkPanels<R, NV>::Segment segment = {first, keys, s.rows, open >= WEIGHTED};
    if (free) {
      if (want.moments)
        for (int n = 0; n < NV; ++n) {
          const V to = sums.top[n] == -INF<R> ? V{} : sums.top[n], shift = sums.reference[n] - to;
          sums.y2[n] += shift * ((R)2 * sums.y1[n] + shift * sums.mass[n]);
          sums.y1[n] += shift * sums.mass[n], sums.reference[n] = to;
        }
      finish_segment(segment);
    } else if constexpr (Link::PRICED) {
      s.segments[s.n_segments++] = segment;
      s.rows += keys;
      if (!may_list) continue;
      if (listed) may_list = listed = append_candidates(s, sums.price_bound, rows.n, first, segment.at, keys);
      if (s.rows >= next_stage) {
        const int64_t all_rows = rows.hi - rows.lo;
        const int iterations = next_stage == STAGE ? 4 : 2;
        next_stage = 2 * s.rows;
        if ((listed ? 2 : 4) * s.rows >= all_rows) continue;
        listed = search(p, rows, link, s, sums, listed, iterations, SPARSE_SHARE, counts);
        if constexpr (sizeof(R) == 4 && NV == 3)
          if (listed && prefilter_keys) {
            prefiltered = list_by_prefilter(p, terms, want, rows, link, *prefilter_keys, first + keys, s, sums);
            prefilter_keys = nullptr;  // tried once only
          }
      }
    }
  }
  if constexpr (Link::PRICED)
    if (!free) {
      if constexpr (Link::COMPILED) {
        if (p.link_ceiling < INF<double> && p.marginal == regard::ROWS) find_full_rows(p, s, sums);
      } else {
        if (s.prior && p.marginal == regard::ROWS) find_prior_only_rows(p, link, s, sums);
      }
      if (sums.some_prior_only) listed = false;
      if (listed && !prefiltered) {
        const V none[NV] = {};
        search(p, rows, link, s, sums, true, 2, 0, counts);
        // The value of a compiled link counts keys without weight, too.
        if (!(Link::COMPILED && want.energy)) prune_lists(p, rows, s, sums, none);
      }
      const double share = s.rows >= STAGE && !sums.some_prior_only ? SPARSE_SHARE : 0;
      listed = search(p, rows, link, s, sums, listed, Link::COMPILED ? 1000 : 100, share, counts);
      if constexpr (Link::COMPILED)
        for (int n = 0; n < NV; ++n) sums.h[n] = sums.full[n] ? broadcast((R)2 * FULL<R>) : sums.h[n];
      if (p.lists) save_sparse_rows(p, rows, s, sums, origin_of<R>(link), listed, prefiltered);
      if (listed)
        compute_weights(p, want, rows, link, sums, 0, s.index, pad_lists(s), s.list, s.list_prior, w_panel);
      else
        for (int64_t g = 0; g < s.n_segments; ++g) finish_segment(s.segments[g]);
    }
  R share[L], baseline_share[L];
  write_link_results<R, NV, Link>(p, terms, want, rows, link, sums, read, share, baseline_share);
  if (!p.out) return;
  R *out[L], *baseline[L];
  for (int i = 0; i < rows.n; ++i)
    out[i] = (R *)p.out + rows.flat(p, i) * p.Dv, baseline[i] = (R *)p.tilt + rows.flat(p, i) * p.Dv;
  if (!listed) {
    to_rows(s.ot, L, share, rows.n, p.Dv, out);
    if (want.baseline_value) to_rows(s.baseline_t, L, baseline_share, rows.n, p.Dv, baseline);
    return;
  }
  for (int i = 0; i < rows.n; ++i) {
    sum_list(p, rows.b, rows.kv, s.list + i, want.baseline_value ? s.w + i : nullptr, s.index + i, (int64_t)L,
             s.length[i], s.v_spare, out[i], baseline[i]);
    for (int64_t d = 0; d < p.Dv; ++d) out[i][d] *= share[i];
    if (want.baseline_value)
      for (int64_t d = 0; d < p.Dv; ++d) baseline[i][d] *= baseline_share[i];
  }
}

template <class R, int NV> void run_forward_link(const Problem &p) {
  const Terms terms(p);
  const RequestedLinkStatistics want(p, terms);
  const LinkPartition<R, NV> partition(p);
  char *scratch = scratch_of(p), *prefilters = scratch + p.threads * partition.thread_bytes(p);
  const int64_t heads = p.B * p.Hkv, at_once = partition.prefiltered_heads(p),
                units = partition.units / heads;  // of one head
  for (int64_t head = 0; head < heads; head += at_once ? at_once : heads) {
    const int64_t some = at_once ? min_of(at_once, heads - head) : heads;
    if constexpr (sizeof(R) == 4) {
      // The blocks of keys that some row may read by its band.
      const int64_t low = max_of((int64_t)0, p.offset - p.left), high = min_of(p.Tk, p.offset + p.Tq + p.right);
      const int64_t from = low / PREFILTER_KEYS,
                    key_blocks = max_of((int64_t)0, (high - 1) / PREFILTER_KEYS + 1 - from);
      parallel(p.threads, at_once ? some * key_blocks : 0, [&](int64_t job, int64_t thread) {
        Arena arena{scratch + thread * partition.thread_bytes(p)};
        const int64_t h = head + job / key_blocks;
        const PrefilterKeys prefilter(p, prefilters + (h - head) * PrefilterKeys::bytes(p));
        prefilter.fill(p, h / p.Hkv, h % p.Hkv, from + job % key_blocks, arena.take<float>(PREFILTER_KEYS * p.D));
      });
    }
    parallel(p.threads, some * units * partition.blocks, [&](int64_t job, int64_t thread) {
      Arena arena{scratch + thread * partition.thread_bytes(p)};
      Rows<R, NV> &rows = *arena.take<Rows<R, NV>>(1);
      RowSums<R, NV> &sums = *arena.take<RowSums<R, NV>>(1);
      LinkPanels<R, NV> panels = partition.panels(p, terms, arena);
      const int64_t unit = job / partition.blocks;
      partition.place_block(p, rows, head * units + unit,
                            partition.blocks - 1 - job % partition.blocks);  // longest rows first
      const PrefilterKeys prefilter(p, prefilters + unit / units * PrefilterKeys::bytes(p));
      with_link<R>(p, [&](auto tag) {
        attend_link<R, NV, typename decltype(tag)::Link>(p, terms, want, rows, panels, sums,
                                                         at_once ? &prefilter : nullptr);
      });
    });
  }
}

}  // namespace
