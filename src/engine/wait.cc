// Sleeping until something is to be done: Engine::arm(), wait() and next_deadline(). Cold.
//
// A sleep ends by an event of the wake set, or when the engine has something to do by itself. What
// nobody announces shortens the sleep: see awaits_unannounced().
#include <errno.h>

#include <algorithm>

#include "base/error.h"
#include "base/log_message.h"
#include "control/socket.h"
#include "engine/engine_core.h"

namespace spinwire::detail {
namespace {

/// The longest sleep, in which the engine looks at what is announced late or not at all: that a
/// peer closed its device without a goodbye, that the device was removed, that a peer without free
/// descriptors could not wake us.
constexpr Nanoseconds kLongestSleep = std::chrono::milliseconds(250);
// While something is awaited that nobody announces, sleeps double from the first to the last.
constexpr Nanoseconds kFirstBriefSleep = std::chrono::microseconds(50);
constexpr Nanoseconds kLongestBriefSleep = std::chrono::milliseconds(2);
/// Timers of one list that are compared: see TimerWheel::next_fire().
constexpr std::size_t kTimersCompared = 64;

}  // namespace

Result<void> EngineCore::open_wake_set() {
  if (wake_set.is_open()) return {};
  int fd = -1;
  if (context.device->provider().wake_descriptor != nullptr) {
    fd = context.device->provider().wake_descriptor(cq);
    if (fd < 0) {
      return tl::unexpected(
          control::system_error("be woken by the device", "wake_descriptor", errno));
    }
  }
  return wake_set.open(control.descriptor(), fd);
}

/// Whether something is awaited that makes no descriptor readable, besides what the device knows:
/// credit and room that peers give by stores or WRITEs, set-up and lease steps that the device
/// delays, memory that the application holds, room for new peers, the next step of a drain.
bool EngineCore::awaits_unannounced() noexcept {
  return agent::awaits_unannounced(context) || drain.is_under_way() ||
         control.awaits_unannounced() || context.windows.pending() ||
         context.registrations->pending() != 0 ||
         (calls != nullptr && rpc::awaits_unannounced(*calls));
}

/// Whether callbacks run in the next poll, whatever it finds.
bool EngineCore::has_callbacks_due() const noexcept {
  return agent::has_callbacks_due(context) || (calls != nullptr && rpc::has_callbacks_due(*calls));
}

/// The tick at which the sleep ends that begins now.
std::uint64_t EngineCore::sleep_deadline(std::uint64_t now, bool is_brief) noexcept {
  const std::uint64_t longest = now + context.clock.ticks(kLongestSleep);
  std::uint64_t deadline = std::min(context.timers.next_fire(kTimersCompared), longest);
  const bool has_progress = context.stats.completions != schedule.completions_at_sleep;
  schedule.completions_at_sleep = context.stats.completions;
  if (!is_brief || has_progress || schedule.brief_sleep == 0)
    schedule.brief_sleep = context.clock.ticks(kFirstBriefSleep);
  if (!is_brief) return deadline;
  deadline = std::min(deadline, now + schedule.brief_sleep);
  schedule.brief_sleep =
      std::min(2 * schedule.brief_sleep, context.clock.ticks(kLongestBriefSleep));
  return deadline;
}

/// Makes the next poll take a control step, unless control is manual.
void EngineCore::step_now() noexcept {
  if (schedule.next_control != engine::PollSchedule::kNever)
    schedule.next_control = std::min(schedule.next_control, context.now);
  schedule.wake_soon();
}

/// Polls, and arms the wake set. A callback may destroy the engine: then `this` is gone, and the
/// answer is false.
bool EngineCore::prepare_sleep() noexcept {
  if (end_sleep()) agent::on_awake(context);
  if (wake_set.take_wake()) return false;
  const EngineSlot& slot = guard.slot();
  const verbs::Provider& provider = context.device->provider();
  constexpr int kTries = 3;
  for (int i = 0; i < kTries; ++i) {
    const int events = poll_owned();
    if (events != 0 || slot.target == nullptr) return false;
    if (schedule.has_more_work) return step_now(), false;
    (void)flush();
    if (has_callbacks_due()) return false;
    const verbs::Armed armed = provider.arm != nullptr ? provider.arm(cq) : verbs::Armed::brief;
    if (armed == verbs::Armed::poll_again) continue;
    if (armed == verbs::Armed::work) return step_now(), false;
    const std::uint64_t now = context.clock.now_from(context.now);
    schedule.is_brief = awaits_unannounced() || armed == verbs::Armed::brief;
    schedule.sleep_deadline = sleep_deadline(now, schedule.is_brief);
    schedule.is_armed = true;
    // The first poll after the sleep handles what the wake set reports.
    step_now();
    if (schedule.sleep_deadline > now) {
      schedule.polls_after_sleep = 2;
      return true;
    }
    (void)end_sleep();
    return false;
  }
  return false;
}

bool EngineCore::stays_armed() noexcept {
  if (!schedule.is_armed || !guard.may_enter()) return false;
  (void)flush();
  if (has_callbacks_due()) return false;
  const verbs::Provider& provider = context.device->provider();
  const verbs::Armed armed = provider.arm != nullptr ? provider.arm(cq) : verbs::Armed::brief;
  if (armed == verbs::Armed::poll_again || armed == verbs::Armed::work) return false;
  return schedule.is_brief || (armed == verbs::Armed::yes && !awaits_unannounced());
}

/// Returns whether the engine was armed.
bool EngineCore::end_sleep() noexcept {
  if (!std::exchange(schedule.is_armed, false)) return false;
  const verbs::Provider& provider = context.device->provider();
  if (provider.disarm != nullptr) provider.disarm(cq);
  return true;
}

bool EngineCore::arm() noexcept {
  if (!guard.may_enter()) return false;
  const auto opened = base::no_throw("sleep", [&] { return open_wake_set(); });
  const bool was_refused = std::exchange(schedule.is_sleep_refused, !opened);
  if (opened) return prepare_sleep();
  if (!was_refused)
    base::log(LogLevel::error, "the engine cannot sleep: {}", opened.error().message());
  return false;
}

Status EngineCore::wait(Nanoseconds timeout) noexcept {
  if (!guard.may_enter()) return guard.diagnose();
  const auto opened = base::no_throw("sleep", [&] { return open_wake_set(); });
  if (!opened) return opened.error().status;
  if (!prepare_sleep()) return Status::ok;
  if (timeout.count() <= 0 || context.clock.is_manual()) {
    schedule.polls_after_sleep = 0;
    return (void)end_sleep(), Status::timed_out;
  }
  const Nanoseconds own = next_deadline();
  ++context.stats.sleeps;
  bool is_woken = wake_set.sleep(std::min(timeout, own));
  if (wake_set.take_wake()) is_woken = true;  // one wake() ends one sleep
  // What the application does next, before it polls, happens now.
  context.now = context.clock.now_from(context.now);
  (void)end_sleep();
  agent::on_awake(context);
  return is_woken || own <= timeout ? Status::ok : Status::timed_out;
}

Nanoseconds EngineCore::next_deadline() const noexcept {
  const std::uint64_t now = std::max(context.clock.now(), context.now);
  // Timers may have been started since arm().
  const std::uint64_t deadline = std::min(
      context.timers.next_fire(kTimersCompared),
      schedule.is_armed ? schedule.sleep_deadline : now + context.clock.ticks(kLongestSleep));
  return deadline <= now ? Nanoseconds(0) : context.clock.duration(deadline - now) + Nanoseconds(1);
}

}  // namespace spinwire::detail
