// The shared segment of a context: the memory that its peers map. A sparse memfd that peers open
// through /proc/<pid>/fd. The layout is fixed at compile time and checked by magic and version.
#pragma once

#include <infiniband/verbs.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "softverbs/lane/line.h"

namespace spinwire::softverbs {

inline constexpr std::uint64_t kSegmentMagic = 0x31657269776e7053;  // "Spnwire1"
inline constexpr std::uint32_t kSegmentVersion = 9;
inline constexpr std::uint32_t kMaxLanes = 4096;
/// The most lanes that the contexts of one process may have in the segment of another process, so
/// that no process keeps others out: more than the 256 contexts of a program for libibverbs.
inline constexpr std::uint32_t kLanesPerProcess = kMaxLanes / 4;
inline constexpr std::uint32_t kMaxQueuePairs = 65536;
inline constexpr std::uint32_t kMaxRegions = 1u << 18;
inline constexpr std::uint32_t kMaxObjects = 4096;
inline constexpr std::uint32_t kNoObject = ~0u;
inline constexpr std::uint32_t kSegmentObject = ~1u;  ///< the segment, which peers have mapped

static_assert(std::endian::native == std::endian::little);

inline constexpr std::size_t kLinePayload = sizeof Line::payload;

enum class Packet : std::uint8_t {
  none,
  send,
  send_imm,
  write_imm,
  send_inv,
  datagram = 14,
  datagram_imm
};

namespace line_flag {
inline constexpr std::uint64_t kReference = 1;  ///< payload is Reference descriptors
inline constexpr std::uint64_t kPrefixed = 1;   ///< datagrams: payload begins with a DatagramPrefix
inline constexpr std::uint64_t kSolicited = 2;
inline constexpr std::uint64_t kNoAck = 4;  ///< `ack` may cover a packet that was refused
}  // namespace line_flag

/// Payload of a reference packet: the place of the message in the sender's memory.
struct Reference {
  std::uint64_t address;  ///< the sender's virtual address
  std::uint32_t length;
  std::uint32_t key;  ///< the sender's local key
};
static_assert(sizeof(Reference) == 16);

struct Lane {
  LaneControl control;
  alignas(64) Line lines[kLaneLines];
  Line end;  ///< never written: ends every run of packets
  /// Bytes of packets that do not fit into their line; the line's payload then begins with their
  /// offset. The first lanes have theirs in Segment::wide_data: see data_of().
  alignas(4096) std::byte data[kLaneData];
};

/// The sender of a lane. A sender claims `state` by compare-and-swap when it attaches; the owner
/// claims it likewise before it zeroes the lane. `state` holds the claimer's pid, so that the
/// unfinished claim of a dead process is recognised. Any peer can write any state, so both sides
/// know privately which lanes are theirs: `state` only tells the owner of new senders, and of those
/// that have released their lane.
struct alignas(64) LaneEntry {
  std::atomic<std::uint64_t> state;  ///< pid << 8 | LaneState
  ibv_gid sender;
  ibv_gid sender_shown;  ///< for route headers
};
enum class LaneState : std::uint8_t { free, claimed, active, released };
constexpr std::uint64_t lane_word(std::uint32_t pid, LaneState state) {
  return std::uint64_t{pid} << 8 | static_cast<std::uint64_t>(state);
}
constexpr LaneState lane_state(std::uint64_t word) { return static_cast<LaneState>(word & 0xff); }
constexpr std::uint32_t lane_pid(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> 8);
}

enum class Nak : std::uint32_t {
  none,
  rnr,              ///< no receive posted
  not_ready,        ///< queue pair missing, not in RTR or RTS, or not connected to the sender
  invalid_request,  ///< message longer than the posted receive
  access,           ///< key, bounds or rights
  operational,      ///< an error on the responder's side
};

inline constexpr unsigned kPortShift = 24;

/// What a queue pair allows its peer. Peers in other processes read it in the segment, those of
/// this process in a private table.
struct QueuePairRights {
  std::atomic<std::uint64_t> ident;   ///< local number << 32 | remote number << 8 | its state
  std::atomic<std::uint64_t> remote;  ///< nonce of the connected peer
  std::atomic<std::uint64_t> pd;
  std::atomic<std::uint32_t> access;  ///< IBV_ACCESS_* of the queue pair | port << kPortShift
  std::atomic<std::uint16_t> rnr_timer;
  /// Longest direct message that the queue pair reads in place; 0: none. A peer that believes a
  /// wrong number is refused, and only loses this connection.
  std::atomic<std::uint16_t> in_place;
};

/// The part of a queue pair that peers see. The numbers in `ident` stay when the queue pair stops
/// responding or is destroyed, until the entry is used again: peers can read its answers until
/// then.
struct alignas(64) QueuePairEntry {
  QueuePairRights rights;
  /// Written by the peer whose one-sided request was refused: this queue pair must fail.
  std::atomic<std::uint64_t> violation;
  /// Written by the peer, see DirectMessages::word: beside what the peer checks before.
  std::atomic<std::uint64_t> word;
  std::atomic<std::uint32_t> word_key;  ///< that opens `word` to the peer; 0: none
  // Written with a negative answer, and when the queue pair stops responding.
  std::atomic<std::uint32_t> expected_psn;
  std::atomic<Nak> nak;
  std::atomic<std::uint32_t> nak_serial;
};
static_assert(sizeof(QueuePairEntry) == 64);

/// The ident of a queue pair, with the reason in place of the state.
constexpr std::uint64_t violation_word(std::uint32_t local, std::uint32_t remote, Nak reason) {
  return std::uint64_t{local} << 32 | std::uint64_t{remote} << 8 |
         static_cast<std::uint8_t>(reason);
}
inline constexpr std::uint64_t kServed = 1;
inline constexpr std::uint64_t kDestroyed = 2;
/// The ident of a queue pair that responds to requests.
constexpr std::uint64_t queue_pair_ident(std::uint32_t local, std::uint32_t remote) {
  return std::uint64_t{local} << 32 | std::uint64_t{remote} << 8 | kServed;
}

