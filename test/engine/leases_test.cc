// Remote memory: requested, leased, used, given back, expired, recalled, and what a hostile or
// dying end makes of it.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/harness.h"

namespace leases_test {
namespace {

using namespace engine_test;  // names of a test namespace of its own
using spinwire::LeaseCallback;
using spinwire::LeaseId;
using spinwire::LeaseLimits;
using spinwire::LeaseOptions;
using spinwire::LeaseRefusal;
using spinwire::LeaseReply;
using spinwire::Nanoseconds;
using spinwire::RemoteMemory;
using spinwire::Returned;
using spinwire::ReturnedBy;

/// By what memory is opened to the peer.
enum class By { window, registration, own_domain };

Config lease_config(By by = By::window) {
  Config c = small_config();
  c.memory.windows = by == By::window ? 64 : 0;
  c.leases.maximum = 128;
  c.queues.completion_depth = 8192;
  if (by == By::own_domain) {
    c.connections.own_domains = 2;
    c.memory.receive_bytes = 4u << 20;
  }
  return c;
}

struct Came {
  LeaseId lease;
  ReturnedBy how;
  bool requested;
  std::vector<std::byte> bytes;
  BufferSlice memory;
};

std::vector<std::byte> bytes_of(const BufferSlice& slice) {
  return {slice.data(), slice.data() + slice.size()};
}

/// A client that uses the memory of a server, and both ends' news.
struct Leases : Pair {
  explicit Leases(const Config& c = lease_config(), const std::uint64_t* ticks = nullptr)
      : Pair(c, ticks) {
    watch();
  }
  explicit Leases(By by, const std::uint64_t* ticks = nullptr) : Leases(lease_config(by), ticks) {
    if (by != By::own_domain) return;
    EXPECT_EQ(ends.client.close(), Status::ok);
    spinwire::ConnectionSettings own;
    own.own_domain = true;
    server.on_accept = [own](Connection c) { EXPECT_TRUE(c.configure(own)); };
    server.ready.clear();
    ConnectOptions options;
    options.handlers = client.handlers();
    options.settings = own;
    auto made = client.engine.connect(server.listener.address(), options);
    EXPECT_TRUE(made) << made.error().message();
    EXPECT_TRUE(until([&] {
      return made->ready() && !server.ready.empty() && !client.closed.empty() &&
             !server.closed.empty();
    }));
    client.closed.clear();
    server.closed.clear();
    ends = {*made, server.ready.back()};
  }
  void watch() {
    server.on_returned = [this](Connection, const Returned& r) {
      returned.push_back({r.lease, r.how, r.requested,
                          r.memory ? bytes_of(r.memory) : std::vector<std::byte>(),
                          keep ? r.memory : BufferSlice()});
    };
    client.on_lease = [this](Connection, RemoteMemory& memory) {
      if (take) leased.push_back(std::move(memory));
    };
  }
  /// Asks and waits for the answer.
  RemoteMemory request(std::size_t bytes, const LeaseOptions& options = {}) {
    RemoteMemory memory;
    reply.reset();
    const Status status = ends.client.request_memory(bytes, options, [&](LeaseReply& r) {
      EXPECT_FALSE(reply.has_value()) << "told twice";
      reply = {r.status, r.refusal, r.time};
      memory = std::move(r.memory);
    });
    EXPECT_EQ(status, Status::ok) << to_string(status);
    if (status == Status::ok) {
      EXPECT_TRUE(until([&] { return reply.has_value(); }));
    }
    return memory;
  }
  Status write(const RemoteRegion& to, std::uint32_t seed, Status expected = Status::ok) {
    const Buffer b = client.filled(to.length, seed);
    std::optional<Status> ended;
    const Status status =
        ends.client.write(b.slice(), to, [&](const Completion& c) { ended = c.status; });
    if (status == Status::ok) {
      EXPECT_TRUE(until([&] { return ended.has_value(); }));
      EXPECT_EQ(*ended, expected) << to_string(*ended);
    }
    return status;
  }
  std::vector<std::byte> read(const RemoteRegion& from) {
    Buffer b = client.buffer(from.length);
    std::optional<Status> ended;
    EXPECT_EQ(ends.client.read(b.slice(0, from.length), from,
                               [&](const Completion& c) { ended = c.status; }),
              Status::ok);
    EXPECT_TRUE(until([&] { return ended.has_value(); }));
    EXPECT_EQ(ended.value_or(Status::system), Status::ok);
    return {b.data(), b.data() + from.length};
  }
  template <typename... Buffers>
  void finish(Buffers&... left) {
    (left.reset(), ...);
    leased.clear();
    returned.clear();
    Pair::finish();
    // Those of connections that ended are made anew.
    const auto windows = [](const Node& node) {
      return !on_softverbs() ||
             node.engine.stats().windows_free == node.engine.config().memory.windows;
    };
    EXPECT_TRUE(until([&] { return windows(client) && windows(server); }));
    for (const Node* node : {&client, &server}) {
      for (const Error& e : node->closed) EXPECT_EQ(e.status, Status::ok) << e.message();
    }
  }

