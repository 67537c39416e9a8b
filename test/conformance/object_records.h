// The record that the defect layer keeps of the program's objects, which it needs to break a device
// precisely.
#pragma once

#include <infiniband/verbs.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "conformance/defects.h"

namespace conformance {

struct Region {
  ibv_pd* pd = nullptr;
  std::uint64_t address = 0;
  std::uint64_t length = 0;
  int access = 0;
};

struct PostedReceive {
  std::uint64_t id;
  std::vector<ibv_sge> sges;
};

/// A send work request with a copy of its elements, as posted.
struct Work {
  explicit Work(const ibv_send_wr& from)
      : wr(from), sges(from.sg_list, from.sg_list + std::max(from.num_sge, 0)) {
    wr.next = nullptr;
  }
  [[nodiscard]] std::uint64_t length() const {
    std::uint64_t sum = 0;
    for (const ibv_sge& sge : sges) sum += sge.length;
    return sum;
  }
  ibv_send_wr wr;
  std::vector<ibv_sge> sges;
  bool disguised = false;  ///< posted as another opcode, but completes as the original
};

struct QueuePair {
  ibv_qp* qp = nullptr;
  ibv_qp_cap cap{};
  std::uint32_t dest = 0;
  std::uint32_t qkey = 0;
  ibv_qp_state before = IBV_QPS_RESET;  ///< the last transition
  ibv_qp_state told = IBV_QPS_UNKNOWN;  ///< a transition that the device did not make
  std::uint32_t unsignaled = 0;
  std::deque<Work> sent;
  std::deque<Work> kept;  ///< datagrams that wait for a receive
};

struct BoundWindow {
  std::uint32_t qpn = 0;
  std::uint32_t region_key = 0;
};

/// Scratch memory for diverted elements.
struct Scratch {
  static constexpr std::size_t kSize = 1 << 20;
  std::vector<std::byte> bytes = std::vector<std::byte>(kSize);
  ibv_mr* mr = nullptr;
};

struct Ledger {
  std::map<ibv_context*, ibv_context_ops> ops;  ///< the device's own operations
  ibv_context* second = nullptr;                ///< the context opened last, if there are two
  std::map<std::uint32_t, Region> regions;      ///< by key
  std::map<std::uint32_t, QueuePair> queue_pairs;
  std::map<const void*, std::deque<PostedReceive>> receives;  ///< by queue pair or shared queue
  std::map<std::uint32_t, BoundWindow> windows;               ///< by key
  std::map<ibv_pd*, Scratch> scratch;
  std::map<ibv_cq*, std::deque<ibv_wc>> ready;  ///< completions to be handed out
  std::map<ibv_cq*, bool> solicited;            ///< armed for solicited ones
  std::deque<std::pair<ibv_qp*, Work>> late;    ///< to be posted by the next poll
  std::vector<ibv_qp*> needless;                ///< queue pairs that raise a needless event
  std::uint32_t additions = 0;

  QueuePair* find(std::uint32_t qpn) {
    const auto at = queue_pairs.find(qpn);
    return at != queue_pairs.end() ? &at->second : nullptr;
  }
  std::deque<PostedReceive>& receives_of(const ibv_qp* qp) {
    return receives[qp->srq != nullptr ? static_cast<const void*>(qp->srq) : qp];
  }
};
inline Ledger ledger;

inline std::uint64_t capacity(const PostedReceive& receive) {
  std::uint64_t sum = 0;
  for (const ibv_sge& sge : receive.sges) sum += sge.length;
  return sum;
}

inline std::byte* bytes_at(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }

/// Byte `offset` of the elements' data; null if out of range.
inline std::byte* byte_at(const std::vector<ibv_sge>& sges, std::uint64_t offset) {
  for (const ibv_sge& sge : sges) {
    if (offset < sge.length) return bytes_at(sge.addr) + offset;
    offset -= sge.length;
  }
  return nullptr;
}

}  // namespace conformance
