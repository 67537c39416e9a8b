#include "common/stat_findings.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "common/stat_event_findings.h"

namespace spinwire::tools {
namespace {

/// A peer that has given no sign of life for two keepalives, although one was due, is silent.
constexpr double kMissedKeepalives = 2;
/// An application that has not polled for so long hangs, or sleeps in something else than wait().
constexpr double kNoPollSeconds = 1;
/// How long the set-up of a connection or session takes at most when nothing is wrong.
constexpr double kSetUpSeconds = 1;

struct Cause {
  std::string_view blocker;
  std::string_view text;
  std::string_view advice;
};

constexpr std::array kConnectionCauses = {
    Cause{"credit", "credit used up",
          "The peer's application does not poll, or takes messages too slowly."},
    Cause{"send_queue", "send queue full",
          "The peer or its device takes no operations, or queues.send_depth is too small."},
    Cause{"operations", "all operations are under way",
          "Wait for completions, or raise queues.operations."},
    Cause{"windows", "no memory window is free",
          "Nor a record: long messages wait. See whether the peer polls, or raise memory.windows."},
};
constexpr std::array kSessionCauses = {
    Cause{"window", "window full",
          "The server's handlers, or the network, are slow. More calls need a larger rpc.window."},
    Cause{"server_window", "the server's window is full",
          "The server has receives for fewer calls than the session's window: raise its "
          "rpc.receive_depth."},
    Cause{"congestion", "the congestion window is full",
          "Round trips are longer than rpc.target_rtt, or datagrams are lost."},
    Cause{"receives", "the engine has no receives",
          "The replies of all sessions need more receives: raise rpc.receive_depth."},
    Cause{"send_queue", "datagram send queue full",
          "The device does not send fast enough, or rpc.send_depth is too small."},
    Cause{"connection", "the session's connection is blocked or not ready",
          "See the connection to the same peer."},
};

/// Null: nothing is blocked, or by what a later release knows.
template <std::size_t N>
const Cause* cause_of(const std::array<Cause, N>& causes, std::string_view blocker) {
  for (const Cause& cause : causes) {
    if (cause.blocker == blocker) return &cause;
  }
  return nullptr;
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

std::string for_time(double seconds) { return fmt::format("for {}", time_text(seconds)); }

void find_process_faults(const EngineReading& reading, Findings& found) {
  if (!reading.file.is_alive)
    found.add({.severity = Severity::process,
               .cause = "the process has died",
               .found = "It did not close the engine; this is its last state.",
               .advice = "spinwire-stat PID --events shows what came before."});
  const double silence = to_seconds(reading.since_written);
  if (silence > kNoPollSeconds)
    found.add({.severity = Severity::process,
               .cause = fmt::format("the application has not polled for {}", time_text(silence)),
               .advice = "It hangs, is stopped, has a slow callback, or has no processor: see its "
                         "stack and its state."});
  if (engine_number(reading, "spinwire_draining") != 0)
    found.add({.severity = Severity::notice,
               .cause = "the engine drains",
               .advice = "It accepts and makes no connections."});
}

void find_empty_pools(const EngineReading& reading, const Earlier& earlier, Findings& found) {
  constexpr std::string_view kRefusals = "spinwire_pool_refusals_total";
  const MetricTable* const pools = reading.find("pool");
  if (pools == nullptr) return;
  for (const MetricRow& row : pools->rows) {
    const double refused = pools->number(row, kRefusals);
    const MetricRow* const before = earlier.find({pools, &row});
    const double lately = before != nullptr ? refused - pools->number(*before, kRefusals) : 0;
    const bool is_empty = refused != 0 && pools->number(row, "spinwire_pool_free_bytes") == 0;
    if (lately <= 0 && !(is_empty && (!earlier.is_known() || !reading.file.is_alive))) continue;
    const std::string_view pool = pools->text(row, "pool");
    found.add({.severity = Severity::memory,
               .cause = fmt::format("pool {}{} is used up", pool, mark_of(row)),
               .subject = fmt::format("{:.0f} allocations refused{}", lately > 0 ? lately : refused,
                                      lately > 0 ? " lately" : ""),
               .advice = fmt::format("Allocations answer no_buffer: release buffers, or enlarge "
                                     "memory.{}_bytes.",
                                     pool)});
  }
}

/// What the set-up of a connection or session waits for.
Finding find_slow_set_up(std::string_view state, double since) {
  Finding finding{.when = for_time(since)};
  if (state == "resolving") {
    finding.cause = "no TCP connection";
    finding.advice = "The host does not answer: see its address, port, routes and firewalls.";
  } else if (state == "exchanging" || state == "opening") {
    finding.cause = "handshake not answered";
    finding.advice = "The peer's engine does not answer: see that its application polls.";
  } else {
    finding.cause = fmt::format("still {}", state);
    finding.advice = "Operations that are under way end first.";
  }
  return finding;
}

double peer_timeout_of(const EngineReading& reading) {
  return engine_number(reading, "spinwire_peer_timeout_seconds");
}
Finding silent_peer(double peer_timeout) {
  return {
      .severity = Severity::silent,
      .cause = "the peer is silent",
      .advice = fmt::format("Its process hangs or is stopped, or the network is cut. It is lost "
                            "after {}.",
                            time_text(peer_timeout))};
}

/// What a connection or session waits for. `name` is "connection" or "session".
class SubjectCheck {
 public:
  SubjectCheck(const EngineReading& reading, std::string_view name, Findings& found)
      : name_(name),
        found_(found),
        keepalive_(engine_number(reading, "spinwire_keepalive_interval_seconds")),
        peer_timeout_(peer_timeout_of(reading)) {}
  /// `cause` is what blocks the subject; null: nothing that has an own text.
  void check(const Subject& s, const Cause* cause) {
    const std::string_view state = s.text(column("state"));
    const double since = blocked_seconds(s);
    if (s.text(column("blocked_by")) == "not_ready" && since > kSetUpSeconds) {
      add(s, find_slow_set_up(state, since));
    } else if (cause != nullptr) {
      add(s, {.cause = std::string(cause->text),
              .when = for_time(since),
              .advice = std::string(cause->advice)});
    }
    if (s.number(column("backlog_full")) != 0 && state == "ready")
      add(s, {.cause = "backlog full",
              .advice = "Calls answer would_block: make fewer at a time, or raise rpc.backlog."});
    const double silence = s.number(column("silent_seconds"));
    if (state == "ready" && keepalive_ > 0 && silence > kMissedKeepalives * keepalive_) {
      Finding finding = silent_peer(peer_timeout_);
      finding.when = for_time(silence);
      add(s, std::move(finding));
    }
  }

 private:
  [[nodiscard]] std::string column(const char* what) const {
    return fmt::format("spinwire_{}_{}", name_, what);
  }
  void add(const Subject& s, Finding finding) {
    finding.subject =
        fmt::format("{} {}{} to {}", name_, s.text(name_), mark_of(*s.row), s.text("peer"));
    found_.add(std::move(finding));
  }

  std::string_view name_;
  Findings& found_;
  double keepalive_;
  double peer_timeout_;
};

template <std::size_t N>
void find_blocked(const EngineReading& reading, std::string_view name, std::string_view peer,
                  const std::array<Cause, N>& causes, Findings& found) {
  const std::string blocked_by = fmt::format("spinwire_{}_blocked_by", name);
  SubjectCheck check(reading, name, found);
  for (const Subject& s : subjects_of(reading, name, peer))
    check.check(s, cause_of(causes, s.text(blocked_by)));
}

/// The engine's metric of how many subjects without a row are blocked by something.
struct BlockedCount {
  std::string_view metric;
  std::string_view blocker;
};
constexpr std::array kConnectionsWithoutRow = {
    BlockedCount{"spinwire_connections_without_row_lacking_credit", "credit"},
    BlockedCount{"spinwire_connections_without_row_send_queue_full", "send_queue"},
    BlockedCount{"spinwire_connections_without_row_lacking_operations", "operations"},
    BlockedCount{"spinwire_connections_without_row_lacking_windows", "windows"},
};
constexpr std::array kSessionsWithoutRow = {
    BlockedCount{"spinwire_rpc_sessions_without_row_window_full", "window"},
    BlockedCount{"spinwire_rpc_sessions_without_row_server_window_full", "server_window"},
    BlockedCount{"spinwire_rpc_sessions_without_row_congestion_window_full", "congestion"},
    BlockedCount{"spinwire_rpc_sessions_without_row_lacking_receives", "receives"},
    BlockedCount{"spinwire_rpc_sessions_without_row_send_queue_full", "send_queue"},
    BlockedCount{"spinwire_rpc_sessions_without_row_connection_blocked", "connection"},
};

/// Adds a finding of subjects without a row, if there are any.
void add_without_row(double count, std::string_view name, Finding finding, Findings& found) {
  constexpr double kMost = 1e9;  // a file may hold any number
  if (!(count > 0)) return;
  count = std::min(count, kMost);
  finding.subject = fmt::format("{:.0f} {}{} without a row (observability.rows)", count, name,
                                count == 1 ? "" : "s");
  finding.count = static_cast<std::size_t>(count);
  found.add(std::move(finding));
}

/// Connections or sessions that are blocked or silent and have no row. `silent` is the engine's
/// metric of how many of them have silent peers.
template <std::size_t N, std::size_t M>
void find_without_row(const EngineReading& reading, std::string_view name,
                      const std::array<BlockedCount, N>& counts, std::string_view silent,
                      const std::array<Cause, M>& causes, Findings& found) {
  for (const BlockedCount& count : counts) {
    const Cause* const cause = cause_of(causes, count.blocker);
    if (cause == nullptr) continue;
    add_without_row(engine_number(reading, count.metric), name,
                    {.cause = std::string(cause->text), .advice = std::string(cause->advice)},
                    found);
  }
  add_without_row(engine_number(reading, silent), name, silent_peer(peer_timeout_of(reading)),
                  found);
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

std::string Finding::line() const {
  std::string text = cause;
  if (!subject.empty()) text += ": " + subject;
  if (others != 0) text += fmt::format(" and {} other{}", others, others == 1 ? "" : "s");
  if (!when.empty()) text += (subject.empty() ? ": " : ", ") + when;
  return text;
}

std::string Finding::text() const {
  std::string all = line();
  for (const std::string& part : {found, advice}) {
    if (!part.empty()) all += (all.ends_with('.') ? " " : ". ") + part;
  }
  return all;
}

void Findings::add(Finding finding) {
  const auto is_same = [&](const Finding& each) { return each.cause == finding.cause; };
  const auto known = std::find_if(found_.begin(), found_.end(), is_same);
  if (known == found_.end()) {
    subjects_.insert(finding.cause + '\n' + finding.subject);
    return found_.push_back(std::move(finding));
  }
  if (subjects_.insert(finding.cause + '\n' + finding.subject).second)
    known->others += finding.count;
}

std::vector<Finding> Findings::take() {
  std::stable_sort(found_.begin(), found_.end(),
                   [](const Finding& a, const Finding& b) { return a.severity < b.severity; });
  return std::move(found_);
}

std::vector<Finding> findings(const EngineReading& reading, const Earlier& earlier,
                              std::string_view peer) {
  Findings found;
  find_process_faults(reading, found);
  find_empty_pools(reading, earlier, found);
  find_blocked(reading, "connection", peer, kConnectionCauses, found);
  find_blocked(reading, "session", peer, kSessionCauses, found);
  find_without_row(reading, "connection", kConnectionsWithoutRow,
                   "spinwire_connections_without_row_silent", kConnectionCauses, found);
  find_without_row(reading, "session", kSessionsWithoutRow,
                   "spinwire_rpc_sessions_without_row_silent", kSessionCauses, found);
  find_events(reading, earlier, found);
  return found.take();
}

}  // namespace spinwire::tools
