// Connections with receives of their own, as on a device without shared receive queues.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine_core.h"
#include "engine/harness.h"
#include "engine/rerun_tests.h"
#include "verbs/providers.h"

namespace own_receives_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::LogLevel;
using spinwire::detail::EngineCore;
using spinwire::verbs::Provider;

/// A message without a receive ends its connection at once.
Config own_config(std::uint32_t depth = 256, std::uint32_t connections = 8) {
  Config c = small_config();
  c.queues.shared_receive_queue = SharedReceiveQueue::off;
  c.queues.receive_depth = depth;
  c.queues.receive_postlist = depth < 64 ? 4 : 16;
  c.queues.completion_depth = 4096;
  c.connections.maximum = connections;
  c.connections.credits = std::min(64u, depth);
  c.queue_pair.rnr_retry = 0;
  return c;
}

TEST(EngineOwnReceives, DividesTheEnginesAndTellsWhatIsInForce) {
  const struct {
    std::uint32_t depth, connections, credits, slots, granted;
  } cases[] = {
      {256, 8, 64, 32, 24},    // an equal part, a quarter of it not granted
      {256, 1, 64, 80, 64},    // no more than credits and a list of 16 can use
      {256, 64, 64, 8, 6},     // no less than 8, so that 32 fit
      {256, 1, 1, 17, 1},      //
      {1000, 16, 64, 62, 47},  //
  };
  for (const auto& k : cases) {
    Config c = own_config(k.depth, k.connections);
    c.connections.credits = k.credits;
    c.memory.receive_bytes = 8u << 20;
    Node n(c);
    EXPECT_FALSE(n.engine.device().shared_receives);
    EXPECT_EQ(n.engine.device().own_receives, k.slots);
    EXPECT_EQ(n.engine.config().connections.credits, k.granted);
    EXPECT_EQ(n.engine.stats().receives, 0u);  // before there is a connection
  }
  Config c = own_config();
  c.queues.shared_receive_queue = SharedReceiveQueue::automatic;
  const Node n(c);
  EXPECT_TRUE(n.engine.device().shared_receives);
  EXPECT_EQ(n.engine.device().own_receives, 0u);
  EXPECT_EQ(n.engine.config().connections.credits, 64u);
}

/// Two connections of one client and one server, and a record of what arrived on each.
struct Two : Pair {
  explicit Two(const Config& c) : Pair(c), other(connect(client, server)) {
    server.on_message = [this](Connection conn, Message& m) {
      const bool first = conn == ends.server;
      EXPECT_TRUE(Node::holds(m.bytes(), first ? 1 : 2));
      ++(first ? arrived : arrived_other);
      if (first && keep) kept.push_back(m.take());
    };
    message = client.filled(200, 1);
    message_other = client.filled(3000, 2);
  }
  void push() {
    while (ends.client.send(message, {}, Post::defer) == Status::ok) ++sent;
    while (other.client.send(message_other, {}, Post::defer) == Status::ok) ++sent_other;
    (void)client.engine.flush();
  }
  /// Keeps the first connection's messages until the pool, which has some 500 blocks, has none for
  /// a received message and the peer has no credit.
  void fill_pool() {
    keep = true;
    ASSERT_TRUE(until([&] {
      push();
      return (kept.size() > 400 && ends.server.stats().granted_credits == 0) ||
             !client.closed.empty();
    }));
    EXPECT_TRUE(client.closed.empty());
  }
  void finish() {
    kept.clear();
    message.reset();
    message_other.reset();
    Pair::finish();
  }
  Ends other;
  bool keep = false;
  std::uint64_t sent = 0, sent_other = 0, arrived = 0, arrived_other = 0;
  Buffer message, message_other;
  std::vector<Buffer> kept;
};

TEST(EngineOwnReceives, OfTwoConnectionsDoNotMix) {
  Two t(own_config());
  EXPECT_EQ(t.server.engine.stats().receives, 64u);
  ASSERT_TRUE(t.until([&] {
    t.push();
    return t.arrived > 20000 && t.arrived_other > 20000;
  }));
  ASSERT_TRUE(t.until([&] { return t.arrived == t.sent && t.arrived_other == t.sent_other; }));
  // At most a list of each waits to be reposted.
  EXPECT_GE(t.server.engine.stats().receives, 64u - 2 * 7u);
  EXPECT_TRUE(t.ends.client.ready());
  EXPECT_TRUE(t.other.client.ready());
  t.finish();
}

