// Lists: candidates of a row (links/candidate_lists.h), saved lists (engine/sparse_rows.h), the prefilter in 16 bits
// (links/int16_prefilter.h), the largest weights of a row (plan_readout.h), and the partition of rows.
#include <algorithm>

#include "engine/sparse_rows.h"
#include "link_block.h"
#include "plan_readout.h"

namespace {

using B = Block<float, 3>;
constexpr int N = Simd<float>::N, L = B::L;

void test_candidates() {
  Setting setting;
  setting.keys = 900, setting.prior = true;
  B block(setting);
  auto &s = block.s;
  block.x(20, 4) = NOT_A_NUMBER<float>;  // is found, whatever the price
  Vec<float> price[3], top[3];
  for (auto &x : price) x = broadcast(0.9f);
  for (auto &x : top) x = broadcast(1.5f);
  memset(s.length, 0, sizeof s.length);
  for (int64_t first = 0; first < setting.keys; first += 96)
    CHECK(append_candidates(s, price, L - 1, first, first, min_of((int64_t)96, setting.keys - first)));
  const auto check = [&](float bound) {
    for (int i = 0; i < L; ++i) {
      int64_t k = 0;
      for (int64_t j = 0; j < setting.keys && i < L - 1; ++j) {  // the last lane has no row
        if (block.x(j, i) < bound) continue;
        CHECK_SAME(s.index[k * L + i], j, i);
        CHECK_SAME(s.list[k * L + i], block.x(j, i), i);
        CHECK_SAME(s.list_prior[k * L + i], s.prior[j * L + i], i);
        ++k;
      }
      CHECK_SAME(s.length[i], k, i);
    }
  };
  check(0.9f);

  // Padding has no weight and no key.
  const int64_t longest = pad_lists(s);
  CHECK_SAME(longest, *std::max_element(s.length, s.length + L), 0);
  for (int i = 0; i < L; ++i)
    for (int64_t k = s.length[i]; k < longest; ++k) CHECK_SAME(s.list[k * L + i], -checks::INFINITE, i);

  // A higher price removes keys. (Pruning overwrites the panel: keep the scores.)
  const std::vector<float> scores(s.x, s.x + setting.keys * L);
  memset((void *)&block.sums, 0, sizeof block.sums);
  for (int n = 0; n < 3; ++n) block.sums.price_bound[n] = broadcast(1.3f), block.sums.top[n] = top[n];
  block.rows.n = L - 1;
  const Vec<float> off[3] = {broadcast(0.1f), broadcast(0.1f), broadcast(0.1f)};
  prune_lists(block.p, block.rows, s, block.sums, off);
  std::copy(scores.begin(), scores.end(), s.x);
  check(1.3f - 0.1f);

  // A price that is NaN, and lists without room, are refused.
  price[1][2] = NOT_A_NUMBER<float>;
  CHECK(!append_candidates(s, price, L, 0, 0, 10));
  price[1][2] = 0;
  s.length[3] = (int32_t)s.room - 5;
  CHECK(!append_candidates(s, price, L, 0, 0, 10));
}

template <class R> void test_sums_over_lists() {
  constexpr int64_t step = 5, T = 40;
  checks::Random random(7);
  for (int64_t n : {0, 1, 3, 24, 25, 33})
    for (int64_t Dv : {1, 3, 8, 16, 17, 31, 64, 67, 130}) {
      const auto v = random.numbers<R>(T * (Dv + 1)), p = random.numbers<R>(T * step), w = random.numbers<R>(T * step);
      int32_t index[T * step];
      for (int32_t &i : index) i = (int32_t)(random.bits() % T);
      std::vector<R> out(Dv + 64, (R)-7), baseline(Dv + 64, (R)-7), alone(Dv + 64, (R)-7);
      sum_listed_values<R, true>(p.data(), w.data(), index, step, n, v.data(), Dv + 1, Dv, out.data(), baseline.data());
      sum_listed_values<R, false>(p.data(), w.data(), index, step, n, v.data(), Dv + 1, Dv, alone.data(), nullptr);
      for (int64_t d = 0; d < Dv + 64; ++d) {
        double a = 0, b = 0;
        for (int64_t k = 0; k < n && d < Dv; ++k) {
          a += (double)p[k * step] * v[index[k * step] * (Dv + 1) + d];
          b += (double)w[k * step] * v[index[k * step] * (Dv + 1) + d];
        }
        if (d >= Dv) a = b = -7;
        CHECK_CLOSE(out[d], a, (double)EPS<R> * 40, 1, d);
        CHECK_CLOSE(alone[d], a, (double)EPS<R> * 40, 1, d);
        CHECK_CLOSE(baseline[d], b, (double)EPS<R> * 40, 1, d);
      }
    }
}

// What the forward pass saves is what the backward pass reads: keys of 16 and of 32 bits, with and without x.
void test_saved_lists() {
  Setting setting;
  setting.keys = 700, setting.alpha = 2, setting.spread = 40;
  for (bool wide : {false, true})
    for (int64_t some : {2, 6, 200}) {  // room for nothing, for keys alone (if narrow), for all
      B block(setting);
      const bool listed = block.solve<Sparsemax<float>>(SPARSE_SHARE);
      CHECK(listed);
      block.p.Tk = wide ? 70000 : 700;
      std::vector<float> room(L * some + 1, 0.0f);
      const Tensor t = {(int64_t)room.data(), regard::F32, 0, 0, some, 1};
      block.p.lists = t;
      save_sparse_rows(block.p, block.rows, block.s, block.sums, 0.0f, listed, false);
      const SparseRows<float, L> saved(block.p, t, block.rows);
      if (some != 6 || !wide) CHECK(saved.some() == (some > 2));
      CHECK_SAME(room[L * some], 0, some);
      if (!saved.some()) continue;  // they did not fit
      const SparseKeys keys = saved.keys();
      CHECK(saved.with_x() == (some == 200));
      CHECK(keys.wide == wide);
      for (int i = 0; i < L; ++i) {
        int64_t at = saved.ends()[i];
        for (int64_t j = 0; j < setting.keys; ++j) {
          if (!(block.x(j, i) - block.anchor(i) + block.h(i) > 0)) continue;
          CHECK_SAME(keys[at], j, i);
          if (saved.with_x()) CHECK_SAME(saved.x()[at], block.x(j, i), i);
          ++at;
        }
        CHECK_SAME(at, saved.ends()[i + 1], i);
      }
    }
  // Without lists there is a mark that nothing was saved.
  B block(setting);
  std::vector<float> room(L * 200, 1.0f);
  block.p.lists = {(int64_t)room.data(), regard::F32, 0, 0, 200, 1};
  block.solve<Sparsemax<float>>(0);
  save_sparse_rows(block.p, block.rows, block.s, block.sums, 0.0f, false, false);
  CHECK(!SparseRows<float, L>(block.p, block.p.lists, block.rows).some());
}

// The prefilter misses no key whose product reaches the price, and lets few others through.
void test_prefilter() {
  if (!HAS_PREFILTER) return;
  for (int64_t D : {1, 2, 7, 16, 33, 64}) {
    checks::Random random(D);
    Problem p = {};
    p.Tk = 200, p.D = D;
    const auto q = random.numbers<float>(L * D, -2, 2), k = random.numbers<float>(p.Tk * D, -3, 3);
    p.key = {(int64_t)k.data(), regard::F32, 0, 0, D, 1};
    std::vector<char> memory(PrefilterKeys::bytes(p));
    const PrefilterKeys keys(p, memory.data());
    std::vector<float> spare(PREFILTER_KEYS * D);
    for (int64_t g = 0; g < PrefilterKeys::blocks(p); ++g) keys.fill(p, 0, 0, g, spare.data());
    PrefilterRows<3> rows;
    const int64_t pairs = int16_pairs_of(D);
    std::vector<int32_t> packed(pairs * L), panel(PREFILTER_KEYS * L);
    std::vector<int16_t> one(2 * pairs);
    rows.pairs = packed.data();
    CHECK(rows.fill(q.data(), D, L - 1, D, one.data()));
    Vec<float> price[3], off[3] = {};
    for (auto &x : price) x = broadcast((float)(2.0 * std::sqrt((double)D)));
    int64_t reach = 0, found = 0;
    for (int64_t g = 0; g < PrefilterKeys::blocks(p); ++g) {
      const int64_t first = g * PREFILTER_KEYS, n = min_of(PREFILTER_KEYS, p.Tk - first);
      CandidateBits<float, 3> bits;
      rows.find(keys.grains[g], D, keys.keys + first * 2 * pairs, n, price, L - 1, off, panel.data(), bits.bits);
      std::vector<bool> set(n * L);
      bits.each(n, [&](int64_t place) { set[place] = true; });
      for (int64_t j = 0; j < n; ++j)
        for (int i = 0; i < L; ++i) {
          double product = 0;
          for (int64_t d = 0; d < D; ++d) product += (double)q[i * D + d] * k[(first + j) * D + d];
          const double rounded = (double)panel[j * L + i] * rows.size[i] * keys.grains[g].size;
          if (i == L - 1) {  // a lane without a row
            CHECK(!set[j * L + i]);
            continue;
          }
          CHECK_CLOSE(rounded, product, 1, off[i / N][i % N], i);
          if (product >= price[i / N][i % N]) CHECK(set[j * L + i]);
          reach += product >= price[i / N][i % N], found += set[j * L + i];
        }
    }
    CHECK(reach > 0 && found <= reach + reach / 5 + 20);
    // Numbers that are not finite are refused.
    auto bad = q;
    bad[D - 1] = NOT_A_NUMBER<float>;
    CHECK(!rows.fill(bad.data(), D, L - 1, D, one.data()));
    auto bad_keys = k;
    bad_keys[0] = INF<float>;
    p.key.data = (int64_t)bad_keys.data();
    keys.fill(p, 0, 0, 0, spare.data());
    CHECK(std::isnan(keys.grains[0].size));
  }
}

// The largest weights: in order, the smaller key first among equals, NaN before all, keys without weight at the end.
template <class R> void test_largest() {
  checks::Random random(9);
  for (int64_t keys : {5, 60, 700})
    for (int64_t picks : {1, 4, 5, 60})
      for (int kind = 0; kind < 3; ++kind) {
        if (picks > keys) continue;
        std::vector<R> weights(keys);
        for (R &x : weights) x = kind == 0 ? (R)random.uniform(0, 1) : (R)(random.bits() % 4) / 4;  // 1, 2: many equal
        if (kind == 2) weights[keys / 2] = NOT_A_NUMBER<R>;
        Problem p = {};
        p.Tk = keys, p.picks = picks;
        const int64_t room = Largest<R>::room_for(p);
        std::vector<typename Largest<R>::Code> notes(room);
        Largest<R> largest = {notes.data(), picks, room, 0};
        R bound = 0;
        for (int64_t j = 0; j < keys; ++j)
          if (!(weights[j] <= bound) && largest.offer(weights[j], j)) bound = largest.raise_bound();
        std::vector<R> found(picks);
        std::vector<int64_t> found_keys(picks), order(keys);
        largest.finish(found.data(), found_keys.data());
        for (int64_t j = 0; j < keys; ++j) order[j] = j;
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
          return std::isnan(weights[a]) > std::isnan(weights[b]) || weights[a] > weights[b];
        });
        for (int64_t i = 0; i < picks; ++i) {
          CHECK_SAME(found_keys[i], order[i], i);
          CHECK_SAME(found[i], weights[order[i]], i);
        }
      }
}

// Every row of every head is in exactly one block.
void test_partition() {
  for (int64_t Tq : {1, 5, 16, 47, 48, 49, 100})
    for (int64_t group : {1, 2, 4}) {
      Problem p = {};
      p.B = 2, p.Hkv = 2, p.H = 2 * group, p.Tq = p.Tk = Tq, p.temperature_value = 1;
      const WorkPartition<float, 3> partition(p);
      std::vector<int> visits(p.B * p.H * Tq);
      for (int64_t unit = 0; unit < partition.units; ++unit)
        for (int64_t block = 0; block < partition.blocks; ++block) {
          Rows<float, 3> rows;
          partition.place_block(p, rows, unit, block);
          for (int i = 0; i < rows.n; ++i) {
            CHECK_SAME(rows.head[i] / group, rows.kv, i);
            ++visits[rows.flat(p, i)];
          }
        }
      for (int count : visits) CHECK_SAME(count, 1, Tq);
    }
}

}  // namespace

void test_lists() {
  test_candidates();
  test_sums_over_lists<float>(), test_sums_over_lists<double>();
  test_saved_lists();
  test_prefilter();
  test_largest<float>(), test_largest<double>();
  test_partition();
}
