// Every setting of an engine. Later sources win: defaults, TOML file, SPINWIRE_* environment, code.
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

/// Whether the pools lie in hugepages: they must, they should, or they do not.
enum class HugepagePolicy : std::uint8_t {
  require,  ///< in hugepages, or Engine::open() fails
  prefer,   ///< in hugepages if the host has enough, else in ordinary pages; the log says so
  off,      ///< in ordinary pages
};
/// Whether the pools are locked in memory: they must be, they should be, or they are not.
enum class LockPolicy : std::uint8_t {
  require,  ///< locked by mlock(2), or Engine::open() fails
  prefer,   ///< locked if the process's limits allow it; the log says if not
  off,      ///< not locked; the device still pins what it needs
};
/// Whether connections share one receive queue, if the device can.
enum class SharedReceiveQueue : std::uint8_t {
  automatic,  ///< one receive queue for all connections if the device supports that
  off,        ///< a receive queue for each connection
};
/// Whether poll() takes control steps, or the application by poll_control().
enum class ControlMode : std::uint8_t {
  automatic,  ///< poll() takes a control step every engine.control_interval
  manual,     ///< only Engine::poll_control() takes control steps
};
/// How calls travel.
enum class RpcTransport : std::uint8_t {
  automatic,   ///< inline calls by datagram if both devices have datagrams, else by connection
  datagram,    ///< like automatic, but a device without datagrams is an error
  connection,  ///< all calls over connections
};
/// Whether short payloads are sent without work requests, if the device can.
enum class DirectPath : std::uint8_t {
  automatic,  ///< without work requests, where the device can do that
  off,        ///< always by work requests
};

/// Limits on the leases of one connection.
struct LeaseLimits {
  std::uint32_t count = 64;               ///< leases at once, each way; 0 … 65536
  std::uint64_t max_bytes = 16u << 20;    ///< of one lease that a peer requests; 0 … 1 GiB
  std::uint64_t total_bytes = 64u << 20;  ///< of all leases that a peer requested; 0 … 1 TiB
  std::uint32_t max_alignment = 4096;     ///< that a peer may request; 1 … 2 MiB, power of two
  Nanoseconds max_duration = std::chrono::minutes(10);  ///< of one lease; 1ms … 1h
};

/// Each member's comment gives its unit and range. `section.key` in a file is `section.key` here,
/// and SPINWIRE_SECTION_KEY (upper case) in the environment.
struct Config {
  /// The device, port and GID to open.
  struct Device {
    /// Device to open: a name, "provider:name", or "auto" for the best device besides softverbs.
    std::string name = "softverbs";
    std::uint32_t port = 0;       ///< 1 … 255; 0: the library chooses
    std::int32_t gid_index = -1;  ///< 0 … 255; -1: the library chooses
    std::string address;          ///< IP address of this host that selects the GID; empty: any
  } device;

  /// Sizes of the pools, and how they are placed.
  struct Memory {
    HugepagePolicy hugepages = HugepagePolicy::prefer;  ///< whether the pools lie in hugepages
    LockPolicy lock = LockPolicy::off;                  ///< mlock the pools
    std::uint64_t send_bytes = 32u << 20;               ///< send pool; 2 MiB … 1 TiB
    std::uint64_t receive_bytes = 16u << 20;            ///< receive pool; 2 MiB … 1 TiB
    std::uint64_t lease_bytes = 16u << 20;  ///< pool of memory exposed to peers; 2 MiB … 1 TiB
    /// Receives rendezvous messages, long calls, and datagrams of more than 4 KiB; 0 … 1 TiB
    std::uint64_t rendezvous_bytes = 66u << 20;
    /// Memory windows. A lease uses one, and so does a rendezvous message without direct_messages.
    /// Without a free window, it needs a registration. 0 … 65536
    std::uint32_t windows = 256;
  } memory;

