#include "config/connection_attributes.h"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <string>

#include "base/error.h"
#include "config/config_keys.h"

namespace spinwire::config {
namespace {

using Number = std::optional<std::uint32_t> ConnectionSettings::*;

/// A member of ConnectionSettings, and the key that it overrides, which has its range.
struct Item {
  std::string_view section;
  std::string_view name;
  Number member;
  bool resolved_by_cm = false;  ///< not allowed with rdma_cm
};

constexpr std::array kItems{
    Item{"queues", "send_depth", &ConnectionSettings::send_depth},
    Item{"connections", "credits", &ConnectionSettings::credits},
    Item{"queues", "inline_bytes", &ConnectionSettings::inline_bytes},
    Item{"queues", "max_send_sge", &ConnectionSettings::max_send_sge},
    Item{"connections", "mtu", &ConnectionSettings::mtu},
    Item{"queue_pair", "initiator_depth", &ConnectionSettings::initiator_depth},
    Item{"queue_pair", "responder_depth", &ConnectionSettings::responder_depth},
    Item{"queue_pair", "ack_timeout", &ConnectionSettings::ack_timeout},
    Item{"queue_pair", "retry_count", &ConnectionSettings::retry_count},
    Item{"queue_pair", "rnr_retry", &ConnectionSettings::rnr_retry},
    Item{"queue_pair", "min_rnr_timer", &ConnectionSettings::min_rnr_timer},
    Item{"queue_pair", "psn", &ConnectionSettings::psn},
    Item{"queue_pair", "service_level", &ConnectionSettings::service_level},
    Item{"queue_pair", "traffic_class", &ConnectionSettings::traffic_class},
    Item{"queue_pair", "flow_label", &ConnectionSettings::flow_label},
    Item{"queue_pair", "hop_limit", &ConnectionSettings::hop_limit},
    Item{"queue_pair", "src_path_bits", &ConnectionSettings::src_path_bits},
    Item{"queue_pair", "static_rate", &ConnectionSettings::static_rate},
    Item{"device", "port", &ConnectionSettings::port, true},
    Item{"device", "gid_index", &ConnectionSettings::gid_index, true},
    Item{"queue_pair", "pkey_index", &ConnectionSettings::pkey_index, true},
};

tl::unexpected<Error> misfit(const Item& item, std::uint32_t value, std::string found,
                             std::string remedy) {
  return base::fail(Status::invalid_argument, fmt::format("{} = {}", item.name, value),
                    std::move(found), std::move(remedy));
}

/// Overrides the engine's setting.
Result<void> apply_item(Config& config, const Item& item, std::uint32_t value, bool through_cm) {
  if (item.resolved_by_cm && through_cm) {
    return misfit(item, value, "rdma_cm finds it by the addresses",
                  "leave it out, or connect with Via::tcp");
  }
  const ConfigKey& key = *find_config_key(item.section, item.name);
  if (const auto set = set_from_number(key, config, value); !set) {
    return misfit(item, value, fmt::format("{}: {}", set.error(), range_text(key)),
                  remedy_text(key));
  }
  const bool good = item.member == &ConnectionSettings::mtu           ? std::has_single_bit(value)
                    : item.member == &ConnectionSettings::static_rate ? value != 1
                    : item.member == &ConnectionSettings::port        ? value != 0
                                                                      : true;
  if (!good) {
    return misfit(item, value, "no such value exists",
                  item.member == &ConnectionSettings::mtu
                      ? "give 256, 512, 1024, 2048 or 4096"
                      : fmt::format("see {} for the values", full_name(key)));
  }
  return {};
}

template <typename Narrow>
Narrow narrow(std::uint32_t value) noexcept {
  return static_cast<Narrow>(value);  // the key's range fits
}

int access_flags(Access access, const DeviceInfo& device, bool raw = false) noexcept {
  int flags = IBV_ACCESS_LOCAL_WRITE;
  // The peer writes credit to us.
  if (!raw || allows(access, Access::remote_write)) flags |= IBV_ACCESS_REMOTE_WRITE;
  if (allows(access, Access::remote_read)) flags |= IBV_ACCESS_REMOTE_READ;
  if (allows(access, Access::remote_atomic) && device.atomics) flags |= IBV_ACCESS_REMOTE_ATOMIC;
  return flags;
}

/// Converts settings to attributes. `place` has port and GID, `config` the rest.
ConnectionAttributes attributes_of(const Config& config, const DeviceInfo& device,
                                   const verbs::Place& place) noexcept {
  using Byte = std::uint8_t;
  const Config::QueuePair& c = config.queue_pair;
  ConnectionAttributes result;
  verbs::QueuePairOptions& to = result.queue_pair;
  to.send_depth = config.queues.send_depth;
  to.inline_bytes = config.queues.inline_bytes;
  to.initiator_depth = narrow<Byte>(c.initiator_depth);
  to.responder_depth = narrow<Byte>(c.responder_depth);
  to.send_elements = config.queues.max_send_sge + 1;  // and the header of a message
  to.access = access_flags(c.access, device);
  to.place = place;
  to.path.pkey_index = narrow<std::uint16_t>(c.pkey_index);
  to.path.service_level = narrow<Byte>(c.service_level);
  to.path.traffic_class = narrow<Byte>(c.traffic_class);
  to.path.hop_limit = narrow<Byte>(c.hop_limit);
  to.path.src_path_bits = narrow<Byte>(c.src_path_bits);
  to.path.static_rate = narrow<Byte>(c.static_rate);
  to.path.flow_label = c.flow_label;
  to.retry = {narrow<Byte>(c.ack_timeout), narrow<Byte>(c.retry_count), narrow<Byte>(c.rnr_retry),
              narrow<Byte>(c.min_rnr_timer)};
  result.credits = config.connections.credits;
  result.mtu = config.connections.mtu;
  result.psn = c.psn;
  result.access = c.access;
  result.leases = config.leases;
  return result;
}

/// Checks the limits against the ranges of their keys.
Result<void> check_limits(const LeaseLimits& limits) {
  Config config;
  static_cast<LeaseLimits&>(config.leases) = limits;
  for (const ConfigKey& key : config_keys()) {
    if (key.section != "leases" || in_range(key, config)) continue;
    return base::fail(Status::invalid_argument,
                      fmt::format("leases.{} = {}", key.name, present_text(key, config)),
                      fmt::format("is out of range: {}", range_text(key)), remedy_text(key));
  }
  if (std::has_single_bit(limits.max_alignment)) return {};
  return base::fail(Status::invalid_argument,
                    fmt::format("leases.max_alignment = {}", limits.max_alignment),
                    "it is no power of two", "give a power of two up to 2MiB");
}

/// Finds the port and GID in the settings.
Result<verbs::Place> place_of(verbs::Device& device, const ConnectionSettings& settings) {
  if (!settings.port && !settings.gid_index) return device.place();
  const auto port = narrow<std::uint8_t>(settings.port.value_or(0));
  const int gid_index = settings.gid_index ? static_cast<int>(*settings.gid_index) : -1;
  return device.find_place(port, gid_index);
}

/// Checks a member of RawSettings. Device::check() checks it against the device's limit.
Result<void> check_raw(const char* name, std::uint32_t value) {
  if (value != 0) return {};
  return base::fail(Status::invalid_argument, fmt::format("raw.{} = 0", name),
                    "a raw connection needs one at least", "give 1 or more");
}

Result<void> apply_raw(ConnectionAttributes& to, const RawSettings& raw, const DeviceInfo& device) {
  if (auto good = check_raw("receive_depth", raw.receive_depth); !good) return good;
  if (auto good = check_raw("max_send_sge", raw.max_send_sge); !good) return good;
  if (auto good = check_raw("max_recv_sge", raw.max_recv_sge); !good) return good;
  to.raw = true;
  to.queue_pair.receive_depth = raw.receive_depth;
  to.queue_pair.send_elements = raw.max_send_sge;
  to.queue_pair.receive_elements = raw.max_recv_sge;
  to.queue_pair.access = access_flags(to.access, device, true);
  return {};
}

}  // namespace

Result<void> check_access(Access most, Access asked, const DeviceInfo& device, const char* whose) {
  if (!allows(Access::remote_all, asked)) return {};  // the registration refuses unknown rights
  if (allows(asked, Access::remote_atomic) && !device.atomics) {
    return base::fail(Status::unsupported, "give a peer the right to atomics",
                      fmt::format("device {} has none", device.name),
                      "leave Access::remote_atomic out if Engine::device() has no atomics");
  }
  if (allows(most, asked)) return {};
  const auto text = [](Access access) {
    return value_text(*find_config_key("queue_pair", "access"), static_cast<std::int64_t>(access));
  };
  return base::fail(Status::invalid_argument, fmt::format("give a peer {}", text(asked)),
                    fmt::format("{} allows {}", whose, text(most)),
                    "ask for less, or allow more with the setting access");
}

ConnectionAttributes default_attributes(const Config& config, const verbs::Device& device) {
  ConnectionAttributes result = attributes_of(config, device.info(), device.place());
  result.queue_pair.initiator_depth = narrow<std::uint8_t>(device.info().initiator_depth);
  result.queue_pair.responder_depth = narrow<std::uint8_t>(device.info().responder_depth);
  result.queue_pair.send_elements = device.send_elements();
  return result;
}

Result<ConnectionAttributes> resolve(const Config& config, verbs::Device& device,
                                     const ConnectionSettings& settings, bool through_cm) {
  Config merged = config;
  merged.queue_pair.initiator_depth = device.info().initiator_depth;
  merged.queue_pair.responder_depth = device.info().responder_depth;
  merged.queues.max_send_sge = device.send_elements() - 1;
  for (const Item& item : kItems) {
    const auto& value = settings.*item.member;
    if (!value) continue;
    if (auto applied = apply_item(merged, item, *value, through_cm); !applied)
      return tl::unexpected(applied.error());
  }
  if (settings.credits.value_or(0) > config.queues.receive_depth) {
    return base::fail(
        Status::limit, fmt::format("credits = {}", *settings.credits),
        fmt::format("the engine posts queues.receive_depth = {}", config.queues.receive_depth),
        "lower credits, or raise queues.receive_depth");
  }
  if (settings.access) {
    if (!allows(Access::remote_all, *settings.access)) {
      return base::fail(Status::invalid_argument, "access", "unknown access rights",
                        "combine the named values of Access");
    }
    merged.queue_pair.access = *settings.access;
  }
  if (settings.leases) {
    if (auto good = check_limits(*settings.leases); !good) return tl::unexpected(good.error());
    static_cast<LeaseLimits&>(merged.leases) = *settings.leases;
  }
  if (settings.own_domain && config.connections.own_domains == 0) {
    return base::fail(Status::limit, "own_domain = true", "connections.own_domains = 0",
                      "set it to the number of connections with a domain of their own at a time");
  }
  auto place = place_of(device, settings);
  if (!place) return tl::unexpected(place.error());
  ConnectionAttributes result = attributes_of(merged, device.info(), *place);
  result.own_domain = settings.own_domain;
  if (auto good = settings.raw ? apply_raw(result, *settings.raw, device.info()) : Result<void>{};
      !good)
    return tl::unexpected(good.error());
  if (auto good = device.check(result.queue_pair); !good) return tl::unexpected(good.error());
  return result;
}

Result<void> check_timeout(const char* asked, Nanoseconds timeout) {
  if (timeout >= Nanoseconds{0} && timeout <= std::chrono::hours(1)) return {};
  return base::fail(Status::invalid_argument, asked,
                    fmt::format("its time-out is {} ns", timeout.count()),
                    "allow up to an hour, or 0 for connections.connect_timeout");
}

}  // namespace spinwire::config
