// Direct datagrams: when a batch becomes visible, how its source is identified, and which datagrams
// take receives instead.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include "base/random.h"
#include "softverbs/direct_datagram_link.h"

namespace softverbs_test::direct {

constexpr std::size_t kTo = 1u << 20;  ///< offset of the receives

class SoftverbsDirect : public DirectPair {};

TEST_F(SoftverbsDirect, WholeGroupsAreSeenAtOnceAndTheRestWhenItIsPublished) {
  for (std::uint64_t batch = 1; batch <= 50; ++batch) {
    const std::uint64_t first = batch * 1000;
    send_all(first, first + batch);
    const std::uint64_t seen = in_whole_groups(batch);
    EXPECT_EQ(b_.steps(64), numbers(first, first + seen));
    a_.publish();
    EXPECT_EQ(b_.steps(64), numbers(first + seen, first + batch));
    a_.publish();  // nothing is left to publish
    EXPECT_EQ(b_.steps(), Numbers{});
  }
  EXPECT_EQ(a_.steps(), Numbers{});
  EXPECT_EQ(a_.sends_completed, 0u);
  std::uint64_t end = 0;
  for (const std::uint64_t group : {1u, 2u, 4u, 8u, 16u, 16u}) {
    EXPECT_EQ(in_whole_groups(end + group - 1), end);
    end += group;
    EXPECT_EQ(in_whole_groups(end), end);
  }
}

/// The sources of the batches reported by polls, until there are none.
std::vector<std::uint64_t> sources(DirectEnd& at) {
  std::vector<std::uint64_t> all;
  for (int nothing = 0; nothing < 3; ++nothing) {
    must(all.size() < 1000, "no end of what arrives");
    (void)at.poll();
    for (std::uint32_t i = 0; i < at.batches.count; ++i) {
      all.insert(all.end(), read(*at.batches.batches[i], at.batches.longest).size(),
                 at.batches.batches[i]->source);
      nothing = 0;
    }
    (void)at.take_batches();
  }
  return all;
}

TEST_F(SoftverbsDirect, TheSourceIsOneQueuePairOfOnePeer) {
  ThirdEnd c(&now_, b_);
  ASSERT_EQ(a_.qp->qp_num, c.qp->qp_num);  // the numbers alone do not distinguish them
  ibv_qp* const second = ready_ud(a_.node, false);
  std::set<std::uint64_t> of_first, of_second, of_c;
  std::size_t all = 0;
  const auto look = [&](std::set<std::uint64_t>& into) {
    a_.publish();
    c.publish();
    for (const std::uint64_t source : sources(b_)) {
      into.insert(source);
      ++all;
    }
  };
  for (std::uint64_t round = 0; round < 3; ++round) {
    ASSERT_TRUE(send(1) && send(2));
    look(of_first);
    ASSERT_EQ(a_.post(to_b_, b_.qp, 3), 0);
    ASSERT_EQ(a_.post(to_b_, b_.qp, kLong), 0);  // its completion has its source
    ASSERT_EQ(a_.post(to_b_, b_.qp, 4, IBV_SEND_SIGNALED), 0);
    look(of_first);
    ASSERT_TRUE(DirectEnd::send_by(second, to_b_, b_.qp->qp_num, 5));
    look(of_second);
    ASSERT_TRUE(c.send(c.to_other, b_.qp, 6));
    look(of_c);
  }
  EXPECT_EQ(all, 18u);
  EXPECT_EQ(b_.by_receives, 3u);
  ASSERT_EQ(of_first.size(), 1u);
  ASSERT_EQ(of_second.size(), 1u);
  ASSERT_EQ(of_c.size(), 1u);
  EXPECT_EQ((std::set{*of_first.begin(), *of_second.begin(), *of_c.begin()}).size(), 3u);
  for (const std::uint64_t source : {*of_first.begin(), *of_second.begin(), *of_c.begin()}) {
    EXPECT_EQ(source & 0xffffff, source == *of_second.begin() ? second->qp_num : a_.qp->qp_num);
  }
}

TEST_F(SoftverbsDirect, ALaneThatComesAfterAnotherHasSourcesOfItsOwn) {
  std::set<std::uint64_t> all;
  for (std::uint64_t i = 0; i < 3; ++i) {
    const std::size_t known = b_.node.internals().peers.size();
    {
      ThirdEnd c(&now_, b_);
      ASSERT_TRUE(c.send(c.to_other, b_.qp, i));
      c.publish();
      for (const std::uint64_t source : sources(b_)) all.insert(source);
    }
    ASSERT_TRUE(until(
        [&] {
          now_ += 10'000'000;
          sv::control_device(b_.node.context);
        },
        [&] { return b_.node.internals().peers.size() < known + 1; }));
  }
  EXPECT_EQ(all.size(), 3u);  // though one lane took the other's place
}

TEST_F(SoftverbsDirect, QueuePairsInTurnKeepTheirSources) {
  ibv_qp* const second = ready_ud(a_.node, false);
  for (std::uint64_t i = 0; i < 60; ++i) {
    ibv_qp* const by = i % 5 < 3 ? a_.qp : second;
    ASSERT_TRUE(DirectEnd::send_by(by, to_b_, b_.qp->qp_num, i));
  }
  a_.publish();
  const std::vector<std::uint64_t> all = sources(b_);
  ASSERT_EQ(all.size(), 60u);
  for (std::size_t i = 0; i < 60; ++i) EXPECT_EQ(all[i], all[i % 5 < 3 ? 0 : 3]) << i;
  EXPECT_NE(all[0], all[3]);
  EXPECT_EQ(b_.order, numbers(0, 60));
}

TEST_F(SoftverbsDirect, TheRouteIsTheOneThatAReceiveOfTheVerbsHas) {
  ThirdEnd c(&now_, b_);
  ibv_qp* const plain = ready_ud(b_.node, false);
  const auto compare = [&](DirectEnd& from, const Handle& way, std::uint64_t number) {
    ASSERT_EQ(b_.node.post_recv(number, kTo, 512, plain), 0);
    ASSERT_TRUE(from.send(way, plain, number));
    ASSERT_TRUE(from.send(way, b_.qp, number));
    from.publish();
    EXPECT_EQ(b_.poll(), Numbers{});
    ASSERT_EQ(b_.others.size(), 1u);
    const ibv_wc wc = b_.others[0];
    b_.others.clear();
    const NumberedDatagram d(number);
    EXPECT_EQ(wc.byte_len, kGrh + d.length());
    EXPECT_EQ(wc.src_qp, from.qp->qp_num);
    EXPECT_EQ(wc.wc_flags, unsigned{IBV_WC_GRH});
    EXPECT_TRUE(d.lies_at(b_.node.bytes(kTo + kGrh, 48).data()));
    ASSERT_EQ(b_.batches.count, 1u);
    std::array<std::byte, kGrh + 1> route{};
    route.back() = std::byte{0x5a};
    sv::direct_datagrams().write_route(*b_.batches.batches[0], d.length(), route.data());
    EXPECT_EQ(std::memcmp(route.data(), b_.node.bytes(kTo, kGrh).data(), kGrh), 0) << number;
    EXPECT_EQ(route.back(), std::byte{0x5a});
    const auto said = route_header(plain_way(b_.node), gid_of(from.node), d.length(), false);
    EXPECT_EQ(std::memcmp(route.data(), said.data(), kGrh), 0) << number;
    EXPECT_EQ(b_.take_batches(), Numbers{number});
  };
  for (std::uint64_t number = 0; number <= sv::kDirectPayload; ++number) {
    ASSERT_NO_FATAL_FAILURE(compare(a_, to_b_, number));
    ASSERT_NO_FATAL_FAILURE(compare(c, c.to_other, number));
  }
}

// ---- other sends publish, too -------------------------------------------------------------------

/// Work requests sent after direct datagrams. Each has a receive.
class SoftverbsDirectBesideVerbs : public DirectPair {
 protected:
  ibv_qp* ra_ = a_.node.make_qp();
  ibv_qp* rb_ = b_.node.make_qp();

