// What a device may offer for datagrams beside the verbs: a short one is sent by one call, without
// a work request; a receive is posted by writing down a pointer, and the completions of a whole run
// are one. Adapters have the like, as inline sends, striding receive queues and compressed
// completions. Whoever has it uses it, and the verbs for all else. Hot.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>

namespace spinwire::base {

/// Where a datagram goes.
struct DatagramAddress {
  ibv_ah* ah = nullptr;
  std::uint32_t qp_num = 0;
  std::uint32_t qkey = 0;  ///< as it is: the highest bit does not stand for the sender's own
};

/// A short datagram: two words, which the sender has in registers, and what lies behind them.
inline constexpr std::size_t kDirectHeader = 16;
inline constexpr std::size_t kDirectPayload = 32;

/// A receive. `source` and what stands behind it are written by the device.
struct DirectReceive {
  std::byte* to = nullptr;   ///< where a datagram goes; no route header is in front of it
  void* owner = nullptr;     ///< the user's
  std::uint64_t source = 0;  ///< two are the same only if the same queue pair of one peer sent both
  std::uint32_t length = 0;
  std::uint32_t lane = 0;  ///< for write_route()
};
static_assert(sizeof(DirectReceive) == 32);

/// The receives of one queue pair: of those that are posted the device takes the one posted last,
/// which the caches have. Both lists have room for all that there are; the user posts, and takes
/// away what has arrived, in any order.
struct DirectReceives {
  DirectReceive** posted = nullptr;
  DirectReceive** arrived = nullptr;  ///< as they came
  std::uint32_t posted_count = 0;
  std::uint32_t arrived_count = 0;
  std::uint32_t room = 0;   ///< bytes at each `to`, at least a short datagram
  std::uint64_t wr_id = 0;  ///< of completions, whose byte_len is a number of datagrams
};

struct DirectDatagrams {
  /// Sends header and payload, of which `length` bytes count, though the receiver may see all
  /// kDirectPayload of them, with the next publish() or whatever else the device sends there.
  /// False, and nothing is sent, if the verbs have to do it. There is no completion, and nothing is
  /// referred to afterwards.
  bool (*send)(ibv_qp* qp, const DatagramAddress& to, std::uint64_t low, std::uint64_t high,
               const std::byte* payload, std::uint32_t length) noexcept;
  /// What was sent is under way.
  void (*publish)(ibv_qp* qp) noexcept;
  /// The queue pair's receives are these from now on, as long as it lives. None may have been
  /// posted by the verbs. Set-up.
  void (*receive_by)(ibv_qp* qp, DirectReceives& receives) noexcept;
  /// The 40 bytes that the verbs would have put in front of a datagram that came in the last poll;
  /// traffic class, flow label, hop limit and immediate data are not kept, if there were any.
  void (*write_route)(ibv_qp* qp, const DirectReceive& receive, std::byte* to) noexcept;
};

}  // namespace spinwire::base
