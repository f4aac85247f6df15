// Forward, regularisers with a link (links.h): the row's price must be found before a weight is known.
//
//   for each block of L rows (lanes):
//     x <- Q K^T of all keys that some row may read, as one panel [keys][L] (a thread's own: O(T) memory)
//     h <- Newton's method on what the keys take at headroom h, all rows at once
//     p <- weights, with all statistics, and w, the weights of the gradient's centre
//     O <- P^T V
// Where few keys have weight, each row has a list of its own instead. The price only rises as keys are added: solved for
// the first keys it is a bound, and later keys below it are left out as they come; the bound is raised whenever their
// number has doubled. Lists are lanes of a shorter panel, so that the same code serves both. Each block of rows chooses by
// itself. Where x is the product alone, most of these products are made in 16 bits (screen.h).
// Free marginals know their price: there the panel is one block of keys, and there is no search.
#pragma once
#include <type_traits>

#include "forward.h"
#include "links.h"
#include "lists.h"
#include "screen.h"

namespace {

// A row's weights are kept in a list where at most this share of the keys has some: below it a sum over the list is
// faster than a product with every key.
constexpr double SPARSE_SHARE = 0.2;
constexpr int64_t PANEL_KEYS = 96;        // keys per block
constexpr int64_t SAMPLE = 16;            // one key in so many makes a first guess of the price
constexpr int64_t STAGE = 2 * PANEL_KEYS;  // keys after which the price is solved for the first time
constexpr int64_t SCREEN_ROOM = (int64_t)1 << 25;  // bytes for keys in 16 bits, or one head's
constexpr int64_t SCREEN_BLOCKS = 4;      // blocks of rows that make it worth while to round a head's keys

struct Asked {  // what a call wants besides output and price
  bool entropy, moments, energy, collision, top, support, admissible, first, spread, drop, prior_mass, log_prior, soft;
  bool tilt, tilt_log;
  Asked(const Problem &p, const Terms &terms) {
    const bool fermi = p.family == regard::FERMI_DIRAC;
    tilt = p.tilt, tilt_log = p.tilt_log;
    entropy = p.entropy || p.kl || tilt_log, moments = p.score_variance || p.cost, energy = p.free_energy && !fermi;
    soft = p.free_energy && fermi, collision = p.collision, top = p.max_weight;
    support = p.support && !fermi, admissible = (p.support && fermi) || (p.kl && !terms.prior);
    first = p.first_key_mass, spread = p.spread, drop = (bool)p.dropout_key;
    prior_mass = terms.prior && p.kl, log_prior = terms.prior && p.kl;
  }
};

// Sums over a row's keys.
template <class R, int NV> struct Ledger {
  using V = Vec<R>;
  V anchor[NV], alone[NV];      // x of the key that would pay most alone, and what it would pay
  V best[NV];                   // a price that the row's is not below, as an x
  V top[NV], h[NV];             // the largest x; the headroom: price = anchor - h - ORIGIN
  V low[NV], high[NV], width[NV];  // of the search: the bracket of h
  V null_x[NV], level[NV];         // the null key, from the anchor; the marginal's parameter
  Mask<R> done[NV];
  V mass[NV], slope[NV];        // sums of p and w
  V plog[NV], wlog[NV];         // of p log p and w log p, with logarithms from the heaviest weight's
  V y1[NV], y2[NV], energy[NV]; // of p x, p x^2 (x from the reference), p y
  V reference[NV];              // where x is measured from: the anchor; free rows, the largest x so far
  V collision[NV], heaviest[NV], support[NV], admissible[NV], first[NV], spread[NV], soft[NV];
  V prior_top[NV], prior_sum[NV], log_prior[NV];
  Mask<R> remote[NV];           // see rest_on_prior
  V share[NV], lift[NV];
  bool some_remote;
};

template <class R, int NV> struct Sheet {  // a thread's panels for one block of rows
  static constexpr int L = Simd<R>::N * NV;
  R *x, *prior, *w, *bias, *spare, *gate, *k_spare, *v_spare, *qt, *ot, *tilt_t;
  R *list, *list_prior;  // the rows' lists: x, log-prior and key of each candidate
  int32_t *index;
  int32_t length[L];
  R *q;                // the rows' queries in whole vectors, and in 16 bits: for keys that are screened (screen.h)
  CoarseRows<NV> coarse;
  int16_t *coarse_spare;
  int32_t *sums;       // of 16 bits, [keys][L]
  int32_t *picked;     // one list's keys
  uint8_t *live;
  struct Segment {
    int64_t first, keys, at;  // keys first ... first + keys - 1 are the panel's rows from `at`
    bool partly;
  } *segments;
  int64_t n_segments, rows, room;  // room: of a list
};

template <class R, int NV> struct PanelCut {
  static constexpr int L = Simd<R>::N * NV;
  Cut<R, NV> cut;
  int64_t blocks, span;
  explicit PanelCut(const Problem &p) : cut(p) {
    blocks = (cut.rows + L - 1) / L;
    span = p.Tk;
    if (p.left + p.right < p.Tk) span = least(span, most((int64_t)1, p.left + p.right + 1 + (cut.packed ? p.Tq : L)));
    if (p.marginal == regard::FREE) span = least(span, PANEL_KEYS);
  }
  int64_t list_rows() const { return span / 3 + 1; }
  int64_t segments() const { return span / PANEL_KEYS + 2; }
  // Whether keys are screened: where rows may have lists before they have seen all keys, and x is the product alone.
  bool screens(const Problem &p) const {
    const Terms terms(p);
    const bool rows = p.marginal == regard::ROWS || p.marginal == regard::SINK, folded = terms.folded && !terms.prior;
    const bool many = span > 4 * STAGE && cut.units / (p.B * p.Hkv) * blocks >= SCREEN_BLOCKS;
    return SCREENS && sizeof(R) == 4 && NV == 3 && rows && folded && many;
  }
  // Heads whose keys are in 16 bits at a time.
  int64_t screened_heads(const Problem &p) const {
    return screens(p) ? least(p.B * p.Hkv, SCREEN_ROOM / Screen::bytes(p) + 1) : 0;
  }
  int64_t thread_bytes(const Problem &p) const {
    const int64_t copies = Terms(p).prior ? 2 : 1;  // x, and the prior beside it
    const int64_t numbers =
        L * (copies * span + 4 * PANEL_KEYS + p.D + 2 * p.Dv) + PANEL_KEYS * (p.D + p.Dv);
    const int64_t screen = screens(p) ? (L + 1) * words_of(p.D) * 4 + PANEL_KEYS * L * 4 + 256 : 0;
    const int64_t lists = p.marginal == regard::FREE ? 0 : list_rows() * L;
    const int64_t one_list = list_rows() * 4 + (L + 16) * padded<R>(p.D) * (int64_t)sizeof(R);
    return (numbers * (int64_t)sizeof(R) + lists * (int64_t)(sizeof(int32_t) + (copies + 1) * sizeof(R)) + one_list + span +
            screen + segments() * (int64_t)sizeof(typename Sheet<R, NV>::Segment) + (int64_t)sizeof(Rows<R, NV>) +
            (int64_t)sizeof(Ledger<R, NV>) + 64 * 24) / 64 * 64 + 64;
  }
  int64_t bytes(const Problem &p) const {
    const int64_t heads = screened_heads(p);
    return p.threads * thread_bytes(p) + (heads ? heads * Screen::bytes(p) : 0) + 128;
  }

  Sheet<R, NV> sheet(const Problem &p, const Terms &terms, Arena &arena) const {
    Sheet<R, NV> s;
    s.x = arena.take<R>(span * L);
    s.prior = terms.prior ? arena.take<R>(span * L) : nullptr;
    const bool lists = p.marginal != regard::FREE;
    s.w = arena.take<R>(lists ? most(PANEL_KEYS, list_rows()) * L : PANEL_KEYS * L);
    s.list = lists ? arena.take<R>(list_rows() * L) : nullptr;
    s.list_prior = lists && terms.prior ? arena.take<R>(list_rows() * L) : nullptr;
    s.index = lists ? arena.take<int32_t>(list_rows() * L) : nullptr;
    s.room = lists ? list_rows() : 0;
    R **panels[] = {&s.bias, &s.spare, &s.gate};
    for (R **panel : panels) *panel = arena.take<R>(PANEL_KEYS * L);
    s.k_spare = arena.take<R>(PANEL_KEYS * p.D), s.v_spare = arena.take<R>(PANEL_KEYS * p.Dv);
    s.qt = arena.take<R>(L * p.D), s.ot = arena.take<R>(L * p.Dv), s.tilt_t = arena.take<R>(L * p.Dv);
    s.q = arena.take<R>((L + 16) * padded<R>(p.D)), s.picked = arena.take<int32_t>(list_rows());
    if (screens(p)) {
      s.coarse.pairs = arena.take<int32_t>(L * words_of(p.D));
      s.coarse_spare = arena.take<int16_t>(2 * words_of(p.D)), s.sums = arena.take<int32_t>(PANEL_KEYS * L);
    }
    s.live = arena.take<uint8_t>(span);
    s.segments = arena.take<typename Sheet<R, NV>::Segment>(segments());
    return s;
  }
};

// What a row's keys take at headroom h, over every `stride`-th of the first `rows` of a panel (and as if the others were
// like it): sums of p and w, and how many take something.
template <class R, int NV, class Link, bool PRIOR>
void take(const Link &link, int64_t rows, int64_t stride, const R *x, const R *prior, const Vec<R> *anchor,
          const Vec<R> *h, Vec<R> *taken, Vec<R> *slope, Vec<R> *count) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  V p_sum[NV] = {}, w_sum[NV] = {};
  Mask<R> some[NV] = {};
  for (int64_t from = 0; from < rows; from += 64 * stride) {  // in pieces, for shorter chains of rounding
    const int64_t to = least(rows, from + 64 * stride);
    V p_part[NV] = {}, w_part[NV] = {};
    for (int64_t j = from; j < to; j += stride)
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) {
        const V d = load(x + j * L + n * N) - anchor[n] + h[n];
        V p, w;
        if (PRIOR)
          link.times_prior(n, d, load(prior + j * L + n * N), p, w);
        else
          link.at(n, d, p, w);
        p_part[n] += p, w_part[n] += w;
        some[n] -= (Mask<R>)(p > 0);
      }
    for (int n = 0; n < NV; ++n) p_sum[n] += p_part[n], w_sum[n] += w_part[n];
  }
  const R scale = rows ? (R)rows / (R)((rows + stride - 1) / stride) : 1;
  for (int n = 0; n < NV; ++n)
    taken[n] = scale * p_sum[n], slope[n] = scale * w_sum[n], count[n] = scale * __builtin_convertvector(some[n], V);
}

