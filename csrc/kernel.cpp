// The engine of one instruction set: this file is compiled once for each, with ENGINE naming the result.
#include "problem.h"
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

// f(job, thread) for each job, in any order on `threads` threads; no result may depend on which thread took what.
template <class F> void parallel(int64_t threads, int64_t jobs, F f) {
  if (threads <= 1 || jobs <= 1) {
    for (int64_t job = 0; job < jobs; ++job) f(job, (int64_t)0);
    return;
  }
#ifdef _OPENMP
#pragma omp parallel num_threads((int)threads)
  {
    const int64_t thread = omp_get_thread_num();
#pragma omp for schedule(dynamic, 1)
    for (int64_t job = 0; job < jobs; ++job) f(job, thread);
  }
#else
  for (int64_t job = 0; job < jobs; ++job) f(job, (int64_t)0);
#endif
}

}  // namespace

#include "backward.h"

namespace {

using regard::Problem;

// Vectors of rows per block: few rows do not fill three. Rows of one vector are taken by fours, so it must hold four.
template <class R> int width(const Problem &p) {
  constexpr int64_t N = Simd<R>::N;
  const int64_t group = p.H / p.Hkv, rows = group > 1 && p.Tq < 16 ? group * p.Tq : p.Tq;
  if (rows <= N && N >= 4) return 1;
  return rows <= 2 * N || (rows > 3 * N && rows <= 4 * N) ? 2 : 3;
}

template <class R> int64_t forward_scratch_as(const Problem &p) {
  const int vectors = width<R>(p);
  return vectors == 1 ? Cut<R, 1>(p).bytes(p) : vectors == 2 ? Cut<R, 2>(p).bytes(p) : Cut<R, 3>(p).bytes(p);
}
template <class R> void forward_of(const Problem &p) {
  const int vectors = width<R>(p);
  if (vectors == 2) return forward_as<R, 2, R>(p);
  if (vectors == 3) return forward_as<R, 3, R>(p);
  if constexpr (Simd<R>::N >= 4) {
    if constexpr (sizeof(R) == 4) {
      if (rows_of<Bf16>(p.key, p.D) && rows_of<Bf16>(p.value, p.Dv)) return forward_as<R, 1, Bf16>(p);
      if (rows_of<F16>(p.key, p.D) && rows_of<F16>(p.value, p.Dv)) return forward_as<R, 1, F16>(p);
    }
    forward_as<R, 1, R>(p);
  }
}

int64_t forward_scratch(const Problem &p) {
  return p.compute == regard::F64 ? forward_scratch_as<double>(p) : forward_scratch_as<float>(p);
}
void forward(const Problem &p) { p.compute == regard::F64 ? forward_of<double>(p) : forward_of<float>(p); }

int64_t backward_scratch(const Problem &p) {
  return p.compute == regard::F64 ? BackCut<double>(p).bytes(p) : BackCut<float>(p).bytes(p);
}
void backward(const Problem &p) { p.compute == regard::F64 ? backward_as<double>(p) : backward_as<float>(p); }

}  // namespace

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
namespace regard {
extern const Engine ENGINE;
const Engine ENGINE = {TEXT(ENGINE), Simd<float>::N * 3, forward_scratch, forward, backward_scratch, backward};
}  // namespace regard
