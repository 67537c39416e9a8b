// Engines with key files that connect through rdma_cm.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "control/key_files.h"
#include "engine/rdma_cm_ends.h"

namespace rdma_cm_authentication_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using key_files::KeyFile;
using key_files::line;
using spinwire::PeerRequest;
using spinwire::Via;

const std::string kKey = line("2026", 'a');

class RdmaCmAuthentication : public ThroughRdmaCm {
 protected:
  static Config keyed(const KeyFile& file) {
    Config c = small_config();
    c.security.key_file = file.path();
    c.security.open = false;
    return c;
  }
  static Config without_key() {
    Config c = small_config();
    c.security.open = true;
    return c;
  }
  static void reload(const KeyFile& file, const std::string& text, Node& node) {
    file.write(text);
    const auto reloaded = node.engine.reload_keys();
    EXPECT_TRUE(reloaded) << reloaded.error().message();
  }
  /// Both ends fail, and the server makes nothing.
  Error expect_stranger(Node& client, Node& server) {
    listen(server);
    (void)begin(client, server.listener.address());
    EXPECT_TRUE(until({&client, &server}, [&] { return !client.closed.empty(); }));
    EXPECT_EQ(server.accepts, 0u);
    EXPECT_EQ(server.engine.stats().connections, 0u);
    EXPECT_EQ(server.engine.stats().authentication.authenticated, 0u);
    return client.closed.empty() ? Error() : client.closed[0];
  }
};

TEST_F(RdmaCmAuthentication, ConnectionsCarryMessagesBothWays) {
  const KeyFile file(kKey), more(line("next", 'b') + kKey);
  Node server(keyed(more)), client(keyed(file));
  listen(server);
  const Connection c = begin(client, server.listener.address());
  ASSERT_TRUE(until({&client, &server}, [&] { return c.ready() && server.ready.size() == 1; }))
      << (client.closed.empty() ? "" : client.closed[0].message());
  EXPECT_EQ(c.peer_identity().key, "2026");
  EXPECT_EQ(server.ready[0].peer_identity().key, "2026");
  for (const bool back : {false, true}) {
    Node &from = back ? server : client, &to = back ? client : server;
    bool right = false;
    to.on_message = [&](Connection, Message& m) { right = Node::holds(m.bytes(), 5); };
    {
      Connection end = back ? server.ready[0] : c;
      const Buffer data = from.filled(1000, 5);
      EXPECT_EQ(from.tally.run([&](auto done) { return end.send(data, done); }), Status::ok);
    }
    EXPECT_TRUE(until({&client, &server}, [&] { return right && from.tally.idle(); }));
  }
  EXPECT_EQ(server.engine.stats().authentication.authenticated, 1u);
  EXPECT_EQ(client.engine.stats().authentication.authenticated, 1u);
  EXPECT_EQ(server.engine.stats().handshakes_refused, 0u);
  finish(client, server);
}

TEST_F(RdmaCmAuthentication, ManyConnectAtOnce) {
  const KeyFile file(kKey);
  Node server(keyed(file)), client(keyed(file));
  listen(server);
  for (int i = 0; i < 8; ++i) (void)begin(client, server.listener.address());
  EXPECT_TRUE(until({&client, &server},
                    [&] { return client.ready.size() == 8 && server.ready.size() == 8; }));
  finish(client, server);
}

// Both ends know each other by the same GIDs.
TEST_F(RdmaCmAuthentication, AListenerAtAnyAddressIsReached) {
  const KeyFile file(kKey);
  Node server(keyed(file)), client(keyed(file));
  ListenOptions options;
  options.handlers = server.handlers();
  options.via = Via::rdma_cm;
  auto listening = server.engine.listen("0.0.0.0:0", options);
  ASSERT_TRUE(listening) << listening.error().message();
  const std::string bound = listening->address();
  const Connection c = begin(client, address_ + bound.substr(bound.rfind(':')));
  EXPECT_TRUE(until({&client, &server}, [&] { return c.ready() || !client.closed.empty(); }));
  EXPECT_TRUE(c.ready()) << (client.closed.empty() ? "" : client.closed[0].message());
}

TEST_F(RdmaCmAuthentication, AnotherKeyOpensNothing) {
  const KeyFile ours(kKey), theirs(line("2026", 'b'));
  Node server(keyed(ours)), client(keyed(theirs));
  const Error why = expect_stranger(client, server);
  EXPECT_EQ(why.status, Status::unauthenticated) << why.message();
  EXPECT_EQ(server.engine.stats().authentication.unknown_key, 1u);
  EXPECT_EQ(client.engine.stats().authentication.unproven_servers, 1u);
}

TEST_F(RdmaCmAuthentication, AClientWithoutAKeyOpensNothing) {
  const KeyFile file(kKey);
  Node server(keyed(file)), client(without_key());
  const Error why = expect_stranger(client, server);
  EXPECT_EQ(why.status, Status::refused) << why.message();
  EXPECT_NE(why.found.find("authentication required"), std::string::npos) << why.message();
  EXPECT_EQ(server.engine.stats().authentication.no_proof, 1u);
}

TEST_F(RdmaCmAuthentication, AServerWithoutAKeyIsNotUsed) {
  const KeyFile file(kKey);
  Node server(without_key()), client(keyed(file));
  const Error why = expect_stranger(client, server);
  EXPECT_EQ(why.status, Status::unauthenticated) << why.message();
  EXPECT_EQ(client.engine.stats().authentication.unproven_servers, 1u);
}

