// The engine behind its public handle.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "agent/agent.h"
#include "agent/engine_context.h"
#include "base/owner_guard.h"
#include "control/epoll_set.h"
#include "control/exchange.h"
#include "control/socket.h"
#include "rpc/rpc.h"
#include "spinwire/engine.h"

namespace spinwire::engine {

/// One TCP exchange and the connection that comes out of it.
struct Handshake {
  control::Exchange exchange;
  std::uint32_t agent = agent::kNone;  ///< none until the peer's hello
  std::uint32_t agent_generation = 0;
  std::uint32_t index = 0;
  std::uint32_t listener = agent::kNone;  ///< inbound
  std::uint32_t listener_generation = 0;
  bool inbound = false;
  bool spoken = false;     ///< hello or accept is sent
  bool confirmed = false;  ///< ready is sent
  bool refusing = false;
  bool watched = false;       ///< in the epoll set
  std::uint32_t serves = 0;   ///< inbound: the session that it has opened here
  std::uint32_t session = 0;  ///< outbound: the session of ours that it is to open
  std::uint32_t joins = 0;    ///< outbound: the session of ours that the connection is for
  std::uint64_t asks = 0;     ///< outbound: whether this engine, by its incarnation, is there
  control::Interest interest = control::Interest::none;
  std::uint64_t begun = 0;
  base::Timer timer;
};

/// The first step towards a peer, in one of two ways.
struct Attempt {
  Handshake* exchange;
  std::unique_ptr<agent::CmLink> link;
};

struct Listening {
  control::ListenSocket socket;  ///< or
  control::CmId cm;
  ListenOptions options;
  config::ConnectionAttributes attributes;
  std::uint32_t generation = 0;
};

inline constexpr std::uint16_t kHandshakeTimer = 3;
/// Tokens of the epoll set: a listener's bit, rdma_cm's bit, generation, index.
inline constexpr std::uint32_t kTokenGenerations = 0x3fffffff;
inline constexpr std::uint64_t kCmToken = std::uint64_t{1} << 62;  ///< in the epoll set
inline constexpr std::uint64_t kDeviceToken = kCmToken | 1;        ///< the device's async events

/// The Error of a set-up call from where it must not come, as the guard diagnosed.
tl::unexpected<Error> misused(Status status, const char* asked);
tl::unexpected<Error> ending_error(const char* asked);
/// What the limits say to one more connection.
Error no_more_connections(const agent::EngineContext& s, std::string asked);
/// Whether a time-out is none, or one that a connection may have.
Result<void> check_timeout(const char* asked, Nanoseconds timeout);
/// The peer as errors and Connection::peer() name it.
void name_peer(agent::Agent& a, std::string_view text) noexcept;

}  // namespace spinwire::engine

namespace spinwire::detail {

/// The agent that a set-up call is about, or why not.
Result<agent::Agent*> locate(const EngineSlot* slot, std::uint32_t index, std::uint32_t generation,
                             const char* asked);

class EngineCore {
 public:
  EngineCore(const Config& config, const Clock& clock, base::OwnerGuard guard);
  EngineCore(const EngineCore&) = delete;
  EngineCore& operator=(const EngineCore&) = delete;
  ~EngineCore();

  /// With a device of one of these providers.
  Result<void> open(std::span<const verbs::Provider* const> from = verbs::providers());
  /// Every connection ends here and now: what is outstanding is flushed, each on_closed runs. The
  /// first part of destruction, while the application's handle still names this engine.
  void end() noexcept;
  /// No callback of the application's runs any more: it is to end as if its process had died.
  void fall_silent() noexcept;

  // Hot, in poll.cc.
  int poll() noexcept;
  /// The same, for a caller who has seen that it may.
  int poll_owned() noexcept;
  Status flush() noexcept;

  // In engine.cc.
  [[nodiscard]] Result<void> audit();

  // In control_step.cc.
  int poll_control() noexcept;
  std::uint32_t control_step(std::uint64_t now) noexcept;

