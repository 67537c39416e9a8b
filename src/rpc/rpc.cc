#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "rpc/client_call.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {

using wire::RpcHeader;
using wire::RpcKind;

/// Q_Keys with the top bit are the operating system's.
static constexpr std::uint32_t kQkeyMask = 0x7fffffff;
/// Receives for questions, and for what comes late or twice.
static constexpr std::uint32_t kUnsolicitedReceives = 24;

Rpc::Rpc(agent::EngineContext& s)
    : context(s),
      clients(s.config.rpc.sessions),
      servers(s.config.rpc.sessions),
      // The rest is for sessions that no receives are kept for, one call of each at a time.
      receive_budget(s.config.rpc.receive_depth - s.config.rpc.receive_depth / 4),
      retransmission_queue(receive_budget),
      numbers(base::random_seed()) {
  const Config& c = s.config;
  retransmission_timer.kind = kRetransmissionTimer;
  min_rto = s.clock.ticks(c.rpc.least_timeout);
  idle_timeout = s.clock.ticks(c.connections.credit_idle);
  keepalive_interval = s.clock.ticks(c.connections.keepalive);
  peer_timeout = s.clock.ticks(c.connections.peer_timeout);
  close_timeout = s.clock.ticks(c.connections.close_timeout);
  call_timeout = s.clock.ticks(c.rpc.call_timeout);
  if (c.rpc.target_delay.count() != 0) target_delay = s.clock.ticks(c.rpc.target_delay);
}

Rpc::~Rpc() {
  context.timers.cancel(retransmission_timer);
  port.reset();
  for (const auto& peer_address : peer_addresses) {
    if (peer_address->transport == Transport::datagram)
      context.device->destroy_ah(peer_address->destination.ah);
  }
}

Result<std::unique_ptr<Rpc>> open(agent::EngineContext& s) {
  auto r = std::make_unique<Rpc>(s);
  base::Random random(s.incarnation ^ s.clock.now());
  r->local.qkey = static_cast<std::uint32_t>(random.next()) & kQkeyMask;
  r->local.mtu = std::min(s.device->place().mtu, kLongestDatagram);
  if (!uses_datagrams(s)) return r;
  auto port =
      DatagramPort::open(s, {s.config.rpc.send_depth, s.config.rpc.receive_depth, r->local.qkey});
  if (!port) return tl::unexpected(port.error());
  r->port = std::move(*port);
  r->local.qp_num = r->port->qp_num();
  post_reserved_receives(*r);
  return r;
}

void end(Rpc& r) noexcept {
  for (std::uint32_t i = 0; i < r.clients.capacity(); ++i) {
    if (!r.clients.in_use(i)) continue;
    ClientSession& c = r.clients.at(i);
    if (c.name == 0) continue;
    if (c.state == SessionState::ready && c.transport == Transport::datagram)
      (void)send(r, c.peer_address->destination, {c.peer_session, 0, 0, RpcKind::close, 0, 0, 0},
                 {});
    flush(r);
    close_session(r, c);
  }
  for (std::uint32_t i = 0; i < r.servers.capacity(); ++i) {
    if (!r.servers.in_use(i)) continue;
    ServerSession& s = r.servers.at(i);
    if (s.transport == Transport::datagram)
      (void)send(r, s.peer_address->destination, {s.peer_session, 0, 0, RpcKind::closed, 0, 0, 0},
                 {});
    flush(r);
    release_server_session(r, s);
  }
}

namespace {

/// Each session that was blocked has a turn while the engine has receives and room to send; those
/// that are left with calls are blocked again.
[[gnu::cold, gnu::noinline]] void resume_blocked_sessions(Rpc& r) noexcept {
  const std::uint32_t last = r.blocked_last;
  while (r.blocked_first != kNone && r.reserved_receives < r.receive_budget && !r.port->full()) {
    const std::uint32_t index = r.blocked_first;
    ClientSession& c = r.clients.at(index);
    r.blocked_first = c.next_blocked;
    c.is_blocked = false;
    send_backlog(r, c);
    if (index == last) break;
  }
}

}  // namespace

