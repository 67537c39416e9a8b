// Rendezvous: messages above the eager limit. The sender opens the message to the peer and offers
// it; the receiver fetches the message with READs and answers. Later arrivals wait until the
// message is delivered, which keeps the order.
//
// The sender binds a window right before the offer, so the key costs no system call and no wait.
// The application's own memory, and connections with their own domain, need a registration, made in
// send(). The receiver's answer is a SEND that invalidates the window.
//
// Between ends of the embedded device, no key is opened for a message in the slab: the offer names
// the slab's local key (wire::LocalOffer), and the READ says that the peer has named it
// (verbs::kNamedByPeer). Offer and answer are direct messages, if nothing waits in front of them.
// The device delivers nothing that it has copied from a queue pair which failed meanwhile, because
// that end uses the memory again.
//
// A receiver without a block waits in `buffer_waiters`. Only the first waiter is served, so that
// short messages cannot take the blocks that a long message needs. The receiver refuses a message
// after connections.rendezvous_timeout.
//
// Where the device has direct messages (verbs/direct_messages.h), a message above the eager limit
// goes as one of them, if the peer reads messages of that length in place and no rendezvous message
// is ahead. A peer with an on_offer handler reads none, because a direct message has ended when
// send() returns, and could not be refused any more.
//
// Each message that waits behind a rendezvous message keeps its credit, so a peer cannot have more
// messages waiting than it was granted. Other connections are not blocked. Agent::slow_path is the
// one field that the hot path checks for this.
//
// Offers and control messages cost a credit each, which submit_rendezvous() and
// post_control_messages() count; uses_credit() is about other operations. The unbinding of a window
// waits among the control messages and costs none. A connection that closes waits for the answers
// to its offers. A connection that fails discards its windows before its queue pair, and the pool
// makes new ones in control steps.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include "agent/operation_pool.h"
#include "agent/source_ledger.h"
#include "base/index_pool.h"
#include "base/intrusive_list.h"
#include "memory/arena.h"
#include "memory/remote_key.h"
#include "spinwire/buffer.h"
#include "spinwire/connection.h"
#include "wire/rendezvous_messages.h"