  void SetUp() override {
    connect(a_.node, ra_, b_.node, rb_);
    for (std::uint64_t i = 0; i < 64; ++i) ASSERT_EQ(b_.node.post_recv(i, kTo, 1024), 0);
  }
  /// `sends` posts messages that arrive as `middle`: after the direct datagrams sent before it, and
  /// before those sent after it.
  template <typename Sends>
  void check(const Numbers& middle, Sends sends) {
    for (std::uint64_t round = 0; round < 40; ++round) {
      const bool step_by_step = round % 2 == 0;
      Numbers expected{2};
      send_all(1, 3);
      EXPECT_EQ(sequence(), Numbers{1});  // a group
      ASSERT_EQ(sends(), 0);
      expected.insert(expected.end(), middle.begin(), middle.end());
      if (step_by_step) {
        EXPECT_EQ(sequence(), expected);
        expected.clear();
      }
      send_all(3, 6);
      EXPECT_EQ(peers_with_open_line(a_.node).size(), 1u);
      expected.insert(expected.end(), {3, 4});  // the next group
      if (step_by_step) {
        EXPECT_EQ(std::exchange(expected, {}), sequence());
      }
      a_.publish();
      EXPECT_TRUE(peers_with_open_line(a_.node).empty());
      expected.push_back(5);
      EXPECT_EQ(sequence(), expected);
      (void)a_.steps();
    }
  }
  static constexpr std::uint64_t kMessage = DirectEnd::kMessage;

