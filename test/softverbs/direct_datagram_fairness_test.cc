// Direct datagrams: more lanes have some than fit into a list of batches.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "softverbs/direct_datagram_link.h"

namespace softverbs_test::direct {

class SoftverbsDirectFairness : public testing::Test {
 protected:
  static constexpr std::size_t kPeers = 9;
  static constexpr std::uint32_t kMost = sv::DirectBatches::kMost;
  std::uint64_t now_ = 1'000'000'000;
  DirectEnd hub_{&now_};
  std::vector<std::unique_ptr<ThirdEnd>> others_;

  SoftverbsDirectFairness() {
    for (std::size_t i = 0; i < kPeers; ++i)
      others_.push_back(std::make_unique<ThirdEnd>(&now_, hub_));
  }
  void send(std::size_t i, std::uint64_t number) {
    ASSERT_TRUE(others_[i]->send(others_[i]->to_other, hub_.qp, number));
    others_[i]->publish();
  }
  void send_long(std::size_t i, std::uint64_t number) {
    ASSERT_EQ(others_[i]->post(others_[i]->to_other, hub_.qp, number), 0);
  }
};

TEST_F(SoftverbsDirectFairness, TheFifthLaneWaitsAndIsTheFirstThen) {
  for (std::size_t i = 0; i < kPeers; ++i) ASSERT_NO_FATAL_FAILURE(send(i, i));
  Numbers all;
  std::size_t left = kPeers;
  while (left != 0) {
    const std::size_t expected = std::min<std::size_t>(kMost, left);
    EXPECT_EQ(hub_.poll(), Numbers{});
    ASSERT_EQ(hub_.batches.count, expected);
    // While the batches are held, others wait, and no needless completion arrives.
    for (int i = 0; i < 20; ++i) EXPECT_EQ(hub_.poll(), Numbers{});
    ASSERT_EQ(hub_.batches.count, expected);
    for (const std::uint64_t number : hub_.take_batches()) all.push_back(number);
    left -= expected;
  }
  // Each in turn, in any order of the first ones.
  ASSERT_EQ(all.size(), kPeers);
  for (std::size_t i = 1; i < kPeers; ++i) EXPECT_EQ(all[i], (all[i - 1] + 1) % kPeers);
  EXPECT_EQ(hub_.steps(), Numbers{});
}

TEST_F(SoftverbsDirectFairness, ALaneThatAlwaysHasMoreStarvesNobody) {
  std::vector<std::uint64_t> turns(kPeers, 0), sent(kPeers, 0);
  for (int round = 0; round < 450; ++round) {
    for (std::size_t i = 0; i < kPeers; ++i) {
      for (; sent[i] < turns[i] + 3; ++sent[i]) ASSERT_NO_FATAL_FAILURE(send(i, 100 * i));
    }
    EXPECT_EQ(hub_.poll(), Numbers{});
    ASSERT_EQ(hub_.batches.count, kMost);
    for (std::uint32_t i = 0; i < kMost; ++i) {
      const Numbers some = read(*hub_.batches.batches[i], hub_.batches.longest);
      ASSERT_FALSE(some.empty());
      ++turns[some[0] / 100];
      DirectEnd::give_back(*hub_.batches.batches[i], 1);
    }
    hub_.batches.count = 0;
  }
  for (const std::uint64_t each : turns) EXPECT_EQ(each, 450 * kMost / kPeers);
}

TEST_F(SoftverbsDirectFairness, ALaneThatWaitsHasGivenWhatTakesReceives) {
  // All but the first lane of the turn begin with a long one.
  const std::uint32_t turn = hub_.node.internals().turn % kPeers;
  for (std::size_t i = 0; i < kPeers; ++i) {
    if (i != turn) {
      ASSERT_NO_FATAL_FAILURE(send_long(i, kLong + i));
    }
    ASSERT_NO_FATAL_FAILURE(send(i, i));
  }
  EXPECT_EQ(hub_.poll().size(), kMost);  // the waiting one as well
  EXPECT_EQ(hub_.batches.count, kMost);
  EXPECT_EQ(hub_.take_batches().size(), kMost);
  EXPECT_EQ(hub_.poll().size(), kMost);
  EXPECT_EQ(hub_.batches.count, kMost);
  EXPECT_EQ(hub_.take_batches().size(), kMost);
  EXPECT_EQ(hub_.steps().size(), 1u);
}

}  // namespace softverbs_test::direct
