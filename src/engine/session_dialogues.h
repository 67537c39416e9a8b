// Sessions of remote calls at the control port: opens them with servers, serves them to clients,
// connects them for long calls, and asks after silent peers. Cold.
#pragma once

#include <memory>
#include <string_view>

#include "control/control_port.h"
#include "engine/device_watch.h"
#include "engine/poll_schedule.h"
#include "rpc/rpc.h"
#include "spinwire/engine.h"

namespace spinwire::engine {

class SessionDialogues final : public control::SessionOwner,
                               public control::ServedSessionOwner,
                               public control::ProbeOwner {
 public:
  /// `rpc` is made by start(). `connections` owns the handshakes of connections for long calls.
  SessionDialogues(agent::EngineContext& context, std::unique_ptr<rpc::Rpc>& rpc,
                   std::uint32_t& rpc_qp_num, control::ControlPort& port,
                   control::ConnectionOwner& connections, DeviceWatch& device,
                   PollSchedule& schedule) noexcept
      : context_(context),
        rpc_(rpc),
        rpc_qp_num_(rpc_qp_num),
        port_(port),
        connections_(connections),
        device_(device),
        schedule_(schedule) {}

  /// Takes what remote calls need, once. Errors: unsupported, limit, no_device, and those of
  /// rpc::open().
  Result<void> start();
  Result<void> serve(Method method, const MethodHandler& handler);
  /// Errors: as Engine::open_session().
  Result<rpc::ClientSession*> open(std::string_view address, const SessionOptions& options);
  /// Gives up a session that is being opened, if it is.
  void stop_opening(const rpc::ClientSession& session) noexcept { port_.drop(session.handshake); }

  /// In each control step: connects sessions that have a first long call or no datagrams, and asks
  /// after silent peers.
  void step() noexcept;

  // For listeners.
  Result<control::AcceptedSession> accept(const wire::SessionEnd& client);
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
  // control::ProbeOwner
  void on_peer_gone(std::uint64_t incarnation) override;

 private:
  [[nodiscard]] rpc::ClientSession* find_opening(std::uint64_t subject) noexcept;
  void connect_sessions() noexcept;
  Result<void> connect(rpc::ClientSession& session);
  void probe_silent_peers() noexcept;

  agent::EngineContext& context_;
  std::unique_ptr<rpc::Rpc>& rpc_;
  std::uint32_t& rpc_qp_num_;  ///< that its completions carry
  control::ControlPort& port_;
  control::ConnectionOwner& connections_;
  DeviceWatch& device_;
  PollSchedule& schedule_;
};

}  // namespace spinwire::engine
