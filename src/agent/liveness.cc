// How the death of a peer is noticed. A connection ends with Status::peer_lost when
//
//   the device          fails an operation after its last retry: see completion_errors.cc
//   the liveness timer  finds the peer silent for connections.peer_timeout while operations are
//                       outstanding; keepalives see to it that there are some
//   the control port    hears from rdma_cm that the peer disconnected, and calls peer_lost()
//
// Cold.
#include <fmt/format.h>

#include <algorithm>

#include "agent/agent.h"

namespace spinwire::agent {
namespace {

Nanoseconds check_interval(const Config::Connections& c) noexcept {
  return std::min({c.keepalive_interval, c.peer_timeout, c.credit_idle_timeout}) / 2;
}

/// With no operation outstanding: sends a keepalive to a silent peer and returns unused credit.
void check_idle_peer(EngineContext& ctx, Agent& a) noexcept {
  const Config::Connections& c = ctx.config.connections;
  const std::uint64_t now = ctx.clock.now();
  a.liveness.last_check = 0;  // the next check starts a new silence
  if (a.raw != nullptr) return;
  const std::uint64_t silent = now - std::min(a.liveness.last_heard, now);
  if (silent > ctx.clock.ticks(c.keepalive_interval) && !a.liveness.keepalive_pending)
    (void)submit_control(ctx, a, OperationKind::keepalive);
  const bool unused =
      now - std::min(a.liveness.last_sent, now) > ctx.clock.ticks(c.credit_idle_timeout);
  if (unused) (void)learn_credit(a);
  if (unused && read_credit_cell(ctx, a) && send_credits(a) >= 2) {
    // The return takes a credit itself and leaves one.
    (void)submit_control(ctx, a, OperationKind::credit_return,
                         static_cast<std::uint16_t>(send_credits(a) - 2));
  }
}

/// Whether the peer has been silent for peer_timeout while operations were outstanding. Time in
/// which this engine did not poll says nothing about the peer, so one check adds no more than two
/// intervals.
bool is_peer_silent(EngineContext& ctx, Agent& a) noexcept {
  const Config::Connections& c = ctx.config.connections;
  const std::uint64_t now = ctx.clock.now();
  const std::uint64_t most = 2 * ctx.clock.ticks(check_interval(c));
  if (a.liveness.last_heard >= a.liveness.last_check) {
    a.liveness.silent_ticks = 0;
  } else {
    a.liveness.silent_ticks += std::min(now - std::min(a.liveness.last_check, now), most);
  }
  a.liveness.last_check = now;
  return a.liveness.silent_ticks > ctx.clock.ticks(c.peer_timeout);
}

}  // namespace

void start_liveness_checks(EngineContext& ctx, Agent& a) noexcept {
  const Nanoseconds interval = check_interval(ctx.config.connections);
  ctx.timers.reschedule(a.liveness.timer, ctx.clock.now() + ctx.clock.ticks(interval));
}

void check_liveness(EngineContext& ctx, Agent& a) noexcept {
  if (a.state != ConnectionState::ready) return;
  start_liveness_checks(ctx, a);
  if (idle(a)) return check_idle_peer(ctx, a);
  if (!is_peer_silent(ctx, a)) return;
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(
      Nanoseconds(ctx.config.connections.peer_timeout));
  peer_lost(ctx, a, fmt::format("operations on the connection to {}", a.peer.name.data()),
            fmt::format("no sign of life for {} ms", ms.count()),
            "the peer's process hangs or its network is down");
}

void peer_lost(EngineContext& ctx, Agent& a, std::string asked, std::string found,
               const char* remedy) noexcept {
  fail(ctx, a, {Status::peer_lost, std::move(asked), std::move(found), remedy});
}

}  // namespace spinwire::agent
