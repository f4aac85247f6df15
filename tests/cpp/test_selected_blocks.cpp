// Selected blocks turned around (kl/selected_blocks.h): the products of rows against plain loops in double, at and
// around every tile, with nothing written beyond the result; which rows selected each block; and what is served so.
#include "checks.h"
#include "kl/selected_blocks.h"

namespace {

constexpr double GUARD = -77;  // stands behind every result

template <class R, bool ADD, bool DOWN> void test_product(int64_t rows, int64_t depth, int64_t width) {
  checks::Random random(rows * 1000 + depth * 10 + width);
  const int64_t step = (DOWN ? rows : depth) + 3, b_stride = width + 5, c_stride = width + 2;
  const auto a = random.numbers<R>((DOWN ? depth : rows) * step), b = random.numbers<R>(depth * b_stride);
  std::vector<R> c(rows * c_stride, (R)GUARD);
  row_product<R, ADD, DOWN>(a.data(), step, rows, b.data(), b_stride, depth, c.data(), c_stride, width);
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < width; ++n) {
      double sum = ADD ? GUARD : 0;
      for (int64_t k = 0; k < depth; ++k)
        sum += (double)a[DOWN ? k * step + m : m * step + k] * (double)b[k * b_stride + n];
      CHECK_CLOSE(c[m * c_stride + n], sum, (double)EPS<R> * (double)(depth + 2), ADD ? -GUARD + 20 : 1 + (double)depth,
                  (double)n);
    }
    for (int64_t n = width; n < c_stride; ++n) CHECK_SAME(c[m * c_stride + n], GUARD, (double)n);
  }
}

template <class R> void test_products() {
  constexpr int64_t N = Simd<R>::N;
  for (int64_t rows : {1, 2, 5, 6, 7, 48})
    for (int64_t vectors : {1, 2, 3, 4, 5, 7}) {
      test_product<R, false, false>(rows, 9, vectors * N);
      test_product<R, true, true>(rows, 6, vectors * N);
    }
}

void test_rows_of_blocks() {
  constexpr int64_t TQ = 40, N = 5, BLOCK = 7, TK = 60, BLOCKS = 9;
  std::vector<int64_t> index(TQ * N);
  checks::Random random(3);
  for (int64_t &x : index) x = (int64_t)(random.bits() % (BLOCKS + 1)) - 1;
  Problem p = {};
  p.B = p.H = p.Hkv = 1, p.Tq = TQ, p.Tk = TK, p.left = 20, p.right = 0, p.offset = TK - TQ;
  p.selections = N, p.selected_block = BLOCK;
  p.selected = {(int64_t)index.data(), regard::I64, 0, 0, N, 1};
  std::vector<char> memory(RowsOfBlocks::bytes(p) + 64);
  Arena arena{(char *)(((int64_t)memory.data() + 63) / 64 * 64)};
  RowsOfBlocks lists(arena, p);
  const int64_t first = 11, count = 23, least = 2, end = 8;
  lists.fill(p, 0, 0, first, count, least, end);
  for (int64_t c = least; c < end; ++c) {
    int64_t at = lists.starts[c - least];
    for (int64_t row = 0; row < count; ++row) {
      bool found = false;
      for (int64_t n = 0; n < N; ++n) found |= index[(first + row) * N + n] == c;
      const int64_t where = first + row + p.offset;
      if (!found || c * BLOCK > where || (c + 1) * BLOCK <= where - 20) continue;
      CHECK(at < lists.starts[c - least + 1]);
      CHECK_SAME(lists.entries[at], (double)row, (double)c);
      ++at;
    }
    CHECK_SAME((double)at, (double)lists.starts[c - least + 1], (double)c);
  }
}

void test_what_is_turned() {
  Problem p = {};
  p.B = p.H = p.Hkv = 1, p.Tq = p.Tk = 4096, p.left = p.right = 1 << 20;
  p.selections = 4, p.selected_block = 64, p.selected = {64, regard::I64, 0, 0, 4, 1};
  CHECK(turns_selection(p));
  const auto other = [&](auto change) {
    Problem changed = p;
    change(changed);
    return turns_selection(changed);
  };
  CHECK(!other([](Problem &x) { x.selected_block = 1; }));                        // a list of single keys
  CHECK(!other([](Problem &x) { x.selections = 30; }));                           // nearly all keys
  CHECK(!other([](Problem &x) { x.Tq = 16, x.Tk = 65536; }));                     // a block has less than one row
  CHECK(!other([](Problem &x) { x.tile_map = {64, regard::I64, 0, 0, 1, 1}; }));  // another mask beside it
  CHECK(!other([](Problem &x) { x.family = regard::TSALLIS; }));
}

}  // namespace

void test_selected_blocks() {
  test_products<float>();
  test_products<double>();
  test_rows_of_blocks();
  test_what_is_turned();
}
