// The embedded device's verbs objects. Each begins with the libibverbs struct that its user holds.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "base/intrusive_list.h"
#include "base/large_memory.h"
#include "base/shared_memory.h"
#include "base/unique_fd.h"
#include "softverbs/lane/lanes.h"
#include "softverbs/lane/segment.h"
#include "softverbs/memory/large_copy.h"
#include "softverbs/peer.h"
#include "softverbs/process_directory.h"
#include "softverbs/ud/ud_direct.h"
#include "spinwire/clock.h"

namespace spinwire::softverbs {

struct Faults;
struct Mw;
struct QueueFaults;

// The links of the lists below.
Peer*& next_held(Peer& peer) noexcept;
Qp*& next_lost(Qp& qp) noexcept;

struct Pd : ibv_pd {
  std::uint64_t id = 0;
  std::uint32_t users = 0;
  Pd* parent = nullptr;  ///< parent domains: the domain whose rights they have
};

/// A peer's access to local memory that was in progress when a key was invalidated.
struct PendingAccess {
  std::shared_ptr<const LocalAccess> local;  ///< by a thread of this process; else in a lane
  std::uint32_t lane = 0;
  std::uint64_t lane_serial = 0;  ///< InLane::serial
  std::uint64_t word = 0;         ///< even: no access
  std::uint64_t since = 0;        ///< tick
};

struct Mr : ibv_mr {
  std::uint32_t index = 0;
  bool dead = false;  ///< the key is invalid, deregistration is in progress
  std::vector<PendingAccess> pending_accesses;  ///< accesses that deregistration waits for
};

/// Room for the members of an ibv_cq_ex beyond those of an ibv_cq, and for a completion. Only the
/// preload library uses it.
inline constexpr std::size_t kCqExtension = 256;

/// During an ibv_poll_cq of this queue, completions go to the caller's array while it has room and
/// no older completion waits. All others wait in a private ring.
struct Cq : ibv_cq {
  /// Programs for libibverbs find the rest of an ibv_cq_ex here.
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
  std::uint32_t capacity;  ///< bytes of all elements, saturating
  ibv_sge first;           ///< the only element, if sge_count is 1; else all are in `sges`
};

/// A receive queue, shared or of one queue pair: a FIFO in private memory.
struct ReceiveQueue {
  std::uint32_t head = 0;  ///< next to be taken
  std::uint32_t tail = 0;  ///< next to be posted
  std::uint32_t mask = 0;
  std::uint32_t depth = 0;
  std::uint32_t max_sge = 0;
  std::uint32_t limit = 0;     ///< shared queues: raise the event below this count; 0: never
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

/// An address handle: the context that datagrams go to.
struct Ah : ibv_ah {
  Peer* peer = nullptr;
  ibv_pd* usable_in = nullptr;           ///< its domain; null: not usable to send, see ProcessAh
  std::uint32_t version_class_flow = 0;  ///< first word of the route header, in network order
  std::uint8_t hop_limit = 0;
  bool plain = true;  ///< traffic class and flow 0, kUsualHops: the receiver can build the header
};

/// An address handle that names a process: the queue pair's number selects one of its contexts.
struct ProcessAh : Ah {
  ibv_ah_attr attr{};
  struct Reached {
    std::uint32_t slot;
    std::unique_ptr<Ah> ah;
  };
  std::vector<Reached> reached;  ///< one per context that datagrams were sent to
};

/// Why a datagram was dropped.
enum class Drop : std::uint8_t {
  peer_gone,      ///< by the sender: the receiver died or closed
  no_room,        ///< by the sender: the lane stayed full for the timeout
  malformed,      ///< by the receiver: the line cannot be decoded
  no_queue_pair,  ///< by the receiver: missing, of another type, or in the wrong state
  wrong_key,      ///< by the receiver: another Q_Key
  no_receive,     ///< by the receiver: no receive posted
  too_long,       ///< by the receiver: longer than the receive
  count
};

/// A posted send work request, stored with its inline bytes until it is acknowledged. A datagram is
/// stored only while it waits for room.
struct alignas(64) SendWr {
  std::uint64_t wr_id;
  union {
    std::uint64_t lane_end;  ///< packets: lane position after the last line
    std::uint64_t swap;
    std::uint64_t bind_length;
    Peer* receiver;  ///< datagrams: the peer; null once sent or dropped
  };
  std::uint32_t length;
  std::uint8_t opcode;
  std::uint8_t flags;       ///< IBV_SEND_*
  std::uint16_t sge_count;  ///< kInLane: the bytes are only in the lane
  ibv_sge first;            ///< the only element, if sge_count is 1; else all are in Qp::sq_sges
  std::uint64_t remote_address;  ///< datagrams: Q_Key << 32 | remote queue pair
  std::uint32_t rkey;
  std::uint32_t imm;
  union {
    std::uint64_t compare_add;  ///< of a datagram: fields of its address handle
    std::uint32_t psn;          ///< of a packet that was transmitted
  };

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
/// Marks a short inline message whose bytes are only in its line until the peer has answered. After
/// a negative answer they are copied back from the line.
inline constexpr std::uint16_t kInLane = 0xffff;

/// In SendWr::flags: the work request ran before earlier messages were acknowledged, and completes
/// with them.
inline constexpr std::uint8_t kHasRun = 0x80;

/// The registration that a queue pair used last. Valid while `epoch` equals Context::region_epoch.
struct KnownRegion {
  std::uint32_t key = 0;
  std::uint32_t epoch = 0;
  std::uint64_t begin = 0;
  std::uint64_t size = 0;
};

/// Whether a peer may be accessing local memory through a queue pair.
struct PeerAccess {
  enum State : std::uint8_t {
    none,      ///< the queue pair does not respond, and all accesses have ended
    possible,  ///< the queue pair responds, or did until now
    recorded,  ///< the access in `pending` was in progress after the revocation
  };
  State state = none;
  bool rights_revoked = false;  ///< an access under revoked rights may be in progress
  PendingAccess pending{};
};

inline constexpr std::uint64_t kNeverExpected = ~std::uint64_t{0};
inline constexpr std::uint64_t kExpectedMask = (std::uint64_t{1} << 48) - 1;

/// The fields that a plain message of a connection touches at either end: one cache line, because
/// each line of a connection among many is a miss.
struct alignas(64) MessageState {
  Peer* peer = nullptr;
  const ibv_cq* receives_with = nullptr;  ///< ibv_qp::recv_cq
  /// psn << 24 | number of the next packet, as in a line's word; kNeverExpected unless RTR or RTS.
  std::uint64_t expected = kNeverExpected;
  const void* record = nullptr;  ///< the user's, see DirectMessages::receive_in_place
  std::uint64_t direct_end = 0;  ///< lane position after the last direct message
  std::uint32_t sq_head = 0;     ///< next to be posted
  std::uint32_t sq_next = 0;     ///< next to be run or transmitted
  std::uint32_t dest_qpn = 0;
  std::uint32_t next_psn = 0;
  bool open = false;         ///< RTS, not waiting, the peer alive: packets may go out
  bool direct_open = false;  ///< the peer's queue pair has been seen to receive
  bool in_place = false;     ///< completions of plain messages say where they lie in the lane
  bool nak_given = false;
  bool has_faults = false;  ///< Qp::faults is not null
};
static_assert(sizeof(MessageState) == 64);

struct Qp : ibv_qp, DirectSender, MessageState {
  // Send side.
  std::unique_ptr<SendWr[]> sq;
  std::unique_ptr<ibv_sge[]> sq_sges;
  std::unique_ptr<std::byte[]> sq_inline;
  std::uint32_t sq_mask = 0;
  std::uint32_t sq_depth = 0;
  std::uint32_t sq_tail = 0;       ///< oldest not completed
  std::uint32_t sq_reclaimed = 0;  ///< end of the free entries; signaled completions advance it
  std::uint32_t max_sge = 0;
  std::uint32_t max_inline = 0;
  KnownRegion readable;  ///< of the last message sent
  /// With `in_place`: longer messages have no receive, and are reported in place whatever the
  /// budget.
  std::uint32_t longest_received = 0;
  std::uint16_t epoch = 0;      ///< incremented when the queue goes back to retransmit
  std::uint8_t signal_all = 0;  ///< IBV_SEND_SIGNALED with sq_sig_all
  bool waiting = false;         ///< for a retry timer
  bool stalled = false;
  std::uint16_t retries = 0;
  std::uint16_t rnr_retries = 0;
  // Direct messages: see rc/rc_direct.cc.
  bool direct_lost = false;  ///< one was refused or not taken: nothing more goes out
  bool lost = false;         ///< listed in Context::lost
  Qp* next_lost = nullptr;
  // Receive side.
  ReceiveQueue* receives = nullptr;
  DirectBatches* direct = nullptr;  ///< reports batches of datagrams
  KnownRegion writable;             ///< of the last receive
  QueuePairEntry* entry = nullptr;
  QueuePairRights* rights = nullptr;               ///< the private copy of what `entry` allows
  const QueuePairRights* remote_rights = nullptr;  ///< while connected: see rights_of_remote()
  ReceiveQueue own_receives;
  // Rarely touched.
  std::uint64_t retry_at = 0;
  std::uint64_t contended_since = 0;  ///< tick since which an atomic's lock is held; 0: it is not
  std::uint32_t naks_handled = 0;
  std::uint32_t windows = 0;  ///< bound to this queue pair
  PeerAccess peer_access;
  Qp* next_of_peer = nullptr;
  Qp* next_stalled = nullptr;
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  std::unique_ptr<QueueFaults> faults;  ///< null without a fault plan
};
static_assert(sizeof(Qp) / 64 % 2 == 1, "MessageStates of many queue pairs use all cache sets");

enum class Driving : std::uint8_t {
  by_user,  ///< the user calls control_device(); poll_cq makes no system call
  by_poll,  ///< poll_cq calls control() itself every 1024 polls
};

/// How far a context relies on the pages of peers in other processes: see kTrustPagesVariable.
enum class PageTrust : std::uint8_t {
  none,   ///< private memory is not reached; the kernel copies hugepages
  usual,  ///< the same, but hugepages are trusted by a context that shares its own, and in atomics
  all,
};

/// Private copy of a key's address, length and rights. Local accesses are checked against it,
/// because peers can overwrite the shared entry. Threads of other contexts read it while the key is
/// live: see read_key().
struct OwnRegion {
  std::uint32_t key = 0;  ///< 0: dead; written last, by set_key()
  std::uint32_t access = 0;
  std::uint64_t address = 0;
  std::uint64_t length = 0;
  std::uint64_t pd = 0;  ///< a domain's id, or a window_scope
};
/// Beside the rights in OwnRegion::access: other processes map the bytes and use the processor's
/// atomics on them.
inline constexpr std::uint32_t kMapped = 1u << 31;
/// Ends the key, or opens what the other fields say.
inline void set_key(OwnRegion& region, std::uint32_t key) noexcept {
  std::atomic_ref(region.key).store(key, std::memory_order_release);
}
/// Opens a region whose key is dead.
inline void open_region(OwnRegion& region, const OwnRegion& with) noexcept {
  region.access = with.access;
  region.address = with.address;
  region.length = with.length;
  region.pd = with.pd;
  set_key(region, with.key);
}
/// The key, as a thread reads it that does not drive the context.
inline std::uint32_t read_key(const OwnRegion& region) noexcept {
  return std::atomic_ref(const_cast<std::uint32_t&>(region.key)).load(std::memory_order_seq_cst);
}

/// Entries of the region table. Released entries are reused oldest first, and only when there are
/// many, so that a stale key is recognised for as long as possible.
struct RegionSlots {
  struct Slot {
    std::uint64_t object_offset = 0;
    std::uint32_t object = kNoObject;
    std::uint32_t object_generation = 0;
    std::uint32_t generation = 0;
    std::uint32_t next = 0;     ///< free entries; 0 ends
    std::uint32_t windows = 0;  ///< bound to this region
    Mw* window = nullptr;       ///< the window that has this entry
  };
  std::vector<Slot> slots = std::vector<Slot>(1);  ///< entries used so far; entry 0 is never used
  std::uint32_t first_free = 0;
  std::uint32_t last_free = 0;
  std::uint32_t free = 0;

