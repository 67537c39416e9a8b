// Connections: what applications say of themselves in the handshake, and whom they accept.
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "control/key_files.h"
#include "engine/expect_made.h"
#include "engine/harness.h"
#include "spinwire/identity.h"

namespace peer_identity_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using key_files::KeyFile;
using key_files::line;
using spinwire::ConnectionHandlers;
using spinwire::Endpoint;
using spinwire::Goodbye;
using spinwire::GoodbyeReason;
using spinwire::kPrivateDataMax;
using spinwire::PeerIdentity;
using spinwire::PeerRequest;
using spinwire::PrepareOptions;
using spinwire::Via;

using Bytes = std::vector<std::byte>;

Bytes bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}
Bytes bytes_of(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

/// A server whose application decides about each peer, and clients.
struct Door {
  explicit Door(const Config& c = small_config(), const Config& clients = small_config(),
                const std::uint64_t* ticks = nullptr)
      : server(c, ticks), client(clients, ticks) {}
  void listen(const Bytes& private_data = {}) {
    ListenOptions options;
    options.handlers = server.handlers();
    options.on_accept = [this](Connection c) {
      ++server.accepts;
      if (server.on_accept) server.on_accept(c);
    };
    options.on_connect_request = [this](PeerRequest& request) {
      ++requests;
      address = request.peer().address;
      key = request.peer().key;
      data = bytes_of(request.peer().private_data);
      if (decide) decide(request);
    };
    options.private_data = private_data;
    auto made = server.engine.listen("127.0.0.1:0", options);
    ASSERT_TRUE(made) << made.error().message();
    server.listener = std::move(*made);
  }
  Connection connect(const Bytes& private_data, spinwire::Reconnect reconnect = {}) {
    ConnectOptions options;
    options.handlers = client.handlers();
    options.private_data = private_data;
    options.reconnect = reconnect;
    return expect_made(client.engine.connect(server.listener.address(), options));
  }
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({&client, &server}, std::forward<Done>(done));
  }
  Ends connected(const Bytes& private_data) {
    Ends ends;
    ends.client = connect(private_data);
    EXPECT_TRUE(until([&] { return ends.client.ready() && !server.ready.empty(); }));
    if (!server.ready.empty()) ends.server = server.ready.back();
    return ends;
  }

  std::function<void(PeerRequest&)> decide = [](PeerRequest& r) { r.accept(); };
  int requests = 0;
  std::string address, key;
  Bytes data;
  Node server, client;
};

TEST(PeerIdentity, EachEndReadsTheOthersPrivateData) {
  const Bytes asks(kPrivateDataMax, std::byte{7}), answers = bytes_of("a server's greeting");
  Door door;
  door.listen(answers);
  const Ends ends = door.connected(asks);
  EXPECT_EQ(door.requests, 1);
  EXPECT_EQ(door.data, asks);
  EXPECT_EQ(door.key, "");
  EXPECT_EQ(door.address, ends.server.peer());
  EXPECT_EQ(bytes_of(ends.server.peer_private_data()), asks);
  EXPECT_EQ(bytes_of(ends.client.peer_private_data()), answers);
  EXPECT_EQ(ends.server.peer_identity().address, ends.server.peer());
  EXPECT_EQ(ends.client.peer_identity().address, door.server.listener.address());
  // The bytes stay where they are.
  const std::byte* const at = ends.client.peer_private_data().data();
  for (int i = 0; i < 100; ++i) (void)(door.client.poll() + door.server.poll());
  EXPECT_EQ(ends.client.peer_private_data().data(), at);
  finish(door.client, door.server);
  EXPECT_TRUE(ends.client.peer_private_data().empty()) << "a stale handle names no bytes";
}

TEST(PeerIdentity, WithoutPrivateDataThereIsNone) {
  Door door;
  door.listen();
  const Ends ends = door.connected({});
  EXPECT_TRUE(ends.server.peer_private_data().empty());
  EXPECT_TRUE(ends.client.peer_private_data().empty());
  finish(door.client, door.server);
}

