// The server's end of sessions: each request runs its handler at most once, and its answer is kept
// until the next request in the same slot, or until the idle client says that it has it.
#include <algorithm>
#include <new>
#include <string_view>

#include "rpc/client_call.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {

namespace {

using wire::RpcHeader;
using wire::RpcKind;

void return_receives(Rpc& r, ServerSession& s) noexcept {
  if (s.advertised_window == 1) return;
  r.reserved_receives -= s.advertised_window;
  r.server_reserved_receives -= s.advertised_window;
  s.advertised_window = 1;
}

/// The client is done with all calls below this number: nothing that they left is needed again, and
/// a request of theirs that is late is an old one.
void forget_calls_below(ServerSession& s, std::uint32_t below) noexcept {
  if (s.window > 1 && (below & wire::kNoCallsOver) != 0) return;
  below &= ~(s.window - 1);
  if (std::exchange(s.forgotten, below) == below) return;
  for (std::uint32_t slot = 0; slot < s.window; ++slot) {
    ServerSlot& v = s.slots[slot];
    if (static_cast<std::int32_t>(v.number - below) >= 0) continue;
    release_payload(v.payload);
    v.number = below - s.window + slot;
    v.state = ServerSlotState::none;
    if (s.reply_buffers != nullptr) release_reply_buffer(s.reply_buffers[slot]);
  }
}

}  // namespace

ServerSession* accept_session(Rpc& r, const wire::SessionEnd& peer, PeerAddress* peer_address) {
  const std::uint32_t index = r.servers.acquire(peer.window);
  if (index == kNone) return nullptr;
  ServerSession& s = r.servers.at(index);
  s.slots = r.servers.places(s);
  for (std::uint32_t i = 0; i < peer.window; ++i) s.slots[i].number = peer.first + i;
  s.name = wire::RpcName::make(index, r.servers.generation(index) % 2047 + 1);
  s.peer_session = peer.name;
  s.window = peer.window;
  s.advertised_window = 1;
  s.mtu = std::min<std::uint32_t>(peer.mtu, r.local.mtu);
  s.peer_address = peer_address;
  s.transport = peer_address->transport;
  s.last_heard = s.last_control = s.last_liveness_check = r.context.clock.now();
  s.silent_ticks = 0;
  s.forgotten = 0;
  s.timer.index = index;
  s.timer.kind = kServerTimer;
  r.context.timers.schedule(s.timer, s.last_heard + r.keepalive_interval);
  post_reserved_receives(r);
  return &s;
}

void release_server_session(Rpc& r, ServerSession& s) noexcept {
  if (r.current_call.session == &s) r.current_call = {};
  release_server_connection(r, s);
  return_receives(r, s);
  r.context.timers.cancel(s.timer);
  for (std::uint32_t i = 0; i < s.window; ++i) {
    release_payload(s.slots[i].payload);
    if (s.reply_buffers != nullptr) release_reply_buffer(s.reply_buffers[i]);
  }
  s.reply_buffers.reset();
  s.name = 0;
  release_peer_address(r, std::exchange(s.peer_address, nullptr));
  r.servers.release(s.timer.index);
}

namespace {

ForgottenSession& forgotten_slot(ForgottenSessions& ones, std::uint32_t name) noexcept {
  return ones[(name ^ name >> wire::RpcName::kIndexBits) % ones.size()];
}

}  // namespace

void forget_session(Rpc& r, ServerSession& s) noexcept {
  if (r.forgotten == nullptr) r.forgotten.reset(new (std::nothrow) ForgottenSessions);
  if (r.forgotten != nullptr && s.transport == Transport::datagram) {
    ForgottenSession& f = forgotten_slot(*r.forgotten, s.name);
    PeerAddress* const before = f.peer_address;
    f = {s.name, s.peer_session, s.peer_address, 0};
    ++s.peer_address->references;
    if (before != nullptr) release_peer_address(r, before);
  }
  release_server_session(r, s);
}

