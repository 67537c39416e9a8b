#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "engine/harness.h"

namespace credits_test {
namespace {

using namespace engine_test;  // the names of a test namespace

/// Forbids retries: a message without a receive ends its connection at once. So a live connection
/// shows that every message found a receive.
Config strict_config() {
  Config c = small_config();
  c.queue_pair.rnr_retry = 0;
  return c;
}

std::uint32_t granted(const Node& n) { return n.engine.stats().reserved_receives; }

TEST(Credits, IdleHoldsOneActiveGrowsOnDemand) {
  Pair p(strict_config());
  EXPECT_EQ(p.ends.client.stats().send_credits, 1u);
  EXPECT_EQ(p.ends.client.stats().granted_credits, 1u);
  EXPECT_EQ(granted(p.server), 1u);
  Buffer b = p.client.filled(32, 1);
  std::uint32_t most = 0;
  std::uint64_t sent = 0;
  ASSERT_TRUE(p.until([&] {
    if (sent < 5000 && p.ends.client.send(b) == Status::ok) ++sent;
    most = std::max(most, p.ends.client.stats().send_credits);
    return sent == 5000 && p.server.messages == sent;
  }));
  EXPECT_GT(most, 1u);
  EXPECT_LE(most, 64u);  // connections.credits
  EXPECT_LE(granted(p.server), 64u);
  EXPECT_EQ(granted(p.client), 1u);  // the other direction stays idle
  b.reset();
  p.finish();
}

TEST(Credits, UnusedOnesGoBackAfterTheIdleTime) {
  std::uint64_t ticks = 1'000'000'000;
  Config c = strict_config();
  c.connections.credit_idle_timeout = 100ms;
  Pair p(c, &ticks);
  Buffer b = p.client.filled(32, 1);
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(p.until([&] {
      while (p.ends.client.send(b) == Status::ok) {
      }
      ticks += 1000;
      return granted(p.server) >= 40;
    }));
    ASSERT_TRUE(p.until([&] {
      ticks += 200'000;
      return granted(p.server) == 1;
    }));
    const std::uint64_t began = ticks;
    ASSERT_TRUE(p.until([&] {
      ticks += 200'000;
      return ticks > began + 500'000'000;
    }));
    // Both ends agree that one credit is left.
    EXPECT_EQ(p.ends.client.stats().send_credits, 1u);
    EXPECT_EQ(p.ends.server.stats().granted_credits, 1u);
    EXPECT_TRUE(p.ends.client.ready());
  }
  b.reset();
  p.finish();
}

TEST(Credits, KeepalivesAreNoUseOfThem) {
  // Messages are more frequent than the idle time, but unused credit still returns.
  std::uint64_t ticks = 1'000'000'000;
  Config c = strict_config();
  c.connections.keepalive_interval = 20ms;
  c.connections.credit_idle_timeout = 100ms;
  Pair p(c, &ticks);
  Buffer b = p.client.filled(32, 1);
  ASSERT_TRUE(p.until([&] {
    while (p.ends.client.send(b) == Status::ok) {
    }
    ticks += 1000;
    return granted(p.server) >= 40;
  }));
  const std::uint64_t end = ticks + 2'000'000'000;
  ASSERT_TRUE(p.until([&] {
    ticks += 200'000;
    return granted(p.server) == 1 || ticks > end;
  }));
  EXPECT_EQ(granted(p.server), 1u);
  b.reset();
  p.finish();
}

TEST(Credits, OneWayStreamIsToldWithoutMessages) {
  const std::uint64_t kMessages = amount(150'000);  // twice the range of the count in messages
  Pair p(strict_config());
  Buffer b = p.client.filled(32, 1);
  std::uint64_t sent = 0;
  std::uint32_t most = 0;
  ASSERT_TRUE(p.until([&] {
    while (sent < kMessages && p.ends.client.send(b, {}, Post::defer) == Status::ok) ++sent;
    most = std::max(most, p.ends.client.stats().send_credits);
    (void)p.ends.client.flush();
    return p.server.messages == kMessages;
  }));
  EXPECT_LE(most, 64u);  // connections.credits
  EXPECT_EQ(p.client.messages, 0u);
  EXPECT_EQ(p.ends.server.stats().messages_sent, 0u);
  // Credit is granted in steps, not for each message. A store, which the embedded device has,
  // rings no doorbell; EngineDirectCredit counts them.
  EXPECT_LT(p.server.engine.stats().doorbells, kMessages / 8);
  b.reset();
  p.finish();
}

TEST(Credits, OneWayWritesWithImmediateAreToldToo) {
  Pair p(strict_config());
  Buffer memory = p.server.buffer(64, Pool::lease);
  const auto region = p.server.engine.expose(memory.slice(), Access::remote_write).value();
  Buffer b = p.client.filled(32, 1);
  std::uint64_t sent = 0;
  ASSERT_TRUE(p.until([&] {
    while (sent < 5000 && p.ends.client.write_with_imm(b.slice(), region, 1) == Status::ok) ++sent;
    return p.server.messages == 5000;
  }));
  EXPECT_GE(granted(p.server), 10u);
  EXPECT_EQ(p.server.engine.revoke(region), Status::ok);
  memory.reset();
  b.reset();
  p.finish();
}

/// Many connections that all send as much as credit allows.
struct Many : Pair {
  Many(const Config& c, std::size_t count) : Pair(c) {
    all.push_back(ends);
    while (all.size() < count) all.push_back(connect(client, server));
    arrived.resize(count);
    server.on_message = [this](Connection conn, Message&) {
      for (std::size_t i = 0; i < all.size(); ++i) arrived[i] += all[i].server == conn ? 1 : 0;
    };
    buffer = client.filled(32, 1);
  }
  void push() {
    for (Ends& e : all) {
      for (int k = 0; k < 64 && e.client.send(buffer, {}, Post::defer) == Status::ok; ++k) {
      }
    }
    (void)client.engine.flush();
  }
  std::vector<Ends> all;
  std::vector<std::uint64_t> arrived;
  Buffer buffer;
};

TEST(Credits, ReceivesAreSharedFairlyWhenThereAreTooFew) {
  Config c = strict_config();
  c.queues.receive_depth = 64;
  c.queues.receive_postlist = 8;
  c.connections.maximum = 16;
  Many p(c, 10);
  for (int i = 0; i < 1000; ++i) {
    p.push();
    p.settle(1);
  }
  const std::vector<std::uint64_t> before = p.arrived;
  ASSERT_TRUE(p.until([&] {
    p.push();
    return p.arrived[0] > before[0] + 2000;
  }));
  std::vector<std::uint64_t> each;
  for (std::size_t i = 0; i < p.all.size(); ++i) each.push_back(p.arrived[i] - before[i]);
  const auto [least, most] = std::minmax_element(each.begin(), each.end());
  EXPECT_GT(*least * 4, *most) << testing::PrintToString(each);
  EXPECT_LE(granted(p.server), 64u - 8u - 8u);
  for (Ends& e : p.all) EXPECT_TRUE(e.client.ready());
  p.buffer.reset();
  p.finish();
}

TEST(Credits, GreedyConnectionLeavesRoomForNewOnes) {
  Config c = strict_config();
  c.queues.receive_depth = 64;
  c.connections.credits = 64;
  c.connections.maximum = 16;
  Many p(c, 1);
  ASSERT_TRUE(p.until([&] {
    p.push();
    return granted(p.server) >= 25;
  }));
  for (int i = 0; i < 200; ++i) {
    p.push();
    p.settle(1);
  }
  // Of the 40 receives that may be reserved, a quarter stays free for connections to come. These
  // get one receive each and make progress.
  EXPECT_LE(granted(p.server), 30u);
  for (int i = 0; i < 8; ++i) {
    const Ends next = connect(p.client, p.server);
    ASSERT_TRUE(next.client.ready());
    p.arrived.push_back(0);
    p.all.push_back(next);
  }
  ASSERT_TRUE(p.until([&] {
    p.push();
    return *std::min_element(p.arrived.begin(), p.arrived.end()) > 200;
  }));
  for (Ends& e : p.all) EXPECT_TRUE(e.client.ready());
  p.buffer.reset();
  p.finish();
}

TEST(Credits, NoMessageEverFindsNoReceive) {
  // Everything at once in both directions, also posts from callbacks, with the smallest budget. If
  // more were granted than is posted, a connection would fail.
  Config c = strict_config();
  c.queues.receive_depth = 96;
  c.queues.receive_postlist = 32;
  c.queues.poll_batch = 64;
  c.connections.maximum = 8;
  Many p(c, 6);
  Buffer answer = p.server.filled(16, 2);
  std::uint64_t answers = 0;
  p.server.on_message = [&](Connection conn, Message&) {
    if (conn.send(answer, {}, answers % 2 == 0 ? Post::now : Post::automatic) == Status::ok)
      ++answers;
    // The peer uses credit granted in this poll before the poll reposts its receives.
    if (p.server.messages % 8 == 0) {
      (void)p.client.engine.poll();
      p.push();
    }
  };
  ASSERT_TRUE(p.until([&] {
    p.push();
    return p.client.messages > amount(100000) || !p.client.closed.empty();
  }));
  for (Ends& e : p.all) {
    EXPECT_TRUE(e.client.ready());
    EXPECT_TRUE(e.server.ready());
  }
  EXPECT_TRUE(p.client.closed.empty());
  p.buffer.reset();
  answer.reset();
  p.finish();
}

TEST(Credits, CountersWrapAround) {
  // Each message carries sixteen bits of the count; the cell holds more.
  Pair p(strict_config());
  Buffer b = p.client.filled(8, 1);
  std::uint64_t sent = 0;
  ASSERT_TRUE(p.until([&] {
    while (sent < 200000 && p.ends.client.send(b, {}, Post::defer) == Status::ok) ++sent;
    (void)p.ends.client.flush();
    // Sends now and then, so that messages and the cell alternate in granting credit.
    if (sent % 7 == 0) (void)p.ends.server.send_copy({});
    return p.server.messages == 200000;
  }));
  ASSERT_TRUE(p.until([&] { return p.ends.client.stats().outstanding == 0; }));
  p.settle();
  EXPECT_LE(p.ends.client.stats().send_credits, p.ends.server.stats().granted_credits);
  EXPECT_LE(p.ends.server.stats().granted_credits, 64u);
  b.reset();
  p.finish();
}

}  // namespace
}  // namespace credits_test
