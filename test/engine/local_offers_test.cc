// Long messages in memory of the pools between ends of the embedded device: they go without keys.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/exposed_memory.h"

namespace local_offers_by_engines_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Blocker;
using spinwire::OperationId;

constexpr std::size_t kLong = 200'000;

Config local_config() {
  Config c = small_config();
  c.memory.rendezvous_bytes = 8u << 20;
  c.memory.receive_bytes = 8u << 20;
  c.memory.windows = 3;
  c.connections.max_message_bytes = 2u << 20;
  c.connections.rendezvous_timeout = 20s * slowness();  // nothing expires unless a test moves time
  c.connections.own_domains = 2;
  c.leases.maximum = 128;
  c.queues.completion_depth = 8192;
  return c;
}

class EngineLocalOffers : public testing::Test {
 protected:
  void SetUp() override {
    if (!sends_directly()) GTEST_SKIP() << kSoftverbsOnly << "offers without keys";
  }
};

// last_operation(), and ids of operations.

/// A client whose time the test moves, with an older operation that ends in its next poll.
struct Behind : ExposedMemory {
  explicit Behind(const std::uint64_t* ticks) : ExposedMemory(local_config(), ticks) {
    expose(8192, Access::remote_read_write);
    warm_up();
    small = client.filled(64, 1);
    large = client.filled(kLong, 2);
  }
  Connection& c() { return ends.client; }
  OperationId one_sided(bool reads, std::optional<Status>& ended) {
    OperationId id;
    const auto done = [&ended](const Completion& c) { ended = c.status; };
    EXPECT_EQ(reads ? c().read(small.slice(), region.slice(0, 64), done, Post::now, &id)
                    : c().write(small.slice(), region.slice(0, 64), done, Post::now, &id),
              Status::ok);
    return id;
  }
  OperationId send() {
    OperationId id;
    const std::uint32_t windows = client.engine.stats().windows_free;
    const auto done = [this](const Completion& c) { sent = c.status; };
    EXPECT_EQ(c().send(large, done, Post::now, &id), Status::ok);
    EXPECT_EQ(client.engine.stats().windows_free, windows) << "no key is opened";
    return id;
  }
  void finish() {
    EXPECT_TRUE(until([&] { return c().stats().outstanding == 0; }));
    small.reset();
    large.reset();
    ExposedMemory::finish();
  }
  std::optional<Status> sent;
  Buffer small, large;
};

TEST_F(EngineLocalOffers, AMessageBehindAnotherOperationHasItsOwnId) {
  std::uint64_t ticks = 1'000'000'000;
  for (const bool reads : {false, true}) {
    for (const bool times_out : {false, true}) {
      SCOPED_TRACE(testing::PrintToString(reads) + testing::PrintToString(times_out));
      std::optional<Status> older;
      Behind b(&ticks);
      const OperationId first = b.one_sided(reads, older);
      EXPECT_EQ(b.c().last_operation(), first);
      const OperationId id = b.send();
      EXPECT_EQ(b.c().stats().outstanding, 2u) << "the older one has not ended";
      ASSERT_TRUE(id);
      EXPECT_NE(id, first);
      EXPECT_EQ(b.c().last_operation(), id);
      EXPECT_EQ(times_out ? b.c().set_timeout(id, 5ms) : b.c().cancel(id), Status::ok);
      if (times_out) ticks += 6'000'000;
      for (int i = 0; i < 10; ++i) (void)b.client.poll();
      EXPECT_EQ(older, Status::ok);
      EXPECT_EQ(b.sent, times_out ? Status::timed_out : Status::cancelled);
      ASSERT_NO_FATAL_FAILURE(b.finish());
    }
  }
}

TEST_F(EngineLocalOffers, AYoungerOperationIsTheLastOne) {
  std::uint64_t ticks = 1'000'000'000;
  std::optional<Status> older, younger;
  Behind b(&ticks);
  const OperationId first = b.one_sided(false, older);
  const OperationId id = b.send();
  const OperationId last = b.one_sided(false, younger);
  EXPECT_NE(last, id);
  EXPECT_EQ(b.c().last_operation(), last);
  EXPECT_NE(first, last);
  EXPECT_EQ(b.c().cancel(last), Status::ok);
  for (int i = 0; i < 10; ++i) (void)b.client.poll();
  EXPECT_EQ(older, Status::ok);
  EXPECT_EQ(younger, Status::cancelled);
  EXPECT_FALSE(b.sent);
  EXPECT_EQ(b.c().last_operation(), id) << "all that is left";
  EXPECT_EQ(b.c().cancel(id), Status::ok);
  for (int i = 0; i < 10; ++i) (void)b.client.poll();
  EXPECT_EQ(b.sent, Status::cancelled);
  EXPECT_FALSE(b.c().last_operation());
  b.finish();
}