  /// kMaxRegions entries, so that any key names one. Pages that were never used cost nothing.
  /// Shared with the peers of this process.
  std::shared_ptr<OwnRegion[]> own;
};

/// The work of a poll besides reading the lanes. One word: a poll compares it with 0.
struct alignas(8) Pending {
  std::uint16_t unacked = 0;    ///< peers in Context::unacked
  std::uint16_t acks_due = 0;   ///< peers in Context::acks_due
  std::uint32_t slow_work = 0;  ///< timers, completions in rings, control() to be called
};

/// Looks for violations that find none, within a liveness interval. An honest peer causes one at
/// most beside each violation.
inline constexpr std::uint32_t kVainLooks = 16;

/// The lanes that control steps look at, and what the current step may still do.
struct LaneScan {
  std::uint32_t next = 0;       ///< directory entry that the next step checks first
  std::uint32_t used = 0;       ///< see lanes_in_use()
  std::uint32_t next_ring = 0;  ///< word of doorbells that the next poll reads first
  std::uint32_t next_new = 0;   ///< lane that the next step opens first
  std::uint32_t opens = 0;      ///< lanes that the step may open
  std::uint32_t tries = 0;      ///< senders that the step may look for
  std::uint32_t clears = 0;     ///< lanes that the step may zero
  std::uint32_t violation_looks =
      kVainLooks;  ///< vain looks for violations until the next liveness check
  bool has_new_bits = false;
  std::array<std::uint64_t, kMaxLanes / 64> new_bits{};  ///< lanes that rang and are not open yet
  std::unique_ptr<std::uint64_t[]> claimed_since;        ///< by lane: tick; 0: not seen as claimed
};

/// Objects that packets of peers may have mapped between two control steps. Each takes system
/// calls.
inline constexpr std::uint32_t kMapsPerStep = 8;

/// How control steps notice that peers have ended.
struct Liveness {
  base::UniqueFd processes;   ///< epoll set of the pidfds
  std::uint32_t watched = 0;  ///< processes in the epoll set
  std::vector<std::unique_ptr<PeerProcess>> all;
  std::uint64_t next_check = 0;  ///< tick
  std::size_t next_peer = 0;     ///< index in Context::peers that the next check begins with
  std::size_t next_wake = 0;     ///< and that the next attempt to wake peers begins with
  std::uint32_t gone = 0;        ///< peers that are gone, and neither detached nor given up
  std::uint32_t wakes_due = 0;   ///< peers with Peer::wake_due
};

/// The numbers of queue pairs: an index, and above it the index's generation or the
/// process-directory slot.
struct QueuePairNumbers {
  /// An index rests until so many others are free, too, since late packets may name it. Then it is
  /// used before a fresh one, so that a context with few queue pairs uses few pages of the tables.
  static constexpr std::uint32_t kRest = 4096;

