#include "agent/credit.h"

#include <algorithm>

#include "agent/agent.h"
#include "agent/own_receives.h"
#include "agent/receive_slots.h"
#include "wire/credit_word.h"

namespace spinwire::agent {
namespace {

[[gnu::cold, gnu::noinline]] void fail_credit(EngineContext& ctx, Agent& a) noexcept {
  fail_bad(ctx, a,
           {Status::protocol, "read the credit that the peer granted",
            "a count that no peer of this protocol writes", "the peer is broken or hostile"});
}

/// Receives for each connection when there are too few for all.
std::uint32_t fair_share(const EngineContext& ctx) noexcept {
  return std::max(ctx.reservable_receives / std::max(ctx.agents.size(), 1u), 1u);
}

/// Whether the peer may still have something to send that this engine needs.
bool takes_credit(const Agent& a) noexcept {
  return a.state == ConnectionState::ready ||
         (a.stage == Stage::up &&
          (!a.rendezvous.sends.empty() || !a.control_queue.messages.empty()));
}

/// False: the agent stays listed for the next poll.
bool advertise(EngineContext& ctx, Agent& a) noexcept {
  const bool posted = a.control_queue.messages.empty() || post_control_messages(ctx, a);
  const bool has_news = a.credit.advertised != a.credit.granted || a.credit.write_again;
  if (has_news && takes_credit(a) &&
      (a.credit.write_pending || !submit_control(ctx, a, OperationKind::credit_write)))
    return false;
  if (!posted) return false;
  a.credit.in_credit_queue = a.credit.peer_needs_credit = a.credit.write_again = false;
  return true;
}

/// What the credit cell grants beyond the known total: kGrantsRange / 2 or more if nothing. A word
/// without the token is not the peer's.
std::uint32_t grants_in_cell(const Agent& a, std::uint32_t known) noexcept {
  const auto word = wire::decode_credit_word(a.credit.cell->word.load(std::memory_order_acquire));
  return word.token == a.credit.token ? wire::grants_since(word, known) : wire::kGrantsRange;
}
/// A peer grants no more at once; see wire::check(const Endpoint&).
constexpr std::uint32_t kMostGrants = 0x8000;

}  // namespace

bool find_credit(EngineContext& ctx, Agent& a) noexcept {
  return learn_credit(a) || (read_credit_cell(ctx, a) && send_credits(a) != 0);
}

std::uint32_t visible_credits(const Agent& a) noexcept {
  std::uint32_t granted = a.credit.granted_to_us;
  const auto news =
      static_cast<std::uint16_t>(a.credit.header_granted - static_cast<std::uint16_t>(granted));
  if (news < 0x8000) granted += news;
  if (a.credit.cell != nullptr) {
    const std::uint32_t more = grants_in_cell(a, granted);
    if (more <= kMostGrants) granted += more;
  }
  return granted - a.credit.returned_by_us - a.credit.sent;
}

bool read_credit_cell(EngineContext& ctx, Agent& a) noexcept {
  if (a.credit.cell == nullptr) return true;
  const std::uint32_t news = grants_in_cell(a, a.credit.granted_to_us);
  if (news >= wire::kGrantsRange / 2) return true;  // a message's header was newer
  if (news > kMostGrants) [[unlikely]] {
    fail_credit(ctx, a);
    return false;
  }
  const std::uint32_t granted = a.credit.granted_to_us + news;
  a.credit.granted_to_us = granted;
  a.credit.header_granted = static_cast<std::uint16_t>(granted);  // older headers are outdated
  a.credit.send_limit = granted - a.credit.returned_by_us;
  return true;
}

bool reserve_first_receive(EngineContext& ctx, Agent& a) noexcept {
  a.liveness.last_heard = a.liveness.last_sent = ctx.clock.now();
  if (a.raw != nullptr) return true;
  const bool shares = ctx.device->srq() != nullptr;
  if (shares ? ctx.reserved_receives >= ctx.reservable_receives : !acquire_own_queue(ctx, a))
    return false;
  ++reserved_total(ctx, a);
  a.credit.reserved = 1;
  a.credit.granted = a.credit.advertised = 1;
  return true;
}

void reserve_more_receives(EngineContext& ctx, Agent& a, std::uint32_t wanted) noexcept {
  if (a.own_queue != kNone) {  // no other connection could use them
    const std::uint32_t most = std::min(wanted, ctx.own_queues->share.credits);
    const std::uint32_t more = std::max(most, a.credit.reserved) - a.credit.reserved;
    ctx.own_queues->reserved_receives += more;
    a.credit.reserved += more;
    return;
  }
  std::uint32_t most = std::min(wanted, ctx.config.connections.credits);
  if (ctx.reservations_refused) most = std::min(most, fair_share(ctx));
  if (most <= a.credit.reserved) return;
  // Up to a quarter stays free for connections to come.
  const std::uint32_t to_come =
      std::min(ctx.agents.capacity() - ctx.agents.size(), ctx.reservable_receives / 4);
  const std::uint32_t taken = ctx.reserved_receives + to_come;
  const std::uint32_t free = ctx.reservable_receives - std::min(taken, ctx.reservable_receives);
  const std::uint32_t more = std::min(most - a.credit.reserved, free);
  a.credit.reserved += more;
  ctx.reserved_receives += more;
  ctx.reservations_refused = a.credit.reserved < most;
}

void yield_credit(EngineContext& ctx, Agent& a) noexcept {
  if (a.own_queue != kNone || a.credit.reserved <= fair_share(ctx)) return;
  --a.credit.reserved;
  --ctx.reserved_receives;
}

void queue_credit(EngineContext& ctx, Agent& a) noexcept {
  if (a.credit.in_credit_queue) return;
  a.credit.in_credit_queue = true;
  ctx.credit_queue.add(a);
}

void advertise_credit(EngineContext& ctx) noexcept {
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < ctx.credit_queue.count(); ++i) {
    Agent& a = ctx.credit_queue[i];
    if (!advertise(ctx, a)) ctx.credit_queue.keep(kept++, a);
  }
  ctx.credit_queue.cut(kept);
}

void wait_for_receives(EngineContext& ctx, Agent& a) noexcept {
  // A peer without credit learns of earlier grants now.
  if (a.credit.peer_needs_credit && a.credit.advertised != a.credit.granted) queue_credit(ctx, a);
  if (a.credit.waits_for_receives) return;
  a.credit.waits_for_receives = true;
  ctx.receive_waiters.add(a);
}

void grant_to_waiters(EngineContext& ctx) noexcept {
  post_receives(ctx);
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < ctx.receive_waiters.count(); ++i) {
    Agent& a = ctx.receive_waiters[i];
    if (has_receive_shortage(ctx, a)) {
      ctx.receive_waiters.keep(kept++, a);
      continue;
    }
    a.credit.waits_for_receives = false;
    if (takes_credit(a) && raise_grant(a)) queue_credit(ctx, a);
  }
  ctx.receive_waiters.cut(kept);
}

void on_credit_return(EngineContext& ctx, Agent& a, std::uint32_t credits) noexcept {
  ++a.credit.received;
  a.credit.returned += credits;
  // Grants that the peer has not heard of are taken back. Those on their way to it stay reserved.
  a.credit.granted = a.credit.advertised;
  const std::uint32_t kept = std::max(peer_credits(a), 1u);
  if (kept < a.credit.reserved) {
    reserved_total(ctx, a) -= a.credit.reserved - kept;
    a.credit.reserved = kept;
  }
  grant_credit(ctx, a);
}

}  // namespace spinwire::agent
