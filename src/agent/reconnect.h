// Outbound connections that reconnect, with backoff, after a loss or a failed attempt. Cold.
#pragma once

#include <cstdint>
#include <utility>

#include "agent/reconnect_plan.h"
#include "control/address.h"
#include "spinwire/engine.h"
#include "spinwire/status.h"

namespace spinwire::agent {

struct Agent;
struct EngineContext;

/// State that a reconnecting connection keeps between attempts.
struct ReconnectState {
  ReconnectState(ReconnectPlan way, Via how) noexcept : plan(std::move(way)), via(how) {}
  ReconnectPlan plan;
  Via via;
  Error first{Status::ok, {}, {}, {}};  ///< why the connection was lost; ok while it is ready
  Error last;                           ///< why the last attempt failed
  std::uint64_t ready_at = 0;           ///< tick of becoming ready; 0 before that
  std::uint64_t next_attempt = 0;       ///< tick, while it backs off
  bool backing_off = false;             ///< it waits for `next_attempt`
  bool is_over = false;                 ///< no attempt may follow
};

/// Whether the connection that has just ended reconnects.
[[nodiscard]] bool can_reconnect(const EngineContext& ctx, const Agent& a) noexcept;
/// Drops this attempt, runs on_interrupted, and waits for the next attempt.
void back_off(EngineContext& ctx, Agent& a) noexcept;
/// How to reach the peer again.
struct ReconnectWay {
  const control::Address& to;
  Via via;
  Nanoseconds timeout;
};
/// Starts the next attempt. Errors: limit (no receive is left to reserve), and those of
/// config::use_local_path().
[[nodiscard]] Result<ReconnectWay> start_attempt(EngineContext& ctx, Agent& a);
/// The remedy of what was lost with the link of a local port, and goes on through another port.
inline constexpr const char* kPortDownRemedy =
    "it is made again through another local path; look at the cable, the switch and the interface";
/// The link of a local port has gone down: connections that can go on through another port are lost
/// at once.
void on_port_down(EngineContext& ctx, std::uint8_t port) noexcept;
/// The error that on_closed reports after the last attempt.
[[nodiscard]] Error final_cause(Agent& a) noexcept;

}  // namespace spinwire::agent
