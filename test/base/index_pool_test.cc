#include "base/index_pool.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

namespace index_pool_test {
namespace {

using spinwire::base::IndexPool;

struct Thing {
  int value = 7;
};

TEST(IndexPool, HandsOutEverySlotOnceThenNone) {
  IndexPool<Thing> pool(3);
  EXPECT_EQ(pool.capacity(), 3u);
  std::set<std::uint32_t> seen;
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(pool.full());
    const std::uint32_t index = pool.acquire();
    EXPECT_LT(index, 3u);
    EXPECT_TRUE(seen.insert(index).second);
  }
  EXPECT_TRUE(pool.full());
  EXPECT_EQ(pool.size(), 3u);
  EXPECT_EQ(pool.acquire(), IndexPool<Thing>::kNone);
  EXPECT_EQ(pool.size(), 3u);
  pool.release(1);
  EXPECT_EQ(pool.size(), 2u);
  EXPECT_EQ(pool.acquire(), 1u);
}

TEST(IndexPool, OfNoSlotsIsFullAndFindsNothing) {
  IndexPool<Thing> pool(0);
  EXPECT_TRUE(pool.full());
  EXPECT_EQ(pool.acquire(), IndexPool<Thing>::kNone);
  EXPECT_EQ(pool.find(0, 1), nullptr);
}

TEST(IndexPool, ReusesTheMostRecentlyReleasedFirst) {
  IndexPool<Thing> pool(8);
  for (int i = 0; i < 8; ++i) (void)pool.acquire();
  for (const std::uint32_t i : {2u, 7u, 4u}) pool.release(i);
  EXPECT_EQ(pool.acquire(), 4u);
  EXPECT_EQ(pool.acquire(), 7u);
  EXPECT_EQ(pool.acquire(), 2u);
}

TEST(IndexPool, FindsOnlyTheLivingGeneration) {
  IndexPool<Thing> pool(2);
  const std::uint32_t index = pool.acquire();
  const std::uint32_t generation = pool.generation(index);
  EXPECT_NE(generation, 0u);
  EXPECT_EQ(pool.find(index, generation), &pool.at(index));
  EXPECT_EQ(pool.find(index, 0), nullptr);
  EXPECT_EQ(pool.find(index, generation + 1), nullptr);

  pool.release(index);
  EXPECT_EQ(pool.find(index, generation), nullptr);
  // The name of the next use is known, but invalid before the slot is allocated.
  EXPECT_NE(pool.generation(index), generation);
  EXPECT_EQ(pool.find(index, pool.generation(index)), nullptr);

  ASSERT_EQ(pool.acquire(), index);
  EXPECT_EQ(pool.find(index, generation), nullptr);
  EXPECT_NE(pool.find(index, pool.generation(index)), nullptr);
}

TEST(IndexPool, FindTakesAnyIndex) {
  IndexPool<Thing> pool(2);
  EXPECT_EQ(pool.find(2, 1), nullptr);
  EXPECT_EQ(pool.find(IndexPool<Thing>::kNone, 1), nullptr);
  EXPECT_FALSE(pool.in_use(2));
  const IndexPool<Thing>& read_only = pool;
  EXPECT_EQ(read_only.find(99, 1), nullptr);
}

TEST(IndexPool, KeepsObjectsAcrossUses) {
  IndexPool<Thing> pool(1);
  const std::uint32_t index = pool.acquire();
  EXPECT_EQ(pool.at(index).value, 7);
  pool.at(index).value = 9;
  EXPECT_EQ(pool.index_of(pool.at(index)), index);
  pool.release(index);
  ASSERT_EQ(pool.acquire(), index);
  EXPECT_EQ(pool.at(index).value, 9);
}

TEST(IndexPool, HoldsObjectsThatCannotMoveAndKeepsTheirAlignment) {
  struct alignas(128) Pinned {
    Pinned() = default;
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;
    std::unique_ptr<int> mine = std::make_unique<int>(3);
  };
  IndexPool<Pinned> pool(5);
  for (std::uint32_t i = 0; i < 5; ++i) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(&pool.at(i)) % 128, 0u);
    EXPECT_EQ(*pool.at(i).mine, 3);
  }
}

TEST(IndexPool, AgreesWithANaiveModel) {
  IndexPool<Thing> pool(50);
  std::map<std::uint32_t, std::uint32_t> living;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> dead;
  std::mt19937 random(1);
  for (int i = 0; i < 20'000; ++i) {
    if (random() % 2 == 0) {
      const std::uint32_t index = pool.acquire();
      if (living.size() == 50) {
        ASSERT_EQ(index, IndexPool<Thing>::kNone);
        continue;
      }
      ASSERT_TRUE(living.emplace(index, pool.generation(index)).second);
    } else if (!living.empty()) {
      auto victim = std::next(living.begin(), static_cast<int>(random() % living.size()));
      pool.release(victim->first);
      dead.emplace_back(*victim);
      living.erase(victim);
    }
    ASSERT_EQ(pool.size(), living.size());
  }
  for (const auto& [index, generation] : living) EXPECT_NE(pool.find(index, generation), nullptr);
  for (const auto& [index, generation] : dead) ASSERT_EQ(pool.find(index, generation), nullptr);
}

TEST(IndexPoolDeathTest, TrapsWhenASlotIsReleasedTwice) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  IndexPool<Thing> pool(2);
  const std::uint32_t index = pool.acquire();
  pool.release(index);
  EXPECT_DEATH(pool.release(index), "");
  EXPECT_DEATH(pool.release(2), "");
}

}  // namespace
}  // namespace index_pool_test
