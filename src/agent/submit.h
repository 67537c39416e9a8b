// Accepts the application's operations, and builds each as the work request for the device. Each
// kind has its own instance, without branches for the others. Hot.
#pragma once

#include <endian.h>

#include <algorithm>
#include <cstdint>
#include <span>

#include "agent/agent.h"
#include "agent/lease_table.h"
#include "agent/rendezvous.h"
#include "agent/room_waiters.h"

namespace spinwire::agent {

constexpr bool uses_credit(OperationKind kind) noexcept {
  return kind == OperationKind::send || kind == OperationKind::send_imm ||
         kind == OperationKind::write_imm || kind == OperationKind::credit_return ||
         kind == OperationKind::send_gathered || kind == OperationKind::notice;
}
constexpr bool has_header(OperationKind kind) noexcept {
  return kind == OperationKind::send || kind == OperationKind::send_imm ||
         kind == OperationKind::credit_return || kind == OperationKind::goodbye ||
         kind == OperationKind::rendezvous_offer || kind == OperationKind::rendezvous_offer_imm ||
         kind == OperationKind::control_message || kind == OperationKind::send_gathered ||
         kind == OperationKind::notice;
}
constexpr ibv_wr_opcode opcode_of(OperationKind kind) noexcept {
  switch (kind) {
    case OperationKind::send_imm:
    case OperationKind::rendezvous_offer_imm:
    case OperationKind::raw_send_imm:
      return IBV_WR_SEND_WITH_IMM;
    case OperationKind::write:
    case OperationKind::credit_write:
    case OperationKind::write_gathered:
    case OperationKind::noticed_write:
      return IBV_WR_RDMA_WRITE;
    case OperationKind::write_imm:
    case OperationKind::raw_write_imm:
      return IBV_WR_RDMA_WRITE_WITH_IMM;
    case OperationKind::read:
    case OperationKind::rendezvous_read:
      return IBV_WR_RDMA_READ;
    case OperationKind::rendezvous_bind:
    case OperationKind::lease_bind:
      return IBV_WR_BIND_MW;
    case OperationKind::rendezvous_unbind:
    case OperationKind::lease_unbind:
      return IBV_WR_LOCAL_INV;
    case OperationKind::compare_swap:
      return IBV_WR_ATOMIC_CMP_AND_SWP;
    case OperationKind::fetch_add:
      return IBV_WR_ATOMIC_FETCH_AND_ADD;
    default:
      return IBV_WR_SEND;
  }
}

/// The fast path accepts transfers up to this length; longer ones are checked against the device's
/// limit, EngineParts::max_transfer.
inline constexpr std::uint64_t kShortTransferBytes = std::uint64_t{1} << 20;

/// Long lists also have signaled operations inside, so that completions do not all come at once.
inline constexpr std::uint32_t kSignalEvery = 32;

/// Appends a built operation to the deferred ones.
inline void append(Agent& a, Operation& op) noexcept {
  op.agent = &a;
  if (a.send_queue.deferred == nullptr) {
    a.send_queue.deferred = &op;
  } else {
    a.send_queue.deferred_last->wr.next = &op.wr;
  }
  a.send_queue.deferred_last = &op;
  if (++a.send_queue.used % kSignalEvery == 0) [[unlikely]]
    op.wr.send_flags |= IBV_SEND_SIGNALED;
}

inline void queue_flush(EngineContext& ctx, Agent& a) noexcept {
  if (a.in_flush_queue) return;
  a.in_flush_queue = true;
  ctx.flush_queue.add(a);
}

struct Request {
  detail::Block* block;
  std::byte* data;
  std::size_t size;
  const RemoteRegion* remote;  ///< null for messages
  std::uint32_t immediate;
  const CompletionCallback& done;
  bool defer;             ///< post with the next flush
  bool is_final = false;  ///< cannot be cancelled, even while it is deferred
};

/// The header of a message, which carries all credit granted so far.
inline std::uint64_t build_header(const Agent& a, std::uint32_t length,
                                  bool wants_credit) noexcept {
  return wire::encode({wire::MessageKind::data,
                       wants_credit ? wire::message_flag::kWantCredit : std::uint8_t{0},
                       static_cast<std::uint16_t>(a.credit.granted), length});
}
/// The header of a message that is sent for sure: its credit counts as advertised.
inline std::uint64_t data_header(Agent& a, std::uint32_t length, bool wants_credit) noexcept {
  a.credit.advertised = a.credit.granted;
  return build_header(a, length, wants_credit);
}

/// `most`: bytes of a one-sided transfer.
template <OperationKind kind>
inline Status check_request(const Agent& a, const Request& r,
                            std::uint64_t most = kShortTransferBytes) noexcept {
  const std::size_t size = r.size;
  if (r.block == nullptr) [[unlikely]]
    return Status::out_of_bounds;
  if constexpr (has_header(kind)) {
    return size <= a.send_queue.max_eager ? Status::ok : Status::message_too_long;
  } else {
    // Only a WRITE with immediate may be empty; for the others, 0 - 1 is too long.
    constexpr std::size_t kLeast = kind == OperationKind::write_imm ? 0 : 1;
    if (r.remote->rkey == 0 || size > r.remote->length || size - kLeast > most - kLeast)
        [[unlikely]]
      return Status::out_of_bounds;
    constexpr Access kNeed =
        kind == OperationKind::read ? Access::remote_read : Access::remote_write;
    return allows(r.remote->access, kNeed) ? Status::ok : Status::remote_access;
  }
}

/// Whether the headroom of the block is free and adjacent to the data.
inline bool has_headroom(const Block* block, const std::byte* data) noexcept {
  return block->header_in_use == 0 &&
         data == reinterpret_cast<const std::byte*>(block) + sizeof(Block);
}

/// Builds a message with its header in the headroom: one element holds both.
inline void build_in_headroom(const Agent& a, Operation& op, std::uint64_t header, Block* block,
                              std::uint32_t size) noexcept {
  op.header_in_headroom = true;
  block->header_in_use = 1;
  std::byte* at = block->header + sizeof block->header - wire::kMessageHeaderBytes;
  wire::put(header, at);
  const std::uint32_t bytes = size + std::uint32_t{wire::kMessageHeaderBytes};
  op.sges[0].addr = reinterpret_cast<std::uint64_t>(at);
  op.sges[0].length = bytes;
  op.sges[0].lkey = block->lkey;
  op.wr.send_flags = bytes <= a.send_queue.inline_bytes ? unsigned{IBV_SEND_INLINE} : 0u;
}

template <OperationKind kind>
inline void build_one_sided(const Agent& a, Operation& op, const Request& r) noexcept {
  op.header_in_headroom = false;
  op.sges[0] = {reinterpret_cast<std::uint64_t>(r.data), static_cast<std::uint32_t>(r.size),
                r.block->lkey};
  if (kind == OperationKind::write_imm && r.size == 0) op.wr.num_sge = 0;
  op.wr.wr.rdma.remote_addr = r.remote->address;
  op.wr.wr.rdma.rkey = r.remote->rkey;
  const bool fits_inline = kind != OperationKind::read && r.size <= a.send_queue.inline_bytes;
  op.wr.send_flags = fits_inline ? unsigned{IBV_SEND_INLINE} : 0u;
}

/// Begins an accepted operation of any kind.
template <OperationKind kind>
inline void begin(Agent& a, Operation& op, Block* block, std::size_t size,
                  const CompletionCallback& done) noexcept {
  count_begin(a, kind);
  detail::retain(block);
  op.block = block;
  op.length = static_cast<std::uint32_t>(size);
  op.kind = kind;
  op.wr.num_sge = 1;
  op.wr.opcode = opcode_of(kind);
  op.calls_back = static_cast<bool>(done);
  if (op.calls_back) op.done = done;
}

/// Begins an operation of the agent's own, without a payload or a callback. `subject`: the lease,
/// the rendezvous message or the kind of message that on_internal_end() is about.
inline void begin_internal(Agent& a, Operation& op, OperationKind kind,
                           std::uint32_t subject = 0) noexcept {
  count_begin(a, kind);
  op.block = nullptr;
  op.length = 0;
  op.subject = subject;
  op.kind = kind;
  op.header_in_headroom = false;
  op.calls_back = false;
  op.wr.opcode = opcode_of(kind);
  op.wr.num_sge = 0;
  op.wr.send_flags = 0;
}

inline Status post(EngineContext& ctx, Agent& a, bool defer) noexcept {
  defer ? queue_flush(ctx, a) : flush(ctx, a);
  return Status::ok;
}

template <OperationKind kind>
constexpr Room room_of() noexcept {
  return uses_credit(kind) ? Room::message : Room::operation;
}

/// Accepts an operation; there must be room. `own`: the agent has its own domain. `sampled`: the
/// operation is timed.
template <OperationKind kind, bool own, bool sampled>
[[gnu::always_inline]] inline Status accept_as(EngineContext& ctx, Agent& a,
                                               const Request& r) noexcept {
  if (uses_credit(kind) && a.credit.sent == a.credit.send_limit && !count_grants(ctx, a))
      [[unlikely]]
    return refuse_for_room(ctx, a, room_of<kind>());
  Operation* const op = ctx.operations.acquire();
  if (op == nullptr) [[unlikely]]
    return refuse_for_room(ctx, a, room_of<kind>());
  begin<kind>(a, *op, r.block, r.size, r.done);
  if constexpr (sampled) begin_sample(ctx, a, *op);
  bool wants_credit = false;
  if constexpr (uses_credit(kind)) {
    if (++a.credit.sent == a.credit.send_limit) wants_credit = !count_header_grants(a);
    a.activity.last_sent = ctx.now;
  }
  if constexpr (has_header(kind)) {
    const std::uint64_t header = data_header(a, op->length, wants_credit);
    if (has_headroom(r.block, r.data)) {
      build_in_headroom(a, *op, header, r.block, op->length);
    } else {
      build_staged(ctx, a, *op, header, r.data, r.block->lkey);
    }
  } else {
    build_one_sided<kind>(a, *op, r);
  }
  if constexpr (kind == OperationKind::send_imm || kind == OperationKind::write_imm)
    op->wr.imm_data = htobe32(r.immediate);
  if constexpr (own) use_own_key(ctx, *a.domain, *op);
  append(a, *op);
  return post(ctx, a, r.defer);
}

/// Accepts an operation that is timed. If it is refused, the next one is.
template <OperationKind kind, bool own>
[[gnu::cold, gnu::noinline]] Status accept_sampled(EngineContext& ctx, Agent& a,
                                                   const Request& r) noexcept {
  ctx.until_sample = 1;
  return accept_as<kind, own, true>(ctx, a, r);
}

/// Accepts an operation, one in observability.sample as a timed one. Those have a function of their
/// own, called last: a call in the middle would make all operations save registers.
template <OperationKind kind, bool own>
[[gnu::always_inline]] inline Status accept(EngineContext& ctx, Agent& a,
                                            const Request& r) noexcept {
  if (is_plain(kind) && ctx.is_sample_due()) [[unlikely]]
    return accept_sampled<kind, own>(ctx, a, r);
  return accept_as<kind, own, false>(ctx, a, r);
}

/// Handles a SendQueue::limit of 0: a raw agent, or one with its own domain, keeps its limit
/// elsewhere.
template <OperationKind kind>
[[gnu::noinline]] Status submit_with_limit_elsewhere(EngineContext& ctx, Agent& a,
                                                     const Request& r) noexcept {
  if (a.raw != nullptr && uses_credit(kind)) return submit_on_raw(ctx, a, r, kind);
  if (a.send_queue.used >= send_limit_of(a)) return refuse_for_room(ctx, a, room_of<kind>());
  if (a.domain == nullptr) return accept<kind, false>(ctx, a, r);
  if (!reaches(ctx, *a.domain, *r.block)) return Status::invalid_argument;
  return accept<kind, true>(ctx, a, r);
}

/// Whether the region has no key for the device: it names a lease, or has a deadline.
constexpr bool needs_key(const RemoteRegion& region) noexcept {
  return region.rkey == 0 && (region.lease | region.timed_rkey) != 0;
}
/// Checks that an operation may start on such a region, and fills in the region with its key.
inline Status resolve_key(EngineContext& ctx, const Agent& a, const RemoteRegion& region,
                          RemoteRegion& real) noexcept {
  if (region.lease != 0) return resolve_leased(ctx, a, region, real);
  if (ctx.clock.now() >= region.deadline) return Status::lease_expired;
  real = {region.address, region.length, region.timed_rkey, region.access};
  return Status::ok;
}
template <OperationKind kind>
constexpr bool request_needs_key(const Request& r) noexcept {
  return !has_header(kind) && r.block != nullptr && needs_key(*r.remote);
}
template <OperationKind kind>
Status submit_any(EngineContext& ctx, Agent& a, const Request& r) noexcept;

/// Accepts an operation on a region that needs a key.
template <OperationKind kind>
[[gnu::noinline]] Status submit_with_key(EngineContext& ctx, Agent& a, const Request& r) noexcept {
  RemoteRegion real;
  if (const Status status = resolve_key(ctx, a, *r.remote, real); status != Status::ok)
    return status;
  return submit_any<kind>(ctx, a, {r.block, r.data, r.size, &real, r.immediate, r.done, r.defer});
}

/// Accepts an operation that submit_any() does not accept at once, or returns the reason.
template <OperationKind kind>
[[gnu::noinline]] Status submit_or_explain(EngineContext& ctx, Agent& a,
                                           const Request& r) noexcept {
  if (a.state != ConnectionState::ready) return Status::not_connected;
  if (r.block != nullptr && !ctx.owns(*r.block)) return Status::invalid_argument;
  if constexpr (kind == OperationKind::send || kind == OperationKind::send_imm) {
    if (r.block != nullptr && r.size > a.send_queue.max_eager)
      return submit_rendezvous(ctx, a, r, kind == OperationKind::send_imm);
  }
  if (const Status status = check_request<kind>(a, r, ctx.max_transfer); status != Status::ok)
    return request_needs_key<kind>(r) ? submit_with_key<kind>(ctx, a, r) : status;
  if (a.send_queue.used >= a.send_queue.limit) return submit_with_limit_elsewhere<kind>(ctx, a, r);
  return accept<kind, false>(ctx, a, r);
}

/// Accepts one of the application's operations. Otherwise returns the reason and takes nothing.
template <OperationKind kind>
[[gnu::noinline]] Status submit_any(EngineContext& ctx, Agent& a, const Request& r) noexcept {
  // The limit is 0 unless the connection is ready, so this also checks the state.
  if (a.send_queue.used >= a.send_queue.limit || r.block == nullptr ||
      r.block->owner != ctx.arena.get() || check_request<kind>(a, r) != Status::ok) [[unlikely]]
    return submit_or_explain<kind>(ctx, a, r);
  return accept<kind, false>(ctx, a, r);
}
/// An atomic on the bytes at `remote`: replaces them by `operand` if they equal `expected`, or adds
/// `operand` to them.
struct AtomicRequest {
  const RemoteRegion& remote;
  std::uint64_t expected;
  std::uint64_t operand;
  const CompletionCallback& done;
  bool defer;
};
/// Accepts an atomic. The old value goes into the operation's staging room.
template <OperationKind kind>
Status submit_atomic(EngineContext& ctx, Agent& a, const AtomicRequest& r) noexcept;

/// Counts a message that was sent without a work request or a record. Answers whether it was.
[[gnu::always_inline]] inline bool note_direct(EngineContext& ctx, Agent& a, verbs::Sent sent,
                                               std::uint32_t size, bool defer_it) noexcept {
  if (sent == verbs::Sent::refused) [[unlikely]]
    return false;
  a.credit.advertised = a.credit.granted;
  ++a.credit.sent;
  a.activity.last_sent = ctx.now;
  ++a.activity.direct_messages;
  a.activity.direct_bytes += size;
  ctx.direct_unpublished = true;
  if (!defer_it) {
    publish_direct(ctx);
  } else if (sent == verbs::Sent::held) {
    queue_flush(ctx, a);
  }
  return true;
}
/// Sends a message for which there is credit without a work request. `is_last`: see has_credit().
[[gnu::always_inline]] inline bool send_with_credit(EngineContext& ctx, Agent& a,
                                                    const std::byte* data, std::uint32_t size,
                                                    bool is_last, bool defer_it) noexcept {
  const verbs::Sent sent =
      ctx.direct->send(a.qp, build_header(a, size, is_last), data, size, verbs::kNoCompletion);
  return note_direct(ctx, a, sent, size, defer_it);
}
/// As send_with_credit(), after a look for credit.
bool find_credit_and_send(EngineContext& ctx, Agent& a, const std::byte* data, std::uint32_t size,
                          bool defer_it) noexcept;

/// Sends a message without a work request. False, and nothing sent: it needs one. There is no
/// record, so it has ended when the call returns.
[[gnu::always_inline]] inline bool send_direct(EngineContext& ctx, Agent& a, const std::byte* data,
                                               std::uint32_t size, bool defer_it) noexcept {
  if (a.send_queue.deferred != nullptr) [[unlikely]]
    return false;
  if (send_credits(a) <= 1) [[unlikely]]
    return find_credit_and_send(ctx, a, data, size, defer_it);
  return send_with_credit(ctx, a, data, size, false, defer_it);
}

/// Does what send_direct() does, with a record for the callback or the id of the operation. Holds
/// the block until the operation ends.
bool send_direct_recorded(EngineContext& ctx, Agent& a, Block* block, const std::byte* data,
                          std::uint32_t size, const CompletionCallback& done) noexcept;

/// As the two functions above, for a message of several parts.
bool send_direct_gathered(EngineContext& ctx, Agent& a, std::span<const ibv_sge> parts,
                          std::uint32_t size, bool defer_it) noexcept;
bool send_direct_gathered_recorded(EngineContext& ctx, Agent& a, std::span<const ibv_sge> parts,
                                   std::uint32_t size, const CompletionCallback& done) noexcept;

/// As send_direct_recorded(), for a message above the eager limit.
bool send_long_direct(EngineContext& ctx, Agent& a, Block* block, const std::byte* data,
                      std::size_t size, const CompletionCallback& done, bool tracked,
                      bool defer) noexcept;

/// Whether the message was sent without a work request. A deferred operation with a callback or an
/// id needs one, since it can be cancelled until it is posted.
[[gnu::always_inline]] inline bool sent_directly(EngineContext& ctx, Agent& a, Block* block,
                                                 const std::byte* data, std::size_t size,
                                                 const CompletionCallback& done, bool tracked,
                                                 bool defer) noexcept {
  if (size >= a.send_queue.direct_limit) [[unlikely]]
    return size > a.send_queue.max_eager &&
           send_long_direct(ctx, a, block, data, size, done, tracked, defer);
  const auto length = static_cast<std::uint32_t>(size);
  if (!tracked && !done) [[likely]]
    return send_direct(ctx, a, data, length, defer);
  return !defer && send_direct_recorded(ctx, a, block, data, length, done);
}

/// Accepts a message that needs a work request. `data_is_payload`: the data is the block's payload,
/// so a block of the pools has its headroom right before it.
template <bool data_is_payload>
[[gnu::noinline]] Status submit_by_request(EngineContext& ctx, Agent& a, Block* block,
                                           std::byte* data, std::size_t size,
                                           const CompletionCallback& done, bool defer) noexcept {
  // The limit is 0 unless the connection is ready, so this also checks the state.
  if (block == nullptr || a.send_queue.used >= a.send_queue.limit ||
      size > a.send_queue.max_eager || send_credits(a) <= 1 || ctx.operations.empty() ||
      block->owner != ctx.arena.get() ||
      !(data_is_payload ? block->header_in_use == 0 : has_headroom(block, data))) [[unlikely]] {
    return submit_any<OperationKind::send>(ctx, a, {block, data, size, nullptr, 0, done, defer});
  }
  if (ctx.is_sample_due()) [[unlikely]]
    return accept_sampled<OperationKind::send, false>(ctx, a,
                                                      {block, data, size, nullptr, 0, done, defer});
  Operation& op = *ctx.operations.acquire();
  begin<OperationKind::send>(a, op, block, size, done);
  ++a.credit.sent;
  a.activity.last_sent = ctx.now;
  const auto length = static_cast<std::uint32_t>(size);
  build_in_headroom(a, op, data_header(a, length, false), block, length);
  append(a, op);
  return post(ctx, a, defer);
}

/// Accepts a message. Sending it directly is inline.
template <bool data_is_payload>
[[gnu::always_inline]] inline Status submit_message(EngineContext& ctx, Agent& a, Block* block,
                                                    std::byte* data, std::size_t size,
                                                    const CompletionCallback& done, bool tracked,
                                                    bool defer) noexcept {
  if (block != nullptr && block->owner == ctx.arena.get() &&
      sent_directly(ctx, a, block, data, size, done, tracked, defer))
    return Status::ok;
  return submit_by_request<data_is_payload>(ctx, a, block, data, size, done, defer);
}

/// Accepts a message whose bytes are copied: into a block of the send pool, if it needs a work
/// request.
inline Status submit_copy(EngineContext& ctx, Agent& a, std::span<const std::byte> bytes,
                          const CompletionCallback& done, bool tracked, bool defer) noexcept {
  if (sent_directly(ctx, a, ctx.staging_block, bytes.data(), bytes.size(), done, tracked, defer))
    return Status::ok;
  if (a.state != ConnectionState::ready) return Status::not_connected;
  if (bytes.size() > a.max_message) return Status::message_too_long;
  Block* const block =
      ctx.arena->allocate(memory::PoolId::send, std::max<std::size_t>(bytes.size(), 1));
  if (block == nullptr) return refuse_for_block(ctx, a, bytes.size());
  std::copy(bytes.begin(), bytes.end(), block->payload);
  const Status status =
      submit_message<true>(ctx, a, block, block->payload, bytes.size(), done, tracked, defer);
  detail::release(block);
  return status;
}

}  // namespace spinwire::agent
