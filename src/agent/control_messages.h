// Control messages of the protocol: answers to rendezvous offers, and all messages about leases.
// They use credit like the application's messages. While they wait for credit, the application's
// operations wait behind them.
//
// A peer that grants no credit makes them wait, and all connections share their records. So a peer
// has connections.peer_timeout to let one go (Stalls). When the records are used up, the
// connection with the most waiting messages ends, of the source that has the most of them, and not
// the one that needs a record.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/index_pool.h"
#include "base/intrusive_list.h"
#include "wire/message_header.h"

namespace spinwire::agent {

struct Agent;
struct EngineContext;
struct RendezvousSend;

/// Control messages of one connection that the device may have at once, and that one visit sends
/// without work requests.
inline constexpr std::uint32_t kControlMessagesAtOnce = 2;

/// Control messages of one connection that may always wait.
inline constexpr std::uint32_t kControlMessagesPerAgent = 64;

/// A control message that waits for credit, or a window that waits to be unbound.
struct ControlMessage {
  ControlMessage* next = nullptr;
  RendezvousSend* unbind = nullptr;  ///< send whose window to unbind; then there is no message
  std::uint32_t invalidate = 0;      ///< key that the message invalidates at the peer; 0: none
  std::uint64_t invalidate_until = ~std::uint64_t{0};  ///< tick after which that key may be closed
  bool fence = false;                                  ///< wait for the READs and atomics before it
  wire::MessageKind kind = wire::MessageKind::rendezvous_answer;
  std::uint32_t size = 0;
  std::array<std::byte, 48> body{};
  std::uint32_t index = 0;
};

template <std::size_t size>
ControlMessage make_control_message(wire::MessageKind kind,
                                    const std::array<std::byte, size>& body) noexcept {
  ControlMessage message;
  static_assert(size <= sizeof message.body);
  message.kind = kind;
  message.size = size;
  std::copy(body.begin(), body.end(), message.body.begin());
  return message;
}

/// What is known of the messages in Agent::control_to_send.
struct ControlCounts {
  std::uint32_t waiting = 0;      ///< messages in the queue
  std::uint8_t outstanding = 0;   ///< messages with the device
  bool waits_for_credit = false;  ///< the agent is in EngineContext::credit_waiters
  Agent* next_waiter = nullptr;   ///< there
};

using ControlMessagePool = base::IndexPool<ControlMessage>;

/// Puts a message into the agent's queue; the end of the poll posts it.
void queue_control_message(EngineContext& ctx, Agent& a, const ControlMessage& what) noexcept;
/// Queues a message with a body of wire/.
template <typename Body>
void send_control_message(EngineContext& ctx, Agent& a, wire::MessageKind kind,
                          const Body& body) noexcept {
  queue_control_message(ctx, a, make_control_message(kind, encode(body)));
}
/// Whether the application may queue one more message.
bool can_queue_control(const Agent& a) noexcept;
/// Posts messages while there is credit. False: credit or a record is missing.
bool post_control_messages(EngineContext& ctx, Agent& a) noexcept;
/// Posts the messages that a call outside of poll() has queued, and rings the doorbell.
void flush_control_messages(EngineContext& ctx, Agent& a) noexcept;
/// The device has finished a message.
void on_control_message_done(EngineContext& ctx, Agent& a) noexcept;
/// Empties the queue.
void drop_control_messages(EngineContext& ctx, Agent& a) noexcept;

}  // namespace spinwire::agent