// As over TCP: see KeyReload. A client takes its new first key at each instant of a handshake.
TEST_F(RdmaCmAuthentication, NoInstantOfAHandshakeIsHarmedByAReload) {
  const std::string next = line("next", 'b');
  const KeyFile servers(kKey + next), clients(kKey);
  Node server(keyed(servers)), client(keyed(clients));
  listen(server);
  for (int polls = 0; polls < 60; polls += 3) {
    SCOPED_TRACE(polls);
    reload(clients, kKey, client);
    const std::size_t before = server.ready.size();
    const Connection c = begin(client, server.listener.address());
    for (int i = 0; i < polls; ++i) (void)(client.poll() + server.poll());
    reload(clients, next, client);
    ASSERT_TRUE(until({&client, &server}, [&] {
      return (c.ready() && server.ready.size() > before) || !client.closed.empty();
    }));
    ASSERT_TRUE(client.closed.empty()) << client.closed[0].message();
    EXPECT_EQ(c.peer_identity().key, server.ready.back().peer_identity().key);
  }
  finish(client, server);
}

TEST_F(RdmaCmAuthentication, AHandshakeUnderWayEndsWithTheKeyOfItsProof) {
  const KeyFile file(kKey);
  Node server(keyed(file)), client(keyed(file));
  listen(server);
  const Connection c = begin(client, server.listener.address());
  ASSERT_TRUE(until({&client, &server},
                    [&] { return server.engine.stats().authentication.authenticated == 1; }));
  ASSERT_FALSE(c.ready());
  reload(file, line("next", 'b'), client);
  reload(file, line("next", 'b'), server);
  ASSERT_TRUE(until({&client, &server}, [&] { return c.ready() && server.ready.size() == 1; }));
  EXPECT_EQ(c.peer_identity().key, "2026");
  EXPECT_EQ(server.ready[0].peer_identity().key, "2026");
  const Connection later = begin(client, server.listener.address());
  ASSERT_TRUE(until({&client, &server}, [&] { return later.ready() && server.ready.size() == 2; }));
  EXPECT_EQ(later.peer_identity().key, "next");
  EXPECT_EQ(server.ready[1].peer_identity().key, "next");
  finish(client, server);
}

TEST_F(RdmaCmAuthentication, AReconnectProvesTheNewKeyAndARemovedOneIsRefused) {
  const KeyFile file(kKey), old(kKey);
  Node server(keyed(file)), client(keyed(file)), late(keyed(old));
  listen(server);
  const Connection c = begin(client, server.listener.address(), {1000, 1ms, 2ms});
  ASSERT_TRUE(until({&client, &server}, [&] { return c.ready() && server.ready.size() == 1; }));
  reload(file, line("next", 'b'), client);
  reload(file, line("next", 'b'), server);
  EXPECT_EQ(c.peer_identity().key, "2026") << "what is connected stays";
  EXPECT_EQ(server.ready[0].close({spinwire::GoodbyeReason::overloaded, 1ms}), Status::ok);
  ASSERT_TRUE(until({&client, &server}, [&] { return c.ready() && server.ready.size() == 2; }));
  EXPECT_EQ(c.peer_identity().key, "next");
  EXPECT_EQ(server.ready[1].peer_identity().key, "next");
  (void)begin(late, server.listener.address());
  ASSERT_TRUE(until({&client, &server, &late}, [&] { return !late.closed.empty(); }));
  EXPECT_EQ(late.closed[0].status, Status::unauthenticated) << late.closed[0].message();
  EXPECT_EQ(server.engine.stats().authentication.unknown_key, 1u);
  server.ready.erase(server.ready.begin());
  finish(client, server);
}

TEST_F(RdmaCmAuthentication, TheApplicationSeesTheKeyAndItsRefusalArrives) {
  const KeyFile file(kKey);
  Node server(keyed(file)), client(keyed(file));
  std::vector<std::string> keys;
  ListenOptions options;
  options.via = Via::rdma_cm;
  options.on_connect_request = [&](PeerRequest& r) {
    keys.emplace_back(r.peer().key);
    r.refuse(4711, std::string(200, 'x'));
  };
  auto listening = server.engine.listen(std::string(address_) + ":0", options);
  ASSERT_TRUE(listening) << listening.error().message();
  (void)begin(client, listening->address());
  ASSERT_TRUE(until({&client, &server}, [&] { return !client.closed.empty(); }));
  EXPECT_EQ(client.closed[0].status, Status::refused) << client.closed[0].message();
  EXPECT_EQ(client.closed[0].code, 4711u);
  EXPECT_EQ(client.closed[0].found, std::string(107, 'x'));
  EXPECT_EQ(keys, std::vector<std::string>{"2026"});
}

TEST_F(RdmaCmAuthentication, ClosedWhileItIsBeingMade) {
  const KeyFile file(kKey);
  Node server(keyed(file)), client(keyed(file));
  listen(server);
  expect_closed_while_being_made(client, server, 60, 2);
}

TEST_F(RdmaCmAuthentication, AClientReconnectsToAServerThatHasTheKeyLater) {
  const KeyFile ours(kKey), other(line("2026", 'b'));
  Node client(keyed(ours));
  std::string address;
  Connection c;
  {
    Node first(keyed(other));
    listen(first);
    address = first.listener.address();
    c = begin(client, address, {500, 5ms, 20ms});
    ASSERT_TRUE(until({&client, &first},
                      [&] { return first.engine.stats().authentication.unknown_key >= 2; }));
  }
  Node second(keyed(ours));
  listen(second, static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  EXPECT_TRUE(until({&client, &second}, [&] { return c.ready(); }));
  client.ready = {c};
  finish(client, second);
}

}  // namespace
}  // namespace rdma_cm_authentication_test
