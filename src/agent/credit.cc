#include "agent/credit.h"

#include <algorithm>
#include <utility>

#include "agent/agent.h"
#include "agent/own_receives.h"
#include "agent/receive_slots.h"
#include "base/error.h"
#include "wire/credit_word.h"

namespace spinwire::agent {
namespace {

[[gnu::cold, gnu::noinline]] void fail_credit(EngineContext& ctx, Agent& a) noexcept {
  fail_protocol(ctx, a,
                {Status::protocol, "read the credit that the peer granted",
                 "a count that no peer of this protocol writes", base::kProtocolRemedy});
}

/// Receives for each connection when there are too few for all.
std::uint32_t fair_share(const EngineContext& ctx) noexcept {
  return std::max(ctx.reservable_receives / std::max(ctx.agents.size(), 1u), 1u);
}

void reserve_receives(EngineContext& ctx, Agent& a, std::uint32_t count) noexcept {
  reserved_total(ctx, a) += count;
  a.credit.reserved += count;
  if (a.own_queue == kNone) a.source->receives += count;
}

/// Receives that the agent's source may have besides what it has: has_share().
std::uint32_t share_of_source(const EngineContext& ctx, const Agent& a) noexcept {
  const std::uint32_t free = ctx.reservable_receives - ctx.reserved_receives;
  if (!shares_receives(ctx)) return free;
  return static_cast<std::uint32_t>(control::room_of_source(a.source->receives, free));
}

/// Whether this engine still needs messages from the peer.
bool peer_may_need_credit(const Agent& a) noexcept {
  return takes_messages(a) ||
         (a.stage == Stage::up && (!a.rendezvous.sends.empty() || !a.control_to_send.empty()));
}

/// Writes the grant into the peer's cell by a store, where the device can. The peer may see it
/// before messages that were sent earlier; grants are cumulative.
bool store_in_cell(EngineContext& ctx, Agent& a) noexcept {
  const PeerCell& cell = a.peer_cell;
  if (ctx.direct == nullptr ||
      !ctx.direct->write_word(a.qp, cell.address, cell.key, next_credit_word(a)))
    return false;
  on_credit_word_sent(ctx, a);
  return true;
}

/// Advertises credit and posts control messages. What lacks credit or a record waits; the end of an
/// outstanding write lists the agent again.
void visit(EngineContext& ctx, Agent& a) noexcept {
  if (!a.control_to_send.empty() && !post_control_messages(ctx, a)) wait_for_credit(ctx, a);
  const bool has_news =
      (a.credit.advertised != a.credit.granted || a.credit.write_again) && peer_may_need_credit(a);
  bool done = true;
  if (a.credit.by_messages.any()) [[unlikely]] {
    done = advertise_by_messages(ctx, a, has_news);
  } else if (has_news) {
    done = !a.credit.write_pending &&
           (store_in_cell(ctx, a) || submit_internal(ctx, a, OperationKind::credit_write));
    if (!done && !a.credit.write_pending) wait_for_credit(ctx, a);
  }
  a.credit.in_end_of_poll_list = false;
  if (done) a.credit.peer_needs_credit = a.credit.write_again = false;
}

/// A peer grants no more at once; see wire::check(const Endpoint&).
constexpr std::uint32_t kMostGrants = 0x8000;

/// The application may try again only now and then.
constexpr std::uint8_t kSleepsForCredit = 64;

/// Grants that a connection takes from its cell between two polls. A header has the low 16 bits of
/// a count, so one that lies unread while the cell goes on by 0x8000 would pass for a newer one.
/// The lane, or the receives, hold what a few polls read.
constexpr std::uint32_t kMostFromCell = 0x2000;

/// Whether so many grants may be taken from the cell before the next poll.
bool may_take_from_cell(const EngineContext& ctx, Agent& a, std::uint32_t grants) noexcept {
  TakenFromCell& taken = a.send_queue.from_cell;
  const auto poll = static_cast<std::uint16_t>(ctx.stats.polls);
  if (taken.poll != poll) taken = {poll, 0};
  if (taken.grants != 0 && taken.grants + grants > kMostFromCell) return false;
  taken.grants = static_cast<std::uint16_t>(taken.grants + grants);
  return true;
}

}  // namespace

void find_yielding_peers(EngineContext& ctx) noexcept {
  ctx.yield_above = ctx.reservations_refused ? fair_share(ctx) : UINT32_MAX;
}

std::uint64_t next_credit_word(const Agent& a) noexcept {
  const auto sequence = static_cast<std::uint8_t>(a.peer_cell.sequence + 1);
  return wire::encode(wire::CreditWord{a.credit.granted, sequence}, a.peer_cell.token);
}

void on_credit_word_sent(EngineContext& ctx, Agent& a) noexcept {
  ++a.peer_cell.sequence;
  a.peer_cell.last_write = ctx.now;
  a.credit.advertised = a.credit.granted;
}

bool count_grants(EngineContext& ctx, Agent& a) noexcept {
  if (count_header_grants(a) || (read_credit_cell(ctx, a) && send_credits(a) != 0)) return true;
  ctx.sleeps_for_credit = kSleepsForCredit;
  return false;
}

bool has_credit(EngineContext& ctx, Agent& a, bool& is_last) noexcept {
  if (send_credits(a) <= 1 && !count_grants(ctx, a)) return false;
  is_last = send_credits(a) == 1;
  return true;
}

std::uint32_t visible_credits(const Agent& a) noexcept {
  std::uint32_t granted = a.credit.granted_to_us;
  const auto news =
      static_cast<std::uint16_t>(a.credit.header_granted - static_cast<std::uint16_t>(granted));
  if (news < 0x8000) granted += news;
  if (a.credit.cell != nullptr) {
    const std::uint64_t word = a.credit.cell->load(std::memory_order_acquire);
    const std::uint32_t more = wire::grants_since(wire::decode_credit_word(word), granted);
    if (wire::is_genuine(word, a.credit.token) && more <= kMostGrants) granted += more;
  }
  return granted - a.credit.returned_by_us - a.credit.sent;
}

bool read_credit_cell(EngineContext& ctx, Agent& a) noexcept {
  if (a.credit.cell == nullptr) return true;
  const std::uint64_t word = a.credit.cell->load(std::memory_order_acquire);
  if (!wire::is_genuine(word, a.credit.token)) [[unlikely]] {
    distrust_cell(ctx, a);
    return true;
  }
  const std::uint32_t news =
      wire::grants_since(wire::decode_credit_word(word), a.credit.granted_to_us);
  if (news >= wire::kGrantsRange / 2) return true;  // a message's header was newer
  if (news > kMostGrants) [[unlikely]] {
    fail_credit(ctx, a);
    return false;
  }
  if (!may_take_from_cell(ctx, a, news)) return true;
  const std::uint32_t granted = a.credit.granted_to_us + news;
  a.credit.granted_to_us = granted;
  a.credit.header_granted = static_cast<std::uint16_t>(granted);  // older headers are outdated
  a.credit.send_limit = granted - a.credit.returned_by_us;
  return true;
}

void unreserve_receives(EngineContext& ctx, Agent& a, std::uint32_t count) noexcept {
  reserved_total(ctx, a) -= count;
  a.credit.reserved -= count;
  if (a.own_queue == kNone) a.source->receives -= count;
}

bool reserve_first_receive(EngineContext& ctx, Agent& a) noexcept {
  a.activity.last_heard = a.activity.last_sent = ctx.clock.now();
  if (a.raw != nullptr) return true;
  const bool shares = ctx.device->srq() != nullptr;
  if (shares ? ctx.reserved_receives >= ctx.reservable_receives : !acquire_own_queue(ctx, a))
    return false;
  reserve_receives(ctx, a, 1);
  find_yielding_peers(ctx);
  a.credit.granted = a.credit.advertised = 1;
  return true;
}

void reserve_more_receives(EngineContext& ctx, Agent& a, std::uint32_t wanted) noexcept {
  wanted = std::min(wanted, a.attributes.credits);
  const std::uint32_t has = a.credit.reserved + a.rendezvous.credited;
  if (a.own_queue != kNone) {  // no other connection can use them
    const std::uint32_t most = std::min(wanted, ctx.own_queues->share.credits);
    return reserve_receives(ctx, a, std::max(most, has) - has);
  }
  const std::uint32_t most = std::min(wanted, ctx.yield_above);
  if (most <= has) return;
  // Up to a quarter stays free for future connections.
  const std::uint32_t to_come =
      std::min(ctx.agents.capacity() - ctx.agents.size(), ctx.reservable_receives / 4);
  const std::uint32_t taken = ctx.reserved_receives + to_come;
  const std::uint32_t free = ctx.reservable_receives - std::min(taken, ctx.reservable_receives);
  const std::uint32_t more = std::min({most - has, free, share_of_source(ctx, a)});
  reserve_receives(ctx, a, more);
  ctx.reservations_refused = has + more < most;
  find_yielding_peers(ctx);
}

void yield_credit(EngineContext& ctx, Agent& a) noexcept {
  if (a.receives == ReceiveSource::own) return;
  unreserve_receives(ctx, a, 1);
}

bool write_credit(EngineContext& ctx, Agent& a) noexcept {
  if (a.credit.write_pending) return false;
  const CreditByMessages& by = a.credit.by_messages;
  if (!by.answers) return submit_internal(ctx, a, OperationKind::credit_write);
  return by.may_send && submit_credit_message(ctx, a, wire::MessageKind::credit);
}

void write_first_word(EngineContext& ctx, Agent& a) noexcept {
  if (store_in_cell(ctx, a)) return;
  if (write_credit(ctx, a)) {
    flush(ctx, a);
  } else {
    a.credit.write_again = true;
    visit_at_end_of_poll(ctx, a);
  }
}

void visit_at_end_of_poll(EngineContext& ctx, Agent& a) noexcept {
  if (a.credit.in_end_of_poll_list) return;
  a.credit.in_end_of_poll_list = true;
  ctx.end_of_poll_list.add(a);
}

Agent*& next_credit_waiter(Agent& a) noexcept { return a.control_counts.next_waiter; }

void wait_for_credit(EngineContext& ctx, Agent& a) noexcept {
  if (!std::exchange(a.control_counts.waits_for_credit, true)) ctx.credit_waiters.push_back(a);
}

void stop_waiting_for_credit(EngineContext& ctx, Agent& a) noexcept {
  if (std::exchange(a.control_counts.waits_for_credit, false)) ctx.credit_waiters.erase(a);
}

void visit_listed_agents(EngineContext& ctx) noexcept {
  for (std::uint32_t i = 0; i < ctx.end_of_poll_list.count(); ++i)
    visit(ctx, ctx.end_of_poll_list[i]);
  ctx.end_of_poll_list.cut(0);
  for (std::uint32_t i = 0; i < kCreditWaitersPerPoll && !ctx.credit_waiters.empty(); ++i) {
    Agent& a = ctx.credit_waiters.pop_front();
    a.control_counts.waits_for_credit = false;
    visit_at_end_of_poll(ctx, a);
  }
}

void advertise_to_waiting_peer(EngineContext& ctx, Agent& a) noexcept {
  if (a.credit.peer_needs_credit && a.credit.advertised != a.credit.granted)
    visit_at_end_of_poll(ctx, a);
}

void wait_for_receives(EngineContext& ctx, Agent& a) noexcept {
  advertise_to_waiting_peer(ctx, a);
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
    if (peer_may_need_credit(a) && raise_grant(a)) visit_at_end_of_poll(ctx, a);
  }
  ctx.receive_waiters.cut(kept);
}

void on_credit_return(EngineContext& ctx, Agent& a, std::uint32_t credits) noexcept {
  ++a.credit.received;
  a.credit.returned += credits;
  // Takes back grants that the peer does not know. Advertised grants stay reserved.
  a.credit.granted = a.credit.advertised;
  const std::uint32_t kept = std::max(peer_credits(a), 1u);
  if (kept < a.credit.reserved) unreserve_receives(ctx, a, a.credit.reserved - kept);
  grant_credit(ctx, a);
}

}  // namespace spinwire::agent
