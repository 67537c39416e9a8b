#include "engine/connection_settings.h"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <string>

#include "base/error.h"
#include "engine/config_keys.h"
#include "engine/engine_core.h"

namespace spinwire::engine {
namespace {

using Number = std::optional<std::uint32_t> ConnectionSettings::*;

/// A member and the key that it takes the place of, which has its range.
struct Item {
  std::string_view section;
  std::string_view name;
  Number member;
  bool by_cm = false;  ///< rdma_cm knows it
};

constexpr std::array kItems{
    Item{"queues", "send_depth", &ConnectionSettings::send_depth},
    Item{"queues", "inline_bytes", &ConnectionSettings::inline_bytes},
    Item{"connections", "mtu", &ConnectionSettings::mtu},
    Item{"queue_pair", "rd_atomic", &ConnectionSettings::rd_atomic},
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

/// Puts what was given into the place of the engine's setting.
Result<void> take(Config& config, const Item& item, std::uint32_t value, bool through_cm) {
  if (item.by_cm && through_cm) {
    return misfit(item, value, "rdma_cm finds it by the addresses",
                  "leave it out, or connect with Via::tcp");
  }
  const ConfigKey& key = *find_config_key(item.section, item.name);
  if (const auto set = set_from_number(key, config, value); !set) {
    return misfit(item, value, fmt::format("{}: {}", set.error(), range_text(key)),
                  wanted_text(key));
  }
  const bool good = item.member == &ConnectionSettings::mtu           ? std::has_single_bit(value)
                    : item.member == &ConnectionSettings::static_rate ? value != 1
                    : item.member == &ConnectionSettings::port        ? value != 0
                                                                      : true;
  if (!good) {
    return misfit(item, value, "there is none such",
                  item.member == &ConnectionSettings::mtu
                      ? "give 256, 512, 1024, 2048 or 4096"
                      : fmt::format("see {} for what there is", full_name(key)));
  }
  return {};
}

template <typename Narrow>
Narrow narrow(std::uint32_t value) noexcept {
  return static_cast<Narrow>(value);  // the key's range fits
}

int access_flags(Access access, const DeviceInfo& device, bool raw = false) noexcept {
  int flags = IBV_ACCESS_LOCAL_WRITE;
  // The peer writes its credits to us.
  if (!raw || allows(access, Access::remote_write)) flags |= IBV_ACCESS_REMOTE_WRITE;
  if (allows(access, Access::remote_read)) flags |= IBV_ACCESS_REMOTE_READ;
  if (allows(access, Access::remote_atomic) && device.atomics) flags |= IBV_ACCESS_REMOTE_ATOMIC;
  return flags;
}

/// `config` has all that is to be; of the place, only the partition key.
agent::Attributes attributes_of(const Config& config, const DeviceInfo& device,
                                const verbs::Place& place) noexcept {
  using Byte = std::uint8_t;
  const Config::QueuePair& c = config.queue_pair;
  agent::Attributes result;
  verbs::QueuePairOptions& to = result.queue_pair;
  to.send_depth = config.queues.send_depth;
  to.inline_bytes = config.queues.inline_bytes;
  to.rd_atomic = narrow<Byte>(c.rd_atomic);
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
  result.mtu = config.connections.mtu;
  result.psn = c.psn;
  result.access = c.access;
  result.leases = config.leases;
  return result;
}

/// As the keys of the same names are checked.
Result<void> check_limits(const LeaseLimits& limits) {
  Config config;
  static_cast<LeaseLimits&>(config.leases) = limits;
  for (const ConfigKey& key : config_keys()) {
    if (key.section != "leases" || in_range(key, config)) continue;
    return base::fail(Status::invalid_argument,
                      fmt::format("leases.{} = {}", key.name, present_text(key, config)),
                      fmt::format("is out of range: {}", range_text(key)), wanted_text(key));
  }
  if (std::has_single_bit(limits.alignment)) return {};
  return base::fail(Status::invalid_argument,
                    fmt::format("leases.alignment = {}", limits.alignment), "it is no power of two",
                    "give a power of two up to 2MiB");
}

/// The port and GID that are asked for.
Result<verbs::Place> place_of(verbs::Device& device, const ConnectionSettings& settings) {
  if (!settings.port && !settings.gid_index) return device.place();
  const auto port = narrow<std::uint8_t>(settings.port.value_or(0));
  const int gid_index = settings.gid_index ? static_cast<int>(*settings.gid_index) : -1;
  return device.find_place(port, gid_index);
}

/// A member of RawSettings. More than the device has is seen by Device::check().
Result<void> check_raw(const char* name, std::uint32_t value) {
  if (value != 0) return {};
  return base::fail(Status::invalid_argument, fmt::format("raw.{} = 0", name),
                    "a raw connection needs one at least", "give 1 or more");
}

Result<void> take_raw(agent::Attributes& to, const RawSettings& raw, const DeviceInfo& device) {
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
  if (!allows(Access::remote_all, asked)) return {};  // what that is, the registration tells
  if (allows(asked, Access::remote_atomic) && !device.atomics) {
    return base::fail(Status::unsupported, "give a peer the right to atomics",
                      fmt::format("device {} has none", device.name),
                      "leave Access::remote_atomic out where Engine::device() tells of no atomics");
  }
  if (allows(most, asked)) return {};
  const auto text = [](Access access) {
    return value_text(*find_config_key("queue_pair", "access"), static_cast<std::int64_t>(access));
  };
  return base::fail(Status::invalid_argument, fmt::format("give a peer {}", text(asked)),
                    fmt::format("{} allows {}", whose, text(most)),
                    "ask for less, or allow more with the setting access");
}

agent::Attributes default_attributes(const Config& config, const verbs::Device& device) {
  agent::Attributes result = attributes_of(config, device.info(), device.place());
  result.queue_pair.rd_atomic = narrow<std::uint8_t>(device.info().rd_atomic);
  return result;
}

Result<agent::Attributes> resolve(const Config& config, verbs::Device& device,
                                  const ConnectionSettings& settings, bool through_cm) {
  Config merged = config;
  merged.queue_pair.rd_atomic = device.info().rd_atomic;
  for (const Item& item : kItems) {
    const auto& value = settings.*item.member;
    if (!value) continue;
    if (auto taken = take(merged, item, *value, through_cm); !taken)
      return tl::unexpected(taken.error());
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
    return base::fail(
        Status::limit, "own_domain = true", "connections.own_domains = 0",
        "set it to as many connections as shall have a domain of their own at a time");
  }
  auto place = place_of(device, settings);
  if (!place) return tl::unexpected(place.error());
  agent::Attributes result = attributes_of(merged, device.info(), *place);
  result.own_domain = settings.own_domain;
  if (auto good = settings.raw ? take_raw(result, *settings.raw, device.info()) : Result<void>{};
      !good)
    return tl::unexpected(good.error());
  if (auto good = device.check(result.queue_pair); !good) return tl::unexpected(good.error());
  return result;
}

}  // namespace spinwire::engine

namespace spinwire::detail {

Result<agent::Attributes> EngineCore::resolve(const ConnectionSettings& settings, Via via) {
  return engine::resolve(context.config, *context.device, settings, via == Via::rdma_cm);
}

Result<void> EngineCore::check_access(Access asked) const {
  return engine::check_access(context.config.queue_pair.access, asked, context.device->info(),
                              "the engine");
}

Result<void> EngineCore::configure(agent::Agent& a, const ConnectionSettings& settings) {
  constexpr const char* kAsked = "configure a connection";
  if (a.qp != nullptr || a.stage > agent::Stage::create) {
    return base::fail(Status::invalid_argument, kAsked, "its queue pair is being made already",
                      "configure it in on_accept, or give settings to connect() or prepare()");
  }
  if (settings.own_domain != a.attributes.own_domain && a.stage > agent::Stage::domain) {
    return base::fail(Status::invalid_argument, kAsked, "its protection domain is settled already",
                      "give own_domain in on_accept, to connect() or to prepare()");
  }
  const auto attributes = resolve(settings, a.setup.cm != nullptr ? Via::rdma_cm : Via::tcp);
  if (!attributes) return tl::unexpected(attributes.error());
  const GidType type = attributes->queue_pair.place.gid_type;
  if (type != a.attributes.queue_pair.place.gid_type) {
    return base::fail(
        Status::unsupported, kAsked,
        fmt::format("that place has a GID of type {}, the peer's is of type {}", to_string(type),
                    to_string(a.attributes.queue_pair.place.gid_type)),
        "give a place with a GID of the peer's type");
  }
  if (a.raw != nullptr && a.raw->accepted != a.raw->completed) {
    return base::fail(Status::invalid_argument, kAsked, "it has receives already",
                      "configure it before post_receive()");
  }
  auto raw = agent::make_raw(context, *attributes, a.raw.get());
  if (!raw) return tl::unexpected(raw.error());
  if (!agent::use_raw(context, a, std::move(*raw)))
    return tl::unexpected(engine::no_more_connections(context, kAsked));
  agent::set_attributes(a, *attributes);
  return {};
}

}  // namespace spinwire::detail

namespace spinwire {

Result<void> Connection::configure(const ConnectionSettings& settings) {
  constexpr const char* kAsked = "configure a connection";
  auto a = detail::locate(core_, index_, generation_, kAsked);
  if (!a) return tl::unexpected(a.error());
  return base::no_throw(kAsked, [&] { return core_->configure(**a, settings); });
}

namespace {

/// The agent whose memory is to be opened to its peer with `access`.
Result<agent::Agent*> locate_for(detail::EngineCore* core, std::uint32_t index,
                                 std::uint32_t generation, Access access, const char* asked) {
  auto a = detail::locate(core, index, generation, asked);
  if (!a) return a;
  const agent::Attributes& attributes = (*a)->attributes;
  if (auto good = engine::check_access(attributes.access, access, core->context.device->info(),
                                       "the connection");
      !good)
    return tl::unexpected(good.error());
  if (attributes.own_domain && (*a)->domain == nullptr) {
    return base::fail(Status::not_connected, asked, "its own protection domain is not there yet",
                      "wait for on_ready, or on_endpoint");
  }
  return a;
}

}  // namespace

Result<RemoteRegion> Connection::expose(const BufferSlice& slice, Access access) {
  constexpr const char* kAsked = "expose memory to a peer";
  return base::no_throw(kAsked, [&]() -> Result<RemoteRegion> {
    const auto a = locate_for(core_, index_, generation_, access, kAsked);
    if (!a) return tl::unexpected(a.error());
    return core_->context.registrations->expose(slice, access, agent::registrations_of(**a));
  });
}

Result<RemoteRegion> Connection::expose(const BufferSlice& slice, Access access, KeyScope scope) {
  constexpr const char* kAsked = "expose memory to one peer";
  if (scope == KeyScope::domain) return expose(slice, access);
  return base::no_throw(kAsked, [&]() -> Result<RemoteRegion> {
    const auto a = locate_for(core_, index_, generation_, access, kAsked);
    if (!a) return tl::unexpected(a.error());
    const bool remote = allows(Access::remote_all, access) && access != Access::local;
    if (!remote || !slice || slice.size() == 0 || (*a)->state != ConnectionState::ready) {
      return base::fail(
          remote && slice ? Status::not_connected : Status::invalid_argument, kAsked,
          remote && slice ? "the connection is not ready" : "no bytes, or no remote access rights",
          "give bytes, rights and a connection that is ready");
    }
    RemoteRegion region;
    const Status opened = agent::expose_to_peer(core_->context, **a, slice, access, region);
    if (opened == Status::ok) return region;
    return base::fail(opened, kAsked, "keys, records or work requests are used up",
                      "try again after poll(), or raise leases.maximum or memory.windows");
  });
}

Result<MemoryRegion> Connection::register_memory(std::span<std::byte> bytes, Access access) {
  constexpr const char* kAsked = "register memory for a connection";
  return base::no_throw(kAsked, [&]() -> Result<MemoryRegion> {
    const auto a = locate_for(core_, index_, generation_, access, kAsked);
    if (!a) return tl::unexpected(a.error());
    auto registered =
        core_->context.registrations->register_memory(bytes, access, agent::registrations_of(**a));
    if (!registered) return tl::unexpected(registered.error());
    return MemoryRegion(std::move(registered->whole), registered->remote);
  });
}

}  // namespace spinwire
