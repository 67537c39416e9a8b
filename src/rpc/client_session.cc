// The client's end of sessions: calls, their replies, and what becomes of those without.
#include <algorithm>
#include <bit>
#include <new>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "rpc/client_call.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {

namespace {

using wire::RpcHeader;
using wire::RpcKind;

/// Where there are no datagrams, the session's connection tells.
void send_control(Rpc& r, const ClientSession& c, RpcKind kind, std::uint32_t number = 0) noexcept {
  if (c.transport == Transport::datagram)
    (void)send(r, c.peer_address->destination, {c.peer_session, number, 0, kind, 0, 0, 0}, {});
}

/// All calls with lower numbers are over. With none under way the slots go on side by side, so that
/// this is said of every call that there was, and of none that follows, whenever it arrives. Of
/// slots that have been used so differently that their numbers have no order nothing is said: the
/// server would not know which way they went on.
std::uint32_t first_open_call(ClientSession& c) noexcept {
  constexpr std::int32_t kFar = 1 << 30;
  const std::uint32_t uses = ~(c.window - 1u);
  const std::uint32_t base = c.slots[0].number & uses;
  if (c.in_flight == 0 && c.last_call_id == c.aligned_at_call) return base;
  std::int32_t least = 0;
  std::int32_t most = 0;
  for (std::uint32_t slot = 1; slot < c.window; ++slot) {
    const auto ahead = static_cast<std::int32_t>((c.slots[slot].number & uses) - base);
    least = std::min(least, ahead);
    most = std::max(most, ahead);
  }
  if (least <= -kFar || most >= kFar) return base | wire::kNoCallsOver;
  const std::uint32_t last = base + static_cast<std::uint32_t>(most);
  if (c.in_flight != 0) return base + static_cast<std::uint32_t>(least);
  for (std::uint32_t slot = 0; slot < c.window; ++slot) c.slots[slot].number = last + slot;
  if (c.backlog_count == 0) c.aligned_at_call = c.last_call_id;
  return last;
}

void list_blocked_session(Rpc& r, ClientSession& c) noexcept {
  if (c.is_blocked) return;
  c.is_blocked = true;
  c.next_blocked = kNone;
  const std::uint32_t index = wire::RpcName::index(c.name);
  if (r.blocked_first == kNone) {
    r.blocked_first = index;
  } else {
    r.clients.at(r.blocked_last).next_blocked = index;
  }
  r.blocked_last = index;
}

/// A session has room for calls that wait while there are any: of many sessions, the pool could not
/// hold that of each.
[[gnu::cold, gnu::noinline]] bool allocate_backlog(Rpc& r, ClientSession& c) noexcept {
  static_assert(std::is_trivially_destructible_v<BackloggedCall>);
  const std::size_t room = r.context.config.rpc.backlog;
  c.backlog_block = r.context.arena->allocate(memory::PoolId::send, room * sizeof(BackloggedCall));
  if (c.backlog_block == nullptr) return false;
  c.backlog = reinterpret_cast<BackloggedCall*>(c.backlog_block->payload);
  return true;
}

void release_backlog(ClientSession& c) noexcept {
  if (c.backlog == nullptr || c.backlog_count != 0) return;
  c.backlog = nullptr;
  detail::release(std::exchange(c.backlog_block, nullptr));
}

}  // namespace

ClientSession* make_client_session(Rpc& r, std::uint32_t window) {
  const std::uint32_t index = r.clients.acquire(window);
  if (index == kNone) return nullptr;
  ClientSession& c = r.clients.at(index);
  c.slots = r.clients.places(c);
  const std::uint32_t first = random_call_number(r);
  for (std::uint32_t i = 0; i < window; ++i) c.slots[i].number = first + window + i;
  c.generation = r.clients.generation(index);
  c.name = wire::RpcName::make(index, c.generation % 4095 + 1);
  c.window = static_cast<std::uint16_t>(window);
  c.free_slots = ~std::uint64_t{0} >> (kWindowMax - window);
  c.in_flight = 0;
  c.backlog_first = c.backlog_count = c.last_call_id = 0;
  c.server_window = 1;
  c.send_window = 0;
  c.congestion = {};
  if (r.target_delay != ~std::uint64_t{0})
    c.congestion.cwnd = c.congestion.max_cwnd = window * kCwndPerCall;
  c.is_blocked = false;
  c.state = SessionState::opening;
  c.srtt = c.rttvar = c.silent_ticks = 0;
  c.min_rtt = c.recent_min_rtt = ~std::uint64_t{0};
  c.rto = r.min_rto;
  c.peer_session = 0;
  c.peer_address = nullptr;
  c.transport = Transport::datagram;
  c.handshake = c.aligned_at_call = kNone;
  c.timer.index = index;
  c.timer.kind = kClientTimer;
  return &c;
}

