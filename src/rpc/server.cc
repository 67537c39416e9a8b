// The server's end of sessions: each request runs its handler at most once, and its answer is kept
// until the next request in the same slot, or until the idle client says that it has it.
#include <algorithm>
#include <new>
#include <string_view>

#include "rpc/bulk.h"
#include "rpc/calling.h"

namespace spinwire::rpc {

namespace {

using wire::RpcHeader;
using wire::RpcKind;

void take_back(Rpc& r, ServerSession& s) noexcept {
  if (s.granted == 1) return;
  r.promised -= s.granted;
  r.granted -= s.granted;
  s.granted = 1;
}

/// The client is done with all calls below this number: nothing that they left is needed again, and
/// a request of theirs that is late is an old one.
void forget_calls(ServerSession& s, std::uint32_t below) noexcept {
  if (s.window > 1 && (below & wire::kNothingOver) != 0) return;
  below &= ~(s.window - 1);
  if (std::exchange(s.forgotten, below) == below) return;
  for (std::uint32_t slot = 0; slot < s.window; ++slot) {
    Service& v = s.services[slot];
    if (static_cast<std::int32_t>(v.number - below) >= 0) continue;
    clear(v.payload);
    v.number = below - s.window + slot;
    v.state = ServiceState::none;
    if (s.spaces != nullptr) drop_space(s.spaces[slot]);
  }
}

}  // namespace

ServerSession* admit(Rpc& r, const wire::SessionEnd& peer, Route* route) {
  const std::uint32_t index = r.servers.acquire(peer.window);
  if (index == kNone) return nullptr;
  ServerSession& s = r.servers.at(index);
  s.services = r.servers.places(s);
  for (std::uint32_t i = 0; i < peer.window; ++i) s.services[i].number = peer.first + i;
  s.name = wire::RpcName::make(index, r.servers.generation(index) % 2047 + 1);
  s.peer = peer.name;
  s.window = peer.window;
  s.granted = 1;
  s.mtu = std::min<std::uint32_t>(peer.mtu, r.port->mtu());
  s.route = route;
  s.last_heard = s.last_other = s.looked_at = r.context.clock.now();
  s.waited = 0;
  s.forgotten = 0;
  s.timer.index = index;
  s.timer.kind = kServerTimer;
  r.context.timers.schedule(s.timer, s.last_heard + r.keepalive);
  cover(r);
  return &s;
}

void dismiss(Rpc& r, ServerSession& s) noexcept {
  if (r.serving.session == &s) r.serving = {};
  dismiss_bulk(r, s);
  take_back(r, s);
  r.context.timers.cancel(s.timer);
  for (std::uint32_t i = 0; i < s.window; ++i) {
    clear(s.services[i].payload);
    if (s.spaces != nullptr) drop_space(s.spaces[i]);
  }
  s.spaces.reset();
  s.name = 0;
  drop_route(r, std::exchange(s.route, &r.nowhere));
  r.servers.release(s.timer.index);
}

namespace {

Forgotten& place_of(ForgottenOnes& ones, std::uint32_t name) noexcept {
  return ones[(name ^ name >> wire::RpcName::kIndexBits) % ones.size()];
}

}  // namespace

void forget(Rpc& r, ServerSession& s) noexcept {
  if (r.forgotten == nullptr) r.forgotten.reset(new (std::nothrow) ForgottenOnes);
  if (r.forgotten != nullptr && takes_datagrams(*s.route)) {
    Forgotten& f = place_of(*r.forgotten, s.name);
    Route* const before = f.route;
    f = {s.name, s.peer, s.route, 0};
    ++s.route->users;
    if (before != nullptr) drop_route(r, before);
  }
  dismiss(r, s);
}

void take_unknown(Rpc& r, const RpcHeader& header, const ibv_wc& wc,
                  const std::byte* route) noexcept {
  ++r.stats.bad_datagrams;
  if (r.forgotten == nullptr || header.session == 0) return;
  Forgotten& f = place_of(*r.forgotten, header.session);
  if (f.name != header.session || !f.route->from.is_of(wc, route)) return;
  if (f.told_at != 0 && r.context.now - f.told_at < r.least_patience) return;
  f.told_at = r.context.now;
  (void)send(r, f.route->to, {f.peer, f.name, 0, RpcKind::unknown, 0, 0, 0}, {});
}

std::span<std::byte> reply_space(Rpc& r, std::uint32_t session, std::uint32_t number,
                                 std::size_t size) noexcept {
  if ((session & kBulkName) != 0) return bulk_space(r, session, number, size);
  ServerSession* const s = find_server(r, session);
  if (s == nullptr) return {};
  const std::uint32_t slot = number & (s->window - 1);
  const Service& v = s->services[slot];
  const std::uint32_t longest = wire::rpc_payload(s->mtu);
  if (v.number != number || v.state != ServiceState::running || size > longest) return {};
  if (s->spaces == nullptr) s->spaces.reset(new (std::nothrow) Space[s->window]);
  if (s->spaces == nullptr) return {};
  return take_space(r, s->spaces[slot], number, size, longest, 0);
}

std::span<std::byte> take_space(Rpc& r, Space& space, std::uint32_t number, std::size_t size,
                                std::size_t most, std::size_t offset) noexcept {
  // The last reply may be in the send queue still.
  if (space.block != nullptr && space.block->refs != 1) drop_space(space);
  if (space.block == nullptr) space.block = r.context.arena->allocate(memory::PoolId::send, most);
  if (space.block == nullptr) return {};
  space.number = number;
  space.size = static_cast<std::uint32_t>(size);
  return {space.block->payload + offset, size};
}

Written space_of(Rpc& r, std::uint32_t session, std::uint32_t number, std::size_t size) noexcept {
  if ((session & kBulkName) != 0) return bulk_space_of(r, session, number, size);
  const ServerSession* const s = find_server(r, session);
  if (s == nullptr || s->spaces == nullptr) return {};
  const Space& space = s->spaces[number & (s->window - 1)];
  if (space.number != number || space.block == nullptr || size > space.size) return {};
  return {space.block, space.block->payload};
}

void take_question(Rpc& r, const RpcHeader& header, const ibv_wc& wc,
                   const std::byte* route) noexcept {
  ServerSession* const s = find_server(r, header.session);
  if (s == nullptr || !s->route->from.is_of(wc, route)) return take_unknown(r, header, wc, route);
  s->last_other = r.context.now;
  const bool over = header.kind == RpcKind::close;
  const RpcHeader reply{s->peer, 0, 0, over ? RpcKind::closed : RpcKind::pong, 0, 0, 0};
  (void)send(r, s->route->to, reply, {});
  if (!over) return forget_calls(*s, header.number);
  r.port->flush();  // the route goes with its last session
  dismiss(r, *s);
}

void on_server_timer(Rpc& r, ServerSession& s) noexcept {
  const std::uint64_t now = r.context.clock.now();
  if (!takes_datagrams(*s.route) && is_connected(r, s)) s.last_other = now;  // or it would not be
  // Time in which we did not look ourselves says nothing about the client.
  s.waited =
      last_sign(s) >= s.looked_at ? 0 : s.waited + std::min(now - s.looked_at, 2 * r.keepalive);
  s.looked_at = now;
  if (s.waited > r.peer_timeout) return forget(r, s);
  if (now - std::min(s.last_heard, now) > r.idle) {
    take_back(r, s);
    if (s.bulk != nullptr) drop_spaces(*s.bulk);
  }
  r.context.timers.schedule(s.timer, now + r.keepalive);
}

}  // namespace spinwire::rpc
