// Engine::drain(): connections. test/rpc/drain_calls_test.cc has sessions.
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "engine/harness.h"

namespace drain_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::DrainOptions;
using spinwire::DrainReport;
using spinwire::Goodbye;
using spinwire::GoodbyeReason;
using spinwire::Nanoseconds;

constexpr Goodbye kGoodbye{GoodbyeReason::draining, 500ms};
/// Longer than until() waits.
constexpr Nanoseconds kLong = 1h;

/// Drains a node, and records the report.
struct Drained {
  std::vector<DrainReport> reports;
  [[nodiscard]] DrainOptions options() {
    DrainOptions o;
    o.retry_after = kGoodbye.retry_after;
    o.on_drained = [this](const DrainReport& r) { reports.push_back(r); };
    return o;
  }
  void begin(Node& node, Nanoseconds timeout = kLong) {
    const auto begun = node.engine.drain(timeout, options());
    ASSERT_TRUE(begun) << begun.error().message();
    EXPECT_TRUE(node.engine.draining());
    EXPECT_FALSE(node.engine.drained());
    EXPECT_TRUE(reports.empty()) << "no callback runs inside the call";
  }
};

TEST(EngineDrain, AnIdleEngineIsDrainedInThePollThatFollows) {
  Node node;
  EXPECT_FALSE(node.engine.draining());
  EXPECT_FALSE(node.engine.drained());
  Drained drained;
  drained.begin(node);
  (void)node.poll();
  EXPECT_TRUE(node.engine.drained());
  EXPECT_FALSE(node.engine.draining());
  ASSERT_EQ(drained.reports.size(), 1u);
  EXPECT_EQ(drained.reports[0].connections, 0u);
  for (int i = 0; i < 100; ++i) (void)node.poll();
  EXPECT_EQ(drained.reports.size(), 1u);
}

TEST(EngineDrain, ConnectionsEndWithAGoodbyeAndLoseNoMessage) {
  Pair p;
  std::uint64_t sent = 0;
  for (Connection c : {p.ends.client, p.ends.server}) {
    Node& from = c == p.ends.client ? p.client : p.server;
    for (int i = 0; i < 8; ++i) {
      const Buffer data = from.filled(32, 1);
      if (from.tally.run([&](auto done) { return c.send(data, done); }) == Status::ok) ++sent;
    }
    ASSERT_NE(sent, 0u);
  }
  Drained drained;
  drained.begin(p.server);
  ASSERT_TRUE(p.until([&] { return p.server.engine.drained() && p.client.closed.size() == 1; }));
  EXPECT_EQ(p.client.messages + p.server.messages, sent);
  EXPECT_EQ(p.client.closed[0].status, Status::ok);
  EXPECT_EQ(p.client.closed[0].goodbye, kGoodbye);
  EXPECT_EQ(p.server.closed.size(), 1u) << "on_closed runs before on_drained";
  ASSERT_EQ(drained.reports.size(), 1u);
  EXPECT_EQ(drained.reports[0].connections, 0u);
  p.finish();
}

TEST(EngineDrain, OurOwnConnectionsEndInTheSameWay) {
  Pair p;
  Drained drained;
  drained.begin(p.client);
  ASSERT_TRUE(p.until([&] { return p.client.engine.drained() && p.server.closed.size() == 1; }));
  EXPECT_EQ(p.server.closed[0].goodbye, kGoodbye);
  p.finish();
}

TEST(EngineDrain, PeersThatComeMeanwhileAreRefusedWithATime) {
  Pair p;
  Node late;
  p.client.on_message = [](Connection, Message&) {};
  Drained drained;
  drained.begin(p.server);
  (void)late.begin(p.server);
  ASSERT_TRUE(until({&p.client, &p.server, &late},
                    [&] { return late.closed.size() == 1 && p.server.engine.drained(); }));
  EXPECT_EQ(late.closed[0].status, Status::refused);
  EXPECT_TRUE(is_retryable(late.closed[0].status));
  EXPECT_EQ(late.closed[0].goodbye, kGoodbye);
  // A drained engine accepts nobody, either.
  (void)late.begin(p.server);
  ASSERT_TRUE(until({&p.server, &late}, [&] { return late.closed.size() == 2; }));
  EXPECT_EQ(late.closed[1].goodbye, kGoodbye);
  EXPECT_EQ(p.server.accepts, 1u);
  p.finish();
}

