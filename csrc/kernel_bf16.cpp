// The engine for processors that have dot products of bfloat16 numbers: x86_64_v4_bf16 (AVX512_BF16) and aarch64_bf16
// (FEAT_BF16), with ENGINE naming the result and PLAIN_ENGINE the engine without them (CMakeLists.txt).
//
// Products of bfloat16 inputs are other code here (engine/bf16_tiles.h), for KL: forward, backward and readout. All else
// is the plain engine, which every such processor can run.
#include "engine/backward_walk.h"
#include "engine/problem.h"
#include "engine/selected_lists.h"
#include "engine/threads.h"
#include "kl/backward.h"
#include "kl/forward.h"
#include "plan_readout.h"

namespace regard {
extern const Engine PLAIN_ENGINE, ENGINE;
}

namespace {

using regard::Problem;
constexpr const regard::Engine &plain = regard::PLAIN_ENGINE;

// The same answer in all passes of a problem, because all of them must compute the same scores. (Few rows, which
// decoding has, are an exception: their scores differ by rounding, in the other engines, too.)
bool in_pairs(const Problem &p) {
  return p.family == regard::KL && p.query.type == regard::BF16 && !lists_selection(p);
}
bool forward_in_pairs(const Problem &p) { return in_pairs(p) && row_vectors<float>(p) > 1; }

int64_t forward_scratch(const Problem &p) {
  if (!forward_in_pairs(p)) return plain.forward_scratch(p);
  return row_vectors<float>(p) == 2 ? ForwardPartition<PairProducts<2>>(p).bytes(p)
                                    : ForwardPartition<PairProducts<3>>(p).bytes(p);
}

bool forward(const Problem &p, regard::Watch watch) {
  if (!forward_in_pairs(p)) return plain.forward(p, watch);
  return run_watched(watch, [&] {
    row_vectors<float>(p) == 2 ? run_forward_kl<PairProducts<2>>(p) : run_forward_kl<PairProducts<3>>(p);
  });
}

int64_t backward_scratch(const Problem &p) {
  return in_pairs(p) ? BackwardPartition<float, Bf16>(p).bytes(p) : plain.backward_scratch(p);
}

bool backward(const Problem &p, regard::Watch watch) {
  if (!in_pairs(p)) return plain.backward(p, watch);
  return run_watched(watch, [&] { run_backward<float, Bf16>(p, {prepare_kl<float>, backward_block_kl<float, Bf16>}); });
}

int64_t readout_scratch(const Problem &p) {
  if (!in_pairs(p)) return plain.readout_scratch(p);
  return few_rows<float>(p) ? ReadoutPartition<float, 1>(p).bytes(p) : ReadoutPartition<float, 3>(p).bytes(p);
}

bool readout(const Problem &p, regard::Watch watch) {
  if (!in_pairs(p)) return plain.readout(p, watch);
  return run_watched(watch,
                     [&] { few_rows<float>(p) ? run_readout<float, 1, Bf16>(p) : run_readout<float, 3, Bf16>(p); });
}

double fma_rate(int64_t threads, double seconds) { return plain.fma_rate(threads, seconds); }
int64_t features_scratch(const Problem &p) { return plain.features_scratch(p); }
bool features(const Problem &p, regard::Watch watch) { return plain.features(p, watch); }
bool features_backward(const Problem &p, regard::Watch watch) { return plain.features_backward(p, watch); }

}  // namespace

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
namespace regard {
const Engine ENGINE = {TEXT(ENGINE),    fma_rate, forward_scratch,  forward,  backward_scratch, backward,
                       readout_scratch, readout,  features_scratch, features, features_backward};
}  // namespace regard
