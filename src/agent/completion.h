// How operations end. Hot; inlined into the loop over a batch of completions.
#pragma once

#include <cstdint>

#include "agent/agent.h"

namespace spinwire::agent {

/// Where the device writes the value that an atomic found.
inline std::byte* staging_of(const EngineContext& ctx, const Operation& op) noexcept {
  return ctx.staging + std::size_t{ctx.operations.index_of(op)} * kStagingBytes;
}

/// Translates a completion's status for the application.
Status status_of(ibv_wc_status status) noexcept;

/// Counts the end of an operation, which `kind` is counted as.
inline void count_end(Agent& a, OperationKind kind, const Operation& op, bool ok) noexcept {
  Tally& tally = a.tallies[static_cast<std::size_t>(kind)];
  tally.done += ok ? 1 : 0;
  tally.failed += ok ? 0 : 1;
  tally.bytes += ok ? op.length : 0;
}

/// Ends an operation that is not plain.
void end_internal(EngineContext& ctx, Agent& a, Operation& op, Status status) noexcept;

/// Ends an operation that is unlinked from its agent. The record is free before the callback runs,
/// so that the callback may start another operation.
[[gnu::always_inline]] inline void end(EngineContext& ctx, Agent& a, Operation& op,
                                       Status status) noexcept {
  if (!is_plain(op.kind)) [[unlikely]]
    return end_internal(ctx, a, op, status);
  --a.send_queue.used;
  const bool ok = status == Status::ok;
  const std::uint32_t bytes = ok ? op.length : 0;
  count_end(a, op.kind, op, ok);
  Block* const block = op.block;
  if (op.header_in_headroom) block->header_in_use = 0;
  if (op.calls_back) {
    const Completion completion{status, bytes};
    const CompletionCallback done = op.done;
    ctx.operations.release(op);
    done(completion);
  } else {
    ctx.operations.release(op);
  }
  detail::release(block);
}

/// Ends the oldest operation that the device has.
[[gnu::always_inline]] inline void end_posted(EngineContext& ctx, Agent& a,
                                              Status status) noexcept {
  Operation& op = *a.send_queue.posted;
  a.send_queue.posted = op.next();
  end(ctx, a, op, status);
}

/// Ends the oldest operation, of a queue pair that is gone.
inline void end_flushed(EngineContext& ctx, Agent& a) noexcept {
  end_posted(ctx, a, a.send_queue.posted->has_run ? Status::ok : Status::flushed);
}

/// A send completion. Returns the number of operations that it ended.
[[gnu::always_inline]] inline std::uint32_t on_send_completion(EngineContext& ctx,
                                                               const ibv_wc& wc) noexcept {
  Operation* const op = ctx.operations.find(wc.wr_id);
  if (op == nullptr) [[unlikely]] {
    ++ctx.stats.stale_completions;
    return 0;
  }
  Agent& a = *op->agent;
  std::uint32_t ended = 1;
  // A completion covers all work requests before it.
  for (; a.send_queue.posted != op; ++ended) end_posted(ctx, a, Status::ok);
  if (wc.status == IBV_WC_SUCCESS) [[likely]] {
    a.liveness.last_completion = ctx.now;
    end_posted(ctx, a, Status::ok);
  } else {
    on_operation_failed(ctx, a, op->kind == OperationKind::cancelled ? op->was : op->kind, wc);
    end_posted(ctx, a, status_of(wc.status));
  }
  if (is_drained(a)) [[unlikely]]
    continue_close(ctx, a);
  return ended;
}

}  // namespace spinwire::agent
