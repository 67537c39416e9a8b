// Direct datagrams: batches, which stay in a lane until they are released, and what happens
// meanwhile.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/random.h"
#include "softverbs/direct_datagram_link.h"

namespace softverbs_test::direct {

/// Most datagrams in a batch.
constexpr std::uint32_t kTurn = 64;

/// A further completion queue.
class OtherQueue {
 public:
  explicit OtherQueue(Node& node) : cq_(sv::create_cq(node.context, 256)) {
    must(cq_ != nullptr, "create_cq");
    ibv_qp_init_attr init{};
    init.send_cq = node.cq;
    init.recv_cq = cq_;
    init.qp_type = IBV_QPT_UD;
    init.cap = {8, 64, 1, 1, 0};
    qp = sv::create_qp(node.pd, &init);
    must(qp != nullptr, "create_qp");
    must(ud_init(qp) == 0 && ud_rtr(qp) == 0 && ud_rts(qp) == 0, "RTS");
  }
  OtherQueue(const OtherQueue&) = delete;
  OtherQueue& operator=(const OtherQueue&) = delete;
  ~OtherQueue() {
    sv::destroy_qp(qp);
    sv::destroy_cq(cq_);
  }
  /// The completions of one poll.
  std::vector<ibv_wc> poll() const {
    ibv_wc wc[64];
    const int n = ibv_poll_cq(cq_, 64, wc);
    must(n >= 0, "poll");
    return {wc, wc + n};
  }
  ibv_qp* qp;

 private:
  ibv_cq* cq_;
};

class SoftverbsDirectBatch : public DirectPair {
 protected:
  ibv_qp* ra_ = a_.node.make_qp();
  ibv_qp* rb_ = b_.node.make_qp();

