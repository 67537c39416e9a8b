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
#include "base/log_message.h"
#include "engine/engine_core.h"
#include "engine/engine_snapshot.h"
#include "observe/recorder.h"
#include "rpc/client_session.h"
#include "rpc/session_goodbye.h"
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

/// Since when the subject is blocked by what blocks it now; 0: nothing. `why` is its name. Records
/// the beginning and the end of long blocks.
Nanoseconds blocked_for(agent::EngineContext& context, SubjectRows::Subject& subject,
                        observe::EventSubject whose, observe::EventRing ring, std::uint8_t blocker,
                        std::string_view why) noexcept {
  const auto record = [&](observe::EventKind kind, std::string_view text) {
    context.recorder.record(kind, whose, subject.index, subject.generation, {text}, ring);
  };
  if (blocker != subject.blocker) {
    if (std::exchange(subject.is_block_recorded, false)) record(observe::EventKind::unblocked, {});
    subject.blocker = blocker;
    subject.blocked_at = context.now;
  }
  if (blocker == 0) return Nanoseconds(0);
  const Nanoseconds since = context.clock.duration(context.now - subject.blocked_at);
  if (since >= kLongBlock && !std::exchange(subject.is_block_recorded, true))
    record(observe::EventKind::blocked, why);
  return since;
}

}  // namespace

SubjectRows::Subject* SubjectRows::claim(std::uint32_t index, std::uint32_t generation,
                                         std::uint64_t now) noexcept {
  if (subjects_.empty()) return nullptr;
  Subject& subject = subjects_[row_of(index)];
  if (subject.index != index && subject.index != kNobody) return nullptr;
  if (subject.index != index || subject.generation != generation)
    subject = {index, generation, now, now, 0, false};
  return &subject;
}

bool SubjectRows::release(std::uint32_t index) noexcept {
  if (subjects_.empty() || subjects_[row_of(index)].index != index) return false;
  subjects_[row_of(index)] = {};
  return true;
}

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
  connections_.open(file_.rows(Table::connection));
  sessions_.open(file_.rows(Table::session));
  served_.open(file_.rows(Table::served_session));
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
  const bool is_old = core.context.clock.duration(now - clocks_tick_) >= std::chrono::seconds(1);
  if (is_old || core.context.clock.is_manual()) read_clocks(core);
  write_engine(core);
  write_pool(core);
  write_latency(core.context);
  if (core.calls == nullptr) return;
  scan_sessions(core);
  scan_served_sessions(core);
}

void Publisher::write_engine(const EngineCore& core) noexcept {
  const Config::Connections& c = core.context.config.connections;
  const Nanoseconds since = core.context.clock.duration(core.context.now - clocks_tick_);
  const auto& blocked = core.sums.by_blocker();
  const auto blocked_by = [&](Blocker why) { return blocked[static_cast<std::size_t>(why)]; };
  observe::EngineLevels levels;
  levels.written_at = realtime_ + since;
  levels.written_uptime = uptime_ + since;
  levels.writes = ++writes_;
  levels.keepalive_interval = c.keepalive_interval;
  levels.peer_timeout = c.peer_timeout;
  levels.draining = core.drain.is_under_way();
  levels.stalls = core.stalls.levels();
  levels.not_ready = blocked_by(Blocker::not_ready);
  levels.send_queue_full = blocked_by(Blocker::send_queue);
  levels.lacking_operations = blocked_by(Blocker::operations);
  levels.lacking_credit = blocked_by(Blocker::credit);
  levels.lacking_windows = blocked_by(Blocker::windows);
  levels.sessions = session_levels();
  file_.write(Table::engine, 0, row_,
              observe::fill_engine_row(row_, levels, stats_at_a_glance(core), call_stats(core)));
}

