// Test helpers: ends that send short datagrams beside the verbs, and read them where they lie. A
// datagram's number tells its length and its bytes.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "softverbs/ud/ud_direct.h"
#include "softverbs/ud_link.h"

namespace softverbs_test {

inline constexpr std::uint64_t kDirectWr = 0xd1ec7;

/// Numbers from here on are of datagrams that take more than a line.
inline constexpr std::uint64_t kLong = std::uint64_t{1} << 32;

struct NumberedDatagram {
  std::uint64_t low;
  std::uint64_t high;
  std::array<std::byte, 256> payload{};
  std::uint32_t payload_length;

  explicit NumberedDatagram(std::uint64_t number)
      : low(number), high(~number * 0x9e3779b97f4a7c15) {
    const std::uint64_t most = number < kLong ? sv::kDirectPayload : payload.size();
    const std::uint64_t least = number < kLong ? 0 : sv::kDirectPayload + 1;
    payload_length = static_cast<std::uint32_t>(least + number % (most - least + 1));
    fill(payload, number);
  }
  [[nodiscard]] std::uint32_t length() const {
    return static_cast<std::uint32_t>(sv::kDirectHeader) + payload_length;
  }
  void write(std::byte* to) const {
    std::memcpy(to, &low, sizeof low);
    std::memcpy(to + sizeof low, &high, sizeof high);
    std::memcpy(to + sv::kDirectHeader, payload.data(), payload_length);
  }
  [[nodiscard]] bool lies_at(const std::byte* at) const {
    return std::memcmp(at, &low, sizeof low) == 0 &&
           std::memcmp(at + sizeof low, &high, sizeof high) == 0 &&
           std::memcmp(at + sv::kDirectHeader, payload.data(), payload_length) == 0;
  }
};

inline NodeOptions direct_options(const std::uint64_t* clock) {
  NodeOptions options;
  options.clock = spinwire::Clock::manual(clock);
  options.srq_depth = 512;
  options.send_depth = 1024;
  options.cq_entries = 8192;
  return options;
}

using Numbers = std::vector<std::uint64_t>;

inline Numbers numbers(std::uint64_t first, std::uint64_t end) {
  Numbers all;
  for (std::uint64_t i = first; i < end; ++i) all.push_back(i);
  return all;
}

/// What lies in a run at this moment; it stays there.
inline Numbers read(const sv::DirectRun& run) {
  Numbers all;
  std::uint64_t length = 0;
  for (const sv::Line* line = run.first; line != run.end() && run.has(*line, length); ++line) {
    std::uint64_t number = 0;
    std::memcpy(&number, line->payload, sizeof number);
    const NumberedDatagram d(number);
    EXPECT_EQ(length, d.length());
    EXPECT_TRUE(d.lies_at(line->payload)) << number;
    all.push_back(number);
  }
  return all;
}

/// A node with a datagram queue pair that has runs, and some receives for what is no short one.
struct DirectEnd {
  static constexpr std::uint32_t kReceives = 64;
  static constexpr std::uint32_t kRoom = 512;
  static constexpr std::size_t kReceivesAt = 3u << 20;
  static constexpr std::uint64_t kMessage = ~std::uint64_t{0};

  sv::DirectRuns runs;
  Node node;
  ibv_qp* qp;
  std::uint64_t sends_completed = 0;
  std::uint64_t by_receives = 0;  ///< datagrams that took one
  std::vector<ibv_wc> others;     ///< completions that poll() took, of other queue pairs' receives
  Numbers order;  ///< of all that came so far, with kMessage for what is of another queue pair

  explicit DirectEnd(const NodeOptions& options)
      : node(options), qp(ready_ud(node, false, kQkey, 1024)) {
    runs.wr_id = kDirectWr;
    sv::direct_datagrams().receive_runs(qp, &runs);
    for (std::uint32_t i = 0; i < kReceives; ++i) post_receive(i);
  }
  explicit DirectEnd(const std::uint64_t* clock) : DirectEnd(direct_options(clock)) {}

  void post_receive(std::uint64_t slot) {
    must(node.post_recv(slot, kReceivesAt + slot * kRoom, kRoom, qp) == 0, "post_recv");
  }
  void forget_receives() { static_cast<sv::Qp*>(qp)->receives->head = receives().tail; }
  [[nodiscard]] const sv::ReceiveQueue& receives() const {
    return *static_cast<const sv::Qp*>(qp)->receives;
  }

