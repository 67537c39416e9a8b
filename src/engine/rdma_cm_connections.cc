// Connections set up through rdma_cm: addresses, route and handshake, which travels in private
// data. Cold.

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "engine/connector.h"
#include "wire/cm_data.h"

namespace spinwire::engine {

using agent::Agent;
using agent::CmLink;
using agent::Stage;
using control::CmEvent;
using control::CmId;

namespace {

constexpr int kByApplication = 28;  // a rejection's reason; IB specification volume 1, table 114

Error cm_failed(const Agent& a, Status status, std::string found, const char* remedy) {
  return {status, base::format("connect to {} through rdma_cm", a.peer.name.data()),
          std::move(found), remedy};
}

/// Checks that the addresses lead to the device that is open. Errors: no_device.
Result<void> check_device(const DeviceInfo& open, const CmId& id) {
  if (id.device() == open.name && id.port() == open.port) return {};
  return base::fail(
      Status::no_device, "connect through rdma_cm",
      base::format("the address leads over device {} port {}, the engine has {} port {} open",
                   id.device(), id.port(), open.name, open.port),
      "open that device (device.name, device.port), or give an address of the other's network");
}

/// An endpoint's address parts, as rdma_cm has them.
Result<Endpoint> addressed(const CmId& id, const DeviceInfo& device, std::uint32_t qp_num) {
  ibv_qp_attr attr{};
  int mask = 0;
  if (auto known = id.attributes(IBV_QPS_RTR, attr, mask); !known)
    return tl::unexpected(known.error());
  Endpoint peer;
  std::copy_n(id.peer_gid().raw, peer.gid.size(), peer.gid.begin());
  peer.gid_type = device.gid_type == GidType::unknown ? GidType::infiniband : device.gid_type;
  peer.lid = attr.ah_attr.dlid;
  peer.psn = attr.rq_psn;
  peer.qp_num = qp_num;
  return peer;
}

Result<Endpoint> read_endpoint(const CmId& id, const DeviceInfo& device, const CmEvent& event) {
  auto peer = addressed(id, device, event.qp_num);
  if (!peer) return peer;
  if (auto rest = wire::decode_cm(event.data(), *peer); !rest) return tl::unexpected(rest.error());
  return peer;
}

}  // namespace

Result<void> Connector::check_cm() const {
  if (context_.device->provider().reaches_other_hosts) return {};
  return base::fail(
      Status::unsupported, "connect through rdma_cm",
      base::format("device {} is embedded: rdma_cm does not know it", context_.device->info().name),
      "use Via::tcp, or prepare() and join()");
}

Result<std::unique_ptr<CmLink>> Connector::begin_cm(const control::Address& to,
                                                    Nanoseconds timeout) {
  if (auto able = check_cm(); !able) return tl::unexpected(able.error());
  auto id = port_.make_cm_id();
  if (!id) return tl::unexpected(id.error());
  auto link = std::make_unique<CmLink>();
  link->id = std::move(*id);
  if (auto begun = link->id.resolve_address(to, timeout); !begun)
    return tl::unexpected(begun.error());
  return link;
}

void Connector::attach_cm(std::unique_ptr<CmLink> link, Agent& a) noexcept {
  control::ControlPort::set_cm_subject(link->id, agent::subject_of(a));
  a.setup.cm = std::move(link);
}

/// The agent that an event is about; null when it has ended, or uses another identifier by now.
Agent* Connector::find_cm(std::uint64_t subject, const rdma_cm_id* id) noexcept {
  const auto index = static_cast<std::uint32_t>(subject);
  if (!context_.agents.in_use(index)) return nullptr;
  Agent& a = context_.agents.at(index);
  const bool same = (agent::subject_of(a) & control::ControlPort::kCmSubjectBits) == subject;
  return same && a.setup.cm != nullptr && a.setup.cm->id.get() == id ? &a : nullptr;
}

void Connector::on_cm_event(std::uint64_t subject, const CmEvent& event) {
  Agent* const a = find_cm(subject, event.id);
  if (a == nullptr || a->state == ConnectionState::draining) return;
  switch (event.kind) {
    case RDMA_CM_EVENT_ADDR_RESOLVED: {
      auto good = check_device(context_.device->info(), a->setup.cm->id);
      if (good) good = a->setup.cm->id.resolve_route(a->setup.timeout);
      if (!good) agent::fail(context_, *a, good.error());
      return;
    }
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
      return agent::advance(context_, *a, agent::Event::route_resolved);
    case RDMA_CM_EVENT_CONNECT_RESPONSE:
      return on_cm_response(*a, event);
    case RDMA_CM_EVENT_ESTABLISHED:
      return agent::advance(context_, *a, agent::Event::peer_ready);
    case RDMA_CM_EVENT_REJECTED:
      // A peer whose first message overtook the handshake's end may be gone by then: rdma_cm
      // rejects what it had accepted.
      return a->setup.was_ready ? on_cm_disconnected(*a) : on_cm_rejected(*a, event);
    case RDMA_CM_EVENT_DISCONNECTED:
      return on_cm_disconnected(*a);
    case RDMA_CM_EVENT_ADDR_ERROR:
    case RDMA_CM_EVENT_ROUTE_ERROR:
      return agent::fail(context_, *a,
                         cm_failed(*a, Status::peer_lost, event.found(),
                                   "give an address that an RDMA network leads to"));
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_CONNECT_ERROR:
      return agent::fail(context_, *a,
                         cm_failed(*a, Status::peer_lost, event.found(),
                                   "see whether the peer listens there and polls its engine"));
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
      return agent::fail(context_, *a,
                         cm_failed(*a, Status::local_error, event.found(),
                                   "open another engine when the device is back"));
    default:
      return;  // means nothing for reliable connections
  }
}

void Connector::on_cm_response(Agent& a, const CmEvent& event) {
  auto peer = read_endpoint(a.setup.cm->id, context_.device->info(), event);
  Result<void> taken;
  if (peer) {
    taken = agent::accept_endpoint(context_, a, *peer);
  } else {
    taken = tl::unexpected(peer.error());
  }
  if (!taken) return agent::fail(context_, a, taken.error());
  agent::advance(context_, a, agent::Event::endpoint_received);
}

void Connector::on_cm_rejected(Agent& a, const CmEvent& event) {
  if (event.status != kByApplication) {
    return agent::fail(context_, a,
                       cm_failed(a, Status::refused, event.found(),
                                 "see whether the peer listens there through rdma_cm"));
  }
  const wire::Refuse no = wire::decode_cm_refusal(event.data());
  if (a.reconnect != nullptr) a.reconnect->permanent = no.status != Status::limit;
  agent::fail(context_, a,
              cm_failed(a, no.status, base::format("the peer refused: {}", no.message()),
                        "see the peer's reason"));
}

void Connector::on_cm_disconnected(Agent& a) {
  // A goodbye that the peer has sent comes first.
  completions_.drain();
  if (a.state == ConnectionState::draining || a.closing) return;
  agent::peer_lost(context_, a, base::format("the connection to {}", a.peer.name.data()),
                   "rdma_cm reports that the peer disconnected", "the peer has ended");
}

Result<void> Connector::accept_cm(CmId& id, const CmEvent& request, const ListenOptions& options,
                                  const config::ConnectionAttributes& attributes) {
  if (auto present = device_.check_present("accept a connection"); !present) return present;
  if (auto good = check_device(context_.device->info(), id); !good) return good;
  auto peer = read_endpoint(id, context_.device->info(), request);
  if (!peer) return tl::unexpected(peer.error());
  auto raw = agent::make_raw(context_, attributes);
  if (!raw) return tl::unexpected(raw.error());
  Agent* const a = agent::acquire(context_, ConnectionState::exchanging, false);
  if (a == nullptr)
    return tl::unexpected(agent::no_more_connections(context_, "accept one more connection"));
  const auto from = id.peer_address();
  agent::name_peer(*a, from ? from->text().view() : "a peer through rdma_cm");
  auto link = std::make_unique<CmLink>();
  link->id = std::move(id);
  link->resolved = true;
  attach_cm(std::move(link), *a);
  agent::set_attributes(*a, attributes);
  (void)agent::use_raw(context_, *a, std::move(*raw));
  // From here on the agent's end rejects the request.
  if (auto taken = agent::accept_endpoint(context_, *a, *peer); !taken) {
    agent::fail(context_, *a, taken.error());  // without handlers: the application never saw it
    return {};
  }
  if (!aborted_) {
    a->handlers = options.handlers;
    if (options.on_accept) options.on_accept(agent::handle(context_, *a));
  }
  if (a->state == ConnectionState::draining) return {};
  if (auto agreed = agent::agree_on_raw(*a, a->peer.is_raw); !agreed)
    agent::fail(context_, *a, agreed.error());
  return {};
}

void Connector::on_cm_step(Agent& a) noexcept {
  if (a.state == ConnectionState::draining || a.state == ConnectionState::ready) return;
  CmLink& link = *a.setup.cm;
  const bool ask = a.setup.outbound && a.stage == Stage::wait;
  const bool answer = !a.setup.outbound && a.stage == Stage::up;
  Result<void> done;
  if ((ask || answer) && !link.handshake_sent) {
    link.handshake_sent = true;
    const auto data = wire::encode_cm(agent::endpoint(context_, a));
    const verbs::QueuePairOptions& ours = a.attributes.queue_pair;
    const std::uint8_t reads = ours.rd_atomic;
    control::CmParameters offer;
    offer.qp_num = a.qp->qp_num;
    offer.responder_resources = reads;
    offer.initiator_depth = std::min(reads, answer ? a.peer.queue_pair.rd_atomic : reads);
    offer.retry_count = ours.retry.retry_count;
    offer.rnr_retry = ours.retry.rnr_retry;
    offer.shared_receives = context_.device->info().shared_receives && a.raw == nullptr;
    offer.data = data;
    done = ask ? link.id.connect(offer) : link.id.accept(offer);
    if (ask && done) agent::enter(context_, a, ConnectionState::exchanging);
  } else if (a.setup.outbound && a.stage == Stage::up) {
    done = link.id.establish();
    if (done) agent::advance(context_, a, agent::Event::peer_ready);
  }
  if (!done) agent::fail(context_, a, done.error());
}

}  // namespace spinwire::engine
