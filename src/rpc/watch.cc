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

Call& call_of(Rpc& r, const Watch::Entry& entry) noexcept {
  const ClientSession& c = r.clients.at(wire::RpcName::index(entry.session));
  return c.calls[entry.number & (c.window - 1)];
}

}  // namespace

void make_room_to_watch(Rpc& r) noexcept {
  r.watch.make_room(
      [&r](const Watch::Entry& entry, std::uint16_t place) { call_of(r, entry).watched = place; });
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
  const std::uint64_t next = std::min(due, k.deadline);
  k.exact = next < now + r.least_patience;
  return k.exact ? next : kNever;
}

void on_watch_timer(Rpc& r) noexcept {
  const std::uint64_t now = r.shared.clock.now();
  while (const Watch::Entry* const first = r.watch.first()) {
    const Watch::Entry entry = *first;
    if (now < entry.since + r.least_patience)
      return r.shared.timers.reschedule(r.watch_timer, entry.since + r.least_patience);
    r.watch.pop();
    ClientSession& c = r.clients.at(wire::RpcName::index(entry.session));
    call_of(r, entry).watched = r.watch.add(now, entry.session, entry.number);
    const std::uint64_t next = look_at_call(r, c, entry.number & (c.window - 1), now);
    if (c.name != entry.session || c.state != SessionState::ready) continue;
    if (next != kNever) look_by(r, c, next);
    if (c.waiting_count != 0) pump(r, c);
  }
}

}  // namespace spinwire::rpc
