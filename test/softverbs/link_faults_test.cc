// Links that are cut and restored, in both directions, although only one end knows.
#include <gtest/gtest.h>

#include "softverbs/fault_link.h"

namespace softverbs_test::faults_link {

using std::chrono::nanoseconds;

constexpr std::uint64_t kEnough = 5 * kFaultTimeoutNs;  // for all retries

void expect_one(const std::vector<ibv_wc>& all, std::uint64_t id, ibv_wc_status status) {
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].wr_id, id);
  EXPECT_EQ(all[0].status, status);
}

TEST(SoftverbsCutLink, BothEndsTimeOut) {
  FaultyLink t({});
  t.receive(0, 2);
  ASSERT_EQ(t.a.post_recv(0, 0, 64), 0);
  ASSERT_EQ(sv::set_link(t.link.qa, sv::LinkState::down), 0);
  ASSERT_EQ(t.send(1), 0);
  ASSERT_EQ(Send(2, t.b.sge(0, 8)).post(t.link.qb), 0);
  t.settle();
  for (int i = 0; i < 2; ++i) t.pass(kFaultTimeoutNs);
  t.pass(kFaultTimeoutNs - 1);
  EXPECT_TRUE(t.link.at_a.empty());
  EXPECT_TRUE(t.link.at_b.empty());
  t.pass(1);
  expect_one(t.link.at_a, 1, IBV_WC_RETRY_EXC_ERR);
  expect_one(t.link.at_b, 2, IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(state_of(t.link.qa), IBV_QPS_ERR);
  EXPECT_EQ(state_of(t.link.qb), IBV_QPS_ERR);
  EXPECT_EQ(t.statistics().timeouts, 4u);
}

TEST(SoftverbsCutLink, HealedInTimeLosesNothing) {
  FaultyLink t({});
  t.receive(0, 20);
  for (std::uint64_t i = 0; i < 10; ++i) ASSERT_EQ(t.a.post_recv(i, (20 + i) * 4096, 64), 0);
  ASSERT_EQ(sv::set_link(t.link.qa, sv::LinkState::down), 0);
  for (std::uint64_t i = 0; i < 10; ++i) {
    ASSERT_EQ(t.send(i, i % 2 == 0 ? 32 : 1000), 0);
    ASSERT_EQ(Send(i, t.b.sge((40 + i) * 4096, 8)).post(t.link.qb), 0);
  }
  t.pass(2 * kFaultTimeoutNs);
  EXPECT_TRUE(t.link.at_a.empty());
  EXPECT_TRUE(t.link.at_b.empty());
  ASSERT_EQ(sv::set_link(t.link.qa, sv::LinkState::up), 0);
  t.pass(kFaultTimeoutNs);
  EXPECT_EQ(t.link.at_a.size(), 20u);
  EXPECT_EQ(t.link.at_b.size(), 20u);
  for (const ibv_wc& wc : t.link.at_b) {
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    if (wc.opcode != IBV_WC_RECV) continue;
    EXPECT_TRUE(t.arrived(wc.wr_id, wc.wr_id, wc.wr_id % 2 == 0 ? 32 : 1000));
  }
}

TEST(SoftverbsCutLink, WhatWasUnderWayArrivesOnce) {
  FaultyLink t({});
  t.receive(0, 10);
  ASSERT_EQ(t.send(0, 32, IBV_SEND_SIGNALED | IBV_SEND_INLINE), 0);
  ASSERT_EQ(t.send(1, 2000), 0);
  // The message is in the lane, not taken. Its acknowledgement is lost, so it is retransmitted.
  ASSERT_EQ(sv::set_link(t.link.qa, sv::LinkState::down), 0);
  t.settle();
  EXPECT_EQ(t.link.at_b.size(), 2u);
  EXPECT_TRUE(t.link.at_a.empty());
  ASSERT_EQ(sv::set_link(t.link.qa, sv::LinkState::up), 0);
  ASSERT_EQ(t.send(2), 0);
  t.pass(kFaultTimeoutNs);
  t.pass(kFaultTimeoutNs);
  ASSERT_EQ(t.link.at_a.size(), 3u);
  ASSERT_EQ(t.link.at_b.size(), 3u);
  for (std::uint64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(t.link.at_a[i].status, IBV_WC_SUCCESS);
    EXPECT_EQ(t.link.at_a[i].wr_id, i);
    EXPECT_TRUE(t.arrived(i, i, i == 1 ? 2000 : 32));
  }
}

TEST(SoftverbsCutLink, WhatCameBeforeItWasCutIsLost) {
  // A message of the peer in our lane is retransmitted when the link is up.
  FaultyLink t({});
  ASSERT_EQ(t.a.post_recv(0, 4096, 64), 0);
  fill(t.b.bytes(0, 64), 3);
  ASSERT_EQ(Send(5, t.b.sge(0, 64)).post(t.link.qb), 0);
  ASSERT_EQ(sv::set_link(t.link.qa, sv::LinkState::down), 0);
  t.settle();
  EXPECT_TRUE(t.link.at_a.empty());
  ASSERT_EQ(sv::set_link(t.link.qa, sv::LinkState::up), 0);
  t.settle();
  EXPECT_TRUE(t.link.at_a.empty()) << "not before the peer's timeout";
  t.pass(kFaultTimeoutNs);
  expect_one(t.link.at_a, 0, IBV_WC_SUCCESS);
  expect_one(t.link.at_b, 5, IBV_WC_SUCCESS);
  EXPECT_TRUE(holds(t.a.bytes(4096, 64), 3));
}

TEST(SoftverbsCutLink, NoOneSidedWorkPasses) {
  FaultyLink t({});
  const auto write = [&](std::uint64_t id, Node& from, ibv_qp* qp, Node& to) {
    ASSERT_EQ(
        Send(id, from.sge(0, 64), IBV_WR_RDMA_WRITE).to(to.address(4096), to.mr->rkey).post(qp), 0);
  };
  fill(t.a.bytes(0, 64), 1);
  fill(t.b.bytes(0, 64), 2);
  ASSERT_EQ(sv::set_link(t.link.qa, sv::LinkState::down), 0);
  write(1, t.a, t.link.qa, t.b);
  write(2, t.b, t.link.qb, t.a);
  t.settle();
  EXPECT_TRUE(all_are(t.a.bytes(4096, 64), 0));
  EXPECT_TRUE(all_are(t.b.bytes(4096, 64), 0));
  ASSERT_EQ(sv::set_link(t.link.qa, sv::LinkState::up), 0);
  t.pass(kFaultTimeoutNs);
  expect_one(t.link.at_a, 1, IBV_WC_SUCCESS);
  expect_one(t.link.at_b, 2, IBV_WC_SUCCESS);
  EXPECT_TRUE(holds(t.a.bytes(4096, 64), 2));
  EXPECT_TRUE(holds(t.b.bytes(4096, 64), 1));
}

TEST(SoftverbsCutLink, LocalWorkNeedsNoLink) {
  FaultyLink t({});
  ibv_mw* mw = t.a.context->ops.alloc_mw(t.a.pd, IBV_MW_TYPE_2);
  ASSERT_NE(mw, nullptr);
  ASSERT_EQ(sv::set_link(t.link.qa, sv::LinkState::down), 0);
  ibv_send_wr wr{};
  wr.wr_id = 9;
  wr.opcode = IBV_WR_BIND_MW;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.bind_mw.mw = mw;
  wr.bind_mw.rkey = mw->rkey;
  wr.bind_mw.bind_info = {t.a.mr, t.a.address(0), 64, IBV_ACCESS_REMOTE_READ};
  ibv_send_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_send(t.link.qa, &wr, &bad), 0);
  t.settle();
  expect_one(t.link.at_a, 9, IBV_WC_SUCCESS);
  EXPECT_EQ(t.a.context->ops.dealloc_mw(mw), 0);
}

