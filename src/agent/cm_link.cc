#include "agent/cm_link.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "agent/agent.h"
#include "agent/connecting.h"
#include "base/error.h"
#include "wire/cm_data.h"

namespace spinwire::agent {
namespace {

using control::CmEvent;
using control::CmId;

constexpr int kByApplication = 28;  // a rejection's reason; IB specification volume 1, table 114

void fail_cm(EngineContext& ctx, Agent& a, Status status, const CmEvent& event,
             const char* remedy) noexcept {
  fail(
      ctx, a,
      {status, base::format("connect to {} through rdma_cm", peer_name(a)), event.found(), remedy});
}

/// The server rejects requests for good, or to ask for the next one.
void on_cm_answer(EngineContext& ctx, Agent& a, const control::CmClient::Rejection& answer) {
  if (answer.goes_on)
    a.setup.cm->needs_id = true;
  else if (answer.refusal)
    on_refused(ctx, a, *answer.refusal);
  else if (answer.failure)
    fail(ctx, a, *answer.failure);
}

void on_rejected(EngineContext& ctx, Agent& a, const CmEvent& event) {
  // A peer whose first message overtook the end of the handshake may be gone by now: rdma_cm then
  // rejects what it had accepted.
  if (was_ready(a)) return on_cm_disconnected(ctx, a);
  if (event.status == kByApplication && a.setup.cm->client != nullptr)
    return on_cm_answer(ctx, a, a.setup.cm->client->read_rejection(event.data()));
  if (event.status == kByApplication)  // inbound: the client gives up
    return on_refused(ctx, a, wire::decode_cm_refusal(event.data()));
  fail_cm(ctx, a, Status::refused, event, "see whether the peer listens there through rdma_cm");
}

void resolve_route(EngineContext& ctx, Agent& a) {
  auto good = check_cm_device(ctx, a.setup.cm->id);
  if (good) good = a.setup.cm->id.resolve_route(a.setup.timeout);
  if (!good) fail(ctx, a, good.error());
}

/// The request or the answer of this end. It refers to `data`.
control::CmParameters offer_of(const EngineContext& ctx, const Agent& a,
                               std::span<const std::byte> data) noexcept {
  const verbs::QueuePairOptions& ours = a.attributes.queue_pair;
  control::CmParameters offer;
  offer.qp_num = a.qp->qp_num;
  offer.responder_resources = ours.responder_depth;
  offer.initiator_depth = a.setup.outbound
                              ? ours.initiator_depth
                              : std::min(ours.initiator_depth, a.peer.queue_pair.responder_depth);
  offer.retry_count = ours.retry.retry_count;
  offer.rnr_retry = ours.retry.rnr_retry;
  offer.shared_receives = ctx.device->info().shared_receives && a.raw == nullptr;
  offer.data = data;
  return offer;
}

control::CmData data_of(const EngineContext& ctx, const Agent& a) noexcept {
  return wire::encode_cm(endpoint(ctx, a), {.features = wire::feature::cm_private_data});
}

const PrivateData& private_data_of(const Agent& a) noexcept {
  static constexpr PrivateData kNone;
  return a.private_data != nullptr ? *a.private_data : kNone;
}

/// Sends the request that is due.
Result<void> send_request(const EngineContext& ctx, const Agent& a) {
  CmLink& link = *a.setup.cm;
  const auto data = link.client->next_request(data_of(ctx, a), private_data_of(a),
                                              control::ends_of(link.id, a.qp->qp_num, true));
  if (!data) return tl::unexpected(data.error());
  return link.id.connect(offer_of(ctx, a, *data));
}

Result<void> send_answer(const EngineContext& ctx, const Agent& a) {
  CmLink& link = *a.setup.cm;
  const std::unique_ptr<control::CmServer> server = std::move(link.server);
  const control::CmData data = data_of(ctx, a);
  const control::CmMessage answer = server != nullptr
                                        ? server->answer(data, private_data_of(a), a.qp->qp_num)
                                        : control::clear_answer(data, private_data_of(a));
  return link.id.accept(offer_of(ctx, a, answer.bytes()));
}

/// The peer's endpoint and private data, from the answer to our last request.
Result<Endpoint> read_answer(const EngineContext& ctx, Agent& a, const CmEvent& event) {
  const CmLink& link = *a.setup.cm;
  const auto opened = link.client->open_answer(event.data(), event.qp_num);
  if (!opened) return tl::unexpected(opened.error());
  if (!link.client->key().empty()) set_peer_key(a, link.client->key());
  CmEvent plain = event;
  std::copy(opened->endpoint.begin(), opened->endpoint.end(), plain.storage.begin());
  plain.size = opened->size;
  return read_cm_endpoint(ctx, link.id, plain).map([&](Endpoint peer) {
    peer.private_data = opened->private_data;
    return peer;
  });
}

}  // namespace

Result<void> check_cm_device(const EngineContext& ctx, const CmId& id) {
  const DeviceInfo& open = ctx.device->info();
  if (id.device() == open.name && id.port() == open.port) return {};
  return base::fail(
      Status::no_device, "connect through rdma_cm",
      base::format("the address leads over device {} port {}, the engine has {} port {} open",
                   id.device(), id.port(), open.name, open.port),
      "open that device (device.name, device.port), or give an address of the other's network");
}

Result<Endpoint> read_cm_endpoint(const EngineContext& ctx, const CmId& id, const CmEvent& event) {
  ibv_qp_attr attr{};
  int mask = 0;
  if (auto known = id.attributes(IBV_QPS_RTR, attr, mask); !known)
    return tl::unexpected(known.error());
  const GidType type = ctx.device->info().gid_type;
  Endpoint peer;
  std::copy_n(id.peer_gid().raw, peer.gid.size(), peer.gid.begin());
  peer.gid_type = type == GidType::unknown ? GidType::infiniband : type;
  peer.lid = attr.ah_attr.dlid;
  peer.psn = attr.rq_psn;
  peer.qp_num = event.qp_num;
  return wire::decode_cm(event.data(), peer).map([&] { return peer; });
}

void use_cm(Agent& a, std::unique_ptr<CmLink> link) noexcept { a.setup.cm = std::move(link); }

bool uses_cm(const Agent& a, const rdma_cm_id* id) noexcept {
  return a.setup.cm != nullptr && a.setup.cm->id.get() == id;
}

bool needs_cm_id(const Agent& a) noexcept {
  return a.setup.cm != nullptr && a.setup.cm->needs_id && !is_ending(a);
}

Result<void> renew_cm_id(Agent& a, CmId id) {
  CmLink& link = *a.setup.cm;
  link.needs_id = false;
  const auto to = link.id.peer_address();
  if (!to) return tl::unexpected(to.error());
  link.id = std::move(id);
  return link.id.resolve_address(*to, a.setup.timeout);
}

void run_cm_step(EngineContext& ctx, Agent& a, HandshakeStep step) noexcept {
  CmLink& link = *a.setup.cm;
  Result<void> done;
  if (step == HandshakeStep::confirm) {
    done = link.id.establish();
    if (done) link.client.reset();  // a rejection that still comes ends a connection that is ready
    if (done) advance(ctx, a, Event::peer_ready);
  } else {
    link.handshake_sent = true;
    const bool asks = step == HandshakeStep::ask;
    done = asks ? send_request(ctx, a) : send_answer(ctx, a);
    if (asks && done) on_asked(ctx, a);
  }
  if (!done) fail(ctx, a, done.error());
}

void on_cm_event(EngineContext& ctx, Agent& a, const CmEvent& event) {
  if (is_ending(a)) return;
  switch (event.kind) {
    case RDMA_CM_EVENT_ADDR_RESOLVED:
      return resolve_route(ctx, a);
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
      if (a.setup.cm->handshake_sent) return run_cm_step(ctx, a, HandshakeStep::ask);
      return advance(ctx, a, Event::route_resolved);
    case RDMA_CM_EVENT_CONNECT_RESPONSE:
      return (void)receive_endpoint(ctx, a, read_answer(ctx, a, event));
    case RDMA_CM_EVENT_ESTABLISHED:
      return advance(ctx, a, Event::peer_ready);
    case RDMA_CM_EVENT_REJECTED:
      return on_rejected(ctx, a, event);
    case RDMA_CM_EVENT_DISCONNECTED:
      return on_cm_disconnected(ctx, a);
    case RDMA_CM_EVENT_ADDR_ERROR:
    case RDMA_CM_EVENT_ROUTE_ERROR:
      return fail_cm(ctx, a, Status::peer_lost, event,
                     "give an address that an RDMA network leads to");
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_CONNECT_ERROR:
      return fail_cm(ctx, a, Status::peer_lost, event,
                     "see whether the peer listens there and polls its engine");
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
      return fail_cm(ctx, a, Status::local_error, event,
                     "open another engine when the device is back");
    default:
      return;  // has no meaning for reliable connections
  }
}

void end_cm(Agent& a) noexcept {
  if (a.setup.cm == nullptr) return;
  if (!a.setup.outbound && !a.setup.cm->handshake_sent) {
    const bool by_application = a.cause.status == Status::ok;
    std::optional<std::uint32_t> code;
    if (by_application && a.peer.application_fields)
      code = 0;  // so the peer knows that it is final
    wire::Refuse refusal =
        wire::make_refuse(by_application ? Status::refused : a.cause.status,
                          a.cause.found.empty() ? "the application refused" : a.cause.found, code);
    if (a.peer.takes_goodbye_reasons) refusal.goodbye = goodbye_of(a);
    control::reject(a.setup.cm->id, a.setup.cm->server.get(), refusal);
  } else if (a.setup.was_ready) {
    a.setup.cm->id.disconnect();
  }
  a.setup.cm.reset();
}

}  // namespace spinwire::agent