// Memory windows.

/// Leases of the client hold all its windows.
struct Leased : Pair {
  Leased(const Config& servers, const Config& clients, const std::uint64_t* ticks = nullptr)
      : Pair(servers, clients, ticks) {
    while (client.engine.stats().windows_free != 0 && leases.size() < 20) {
      std::optional<Status> answered;
      EXPECT_TRUE(until([&] {
        return ends.server.request_memory(64, {}, [&](spinwire::LeaseReply& r) {
          answered = r.status;
          leases.push_back(std::move(r.memory));
        }) == Status::ok;
      }));
      EXPECT_TRUE(until([&] { return answered.has_value(); }));
      EXPECT_EQ(answered, Status::ok);
    }
    EXPECT_EQ(client.engine.stats().windows_free, 0u);
  }
  bool comes(std::size_t size) {
    const bool came = until([&] { return arrived == size; });
    arrived = 0;
    return came;
  }
  void finish() {
    leases.clear();
    EXPECT_TRUE(until([&] { return client.engine.stats().windows_free == 3; }));
    Pair::finish();
  }
  std::vector<spinwire::RemoteMemory> leases;
  std::size_t arrived = 0;
};

TEST_F(EngineLocalOffers, LeasesThatHoldAllWindowsDelayNoLongMessage) {
  int writable = 0;
  Leased p(local_config(), local_config());
  p.server.on_message = [&p](Connection, Message& m) { p.arrived = m.size(); };
  ConnectOptions options;
  options.handlers = p.client.handlers();
  options.handlers.on_writable = [&writable](Connection) { ++writable; };
  Connection c = p.client.engine.connect(p.server.listener.address(), options).value();
  ASSERT_TRUE(p.until([&] { return c.ready() && p.server.ready.size() == 2; }));
  Buffer b = p.client.filled(kLong, 1);
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::nothing);
  ASSERT_TRUE(p.until([&] { return c.send(b) == Status::ok; }));
  EXPECT_TRUE(p.comes(kLong));
  ASSERT_TRUE(p.until([&] {
    const std::array<BufferSlice, 2> parts = {b.slice(0, 5000), b.slice(0, 4000)};
    return c.send(std::span<const BufferSlice>(parts)) == Status::ok;
  }));
  EXPECT_TRUE(p.comes(9000));
  ASSERT_TRUE(p.until([&] { return c.stats().outstanding == 0; }));
  p.settle();
  // Refused for credit alone.
  Buffer little = p.client.filled(8, 1);
  while (c.send(little) == Status::ok) continue;
  EXPECT_EQ(c.send(b), Status::would_block);
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::credit);
  writable = 0;
  ASSERT_TRUE(p.until([&] { return writable != 0; }));
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::nothing);
  EXPECT_EQ(c.send(b), Status::ok);
  EXPECT_TRUE(p.comes(kLong));
  EXPECT_EQ(p.client.engine.stats().windows_free, 0u);
  b.reset();
  little.reset();
  p.finish();
}

TEST_F(EngineLocalOffers, LeasesThatHoldAllWindowsEndNoSlowReceiver) {
  std::uint64_t ticks = 1'000'000'000;
  Config slow = local_config();
  slow.connections.rendezvous_timeout = 10min;
  Config hasty = local_config();
  hasty.connections.peer_timeout = 50ms;
  hasty.connections.keepalive_interval = 10ms;
  hasty.connections.rendezvous_timeout = 10ms;
  Leased p(slow, hasty, &ticks);
  p.server.on_message = [&p](Connection, Message& m) { p.arrived = m.size(); };
  std::vector<Buffer> taken;  // the receiver has no room
  while (Buffer each = p.server.engine.allocate(kLong, Pool::rendezvous))
    taken.push_back(std::move(each));
  ASSERT_EQ(p.ends.client.send(p.client.filled(kLong, 1)), Status::ok);
  for (int i = 0; i < 1000; ++i) {  // 2 s
    ticks += 2'000'000;
    p.settle(4);
  }
  ASSERT_TRUE(p.client.closed.empty()) << p.client.closed[0].message();
  EXPECT_EQ(p.ends.client.stats().outstanding, 1u);
  taken.clear();
  EXPECT_TRUE(p.comes(kLong));
  p.finish();
}

// Rights.