void set_peer(Rpc& r, ClientSession& c, const wire::SessionEnd& peer,
              PeerAddress* peer_address) noexcept {
  c.peer_address = peer_address;
  c.transport = peer_address->transport;
  c.peer_session = peer.name;
  c.max_inline_call =
      static_cast<std::uint16_t>(wire::rpc_payload(std::min<std::uint32_t>(peer.mtu, r.local.mtu)));
  if (c.transport == Transport::datagram) return mark_ready(r, c);
  if (const Status status = open_sole_connection(r, c); status != Status::ok)
    fail_session(r, c, status, "there is no memory for its calls");
}

void mark_ready(Rpc& r, ClientSession& c) noexcept {
  c.state = SessionState::ready;
  update_send_window(c);
  c.last_heard = c.last_control = c.last_liveness_check = r.context.clock.now();
  r.context.timers.reschedule(c.timer, c.last_heard + r.keepalive_interval);
  if (c.on_ready) c.on_ready(Session(r.context.core, id_of(c)));
}

/// Number `i` of those that wait does not any more.
static BackloggedCall remove_from_backlog(Rpc& r, ClientSession& c, std::uint32_t i) noexcept {
  const BackloggedCall w = remove_from_ring(c.backlog, r.context.config.rpc.backlog,
                                            c.backlog_first, c.backlog_count, i);
  release_backlog(c);
  return w;
}

/// Ends it; callbacks may do anything.
static void end_backlogged(Rpc& r, ClientSession& c, std::uint32_t i, Status status) noexcept {
  BackloggedCall w = remove_from_backlog(r, c, i);
  release_payload(w.payload);
  end_call(w.done, status);
}

Status enqueue_call(Rpc& r, ClientSession& c, CallRequest call,
                    const ReplyCallback& done) noexcept {
  if (c.state != SessionState::ready) return Status::not_connected;
  const std::uint32_t room = r.context.config.rpc.backlog;
  if (c.backlog_count == room) return Status::would_block;
  if (c.backlog == nullptr && !allocate_backlog(r, c)) return Status::no_buffer;
  BackloggedCall& w = *new (&c.backlog[(c.backlog_first + c.backlog_count) % room]) BackloggedCall;
  if (!store_call(r, c, call, done, w)) {
    release_backlog(c);
    return Status::no_buffer;
  }
  schedule_check(r, c, call.deadline);
  ++c.backlog_count;
  // What it waits for may be something else than the session's own window.
  if (c.in_flight < c.send_window) list_blocked_session(r, c);
  return Status::ok;
}

void send_backlog(Rpc& r, ClientSession& c) noexcept {
  while (c.backlog_count != 0 && c.state == SessionState::ready) {
    if (!can_send(r, c)) break;
    const BackloggedCall w = remove_from_backlog(r, c, 0);
    const std::uint32_t slot = free_slot(c);
    ClientSlot& k = c.slots[slot];
    k.method = w.method;
    k.size = static_cast<std::uint16_t>(w.size);
    k.id = w.id;
    k.deadline = w.deadline;
    k.done = w.done;
    k.payload = w.payload;
    send_request(r, c, k, slot, header_of(c, k), r.context.now);
  }
  if (c.backlog_count != 0 && c.in_flight < c.send_window) list_blocked_session(r, c);
}

void on_server_control(Rpc& r, const RpcHeader& header, const ibv_wc& wc,
                       const std::byte* grh) noexcept {
  ClientSession* const c = find_client(r, header.session);
  if (c == nullptr || c->transport != Transport::datagram || c->peer_address == nullptr ||
      !c->peer_address->source_filter.matches(wc, grh)) {
    ++r.stats.bad_datagrams;
    return;
  }
  c->last_control = r.context.now;
  if (header.kind == RpcKind::closed) return close_session(r, *c);
  if (header.kind != RpcKind::unknown || header.number != c->peer_session) return;
  if (c->state == SessionState::closing) return close_session(r, *c);
  fail_session(r, *c, Status::peer_lost,
               "it has forgotten the session: for too long it had heard nothing");
}

