// Compare-and-swap and fetch-and-add on connections.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "base/internals.h"
#include "engine/engine_core.h"
#include "engine/exposed_memory.h"
#include "verbs/providers.h"

namespace atomics_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::detail::EngineCore;
using spinwire::verbs::Provider;

/// A pair, and numbers at the server that the client can access.
struct Bench : ExposedMemory {
  explicit Bench(const Config& config = small_config()) : ExposedMemory(config) {
    if (!client.engine.device().atomics) return;
    expose(4096, Access::remote_all);
    std::memset(memory.data(), 0, memory.size());
  }
  [[nodiscard]] RemoteRegion word(std::size_t index) const { return region.slice(8 * index, 8); }
  [[nodiscard]] std::uint64_t& number(std::size_t index) {
    return reinterpret_cast<std::uint64_t*>(memory.data())[index];
  }
  /// Starts an operation and waits for its end.
  template <typename Call>
  Completion run(Call&& call) {
    Completion seen;
    int ended = 0;
    EXPECT_EQ(call(CompletionCallback([&](const Completion& c) {
                seen = c;
                ++ended;
              })),
              Status::ok);
    EXPECT_TRUE(until([&] { return ended != 0; }));
    EXPECT_EQ(ended, 1);
    return seen;
  }
};

#define NEEDS_ATOMICS(bench) \
  if (!(bench).client.engine.device().atomics) GTEST_SKIP() << "the device has no atomics"

TEST(EngineAtomics, TellWhatTheyFound) {
  Bench b;
  NEEDS_ATOMICS(b);
  Connection c = b.ends.client;
  b.number(3) = 0x1122334455667788;
  b.number(4) = 0x99;
  Completion got = b.run([&](auto done) { return c.fetch_add(b.word(3), 0x11, done); });
  EXPECT_EQ(got.status, Status::ok);
  EXPECT_EQ(got.bytes, 8u);
  EXPECT_EQ(got.value, 0x1122334455667788u);
  EXPECT_EQ(b.number(3), 0x1122334455667799u);
  got = b.run([&](auto done) { return c.fetch_add(b.word(3), ~std::uint64_t{0}, done); });
  EXPECT_EQ(got.value, 0x1122334455667799u);
  EXPECT_EQ(b.number(3), 0x1122334455667798u);  // modulo 2^64
  got = b.run([&](auto done) { return c.compare_swap(b.word(3), 5, 6, done); });
  EXPECT_EQ(got.status, Status::ok);
  EXPECT_EQ(got.value, 0x1122334455667798u);
  EXPECT_EQ(b.number(3), 0x1122334455667798u);
  got = b.run([&](auto done) { return c.compare_swap(b.word(3), 0x1122334455667798, 6, done); });
  EXPECT_EQ(got.value, 0x1122334455667798u);
  EXPECT_EQ(b.number(3), 6u);
  EXPECT_EQ(b.number(2), 0u);
  EXPECT_EQ(b.number(4), 0x99u);
  EXPECT_EQ(c.stats().atomics, 4u);
  EXPECT_EQ(c.stats().reads + c.stats().writes + c.stats().messages_sent, 0u);
  // Completions of other operations have no value.
  const Buffer own = b.client.filled(8, 1);
  got = b.run([&](auto done) { return c.read(own.slice(), b.word(3), done); });
  EXPECT_EQ(got.value, 0u);
  got = b.run([&](auto done) { return c.send(own, done); });
  EXPECT_EQ(got.value, 0u);
  ASSERT_TRUE(b.until([&] { return b.server.messages == 1; }));
}

TEST(EngineAtomics, ManyAtOnceEachTellTheirOwnAndRunInOrder) {
  Bench b;
  NEEDS_ATOMICS(b);
  std::vector<std::uint64_t> found;
  const CompletionCallback done = [&found](const Completion& c) { found.push_back(c.value); };
  const std::uint32_t free = b.ends.client.stats().send_credits;
  for (int i = 0; i < 50; ++i)
    ASSERT_EQ(b.ends.client.fetch_add(b.word(0), 3, done, Post::defer), Status::ok);
  EXPECT_EQ(b.ends.client.stats().outstanding, 50u);
  EXPECT_EQ(b.ends.client.stats().send_credits, free);
  EXPECT_EQ(b.number(0), 0u);
  ASSERT_TRUE(b.until([&] { return found.size() == 50; }));
  for (std::size_t i = 0; i < 50; ++i) ASSERT_EQ(found[i], 3 * i);
  EXPECT_EQ(b.number(0), 150u);
  b.finish();
}