TEST(SoftverbsCutLink, OneQueuePairsDoesNotCutAnothers) {
  FaultyLink t({});
  ibv_qp* qa = t.a.make_qp();
  ibv_qp* qb = t.b.make_qp();
  connect(t.a, qa, t.b, qb, kFaultConnection);
  t.receive(0, 4);
  ASSERT_EQ(t.a.post_recv(0, 0, 64), 0);
  ASSERT_EQ(sv::set_link(qa, sv::LinkState::down), 0);
  ASSERT_EQ(Send(1, t.a.sge(0, 8)).post(qa), 0);
  ASSERT_EQ(Send(2, t.b.sge(0, 8)).post(qb), 0);
  ASSERT_EQ(t.send(3), 0);
  ASSERT_EQ(Send(4, t.b.sge(0, 8)).post(t.link.qb), 0);
  t.settle();
  ASSERT_EQ(t.link.at_a.size(), 2u);
  ASSERT_EQ(t.link.at_b.size(), 2u);
  for (const ibv_wc& wc : t.link.at_a) EXPECT_EQ(wc.qp_num, t.link.qa->qp_num);
  for (int i = 0; i < 4; ++i) t.pass(kFaultTimeoutNs);
  EXPECT_EQ(state_of(qa), IBV_QPS_ERR);
  EXPECT_EQ(state_of(qb), IBV_QPS_ERR);
  EXPECT_EQ(state_of(t.link.qa), IBV_QPS_RTS);
}

