// Cancelled rendezvous messages: not offered yet, offered, being pulled.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "base/internals.h"
#include "engine/harness.h"

namespace cancel_long_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::OperationId;

constexpr std::size_t kLong = 300'000;

enum class Key : std::uint8_t { window, registration, none };

Config cancel_config(Key key) {
  Config c = small_config();
  c.memory.rendezvous_bytes = 4u << 20;
  c.memory.windows = key == Key::registration ? 0 : 16;
  if (key != Key::none) c.connections.direct_messages = spinwire::DirectPath::off;
  c.connections.max_message_bytes = 2u << 20;
  c.connections.rendezvous_timeout = 20s * slowness();  // nothing expires unless a test moves time
  return c;
}

/// A pair with credit for several messages; the server records their sizes.
struct Bench : Pair {
  explicit Bench(Key key = Key::window, const std::uint64_t* ticks = nullptr)
      : Pair(cancel_config(key), ticks) {
    server.on_message = [this](Connection, Message& m) {
      arrived.push_back(m.size());
      right = right && Node::holds(m.bytes(), seed(m.size()));
    };
    const Buffer b = client.filled(1, seed(1));
    EXPECT_TRUE(until([&] {
      (void)c().send(b);
      return c().stats().send_credits > 24;
    }));
    EXPECT_TRUE(until([&] { return c().stats().outstanding == 0; }));
    settle();
    arrived.clear();
  }
  static std::uint32_t seed(std::size_t size) { return static_cast<std::uint32_t>(size % 251); }
  Connection& c() { return ends.client; }
  OperationId send(std::size_t size, Post post) {
    return send(client.filled(size, seed(size)), post);
  }
  OperationId send(const Buffer& b, Post post) {
    EXPECT_EQ(client.tally.run([&](auto done) { return c().send(b, done, post); }), Status::ok);
    return c().last_operation();
  }
  [[nodiscard]] std::uint64_t cancelled() const { return client.tally.ended(Status::cancelled); }
  [[nodiscard]] std::uint32_t windows_free() const { return client.engine.stats().windows_free; }
  void audit() const {
    const auto found = client.engine.audit();
    EXPECT_TRUE(found) << found.error().message();
  }
  void finish() {
    EXPECT_TRUE(right);
    Pair::finish();
  }
  std::vector<std::size_t> arrived;
  bool right = true;
};

/// With windows, with registrations, or without keys.
class EngineCancelLong : public testing::TestWithParam<Key> {};
INSTANTIATE_TEST_SUITE_P(By, EngineCancelLong,
                         testing::Values(Key::window, Key::registration, Key::none),
                         [](const auto& by) {
                           return by.param == Key::window         ? "Window"
                                  : by.param == Key::registration ? "Registration"
                                                                  : "NoKey";
                         });

/// A message that ends before the callback of its cancellation takes the callback's turn with it.
TEST_P(EngineCancelLong, WhatACallbackCancelsIsDueInALaterRun) {
  for (int polls_before = 0; polls_before < 12; ++polls_before) {
    SCOPED_TRACE(polls_before);
    Bench b(GetParam());
    const OperationId sent = b.send(kLong, Post::now);
    ASSERT_TRUE(until({&b.server}, [&] { return b.arrived.size() == 1; }));
    for (int i = 0; i < polls_before; ++i) (void)b.client.engine.poll();
    (void)b.c().cancel(sent);  // unless it has ended
    struct {
      Bench& b;
      OperationId first, second;
      int polls = 1, first_in = 0, second_in = 0;
    } run{b, {}, {}};
    const auto on_first = [&run](const Completion&) {
      run.first_in = run.polls;
      EXPECT_EQ(run.b.c().cancel(run.second), Status::ok);
      EXPECT_EQ(run.second_in, 0);
    };
    const auto on_second = [&run](const Completion&) { run.second_in = run.polls; };
    ASSERT_EQ(b.c().send(b.client.filled(9, 1), on_first, Post::defer, &run.first), Status::ok);
    ASSERT_EQ(b.c().send(b.client.filled(9, 2), on_second, Post::defer, &run.second), Status::ok);
    ASSERT_EQ(b.c().cancel(run.first), Status::ok);
    // Callbacks run at the end of a poll, and at the end of its control step.
    std::uint64_t steps = 0;
    for (; run.second_in == 0 && run.polls < 100; ++run.polls) {
      steps = b.client.engine.stats().control_steps;
      (void)b.client.engine.poll();
    }
    EXPECT_GT(run.first_in, 0);
    EXPECT_TRUE(run.second_in > run.first_in || b.client.engine.stats().control_steps > steps);
    ASSERT_TRUE(b.until([&] { return b.client.tally.idle(); }));
    b.settle();
    b.arrived.clear();
    b.right = true;  // the second message may have been posted
    b.finish();
  }
}