 private:
  /// All arrivals in order.
  Numbers sequence() {
    (void)b_.steps(1);
    for (const ibv_wc& wc : b_.others) {
      EXPECT_EQ(wc.qp_num, rb_->qp_num);
      EXPECT_EQ(b_.node.post_recv(wc.wr_id, kTo, 1024), 0);
    }
    b_.others.clear();
    return std::exchange(b_.order, {});
  }
};

TEST_F(SoftverbsDirectBesideVerbs, AShortDatagram) {
  check({9}, [&] { return a_.post(to_b_, b_.qp, 9); });
}
TEST_F(SoftverbsDirectBesideVerbs, ADatagramThatIsGathered) {
  check({9}, [&] { return a_.post(to_b_, b_.qp, 9, IBV_SEND_SIGNALED); });
}
TEST_F(SoftverbsDirectBesideVerbs, ALongDatagram) {
  check({kLong}, [&] { return a_.post(to_b_, b_.qp, kLong); });
}
TEST_F(SoftverbsDirectBesideVerbs, ASolicitedDatagram) {
  const unsigned flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE | IBV_SEND_SOLICITED;
  check({9}, [&] { return a_.post(to_b_, b_.qp, 9, flags); });
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
      if (i == 3 && round % 3 == 1) {  // sent alone, with the lines before it
        ASSERT_EQ(a_.post(c.from_other, c.qp, 104), 0);
        EXPECT_EQ(c.step(), (Numbers{100, 101, 102, 103, 104}));
        ++i;
        ASSERT_TRUE(send(i));
      }
      if (round % 2 == 0) {
        ASSERT_TRUE(a_.send(d.from_other, d.qp, 200 + i));
      }
    }
    const bool by_verbs = round % 3 == 1;
    const bool with_d = round % 2 == 0;
    EXPECT_EQ(b_.steps(), numbers(0, 3));
    EXPECT_EQ(c.steps(), by_verbs ? Numbers{} : numbers(100, 103));
    EXPECT_EQ(d.steps(), with_d ? numbers(200, 203) : Numbers{});
    EXPECT_EQ(peers_with_open_line(a_.node).size(), round % 2 == 0 ? 3u : 2u);
    a_.publish();
    EXPECT_TRUE(peers_with_open_line(a_.node).empty());
    EXPECT_EQ(b_.steps(), numbers(3, 6));
    EXPECT_EQ(c.steps(), numbers(by_verbs ? 105 : 103, 106));
    EXPECT_EQ(d.steps(), with_d ? numbers(by_verbs ? 204 : 203, 206) : Numbers{});
    (void)a_.steps();
  }
}

