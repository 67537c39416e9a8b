// The embedded device's verbs objects: each begins with the libibverbs struct that its user holds.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "base/shared_memory.h"
#include "base/unique_fd.h"
#include "softverbs/lane/segment.h"
#include "softverbs/process_directory.h"
#include "softverbs/ud/ud_direct.h"
#include "spinwire/clock.h"

namespace spinwire::softverbs {

struct Context;
struct Faults;
struct Mw;
struct Peer;
struct Qp;
struct QueueFaults;

struct Pd : ibv_pd {
  std::uint64_t id = 0;
  std::uint32_t users = 0;
  Pd* parent = nullptr;  ///< of a parent domain: the domain that it stands for
};

/// A peer's access to our memory that was in progress when a key was invalidated.
struct PendingAccess {
  std::uint32_t lane;
  std::uint64_t word;
};

struct Mr : ibv_mr {
  std::uint32_t index = 0;
  bool dead = false;                ///< the key is invalidated, deregistration goes on
  std::vector<PendingAccess> busy;  ///< accesses that deregistration waits for
};

/// Room for what an ibv_cq_ex has beyond an ibv_cq, and for a completion; only the preload library
/// uses it.
inline constexpr std::size_t kCqExtension = 256;

/// During an ibv_poll_cq of this queue completions go to the caller's array, as long as it has room
/// and no older completion waits. All others wait in a private ring.
struct Cq : ibv_cq {
  /// Where programs for libibverbs find the rest of an ibv_cq_ex.
  std::byte extension[kCqExtension];
  ibv_wc* out = nullptr;
  std::uint32_t room = 0;  ///< left at `out`
  std::uint32_t head = 0;
  std::uint32_t tail = 0;
  std::uint32_t mask = 0;
  bool overrun = false;
  std::uint32_t solicited = 0;  ///< solicited completions and errors so far
  std::uint32_t users = 0;
  std::unique_ptr<ibv_wc[]> ring;
};

struct ReceiveWr {
  std::uint64_t wr_id;
  std::uint32_t sge_count;
  std::uint32_t capacity;  ///< bytes, all elements together, saturating
  ibv_sge first;           ///< the only element, if sge_count is 1; else all are in `sges`
};

/// A receive queue, shared or of one queue pair: private memory, first in first out.
struct ReceiveQueue {
  std::uint32_t head = 0;  ///< next to be taken
  std::uint32_t tail = 0;  ///< next to be posted
  std::uint32_t mask = 0;
  std::uint32_t depth = 0;
  std::uint32_t max_sge = 0;
  std::uint32_t limit = 0;     ///< of a shared queue: raise the event below it; 0: never
  std::uint32_t reserved = 0;  ///< entries behind `tail` that `limit` hides from the hot paths
  std::unique_ptr<ReceiveWr[]> ring;
  std::unique_ptr<ibv_sge[]> sges;  ///< max_sge per entry

