// The Python binding. It takes records that hold addresses: nothing is copied, and the GIL is released while a kernel
// runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include "engine/engines.h"

namespace nb = nanobind;
using regard::Engine;
using regard::Problem;

static const Engine *choose() {
  const auto engines = regard::engines_here();
  const char *forced = std::getenv("REGARD_ISA");
  if (!forced || !*forced) return engines[0];
  for (const Engine *e : engines)
    if (!std::strcmp(e->name, forced)) return e;
  std::string names;
  for (const Engine *e : engines) names += (names.empty() ? "" : ", ") + std::string(e->name);
  throw std::runtime_error("REGARD_ISA: expected an instruction set of this machine (" + names + "), got " + forced);
}

static const Engine *engine = nullptr;
// An OpenMP runtime does not survive a fork: its threads are gone, and a call would wait for them forever.
static std::atomic<bool> forked{false};

static Problem read(const nb::bytearray &record) {
  if (record.size() != sizeof(Problem)) throw std::invalid_argument("record of the wrong size");
  Problem p;
  std::memcpy(&p, record.data(), sizeof p);
  if (forked) p.threads = 1;
  return p;
}

// Ctrl-C: Python records the signal and raises KeyboardInterrupt when the main thread checks for it, as here.
static bool interrupted() {
  nb::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}
static unsigned long main_thread = 0;

static bool poisoned = false;  // fill working memory with NaN before each call

// Run a kernel with the working memory that it needs. Kernels themselves allocate nothing. Returns whether some row
// exceeds the range of float32.
static bool run(int64_t (*room)(const Problem &), bool (*kernel)(const Problem &, regard::Watch),
                const nb::bytearray &record) {
  Problem p = read(record);
  const int64_t size = room(p);
  const std::unique_ptr<char[]> scratch(new char[size]);
  if (poisoned) std::memset(scratch.get(), 0xff, size);
  int64_t beyond = 0;
  p.scratch = (int64_t)scratch.get(), p.beyond = (int64_t)&beyond;
  const bool may_ask = PyThread_get_thread_ident() == main_thread;
  bool done;
  {
    nb::gil_scoped_release release;
    done = kernel(p, {may_ask ? interrupted : nullptr});
  }
  if (!done) throw nb::python_error();
  return beyond != 0;
}

#if defined(__clang__)
#define COMPILER "Clang " __clang_version__
#elif defined(__GNUC__)
#define COMPILER "GCC " __VERSION__
#else
#define COMPILER "unknown"
#endif

NB_MODULE(_native, m) {
  engine = choose();
  main_thread = nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
#if defined(__unix__) || defined(__APPLE__)
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif
  m.def("fields", [] {  // (name, "int" | "real" | "tensor") in order
    std::vector<std::vector<std::string>> list;
#define INT(name) list.push_back({#name, "int"});
#define REAL(name) list.push_back({#name, "real"});
#define TENSOR(name) list.push_back({#name, "tensor"});
    REGARD_FIELDS(INT, REAL, TENSOR)
    return list;
  });
  m.def("isa", [] { return std::string(engine->name); });
  m.def("isas", [] {
    std::vector<std::string> names;
    for (const Engine *e : regard::engines_here()) names.push_back(e->name);
    return names;
  });
  m.def("amx_bf16", regard::machine_has_amx_bf16);
  m.def("use", [](const std::string &name) {  // for tests
    for (const Engine *e : regard::engines_here())
      if (name == e->name) return void(engine = e);
    throw std::invalid_argument("this machine has no " + name);
  });
  m.def("poison", [](bool on) { poisoned = on; });  // for tests
  m.def("forward", [](const nb::bytearray &record) { return run(engine->forward_scratch, engine->forward, record); });
  m.def("backward",
        [](const nb::bytearray &record) { return run(engine->backward_scratch, engine->backward, record); });
  m.def("reading", [](const nb::bytearray &record) { run(engine->readout_scratch, engine->readout, record); });
  m.def("features", [](const nb::bytearray &record) { run(engine->features_scratch, engine->features, record); });
  m.def("features_backward",
        [](const nb::bytearray &record) { run(engine->features_scratch, engine->features_backward, record); });
  m.def("compiler", [] { return std::string(COMPILER); });
  m.def("threading", [] { return std::string(REGARD_THREADING); });  // "openmp", "std" or "none"
  m.def("fma_rate", [](int64_t threads, double seconds) {  // floating-point operations per second, for benchmarks
    nb::gil_scoped_release release;
    return engine->fma_rate(forked ? 1 : threads, seconds);
  });
}
