// Direct messages that the peer refuses or never takes, and how their sender learns of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "softverbs/direct_message_link.h"
#include "softverbs/peer_process.h"

namespace softverbs_test::direct_message_loss {

bool has_failed(const MessageEnd& end) { return state_of(end.qp) == IBV_QPS_ERR; }

// ---- refused by a peer that has no receive ------------------------------------------------------

class SoftverbsDirectMessageRefused : public MessagePair {
 protected:
  void SetUp() override {
    MessagePair::SetUp();
    b_.internals().in_place = false;
    b_.internals().receives->head = b_.internals().receives->tail;
  }
  /// Sends `count` direct messages and publishes them.
  void send(std::uint32_t first, std::uint32_t count) {
    for (const std::uint64_t number : series(first, count)) ASSERT_TRUE(a_.send(number));
    a_.publish();
  }
  /// The connection has failed, and nothing came.
  void expect_lost() {
    settle();
    EXPECT_EQ(a_.take_lost(), a_.qp->qp_num);
    EXPECT_EQ(a_.take_lost(), 0u);
    for (std::uint32_t i = 0; i < 8; ++i) b_.post_receive(i);
    settle();
    EXPECT_EQ(b_.order, Numbers{});
    EXPECT_EQ(a_.take_lost(), 0u);
    EXPECT_FALSE(a_.send(number_of(1000, 32)));
  }
};

TEST_F(SoftverbsDirectMessageRefused, AWorkRequestWithDirectOnesBehindFailsAndNothingIsReordered) {
  for (std::uint32_t i = 1; i <= 4; ++i) {
    const unsigned brief = i % 2 == 0 ? unsigned{IBV_SEND_INLINE} : 0u;
    ASSERT_EQ(a_.post(number_of(i, 32), IBV_WR_SEND, IBV_SEND_SIGNALED | brief), 0);
  }
  send(5, 2);
  settle();
  ASSERT_EQ(a_.sends.size(), 4u);
  EXPECT_EQ(a_.sends[0].status, IBV_WC_RNR_RETRY_EXC_ERR);
  EXPECT_EQ(a_.sends[0].wr_id, number_of(1, 32));
  for (std::size_t i = 1; i < 4; ++i) EXPECT_EQ(a_.sends[i].status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(has_failed(a_));
  for (std::uint32_t i = 0; i < 8; ++i) b_.post_receive(i);
  settle();
  EXPECT_EQ(b_.order, Numbers{});
}

TEST_F(SoftverbsDirectMessageRefused, AWorkRequestBehindADirectOneThatWasTakenIsTriedAgain) {
  b_.reposts = false;
  b_.post_receive(0);
  send(1, 1);
  ASSERT_EQ(a_.post(number_of(2, 32), IBV_WR_SEND, IBV_SEND_SIGNALED | IBV_SEND_INLINE), 0);
  ASSERT_EQ(a_.post(number_of(3, 32)), 0);
  settle();
  EXPECT_EQ(a_.sends.size(), 0u);
  for (std::uint32_t i = 1; i < 4; ++i) b_.post_receive(i);
  settle();
  EXPECT_EQ(b_.taken(), series(1, 3));
  EXPECT_EQ(a_.sends.size(), 2u);
  send(4, 1);
  settle();
  EXPECT_EQ(b_.taken(), series(4, 1));
  EXPECT_EQ(a_.take_lost(), 0u);
}

TEST_F(SoftverbsDirectMessageRefused, IsReportedOnce) {
  send(1, 1);
  expect_lost();
}
TEST_F(SoftverbsDirectMessageRefused, IsReportedWithOthersBehindThatAreTakenLater) {
  send(1, 150);  // one poll takes 64 packets
  b_.step();
  for (int i = 0; i < 2 * kLook; ++i) a_.step();
  expect_lost();
}
TEST_F(SoftverbsDirectMessageRefused, NoWorkRequestBehindItSucceeds) {
  send(1, 1);
  ASSERT_EQ(a_.post(number_of(2, 32)), 0);
  settle();
  ASSERT_EQ(a_.sends.size(), 1u);
  EXPECT_NE(a_.sends[0].status, IBV_WC_SUCCESS);
  expect_lost();
}
TEST_F(SoftverbsDirectMessageRefused, NoLaterWorkRequestSucceeds) {
  send(1, 1);
  settle();
  (void)a_.post(number_of(2, 32));
  settle();
  ASSERT_EQ(a_.sends.size(), 1u);
  EXPECT_NE(a_.sends[0].status, IBV_WC_SUCCESS);
  expect_lost();
}
TEST_F(SoftverbsDirectMessageRefused, BetweenWorkRequestsOnlyTheLaterOneFails) {
  b_.reposts = false;
  for (std::uint32_t i = 0; i < 2; ++i) b_.post_receive(i);
  ASSERT_EQ(a_.post(number_of(1, 32)), 0);
  send(2, 2);
  ASSERT_EQ(a_.post(number_of(4, 32)), 0);
  settle();
  EXPECT_EQ(b_.taken(), series(1, 2));
  ASSERT_EQ(a_.sends.size(), 2u);
  EXPECT_EQ(a_.sends[0].status, IBV_WC_SUCCESS);
  EXPECT_NE(a_.sends[1].status, IBV_WC_SUCCESS);
  expect_lost();
}
TEST_F(SoftverbsDirectMessageRefused, OtherQueuePairsOfTheLaneGoOn) {
  ibv_qp* const qa = a_.node.make_qp();
  ibv_qp* const qb = b_.node.make_qp();
  connect(a_.node, qa, b_.node, qb);
  sv::direct_messages().receive_in_place(qb, nullptr, MessageEnd::kRoom, kLongestDirect);
  send(1, 1);
  for (int i = 0; i < 200; ++i) {
    const NumberedMessage m(number_of(100, 32));
    ASSERT_NE(
        sv::direct_messages().send(qa, m.number, m.payload.data(), m.length(), sv::kNoCompletion),
        sv::Sent::refused);
    a_.publish();
    ibv_wc wc{};
    ASSERT_TRUE(until([&] { (void)a_.node.poll(wc); }, [&] { return b_.node.poll(wc); }));
    EXPECT_EQ(wc.qp_num, qb->qp_num);
    EXPECT_TRUE(sv::is_in_place(wc.wr_id));
    b_.release();
  }
  expect_lost();
}

// ---- a queue pair that ends ---------------------------------------------------------------------

class SoftverbsDirectMessageLost : public MessagePair {
 protected:
  void send(std::uint32_t first, std::uint32_t count) {
    for (const std::uint64_t number : series(first, count)) ASSERT_TRUE(a_.send(number));
    a_.publish();
  }
  void look() {
    for (int i = 0; i < 2 * kLook; ++i) a_.poll();
  }
};

TEST_F(SoftverbsDirectMessageLost, AFailedQueuePairTakesNothingMore) {
  send(1, 3);
  b_.step();
  look();
  send(4, 3);
  b_.node.fail(b_.qp);
  b_.step();
  look();
  EXPECT_EQ(a_.take_lost(), a_.qp->qp_num);
  EXPECT_EQ(a_.take_lost(), 0u);
  EXPECT_EQ(b_.order, series(1, 3));
  EXPECT_FALSE(a_.send(number_of(9, 32)));
}

TEST_F(SoftverbsDirectMessageLost, NotWhileMessagesOfThePeerWaitInTheCompletionQueue) {
  ibv_cq* const other = sv::create_cq(a_.node.context, 16);
  ASSERT_NE(other, nullptr);
  ASSERT_EQ(b_.post(number_of(50, 32)), 0);
  send(1, 3);
  b_.node.fail(b_.qp);
  b_.poll();
  ibv_wc wc{};
  for (int i = 0; i < 2 * kLook; ++i) ASSERT_EQ(ibv_poll_cq(other, 1, &wc), 0);
  EXPECT_EQ(a_.take_lost(), 0u) << "a goodbye may be among them";
  a_.poll();
  EXPECT_EQ(a_.order, (Numbers{number_of(50, 32)}));
  EXPECT_EQ(a_.take_lost(), a_.qp->qp_num);
  EXPECT_EQ(sv::destroy_cq(other), 0);
}

TEST_F(SoftverbsDirectMessageLost, NoneOvertakesAWorkRequestWhoseRefusalMakesRoom) {
  b_.internals().receives->head = b_.internals().receives->tail;
  ASSERT_EQ(a_.post(number_of(1, 16 * 1024)), 0);  // too long to be read in place
  std::uint32_t sent = 0;
  while (sent < 10000 && a_.send(number_of(2 + sent, 4096))) ++sent;  // fills the lane's data
  ASSERT_LT(sent, 10000u);
  a_.publish();
  b_.step();  // refuses the work request, and passes over the rest
  EXPECT_FALSE(a_.send(number_of(20000, 4096)));
  a_.publish();
  for (int i = 0; i < 2 * kLook; ++i) {
    b_.step();
    EXPECT_FALSE(a_.send(number_of(20001, 4096)));
    a_.publish();
    a_.poll();
  }
  EXPECT_EQ(b_.order, Numbers{});
}

TEST_F(SoftverbsDirectMessageLost, NotWhenItHadTakenEverything) {
  ibv_qp* const qa = a_.node.make_qp();
  ibv_qp* const qb = b_.node.make_qp();
  connect(a_.node, qa, b_.node, qb);
  send(1, 3);
  b_.step();
  look();
  b_.node.fail(b_.qp);
  // A work request of another queue pair is refused, so the sender looks at all of them.
  b_.internals().receives->head = b_.internals().receives->tail;
  ASSERT_EQ(Send(1, a_.node.sge(0, 8)).post(qa), 0);
  ASSERT_TRUE(until(
      [&] {
        b_.poll();
        a_.poll();
      },
      [&] { return static_cast<sv::Qp*>(qa)->waiting; }));
  EXPECT_EQ(a_.take_lost(), 0u);
  // Another queue pair takes the entry of the one that has ended.
  sv::QueuePairEntry& entry =
      b_.node.internals().segment->queue_pairs[sv::queue_pair_index(b_.qp->qp_num)];
  entry.rights.ident = sv::queue_pair_ident(b_.qp->qp_num + sv::kMaxQueuePairs, 99);
  const std::uint64_t before = a_.out().control->last_nak;
  ASSERT_TRUE(until(
      [&] {
        now_ += 1'000'000;
        ibv_wc wc{};
        (void)a_.node.poll(wc);
        (void)b_.node.poll(wc);
      },
      [&] { return a_.out().control->last_nak > before && !static_cast<sv::Qp*>(qa)->waiting; }));
  look();
  EXPECT_EQ(a_.take_lost(), 0u);
}

TEST_F(SoftverbsDirectMessageLost, NotWhilePacketsOfThePeerAreUnread) {
  send(1, 1);
  ASSERT_TRUE(b_.send(number_of(7, 32)));
  b_.publish();
  b_.node.fail(b_.qp);
  b_.poll();
  sv::apply_peer_acks(*a_.internals().peer);
  EXPECT_TRUE(a_.internals().lost);
  EXPECT_EQ(a_.take_lost(), 0u);
  EXPECT_EQ(a_.take_lost(), 0u);
  a_.poll();
  EXPECT_EQ(a_.taken(), series(7, 1));
  EXPECT_EQ(a_.take_lost(), a_.qp->qp_num);
  EXPECT_EQ(a_.take_lost(), 0u);
}

TEST_F(SoftverbsDirectMessageLost, AQueuePairThatIsResetOrDestroyedIsNotReported) {
  for (const std::uint32_t gone : {0u, 1u, 2u, 3u}) {
    std::vector<ibv_qp*> qas;
    for (int i = 0; i < 4; ++i) {
      ibv_qp* const qa = a_.node.make_qp();
      ibv_qp* const qb = b_.node.make_qp();
      connect(a_.node, qa, b_.node, qb);
      ASSERT_NE(sv::direct_messages().send(qa, 1, nullptr, 0, sv::kNoCompletion),
                sv::Sent::refused);
      b_.node.fail(qb);
      qas.push_back(qa);
    }
    a_.publish();
    b_.step();
    look();
    sv::apply_peer_acks(*a_.internals().peer);
    std::vector<std::uint32_t> expected;
    for (std::uint32_t i = 0; i < 4; ++i) {
      EXPECT_TRUE(static_cast<sv::Qp*>(qas[i])->lost);
      if (i != gone) expected.push_back(qas[i]->qp_num);
    }
    if (gone % 2 == 0) {
      a_.node.destroy(qas[gone]);
    } else {
      ibv_qp_attr attr{};
      attr.qp_state = IBV_QPS_RESET;
      ASSERT_EQ(sv::modify_qp(qas[gone], &attr, IBV_QP_STATE), 0);
    }
    std::vector<std::uint32_t> lost;
    while (const std::uint32_t one = a_.take_lost()) lost.push_back(one);
    std::sort(lost.begin(), lost.end());
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(lost, expected);
  }
}

TEST_F(SoftverbsDirectMessageLost, AQueuePairThatIsConnectedAgainBeginsAnew) {
  send(1, 2);
  b_.node.fail(b_.qp);
  b_.step();
  look();
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RESET;
  for (ibv_qp* qp : {a_.qp, b_.qp}) ASSERT_EQ(sv::modify_qp(qp, &attr, IBV_QP_STATE), 0);
  EXPECT_FALSE(a_.send(number_of(3, 32)));
  connect(a_.node, a_.qp, b_.node, b_.qp);
  send(3, 2);
  settle();
  EXPECT_EQ(b_.taken(), series(3, 2));
  EXPECT_EQ(a_.take_lost(), 0u);
}

TEST_F(SoftverbsDirectMessageLost, WhenThePeersContextIsClosed) {
  {
    MessageEnd c(&now_);
    ibv_qp* const qa = a_.node.make_qp();
    connect(a_.node, qa, c.node, c.qp);
    ASSERT_NE(sv::direct_messages().send(qa, 1, nullptr, 0, sv::kNoCompletion), sv::Sent::refused);
    a_.publish();
  }
  std::uint32_t lost = 0;
  const auto step = [&] {
    pass_time(a_);
    a_.poll();
  };
  ASSERT_TRUE(until(step, [&] { return lost != 0 || (lost = a_.take_lost()) != 0; }));
  EXPECT_EQ(lost, a_.node.qps.back()->qp_num);
  EXPECT_EQ(a_.take_lost(), 0u);
}

// ---- a process that dies ------------------------------------------------------------------------

/// A peer in another process. It takes what it is told to: 't' takes all, 's' sends one message.
class SoftverbsDirectMessageDeath : public testing::Test {
 protected:
  std::uint64_t now_ = 1'000'000'000;
  Child child_{[](int fd) {
    std::uint64_t now = 1'000'000'000;
    MessageEnd b(&now);
    b.read_in_place();
    (void)meet(b.node, b.qp, fd);
    for (;;) {
      const char what = get<char>(fd);
      sv::control_device(b.node.context);
      if (what == 't') b.steps();
      if (what == 's') must(b.send(number_of(77, 32)), "send");
      b.publish();
      put(fd, static_cast<std::uint32_t>(b.order.size()));
    }
  }};
  MessageEnd a_{&now_};

  void SetUp() override {
    (void)meet(a_.node, a_.qp, child_.socket());
    a_.read_in_place();
    (void)tell('n');
    sv::control_device(a_.node.context);
  }
  std::uint32_t tell(char what) {
    put(child_.socket(), what);
    return get<std::uint32_t>(child_.socket());
  }
  void send(std::uint32_t first, std::uint32_t count) {
    for (const std::uint64_t number : series(first, count)) ASSERT_TRUE(a_.send(number));
    a_.publish();
  }
  void notice() {
    ASSERT_TRUE(until(
        [&] {
          now_ += 10'000'000;
          sv::control_device(a_.node.context);
        },
        [&] { return a_.internals().peer->gone; }));
  }
};

TEST_F(SoftverbsDirectMessageDeath, IsReportedOnceIfItHadNotTakenThem) {
  send(1, 5);
  ASSERT_EQ(tell('t'), 5u);
  send(6, 5);
  child_.kill_and_reap();
  EXPECT_EQ(a_.take_lost(), 0u);
  notice();
  EXPECT_EQ(a_.take_lost(), a_.qp->qp_num);
  EXPECT_EQ(a_.take_lost(), 0u);
  EXPECT_FALSE(a_.send(number_of(11, 32)));
  EXPECT_EQ(a_.take_lost(), 0u);
}

TEST_F(SoftverbsDirectMessageDeath, IsNotReportedIfItHadTakenThem) {
  send(1, 5);
  ASSERT_EQ(tell('t'), 5u);
  child_.kill_and_reap();  // the sender has not looked at the acknowledgement
  notice();
  EXPECT_EQ(a_.take_lost(), 0u);
}

TEST_F(SoftverbsDirectMessageDeath, ItsLastMessageIsReadFirst) {
  send(1, 5);
  (void)tell('s');
  child_.kill_and_reap();
  for (int i = 0; i < 100; ++i) {
    now_ += 10'000'000;
    sv::control_device(a_.node.context);
    EXPECT_EQ(a_.take_lost(), 0u);
  }
  a_.step();
  EXPECT_EQ(a_.taken(), series(77, 1));
  notice();
  EXPECT_EQ(a_.take_lost(), a_.qp->qp_num);
}

TEST_F(SoftverbsDirectMessageDeath, HeldLinesDoNotOutliveIt) {
  for (std::uint32_t i = 0; i < 5; ++i) ASSERT_TRUE(a_.send(number_of(i, 32)));
  child_.kill_and_reap();
  notice();
  a_.publish();
  EXPECT_EQ(a_.take_lost(), a_.qp->qp_num);
  a_.node.destroy(a_.qp);
  for (int i = 0; i < 10; ++i) {
    now_ += 10'000'000;
    sv::control_device(a_.node.context);
  }
  EXPECT_TRUE(a_.node.internals().held.empty());
}

}  // namespace softverbs_test::direct_message_loss
