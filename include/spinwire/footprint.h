// What an engine takes from the machine, and what its settings allow, before it is opened.
#pragma once

#include <cstdint>

#include "spinwire/config.h"
#include "spinwire/export.h"

namespace spinwire {

/// Sizes that follow from a Config. Excludes the library's records, which are ordinary memory, and
/// what the device takes for itself.
struct Footprint {
  // The pools. They are one mapping, which is registered with the device. Bytes, in chunks of 2
  // MiB.
  std::uint64_t send_bytes = 0;        ///< memory.send_bytes, in whole chunks
  std::uint64_t receive_bytes = 0;     ///< memory.receive_bytes, in whole chunks
  std::uint64_t lease_bytes = 0;       ///< memory.lease_bytes, in whole chunks
  std::uint64_t rendezvous_bytes = 0;  ///< memory.rendezvous_bytes, in whole chunks
  /// Credit cells and room for headers. No setting names this pool.
  std::uint64_t control_bytes = 0;
  /// All pools. An adapter pins so many bytes (RLIMIT_MEMLOCK); hugepages must hold them.
  std::uint64_t pool_bytes = 0;

  // Queues. Entries.
  std::uint64_t completion_entries = 0;  ///< least queues.completion_depth, without calls
  std::uint64_t completion_entries_with_calls = 0;  ///< least, if remote calls use datagrams
  std::uint64_t receive_entries = 0;                ///< receives of all connections
  std::uint32_t send_entries = 0;                   ///< of each connection's send queue

  // What the pools are used for. Bytes.
  std::uint64_t receive_bytes_needed = 0;             ///< least memory.receive_bytes, without calls
  std::uint64_t receive_bytes_needed_with_calls = 0;  ///< least, if remote calls use datagrams
  /// Receives of a connection that has all of connections.credits, and its credit cell.
  std::uint64_t connection_bytes = 0;
  /// Memory that the longest message arrives in; 0: no message is a rendezvous message.
  std::uint64_t longest_message_bytes = 0;

  // What is possible at the same time.
  std::uint32_t connections = 0;                   ///< that can be open
  std::uint32_t connections_with_all_credits = 0;  ///< that can have all of connections.credits
  std::uint32_t sessions_with_whole_window = 0;    ///< of those that the engine serves
  std::uint64_t longest_messages = 0;              ///< that arrive; 0 without rendezvous messages
};

/// Computes the sizes for settings that Config::check() accepts. Assumes that the device can do
/// what the settings ask for. Set-up; any thread; never allocates.
[[nodiscard]] SPINWIRE_API Footprint footprint(const Config& config) noexcept;

}  // namespace spinwire
