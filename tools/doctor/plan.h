// From what an application needs to the settings of its engine, and from settings to what they take
// and allow.
#pragma once

#include <cstdint>
#include <string>

#include "spinwire/config.h"
#include "spinwire/footprint.h"
#include "spinwire/status.h"

namespace spinwire::doctor {

/// What an application needs of one engine.
struct Demand {
  std::uint32_t connections = 16;
  std::uint32_t outstanding = 16;  ///< messages of a peer on their way, each connection
  std::uint64_t message_bytes = 4096;
  std::uint32_t long_messages = 4;  ///< of the greatest length that arrive at once
  std::uint32_t sessions = 0;
  std::uint32_t window = 8;  ///< calls of a session at once
  /// At once, each way. Their records take little, so that a plan without leases forbids none.
  std::uint32_t leases = Config{}.leases.maximum;
  std::uint64_t lease_bytes = 0;  ///< of all memory that is exposed or leased to peers
};

/// The settings that the demand needs. Errors: bad_config (a range of the library is exceeded).
[[nodiscard]] Result<Config> plan(const Demand& demand);

/// Bytes that an adapter pins: the pools, and about 64 for each entry of a queue.
[[nodiscard]] std::uint64_t pinned_bytes(const Config& config, const Footprint& sizes) noexcept;

/// What the settings take and allow; each line begins with `prefix`.
[[nodiscard]] std::string footprint_text(const Config& config, std::string_view prefix);
[[nodiscard]] std::string footprint_json(const Config& config);
/// The settings that differ from the defaults, as TOML.
[[nodiscard]] std::string changed_settings(const Config& config);

}  // namespace spinwire::doctor
