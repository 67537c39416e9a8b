// Unreliable datagrams. Posting writes them into the receiver's lane. While the lane is full, they
// wait in the send queue until a timeout drops them.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

#include "softverbs/objects.h"

namespace spinwire::softverbs {

/// The longest datagram: the port's MTU.
inline constexpr std::uint32_t kDatagramBytes = 4096;

/// Lines of a lane that are reserved for connected messages: an eighth.
inline constexpr std::uint32_t kConnectedLines = kLaneLines / 8;

/// Version 6 in the first word of a route header, host order.
inline constexpr std::uint32_t kRouteVersion = 6u << 28;

/// The hop limit of a plain datagram.
inline constexpr std::uint8_t kUsualHops = 255;

/// Fields that do not fit into the words of a datagram's line. They precede the payload if they
/// differ from those of a plain datagram.
struct DatagramPrefix {
  std::uint32_t imm;                 ///< network order
  std::uint32_t version_class_flow;  ///< of the route header, network order
  std::uint8_t hop_limit;
  std::uint8_t spare[3];
};
static_assert(sizeof(DatagramPrefix) == 12);

/// A datagram's destination and contents, from a work request or from the send queue.
struct Outgoing {
  Peer* peer;
  const ibv_sge* sges;
  std::uint32_t count;
  std::uint32_t length;
  std::uint32_t remote_qpn;
  std::uint32_t qkey;
  std::uint32_t imm;
  std::uint32_t version_class_flow;
  std::uint8_t hop_limit;
  bool plain;
  bool has_imm;
  bool solicited;
};

/// A remote_qkey with this bit stands for the Q_Key of the sending queue pair.
inline constexpr std::uint32_t kOwnKey = 1u << 31;

inline Outgoing outgoing(const Qp& qp, const ibv_send_wr& wr, std::uint32_t length) noexcept {
  const Ah& ah = *static_cast<const Ah*>(wr.wr.ud.ah);
  const std::uint32_t key = wr.wr.ud.remote_qkey;
  return {ah.peer,
          wr.sg_list,
          static_cast<std::uint32_t>(wr.num_sge),
          length,
          wr.wr.ud.remote_qpn,
          (key & kOwnKey) != 0 ? qp.attr.qkey : key,
          wr.imm_data,
          ah.version_class_flow,
          ah.hop_limit,
          ah.plain,
          wr.opcode == IBV_WR_SEND_WITH_IMM,
          (wr.send_flags & IBV_SEND_SOLICITED) != 0};
}

/// post_send of a datagram queue pair. Hot.
int post_datagrams(Qp& qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept;

/// For an address handle that names a process: returns the handle of the context that has queue
/// pair `qpn`. If there is none, returns the handle of this context and sets `qpn` to 0, which no
/// queue pair has: the datagram is lost, as on a network. Null without memory. Only programs for
/// libibverbs call it.
Ah* choose_context(ibv_ah* ah, std::uint32_t& qpn) noexcept;

/// The route header of a lane's plain datagrams, without the length.
ibv_grh plain_route(const ibv_gid& from, const ibv_gid& to) noexcept;
/// The route header of a plain datagram of `length` bytes. Cold.
ibv_grh route_header(const InLane& lane, std::uint32_t length) noexcept;

/// The error that the sender finds in a datagram, or success.
ibv_wc_status check_datagram(Qp& qp, const ibv_sge* sges, std::uint32_t count, std::uint64_t length,
                             bool in_line) noexcept;
/// Writes a datagram into the lane. False if there is no room.
bool transmit_datagram(Qp& qp, const Outgoing& datagram) noexcept;
/// Completes a send with an error and moves the queue pair to SQE, in which it only receives.
void fail_datagram(Qp& qp, std::uint64_t wr_id, ibv_wc_status status) noexcept;
void count_drop(Context& c, Drop reason) noexcept;

// The send queue of waiting datagrams. Cold.
/// Appends a work request of `length` bytes, or flushes it unless the state is RTS.
void queue_datagram(Qp& qp, const ibv_send_wr& wr, std::uint64_t length) noexcept;
/// Sends the datagrams that have room, and drops those that waited too long.
void send_waiting_datagrams(Qp& qp) noexcept;
/// Unlists the waiting datagrams before the queue is flushed.
void drop_waiting(Qp& qp) noexcept;

// For ud_faults.cc. Cold.
/// post_datagrams() with inject_datagram_faults() in place of the lane.
int post_datagrams_with_faults(Qp& qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept;

/// How the datagram at the head of a lane is received.
enum class DirectOutcome : std::uint8_t {
  none,      ///< into a receive
  reported,  ///< in a batch; the lane continues when the batch is released
  full,      ///< not yet; the queue pair has the maximum number of batches
};
/// Receives consecutive plain datagrams with equal words whose bytes are in their lines, up to
/// `limit`, completing to the polled queue. Returns the number received; 0 if the datagram is of
/// another kind, or as `direct` says. The queue's state stays in registers. Hot.
std::uint32_t receive_datagrams(const Context& c, InLane& lane, Cq& cq, std::uint64_t word,
                                std::uint32_t limit, DirectOutcome& direct) noexcept;
// In ud_direct.cc.
/// Reports a batch of at most `limit` datagrams to a queue pair that reads them in place, after the
/// checks of receive_datagrams(). Hot.
DirectOutcome report_batch(InLane& lane, const Qp& qp, Cq& cq, std::uint64_t word,
                           std::uint32_t limit) noexcept;
/// Releases the batches of a queue pair that is being destroyed.
void release_batches(Context& c, const Qp& qp) noexcept;
/// Makes polls check again what a datagram to a queue pair needs. Call it after a change of the
/// queue pair. Cold.
void forget_batches(Context& c, const Qp& qp) noexcept;
/// Receives or drops the next datagram in the lane, of `bytes` bytes. Hot.
void receive_datagram(Context& c, const InLane& lane, std::uint64_t word,
                      std::uint32_t bytes) noexcept;

}  // namespace spinwire::softverbs
