#include "engine/publisher.h"

#include <time.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <string_view>
#include <utility>

#include "agent/agent.h"
#include "agent/connecting.h"
#include "agent/peer_silence.h"
#include "agent/recording.h"
#include "agent/source_ledger.h"
#include "base/log_message.h"
#include "engine/engine_core.h"
#include "engine/engine_snapshot.h"
#include "observe/recorder.h"
#include "rpc/client_session.h"
#include "rpc/session_goodbye.h"
#include "rpc/session_recording.h"
#include "rpc/session_snapshot.h"

namespace spinwire::engine {
namespace {

using detail::EngineCore;
using observe::Table;

constexpr std::uint32_t kRowsPerStep = 2;
constexpr std::uint32_t kSlotsPerStep = 64;
/// Time between two writes, at least. A write takes as long as two or three empty control steps.
constexpr Nanoseconds kWriteInterval = std::chrono::microseconds(500);
/// Rings of events of each kind of subject; with more subjects, several share a ring.
constexpr std::uint32_t kEventRingsMost = 4096;
/// A subject that is blocked for longer gets an event. Short blocks are usual, and would displace
/// other events.
constexpr Nanoseconds kLongBlock = std::chrono::milliseconds(100);
/// Set-up takes no longer when nothing is wrong. Engines that begin make many connections, and
/// those that are only being set up get no rows of subjects in trouble.
constexpr Nanoseconds kLongSetUp = std::chrono::seconds(1);
/// A peer that has missed so many keepalives is silent; spinwire-stat names it then.
constexpr int kMissedKeepalives = 2;
/// A subject that has been well for so long may lose its row to another one in trouble.
constexpr Nanoseconds kWellFor = std::chrono::minutes(1);

Nanoseconds read_clock(clockid_t clock) noexcept {
  timespec now{};
  (void)::clock_gettime(clock, &now);
  return std::chrono::seconds(now.tv_sec) + Nanoseconds(now.tv_nsec);
}

/// "INDEX-GENERATION"
class Id {
 public:
  Id(std::uint32_t index, std::uint32_t generation) noexcept {
    char* const end = text_.data() + text_.size();
    char* at = std::to_chars(text_.data(), end, index).ptr;
    *at++ = '-';
    at = std::to_chars(at, end, generation).ptr;
    size_ = static_cast<std::size_t>(at - text_.data());
  }
  [[nodiscard]] std::string_view view() const noexcept { return {text_.data(), size_}; }

