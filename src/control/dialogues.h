// The dialogues of the control port, each a type with its own state. A dialogue knows the frame
// that it sends next and the frames that it may receive. ControlPort has the sockets, the limits
// and the timers. To add a dialogue, follow "Add a handshake" in src/README.md. Cold.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <variant>

#include "base/timer_wheel.h"
#include "control/cm_authentication.h"
#include "control/exchange.h"
#include "control/owners.h"

namespace spinwire::control {

class ControlPort;
struct Handshake;

/// Identifies the session of a connection for its calls.
struct SessionReference {
  std::uint32_t session = 0;  ///< the server's name of the session
  std::uint64_t token = 0;    ///< the server gave it to its client
};

// ControlPort advances the exchange and calls
//   void on_frame(ControlPort&, Handshake&)    the peer's frame is in the exchange;
//   void on_failed(ControlPort&, Handshake&, const Error&)
//                                              the stream has failed, or was closed.
// Some have
//   Error closed_error(const Handshake&)       for on_failed(), if the peer has closed the stream;
//   bool is_over(const Handshake&), void end(ControlPort&, Handshake&)
//                                              it ends, whether or not the peer closes the stream;
//   void on_timeout(ControlPort&, Handshake&)  the handshake's timer has fired; without it, the
//                                              owner's deadline ends the handshake;
//   bool waits_for_peer(), void give_up(ControlPort&, Handshake&)
//                                              if true, the port may end it for a new peer;
//   void resume(ControlPort&, Handshake&)      it was held, and goes on with the peer's request;
//   void on_resolved(ControlPort&, Handshake&, const Result<void>&)
//                                              after ControlPort::resolve() answered false: the
//                                              address is resolved, or is not reachable.
// These functions may replace the object by the next dialogue.

/// The peer has closed the stream, for dialogues without a closed_error() of their own.
Error closed_early();
/// The peer's source, or all together, have too many addresses resolved.
Error too_many_addresses();

/// Inbound: waits for the first frame, which contains the peer's request.
struct Incoming {
  ListenerId listener;

  [[nodiscard]] static bool waits_for_peer() noexcept { return true; }
  static void give_up(ControlPort& port, Handshake& h);
  static void on_timeout(ControlPort& port, Handshake& h);
  void on_frame(ControlPort& port, Handshake& h) const;
  static void on_failed(ControlPort& port, Handshake& h, const Error& why);
  void on_resolved(ControlPort& port, Handshake& h, const Result<void>& outcome) const;
  void resume(ControlPort& port, Handshake& h) const { on_frame(port, h); }

 private:
  void pass_on(ControlPort& port, Handshake& h) const;
};

/// The base of dialogues of connections. Each function ends the handshake, then tells the owner.
struct ConnectionDialogue {
  ConnectionOwner* owner = nullptr;
  std::uint64_t subject = 0;

  void on_failed(ControlPort& port, Handshake& h, const Error& why) const;
  void on_refused(ControlPort& port, Handshake& h, const wire::Refuse& refusal) const;
  void end(ControlPort& port, Handshake& h) const;
  void give_up(ControlPort& port, Handshake& h) const;
};

/// Outbound: sends hello, receives accept, sends ready. For a session's calls, the hello joins the
/// session.
struct Connect : ConnectionDialogue {
  /// After the hello; before it, only a refusal.
  [[nodiscard]] static constexpr wire::KindSet expected() noexcept {
    return wire::kinds(wire::FrameKind::accept, wire::FrameKind::refuse);
  }
  std::optional<SessionReference> session{};
  bool asked = false;      ///< the hello is queued
  bool confirmed = false;  ///< our ready is queued

