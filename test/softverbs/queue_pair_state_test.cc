// The queue pair's state machine, and what can be posted in each state.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "softverbs/rc_link.h"

namespace softverbs_test::state {

constexpr int kToInit = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
constexpr int kToRtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                       IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
constexpr int kToRts = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                       IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;

/// A node with a queue pair to bring into any state, and a peer for it.
struct Subject {
  Node node;
  Node other;
  ibv_qp* qp = nullptr;
  ibv_qp* remote = nullptr;

  Subject() : qp(node.make_qp()), remote(other.make_qp()) {}
  explicit Subject(const NodeOptions& options)
      : node(options), other(options), qp(node.make_qp()), remote(other.make_qp()) {}

  ibv_qp_attr attributes(ibv_qp_state to) {
    ibv_qp_attr attr{};
    attr.qp_state = to;
    attr.port_num = 1;
    attr.qp_access_flags = Node::kAllAccess;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = remote->qp_num;
    attr.rq_psn = 77;
    attr.sq_psn = 88;
    attr.max_dest_rd_atomic = 1;
    attr.max_rd_atomic = 1;
    attr.min_rnr_timer = 3;
    attr.timeout = 14;
    attr.retry_cnt = 5;
    attr.rnr_retry = 6;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.dgid = other.endpoint(remote).gid;
    return attr;
  }
  int modify(ibv_qp_state to, int mask) {
    ibv_qp_attr attr = attributes(to);
    return sv::modify_qp(qp, &attr, mask);
  }
  static int mask_to(ibv_qp_state to) {
    switch (to) {
      case IBV_QPS_INIT:
        return kToInit;
      case IBV_QPS_RTR:
        return kToRtr;
      case IBV_QPS_RTS:
        return kToRts;
      default:
        return IBV_QP_STATE;
    }
  }
  /// Goes from RESET to the state by the shortest way.
  void bring_to(ibv_qp_state to) {
    must(modify(IBV_QPS_RESET, IBV_QP_STATE) == 0, "RESET");
    if (to == IBV_QPS_RESET) return;
    must(modify(IBV_QPS_INIT, kToInit) == 0, "INIT");
    if (to == IBV_QPS_ERR) must(modify(IBV_QPS_ERR, IBV_QP_STATE) == 0, "ERR");
    if (to == IBV_QPS_INIT || to == IBV_QPS_ERR) return;
    must(modify(IBV_QPS_RTR, kToRtr) == 0, "RTR");
    if (to == IBV_QPS_RTR) return;
    must(modify(IBV_QPS_RTS, kToRts) == 0, "RTS");
  }
};

constexpr std::array kStates = {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_ERR};

bool legal(ibv_qp_state from, ibv_qp_state to) {
  if (to == IBV_QPS_RESET) return true;
  if (to == IBV_QPS_ERR) return from != IBV_QPS_RESET;
  if (to == IBV_QPS_INIT) return from == IBV_QPS_RESET;  // INIT to INIT takes other attributes
  if (to == IBV_QPS_RTR) return from == IBV_QPS_INIT;
  return to == IBV_QPS_RTS && from == IBV_QPS_RTR;
}

TEST(SoftverbsState, EveryTransition) {
  Subject s;
  constexpr std::array kTargets = {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS,
                                   IBV_QPS_SQD,   IBV_QPS_SQE,  IBV_QPS_ERR, IBV_QPS_UNKNOWN};
  for (const ibv_qp_state from : kStates) {
    for (const ibv_qp_state to : kTargets) {
      SCOPED_TRACE(testing::Message() << "from " << from << " to " << to);
      s.bring_to(from);
      ASSERT_EQ(s.qp->state, from);
      const bool may = legal(from, to) || (from == IBV_QPS_INIT && to == IBV_QPS_INIT);
      EXPECT_EQ(s.modify(to, Subject::mask_to(to)), may ? 0 : EINVAL);
      EXPECT_EQ(state_of(s.qp), may ? to : from);
    }
  }
}

TEST(SoftverbsState, StayingInAState) {
  Subject s;
  s.bring_to(IBV_QPS_INIT);
  EXPECT_EQ(s.modify(IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_ACCESS_FLAGS), 0);
  EXPECT_EQ(s.modify(IBV_QPS_INIT, IBV_QP_ACCESS_FLAGS), 0);
  s.bring_to(IBV_QPS_RTR);
  EXPECT_EQ(s.modify(IBV_QPS_RTR, IBV_QP_STATE), EINVAL);
  s.bring_to(IBV_QPS_RTS);
  ibv_qp_attr attr{};
  attr.qp_access_flags = IBV_ACCESS_REMOTE_READ;
  attr.min_rnr_timer = 9;
  EXPECT_EQ(sv::modify_qp(s.qp, &attr, IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER), 0);
  EXPECT_EQ(sv::query_qp(s.qp, &attr, 0, nullptr), 0);
  EXPECT_EQ(attr.qp_access_flags, unsigned{IBV_ACCESS_REMOTE_READ});
  EXPECT_EQ(attr.min_rnr_timer, 9);
  EXPECT_EQ(s.modify(IBV_QPS_RTS, IBV_QP_DEST_QPN), EINVAL);
  s.bring_to(IBV_QPS_ERR);
  EXPECT_EQ(s.modify(IBV_QPS_ERR, IBV_QP_STATE), 0);
}

TEST(SoftverbsState, EachAttributeIsDemandedAndOthersAreRefused) {
  Subject s;
  const std::array<std::pair<ibv_qp_state, ibv_qp_state>, 3> steps = {
      {{IBV_QPS_RESET, IBV_QPS_INIT}, {IBV_QPS_INIT, IBV_QPS_RTR}, {IBV_QPS_RTR, IBV_QPS_RTS}}};
  for (const auto& [from, to] : steps) {
    const int mask = Subject::mask_to(to);
    for (int bit = 1; bit <= IBV_QP_DEST_QPN; bit <<= 1) {
      if ((mask & bit) == 0 || bit == IBV_QP_STATE) continue;
      SCOPED_TRACE(testing::Message() << "to " << to << " without " << bit);
      s.bring_to(from);
      EXPECT_EQ(s.modify(to, mask & ~bit), EINVAL);
      EXPECT_EQ(state_of(s.qp), from);
      EXPECT_EQ(s.modify(to, mask), 0);
    }
    for (const int extra : {int{IBV_QP_QKEY}, int{IBV_QP_CAP}, int{IBV_QP_EN_SQD_ASYNC_NOTIFY}}) {
      SCOPED_TRACE(testing::Message() << "to " << to << " with " << extra);
      s.bring_to(from);
      EXPECT_EQ(s.modify(to, mask | extra), EINVAL);
      EXPECT_EQ(state_of(s.qp), from);
    }
  }
  // RESET and ERR take no other attributes.
  s.bring_to(IBV_QPS_RTS);
  EXPECT_EQ(s.modify(IBV_QPS_ERR, IBV_QP_STATE | IBV_QP_RQ_PSN), EINVAL);
  EXPECT_EQ(s.modify(IBV_QPS_RESET, IBV_QP_STATE | IBV_QP_PORT), EINVAL);
  EXPECT_EQ(state_of(s.qp), IBV_QPS_RTS);
  // A current state that is wrong.
  ibv_qp_attr attr = s.attributes(IBV_QPS_ERR);
  attr.cur_qp_state = IBV_QPS_RTR;
  EXPECT_EQ(sv::modify_qp(s.qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE), EINVAL);
  attr.cur_qp_state = IBV_QPS_RTS;
  EXPECT_EQ(sv::modify_qp(s.qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE), 0);
}

TEST(SoftverbsState, BadValuesAreRefused) {
  Subject s;
  struct Bad {
    ibv_qp_state from;
    ibv_qp_state to;
    std::function<void(ibv_qp_attr&)> spoil;
  };
  const std::vector<Bad> all = {
      {IBV_QPS_RESET, IBV_QPS_INIT, [](ibv_qp_attr& a) { a.port_num = 0; }},
      {IBV_QPS_RESET, IBV_QPS_INIT, [](ibv_qp_attr& a) { a.port_num = 3; }},
      {IBV_QPS_RESET, IBV_QPS_INIT, [](ibv_qp_attr& a) { a.pkey_index = 1; }},
      {IBV_QPS_RESET, IBV_QPS_INIT, [](ibv_qp_attr& a) { a.qp_access_flags = 1u << 19; }},
      {IBV_QPS_INIT, IBV_QPS_RTR, [](ibv_qp_attr& a) { a.path_mtu = static_cast<ibv_mtu>(0); }},
      {IBV_QPS_INIT, IBV_QPS_RTR, [](ibv_qp_attr& a) { a.path_mtu = static_cast<ibv_mtu>(6); }},
      {IBV_QPS_INIT, IBV_QPS_RTR, [](ibv_qp_attr& a) { a.dest_qp_num = 1u << 24; }},
      {IBV_QPS_INIT, IBV_QPS_RTR, [](ibv_qp_attr& a) { a.min_rnr_timer = 32; }},
      {IBV_QPS_INIT, IBV_QPS_RTR, [](ibv_qp_attr& a) { a.max_dest_rd_atomic = 129; }},
      {IBV_QPS_INIT, IBV_QPS_RTR, [](ibv_qp_attr& a) { a.ah_attr.is_global = 0; }},
      {IBV_QPS_INIT, IBV_QPS_RTR, [](ibv_qp_attr& a) { a.ah_attr.port_num = 2; }},
      {IBV_QPS_INIT, IBV_QPS_RTR, [](ibv_qp_attr& a) { a.ah_attr.grh.sgid_index = 1; }},
      {IBV_QPS_INIT, IBV_QPS_RTR, [](ibv_qp_attr& a) { a.ah_attr.grh.dgid.raw[0] ^= 1; }},
      {IBV_QPS_RTR, IBV_QPS_RTS, [](ibv_qp_attr& a) { a.timeout = 32; }},
      {IBV_QPS_RTR, IBV_QPS_RTS, [](ibv_qp_attr& a) { a.retry_cnt = 8; }},
      {IBV_QPS_RTR, IBV_QPS_RTS, [](ibv_qp_attr& a) { a.rnr_retry = 8; }},
      {IBV_QPS_RTR, IBV_QPS_RTS, [](ibv_qp_attr& a) { a.max_rd_atomic = 129; }},
  };
  for (std::size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(i);
    s.bring_to(all[i].from);
    ibv_qp_attr attr = s.attributes(all[i].to);
    all[i].spoil(attr);
    EXPECT_EQ(sv::modify_qp(s.qp, &attr, Subject::mask_to(all[i].to)), EINVAL);
    EXPECT_EQ(state_of(s.qp), all[i].from);
    EXPECT_EQ(s.modify(all[i].to, Subject::mask_to(all[i].to)), 0);
  }
}

TEST(SoftverbsState, UnreachablePeerChangesNothing) {
  Subject s;
  s.bring_to(IBV_QPS_INIT);
  ibv_qp_attr attr = s.attributes(IBV_QPS_RTR);
  attr.min_rnr_timer = 30;
  attr.ah_attr.grh.dgid.raw[15] ^= 1;  // another nonce
  EXPECT_EQ(sv::modify_qp(s.qp, &attr, kToRtr), ENODEV);
  attr.ah_attr.grh.dgid = sv::make_gid({0x7fffffff, 5, 1});  // beyond every process number
  EXPECT_EQ(sv::modify_qp(s.qp, &attr, kToRtr), ENOENT);
  ibv_qp_attr now{};
  EXPECT_EQ(sv::query_qp(s.qp, &now, 0, nullptr), 0);
  EXPECT_EQ(now.qp_state, IBV_QPS_INIT);
  EXPECT_EQ(now.min_rnr_timer, 0);
  EXPECT_EQ(now.dest_qp_num, 0u);
  EXPECT_TRUE(s.node.internals().peers.empty());
  EXPECT_EQ(s.modify(IBV_QPS_RTR, kToRtr), 0);
}

TEST(SoftverbsState, QueryTellsWhatWasSet) {
  NodeOptions options;
  options.srq_depth = 0;
  options.send_depth = 20;
  options.recv_depth = 30;
  Subject s(options);
  s.bring_to(IBV_QPS_RTS);
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  ASSERT_EQ(sv::query_qp(s.qp, &attr, 0, &init), 0);
  EXPECT_EQ(attr.qp_state, IBV_QPS_RTS);
  EXPECT_EQ(attr.cur_qp_state, IBV_QPS_RTS);
  EXPECT_EQ(attr.path_mtu, IBV_MTU_1024);
  EXPECT_EQ(attr.dest_qp_num, s.remote->qp_num);
  EXPECT_EQ(attr.rq_psn, 77u);
  EXPECT_EQ(attr.sq_psn, 88u);
  EXPECT_EQ(attr.min_rnr_timer, 3);
  EXPECT_EQ(attr.timeout, 14);
  EXPECT_EQ(attr.retry_cnt, 5);
  EXPECT_EQ(attr.rnr_retry, 6);
  EXPECT_EQ(attr.port_num, 1);
  EXPECT_EQ(attr.qp_access_flags, unsigned{Node::kAllAccess});
  EXPECT_GE(attr.cap.max_send_wr, 20u);
  EXPECT_GE(attr.cap.max_recv_wr, 30u);
  EXPECT_EQ(init.send_cq, s.node.cq);
  EXPECT_EQ(init.recv_cq, s.node.cq);
  EXPECT_EQ(init.srq, nullptr);
  EXPECT_EQ(init.qp_type, IBV_QPT_RC);
}

TEST(SoftverbsState, PostingSends) {
  Subject s;
  for (const ibv_qp_state state : kStates) {
    SCOPED_TRACE(state);
    s.bring_to(state);
    Send first(1, s.node.sge(0, 8)), second(2, s.node.sge(0, 8));
    first.wr.next = &second.wr;
    ibv_send_wr* bad = nullptr;
    const int result = ibv_post_send(s.qp, &first.wr, &bad);
    ibv_wc wc[4];
    const int n = ibv_poll_cq(s.node.cq, 4, wc);
    if (state == IBV_QPS_RTS) {
      EXPECT_EQ(result, 0);
      EXPECT_EQ(n, 0);
    } else if (state == IBV_QPS_ERR) {
      EXPECT_EQ(result, 0);
      ASSERT_EQ(n, 2);
      for (int i = 0; i < 2; ++i) {
        EXPECT_EQ(wc[i].wr_id, static_cast<std::uint64_t>(i + 1));
        EXPECT_EQ(wc[i].status, IBV_WC_WR_FLUSH_ERR);
        EXPECT_EQ(wc[i].qp_num, s.qp->qp_num);
      }
    } else {
      EXPECT_EQ(result, EINVAL);
      EXPECT_EQ(bad, &first.wr);
      EXPECT_EQ(n, 0);
    }
  }
}

TEST(SoftverbsState, PostingReceives) {
  NodeOptions options;
  options.srq_depth = 0;
  Subject s(options);
  for (const ibv_qp_state state : kStates) {
    SCOPED_TRACE(state);
    s.bring_to(state);
    ibv_sge sge = s.node.sge(0, 8);
    ibv_recv_wr wr{5, nullptr, &sge, 1};
    ibv_recv_wr* bad = nullptr;
    EXPECT_EQ(ibv_post_recv(s.qp, &wr, &bad), state == IBV_QPS_RESET ? EINVAL : 0);
    if (state == IBV_QPS_RESET) {
      EXPECT_EQ(bad, &wr);
    }
    ibv_wc wc{};
    EXPECT_EQ(s.node.poll(wc), state == IBV_QPS_ERR);
    if (state == IBV_QPS_ERR) {
      EXPECT_EQ(wc.wr_id, 5u);
      EXPECT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
    }
  }
  // With a shared queue there is no own queue to post to.
  Subject shared;
  shared.bring_to(IBV_QPS_RTS);
  EXPECT_EQ(shared.node.post_recv(1, 0, 8, shared.qp), EINVAL);
}

TEST(SoftverbsState, FullQueuesSayWhichDidNotFit) {
  NodeOptions options;
  options.send_depth = 8;
  options.recv_depth = 8;
  options.srq_depth = 0;
  Subject s(options);
  s.bring_to(IBV_QPS_RTS);  // the peer is not, so nothing completes
  std::vector<Send> sends;
  sends.reserve(10);
  for (std::uint64_t i = 0; i < 10; ++i) {
    sends.emplace_back(i, s.node.sge(0, 100));
    sends.back().wr.sg_list = &sends.back().sge;
    if (i != 0) sends[i - 1].wr.next = &sends[i].wr;
  }
  ibv_send_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_send(s.qp, &sends[0].wr, &bad), ENOMEM);
  EXPECT_EQ(bad, &sends[8].wr);
  EXPECT_EQ(Send(11, s.node.sge(0, 8)).post(s.qp), ENOMEM);

