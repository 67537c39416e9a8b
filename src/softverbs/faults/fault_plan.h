// Injected faults, for tests and simulations. A plan makes a context drop, duplicate, reorder,
// delay, refuse, slow down or fail its requests, and lose packets of connections; links can be cut.
// All faults happen on the sending side, by the context's clock, in the thread that drives it. The
// plan, its seed and the request's number since the plan was set decide a work request's faults. So
// equal calls at equal times see equal faults, independent of addresses, processes and wall time.
// Raising one probability changes no other fault.
//
// A context with a plan has other functions in its ibv_context::ops; a context without one pays
// nothing.
#pragma once

#include <infiniband/verbs.h>

#include <chrono>
#include <cstdint>
#include <memory>

#include "spinwire/clock.h"
#include "spinwire/status.h"

namespace spinwire::softverbs {

/// A link that several contexts of one thread share by naming it in their plans. Together they have
/// its rate, like many senders to one receiver's port. The context that polls first sends next.
struct SharedLink;
/// Makes a link; `bytes_per_second` must be above 0, `burst_bytes` is as in a plan. Errors:
/// invalid_argument naming the field; no_memory.
Result<std::shared_ptr<SharedLink>> make_link(std::uint64_t bytes_per_second,
                                              std::uint64_t burst_bytes = 0);

/// Probabilities are from 0 (never) to 1 (always). The default plan has no faults.
struct FaultPlan {
  std::uint64_t seed = 0;

  // Datagrams. A send completes when it is posted, whatever its faults; the layer holds a copy.
  double drop = 0;       ///< probability that a datagram is lost
  double duplicate = 0;  ///< that it is sent twice, each copy with its own delay
  double reorder = 0;    ///< that later datagrams of its queue pair overtake it
  /// Number of overtaking datagrams: 1 to this many, uniformly. Fewer if not enough are sent within
  /// `reorder_timeout`.
  std::uint32_t reorder_distance = 4;
  Nanoseconds reorder_timeout = std::chrono::microseconds(100);
  Nanoseconds datagram_delay_min{0};  ///< uniformly between both, for each datagram
  Nanoseconds datagram_delay_max{0};
  std::uint32_t held_datagrams = 256;  ///< datagrams that wait at a time; more are lost

  // Reliable connections. Their order is always kept.
  /// Probability that a request which consumes a receive finds its receiver not ready. It is
  /// retried by the queue pair's own RNR timer and count.
  double rnr = 0;
  std::uint32_t rnr_in_a_row = 1;  ///< RNR answers in a row; more than rnr_retry end the connection
  Nanoseconds delay_min{0};  ///< from posting to sending, uniformly between both; a request also
  Nanoseconds delay_max{0};  ///< waits for earlier ones of its queue pair
  /// Probability that a packet of a message, WRITE, READ or atomic, or of its response, is lost.
  /// The lost packet and those behind it are sent again: after a round trip if later packets expose
  /// the gap, else after the queue pair's ACK timeout. After retry_cnt tries without progress the
  /// connection ends with IBV_WC_RETRY_EXC_ERR. The whole request is delayed by the retries.
  /// Timeout 0 waits until later packets expose the gap.
  double packet_loss = 0;
  /// Time between a packet and its answer; only used for lost packets.
  Nanoseconds round_trip = std::chrono::microseconds(10);

