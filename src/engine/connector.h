// Makes connections over TCP, through rdma_cm, and out-of-band. Owns their handshakes at the
// control port, and advances their agents. Cold.
#pragma once

#include <memory>
#include <string_view>

#include "agent/agent.h"
#include "agent/connecting.h"
#include "control/control_port.h"
#include "engine/accepted_connections.h"
#include "engine/device_watch.h"
#include "engine/poll_schedule.h"
#include "spinwire/engine.h"

namespace spinwire::rpc {
struct Rpc;
}

namespace spinwire::engine {

/// What a listener gives to its peers, and asks the application.
struct ListenTerms {
  ListenOptions options;
  config::ConnectionAttributes attributes;
  PrivateData private_data;
};

class Connector final : public control::ConnectionOwner, public control::CmOwner {
 public:
  Connector(agent::EngineContext& context, control::ControlPort& port, DeviceWatch& device,
            CompletionProcessor& completions, PollSchedule& schedule) noexcept
      : context_(context),
        port_(port),
        device_(device),
        completions_(completions),
        schedule_(schedule),
        accepted_(context.config.connections) {
    port_.set_cm_owner(*this);
  }

  // For the application. Errors: those of Engine's functions with these names.
  /// `calls` serves the sessions that peers open at the listener, once remote calls are open.
  Result<Listener> listen(std::string_view address, const ListenOptions& options,
                          const std::unique_ptr<rpc::Rpc>& calls);
  Result<Listener> adopt_listener(int fd, const ListenOptions& options,
                                  const std::unique_ptr<rpc::Rpc>& calls);
  Result<Connection> connect(std::string_view address, const ConnectOptions& options);
  Result<Connection> prepare(const PrepareOptions& options);
  /// Takes the peer's endpoint of a prepared connection.
  Result<void> join(agent::Agent& a, const Endpoint& peer);

  // For the control step.
  /// An agent has taken a step of its set-up or its tear-down.
  void on_setup_step(agent::Agent& a) noexcept;
  /// Starts the next attempt of a connection that backs off.
  void reconnect(agent::Agent& a) noexcept;

  /// The agent's record is about to be free.
  void on_finish(const agent::Agent& a) noexcept { accepted_.remove(agent::subject_of(a)); }

  /// Listeners refuse new connections and sessions from now on, with this goodbye. Sessions that
  /// exist may still make their connections.
  void refuse_peers(const Goodbye& goodbye) noexcept { refusal_ = goodbye; }
  /// Errors: refused, after refuse_peers().
  [[nodiscard]] Result<void> check_accepting() const;

  /// No callback of a listener's runs any more.
  void abort() noexcept { aborted_ = true; }

  // control::ConnectionOwner
  Result<void> on_accept(std::uint64_t subject, const Endpoint& peer) override;
  void on_confirmed(std::uint64_t subject) override;
  void on_refused(std::uint64_t subject, const wire::Refuse& refusal) override;
  void on_failed(std::uint64_t subject, const Error& why) override;
  [[nodiscard]] const verbs::Place* own_place(std::uint64_t subject) const noexcept override;
  // control::CmOwner, in rdma_cm_connections.cc
  void on_cm_event(std::uint64_t subject, const control::CmEvent& event) override;
  // in out_of_band.cc
  void on_address_resolved(std::uint64_t subject, const Result<void>& outcome) override;

  // For listeners.
  /// Null if the engine uses this port and GID itself.
  [[nodiscard]] const verbs::Place* if_own(const verbs::Place& place) const noexcept;
  /// Implements ListenerOwner::admit().
  Result<control::Admission> admit(const control::Address& peer, const Endpoint* endpoint);
  Result<control::AcceptedConnection> accept(control::HandshakeId handshake,
                                             const control::Address& peer, const Endpoint& endpoint,
                                             const ListenTerms& terms);
  /// Asks the application whether to accept a client through rdma_cm. Answers what to give to it.
  Result<PrivateData> ask_about_cm(control::HandshakeId handshake, const control::CmId& id,
                                   const control::CmHello& hello, const ListenTerms& terms) const;
  /// Makes the connection of a client that the application accepts, and gives `ours` to it.
  Result<control::AcceptedConnection> accept_cm(control::HandshakeId handshake, control::CmId& id,
                                                const control::CmHello& hello,
                                                const PrivateData& ours, const ListenTerms& terms);
  /// Asks the application whether to accept a peer that asks for a session. Answers what to give to
  /// it. Errors: refused.
  Result<PrivateData> ask_about_session(control::HandshakeId handshake,
                                        const control::Address& peer,
                                        const wire::SessionEnd& client, const ListenTerms& terms);
  /// Counts a connection that another part has accepted, for its source. `ending`: it has failed
  /// since, and its record is not free yet.
  void count(std::uint64_t subject, const control::Address& source, bool ending = false) noexcept;