  ibv_sge sge = s.node.sge(0, 8);
  std::vector<ibv_recv_wr> receives(10);
  for (std::uint64_t i = 0; i < 10; ++i)
    receives[i] = {i, i < 9 ? &receives[i + 1] : nullptr, &sge, 1};
  ibv_recv_wr* bad_receive = nullptr;
  EXPECT_EQ(ibv_post_recv(s.qp, receives.data(), &bad_receive), ENOMEM);
  EXPECT_EQ(bad_receive, &receives[8]);
  // The earlier ones were posted and are flushed.
  s.node.fail(s.qp);
  std::vector<ibv_wc> wc(32);
  ASSERT_EQ(ibv_poll_cq(s.node.cq, 32, wc.data()), 16);
  for (std::uint64_t i = 0; i < 8; ++i) {
    EXPECT_EQ(wc[i].wr_id, i);
    EXPECT_EQ(wc[8 + i].wr_id, i);
  }
}

TEST(SoftverbsState, UnsignaledKeepTheirRoomUntilASignaledCompletes) {
  NodeOptions options;
  options.send_depth = 4;
  Link link(options);
  for (std::uint64_t i = 0; i < 16; ++i) ASSERT_EQ(link.b.post_recv(i, 0, 64), 0);
  for (int i = 0; i < 4; ++i) ASSERT_EQ(Send(1, link.a.sge(0, 8), IBV_WR_SEND, 0).post(link.qa), 0);
  ASSERT_TRUE(link.run(0, 4));
  link.steps(4);
  EXPECT_EQ(Send(2, link.a.sge(0, 8)).post(link.qa), ENOMEM);

  Link other(options);
  for (std::uint64_t i = 0; i < 16; ++i) ASSERT_EQ(other.b.post_recv(i, 0, 64), 0);
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 4; ++i) {
      const unsigned flags = i == 3 ? unsigned{IBV_SEND_SIGNALED} : 0u;
      ASSERT_EQ(Send(1, other.a.sge(0, 8), IBV_WR_SEND, flags).post(other.qa), 0) << round << i;
    }
    ASSERT_TRUE(other.run(static_cast<std::size_t>(round) + 1, 0));
  }
}