TEST(SoftverbsCutLink, OfAPeerCutsAllThatPassesNowAndLater) {
  std::uint64_t now = 1'000'000'000;
  Node a(timed(&now)), b(timed(&now)), c(timed(&now));
  ibv_qp* ab = a.make_qp();
  ibv_qp* ba = b.make_qp();
  ibv_qp* ac = a.make_qp();
  ibv_qp* ca = c.make_qp();
  connect(a, ac, c, ca, kFaultConnection);
  ASSERT_EQ(sv::set_link(a.context, gid_of(b), sv::LinkState::down), 0);
  connect(a, ab, b, ba, kFaultConnection);
  for (Node* node : {&a, &b, &c}) ASSERT_EQ(node->post_recv(7, 0, 64), 0);
  ASSERT_EQ(Send(1, a.sge(0, 8)).post(ab), 0);
  ASSERT_EQ(Send(2, a.sge(0, 8)).post(ac), 0);
  ASSERT_EQ(Send(3, b.sge(0, 8)).post(ba), 0);
  std::vector<ibv_wc> at_a, at_b, at_c;
  const auto settle = [&] {
    ibv_wc wc{};
    for (int i = 0; i < 3 * kLook; ++i) {
      if (a.poll(wc)) at_a.push_back(wc);
      if (b.poll(wc)) at_b.push_back(wc);
      if (c.poll(wc)) at_c.push_back(wc);
    }
  };
  settle();
  expect_one(at_a, 2, IBV_WC_SUCCESS);
  expect_one(at_c, 7, IBV_WC_SUCCESS);
  EXPECT_TRUE(at_b.empty());
  ASSERT_EQ(sv::set_link(a.context, gid_of(b), sv::LinkState::up), 0);
  now += kFaultTimeoutNs;
  settle();
  EXPECT_EQ(at_a.size(), 3u);
  EXPECT_EQ(at_b.size(), 2u);
}

TEST(SoftverbsCutLink, AllOfThem) {
  FaultyLink t({});
  ASSERT_EQ(sv::set_links(t.a.context, sv::LinkState::down), 0);
  t.receive(0, 1);
  ASSERT_EQ(t.send(0), 0);
  ASSERT_EQ(Send(1, t.b.sge(0, 8)).post(t.link.qb), 0);
  t.settle();
  for (std::uint64_t passed = 0; passed < kEnough; passed += kFaultTimeoutNs)
    t.pass(kFaultTimeoutNs);
  expect_one(t.link.at_a, 0, IBV_WC_RETRY_EXC_ERR);
  expect_one(t.link.at_b, 1, IBV_WC_RETRY_EXC_ERR);
}

TEST(SoftverbsCutLink, UpWhenNobodySaysDown) {
  FaultyLink t({});
  t.receive(0, 2);
  ASSERT_EQ(sv::set_link(t.link.qa, sv::LinkState::down), 0);
  ASSERT_EQ(sv::set_links(t.a.context, sv::LinkState::down), 0);
  ASSERT_EQ(sv::set_links(t.a.context, sv::LinkState::up), 0);
  ASSERT_EQ(t.send(0), 0);
  t.settle();
  EXPECT_TRUE(t.link.at_b.empty());
  ASSERT_EQ(sv::set_link(t.link.qa, sv::LinkState::up), 0);
  t.pass(kFaultTimeoutNs);
  expect_one(t.link.at_b, 0, IBV_WC_SUCCESS);
}

