// What a call describes: one flat record, which Python fills in and kernels read.
//
// Python reads the names and kinds of the fields from the module (`fields` in module.cpp), so that the two cannot
// disagree. A tensor is an address, an element type and four strides in elements; a stride of 0 broadcasts. Results are
// addresses of contiguous tensors in the compute type, and 0 where they are not requested.
// Symbols: s scores, tau temperature, pi prior, p weights (the plan), w = dp/dt (links.h), G = tau dL/ds.
#pragma once
#include <cstdint>

namespace regard {

enum Type : int64_t { F32 = 0, F64 = 1, BF16 = 2, F16 = 3, I64 = 4, BOOL = 5 };
enum Family : int64_t { KL = 0, TSALLIS = 1, FERMI_DIRAC = 2, COMPILED = 3 };
enum Marginal : int64_t { ROWS = 0, SINK = 1, RELAX = 2, FREE = 3 };

struct Tensor {
  int64_t data, type, s0, s1, s2, s3;
  explicit operator bool() const { return data != 0; }
};

constexpr int PRIORS = 4;           // log-priors that one problem may multiply
constexpr int LINK_PARAMETERS = 4;  // parameters that the link of a regularizer may have, as tensors

// clang-format off
#define REGARD_FIELDS(INT, REAL, TENSOR)                                                                               \
  /* In every call. compute: F32 or F64; row i reads keys i + offset - left ... i + offset + right */                  \
  INT(threads) INT(compute)                                                                                            \
  INT(B) INT(H) INT(Hkv) INT(Tq) INT(Tk) INT(D) INT(Dv)                                                                \
  INT(left) INT(right) INT(offset)                                                                                     \
  INT(family) INT(marginal) INT(threshold)      /* dropout keeps a weight where its hash is >= threshold, */           \
  REAL(scale) REAL(softcap)                     /* times kept_scale; softcap 0: none */                                \
  REAL(mass) REAL(kept_scale)                                                                                          \
  REAL(level_value) REAL(temperature_value) REAL(alpha_value)  /* where they are not tensors */                        \
  INT(centred) INT(scratch)                     /* centred: ORIGIN of links/links.h is 1; scratch: working memory */   \
  TENSOR(query) TENSOR(key) TENSOR(value)                                                                              \
  /* Optional terms. level: the parameter of the marginal (sink, rho or offset) */                                     \
  TENSOR(score_bias) TENSOR(mask)                                                                                      \
  TENSOR(prior0) TENSOR(prior1) TENSOR(prior2) TENSOR(prior3)                                                          \
  TENSOR(slopes) TENSOR(query_ids) TENSOR(key_ids) TENSOR(level) TENSOR(temperature) TENSOR(alpha) TENSOR(dropout_key) \
  TENSOR(squares)                               /* [B, Hkv, 1, Tk]: |v - centre|^2, for the spread */                  \
  /* Structured terms of the prior (engine/prior_terms.h) */                                                           \
  TENSOR(relative) INT(reach)                   /* [1, H|1, 1, 2 reach + 1], by distance */                            \
  TENSOR(query_factor) TENSOR(key_factor) INT(rank)  /* [B|1, H|1, T, rank] */                                         \
  TENSOR(decay_query) TENSOR(decay_key)         /* float64 */                                                          \
  TENSOR(density) REAL(density_least)           /* a density counts as at least so much; 0 in a forward pass */        \
  TENSOR(selected) INT(selections) INT(selected_block)  /* int64 [B|1, H|1, Tq, selections], in increasing order */    \
  TENSOR(tile_map) INT(tiles)                   /* int64: numbers of tiles, and their bits [n, 64] */                  \
  /* A regularizer compiled from formulas (links/compiled_link.h): the addresses of its functions, the range of t in */\
  /* which its link is positive and finite, the link's supremum, and its parameters */                                 \
  INT(link) INT(link_divergence) INT(link_derivatives)                                                                 \
  REAL(link_lower) REAL(link_upper) REAL(link_ceiling) INT(link_full_support) INT(link_parameters)                     \
  TENSOR(link_parameter0) TENSOR(link_parameter1) TENSOR(link_parameter2) TENSOR(link_parameter3)                      \
  INT(function) INT(captured)                   /* a compiled function (prior_terms.h) and the tensors that it reads */\
  /* Forward: results */                                                                                               \
  INT(out) INT(lse) INT(dual) INT(free_energy) INT(entropy) INT(kl) INT(max_scores) INT(max_weight)                    \
  INT(score_variance) INT(collision) INT(support) INT(first_key_mass) INT(mass_sent) INT(cost) INT(spread)             \
  INT(peak) INT(rest)                           /* the dual in two parts: the anchor of the row, and the rest */       \
  INT(tilt) INT(tilt_log)                       /* the gradient's baseline values: the means of v and of */            \
                                                /* log p + H with weights w */                                         \
  TENSOR(lists)                                 /* [B, H, Tq, some]: the keys with weight (engine/sparse_rows.h) */    \
  INT(beyond)                                   /* a number that becomes 1 if a row exceeds float32 (rows.h) */        \
  /* Backward: saved results and incoming gradients */                                                                 \
  TENSOR(saved_out) TENSOR(saved_dual) TENSOR(saved_lse) TENSOR(saved_entropy) TENSOR(saved_peak) TENSOR(saved_rest)   \
  TENSOR(saved_tilt) TENSOR(saved_tilt_log) TENSOR(saved_mass) TENSOR(saved_lists)                                     \
  TENSOR(grad_out) TENSOR(grad_lse) TENSOR(grad_entropy)                                                               \
  /* Backward: results */                                                                                              \
  INT(chunks)                                   /* of keys; each has its own part of the sums over keys */             \
  INT(dq)                                       /* [chunks, B, H, Tq, D] */                                            \
  INT(dk) INT(dv)                               /* [B, Hkv, Tk, D|Dv] */                                               \
  INT(row_dot)                                  /* [chunks, B, H, Tq]: <grad_out, out>; not KL: the baseline */        \
  INT(row_g) INT(row_gs) INT(row_gd)            /* the same shape: sums over keys of G, G (s - dual), G |distance| */  \
  INT(row_ps) INT(row_pd)                       /* and, for centring, of p (s - dual) and p |distance|; */             \
  INT(row_gp) INT(row_ga)                       /* of dL/dlog(pi), which is G for KL; of dL/dalpha */                  \
  INT(row_gl)                                   /* [chunks, link_parameters, B, H, Tq]: of dL/d(link parameter) */     \
  INT(key_g) INT(key_ds)                        /* [B, H, Tk]: sums over queries of dL/dlog(pi) and dL/ds, zeroed */   \
  TENSOR(dense_g) TENSOR(dense_ds)              /* the same per pair, in the shape of the user's [B|1, H|1, Tq, Tk], */\
                                                /* zeroed; broadcast dimensions are summed */                          \
  INT(relative_g)                               /* float64 [chunks, B, H, 2 reach + 1], zeroed: G by distance */       \
  INT(d_query_factor)                           /* [chunks, B, H, Tq, rank], zeroed */                                 \
  INT(d_key_factor)                             /* [B, H, Tk, rank], zeroed */                                         \
  INT(function_gradient) INT(captured_g)        /* a compiled function, and its float64 sums (prior_gradients.h) */   \
  INT(captured_shared)                          /* whether batch entries and heads have their sums in common */        \
  INT(key_mass)                                 /* [B, H, Tk]: sums over queries of p */                               \
  /* Readout of the plan, from saved_peak and saved_rest; one of three: */                                             \
  INT(picks) INT(picked_weights) INT(picked_keys)  /* [B, H, Tq, picks]: the largest weights of a row, their keys */   \
  TENSOR(index)                                 /* [B, H, Tq, picks]: picked_weights of these keys */                  \
  INT(block) INT(block_sums)                    /* [B, H, ceil(Tq/block), ceil(Tk/block)], zeroed: sums of blocks */   \
  /* Attention by features (features/call.h): which map, how many features, random directions [1, 1, M, D] if any */   \
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

// How a long call is interrupted: `poll` is called now and then on the thread that made the call. If it returns true,
// the call ends early and its results are incomplete.
struct Watch {
  bool (*poll)();
};

// One engine per instruction set: the same source, compiled once for each.
struct Engine {
  const char *name;
  double (*fma_rate)(int64_t threads, double seconds);  // floating-point operations per second; a multiply-add is two
  int64_t (*forward_scratch)(const Problem &);          // bytes of working memory
  bool (*forward)(const Problem &, Watch);              // false: interrupted
  int64_t (*backward_scratch)(const Problem &);
  bool (*backward)(const Problem &, Watch);
  int64_t (*readout_scratch)(const Problem &);
  bool (*readout)(const Problem &, Watch);
  int64_t (*features_scratch)(const Problem &);
  bool (*features)(const Problem &, Watch);
  bool (*features_backward)(const Problem &, Watch);
};

}  // namespace regard
