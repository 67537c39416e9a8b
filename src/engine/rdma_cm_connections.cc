// Connections brought up through rdma_cm: the addresses, the route and the handshake, which travels
// in its private data. Cold.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "engine/engine_core.h"
#include "wire/cm_data.h"

namespace spinwire::detail {

using agent::Agent;
using agent::CmLink;
using agent::Stage;
using control::CmId;
using control::CmNews;
using engine::Listening;

namespace {

constexpr int kCmBacklog = 512;
constexpr int kEventsPerStep = 16;
constexpr int kByApplication = 28;  // a rejection's reason; IB specification volume 1, table 114

// What an identifier belongs to, in its `context`: a listener or an agent, generation, index.
constexpr std::uint64_t kListenerBit = std::uint64_t{1} << 63;
void* context_of(std::uint32_t generation, std::uint32_t index, std::uint64_t bit = 0) noexcept {
  return reinterpret_cast<void*>(bit | std::uint64_t{generation & engine::kTokenGenerations} << 32 |
                                 index);
}

Error cm_failed(const Agent& a, Status status, std::string found, const char* remedy) {
  return {status, fmt::format("connect to {} through rdma_cm", a.peer.name.data()),
          std::move(found), remedy};
}

/// Finds fault with the device that the addresses lead to, if it is not the one that is open.
Result<void> check_device(const DeviceInfo& open, const CmId& id) {
  if (id.device() == open.name && id.port() == open.port) return {};
  return base::fail(
      Status::no_device, "connect through rdma_cm",
      fmt::format("the address leads over device {} port {}, the engine has {} port {} open",
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

Result<Endpoint> read_endpoint(const CmId& id, const DeviceInfo& device, const CmNews& news) {
  auto peer = addressed(id, device, news.qp_num);
  if (!peer) return peer;
  if (auto rest = wire::decode_cm(news.data(), *peer); !rest) return tl::unexpected(rest.error());
  return peer;
}

}  // namespace

Result<void> EngineCore::open_cm() {
  if (cm) return {};
  if (!context.device->provider().reaches_other_hosts) {
    return base::fail(
        Status::unsupported, "connect through rdma_cm",
        fmt::format("device {} is embedded: rdma_cm does not know it", context.device->info().name),
        "use Via::tcp, or prepare() and join()");
  }
  auto channel = control::CmChannel::open();
  if (!channel) return tl::unexpected(channel.error());
  if (auto added = epoll.add(channel->fd(), engine::kCmToken, control::Interest::read); !added)
    return added;
  cm = std::move(*channel);
  return {};
}

Result<void> EngineCore::listen_through_cm(Listening& listening, const control::Address& at,
                                           std::uint32_t index) {
  if (auto open = open_cm(); !open) return open;
  auto id = CmId::create(cm, context_of(listening.generation, index, kListenerBit));
  if (!id) return tl::unexpected(id.error());
  if (auto bound = id->listen(at, kCmBacklog); !bound) return bound;
  listening.cm = std::move(*id);
  return {};
}

Result<std::unique_ptr<CmLink>> EngineCore::begin_through_cm(const control::Address& to,
                                                             Nanoseconds patience) {
  if (auto open = open_cm(); !open) return tl::unexpected(open.error());
  auto id = CmId::create(cm, nullptr);  // whose it is, attach_link() says before its first event
  if (!id) return tl::unexpected(id.error());
  auto link = std::make_unique<CmLink>();
  link->id = std::move(*id);
  if (auto begun = link->id.resolve_address(to, patience); !begun)
    return tl::unexpected(begun.error());
  return link;
}

void EngineCore::attach_link(std::unique_ptr<CmLink> link, Agent& a) noexcept {
  link->id.get()->context = context_of(a.generation, a.index);
  a.setup.cm = std::move(link);
}

void EngineCore::take_cm_events() noexcept {
  CmNews news;
  for (int i = 0; i < kEventsPerStep && cm.next(news); ++i) {
    try {
      if (news.kind == RDMA_CM_EVENT_CONNECT_REQUEST) {
        take_cm_request(news);
      } else {
        take_cm_news(news);
      }
    } catch (...) {
      base::log(LogLevel::error, "rdma_cm: out of memory for an event");
    }
  }
}

/// The agent that an event is about; null when it is a listener's, or has none any more.
Agent* EngineCore::agent_of(const CmNews& news) noexcept {
  const auto name = reinterpret_cast<std::uint64_t>(news.id->context);
  if ((name & kListenerBit) != 0) return nullptr;
  const auto index = static_cast<std::uint32_t>(name);
  if (index >= context.agents.capacity() || !context.agents.in_use(index)) return nullptr;
  Agent& a = context.agents.at(index);
  const bool same =
      (a.generation & engine::kTokenGenerations) == static_cast<std::uint32_t>(name >> 32);
  return same && a.setup.cm != nullptr && a.setup.cm->id.get() == news.id ? &a : nullptr;
}

void EngineCore::take_cm_news(const CmNews& news) {
  Agent* const a = agent_of(news);
  if (a == nullptr || a->state == ConnectionState::draining) return;
  switch (news.kind) {
    case RDMA_CM_EVENT_ADDR_RESOLVED: {
      auto good = check_device(context.device->info(), a->setup.cm->id);
      if (good) good = a->setup.cm->id.resolve_route(a->setup.timeout);
      if (!good) agent::fail(context, *a, good.error());
      return;
    }
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
      a->setup.cm->resolved = true;
      if (a->stage != Stage::resolve) return;
      a->stage = Stage::init;
      return agent::list_setup(context, *a);
    case RDMA_CM_EVENT_CONNECT_RESPONSE:
      return take_cm_answer(*a, news);
    case RDMA_CM_EVENT_ESTABLISHED:
      if (a->stage == Stage::up) agent::become_ready(context, *a);
      return;
    case RDMA_CM_EVENT_REJECTED:
      // A peer whose first message overtook its last word may be gone before that: rdma_cm rejects
      // then what it had accepted.
      return a->setup.was_ready ? take_cm_end(*a) : take_cm_refusal(*a, news);
    case RDMA_CM_EVENT_DISCONNECTED:
      return take_cm_end(*a);
    case RDMA_CM_EVENT_ADDR_ERROR:
    case RDMA_CM_EVENT_ROUTE_ERROR:
      return agent::fail(context, *a,
                         cm_failed(*a, Status::peer_lost, news.found(),
                                   "give an address that an RDMA network leads to"));
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_CONNECT_ERROR:
      return agent::fail(context, *a,
                         cm_failed(*a, Status::peer_lost, news.found(),
                                   "see whether the peer listens there and polls its engine"));
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
      return agent::fail(context, *a,
                         cm_failed(*a, Status::local_error, news.found(),
                                   "open another engine when the device is back"));
    default:
      return;  // of no concern to connections like these
  }
}

void EngineCore::take_cm_answer(Agent& a, const CmNews& news) {
  auto peer = read_endpoint(a.setup.cm->id, context.device->info(), news);
  Result<void> taken;
  if (peer) {
    taken = agent::take_endpoint(context, a, *peer);
  } else {
    taken = tl::unexpected(peer.error());
  }
  if (!taken) return agent::fail(context, a, taken.error());
  a.stage = Stage::rtr;
  agent::list_setup(context, a);
}

void EngineCore::take_cm_refusal(Agent& a, const CmNews& news) {
  if (news.status != kByApplication) {
    return agent::fail(context, a,
                       cm_failed(a, Status::refused, news.found(),
                                 "see whether the peer listens there through rdma_cm"));
  }
  const wire::Refuse no = wire::decode_cm_refusal(news.data());
  if (a.reconnect != nullptr) a.reconnect->permanent = no.status != Status::limit;
  agent::fail(context, a,
              cm_failed(a, no.status, fmt::format("the peer refused: {}", no.message()),
                        "see the peer's reason"));
}

void EngineCore::take_cm_end(Agent& a) {
  // The peer's goodbye comes first, if it said one.
  constexpr int kDrainRounds = 8;
  for (int round = 0; round < kDrainRounds && drain_completions() != 0; ++round) {
  }
  if (a.state == ConnectionState::draining || a.closing) return;
  agent::fail(context, a,
              {Status::peer_lost, fmt::format("the connection to {}", a.peer.name.data()),
               "rdma_cm tells that the peer disconnected", "the peer has ended"});
}

void EngineCore::take_cm_request(const CmNews& news) {
  const auto name = reinterpret_cast<std::uint64_t>(news.listener->context);
  CmId id = CmId::adopt(news.id, nullptr);
  const auto refuse = [&](const Error& why) {
    ++context.stats.handshakes_refused;
    base::log(LogLevel::info, "a request through rdma_cm is refused: {}", why.message());
    id.reject(wire::encode_cm_refusal(wire::make_refuse(why.status, why.message())).bytes());
  };
  const Listening* const listening = find_listener(
      static_cast<std::uint32_t>(name), static_cast<std::uint32_t>((name & ~kListenerBit) >> 32));
  if (listening == nullptr)
    return refuse({Status::refused, "connect", "nobody listens here any more", "try again"});
  if (auto left = check_device_left("accept a connection"); !left) return refuse(left.error());
  if (auto good = check_device(context.device->info(), id); !good) return refuse(good.error());
  auto peer = read_endpoint(id, context.device->info(), news);
  if (!peer) return refuse(peer.error());
  auto raw = agent::make_raw(context, listening->attributes);
  if (!raw) return refuse(raw.error());
  Agent* const a = agent::acquire(context, ConnectionState::exchanging, false);
  if (a == nullptr)
    return refuse(engine::no_more_connections(context, "accept one more connection"));
  const auto from = id.peer_address();
  engine::name_peer(*a, from ? from->text().view() : "a peer through rdma_cm");
  auto link = std::make_unique<CmLink>();
  link->id = std::move(id);
  link->resolved = true;
  attach_link(std::move(link), *a);
  agent::set_attributes(*a, listening->attributes);
  (void)agent::use_raw(context, *a, std::move(*raw));
  const ListenOptions options = listening->options;
  if (auto taken = agent::take_endpoint(context, *a, *peer); !taken)
    return agent::fail(context, *a, taken.error());  // which rejects it; nobody has heard of it
  a->handlers = options.handlers;
  if (options.on_accept) options.on_accept(agent::handle(context, *a));
  if (a->state == ConnectionState::draining) return;
  if (auto agreed = agent::agree_on_raw(*a, a->peer.is_raw); !agreed)
    agent::fail(context, *a, agreed.error());
}

void EngineCore::progress_through_cm(Agent& a) noexcept {
  if (a.state == ConnectionState::draining || a.state == ConnectionState::ready) return;
  CmLink& link = *a.setup.cm;
  const bool ask = a.setup.outbound && a.stage == Stage::wait;
  const bool answer = !a.setup.outbound && a.stage == Stage::up;
  Result<void> done;
  if ((ask || answer) && !link.spoken) {
    link.spoken = true;
    const auto data = wire::encode_cm(agent::endpoint(context, a));
    const verbs::QueuePairOptions& ours = a.attributes.queue_pair;
    const std::uint8_t reads = ours.rd_atomic;
    control::CmOffer offer;
    offer.qp_num = a.qp->qp_num;
    offer.responder_resources = reads;
    offer.initiator_depth = std::min(reads, answer ? a.peer.queue_pair.rd_atomic : reads);
    offer.retry_count = ours.retry.retry_count;
    offer.rnr_retry = ours.retry.rnr_retry;
    offer.shared_receives = context.device->info().shared_receives && a.raw == nullptr;
    offer.data = data;
    done = ask ? link.id.connect(offer) : link.id.accept(offer);
    if (ask && done) agent::enter(context, a, ConnectionState::exchanging);
  } else if (a.setup.outbound && a.stage == Stage::up) {
    done = link.id.establish();
    if (done) agent::become_ready(context, a);
  }
  if (!done) agent::fail(context, a, done.error());
}

}  // namespace spinwire::detail