  // Datagrams and connections.
  /// Payload bytes that all queue pairs together send per second, including the data of READs; 0:
  /// no limit. A request is sent when its last byte would have left.
  std::uint64_t bytes_per_second = 0;
  std::uint64_t burst_bytes = 0;               ///< may be sent at once after an idle time
  std::shared_ptr<SharedLink> link = nullptr;  ///< replaces `bytes_per_second` and `burst_bytes`
  /// The n-th work request posted since the plan was set fails, counted from 1; 0: none. A
  /// connection goes to ERR and flushes the rest, datagrams go to SQE.
  std::uint64_t fail_at = 0;
  std::uint32_t fail_queue_pair = 0;  ///< count only this queue pair's requests; 0: all
  ibv_wc_status fail_status = IBV_WC_GENERAL_ERR;
};

/// Number of injected faults since the context got its first plan.
struct FaultStatistics {
  // Datagrams.
  std::uint64_t dropped = 0;
  std::uint64_t duplicated = 0;
  std::uint64_t reordered = 0;          ///< by `reorder`, and overtaken at least once
  std::uint64_t datagrams_delayed = 0;  ///< copies with a delay above 0
  std::uint64_t overflowed = 0;         ///< lost because `held_datagrams` waited
  std::uint64_t abandoned = 0;          ///< lost when their queue pair was reset or destroyed
  std::uint64_t cut = 0;                ///< lost on a link that was down, in either direction
  // Connections.
  std::uint64_t rnr = 0;                    ///< negative answers
  std::uint64_t delayed = 0;                ///< work requests with a delay above 0
  std::uint64_t timeouts = 0;               ///< ACK timeouts on links that were down
  std::uint64_t packets_lost = 0;           ///< responses included; not those sent in vain
  std::uint64_t packets_retransmitted = 0;  ///< lost packets, and those sent in vain
  std::uint64_t loss_timeouts = 0;          ///< losses that only the ACK timeout detected
  // Datagrams and connections.
  std::uint64_t failed = 0;  ///< by `fail_at`
  std::uint64_t bytes = 0;   ///< payload bytes sent, counting each try
};

enum class LinkState : std::uint8_t { up, down };

/// Sets or replaces the context's plan. Work requests posted before keep their faults; the count of
/// work requests starts again. Errors: invalid_argument naming the field; no_memory.
Result<void> set_faults(ibv_context* context, const FaultPlan& plan);
/// Sets the probabilities and delays of work requests to a peer, named by the GID of either port;
/// all else, the seed included, comes from the context's plan. A context without a plan gets the
/// default one. Errors: invalid_argument naming the field; no_memory; limit above 4096 such peers.
Result<void> set_faults(ibv_context* context, const ibv_gid& peer, const FaultPlan& plan);
/// Removes the plan: restores all links, and sends all held work at once.
void clear_faults(ibv_context* context) noexcept;
[[nodiscard]] FaultStatistics fault_statistics(ibv_context* context) noexcept;
/// The tick of the context's clock at which the next held packet or retry is due; UINT64_MAX if
/// nothing waits.
[[nodiscard]] std::uint64_t next_due(ibv_context* context) noexcept;
/// Whether a packet waits in a lane whose link is up. A context that sleeps has been woken then.
/// For simulations; the context has a plan.
[[nodiscard]] bool has_waiting_packet(ibv_context* context) noexcept;
/// Receives of a queue pair that its program has not got back: posted, or completed and not polled.
/// `is_receive` tells them from the wr_id of other completions.
[[nodiscard]] std::uint32_t unreported_receives(const ibv_qp& qp,
                                                bool (*is_receive)(std::uint64_t wr_id)) noexcept;

/// The next five cut or restore a link in both directions; the other end needs no plan. Messages
/// sent before still reach the peer, unanswered. While the link is down, nothing passes:
/// connections retry by their timeouts and retry counts, and end with IBV_WC_RETRY_EXC_ERR;
/// datagrams are lost. A link is up if none of the five calls has it down. The calls return 0 or
/// an errno value. A context without a plan gets the default one.
///
/// The link of one connection. EINVAL for a datagram queue pair or one that is not connected.
int set_link(ibv_qp* qp, LinkState state) noexcept;
/// All present and later traffic between the context and the one with this GID, of either port.
int set_link(ibv_context* context, const ibv_gid& peer, LinkState state) noexcept;
/// All traffic between the context and any other.
int set_links(ibv_context* context, LinkState state) noexcept;
/// The connections through a port, which also changes its state and raises its event. Datagrams
/// pass. EINVAL if there is no such port.
int set_port(ibv_context* context, std::uint8_t port, LinkState state) noexcept;
/// The connections through a port whose link stays up, as behind a switch that has failed: nothing
/// tells the program. Datagrams pass. EINVAL if there is no such port.
int set_port_silence(ibv_context* context, std::uint8_t port, bool is_silent) noexcept;

}  // namespace spinwire::softverbs
