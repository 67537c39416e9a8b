// Datagrams that wait in the send queue for room in the lane, and how the wait ends.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <vector>

#include "softverbs/ud_link.h"

namespace softverbs_test::datagram_queue {

constexpr std::uint64_t kFit = sv::kLaneLines - sv::kConnectedLines;
constexpr std::size_t kTo = 1u << 20;  ///< offset of the receives
constexpr std::uint32_t kSlot = 4096 + kGrh;

NodeOptions stepped(const std::uint64_t* clock) {
  NodeOptions options;
  options.clock = spinwire::Clock::manual(clock);
  options.srq_depth = 512;
  options.cq_entries = 4096;
  return options;
}

/// One sender and two receivers.
class SoftverbsDatagramQueue : public testing::Test {
 protected:
  std::uint64_t now_ = 1'000'000'000;
  Node a_{stepped(&now_)}, b_{stepped(&now_)}, c_{stepped(&now_)};
  ibv_qp* qa_ = ready_ud(a_, false, kQkey, 1024);
  ibv_qp* qb_ = ready_ud(b_, true);
  ibv_qp* qc_ = ready_ud(c_, true);
  std::unique_ptr<Handle> to_b_ = std::make_unique<Handle>(a_, b_);
  std::unique_ptr<Handle> to_c_ = std::make_unique<Handle>(a_, c_);
  const std::uint64_t timeout_ = a_.internals().datagram_timeout;

