// Connections that the application brings up itself. Cold.
#include <arpa/inet.h>
#include <fmt/format.h>

#include "base/error.h"
#include "engine/api/operate.h"

namespace spinwire {
namespace detail {

using agent::Agent;
using agent::Stage;

Result<Connection> EngineCore::prepare(const PrepareOptions& options) {
  if (ending) return engine::ending_error("prepare a connection");
  if (auto left = check_device_left("prepare a connection"); !left)
    return tl::unexpected(left.error());
  if (auto good = engine::check_timeout("prepare a connection", options.timeout); !good)
    return tl::unexpected(good.error());
  const auto attributes = resolve(options.settings, Via::tcp);
  if (!attributes) return tl::unexpected(attributes.error());
  auto raw = agent::make_raw(context, *attributes);
  if (!raw) return tl::unexpected(raw.error());
  Agent* const a = agent::acquire(context, ConnectionState::exchanging, true, options.timeout);
  if (a == nullptr)
    return tl::unexpected(engine::no_more_connections(context, "prepare a connection"));
  a->setup.out_of_band = true;
  agent::set_attributes(*a, *attributes);
  (void)agent::use_raw(context, *a, std::move(*raw));
  a->handlers = options.handlers;
  a->setup.on_endpoint = options.on_endpoint;
  engine::name_peer(*a, "a peer that was not joined yet");
  step_soon();
  return agent::handle(context, *a);
}

Result<void> EngineCore::join(Agent& a, const Endpoint& peer) {
  if (!a.setup.out_of_band || a.peer.queue_pair.qp_num != 0) {
    return base::fail(Status::invalid_argument, "join a peer's endpoint",
                      a.setup.out_of_band ? "the connection has its peer already"
                                          : "the connection was not made by prepare()",
                      "prepare one connection for each peer");
  }
  if (auto valid = wire::check(peer); !valid) return valid;
  if (auto taken = agent::take_endpoint(context, a, peer); !taken) return taken;
  std::array<char, INET6_ADDRSTRLEN> gid{};
  ::inet_ntop(AF_INET6, peer.gid.data(), gid.data(), gid.size());
  engine::name_peer(a, fmt::format("[{}] queue pair {:#x}", gid.data(), peer.qp_num));
  if (a.stage == Stage::wait) {
    a.stage = Stage::rtr;
    agent::list_setup(context, a);
  }
  step_soon();
  return {};
}

void EngineCore::progress_by_hand(Agent& a) noexcept {
  if (a.state != ConnectionState::exchanging) return;
  const bool at_init = a.stage == Stage::wait || a.stage == Stage::rtr;
  if (at_init && !a.setup.endpoint_delivered) {
    a.setup.endpoint_delivered = true;
    const auto tell = a.setup.on_endpoint;
    if (tell) tell(agent::handle(context, a), agent::endpoint(context, a));
  } else if (a.stage == Stage::up) {
    agent::become_ready(context, a);
  }
}

Result<Agent*> locate(const EngineSlot* slot, std::uint32_t index, std::uint32_t generation,
                      const char* asked) {
  if (const Status why = engine::diagnose(slot); why != Status::not_connected)
    return engine::misused(why, asked);
  Agent* const a = engine::locate(slot, index, generation).agent;
  if (a != nullptr && a->state != ConnectionState::draining) return a;
  return base::fail(Status::not_connected, asked, "the connection has ended", "make another one");
}

}  // namespace detail

Result<void> Connection::join(const Endpoint& peer) {
  constexpr const char* kAsked = "join a peer's endpoint";
  auto a = detail::locate(slot_, index_, generation_, kAsked);
  if (!a) return tl::unexpected(a.error());
  return base::no_throw(kAsked, [&] { return slot_->core->join(**a, peer); });
}

Result<Endpoint> Connection::endpoint() const {
  constexpr const char* kAsked = "tell a connection's endpoint";
  auto a = detail::locate(slot_, index_, generation_, kAsked);
  if (!a) return tl::unexpected(a.error());
  if (!(*a)->setup.endpoint_delivered) {
    return base::fail(Status::not_connected, kAsked, "its queue pair is not there yet",
                      "wait for on_endpoint");
  }
  return agent::endpoint(slot_->core->context, **a);
}

}  // namespace spinwire