/// Two engines change one number at once: by additions, and by swaps repeated until they succeed.
TEST(EngineAtomics, TwoInitiatorsContend) {
  Bench b;
  NEEDS_ATOMICS(b);
  Node other;
  const Ends second = connect(other, b.server);
  struct Initiator {
    Connection c;
    RemoteRegion sum, swapped;
    std::vector<std::uint64_t> found;
    std::uint32_t swaps = 0;
    std::uint32_t lost = 0;
    std::uint32_t most = 0;
    bool failed = false;
    void add() {
      failed = c.fetch_add(sum, 1,
                           [this](const Completion& e) {
                             found.push_back(e.value);
                             if (found.size() < most) add();
                           }) != Status::ok ||
               failed;
    }
    void swap(std::uint64_t expected) {
      tried = expected;
      failed = c.compare_swap(swapped, expected, expected + 1,
                              [this](const Completion& e) {
                                const bool won = e.value == tried;
                                ++(won ? swaps : lost);
                                if (swaps < most) swap(won ? tried + 1 : e.value);
                              }) != Status::ok ||
               failed;
    }
    std::uint64_t tried = 0;
  };
  const std::uint32_t most = amount(2000);
  Initiator one, two;
  one.c = b.ends.client;
  two.c = second.client;
  for (Initiator* i : {&one, &two}) {
    i->sum = b.word(0);
    i->swapped = b.word(1);
    i->most = most;
    i->add();
    i->swap(0);
  }
  const auto over = [&](const Initiator& i) { return i.found.size() == most && i.swaps == most; };
  ASSERT_TRUE(until({&b.client, &other, &b.server}, [&] { return over(one) && over(two); }));
  EXPECT_FALSE(one.failed || two.failed);
  EXPECT_EQ(b.number(0), 2u * most);
  EXPECT_EQ(b.number(1), 2u * most);
  EXPECT_GT(one.lost + two.lost, 0u);
  std::vector<std::uint64_t> all = one.found;
  all.insert(all.end(), two.found.begin(), two.found.end());
  std::sort(all.begin(), all.end());
  for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], i);  // each found once
  EXPECT_TRUE(std::is_sorted(one.found.begin(), one.found.end()));
  EXPECT_NE(one.found.back(), most - 1) << "they ran one after the other";
}

TEST(EngineAtomics, RefusalsTakeNothing) {
  Bench b;
  NEEDS_ATOMICS(b);
  Connection c = b.ends.client;
  const auto both = [&](const RemoteRegion& remote, Status expected) {
    const auto swap =
        b.client.tally.run([&](auto done) { return c.compare_swap(remote, 0, 1, done); });
    const auto add = b.client.tally.run([&](auto done) { return c.fetch_add(remote, 1, done); });
    EXPECT_EQ(swap, expected);
    EXPECT_EQ(add, expected);
  };
  both({}, Status::out_of_bounds);
  both(b.region.slice(4089, 8), Status::out_of_bounds);
  for (const std::uint64_t bytes : {0, 1, 4, 7, 9, 16, 4096})
    both(b.region.slice(0, bytes), Status::out_of_bounds);
  for (const std::uint64_t at : {1, 2, 4, 7, 9, 4087})
    both(b.region.slice(at, 8), Status::invalid_argument);
  for (const Access less : {Access::local, Access::remote_read, Access::remote_read_write}) {
    RemoteRegion barred = b.word(0);
    barred.access = less;
    both(barred, Status::remote_access);
  }
  EXPECT_EQ(c.stats().outstanding, 0u);
  EXPECT_EQ(b.client.engine.stats().operations, 0u);
  const auto doorbells = b.client.engine.stats().doorbells;
  b.settle();
  EXPECT_EQ(b.client.engine.stats().doorbells, doorbells);
  EXPECT_EQ(b.number(0), 0u);
  Connection none;
  EXPECT_EQ(none.compare_swap(b.word(0), 0, 1), Status::not_connected);
  std::thread([&] {
    EXPECT_EQ(c.compare_swap(b.word(0), 0, 1), Status::wrong_thread);
    EXPECT_EQ(c.fetch_add(b.word(0), 1), Status::wrong_thread);
  }).join();
  // At most the send queue's depth is accepted, and at most the engine's number of records.
  std::uint32_t taken = 0;
  const auto add = [&] {
    return b.client.tally.run(
        [&](auto done) { return c.fetch_add(b.word(0), 1, done, Post::defer); });
  };
  while (add() == Status::ok) ASSERT_LT(++taken, 1000u);
  EXPECT_EQ(taken, b.client.engine.config().queues.send_depth - 10);
  EXPECT_EQ(c.compare_swap(b.word(0), 0, 1), Status::would_block);
  ASSERT_TRUE(b.until([&] { return b.client.tally.idle(); }));
  EXPECT_EQ(b.number(0), taken);
  ASSERT_EQ(c.close(), Status::ok);
  EXPECT_EQ(c.fetch_add(b.word(0), 1), Status::not_connected);
  b.finish();
}

