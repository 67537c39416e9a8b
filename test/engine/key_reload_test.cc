// Engine::reload_keys(): keys are replaced while connections and sessions go on.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <tuple>
#include <vector>

#include "control/key_files.h"
#include "engine/zero_cost.h"
#include "observe/engine_folder.h"
#include "rpc/long_calls.h"

namespace key_reload_test {
namespace {

using namespace rpc_test;  // the names of a test namespace
using key_files::KeyFile;
using key_files::line;

const std::string kOld = line("old", 'a');
const std::string kNew = line("new", 'b');

Config keyed(const KeyFile& file, Config c = rpc_config()) {
  c.security.key_file = file.path();
  c.security.open = false;
  return c;
}

void reload(const KeyFile& file, const std::string& text, Engine& engine) {
  file.write(text);
  const auto reloaded = engine.reload_keys();
  EXPECT_TRUE(reloaded) << reloaded.error().message();
}

/// Connects, and answers the name of the key that both ends know the other by.
std::string key_of_new_connection(Node& client, Node& server) {
  Ends ends = connect(client, server);
  std::string key(ends.client.peer_identity().key);
  EXPECT_EQ(ends.server.peer_identity().key, key);
  return key;
}

Error refusal_of_new_connection(Node& client, Node& server) {
  const std::size_t before = client.closed.size();
  (void)client.begin(server);
  EXPECT_TRUE(until({&client, &server}, [&] { return client.closed.size() > before; }));
  return client.closed.size() > before ? client.closed.back() : Error{};
}

/// Whether the server reloads first in each step.
class KeyRotation : public testing::TestWithParam<bool> {};

TEST_P(KeyRotation, HasNoInstantWithoutACommonKey) {
  const KeyFile servers(kOld), clients(kOld);
  Pair p(keyed(servers), keyed(clients));
  const auto carries = [&] {
    const std::uint64_t before = p.server.messages;
    EXPECT_EQ(p.ends.client.send(p.client.filled(100, 3)), Status::ok);
    EXPECT_TRUE(p.until([&] { return p.server.messages > before; }));
  };
  struct Step {
    std::string file;
    const char* key;    ///< of a connection made after one end has reloaded
    const char* after;  ///< and after both
  };
  const bool server_first = GetParam();
  for (const Step& step :
       {Step{kOld + kNew, "old", "old"}, Step{kNew + kOld, server_first ? "old" : "new", "new"},
        Step{kNew, "new", "new"}}) {
    const auto reload_one = [&](bool server) {
      server ? reload(servers, step.file, p.server.engine)
             : reload(clients, step.file, p.client.engine);
      carries();
    };
    reload_one(server_first);
    EXPECT_EQ(key_of_new_connection(p.client, p.server), step.key) << step.file;
    reload_one(!server_first);
    EXPECT_EQ(key_of_new_connection(p.client, p.server), step.after) << step.file;
  }
  EXPECT_TRUE(p.client.closed.empty() && p.server.closed.empty());
  EXPECT_EQ(p.ends.client.peer_identity().key, "old") << "as it was proved";
  EXPECT_EQ(p.ends.server.peer_identity().key, "old");
  EXPECT_EQ(p.server.engine.stats().handshakes_refused, 0u);
  p.finish();
}

INSTANTIATE_TEST_SUITE_P(Orders, KeyRotation, testing::Bool());

TEST(KeyReload, AClientWithAKeyThatWasRemovedIsRefused) {
  const KeyFile servers(kOld), clients(kOld);
  Pair p(keyed(servers), keyed(clients));
  reload(servers, kNew, p.server.engine);
  EXPECT_EQ(refusal_of_new_connection(p.client, p.server).status, Status::unauthenticated);
  EXPECT_EQ(p.server.engine.stats().authentication.unknown_key, 1u);
  EXPECT_TRUE(p.ends.client.ready()) << "what is connected stays";
  reload(clients, kNew, p.client.engine);
  EXPECT_EQ(key_of_new_connection(p.client, p.server), "new");
  p.finish();
}

TEST(KeyReload, ARefusedFileChangesNothing) {
  const KeyFile servers(kOld), clients(kOld);
  Pair p(keyed(servers), keyed(clients));
  const auto expect_refused = [&](const std::string& what) {
    const auto reloaded = p.server.engine.reload_keys();
    const auto opened = Engine::open(keyed(servers));
    ASSERT_FALSE(reloaded) << what;
    ASSERT_FALSE(opened) << what;
    EXPECT_EQ(reloaded.error().status, Status::bad_config) << what;
    EXPECT_EQ(reloaded.error().message(), opened.error().message()) << what;
    EXPECT_NE(reloaded.error().asked.find(servers.path()), std::string::npos);
    EXPECT_EQ(reloaded.error().message().find(std::string(8, 'b')), std::string::npos);
    EXPECT_NE(p.server.engine.describe().find("keys: old\n"), std::string::npos) << what;
    EXPECT_EQ(key_of_new_connection(p.client, p.server), "old") << what;
  };
  servers.write(kNew, 0640);
  expect_refused("rights of a group");
  servers.write(kNew + "old nonsense\n");
  expect_refused("a line that is no key, behind one that is");
  servers.write(kNew + line("new", 'c'));
  expect_refused("a name twice");
  for (const char* text : {"", "# none\n"}) {
    servers.write(text);
    expect_refused("no key");
  }
  ::unlink(servers.path().c_str());
  expect_refused("no file");
  ASSERT_EQ(::mkdir(servers.path().c_str(), 0700), 0);
  expect_refused("a folder");
  ::rmdir(servers.path().c_str());
  reload(servers, kNew + kOld, p.server.engine);
  EXPECT_EQ(key_of_new_connection(p.client, p.server), "old");
  p.finish();
}

TEST(KeyReload, ExhaustedMemoryChangesNothing) {
#if SPINWIRE_TEST_COUNTS_HEAP
  const KeyFile file(kOld);
  Node node(keyed(file));
  std::size_t failed = 0;
  for (std::uint32_t round = 0; round < 300; ++round) {
    const std::uint32_t every = 1 + round % 13;  // so each allocation is hit
    reload(file, kOld, node.engine);
    file.write(kNew);
    zero_cost_test::fail_every = every;
    const auto reloaded = node.engine.reload_keys();
    zero_cost_test::fail_every = 0;
    const std::string shown = node.engine.describe();
    EXPECT_NE(shown.find(reloaded ? "keys: new\n" : "keys: old\n"), std::string::npos) << every;
    if (reloaded) continue;
    ++failed;
    EXPECT_EQ(reloaded.error().status, Status::no_memory) << reloaded.error().message();
  }
  EXPECT_GT(failed, 100u);
  reload(file, kNew, node.engine);
#else
  GTEST_SKIP() << "a sanitizer has its own allocator";
#endif
}

TEST(KeyReload, AnEngineWithoutAKeyFileSaysSo) {
  Node node(rpc_config());
  const auto reloaded = node.engine.reload_keys();
  ASSERT_FALSE(reloaded);
  EXPECT_EQ(reloaded.error().status, Status::bad_config);
  EXPECT_NE(reloaded.error().message().find("security.key_file"), std::string::npos);
}

TEST(KeyReload, AHandshakeUnderWayEndsWithTheKeyOfItsProof) {
  const KeyFile file(kOld);
  Node server(keyed(file)), client(keyed(file));
  server.listen();
  const Connection c = client.begin(server);
  const auto proved = [](const Node& node) {
    return node.engine.stats().authentication.authenticated == 1;
  };
  ASSERT_TRUE(until({&client, &server}, [&] { return proved(client); }));
  ASSERT_FALSE(c.ready());
  reload(file, kNew, client.engine);
  reload(file, kNew, server.engine);
  ASSERT_TRUE(until({&client, &server}, [&] { return c.ready() && server.ready.size() == 1; }));
  EXPECT_EQ(c.peer_identity().key, "old");
  EXPECT_EQ(server.ready[0].peer_identity().key, "old");
  EXPECT_EQ(key_of_new_connection(client, server), "new");
  finish(client, server);
}

// A client takes its new first key at each instant of a handshake; the server knows both.
TEST(KeyReload, NoInstantOfAHandshakeIsHarmed) {
  const KeyFile servers(kOld + kNew), clients(kOld);
  Node server(keyed(servers)), client(keyed(clients));
  server.listen();
  for (int polls = 0; polls < 30; ++polls) {
    reload(clients, kOld, client.engine);
    const std::size_t before = server.ready.size();
    const Connection c = client.begin(server);
    for (int i = 0; i < polls; ++i) (void)(client.engine.poll_control() + server.engine.poll());
    reload(clients, kNew, client.engine);
    ASSERT_TRUE(until({&client, &server}, [&] {
      return c.ready() && server.ready.size() > before;
    })) << polls;
    EXPECT_EQ(c.peer_identity().key, server.ready.back().peer_identity().key) << polls;
  }
  EXPECT_TRUE(client.closed.empty());
  finish(client, server);
}

TEST(KeyReload, AServerMayReloadWhileItsCallbackLooksAtThePeer) {
  const KeyFile file(kOld);
  Node server(keyed(file)), client(keyed(file));
  std::string seen;
  ListenOptions options;
  options.handlers = server.handlers();
  options.on_connect_request = [&](spinwire::PeerRequest& request) {
    reload(file, kNew, server.engine);
    seen = request.peer().key;
    request.accept();
  };
  auto listener = server.engine.listen("127.0.0.1:0", options);
  ASSERT_TRUE(listener) << listener.error().message();
  const Connection c = client.begin(listener->address());
  ASSERT_TRUE(until({&client, &server}, [&] { return c.ready() && server.ready.size() == 1; }));
  EXPECT_EQ(seen, "old");
  EXPECT_EQ(server.ready[0].peer_identity().key, "old");
  finish(client, server);
}

TEST(KeyReload, AReconnectProvesTheNewKey) {
  const KeyFile file(kOld);
  Node server(keyed(file)), client(keyed(file));
  server.listen();
  ConnectOptions options;
  options.handlers = client.handlers();
  options.reconnect = {.attempts = 1000, .first_delay = 1ms, .max_delay = 2ms};
  const auto c = client.engine.connect(server.listener.address(), options);
  ASSERT_TRUE(c);
  ASSERT_TRUE(until({&client, &server}, [&] { return c->ready() && server.ready.size() == 1; }));
  reload(file, kNew, client.engine);
  reload(file, kNew, server.engine);
  EXPECT_EQ(c->peer_identity().key, "old");
  EXPECT_EQ(server.ready[0].close({spinwire::GoodbyeReason::overloaded, 1ms}), Status::ok);
  ASSERT_TRUE(until({&client, &server}, [&] { return c->ready() && server.ready.size() == 2; }));
  EXPECT_EQ(c->peer_identity().key, "new");
  EXPECT_EQ(server.ready[1].peer_identity().key, "new");
  server.ready.erase(server.ready.begin());
  finish(client, server);
}

class KeyReloadOver : public testing::TestWithParam<RpcTransport> {};

TEST_P(KeyReloadOver, SessionsGoOnAndTheirNewConnectionsProveTheNewKey) {
  const KeyFile file(kOld);
  Config config = long_call_config();
  config.rpc.transport = GetParam();
  LongCalls calls(keyed(file, config));
  EXPECT_EQ(calls.call(kFold, number(7)).status, Status::ok);
  const auto authenticated = [&] {
    return calls.server.engine.stats().authentication.authenticated;
  };
  const std::uint64_t before = authenticated();
  reload(file, kNew, calls.server.engine);
  reload(file, kNew, calls.client.engine);
  const Bytes request(100'000, std::byte{5});
  EXPECT_EQ(calls.call(kFold, request).bytes, fold_of(request));
  EXPECT_EQ(calls.call(kFold, number(8)).status, Status::ok);
  EXPECT_EQ(calls.session.peer_identity().key, "old");
  if (GetParam() != RpcTransport::connection) {
    EXPECT_EQ(authenticated(), before + 1);
  }
  const Session more = calls.open();
  ASSERT_TRUE(calls.until([&] { return more.ready(); }));
  EXPECT_EQ(more.peer_identity().key, "new");
}

INSTANTIATE_TEST_SUITE_P(Transports, KeyReloadOver,
                         testing::Values(RpcTransport::automatic, RpcTransport::connection));

class KeyReloadShown : public observe_test::WithEngineFolder {};

TEST_F(KeyReloadShown, NamesAndNoSecretsAreInTheFlightRecorderAndTheDescription) {
  const observe_test::EngineFolder folder;
  const KeyFile file(kOld);
  Config config = keyed(file);
  config.observability.directory = folder.path();
  Node node(config);
  EXPECT_NE(node.engine.describe().find("keys: old\n"), std::string::npos);
  reload(file, kNew + kOld, node.engine);
  file.write("");
  EXPECT_FALSE(node.engine.reload_keys());
  EXPECT_NE(node.engine.describe().find("keys: new, old\n"), std::string::npos);
  EXPECT_EQ(node.engine.describe().find(std::string(8, 'b')), std::string::npos);
  const auto reading = folder.read();
  ASSERT_TRUE(reading);
  std::vector<std::string> texts;
  for (const spinwire::EngineEvent& event : reading->events) {
    if (event.kind == "keys") texts.push_back(event.subject + ": " + event.text);
  }
  EXPECT_EQ(texts, std::vector<std::string>{"engine: new, old"});
}

}  // namespace
}  // namespace key_reload_test
