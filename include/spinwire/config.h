// Every setting of an engine. Defaults < TOML file < SPINWIRE_* environment < code.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "spinwire/buffer.h"
#include "spinwire/clock.h"
#include "spinwire/export.h"
#include "spinwire/status.h"

namespace spinwire {

enum class HugepagePolicy : std::uint8_t { require, prefer, off };
enum class LockPolicy : std::uint8_t { require, prefer, off };
enum class SharedReceives : std::uint8_t { automatic, off };
enum class ControlMode : std::uint8_t { automatic, manual };
enum class RpcCarrier : std::uint8_t { automatic, datagrams, connections };
enum class RpcDatagrams : std::uint8_t { direct, verbs };

/// What peers may have of our memory through one connection, and we of theirs.
struct LeaseLimits {
  std::uint32_t count = 64;               ///< leases at once, each way; 0 … 65536
  std::uint64_t bytes = 16u << 20;        ///< of one that a peer asks for; 0 … 1 GiB
  std::uint64_t total_bytes = 64u << 20;  ///< of all that a peer asked for; 0 … 1 TiB
  std::uint32_t alignment = 4096;         ///< that a peer may ask for; 1 … 2 MiB, power of two
  Nanoseconds longest = std::chrono::minutes(10);  ///< time of one; 1ms … 1h
};

/// Each member's comment says its unit and range; `section.key` in a file is `section.key` here,
/// and SPINWIRE_SECTION_KEY (upper case) in the environment.
struct Config {
  struct Device {
    /// Device to open: a name, "provider:name", or "auto" for the best that is no embedded one
    std::string name = "softverbs";
    std::uint32_t port = 0;       ///< 0: chosen by the library; else 1 … 255
    std::int32_t gid_index = -1;  ///< -1: chosen by the library; else 0 … 255
    std::string address;          ///< of this host, whose GID is wanted; empty: no matter
  } device;

  struct Memory {
    HugepagePolicy hugepages = HugepagePolicy::prefer;
    LockPolicy lock = LockPolicy::off;        ///< mlock the slabs
    std::uint64_t send_bytes = 32u << 20;     ///< send pool; 2 MiB … 1 TiB
    std::uint64_t receive_bytes = 16u << 20;  ///< receive pool; 2 MiB … 1 TiB
    std::uint64_t lease_bytes = 16u << 20;    ///< pool of memory exposed to peers; 2 MiB … 1 TiB
    std::uint64_t large_bytes = 66u << 20;    ///< pool that large messages arrive in; 0 … 1 TiB
    /// Memory windows: as many large messages can be on the way from here, and blocks leased to
    /// peers, at once. Without them, and on devices without, each costs a registration. 0 … 65536
    std::uint32_t windows = 256;
  } memory;

  struct Queues {
    std::uint32_t send_depth = 128;      ///< send work requests per connection; 16 … 32768
    std::uint32_t receive_depth = 1024;  ///< posted receives of the engine; 16 … 32768
    /// automatic: all connections receive from one queue where the device has such; else each has
    /// receive_depth / connections.maximum of its own, 8 at least, so that fewer may fit
    SharedReceives shared_receives = SharedReceives::automatic;
    std::uint32_t completion_depth = 16384;  ///< entries of the completion queue; 64 … 4194304
    std::uint32_t operations = 4096;      ///< operations in flight, all connections; 16 … 1048576
    std::uint32_t inline_bytes = 64;      ///< sent inline up to this many bytes; 0 … 1024
    std::uint32_t receive_postlist = 16;  ///< receives reposted at once; 1 … 64
    std::uint32_t poll_batch = 32;        ///< completions drained at once; 1 … 64
  } queues;

  struct Connections {
    std::uint32_t maximum = 1024;  ///< per engine; 1 … 65536
    /// Of these, connections with ConnectionSettings::own_domain at a time; 0 … 65536. Where
    /// connections share receives, `credits` + queues.receive_postlist more are kept for each.
    std::uint32_t own_domains = 0;
    std::uint32_t handshakes =
        64;  ///< unfinished handshakes at once, inbound and outbound each; 1 … 4096
    /// Longer messages than this are exposed, and pulled by the receiver; 64 … 1 MiB - 64.
    std::uint32_t eager_bytes = 4096;
    std::uint32_t message_bytes = 64u << 20;  ///< longest message; eager_bytes … 1 GiB
    /// A large message waits this long for a block to arrive in, then its sender is refused.
    Nanoseconds large_timeout = std::chrono::seconds(1);  ///< 1ms … 1h
    std::uint32_t credits = 64;  ///< most receives granted to one peer; 1 … 32768
    std::uint32_t mtu = 4096;    ///< path MTU: 256, 512, 1024, 2048 or 4096 bytes
    Nanoseconds connect_timeout = std::chrono::seconds(5);    ///< until `ready`; 1ms … 1h
    Nanoseconds handshake_timeout = std::chrono::seconds(2);  ///< inbound, until complete; 1ms … 1h
    Nanoseconds close_timeout = std::chrono::seconds(1);      ///< until drained; 1ms … 1h
    Nanoseconds keepalive = std::chrono::seconds(1);  ///< probe after this much silence; 1ms … 1h
    Nanoseconds peer_timeout = std::chrono::seconds(10);  ///< unanswered until lost; 1ms … 1h
    Nanoseconds credit_idle = std::chrono::seconds(1);  ///< idle credits go back after; 1ms … 1h
  } connections;

