// Test helpers: ends that send and receive short datagrams beside the verbs. A datagram's number
// tells its length and its bytes.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/direct_datagrams.h"
#include "softverbs/datagram_link.h"

namespace softverbs_test {

namespace base = spinwire::base;

inline constexpr std::uint64_t kDirectWr = 0xd1ec7;
inline constexpr std::uint32_t kDirectRoom = 256;

struct NumberedDatagram {
  std::uint64_t low;
  std::uint64_t high;
  std::array<std::byte, base::kDirectPayload> payload{};
  std::uint32_t payload_length;

  explicit NumberedDatagram(std::uint64_t number)
      : low(number),
        high(~number * 0x9e3779b97f4a7c15),
        payload_length(static_cast<std::uint32_t>(number % (base::kDirectPayload + 1))) {
    fill(payload, number);
  }
  [[nodiscard]] std::uint32_t length() const {
    return static_cast<std::uint32_t>(base::kDirectHeader) + payload_length;
  }
  void write(std::byte* to) const {
    std::memcpy(to, &low, sizeof low);
    std::memcpy(to + sizeof low, &high, sizeof high);
    std::memcpy(to + base::kDirectHeader, payload.data(), payload_length);
  }
  [[nodiscard]] bool lies_at(const std::byte* at) const {
    return std::memcmp(at, &low, sizeof low) == 0 &&
           std::memcmp(at + sizeof low, &high, sizeof high) == 0 &&
           std::memcmp(at + base::kDirectHeader, payload.data(), payload_length) == 0;
  }
};

/// Receives beside the verbs, none of which is posted at first.
class DirectReceiveList {
 public:
  explicit DirectReceiveList(std::size_t count, std::uint32_t room = kDirectRoom)
      : bytes_(count * room), slots_(count), posted_(count), arrived_(count) {
    lists.posted = posted_.data();
    lists.arrived = arrived_.data();
    lists.room = room;
    lists.wr_id = kDirectWr;
    for (std::size_t i = 0; i < count; ++i) slots_[i].to = &bytes_[i * room];
  }
  DirectReceiveList(const DirectReceiveList&) = delete;
  DirectReceiveList& operator=(const DirectReceiveList&) = delete;

  void post(base::DirectReceive* receive) { lists.posted[lists.posted_count++] = receive; }
  void post_all() {
    lists.posted_count = 0;
    for (base::DirectReceive& each : slots_) post(&each);
  }
  base::DirectReceive& operator[](std::size_t i) { return slots_[i]; }
  /// What has arrived, in order; it is no longer in the list.
  std::vector<base::DirectReceive*> take() {
    std::vector<base::DirectReceive*> all(lists.arrived, lists.arrived + lists.arrived_count);
    lists.arrived_count = 0;
    return all;
  }
  base::DirectReceives lists;

 private:
  std::vector<std::byte> bytes_;
  std::vector<base::DirectReceive> slots_;
  std::vector<base::DirectReceive*> posted_;
  std::vector<base::DirectReceive*> arrived_;
};

inline NodeOptions direct_options(const std::uint64_t* clock) {
  NodeOptions options;
  options.clock = spinwire::Clock::manual(clock);
  options.srq_depth = 512;
  options.send_depth = 1024;
  options.cq_entries = 8192;
  return options;
}

/// A node with a datagram queue pair whose receives are direct ones, all posted.
struct DirectEnd {
  Node node;
  ibv_qp* qp;
  DirectReceiveList receives;
  std::uint64_t untold = 0;  ///< datagrams that step() took, and that no completion told of yet
  std::uint64_t sends_completed = 0;
  std::vector<ibv_wc> others;  ///< completions that step() took, of other receives

  explicit DirectEnd(const NodeOptions& options, std::size_t count = 512)
      : node(options), qp(ready_ud(node, false, kQkey, 1024)), receives(count) {
    sv::direct_datagrams().receive_by(qp, receives.lists);
    receives.post_all();
  }
  explicit DirectEnd(const std::uint64_t* clock, std::size_t count = 512)
      : DirectEnd(direct_options(clock), count) {}

  bool send(const Handle& to, const ibv_qp* there, std::uint64_t number,
            std::uint32_t qkey = kQkey) {
    return send_by(qp, to, there, number, qkey);
  }
  static bool send_by(ibv_qp* by, const Handle& to, const ibv_qp* there, std::uint64_t number,
                      std::uint32_t qkey = kQkey) {
    const NumberedDatagram d(number);
    return sv::direct_datagrams().send(by, {to.get(), there->qp_num, qkey}, d.low, d.high,
                                       d.payload.data(), d.payload_length);
  }
  /// The same by the verbs.
  int post(const Handle& to, const ibv_qp* there, std::uint64_t number,
           unsigned flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE) {
    const NumberedDatagram d(number);
    d.write(node.memory.data());
    return Datagram(number, node.sge(0, d.length()), to, there->qp_num, kQkey, flags).post(qp);
  }
  void publish() { sv::direct_datagrams().publish(qp); }

