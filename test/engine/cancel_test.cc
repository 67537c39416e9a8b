// Cancelled operations.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "base/internals.h"
#include "engine/harness.h"

namespace cancel_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::OperationId;

/// A pair, and memory of the server that the client can access.
struct Bench : Pair {
  explicit Bench(const Config& config = small_config()) : Pair(config) {
    memory = server.buffer(8192, Pool::lease);
    std::memset(memory.data(), 0, memory.size());
    region = server.engine.expose(memory.slice(), Access::remote_read_write).value();
    server.on_message = [this](Connection, Message& m) {
      arrived.push_back(m.is_write() ? -1 : std::to_integer<int>(m.data()[0]));
    };
  }
  Connection& c() { return ends.client; }
  /// Defers a message of one byte and returns its operation.
  OperationId defer(int value) {
    Buffer b = client.buffer(1);
    b.data()[0] = static_cast<std::byte>(value);
    EXPECT_EQ(client.tally.run([&](auto done) { return c().send(b, done, Post::defer); }),
              Status::ok);
    return c().last_operation();
  }
  [[nodiscard]] std::uint64_t cancelled() const { return client.tally.ended(Status::cancelled); }
  /// Waits until the client has this many credits.
  void gain_credits(std::uint32_t wanted) {
    const Buffer b = client.filled(1, 0);
    ASSERT_TRUE(until([&] {
      if (c().stats().send_credits < wanted) (void)c().send(b);
      return c().stats().send_credits >= wanted && c().stats().outstanding == 0;
    }));
    settle();
    arrived.clear();
  }
  void finish() {
    EXPECT_EQ(server.engine.revoke(region), Status::ok);
    memory.reset();
    Pair::finish();
  }
  std::vector<int> arrived;
  Buffer memory;
  RemoteRegion region;
};

TEST(EngineCancel, ADeferredMessageIsNeverSent) {
  Bench b;
  b.gain_credits(8);
  for (const std::vector<int>& victims : std::vector<std::vector<int>>{
           {0}, {1}, {2}, {0, 1}, {1, 2}, {0, 2}, {2, 1}, {0, 1, 2}, {2, 1, 0}}) {
    b.gain_credits(4);
    const auto before = b.cancelled();
    const std::uint32_t credits = b.c().stats().send_credits;
    std::vector<OperationId> ids;
    for (int i = 0; i < 3; ++i) ids.push_back(b.defer(10 + i));
    EXPECT_EQ(std::set<std::uint64_t>({ids[0].value, ids[1].value, ids[2].value}).size(), 3u);
    std::vector<int> expected;
    for (int i = 0; i < 3; ++i) {
      if (std::find(victims.begin(), victims.end(), i) == victims.end()) expected.push_back(10 + i);
    }
    for (const int v : victims) {
      EXPECT_EQ(b.c().cancel(ids[static_cast<std::size_t>(v)]), Status::ok);
      EXPECT_EQ(b.c().cancel(ids[static_cast<std::size_t>(v)]), Status::invalid_argument);
    }
    EXPECT_EQ(b.cancelled(), before);  // no callback from inside the call
    EXPECT_EQ(b.c().stats().send_credits, credits - expected.size());
    (void)b.client.engine.poll();
    EXPECT_EQ(b.cancelled(), before + victims.size());
    ASSERT_TRUE(
        b.until([&] { return b.client.tally.idle() && b.arrived.size() >= expected.size(); }));
    b.settle();
    EXPECT_EQ(b.arrived, expected);
    EXPECT_EQ(b.cancelled(), before + victims.size());
  }
  b.finish();
}

