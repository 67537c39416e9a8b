// Accepts atomics.

#include "agent/completion.h"
#include "agent/submit.h"

namespace spinwire::agent {
namespace {

constexpr std::size_t kAtomicBytes = 8;

Status check_atomic(const EngineContext& ctx, const RemoteRegion& remote) noexcept {
  if (!ctx.device->info().atomics) return Status::unsupported;
  if (!remote || remote.length != kAtomicBytes) return Status::out_of_bounds;
  if (remote.address % kAtomicBytes != 0) return Status::invalid_argument;
  return allows(remote.access, Access::remote_atomic) ? Status::ok : Status::remote_access;
}

}  // namespace

template <OperationKind kind>
Status submit_atomic(EngineContext& ctx, Agent& a, const AtomicRequest& r) noexcept {
  if (a.state != ConnectionState::ready) return Status::not_connected;
  if (needs_key(r.remote)) {
    RemoteRegion real;
    if (const Status status = resolve_key(ctx, a, r.remote, real); status != Status::ok)
      return status;
    return submit_atomic<kind>(ctx, a, {real, r.expected, r.operand, r.done, r.defer});
  }
  if (const Status status = check_atomic(ctx, r.remote); status != Status::ok) return status;
  if (a.send_queue.used >= send_limit_of(a)) return refuse_for_room(ctx, a, Room::operation);
  Operation* const op = ctx.operations.acquire();
  if (op == nullptr) return refuse_for_room(ctx, a, Room::operation);
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
  // Last, where the call keeps the fewest values from registers.
  if (ctx.is_sample_due()) [[unlikely]]
    begin_sample(ctx, a, *op);
  return post(ctx, a, r.defer);
}
template Status submit_atomic<OperationKind::compare_swap>(EngineContext&, Agent&,
                                                           const AtomicRequest&) noexcept;
template Status submit_atomic<OperationKind::fetch_add>(EngineContext&, Agent&,
                                                        const AtomicRequest&) noexcept;

}  // namespace spinwire::agent