  /// One poll; answers the numbers of the datagrams that it took, whose receives are posted again.
  /// In all, the completions say as many as the list has.
  std::vector<std::uint64_t> step(int entries = 16) {
    std::vector<ibv_wc> wc(static_cast<std::size_t>(entries));
    const int n = ibv_poll_cq(node.cq, entries, wc.data());
    must(n >= 0 && n <= entries, "poll");
    std::uint64_t told = 0;
    for (int i = 0; i < n; ++i) {
      const ibv_wc& each = wc[static_cast<std::size_t>(i)];
      EXPECT_EQ(each.status, IBV_WC_SUCCESS);
      if (each.opcode == IBV_WC_SEND) {
        ++sends_completed;
      } else if (each.qp_num == qp->qp_num) {
        EXPECT_EQ(each.wr_id, kDirectWr);
        told += each.byte_len;
      } else {
        others.push_back(each);
      }
    }
    // Where completions of sends have filled the array, one may be told of later.
    EXPECT_LE(told, untold + receives.lists.arrived_count);
    untold += receives.lists.arrived_count - told;
    std::vector<std::uint64_t> numbers;
    for (base::DirectReceive* receive : receives.take()) {
      std::uint64_t number = 0;
      std::memcpy(&number, receive->to, sizeof number);
      const NumberedDatagram d(number);
      EXPECT_EQ(receive->length, d.length());
      EXPECT_TRUE(d.lies_at(receive->to)) << number;
      numbers.push_back(number);
      receives.post(receive);
    }
    return numbers;
  }
  /// All that arrives without the other end doing anything.
  std::vector<std::uint64_t> steps(int entries = 16) {
    std::vector<std::uint64_t> all;
    for (int nothing = 0; nothing < 2 * kLook;) {
      const std::vector<std::uint64_t> some = step(entries);
      all.insert(all.end(), some.begin(), some.end());
      nothing = some.empty() ? nothing + 1 : 0;
    }
    EXPECT_EQ(untold, 0u);
    return all;
  }
};

/// A way that datagrams need not tell: only those go beside the verbs.
inline ibv_ah_attr plain_way(const Node& to) {
  ibv_ah_attr way = way_to(gid_of(to));
  way.grh.hop_limit = sv::kUsualHops;
  return way;
}
inline void meet(const Node& one, const Node& other) {
  sv::control_device(one.context);
  sv::control_device(other.context);
  sv::control_device(one.context);
}

using Numbers = std::vector<std::uint64_t>;

inline Numbers numbers(std::uint64_t first, std::uint64_t end) {
  Numbers all;
  for (std::uint64_t i = first; i < end; ++i) all.push_back(i);
  return all;
}

/// Peers that a context has listed as holding a line.
inline std::vector<const sv::Peer*> holding(const Node& node) {
  std::vector<const sv::Peer*> all;
  for (const sv::Peer* peer = node.internals().held_first; peer != nullptr; peer = peer->next_held)
    all.push_back(peer);
  return all;
}

/// One more end, which knows another and is known to it.
struct ThirdEnd : DirectEnd {
  Handle to_other;
  Handle from_other;
  ThirdEnd(const std::uint64_t* clock, const DirectEnd& other)
      : DirectEnd(clock),
        to_other(node, plain_way(other.node)),
        from_other(other.node, plain_way(node)) {
    meet(node, other.node);
  }
};

/// Two that know each other.
class DirectPair : public testing::Test {
 protected:
  std::uint64_t now_ = 1'000'000'000;
  DirectEnd a_{&now_}, b_{&now_};
  Handle to_b_{a_.node, plain_way(b_.node)};
  Handle to_a_{b_.node, plain_way(a_.node)};

  DirectPair() { meet(a_.node, b_.node); }

  bool send(std::uint64_t number, std::uint32_t qkey = kQkey) {
    return a_.send(to_b_, b_.qp, number, qkey);
  }
  void send_all(std::uint64_t first, std::uint64_t end) {
    for (std::uint64_t i = first; i < end; ++i) ASSERT_TRUE(send(i)) << i;
  }
};

}  // namespace softverbs_test