TEST_F(EngineLocalOffers, NeedNoRightToReadButForMemoryOfThePools) {
  std::array<std::byte, kLong> own{};
  Pair p(local_config());
  MemoryRegion region = p.client.engine.register_memory(own, Access::local).value();
  ConnectOptions options;
  options.handlers = p.client.handlers();
  options.settings.access = Access::remote_write;
  Connection blind = p.client.engine.connect(p.server.listener.address(), options).value();
  ASSERT_TRUE(p.until([&] { return blind.ready() && p.server.ready.size() == 2; }));
  EXPECT_EQ(blind.max_message(), 2u << 20);
  EXPECT_EQ(blind.send(region.slice(0, kLong)), Status::message_too_long);
  EXPECT_EQ(blind.send(p.client.filled(kLong, 1)), Status::ok);
  ASSERT_TRUE(p.until([&] { return p.server.messages == 1; }));
  ASSERT_TRUE(p.until([&] { return blind.stats().outstanding == 0; }));
  // The same memory through a connection with the right.
  ASSERT_EQ(p.ends.client.send(region.slice(0, kLong)), Status::ok);
  ASSERT_TRUE(p.until([&] { return p.server.messages == 2; }));
  ASSERT_TRUE(p.until([&] { return p.ends.client.stats().outstanding == 0; }));
  region = {};
  p.finish();
}

// Ends that differ.

/// Messages of both directions between two ends, and what they take.
void expect_exchange(Node& from, Connection by, Node& to, bool opens_key) {
  std::uint32_t came = 0;
  to.on_message = [&came](Connection, Message& m) {
    EXPECT_EQ(m.size(), kLong);
    EXPECT_TRUE(Node::holds(m.bytes(), 7));
    ++came;
  };
  for (std::uint32_t i = 1; i <= 3; ++i) {
    const auto before = from.engine.stats();
    ASSERT_TRUE(until({&from, &to}, [&] { return by.stats().send_credits != 0; }));
    ASSERT_EQ(
        from.tally.run([&](auto done) { return by.send(from.filled(kLong, 7), done, Post::now); }),
        Status::ok);
    const auto after = from.engine.stats();
    const std::uint32_t keys =
        before.windows_free - after.windows_free +
        static_cast<std::uint32_t>(after.registrations - before.registrations);
    EXPECT_EQ(keys, opens_key ? 1u : 0u);
    ASSERT_TRUE(until({&from, &to}, [&] { return came == i && from.tally.idle(); }));
    ASSERT_TRUE(until({&from, &to}, [&] {
      return from.engine.stats().windows_free == from.engine.config().memory.windows;
    }));
  }
  to.on_message = nullptr;
}

TEST_F(EngineLocalOffers, ReachAnEndWithoutDirectMessages) {
  for (const bool is_server : {true, false}) {
    const Config without = without_direct_messages(local_config());
    Pair p(is_server ? without : local_config(), is_server ? local_config() : without);
    expect_exchange(p.client, p.ends.client, p.server, !is_server);
    expect_exchange(p.server, p.ends.server, p.client, is_server);
    p.finish();
  }
}

TEST_F(EngineLocalOffers, ReachAnEndWithItsOwnDomainWhoseOwnHaveKeys) {
  Node server(local_config());
  Node client(local_config());
  server.on_accept = [](Connection c) {
    spinwire::ConnectionSettings own;
    own.own_domain = true;
    EXPECT_TRUE(c.configure(own));
  };
  server.listen();
  const Ends ends = connect(client, server);
  EXPECT_EQ(server.engine.stats().own_domains, 1u);
  expect_exchange(client, ends.client, server, false);
  expect_exchange(server, ends.server, client, true);
  engine_test::finish(client, server);
}

TEST_F(EngineLocalOffers, ReachNoEndWithoutRendezvousMessages) {
  Config shorter = local_config();
  shorter.connections.max_message_bytes = shorter.connections.eager_bytes;
  for (const bool is_server : {true, false}) {
    SCOPED_TRACE(is_server);
    Pair p(is_server ? shorter : local_config(), is_server ? local_config() : shorter);
    const std::size_t eager = shorter.connections.eager_bytes;
    for (Connection c : {p.ends.client, p.ends.server}) {
      Node& from = c == p.ends.client ? p.client : p.server;
      EXPECT_EQ(c.max_message(), eager);
      EXPECT_EQ(c.send(from.filled(eager + 1, 1)), Status::message_too_long);
      EXPECT_EQ(c.send(from.filled(eager, 1)), Status::ok);
    }
    ASSERT_TRUE(p.until([&] { return p.client.messages == 1 && p.server.messages == 1; }));
    p.finish();
  }
}

}  // namespace
}  // namespace local_offers_by_engines_test
