// Injected faults, for tests and simulations. A plan makes a context drop, duplicate, reorder,
// delay, refuse, slow down or fail what it sends, lose packets of connections, and cut links. All
// faults happen on the sending side, by the context's clock, in the thread that drives it. The
// plan, its seed and the request's number since the plan was set decide the faults of a work
// request: the same calls at the same times see the same faults, whatever the addresses, processes
// and wall time. Raising one probability changes no other fault.
//
// A context with a plan has other functions in its ibv_context::ops; one without pays nothing.
#pragma once

#include <infiniband/verbs.h>

#include <chrono>
#include <cstdint>
#include <memory>

#include "spinwire/clock.h"
#include "spinwire/status.h"

namespace spinwire::softverbs {

/// A link that several contexts of one thread share: their plans name it, and together they have
/// its rate, as many senders at one receiver's port. The context that polls first has the next
/// turn.
struct SharedLink;
/// `bytes_per_second` above 0; `burst_bytes` as in a plan. Errors: invalid_argument naming the
/// field; no_memory.
Result<std::shared_ptr<SharedLink>> make_link(std::uint64_t bytes_per_second,
                                              std::uint64_t burst_bytes = 0);

/// Probabilities lie within 0 (never) and 1 (always). The default has no fault.
struct FaultPlan {
  std::uint64_t seed = 0;

  // Datagrams. The send completes when it is posted, whatever becomes of it; what is held is a
  // copy.
  double drop = 0;       ///< probability of being lost
  double duplicate = 0;  ///< of being sent twice, each copy with a delay of its own
  double reorder = 0;    ///< of being overtaken by later ones of its queue pair
  /// By how many: 1 to this many, evenly. Fewer if they do not come before `reorder_timeout`.
  std::uint32_t reorder_distance = 4;
  Nanoseconds reorder_timeout = std::chrono::microseconds(100);
  Nanoseconds datagram_delay_min{0};  ///< evenly between both, each datagram on its own
  Nanoseconds datagram_delay_max{0};
  std::uint32_t held_datagrams = 256;  ///< that wait at a time; what comes while all do is lost

  // Reliable connections, whose order is kept whatever happens.
  /// Probability that a message (what takes a receive) finds its receiver not ready, for which it
  /// is tried again by the queue pair's own timer and count.
  double rnr = 0;
  std::uint32_t rnr_in_a_row = 1;  ///< so many times; more than rnr_retry end the connection
  Nanoseconds delay_min{0};  ///< from posting to sending, evenly between both; a request waits for
  Nanoseconds delay_max{0};  ///< those before it in its queue pair besides
  /// Probability that a packet is lost: of a message, WRITE, READ or atomic, or an answer to one.
  /// Packets behind the lost one are sent again with it: after a round trip if what follows shows
  /// the gap, else after the queue pair's ACK timeout; when retry_cnt tries in a row bring nothing
  /// further, the connection ends with IBV_WC_RETRY_EXC_ERR. The request as a whole happens later
  /// by that. Timeout 0 waits until something follows.
  double packet_loss = 0;
  /// Between a packet and the answer to it, as far as lost ones are concerned.
  Nanoseconds round_trip = std::chrono::microseconds(10);

  // Both.
  /// Payload bytes that all queue pairs together send in a second, those that READ asks for
  /// included; 0: no limit. A request goes out when its last byte would have left.
  std::uint64_t bytes_per_second = 0;
  std::uint64_t burst_bytes = 0;               ///< that may go at once after a time of rest
  std::shared_ptr<SharedLink> link = nullptr;  ///< in the place of both
  /// The n-th work request posted since the plan was set fails, counted from 1; 0: none. A
  /// connection goes to ERR and flushes the rest, datagrams go to SQE.
  std::uint64_t fail_at = 0;
  std::uint32_t fail_queue_pair = 0;  ///< counts the requests of this number's; 0: all
  ibv_wc_status fail_status = IBV_WC_GENERAL_ERR;
};

/// How often each fault was injected since the context got its first plan.
struct FaultStatistics {
  // Datagrams.
  std::uint64_t dropped = 0;
  std::uint64_t duplicated = 0;
  std::uint64_t reordered = 0;          ///< by `reorder`, and overtaken by one at least
  std::uint64_t datagrams_delayed = 0;  ///< copies that were given a delay above 0
  std::uint64_t overflowed = 0;         ///< lost because `held_datagrams` waited
  std::uint64_t abandoned = 0;  ///< lost with their queue pair, which was reset or destroyed
  std::uint64_t cut = 0;        ///< lost on a link that was down, in either direction
  // Connections.
  std::uint64_t rnr = 0;             ///< negative answers
  std::uint64_t delayed = 0;         ///< work requests that were given a delay above 0
  std::uint64_t timeouts = 0;        ///< of work requests on a link that was down
  std::uint64_t packets_lost = 0;    ///< answers included; not those sent in vain behind one
  std::uint64_t packets_resent = 0;  ///< the lost ones, and those that were sent in vain
  std::uint64_t loss_timeouts = 0;   ///< losses that only the ACK timeout has shown
  // Both.
  std::uint64_t failed = 0;  ///< by `fail_at`
  std::uint64_t bytes = 0;   ///< of payload that left, each try counted
};

enum class LinkState : std::uint8_t { up, down };

/// Sets or replaces the context's plan. Work requests that were posted before keep their faults,
/// and the count of work requests starts anew. Errors: invalid_argument naming the field;
/// no_memory.
Result<void> set_faults(ibv_context* context, const FaultPlan& plan);
/// Work requests to that peer use this plan's probabilities and delays; everything else, the seed
/// included, is the context's. A context without a plan gets the default one.
/// Errors: as above, and for more than 4096 such peers limit.
Result<void> set_faults(ibv_context* context, const ibv_gid& peer, const FaultPlan& plan);
/// Removes the plan: links are up, and everything held is sent at once.
void clear_faults(ibv_context* context) noexcept;
[[nodiscard]] FaultStatistics fault_statistics(ibv_context* context) noexcept;
/// The tick of the context's clock at which the next held packet or retry is due. The largest
/// number if nothing waits.
[[nodiscard]] std::uint64_t next_due(ibv_context* context) noexcept;

/// Cuts or restores a link, in both directions; the other end needs no plan. Messages sent before
/// still reach the peer, unanswered. While the link is down nothing passes: connections retry by
/// their timeouts and retry counts, and end with IBV_WC_RETRY_EXC_ERR; datagrams are lost. A link
/// is up when none of the three calls has it down. 0 or an errno value. A context without a plan
/// gets the default one.
///
/// One connection's: EINVAL for a queue pair of datagrams or one that is not connected.
int set_link(ibv_qp* qp, LinkState state) noexcept;
/// All that passes between the context and the one with this GID, now and later.
int set_link(ibv_context* context, const ibv_gid& peer, LinkState state) noexcept;
/// All that passes between the context and any other.
int set_links(ibv_context* context, LinkState state) noexcept;

}  // namespace spinwire::softverbs
