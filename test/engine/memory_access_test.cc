// Shared and exclusive access to memory, checked against operations under way.
#include "spinwire/memory_access.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <utility>

#include "engine/harness.h"
#include "engine/raw_ends.h"

namespace memory_access_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::ExclusiveAccess;
using spinwire::SharedAccess;

struct Given {
  bool shared;
  bool exclusive;
  friend bool operator==(const Given&, const Given&) = default;
};
/// What is given now, and dropped at once.
Given given(const Node& node, const BufferSlice& memory) {
  const bool shared = static_cast<bool>(SharedAccess::try_open(node.engine, memory));
  return {shared, static_cast<bool>(ExclusiveAccess::try_open(node.engine, memory))};
}
constexpr Given kBoth{true, true};
constexpr Given kReading{true, false};
constexpr Given kNothing{false, false};

TEST(MemoryAccess, ReadersShareAndAWriterIsAlone) {
  Node node;
  const Buffer b = node.filled(4096, 1);
  {
    const auto one = SharedAccess::try_open(node.engine, b);
    ASSERT_TRUE(one);
    EXPECT_EQ(one.bytes().data(), b.data());
    EXPECT_EQ(given(node, b), kReading);
    EXPECT_EQ(given(node, b.slice(4095, 1)), kReading);
  }
  {
    auto first = ExclusiveAccess::try_open(node.engine, b.slice(0, 2048));
    ASSERT_TRUE(first);
    first.bytes()[0] = std::byte{7};
    EXPECT_EQ(given(node, b.slice(2047, 8)), kNothing);
    EXPECT_EQ(given(node, b.slice(2048, 8)), kBoth) << "other bytes of the buffer are free";
    const ExclusiveAccess moved = std::move(first);
    EXPECT_FALSE(first);  // NOLINT(bugprone-use-after-move): it is empty
    EXPECT_EQ(given(node, b.slice(0, 8)), kNothing);
  }
  EXPECT_EQ(given(node, b), kBoth);
  EXPECT_FALSE(SharedAccess::try_open(node.engine, BufferSlice()));
  EXPECT_FALSE(ExclusiveAccess::try_open(Engine(), b));
}

TEST(MemoryAccess, SeesWhatOperationsDoWithTheBytes) {
  Pair p(without_direct_messages());
  Buffer theirs = p.server.filled(4096, 1);
  const auto region = p.server.engine.expose(theirs.slice(), Access::remote_all);
  ASSERT_TRUE(region);
  const Buffer b = p.client.filled(4096, 2);
  Connection c = p.ends.client;
  const auto all_done = [&] { return p.until([&] { return p.client.tally.idle(); }); };
  const auto deferred = [&](auto&& start) { ASSERT_EQ(p.client.tally.run(start), Status::ok); };
  deferred([&](auto d) { return c.send(b.slice(0, 64), d, Post::defer); });
  EXPECT_EQ(given(p.client, b.slice(32, 64)), kReading);
  EXPECT_EQ(given(p.client, b.slice(64, 64)), kBoth);
  deferred([&](auto d) { return c.write(b.slice(128, 64), *region, d, Post::defer); });
  EXPECT_EQ(given(p.client, b.slice(191, 1)), kReading);
  deferred([&](auto d) { return c.read(b.slice(256, 64), *region, d, Post::defer); });
  EXPECT_EQ(given(p.client, b.slice(319, 1)), kNothing);
  EXPECT_EQ(given(p.client, b.slice(320, 1)), kBoth);
  EXPECT_EQ(given(p.server, theirs), kBoth) << "peers are not looked at";
  ASSERT_TRUE(all_done());
  EXPECT_EQ(given(p.client, b), kBoth);
  EXPECT_EQ(p.server.engine.revoke(*region), Status::ok);
  theirs.reset();
  p.client.tally.expect_exact();
}

TEST(MemoryAccess, SeesWritesWithANoticeAndOperationsOfSeveralParts) {
  Pair p(without_direct_messages());
  Buffer theirs = p.server.filled(4096, 1);
  const auto region = p.server.engine.expose(theirs.slice(), Access::remote_all);
  ASSERT_TRUE(region);
  const Buffer b = p.client.filled(4096, 2);
  Connection c = p.ends.client;
  const auto deferred = [&](auto&& start) {  // each needs credit, which may have to come
    ASSERT_TRUE(p.until([&] { return p.client.tally.run(start) == Status::ok; }));
  };
  deferred([&](auto d) { return c.write_with_imm(b.slice(384, 64), *region, 5, d, Post::defer); });
  EXPECT_EQ(given(p.client, b.slice(447, 1)), kReading);
  EXPECT_EQ(given(p.client, b.slice(448, 1)), kBoth);
  const std::array<BufferSlice, 2> parts{b.slice(512, 64), b.slice(640, 64)};
  const auto expect_gathered = [&] {
    EXPECT_EQ(given(p.client, b.slice(512, 1)), kReading);
    EXPECT_EQ(given(p.client, b.slice(576, 64)), kBoth) << "between them";
    EXPECT_EQ(given(p.client, b.slice(703, 1)), kReading);
    EXPECT_EQ(given(p.client, b.slice(704, 1)), kBoth);
    ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
    EXPECT_EQ(given(p.client, b), kBoth);
  };
  deferred([&](auto d) { return c.send(parts, d, Post::defer); });
  expect_gathered();
  deferred([&](auto d) { return c.write(parts, *region, d, Post::defer); });
  expect_gathered();
  deferred([&](auto d) {
    return c.write_and_send(parts, *region, b.slice(0, 8).bytes(), d, Post::defer);
  });
  expect_gathered();
  EXPECT_EQ(p.server.engine.revoke(*region), Status::ok);
  theirs.reset();
  p.client.tally.expect_exact();
}

