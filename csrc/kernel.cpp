// The engine of one instruction set: this file is compiled once for each, with ENGINE naming the result.
#include "problem.h"

#include <atomic>
#include <chrono>
#if defined(_OPENMP)
#include <omp.h>
#elif defined(REGARD_LIBGOMP)
extern "C" {  // libgomp's interface to compilers: what GCC makes of `omp parallel`
void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags);
int omp_get_thread_num(void);
}
#elif defined(REGARD_STD_THREADS)
#include <system_error>
#include <thread>
#include <vector>
#endif

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The call that this thread is in. Whether to stop is asked rarely: asking takes Python's lock.
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
thread_local bool helping = false;  // this thread is not the one that made the call

// Whether the call was stopped; for jobs that take long.
bool halted() {
  if (!helping) current->ask();
  return current->stopped.load(std::memory_order_relaxed);
}

#if defined(REGARD_LIBGOMP)
template <class F> void on_team(void *work) { (*(F *)work)(omp_get_thread_num()); }
#endif

// f(job, thread) for each job, in any order on `threads` threads; no result may depend on which thread took what.
// Thread 0 is the caller. A call that was stopped leaves out the jobs not yet begun.
template <class F> void parallel(int64_t threads, int64_t jobs, F f) {
  Call &call = *current;
  const auto run = [&](int64_t job, int64_t thread) {
    if (thread != 0) current = &call, helping = true;
    if (!halted()) f(job, thread);
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
  // Threads made for this call: dearer by some 20 microseconds each than OpenMP's, which wait for the next call.
  std::vector<std::thread> others;
  others.reserve(threads - 1);
  try {
    for (int64_t thread = 1; thread < threads && thread < jobs; ++thread) others.emplace_back(work, thread);
  } catch (const std::system_error &) {  // the system gives no more: those that there are do the work
  }
  work(0);
  for (std::thread &other : others) other.join();
#endif
#else
  for (int64_t job = 0; job < jobs; ++job) run(job, 0);
#endif
}

}  // namespace

#include "backward_link.h"
#include "linear.h"
#include "panel.h"
#include "reading.h"

namespace {

using regard::Problem;

// Vectors of rows per block: few rows do not fill three. Rows of one vector are taken by fours, so it must hold four.
template <class R> int width(const Problem &p) {
  constexpr int64_t N = Simd<R>::N;
  const int64_t group = p.H / p.Hkv, rows = group > 1 && p.Tq < 16 ? group * p.Tq : p.Tq;
  if (rows <= N && N >= 4) return 1;
  return rows <= 2 * N || (rows > 3 * N && rows <= 4 * N) ? 2 : 3;
}

// Links have blocks of one vector or three.
template <class R> bool few_rows(const Problem &p) { return p.Tq * (p.H / p.Hkv) <= Simd<R>::N; }

template <class R> int64_t forward_scratch_as(const Problem &p) {
  if (p.family != regard::KL) return few_rows<R>(p) ? PanelCut<R, 1>(p).bytes(p) : PanelCut<R, 3>(p).bytes(p);
  const int vectors = width<R>(p);
  return vectors == 1 ? Cut<R, 1>(p).bytes(p) : vectors == 2 ? Cut<R, 2>(p).bytes(p) : Cut<R, 3>(p).bytes(p);
}
template <class R> void forward_of(const Problem &p) {
  const int vectors = width<R>(p);
  if (p.family != regard::KL) return few_rows<R>(p) ? forward_link<R, 1>(p) : forward_link<R, 3>(p);
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

template <class F> bool watched(regard::Watch watch, F f) {
  Call call{watch};
  current = &call;
  f();
  current = nullptr;
  return !call.stopped;
}

bool forward(const Problem &p, regard::Watch watch) {
  return watched(watch, [&] { p.compute == regard::F64 ? forward_of<double>(p) : forward_of<float>(p); });
}

int64_t backward_scratch(const Problem &p) {
  return p.compute == regard::F64 ? BackCut<double>(p).bytes(p) : BackCut<float>(p).bytes(p);
}

bool backward(const Problem &p, regard::Watch watch) {
  return watched(watch, [&] { p.compute == regard::F64 ? backward_as<double>(p) : backward_as<float>(p); });
}

template <class R> int64_t reading_scratch_as(const Problem &p) {
  return few_rows<R>(p) ? ReadCut<R, 1>(p).bytes(p) : ReadCut<R, 3>(p).bytes(p);
}
template <class R> void reading_of(const Problem &p) { few_rows<R>(p) ? reading_as<R, 1>(p) : reading_as<R, 3>(p); }

int64_t reading_scratch(const Problem &p) {
  return p.compute == regard::F64 ? reading_scratch_as<double>(p) : reading_scratch_as<float>(p);
}

bool reading(const Problem &p, regard::Watch watch) {
  return watched(watch, [&] { p.compute == regard::F64 ? reading_of<double>(p) : reading_of<float>(p); });
}

int64_t features_scratch(const Problem &p) {
  return p.compute == regard::F64 ? features_scratch_as<double>(p) : features_scratch_as<float>(p);
}

template <bool BACKWARD> bool features(const Problem &p, regard::Watch watch) {
  return watched(watch, [&] {
    p.compute == regard::F64 ? features_as<double>(p, BACKWARD) : features_as<float>(p, BACKWARD);
  });
}

// What the machine can do at most: chains of multiply-adds on registers, enough of them to hide their latency.
double fma_rate(int64_t threads, double seconds) {
  constexpr int CHAINS = 10, N = Simd<float>::N;
  constexpr int64_t STEPS = 1 << 20;
  double best = 0;
  watched({}, [&] {
    for (const double end = now() + seconds; now() < end;) {
      const double began = now();
      parallel(threads, threads, [&](int64_t job, int64_t) {
        Vec<float> sum[CHAINS], a = all(1.0f - 1e-7f), b = all((float)job);
        asm volatile("" : "+m"(a), "+m"(b));  // not known to the compiler
        for (auto &s : sum) {
          s = b;
          asm volatile("" : "+m"(s));  // each chain its own: of equal ones the compiler makes one
        }
        for (int64_t step = 0; step < STEPS; ++step)
#pragma GCC unroll 16
          for (int c = 0; c < CHAINS; ++c) sum[c] = sum[c] * a + b;
        for (auto &s : sum) asm volatile("" : : "m"(s));  // the result is used
      });
      const double rate = 2.0 * threads * STEPS * CHAINS * N / (now() - began);
      if (rate > best) best = rate;
    }
  });
  return best;
}

}  // namespace

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
namespace regard {
extern const Engine ENGINE;
const Engine ENGINE = {TEXT(ENGINE),     fma_rate, forward_scratch, forward,
                       backward_scratch, backward, reading_scratch, reading,
                       features_scratch, features<false>, features<true>};
}  // namespace regard