TEST(PeerIdentity, TheCallbackChoosesPrivateDataForEachPeer) {
  Door door;
  door.decide = [](PeerRequest& r) {
    EXPECT_EQ(r.accept(Bytes(kPrivateDataMax + 1)), Status::invalid_argument);
    EXPECT_EQ(r.accept(bytes_of("for you")), Status::ok);
  };
  door.listen(bytes_of("for all"));
  const Ends ends = door.connected(bytes_of("me"));
  EXPECT_EQ(bytes_of(ends.client.peer_private_data()), bytes_of("for you"));
  door.server.on_accept = [](Connection c) {
    EXPECT_EQ(bytes_of(c.peer_private_data()), bytes_of("me again"));
  };
  (void)door.connect(bytes_of("me again"));
  EXPECT_TRUE(door.until([&] { return door.server.ready.size() == 2; }));
  finish(door.client, door.server);
}

TEST(PeerIdentity, TheKeyThatThePeerHasProvedIsNamed) {
  const KeyFile servers(line("old", 'a') + line("trading", 'b')), clients(line("trading", 'b'));
  Config server = small_config(), client = small_config();
  server.security.key_file = servers.path();
  client.security.key_file = clients.path();
  Door door(server, client);
  door.listen();
  const Ends ends = door.connected(bytes_of("x"));
  EXPECT_EQ(door.key, "trading");
  EXPECT_EQ(ends.server.peer_identity().key, "trading");
  EXPECT_EQ(ends.client.peer_identity().key, "trading");
  EXPECT_EQ(bytes_of(ends.server.peer_private_data()), bytes_of("x"));
  finish(door.client, door.server);
}

TEST(PeerIdentity, ARefusalReachesThePeerWithCodeAndText) {
  Door door;
  door.decide = [&](PeerRequest& r) {
    EXPECT_EQ(door.server.engine.stats().connections, 0u) << "a record was taken";
    EXPECT_EQ(door.server.engine.stats().reserved_receives, 0u) << "a receive was reserved";
    r.refuse(0xdeadbeef, "not\nyou");
  };
  door.listen();
  const Connection c = door.connect(bytes_of("me"), {.attempts = 5, .first_delay = 1ms});
  ASSERT_TRUE(door.until([&] { return !door.client.closed.empty(); }));
  const Error& why = door.client.closed.at(0);
  EXPECT_EQ(why.status, Status::refused);
  EXPECT_EQ(why.code, 0xdeadbeefu);
  EXPECT_EQ(why.found, "not?you");
  EXPECT_NE(why.message().find("refused with the code 3735928559"), std::string::npos);
  EXPECT_EQ(c.state(), ConnectionState::closed);
  EXPECT_EQ(door.requests, 1) << "a refusal is final, though the client reconnects";
  EXPECT_EQ(door.server.accepts, 0u);
  EXPECT_EQ(door.server.engine.stats().handshakes_refused, 1u);
  // The peer has used nothing up, and may be accepted later.
  door.decide = [](PeerRequest& r) { r.accept(); };
  (void)door.connected({});
  finish(door.client, door.server);
}

