// Names of leases: a stale name must not match a later lease.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "agent/lease_table.h"
#include "engine/harness.h"

namespace lease_names_test {
namespace {

using Records = spinwire::agent::LeaseRecords<int>;

/// A set of names. forget() removes one name after the other, because clearing all 2^32 bits takes
/// longer than a test.
class SeenNames {
 public:
  /// Adds a name. Returns whether the name is new.
  bool add(std::uint32_t name) {
    if (seen_[name]) return false;
    seen_[name] = true;
    names_.push_back(name);
    return true;
  }
  void forget() {
    for (const std::uint32_t name : names_) seen_[name] = false;
    names_.clear();
  }

 private:
  std::vector<bool> seen_ = std::vector<bool>(std::size_t{1} << 32);
  std::vector<std::uint32_t> names_;
};

/// Uses a record `count` times, one use after the other. No name comes twice.
void use_again(Records& records, std::uint32_t count, SeenNames& seen) {
  seen.forget();
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t index = records.acquire();
    ASSERT_NE(index, Records::kNone);
    const std::uint32_t name = records.name(index);
    ASSERT_NE(name, 0u);
    ASSERT_NE(name, ~0u);
    ASSERT_TRUE(seen.add(name)) << "lease " << i;
    ASSERT_EQ(records.find(name), &records.at(index));
    records.release(index);
    ASSERT_EQ(records.find(name), nullptr);
  }
}

TEST(LeaseNames, AreNewForMillionsOfLeasesOneAtATime) {
  SeenNames seen;
  for (const std::uint32_t capacity : {1u, 3u, 4u, 1024u, 32768u}) {
    Records records(capacity);
    use_again(records, engine_test::amount(1'000'000), seen);
  }
}

TEST(LeaseNames, AreNewForMillionsOfLeasesOfOneRecordWhileAllOthersAreHeld) {
  SeenNames seen;
  for (const std::uint32_t capacity : {2u, 1024u, 32768u, 65536u}) {
    Records records(capacity);
    std::vector<std::uint32_t> held;
    while (records.size() + 1 < capacity) held.push_back(records.acquire());
    use_again(records, engine_test::amount(1'000'000), seen);
    for (const std::uint32_t index : held)
      ASSERT_EQ(records.find(records.name(index)), &records.at(index));
  }
}

TEST(LeaseNames, PassOverThoseInUseWhenTheyBeginAgain) {
  Records records(4, 1);
  const std::uint32_t kept = records.acquire();
  Records late(4, ~0u - 1);
  EXPECT_EQ(records.name(kept), 1u);
  std::vector<std::uint32_t> names;
  for (int i = 0; i < 4; ++i) names.push_back(late.name(late.acquire()));
  EXPECT_EQ(names, (std::vector<std::uint32_t>{~0u - 1, 1, 2, 3}));
  EXPECT_EQ(late.acquire(), Records::kNone);
}

TEST(LeaseNames, OfNothingAreNotFound) {
  Records records(5);
  (void)records.acquire();
  for (const std::uint32_t name : {0u, 2u, 7u, 8u, ~0u, 1u << 31})
    EXPECT_EQ(records.find(name), nullptr) << name;
}

TEST(LeaseNames, OfRecordsInOneBucketAreToldApart) {
  Records records(4);
  std::vector<std::uint32_t> held;
  // Of 8 names in turn, one is kept: they all lie in one bucket.
  for (int i = 0; i < 3; ++i) {
    held.push_back(records.acquire());
    for (int other = 0; other < 7; ++other) records.release(records.acquire());
  }
  ASSERT_EQ((records.name(held[0]) ^ records.name(held[2])) % 8, 0u);
  records.release(held[1]);
  EXPECT_EQ(records.find(records.name(held[0])), &records.at(held[0]));
  EXPECT_EQ(records.find(records.name(held[0]) + 8), nullptr);
  EXPECT_EQ(records.find(records.name(held[2])), &records.at(held[2]));
}

}  // namespace
}  // namespace lease_names_test