TEST(EngineOwnReceives, AreNeverFewerThanTheCreditThatIsGranted) {
  Two t(own_config(64, 4));  // 16 each, of which 12 are granted
  std::uint32_t most = 0;
  ASSERT_TRUE(t.until([&] {
    t.push();
    for (const Ends& e : {t.ends, t.other}) {
      most = std::max({most, e.client.stats().send_credits, e.server.stats().granted_credits});
      EXPECT_LE(e.server.stats().granted_credits, 12u);
    }
    EXPECT_LE(t.server.engine.stats().reserved_receives, 24u);
    EXPECT_LE(t.server.engine.stats().receives, 32u);
    return t.arrived > 10000;
  }));
  EXPECT_GE(most, 10u);  // otherwise the test shows nothing
  EXPECT_TRUE(t.client.closed.empty());
  t.finish();
}

TEST(EngineOwnReceives, OneThatKeepsItsMessagesStopsNoOther) {
  Two t(own_config(64, 4));
  t.fill_pool();
  t.settle();
  const std::uint64_t stuck = t.arrived;
  const std::uint64_t before = t.arrived_other;
  ASSERT_TRUE(t.until([&] {
    t.push();
    return t.arrived_other > before + 5000 || !t.client.closed.empty();
  }));
  EXPECT_EQ(t.arrived, stuck);
  EXPECT_TRUE(t.client.closed.empty());
  // The buffers return, and with them the credit.
  t.keep = false;
  t.kept.clear();
  ASSERT_TRUE(t.until([&] {
    t.push();
    return t.arrived > stuck + 5000 || !t.client.closed.empty();
  }));
  EXPECT_TRUE(t.client.closed.empty());
  t.finish();
}

TEST(EngineOwnReceives, OfAConnectionThatEndsServeTheNext) {
  // Two queues of eight; messages are in flight when either end closes, in turn.
  Node server(own_config(16, 4)), client(own_config());
  server.listen();
  server.on_message = [](Connection conn, Message& m) { (void)conn.send(m.take()); };
  Buffer b = client.filled(500, 3);
  for (int round = 0; round < 20; ++round) {
    const std::uint64_t before = client.messages;
    Ends all[] = {connect(client, server), connect(client, server)};
    EXPECT_EQ(server.engine.stats().receives, 16u);
    ASSERT_TRUE(until({&client, &server}, [&] {
      for (Ends& e : all) (void)e.client.send(b);
      return client.messages > before + 50;
    }));
    for (Ends& e : all) {
      for (int i = 0; i < 6; ++i) (void)e.client.send(b);
      EXPECT_EQ((round % 2 == 0 ? e.client : e.server).close(), Status::ok);
    }
    ASSERT_TRUE(until({&client, &server}, [&] {
      return client.engine.stats().connections + server.engine.stats().connections == 0;
    }));
    EXPECT_EQ(server.engine.stats().receives, 0u);
    EXPECT_EQ(client.engine.stats().receives, 0u);
  }
  for (const Error& e : client.closed) EXPECT_EQ(e.status, Status::ok) << e.message();
  b.reset();
  finish(client, server);
}

