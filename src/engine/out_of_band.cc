// Connections whose endpoints the application exchanges out-of-band. Cold.
#include "engine/acceptance.h"
#include "engine/connector.h"

namespace spinwire::engine {

using agent::Agent;

Result<void> Connector::check_adapter(const char* asked, const char* remedy) const {
  if (!context_.device->provider().reaches_other_hosts) return {};
  return port_.check_adapter(asked, remedy);
}

Result<Connection> Connector::prepare(const PrepareOptions& options) {
  constexpr const char* kAsked = "prepare a connection";
  const auto attributes =
      device_.check_present(kAsked)
          .and_then([&] { return check_adapter(kAsked, "use Via::tcp at a loopback address"); })
          .and_then([&] { return config::check_timeout(kAsked, options.timeout); })
          .and_then([&] {
            return config::resolve(context_.config, *context_.device, options.settings, false);
          });
  if (!attributes) return tl::unexpected(attributes.error());
  const auto ours = copy_private_data(kAsked, options.private_data);
  if (!ours) return tl::unexpected(ours.error());
  const auto made = agent::make(context_,
                                {.outbound = true,
                                 .peer = "a peer that has not joined yet",
                                 .attributes = *attributes,
                                 .timeout = options.timeout,
                                 .handlers = &options.handlers,
                                 .out_of_band = &options,
                                 .private_data = &*ours},
                                kAsked);
  if (!made) return tl::unexpected(made.error());
  schedule_.step_soon();
  return agent::handle(context_, **made);
}

Result<void> Connector::join(Agent& a, const Endpoint& peer) {
  if (auto joined = agent::join(context_, a, peer); !joined) return joined;
  const std::uint64_t subject = agent::subject_of(a);
  const auto resolved = base::no_throw("resolve an address", [&] {
    return port_.resolve(subject, peer.gid, peer.gid_type, if_own(agent::place_of(a)));
  });
  if (!resolved || *resolved) on_address_resolved(subject, resolved.map([](bool) {}));
  return {};
}

void Connector::on_address_resolved(std::uint64_t subject, const Result<void>& outcome) {
  Agent* const a = find(subject);
  if (a == nullptr || agent::is_ending(*a)) return;
  agent::on_address_known(context_, *a, outcome);
  schedule_.step_soon();
}

}  // namespace spinwire::engine
