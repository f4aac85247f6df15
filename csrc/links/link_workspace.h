// What the forward pass of the links works on: the sums of each row, the panels of a thread, and how the work is
// partitioned.
//
// x is measured as in rows.h. The price of a row is also an x: a key has weight where its x is above. In the search, x
// is measured from the anchor, the x of the best key, and the unknown is the headroom h = anchor - price - ORIGIN
// (links.h).
#pragma once
#include "engine/arena.h"
#include "engine/partition.h"
#include "engine/selected_lists.h"
#include "links/int16_prefilter.h"

namespace {

// A block of rows turns to lists where at most this share of the keys has weight: below it, sums over lists are faster
// than products with every key.
constexpr double SPARSE_SHARE = 0.2;
constexpr int64_t PANEL_KEYS = 96;         // keys per block
constexpr int64_t SAMPLE = 16;             // one key in so many is in the sample that gives a first guess of the price
constexpr int64_t STAGE = 2 * PANEL_KEYS;  // keys after which the price is solved for the first time
constexpr int64_t PREFILTER_BYTES = (int64_t)1 << 25;  // for keys in 16 bits; one head is always held
constexpr int64_t PREFILTER_BLOCKS = 4;  // blocks of rows from which on rounding the keys of a head pays off

struct RequestedLinkStatistics {  // what a call requests besides output and dual
  bool entropy, moments, energy, collision, top, support, admissible, first, spread, drop, prior_mass, log_prior, soft;
  bool baseline_value, baseline_log;
  RequestedLinkStatistics(const Problem &p, const Terms &terms) {
    const bool fermi = p.family == regard::FERMI_DIRAC;
    const bool all_keys = fermi || (p.family == regard::COMPILED && p.link_full_support);
    baseline_value = p.tilt, baseline_log = p.tilt_log;
    entropy = p.entropy || p.kl || baseline_log,
    moments = p.score_variance || p.cost || (p.free_energy && p.family == regard::COMPILED),
    energy = p.free_energy && !fermi;
    soft = p.free_energy && fermi, collision = p.collision, top = p.max_weight;
    support = p.support && !all_keys, admissible = (p.support && all_keys) || (p.kl && !terms.prior);
    first = p.first_key_mass, spread = p.spread, drop = (bool)p.dropout_key;
    prior_mass = terms.prior && p.kl, log_prior = terms.prior && p.kl;
  }
};

// What is known of each row of a block: the search, then the sums over its keys.
template <class R, int NV> struct RowSums {
  using V = Vec<R>;
  V anchor[NV], single_key_price[NV];  // x of the key that alone would have the highest price, and that price
  V price_bound[NV];                   // a lower bound of the price
  V top[NV], h[NV];                    // the largest x; the headroom: price = anchor - h - ORIGIN
  V low[NV], high[NV], width[NV];      // the bracket of h in the search, and its next width
  V null_x[NV], level[NV];             // the null key, relative to the anchor; the parameter of the marginal
  Mask<R> done[NV];
  V mass[NV], slope[NV];         // sums of p and w
  V plog[NV], wlog[NV];          // of p log p and w log p, where logarithms are relative to that of the heaviest weight
  V y1[NV], y2[NV], energy[NV];  // of p x, p x^2 (x relative to the reference), p y
  V reference[NV];               // what x is relative to, on top of the anchor: 0; in free rows, the largest x so far
  V collision[NV], heaviest[NV], support[NV], admissible[NV], first[NV], spread[NV], soft[NV];
  V prior_top[NV], prior_sum[NV], log_prior[NV];
  Mask<R> prior_only[NV];  // see find_prior_only_rows
  V share[NV], prior_offset[NV];
  V best_x[NV], power[NV];        // compiled links: x of the best key; the power of the mass for Newton's method
  Mask<R> full[NV], reached[NV];  // rows of find_full_rows; rows whose best key alone could take the mass
  bool some_prior_only;
};

template <class R, int NV> struct LinkPanels {  // the panels of one thread for one block of rows
  static constexpr int L = Simd<R>::N * NV;
  R *x, *prior, *w, *bias, *spare, *gate, *k_spare, *v_spare, *qt, *ot, *baseline_t;
  R *list, *list_prior;  // the lists of the rows: x, log-prior and key of each candidate
  int32_t *index;
  int32_t length[L];
  R *q;  // the queries of the rows in whole vectors; and in 16 bits, for the prefilter
  PrefilterRows<NV> coarse;
  int16_t *coarse_spare;
  int32_t *sums;    // products in 16 bits, [keys][L]
  int32_t *picked;  // the keys of one list
  uint8_t *live;
  struct Segment {
    int64_t first, keys, at;  // keys first ... first + keys - 1 are the panel's rows from `at` on
    bool partly;
  } *segments;
  int64_t n_segments, rows, room;  // room: entries that a list may have
};

template <class R, int NV> struct LinkPartition : WorkPartition<R, NV> {
  using Base = WorkPartition<R, NV>;
  using Base::blocks, Base::L, Base::packed, Base::units;
  int64_t span, selected;  // selected: the longest list of selected keys, if there are such lists
  explicit LinkPartition(const Problem &p)
      : Base(p), span(p.Tk), selected(lists_selection(p) ? longest_selection(p) : 0) {
    if (p.left + p.right < p.Tk) span = min_of(span, max_of((int64_t)1, p.left + p.right + 1 + (packed ? p.Tq : L)));
    if (p.marginal == regard::FREE) span = min_of(span, PANEL_KEYS);
  }
  int64_t list_rows() const { return max_of(span / 3 + 1, min_of(selected, span)); }
  int64_t segments() const { return span / PANEL_KEYS + 2; }
  // Whether the prefilter is used: rows may turn to lists before they have seen all keys, and x is the product alone.
  bool uses_prefilter(const Problem &p) const {
    const Terms terms(p);
    const bool rows = p.marginal == regard::ROWS || p.marginal == regard::SINK, folded = terms.folded && !terms.prior;
    const bool many = span > 4 * STAGE && units / (p.B * p.Hkv) * blocks >= PREFILTER_BLOCKS;
    return HAS_PREFILTER && sizeof(R) == 4 && NV == 3 && rows && folded && many;
  }
  // How many heads have their keys in 16 bits at a time.
  int64_t prefiltered_heads(const Problem &p) const {
    return uses_prefilter(p) ? min_of(p.B * p.Hkv, PREFILTER_BYTES / PrefilterKeys::bytes(p) + 1) : 0;
  }
  int64_t thread_bytes(const Problem &p) const {
    const int64_t copies = Terms(p).prior ? 2 : 1;  // x, and the prior if there is one
    const int64_t numbers = L * (copies * span + 4 * PANEL_KEYS + p.D + 2 * p.Dv) + PANEL_KEYS * (p.D + p.Dv);
    const int64_t prefilter = uses_prefilter(p) ? (L + 1) * int16_pairs_of(p.D) * 4 + PANEL_KEYS * L * 4 + 256 : 0;
    const int64_t lists = p.marginal == regard::FREE ? 0 : list_rows() * L;
    const int64_t one_list = list_rows() * 4 + (L + 16) * padded<R>(p.D) * (int64_t)sizeof(R);
    return (numbers * (int64_t)sizeof(R) + lists * (int64_t)(sizeof(int32_t) + (copies + 1) * sizeof(R)) + one_list +
            span + prefilter + segments() * (int64_t)sizeof(typename LinkPanels<R, NV>::Segment) +
            (int64_t)sizeof(Rows<R, NV>) + (int64_t)sizeof(RowSums<R, NV>) + 64 * 24) /
               64 * 64 +
           64;
  }
  int64_t bytes(const Problem &p) const {
    const int64_t heads = prefiltered_heads(p);
    return p.threads * thread_bytes(p) + (heads ? heads * PrefilterKeys::bytes(p) : 0) + 128;
  }

  LinkPanels<R, NV> panels(const Problem &p, const Terms &terms, Arena &arena) const {
    LinkPanels<R, NV> s;
    s.x = arena.take<R>(span * L);
    s.prior = terms.prior ? arena.take<R>(span * L) : nullptr;
    const bool lists = p.marginal != regard::FREE;
    s.w = arena.take<R>(lists ? max_of(PANEL_KEYS, list_rows()) * L : PANEL_KEYS * L);
    s.list = lists ? arena.take<R>(list_rows() * L) : nullptr;
    s.list_prior = lists && terms.prior ? arena.take<R>(list_rows() * L) : nullptr;
    s.index = lists ? arena.take<int32_t>(list_rows() * L) : nullptr;
    s.room = lists ? list_rows() : 0;
    R **panels[] = {&s.bias, &s.spare, &s.gate};
    for (R **panel : panels) *panel = arena.take<R>(PANEL_KEYS * L);
    s.k_spare = arena.take<R>(PANEL_KEYS * p.D), s.v_spare = arena.take<R>(PANEL_KEYS * p.Dv);
    s.qt = arena.take<R>(L * p.D), s.ot = arena.take<R>(L * p.Dv), s.baseline_t = arena.take<R>(L * p.Dv);
    s.q = arena.take<R>((L + 16) * padded<R>(p.D)), s.picked = arena.take<int32_t>(list_rows());
    if (uses_prefilter(p)) {
      s.coarse.pairs = arena.take<int32_t>(L * int16_pairs_of(p.D));
      s.coarse_spare = arena.take<int16_t>(2 * int16_pairs_of(p.D)), s.sums = arena.take<int32_t>(PANEL_KEYS * L);
    }
    s.live = arena.take<uint8_t>(span);
    s.segments = arena.take<typename LinkPanels<R, NV>::Segment>(segments());
    return s;
  }
};

}  // namespace
