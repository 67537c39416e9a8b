// Scenarios of users of an asynchronous framework, by number, and where they are:
//
//    1 requested, written, given back                    here
//    2 a message                                         here
//    3 an immediate beside a message                     here
//    4 messages with and without one, in order           scenarios_messages_test.cc
//    5 ours, leased to the peer, who reads it            here
//    6 a write with an immediate                         here
//    7 compare-and-swap                                  here
//    8 atomics out of place                              scenarios_memory_test.cc
//    9 all these on each of four connections             here
//   10 a burst into a receiver that does not look        scenarios_messages_test.cc
//   11 slices of local memory                            scenarios_memory_test.cc
//   12 slices of remote memory                           scenarios_memory_test.cc
//   13 slices that are none                              scenarios_memory_test.cc
//   14 memory that may only be read                      scenarios_memory_test.cc
//   15 a connection that gives fewer rights              scenarios_leases_test.cc
//   16 a lease whose time is over, and one in time       scenarios_leases_test.cc
//   17 operations on a lease that is over                scenarios_leases_test.cc
//   18 operations given up in flight                     scenarios_messages_test.cc, EngineCancel,
//                                                        scenarios_raw_test.cc
//   19 the state of a queue pair, cached and queried     async_rdma_test.cc
//   20 endpoints swapped out of band                     async_rdma_test.cc, EngineOutOfBand
//   21 raw mode                                          scenarios_raw_test.cc, EngineRaw
//   22 16 bytes echoed through rdma_cm                   async_rdma_test.cc, RdmaCm
//   23 nothing moves unless polled                       async_rdma_test.cc
//   24 a completion queue too small for a burst          async_rdma_test.cc
//   25 more than there can be, of each capacity          async_rdma_test.cc, by connection in
//                                ConfigConnectionAttributes.OutOfRangeNamesAskedAndAvailable
//   26 lengths, alignments, rights, two engines          scenarios_memory_test.cc
//   27 a protection domain of a connection's own         scenarios_memory_test.cc, EngineOwnDomain
//   28 remote calls by messages, and by leased memory    scenarios_messages_test.cc
//   29 messages from none to 64 MiB                      scenarios_messages_test.cc
//   30 a peer that is killed                             scenarios_messages_test.cc, PeerLoss
//
// Most of these scenarios run with both ends in one process and with each in its own, on
// the device that SPINWIRE_TEST_DEVICE names.
#include <gtest/gtest.h>

#include <optional>

#include "scenarios/scenario_driver.h"