TEST_F(SoftverbsDirect, WhomTheVerbsHavePublishedToIsInNobodysWay) {
  ThirdEnd c(&now_, a_), d(&now_, a_);
  for (std::uint64_t round = 0; round < 5; ++round) {
    send_all(0, 2);
    for (std::uint64_t i = 0; i < 2; ++i) {
      ASSERT_TRUE(a_.send(c.from_other, c.qp, 100 + i));
      ASSERT_TRUE(a_.send(d.from_other, d.qp, 200 + i));
    }
    DirectEnd& first = round % 2 == 0 ? c : d;
    const Handle& way = round % 2 == 0 ? c.from_other : d.from_other;
    ASSERT_EQ(a_.post(way, first.qp, 300), 0);
    EXPECT_EQ(first.step().size(), 3u);
    EXPECT_EQ(b_.step(), Numbers{0});
    a_.publish();
    EXPECT_EQ(b_.steps(), Numbers{1});
    EXPECT_EQ(c.steps(), round % 2 == 0 ? Numbers{} : numbers(100, 102));
    EXPECT_EQ(d.steps(), round % 2 == 0 ? numbers(200, 202) : Numbers{});
    (void)a_.steps();
  }
}

// ---- datagrams outside batches
// ---------------------------------------------------------------------

TEST_F(SoftverbsDirect, ShortOnesNeedNoReceiveAndOthersAreDroppedAndCounted) {
  b_.forget_receives();
  send_all(0, 5);
  a_.publish();
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_EQ(a_.post(to_b_, b_.qp, kLong + i), 0);
  ASSERT_EQ(a_.post(to_b_, b_.qp, 5), 0);
  EXPECT_EQ(b_.steps(), numbers(0, 6));
  EXPECT_EQ(dropped(b_.node, sv::Drop::no_receive), 3u);
  b_.post_receive(0);
  ASSERT_EQ(a_.post(to_b_, b_.qp, kLong), 0);
  send_all(6, 7);
  a_.publish();
  EXPECT_EQ(b_.steps(), (Numbers{kLong, 6}));
  EXPECT_EQ(dropped(b_.node, sv::Drop::no_receive), 3u);
}

TEST_F(SoftverbsDirect, WhatIsLongerThanItsReceiveIsDroppedAndTheReceiveKept) {
  const std::uint32_t most = DirectEnd::kRoom - kGrh;
  const std::uint32_t posted = b_.receives().count();
  const auto verbs = [&](std::uint32_t length) {
    return Datagram(1, a_.node.sge(0, length), to_b_, b_.qp->qp_num).post(a_.qp);
  };
  send_all(1, 2);
  ASSERT_EQ(verbs(most + 1), 0);
  ASSERT_EQ(verbs(4096), 0);
  send_all(2, 3);
  a_.publish();
  EXPECT_EQ(b_.steps(), numbers(1, 3));
  EXPECT_EQ(dropped(b_.node, sv::Drop::too_long), 2u);
  EXPECT_EQ(b_.receives().count(), posted);
  fill(a_.node.bytes(0, most), 9);
  ASSERT_EQ(verbs(most), 0);
  ibv_wc wc{};
  ASSERT_TRUE(until([] {}, [&] { return b_.node.poll(wc); }));
  EXPECT_EQ(wc.byte_len, DirectEnd::kRoom);
  const std::size_t at = DirectEnd::kReceivesAt + wc.wr_id * DirectEnd::kRoom + kGrh;
  EXPECT_TRUE(holds(b_.node.bytes(at, most), 9));
  EXPECT_EQ(dropped(b_.node, sv::Drop::too_long), 2u);
}

