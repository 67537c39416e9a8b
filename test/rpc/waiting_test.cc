// Calls that wait for their turn: the room for them comes and goes.
#include <gtest/gtest.h>

#include <vector>

#include "rpc/ends.h"

namespace rpc_waiting_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

TEST(RpcWaiting, TakesItsRoomFromTheSendPoolWhileItIsNeeded) {
  std::uint64_t now = 1'000'000'000;
  Calls t(rpc_config(), &now);
  (void)t.call(kEcho, {});  // the server now has receives for the whole window
  const auto used = [&] { return t.client.engine.memory_stats(Pool::send).blocks_used; };
  EXPECT_EQ(used(), 0u);
  for (std::uint32_t i = 0; i < t.client.engine.config().rpc.window; ++i)
    ASSERT_EQ(t.begin(kLater, filled(4, i)), Status::ok);
  EXPECT_EQ(used(), 0u);
  // None is left: a call that cannot go out at once is refused.
  std::vector<Buffer> all;
  for (std::size_t size = 512u << 10; size >= 256; size /= 2) {
    for (Buffer b; (b = t.client.engine.allocate(size));) all.push_back(std::move(b));
  }
  EXPECT_EQ(t.begin(kEcho, filled(4, 99)), Status::no_buffer);
  all.clear();
  ASSERT_EQ(t.begin(kEcho, filled(4, 99)), Status::ok);
  EXPECT_EQ(used(), 1u);
  ASSERT_TRUE(t.until([&] {
    for (const auto& each : t.later) (void)each.call.reply(each.bytes);
    return t.all_ended();
  }));
  EXPECT_EQ(t.ended.back().bytes, filled(4, 99));
  EXPECT_EQ(used(), 0u);  // with no other reason than that none waits
  EXPECT_TRUE(t.session.ready());
  t.finish();
}

}  // namespace
}  // namespace rpc_waiting_test
