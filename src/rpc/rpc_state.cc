// Remote calls as a whole: opening, serving, statistics, end.
#include "rpc/rpc_state.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "config/queue_sizing.h"
#include "rpc/backlog.h"
#include "rpc/call_cancel.h"
#include "rpc/client_call.h"
#include "rpc/client_session.h"
#include "rpc/reply_completion.h"
#include "rpc/retransmission.h"
#include "rpc/room_for_calls.h"
#include "rpc/server_session.h"
#include "rpc/session_goodbye.h"
#include "rpc/session_liveness.h"
#include "rpc/transport/connection_transport.h"
#include "rpc/unsent.h"
#include "wire/goodbye.h"

namespace spinwire::rpc {

using wire::RpcHeader;
using wire::RpcKind;

/// Q_Keys with the top bit are reserved for the operating system.
static constexpr std::uint32_t kQkeyMask = 0x7fffffff;
Rpc::Rpc(agent::EngineContext& ctx, control::ControlPort& control,
         control::ConnectionOwner& connections, EngineServices& engine)
    : context(ctx),
      clients(ctx.config.rpc.sessions),
      servers(ctx.config.rpc.sessions),
      receive_budget(config::datagram_receive_budget(ctx.config)),
      retransmission_queue(receive_budget),
      dialogues(*this, control, connections, engine),
      numbers(base::random_seed()),
      share(ctx.config.rpc.sessions, ctx.config.rpc.sessions_per_source) {
  const Config& c = ctx.config;
  retransmission_timer.kind = kRetransmissionTimer;
  min_rto = ctx.clock.ticks(c.rpc.min_rto);
  timeouts = {ctx.clock.ticks(c.connections.credit_idle_timeout),
              ctx.clock.ticks(c.connections.keepalive_interval),
              ctx.clock.ticks(c.connections.peer_timeout),
              ctx.clock.ticks(c.connections.close_timeout), ctx.clock.ticks(c.rpc.call_timeout)};
  if (c.rpc.target_rtt.count() != 0) target_rtt = ctx.clock.ticks(c.rpc.target_rtt);
  ctx.arena->set_reclaimer(&reply_reclaimer);
}

Rpc::~Rpc() {
  context.arena->set_reclaimer(nullptr);
  context.timers.cancel(retransmission_timer);
  port.reset();
  // The device has dropped its references. No reply can be made any more.
  run_reply_completions(*this);
  for (const auto& [key, peer_address] : peer_addresses) {
    if (peer_address->transport == Transport::datagram)
      context.device->destroy_ah(peer_address->destination.ah);
  }
}

namespace {

Result<void> check_transport(const agent::EngineContext& ctx) {
  const DeviceInfo& device = ctx.device->info();
  if (ctx.config.rpc.transport != RpcTransport::datagram || device.datagrams) return {};
  return base::fail(Status::unsupported,
                    "make remote calls possible with rpc.transport = \"datagram\"",
                    base::format("device {} has no unreliable datagrams", device.name),
                    "set rpc.transport to \"automatic\" or \"connection\", or open another device");
}

Result<void> check_completion_depth(const agent::EngineContext& ctx) {
  if (!uses_datagrams(ctx)) return {};
  const Config& c = ctx.config;
  const std::uint64_t needed = config::completions_needed_with_calls(c);
  if (needed <= c.queues.completion_depth) return {};
  return base::fail(
      Status::limit, "make remote calls possible",
      base::format("queues.completion_depth = {}, and {} can complete at once with "
                   "rpc.send_depth = {} and rpc.receive_depth = {}",
                   c.queues.completion_depth, needed, c.rpc.send_depth, c.rpc.receive_depth),
      base::format("give at least {}, or lower one of the others", needed));
}

}  // namespace

Result<std::unique_ptr<Rpc>> open(agent::EngineContext& ctx, control::ControlPort& control,
                                  control::ConnectionOwner& connections, EngineServices& engine) {
  if (auto present = engine.check_device("make remote calls possible"); !present)
    return tl::unexpected(present.error());
  if (auto transport = check_transport(ctx); !transport) return tl::unexpected(transport.error());
  if (auto depth = check_completion_depth(ctx); !depth) return tl::unexpected(depth.error());
  const auto secret = base::random_secret();
  if (!secret) return tl::unexpected(secret.error());
  auto r = std::make_unique<Rpc>(ctx, control, connections, engine);
  // A secret from strangers: those who have had a session know it. Peers know our incarnation.
  r->local.qkey = static_cast<std::uint32_t>(*secret >> 32) & kQkeyMask;
  r->local.mtu = std::min(ctx.device->place().mtu, kLongestDatagram);
  if (!uses_datagrams(ctx)) return r;
  auto port = DatagramPort::open(
      ctx, {ctx.config.rpc.send_depth, ctx.config.rpc.receive_depth, r->local.qkey});
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

Result<Session> open_session(Rpc& r, std::string_view address, const SessionOptions& options) {
  return r.dialogues.open(address, options).map([&r](const ClientSession* c) {
    return handle(r, *c);
  });
}

Result<control::AcceptedSession> on_open_session(Rpc& r, control::HandshakeId handshake,
                                                 const control::Address& from,
                                                 const wire::SessionEnd& client,
                                                 const PrivateData& ours) {
  return r.dialogues.accept(handshake, from, client, ours);
}

JoinOutcome on_join_session(Rpc& r, control::HandshakeId handshake, const control::Address& from,
                            const wire::JoinSession& join) {
  return r.dialogues.accept_join(handshake, from, join);
}

void end(Rpc& r, const Goodbye& goodbye) noexcept {
  r.clients.for_each([&r](ClientSession& c) {
    close_at_once(r, c);
    flush(r);
  });
  r.servers.for_each([&](ServerSession& s) {
    send_last_goodbye(r, s, is_leaving(s) ? s.leaving.goodbye : goodbye);
    flush(r);
    release_server_session(r, s, Status::flushed);
  });
}

bool run_deferred_work(Rpc& r) noexcept {
  run_cancel_callbacks(r);
  if (!r.due_completions.empty()) run_reply_completions(r);
  resume_blocked_sessions(r);
  if (has_unsent(r)) send_unsent(r);
  if (has_queued_connections(r)) run_connection_queue(r);
  if (awaits_room(r)) run_room_callbacks(r);
  r.may_have_deferred_work = has_deferred_work(r);
  return !r.pending_cancellations.empty() || has_queued_connections(r) || has_unsent(r) ||
         awaits_room(r) || !r.due_completions.empty() || r.stays_awake;
}

bool send(Rpc& r, const verbs::DatagramAddress& to, const wire::RpcHeader& header,
          const Payload& payload) noexcept {
  return send_datagram(r, to, wire::pack(header), header.length, payload);
}

bool post_datagram_cold(Rpc& r, const verbs::DatagramAddress& to, wire::RpcWords words,
                        std::uint16_t length, const Payload& payload) noexcept {
  const bool waits = to.holds_back && length > verbs::kDirectPayload;
  if (waits || wire::kRpcHeaderBytes + length > r.port->mtu()) return false;
  if (r.port->full()) return ++r.stats.send_queue_full, false;
  post_datagram(r, to, words, length, payload);
  return true;
}

void upkeep(Rpc& r) noexcept {
  if (r.port != nullptr) r.port->upkeep();
  if (wants_connections(r)) r.dialogues.begin_connections();
  review_tombstone(r);
  r.has_many_sessions = r.clients.size() + r.servers.size() > kManySessions;
  const std::uint64_t calls = r.stats.calls + r.stats.served;
  if (std::exchange(r.calls_at_upkeep, calls) == calls) (void)release_spares(r);
}

void on_timer(Rpc& r, base::Timer& timer) noexcept {
  if (timer.kind == kRetransmissionTimer) return on_retransmission_timer(r);
  if (timer.kind == kClientTimer) return on_client_timer(r, r.clients.at(timer.index));
  on_server_timer(r, r.servers.at(timer.index));
}

Block* allocate_to_send(Rpc& r, std::size_t size) noexcept {
  return r.context.arena->allocate(memory::PoolId::send, size);
}

Block* copy_to_send_block(Rpc& r, const std::byte* data, std::size_t size) noexcept {
  Block* const block = allocate_to_send(r, std::max<std::size_t>(size, 1));
  if (block != nullptr && size != 0) std::memcpy(block->payload, data, size);
  return block;
}

std::uint32_t longest_datagram(const Rpc& r, const wire::SessionEnd& peer,
                               const PeerAddress& address) noexcept {
  const std::uint32_t by_verbs = std::min<std::uint32_t>(peer.mtu, r.local.mtu);
  if (address.transport != Transport::datagram ||
      !DatagramPort::reaches_directly(address.destination)) {
    return by_verbs;
  }
  return std::max(by_verbs, std::min(peer.direct_datagrams, r.port->longest_direct()));
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
  if (datagrams && r.port != nullptr) end.direct_datagrams = r.port->longest_direct();
  end.incarnation = r.context.incarnation;
  end.first = first;
  end.application_fields = true;
  end.goodbyes = true;
  end.refusal_codes = true;
  return end;
}

RpcStats stats(const Rpc& r) noexcept {
  RpcStats stats = r.stats;
  if (r.port != nullptr) stats.send_queue_full += r.port->send_failures;
  stats.sessions = r.clients.size();
  stats.served_sessions = r.servers.size();
  return stats;
}

}  // namespace spinwire::rpc