Status cancel(Rpc& r, ClientSession& c, std::uint32_t id) noexcept {
  for (std::uint32_t slot = 0; slot < c.window; ++slot) {
    ClientSlot& k = c.slots[slot];
    if ((c.free_slots & bit(slot)) != 0 || k.id != id) continue;
    const ReplyCallback done = k.done;
    release_slot(r, c, k, slot);
    end_call(done, Status::cancelled);
    send_backlog(r, c);
    return Status::ok;
  }
  for (std::uint32_t i = 0; i < c.backlog_count; ++i) {
    if (c.backlog[(c.backlog_first + i) % r.context.config.rpc.backlog].id != id) continue;
    end_backlogged(r, c, i, Status::cancelled);
    return Status::ok;
  }
  return c.connection != nullptr ? cancel_on_connection(r, c, id) : Status::invalid_argument;
}

namespace {

/// Ends whatever is under way or waits. Callbacks may call again, which is refused by the state.
void end_calls(Rpc& r, ClientSession& c, Status status) noexcept {
  for (std::uint32_t slot = 0; slot < c.window; ++slot) {
    if ((c.free_slots & bit(slot)) != 0) continue;
    const ReplyCallback done = c.slots[slot].done;
    release_slot(r, c, c.slots[slot], slot);
    end_call(done, status);
  }
  while (c.backlog_count != 0) end_backlogged(r, c, 0, status);
}

}  // namespace

Status close(Rpc& r, ClientSession& c) noexcept {
  if (c.state == SessionState::opening) return close_session(r, c), Status::ok;
  if (c.state != SessionState::ready) return Status::not_connected;
  c.state = SessionState::closing;
  update_send_window(c);
  c.deadline = r.context.clock.now() + r.close_timeout;
  end_calls(r, c, Status::flushed);
  const bool connected = close_client_connection(r, c);
  send_control(r, c, RpcKind::close);
  std::uint64_t next = c.deadline;  // the connection's end comes first
  if (c.transport == Transport::datagram || !connected) next = r.context.clock.now() + r.min_rto;
  if (c.transport == Transport::connection && !connected)
    c.deadline = next;  // nobody could be told
  r.context.timers.reschedule(c.timer, next);
  return Status::ok;
}

namespace {

Error reason(const ClientSession& c, Status status, const char* found) noexcept {
  try {
    const bool opened = c.state != SessionState::opening;
    return {status, (opened ? "talk with " : "open a session with ") + c.address, found,
            opened ? "see whether its process is there and polls"
                   : "see whether an engine listens there, and what it says"};
  } catch (...) {
    return base::out_of_memory();
  }
}

}  // namespace

void fail_session(Rpc& r, ClientSession& c, Status status, const char* found) noexcept {
  fail_session(r, c, reason(c, status, found));
}

void close_session(Rpc& r, ClientSession& c) noexcept {
  fail_session(r, c, Error{Status::ok, {}, {}, {}});
}

void fail_session(Rpc& r, ClientSession& c, const Error& why) noexcept {
  if (c.state == SessionState::closed) return;
  if (c.connection != nullptr && !release_client_connection(r, c, why)) return;
  c.state = SessionState::closed;
  update_send_window(c);
  end_calls(r, c, why.status == Status::ok ? Status::flushed : why.status);
  if (c.on_closed) c.on_closed(Session(r.context.core, id_of(c)), why);
  r.context.timers.cancel(c.timer);
  if (c.peer_address != nullptr) release_peer_address(r, std::exchange(c.peer_address, nullptr));
  if (c.is_blocked) {  // in a line that is short, if there is one
    std::uint32_t* at = &r.blocked_first;
    std::uint32_t before = kNone;
    while (*at != c.timer.index) at = &r.clients.at(before = *at).next_blocked;
    *at = c.next_blocked;
    if (r.blocked_last == c.timer.index) r.blocked_last = before;
    c.is_blocked = false;
  }
  c.name = 0;
  c.on_ready = nullptr;
  c.on_closed = nullptr;
  r.clients.release(c.timer.index);
}

