// The end of operations that are not plain: atomics, raw operations, and the agent's own.
#include "agent/completion.h"

#include <cstring>

#include "agent/gathered.h"
#include "agent/submit.h"

namespace spinwire::agent {
namespace {

/// The value that the atomic found, in host order. Drivers of devices with another byte order
/// report no atomics.
std::uint64_t found_by(const EngineContext& ctx, const Operation& op) noexcept {
  std::uint64_t value = 0;
  std::memcpy(&value, staging_of(ctx, op), sizeof value);
  return value;
}

bool is_atomic(OperationKind kind) noexcept {
  return kind == OperationKind::compare_swap || kind == OperationKind::fetch_add;
}

/// Handles the end of one of the agent's own operations.
void on_internal_end(EngineContext& ctx, Agent& a, OperationKind kind, std::uint32_t subject,
                     Status status) noexcept {
  switch (kind) {
    case OperationKind::credit_write:
      on_credit_written(ctx, a);
      break;
    case OperationKind::credit_message:
      on_credit_message_sent(ctx, a, static_cast<wire::MessageKind>(subject));
      break;
    case OperationKind::rendezvous_read:
      on_rendezvous_read(ctx, a, subject, status);
      break;
    case OperationKind::control_message:
      on_control_message_done(ctx, a);
      break;
    case OperationKind::rendezvous_unbind:
      on_control_message_done(ctx, a);
      on_rendezvous_unbound(ctx, a, subject, status);
      break;
    case OperationKind::lease_bind:
      on_lease_bound(ctx, a);
      break;
    case OperationKind::lease_unbind:
      on_lease_unbound(ctx, a, subject, status);
      break;
    default:
      break;
  }
}

}  // namespace

void end_internal(EngineContext& ctx, Agent& a, Operation& op, Status status) noexcept {
  const OperationKind kind = op.kind;
  if (kind >= OperationKind::cancelled) {
    return kind == OperationKind::cancelled ? end_cancelled(ctx, a, op, status)
                                            : end_gathered(ctx, a, op, status);
  }
  --a.send_queue.used;
  Completion completion;
  completion.status = status;
  count_end(a, kind, op, status == Status::ok);
  if (status == Status::ok) {
    completion.bytes = op.length;
    if (is_atomic(kind)) completion.value = found_by(ctx, op);
  }
  const std::uint32_t subject = op.subject;
  const std::uint32_t list = is_raw(kind) ? detach_elements(a, op) : kNone;
  Block* const block = op.block;
  if (op.header_in_headroom) block->header_in_use = 0;
  const bool calls_back = op.calls_back;
  CompletionCallback done;
  if (calls_back) done = op.done;
  ctx.operations.release(op, kind);
  if (calls_back) done(completion);
  if (block != nullptr) detail::release(block);
  if (list != kNone) release_elements(a, list);
  on_internal_end(ctx, a, kind, subject, status);
}

}  // namespace spinwire::agent
