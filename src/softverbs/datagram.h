// Unreliable datagrams: posted straight into the lane to their receiver or lost, never kept.
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

/// What does not fit into the words of a datagram's line; before the payload, and only if there is
/// something in it.
struct DatagramPrefix {
  std::uint32_t imm;                 ///< network order, as the work request has it
  std::uint32_t version_class_flow;  ///< of the route header, network order
  std::uint8_t hop_limit;
  std::uint8_t spare[3];
};
static_assert(sizeof(DatagramPrefix) == 12);

/// post_send of a datagram queue pair. Hot.
int post_datagrams(Qp& qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept;

// For faults_datagram.cc. Cold.
/// The same, with hold_datagram() in the place of the lane.
int post_datagrams_with_faults(Qp& qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept;
/// Into the lane to the receiver, or dropped. The work request was found good before.
void transmit_datagram(Qp& qp, const ibv_send_wr& wr, std::uint32_t length) noexcept;

/// Receives or drops the datagram of so many bytes that is next in the lane. Hot.
void take_datagram(Context& c, const InLane& lane, std::uint64_t word,
                   std::uint32_t bytes) noexcept;

}  // namespace spinwire::softverbs
