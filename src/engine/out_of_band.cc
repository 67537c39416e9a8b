// Connections whose endpoints the application exchanges out-of-band. Cold.
#include <arpa/inet.h>

#include "base/error.h"
#include "engine/api/operate.h"
#include "engine/connector.h"

namespace spinwire::engine {

using agent::Agent;
using agent::Stage;

Result<Connection> Connector::prepare(const PrepareOptions& options) {
  if (auto present = device_.check_present("prepare a connection"); !present)
    return tl::unexpected(present.error());
  if (auto good = config::check_timeout("prepare a connection", options.timeout); !good)
    return tl::unexpected(good.error());
  const auto attributes =
      config::resolve(context_.config, *context_.device, options.settings, false);
  if (!attributes) return tl::unexpected(attributes.error());
  auto raw = agent::make_raw(context_, *attributes);
  if (!raw) return tl::unexpected(raw.error());
  Agent* const a = agent::acquire(context_, ConnectionState::exchanging, true, options.timeout);
  if (a == nullptr)
    return tl::unexpected(agent::no_more_connections(context_, "prepare a connection"));
  a->setup.out_of_band = true;
  agent::set_attributes(*a, *attributes);
  (void)agent::use_raw(context_, *a, std::move(*raw));
  a->handlers = options.handlers;
  a->setup.on_endpoint = options.on_endpoint;
  agent::name_peer(*a, "a peer that was not joined yet");
  schedule_.step_soon();
  return agent::handle(context_, *a);
}

Result<void> Connector::join(Agent& a, const Endpoint& peer) {
  if (!a.setup.out_of_band || a.peer.queue_pair.qp_num != 0) {
    return base::fail(Status::invalid_argument, "join a peer's endpoint",
                      a.setup.out_of_band ? "the connection has its peer already"
                                          : "the connection was not made by prepare()",
                      "prepare one connection for each peer");
  }
  if (auto valid = wire::check(peer); !valid) return valid;
  if (auto taken = agent::accept_endpoint(context_, a, peer); !taken) return taken;
  std::array<char, INET6_ADDRSTRLEN> gid{};
  ::inet_ntop(AF_INET6, peer.gid.data(), gid.data(), gid.size());
  agent::name_peer(a, base::format("[{}] queue pair {:#x}", gid.data(), peer.qp_num));
  const auto resolved = port_.resolve(agent::subject_of(a), peer);
  a.setup.address_pending = resolved && !*resolved;
  if (!a.setup.address_pending)
    on_address_resolved(agent::subject_of(a), resolved.map([](bool) {}));
  return {};
}

void Connector::on_address_resolved(std::uint64_t subject, const Result<void>& outcome) {
  Agent* const a = find(subject);
  if (a == nullptr || a->state == ConnectionState::draining) return;
  a->setup.address_pending = false;
  if (!outcome) return agent::fail(context_, *a, outcome.error());
  agent::advance(context_, *a, agent::Event::endpoint_received);
  schedule_.step_soon();
}

void Connector::on_out_of_band_step(Agent& a) noexcept {
  if (a.state != ConnectionState::exchanging) return;
  const bool at_init = a.stage == Stage::wait || a.stage == Stage::rtr;
  if (at_init && !a.setup.endpoint_delivered) {
    a.setup.endpoint_delivered = true;
    const auto run = a.setup.on_endpoint;
    if (run) run(agent::handle(context_, a), agent::endpoint(context_, a));
  } else {
    agent::advance(context_, a, agent::Event::peer_ready);
  }
}

}  // namespace spinwire::engine
