// Engines whose connections and sessions would reconnect, that sleep, have timers, wait for room or
// drain: in the steady state they allocate nothing.
//
// An interruption is not part of it: to connect again is a set-up, with a socket, a handshake and a
// queue pair, which the system and the device allocate.
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace reconnecting_zero_cost_test