TEST(EngineAtomics, TheRecordsOfTheEngineAreALimit) {
  Config config = small_config();
  config.queues.operations = 16;
  Bench b(config);
  NEEDS_ATOMICS(b);
  std::uint32_t taken = 0;
  const auto add = [&] {
    return b.client.tally.run(
        [&](auto done) { return b.ends.client.fetch_add(b.word(0), 1, done, Post::defer); });
  };
  while (add() == Status::ok) ASSERT_LT(++taken, 1000u);
  EXPECT_EQ(taken, 16u);
  ASSERT_TRUE(b.until([&] { return b.client.tally.idle(); }));
  EXPECT_EQ(b.number(0), 16u);
  b.finish();
}

TEST(EngineAtomics, TheRightIsGivenApart) {
  Bench b(watchful_config());
  NEEDS_ATOMICS(b);
  const auto only = b.server.engine.expose(b.memory.slice(0, 8), Access::remote_atomic).value();
  EXPECT_EQ(only.access, Access::remote_atomic);
  const Buffer own = b.client.filled(8, 1);
  EXPECT_EQ(b.ends.client.write(own.slice(), only), Status::remote_access);
  EXPECT_EQ(b.ends.client.read(own.slice(), only), Status::remote_access);
  EXPECT_EQ(b.run([&](auto done) { return b.ends.client.fetch_add(only, 9, done); }).status,
            Status::ok);
  EXPECT_EQ(b.number(0), 9u);
  // The device refuses forged atomics. Only a success has a value.
  const auto rest = b.server.engine.expose(b.memory.slice(8, 8), Access::remote_read_write).value();
  RemoteRegion forged = rest;
  forged.access = Access::remote_all;
  const Completion refused =
      b.run([&](auto done) { return b.ends.client.compare_swap(forged, 0, 7, done); });
  EXPECT_EQ(refused.status, Status::remote_access);
  EXPECT_EQ(refused.value, 0u);
  EXPECT_EQ(refused.bytes, 0u);
  EXPECT_EQ(b.number(1), 0u);
  ASSERT_TRUE(b.until([&] { return !b.client.closed.empty() && !b.server.closed.empty(); }));
  EXPECT_NE(b.client.closed[0].message().find("an atomic"), std::string::npos)
      << b.client.closed[0].message();
}

TEST(EngineAtomics, AConnectionsRightsBoundThem) {
  Node server, client;
  if (!client.engine.device().atomics) GTEST_SKIP() << "the device has no atomics";
  ListenOptions options;
  options.handlers = server.handlers();
  options.settings.access = Access::remote_read_write;
  server.listener = std::move(*server.engine.listen("127.0.0.1:0", options));
  const Ends ends = connect(client, server);
  Buffer memory = server.buffer(64, Pool::lease);
  std::memset(memory.data(), 0, 64);
  Connection at_server = ends.server;
  const auto barred = at_server.expose(memory.slice(), Access::remote_all);
  ASSERT_FALSE(barred);
  EXPECT_EQ(barred.error().message(),
            "give a peer remote_all: the connection allows remote_read_write; ask for less, or "
            "allow more with the setting access");
  // The queue pair refuses atomics, whatever key they use.
  const auto region = server.engine.expose(memory.slice(), Access::remote_all);
  ASSERT_TRUE(region);
  Connection c = ends.client;
  ASSERT_EQ(client.tally.run([&](auto done) { return c.fetch_add(region->slice(0, 8), 1, done); }),
            Status::ok);
  ASSERT_TRUE(until({&client, &server}, [&] { return !client.closed.empty(); }));
  EXPECT_EQ(client.tally.ended(Status::ok), 0u);
  EXPECT_EQ(client.tally.completed, 1u);
  EXPECT_EQ(memory.data()[0], std::byte{0});
}