TEST(EngineOwnReceives, WithoutMemoryMakeNoConnection) {
  // The second of two queues of eight loses its memory to messages that outlive their connections.
  Two t(own_config(16, 4));
  t.fill_pool();
  Connection c = t.ends.client;
  const auto taken = [&] {
    (void)c.send(t.message);
    return t.ends.server.stats().granted_credits == 0 || c.state() == ConnectionState::closed;
  };
  bool refused = false;
  for (int i = 0; i < 8 && !refused; ++i) {
    EXPECT_EQ(c.close(), Status::ok);
    ASSERT_TRUE(t.until([&] {
      return t.server.engine.stats().connections == 1 && t.client.engine.stats().connections == 1;
    }));
    const std::size_t before = t.server.ready.size();
    c = t.client.begin(t.server);
    ASSERT_TRUE(t.until([&] {
      refused = c.state() == ConnectionState::closed;
      return refused || (c.ready() && t.server.ready.size() > before);
    }));
    if (refused) break;
    t.ends = {c, t.server.ready.back()};
    ASSERT_TRUE(t.until(taken));
  }
  ASSERT_TRUE(refused);
  EXPECT_EQ(t.client.closed.back().status, Status::limit) << t.client.closed.back().message();
  EXPECT_NE(t.client.closed.back().found.find("asked 16 receives for 2 connections"),
            std::string::npos)
      << t.client.closed.back().message();
  for (const Error& e : t.client.closed) EXPECT_NE(e.status, Status::peer_lost) << e.message();
  // The memory returns, and the queue works as before.
  t.kept.clear();
  t.keep = false;
  t.settle();
  t.ends = connect(t.client, t.server);
  const std::uint64_t before = t.arrived;
  ASSERT_TRUE(t.until([&] {
    t.push();
    return t.arrived > before + 2000;
  }));
  EXPECT_TRUE(t.other.client.ready());
  t.finish();
}

TEST(EngineOwnReceives, OneConnectionMoreThanFitIsRefusedWithTheNumbers) {
  Pair p(own_config(40, 8), own_config());
  std::vector<Ends> more;
  while (more.size() < 4) more.push_back(connect(p.client, p.server));
  (void)p.client.begin(p.server);
  ASSERT_TRUE(p.until([&] { return !p.client.closed.empty(); }));
  const Error& why = p.client.closed[0];
  EXPECT_EQ(why.status, Status::limit);
  EXPECT_NE(why.found.find("asked 48 receives for 6 connections, have 40"), std::string::npos)
      << why.message();
  // When one is gone, another fits.
  EXPECT_EQ(more[0].client.close(), Status::ok);
  ASSERT_TRUE(p.until([&] { return p.server.engine.stats().connections == 4; }));
  EXPECT_TRUE(connect(p.client, p.server).client.ready());
  p.finish();
}

/// The embedded device without the features that a test removes.
struct Lacking {
  explicit Lacking(void (*take)(Provider&)) : provider(spinwire::verbs::softverbs_provider()) {
    take(provider);
    warnings.clear();
    spinwire::set_log([](LogLevel, std::string_view text) { warnings.emplace_back(text); });
  }
  Lacking(const Lacking&) = delete;
  Lacking& operator=(const Lacking&) = delete;
  ~Lacking() { spinwire::set_log({}); }

  Result<void> open(const Config& config = small_config()) {
    engine = std::make_unique<EngineCore>(config, Clock::real(),
                                          std::move(*spinwire::base::OwnerGuard::create()));
    const Provider* const all[] = {&provider};
    return engine->open({.providers = all});
  }
  [[nodiscard]] const spinwire::DeviceInfo& device() const {
    return engine->context.device->info();
  }

  /// Checks that messages pass on a connection from another node.
  void expect_echoes(Node& client) {
    ListenOptions options;
    options.handlers.on_message = [](Connection c, Message& m) {
      const Buffer b = m.take();
      EXPECT_EQ(c.send(b), Status::ok);
    };
    const Listener listener = engine->listen("127.0.0.1:0", options).value();
    const Connection c = client.begin(listener.address());
    Buffer b = client.filled(1000, 1);
    std::uint64_t bad = 0;
    client.on_message = [&](Connection, Message& m) { bad += Node::holds(m.bytes(), 1) ? 0 : 1; };
    std::uint64_t sent = 0;
    ASSERT_TRUE(until({&client}, [&] {
      (void)engine->poll();
      Connection to = c;
      if (sent < 500 && to.send(b) == Status::ok) ++sent;
      return client.messages == 500 || !client.closed.empty();
    }));
    EXPECT_TRUE(client.closed.empty());
    EXPECT_EQ(bad, 0u);
  }

  Provider provider;
  std::unique_ptr<EngineCore> engine;
  static inline std::vector<std::string> warnings;
};

