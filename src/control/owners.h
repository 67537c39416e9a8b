// What the control port asks of those that it talks for. An owner names what a dialogue is about by
// a number of its own, the subject; the port only hands it back. The port has finished with a
// dialogue, or put it into its next state, when it calls an owner. Cold.
#pragma once

#include <cstdint>
#include <string_view>

#include "control/address.h"
#include "control/rdma_cm.h"
#include "spinwire/endpoint.h"
#include "spinwire/status.h"
#include "wire/handshake.h"

namespace spinwire::control {

/// Names one handshake of a port; one that is over is not found any more.
struct HandshakeId {
  std::uint32_t index = 0;
  std::uint32_t generation = 0;  ///< 0: none
  explicit operator bool() const noexcept { return generation != 0; }
  friend bool operator==(const HandshakeId&, const HandshakeId&) noexcept = default;
};

/// Names one listener of a port.
struct ListenerId {
  std::uint32_t index = 0;
  std::uint32_t generation = 0;  ///< 0: none
};

/// Brings connections up, outbound and inbound.
class ConnectionOwner {
 public:
  virtual ~ConnectionOwner() = default;
  /// Outbound: the peer has accepted and tells its endpoint. An error refuses the peer.
  virtual Result<void> on_accept(std::uint64_t subject, const Endpoint& peer) = 0;
  /// Both ends are up; the handshake is over.
  virtual void on_confirmed(std::uint64_t subject) = 0;
  /// The peer refuses; the handshake is over.
  virtual void on_refused(std::uint64_t subject, const wire::Refuse& refusal) = 0;
  /// The stream or the peer's frames failed; the handshake is over.
  virtual void on_failed(std::uint64_t subject, const Error& why) = 0;
};

/// Opens sessions with servers.
class SessionOwner {
 public:
  virtual ~SessionOwner() = default;
  /// The server has opened the session. Call ControlPort::confirm() to use it; otherwise the
  /// handshake ends without a word and the server forgets the session.
  virtual void on_opened(std::uint64_t subject, HandshakeId handshake,
                         const wire::SessionEnd& server) = 0;
  /// The server refuses; the handshake is over.
  virtual void on_open_refused(std::uint64_t subject, const wire::Refuse& refusal) = 0;
  /// The stream or the server's frames failed; the handshake is over.
  virtual void on_open_failed(std::uint64_t subject, const Error& why) = 0;
};

/// Serves sessions to clients.
class ServedSessionOwner {
 public:
  virtual ~ServedSessionOwner() = default;
  /// The client has not confirmed the session that was opened at this tick: it is gone, unless it
  /// has used the session since.
  virtual void on_unconfirmed(std::uint64_t subject, std::uint64_t opened_at) = 0;
  /// Send the token to the client's address: the client shows that it has come before it is told of
  /// the session. Once more if that takes long.
  virtual void on_challenge_due(std::uint64_t subject, std::uint64_t token) = 0;
};

/// What a probe finds at the address of a silent peer. Only `restarted` proves that the engine is
/// gone: its listener may be closed or out of reach while the engine lives.
enum class ProbeOutcome : std::uint8_t {
  none,         ///< nothing was found out
  alive,        ///< the engine answers
  restarted,    ///< another engine, or the next incarnation, answers
  silent,       ///< the connection is taken, and then nobody answers
  no_listener,  ///< the host refuses the connection
  unreachable,  ///< the host does not answer
};

/// Asks whether silent peers still are the engines that they were.
class ProbeOwner {
 public:
  virtual ~ProbeOwner() = default;
  /// The probe of the engine of this incarnation is over.
  virtual void on_probe_ended(std::uint64_t incarnation, ProbeOutcome outcome) = 0;
};

/// A connection that a listener has taken.
struct AcceptedConnection {
  ConnectionOwner* owner;
  std::uint64_t subject;
};
/// A session that a listener has taken.
struct AcceptedSession {
  wire::SessionEnd end;  ///< ours
  ServedSessionOwner* owner;
  std::uint64_t subject;
  std::uint64_t opened_at;       ///< tick
  std::uint64_t path_token = 0;  ///< random; 0: the client's address needs no validation
};

/// Decides on what peers ask of a listener. Each error goes to the peer as a refusal. The listener
/// may be stopped inside of each function.
class ListenerOwner {
 public:
  virtual ~ListenerOwner() = default;
  virtual Result<AcceptedConnection> on_hello(HandshakeId handshake, std::string_view peer,
                                              const Endpoint& endpoint) = 0;
  virtual Result<AcceptedConnection> on_join_session(HandshakeId handshake, std::string_view peer,
                                                     const wire::JoinSession& join) = 0;
  virtual Result<AcceptedSession> on_open_session(const Address& peer,
                                                  const wire::SessionEnd& client) = 0;
  /// A request through rdma_cm. The owner keeps the identifier and answers, or rejects, later; an
  /// error rejects at once.
  virtual Result<void> on_cm_request(CmId& id, const CmEvent& request) = 0;
};

/// Brings connections up through rdma_cm.
class CmOwner {
 public:
  virtual ~CmOwner() = default;
  /// Anything but a request. `subject` is what ControlPort::set_cm_subject() was given.
  virtual void on_cm_event(std::uint64_t subject, const CmEvent& event) = 0;
  /// The address that ControlPort::resolve() was asked for is resolved. Errors: peer_lost.
  virtual void on_address_resolved(std::uint64_t subject, const Result<void>& outcome) = 0;
};

/// Has a descriptor of its own in the port's epoll set.
class DescriptorOwner {
 public:
  virtual ~DescriptorOwner() = default;
  virtual void on_readable() = 0;
};

}  // namespace spinwire::control
