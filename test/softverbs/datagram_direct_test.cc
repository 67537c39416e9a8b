// Short datagrams beside the verbs: what a batch shows of itself and when, and the receives.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "softverbs/direct_link.h"

namespace softverbs_test::direct {

constexpr std::size_t kTo = 1u << 20;  ///< where receives of the verbs lie

class SoftverbsDirect : public DirectPair {};

TEST_F(SoftverbsDirect, NothingIsSeenBeforeItIsPublishedAndAllIsAfterIt) {
  for (std::uint64_t batch = 1; batch <= 40; ++batch) {
    const std::uint64_t first = batch * 1000;
    send_all(first, first + batch);
    EXPECT_EQ(b_.steps(), Numbers{});
    a_.publish();
    EXPECT_EQ(b_.step(64), numbers(first, first + batch));
    a_.publish();  // nothing is left to show
    EXPECT_EQ(b_.steps(), Numbers{});
  }
  EXPECT_EQ(a_.steps(), Numbers{});
  EXPECT_EQ(a_.sends_completed, 0u);
}

TEST_F(SoftverbsDirect, TheSourceIsOneQueuePairOfOnePeer) {
  ThirdEnd c(&now_, b_);
  ASSERT_EQ(a_.qp->qp_num, c.qp->qp_num);  // their numbers alone do not tell them apart
  ibv_qp* const second = ready_ud(a_.node, false);
  std::set<std::uint64_t> of_first, of_second, of_c;
  std::uint32_t all = 0;
  const auto look = [&](std::set<std::uint64_t>& into) {
    a_.publish();
    c.publish();
    ibv_wc wc[16];
    while (ibv_poll_cq(b_.node.cq, 16, wc) != 0) {
    }
    for (base::DirectReceive* receive : b_.receives.take()) {
      into.insert(receive->source);
      b_.receives.post(receive);
      ++all;
    }
  };
  const ibv_sge inline_bytes = a_.node.sge(0, 40);
  for (std::uint64_t round = 0; round < 3; ++round) {
    ASSERT_TRUE(send(1) && send(2));
    look(of_first);
    ASSERT_EQ(Datagram(1, inline_bytes, to_b_, b_.qp->qp_num).post(a_.qp), 0);
    ASSERT_EQ(Datagram(2, a_.node.sge(0, 200), to_b_, b_.qp->qp_num).post(a_.qp), 0);
    look(of_first);
    ASSERT_TRUE(DirectEnd::send_by(second, to_b_, b_.qp, 3));
    look(of_second);
    ASSERT_TRUE(c.send(c.to_other, b_.qp, 4));
    look(of_c);
  }
  EXPECT_EQ(all, 18u);
  ASSERT_EQ(of_first.size(), 1u);
  ASSERT_EQ(of_second.size(), 1u);
  ASSERT_EQ(of_c.size(), 1u);
  EXPECT_EQ((std::set{*of_first.begin(), *of_second.begin(), *of_c.begin()}).size(), 3u);
}

TEST_F(SoftverbsDirect, QueuePairsInTurnKeepTheirSources) {
  ibv_qp* const second = ready_ud(a_.node, false);
  for (std::uint64_t i = 0; i < 60; ++i)
    ASSERT_TRUE(DirectEnd::send_by(i % 5 < 3 ? a_.qp : second, to_b_, b_.qp, i));
  a_.publish();
  ibv_wc wc[64];
  ASSERT_GT(ibv_poll_cq(b_.node.cq, 64, wc), 1);
  const auto all = b_.receives.take();
  ASSERT_EQ(all.size(), 60u);
  for (std::uint64_t i = 0; i < 60; ++i) {
    EXPECT_EQ(all[i]->source, all[i % 5 < 3 ? 0 : 3]->source) << i;
    EXPECT_TRUE(NumberedDatagram(i).lies_at(all[i]->to)) << i;
  }
  EXPECT_NE(all[0]->source, all[3]->source);
}

TEST_F(SoftverbsDirect, TheRouteIsTheOneThatAReceiveOfTheVerbsHas) {
  ThirdEnd c(&now_, b_);
  ibv_qp* const plain = ready_ud(b_.node, false);
  const auto compare = [&](DirectEnd& from, const Handle& way, std::uint64_t number) {
    ASSERT_EQ(b_.node.post_recv(number, kTo, 512, plain), 0);
    ASSERT_TRUE(from.send(way, plain, number));
    ASSERT_TRUE(from.send(way, b_.qp, number));
    from.publish();
    ibv_wc wc[2];
    ASSERT_EQ(ibv_poll_cq(b_.node.cq, 2, wc), 2);
    const NumberedDatagram d(number);
    EXPECT_EQ(wc[0].byte_len, kGrh + d.length());
    EXPECT_EQ(wc[0].src_qp, from.qp->qp_num);
    EXPECT_EQ(wc[0].wc_flags, unsigned{IBV_WC_GRH});
    EXPECT_TRUE(d.lies_at(b_.node.bytes(kTo + kGrh, 48).data()));
    const auto arrived = b_.receives.take();
    ASSERT_EQ(arrived.size(), 1u);
    EXPECT_TRUE(d.lies_at(arrived[0]->to));
    std::array<std::byte, kGrh + 1> route{};
    route.back() = std::byte{0x5a};
    sv::direct_datagrams().write_route(b_.qp, *arrived[0], route.data());
    EXPECT_EQ(std::memcmp(route.data(), b_.node.bytes(kTo, kGrh).data(), kGrh), 0) << number;
    EXPECT_EQ(route.back(), std::byte{0x5a});
    const auto said = route_header(plain_way(b_.node), gid_of(from.node), d.length(), false);
    EXPECT_EQ(std::memcmp(route.data(), said.data(), kGrh), 0) << number;
    b_.receives.post(arrived[0]);
  };
  for (std::uint64_t number = 0; number <= base::kDirectPayload; ++number) {
    ASSERT_NO_FATAL_FAILURE(compare(a_, to_b_, number));
    ASSERT_NO_FATAL_FAILURE(compare(c, c.to_other, number));
  }
}

// ---- what else goes there publishes, too --------------------------------------------------------

/// Whatever is sent by the verbs behind direct datagrams. Each has a receive.
class SoftverbsDirectBesideVerbs : public DirectPair {
 protected:
  ibv_qp* ra_ = a_.node.make_qp();
  ibv_qp* rb_ = b_.node.make_qp();

