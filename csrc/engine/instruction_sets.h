// Which of the instruction sets that the engine is compiled for this machine can run.
#pragma once
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

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
inline bool machine_has_x86_64_v4_bf16() { return machine_has_x86_64_v4() && __builtin_cpu_supports("avx512bf16"); }

// Whether the processor multiplies tiles of bfloat16 numbers (AMX) and the operating system saves its tile registers.
// The engine has no kernels for them.
inline bool machine_has_amx_bf16() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;  // no XGETBV
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low >> 17 & 3) == 3;
}
#else
inline bool machine_has_amx_bf16() { return false; }
#endif

#if defined(__aarch64__)
// Whether the processor has dot products of bfloat16 numbers (FEAT_BF16).
inline bool machine_has_aarch64_bf16() {
#if defined(__linux__)
  return getauxval(AT_HWCAP2) >> 14 & 1;  // HWCAP2_BF16, which older headers do not name
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) == 0 && has;
#else
  return false;
#endif
}
#endif

}  // namespace regard
