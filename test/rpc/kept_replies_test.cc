// Only the requested bytes go on the wire: no earlier contents of their buffer.
#include "rpc/rpc_ends.h"

namespace rpc_kept_replies_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

/// More than the payload of any direct datagram.
constexpr std::size_t kBehind = 32;

TEST(RpcKeptReplies, NobodySeesWhereALongerPayloadLay) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "what lies behind a datagram";
  if (over_connections() || by_work_requests()) GTEST_SKIP() << "datagrams without work requests";
  Node server(rpc_config()), client(rpc_config());
  server.listen();
  Bytes asked, answered;
  ASSERT_TRUE(server.engine.serve(kEcho, [&](Request& r) {
    asked.assign(r.bytes().data(), r.bytes().data() + kBehind);
    EXPECT_EQ(r.reply(r.bytes()), Status::ok);
  }));
  SessionOptions options;
  options.window = 1;  // one slot for all
  Session s = client.engine.open_session(server.listener.address(), options).value();
  ASSERT_TRUE(engine_test::until({&client, &server}, [&] { return s.ready(); }));
  for (const std::size_t size : {std::size_t{0}, 4 * kSlotPayloadBytes, std::size_t{0}}) {
    const Buffer request = client.buffer(4 * kSlotPayloadBytes);
    bool over = false;
    ASSERT_EQ(s.call(kEcho, request.slice(0, size),
                     [&](Reply& r) {
                       EXPECT_EQ(r.status(), Status::ok);
                       answered.assign(r.bytes().data(), r.bytes().data() + kBehind);
                       over = true;
                     }),
              Status::ok);
    ASSERT_TRUE(engine_test::until({&client, &server}, [&] { return over; }));
  }
  EXPECT_EQ(asked, Bytes(kBehind));
  EXPECT_EQ(Bytes(answered.begin() + 8, answered.end()), Bytes(kBehind - 8));  // after a tick
  EXPECT_EQ(s.close(), Status::ok);
}

}  // namespace
}  // namespace rpc_kept_replies_test
