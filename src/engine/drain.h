// Engine::drain(): ends everything in order, for a restart. In three steps, each when the one
// before is done:
//   1. the sessions that peers have opened here: running calls end, and may use all else meanwhile;
//   2. the sessions that are open here: their calls end;
//   3. all connections: operations of both ends complete, and messages under way are delivered. A
//      half-open one becomes ready first, if its peer may have finished the handshake already.
// Peers that come meanwhile are refused until then and afterwards. Cold.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "agent/engine_context.h"
#include "base/timer_wheel.h"
#include "engine/connector.h"
#include "engine/poll_schedule.h"
#include "spinwire/drain.h"

namespace spinwire::engine {

constexpr Goodbye goodbye_with(Nanoseconds retry_after) noexcept {
  return {GoodbyeReason::draining, retry_after};
}

/// Timer::kind of the drain's deadline.
inline constexpr std::uint16_t kDrainTimer = 65;

class Drain {
 public:
  Drain(agent::EngineContext& context, Connector& connector, const std::unique_ptr<rpc::Rpc>& calls,
        PollSchedule& schedule) noexcept
      : context_(context), connector_(connector), calls_(calls), schedule_(schedule) {
    timer_.kind = kDrainTimer;
  }
  ~Drain() { context_.timers.cancel(timer_); }
  Drain(const Drain&) = delete;
  Drain& operator=(const Drain&) = delete;

  /// Begins, or gives a drain that is under way another deadline and other options.
  void begin(Nanoseconds timeout, const DrainOptions& options) noexcept;
  /// Goes on if it can. Each control step. Runs on_drained.
  void step(std::uint64_t now) noexcept;
  /// Drops the callback, as if the process had died.
  void abort() noexcept { options_.on_drained = nullptr; }

  /// From begin() on, for good.
  [[nodiscard]] bool has_begun() const noexcept { return stage_ != Stage::none; }
  [[nodiscard]] bool is_under_way() const noexcept { return has_begun() && stage_ != Stage::over; }
  [[nodiscard]] bool is_over() const noexcept { return stage_ == Stage::over; }
  /// What it waits for, in words; for people.
  [[nodiscard]] std::string_view stage_name() const noexcept;
  /// Until the deadline; 0 once it has passed, or the drain is over.
  [[nodiscard]] Nanoseconds time_left() const noexcept;
  /// What peers are told when the engine ends; none unless it has begun.
  [[nodiscard]] Goodbye goodbye() const noexcept;

 private:
  enum class Stage : std::uint8_t { none, served, sessions, connections, over };

  /// Closes the connections that can be told so.
  void close_connections() noexcept;
  void cut() noexcept;
  void finish() noexcept;

  agent::EngineContext& context_;
  Connector& connector_;
  const std::unique_ptr<rpc::Rpc>& calls_;
  PollSchedule& schedule_;
  Stage stage_ = Stage::none;
  DrainOptions options_;
  DrainReport report_;
  std::uint64_t deadline_ = 0;  ///< tick
  bool has_half_open_ = false;  ///< connections are to be closed, perhaps again
  base::Timer timer_;
};

}  // namespace spinwire::engine