  struct Told {
    Status status;
    LeaseRefusal refusal;
    Nanoseconds time;
  };
  std::optional<Told> reply;
  std::vector<Came> returned;
  std::vector<RemoteMemory> leased;
  bool take = true, keep = false;
};

std::vector<std::byte> zeroes(std::size_t size) { return std::vector<std::byte>(size); }
std::vector<std::byte> filled(std::size_t size, std::uint32_t seed) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = Node::pattern(seed, i);
  return bytes;
}

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
    for (int round = 0; round < 3; ++round) {  // the block is dirty from the last one
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
  // In one go: the writes are on their way when it is given back.
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
  // The owner's application has it for as long as it wants.
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
  b.reset();  // the lease keeps it
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
  // One that is not moved away is released.
  t.take = false;
  ASSERT_EQ(t.ends.server.lease(b.slice(), {}), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 2; }));
  EXPECT_EQ(t.returned[1].how, ReturnedBy::release);
  t.finish(b);
}

TEST(EngineLeasesLimits, EachRefusalTellsItsReason) {
  Config c = lease_config();
  c.leases.bytes = 64u << 10;
  c.leases.total_bytes = 100u << 10;
  c.leases.count = 3;
  c.leases.alignment = 1024;
  c.leases.longest = 2s;
  Leases t(c);
  LeaseOptions good;
  good.time = 1s;
  const auto refused = [&](std::size_t bytes, const LeaseOptions& options, LeaseRefusal why,
                           Status status) {
    SCOPED_TRACE(to_string(why));
    EXPECT_FALSE(t.request(bytes, options));
    EXPECT_EQ(t.reply->refusal, why) << to_string(t.reply->refusal);
    EXPECT_EQ(t.reply->status, status);
  };
  refused((64u << 10) + 1, good, LeaseRefusal::too_long, Status::limit);
  for (const std::uint32_t alignment : {0u, 3u, 2048u}) {
    LeaseOptions o = good;
    o.alignment = alignment;
    refused(8, o, LeaseRefusal::misaligned, Status::limit);
  }
  LeaseOptions late = good;
  late.time = 3s;
  refused(8, late, LeaseRefusal::bad_time, Status::limit);
  LeaseOptions aligned = good;
  aligned.alignment = 1024;
  RemoteMemory first = t.request(64u << 10, aligned);
  ASSERT_TRUE(first);
  EXPECT_EQ(first.region().address % 1024, 0u);
  refused((36u << 10) + 1, good, LeaseRefusal::too_much, Status::limit);
  const RemoteMemory second = t.request(36u << 10, good);
  ASSERT_TRUE(second);
  refused(1, good, LeaseRefusal::too_much, Status::limit);
  first.release();
  const RemoteMemory third = t.request(8, good), fourth = t.request(8, good);
  ASSERT_TRUE(third && fourth);
  refused(8, good, LeaseRefusal::too_many, Status::limit);
  t.finish();
}

TEST(EngineLeasesLimits, APoolThatIsDryIsToldAndServesAgain) {
  Config c = lease_config();
  c.leases.bytes = 4u << 20;
  Leases t(c);
  RemoteMemory most = t.request(3u << 20);
  ASSERT_TRUE(most) << to_string(t.reply->refusal);
  EXPECT_FALSE(t.request(2u << 20));
  EXPECT_EQ(t.reply->refusal, LeaseRefusal::no_room);
  EXPECT_EQ(t.reply->status, Status::no_buffer);
  most.release();
  EXPECT_TRUE(t.request(2u << 20));
  t.finish();
}