// What each of a block's keys would pay if it took the mass alone: the best of them is the row's anchor.
template <class R, int NV, class Link>
void bid(const Problem &p, const Link &link, int64_t keys, const R *x, const R *prior, Ledger<R, NV> &ledger) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  const V mass = all((R)p.mass), log_mass = (R)LOG2E * vlog(mass);
  for (int n = 0; n < NV; ++n) {
    if (!prior) {  // the largest score pays most
      ledger.anchor[n] = ledger.top[n];
      ledger.best[n] = vmax(ledger.best[n], ledger.top[n] - link.headroom(n, mass) - Link::ORIGIN);
      continue;
    }
    for (int64_t j = 0; j < keys; ++j) {
      const V at = load(x + j * L + n * N), room = power((log_mass - load(prior + j * L + n * N)) / link.beta(n));
      const V price = at == -INF<R> ? at : vmax(all(LOWEST<R>), at - room);
      const Mask<R> better = price > ledger.alone[n];
      ledger.alone[n] = better ? price : ledger.alone[n], ledger.anchor[n] = better ? at : ledger.anchor[n];
      ledger.best[n] = vmax(ledger.best[n], price);
    }
  }
}

// Begin a search: no price below the best known.
template <class R, int NV, class Link>
void begin(const Problem &p, const Rows<R, NV> &rows, const Link &link, Ledger<R, NV> &ledger) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N;
  for (int n = 0; n < NV; ++n) {
    V &anchor = ledger.anchor[n], &best = ledger.best[n], top = ledger.top[n];
    for (int i = 0; i < N; ++i) ledger.level[n][i] = rows.level[n * N + i];
    if (p.marginal == regard::SINK) {  // the null key may pay most, too
      const V null = ledger.level[n] * rows.c[n], price = null - link.headroom(n, all((R)p.mass)) - Link::ORIGIN;
      const Mask<R> better = (price > best) | (anchor == -INF<R>);
      anchor = better ? null : anchor, best = vmax(best, price), top = vmax(top, null);
      ledger.null_x[n] = null - (anchor == -INF<R> ? V{} : anchor);
    }
    const Mask<R> idle = best == -INF<R>;  // not by the anchor: a row may begin again
    anchor = idle ? V{} : anchor;
    ledger.low[n] = idle ? V{} : anchor - top - Link::ORIGIN, ledger.high[n] = all(INF<R>);
    V h = anchor - best - Link::ORIGIN;
    if (p.marginal == regard::RELAX) {
      // The anchor's key alone at a price lambda: log pi + beta log y = lambda/rho, with y = anchor - c lambda. So y is no more
      // than 1, or than c rho times the rest: where the prior is tiny, far less than what a fixed mass would take.
      const V scale = rows.c[n] * ledger.level[n], room = vmax(all(TINY<R>), anchor - best);
      const V most_y = anchor + scale * (link.beta(n) * vlog(room) - vlog(all((R)p.mass)));
      h = -vmax(-h, Link::ORIGIN - vmax(all((R)1), most_y));
    }
    ledger.h[n] = idle ? all(-INF<R>) : h;
    ledger.width[n] = ledger.h[n] - ledger.low[n] + (R)1;
    ledger.done[n] = idle;
  }
}

struct Census {  // of a step
  double total;     // weights
  int64_t longest;  // of a row
  bool above;       // all h were above their solution
};

