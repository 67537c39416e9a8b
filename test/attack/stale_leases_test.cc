// A holder keeps what names a lease that has ended, and uses it while other leases come and go. The
// owner does the same with the lease's name.
#include <gtest/gtest.h>

#include "engine/lease_ends.h"

namespace stale_leases_test {
namespace {

using namespace leases;  // NOLINT: a test's helpers

TEST(AttackByAStaleLease, NamesNoneOfSeventyThousandLater) {
  Leases t(By::window);
  RemoteMemory first = t.request(64);
  ASSERT_TRUE(first);
  const RemoteRegion stale = first.region();
  ASSERT_EQ(t.write(stale, 1), Status::ok);
  first.release();
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  const LeaseId ended = t.returned[0].lease;
  Buffer bytes = t.client.filled(64, 2);
  constexpr std::uint32_t kMore = 70'000;
  for (std::uint32_t i = 0; i < kMore; ++i) {
    t.returned.clear();
    RemoteMemory now = t.request(64);
    ASSERT_TRUE(now) << i;
    ASSERT_NE(t.ends.client.write(bytes.slice(), stale), Status::ok) << "lease " << i;
    ASSERT_NE(t.ends.server.recall(ended), Status::ok) << "lease " << i;
    now.release();
    ASSERT_TRUE(t.until([&] { return !t.returned.empty(); }));
    ASSERT_NE(t.returned[0].lease, ended) << "lease " << i;
    ASSERT_EQ(t.returned[0].how, ReturnedBy::release) << "lease " << i;
    ASSERT_TRUE(t.returned[0].bytes == zeroes(64)) << "lease " << i;
  }
  t.finish(bytes);
}

}  // namespace
}  // namespace stale_leases_test