  bool send(const Handle& to, const ibv_qp* there, std::uint64_t number,
            std::uint32_t qkey = kQkey) {
    return send_by(qp, to, there->qp_num, number, qkey);
  }
  static bool send_by(ibv_qp* by, const Handle& to, std::uint32_t qpn, std::uint64_t number,
                      std::uint32_t qkey = kQkey) {
    const auto& direct = sv::direct_datagrams();
    sv::DirectLane closed;
    sv::DirectLane* const lane = direct.lane(to.get());
    const NumberedDatagram d(number);
    return sv::send_direct({&direct, by, direct.sender(by)},
                           {to.get(), qpn, qkey, lane != nullptr ? lane : &closed}, d.low, d.high,
                           d.payload.data(), d.payload_length) != sv::Sent::refused;
  }
  /// The same by the verbs.
  int post(const Handle& to, const ibv_qp* there, std::uint64_t number,
           unsigned flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE) {
    const NumberedDatagram d(number);
    d.write(node.memory.data());
    if (d.length() > 256) flags &= ~unsigned{IBV_SEND_INLINE};
    return Datagram(number, node.sge(0, d.length()), to, there->qp_num, kQkey, flags).post(qp);
  }
  void publish() { sv::direct_datagrams().publish(qp); }

  /// One poll; answers the numbers of the datagrams that took receives, which are posted again. One
  /// completion tells of the first runs that came since they were read.
  Numbers poll(int entries = 16) {
    const std::uint32_t before = runs.count;
    std::vector<ibv_wc> wc(static_cast<std::size_t>(entries));
    const int n = ibv_poll_cq(node.cq, entries, wc.data());
    must(n >= 0 && n <= entries, "poll");
    Numbers taken;
    std::uint32_t told = 0;
    for (int i = 0; i < n; ++i) {
      const ibv_wc& each = wc[static_cast<std::size_t>(i)];
      EXPECT_EQ(each.status, IBV_WC_SUCCESS);
      if (each.opcode == IBV_WC_SEND) {
        ++sends_completed;
      } else if (each.qp_num != qp->qp_num) {
        others.push_back(each);
        order.push_back(kMessage);
      } else if (each.wr_id == kDirectWr) {
        ++told;
      } else {
        taken.push_back(take_receive(each));
      }
    }
    EXPECT_EQ(told, before == 0 && runs.count != 0 ? 1u : 0u);
    EXPECT_GE(runs.count, before);
    for (std::uint32_t i = before; i < runs.count; ++i) expect_good(runs.runs[i]);
    return taken;
  }
  void give_back(const sv::DirectRun& run, std::size_t count) {
    sv::direct_datagrams().release_run(qp, run, static_cast<std::uint32_t>(count));
  }
  /// Reads all runs and gives them back.
  Numbers take_runs() {
    Numbers all;
    for (std::uint32_t i = 0; i < runs.count; ++i) {
      const Numbers some = read(runs.runs[i]);
      give_back(runs.runs[i], some.size());
      all.insert(all.end(), some.begin(), some.end());
    }
    runs.count = 0;
    order.insert(order.end(), all.begin(), all.end());
    return all;
  }
  /// One poll and what it tells of; a lane's run lies behind what else the poll took of it.
  Numbers step(int entries = 16) {
    Numbers all = poll(entries);
    const Numbers some = take_runs();
    all.insert(all.end(), some.begin(), some.end());
    return all;
  }
  /// All that arrives without the other end doing anything.
  Numbers steps(int entries = 16) {
    Numbers all;
    for (int nothing = 0, polls = 0; nothing < 2 * kLook; ++polls) {
      must(polls < 10'000, "no end of what arrives");
      const std::size_t before = others.size();
      const Numbers some = step(entries);
      all.insert(all.end(), some.begin(), some.end());
      nothing = some.empty() && others.size() == before ? nothing + 1 : 0;
    }
    return all;
  }

 private:
  /// It begins where the lane does, and lies within it.
  void expect_good(const sv::DirectRun& run) const {
    const sv::InLane& lane = *node.internals().lanes[run.lane];
    EXPECT_EQ(run.first, lane.next);
    EXPECT_GT(run.most, 0u);
    EXPECT_LE(run.end(), lane.end);
    EXPECT_FALSE(read(run).empty());
  }
  std::uint64_t take_receive(const ibv_wc& wc) {
    const std::byte* const at = node.memory.data() + kReceivesAt + wc.wr_id * kRoom + kGrh;
    std::uint64_t number = 0;
    std::memcpy(&number, at, sizeof number);
    const NumberedDatagram d(number);
    EXPECT_EQ(wc.byte_len, kGrh + d.length());
    EXPECT_TRUE(d.lies_at(at)) << number;
    ++by_receives;
    order.push_back(number);
    post_receive(wc.wr_id);
    return number;
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

/// Peers that a context has listed for a line that is not published.
inline std::vector<const sv::Peer*> peers_with_open_line(const Node& node) {
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
