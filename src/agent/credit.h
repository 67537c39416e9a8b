// Credit: a peer may send as many messages as this engine has granted it receives for, and the
// other way round. Hot, but for what credit.cc holds.
#pragma once

#include <cstdint>

#include "agent/engine_context.h"

namespace spinwire::agent {

// Credit to send.

/// Counts the grants in the headers of the peer's messages. False: all known credit is used.
inline bool learn_credit(Agent& a) noexcept {
  const auto news = static_cast<std::uint16_t>(a.credit.header_granted -
                                               static_cast<std::uint16_t>(a.credit.granted_to_us));
  if (news < 0x8000) {  // else the header is older than the credit cell
    a.credit.granted_to_us += news;
    a.credit.send_limit = a.credit.granted_to_us - a.credit.returned_by_us;
  }
  return a.credit.sent != a.credit.send_limit;
}
[[nodiscard]] inline std::uint32_t send_credits(const Agent& a) noexcept {
  return a.credit.send_limit - a.credit.sent;
}
/// Credit to send, with grants in headers and in the credit cell that are not counted yet.
std::uint32_t visible_credits(const Agent& a) noexcept;
/// Counts the grants in headers and in the credit cell. False: there is no credit.
bool find_credit(EngineContext& ctx, Agent& a) noexcept;
/// Counts the grants that the peer wrote into the credit cell. False: the cell held a count that no
/// peer of this protocol writes, and the connection ends.
bool read_credit_cell(EngineContext& ctx, Agent& a) noexcept;

// Credit that the peer has.

[[nodiscard]] inline std::uint32_t peer_credits(const Agent& a) noexcept {
  return a.credit.granted - a.credit.returned - a.credit.received;
}
/// Of those, what the peer knows of. Below 0: it has used some that it was not told of.
[[nodiscard]] inline std::int32_t advertised_credits(const Agent& a) noexcept {
  return static_cast<std::int32_t>(a.credit.advertised - a.credit.returned - a.credit.received);
}
/// The receives reserved for all peers whose receives are in the agent's kind of queue.
inline std::uint32_t& reserved_total(EngineContext& ctx, const Agent& a) noexcept {
  return a.own_queue != kNone ? ctx.own_queues->reserved_receives : ctx.reserved_receives;
}
/// Reserves a new connection's first receive. False: none is left.
[[nodiscard]] bool reserve_first_receive(EngineContext& ctx, Agent& a) noexcept;
/// Reserves up to `wanted` receives for the peer, as many as the budget has.
void reserve_more_receives(EngineContext& ctx, Agent& a, std::uint32_t wanted) noexcept;
/// While receives are short: takes one from an agent that has more than its fair share.
void yield_credit(EngineContext& ctx, Agent& a) noexcept;
/// Lists the agent for the end of the poll, which advertises its credit and posts its control
/// messages.
void queue_credit(EngineContext& ctx, Agent& a) noexcept;
/// Advertises the credit of listed agents that no message carried, and posts their control
/// messages.
void advertise_credit(EngineContext& ctx) noexcept;
/// Grants the credit that waited for receives.
void grant_to_waiters(EngineContext& ctx) noexcept;
/// The peer returns credit, by a message that used one itself.
void on_credit_return(EngineContext& ctx, Agent& a, std::uint32_t credits) noexcept;

/// Whether fewer receives are posted than this agent's peer might be granted.
[[nodiscard]] inline bool has_receive_shortage(EngineContext& ctx, const Agent& a) noexcept {
  return a.own_queue != kNone ? has_own_receive_shortage(ctx, a)
                              : ctx.receive_shortage > kUnreservedReceives;
}
/// Defers a grant until receives are posted for it.
void wait_for_receives(EngineContext& ctx, Agent& a) noexcept;
/// Raises the grant to the reserved receives. False: it is there already.
inline bool raise_grant(Agent& a) noexcept {
  const std::uint32_t target = a.credit.received + a.credit.returned + a.credit.reserved;
  if (static_cast<std::int32_t>(target - a.credit.granted) <= 0) return false;
  a.credit.granted = target;
  return true;
}
/// Grants the peer all receives that are reserved for it, as far as they are posted.
inline void grant_credit(EngineContext& ctx, Agent& a) noexcept {
  if (ctx.receive_shortage > ctx.shortage_allowed && has_receive_shortage(ctx, a)) [[unlikely]]
    return wait_for_receives(ctx, a);
  if (!raise_grant(a)) return;
  // A message may carry the news. Half of the reserved receives are worth a write of their own.
  if (a.credit.peer_needs_credit ||
      (a.credit.granted - a.credit.advertised) * 2 > a.credit.reserved)
    queue_credit(ctx, a);
}

}  // namespace spinwire::agent
