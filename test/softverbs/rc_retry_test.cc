// Receivers that are not ready: no receive posted, not connected yet, or gone.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "softverbs/rc_link.h"

namespace softverbs_test::retry {

constexpr std::uint8_t kRnrTimer = 14;  // 1.28 ms
constexpr std::uint64_t kRnrNs = 1'280'000;
constexpr std::uint8_t kTimeout = 8;  // 4.096 us << 8
constexpr std::uint64_t kTimeoutNs = 4096u << 8;

/// A link with a sender whose time the test moves.
struct Timed {
  std::uint64_t now = 1'000'000'000;
  Link link;
  explicit Timed(const ConnectOptions& how = {.rnr_timer = kRnrTimer, .timeout = kTimeout})
      : link(options(&now), options(&now), how) {}
  static NodeOptions options(const std::uint64_t* clock) {
    NodeOptions o;
    o.clock = spinwire::Clock::manual(clock);
    return o;
  }
  /// The receiver's answer reaches the sender, which arms a timer.
  void settle() { link.steps(4); }
};

TEST(SoftverbsRnr, RetriedByTimerAndDeliveredOnceInOrder) {
  Timed t;
  fill(t.link.a.bytes(0, 4096), 1);
  for (std::uint64_t i = 0; i < 10; ++i)
    ASSERT_EQ(Send(i, t.link.a.sge(i * 64, i % 2 == 0 ? 40 : 200)).post(t.link.qa), 0);
  t.settle();
  EXPECT_TRUE(t.link.at_a.empty());
  for (std::uint64_t i = 0; i < 10; ++i) ASSERT_EQ(t.link.b.post_recv(100 + i, 4096 * i, 4096), 0);
  t.settle();
  EXPECT_TRUE(t.link.at_b.empty()) << "not before the timer";
  t.now += kRnrNs - 1;
  t.settle();
  EXPECT_TRUE(t.link.at_b.empty()) << "not before the timer";
  t.now += 1;
  t.settle();
  ASSERT_EQ(t.link.at_a.size(), 10u);
  ASSERT_EQ(t.link.at_b.size(), 10u);
  for (std::uint64_t i = 0; i < 10; ++i) {
    EXPECT_EQ(t.link.at_a[i].wr_id, i);
    EXPECT_EQ(t.link.at_a[i].status, IBV_WC_SUCCESS);
    EXPECT_EQ(t.link.at_b[i].wr_id, 100 + i);
    EXPECT_EQ(t.link.at_b[i].byte_len, i % 2 == 0 ? 40u : 200u);
    EXPECT_EQ(std::memcmp(&t.link.b.memory[4096 * i], &t.link.a.memory[i * 64], 40), 0);
  }
  t.now += 100 * kRnrNs;
  t.settle();
  EXPECT_EQ(t.link.at_b.size(), 10u);
}

TEST(SoftverbsRnr, IsRetriedThoughTheClockHasSteppedBack) {
  Timed t;
  ASSERT_EQ(Send(1, t.link.a.sge(0, 40)).post(t.link.qa), 0);
  t.settle();
  ASSERT_EQ(t.link.b.post_recv(100, 0, 4096), 0);
  t.settle();
  t.now = 1000;
  t.settle();
  EXPECT_TRUE(t.link.at_b.empty()) << "not before the timer";
  t.now += kRnrNs;
  t.settle();
  EXPECT_EQ(t.link.at_b.size(), 1u);
}

TEST(SoftverbsRnr, TheReceiversTimerCounts) {
  // The receiver determines the delay, not the sender's own setting.
  Timed t;
  ASSERT_EQ(Send(1, t.link.b.sge(0, 8)).post(t.link.qb), 0);
  ibv_qp_attr attr{};
  attr.min_rnr_timer = 1;  // 10 us
  ASSERT_EQ(sv::modify_qp(t.link.qa, &attr, IBV_QP_MIN_RNR_TIMER), 0);
  t.settle();
  ASSERT_EQ(t.link.a.post_recv(2, 0, 64), 0);
  t.now += 9'999;
  t.settle();
  EXPECT_TRUE(t.link.at_a.empty());
  t.now += 1;
  t.settle();
  EXPECT_EQ(t.link.at_a.size(), 1u);
}

TEST(SoftverbsRnr, SomeReceivesTakeSomeOfThem) {
  Timed t;
  for (std::uint64_t i = 0; i < 6; ++i) ASSERT_EQ(Send(i, t.link.a.sge(0, 8)).post(t.link.qa), 0);
  std::size_t posted = 0;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 2; ++i) ASSERT_EQ(t.link.b.post_recv(posted++, 0, 64), 0);
    t.settle();
    ASSERT_EQ(t.link.at_b.size(), posted);
    ASSERT_EQ(t.link.at_a.size(), posted);
    t.now += kRnrNs;
  }
  for (std::uint64_t i = 0; i < 6; ++i) EXPECT_EQ(t.link.at_a[i].wr_id, i);
}