TEST(MemoryAccess, SeesReceivesOfRawConnections) {
  raw_test::RawPair t;
  Connection c = t.b;
  {
    const Buffer b = t.server.filled(256, 1);
    const std::array<BufferSlice, 2> parts{b.slice(0, 64), b.slice(128, 64)};
    ASSERT_EQ(c.post_receive(parts), Status::ok);
    EXPECT_EQ(given(t.server, b.slice(0, 1)), kNothing);
    EXPECT_EQ(given(t.server, b.slice(64, 64)), kBoth);
    EXPECT_EQ(given(t.server, b.slice(191, 1)), kNothing);
    (void)c.close();
    ASSERT_TRUE(t.until([&] { return t.server.engine.stats().connections == 0; }));
    EXPECT_EQ(given(t.server, b), kBoth);
  }
}

TEST(MemoryAccess, SeesLongMessagesUntilThePeerHasThem) {
  Config config = without_direct_messages();
  config.connections.max_message_bytes = 1u << 20;
  config.memory.rendezvous_bytes = 4u << 20;
  Pair p(config);
  const Buffer b = p.client.filled(100'000, 3);
  Connection c = p.ends.client;
  ASSERT_EQ(p.client.tally.run([&](auto d) { return c.send(b, d); }), Status::ok);
  EXPECT_EQ(given(p.client, b.slice(99'999, 1)), kReading);
  ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  EXPECT_EQ(given(p.client, b), kBoth);
}

TEST(MemoryAccessDeathTest, CheckedAccessStopsTheProgramWhereItIsWrong) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a forked child may not use the engine
  Pair p(without_direct_messages());
  Buffer b = p.client.filled(64, 1);
  Connection c = p.ends.client;
  EXPECT_DEATH(
      {
        ASSERT_EQ(c.send(b, {}, Post::defer), Status::ok);
        (void)ExclusiveAccess::open(p.client.engine, b, true);
      },
      "an operation is reading the bytes");
  EXPECT_DEATH(
      {
        const auto mine = ExclusiveAccess::open(p.client.engine, b, true);
        ASSERT_EQ(c.send(b, {}, Post::defer), Status::ok);
      },
      "an operation began to read the bytes meanwhile");
  b.reset();
  p.finish();
}

TEST(MemoryAccessDeathTest, CheckedSharedAccessStopsTheProgramWhereItIsWrong) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a forked child may not use the engine
  Pair p(without_direct_messages());
  Buffer theirs = p.server.filled(64, 1);
  const auto region = p.server.engine.expose(theirs.slice(), Access::remote_read);
  ASSERT_TRUE(region);
  Buffer b = p.client.filled(64, 1);
  Connection c = p.ends.client;
  EXPECT_DEATH(
      {
        ASSERT_EQ(c.read(b, *region, {}, Post::defer), Status::ok);
        (void)SharedAccess::open(p.client.engine, b, true);
      },
      "an operation is changing the bytes");
  EXPECT_DEATH(
      {
        const auto mine = SharedAccess::open(p.client.engine, b, true);
        ASSERT_EQ(c.read(b, *region, {}, Post::defer), Status::ok);
      },
      "an operation began to change the bytes meanwhile");
  {
    const auto mine = SharedAccess::open(p.client.engine, b, true);
    EXPECT_EQ(given(p.client, b), kReading) << "the access is recorded";
    ASSERT_EQ(c.send(b, {}, Post::defer), Status::ok);  // reads, too
  }
  EXPECT_EQ(c.flush(), Status::ok);
  ASSERT_TRUE(p.until([&] { return p.server.messages == 1; }));
  EXPECT_EQ(p.server.engine.revoke(*region), Status::ok);
  theirs.reset();
  b.reset();
  p.finish();
}

TEST(MemoryAccessDeathTest, ADebugBuildChecksWhereTheCallerDoesNotSay) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a forked child may not use the engine
#ifdef NDEBUG
  constexpr bool kDebugBuild = false;
#else
  constexpr bool kDebugBuild = true;
#endif
  ASSERT_EQ(SPINWIRE_CHECK_ACCESS, kDebugBuild);
  Node node;
  const Buffer b = node.filled(64, 1);
  const auto writes = ExclusiveAccess::try_open(node.engine, b, true);
  const auto open_both = [&] {
    (void)SharedAccess::open(node.engine, b);
    (void)ExclusiveAccess::open(node.engine, b);
  };
  if (kDebugBuild) {
    EXPECT_DEATH((void)SharedAccess::open(node.engine, b), "");
    EXPECT_DEATH((void)ExclusiveAccess::open(node.engine, b), "");
  } else {
    open_both();
  }
}

TEST(MemoryAccess, WithoutTheCheckItIsGivenAlways) {
  Pair p(without_direct_messages());
  Buffer b = p.client.filled(64, 1);
  Connection c = p.ends.client;
  ASSERT_EQ(c.send(b, {}, Post::defer), Status::ok);
  {
    const auto access = ExclusiveAccess::open(p.client.engine, b, false);
    EXPECT_TRUE(access);
    EXPECT_EQ(given(p.client, b), kReading) << "it is not recorded either";
  }
  EXPECT_EQ(c.flush(), Status::ok);
  ASSERT_TRUE(p.until([&] { return p.server.messages == 1; }));
  b.reset();
  p.finish();
}

}  // namespace
}  // namespace memory_access_test