 private:
  std::array<char, 24> text_;
  std::size_t size_;
};

/// Visits the next records of a table with an `in_use()`, from `next` on. `visit(index)` is for
/// records in use, `gone(index)` for others.
template <typename Records, typename Visit, typename Gone>
void visit_some(const Records& records, std::uint32_t& next, Visit&& visit, Gone&& gone) noexcept {
  const std::uint32_t most = std::min(kSlotsPerStep, records.capacity());
  std::uint32_t visited = 0;
  for (std::uint32_t i = 0; i < most && visited < kRowsPerStep; ++i) {
    if (next >= records.capacity()) next = 0;
    const std::uint32_t index = next++;
    if (records.in_use(index)) {
      visit(index);
      ++visited;
    } else {
      gone(index);
    }
  }
}

/// For how long a blocker is no trouble of the connection or session. What the whole engine lacks
/// is none of it, however long that takes.
Nanoseconds harmless_for(Blocker blocker) noexcept {
  if (blocker == Blocker::operations || blocker == Blocker::windows) return Nanoseconds::max();
  return blocker == Blocker::not_ready ? kLongSetUp : kLongBlock;
}
Nanoseconds harmless_for(SessionBlocker blocker) noexcept {
  if (blocker == SessionBlocker::receives || blocker == SessionBlocker::send_queue)
    return Nanoseconds::max();
  return blocker == SessionBlocker::not_ready ? kLongSetUp : kLongBlock;
}
template <typename AnyBlocker>
void note_blocker(SubjectRows::Visit& visit, const Clock& clock, AnyBlocker blocker) noexcept {
  const Nanoseconds harmless = harmless_for(blocker);
  visit.blocker = static_cast<std::uint8_t>(blocker);
  visit.harmless_for = harmless == Nanoseconds::max() ? SubjectRows::kNever : clock.ticks(harmless);
}

/// Of connections by what blocks them (Blocker).
observe::ConnectionLevels connection_levels(const SubjectRows::ByBlocker& counts) noexcept {
  const auto by = [&](Blocker why) { return counts[static_cast<std::size_t>(why)]; };
  using enum Blocker;
  return {by(not_ready), by(send_queue), by(operations), by(credit), by(windows)};
}
/// Of sessions by what blocks them (SessionBlocker).
observe::SessionLevels session_levels(const SubjectRows::ByBlocker& counts) noexcept {
  const auto by = [&](SessionBlocker why) { return counts[static_cast<std::size_t>(why)]; };
  using enum SessionBlocker;
  return {by(not_ready), by(window),     by(server_window), by(congestion),
          by(receives),  by(send_queue), by(connection)};
}

bool is_silent(const agent::EngineContext& context, Nanoseconds silent_for) noexcept {
  return silent_for > kMissedKeepalives * context.config.connections.keepalive_interval;
}

/// For how long the subject has been blocked by what blocks it now; 0: nothing does. `why` is the
/// blocker's name. Records the beginning of long blocks while the subject has a row, and always
/// their end: the row may have been passed on meanwhile.
Nanoseconds blocked_for(agent::EngineContext& context, SubjectRows::Subject& subject,
                        std::uint32_t index, observe::EventSubject whose,
                        const observe::EventOrigin& origin, std::string_view why) noexcept {
  const auto record = [&](observe::EventKind kind, std::string_view text) {
    context.recorder.record(kind, whose, index, subject.generation, {text}, origin);
  };
  if (subject.recorded_blocker != 0 && subject.recorded_blocker != subject.blocker) {
    subject.recorded_blocker = 0;
    record(observe::EventKind::unblocked, {});
  }
  if (subject.blocker == 0) return Nanoseconds(0);
  const Nanoseconds since = context.clock.duration(context.now - subject.blocked_at);
  if (subject.row == SubjectRows::kNone) return since;
  if (since >= kLongBlock && std::exchange(subject.recorded_blocker, subject.blocker) == 0)
    record(observe::EventKind::blocked, why);
  return since;
}

}  // namespace

void Publisher::open(EngineCore& core) {
  const Config& c = core.context.config;
  interval_ = core.context.clock.ticks(kWriteInterval);
  if (c.observability.directory.empty()) return;
  observe::PageFileOptions options;
  options.directory = c.observability.directory;
  options.device = core.context.device->info().name;
  options.ticks_per_ns = core.context.clock.ticks_per_ns();
  options.opened_tick = core.context.clock.now();
  const std::uint32_t rows = c.observability.rows;
  options.rows = {1, 4, std::min(rows, c.connections.maximum), std::min(rows, c.rpc.sessions),
                  std::min(rows, c.rpc.sessions)};
  const std::uint32_t rings = std::min(rows, kEventRingsMost);
  options.event_rings = {1, std::min(rings, c.connections.maximum), std::min(rings, c.rpc.sessions),
                         std::min(rings, c.rpc.sessions), 1};
  auto file = observe::PageFile::create(options);
  if (!file) {
    base::log(LogLevel::warning, "this engine cannot be observed by spinwire-stat: {}",
              file.error().message());
    return;
  }
  file_ = std::move(*file);
  const std::uint64_t well_for = core.context.clock.ticks(kWellFor);
  connections_.open(file_.rows(Table::connection), c.connections.maximum, well_for);
  sessions_.open(file_.rows(Table::session), c.rpc.sessions, well_for);
  served_.open(file_.rows(Table::served_session), c.rpc.sessions, well_for);
  read_clocks(core);
  open_recorder(core.context);
  write_engine(core);
  for (std::size_t i = 0; i < 4; ++i) write_pool(core);
}

void Publisher::open_recorder(agent::EngineContext& context) {
  using observe::EventSubject;
  context.recorder.open(
      file_.all_events(),
      {file_.events(EventSubject::engine), file_.events(EventSubject::connection),
       file_.events(EventSubject::session), file_.events(EventSubject::served_session),
       file_.events(EventSubject::stranger)});
  if (context.config.observability.sample != 0) agent::open_samples(context);
  context.recorder.record(observe::EventKind::opened, {"on device ", context.device->info().name});
}

void Publisher::close(EngineCore& core) noexcept {
  core.context.recorder.close();
  file_.close();
}

void Publisher::read_clocks(EngineCore& core) noexcept {
  clocks_tick_ = core.context.now;
  realtime_ = read_clock(CLOCK_REALTIME);
  uptime_ = read_clock(CLOCK_MONOTONIC);
  core.context.recorder.set_time(core.context.clock.now(), realtime_);
}

void Publisher::step(EngineCore& core) noexcept {
  const std::uint64_t now = core.context.now;
  // A manual clock may stand still between two steps.
  const bool stands_still = std::exchange(last_step_, now) == now;
  if (now < next_write_ && !stands_still) return;
  next_write_ = now + interval_;
  scan_connections(core);
  if (!file_) return;
  if (core.calls != nullptr) {
    scan_sessions(core);
    scan_served_sessions(core);
  }
  const bool is_old = core.context.clock.duration(now - clocks_tick_) >= std::chrono::seconds(1);
  if (is_old || core.context.clock.is_manual()) read_clocks(core);
  write_engine(core);  // last of the counts, so that it agrees with the rows
  write_pool(core);
  write_latency(core.context);
}

void Publisher::write_engine(const EngineCore& core) noexcept {
  const Config::Connections& c = core.context.config.connections;
  const Nanoseconds since = core.context.clock.duration(core.context.now - clocks_tick_);
  observe::EngineLevels levels;
  levels.written_at = realtime_ + since;
  levels.written_uptime = uptime_ + since;
  levels.writes = ++writes_;
  levels.keepalive_interval = c.keepalive_interval;
  levels.peer_timeout = c.peer_timeout;
  levels.draining = core.drain.is_under_way();
  levels.stalls = core.stalls.levels();
  levels.connections = connection_levels(connections_.by_blocker());
  levels.sessions = session_levels(sessions_.by_blocker());
  levels.connections_without_row = connection_levels(connections_.without_row());
  levels.sessions_without_row = session_levels(sessions_.without_row());
  levels.silent_connections_without_row = connections_.silent_without_row();
  levels.silent_sessions_without_row = sessions_.silent_without_row();
  file_.write(Table::engine, 0, row_,
              observe::fill_engine_row(row_, levels, stats_at_a_glance(core), call_stats(core)));
}

void Publisher::write_pool(const EngineCore& core) noexcept {
  const std::uint32_t index = next_pool_++ % file_.rows(Table::pool);
  const Pool pool = static_cast<Pool>(index);
  file_.write(Table::pool, index, row_,
              observe::fill_pool_row(row_, name_of(pool), memory_stats(core, pool)));
}

void Publisher::write_latency(agent::EngineContext& context) noexcept {
  std::uint32_t row = context.latencies.next_changed(next_latency_);
  if (row == observe::kLatencyRows && next_latency_ != 0) row = context.latencies.next_changed(0);
  next_latency_ = row == observe::kLatencyRows ? 0 : row + 1;
  if (row < file_.latencies()) file_.write(row, context.latencies.publish(row));
}

SubjectRows::Subject* Publisher::claim_row(Table table, SubjectRows& rows,
                                           const SubjectRows::Visit& visit) noexcept {
  if (rows.has_former(visit.index, visit.generation)) drop_row(table, rows, visit.index);
  return rows.claim(visit);
}

void Publisher::drop_row(Table table, SubjectRows& rows, std::uint32_t index) noexcept {
  const std::uint32_t row = rows.release(index);
  if (row != SubjectRows::kNone) file_.clear(table, row);
}

void Publisher::scan_connections(EngineCore& core) noexcept {
  const auto& agents = core.context.agents;
  const Clock& clock = core.context.clock;
  const std::uint64_t now = core.context.now;
  const auto visit = [&](std::uint32_t index) {
    const agent::Agent& a = agents.at(index);
    const ConnectionSnapshot snapshot = agent::snapshot(core.context, a);
    core.sums.update(a, snapshot);
    if (!file_) return;
    const observe::EventOrigin origin = agent::event_origin_of(a);
    const Nanoseconds silent = agent::silent_for(core.context, a);
    SubjectRows::Visit found{index, agent::id_of(a).generation, now};
    note_blocker(found, clock, snapshot.blocked_by);
    found.is_silent = snapshot.state == ConnectionState::ready && is_silent(core.context, silent);
    found.is_stranger = origin.ring == observe::EventRing::strangers;
    found.source = agent::source_key(a);
    SubjectRows::Subject* const subject = claim_row(Table::connection, connections_, found);
    if (subject == nullptr) return;
    const Nanoseconds blocked =
        blocked_for(core.context, *subject, index, observe::EventSubject::connection, origin,
                    to_string(snapshot.blocked_by));
    if (subject->row == SubjectRows::kNone) return;
    const Id id(index, found.generation);
    const PeerIdentity peer = agent::peer_identity_of(a);
    const observe::Subject shown{id.view(), agent::peer_name(a),
                                 peer.key,  clock.duration(now - subject->seen_at),
                                 blocked,   silent};
    file_.write(Table::connection, subject->row, row_,
                observe::fill_connection_row(row_, shown, snapshot));
  };
  visit_some(agents, next_connection_, visit,
             [&](std::uint32_t index) { drop_row(Table::connection, connections_, index); });
}

void Publisher::scan_sessions(EngineCore& core) noexcept {
  const rpc::Rpc& r = *core.calls;
  const Clock& clock = core.context.clock;
  const std::uint64_t now = core.context.now;
  const auto visit = [&](std::uint32_t index) {
    const rpc::ClientSession& c = r.clients.at(index);
    const SessionSnapshot snapshot = rpc::snapshot(r, c);
    const Nanoseconds silent = clock.duration(c.liveness.silent_ticks);
    SubjectRows::Visit found{index, c.generation, now};
    note_blocker(found, clock, snapshot.blocked_by);
    found.is_silent = snapshot.state == SessionState::ready && is_silent(core.context, silent);
    SubjectRows::Subject* const subject = claim_row(Table::session, sessions_, found);
    if (subject == nullptr) return;
    const Nanoseconds blocked =
        blocked_for(core.context, *subject, index, observe::EventSubject::session,
                    rpc::event_origin_of(c), to_string(snapshot.blocked_by));
    if (subject->row == SubjectRows::kNone) return;
    const Id id(index, c.generation);
    const observe::Subject shown{
        id.view(), c.address, rpc::identity_of(c.peer).key, clock.duration(now - subject->seen_at),
        blocked,   silent};
    file_.write(Table::session, subject->row, row_,
                observe::fill_session_row(row_, shown, snapshot));
  };
  visit_some(r.clients, next_session_, visit,
             [&](std::uint32_t index) { drop_row(Table::session, sessions_, index); });
}

void Publisher::scan_served_sessions(const EngineCore& core) noexcept {
  const rpc::Rpc& r = *core.calls;
  const Clock& clock = core.context.clock;
  const std::uint64_t now = core.context.now;
  const auto visit = [&](std::uint32_t index) {
    const rpc::ServerSession& s = r.servers.at(index);
    SubjectRows::Visit found{index, r.servers.generation(index), now};
    found.is_silent = is_silent(core.context, clock.duration(s.liveness.silent_ticks));
    found.is_stranger = rpc::event_ring_of(s) == observe::EventRing::strangers;
    found.source = reinterpret_cast<std::uintptr_t>(s.source);
    SubjectRows::Subject* const subject = claim_row(Table::served_session, served_, found);
    if (subject == nullptr || subject->row == SubjectRows::kNone) return;
    const Id id(index, found.generation);
    const PeerIdentity peer = rpc::identity_of(s.peer);
    const observe::Subject shown{id.view(), peer.address, peer.key,
                                 clock.duration(now - subject->seen_at)};
    const std::uint64_t heard = std::min(rpc::last_heard_from(s), now);
    const observe::ServedSessionLevels levels{rpc::calls_in_progress(s), s.window,
                                              clock.duration(now - heard), rpc::is_leaving(s)};
    file_.write(Table::served_session, subject->row, row_,
                observe::fill_served_session_row(row_, shown, levels));
  };
  visit_some(r.servers, next_served_, visit,
             [&](std::uint32_t index) { drop_row(Table::served_session, served_, index); });
}

}  // namespace spinwire::engine