TEST(SoftverbsRnr, CountIsRespected) {
  Timed t({.rnr_timer = kRnrTimer, .timeout = kTimeout, .rnr_retry = 2});
  ASSERT_EQ(Send(1, t.link.a.sge(0, 8)).post(t.link.qa), 0);
  ASSERT_EQ(Send(2, t.link.a.sge(0, 8), IBV_WR_SEND, 0).post(t.link.qa), 0);
  for (int tries = 0; tries < 2; ++tries) {
    t.settle();
    EXPECT_TRUE(t.link.at_a.empty()) << tries;
    t.now += kRnrNs;
  }
  t.settle();
  ASSERT_EQ(t.link.at_a.size(), 2u);
  EXPECT_EQ(t.link.at_a[0].status, IBV_WC_RNR_RETRY_EXC_ERR);
  EXPECT_EQ(t.link.at_a[0].wr_id, 1u);
  EXPECT_EQ(t.link.at_a[1].status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(t.link.at_a[1].wr_id, 2u);
  EXPECT_EQ(state_of(t.link.qa), IBV_QPS_ERR);
  EXPECT_EQ(state_of(t.link.qb), IBV_QPS_RTS);
  // A message still in the lane is not taken any more: it was never accepted.
  ASSERT_EQ(t.link.b.post_recv(3, 0, 64), 0);
  t.now += kRnrNs;
  t.settle();
  EXPECT_TRUE(t.link.at_b.empty());
}

TEST(SoftverbsRnr, EachMessageHasTheWholeCount) {
  Timed t({.rnr_timer = kRnrTimer, .timeout = kTimeout, .rnr_retry = 1});
  for (std::uint64_t i = 0; i < 5; ++i) {
    ASSERT_EQ(Send(i, t.link.a.sge(0, 8)).post(t.link.qa), 0);
    t.settle();
    ASSERT_EQ(t.link.b.post_recv(i, 0, 64), 0);
    t.now += kRnrNs;
    t.settle();
    ASSERT_EQ(t.link.at_a.size(), i + 1);
    EXPECT_EQ(t.link.at_a[i].status, IBV_WC_SUCCESS);
  }
}

TEST(SoftverbsRnr, SevenMeansForEver) {
  Timed t;
  ASSERT_EQ(Send(1, t.link.a.sge(0, 8)).post(t.link.qa), 0);
  for (int tries = 0; tries < 100; ++tries) {
    t.settle();
    t.now += kRnrNs;
  }
  EXPECT_TRUE(t.link.at_a.empty());
  ASSERT_EQ(t.link.b.post_recv(1, 0, 64), 0);
  t.settle();
  ASSERT_EQ(t.link.at_a.size(), 1u);
  EXPECT_EQ(t.link.at_a[0].status, IBV_WC_SUCCESS);
}

TEST(SoftverbsRnr, OtherQueuePairsGoOn) {
  Timed t;
  ibv_srq* const shared = std::exchange(t.link.b.srq, nullptr);
  ibv_qp* own = t.link.b.make_qp();
  t.link.b.srq = shared;
  ibv_qp* other = t.link.a.make_qp();
  connect(t.link.a, other, t.link.b, own, {.rnr_timer = kRnrTimer, .timeout = kTimeout});
  ASSERT_EQ(Send(1, t.link.a.sge(0, 8)).post(t.link.qa), 0);  // no shared receive
  for (std::uint64_t i = 0; i < 20; ++i) {
    ASSERT_EQ(t.link.b.post_recv(i, 0, 64, own), 0);
    ASSERT_EQ(Send(10 + i, t.link.a.sge(0, 100)).post(other), 0);
    if (i % 3 == 0) t.settle();
  }
  t.settle();
  EXPECT_EQ(t.link.at_b.size(), 20u);
  ASSERT_EQ(t.link.at_a.size(), 20u);
  for (const ibv_wc& wc : t.link.at_a) EXPECT_EQ(wc.qp_num, other->qp_num);
  ASSERT_EQ(t.link.b.post_recv(50, 0, 64), 0);
  t.now += kRnrNs;
  t.settle();
  ASSERT_EQ(t.link.at_a.size(), 21u);
  EXPECT_EQ(t.link.at_a[20].wr_id, 1u);
}

TEST(SoftverbsRnr, InlineBytesSurvive) {
  Timed t;
  std::vector<std::byte> bytes(200);
  for (const std::uint32_t size : {30u, 200u}) {
    fill(std::span(bytes).first(size), size);
    const ibv_sge sge{reinterpret_cast<std::uint64_t>(bytes.data()), size, 0};
    ASSERT_EQ(Send(size, sge, IBV_WR_SEND, IBV_SEND_INLINE | IBV_SEND_SIGNALED).post(t.link.qa), 0);
  }
  std::fill(bytes.begin(), bytes.end(), std::byte{0});
  t.settle();
  ASSERT_EQ(t.link.b.post_recv(1, 0, 256), 0);
  ASSERT_EQ(t.link.b.post_recv(2, 256, 256), 0);
  t.now += kRnrNs;
  t.settle();
  ASSERT_EQ(t.link.at_b.size(), 2u);
  EXPECT_TRUE(holds(t.link.b.bytes(0, 30), 30));
  EXPECT_TRUE(holds(t.link.b.bytes(256, 200), 200));
}

TEST(SoftverbsRnr, WriteWithImmediateAndReferencesToo) {
  Timed t;
  fill(t.link.a.bytes(0, 100'000), 5);
  ASSERT_EQ(Send(1, t.link.a.sge(0, 100'000), IBV_WR_RDMA_WRITE_WITH_IMM)
                .to(t.link.b.address(200'000), t.link.b.mr->rkey)
                .post(t.link.qa),
            0);
  ASSERT_EQ(Send(2, t.link.a.sge(0, 50'000)).post(t.link.qa), 0);
  t.settle();
  EXPECT_TRUE(all_are(t.link.b.bytes(200'000, 100'000), 0)) << "no receive: nothing is written";
  ASSERT_EQ(t.link.b.post_recv(1, 0, 0), 0);
  ASSERT_EQ(t.link.b.post_recv(2, 0, 50'000), 0);
  t.now += kRnrNs;
  t.settle();
  ASSERT_EQ(t.link.at_b.size(), 2u);
  EXPECT_TRUE(holds(t.link.b.bytes(200'000, 100'000), 5));
  EXPECT_TRUE(holds(t.link.b.bytes(0, 50'000), 5));
}

/// Two nodes whose queue pairs are connected step by step.
struct Slow {
  std::uint64_t now = 1'000'000'000;
  Link link;  // another connected pair, which must not be affected
  ibv_qp* qa;
  ibv_qp* qb;
  Slow()
      : link(Timed::options(&now), Timed::options(&now)),
        qa(link.a.make_qp()),
        qb(link.b.make_qp()) {
    must(link.a.init(qa) == 0 && link.b.init(qb) == 0, "INIT");
    must(link.a.rtr(qa, link.b.endpoint(qb)) == 0, "RTR");
    must(link.a.rts(qa, kTimeout, 3) == 0, "RTS");
  }
  void settle() { link.steps(4); }
  void other_pair_works() {
    const std::size_t before = link.at_a.size();
    ASSERT_EQ(link.b.post_recv(0, 0, 64), 0);
    ASSERT_EQ(Send(999, link.a.sge(0, 8)).post(link.qa), 0);
    settle();
    ASSERT_EQ(link.at_a.size(), before + 1);
    EXPECT_EQ(link.at_a.back().wr_id, 999u);
    EXPECT_EQ(link.at_a.back().status, IBV_WC_SUCCESS);
    link.at_a.pop_back();
  }
};

class SoftverbsNotReady : public testing::TestWithParam<ibv_wr_opcode> {
 protected:
  static void post(const Slow& s, std::uint64_t id) {
    Send send(id, s.link.a.sge(0, 8), GetParam());
    send.to(s.link.b.address(64), s.link.b.mr->rkey);
    ASSERT_EQ(send.post(s.qa), 0);
  }
};

TEST_P(SoftverbsNotReady, BecomesReadyInTime) {
  Slow s;
  post(s, 1);
  post(s, 2);
  s.settle();
  s.now += kTimeoutNs;
  s.settle();
  EXPECT_TRUE(s.link.at_a.empty());
  s.other_pair_works();
  ASSERT_EQ(s.link.b.rtr(s.qb, s.link.a.endpoint(s.qa)), 0);
  ASSERT_EQ(s.link.b.post_recv(1, 0, 64), 0);
  ASSERT_EQ(s.link.b.post_recv(2, 0, 64), 0);
  s.settle();
  EXPECT_TRUE(s.link.at_a.empty());
  s.now += kTimeoutNs;
  s.settle();
  ASSERT_EQ(s.link.at_a.size(), 2u);
  for (std::uint64_t i = 0; i < 2; ++i) {
    EXPECT_EQ(s.link.at_a[i].wr_id, i + 1);
    EXPECT_EQ(s.link.at_a[i].status, IBV_WC_SUCCESS);
  }
}

TEST_P(SoftverbsNotReady, GivesUpAfterTheCount) {
  Slow s;
  post(s, 1);
  post(s, 2);
  for (int tries = 0; tries < 3; ++tries) {
    s.settle();
    EXPECT_TRUE(s.link.at_a.empty()) << tries;
    s.now += kTimeoutNs - 1;
    s.settle();
    EXPECT_TRUE(s.link.at_a.empty()) << tries;
    s.now += 1;
  }
  s.settle();
  ASSERT_EQ(s.link.at_a.size(), 2u);
  EXPECT_EQ(s.link.at_a[0].status, IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(s.link.at_a[1].status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(state_of(s.qa), IBV_QPS_ERR);
  s.link.at_a.clear();
  s.other_pair_works();
}

TEST_P(SoftverbsNotReady, DestroyedOrFailedPeer) {
  for (const bool destroyed : {false, true}) {
    SCOPED_TRACE(destroyed);
    Slow s;
    ASSERT_EQ(s.link.b.rtr(s.qb, s.link.a.endpoint(s.qa)), 0);
    ASSERT_EQ(s.link.b.rts(s.qb), 0);
    ASSERT_EQ(s.link.b.post_recv(1, 0, 64), 0);
    post(s, 1);
    s.settle();
    ASSERT_EQ(s.link.at_a.size(), 1u);
    if (destroyed) {
      s.link.b.destroy(s.qb);
    } else {
      s.link.b.fail(s.qb);
    }
    post(s, 2);
    for (int tries = 0; tries < 3; ++tries) {
      s.settle();
      EXPECT_EQ(s.link.at_a.size(), 1u);
      s.now += kTimeoutNs;
    }
    s.settle();
    ASSERT_EQ(s.link.at_a.size(), 2u);
    EXPECT_EQ(s.link.at_a[1].status, IBV_WC_RETRY_EXC_ERR);
    s.link.at_a.clear();
    s.other_pair_works();
  }
}

INSTANTIATE_TEST_SUITE_P(All, SoftverbsNotReady,
                         testing::Values(IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE,
                                         IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ),
                         [](const auto& p) { return "Opcode" + std::to_string(p.param); });

TEST(SoftverbsNotReadyPeer, TimeoutZeroWaitsForEver) {
  Slow s;
  ibv_qp* qa = s.link.a.make_qp();
  ibv_qp* qb = s.link.b.make_qp();
  ASSERT_EQ(s.link.a.init(qa), 0);
  ASSERT_EQ(s.link.b.init(qb), 0);
  ASSERT_EQ(s.link.a.rtr(qa, s.link.b.endpoint(qb)), 0);
  ASSERT_EQ(s.link.a.rts(qa, 0, 1), 0);
  ASSERT_EQ(Send(1, s.link.a.sge(0, 8)).post(qa), 0);
  for (int i = 0; i < 200; ++i) {
    s.settle();
    s.now += 10'000'000;
  }
  EXPECT_TRUE(s.link.at_a.empty());
  ASSERT_EQ(s.link.b.rtr(qb, s.link.a.endpoint(qa)), 0);
  ASSERT_EQ(s.link.b.post_recv(1, 0, 64), 0);
  s.settle();
  EXPECT_EQ(s.link.at_a.size(), 1u);
}

TEST(SoftverbsNotReadyPeer, ConnectedToSomebodyElse) {
  // The number is right, but that queue pair has another peer.
  Slow s;
  ibv_qp* rival = s.link.a.make_qp();
  ASSERT_EQ(s.link.b.rtr(s.qb, s.link.a.endpoint(rival)), 0);
  ASSERT_EQ(s.link.b.rts(s.qb), 0);
  ASSERT_EQ(Send(1, s.link.a.sge(0, 8), IBV_WR_RDMA_WRITE)
                .to(s.link.b.address(64), s.link.b.mr->rkey)
                .post(s.qa),
            0);
  for (int tries = 0; tries < 4; ++tries) {
    s.settle();
    s.now += kTimeoutNs;
  }
  s.settle();
  ASSERT_EQ(s.link.at_a.size(), 1u);
  EXPECT_EQ(s.link.at_a[0].status, IBV_WC_RETRY_EXC_ERR);
  EXPECT_TRUE(all_are(s.link.b.bytes(64, 8), 0));
}

TEST(SoftverbsNotReadyPeer, OneSidedWorkWaitsForTheSendsBeforeIt) {
  Timed t;
  fill(t.link.a.bytes(0, 64), 1);
  ASSERT_EQ(Send(1, t.link.a.sge(0, 8)).post(t.link.qa), 0);
  ASSERT_EQ(Send(2, t.link.a.sge(0, 64), IBV_WR_RDMA_WRITE)
                .to(t.link.b.address(0), t.link.b.mr->rkey)
                .post(t.link.qa),
            0);
  ASSERT_EQ(Send(3, t.link.a.sge(8, 8)).post(t.link.qa), 0);
  ASSERT_EQ(Send(4, t.link.a.sge(128, 64), IBV_WR_RDMA_READ)
                .to(t.link.b.address(0), t.link.b.mr->rkey)
                .post(t.link.qa),
            0);
  t.settle();  // RNR
  EXPECT_TRUE(all_are(t.link.b.bytes(0, 64), 0));
  ASSERT_EQ(t.link.b.post_recv(10, 1024, 64), 0);
  t.now += kRnrNs;
  t.link.poll_a();  // retransmits
  EXPECT_TRUE(all_are(t.link.b.bytes(0, 64), 0));
  t.link.poll_b();
  EXPECT_EQ(t.link.at_b.size(), 1u);
  EXPECT_TRUE(all_are(t.link.b.bytes(0, 64), 0)) << "before the acknowledgement was seen";
  for (int i = 0; i < kLook; ++i) t.link.poll_a();
  EXPECT_TRUE(holds(t.link.b.bytes(0, 64), 1));
  ASSERT_EQ(t.link.at_a.size(), 2u);
  // The READ waits for the second SEND, which has no receive.
  t.settle();
  EXPECT_EQ(t.link.at_a.size(), 2u);
  fill(t.link.b.bytes(0, 64), 9);
  ASSERT_EQ(t.link.b.post_recv(11, 1024, 64), 0);
  t.now += kRnrNs;
  t.settle();
  ASSERT_EQ(t.link.at_a.size(), 4u);
  for (std::uint64_t i = 0; i < 4; ++i) EXPECT_EQ(t.link.at_a[i].wr_id, i + 1);
  EXPECT_TRUE(holds(t.link.a.bytes(128, 64), 9));
}

TEST(SoftverbsNotReadyPeer, OneSidedWorkGoesOnBesideARefusal) {
  // One acknowledgement covers two queue pairs: the message taken has a WRITE behind it.
  Timed t;
  ibv_srq* const shared = std::exchange(t.link.b.srq, nullptr);
  ibv_qp* own = t.link.b.make_qp();
  t.link.b.srq = shared;
  ibv_qp* other = t.link.a.make_qp();
  connect(t.link.a, other, t.link.b, own, {.rnr_timer = kRnrTimer});
  ASSERT_EQ(t.link.b.post_recv(1, 0, 64, own), 0);
  fill(t.link.a.bytes(0, 64), 2);
  ASSERT_EQ(Send(1, t.link.a.sge(0, 8)).post(other), 0);
  ASSERT_EQ(Send(2, t.link.a.sge(0, 8)).post(t.link.qa), 0);  // no receive
  ASSERT_EQ(Send(3, t.link.a.sge(0, 64), IBV_WR_RDMA_WRITE)
                .to(t.link.b.address(512), t.link.b.mr->rkey)
                .post(other),
            0);
  t.settle();
  ASSERT_EQ(t.link.at_a.size(), 2u);
  EXPECT_EQ(t.link.at_a[1].wr_id, 3u);
  EXPECT_TRUE(holds(t.link.b.bytes(512, 64), 2));
}

TEST(SoftverbsNotReadyPeer, RefusalThatIsSeenBeforeItsPacketIsConsumed) {
  // The receiver may be between its answer and the head that covers it. A sender that checks
  // because of another packet must check again when the head arrives.
  Slow s;
  s.link.batch = 1;
  ASSERT_EQ(s.link.b.post_recv(1, 0, 64), 0);
  ASSERT_EQ(Send(1, s.link.a.sge(0, 8)).post(s.link.qa), 0);
  ASSERT_EQ(Send(2, s.link.a.sge(0, 8)).post(s.qa), 0);  // to a queue pair that is not ready
  s.link.poll_b();
  sv::OutLane& out = s.link.a.internals().peers.front()->out;
  ASSERT_EQ(out.control->head.load(), 1u);
  out.control->last_nak.store(2);  // the start of the receiver's next poll
  for (int i = 0; i < kLook; ++i) s.link.poll_a();
  ASSERT_EQ(s.link.at_a.size(), 1u) << "the sender has looked";
  ASSERT_EQ(out.head, 1u);
  s.settle();
  ASSERT_EQ(out.control->head.load(), 2u);
  s.settle();
  ASSERT_EQ(s.link.at_a.size(), 1u);
  EXPECT_EQ(s.link.at_a[0].wr_id, 1u);
}

}  // namespace softverbs_test::retry
