// Calls that get no answer: they are sent again, or end when their deadline has passed.
#include <algorithm>

#include "rpc/calling.h"

namespace spinwire::rpc {

namespace {

constexpr std::uint64_t kNever = ~std::uint64_t{0};

void resend(Rpc& r, ClientSession& c, Call& k, std::uint64_t now) noexcept {
  if (!send(r, c.route->to, header_of(c, k), k.payload)) return;
  ++r.stats.retransmits;
  if (k.tries < kMostBackoff) ++k.tries;
  k.sent_at = now;
}

/// Looks at all calls of a session; answers the tick of the next look, as look_at_call().
std::uint64_t look_at_session(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  const std::uint32_t name = c.name;
  std::uint64_t next = kNever;
  for (std::uint32_t slot = 0; slot < c.window; ++slot) {
    if ((c.free & bit(slot)) != 0) continue;
    next = std::min(next, look_at_call(r, c, slot, now));
    if (c.name != name || c.state != SessionState::ready) break;
  }
  return next;
}

}  // namespace

void make_room_to_watch(Rpc& r) noexcept {
  r.watch.make_room([&r](const Watch::Entry& entry, std::uint16_t place) {
    r.clients.at(wire::RpcName::index(entry.session)).watched = place;
  });
}

void look_early(Rpc& r, ClientSession& c, Call& call) noexcept {
  call.exact = true;
  look_by(r, c, call.deadline);
}

std::uint64_t look_at_call(Rpc& r, ClientSession& c, std::uint32_t slot,
                           std::uint64_t now) noexcept {
  Call& k = c.calls[slot];
  if (now >= k.deadline) {
    const ReplyCallback done = k.done;
    vacate(r, c, k, slot);
    end_call(done, Status::timed_out);
    return kNever;
  }
  std::uint64_t due = k.sent_at + (c.patience << k.tries);
  if (now >= due) {
    resend(r, c, k, now);
    due = now + (c.patience << k.tries);
  }
  // The watch looks again within its time. To send again may wait for that, unless by much: of a
  // busy session most calls that are looked at have just begun.
  k.exact = std::min(due + r.least_patience / 4, k.deadline) < now + r.least_patience;
  return k.exact ? std::min(due, k.deadline) : kNever;
}

void on_watch_timer(Rpc& r) noexcept {
  const std::uint64_t now = r.context.clock.now();
  while (const Watch::Entry* const first = r.watch.first()) {
    const Watch::Entry entry = *first;
    if (now < entry.since + r.least_patience)
      return r.context.timers.reschedule(r.watch_timer, entry.since + r.least_patience);
    r.watch.pop();
    ClientSession& c = r.clients.at(wire::RpcName::index(entry.session));
    c.watched = r.watch.add(now, entry.session);
    const std::uint64_t next = look_at_session(r, c, now);
    if (c.name != entry.session || c.state != SessionState::ready) continue;
    if (next != kNever) look_by(r, c, next);
    if (c.waiting_count != 0) pump(r, c);
  }
}

}  // namespace spinwire::rpc
