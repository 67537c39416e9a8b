// Operations with a time-out.
#include <gtest/gtest.h>

#include <vector>

#include "base/internals.h"
#include "engine/harness.h"
#include "engine/zero_cost.h"

namespace operation_timeouts_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::OperationId;

Config long_messages() {
  Config c = small_config();
  c.memory.rendezvous_bytes = 4u << 20;
  c.connections.max_message_bytes = 2u << 20;
  return without_direct_messages(c);  // an operation lasts until the peer polls
}

struct Time {
  std::uint64_t ticks = 1'000'000'000;
};

/// A pair whose time the test moves, and memory of the server.
struct Bench : Time, Pair {
  explicit Bench() : Pair(long_messages(), &ticks) {
    memory = server.buffer(8192, Pool::lease);
    region = server.engine.expose(memory.slice(), Access::remote_read_write | Access::remote_atomic)
                 .value();
    const Buffer one = client.filled(1, 1);
    EXPECT_TRUE(until([&] {
      (void)c().send(one);
      return c().stats().send_credits > 8;
    }));
    EXPECT_TRUE(until([&] { return c().stats().outstanding == 0; }));
    settle();
    server.on_message = [this](Connection, Message&) { ++arrived; };
  }
  Connection& c() { return ends.client; }
  [[nodiscard]] std::uint64_t timed_out() const { return client.tally.ended(Status::timed_out); }
  /// Time passes; only the client polls.
  void pass(std::uint64_t ns) {
    ticks += ns;
    for (int i = 0; i < 4; ++i) (void)client.poll();
  }
  /// Accepts an operation by `call(done)`, and gives it a time-out.
  template <typename Call>
  OperationId start(Call&& call, spinwire::Nanoseconds timeout) {
    EXPECT_EQ(client.tally.run(call), Status::ok);
    const OperationId id = c().last_operation();
    EXPECT_EQ(c().set_timeout(id, timeout), Status::ok);
    return id;
  }
  void finish() {
    EXPECT_EQ(server.engine.revoke(region), Status::ok);
    memory.reset();
    Pair::finish();
  }
  Buffer memory;
  RemoteRegion region;
  int arrived = 0;
};

TEST(OperationTimeouts, EndADeferredOperationOfEachKind) {
  Bench b;
  Buffer one = b.client.filled(8, 1);
  int accepted = 0;
  const auto defer = [&](auto&& call) {
    b.start(call, 10ms);
    ++accepted;
  };
  defer([&](auto done) { return b.c().send(one, done, Post::defer); });
  defer([&](auto done) { return b.c().write(one.slice(), b.region, done, Post::defer); });
  defer([&](auto done) { return b.c().read(one.slice(), b.region, done, Post::defer); });
  if (b.client.engine.device().atomics) {
    const RemoteRegion number = b.region.slice(0, 8);
    defer([&](auto done) { return b.c().fetch_add(number, 1, done, Post::defer); });
  }
  EXPECT_EQ(b.timed_out(), 0u);
  b.ticks += 10'300'000;
  (void)b.client.engine.poll_control();
  EXPECT_EQ(b.timed_out(), static_cast<std::uint64_t>(accepted));
  EXPECT_EQ(b.c().stats().outstanding, 0u);
  b.settle();
  EXPECT_EQ(b.arrived, 0);
  EXPECT_EQ(b.c().stats().writes, 0u);
  one.reset();
  b.finish();
}

TEST(OperationTimeouts, EndAMessageThatThePeerDoesNotTake) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a send waits until the peer polls";
  Bench b;
  Buffer one = b.client.filled(8, 1);
  const OperationId id = b.start([&](auto done) { return b.c().send(one, done); }, 10ms);
  b.pass(9'000'000);
  EXPECT_EQ(b.timed_out(), 0u);
  b.pass(1'300'000);
  EXPECT_EQ(b.timed_out(), 1u);
  EXPECT_EQ(b.client.tally.completed, 1u);
  EXPECT_EQ(b.c().set_timeout(id, 1ms), Status::invalid_argument);
  EXPECT_EQ(b.c().cancel(id), Status::invalid_argument);
  // The device has it, and finishes it: the message arrives, and the connection goes on.
  ASSERT_TRUE(b.until([&] { return b.c().stats().outstanding == 0; }));
  EXPECT_EQ(b.arrived, 1);
  EXPECT_EQ(b.client.tally.completed, 1u);
  EXPECT_TRUE(b.c().ready());
  one.reset();
  b.finish();
}

