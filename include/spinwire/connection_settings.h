// Settings that one connection uses instead of its engine's.
#pragma once

#include <cstdint>
#include <optional>

#include "spinwire/buffer.h"
#include "spinwire/config.h"
#include "spinwire/raw.h"

namespace spinwire {

/// Attributes of a connection's queue pair. An empty member takes the engine's setting. Each member
/// has the meaning, unit and range of its namesake under `queues`, `connections`, `queue_pair` or
/// `device`. All are checked together, against these ranges and the device.
struct ConnectionSettings {
  // Sizes.
  std::optional<std::uint32_t> send_depth;  ///< send work requests; 16 … 32768
  /// Receive depth: most receives reserved for the peer, so most messages that it has under way. No
  /// more than queues.receive_depth; without a shared receive queue, or with own_domain, no more
  /// than the connection's own receives. A raw connection has RawSettings::receive_depth instead.
  std::optional<std::uint32_t> credits;
  std::optional<std::uint32_t> inline_bytes;  ///< 0 … 1024
  /// Parts of a gathered send or write; 1 … 64, and less than DeviceInfo::max_sge. A raw connection
  /// has RawSettings::max_send_sge.
  std::optional<std::uint32_t> max_send_sge;
  std::optional<std::uint32_t> mtu;  ///< 256, 512, 1024, 2048 or 4096 bytes; the smaller end's
  std::optional<std::uint32_t> initiator_depth;  ///< our READs and atomics at once; 1 … 128
  std::optional<std::uint32_t> responder_depth;  ///< the peer's; 1 … 128
  // Retries. "IB specification" is the InfiniBand Architecture Specification, Volume 1.
  /// 4.096 us * 2^n, the Local ACK Timeout of the IB specification (9.7.6.1.3). 1 … 31
  std::optional<std::uint32_t> ack_timeout;
  std::optional<std::uint32_t> retry_count;  ///< 0 … 7
  std::optional<std::uint32_t> rnr_retry;    ///< 0 … 7; 7: retry without end
  /// In the encoding of the IB specification (9.7.5.2.8, table 45). 1 … 31
  std::optional<std::uint32_t> min_rnr_timer;
  std::optional<std::uint32_t> psn;  ///< first packet sequence number, 24 bits; else random
  // The path. rdma_cm finds the path itself; there, only values other than the defaults apply.
  std::optional<std::uint32_t> service_level;  ///< 0 … 15
  std::optional<std::uint32_t> traffic_class;  ///< 0 … 255
  std::optional<std::uint32_t> flow_label;     ///< 20 bits
  std::optional<std::uint32_t> hop_limit;      ///< 1 … 255
  std::optional<std::uint32_t> src_path_bits;  ///< 0 … 127
  std::optional<std::uint32_t> static_rate;    ///< as in enum ibv_rate; 0, 2 … 24
  // The place. Not with rdma_cm, which finds the place by the addresses.
  std::optional<std::uint32_t> port;        ///< of the engine's device; 1 … 255
  std::optional<std::uint32_t> gid_index;   ///< in the port's table; 0 … 255
  std::optional<std::uint32_t> pkey_index;  ///< in the port's table; 0 … 65535
  /// The peer's rights through this connection. Without remote_read the queue pair refuses all
  /// READs, without remote_atomic all atomics. The queue pair always allows WRITEs, because the
  /// peer writes credit to a cell of 8 bytes. Without remote_write, Connection::expose() makes no
  /// key for WRITEs.
  std::optional<Access> access;
  /// Limits on leases, instead of the engine's `leases`. `access` bounds the peer's rights.
  std::optional<LeaseLimits> leases;
  /// Gives the connection a protection domain of its own. Remote keys made elsewhere do not open
  /// memory to its peer, and its own do not open memory to peers of other connections: the device
  /// answers remote_access. The peer need not know.
  ///
  ///   - Buffers of the engine's pools work as usual. The pools are registered again, which counts
  ///     towards the limit on locked memory if the device pins memory.
  ///   - Open memory with Connection::expose(), and register your own with
  ///     Connection::register_memory(). Operations answer invalid_argument for memory that was
  ///     registered elsewhere; memory registered here ends other connections (local_error).
  ///   - The remote keys end with the connection, even if it reconnects.
  ///   - The connection has its own receives, and operations take some more instructions.
  ///
  /// If connections.own_domains are in use, or the device has no more, the connection ends with
  /// `limit`.
  bool own_domain = false;
  /// Makes a raw connection; see raw.h. The peer may write only if `access` says so.
  std::optional<RawSettings> raw;
};

}  // namespace spinwire
