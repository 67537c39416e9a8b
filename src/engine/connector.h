// Makes connections: over TCP, through rdma_cm, and out-of-band. It is the owner of their
// handshakes at the control port and moves their agents on. Cold.
#pragma once

#include <memory>
#include <string_view>

#include "agent/agent.h"
#include "agent/engine_context.h"
#include "control/control_port.h"
#include "engine/device_watch.h"
#include "engine/poll_schedule.h"
#include "spinwire/engine.h"

namespace spinwire::rpc {
struct Rpc;
}

namespace spinwire::engine {

class Connector final : public control::ConnectionOwner, public control::CmOwner {
 public:
  Connector(agent::EngineContext& context, control::ControlPort& port, DeviceWatch& device,
            CompletionDrain& completions, PollSchedule& schedule) noexcept
      : context_(context),
        port_(port),
        device_(device),
        completions_(completions),
        schedule_(schedule) {
    port_.set_cm_owner(*this);
  }

  // For the application. Errors: as Engine's functions of the same names.
  /// `calls` serves the sessions that peers open at the listener, once it is there.
  Result<Listener> listen(std::string_view address, const ListenOptions& options,
                          const std::unique_ptr<rpc::Rpc>& calls);
  Result<Connection> connect(std::string_view address, const ConnectOptions& options);
  Result<Connection> prepare(const PrepareOptions& options);
  /// The peer's endpoint of a prepared connection.
  Result<void> join(agent::Agent& a, const Endpoint& peer);

  // For the control step.
  /// An agent has taken a step of its set-up or its end.
  void on_setup_step(agent::Agent& a) noexcept;
  /// A connection that waited for its next attempt begins it.
  void reconnect(agent::Agent& a) noexcept;

  /// No callback of a listener's runs any more.
  void abort() noexcept { aborted_ = true; }

  // control::ConnectionOwner
  Result<void> on_accept(std::uint64_t subject, const Endpoint& peer) override;
  void on_confirmed(std::uint64_t subject) override;
  void on_refused(std::uint64_t subject, const wire::Refuse& refusal) override;
  void on_failed(std::uint64_t subject, const Error& why) override;
  // control::CmOwner, in rdma_cm_connections.cc
  void on_cm_event(std::uint64_t subject, const control::CmEvent& event) override;
  // in out_of_band.cc
  void on_address_resolved(std::uint64_t subject, const Result<void>& outcome) override;

  // For listeners.
  Result<control::AcceptedConnection> accept(control::HandshakeId handshake, std::string_view peer,
                                             const Endpoint& endpoint, const ListenOptions& options,
                                             const config::ConnectionAttributes& attributes);
  Result<void> accept_cm(control::CmId& id, const control::CmEvent& request,
                         const ListenOptions& options,
                         const config::ConnectionAttributes& attributes);

 private:
  [[nodiscard]] agent::Agent* find(std::uint64_t subject) noexcept {
    return context_.find(static_cast<std::uint32_t>(subject),
                         static_cast<std::uint32_t>(subject >> 32));
  }
  /// The first step towards a peer, in one of two ways.
  struct Attempt {
    control::HandshakeId handshake;
    std::unique_ptr<agent::CmLink> link;
  };
  Result<Attempt> begin(const control::Address& to, Via via, Nanoseconds timeout);
  void attach(Attempt attempt, agent::Agent& a) noexcept;
  void on_tcp_step(agent::Agent& a) noexcept;
  void on_out_of_band_step(agent::Agent& a) noexcept;
  void on_cm_step(agent::Agent& a) noexcept;
  Result<void> check_cm() const;
  Result<std::unique_ptr<agent::CmLink>> begin_cm(const control::Address& to, Nanoseconds timeout);
  void attach_cm(std::unique_ptr<agent::CmLink> link, agent::Agent& a) noexcept;
  agent::Agent* find_cm(std::uint64_t subject, const rdma_cm_id* id) noexcept;
  void on_cm_response(agent::Agent& a, const control::CmEvent& event);
  void on_cm_rejected(agent::Agent& a, const control::CmEvent& event);
  void on_cm_disconnected(agent::Agent& a);

  agent::EngineContext& context_;
  control::ControlPort& port_;
  DeviceWatch& device_;
  CompletionDrain& completions_;
  PollSchedule& schedule_;
  bool aborted_ = false;
};

}  // namespace spinwire::engine
