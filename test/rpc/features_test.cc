// What users of engines of remote calls count on, feature by feature, as far as other tests do not
// have it as their subject.
#include "rpc/ends.h"

namespace rpc_features_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

TEST(RpcFeatures, OneControlPortServesConnectionsAndSessionsOfManyEngines) {
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

TEST(RpcFeatures, SessionsReachTheEngineThatListensAtTheirAddress) {
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

TEST(RpcFeatures, MethodsHaveNumbersOfSixteenBitsAndCanBeReplaced) {
  Calls t;
  auto& server = t.server.engine;
  const Bytes one = filled(1, 1), two = filled(2, 2);
  for (const spinwire::Method method : {spinwire::Method{0}, spinwire::Method{65535}}) {
    ASSERT_TRUE(server.serve(method, [&one](Request& r) { (void)r.reply(one); }));
    EXPECT_EQ(t.call(method, {}).bytes, one);
    ASSERT_TRUE(server.serve(method, [&two](Request& r) { (void)r.reply(two); }));
    EXPECT_EQ(t.call(method, {}).bytes, two);
  }
  EXPECT_EQ(t.call(65534, {}).status, Status::unsupported);
  ASSERT_TRUE(server.serve(0, nullptr));
  EXPECT_EQ(t.call(0, {}).status, Status::unsupported);
  t.finish();
}

TEST(RpcFeatures, RequestsAndRepliesLieOnACachelineWhereTheyArrived) {
  Calls t;
  std::vector<std::uintptr_t> places;
  const auto place = [](std::span<const std::byte> bytes) {
    return reinterpret_cast<std::uintptr_t>(bytes.data());
  };
  ASSERT_TRUE(t.server.engine.serve(9, [&](Request& r) {
    places.push_back(place(r.bytes()));
    (void)r.reply(r.bytes());
  }));
  bool ended = false;
  const auto done = [&](Reply& r) {
    places.push_back(place(r.bytes()));
    ended = true;
  };
  const Bytes bytes = filled(40, 1);
  ASSERT_EQ(t.session.call(9, std::span<const std::byte>(bytes), done), Status::ok);
  ASSERT_TRUE(t.until([&] { return ended; }));
  ASSERT_EQ(places.size(), 2u);
  for (const std::uintptr_t at : places) EXPECT_EQ(at % 64, 0u);
  t.finish();
}

TEST(RpcFeatures, ABufferTellsWhetherItMayBeWrittenAgain) {
  Calls t(rpc_config(), nullptr, 1);
  Buffer answer = t.server.buffer(1000);
  const auto give = [&answer](Request& r) { EXPECT_EQ(r.reply(answer.slice()), Status::ok); };
  ASSERT_TRUE(t.server.engine.serve(9, give));
  EXPECT_FALSE(Buffer().unique());
  EXPECT_TRUE(answer.unique());
  EXPECT_EQ(t.call(9, {}).bytes.size(), 1000u);
  EXPECT_EQ(answer.unique(), over_connections());  // else it may be asked for again
  (void)t.call(kEcho, {});                         // now it may not
  ASSERT_TRUE(t.until([&] { return answer.unique(); }));
  // A long one, until it is written.
  Buffer into = t.client.engine.allocate(answer.size(), spinwire::Pool::lease);
  CallOptions options;
  options.reply_into = into.slice();
  EXPECT_EQ(t.call(9, {}, options).bytes.size(), 1000u);
  ASSERT_TRUE(t.until([&] { return answer.unique(); }));
  EXPECT_FALSE(into.unique());
  options.reply_into = {};
  EXPECT_TRUE(into.unique());
  into.reset();
  answer.reset();
  t.finish();
}

TEST(RpcFeatures, BuffersAreMadeLongAndSentAsLongAsTheyAreNow) {
  Config c = rpc_config();
  c.memory.send_bytes = 64u << 20;
  c.memory.rendezvous_bytes = 64u << 20;
  c.connections.max_message_bytes = 16u << 20;
  Calls t(c);
  constexpr std::size_t kMost = 16u << 20;
  Buffer b = t.client.buffer(kMost);
  EXPECT_GE(b.capacity(), kMost);
  std::vector<std::size_t> seen;
  ASSERT_TRUE(t.server.engine.serve(9, [&seen](Request& r) {
    seen.push_back(r.bytes().size());
    (void)r.reply(r.bytes().last(1));
  }));
  int ended = 0;
  for (const std::size_t size : {kMost, kMost / 2 + 1, std::size_t{5000}, std::size_t{3}}) {
    b.resize(size);
    b.data()[size - 1] = std::byte{42};
    const auto done = [&ended](Reply& r) {
      EXPECT_EQ(r.status(), Status::ok) << to_string(r.status());
      ended += !r.bytes().empty() && r.bytes()[0] == std::byte{42} ? 1 : 0;
    };
    const int before = ended;
    ASSERT_EQ(t.session.call(9, b.slice(), done), Status::ok);
    ASSERT_TRUE(t.until([&] { return ended == before + 1; })) << size;
  }
  EXPECT_EQ(seen, (std::vector<std::size_t>{kMost, kMost / 2 + 1, 5000, 3}));
  b = Buffer();
  t.finish();
}

}  // namespace
}  // namespace rpc_features_test