// One step of the search over a panel (or lists), or a sample of it: see `take`. Returns whether all rows are done.
template <class R, int NV, class Link>
bool step(const Problem &p, const Rows<R, NV> &rows, const Link &link, int64_t panel_rows, int64_t stride, const R *x,
          const R *prior, int iteration, Ledger<R, NV> &ledger, Census &census) {
  using V = Vec<R>;
  using M = Mask<R>;
  constexpr int N = Simd<R>::N;
  const bool sink = p.marginal == regard::SINK, relax = p.marginal == regard::RELAX, convex = Link::CONVEX && !relax;
  V taken[NV], slope[NV], count[NV];
  if (prior)
    take<R, NV, Link, true>(link, panel_rows, stride, x, prior, ledger.anchor, ledger.h, taken, slope, count);
  else
    take<R, NV, Link, false>(link, panel_rows, stride, x, prior, ledger.anchor, ledger.h, taken, slope, count);
  bool settled = true;
  census = {0, 0, true};
  for (int n = 0; n < NV; ++n) {
    const V h = ledger.h[n];
    V &low = ledger.low[n], &high = ledger.high[n], &width = ledger.width[n];
    for (int i = 0; i < N; ++i)
      if (n * N + i < rows.n)
        census.total += count[n][i], census.longest = most(census.longest, (int64_t)count[n][i]);
    if (sink) {
      V p0, w0;
      link.at(n, ledger.null_x[n] + h, p0, w0);
      taken[n] += p0, slope[n] += w0;
    }
    V target = all((R)p.mass), move;
    if (relax) {
      const V dual = (ledger.anchor[n] - h - Link::ORIGIN) / rows.c[n], inside = (R)1 / (rows.c[n] * ledger.level[n]);
      target = power((R)LOG2E * dual / ledger.level[n]);
      move = -vlog(vmax(all(TINY<R>), taken[n] / target)) / (link.beta(n) * slope[n] / taken[n] + inside);
    } else {
      move = link.rise(n, taken[n] / target) * target / slope[n];
    }
    const V ratio = taken[n] / target, away = ratio - (R)1, distance = away < 0 ? -away : away;
    census.above &= !any((ratio < (R)1) & ~ledger.done[n]);
    low = ((ratio <= (R)1) & (h > low)) ? h : low;
    high = ((ratio >= (R)1) & (h < high)) ? h : high;
    V next = h + move;
    // One more step squares a distance this small, where the equation is straight; else go on until nothing moves.
    const V size = h < 0 ? -h : h, moved = move < 0 ? -move : move;
    M last = distance < (convex ? (sizeof(R) == 4 ? (R)3e-5 : (R)1e-8) : (R)2 * EPS<R>);
    last |= ((moved <= EPS<R> * size) & (distance < (R)1e-3)) | (ratio != ratio);
    const M open = high == INF<R>, bad = ~((next > low) & (next < high)) & ~last;
    const M shut = ~open & (high - low <= (R)2 * EPS<R> * size);
    const V middle = low * (R)0.5 + high * (R)0.5;
    next = bad ? (open ? h + width : middle) : next;
    width = bad & open ? width * (R)4 : width;
    next = ((shut & bad) | (ratio != ratio)) ? h : next;  // a relaxed row's mass may be too small for a ratio
    if (!convex && iteration >= 30 && iteration % 2) next = (open | last) ? next : middle;
    // From above, a convex equation's steps stay above; of others the bracket alone is sure. A little less: rounding.
    const M sure = (ratio >= (R)1) & ~bad & (convex ? ~M{} : M{});
    const V anchor = ledger.anchor[n];
    const V bound = (sure ? next : high) + (R)16 * EPS<R> * (size + Link::ORIGIN + (anchor < 0 ? -anchor : anchor));
    const V price = anchor - bound - Link::ORIGIN;
    if (stride == 1) ledger.best[n] = (~ledger.done[n] & ~open & (price > ledger.best[n])) ? price : ledger.best[n];
    ledger.h[n] = ledger.done[n] ? h : next;
    ledger.done[n] |= last | shut;
    settled &= !any(~ledger.done[n]);
  }
  return settled;
}

template <class R> using LaneBits = std::conditional_t<(Simd<R>::N > 8), uint16_t, uint8_t>;  // of one vector
// Which lanes of a block's vectors have candidates. First all comparisons, then all candidates: keys one by one would end
// in a mispredicted branch each.
template <class R, int NV> struct Found {
  using Bits = LaneBits<R>;
  static constexpr int64_t BITS = 8 * sizeof(Bits);
  Bits bits[PANEL_KEYS * NV + 64 / BITS];

  // f(j * L + lane) for each.
  template <class F> INLINE void each(int64_t keys, F f) {
    memset(bits + keys * NV, 0, sizeof(uint64_t));
    for (int64_t v = 0; v < keys * NV; v += 64 / BITS) {
      uint64_t word;
      memcpy(&word, bits + v, sizeof word);
      for (; word; word &= word - 1) {
        const int bit = __builtin_ctzll(word);
        f((v + bit / BITS) * Simd<R>::N + bit % BITS);
      }
    }
  }
};

template <class R, int NV> bool has_room(const Sheet<R, NV> &s, int64_t keys) {
  int32_t longest = 0;
  for (int32_t length : s.length) longest = most(longest, length);
  return longest + keys <= s.room;
}

// Add panel rows at ... at + keys - 1 (keys first ...) to the lists: the candidates whose x is not below the price.
// False if there is no room, or a price is not a number.
template <class R, int NV>
bool enlist(Sheet<R, NV> &s, const Vec<R> *price, int rows, int64_t first, int64_t at, int64_t keys) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  if (!has_room(s, keys)) return false;
  Found<R, NV> found;
  V bound[NV];  // above -inf, so that no key that may not be read is found
  Mask<R> row[NV] = {};  // a lane without a row: all its x are equal
  for (int n = 0; n < NV; ++n) {
    bound[n] = vmax(all(LOWEST<R>), price[n]);
    for (int i = 0; i < N && n * N + i < rows; ++i) {
      row[n][i] = -1;
      if (bound[n][i] != bound[n][i]) return false;  // a NaN hides the price: all keys count
    }
  }
  const R *x = s.x + at * L;
  for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) {
      // Not below: one NaN is found, which is the row's. (At a large score the bound may be rounded up to the best key.)
      found.bits[j * NV + n] = (LaneBits<R>)lanes_of((Mask<R>)(~(load(x + j * L + n * N) < bound[n]) & row[n]));
    }
  found.each(keys, [&](int64_t place) {
    const int64_t j = place / L, i = place % L, to = (int64_t)s.length[i]++ * L + i;
    s.list[to] = x[place], s.index[to] = (int32_t)(first + j);
    if (s.prior) s.list_prior[to] = s.prior[at * L + place];
  });
  return true;
}

// Lists without the keys that lie below the best price by more than `off`. Where x came from 16 bits it is made again, as
// all other passes make it; then `exact` is given, the largest x of keys before those.
template <class R, int NV>
void prune(const Problem &p, const Rows<R, NV> &rows, Sheet<R, NV> &s, Ledger<R, NV> &ledger, const Vec<R> *off,
           const Vec<R> *exact = nullptr) {
  constexpr int N = Simd<R>::N, L = N * NV, FAR = 16;
  const int64_t base = p.key.s0 * rows.b + p.key.s1 * rows.kv, Dp = padded<R>(p.D);
  const bool as_is = rows_of<R>(p.key, p.D) && p.D == Dp;
  R *x = s.x, *spare = s.q + L * Dp;  // the panel is not needed any more
  int32_t *index = s.picked;
  memset(spare, 0, 16 * Dp * sizeof(R));
  for (int i = 0; i < L; ++i) {
    if (i >= rows.n) {
      s.length[i] = 0;
      continue;
    }
    const R best = ledger.best[i / N][i % N], far = off[i / N][i % N];
    // Where a null key takes all, the largest score is to be known all the same.
    const R bound = least(best, (R)ledger.top[i / N][i % N]) - far;
    int64_t n = 0;
    for (int64_t k = 0; k < s.length[i]; ++k) {  // without a branch, which would be mispredicted
      const R at = s.list[k * L + i];
      x[n] = at, index[n] = s.index[k * L + i];
      if (s.prior) s.list_prior[n * L + i] = s.list_prior[k * L + i];
      n += !(at < bound);
    }
    s.length[i] = (int32_t)n;
    if (exact) {
      chains(s.q + i * Dp, Dp, n, x, [&](int64_t k, int u) -> const R * {
        const int64_t at = base + index[k] * p.key.s2;
        if (!as_is) {
          copy<R>(p.key.data, p.key.type, at, p.key.s3, p.D, spare + u * Dp, 1, (R)1);
          return spare + u * Dp;
        }
        if (k + FAR < n) {  // the list knows which key comes, the processor cannot
          const R *next = (const R *)p.key.data + base + index[k + FAR] * p.key.s2;
          for (int64_t d = 0; d < p.D; d += 64 / (int64_t)sizeof(R)) __builtin_prefetch(next + d);
        }
        return (const R *)p.key.data + at;
      });
      Vec<R> tops = all(-INF<R>);
      for (int64_t k = n; k < n + N; ++k) x[k] = -INF<R>;
      for (int64_t k = 0; k < n; k += N) tops = vmax(tops, load(x + k));
      R top = exact[i / N][i % N];
      for (int k = 0; k < N; ++k) top = most(top, (R)tops[k]);
      ledger.top[i / N][i % N] = ledger.anchor[i / N][i % N] = top, ledger.best[i / N][i % N] = best - far;
    }
    for (int64_t k = 0; k < n; ++k) s.list[k * L + i] = x[k], s.index[k * L + i] = index[k];
  }
}

