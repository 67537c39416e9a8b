#include "common/stat_events.h"

#include <fmt/core.h>
#include <time.h>

#include <algorithm>
#include <array>

#include "common/json.h"
#include "common/stat_findings.h"

namespace spinwire::tools {
namespace {

bool is_named(const EngineEvent& event, std::string_view id) {
  return event.id == id || (event.id.starts_with(id) && event.id[id.size()] == '-');
}

/// "2026-01-31 23:59:59.123456", UTC
std::string wall_clock(Nanoseconds since_epoch) {
  constexpr long kMicrosecond = 1000;
  const auto seconds = std::chrono::floor<std::chrono::seconds>(since_epoch);
  const auto time = static_cast<time_t>(seconds.count());
  tm parts{};
  std::array<char, 32> text{};
  if (::gmtime_r(&time, &parts) == nullptr ||
      std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S", &parts) == 0)
    return "?";
  return fmt::format("{}.{:06}", text.data(), (since_epoch - seconds).count() / kMicrosecond);
}

/// Events of an engine since it was opened, and those of them that its file has no more.
struct EventCounts {
  std::uint64_t recorded = 0;
  std::uint64_t displaced = 0;
};

/// Events are counted from 1, and the file always has the last one. One that is being written is in
/// the file, so it is not displaced.
EventCounts count_events(const EngineReading& reading) {
  EventCounts counts;
  std::uint64_t kept = 0;
  for (const EngineEvent& event : reading.events) {
    ++kept;
    if (!event.is_consistent) continue;  // its number may be half written
    counts.recorded = std::max(counts.recorded, event.number);
  }
  counts.displaced = counts.recorded - std::min(kept, counts.recorded);
  return counts;
}

/// Says what the list lacks; empty: it is complete.
std::string displaced_text(const EngineReading& reading, const EventFilter& filter) {
  const EventCounts counts = count_events(reading);
  if (counts.displaced == 0) return {};
  const bool is_part = !filter.connection.empty() || !filter.session.empty();
  return fmt::format("Later events have displaced {} of the engine's {}{}.\n", counts.displaced,
                     counts.recorded,
                     is_part ? "; the list may lack events of this connection or session" : "");
}

std::string head_text(const EngineReading& reading) {
  return fmt::format("{}  pid {}  engine {}  {}", reading.program, reading.file.pid,
                     reading.file.engine, reading.file.is_alive ? "running" : "dead");
}

}  // namespace

Nanoseconds reference_time(const EngineReading& reading) {
  // A damaged file may name any time.
  constexpr Nanoseconds kMost = Nanoseconds::max() / 2;
  if (reading.file.is_alive)
    return std::min(reading.written_at, kMost) + std::min(reading.since_written, kMost);
  Nanoseconds last = reading.written_at;
  for (const EngineEvent& event : reading.events) last = std::max(last, event.at);
  return last;
}

std::vector<EngineEvent> chosen_events(const EngineReading& reading, const EventFilter& filter) {
  if (filter.connection.empty() && filter.session.empty()) return reading.events;
  std::vector<EngineEvent> chosen;
  for (const EngineEvent& event : reading.events) {
    const bool is_connection = event.subject == "connection";
    const bool is_session = event.subject == "session" || event.subject == "served_session";
    if ((is_connection && !filter.connection.empty() && is_named(event, filter.connection)) ||
        (is_session && !filter.session.empty() && is_named(event, filter.session)))
      chosen.push_back(event);
  }
  return chosen;
}

std::string subject_text(const EngineEvent& event) {
  return event.id.empty() ? event.subject : fmt::format("{} {}", event.subject, event.id);
}

std::string events_text(std::span<const EngineReading> readings, const EventFilter& filter) {
  std::string text;
  for (const EngineReading& reading : readings) {
    text += fmt::format("{}\n", head_text(reading));
    text += fmt::format("{:<26} {:>12} {:<22} {:<14} {}\n", "TIME (UTC)", "AGO", "SUBJECT", "EVENT",
                        "WHAT");
    const Nanoseconds reference = reference_time(reading);
    for (const EngineEvent& event : chosen_events(reading, filter)) {
      std::string what = event.text;
      if (event.count > 1)
        what += fmt::format("{}{} times since {}", what.empty() ? "" : "; ", event.count,
                            wall_clock(event.first_at));
      std::string line = fmt::format("{:<26} {:>10.6f} s {:<22} {:<14} {}", wall_clock(event.at),
                                     to_seconds(reference - event.at), subject_text(event),
                                     event.kind + (event.is_consistent ? "" : "?"), what);
      while (line.ends_with(' ')) line.pop_back();
      text += line + '\n';
    }
    text += displaced_text(reading, filter);
  }
  return text;
}

std::string events_json(std::span<const EngineReading> readings, const EventFilter& filter) {
  Json engines = Json::array();
  for (const EngineReading& reading : readings) {
    const Nanoseconds reference = reference_time(reading);
    Json events = Json::array();
    for (const EngineEvent& event : chosen_events(reading, filter)) {
      events.push_back({{"number", event.number},
                        {"at", to_seconds(event.at)},
                        {"first_at", to_seconds(event.first_at)},
                        {"ago", to_seconds(reference - event.at)},
                        {"count", event.count},
                        {"subject", event.subject},
                        {"id", event.id},
                        {"kind", event.kind},
                        {"text", event.text},
                        {"consistent", event.is_consistent}});
    }
    const EventCounts counts = count_events(reading);
    engines.push_back({{"pid", reading.file.pid},
                       {"engine", reading.file.engine},
                       {"alive", reading.file.is_alive},
                       {"program", reading.program},
                       {"file", reading.file.path},
                       {"recorded", counts.recorded},
                       {"displaced", counts.displaced},
                       {"events", std::move(events)}});
  }
  return json_line({{"engines", std::move(engines)}});
}

}  // namespace spinwire::tools
