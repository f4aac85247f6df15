// Working memory. Python's binding allocates it once per call (module.cpp); kernels allocate nothing.
#pragma once
#include <cstdint>

#include "engine/problem.h"

namespace {

// The memory of one thread, handed out in pieces whose size is rounded up to 64 bytes.
struct Arena {
  char *next;
  template <class T> T *take(int64_t count) {
    T *result = (T *)next;
    next += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    return result;
  }
};

// The working memory of a call, aligned to 64 bytes.
inline char *scratch_of(const regard::Problem &p) { return (char *)((p.scratch + 63) / 64 * 64); }

}  // namespace
