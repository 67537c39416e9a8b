// What blocks a connection, and what is outstanding.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "engine/harness.h"

namespace snapshot_test {
namespace {

using namespace engine_test;  // names of a test namespace of its own
using spinwire::Blocker;

TEST(EngineSnapshot, TellsWhatIsOutstandingByKind) {
  Pair p;
  const bool atomics = p.client.engine.device().atomics;
  Buffer memory = p.server.buffer(64, Pool::lease);
  const auto region =
      p.server.engine
          .expose(memory.slice(), atomics ? Access::remote_all : Access::remote_read_write)
          .value();
  Connection c = p.ends.client;
  const Buffer b = p.client.filled(8, 1);
  EXPECT_EQ(c.snapshot().state, ConnectionState::ready);
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::nothing);
  ASSERT_EQ(c.send(b, {}, Post::defer), Status::ok);
  for (int i = 0; i < 2; ++i) ASSERT_EQ(c.write(b.slice(), region, {}, Post::defer), Status::ok);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(c.read(b.slice(), region, {}, Post::defer), Status::ok);
  const std::uint32_t swaps = atomics ? 4 : 0;
  for (std::uint32_t i = 0; i < swaps; ++i)
    ASSERT_EQ(c.fetch_add(region.slice(8, 8), 1, {}, Post::defer), Status::ok);
  const auto now = c.snapshot();
  EXPECT_EQ(now.messages, 1u);
  EXPECT_EQ(now.writes, 2u);
  EXPECT_EQ(now.reads, 3u);
  EXPECT_EQ(now.atomics, swaps);
  EXPECT_EQ(now.control, 0u);
  EXPECT_EQ(now.stats.outstanding, 6u + swaps);
  ASSERT_EQ(c.cancel(c.last_operation()), Status::ok);
  ASSERT_TRUE(p.until([&] { return c.stats().outstanding == 0; }));
  p.settle();
  const auto then = c.snapshot();
  EXPECT_EQ(then.messages + then.writes + then.reads + then.atomics + then.control, 0u);
  EXPECT_EQ(then.stats.messages_sent, 1u);
  EXPECT_EQ(then.stats.atomics + then.stats.reads, 2u + swaps);
}

TEST(EngineSnapshot, TellsWhatBlocks) {
  Config config = small_config();
  config.queues.send_depth = 22;
  config.queues.operations = 20;
  Pair p(config);
  const Ends other = connect(p.client, p.server);
  Buffer memory = p.server.buffer(64, Pool::lease);
  const auto region = p.server.engine.expose(memory.slice(), Access::remote_write).value();
  Connection c = p.ends.client, second = other.client;
  const Buffer b = p.client.filled(8, 1);
  while (c.send(b, {}, Post::defer) == Status::ok) {
  }
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::credit);
  EXPECT_EQ(c.snapshot().stats.send_credits, 0u);
  EXPECT_EQ(second.snapshot().blocked_by, Blocker::nothing);
  while (c.write(b.slice(), region, {}, Post::defer) == Status::ok) {
  }
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::send_queue);
  while (second.write(b.slice(), region, {}, Post::defer) == Status::ok) {
  }
  EXPECT_EQ(second.snapshot().blocked_by, Blocker::operations);
  EXPECT_EQ(p.client.engine.stats().operations, 20u);
  ASSERT_TRUE(p.until([&] { return p.client.engine.stats().operations == 0; }));
  // What blocked is over, and the next send is taken.
  ASSERT_TRUE(p.until([&] { return c.snapshot().blocked_by == Blocker::nothing; }));
  EXPECT_EQ(c.send(b), Status::ok);
  EXPECT_EQ(second.send(b), Status::ok);
  std::thread([&] { EXPECT_EQ(c.snapshot().blocked_by, Blocker::not_ready); }).join();
  ASSERT_EQ(c.close(), Status::ok);
  EXPECT_EQ(c.snapshot().state, ConnectionState::draining);
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::not_ready);
  EXPECT_EQ(Connection().snapshot().state, ConnectionState::closed);
  EXPECT_EQ(to_string(Blocker::send_queue), "send_queue");
  EXPECT_EQ(to_string(static_cast<Blocker>(99)), "unknown");
}

TEST(EngineSnapshot, TellsHowLongThePeerIsSilent) {
  std::uint64_t ticks = 1'000'000'000;
  Pair p(small_config(), &ticks);
  p.settle();
  const Buffer b = p.client.filled(8, 1);
  Connection c = p.ends.client;
  ASSERT_EQ(c.send(b), Status::ok);
  ASSERT_TRUE(p.until([&] { return c.stats().outstanding == 0; }));
  EXPECT_EQ(c.snapshot().silence, 0ns);
  ticks += 5'000;
  (void)p.client.engine.poll();
  EXPECT_EQ(c.snapshot().silence, 5us);
  ASSERT_TRUE(p.until([&] { return c.send(b) == Status::ok; }));
  ASSERT_TRUE(p.until([&] { return c.stats().outstanding == 0; }));
  EXPECT_EQ(c.snapshot().silence, 0ns);
}

}  // namespace
}  // namespace snapshot_test
