// Scenarios about memory, its slices and its rights, by number; see scenarios_together_test.cc for
// the table.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <utility>

#include "scenarios/scenario_driver.h"
#include "trust_pages.h"

namespace scenarios_memory_test {
namespace {

using namespace scenarios;  // names of the scenarios' own

SPINWIRE_SCENARIO(8);
TEST_P(Scenario8, AtomicsOutOfPlaceAreErrorsAndNothingIsPosted) {
  ScenarioDriver b(GetParam());
  if (!b.node.engine.device().atomics) GTEST_SKIP() << "the device has no atomics";
  Connection line = b.open_line();
  const Report there = b.expose({.access = Access::remote_all, .length = 16});
  LeaseReply granted = b.request(line, 16, {.access = Access::remote_all});
  ASSERT_EQ(granted.status, Status::ok);
  b.quiet(line);
  const auto doorbells = b.node.engine.stats().doorbells;
  for (const RemoteRegion& region : {there.region, granted.memory.region()}) {
    const auto refused = [&](const RemoteRegion& at) {
      return b.node.tally.run([&](const auto& done) { return line.compare_swap(at, 0, 1, done); });
    };
    EXPECT_EQ(refused(region.slice(1, 8)), Status::invalid_argument);
    EXPECT_EQ(refused(region.slice(0, 4)), Status::out_of_bounds);
    EXPECT_EQ(refused(region.slice(12, 8)), Status::out_of_bounds);
  }
  EXPECT_EQ(line.stats().outstanding, 0u);
  EXPECT_EQ(b.node.engine.stats().doorbells, doorbells);
  EXPECT_EQ(b.node.tally.accepted, 0u);
  EXPECT_EQ(b.look(there.index, 16), all_of(0, 16));
  EXPECT_EQ(b.give_back(granted.memory), Status::ok);
  expect_bytes(b.next(Saw::returned), all_of(0, 16));
  EXPECT_TRUE(line.ready());
  b.finish();
}

struct Part {
  std::size_t begin, end;
};
constexpr Part kParts[] = {{0, 4096}, {2048, 4096}, {1000, 4000}, {1234, 1235}};

SPINWIRE_SCENARIO(11);
TEST_P(Scenario11, SlicesOfLocalMemoryAreExact) {
  ScenarioDriver b(GetParam());
  Connection line = b.open_line();
  const Report there = b.expose({.length = 4096});
  Buffer local = b.buffer_of(filled(4096, 3)), blank = b.buffer_of(all_of(0xee, 4096));
  for (const Part& part : kParts) {
    const std::size_t length = part.end - part.begin;
    const BufferSlice slice = local.slice(part.begin, length);
    ASSERT_TRUE(slice);
    EXPECT_EQ(slice.data(), local.data() + part.begin);
    EXPECT_EQ(slice.size(), length);
    // An operation moves exactly the slice.
    ASSERT_EQ(b.write(line, blank.slice(), there.region), Status::ok);
    ASSERT_EQ(b.run([&](const auto& done) { return line.write(slice, there.region, done); }).bytes,
              length);
    Bytes expected = all_of(0xee, 4096);
    std::copy_n(slice.data(), length, expected.begin());
    EXPECT_EQ(b.look(there.index, 4096), expected);
    // So does a read.
    ASSERT_EQ(b.write(line, local.slice(), there.region), Status::ok);
    Buffer got = b.buffer_of(all_of(0xee, 4096));
    const BufferSlice into = got.slice(part.begin, length);
    ASSERT_EQ(b.run([&](const auto& done) { return line.read(into, there.region, done); }).status,
              Status::ok);
    expected = all_of(0xee, 4096);
    std::copy_n(local.data(), length, expected.begin() + static_cast<std::ptrdiff_t>(part.begin));
    EXPECT_EQ(Bytes(got.data(), got.data() + 4096), expected);
  }
  const BufferSlice five = local.slice(0, 5);
  std::memcpy(five.data(), "hello", 5);
  EXPECT_EQ(std::memcmp(local.data(), "hello", 5), 0);
  EXPECT_EQ(local.data()[5], filled(8, 3)[5]);
  // Offsets in a slice of a slice count from the inner slice.
  EXPECT_EQ(local.slice(1000, 3000).slice(234, 1).data(), local.data() + 1234);
}

/// Slices of a server's memory, whose contents `look` returns.
template <typename Look>
void expect_exact_parts(ScenarioDriver& b, Connection line, const RemoteRegion& whole,
                        Look&& look) {
  Buffer blank = b.buffer_of(all_of(0xee, 4096));
  for (const Part& part : kParts) {
    const std::size_t length = part.end - part.begin;
    const RemoteRegion slice = whole.slice(part.begin, length);
    ASSERT_TRUE(slice);
    EXPECT_EQ(slice.address, whole.address + part.begin);
    EXPECT_EQ(slice.length, length);
    EXPECT_EQ(std::pair(slice.rkey, slice.lease), std::pair(whole.rkey, whole.lease));
    EXPECT_EQ(slice.access, whole.access);
    ASSERT_EQ(b.write(line, blank.slice(), whole), Status::ok);
    Buffer local = b.buffer_of(filled(length, 5));
    ASSERT_EQ(b.write(line, local.slice(), slice), Status::ok);
    Bytes expected = all_of(0xee, 4096);
    std::copy_n(local.data(), length, expected.begin() + static_cast<std::ptrdiff_t>(part.begin));
    EXPECT_EQ(look(), expected);
    EXPECT_EQ(b.read(line, slice), filled(length, 5));
  }
  const auto words = std::as_bytes(std::span("hello", 5));
  const Bytes hello(words.begin(), words.end());
  const Buffer ours = b.buffer_of(hello);
  ASSERT_EQ(b.write(line, ours.slice(), whole.slice(0, 5)), Status::ok);
  EXPECT_EQ(b.read(line, whole.slice(0, 5)), hello);
  const Bytes all = look();
  EXPECT_EQ(Bytes(all.begin(), all.begin() + 5), hello);
  EXPECT_EQ(all[5], std::byte{0xee});
}

SPINWIRE_SCENARIO(12);
TEST_P(Scenario12, SlicesOfRemoteMemoryAreExact) {
  ScenarioDriver b(GetParam());
  Connection line = b.open_line();
  const Report there = b.expose({.length = 4096});
  expect_exact_parts(b, line, there.region, [&] { return b.look(there.index, 4096); });
  // Repeats it with memory that the server leases to us.
  const Report leased = b.ask({.what = Do::lease, .length = 4096});
  ASSERT_EQ(leased.status, Status::ok);
  ASSERT_TRUE(b.until([&] { return b.leased.size() == 1; }));
  const RemoteMemory memory = std::move(b.leased[0]);
  expect_exact_parts(b, line, memory.region(), [&] { return b.look(leased.index, 4096); });
}

SPINWIRE_SCENARIO(13);
TEST_P(Scenario13, SlicesThatAreNoneAreErrorsAndNothingIsPosted) {
  ScenarioDriver b(GetParam());
  Connection c = b.open_line();
  const Report there = b.expose({.seed = 1, .length = 4096});
  LeaseReply granted = b.request(c, 4096);
  ASSERT_EQ(granted.status, Status::ok);
  Buffer local = b.buffer_of(filled(4096, 2));
  constexpr auto kReversed = static_cast<std::size_t>(-2);  // [2, 0)
  constexpr std::pair<std::size_t, std::size_t> kNone[] = {{2, kReversed}, {0, 4097}, {4097, 0}};
  b.quiet(c);
  const auto doorbells = b.node.engine.stats().doorbells;
  const auto refused = [&](const BufferSlice& ours, const RemoteRegion& theirs) {
    return b.node.tally.run([&](const auto& d) { return c.write(ours, theirs, d); }) ==
               Status::out_of_bounds &&
           b.node.tally.run([&](const auto& d) { return c.read(ours, theirs, d); }) ==
               Status::out_of_bounds;
  };
  for (const RemoteRegion& whole : {there.region, granted.memory.region()}) {
    for (const auto& [offset, length] : kNone) {
      EXPECT_FALSE(local.slice(offset, length)) << offset;
      EXPECT_FALSE(local.slice().slice(offset, length)) << offset;
      EXPECT_FALSE(whole.slice(offset, length)) << offset;
      EXPECT_TRUE(refused(local.slice(offset, length), whole)) << offset;
      EXPECT_TRUE(refused(local.slice(0, 4), whole.slice(offset, length))) << offset;
      EXPECT_EQ(c.send(local.slice(offset, length)), Status::out_of_bounds);
      EXPECT_EQ(c.write_with_imm(local.slice(offset, length), whole, 1), Status::out_of_bounds);
    }
    // A message may be empty, but a one-sided operation may not.
    EXPECT_TRUE(refused(local.slice(0, 0), whole));
    EXPECT_TRUE(refused(local.slice(0, 0), whole.slice(0, 0)));
    EXPECT_TRUE(refused(local.slice(0, 1), whole.slice(0, 0)));
    // Longer than its destination.
    EXPECT_TRUE(refused(local.slice(0, 5), whole.slice(4092, 4)));
  }
  EXPECT_FALSE(granted.memory.slice(2, kReversed));
  EXPECT_FALSE(granted.memory.slice(0, 4097));
  EXPECT_EQ(c.expose(local.slice(0, 0), Access::remote_read).error().status,
            Status::invalid_argument);
  EXPECT_EQ(c.lease(local.slice(0, 0), {}), Status::out_of_bounds);
  EXPECT_EQ(c.stats().outstanding, 0u);
  EXPECT_EQ(b.node.engine.stats().doorbells, doorbells);
  EXPECT_EQ(b.look(there.index, 4096), filled(4096, 1));
  EXPECT_EQ(b.give_back(granted.memory), Status::ok);
  expect_bytes(b.next(Saw::returned), all_of(0, 4096));
  EXPECT_TRUE(c.ready());
  local.reset();
  b.finish();
}

SPINWIRE_SCENARIO(14);
TEST_P(Scenario14, MemoryThatMayOnlyBeReadCannotBeWritten) {
  ScenarioDriver b(GetParam());
  Connection line = b.open_line();
  Buffer ours = b.buffer_of(filled(64, 1));
  const auto refused = [&](const RemoteRegion& region) {
    return b.node.tally.run(
        [&](const auto& done) { return line.write(ours.slice(), region, done); });
  };
  const Report leased =
      b.ask({.what = Do::lease, .access = Access::remote_read, .seed = 2, .length = 64});
  ASSERT_EQ(leased.status, Status::ok);
  ASSERT_TRUE(b.until([&] { return b.leased.size() == 1; }));
  b.quiet(line);
  // Refused at the writer, before anything is posted,
  EXPECT_EQ(b.leased[0].access(), Access::remote_read);
  EXPECT_EQ(refused(b.leased[0].region()), Status::remote_access);
  EXPECT_EQ(line.stats().outstanding, 0u);
  EXPECT_EQ(b.read(line, b.leased[0].region()), filled(64, 2));
  // and in the other direction,
  EXPECT_EQ(b.reply_to([&](const LeaseCallback& done) {
               return line.lease(ours.slice(), {.access = Access::remote_read}, done);
             }).status,
            Status::ok);
  (void)b.next(Saw::leased);
  EXPECT_EQ(b.ask({.what = Do::write, .index = 0, .seed = 9, .length = 64}).status,
            Status::remote_access);
  Bytes read;
  EXPECT_EQ(b.ask({.what = Do::read, .index = 0, .length = 64}, &read).status, Status::ok);
  EXPECT_EQ(read, filled(64, 1));
  // and by the device, if the writer uses the right anyway.
  RemoteRegion forged = b.leased[0].detach();
  forged.access = Access::remote_read_write;
  EXPECT_EQ(b.write(line, ours.slice(), forged), Status::remote_access);
  EXPECT_EQ(b.look(leased.index, 64), filled(64, 2));
  ASSERT_TRUE(b.until([&] { return !b.returned.empty() && !b.node.closed.empty(); }));
  expect_bytes(b.returned[0], filled(64, 1));
  EXPECT_EQ(b.node.closed[0].status, Status::remote_access);
  EXPECT_EQ(b.next(Saw::returned).how, ReturnedBy::end);
  EXPECT_NE(b.next(Saw::closed).status, Status::ok);
  ours.reset();
  b.node.stale_allowed = true;
  b.finish();
}

SPINWIRE_SCENARIO(26);
TEST_P(Scenario26, MemoryHasTheLengthAlignmentAndZeroesAskedFor) {
  ScenarioDriver b(GetParam());
  Connection line = b.open_line();
  for (const std::size_t size : {1u, 8u, 4095u, 4096u, 70'000u}) {
    const Buffer ours = b.node.buffer(size);
    EXPECT_EQ(ours.size(), size);
    EXPECT_GE(ours.capacity(), size);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(ours.data()) % 64, 0u);
    Buffer dirt = b.buffer_of(filled(size, 7));
    for (const std::uint32_t alignment : {1u, 8u, 64u, 4096u}) {
      // Twice: the second time the block holds old data.
      for (int round = 0; round < 2; ++round) {
        LeaseReply granted = b.request(line, size, {.alignment = alignment});
        ASSERT_EQ(granted.status, Status::ok) << to_string(granted.refusal);
        EXPECT_EQ(granted.memory.size(), size);
        EXPECT_EQ(granted.memory.region().address % alignment, 0u);
        EXPECT_EQ(b.read(line, granted.memory.region()), all_of(0, size));
        EXPECT_EQ(b.write(line, dirt.slice(), granted.memory.region()), Status::ok);
        EXPECT_EQ(b.give_back(granted.memory), Status::ok);
        expect_bytes(b.next(Saw::returned), filled(size, 7));
      }
    }
  }
  EXPECT_FALSE(b.node.engine.allocate(0));
  EXPECT_EQ(b.node.engine.allocate_status(), Status::invalid_argument);
  b.finish();
}

TEST_P(Scenario26, RightsAreExactlyThoseGiven) {
  ScenarioDriver b(GetParam());
  const bool atomics = b.node.engine.device().atomics;
  std::vector<Access> all = {Access::remote_read, Access::remote_write, Access::remote_read_write};
  if (atomics) all.insert(all.end(), {Access::remote_atomic, Access::remote_all});
  Buffer ours = b.buffer_of(filled(8, 1));
  for (const Access access : all) {
    Connection line = b.open_line();
    const std::uint32_t number = b.peer().lines;
    const Report there = b.expose({.access = access, .line = number, .seed = 2, .length = 8});
    EXPECT_EQ(there.region.access, access);
    // The device decides, whatever rights the region claims.
    RemoteRegion claimed = there.region;
    claimed.access = Access::remote_all;
    const auto allowed = [&](auto call) {
      const Status status = b.run(call).status;
      if (status == Status::ok) return true;
      EXPECT_EQ(status, Status::remote_access);
      // The error ends the connection.
      EXPECT_TRUE(b.until([&] { return line.state() == ConnectionState::closed; }));
      (void)b.next(Saw::closed, number);
      line = b.open_line();
      return false;
    };
    std::uint32_t before = b.peer().lines;
    EXPECT_EQ(allowed([&](const auto& done) { return line.read(ours.slice(), claimed, done); }),
              allows(access, Access::remote_read));
    if (b.peer().lines != before) continue;  // one refusal suffices for this key
    EXPECT_EQ(allowed([&](const auto& done) { return line.write(ours.slice(), claimed, done); }),
              allows(access, Access::remote_write));
    if (b.peer().lines != before || !atomics) continue;
    EXPECT_EQ(allowed([&](const auto& done) { return line.fetch_add(claimed, 1, done); }),
              allows(access, Access::remote_atomic));
  }
  ours.reset();
  b.node.stale_allowed = true;
  b.finish();
}

TEST_P(Scenario26, MemoryOfTheUsersOwnIsUsedAtBothEnds) {
  const TrustPages trust("1");
  ScenarioDriver b(GetParam());
  Connection line = b.open_line();
  const Report there = b.expose({.own_memory = true, .seed = 1, .length = 3000});
  Bytes own = filled(5000, 2);
  {
    auto region = b.node.engine.register_memory(own, Access::local);
    ASSERT_TRUE(region) << region.error().message();
    EXPECT_FALSE(region->remote());
    EXPECT_EQ(b.read(line, there.region), filled(3000, 1));
    EXPECT_EQ(b.write(line, region->slice(1000, 3000), there.region), Status::ok);
    EXPECT_EQ(b.look(there.index, 3000), Bytes(own.begin() + 1000, own.begin() + 4000));
    EXPECT_EQ(b.run([&](const auto& done) { return line.send(region->slice(0, 100), done); }).bytes,
              100u);
    const Bytes all = filled(5000, 2);
    expect_bytes(b.next(Saw::message), Bytes(all.begin(), all.begin() + 100));
  }
  // Our memory, leased to the server and written by it.
  {
    auto region = line.register_memory(own, Access::local);
    ASSERT_TRUE(region) << region.error().message();
    EXPECT_EQ(b.reply_to([&](const LeaseCallback& done) {
                 return line.lease(region->slice(4000, 1000), {}, done);
               }).status,
              Status::ok);
    EXPECT_EQ(b.next(Saw::leased).size, 1000u);
    b.order({.what = Do::write, .index = 0, .seed = 3, .length = 1000});
    b.order({.what = Do::give_back, .index = 0});
    ASSERT_TRUE(b.until([&] { return b.returned.size() == 1; }));
    EXPECT_EQ(b.returned[0].how, ReturnedBy::give_back);
    expect_bytes(b.returned[0], filled(1000, 3));
    Bytes expected = filled(5000, 2);
    fill(std::span(expected).subspan(4000), 3);
    EXPECT_EQ(own, expected);
  }
  b.finish();
}

TEST_P(Scenario26, TwoEnginesHaveTheirOwn) {
  ScenarioDriver b(GetParam(), {.peers = 2});
  Node second(scenario_config());
  Connection first_line = b.open_line(0), other_line = b.open_line(1);
  const Report there = b.expose({.length = 512}, 0), elsewhere = b.expose({.length = 512}, 1);
  Buffer ours = b.buffer_of(filled(512, 1)), theirs = second.filled(512, 2);
  EXPECT_EQ(b.write(first_line, ours.slice(), there.region), Status::ok);
  EXPECT_EQ(b.look(there.index, 512), filled(512, 1));
  // Memory of another engine's pools is refused before anything is posted, and the connection
  // stays.
  EXPECT_EQ(b.node.tally.run([&](const auto& done) {
    return first_line.write(theirs.slice(), there.region, done);
  }),
            Status::invalid_argument);
  EXPECT_TRUE(b.node.tally.idle());
  EXPECT_EQ(b.look(there.index, 512), filled(512, 1));
  EXPECT_EQ(b.write(first_line, ours.slice(), there.region), Status::ok);
  // The other connection is not affected.
  EXPECT_EQ(b.write(other_line, ours.slice(), elsewhere.region), Status::ok);
  EXPECT_EQ(b.read(other_line, elsewhere.region), filled(512, 1));
  ours.reset();
  theirs.reset();
  second.expect_clean();
  b.node.stale_allowed = true;
  b.finish();
}

ScenarioDriver::Setup own_domains() {
  ScenarioDriver::Setup setup;
  setup.theirs.connections.own_domains = 1;
  setup.theirs.connections.credits = 16;
  setup.theirs.memory.receive_bytes = 4u << 20;
  return setup;
}

SPINWIRE_SCENARIO(27);
TEST_P(Scenario27, AConnectionWithItsOwnProtectionDomainMovesData) {
  ScenarioDriver b(GetParam(), own_domains());
  Connection sharing = b.open_line();
  b.order({.what = Do::configure, .access = Access::remote_read_write, .own_domain = true});
  Connection owning = b.open_line();
  const Report there = b.expose({.line = 2, .seed = 1, .length = 64});
  Buffer ours = b.buffer_of(filled(64, 2));
  EXPECT_EQ(b.read(owning, there.region), filled(64, 1));
  EXPECT_EQ(b.write(owning, ours.slice(), there.region), Status::ok);
  EXPECT_EQ(b.look(there.index, 64), filled(64, 2));
  EXPECT_EQ(b.run([&](const auto& done) { return owning.send(ours, done); }).status, Status::ok);
  expect_bytes(b.next(Saw::message, 2), filled(64, 2));
  b.order({.what = Do::send, .line = 2, .seed = 3, .length = 64});
  ASSERT_TRUE(b.until([&] { return b.came.size() == 1; }));
  EXPECT_EQ(b.came[0].bytes, filled(64, 3));
  LeaseReply granted = b.request(owning, 64);
  ASSERT_EQ(granted.status, Status::ok);
  EXPECT_EQ(b.write(owning, ours.slice(), granted.memory.region()), Status::ok);
  EXPECT_EQ(b.give_back(granted.memory), Status::ok);
  expect_bytes(b.next(Saw::returned, 2), filled(64, 2));
  // Another connection of the same engine cannot access it.
  fill(ours.bytes(), 4);
  EXPECT_EQ(b.write(sharing, ours.slice(), there.region), Status::remote_access);
  EXPECT_NE(b.next(Saw::closed, 1).status, Status::ok);
  EXPECT_EQ(b.look(there.index, 64), filled(64, 2));
  EXPECT_TRUE(owning.ready());
  ours.reset();
  b.node.stale_allowed = true;
  b.finish();
}

/// An engine is a protection domain, so another process has another domain.
TEST_P(Scenario27, AKeyOfOneDomainIsNoneInAnother) {
  ScenarioDriver b(GetParam(), {.peers = 2});
  Connection first = b.open_line(0), second = b.open_line(1);
  // The third exposure, as the other process would use the same numbers for its first.
  Report secret;
  for (int i = 0; i < 3; ++i) secret = b.expose({.seed = 1, .length = 64}, 0);
  const Report shared = b.expose({.seed = 2, .length = 64}, 1);
  Buffer ours = b.buffer_of(filled(64, 3));
  EXPECT_EQ(b.write(second, ours.slice(), shared.region), Status::ok);
  EXPECT_EQ(b.read(second, shared.region), filled(64, 3));
  EXPECT_EQ(b.write(second, ours.slice(), secret.region), Status::remote_access);
  EXPECT_NE(b.next(Saw::closed, 1, 1).status, Status::ok);
  EXPECT_EQ(b.look(secret.index, 64), filled(64, 1));
  EXPECT_TRUE(first.ready());
  EXPECT_EQ(b.read(first, secret.region), filled(64, 1));
  ours.reset();
  b.node.stale_allowed = true;
  b.finish();
}

}  // namespace
}  // namespace scenarios_memory_test