// Lanes filled up with nothing, to the length of the longest.
template <class R, int NV> int64_t level_lists(Sheet<R, NV> &s) {
  constexpr int L = Simd<R>::N * NV;
  int64_t longest = 0;
  for (int i = 0; i < L; ++i) longest = most(longest, (int64_t)s.length[i]);
  for (int i = 0; i < L; ++i)
    for (int64_t k = s.length[i]; k < longest; ++k) {
      s.list[k * L + i] = -INF<R>, s.index[k * L + i] = 0;
      if (s.prior) s.list_prior[k * L + i] = 0;
    }
  return longest;
}

// The headroom of each row, from panel or lists. Turns to lists when no more than `share` of the keys have weight (and no
// row has many more): returns whether it did. `census`: of the last step.
template <class R, int NV, class Link>
bool search(const Problem &p, const Rows<R, NV> &rows, const Link &link, Sheet<R, NV> &s, Ledger<R, NV> &ledger,
            bool listed, int iterations, double share, Census &census) {
  const bool may_list = p.marginal != regard::RELAX && share > 0;
  int64_t list_rows = listed ? level_lists(s) : 0;
  begin(p, rows, link, ledger);
  if (!listed && s.rows >= SAMPLE * 32) {  // a guess from a sample: Newton's method may begin anywhere
    for (int iteration = 0; iteration < 8; ++iteration)
      if (step<R, NV, Link>(p, rows, link, s.rows, SAMPLE, s.x, s.prior, iteration, ledger, census)) break;
    Vec<R> guess[NV];
    for (int n = 0; n < NV; ++n) guess[n] = ledger.h[n];
    begin(p, rows, link, ledger);
    for (int n = 0; n < NV; ++n) ledger.h[n] = (guess[n] < ledger.h[n]) & ~ledger.done[n] ? guess[n] : ledger.h[n];
  }
  for (int iteration = 0; iteration < iterations; ++iteration) {
    const bool settled = step<R, NV, Link>(p, rows, link, listed ? list_rows : s.rows, 1, listed ? s.list : s.x,
                                           listed ? s.list_prior : s.prior, iteration, ledger, census);
    const bool few = census.total <= share * s.rows * rows.n && 0.8 * census.longest <= share * s.rows;
    if (!listed && may_list && census.above && few) {
      memset(s.length, 0, sizeof s.length);
      listed = true;
      for (int64_t g = 0; g < s.n_segments && listed; ++g)
        listed = enlist(s, ledger.best, rows.n, s.segments[g].first, s.segments[g].at, s.segments[g].keys);
      list_rows = listed ? level_lists(s) : 0;
    }
    if (settled) break;
  }
  return listed;
}

// Rows of a fixed mass whose priors are all so small that y would be too large for the scores to count, or for a number:
// such a remote row is the prior's own, p = pi mass/sum(pi). It needs no search. Logarithms of its prior are measured from
// the largest (`lift`), and log2(mass/sum(pi)) with that is its `share`.
template <class R, int NV, class Link>
void rest_on_prior(const Problem &p, const Link &link, const Sheet<R, NV> &s, Ledger<R, NV> &ledger) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  constexpr R FAR = sizeof(R) == 4 ? 64 : 512;  // log2 y
  for (int n = 0; n < NV; ++n) {
    V top = all(-INF<R>), sum = {};
    for (int64_t j = 0; j < s.rows; ++j) top = vmax(top, load(s.prior + j * L + n * N));
    const V log_mass = (R)LOG2E * vlog(all((R)p.mass)), far = FAR * link.beta(n);
    if (!any((top > -INF<R>) & (log_mass - top > far))) continue;
    const V safe = top == -INF<R> ? V{} : top;
    for (int64_t j = 0; j < s.rows; ++j) sum += vexp2(load(s.prior + j * L + n * N) - safe);
    const V share = log_mass - (R)LOG2E * vlog(vmax(all(TINY<R>), sum));
    const Mask<R> remote = (top > -INF<R>) & (share - top > far);
    ledger.remote[n] = remote, ledger.some_remote |= any(remote);
    ledger.share[n] = share, ledger.lift[n] = remote ? top : V{};
    ledger.best[n] = remote ? all(-INF<R>) : ledger.best[n];
  }
}

// How many keys each row may read.
template <class R, int NV> void count_admissible(Ledger<R, NV> &ledger, int64_t keys, const R *gate) {
  constexpr int N = Simd<R>::N, L = N * NV;
  for (int n = 0; n < NV; ++n) {
    if (!gate) ledger.admissible[n] += (R)keys;
    for (int64_t j = 0; j < keys && gate; ++j)
      ledger.admissible[n] -= __builtin_convertvector(load(gate + j * L + n * N) > -INF<R>, Vec<R>);
  }
}

// x of a block of keys, into the panel, and the largest of each row.
template <class R, int NV>
void score_block(const Problem &p, const Terms &terms, const Rows<R, NV> &rows, int64_t first, int64_t keys,
                 const R *gate, Sheet<R, NV> &s, R *x, Vec<R> *top) {
  constexpr int N = Simd<R>::N, L = N * NV;
  int64_t stride;
  const R *k = as_rows(p.key, rows.b, rows.kv, first, keys, p.D, s.k_spare, stride);
  if (!gate && terms.folded) return scores<R, NV, true>(s.qt, k, stride, p.D, keys, x, top);
  scores<R, NV, false>(s.qt, k, stride, p.D, keys, x);
  dress(p, terms, rows, keys, x, gate, s.bias, (R *)nullptr, (R *)nullptr);
  for (int n = 0; n < NV; ++n)
    for (int64_t j = 0; j < keys; ++j) top[n] = vmax(top[n], load(x + j * L + n * N));
}

