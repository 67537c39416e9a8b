#include "observe/event_reader.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "observe/printable.h"
#include "observe/recorder.h"

namespace spinwire::observe {
namespace {

/// A time that other times can be subtracted from.
Nanoseconds time_of(std::int64_t ns) { return Nanoseconds(std::max<std::int64_t>(ns, 0)); }

EngineEvent decode_event(const EventRecord& record) {
  EngineEvent event;
  event.number = record.number;
  event.at = time_of(record.at_ns);
  event.first_at = time_of(record.first_ns);
  event.count = record.count;
  const auto subject = static_cast<EventSubject>(record.subject);
  event.subject = name_of(subject);
  if (event.subject.empty()) event.subject = fmt::format("subject-{}", record.subject);
  if (subject != EventSubject::engine && subject != EventSubject::stranger)
    event.id = fmt::format("{}-{}", record.index, record.generation);
  event.kind = name_of(static_cast<EventKind>(record.kind));
  if (event.kind.empty()) event.kind = fmt::format("event-{}", record.kind);
  event.text = printable(record.text.data(), record.text.size());
  return event;
}

EventRecord record_at(std::span<const std::byte> file, std::uint64_t offset) noexcept {
  EventRecord record;
  std::memcpy(&record, file.data() + offset, sizeof record);
  return record;
}

}  // namespace

void decode_events(std::span<const std::byte> file, std::span<const std::byte> later,
                   const TableDescriptor& table, std::vector<EventCopy>& events) {
  for (std::uint32_t i = 0; i < table.row_count; ++i) {
    const std::uint64_t at = table.rows_offset + std::uint64_t{i} * table.row_bytes;
    const EventRecord record = record_at(file, at);
    if (record.number == 0) continue;
    EventCopy& copy = events.emplace_back(EventCopy{decode_event(record), record.sequence});
    const std::uint64_t sequence = later.empty() ? record.sequence : record_at(later, at).sequence;
    copy.event.is_consistent = record.sequence % 2 == 0 && sequence == record.sequence;
  }
}

std::vector<EngineEvent> order_events(std::vector<EventCopy> copies) {
  // Of two copies the consistent one, and then the later one.
  std::sort(copies.begin(), copies.end(), [](const EventCopy& a, const EventCopy& b) {
    return std::tie(a.event.number, b.event.is_consistent, b.sequence) <
           std::tie(b.event.number, a.event.is_consistent, a.sequence);
  });
  const auto end = std::unique(
      copies.begin(), copies.end(),
      [](const EventCopy& a, const EventCopy& b) { return a.event.number == b.event.number; });
  copies.erase(end, copies.end());
  std::stable_sort(copies.begin(), copies.end(),
                   [](const EventCopy& a, const EventCopy& b) { return a.sequence < b.sequence; });
  std::vector<EngineEvent> events;
  events.reserve(copies.size());
  for (EventCopy& copy : copies) events.push_back(std::move(copy.event));
  return events;
}

}  // namespace spinwire::observe
