// Jobs on several threads, and the check for Ctrl-C.
//
// `parallel` runs jobs on the threads of OpenMP (shared with PyTorch), of libgomp called directly (clang's build), of
// the standard library, or on one thread, as configured by CMake. Jobs are handed out in any order, so no result may
// depend on which thread computed it. A call that was interrupted skips the jobs that have not begun.
#pragma once
#include <atomic>
#include <chrono>
#if defined(_OPENMP)
#include <omp.h>
#elif defined(REGARD_LIBGOMP)
extern "C" {  // the interface of libgomp that GCC compiles `omp parallel` to
void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags);
int omp_get_thread_num(void);
}
#elif defined(REGARD_STD_THREADS)
#include <system_error>
#include <thread>
#include <vector>
#endif

#include "engine/problem.h"

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The call that a thread works for. The poll is limited to ten per second, because it takes Python's lock.
struct Call {
  regard::Watch watch;
  std::atomic<bool> stopped{false};
  double asked = now();

  void ask() {
    if (const double time = now(); watch.poll && time - asked > 0.1) {
      if (watch.poll()) stopped = true;
      asked = now();
    }
  }
};
thread_local Call *current = nullptr;
thread_local bool is_helper = false;  // whether this thread is another than the one that made the call

// Whether the call was interrupted. Long jobs ask now and then.
[[maybe_unused]] bool stopped_early() {
  if (!is_helper) current->ask();
  return current->stopped.load(std::memory_order_relaxed);
}

#if defined(REGARD_LIBGOMP)
template <class F> void on_team(void *work) { (*(F *)work)(omp_get_thread_num()); }
#endif

// Call f(job, thread) for each job on up to `threads` threads. Thread 0 is the one that made the call.
template <class F> void parallel(int64_t threads, int64_t jobs, F f) {
  Call &call = *current;
  const auto run = [&](int64_t job, int64_t thread) {
    if (thread != 0) current = &call, is_helper = true;
    if (!stopped_early()) f(job, thread);
  };
  if (threads <= 1 || jobs <= 1) {
    for (int64_t job = 0; job < jobs; ++job) run(job, 0);
    return;
  }
#if defined(_OPENMP)
#pragma omp parallel num_threads((int)threads)
  {
    const int64_t thread = omp_get_thread_num();
#pragma omp for schedule(dynamic, 1)
    for (int64_t job = 0; job < jobs; ++job) run(job, thread);
  }
#elif defined(REGARD_LIBGOMP) || defined(REGARD_STD_THREADS)
  std::atomic<int64_t> next{0};
  auto work = [&](int64_t thread) {
    for (int64_t job; (job = next.fetch_add(1)) < jobs;) run(job, thread);
  };
#if defined(REGARD_LIBGOMP)
  GOMP_parallel(on_team<decltype(work)>, &work, (unsigned)threads, 0);
#else
  // New threads for each call cost some 20 microseconds each. OpenMP's threads stay and wait for the next call.
  std::vector<std::thread> others;
  others.reserve(threads - 1);
  try {
    for (int64_t thread = 1; thread < threads && thread < jobs; ++thread) others.emplace_back(work, thread);
  } catch (const std::system_error &) {  // the system has no more threads: go on with those that there are
  }
  work(0);
  for (std::thread &other : others) other.join();
#endif
#else
  for (int64_t job = 0; job < jobs; ++job) run(job, 0);
#endif
}

template <class F> bool run_watched(regard::Watch watch, F f) {
  Call call{watch};
  current = &call;
  f();
  current = nullptr;
  return !call.stopped;
}

}  // namespace
