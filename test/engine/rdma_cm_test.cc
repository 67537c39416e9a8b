#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "engine/harness.h"
#include "engine/rdma_cm_ends.h"

namespace through_cm_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Via;

TEST(EngineRdmaCm, AnEmbeddedDeviceIsUnknownToIt) {
  Config config = small_config();
  config.device.name = "softverbs";
  Node node(config);
  ListenOptions listen;
  listen.via = Via::rdma_cm;
  const auto listening = node.engine.listen("127.0.0.1:0", listen);
  ASSERT_FALSE(listening);
  EXPECT_EQ(listening.error().status, Status::unsupported);
  ConnectOptions options;
  options.via = Via::rdma_cm;
  const auto connecting = node.engine.connect("127.0.0.1:1", options);
  ASSERT_FALSE(connecting);
  EXPECT_EQ(connecting.error().status, Status::unsupported);
  EXPECT_NE(connecting.error().message().find("prepare()"), std::string::npos)
      << connecting.error().message();
  node.expect_clean();
}

class RdmaCm : public ThroughRdmaCm {
 protected:
  static Connection connect(Node& client, Node& server) {
    const std::size_t before = server.ready.size();
    const Connection c = begin(client, server.listener.address());
    EXPECT_TRUE(until({&client, &server}, [&] {
      return c.ready() && server.ready.size() > before;
    })) << to_string(c.state());
    return c;
  }
  static void exchange(Node& from, Connection end, Node& to, std::uint32_t seed) {
    const std::uint64_t before = to.messages;
    bool right = false;
    to.on_message = [&](Connection, Message& m) { right = Node::holds(m.bytes(), seed); };
    {
      const Buffer data = from.filled(1000, seed);
      EXPECT_EQ(from.tally.run([&](auto done) { return end.send(data, done); }), Status::ok);
    }
    EXPECT_TRUE(until({&from, &to}, [&] { return to.messages > before && from.tally.idle(); }));
    EXPECT_TRUE(right);
    to.on_message = {};
  }
};

TEST_F(RdmaCm, MessagesGoBothWays) {
  Node server, client;
  listen(server);
  Connection c = connect(client, server);
  exchange(client, c, server, 1);
  exchange(server, server.ready[0], client, 2);
  EXPECT_EQ(server.accepts, 1u);
  EXPECT_NE(c.peer().find(address_), std::string::npos);
  finish(client, server);
  EXPECT_EQ(client.closed[0].status, Status::ok);
  EXPECT_EQ(server.closed[0].status, Status::ok);
}

TEST_F(RdmaCm, ClosedFromTheServer) {
  Node server, client;
  listen(server);
  (void)connect(client, server);
  EXPECT_EQ(server.ready[0].close(), Status::ok);
  ASSERT_TRUE(until({&client, &server},
                    [&] { return client.closed.size() == 1 && server.closed.size() == 1; }));
  EXPECT_EQ(client.closed[0].status, Status::ok) << client.closed[0].message();
  EXPECT_EQ(server.closed[0].status, Status::ok) << server.closed[0].message();
}

TEST_F(RdmaCm, ARefusalTellsItsReason) {
  Node server, client;
  server.on_accept = [](Connection c) { EXPECT_EQ(c.close(), Status::ok); };
  listen(server);
  (void)begin(client, server.listener.address(), {3, 1ms, 1ms});
  ASSERT_TRUE(until({&client, &server}, [&] { return !client.closed.empty(); }));
  EXPECT_EQ(client.closed[0].status, Status::refused) << client.closed[0].message();
  EXPECT_NE(client.closed[0].message().find("application refused"), std::string::npos)
      << client.closed[0].message();
  EXPECT_EQ(server.accepts, 1u);  // a final refusal is not retried
}

TEST_F(RdmaCm, NobodyListens) {
  Node server, client;
  listen(server);
  const std::string address = server.listener.address();
  server.listener = {};
  (void)begin(client, address);
  ASSERT_TRUE(until({&client, &server}, [&] { return !client.closed.empty(); }));
  EXPECT_EQ(client.closed[0].status, Status::refused) << client.closed[0].message();
  EXPECT_NE(client.closed[0].message().find("nobody listens"), std::string::npos)
      << client.closed[0].message();
  client.expect_clean();
}

