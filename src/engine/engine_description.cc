#include "engine/engine_description.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <sstream>

#include "agent/agent.h"
#include "agent/connecting.h"
#include "agent/lease_table.h"
#include "engine/engine_core.h"
#include "engine/engine_snapshot.h"
#include "rpc/client_session.h"
#include "rpc/session_goodbye.h"
#include "rpc/session_snapshot.h"
#include "spinwire/version.h"

namespace spinwire::engine {
namespace {

using detail::EngineCore;

double seconds(Nanoseconds time) noexcept { return std::chrono::duration<double>(time).count(); }

/// Lines of one kind, of which the first ones are kept.
class Lines {
 public:
  Lines(std::string& text, std::string_view kind) noexcept : text_(text), kind_(kind) {}
  [[nodiscard]] bool is_full() const noexcept { return kept_ == kDescribedOfEach; }
  void add(std::string_view line) {
    if (is_full()) return omit(1);
    text_ += line;
    text_ += '\n';
    ++kept_;
  }
  void omit(std::size_t count) noexcept { omitted_ += count; }
  void end() {
    if (omitted_ != 0) text_ += fmt::format("and {} more {}\n", omitted_, kind_);
  }

 private:
  std::string& text_;
  std::string_view kind_;
  std::size_t kept_ = 0;
  std::size_t omitted_ = 0;
};

/// Settings that are not the defaults.
void describe_settings(const Config& config, std::string& text) {
  std::istringstream ours(config.to_toml());
  std::istringstream defaults(Config{}.to_toml());
  std::string section, line;
  for (std::string usual; std::getline(ours, line) && std::getline(defaults, usual);) {
    if (line.starts_with('[')) section = line.substr(1, line.find(']') - 1);
    if (line != usual) text += fmt::format("setting {}.{}\n", section, line);
  }
}

void describe_engine(const EngineCore& core, std::string& text) {
  const EngineStats stats = agent::stats(core.context);
  text += fmt::format("spinwire {} engine on {}: {} polls, {} control steps\n", version(),
                      core.context.device->info().name, stats.polls, stats.control_steps);
  describe_settings(core.context.config, text);
  if (core.control.has_keys()) text += fmt::format("keys: {}\n", core.control.key_ring().names());
  if (core.drain.has_begun())
    text += fmt::format("drain: {}, {:.3f} s until its deadline\n", core.drain.stage_name(),
                        seconds(core.drain.time_left()));
  text +=
      fmt::format("connections {}, operations {}, messages sent {} received {}, peers lost {}\n",
                  stats.connections, stats.operations, stats.messages_sent, stats.messages_received,
                  stats.peers_lost);
  const RpcStats calls = call_stats(core);
  text +=
      fmt::format("sessions {}, served {}, calls {}, replies {}, served calls {}\n", calls.sessions,
                  calls.served_sessions, calls.calls, calls.replies, calls.served);
  text += fmt::format(
      "receives {} posted, {} reserved; registrations {}, own domains {}, windows {} free\n",
      stats.receives, stats.reserved_receives, stats.registrations, stats.own_domains,
      stats.windows_free);
  const observe::StallLevels& stalls = core.stalls.levels();
  text += fmt::format("longest poll {:.6f} s {}, callback {:.6f} s {}, pause {:.6f} s\n",
                      seconds(stalls.longest_poll), stalls.longest_poll_ran,
                      seconds(stalls.longest_callback), stalls.longest_callback_ran,
                      seconds(stalls.longest_pause));
  for (std::size_t i = 0; i < 4; ++i) {
    const MemoryStats pool = memory_stats(core, static_cast<Pool>(i));
    text += fmt::format("pool {}: {} bytes, {} free, {} blocks used, {} refusals\n",
                        name_of(static_cast<Pool>(i)), pool.pool_bytes, pool.free_bytes,
                        pool.blocks_used, pool.refusals);
  }
}

void describe_listeners(const EngineCore& core, std::string& text) {
  Lines lines(text, "listeners");
  for (const std::string& address : core.control.listener_addresses())
    lines.add("listener at " + address);
  lines.end();
  text += fmt::format("handshakes under way: {}\n", core.control.handshakes());
}

void describe_timers(const EngineCore& core, std::string& text) {
  const Clock& clock = core.context.clock;
  const std::uint64_t now = clock.now();
  text += fmt::format("timers of all kinds: {}\n", core.context.timers.size());
  Lines lines(text, "timers of the application");
  core.application_timers.for_each(
      [&](ApplicationTimers::Id id, std::uint64_t deadline, std::uint64_t interval) {
        if (lines.is_full()) return lines.omit(1);
        const auto left = clock.duration(deadline > now ? deadline - now : 0);
        std::string line =
            fmt::format("timer {}-{}: in {:.6f} s", id.index, id.generation, seconds(left));
        if (interval != 0)
          line += fmt::format(", every {:.6f} s", seconds(clock.duration(interval)));
        lines.add(line);
      });
  lines.end();
}

std::string connection_line(const agent::Agent& a, const ConnectionSnapshot& now) {
  const agent::AgentId id = agent::id_of(a);
  return fmt::format(
      "connection {}-{} to '{}': {}, blocked by {}, heard {:.3f} s ago, outstanding {}, control "
      "{}, "
      "credit {}, peer's credit {}, sent {}, received {}, leases granted {} ({} bytes), held {} "
      "({} "
      "bytes)",
      id.index, id.generation, agent::peer_name(a), to_string(now.state), to_string(now.blocked_by),
      seconds(now.since_last_heard), now.stats.outstanding, now.control, now.stats.send_credits,
      now.stats.granted_credits, now.stats.messages_sent, now.stats.messages_received,
      now.leased_out, now.leased_out_bytes, now.leases_held, now.leases_held_bytes);
}

/// The blocked ones first.
void describe_connections(const EngineCore& core, std::string& text) {
  Lines lines(text, "connections");
  for (const bool blocked : {true, false}) {
    for (const agent::Agent& a : core.context.agents) {
      const ConnectionSnapshot now = agent::snapshot(core.context, a);
      if ((now.blocked_by != Blocker::nothing) != blocked) continue;
      lines.is_full() ? lines.omit(1) : lines.add(connection_line(a, now));
    }
  }
  lines.end();
}

void describe_leases(const EngineCore& core, std::string& text) {
  Lines lines(text, "leases");
  agent::visit_lease_lines(core.context, kDescribedOfEach,
                           [&](std::string_view line) { lines.add(line); });
  lines.end();
}

std::string session_line(std::uint32_t index, const rpc::ClientSession& c,
                         const SessionSnapshot& now) {
  return fmt::format(
      "session {}-{} to '{}': {}, blocked by {}, heard {:.3f} s ago, in flight {} of {}, long {}, "
      "backlog {}, calls {}, sent again {}, srtt {:.6f} s",
      index, c.generation, c.address, to_string(now.state), to_string(now.blocked_by),
      seconds(now.since_last_heard), now.in_flight, now.window, now.long_calls, now.backlog,
      now.calls, now.retransmissions, seconds(now.srtt));
}

/// The blocked ones first.
void describe_sessions(const rpc::Rpc& r, std::string& text) {
  Lines lines(text, "sessions");
  for (const bool blocked : {true, false}) {
    for (std::uint32_t i = 0; i < r.clients.capacity(); ++i) {
      if (!r.clients.in_use(i)) continue;
      const rpc::ClientSession& c = r.clients.at(i);
      const SessionSnapshot now = rpc::snapshot(r, c);
      if ((now.blocked_by != SessionBlocker::nothing) != blocked) continue;
      lines.is_full() ? lines.omit(1) : lines.add(session_line(i, c, now));
    }
  }
  lines.end();
}

/// Those with calls first.
void describe_served(const rpc::Rpc& r, const Clock& clock, std::uint64_t now, std::string& text) {
  Lines lines(text, "served sessions");
  for (const bool busy : {true, false}) {
    for (std::uint32_t i = 0; i < r.servers.capacity(); ++i) {
      if (!r.servers.in_use(i)) continue;
      const rpc::ServerSession& s = r.servers.at(i);
      if ((rpc::calls_in_progress(s) != 0) != busy) continue;
      if (lines.is_full()) {
        lines.omit(1);
        continue;
      }
      const std::uint64_t heard = std::min(rpc::last_heard_from(s), now);
      lines.add(fmt::format(
          "served session {}-{} of '{}': {} calls in progress, window {}, heard {:.3f} s ago{}", i,
          r.servers.generation(i), rpc::identity_of(s.peer).address, rpc::calls_in_progress(s),
          s.window, seconds(clock.duration(now - heard)), rpc::is_leaving(s) ? ", leaving" : ""));
    }
  }
  lines.end();
}

}  // namespace

std::string describe(const EngineCore& core) {
  std::string text;
  describe_engine(core, text);
  describe_listeners(core, text);
  describe_timers(core, text);
  describe_connections(core, text);
  describe_leases(core, text);
  if (core.calls != nullptr) {
    describe_sessions(*core.calls, text);
    describe_served(*core.calls, core.context.clock, core.context.now, text);
  }
  return text;
}

}  // namespace spinwire::engine