TEST(EngineCancel, TheBlockOfADeferredOneGoesBackWithItsCallback) {
  Bench b(without_direct_messages());
  Buffer message = b.client.filled(100, 1);
  ASSERT_EQ(b.c().send(message, {}, Post::defer), Status::ok);
  EXPECT_EQ(spinwire::detail::block_of(message)->refs, 2u);
  EXPECT_EQ(spinwire::detail::block_of(message)->header_in_use, 1u);
  EXPECT_EQ(b.c().stats().outstanding, 1u);
  ASSERT_EQ(b.c().cancel(b.c().last_operation()), Status::ok);
  EXPECT_FALSE(b.c().last_operation());
  EXPECT_EQ(spinwire::detail::block_of(message)->refs, 2u);
  (void)b.client.engine.poll();
  EXPECT_EQ(spinwire::detail::block_of(message)->refs, 1u);
  EXPECT_EQ(spinwire::detail::block_of(message)->header_in_use, 0u);
  EXPECT_EQ(b.c().snapshot().messages, 0u);
  b.settle();
  EXPECT_EQ(b.client.engine.stats().operations, 0u);
  EXPECT_TRUE(b.arrived.empty());
  EXPECT_EQ(b.c().stats().messages_sent, 0u);
  message.reset();
  b.finish();
}

/// Cancelling neither loses nor creates credit: every message that was not cancelled arrives.
TEST(EngineCancel, CreditComesBackExactly) {
  Bench b;
  std::uint64_t sent = 0;
  std::uint32_t random = 1;
  for (std::uint32_t round = 0; round < amount(400); ++round) {
    std::vector<OperationId> ids;
    const Buffer one = b.client.filled(1, 5);
    for (;;) {
      random = random * 1664525 + 1013904223;
      const auto call = [&](auto done) {
        return (random >> 20) % 3 == 0
                   ? b.c().write_with_imm(one.slice(), b.region, 1, done, Post::defer)
                   : b.c().send(one, done, Post::defer);
      };
      if (b.client.tally.run(call) != Status::ok) break;
      ids.push_back(b.c().last_operation());
      ++sent;
    }
    ASSERT_FALSE(ids.empty());
    for (const OperationId id : ids) {
      random = random * 1664525 + 1013904223;
      if ((random >> 16) % 2 == 0) continue;
      ASSERT_EQ(b.c().cancel(id), Status::ok);
      --sent;
      // The credit is available again at once.
      if ((random >> 18) % 4 != 0) continue;
      if (b.client.tally.run([&](auto d) { return b.c().send(one, d, Post::defer); }) == Status::ok)
        ++sent;
    }
    ASSERT_TRUE(b.until([&] { return b.client.tally.idle() && b.c().stats().send_credits != 0; }));
  }
  ASSERT_TRUE(b.until([&] { return b.server.messages == sent; }));
  EXPECT_EQ(b.client.tally.ended(Status::ok), sent);
  EXPECT_GT(b.cancelled(), 100u);
  EXPECT_TRUE(b.c().ready() && b.ends.server.ready());
  EXPECT_EQ(b.server.engine.stats().bad_messages, 0u);
  b.finish();
}

/// If a cancelled message was to grant credit to the peer, that credit is granted in another way.
TEST(EngineCancel, CreditThatItWouldHaveToldIsToldAllTheSame) {
  Bench b;
  Connection server = b.ends.server;
  const Buffer answer = b.server.filled(1, 1);
  // The server has used a few of many credits, too few to be returned on their own.
  ASSERT_TRUE(b.until([&] {
    if (b.c().stats().granted_credits < 40) (void)server.send(answer);
    return b.c().stats().granted_credits >= 40 && server.stats().outstanding == 0;
  }));
  b.settle();
  const auto sendable = [&] {
    std::uint32_t count = 0;
    while (server.send(answer, {}, Post::defer) == Status::ok) ++count;
    return count;
  };
  for (int i = 0; i < 5; ++i) ASSERT_EQ(server.send(answer), Status::ok);
  b.settle();
  (void)b.defer(1);
  ASSERT_EQ(b.c().cancel(b.c().last_operation()), Status::ok);
  b.settle();
  EXPECT_EQ(sendable(), b.c().stats().granted_credits);
  ASSERT_TRUE(b.until([&] { return server.stats().outstanding == 0; }));
}