  [[nodiscard]] std::uint32_t count() const noexcept { return tail - head; }
  [[nodiscard]] const ibv_sge* elements(const ReceiveWr& wr) const noexcept {
    return wr.sge_count == 1 ? &wr.first
                             : &sges[static_cast<std::size_t>(&wr - ring.get()) * max_sge];
  }
};

struct Srq : ibv_srq {
  ReceiveQueue queue;
  std::uint32_t users = 0;
  Pd* domain = nullptr;
};

/// An address handle: another context, as datagrams reach it.
struct Ah : ibv_ah {
  Peer* peer = nullptr;
  ibv_pd* usable_in = nullptr;           ///< its domain; null if a GID of a process is not enough
  std::uint32_t version_class_flow = 0;  ///< first word of the route header, in network order
  std::uint8_t hop_limit = 0;
  bool plain = true;  ///< traffic class and flow 0, kUsualHops: the receiver can build the header
};

/// One that names a process: the queue pair's number says which of its contexts is meant.
struct ProcessAh : Ah {
  ibv_ah_attr attr{};
  struct Reached {
    std::uint32_t seat;
    std::unique_ptr<Ah> ah;
  };
  std::vector<Reached> reached;  ///< each context that was sent to
};

/// Why a datagram was dropped.
enum class Drop : std::uint8_t {
  peer_gone,      ///< by the sender: the receiver died or closed
  no_room,        ///< by the sender: the lane stayed full for the timeout
  malformed,      ///< by the receiver: its line cannot be decoded
  no_queue_pair,  ///< by the receiver: missing, of another type, or in the wrong state
  wrong_key,      ///< by the receiver: another Q_Key
  no_receive,     ///< by the receiver: no receive posted
  too_long,       ///< by the receiver: longer than the receive
  count
};

/// A posted send work request, stored with its inline bytes until it is acknowledged. Datagrams are
/// stored only while they wait for room.
struct alignas(64) SendWr {
  std::uint64_t wr_id;
  union {
    std::uint64_t lane_end;  ///< packets: lane position after the last line
    std::uint64_t swap;
    std::uint64_t bind_length;
    Peer* receiver;  ///< of a datagram; null once it was sent or dropped
  };
  std::uint32_t length;
  std::uint8_t opcode;
  std::uint8_t flags;       ///< IBV_SEND_*
  std::uint16_t sge_count;  ///< kInLane: only the lane holds the bytes
  ibv_sge first;            ///< the only element, if sge_count is 1; else all are in Qp::sq_sges
  std::uint64_t remote_address;  ///< of a datagram: Q_Key << 32 | remote queue pair
  std::uint32_t rkey;
  std::uint32_t imm;
  std::uint64_t compare_add;  ///< of a datagram: fields of its address handle

