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

/// One turn while nothing is measured: a poll, and a control step if the configuration leaves
/// control steps to the application. Returns what Engine::poll() returns.
inline int drive(Engine& engine) noexcept {
  const int events = engine.poll();
  if (events < 0 || engine.config().engine.control == ControlMode::automatic) return events;
  const int more = engine.poll_control();
  return more < 0 ? more : events + more;
}

/// For measured stretches, where an Idler costs too much. Acts only after thousands of turns
/// without an event, when nothing but a peer's absence is measured. Then it yields the CPU, which
/// the peer may need, and takes a control step if the engine takes none. Hot.
class IdleCare {
 public:
  void turn(Engine& engine, int events) noexcept {
    if (events != 0) {
      idle_ = 0;
    } else if ((++idle_ & 0xfff) == 0) [[unlikely]] {
      if (engine.config().engine.control == ControlMode::manual) engine.poll_control();
      std::this_thread::yield();
    }
  }

 private:
  std::uint32_t idle_ = 0;
};

/// Drives the engine until `done()`. Returns false if the deadline passed first. Set-up.
template <typename Done>
bool spin_until(Engine& engine, Nanoseconds timeout, Done&& done) {
  const Deadline deadline(engine.clock(), timeout);
  while (!done()) {
    if (drive(engine) < 0 || deadline.passed()) return false;
  }
  return true;
}

}  // namespace spinwire::tools
