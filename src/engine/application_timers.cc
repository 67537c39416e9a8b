#include "engine/application_timers.h"

#include <algorithm>

namespace spinwire::engine {

bool ApplicationTimers::add_chunk() {
  const auto first = static_cast<std::uint32_t>(chunks_.size()) * kChunk;
  if (first >= kMost) return false;
  chunks_.push_back(std::make_unique<std::array<Record, kChunk>>());
  for (std::uint32_t i = first + kChunk; i-- != first;) {
    Record& record = at(i);
    record.timer.index = i;
    record.timer.kind = kApplicationTimer;
    record.next_free = first_free_;
    first_free_ = i;
  }
  return true;
}

bool ApplicationTimers::start(std::uint64_t deadline, std::uint64_t interval,
                              const TimerCallback& run, Id& id) {
  if (first_free_ == kNone && !add_chunk()) return false;
  Record& record = at(first_free_);
  first_free_ = record.next_free;
  record.in_use = true;
  record.interval = interval;
  record.run = run;
  wheel_.schedule(record.timer, deadline);
  id = {record.timer.index, record.generation};
  return true;
}

ApplicationTimers::Record* ApplicationTimers::find(Id id) noexcept {
  if (id.index >= chunks_.size() * kChunk) return nullptr;
  Record& record = at(id.index);
  return record.in_use && record.generation == id.generation ? &record : nullptr;
}

void ApplicationTimers::release(Record& record) noexcept {
  record.in_use = false;
  if (++record.generation == 0) record.generation = 1;
  record.next_free = first_free_;
  first_free_ = record.timer.index;
}

bool ApplicationTimers::cancel(Id id) noexcept {
  Record* const record = find(id);
  if (record == nullptr) return false;
  wheel_.cancel(record->timer);
  release(*record);
  return true;
}

void ApplicationTimers::on_timer(base::Timer& timer, std::uint64_t now) noexcept {
  Record& record = at(timer.index);
  TimerCallback run = record.run;  // the callback may use the record again
  const Id id{timer.index, record.generation};
  if (record.interval == 0) {
    release(record);
  } else {
    // Times that were missed are left out.
    const std::uint64_t late = now - std::min(timer.deadline, now);
    wheel_.schedule(timer, timer.deadline + record.interval * (1 + late / record.interval));
  }
  run();
  // A callback may have state of its own.
  if (Record* const same = find(id); same != nullptr) same->run = run;
}

void ApplicationTimers::cancel_all() noexcept {
  for (std::uint32_t i = 0; i < chunks_.size() * kChunk; ++i) {
    if (Record& record = at(i); record.in_use) {
      wheel_.cancel(record.timer);
      release(record);
    }
  }
}

}  // namespace spinwire::engine
