// Local paths of a client's connections and sessions: ports and GIDs of the engine's device. Cold.
#pragma once

#include <vector>

#include "config/connection_attributes.h"
#include "spinwire/connection_settings.h"
#include "spinwire/reconnect.h"

namespace spinwire::config {

/// Checks that the ports exist, and the entries of their tables of GIDs and of partition keys.
/// Their links may be down. Errors: no_device, limit (a port has no such partition key), system.
[[nodiscard]] Result<void> check_local_paths(verbs::Device& device,
                                             const std::vector<LocalPath>& paths,
                                             std::uint16_t pkey_index);
/// Checks that a connection with these settings may have these local paths. Errors:
/// invalid_argument, and those of check_local_paths().
[[nodiscard]] Result<void> check_local_paths(verbs::Device& device,
                                             const std::vector<LocalPath>& paths,
                                             const ConnectionSettings& settings, bool through_cm,
                                             std::uint16_t pkey_index);
/// Whether the path is the engine's own port and GID, by which datagrams leave.
[[nodiscard]] bool is_engines_own(const verbs::Device& device, const LocalPath& path) noexcept;
/// The engine's own port and GID.
[[nodiscard]] LocalPath engines_own(const verbs::Device& device) noexcept;
/// Gives a queue pair the path's port and GID, as they are now. The path has been checked. Errors:
/// system (the link is down, or the port has no such GID now), limit (the port has no such
/// partition key any more).
[[nodiscard]] Result<void> use_local_path(verbs::QueuePairOptions& to, verbs::Device& device,
                                          const LocalPath& path);

}  // namespace spinwire::config
