#include "base/key_map.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

namespace key_map_test {
namespace {

using spinwire::base::KeyMap;

constexpr std::uint32_t kNone = KeyMap::kNone;

TEST(KeyMap, FindsTheNewestRecordOfAKey) {
  KeyMap map(4);
  EXPECT_EQ(map.find(7), kNone);
  map.insert(7, 0);
  map.insert(7, 3);
  map.insert(8, 1);
  EXPECT_EQ(map.find(7), 3u);
  EXPECT_EQ(map.find(8), 1u);
  EXPECT_EQ(map.key(1), 8u);
  map.erase(3);
  EXPECT_EQ(map.find(7), 0u);
  map.erase(0);
  EXPECT_EQ(map.find(7), kNone);
  map.clear();
  EXPECT_EQ(map.find(8), kNone);
}

TEST(KeyMap, AnAuditSeesWhetherARecordHoldsItsKey) {
  KeyMap map(3);
  map.insert(5, 0);
  map.insert(5, 1);
  EXPECT_TRUE(map.holds(5, 0));
  EXPECT_TRUE(map.holds(5, 1));
  EXPECT_FALSE(map.holds(5, 2));
  EXPECT_FALSE(map.holds(6, 0));
}

TEST(KeyMap, WorksWithoutRecords) {
  const KeyMap map(0);
  EXPECT_EQ(map.find(0), kNone);
  EXPECT_FALSE(map.holds(0, 0));
}

// Few keys, so that records share keys and chains.
TEST(KeyMap, AgreesWithAListUnderRandomUse) {
  std::mt19937 random(11);
  constexpr std::uint32_t kRecords = 64;
  KeyMap map(kRecords);
  struct Held {
    std::uint32_t key;
    std::uint32_t record;
  };
  std::vector<Held> model;  // the newest last
  for (int step = 0; step < 20'000; ++step) {
    const auto record = static_cast<std::uint32_t>(random() % kRecords);
    if (std::erase_if(model, [&](const Held& each) { return each.record == record; }) != 0) {
      map.erase(record);
    } else {
      const auto key = static_cast<std::uint32_t>(random() % 24);
      map.insert(key, record);
      model.push_back({key, record});
    }
    const auto sought = static_cast<std::uint32_t>(random() % 24);
    std::uint32_t newest = kNone;
    for (const Held& each : model) {
      if (each.key == sought) newest = each.record;
      ASSERT_TRUE(map.holds(each.key, each.record));
    }
    ASSERT_EQ(map.find(sought), newest);
  }
}

}  // namespace
}  // namespace key_map_test