// Fill the rows' lists from key `from` to the end, by products in 16 bits (screen.h) where all rows may read the keys that
// share a grain: nothing depends on what others hold. False if there is no room, or some number is not finite; then sheet
// and ledger are as they were.
template <int NV, class Link>
bool list_by_screen(const Problem &p, const Terms &terms, const Asked &want, const Rows<float, NV> &rows,
                    const Link &link, const Screen &keys_of, int64_t from, Sheet<float, NV> &s,
                    Ledger<float, NV> &ledger) {
  using V = Vec<float>;
  constexpr int N = Simd<float>::N, L = N * NV;
  rows.gather_rows(p.query, p.D, s.q, padded<float>(p.D), [&](int i) { return rows.factor(p, terms, i); });
  if (!s.coarse.fill(s.q, padded<float>(p.D), rows.n, p.D, s.coarse_spare)) return false;
  const Ledger<float, NV> before = ledger;
  const int64_t known = s.rows, words = words_of(p.D);
  int32_t lengths[L];
  memcpy(lengths, s.length, sizeof lengths);
  const auto no = [&] {
    ledger = before, s.rows = known;
    memcpy(s.length, lengths, sizeof lengths);
    return false;
  };
  V off[NV] = {};  // of products in 16 bits: what floats lost of the keys before `from` is lost without a screen, too
  Found<float, NV> found;
  Census census;
  int64_t stage = 2 * known;
  for (int64_t first = from, next; first < rows.hi; first = next) {
    next = least(rows.hi, (first / SCREEN_KEYS + 1) * SCREEN_KEYS);
    const int64_t keys = next - first;
    const Gate open = open_gate(p, terms, rows, first, keys, s.gate, s.bias, s.spare, s.live + s.rows);
    if (open == CLOSED) continue;
    const float *gate = open == PARTLY ? s.gate : nullptr;
    V price[NV];  // or the largest score, which is to be known where a null key takes all
    for (int n = 0; n < NV; ++n) price[n] = ledger.best[n] < ledger.top[n] ? ledger.best[n] : ledger.top[n];
    bool whole = first % SCREEN_KEYS == 0 && (next % SCREEN_KEYS == 0 || next == p.Tk);
    for (int64_t v = 0; v < keys * NV && gate && whole; ++v) whole = !any(load(gate + v * N) == -INF<float>);
    if (whole) {
      const Grain &grain = keys_of.grains[first / SCREEN_KEYS];
      if (!(grain.size >= 0) || !has_room(s, keys)) return no();
      s.coarse.find(grain, p.D, keys_of.keys + first * 2 * words, keys, price, rows.n, off, s.sums, found.bits);
      float size[L], top[L];
      for (int i = 0; i < L; ++i) size[i] = s.coarse.size[i] * grain.size;
      for (int n = 0; n < NV; ++n) store(top + n * N, ledger.top[n]);
      found.each(keys, [&](int64_t place) {
        const int64_t j = place / L, i = place % L, to = (int64_t)s.length[i]++ * L + i;
        const float x = (float)s.sums[place] * size[i];
        s.list[to] = x, s.index[to] = (int32_t)(first + j);
        top[i] = most(top[i], x);
      });
      for (int n = 0; n < NV; ++n) ledger.top[n] = load(top + n * N);
    } else {
      float *x = s.x + s.rows * L;
      score_block(p, terms, rows, first, keys, gate, s, x, ledger.top);
      for (int64_t v = 0; v < keys * NV; ++v) {
        const V at = load(x + v * N);
        if (any((at - at != 0) & (at != -INF<float>))) return no();
      }
      for (int n = 0; n < NV; ++n) price[n] -= off[n];
      if (!enlist(s, price, rows.n, first, s.rows, keys)) return no();
    }
    bid(p, link, keys, s.x, (const float *)nullptr, ledger);
    if (want.admissible) count_admissible(ledger, keys, gate);
    s.rows += keys;
    if (s.rows < stage) continue;
    stage = 2 * s.rows;
    if (stage < rows.hi - rows.lo) search(p, rows, link, s, ledger, true, 2, 0, census);
  }
  search(p, rows, link, s, ledger, true, 2, 0, census);
  for (V &far : off) {
    if (any(far - far != 0)) return no();
    far *= 2.0f;  // x and the price
  }
  prune(p, rows, s, ledger, off, before.top);
  return true;
}

// p log p and w log p of a piece of the panel. Logarithms are measured from the heaviest weight so far: in a row of many
// like keys, or of next to no mass, their sums would lose digits.
template <class R, int NV>
void add_logs(Ledger<R, NV> &ledger, int n, Vec<R> top, int64_t from, int64_t to, const R *p, const R *w) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  const V before = ledger.heaviest[n], heaviest = vmax(before, top), safe = heaviest > TINY<R> ? heaviest : all((R)1);
  const V shift = before > TINY<R> ? vlog(vmax(all(TINY<R>), before / safe)) : V{};
  V plog = {}, wlog = {};
  for (int64_t j = from; j < to; ++j) {
    const V q = load(p + j * L + n * N), log_p = q > TINY<R> ? vlog(vmax(all(TINY<R>), q / safe)) : V{};
    plog += q * log_p;
    if (w) wlog += load(w + j * L + n * N) * log_p;
  }
  ledger.plog[n] += shift * ledger.mass[n] + plog, ledger.wlog[n] += shift * ledger.slope[n] + wlog;
  ledger.heaviest[n] = heaviest;
}

// Final weights of `keys` panel rows, in place, with the statistics; w apart if the gradient's centre is wanted.
// Row j is key first + j, or where `index` is given, in each lane its own. In pieces, whose sums are made apart and then
// added: shorter chains of rounding.
template <class R, int NV, class Link>
void weigh_link(const Problem &p, const Asked &want, const Rows<R, NV> &rows, const Link &link, Ledger<R, NV> &ledger,
                int64_t first, const int32_t *index, int64_t keys, R *x, const R *prior, R *w_panel) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  const R *squares = (const R *)p.squares.data + p.squares.s0 * rows.b + p.squares.s1 * rows.kv;
  for (int n = 0; n < NV; ++n) {
    const V h = ledger.h[n], anchor = ledger.anchor[n], reference = ledger.reference[n];
    const auto weigh_keys = [&](int64_t from, int64_t to, auto bare) __attribute__((always_inline)) {
      constexpr bool BARE = decltype(bare)::value;  // nothing but the weights is wanted
      V mass = {}, slope = {}, y1 = {}, y2 = {}, energy = {}, soft = {}, log_prior = {}, top = {};
      for (int64_t j = from; j < to; ++j) {
        const int64_t at = j * L + n * N;
        const V d = load(x + at) - anchor;
        V w, q;
        if (!BARE && prior)
          link.times_prior(n, d + h, load(prior + at), q, w);
        else
          link.at(n, d + h, q, w);
        if (!BARE && ledger.some_remote) {
          const V own = d == d ? power(load(prior + at) - ledger.lift[n] + ledger.share[n]) : d;
          q = ledger.remote[n] ? own : q;
          w = ledger.remote[n] ? own : w;  // but for a factor
        }
        mass += q, slope += w;
        store(x + at, q);
        if (w_panel) store(w_panel + at, w);
        if (BARE) continue;
        if (want.moments) {
          const V away = q > 0 ? d - reference : V{};
          y1 += q * away, y2 += q * away * away;
        }
        if (want.energy) energy += (q > 0) & ~ledger.remote[n] ? q * (d + h + Link::ORIGIN) : V{};
        if (want.soft) {
          const V t = d + h, e = vexp2(-vmax(t, -t)), plus = vmax(V{}, t) + (R)LOG2E * vlog1p(e);
          soft += t > -INF<R> ? (prior ? plus * power(load(prior + at)) : plus) : V{};
        }
        top = vmax(top, q);
        if (want.log_prior) log_prior += q > 0 ? q * (load(prior + at) - ledger.lift[n]) : V{};
        if constexpr (Link::PRICED)
          if (want.support)
            ledger.support[n] -= __builtin_convertvector(link.inside(d + h) | ((q > 0) & ledger.remote[n]), V);
      }
      if (!BARE) {
        if (want.entropy) add_logs(ledger, n, top, from, to, x, want.tilt_log ? w_panel : nullptr);
        ledger.y1[n] += y1, ledger.y2[n] += y2, ledger.energy[n] += energy, ledger.soft[n] += soft;
        ledger.log_prior[n] += log_prior;
      }
      ledger.mass[n] += mass, ledger.slope[n] += slope;
    };
    const bool bare = !(prior || want.moments || want.energy || want.soft || want.entropy || want.support);
    for (int64_t from = 0; from < keys; from += PANEL_KEYS) {
      const int64_t to = least(keys, from + PANEL_KEYS);
      bare ? weigh_keys(from, to, Count<true>()) : weigh_keys(from, to, Count<false>());
      if (want.collision || want.spread) {
        V collision = {}, spread = {};
        for (int64_t j = from; j < to; ++j) {
          const V q = load(x + j * L + n * N);
          if (want.collision) collision += q * q;
          if (!want.spread) continue;
          V square;
          for (int i = 0; i < N; ++i) square[i] = squares[index ? (int64_t)index[j * L + n * N + i] : first + j];
          spread += q * square;
        }
        ledger.collision[n] += collision, ledger.spread[n] += spread;
      }
    }
    if (want.top)
      for (int64_t j = 0; j < keys; ++j) ledger.heaviest[n] = vmax(ledger.heaviest[n], load(x + j * L + n * N));
    if (want.first && keys) {  // lists are in order of the keys
      for (int i = 0; i < N; ++i)
        if (index ? index[n * N + i] == 0 : first == 0) ledger.first[n][i] = x[n * N + i];
    }
    if (want.drop)
      for (int64_t j = 0; j < keys; ++j)
        for (int i = 0; i < N; ++i) {
          const int64_t at = j * L + n * N + i;
          const R kept = rows.kept_at(p, index ? (int64_t)index[at] : first + j, n * N + i);
          x[at] *= kept;
          if (w_panel) w_panel[at] *= kept;
        }
  }
}

