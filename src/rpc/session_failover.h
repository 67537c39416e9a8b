// Sessions over local paths: SessionOptions::local_paths. Cold.
//
// The engine's datagram queue pair belongs to one port, so a session through any other port, or
// another GID, asks its server for a session without datagrams, and its connection takes the path.
#pragma once

#include <cstdint>
#include <vector>

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Checks SessionOptions::local_paths. Errors: no_device, system; unsupported (only datagrams are
/// allowed, and they do not go through a path).
Result<void> check_local_paths(const agent::EngineContext& ctx,
                               const std::vector<LocalPath>& paths);
/// Prepares the present attempt's local path. Errors: those of config::use_local_path().
Result<void> use_local_path(const agent::EngineContext& ctx, ClientSession& c);
/// Whether all calls of the present attempt use a connection through a path that is not the
/// engine's own.
inline bool has_own_place(const ClientSession& c) noexcept {
  return c.reconnect != nullptr && c.reconnect->place.has_value();
}
[[nodiscard]] LocalPath local_path_of(const Rpc& r, const ClientSession& c) noexcept;

}  // namespace spinwire::rpc
