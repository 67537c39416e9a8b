// Test helpers: two ends that send each other direct messages and messages by work requests. A
// message's length and bytes follow from its number.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "softverbs/direct_groups.h"
#include "softverbs/rc/rc_direct.h"
#include "softverbs/rc_link.h"

namespace softverbs_test {

using Numbers = std::vector<std::uint64_t>;

// Header included.
inline constexpr std::uint32_t kLongestDirect = 32 * 1024 + sv::kDirectMessageHeader;
inline constexpr std::uint32_t kLongMessage = 8192;  ///< receives have room for it, too

/// The number of the message with this serial number and length, header included.
constexpr std::uint64_t number_of(std::uint32_t serial, std::uint32_t bytes) {
  return std::uint64_t{bytes} << 32 | serial;
}
constexpr std::uint32_t bytes_of(std::uint64_t number) {
  return static_cast<std::uint32_t>(number >> 32);
}

struct NumberedMessage {
  std::uint64_t number;
  std::array<std::byte, kLongestDirect> payload{};

  explicit NumberedMessage(std::uint64_t n) : number(n) { fill({payload.data(), length()}, n); }
  [[nodiscard]] std::uint32_t length() const { return bytes_of(number) - sv::kDirectMessageHeader; }
  void write(std::byte* to) const {
    std::memcpy(to, &number, sizeof number);
    std::memcpy(to + sizeof number, payload.data(), length());
  }
  /// The number of the message at `at`, which must have come whole.
  static std::uint64_t read(const std::byte* at, std::uint32_t bytes) {
    std::uint64_t number = 0;
    std::memcpy(&number, at, sizeof number);
    EXPECT_EQ(bytes_of(number), bytes);
    if (bytes_of(number) == bytes) {
      EXPECT_TRUE(holds({at + sizeof number, bytes - sizeof number}, number)) << number;
    }
    return number;
  }
};

inline NodeOptions message_options(const std::uint64_t* clock, std::uint32_t receives = 512) {
  NodeOptions options;
  options.clock = spinwire::Clock::manual(clock);
  options.srq_depth = receives;
  options.send_depth = 64;
  options.cq_entries = 1024;
  options.memory = 16u << 20;
  return options;
}

/// A node with one connected queue pair.
struct MessageEnd {
  static constexpr std::uint32_t kReceives = 512;
  static constexpr std::uint32_t kSlots = 64;  ///< for messages by work requests
  static constexpr std::uint32_t kRoom = 16 * 1024;
  static constexpr std::size_t kReceivesAt = 2u << 20;
  static constexpr std::uint32_t kBudget = 1000;
  static constexpr std::uint64_t kDirect = std::uint64_t{1} << 50;  ///< in the wr_id of direct ones

  Node node;
  ibv_qp* qp;
  Numbers order;               ///< of all messages that came
  std::uint64_t in_place = 0;  ///< that were read in place
  std::uint64_t by_receives = 0;
  std::vector<ibv_wc> sends;   ///< completions of sends
  std::vector<ibv_wc> failed;  ///< receives
  bool reposts = true;         ///< each receive that a message took
  std::uint64_t posted = 0;    ///< work requests
  std::uint64_t ended = 0;     ///< completed work requests

  explicit MessageEnd(const std::uint64_t* clock, std::uint32_t receives = kReceives)
      : node(message_options(clock)), qp(node.make_qp()) {
    for (std::uint32_t i = 0; i < receives; ++i) post_receive(i);
  }
  void post_receive(std::uint64_t slot) {
    must(node.post_recv(slot, kReceivesAt + slot * kRoom, kRoom) == 0, "post_recv");
  }
  void read_in_place(std::uint32_t budget = kBudget) {
    sv::direct_messages().receive_in_place(qp, nullptr, kRoom, kLongestDirect);
    release(budget);
  }
  void release(std::uint32_t budget = kBudget) {
    sv::release_reads(sv::direct_messages().reads(node.context), budget);
  }