namespace scenarios_together_test {
namespace {

using namespace scenarios;  // names of the scenarios' own

/// A connection, by our name and the server's.
struct Line {
  Connection ours;
  std::uint32_t number;
};
Line open(ScenarioDriver& b) {
  const Connection ours = b.open_line();
  return {ours, b.peer().lines};
}

void scenario_1(ScenarioDriver& b, const Line& line) {
  LeaseReply granted = b.request(line.ours, 8);
  ASSERT_EQ(granted.status, Status::ok) << to_string(granted.refusal);
  RemoteMemory& memory = granted.memory;
  ASSERT_EQ(memory.size(), 8u);
  EXPECT_EQ(b.read(line.ours, memory.region()), all_of(0, 8));
  const Buffer ones = b.buffer_of(all_of(1, 8));
  EXPECT_EQ(b.write(line.ours, ones.slice(4, 4), memory.slice(4, 4)), Status::ok);
  EXPECT_EQ(b.give_back(memory), Status::ok);
  EXPECT_FALSE(memory);
  const Event seen = b.next(Saw::returned, line.number);
  EXPECT_EQ(seen.how, ReturnedBy::give_back);
  EXPECT_TRUE(seen.requested);
  expect_bytes(seen, bytes_of({0, 0, 0, 0, 1, 1, 1, 1}));
}

void expect_message(ScenarioDriver& b, const Line& line, std::optional<std::uint32_t> immediate) {
  const Event seen = b.next(Saw::message, line.number);
  expect_bytes(seen, all_of(1, 8));
  EXPECT_EQ(seen.has_immediate, immediate.has_value());
  EXPECT_EQ(seen.immediate, immediate.value_or(0));
}
void scenario_2(ScenarioDriver& b, Line line) {
  const Buffer ones = b.buffer_of(all_of(1, 8));
  const Completion end =
      b.run([&](const auto& done) { return line.ours.send(ones.slice(), done); });
  EXPECT_EQ(end.status, Status::ok);
  EXPECT_EQ(end.bytes, 8u);
  expect_message(b, line, {});
  // In the other direction.
  const std::size_t before = b.came.size();
  b.order({.what = Do::send, .line = line.number, .seed = 3, .length = 8});
  ASSERT_TRUE(b.until([&] { return b.came.size() > before; }));
  EXPECT_EQ(b.came.back().line, line.ours);
  EXPECT_EQ(b.came.back().bytes, filled(8, 3));
}
void scenario_3(ScenarioDriver& b, Line line) {
  const Buffer ones = b.buffer_of(all_of(1, 8));
  const Completion end =
      b.run([&](const auto& done) { return line.ours.send_with_imm(ones.slice(), 1, done); });
  EXPECT_EQ(end.status, Status::ok);
  expect_message(b, line, 1);
}

void scenario_5(ScenarioDriver& b, Line line) {
  Buffer ours = b.buffer_of(all_of(0, 8));
  std::memset(ours.data(), 1, 8);
  std::memset(ours.data() + 4, 2, 4);
  const Bytes expected = bytes_of({1, 1, 1, 1, 2, 2, 2, 2});
  b.returned.clear();
  const LeaseReply taken = b.reply_to(
      [&](const LeaseCallback& done) { return line.ours.lease(ours.slice(), {}, done); });
  ASSERT_EQ(taken.status, Status::ok) << to_string(taken.refusal);
  EXPECT_TRUE(taken.lease);
  const Event leased = b.next(Saw::leased, line.number);
  EXPECT_EQ(leased.size, 8u);
  // The server counts it as its lease number `line.number`.
  const std::uint32_t held = line.number - 1;
  Bytes read;
  EXPECT_EQ(
      b.ask({.what = Do::read, .line = line.number, .index = held, .length = 8}, &read).status,
      Status::ok);
  EXPECT_EQ(read, expected);
  b.order({.what = Do::release, .line = line.number, .index = held});
  ASSERT_TRUE(b.until([&] { return !b.returned.empty(); }));
  EXPECT_EQ(b.returned[0].how, ReturnedBy::release);
  EXPECT_FALSE(b.returned[0].requested);
  expect_bytes(b.returned[0], expected);
}

void scenario_6(ScenarioDriver& b, Line line) {
  const Report there = b.expose({.line = line.number, .length = 8});
  const Buffer ones = b.buffer_of(all_of(1, 4));
  const Completion end = b.run([&](const auto& done) {
    return line.ours.write_with_imm(ones.slice(), there.region.slice(4, 4), 4, done);
  });
  EXPECT_EQ(end.status, Status::ok);
  EXPECT_EQ(end.bytes, 4u);
  const Event seen = b.next(Saw::notice, line.number);
  EXPECT_EQ(seen.size, 4u);
  ASSERT_TRUE(seen.has_immediate);
  ASSERT_EQ(seen.immediate, 4u);
  // The bytes arrived before the notification.
  const Bytes expected = bytes_of({0, 0, 0, 0, 1, 1, 1, 1});
  EXPECT_EQ(seen.sum, digest(expected));
  EXPECT_NE(seen.head[seen.immediate - 1], seen.head[seen.immediate]);
  // A notification without bytes.
  const Completion bare = b.run([&](const auto& done) {
    return line.ours.write_with_imm(ones.slice(0, 0), there.region, 9, done);
  });
  EXPECT_EQ(bare.status, Status::ok);
  const Event notice = b.next(Saw::notice, line.number);
  EXPECT_EQ(notice.size, 0u);
  EXPECT_TRUE(notice.has_immediate);
  EXPECT_EQ(notice.immediate, 9u);
  EXPECT_EQ(b.look(there.index, 8), expected);
}

void scenario_7(ScenarioDriver& b, Line line) {
  const Report there = b.expose({.access = Access::remote_all, .line = line.number, .length = 8});
  constexpr std::uint64_t kOnes = 0x0101'0101'0101'0101;
  const auto swap = [&](std::uint64_t expected, std::uint64_t desired) {
    return b.run([&](const auto& done) {
      return line.ours.compare_swap(there.region, expected, desired, done);
    });
  };
  const Completion first = swap(0, kOnes);
  EXPECT_EQ(first.status, Status::ok);
  EXPECT_EQ(first.value, 0u);
  EXPECT_EQ(b.look(there.index, 8), all_of(1, 8));
  // After a mismatch the value stays, and the completion returns it.
  const Completion mismatch = swap(0, 5);
  EXPECT_EQ(mismatch.status, Status::ok);
  EXPECT_EQ(mismatch.value, kOnes);
  EXPECT_EQ(b.look(there.index, 8), all_of(1, 8));
  // A third swap finds the first one's value and restores the original.
  EXPECT_EQ(swap(kOnes, 0).value, kOnes);
  EXPECT_EQ(b.look(there.index, 8), all_of(0, 8));
}

SPINWIRE_SCENARIO(1);
TEST_P(Scenario1, WhatIsWrittenIsThereWhenItIsGivenBack) {
  ScenarioDriver b(GetParam());
  scenario_1(b, open(b));
  b.finish();
}

SPINWIRE_SCENARIO(2);
TEST_P(Scenario2, AMessageArrives) {
  ScenarioDriver b(GetParam());
  scenario_2(b, open(b));
  b.finish();
}

SPINWIRE_SCENARIO(3);
TEST_P(Scenario3, AnImmediateArrivesBesideItsMessage) {
  ScenarioDriver b(GetParam());
  scenario_3(b, open(b));
  b.finish();
}

SPINWIRE_SCENARIO(5);
TEST_P(Scenario5, ThePeerReadsWhatIsLeasedToIt) {
  ScenarioDriver b(GetParam());
  scenario_5(b, open(b));
  b.finish();
}

SPINWIRE_SCENARIO(6);
TEST_P(Scenario6, AWriteTellsItsImmediateWhenTheBytesAreThere) {
  ScenarioDriver b(GetParam());
  scenario_6(b, open(b));
  b.finish();
}

SPINWIRE_SCENARIO(7);
TEST_P(Scenario7, CompareAndSwap) {
  ScenarioDriver b(GetParam());
  if (!b.node.engine.device().atomics) GTEST_SKIP() << "the device has no atomics";
  scenario_7(b, open(b));
  b.finish();
}

SPINWIRE_SCENARIO(9);
TEST_P(Scenario9, SixScenariosOnEachOfFourConnections) {
  ScenarioDriver b(GetParam());
  std::vector<Line> lines;
  for (int i = 0; i < 4; ++i) {
    lines.push_back(open(b));
    const Line& line = lines.back();
    SCOPED_TRACE(line.number);
    scenario_2(b, line);
    scenario_3(b, line);
    scenario_5(b, line);
    scenario_1(b, line);
    scenario_6(b, line);
    if (b.node.engine.device().atomics) scenario_7(b, line);
  }
  // The earlier connections still work.
  for (const Line& line : lines) {
    EXPECT_TRUE(line.ours.ready());
    scenario_3(b, line);
  }
  EXPECT_TRUE(b.node.closed.empty());
  b.finish();
}

}  // namespace
}  // namespace scenarios_together_test
