// Scenarios about rights and times of leases, by number; see scenarios_together_test.cc for the
// table.
#include <gtest/gtest.h>

#include <chrono>
#include <optional>

#include "scenarios/scenario_driver.h"

namespace scenarios_leases_test {
namespace {

using namespace scenarios;  // names of the scenarios' own
using std::chrono::steady_clock;

SPINWIRE_SCENARIO(15);
TEST_P(Scenario15, AConnectionGivesTheRightsOfItsCap) {
  ScenarioDriver b(GetParam());
  b.order({.what = Do::configure, .access = Access::remote_read});
  Connection capped = b.open_line();
  b.order({.what = Do::configure, .access = Access::remote_read_write});
  Connection other = b.open_line();
  Buffer ours = b.buffer_of(filled(64, 1));

  LeaseReply granted = b.request(capped, 64);
  ASSERT_EQ(granted.status, Status::ok);
  EXPECT_EQ(granted.memory.access(), Access::remote_read);
  EXPECT_EQ(b.read(capped, granted.memory.region()), all_of(0, 64));
  b.quiet(capped);
  const auto refused = [&](const RemoteRegion& region) {
    return b.node.tally.run(
        [&](const auto& done) { return capped.write(ours.slice(), region, done); });
  };
  EXPECT_EQ(refused(granted.memory.region()), Status::remote_access);
  EXPECT_EQ(capped.stats().outstanding, 0u);
  // A right that it may not give at all is refused.
  const LeaseReply none = b.request(capped, 64, {.access = Access::remote_write});
  EXPECT_EQ(none.status, Status::remote_access);
  EXPECT_EQ(none.refusal, LeaseRefusal::no_right);
  EXPECT_FALSE(none.memory);
  EXPECT_EQ(
      b.ask({.what = Do::expose, .access = Access::remote_write, .line = 1, .length = 64}).status,
      Status::invalid_argument);

  // The other connection has its own limit.
  LeaseReply wider = b.request(other, 64);
  ASSERT_EQ(wider.status, Status::ok);
  EXPECT_EQ(wider.memory.access(), Access::remote_read_write);
  EXPECT_EQ(b.write(other, ours.slice(), wider.memory.region()), Status::ok);
  EXPECT_EQ(b.give_back(wider.memory), Status::ok);
  expect_bytes(b.next(Saw::returned, 2), filled(64, 1));

  // If a peer uses the right anyway, the device refuses the access and only that connection ends.
  RemoteRegion forged = granted.memory.detach();
  forged.access = Access::remote_read_write;
  EXPECT_EQ(b.write(capped, ours.slice(), forged), Status::remote_access);
  ASSERT_TRUE(b.until([&] { return !b.node.closed.empty(); }));
  EXPECT_EQ(b.node.closed[0].status, Status::remote_access);
  const Event back = b.next(Saw::returned, 1);
  EXPECT_EQ(back.how, ReturnedBy::end);
  expect_bytes(back, all_of(0, 64));
  EXPECT_NE(b.next(Saw::closed, 1).status, Status::ok);
  EXPECT_TRUE(other.ready());
  EXPECT_EQ(b.run([&](const auto& done) { return other.send(ours, done); }).status, Status::ok);
  expect_bytes(b.next(Saw::message, 2), filled(64, 1));
  ours.reset();
  b.node.stale_allowed = true;
  b.finish();
}

/// Leases with a time. With both ends in one process, only the test moves the time.
struct Timed : ScenarioDriver {
  explicit Timed(Where where) : ScenarioDriver(where, setup()) {}
  static Setup setup() {
    Setup setup;
    setup.own_time = true;
    return setup;
  }
  /// Scales a time to the speed of this machine.
  static Nanoseconds scaled(std::chrono::milliseconds time) { return time * slowness(); }

