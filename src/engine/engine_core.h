// The engine behind its public handle: its parts, and the poll that drives them.
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
#include "control/name_resolver.h"
#include "engine/application_timers.h"
#include "engine/connection_sums.h"
#include "engine/connector.h"
#include "engine/device_watch.h"
#include "engine/drain.h"
#include "engine/loss_probes.h"
#include "engine/memory_accesses.h"
#include "engine/poll_schedule.h"
#include "engine/publisher.h"
#include "engine/stall_detector.h"
#include "engine/wake_set.h"
#include "rpc/rpc_state.h"
#include "spinwire/engine.h"

namespace spinwire::engine {

/// The Error of a set-up call from the wrong thread or process, by the guard's diagnosis.
tl::unexpected<Error> misused(Status status, const char* asked);

}  // namespace spinwire::engine

namespace spinwire::detail {

/// The agent of a set-up call. Errors: not_connected, and those of misused().
Result<agent::Agent*> locate(const EngineSlot* slot, std::uint32_t index, std::uint32_t generation,
                             const char* asked);

/// Options of an engine besides its configuration.
struct OpenOptions {
  std::span<const verbs::Provider* const> providers = verbs::providers();
  control::Network* network = nullptr;  ///< a simulated one; null: the system's
  bool sparse = false;                  ///< pages of the pools are allocated when touched
  std::uint32_t registrations = 65536;  ///< of the application, at most
};

/// What Engine::open() does, for all but simulated engines. Errors: those of Engine::open().
Result<Engine> open_engine(const Config& config, const Clock& clock,
                           const OpenOptions& options = {});

class EngineCore final : private engine::CompletionProcessor, private rpc::EngineServices {
 public:
  EngineCore(const Config& config, const Clock& clock, base::OwnerGuard guard);
  EngineCore(const EngineCore&) = delete;
  EngineCore& operator=(const EngineCore&) = delete;
  ~EngineCore() override;

  Result<void> open(const OpenOptions& options = {});
  /// Ends every connection: outstanding operations are flushed, and each on_closed runs. The first
  /// part of destruction, while the application's handle still names this engine.
  void end() noexcept;
  /// Runs no callback of the application any more, as if its process had died.
  void abort() noexcept;
  /// Deletes an engine that was destroyed inside one of its callbacks, when the poll() or end()
  /// that runs the callback ends.
  void end_with_poll() noexcept;
  [[nodiscard]] Result<void> audit();

  // Hot, in poll.cc.
  int poll() noexcept;
  /// A poll whose caller has checked the thread. Inline, because an idle poll does little else.
  [[gnu::always_inline]] int poll_owned() noexcept {
    ++context.stats.polls;
    const std::uint64_t now = context.clock.now();
    // Also if the clock has stepped back.
    const std::uint64_t gap = now - context.now;
    const std::uint64_t reported =
        observe::kObservesHotPath ? schedule.reported_gap : engine::StallDetector::kNoGap;
    if (gap >= reported) [[unlikely]]
      return poll_after_gap(now);
    context.now = now;
    const int n = ibv_poll_cq(cq, poll_batch, completions.data());
    const bool found = (static_cast<std::uint64_t>(n) | agent::listed_work(context)) != 0;
    if (found || context.now >= schedule.next_wakeup) return poll_busy(n);
    return 0;
  }
  Status flush() noexcept;

  /// Runs `run`, which runs callbacks, inside or outside of a poll: callbacks find the engine
  /// polling. One of them may destroy the engine, which ends after `run`, or with the poll: then
  /// `this` may be gone. The caller has checked the thread.
  template <typename Run>
  void run_callbacks(Run&& run) noexcept {
    if (guard.polling()) return run();
    guard.enter_checked();
    run();
    if (destroyed) return (void)finish_destruction(0);
    guard.leave();
    (void)flush();  // what callbacks have deferred
  }

  // In control_step.cc.
  int poll_control() noexcept;
  std::uint32_t control_step(std::uint64_t now) noexcept;
  /// The tick of the control step that serves the next timer; PollSchedule::kNever if none is due.
  [[nodiscard]] std::uint64_t next_timer_step() const noexcept;
  /// Whether the next control step has work that no timer announces.
  [[nodiscard]] bool has_set_up_work() const noexcept;

  // In wait.cc.
  bool arm() noexcept;
  /// Whether what arm() has answered, true, still holds, although the engine was used since. Polls
  /// nothing, but posts deferred operations. If not, a poll is due.
  [[nodiscard]] bool stays_armed() noexcept;
  Status wait(Nanoseconds timeout) noexcept;
  [[nodiscard]] Nanoseconds next_deadline() const noexcept;
  /// Errors: limit, no_memory, system.
  Result<void> open_wake_set();