  // In handshakes.cc.
  Result<Listener> listen(std::string_view address, const ListenOptions& options);
  void stop_listening(std::uint32_t index, std::uint32_t generation) noexcept;
  [[nodiscard]] engine::Listening* find_listener(std::uint32_t index,
                                                 std::uint32_t generation) noexcept;
  Result<Connection> connect(std::string_view address, const ConnectOptions& options);

  // In out_of_band.cc.
  Result<Connection> prepare(const PrepareOptions& options);
  Result<void> join(agent::Agent& a, const Endpoint& peer);

  // In device_events.cc.
  /// Refuses what needs a device that has not failed.
  [[nodiscard]] Result<void> check_device_left(const char* asked) const;

  // In connection_settings.cc.
  [[nodiscard]] Result<void> check_access(Access asked) const;
  Result<void> configure(agent::Agent& a, const ConnectionSettings& settings);

  // In rdma_cm_connections.cc.
  Result<void> open_cm();
  Result<void> listen_through_cm(engine::Listening& listening, const control::Address& at,
                                 std::uint32_t index);
  Result<std::unique_ptr<agent::CmLink>> begin_through_cm(const control::Address& to,
                                                          Nanoseconds patience);

  // In sessions.cc.
  /// Takes what remote calls need, once.
  Result<void> start_rpc();
  void stop_opening(const rpc::ClientSession& c) noexcept;
  Result<void> serve(Method method, const MethodHandler& handler);
  Result<Session> open_session(std::string_view address, const SessionOptions& options);
  /// The next poll does more than to look for completions.
  void wake_soon() noexcept { wake_at = 0; }
  /// And it takes a control step, unless those are the application's to take.
  void step_soon() noexcept {
    if (next_control != ~std::uint64_t{0}) next_control = 0;
    wake_soon();
  }

  /// Tick since when what this poll finds may have waited, as far as control steps tell.
  [[nodiscard]] std::uint64_t last_here() const noexcept {
    const std::uint64_t due = next_control + control_interval;
    return context.now < due || due < control_interval ? context.now : next_control;
  }

  [[nodiscard]] agent::Agent* find(std::uint32_t index, std::uint32_t generation) noexcept {
    return context.find(index, generation);
  }

  // Hot.
  base::OwnerGuard guard;
  ibv_cq* cq = nullptr;
  int poll_batch = 0;
  std::uint64_t wake_at = 0;        ///< tick from which a poll has to do more than to look
  std::uint64_t next_control = 0;   ///< tick; never in manual mode
  std::unique_ptr<rpc::Rpc> calls;  ///< once there is a method or a session
  std::uint32_t rpc_qp_num = 0;
  agent::EngineContext context;
  std::array<ibv_wc, 64> completions;
  std::uint64_t polls = 0;
  // Cold.
  std::uint64_t control_interval = 0;  ///< ticks
  Status allocate_status = Status::ok;
  DeviceEventCallback on_device_event;
  std::uint64_t next_device_look = 0;  ///< tick; never again once it is gone
  control::EpollSet epoll;
  control::LocalHost* host = nullptr;  ///< in a simulated network; null: the system's sockets
  /// The pools' pages come when touched, and there is room for fewer registrations; set before
  /// open().
  bool sparse = false;
  const char* device_lost = nullptr;  ///< the event after which no connection is possible
  bool device_watched = false;        ///< the epoll set tells of the device's async events
  control::CmChannel cm;              ///< once it was asked for
  base::IndexPool<engine::Handshake> handshakes;
  std::vector<std::unique_ptr<engine::Listening>> listeners;
  std::uint32_t listener_generation = 0;
  std::uint32_t inbound_handshakes = 0;
  std::uint32_t outbound_handshakes = 0;
  bool ending = false;         ///< no connection begins any more
  EngineCore* kept = nullptr;  ///< in a forked child: the engine that was left before this one