  std::uint32_t next = 1;  ///< the lowest index that was never used
  std::uint32_t free = 0;  ///< length of the list of free indices
  std::uint32_t first_free = 0;
  std::uint32_t last_free = 0;
  std::unique_ptr<std::uint16_t[]> next_free;  ///< oldest first
  std::vector<std::uint8_t> generation;
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
  std::uint32_t turn = 0;          ///< index in `awake` at which the next poll starts
  std::unique_ptr<InLane*[]> awake;
  std::unique_ptr<Peer*[]> unacked;
  std::unique_ptr<Peer*[]> acks_due;
  Qp* queue_pairs = nullptr;  ///< by index: see find_queue_pair()
  DirectRound round;
  base::IntrusiveStack<next_held> held;  ///< peers for which a line may be held
  DirectReads reads;
  // Cold.
  Clock clock = Clock::real();
  std::uint64_t last_tick = 0;  ///< see read_clock()
  Driving driving = Driving::by_user;
  bool one_thread = false;  ///< one thread drives all peers: see keep_to_thread()
  // Private copies of what the segment says.
  std::uint64_t nonce = 0;
  std::uint32_t pid = 0;
  ibv_gid gid{};
  ibv_gid shown_gid{};
  std::uint64_t process = 0;  ///< process_word of this process
  PageTrust page_trust = PageTrust::none;
  bool shares_hugepages = false;  ///< has registered some, which peers can take away
  DirectorySlot directory_slot;   ///< empty with Driving::by_user: the context shows its own GID
  std::uint64_t next_pd = 1;
  std::uint32_t self_control = 0;  ///< polls until the next control() in Driving::by_poll
  std::vector<Qp*> waiting;
  base::IntrusiveStack<next_lost> lost;  ///< queue pairs that lost a direct message
  std::vector<std::unique_ptr<Peer>> peers;
  std::vector<std::unique_ptr<InLane>> lanes;  ///< by directory index; null when unused
  std::uint64_t lane_serial = 0;               ///< serial of the newest lane
  std::uint32_t idle_rounds = 64;      ///< control steps without a packet until a lane sleeps
  std::uint64_t lanes_slept = 0;       ///< lanes put to sleep so far
  std::uint64_t datagram_timeout = 0;  ///< ticks that datagrams wait for a stopped receiver
  std::uint64_t datagram_pass = 0;
  std::size_t direct_scan = 0;  ///< the peer that take_lost() checks next
  LaneScan lane_scan;
  Liveness liveness;
  std::uint32_t maps_left = kMapsPerStep;  ///< that packets may cause before the next control step
  bool waits_to_map = false;               ///< a packet needs one more
  RegionSlots regions;
  base::LargeMemory queue_pair_memory;        ///< holds `queue_pairs`
  std::shared_ptr<QueuePairRights[]> rights;  ///< of the queue pairs, by index
  std::shared_ptr<LocalAccesses> accesses;    ///< of this process's contexts to our memory
  std::shared_ptr<WakePipe> wake_pipe;        ///< shared with the peers of this process
  std::uint64_t sleep_serial = 0;             ///< of the last sleep
  QueuePairNumbers numbers;
  std::vector<std::uint32_t> object_users;
  std::vector<ibv_async_event> events;                                       ///< oldest first
  std::array<std::uint64_t, static_cast<std::size_t>(Drop::count)> drops{};  ///< datagrams
  std::shared_ptr<base::SharedMemory> locks;   ///< AtomicLock table of the process
  std::shared_ptr<base::SharedMemory> memory;  ///< holds `segment`; peers of this process share it
  LargeCopies large_copies;
  ibv_device device{};
  std::uint32_t objects_open = 0;  ///< verbs objects not destroyed yet
  std::unique_ptr<Faults> faults;  ///< null without a fault plan
};

inline Peer*& next_held(Peer& peer) noexcept { return peer.next_held; }
inline Qp*& next_lost(Qp& qp) noexcept { return qp.next_lost; }
inline Qp*& next_of_peer(Qp& qp) noexcept { return qp.next_of_peer; }
inline Qp*& next_stalled(Qp& qp) noexcept { return qp.next_stalled; }

inline Context& context_of(ibv_context* c) noexcept {
  return *reinterpret_cast<Context*>(reinterpret_cast<std::byte*>(c) - sizeof(Context::extension));
}

/// The queue pair of an index below kMaxQueuePairs; null: there is none. Its address follows from
/// the index, so that no table has to be read first. A place without a queue pair is zero.
inline Qp* find_queue_pair(const Context& c, std::uint32_t index) noexcept {
  Qp* const qp = c.queue_pairs + index;
  return qp->receives_with != nullptr ? qp : nullptr;
}

/// Calls `visit` with every queue pair. Cold.
template <typename Visit>
void for_each_queue_pair(Context& c, Visit&& visit) {
  for (std::uint32_t i = 0; i < c.numbers.next; ++i) {
    if (Qp* const qp = find_queue_pair(c, i); qp != nullptr) visit(*qp);
  }
}

/// The tick for the device's timers, which keep going if the counter steps back.
inline std::uint64_t read_clock(Context& c) noexcept {
  return c.last_tick = c.clock.now_from(c.last_tick);
}

void raise_event(Context& c, ibv_event_type type, void* element) noexcept;
/// Drops the events of an object that is being destroyed. Cold.
void drop_events(Context& c, const void* element) noexcept;

}  // namespace spinwire::softverbs