  int to_b(std::uint64_t id, std::uint32_t length = 8, unsigned flags = IBV_SEND_SIGNALED) {
    return Datagram(id, a_.sge(0, length), *to_b_, qb_->qp_num, kQkey, flags).post(qa_);
  }
  int to_c(std::uint64_t id) { return Datagram(id, a_.sge(0, 8), *to_c_, qc_->qp_num).post(qa_); }
  /// Fills the lane to b and leaves `more` waiting for room there.
  void fill_lane(std::uint64_t more) {
    for (std::uint64_t i = 0; i < kFit; ++i) ASSERT_EQ(to_b(i), 0);
    ASSERT_EQ(completions(a_).size(), kFit);
    for (std::uint64_t i = 0; i < more; ++i) ASSERT_EQ(to_b(1000 + i), 0);
    ASSERT_TRUE(completions(a_).empty());
  }
  [[nodiscard]] std::uint64_t lost() const { return dropped(a_, sv::Drop::no_room); }
  [[nodiscard]] sv::Peer& peer_b() const { return *a_.internals().peers[0]; }
};

TEST_F(SoftverbsDatagramQueue, AFastSenderLosesNothingToAReceiverThatGoesOn) {
  constexpr std::uint64_t kMessages = 3000;
  constexpr std::uint64_t kReceives = 100;
  const auto size_of = [](std::uint64_t n) {
    return static_cast<std::uint32_t>(n % 7 == 0 ? 4096 - n % 50 : 8 + n * 37 % 400);
  };
  const auto place = [](std::uint64_t n) { return n % 128 * 4096; };
  for (std::uint64_t i = 0; i < kReceives; ++i)
    ASSERT_EQ(b_.post_recv(i, kTo + i * kSlot, kSlot), 0);
  std::uint64_t sent = 0, done = 0, received = 0;
  const auto step = [&] {
    for (; sent < kMessages && sent - done < 128; ++sent) {  // all at once
      fill(a_.bytes(place(sent), size_of(sent)), sent);
      ASSERT_EQ(Datagram(sent, a_.sge(place(sent), size_of(sent)), *to_b_, qb_->qp_num).post(qa_),
                0);
    }
    now_ += timeout_ / 10;
    ibv_wc wc{};
    while (a_.poll(wc)) {
      ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
      ASSERT_EQ(wc.wr_id, done++);
    }
    for (std::uint64_t i = 0; i < received % 5 && b_.poll(wc); ++i, ++received) {
      ASSERT_EQ(wc.byte_len, size_of(received) + kGrh);
      ASSERT_TRUE(holds(b_.bytes(kTo + wc.wr_id * kSlot + kGrh, size_of(received)), received));
      ASSERT_EQ(b_.post_recv(wc.wr_id, kTo + wc.wr_id * kSlot, kSlot), 0);
    }
    if (received % 5 == 0 && b_.poll(wc)) {
      ++received;
      ASSERT_EQ(b_.post_recv(wc.wr_id, kTo + wc.wr_id * kSlot, kSlot), 0);
    }
  };
  ASSERT_TRUE(until(step, [&] { return received == kMessages || HasFatalFailure(); }));
  step();
  EXPECT_EQ(done, kMessages);
  EXPECT_EQ(lost(), 0u);
  EXPECT_EQ(dropped(b_, sv::Drop::no_receive), 0u);
  EXPECT_EQ(peer_b().datagrams_waiting, 0u);
}

TEST_F(SoftverbsDatagramQueue, AStalledReceiverDelaysOthersOnceAndNotForLong) {
  for (std::uint64_t i = 0; i < 300; ++i) ASSERT_EQ(c_.post_recv(i, kTo, 256), 0);
  fill_lane(100);
  // Datagrams to other receivers overtake, but complete in order.
  for (std::uint64_t i = 0; i < 50; ++i) ASSERT_EQ(to_c(2000 + i), 0);
  EXPECT_EQ(completions(c_).size(), 50u);
  now_ += timeout_ - 1000;
  EXPECT_TRUE(completions(a_).empty());
  EXPECT_EQ(lost(), 0u);
  now_ += 1000;
  const std::vector<ibv_wc> ended = completions(a_);
  ASSERT_EQ(ended.size(), 150u);
  for (std::uint64_t i = 0; i < 150; ++i) {
    EXPECT_EQ(ended[i].status, IBV_WC_SUCCESS);
    EXPECT_EQ(ended[i].wr_id, i < 100 ? 1000 + i : 1900 + i);
  }
  EXPECT_EQ(lost(), 100u);
  // The wait is bounded: from now on datagrams are dropped at once.
  for (std::uint64_t i = 0; i < 100; ++i) {
    ASSERT_EQ(to_b(i), 0);
    ASSERT_EQ(to_c(i), 0);
    now_ += 1000;
    ASSERT_EQ(completions(a_).size(), 2u);
  }
  EXPECT_EQ(lost(), 200u);
  EXPECT_EQ(completions(c_).size(), 100u);
}

TEST_F(SoftverbsDatagramQueue, TheTimeoutIsWorthWhatTheReceiverTakes) {
  fill_lane(1);
  now_ += timeout_;
  EXPECT_EQ(completions(a_).size(), 1u);
  EXPECT_EQ(lost(), 1u);
  // Half of the lane is read and filled again, which uses half of the timeout.
  for (std::uint64_t i = 0; i < sv::kLaneLines / 2 / 64; ++i) {
    ibv_wc wc{};
    (void)b_.poll(wc);  // one turn; there is no receive for any of them
  }
  ASSERT_EQ(dropped(b_, sv::Drop::no_receive), sv::kLaneLines / 2);
  for (std::uint64_t i = 0; i < sv::kLaneLines / 2; ++i) ASSERT_EQ(to_b(i), 0);
  EXPECT_EQ(completions(a_).size(), sv::kLaneLines / 2);
  ASSERT_EQ(to_b(7), 0);
  now_ += timeout_ / 2 - 2000;
  EXPECT_TRUE(completions(a_).empty());
  now_ += 4000;
  EXPECT_EQ(completions(a_).size(), 1u);
  EXPECT_EQ(lost(), 2u);
}

TEST_F(SoftverbsDatagramQueue, WhatWaitsIsKeptWhole) {
  // Inline bytes, several elements, immediate data, the address of a destroyed handle.
  fill_lane(0);
  ibv_ah_attr way = way_to(gid_of(b_));
  way.grh.traffic_class = 0x5a;
  way.grh.hop_limit = 9;
  auto handle = std::make_unique<Handle>(a_, way);
  fill(a_.bytes(0, 200), 1);
  Datagram in_line(1, a_.sge(0, 200), *handle, qb_->qp_num, kQkey,
                   IBV_SEND_SIGNALED | IBV_SEND_INLINE);
  in_line.wr.opcode = IBV_WR_SEND_WITH_IMM;
  in_line.wr.imm_data = 0x01020304;
  ASSERT_EQ(in_line.post(qa_), 0);
  fill(a_.bytes(0, 200), 99);  // the bytes are ours again
  fill(a_.bytes(4096, 1000), 2);
  ibv_sge parts[3] = {a_.sge(4096, 300), a_.sge(0, 0), a_.sge(4396, 700)};
  Datagram several(2, parts[0], *handle, qb_->qp_num, 1u << 31);  // the sender's own key
  several.wr.sg_list = parts;
  several.wr.num_sge = 3;
  ASSERT_EQ(several.post(qa_), 0);
  parts[2] = {};
  handle.reset();
  EXPECT_TRUE(completions(a_).empty());
  while (dropped(b_, sv::Drop::no_receive) < kFit) EXPECT_TRUE(completions(b_).empty());
  for (std::uint64_t i = 0; i < 2; ++i) ASSERT_EQ(b_.post_recv(i, kTo + i * kSlot, kSlot), 0);
  now_ += 2000;
  EXPECT_EQ(completions(a_).size(), 2u);
  const std::vector<ibv_wc> got = completions(b_);
  ASSERT_EQ(got.size(), 2u);
  EXPECT_EQ(got[0].wc_flags, unsigned{IBV_WC_GRH} | unsigned{IBV_WC_WITH_IMM});
  EXPECT_EQ(got[0].imm_data, 0x01020304u);
  EXPECT_EQ(got[0].src_qp, qa_->qp_num);
  EXPECT_TRUE(holds(b_.bytes(kTo + kGrh, 200), 1));
  EXPECT_EQ(got[1].byte_len, 1000 + kGrh);
  EXPECT_TRUE(holds(b_.bytes(kTo + kSlot + kGrh, 1000), 2));
  const std::vector<std::uint8_t> header = route_header(way, gid_of(a_), 200, true);
  EXPECT_EQ(std::memcmp(b_.bytes(kTo, kGrh).data(), header.data(), kGrh), 0);
}

TEST_F(SoftverbsDatagramQueue, TheQueueHoldsTheSenderBack) {
  fill_lane(0);
  std::uint64_t waiting = 0;
  int error = 0;
  while ((error = to_b(waiting)) == 0) ++waiting;
  EXPECT_EQ(error, ENOMEM);
  EXPECT_EQ(waiting, 1024u);
  now_ += timeout_;
  EXPECT_EQ(completions(a_).size(), 1024u);
  EXPECT_EQ(to_b(0), 0);
}

TEST_F(SoftverbsDatagramQueue, ErrFlushesAndResetForgetsThem) {
  fill_lane(3);
  ASSERT_EQ(to_c(5), 0);
  a_.fail(qa_);
  const std::vector<ibv_wc> flushed = completions(a_);
  ASSERT_EQ(flushed.size(), 4u);
  for (std::uint64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(flushed[i].status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_EQ(flushed[i].wr_id, i < 3 ? 1000 + i : 5);
  }
  EXPECT_EQ(peer_b().datagrams_waiting, 0u);
  EXPECT_EQ(peer_b().users, 1u);  // the handle
  EXPECT_EQ(peer_b().turns.current, nullptr);
  for (const bool destroyed : {false, true}) {
    ibv_qp* other = ready_ud(a_, false);
    ASSERT_EQ(Datagram(1, a_.sge(0, 8), *to_b_, qb_->qp_num).post(other), 0);
    EXPECT_EQ(peer_b().datagrams_waiting, 1u);
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RESET;
    if (destroyed) {
      a_.destroy(other);
    } else {
      ASSERT_EQ(sv::modify_qp(other, &attr, IBV_QP_STATE), 0);
      ASSERT_TRUE(ud_init(other) == 0 && ud_rtr(other) == 0 && ud_rts(other) == 0);
      ASSERT_EQ(Datagram(3, a_.sge(0, 8), *to_c_, qc_->qp_num).post(other), 0);
      EXPECT_EQ(completions(a_).size(), 1u);
    }
    EXPECT_TRUE(completions(a_).empty());
    EXPECT_EQ(peer_b().datagrams_waiting, 0u);
    EXPECT_EQ(peer_b().users, 1u);
  }
  EXPECT_TRUE(a_.internals().waiting.empty());
}

TEST_F(SoftverbsDatagramQueue, AnErrorBehindThemIsToldInOrder) {
  fill_lane(2);
  ibv_sge bad = a_.sge(0, 8);
  bad.lkey ^= 1u << 20;
  ASSERT_EQ(Datagram(5, bad, *to_c_, qc_->qp_num).post(qa_), 0);
  ASSERT_EQ(to_c(6), 0);
  EXPECT_TRUE(completions(a_).empty());
  now_ += timeout_;
  const std::vector<ibv_wc> ended = completions(a_);
  ASSERT_EQ(ended.size(), 4u);
  const ibv_wc_status expected[] = {IBV_WC_SUCCESS, IBV_WC_SUCCESS, IBV_WC_LOC_PROT_ERR,
                                    IBV_WC_WR_FLUSH_ERR};
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(ended[i].status, expected[i]) << i;
  EXPECT_EQ(state_of(qa_), IBV_QPS_SQE);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  ASSERT_EQ(sv::modify_qp(qa_, &attr, IBV_QP_STATE), 0);
  ASSERT_EQ(c_.post_recv(1, kTo, 256), 0);
  ASSERT_EQ(to_c(8), 0);
  EXPECT_EQ(completions(a_).size(), 1u);
}

TEST_F(SoftverbsDatagramQueue, MemoryThatIsNoLongerRegisteredIsNotRead) {
  fill_lane(0);
  ibv_mr* mr = sv::reg_mr(a_.pd, a_.memory.data(), 64, IBV_ACCESS_LOCAL_WRITE);
  ibv_sge sge = a_.sge(0, 8);
  sge.lkey = mr->lkey;
  ASSERT_EQ(Datagram(5, sge, *to_b_, qb_->qp_num).post(qa_), 0);
  ASSERT_EQ(sv::dereg_mr(mr), 0);
  now_ += 2000;
  const std::vector<ibv_wc> ended = completions(a_);
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].status, IBV_WC_LOC_PROT_ERR);
}

