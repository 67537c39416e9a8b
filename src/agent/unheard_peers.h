// Peers that have completed the handshake of a connection, and were never heard since: no message
// and no word in the credit cell has come (liveness.cc). A handshake needs no device, so a stranger
// can say that it is ready at an endpoint that does not exist, and would hold the connection for
// connections.peer_timeout. When a new peer finds no room, one that was never heard gives way: the
// oldest, once it has had its time (control/grace.h). While a source has more than a quarter of all
// connections so, it is its oldest.
//
// An honest peer is heard at once, since its engine writes a word when it is ready. This engine
// need not poll for that: the word is in memory. A raw connection has no such word, and a peer that
// the application or a key speaks for is no stranger: they do not give way. Cold.
#pragma once

#include <cstdint>

#include "control/address.h"

namespace spinwire::agent {

struct Agent;
struct EngineContext;

/// A connection is ready: waits for its peer, if that is a stranger.
void await_peer(EngineContext& ctx, Agent& a) noexcept;
/// The peer was heard, or the connection ends.
void stop_awaiting_peer(EngineContext& ctx, Agent& a) noexcept;
/// The peer's word may be lost, since somebody else has written its cell.
void await_peer_anew(EngineContext& ctx, Agent& a) noexcept;

/// Whether the peer's device was heard: a message or a word has come. Needs no poll.
[[nodiscard]] bool was_peer_heard(const Agent& a) noexcept;

std::uint32_t unheard_count(const EngineContext& ctx) noexcept;

struct UnheardPeers {
  bool any = false;      ///< one will give way, or is doing so, unless it is heard
  Agent* due = nullptr;  ///< the one that gives way now; null: none has had its time
};
/// What a new peer without room may wait for. `source` not null: only peers of that source.
UnheardPeers find_unheard(EngineContext& ctx, const control::Address* source) noexcept;
/// Ends the connection of find_unheard(). Its peer, if there is one, is told to come back.
void give_way(EngineContext& ctx, Agent& a) noexcept;

}  // namespace spinwire::agent