  /// For each connection, which may have others; see ConnectionSettings::leases.
  struct Leases : LeaseLimits {
    std::uint32_t maximum = 1024;  ///< of the engine at once, each way; 0 … 32768
    /// Operations on a peer's memory are not started any more this long before its time is over:
    /// longer than an operation takes from there to the peer. 1us … 1s
    Nanoseconds guard = std::chrono::milliseconds(1);
  } leases;

  struct QueuePair {
    std::uint32_t ack_timeout = 14;    ///< 4.096 us * 2^n (IB specification, 9.7.6.1.3); 1 … 31
    std::uint32_t retry_count = 7;     ///< 0 … 7
    std::uint32_t rnr_retry = 7;       ///< 0 … 7; 7 retries for ever
    std::uint32_t min_rnr_timer = 12;  ///< IB encoding, 12 = 0.64 ms; 1 … 31 (0 means 655 ms)
    std::uint32_t rd_atomic = 128;     ///< READs and atomics at once, or what there is; 1 … 128
    std::uint32_t service_level = 0;   ///< 0 … 15
    std::uint32_t traffic_class = 0;   ///< of the GRH; on RoCEv2 DSCP and ECN; 0 … 255
    std::uint32_t flow_label = 0;      ///< of the GRH; on RoCEv2 picks the UDP source port; 20 bits
    std::uint32_t hop_limit = 255;     ///< of the GRH, TTL on RoCEv2; 1 … 255
    std::uint32_t pkey_index = 0;      ///< in the port's table of partition keys; 0 … 65535
    std::uint32_t src_path_bits = 0;   ///< added to the port's LID (InfiniBand, LMC); 0 … 127
    std::uint32_t static_rate = 0;     ///< IB encoding of a rate; 0: the port's own; 0, 2 … 24
    std::int32_t psn = -1;             ///< first packet's number, 24 bits; -1: random, as it should
    /// The most that peers may do with memory: bounds every key that the engine makes for them.
    /// The right to atomics is void where the device has none
    Access access = Access::remote_all;
  } queue_pair;

  /// Remote calls; see rpc.h. Nothing is taken for them before the first method or session.
  struct Rpc {
    /// What calls go over. automatic: short ones over datagrams where the device has them; without,
    /// and with a peer that has none, each session has a connection, of `connections.maximum`, for
    /// all of its calls. datagrams: as automatic, but it is an error if the device has none.
    /// connections: all calls over connections, and nothing is taken for datagrams
    RpcCarrier carrier = RpcCarrier::automatic;
    /// direct: short datagrams go without work requests, and are read where the device has them,
    /// where it has a way for that (the embedded one does). verbs: by work requests on every device
    RpcDatagrams datagrams = RpcDatagrams::direct;
    std::uint32_t sessions = 1024;  ///< of the engine, opened and served each; 1 … 1048575
    std::uint32_t window = 8;       ///< calls of a session at once; a power of two, 1 … 64
    std::uint32_t backlog = 16;     ///< further ones that wait here, per session; 1 … 4096
    /// Datagrams being sent by work requests; a power of two, 64 … 32768
    std::uint32_t send_depth = 256;
    std::uint32_t receive_depth = 1024;  ///< datagrams that can arrive at once; 64 … 32768
    /// A request is sent again when it was not answered for as long as replies take here, or this
    /// if that is longer. 10us … 10s
    Nanoseconds least_timeout = std::chrono::milliseconds(2);
    Nanoseconds call_timeout = std::chrono::seconds(5);  ///< of calls without a deadline; 1us … 1h
    /// Congestion control: a session has fewer calls under way while replies take longer than this,
    /// or than twice the shortest round trip that was seen if that is more, not counting the time
    /// that the server had the request. 0: none; to 1s
    Nanoseconds target_delay = std::chrono::microseconds(50);
  } rpc;

  struct Engine {
    ControlMode control = ControlMode::automatic;  ///< manual: only poll_control() takes the step
    Nanoseconds control_interval = std::chrono::microseconds(100);  ///< between steps; 1us … 1s
  } engine;

  /// Defaults, then `file` if not empty, then the environment. Set-up; any thread. Errors:
  /// bad_config naming file, line, key, the nearest known key, and the range.
  SPINWIRE_API static Result<Config> load(const std::filesystem::path& file = {});
  /// As load(), from text; `origin` names it in errors.
  SPINWIRE_API static Result<Config> parse(std::string_view toml, std::string_view origin);
  /// Checks every range and the relations between settings. Engine::open calls it.
  [[nodiscard]] SPINWIRE_API Result<void> check() const;
  /// One line per setting as TOML, with its range as a comment.
  [[nodiscard]] SPINWIRE_API std::string to_toml() const;
};

}  // namespace spinwire
