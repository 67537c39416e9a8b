// Remote memory: requested, leased, used, given back, expired, recalled, and with a late or dying
// peer. lease_limits_test.cc has the refusals.
#include "engine/lease_ends.h"

namespace leases_test {
namespace {

using namespace leases;  // NOLINT: a test's helpers

class EngineLeases : public testing::TestWithParam<By> {};
INSTANTIATE_TEST_SUITE_P(By, EngineLeases,
                         testing::Values(By::window, By::registration, By::own_domain),
                         [](const auto& by) {
                           return by.param == By::window         ? "Window"
                                  : by.param == By::registration ? "Registration"
                                                                 : "OwnDomain";
                         });

TEST_P(EngineLeases, RequestedIsZeroedUsedAndReleasedOnDrop) {
  Leases t(GetParam());
  for (const std::size_t size : {std::size_t{1}, std::size_t{8}, std::size_t{4096},
                                 std::size_t{64} << 10, std::size_t{700'001}}) {
    SCOPED_TRACE(size);
    for (int round = 0; round < 3; ++round) {  // the last round left data in the block
      RemoteMemory memory = t.request(size);
      ASSERT_TRUE(memory) << to_string(t.reply->status) << " " << to_string(t.reply->refusal);
      EXPECT_EQ(memory.size(), size);
      EXPECT_EQ(memory.access(), Access::remote_read_write);
      EXPECT_EQ(memory.connection(), t.ends.client);
      EXPECT_EQ(t.reply->time, 60s);
      EXPECT_GT(memory.time_left(), 50s);
      EXPECT_LT(memory.time_left(), 60s);
      EXPECT_EQ(t.read(memory.region()), zeroes(size));
      EXPECT_EQ(t.write(memory.region(), 5), Status::ok);
      EXPECT_EQ(t.read(memory.region()), filled(size, 5));
      EXPECT_EQ(t.server.engine.memory_stats(Pool::lease).blocks_used, 1u);
      memory.release();
      EXPECT_FALSE(memory);
      ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
      EXPECT_EQ(t.returned[0].how, ReturnedBy::release);
      EXPECT_TRUE(t.returned[0].requested);
      EXPECT_EQ(t.returned[0].bytes, filled(size, 5));
      EXPECT_EQ(t.server.engine.memory_stats(Pool::lease).blocks_used, 0u);
      t.returned.clear();
    }
  }
  t.finish();
}

TEST_P(EngineLeases, GivenBackIsSeenBehindAllThatWasWritten) {
  Leases t(GetParam());
  t.keep = true;
  RemoteMemory memory = t.request(64);
  ASSERT_TRUE(memory);
  Buffer b = t.client.filled(16, 9);
  std::optional<Status> replied;
  // All at once: the writes are in flight when the memory is given back.
  for (int i = 0; i < 4; ++i) {
    ASSERT_EQ(t.ends.client.write(b.slice(), memory.slice(static_cast<std::uint64_t>(i) * 16, 16),
                                  {}, Post::defer),
              Status::ok);
  }
  ASSERT_EQ(memory.give_back([&](LeaseReply& r) { replied = r.status; }), Status::ok);
  EXPECT_FALSE(memory);
  ASSERT_TRUE(t.until([&] { return replied.has_value() && !t.returned.empty(); }));
  EXPECT_EQ(*replied, Status::ok);
  ASSERT_EQ(t.returned.size(), 1u);
  EXPECT_EQ(t.returned[0].how, ReturnedBy::give_back);
  for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(t.returned[0].bytes[i], Node::pattern(9, i % 16));
  // The owner's application keeps it as long as it wants.
  EXPECT_EQ(t.server.engine.memory_stats(Pool::lease).blocks_used, 1u);
  t.finish(b);
}

TEST_P(EngineLeases, OursIsLeasedUsedAndComesBack) {
  Leases t(GetParam());
  Buffer b = t.server.filled(4096, 3);
  std::optional<Status> taken;
  LeaseId id;
  ASSERT_EQ(t.ends.server.lease(b.slice(96, 4000), {},
                                [&](LeaseReply& r) {
                                  taken = r.status;
                                  id = r.lease;
                                }),
            Status::ok);
  b.reset();  // the lease keeps the block
  ASSERT_TRUE(t.until([&] { return t.leased.size() == 1 && taken.has_value(); }));
  EXPECT_EQ(*taken, Status::ok);
  EXPECT_TRUE(id);
  RemoteMemory memory = std::move(t.leased[0]);
  EXPECT_EQ(memory.size(), 4000u);
  const std::vector<std::byte> all = filled(4096, 3);
  EXPECT_EQ(t.read(memory.slice(1000, 500)),
            std::vector<std::byte>(all.begin() + 1096, all.begin() + 1596));
  EXPECT_EQ(t.write(memory.slice(0, 8), 7), Status::ok);
  EXPECT_EQ(t.ends.server.snapshot().leased_out, 1u);
  EXPECT_EQ(t.ends.server.snapshot().leased_out_bytes, 4000u);
  EXPECT_EQ(t.ends.client.snapshot().leases_held, 1u);
  EXPECT_EQ(t.ends.client.snapshot().leases_held_bytes, 4000u);
  { const RemoteMemory dropped = std::move(memory); }
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  EXPECT_EQ(t.returned[0].lease, id);
  EXPECT_EQ(t.returned[0].how, ReturnedBy::release);
  EXPECT_FALSE(t.returned[0].requested);
  EXPECT_EQ(std::vector<std::byte>(t.returned[0].bytes.begin(), t.returned[0].bytes.begin() + 8),
            filled(8, 7));
  EXPECT_EQ(t.ends.server.snapshot().leased_out, 0u);
  t.finish(b);
}

TEST_P(EngineLeases, MemoryOfTheApplicationsOwnIsLeased) {
  Leases t(GetParam());
  std::vector<std::byte> own(8192, std::byte{1});
  auto region = t.ends.server.register_memory(own, Access::local);
  ASSERT_TRUE(region) << region.error().message();
  ASSERT_EQ(t.ends.server.lease(region->slice(4096, 4096), {}), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.leased.size() == 1; }));
  EXPECT_EQ(t.write(t.leased[0].slice(0, 16), 4), Status::ok);
  ASSERT_EQ(t.leased[0].give_back(), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  EXPECT_EQ(std::vector<std::byte>(own.begin() + 4096, own.begin() + 4112), filled(16, 4));
  EXPECT_EQ(own[4095], std::byte{1});
  t.finish();
}

TEST_P(EngineLeases, WhatNobodyTakesIsRefused) {
  Leases t(GetParam());
  spinwire::ConnectionHandlers none;
  ASSERT_EQ(t.ends.client.set_handlers(none), Status::ok);
  Buffer b = t.server.filled(64, 1);
  std::optional<LeaseRefusal> why;
  std::optional<Status> status;
  ASSERT_EQ(t.ends.server.lease(b.slice(), {},
                                [&](LeaseReply& r) {
                                  why = r.refusal;
                                  status = r.status;
                                }),
            Status::ok);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  EXPECT_EQ(why, LeaseRefusal::unwanted);
  EXPECT_EQ(status, Status::refused);
  EXPECT_EQ(t.returned[0].how, ReturnedBy::refusal);
  ASSERT_EQ(t.ends.client.set_handlers(t.client.handlers()), Status::ok);
  // A RemoteMemory that is not moved out is released.
  t.take = false;
  ASSERT_EQ(t.ends.server.lease(b.slice(), {}), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 2; }));
  EXPECT_EQ(t.returned[1].how, ReturnedBy::release);
  t.finish(b);
}

TEST_P(EngineLeases, PartsHaveBoundsAndAConnection) {
  Leases t(GetParam());
  RemoteMemory memory = t.request(64);
  ASSERT_TRUE(memory);
  EXPECT_FALSE(memory.slice(65, 0));
  EXPECT_FALSE(memory.slice(0, 65));
  EXPECT_FALSE(memory.slice(~std::uint64_t{0}, 2));
  Buffer b = t.client.filled(64, 1);
  RemoteRegion forged = memory.slice(32, 32);
  forged.length = 33;
  EXPECT_EQ(t.ends.client.write(b.slice(0, 33), forged), Status::out_of_bounds);
  forged = memory.region();
  --forged.address;
  EXPECT_EQ(t.ends.client.write(b.slice(0, 8), forged), Status::out_of_bounds);
  EXPECT_EQ(t.ends.client.write(b.slice(0, 33), memory.slice(0, 32)), Status::out_of_bounds);
  if (GetParam() != By::own_domain) {
    const Ends other = connect(t.client, t.server);
    Connection second = other.client;
    EXPECT_EQ(second.write(b.slice(), memory.region()), Status::invalid_argument);
  }
  memory.release();
  t.finish(b);
}

TEST_P(EngineLeases, ANoticeNeedsNoBytes) {
  Leases t(GetParam());
  RemoteMemory memory = t.request(64);
  ASSERT_TRUE(memory);
  std::vector<std::uint32_t> notices;
  t.server.on_message = [&](Connection, Message& m) {
    EXPECT_TRUE(m.is_write());
    EXPECT_EQ(m.size(), 0u);
    notices.push_back(m.immediate().value_or(0));
  };
  Buffer b = t.client.filled(64, 1);
  Connection& c = t.ends.client;
  BufferSlice none = b.slice(0, 0);
  // At the end, too, where a part without bytes begins behind the last one.
  EXPECT_EQ(c.write_with_imm(none, memory.slice(0, 0), 1), Status::ok);
  EXPECT_EQ(c.write_with_imm(none, memory.slice(64, 0), 2), Status::ok);
  EXPECT_EQ(c.write_with_imm(none, memory.slice(8, 8), 3), Status::ok);
  ASSERT_TRUE(t.until([&] { return notices.size() == 3; }));
  EXPECT_EQ(notices, (std::vector<std::uint32_t>{1, 2, 3}));
  // Nothing else may be empty.
  EXPECT_EQ(c.write_with_imm(b.slice(0, 1), memory.slice(0, 0), 4), Status::out_of_bounds);
  EXPECT_EQ(c.write(none, memory.slice(0, 0)), Status::out_of_bounds);
  EXPECT_EQ(c.read(none, memory.slice(0, 0)), Status::out_of_bounds);
  EXPECT_EQ(c.read(b.slice(0, 8), memory.slice(0, 0)), Status::out_of_bounds);
  EXPECT_NE(c.fetch_add(memory.slice(0, 0), 1), Status::ok);
  EXPECT_EQ(t.read(memory.region()), zeroes(64));
  memory.release();
  t.server.on_message = nullptr;
  none = {};
  t.finish(b);
}

TEST_P(EngineLeases, AtomicsOnALeaseWork) {
  Leases t(GetParam());
  if (!t.client.engine.device().atomics) GTEST_SKIP() << "the device has no atomics";
  LeaseOptions options;
  options.access = Access::remote_all;
  RemoteMemory memory = t.request(64, options);
  ASSERT_TRUE(memory);
  std::vector<std::uint64_t> found;
  const CompletionCallback done = [&](const Completion& c) {
    EXPECT_EQ(c.status, Status::ok);
    found.push_back(c.value);
  };
  EXPECT_EQ(t.ends.client.fetch_add(memory.slice(8, 8), 5, done), Status::ok);
  EXPECT_EQ(t.ends.client.compare_swap(memory.slice(8, 8), 5, 9, done), Status::ok);
  EXPECT_EQ(t.ends.client.fetch_add(memory.slice(4, 8), 5, done), Status::invalid_argument);
  ASSERT_TRUE(t.until([&] { return found.size() == 2; }));
  EXPECT_EQ(found[0], 0u);
  EXPECT_EQ(found[1], 5u);
  ASSERT_EQ(memory.give_back(), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  std::uint64_t word = 0;
  std::memcpy(&word, t.returned[0].bytes.data() + 8, 8);
  EXPECT_EQ(word, 9u);
  t.finish();
}

TEST_P(EngineLeases, TimeEndsItAtTheHolderFirst) {
  Timed t(GetParam());
  LeaseOptions options;
  options.duration = 500ms;
  RemoteMemory memory = t.request(64, options);
  ASSERT_TRUE(memory);
  const RemoteRegion region = memory.region();
  const Nanoseconds guard = t.client.engine.config().leases.guard;
  t.pass(498ms);
  EXPECT_EQ(t.write(region, 1), Status::ok);
  EXPECT_GT(memory.time_left(), 0s);
  t.pass(2ms - guard);
  EXPECT_EQ(memory.time_left(), 0s);
  Buffer b = t.client.filled(64, 1);
  EXPECT_EQ(t.ends.client.write(b.slice(), region), Status::lease_expired);
  EXPECT_EQ(t.ends.client.read(b.slice(), region), Status::lease_expired);
  EXPECT_EQ(t.ends.client.write_with_imm(b.slice(), region, 1), Status::lease_expired);
  EXPECT_EQ(t.ends.client.fetch_add(region.slice(0, 8), 1), Status::lease_expired);
  EXPECT_EQ(memory.renew(1s), Status::lease_expired);
  EXPECT_EQ(memory.give_back(), Status::lease_expired);
  EXPECT_EQ(t.ends.client.state(), ConnectionState::ready);
  // The owner waits for operations that may be in flight.
  t.pass(max_retry_ticks(t.server.engine.config()) - 10ms);
  EXPECT_TRUE(t.returned.empty());
  EXPECT_EQ(t.server.engine.memory_stats(Pool::lease).blocks_used, 1u);
  t.pass(20ms);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  EXPECT_EQ(t.returned[0].how, ReturnedBy::expiry);
  EXPECT_EQ(t.returned[0].bytes, filled(64, 1));
  EXPECT_EQ(t.server.engine.memory_stats(Pool::lease).blocks_used, 0u);
  memory.release();  // crosses nothing and harms nothing
  t.settle();
  EXPECT_EQ(t.ends.client.state(), ConnectionState::ready);
  EXPECT_EQ(t.ends.server.state(), ConnectionState::ready);
  t.finish(b);
}

TEST_P(EngineLeases, RenewedItLastsLonger) {
  Timed t(GetParam());
  LeaseOptions options;
  options.duration = 500ms;
  RemoteMemory memory = t.request(64, options);
  ASSERT_TRUE(memory);
  for (int i = 0; i < 20; ++i) {
    t.pass(400ms);
    std::optional<Status> renewed;
    Nanoseconds time{0};
    ASSERT_EQ(memory.renew(500ms,
                           [&](LeaseReply& r) {
                             renewed = r.status;
                             time = r.duration;
                           }),
              Status::ok);
    EXPECT_EQ(memory.renew(500ms), Status::would_block) << "one call at a time";
    ASSERT_TRUE(t.until([&] { return renewed.has_value(); }));
    EXPECT_EQ(*renewed, Status::ok);
    EXPECT_EQ(time, 500ms);
    EXPECT_EQ(t.write(memory.region(), 1), Status::ok);
  }
  std::optional<LeaseRefusal> why;
  ASSERT_EQ(memory.renew(1h, [&](LeaseReply& r) { why = r.refusal; }), Status::ok);
  ASSERT_TRUE(t.until([&] { return why.has_value(); }));
  EXPECT_EQ(*why, LeaseRefusal::bad_duration);
  EXPECT_LE(memory.time_left(), 500ms);
  t.pass(500ms + max_retry_ticks(t.server.engine.config()) + 10ms);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  EXPECT_EQ(t.returned[0].how, ReturnedBy::expiry);
  t.finish();
}

TEST_P(EngineLeases, ALateAccessFailsInTheDeviceAndCostsItsConnectionAlone) {
  Timed t(GetParam());
  const Ends other = GetParam() == By::own_domain ? Ends{} : connect(t.client, t.server);
  LeaseOptions options;
  options.duration = 500ms;
  RemoteMemory memory = t.request(64, options);
  ASSERT_TRUE(memory);
  const RemoteRegion key = memory.detach();  // the engine no longer checks the time
  EXPECT_FALSE(memory);
  ASSERT_TRUE(key && key.lease == 0);
  EXPECT_EQ(t.write(key, 2), Status::ok);
  t.pass(500ms + max_retry_ticks(t.server.engine.config()) + 10ms);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  EXPECT_EQ(t.returned[0].how, ReturnedBy::expiry);
  // Another user has the memory now.
  Buffer again = t.server.buffer(64, Pool::lease);
  std::memset(again.data(), 0x77, 64);
  EXPECT_EQ(t.write(key, 3, Status::remote_access), Status::ok);
  EXPECT_EQ(bytes_of(again.slice()), std::vector<std::byte>(64, std::byte{0x77}));
  // Not every device reports the refused access to the owner. Then the ends detect each other's
  // silence, for which time must pass.
  const auto until_later = [&](auto&& done) {
    return t.until([&] {
      if (!on_softverbs()) Timed::now += 1'000'000;
      return done();
    });
  };
  ASSERT_TRUE(until_later([&] { return t.ends.client.state() == ConnectionState::closed; }));
  ASSERT_EQ(t.client.closed.size(), 1u);
  EXPECT_EQ(t.client.closed[0].status, Status::remote_access);
  if (other.client.ready()) {
    Connection second = other.client;
    std::optional<Status> ended;
    const Buffer b = t.client.filled(8, 1);
    EXPECT_EQ(second.send(b, [&](const Completion& c) { ended = c.status; }), Status::ok);
    ASSERT_TRUE(t.until([&] { return ended.has_value(); }));
    EXPECT_EQ(*ended, Status::ok);
  }
  again.reset();
  t.client.closed.clear();
  ASSERT_TRUE(until_later([&] { return !t.ends.server.ready(); }));
  t.returned.clear();
  engine_test::finish(t.client, t.server);
}

TEST_P(EngineLeases, RecalledItIsReleasedAtOnce) {
  Timed t(GetParam());
  Buffer b = t.server.filled(64, 3);
  LeaseId id;
  ASSERT_EQ(t.ends.server.lease(b.slice(), {}, [&](LeaseReply& r) { id = r.lease; }), Status::ok);
  ASSERT_TRUE(t.until([&] { return static_cast<bool>(id); }));
  RemoteMemory memory = std::move(t.leased.at(0));
  const RemoteRegion region = memory.region();
  EXPECT_EQ(t.write(region, 8), Status::ok);
  ASSERT_EQ(t.ends.server.recall(id), Status::ok);
  EXPECT_EQ(t.ends.server.recall(id), Status::invalid_argument);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  EXPECT_EQ(t.returned[0].how, ReturnedBy::recall);
  EXPECT_EQ(t.returned[0].bytes, filled(64, 8));
  EXPECT_FALSE(memory);
  Buffer mine = t.client.filled(64, 1);
  EXPECT_EQ(t.ends.client.write(mine.slice(), region), Status::lease_expired);
  EXPECT_EQ(memory.give_back(), Status::not_connected);
  t.settle();
  EXPECT_EQ(t.ends.client.state(), ConnectionState::ready);
  t.finish(b, mine);
}

TEST_P(EngineLeases, AHolderThatDoesNotLookLosesItAllTheSame) {
  Timed t(GetParam());
  Buffer b = t.server.filled(64, 3);
  LeaseId id;
  ASSERT_EQ(t.ends.server.lease(b.slice(), {}, [&](LeaseReply& r) { id = r.lease; }), Status::ok);
  ASSERT_TRUE(t.until([&] { return static_cast<bool>(id); }));
  const RemoteRegion key = t.leased.at(0).detach();  // the engine has forgotten it as well
  ASSERT_EQ(t.ends.server.recall(id), Status::ok);
  t.settle();
  EXPECT_TRUE(t.returned.empty());
  EXPECT_EQ(t.write(key, 1), Status::ok);
  t.pass(max_retry_ticks(t.server.engine.config()) + 2s);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  EXPECT_EQ(t.returned[0].how, ReturnedBy::recall);
  t.finish(b);
}

TEST_P(EngineLeases, AllEndsWithTheConnection) {
  for (const bool by_server : {false, true}) {
    Leases t(GetParam());
    RemoteMemory held = t.request(4096);
    ASSERT_TRUE(held);
    Buffer b = t.server.filled(64, 3);
    ASSERT_EQ(t.ends.server.lease(b.slice(), {}), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.leased.size() == 1; }));
    std::optional<Status> replied;
    // A call that crosses the end, in either order.
    ASSERT_EQ(t.ends.client.request_memory(8, {},
                                           [&](LeaseReply& r) {
                                             EXPECT_FALSE(replied.has_value());
                                             replied = r.status;
                                           }),
              Status::ok);
    EXPECT_EQ((by_server ? t.ends.server : t.ends.client).close(), Status::ok);
    ASSERT_TRUE(t.until([&] {
      return t.server.engine.stats().connections == 0 && t.client.engine.stats().connections == 0;
    }));
    EXPECT_TRUE(replied.has_value());
    EXPECT_FALSE(held);
    EXPECT_FALSE(t.leased[0]);
    ASSERT_GE(t.returned.size(), 2u);
    for (const Came& came : t.returned) {
      EXPECT_TRUE(came.how == ReturnedBy::end || came.bytes.size() == 8) << to_string(came.how);
    }
    held.release();
    t.finish(b);
  }
}

