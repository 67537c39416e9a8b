// Unreliable datagrams: posted straight into the lane to their receiver. While that is full they
// wait in the send queue, as long as the receiver is worth it, and are dropped then.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

#include "softverbs/objects.h"

namespace spinwire::softverbs {

/// The longest datagram: the port's MTU.
inline constexpr std::uint32_t kDatagramBytes = 4096;

/// Lines of a lane that datagrams leave alone, so that connected messages, which wait for room,
/// find some whatever datagrams are about: an eighth holds the largest of their packets. What is
/// left takes three of the longest datagrams.
inline constexpr std::uint32_t kConnectedLines = kLaneLines / 8;

/// Version 6 in the first word of a route header, host order.
inline constexpr std::uint32_t kRouteVersion = 6u << 28;

/// The hop limit that need not be told.
inline constexpr std::uint8_t kUsualHops = 255;

/// What does not fit into the words of a datagram's line; before the payload, and only if there is
/// something in it.
struct DatagramPrefix {
  std::uint32_t imm;                 ///< network order, as the work request has it
  std::uint32_t version_class_flow;  ///< of the route header, network order
  std::uint8_t hop_limit;
  std::uint8_t spare[3];
};
static_assert(sizeof(DatagramPrefix) == 12);

/// Where a datagram goes and what it carries, out of a work request or the send queue.
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

/// A remote_qkey with this bit means the sender's own.
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

/// What there is beside the verbs.
const base::DirectDatagrams& direct_datagrams() noexcept;

/// post_send of a datagram queue pair. Hot.
int post_datagrams(Qp& qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept;

/// What all plain datagrams of a lane have in front of them, but for the length.
ibv_grh plain_route(const ibv_gid& from, const ibv_gid& to) noexcept;
/// In front of a plain one of so many bytes. Cold.
ibv_grh route_header(const InLane& lane, std::uint32_t length) noexcept;

/// What is wrong with a datagram that its sender can tell.
ibv_wc_status check_datagram(Qp& qp, const ibv_sge* sges, std::uint32_t count, std::uint64_t length,
                             bool in_line) noexcept;
/// Into the lane, whole. False if there is no room.
bool transmit_datagram(Qp& qp, const Outgoing& datagram) noexcept;
/// A send that failed here: the send queue stops, as the specification has it for datagrams (SQE),
/// while receiving goes on.
void fail_datagram(Qp& qp, std::uint64_t wr_id, ibv_wc_status status) noexcept;
void drop_datagram(Context& c, Drop reason) noexcept;

// The send queue of those that wait. Cold.
/// Puts a work request of `length` bytes at its end, or flushes it.
void keep_datagram(Qp& qp, const ibv_send_wr& wr, std::uint64_t length) noexcept;
/// Sends what has found room, drops what has waited for too long.
void pump_datagrams(Qp& qp) noexcept;
/// Before the queue is flushed: lets go of the receivers.
void forget_datagrams(Qp& qp) noexcept;

// For ud_faults.cc. Cold.
/// post_datagrams, with hold_datagram() in the place of the lane.
int post_datagrams_with_faults(Qp& qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept;

/// What becomes of a short datagram that is next in a lane, and what is behind it there.
enum class Direct : std::uint8_t {
  none,   ///< it takes a receive, as any other
  told,   ///< it is in one of its queue pair's runs: the lane goes on when that was given back
  later,  ///< the queue pair has as many runs as there may be
};
/// Receives a run of plain datagrams like the one with this word that is next in the lane, up to
/// `limit`, each in one line, completing to the polled queue; answers how many. The queue's state
/// stays in registers meanwhile, and one compare tells that a line is like the one before. 0: not
/// that case, or `direct` says more. Hot.
std::uint32_t take_datagrams(const Context& c, InLane& lane, Cq& cq, std::uint64_t word,
                             std::uint32_t limit, Direct& direct) noexcept;
// In ud_direct.cc.
/// Lets peers see what was sent directly.
void publish_held(Context& c) noexcept;
/// Of a queue pair with runs, whose completion queue is polled; the other checks of
/// take_datagrams() are done. A run is `limit` datagrams at most. Hot.
Direct tell_of_run(InLane& lane, const Qp& qp, Cq& cq, std::uint64_t word,
                   std::uint32_t limit) noexcept;
/// The queue pair ends.
void forget_runs(Context& c, const Qp& qp) noexcept;
/// Receives or drops the datagram of so many bytes that is next in the lane. Hot.
void take_datagram(Context& c, const InLane& lane, std::uint64_t word,
                   std::uint32_t bytes) noexcept;

}  // namespace spinwire::softverbs
