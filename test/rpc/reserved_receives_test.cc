// Receives and turns, for which the calls of several sessions compete.
#include <deque>
#include <vector>

#include "rpc/rpc_ends.h"

namespace rpc_reserved_receives_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

constexpr std::span<const std::byte> kNothing;

TEST(RpcReservedReceives, WhoServesManyCanStillCallOthers) {
  Config few = rpc_config();
  few.rpc.receive_depth = 64;
  Node middle(few), behind(rpc_config()), callers(rpc_config());
  middle.listen();
  behind.listen();
  const auto echo = [](Request& r) { EXPECT_EQ(r.reply(r.bytes()), Status::ok); };
  ASSERT_TRUE(middle.engine.serve(kEcho, echo));
  ASSERT_TRUE(behind.engine.serve(kEcho, echo));
  Session onwards = middle.engine.open_session(behind.listener.address(), {}).value();
  std::vector<Session> sessions;
  // More sessions than the receives suffice for.
  for (std::uint32_t i = 0; i < few.rpc.receive_depth / few.rpc.window; ++i)
    sessions.push_back(callers.engine.open_session(middle.listener.address(), {}).value());
  const auto poll = [&](auto&& done) {
    return engine_test::until({&middle, &behind, &callers}, done);
  };
  ASSERT_TRUE(poll([&] {
    return onwards.ready() && std::all_of(sessions.begin(), sessions.end(),
                                          [](const Session& s) { return s.ready(); });
  }));
  std::uint64_t answered = 0;
  std::uint32_t open = 0;
  const auto done = [&](Reply& r) {
    EXPECT_EQ(r.status(), Status::ok);
    ++answered;
    --open;
  };
  const auto call_all = [&] {
    for (Session& s : sessions)
      while (s.call(kEcho, kNothing, done) == Status::ok) ++open;
  };
  ASSERT_TRUE(poll([&] { return call_all(), answered > 1000; }));
  std::optional<Status> how;
  ASSERT_EQ(onwards.call(kEcho, kNothing, [&how](Reply& r) { how = r.status(); }), Status::ok);
  const std::uint64_t before = answered;
  ASSERT_TRUE(poll([&] { return call_all(), how.has_value(); }));
  EXPECT_EQ(*how, Status::ok);
  EXPECT_LT(answered - before, 10'000u);  // it did not wait for another call's end
  ASSERT_TRUE(poll([&] { return open == 0; }));
  for (Node* node : {&middle, &behind, &callers}) node->expect_clean();
}

TEST(RpcReservedReceives, SessionsThatWaitForReceivesHaveTheirTurns) {
  Config few = rpc_config();
  few.rpc.receive_depth = 64;
  few.rpc.sessions = 128;
  few.rpc.target_rtt = Nanoseconds(0);  // a busy machine must not look like congestion
  Config many = rpc_config();
  many.rpc.sessions = 128;
  Node client(few), server(many);
  server.listen();
  ASSERT_TRUE(
      server.engine.serve(kEcho, [](Request& r) { EXPECT_EQ(r.reply(r.bytes()), Status::ok); }));
  struct Caller {
    Session session;
    std::uint64_t answered = 0;
    std::uint32_t open = 0;
  };
  std::deque<Caller> callers(128);
  SessionOptions options;
  options.window = 1;
  for (Caller& c : callers) {
    c.session = client.engine.open_session(server.listener.address(), options).value();
    ASSERT_TRUE(engine_test::until({&client, &server}, [&c] { return c.session.ready(); }));
  }
  const auto call_all = [&] {
    for (Caller& c : callers) {
      if (c.open != 0) continue;
      const auto done = [&c](Reply& r) {
        EXPECT_EQ(r.status(), Status::ok);
        ++c.answered;
        --c.open;
      };
      if (c.session.call(kEcho, kNothing, done) == Status::ok) ++c.open;
    }
  };
  ASSERT_TRUE(engine_test::until({&client, &server}, [&] {
    call_all();
    return callers.front().answered > 200;
  }));
  const auto [least, most] =
      std::minmax_element(callers.begin(), callers.end(),
                          [](const Caller& a, const Caller& b) { return a.answered < b.answered; });
  EXPECT_LE(most->answered, 2 * least->answered + 2);
  ASSERT_TRUE(engine_test::until({&client, &server}, [&] {
    return std::all_of(callers.begin(), callers.end(), [](const Caller& c) { return c.open == 0; });
  }));
  client.expect_clean();
  server.expect_clean();
}

TEST(RpcReservedReceives, NoMoreCallsAreUnderWayThanThereAreReceivesFor) {
  Config few = over(RpcTransport::datagram);
  few.rpc.receive_depth = 64;
  Node client(few), server(over(RpcTransport::datagram));
  server.listen();
  std::vector<PendingCall> later;
  ASSERT_TRUE(server.engine.serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
  ASSERT_TRUE(server.engine.serve(kLater, [&later](Request& r) { later.push_back(r.defer()); }));
  std::uint32_t begun = 0, ended = 0;
  const auto done = [&ended](Reply& r) {
    EXPECT_EQ(r.status(), Status::ok);
    ++ended;
  };
  std::vector<Session> sessions;
  for (int i = 0; i < 8; ++i) {
    Session s = client.engine.open_session(server.listener.address(), {}).value();
    ASSERT_TRUE(engine_test::until({&client, &server}, [&] { return s.ready(); }));
    ASSERT_EQ(s.call(kEcho, kNothing, done), Status::ok);  // gets the whole window
    ++begun;
    ASSERT_TRUE(engine_test::until({&client, &server}, [&] { return ended == begun; }));
    sessions.push_back(s);
  }
  for (Session& s : sessions) {
    for (std::uint32_t i = 0; i < few.rpc.window; ++i, ++begun) {
      ASSERT_EQ(s.call(kLater, kNothing, done), Status::ok);
      const auto audit = client.engine.audit();
      ASSERT_TRUE(audit) << audit.error().message();
    }
  }
  ASSERT_TRUE(engine_test::until({&client, &server}, [&] {
    EXPECT_LE(later.size(), few.rpc.receive_depth);
    for (const PendingCall& call : later) (void)call.reply(kNothing);
    later.clear();
    return ended == begun;
  }));
  for (Session& s : sessions) EXPECT_EQ(s.close(), Status::ok);
  ASSERT_TRUE(engine_test::until({&client, &server},
                                 [&] { return server.engine.rpc_stats().served_sessions == 0; }));
  client.expect_clean();
  server.expect_clean();
}

}  // namespace
}  // namespace rpc_reserved_receives_test
