// A goodbye with a reason: what the peer learns, that no message is lost, and when a client that
// reconnects comes back.
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "engine/harness.h"

namespace goodbye_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Endpoint;
using spinwire::Goodbye;
using spinwire::GoodbyeReason;
using spinwire::Nanoseconds;

constexpr Goodbye kDrains{GoodbyeReason::draining, 250ms};
constexpr Goodbye kPlain{GoodbyeReason::closed, 0ms};

TEST(EngineGoodbye, ThePeerLearnsReasonAndTime) {
  Pair p;
  ASSERT_EQ(p.ends.server.close(kDrains), Status::ok);
  EXPECT_EQ(p.ends.server.state(), ConnectionState::draining);
  ASSERT_TRUE(p.until([&] { return p.client.closed.size() + p.server.closed.size() == 2; }));
  EXPECT_EQ(p.client.closed[0].status, Status::ok);
  EXPECT_EQ(p.client.closed[0].goodbye, kDrains);
  EXPECT_NE(p.client.closed[0].message().find("draining"), std::string::npos);
  EXPECT_EQ(p.server.closed[0].status, Status::ok);
  EXPECT_EQ(p.server.closed[0].goodbye, Goodbye{});
  p.finish();
}

TEST(EngineGoodbye, AnApplicationThatJustClosesSaysSo) {
  Pair p;
  ASSERT_EQ(p.ends.server.close(), Status::ok);
  ASSERT_TRUE(p.until([&] { return p.client.closed.size() + p.server.closed.size() == 2; }));
  EXPECT_EQ(p.client.closed[0].status, Status::ok);
  EXPECT_EQ(p.client.closed[0].goodbye, kPlain);
  EXPECT_EQ(p.server.closed[0].goodbye, Goodbye{});
  p.finish();
}

TEST(EngineGoodbye, WhatNoGoodbyeSaysIsRefused) {
  Pair p;
  Connection c = p.ends.server;
  EXPECT_EQ(c.close({GoodbyeReason::none, 0ms}), Status::invalid_argument);
  EXPECT_EQ(c.close({GoodbyeReason::closed, 1ms}), Status::invalid_argument);
  EXPECT_EQ(c.close({GoodbyeReason::draining, -1ms}), Status::invalid_argument);
  EXPECT_EQ(c.close({GoodbyeReason::draining, spinwire::kMaxRetryAfter + 1ns}),
            Status::invalid_argument);
  EXPECT_EQ(c.close({static_cast<GoodbyeReason>(9), 0ms}), Status::invalid_argument);
  EXPECT_TRUE(c.ready());
  EXPECT_EQ(c.close(kDrains), Status::ok);
  EXPECT_EQ(c.close(kDrains), Status::not_connected);
  EXPECT_EQ(c.close(), Status::not_connected);
  p.finish();
}

/// Sends from both ends until credit is used up, without polling either, and closes one end.
void expect_nothing_lost(const Config& config, std::size_t bytes) {
  Pair p(config);
  const auto burst = [bytes](Node& from, Connection c) {
    std::uint64_t sent = 0;
    while (sent < 40) {
      const Buffer data = from.filled(bytes, static_cast<std::uint32_t>(sent));
      if (from.tally.run([&](auto done) { return c.send(data, done); }) != Status::ok) break;
      ++sent;
    }
    EXPECT_NE(sent, 0u);
    return sent;
  };
  const std::uint64_t to_server = burst(p.client, p.ends.client);
  const std::uint64_t to_client = burst(p.server, p.ends.server);
  ASSERT_EQ(p.ends.server.close(kDrains), Status::ok);
  ASSERT_TRUE(p.until([&] { return p.client.closed.size() + p.server.closed.size() == 2; }));
  EXPECT_EQ(p.server.messages, to_server);
  EXPECT_EQ(p.client.messages, to_client);
  EXPECT_EQ(p.client.tally.ended(Status::ok), to_server);
  EXPECT_EQ(p.server.tally.ended(Status::ok), to_client);
  EXPECT_EQ(p.client.closed[0].goodbye, kDrains);
  p.finish();
}

TEST(EngineGoodbye, NoMessageUnderWayIsLost) { expect_nothing_lost(small_config(), 64); }

TEST(EngineGoodbye, NoMessageByWorkRequestsIsLost) {
  expect_nothing_lost(without_direct_messages(), 64);
}

TEST(EngineGoodbye, NoRendezvousMessageIsLost) {
  Config c = without_direct_messages();
  c.memory.rendezvous_bytes = 8u << 20;
  c.memory.windows = 16;
  c.connections.max_message_bytes = 1u << 20;
  expect_nothing_lost(c, 100'000);
}

TEST(EngineGoodbye, BothEndsMaySayItAtOnce) {
  Pair p;
  ASSERT_EQ(p.ends.server.close(kDrains), Status::ok);
  ASSERT_EQ(p.ends.client.close({GoodbyeReason::overloaded, 1ms}), Status::ok);
  ASSERT_TRUE(p.until([&] { return p.client.closed.size() + p.server.closed.size() == 2; }));
  for (const Node* node : {&p.client, &p.server}) EXPECT_EQ(node->closed[0].status, Status::ok);
  p.finish();
}

TEST(EngineGoodbye, APeerThatDoesNotAnswerIsWaitedForAsForALostOne) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a manual clock does not move the device";
  std::uint64_t ticks = 1;
  Config config = small_config();
  config.connections.peer_timeout = 5s;
  Node server(config, &ticks);
  Node client(small_config());
  server.listen();
  const Ends ends = connect(client, server);
  Connection c = ends.server;
  ASSERT_EQ(c.close(kDrains), Status::ok);
  for (int i = 0; i < 1000; ++i) (void)server.poll();
  EXPECT_EQ(server.closed.size(), 0u) << "the peer has not answered";
  ticks += static_cast<std::uint64_t>(Nanoseconds(6s).count());
  ASSERT_TRUE(until({&server}, [&] { return server.closed.size() == 1; }));
  client.stale_allowed = server.stale_allowed = true;
  finish(client, server);
}