 private:
  [[nodiscard]] Result<config::ConnectionAttributes> resolve(const ConnectionSettings& settings,
                                                             Via via);
  [[gnu::noinline]] int poll_busy(int count) noexcept;
  std::uint32_t take_batch(int count) noexcept;
  [[gnu::noinline]] std::uint32_t take_mixed_batch(int count) noexcept;
  std::uint32_t take_further_batches() noexcept;
  /// One poll's worth of completions; cold callers only.
  std::uint32_t drain_completions() noexcept {
    const int n = ibv_poll_cq(cq, poll_batch, completions.data());
    return n > 0 ? take_batch(n) : 0;
  }
  void drain() noexcept;
  bool take_setup_step() noexcept;
  Result<void> begin_session(rpc::ClientSession& c, const control::Address& to);
  void progress_session(engine::Handshake& h) noexcept;
  void forget_opening(const engine::Handshake& h) noexcept;
  void progress_serving(engine::Handshake& h) noexcept;
  void take_open_session(engine::Handshake& h, const wire::SessionEnd& asked) noexcept;
  void take_session_answer(engine::Handshake& h, rpc::ClientSession& c) noexcept;
  void ask_silent() noexcept;
  Result<void> ask(const rpc::ClientSession& c);
  void progress_asking(engine::Handshake& h) noexcept;
  void take_asking(engine::Handshake& h, std::uint64_t incarnation) noexcept;
  void connect_sessions() noexcept;
  Result<void> connect_session(rpc::ClientSession& c);
  void say_join(engine::Handshake& h, agent::Agent& a) noexcept;
  void take_join(engine::Handshake& h, const wire::JoinSession& join) noexcept;
  Result<void> watch_device();
  void take_async_events() noexcept;
  void look_for_device() noexcept;
  void take_event(const ibv_async_event& found) noexcept;
  void fail_all(const char* what) noexcept;
  void take_timer(base::Timer& timer) noexcept;
  void look_at_sockets() noexcept;
  void accept_from(std::uint32_t index, std::uint32_t generation) noexcept;
  bool make_room() noexcept;
  void progress(engine::Handshake& h) noexcept;
  void progress_inbound(engine::Handshake& h) noexcept;
  void progress_outbound(engine::Handshake& h) noexcept;
  void progress_by_hand(agent::Agent& a) noexcept;
  void progress_through_cm(agent::Agent& a) noexcept;
  void take_cm_events() noexcept;
  void take_cm_request(const control::CmNews& news);
  void take_cm_news(const control::CmNews& news);
  void take_cm_answer(agent::Agent& a, const control::CmNews& news);
  void take_cm_refusal(agent::Agent& a, const control::CmNews& news);
  void take_cm_end(agent::Agent& a);
  agent::Agent* agent_of(const control::CmNews& news) noexcept;
  void take_hello(engine::Handshake& h) noexcept;
  void take_confirmation(engine::Handshake& h, agent::Agent& a) noexcept;
  void take_answer(engine::Handshake& h, agent::Agent& a) noexcept;
  void say(engine::Handshake& h, const wire::Frame& frame) noexcept;
  void refuse(engine::Handshake& h, const Error& why) noexcept;
  void watch(engine::Handshake& h) noexcept;
  void drop(engine::Handshake& h) noexcept;
  engine::Handshake* begin_handshake(bool inbound) noexcept;
  Result<engine::Handshake*> begin_exchange(const control::Address& to);
  Result<engine::Attempt> begin(const control::Address& to, Via via, Nanoseconds patience);
  void attach(engine::Attempt attempt, agent::Agent& a) noexcept;
  void attach_link(std::unique_ptr<agent::CmLink> link, agent::Agent& a) noexcept;
  Result<void> listen_on_socket(engine::Listening& listening, const control::Address& at,
                                std::uint32_t index);
  void reconnect(agent::Agent& a) noexcept;
  agent::Agent* agent_of(const engine::Handshake& h) noexcept {
    return h.agent == agent::kNone ? nullptr : find(h.agent, h.agent_generation);
  }
  void end_connections() noexcept;
  void end_connection(agent::Agent& a) noexcept;
};

}  // namespace spinwire::detail
