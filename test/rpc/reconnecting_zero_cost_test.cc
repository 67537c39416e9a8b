// Engines whose connections and sessions would reconnect, that sleep, have timers, wait for room or
// drain: in the steady state they allocate nothing.
//
// An interruption is not part of that: to connect again is a set-up, with a socket, a handshake and
// a queue pair, which the system and the device allocate. But it gives back as much as it takes.
#include <gtest/gtest.h>

#include <vector>

#include "engine/sleeping.h"
#include "engine/zero_cost.h"
#include "rpc/rpc_ends.h"

namespace reconnecting_zero_cost_test {
namespace {

using namespace rpc_test;  // the names of a test namespace

constexpr spinwire::Reconnect kReconnects{10, 1ms, 8ms};

/// A client whose connection and session would reconnect, and tell when they are writable.
struct Reconnecting : Calls {
  Reconnecting() : Calls(lenient_config(rpc_config())) {
    EXPECT_EQ(session.close(), Status::ok);
    SessionOptions of_session;
    of_session.reconnect = kReconnects;
    of_session.on_writable = [this](Session) { ++writable_sessions; };
    session = client.engine.open_session(server.listener.address(), of_session).value();
    ConnectOptions options;
    options.handlers = client.handlers();
    options.handlers.on_writable = [this](Connection) { ++writable_connections; };
    options.reconnect = kReconnects;
    connection = client.engine.connect(server.listener.address(), options).value();
    EXPECT_TRUE(until([&] { return session.ready() && connection.ready(); }));
  }
  /// Sends and calls until there is no room, starts timers, and lets both ends sleep.
  bool turn() {
    auto once = client.engine.after(0ns, [this] { ++timers; });
    auto never = client.engine.every(1h, [] {});
    while (connection.send_copy(std::as_bytes(std::span("x", 1))) == Status::ok) {
    }
    const auto replied = [this](Reply& r) { replies += r.status() == Status::ok ? 1 : 0; };
    while (session.call(kEcho, std::as_bytes(std::span("x", 1)), replied) == Status::ok) {
    }
    // The server gives room before the client looks for it.
    for (Engine* const engine : {&server.engine, &client.engine}) {
      (void)engine->wait(1us);
      (void)engine->arm();
      (void)engine->poll();
    }
    return once && never && never->cancel() == Status::ok;
  }
  Connection connection;
  std::uint64_t replies = 0, timers = 0, writable_sessions = 0, writable_connections = 0;
};

/// The heap calls of so many turns.
template <typename Turn>
std::uint64_t heap_calls_of(int turns, Turn&& turn) {
  zero_cost_test::heap_calls = 0;
  zero_cost_test::armed = true;
  bool good = true;
  for (int i = 0; i < turns; ++i) good = turn() && good;
  zero_cost_test::armed = false;
  EXPECT_TRUE(good);
  return zero_cost_test::heap_calls;
}

TEST(RpcReconnectingZeroCost, SleepsTimersAndWritableEndsDoNotAllocate) {
  Reconnecting t;
  for (int i = 0; i < 500; ++i) ASSERT_TRUE(t.turn());
  t.replies = t.timers = t.writable_sessions = t.writable_connections = 0;
  EXPECT_EQ(heap_calls_of(2000, [&] { return t.turn(); }), 0u);
  EXPECT_GT(t.replies, 1000u);
  EXPECT_GT(t.timers, 100u);
  EXPECT_GT(t.writable_sessions, 100u);
  EXPECT_GT(t.writable_connections, 100u);
  EXPECT_EQ(t.connection.close(), Status::ok);
  t.finish();
}

TEST(RpcReconnectingZeroCost, ADrainThatWaitsForACallDoesNotAllocate) {
  Calls t(lenient_config(rpc_config()));  // a client that reconnects would try again and again
  ASSERT_EQ(t.begin(kLater, filled(5, 1)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  ASSERT_TRUE(t.server.engine.drain(std::chrono::hours(1)));
  ASSERT_TRUE(t.until([&] { return t.session.state() == SessionState::closing; }));
  const auto turn = [&t] {
    (void)t.client.engine.wait(1us);
    (void)t.server.engine.wait(1us);
    (void)(t.client.poll() + t.server.poll());
    return t.server.engine.draining();
  };
  for (int i = 0; i < 500; ++i) ASSERT_TRUE(turn());
  EXPECT_EQ(heap_calls_of(2000, turn), 0u);
  EXPECT_EQ(t.later[0].call.reply(filled(5, 2)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.server.engine.drained(); }));
  EXPECT_EQ(t.ended[0].bytes, filled(5, 2));
  t.finish();
}

/// The embedded device does not use a key again before it has collected this many that are closed.
/// Until then its table grows.
void close_many_keys(Engine& engine) {
  std::vector<std::byte> bytes(64);
  for (int i = 0; i < 1100; ++i) ASSERT_TRUE(engine.register_memory(bytes, Access::remote_read));
}

/// The heap's bytes that had been kept at the end of each of some rounds, which differ in nothing.
template <typename Round>
std::vector<std::int64_t> bytes_kept_by_rounds(Round&& round) {
  std::vector<std::int64_t> kept(200);
  for (int i = 0; i < 10; ++i) round();  // these may still keep some
  zero_cost_test::heap_bytes = 0;
  zero_cost_test::heap_calls = 0;
  for (std::int64_t& each : kept) {
    zero_cost_test::armed = true;
    round();
    zero_cost_test::armed = false;
    each = zero_cost_test::heap_bytes;
  }
  EXPECT_GT(zero_cost_test::heap_calls, 0u) << "nothing was counted";
  return kept;
}

/// What each reconnect keeps shows in each round. A round in which the processor was away may need
/// another attempt, and a list may grow for it: that shows in few.
void expect_no_growth(const std::vector<std::int64_t>& kept) {
  int grown = 0;
  for (std::size_t i = 1; i < kept.size(); ++i) grown += kept[i] > kept[i - 1] ? 1 : 0;
  const bool rises = grown > static_cast<int>(kept.size()) / 2;
  EXPECT_FALSE(rises) << testing::PrintToString(kept);
  const std::int64_t total = kept.back() - kept.front();
  EXPECT_LT(total, 8 * static_cast<std::int64_t>(kept.size())) << testing::PrintToString(kept);
}

TEST(RpcReconnectingZeroCost, AConnectionThatReconnectsKeepsNoMoreOfTheHeap) {
#if !SPINWIRE_TEST_COUNTS_HEAP
  GTEST_SKIP() << "this sanitizer has a heap of its own";
#endif
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "other devices allocate as they like";
  Node server(watchful_config()), client(watchful_config());
  server.listen();
  ConnectOptions options;
  options.handlers = client.handlers();
  int interrupted = 0;
  options.handlers.on_interrupted = [&](Connection, const Error&) { ++interrupted; };
  options.reconnect = {1000, 1ms, 8ms};
  const Connection c = client.engine.connect(server.listener.address(), options).value();
  const auto made = [&] {
    return c.ready() && server.ready.size() == 1 && server.engine.stats().connections == 1;
  };
  ASSERT_TRUE(until({&client, &server}, made));
  for (Node* const each : {&client, &server}) close_many_keys(each->engine);
  const RemoteRegion nowhere{0x1000, 64, 0x7777, Access::remote_read};
  const auto round = [&] {
    const int before = interrupted;
    {
      const Buffer here = server.buffer(64, Pool::lease);
      EXPECT_EQ(server.ready[0].read(here.slice(), nowhere), Status::ok);
    }
    server.ready.clear();
    ASSERT_TRUE(until({&client, &server}, [&] { return interrupted > before && made(); }));
    client.ready.clear();
    server.closed.clear();
    server.closed_connections.clear();
    for (int i = 0; i < 20; ++i) (void)(client.poll() + server.poll());
  };
  const std::vector<std::int64_t> kept = bytes_kept_by_rounds(round);
  expect_no_growth(kept);
  client.ready = {c};
  finish(client, server);
}

TEST(RpcReconnectingZeroCost, ASessionThatReconnectsKeepsNoMoreOfTheHeap) {
#if !SPINWIRE_TEST_COUNTS_HEAP
  GTEST_SKIP() << "this sanitizer has a heap of its own";
#endif
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "other devices allocate as they like";
  Calls t;
  EXPECT_EQ(t.session.close(), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.server.engine.rpc_stats().served_sessions == 0; }));
  SessionOptions options;
  int interrupted = 0;
  options.on_interrupted = [&](Session, const Error&) { ++interrupted; };
  options.reconnect = {1000, 1ms, 8ms};
  t.session = t.client.engine.open_session(t.server.listener.address(), options).value();
  ASSERT_TRUE(t.until([&] { return t.session.ready(); }));
  for (Node* const each : {&t.client, &t.server}) close_many_keys(each->engine);
  const auto round = [&] {
    const int before = interrupted;
    bool replied = false;
    EXPECT_EQ(t.session.call(kEcho, std::as_bytes(std::span("x", 1)),
                             [&](Reply& r) { replied = r.status() == Status::ok; }),
              Status::ok);
    ASSERT_TRUE(t.until([&] { return replied; }));
    (void)t.server.engine.visit_served_sessions(0, 64, [](const spinwire::ServedSessionInfo& s) {
      EXPECT_EQ(s.session.close({spinwire::GoodbyeReason::overloaded, 0ns}), Status::ok);
    });
    ASSERT_TRUE(t.until([&] {
      return interrupted > before && t.session.ready() &&
             t.server.engine.rpc_stats().served_sessions == 1;
    }));
    for (int i = 0; i < 20; ++i) (void)(t.client.poll() + t.server.poll());
  };
  const std::vector<std::int64_t> kept = bytes_kept_by_rounds(round);
  expect_no_growth(kept);
  t.finish();
}

}  // namespace
}  // namespace reconnecting_zero_cost_test