TEST_F(SoftverbsDatagramQueue, LongOnesFindRoomBesideManyShortOnes) {
  // Two queue pairs to one receiver; the short ones would take every line that becomes free.
  ibv_qp* other = ready_ud(a_, false, kQkey, 64);
  for (std::uint64_t i = 0; i < 512; ++i) ASSERT_EQ(b_.post_recv(i, kTo, kSlot), 0);
  int long_ones = 0, taken = 0;
  const auto step = [&] {
    while (to_b(1) == 0) {
    }
    while (Datagram(2, a_.sge(0, 4096), *to_b_, qb_->qp_num).post(other) == 0) {
    }
    now_ += timeout_ / 100;
    (void)completions(a_);
    ibv_wc wc{};
    for (int i = 0; i < 8 && b_.poll(wc); ++i, ++taken) {
      if (wc.byte_len == kSlot) ++long_ones;
      ASSERT_EQ(b_.post_recv(1, kTo, kSlot), 0);
    }
  };
  ASSERT_TRUE(until(step, [&] { return taken > 3000 || HasFatalFailure(); }));
  EXPECT_GT(long_ones, 10);
  EXPECT_EQ(lost(), 0u);
}

TEST_F(SoftverbsDatagramQueue, NobodyWhoHasNotWaitedOvertakes) {
  // One long datagram waits. Another queue pair posts a short one for each line that becomes free.
  ibv_qp* other = ready_ud(a_, false, kQkey, 1024);
  fill_lane(0);
  ASSERT_EQ(to_b(1, 4096), 0);
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_EQ(b_.post_recv(i, kTo, kSlot), 0);
  std::vector<std::uint32_t> lengths;
  for (std::uint64_t i = 0; i < kFit + 2; ++i) {
    ibv_wc wc{};
    if (b_.poll(wc)) {
      lengths.push_back(wc.byte_len - kGrh);
      ASSERT_EQ(b_.post_recv(i, kTo, kSlot), 0);
    }
    ASSERT_EQ(Datagram(2, a_.sge(0, 9), *to_b_, qb_->qp_num, kQkey, 0).post(other), 0);
    now_ += 1500;
    (void)completions(a_);
    const auto none = std::find(lengths.begin(), lengths.end(), 9u) == lengths.end();
    const auto first = std::find(lengths.begin(), lengths.end(), 4096u) != lengths.end();
    if (first) break;
    ASSERT_TRUE(none) << "a short one before the long one, after " << i;
  }
  EXPECT_NE(std::find(lengths.begin(), lengths.end(), 4096u), lengths.end());
}