  /// Writes `length`, `opcode`, `flags` and `sge_count` with one store.
  void set_kind(std::uint32_t bytes, ibv_wr_opcode op, unsigned send_flags,
                std::uint16_t elements) noexcept {
    const std::uint64_t word = bytes | std::uint64_t{op} << 32 |
                               std::uint64_t{send_flags & 0xff} << 40 |
                               std::uint64_t{elements} << 48;
    std::memcpy(reinterpret_cast<std::byte*>(this) + 16, &word, sizeof word);
  }
};
static_assert(sizeof(SendWr) == 64 && offsetof(SendWr, length) == 16 &&
              offsetof(SendWr, opcode) == 20 && offsetof(SendWr, flags) == 21 &&
              offsetof(SendWr, sge_count) == 22);
/// A short inline message: its line holds the bytes until the peer's answer is known. After a
/// negative answer they are copied back from there.
inline constexpr std::uint16_t kInLane = 0xffff;

/// Twice the lane: records of consumed packets are processed while their lines are written again.
inline constexpr std::uint32_t kInFlight = 2 * kLaneLines;

/// Consecutive packets of one queue pair that are not acknowledged yet, up to the first signaled
/// one. They complete together.
struct InFlight {
  std::uint64_t end;  ///< lane position after the last of them
  std::uint32_t qpn;
  std::uint32_t sq_end;  ///< send-queue position after the last of them
  std::uint16_t epoch;   ///< of the transmission; a retransmission increments the queue pair's
};

/// The lane towards a peer, in the peer's segment.
struct OutLane : DirectLane {
  LaneControl* control = nullptr;
  std::uint64_t head = 0;   ///< consumed by the peer, as far as applied
  std::uint64_t acked = 0;  ///< `head` as packets carried it; the next poll applies it
  /// `tail` may not pass it: head + kLaneLines, or less while queue pairs wait for room, so that no
  /// other overtakes them.
  std::uint64_t limit = kLaneLines;
  std::uint32_t in_flight_head = 0;
  std::uint32_t in_flight_tail = 0;
  std::uint32_t index = 0;
  std::uint64_t busy = 0;
  std::unique_ptr<InFlight[]> in_flight;  ///< kInFlight entries
};

/// The lane from a peer, in our own segment.
struct InLane {
  Line* next = nullptr;    ///< line at `head`
  std::uint64_t mark = 1;  ///< mark that a new line at `head` carries
  Line* end = nullptr;     ///< of `lines`
  std::uint64_t head = 0;
  /// While `head` is below it, an acknowledgement could cover a packet that was refused, so packets
  /// carry none and the sender reads the lane's own words.
  std::uint64_t no_ack_until = 0;
  Line* lines = nullptr;
  LaneControl* control = nullptr;
  Peer* peer = nullptr;  ///< null until we know the sender
  std::uint32_t index = 0;
  std::uint32_t idle_rounds = 0;   ///< control steps without a packet
  std::uint64_t control_head = 0;  ///< head at the last control step
  bool awake = false;
  bool run_reported = false;  ///< the first lines are in a DirectRun
  ibv_grh route{};            ///< route header of a plain datagram, without its length
  std::uint64_t serial = 0;   ///< unique among all lanes the context ever had
};

struct MappedObject {
  std::byte* base = nullptr;
  std::uint64_t size = 0;
  std::uint32_t generation = 0;
};

/// Another context, known by its GID, of this process or another.
struct Peer {
  Context* context = nullptr;
  Segment* segment = nullptr;  ///< mapped; null once detached
  OutLane out;
  InLane* in = nullptr;
  bool same_process = false;
  bool gone = false;           ///< died or closed
  bool unacked = false;        ///< listed in Context::unacked
  bool ack_due = false;        ///< listed in Context::acks_due
  bool has_held_line = false;  ///< listed in Context::held_first: a line may be unpublished
  std::uint32_t users = 0;
  Qp* queue_pairs = nullptr;  ///< connected to it
  Qp* stalled = nullptr;      ///< waiting for room in `out`, first come, first served
  const Qp* in_flight_owner =
      nullptr;  ///< the queue pair that the last in-flight record is open for
  Qp* stalled_last = nullptr;
  Peer* next_held = nullptr;  ///< in that list
  // Datagrams that wait for room in `out`: see ud_send_queue.cc.
  const Qp* datagram_turn = nullptr;  ///< its datagram is the next to be sent
  const Qp* datagram_next = nullptr;  ///< has the turn after that
  std::uint64_t turn_began = 0;       ///< ticks
  std::uint64_t wait_budget = 0;      ///< ticks that datagrams may still wait
  std::uint64_t budget_head = 0;      ///< `out.head` when the budget was last restored
  std::uint64_t full_in_pass = 0;     ///< Context::datagram_pass that found no room
  std::uint32_t datagrams_waiting = 0;
  std::vector<MappedObject> objects;
  ibv_gid gid{};
  std::uint32_t pid = 0;
  base::UniqueFd pidfd;
  base::UniqueFd memory;                      ///< its address space, once it was needed
  std::shared_ptr<base::SharedMemory> local;  ///< keeps `segment` mapped, if in this process
};

/// The registration that a queue pair used last. Valid until any registration ends.
struct KnownRegion {
  std::uint32_t key = 0;
  std::uint32_t epoch = 0;
  std::uint64_t begin = 0;
  std::uint64_t size = 0;
};

/// Whether a peer may be accessing our memory through a queue pair.
enum class PeerAccess : std::uint8_t {
  none,      ///< the queue pair does not answer, and all accesses have ended
  possible,  ///< the queue pair answers, or did until now
  recorded,  ///< after the revocation the access in Qp::busy was in progress
};

inline constexpr std::uint64_t kNeverExpected = ~std::uint64_t{0};
inline constexpr std::uint64_t kExpectedMask = (std::uint64_t{1} << 48) - 1;

struct Qp : ibv_qp, DirectSender {
  // Send side.
  Peer* peer = nullptr;
  std::unique_ptr<SendWr[]> sq;
  std::unique_ptr<ibv_sge[]> sq_sges;
  std::unique_ptr<std::byte[]> sq_inline;
  std::uint32_t sq_mask = 0;
  std::uint32_t sq_depth = 0;
  std::uint32_t sq_head = 0;       ///< next to be posted
  std::uint32_t sq_next = 0;       ///< next to be run or transmitted
  std::uint32_t sq_tail = 0;       ///< oldest not completed
  std::uint32_t sq_reclaimed = 0;  ///< room frees when a later signaled one completes
  std::uint32_t max_sge = 0;
  std::uint32_t max_inline = 0;
  std::uint32_t dest_qpn = 0;
  KnownRegion readable;  ///< of the last message sent
  std::uint32_t next_psn = 0;
  std::uint16_t epoch = 0;      ///< incremented when the queue goes back to retransmit
  std::uint8_t signal_all = 0;  ///< IBV_SEND_SIGNALED with sq_sig_all
  bool waiting = false;         ///< for a retry timer
  bool stalled = false;
  bool open = false;  ///< RTS, not waiting, the peer alive: packets may go out
  std::uint16_t retries = 0;
  std::uint16_t rnr_retries = 0;
  // Receive side.
  ReceiveQueue* receives = nullptr;
  DirectRuns* direct = nullptr;  ///< where runs of short datagrams are reported
  KnownRegion writable;          ///< of the last receive
  /// psn << 24 | number of the next packet, as in a line's word; kNeverExpected unless RTR or RTS.
  std::uint64_t expected = kNeverExpected;
  bool nak_given = false;
  QueuePairEntry* entry = nullptr;
  ReceiveQueue own_receives;
  // Rarely touched.
  std::uint64_t retry_at = 0;
  std::uint32_t naks_handled = 0;
  std::uint32_t windows = 0;  ///< bound to this queue pair
  PeerAccess peer_access = PeerAccess::none;
  bool rights_revoked = false;  ///< and an access under them may be in progress
  PendingAccess busy{};
  Qp* next_of_peer = nullptr;
  Qp* next_stalled = nullptr;
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  std::unique_ptr<QueueFaults> faults;  ///< null without a fault plan
};

enum class Driving : std::uint8_t {
  by_user,  ///< the user calls control(); poll_cq makes no system call
  by_poll,  ///< poll_cq calls control() itself now and then
};

/// What a key opens: our own copy, since peers can write the entry of the segment that says the
/// same to them. Whatever our thread writes into our memory is checked against this.
struct OwnRegion {
  std::uint32_t key = 0;  ///< 0: dead
  std::uint32_t access = 0;
  std::uint64_t address = 0;
  std::uint64_t length = 0;
  std::uint64_t pd = 0;  ///< a domain's id, or a window_scope
};

/// Entries of the region table. Released entries are used again oldest first, and only when there
/// are many of them, so that a stale key is recognised for as long as its generation bits allow.
struct RegionSlots {
  struct Free {
    void operator()(OwnRegion* table) const noexcept { std::free(table); }
  };
  struct Slot {
    std::uint64_t object_offset = 0;
    std::uint32_t object = kNoObject;
    std::uint32_t object_generation = 0;
    std::uint32_t generation = 0;
    std::uint32_t next = 0;     ///< free entries; 0 ends
    std::uint32_t windows = 0;  ///< bound to this region
    Mw* window = nullptr;       ///< that has this entry
  };
  std::vector<Slot> slots = std::vector<Slot>(1);  ///< entries used so far; entry 0 is never used
  std::uint32_t first_free = 0;
  std::uint32_t last_free = 0;
  std::uint32_t free = 0;

