// A server's session: accepted, released, and the client's pings and closes. A reply is kept until
// the slot's next request, or until the idle client's ping says that it has arrived.
#include "rpc/server_session.h"

#include <algorithm>
#include <new>
#include <string_view>

#include "rpc/at_most_once.h"
#include "rpc/receive_reservation.h"
#include "rpc/session_liveness.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {

namespace {

using wire::RpcHeader;
using wire::RpcKind;

}  // namespace

namespace {

bool is_heard(const ServerSession& s) noexcept {
  return last_heard_from(s) != s.opened_at || s.connection != nullptr;
}

void mark_heard(Rpc& r, ServerSession& s) noexcept {
  if (std::exchange(s.is_unheard, false)) r.unheard.erase(s);
}

/// Sessions that were opened and never used must not keep other clients out.
bool forget_unheard_session(Rpc& r) noexcept {
  while (!r.unheard.empty()) {
    ServerSession& s = *r.unheard.front();
    const bool heard = is_heard(s);
    mark_heard(r, s);
    if (heard) continue;
    forget_session(r, s);
    return true;
  }
  return false;
}

}  // namespace

bool make_room(Rpc& r, const control::Address& peer) noexcept {
  if (peer.is_loopback()) return true;
  const auto source = r.sources.find(peer.source());
  if (source == r.sources.end() || source->second < r.share_of_source) return true;
  for (ServerSession& s : r.unheard) {
    if (s.source != &*source || is_heard(s)) continue;
    forget_session(r, s);
    return true;
  }
  return false;
}

void count_source(Rpc& r, ServerSession& s, const control::Address& peer) {
  if (peer.is_loopback()) return;
  s.source = &*r.sources.try_emplace(peer.source(), 0).first;
  ++s.source->second;
}

ServerSession* accept_session(Rpc& r, const wire::SessionEnd& peer, PeerAddress* peer_address) {
  std::uint32_t index = r.servers.acquire(peer.window);
  if (index == kNone && forget_unheard_session(r)) index = r.servers.acquire(peer.window);
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
  s.opened_at = s.last_heard = s.last_control = s.last_liveness_check = r.context.clock.now();
  s.join_token = base::random_seed() | 1;  // from the kernel: nobody can guess it
  s.is_unheard = true;
  r.unheard.push_back(s);
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
  mark_heard(r, s);
  release_server_connection(r, s);
  return_receives(r, s);
  r.context.timers.cancel(s.timer);
  for (std::uint32_t i = 0; i < s.window; ++i) {
    release_payload(s.slots[i].payload);
    if (s.reply_buffers != nullptr) release_reply_buffer(s.reply_buffers[i]);
  }
  s.reply_buffers.reset();
  s.name = 0;
  if (auto* const source = std::exchange(s.source, nullptr); source != nullptr) {
    if (--source->second == 0) r.sources.erase(source->first);
  }
  release_peer_address(r, std::exchange(s.peer_address, nullptr));
  r.servers.release(s.timer.index);
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
  forget_session(r, *s);  // and says so if our answer is lost and the client repeats its close
}

}  // namespace spinwire::rpc
