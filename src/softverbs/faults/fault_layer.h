// The layer between the user of a context with a fault plan and the plain functions. Cold.
//
// Connections: work requests lie in the send queue as always, but the queue pair's sq_head covers
// only those that may be sent; QueueFaults::posted is the user's position. The plain code handles
// room, inline bytes, order and flushes. Datagrams complete when posted and wait as copies.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "base/random.h"
#include "softverbs/faults/fault_plan.h"
#include "softverbs/objects.h"

namespace spinwire::softverbs {

inline constexpr std::uint64_t kNever = INT64_MAX;  ///< nanoseconds of the clock
inline constexpr std::uint32_t kNoLoss = ~std::uint32_t{0};

/// The packets of a work request that loses some of them. Each try begins at the first packet that
/// did not arrive; its losses are drawn when the try begins.
struct Loss {
  base::Random random{0};
  double probability = 0;        ///< 0: nothing is lost, and the rest means nothing
  std::uint64_t round_trip = 0;  ///< nanoseconds
  std::uint32_t packets = 0;     ///< with its data
  std::uint32_t through = 0;     ///< of those
  std::uint32_t next = kNoLoss;  ///< that this try loses; `packets`: the answer, or READ's request
  std::uint32_t tries = 0;       ///< in a row that brought nothing further
  std::uint64_t since = 0;       ///< when the last one was lost, nanoseconds
  std::uint64_t again = 0;       ///< packets that have to be sent again for it
  bool happened = false;
  bool answer = false;     ///< what was lost was the answer: the data is there
  bool silent = false;     ///< nothing has shown it: the ACK timeout will
  bool exhausted = false;  ///< that was the last try
};

/// The faults of a work request in the send queue.
struct HeldWr {
  std::uint64_t ready;   ///< when it may go, in nanoseconds of the clock
  std::uint64_t order;   ///< among all that is held
  std::uint32_t rnr;     ///< negative answers still to come
  ibv_wc_status status;  ///< that it fails with, if not success
  Loss loss;
};

/// Of one queue pair.
struct QueueFaults {
  std::unique_ptr<HeldWr[]> held;  ///< by send-queue slot; of connections only
  std::uint32_t posted = 0;        ///< next to be posted
  std::uint64_t count = 0;         ///< work requests since the plan was set
  std::uint64_t last_ready = 0;    ///< of the one posted last
  std::uint64_t not_before = 0;    ///< the first that waits was kept from going until then
  std::uint64_t expected = 0;      ///< Qp::expected for when the link is up again
  bool busy = false;               ///< listed in Faults::busy
  bool link_down = false;          ///< its own
  bool cut = false;                ///< its own or its peer's, in force
};

struct HeldDatagram {
  Qp* qp = nullptr;
  Ah way;
  ibv_send_wr wr{};
  std::uint32_t length = 0;
  std::uint32_t overtakers = 0;  ///< that it still waits for
  bool overtaken = false;
  std::uint64_t delayed_until = 0;
  std::uint64_t ready = 0;  ///< `delayed_until`, or the end of reorder_timeout
  std::uint64_t order = 0;
};

/// The limit of bytes per second: when a link of that rate has sent all that was given to it, to
/// a fraction of a nanosecond.
struct Pace {
  std::uint64_t rate = 0;
  std::uint64_t burst = 0;     ///< nanoseconds
  std::uint64_t end = 0;       ///< nanoseconds
  std::uint64_t fraction = 0;  ///< and so many parts of `rate`
};

struct SharedLink {
  Pace pace;
};

/// For what is posted to one peer.
struct PeerPlan {
  ibv_gid peer;
  FaultPlan plan;
};

struct Faults {
  FaultPlan plan;
  std::vector<PeerPlan> peer_plans;
  FaultStatistics statistics;
  Pace own_pace;
  Pace* pace = &own_pace;    ///< or the shared link's
  std::uint64_t number = 0;  ///< work requests since the plan was set
  std::uint64_t order = 0;
  std::vector<Qp*> busy;  ///< connections with work that waits
  bool all_down = false;
  std::vector<ibv_gid> peers_down;
  // Datagrams that wait.
  std::vector<HeldDatagram> slots;
  std::unique_ptr<std::byte[]> bytes;  ///< kDatagramBytes per slot
  std::vector<std::uint32_t> free;
  std::vector<std::uint32_t> heap;  ///< the next to go first
};

/// Errors: invalid_argument naming the field.
Result<void> check(const FaultPlan& plan);
Result<void> check_rate(std::uint64_t bytes_per_second, std::uint64_t burst_bytes);
/// The random faults of one work request.
struct Fate {
  bool drop, duplicate, rnr;
  std::uint32_t overtakers;
  std::uint64_t delay[2];
};
/// Depends on the plan and `number` only.
Fate draw(const FaultPlan& plan, std::uint64_t number, Nanoseconds delay_min,
          Nanoseconds delay_max) noexcept;
/// The plan for requests to a peer.
const FaultPlan& plan_for(const Faults& faults, const ibv_gid& peer) noexcept;
/// Counts a work request; the status that the plan has it fail with, or success.
ibv_wc_status count_request(Faults& faults, const Qp& qp) noexcept;

std::uint64_t now_in_ns(const Context& c) noexcept;

/// Sends whatever may go by now.
void run_faults(Context& c) noexcept;
/// Sends all that is held, whatever it waits for.
void release_all(Context& c) noexcept;

// Connections: rc_faults.cc.
int post_connected_with_faults(Qp& qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept;
/// Applies a change of the queue pair: ERR, the peer gone, the link down.
void sync_queue(Qp& qp, std::uint64_t now) noexcept;
/// Whether its next work request may go when it is ready.
bool is_sendable(const Qp& qp) noexcept;
/// Sends the next work request as of time `at`, or applies its fault.
void dispatch_next(Qp& qp, std::uint64_t at) noexcept;
/// Whether anything waits.
bool has_held(const Qp& qp) noexcept;
void list_busy(Faults& faults, Qp& qp) noexcept;

// Packets that connections lose: rc_packet_loss.cc.
/// Decides what the first try of a work request, of that number, will lose.
void plan_loss(const FaultPlan& plan, std::uint64_t number, const Qp& qp,
               std::uint32_t position) noexcept;
/// Payload bytes of the next try of its next work request.
std::uint64_t bytes_to_leave(const Qp& qp) noexcept;
/// This try of its next work request loses a packet, at that time.
void lose_packet(Qp& qp, std::uint64_t at) noexcept;
/// Checks whether a newly posted work request exposes an earlier loss.
void expose_loss(Qp& qp, std::uint32_t position) noexcept;
/// Another try begins, or the last one is over.
void begin_retry(Qp& qp) noexcept;
/// Charges the link for bytes that are sent in vain.
void charge_wasted(Faults& faults, std::uint64_t at, std::uint64_t bytes) noexcept;

// Datagrams: ud_faults.cc.
/// Draws the faults of a checked datagram and holds a copy. Success, or the status that the plan
/// fails it with.
ibv_wc_status hold_datagram(Qp& qp, const ibv_send_wr& wr, std::uint32_t length) noexcept;
/// Sends the next one.
void send_held(Context& c) noexcept;
/// Drops the held datagrams of a queue pair.
void drop_held(Faults& faults, const Qp& qp) noexcept;
/// Makes room for so many. May throw std::bad_alloc.
void reserve_datagrams(Faults& faults, std::uint32_t count);

// Links: link_faults.cc.
bool is_down(const Faults& faults, const ibv_gid& peer) noexcept;
/// Applies the state of its link to a connection.
void update_link(Qp& qp) noexcept;
/// Discards the packets in lanes of peers whose links are down.
void sweep_lanes(Context& c) noexcept;
/// Wakes the lanes whose links are up.
void wake_restored(Context& c) noexcept;

// For the life of queue pairs.
/// A new queue pair of a context with a plan. May throw std::bad_alloc.
void attach_queue(Context& c, Qp& qp);
void queue_connected(Qp& qp) noexcept;
/// It drops what is outstanding.
void queue_reset(Qp& qp) noexcept;

}  // namespace spinwire::softverbs
