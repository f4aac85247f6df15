// Makes the calls that tests/support/engine_calls.py wrote to a file, on every engine that this machine can run, and
// compares their results with those in float64. It needs no Python, so it can run in an emulator: `make test-arm`.
//
//   case_table FILE
//
// Each call is made on one thread and on three, and both must give the same bits. A result that is changed by twice the
// allowed error must fail its comparison, or the comparison is wrong.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "engine/engines.h"

using regard::Engine;
using regard::Problem;

namespace {

struct Reader {
  std::vector<char> bytes;
  size_t at = 0;
  explicit Reader(const char *path) {
    std::ifstream file(path, std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(file), {});
    if (bytes.size() < 8 || std::memcmp(take(8), "REGARD01", 8)) {
      std::printf("%s: expected a file that engine_calls.py wrote\n", path);
      std::exit(2);
    }
  }
  const char *take(size_t n) {
    if (at + n > bytes.size()) {
      std::printf("the file ends too early\n");
      std::exit(2);
    }
    at += n;
    return bytes.data() + at - n;
  }
  template <class T> T number() {
    T x;
    std::memcpy(&x, take(sizeof x), sizeof x);
    return x;
  }
  int64_t integer() { return number<int64_t>(); }
  std::string text() {
    const int64_t n = integer();
    return std::string(take(n), n);
  }
};

using Memory = std::vector<std::vector<char>>;

double element(const char *data, int64_t type, int64_t i) {
  if (type == regard::F64) return ((const double *)data)[i];
  if (type == regard::F32) return ((const float *)data)[i];
  return (double)((const int64_t *)data)[i];
}

bool close(double found, double expected, double allowed) {
  if (found == expected || (std::isnan(found) && std::isnan(expected))) return true;
  return std::fabs(found - expected) <= allowed;
}

void call(const Engine &engine, int64_t operation, Problem p) {
  const auto room = operation == 0   ? engine.forward_scratch
                    : operation == 1 ? engine.backward_scratch
                                     : engine.readout_scratch;
  const auto kernel = operation == 0 ? engine.forward : operation == 1 ? engine.backward : engine.readout;
  std::vector<char> scratch(room(p), (char)0xff);  // NaN
  p.scratch = (int64_t)scratch.data();
  kernel(p, {nullptr});
}

struct Totals {
  int64_t cases = 0, calls = 0, results = 0, failed = 0, blind = 0, different = 0;
};

// One case. Returns whether it agrees.
void run_case(const Engine &engine, Reader &from, Totals &totals) {
  const std::string name = from.text();
  Memory memory(from.integer());
  for (auto &buffer : memory) buffer.resize(from.integer() + 64);  // kernels may read a vector beyond the last element
  ++totals.cases;
  for (int64_t calls = from.integer(), n = 0; n < calls; ++n) {
    ++totals.calls;
    const int64_t operation = from.integer();
    const std::string record = from.text();
    Problem p;
    if (record.size() != sizeof p) {
      std::printf("a record has %zu bytes here, and %zu in the file\n", sizeof p, record.size());
      std::exit(2);
    }
    std::memcpy(&p, record.data(), sizeof p);
    for (int64_t places = from.integer(); places > 0; --places) {
      const int64_t at = from.integer(), buffer = from.integer();
      const int64_t address = (int64_t)memory[buffer].data() + from.integer();
      std::memcpy((char *)&p + at, &address, sizeof address);
    }
    for (int64_t loads = from.integer(); loads > 0; --loads) {
      auto &buffer = memory[from.integer()];
      const int64_t size = from.integer();
      std::memcpy(buffer.data(), from.take(size), size);
    }
    Memory before = memory;
    p.threads = 3;
    call(engine, operation, p);
    Memory threaded = memory;
    for (size_t i = 0; i < memory.size(); ++i) std::memcpy(memory[i].data(), before[i].data(), memory[i].size());
    p.threads = 1;
    call(engine, operation, p);
    if (threaded != memory) {
      ++totals.different;
      std::printf("%s: %s: call %d depends on the number of threads\n", engine.name, name.c_str(), (int)n);
    }
    for (int64_t checks = from.integer(); checks > 0; --checks) {
      const std::string field = from.text();
      const int64_t buffer = from.integer(), offset = from.integer(), count = from.integer(), type = from.integer();
      const double allowed = from.number<double>();
      double worst = 0;
      int64_t failed = 0;
      for (int64_t i = 0; i < count; ++i) {
        const double expected = from.number<double>(), found = element(memory[buffer].data() + offset, type, i);
        totals.blind += std::isfinite(expected) && close(expected + 2 * allowed + 1e-300, expected, allowed);
        if (!close(found, expected, allowed)) {
          ++failed;
          worst = std::isfinite(found - expected) ? std::fmax(worst, std::fabs(found - expected)) : INFINITY;
        }
      }
      totals.results += count, totals.failed += failed;
      if (failed)
        std::printf("%s: %s: call %d, %s: %d of %d are wrong, by %.3g (allowed %.3g)\n", engine.name, name.c_str(),
                    (int)n, field.c_str(), (int)failed, (int)count, worst, allowed);
    }
  }
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 2) {
    std::printf("usage: case_table FILE\n");
    return 2;
  }
  bool good = true;
  for (const Engine *engine : regard::engines_here()) {
    Reader from(argv[1]);
    Totals totals;
    for (int64_t cases = from.integer(); cases > 0; --cases) run_case(*engine, from, totals);
    std::printf("%s: %d cases, %d calls, %d results: %d wrong, %d depend on threads, %d comparisons that cannot fail\n",
                engine->name, (int)totals.cases, (int)totals.calls, (int)totals.results, (int)totals.failed,
                (int)totals.different, (int)totals.blind);
    good &= !totals.failed && !totals.different && !totals.blind && totals.results > 0;
  }
  return good ? 0 : 1;
}
