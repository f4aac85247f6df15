// Checks for the tests of the kernels: a counter of failures, comparisons with a tolerance, random numbers.
//
// The tests are compiled once per instruction set, as the kernels are, and each has its own program (CMakeLists.txt).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <vector>

namespace checks {

inline int &failures() {
  static int count = 0;
  return count;
}
inline int &printed() {
  static int count = 0;
  return count;
}
inline int &total() {
  static int count = 0;
  return count;
}

// Count a failure and print it with the numbers that explain it; after 20 of a test, only count.
inline bool that(bool good, const char *file, int line, const char *what, double found = 0, double expected = 0,
                 double where = 0) {
  ++total();
  if (good) return true;
  ++failures();
  if (++printed() <= 20)
    std::printf("%s:%d: %s: expected %.17g, got %.17g (at %.17g)\n", file, line, what, expected, found, where);
  return false;
}

inline bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// Whether `found` is within `tolerance` of `expected`, relative to `size` (by default |expected|).
inline bool close(double found, double expected, double tolerance, double size = -1) {
  if (same(found, expected)) return true;
  return std::fabs(found - expected) <= tolerance * (size < 0 ? std::fabs(expected) : size);
}

#define CHECK(...) checks::that((__VA_ARGS__), __FILE__, __LINE__, #__VA_ARGS__)
#define CHECK_SAME(found, expected, where) \
  checks::that(checks::same(found, expected), __FILE__, __LINE__, #found, found, expected, where)
#define CHECK_CLOSE(found, expected, tolerance, size, where) \
  checks::that(checks::close(found, expected, tolerance, size), __FILE__, __LINE__, #found, found, expected, where)

// A linear congruential generator: the same numbers on every machine.
struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 2862933555777941757u + 3037000493u) {}
  uint32_t bits() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
  }
  double uniform(double low, double high) { return low + (high - low) * (bits() / 2147483648.0); }
  template <class R> std::vector<R> numbers(int64_t n, double low = -1, double high = 1) {
    std::vector<R> result(n);
    for (R &x : result) x = (R)uniform(low, high);
    return result;
  }
};

constexpr double NAN_ = std::numeric_limits<double>::quiet_NaN(), INFINITE = std::numeric_limits<double>::infinity();

}  // namespace checks

// The tests, one function per file.
void test_vector_math();
void test_elements();
void test_tiles();
void test_bf16_tiles();
void test_price_search();
void test_compiled_search();
void test_lists();
void test_selected_blocks();
