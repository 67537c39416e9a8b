// Interfaces of the owners of dialogues. An owner identifies the object of a dialogue by a number
// of its own, the subject; the port only passes the subject back. Before the port calls an owner,
// it has finished the dialogue or put it into its next state. Cold.
#pragma once

#include <cstdint>
#include <string>

#include "control/address.h"
#include "control/rdma_cm.h"
#include "spinwire/endpoint.h"
#include "spinwire/status.h"
#include "verbs/opened_device.h"
#include "wire/handshake.h"

namespace spinwire::control {

/// Names one handshake of a port; not found any more when the handshake is over.
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

/// Makes connections, outbound and inbound.
class ConnectionOwner {
 public:
  virtual ~ConnectionOwner() = default;
  /// Outbound: the peer has accepted and sent its endpoint. An error refuses the peer.
  virtual Result<void> on_accept(std::uint64_t subject, const Endpoint& peer) = 0;
  /// Both ends are up; the handshake is over.
  virtual void on_confirmed(std::uint64_t subject) = 0;
  /// The peer refuses; the handshake is over.
  virtual void on_refused(std::uint64_t subject, const wire::Refuse& refusal) = 0;
  /// The stream or the peer's frames failed; the handshake is over.
  virtual void on_failed(std::uint64_t subject, const Error& why) = 0;
  /// The address of ControlPort::resolve_again() is resolved. Errors: peer_lost, limit.
  virtual void on_address_resolved(std::uint64_t subject, const Result<void>& outcome) = 0;
  /// The port and GID of a connection that has others than the engine's; else null.
  [[nodiscard]] virtual const verbs::Place* own_place(std::uint64_t subject) const noexcept = 0;
};

/// Opens sessions with servers.
class SessionOwner {
 public:
  virtual ~SessionOwner() = default;
  /// The server has opened the session. Call ControlPort::confirm() to use it; otherwise the
  /// handshake ends and the server forgets the session.
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
  /// The client has not confirmed the session that was opened at this tick. The client is gone,
  /// unless it has used the session since.
  virtual void on_unconfirmed(std::uint64_t subject, std::uint64_t opened_at) = 0;
  /// Send the token to the client's address, as a datagram. The client must return it before it
  /// gets the session. Called again if the client does not answer soon.
  virtual void on_challenge_due(std::uint64_t subject, std::uint64_t token) = 0;
  /// The client has returned the token: it receives datagrams at its address.
  virtual void on_path_validated(std::uint64_t subject) = 0;
};

/// The result of a probe at the address of a silent peer. None proves that the engine is gone: its
/// listener may be closed, or unreachable, or another engine may listen there, while it lives.
enum class ProbeOutcome : std::uint8_t {
  none,         ///< the probe has no result
  alive,        ///< the engine answers
  restarted,    ///< another engine, or the next incarnation, answers
  handed_over,  ///< another engine answers, to which a listening socket was given
  silent,       ///< the connection is accepted, but no answer comes
  no_listener,  ///< the host refuses the connection
  unreachable,  ///< the host does not answer
};

/// Describes a probe's outcome about a lost peer, for the text of an Error.
struct ProbeFinding {
  const char* found;   ///< null: nothing
  const char* remedy;  ///< null: none of its own
};
ProbeFinding explain(ProbeOutcome outcome) noexcept;

/// The error for a refusal that has a code: its text is the peer's application's.
Error refused_by_application(std::string asked, const wire::Refuse& refusal);

/// The engine that a probe asks for.
struct ProbedEngine {
  Address address;  ///< where it was asked for
  std::uint64_t incarnation = 0;
  friend bool operator==(const ProbedEngine&, const ProbedEngine&) noexcept = default;
};
/// Probes the engines of silent peers.
class ProbeOwner {
 public:
  virtual ~ProbeOwner() = default;
  /// A probe is over. Its outcome says nothing about an engine of this incarnation that was reached
  /// at another address: any server may claim the incarnation of another one.
  virtual void on_probe_ended(const ProbedEngine& probed, ProbeOutcome outcome) = 0;
};

/// Whether a listener has room for one more connection.
struct Admission {
  bool now = true;
  /// If not now: connections that are being torn down, each of which makes room for one. With
  /// needs_own_source, those of that source.
  std::uint32_t ending = 0;
  /// If not now: only the end of one that counts for the same source makes room.
  bool needs_own_source = false;
  Source source{};  ///< that the connection counts for
};

/// A connection that a listener has taken.
struct AcceptedConnection {
  ConnectionOwner* owner;
  std::uint64_t subject;
};
/// A session that a listener has accepted.
struct AcceptedSession {
  wire::SessionEnd end;  ///< ours
  ServedSessionOwner* owner;
  std::uint64_t subject;
  std::uint64_t opened_at;       ///< tick
  std::uint64_t path_token = 0;  ///< random; 0: the client's address needs no validation
};

/// A client's request through rdma_cm.
struct CmHello {
  const CmEvent& request;           ///< its data is the endpoint's
  const PrivateData& private_data;  ///< of the client's application
  bool takes_private_data = false;  ///< a client of an older release takes none
};

/// Decides on the requests of a listener's peers. Each error is sent to the peer as a refusal; one
/// with a code is an application's, and is sent with its text and code alone. Each function may
/// stop the listener.
class ListenerOwner {
 public:
  virtual ~ListenerOwner() = default;
  /// The port and GID of its connections, if they have others than the engine's; else null.
  [[nodiscard]] virtual const verbs::Place* own_place() const noexcept = 0;
  /// Precedes on_hello(), on_join_session() and on_cm_hello(). Without room now the port keeps
  /// the request, ends a half-open connection if that is due, and asks again. `endpoint`: the
  /// peer's; null: not known yet. Errors: limit.
  virtual Result<Admission> admit(const Address& peer, const Endpoint* endpoint) = 0;
  virtual Result<AcceptedConnection> on_hello(HandshakeId handshake, const Address& peer,
                                              const Endpoint& endpoint) = 0;
  /// Errors: refused (no such session here), and others.
  virtual Result<AcceptedConnection> on_join_session(HandshakeId handshake, const Address& peer,
                                                     const wire::JoinSession& join) = 0;
  virtual Result<AcceptedSession> on_open_session(HandshakeId handshake, const Address& peer,
                                                  const wire::SessionEnd& client) = 0;
  /// A client asks for a connection through rdma_cm. Answers the private data to give to it. The
  /// identifier stays the port's.
  virtual Result<PrivateData> on_cm_hello(HandshakeId handshake, CmId& id,
                                          const CmHello& hello) = 0;
  /// Follows on_cm_hello(), at once or when the client has what its answer has no room for; another
  /// handshake then, and another identifier. The owner takes the identifier over and answers, or
  /// rejects, later. After an error the port rejects with it, if the identifier is still there.
  /// `ours`: what on_cm_hello() has answered; empty for a client that takes none.
  virtual Result<AcceptedConnection> on_cm_request(HandshakeId handshake, CmId& id,
                                                   const CmHello& hello,
                                                   const PrivateData& ours) = 0;
};

/// Makes connections through rdma_cm.
class CmOwner {
 public:
  virtual ~CmOwner() = default;
  /// Any event except a request. `subject` comes from ControlPort::set_cm_subject().
  virtual void on_cm_event(std::uint64_t subject, const CmEvent& event) = 0;
  /// The address of ControlPort::resolve() is resolved. Errors: peer_lost.
  virtual void on_address_resolved(std::uint64_t subject, const Result<void>& outcome) = 0;
};

/// Owns a descriptor in the port's epoll set.
class DescriptorOwner {
 public:
  virtual ~DescriptorOwner() = default;
  virtual void on_readable() = 0;
};

}  // namespace spinwire::control
