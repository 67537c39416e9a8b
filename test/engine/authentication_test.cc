// Engines with key files: connections, sessions and their long calls, and what is refused.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "control/key_files.h"
#include "engine/harness.h"
#include "rpc/long_calls.h"

namespace engine_authentication_test {
namespace {

using namespace rpc_test;  // the names of a test namespace
using key_files::KeyFile;
using key_files::line;

Config keyed(const KeyFile& file, Config c = rpc_config()) {
  c.security.key_file = file.path();
  c.security.open = false;
  return c;
}

TEST(EngineAuthentication, ConnectionsCarryMessages) {
  const KeyFile file(line("2026", 'a'));
  Pair p(keyed(file));
  bool came = false;
  p.server.on_message = [&](Connection, Message& m) { came = Node::holds(m.bytes(), 3); };
  EXPECT_EQ(p.ends.client.send(p.client.filled(100, 3)), Status::ok);
  EXPECT_TRUE(p.until([&] { return came; }));
  EXPECT_EQ(p.server.engine.stats().authentication.authenticated, 1u);
  EXPECT_EQ(p.client.engine.stats().authentication.authenticated, 1u);
  p.finish();
}

class EngineAuthenticationOver : public testing::TestWithParam<RpcTransport> {};

TEST_P(EngineAuthenticationOver, SessionsCarryCallsOfAnyLength) {
  const KeyFile file(line("2026", 'a'));
  Config c = long_call_config();
  c.rpc.transport = GetParam();
  LongCalls calls(keyed(file, c));
  EXPECT_EQ(calls.call(kFold, number(7)).status, Status::ok);
  const Bytes request(100'000, std::byte{5});
  EXPECT_EQ(calls.call(kFold, request).bytes, fold_of(request));
  // The session, and the connection of its calls.
  EXPECT_EQ(calls.server.engine.stats().authentication.authenticated, 2u);
}

INSTANTIATE_TEST_SUITE_P(Transports, EngineAuthenticationOver,
                         testing::Values(RpcTransport::automatic, RpcTransport::connection));

/// A server, and a client that tries to connect and to open a session. Both must fail.
void expect_strangers(const Config& server_config, const Config& client_config, Status connecting,
                      Status opening) {
  Node server(server_config), client(client_config);
  ASSERT_TRUE(server.engine.serve(1, [](Request& r) { (void)r.reply(r.bytes()); }));
  server.listen();
  (void)client.begin(server);
  std::vector<Error> closed;
  SessionOptions options;
  options.on_closed = [&](Session, const Error& why) { closed.push_back(why); };
  const auto session = client.engine.open_session(server.listener.address(), options);
  ASSERT_TRUE(session) << session.error().message();
  EXPECT_TRUE(
      until({&server, &client}, [&] { return client.closed.size() == 1 && closed.size() == 1; }));
  EXPECT_EQ(client.closed.at(0).status, connecting) << client.closed.at(0).message();
  EXPECT_EQ(closed.at(0).status, opening) << closed.at(0).message();
  EXPECT_EQ(server.accepts, 0u);
  EXPECT_EQ(server.engine.stats().connections, 0u);
  EXPECT_EQ(server.engine.stats().authentication.authenticated, 0u);
  EXPECT_EQ(server.engine.rpc_stats().served_sessions, 0u);
}

TEST(EngineAuthentication, AnotherKeyOpensNothing) {
  const KeyFile ours(line("2026", 'a')), theirs(line("2026", 'b'));
  expect_strangers(keyed(ours), keyed(theirs), Status::unauthenticated, Status::unauthenticated);
}

TEST(EngineAuthentication, AClientWithoutAKeyOpensNothing) {
  const KeyFile file(line("2026", 'a'));
  expect_strangers(keyed(file), rpc_config(), Status::refused, Status::refused);
}

TEST(EngineAuthentication, AServerWithoutAKeyIsNotUsed) {
  const KeyFile file(line("2026", 'a'));
  expect_strangers(rpc_config(), keyed(file), Status::unauthenticated, Status::unauthenticated);
}

TEST(EngineAuthentication, OpenHasNoEffectWithAKey) {
  const KeyFile ours(line("2026", 'a')), theirs(line("2026", 'b'));
  Config open = keyed(ours);
  open.security.open = true;
  expect_strangers(open, rpc_config(), Status::refused, Status::refused);
  expect_strangers(open, keyed(theirs), Status::unauthenticated, Status::unauthenticated);
  // A client does not use a server that does not prove the key.
  expect_strangers(rpc_config(), open, Status::unauthenticated, Status::unauthenticated);
  expect_strangers(keyed(theirs), open, Status::unauthenticated, Status::unauthenticated);
}

// The server's file may be changed before the client's, so the client goes on.
TEST(EngineAuthentication, AClientWithAnotherKeyReconnects) {
  const KeyFile ours(line("new", 'a')), theirs(line("old", 'b'));
  Node server(keyed(ours)), client(keyed(theirs));
  server.listen();
  ConnectOptions options;
  options.handlers = client.handlers();
  options.reconnect = {.attempts = 2, .first_delay = 1ms, .max_delay = 2ms};
  ASSERT_TRUE(client.engine.connect(server.listener.address(), options));
  EXPECT_TRUE(until({&server, &client}, [&] { return !client.closed.empty(); }));
  EXPECT_EQ(client.closed.at(0).status, Status::unauthenticated);
  EXPECT_EQ(server.engine.stats().authentication.unknown_key, 3u);
  EXPECT_EQ(client.engine.stats().authentication.unproven_servers, 3u);
}

TEST(EngineAuthentication, AFileWithoutAKeyOpensNoEngine) {
  for (const KeyFile& file : {KeyFile(""), KeyFile(line("a", '1'), 0644)}) {
    const auto engine = Engine::open(keyed(file));
    ASSERT_FALSE(engine);
    EXPECT_EQ(engine.error().status, Status::bad_config);
    EXPECT_NE(engine.error().asked.find(file.path()), std::string::npos);
  }
}

TEST(EngineAuthentication, OtherHostsNeedAKeyOrConsent) {
  Config c = rpc_config();
  c.security.open = false;
  Node closed(c);
  for (const char* address : {"0.0.0.0:0", "[::]:0", "192.0.2.1:7"}) {
    const auto made = closed.engine.listen(address, {});
    ASSERT_FALSE(made) << address;
    EXPECT_EQ(made.error().status, Status::unauthenticated) << made.error().message();
  }
  const auto connected = closed.engine.connect("192.0.2.1:7", {});
  ASSERT_FALSE(connected);
  EXPECT_EQ(connected.error().status, Status::unauthenticated);
  const auto opened = closed.engine.open_session("192.0.2.1:7", {});
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().status, Status::unauthenticated);
  EXPECT_EQ(closed.engine.stats().connections, 0u);

  c.security.open = true;
  Node open(c);
  EXPECT_TRUE(open.engine.listen("0.0.0.0:0", {}));
  const KeyFile file(line("2026", 'a'));
  Node with_key(keyed(file));
  EXPECT_TRUE(with_key.engine.listen("0.0.0.0:0", {}));
}

}  // namespace
}  // namespace engine_authentication_test