/// Withholds flushed receives, like a device that flushes asynchronously.
struct LateFlushes {
  explicit LateFlushes(ibv_context* of) : context(of) {
    late = this;
    plain = std::exchange(context->ops.poll_cq, [](ibv_cq* cq, int entries, ibv_wc* wcs) {
      return late->poll(cq, entries, wcs);
    });
  }
  LateFlushes(const LateFlushes&) = delete;
  LateFlushes& operator=(const LateFlushes&) = delete;
  ~LateFlushes() { context->ops.poll_cq = plain; }

  int poll(ibv_cq* cq, int entries, ibv_wc* wcs) {
    int count = 0;
    while (!withheld && !kept.empty() && count < entries) {
      wcs[count++] = kept.front();
      kept.erase(kept.begin());
    }
    ibv_wc* const end = wcs + count + plain(cq, entries - count, wcs + count);
    ibv_wc* const flushed = std::stable_partition(wcs + count, end, [this](const ibv_wc& wc) {
      return !withheld || wc.status == IBV_WC_SUCCESS || !spinwire::agent::is_receive(wc.wr_id);
    });
    kept.insert(kept.end(), flushed, end);
    return static_cast<int>(flushed - wcs);
  }

  ibv_context* context;
  int (*plain)(ibv_cq*, int, ibv_wc*) = nullptr;
  bool withheld = true;
  std::vector<ibv_wc> kept;
  static inline LateFlushes* late = nullptr;
};

TEST(EngineOwnReceives, AreAllBackBeforeTheirQueuePairGoes) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  Node client;
  Lacking lacking([](Provider&) {});
  Config config = own_config(16, 4);
  config.connections.close_timeout = 100ms;
  ASSERT_TRUE(lacking.open(config));
  EngineCore& core = *lacking.engine;
  LateFlushes late(core.context.device->context());
  const Listener listener = core.listen("127.0.0.1:0", {}).value();
  const auto both = [&](auto&& done) {
    return until({&client}, [&] {
      (void)core.poll();
      return done();
    });
  };
  Connection c = client.begin(listener.address());
  const Buffer b = client.filled(8, 1);
  ASSERT_TRUE(both([&] { return c.send(b) == Status::ok; }));
  ASSERT_TRUE(both([&] { return client.engine.stats().operations == 0; }));
  EXPECT_EQ(c.close(), Status::ok);
  ASSERT_TRUE(both([&] {
    return !client.closed.empty() && core.context.agents.size() == 1 &&
           late.kept.size() == core.context.posted_receives && !late.kept.empty();
  }));
  for (int i = 0; i < 100; ++i) (void)core.poll();
  EXPECT_EQ(core.context.stats.stale_completions, 0u);
  EXPECT_EQ(core.context.agents.size(), 1u);
  // The last of them ends the drain.
  late.withheld = false;
  ASSERT_TRUE(both([&] { return core.context.agents.size() == 0; }));
  EXPECT_EQ(core.context.stats.stale_completions, 0u);
  EXPECT_EQ(core.context.posted_receives, 0u);
  EXPECT_TRUE(late.kept.empty());
  // If a device loses them, the engine waits only until the close timeout.
  late.withheld = true;
  c = client.begin(listener.address());
  ASSERT_TRUE(both([&] { return c.ready(); }));
  EXPECT_EQ(c.close(), Status::ok);
  ASSERT_TRUE(both([&] { return core.context.agents.size() == 0; }));
  EXPECT_EQ(core.context.posted_receives, 0u);
}

int query_without_srq(ibv_context* context, ibv_device_attr* attr) {
  const int error = spinwire::verbs::softverbs_provider().query_device(context, attr);
  attr->max_srq = attr->max_srq_wr = attr->max_srq_sge = 0;
  return error;
}
template <int error>
ibv_srq* no_srq(ibv_pd*, ibv_srq_init_attr*) {
  errno = error;
  return nullptr;
}

TEST(EngineOwnReceives, ADeviceWithoutASharedQueueDoesWithout) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  void (*const lacks[])(Provider&) = {
      [](Provider& p) { p.query_device = query_without_srq; },
      [](Provider& p) { p.create_srq = no_srq<EOPNOTSUPP>; },
      [](Provider& p) { p.create_srq = no_srq<ENOSYS>; },
  };
  for (const auto take : lacks) {
    Node client;
    Lacking lacking(take);
    const auto opened = lacking.open();
    ASSERT_TRUE(opened) << opened.error().message();
    EXPECT_FALSE(lacking.device().shared_receives);
    EXPECT_GT(lacking.device().own_receives, 0u);
    ASSERT_EQ(lacking.warnings.size(), 1u);
    EXPECT_NE(lacking.warnings[0].find("device softverbs has no shared receive queue"),
              std::string::npos)
        << lacking.warnings[0];
    lacking.expect_echoes(client);
  }
}