  /// A peer that has read the last frame may close at once.
  [[nodiscard]] bool is_over(const Handshake& h) const noexcept;
  [[nodiscard]] static Error closed_error(const Handshake& h);
  void on_frame(ControlPort& port, Handshake& h) const;
  void on_resolved(ControlPort& port, Handshake& h, const Result<void>& outcome) const;
};

/// Inbound, after the peer's hello: sends accept, receives ready.
struct Accept : ConnectionDialogue {
  /// After our accept; before it, only a refusal.
  [[nodiscard]] static constexpr wire::KindSet expected() noexcept {
    return wire::kinds(wire::FrameKind::ready, wire::FrameKind::refuse);
  }
  bool answered = false;  ///< the accept is queued

  [[nodiscard]] bool waits_for_peer() const noexcept { return answered; }
  void on_frame(ControlPort& port, Handshake& h) const;
  void on_resolved(ControlPort& port, Handshake& h, const Result<void>& outcome) const;
};

/// Inbound, through rdma_cm: a request that the listener's owner has not taken yet.
struct CmIncoming {
  ListenerId listener;

  [[nodiscard]] static bool waits_for_peer() noexcept { return true; }
  static void give_up(ControlPort& port, Handshake& h);
  static void on_timeout(ControlPort& port, Handshake& h);
  void on_resolved(ControlPort& port, Handshake& h, const Result<void>& outcome) const;
  void resume(ControlPort& port, Handshake& h) const;
};

/// Inbound, through rdma_cm: from the request until the peer confirms our answer. The owner has the
/// identifier and its events.
struct CmAccept : ConnectionDialogue {
  bool answered = false;

  [[nodiscard]] bool waits_for_peer() const noexcept { return answered; }
};

/// Outbound: asks a server for a session.
struct OpenSession {
  SessionOwner* owner = nullptr;
  std::uint64_t subject = 0;

  [[nodiscard]] static Error closed_error(const Handshake& h);
  void on_frame(ControlPort& port, Handshake& h) const;
  void on_failed(ControlPort& port, Handshake& h, const Error& why) const;
  void on_resolved(ControlPort& port, Handshake& h, const Result<void>& outcome) const;
};

/// The base of dialogues of served sessions.
struct ServedSessionDialogue {
  AcceptedSession session;

  [[nodiscard]] static bool waits_for_peer() noexcept { return true; }
  /// Ends the handshake. The owner keeps the session if its client already uses it.
  void end_unconfirmed(ControlPort& port, Handshake& h) const;
};

/// Inbound, after a request for a session: waits until the client has proved that it receives
/// datagrams at the address that it names. The owner sends a token there, and the client returns
/// it in `path_response` (as in RFC 9000, section 8.2); only then session_opened reveals our
/// address. Repeats the challenge after 2 ms, 4 ms and so on, until handshake_timeout.
struct ValidatePath : ServedSessionDialogue {
  std::uint64_t challenged_at = 0;  ///< tick
  std::uint64_t interval = 0;       ///< ticks to the next challenge; doubled each time
  std::uint64_t deadline = 0;       ///< tick

  void give_up(ControlPort& port, Handshake& h) const;
  void on_timeout(ControlPort& port, Handshake& h);
  void on_frame(ControlPort& port, Handshake& h) const;
  void on_failed(ControlPort& port, Handshake& h, const Error&) const { give_up(port, h); }
};

/// Inbound, after a session was opened: waits for the client's ready.
struct ServeSession : ServedSessionDialogue {
  /// A repeated challenge may be answered once more.
  [[nodiscard]] static constexpr wire::KindSet expected() noexcept {
    return wire::kinds(wire::FrameKind::ready, wire::FrameKind::path_response,
                       wire::FrameKind::refuse);
  }

  void give_up(ControlPort& port, Handshake& h) const { end_unconfirmed(port, h); }
  void on_timeout(ControlPort& port, Handshake& h) const { end_unconfirmed(port, h); }
  void on_frame(ControlPort& port, Handshake& h) const;
  void on_failed(ControlPort& port, Handshake& h, const Error&) const { end_unconfirmed(port, h); }
};

/// Outbound: asks whether the engine at an address has this incarnation.
struct ProbePeer {
  ProbeOwner* owner = nullptr;
  ProbedEngine probed;