TEST(EngineDrain, AHalfOpenConnectionIsRefused) {
  Node server, client;
  server.listen();
  Drained drained;
  server.on_accept = [&](Connection) { drained.begin(server); };  // it is not ready yet
  (void)client.begin(server);
  ASSERT_TRUE(until({&client, &server},
                    [&] { return client.closed.size() == 1 && server.engine.drained(); }));
  EXPECT_EQ(client.closed[0].status, Status::refused);
  EXPECT_EQ(client.closed[0].goodbye, kGoodbye);
  finish(client, server);
}

TEST(EngineDrain, TheEngineItselfStartsNothing) {
  Node node, other;
  other.listen();
  Drained drained;
  drained.begin(node);
  const auto connected = node.engine.connect(other.listener.address(), {});
  ASSERT_FALSE(connected);
  EXPECT_EQ(connected.error().status, Status::not_connected);
  EXPECT_EQ(node.engine.prepare({}).error().status, Status::not_connected);
  EXPECT_EQ(node.engine.listen("127.0.0.1:0", {}).error().status, Status::not_connected);
  EXPECT_EQ(node.engine.open_session(other.listener.address(), {}).error().status,
            Status::not_connected);
}

TEST(EngineDrain, ArgumentsAreChecked) {
  Node node;
  for (const auto& [timeout, retry] : {std::pair<Nanoseconds, Nanoseconds>{-1ns, 0ns},
                                       {24h + 1ns, 0ns},
                                       {1s, -1ns},
                                       {1s, spinwire::kMaxRetryAfter + 1ns}}) {
    const auto begun = node.engine.drain(timeout, {.retry_after = retry});
    ASSERT_FALSE(begun);
    EXPECT_EQ(begun.error().status, Status::invalid_argument);
  }
  EXPECT_FALSE(node.engine.draining());
  EXPECT_EQ(Engine().drain(1s).error().status, Status::not_connected);
}

/// A server with a manual clock, and a client that does not poll.
struct Stuck {
  Stuck() : server(config(), &ticks), client(config()) {
    server.listen();
    ends = connect(client, server);
  }
  static Config config() {
    Config c = small_config();
    c.connections.peer_timeout = 1h;
    return c;
  }
  void poll() {
    for (int i = 0; i < 500; ++i) (void)server.poll();
  }
  std::uint64_t ticks = 1;
  Node server, client;
  Ends ends;
  Drained drained;
};

TEST(EngineDrain, WhatRemainsWhenTheTimeIsOverIsClosedWithTheGoodbyeAnyway) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a manual clock does not move the device";
  Stuck s;
  s.drained.begin(s.server, 10s);
  s.poll();
  EXPECT_TRUE(s.server.engine.draining()) << "the client has not answered";
  EXPECT_LE(s.server.engine.next_deadline(), 10s);
  s.ticks += static_cast<std::uint64_t>(Nanoseconds(9s).count());
  s.poll();
  EXPECT_TRUE(s.server.engine.draining());
  s.ticks += static_cast<std::uint64_t>(Nanoseconds(1s).count());
  (void)s.server.poll();
  EXPECT_TRUE(s.server.engine.drained());
  ASSERT_EQ(s.drained.reports.size(), 1u);
  EXPECT_EQ(s.drained.reports[0].connections, 1u);
  ASSERT_TRUE(until({&s.client, &s.server}, [&] { return s.client.closed.size() == 1; }));
  EXPECT_EQ(s.client.closed[0].goodbye, kGoodbye);
  s.client.stale_allowed = s.server.stale_allowed = true;
  finish(s.client, s.server);
}

TEST(EngineDrain, NoTimeAtAllEndsEverythingAtOnce) {
  Pair p;
  Drained drained;
  drained.begin(p.server, 0ns);
  (void)p.server.poll();
  EXPECT_TRUE(p.server.engine.drained());
  ASSERT_EQ(drained.reports.size(), 1u);
  EXPECT_EQ(drained.reports[0].connections, 1u);
  ASSERT_TRUE(p.until([&] { return p.client.closed.size() == 1; }));
  EXPECT_EQ(p.client.closed[0].status, Status::ok);
  EXPECT_EQ(p.client.closed[0].goodbye, kGoodbye);
  p.client.stale_allowed = p.server.stale_allowed = true;
  p.finish();
}

