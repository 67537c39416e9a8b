#include "engine/stall_detector.h"

#include <algorithm>
#include <chrono>

#include "agent/recording.h"
#include "base/format_into.h"
#include "engine/engine_core.h"
#include "rpc/rpc_activity.h"

namespace spinwire::engine {

using detail::EngineCore;
using observe::EventKind;

namespace {

/// For how long polls are watched after a long gap.
constexpr Nanoseconds kWatchTime = std::chrono::seconds(1);
/// For so many times as long, a pause that was seen while watching explains gaps.
constexpr std::uint64_t kWatchesToKnow = 60;
/// Connections, and sessions of each kind, that are visited after a gap.
constexpr std::uint32_t kSubjectsVisited = 4096;

using Number = std::array<char, 32>;

/// "12.3 ms"
std::string_view time_text(Number& text, Nanoseconds time) noexcept {
  const std::size_t size =
      base::format_into(text, "{:.1f} ms", std::chrono::duration<double, std::milli>(time).count());
  return {text.data(), size};
}

}  // namespace

void StallDetector::open(EngineCore& core) noexcept {
  const Config::Observability& limits = core.context.config.observability;
  const Clock& clock = core.context.clock;
  core.context.now = clock.now();  // the first gap begins here
  const auto ticks = [&](Nanoseconds limit) {
    return limit.count() == 0 ? kNoGap : std::min(clock.ticks(limit), kNoGap);
  };
  longest_poll_ = ticks(limits.longest_poll);
  longest_callback_ = ticks(limits.longest_callback);
  longest_pause_ = ticks(limits.longest_pause);
  shortest_limit_ = std::min({longest_poll_, longest_callback_, longest_pause_});
  watch_ticks_ = clock.ticks(kWatchTime);
  set_reported_gap(core);
}

/// Gaps that are longer than all before are reported, too, which soon are few.
void StallDetector::set_reported_gap(EngineCore& core) const noexcept {
  core.schedule.reported_gap = is_watching() ? 0 : std::min(shortest_limit_, longest_gap_ + 1);
}

StallDetector::Ran StallDetector::find_ran(const EngineCore& core, std::uint64_t tick) noexcept {
  Ran ran;
  const auto add = [&](std::string_view kind, std::uint32_t index, std::uint32_t generation) {
    if (ran.subjects++ != 0) return;
    ran.size = base::format_into(ran.text, "{} {}-{}", kind, index, generation);
  };
  const auto& agents = core.context.agents;
  for (std::uint32_t i = 0; i < std::min(agents.capacity(), kSubjectsVisited); ++i) {
    if (agents.in_use(i) && agent::was_active_at(agents.at(i), tick))
      add("connection", i, agent::id_of(agents.at(i)).generation);
  }
  if (core.calls == nullptr) return ran;
  const rpc::Rpc& r = *core.calls;
  for (std::uint32_t i = 0; i < std::min(r.clients.capacity(), kSubjectsVisited); ++i) {
    if (r.clients.in_use(i) && rpc::was_heard_at(r.clients.at(i), tick))
      add("session", i, r.clients.generation(i));
  }
  for (std::uint32_t i = 0; i < std::min(r.servers.capacity(), kSubjectsVisited); ++i) {
    if (!r.servers.in_use(i) || !rpc::was_heard_at(r.servers.at(i), tick)) continue;
    add("served session", i, r.servers.generation(i));
    const auto method = rpc::method_of_last_handler(r, r.servers.at(i));
    if (!method || ran.subjects != 1) continue;
    ran.size = base::format_into(ran.text, "method {} of served session {}-{}", *method, i,
                                 r.servers.generation(i));
  }
  return ran;
}

void StallDetector::note_pause(EngineCore& core, std::uint64_t ticks) noexcept {
  const Nanoseconds time = core.context.clock.duration(ticks);
  levels_.longest_pause = std::max(levels_.longest_pause, time);
  if (ticks < longest_pause_) return;
  ++levels_.pauses;
  Number number;
  core.context.recorder.record(EventKind::pause, {"no poll for ", time_text(number, time)});
}

void StallDetector::note_poll(EngineCore& core, std::uint64_t ticks, const Ran& ran,
                              bool with_pause) noexcept {
  const Nanoseconds time = core.context.clock.duration(ticks);
  if (time > levels_.longest_poll) {
    levels_.longest_poll = time;
    slowest_poll_ = ran;
    levels_.longest_poll_ran = slowest_poll_.view();
  }
  // A callback is known to be slow if the poll ran those of one subject.
  const bool is_callback = !with_pause && ran.subjects == 1;
  if (is_callback && time > levels_.longest_callback) {
    levels_.longest_callback = time;
    slowest_callback_ = ran;
    levels_.longest_callback_ran = slowest_callback_.view();
  }
  if (ticks < std::min(longest_poll_, longest_callback_)) return;
  Number number;
  Number others;
  const std::size_t size =
      base::format_into(others, " and {} other{}", ran.subjects - std::min(ran.subjects, 1u),
                        ran.subjects == 2 ? "" : "s");
  const std::string_view more(others.data(), ran.subjects > 1 ? size : 0);
  const EventKind kind = with_pause                                  ? EventKind::slow
                         : is_callback && ticks >= longest_callback_ ? EventKind::slow_callback
                                                                     : EventKind::slow_poll;
  ++(kind == EventKind::slow_callback ? levels_.slow_callbacks : levels_.slow_polls);
  core.context.recorder.record(kind, {time_text(number, time), " for ", ran.view(), more});
}

void StallDetector::on_gap(EngineCore& core, std::uint64_t now) noexcept {
  const std::uint64_t before = core.context.now;
  const std::uint64_t gap = now - before;
  if (is_watching()) {
    const std::uint64_t pause = now - std::min(now, std::max(poll_end_, before));
    known_pause_ = std::max(known_pause_, pause);
    note_pause(core, pause);
    if (now >= watch_end_) watch_end_ = 0;
  } else if (const Ran ran = find_ran(core, before); ran.subjects == 0) {
    note_pause(core, gap);
  } else if (gap > known_pause_ || now >= known_until_) {
    note_poll(core, gap, ran, true);
    if (gap >= shortest_limit_) {
      known_pause_ = 0;
      watch_end_ = now + watch_ticks_;
      known_until_ = now + kWatchesToKnow * watch_ticks_;
    }
  }
  poll_end_ = now;
  longest_gap_ = std::max(longest_gap_, gap);
  set_reported_gap(core);
}

void StallDetector::on_poll_end(EngineCore& core, std::uint64_t now) noexcept {
  const std::uint64_t began = core.context.now;
  poll_end_ = now;
  const std::uint64_t ticks = now - std::min(now, began);
  if (core.context.clock.duration(ticks) <= levels_.longest_poll &&
      ticks < std::min(longest_poll_, longest_callback_))
    return;
  const Ran ran = find_ran(core, began);
  if (ran.subjects != 0) note_poll(core, ticks, ran, false);
}

void StallDetector::on_slow_step(EngineCore& core, std::uint64_t begin,
                                 std::uint64_t end) noexcept {
  Ran ran;
  constexpr std::string_view kStep = "timers, handshakes and set-up";
  ran.size = kStep.copy(ran.text.data(), ran.text.size());
  ran.subjects = 1;
  note_poll(core, end - begin, ran, false);
  // The next gap begins here.
  core.context.now = end;
}

}  // namespace spinwire::engine
