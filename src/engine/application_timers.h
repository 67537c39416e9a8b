// The timers that Engine::after() and Engine::every() start: records in the engine's timer wheel.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/timer_wheel.h"
#include "spinwire/timer.h"

namespace spinwire::engine {

/// Timer::kind of the application's timers; those of agents, handshakes and sessions are lower.
inline constexpr std::uint16_t kApplicationTimer = 64;

class ApplicationTimers {
 public:
  explicit ApplicationTimers(base::TimerWheel& wheel) noexcept : wheel_(wheel) {}
  ApplicationTimers(const ApplicationTimers&) = delete;
  ApplicationTimers& operator=(const ApplicationTimers&) = delete;
  ~ApplicationTimers() { cancel_all(); }

  struct Id {
    std::uint32_t index = 0;
    std::uint32_t generation = 0;
  };
  static constexpr std::uint32_t kMost = 1u << 20;

  /// Starts a timer. `interval` in ticks; 0: it runs once. Allocates only if more timers exist than
  /// ever before. Returns false if there are kMost. May throw std::bad_alloc.
  bool start(std::uint64_t deadline, std::uint64_t interval, const TimerCallback& run, Id& id);
  /// False: there is no such timer any more.
  bool cancel(Id id) noexcept;
  [[nodiscard]] bool is_scheduled(Id id) noexcept { return find(id) != nullptr; }
  /// Runs the callback of a timer of kApplicationTimer.
  void on_timer(base::Timer& timer, std::uint64_t now) noexcept;
  /// Calls `visit(Id, deadline, interval)` for each timer that is scheduled, both in ticks. Takes
  /// time in proportion to the most that there have been.
  template <typename Visit>
  void for_each(Visit&& visit) const {
    for (const auto& chunk : chunks_) {
      for (const Record& record : *chunk) {
        if (record.in_use && record.timer.scheduled())
          visit(Id{record.timer.index, record.generation}, record.timer.deadline, record.interval);
      }
    }
  }
  /// Ends all without running them.
  void cancel_all() noexcept;

 private:
  static constexpr std::uint32_t kChunk = 64;
  struct Record {
    base::Timer timer;
    std::uint32_t generation = 1;
    std::uint32_t next_free = 0;
    bool in_use = false;
    std::uint64_t interval = 0;
    TimerCallback run;
  };

  [[nodiscard]] Record& at(std::uint32_t index) noexcept {
    return (*chunks_[index / kChunk])[index % kChunk];
  }
  [[nodiscard]] Record* find(Id id) noexcept;
  bool add_chunk();
  void release(Record& record) noexcept;

  static constexpr std::uint32_t kNone = ~0u;
  base::TimerWheel& wheel_;
  std::vector<std::unique_ptr<std::array<Record, kChunk>>> chunks_;  ///< records never move
  std::uint32_t first_free_ = kNone;
};

}  // namespace spinwire::engine