TEST(SoftverbsCutLink, DelayedWorkDoesNotTimeOutBeforeItIsSent) {
  ConnectOptions how = kFaultConnection;
  how.retries = 0;
  FaultyLink t({.delay_min = nanoseconds(5000), .delay_max = nanoseconds(5000)}, how);
  ASSERT_EQ(sv::set_link(t.link.qa, sv::LinkState::down), 0);
  ASSERT_EQ(t.send(0), 0);
  t.pass(4999);
  EXPECT_TRUE(t.link.at_a.empty());
  t.pass(1);
  expect_one(t.link.at_a, 0, IBV_WC_RETRY_EXC_ERR);
}

TEST(SoftverbsCutLink, LosesDatagramsBothWays) {
  FaultyDatagrams d({});
  const Handle back(d.b, d.a);
  ASSERT_EQ(d.a.post_recv(600, 8192, 256, d.qa), 0);
  ASSERT_EQ(d.send(0), 0);
  d.poll();
  ASSERT_EQ(sv::set_link(d.a.context, gid_of(d.b), sv::LinkState::down), 0);
  ASSERT_EQ(d.send(1), 0);
  ASSERT_EQ(Datagram(1, d.b.sge(0, 8), back, d.qa->qp_num, kQkey, 0).post(d.qb), 0);
  d.poll();
  ASSERT_EQ(d.sent.size(), 2u) << "complete as ever, and nothing was received";
  EXPECT_EQ(d.statistics().cut, 2u);
  ASSERT_EQ(sv::set_link(d.a.context, gid_of(d.b), sv::LinkState::up), 0);
  ASSERT_EQ(d.send(2), 0);
  d.poll();
  EXPECT_EQ(d.arrived, (std::vector<std::uint64_t>{0, 2}));
  ASSERT_EQ(Datagram(2, d.b.sge(0, 8), back, d.qa->qp_num, kQkey, 0).post(d.qb), 0);
  ibv_wc wc{};
  ASSERT_TRUE(d.a.poll(wc));
  EXPECT_EQ(wc.wr_id, 600u);
}

TEST(SoftverbsCutLink, ClearingThePlanHealsIt) {
  FaultyLink t({});
  t.receive(0, 1);
  ASSERT_EQ(sv::set_links(t.a.context, sv::LinkState::down), 0);
  ASSERT_EQ(sv::set_link(t.link.qa, sv::LinkState::down), 0);
  ASSERT_EQ(t.send(0), 0);
  t.settle();
  sv::clear_faults(t.a.context);
  t.pass(kFaultTimeoutNs);
  expect_one(t.link.at_a, 0, IBV_WC_SUCCESS);
  expect_one(t.link.at_b, 0, IBV_WC_SUCCESS);
}

TEST(SoftverbsCutLink, NeedsAConnection) {
  Node node;
  EXPECT_EQ(sv::set_link(node.make_qp(), sv::LinkState::down), EINVAL);
  EXPECT_EQ(sv::set_link(ready_ud(node, true), sv::LinkState::down), EINVAL);
}

TEST(SoftverbsCutLink, AQueuePairMadeAnewHasItUp) {
  FaultyLink t({});
  t.receive(0, 2);
  ASSERT_EQ(sv::set_link(t.link.qa, sv::LinkState::down), 0);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RESET;
  ASSERT_EQ(sv::modify_qp(t.link.qa, &attr, IBV_QP_STATE), 0);
  ASSERT_EQ(sv::modify_qp(t.link.qb, &attr, IBV_QP_STATE), 0);
  connect(t.a, t.link.qa, t.b, t.link.qb, kFaultConnection);
  ASSERT_EQ(t.send(0), 0);
  t.settle();
  expect_one(t.link.at_b, 0, IBV_WC_SUCCESS);
}

}  // namespace softverbs_test::faults_link
