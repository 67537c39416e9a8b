// The layer that applies a context's fault plan, between the user and the plain functions. Cold.
//
// Connections: work requests are in the send queue as usual, but the queue pair's sq_head covers
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

/// The lost packets of a work request. Each try begins at the first packet that did not arrive; its
/// losses are drawn when it begins.
struct Loss {
  base::Random random{0};
  double probability = 0;        ///< 0: nothing is lost, and the other members are unused
  std::uint64_t round_trip = 0;  ///< nanoseconds
  std::uint32_t packets = 0;     ///< number of packets with the request's data
  std::uint32_t through = 0;     ///< packets that have arrived
  std::uint32_t next = kNoLoss;  ///< packet that this try loses; `packets`: the response, or READ's
                                 ///< request
  std::uint32_t tries = 0;       ///< consecutive tries without progress
  std::uint64_t since = 0;       ///< time of the last loss, nanoseconds
  std::uint64_t again = 0;       ///< packets to be sent again because of it
  bool happened = false;
  bool answer = false;     ///< the response was lost; the data has arrived
  bool silent = false;     ///< only the ACK timeout will detect the loss
  bool exhausted = false;  ///< the last try has failed
};

/// The faults of a work request in the send queue.
struct HeldWr {
  std::uint64_t ready;   ///< time at which it may be sent, nanoseconds of the clock
  std::uint64_t order;   ///< position among all held requests and datagrams
  std::uint32_t rnr;     ///< RNR answers still to inject
  ibv_wc_status status;  ///< injected failure, or success
  Loss loss;
};

/// The fault layer's state of a queue pair.
struct QueueFaults {
  std::unique_ptr<HeldWr[]> held;  ///< by send-queue slot; connections only
  std::uint32_t posted = 0;        ///< next to be posted
  std::uint64_t count = 0;         ///< work requests since the plan was set
  std::uint64_t last_ready = 0;    ///< `ready` of the newest work request
  std::uint64_t not_before = 0;    ///< the first waiting work request was blocked until then
  std::uint64_t expected = 0;      ///< Qp::expected to restore when the link is up again
  bool in_held_work_list = false;  ///< listed in Faults::with_held_work
  bool link_down = false;          ///< set_link() for this queue pair
  bool cut = false;                ///< this link or the peer's is down, and the cut is applied
};

struct HeldDatagram {
  Qp* qp = nullptr;
  Ah way;
  ibv_send_wr wr{};
  std::uint32_t length = 0;
  std::uint32_t overtakers = 0;  ///< later datagrams to wait for
  bool overtaken = false;
  std::uint64_t delayed_until = 0;
  std::uint64_t ready = 0;  ///< `delayed_until`, or the end of reorder_timeout
  std::uint64_t order = 0;
};

/// The limit of bytes per second. `end` and `fraction`: when a link of this rate has sent all bytes
/// given to it.
struct Pace {
  std::uint64_t rate = 0;
  std::uint64_t burst = 0;     ///< nanoseconds
  std::uint64_t end = 0;       ///< nanoseconds
  std::uint64_t fraction = 0;  ///< rest of `end`, in units of 1 / `rate` nanoseconds
};

struct SharedLink {
  Pace pace;
};

/// The plan for requests to one peer.
struct PeerPlan {
  ibv_gid peer;
  FaultPlan plan;
};

struct Faults {
  FaultPlan plan;
  std::vector<PeerPlan> peer_plans;
  FaultStatistics statistics;
  Pace own_pace;
  Pace* pace = &own_pace;    ///< `own_pace`, or the shared link's
  std::uint64_t number = 0;  ///< work requests since the plan was set
  std::uint64_t order = 0;
  std::vector<Qp*> with_held_work;  ///< connections with waiting work
  bool all_down = false;
  unsigned ports_down = 0;    ///< a bit for each port
  unsigned ports_silent = 0;  ///< a bit for each port: its link is up, but connections get nothing
  std::vector<ibv_gid> peers_down;
  // Waiting datagrams.
  std::vector<HeldDatagram> slots;
  std::unique_ptr<std::byte[]> bytes;  ///< kDatagramBytes per slot
  std::vector<std::uint32_t> free;
  std::vector<std::uint32_t> heap;  ///< next due first
};