TEST(SoftverbsState, BadWorkRequestsAreRefused) {
  NodeOptions options;
  options.max_inline = 32;
  options.sges = 3;
  Link link(options);
  ibv_sge sges[4] = {link.a.sge(0, 1), link.a.sge(1, 1), link.a.sge(2, 1), link.a.sge(3, 1)};
  Send good(1, link.a.sge(0, 8)), many(2, {}), after(3, link.a.sge(0, 8));
  many.wr.sg_list = sges;
  many.wr.num_sge = 4;
  good.wr.next = &many.wr;
  many.wr.next = &after.wr;
  ibv_send_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_send(link.qa, &good.wr, &bad), EINVAL);
  EXPECT_EQ(bad, &many.wr);
  many.wr.num_sge = -1;
  many.wr.next = nullptr;
  EXPECT_EQ(many.post(link.qa), EINVAL);
  EXPECT_EQ(Send(4, link.a.sge(0, 33), IBV_WR_SEND, IBV_SEND_INLINE).post(link.qa), EINVAL);
  EXPECT_EQ(Send(4, link.a.sge(0, 33), IBV_WR_RDMA_WRITE, IBV_SEND_INLINE).post(link.qa), EINVAL);
  EXPECT_EQ(Send(4, link.a.sge(0, 8), IBV_WR_RDMA_READ, IBV_SEND_INLINE).post(link.qa), EINVAL);
  EXPECT_EQ(Send(4, link.a.sge(0, 8), IBV_WR_TSO).post(link.qa), EINVAL);
  EXPECT_EQ(Send(4, link.a.sge(0, (1u << 31) + 1)).post(link.qa), EINVAL);
  EXPECT_EQ(Send(5, link.a.sge(0, 32), IBV_WR_SEND, IBV_SEND_INLINE).post(link.qa), 0);

  ibv_recv_wr wr{6, nullptr, sges, 4};
  ibv_recv_wr* bad_receive = nullptr;
  EXPECT_EQ(ibv_post_srq_recv(link.b.srq, &wr, &bad_receive), EINVAL);
  EXPECT_EQ(bad_receive, &wr);
  // Only two of them were posted.
  for (std::uint64_t i = 0; i < 4; ++i) ASSERT_EQ(link.b.post_recv(i, 0, 64), 0);
  ASSERT_TRUE(link.run(1, 2));
  link.steps(3);
  EXPECT_EQ(link.at_a.size(), 1u);
  EXPECT_EQ(link.at_b.size(), 2u);
}