TEST(EngineAtomics, EndWithTheirConnection) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a send waits until the peer polls";
  Bench b(without_direct_messages());
  const Buffer own = b.client.filled(8, 1);
  std::vector<Completion> ended;
  const CompletionCallback done = [&ended](const Completion& c) { ended.push_back(c); };
  b.number(0) = 77;
  // Behind a message that the server does not receive.
  ASSERT_EQ(b.ends.client.send(own), Status::ok);
  ASSERT_EQ(b.ends.client.fetch_add(b.word(0), 1, done), Status::ok);
  ASSERT_EQ(b.ends.client.compare_swap(b.word(0), 77, 1, done, Post::defer), Status::ok);
  b.client.engine = Engine();
  ASSERT_EQ(ended.size(), 2u);
  for (const Completion& c : ended) {
    EXPECT_EQ(c.status, Status::flushed);
    EXPECT_EQ(c.value, 0u);
  }
}

/// An engine on the embedded device, without atomics.
struct Without {
  Without() : provider(spinwire::verbs::softverbs_provider()) {
    provider.query_device = [](ibv_context* context, ibv_device_attr* attr) {
      const int error = spinwire::verbs::softverbs_provider().query_device(context, attr);
      attr->atomic_cap = IBV_ATOMIC_NONE;
      return error;
    };
    core = std::make_unique<EngineCore>(small_config(), Clock::real(),
                                        std::move(*spinwire::base::OwnerGuard::create()));
    const Provider* const all[] = {&provider};
    const auto opened = core->open({.providers = all});
    EXPECT_TRUE(opened) << opened.error().message();
  }
  Provider provider;
  std::unique_ptr<EngineCore> core;
};

TEST(EngineAtomics, ADeviceWithoutThemIsUsedWithout) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  Without without;
  EngineCore& core = *without.core;
  EXPECT_FALSE(core.context.device->info().atomics);
  Node server;
  server.listen();
  Buffer memory = server.filled(64, 1);
  const auto region = server.engine.expose(memory.slice(), Access::remote_all).value();
  ConnectOptions options;
  Connection c = core.connect(server.listener.address(), options).value();
  const auto both = [&](auto&& what) {
    return until({&server}, [&] {
      (void)core.poll();
      return what();
    });
  };
  ASSERT_TRUE(both([&] { return c.ready() && !server.ready.empty(); }));
  EXPECT_EQ(c.compare_swap(region.slice(0, 8), 0, 1), Status::unsupported);
  EXPECT_EQ(c.fetch_add(region.slice(0, 8), 1), Status::unsupported);
  EXPECT_EQ(c.stats().outstanding, 0u);
  const Buffer own = spinwire::detail::make<Buffer>(
      core.context.arena->allocate(spinwire::memory::PoolId::send, 64), 64);
  const auto refused = c.expose(own.slice(), Access::remote_all);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().status, Status::unsupported);
  EXPECT_NE(refused.error().message().find("softverbs has none"), std::string::npos)
      << refused.error().message();
  EXPECT_TRUE(c.expose(own.slice(), Access::remote_read_write));
  int done = 0;
  ASSERT_EQ(c.read(own.slice(), region,
                   [&done](const Completion& e) { done += e.status == Status::ok ? 1 : 100; }),
            Status::ok);
  ASSERT_TRUE(both([&] { return done == 1; }));
  EXPECT_TRUE(Node::holds(own.bytes(), 1));
  // Its queue pair refuses atomics as well.
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  const auto* agent = core.find(c.index(), spinwire::detail::Internals::generation(c));
  ASSERT_EQ(without.provider.query_qp(agent->qp, &attr, IBV_QP_ACCESS_FLAGS, &init), 0);
  EXPECT_EQ(attr.qp_access_flags & IBV_ACCESS_REMOTE_ATOMIC, 0u);
  EXPECT_NE(attr.qp_access_flags & IBV_ACCESS_REMOTE_READ, 0u);
}

}  // namespace
}  // namespace atomics_test
