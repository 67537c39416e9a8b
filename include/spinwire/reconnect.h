// How connections and sessions are made again after a loss.
#pragma once

#include <chrono>
#include <cstdint>

#include "spinwire/clock.h"

namespace spinwire {

/// Makes a connection or session again that could not be made or was lost. Its handle stays valid.
/// Outstanding operations of the connection have ended by then, and keys that the peer made for it
/// are closed; SessionOptions::reconnect says what happens to calls.
///
/// A loss or a failed attempt is final if is_retryable(const Error&) is false, and ends it without
/// a further attempt: so do a refusal by the peer's application that names no time to come back, a
/// protocol mismatch, the loss of the device, and a goodbye to a connection that does not invite us
/// back. Every other refusal may pass, also that of a server whose listener is gone for now: it is
/// retried within `attempts`. on_closed then gets the final error. If the attempts are used up
/// instead, it gets the error with which this began, for which is_retryable() is true.
///
/// A goodbye or a refusal that invites us back (Goodbye::invites_back()) delays the next attempt at
/// that address by its retry_after and a random part of up to a quarter more, so that clients that
/// were given the same time do not come back all at once.
///
/// With alternatives (ConnectOptions::alternatives, SessionOptions::alternatives), an attempt at an
/// address that fails is followed at once by one at the next address, until a round has tried all.
/// A round after a loss begins with the address behind the one that was lost. What is final then
/// ends only this attempt, unless all of a round end so.
///
/// Addresses are numeric, and no attempt resolves a name again. Give all addresses that
/// Engine::resolve() finds. When a name has moved to others, close, resolve it and connect again.
///
/// An attempt is set-up work: control steps open a socket, exchange the handshake and, for a
/// connection, make a queue pair. They allocate memory and make system calls. A connection or
/// session that could reconnect, and is not lost, does neither.
struct Reconnect {
  /// Rounds over all addresses in a row without lasting success; 0: do not reconnect. The
  /// alternatives are then tried only until the first success.
  std::uint32_t attempts = 0;
  /// Pause before the first round. The pause doubles with each further round up to `max_delay`,
  /// less a random part of up to a half. A success counts as lasting after `max_delay`. 1 us … 1 h
  /// each.
  Nanoseconds first_delay = std::chrono::milliseconds(10);
  Nanoseconds max_delay = std::chrono::seconds(5);  ///< longest pause; see first_delay
};

}  // namespace spinwire