  /// Depths of queues, and sizes of batches.
  struct Queues {
    std::uint32_t send_depth = 128;      ///< send work requests per connection; 16 … 32768
    std::uint32_t receive_depth = 1024;  ///< posted receives of the engine; 16 … 32768
    /// automatic: all connections share one receive queue if the device supports that. Otherwise,
    /// and with off, each connection has receive_depth / connections.maximum receives of its own,
    /// at least 8, so fewer connections may fit.
    SharedReceiveQueue shared_receive_queue = SharedReceiveQueue::automatic;
    std::uint32_t completion_depth = 16384;  ///< entries of the completion queue; 64 … 4194304
    std::uint32_t operations = 4096;  ///< operations in flight, all connections; 16 … 1048576
    /// Writes of up to this length go inline. Messages do, too, with their header of 8 bytes.
    /// 0 … 1024
    std::uint32_t inline_bytes = 64;
    /// Parts of a gathered send or write; 1 … 64. A message's header is one element more. Limited
    /// by the device, see DeviceInfo::max_sge.
    std::uint32_t max_send_sge = 4;
    std::uint32_t receive_postlist = 16;  ///< receives reposted at once; 1 … 64
    std::uint32_t poll_batch = 32;        ///< completions drained at once; 1 … 64
  } queues;

  /// Limits, time-outs and credit of connections.
  struct Connections {
    std::uint32_t maximum = 1024;  ///< per engine; 1 … 65536
    /// Accepted connections of one peer host, or on softverbs of one process, so that it cannot
    /// keep others out; 0: three quarters of `maximum`. Up to three quarters, a host also gets one
    /// more only while it holds less than three times what is free, in `maximum` and in
    /// queues.receive_depth. So one host alone gets three quarters, and two get three sevenths
    /// each. At most 65536
    std::uint32_t maximum_per_source = 0;
    /// How many of them may have ConnectionSettings::own_domain at a time. With a shared receive
    /// queue, each adds `credits` + queues.receive_postlist receives. 0 … 65536
    std::uint32_t own_domains = 0;
    /// Unfinished handshakes at once, inbound and outbound each; 1 … 4096. Inbound connections
    /// among them hold at most a quarter of `maximum`; further ones wait.
    std::uint32_t handshakes = 64;
    /// A longer message is a rendezvous message: the receiver READs it. The smaller one of both
    /// ends' values counts, wherever these headers name connections.eager_bytes. 256 … 1 MiB - 64
    std::uint32_t eager_bytes = 4096;
    std::uint32_t max_message_bytes = 64u << 20;  ///< longest message; eager_bytes … 1 GiB
    /// How long a rendezvous message waits for a block of our pool before we refuse it. The sender
    /// does not know this time, only its own (see peer_timeout): set both alike. 1ms … 1h
    Nanoseconds rendezvous_timeout = std::chrono::seconds(1);
    /// automatic: short messages go without work requests, and are read where they arrive, where
    /// the device can do that, as softverbs can; credit is stored, too. off: all go by work
    /// requests.
    DirectPath direct_messages = DirectPath::automatic;
    std::uint32_t credits = 64;  ///< most receives reserved for one peer; 1 … 32768
    std::uint32_t mtu = 4096;    ///< path MTU: 256, 512, 1024, 2048 or 4096 bytes
    Nanoseconds connect_timeout = std::chrono::seconds(5);    ///< outbound, until ready; 1ms … 1h
    Nanoseconds handshake_timeout = std::chrono::seconds(2);  ///< inbound, until complete; 1ms … 1h
    Nanoseconds close_timeout = std::chrono::seconds(1);      ///< until drained; 1ms … 1h
    /// Between keepalives. A connection takes at most a quarter of its peer's peer_timeout; a
    /// session does not know that of its server. 1ms … 1h
    Nanoseconds keepalive_interval = std::chrono::seconds(1);
    /// A peer that is silent for this long is lost. A peer that polls is lost, too, if for so long
    ///   - it grants no credit for control messages, or for replies to its calls,
    ///   - it lets no operation complete, or
    ///   - it answers no offer of a rendezvous message that is the reply to a call, or while half
    ///     of our windows or records of such messages is in use. An offer also has our
    ///     rendezvous_timeout, even if the peer's is longer.
    /// For each MB under way, it has a second more. 25ms … 1h
    Nanoseconds peer_timeout = std::chrono::seconds(10);
    /// Unused credit returns to the engine after this time; 1ms … 1h
    Nanoseconds credit_idle_timeout = std::chrono::seconds(1);
  } connections;

