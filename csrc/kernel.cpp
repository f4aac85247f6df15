// The engine of one instruction set. This file is compiled once for each, with ENGINE naming the result
// (CMakeLists.txt).
//
// It selects the kernel for a call: the type that it computes in, the regularizer, and NV, the number of vectors in a
// block of rows. Each kernel comes with a function that returns how many bytes of working memory it needs.
#include "engine/backward_walk.h"
#include "engine/problem.h"
#include "engine/threads.h"
#include "features/sweep.h"
#include "kl/backward.h"
#include "kl/forward.h"
#include "kl/selected_blocks_backward.h"
#include "kl/selected_blocks_forward.h"
#include "kl/selected_forward.h"
#include "links/backward.h"
#include "links/link_forward.h"
#include "plan_readout.h"

namespace {

using regard::Problem;

template <class R> int64_t forward_scratch_as(const Problem &p) {
  if (p.family != regard::KL) return few_rows<R>(p) ? LinkPartition<R, 1>(p).bytes(p) : LinkPartition<R, 3>(p).bytes(p);
  if (turns_selection(p)) return TurnedPartition<R>(p).bytes(p);
  if (lists_selection(p)) return SelectedPartition<R>(p).bytes(p);
  const int vectors = row_vectors<R>(p);
  return vectors == 1   ? ForwardPartition<DecodeProducts<R, R>>(p).bytes(p)
         : vectors == 2 ? ForwardPartition<LaneProducts<R, 2>>(p).bytes(p)
                        : ForwardPartition<LaneProducts<R, 3>>(p).bytes(p);
}
template <class R> void forward_of(const Problem &p) {
  const int vectors = row_vectors<R>(p);
  if (p.family != regard::KL) return few_rows<R>(p) ? run_forward_link<R, 1>(p) : run_forward_link<R, 3>(p);
  if (turns_selection(p)) return run_forward_turned<R>(p);
  if (lists_selection(p)) return run_forward_selected<R>(p);
  if (vectors == 2) return run_forward_kl<LaneProducts<R, 2>>(p);
  if (vectors == 3) return run_forward_kl<LaneProducts<R, 3>>(p);
  if constexpr (Simd<R>::N >= 4) {
    if constexpr (sizeof(R) == 4) {
      if (readable_in_place<Bf16>(p.key, p.D) && readable_in_place<Bf16>(p.value, p.Dv))
        return run_forward_kl<DecodeProducts<R, Bf16>>(p);
      if (readable_in_place<F16>(p.key, p.D) && readable_in_place<F16>(p.value, p.Dv))
        return run_forward_kl<DecodeProducts<R, F16>>(p);
    }
    run_forward_kl<DecodeProducts<R, R>>(p);
  }
}

int64_t forward_scratch(const Problem &p) {
  return p.compute == regard::F64 ? forward_scratch_as<double>(p) : forward_scratch_as<float>(p);
}

bool forward(const Problem &p, regard::Watch watch) {
  return run_watched(watch, [&] { p.compute == regard::F64 ? forward_of<double>(p) : forward_of<float>(p); });
}

template <class R> int64_t backward_scratch_as(const Problem &p) {
  return turns_selection(p) ? TurnedBackwardPartition<R>(p).bytes(p) : BackwardPartition<R, R>(p).bytes(p);
}

int64_t backward_scratch(const Problem &p) {
  return p.compute == regard::F64 ? backward_scratch_as<double>(p) : backward_scratch_as<float>(p);
}

template <class R> void backward_of(const Problem &p) {
  if (turns_selection(p)) return run_backward_turned<R>(p);
  if (p.family == regard::KL) return run_backward<R, R>(p, {prepare_kl<R>, backward_block_kl<R, R>});
  with_link<R>(p, [&](auto tag) {
    run_backward<R, R>(p, {prepare_link<R>, backward_block_link<R, typename decltype(tag)::Link>});
  });
}

bool backward(const Problem &p, regard::Watch watch) {
  return run_watched(watch, [&] { p.compute == regard::F64 ? backward_of<double>(p) : backward_of<float>(p); });
}

template <class R> int64_t readout_scratch_as(const Problem &p) {
  return few_rows<R>(p) ? ReadoutPartition<R, 1>(p).bytes(p) : ReadoutPartition<R, 3>(p).bytes(p);
}
template <class R> void readout_of(const Problem &p) {
  few_rows<R>(p) ? run_readout<R, 1, R>(p) : run_readout<R, 3, R>(p);
}

int64_t readout_scratch(const Problem &p) {
  return p.compute == regard::F64 ? readout_scratch_as<double>(p) : readout_scratch_as<float>(p);
}

bool readout(const Problem &p, regard::Watch watch) {
  return run_watched(watch, [&] { p.compute == regard::F64 ? readout_of<double>(p) : readout_of<float>(p); });
}

int64_t features_scratch(const Problem &p) {
  return p.compute == regard::F64 ? features_scratch_as<double>(p) : features_scratch_as<float>(p);
}

template <bool BACKWARD> bool features(const Problem &p, regard::Watch watch) {
  return run_watched(
      watch, [&] { p.compute == regard::F64 ? run_features<double>(p, BACKWARD) : run_features<float>(p, BACKWARD); });
}

// The peak rate of the machine: chains of multiply-adds on registers, enough of them to hide their latency.
double fma_rate(int64_t threads, double seconds) {
  constexpr int CHAINS = 10, N = Simd<float>::N;
  constexpr int64_t STEPS = 1 << 20;
  double best = 0;
  run_watched({}, [&] {
    for (const double end = now() + seconds; now() < end;) {
      const double began = now();
      parallel(threads, threads, [&](int64_t job, int64_t) {
        Vec<float> sum[CHAINS], a = broadcast(1.0f - 1e-7f), b = broadcast((float)job);
        asm volatile("" : "+m"(a), "+m"(b));  // the compiler must not know their values
        for (auto &s : sum) {
          s = b;
          asm volatile("" : "+m"(s));  // the compiler must not merge equal chains
        }
        for (int64_t step = 0; step < STEPS; ++step)
#pragma GCC unroll 16
          for (int c = 0; c < CHAINS; ++c) sum[c] = sum[c] * a + b;
        for (auto &s : sum) asm volatile("" : : "m"(s));  // the result must be computed
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
const Engine ENGINE = {TEXT(ENGINE),    fma_rate, forward_scratch,  forward,         backward_scratch, backward,
                       readout_scratch, readout,  features_scratch, features<false>, features<true>};
}  // namespace regard
