// A block of rows with scores of our choice, as the search for prices and the lists of candidates take it.
#pragma once
#include "checks.h"
#include "links/price_search.h"

namespace {

struct Setting {
  int64_t keys = 97;
  double alpha = 1.5, mass = 1, level = 0;  // level: the parameter of the marginal
  regard::Marginal marginal = regard::ROWS;
  bool prior = false;
  double spread = 3;  // scores are in +-spread
};

template <class R, int NV> struct Block {
  static constexpr int L = Simd<R>::N * NV;
  regard::Problem p = {};
  Rows<R, NV> rows;
  RowSums<R, NV> sums;
  std::vector<char> memory;
  LinkPanels<R, NV> s;

  explicit Block(const Setting &setting) {
    p.B = p.H = p.Hkv = p.D = p.Dv = 1, p.Tq = L, p.Tk = setting.keys;
    p.left = p.right = 1 << 29;
    p.compute = sizeof(R) == 4 ? regard::F32 : regard::F64, p.family = regard::TSALLIS, p.marginal = setting.marginal;
    p.mass = setting.mass, p.temperature_value = 1, p.alpha_value = setting.alpha, p.level_value = setting.level;
    if (setting.prior) p.prior0.data = (int64_t)this;  // not read: only that there is a prior counts
    rows.place(p, 0, 0, 0, false, 0, L);
    const LinkPartition<R, NV> partition(p);
    memory.resize(partition.thread_bytes(p) + 64);
    Arena arena{(char *)(((uintptr_t)memory.data() + 63) / 64 * 64)};
    s = partition.panels(p, Terms(p), arena);
    s.rows = setting.keys, s.n_segments = 0;
    for (int64_t first = 0; first < setting.keys; first += PANEL_KEYS)
      s.segments[s.n_segments++] = {first, min_of(PANEL_KEYS, setting.keys - first), first, true};

    checks::Random random(setting.keys + (int64_t)(100 * setting.alpha));
    for (int64_t j = 0; j < setting.keys; ++j)
      for (int i = 0; i < L; ++i) {
        const bool masked = i == 1 || (i % 3 == 2 && (i + j) % 5 == 0);  // row 1 has no key
        x(j, i) = masked ? -INF<R> : (R)((setting.alpha - 1) * random.uniform(-setting.spread, setting.spread));
        if (setting.prior) s.prior[j * L + i] = masked ? -INF<R> : (R)random.uniform(-6, 0);
      }
  }
  R &x(int64_t j, int i) { return s.x[j * L + i]; }

  // Solve for the price of each row. Returns whether rows have lists.
  template <class Link> bool solve(double share, int iterations = 100) {
    const Link link(p, rows);
    constexpr int N = Simd<R>::N;
    memset((void *)&sums, 0, sizeof sums);
    for (int n = 0; n < NV; ++n) {
      sums.anchor[n] = sums.single_key_price[n] = sums.price_bound[n] = sums.top[n] = broadcast(-INF<R>);
      for (int64_t j = 0; j < s.rows; ++j) sums.top[n] = vmax(sums.top[n], load(s.x + j * L + n * N));
    }
    best_single_key_price(p, link, s.rows, s.x, s.prior, sums);
    StepCounts counts;
    return search(p, rows, link, s, sums, false, iterations, share, counts);
  }
  R h(int i) const { return sums.h[i / Simd<R>::N][i % Simd<R>::N]; }
  R anchor(int i) const { return sums.anchor[i / Simd<R>::N][i % Simd<R>::N]; }
};

}  // namespace