  void SetUp() override {
    connect(a_.node, ra_, b_.node, rb_);
    for (std::uint64_t i = 0; i < 64; ++i) ASSERT_EQ(b_.node.post_recv(i, kTo, 1024), 0);
  }
  /// `sends` posts what arrives as `middle`, behind what was sent directly before it; what is sent
  /// directly afterwards comes behind it.
  template <typename Sends>
  void check(const Numbers& middle, Sends sends) {
    for (std::uint64_t round = 0; round < 40; ++round) {
      const bool step_by_step = round % 2 == 0;
      Numbers expected = numbers(1, 4);
      send_all(1, 4);
      EXPECT_EQ(sequence(), Numbers{});
      ASSERT_EQ(sends(), 0);
      expected.insert(expected.end(), middle.begin(), middle.end());
      if (step_by_step) {
        EXPECT_EQ(sequence(), expected);
        expected.clear();
      }
      send_all(4, 7);
      EXPECT_EQ(holding(a_.node).size(), 1u);
      if (step_by_step) {
        EXPECT_EQ(sequence(), Numbers{});
      }
      a_.publish();
      EXPECT_TRUE(holding(a_.node).empty());
      const Numbers rest = numbers(4, 7);
      expected.insert(expected.end(), rest.begin(), rest.end());
      EXPECT_EQ(sequence(), expected);
      (void)a_.steps();
    }
  }
  static constexpr std::uint64_t kMessage = ~std::uint64_t{0};