TEST_P(EngineLeases, HandlesMayOutliveTheirEngine) {
  std::optional<Leases> t(std::in_place, GetParam());
  RemoteMemory held = t->request(4096);
  ASSERT_TRUE(held);
  t.reset();
  EXPECT_FALSE(held);
  EXPECT_EQ(held.give_back(), Status::not_connected);
  EXPECT_EQ(held.time_left(), 0s);
  held.release();
}

TEST_P(EngineLeases, ManyAtOnceComeAndGo) {
  Leases t(GetParam());
  std::vector<RemoteMemory> held;
  std::size_t asked = 0, refused = 0;
  std::uint32_t dice = 1;
  for (int i = 0; i < 100'000 && asked < 600; ++i) {
    dice = dice * 1664525 + 1013904223;
    if (dice >> 30 != 0) {
      const Status status =
          t.ends.client.request_memory(1 + (dice >> 8) % 3000, {}, [&](LeaseReply& r) {
            if (r.status == Status::ok)
              held.push_back(std::move(r.memory));
            else
              ++refused;
          });
      asked += status == Status::ok ? 1 : 0;
    } else if (!held.empty()) {
      const std::size_t at = (dice >> 8) % held.size();
      if (dice % 2 == 0) (void)held[at].give_back();
      std::swap(held[at], held.back());
      held.pop_back();
    }
    t.settle(1);
  }
  ASSERT_TRUE(t.until([&] { return t.ends.client.snapshot().leases_held == held.size(); }));
  EXPECT_EQ(t.ends.client.snapshot().leases_held, held.size());
  EXPECT_GT(asked, 500u);
  held.clear();
  ASSERT_TRUE(t.until([&] { return t.returned.size() == asked - refused; }));
  EXPECT_EQ(t.ends.server.snapshot().leased_out, 0u);
  t.finish();
}

}  // namespace
}  // namespace leases_test
