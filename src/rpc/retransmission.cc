// Calls without a reply: they are sent again after the RTO, and end when their deadline has passed.
#include "rpc/retransmission.h"

#include <algorithm>

#include "rpc/backlog.h"
#include "rpc/call_cancel.h"
#include "rpc/client_call.h"
#include "rpc/client_session.h"
#include "rpc/session_liveness.h"
#include "rpc/session_recording.h"

namespace spinwire::rpc {

namespace {

constexpr std::uint64_t kNever = ~std::uint64_t{0};

/// Returns `is_early`.
bool set_on_session_timer(ClientSlot& k, bool is_early) noexcept {
  k.flags =
      static_cast<std::uint8_t>((k.flags & ~kOnSessionTimer) | (is_early ? kOnSessionTimer : 0));
  return is_early;
}

void resend(Rpc& r, ClientSession& c, ClientSlot& k, std::uint64_t now) noexcept {
  if (!send(r, c.peer_address->destination, header_of(c, k), k.payload)) return;
  ++r.stats.retransmitted_requests;
  ++c.retransmissions;
  record(r, c, observe::EventKind::retransmission, {});
  if (k.resends < kMaxBackoffShift) ++k.resends;
  k.sent_at = now;
}

/// Checks all calls of a session. Returns the tick of the next check, like check_slot().
std::uint64_t check_slots(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  const std::uint32_t name = c.name;
  std::uint64_t next = kNever;
  for (std::uint32_t slot = 0; slot < c.window; ++slot) {
    if (!is_busy(c, slot)) continue;
    next = std::min(next, check_slot(r, c, slot, now));
    if (!is_ready(r, name)) break;
  }
  return next;
}

}  // namespace

void grow_retransmission_queue(Rpc& r) noexcept {
  r.retransmission_queue.make_room(
      [&r](const RetransmissionQueue::Entry& entry, std::uint16_t place) {
        r.clients.at(wire::RpcName::index(entry.session)).retransmission_place = place;
      });
}

void schedule_early_check(Rpc& r, ClientSession& c, ClientSlot& call) noexcept {
  call.flags |= kOnSessionTimer;
  schedule_check(r, c, call.deadline);
}

std::uint64_t check_slot(Rpc& r, ClientSession& c, std::uint32_t slot, std::uint64_t now) noexcept {
  ClientSlot& k = c.slots[slot];
  if (k.outcome) return kNever;
  if (now >= k.deadline) {
    record(r, c, observe::EventKind::timeout, {"of an inline call"});
    end_call_in_slot(r, c, slot, Status::timed_out);
    return kNever;
  }
  if (k.resends == kNotSent) {  // see unsent.h
    return set_on_session_timer(k, k.deadline < now + r.min_rto) ? k.deadline : kNever;
  }
  std::uint64_t due = k.sent_at + (c.rto << k.resends);
  if (now >= due) {
    resend(r, c, k, now);
    due = now + (c.rto << k.resends);
  }
  // The retransmission timer fires within min_rto. A resend may wait a quarter of min_rto for it:
  // most calls of a busy session have just begun.
  const bool is_early = std::min(due + r.min_rto / 4, k.deadline) < now + r.min_rto;
  return set_on_session_timer(k, is_early) ? std::min(due, k.deadline) : kNever;
}

void on_retransmission_timer(Rpc& r) noexcept {
  const std::uint64_t now = r.context.clock.now();
  while (const RetransmissionQueue::Entry* const first = r.retransmission_queue.first()) {
    const RetransmissionQueue::Entry entry = *first;
    if (now < entry.checked_at + r.min_rto)
      return r.context.timers.reschedule(r.retransmission_timer, entry.checked_at + r.min_rto);
    r.retransmission_queue.pop();
    ClientSession& c = r.clients.at(wire::RpcName::index(entry.session));
    c.retransmission_place = r.retransmission_queue.add(now, entry.session);
    if (end_if_server_ended(r, c)) continue;
    const std::uint64_t next = check_slots(r, c, now);
    if (!is_ready(r, entry.session)) continue;
    if (next != kNever) schedule_check(r, c, next);
    if (c.backlog_count != 0) send_backlog(r, c);
  }
}

}  // namespace spinwire::rpc
