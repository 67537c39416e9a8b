// Operations with a time-out.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <vector>

#include "base/internals.h"
#include "engine/engine_core.h"
#include "engine/exposed_memory.h"
#include "engine/zero_cost.h"
#include "softverbs/faults/fault_plan.h"

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
struct Bench : Time, ExposedMemory {
  explicit Bench() : ExposedMemory(long_messages(), &ticks) {
    expose(8192, Access::remote_read_write | Access::remote_atomic);
    warm_up();
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

TEST(OperationTimeouts, EndDeferredGatheredOperations) {
  Bench b;
  Buffer mine = b.client.filled(1500, 1);
  const auto credits = b.c().stats().send_credits;
  {
    const std::array<BufferSlice, 2> parts = {mine.slice(0, 100), mine.slice(500, 1000)};
    const std::array<std::byte, 500> notice{};
    b.start([&](auto done) { return b.c().send(parts, done, Post::defer); }, 10ms);
    b.start([&](auto done) { return b.c().write(parts, b.region, done, Post::defer); }, 10ms);
    b.start(
        [&](auto done) { return b.c().write_and_send(parts, b.region, notice, done, Post::defer); },
        10ms);
  }
  EXPECT_EQ(b.timed_out(), 0u);
  EXPECT_FALSE(mine.unique());
  b.ticks += 10'300'000;
  (void)b.client.engine.poll_control();
  EXPECT_EQ(b.timed_out(), 3u);
  EXPECT_EQ(b.c().stats().outstanding, 0u);
  EXPECT_TRUE(mine.unique());
  EXPECT_EQ(b.c().stats().send_credits, credits);
  b.settle();
  EXPECT_EQ(b.arrived, 0);
  EXPECT_EQ(b.c().stats().writes, 0u);
  EXPECT_EQ(b.client.tally.completed, 3u) << "none ends twice";
  mine.reset();
  b.finish();
}

/// The client's device holds what is posted, until the test lets it go on.
class HeldOperationTimeouts : public testing::Test {
 protected:
  void SetUp() override {
    if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "other devices lack faults";
    b_.emplace();
    spinwire::softverbs::FaultPlan plan;
    plan.delay_min = plan.delay_max = std::chrono::hours(24);
    const auto set = spinwire::softverbs::set_faults(device(), plan);
    ASSERT_TRUE(set) << set.error().message();
    memory_ = b_->client.filled(8, 1);
  }
  [[nodiscard]] ibv_context* device() {
    return spinwire::detail::core_of(b_->client.engine)->context.device->context();
  }
  /// Posts one operation of each kind, and lets 10 ms pass, after which all of them end.
  void time_out_one_of_each_kind() {
    const RemoteRegion number = b_->region.slice(64, 8);
    const auto post = [this](auto&& call) { b_->start(call, 10ms); };
    post([&](auto done) { return b_->c().write(memory_, b_->region.slice(0, 8), done); });
    post([&](auto done) { return b_->c().read(into_.slice(), b_->region.slice(8, 8), done); });
    post([&](auto done) { return b_->c().fetch_add(number, 5, done); });
    post([&](auto done) { return b_->c().compare_swap(number, 5, 7, done); });
    b_->pass(9'000'000);
    EXPECT_EQ(b_->timed_out(), 0u);
    EXPECT_EQ(b_->c().stats().outstanding, 4u);
    b_->pass(1'300'000);
    EXPECT_EQ(b_->timed_out(), 4u);
    EXPECT_EQ(b_->c().stats().outstanding, 4u) << "the device has them";
    EXPECT_FALSE(memory_.unique()) << "the device may read the memory";
    EXPECT_FALSE(into_.unique()) << "the device may write the memory";
  }
  std::optional<Bench> b_;
  Buffer memory_;
  Buffer into_;
};

TEST_F(HeldOperationTimeouts, EndOneOfEachKindAndTheDeviceFinishesIt) {
  into_ = b_->client.filled(8, 9);
  for (std::size_t i = 0; i < 8; ++i) b_->memory.data()[8 + i] = Node::pattern(2, i);
  std::fill_n(b_->memory.data() + 64, 8, std::byte{});
  time_out_one_of_each_kind();
  spinwire::softverbs::clear_faults(device());
  ASSERT_TRUE(b_->until([&] { return b_->c().stats().outstanding == 0; }));
  EXPECT_EQ(b_->client.tally.completed, 4u);
  EXPECT_TRUE(Node::holds({b_->memory.data(), 8}, 1)) << "the write";
  EXPECT_TRUE(Node::holds({into_.data(), 8}, 2)) << "the read";
  EXPECT_EQ(b_->memory.data()[64], std::byte{7}) << "both atomics, in their order";
  EXPECT_TRUE(memory_.unique() && into_.unique());
  EXPECT_TRUE(b_->c().ready());
  memory_.reset();
  into_.reset();
  b_->finish();
}

TEST_F(HeldOperationTimeouts, EndGatheredOnesAndTheDeviceFinishesThem) {
  Buffer mine = b_->client.filled(2000, 1);
  {
    const std::array<BufferSlice, 2> parts = {mine.slice(0, 1000), mine.slice(1000, 1000)};
    const std::array<std::byte, 500> notice{};
    const RemoteRegion beside = b_->region.slice(4096, 2000);
    const auto post = [this](auto&& call) { b_->start(call, 10ms); };
    post([&](auto done) { return b_->c().send(parts, done); });
    post([&](auto done) { return b_->c().write(parts, b_->region, done); });
    post([&](auto done) { return b_->c().write_and_send(parts, beside, notice, done); });
  }
  b_->pass(9'000'000);
  EXPECT_EQ(b_->timed_out(), 0u);
  b_->pass(1'300'000);
  EXPECT_EQ(b_->timed_out(), 3u);
  EXPECT_GE(b_->c().stats().outstanding, 3u) << "the device has them";
  EXPECT_FALSE(mine.unique()) << "the device may read the memory";
  spinwire::softverbs::clear_faults(device());
  ASSERT_TRUE(b_->until([&] { return b_->c().stats().outstanding == 0; }));
  b_->settle();
  EXPECT_EQ(b_->arrived, 2) << "the message and the notice";
  EXPECT_TRUE(Node::holds({b_->memory.data(), 2000}, 1));
  EXPECT_TRUE(Node::holds({b_->memory.data() + 4096, 2000}, 1));
  EXPECT_EQ(b_->client.tally.completed, 3u) << "none ends twice";
  EXPECT_TRUE(mine.unique());
  EXPECT_TRUE(b_->c().ready());
  mine.reset();
  memory_.reset();
  b_->finish();
}

TEST_F(HeldOperationTimeouts, ADeviceThatNeverFinishesThemIsLeftByClosing) {
  into_ = b_->client.filled(8, 9);
  time_out_one_of_each_kind();
  b_->pass(60'000'000'000);
  EXPECT_EQ(b_->client.tally.completed, 4u);
  EXPECT_FALSE(memory_.unique() || into_.unique());
  EXPECT_EQ(b_->c().close(), Status::ok);
  ASSERT_TRUE(b_->until([&] {
    b_->ticks += 1'000'000;
    return b_->c().state() == ConnectionState::closed && b_->server.engine.stats().connections == 0;
  }));
  EXPECT_EQ(b_->client.tally.completed, 4u) << "none ends twice";
  EXPECT_TRUE(memory_.unique() && into_.unique());
  EXPECT_TRUE(Node::holds({into_.data(), 8}, 9));
  memory_.reset();
  into_.reset();
  b_->finish();
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

TEST(OperationTimeouts, EndALongMessageThatWasNotPosted) {
  Bench b;
  Buffer large = b.client.filled(300'000, 1);
  b.start([&](auto done) { return b.c().send(large, done, Post::defer); }, 5ms);
  b.pass(5'300'000);
  EXPECT_EQ(b.timed_out(), 1u);
  EXPECT_EQ(b.client.tally.completed, 1u);
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
