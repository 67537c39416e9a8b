// Engine::drain() and ServedSession::close(): what becomes of calls. Each test runs with sessions
// over datagrams and over connections.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "rpc/rpc_ends.h"

namespace drain_calls_test {
namespace {

using namespace rpc_test;  // the names of a test namespace
using spinwire::DrainReport;
using spinwire::Goodbye;
using spinwire::GoodbyeReason;
using spinwire::ServedSession;
using spinwire::ServedSessionInfo;

constexpr Goodbye kGoodbye{GoodbyeReason::draining, 500ms};
constexpr Nanoseconds kLong = 1h;

class RpcDrain : public testing::TestWithParam<RpcTransport> {
 protected:
  static Config config() { return over(GetParam()); }
  void drain(Node& node, Nanoseconds timeout = kLong) {
    const auto begun = node.engine.drain(
        timeout, {.retry_after = kGoodbye.retry_after,
                  .on_drained = [this](const DrainReport& r) { reports.push_back(r); }});
    ASSERT_TRUE(begun) << begun.error().message();
  }
  std::vector<DrainReport> reports;
};

INSTANTIATE_TEST_SUITE_P(Transports, RpcDrain,
                         testing::Values(RpcTransport::automatic, RpcTransport::connection),
                         [](const auto& of) {
                           return of.param == RpcTransport::automatic ? "Automatic" : "Connection";
                         });

void expect_over(const Calls& calls) {
  ASSERT_EQ(calls.closed.size(), 1u);
  EXPECT_EQ(calls.closed[0].status, Status::ok);
  EXPECT_EQ(calls.closed[0].goodbye, kGoodbye);
}

TEST_P(RpcDrain, AnIdleSessionEndsWithAGoodbye) {
  Calls calls(config());
  (void)calls.call(kEcho, filled(10, 1));
  drain(calls.server);
  ASSERT_TRUE(calls.until([&] { return calls.server.engine.drained() && !calls.closed.empty(); }));
  expect_over(calls);
  EXPECT_EQ(calls.session.state(), SessionState::closed);
  ASSERT_EQ(reports.size(), 1u);
  EXPECT_EQ(reports[0].served_sessions + reports[0].connections, 0u);
  calls.finish();
}

TEST_P(RpcDrain, CallsInProgressAreAnsweredAndFurtherOnesDoNotRun) {
  Calls calls(config());
  ASSERT_EQ(calls.begin(kLater, filled(10, 1)), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.later.size() == 1; }));
  drain(calls.server);
  // Accepted before the goodbye has come.
  ASSERT_EQ(calls.begin(kCount, filled(10, 2)), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.ended[1].times == 1; }));
  EXPECT_EQ(calls.ended[1].status, Status::not_connected);
  EXPECT_TRUE(calls.runs.empty());
  ASSERT_TRUE(calls.until([&] { return calls.session.state() == SessionState::closing; }));
  EXPECT_EQ(calls.begin(kCount, filled(10, 3)), Status::not_connected);
  EXPECT_EQ(calls.session.max_inline_call(), 0u);
  EXPECT_TRUE(calls.server.engine.draining());
  EXPECT_TRUE(calls.closed.empty()) << "a call is in progress";
  EXPECT_EQ(calls.later[0].call.reply(calls.later[0].bytes), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.server.engine.drained() && !calls.closed.empty(); }));
  EXPECT_EQ(calls.ended[0].status, Status::ok);
  expect_over(calls);
  EXPECT_EQ(reports[0].served_calls, 0u);
  calls.finish();
}

