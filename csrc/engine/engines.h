// The engines that were compiled, and those that this machine can run. CMakeLists.txt defines REGARD_X86 or
// REGARD_AARCH64 where it compiles more than the baseline.
#pragma once
#include <vector>

#include "engine/instruction_sets.h"
#include "engine/problem.h"

namespace regard {

extern const Engine baseline;
#ifdef REGARD_X86
extern const Engine x86_64_v3, x86_64_v4, x86_64_v4_bf16;
#endif
#ifdef REGARD_AARCH64
extern const Engine aarch64_bf16;
#endif

inline std::vector<const Engine *> engines_here() {  // best first
  std::vector<const Engine *> engines;
#ifdef REGARD_X86
  if (machine_has_x86_64_v4_bf16()) engines.push_back(&x86_64_v4_bf16);
  if (machine_has_x86_64_v4()) engines.push_back(&x86_64_v4);
  if (machine_has_x86_64_v3()) engines.push_back(&x86_64_v3);
#endif
#ifdef REGARD_AARCH64
  if (machine_has_aarch64_bf16()) engines.push_back(&aarch64_bf16);
#endif
  engines.push_back(&baseline);
  return engines;
}

}  // namespace regard