void flush(Rpc& r) noexcept {
  if (r.port != nullptr) r.port->flush();
}

void finish_poll(Rpc& r) noexcept {
  if (r.blocked_first != kNone) [[unlikely]]
    resume_blocked_sessions(r);
  if (r.queue_first != nullptr) [[unlikely]]
    run_connection_queue(r);
  flush(r);
}

bool send(Rpc& r, const base::DatagramAddress& to, const wire::RpcHeader& header,
          const Payload& payload) noexcept {
  return send_datagram(r, to, wire::pack(header), header.length, payload);
}

bool post_datagram_cold(Rpc& r, const base::DatagramAddress& to, wire::RpcWords words,
                        std::uint16_t length, const Payload& payload) noexcept {
  if (r.port->full()) return ++r.stats.unsent, false;
  post_datagram(r, to, words, length, payload);
  return true;
}

bool try_post_more_receives(Rpc& r) noexcept {
  if (r.reserved_receives >= r.receive_budget) return false;
  post_reserved_receives(r);
  return true;
}

void post_reserved_receives(Rpc& r) noexcept {
  if (r.port == nullptr) return;
  // Of what may come without a promise: one call of each session that has none, and questions.
  const std::uint32_t others = r.servers.size() + kUnsolicitedReceives;
  if (r.reserved_receives + others >= r.port->posted_receives())
    r.port->post_receives_up_to(
        std::max(r.reserved_receives + 1 + others, 2 * r.port->posted_receives()));
  r.posted_receives = r.port->all_posted()
                          ? r.receive_budget
                          : std::min(r.receive_budget, r.port->posted_receives() - others);
}

void upkeep(Rpc& r) noexcept {
  if (r.port != nullptr) r.port->upkeep();
}

void on_timer(Rpc& r, base::Timer& timer) noexcept {
  if (timer.kind == kRetransmissionTimer) return on_retransmission_timer(r);
  if (timer.kind == kClientTimer) return on_client_timer(r, r.clients.at(timer.index));
  on_server_timer(r, r.servers.at(timer.index));
}

Block* copy_to_send_block(Rpc& r, const std::byte* data, std::size_t size) noexcept {
  Block* const block = r.context.arena->allocate(memory::PoolId::send, size);
  if (block != nullptr) std::memcpy(block->payload, data, size);
  return block;
}

Result<PeerAddress*> acquire_peer_address(Rpc& r, const wire::SessionEnd& peer) {
  for (const auto& peer_address : r.peer_addresses) {
    if (std::memcmp(&peer_address->gid, peer.gid.data(), sizeof peer_address->gid) == 0 &&
        peer_address->lid == peer.lid && peer_address->destination.qp_num == peer.qp_num &&
        peer_address->destination.qkey == peer.qkey &&
        peer_address->incarnation == peer.incarnation) {
      ++peer_address->references;
      return peer_address.get();
    }
  }
  r.peer_addresses.reserve(r.peer_addresses.size() + 1);
  auto peer_address = std::make_unique<PeerAddress>();
  std::memcpy(&peer_address->gid, peer.gid.data(), sizeof peer_address->gid);
  peer_address->lid = peer.lid;
  peer_address->references = 1;
  peer_address->incarnation = peer.incarnation;
  peer_address->destination = {nullptr, peer.qp_num, peer.qkey, nullptr};
  if (peer.qp_num != 0 && r.port != nullptr) {
    verbs::RemoteQueuePair remote;
    remote.gid = peer_address->gid;
    remote.lid = peer.lid;
    auto ah = r.context.device->create_ah(r.context.attributes.queue_pair, remote);
    if (!ah) return tl::unexpected(ah.error());
    peer_address->destination.ah = *ah;
    peer_address->transport = Transport::datagram;
    r.port->resolve(peer_address->destination);
    peer_address->source_filter = make_source_filter(peer);
  }
  r.peer_addresses.push_back(std::move(peer_address));
  return r.peer_addresses.back().get();
}