TEST_F(RdmaCm, AnAddressWithoutADevice) {
  Node client;
  ConnectOptions options;
  options.handlers = client.handlers();
  options.via = Via::rdma_cm;
  // No network leads there: reported at once or by an event.
  const auto made = client.engine.connect("203.0.113.7:9", options);
  if (made) {
    ASSERT_TRUE(until({&client}, [&] { return !client.closed.empty(); }));
    EXPECT_NE(client.closed[0].status, Status::ok);
  } else {
    EXPECT_NE(made.error().message().find("rdma_resolve_addr"), std::string::npos);
  }
  client.expect_clean();
}

TEST_F(RdmaCm, AFullServerSaysSoAndHasRoomLater) {
  Config one = small_config();
  one.connections.maximum = 1;
  Node server(one), client;
  listen(server);
  Connection first = connect(client, server);
  const Connection second = begin(client, server.listener.address(), {500, 2ms, 10ms});
  ASSERT_TRUE(
      until({&client, &server}, [&] { return server.engine.stats().handshakes_refused >= 2; }));
  EXPECT_EQ(first.close(), Status::ok);
  ASSERT_TRUE(until({&client, &server}, [&] { return second.ready(); }));
  exchange(client, second, server, 3);
  client.ready = {second};
  finish(client, server);
}

TEST_F(RdmaCm, RequestsThatAreNeverConfirmedKeepNobodyOut) {
  Config few = small_config();
  few.connections.maximum = 16;
  few.connections.handshakes = 16;
  few.connections.handshake_timeout = 60s;
  few.connections.connect_timeout = 60s;
  Node server(few), client;
  listen(server);
  // As many as the server has connections, whose ends poll no more once they have asked.
  Node silent(few);
  for (int i = 0; i < 16; ++i) (void)begin(silent, server.listener.address());
  ASSERT_TRUE(until({&server, &silent}, [&] { return server.accepts >= 4; }));
  ASSERT_TRUE(until({&server}, [&] { return server.accepts >= 4; }));
  for (int i = 0; i < 4; ++i) {
    const Connection c = begin(client, server.listener.address());
    ASSERT_TRUE(until({&client, &server}, [&] { return c.ready() || !client.closed.empty(); }));
    ASSERT_TRUE(c.ready()) << client.closed[0].message();
  }
}

TEST_F(RdmaCm, AHostHasNoMoreConnectionsThanItsShare) {
  Config few = small_config();
  few.connections.maximum_per_source = 2;
  Node server(few), client;
  listen(server);
  (void)connect(client, server);
  (void)connect(client, server);
  (void)begin(client, server.listener.address());
  ASSERT_TRUE(until({&client, &server}, [&] { return !client.closed.empty(); }));
  EXPECT_EQ(client.closed[0].status, Status::limit) << client.closed[0].message();
  EXPECT_NE(client.closed[0].message().find("which is its share"), std::string::npos)
      << client.closed[0].message();
  client.closed.clear();
  finish(client, server);
}

TEST_F(RdmaCm, ClosedWhileItIsBeingMade) {
  Node server, client;
  listen(server);
  expect_closed_while_being_made(client, server, 40, 1);
}

TEST_F(RdmaCm, AKilledPeerIsNoticedAndFoundAgain) {
  const auto serve = [this](int in, int out) {
    Node node;
    node.on_message = [](Connection c, Message& m) { (void)c.send(m.take()); };
    listen(node, 18515);
    write_line(out, "up");
    for (unsigned i = 0;; ++i) {
      (void)node.poll();
      if (i % 1024 == 0 && command(in) == 'q') return 0;
    }
  };
  Child first(serve);
  ASSERT_EQ(first.line(), "up");
  Node client;
  Connection c = begin(client, std::string(address_) + ":18515", {200, 10ms, 200ms});
  ASSERT_TRUE(until({&client}, [&] { return c.ready(); }));
  first.kill(SIGKILL);
  ASSERT_TRUE(until({&client}, [&] { return !c.ready(); }));
  Child second(serve);
  ASSERT_EQ(second.line(), "up");
  ASSERT_TRUE(until({&client}, [&] { return c.ready(); }));
  ASSERT_EQ(c.send_copy(std::as_bytes(std::span("ping", 4))), Status::ok);
  EXPECT_TRUE(until({&client}, [&] { return client.messages == 1; }));
  EXPECT_EQ(c.close(), Status::ok);
  ASSERT_TRUE(until({&client}, [&] { return !client.closed.empty(); }));
  EXPECT_EQ(client.closed[0].status, Status::ok) << client.closed[0].message();
  second.tell('q');
  EXPECT_EQ(second.wait(), 0);
}

}  // namespace
}  // namespace through_cm_test