TEST(EngineLeasesLimits, AConnectionHasItsOwn) {
  Leases t;
  spinwire::ConnectionSettings tight;
  LeaseLimits limits;
  limits.bytes = 16;
  limits.alignment = 3;
  tight.leases = limits;
  bool told = false;
  t.server.on_accept = [&](Connection c) {
    const auto bad = c.configure(tight);
    ASSERT_FALSE(bad);
    EXPECT_EQ(bad.error().status, Status::invalid_argument);
    tight.leases->alignment = 4;
    EXPECT_TRUE(c.configure(tight));
    told = true;
  };
  const Ends other = connect(t.client, t.server);
  ASSERT_TRUE(told);
  std::optional<LeaseRefusal> why;
  ASSERT_EQ(other.client.state(), ConnectionState::ready);
  Connection second = other.client;
  ASSERT_EQ(second.request_memory(17, {}, [&](LeaseReply& r) { why = r.refusal; }), Status::ok);
  ASSERT_TRUE(t.until([&] { return why.has_value(); }));
  EXPECT_EQ(*why, LeaseRefusal::too_long);
  EXPECT_TRUE(t.request(17));  // the first one's are the engine's
  t.finish();
}

TEST(EngineLeasesLimits, RightsAreThoseThatBothWant) {
  Config c = lease_config();
  c.queue_pair.access = Access::remote_read;
  Leases t(c);
  LeaseOptions options;
  RemoteMemory memory = t.request(64, options);
  ASSERT_TRUE(memory);
  EXPECT_EQ(memory.access(), Access::remote_read);
  EXPECT_EQ(t.write(memory.region(), 1), Status::remote_access);
  EXPECT_EQ(t.read(memory.region()), zeroes(64));
  options.access = Access::remote_write;
  EXPECT_FALSE(t.request(64, options));
  EXPECT_EQ(t.reply->refusal, LeaseRefusal::no_right);
  EXPECT_EQ(t.reply->status, Status::remote_access);
  memory.release();
  // Ours: not more than the connection may give.
  Buffer b = t.server.filled(64, 1);
  EXPECT_EQ(t.ends.server.lease(b.slice(), options), Status::invalid_argument);
  t.finish(b);
}

