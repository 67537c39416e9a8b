// Direct messages: when they are refused, completions, and lines that wait until the receiver has
// read them.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>

#include "softverbs/direct_datagram_link.h"
#include "softverbs/direct_message_link.h"
#include "softverbs/queues.h"

namespace softverbs_test::direct_message {

class SoftverbsDirectMessage : public MessagePair {};

TEST_F(SoftverbsDirectMessage, WholeGroupsAreSeenAtOnceAndTheRestWhenItIsPublished) {
  for (std::uint32_t round = 0; round < 300; ++round) {
    const Numbers sent = series(round * 10, 1 + round % 10, 8 + round % 64);
    for (const std::uint64_t number : sent) ASSERT_TRUE(a_.send(number));
    b_.step();
    Numbers seen = b_.taken();
    EXPECT_EQ(seen.size(), in_whole_groups(sent.size()));
    a_.publish();
    EXPECT_EQ(a_.out().held, nullptr);
    a_.publish();  // nothing is left to publish
    b_.step();
    for (const std::uint64_t number : b_.taken()) seen.push_back(number);
    EXPECT_EQ(seen, sent);
    a_.step();
  }
  EXPECT_EQ(b_.by_receives, 0u);
  EXPECT_EQ(a_.sends.size(), 0u);
}

TEST_F(SoftverbsDirectMessage, TheLongestIs32KibibytesAndAHeader) {
  EXPECT_EQ(sv::direct_messages().longest, kLongestDirect);
}

TEST_F(SoftverbsDirectMessage, EverySizeArrivesWhole) {
  std::uint32_t serial = 0;
  Numbers sent;
  const auto one = [&](std::uint32_t bytes) {
    const std::uint64_t number = number_of(++serial, bytes);
    ASSERT_TRUE(a_.send(number)) << bytes;
    sent.push_back(number);
    a_.publish();
    b_.step();
    a_.steps(kLook);
  };
  for (const bool in_place : {true, false}) {
    b_.internals().in_place = in_place;
    for (std::uint32_t bytes = 8; bytes < 200; ++bytes) one(bytes);
    for (const std::uint32_t near : {256u, 1024u, 1088u, 2048u, 4096u, kLongMessage})
      for (std::uint32_t bytes = near - 9; bytes <= std::min(near + 9, kLongMessage); ++bytes)
        one(bytes);
    EXPECT_EQ(b_.taken(), std::exchange(sent, {}));
    EXPECT_EQ((in_place ? b_.by_receives : b_.in_place) != 0, !in_place);
  }
}

// ---- refusals -----------------------------------------------------------------------------------

TEST_F(SoftverbsDirectMessage, LeaveLinesOfAFullLaneToWorkRequests) {
  std::uint32_t serial = 0;
  Numbers sent;
  while (a_.send(number_of(serial, 16))) sent.push_back(number_of(serial++, 16));
  EXPECT_EQ(sent.size(), sv::kLaneLines - sv::kLaneLines / 8);
  // Work requests go behind them, up to the whole lane and beyond.
  for (std::uint32_t i = 0; i < 40; ++i) {
    ASSERT_EQ(a_.post(number_of(serial, 16)), 0);
    sent.push_back(number_of(serial++, 16));
    EXPECT_FALSE(a_.send(number_of(serial, 16)));
  }
  b_.steps();
  settle();
  EXPECT_EQ(b_.taken(), sent);
  EXPECT_EQ(a_.sends.size(), 40u);
  EXPECT_TRUE(a_.send(number_of(serial, 16)));
  a_.publish();
  b_.step();
  EXPECT_EQ(b_.taken(), Numbers{number_of(serial, 16)});
}

TEST_F(SoftverbsDirectMessage, AreRefusedWhereTheDataIsFull) {
  std::uint32_t serial = 0;
  Numbers sent;
  while (a_.send(number_of(serial, kLongMessage)))
    sent.push_back(number_of(serial++, kLongMessage));
  EXPECT_EQ(sent.size(), sv::kWideLaneData / kLongMessage);
  EXPECT_TRUE(a_.send(number_of(serial, 48)));  // needs no data
  sent.push_back(number_of(serial++, 48));
  EXPECT_FALSE(a_.send(number_of(serial, 49)));
  a_.publish();
  b_.steps();
  EXPECT_EQ(b_.taken(), sent);
  settle();
  EXPECT_TRUE(a_.send(number_of(serial, kLongMessage)));
}

TEST_F(SoftverbsDirectMessage, GoOnBehindARingThatWrapsAround) {
  constexpr std::uint32_t kRing = sv::kLaneData / kLongMessage;
  constexpr std::uint32_t kAll = sv::kWideLaneData / kLongMessage;
  std::uint32_t serial = 0;
  Numbers sent;
  const auto send = [&] {
    if (!a_.send(number_of(serial, kLongMessage))) return false;
    sent.push_back(number_of(serial++, kLongMessage));
    a_.publish();
    return true;
  };
  const auto read = [&](int count) {
    ASSERT_EQ(b_.poll(count), count);
    b_.release();
    sv::apply_peer_acks(*a_.internals().peer);
  };
  for (std::uint32_t i = 0; i < kRing; ++i) ASSERT_TRUE(send()) << i;
  read(20);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(send()) << i;
  EXPECT_EQ(a_.out().data_next, 20 * kLongMessage);  // it wraps around, and is full
  EXPECT_EQ(a_.out().data_size, sv::kLaneData);
  for (std::uint32_t i = kRing; i < kAll; ++i) ASSERT_TRUE(send()) << i;
  EXPECT_FALSE(send());
  // Behind those at the end of the ring the ones at its beginning are in flight.
  read(static_cast<int>(kRing) - 21);
  EXPECT_FALSE(send());
  read(1);
  EXPECT_FALSE(send());  // now its beginning is the oldest
  read(3);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(send()) << i;
  EXPECT_FALSE(send());
  b_.steps();
  EXPECT_EQ(b_.taken(), sent);
  settle();
}

TEST_F(SoftverbsDirectMessage, AreRefusedWhileWorkRequestsWait) {
  // A READ waits until the SEND before it is acknowledged.
  ASSERT_EQ(a_.post(number_of(1, 32)), 0);
  Send read(7777, a_.node.sge(12u << 20, 64), IBV_WR_RDMA_READ);
  ASSERT_EQ(read.to(b_.node.address(0), b_.node.mr->rkey).post(a_.qp), 0);
  EXPECT_FALSE(a_.send(number_of(2, 32)));
  b_.step();
  EXPECT_FALSE(a_.send(number_of(2, 32)));
  settle();
  EXPECT_EQ(a_.sends.size(), 2u);
  EXPECT_TRUE(a_.send(number_of(2, 32)));
  a_.publish();
  b_.step();
  EXPECT_EQ(b_.taken(), (Numbers{number_of(1, 32), number_of(2, 32)}));
}

TEST_F(SoftverbsDirectMessage, AreRefusedWhileARefusedWorkRequestIsTriedAgain) {
  b_.internals().receives->head = b_.internals().receives->tail;  // no receives
  ASSERT_EQ(a_.post(number_of(1, 32), IBV_WR_SEND_WITH_IMM), 0);
  b_.step();
  for (int i = 0; i < kLook; ++i) a_.step();  // the answer: no receive
  ASSERT_TRUE(a_.internals().waiting);
  EXPECT_FALSE(a_.send(number_of(2, 32)));
  b_.post_receive(0);
  settle();
  EXPECT_TRUE(a_.send(number_of(2, 32)));
  a_.publish();
  b_.step();
  EXPECT_EQ(b_.taken(), (Numbers{number_of(1, 32), number_of(2, 32)}));
}

TEST(SoftverbsDirectMessageSetUp, AreRefusedUntilThePeersQueuePairReceives) {
  std::uint64_t now = 1'000'000'000;
  MessageEnd a(&now), b(&now), c(&now);
  const Endpoint ea = a.node.endpoint(a.qp), eb = b.node.endpoint(b.qp);
  EXPECT_FALSE(a.send(number_of(1, 32)));  // RESET, without a peer
  ASSERT_EQ(a.node.init(a.qp), 0);
  EXPECT_FALSE(a.send(number_of(1, 32)));
  ASSERT_EQ(a.node.rtr(a.qp, eb), 0);
  sv::control_device(a.node.context);
  sv::control_device(b.node.context);
  EXPECT_FALSE(a.send(number_of(1, 32)));
  ASSERT_EQ(a.node.rts(a.qp), 0);
  EXPECT_FALSE(a.send(number_of(1, 32)));  // the peer: RESET
  ASSERT_EQ(b.node.init(b.qp), 0);
  EXPECT_FALSE(a.send(number_of(1, 32)));
  // The peer's queue pair receives from another one.
  ASSERT_EQ(b.node.rtr(b.qp, c.node.endpoint(c.qp)), 0);
  sv::control_device(b.node.context);
  sv::control_device(a.node.context);
  EXPECT_FALSE(a.send(number_of(1, 32)));
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RESET;
  ASSERT_EQ(sv::modify_qp(b.qp, &attr, IBV_QP_STATE), 0);
  EXPECT_FALSE(a.send(number_of(1, 32)));
  ASSERT_EQ(b.node.init(b.qp), 0);
  ASSERT_EQ(b.node.rtr(b.qp, ea), 0);
  b.read_in_place();
  for (int i = 0; i < 3; ++i) {
    sv::control_device(a.node.context);
    sv::control_device(b.node.context);
  }
  EXPECT_TRUE(a.send(number_of(1, 32)));  // RTR is enough
  EXPECT_FALSE(b.send(number_of(2, 32)));
  a.publish();
  b.step();
  EXPECT_EQ(b.taken(), Numbers{number_of(1, 32)});
  ASSERT_EQ(b.node.rts(b.qp), 0);
  EXPECT_TRUE(b.send(number_of(2, 32)));
  b.publish();
  a.step();
  EXPECT_EQ(a.taken(), Numbers{number_of(2, 32)});
  a.node.fail(a.qp);
  EXPECT_FALSE(a.send(number_of(3, 32)));
}

/// A peer names any place. One message at a time, and two, take different paths of the poll.
TEST(SoftverbsDirectMessageSetUp, ThoseWithBytesOutsideOfTheLaneAreRefused) {
  constexpr std::uint32_t kBytes = 100;
  for (const std::uint32_t begin : {sv::kWideLaneData - kBytes, sv::kWideLaneData - kBytes + 1,
                                    sv::kWideLaneData, std::uint32_t{0xffffffff}}) {
    for (const std::uint32_t count : {1u, 2u}) {
      std::uint64_t now = 1'000'000'000;
      MessageEnd a(&now), b(&now);
      connect(a.node, a.qp, b.node, b.qp, {});
      b.read_in_place();
      ASSERT_TRUE(a.send(number_of(1, 32)));
      b.step();
      ASSERT_EQ(b.taken(), Numbers{number_of(1, 32)});
      for (std::uint32_t i = 0; i < count; ++i) {
        const std::uint64_t position = a.out().tail + i;
        sv::Line& line = a.out().lines[position % sv::kLaneLines];
        std::memcpy(line.payload + sv::kOffsetAt, &begin, sizeof begin);
        line.length = kBytes;
        line.word = sv::lane_mark(position) << 56 | sv::packet_kind(sv::Packet::send, 0) << 48 |
                    std::uint64_t{a.internals().next_psn + i} << 24 | b.qp->qp_num;
      }
      ibv_wc wc[4];
      const int reported = ibv_poll_cq(b.node.cq, 4, wc);
      if (begin == sv::kWideLaneData - kBytes) {
        ASSERT_EQ(reported, static_cast<int>(count));
        EXPECT_EQ(sv::in_place_bytes(wc[0].wr_id), b.in().data.begin + begin);
        EXPECT_EQ(wc[0].byte_len, kBytes);
        continue;
      }
      for (int i = 0; i < reported; ++i) EXPECT_NE(wc[i].status, IBV_WC_SUCCESS) << begin;
      EXPECT_EQ(b.internals().entry->nak, sv::Nak::invalid_request) << begin;
      EXPECT_EQ(state_of(b.qp), IBV_QPS_ERR) << begin;
    }
  }
}

// ---- completions --------------------------------------------------------------------------------

TEST_F(SoftverbsDirectMessage, OneWithACompletionWaitsForThoseOfEarlierWorkRequests) {
  ASSERT_EQ(a_.post(number_of(1, 32)), 0);
  EXPECT_FALSE(a_.send(number_of(2, 32), 2));
  EXPECT_TRUE(a_.send(number_of(3, 32)));
  b_.steps();
  EXPECT_FALSE(a_.send(number_of(4, 32), 4));  // no poll has seen the acknowledgement
  a_.steps();
  ASSERT_EQ(a_.sends.size(), 1u);
  EXPECT_TRUE(a_.send(number_of(5, 32), 5005));
  EXPECT_EQ(a_.sends.size(), 1u);
  a_.step();  // ends in the next poll, before the peer has seen it
  ASSERT_EQ(a_.sends.size(), 2u);
  EXPECT_EQ(a_.sends[1].wr_id, 5005u);
  EXPECT_EQ(a_.sends[1].status, IBV_WC_SUCCESS);
  EXPECT_EQ(a_.sends[1].opcode, IBV_WC_SEND);
  EXPECT_EQ(a_.sends[1].qp_num, a_.qp->qp_num);
  a_.publish();
  b_.steps();
  EXPECT_EQ(b_.taken(), (Numbers{number_of(1, 32), number_of(3, 32), number_of(5, 32)}));
}

TEST_F(SoftverbsDirectMessage, OneWithACompletionIsRefusedWhileTheQueueIsFull) {
  std::uint32_t serial = 0;
  Numbers sent;
  const std::uint32_t room = static_cast<sv::Cq*>(a_.node.cq)->mask + 1;
  while (sent.size() < room) {
    ASSERT_TRUE(a_.send(number_of(serial, 16), serial + 10'000));
    sent.push_back(number_of(serial++, 16));
    a_.publish();
    b_.step();
    if (serial % 64 == 0) sv::apply_peer_acks(*a_.internals().peer);
  }
  EXPECT_FALSE(a_.send(number_of(serial, 16), 1));
  EXPECT_EQ(next_event(a_.node).type, -1);  // nothing was lost
  EXPECT_TRUE(a_.send(number_of(serial, 16)));
  sent.push_back(number_of(serial, 16));
  a_.publish();
  b_.step();
  EXPECT_EQ(b_.taken(), sent);
  a_.steps();
  EXPECT_EQ(a_.sends.size(), room);
}

// ---- lines stay until they are released ---------------------------------------------------------

TEST_F(SoftverbsDirectMessage, NoLineIsGivenBackBeforeTheRelease) {
  const auto head = [&] { return a_.out().control->head.load(); };
  const std::uint64_t before = head();
  ASSERT_TRUE(a_.send(number_of(1, 32)));
  ASSERT_TRUE(a_.send(number_of(2, 500)));
  a_.publish();
  b_.poll();
  EXPECT_EQ(b_.taken().size(), 2u);
  EXPECT_EQ(head(), before);
  // Other packets behind them, and packets the other way, give nothing back either.
  ASSERT_EQ(a_.post(number_of(3, 32), IBV_WR_SEND_WITH_IMM), 0);
  ASSERT_EQ(a_.post(number_of(4, 4000)), 0);
  for (int i = 0; i < 4; ++i) b_.poll();
  EXPECT_EQ(b_.taken().size(), 2u);
  ASSERT_TRUE(b_.send(number_of(5, 32)));
  ASSERT_EQ(b_.post(number_of(6, 32)), 0);
  b_.publish();
  a_.steps();
  EXPECT_EQ(a_.taken().size(), 2u);
  EXPECT_EQ(head(), before);
  EXPECT_EQ(a_.out().head, before);
  EXPECT_EQ(a_.sends.size(), 0u);
  b_.release();
  EXPECT_EQ(head(), before + 4);
  a_.steps();
  EXPECT_EQ(a_.sends.size(), 2u);
}

TEST_F(SoftverbsDirectMessage, WhatIsReadStaysAsItWasUntilTheRelease) {
  std::uint32_t serial = 0;
  for (int round = 0; round < 40; ++round) {
    const std::uint32_t bytes = round % 2 == 0 ? 40 : 2000;
    const std::uint64_t first = number_of(serial++, bytes);
    ASSERT_TRUE(a_.send(first));
    a_.publish();
    ibv_wc wc{};
    ASSERT_TRUE(b_.node.poll(wc));
    ASSERT_TRUE(sv::is_in_place(wc.wr_id));
    std::size_t more = 0;
    for (;; ++more) {  // as much as the lane takes
      const std::uint64_t number = number_of(serial++, bytes);
      if (!a_.send(number) && a_.post(number) != 0) break;
      a_.publish();
      b_.poll();
      a_.poll();
    }
    EXPECT_GT(more, 60u);
    EXPECT_EQ(NumberedMessage::read(sv::in_place_bytes(wc.wr_id), wc.byte_len), first);
    settle();
    (void)b_.taken();
  }
}

TEST_F(SoftverbsDirectMessage, TheBudgetLimitsWhatIsReadInPlace) {
  std::uint32_t serial = 0;
  for (const std::uint32_t budget : {0u, 1u, 2u, 7u, 40u}) {
    b_.release(budget);
    b_.in_place = b_.by_receives = 0;
    const Numbers sent = series(serial, 20);
    serial += 20;
    for (const std::uint64_t number : sent) {
      ASSERT_TRUE(a_.send(number));
      if (number % 3 == 0) {  // in one poll, or in several
        a_.publish();
        b_.poll();
      }
    }
    a_.publish();
    b_.poll();
    EXPECT_EQ(b_.taken(), sent);
    EXPECT_EQ(b_.in_place, std::min(budget, 20u));
    EXPECT_EQ(b_.in_place + b_.by_receives, 20u);
    b_.release(0);
    a_.steps();
  }
}

TEST(SoftverbsDirectMessageSetUp, NothingIsReadInPlaceBeforeTheFirstRelease) {
  std::uint64_t now = 1'000'000'000;
  MessageEnd a(&now), b(&now);
  connect(a.node, a.qp, b.node, b.qp);
  sv::direct_messages().receive_in_place(b.qp, nullptr, MessageEnd::kRoom, kLongestDirect);
  ASSERT_TRUE(a.send(number_of(1, 32)));
  a.publish();
  b.poll();
  EXPECT_EQ(b.by_receives, 1u);
}

TEST_F(SoftverbsDirectMessage, ThoseLongerThanReceivesComeInPlaceWhateverTheBudget) {
  b_.release(0);
  Numbers sent;
  std::uint32_t serial = 0;
  for (const std::uint32_t bytes : {MessageEnd::kRoom + 1, 32u, kLongestDirect, 100u}) {
    sent.push_back(number_of(serial++, bytes));
    ASSERT_TRUE(a_.send(sent.back()));
  }
  a_.publish();
  for (int i = 0; i < 4; ++i) {
    b_.poll();
    b_.release(0);
  }
  EXPECT_EQ(b_.taken(), sent);
  EXPECT_EQ(b_.in_place, 2u);
  EXPECT_EQ(b_.by_receives, 2u);
}

TEST_F(SoftverbsDirectMessage, ALongOneWaitsForRoomInTheArray) {
  // Completions of sends that are older fill the array first.
  for (std::uint32_t i = 0; i < 3; ++i)
    ASSERT_TRUE(b_.send(number_of(i, 32), MessageEnd::kDirect | i));
  b_.publish();
  b_.release(0);
  ASSERT_TRUE(a_.send(number_of(9, kLongestDirect)));
  a_.publish();
  for (std::size_t polls = 1; polls <= 3; ++polls) {
    b_.poll(1);
    EXPECT_EQ(b_.sends.size(), polls);
    EXPECT_TRUE(b_.order.empty());
  }
  b_.poll(1);
  EXPECT_EQ(b_.taken(), Numbers{number_of(9, kLongestDirect)});
}

TEST_F(SoftverbsDirectMessage, EachEndKnowsWhatTheOtherReadsInPlace) {
  const auto& device = sv::direct_messages();
  EXPECT_EQ(device.longest_in_place(a_.qp), kLongestDirect);
  device.receive_in_place(b_.qp, nullptr, MessageEnd::kRoom, 5000);
  EXPECT_EQ(device.longest_in_place(a_.qp), 5000u);
  EXPECT_EQ(device.longest_in_place(b_.qp), kLongestDirect);
  // Whatever a peer writes there.
  b_.internals().entry->rights.in_place = 0xffff;
  b_.internals().rights->in_place = 0xffff;
  EXPECT_EQ(device.longest_in_place(a_.qp), kLongestDirect);
  EXPECT_FALSE(device.is_between_processes(a_.qp));
  ibv_qp* const fresh = a_.node.make_qp();
  EXPECT_EQ(device.longest_in_place(fresh), 0u);
  EXPECT_FALSE(device.is_between_processes(fresh));
}

TEST_F(SoftverbsDirectMessage, AnArrayOfAnyLengthTakesThem) {
  std::uint32_t serial = 0;
  for (int entries = 1; entries < 20; ++entries) {
    const Numbers sent = series(serial, 50);
    serial += 50;
    for (const std::uint64_t number : sent) ASSERT_TRUE(a_.send(number));
    a_.publish();
    for (int i = 0; i < 60; ++i) b_.step(entries);
    EXPECT_EQ(b_.taken(), sent);
    a_.steps();
  }
  EXPECT_EQ(b_.by_receives, 0u);
}

/// Direct messages and direct datagrams on one lane.
class SoftverbsDirectMessageAndDatagram : public DirectPair {
 protected:
  ibv_qp* ra_ = a_.node.make_qp();
  ibv_qp* rb_ = b_.node.make_qp();
  void SetUp() override {
    connect(a_.node, ra_, b_.node, rb_);
    sv::direct_messages().receive_in_place(rb_, nullptr, MessageEnd::kRoom, kLongestDirect);
    sv::release_reads(sv::direct_messages().reads(b_.node.context), 100);
  }
  void message(std::uint64_t header) {
    ASSERT_NE(sv::direct_messages().send(ra_, header, nullptr, 0, sv::kNoCompletion),
              sv::Sent::refused);
  }
};

TEST_F(SoftverbsDirectMessageAndDatagram, ShareALaneInOrder) {
  for (std::uint64_t round = 0; round < 100; ++round) {
    send_all(1, 3);
    message(10);
    message(11);
    send_all(3, 5);
    message(12);  // completes the third group
    message(13);
    EXPECT_EQ(peers_with_held_line(a_.node), 1u);
    if (round % 2 == 0) {
      a_.publish();  // either call publishes both kinds
    } else {
      sv::direct_messages().publish(a_.node.context);
    }
    const std::uint64_t head = a_.node.internals().peers[0]->out.control->head;
    constexpr std::uint64_t m = DirectEnd::kMessage;
    EXPECT_EQ(b_.steps(), numbers(1, 5));
    EXPECT_EQ(std::exchange(b_.order, {}), (Numbers{1, 2, m, m, 3, 4, m, m}));
    // The runs behind the messages are released, but nothing from the first message on.
    EXPECT_EQ(a_.node.internals().peers[0]->out.control->head, head + 2);
    for (std::size_t i = 0; i < 4; ++i) {
      ASSERT_TRUE(sv::is_in_place(b_.others[i].wr_id));
      std::uint64_t header = 0;
      std::memcpy(&header, sv::in_place_bytes(b_.others[i].wr_id), sizeof header);
      EXPECT_EQ(header, 10 + i);
    }
    b_.others.clear();
    sv::release_reads(sv::direct_messages().reads(b_.node.context), 100);
    EXPECT_EQ(a_.node.internals().peers[0]->out.control->head, head + 8);
    (void)a_.steps();
  }
}

}  // namespace softverbs_test::direct_message