TEST_F(SoftverbsDirect, AnotherKeyIsDropped) {
  for (std::uint64_t i = 0; i < 30; ++i) ASSERT_TRUE(send(i, i % 3 == 0 ? kQkey + 1 : kQkey));
  a_.publish();
  Numbers expected;
  for (std::uint64_t i = 0; i < 30; ++i) {
    if (i % 3 != 0) expected.push_back(i);
  }
  EXPECT_EQ(b_.steps(), expected);
  EXPECT_EQ(dropped(b_.node, sv::Drop::wrong_key), 10u);
  EXPECT_EQ(b_.by_receives, 0u);
}

TEST_F(SoftverbsDirect, AnotherQueuePairOrNoneGetsNothingOfIt) {
  ibv_qp* const other = ready_ud(b_.node, false);
  ibv_qp* const fresh = make_ud(b_.node, false);
  const std::uint32_t gone = other->qp_num;
  b_.node.destroy(other);
  for (const std::uint32_t qpn : {gone, fresh->qp_num})
    ASSERT_TRUE(DirectEnd::send_by(a_.qp, to_b_, qpn, 1));
  send_all(7, 8);
  a_.publish();
  EXPECT_EQ(b_.steps(), numbers(7, 8));
  EXPECT_EQ(dropped(b_.node, sv::Drop::no_queue_pair), 2u);
}

/// A datagram sent by a work request.
struct Shape {
  bool marked;  ///< with a traffic class
  bool imm;
  unsigned flags;
  std::uint32_t length;
  [[nodiscard]] bool is_run() const { return !marked && !imm && flags == 0 && length <= 48; }
};

class SoftverbsDirectShapes : public DirectPair {
 protected:
  ibv_ah_attr classy_ = [this] {
    ibv_ah_attr way = plain_way(b_.node);
    way.grh.traffic_class = 0x2e;
    return way;
  }();
  Handle marked_{a_.node, classy_};

  void post(const Shape& s, std::uint64_t seed) {
    fill(a_.node.bytes(0, s.length), seed);
    Datagram d(1, a_.node.sge(0, s.length), s.marked ? marked_ : to_b_, b_.qp->qp_num, kQkey,
               s.flags);
    d.wr.opcode = s.imm ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND;
    d.wr.imm_data = 7;
    ASSERT_EQ(d.post(a_.qp), 0);
  }
  /// Checks that it completed like a work request's, and that nothing else completed.
  void expect_receive(const Shape& s, std::uint64_t seed, std::uint64_t wr_id) {
    ibv_wc wc[4];
    ASSERT_EQ(ibv_poll_cq(b_.node.cq, 4, wc), 1);
    EXPECT_EQ(wc[0].status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc[0].opcode, IBV_WC_RECV);
    EXPECT_EQ(wc[0].byte_len, kGrh + s.length);
    EXPECT_EQ(wc[0].wr_id, wr_id);
    EXPECT_EQ(wc[0].qp_num, b_.qp->qp_num);
    EXPECT_EQ(wc[0].src_qp, a_.qp->qp_num);
    EXPECT_EQ(wc[0].wc_flags, IBV_WC_GRH | (s.imm ? unsigned{IBV_WC_WITH_IMM} : 0u));
    EXPECT_EQ(wc[0].imm_data, s.imm ? 7u : 0u);
    EXPECT_EQ(b_.batches.count, 0u);
    const std::size_t at = DirectEnd::kReceivesAt + wc[0].wr_id * DirectEnd::kRoom;
    EXPECT_TRUE(holds(b_.node.bytes(at + kGrh, s.length), seed));
    const ibv_ah_attr way = s.marked ? classy_ : plain_way(b_.node);
    const auto said = route_header(way, gid_of(a_.node), s.length, s.imm);
    EXPECT_EQ(std::memcmp(b_.node.bytes(at, kGrh).data(), said.data(), kGrh), 0);
    b_.post_receive(wc[0].wr_id);
  }
  void expect_run(const Shape& s, std::uint64_t seed) {
    ibv_wc wc[4];
    ASSERT_EQ(ibv_poll_cq(b_.node.cq, 4, wc), 1);
    EXPECT_EQ(wc[0].wr_id, kDirectWr);
    ASSERT_EQ(b_.batches.count, 1u);
    const sv::DirectBatch& batch = *b_.batches.batches[0];
    std::uint64_t length = 0;
    std::byte* const at = batch.bytes(*batch.first, length, b_.batches.longest);
    ASSERT_NE(at, nullptr);
    EXPECT_EQ(length, s.length);
    EXPECT_TRUE(holds({at, length}, seed));
    b_.give_back(batch, 1);
    b_.batches.count = 0;
  }
};

