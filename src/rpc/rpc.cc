#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "rpc/bulk.h"
#include "rpc/calling.h"

namespace spinwire::rpc {

using wire::RpcHeader;
using wire::RpcKind;

/// Receives for questions, and for what comes late or twice.
static constexpr std::uint32_t kUninvited = 24;

Rpc::Rpc(agent::EngineContext& s)
    : context(s),
      clients(s.config.rpc.sessions),
      servers(s.config.rpc.sessions),
      // The rest is for sessions that no receives are kept for, one call of each at a time.
      budget(s.config.rpc.receive_depth - s.config.rpc.receive_depth / 4),
      watch(budget),
      numbers(base::random_seed()) {
  const Config& c = s.config;
  watch_timer.kind = kWatchTimer;
  nowhere.from.qp_num = kNoQueuePair;
  least_patience = s.clock.ticks(c.rpc.least_timeout);
  idle = s.clock.ticks(c.connections.credit_idle);
  keepalive = s.clock.ticks(c.connections.keepalive);
  peer_timeout = s.clock.ticks(c.connections.peer_timeout);
  close_timeout = s.clock.ticks(c.connections.close_timeout);
  call_timeout = s.clock.ticks(c.rpc.call_timeout);
  if (c.rpc.target_delay.count() != 0) target = s.clock.ticks(c.rpc.target_delay);
}

Rpc::~Rpc() {
  context.timers.cancel(watch_timer);
  port.reset();
  for (const auto& route : routes) {
    if (takes_datagrams(*route)) context.device->destroy_ah(route->to.ah);
  }
}

Result<std::unique_ptr<Rpc>> open(agent::EngineContext& s) {
  auto r = std::make_unique<Rpc>(s);
  if (!uses_datagrams(s)) {
    r->port = Port::none(s);
    cover(*r);
    return r;
  }
  auto port = Port::open(s, {s.config.rpc.send_depth, s.config.rpc.receive_depth});
  if (!port) return tl::unexpected(port.error());
  r->port = std::move(*port);
  cover(*r);
  return r;
}

void end(Rpc& r) noexcept {
  for (std::uint32_t i = 0; i < r.clients.capacity(); ++i) {
    if (!r.clients.in_use(i)) continue;
    ClientSession& c = r.clients.at(i);
    if (c.name == 0) continue;
    if (c.state == SessionState::ready && takes_datagrams(*c.route))
      (void)send(r, c.route->to, {c.peer, 0, 0, RpcKind::close, 0, 0, 0}, {});
    r.port->flush();
    lose(r, c, Status::ok, nullptr);
  }
  for (std::uint32_t i = 0; i < r.servers.capacity(); ++i) {
    if (!r.servers.in_use(i)) continue;
    ServerSession& s = r.servers.at(i);
    if (takes_datagrams(*s.route))
      (void)send(r, s.route->to, {s.peer, 0, 0, RpcKind::closed, 0, 0, 0}, {});
    r.port->flush();
    dismiss(r, s);
  }
}

void finish_poll(Rpc& r) noexcept {
  // Each that stalled has a turn while there is what they wait for; those that are left with calls
  // line up again.
  const std::uint32_t last = r.stalled_last;
  while (r.stalled_first != kNone && r.promised < r.budget && !r.port->full()) {
    const std::uint32_t index = r.stalled_first;
    ClientSession& c = r.clients.at(index);
    r.stalled_first = c.next_stalled;
    c.listed = false;
    pump(r, c);
    if (index == last) break;
  }
  if (r.due_first != nullptr) [[unlikely]]
    pump_due(r);
  r.port->flush();
}

bool send(Rpc& r, const Destination& to, const wire::RpcHeader& header,
          const Payload& payload) noexcept {
  return put_out(r, to, wire::pack(header), header.length, payload);
}

bool put_on_list_after_all(Rpc& r, const Destination& to, wire::RpcWords words,
                           std::uint16_t length, const Payload& payload) noexcept {
  if (r.port->full()) return ++r.stats.unsent, false;
  put_on_list(r, to, words, length, payload);
  return true;
}

bool cover_more(Rpc& r) noexcept {
  if (r.promised >= r.budget) return false;
  cover(r);
  return true;
}

void cover(Rpc& r) noexcept {
  // Of what may come without a promise: one call of each session that has none, and questions.
  const std::uint32_t others = r.servers.size() + kUninvited;
  if (r.promised + others >= r.port->open())
    r.port->open_receives(std::max(r.promised + 1 + others, 2 * r.port->open()));
  r.covered = r.port->all_open() ? r.budget : std::min(r.budget, r.port->open() - others);
}

void upkeep(Rpc& r) noexcept { r.port->upkeep(); }

void on_timer(Rpc& r, base::Timer& timer) noexcept {
  if (timer.kind == kWatchTimer) return on_watch_timer(r);
  if (timer.kind == kClientTimer) return on_client_timer(r, r.clients.at(timer.index));
  on_server_timer(r, r.servers.at(timer.index));
}

Block* copy_to_block(Rpc& r, const std::byte* data, std::size_t size) noexcept {
  Block* const block = r.context.arena->allocate(memory::PoolId::send, size);
  if (block != nullptr) std::memcpy(block->payload, data, size);
  return block;
}

Result<Route*> take_route(Rpc& r, const wire::SessionEnd& peer) {
  for (const auto& route : r.routes) {
    if (std::memcmp(&route->gid, peer.gid.data(), sizeof route->gid) == 0 &&
        route->lid == peer.lid && route->to.qp_num == peer.qp_num && route->to.qkey == peer.qkey &&
        route->incarnation == peer.incarnation) {
      ++route->users;
      return route.get();
    }
  }
  r.routes.reserve(r.routes.size() + 1);
  auto route = std::make_unique<Route>();
  std::memcpy(&route->gid, peer.gid.data(), sizeof route->gid);
  route->lid = peer.lid;
  route->users = 1;
  route->incarnation = peer.incarnation;
  route->to = {nullptr, peer.qp_num, peer.qkey, nullptr};
  route->from.qp_num = kNoQueuePair;
  if (peer.qp_num != 0 && uses_datagrams(r.context)) {
    verbs::RemoteQueuePair remote;
    remote.gid = route->gid;
    remote.lid = peer.lid;
    auto ah = r.context.device->create_ah(r.context.attributes.queue_pair, remote);
    if (!ah) return tl::unexpected(ah.error());
    route->to.ah = *ah;
    r.port->find_lane(route->to);
    route->from = origin_of(peer);
  }
  r.routes.push_back(std::move(route));
  return r.routes.back().get();
}

void drop_route(Rpc& r, Route* route) noexcept {
  if (--route->users != 0) return;
  r.port->flush();  // nothing refers to it any more
  if (takes_datagrams(*route)) r.context.device->destroy_ah(route->to.ah);
  std::erase_if(r.routes, [route](const auto& each) { return each.get() == route; });
}

wire::SessionEnd end_of(const Rpc& r, std::uint32_t name, std::uint32_t window,
                        std::uint32_t first) noexcept {
  const verbs::Place& place = r.context.device->place();
  wire::SessionEnd end;
  std::memcpy(end.gid.data(), &place.gid, sizeof place.gid);
  end.gid_type = place.gid_type;
  end.lid = place.lid;
  end.qp_num = r.port->qp_num();
  end.qkey = r.port->qkey();
  end.name = name;
  end.window = static_cast<std::uint16_t>(window);
  end.mtu = static_cast<std::uint16_t>(r.port->mtu());
  end.incarnation = r.context.incarnation;
  end.first = first;
  return end;
}

RpcStats stats(const Rpc& r) noexcept {
  RpcStats stats = r.stats;
  stats.unsent += r.port->failures;
  stats.sessions = r.clients.size();
  stats.served_sessions = r.servers.size();
  return stats;
}

namespace {

tl::unexpected<Error> wrong(std::string found) {
  return base::fail(Status::system, "audit the remote calls", std::move(found),
                    "a defect of the library, or memory that something has overwritten");
}

}  // namespace

Result<void> audit(Rpc& r) {
  std::uint32_t promised = 0;
  std::uint32_t granted = 0;
  for (std::uint32_t i = 0; i < r.clients.capacity(); ++i) {
    if (!r.clients.in_use(i)) continue;
    const ClientSession& c = r.clients.at(i);
    std::uint32_t active = 0;
    for (std::uint32_t slot = 0; slot < c.window; ++slot) {
      const bool busy = (c.free >> slot & 1) == 0;
      active += busy ? 1 : 0;
      if (c.calls[slot].number % c.window != slot)
        return wrong(fmt::format("session {}: slot {} has call {}", i, slot, c.calls[slot].number));
      if (!busy && c.calls[slot].payload.block != nullptr && c.calls[slot].size > kShortCall)
        return wrong(fmt::format("session {}: slot {} is free and holds a block", i, slot));
    }
    if (active != c.under_way)
      return wrong(
          fmt::format("session {}: {} calls under way, {} counted", i, active, c.under_way));
    if (active != 0 && r.watch.at(c.watched).session != c.name)
      return wrong(fmt::format("session {}: nobody watches its {} calls", i, active));
    if (c.waiting_count > r.context.config.rpc.backlog)
      return wrong(fmt::format("session {}: {} calls wait", i, c.waiting_count));
    promised += active;
  }
  for (std::uint32_t i = 0; i < r.servers.capacity(); ++i) {
    if (r.servers.in_use(i) && r.servers.at(i).granted != 1) granted += r.servers.at(i).granted;
  }
  promised += granted;
  if (promised != r.promised || granted != r.granted) {
    return wrong(fmt::format("{} receives are promised, {} of them granted; {} and {} counted",
                             promised, granted, r.promised, r.granted));
  }
  if (promised > r.budget)
    return wrong(fmt::format("{} receives are promised, of {}", promised, r.budget));
  const std::uint32_t needed = promised + r.servers.size() + kUninvited;
  if (!r.port->all_open() && r.port->open() < needed)
    return wrong(
        fmt::format("{} receives are open, of {} that may be needed", r.port->open(), needed));
  return audit_bulk(r);
}

}  // namespace spinwire::rpc