  // Requests of the public API. An engine that is being destroyed starts nothing.
  Result<Listener> listen(std::string_view address, const ListenOptions& options);
  Result<Listener> adopt_listener(int fd, const ListenOptions& options);
  Result<Connection> connect(std::string_view address, const ConnectOptions& options);
  Result<Connection> prepare(const PrepareOptions& options);
  Result<void> reload_keys();
  Result<void> resolve(std::string_view name, const ResolveCallback& done);
  Result<void> join(agent::Agent& a, const Endpoint& peer) { return connector.join(a, peer); }
  Result<void> serve(Method method, const MethodHandler& handler);
  Result<Session> open_session(std::string_view address, const SessionOptions& options);
  /// Allocates the resources of remote calls, once. Errors: those of rpc::open().
  Result<void> open_calls();
  void wake_soon() noexcept final { schedule.wake_soon(); }
  void step_soon() noexcept override { schedule.step_soon(); }

  [[nodiscard]] Result<void> check_access(Access asked) const;

  [[nodiscard]] agent::Agent* find(std::uint32_t index, std::uint32_t generation) noexcept {
    return context.find(index, generation);
  }

  // Hot.
  base::OwnerGuard guard;
  ibv_cq* cq = nullptr;
  int poll_batch = 0;
  engine::PollSchedule schedule;
  std::unique_ptr<rpc::Rpc> calls;  ///< null until there is a method or a session
  std::uint32_t rpc_qp_num = 0;     ///< of `calls`; 0: no datagrams
  agent::EngineContext context;
  std::array<ibv_wc, 64> completions;
  // Cold.
  control::ControlPort control;
  engine::DeviceWatch device_watch;
  engine::Connector connector;
  engine::LossProbes loss_probes;
  engine::WakeSet wake_set;
  engine::ApplicationTimers application_timers;
  control::NameResolver names;
  engine::Drain drain;
  engine::MemoryAccesses accesses;
  engine::ConnectionSums sums;
  engine::StallDetector stalls;
  engine::Publisher publisher;
  ReplyWritableCallback reply_writable;  ///< for `calls`, which may not be open yet
  Status allocate_status = Status::ok;
  bool ending = false;         ///< no connection may start any more
  bool destroyed = false;      ///< by a callback that is running; see end_with_poll()
  EngineCore* kept = nullptr;  ///< in a forked child: the previous abandoned engine

 private:
  /// Errors: not_connected once the engine drains or is being destroyed.
  [[nodiscard]] Result<void> check_open(const char* asked) const;
  [[gnu::noinline]] int poll_busy(int count) noexcept;
  /// A poll at `now`, which the stall detector is to know of.
  [[gnu::cold, gnu::noinline]] int poll_after_gap(std::uint64_t now) noexcept;
  [[gnu::cold, gnu::noinline]] int finish_destruction(std::uint32_t events) noexcept;
  std::uint32_t handle_batch(int count) noexcept;
  [[gnu::noinline]] std::uint32_t handle_mixed_batch(int count) noexcept;
  std::uint32_t handle_further_batches() noexcept;
  /// Handles one batch of completions; for cold callers.
  std::uint32_t poll_completions() noexcept {
    const int n = ibv_poll_cq(cq, poll_batch, completions.data());
    return n > 0 ? handle_batch(n) : 0;
  }
  void process_all_completions() noexcept override;
  [[nodiscard]] Result<void> check_device(const char* asked) const override {
    return device_watch.check_present(asked);
  }
  bool prepare_sleep() noexcept;
  bool end_sleep() noexcept;
  void step_now() noexcept;
  [[nodiscard]] bool awaits_unannounced() noexcept;
  [[nodiscard]] bool has_callbacks_due() const noexcept;
  [[nodiscard]] std::uint64_t sleep_deadline(std::uint64_t now, bool is_brief) noexcept;
  bool advance_agents() noexcept;
  /// Reports the end of a connection, and frees its record unless it is made again.
  void finish(agent::Agent& a) noexcept;
  void on_timer(base::Timer& timer) noexcept;
  Result<void> open_memory(const detail::OpenOptions& options);
  void resolve_addresses();
  void log_half_open_limit() const;
  void end_connections() noexcept;
};

/// The engine of a slot; null once it is closed. Hot.
inline EngineCore* core_at(const EngineSlot* slot) noexcept {
  return static_cast<EngineCore*>(slot->target);
}

}  // namespace spinwire::detail