TEST_P(RpcDrain, UnderLoadEachCallEitherRunsAndIsAnsweredOrDoesNotRun) {
  Calls calls(config());
  std::uint32_t made = 0;
  for (bool drains = false; calls.closed.empty();) {
    if (calls.begin(kCount, filled(16, made)) == Status::ok) ++made;
    (void)(calls.client.poll() + calls.server.poll());
    if (!drains && made >= 50) {
      drains = true;
      drain(calls.server);
    }
    ASSERT_LT(made, 100'000u) << "the session goes on";
  }
  ASSERT_TRUE(calls.until([&] { return calls.server.engine.drained(); }));
  std::size_t answered = 0;
  for (const Ended& e : calls.ended) {
    ASSERT_EQ(e.times, 1);
    ASSERT_TRUE(e.status == Status::ok || e.status == Status::not_connected) << to_string(e.status);
    answered += e.status == Status::ok ? 1 : 0;
  }
  EXPECT_GE(answered, 1u);
  EXPECT_EQ(calls.runs.size(), answered);
  EXPECT_EQ(reports[0].served_calls, 0u);
  expect_over(calls);
  calls.finish();
}

TEST_P(RpcDrain, CallsThatWaitForTheWindowDoNotRun) {
  Calls calls(config(), nullptr, 1);
  ASSERT_EQ(calls.begin(kLater, filled(10, 1)), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.later.size() == 1; }));
  for (std::uint32_t i = 0; i < 5; ++i) ASSERT_EQ(calls.begin(kCount, filled(10, i)), Status::ok);
  drain(calls.server);
  ASSERT_TRUE(calls.until([&] { return calls.ended.back().times == 1; }));
  EXPECT_EQ(calls.later[0].call.reply(calls.later[0].bytes), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.server.engine.drained() && !calls.closed.empty(); }));
  EXPECT_EQ(calls.ended[0].status, Status::ok);
  for (std::size_t i = 1; i < calls.ended.size(); ++i)
    EXPECT_EQ(calls.ended[i].status, Status::not_connected);
  EXPECT_TRUE(calls.runs.empty());
  calls.finish();
}

TEST_P(RpcDrain, HandlersThatWaitMayCallOthersMeanwhile) {
  Calls calls(config());
  Node behind(config());
  behind.listen();
  ASSERT_TRUE(behind.engine.serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
  auto made = calls.server.engine.open_session(behind.listener.address(), {});
  ASSERT_TRUE(made) << made.error().message();
  Session further = *made;
  const auto until = [&](auto&& done) {
    return engine_test::until({&calls.client, &calls.server, &behind}, done);
  };
  ASSERT_TRUE(until([&] { return further.ready(); }));
  ASSERT_EQ(calls.begin(kLater, filled(10, 1)), Status::ok);
  ASSERT_TRUE(until([&] { return calls.later.size() == 1; }));
  drain(calls.server);
  for (int i = 0; i < 200; ++i) (void)(calls.client.poll() + calls.server.poll() + behind.poll());
  const PendingCall waiting = calls.later[0].call;
  const Bytes request = filled(20, 2);
  ASSERT_EQ(further.call(kEcho, request,
                         [&waiting](Reply& r) { EXPECT_EQ(waiting.reply(r.bytes()), Status::ok); }),
            Status::ok);
  ASSERT_TRUE(until([&] { return calls.server.engine.drained() && !calls.closed.empty(); }));
  EXPECT_EQ(calls.ended[0].status, Status::ok);
  EXPECT_EQ(calls.ended[0].bytes, filled(20, 2));
  ASSERT_TRUE(until([&] { return behind.engine.rpc_stats().served_sessions == 0; }));
  calls.finish();
}

TEST_P(RpcDrain, AnUnansweredCallIsCutOffWhenTheTimeIsOver) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a manual clock does not move the device";
  std::uint64_t ticks = 1;
  Config c = config();
  c.connections.peer_timeout = 1h;
  c.rpc.call_timeout = 1h;
  Calls calls(c, &ticks);
  ASSERT_EQ(calls.begin(kLater, filled(10, 1)), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.later.size() == 1; }));
  drain(calls.server, 60s);
  const std::uint64_t end = ticks + static_cast<std::uint64_t>(Nanoseconds(60s).count());
  calls.each_turn = [&] { ticks = std::min(ticks + 1'000'000, end - 1); };
  ASSERT_TRUE(calls.until([&] { return ticks == end - 1; }));
  EXPECT_TRUE(calls.server.engine.draining());
  EXPECT_EQ(calls.session.state(), SessionState::closing);
  calls.each_turn = [&] { ticks += 1'000'000; };
  ASSERT_TRUE(calls.until([&] { return calls.server.engine.drained() && !calls.closed.empty(); }));
  EXPECT_EQ(calls.ended[0].status, Status::flushed);
  EXPECT_EQ(calls.closed[0].goodbye, kGoodbye);
  ASSERT_EQ(reports.size(), 1u);
  EXPECT_EQ(reports[0].served_sessions, 1u);
  EXPECT_EQ(reports[0].served_calls, 1u);
  EXPECT_EQ(calls.later[0].call.reply(Bytes{}), Status::not_connected);
  calls.client.stale_allowed = calls.server.stale_allowed = true;
  calls.finish();
}

