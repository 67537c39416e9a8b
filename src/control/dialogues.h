// The dialogues of the control port, each a type with its own state. A dialogue knows what it says
// next and what it may hear; ControlPort has the sockets, the limits and the timers. To add one:
// add a type with the two functions that all have, name it in Dialogue, and begin it in ControlPort
// or in Incoming. Cold.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>

#include "base/timer_wheel.h"
#include "control/exchange.h"
#include "control/owners.h"

namespace spinwire::control {

class ControlPort;
struct Handshake;

/// What a connection that is for a session's calls says of the session.
struct SessionReference {
  std::uint32_t session = 0;  ///< as the server calls it
  std::uint64_t token = 0;    ///< that the server gave to its client
};

// Each has
//   void advance(ControlPort&, Handshake&)     the socket is ready, or there is something to send;
//   void on_timeout(ControlPort&, Handshake&)  the handshake's timer has fired;
//   void give_up(ControlPort&, Handshake&)     it ends, so that a new peer may come;
//   bool waits_for_peer()                      it may be given up: the peer's turn it is.
// One whose frame names an address also has
//   void on_resolved(ControlPort&, Handshake&, const Result<void>&)
//                                              ControlPort::resolve() has answered false, and now
//                                              the address is resolved, or is not reachable.
// The object may be replaced by the next dialogue inside of these functions.

/// Inbound: waits for the first frame, which tells what the peer wants.
struct Incoming {
  ListenerId listener;

  [[nodiscard]] static bool waits_for_peer() noexcept { return true; }
  void give_up(ControlPort& port, Handshake& h);

  void advance(ControlPort& port, Handshake& h);
  void on_timeout(ControlPort& port, Handshake& h);
  void on_resolved(ControlPort& port, Handshake& h, const Result<void>& outcome) const;

 private:
  void on_frame(ControlPort& port, Handshake& h) const;
  void pass_on(ControlPort& port, Handshake& h) const;
};

/// Outbound: hello, the peer's accept, our ready. With a session: the hello joins it.
struct Connect {
  ConnectionOwner* owner = nullptr;
  std::uint64_t subject = 0;
  std::optional<SessionReference> session;
  bool asked = false;      ///< the hello is queued
  bool confirmed = false;  ///< our ready is queued

  [[nodiscard]] static bool waits_for_peer() noexcept { return false; }
  void give_up(ControlPort&, Handshake&) {}
  void advance(ControlPort& port, Handshake& h);
  void on_timeout(ControlPort&, Handshake&) {}  // the owner's deadline ends it
  void on_resolved(ControlPort& port, Handshake& h, const Result<void>& outcome) const;

 private:
  void on_frame(ControlPort& port, Handshake& h) const;
};

/// Inbound, after the peer's hello: our accept, the peer's ready.
struct Accept {
  ConnectionOwner* owner = nullptr;
  std::uint64_t subject = 0;
  bool answered = false;  ///< the accept is queued

  [[nodiscard]] bool waits_for_peer() const noexcept { return answered; }
  void give_up(ControlPort& port, Handshake& h);
  void advance(ControlPort& port, Handshake& h);
  void on_timeout(ControlPort&, Handshake&) {}  // the owner's deadline ends it

 private:
  void on_frame(ControlPort& port, Handshake& h) const;
};

/// Outbound: asks a server for a session.
struct OpenSession {
  SessionOwner* owner = nullptr;
  std::uint64_t subject = 0;

  [[nodiscard]] static bool waits_for_peer() noexcept { return false; }
  void give_up(ControlPort&, Handshake&) {}
  void advance(ControlPort& port, Handshake& h);
  void on_timeout(ControlPort&, Handshake&) {}  // the owner's deadline ends it
  void on_resolved(ControlPort& port, Handshake& h, const Result<void>& outcome) const;

 private:
  void on_frame(ControlPort& port, Handshake& h) const;
};

/// Inbound, after a session was asked for: until the client has shown that it gets what is sent to
/// the address that it names.
struct ValidatePath {
  AcceptedSession session;
  std::uint64_t challenged_at = 0;  ///< tick
  std::uint64_t interval = 0;       ///< ticks to the next challenge; doubled each time
  std::uint64_t deadline = 0;       ///< tick

  [[nodiscard]] static bool waits_for_peer() noexcept { return true; }
  void give_up(ControlPort& port, Handshake& h) const;
  void advance(ControlPort& port, Handshake& h) const;
  void on_timeout(ControlPort& port, Handshake& h);
};

/// Inbound, after a session was opened: waits for the client's ready.
struct ServeSession {
  /// A challenge that was repeated may be answered once more.
  [[nodiscard]] static constexpr wire::KindSet expected() noexcept {
    return wire::kinds(wire::FrameKind::ready, wire::FrameKind::path_response,
                       wire::FrameKind::refuse);
  }
  ServedSessionOwner* owner = nullptr;
  std::uint64_t subject = 0;
  std::uint64_t opened_at = 0;  ///< tick

  [[nodiscard]] static bool waits_for_peer() noexcept { return true; }
  void give_up(ControlPort& port, Handshake& h) const;
  void advance(ControlPort& port, Handshake& h);
  void on_timeout(ControlPort& port, Handshake& h) const { give_up(port, h); }
};

/// Outbound: asks whether the engine at an address is the one of this incarnation.
struct ProbePeer {
  ProbeOwner* owner = nullptr;
  std::uint64_t incarnation = 0;

  [[nodiscard]] static bool waits_for_peer() noexcept { return false; }
  void end(ControlPort& port, Handshake& h, ProbeOutcome outcome) const;
  void give_up(ControlPort&, Handshake&) {}
  void advance(ControlPort& port, Handshake& h);
  void on_timeout(ControlPort& port, Handshake& h);
};

/// Either direction: our refusal is on its way and the peer has not closed yet.
struct Refusing {
  [[nodiscard]] static bool waits_for_peer() noexcept { return true; }
  void give_up(ControlPort& port, Handshake& h);
  void advance(ControlPort& port, Handshake& h);
  void on_timeout(ControlPort& port, Handshake& h);
};

using Dialogue = std::variant<Incoming, Connect, Accept, OpenSession, ValidatePath, ServeSession,
                              ProbePeer, Refusing>;

/// Whether the address that the peer's frame names is known to the kernel.
enum class AddressState : std::uint8_t { unknown, pending, resolved };

/// A dialogue and its socket.
struct Handshake {
  Exchange exchange;
  Dialogue dialogue;
  HandshakeId id;
  bool inbound = false;
  SourceCounts::iterator source;  ///< inbound: the peer's
  bool watched = false;           ///< in the epoll set
  Interest interest = Interest::none;
  AddressState address = AddressState::unknown;
  std::uint64_t waits_since = 0;  ///< tick of the dialogue's last step
  base::Timer timer;
};

}  // namespace spinwire::control
