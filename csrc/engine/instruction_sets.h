// Which of the instruction sets that the engine is compiled for this machine can run.
#pragma once

namespace regard {

#if defined(__x86_64__)
inline bool machine_has_x86_64_v3() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}
inline bool machine_has_x86_64_v4() {
  return machine_has_x86_64_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
}
#endif

}  // namespace regard
