// Atomics, and the end of operations that are not plain.
#include <cstring>

#include "agent/completion.h"
#include "agent/submit.h"

namespace spinwire::agent {
namespace {

constexpr std::size_t kAtomicBytes = 8;

std::byte* staging_of(const EngineContext& ctx, const Operation& op) noexcept {
  return ctx.staging + std::size_t{ctx.operations.index_of(op)} * kStagingBytes;
}

Status check_atomic(const EngineContext& ctx, const RemoteRegion& remote) noexcept {
  if (!ctx.device->info().atomics) return Status::unsupported;
  if (!remote || remote.length != kAtomicBytes) return Status::out_of_bounds;
  if (remote.address % kAtomicBytes != 0) return Status::invalid_argument;
  return allows(remote.access, Access::remote_atomic) ? Status::ok : Status::remote_access;
}

/// The value that the atomic found, in host order: drivers of devices with another order report no
/// atomics.
std::uint64_t found_by(const EngineContext& ctx, const Operation& op) noexcept {
  std::uint64_t value = 0;
  std::memcpy(&value, staging_of(ctx, op), sizeof value);
  return value;
}

bool is_atomic(OperationKind kind) noexcept {
  return kind == OperationKind::compare_swap || kind == OperationKind::fetch_add;
}

}  // namespace

template <OperationKind kind>
Status submit_atomic(EngineContext& ctx, Agent& a, const AtomicRequest& r) noexcept {
  if (a.state != ConnectionState::ready) return Status::not_connected;
  if (r.remote.rkey == 0 && r.remote.lease != 0) {
    RemoteRegion real;
    if (const Status status = resolve_leased(ctx, a, r.remote, real); status != Status::ok)
      return status;
    return submit_atomic<kind>(ctx, a, {real, r.expected, r.operand, r.done, r.defer});
  }
  if (const Status status = check_atomic(ctx, r.remote); status != Status::ok) return status;
  if (a.send_queue.used >= send_limit_of(a)) return Status::would_block;
  Operation* const op = ctx.operations.acquire();
  if (op == nullptr) return Status::would_block;
  op->block = nullptr;
  op->length = kAtomicBytes;
  op->kind = kind;
  op->header_in_headroom = false;
  op->calls_back = static_cast<bool>(r.done);
  if (op->calls_back) op->done = r.done;
  count_begin(a, kind);
  op->sges[0] = {reinterpret_cast<std::uint64_t>(staging_of(ctx, *op)), kAtomicBytes,
                 ctx.staging_block->lkey};
  op->wr.num_sge = 1;
  op->wr.opcode = opcode_of(kind);
  op->wr.send_flags = 0;
  const bool compares = kind == OperationKind::compare_swap;
  op->wr.wr.atomic = {r.remote.address, compares ? r.expected : r.operand, compares ? r.operand : 0,
                      r.remote.rkey};
  if (a.domain != nullptr) use_own_key(ctx, *a.domain, *op);
  append(a, *op);
  return post(ctx, a, r.defer);
}
template Status submit_atomic<OperationKind::compare_swap>(EngineContext&, Agent&,
                                                           const AtomicRequest&) noexcept;
template Status submit_atomic<OperationKind::fetch_add>(EngineContext&, Agent&,
                                                        const AtomicRequest&) noexcept;

namespace {

/// What the end of one of the agent's own brings about.
void follow(EngineContext& ctx, Agent& a, OperationKind kind, std::uint32_t length,
            Status status) noexcept {
  switch (kind) {
    case OperationKind::credit_write:
      a.credit.write_pending = false;
      break;
    case OperationKind::rendezvous_read:
      on_rendezvous_read(ctx, a, length, status);
      break;
    case OperationKind::control_message:
      on_control_message_done(ctx, a);
      break;
    case OperationKind::rendezvous_unbind:
      on_control_message_done(ctx, a);
      on_rendezvous_unbound(ctx, a, length, status);
      break;
    case OperationKind::lease_bind:
      on_lease_bound(ctx, a);
      break;
    case OperationKind::lease_unbind:
      on_lease_unbound(ctx, a, length, status);
      break;
    default:
      break;
  }
}

}  // namespace

void end_internal(EngineContext& ctx, Agent& a, Operation& op, Status status) noexcept {
  if (op.kind == OperationKind::cancelled) return end_cancelled(ctx, a, op, status);
  --a.send_queue.used;
  Completion completion;
  completion.status = status;
  count_end(a, op, status == Status::ok);
  if (status == Status::ok) {
    completion.bytes = op.length;
    if (is_atomic(op.kind)) completion.value = found_by(ctx, op);
  }
  const OperationKind kind = op.kind;
  const std::uint32_t length = op.length;
  const std::uint32_t list = is_raw(kind) ? detach_elements(a, op) : kNone;
  Block* const block = op.block;
  if (op.header_in_headroom) block->header_in_use = 0;
  const bool calls_back = op.calls_back;
  CompletionCallback done;
  if (calls_back) done = op.done;
  ctx.operations.release(op);
  if (calls_back) done(completion);
  if (block != nullptr) detail::release(block);
  if (list != kNone) release_elements(a, list);
  follow(ctx, a, kind, length, status);
}

}  // namespace spinwire::agent