TEST(EngineOwnReceives, NoMemoryForASharedQueueIsAnErrorStill) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  Lacking lacking([](Provider& p) { p.create_srq = no_srq<ENOMEM>; });
  const auto opened = lacking.open();
  ASSERT_FALSE(opened);
  EXPECT_NE(opened.error().asked.find("shared receive queue"), std::string::npos);
  EXPECT_TRUE(lacking.warnings.empty());
}

TEST(EngineOwnReceives, AreNotWarnedOfWhenTheyWereAskedFor) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  Node client;
  Lacking lacking([](Provider& p) { p.create_srq = no_srq<EFAULT>; });  // not called
  const auto opened = lacking.open(own_config());
  ASSERT_TRUE(opened) << opened.error().message();
  EXPECT_TRUE(lacking.warnings.empty());
  lacking.expect_echoes(client);
}

TEST(EngineOwnReceives, AreAsManyAsTheDevicesQueuePairsTake) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  Node client;
  Lacking lacking([](Provider& p) {
    p.query_device = [](ibv_context* context, ibv_device_attr* attr) {
      const int error = query_without_srq(context, attr);
      attr->max_qp_wr = 64;
      return error;
    };
  });
  ASSERT_TRUE(lacking.open(own_config(256, 2)));
  EXPECT_EQ(lacking.device().own_receives, 64u);
  lacking.expect_echoes(client);
}

TEST(EngineExposure, NeedsNoMemoryWindows) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  Node client;
  Lacking lacking([](Provider& p) {
    p.alloc_mw = [](ibv_pd*, ibv_mw_type) -> ibv_mw* {
      errno = EOPNOTSUPP;
      return nullptr;
    };
  });
  const auto opened = lacking.open();
  ASSERT_TRUE(opened) << opened.error().message();
  EXPECT_FALSE(lacking.device().memory_windows);
  EngineCore& core = *lacking.engine;
  std::vector<std::byte> memory(4096);
  auto region = core.context.registrations->register_memory(memory, Access::remote_write);
  ASSERT_TRUE(region) << region.error().message();
  const Listener listener = core.listen("127.0.0.1:0", {}).value();
  Connection c = client.begin(listener.address());
  const auto both = [&](auto&& done) {
    return until({&client}, [&] {
      (void)core.poll();
      return done();
    });
  };
  ASSERT_TRUE(both([&] { return c.ready(); }));
  Buffer b = client.filled(4096, 7);
  ASSERT_EQ(client.tally.run([&](const CompletionCallback& done) {
    return c.write(b.slice(), region->remote, done);
  }),
            Status::ok);
  ASSERT_TRUE(both([&] { return client.tally.idle(); }));
  EXPECT_EQ(client.tally.ended(Status::ok), 1u);
  EXPECT_TRUE(Node::holds(memory, 7));
}

TEST(SlowEngineOwnReceives, PassTheEnginesSuites) {
  const std::string text = engine_test::run_again(
      "SPINWIRE_TEST_OWN_RECEIVES", "1",
      "EngineMessages.*:EngineDoorbells.*:EnginePoll.*:EngineHandlers.*:Credits.*:EngineClose.*:"
      "EngineDestruction.*:EngineHandshakes.*:EngineRefusals.*:EngineReconnect.*:EngineOutOfBand.*:"
      "EngineExposure.*:EngineZeroCost.*:PeerLoss.*:HandshakeAttack.*:*/EngineCloseInside.*"
      // These tests are about sharing receives.
      ":-Credits.ReceivesAreSharedFairlyWhenThereAreTooFew:"
      "Credits.GreedyConnectionLeavesRoomForNewOnes");
  EXPECT_GT(engine_test::passed(text), 80) << text << "too many were skipped";
}

}  // namespace
}  // namespace own_receives_test