TEST(EngineLeasesLimits, WhatIsNoLeaseIsNotAsked) {
  Leases t;
  const LeaseCallback never = [](LeaseReply&) { ADD_FAILURE() << "a refused call is told of"; };
  LeaseOptions o;
  EXPECT_EQ(t.ends.client.request_memory(0, o, never), Status::invalid_argument);
  o.access = Access::local;
  EXPECT_EQ(t.ends.client.request_memory(8, o, never), Status::invalid_argument);
  o.access = static_cast<Access>(9);
  EXPECT_EQ(t.ends.client.request_memory(8, o, never), Status::invalid_argument);
  o = {};
  o.time = t.client.engine.config().leases.guard;
  EXPECT_EQ(t.ends.client.request_memory(8, o, never), Status::invalid_argument);
  o.time = 2h;
  EXPECT_EQ(t.ends.client.request_memory(8, o, never), Status::invalid_argument);
  EXPECT_EQ(t.ends.client.lease({}, {}, never), Status::out_of_bounds);
  EXPECT_EQ(t.ends.client.recall(LeaseId{}), Status::invalid_argument);
  EXPECT_EQ(t.ends.client.recall(LeaseId{0x10001}), Status::invalid_argument);
  EXPECT_EQ(Connection().request_memory(8, {}, never), Status::not_connected);
  RemoteMemory none;
  EXPECT_EQ(none.renew(1s), Status::not_connected);
  EXPECT_EQ(none.give_back(), Status::not_connected);
  EXPECT_FALSE(none.detach());
  EXPECT_EQ(none.time_left(), 0s);
  none.release();
  // Records: as many as there are, the rest waits.
  std::vector<RemoteMemory> held;
  std::size_t accepted = 0;
  Status last = Status::ok;
  for (int i = 0; i < 200 && last == Status::ok; ++i) {
    last = t.ends.client.request_memory(
        8, {}, [&](LeaseReply& r) { held.push_back(std::move(r.memory)); });
    accepted += last == Status::ok ? 1 : 0;
  }
  EXPECT_EQ(last, Status::would_block);
  EXPECT_GE(accepted, 32u);
  ASSERT_TRUE(t.until([&] { return held.size() == accepted; }));
  held.clear();
  ASSERT_TRUE(t.until([&] { return t.returned.size() == accepted; }));
  t.finish();
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

/// Time that the test moves.
struct Timed : Leases {
  explicit Timed(By by) : Leases(by, &now) {}
  explicit Timed(const Config& c) : Leases(c, &now) {}
  void pass(Nanoseconds time) {
    now += static_cast<std::uint64_t>(time.count());
    settle(20);
  }
  static inline std::uint64_t now = 1'000'000'000;
};

/// Within this time after its end an operation may still be repeated by the device.
Nanoseconds worst_retries(const Config& c) {
  return Nanoseconds(4 * (std::int64_t{4096} << c.queue_pair.ack_timeout) *
                     (c.queue_pair.retry_count + 1));
}

TEST_P(EngineLeases, TimeEndsItAtTheHolderFirst) {
  Timed t(GetParam());
  LeaseOptions options;
  options.time = 500ms;
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
  // The owner waits for what may be under way still.
  t.pass(worst_retries(t.server.engine.config()) - 10ms);
  EXPECT_TRUE(t.returned.empty());
  EXPECT_EQ(t.server.engine.memory_stats(Pool::lease).blocks_used, 1u);
  t.pass(20ms);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  EXPECT_EQ(t.returned[0].how, ReturnedBy::expiry);
  EXPECT_EQ(t.returned[0].bytes, filled(64, 1));
  EXPECT_EQ(t.server.engine.memory_stats(Pool::lease).blocks_used, 0u);
  memory.release();  // crosses nothing, and harms nothing
  t.settle();
  EXPECT_EQ(t.ends.client.state(), ConnectionState::ready);
  EXPECT_EQ(t.ends.server.state(), ConnectionState::ready);
  t.finish(b);
}

TEST_P(EngineLeases, RenewedItLastsLonger) {
  Timed t(GetParam());
  LeaseOptions options;
  options.time = 500ms;
  RemoteMemory memory = t.request(64, options);
  ASSERT_TRUE(memory);
  for (int i = 0; i < 20; ++i) {
    t.pass(400ms);
    std::optional<Status> renewed;
    Nanoseconds time{0};
    ASSERT_EQ(memory.renew(500ms,
                           [&](LeaseReply& r) {
                             renewed = r.status;
                             time = r.time;
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
  EXPECT_EQ(*why, LeaseRefusal::bad_time);
  EXPECT_LE(memory.time_left(), 500ms);
  t.pass(500ms + worst_retries(t.server.engine.config()) + 10ms);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  EXPECT_EQ(t.returned[0].how, ReturnedBy::expiry);
  t.finish();
}

TEST_P(EngineLeases, ALateAccessFailsInTheDeviceAndCostsItsConnectionAlone) {
  Timed t(GetParam());
  const Ends other = GetParam() == By::own_domain ? Ends{} : connect(t.client, t.server);
  LeaseOptions options;
  options.time = 500ms;
  RemoteMemory memory = t.request(64, options);
  ASSERT_TRUE(memory);
  const RemoteRegion key = memory.detach();  // nobody looks at the time any more
  EXPECT_FALSE(memory);
  ASSERT_TRUE(key && key.lease == 0);
  EXPECT_EQ(t.write(key, 2), Status::ok);
  t.pass(500ms + worst_retries(t.server.engine.config()) + 10ms);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  EXPECT_EQ(t.returned[0].how, ReturnedBy::expiry);
  // Somebody else has the memory now.
  Buffer again = t.server.buffer(64, Pool::lease);
  std::memset(again.data(), 0x77, 64);
  EXPECT_EQ(t.write(key, 3, Status::remote_access), Status::ok);
  EXPECT_EQ(bytes_of(again.slice()), std::vector<std::byte>(64, std::byte{0x77}));
  ASSERT_TRUE(t.until([&] { return t.ends.client.state() == ConnectionState::closed; }));
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
  ASSERT_TRUE(t.until([&] { return !t.ends.server.ready(); }) || true);
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
  const RemoteRegion key = t.leased.at(0).detach();  // its engine has forgotten it, too
  ASSERT_EQ(t.ends.server.recall(id), Status::ok);
  t.settle();
  EXPECT_TRUE(t.returned.empty());
  EXPECT_EQ(t.write(key, 1), Status::ok);
  t.pass(worst_retries(t.server.engine.config()) + 2s);
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
    // A call that the end overtakes, one way or the other.
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

TEST(EngineLeasesKeys, WithoutAWindowItIsARegistration) {
  Config c = lease_config();
  c.memory.windows = 2;
  Leases t(c);
  std::vector<RemoteMemory> held;
  for (int i = 0; i < 6; ++i) {
    held.push_back(t.request(64));
    ASSERT_TRUE(held.back());
    EXPECT_EQ(t.write(held.back().region(), 1), Status::ok);
  }
  held.clear();
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 6; }));
  t.finish();
}

TEST(EngineLeasesKeys, AKeyOfOneConnectionIsRefusedToOthers) {
  Leases t;
  Buffer b = t.server.filled(64, 3);
  const auto region =
      t.ends.server.expose(b.slice(), Access::remote_write, spinwire::KeyScope::connection);
  ASSERT_TRUE(region) << region.error().message();
  const auto token = t.ends.server.token(*region);
  ASSERT_TRUE(token) << token.error().message();
  // Told by a message behind the binding.
  std::optional<RemoteRegion> came;
  t.client.on_message = [&](Connection c, Message& m) {
    auto imported = c.import_token(m.bytes());
    ASSERT_TRUE(imported) << imported.error().message();
    came = *imported;
  };
  ASSERT_EQ(t.ends.server.send_copy(*token), Status::ok);
  ASSERT_TRUE(t.until([&] { return came.has_value(); }));
  EXPECT_EQ(t.write(*came, 6), Status::ok);
  EXPECT_TRUE(Node::holds(b.slice().bytes(), 6));
  const Ends other = connect(t.client, t.server);
  const auto elsewhere = other.client.import_token(*token);
  if (on_softverbs()) {
    ASSERT_FALSE(elsewhere);
    EXPECT_EQ(elsewhere.error().status, Status::invalid_argument);
    // Who does not look loses that connection.
    Connection second = other.client;
    const Buffer mine = t.client.filled(64, 7);
    std::optional<Status> ended;
    ASSERT_EQ(second.write(mine.slice(), *came, [&](const Completion& c) { ended = c.status; }),
              Status::ok);
    ASSERT_TRUE(t.until([&] { return ended.has_value(); }));
    EXPECT_EQ(*ended, Status::remote_access);
    EXPECT_TRUE(Node::holds(b.slice().bytes(), 6));
    ASSERT_TRUE(t.until([&] { return t.client.closed.size() == 1; }));
    t.client.closed.clear();
  }
  EXPECT_EQ(t.ends.server.revoke(RemoteRegion{}), Status::invalid_argument);
  EXPECT_EQ(t.ends.server.revoke(*region), Status::ok);
  EXPECT_EQ(t.ends.server.revoke(*region), Status::invalid_argument);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  EXPECT_EQ(t.returned[0].how, ReturnedBy::recall);
  EXPECT_EQ(t.write(*came, 8, Status::remote_access), Status::ok);
  EXPECT_TRUE(Node::holds(b.slice().bytes(), 6));
  t.returned.clear();
  b.reset();
  engine_test::finish(t.client, t.server);
}

TEST(EngineLeasesKeys, TokensAreCheckedBeforeUse) {
  Leases t;
  Buffer b = t.server.filled(64, 3);
  const auto region = t.ends.server.expose(b.slice(), Access::remote_read);
  ASSERT_TRUE(region);
  const auto token = t.ends.server.token(*region);
  ASSERT_TRUE(token);
  const auto good = t.ends.client.import_token(*token);
  ASSERT_TRUE(good) << good.error().message();
  EXPECT_EQ(good->address, region->address);
  EXPECT_EQ(good->rkey, region->rkey);
  EXPECT_EQ(t.read(*good), filled(64, 3));
  for (std::size_t at = 0; at < token->size(); ++at) {
    spinwire::RegionToken bad = *token;
    bad[at] ^= std::byte{1};
    const auto refused = t.ends.client.import_token(bad);
    ASSERT_FALSE(refused) << "byte " << at;
    EXPECT_EQ(refused.error().status, Status::protocol);
  }
  EXPECT_FALSE(t.ends.client.import_token(std::span(*token).first(47)));
  EXPECT_FALSE(t.ends.client.import_token({}));
  // Of another engine: our own.
  const auto own = t.ends.server.import_token(*token);
  ASSERT_FALSE(own);
  EXPECT_EQ(own.error().status, Status::invalid_argument);
  EXPECT_FALSE(t.ends.server.token({}));
  const RemoteMemory leased = t.request(8);
  ASSERT_TRUE(leased);
  EXPECT_FALSE(t.ends.client.token(leased.region()));
  EXPECT_EQ(t.server.engine.revoke(*region), Status::ok);
  t.finish(b);
}

}  // namespace
}  // namespace leases_test
