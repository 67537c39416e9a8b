// Sessions at the control port: opens them, serves them, makes their connections, and probes silent
// servers. Cold.
#pragma once

#include <string_view>

#include "base/error.h"
#include "control/control_port.h"
#include "rpc/session.h"
#include "spinwire/rpc.h"

namespace spinwire::rpc {

struct Rpc;

/// Services of the engine for its remote calls.
class EngineServices {
 public:
  virtual ~EngineServices() = default;
  /// Checks that the device works. Errors: no_device.
  [[nodiscard]] virtual Result<void> check_device(const char* asked) const = 0;
  /// Makes the next poll take a control step.
  virtual void step_soon() noexcept = 0;
  /// Makes the next poll do more than check completions.
  virtual void wake_soon() noexcept = 0;
};

/// The answer to a join of a session that does not exist here: refused.
inline tl::unexpected<Error> no_such_session() {
  return base::fail(Status::refused, "join a session", "the peer has no such session here",
                    "open another session");
}

/// The answer to a peer that joins a session by a connection.
struct JoinOutcome {
  Result<control::AcceptedConnection> answer;
  std::optional<std::uint64_t> made;  ///< subject of the connection, also if it failed afterwards
};

class SessionDialogues final : public control::SessionOwner,
                               public control::ServedSessionOwner,
                               public control::ProbeOwner {
 public:
  /// `connections` owns the handshakes of the sessions' connections.
  SessionDialogues(Rpc& rpc, control::ControlPort& port, control::ConnectionOwner& connections,
                   EngineServices& engine) noexcept
      : rpc_(rpc), port_(port), connections_(connections), engine_(engine) {}

  /// Opens a session. Errors: those of Engine::open_session().
  Result<ClientSession*> open(std::string_view address, const SessionOptions& options);
  /// Begins the next attempt to open a session. Errors: those of Engine::open_session().
  Result<void> dial_again(ClientSession& session);
  /// The server of a session that is being opened has challenged our address.
  void on_path_challenge(const ClientSession& session, std::uint64_t token) noexcept;
  /// Drops the dialogue of a session that is being opened, if there is one.
  void drop(const ClientSession& session) noexcept { port_.drop(session.handshake); }

  // Connections for long calls, and for sessions without datagrams.
  /// A session wants a connection: the next control step starts it.
  void request_connection() noexcept { engine_.step_soon(); }
  /// A callback is due: the next poll runs it.
  void wake_soon() noexcept { engine_.wake_soon(); }
  /// Starts wanted connections while the control port has room. Each control step.
  void begin_connections() noexcept;

  /// Probes a silent server's address. Returns false if that is not possible now.
  [[nodiscard]] bool probe(const ClientSession& session) noexcept;

  // For listeners. Errors are sent to the peer.
  Result<control::AcceptedSession> accept(control::HandshakeId handshake,
                                          const control::Address& from,
                                          const wire::SessionEnd& client, const PrivateData& ours);
  JoinOutcome accept_join(control::HandshakeId handshake, const control::Address& from,
                          const wire::JoinSession& join);

  // control::SessionOwner
  void on_opened(std::uint64_t subject, control::HandshakeId handshake,
                 const wire::SessionEnd& server) override;
  void on_open_refused(std::uint64_t subject, const wire::Refuse& refusal) override;
  void on_open_failed(std::uint64_t subject, const Error& why) override;
  // control::ServedSessionOwner
  void on_unconfirmed(std::uint64_t subject, std::uint64_t opened_at) override;
  void on_challenge_due(std::uint64_t subject, std::uint64_t token) override;
  void on_path_validated(std::uint64_t subject) override;
  // control::ProbeOwner
  void on_probe_ended(const control::ProbedEngine& probed, control::ProbeOutcome outcome) override;

 private:
  [[nodiscard]] ClientSession* find_opening(std::uint64_t subject) noexcept;
  /// May throw.
  [[nodiscard]] Error share_is_used_up(const char* asked, const control::Address& source) const;
  Result<void> dial(ClientSession& session, const control::Address& to);
  Result<void> connect(ClientSession& session);

  Rpc& rpc_;
  control::ControlPort& port_;
  control::ConnectionOwner& connections_;
  EngineServices& engine_;
};

}  // namespace spinwire::rpc
