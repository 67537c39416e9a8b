// Public API of waiting: Engine::wait() and its like, timers, Idler.
#include <errno.h>
#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "base/error.h"
#include "base/internals.h"
#include "engine/api/operate.h"
#include "spinwire/engine.h"
#include "spinwire/idler.h"
#include "spinwire/timer.h"

namespace spinwire {

using detail::EngineCore;

bool Engine::arm() noexcept { return core_ != nullptr && core_->arm(); }

Status Engine::wait(Nanoseconds timeout) noexcept {
  return core_ != nullptr ? core_->wait(timeout) : Status::not_connected;
}

Status Engine::wake() const noexcept {
  const std::uintptr_t word = slot_->word.load(std::memory_order_relaxed);
  if (word == base::OwnerGuard::kEnded) return Status::not_connected;
  if (word == 0) return Status::forked_child;
  core_->wake_set.wake();
  return Status::ok;
}

Result<int> Engine::fd() {
  return engine::set_up(*slot_, "sleep", [&] {
    return core_->open_wake_set().map([&] { return core_->wake_set.descriptor(); });
  });
}

Nanoseconds Engine::next_deadline() const noexcept {
  const EngineCore* const core = engine::checked_core_of(slot_);
  return core != nullptr ? core->next_deadline() : Nanoseconds(0);
}

namespace {

/// `repeats`: the time is also the interval.
Result<Timer> start(detail::EngineSlot& slot, Nanoseconds time, bool repeats,
                    const TimerCallback& callback) {
  return engine::set_up(slot, "start a timer", [&]() -> Result<Timer> {
    if (time.count() < (repeats ? 1 : 0) || !callback) {
      return base::fail(Status::invalid_argument, "start a timer",
                        callback ? base::format("a time of {} ns", time.count())
                                 : std::string("an empty callback"),
                        "give a callback, a delay of 0 or more, an interval above 0");
    }
    EngineCore& core = *detail::core_at(&slot);
    Clock& clock = core.context.clock;
    // A tick may be longer than the interval.
    const std::uint64_t ticks = repeats ? std::max<std::uint64_t>(clock.ticks(time), 1) : 0;
    const std::uint64_t now = clock.now_from(core.context.now);
    const std::uint64_t deadline = now + std::min(clock.ticks(time), ~now);
    engine::ApplicationTimers::Id id;
    if (!core.application_timers.start(deadline, ticks, callback, id)) {
      return base::fail(Status::limit, "start a timer",
                        base::format("{} timers exist", engine::ApplicationTimers::kMost),
                        "cancel timers that are not needed");
    }
    return detail::make<Timer>(&slot, id.index, id.generation);
  });
}

}  // namespace

Result<Timer> Engine::after(Nanoseconds delay, const TimerCallback& callback) {
  return start(*slot_, delay, false, callback);
}

Result<Timer> Engine::every(Nanoseconds interval, const TimerCallback& callback) {
  return start(*slot_, interval, true, callback);
}

Status Timer::cancel() noexcept {
  EngineCore* const core = engine::checked_core_of(slot_);
  if (core == nullptr) return engine::diagnose(slot_);
  return core->application_timers.cancel({index_, generation_}) ? Status::ok
                                                                : Status::not_connected;
}

bool Timer::scheduled() const noexcept {
  EngineCore* const core = engine::checked_core_of(slot_);
  return core != nullptr && core->application_timers.is_scheduled({index_, generation_});
}

namespace {

/// 0 if the engine is gone: the callback of a poll may have destroyed it.
std::uint64_t completions_of(const Engine& engine) noexcept {
  const EngineCore* const core = detail::core_of(engine);
  return core != nullptr ? core->context.stats.completions : 0;
}

}  // namespace

/// What a turn without work does, unless it sleeps: then false.
bool Idler::pause_or_yield() noexcept {
  if (options_.strategy == IdleStrategy::spin) return true;
  if (options_.strategy == IdleStrategy::pause || turns_ < options_.pauses) {
    ++turns_;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    return true;
  }
  if (options_.strategy == IdleStrategy::wait) return false;
  return ::sched_yield(), true;
}

Status Idler::idle_turn(Engine& engine, int work) noexcept {
  if (work < 0) return static_cast<Status>(-work);
  if (pause_or_yield()) return Status::ok;
  const std::uint64_t before = completions_of(engine);
  const Status status = engine.wait(options_.timeout);
  if (completions_of(engine) != before) turns_ = 0;  // wait() has polled, too
  if (status == Status::limit || status == Status::no_memory) return ::sched_yield(), Status::ok;
  return status == Status::timed_out ? Status::ok : status;
}

Status Idler::turn(std::span<Engine* const> engines) noexcept {
  if (engines.size() > kMostEngines) return Status::invalid_argument;
  bool has_work = false;
  for (Engine* const engine : engines) {
    const int events = engine->poll();
    if (events < 0) [[unlikely]]
      return static_cast<Status>(-events);
    has_work |= events > 0;
  }
  if (has_work) turns_ = 0;
  return has_work || pause_or_yield() ? Status::ok : sleep(engines);
}

/// Sleeps if no engine has anything to do. An engine that has may use the others in its callbacks,
/// so all of them are polled again then.
Status Idler::sleep(std::span<Engine* const> engines) const noexcept {
  std::array<pollfd, kMostEngines> sets{};
  std::size_t count = 0;
  for (Engine* const engine : engines) {
    const Result<int> fd = engine->fd();
    const bool is_exhausted =
        !fd && (fd.error().status == Status::limit || fd.error().status == Status::no_memory);
    if (is_exhausted || engine->clock().is_manual()) return ::sched_yield(), Status::ok;
    if (!fd) return fd.error().status;
    if (!engine->arm()) return Status::ok;
    sets[count++] = {*fd, POLLIN, 0};
  }
  // Each arm() has polled, and its callbacks may have used the engines that were armed before.
  for (std::size_t i = 0; i + 1 < count; ++i) {
    EngineCore* const core = detail::core_of(*engines[i]);
    if (core == nullptr || !core->stays_armed()) return Status::ok;
  }
  Nanoseconds limit = std::max(options_.timeout, Nanoseconds(0));
  for (const Engine* const engine : engines) limit = std::min(limit, engine->next_deadline());
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  const timespec time{static_cast<time_t>(seconds.count()),
                      static_cast<long>((limit - seconds).count())};
  if (::ppoll(sets.data(), count, &time, nullptr) >= 0 || errno == EINTR) return Status::ok;
  return Status::system;
}

}  // namespace spinwire
