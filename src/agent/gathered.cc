#include "agent/gathered.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "agent/agent.h"
#include "agent/completion.h"
#include "agent/raw_elements.h"
#include "agent/submit.h"
#include "base/internals.h"
#include "base/log_message.h"

namespace spinwire::agent {

// Hot, and compiled with the public API: a second copy here might replace the copies there.
extern template Status submit_any<OperationKind::send>(EngineContext&, Agent&,
                                                       const Request&) noexcept;
extern template Status submit_any<OperationKind::write>(EngineContext&, Agent&,
                                                        const Request&) noexcept;
extern template Status submit_by_request<false>(EngineContext&, Agent&, Block*, std::byte*,
                                                std::size_t, const CompletionCallback&,
                                                bool) noexcept;
extern template Status submit_by_request<true>(EngineContext&, Agent&, Block*, std::byte*,
                                               std::size_t, const CompletionCallback&,
                                               bool) noexcept;

namespace {

using Parts = std::span<const BufferSlice>;

/// Most bytes of a message that is built in the staging room of its operation.
constexpr std::size_t kMaxStaged = kStagingBytes - wire::kMessageHeaderBytes;

/// Says what to do, for the first such operation of the engine.
[[gnu::cold, gnu::noinline]] Status refuse_parts(EngineContext& ctx, const Agent& a,
                                                 std::size_t parts) noexcept {
  if (!std::exchange(ctx.parts_refused, true)) {
    base::log(LogLevel::warning,
              "an operation of {} parts was refused (limit): connection {} gathers {}; raise {} to "
              "{}, up to {} on device {}, or join parts",
              parts, a.index, max_parts(a),
              a.raw != nullptr ? "RawSettings::max_send_sge" : "queues.max_send_sge", parts,
              ctx.device->info().max_sge - (a.raw != nullptr ? 0 : 1), ctx.device->info().name);
  }
  return Status::limit;
}

/// Checks the number of the parts and each of them. Errors: limit, and those of measure().
Extent measure_parts(EngineContext& ctx, const Agent& a, Parts parts) noexcept {
  if (parts.size() > max_parts(a)) [[unlikely]]
    return {refuse_parts(ctx, a, parts.size())};
  return measure(ctx, a, parts, max_parts(a));
}

void copy_parts(Parts parts, std::byte* to) noexcept {
  for (const BufferSlice& part : parts) {
    std::memcpy(to, part.data(), part.size());
    to += part.size();
  }
}

/// Takes references to the parts, and puts them into the record's list, behind its header if it has
/// one.
void use_list(EngineContext& ctx, Operation& op, Parts parts, bool has_header) noexcept {
  const std::uint32_t record = ctx.operations.index_of(op);
  ibv_sge* const list = ctx.element_lists->elements(record);
  if (has_header) list[0] = op.sges[0];
  const std::size_t before = has_header ? 1 : 0;
  hold_elements(parts, list + before, ctx.element_lists->blocks(record));
  op.wr.sg_list = list;
  op.wr.num_sge = static_cast<int>(before + parts.size());
  op.subject = static_cast<std::uint32_t>(parts.size());
}

void set_callback(Operation& op, const CompletionCallback& done) noexcept {
  op.calls_back = static_cast<bool>(done);
  if (op.calls_back) op.done = done;
}

unsigned inline_flag(const Agent& a, std::size_t bytes) noexcept {
  return bytes <= a.send_queue.inline_bytes ? unsigned{IBV_SEND_INLINE} : 0u;
}

void append_with_own_key(const EngineContext& ctx, Agent& a, Operation& op) noexcept {
  if (a.domain != nullptr) use_own_key(ctx, *a.domain, op);
  append(a, op);
}

[[nodiscard]] bool has_message_credit(EngineContext& ctx, Agent& a) noexcept {
  return a.credit.sent != a.credit.send_limit || count_grants(ctx, a);
}

/// Counts a message for which there is credit. Returns whether it asks for more.
bool count_message(const EngineContext& ctx, Agent& a) noexcept {
  count_begin(a, OperationKind::send);
  a.activity.last_sent = ctx.now;
  return ++a.credit.sent == a.credit.send_limit && !count_header_grants(a);
}

/// Accepts a message of at least two parts, up to the eager limit.
Status send_by_request(EngineContext& ctx, Agent& a, const Gathered& r,
                       std::uint32_t bytes) noexcept {
  if (a.send_queue.used >= send_limit_of(a) || !has_message_credit(ctx, a))
    return refuse_for_room(ctx, a, Room::message);
  Operation* const op = ctx.operations.acquire();
  if (op == nullptr) return refuse_for_room(ctx, a, Room::message);
  op->kind = OperationKind::send_gathered;
  op->block = nullptr;
  op->length = bytes;
  op->header_in_headroom = false;
  set_callback(*op, r.done);
  if (ctx.is_sample_due()) [[unlikely]]
    begin_sample(ctx, a, *op);
  std::byte* const at = staging_of(ctx, *op);
  wire::put(data_header(a, bytes, count_message(ctx, a)), at);
  op->sges[0] = {reinterpret_cast<std::uint64_t>(at), wire::kMessageHeaderBytes,
                 ctx.staging_block->lkey};
  use_list(ctx, *op, r.parts, true);
  op->wr.opcode = IBV_WR_SEND;
  op->wr.send_flags = inline_flag(a, bytes + wire::kMessageHeaderBytes);
  append_with_own_key(ctx, a, *op);
  return post(ctx, a, r.defer);
}

/// Accepts a message above the eager limit, as one block of the send pool.
Status send_copied(EngineContext& ctx, Agent& a, const Gathered& r, std::uint32_t bytes,
                   bool tracked) noexcept {
  if (a.send_queue.used + 2 > send_limit_of(a) || !has_message_credit(ctx, a) ||
      lacks_window(ctx, a))
    return refuse_for_room(ctx, a, Room::rendezvous);  // before the bytes are copied
  Block* const block = ctx.arena->allocate(memory::PoolId::send, bytes);
  if (block == nullptr) return refuse_for_block(ctx, a, bytes);
  copy_parts(r.parts, block->payload);
  const Status status =
      submit_message<true>(ctx, a, block, block->payload, bytes, r.done, tracked, r.defer);
  detail::release(block);
  return status;
}

/// Whether the message may go without a work request; see sent_directly().
bool may_go_directly(Agent& a, std::uint32_t bytes) noexcept {
  Rendezvous& v = a.rendezvous;
  if (a.send_queue.direct_limit == 0 || a.send_queue.deferred != nullptr) return false;
  if (bytes < a.send_queue.direct_limit) return true;
  return bytes > a.send_queue.max_eager && bytes <= v.longest_direct && v.direct_pause == 0 &&
         v.sends.empty();
}

bool sent_directly(EngineContext& ctx, Agent& a, const Gathered& r, std::uint32_t bytes,
                   bool tracked) noexcept {
  if (!may_go_directly(a, bytes)) return false;
  std::array<ibv_sge, kMaxParts> elements;  // NOLINT: only those in use are written
  for (std::size_t i = 0; i < r.parts.size(); ++i) {
    elements[i] = {reinterpret_cast<std::uint64_t>(r.parts[i].data()),
                   static_cast<std::uint32_t>(r.parts[i].size()), 0};
  }
  const std::span<const ibv_sge> list(elements.data(), r.parts.size());
  if (!tracked && !r.done) return send_direct_gathered(ctx, a, list, bytes, r.defer);
  return !r.defer && send_direct_gathered_recorded(ctx, a, list, bytes, r.done);
}

/// Checks the target of a WRITE, and fills in its key.
Status find_target(EngineContext& ctx, const Agent& a, std::uint32_t bytes,
                   RemoteRegion& remote) noexcept {
  if (needs_key(remote)) {
    RemoteRegion real;
    if (const Status status = resolve_key(ctx, a, remote, real); status != Status::ok)
      return status;
    remote = real;
  }
  if (remote.rkey == 0 || bytes > remote.length) return Status::out_of_bounds;
  return allows(remote.access, Access::remote_write) ? Status::ok : Status::remote_access;
}

/// Checks the parts of a WRITE and its target.
Extent check_write(EngineContext& ctx, const Agent& a, Parts parts, RemoteRegion& remote) noexcept {
  Extent extent = measure_parts(ctx, a, parts);
  if (extent.status == Status::message_too_long || (extent.status == Status::ok && parts.empty()))
    extent.status = Status::out_of_bounds;
  if (extent.status == Status::ok) extent.status = find_target(ctx, a, extent.bytes, remote);
  return extent;
}

/// Begins a WRITE of one part or more.
void begin_write(EngineContext& ctx, Agent& a, Operation& op, OperationKind kind, Parts parts,
                 std::uint32_t bytes, const RemoteRegion& remote) noexcept {
  count_begin(a, OperationKind::write);
  op.kind = kind;
  op.block = nullptr;
  op.length = bytes;
  op.header_in_headroom = false;
  op.calls_back = false;
  if (parts.size() == 1) {
    hold_elements(parts, op.sges, &op.block);
    op.wr.num_sge = 1;
  } else {
    use_list(ctx, op, parts, false);
  }
  op.wr.opcode = IBV_WR_RDMA_WRITE;
  op.wr.send_flags = inline_flag(a, bytes);
  op.wr.wr.rdma.remote_addr = remote.address;
  op.wr.wr.rdma.rkey = remote.rkey;
}

/// Begins the message behind the WRITE `write`. `block` has its bytes, or they go into the staging
/// room.
void begin_notice(EngineContext& ctx, Agent& a, Operation& op, const Operation& write, Block* block,
                  std::span<const std::byte> notice, const CompletionCallback& done) noexcept {
  const auto size = static_cast<std::uint32_t>(notice.size());
  const std::uint64_t header = data_header(a, size, count_message(ctx, a));
  op.kind = OperationKind::notice;
  op.block = block;
  op.length = size;
  op.subject = write.length;
  op.cancellation.status = Status::ok;
  set_callback(op, done);
  op.wr.opcode = IBV_WR_SEND;
  op.wr.num_sge = 1;
  if (block != nullptr) return build_in_headroom(a, op, header, block, size);
  std::byte* const at = staging_of(ctx, op);
  wire::put(header, at);
  std::copy(notice.begin(), notice.end(), at + wire::kMessageHeaderBytes);
  const std::uint32_t bytes = size + std::uint32_t{wire::kMessageHeaderBytes};
  op.header_in_headroom = false;
  op.sges[0] = {reinterpret_cast<std::uint64_t>(at), bytes, ctx.staging_block->lkey};
  op.wr.send_flags = inline_flag(a, bytes);
}

}  // namespace

Status send_gathered(EngineContext& ctx, Agent& a, const Gathered& r, bool tracked) noexcept {
  if (a.state != ConnectionState::ready) return Status::not_connected;
  if (a.raw != nullptr) return Status::unsupported;
  const auto [status, bytes] = measure_parts(ctx, a, r.parts);
  if (status != Status::ok) return status;
  if (bytes > a.max_message) return Status::message_too_long;
  if (r.parts.size() == 1) {
    const BufferSlice& only = r.parts.front();
    return submit_message<false>(ctx, a, detail::block_of(only), only.data(), bytes, r.done,
                                 tracked, r.defer);
  }
  if (sent_directly(ctx, a, r, bytes, tracked)) return Status::ok;
  if (bytes > a.send_queue.max_eager) return send_copied(ctx, a, r, bytes, tracked);
  const bool is_staged = bytes <= kMaxStaged && inline_flag(a, bytes + wire::kMessageHeaderBytes);
  if (bytes != 0 && !is_staged) return send_by_request(ctx, a, r, bytes);
  // The device gathers such a message at once in any case.
  std::array<std::byte, kMaxStaged> copy;  // NOLINT: only the bytes in use are written
  copy_parts(r.parts, copy.data());
  return submit_any<OperationKind::send>(
      ctx, a, {ctx.staging_block, copy.data(), bytes, nullptr, 0, r.done, r.defer});
}

Status write_gathered(EngineContext& ctx, Agent& a, const Gathered& r,
                      const RemoteRegion& remote) noexcept {
  if (a.state != ConnectionState::ready) return Status::not_connected;
  RemoteRegion target = remote;
  const auto [status, bytes] = check_write(ctx, a, r.parts, target);
  if (status != Status::ok) return status;
  if (r.parts.size() == 1) {
    const BufferSlice& only = r.parts.front();
    return submit_any<OperationKind::write>(
        ctx, a, {detail::block_of(only), only.data(), bytes, &target, 0, r.done, r.defer});
  }
  if (a.send_queue.used >= send_limit_of(a)) return refuse_for_room(ctx, a, Room::operation);
  Operation* const op = ctx.operations.acquire();
  if (op == nullptr) return refuse_for_room(ctx, a, Room::operation);
  begin_write(ctx, a, *op, OperationKind::write_gathered, r.parts, bytes, target);
  set_callback(*op, r.done);
  if (ctx.is_sample_due()) [[unlikely]]
    begin_sample(ctx, a, *op);
  append_with_own_key(ctx, a, *op);
  return post(ctx, a, r.defer);
}

Status write_and_send(EngineContext& ctx, Agent& a, const Gathered& r, const RemoteRegion& remote,
                      std::span<const std::byte> notice) noexcept {
  if (a.state != ConnectionState::ready) return Status::not_connected;
  if (a.raw != nullptr) return Status::unsupported;
  RemoteRegion target = remote;
  const auto [status, bytes] = check_write(ctx, a, r.parts, target);
  if (status != Status::ok) return status;
  if (notice.size() > a.send_queue.max_eager) return Status::message_too_long;
  if (a.send_queue.used + 2 > send_limit_of(a) || !ctx.operations.has_two() ||
      !has_message_credit(ctx, a))
    return refuse_for_room(ctx, a, Room::notice);
  Block* block = nullptr;
  if (notice.size() > kMaxStaged) {
    block = ctx.arena->allocate(memory::PoolId::send, notice.size());
    if (block == nullptr) return refuse_for_block(ctx, a, notice.size());
    std::copy(notice.begin(), notice.end(), block->payload);
  }
  Operation& write = *ctx.operations.acquire();
  begin_write(ctx, a, write, OperationKind::noticed_write, r.parts, bytes, target);
  append_with_own_key(ctx, a, write);
  Operation& op = *ctx.operations.acquire();
  begin_notice(ctx, a, op, write, block, notice, r.done);
  if (ctx.is_sample_due()) [[unlikely]]
    begin_sample(ctx, a, op);
  append_with_own_key(ctx, a, op);
  return post(ctx, a, r.defer);
}

void release_parts(EngineContext& ctx, Operation& op) noexcept {
  release_all(ctx.element_lists->blocks(ctx.operations.index_of(op)), static_cast<int>(op.subject));
  op.wr.sg_list = op.sges;
}

bool are_parts_held(const EngineContext& ctx, const Operation& op) noexcept {
  const Block* const* const blocks = ctx.element_lists->blocks(ctx.operations.index_of(op));
  return std::all_of(blocks, blocks + op.subject, [](const Block* b) { return b->refs != 0; });
}

void end_gathered(EngineContext& ctx, Agent& a, Operation& op, Status status) noexcept {
  const OperationKind kind = op.kind;
  const bool ok = status == Status::ok;
  --a.send_queue.used;
  count_end(a, tally_kind(kind), op, ok);
  Completion completion;
  completion.status = status;
  if (ok) completion.bytes = op.length;
  if (kind == OperationKind::notice) {
    if (ok) completion.bytes += op.subject;
    if (!ok && op.cancellation.status != Status::ok) completion.status = op.cancellation.status;
  }
  // The notice is flushed, and reports why.
  Operation* const next = a.send_queue.posted;
  if (kind == OperationKind::noticed_write && !ok && next != nullptr &&
      next->kind == OperationKind::notice)
    next->cancellation.status = status;
  if (has_parts(kind, op)) release_parts(ctx, op);
  Block* const block = op.block;
  if (op.header_in_headroom) block->header_in_use = 0;
  CompletionCallback done;
  if (op.calls_back) done = op.done;
  ctx.operations.release(op);
  if (done) done(completion);
  if (block != nullptr) detail::release(block);
}

}  // namespace spinwire::agent
