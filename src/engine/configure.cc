// Settings of a connection that exists, and memory that is opened to its peer.

#include "base/error.h"
#include "base/internals.h"
#include "config/connection_settings.h"
#include "engine/engine_core.h"

namespace spinwire::detail {

Result<void> EngineCore::check_access(Access asked) const {
  return config::check_access(context.config.queue_pair.access, asked, context.device->info(),
                              "the engine");
}

Result<void> EngineCore::check_owner(const BufferSlice& slice) const {
  if (!slice || context.owns(*detail::block_of(slice))) return {};
  return base::fail(Status::invalid_argument, "expose memory", "it is memory of another engine",
                    "expose it with the engine that it was allocated from");
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
  const auto attributes =
      config::resolve(context.config, *context.device, settings, a.setup.cm != nullptr);
  if (!attributes) return tl::unexpected(attributes.error());
  const GidType type = attributes->queue_pair.place.gid_type;
  if (type != a.attributes.queue_pair.place.gid_type) {
    return base::fail(
        Status::unsupported, kAsked,
        base::format("that place has a GID of type {}, the peer's is of type {}", to_string(type),
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
    return tl::unexpected(agent::no_more_connections(context, kAsked));
  agent::set_attributes(a, *attributes);
  return {};
}

}  // namespace spinwire::detail

namespace spinwire {

Result<void> Connection::configure(const ConnectionSettings& settings) {
  constexpr const char* kAsked = "configure a connection";
  auto a = detail::locate(slot_, index_, generation_, kAsked);
  if (!a) return tl::unexpected(a.error());
  return base::no_throw(kAsked, [&] { return slot_->core->configure(**a, settings); });
}

namespace {

/// The agent whose memory is to be opened to its peer with `access`.
Result<agent::Agent*> locate_for(const detail::EngineSlot* slot, std::uint32_t index,
                                 std::uint32_t generation, Access access, const char* asked) {
  auto a = detail::locate(slot, index, generation, asked);
  if (!a) return a;
  const config::ConnectionAttributes& attributes = (*a)->attributes;
  if (auto good = config::check_access(attributes.access, access,
                                       slot->core->context.device->info(), "the connection");
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
    const auto a = locate_for(slot_, index_, generation_, access, kAsked);
    if (!a) return tl::unexpected(a.error());
    if (auto good = slot_->core->check_owner(slice); !good) return tl::unexpected(good.error());
    return slot_->core->context.registrations->expose(slice, access, agent::registrations_of(**a));
  });
}

Result<RemoteRegion> Connection::expose(const BufferSlice& slice, Access access, KeyScope scope) {
  constexpr const char* kAsked = "expose memory to one peer";
  if (scope == KeyScope::domain) return expose(slice, access);
  return base::no_throw(kAsked, [&]() -> Result<RemoteRegion> {
    const auto a = locate_for(slot_, index_, generation_, access, kAsked);
    if (!a) return tl::unexpected(a.error());
    if (auto good = slot_->core->check_owner(slice); !good) return tl::unexpected(good.error());
    const bool remote = allows(Access::remote_all, access) && access != Access::local;
    if (!remote || !slice || slice.size() == 0 || (*a)->state != ConnectionState::ready) {
      return base::fail(
          remote && slice ? Status::not_connected : Status::invalid_argument, kAsked,
          remote && slice ? "the connection is not ready" : "no bytes, or no remote access rights",
          "give bytes, rights and a connection that is ready");
    }
    RemoteRegion region;
    const Status opened = agent::open_key(slot_->core->context, **a, slice, access, region);
    if (opened == Status::ok) return region;
    return base::fail(opened, kAsked, "keys, records or work requests are used up",
                      "try again after poll(), or raise leases.maximum or memory.windows");
  });
}

Result<MemoryRegion> Connection::register_memory(std::span<std::byte> bytes, Access access) {
  constexpr const char* kAsked = "register memory for a connection";
  return base::no_throw(kAsked, [&]() -> Result<MemoryRegion> {
    const auto a = locate_for(slot_, index_, generation_, access, kAsked);
    if (!a) return tl::unexpected(a.error());
    auto registered = slot_->core->context.registrations->register_memory(
        bytes, access, agent::registrations_of(**a));
    if (!registered) return tl::unexpected(registered.error());
    return detail::make<MemoryRegion>(std::move(registered->whole), registered->remote);
  });
}

}  // namespace spinwire
