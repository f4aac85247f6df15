// The price of a row with a compiled link (links/compiled_search.h): links that stand for generated ones, and the mass at
// the headroom that was found, summed again in long double.
#include "link_block.h"

namespace {

// The formulas of a generated library, and the link in long double.
struct OnTest {
  static constexpr int PARAMETERS = 0;
  static constexpr double LOWER = -INF<double>, UPPER = INF<double>, CEILING = INF<double>;
};
struct Exp : OnTest {
  template <class V> static void link(V t, const V *, V &g, V &w) {
    g = w = map_lanes(t, [](auto x) { return exp_of(x); });
  }
  static long double exact(long double t) { return std::exp(t); }
};
struct Squared : OnTest {  // entmax 1.5
  static constexpr double LOWER = 0;
  template <class V> static void link(V t, const V *, V &g, V &w) {
    const V y = t * 0.5f;
    g = y * y, w = y;
  }
  static long double exact(long double t) { return t > 0 ? t * t / 4 : 0; }
};
struct Shifted : OnTest {  // sparsemax from -1
  static constexpr double LOWER = -1;
  template <class V> static void link(V t, const V *, V &g, V &w) { g = t + 1.0f, w = V{} + 1.0f; }
  static long double exact(long double t) { return t > -1 ? t + 1 : 0; }
};
struct Pole : OnTest {  // -1/t, of the reverse KL divergence
  static constexpr double UPPER = 0;
  template <class V> static void link(V t, const V *, V &g, V &w) { g = -1.0f / t, w = 1.0f / (t * t); }
  static long double exact(long double t) { return t < 0 ? -1 / t : INFINITY; }
};
struct Bounded : OnTest {  // the sigmoid
  static constexpr double CEILING = 1;
  template <class V> static void link(V t, const V *, V &g, V &w) {
    g = map_lanes(t, [](auto x) { return 1 / (1 + exp_of(-x)); }), w = g * (1.0f - g);
  }
  static long double exact(long double t) { return 1 / (1 + std::exp(-t)); }
};
struct Bent : OnTest {  // a kink at 1
  static constexpr double LOWER = 0;
  template <class V> static void link(V t, const V *, V &g, V &w) {
    g = t < 1 ? t : (t + 1.0f) * 0.5f, w = t < 1 ? V{} + 1.0f : V{} + 0.5f;
  }
  static long double exact(long double t) { return t <= 0 ? 0 : t < 1 ? t : (t + 1) / 2; }
};

template <class R, class Formulas> void exported(const regard::LinkBlock<R> *b) { link_of<R, Formulas>(*b); }

template <class Formulas, class R, int NV> void test_setting(const Setting &setting, double share = 0) {
  using B = Block<R, NV>;
  B block(setting);
  block.p.family = regard::COMPILED, block.p.link = (int64_t)(void *)exported<R, Formulas>;
  block.p.link_lower = Formulas::LOWER, block.p.link_upper = Formulas::UPPER;
  block.p.link_ceiling = Formulas::CEILING;
  const bool listed = block.template solve<Compiled<R>>(share, 400);
  CHECK(!listed || share > 0);
  const bool sink = setting.marginal == regard::SINK, relax = setting.marginal == regard::RELAX;
  for (int i = 0; i < B::L; ++i) {
    long double most = sink ? 1 : 0;
    bool empty = true;
    for (int64_t j = 0; j < setting.keys; ++j)
      if (block.x(j, i) != -INF<R>)
        empty = false, most += setting.prior ? std::exp2((long double)block.s.prior[j * B::L + i]) : 1;
    if (empty && !sink) {
      CHECK_SAME(block.h(i), -checks::INFINITE, i);
      continue;
    }
    // A mass that the keys cannot take (find_full_rows), or hardly.
    if (!relax && most * Formulas::CEILING <= 1.01 * setting.mass) continue;
    const long double h = block.h(i), anchor = block.anchor(i);
    CHECK(std::isfinite((double)h));
    long double mass = 0, lost = 0;  // lost: what the mass changes by if each t is off by one rounding
    const auto add = [&](long double x, long double prior) {
      const long double t = x - anchor + h, size = std::fabs(x - anchor) + std::fabs(h), step = size * EPS<R>;
      if (!(t > Formulas::LOWER)) return;
      mass += prior * Formulas::exact(t);
      lost += prior * (Formulas::exact(t + step) - Formulas::exact(t - step)) / EPS<R>;
    };
    if (sink) add((long double)(R)setting.level, 1);
    for (int64_t j = 0; j < setting.keys; ++j)
      if (block.x(j, i) != -INF<R>)
        add(block.x(j, i), setting.prior ? std::exp2((long double)block.s.prior[j * B::L + i]) : 1);
    const long double rho = setting.level, target = relax ? std::exp((anchor - h) / rho) : (long double)setting.mass;
    if (relax) lost += target * (std::fabs(anchor) + std::fabs(h) + 1) / rho;
    CHECK_CLOSE((double)mass, (double)target, 4 * (double)EPS<R>, (double)(16 * target + lost), i);
    if (!listed) continue;
    int64_t next = 0;  // every key that has weight is in the list of its row
    for (int64_t j = 0; j < setting.keys; ++j) {
      const bool in_list = next < block.s.length[i] && block.s.index[next * B::L + i] == j;
      if (block.x(j, i) - anchor + h > Formulas::LOWER) CHECK(in_list);
      next += in_list;
    }
  }
}

template <class Formulas, class R, int NV> void test_formulas() {
  Setting setting;
  setting.alpha = 2;  // x is the score
  for (int64_t keys : {1, 2, 7, 97, 700})
    for (double spread : {0.0, 3.0, 40.0})
      for (bool prior : {false, true}) {
        setting.keys = keys, setting.spread = spread, setting.prior = prior;
        setting.marginal = regard::ROWS, setting.mass = 1, setting.level = 0;
        test_setting<Formulas, R, NV>(setting);
        setting.mass = 2.5;
        test_setting<Formulas, R, NV>(setting);
        setting.marginal = regard::SINK, setting.mass = 1, setting.level = 0.5;
        test_setting<Formulas, R, NV>(setting);
        setting.marginal = regard::RELAX, setting.level = 1.5;
        if (spread < 40) test_setting<Formulas, R, NV>(setting);  // exp(40/1.5) is beyond a pole's resolution
      }
  if (Formulas::LOWER > -INF<double>) {
    setting = {}, setting.alpha = 2, setting.keys = 700, setting.spread = 40;
    test_setting<Formulas, R, NV>(setting, SPARSE_SHARE);
  }
}

}  // namespace

void test_compiled_search() {
  test_formulas<Exp, float, 3>();
  test_formulas<Squared, float, 3>();
  test_formulas<Shifted, float, 3>();
  test_formulas<Pole, float, 3>();
  test_formulas<Bounded, float, 3>();
  test_formulas<Bent, float, 3>();
  test_formulas<Exp, double, 1>();
  test_formulas<Shifted, double, 1>();
  test_formulas<Pole, double, 1>();
}
