// What breaks engines of remote calls elsewhere: servers that take longer than the time-out,
// answers to the set-up that get lost, refused sessions, more requests than there are receives for.
#include "rpc/bare.h"

namespace rpc_endures_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

TEST(RpcEndures, AHandlerThatIsSlowerThanTheTimeOut) {
  std::uint64_t now = 1'000'000'000;
  Calls t(rpc_config(), &now);
  ASSERT_EQ(t.begin(kLater, filled(30, 1)), Status::ok);
  ASSERT_TRUE(t.until([&] {
    now += 1'000'000;
    return t.client.engine.rpc_stats().retransmits >= 4;
  }));
  ASSERT_TRUE(t.until([&] { return t.server.engine.rpc_stats().duplicates >= 4; }));
  ASSERT_EQ(t.later.size(), 1u);
  EXPECT_EQ(t.later[0].call.reply(filled(40, 2)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.ended[0].bytes, filled(40, 2));
  EXPECT_EQ(t.server.engine.rpc_stats().served, 1u);
  EXPECT_EQ(t.call(kEcho, filled(20, 3)).bytes, filled(20, 3));
  t.finish();
}

TEST(RpcEndures, ASessionThatIsRefused) {
  Config c = rpc_config();
  c.rpc.sessions = 1;
  Calls t(c);
  Node other(rpc_config());
  std::vector<Error> closed;
  SessionOptions options;
  options.on_closed = [&closed](Session, const Error& e) { closed.push_back(e); };
  auto second = other.engine.open_session(t.server.listener.address(), options);
  ASSERT_TRUE(second) << second.error().message();
  ASSERT_TRUE(engine_test::until({&t.client, &t.server, &other}, [&] { return !closed.empty(); }));
  EXPECT_EQ(closed[0].status, Status::limit) << closed[0].message();
  EXPECT_NE(closed[0].message().find("rpc.sessions"), std::string::npos) << closed[0].message();
  EXPECT_EQ(second->state(), SessionState::closed);
  EXPECT_EQ(other.engine.rpc_stats().sessions, 0u);
  EXPECT_EQ(t.call(kEcho, filled(20, 3)).bytes, filled(20, 3));
  other.expect_clean();
  t.finish();
}

TEST(RpcEndures, AnAnswerToTheSetUpThatIsLost) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  std::uint64_t now = 1'000'000'000;
  Config c = rpc_config();
  c.connections.keepalive = 100ms;
  c.connections.peer_timeout = 1s;
  Bare server(c, &now);
  auto listener = server.core->listen("127.0.0.1:0", {});
  ASSERT_TRUE(listener);
  ASSERT_TRUE(server.core->serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
  const auto served = [&] { return spinwire::rpc::stats(*server.core->calls).served_sessions; };
  {
    Bare client(c, &now);
    ASSERT_TRUE(client.core->open_session(listener->address(), {}));
    for (int i = 0; i < 100'000 && served() == 0; ++i) {
      now += 1000;
      (void)client.core->poll();
      (void)server.core->poll();
    }
    ASSERT_EQ(served(), 1u);
  }  // without having read the answer
  for (int i = 0; i < 10'000 && served() != 0; ++i) {
    now += 1'000'000;
    (void)server.core->poll();
  }
  EXPECT_EQ(served(), 0u);
  server.expect_clean();
}

TEST(RpcEndures, MoreRequestsThanThereAreReceivesFor) {
  Config few = rpc_config();
  few.rpc.receive_depth = 64;
  Node server(few), client(rpc_config());
  server.listen();
  ASSERT_TRUE(server.engine.serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
  std::vector<Session> sessions;
  for (int i = 0; i < 16; ++i) {
    sessions.push_back(client.engine.open_session(server.listener.address(), {}).value());
    ASSERT_TRUE(engine_test::until({&client, &server}, [&] { return sessions.back().ready(); }));
  }
  std::uint32_t begun = 0, ended = 0;
  const auto done = [&ended](Reply& r) { ended += r.status() == Status::ok ? 1 : 0; };
  const Bytes bytes = filled(32, 1);
  ASSERT_TRUE(engine_test::until({&client, &server}, [&] {
    for (Session& s : sessions) {
      while (begun < 20'000 && s.call(kEcho, std::span<const std::byte>(bytes), done) == Status::ok)
        ++begun;
    }
    return ended == 20'000;
  }));
  if (device_name() == "softverbs") {
    EXPECT_EQ(client.engine.rpc_stats().retransmits, 0u);
  }
  EXPECT_EQ(server.engine.rpc_stats().served, 20'000u);
  for (Session& s : sessions) EXPECT_EQ(s.close(), Status::ok);
  ASSERT_TRUE(engine_test::until({&client, &server}, [&] {
    return client.engine.rpc_stats().sessions + server.engine.rpc_stats().served_sessions == 0;
  }));
  client.expect_clean();
  server.expect_clean();
}

TEST(RpcEndures, OneRequestThatGoesToMany) {
  Node client(rpc_config());
  std::deque<Node> servers;
  std::vector<Session> sessions;
  std::vector<Bytes> seen;
  for (int i = 0; i < 3; ++i) {
    Node& server = servers.emplace_back(rpc_config());
    server.listen();
    ASSERT_TRUE(server.engine.serve(kEcho, [&seen](Request& r) {
      seen.push_back(bytes_of(r.bytes()));
      (void)r.reply(r.bytes().first(1));
    }));
    sessions.push_back(client.engine.open_session(server.listener.address(), {}).value());
    ASSERT_TRUE(engine_test::until({&client, &server}, [&] { return sessions.back().ready(); }));
  }
  const Bytes bytes = filled(700, 5);
  int ended = 0;
  {
    Buffer b = client.buffer(bytes.size());
    std::copy(bytes.begin(), bytes.end(), b.data());
    for (Session& s : sessions) {
      const auto done = [&ended](Reply& r) { ended += r.status() == Status::ok ? 1 : 0; };
      ASSERT_EQ(s.call(kEcho, b.slice(), done), Status::ok);
    }
  }  // let go of: the calls hold it
  ASSERT_TRUE(engine_test::until({&client, &servers[0], &servers[1], &servers[2]},
                                 [&] { return ended == 3; }));
  EXPECT_EQ(seen, std::vector<Bytes>(3, bytes));
  for (Session& s : sessions) EXPECT_EQ(s.close(), Status::ok);
  ASSERT_TRUE(engine_test::until({&client, &servers[0], &servers[1], &servers[2]}, [&] {
    std::uint32_t left = client.engine.rpc_stats().sessions + client.engine.stats().connections;
    for (const Node& each : servers) left += each.engine.stats().connections;
    return left == 0;
  }));
  client.expect_clean();
  for (Node& server : servers) server.expect_clean();
}

}  // namespace
}  // namespace rpc_endures_test
