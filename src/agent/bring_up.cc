// The set-up steps of a queue pair to RTS, and the endpoints that both ends exchange. Cold: one
// control verb a step.

#include <algorithm>
#include <new>
#include <string>

#include "agent/agent.h"
#include "base/error.h"
#include "base/internals.h"
#include "base/random.h"
#include "wire/credit_word.h"

namespace spinwire::agent {
namespace {

ReceiveSource receive_source_of(const Agent& a) noexcept {
  if (a.raw != nullptr) return ReceiveSource::raw;
  return a.own_queue != kNone ? ReceiveSource::own : ReceiveSource::shared;
}

/// A set-up verb failed: ends the connection.
bool set_up_failed(EngineContext& ctx, Agent& a, const Error& error) noexcept {
  fail(ctx, a, error);
  return true;
}

/// Lets the device read messages in place: above the eager limit only if nobody may refuse them.
void receive_in_place(const EngineContext& ctx, Agent& a) noexcept {
  const std::uint32_t eager =
      ctx.config.connections.eager_bytes + std::uint32_t{wire::kMessageHeaderBytes};
  // on_accept may have set others.
  const bool replaced = (a.slow_path & kHandlersReplaced) != 0;
  const bool may_refuse = static_cast<bool>((replaced ? a.next_handlers : a.handlers).on_offer) ||
                          (a.slow_path & kNeedsBlock) != 0;
  const std::uint32_t longest = longest_in_place(ctx);
  a.rendezvous.longest_in_place = may_refuse ? std::min(eager, longest) : longest;
  ctx.direct->receive_in_place(a.qp, hot_part(a), eager, a.rendezvous.longest_in_place);
}

bool step_create(EngineContext& ctx, Agent& a) noexcept {
  ibv_pd* const domain = a.domain != nullptr ? a.domain->domain.pd : nullptr;
  const auto made = base::no_throw("make a queue pair", [&]() -> Result<void> {
    const auto qp = ctx.device->create_qp(a.attributes.queue_pair, domain);
    if (!qp) return tl::unexpected(qp.error());
    a.qp = ctx.queue_pairs[a.index] = *qp;
    a.receives = receive_source_of(a);
    ctx.by_qpn.set(a.qp->qp_num, &a);
    if (ctx.direct != nullptr && a.raw == nullptr) receive_in_place(ctx, a);
    return {};
  });
  if (!made) return set_up_failed(ctx, a, made.error());
  const std::int32_t psn = a.attributes.psn;
  a.setup.psn = static_cast<std::uint32_t>(psn >= 0 ? static_cast<std::uint64_t>(psn)
                                                    : base::random_seed() & 0xffffff);
  set_stage(a, Stage::register_cell);
  return true;
}

/// Takes memory for the credit cell. False: there is none.
bool make_cell(EngineContext& ctx, Agent& a) noexcept {
  if (ctx.direct != nullptr) {
    a.credit.cell = ctx.direct->word(a.qp);
    return true;
  }
  a.own_cell.block = ctx.arena->allocate(memory::PoolId::control, sizeof(CreditCell));
  if (a.own_cell.block == nullptr) return false;
  a.credit.cell = new (a.own_cell.block->payload) CreditCell{};
  return true;
}

/// Opens the credit cell to the peer.
Result<RemoteRegion> expose_cell(EngineContext& ctx, const Agent& a) {
  constexpr auto kOwner = memory::RegistrationTable::kLibrary;
  auto* const at = reinterpret_cast<std::byte*>(a.credit.cell);
  if (a.own_cell.block == nullptr) {
    return ctx.registrations->expose_of_device(a.qp, {at, sizeof(CreditCell)}, Access::remote_write,
                                               registrations_of(a), kOwner);
  }
  const auto cell = detail::make<BufferSlice>(a.own_cell.block, at, sizeof(CreditCell));
  return ctx.registrations->expose_to(a.qp, cell, Access::remote_write, registrations_of(a),
                                      kOwner);
}

bool step_register_cell(EngineContext& ctx, Agent& a) noexcept {
  set_stage(a, a.setup.cm != nullptr && !a.setup.cm->resolved ? Stage::resolve : Stage::init);
  if (a.raw != nullptr) return false;  // there is no credit
  const auto token = base::random_secret();
  if (!token) return set_up_failed(ctx, a, token.error());
  if (!make_cell(ctx, a)) {
    return set_up_failed(ctx, a,
                         {Status::limit, "keep a credit cell for the connection",
                          "the control pool is used up", "lower connections.maximum"});
  }
  a.credit.token = static_cast<std::uint32_t>(*token) | 1;
  // Also what is there before the peer's first word is a word, so that any other is not genuine.
  a.liveness.cell_word = wire::encode(wire::CreditWord{}, a.credit.token);
  a.credit.cell->store(a.liveness.cell_word, std::memory_order_relaxed);
  auto exposed = expose_cell(ctx, a);
  if (!exposed) return set_up_failed(ctx, a, exposed.error());
  a.own_cell.region = {exposed->address, exposed->rkey};
  return true;
}

/// The peer's queue pair, with the smaller MTU of both ends.
verbs::RemoteQueuePair reachable(const Agent& a) noexcept {
  verbs::RemoteQueuePair remote = a.peer.queue_pair;
  remote.mtu = std::min({remote.mtu, a.attributes.mtu, a.attributes.queue_pair.place.mtu});
  return remote;
}

/// Moves the queue pair to its next state by the attributes of both endpoints.
Result<void> modify(const EngineContext& ctx, const Agent& a, ibv_qp_state state) {
  const verbs::QueuePairOptions& options = a.attributes.queue_pair;
  if (state == IBV_QPS_INIT) return ctx.device->to_init(a.qp, options);
  if (state == IBV_QPS_RTR) return ctx.device->to_rtr(a.qp, options, reachable(a));
  return ctx.device->to_rts(a.qp, options, a.setup.psn, a.peer.queue_pair);
}

/// Settings other than the defaults replace the values that rdma_cm found.
void refine(ibv_ah_attr& attr, const verbs::PathOptions& asked) noexcept {
  constexpr verbs::PathOptions kDefault;
  const auto take = [](auto& found, auto wanted, auto standard) {
    if (wanted != standard) found = wanted;
  };
  take(attr.sl, asked.service_level, kDefault.service_level);
  take(attr.src_path_bits, asked.src_path_bits, kDefault.src_path_bits);
  take(attr.static_rate, asked.static_rate, kDefault.static_rate);
  take(attr.grh.hop_limit, asked.hop_limit, kDefault.hop_limit);
  take(attr.grh.traffic_class, asked.traffic_class, kDefault.traffic_class);
  take(attr.grh.flow_label, asked.flow_label, kDefault.flow_label);
}

/// Moves the queue pair to its next state by rdma_cm's attributes.
Result<void> modify_through_cm(const EngineContext& ctx, const Agent& a, ibv_qp_state state) {
  const verbs::QueuePairOptions& options = a.attributes.queue_pair;
  const verbs::RetryOptions& retry = options.retry;
  ibv_qp_attr attr{};
  int mask = 0;
  if (auto known = a.setup.cm->id.attributes(state, attr, mask); !known) return known;
  if (state == IBV_QPS_INIT) attr.qp_access_flags = static_cast<unsigned>(options.access);
  if (state == IBV_QPS_RTR) {
    refine(attr.ah_attr, options.path);
    attr.path_mtu = std::min(attr.path_mtu, verbs::mtu_code(reachable(a).mtu));
    attr.min_rnr_timer = retry.min_rnr_timer;
  } else if (state == IBV_QPS_RTS) {
    attr.timeout = retry.ack_timeout;
    attr.retry_cnt = retry.retry_count;
    attr.rnr_retry = retry.rnr_retry;
  }
  return ctx.device->modify_qp(a.qp, attr, mask);
}

bool receives_refused(EngineContext& ctx, Agent& a, int error) noexcept {
  return set_up_failed(
      ctx, a,
      {Status::system, "post receives to a queue pair",
       base::format("ibv_post_recv: errno {}", error),
       "set queues.shared_receive_queue = \"automatic\", or report this as a defect"});
}

bool step_up(EngineContext& ctx, Agent& a) noexcept {
  const bool knows_peer = a.peer.queue_pair.qp_num != 0 && !a.setup.address_pending;
  struct Step {
    ibv_qp_state state;
    Stage next;
  };
  const Step step = a.stage == Stage::init
                        ? Step{IBV_QPS_INIT, knows_peer ? Stage::rtr : Stage::wait}
                    : a.stage == Stage::rtr ? Step{IBV_QPS_RTR, Stage::rts}
                                            : Step{IBV_QPS_RTS, Stage::up};
  const Result<void> done = base::no_throw("set up a queue pair", [&] {
    return a.setup.cm != nullptr ? modify_through_cm(ctx, a, step.state)
                                 : modify(ctx, a, step.state);
  });
  if (!done) return set_up_failed(ctx, a, done.error());
  if (step.state == IBV_QPS_INIT) {  // receives are posted before the peer can send
    int error = a.own_queue != kNone ? post_own_receives(ctx, a) : 0;
    if (error == 0 && a.raw != nullptr) error = post_raw_receives(ctx, a);
    if (error != 0) return receives_refused(ctx, a, error);
  }
  set_stage(a, step.next);
  return true;
}

GidType gid_type(const Agent& a) noexcept {
  const GidType type = a.attributes.queue_pair.place.gid_type;
  return type == GidType::unknown ? GidType::infiniband : type;
}

}  // namespace

bool bring_up(EngineContext& ctx, Agent& a) noexcept {
  switch (a.stage) {
    case Stage::domain:
      return a.attributes.own_domain ? step_domain(ctx, a) : step_create(ctx, a);
    case Stage::slab:
      return step_slab(ctx, a);
    case Stage::create:
      return step_create(ctx, a);
    case Stage::register_cell:
      return step_register_cell(ctx, a);
    default:
      return step_up(ctx, a);
  }
}

Endpoint endpoint(const EngineContext& ctx, const Agent& a) noexcept {
  const verbs::Place& place = a.attributes.queue_pair.place;
  Endpoint info{};
  std::copy_n(place.gid.raw, info.gid.size(), info.gid.begin());
  info.gid_type = gid_type(a);
  // On InfiniBand, packets come from the port's address that the settings ask for.
  info.lid = static_cast<std::uint16_t>(place.lid | a.attributes.queue_pair.path.src_path_bits);
  info.qp_num = a.qp->qp_num;
  info.psn = a.setup.psn;
  info.mtu = static_cast<std::uint16_t>(std::min(a.attributes.mtu, place.mtu));
  info.incarnation = ctx.incarnation;
  info.max_rd_atomic = a.attributes.queue_pair.responder_depth;
  info.raw = a.raw != nullptr;
  info.application_fields = true;
  if (a.private_data != nullptr) info.private_data = *a.private_data;
  if (info.raw) return info;
  info.max_message = ctx.config.connections.max_message_bytes;
  info.eager_bytes = ctx.config.connections.eager_bytes;
  info.credits = a.credit.granted;
  info.credit_cell_address = a.own_cell.region.address;
  info.credit_cell_rkey = a.own_cell.region.rkey;
  info.credit_cell_token = a.credit.token;
  info.peer_timeout_ms = peer_timeout_ms(ctx);
  info.goodbye_reasons = true;
  return info;
}

Result<void> accept_endpoint(EngineContext& ctx, Agent& a, const Endpoint& peer) {
  if (peer.gid_type != gid_type(a)) {
    return base::fail(
        Status::unsupported,
        base::format("connect a GID of type {} to the peer's", to_string(gid_type(a))),
        base::format("the peer's GID is of type {}", to_string(peer.gid_type)),
        "open the same kind of device at both ends; on RoCE set device.gid_index or "
        "device.address, so that both take the same version");
  }
  // An inbound connection is checked after on_accept, which may change its settings.
  if (auto agreed = a.setup.outbound ? agree_on_raw(a, peer.raw) : Result<void>{}; !agreed)
    return agreed;
  if (peer.credits == 0 && !peer.raw) {
    return base::fail(Status::protocol, "accept the peer's endpoint", "it grants no credit",
                      base::kProtocolRemedy);
  }
  if (auto kept = keep_private_data(a.peer.private_data, &peer.private_data); !kept) return kept;
  a.peer.application_fields = peer.application_fields;
  std::copy(peer.gid.begin(), peer.gid.end(), a.peer.queue_pair.gid.raw);
  a.peer.queue_pair.lid = peer.lid;
  a.peer.queue_pair.qp_num = peer.qp_num;
  a.peer.queue_pair.psn = peer.psn;
  a.peer.queue_pair.mtu = peer.mtu;
  a.peer.queue_pair.responder_depth = peer.max_rd_atomic;
  a.peer.is_raw = peer.raw;
  a.peer.takes_goodbye_reasons = peer.goodbye_reasons && !peer.raw;
  a.peer.incarnation = peer.incarnation;
  if (peer.raw) {
    a.send_queue.max_eager = a.max_message = ctx.max_transfer;
    return {};
  }
  a.send_queue.max_eager = std::min(peer.eager_bytes, ctx.config.connections.eager_bytes);
  // The peer READs rendezvous messages, so it needs remote_read, but not for memory of the pools
  // that goes by a local offer.
  a.max_message = allows(a.attributes.access, Access::remote_read) || offers_locally(ctx, a)
                      ? std::min(peer.max_message, ctx.config.connections.max_message_bytes)
                      : a.send_queue.max_eager;
  a.credit.granted_to_us = a.credit.send_limit = peer.credits;
  a.credit.header_granted = static_cast<std::uint16_t>(peer.credits);
  a.peer_cell.address = peer.credit_cell_address;
  a.peer_cell.key = peer.credit_cell_rkey;
  a.peer_cell.token = peer.credit_cell_token;
  set_keepalive_interval(ctx, a, peer.peer_timeout_ms);
  return {};
}

}  // namespace spinwire::agent