// to[d] = sum over a row's list of p v (and of w v): each value's row once for both. Values far ahead are called for: the
// list knows which, the processor cannot.
template <class R, bool TILT, int U>
INLINE void sum_part(const R *p, const R *w, const int32_t *index, int64_t step, int64_t n, const R *v, int64_t stride,
                     int64_t ahead, R *to, R *tilt) {
  constexpr int N = Simd<R>::N, FAR = 24;
  using V = Vec<R>;
  V a[U] = {}, b[U] = {};
  for (int64_t k = 0; k < n; ++k) {
    if (k + FAR < n) {
      const R *next = v + index[(k + FAR) * step] * stride;
      for (int64_t d = 0; d < ahead; d += 64 / (int64_t)sizeof(R)) __builtin_prefetch(next + d);
    }
    const R *row = v + index[k * step] * stride;
    const V x = all(p[k * step]), y = TILT ? all(w[k * step]) : V{};
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      const V value = load(row + u * N);
      a[u] += x * value;
      if (TILT) b[u] += y * value;
    }
  }
  for (int u = 0; u < U; ++u) {
    store(to + u * N, a[u]);
    if (TILT) store(tilt + u * N, b[u]);
  }
}
template <class R, bool TILT>
void sum_list(const R *p, const R *w, const int32_t *index, int64_t step, int64_t n, const R *v, int64_t stride,
              int64_t Dv, R *to, R *tilt) {
  constexpr int N = Simd<R>::N, U = TILT ? 4 : 8;
  int64_t d = 0;
  for (; d + U * N <= Dv; d += U * N)
    sum_part<R, TILT, U>(p, w, index, step, n, v + d, stride, d ? 0 : Dv, to + d, tilt + d);
  for (; d + N <= Dv; d += N) sum_part<R, TILT, 1>(p, w, index, step, n, v + d, stride, d ? 0 : Dv, to + d, tilt + d);
  for (; d < Dv; ++d) {
    R a = 0, b = 0;
    for (int64_t k = 0; k < n; ++k) {
      const R value = v[index[k * step] * stride + d];
      a += p[k * step] * value;
      if (TILT) b += w[k * step] * value;
    }
    to[d] = a;
    if (TILT) tilt[d] = b;
  }
}

// The lists as they are when the price is known, without those that have no weight, for the backward pass.
template <class R, int NV, class Link>
void keep(const Problem &p, const Rows<R, NV> &rows, const Sheet<R, NV> &s, const Ledger<R, NV> &ledger, bool listed,
          bool screened) {
  constexpr int N = Simd<R>::N, L = N * NV;
  const Lists<R, L> lists(p, p.lists, rows);
  int64_t n = 0, candidates = 0;
  for (int i = 0; i < rows.n && listed; ++i) candidates += s.length[i];
  const bool with_x = candidates <= lists.room(true);
  bool room = listed;
  for (int i = 0; i < L && room; ++i) {
    lists.ends()[i] = (int32_t)n;
    if (i >= rows.n) continue;
    const R anchor = ledger.anchor[i / N][i % N], h = ledger.h[i / N][i % N];
    const R sum = ledger.best[i / N][i % N] + ledger.top[i / N][i % N] + anchor + h;
    room = sum == sum && n + s.length[i] <= lists.room(with_x);  // a NaN is everywhere, and the row's list may be empty
    for (int64_t k = 0; k < s.length[i] && room; ++k) {
      const R d = s.list[k * L + i] - anchor + h;
      lists.put(n, s.index[k * L + i]);
      if (with_x) lists.x()[n] = s.list[k * L + i];
      n += d > -Link::ORIGIN, room = d == d;
    }
  }
  lists.at[0] = room ? L + (with_x ? lists.WITH_X : 0) + (screened ? lists.SCREENED : 0) : 0;
  if (room) lists.ends()[L] = (int32_t)n;
}