  /// kMaxRegions entries, so that any key names one. Pages that were never used cost nothing.
  std::unique_ptr<OwnRegion[], Free> own;
};

/// What a poll has to do besides looking at the lanes. One word: a poll compares it with 0.
struct alignas(8) Pending {
  std::uint16_t unacked = 0;    ///< peers in Context::unacked
  std::uint16_t acks_due = 0;   ///< peers in Context::acks_due
  std::uint32_t attention = 0;  ///< timers, completions in rings, control() to be called
};

/// One opened device. One thread drives it.
struct Context {
  /// Room for the verbs_context that libibverbs expects before an extended ibv_context. Only the
  /// preload library fills it in.
  alignas(verbs_context) std::byte extension[offsetof(verbs_context, context)]{};
  ibv_context verbs{};  ///< users hold its address
  // Hot.
  Segment* segment = nullptr;
  std::uint32_t awake_count = 0;
  Pending pending;
  std::int32_t ack_countdown = 0;  ///< polls until acknowledgements are read from the lanes
  std::uint32_t region_epoch = 1;  ///< incremented when a registration ends
  std::uint32_t turn = 0;          ///< the awake lane that the next poll looks at first
  std::unique_ptr<InLane*[]> awake;
  std::unique_ptr<Peer*[]> unacked;
  std::unique_ptr<Peer*[]> acks_due;
  std::unique_ptr<Qp*[]> queue_pairs;  ///< by index
  Peer* held_first = nullptr;          ///< peers with an unpublished line
  // Cold.
  Clock clock = Clock::real();
  std::uint64_t last_tick = 0;  ///< see read_clock()
  Driving driving = Driving::by_user;
  bool one_thread = false;  ///< one thread drives all peers: see keep_to_thread()
  std::uint64_t nonce = 0;
  std::uint64_t process = 0;  ///< process_word of ours
  std::uint32_t pid = 0;
  ProcessSeat seat;  ///< none in Driving::by_user: the context keeps a GID of its own
  std::uint64_t next_pd = 1;
  std::uint32_t self_control = 0;  ///< polls until the next control() in Driving::by_poll
  std::vector<Qp*> waiting;
  std::vector<std::unique_ptr<Peer>> peers;
  std::vector<std::unique_ptr<InLane>> lanes;  ///< by directory index; null when unused
  std::uint32_t lane_scan = 0;
  std::uint64_t lane_serial = 0;       ///< of the lane that was made last
  std::uint32_t idle_rounds = 64;      ///< control steps without a packet until a lane sleeps
  std::uint64_t lanes_slept = 0;       ///< lanes put to sleep so far
  std::uint64_t datagram_timeout = 0;  ///< ticks that datagrams wait for a stopped receiver
  std::uint64_t datagram_pass = 0;
  std::size_t peer_scan = 0;
  bool new_lanes = false;
  std::array<std::uint64_t, kMaxLanes / 64> new_lane_bits{};
  std::uint64_t next_liveness = 0;
  base::UniqueFd liveness;    ///< epoll of the peers' pidfds
  std::uint32_t watched = 0;  ///< peers that have one
  RegionSlots regions;
  std::vector<std::uint32_t> free_queue_pairs;
  std::uint32_t next_queue_pair = 1;
  std::vector<std::uint8_t> queue_pair_generation;
  std::vector<std::uint32_t> object_users;
  std::vector<ibv_async_event> events;                                       ///< oldest first
  std::array<std::uint64_t, static_cast<std::size_t>(Drop::count)> drops{};  ///< datagrams
  std::shared_ptr<base::SharedMemory> locks;   ///< AtomicLock table of the process
  std::shared_ptr<base::SharedMemory> memory;  ///< holds `segment`; peers of this process share it
  ibv_device device{};
  std::uint32_t objects_open = 0;  ///< verbs objects not destroyed yet
  std::unique_ptr<Faults> faults;  ///< null without a fault plan
};

inline Context& context_of(ibv_context* c) noexcept {
  return *reinterpret_cast<Context*>(reinterpret_cast<std::byte*>(c) - sizeof(Context::extension));
}

/// The tick for the device's timers, which go on if the counter has stepped back.
inline std::uint64_t read_clock(Context& c) noexcept {
  return c.last_tick = c.clock.now_from(c.last_tick);
}

void raise_event(Context& c, ibv_event_type type, void* element) noexcept;
/// Forgets the events of an object that is being destroyed. Cold.
void drop_events(Context& c, const void* element) noexcept;

}  // namespace spinwire::softverbs
