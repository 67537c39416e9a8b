// What a loop does in a turn without work: spin, pause, yield the processor, or sleep.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "spinwire/clock.h"
#include "spinwire/engine.h"
#include "spinwire/export.h"
#include "spinwire/status.h"

namespace spinwire {

/// What a loop does in a turn without work.
enum class IdleStrategy : std::uint8_t {
  spin,   ///< nothing: the loop polls again at once. Shortest latency, one processor
  pause,  ///< the processor's pause instruction: leaves more to its other hardware thread
  yield,  ///< pauses at first, then gives the processor to other threads that want it
  wait,   ///< pauses at first, then sleeps by Engine::wait(): an idle loop costs next to nothing
};

/// What an Idler does in a turn without work, and when.
struct IdlerOptions {
  IdleStrategy strategy = IdleStrategy::wait;  ///< what a turn without work does
  /// Turns without work in a row that only pause, before `yield` yields and `wait` sleeps. What
  /// arrives meanwhile is found a pause instruction later than by spinning.
  std::uint32_t pauses = 2000;
  /// The longest sleep of a turn.
  Nanoseconds timeout = std::chrono::seconds(1);
};

/// Call idle() at the end of each turn of the loop:
///
///   Idler idler;
///   while (running && idler.idle(engine, engine.poll()) == Status::ok) {
///   }
///
/// An Idler belongs to one loop. A loop with several engines calls turn() instead.
class SPINWIRE_API Idler {
 public:
  Idler() noexcept = default;
  /// An idler with this strategy, or these options.
  explicit Idler(IdleStrategy strategy) noexcept { options_.strategy = strategy; }
  /// An idler with this strategy, or these options.
  explicit Idler(const IdlerOptions& options) noexcept : options_(options) {}

  /// `work`: what the turn did; 0 if nothing, negative if poll() failed. Callbacks may run inside,
  /// as in poll(). With engine.control "manual", call Engine::poll_control() as well. Answers ok;
  /// the Status of a negative `work`; and with IdleStrategy::wait the errors of a sleep:
  ///   wrong_thread, forked_child, not_connected, reentrant (inside a callback)
  ///   system  the operating system refused
  /// While descriptors or memory for them are used up, IdleStrategy::wait does what `yield` does.
  /// Hot, unless it sleeps.
  Status idle(Engine& engine, int work) noexcept {
    if (work > 0) [[likely]] {
      turns_ = 0;
      return Status::ok;
    }
    return idle_turn(engine, work);
  }
  /// Most engines of turn().
  static constexpr std::size_t kMostEngines = 16;
  /// A whole turn of a loop with several engines: polls each of them, and does what idle() does if
  /// none had work. IdleStrategy::wait sleeps until one of them has something to do:
  ///
  ///   Engine* const engines[] = {&inside, &outside};
  ///   while (running && idler.turn(engines) == Status::ok) {
  ///   }
  ///
  /// With a manual clock, IdleStrategy::wait does what `yield` does. Answers ok; the Status of a
  /// poll() that failed; and:
  ///   invalid_argument  more than kMostEngines
  ///   system            the operating system refused a sleep
  /// Hot, unless it sleeps.
  Status turn(std::span<Engine* const> engines) noexcept;
  /// The options in effect.
  [[nodiscard]] const IdlerOptions& options() const noexcept { return options_; }

 private:
  Status idle_turn(Engine& engine, int work) noexcept;
  bool pause_or_yield() noexcept;
  [[nodiscard]] Status sleep(std::span<Engine* const> engines) const noexcept;

  IdlerOptions options_;
  std::uint32_t turns_ = 0;  ///< without work
};

}  // namespace spinwire