TEST(EngineDrain, ASecondDrainReplacesTheFirst) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a manual clock does not move the device";
  Stuck s;
  s.drained.begin(s.server, 1h);
  s.poll();
  Drained second;
  second.begin(s.server, 1s);
  s.ticks += static_cast<std::uint64_t>(Nanoseconds(1s).count());
  s.poll();
  EXPECT_TRUE(s.server.engine.drained());
  EXPECT_EQ(s.drained.reports.size(), 0u);
  EXPECT_EQ(second.reports.size(), 1u);
  // Drained again: nothing is left.
  ASSERT_TRUE(until({&s.client, &s.server}, [&] { return s.client.closed.size() == 1; }));
  s.client.stale_allowed = s.server.stale_allowed = true;
  finish(s.client, s.server);
  Drained third;
  third.begin(s.server, 1h);
  s.poll();
  ASSERT_EQ(third.reports.size(), 1u);
  EXPECT_EQ(third.reports[0].connections, 0u);
}

TEST(EngineDrain, ADrainingEngineThatIsDestroyedSaysTheSameGoodbye) {
  Node client;
  Drained drained;
  {
    Node server;
    server.listen();
    (void)connect(client, server);
    drained.begin(server);
  }
  ASSERT_TRUE(until({&client}, [&] { return client.closed.size() == 1; }));
  EXPECT_EQ(client.closed[0].status, Status::ok);
  EXPECT_EQ(client.closed[0].goodbye, kGoodbye);
  EXPECT_EQ(drained.reports.size(), 0u);
}

TEST(EngineDrain, OnDrainedMayDestroyTheEngine) {
  Node client;
  std::optional<Node> server(std::in_place);
  server->listen();
  (void)connect(client, *server);
  bool is_over = false;
  DrainOptions options;
  struct {
    std::optional<Node>& server;
    bool& is_over;
  } captured{server, is_over};
  options.on_drained = [c = &captured](const DrainReport&) {
    c->server->engine = Engine();
    c->is_over = true;
  };
  ASSERT_TRUE(server->engine.drain(kLong, options));
  ASSERT_TRUE(until({&client, &*server}, [&] { return is_over; }));
  ASSERT_TRUE(until({&client}, [&] { return client.closed.size() == 1; }));
}

TEST(EngineDrain, AConnectionThatReconnectsEnds) {
  Node server, client;
  server.listen();
  ConnectOptions options;
  options.handlers = client.handlers();
  options.reconnect = {100, 1h, 1h};  // it backs off as long as the test takes
  options.timeout = 1s;
  Connection c = *client.engine.connect(server.listener.address(), options);
  ASSERT_TRUE(until({&client, &server}, [&] { return c.ready() && server.ready.size() == 1; }));
  ASSERT_EQ(server.ready[0].close({GoodbyeReason::draining, 0ms}), Status::ok);
  ASSERT_TRUE(until({&client, &server}, [&] { return c.state() == ConnectionState::resolving; }));
  Drained drained;
  drained.begin(client);
  ASSERT_TRUE(until({&client, &server}, [&] { return client.engine.drained(); }));
  EXPECT_EQ(client.closed.size(), 1u);
  EXPECT_EQ(drained.reports[0].connections, 0u);
  finish(client, server);
}

TEST(EngineDrain, ALeaseThatThePeerHoldsEndsWithItsConnection) {
  Pair p;
  std::vector<spinwire::RemoteMemory> held;
  std::uint64_t returned = 0;
  p.client.on_lease = [&](Connection, spinwire::RemoteMemory& m) { held.push_back(std::move(m)); };
  p.server.on_returned = [&](Connection, const spinwire::Returned&) { ++returned; };
  {
    const Buffer memory = p.server.buffer(4096, Pool::lease);
    ASSERT_EQ(p.ends.server.lease(memory.slice(), {.duration = 60s}), Status::ok);
  }
  ASSERT_TRUE(p.until([&] { return held.size() == 1; }));
  {
    // Under way when the drain begins.
    const Buffer data = p.client.filled(64, 1);
    ASSERT_EQ(p.client.tally.run([&](auto done) {
      return p.ends.client.write(data.slice(), held[0].region(), done);
    }),
              Status::ok);
  }
  Drained drained;
  drained.begin(p.server);
  ASSERT_TRUE(p.until([&] { return p.server.engine.drained() && p.client.closed.size() == 1; }));
  EXPECT_EQ(p.client.tally.ended(Status::ok), 1u) << "the operation completed before";
  EXPECT_EQ(returned, 1u);
  EXPECT_EQ(drained.reports[0].connections, 0u);
  held.clear();
  p.finish();
}

TEST(EngineDrain, AnEngineThatWaitsDrainsToo) {
  Pair p;
  Drained drained;
  drained.begin(p.server);
  ASSERT_TRUE(p.until([&] {
    (void)p.server.engine.wait(1s);
    return p.server.engine.drained();
  }));
  EXPECT_EQ(drained.reports.size(), 1u);
  p.finish();
}

}  // namespace
}  // namespace drain_test