observe::SessionLevels Publisher::session_levels() const noexcept {
  const auto by = [&](SessionBlocker why) {
    return sessions_by_blocker_[static_cast<std::size_t>(why)];
  };
  using enum SessionBlocker;
  return {by(not_ready), by(window),     by(server_window), by(congestion),
          by(receives),  by(send_queue), by(connection)};
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

void Publisher::drop_row(Table table, SubjectRows& rows, std::uint32_t index) noexcept {
  if (rows.release(index)) file_.clear(table, rows.row_of(index));
}

void Publisher::scan_connections(EngineCore& core) noexcept {
  const auto& agents = core.context.agents;
  const Clock& clock = core.context.clock;
  const std::uint64_t now = core.context.now;
  const auto visit = [&](std::uint32_t index) {
    const agent::Agent& a = agents.at(index);
    const ConnectionSnapshot snapshot = agent::snapshot(core.context, a);
    core.sums.update(a, snapshot);
    const std::uint32_t generation = agent::id_of(a).generation;
    SubjectRows::Subject* const subject = connections_.claim(index, generation, now);
    if (subject == nullptr) return;
    const Id id(index, generation);
    const PeerIdentity peer = agent::peer_identity_of(a);
    const Nanoseconds blocked = blocked_for(
        core.context, *subject, observe::EventSubject::connection, agent::event_ring_of(a),
        static_cast<std::uint8_t>(snapshot.blocked_by), to_string(snapshot.blocked_by));
    const observe::Subject shown{id.view(), agent::peer_name(a),
                                 peer.key,  clock.duration(now - subject->seen_at),
                                 blocked,   agent::silent_for(core.context, a)};
    file_.write(Table::connection, connections_.row_of(*subject), row_,
                observe::fill_connection_row(row_, shown, snapshot));
  };
  visit_some(agents, next_connection_, visit,
             [&](std::uint32_t index) { drop_row(Table::connection, connections_, index); });
}

void Publisher::scan_sessions(EngineCore& core) noexcept {
  const rpc::Rpc& r = *core.calls;
  const Clock& clock = core.context.clock;
  const std::uint64_t now = core.context.now;
  const auto begin_round = [&](std::uint32_t index) {
    if (index == 0) sessions_by_blocker_ = std::exchange(round_by_blocker_, {});
  };
  const auto visit = [&](std::uint32_t index) {
    begin_round(index);
    const rpc::ClientSession& c = r.clients.at(index);
    const SessionSnapshot snapshot = rpc::snapshot(r, c);
    ++round_by_blocker_[static_cast<std::size_t>(snapshot.blocked_by)];
    SubjectRows::Subject* const subject = sessions_.claim(index, c.generation, now);
    if (subject == nullptr) return;
    const Id id(index, c.generation);
    const Nanoseconds blocked =
        blocked_for(core.context, *subject, observe::EventSubject::session, observe::EventRing::all,
                    static_cast<std::uint8_t>(snapshot.blocked_by), to_string(snapshot.blocked_by));
    const observe::Subject shown{id.view(),
                                 c.address,
                                 rpc::identity_of(c.peer).key,
                                 clock.duration(now - subject->seen_at),
                                 blocked,
                                 clock.duration(c.liveness.silent_ticks)};
    file_.write(Table::session, sessions_.row_of(*subject), row_,
                observe::fill_session_row(row_, shown, snapshot));
  };
  visit_some(r.clients, next_session_, visit, [&](std::uint32_t index) {
    begin_round(index);
    drop_row(Table::session, sessions_, index);
  });
}

void Publisher::scan_served_sessions(const EngineCore& core) noexcept {
  const rpc::Rpc& r = *core.calls;
  const Clock& clock = core.context.clock;
  const std::uint64_t now = core.context.now;
  const auto visit = [&](std::uint32_t index) {
    const rpc::ServerSession& s = r.servers.at(index);
    const std::uint32_t generation = r.servers.generation(index);
    SubjectRows::Subject* const subject = served_.claim(index, generation, now);
    if (subject == nullptr) return;
    const Id id(index, generation);
    const PeerIdentity peer = rpc::identity_of(s.peer);
    const observe::Subject shown{id.view(), peer.address, peer.key,
                                 clock.duration(now - subject->seen_at)};
    const std::uint64_t heard = std::min(rpc::last_heard_from(s), now);
    const observe::ServedSessionLevels levels{rpc::calls_in_progress(s), s.window,
                                              clock.duration(now - heard), rpc::is_leaving(s)};
    file_.write(Table::served_session, served_.row_of(*subject), row_,
                observe::fill_served_session_row(row_, shown, levels));
  };
  visit_some(r.servers, next_served_, visit,
             [&](std::uint32_t index) { drop_row(Table::served_session, served_, index); });
}

}  // namespace spinwire::engine
