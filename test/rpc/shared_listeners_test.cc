// Listeners that serve connections and sessions, and several listening engines.
#include "rpc/rpc_ends.h"

namespace rpc_shared_listeners_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

TEST(RpcSharedListeners, OneControlPortServesConnectionsAndSessionsOfManyEngines) {
  Calls t;
  Node other(rpc_config());
  std::vector<Session> sessions{t.session};
  for (int i = 0; i < 2; ++i) {
    sessions.push_back(t.open());
    sessions.push_back(other.engine.open_session(t.server.listener.address(), {}).value());
  }
  auto connection = other.engine.connect(t.server.listener.address(), {});
  ASSERT_TRUE(connection) << connection.error().message();
  const auto poll_all = [&](auto&& done) {
    return engine_test::until({&t.client, &t.server, &other}, done);
  };
  ASSERT_TRUE(poll_all([&] {
    return connection->state() == spinwire::ConnectionState::ready &&
           std::all_of(sessions.begin(), sessions.end(), [](Session& s) { return s.ready(); });
  }));
  int good = 0;
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    const Bytes bytes = filled(20, static_cast<std::uint32_t>(i));
    const auto done = [&good, bytes = bytes[0]](Reply& r) {
      good += r.status() == Status::ok && r.bytes()[0] == bytes ? 1 : 0;
    };
    ASSERT_EQ(sessions[i].call(kEcho, std::span<const std::byte>(bytes), done), Status::ok);
  }
  ASSERT_TRUE(poll_all([&] { return good == 5; }));
  EXPECT_EQ(connection->close(), Status::ok);
  for (Session& s : sessions) EXPECT_EQ(s.close(), Status::ok);
  ASSERT_TRUE(poll_all([&] {
    return other.engine.stats().connections + t.server.engine.stats().connections == 0 &&
           other.engine.rpc_stats().sessions + t.server.engine.rpc_stats().served_sessions == 0;
  }));
  other.expect_clean();
  t.finish();
}

TEST(RpcSharedListeners, SessionsReachTheEngineThatListensAtTheirAddress) {
  Calls t;
  Node second(rpc_config());
  second.listen();
  ASSERT_TRUE(second.engine.serve(kEcho, [](Request& r) { (void)r.refuse("the second"); }));
  Session there = t.client.engine.open_session(second.listener.address(), {}).value();
  const auto poll_all = [&](auto&& done) {
    return engine_test::until({&t.client, &t.server, &second}, done);
  };
  ASSERT_TRUE(poll_all([&] { return there.ready(); }));
  std::string text;
  const auto done = [&text](Reply& r) { text = std::string(r.text()); };
  ASSERT_EQ(there.call(kEcho, std::span<const std::byte>{}, done), Status::ok);
  ASSERT_TRUE(poll_all([&] { return !text.empty(); }));
  EXPECT_EQ(text, "the second");
  EXPECT_EQ(t.call(kEcho, filled(9, 1)).bytes, filled(9, 1));
  EXPECT_EQ(there.close(), Status::ok);
  ASSERT_TRUE(poll_all([&] { return second.engine.rpc_stats().served_sessions == 0; }));
  second.expect_clean();
  t.finish();
}

}  // namespace
}  // namespace rpc_shared_listeners_test