/// Errors: invalid_argument naming the field.
Result<void> check(const FaultPlan& plan);
Result<void> check_rate(std::uint64_t bytes_per_second, std::uint64_t burst_bytes);
/// The random faults of one work request.
struct RequestFaults {
  bool drop, duplicate, rnr;
  std::uint32_t overtakers;
  std::uint64_t delay[2];
};
/// Draws the faults of a request; depends only on the plan and `number`.
RequestFaults draw_faults(const FaultPlan& plan, std::uint64_t number, Nanoseconds delay_min,
                          Nanoseconds delay_max) noexcept;
/// The plan for requests to a peer.
const FaultPlan& plan_for(const Faults& faults, const ibv_gid& peer) noexcept;
/// Counts a work request. Returns the status that the plan makes it fail with, or success.
ibv_wc_status count_request(Faults& faults, const Qp& qp) noexcept;

std::uint64_t now_in_ns(const Context& c) noexcept;

/// Sends all that is due.
void run_faults(Context& c) noexcept;
/// Sends all that is held, due or not.
void release_all(Context& c) noexcept;

// Connections: rc_faults.cc.
int post_connected_with_faults(Qp& qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept;
/// Applies a change of the queue pair: ERR, the peer gone, the link down.
void sync_queue(Qp& qp, std::uint64_t now) noexcept;
/// Whether the queue pair's next work request may be sent once it is ready.
bool is_sendable(const Qp& qp) noexcept;
/// Sends the next work request at time `at`, or applies its fault.
void dispatch_next(Qp& qp, std::uint64_t at) noexcept;
/// Whether the queue pair has waiting work.
bool has_held(const Qp& qp) noexcept;
void list_busy(Faults& faults, Qp& qp) noexcept;

// Lost packets of connections: rc_packet_loss.cc.
/// Draws the losses of the first try of work request `number`.
void plan_loss(const FaultPlan& plan, std::uint64_t number, const Qp& qp,
               std::uint32_t position) noexcept;
/// Payload bytes of the next try of the queue pair's next work request.
std::uint64_t bytes_to_leave(const Qp& qp) noexcept;
/// Loses a packet in this try of the next work request, at time `at`.
void drop_packet(Qp& qp, std::uint64_t at) noexcept;
/// Checks whether a newly posted work request exposes an earlier loss.
void expose_loss(Qp& qp, std::uint32_t position) noexcept;
/// Begins another try, or ends the last one.
void begin_retry(Qp& qp) noexcept;
/// Charges the link for bytes sent in vain.
void charge_wasted(Faults& faults, std::uint64_t at, std::uint64_t bytes) noexcept;

// Datagrams: ud_faults.cc.
/// Draws the faults of a checked datagram: drops it, or holds copies until they are due. Returns
/// success, or the status that the plan makes it fail with.
ibv_wc_status inject_datagram_faults(Qp& qp, const ibv_send_wr& wr, std::uint32_t length) noexcept;
/// Sends the next due datagram.
void send_held(Context& c) noexcept;
/// Discards the held datagrams of a queue pair.
void discard_held(Faults& faults, const Qp& qp) noexcept;
/// Makes room for `count` datagrams. May throw std::bad_alloc.
void reserve_datagrams(Faults& faults, std::uint32_t count);

// Links: link_faults.cc.
bool is_down(const Faults& faults, const ibv_gid& peer) noexcept;
inline bool is_port_down(const Faults& faults, std::uint8_t port) noexcept {
  return (faults.ports_down >> port & 1) != 0;
}
inline bool is_port_silent(const Faults& faults, std::uint8_t port) noexcept {
  return (faults.ports_silent >> port & 1) != 0;
}
/// Applies the state of its link to a connection.
void update_link(Qp& qp) noexcept;
/// Discards the packets in lanes of peers whose links are down.
void sweep_lanes(Context& c) noexcept;
/// Wakes the lanes whose links are up.
void wake_restored(Context& c) noexcept;

// Called when queue pairs are made, connected and reset.
/// Adds the fault layer's state to a queue pair. May throw std::bad_alloc.
void attach_queue(Context& c, Qp& qp);
void queue_connected(Qp& qp) noexcept;
/// Drops outstanding work.
void queue_reset(Qp& qp) noexcept;

}  // namespace spinwire::softverbs
