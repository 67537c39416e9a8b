
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "config/queue_sizing.h"
#include "rpc/backlog.h"
#include "rpc/call_cancel.h"
#include "rpc/client_call.h"
#include "rpc/client_session.h"
#include "rpc/retransmission.h"
#include "rpc/server_session.h"
#include "rpc/session_liveness.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {

using wire::RpcHeader;
using wire::RpcKind;

/// Q_Keys with the top bit are the operating system's.
static constexpr std::uint32_t kQkeyMask = 0x7fffffff;
Rpc::Rpc(agent::EngineContext& s, control::ControlPort& control,
         control::ConnectionOwner& connections, Host& host)
    : context(s),
      clients(s.config.rpc.sessions),
      servers(s.config.rpc.sessions),
      // The last quarter is for sessions without a reservation, one call of each at a time.
      receive_budget(s.config.rpc.receive_depth - s.config.rpc.receive_depth / 4),
      retransmission_queue(receive_budget),
      dialogues(*this, control, connections, host),
      numbers(base::random_seed()) {
  const Config& c = s.config;
  retransmission_timer.kind = kRetransmissionTimer;
  min_rto = s.clock.ticks(c.rpc.min_rto);
  idle_timeout = s.clock.ticks(c.connections.credit_idle_timeout);
  share_of_source = c.rpc.sessions_per_source != 0 ? c.rpc.sessions_per_source
                                                   : c.rpc.sessions - c.rpc.sessions / 4;
  keepalive_interval = s.clock.ticks(c.connections.keepalive_interval);
  peer_timeout = s.clock.ticks(c.connections.peer_timeout);
  close_timeout = s.clock.ticks(c.connections.close_timeout);
  call_timeout = s.clock.ticks(c.rpc.call_timeout);
  if (c.rpc.target_rtt.count() != 0) target_rtt = s.clock.ticks(c.rpc.target_rtt);
}

Rpc::~Rpc() {
  context.timers.cancel(retransmission_timer);
  port.reset();
  for (const auto& peer_address : peer_addresses) {
    if (peer_address->transport == Transport::datagram)
      context.device->destroy_ah(peer_address->destination.ah);
  }
}

namespace {

Result<void> check_transport(const agent::EngineContext& s) {
  const DeviceInfo& device = s.device->info();
  if (s.config.rpc.transport != RpcTransport::datagram || device.datagrams) return {};
  return base::fail(Status::unsupported,
                    "make remote calls possible with rpc.transport = \"datagram\"",
                    base::format("device {} has no unreliable datagrams", device.name),
                    "set rpc.transport to \"automatic\" or \"connection\", or open another device");
}

Result<void> check_completion_depth(const agent::EngineContext& s) {
  if (!uses_datagrams(s)) return {};
  const Config& c = s.config;
  const std::uint64_t needed =
      config::completions_needed(c) + c.rpc.send_depth + c.rpc.receive_depth;
  if (needed <= c.queues.completion_depth) return {};
  return base::fail(
      Status::limit, "make remote calls possible",
      base::format("queues.completion_depth = {}, and {} can complete at once with "
                   "rpc.send_depth = {} and rpc.receive_depth = {}",
                   c.queues.completion_depth, needed, c.rpc.send_depth, c.rpc.receive_depth),
      base::format("give at least {}, or lower one of the others", needed));
}

}  // namespace

Result<std::unique_ptr<Rpc>> open(agent::EngineContext& s, control::ControlPort& control,
                                  control::ConnectionOwner& connections, Host& host) {
  if (auto present = host.check_device("make remote calls possible"); !present)
    return tl::unexpected(present.error());
  if (auto transport = check_transport(s); !transport) return tl::unexpected(transport.error());
  if (auto depth = check_completion_depth(s); !depth) return tl::unexpected(depth.error());
  auto r = std::make_unique<Rpc>(s, control, connections, host);
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

void serve(Rpc& r, Method method, const MethodHandler& handler) {
  if (method >= r.handlers.size()) r.handlers.resize(method + std::size_t{1});
  r.handlers[method] = handler;
  r.method_count = static_cast<std::uint32_t>(r.handlers.size());
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

void flush(Rpc& r) noexcept {
  if (r.port != nullptr) r.port->flush();
}

bool run_deferred_work(Rpc& r) noexcept {
  run_cancel_callbacks(r);
  resume_blocked_sessions(r);
  if (!r.connection_queue.empty()) run_connection_queue(r);
  return !r.pending_cancellations.empty() || !r.connection_queue.empty();
}

bool send(Rpc& r, const verbs::DatagramAddress& to, const wire::RpcHeader& header,
          const Payload& payload) noexcept {
  return send_datagram(r, to, wire::pack(header), header.length, payload);
}

bool post_datagram_cold(Rpc& r, const verbs::DatagramAddress& to, wire::RpcWords words,
                        std::uint16_t length, const Payload& payload) noexcept {
  if (r.port->full()) return ++r.stats.unsent, false;
  post_datagram(r, to, words, length, payload);
  return true;
}

void upkeep(Rpc& r) noexcept {
  if (r.port != nullptr) r.port->upkeep();
  if (r.connections_wanted != 0) r.dialogues.begin_connections();
  if (r.forgotten != nullptr) review_forgotten_session(r);
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

wire::SessionEnd local_session_end(const Rpc& r, std::uint32_t name, std::uint32_t window,
                                   std::uint32_t first, bool datagrams) noexcept {
  wire::SessionEnd end;
  if (datagrams && r.local.qp_num != 0) {
    const verbs::Place& place = r.context.device->place();
    std::memcpy(end.gid.data(), &place.gid, sizeof place.gid);
    end.gid_type = place.gid_type;
    end.lid = place.lid;
    end.qp_num = r.local.qp_num;
    end.qkey = r.local.qkey;
  }
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

}  // namespace spinwire::rpc
