// The orderly end of a connection, and what either end says about it.
//
// close() without a reason is immediate: the operations of this end complete, messages that arrive
// meanwhile are dropped, and the peer tears down when it has the goodbye.
//
// A goodbye that invites the peer back loses no message, in either direction (RFC 9293 closes a
// stream in the same way). This end completes its operations, then sends its goodbye with
// wire::kAwaitsGoodbye, and goes on delivering messages. The peer then accepts no operations any
// more, completes its own, and answers by its own goodbye. Each end waits for the other for
// connections.peer_timeout.
//
// Cold.
#pragma once

#include <cstdint>

#include "spinwire/goodbye.h"

namespace spinwire::agent {

struct Agent;
struct EngineContext;

struct Goodbyes {
  std::uint32_t ours = 0;    ///< what ours says, as encoded by wire/goodbye.h
  bool by_us = false;        ///< our application, or its engine, closes: no reconnecting
  bool awaits_peer = false;  ///< ours asks for the peer's, which has not come
  bool peer_awaits = false;  ///< the peer's asks for ours
};

/// Closes a connection. A goodbye that invites the peer back makes the end lossless, if the peer
/// knows such goodbyes.
void close(EngineContext& ctx, Agent& a, const Goodbye& goodbye) noexcept;
/// Closes a half-open connection whose peer still waits for our answer, and so hears the refusal.
/// After our answer the peer may be ready, and not listen to a refusal any more: the connection
/// goes on until it is ready here, too, or fails.
void close_half_open(EngineContext& ctx, Agent& a, const Goodbye& goodbye) noexcept;
/// Appends our goodbye to the send queue. False: all records are in use.
bool send_goodbye(EngineContext& ctx, Agent& a) noexcept;
/// Sends the goodbye without waiting for operations or for the peer, and ends the connection when
/// what the device has is over.
void close_at_once(EngineContext& ctx, Agent& a, const Goodbye& goodbye) noexcept;
/// No attempt follows the end of the connection.
void stop_reconnecting(Agent& a) noexcept;
/// MessageHeader::length of our goodbye.
std::uint32_t goodbye_number(const Agent& a) noexcept;
/// The goodbye of a refusal of the peer's handshake.
Goodbye goodbye_of(const Agent& a) noexcept;
/// Notes the peer's goodbye, before it takes effect. False: it is malformed.
bool note_goodbye(Agent& a, std::uint32_t number) noexcept;

}  // namespace spinwire::agent