TEST(PeerIdentity, ARefusalWithATimeAsksThePeerToComeBackThen) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a manual clock does not move the device";
  std::uint64_t now = 1'000'000'000;
  Door door(small_config(), small_config(), &now);
  door.decide = [](PeerRequest& r) { r.refuse(503, "too busy", 400ms); };
  door.listen();
  (void)door.connect({});
  ASSERT_TRUE(door.until([&] { return !door.client.closed.empty(); }));
  EXPECT_EQ(door.client.closed.at(0).code, 503u);
  EXPECT_EQ(door.client.closed.at(0).goodbye, (Goodbye{GoodbyeReason::overloaded, 400ms}));

  const Connection c = door.connect({}, {.attempts = 1, .first_delay = 1us, .max_delay = 1us});
  ASSERT_TRUE(door.until([&] { return door.requests == 2 && !c.ready(); }));
  door.decide = [](PeerRequest& r) { r.accept(); };
  const auto poll = [&] {
    for (int i = 0; i < 300; ++i) (void)(door.client.poll() + door.server.poll());
  };
  poll();  // the refusal arrives
  now += 399'000'000;
  poll();
  EXPECT_EQ(door.requests, 2) << "it was to come after 400 ms";
  now += 102'000'000;  // with the spread of a quarter
  ASSERT_TRUE(door.until([&] { return c.ready(); }));
  EXPECT_EQ(door.client.closed.size(), 1u);
  finish(door.client, door.server);
}

TEST(PeerIdentity, TheTimeOfARefusalIsWithinItsLimits) {
  Door door;
  door.listen();
  for (const auto& [asked, given] : {std::pair<spinwire::Nanoseconds, Goodbye>{0ns, {}},
                                     {-1ns, {}},
                                     {1ns, {GoodbyeReason::overloaded, 1ms}},
                                     {24h, {GoodbyeReason::overloaded, 1h}}}) {
    door.client.closed.clear();
    door.decide = [asked = asked](PeerRequest& r) {
      r.refuse(1, "", 5s);
      r.refuse(2, "the last call counts", asked);
    };
    (void)door.connect({});
    ASSERT_TRUE(door.until([&] { return !door.client.closed.empty(); }));
    EXPECT_EQ(door.client.closed.at(0).goodbye, given);
  }
}

TEST(PeerIdentity, RefusedPeersUseUpNoConnection) {
  Config c = small_config();
  c.connections.maximum = 16;
  Door door(c);
  door.decide = [](PeerRequest& r) { r.refuse(1, "no"); };
  door.listen();
  for (std::size_t i = 1; i <= 40; ++i) {
    (void)door.connect({});
    ASSERT_TRUE(door.until([&] { return door.client.closed.size() == i; }));
    ASSERT_EQ(door.client.closed.back().code, 1u);
  }
  EXPECT_EQ(door.requests, 40);
  EXPECT_EQ(door.server.engine.stats().connections, 0u);
  door.decide = [](PeerRequest& r) { r.accept(); };
  (void)door.connected({});
  finish(door.client, door.server);
}

TEST(PeerIdentity, APeerThatIsNotAcceptedIsRefused) {
  Door door;
  door.listen();
  const std::function<void(PeerRequest&)> kDecisions[] = {
      [](PeerRequest&) {}, [](PeerRequest&) { throw std::runtime_error("thrown"); },
      [](PeerRequest& r) {
        r.accept();
        r.refuse(0, "");
      }};
  for (const auto& decision : kDecisions) {
    door.client.closed.clear();
    door.decide = decision;
    (void)door.connect({});
    ASSERT_TRUE(door.until([&] { return !door.client.closed.empty(); }));
    EXPECT_EQ(door.client.closed.at(0).status, Status::refused);
    EXPECT_EQ(door.client.closed.at(0).code, 0u);
  }
  EXPECT_EQ(door.server.accepts, 0u);
}

TEST(PeerIdentity, TheCallbackMayDropItsListener) {
  Door door;
  door.decide = [&](PeerRequest& r) {
    door.server.listener = {};
    r.accept();
  };
  door.listen();
  (void)door.connected(bytes_of("last"));
  finish(door.client, door.server);
}

TEST(PeerIdentity, ACallbackMayUseUpWhatItAccepts) {
  Config c = small_config();
  c.connections.maximum = 1;
  Door door(c);
  door.decide = [&](PeerRequest& r) {
    EXPECT_TRUE(door.server.engine.prepare({}));
    r.accept();
  };
  door.listen();
  (void)door.connect({});
  ASSERT_TRUE(door.until([&] { return !door.client.closed.empty(); }));
  EXPECT_EQ(door.client.closed.at(0).status, Status::limit);
  EXPECT_FALSE(door.client.closed.at(0).code);
}

