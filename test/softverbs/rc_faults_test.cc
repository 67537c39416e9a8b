// Faults of reliable connections: delayed, refused, slowed down or failed, never reordered.
#include <gtest/gtest.h>

#include <memory>

#include "softverbs/fault_link.h"

namespace softverbs_test::faults_connected {

using std::chrono::nanoseconds;

void expect_in_order(FaultyLink& t, std::uint64_t count) {
  ASSERT_EQ(t.link.at_a.size(), count);
  ASSERT_EQ(t.link.at_b.size(), count);
  for (std::uint64_t i = 0; i < count; ++i) {
    EXPECT_EQ(t.link.at_a[i].wr_id, i);
    EXPECT_EQ(t.link.at_a[i].status, IBV_WC_SUCCESS);
    EXPECT_EQ(t.link.at_b[i].wr_id, i);
    EXPECT_TRUE(t.arrived(i, i)) << i;
  }
}

TEST(SoftverbsFaultyConnections, AnEmptyPlanChangesNothing) {
  FaultyLink t({});
  t.receive(0, 200);
  for (std::uint64_t i = 0; i < 200; ++i) ASSERT_EQ(t.send(i), 0);
  t.settle();
  expect_in_order(t, 200);
  EXPECT_EQ(t.statistics().bytes, 200u * 32);
}

TEST(SoftverbsFaultyConnections, DelaysToTheNanosecond) {
  FaultyLink t({.delay_min = nanoseconds(777), .delay_max = nanoseconds(777)});
  t.receive(0, 10);
  for (std::uint64_t i = 0; i < 10; ++i) ASSERT_EQ(t.send(i), 0);
  t.settle();
  t.pass(776);
  EXPECT_TRUE(t.link.at_b.empty());
  t.pass(1);
  expect_in_order(t, 10);
  EXPECT_EQ(t.statistics().delayed, 10u);
}

TEST(SoftverbsFaultyConnections, KeepTheirOrderWhateverTheDelays) {
  FaultyLink t({.seed = 1, .delay_max = nanoseconds(10'000)});
  t.receive(0, 200);
  for (std::uint64_t i = 0; i < 200; ++i) {
    ASSERT_EQ(t.send(i), 0);
    t.now += 50;
  }
  for (int i = 0; i < 50; ++i) t.pass(500);
  expect_in_order(t, 200);
}

TEST(SoftverbsFaultyConnections, QueuePairsDoNotWaitForEachOther) {
  FaultyLink t({.delay_min = nanoseconds(1000), .delay_max = nanoseconds(1000)});
  ibv_qp* qa = t.a.make_qp();
  ibv_qp* qb = t.b.make_qp();
  connect(t.a, qa, t.b, qb, kFaultConnection);
  t.receive(0, 2);
  ASSERT_EQ(t.send(0), 0);
  t.now += 400;
  ASSERT_EQ(Send(1, t.a.sge(0, 8)).post(qa), 0);
  t.pass(600);
  ASSERT_EQ(t.link.at_b.size(), 1u);
  EXPECT_EQ(t.link.at_b[0].qp_num, t.link.qb->qp_num);
  t.pass(400);
  EXPECT_EQ(t.link.at_b.size(), 2u);
}

TEST(SoftverbsFaultyConnections, HeldInlineBytesAreCopies) {
  FaultyLink t({.delay_min = nanoseconds(100), .delay_max = nanoseconds(100)});
  t.receive(0, 2);
  ASSERT_EQ(t.send(0, 32, IBV_SEND_SIGNALED | IBV_SEND_INLINE), 0);
  ASSERT_EQ(t.send(1, 200, IBV_SEND_SIGNALED | IBV_SEND_INLINE), 0);
  std::fill_n(t.a.memory.begin(), 8192, std::byte{0});
  t.pass(100);
  ASSERT_EQ(t.link.at_b.size(), 2u);
  EXPECT_TRUE(t.arrived(0, 0));
  EXPECT_TRUE(t.arrived(1, 1, 200));
}

TEST(SoftverbsFaultyConnections, OneSidedWorkIsDelayedToo) {
  FaultyLink t({.delay_min = nanoseconds(100), .delay_max = nanoseconds(100)});
  fill(t.a.bytes(0, 64), 5);
  ASSERT_EQ(
      Send(0, t.a.sge(0, 64), IBV_WR_RDMA_WRITE).to(t.b.address(0), t.b.mr->rkey).post(t.link.qa),
      0);
  ASSERT_EQ(
      Send(1, t.a.sge(64, 64), IBV_WR_RDMA_READ).to(t.b.address(0), t.b.mr->rkey).post(t.link.qa),
      0);
  t.pass(99);
  EXPECT_FALSE(holds(t.b.bytes(0, 64), 5));
  t.pass(1);
  EXPECT_TRUE(holds(t.b.bytes(0, 64), 5));
  EXPECT_TRUE(holds(t.a.bytes(64, 64), 5));
  EXPECT_EQ(t.link.at_a.size(), 2u);
}

TEST(SoftverbsFaultyConnections, MemoryIsCheckedWhenTheWorkRuns) {
  FaultyLink t({.delay_min = nanoseconds(100), .delay_max = nanoseconds(100)});
  ibv_mr* mr = sv::reg_mr(t.a.pd, t.a.memory.data(), 64, IBV_ACCESS_LOCAL_WRITE);
  ASSERT_NE(mr, nullptr);
  t.receive(0, 1);
  ASSERT_EQ(Send(0, {t.a.address(0), 64, mr->lkey}).post(t.link.qa), 0);
  ASSERT_EQ(t.send(1), 0);
  ASSERT_EQ(sv::dereg_mr(mr), 0);
  t.pass(100);
  ASSERT_EQ(t.link.at_a.size(), 2u);
  EXPECT_EQ(t.link.at_a[0].status, IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(t.link.at_a[1].status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(t.link.at_b.empty());
}

TEST(SoftverbsFaultyConnections, ForcedRnrTakesTheReceiversTimer) {
  FaultyLink t({.rnr = 1});
  t.receive(0, 3);
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_EQ(t.send(i), 0);
  for (std::uint64_t i = 0; i < 3; ++i) {
    t.pass(kFaultRnrNs - 1);
    EXPECT_EQ(t.link.at_b.size(), i);
    t.pass(1);
    EXPECT_EQ(t.link.at_b.size(), i + 1);
  }
  expect_in_order(t, 3);
  EXPECT_EQ(t.statistics().rnr, 3u);
}

TEST(SoftverbsFaultyConnections, RnrInARowIsWithinTheCount) {
  ConnectOptions how = kFaultConnection;
  how.rnr_retry = 3;
  FaultyLink t({.rnr = 1, .rnr_in_a_row = 3}, how);
  t.receive(0, 2);
  ASSERT_EQ(t.send(0), 0);
  ASSERT_EQ(t.send(1), 0);
  for (int i = 0; i < 6; ++i) t.pass(kFaultRnrNs);
  expect_in_order(t, 2);
  EXPECT_EQ(t.statistics().rnr, 6u);
}

TEST(SoftverbsFaultyConnections, RnrInARowBeyondTheCountEndsIt) {
  ConnectOptions how = kFaultConnection;
  how.rnr_retry = 2;
  FaultyLink t({.rnr = 1, .rnr_in_a_row = 3}, how);
  t.receive(0, 3);
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_EQ(t.send(i), 0);
  t.settle();
  t.pass(kFaultRnrNs);
  t.pass(kFaultRnrNs - 1);
  EXPECT_TRUE(t.link.at_a.empty());
  t.pass(1);
  ASSERT_EQ(t.link.at_a.size(), 3u);
  EXPECT_EQ(t.link.at_a[0].status, IBV_WC_RNR_RETRY_EXC_ERR);
  EXPECT_EQ(t.link.at_a[1].status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(t.link.at_a[2].status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(t.link.at_b.empty());
  EXPECT_EQ(state_of(t.link.qa), IBV_QPS_ERR);
}

TEST(SoftverbsFaultyConnections, RnrIsForMessagesOnly) {
  FaultyLink t({.rnr = 1});
  ASSERT_EQ(
      Send(0, t.a.sge(0, 64), IBV_WR_RDMA_WRITE).to(t.b.address(0), t.b.mr->rkey).post(t.link.qa),
      0);
  t.settle();
  EXPECT_EQ(t.link.at_a.size(), 1u);
  EXPECT_EQ(t.statistics().rnr, 0u);
}

TEST(SoftverbsFaultyConnections, KeepTheirOrderUnderRnrAndDelay) {
  FaultyLink t({.seed = 2, .rnr = 0.2, .rnr_in_a_row = 2, .delay_max = nanoseconds(5000)});
  t.receive(0, 200);
  for (std::uint64_t i = 0; i < 200; ++i) ASSERT_EQ(t.send(i, i % 3 == 0 ? 400 : 32), 0);
  for (int i = 0; i < 200 && t.link.at_b.size() < 200; ++i) t.pass(kFaultRnrNs);
  expect_in_order(t, 200);
  EXPECT_NEAR(static_cast<double>(t.statistics().rnr), 80, 60);
}

TEST(SoftverbsFaultyConnections, BytesPerSecondAreSharedExactly) {
  // 3 bytes in 2 ns, shared by two queue pairs: 60 messages of 1000 bytes take 40 us.
  FaultyLink t({.bytes_per_second = 1'500'000'000});
  ibv_qp* qa = t.a.make_qp();
  ibv_qp* qb = t.b.make_qp();
  connect(t.a, qa, t.b, qb, kFaultConnection);
  t.receive(0, 60);
  for (std::uint64_t i = 0; i < 60; ++i)
    ASSERT_EQ(Send(i, t.a.sge(0, 1000)).post(i % 2 == 0 ? t.link.qa : qa), 0);
  const std::uint64_t start = t.now;
  std::size_t seen = 0;
  while (t.now < start + 40'000) {
    t.now += 1;
    t.link.step();
    if (t.link.at_b.size() == seen) continue;
    ASSERT_EQ(t.link.at_b.size(), seen + 1);
    ++seen;
    EXPECT_EQ(t.now - start, (seen * 2000 + 2) / 3) << "rounded up, and no error adds up";
    EXPECT_EQ(t.link.at_b.back().qp_num, seen % 2 == 1 ? t.link.qb->qp_num : qb->qp_num);
  }
  EXPECT_EQ(seen, 60u);
}

/// Two senders, each with a context, on one link.
struct SharedPair {
  std::shared_ptr<sv::SharedLink> link;
  FaultyLink t;
  Link other;
  explicit SharedPair(std::uint64_t rate, std::uint64_t burst = 0)
      : link(sv::make_link(rate, burst).value()),
        t({.bytes_per_second = 1, .link = link}),  // its own rate has no effect
        other(timed(&t.now, &t.plan), timed(&t.now), kFaultConnection) {
    t.receive(0, 60);
    for (std::uint64_t i = 0; i < 60; ++i) EXPECT_EQ(other.b.post_recv(i, i * 4096, 4096), 0);
  }
  void send(std::uint64_t first, std::uint64_t count) {
    for (std::uint64_t i = first; i < first + count; ++i) {
      ASSERT_EQ(t.send(i, 1000), 0);
      ASSERT_EQ(Send(i, other.a.sge(0, 1000)).post(other.qa), 0);
    }
  }
  void pass(std::uint64_t ns) {
    t.pass(ns);
    other.steps(2);
  }
  [[nodiscard]] std::size_t arrived() const { return t.link.at_b.size() + other.at_b.size(); }
};

TEST(SoftverbsFaultyConnections, ContextsOnOneLinkShareItsRateExactly) {
  SharedPair p(1'500'000'000);
  p.link.reset();  // the plans hold it
  const std::uint64_t start = p.t.now;
  p.send(0, 30);
  while (p.t.now < start + 40'000) {
    p.pass(1);
    ASSERT_EQ(p.arrived(), (p.t.now - start) * 3 / 2 / 1000);
  }
  EXPECT_EQ(p.t.link.at_b.size(), 30u);
  EXPECT_EQ(p.other.at_b.size(), 30u);
  // One alone has the full rate.
  const std::uint64_t again = p.t.now;
  for (std::uint64_t i = 30; i < 60; ++i) ASSERT_EQ(p.t.send(i, 1000), 0);
  while (p.t.now < again + 20'000) p.pass(1);
  EXPECT_EQ(p.t.link.at_b.size(), 60u);
}

TEST(SoftverbsFaultyConnections, ContextsOnOneLinkHaveOneBurst) {
  SharedPair p(1'000'000'000, 5000);
  p.send(0, 10);
  p.pass(0);
  EXPECT_EQ(p.arrived(), 5u);
  p.pass(999);
  EXPECT_EQ(p.arrived(), 5u);
  p.pass(1);
  EXPECT_EQ(p.arrived(), 6u);
}

TEST(SoftverbsFaultyConnections, WhoLeavesALinkHasARateOfItsOwn) {
  SharedPair p(1);
  p.send(0, 1);
  p.pass(1'000'000);
  EXPECT_EQ(p.arrived(), 0u);
  ASSERT_TRUE(sv::set_faults(p.other.a.context, {.bytes_per_second = 1'000'000'000}));
  p.pass(1'000);
  EXPECT_EQ(p.t.link.at_b.size(), 0u);
  EXPECT_EQ(p.other.at_b.size(), 1u);
}

TEST(SoftverbsFaultyConnections, BytesPerSecondHoldWhenPollsAreRare) {
  constexpr std::uint64_t kRate = 1'000'000'000;
  FaultyLink t({.bytes_per_second = kRate});
  const std::uint64_t start = t.now;
  std::uint64_t sent = 0;
  t.receive(0, 200);
  for (int round = 0; round < 100; ++round) {
    while (sent - t.link.at_a.size() < 200) ASSERT_EQ(t.send(sent++, 1000), 0);
    const std::size_t before = t.link.at_b.size();
    t.pass(10'000);
    t.receive(0, t.link.at_b.size() - before);
  }
  const double expected = static_cast<double>(t.now - start);  // a byte per nanosecond
  EXPECT_NEAR(static_cast<double>(t.link.at_b.size() * 1000), expected, expected / 100);
  EXPECT_LE(t.statistics().bytes, t.now - start);
}

TEST(SoftverbsFaultyConnections, ABurstGoesAtOnceAfterRest) {
  FaultyLink t({.bytes_per_second = 1'000'000'000, .burst_bytes = 5000});
  t.receive(0, 20);
  for (std::uint64_t i = 0; i < 10; ++i) ASSERT_EQ(t.send(i, 1000), 0);
  t.settle();
  EXPECT_EQ(t.link.at_b.size(), 5u);
  t.pass(999);
  EXPECT_EQ(t.link.at_b.size(), 5u);
  t.pass(1);
  EXPECT_EQ(t.link.at_b.size(), 6u);
  t.pass(4000 + 3000);  // 3000 of delay
  for (std::uint64_t i = 10; i < 16; ++i) ASSERT_EQ(t.send(i, 1000), 0);
  t.settle();
  EXPECT_EQ(t.link.at_b.size(), 13u);
}

TEST(SoftverbsFaultyConnections, NoRateIsSavedUpWhileWaiting) {
  FaultyLink t({.rnr = 1, .bytes_per_second = 1'000'000'000});
  t.receive(0, 4);
  for (std::uint64_t i = 0; i < 4; ++i) ASSERT_EQ(t.send(i, 1000), 0);
  t.pass(1000);  // the first is sent and refused
  ASSERT_EQ(t.statistics().rnr, 1u);
  t.pass(kFaultRnrNs - 1);
  t.pass(1);
  EXPECT_TRUE(t.link.at_b.empty()) << "it takes its time on the link once more";
  t.pass(999);
  EXPECT_EQ(t.link.at_b.size(), 1u);
}

TEST(SoftverbsFaultyConnections, OnePollTakesTheTimerAndSends) {
  FaultyLink t({.rnr = 1});
  t.receive(0, 1);
  ASSERT_EQ(t.send(0), 0);
  t.now += kFaultRnrNs;
  t.link.step();
  EXPECT_EQ(t.link.at_b.size(), 1u);
}

/// Posts a list of signaled messages.
void post_list(FaultyLink& t, std::uint64_t count) {
  std::vector<std::unique_ptr<Send>> list;
  for (std::uint64_t i = 0; i < count; ++i) {
    fill(t.a.bytes(i * 4096, 32), i + 1);
    list.push_back(std::make_unique<Send>(i, t.a.sge(i * 4096, 32)));
    if (i != 0) list[i - 1]->wr.next = &list[i]->wr;
  }
  ASSERT_EQ(list[0]->post(t.link.qa), 0);
}

TEST(SoftverbsFaultyConnections, TheNthFailsInTheMiddleOfAList) {
  FaultyLink t({.fail_at = 4, .fail_status = IBV_WC_REM_OP_ERR});
  t.receive(0, 8);
  post_list(t, 8);
  t.settle();
  ASSERT_EQ(t.link.at_a.size(), 8u);
  for (std::uint64_t i = 0; i < 8; ++i) {
    EXPECT_EQ(t.link.at_a[i].wr_id, i);
    EXPECT_EQ(t.link.at_a[i].status, i < 3    ? IBV_WC_SUCCESS
                                     : i == 3 ? IBV_WC_REM_OP_ERR
                                              : IBV_WC_WR_FLUSH_ERR);
  }
  EXPECT_EQ(t.link.at_b.size(), 3u);
  EXPECT_EQ(state_of(t.link.qa), IBV_QPS_ERR);
  EXPECT_EQ(t.statistics().failed, 1u);
  ASSERT_EQ(t.send(8), 0);  // flushed
  t.settle();
  ASSERT_EQ(t.link.at_a.size(), 9u);
  EXPECT_EQ(t.link.at_a[8].status, IBV_WC_WR_FLUSH_ERR);
}

TEST(SoftverbsFaultyConnections, TheNthOfOneQueuePair) {
  FaultyLink t({});
  ibv_qp* qa = t.a.make_qp();
  ibv_qp* qb = t.b.make_qp();
  connect(t.a, qa, t.b, qb, kFaultConnection);
  ASSERT_TRUE(
      sv::set_faults(t.a.context, {.fail_at = 2, .fail_queue_pair = qa->qp_num}).has_value());
  t.receive(0, 8);
  for (std::uint64_t i = 0; i < 4; ++i) {
    ASSERT_EQ(t.send(i), 0);
    if (i >= 2) continue;
    ASSERT_EQ(Send(10 + i, t.a.sge(0, 8), IBV_WR_SEND, 0).post(qa), 0);
  }
  t.settle();
  EXPECT_EQ(state_of(qa), IBV_QPS_ERR);
  EXPECT_EQ(state_of(t.link.qa), IBV_QPS_RTS);
  ASSERT_EQ(t.link.at_a.size(), 5u);
  for (const ibv_wc& wc : t.link.at_a)
    EXPECT_EQ(wc.status, wc.wr_id == 11 ? IBV_WC_GENERAL_ERR : IBV_WC_SUCCESS);
}

TEST(SoftverbsFaultyConnections, HeldWorkIsFlushedOnce) {
  FaultyLink t({.delay_min = nanoseconds(1000), .delay_max = nanoseconds(1000)});
  t.receive(0, 8);
  ASSERT_EQ(t.send(0), 0);
  t.pass(1000);
  for (std::uint64_t i = 1; i < 6; ++i) ASSERT_EQ(t.send(i), 0);
  t.a.fail(t.link.qa);
  ASSERT_EQ(t.send(6), 0);
  t.pass(5000);
  ASSERT_EQ(t.link.at_a.size(), 7u);
  for (std::uint64_t i = 0; i < 7; ++i) {
    EXPECT_EQ(t.link.at_a[i].wr_id, i);
    EXPECT_EQ(t.link.at_a[i].status, i == 0 ? IBV_WC_SUCCESS : IBV_WC_WR_FLUSH_ERR);
  }
  EXPECT_EQ(t.link.at_b.size(), 1u);
}

TEST(SoftverbsFaultyConnections, HeldWorkTakesRoomInTheQueue) {
  FaultyLink t({.delay_min = nanoseconds(1000), .delay_max = nanoseconds(1000)});
  t.receive(0, 300);
  for (std::uint64_t i = 0; i < 256; ++i) ASSERT_EQ(t.send(i), 0);
  EXPECT_EQ(t.send(256), ENOMEM);
  t.pass(1000);
  EXPECT_EQ(t.link.at_a.size(), 256u);
  EXPECT_EQ(t.send(256), 0);
}

TEST(SoftverbsFaultyConnections, DestroyedWithHeldWork) {
  FaultyLink t({.delay_min = nanoseconds(1000), .delay_max = nanoseconds(1000)});
  ibv_qp* qa = t.a.make_qp();
  ibv_qp* qb = t.b.make_qp();
  connect(t.a, qa, t.b, qb, kFaultConnection);
  t.receive(0, 4);
  for (std::uint64_t i = 0; i < 4; ++i) ASSERT_EQ(Send(i, t.a.sge(0, 8)).post(qa), 0);
  ASSERT_EQ(t.send(7), 0);
  t.a.destroy(qa);
  t.pass(1000);
  ASSERT_EQ(t.link.at_a.size(), 1u);
  EXPECT_EQ(t.link.at_a[0].wr_id, 7u);
  EXPECT_EQ(t.link.at_b.size(), 1u);
}

TEST(SoftverbsFaultyConnections, HeldWorkEndsWhenThePeerIsGone) {
  std::uint64_t now = 1'000'000'000;
  const sv::FaultPlan plan{.delay_min = nanoseconds(1000), .delay_max = nanoseconds(1000)};
  Node a(timed(&now, &plan));
  ibv_qp* qa = a.make_qp();
  {
    Node b(timed(&now));
    connect(a, qa, b, b.make_qp(), kFaultConnection);
  }
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_EQ(Send(i, a.sge(0, 8)).post(qa), 0);
  now += 1'000'000;  // liveness is checked once a millisecond
  sv::control_device(a.context);
  ibv_wc wc[4];
  ASSERT_EQ(ibv_poll_cq(a.cq, 4, wc), 3);
  EXPECT_EQ(wc[0].status, IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(wc[1].status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(wc[2].wr_id, 2u);
}

TEST(SoftverbsFaultyConnections, WithoutAPlanTimeIsTheClocksToo) {
  // Retries are exhausted in virtual time: the peer's queue pair never becomes ready.
  std::uint64_t now = 1'000'000'000;
  Node a(timed(&now));
  Node b(timed(&now));
  ibv_qp* qa = a.make_qp();
  ibv_qp* qb = b.make_qp();
  ASSERT_EQ(a.init(qa), 0);
  ASSERT_EQ(a.rtr(qa, b.endpoint(qb)), 0);
  ASSERT_EQ(a.rts(qa, 31, 2), 0);  // 2.4 hours each
  sv::control_device(b.context);
  ASSERT_EQ(Send(1, a.sge(0, 8)).post(qa), 0);
  ibv_wc wc{};
  const auto settle = [&] {
    for (int i = 0; i < 3 * kLook; ++i) {
      if (b.poll(wc)) return true;
      if (a.poll(wc)) return true;
    }
    return false;
  };
  EXPECT_FALSE(settle());
  for (int tries = 0; tries < 2; ++tries) {
    now += (std::uint64_t{4096} << 31) - 1;
    EXPECT_FALSE(settle());
    now += 1;
    EXPECT_EQ(settle(), tries == 1);
  }
  EXPECT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
}

}  // namespace softverbs_test::faults_connected
