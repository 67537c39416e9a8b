// The embedded device's verbs objects: each begins with the libibverbs struct that its user holds.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "base/direct_datagrams.h"
#include "base/shared_memory.h"
#include "base/unique_fd.h"
#include "softverbs/lane/segment.h"
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
};

/// A peer's access to our memory that was under way when a key died.
struct BusyLane {
  std::uint32_t lane;
  std::uint64_t word;
};

struct Mr : ibv_mr {
  std::uint32_t index = 0;
  bool dead = false;           ///< being deregistered: the key is no more
  std::vector<BusyLane> busy;  ///< then: who may still be at it
};

/// Completions wait in a private ring, but go straight into the array of the ibv_poll_cq that is
/// under way on this queue while that has room and nothing older waits.
struct Cq : ibv_cq {
  ibv_wc* out = nullptr;
  std::uint32_t room = 0;  ///< left at `out`
  std::uint32_t head = 0;
  std::uint32_t tail = 0;
  std::uint32_t mask = 0;
  bool overrun = false;
  std::uint32_t solicited = 0;  ///< completions so far that were, or told of errors
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
  std::uint32_t limit = 0;     ///< of a shared one: tell when fewer are left; 0: do not
  std::uint32_t withheld = 0;  ///< then: entries behind `tail` that only take_from_limit gives
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

/// The way to another context, for datagrams.
struct Ah : ibv_ah {
  Peer* peer = nullptr;
  std::uint32_t version_class_flow = 0;  ///< first word of the route header, in network order
  std::uint8_t hop_limit = 0;
  bool plain = true;  ///< no class or flow, kUsualHops: the receiver knows the header without
};

/// Why a datagram went nowhere.
enum class Drop : std::uint8_t {
  peer_gone,      ///< here: the receiver died or closed
  no_room,        ///< here: the receiver stands still
  malformed,      ///< there: not a datagram as we send them
  no_queue_pair,  ///< there: no such queue pair, of another kind, or not in a state to receive
  wrong_key,      ///< there: another Q_Key
  no_receive,     ///< there: none posted
  too_long,       ///< there: longer than the receive
  count
};

/// A posted send work request; kept, inline bytes included, until it is acknowledged. Of datagrams,
/// those that wait for room.
struct alignas(64) SendWr {
  std::uint64_t wr_id;
  union {
    std::uint64_t lane_end;  ///< packets: lane position after the last line
    std::uint64_t swap;
    std::uint64_t bind_length;
    Peer* receiver;  ///< of a datagram; null once it went out, or was dropped
  };
  std::uint32_t length;
  std::uint8_t opcode;
  std::uint8_t flags;       ///< IBV_SEND_*
  std::uint16_t sge_count;  ///< kInLane: the bytes are nowhere but in the lane
  ibv_sge first;            ///< the only element, if sge_count is 1; else all are in Qp::sq_sges
  std::uint64_t remote_address;  ///< of a datagram: the remote number, and above it the Q_Key
  std::uint32_t rkey;
  std::uint32_t imm;
  std::uint64_t compare_add;  ///< of a datagram: what its address handle says

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
/// A short inline message: its lines keep the bytes until the peer's answer to them is known, and
/// should that be a negative one they are fetched from there.
inline constexpr std::uint16_t kInLane = 0xffff;

/// Twice the lane: what was consumed is being handled while its room is written again.
inline constexpr std::uint32_t kInFlight = 2 * kLaneLines;

/// Packets of one queue pair in a row whose lines were not yet seen consumed, up to and including
/// the first signaled one: they complete together.
struct InFlight {
  std::uint64_t end;  ///< lane position after the last of them
  std::uint32_t qpn;
  std::uint32_t sq_end;  ///< send-queue position after the last of them
  std::uint16_t epoch;   ///< of the transmission; retransmitting bumps the queue pair's
};

/// The lane towards a peer, in the peer's segment.
struct OutLane : base::DirectLane {
  LaneControl* control = nullptr;
  std::uint64_t head = 0;   ///< consumed by the peer, as far as applied
  std::uint64_t acked = 0;  ///< the same, as packets told of it: to be applied by the next poll
  /// What `tail` may not pass: head + kLaneLines, or less while queue pairs wait for room, so that
  /// nobody gets ahead of them.
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
  /// While head is below it, an acknowledgement could cover a packet that was not taken: the sender
  /// has to look at the lane's own words.
  std::uint64_t silent_until = 0;
  Line* lines = nullptr;
  LaneControl* control = nullptr;
  Peer* peer = nullptr;  ///< null until we know the sender
  std::uint32_t index = 0;
  std::uint32_t idle_rounds = 0;   ///< control steps without a packet
  std::uint64_t control_head = 0;  ///< head at the last control step
  bool awake = false;
  bool told = false;         ///< the first lines are in a DirectRun
  ibv_grh route{};           ///< in front of a plain datagram, but for its length
  std::uint64_t serial = 0;  ///< no other lane of the context, at any time, has it
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
  bool gone = false;     ///< died or closed
  bool unacked = false;  ///< listed in Context::unacked
  bool noted = false;    ///< listed in Context::noted
  bool holds = false;    ///< a line may be held
  std::uint32_t users = 0;
  Qp* queue_pairs = nullptr;   ///< connected to it
  Qp* stalled = nullptr;       ///< waiting for room in `out`, first come, first served
  const Qp* run_of = nullptr;  ///< whose packets the last in-flight record still takes
  Qp* stalled_last = nullptr;
  Peer* next_held = nullptr;  ///< with `holds`, behind Context::held_first
  // Datagrams that wait for room in `out`: see ud_send_queue.cc.
  const Qp* datagram_turn = nullptr;  ///< whose datagram is the next
  const Qp* datagram_next = nullptr;  ///< who has the turn after it
  std::uint64_t turn_began = 0;       ///< ticks
  std::uint64_t patience = 0;         ///< ticks that they may still wait
  std::uint64_t patience_head = 0;    ///< of `out`, when patience was counted last
  std::uint64_t full_in_pass = 0;     ///< Context::datagram_pass that found no room
  std::uint32_t datagrams_waiting = 0;
  std::vector<MappedObject> objects;
  ibv_gid gid{};
  std::uint32_t pid = 0;
  base::UniqueFd pidfd;
  std::shared_ptr<base::SharedMemory> local;  ///< keeps `segment` mapped, if in this process
};

/// A registration that was found good for a queue pair, as long as none was ended since.
struct KnownRegion {
  std::uint32_t key = 0;
  std::uint32_t epoch = 0;
  std::uint64_t begin = 0;
  std::uint64_t size = 0;
};

/// Who may be in an access to our memory through a queue pair.
enum class Within : std::uint8_t {
  nobody,   ///< it does not answer, and all have left
  anybody,  ///< it answers, or did until now
  noted,    ///< what they are not to use any more has ended; then the peer was at Qp::busy
};

inline constexpr std::uint64_t kNeverExpected = ~std::uint64_t{0};
inline constexpr std::uint64_t kExpectedMask = (std::uint64_t{1} << 48) - 1;

struct Qp : ibv_qp, base::DirectSender {
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
  KnownRegion readable;  ///< that the last message sent lay in
  std::uint32_t next_psn = 0;
  std::uint16_t epoch = 0;      ///< bumped when the queue goes back to retransmit
  std::uint8_t signal_all = 0;  ///< IBV_SEND_SIGNALED with sq_sig_all
  bool waiting = false;         ///< for a retry timer
  bool stalled = false;
  bool open = false;  ///< RTS, not waiting, the peer alive: packets may go out
  std::uint16_t retries = 0;
  std::uint16_t rnr_retries = 0;
  // Receive side.
  ReceiveQueue* receives = nullptr;
  base::DirectRuns* direct = nullptr;  ///< where short datagrams are told of
  KnownRegion writable;                ///< that the last receive lay in
  /// psn << 24 | number of the next packet, as in a line's word; kNeverExpected unless RTR or RTS.
  std::uint64_t expected = kNeverExpected;
  bool nak_given = false;
  QueuePairEntry* entry = nullptr;
  ReceiveQueue own_receives;
  // Rarely touched.
  std::uint64_t retry_at = 0;
  std::uint32_t naks_handled = 0;
  std::uint32_t windows = 0;  ///< bound to this queue pair
  Within within = Within::nobody;
  bool rights_taken = false;  ///< and the peer was not yet seen to have left them
  BusyLane busy{};
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

/// Entries of the region table. Those given back are used again oldest first and only when there
/// are many, so that a stale key stays recognisable for as long as its generation bits allow.
struct RegionSlots {
  struct Slot {
    std::uint32_t generation = 0;
    std::uint32_t next = 0;     ///< free entries; 0 ends
    std::uint32_t windows = 0;  ///< bound to this region
    Mw* window = nullptr;       ///< that has this entry
  };
  std::vector<Slot> slots = std::vector<Slot>(1);  ///< those ever used; entry 0 never is
  std::uint32_t first_free = 0;
  std::uint32_t last_free = 0;
  std::uint32_t free = 0;
};

/// Why a poll has to look further than at the lanes; one word, so that one compare tells of
/// nothing.
struct alignas(8) Pending {
  std::uint16_t unacked = 0;    ///< peers in Context::unacked
  std::uint16_t noted = 0;      ///< peers in Context::noted
  std::uint32_t attention = 0;  ///< timers, completions in rings, control() to be called
};

/// One opened device. One thread drives it.
struct Context {
  /// What libibverbs finds before an ibv_context that says it is extended; ours does not, unless
  /// who opened it makes it so.
  alignas(verbs_context) std::byte extension[offsetof(verbs_context, context)]{};
  ibv_context verbs{};  ///< users hold its address
  // Hot.
  Segment* segment = nullptr;
  std::uint32_t awake_count = 0;
  Pending pending;
  std::int32_t ack_patience = 0;   ///< polls until acknowledgements are looked for in the lanes
  std::uint32_t region_epoch = 1;  ///< bumped when a registration ends
  std::uint32_t turn = 0;          ///< the awake lane that the next poll looks at first
  std::unique_ptr<InLane*[]> awake;
  std::unique_ptr<Peer*[]> unacked;
  std::unique_ptr<Peer*[]> noted;
  std::unique_ptr<Qp*[]> queue_pairs;  ///< by index
  Peer* held_first = nullptr;          ///< those for which a line may be held
  // Cold.
  Clock clock = Clock::real();
  Driving driving = Driving::by_user;
  bool one_thread = false;  ///< drives all peers as well: see keep_to_thread()
  std::uint64_t nonce = 0;
  std::uint64_t process = 0;  ///< process_word of ours
  std::uint64_t next_pd = 1;
  std::uint32_t self_control = 0;  ///< polls until the next control() in Driving::by_poll
  std::vector<Qp*> waiting;
  std::vector<std::unique_ptr<Peer>> peers;
  std::vector<std::unique_ptr<InLane>> lanes;  ///< by directory index; null when unused
  std::uint32_t lane_scan = 0;
  std::uint64_t lane_serial = 0;   ///< of the lane that was made last
  std::uint32_t idle_rounds = 64;  ///< control steps without a packet until a lane goes to sleep
  std::uint64_t naps = 0;          ///< lanes put to sleep so far
  std::uint64_t datagram_patience = 0;  ///< ticks: most that they wait for a peer that stands still
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

void raise_event(Context& c, ibv_event_type type, void* element) noexcept;
/// Forgets the events of an object that is being destroyed. Cold.
void drop_events(Context& c, const void* element) noexcept;

}  // namespace spinwire::softverbs