namespace {

/// Sees to calls that are due before the watch looks at them, and to those that wait; answers the
/// tick of the next look. The session may be gone afterwards.
std::uint64_t check_own_timers(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  const std::uint32_t name = c.name;
  std::uint64_t next = now + r.keepalive_interval;
  if (c.congestion.next_send != 0) {
    if (now >= c.congestion.next_send) {
      c.congestion.next_send = 0;
      update_send_window(c);
    } else {
      next = std::min(next, c.congestion.next_send);
    }
  }
  for (std::uint32_t slot = 0; slot < c.window; ++slot) {
    if ((c.free_slots & bit(slot)) != 0 || !c.slots[slot].on_session_timer) continue;
    next = std::min(next, check_slot(r, c, slot, now));
    if (c.name != name || c.state != SessionState::ready) return next;
  }
  for (std::uint32_t i = 0; i < c.backlog_count;) {
    const std::uint64_t due =
        c.backlog[(c.backlog_first + i) % r.context.config.rpc.backlog].deadline;
    if (now < due) {
      next = std::min(next, due);
      ++i;
      continue;
    }
    end_backlogged(r, c, i, Status::timed_out);
    if (c.name != name || c.state != SessionState::ready) return next;
    i = 0;  // its callback may have ended others
  }
  send_backlog(r, c);
  return next;
}

/// Whether the server has been silent for too long while something was to be answered. Time in
/// which we did not look ourselves says nothing about it.
bool has_timed_out(const Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  const std::uint64_t most = 2 * r.keepalive_interval;
  if (last_heard_from(c) >= c.last_liveness_check) {
    c.silent_ticks = 0;
  } else {
    c.silent_ticks += std::min(now - c.last_liveness_check, most);
  }
  c.last_liveness_check = now;
  return c.silent_ticks > r.peer_timeout;
}

/// What a server is silent for may be that another one has taken its place, or that it lives again:
/// who is there is asked through the control port, for all sessions together.
void request_probe(Rpc& r, const ClientSession& c, std::uint64_t now) noexcept {
  if (c.silent_ticks < 2 * r.keepalive_interval || now < c.peer_address->next_probe_at) return;
  c.peer_address->next_probe_at = now + r.keepalive_interval;
  c.peer_address->silent_session = c.name;
  r.has_silent_peers = true;
}

}  // namespace

ClientSession* next_session_to_probe(Rpc& r) noexcept {
  for (const auto& peer_address : r.peer_addresses) {
    if (peer_address->silent_session == 0) continue;
    ClientSession* const c = find_client(r, std::exchange(peer_address->silent_session, 0));
    if (c != nullptr && c->state == SessionState::ready) return c;
  }
  r.has_silent_peers = false;
  return nullptr;
}

void fail_silent_sessions(Rpc& r, std::uint64_t incarnation) noexcept {
  for (std::uint32_t i = 0; i < r.clients.capacity(); ++i) {
    if (!r.clients.in_use(i)) continue;
    ClientSession& c = r.clients.at(i);
    if (c.state != SessionState::ready || c.silent_ticks == 0) continue;
    if (c.transport == Transport::datagram && c.peer_address->incarnation == incarnation)
      fail_session(r, c, Status::peer_lost,
                   "another engine, or another life of it, is at its address");
  }
}

void on_client_timer(Rpc& r, ClientSession& c) noexcept {
  const std::uint64_t now = r.context.clock.now();
  if (c.state == SessionState::opening) {
    return fail_session(r, c, Status::timed_out, "no answer came in time");
  }
  if (c.state == SessionState::closing) {
    if (now >= c.deadline) return close_session(r, c);
    send_control(r, c, RpcKind::close);
    return r.context.timers.schedule(c.timer, std::min(now + 2 * c.rto, c.deadline));
  }
  if (c.transport == Transport::datagram) {  // a connection finds out by itself
    if (has_timed_out(r, c, now))
      return fail_session(r, c, Status::peer_lost, "no datagram came from it any more");
    request_probe(r, c, now);
    if (now - std::min(last_heard_from(c), now) >= r.keepalive_interval)
      send_control(r, c, RpcKind::ping, first_open_call(c));
  }
  const std::uint32_t name = c.name;
  std::uint64_t next = check_own_timers(r, c, now);
  if (c.name == name && c.state == SessionState::ready && c.connection != nullptr)
    next = std::min(next, check_connection_calls(r, c, now));
  if (c.name == name && c.state == SessionState::ready) schedule_check(r, c, next);
}

}  // namespace spinwire::rpc