TEST_F(SoftverbsDirectShapes, OnlyShortPlainOnesAreRuns) {
  std::uint64_t seed = 1, receives = 0;
  for (const bool marked : {false, true}) {
    for (const bool imm : {false, true}) {
      for (const unsigned flags : {0u, unsigned{IBV_SEND_SOLICITED}}) {
        for (const std::uint32_t length : {0u, 1u, 36u, 37u, 48u, 49u, 104u, 105u, 256u}) {
          SCOPED_TRACE(testing::Message() << marked << imm << flags << " " << length);
          const Shape s{marked, imm, flags, length};
          const std::uint32_t solicited = static_cast<sv::Cq*>(b_.node.cq)->solicited;
          ASSERT_NO_FATAL_FAILURE(post(s, ++seed));
          if (s.is_run()) {
            ASSERT_NO_FATAL_FAILURE(expect_run(s, seed));
          } else {
            ASSERT_NO_FATAL_FAILURE(expect_receive(s, seed, receives++ % DirectEnd::kReceives));
          }
          EXPECT_EQ(static_cast<sv::Cq*>(b_.node.cq)->solicited, solicited + (flags != 0 ? 1 : 0));
          (void)a_.step();
        }
      }
    }
  }
  EXPECT_EQ(receives, 67u);
}