 private:
  [[nodiscard]] agent::Agent* find(std::uint64_t subject) const noexcept {
    return context_.find(static_cast<std::uint32_t>(subject),
                         static_cast<std::uint32_t>(subject >> 32));
  }
  [[nodiscard]] Result<control::Admission> room_for(const control::Address& source) const;
  [[nodiscard]] Result<control::Admission> admit(const control::Address& source);
  /// The source has no room, as `room` says: a peer that was never heard gives way, or a half-open
  /// connection of the source's own.
  Result<control::Admission> make_room(const control::Address& source,
                                       Result<control::Admission> room);
  [[nodiscard]] std::uint32_t free_records() const noexcept;
  /// The agent of a handshake that is over; null if the agent is gone, or is ready all the same.
  agent::Agent* find_unready(std::uint64_t subject) noexcept;
  /// The first step towards a peer: over TCP or through rdma_cm.
  struct Attempt {
    control::HandshakeId handshake;
    std::unique_ptr<agent::CmLink> cm;  ///< null: over TCP
  };
  Result<Attempt> begin(const control::Address& to, Via via, Nanoseconds timeout);
  /// Begins the first attempt of a plan that succeeds so far, at this round's addresses through its
  /// local paths, and gives the connection that path.
  Result<Attempt> begin_first(agent::ReconnectPlan& plan, Via via, Nanoseconds timeout,
                              verbs::QueuePairOptions& queue_pair);
  void attach(Attempt attempt, agent::Agent& a) noexcept;
  void end_handshake(const agent::Agent& a) noexcept;
  void send_frame(agent::Agent& a, agent::HandshakeStep step) noexcept;
  /// Counts an inbound connection and shows it to the application.
  Result<control::AcceptedConnection> introduce(agent::Agent& a, const control::Address& from,
                                                const Endpoint& endpoint, const ListenTerms& terms);
  /// on_accept may have given the connection another port or GID than its listener's, from which
  /// the peer's address is not known yet.
  Result<void> resolve_if_moved(agent::Agent& a, const Endpoint& peer, const ListenTerms& terms);
  [[nodiscard]] Result<ListenTerms> terms_of(const char* asked, const ListenOptions& options,
                                             bool through_cm) const;
  Result<PrivateData> ask_to_connect(const PeerIdentity& peer, const ListenTerms& terms,
                                     bool carries_data = true) const;
  /// Whether this device may connect without TCP: see ControlPort::check_adapter(). Errors:
  /// unauthenticated.
  Result<void> check_adapter(const char* asked, const char* remedy) const;
  Result<void> check_cm() const;
  /// The endpoint and private data of a client through rdma_cm, if we accept clients at all.
  Result<Endpoint> read_cm_hello(const control::CmId& id, const control::CmHello& hello) const;
  Result<Attempt> begin_cm(const control::Address& to, Nanoseconds timeout);
  void renew_cm_id(agent::Agent& a) noexcept;
  void attach_cm(std::unique_ptr<agent::CmLink> link, agent::Agent& a) noexcept;
  agent::Agent* find_cm(std::uint64_t subject, const rdma_cm_id* id) noexcept;

  agent::EngineContext& context_;
  control::ControlPort& port_;
  DeviceWatch& device_;
  CompletionProcessor& completions_;
  PollSchedule& schedule_;
  AcceptedConnections accepted_;
  Goodbye refusal_;  ///< of all peers; none: they are accepted
  bool aborted_ = false;
};

}  // namespace spinwire::engine
