// Receives messages: completions of receives. Hot.
#include <endian.h>

#include <cstring>
#include <string>

#include "agent/agent.h"
#include "agent/completion.h"
#include "base/error.h"
#include "base/internals.h"

namespace spinwire::agent {
namespace {

inline bool is_success(const ibv_wc& wc) noexcept { return wc.status == IBV_WC_SUCCESS; }

inline bool rendezvous_ahead(const Agent& a) noexcept {
  return (a.slow_path & kRendezvousAhead) != 0;
}

/// Gives the peer more receives, or fewer, if receives are short or it asks for more. A held
/// message gives none up, because it keeps its own.
[[gnu::noinline]] void change_reservation(EngineContext& ctx, Agent& a, bool wants_more,
                                          bool held) noexcept {
  if (!held && a.credit.reserved > ctx.yield_above) yield_credit(ctx, a);
  if (!wants_more) return;
  if (ctx.direct != nullptr) ctx.direct->prefetch_word(a.qp);  // credit is due after this poll
  reserve_more_receives(ctx, a, (a.credit.reserved + a.rendezvous.credited) * 2 + 14);
  a.credit.peer_needs_credit = true;
}

/// Counts the credit that a message used. process_receives_of() grants it again, once for all
/// messages of a batch. A held message keeps its receive.
inline void use_credit(EngineContext& ctx, Agent& a, bool wants_more, bool held) noexcept {
  ++a.credit.received;
  // A peer all of whose messages are held would otherwise never get more.
  if (held && !wants_more) [[unlikely]]
    return;
  if (a.credit.reserved > ctx.yield_above || wants_more) [[unlikely]]
    change_reservation(ctx, a, wants_more, held);
}

void malformed(EngineContext& ctx, Agent& a, std::uint32_t bytes) noexcept {
  fail_protocol(ctx, a,
                {Status::protocol, base::format("receive a message of {} bytes", bytes),
                 "no valid header in front of it", base::kProtocolRemedy});
}

/// Whether a message is a control message that uses credit.
constexpr bool is_control_kind(wire::MessageKind kind) noexcept {
  return wire::body_bytes(kind) != 0;
}

/// Whether a message is about credit, and costs none.
constexpr bool is_credit_kind(wire::MessageKind kind) noexcept {
  return kind == wire::MessageKind::credit_ask || kind == wire::MessageKind::credit;
}
bool on_credit_kind(EngineContext& ctx, Agent& a, wire::MessageKind kind) noexcept {
  return kind == wire::MessageKind::credit ? on_credit_message(ctx, a) : on_credit_ask(ctx, a);
}

void on_control_message(EngineContext& ctx, Agent& a, const Block* block,
                        const wire::MessageHeader& header, const ibv_wc& wc) noexcept {
  if (peer_credits(a) == 0) return malformed(ctx, a, wc.byte_len);
  use_credit(ctx, a, (header.flags & wire::message_flag::kWantCredit) != 0,
             wire::is_offer(header.kind) || rendezvous_ahead(a));
  const std::span<const std::byte> body(block->payload, header.length);
  if (wire::is_offer(header.kind)) return on_rendezvous_offer(ctx, a, wc, header.kind, body);
  if (header.kind == wire::MessageKind::rendezvous_answer)
    return on_rendezvous_answer(ctx, a, wc, body);
  const bool invalidates = (wc.wc_flags & IBV_WC_WITH_INV) != 0;
  on_lease_message(ctx, a, header.kind, body, invalidates ? wc.invalidated_rkey : 0);
}

/// Handles the peer's goodbye, which takes effect when all messages before it are delivered.
void on_goodbye_message(EngineContext& ctx, Agent& a, std::uint32_t number) noexcept {
  if (!note_goodbye(a, number)) return malformed(ctx, a, wire::kMessageHeaderBytes);
  if (!rendezvous_ahead(a)) return on_goodbye(ctx, a);
  if (a.goodbye_received) return malformed(ctx, a, wire::kMessageHeaderBytes);
  a.goodbye_received = a.closing = true;
  RendezvousReceive goodbye;
  goodbye.kind = RendezvousReceive::Kind::goodbye;
  goodbye.complete = true;
  queue_receive(ctx, a, goodbye);
}

/// Holds a message, or (without a block) the notice of a WRITE, behind a rendezvous message.
/// Returns whether the arrival is held.
bool hold_message(EngineContext& ctx, Agent& a, Block* block, std::uint32_t length,
                  const ibv_wc& wc) noexcept {
  RendezvousReceive held;
  held.kind = block != nullptr ? RendezvousReceive::Kind::message : RendezvousReceive::Kind::write;
  held.block = block;
  held.data = block != nullptr ? block->payload : nullptr;
  held.length = length;
  held.has_immediate = (wc.wc_flags & IBV_WC_WITH_IMM) != 0;
  held.immediate = be32toh(wc.imm_data);
  held.complete = true;
  return queue_receive(ctx, a, held) != nullptr;
}

/// Handles a message, whose header is in the block. Returns whether the block was kept.
bool on_message_received(EngineContext& ctx, Agent& a, Block* block, const ibv_wc& wc) noexcept {
  wire::MessageHeader header{};
  const std::byte* at = block->payload - wire::kMessageHeaderBytes;
  if (!wire::decode(at, wc.byte_len, header)) [[unlikely]] {
    malformed(ctx, a, wc.byte_len);
    return false;
  }
  a.credit.header_granted = header.granted;
  if (header.kind != wire::MessageKind::data) [[unlikely]] {
    if (is_control_kind(header.kind)) {
      on_control_message(ctx, a, block, header, wc);
    } else if (header.kind == wire::MessageKind::goodbye) {
      on_goodbye_message(ctx, a, header.length);
    } else if (is_credit_kind(header.kind)) {
      if (!on_credit_kind(ctx, a, header.kind)) malformed(ctx, a, wc.byte_len);
    } else if (static_cast<std::int64_t>(header.length) >= advertised_credits(a)) {
      // The return uses a credit itself, and a correct peer returns only advertised credit.
      malformed(ctx, a, wc.byte_len);
    } else {
      on_credit_return(ctx, a, header.length);
    }
    return false;
  }
  if (peer_credits(a) == 0) [[unlikely]] {
    malformed(ctx, a, wc.byte_len);  // the peer sent without credit
    return false;
  }
  use_credit(ctx, a, (header.flags & wire::message_flag::kWantCredit) != 0, rendezvous_ahead(a));
  if (rendezvous_ahead(a)) [[unlikely]]
    return hold_message(ctx, a, block, header.length, wc);
  Message message =
      detail::make<Message>(block, block->payload, header.length, be32toh(wc.imm_data),
                            (wc.wc_flags & IBV_WC_WITH_IMM) != 0, false);
  deliver(ctx, a, message);
  return detail::block_of(message) == nullptr;
}

/// Handles a peer's WRITE with immediate: the receive carries no bytes.
void on_write_notice(EngineContext& ctx, Agent& a, const ibv_wc& wc) noexcept {
  if (peer_credits(a) == 0) [[unlikely]]
    return malformed(ctx, a, wc.byte_len);
  // A WRITE has no header to request credit with, so the last credit requests more.
  use_credit(ctx, a, peer_credits(a) == 1, rendezvous_ahead(a));
  if (rendezvous_ahead(a)) [[unlikely]]
    return (void)hold_message(ctx, a, nullptr, wc.byte_len, wc);
  Message message =
      detail::make<Message>(nullptr, nullptr, wc.byte_len, be32toh(wc.imm_data), true, true);
  deliver(ctx, a, message);
}

}  // namespace

void deliver(EngineContext& ctx, Agent& a, Message& message) noexcept {
  ++a.activity.messages_received;
  a.activity.bytes_received += message.size();
  use_next_handlers(a);
  if (a.on_message) a.on_message(handle(ctx, a), message);
}

namespace {

/// Drops a message that arrives while the connection drains, except the peer's goodbye and its
/// answers to rendezvous offers, for which the peer needs credit.
void on_message_while_draining(EngineContext& ctx, Agent& a, const Block* block,
                               const ibv_wc& wc) noexcept {
  wire::MessageHeader header{};
  if (!wire::decode(block->payload - wire::kMessageHeaderBytes, wc.byte_len, header)) return;
  if (header.kind == wire::MessageKind::goodbye)
    return note_goodbye(a, header.length) ? on_goodbye(ctx, a) : void();
  if (is_credit_kind(header.kind)) {
    a.credit.header_granted = header.granted;
    return (void)on_credit_kind(ctx, a, header.kind);
  }
  if (peer_credits(a) == 0) return;
  ++a.credit.received;
  if (!a.rendezvous.sends.empty()) grant_credit(ctx, a);
  if (a.stage == Stage::up && wire::is_offer(header.kind))
    return on_rendezvous_offer(ctx, a, wc, header.kind, {block->payload, header.length});
  if (a.rendezvous.sends.empty()) return;
  if (header.kind == wire::MessageKind::rendezvous_answer)
    on_rendezvous_answer(ctx, a, wc, {block->payload, header.length});
}

/// Handles a receive that is not a message on a ready connection. Returns whether the block was
/// kept.
bool on_other_receive(EngineContext& ctx, Agent& a, Block* block, const ibv_wc& wc) noexcept {
  if (a.stage == Stage::await_flush) queue_setup(ctx, a);  // this receive may be the last to drain
  if (wc.status != IBV_WC_SUCCESS) {
    on_receive_failed(ctx, a, wc);
    return false;
  }
  a.activity.last_heard = ctx.now;
  // A first message may overtake the last frame of the handshake, or this end's last step.
  if (a.state == ConnectionState::exchanging) on_early_message(ctx, a);
  if (!takes_messages(a)) {
    if (a.state == ConnectionState::draining && wc.opcode == IBV_WC_RECV)
      on_message_while_draining(ctx, a, block, wc);
    return false;
  }
  if (wc.opcode != IBV_WC_RECV_RDMA_WITH_IMM) return on_message_received(ctx, a, block, wc);
  on_write_notice(ctx, a, wc);
  return false;
}

/// Handles a receive that is not a plain message. Returns whether the block was kept.
[[gnu::noinline]] bool on_unusual_receive(EngineContext& ctx, Agent& a, Block* block,
                                          const ibv_wc& wc) noexcept {
  const bool message =
      a.state == ConnectionState::ready && is_success(wc) && wc.opcode == IBV_WC_RECV;
  return message ? on_message_received(ctx, a, block, wc) : on_other_receive(ctx, a, block, wc);
}

/// Handles a receive of a queue pair that is gone. A slot of the connection's own queue returned to
/// that queue earlier, and may be posted to another queue pair by now.
[[gnu::cold, gnu::noinline]] void on_stale_receive(EngineContext& ctx, const ibv_wc& wc) noexcept {
  ++ctx.stats.stale_completions;
  if (is_raw_receive(wc.wr_id) || is_own_slot(ctx, slot_of(wc.wr_id))) return;
  --ctx.posted_receives;
  recycle_slot<false>(ctx, slot_of(wc.wr_id));
}

/// Devices may also set other flags, such as IBV_WC_GRH on RoCE.
constexpr unsigned kUnusualFlags = IBV_WC_WITH_IMM | IBV_WC_WITH_INV;

/// Whether the message with `header` goes straight to the handler, after its credit is counted.
inline bool is_deliverable(const Agent& a, const ibv_wc& wc, std::uint64_t header) noexcept {
  return is_success(wc) && wc.opcode == IBV_WC_RECV && (wc.wc_flags & kUnusualFlags) == 0 &&
         wire::is_plain(header, wc.byte_len) && a.slow_path == 0 && peer_credits(a) != 0;
}
/// Whether the message with `header` only needs to be delivered.
inline bool is_plain(const EngineContext& ctx, const Agent& a, const ibv_wc& wc,
                     std::uint64_t header) noexcept {
  return is_deliverable(a, wc, header) && a.credit.reserved <= ctx.yield_above;
}

/// Handles a receive. Returns whether the block was kept.
inline bool on_receive(EngineContext& ctx, Agent& a, Block* block, const ibv_wc& wc) noexcept {
  const std::uint64_t header =
      wire::get(block->header + sizeof block->header - wire::kMessageHeaderBytes);
  if (!is_plain(ctx, a, wc, header)) [[unlikely]]
    return on_unusual_receive(ctx, a, block, wc);
  const std::uint32_t size = wc.byte_len - std::uint32_t{wire::kMessageHeaderBytes};
  a.credit.header_granted = wire::granted_of(header);
  ++a.credit.received;
  ++a.activity.messages_received;
  a.activity.bytes_received += size;
  Message message =
      detail::make<Message>(block, reinterpret_cast<std::byte*>(block + 1), size, 0, false, false);
  if (a.on_message) a.on_message(handle(ctx, a), message);
  return detail::block_of(message) == nullptr;
}

/// A message in the device's memory that is not plain: handled as if it had come by a receive.
[[gnu::noinline]] void on_unusual_in_place(EngineContext& ctx, Agent& a, const std::byte* at,
                                           const ibv_wc& wc) noexcept {
  Block* const block = block_for_kept(ctx);
  if (block == nullptr) return malformed(ctx, a, wc.byte_len);
  std::memcpy(block->payload - wire::kMessageHeaderBytes, at, wc.byte_len);
  if (!on_unusual_receive(ctx, a, block, wc)) detail::release(block);
}

/// Delivers a message whose credit is counted. Its length is what the device found.
[[gnu::always_inline]] inline void deliver_in_place(EngineContext& ctx, Agent& a,
                                                    const std::byte* at,
                                                    const ibv_wc& wc) noexcept {
  const std::uint32_t size = wc.byte_len - std::uint32_t{wire::kMessageHeaderBytes};
  ++a.activity.messages_received;
  a.activity.bytes_received += size;
  Message message = detail::make<Message>(&ctx, at + wire::kMessageHeaderBytes, size);
  if (a.on_message) a.on_message(handle(ctx, a), message);
}

/// Lets an application that got an on_offer handler since the connection was made place a message
/// that lies in the device's memory already. Its sender does not learn that it was refused.
void offer_in_place(EngineContext& ctx, Agent& a, const std::byte* data,
                    const ibv_wc& wc) noexcept {
  const std::uint32_t size = wc.byte_len - std::uint32_t{wire::kMessageHeaderBytes};
  Offer offer = detail::make<Offer>(&ctx, &a, size, std::nullopt);
  a.handlers.on_offer(handle(ctx, a), offer);
  if (!takes_messages(a) || detail::Internals::is_refused(offer)) return;
  const BufferSlice& to = detail::Internals::destination(offer);
  use_next_handlers(a);
  if (!to) return deliver_in_place(ctx, a, data - wire::kMessageHeaderBytes, wc);
  std::memcpy(to.data(), data, size);
  Message message = detail::make<Message>(nullptr, to.data(), size, 0, false, false);
  deliver(ctx, a, message);
}

/// A message above the eager limit in the device's memory. An honest peer sends none behind a
/// rendezvous message, so it never has to be held.
[[gnu::noinline]] void on_long_in_place(EngineContext& ctx, Agent& a, const std::byte* at,
                                        std::uint64_t header, const ibv_wc& wc) noexcept {
  const bool plain = is_success(wc) && wc.opcode == IBV_WC_RECV &&
                     (wc.wc_flags & kUnusualFlags) == 0 &&
                     wire::is_plain(wire::without_flags(header), wc.byte_len);
  if (!plain || wc.byte_len > a.rendezvous.longest_in_place) return malformed(ctx, a, wc.byte_len);
  if (a.stage == Stage::await_flush) queue_setup(ctx, a);
  if (a.state == ConnectionState::exchanging) on_early_message(ctx, a);
  const bool draining = a.state == ConnectionState::draining && !takes_messages(a);
  if (!takes_messages(a) && !draining) return;
  // The peer need not know yet that we close, and that rendezvous messages are dropped.
  if (draining && peer_credits(a) == 0) return;
  if (!draining && (peer_credits(a) == 0 || rendezvous_ahead(a)))
    return malformed(ctx, a, wc.byte_len);
  a.credit.header_granted = wire::granted_of(header);
  if (draining) {
    ++a.credit.received;
    if (!a.rendezvous.sends.empty()) grant_credit(ctx, a);
    return;
  }
  use_credit(ctx, a, wire::wants_credit(header), false);
  use_next_handlers(a);
  if (a.handlers.on_offer) return offer_in_place(ctx, a, at + wire::kMessageHeaderBytes, wc);
  deliver_in_place(ctx, a, at, wc);
}

/// A message in the device's memory that is not plain. While receives are short, which many
/// connections make them for good, most messages differ in their credit only.
[[gnu::noinline]] void on_other_in_place(EngineContext& ctx, Agent& a, const std::byte* at,
                                         std::uint64_t header, const ibv_wc& wc) noexcept {
  if (wc.byte_len > ctx.config.connections.eager_bytes + wire::kMessageHeaderBytes)
    return on_long_in_place(ctx, a, at, header, wc);
  if (!is_deliverable(a, wc, wire::without_flags(header)))
    return on_unusual_in_place(ctx, a, at, wc);
  a.credit.header_granted = wire::granted_of(header);
  use_credit(ctx, a, wire::wants_credit(header), false);
  deliver_in_place(ctx, a, at, wc);
}

/// How many plain messages of the peer need no look at credit: no callback takes credit from it.
inline std::uint32_t plain_messages(const EngineContext& ctx, const Agent& a) noexcept {
  return a.credit.reserved <= ctx.yield_above ? peer_credits(a) : 0;
}

/// Handles a message in the device's memory. The device reports only plain SENDs so, and the
/// completion is private; but the peer can write where the message lies, so its header is read
/// once. `plain`: see plain_messages().
[[gnu::always_inline]] inline void on_receive_in_place(EngineContext& ctx, Agent& a,
                                                       const ibv_wc& wc,
                                                       std::uint32_t& plain) noexcept {
  const std::byte* const at = verbs::in_place_bytes(wc.wr_id);
  const std::uint64_t header = wire::get(at);
  const std::uint32_t size = wc.byte_len - std::uint32_t{wire::kMessageHeaderBytes};
  if (size > ctx.config.connections.eager_bytes || !wire::is_data(header, size) ||
      a.slow_path != 0 || plain == 0) [[unlikely]] {
    on_other_in_place(ctx, a, at, header, wc);
    plain = plain_messages(ctx, a);
    return;
  }
  --plain;
  a.credit.header_granted = wire::granted_of(header);
  ++a.credit.received;
  deliver_in_place(ctx, a, at, wc);
}

/// Handles consecutive messages of one queue pair in the device's memory. Returns the first
/// completion after them.
inline const ibv_wc* process_in_place(EngineContext& ctx, Agent& a, const ibv_wc* wc,
                                      const ibv_wc* end) noexcept {
  ctx.in_place_seen = true;
  const std::uint32_t qp_num = wc->qp_num;
  std::uint32_t plain = plain_messages(ctx, a);
  do {
    on_receive_in_place(ctx, a, *wc, plain);
  } while (++wc != end && wc->qp_num == qp_num && verbs::is_in_place(wc->wr_id));
  return wc;
}

/// What the receives of a batch have in common: the peer was heard, and is granted credit.
[[gnu::always_inline]] inline void end_receives_of(EngineContext& ctx, Agent& a) noexcept {
  a.activity.last_heard = ctx.now;
  if (takes_messages(a)) grant_credit(ctx, a);
}

/// Handles consecutive receives of one queue pair: looks the agent up and grants credit once.
/// Returns the first completion after them.
template <bool own>
inline const ibv_wc* process_receives_of(EngineContext& ctx, Agent& a, const ibv_wc* wc,
                                         const ibv_wc* end) noexcept {
  const std::uint32_t qp_num = wc->qp_num;
  do {
    if (verbs::is_in_place(wc->wr_id)) {
      wc = process_in_place(ctx, a, wc, end);
      continue;
    }
    const std::uint32_t slot = slot_of(wc->wr_id);
    Block* const block = ctx.receives.memory(slot);
    --ctx.posted_receives;
    if (on_receive(ctx, a, block, *wc)) [[unlikely]] {
      refill_slot<own>(ctx, slot);
    } else {
      recycle_slot<own>(ctx, slot);
    }
    ++wc;
  } while (wc != end && wc->qp_num == qp_num && is_receive(wc->wr_id));
  end_receives_of(ctx, a);
  return wc;
}

/// Handles receives of a queue pair that does not share the receive queue, or is gone: null.
[[gnu::noinline]] const ibv_wc* process_other_receives(EngineContext& ctx, Agent* a,
                                                       const ibv_wc* wc,
                                                       const ibv_wc* end) noexcept {
  if (a == nullptr) return on_stale_receive(ctx, *wc), wc + 1;
  return a->receives == ReceiveSource::raw ? process_raw_receives(ctx, *a, wc, end)
                                           : process_receives_of<true>(ctx, *a, wc, end);
}

/// The agent of a receive. The device gives back the record of the queue pair that reads in place,
/// which is there as long as polls report such messages.
inline Agent* receiver_of(const EngineContext& ctx, const ibv_wc& wc) noexcept {
  return verbs::is_in_place(wc.wr_id) ? &agent_of_hot_part(verbs::record_of(wc))
                                      : ctx.by_qpn.find(wc.qp_num);
}

const ibv_wc* process_receives(EngineContext& ctx, const ibv_wc* wc, const ibv_wc* end) noexcept {
  Agent* const a = receiver_of(ctx, *wc);
  if (a == nullptr || a->receives != ReceiveSource::shared) [[unlikely]]
    return process_other_receives(ctx, a, wc, end);
  return process_receives_of<false>(ctx, *a, wc, end);
}

}  // namespace

namespace {

inline void prefetch_blocks(EngineContext& ctx, const ibv_wc* wc, const ibv_wc* end) noexcept {
  for (; wc < end; ++wc) {
    if (is_receive(wc->wr_id) && !verbs::is_in_place(wc->wr_id))
      __builtin_prefetch(ctx.receives.memory(slot_of(wc->wr_id)));
  }
}

/// Prefetches the agent of the completion after the next: with many connections it is a miss. The
/// device does so for a message that is read in place.
[[gnu::noinline]] void prefetch_agent_behind(const EngineContext& ctx, const ibv_wc* wc,
                                             const ibv_wc* end) noexcept {
  constexpr std::ptrdiff_t kAhead = 2;
  if (end - wc <= kAhead || verbs::is_in_place(wc[kAhead].wr_id)) return;
  if (const Agent* const a = ctx.by_qpn.find(wc[kAhead].qp_num); a != nullptr) prefetch(*a);
}

}  // namespace

std::uint32_t process_part(EngineContext& ctx, const ibv_wc* wcs, int count) noexcept {
  const ibv_wc* const end = wcs + count;
  // A message that is read in place is in the cache: the device has looked at it.
  if (!verbs::is_in_place(wcs->wr_id)) prefetch_blocks(ctx, wcs + 1, end);
  std::uint32_t events = 0;
  for (const ibv_wc* wc = wcs;; prefetch_agent_behind(ctx, wc, end)) {
    if (is_receive(wc->wr_id)) {
      const ibv_wc* const behind = process_receives(ctx, wc, end);
      events += static_cast<std::uint32_t>(behind - wc);
      wc = behind;
    } else {
      events += on_send_completion(ctx, *wc++);
    }
    if (wc == end) break;
  }
  return events;
}

namespace {

/// Handles completions of any number and kind.
[[gnu::noinline]] std::uint32_t process_batch(EngineContext& ctx, const ibv_wc* wcs,
                                              int count) noexcept {
  const std::uint32_t events = process_part(ctx, wcs, count);
  release_what_was_read(ctx);
  return events;
}

/// Handles the usual batch of a connection with one message in flight. The device prefetches the
/// agent.
[[gnu::noinline]] std::uint32_t process_lone_message(EngineContext& ctx,
                                                     const ibv_wc& wc) noexcept {
  Agent& a = *receiver_of(ctx, wc);
  if (a.receives != ReceiveSource::shared) [[unlikely]]
    return process_batch(ctx, &wc, 1);
  ctx.in_place_seen = true;
  std::uint32_t plain = plain_messages(ctx, a);
  on_receive_in_place(ctx, a, wc, plain);
  end_receives_of(ctx, a);
  release_in_place(ctx);
  return 1;
}

}  // namespace

std::uint32_t process_completions(EngineContext& ctx, const ibv_wc* wcs, int count) noexcept {
  return count == 1 && verbs::is_in_place(wcs->wr_id) ? process_lone_message(ctx, *wcs)
                                                      : process_batch(ctx, wcs, count);
}

}  // namespace spinwire::agent
