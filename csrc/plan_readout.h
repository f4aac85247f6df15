// Parts of the plan, read out after the forward pass: the largest weights of each row, the weights of chosen keys, or
// the sums over blocks of queries and keys.
//
// No weight was saved: weights are computed again from the price of each row, which was saved in two parts.
//   for each block of L rows (lanes), for each block of keys that some row may read:
//     x <- exponents, as in the forward pass;  p <- weights     [keys][L]
//     p is passed to the readout that was requested
// A task owns its rows and visits their keys in order, so threads never change a result.
#pragma once
#include "engine/arena.h"
#include "engine/bf16_tiles.h"
#include "engine/gate.h"
#include "engine/partition.h"
#include "engine/threads.h"
#include "engine/tiles.h"
#include "kl/exponential.h"
#include "links/links.h"

namespace {

constexpr int64_t READOUT_KEYS = 96;  // keys per block
constexpr int64_t READOUT_ROWS = 96;  // at least so many rows per task, where blocks are summed

// A weight and its key as one integer. Larger codes come first: weights are not negative, so their bits are in order
// (NaN above all, as in torch.topk), and of equal weights the smaller key comes first.
template <class R> struct CodeOf;
template <> struct CodeOf<float> {
  using type = uint64_t;
};
template <> struct CodeOf<double> {
  using type = unsigned __int128;
};

// The n largest weights of one row. Candidates are only noted. When the notes are full, the n largest are kept, and the
// smallest of them is the bound that later candidates must exceed. (std::sort is not used, because its instances would
// be shared between instruction sets, see engine/vector.h.)
template <class R> struct Largest {
  using Code = typename CodeOf<R>::type;
  using Bits = typename IntegerOf<R>::type;
  static constexpr int SHIFT = sizeof(R) * 8;
  Code *notes;
  int64_t n, room, count;

  static int64_t room_for(const Problem &p) { return min_of(p.Tk, p.picks + max_of(p.picks, (int64_t)48)); }
  static Code code(R weight, int64_t key) {
    Bits bits;
    memcpy(&bits, &weight, sizeof bits);
    const Code high = sizeof(R) == 4 ? (Code)(uint32_t)bits : (Code)(uint64_t)bits;
    return high << SHIFT | (Code)(uint32_t)~(uint32_t)key;
  }
  static R weight_of(Code code) {
    const Bits bits = (Bits)(code >> SHIFT);
    R weight;
    memcpy(&weight, &bits, sizeof bits);
    return weight;
  }
  static int64_t key_of(Code code) { return (uint32_t)~(uint32_t)code; }

  // Partition notes[low ... high], larger ones first. Returns the last index of the first part.
  int64_t split(int64_t low, int64_t high) {
    const Code pivot = notes[low + (high - low) / 2];
    for (int64_t i = low - 1, j = high + 1;;) {
      do ++i;
      while (notes[i] > pivot);
      do --j;
      while (notes[j] < pivot);
      if (i >= j) return j;
      const Code code = notes[i];
      notes[i] = notes[j], notes[j] = code;
    }
  }
  void keep_best() {
    for (int64_t low = 0, high = count - 1; low < high;) {
      const int64_t middle = split(low, high);
      if (middle >= n)
        high = middle;
      else
        low = middle + 1;
      if (low == n) break;  // the first n are the largest
    }
    count = n;
  }
  void sort(int64_t low, int64_t high) {
    while (high - low > 16) {
      const int64_t middle = split(low, high);
      if (middle - low < high - middle)
        sort(low, middle), low = middle + 1;
      else
        sort(middle + 1, high), high = middle;
    }
    for (int64_t i = low + 1; i <= high; ++i) {
      const Code code = notes[i];
      int64_t j = i;
      for (; j > low && notes[j - 1] < code; --j) notes[j] = notes[j - 1];
      notes[j] = code;
    }
  }

  // Keys come in increasing order. Returns whether the notes are full, so that the bound can be raised.
  INLINE bool offer(R weight, int64_t key) {
    notes[count++] = code(weight, key);
    return count == room && room > n;
  }
  R raise_bound() {
    keep_best();
    Code last = notes[0];
    for (int64_t i = 1; i < n; ++i) last = min_of(last, notes[i]);
    return weight_of(last);
  }
  void finish(R *weights, int64_t *keys) {
    if (count > n) keep_best();
    int64_t at = count;  // few notes are still in order of their keys; keys without weight fill up the rest
    for (int64_t key = 0, next = 0; at < n; ++key) {
      if (next < count && key_of(notes[next]) == key)
        ++next;
      else
        weights[at] = 0, keys[at++] = key;
    }
    sort(0, count - 1);
    for (int64_t i = 0; i < count; ++i) weights[i] = weight_of(notes[i]), keys[i] = key_of(notes[i]);
  }
};

template <class R, int NV> struct ReadoutPanels {
  static constexpr int64_t L = Simd<R>::N * NV, SIZE = READOUT_KEYS * L;
  R *x, *gate, *bias, *spare, *k_spare;
  R *qt;                             // queries; bfloat16: the factors of the scores, and queries in pairs
  R *whole;                          // the weights of all keys that the rows may read, for chosen keys
  typename Largest<R>::Code *notes;  // of the largest weights of each row
  uint8_t *live;
  // The number of keys that a block of rows may read.
  static int64_t span(const Problem &p) {
    const int64_t band = p.left + p.right;  // packed rows (engine/partition.h) are fewer than 16 places apart
    return band < p.Tk ? min_of(p.Tk, max_of((int64_t)0, band + 1 + max_of((int64_t)16, L))) : p.Tk;
  }
  ReadoutPanels(Arena &arena, const Problem &p) {
    R **panels[] = {&x, &gate, &bias, &spare};
    for (R **panel : panels) *panel = arena.take<R>(SIZE);
    k_spare = arena.take<R>(READOUT_KEYS * p.D), qt = arena.take<R>(L * (p.D + 2));
    whole = p.index ? arena.take<R>(span(p) * L) : nullptr;
    notes = p.picked_keys ? arena.take<typename Largest<R>::Code>(Largest<R>::room_for(p) * L) : nullptr;
    live = arena.take<uint8_t>(READOUT_KEYS);
  }
  static int64_t bytes(const Problem &p) {
    const int64_t numbers = 4 * SIZE + READOUT_KEYS * p.D + L * (p.D + 2) + (p.index ? span(p) * L : 0);
    const int64_t notes = p.picked_keys ? Largest<R>::room_for(p) * L : 0;
    return numbers * (int64_t)sizeof(R) + notes * (int64_t)sizeof(typename Largest<R>::Code) + READOUT_KEYS + 640;
  }
};

// x -> p in place; prior: null where it is a part of x.
template <class R, int NV, class Link>
void read_weights(const Problem &p, const Rows<R, NV> &rows, int64_t keys, R *x, const R *prior, const Vec<R> *peak,
                  const Vec<R> *rest, const Vec<R> *prior_offset) {
  using V = Vec<R>;
  constexpr int N = Simd<R>::N, L = N * NV;
  const Link link(p, rows);
  for (int64_t j = 0; j < keys; ++j)
    for (int n = 0; n < NV; ++n) {
      const int64_t at = j * L + n * N;
      const V e = load(x + at), d = e - peak[n] + rest[n];
      V weight, w;
      if (prior)
        link.times_prior(n, d, load(prior + at), weight, w);
      else
        link.at(n, d, weight, w);
      if (prior && p.family == regard::TSALLIS) {  // a row that has its prior's weights (links/price_search.h)
        const V own = e == e ? exp2_bounded(load(prior + at) - prior_offset[n] + rest[n]) : e;
        weight = peak[n] == INF<R> ? own : weight;
      }
      store(x + at, e == -INF<R> ? V{} : weight);  // masked, whatever the price of the row is
    }
}

// Call take(first, keys, p) for each block of keys that a block of rows may read. Lanes without a row may hold
// anything. T: the type of the keys in their products, R or Bf16 (bf16_tiles.h).
template <class R, int NV, class T, class Take>
void read_rows(const Problem &p, const Terms &terms, const Rows<R, NV> &rows, ReadoutPanels<R, NV> &s, Take take) {
  constexpr int N = Simd<R>::N;
  Vec<R> peak[NV] = {}, rest[NV];
  for (int n = 0; n < NV; ++n) rest[n] = broadcast(-INF<R>);
  for (int i = 0; i < rows.n; ++i) {
    const R top = of_row<R>(p.saved_peak, rows.at(p.saved_peak, i));
    const R h = of_row<R>(p.saved_rest, rows.at(p.saved_rest, i));
    if (top == -INF<R>) continue;  // the row has no key
    peak[i / N][i % N] = top, rest[i / N][i % N] = p.family == regard::KL ? -h : h;
  }
  if constexpr (PAIRED<T>) {
    for (int i = 0; i < rows.L; ++i) s.qt[i] = rows.factor(p, terms, i);
    pair_lanes<NV>(rows, p.query, p.D, (Pair *)(s.qt + rows.L), (Bf16 *)s.k_spare);
  } else {
    rows.transpose(p.query, p.D, s.qt, [&](int i) { return rows.factor(p, terms, i); });
  }
  Vec<R> prior_offset[NV] = {};
  Mask<R> prior_only = {};
  for (int n = 0; n < NV; ++n) prior_only |= peak[n] == INF<R>;
  if (p.family == regard::TSALLIS && terms.prior && any(prior_only))
    largest_priors(p, terms, rows, READOUT_KEYS, s.gate, s.bias, s.spare, s.live, prior_offset);
  for (int64_t first = rows.lo; first < rows.hi; first += READOUT_KEYS) {
    const int64_t keys = min_of(READOUT_KEYS, rows.hi - first);
    const Gate gate = fill_gate(p, terms, rows, first, keys, s.gate, s.bias, s.spare, s.live);
    if (gate == CLOSED) continue;
    int64_t stride;
    if constexpr (PAIRED<T>) {
      const Bf16 *k = rows_of_pairs(p.key, rows.b, rows.kv, first, keys, p.D, (Bf16 *)s.k_spare, stride);
      pair_scores<NV, false>((const Pair *)(s.qt + rows.L), (const Vec<R> *)s.qt, k, stride, even(p.D), keys, s.x);
    } else {
      const R *k = as_rows(p.key, rows.b, rows.kv, first, keys, p.D, s.k_spare, stride);
      scores<R, NV, false>(s.qt, k, stride, p.D, keys, s.x);
    }
    if (gate >= WEIGHTED || !terms.folded)
      apply_bias_and_mask(p, terms, rows, keys, s.x, gate >= WEIGHTED ? s.gate : nullptr, s.bias, (R *)nullptr,
                          (R *)nullptr);
    const auto apply_link = [&](auto tag) {
      read_weights<R, NV, typename decltype(tag)::Link>(p, rows, keys, s.x, terms.prior ? s.gate : nullptr, peak, rest,
                                                        prior_offset);
    };
    if constexpr (PAIRED<T>)
      apply_link(Tag<Exponential<R>>());
    else
      p.family == regard::KL ? apply_link(Tag<Exponential<R>>()) : with_link<R>(p, apply_link);
    take(first, keys, s.x);
  }
}

template <class R, int NV, class T>
void read_largest(const Problem &p, const Terms &terms, const Rows<R, NV> &rows, ReadoutPanels<R, NV> &s) {
  constexpr int N = Simd<R>::N, L = N * NV;
  const int64_t room = Largest<R>::room_for(p);
  Largest<R> lists[L];
  for (int i = 0; i < rows.n; ++i) lists[i] = {s.notes + i * room, p.picks, room, 0};
  Vec<R> bound[NV] = {};                               // weights above it are candidates
  const uint64_t exist = ((uint64_t)1 << rows.n) - 1;  // there are at most 48 lanes
  read_rows<R, NV, T>(p, terms, rows, s, [&](int64_t first, int64_t keys, const R *panel) {
    for (int64_t j = 0; j < keys; ++j) {
      Mask<R> over[NV], some = {};
      for (int n = 0; n < NV; ++n)
        some |= over[n] = ~(load(panel + j * L + n * N) <= bound[n]);  // NaN is a candidate, too
      if (!any(some)) continue;
      uint64_t bits = 0;
      for (int n = 0; n < NV; ++n) bits |= (uint64_t)lanes_of(over[n]) << (n * N);
      for (bits &= exist; bits; bits &= bits - 1) {
        const int i = __builtin_ctzll(bits);
        if (lists[i].offer(panel[j * L + i], first + j)) bound[i / N][i % N] = lists[i].raise_bound();
      }
    }
  });
  for (int i = 0; i < rows.n; ++i) {
    const int64_t at = rows.flat(p, i) * p.picks;
    lists[i].finish((R *)p.picked_weights + at, (int64_t *)p.picked_keys + at);
  }
}

template <class R, int NV, class T>
void read_sums(const Problem &p, const Terms &terms, const Rows<R, NV> &rows, ReadoutPanels<R, NV> &s) {
  constexpr int N = Simd<R>::N, L = N * NV;
  const int64_t down = (p.Tq + p.block - 1) / p.block, across = (p.Tk + p.block - 1) / p.block;
  int64_t owner[L];  // the block of queries that each row belongs to
  for (int i = 0; i < rows.n; ++i) owner[i] = (rows.b * p.H + rows.head[i]) * down + rows.query[i] / p.block;
  read_rows<R, NV, T>(p, terms, rows, s, [&](int64_t first, int64_t keys, const R *panel) {
    for (int64_t j = 0; j < keys;) {
      const int64_t column = (first + j) / p.block, to = min_of(keys, (column + 1) * p.block - first);
      Vec<R> sums[NV] = {};
      for (; j < to; ++j)
        for (int n = 0; n < NV; ++n) sums[n] += load(panel + j * L + n * N);
      for (int i = 0; i < rows.n;) {
        const int64_t row = owner[i];
        R sum = 0;
        for (; i < rows.n && owner[i] == row; ++i) sum += sums[i / N][i % N];
        ((R *)p.block_sums)[row * across + column] += sum;
      }
    }
  });
}

template <class R, int NV, class T>
void read_chosen(const Problem &p, const Terms &terms, const Rows<R, NV> &rows, ReadoutPanels<R, NV> &s) {
  constexpr int L = Simd<R>::N * NV;
  if (rows.hi > rows.lo) memset(s.whole, 0, (rows.hi - rows.lo) * L * sizeof(R));
  read_rows<R, NV, T>(p, terms, rows, s, [&](int64_t first, int64_t keys, const R *panel) {
    memcpy(s.whole + (first - rows.lo) * L, panel, keys * L * sizeof(R));
  });
  for (int i = 0; i < rows.n; ++i) {
    const int64_t *index = (const int64_t *)p.index.data + rows.at(p.index, i);
    R *to = (R *)p.picked_weights + rows.flat(p, i) * p.picks;
    for (int64_t pick = 0; pick < p.picks; ++pick) {
      const int64_t key = index[pick * p.index.s3];
      to[pick] = key >= rows.lo && key < rows.hi ? s.whole[(key - rows.lo) * L + i] : 0;
    }
  }
}

// Where blocks are summed, a task has whole blocks of queries.
template <class R, int NV> struct ReadoutPartition : WorkPartition<R, NV> {
  using Base = WorkPartition<R, NV>;
  using Base::L, Base::packed, Base::rows;
  int64_t task_rows, tasks;
  explicit ReadoutPartition(const Problem &p) : Base(p), task_rows(L) {
    if (p.block_sums) task_rows = packed || p.block >= rows ? rows : (READOUT_ROWS + p.block - 1) / p.block * p.block;
    tasks = (rows + task_rows - 1) / task_rows;
  }
  int64_t thread_bytes(const Problem &p) const {
    return (ReadoutPanels<R, NV>::bytes(p) + (int64_t)sizeof(Rows<R, NV>) + 127) / 64 * 64;
  }
  int64_t bytes(const Problem &p) const { return p.threads * thread_bytes(p) + 128; }
};

template <class R, int NV, class T> void run_readout(const Problem &p) {
  const Terms terms(p);
  const ReadoutPartition<R, NV> partition(p);
  char *scratch = scratch_of(p);
  parallel(p.threads, partition.units * partition.tasks, [&](int64_t job, int64_t thread) {
    const int64_t unit = job / partition.tasks,
                  task = partition.tasks - 1 - job % partition.tasks;  // longest rows first
    Arena arena{scratch + thread * partition.thread_bytes(p)};
    Rows<R, NV> &rows = *arena.take<Rows<R, NV>>(1);
    ReadoutPanels<R, NV> panels(arena, p);
    const int64_t end = min_of(partition.rows, (task + 1) * partition.task_rows);
    for (int64_t first = task * partition.task_rows; first < end; first += partition.L) {
      partition.place(p, rows, unit, first, min_of(partition.L, end - first));
      if (p.picked_keys)
        read_largest<R, NV, T>(p, terms, rows, panels);
      else if (p.index)
        read_chosen<R, NV, T>(p, terms, rows, panels);
      else
        read_sums<R, NV, T>(p, terms, rows, panels);
    }
  });
}

}  // namespace