TEST_F(SoftverbsDirectShapes, NoneIsTakenIntoARunThatLiesBeforeIt) {
  for (const Shape& s : {Shape{false, false, 0, 49}, Shape{false, false, IBV_SEND_SOLICITED, 8},
                         Shape{false, true, 0, 8}, Shape{true, false, 0, 8}}) {
    SCOPED_TRACE(testing::Message() << s.marked << s.imm << s.flags << " " << s.length);
    send_all(1, 4);
    ASSERT_NO_FATAL_FAILURE(post(s, 77));
    send_all(4, 6);
    a_.publish();
    const std::uint64_t next = b_.receives().head % DirectEnd::kReceives;
    EXPECT_EQ(b_.step(), numbers(1, 4));
    // An array of one: what follows is in the next poll.
    ibv_wc wc{};
    ASSERT_TRUE(b_.node.poll(wc));
    EXPECT_EQ(wc.wr_id, next);
    EXPECT_EQ(wc.byte_len, kGrh + s.length);
    EXPECT_EQ(b_.batches.count, 0u);
    b_.post_receive(wc.wr_id);
    EXPECT_EQ(b_.step(), numbers(4, 6));
    (void)a_.steps();
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
  ASSERT_EQ(b_.batches.count, 1u);
  EXPECT_EQ(read(*b_.batches.batches[0]), numbers(0, 10));
  EXPECT_EQ(ibv_poll_cq(b_.node.cq, 16, wc), 0);
  EXPECT_EQ(b_.take_batches(), numbers(0, 10));
  EXPECT_EQ(ibv_poll_cq(b_.node.cq, 16, wc), 0);
}

TEST_F(SoftverbsDirect, EveryArrayIsLongEnough) {
  ThirdEnd c(&now_, b_);
  ibv_qp* const ra = a_.node.make_qp();
  ibv_qp* const rb = b_.node.make_qp();
  connect(a_.node, ra, b_.node, rb);
  for (std::uint64_t i = 0; i < 200; ++i) ASSERT_EQ(b_.node.post_recv(i, kTo, 64), 0);
  for (int entries = 1; entries <= 24; ++entries) {
    send_all(0, 20);
    for (std::uint64_t i = 0; i < 30; ++i) ASSERT_TRUE(c.send(c.to_other, b_.qp, 100 + i));
    for (std::uint64_t i = 0; i < 6; ++i) ASSERT_EQ(Send(i, a_.node.sge(0, 8)).post(ra), 0);
    send_all(20, 30);
    for (std::uint64_t i = 30; i < 40; ++i) ASSERT_EQ(a_.post(to_b_, b_.qp, kLong + i), 0);
    a_.publish();
    c.publish();
    Numbers from_a, from_c;
    for (const std::uint64_t n : b_.steps(entries))
      (n >= 100 && n < kLong ? from_c : from_a).push_back(n % kLong);
    EXPECT_EQ(from_a, numbers(0, 40)) << entries;
    EXPECT_EQ(from_c, numbers(100, 130)) << entries;
    EXPECT_EQ(b_.others.size(), 6u);
    b_.others.clear();
    (void)a_.steps();
  }
}

TEST_F(SoftverbsDirect, WithAFullArrayShortOnesTakeReceives) {
  ibv_qp* const ra = a_.node.make_qp();
  ibv_qp* const rb = b_.node.make_qp();
  connect(a_.node, ra, b_.node, rb);
  const auto send_back = [&](std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i) {
      ASSERT_EQ(a_.node.post_recv(i, kTo, 64), 0);
      ASSERT_EQ(Send(i, b_.node.sge(0, 8)).post(rb), 0);
    }
    EXPECT_EQ(a_.step(), Numbers{});
    ASSERT_EQ(std::exchange(a_.others, {}).size(), count);
    b_.node.internals().ack_countdown = 1;
  };
  ASSERT_NO_FATAL_FAILURE(send_back(4));
  send_all(0, 3);
  a_.publish();
  // Completions of sends fill the array; a datagram is still taken in each poll.
  ibv_wc wc[8];
  ASSERT_EQ(ibv_poll_cq(b_.node.cq, 2, wc), 2);
  EXPECT_EQ(wc[0].opcode, IBV_WC_SEND);
  EXPECT_EQ(wc[1].opcode, IBV_WC_SEND);
  EXPECT_EQ(b_.batches.count, 0u);
  EXPECT_EQ(b_.receives().count(), DirectEnd::kReceives - 1);
  EXPECT_EQ(b_.poll(2), Numbers{});  // two more sends fill the array before the lane's turn
  EXPECT_EQ(b_.sends_completed, 2u);
  EXPECT_EQ(b_.batches.count, 0u);
  EXPECT_EQ(b_.poll(8), Numbers{0});
  EXPECT_EQ(b_.by_receives, 1u);
  EXPECT_EQ(b_.take_batches(), numbers(1, 3));
  // Without a receive it is lost, like any other.
  b_.forget_receives();
  b_.sends_completed = 0;
  ASSERT_NO_FATAL_FAILURE(send_back(2));
  send_all(3, 5);
  a_.publish();
  EXPECT_EQ(b_.poll(2), Numbers{});
  EXPECT_EQ(b_.sends_completed, 2u);
  EXPECT_EQ(dropped(b_.node, sv::Drop::no_receive), 1u);
  EXPECT_EQ(b_.steps(), numbers(4, 5));
}

}  // namespace softverbs_test::direct