TEST(SoftverbsState, ResetForgetsAndConnectsAgain) {
  Link link;
  ibv_qp* spare = link.b.make_qp();  // keeps b busy with another peer, too
  ASSERT_EQ(Send(1, link.a.sge(0, 8)).post(link.qa), 0);
  ASSERT_EQ(Send(2, link.a.sge(0, 8)).post(link.qa), 0);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RESET;
  ASSERT_EQ(sv::modify_qp(link.qa, &attr, IBV_QP_STATE), 0);
  link.steps(4);
  EXPECT_TRUE(link.at_a.empty());
  EXPECT_EQ(Send(3, link.a.sge(0, 8)).post(link.qa), EINVAL);
  // Connects this queue pair again, to another peer.
  connect(link.a, link.qa, link.b, spare);
  ASSERT_EQ(link.b.post_recv(4, 0, 64), 0);
  ASSERT_EQ(link.b.post_recv(5, 0, 64), 0);
  ASSERT_EQ(Send(6, link.a.sge(0, 8)).post(link.qa), 0);
  ASSERT_TRUE(link.run(1, 1));
  EXPECT_EQ(link.at_a[0].wr_id, 6u);
  EXPECT_EQ(link.at_b[0].qp_num, spare->qp_num);
  link.steps(4);
  EXPECT_EQ(link.at_b.size(), 1u);
}

TEST(SoftverbsState, ResetTakesItsOwnCompletionsOutOfTheQueue) {
  NodeOptions options;
  options.srq_depth = 0;
  Node node(options);
  ibv_qp* const reset = node.make_qp();
  ibv_qp* const other = node.make_qp();
  for (ibv_qp* qp : {reset, other}) ASSERT_EQ(node.init(qp), 0);
  std::uint64_t id = 0;
  for (ibv_qp* qp : {other, reset, reset, other, reset})
    ASSERT_EQ(node.post_recv(++id, 0, 64, qp), 0);
  node.fail(other);  // flushes 1 and 4, then 2, 3 and 5
  node.fail(reset);
  ibv_wc wc{};
  ASSERT_TRUE(node.poll(wc));
  EXPECT_EQ(wc.wr_id, 1u);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RESET;
  ASSERT_EQ(sv::modify_qp(reset, &attr, IBV_QP_STATE), 0);
  ASSERT_TRUE(node.poll(wc));
  EXPECT_EQ(wc.wr_id, 4u);
  EXPECT_EQ(wc.qp_num, other->qp_num);
  EXPECT_FALSE(node.poll(wc));
  EXPECT_EQ(node.internals().pending.slow_work, 0u);
}

}  // namespace softverbs_test::state