TEST_P(EngineCancelLong, ADeferredOneIsNeverOffered) {
  Bench b(GetParam());
  const std::uint32_t windows = b.windows_free();
  // Cancels each of a short and three long messages, and all long ones.
  for (const std::vector<std::size_t>& victims :
       std::vector<std::vector<std::size_t>>{{1}, {2}, {3}, {3, 1}, {1, 2, 3}, {0, 2}}) {
    const auto before = b.cancelled();
    const std::uint32_t credits = b.c().stats().send_credits;
    const std::size_t sizes[] = {7, kLong, kLong + 1, kLong + 2};
    std::vector<OperationId> ids;
    for (const std::size_t size : sizes) ids.push_back(b.send(size, Post::defer));
    for (const std::size_t v : victims) {
      ASSERT_TRUE(ids[v]);
      EXPECT_EQ(b.c().cancel(ids[v]), Status::ok);
      EXPECT_EQ(b.c().cancel(ids[v]), Status::invalid_argument);
      b.audit();
    }
    EXPECT_EQ(b.cancelled(), before);  // no callback from inside the call
    EXPECT_EQ(b.c().stats().send_credits, credits - 4 + victims.size());
    const auto of_long =
        std::count_if(victims.begin(), victims.end(), [](auto v) { return v > 0; });
    if (GetParam() == Key::window) {
      EXPECT_EQ(b.windows_free(), windows - 3 + of_long);
    }
    (void)b.client.engine.poll();
    EXPECT_EQ(b.cancelled(), before + victims.size());
    ASSERT_TRUE(b.until([&] { return b.client.tally.idle(); }));
    b.settle();
    std::vector<std::size_t> expected;
    for (std::size_t i = 0; i < 4; ++i) {
      if (std::find(victims.begin(), victims.end(), i) == victims.end())
        expected.push_back(sizes[i]);
    }
    EXPECT_EQ(b.arrived, expected);
    EXPECT_EQ(b.windows_free(), windows);
    EXPECT_EQ(b.c().stats().outstanding, 0u);
    b.arrived.clear();
  }
  b.finish();
}

TEST_P(EngineCancelLong, OneThatWasOfferedKeepsItsMemoryUntilTheAnswer) {
  Bench b(GetParam());
  const std::uint32_t windows = b.windows_free();
  const std::uint64_t sent = b.c().stats().messages_sent;
  Buffer data = b.client.filled(kLong, Bench::seed(kLong));
  const OperationId id = b.send(data, Post::now);
  ASSERT_TRUE(id);
  ASSERT_EQ(b.c().cancel(id), Status::ok);
  EXPECT_EQ(b.c().cancel(id), Status::invalid_argument);
  EXPECT_FALSE(b.c().last_operation());
  EXPECT_EQ(b.cancelled(), 0u);
  b.audit();
  for (int i = 0; i < 100; ++i) (void)b.client.poll();
  EXPECT_EQ(b.cancelled(), 1u);
  EXPECT_GE(spinwire::detail::block_of(data)->refs, 2u);
  EXPECT_EQ(b.c().snapshot().messages, 1u);
  EXPECT_EQ(b.windows_free(), windows - (GetParam() == Key::window ? 1 : 0));
  b.audit();
  ASSERT_TRUE(b.until([&] { return b.c().stats().outstanding == 0; }));
  EXPECT_EQ(b.client.tally.completed, 1u);
  EXPECT_EQ(b.windows_free(), windows);
  EXPECT_EQ(spinwire::detail::block_of(data)->refs, 1u);
  // It was still pulled.
  EXPECT_EQ(b.arrived, std::vector<std::size_t>{kLong});
  EXPECT_EQ(b.c().stats().messages_sent, sent + 1);
  data.reset();
  b.finish();
}

