// The engine behind its public handle: the parts that it is made of, and the poll that drives them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "agent/agent.h"
#include "agent/engine_context.h"
#include "base/owner_guard.h"
#include "control/control_port.h"
#include "engine/connector.h"
#include "engine/device_watch.h"
#include "engine/poll_schedule.h"
#include "rpc/rpc.h"
#include "spinwire/engine.h"

namespace spinwire::engine {

/// The Error of a set-up call from a thread or process that may not make it, as the guard found.
tl::unexpected<Error> misused(Status status, const char* asked);

}  // namespace spinwire::engine

namespace spinwire::detail {

/// The agent that a set-up call is about. Errors: not_connected, and those of misused().
Result<agent::Agent*> locate(const EngineSlot* slot, std::uint32_t index, std::uint32_t generation,
                             const char* asked);

/// What an engine is opened with besides its configuration.
struct OpenOptions {
  std::span<const verbs::Provider* const> providers = verbs::providers();
  control::Network* network = nullptr;  ///< a simulated one; null: the system's
  /// The pools' pages come when they are touched, and fewer registrations fit.
  bool sparse = false;
};

class EngineCore final : private engine::CompletionDrain, private rpc::Host {
 public:
  EngineCore(const Config& config, const Clock& clock, base::OwnerGuard guard);
  EngineCore(const EngineCore&) = delete;
  EngineCore& operator=(const EngineCore&) = delete;
  ~EngineCore() override;

  Result<void> open(const OpenOptions& options = {});
  /// Ends every connection: what is outstanding is flushed, each on_closed runs. The first part of
  /// destruction, while the application's handle still names this engine.
  void end() noexcept;
  /// No callback of the application's runs any more, as if its process had died.
  void abort() noexcept;
  [[nodiscard]] Result<void> audit();

  // Hot, in poll.cc.
  int poll() noexcept;
  /// The same, for a caller who has seen that it may. Inline: an idle poll is mostly this.
  [[gnu::always_inline]] int poll_owned() noexcept {
    ++polls;
    std::uint64_t now = context.clock.now();
    if (now < context.now) [[unlikely]]
      now = go_on();
    context.now = now;
    const int n = ibv_poll_cq(cq, poll_batch, completions.data());
    const bool found = (static_cast<std::uint64_t>(n) | agent::listed_work(context)) != 0;
    if (found || context.now >= schedule.next_wakeup) return poll_busy(n);
    return 0;
  }
  Status flush() noexcept;

  // In control_step.cc.
  int poll_control() noexcept;
  std::uint32_t control_step(std::uint64_t now) noexcept;

  // What the public face asks of the parts. An engine that is being destroyed begins nothing.
  Result<Listener> listen(std::string_view address, const ListenOptions& options);
  Result<Connection> connect(std::string_view address, const ConnectOptions& options);
  Result<Connection> prepare(const PrepareOptions& options);
  Result<void> join(agent::Agent& a, const Endpoint& peer) { return connector.join(a, peer); }
  Result<void> serve(Method method, const MethodHandler& handler);
  Result<Session> open_session(std::string_view address, const SessionOptions& options);
  /// Takes what remote calls need, once. Errors: those of rpc::open().
  Result<void> open_calls();
  void wake_soon() noexcept { schedule.wake_soon(); }
  void step_soon() noexcept override { schedule.step_soon(); }

  // In connection_settings.cc.
  [[nodiscard]] Result<void> check_access(Access asked) const;
  /// Errors: invalid_argument (memory of another engine).
  [[nodiscard]] Result<void> check_owner(const BufferSlice& slice) const;
  Result<void> configure(agent::Agent& a, const ConnectionSettings& settings);

  [[nodiscard]] agent::Agent* find(std::uint32_t index, std::uint32_t generation) noexcept {
    return context.find(index, generation);
  }

  // Hot.
  base::OwnerGuard guard;
  ibv_cq* cq = nullptr;
  int poll_batch = 0;
  engine::PollSchedule schedule;
  std::unique_ptr<rpc::Rpc> calls;  ///< once there is a method or a session
  std::uint32_t rpc_qp_num = 0;     ///< of `calls`; 0: no datagrams
  agent::EngineContext context;
  std::array<ibv_wc, 64> completions;
  std::uint64_t polls = 0;
  // Cold.
  control::ControlPort control;
  engine::DeviceWatch device_watch;
  engine::Connector connector;
  Status allocate_status = Status::ok;
  bool ending = false;         ///< no connection begins any more
  EngineCore* kept = nullptr;  ///< in a forked child: the engine that was left before this one

 private:
  /// Errors: not_connected once the engine is being destroyed.
  [[nodiscard]] Result<void> check_open(const char* asked) const;
  [[gnu::noinline]] int poll_busy(int count) noexcept;
  /// The tick of a poll whose clock has stepped back. Cold.
  [[gnu::noinline]] std::uint64_t go_on() noexcept { return context.clock.now_from(context.now); }
  std::uint32_t handle_batch(int count) noexcept;
  [[gnu::noinline]] std::uint32_t handle_mixed_batch(int count) noexcept;
  std::uint32_t handle_further_batches() noexcept;
  /// One poll's worth of completions; cold callers only.
  std::uint32_t poll_completions() noexcept {
    const int n = ibv_poll_cq(cq, poll_batch, completions.data());
    return n > 0 ? handle_batch(n) : 0;
  }
  void drain() noexcept override;
  [[nodiscard]] Result<void> check_device(const char* asked) const override {
    return device_watch.check_present(asked);
  }
  bool advance_agents() noexcept;
  void on_timer(base::Timer& timer) noexcept;
  Result<void> open_memory(bool sparse);
  void resolve_addresses();
  void end_connections() noexcept;
  void end_connection(agent::Agent& a) noexcept;
};

}  // namespace spinwire::detail
