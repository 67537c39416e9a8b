// Loops that drive engines.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

#include "spinwire/clock.h"
#include "spinwire/config.h"
#include "spinwire/engine.h"

namespace spinwire::tools {

/// A point in time on a spinwire clock.
class Deadline {
 public:
  Deadline(const Clock& clock, Nanoseconds from_now) noexcept
      : clock_(clock), at_(clock.now() + clock.ticks(from_now)) {}
  [[nodiscard]] bool passed() const noexcept { return clock_.now() >= at_; }

 private:
  Clock clock_;
  std::uint64_t at_;
};

/// One turn outside of measured stretches: a poll, and the control step where the configuration
/// leaves that to the application. Answers as Engine::poll().
inline int drive(Engine& engine) noexcept {
  const int events = engine.poll();
  if (events < 0 || engine.config().engine.control == ControlMode::automatic) return events;
  const int more = engine.poll_control();
  return more < 0 ? more : events + more;
}

/// For measured stretches, where drive() would be too much: takes a control step where the engine
/// takes none itself, but only once in many idle turns. Hot.
class IdleControl {
 public:
  void turn(Engine& engine, int events) noexcept {
    if (events != 0 || (++idle_ & 0xfff) != 0) [[likely]]
      return;
    if (engine.config().engine.control == ControlMode::manual) engine.poll_control();
  }

 private:
  std::uint32_t idle_ = 0;
};

/// Drives the engine until `done()`; false if the deadline came first. Set-up.
template <typename Done>
bool spin_until(Engine& engine, Nanoseconds patience, Done&& done) {
  const Deadline deadline(engine.clock(), patience);
  while (!done()) {
    if (drive(engine) < 0 || deadline.passed()) return false;
  }
  return true;
}

/// Leaves the CPU to others while nothing happens and nobody measures: after 50 us without an event
/// each idle turn yields, after 20 ms it sleeps.
class Idler {
 public:
  explicit Idler(const Clock& clock) noexcept : clock_(clock), busy_(clock.now()) {}

  void turn(bool idle) {
    const std::uint64_t now = clock_.now();
    if (!idle) {
      busy_ = now;
    } else if (now - busy_ > clock_.ticks(std::chrono::milliseconds(20))) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    } else if (now - busy_ > clock_.ticks(std::chrono::microseconds(50))) {
      std::this_thread::yield();
    }
  }

 private:
  Clock clock_;
  std::uint64_t busy_;
};

}  // namespace spinwire::tools
