// Memory that the application opens to the peer of one connection. Cold.
#include "agent/agent.h"
#include "agent/lease_table.h"
#include "base/error.h"
#include "base/internals.h"

namespace spinwire::agent {
namespace {

/// Checks that the peer may be given `access` to memory. Errors: unsupported, not_connected.
Result<void> check_rights(const EngineContext& ctx, const Agent& a, Access access,
                          const char* asked) {
  if (auto good =
          config::check_access(a.attributes.access, access, ctx.device->info(), "the connection");
      !good)
    return good;
  if (!a.attributes.own_domain || a.domain != nullptr) return {};
  return base::fail(Status::not_connected, asked, "its own protection domain is not there yet",
                    "wait for on_ready, or on_endpoint");
}

}  // namespace

Result<void> check_owner(const EngineContext& ctx, const BufferSlice& slice) {
  if (!slice || ctx.owns(*detail::block_of(slice))) return {};
  return base::fail(Status::invalid_argument, "expose memory", "it is memory of another engine",
                    "expose it with the engine that it was allocated from");
}

Result<RemoteRegion> expose(EngineContext& ctx, Agent& a, const BufferSlice& slice, Access access,
                            MemoryFlags flags) {
  return check_rights(ctx, a, access, "expose memory to a peer")
      .and_then([&] { return check_owner(ctx, slice); })
      .and_then([&] {
        return memory::check_memory_flags(flags, ctx.device->info(), slice.bytes(), true);
      })
      .and_then([&](MemoryFlags usable) {
        return ctx.registrations->expose(slice, access, registrations_of(a),
                                         memory::RegistrationTable::kApplication, usable);
      });
}

Result<RemoteRegion> expose_to_peer(EngineContext& ctx, Agent& a, const BufferSlice& slice,
                                    Access access) {
  constexpr const char* kOpenMemory = "expose memory to one peer";
  const auto good =
      check_rights(ctx, a, access, kOpenMemory).and_then([&] { return check_owner(ctx, slice); });
  if (!good) return tl::unexpected(good.error());
  if (!slice || slice.size() == 0) {
    return base::fail(Status::invalid_argument, kOpenMemory, "there are no bytes",
                      "give at least one byte");
  }
  if (access == Access::local || !allows(Access::remote_all, access)) {
    return base::fail(Status::invalid_argument, kOpenMemory, "no remote access rights",
                      "give Access::remote_read, remote_write, remote_atomic or several");
  }
  if (a.state != ConnectionState::ready) {
    return base::fail(Status::not_connected, kOpenMemory, "the connection is not ready",
                      "wait for on_ready");
  }
  auto opened = open_key(ctx, a, slice, access);
  if (opened || opened.error().status != Status::would_block) return opened;
  return base::fail(Status::would_block, kOpenMemory, "records or work requests are used up",
                    "try again after poll(), or raise leases.maximum");
}

Result<memory::RegisteredMemory> register_memory(EngineContext& ctx, Agent& a,
                                                 std::span<std::byte> bytes, Access access,
                                                 MemoryFlags flags) {
  return check_rights(ctx, a, access, "register memory for a connection")
      .and_then([&] { return memory::check_memory_flags(flags, ctx.device->info(), bytes, false); })
      .and_then([&](MemoryFlags usable) {
        return ctx.registrations->register_memory(bytes, access, registrations_of(a), usable);
      });
}

std::uint32_t qp_bound_to(const Agent& a, std::uint32_t rkey) noexcept {
  return a.domain != nullptr || is_window_key(a, rkey) ? a.qp->qp_num : 0;
}

void set_handlers(Agent& a, const ConnectionHandlers& handlers, bool polling) noexcept {
  // A callback that is running keeps its captures until it returns.
  if (polling) {
    a.next_handlers = handlers;
  } else {
    use_handlers(a, handlers);
  }
  a.slow_path = static_cast<std::uint8_t>(polling ? a.slow_path | kHandlersReplaced
                                                  : a.slow_path & ~kHandlersReplaced);
}

}  // namespace spinwire::agent
