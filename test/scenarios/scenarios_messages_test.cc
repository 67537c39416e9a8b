// Scenarios about messages and the outcome of operations, by number; see scenarios_together_test.cc
// for the table.
#include <gtest/gtest.h>

#include <array>
#include <optional>

#include "scenarios/scenario_driver.h"

namespace scenarios_messages_test {
namespace {

using namespace scenarios;  // names of the scenarios' own

constexpr std::uint32_t kMiB = 1u << 20;

/// Waits until the server has granted credit for so many messages at once.
void warm_up(ScenarioDriver& b, Connection line, std::uint32_t credits, std::uint32_t number = 1) {
  const Buffer small = b.buffer_of(filled(8, 1));
  int sent = 0;
  ASSERT_TRUE(b.until([&] {
    if (line.stats().send_credits >= credits) return true;
    sent += line.send(small) == Status::ok ? 1 : 0;
    return false;
  }));
  while (sent-- > 0) (void)b.next(Saw::message, number);
  ASSERT_TRUE(b.until([&] { return line.stats().outstanding == 0; }));
  ASSERT_GE(line.stats().send_credits, credits);
}

SPINWIRE_SCENARIO(4);
TEST_P(Scenario4, EachMessageHasItsImmediateOrNone) {
  ScenarioDriver b(GetParam());
  Connection line = b.open_line();
  const std::optional<std::uint32_t> immediates[] = {7, 0xffff'ffff, {}, {}, 0};
  std::uint32_t seed = 1;
  for (const auto& immediate : immediates) {
    const Buffer data = b.buffer_of(filled(100, seed++));
    // The next message is sent once there is credit, not once the last has arrived.
    ASSERT_EQ(b.start([&](const auto& done) {
      return immediate ? line.send_with_imm(data.slice(), *immediate, done) : line.send(data, done);
    }),
              Status::ok);
  }
  seed = 1;
  for (const auto& immediate : immediates) {
    const Event seen = b.next(Saw::message);
    expect_bytes(seen, filled(100, seed++));
    EXPECT_EQ(seen.has_immediate, immediate.has_value());
    EXPECT_EQ(seen.immediate, immediate.value_or(0));
  }
  ASSERT_TRUE(b.until([&] { return b.node.tally.idle(); }));
  EXPECT_EQ(b.node.tally.ended(Status::ok), std::size(immediates));
  b.finish();
}

SPINWIRE_SCENARIO(10);
TEST_P(Scenario10, ABurstWaitsForAReceiverThatDoesNotLook) {
  // A message without a work request has ended when the call returns.
  ScenarioDriver::Setup setup;
  setup.ours.connections.direct_messages = spinwire::DirectPath::off;
  ScenarioDriver b(GetParam(), setup);
  Connection line = b.open_line();
  warm_up(b, line, 10);
  // All ten arrive before the server runs at all.
  b.peer().pause();
  constexpr std::int32_t kFive = 5;
  const auto number = std::as_bytes(std::span(&kFive, 1));
  for (int i = 0; i < 10; ++i) {
    ASSERT_EQ(b.node.tally.run([&](const auto& done) { return line.send_copy(number, done); }),
              Status::ok);
  }
  b.settle();
  if (on_softverbs()) {
    EXPECT_EQ(b.node.tally.outstanding(), 10u);
  }
  b.peer().resume();
  for (int i = 0; i < 10; ++i) {
    expect_bytes(b.next(Saw::message), {number.begin(), number.end()});
  }
  ASSERT_TRUE(b.until([&] { return b.node.tally.idle(); }));
  EXPECT_EQ(b.node.tally.ended(Status::ok), 10u);
  b.finish();
}

/// The memory of a cancelled READ or WRITE stays allocated until the operation has ended.
SPINWIRE_SCENARIO(18);
TEST_P(Scenario18, ABufferIsUsableAgainOnlyAfterTheCompletion) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a send waits until the peer polls";
  // A message without a work request has ended when the call returns.
  ScenarioDriver::Setup setup;
  setup.ours.connections.direct_messages = spinwire::DirectPath::off;
  ScenarioDriver b(GetParam(), setup);
  Connection line = b.open_line();
  const Report there = b.expose({.seed = 7, .length = 64});
  Buffer got = b.buffer_of(filled(64, 1));
  Buffer ours = b.buffer_of(filled(64, 2));
  Buffer message = b.buffer_of(filled(8, 3));
  const std::byte* const abandoned[] = {got.data(), ours.data()};
  // Behind a message that the server has not received yet.
  b.peer().pause();
  const auto accepted = [&](auto call) { EXPECT_EQ(b.node.tally.run(call), Status::ok); };
  accepted([&](const auto& done) { return line.send(message, done); });
  accepted([&](const auto& done) { return line.read(got.slice(), there.region, done); });
  ASSERT_EQ(line.cancel(line.last_operation()), Status::ok);
  accepted([&](const auto& done) { return line.write(ours.slice(), there.region, done); });
  ASSERT_EQ(line.cancel(line.last_operation()), Status::ok);
  b.settle();
  ASSERT_EQ(b.node.tally.ended(Status::cancelled), 2u);
  got.reset();
  ours.reset();
  const auto reused = [&] {
    std::vector<Buffer> all;
    while (Buffer one = b.node.engine.allocate(64)) all.push_back(std::move(one));
    EXPECT_GT(all.size(), 1000u);
    return std::count_if(all.begin(), all.end(), [&](const Buffer& one) {
      return one.data() == abandoned[0] || one.data() == abandoned[1];
    });
  };
  EXPECT_EQ(reused(), 0);
  EXPECT_EQ(line.stats().outstanding, 3u);
  b.peer().resume();
  ASSERT_TRUE(b.until([&] { return line.stats().outstanding == 0; }));
  EXPECT_EQ(reused(), 2);
  // The operation was cancelled but still took place, behind the message.
  expect_bytes(b.next(Saw::message), filled(8, 3));
  EXPECT_EQ(b.look(there.index, 64), filled(64, 2));
  EXPECT_EQ(b.node.tally.completed, 3u);
  EXPECT_TRUE(line.ready());
  message.reset();
  b.finish();
}

SPINWIRE_SCENARIO(28);
TEST_P(Scenario28, SumsByMessagesAndByLeasedMemory) {
  ScenarioDriver b(GetParam());
  Connection line = b.open_line();
  b.order({.what = Do::calculate});
  const std::array<std::int32_t, 2> ones{1, 1}, twos{2, 2};
  const auto number = [](const Bytes& bytes) {
    std::int32_t value = 0;
    EXPECT_EQ(bytes.size(), sizeof value);
    std::memcpy(&value, bytes.data(), std::min(bytes.size(), sizeof value));
    return value;
  };
  EXPECT_EQ(b.run([&](const auto& done) {
               return line.send_copy(std::as_bytes(std::span(ones)), done);
             }).status,
            Status::ok);
  ASSERT_TRUE(b.until([&] { return b.came.size() == 1; }));
  EXPECT_EQ(number(b.came[0].bytes), 2);
  // Writes the numbers into the server's memory, which returns with the sum.
  LeaseReply granted = b.request(line, sizeof twos);
  ASSERT_EQ(granted.status, Status::ok);
  const auto words = std::as_bytes(std::span(twos));
  Buffer numbers = b.buffer_of({words.begin(), words.end()});
  EXPECT_EQ(b.write(line, numbers.slice(), granted.memory.region()), Status::ok);
  EXPECT_EQ(b.give_back(granted.memory), Status::ok);
  ASSERT_TRUE(b.until([&] { return b.leased.size() == 1; }));
  EXPECT_EQ(number(b.read(line, b.leased[0].slice(0, 4))), 4);
  b.leased[0].release();
  EXPECT_EQ(b.next(Saw::returned).how, ReturnedBy::release);
  EXPECT_EQ(b.came.size(), 1u);
  numbers.reset();
  b.finish();
}

ScenarioDriver::Setup long_setup(std::uint32_t longest) {
  ScenarioDriver::Setup setup;
  for (Config* c : {&setup.ours, &setup.theirs}) {
    c->connections.max_message_bytes = longest;
    c->connections.rendezvous_timeout = 5s;
    c->memory.rendezvous_bytes = longest + 2ull * kMiB;
  }
  setup.ours.memory.send_bytes = longest + 24ull * kMiB;
  return setup;
}

/// On a slow machine the longest message is a fraction of 64 MiB.
SPINWIRE_SCENARIO(29);
TEST_P(Scenario29, MessagesOfAllLengthsArriveWholeOnceInOrder) {
  const std::uint32_t longest = std::max(2 * kMiB, amount(64 * kMiB) / kMiB * kMiB);
  if (longest != 64 * kMiB) {
    RecordProperty("longest", std::to_string(longest));
  }
  ScenarioDriver b(GetParam(), long_setup(longest));
  Connection line = b.open_line();
  ASSERT_EQ(line.max_message(), longest);
  warm_up(b, line, 10);
  const std::size_t sizes[] = {0, 511, 512, 513, 4096, kMiB, longest, 4097, 1};
  std::uint32_t seed = 1;
  for (const std::size_t size : sizes) {
    Buffer data = b.node.buffer(std::max<std::size_t>(size, 1));
    (void)data.resize(size);
    fill(data.bytes(), seed++);
    ASSERT_EQ(b.start([&](const auto& done) { return line.send(data, done); }), Status::ok);
  }
  seed = 1;
  for (const std::size_t size : sizes) {
    SCOPED_TRACE(size);
    const Event seen = b.next(Saw::message);
    expect_bytes(seen, filled(size, seed++));
    EXPECT_FALSE(seen.has_immediate);
  }
  ASSERT_TRUE(b.until([&] { return b.node.tally.idle(); }));
  EXPECT_EQ(b.node.tally.ended(Status::ok), std::size(sizes));
  EXPECT_TRUE(line.ready());
  b.finish();
}

/// Calls about leases: each callback runs once, with its status.
struct Told {
  std::array<int, 8> times{};
  std::vector<Status> how;
  unsigned calls = 0;
  template <typename Call>
  void run(Call&& call) {
    const unsigned id = calls;
    const Status status = call(LeaseCallback([this, id](const LeaseReply& r) {
      ++times[id];
      how.push_back(r.status);
    }));
    ASSERT_EQ(status, Status::ok) << to_string(status);
    ++calls;
  }
};

ScenarioDriver::Setup ending_setup() {
  ScenarioDriver::Setup setup = long_setup(2 * kMiB);
  setup.peers = 2;
  for (Config* c : {&setup.ours, &setup.theirs}) {
    c->connections.peer_timeout = 2s * slowness();
  }
  return setup;
}

/// In one process the peer's engine is destroyed, which may still send a goodbye.
SPINWIRE_SCENARIO(30);
TEST_P(Scenario30, WhatWasOutstandingAtAPeerThatIsKilledEndsOnce) {
  ScenarioDriver b(GetParam(), ending_setup());
  Connection ending = b.open_line(0), other = b.open_line(1);
  const bool atomics = b.node.engine.device().atomics;
  warm_up(b, ending, 10);
  const RemoteRegion there =
      b.expose({.access = atomics ? Access::remote_all : Access::remote_read_write, .length = 64})
          .region;
  LeaseReply held = b.request(ending, 64);
  LeaseReply given = b.request(ending, 64);
  ASSERT_TRUE(held.memory && given.memory);
  Buffer ours = b.buffer_of(filled(64, 1));
  ASSERT_TRUE(b.reply_to([&](const LeaseCallback& done) {
                 return ending.lease(ours.slice(), {}, done);
               }).lease);
  (void)b.next(Saw::leased);
  Buffer longer = b.buffer_of(filled(100'000, 2));
  Buffer got = b.node.buffer(64);

  b.peer(0).pause();
  const auto outstanding = [&](auto call) { EXPECT_EQ(b.node.tally.run(call), Status::ok); };
  outstanding([&](const auto& done) { return ending.send(ours, done); });
  outstanding([&](const auto& done) { return ending.send_with_imm(ours.slice(), 1, done); });
  outstanding([&](const auto& done) { return ending.send(longer, done); });
  outstanding([&](const auto& done) { return ending.send(longer, done); });
  outstanding([&](const auto& done) { return ending.write(ours.slice(), there, done); });
  outstanding(
      [&](const auto& done) { return ending.write_with_imm(ours.slice(), there, 2, done); });
  outstanding([&](const auto& done) { return ending.read(got.slice(), there, done); });
  outstanding(
      [&](const auto& done) { return ending.write(ours.slice(), held.memory.region(), done); });
  if (atomics) {
    const RemoteRegion word = there.slice(0, 8);
    outstanding([&](const auto& done) { return ending.compare_swap(word, 0, 1, done); });
    outstanding([&](const auto& done) { return ending.fetch_add(word, 1, done); });
  }
  Told told;
  const LeaseOptions options;
  told.run([&](const auto& done) { return ending.request_memory(64, options, done); });
  told.run([&](const auto& done) { return ending.lease(ours.slice(), options, done); });
  told.run([&](const auto& done) { return held.memory.renew(60s, done); });
  told.run([&](const auto& done) { return given.memory.give_back(done); });
  b.settle();
  // On other devices the peer's device responds in its place, except where its program must.
  // On softverbs the first message, which is short, is with its peer at once.
  const std::uint64_t at_least = on_softverbs() ? b.node.tally.accepted - 1 : 2;
  EXPECT_GE(b.node.tally.outstanding(), at_least);
  EXPECT_TRUE(told.how.empty());
  EXPECT_TRUE(b.node.closed.empty());

  b.peer(0).kill();
  ASSERT_TRUE(b.until([&] { return b.node.closed.size() == 2; }));  // the line, and the commands'
  if (GetParam() == Where::two_processes) {
    for (const Error& e : b.node.closed) EXPECT_EQ(e.status, Status::peer_lost) << e.message();
  }
  b.node.tally.expect_exact();
  const std::uint64_t failed =
      b.node.tally.ended(Status::peer_lost) + b.node.tally.ended(Status::flushed);
  EXPECT_GE(failed, at_least);
  EXPECT_EQ(failed + b.node.tally.ended(Status::ok), b.node.tally.accepted);
  ASSERT_EQ(told.how.size(), told.calls);
  for (unsigned i = 0; i < told.calls; ++i) {
    EXPECT_EQ(told.times[i], 1) << i;
    EXPECT_NE(told.how[i], Status::ok) << i;
  }
  // Leases have ended at both sides: borrowed memory is unusable, lent memory is ours again.
  EXPECT_FALSE(held.memory);
  EXPECT_EQ(held.memory.renew(1s), Status::not_connected);
  ASSERT_TRUE(b.until([&] { return b.returned.size() == 2; }));
  for (const Event& e : b.returned) EXPECT_EQ(e.how, ReturnedBy::end);

  // The engine's other connections are not affected.
  EXPECT_TRUE(other.ready());
  EXPECT_EQ(b.run([&](const auto& done) { return other.send(longer, done); }).status, Status::ok);
  expect_bytes(b.next(Saw::message, 1, 1), filled(100'000, 2));
  LeaseReply living = b.request(other, 64);
  ASSERT_EQ(living.status, Status::ok);
  EXPECT_EQ(b.write(other, ours.slice(), living.memory.region()), Status::ok);
  EXPECT_EQ(b.give_back(living.memory), Status::ok);
  expect_bytes(b.next(Saw::returned, 1, 1), filled(64, 1));
  ours.reset();
  longer.reset();
  got.reset();
  b.node.stale_allowed = true;
  b.finish();
}

}  // namespace
}  // namespace scenarios_messages_test
