// Test helpers: ends that send direct datagrams and read them in place. A datagram's length and
// bytes follow from its number.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "softverbs/direct_groups.h"
#include "softverbs/ud/ud_datagram.h"
#include "softverbs/ud/ud_direct.h"
#include "softverbs/ud_link.h"

namespace softverbs_test {

inline constexpr std::uint64_t kDirectWr = 0xd1ec7;

/// Numbers from here on are datagrams that do not fit into a line: with up to 256 bytes of payload,
/// or up to the maximum.
inline constexpr std::uint64_t kLong = std::uint64_t{1} << 32;
inline constexpr std::uint64_t kLongest = std::uint64_t{2} << 32;

struct NumberedDatagram {
  std::uint64_t low;
  std::uint64_t high;
  std::array<std::byte, sv::kLongestDirect - sv::kDirectHeader> payload{};
  std::uint32_t payload_length;

  explicit NumberedDatagram(std::uint64_t number)
      : low(number), high(~number * 0x9e3779b97f4a7c15) {
    const std::uint64_t most = number < kLong      ? sv::kDirectPayload
                               : number < kLongest ? 256
                                                   : payload.size();
    const std::uint64_t least = number < kLong ? 0 : sv::kDirectPayload + 1;
    payload_length = static_cast<std::uint32_t>(least + number % (most - least + 1));
    fill(std::span(payload).first(payload_length), number);
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

/// The datagrams in a batch now. They stay in it.
inline Numbers read(const sv::DirectBatch& batch, std::uint32_t longest = 0) {
  Numbers all;
  std::uint64_t length = 0;
  for (sv::Line* line = batch.first; line != batch.end(); ++line) {
    const std::byte* const at = batch.bytes(*line, length, longest);
    if (at == nullptr) break;
    std::uint64_t number = 0;
    std::memcpy(&number, at, sizeof number);
    const NumberedDatagram d(number);
    EXPECT_EQ(length, d.length());
    EXPECT_TRUE(d.lies_at(at)) << number;
    EXPECT_EQ(std::memcmp(batch.header(*line), at, sv::kDirectHeader), 0) << number;
    all.push_back(number);
  }
  return all;
}

/// A node with a datagram queue pair that has batches, and some receives for longer datagrams.
struct DirectEnd {
  static constexpr std::uint32_t kReceives = 64;
  static constexpr std::uint32_t kRoom = 512;
  static constexpr std::size_t kReceivesAt = 3u << 20;
  static constexpr std::uint64_t kMessage = ~std::uint64_t{0};

  sv::DirectBatches batches;
  Node node;
  ibv_qp* qp;
  std::uint64_t sends_completed = 0;
  std::uint64_t by_receives = 0;  ///< datagrams that took a receive
  std::vector<ibv_wc> others;     ///< completions of other queue pairs' receives
  Numbers order;                  ///< of all arrivals; kMessage for those of other queue pairs

  explicit DirectEnd(const NodeOptions& options)
      : node(options), qp(ready_ud(node, false, kQkey, 1024)) {
    batches.wr_id = kDirectWr;
    sv::direct_datagrams().receive_batches(qp, &batches);
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
    const auto send = number < kLong ? sv::send_direct : direct.send_long;
    return send({&direct, by, direct.sender(by)},
                {to.get(), qpn, qkey, lane != nullptr ? lane : &closed}, d.low, d.high,
                d.payload.data(), d.payload_length) != sv::Sent::refused;
  }
  /// Sends the same datagram by a work request.
  int post(const Handle& to, const ibv_qp* there, std::uint64_t number,
           unsigned flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE) {
    const NumberedDatagram d(number);
    d.write(node.memory.data());
    if (d.length() > 256) flags &= ~unsigned{IBV_SEND_INLINE};
    return Datagram(number, node.sge(0, d.length()), to, there->qp_num, kQkey, flags).post(qp);
  }
  void publish() { sv::direct_datagrams().publish(qp); }

  /// Polls once and returns the numbers of the datagrams that took receives, which are posted
  /// again. A single completion reports the first batches since they were read.
  Numbers poll(int entries = 16) {
    const std::uint32_t before = batches.count;
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
    EXPECT_EQ(told, before == 0 && batches.count != 0 ? 1u : 0u);
    EXPECT_GE(batches.count, before);
    for (std::uint32_t i = before; i < batches.count; ++i) expect_good(*batches.batches[i]);
    return taken;
  }
  static void give_back(const sv::DirectBatch& batch, std::size_t count) {
    sv::release_batch(batch, static_cast<std::uint32_t>(count));
  }
  /// Reads all batches and releases them.
  Numbers take_batches() {
    Numbers all;
    for (std::uint32_t i = 0; i < batches.count; ++i) {
      const Numbers some = read(*batches.batches[i], batches.longest);
      give_back(*batches.batches[i], some.size());
      all.insert(all.end(), some.begin(), some.end());
    }
    batches.count = 0;
    order.insert(order.end(), all.begin(), all.end());
    return all;
  }
  /// Polls once and returns all arrivals: first those of receives, then those of batches.
  Numbers step(int entries = 16) {
    Numbers all = poll(entries);
    const Numbers some = take_batches();
    all.insert(all.end(), some.begin(), some.end());
    return all;
  }
  /// Returns all that arrives while the other end does nothing.
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
  /// Checks that the batch begins at the lane's position and is within the lane.
  void expect_good(const sv::DirectBatch& batch) const {
    const sv::DirectInLane& lane = *batch.lane;
    EXPECT_EQ(batch.first, lane.next);
    EXPECT_LT(batch.first, batch.end());
    EXPECT_LE(batch.end(), lane.end);
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

/// An address with the default hop limit, as direct datagrams require.
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

/// The peers to which a context has an unpublished line.
inline std::size_t peers_with_held_line(const Node& node) {
  const auto& peers = node.internals().peers;
  return static_cast<std::size_t>(std::count_if(
      peers.begin(), peers.end(), [](const auto& peer) { return peer->out.held != nullptr; }));
}
/// The peers that a context has listed because a line was held for them since publish().
inline std::vector<const sv::Peer*> peers_with_open_line(const Node& node) {
  std::vector<const sv::Peer*> all;
  for (const sv::Peer& peer : node.internals().held) all.push_back(&peer);
  return all;
}

/// A further end that is connected with another.
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

/// Two connected ends.
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
