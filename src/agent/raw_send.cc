// Sends of raw connections, and the lists of elements of their operations. Hot.
#include <endian.h>

#include "agent/agent.h"
#include "agent/raw_elements.h"
#include "agent/submit.h"
#include "base/internals.h"

namespace spinwire::agent {
Status send_raw(EngineContext& ctx, Agent& a, const RawSend& r) noexcept {
  if (a.raw == nullptr) return Status::unsupported;
  if (a.state != ConnectionState::ready) return Status::not_connected;
  RawQueue& q = *a.raw;
  const Extent extent = measure(ctx, a, r.data, q.send_elements);
  if (extent.status != Status::ok) return extent.status;
  if (a.send_queue.used >= q.send_limit) return refuse_for_room(ctx, a, Room::operation);
  const bool listed = r.data.size() > 1;
  const std::uint32_t index = listed ? q.acquire_elements(r.data.size()) : kNone;
  if (listed && index == kNone) return refuse_for_room(ctx, a, Room::operation);
  Operation* const op = ctx.operations.acquire();
  if (op == nullptr) {
    if (listed) q.free_elements(index);
    return refuse_for_room(ctx, a, Room::operation);
  }
  op->block = nullptr;
  if (listed) {
    op->wr.sg_list = q.list(index).sges;
    hold_elements(r.data, op->wr.sg_list, q.list(index).blocks);
  } else {
    hold_elements(r.data, op->sges, &op->block);
  }
  op->kind = r.immediate ? OperationKind::raw_send_imm : OperationKind::raw_send;
  op->length = extent.bytes;
  op->header_in_headroom = false;
  op->calls_back = static_cast<bool>(r.done);
  if (op->calls_back) op->done = r.done;
  if (ctx.is_sample_due()) [[unlikely]]
    begin_sample(ctx, a, *op);
  count_begin(a, op->kind);
  op->wr.num_sge = static_cast<int>(r.data.size());
  op->wr.opcode = opcode_of(op->kind);
  op->wr.send_flags = extent.bytes <= a.send_queue.inline_bytes ? unsigned{IBV_SEND_INLINE} : 0u;
  op->wr.imm_data = htobe32(r.immediate.value_or(0));
  if (a.domain != nullptr) [[unlikely]]
    use_own_key(ctx, *a.domain, *op);
  append(a, *op);
  if (!r.defer && q.posted != q.accepted)
    post_raw_receives_now(ctx, a);  // the peer's answer needs them
  return post(ctx, a, r.defer);
}

Status submit_on_raw(EngineContext& ctx, Agent& a, const Request& r, OperationKind kind) noexcept {
  if (kind != OperationKind::write_imm) return Status::unsupported;
  if (a.send_queue.used >= a.raw->send_limit) return refuse_for_room(ctx, a, Room::operation);
  if (!has_key(ctx, a, *r.block)) return Status::invalid_argument;
  Operation* const op = ctx.operations.acquire();
  if (op == nullptr) return refuse_for_room(ctx, a, Room::operation);
  begin<OperationKind::raw_write_imm>(a, *op, r.block, r.size, r.done);
  if (ctx.is_sample_due()) [[unlikely]]
    begin_sample(ctx, a, *op);
  build_one_sided<OperationKind::write_imm>(a, *op, r);
  op->wr.imm_data = htobe32(r.immediate);
  if (a.domain != nullptr) use_own_key(ctx, *a.domain, *op);
  append(a, *op);
  return post(ctx, a, r.defer);
}

std::uint32_t detach_elements(Agent& a, Operation& op) noexcept {
  if (op.wr.sg_list == op.sges) return kNone;
  const std::uint32_t index = a.raw->index_of(op.wr.sg_list);
  op.wr.sg_list = op.sges;
  return index;
}

void release_elements(Agent& a, std::uint32_t index) noexcept {
  RawQueue& q = *a.raw;
  release_all(q.list(index).blocks, static_cast<int>(q.element_count(index)));
  q.free_elements(index);
}

}  // namespace spinwire::agent