TEST_P(RpcDrain, ASessionIsRefusedWithATime) {
  Calls calls(config());
  drain(calls.server);
  const std::size_t before = calls.closed.size();
  const Session late = calls.open();
  ASSERT_TRUE(calls.until(
      [&] { return late.state() == SessionState::closed && calls.closed.size() == before + 2; }));
  bool is_refused = false;
  for (const Error& e : calls.closed) {
    EXPECT_EQ(e.goodbye, kGoodbye) << e.message();
    is_refused |= e.status == Status::refused;
  }
  EXPECT_TRUE(is_refused);
  ASSERT_TRUE(calls.until([&] { return calls.server.engine.drained(); }));
  calls.finish();
}

TEST_P(RpcDrain, AClientThatDrainsWaitsForItsCalls) {
  Calls calls(config());
  ASSERT_EQ(calls.begin(kLater, filled(10, 1)), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.later.size() == 1; }));
  drain(calls.client);
  for (int i = 0; i < 200; ++i) (void)(calls.client.poll() + calls.server.poll());
  EXPECT_EQ(calls.begin(kCount, filled(10, 3)), Status::not_connected);
  EXPECT_TRUE(calls.client.engine.draining());
  EXPECT_EQ(calls.later[0].call.reply(calls.later[0].bytes), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.client.engine.drained(); }));
  EXPECT_EQ(calls.ended[0].status, Status::ok);
  EXPECT_EQ(reports[0].sessions, 0u);
  ASSERT_EQ(calls.closed.size(), 1u);
  EXPECT_EQ(calls.closed[0].goodbye, Goodbye{}) << "the server said nothing";
  calls.finish();
}

TEST_P(RpcDrain, AnEngineThatIsDestroyedMeanwhileSaysTheSameGoodbye) {
  Calls calls(config());
  (void)calls.call(kEcho, filled(10, 1));
  ASSERT_EQ(calls.begin(kLater, filled(10, 1)), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.later.size() == 1; }));
  drain(calls.server);
  calls.server.listener = Listener();
  calls.server.engine = Engine();
  ASSERT_TRUE(engine_test::until({&calls.client}, [&] { return !calls.closed.empty(); }));
  EXPECT_EQ(calls.closed[0].goodbye, kGoodbye);
  EXPECT_EQ(calls.ended[1].status, Status::flushed);
  EXPECT_EQ(reports.size(), 0u);
}

/// The sessions that a server serves.
std::vector<ServedSession> sessions_of(const Engine& engine, std::uint32_t at_once = 1024) {
  struct Seen {
    std::vector<ServedSession> sessions;
    std::vector<std::string> peers;
  } seen;
  std::uint32_t from = 0;
  do {
    from = engine.visit_served_sessions(from, at_once, [s = &seen](const ServedSessionInfo& info) {
      s->sessions.push_back(info.session);
      s->peers.emplace_back(info.peer.address);
      EXPECT_EQ(info.window, 8u);
    });
  } while (from != 0);
  for (const std::string& peer : seen.peers) EXPECT_EQ(peer.find("127.0.0.1:"), 0u) << peer;
  return seen.sessions;
}

