// Config::check(): applies the ranges of config_keys.cc, and checks the relations between settings.
#include <arpa/inet.h>
#include <fmt/core.h>

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "base/units.h"
#include "config/config_keys.h"
#include "config/queue_sizing.h"
#include "spinwire/config.h"

namespace spinwire {
namespace config {
namespace {

using std::string_view;

/// A key and its value, for an error about two conflicting settings.
std::string setting(const Config& config, string_view section, string_view name) {
  const ConfigKey* key = find_config_key(section, name);
  return fmt::format("{}.{} = {}", section, name, present_text(*key, config));
}

tl::unexpected<Error> disagree(const Config& config, string_view section, string_view name,
                               std::string found, std::string remedy) {
  return base::fail(Status::bad_config, setting(config, section, name), std::move(found),
                    std::move(remedy));
}

Result<void> check_ranges(const Config& config) {
  for (const ConfigKey& key : config_keys()) {
    if (in_range(key, config)) continue;
    return base::fail(Status::bad_config, full_name(key),
                      fmt::format("{} is out of range", present_text(key, config)),
                      remedy_text(key));
  }
  return {};
}

/// Receives of connections with their own protection domain, for errors that count them.
std::string domains_text(const Config& config) {
  if (own_domain_receives(config) == 0) return "";
  return fmt::format(", {} with {} receives each", setting(config, "connections", "own_domains"),
                     receives_per_own_domain(config));
}

Result<void> check_queues(const Config& config) {
  const auto& queues = config.queues;
  const std::uint32_t mtu = config.connections.mtu;
  if (!std::has_single_bit(mtu)) {  // the range allows only the five sizes of the specification
    return disagree(config, "connections", "mtu", "no path MTU has that size",
                    "give 256, 512, 1024, 2048 or 4096");
  }
  if (config.connections.credits > queues.receive_depth) {
    return disagree(config, "connections", "credits",
                    fmt::format("the engine posts fewer receives: {}",
                                setting(config, "queues", "receive_depth")),
                    "lower the first or raise the second");
  }
  // Receives that wait to be reposted, or are kept for goodbyes, are not reserved for peers.
  const std::uint32_t unreserved = queues.receive_postlist + kUnreservedReceives;
  if (queues.receive_depth <= unreserved) {
    return disagree(
        config, "queues", "receive_depth",
        fmt::format("no receive is left to reserve for a peer: {}, and {} are kept for closing",
                    setting(config, "queues", "receive_postlist"), kUnreservedReceives),
        fmt::format("give at least {}, or lower the other", unreserved + 1));
  }
  const std::uint64_t entries = completions_needed(config);
  const std::uint64_t rendezvous = rendezvous_requests(config);
  if (queues.completion_depth < entries) {
    return disagree(
        config, "queues", "completion_depth",
        fmt::format(
            "{}, {}{}, {} with {} control requests each{} can complete {} at once",
            setting(config, "queues", "operations"), setting(config, "queues", "receive_depth"),
            domains_text(config), setting(config, "connections", "maximum"), kControlRequests,
            rendezvous != 0 ? fmt::format(", and {} of rendezvous messages and leases", rendezvous)
                            : "",
            entries),
        fmt::format("give at least {}, or lower one of the others", entries));
  }
  return {};
}

Result<void> check_rpc(const Config& config) {
  for (const string_view name : {"window", "send_depth"}) {
    const ConfigKey* key = find_config_key("rpc", name);
    if (std::has_single_bit(static_cast<std::uint64_t>(key->get(config)))) continue;
    return disagree(config, "rpc", name, "it is no power of two", "give 8, 16, 32 or the like");
  }
  return {};
}

Result<void> check_path(const Config& config) {
  if (config.queue_pair.static_rate != 1) return {};
  return disagree(config, "queue_pair", "static_rate", "no rate has that code",
                  "give 0 or a code of enum ibv_rate");
}

Result<void> check_receive_pool(const Config& config) {
  const std::uint64_t needed = receive_pool_needed(config);
  if (needed <= config.memory.receive_bytes) return {};
  return disagree(
      config, "memory", "receive_bytes",
      fmt::format("{}{} with {} needs {} bytes, a quarter spare; the pool has {}",
                  setting(config, "queues", "receive_depth"), domains_text(config),
                  setting(config, "connections", "eager_bytes"), needed,
                  config.memory.receive_bytes),
      fmt::format("raise memory.receive_bytes to at least {}, or lower one of the others",
                  base::bytes_text((needed + (1u << 20) - 1) & ~((std::uint64_t{1} << 20) - 1))));
}

Result<void> check_rendezvous_pool(const Config& config) {
  const std::uint64_t message = config.connections.max_message_bytes;
  if (message < config.connections.eager_bytes) {
    return disagree(config, "connections", "max_message_bytes",
                    fmt::format("messages up to {} are to go in one piece",
                                setting(config, "connections", "eager_bytes")),
                    "raise max_message_bytes or lower connections.eager_bytes");
  }
  const std::uint64_t needed = longest_message_bytes(config);
  if (needed <= config.memory.rendezvous_bytes) return {};
  return disagree(
      config, "memory", "rendezvous_bytes",
      fmt::format("{} needs {} to arrive in; the pool has {}",
                  setting(config, "connections", "max_message_bytes"), base::bytes_text(needed),
                  base::bytes_text(config.memory.rendezvous_bytes)),
      fmt::format("raise memory.rendezvous_bytes to at least {}, or lower "
                  "connections.max_message_bytes",
                  base::bytes_text(needed)));
}

Result<void> check_leases(const Config& config) {
  if (!std::has_single_bit(config.leases.max_alignment)) {
    return disagree(config, "leases", "max_alignment", "it is no power of two",
                    "give a power of two up to 2MiB");
  }
  if (config.leases.guard < config.leases.max_duration) return {};
  return disagree(
      config, "leases", "guard",
      fmt::format("no lease would be usable: {}", setting(config, "leases", "max_duration")),
      "lower the first or raise the second");
}

Result<void> check_address(const Config& config) {
  const std::string& address = config.device.address;
  in6_addr parsed{};
  if (address.empty() || ::inet_pton(AF_INET, address.c_str(), &parsed) == 1 ||
      ::inet_pton(AF_INET6, address.c_str(), &parsed) == 1)
    return {};
  return base::fail(Status::bad_config, "device.address",
                    fmt::format("\"{}\" is no IP address", address),
                    "give one such as \"10.0.0.1\" or \"fd00::1\", without port");
}

Result<void> check_times(const Config& config) {
  for (const string_view name : {"connect_timeout", "handshake_timeout", "close_timeout",
                                 "keepalive_interval", "peer_timeout", "credit_idle_timeout"}) {
    const ConfigKey* key = find_config_key("connections", name);
    if (key->get(config) > config.engine.control_interval.count()) continue;
    return disagree(config, "connections", name,
                    fmt::format("time is looked at less often: {}",
                                setting(config, "engine", "control_interval")),
                    "raise the first or lower the second");
  }
  if (config.connections.peer_timeout < config.connections.keepalive_interval) {
    return disagree(config, "connections", "peer_timeout",
                    fmt::format("a silent peer would be lost before it is asked: {}",
                                setting(config, "connections", "keepalive_interval")),
                    "raise the first or lower the second");
  }
  return {};
}

}  // namespace
}  // namespace config

Result<void> Config::check() const {
  return base::no_throw("check the settings", [&]() -> Result<void> {
    for (const auto check_part :
         {config::check_ranges, config::check_queues, config::check_receive_pool,
          config::check_rendezvous_pool, config::check_leases, config::check_times,
          config::check_address, config::check_path, config::check_rpc}) {
      if (auto good = check_part(*this); !good) return good;
    }
    return {};
  });
}

}  // namespace spinwire
