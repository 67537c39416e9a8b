// Sessions at the control port: opens them with servers, serves them to clients, makes their
// connections, and asks after silent servers. Cold.
#pragma once

#include <string_view>

#include "control/control_port.h"
#include "rpc/session.h"
#include "spinwire/rpc.h"

namespace spinwire::rpc {

struct Rpc;

/// What remote calls ask of the engine that they belong to.
class Host {
 public:
  virtual ~Host() = default;
  /// Refuses what needs a device that works. Errors: no_device.
  [[nodiscard]] virtual Result<void> check_device(const char* asked) const = 0;
  /// The next poll takes a control step.
  virtual void step_soon() noexcept = 0;
};

class SessionDialogues final : public control::SessionOwner,
                               public control::ServedSessionOwner,
                               public control::ProbeOwner {
 public:
  /// `connections` owns the handshakes of the sessions' connections.
  SessionDialogues(Rpc& rpc, control::ControlPort& port, control::ConnectionOwner& connections,
                   Host& host) noexcept
      : rpc_(rpc), port_(port), connections_(connections), host_(host) {}

  /// Errors: as Engine::open_session().
  Result<ClientSession*> open(std::string_view address, const SessionOptions& options);
  /// The server of a session that is being opened has challenged our address.
  void on_path_challenge(const ClientSession& session, std::uint64_t token) noexcept;
  /// Gives up the dialogue of a session that is being opened, if it is.
  void drop(const ClientSession& session) noexcept { port_.drop(session.handshake); }

  // Connections for long calls, and for sessions without datagrams.
  /// A session wants a connection: the next control step begins it.
  void request_connection() noexcept { host_.step_soon(); }
  /// In each control step: begins connections as far as the control port has room.
  void begin_connections() noexcept;

  /// Asks what is at a silent server's address. False: not now.
  [[nodiscard]] bool probe(const ClientSession& session) noexcept;

  // For listeners. Each error goes to the peer.
  Result<control::AcceptedSession> accept(const control::Address& from,
                                          const wire::SessionEnd& client);
  Result<control::AcceptedConnection> accept_join(control::HandshakeId handshake,
                                                  std::string_view peer,
                                                  const wire::JoinSession& join);

  // control::SessionOwner
  void on_opened(std::uint64_t subject, control::HandshakeId handshake,
                 const wire::SessionEnd& server) override;
  void on_open_refused(std::uint64_t subject, const wire::Refuse& refusal) override;
  void on_open_failed(std::uint64_t subject, const Error& why) override;
  // control::ServedSessionOwner
  void on_unconfirmed(std::uint64_t subject, std::uint64_t opened_at) override;
  void on_challenge_due(std::uint64_t subject, std::uint64_t token) override;
  // control::ProbeOwner
  void on_probe_ended(std::uint64_t incarnation, control::ProbeOutcome outcome) override;

 private:
  [[nodiscard]] ClientSession* find_opening(std::uint64_t subject) noexcept;
  Result<void> connect(ClientSession& session);

  Rpc& rpc_;
  control::ControlPort& port_;
  control::ConnectionOwner& connections_;
  Host& host_;
};

}  // namespace spinwire::rpc