TEST(EngineCancel, WhatTheDeviceHasRunsAndIsToldOnce) {
  Bench b;
  Buffer ones = b.client.filled(64, 1);
  ASSERT_EQ(
      b.client.tally.run([&](auto done) { return b.c().write(ones.slice(), b.region, done); }),
      Status::ok);
  const OperationId id = b.c().last_operation();
  ASSERT_TRUE(id);
  ASSERT_EQ(b.c().cancel(id), Status::ok);
  EXPECT_EQ(b.c().cancel(id), Status::invalid_argument);
  EXPECT_FALSE(b.c().last_operation());
  EXPECT_EQ(b.cancelled(), 0u);
  (void)b.client.engine.poll();
  EXPECT_EQ(b.cancelled(), 1u);
  ASSERT_TRUE(b.until([&] { return b.c().stats().outstanding == 0; }));
  b.settle();
  EXPECT_EQ(b.client.tally.completed, 1u);
  EXPECT_EQ(b.c().stats().writes, 1u);
  EXPECT_TRUE(Node::holds(b.memory.slice(0, 64).bytes(), 1));
  EXPECT_EQ(spinwire::detail::block_of(ones)->refs, 1u);
  ones.reset();
  b.finish();
}

TEST(EngineCancel, WithoutACallbackToo) {
  Bench b;
  const Buffer ones = b.client.filled(64, 1);
  ASSERT_EQ(b.c().write(ones.slice(), b.region), Status::ok);
  ASSERT_EQ(b.c().cancel(b.c().last_operation()), Status::ok);
  ASSERT_EQ(b.c().write(ones.slice(), b.region, {}, Post::defer), Status::ok);
  ASSERT_EQ(b.c().cancel(b.c().last_operation()), Status::ok);
  ASSERT_TRUE(b.until([&] { return b.c().stats().outstanding == 0; }));
  EXPECT_EQ(spinwire::detail::block_of(ones)->refs, 1u);
  EXPECT_EQ(b.c().stats().writes, 1u);
  EXPECT_TRUE(b.c().ready());
}

/// The device keeps an operation long after its callback, behind a message that the peer does not
/// receive.
TEST(EngineCancel, ToldLongBeforeTheDeviceIsDone) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a send waits until the peer polls";
  Bench b(without_direct_messages());
  Buffer ones = b.client.filled(64, 1);
  ASSERT_EQ(b.client.tally.run([&](auto done) { return b.c().send(ones, done); }), Status::ok);
  const OperationId send = b.c().last_operation();
  ASSERT_EQ(
      b.client.tally.run([&](auto done) { return b.c().write(ones.slice(), b.region, done); }),
      Status::ok);
  const OperationId write = b.c().last_operation();
  ASSERT_EQ(b.c().cancel(write), Status::ok);
  EXPECT_EQ(b.c().last_operation(), send);
  for (int i = 0; i < 100; ++i) (void)b.client.poll();
  EXPECT_EQ(b.cancelled(), 1u);  // before the older one
  EXPECT_EQ(b.client.tally.completed, 1u);
  EXPECT_EQ(b.c().stats().outstanding, 2u);
  EXPECT_EQ(spinwire::detail::block_of(ones)->refs, 3u);
  // A message in flight is cancelled, too: it still arrives.
  ASSERT_EQ(b.c().cancel(send), Status::ok);
  for (int i = 0; i < 100; ++i) (void)b.client.poll();
  EXPECT_EQ(b.cancelled(), 2u);
  EXPECT_EQ(spinwire::detail::block_of(ones)->refs, 3u);
  ASSERT_TRUE(b.until([&] { return b.c().stats().outstanding == 0; }));
  EXPECT_EQ(b.arrived.size(), 1u);
  EXPECT_TRUE(Node::holds(b.memory.slice(0, 64).bytes(), 1));
  EXPECT_EQ(spinwire::detail::block_of(ones)->refs, 1u);
  EXPECT_EQ(spinwire::detail::block_of(ones)->header_in_use, 0u);
  EXPECT_EQ(b.c().stats().messages_sent, 1u);
  ones.reset();
  b.finish();
}

