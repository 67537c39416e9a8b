// Names of leases: a stale one must not fit a later lease.
#include <gtest/gtest.h>

#include <cstdint>
#include <unordered_set>

#include "agent/lease_table.h"
#include "engine/harness.h"

namespace lease_names_test {
namespace {

using spinwire::agent::find_named;
using spinwire::agent::name_of;
using Pool = spinwire::base::IndexPool<int, spinwire::base::Reuse::oldest>;

TEST(LeaseNames, AreNewForMillionsOfLeasesOneAtATime) {
  for (const std::uint32_t capacity : {1u, 3u, 4u, 1024u, 32768u}) {
    Pool pool(capacity);
    std::unordered_set<std::uint32_t> seen;
    for (std::uint32_t i = 0; i < engine_test::amount(1'000'000); ++i) {
      const std::uint32_t index = pool.acquire();
      const std::uint32_t name = name_of(pool, index);
      ASSERT_NE(name, 0u);
      ASSERT_TRUE(seen.insert(name).second) << capacity << " records, lease " << i;
      ASSERT_EQ(find_named(pool, name), &pool.at(index));
      pool.release(index);
      ASSERT_EQ(find_named(pool, name), nullptr);
    }
  }
}

TEST(LeaseNames, OfNothingAreNotFound) {
  Pool pool(5);
  (void)pool.acquire();
  for (const std::uint32_t name : {0u, 6u, 7u, 8u, ~0u, 1u << 31})
    EXPECT_EQ(find_named(pool, name), nullptr) << name;
}

}  // namespace
}  // namespace lease_names_test