TEST(EngineGoodbye, APeerWithoutReasonsGetsThePlainOne) {
  Node a, b;
  std::optional<Endpoint> of_a, of_b;
  const auto prepare = [](Node& node, std::optional<Endpoint>& endpoint) {
    spinwire::PrepareOptions options;
    options.handlers = node.handlers();
    options.on_endpoint = [&endpoint](Connection, const Endpoint& e) { endpoint = e; };
    return *node.engine.prepare(options);
  };
  Connection to_b = prepare(a, of_a);
  Connection to_a = prepare(b, of_b);
  ASSERT_TRUE(until({&a, &b}, [&] { return of_a && of_b; }));
  EXPECT_TRUE(of_b->goodbye_reasons);
  EXPECT_EQ(*Endpoint::parse(of_b->text()), *of_b);
  of_b->goodbye_reasons = false;  // as an older release says
  EXPECT_EQ(*Endpoint::parse(of_b->text()), *of_b);
  ASSERT_TRUE(to_b.join(*of_b));
  ASSERT_TRUE(to_a.join(*of_a));
  ASSERT_TRUE(until({&a, &b}, [&] { return to_a.ready() && to_b.ready(); }));
  ASSERT_EQ(to_b.close(kDrains), Status::ok);
  ASSERT_TRUE(until({&a, &b}, [&] { return a.closed.size() + b.closed.size() == 2; }));
  EXPECT_EQ(b.closed[0].goodbye, kPlain);
  finish(a, b);
}

/// A client with a manual clock that reconnects.
struct ReconnectingClient {
  ReconnectingClient() : server(small_config(), &ticks), client(small_config(), &ticks) {
    server.listen();
    ConnectOptions options;
    options.handlers = client.handlers();
    options.handlers.on_interrupted = [this](Connection, const Error& e) {
      interruptions.push_back(e);
    };
    options.reconnect = {5, 1ms, 8ms};
    connection = *client.engine.connect(server.listener.address(), options);
    EXPECT_TRUE(until([&] { return client.ready.size() == 1 && server.ready.size() == 1; }));
  }
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({&client, &server}, done);
  }
  void pass(Nanoseconds time) { ticks += static_cast<std::uint64_t>(time.count()); }
  /// Polls often enough for an attempt that is due.
  void settle() {
    for (int i = 0; i < 2000; ++i) (void)(client.poll() + server.poll());
  }
  std::uint64_t ticks = 1;
  Node server, client;
  Connection connection;
  std::vector<Error> interruptions;
};

TEST(EngineGoodbye, AReconnectingClientComesBackButNotBeforeTheTime) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a manual clock does not move the device";
  ReconnectingClient r;
  ASSERT_EQ(r.server.ready[0].close(kDrains), Status::ok);
  ASSERT_TRUE(r.until([&] { return r.interruptions.size() == 1; }));
  EXPECT_EQ(r.interruptions[0].status, Status::ok);
  EXPECT_EQ(r.interruptions[0].goodbye, kDrains);
  r.pass(kDrains.retry_after - 1ms);
  r.settle();
  EXPECT_EQ(r.server.accepts, 1u) << "it came back before the time";
  r.pass(kDrains.retry_after / 4 + 10ms);  // the rest, with the spread
  ASSERT_TRUE(r.until([&] { return r.client.ready.size() == 2; }));
  EXPECT_EQ(r.client.ready[1], r.connection);
  EXPECT_EQ(r.client.closed.size(), 0u);
  ASSERT_EQ(r.connection.close(), Status::ok);
  finish(r.client, r.server);
}

TEST(EngineGoodbye, AReconnectingClientEndsIfTheApplicationJustCloses) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a manual clock does not move the device";
  ReconnectingClient r;
  ASSERT_EQ(r.server.ready[0].close(), Status::ok);
  ASSERT_TRUE(r.until([&] { return r.client.closed.size() == 1; }));
  EXPECT_EQ(r.interruptions.size(), 0u);
  EXPECT_EQ(r.client.closed[0].goodbye, kPlain);
  finish(r.client, r.server);
}

TEST(EngineGoodbye, ARefusalDelaysTheNextAttempt) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a manual clock does not move the device";
  ReconnectingClient r;
  const std::string address = r.server.listener.address();
  ASSERT_TRUE(r.server.engine.drain(100s, {.retry_after = 2s}));
  ASSERT_TRUE(r.until([&] { return r.interruptions.size() == 1 && r.server.engine.drained(); }));
  // The first attempt is due after the time and its spread, and is refused for two seconds more.
  r.pass(2s + 500ms + 10ms);
  ASSERT_TRUE(r.until([&] { return r.server.engine.stats().handshakes_refused == 1; }));
  r.settle();
  r.pass(2s - 1ms);
  r.settle();
  EXPECT_EQ(r.server.engine.stats().handshakes_refused, 1u) << "it asked before the time";
  r.pass(500ms + 20ms);
  ASSERT_TRUE(r.until([&] { return r.server.engine.stats().handshakes_refused == 2; }));
  EXPECT_EQ(r.client.closed.size(), 0u);
  ASSERT_EQ(r.connection.close(), Status::ok);
  finish(r.client, r.server);
}

}  // namespace
}  // namespace goodbye_test