void on_unknown_session(Rpc& r, const RpcHeader& header, const ibv_wc& wc,
                        const std::byte* grh) noexcept {
  ++r.stats.bad_datagrams;
  if (r.forgotten == nullptr || header.session == 0) return;
  ForgottenSession& f = forgotten_slot(*r.forgotten, header.session);
  if (f.name != header.session || !f.peer_address->source_filter.matches(wc, grh)) return;
  if (f.notified_at != 0 && r.context.now - f.notified_at < r.min_rto) return;
  f.notified_at = r.context.now;
  (void)send(r, f.peer_address->destination, {f.peer_session, f.name, 0, RpcKind::unknown, 0, 0, 0},
             {});
}

std::span<std::byte> reserve_reply(Rpc& r, std::uint32_t session, std::uint32_t number,
                                   std::size_t size) noexcept {
  if ((session & kConnectionCall) != 0) return reserve_on_connection(r, session, number, size);
  ServerSession* const s = find_server(r, session);
  if (s == nullptr) return {};
  const std::uint32_t slot = number & (s->window - 1);
  const ServerSlot& v = s->slots[slot];
  const std::uint32_t max_inline_call = wire::rpc_payload(s->mtu);
  if (v.number != number || v.state != ServerSlotState::running || size > max_inline_call)
    return {};
  if (s->reply_buffers == nullptr)
    s->reply_buffers.reset(new (std::nothrow) ReplyBuffer[s->window]);
  if (s->reply_buffers == nullptr) return {};
  return prepare_reply_buffer(r, s->reply_buffers[slot], number, size, max_inline_call, 0);
}

std::span<std::byte> prepare_reply_buffer(Rpc& r, ReplyBuffer& space, std::uint32_t number,
                                          std::size_t size, std::size_t most,
                                          std::size_t offset) noexcept {
  // The last reply may be in the send queue still.
  if (space.block != nullptr && space.block->refs != 1) release_reply_buffer(space);
  if (space.block == nullptr) space.block = r.context.arena->allocate(memory::PoolId::send, most);
  if (space.block == nullptr) return {};
  space.number = number;
  space.size = static_cast<std::uint32_t>(size);
  return {space.block->payload + offset, size};
}

ReservedReply find_reserved_reply(Rpc& r, std::uint32_t session, std::uint32_t number,
                                  std::size_t size) noexcept {
  if ((session & kConnectionCall) != 0)
    return find_reserved_on_connection(r, session, number, size);
  const ServerSession* const s = find_server(r, session);
  if (s == nullptr || s->reply_buffers == nullptr) return {};
  const ReplyBuffer& space = s->reply_buffers[number & (s->window - 1)];
  if (space.number != number || space.block == nullptr || size > space.size) return {};
  return {space.block, space.block->payload};
}

void on_client_control(Rpc& r, const RpcHeader& header, const ibv_wc& wc,
                       const std::byte* grh) noexcept {
  ServerSession* const s = find_server(r, header.session);
  if (s == nullptr || !s->peer_address->source_filter.matches(wc, grh))
    return on_unknown_session(r, header, wc, grh);
  s->last_control = r.context.now;
  const bool over = header.kind == RpcKind::close;
  const RpcHeader reply{s->peer_session, 0, 0, over ? RpcKind::closed : RpcKind::pong, 0, 0, 0};
  (void)send(r, s->peer_address->destination, reply, {});
  if (!over) return forget_calls_below(*s, header.number);
  flush(r);  // the address goes with its last session
  release_server_session(r, *s);
}

void on_server_timer(Rpc& r, ServerSession& s) noexcept {
  const std::uint64_t now = r.context.clock.now();
  if (s.transport == Transport::connection && is_connected(r, s))
    s.last_control = now;  // or it would not be
  // Time in which we did not look ourselves says nothing about the client.
  s.silent_ticks =
      last_heard_from(s) >= s.last_liveness_check
          ? 0
          : s.silent_ticks + std::min(now - s.last_liveness_check, 2 * r.keepalive_interval);
  s.last_liveness_check = now;
  if (s.silent_ticks > r.peer_timeout) return forget_session(r, s);
  if (now - std::min(s.last_heard, now) > r.idle_timeout) {
    return_receives(r, s);
    if (s.connection != nullptr) release_reply_buffers(*s.connection);
  }
  r.context.timers.schedule(s.timer, now + r.keepalive_interval);
}

}  // namespace spinwire::rpc