TEST(EngineCancel, FromCallbacks) {
  Bench b;
  b.gain_credits(8);
  std::vector<int> order;
  std::vector<OperationId> ids;
  const Buffer one = b.client.filled(1, 1);
  std::uint64_t polled_at_second = 0, polled_at_third = 0;
  const std::function<void(Status)> take_second = [&](Status status) {
    order.push_back(status == Status::cancelled ? 2 : 20);
    polled_at_second = b.client.engine.stats().polls;
    // A deferred operation is cancelled while callbacks of other cancelled ones run.
    EXPECT_EQ(b.c().send(one,
                         [&](const Completion& e) {
                           order.push_back(e.status == Status::cancelled ? 3 : 30);
                           polled_at_third = b.client.engine.stats().polls;
                         }),
              Status::ok);
    EXPECT_EQ(b.c().cancel(b.c().last_operation()), Status::ok);
  };
  const auto second = [&take_second](const Completion& c) { take_second(c.status); };
  const auto first = [&](const Completion& c) {
    order.push_back(c.status == Status::ok ? 1 : 10);
    EXPECT_EQ(b.c().cancel(ids[0]), Status::invalid_argument);  // this one has ended
    EXPECT_EQ(b.c().cancel(ids[1]), Status::ok);
    EXPECT_EQ(order.size(), 1u);
  };
  ASSERT_EQ(b.c().write(one.slice(), b.region, first, Post::defer), Status::ok);
  ids.push_back(b.c().last_operation());
  ASSERT_EQ(b.c().write(one.slice(), b.region, second, Post::defer), Status::ok);
  ids.push_back(b.c().last_operation());
  ASSERT_TRUE(b.until([&] { return order.size() == 3; }));
  b.settle();
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
  EXPECT_GE(polled_at_third, polled_at_second);
  EXPECT_TRUE(b.arrived.empty());
  EXPECT_EQ(b.c().stats().outstanding, 0u);
}

TEST(EngineCancel, WithTheConnectionAboutToEnd) {
  Bench b;
  b.gain_credits(4);
  (void)b.defer(1);
  (void)b.defer(2);
  ASSERT_EQ(b.c().cancel(b.c().last_operation()), Status::ok);
  ASSERT_EQ(b.c().close(), Status::ok);
  (void)b.client.poll();
  EXPECT_EQ(b.cancelled(), 1u);
  ASSERT_TRUE(b.until([&] { return !b.client.closed.empty(); }));
  EXPECT_EQ(b.client.closed[0].status, Status::ok);
  EXPECT_EQ(b.arrived, std::vector<int>{1});
  b.finish();
}

/// The drain of a connection waits for its only operation, which is cancelled.
TEST(EngineCancel, TheLastOneOfADrainingConnectionLetsItEnd) {
  Config config = small_config();
  config.connections.close_timeout = 60s;
  Bench b(config);
  (void)b.defer(1);
  ASSERT_EQ(b.c().close(), Status::ok);
  EXPECT_EQ(b.c().state(), ConnectionState::draining);
  ASSERT_EQ(b.c().cancel(b.c().last_operation()), Status::ok);
  ASSERT_TRUE(b.until([&] { return !b.client.closed.empty(); }));
  EXPECT_EQ(b.cancelled(), 1u);
  b.settle();
  EXPECT_TRUE(b.arrived.empty());
  b.finish();
}

TEST(EngineCancel, WithTheEngine) {
  Bench b;
  b.gain_credits(4);
  const Buffer ones = b.server.filled(8, 1);
  ASSERT_EQ(b.client.tally.run(
                [&](auto d) { return b.c().write(b.client.filled(8, 1).slice(), b.region, d); }),
            Status::ok);
  ASSERT_EQ(b.c().cancel(b.c().last_operation()), Status::ok);
  (void)b.defer(2);
  ASSERT_EQ(b.c().cancel(b.c().last_operation()), Status::ok);
  b.client.engine = Engine();
  EXPECT_EQ(b.cancelled(), 2u);
  b.client.tally.expect_exact();
}