void release_peer_address(Rpc& r, PeerAddress* peer_address) noexcept {
  if (--peer_address->references != 0) return;
  flush(r);  // nothing refers to it any more
  if (peer_address->transport == Transport::datagram)
    r.context.device->destroy_ah(peer_address->destination.ah);
  std::erase_if(r.peer_addresses,
                [peer_address](const auto& each) { return each.get() == peer_address; });
}

wire::SessionEnd local_session_end(const Rpc& r, std::uint32_t name, std::uint32_t window,
                                   std::uint32_t first) noexcept {
  const verbs::Place& place = r.context.device->place();
  wire::SessionEnd end;
  std::memcpy(end.gid.data(), &place.gid, sizeof place.gid);
  end.gid_type = place.gid_type;
  end.lid = place.lid;
  end.qp_num = r.local.qp_num;
  end.qkey = r.local.qkey;
  end.name = name;
  end.window = static_cast<std::uint16_t>(window);
  end.mtu = static_cast<std::uint16_t>(r.local.mtu);
  end.incarnation = r.context.incarnation;
  end.first = first;
  return end;
}

RpcStats stats(const Rpc& r) noexcept {
  RpcStats stats = r.stats;
  if (r.port != nullptr) stats.unsent += r.port->send_failures;
  stats.sessions = r.clients.size();
  stats.served_sessions = r.servers.size();
  return stats;
}

namespace {

tl::unexpected<Error> audit_error(std::string found) {
  return base::fail(Status::system, "audit the remote calls", std::move(found),
                    "a defect of the library, or memory that something has overwritten");
}

}  // namespace

Result<void> audit(Rpc& r) {
  std::uint32_t reserved_receives = 0;
  std::uint32_t granted = 0;
  for (std::uint32_t i = 0; i < r.clients.capacity(); ++i) {
    if (!r.clients.in_use(i)) continue;
    const ClientSession& c = r.clients.at(i);
    std::uint32_t active = 0;
    for (std::uint32_t slot = 0; slot < c.window; ++slot) {
      const bool busy = (c.free_slots >> slot & 1) == 0;
      active += busy ? 1 : 0;
      if (c.slots[slot].number % c.window != slot)
        return audit_error(
            fmt::format("session {}: slot {} has call {}", i, slot, c.slots[slot].number));
      if (!busy && c.slots[slot].payload.block != nullptr && c.slots[slot].size > kShortCall)
        return audit_error(fmt::format("session {}: slot {} is free and holds a block", i, slot));
    }
    if (active != c.in_flight)
      return audit_error(
          fmt::format("session {}: {} calls under way, {} counted", i, active, c.in_flight));
    if (active != 0 && r.retransmission_queue.at(c.retransmission_place).session != c.name)
      return audit_error(fmt::format("session {}: nobody watches its {} calls", i, active));
    if (c.backlog_count > r.context.config.rpc.backlog)
      return audit_error(fmt::format("session {}: {} calls wait", i, c.backlog_count));
    reserved_receives += active;
  }
  for (std::uint32_t i = 0; i < r.servers.capacity(); ++i) {
    if (r.servers.in_use(i) && r.servers.at(i).advertised_window != 1)
      granted += r.servers.at(i).advertised_window;
  }
  reserved_receives += granted;
  if (reserved_receives != r.reserved_receives || granted != r.server_reserved_receives) {
    return audit_error(
        fmt::format("{} receives are promised, {} of them granted; {} and {} counted",
                    reserved_receives, granted, r.reserved_receives, r.server_reserved_receives));
  }
  if (reserved_receives > r.receive_budget)
    return audit_error(
        fmt::format("{} receives are promised, of {}", reserved_receives, r.receive_budget));
  const std::uint32_t needed = reserved_receives + r.servers.size() + kUnsolicitedReceives;
  if (r.port != nullptr && !r.port->all_posted() && r.port->posted_receives() < needed)
    return audit_error(fmt::format("{} receives are open, of {} that may be needed",
                                   r.port->posted_receives(), needed));
  return audit_connections(r);
}

}  // namespace spinwire::rpc
