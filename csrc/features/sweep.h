// The sweeps over the blocks of a head, and how threads share them.
//
// With enough heads, one thread takes a head: it computes the rows of each block and sums the block for the blocks
// after it. Otherwise there are three passes, each parallel: sum every block; add these sums up, head by head; compute
// the rows of every block from the state at its beginning. Both give the same bits.
#pragma once
#include "engine/threads.h"
#include "features/backward.h"
#include "features/forward.h"

namespace {

// A sweep runs over the blocks from the first to the last, or back. A block has sources that are added to the state
// (absorb), targets that are computed from it (emit), or both.
enum Sweep { ROWS_FORWARD, QUERIES_BACKWARD, KEYS_BACKWARD };

template <class R, Sweep SWEEP> struct SweepOrder {
  const FeatureCall<R> &call;
  static constexpr bool FROM_END = SWEEP == KEYS_BACKWARD;

  Span block(int64_t n) const { return call.block(FROM_END ? call.blocks() - 1 - n : n); }
  bool absorbs(Span s) const { return FROM_END ? s.nq : s.nk; }
  bool emits(Span s) const { return FROM_END ? s.nk : s.nq; }

  void absorb(FeatureWorkspace<R> &workspace, int64_t head, Span s, R *state) const {
    const int64_t b = head / call.p.Hkv, kv = head % call.p.Hkv;
    clear(state, call.state_size());
    if (SWEEP == ROWS_FORWARD) workspace.absorb_block(b, kv, s, state);
    if (SWEEP == QUERIES_BACKWARD) workspace.absorb_block_keys(b, kv, s, state);
    if (SWEEP == KEYS_BACKWARD) workspace.absorb_block_queries(b, kv, s, state);
  }
  void emit(FeatureWorkspace<R> &workspace, int64_t head, Span s, R *state, R *sum) const {
    const int64_t b = head / call.p.Hkv, kv = head % call.p.Hkv;
    if (sum) clear(sum, call.state_size());
    if (SWEEP == ROWS_FORWARD) workspace.emit_block(b, kv, s, state, sum);
    if (SWEEP == QUERIES_BACKWARD) workspace.emit_block_queries(b, kv, s, state, sum);
    if (SWEEP == KEYS_BACKWARD) workspace.emit_block_keys(b, kv, s, state, sum);
  }
};

template <class R, Sweep SWEEP> void sweep(const FeatureCall<R> &call, char *workspaces) {
  const SweepOrder<R, SWEEP> order{call};
  const int64_t size = call.state_size(), blocks = call.blocks(), threads = call.p.threads;
  const int64_t workspace_bytes = call.workspace_size() * (int64_t)sizeof(R);
  if (call.by_head) {
    parallel(threads, call.heads, [&](int64_t head, int64_t thread) {
      FeatureWorkspace<R> workspace(call, workspaces + thread * workspace_bytes);
      clear(workspace.start, size);
      for (int64_t n = 0; n < blocks && !stopped_early(); ++n) {
        const Span s = order.block(n);
        const bool on = n + 1 < blocks && order.absorbs(s);  // nothing reads the sum of the last block
        if (order.emits(s)) {
          memcpy(workspace.run, workspace.start, size * sizeof(R));
          order.emit(workspace, head, s, workspace.run, on ? workspace.local : nullptr);
        } else if (on) {
          order.absorb(workspace, head, s, workspace.local);
        }
        if (on) join_states(workspace.start, workspace.local, size);
      }
    });
    return;
  }
  const auto state = [&](int64_t head, int64_t n) { return call.states + (head * (blocks + 1) + n) * size; };
  parallel(threads, call.heads * blocks, [&](int64_t job, int64_t thread) {
    FeatureWorkspace<R> workspace(call, workspaces + thread * workspace_bytes);
    const Span s = order.block(job % blocks);
    if (job % blocks + 1 < blocks && order.absorbs(s))
      order.absorb(workspace, job / blocks, s, state(job / blocks, job % blocks));
  });
  parallel(threads, call.heads, [&](int64_t head, int64_t thread) {
    FeatureWorkspace<R> workspace(call, workspaces + thread * workspace_bytes);
    clear(workspace.start, size);
    for (int64_t n = 0; n < blocks; ++n) {  // replace each sum by the state at the beginning of its block
      const bool on = n + 1 < blocks && order.absorbs(order.block(n));
      if (on) memcpy(workspace.local, state(head, n), size * sizeof(R));
      memcpy(state(head, n), workspace.start, size * sizeof(R));
      if (on) join_states(workspace.start, workspace.local, size);
    }
  });
  parallel(threads, call.heads * blocks, [&](int64_t job, int64_t thread) {
    FeatureWorkspace<R> workspace(call, workspaces + thread * workspace_bytes);
    const Span s = order.block(job % blocks);
    if (order.emits(s)) order.emit(workspace, job / blocks, s, state(job / blocks, job % blocks), nullptr);
  });
}

template <class R> int64_t features_scratch_as(const Problem &p) { return FeatureCall<R>(p, true).bytes(); }

template <class R> void run_features(const Problem &p, bool backward) {
  FeatureCall<R> call(p, backward);
  Arena arena{scratch_of(p)};
  call.pack(arena);
  if (!call.by_head) call.states = arena.take<R>(call.heads * (call.blocks() + 1) * call.state_size());
  if (!backward) return sweep<R, ROWS_FORWARD>(call, arena.next);
  if (p.dq) sweep<R, QUERIES_BACKWARD>(call, arena.next);
  if (p.dk || p.dv) sweep<R, KEYS_BACKWARD>(call, arena.next);
}

}  // namespace
