// How connections and sessions are made again after a loss.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "spinwire/clock.h"

namespace spinwire {

/// A port of the engine's device, and one of its GIDs, through which an attempt goes.
struct LocalPath {
  std::uint32_t port = 0;  ///< of the engine's device, counted from 1; 0: none
  /// In the port's table. Empty: the engine's GID if the port is the engine's, else the port's
  /// best.
  std::optional<std::uint32_t> gid_index{};

  friend bool operator==(const LocalPath&, const LocalPath&) noexcept = default;
};

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
/// With local paths (ConnectOptions::local_paths, SessionOptions::local_paths), each attempt also
/// takes the next local path, so one failure at either end seldom fails two attempts in a row. A
/// round tries each address through each path, in as many passes over the addresses as there are
/// paths; the last attempt of a pass and the first of the next may share a path. An attempt through
/// a port whose link is down fails at once, and that is not final. If the device reports that the
/// link in use has gone down, the connection or session is lost at once, unless no attempt may
/// follow. It then stays on the path that took it over.
///
/// Addresses are numeric, and no attempt resolves a name again. Give all addresses that
/// Engine::resolve() finds. When a name has moved to others, close, resolve it and connect again.
///
/// An attempt is set-up work: control steps open a socket, exchange the handshake and, for a
/// connection, make a queue pair. They allocate memory, as the texts of errors do, and call the
/// system. Ready connections and sessions, and those that wait for an attempt, do neither.
struct Reconnect {
  /// Rounds over all addresses and local paths in a row without lasting success; 0: do not
  /// reconnect. The alternatives and paths are then tried only until the first success.
  std::uint32_t attempts = 0;
  /// Pause before the first round; it doubles with each round up to `max_delay`, less a random part
  /// of up to a half. Only a success that lasts for `max_delay` resets it: what is lost sooner has
  /// used up a round, so a peer that ends all it accepts is not dialled in a loop. 1 us … 1 h each.
  Nanoseconds first_delay = std::chrono::milliseconds(10);
  Nanoseconds max_delay = std::chrono::seconds(5);  ///< longest pause; see first_delay
};

}  // namespace spinwire
