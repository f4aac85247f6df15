// ARENA
#pragma once
#include <cstdint>

#include "engine/problem.h"

namespace {

// One thread's working memory, handed out in pieces that are a multiple of 64 bytes.
struct Arena {
  char *next;
  template <class T> T *take(int64_t count) {
    T *result = (T *)next;
    next += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    return result;
  }
};

// The call's working memory, from the first multiple of 64 bytes on.
inline char *scratch_of(const regard::Problem &p) { return (char *)((p.scratch + 63) / 64 * 64); }

}  // namespace
