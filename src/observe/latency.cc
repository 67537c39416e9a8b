#include "observe/latency.h"

#include <algorithm>

namespace spinwire::observe {

std::string_view name_of(TimedWork work) noexcept {
  constexpr std::array<std::string_view, kTimedWorks> kNames = {
      "message", "write",        "read",           "atomic",  "call",
      "handler", "long_message", "write_and_send", "raw_send"};
  const auto i = static_cast<std::size_t>(work);
  return i < kNames.size() ? kNames[i] : std::string_view();
}

std::string_view name_of(TimedStage stage) noexcept {
  constexpr std::array<std::string_view, kStages> kNames = {"total", "posting", "transfer",
                                                            "delivery"};
  const auto i = static_cast<std::size_t>(stage);
  return i < kNames.size() ? kNames[i] : std::string_view();
}

void Latencies::add(Row& row, Nanoseconds time) noexcept {
  const auto ns = static_cast<std::uint64_t>(std::max(time, Nanoseconds(0)).count());
  ++row.record.samples;
  row.record.sum_ns += ns;
  row.record.max_ns = std::max(row.record.max_ns, ns);
  ++row.record.buckets[bucket_of(ns)];
  row.is_changed = true;
}

void Latencies::record(TimedWork work, TimedStage stage, Nanoseconds time) noexcept {
  if (!is_open()) return;
  Row& row = rows_[static_cast<std::size_t>(work) * kStages + static_cast<std::size_t>(stage)];
  row.record.work = static_cast<std::uint32_t>(work);
  row.record.stage = static_cast<std::uint32_t>(stage);
  add(row, time);
}

void Latencies::record(TimedWork work, Method method, Nanoseconds time) noexcept {
  if (!is_open()) return;
  const std::size_t first =
      kTimedWorks * kStages + (work == TimedWork::handler ? std::size_t{kTimedMethods} : 0);
  for (std::size_t i = first; i < first + kTimedMethods; ++i) {
    Row& row = rows_[i];
    if (row.record.samples != 0 && row.record.method != method) continue;
    row.record.work = static_cast<std::uint32_t>(work);
    row.record.stage = static_cast<std::uint32_t>(TimedStage::total);
    row.record.method = method;
    return add(row, time);
  }
}

std::uint32_t Latencies::next_changed(std::uint32_t from) const noexcept {
  for (std::uint32_t i = from; i < rows_.size(); ++i) {
    if (rows_[i].is_changed) return i;
  }
  return kLatencyRows;
}

}  // namespace spinwire::observe
