// What a call describes: one flat record that Python fills (it reads the list of fields from the module, so the two
// cannot drift apart). Tensors are an address, an element type and four strides in elements; stride 0 broadcasts.
#pragma once
#include <cstdint>

namespace regard {

enum Type : int64_t { F32 = 0, F64 = 1, BF16 = 2, F16 = 3, I64 = 4, BOOL = 5 };
enum Family : int64_t { KL = 0, TSALLIS = 1, FERMI_DIRAC = 2 };
enum Marginal : int64_t { ROWS = 0, SINK = 1, RELAX = 2, FREE = 3 };

struct Tensor {
  int64_t data, type, s0, s1, s2, s3;
  explicit operator bool() const { return data != 0; }
};

constexpr int PRIORS = 4;  // log-priors that one problem may multiply

// clang-format off
#define REGARD_FIELDS(INT, REAL, TENSOR)                                                                               \
  INT(threads) INT(compute)                     /* compute: F32 or F64 */                                              \
  INT(B) INT(H) INT(Hkv) INT(Tq) INT(Tk) INT(D) INT(Dv)                                                                \
  INT(left) INT(right) INT(offset)              /* row i reads keys i + offset - left ... i + offset + right */        \
  INT(family) INT(marginal) INT(threshold)      /* a weight is kept where its hash is >= threshold */                  \
  REAL(scale) REAL(softcap)                     /* softcap 0: none */                                                  \
  REAL(mass) REAL(kept_scale)                                                                                          \
  REAL(level_value) REAL(temperature_value) REAL(alpha_value) INT(centred) INT(scratch) /* centred: see links.h */       \
  TENSOR(query) TENSOR(key) TENSOR(value)       /* every call has the fields so far */                                 \
  TENSOR(score_bias) TENSOR(mask)                                                                                      \
  TENSOR(prior0) TENSOR(prior1) TENSOR(prior2) TENSOR(prior3)                                                          \
  TENSOR(slopes) TENSOR(query_ids) TENSOR(key_ids) TENSOR(level) TENSOR(temperature) TENSOR(alpha) TENSOR(dropout_key) \
  TENSOR(squares)                               /* [B, Hkv, 1, Tk]: |v - centre|^2, for the spread */                  \
  /* forward: results, contiguous in the compute type, 0 if not asked for */                                           \
  INT(out) INT(lse) INT(dual) INT(free_energy) INT(entropy) INT(kl) INT(max_scores) INT(max_weight)                    \
  INT(score_variance) INT(collision) INT(support) INT(first_key_mass) INT(mass_sent) INT(cost) INT(spread)             \
  INT(peak) INT(rest)                           /* the dual as a sum: the row's anchor, and what is left (see finish) */ \
  INT(tilt) INT(tilt_log)                       /* sums of w v and of w (log p + H) by that of w: the gradient's centre */ \
  TENSOR(lists)                                 /* [B, H, Tq, some]: where few keys have weight, which (see lists.h) */ \
  /* backward: saved outputs and incoming gradients, then results */                                                   \
  TENSOR(saved_out) TENSOR(saved_dual) TENSOR(saved_lse) TENSOR(saved_entropy) TENSOR(saved_peak) TENSOR(saved_rest)   \
  TENSOR(saved_tilt) TENSOR(saved_tilt_log) TENSOR(saved_mass) TENSOR(saved_lists)                                     \
  TENSOR(grad_out) TENSOR(grad_lse) TENSOR(grad_entropy)                                                               \
  INT(chunks)                                   /* of keys; each has its own part of what rows accumulate */           \
  INT(dq)                                       /* [chunks, B, H, Tq, D] */                                            \
  INT(dk) INT(dv)                               /* [B, Hkv, Tk, D|Dv] */                                               \
  INT(row_dot)                                  /* [chunks, B, H, Tq]: <grad_out, out>; not KL: the baseline */        \
  INT(row_g) INT(row_gs) INT(row_gd)            /* the same: sums over keys of G, G (s - dual), G |distance| and, */     \
  INT(row_ps) INT(row_pd)                       /* for centring, p (s - dual) and p |distance|; G = tau dL/ds */       \
  INT(row_gp) INT(row_ga)                       /* the same: of dL/dlog(pi), which KL does not tell from G; of dL/dalpha */ \
  INT(key_g) INT(key_ds)                        /* [B, H, Tk]: sums over queries of dL/dlog(pi) and dL/ds, zeroed */   \
  TENSOR(dense_g) TENSOR(dense_ds)              /* the user's [B|1, H|1, Tq, Tk], zeroed; broadcast dims add up */      \
  INT(key_mass)                                 /* [B, H, Tk]: sums over queries of p */                               \
  /* reading: windows on the plan, from saved_peak and saved_rest; one of the three */                                 \
  INT(picks) INT(picked_weights) INT(picked_keys) /* [B, H, Tq, picks]: each row's largest weights and their keys; or */ \
  TENSOR(index)                                 /* [B, H, Tq, picks]: the weights of these keys; or */                 \
  INT(block) INT(block_sums)                    /* [B, H, ceil(Tq/block), ceil(Tk/block)], zeroed: sums over blocks */  \
  /* attention by features (linear.h): the map, how many; rows [1, 1, M, D] of random directions, if any */          \
  INT(map) INT(features) TENSOR(projection)
// clang-format on

struct Problem {
#define INT(name) int64_t name;
#define REAL(name) double name;
#define TENSOR(name) Tensor name;
  REGARD_FIELDS(INT, REAL, TENSOR)
#undef INT
#undef REAL
#undef TENSOR
};

// How a long call is told to stop: `poll` is asked now and then on the thread that made the call, and true ends the call
// early, its results unfinished.
struct Watch {
  bool (*poll)();
};

// One engine per instruction set: the same source, compiled more than once.
struct Engine {
  const char *name;
  double (*fma_rate)(int64_t threads, double seconds);  // multiply-adds, counted as two operations, per second
  int64_t (*forward_scratch)(const Problem &);
  bool (*forward)(const Problem &, Watch);  // false: stopped
  int64_t (*backward_scratch)(const Problem &);
  bool (*backward)(const Problem &, Watch);
  int64_t (*readout_scratch)(const Problem &);
  bool (*readout)(const Problem &, Watch);
  int64_t (*features_scratch)(const Problem &);
  bool (*features)(const Problem &, Watch);
  bool (*features_backward)(const Problem &, Watch);
};

}  // namespace regard
