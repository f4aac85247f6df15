// Runs the tests of the kernels for one instruction set, ENGINE. This file alone is compiled for every machine of the
// architecture: it checks that the machine has the instruction set before it calls a function that uses it.
#include <cstring>

#include "checks.h"
#include "engine/instruction_sets.h"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

static bool runs_here(const char *name) {
#if defined(__x86_64__)
  if (!std::strcmp(name, "x86_64_v3")) return regard::machine_has_x86_64_v3();
  if (!std::strcmp(name, "x86_64_v4")) return regard::machine_has_x86_64_v4();
  if (!std::strcmp(name, "x86_64_v4_bf16")) return regard::machine_has_x86_64_v4_bf16();
#elif defined(__aarch64__)
  if (!std::strcmp(name, "aarch64_bf16")) return regard::machine_has_aarch64_bf16();
#endif
  return !std::strcmp(name, "baseline");
}

int main() {
  const char *name = TEXT(ENGINE);
  if (!runs_here(name)) {
    std::printf("%s: skipped, this machine does not have it\n", name);
    return 0;
  }
  const struct {
    const char *name;
    void (*run)();
  } tests[] = {{"vector math", test_vector_math},
               {"elements", test_elements},
               {"tiles", test_tiles},
               {"tiles of bfloat16", test_bf16_tiles},
               {"price search", test_price_search},
               {"compiled search", test_compiled_search},
               {"lists", test_lists},
               {"selected blocks", test_selected_blocks}};
  for (const auto &test : tests) {
    const int before = checks::failures(), checked = checks::total();
    checks::printed() = 0;
    test.run();
    std::printf("%s, %s: %d checks, %d failed\n", name, test.name, checks::total() - checked,
                checks::failures() - before);
  }
  return checks::failures() ? 1 : 0;
}