  void on_timeout(ControlPort& port, Handshake& h) const;
  void on_frame(ControlPort& port, Handshake& h) const;
  void on_failed(ControlPort& port, Handshake& h, const Error& why) const;

 private:
  void end(ControlPort& port, Handshake& h, ProbeOutcome outcome) const;
};

/// Either direction: our refusal is sent, and the peer has not closed yet.
struct Refusing {
  [[nodiscard]] static bool waits_for_peer() noexcept { return true; }
  static void give_up(ControlPort& port, Handshake& h);
  static void on_timeout(ControlPort& port, Handshake& h) { give_up(port, h); }
  static void on_failed(ControlPort& port, Handshake& h, const Error&) { give_up(port, h); }
};

using Dialogue = std::variant<Incoming, Connect, Accept, CmIncoming, CmAccept, OpenSession,
                              ValidatePath, ServeSession, ProbePeer, Refusing>;

/// A request through rdma_cm.
struct CmRequest {
  CmId id;                           ///< until the listener's owner takes it
  CmEvent event;                     ///< with a key: its data is what a request without one has
  KeyName key;                       ///< that the peer has proved; empty: none
  std::unique_ptr<CmServer> client;  ///< until the owner takes it; null: a plain request
  std::optional<PrivateData> ours;   ///< what the owner gives to the client; none: not asked yet
  Address peer;
  std::array<std::uint8_t, 16> gid{};  ///< the address of the peer's queue pair
  ListenerId listener;
  std::uint64_t came_at = 0;  ///< tick
  std::uint64_t number = 0;   ///< of a plain request: CmProofs::Outcome::number

  /// Refers to this request.
  [[nodiscard]] CmHello hello() const noexcept;
};

/// Names the resource that an inbound request waits for at the port.
enum class HeldFor : std::uint8_t {
  nothing,
  resolution,  ///< its source, or the port, has too many addresses resolved
  connection,  ///< its listener has no room for a connection yet
  challenge,   ///< its source, or the port, has too many challenges that nobody has answered
};

/// Whether the kernel knows the address in the peer's frame.
enum class AddressState : std::uint8_t { unknown, pending, resolved };

/// A dialogue and its socket, or its request through rdma_cm.
struct Handshake {
  Exchange exchange;
  Dialogue dialogue;
  HandshakeId id;
  bool inbound = false;
  Source source{};       ///< inbound: the peer's
  Source counted_for{};  ///< Admission::source
  bool watched = false;  ///< in the epoll set
  Interest interest = Interest::none;
  AddressState address = AddressState::unknown;
  HeldFor held_for = HeldFor::nothing;
  bool needs_own_source = false;             ///< held for a connection; see Admission
  bool was_asked = false;                    ///< in this round it was resumed already, and waits
  bool is_charged = false;                   ///< its resolution counts in ResolutionLimits
  bool is_challenged = false;                ///< counts among the path validations
  bool is_authenticated = false;             ///< the peer has proved a key: counted in proved_
  bool is_failure_counted = false;           ///< its missing proof is counted already
  bool takes_application_fields = false;     ///< inbound: the peer does; see wire::feature
  bool is_seen_from_elsewhere = false;       ///< its address, not from the engine's port and GID
  std::array<std::uint8_t, 16> resolving{};  ///< the address, while it is pending or challenged
  std::unique_ptr<CmRequest> request;        ///< if through rdma_cm; the exchange is idle then
  std::uint64_t waits_since = 0;  ///< ControlPort::heard_time_ at the dialogue's last step
  base::Timer timer;

  [[nodiscard]] const Address& peer() const noexcept {
    return request != nullptr ? request->peer : exchange.peer();
  }
  /// Whether the peer's frame waits, for room or for its address. Nothing is read meanwhile.
  [[nodiscard]] bool is_paused() const noexcept {
    return held_for != HeldFor::nothing || address == AddressState::pending;
  }
  /// Whether the peer has said that it understands a refusal with a goodbye.
  [[nodiscard]] bool takes_goodbyes() const noexcept;
};

}  // namespace spinwire::control