  bool send(std::uint64_t number, std::uint64_t wr_id = sv::kNoCompletion) {
    const NumberedMessage m(number);
    return sv::direct_messages().send(qp, m.number, m.payload.data(), m.length(), wr_id) !=
           sv::Sent::refused;
  }
  void publish() { sv::direct_messages().publish(node.context); }
  /// Sends the same message by a work request.
  int post(std::uint64_t number, ibv_wr_opcode opcode = IBV_WR_SEND,
           unsigned flags = IBV_SEND_SIGNALED) {
    const std::size_t at = posted % kSlots * kRoom;
    NumberedMessage(number).write(node.bytes(at, bytes_of(number)).data());
    const int error = Send(number, node.sge(at, bytes_of(number)), opcode, flags).post(qp);
    posted += error == 0 ? 1 : 0;
    return error;
  }
  std::uint32_t take_lost() { return sv::direct_messages().take_lost(node.context); }

  /// Polls once and reads all that came. Messages in place stay there until release().
  int poll(int entries = 32) {
    ibv_wc wc[64];
    const int n = ibv_poll_cq(node.cq, entries, wc);
    must(n >= 0 && n <= entries, "poll");
    for (int i = 0; i < n; ++i) take(wc[i]);
    return n;
  }
  /// Polls, and releases what came.
  void step(int entries = 32) {
    poll(entries);
    release();
  }
  void steps(int count = 2 * kLook) {
    for (; count != 0; --count) step();
  }
  [[nodiscard]] sv::Qp& internals() const { return *static_cast<sv::Qp*>(qp); }
  [[nodiscard]] sv::OutLane& out() const { return internals().peer->out; }
  [[nodiscard]] const sv::InLane& in() const { return *internals().peer->in; }
  Numbers taken() { return std::exchange(order, {}); }

 private:
  void take(const ibv_wc& wc) {
    if (wc.status == IBV_WC_SUCCESS && (wc.opcode & IBV_WC_RECV) != 0) {
      EXPECT_EQ(wc.qp_num, qp->qp_num);
      if (sv::is_in_place(wc.wr_id)) {
        EXPECT_EQ(wc.opcode, IBV_WC_RECV);
        EXPECT_EQ(wc.wc_flags, 0u);
        ++in_place;
        order.push_back(NumberedMessage::read(sv::in_place_bytes(wc.wr_id), wc.byte_len));
        return;
      }
      ++by_receives;
      order.push_back(
          NumberedMessage::read(node.memory.data() + kReceivesAt + wc.wr_id * kRoom, wc.byte_len));
      if (reposts) post_receive(wc.wr_id);
      return;
    }
    const bool is_receive = wc.wr_id < kReceives && wc.status != IBV_WC_SUCCESS;
    (is_receive ? failed : sends).push_back(wc);
    if (!is_receive && (wc.wr_id & kDirect) == 0) ++ended;
  }
};

/// Two connected ends that read in place.
class MessagePair : public testing::Test {
 protected:
  std::uint64_t now_ = 1'000'000'000;
  MessageEnd a_{&now_}, b_{&now_};

  void SetUp() override {
    connect(a_.node, a_.qp, b_.node, b_.qp, how());
    a_.read_in_place();
    b_.read_in_place();
  }
  [[nodiscard]] virtual ConnectOptions how() const { return {}; }
  /// Lets time pass, so that the device looks for peers that have ended.
  void pass_time(MessageEnd& end) {
    now_ += 10'000'000;
    sv::control_device(end.node.context);
  }
  /// Polls both ends until nothing more comes.
  void settle() {
    for (int i = 0; i < 4 * kLook; ++i) {
      now_ += 100'000;
      a_.step();
      b_.step();
    }
  }
};

/// Numbers of `count` messages from `first` on, of the same length.
inline Numbers series(std::uint32_t first, std::uint32_t count, std::uint32_t bytes = 32) {
  Numbers all;
  for (std::uint32_t i = 0; i < count; ++i) all.push_back(number_of(first + i, bytes));
  return all;
}

}  // namespace softverbs_test