 private:
  /// What arrives, one by one: numbers of datagrams, and messages.
  Numbers sequence() {
    Numbers all;
    for (int nothing = 0; nothing < 2 * kLook; ++nothing) {
      for (const std::uint64_t number : b_.step(1)) {
        all.push_back(number);
        nothing = 0;
      }
      for (const ibv_wc& wc : b_.others) {
        EXPECT_EQ(wc.qp_num, rb_->qp_num);
        EXPECT_EQ(b_.node.post_recv(wc.wr_id, kTo, 1024), 0);
        all.push_back(kMessage);
        nothing = 0;
      }
      b_.others.clear();
    }
    return all;
  }
};

TEST_F(SoftverbsDirectBesideVerbs, AShortDatagram) {
  check({9}, [&] { return a_.post(to_b_, b_.qp, 9); });
}
TEST_F(SoftverbsDirectBesideVerbs, ADatagramThatIsGathered) {
  check({9}, [&] { return a_.post(to_b_, b_.qp, 9, IBV_SEND_SIGNALED); });
}
TEST_F(SoftverbsDirectBesideVerbs, AMessageAlone) {
  check({kMessage}, [&] {
    const unsigned flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
    return Send(1, a_.node.sge(0, 8), IBV_WR_SEND, flags).post(ra_);
  });
}
TEST_F(SoftverbsDirectBesideVerbs, AListOfMessages) {
  check({kMessage, kMessage}, [&] {
    Send one(1, a_.node.sge(0, 8)), two(2, a_.node.sge(0, 8));
    one.wr.next = &two.wr;
    return one.post(ra_);
  });
}
TEST_F(SoftverbsDirectBesideVerbs, AMessageOfSeveralLines) {
  check({kMessage}, [&] { return Send(1, a_.node.sge(0, 300)).post(ra_); });
}
TEST_F(SoftverbsDirectBesideVerbs, AMessageThatIsFetched) {
  check({kMessage}, [&] { return Send(1, a_.node.sge(0, 1000)).post(ra_); });
}

TEST_F(SoftverbsDirect, OneCallPublishesToAllPeers) {
  ThirdEnd c(&now_, a_), d(&now_, a_);
  for (std::uint64_t round = 0; round < 10; ++round) {
    for (std::uint64_t i = 0; i < 6; ++i) {
      ASSERT_TRUE(send(i));
      ASSERT_TRUE(a_.send(c.from_other, c.qp, 100 + i));
      if (i == 3 && round % 3 == 1) {  // that one goes by itself, with what lies before it
        ASSERT_EQ(a_.post(c.from_other, c.qp, 104), 0);
        EXPECT_EQ(c.step(), (Numbers{100, 101, 102, 103, 104}));
        ++i;
        ASSERT_TRUE(send(i));
      }
      if (round % 2 == 0) {
        ASSERT_TRUE(a_.send(d.from_other, d.qp, 200 + i));
      }
    }
    EXPECT_EQ(b_.step(), Numbers{});
    EXPECT_EQ(c.step(), Numbers{});
    EXPECT_EQ(d.step(), Numbers{});
    EXPECT_EQ(holding(a_.node).size(), round % 2 == 0 ? 3u : 2u);
    a_.publish();
    EXPECT_TRUE(holding(a_.node).empty());
    EXPECT_EQ(b_.steps(), numbers(0, 6));
    EXPECT_EQ(c.steps(), numbers(round % 3 == 1 ? 105 : 100, 106));
    EXPECT_EQ(d.steps(), round % 2 == 0 && round % 3 != 1 ? numbers(200, 206)
                         : round % 2 == 0                 ? (Numbers{200, 201, 202, 204, 205})
                                                          : Numbers{});
    (void)a_.steps();
  }
}

TEST_F(SoftverbsDirect, WhomTheVerbsHavePublishedToIsInNobodysWay) {
  ThirdEnd c(&now_, a_), d(&now_, a_);
  for (std::uint64_t round = 0; round < 5; ++round) {
    send_all(0, 2);
    ASSERT_TRUE(a_.send(c.from_other, c.qp, 100));
    ASSERT_TRUE(a_.send(d.from_other, d.qp, 200));
    DirectEnd& first = round % 2 == 0 ? c : d;
    const Handle& way = round % 2 == 0 ? c.from_other : d.from_other;
    ASSERT_EQ(a_.post(way, first.qp, 300), 0);
    EXPECT_EQ(first.step().size(), 2u);
    EXPECT_EQ(b_.step(), Numbers{});
    a_.publish();
    EXPECT_EQ(b_.steps(), numbers(0, 2));
    EXPECT_EQ(c.steps(), round % 2 == 0 ? Numbers{} : Numbers{100});
    EXPECT_EQ(d.steps(), round % 2 == 0 ? Numbers{200} : Numbers{});
    (void)a_.steps();
  }
}

// ---- receives -----------------------------------------------------------------------------------

TEST_F(SoftverbsDirect, TheReceivePostedLastIsUsedFirst) {
  DirectReceiveList& in = b_.receives;
  in.lists.posted_count = 0;
  for (std::size_t i = 0; i < 6; ++i) in.post(&in[i]);
  send_all(0, 3);
  a_.publish();
  ASSERT_EQ(a_.post(to_b_, b_.qp, 3), 0);
  const ibv_sge two_lines = a_.node.sge(0, 60);
  ASSERT_EQ(Datagram(4, two_lines, to_b_, b_.qp->qp_num).post(a_.qp), 0);
  ibv_wc wc[16];
  EXPECT_EQ(ibv_poll_cq(b_.node.cq, 16, wc), 2);
  ASSERT_EQ(in.lists.arrived_count, 5u);
  for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(in.lists.arrived[i], &in[5 - i]);
  EXPECT_EQ(in.lists.posted_count, 1u);
  EXPECT_EQ(in.lists.posted[0], &in[0]);
  (void)in.take();
  in.post(&in[3]);
  send_all(5, 7);
  a_.publish();
  EXPECT_EQ(ibv_poll_cq(b_.node.cq, 16, wc), 1);
  ASSERT_EQ(in.lists.arrived_count, 2u);
  EXPECT_EQ(in.lists.arrived[0], &in[3]);
  EXPECT_EQ(in.lists.arrived[1], &in[0]);
}

TEST_F(SoftverbsDirect, WithoutAReceiveItIsDroppedAndCounted) {
  DirectReceiveList& in = b_.receives;
  in.lists.posted_count = 0;
  in.post(&in[0]);
  in.post(&in[1]);
  send_all(0, 5);
  a_.publish();
  ASSERT_EQ(Datagram(4, a_.node.sge(0, 60), to_b_, b_.qp->qp_num).post(a_.qp), 0);
  EXPECT_EQ(b_.step(64), numbers(0, 2));  // posts both again
  EXPECT_EQ(dropped(b_.node, sv::Drop::no_receive), 4u);
  send_all(5, 6);
  a_.publish();
  EXPECT_EQ(b_.steps(), numbers(5, 6));
  EXPECT_EQ(dropped(b_.node, sv::Drop::no_receive), 4u);
}

TEST_F(SoftverbsDirect, WhatIsLongerThanTheRoomIsDroppedAndTheReceiveKept) {
  const std::uint32_t posted = b_.receives.lists.posted_count;
  const auto verbs = [&](std::uint32_t length) {
    return Datagram(1, a_.node.sge(0, length), to_b_, b_.qp->qp_num).post(a_.qp);
  };
  send_all(1, 2);
  ASSERT_EQ(verbs(kDirectRoom + 1), 0);
  ASSERT_EQ(verbs(4096), 0);
  send_all(2, 3);
  a_.publish();
  EXPECT_EQ(b_.steps(), numbers(1, 3));
  EXPECT_EQ(dropped(b_.node, sv::Drop::too_long), 2u);
  EXPECT_EQ(b_.receives.lists.posted_count, posted);
  fill(a_.node.bytes(0, kDirectRoom), 9);
  ASSERT_EQ(verbs(kDirectRoom), 0);
  ibv_wc wc{};
  ASSERT_TRUE(until([] {}, [&] { return b_.node.poll(wc); }));
  const auto arrived = b_.receives.take();
  ASSERT_EQ(arrived.size(), 1u);
  EXPECT_EQ(arrived[0]->length, kDirectRoom);
  EXPECT_TRUE(holds({arrived[0]->to, kDirectRoom}, 9));
  EXPECT_EQ(dropped(b_.node, sv::Drop::too_long), 2u);
}

TEST_F(SoftverbsDirect, AnotherKeyIsDropped) {
  const std::uint32_t posted = b_.receives.lists.posted_count;
  for (std::uint64_t i = 0; i < 30; ++i) ASSERT_TRUE(send(i, i % 3 == 0 ? kQkey + 1 : kQkey));
  a_.publish();
  Numbers expected;
  for (std::uint64_t i = 0; i < 30; ++i) {
    if (i % 3 != 0) expected.push_back(i);
  }
  EXPECT_EQ(b_.steps(), expected);
  EXPECT_EQ(dropped(b_.node, sv::Drop::wrong_key), 10u);
  EXPECT_EQ(b_.receives.lists.posted_count, posted);
}

TEST_F(SoftverbsDirect, AnotherQueuePairOrNoneGetsNothingOfIt) {
  ibv_qp* const other = ready_ud(b_.node, false);
  ibv_qp* const fresh = make_ud(b_.node, false);
  const std::uint32_t gone = other->qp_num;
  b_.node.destroy(other);
  const NumberedDatagram d(1);
  const auto& calls = sv::direct_datagrams();
  for (const std::uint32_t qpn : {gone, fresh->qp_num}) {
    ASSERT_TRUE(calls.send(a_.qp, {to_b_.get(), qpn, kQkey}, d.low, d.high, d.payload.data(), 8));
  }
  send_all(7, 8);
  a_.publish();
  EXPECT_EQ(b_.steps(), numbers(7, 8));
  EXPECT_EQ(dropped(b_.node, sv::Drop::no_queue_pair), 2u);
}

TEST_F(SoftverbsDirect, OtherShapesComeThroughTheSameLists) {
  ibv_ah_attr classy = plain_way(b_.node);
  classy.grh.traffic_class = 0x2e;
  const Handle marked(a_.node, classy);
  std::uint64_t seed = 1;
  for (const Handle* way : std::initializer_list<const Handle*>{&to_b_, &marked}) {
    for (const bool imm : {false, true}) {
      for (const unsigned flags : {0u, unsigned{IBV_SEND_SOLICITED}}) {
        for (const std::uint32_t length : {0u, 1u, 36u, 37u, 48u, 49u, 104u, 105u, 256u}) {
          SCOPED_TRACE(testing::Message() << length << imm << flags << (way == &marked));
          fill(a_.node.bytes(0, length), ++seed);
          Datagram d(1, a_.node.sge(0, length), *way, b_.qp->qp_num, kQkey, flags);
          d.wr.opcode = imm ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND;
          d.wr.imm_data = 7;
          ASSERT_EQ(d.post(a_.qp), 0);
          ibv_wc wc[4];
          ASSERT_EQ(ibv_poll_cq(b_.node.cq, 4, wc), 1);
          EXPECT_EQ(wc[0].status, IBV_WC_SUCCESS);
          EXPECT_EQ(wc[0].opcode, IBV_WC_RECV);
          EXPECT_EQ(wc[0].byte_len, 1u);
          EXPECT_EQ(wc[0].wr_id, kDirectWr);
          const auto arrived = b_.receives.take();
          ASSERT_EQ(arrived.size(), 1u);
          EXPECT_EQ(arrived[0]->length, length);
          EXPECT_TRUE(holds({arrived[0]->to, length}, seed));
          b_.receives.post(arrived[0]);
          (void)a_.step();
        }
      }
    }
  }
}

// ---- completions --------------------------------------------------------------------------------

TEST_F(SoftverbsDirect, ARunHasOneCompletion) {
  send_all(0, 10);
  a_.publish();
  ibv_wc wc[16];
  ASSERT_EQ(ibv_poll_cq(b_.node.cq, 16, wc), 1);
  EXPECT_EQ(wc[0].status, IBV_WC_SUCCESS);
  EXPECT_EQ(wc[0].opcode, IBV_WC_RECV);
  EXPECT_EQ(wc[0].wr_id, kDirectWr);
  EXPECT_EQ(wc[0].qp_num, b_.qp->qp_num);
  EXPECT_EQ(wc[0].byte_len, 10u);
  EXPECT_EQ(b_.receives.take().size(), 10u);
  EXPECT_EQ(ibv_poll_cq(b_.node.cq, 16, wc), 0);
}

TEST_F(SoftverbsDirect, APollTakesNoMoreThanItsArrayWouldHold) {
  ThirdEnd c(&now_, b_);
  ibv_qp* const ra = a_.node.make_qp();
  ibv_qp* const rb = b_.node.make_qp();
  connect(a_.node, ra, b_.node, rb);
  for (std::uint64_t i = 0; i < 200; ++i) ASSERT_EQ(b_.node.post_recv(i, kTo, 64), 0);
  for (int entries = 1; entries <= 24; ++entries) {
    send_all(0, 20);
    for (std::uint64_t i = 0; i < 30; ++i) ASSERT_TRUE(c.send(c.to_other, b_.qp, 100 + i));
    for (std::uint64_t i = 0; i < 6; ++i) ASSERT_EQ(Send(i, a_.node.sge(0, 8)).post(ra), 0);
    send_all(20, 40);
    a_.publish();
    c.publish();
    Numbers from_a, from_c;
    const auto step = [&] {
      const std::size_t before = b_.others.size();
      const Numbers some = b_.step(entries);
      ASSERT_LE(some.size() + b_.others.size() - before, static_cast<std::size_t>(entries));
      for (const std::uint64_t n : some) (n < 100 ? from_a : from_c).push_back(n);
    };
    for (int i = 0; i < 200 && !HasFatalFailure(); ++i) step();
    EXPECT_EQ(from_a, numbers(0, 40)) << entries;
    EXPECT_EQ(from_c, numbers(100, 130)) << entries;
    EXPECT_EQ(b_.others.size(), 6u);
    b_.others.clear();
    (void)a_.steps();
  }
}

TEST_F(SoftverbsDirect, OneThatFindsTheArrayFullIsToldOfLater) {
  ibv_qp* const ra = a_.node.make_qp();
  ibv_qp* const rb = b_.node.make_qp();
  connect(a_.node, ra, b_.node, rb);
  for (std::uint64_t i = 0; i < 4; ++i) {
    ASSERT_EQ(a_.node.post_recv(i, kTo, 64), 0);
    ASSERT_EQ(Send(i, b_.node.sge(0, 8)).post(rb), 0);
  }
  EXPECT_EQ(a_.step(), Numbers{});
  ASSERT_EQ(a_.others.size(), 4u);
  send_all(0, 3);
  a_.publish();
  b_.node.internals().ack_patience = 1;
  // Completions of sends fill the array, and a datagram is taken all the same.
  ibv_wc wc[8];
  ASSERT_EQ(ibv_poll_cq(b_.node.cq, 2, wc), 2);
  EXPECT_EQ(wc[0].opcode, IBV_WC_SEND);
  EXPECT_EQ(wc[1].opcode, IBV_WC_SEND);
  EXPECT_EQ(b_.receives.lists.arrived_count, 1u);
  ASSERT_EQ(ibv_poll_cq(b_.node.cq, 2, wc), 2);
  EXPECT_EQ(wc[1].opcode, IBV_WC_SEND);
  EXPECT_EQ(b_.receives.lists.arrived_count, 1u);
  ASSERT_EQ(ibv_poll_cq(b_.node.cq, 8, wc), 2);
  EXPECT_EQ(wc[0].opcode, IBV_WC_RECV);
  EXPECT_EQ(wc[0].byte_len, 1u);
  EXPECT_EQ(wc[1].opcode, IBV_WC_RECV);
  EXPECT_EQ(wc[1].byte_len, 2u);
  const auto all = b_.receives.take();
  ASSERT_EQ(all.size(), 3u);
  for (std::uint64_t i = 0; i < 3; ++i) EXPECT_TRUE(NumberedDatagram(i).lies_at(all[i]->to));
}

TEST_F(SoftverbsDirect, CompletionsOfAnotherQueueWaitThere) {
  // A poll of one queue finds datagrams that complete to another: each in its ring.
  ibv_cq* const own = sv::create_cq(b_.node.context, 256);
  ASSERT_NE(own, nullptr);
  ibv_qp_init_attr init{};
  init.send_cq = b_.node.cq;
  init.recv_cq = own;
  init.qp_type = IBV_QPT_UD;
  init.cap = {8, 8, 1, 1, 0};
  ibv_qp* const qp = sv::create_qp(b_.node.pd, &init);
  ASSERT_NE(qp, nullptr);
  ASSERT_TRUE(ud_init(qp) == 0 && ud_rtr(qp) == 0 && ud_rts(qp) == 0);
  DirectReceiveList in(64);
  sv::direct_datagrams().receive_by(qp, in.lists);
  in.post_all();
  for (std::uint64_t i = 0; i < 12; ++i) ASSERT_TRUE(DirectEnd::send_by(a_.qp, to_b_, qp, i));
  a_.publish();
  ibv_wc wc[8];
  EXPECT_EQ(ibv_poll_cq(b_.node.cq, 8, wc), 0);
  EXPECT_EQ(in.lists.arrived_count, 12u);
  for (std::uint64_t i = 12; i < 20; ++i) ASSERT_TRUE(DirectEnd::send_by(a_.qp, to_b_, qp, i));
  a_.publish();
  std::uint32_t told = 0;
  for (int i = 0; i < 40; ++i) {
    const int n = ibv_poll_cq(own, i < 4 ? 2 : 5, wc);
    for (int k = 0; k < n; ++k) {
      EXPECT_EQ(wc[k].status, IBV_WC_SUCCESS);
      EXPECT_EQ(wc[k].qp_num, qp->qp_num);
      told += wc[k].byte_len;
    }
    EXPECT_LE(told, in.lists.arrived_count);
  }
  EXPECT_EQ(told, 20u);
  const auto all = in.take();
  ASSERT_EQ(all.size(), 20u);
  for (std::uint64_t i = 0; i < 20; ++i) EXPECT_TRUE(NumberedDatagram(i).lies_at(all[i]->to));
  EXPECT_EQ(sv::destroy_qp(qp), 0);
  EXPECT_EQ(sv::destroy_cq(own), 0);
}

}  // namespace softverbs_test::direct