TEST_P(RpcDrain, ServedSessionsAreListedAndOneOfThemIsClosed) {
  Calls calls(config());
  const Session kept = calls.open();
  ASSERT_TRUE(calls.until([&] { return kept.ready(); }));
  auto& engine = calls.server.engine;
  ASSERT_EQ(sessions_of(engine).size(), 2u);
  EXPECT_EQ(sessions_of(engine, 1), sessions_of(engine));
  EXPECT_EQ(engine.visit_served_sessions(0, 0, [](const ServedSessionInfo&) { FAIL(); }), 0u);
  EXPECT_EQ(engine.visit_served_sessions(~0u, 9, [](const ServedSessionInfo&) { FAIL(); }), 0u);

  ASSERT_EQ(calls.begin(kLater, filled(10, 1)), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.later.size() == 1; }));
  ServedSession busy;
  (void)engine.visit_served_sessions(0, 64, [b = &busy](const ServedSessionInfo& info) {
    if (info.calls == 1) *b = info.session;
    EXPECT_FALSE(info.is_leaving);
  });
  EXPECT_EQ(busy.close({GoodbyeReason::none, 0ms}), Status::invalid_argument);
  EXPECT_EQ(busy.close(kGoodbye, -1ns), Status::invalid_argument);
  ASSERT_EQ(busy.close(kGoodbye, kLong), Status::ok);
  EXPECT_EQ(busy.close(kGoodbye), Status::not_connected);
  ASSERT_TRUE(calls.until([&] { return calls.session.state() == SessionState::closing; }));
  int leaving = 0;
  (void)engine.visit_served_sessions(
      0, 64, [l = &leaving](const ServedSessionInfo& info) { *l += info.is_leaving ? 1 : 0; });
  EXPECT_EQ(leaving, 1);
  EXPECT_EQ(calls.later[0].call.reply(calls.later[0].bytes), Status::ok);
  ASSERT_TRUE(calls.until([&] { return !calls.closed.empty(); }));
  EXPECT_EQ(calls.ended[0].status, Status::ok);
  expect_over(calls);
  EXPECT_EQ(busy.close(kGoodbye), Status::not_connected);
  ASSERT_TRUE(calls.until([&] { return sessions_of(engine).size() == 1; }));
  EXPECT_TRUE(kept.ready()) << "the engine does not drain";

  calls.session = kept;
  EXPECT_EQ(calls.call(kEcho, filled(10, 5)).status, Status::ok);
  calls.finish();
}

TEST_P(RpcDrain, AVisitorRunsUnderTheRulesOfCallbacks) {
  Calls calls(config());
  Ends ends = connect(calls.client, calls.server);
  Engine& engine = calls.server.engine;
  int visited = 0;
  const auto visit = [&](const ServedSessionInfo&) {
    ++visited;
    EXPECT_EQ(engine.poll(), -static_cast<int>(Status::reentrant));
    EXPECT_EQ(engine.poll_control(), -static_cast<int>(Status::reentrant));
    EXPECT_FALSE(engine.arm());
    EXPECT_EQ(engine.wait(1ms), Status::reentrant);
    EXPECT_FALSE(engine.audit());
    EXPECT_EQ(ends.server.send_copy(std::as_bytes(std::span("hello", 5))), Status::ok);
  };
  (void)engine.visit_served_sessions(0, 64, visit);
  EXPECT_EQ(visited, 1);
  EXPECT_TRUE(engine.audit()) << "the visit is over";
  ASSERT_TRUE(engine_test::until({&calls.client}, [&] { return calls.client.messages == 1; }))
      << "the visit has posted the message";
  EXPECT_EQ(ends.client.close(), Status::ok);
  calls.finish();
}

TEST_P(RpcDrain, AnEmptyServedSessionNamesNone) {
  EXPECT_EQ(ServedSession().close(kGoodbye), Status::not_connected);
  Node node;
  EXPECT_EQ(node.engine.visit_served_sessions(0, 64, [](const ServedSessionInfo&) { FAIL(); }), 0u);
}

TEST(RpcDrainLong, ALongCallUnderWayIsAnswered) {
  Config c = rpc_config();
  c.memory.rendezvous_bytes = 16u << 20;
  c.memory.send_bytes = 16u << 20;
  c.memory.windows = 16;
  c.connections.max_message_bytes = 4u << 20;
  Calls calls(c);
  ASSERT_EQ(calls.begin(kLater, filled(100'000, 1)), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.later.size() == 1; }));
  ASSERT_TRUE(calls.server.engine.drain(kLong, {.retry_after = kGoodbye.retry_after}));
  ASSERT_TRUE(calls.until([&] { return calls.session.state() == SessionState::closing; }));
  EXPECT_EQ(calls.begin(kCount, filled(100'000, 2)), Status::not_connected);
  EXPECT_EQ(calls.later[0].call.reply(filled(10, 7)), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.server.engine.drained() && !calls.closed.empty(); }));
  EXPECT_EQ(calls.ended[0].status, Status::ok);
  EXPECT_EQ(calls.ended[0].bytes, filled(10, 7));
  expect_over(calls);
  calls.finish();
}

}  // namespace
}  // namespace drain_calls_test