TEST_F(SoftverbsDatagramQueue, TheRecordOfAnotherWithTheSameIndexIsNotItsOwn) {
  // A message is in the lane when its queue pair is destroyed. The next user of its index is a
  // datagram queue pair, which waits for the message's room.
  ibv_qp* gone = a_.make_qp();
  ibv_qp* remote = b_.make_qp();
  connect(a_, gone, b_, remote);
  ASSERT_EQ(Send(1, a_.sge(0, 8)).post(gone), 0);
  const std::uint32_t index = gone->handle;
  a_.destroy(gone);
  a_.internals().numbers.next = sv::kMaxQueuePairs;
  ibv_qp* other = ready_ud(a_, false);
  ASSERT_EQ(other->handle, index);
  for (std::uint64_t i = 1; i < kFit; ++i) ASSERT_EQ(to_b(i), 0);
  ASSERT_EQ(completions(a_).size(), kFit - 1);
  ASSERT_EQ(Datagram(2, a_.sge(0, 8), *to_b_, qb_->qp_num).post(other), 0);
  ibv_wc wc{};
  (void)b_.poll(wc);
  now_ += 1500;
  sv::run_timers(a_.internals());  // its timer checks first
  EXPECT_EQ(completions(a_).size(), 1u);
}

TEST_F(SoftverbsDatagramQueue, AReceiverThatGoesAwayEndsTheWaiting) {
  fill_lane(3);
  b_.internals().segment->closed.store(1);
  ASSERT_TRUE(until(
      [&] {
        now_ += 10'000;
        sv::control_device(a_.context);
      },
      [&] { return peer_b().gone; }));
  EXPECT_EQ(completions(a_).size(), 3u);
  EXPECT_EQ(lost() + dropped(a_, sv::Drop::peer_gone), 3u);
  EXPECT_EQ(peer_b().users, 1u);
}

}  // namespace softverbs_test::datagram_queue