TEST(PeerIdentity, AReconnectGivesThePrivateDataAgain) {
  Door door;
  int times = 0;
  door.decide = [&](PeerRequest& r) {
    ++times;
    (void)r.accept(bytes_of(times == 1 ? "first" : "second, and longer"));
  };
  door.listen();
  Bytes ours = bytes_of("the same each time");
  const Connection c = door.connect(ours, {.attempts = 9, .first_delay = 1ms});
  std::fill(ours.begin(), ours.end(), std::byte{});  // connect() has copied them
  ASSERT_TRUE(door.until([&] { return c.ready() && door.server.ready.size() == 1; }));
  EXPECT_EQ(bytes_of(c.peer_private_data()), bytes_of("first"));
  // The server's side fails, so that the client reconnects.
  const Buffer b = door.server.filled(64, 1);
  RemoteRegion wrong{0x1000, 64, 0x12345, Access::remote_write};
  ASSERT_EQ(door.server.ready[0].write(b.slice(0, 64), wrong), Status::ok);
  ASSERT_TRUE(door.until([&] { return c.ready() && door.server.ready.size() == 2; }));
  EXPECT_EQ(door.data, bytes_of("the same each time"));
  EXPECT_EQ(bytes_of(c.peer_private_data()), bytes_of("second, and longer"));
}

TEST(PeerIdentity, TooMuchPrivateDataIsRefused) {
  Node node;
  const Bytes more(kPrivateDataMax + 1);
  ListenOptions listen;
  listen.private_data = more;
  ConnectOptions connect;
  connect.private_data = more;
  PrepareOptions prepare;
  prepare.private_data = more;
  const auto expect = [](const auto& result) {
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().status, Status::invalid_argument);
    EXPECT_EQ(result.error().found, "private data of 257 bytes");
    EXPECT_EQ(result.error().remedy, "give up to 256 bytes");
  };
  expect(node.engine.prepare(prepare));
  for (const Via via : {Via::tcp, Via::rdma_cm}) {
    listen.via = connect.via = via;
    expect(node.engine.listen("127.0.0.1:0", listen));
    expect(node.engine.connect("127.0.0.1:1", connect));
  }
  EXPECT_EQ(node.engine.stats().connections, 0u);
}

TEST(PeerIdentity, EndpointsCarryPrivateDataOutOfBand) {
  Node a, b;
  const Bytes from_a = bytes_of("a's"), from_b(kPrivateDataMax, std::byte{9});
  std::string text_a, text_b;
  const auto prepare = [](Node& node, const Bytes& data, std::string& text) {
    PrepareOptions options;
    options.handlers = node.handlers();
    options.on_endpoint = [&text](Connection, const Endpoint& e) { text = e.text(); };
    options.private_data = data;
    auto made = node.engine.prepare(options);
    EXPECT_TRUE(made) << made.error().message();
    return *made;
  };
  Connection at_a = prepare(a, from_a, text_a), at_b = prepare(b, from_b, text_b);
  ASSERT_TRUE(until({&a, &b}, [&] { return !text_a.empty() && !text_b.empty(); }));
  ASSERT_TRUE(at_a.join(Endpoint::parse(text_b).value()));
  ASSERT_TRUE(at_b.join(Endpoint::parse(text_a).value()));
  ASSERT_TRUE(until({&a, &b}, [&] { return at_a.ready() && at_b.ready(); }));
  EXPECT_EQ(bytes_of(at_a.peer_private_data()), from_b);
  EXPECT_EQ(bytes_of(at_b.peer_private_data()), from_a);
  finish(a, b);
}

}  // namespace
}  // namespace peer_identity_test