/// The answer arrives in the poll that runs the callback, or before.
TEST_P(EngineCancelLong, AtAnyStepItEndsOnce) {
  for (int steps = 0; steps < 10; ++steps) {
    Bench b(GetParam());
    Buffer data = b.client.filled(kLong, Bench::seed(kLong));
    const OperationId id = b.send(data, Post::now);
    for (int i = 0; i < steps; ++i) (void)(b.server.poll() + b.client.poll());
    const bool ended = b.client.tally.idle();
    EXPECT_EQ(b.c().cancel(id), ended ? Status::invalid_argument : Status::ok) << steps;
    // Half of them end with their connection, which waits for the answer.
    if (steps % 2 == 0) {
      EXPECT_EQ(b.c().close(), Status::ok);
    }
    ASSERT_TRUE(b.until([&] { return b.client.tally.idle(); }));
    EXPECT_EQ(b.cancelled(), ended ? 0u : 1u);
    ASSERT_TRUE(b.until([&] { return spinwire::detail::block_of(data)->refs == 1; }));
    EXPECT_EQ(b.arrived, std::vector<std::size_t>{kLong});
    data.reset();
    b.finish();
  }
}

TEST_P(EngineCancelLong, OnesOfALostConnectionEndOnce) {
  for (int steps = 0; steps < 6; ++steps) {
    Bench b(GetParam());
    const std::uint32_t windows = b.windows_free();
    std::vector<OperationId> ids;
    for (int i = 0; i < 4; ++i) ids.push_back(b.send(kLong, i < 2 ? Post::now : Post::defer));
    for (const std::size_t i : {0u, 2u}) EXPECT_EQ(b.c().cancel(ids[i]), Status::ok);
    for (int i = 0; i < steps; ++i) (void)(b.server.poll() + b.client.poll());
    if (steps % 2 == 0) {
      b.client.engine = Engine();
      b.client.tally.expect_exact();
    } else {
      EXPECT_EQ(b.ends.server.close(), Status::ok);
      ASSERT_TRUE(b.until([&] { return !b.client.closed.empty(); }));
      ASSERT_TRUE(b.until([&] { return b.windows_free() == windows; }));
      b.finish();
    }
    EXPECT_EQ(b.cancelled(), 2u);
    EXPECT_EQ(b.client.tally.completed, 4u);
  }
}

TEST_P(EngineCancelLong, TheLastOneOfADrainingConnectionLetsItEnd) {
  Bench b(GetParam());
  const OperationId id = b.send(kLong, Post::defer);
  ASSERT_EQ(b.c().close(), Status::ok);
  EXPECT_EQ(b.c().state(), ConnectionState::draining);
  ASSERT_EQ(b.c().cancel(id), Status::ok);
  ASSERT_TRUE(b.until([&] { return !b.client.closed.empty(); }));
  EXPECT_EQ(b.client.closed[0].status, Status::ok);
  EXPECT_EQ(b.cancelled(), 1u);
  EXPECT_TRUE(b.arrived.empty());
  b.finish();
}

TEST(EngineCancelLong, TheReceiverHasNoRoomAndItEndsOnce) {
  std::uint64_t now = 1'000'000'000;
  Bench b(Key::window, &now);
  std::vector<Buffer> kept;  // of the server's pool: nothing is left
  while (Buffer each = b.server.engine.allocate(2u << 20, Pool::rendezvous))
    kept.push_back(std::move(each));
  const std::uint64_t sent = b.c().stats().messages_sent;
  ASSERT_EQ(b.c().cancel(b.send(kLong, Post::now)), Status::ok);
  (void)b.send(9, Post::now);
  b.settle();
  EXPECT_NE(b.c().stats().outstanding, 0u) << "the receiver waits for room";
  ASSERT_TRUE(b.until([&] {
    now += 10'000'000;
    return b.c().stats().outstanding == 0;
  }));
  EXPECT_EQ(b.cancelled(), 1u);
  EXPECT_EQ(b.client.tally.completed, 2u);
  EXPECT_EQ(b.arrived, std::vector<std::size_t>{9});
  EXPECT_EQ(b.c().stats().messages_sent, sent + 1);
  kept.clear();
  b.finish();
}