  void SetUp() override {
    connect(a_.node, ra_, b_.node, rb_);
    for (std::uint64_t i = 0; i < 500; ++i) ASSERT_EQ(b_.node.post_recv(i, 0, 64), 0);
  }
  [[nodiscard]] sv::OutLane& out() const { return a_.node.internals().peers[0]->out; }
  [[nodiscard]] const sv::InLane& in() const { return *b_.node.internals().peers[0]->in; }
  [[nodiscard]] const sv::DirectBatch& batch(std::uint32_t i = 0) const {
    return *b_.batches.batches[i];
  }
  void message() { ASSERT_EQ(Send(1, a_.node.sge(0, 8)).post(ra_), 0); }
  void published(std::uint64_t first, std::uint64_t end) {
    send_all(first, end);
    a_.publish();
  }
  /// Moves to the lane's start, so that a batch is as long as possible.
  void begin_lap() {
    while (in().next != in().lines) {
      published(7, 8);
      ASSERT_EQ(b_.step(), Numbers{7});
    }
  }
  /// Releases `count` datagrams of the batch.
  void give_back(std::size_t count) {
    b_.give_back(batch(), count);
    b_.batches.count = 0;
  }
};

// ---- batches stay in the lane
// ----------------------------------------------------------------------

TEST_F(SoftverbsDirectBatch, ItsLinesAreNotWrittenAgainBeforeTheyAreGivenBack) {
  const std::uint64_t timeout = a_.node.internals().datagram_timeout;
  for (std::uint64_t round = 0; round < 8; ++round) {
    published(1000, 1040);
    EXPECT_EQ(b_.poll(), Numbers{});
    ASSERT_EQ(b_.batches.count, 1u);
    const Numbers mine = read(batch());
    ASSERT_FALSE(mine.empty());
    EXPECT_EQ(batch().first, in().lines + in().head % sv::kLaneLines);
    const std::span<const sv::Line> lines(batch().first, mine.size());
    std::vector<std::byte> before(lines.size_bytes());
    std::memcpy(before.data(), static_cast<const void*>(lines.data()), before.size());
    // Fills all ways of sending: nothing more can be sent or queued, and no line is free.
    std::uint64_t next = 1040;
    while (send(next)) ++next;
    a_.publish();
    for (int i = 0; i < 10; ++i) ASSERT_EQ(a_.post(to_b_, b_.qp, next++), 0);
    std::size_t messages = 0;
    for (; messages < 60; ++messages) message();
    EXPECT_EQ(out().tail, in().head + sv::kLaneLines);
    for (int i = 0; i < 3 * kLook; ++i) {
      now_ += timeout / 1000;
      EXPECT_EQ(a_.step(), Numbers{});
      EXPECT_EQ(b_.poll(), Numbers{});
    }
    EXPECT_FALSE(send(1));
    EXPECT_EQ(out().tail, in().head + sv::kLaneLines);
    EXPECT_EQ(b_.batches.count, 1u);
    EXPECT_TRUE(b_.others.empty());
    EXPECT_EQ(std::memcmp(before.data(), static_cast<const void*>(lines.data()), before.size()), 0);
    // A released line is reused.
    const std::uint64_t tail = out().tail;
    give_back(1);
    (void)a_.steps();
    EXPECT_EQ(out().tail, tail + 1);
    EXPECT_EQ(
        std::memcmp(before.data() + sizeof(sv::Line), static_cast<const void*>(lines.data() + 1),
                    before.size() - sizeof(sv::Line)),
        0);
    Numbers all;
    const auto step = [&] {
      for (const std::uint64_t n : b_.step()) all.push_back(n);
      now_ += 300;
      (void)a_.step();
    };
    ASSERT_TRUE(
        until(step, [&] { return all.size() == next - 1001 && b_.others.size() == messages; }));
    EXPECT_EQ(all, numbers(1001, next));
    for (const ibv_wc& wc : std::exchange(b_.others, {}))
      ASSERT_EQ(b_.node.post_recv(wc.wr_id, 0, 64), 0);
    (void)a_.steps();
  }
  EXPECT_EQ(dropped(a_.node, sv::Drop::no_room), 0u);
  EXPECT_EQ(b_.by_receives, 0u);
}

TEST_F(SoftverbsDirectBatch, WhatComesBehindItIsPartOfItUpToATurn) {
  ASSERT_NO_FATAL_FAILURE(begin_lap());
  published(0, 3);
  EXPECT_EQ(b_.poll(), Numbers{});
  EXPECT_EQ(batch().end() - batch().first, std::ptrdiff_t{kTurn});
  EXPECT_EQ(read(batch()), numbers(0, 3));
  send_all(3, 8);
  EXPECT_EQ(read(batch()), numbers(0, 3 + in_whole_groups(5)));
  a_.publish();
  EXPECT_EQ(read(batch()), numbers(0, 8));
  published(8, 100);
  EXPECT_EQ(read(batch()), numbers(0, kTurn));
  EXPECT_EQ(b_.take_batches(), numbers(0, kTurn));
  EXPECT_EQ(b_.step(), numbers(kTurn, 100));
}

TEST_F(SoftverbsDirectBatch, WhatThePollTookBeforeItCountsForTheTurn) {
  ASSERT_NO_FATAL_FAILURE(begin_lap());
  for (int i = 0; i < 40; ++i) message();
  published(0, 60);
  EXPECT_EQ(b_.poll(kTurn), Numbers{});
  EXPECT_EQ(b_.others.size(), 40u);
  ASSERT_EQ(b_.batches.count, 1u);
  EXPECT_EQ(batch().end() - batch().first, std::ptrdiff_t{kTurn} - 40);
  EXPECT_EQ(b_.take_batches(), numbers(0, kTurn - 40));
  EXPECT_EQ(b_.step(), numbers(kTurn - 40, 60));
}

TEST_F(SoftverbsDirectBatch, ItEndsWhereTheRingDoes) {
  ASSERT_NO_FATAL_FAILURE(begin_lap());
  for (std::uint64_t i = 0; i < sv::kLaneLines - 10; ++i) {
    published(i, i + 1);
    ASSERT_EQ(b_.step(), Numbers{i});
  }
  published(0, 30);
  EXPECT_EQ(b_.poll(), Numbers{});
  EXPECT_EQ(batch().end() - batch().first, 10);
  EXPECT_EQ(batch().end(), in().end);
  EXPECT_EQ(b_.take_batches(), numbers(0, 10));
  EXPECT_EQ(in().next, in().lines);
  EXPECT_EQ(b_.step(), numbers(10, 30));
}

TEST_F(SoftverbsDirectBatch, MarksOfLapsComeAgain) {
  std::uint64_t next = 0;
  const std::uint64_t begun = in().head;
  while (next < 260 * std::uint64_t{sv::kLaneLines}) {
    const std::uint64_t first = next, count = 1 + next % 150;
    for (; next != first + count; ++next) ASSERT_TRUE(send(next));
    a_.publish();
    Numbers all;
    while (all.size() < count) {
      const Numbers some = b_.step();
      ASSERT_FALSE(some.empty()) << next;
      all.insert(all.end(), some.begin(), some.end());
    }
    ASSERT_EQ(all, numbers(first, next));
    ASSERT_EQ(b_.poll(), Numbers{});
    ASSERT_EQ(b_.batches.count, 0u);
  }
  EXPECT_EQ(in().head - begun, next);
  EXPECT_EQ(b_.by_receives, 0u);
}

// ---- releasing ----------------------------------------------------------------------------------

TEST_F(SoftverbsDirectBatch, WhatIsNotGivenBackComesAgain) {
  std::uint64_t first = 0;
  for (std::uint64_t round = 0; round < 40; ++round) {
    published(first, first + 12);
    for (const std::uint64_t count : {0, 1, 0, 5, 2, 4}) {
      EXPECT_EQ(b_.poll(), Numbers{});
      ASSERT_EQ(b_.batches.count, 1u);
      const Numbers some = read(batch());
      // At the end of the ring there are fewer.
      const std::uint64_t left = (first / 12 + 1) * 12 - first;
      ASSERT_TRUE(some == numbers(first, first + left) || batch().end() == in().end);
      const std::uint64_t given = std::min<std::uint64_t>(count, some.size());
      give_back(given);
      first += given;
    }
    while (first % 12 != 0) first += b_.step().size();
    EXPECT_EQ(b_.steps(), Numbers{});
  }
}

TEST_F(SoftverbsDirectBatch, OnlyWhatIsGivenBackIsAcknowledged) {
  const sv::OutLane& back = b_.node.internals().peers[0]->out;
  published(0, 1);
  EXPECT_EQ(b_.steps(), numbers(0, 1));
  ASSERT_TRUE(b_.send(to_a_, a_.qp, 1));
  b_.publish();
  EXPECT_EQ(a_.steps(), numbers(1, 2));
  const std::uint64_t head = in().head;
  ASSERT_NO_FATAL_FAILURE(message());  // the acknowledgement reports its completion
  published(0, 10);
  const auto told = [&](std::uint64_t number) {
    a_.node.internals().ack_countdown = sv::kAckInterval;
    EXPECT_TRUE(b_.send(to_a_, a_.qp, number));
    b_.publish();
    EXPECT_EQ(a_.step(), numbers(number, number + 1));
    EXPECT_EQ(a_.poll(), Numbers{});
    return out().acked - head;
  };
  EXPECT_EQ(b_.poll(), Numbers{});
  EXPECT_EQ(read(batch()), numbers(0, 10));
  EXPECT_EQ(told(2), 1u);
  EXPECT_EQ(a_.sends_completed, 1u);
  EXPECT_EQ(in().control->head, head + 1);
  give_back(4);
  EXPECT_EQ(in().control->head, head + 5);
  EXPECT_EQ(told(3), 5u);
  EXPECT_EQ(b_.poll(), Numbers{});
  EXPECT_EQ(told(4), 5u);
  EXPECT_EQ(in().control->head, head + 5);
  EXPECT_EQ(b_.take_batches(), numbers(4, 10));
  EXPECT_EQ(in().control->head, head + 11);
  EXPECT_EQ(told(5), 11u);
  EXPECT_EQ(back.tail, back.control->head);
}

// ---- while a batch is held
// ------------------------------------------------------------------------

TEST_F(SoftverbsDirectBatch, NothingElseOfItsLaneIsTakenByAnyPoll) {
  OtherQueue other(b_.node);
  for (std::uint64_t i = 0; i < 4; ++i) ASSERT_EQ(b_.node.post_recv(i, 4096, 512, other.qp), 0);
  published(0, 3);
  ASSERT_EQ(a_.post(to_b_, other.qp, 3), 0);
  ASSERT_EQ(a_.post(to_b_, b_.qp, kLong), 0);
  ASSERT_NO_FATAL_FAILURE(message());
  published(4, 6);
  EXPECT_EQ(b_.poll(), Numbers{});
  const std::uint64_t head = in().head;
  for (int i = 0; i < 2 * kLook; ++i) {
    EXPECT_EQ(b_.poll(), Numbers{});
    EXPECT_TRUE(other.poll().empty());
  }
  EXPECT_EQ(b_.batches.count, 1u);
  EXPECT_EQ(in().head, head);
  EXPECT_EQ(b_.take_batches(), numbers(0, 3));
  EXPECT_EQ(b_.step(), (Numbers{kLong, 4, 5}));
  EXPECT_EQ(b_.order, (Numbers{0, 1, 2, kLong, DirectEnd::kMessage, 4, 5}));
  EXPECT_EQ(other.poll().size(), 1u);
}

TEST_F(SoftverbsDirectBatch, OtherLanesGoOn) {
  ThirdEnd c(&now_, b_);
  published(0, 3);
  EXPECT_EQ(b_.poll(), Numbers{});
  ASSERT_EQ(c.post(c.to_other, b_.qp, kLong), 0);
  ASSERT_TRUE(c.send(c.to_other, b_.qp, 100));
  c.publish();
  EXPECT_EQ(b_.poll(), Numbers{kLong});
  ASSERT_EQ(b_.batches.count, 2u);  // the one completion reports both
  EXPECT_EQ(read(batch(0)), numbers(0, 3));
  EXPECT_EQ(read(batch(1)), numbers(100, 101));
  EXPECT_NE(batch(0).lane, batch(1).lane);
  // In any order.
  b_.give_back(batch(1), 1);
  EXPECT_EQ(read(batch(0)), numbers(0, 3));
  b_.give_back(batch(0), 3);
  b_.batches.count = 0;
  EXPECT_EQ(b_.steps(), Numbers{});
}

TEST_F(SoftverbsDirectBatch, ItsLaneStaysAwake) {
  const std::uint32_t rounds = b_.node.internals().idle_rounds + 1;
  std::vector<std::unique_ptr<ThirdEnd>> others;
  for (int i = 0; i < 3; ++i) others.push_back(std::make_unique<ThirdEnd>(&now_, b_));
  published(0, 3);
  EXPECT_EQ(b_.poll(), Numbers{});
  for (std::uint32_t i = 0; i < 3 * rounds; ++i) sv::control_device(b_.node.context);
  EXPECT_TRUE(in().awake);
  EXPECT_EQ(b_.node.internals().awake_count, 2u);
  EXPECT_EQ(b_.take_batches(), numbers(0, 3));
  EXPECT_EQ(b_.steps(), Numbers{});
}

TEST_F(SoftverbsDirectBatch, ItsLaneIsNotTakenBackFromOneThatCloses) {
  const sv::Context& at_b = b_.node.internals();
  for (const std::size_t given : {std::size_t{0}, std::size_t{2}, std::size_t{5}}) {
    auto c = std::make_unique<ThirdEnd>(&now_, b_);
    for (std::uint64_t i = 0; i < 5; ++i) ASSERT_TRUE(c->send(c->to_other, b_.qp, i));
    c->publish();
    EXPECT_EQ(b_.poll(), Numbers{});
    ASSERT_EQ(b_.batches.count, 1u);
    const std::uint32_t lane = static_cast<const sv::InLane*>(batch().lane)->index;
    const std::uint64_t source = batch().source;
    c.reset();
    const auto pass = [&] {
      for (int i = 0; i < 20; ++i) {
        now_ += 10'000'000;
        sv::control_device(b_.node.context);
        EXPECT_EQ(b_.poll(), Numbers{});
      }
    };
    pass();
    ASSERT_NE(at_b.lanes[lane], nullptr);
    EXPECT_EQ(read(batch()), numbers(0, 5));
    give_back(given);
    if (given != 5) {
      pass();
      ASSERT_NE(at_b.lanes[lane], nullptr);
      ASSERT_EQ(b_.batches.count, 1u);
      EXPECT_EQ(batch().source, source);
      EXPECT_EQ(b_.take_batches(), numbers(given, 5));
    }
    ASSERT_TRUE(until(pass, [&] { return at_b.lanes[lane] == nullptr; }));
    EXPECT_EQ(b_.steps(), Numbers{});
    EXPECT_EQ(dropped(b_.node, sv::Drop::no_queue_pair), 0u);
  }
}

TEST_F(SoftverbsDirectBatch, ItsLinkIsCut) {
  published(0, 3);
  ASSERT_EQ(a_.post(to_b_, b_.qp, kLong), 0);
  published(3, 5);
  EXPECT_EQ(b_.poll(), Numbers{});
  const auto cut = [this] { return sv::fault_statistics(b_.node.context).cut; };
  ASSERT_EQ(sv::set_link(b_.node.context, gid_of(a_.node), sv::LinkState::down), 0);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(b_.poll(), Numbers{});
  EXPECT_EQ(cut(), 0u);
  EXPECT_EQ(read(batch()), numbers(0, 3));  // it arrived earlier
  give_back(1);
  EXPECT_EQ(b_.poll(), Numbers{});
  EXPECT_EQ(b_.batches.count, 0u);
  EXPECT_EQ(cut(), 5u);
  sv::clear_faults(b_.node.context);
  published(5, 6);
  EXPECT_EQ(b_.steps(), numbers(5, 6));
}

TEST_F(SoftverbsDirectBatch, ItsQueuePairFails) {
  published(0, 3);
  EXPECT_EQ(b_.poll(), Numbers{});
  b_.node.fail(b_.qp);
  published(3, 5);
  EXPECT_EQ(read(batch()), numbers(0, 5));  // the reader already has them
  give_back(2);
  EXPECT_EQ(dropped(b_.node, sv::Drop::no_queue_pair), 0u);
  ibv_wc wc[80];
  EXPECT_EQ(ibv_poll_cq(b_.node.cq, 80, wc), static_cast<int>(DirectEnd::kReceives));  // flushed
  EXPECT_EQ(ibv_poll_cq(b_.node.cq, 80, wc), 0);
  EXPECT_EQ(dropped(b_.node, sv::Drop::no_queue_pair), 3u);
}

TEST_F(SoftverbsDirectBatch, ALaterOneObeysAChangeOfItsQueuePair) {
  // The second poll knows the batch's word from the first.
  for (std::uint64_t i = 0; i < 2; ++i) {
    published(i, i + 1);
    ASSERT_EQ(b_.step(), Numbers{i});
  }
  ibv_qp_attr attr{};
  attr.qkey = kQkey + 1;
  ASSERT_EQ(sv::modify_qp(b_.qp, &attr, IBV_QP_QKEY), 0);
  published(2, 3);
  EXPECT_EQ(b_.step(), Numbers{});
  EXPECT_EQ(dropped(b_.node, sv::Drop::wrong_key), 1u);
  ASSERT_TRUE(send(3, kQkey + 1));
  a_.publish();
  EXPECT_EQ(b_.step(), Numbers{3});
  EXPECT_EQ(b_.by_receives, 0u);
  b_.node.fail(b_.qp);
  ASSERT_TRUE(send(4, kQkey + 1));
  a_.publish();
  ibv_wc wc[80];
  EXPECT_EQ(ibv_poll_cq(b_.node.cq, 80, wc), static_cast<int>(DirectEnd::kReceives));  // flushed
  EXPECT_EQ(ibv_poll_cq(b_.node.cq, 80, wc), 0);
  EXPECT_EQ(b_.batches.count, 0u);
  EXPECT_EQ(dropped(b_.node, sv::Drop::no_queue_pair), 1u);
}

TEST_F(SoftverbsDirectBatch, ItsQueuePairIsDestroyed) {
  // The lanes still work, and unreleased datagrams are dropped.
  ThirdEnd c(&now_, b_);
  for (std::uint64_t round = 0; round < 3; ++round) {
    ibv_qp* const qp = ready_ud(b_.node, false);
    sv::DirectBatches batches;
    sv::direct_datagrams().receive_batches(qp, &batches);
    for (std::uint64_t i = 0; i < 6; ++i) {
      ASSERT_TRUE(DirectEnd::send_by(a_.qp, to_b_, qp->qp_num, i));
      ASSERT_TRUE(DirectEnd::send_by(c.qp, c.to_other, qp->qp_num, i));
    }
    send_all(10, 13);
    ASSERT_TRUE(c.send(c.to_other, b_.qp, 20));
    a_.publish();
    c.publish();
    ibv_wc wc[4];
    ASSERT_EQ(ibv_poll_cq(b_.node.cq, 4, wc), 1);
    EXPECT_EQ(wc[0].qp_num, qp->qp_num);
    ASSERT_EQ(batches.count, 2u);
    if (round != 0) sv::release_batch(*batches.batches[1], static_cast<std::uint32_t>(round));
    b_.node.destroy(qp);
    Numbers all = b_.steps();
    std::sort(all.begin(), all.end());
    EXPECT_EQ(all, (Numbers{10, 11, 12, 20}));
    const std::uint64_t lost = dropped(b_.node, sv::Drop::no_queue_pair);
    EXPECT_EQ(lost, 12 * (round + 1) - round * (round + 1) / 2);
  }
}

// ---- other traffic at the same time -------------------------------------------------------------

TEST_F(SoftverbsDirectBatch, AllKindsOfOneLaneComeInOrder) {
  spinwire::base::Random random(5);
  constexpr unsigned kFlags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
  std::uint64_t next = 0;
  for (int round = 0; round < 400; ++round) {
    Numbers expected;
    for (std::uint64_t count = 1 + random.below(30); count != 0; --count) {
      const std::uint64_t number = next++;
      expected.push_back(number);
      switch (random.below(8)) {
        case 0:
          expected.back() = DirectEnd::kMessage;
          ASSERT_NO_FATAL_FAILURE(message());
          break;
        case 1:
          expected.back() = kLong + number;
          ASSERT_EQ(a_.post(to_b_, b_.qp, kLong + number), 0);
          break;
        case 2:
          ASSERT_EQ(a_.post(to_b_, b_.qp, number, kFlags | IBV_SEND_SOLICITED), 0);
          break;
        case 3:
          ASSERT_EQ(a_.post(to_b_, b_.qp, number), 0);
          break;
        default:
          ASSERT_TRUE(send(number));
      }
    }
    a_.publish();
    b_.order.clear();
    (void)b_.steps(1 + static_cast<int>(random.below(40)));
    ASSERT_EQ(b_.order, expected) << round;
    for (const ibv_wc& wc : std::exchange(b_.others, {}))
      ASSERT_EQ(b_.node.post_recv(wc.wr_id, 0, 64), 0);
    (void)a_.steps();
  }
  EXPECT_GT(b_.by_receives, 500u);
}

TEST_F(SoftverbsDirectBatch, WithoutAListShortOnesTakeReceives) {
  const auto& direct = sv::direct_datagrams();
  for (std::uint64_t round = 0; round < 3; ++round) {
    published(0, 5);
    EXPECT_EQ(b_.steps(), numbers(0, 5));
    EXPECT_EQ(b_.by_receives, 6 * round);
    // One batch is held and released as usual.
    published(5, 8);
    EXPECT_EQ(b_.poll(), Numbers{});
    direct.receive_batches(b_.qp, nullptr);
    EXPECT_EQ(b_.poll(), Numbers{});
    EXPECT_EQ(read(batch()), numbers(5, 8));
    give_back(1);
    published(8, 12);
    EXPECT_EQ(b_.steps(), numbers(6, 12));
    EXPECT_EQ(b_.batches.count, 0u);
    EXPECT_EQ(b_.by_receives, 6 * round + 6);
    direct.receive_batches(b_.qp, &b_.batches);
    published(12, 14);
    EXPECT_EQ(b_.steps(), numbers(12, 14));
    EXPECT_EQ(b_.by_receives, 6 * round + 6);
  }
}

TEST_F(SoftverbsDirectBatch, ItIsForPollsOfItsOwnQueue) {
  sv::DirectBatches batches;
  OtherQueue other(b_.node);
  batches.wr_id = kDirectWr;
  sv::direct_datagrams().receive_batches(other.qp, &batches);
  for (std::uint64_t i = 0; i < 20; ++i) ASSERT_EQ(b_.node.post_recv(i, 512 * i, 512, other.qp), 0);
  const auto send_there = [&](std::uint64_t first, std::uint64_t end) {
    for (std::uint64_t i = first; i < end; ++i)
      ASSERT_TRUE(DirectEnd::send_by(a_.qp, to_b_, other.qp->qp_num, i));
    a_.publish();
  };
  // A poll of another queue finds them: each takes a receive and waits in the ring.
  ASSERT_NO_FATAL_FAILURE(send_there(0, 12));
  EXPECT_EQ(b_.steps(), Numbers{});
  EXPECT_EQ(batches.count, 0u);
  ASSERT_NO_FATAL_FAILURE(send_there(12, 16));
  const std::vector<ibv_wc> all = other.poll();
  ASSERT_EQ(all.size(), 13u);
  for (std::uint64_t i = 0; i < 12; ++i) {
    EXPECT_EQ(all[i].wr_id, i);
    EXPECT_TRUE(NumberedDatagram(i).lies_at(b_.node.bytes(512 * i + kGrh, 48).data()));
  }
  EXPECT_EQ(all[12].wr_id, kDirectWr);
  EXPECT_EQ(all[12].qp_num, other.qp->qp_num);
  ASSERT_EQ(batches.count, 1u);
  EXPECT_EQ(read(*batches.batches[0]), numbers(12, 16));
  // Our poll leaves a lane alone that has a datagram of another queue.
  published(16, 18);
  EXPECT_EQ(b_.steps(), Numbers{});
  b_.give_back(*batches.batches[0], 4);
  batches.count = 0;
  EXPECT_EQ(b_.steps(), numbers(16, 18));
}

TEST_F(SoftverbsDirectBatch, EachQueuePairHasItsOwn) {
  ibv_qp* const second = ready_ud(b_.node, false);
  sv::DirectBatches batches;
  batches.wr_id = 77;
  sv::direct_datagrams().receive_batches(second, &batches);
  ThirdEnd c(&now_, b_);
  published(0, 2);
  ASSERT_TRUE(DirectEnd::send_by(c.qp, c.to_other, second->qp_num, 5));
  c.publish();
  ibv_wc wc[4];
  ASSERT_EQ(ibv_poll_cq(b_.node.cq, 4, wc), 2);
  EXPECT_EQ(std::min(wc[0].wr_id, wc[1].wr_id), 77u);
  EXPECT_EQ(std::max(wc[0].wr_id, wc[1].wr_id), kDirectWr);
  for (const ibv_wc& each : {wc[0], wc[1]})
    EXPECT_EQ(each.qp_num, each.wr_id == 77 ? second->qp_num : b_.qp->qp_num);
  ASSERT_EQ(b_.batches.count, 1u);
  ASSERT_EQ(batches.count, 1u);
  EXPECT_EQ(read(batch()), numbers(0, 2));
  EXPECT_EQ(read(*batches.batches[0]), numbers(5, 6));
  b_.give_back(*batches.batches[0], 1);
  batches.count = 0;
  EXPECT_EQ(b_.take_batches(), numbers(0, 2));
  b_.node.destroy(second);
}

}  // namespace softverbs_test::direct