  /// Defaults for each connection; ConnectionSettings::leases overrides them.
  struct Leases : LeaseLimits {
    std::uint32_t maximum = 1024;  ///< of the engine at once, each way; 0 … 32768
    /// No operation on leased memory starts within this time of the lease's end. Set it longer than
    /// an operation takes to reach the peer. 1us … 1s
    Nanoseconds guard = std::chrono::milliseconds(1);
  } leases;

  /// Attributes of queue pairs. "IB specification" is the InfiniBand Architecture Specification,
  /// Volume 1.
  struct QueuePair {
    /// How long the device waits for an acknowledgement before it sends again: 4.096 us * 2^n, the
    /// Local ACK Timeout of the IB specification (9.7.6.1.3). 1 … 31
    std::uint32_t ack_timeout = 14;
    std::uint32_t retry_count = 7;  ///< 0 … 7
    std::uint32_t rnr_retry = 7;    ///< 0 … 7; 7: retry without end
    /// Least time before the peer repeats a message for which there was no receive, in the encoding
    /// of the IB specification (9.7.5.2.8, table 45): 12 = 0.64 ms. 1 … 31; its 0 means 655 ms
    std::uint32_t min_rnr_timer = 12;
    /// READs and atomics that a connection has under way at once, limited by the device and the
    /// peer's responder_depth. 1 … 128
    std::uint32_t initiator_depth = 128;
    /// READs and atomics that the peer may have under way at once, limited by the device. 1 … 128
    std::uint32_t responder_depth = 128;
    std::uint32_t service_level = 0;  ///< 0 … 15
    std::uint32_t traffic_class = 0;  ///< of the GRH; DSCP and ECN on RoCEv2; 0 … 255
    std::uint32_t flow_label = 0;     ///< of the GRH; picks the UDP source port on RoCEv2; 20 bits
    std::uint32_t hop_limit = 255;    ///< of the GRH, TTL on RoCEv2; 1 … 255
    std::uint32_t pkey_index = 0;     ///< in the port's table of partition keys; 0 … 65535
    std::uint32_t src_path_bits = 0;  ///< added to the port's LID (InfiniBand, LMC); 0 … 127
    /// The IB specification's encoding of a path's rate, as in enum ibv_rate: 2 = 2.5 Gb/s, 3 = 10
    /// Gb/s. 0: the port's own; 0, 2 … 24
    std::uint32_t static_rate = 0;
    std::int32_t psn = -1;  ///< number of the first packet, 24 bits; -1: random
    /// Most rights that any key may give a peer. Atomic rights have no effect on a device without
    /// atomics.
    Access access = Access::remote_all;
  } queue_pair;

  /// Remote calls; see rpc.h. They take effect at the engine's first method or session.
  struct Rpc {
    /// How calls travel.
    ///   automatic   inline calls by datagram if both devices have datagrams. Otherwise all calls
    ///               of a session use a connection, which counts in `connections.maximum`
    ///   datagram    like automatic, but a device without datagrams is an error
    ///   connection  all calls over connections; the engine opens no datagram queue pair
    RpcTransport transport = RpcTransport::automatic;
    /// automatic: datagrams go without work requests if the device supports that; softverbs does.
    /// off: all datagrams use work requests.
    DirectPath direct_datagrams = DirectPath::automatic;
    std::uint32_t sessions = 1024;  ///< of the engine, opened and served each; 1 … 1048575
    /// Served sessions of one client host, or on softverbs of one process, so that it cannot
    /// exclude others; 0: three quarters of `sessions`. Up to three quarters, a host also gets one
    /// more only while it holds less than three times what is free. At most 1048575
    std::uint32_t sessions_per_source = 0;
    std::uint32_t window = 8;    ///< calls of a session at once; a power of two, 1 … 64
    std::uint32_t backlog = 16;  ///< further calls that wait, per session; 1 … 4096
    /// Datagrams being sent by work requests; a power of two, 64 … 32768
    std::uint32_t send_depth = 256;
    std::uint32_t receive_depth = 1024;  ///< posted receives for datagrams; 64 … 32768
    /// Shortest retransmission time-out of a request. Above it, the time-out follows the measured
    /// round trips as in RFC 6298, section 2: their mean and four times their deviation. 10us … 10s
    Nanoseconds min_rto = std::chrono::milliseconds(2);
    Nanoseconds call_timeout = std::chrono::seconds(5);  ///< of calls that name none; 1us … 1h
    /// Target round trip of congestion control, without the server's time. A session shrinks its
    /// congestion window while round trips exceed this and twice the shortest round trip seen, by
    /// the rule of Swift (Kumar et al., SIGCOMM 2020). The default is Spinwire's choice, not the
    /// paper's: set what your network takes. 0 disables congestion control; at most 1s
    Nanoseconds target_rtt = std::chrono::microseconds(50);
  } rpc;

