// Where requests and replies lie, and the buffers that they are sent from.
#include "rpc/rpc_ends.h"

namespace rpc_call_buffers_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

TEST(RpcCallBuffers, RequestsAndRepliesThatAreKeptLieOnACacheline) {
  Calls t;
  std::vector<std::uintptr_t> places;
  const auto place = [](std::span<const std::byte> bytes) {
    return reinterpret_cast<std::uintptr_t>(bytes.data());
  };
  ASSERT_TRUE(t.server.engine.serve(9, [&](Request& r) {
    places.push_back(place(r.keep().bytes()));
    (void)r.reply(r.bytes());
  }));
  bool ended = false;
  const auto done = [&](Reply& r) {
    places.push_back(place(r.keep().bytes()));
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

/// Calls of more bytes than a slot has, which the library copies at both ends.
class RpcCopies : public testing::Test {
 protected:
  void SetUp() override {
    if (over_connections()) GTEST_SKIP() << "datagrams";
  }
  /// Makes a call; `in_reply` runs in its callback.
  static void call(Calls& t, std::size_t size, std::uint32_t seed,
                   const std::function<void()>& in_reply = {}) {
    const Bytes request = filled(size, seed);
    bool ended = false;
    const auto done = [&](Reply& r) {
      EXPECT_EQ(r.status(), Status::ok) << to_string(r.status());
      EXPECT_EQ(bytes_of(r.bytes()), request);
      if (in_reply) in_reply();
      ended = true;
    };
    ASSERT_EQ(t.session.call(kEcho, std::span<const std::byte>(request), done), Status::ok);
    ASSERT_TRUE(t.until([&] { return ended; }));
  }
  static std::uint64_t blocks_used(const Node& node) {
    return node.engine.memory_stats(Pool::send).blocks_used;
  }
};

TEST_F(RpcCopies, OfEveryLengthFollowEachOther) {
  Calls t;
  std::uint32_t seed = 0;
  for (const std::size_t size : {49, 3000, 50, 700, 64, 3000, 49, 48, 0, 300}) {
    for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(call(t, size, ++seed)) << size;
  }
  t.finish();
}

TEST_F(RpcCopies, AnIdleEngineKeepsNoMemoryForThem) {
  Calls t;
  ASSERT_NO_FATAL_FAILURE(call(t, 300, 1));
  EXPECT_TRUE(t.until([&] { return blocks_used(t.client) == 0; }));
  EXPECT_TRUE(t.session.ready());
  t.finish();
}

TEST_F(RpcCopies, TheirMemoryIsForAllWhenTheSendPoolIsEmpty) {
  std::uint64_t now = 1'000'000'000;
  Config c = rpc_config();
  c.memory.send_bytes = 2u << 20;  // blocks of one size at a time
  Calls t(c, &now);
  Buffer other;
  {
    // An attempt in vain just before must not matter.
    const Buffer all = t.client.buffer(64);
    EXPECT_FALSE(t.client.engine.allocate(3000));
  }
  const auto allocate = [&] {
    EXPECT_EQ(blocks_used(t.client), 1u) << "no copy's memory was kept: this tests nothing";
    other = t.client.engine.allocate(3000);
  };
  ASSERT_NO_FATAL_FAILURE(call(t, 300, 1, allocate));
  EXPECT_TRUE(other) << to_string(t.client.engine.allocate_status());
  other = Buffer();
  t.finish();
}

}  // namespace
}  // namespace rpc_call_buffers_test
