// What one connection has otherwise than its engine's settings say.
#pragma once

#include <cstdint>
#include <optional>

#include "spinwire/buffer.h"
#include "spinwire/config.h"

namespace spinwire {

/// Attributes of a connection's queue pair. What is not given is as the engine's settings have it:
/// each member means what the key of the same name under `queues`, `connections`, `queue_pair` or
/// `device` means, and has the same unit and range. All are checked when given, against these
/// ranges and against what the device has.
///
/// Settings of other libraries that mean nothing here: elements of a work request (a message has
/// two, its header and its payload; others have one), the depth and elements of the receive queue
/// (receives are the engine's, shared by its connections), and primary against alternate path.
struct ConnectionSettings {
  // Sizes.
  std::optional<std::uint32_t> send_depth;    ///< send work requests; 16 … 32768
  std::optional<std::uint32_t> inline_bytes;  ///< sent inline up to this many bytes; 0 … 1024
  std::optional<std::uint32_t> mtu;           ///< 256, 512, 1024, 2048 or 4096 bytes; least wins
  std::optional<std::uint32_t> rd_atomic;     ///< READs and atomics at once, each way; 1 … 128
  // Retries.
  std::optional<std::uint32_t> ack_timeout;    ///< 4.096 us * 2^n; 1 … 31
  std::optional<std::uint32_t> retry_count;    ///< 0 … 7
  std::optional<std::uint32_t> rnr_retry;      ///< 0 … 7; 7 retries for ever
  std::optional<std::uint32_t> min_rnr_timer;  ///< IB encoding; 1 … 31
  std::optional<std::uint32_t> psn;            ///< first one sent, else random; 24 bits
  // The path. Through rdma_cm, which knows it, a value other than the default counts.
  std::optional<std::uint32_t> service_level;  ///< 0 … 15
  std::optional<std::uint32_t> traffic_class;  ///< 0 … 255
  std::optional<std::uint32_t> flow_label;     ///< 20 bits
  std::optional<std::uint32_t> hop_limit;      ///< 1 … 255
  std::optional<std::uint32_t> src_path_bits;  ///< 0 … 127
  std::optional<std::uint32_t> static_rate;    ///< IB encoding; 0, 2 … 24
  // The place. Not through rdma_cm, which finds it by the addresses.
  std::optional<std::uint32_t> port;        ///< of the engine's device; 1 … 255
  std::optional<std::uint32_t> gid_index;   ///< in the port's table; 0 … 255
  std::optional<std::uint32_t> pkey_index;  ///< in the port's table; 0 … 65535
  /// What the peer may do with memory through this connection. Without remote_read the queue pair
  /// refuses READs, whatever key they name; so for remote_atomic and atomics. The right to write it
  /// must have, since the peer tells credit by WRITEs to a cell of 8 bytes; without remote_write,
  /// Connection::expose() makes no key that a WRITE could use.
  std::optional<Access> access;
  /// What the peer may have of our memory, and we of its, in the place of the keys under `leases`.
  /// Its rights are bounded by `access`.
  std::optional<LeaseLimits> leases;
  /// A protection domain of the connection's own, for its queue pair and all memory that goes
  /// through it; without, it is in the engine's. No key made elsewhere opens memory to its peer,
  /// and none of its own to a peer of another connection: the device answers remote_access. Either
  /// end may have one, unknown to the other.
  ///
  ///   - Buffers of the engine's pools are usable as ever: the pools are registered there once
  ///     more, which counts again towards the limit on locked memory where the device pins it.
  ///   - What its peer shall reach is opened with Connection::expose(), not Engine::expose();
  ///   memory
  ///     of the application's own is registered with Connection::register_memory(). Operations
  ///     answer invalid_argument to what was registered elsewhere; what was registered here ends
  ///     other connections (local_error).
  ///   - The keys end with the connection, also when it is going to be made again.
  ///   - Its receives are its own, as many as its peer's credit needs; an operation takes some
  ///     instructions more.
  ///
  /// Not more at a time than connections.own_domains, and than the device has: else the connection
  /// ends with `limit`.
  bool own_domain = false;
};

}  // namespace spinwire