// From sums to results, one row at a time: statistics.py's definitions. `read`: each row may read some key.
template <class R, int NV, class Link>
void finish_link(const Problem &p, const Terms &terms, const Asked &want, const Rows<R, NV> &rows, const Link &link,
                 const Ledger<R, NV> &ledger, bool read, R *share, R *tilt_share) {
  constexpr int N = Simd<R>::N;
  using V = Vec<R>;
  for (int i = 0; i < rows.n; ++i) {
    const int n = i / N, lane = i % N;
    const int64_t at = rows.flat(p, i);
    const R tau = rows.temperature[i], level = rows.level[i], c = rows.c[n][lane], alpha = rows.power[i] + 1;
    const R anchor = ledger.anchor[n][lane], h = ledger.h[n][lane], mass = ledger.mass[n][lane];
    const bool free = p.marginal == regard::FREE, sink = p.marginal == regard::SINK;
    const bool relax = p.marginal == regard::RELAX;
    const R top = ledger.top[n][lane];
    // A NaN among the weights, or no score above -inf (which a mask may bring to the lowest number): 0/0.
    bool invalid = mass != mass || top != top;
    if (p.marginal == regard::ROWS && top <= LOWEST<R>)
      invalid |= top == -INF<R> ? read : !rows.finite(p.query, p.D, i);
    if (invalid) {
      const int64_t results[] = {p.dual, p.peak, p.rest, p.mass_sent, p.entropy, p.tilt_log, p.kl, p.score_variance,
                                 p.cost, p.free_energy, p.max_scores, p.max_weight, p.collision, p.support,
                                 p.first_key_mass, p.spread};
      share[i] = tilt_share[i] = NOT_A_NUMBER<R>;
      for (int64_t result : results) put(result, at, share[i]);
      if (free) put(p.dual, at, -level);  // which is given
      continue;
    }
    const bool remote = ledger.remote[n][lane], keys = top > -INF<R>;
    const bool some = free || remote || h > -INF<R> || h != h;
    R null = 0, null_w = 0, null_x = 0;
    if (sink) {
      V p0, w0;
      null_x = level * c - anchor;
      link.at(n, all(null_x + h), p0, w0);
      null = p0[lane], null_w = w0[lane];
    }
    const R lift = ledger.lift[n][lane], y = remote ? exp2_of((ledger.share[n][lane] - lift) * rows.power[i]) : 0;
    const R dual = !some ? -INF<R> : free ? -level : remote ? -y / c : (anchor - h - Link::ORIGIN) / c;
    // What rounding of the price left over is shared in proportion.
    const R all_mass = mass + null;
    R scale = (free || relax || !(all_mass > 0)) ? 1 : (R)p.mass / all_mass;
    share[i] = scale;
    put(p.dual, at, dual);
    put(p.peak, at, remote ? INF<R> : some ? anchor : -INF<R>), put(p.rest, at, remote ? (R)ledger.share[n][lane] : h);
    put(p.mass_sent, at, mass * scale);
    R kappa = 0;
    if (relax && some) kappa = tau * exp_of(dual / level) / level;
    const R slope = ledger.slope[n][lane] + null_w + kappa;
    tilt_share[i] = slope > TINY<R> ? 1 / slope : 0;  // the inverse of less is no number
    const R total = all_mass > 0 ? all_mass : 1;
    R entropy = 0;
    if (want.entropy && all_mass > 0) {
      const R most_p = (R)ledger.heaviest[n][lane] > TINY<R> ? (R)ledger.heaviest[n][lane] : 1;
      const R log_null = null > 0 ? log_of(null / most_p) : 0;
      entropy = log_of(total / most_p) - (ledger.plog[n][lane] + null * log_null) / total;
      const R negative = -entropy;
      entropy = entropy < 0 ? 0 : entropy;
      put(p.entropy, at, entropy);
      if (want.tilt_log) {
        // With the mass as the backward pass knows it, not as it was summed: there the two meet.
        const R w_sum = ledger.slope[n][lane] + null_w, sent = relax ? exp_of(-dual / level) : 1 / (R)p.mass;
        R sum = ledger.wlog[n][lane] + null_w * log_null + (entropy + log_of(most_p * sent)) * w_sum;
        if (!(sent < INF<R>)) sum = 0;
        put(p.tilt_log, at, sum * tilt_share[i]);
      }
      if (p.kl) {
        R prior_mass = ledger.admissible[n][lane], log_prior_mass = log_of(prior_mass);
        if (terms.prior) log_prior_mass = (R)LN2 * (ledger.prior_top[n][lane] - lift + log2_of(ledger.prior_sum[n][lane]));
        if (sink) log_prior_mass = keys ? log_of(exp_of(log_prior_mass) + 1) : 0;
        const R kl = negative - (R)LN2 * ledger.log_prior[n][lane] / total + log_prior_mass;
        put(p.kl, at, kl < 0 ? 0 : kl);
      }
    } else {
      put(p.entropy, at, (R)0), put(p.tilt_log, at, (R)0), put(p.kl, at, (R)0);
    }
    const R y1 = ledger.y1[n][lane], reference = ledger.reference[n][lane];
    if (p.score_variance) {
      const R away = sink ? null_x - reference : 0, mean = (y1 + null * away) / total;
      const R variance = (ledger.y2[n][lane] + null * away * away) / total - mean * mean;
      put(p.score_variance, at, all_mass > 0 && !(variance < 0) ? variance / (c * c * tau * tau) : 0);
    }
    put(p.cost, at, mass > 0 ? -scale * (y1 + (anchor + reference) * mass) / c : 0);
    if (p.free_energy) {
      R value;
      if (p.family == regard::FERMI_DIRAC) {
        value = tau * (R)LN2 * ledger.soft[n][lane];
      } else {
        R energy = ledger.energy[n][lane];
        if (null > 0) energy += null * (null_x + h + Link::ORIGIN);
        value = tau / alpha * energy;  // of the dual: there the price's own error hardly counts
        if (relax) value += level * ((some ? exp_of(dual / level) : 0) - 1);
        if (sink || p.marginal == regard::ROWS) value += (R)p.mass * dual;
        if (remote) value = -tau * (R)p.mass * y / (alpha * (alpha - 1));
      }
      put(p.free_energy, at, value);
    }
    put(p.max_scores, at, keys ? top / c : -INF<R>);
    put(p.max_weight, at, scale * most((R)ledger.heaviest[n][lane], null));
    put(p.collision, at, scale * scale * (ledger.collision[n][lane] + null * null));
    put(p.support, at, p.family == regard::FERMI_DIRAC ? ledger.admissible[n][lane] : ledger.support[n][lane]);
    put(p.first_key_mass, at, scale * ledger.first[n][lane]);
    put(p.spread, at, scale * ledger.spread[n][lane]);
  }
}

