// The price of a row (links/price_search.h): at the headroom that was found, the mass, summed again in long double, is
// that of the marginal.
#include "link_block.h"

namespace {

template <class Link, class R, int NV> void test_setting(const Setting &setting, double share = 0) {
  using B = Block<R, NV>;
  B block(setting);
  const bool listed = block.template solve<Link>(share);
  CHECK(!listed || share > 0);
  const long double beta = 1 / ((long double)(R)(setting.alpha - 1)), c = (R)(setting.alpha - 1);
  const bool sink = setting.marginal == regard::SINK, relax = setting.marginal == regard::RELAX;
  for (int i = 0; i < B::L; ++i) {
    const bool empty = i == 1 || (i % 3 == 2 && setting.keys == 1 && i % 5 == 0);
    if (empty && !sink) {
      CHECK_SAME(block.h(i), -checks::INFINITE, i);  // no key: nothing to solve for
      continue;
    }
    const long double h = block.h(i), anchor = block.anchor(i);
    CHECK(std::isfinite((double)h));
    const auto weight = [&](long double x) {
      const long double y = x - anchor + h + Link::ORIGIN;
      return y > 0 ? std::pow(y, beta) : 0.0L;
    };
    // `lost`: what the mass changes by if each x + h is off by one rounding.
    long double mass = 0, lost = 0;
    const auto add = [&](long double x, long double prior) {
      const long double y = x - anchor + h + Link::ORIGIN;
      if (!(y > 0)) return;
      mass += prior * weight(x);
      lost += prior * beta * weight(x) / y * (std::fabs(x - anchor) + std::fabs(h));
    };
    if (sink) add((long double)(R)setting.level * c, 1);
    for (int64_t j = 0; j < setting.keys; ++j)
      add(block.x(j, i), setting.prior ? std::exp2((long double)block.s.prior[j * B::L + i]) : 1);
    const long double dual = (anchor - h - Link::ORIGIN) / c, rho = setting.level;
    const long double target = relax ? std::exp(dual / rho) : (long double)setting.mass;
    if (relax) lost += target * (std::fabs(anchor) + std::fabs(h) + 1) / (c * rho);
    CHECK_CLOSE((double)mass, (double)target, 4 * (double)EPS<R>, (double)(4 * target + lost), i);
    if (!listed) continue;
    // Every key that has weight is in the list of its row, in order, with its x.
    int64_t next = 0;
    for (int64_t j = 0; j < setting.keys; ++j) {
      const int64_t at = next * B::L + i;
      const bool in_list = next < block.s.length[i] && block.s.index[at] == j;
      if (in_list) CHECK_SAME(block.s.list[at], block.x(j, i), j);
      if (weight(block.x(j, i)) > 0) CHECK(in_list);
      next += in_list;
    }
    CHECK_SAME(next, block.s.length[i], i);
  }
}

template <class Link, class R, int NV> void test_link(double alpha) {
  Setting setting;
  setting.alpha = alpha;
  for (int64_t keys : {1, 2, 7, 96, 97, 700})
    for (double spread : {0.0, 0.01, 3.0, 40.0})
      for (bool prior : {false, true}) {
        setting.keys = keys, setting.spread = spread, setting.prior = prior;
        setting.marginal = regard::ROWS, setting.mass = 1, setting.level = 0;
        test_setting<Link, R, NV>(setting);
        setting.mass = 2.5;
        test_setting<Link, R, NV>(setting);
        setting.marginal = regard::SINK, setting.mass = 1, setting.level = 0.5;
        test_setting<Link, R, NV>(setting);
        setting.marginal = regard::RELAX, setting.level = 1.5;
        test_setting<Link, R, NV>(setting);
      }
}

// With few keys that have weight, the search turns to lists, and finds the same prices.
template <class Link, class R, int NV> void test_lists_of(double alpha) {
  Setting setting;
  setting.alpha = alpha, setting.keys = 700, setting.spread = 40;
  for (bool prior : {false, true}) {
    setting.prior = prior;
    Block<R, NV> block(setting);
    CHECK(block.template solve<Link>(SPARSE_SHARE) || prior);  // with a prior, a row may have many keys
    test_setting<Link, R, NV>(setting, SPARSE_SHARE);
  }
}

// A NaN among the scores of one row does not keep the search from ending, and no other row notices.
template <class Link, class R, int NV> void test_nan(double alpha) {
  Setting setting;
  setting.alpha = alpha;
  Block<R, NV> clean(setting), block(setting);
  clean.template solve<Link>(0);
  block.x(5, 0) = NOT_A_NUMBER<R>;
  block.template solve<Link>(0);
  for (int i = 2; i < Block<R, NV>::L; ++i) CHECK_SAME(block.h(i), clean.h(i), i);
}

}  // namespace

void test_price_search() {
  test_link<Sparsemax<float>, float, 3>(2);
  test_link<Entmax<float>, float, 3>(1.5);
  test_link<Power<float, 0>, float, 3>(1.3);
  test_link<Power<float, 0>, float, 3>(2.5);
  test_link<Power<float, 1>, float, 3>(1.05);
  test_link<Entmax<double>, double, 1>(1.5);
  test_link<Power<double, 0>, double, 1>(1.3);
  test_lists_of<Sparsemax<float>, float, 3>(2);
  test_lists_of<Entmax<float>, float, 3>(1.5);
  test_lists_of<Power<double, 0>, double, 1>(1.3);
  test_nan<Sparsemax<float>, float, 3>(2);
  test_nan<Power<float, 1>, float, 3>(1.05);
}