TEST(EngineCancel, WhatNamesNothing) {
  Bench b;
  Ends other = connect(b.client, b.server);
  Connection none;
  EXPECT_FALSE(b.c().last_operation());
  EXPECT_FALSE(none.last_operation());
  EXPECT_EQ(none.cancel({}), Status::not_connected);
  EXPECT_EQ(b.c().cancel({}), Status::invalid_argument);
  for (const std::uint64_t id : {0, 1, 2, 1 << 20})
    EXPECT_EQ(b.c().cancel({id}), Status::invalid_argument);
  const OperationId id = b.defer(1);
  EXPECT_EQ(other.client.cancel(id), Status::invalid_argument);
  EXPECT_EQ(b.c().cancel({id.value ^ 1}), Status::invalid_argument);
  EXPECT_EQ(b.c().cancel({id.value + (std::uint64_t{1} << 32)}), Status::invalid_argument);
  std::thread([&] {
    EXPECT_EQ(b.c().cancel(id), Status::wrong_thread);
    EXPECT_FALSE(b.c().last_operation());
  }).join();
  Child child([&](int, int) {
    return b.c().cancel(id) == Status::forked_child && !b.c().last_operation() ? 0 : 1;
  });
  EXPECT_EQ(child.wait(), 0);
  ASSERT_TRUE(b.until([&] { return b.arrived.size() == 1 && b.client.tally.idle(); }));
  EXPECT_EQ(b.c().cancel(id), Status::invalid_argument);
  EXPECT_EQ(b.cancelled(), 0u);
  b.finish();
}

/// Random operations on both ends: each ends once, and nothing leaks.
TEST(EngineCancel, AtRandomNothingLeaks) {
  Bench b;
  Buffer memory = b.client.buffer(8192, Pool::lease);
  const auto ours = b.client.engine.expose(memory.slice(), Access::remote_read_write).value();
  struct Side {
    Node& node;
    Connection c;
    RemoteRegion region;
    std::vector<OperationId> ids;
  } sides[] = {{b.client, b.ends.client, b.region, {}}, {b.server, b.ends.server, ours, {}}};
  std::mt19937 random(12345);
  const auto draw = [&](std::uint32_t below) {
    return static_cast<std::uint32_t>(random() % below);
  };
  const auto begin = [&](Side& side) {
    Buffer data = side.node.engine.allocate(1 + draw(3000));
    if (!data) return;
    const std::uint32_t what = draw(5);
    const Post post = draw(2) == 0 ? Post::defer : Post::now;
    const Status status = side.node.tally.run([&](auto done) {
      if (what == 0) return side.c.write(data.slice(), side.region, done, post);
      if (what == 1) return side.c.read(data.slice(), side.region, done, post);
      if (what == 2) return side.c.write_with_imm(data.slice(), side.region, 1, done, post);
      return side.c.send(data, done, post);
    });
    if (status == Status::ok) side.ids.push_back(side.c.last_operation());
  };
  for (std::uint32_t i = 0; i < amount(20000); ++i) {
    Side& side = sides[draw(2)];
    const std::uint32_t what = draw(8);
    if (what < 4) {
      begin(side);
    } else if (what < 6 && !side.ids.empty()) {
      const std::size_t at = draw(static_cast<std::uint32_t>(side.ids.size()));
      (void)side.c.cancel(side.ids[at]);
      side.ids.erase(side.ids.begin() + static_cast<std::ptrdiff_t>(at));
      if (side.ids.size() > 200) side.ids.clear();
    } else {
      b.settle(static_cast<int>(draw(20)));
    }
  }
  ASSERT_TRUE(b.until([&] { return b.client.tally.idle() && b.server.tally.idle(); }));
  for (const Side& side : sides) {
    EXPECT_TRUE(side.c.ready());
    EXPECT_GT(side.node.tally.ended(Status::cancelled), on_softverbs() ? 40u : 0u);
    EXPECT_GT(side.node.tally.ended(Status::ok), amount(500));
  }
  EXPECT_EQ(b.client.engine.revoke(ours), Status::ok);
  memory.reset();
  b.finish();
}

}  // namespace
}  // namespace cancel_test