  /// Which peers may connect. Without a key, only this host: an engine listens at and connects to
  /// loopback addresses alone, and on a device that reaches other hosts it uses neither rdma_cm nor
  /// out-of-band endpoints, unless `open`. That limits which peers ask, not where the data goes: a
  /// peer at a loopback address may name an RDMA address of any host.
  struct Security {
    /// A file of keys, read when the engine opens and by Engine::reload_keys(); spinwire-keygen
    /// makes one. Empty: no key. With keys, every peer over TCP or through rdma_cm must prove one
    /// of them before it learns anything, and what a handshake says travels encrypted. The endpoint
    /// of an out-of-band peer must have a proof of one: it shows that a holder of the key made the
    /// endpoint, but not when, unless PrepareOptions::peer_joins_first. This end shows the first
    /// key of its file, and accepts each of them.
    std::string key_file;
    /// Without a key, let every host that reaches the listener connect. Has no effect with one.
    bool open = false;
  } security;

  /// The engine's control steps.
  struct Engine {
    ControlMode control = ControlMode::automatic;  ///< manual: poll() takes no control step
    Nanoseconds control_interval = std::chrono::microseconds(100);  ///< between steps; 1us … 1s
  } engine;

  /// What other programs of this user see of the engine; see observe.h.
  struct Observability {
    /// Folder of the engine's file, which must be on a file system in memory. Empty: no file.
    std::string directory = "/dev/shm";
    /// Connections, sessions and served sessions in the file, each; a quarter is for those that
    /// are blocked or silent. The counters of the engine and its pools include all. 0 … 65536
    std::uint32_t rows = 256;
    /// Of so many operations and calls, about one has its latency measured; see "Latencies" in
    /// observing.md of the guide. 0 … 1e9; 0: none
    std::uint32_t sample = 1024;
    // What takes longer is recorded and counted; see "Slow callbacks and polls" in
    // observing.md of the guide. Each 0 … 1h; 0: no limit.
    Nanoseconds longest_poll = std::chrono::milliseconds(10);      ///< of one poll
    Nanoseconds longest_callback = std::chrono::milliseconds(10);  ///< of one callback
    Nanoseconds longest_pause = std::chrono::milliseconds(100);    ///< between two polls
  } observability;

  /// Reads the defaults, then `file` unless it is empty, then the environment. Set-up; any thread.
  /// Errors: bad_config, which names file, line, key, the nearest known key, and the range.
  [[nodiscard]] SPINWIRE_API static Result<Config> load(const std::filesystem::path& file = {});
  /// Reads the defaults, then `toml`, then the environment. `origin` names the text in errors.
  /// Set-up; any thread. Errors: bad_config, which names origin, line, key, the nearest known key,
  /// and the range.
  [[nodiscard]] SPINWIRE_API static Result<Config> parse(std::string_view toml,
                                                         std::string_view origin);
  /// Checks every range and the relations between settings. Engine::open() calls it. Set-up; any
  /// thread. Errors: bad_config.
  [[nodiscard]] SPINWIRE_API Result<void> check() const;
  /// Returns one line of TOML per setting, with its range as a comment. Set-up; any thread.
  [[nodiscard]] SPINWIRE_API std::string to_toml() const;
};

}  // namespace spinwire