TEST(EngineCancelLong, NamesAreInTheOrderOfAcceptance) {
  Bench b;
  Ends other = connect(b.client, b.server);
  const OperationId first = b.send(kLong, Post::defer);
  const OperationId second = b.send(8, Post::defer);
  const OperationId third = b.send(kLong, Post::now);
  EXPECT_TRUE(first && second && third && first != second && second != third && first != third);
  ASSERT_EQ(b.c().cancel(third), Status::ok);
  EXPECT_EQ(b.c().last_operation(), second);
  ASSERT_EQ(b.c().cancel(second), Status::ok);
  EXPECT_EQ(b.c().last_operation(), first);
  EXPECT_EQ(other.client.cancel(first), Status::invalid_argument);
  EXPECT_EQ(b.c().cancel({first.value + 2}), Status::invalid_argument);
  EXPECT_EQ(b.c().cancel({first.value + (std::uint64_t{1} << 32)}), Status::invalid_argument);
  // The peer has the offer; the answer has not arrived.
  for (int i = 0; i < 100; ++i) (void)b.client.poll();
  EXPECT_EQ(b.c().last_operation(), first);
  ASSERT_TRUE(b.until([&] { return b.client.tally.idle() && b.c().stats().outstanding == 0; }));
  EXPECT_FALSE(b.c().last_operation());
  EXPECT_EQ(b.c().cancel(first), Status::invalid_argument);
  EXPECT_EQ(b.client.tally.ended(Status::ok), 1u);
  EXPECT_EQ(b.cancelled(), 2u);
  b.finish();
}

TEST(EngineCancelLong, FromCallbacks) {
  Bench b;
  std::vector<int> order;
  const Buffer data = b.client.filled(kLong, 1);
  std::vector<OperationId> ids;
  const auto send = [&](int number, Post post) {
    const auto told = [&order, &b, &ids, number](const Completion& c) {
      order.push_back(c.status == Status::cancelled ? number : -number);
      // The first callback cancels the second operation, which otherwise is cancelled in the next
      // poll.
      if (number == 1) {
        EXPECT_EQ(b.c().cancel(ids[1]), Status::ok);
      }
    };
    ASSERT_EQ(b.c().send(data, told, post), Status::ok);
    ids.push_back(b.c().last_operation());
  };
  for (const int number : {1, 2, 3}) send(number, Post::defer);
  ASSERT_EQ(b.c().cancel(ids[0]), Status::ok);
  (void)b.client.poll();
  ASSERT_EQ(b.c().cancel(ids[2]), Status::ok);
  ASSERT_TRUE(b.until([&] { return b.c().stats().outstanding == 0; }));
  b.settle();
  std::sort(order.begin(), order.end());
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(spinwire::detail::block_of(data)->refs, 1u);
}

/// Random operations: each ends once, credit and windows return, and arriving messages are whole.
TEST_P(EngineCancelLong, AtRandomNothingLeaks) {
  Bench b(GetParam());
  const std::uint32_t windows = b.windows_free();
  std::vector<OperationId> ids;
  std::uint32_t random = 7;
  const auto draw = [&](std::uint32_t below) {
    random = random * 1664525 + 1013904223;
    return (random >> 12) % below;
  };
  for (std::uint32_t i = 0; i < amount(8000); ++i) {
    const std::uint32_t what = draw(8);
    if (what < 4) {
      const std::size_t size = what == 0 ? draw(4000) : 4097 + draw(9000);
      Buffer data = b.client.engine.allocate(size + 1);
      if (!data) continue;
      (void)data.resize(size);
      for (std::size_t at = 0; at < size; ++at)
        data.data()[at] = Node::pattern(Bench::seed(size), at);
      const Post post = draw(2) == 0 ? Post::defer : Post::now;
      if (b.client.tally.run([&](auto done) { return b.c().send(data, done, post); }) == Status::ok)
        ids.push_back(b.c().last_operation());
    } else if (what < 6 && !ids.empty()) {
      const std::size_t at = draw(static_cast<std::uint32_t>(ids.size()));
      (void)b.c().cancel(ids[at]);
      ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(at));
      if (ids.size() > 40) ids.clear();
    } else {
      b.settle(static_cast<int>(draw(6)));
    }
    if (i % 1000 == 0) b.audit();
  }
  ASSERT_TRUE(b.until([&] { return b.client.tally.idle() && b.c().stats().outstanding == 0; }));
  EXPECT_TRUE(b.c().ready());
  EXPECT_GT(b.cancelled(), on_softverbs() ? 200u : 0u);
  EXPECT_GT(b.client.tally.ended(Status::ok), amount(500));
  EXPECT_EQ(b.windows_free(), windows);
  b.finish();
}

}  // namespace
}  // namespace cancel_long_test