namespace spinwire::agent {

struct Agent;
struct EngineContext;
struct Request;

/// Bytes of one READ. Connections take turns READ by READ.
inline constexpr std::uint32_t kRendezvousReadBytes = 128u << 10;
/// Outstanding READs of the engine. The limit bounds the time of a poll, because the embedded
/// device copies in post_send: twice as many run there in a poll, since those that ended at once
/// are followed by others.
inline constexpr std::uint32_t kRendezvousReads = 4;
/// Outstanding READs of one source, and of one connection.
inline constexpr std::uint32_t kRendezvousReadsPerSource = kRendezvousReads / 2;
inline constexpr std::uint32_t kRendezvousReadsPerAgent = 2;
/// A READ that takes longer counts for its source only, so that slow adapters of some peers do not
/// stop the messages of others. Four READs take 4 ms on a link of 1 Gbit/s.
inline constexpr Nanoseconds kOverdueRead = std::chrono::milliseconds(5);

/// A message for the peer to fetch.
struct RendezvousSend : Cancellation {
  static constexpr std::uint64_t kNoRequest = ~std::uint64_t{0};
  detail::Block* block = nullptr;  ///< holds a reference
  std::uint32_t length = 0;        ///< bytes
  memory::RemoteKey key;
  wire::RendezvousVerdict verdict = wire::RendezvousVerdict::received;
  bool answered = false;
  bool cancelled = false;                      ///< by the application
  bool never_posted = false;                   ///< cancelled before its offer was posted
  bool is_direct = false;                      ///< its offer went without a work request
  base::IntrusiveLinks<RendezvousSend> links;  ///< in Rendezvous::sends
  std::uint32_t index = 0;
  std::uint32_t id = 0;               ///< the send's name in the protocol
  std::uint64_t behind = kNoRequest;  ///< of a direct one: the newest work request before it
  Agent* agent = nullptr;
  CompletionCallback done;
};

/// A message that is being fetched, or an arrival behind one.
struct RendezvousReceive {
  enum class Kind : std::uint8_t { message, write, rendezvous, goodbye };
  RendezvousReceive* next = nullptr;
  detail::Block* block = nullptr;  ///< holds a reference; for a rendezvous, the destination
  std::byte* data = nullptr;
  std::uint32_t length = 0;  ///< bytes
  std::uint32_t immediate = 0;
  Kind kind = Kind::message;
  bool has_immediate = false;
  bool complete = false;  ///< can be delivered once it is first
  bool refused = false;   ///< is not delivered
  bool named = false;     ///< the application chose the destination
  bool credited = false;  ///< takes one receive from its agent's reserved receives
  // Only for a rendezvous.
  bool invalidate = false;     ///< the answer invalidates the key
  bool is_local = false;       ///< the key is a local one of the sender
  std::uint64_t remote = 0;    ///< address
  std::uint64_t deadline = 0;  ///< tick; while it waits for a block
  std::uint32_t rkey = 0;
  std::uint32_t id = 0;
  std::uint32_t requested = 0;  ///< bytes that READs were posted for
  std::uint32_t arrived = 0;    ///< bytes
  std::uint32_t index = 0;
};

/// Agents linked by Rendezvous::next.
using AgentQueue = base::IntrusiveQueue<next_in_rendezvous>;

/// Rendezvous state of a connection.
struct Rendezvous {
  base::IntrusiveList<&RendezvousSend::links> sends;  ///< the newest first
  std::uint32_t send_count = 0;
  std::uint32_t credited = 0;  ///< receives that the held messages have, of the agent's reserved
  /// Longest message that goes as a direct message instead, bytes; 0: none.
  std::uint32_t longest_direct = 0;
  std::uint32_t longest_in_place = 0;  ///< of the peer's direct messages, with the header
  std::uint32_t direct_pause = 0;      ///< messages until the next one is tried as a direct message
  base::IntrusiveQueue<&RendezvousReceive::next> receives;  ///< in the order of delivery
  RendezvousReceive* reading = nullptr;  ///< the first with bytes that no READ was posted for
  Agent* next = nullptr;
  AgentQueue* queue = nullptr;  ///< the queue that contains the agent; null: none
  std::uint8_t reads_outstanding = 0;
  /// In which order the blocks of received messages are used again.
  memory::Reuse reuse = memory::Reuse::newest;
};

/// Rendezvous state of the engine.
struct RendezvousPool {
  /// May throw std::bad_alloc.
  RendezvousPool(std::uint32_t max_sends, std::uint32_t max_receives)
      : sends(max_sends), receives(max_receives) {}
  base::IndexPool<RendezvousSend> sends;
  base::IndexPool<RendezvousReceive> receives;
  /// An outstanding READ that counts for the limit of the engine.
  struct CountedRead {
    Agent* agent = nullptr;  ///< null: the place is free
    std::uint64_t since = 0;
  };
  base::IntrusiveQueue<next_reader> reader_turns;  ///< sources that may post a READ
  AgentQueue buffer_waiters;  ///< agents whose next message has no block; the longest waiter first
  std::array<CountedRead, kRendezvousReads> reads{};
};

// The sender.

/// Accepts a message above the eager limit. Errors: those of send().
Status submit_rendezvous(EngineContext& ctx, Agent& a, const Request& r,
                         bool has_immediate) noexcept;
/// Handles the peer's answer to an offer.
void on_rendezvous_answer(EngineContext& ctx, Agent& a, const ibv_wc& wc,
                          std::span<const std::byte> body) noexcept;
/// The send that an offer's operation belongs to; null if the send has ended.
RendezvousSend* find_rendezvous_send(const EngineContext& ctx, const Agent& a,
                                     const Operation& offer) noexcept;
/// Ends a send whose key is closed. Ends the connection if it waited only for this send.
void complete_rendezvous_send(EngineContext& ctx, Agent& a, RendezvousSend& send,
                              Status status) noexcept;
/// Frees the key of a send whose offer was cancelled before it was posted.
void drop_unposted_offer(EngineContext& ctx, RendezvousSend& send) noexcept;
/// Ends all sends as flushed. The queue pair must be in ERR, and is destroyed next. Returns false
/// while control verbs remain; each call does at most one.
bool end_rendezvous_sends(EngineContext& ctx, Agent& a) noexcept;
/// Handles the unbinding of a window that the peer did not invalidate.
void on_rendezvous_unbound(EngineContext& ctx, Agent& a, std::uint32_t id, Status status) noexcept;

// The receiver.

/// Handles an offer, whose credit is counted already.
void on_rendezvous_offer(EngineContext& ctx, Agent& a, const ibv_wc& wc, wire::MessageKind kind,
                         std::span<const std::byte> body) noexcept;
/// Queues an arrival behind a rendezvous. Returns null, and fails the connection, if there is no
/// record.
RendezvousReceive* queue_receive(EngineContext& ctx, Agent& a,
                                 const RendezvousReceive& what) noexcept;
/// Posts READs within the limits.
void post_rendezvous_reads(EngineContext& ctx) noexcept;
/// Refuses messages that have waited too long for a block. Runs in the control step.
void expire_buffer_waiters(EngineContext& ctx) noexcept;
/// Refuses all messages that are not complete, because the connection closes.
void refuse_rendezvous_receives(EngineContext& ctx, Agent& a) noexcept;
/// Handles the end of a READ.
void on_rendezvous_read(EngineContext& ctx, Agent& a, std::uint32_t bytes, Status status) noexcept;
/// Drops all receives; no READ may be outstanding.
void drop_rendezvous_receives(EngineContext& ctx, Agent& a) noexcept;

/// Whether only rendezvous messages are refused: windows or records are used up, or the
/// connection's source has its share of them.
[[nodiscard]] bool lacks_window(const EngineContext& ctx, const Agent& a) noexcept;

}  // namespace spinwire::agent
