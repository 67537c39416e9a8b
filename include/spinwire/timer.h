// Timers of the application, which run in the engine's control steps.
#pragma once

#include <cstdint>

#include "spinwire/callback.h"
#include "spinwire/export.h"
#include "spinwire/status.h"

namespace spinwire {

namespace detail {
struct EngineSlot;
struct Internals;
}  // namespace detail

/// Runs in a control step: inside poll(), arm() or wait(), or, if engine.control is manual, inside
/// poll_control(). May cancel its own timer and start others.
using TimerCallback = Callback<void()>;

/// Names a timer that Engine::after() or Engine::every() started. A plain value: dropping it does
/// not cancel the timer. All functions may be called from callbacks. Hot.
class SPINWIRE_API Timer {
 public:
  Timer() noexcept = default;
  /// Cancels the timer: its callback does not run any more. Answers ok, or not_connected: the timer
  /// has run, was cancelled, or its engine is gone.
  Status cancel() noexcept;
  /// Whether the callback will still run.
  [[nodiscard]] bool scheduled() const noexcept;

 private:
  friend struct detail::Internals;

  Timer(detail::EngineSlot* slot, std::uint32_t index, std::uint32_t generation) noexcept
      : slot_(slot), index_(index), generation_(generation) {}

  detail::EngineSlot* slot_ = nullptr;
  std::uint32_t index_ = 0;
  std::uint32_t generation_ = 0;
};

}  // namespace spinwire