  /// Memory that was written in time. If a slow machine exceeds the lease, the write is refused,
  /// the server has the memory back, and the test tries again.
  RemoteMemory written(Connection line, std::size_t bytes, Nanoseconds time, std::uint32_t seed) {
    const Buffer data = buffer_of(filled(bytes, seed));
    for (int tries = 0; tries < 20; ++tries) {
      begun = steady_clock::now();
      LeaseReply granted = request(line, bytes, {.duration = time});
      EXPECT_EQ(granted.status, Status::ok) << to_string(granted.refusal);
      EXPECT_EQ(granted.duration, time);
      std::optional<Status> ended;
      const Status status = line.write(data.slice(), granted.memory.region(),
                                       [&ended](const Completion& c) { ended = c.status; });
      if (status == Status::ok) {
        EXPECT_TRUE(until([&] { return ended.has_value(); }));
        EXPECT_EQ(ended, Status::ok);
        return std::move(granted.memory);
      }
      expect_too_late(status, time);
    }
    ADD_FAILURE() << "never in time";
    return {};
  }
  /// This result is right only if the time is really over.
  void expect_too_late(Status status, Nanoseconds time) {
    EXPECT_EQ(status, Status::lease_expired) << to_string(status);
    EXPECT_FALSE(own_time()) << "no time has passed";
    EXPECT_GE(steady_clock::now() - begun, time - guard());
    EXPECT_EQ(next(Saw::returned).how, ReturnedBy::expiry);
  }
  void expire(const RemoteMemory& memory, Nanoseconds time) {
    if (own_time()) {
      EXPECT_GT(memory.time_left(), Nanoseconds(0));
      pass(2 * time);
    }
    ASSERT_TRUE(until([&] { return memory.time_left() == Nanoseconds(0); }));
    // Not before its time.
    if (!own_time()) {
      EXPECT_GE(steady_clock::now() - begun, time - guard());
    }
  }
  /// The server gets the memory back once no earlier operation can still be retransmitted.
  Event expired() {
    if (own_time()) pass(std::chrono::seconds(10));
    return next(Saw::returned);
  }
  [[nodiscard]] Nanoseconds guard() const { return node.engine.config().leases.guard; }
  steady_clock::time_point begun;
};

SPINWIRE_SCENARIO(16);
TEST_P(Scenario16, ALeaseThatIsOverAndOneThatIsGivenBackInTime) {
  Timed b(GetParam());
  Connection line = b.open_line();
  const Nanoseconds brief = Timed::scaled(100ms), longer = Timed::scaled(500ms);
  RemoteMemory memory = b.written(line, 64, brief, 1);
  ASSERT_TRUE(memory);
  b.expire(memory, brief);
  EXPECT_EQ(b.give_back(memory), Status::lease_expired);
  const Event over = b.expired();
  EXPECT_EQ(over.how, ReturnedBy::expiry);
  EXPECT_TRUE(over.requested);
  expect_bytes(over, filled(64, 1));
  memory.release();  // nothing is left to release
  for (int tries = 0; tries < 20; ++tries) {
    memory = b.written(line, 64, longer, 2);
    ASSERT_TRUE(memory);
    const Status status = b.give_back(memory);
    if (status == Status::ok) break;
    b.expect_too_late(status, longer);
  }
  ASSERT_FALSE(memory);
  const Event back = b.next(Saw::returned);
  EXPECT_EQ(back.how, ReturnedBy::give_back);
  expect_bytes(back, filled(64, 2));
  EXPECT_TRUE(line.ready());
  b.finish();
}

SPINWIRE_SCENARIO(17);
TEST_P(Scenario17, OperationsOnALeaseThatIsOverFailAndTheConnectionStays) {
  Timed b(GetParam());
  Connection line = b.open_line();
  const Nanoseconds brief = Timed::scaled(100ms);
  RemoteMemory memory = b.written(line, 64, brief, 1);
  ASSERT_TRUE(memory);
  const RemoteRegion region = memory.region();
  b.expire(memory, brief);
  Buffer ours = b.buffer_of(filled(64, 2));
  const auto accepted_before = b.node.tally.accepted;
  const auto started = [&](auto call) { return b.node.tally.run(call); };
  for (int when = 0; when < 2; ++when) {  // before the owner has it back, and after
    EXPECT_EQ(started([&](const auto& done) { return line.read(ours.slice(), region, done); }),
              Status::lease_expired);
    EXPECT_EQ(started([&](const auto& done) { return line.write(ours.slice(), region, done); }),
              Status::lease_expired);
    EXPECT_EQ(started([&](const auto& done) {
                return line.write_with_imm(ours.slice(), region, 1, done);
              }),
              Status::lease_expired);
    if (when == 0) expect_bytes(b.expired(), filled(64, 1));
  }
  EXPECT_EQ(b.node.tally.accepted, accepted_before);
  EXPECT_TRUE(line.ready());
  EXPECT_EQ(b.run([&](const auto& done) { return line.send(ours, done); }).status, Status::ok);
  expect_bytes(b.next(Saw::message), filled(64, 2));
  EXPECT_TRUE(b.node.closed.empty());
  ours.reset();
  memory.release();
  b.finish();
}

}  // namespace
}  // namespace scenarios_leases_test
