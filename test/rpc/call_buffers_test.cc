// Where requests and replies lie, and the buffers that they are sent from.
#include "rpc/rpc_ends.h"

namespace rpc_call_buffers_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

TEST(RpcCallBuffers, RequestsAndRepliesLieOnACachelineWhereTheyArrived) {
  Calls t;
  std::vector<std::uintptr_t> places;
  const auto place = [](std::span<const std::byte> bytes) {
    return reinterpret_cast<std::uintptr_t>(bytes.data());
  };
  ASSERT_TRUE(t.server.engine.serve(9, [&](Request& r) {
    places.push_back(place(r.bytes()));
    (void)r.reply(r.bytes());
  }));
  bool ended = false;
  const auto done = [&](Reply& r) {
    places.push_back(place(r.bytes()));
    ended = true;
  };
  const Bytes bytes = filled(40, 1);
  ASSERT_EQ(t.session.call(9, std::span<const std::byte>(bytes), done), Status::ok);
  ASSERT_TRUE(t.until([&] { return ended; }));
  ASSERT_EQ(places.size(), 2u);
  for (const std::uintptr_t at : places) EXPECT_EQ(at % 64, 0u);
  t.finish();
}

TEST(RpcCallBuffers, ABufferTellsWhetherItMayBeWrittenAgain) {
  Calls t(rpc_config(), nullptr, 1);
  Buffer answer = t.server.buffer(1000);
  const auto give = [&answer](Request& r) { EXPECT_EQ(r.reply(answer.slice()), Status::ok); };
  ASSERT_TRUE(t.server.engine.serve(9, give));
  EXPECT_FALSE(Buffer().unique());
  EXPECT_TRUE(answer.unique());
  EXPECT_EQ(t.call(9, {}).bytes.size(), 1000u);
  EXPECT_EQ(answer.unique(), over_connections());  // otherwise it may be retransmitted
  (void)t.call(kEcho, {});                         // now it may not
  ASSERT_TRUE(t.until([&] { return answer.unique(); }));
  // A long reply, until it is written.
  Buffer into = t.client.engine.allocate(answer.size(), spinwire::Pool::lease);
  CallOptions options;
  options.reply_into = into.slice();
  EXPECT_EQ(t.call(9, {}, options).bytes.size(), 1000u);
  ASSERT_TRUE(t.until([&] { return answer.unique(); }));
  EXPECT_FALSE(into.unique());
  options.reply_into = {};
  EXPECT_TRUE(into.unique());
  into.reset();
  answer.reset();
  t.finish();
}

TEST(RpcCallBuffers, BuffersAreMadeLongAndSentAsLongAsTheyAreNow) {
  Config c = rpc_config();
  c.memory.send_bytes = 64u << 20;
  c.memory.rendezvous_bytes = 64u << 20;
  c.connections.max_message_bytes = 16u << 20;
  Calls t(c);
  constexpr std::size_t kMost = 16u << 20;
  Buffer b = t.client.buffer(kMost);
  EXPECT_GE(b.capacity(), kMost);
  std::vector<std::size_t> seen;
  ASSERT_TRUE(t.server.engine.serve(9, [&seen](Request& r) {
    seen.push_back(r.bytes().size());
    (void)r.reply(r.bytes().last(1));
  }));
  int ended = 0;
  for (const std::size_t size : {kMost, kMost / 2 + 1, std::size_t{5000}, std::size_t{3}}) {
    ASSERT_TRUE(b.resize(size));
    b.data()[size - 1] = std::byte{42};
    const auto done = [&ended](Reply& r) {
      EXPECT_EQ(r.status(), Status::ok) << to_string(r.status());
      ended += !r.bytes().empty() && r.bytes()[0] == std::byte{42} ? 1 : 0;
    };
    const int before = ended;
    ASSERT_EQ(t.session.call(9, b.slice(), done), Status::ok);
    ASSERT_TRUE(t.until([&] { return ended == before + 1; })) << size;
  }
  EXPECT_EQ(seen, (std::vector<std::size_t>{kMost, kMost / 2 + 1, 5000, 3}));
  b = Buffer();
  t.finish();
}

}  // namespace
}  // namespace rpc_call_buffers_test
