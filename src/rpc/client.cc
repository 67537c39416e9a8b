// The client's end of sessions: calls, their replies, and what becomes of those without.
#include <algorithm>
#include <bit>
#include <new>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "rpc/bulk.h"
#include "rpc/calling.h"

namespace spinwire::rpc {

namespace {

using wire::RpcHeader;
using wire::RpcKind;

/// Where there are no datagrams, the session's connection tells.
void tell(Rpc& r, const ClientSession& c, RpcKind kind, std::uint32_t number = 0) noexcept {
  if (takes_datagrams(*c.route)) (void)send(r, c.route->to, {c.peer, number, 0, kind, 0, 0, 0}, {});
}

/// All calls with lower numbers are over. With none under way the slots go on side by side, so that
/// this is said of every call that there was, and of none that follows, whenever it arrives. Of
/// slots that have been used so differently that their numbers have no order nothing is said: the
/// server would not know which way they went on.
std::uint32_t first_not_over(ClientSession& c) noexcept {
  constexpr std::int32_t kFar = 1 << 30;
  const std::uint32_t uses = ~(c.window - 1u);
  const std::uint32_t base = c.calls[0].number & uses;
  if (c.under_way == 0 && c.last_call == c.rested) return base;
  std::int32_t least = 0;
  std::int32_t most = 0;
  for (std::uint32_t slot = 1; slot < c.window; ++slot) {
    const auto ahead = static_cast<std::int32_t>((c.calls[slot].number & uses) - base);
    least = std::min(least, ahead);
    most = std::max(most, ahead);
  }
  if (least <= -kFar || most >= kFar) return base | wire::kNothingOver;
  const std::uint32_t last = base + static_cast<std::uint32_t>(most);
  if (c.under_way != 0) return base + static_cast<std::uint32_t>(least);
  for (std::uint32_t slot = 0; slot < c.window; ++slot) c.calls[slot].number = last + slot;
  if (c.waiting_count == 0) c.rested = c.last_call;
  return last;
}

void stall(Rpc& r, ClientSession& c) noexcept {
  if (c.listed) return;
  c.listed = true;
  c.next_stalled = kNone;
  const std::uint32_t index = wire::RpcName::index(c.name);
  if (r.stalled_first == kNone) {
    r.stalled_first = index;
  } else {
    r.clients.at(r.stalled_last).next_stalled = index;
  }
  r.stalled_last = index;
}

/// A session has room for calls that wait while there are any: of many sessions, the pool could not
/// hold that of each.
[[gnu::cold, gnu::noinline]] bool make_waiting(Rpc& r, ClientSession& c) noexcept {
  static_assert(std::is_trivially_destructible_v<Waiting>);
  const std::size_t room = r.context.config.rpc.backlog;
  c.waiting_block = r.context.arena->allocate(memory::PoolId::send, room * sizeof(Waiting));
  if (c.waiting_block == nullptr) return false;
  c.waiting = reinterpret_cast<Waiting*>(c.waiting_block->payload);
  return true;
}

void drop_waiting(ClientSession& c) noexcept {
  if (c.waiting == nullptr || c.waiting_count != 0) return;
  c.waiting = nullptr;
  detail::release(std::exchange(c.waiting_block, nullptr));
}

}  // namespace

ClientSession* make_session(Rpc& r, std::uint32_t window) {
  const std::uint32_t index = r.clients.acquire(window);
  if (index == kNone) return nullptr;
  ClientSession& c = r.clients.at(index);
  c.calls = r.clients.places(c);
  const std::uint32_t first = first_number(r);
  for (std::uint32_t i = 0; i < window; ++i) c.calls[i].number = first + window + i;
  c.life = r.clients.generation(index);
  c.name = wire::RpcName::make(index, c.life % 4095 + 1);
  c.window = static_cast<std::uint16_t>(window);
  c.free = ~std::uint64_t{0} >> (kWindowMax - window);
  c.under_way = 0;
  c.waiting_first = c.waiting_count = c.last_call = 0;
  c.granted = 1;
  c.allowed = 0;
  c.flow = {};
  if (r.target != ~std::uint64_t{0}) c.flow.window = c.flow.whole = window * kOneCall;
  c.listed = false;
  c.state = SessionState::opening;
  c.smooth = c.variance = c.waited = 0;
  c.shortest = c.lately = ~std::uint64_t{0};
  c.patience = r.least_patience;
  c.peer = 0;
  c.route = &r.nowhere;
  c.handshake = c.rested = kNone;
  c.timer.index = index;
  c.timer.kind = kClientTimer;
  return &c;
}

void take_peer(Rpc& r, ClientSession& c, const wire::SessionEnd& peer, Route* route) noexcept {
  c.route = route;
  c.peer = peer.name;
  c.longest = static_cast<std::uint16_t>(
      wire::rpc_payload(std::min<std::uint32_t>(peer.mtu, r.port->mtu())));
  if (takes_datagrams(*route)) return become_ready(r, c);
  c.granted = 0;  // so that no call takes the way of datagrams
  if (const Status status = connect_at_once(r, c); status != Status::ok)
    lose(r, c, status, "there is no memory for its calls");
}

void become_ready(Rpc& r, ClientSession& c) noexcept {
  c.state = SessionState::ready;
  allow(c);
  c.last_heard = c.last_other = c.looked_at = r.context.clock.now();
  r.context.timers.reschedule(c.timer, c.last_heard + r.keepalive);
  if (c.on_ready) c.on_ready(Session(r.context.core, id_of(c)));
}

/// Number `i` of those that wait does not any more.
static Waiting take_waiting(Rpc& r, ClientSession& c, std::uint32_t i) noexcept {
  const Waiting w =
      take_out(c.waiting, r.context.config.rpc.backlog, c.waiting_first, c.waiting_count, i);
  drop_waiting(c);
  return w;
}

/// Ends it; callbacks may do anything.
static void end_waiting(Rpc& r, ClientSession& c, std::uint32_t i, Status status) noexcept {
  Waiting w = take_waiting(r, c, i);
  clear(w.payload);
  end_call(w.done, status);
}

Status put_off(Rpc& r, ClientSession& c, Asked asked, const ReplyCallback& done) noexcept {
  if (c.state != SessionState::ready) return Status::not_connected;
  if (!takes_datagrams(*c.route)) return Status::message_too_long;  // for that way
  const std::uint32_t room = r.context.config.rpc.backlog;
  if (c.waiting_count == room) return Status::would_block;
  if (c.waiting == nullptr && !make_waiting(r, c)) return Status::no_buffer;
  Waiting& w = *new (&c.waiting[(c.waiting_first + c.waiting_count) % room]) Waiting;
  if (!note(r, c, asked, done, w)) {
    drop_waiting(c);
    return Status::no_buffer;
  }
  look_by(r, c, asked.deadline);
  ++c.waiting_count;
  // What it waits for may be something else than the session's own window.
  if (c.under_way < c.allowed) stall(r, c);
  return Status::ok;
}

void pump(Rpc& r, ClientSession& c) noexcept {
  while (c.waiting_count != 0 && c.state == SessionState::ready) {
    if (!may_start(r, c)) break;
    const Waiting w = take_waiting(r, c, 0);
    const std::uint32_t slot = free_slot(c);
    Call& k = c.calls[slot];
    k.method = w.method;
    k.size = static_cast<std::uint16_t>(w.size);
    k.id = w.id;
    k.deadline = w.deadline;
    k.done = w.done;
    k.payload = w.payload;
    start(r, c, k, slot, header_of(c, k), r.context.now);
  }
  if (c.waiting_count != 0 && c.under_way < c.allowed) stall(r, c);
}

void take_answer(Rpc& r, const RpcHeader& header, const ibv_wc& wc,
                 const std::byte* route) noexcept {
  ClientSession* const c = find_client(r, header.session);
  if (c == nullptr || !c->route->from.is_of(wc, route)) {
    ++r.stats.bad_datagrams;
    return;
  }
  c->last_other = r.context.now;
  if (header.kind == RpcKind::closed) return lose(r, *c, Status::ok, nullptr);
  if (header.kind != RpcKind::unknown || header.number != c->peer) return;
  if (c->state == SessionState::closing) return lose(r, *c, Status::ok, nullptr);
  lose(r, *c, Status::peer_lost, "it has forgotten the session: for too long it had heard nothing");
}

Status cancel(Rpc& r, ClientSession& c, std::uint32_t id) noexcept {
  for (std::uint32_t slot = 0; slot < c.window; ++slot) {
    Call& k = c.calls[slot];
    if ((c.free & bit(slot)) != 0 || k.id != id) continue;
    const ReplyCallback done = k.done;
    vacate(r, c, k, slot);
    end_call(done, Status::cancelled);
    pump(r, c);
    return Status::ok;
  }
  for (std::uint32_t i = 0; i < c.waiting_count; ++i) {
    if (c.waiting[(c.waiting_first + i) % r.context.config.rpc.backlog].id != id) continue;
    end_waiting(r, c, i, Status::cancelled);
    return Status::ok;
  }
  return c.bulk != nullptr ? cancel_bulk(r, c, id) : Status::invalid_argument;
}

namespace {

/// Ends whatever is under way or waits. Callbacks may call again, which is refused by the state.
void end_calls(Rpc& r, ClientSession& c, Status status) noexcept {
  for (std::uint32_t slot = 0; slot < c.window; ++slot) {
    if ((c.free & bit(slot)) != 0) continue;
    const ReplyCallback done = c.calls[slot].done;
    vacate(r, c, c.calls[slot], slot);
    end_call(done, status);
  }
  while (c.waiting_count != 0) end_waiting(r, c, 0, status);
}

}  // namespace

Status close(Rpc& r, ClientSession& c) noexcept {
  if (c.state == SessionState::opening) return lose(r, c, Status::ok, nullptr), Status::ok;
  if (c.state != SessionState::ready) return Status::not_connected;
  c.state = SessionState::closing;
  allow(c);
  c.deadline = r.context.clock.now() + r.close_timeout;
  end_calls(r, c, Status::flushed);
  const bool connected = close_bulk(r, c);
  tell(r, c, RpcKind::close);
  std::uint64_t next = c.deadline;  // the connection's end comes first
  if (takes_datagrams(*c.route) || !connected) next = r.context.clock.now() + r.least_patience;
  if (!takes_datagrams(*c.route) && !connected) c.deadline = next;  // nobody could be told
  r.context.timers.reschedule(c.timer, next);
  return Status::ok;
}

namespace {

Error reason(const ClientSession& c, Status status, const char* found) noexcept {
  try {
    if (status == Status::ok) return {Status::ok, {}, {}, {}};
    const bool opened = c.state != SessionState::opening;
    return {status, (opened ? "talk with " : "open a session with ") + c.address, found,
            opened ? "see whether its process is there and polls"
                   : "see whether an engine listens there, and what it says"};
  } catch (...) {
    return base::out_of_memory();
  }
}

}  // namespace

void lose(Rpc& r, ClientSession& c, Status status, const char* found) noexcept {
  lose(r, c, reason(c, status, found));
}

void lose(Rpc& r, ClientSession& c, const Error& why) noexcept {
  if (c.state == SessionState::closed) return;
  if (c.bulk != nullptr && !leave_bulk(r, c, why)) return;
  c.state = SessionState::closed;
  allow(c);
  end_calls(r, c, why.status == Status::ok ? Status::flushed : why.status);
  if (c.on_closed) c.on_closed(Session(r.context.core, id_of(c)), why);
  r.context.timers.cancel(c.timer);
  if (c.route != &r.nowhere) drop_route(r, std::exchange(c.route, &r.nowhere));
  if (c.listed) {  // in a line that is short, if there is one
    std::uint32_t* at = &r.stalled_first;
    std::uint32_t before = kNone;
    while (*at != c.timer.index) at = &r.clients.at(before = *at).next_stalled;
    *at = c.next_stalled;
    if (r.stalled_last == c.timer.index) r.stalled_last = before;
    c.listed = false;
  }
  c.name = 0;
  c.on_ready = nullptr;
  c.on_closed = nullptr;
  r.clients.release(c.timer.index);
}

namespace {

/// Sees to calls that are due before the watch looks at them, and to those that wait; answers the
/// tick of the next look. The session may be gone afterwards.
std::uint64_t look_at_calls(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  const std::uint32_t name = c.name;
  std::uint64_t next = now + r.keepalive;
  if (c.flow.next != 0) {
    if (now >= c.flow.next) {
      c.flow.next = 0;
      allow(c);
    } else {
      next = std::min(next, c.flow.next);
    }
  }
  for (std::uint32_t slot = 0; slot < c.window; ++slot) {
    if ((c.free & bit(slot)) != 0 || !c.calls[slot].exact) continue;
    next = std::min(next, look_at_call(r, c, slot, now));
    if (c.name != name || c.state != SessionState::ready) return next;
  }
  for (std::uint32_t i = 0; i < c.waiting_count;) {
    const std::uint64_t due =
        c.waiting[(c.waiting_first + i) % r.context.config.rpc.backlog].deadline;
    if (now < due) {
      next = std::min(next, due);
      ++i;
      continue;
    }
    end_waiting(r, c, i, Status::timed_out);
    if (c.name != name || c.state != SessionState::ready) return next;
    i = 0;  // its callback may have ended others
  }
  pump(r, c);
  return next;
}

/// Whether the server has been silent for too long while something was to be answered. Time in
/// which we did not look ourselves says nothing about it.
bool silent_too_long(const Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  const std::uint64_t most = 2 * r.keepalive;
  if (last_sign(c) >= c.looked_at) {
    c.waited = 0;
  } else {
    c.waited += std::min(now - c.looked_at, most);
  }
  c.looked_at = now;
  return c.waited > r.peer_timeout;
}

/// What a server is silent for may be that another one has taken its place, or that it lives again:
/// who is there is asked through the control port, for all sessions together.
void doubt(Rpc& r, const ClientSession& c, std::uint64_t now) noexcept {
  if (c.waited < 2 * r.keepalive || now < c.route->ask_at) return;
  c.route->ask_at = now + r.keepalive;
  c.route->silent = c.name;
  r.doubts = true;
}

}  // namespace

ClientSession* next_silent(Rpc& r) noexcept {
  for (const auto& route : r.routes) {
    if (route->silent == 0) continue;
    ClientSession* const c = find_client(r, std::exchange(route->silent, 0));
    if (c != nullptr && c->state == SessionState::ready) return c;
  }
  r.doubts = false;
  return nullptr;
}

void lose_silent(Rpc& r, std::uint64_t incarnation) noexcept {
  for (std::uint32_t i = 0; i < r.clients.capacity(); ++i) {
    if (!r.clients.in_use(i)) continue;
    ClientSession& c = r.clients.at(i);
    if (c.state != SessionState::ready || c.waited == 0) continue;
    if (takes_datagrams(*c.route) && c.route->incarnation == incarnation)
      lose(r, c, Status::peer_lost, "another engine, or another life of it, is at its address");
  }
}

void on_client_timer(Rpc& r, ClientSession& c) noexcept {
  const std::uint64_t now = r.context.clock.now();
  if (c.state == SessionState::opening) {
    return lose(r, c, Status::timed_out, "no answer came in time");
  }
  if (c.state == SessionState::closing) {
    if (now >= c.deadline) return lose(r, c, Status::ok, nullptr);
    tell(r, c, RpcKind::close);
    return r.context.timers.schedule(c.timer, std::min(now + 2 * c.patience, c.deadline));
  }
  if (takes_datagrams(*c.route)) {  // a connection finds out by itself
    if (silent_too_long(r, c, now))
      return lose(r, c, Status::peer_lost, "no datagram came from it any more");
    doubt(r, c, now);
    if (now - std::min(last_sign(c), now) >= r.keepalive)
      tell(r, c, RpcKind::ping, first_not_over(c));
  }
  const std::uint32_t name = c.name;
  std::uint64_t next = look_at_calls(r, c, now);
  if (c.name == name && c.state == SessionState::ready && c.bulk != nullptr)
    next = std::min(next, look_at_bulk(r, c, now));
  if (c.name == name && c.state == SessionState::ready) look_by(r, c, next);
}

}  // namespace spinwire::rpc
