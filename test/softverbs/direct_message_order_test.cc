// The order of direct messages among work requests, by one thread and by two.
#include <gtest/gtest.h>

#include <cstdint>
#include <thread>

#include "base/random.h"
#include "softverbs/direct_message_link.h"

namespace softverbs_test::direct_message_order {

/// One end of a random exchange: it sends by both ways, and knows what the other must receive and
/// which completions it must find.
struct Sender {
  MessageEnd& from;
  MessageEnd& to;
  spinwire::base::Random random;
  std::uint32_t serial = 0;
  std::uint32_t packets = 0, by_work_request = 0;
  std::uint64_t direct = 0, refused = 0, wraps = 0;
  std::uint32_t psn = from.internals().next_psn;
  Numbers sent{}, completing{};

  void act() {
    const std::uint64_t kind = random.below(200);
    const std::uint32_t most = random.below(6) == 0   ? kLongMessage
                               : random.below(3) == 0 ? 300
                                                      : 60;
    const std::uint64_t number =
        number_of(serial, 8 + static_cast<std::uint32_t>(random.below(most - 7)));
    const std::uint32_t before = from.out().data_next;
    const bool completes = kind % 5 == 0;
    const std::uint64_t wr_id = number | (kind < 188 ? MessageEnd::kDirect : 0);
    if (kind < 188) {
      if (!from.send(number, completes ? wr_id : sv::kNoCompletion)) {
        ++refused;
        return;
      }
      ++direct;
    } else if (from.posted - from.ended == MessageEnd::kSlots) {
      return;
    } else if (kind >= 198) {
      Send s(number, from.node.sge(12u << 20, 64),
             kind == 198 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ);
      ASSERT_EQ(s.to(to.node.address(12u << 20), to.node.mr->rkey).post(from.qp), 0);
      ++from.posted;
      ++serial;
      completing.push_back(number);
      return;
    } else {
      ASSERT_EQ(
          from.post(number, kind == 197 ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND,
                    kind < 192 && bytes_of(number) <= 256 ? IBV_SEND_SIGNALED | IBV_SEND_INLINE
                                                          : unsigned{IBV_SEND_SIGNALED}),
          0);
    }
    if (completes || kind >= 188) completing.push_back(wr_id);
    ++serial;
    ++packets;
    sent.push_back(number);
    by_work_request += kind >= 188 ? 1 : 0;
    wraps += from.out().data_next < before ? 1 : 0;
  }
};

class SoftverbsDirectMessageOrder : public MessagePair {
 protected:
  void exchange(std::uint64_t seed, std::uint32_t budget_of_b) {
    constexpr std::uint32_t kMessages = 6'000;
    Sender left{a_, b_, spinwire::base::Random(seed)}, right{b_, a_, spinwire::base::Random(~seed)};
    spinwire::base::Random random(seed + 1);
    const auto step = [&] {
      for (Sender* s : {&left, &right}) {
        if (s->sent.size() >= kMessages) continue;
        for (std::uint64_t n = random.below(random.below(9) == 0 ? 90 : 6); n != 0; --n) s->act();
        if (random.below(3) != 0) s->from.publish();
      }
      for (MessageEnd* end : {&a_, &b_}) {
        if (random.below(3) == 0) continue;
        end->poll(1 + static_cast<int>(random.below(32)));
        if (random.below(3) != 0) end->release(end == &b_ ? budget_of_b : MessageEnd::kBudget);
      }
    };
    ASSERT_TRUE(until(step, [&] {
      return HasFatalFailure() || (left.sent.size() >= kMessages && right.sent.size() >= kMessages);
    }));
    a_.publish();
    b_.publish();
    for (int i = 0; i < 20; ++i) settle();
    EXPECT_EQ(b_.order, left.sent);
    EXPECT_EQ(a_.order, right.sent);
    for (const Sender* s : {&left, &right}) {
      Numbers completed;
      for (const ibv_wc& wc : s->from.sends) {
        ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
        completed.push_back(wc.wr_id);
      }
      EXPECT_EQ(completed, s->completing);
      EXPECT_EQ(s->from.internals().next_psn, sv::psn_add(s->psn, s->packets));
      EXPECT_EQ(static_cast<std::uint32_t>(s->to.internals().expected >> 24),
                s->from.internals().next_psn);
      EXPECT_GT(s->direct, 300u);
      EXPECT_GT(s->by_work_request, 100u);
      EXPECT_GT(s->refused, 100u);
      EXPECT_GT(s->wraps, 2u);
      EXPECT_GT(s->from.out().tail, 20 * sv::kLaneLines);
      EXPECT_EQ(s->from.take_lost(), 0u);
    }
  }
};

TEST_F(SoftverbsDirectMessageOrder, IsThatOfSendingAmongWorkRequestsBothWays) {
  exchange(1, MessageEnd::kBudget);
  EXPECT_GT(b_.in_place, 3000u);
}
TEST_F(SoftverbsDirectMessageOrder, HoldsWhereTheBudgetOftenRunsOut) {
  exchange(2, 3);
  EXPECT_GT(b_.in_place, 100u);
  EXPECT_GT(b_.by_receives, 100u);
}
TEST_F(SoftverbsDirectMessageOrder, HoldsForAReceiverThatDoesNotReadInPlace) {
  b_.internals().in_place = false;
  exchange(3, 0);
  EXPECT_EQ(b_.in_place, 0u);
}

TEST(ThreadsSoftverbsDirectMessage, TwoContextsExchangeThem) {
  constexpr std::uint32_t kMessages = 20'000;
  std::uint64_t now = 1'000'000'000;
  MessageEnd a(&now), b(&now);
  connect(a.node, a.qp, b.node, b.qp);
  const auto run = [](MessageEnd& end, std::uint64_t seed) {
    spinwire::base::Random random(seed);
    Numbers checked;
    std::uint32_t sent = 0, seen = 0;
    end.read_in_place();
    const auto step = [&] {
      for (std::uint64_t n = random.below(8); n != 0 && sent < kMessages; --n) {
        const std::uint64_t most = random.below(16) == 0 ? kLongMessage : 100;
        const std::uint64_t number =
            number_of(sent, 8 + static_cast<std::uint32_t>(random.below(most - 7)));
        if (!end.send(number)) break;
        ++sent;
      }
      end.publish();
      end.step();
      for (const std::uint64_t number : end.taken())
        ASSERT_EQ(static_cast<std::uint32_t>(number), seen++);
    };
    EXPECT_TRUE(until(step, [&] {
      return testing::Test::HasFatalFailure() || (sent == kMessages && seen == kMessages);
    }));
  };
  std::thread other([&] { run(b, 2); });
  run(a, 1);
  other.join();
  EXPECT_EQ(a.by_receives + b.by_receives, 0u);
}

}  // namespace softverbs_test::direct_message_order
