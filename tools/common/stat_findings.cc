#include "common/stat_findings.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "common/stat_events.h"

namespace spinwire::tools {
namespace {

/// A peer that has missed two keepalives is silent.
constexpr double kMissedKeepalives = 2;
/// An application that has not polled for so long hangs, or sleeps in something else than wait().
constexpr double kNoPollSeconds = 1;
/// How long the set-up of a connection or session takes at most when nothing is wrong.
constexpr double kSetUpSeconds = 1;

struct Cause {
  std::string_view blocker;
  std::string_view text;
};

constexpr std::array kConnectionCauses = {
    Cause{"credit",
          "credit used up: the peer grants none until its application polls and takes "
          "messages"},
    Cause{"send_queue",
          "send queue full (queues.send_depth): the peer or its device takes no operations"},
    Cause{"operations", "all operations of the engine are under way (queues.operations)"},
    Cause{"windows", "long messages wait: no memory window or record is free (memory.windows)"},
};
constexpr std::array kSessionCauses = {
    Cause{"window", "window full: the server's handlers, or the network, are slow"},
    Cause{"server_window", "the server has receives for fewer calls than the window"},
    Cause{"congestion",
          "congestion control has reduced the window: round trips are long, or "
          "datagrams are lost"},
    Cause{"receives", "the engine has no receives for further replies (rpc.receive_depth)"},
    Cause{"send_queue", "the send queue of datagrams is full (rpc.send_depth)"},
    Cause{"connection", "the session's connection is not ready, or is blocked"},
};

template <std::size_t N>
std::string_view cause_text(const std::array<Cause, N>& causes, std::string_view blocker) {
  for (const Cause& cause : causes) {
    if (cause.blocker == blocker) return cause.text;
  }
  return {};
}

/// All labels of a row. Texts of readings have no line ends.
std::string labels_of(const Subject& subject) {
  std::string labels;
  for (std::size_t i = 0; i < subject.table->columns.size(); ++i) {
    if (subject.table->columns[i].kind != MetricKind::label) continue;
    labels += subject.row->values[i].text;
    labels += '\n';
  }
  return labels;
}

bool is_blocked(const Subject& subject) {
  const std::string column = fmt::format("spinwire_{}_blocked_by", subject.table->name);
  const std::string_view blocker = subject.text(column);
  return !blocker.empty() && blocker != "nothing";
}

double blocked_seconds(const Subject& subject) {
  return subject.number(fmt::format("spinwire_{}_blocked_seconds", subject.table->name));
}

/// A number of the engine's only row.
double engine_number(const EngineReading& reading, std::string_view column) {
  const MetricTable* const table = reading.find("engine");
  return table != nullptr && !table->rows.empty() ? table->number(table->rows[0], column) : 0;
}

using Found = std::vector<std::string>;

void find_process_faults(const EngineReading& reading, Found& found) {
  if (!reading.file.is_alive)
    found.emplace_back("the process has died without closing the engine; this is its last state");
  const double silence = to_seconds(reading.since_written);
  if (silence > kNoPollSeconds)
    found.push_back(fmt::format("the application has not polled for {}", time_text(silence)));
  if (engine_number(reading, "spinwire_draining") != 0)
    found.emplace_back("the engine drains: it accepts and makes no connections");
}

void find_empty_pools(const EngineReading& reading, const Earlier& earlier, Found& found) {
  constexpr std::string_view kRefusals = "spinwire_pool_refusals_total";
  const MetricTable* const pools = reading.find("pool");
  if (pools == nullptr) return;
  for (const MetricRow& row : pools->rows) {
    const double refused = pools->number(row, kRefusals);
    const MetricRow* const before = earlier.find({pools, &row});
    const double lately = before != nullptr ? refused - pools->number(*before, kRefusals) : 0;
    const bool is_empty = refused != 0 && pools->number(row, "spinwire_pool_free_bytes") == 0;
    if (lately <= 0 && !(is_empty && (!earlier.is_known() || !reading.file.is_alive))) continue;
    found.push_back(
        fmt::format("pool {}{} is used up (memory.{}_bytes): {:.0f} allocations refused{}",
                    pools->text(row, "pool"), mark_of(row), pools->text(row, "pool"),
                    lately > 0 ? lately : refused, lately > 0 ? " lately" : ""));
  }
}

/// What the table's subjects wait for. `name` is "connection" or "session".
template <std::size_t N>
void find_blocked(const EngineReading& reading, std::string_view name, std::string_view peer,
                  const std::array<Cause, N>& causes, Found& found) {
  const double keepalive = engine_number(reading, "spinwire_keepalive_interval_seconds");
  const double peer_timeout = engine_number(reading, "spinwire_peer_timeout_seconds");
  const auto column = [&](const char* what) { return fmt::format("spinwire_{}_{}", name, what); };
  for (const Subject& s : subjects_of(reading, name, peer)) {
    const std::string who =
        fmt::format("{} {}{} to {}", name, s.text(name), mark_of(*s.row), s.text("peer"));
    const std::string_view state = s.text(column("state"));
    const std::string_view blocker = s.text(column("blocked_by"));
    const double since = blocked_seconds(s);
    if (blocker == "not_ready" && since > kSetUpSeconds) {
      found.push_back(fmt::format("{}: {} for {}", who, state, time_text(since)));
    } else if (const std::string_view cause = cause_text(causes, blocker); !cause.empty()) {
      found.push_back(fmt::format("{}: {}, for {}", who, cause, time_text(since)));
    }
    if (s.number(column("backlog_full")) != 0 && state == "ready")
      found.push_back(
          fmt::format("{}: its backlog is full (rpc.backlog), so calls answer "
                      "would_block",
                      who));
    const double silence = s.number(column("last_heard_seconds"));
    if (state == "ready" && keepalive > 0 && silence > kMissedKeepalives * keepalive) {
      found.push_back(fmt::format("{}: the peer is silent for {}; it is lost after {}", who,
                                  time_text(silence), time_text(peer_timeout)));
    }
  }
}

/// Blocked connections beyond those that have rows.
void find_blocked_without_row(const EngineReading& reading, Found& found) {
  const MetricTable* const table = reading.find("connection");
  if (table == nullptr) return;
  struct Count {
    std::string_view column;
    std::string_view blocker;
  };
  constexpr std::array kCounts = {
      Count{"spinwire_connections_lacking_credit", "credit"},
      Count{"spinwire_connections_send_queue_full", "send_queue"},
      Count{"spinwire_connections_lacking_operations", "operations"},
      Count{"spinwire_connections_lacking_windows", "windows"},
  };
  if (engine_number(reading, "spinwire_connections") <= static_cast<double>(table->rows.size()))
    return;
  for (const Count& count : kCounts) {
    const double all = engine_number(reading, count.column);
    const auto shown = std::count_if(table->rows.begin(), table->rows.end(), [&](const auto& row) {
      return table->text(row, "spinwire_connection_blocked_by") == count.blocker;
    });
    if (all <= static_cast<double>(shown)) continue;
    found.push_back(fmt::format("{:.0f} connections without a row (observability.rows): {}",
                                all - static_cast<double>(shown),
                                cause_text(kConnectionCauses, count.blocker)));
  }
}

struct EventCause {
  std::string_view kind;
  std::string_view text;
};
/// Events that tell of trouble, and what they mean.
constexpr std::array kEventCauses = {
    EventCause{"error", "has ended or was interrupted"},
    EventCause{"refused", "refused a handshake of"},
    EventCause{"lease_end", "a lease has ended"},
    EventCause{"retransmission",
               "requests are sent again: datagrams are lost, or the server does not poll"},
    EventCause{"timeout", "calls run out of time"},
    EventCause{"goodbye", "goodbye"},
    EventCause{"slow_poll", "a poll was slow"},
    EventCause{"slow_callback", "callbacks were slow"},
    EventCause{"pause", "the application did not poll"},
    EventCause{"slow", "slow"},
    EventCause{"device", "an event of the device"},
};

/// What the flight recorder has noted lately, the newest first.
void find_events(const EngineReading& reading, Found& found) {
  constexpr auto kLately = std::chrono::seconds(60);
  constexpr std::size_t kMost = 6;
  const Nanoseconds reference = reference_time(reading);
  std::size_t count = 0;
  for (auto event = reading.events.rbegin(); event != reading.events.rend(); ++event) {
    if (reference - event->at > kLately || count == kMost) break;
    const auto* const cause =
        std::find_if(kEventCauses.begin(), kEventCauses.end(),
                     [&](const EventCause& each) { return each.kind == event->kind; });
    if (cause == kEventCauses.end()) continue;
    found.push_back(fmt::format(
        "{} ago, {}: {}{}{}{}", time_text(std::max(to_seconds(reference - event->at), 0.0)),
        subject_text(*event), cause->text, event->text.empty() ? "" : " ", event->text,
        event->count > 1 ? fmt::format(", {} times", event->count) : ""));
    ++count;
  }
}

}  // namespace

std::string time_text(double seconds) {
  if (seconds >= 2 * 86400) return fmt::format("{:.0f} days", seconds / 86400);
  if (seconds >= 2 * 3600) return fmt::format("{:.0f} h", seconds / 3600);
  if (seconds >= 600) return fmt::format("{:.0f} min", seconds / 60);
  if (seconds >= 1) return fmt::format("{:.1f} s", seconds);
  if (seconds >= 1e-3) return fmt::format("{:.1f} ms", seconds * 1e3);
  if (seconds > 0) return fmt::format("{:.1f} us", seconds * 1e6);
  return "0 s";
}

std::vector<Subject> subjects_of(const EngineReading& reading, std::string_view table,
                                 std::string_view peer) {
  std::vector<Subject> subjects;
  const MetricTable* const found = reading.find(table);
  if (found == nullptr) return subjects;
  for (const MetricRow& row : found->rows) {
    const Subject subject{found, &row};
    if (subject.text("peer").find(peer) != std::string_view::npos) subjects.push_back(subject);
  }
  std::stable_sort(subjects.begin(), subjects.end(), [](const Subject& a, const Subject& b) {
    const bool blocked = is_blocked(a);
    if (blocked != is_blocked(b)) return blocked;
    return blocked && blocked_seconds(a) > blocked_seconds(b);
  });
  return subjects;
}

Earlier::Earlier(const EngineReading* reading) : reading_(reading) {
  if (reading == nullptr) return;
  for (const MetricTable& table : reading->tables) {
    auto& rows = rows_[table.name];
    for (const MetricRow& row : table.rows) rows.try_emplace(labels_of({&table, &row}), &row);
  }
}

const MetricRow* Earlier::find(const Subject& subject) const {
  const auto rows = rows_.find(subject.table->name);
  if (rows == rows_.end() || !subject.row->is_consistent) return nullptr;
  const auto found = rows->second.find(labels_of(subject));
  const bool is_same = found != rows->second.end() && found->second->is_consistent &&
                       found->second->values.size() == subject.row->values.size();
  return is_same ? found->second : nullptr;
}

double Earlier::rate(const Subject& subject, std::string_view column,
                     const EngineReading& reading) const {
  const MetricRow* const before = find(subject);
  if (before == nullptr) return 0;
  const double seconds = to_seconds(reading.read_at - reading_->read_at);
  const double grown = subject.number(column) - subject.table->number(*before, column);
  return grown > 0 && seconds > 0 ? grown / seconds : 0;
}

std::vector<std::string> findings(const EngineReading& reading, const Earlier& earlier,
                                  std::string_view peer) {
  Found found;
  find_process_faults(reading, found);
  find_empty_pools(reading, earlier, found);
  find_blocked(reading, "connection", peer, kConnectionCauses, found);
  find_blocked(reading, "session", peer, kSessionCauses, found);
  find_blocked_without_row(reading, found);
  find_events(reading, found);
  return found;
}

}  // namespace spinwire::tools