/// The domain of a window, or of a registration for one queue pair: that queue pair alone may use
/// it. No protection domain has such an id.
constexpr std::uint64_t window_scope(std::uint32_t qpn) { return std::uint64_t{1} << 63 | qpn; }

/// A registered range, or the part of one that a window is bound to. The fields beside `key` change
/// only while `key` is invalid and no peer can be reading them: an entry is reused only after every
/// peer's access has ended.
struct alignas(64) RegionEntry {
  std::atomic<std::uint32_t> key;  ///< 0: dead
  std::uint32_t access;
  std::uint64_t address;
  std::uint64_t length;
  std::uint64_t pd;  ///< id of a domain, or a window_scope
  std::uint64_t object_offset;
  std::uint32_t object;  ///< kNoObject: private memory, reached through the kernel; kSegmentObject
  std::uint32_t object_generation;
};
static_assert(sizeof(RegionEntry) == 64);

/// Shared memory that holds regions: a descriptor of the owner that peers open and map.
struct alignas(64) ObjectEntry {
  std::atomic<std::uint32_t> generation;  ///< 0: free
  std::int32_t fd;
  std::uint64_t size;
  std::uint64_t inode;
};

/// Guards atomics on part of a process's private memory. All contexts of a process publish one
/// table of locks, because several may have the same memory registered.
struct alignas(64) AtomicLock {
  std::atomic<std::uint64_t> holder;  ///< process_word of the holder; 0: free
};
inline constexpr std::uint32_t kAtomicLocks = 64;  ///< by address
inline constexpr std::uint32_t kLockObject = 0;

struct Segment {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t pid;
  ibv_gid gid;        ///< the context's own GID
  ibv_gid shown_gid;  ///< the GID that programs see: `gid`, or the process's
  std::atomic<std::uint32_t> closed;
  std::atomic<std::uint32_t> lanes_used;  ///< number of directory entries from the first to the
                                          ///< last ever claimed
  // Doorbells of sleeping lanes. A sender sets the lane's bit first, then the summary that the
  // owner polls.
  alignas(64) std::atomic<std::uint64_t> doorbell;
  std::atomic<std::uint64_t> violated;  ///< a queue pair's `violation` is set
  /// Not 0 while the owner sleeps: peers that ring write to its wake-up pipe. Each sleep has
  /// another number, so that a late peer ends no later sleep.
  std::atomic<std::uint64_t> sleep_serial;
  // The owner's wake-up pipe, from its first sleep on: see wake_pipe.h.
  std::atomic<std::uint64_t> wake_inode;  ///< 0: none yet. Written last
  std::atomic<std::uint32_t> wake_fd;
  alignas(64) std::atomic<std::uint64_t> doorbells[kMaxLanes / 64];
  LaneEntry directory[kMaxLanes];
  ObjectEntry objects[kMaxObjects];
  QueuePairEntry queue_pairs[kMaxQueuePairs];
  RegionEntry regions[kMaxRegions];
  alignas(4096) Lane lanes[kMaxLanes];
  std::byte wide_data[kWideLanes][kWideLaneData];
};

/// The data of a lane.
inline LaneData data_of(Segment& segment, std::uint32_t lane) noexcept {
  return {lane < kWideLanes ? segment.wide_data[lane] : segment.lanes[lane].data,
          lane_data_bytes(lane)};
}

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// Directory entries from this index on were never claimed. Peers write the count, so it is clamped
/// to the table.
inline std::uint32_t lanes_in_use(const Segment& segment) noexcept {
  return std::min(segment.lanes_used.load(std::memory_order_acquire), kMaxLanes);
}

// Keys and numbers hold an index and a generation, so that stale ones are recognised. The consumer
// sets the low 8 bits of a window's key.
inline constexpr std::uint32_t kGenerationBits = 14;
inline constexpr std::uint32_t kGenerationMask = (1u << kGenerationBits) - 1;
static_assert(std::uint64_t{kMaxRegions} << kGenerationBits == std::uint64_t{1} << 32);
constexpr std::uint32_t region_index(std::uint32_t key) { return key >> kGenerationBits; }
constexpr std::uint32_t region_key(std::uint32_t index, std::uint32_t generation) {
  return index << kGenerationBits | generation;
}
constexpr std::uint32_t queue_pair_index(std::uint32_t qpn) { return qpn & (kMaxQueuePairs - 1); }

// The word of a line.
/// The opcode and flags byte of a line's word.
constexpr std::uint64_t packet_kind(Packet packet, std::uint64_t flags) {
  return static_cast<std::uint64_t>(packet) << 4 | flags;
}
constexpr std::uint64_t word_mark(std::uint64_t word) { return word >> 56; }
constexpr Packet word_packet(std::uint64_t word) { return static_cast<Packet>((word >> 52) & 0xf); }
constexpr std::uint64_t word_flags(std::uint64_t word) { return (word >> 48) & 0xf; }
constexpr std::uint32_t word_psn(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> 24) & 0xffffff;
}
constexpr std::uint32_t word_qpn(std::uint64_t word) {
  return static_cast<std::uint32_t>(word) & 0xffffff;
}
constexpr std::uint32_t psn_add(std::uint32_t psn, std::uint32_t n) { return (psn + n) & 0xffffff; }
/// a - b in 24-bit serial arithmetic.
constexpr std::int32_t psn_diff(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::int32_t>((a - b) << 8) >> 8;
}

}  // namespace spinwire::softverbs
