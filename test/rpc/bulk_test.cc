// Calls that are longer than a datagram: in both directions, mixed with short ones, refused,
// cancelled and late.
#include "rpc/bulk_ends.h"

namespace rpc_bulk_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

TEST(RpcBulk, RequestsOfAnyLengthArriveWhole) {
  BulkCalls t;
  const std::size_t datagram = t.session.longest();
  const std::size_t eager = t.client.engine.config().connections.eager_bytes;
  EXPECT_EQ(t.session.longest_bulk(), t.client.engine.config().connections.message_bytes);
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, datagram - 1, datagram, datagram + 1, eager - 1, eager,
        eager + 1, std::size_t{128} << 10, std::size_t{1} << 20, t.session.longest_bulk()}) {
    const Bytes bytes = filled(size, static_cast<std::uint32_t>(size));
    const Ended e = t.call(kFold, bytes);
    EXPECT_EQ(e.status, Status::ok) << size;
    EXPECT_EQ(e.bytes, fold_of(bytes)) << size;
  }
  const RpcStats s = t.client.engine.rpc_stats();
  EXPECT_EQ(s.calls, 11u);
  EXPECT_EQ(s.replies, 11u);
  EXPECT_EQ(s.bulk_calls, 7u);
  t.finish_bulk();
}

TEST(RpcBulk, RepliesOfAnyLengthAreWrittenWhereTheyAreWanted) {
  BulkCalls t;
  const auto datagram = static_cast<std::uint32_t>(t.session.longest());
  for (const std::uint32_t size : {0u, 1u, 49u, datagram, datagram + 1, 4096u - 32u,
                                   4096u, 4097u, 1u << 20, 4u << 20}) {
    t.expect_into(kMake, number(size), filled(size, size));
  }
  t.finish_bulk();
}

TEST(RpcBulk, LongBothWays) {
  BulkCalls t;
  for (const std::size_t size : {49u, 4033u, 70000u, 1u << 20}) {
    const Bytes bytes = filled(size, 7);
    t.expect_into(kBack, bytes, bytes, 0);
  }
  t.finish_bulk();
}

}  // namespace
}  // namespace rpc_bulk_test