TEST(OperationTimeouts, EndALongMessage) {
  Bench b;
  Buffer large = b.client.filled(300'000, 1);
  b.start([&](auto done) { return b.c().send(large, done, Post::defer); }, 5ms);
  const OperationId offered = b.start([&](auto done) { return b.c().send(large, done); }, 10ms);
  b.pass(5'300'000);
  EXPECT_EQ(b.timed_out(), 1u);
  b.pass(5'300'000);
  EXPECT_EQ(b.timed_out(), 2u);
  EXPECT_EQ(b.c().set_timeout(offered, 1ms), Status::invalid_argument);
  ASSERT_TRUE(b.until([&] { return b.c().stats().outstanding == 0; }));
  b.settle();
  EXPECT_EQ(b.client.tally.completed, 2u);
  large.reset();
  b.finish();
}

/// The record serves later operations, to which the time-out does not apply.
TEST(OperationTimeouts, DoNotReachLaterOperations) {
  Bench b;
  Buffer one = b.client.filled(8, 1);
  const OperationId ended =
      b.start([&](auto done) { return b.c().write(one.slice(), b.region, done); }, 10ms);
  ASSERT_TRUE(b.until([&] { return b.c().stats().outstanding == 0; }));
  EXPECT_EQ(b.client.tally.ended(Status::ok), 1u);
  EXPECT_EQ(b.c().set_timeout(ended, 1ms), Status::invalid_argument);
  ASSERT_EQ(b.client.tally.run([&](auto done) { return b.c().send(one, done, Post::defer); }),
            Status::ok);
  const OperationId next = b.c().last_operation();
  // The record that was freed last is used first.
  ASSERT_EQ(static_cast<std::uint32_t>(next.value), static_cast<std::uint32_t>(ended.value));
  b.ticks += 20'000'000;
  (void)b.client.engine.poll_control();
  EXPECT_EQ(b.timed_out(), 0u);
  EXPECT_EQ(b.c().last_operation(), next);
  ASSERT_TRUE(b.until([&] { return b.c().stats().outstanding == 0; }));
  EXPECT_EQ(b.client.tally.ended(Status::ok), 2u);
  one.reset();
  b.finish();
}

TEST(OperationTimeouts, TheLastOneCounts) {
  Bench b;
  Buffer one = b.client.filled(8, 1);
  const OperationId id =
      b.start([&](auto done) { return b.c().send(one, done, Post::defer); }, 5ms);
  EXPECT_EQ(b.c().set_timeout(id, 20ms), Status::ok);
  b.ticks += 19'000'000;
  (void)b.client.engine.poll_control();
  EXPECT_EQ(b.timed_out(), 0u);
  EXPECT_EQ(b.c().last_operation(), id);
  b.ticks += 1'300'000;
  (void)b.client.engine.poll_control();
  EXPECT_EQ(b.timed_out(), 1u);
  one.reset();
  b.finish();
}

TEST(OperationTimeouts, RefuseWhatMakesNoSense) {
  Bench b;
  Buffer one = b.client.filled(8, 1);
  ASSERT_EQ(b.client.tally.run([&](auto done) { return b.c().send(one, done, Post::defer); }),
            Status::ok);
  const OperationId id = b.c().last_operation();
  EXPECT_EQ(b.c().set_timeout(id, -1ns), Status::invalid_argument);
  EXPECT_EQ(b.c().set_timeout({}, 1ms), Status::invalid_argument);
  EXPECT_EQ(b.c().set_timeout({id.value + 2}, 1ms), Status::invalid_argument);
  EXPECT_EQ(b.ends.server.set_timeout(id, 1ms), Status::invalid_argument);
  EXPECT_EQ(Connection().set_timeout(id, 1ms), Status::not_connected);
  EXPECT_EQ(b.c().set_timeout(id, spinwire::Nanoseconds::max()), Status::ok);
  b.pass(1'000'000'000);
  EXPECT_EQ(b.timed_out(), 0u);
  // The engine ends with a timer that runs.
}

TEST(OperationTimeouts, AllocateOnceOnly) {
  Bench b;
  Buffer one = b.client.filled(8, 1);
  const auto run = [&] {
    for (int i = 0; i < 16; ++i)
      b.start([&](auto done) { return b.c().write(one.slice(), b.region, done); }, 1ms);
    EXPECT_TRUE(b.until([&] { return b.c().stats().outstanding == 0; }));
    b.pass(2'000'000);
  };
  run();
  if (!SPINWIRE_TEST_COUNTS_HEAP) GTEST_SKIP() << "the sanitizer has its own allocator";
  zero_cost_test::heap_calls = 0;
  zero_cost_test::armed = true;
  run();
  zero_cost_test::armed = false;
  EXPECT_EQ(zero_cost_test::heap_calls, 0u);
  one.reset();
  b.finish();
}

}  // namespace
}  // namespace operation_timeouts_test