// One block of rows, from queries to results. `keys_of`: the head's keys in 16 bits, if they are to be screened.
template <class R, int NV, class Link>
void attend_link(const Problem &p, const Terms &terms, const Asked &want, const Rows<R, NV> &rows, Sheet<R, NV> &s,
                 Ledger<R, NV> &ledger, const Screen *keys_of) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  const Link link(rows);
  const bool free = p.marginal == regard::FREE;
  memset((void *)&ledger, 0, sizeof ledger);
  memset(s.ot, 0, L * p.Dv * sizeof(R)), memset(s.tilt_t, 0, L * p.Dv * sizeof(R));
  for (int n = 0; n < NV; ++n) {
    ledger.anchor[n] = ledger.alone[n] = ledger.best[n] = ledger.top[n] = ledger.prior_top[n] = all(-INF<R>);
    if (free)
      for (int i = 0; i < N; ++i)
        ledger.anchor[n][i] = 0, ledger.h[n][i] = rows.level[n * N + i] * rows.c[n][i] - Link::ORIGIN;
  }
  rows.transpose(p.query, p.D, s.qt, [&](int i) { return rows.factor(p, terms, i); });
  s.rows = s.n_segments = 0;
  R *const w_panel = want.tilt ? s.w : nullptr;
  const auto ship = [&](const typename Sheet<R, NV>::Segment &segment) {  // weigh, and P^T V
    R *x = s.x + segment.at * L;
    const R *prior = s.prior ? s.prior + segment.at * L : nullptr;
    weigh_link(p, want, rows, link, ledger, segment.first, nullptr, segment.keys, x, prior, w_panel);
    if (!p.out) return;
    int64_t stride;
    const R *v = as_rows(p.value, rows.b, rows.kv, segment.first, segment.keys, p.Dv, s.v_spare, stride);
    each_run(segment.partly ? s.live + segment.at : nullptr, segment.keys, [&](int64_t from, int64_t to) {
      gather<R, NV>(x + from * L, v + from * stride, stride, to - from, p.Dv, s.ot);
      if (want.tilt) gather<R, NV>(s.w + from * L, v + from * stride, stride, to - from, p.Dv, s.tilt_t);
    });
  };
  bool listed = false, may_list = p.marginal != regard::RELAX, read = false;
  Census census;
  bool screened = false;
  int64_t next_stage = STAGE;
  for (int64_t first = rows.lo; first < rows.hi && !screened; first += PANEL_KEYS) {
    const int64_t keys = least(PANEL_KEYS, rows.hi - first);
    R *x = s.x + s.rows * L, *gate = s.prior ? s.prior + s.rows * L : s.gate;
    const Gate open = open_gate(p, terms, rows, first, keys, gate, s.bias, s.spare, s.live + s.rows);
    if (open == CLOSED) continue;
    read |= open == OPEN;
    score_block(p, terms, rows, first, keys, open == PARTLY ? gate : nullptr, s, x, ledger.top);
    if constexpr (Link::PRICED)
      if (!free) bid(p, link, keys, x, s.prior ? gate : nullptr, ledger);
    if (want.admissible) count_admissible(ledger, keys, open == PARTLY ? x : nullptr);
    for (int n = 0; n < NV; ++n) {
      if (want.prior_mass) {
        V top = ledger.prior_top[n];
        for (int64_t j = 0; j < keys; ++j) top = vmax(top, load(gate + j * L + n * N));
        const V safe = top == -INF<R> ? V{} : top;
        ledger.prior_sum[n] *= vexp2(ledger.prior_top[n] - safe), ledger.prior_top[n] = top;
        for (int64_t j = 0; j < keys; ++j) ledger.prior_sum[n] += vexp2(load(gate + j * L + n * N) - safe);
      }
    }
    const typename Sheet<R, NV>::Segment segment = {first, keys, s.rows, open == PARTLY};
    if (free) {
      if (want.moments)
        for (int n = 0; n < NV; ++n) {
          const V to = ledger.top[n] == -INF<R> ? V{} : ledger.top[n], shift = ledger.reference[n] - to;
          ledger.y2[n] += shift * ((R)2 * ledger.y1[n] + shift * ledger.mass[n]);
          ledger.y1[n] += shift * ledger.mass[n], ledger.reference[n] = to;
        }
      ship(segment);
    } else if constexpr (Link::PRICED) {
      s.segments[s.n_segments++] = segment;
      s.rows += keys;
      if (!may_list) continue;
      if (listed) may_list = listed = enlist(s, ledger.best, rows.n, first, segment.at, keys);
      if (s.rows >= next_stage) {
        const int64_t all_rows = rows.hi - rows.lo;
        const int iterations = next_stage == STAGE ? 4 : 2;
        next_stage = 2 * s.rows;
        if ((listed ? 2 : 4) * s.rows >= all_rows) continue;
        listed = search(p, rows, link, s, ledger, listed, iterations, SPARSE_SHARE, census);
        if constexpr (sizeof(R) == 4 && NV == 3)
          if (listed && keys_of) {
            screened = list_by_screen(p, terms, want, rows, link, *keys_of, first + keys, s, ledger);
            keys_of = nullptr;  // only once
          }
      }
    }
  }
  if constexpr (Link::PRICED)
    if (!free) {
      if (s.prior && p.marginal == regard::ROWS) rest_on_prior(p, link, s, ledger);
      if (ledger.some_remote) listed = false;
      if (listed && !screened) {
        const V none[NV] = {};
        search(p, rows, link, s, ledger, true, 2, 0, census);
        prune(p, rows, s, ledger, none);
      }
      const double share = s.rows >= STAGE && !ledger.some_remote ? SPARSE_SHARE : 0;
      listed = search(p, rows, link, s, ledger, listed, 100, share, census);
      if (p.lists) keep<R, NV, Link>(p, rows, s, ledger, listed, screened);
      if (listed)
        weigh_link(p, want, rows, link, ledger, 0, s.index, level_lists(s), s.list, s.list_prior, w_panel);
      else
        for (int64_t g = 0; g < s.n_segments; ++g) ship(s.segments[g]);
    }
  R share[L], tilt_share[L];
  finish_link<R, NV, Link>(p, terms, want, rows, link, ledger, read, share, tilt_share);
  if (!p.out) return;
  R *out[L], *tilt[L];
  for (int i = 0; i < rows.n; ++i)
    out[i] = (R *)p.out + rows.flat(p, i) * p.Dv, tilt[i] = (R *)p.tilt + rows.flat(p, i) * p.Dv;
  if (!listed) {
    to_rows(s.ot, L, share, rows.n, p.Dv, out);
    if (want.tilt) to_rows(s.tilt_t, L, tilt_share, rows.n, p.Dv, tilt);
    return;
  }
  const Tensor &value = p.value;
  const bool as_is = value.type == p.compute && (value.s3 == 1 || p.Dv == 1);
  const int64_t base = value.s0 * rows.b + value.s1 * rows.kv;
  for (int i = 0; i < rows.n; ++i) {
    const R *weights = s.list + i, *slopes = s.w + i;
    const int32_t *index = s.index + i;
    const R *v = (const R *)value.data + base;
    if (as_is && want.tilt) {
      sum_list<R, true>(weights, slopes, index, L, s.length[i], v, value.s2, p.Dv, out[i], tilt[i]);
    } else if (as_is) {
      sum_list<R, false>(weights, slopes, index, L, s.length[i], v, value.s2, p.Dv, out[i], nullptr);
    } else {
      memset(out[i], 0, p.Dv * sizeof(R));
      if (want.tilt) memset(tilt[i], 0, p.Dv * sizeof(R));
      for (int64_t k = 0; k < s.length[i]; ++k) {
        copy<R>(value.data, value.type, base + index[k * L] * value.s2, value.s3, p.Dv, s.v_spare, 1, (R)1);
        for (int64_t d = 0; d < p.Dv; ++d) out[i][d] += weights[k * L] * s.v_spare[d];
        if (want.tilt)
          for (int64_t d = 0; d < p.Dv; ++d) tilt[i][d] += slopes[k * L] * s.v_spare[d];
      }
    }
    for (int64_t d = 0; d < p.Dv; ++d) out[i][d] *= share[i];
    if (want.tilt)
      for (int64_t d = 0; d < p.Dv; ++d) tilt[i][d] *= tilt_share[i];
  }
}

template <class R, int NV> void forward_link(const Problem &p) {
  const Terms terms(p);
  const Asked want(p, terms);
  const PanelCut<R, NV> cut(p);
  char *scratch = (char *)((p.scratch + 63) / 64 * 64), *screens = scratch + p.threads * cut.thread_bytes(p);
  const int64_t heads = p.B * p.Hkv, at_once = cut.screened_heads(p), units = cut.cut.units / heads;  // of one head
  for (int64_t head = 0; head < heads; head += at_once ? at_once : heads) {
    const int64_t some = at_once ? least(at_once, heads - head) : heads;
    if constexpr (sizeof(R) == 4) {
      // Keys that some row may read, as far as the band says.
      const int64_t low = most((int64_t)0, p.offset - p.left), high = least(p.Tk, p.offset + p.Tq + p.right);
      const int64_t from = low / SCREEN_KEYS, key_blocks = most((int64_t)0, (high - 1) / SCREEN_KEYS + 1 - from);
      parallel(p.threads, at_once ? some * key_blocks : 0, [&](int64_t job, int64_t thread) {
        Arena arena{scratch + thread * cut.thread_bytes(p)};
        const int64_t h = head + job / key_blocks;
        const Screen screen(p, screens + (h - head) * Screen::bytes(p));
        screen.fill(p, h / p.Hkv, h % p.Hkv, from + job % key_blocks, arena.take<float>(SCREEN_KEYS * p.D));
      });
    }
    parallel(p.threads, some * units * cut.blocks, [&](int64_t job, int64_t thread) {
      Arena arena{scratch + thread * cut.thread_bytes(p)};
      Rows<R, NV> &rows = *arena.take<Rows<R, NV>>(1);
      Ledger<R, NV> &ledger = *arena.take<Ledger<R, NV>>(1);
      Sheet<R, NV> sheet = cut.sheet(p, terms, arena);
      const int64_t unit = job / cut.blocks;
      cut.cut.place(p, rows, head * units + unit, cut.blocks - 1 - job % cut.blocks);  // longest rows first
      const Screen screen(p, screens + unit / units * Screen::bytes(p));
      with_link<R>(p, [&](auto tag) {
        attend_link<R, NV, typename decltype(tag)::Link>(p, terms, want, rows, sheet, ledger, at_once ? &screen : nullptr);
      });
    });
  }
}

}  // namespace
