// In ERR, all outstanding work is flushed, in order, once.
#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "softverbs/rc_link.h"

namespace softverbs_test::flush {

TEST(SoftverbsFlush, BothQueuesInOrder) {
  NodeOptions options;
  options.srq_depth = 0;
  Link link(options);
  for (std::uint64_t i = 0; i < 5; ++i) ASSERT_EQ(link.b.post_recv(i, 0, 64, link.qb), 0);
  // The first two are taken and acknowledged, two more are in the lane, and a WRITE waits.
  for (std::uint64_t i = 0; i < 2; ++i) ASSERT_EQ(Send(i, link.b.sge(0, 8)).post(link.qb), 0);
  ASSERT_EQ(link.a.post_recv(1, 0, 64, link.qa), 0);
  ASSERT_EQ(link.a.post_recv(2, 0, 64, link.qa), 0);
  ASSERT_TRUE(link.run(2, 2));
  for (std::uint64_t i = 2; i < 4; ++i)
    ASSERT_EQ(Send(i, link.b.sge(0, 8), IBV_WR_SEND, 0).post(link.qb), 0);
  ASSERT_EQ(Send(4, link.b.sge(0, 8), IBV_WR_RDMA_WRITE)
                .to(link.a.address(64), link.a.mr->rkey)
                .post(link.qb),
            0);
  ASSERT_EQ(Send(5, link.b.sge(0, 8), IBV_WR_RDMA_READ)
                .to(link.a.address(64), link.a.mr->rkey)
                .post(link.qb),
            0);
  link.at_b.clear();
  link.b.fail(link.qb);
  link.b.fail(link.qb);
  link.steps(5);
  ASSERT_EQ(link.at_b.size(), 9u);
  constexpr ibv_wc_opcode kOpcodes[] = {IBV_WC_SEND, IBV_WC_SEND, IBV_WC_RDMA_WRITE,
                                        IBV_WC_RDMA_READ};
  for (std::uint64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(link.at_b[i].wr_id, i + 2);
    EXPECT_EQ(link.at_b[i].status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_EQ(link.at_b[i].opcode, kOpcodes[i]);
  }
  for (std::uint64_t i = 0; i < 5; ++i) {
    EXPECT_EQ(link.at_b[4 + i].wr_id, i);
    EXPECT_EQ(link.at_b[4 + i].status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_EQ(link.at_b[4 + i].opcode, IBV_WC_RECV);
  }
  EXPECT_EQ(next_event(link.b).type, -1) << "its own queue: no event";
  // a has no receive left, so packets taken by mistake would show.
  EXPECT_EQ(link.at_a.size(), 2u);
}

TEST(SoftverbsFlush, WhatWasTakenIsNotFlushed) {
  // The answer arrived with the peer's own message, and the queue pair fails before the next poll.
  Link link;
  ASSERT_EQ(link.a.post_recv(1, 0, 64), 0);
  ASSERT_EQ(link.b.post_recv(1, 0, 64), 0);
  ASSERT_EQ(Send(7, link.a.sge(0, 8)).post(link.qa), 0);
  link.poll_b();
  ASSERT_EQ(link.at_b.size(), 1u);
  ASSERT_EQ(Send(8, link.b.sge(0, 8)).post(link.qb), 0);
  link.poll_a();
  ASSERT_EQ(Send(9, link.a.sge(0, 8)).post(link.qa), 0);
  link.a.fail(link.qa);
  link.steps(2);
  ASSERT_EQ(link.at_a.size(), 3u);
  EXPECT_EQ(link.at_a[0].opcode, IBV_WC_RECV);
  EXPECT_EQ(link.at_a[1].wr_id, 7u);
  EXPECT_EQ(link.at_a[1].status, IBV_WC_SUCCESS);
  EXPECT_EQ(link.at_a[2].wr_id, 9u);
  EXPECT_EQ(link.at_a[2].status, IBV_WC_WR_FLUSH_ERR);
}

TEST(SoftverbsFlush, PacketsOfAFailedQueuePairAreNotTaken) {
  // By reference: the memory belongs to the user again once the flush is reported.
  for (const std::uint32_t size : {100'000u, 1u << 20}) {
    Link link;
    ASSERT_EQ(link.b.post_recv(1, 0, size), 0);
    ASSERT_EQ(Send(1, link.a.sge(0, size)).post(link.qa), 0);
    link.a.fail(link.qa);
    link.steps(4);
    ASSERT_EQ(link.at_a.size(), 1u);
    EXPECT_EQ(link.at_a[0].status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_TRUE(link.at_b.empty());
  }
}

TEST(SoftverbsFlush, SharedQueueKeepsItsReceives) {
  Link link;
  ibv_qp* other_a = link.a.make_qp();
  ibv_qp* other_b = link.b.make_qp();
  connect(link.a, other_a, link.b, other_b);
  for (std::uint64_t i = 0; i < 2; ++i) ASSERT_EQ(link.b.post_recv(i, 0, 64), 0);
  link.b.fail(link.qb);
  link.b.fail(link.qb);
  const Event event = next_event(link.b);
  EXPECT_EQ(event.type, IBV_EVENT_QP_LAST_WQE_REACHED);
  EXPECT_EQ(event.element, link.qb);
  EXPECT_EQ(next_event(link.b).type, -1);
  EXPECT_TRUE(link.at_b.empty());
  ASSERT_EQ(Send(1, link.a.sge(0, 8)).post(other_a), 0);
  ASSERT_TRUE(link.run(1, 1));
  EXPECT_EQ(link.at_b[0].wr_id, 0u);
}

TEST(SoftverbsFlush, EventsGoWithTheirQueuePair) {
  Link link;
  link.b.fail(link.qb);
  link.b.destroy(link.qb);
  EXPECT_EQ(next_event(link.b).type, -1);
}

TEST(SoftverbsFlush, MoreThanTheCallersArrayHolds) {
  Link link;
  link.batch = 3;
  for (std::uint64_t i = 0; i < 20; ++i) ASSERT_EQ(Send(i, link.a.sge(0, 8)).post(link.qa), 0);
  link.a.fail(link.qa);
  link.steps(10);
  ASSERT_EQ(link.at_a.size(), 20u);
  for (std::uint64_t i = 0; i < 20; ++i) EXPECT_EQ(link.at_a[i].wr_id, i);
}

TEST(SoftverbsFlush, RefusalInMidstOfAPoll) {
  // An error that completes inside ibv_poll_cq and overflows the caller's array keeps the order.
  NodeOptions options;
  options.srq_depth = 0;
  Link link(options);
  link.batch = 1;
  ASSERT_EQ(link.b.post_recv(0, 0, 64, link.qb), 0);
  ASSERT_EQ(link.b.post_recv(1, 0, 4, link.qb), 0);
  for (std::uint64_t i = 2; i < 6; ++i) ASSERT_EQ(link.b.post_recv(i, 0, 64, link.qb), 0);
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_EQ(Send(i, link.a.sge(0, 8)).post(link.qa), 0);
  link.steps(20);
  ASSERT_EQ(link.at_b.size(), 6u);
  for (std::uint64_t i = 0; i < 6; ++i) EXPECT_EQ(link.at_b[i].wr_id, i);
  EXPECT_EQ(link.at_b[0].status, IBV_WC_SUCCESS);
  EXPECT_EQ(link.at_b[1].status, IBV_WC_LOC_LEN_ERR);
  EXPECT_EQ(link.at_b[2].status, IBV_WC_WR_FLUSH_ERR);
  ASSERT_EQ(link.at_a.size(), 3u);
  EXPECT_EQ(link.at_a[0].status, IBV_WC_SUCCESS);
  EXPECT_EQ(link.at_a[1].status, IBV_WC_REM_INV_REQ_ERR);
  EXPECT_EQ(link.at_a[2].status, IBV_WC_WR_FLUSH_ERR);
}

TEST(SoftverbsFlush, DestroyedInMidAir) {
  // Packets from and to a destroyed queue pair are forgotten; others are unaffected.
  Link link;
  ibv_qp* other_a = link.a.make_qp();
  ibv_qp* other_b = link.b.make_qp();
  connect(link.a, other_a, link.b, other_b);
  for (std::uint64_t i = 0; i < 8; ++i) ASSERT_EQ(link.b.post_recv(i, 0, 4096), 0);
  ASSERT_EQ(Send(1, link.a.sge(0, 8)).post(link.qa), 0);
  ASSERT_EQ(Send(2, link.a.sge(0, 8)).post(other_a), 0);
  ASSERT_EQ(Send(3, link.a.sge(0, 4096)).post(link.qa), 0);
  link.a.destroy(link.qa);
  link.steps(4);
  ASSERT_EQ(link.at_a.size(), 1u);
  EXPECT_EQ(link.at_a[0].wr_id, 2u);
  ASSERT_EQ(link.at_b.size(), 2u) << "one line each; the reference is void";
}

}  // namespace softverbs_test::flush
