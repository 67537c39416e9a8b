#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "control/loopback.h"
#include "engine/engine_core.h"
#include "engine/harness.h"
#include "verbs/providers.h"
#include "wire/endpoints.h"
#include "wire/handshake.h"

namespace handshakes_test {
namespace {

using namespace engine_test;  // the names of a test namespace
namespace wire = spinwire::wire;
using spinwire::Endpoint;
using spinwire::GidType;
using spinwire::base::UniqueFd;

Config quick_config() {
  Config c = small_config();
  c.connections.handshake_timeout = 2s;  // the honest client must need less
  c.connections.handshakes = 8;
  return c;
}

UniqueFd attack(const Node& target) {
  return loopback::plain_client(*spinwire::control::Address::parse(target.listener.address()));
}
void say(const UniqueFd& fd, std::span<const std::byte> bytes) {
  EXPECT_EQ(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
}
void say(const UniqueFd& fd, std::string_view text) { say(fd, std::as_bytes(std::span(text))); }
/// Whether the peer has closed, without waiting. Drops received bytes.
bool ended(const UniqueFd& fd) {
  std::array<char, 512> bytes;
  for (;;) {
    const ssize_t got = ::recv(fd.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN)) return true;
    if (got < 0) return false;
  }
}

/// Whether the peer's answer has come and is a refusal. Takes no bytes.
bool is_refused(const UniqueFd& fd) {
  std::array<std::byte, wire::kHeaderBytes> head;
  const ssize_t got = ::recv(fd.get(), head.data(), head.size(), MSG_PEEK | MSG_DONTWAIT);
  if (got != static_cast<ssize_t>(head.size())) return false;
  const auto header = wire::decode_header(head);
  return header && header->kind == wire::FrameKind::refuse;
}

Endpoint plausible() {
  Endpoint e = wire_test::valid_endpoint();
  e.gid_type = GidType::embedded;
  return e;
}

/// Attacks while a client connects. The client must be ready in time. At the end the attackers must
/// be gone and counted, and nothing of them left.
class HandshakeAttack : public testing::Test {
 protected:
  HandshakeAttack() : server_(quick_config()), client_(small_config()) {
    server_.listen();
    finish_one();  // resources that the first connection keeps are no leak
    descriptors_ = open_descriptors();
  }
  void finish_one() {
    Ends ends = connect(client_, server_);
    EXPECT_EQ(ends.client.close(), Status::ok);
    EXPECT_TRUE(until({&client_, &server_}, [&] { return idle(client_) && idle(server_); }));
  }
  static bool idle(Node& node) { return node.engine.stats().connections == 0; }

  void expect_repelled(std::vector<UniqueFd> attackers) {
    const std::uint64_t before = server_.engine.stats().handshakes_refused;
    finish_one();
    ASSERT_TRUE(until({&server_, &client_}, [&] {
      return std::all_of(attackers.begin(), attackers.end(), ended) && idle(server_);
    }));
    EXPECT_LE(before, attackers.size());  // some may have been refused before the client connected
    EXPECT_EQ(server_.engine.stats().handshakes_refused, attackers.size());
    EXPECT_EQ(server_.ready.size(), 2u);
    attackers.clear();
    // A refusal stays until its reader has gone.
    EXPECT_TRUE(until({&server_, &client_}, [&] { return open_descriptors() == descriptors_; }));
    finish_one();
    finish(client_, server_);
  }

  Node server_;
  Node client_;
  std::size_t descriptors_ = 0;
};

TEST_F(HandshakeAttack, SomebodySpeaksHttp) {
  std::vector<UniqueFd> a;
  a.push_back(attack(server_));
  say(a[0], "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  expect_repelled(std::move(a));
}

TEST_F(HandshakeAttack, Garbage) {
  std::vector<UniqueFd> a;
  for (int i = 0; i < 20; ++i) {
    a.push_back(attack(server_));
    std::array<std::byte, 300> bytes;
    for (std::size_t k = 0; k < bytes.size(); ++k) bytes[k] = Node::pattern(200u + i, k);
    say(a.back(), std::span(bytes).first(1 + static_cast<std::size_t>(i) * 15));
  }
  expect_repelled(std::move(a));
}

TEST_F(HandshakeAttack, ConnectsAndSaysNothing) {
  // Many more than fit.
  std::vector<UniqueFd> a;
  for (int i = 0; i < 60; ++i) a.push_back(attack(server_));
  expect_repelled(std::move(a));
}

TEST_F(HandshakeAttack, StopsHalfWay) {
  std::vector<UniqueFd> a;
  const wire::Frame hello = wire::encode(wire::Hello{plausible()});
  for (const std::size_t bytes : {1u, 4u, 15u, 16u, 17u, 73u}) {
    a.push_back(attack(server_));
    say(a.back(), hello.bytes().first(bytes));
  }
  expect_repelled(std::move(a));
}

TEST_F(HandshakeAttack, AnotherVersion) {
  std::vector<UniqueFd> a;
  for (int i = 0; i < 20; ++i) {
    a.push_back(attack(server_));
    say(a.back(), wire::encode(wire::Hello{plausible()}, {{7, 9}, 0}).bytes());
  }
  expect_repelled(std::move(a));
}

TEST_F(HandshakeAttack, FramesInTheWrongPlace) {
  std::vector<UniqueFd> a;
  for (const wire::Frame& frame :
       {wire::encode(wire::Ready{77}), wire::encode(wire::Accept{plausible()}),
        wire::encode(wire::make_refuse(Status::limit, "why not"))}) {
    a.push_back(attack(server_));
    say(a.back(), frame.bytes());
  }
  // A confirmation right after the hello, of an unknown engine.
  a.push_back(attack(server_));
  say(a.back(), wire::encode(wire::Hello{plausible()}).bytes());
  say(a.back(), wire::encode(wire::Ready{12345}).bytes());
  expect_repelled(std::move(a));
}

// Each endpoint is of a device that is there, but for one value.
TEST_F(HandshakeAttack, AbsurdValues) {
  Node there(small_config());
  auto made = there.engine.prepare({});
  ASSERT_TRUE(made) << made.error().message();
  ASSERT_TRUE(until({&there}, [&] { return made->endpoint().has_value(); }));
  descriptors_ = open_descriptors();
  std::vector<Endpoint> each(8, *made->endpoint());
  each[0].qp_num = 0xffffffff;
  each[1].mtu = 333;
  each[2].max_message = 0;
  each[3].credits = 0;
  each[4].gid_type = on_softverbs() ? GidType::roce_v2 : GidType::embedded;
  each[5].credit_cell_address = 3;
  each[6].incarnation = 0;
  each[7].gid.fill(0);
  std::vector<UniqueFd> a;
  for (const Endpoint& e : each) {
    a.push_back(attack(server_));
    say(a.back(), wire::encode(wire::Hello{e}).bytes());
  }
  for (std::size_t i = 0; i < a.size(); ++i) {
    SCOPED_TRACE(i);
    ASSERT_TRUE(until({&server_}, [&] { return is_refused(a[i]); }));
  }
  // Well-formed, but of no device.
  a.push_back(attack(server_));
  say(a.back(), wire::encode(wire::Hello{plausible()}).bytes());
  expect_repelled(std::move(a));
}

TEST_F(HandshakeAttack, ConnectAndCloseAtOnce) {
  for (int i = 0; i < 100; ++i) {
    UniqueFd fd = attack(server_);
    if (i % 2 == 0) {
      const linger hard{1, 0};
      setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    }
    fd.reset();
    if (i % 10 == 0) (void)server_.poll();
  }
  finish_one();
  ASSERT_TRUE(until({&server_, &client_}, [&] { return open_descriptors() == descriptors_; }));
  // A reset connection may be gone before it is accepted.
  EXPECT_GE(server_.engine.stats().handshakes_refused, 50u);
  EXPECT_LE(server_.engine.stats().handshakes_refused, 100u);
  finish(client_, server_);
}

TEST(EngineHandshakes, ACrowdAtTheDoorKeepsNobodyFromGoingOut) {
  Node other;
  other.listen();
  Node crowded(quick_config());
  crowded.listen();
  std::vector<UniqueFd> a;
  for (int i = 0; i < 8; ++i) a.push_back(attack(crowded));
  for (int i = 0; i < 100; ++i) (void)crowded.poll();
  (void)connect(crowded, other);
  a.clear();
  finish(crowded, other);
}

TEST(EngineHandshakes, SilentListenerTimesOut) {
  auto silent = loopback::listener();
  Config c = small_config();
  c.connections.connect_timeout = 100ms;
  Node node(c);
  const auto text = silent.local().text();
  const Connection conn = node.begin(std::string(text.view()));
  ASSERT_TRUE(until({&node}, [&] { return node.closed.size() == 1; }));
  EXPECT_EQ(node.closed[0].status, Status::timed_out) << node.closed[0].message();
  EXPECT_EQ(node.closed_connections[0], conn);
  EXPECT_TRUE(node.ready.empty());
  ASSERT_TRUE(until({&node}, [&] { return node.engine.stats().connections == 0; }));
  node.expect_clean();
}

TEST(EngineHandshakes, DeadPortRefuses) {
  const loopback::DeadPort dead;
  const auto text = dead.address().text();
  Node node;
  (void)node.begin(std::string(text.view()));
  ASSERT_TRUE(until({&node}, [&] { return node.closed.size() == 1; }));
  EXPECT_EQ(node.closed[0].status, Status::refused) << node.closed[0].message();
  node.expect_clean();
}

TEST(EngineHandshakes, AListenerThatSpeaksAnotherProtocol) {
  auto other = loopback::listener();
  const auto text = other.local().text();
  Node node;
  (void)node.begin(std::string(text.view()));
  auto taken = loopback::accept_one(other);
  ASSERT_TRUE(taken);
  say(taken->fd, "SSH-2.0-OpenSSH_9.0\r\n");
  ASSERT_TRUE(until({&node}, [&] { return node.closed.size() == 1; }));
  EXPECT_EQ(node.closed[0].status, Status::protocol) << node.closed[0].message();
  // A peer that hangs up.
  (void)node.begin(std::string(text.view()));
  taken = loopback::accept_one(other);
  ASSERT_TRUE(taken);
  taken->fd.reset();
  ASSERT_TRUE(until({&node}, [&] { return node.closed.size() == 2; }));
  EXPECT_EQ(node.closed[1].status, Status::peer_lost) << node.closed[1].message();
  node.expect_clean();
}

/// Relays between a client and a server, and closes the client's side on request.
struct Middle {
  explicit Middle(const Node& server) : to_server(attack(server)), door(loopback::listener()) {}
  void step() {
    if (!to_client) {
      if (auto accepted = door.accept(); accepted && *accepted)
        to_client = std::move((*accepted)->fd);
    }
    if (!to_client) return;
    pass(to_client, to_server);
    if (!hung_up) pass(to_server, to_client);
  }
  static void pass(const UniqueFd& from, const UniqueFd& to) {
    std::array<std::byte, 1024> bytes;
    const ssize_t got = ::recv(from.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) say(to, std::span(bytes).first(static_cast<std::size_t>(got)));
  }
  void hang_up() {
    EXPECT_EQ(::shutdown(to_client.get(), SHUT_WR), 0);
    hung_up = true;
  }

  UniqueFd to_server, to_client;
  spinwire::control::ListenSocket door;
  bool hung_up = false;
};

TEST(EngineHandshakes, APeerThatHasReadTheLastFrameMayHangUpAtOnce) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  Node server;
  server.listen();
  Middle middle(server);
  // The latest moment for the close: the client's next step is to write that frame and to read
  // more.
  static Middle* at_rts = nullptr;
  at_rts = &middle;
  auto provider = spinwire::verbs::softverbs_provider();
  provider.modify_qp = [](ibv_qp* qp, ibv_qp_attr* attr, int mask) {
    if ((mask & IBV_QP_STATE) != 0 && attr->qp_state == IBV_QPS_RTS) at_rts->hang_up();
    return spinwire::verbs::softverbs_provider().modify_qp(qp, attr, mask);
  };
  spinwire::detail::EngineCore client(small_config(), Clock::real(),
                                      std::move(*spinwire::base::OwnerGuard::create()));
  const spinwire::verbs::Provider* const all[] = {&provider};
  ASSERT_TRUE(client.open({.providers = all}));
  std::optional<Error> closed;
  ConnectOptions options;
  options.handlers.on_closed = [&closed](Connection, const Error& e) { closed = e; };
  const auto text = middle.door.local().text();
  Connection made = client.connect(text.view(), options).value();
  ASSERT_TRUE(until({&server}, [&] {
    (void)client.poll();
    middle.step();
    return closed || (made.ready() && server.ready.size() == 1);
  }));
  EXPECT_TRUE(middle.hung_up);
  ASSERT_FALSE(closed) << closed->message();
  EXPECT_EQ(made.close(), Status::ok);
  ASSERT_TRUE(until({&server}, [&] {
    (void)client.poll();
    return closed && server.closed.size() == 1;
  }));
  EXPECT_EQ(server.closed[0].status, Status::ok) << server.closed[0].message();
}

TEST(EngineHandshakes, AnEngineConnectsToItself) {
  Node node;
  node.listen();
  Connection c = node.begin(node);
  ASSERT_TRUE(until({&node}, [&] { return node.ready.size() == 2; }));
  Buffer b = node.filled(3000, 6);
  bool good = false;
  node.on_message = [&](Connection, Message& m) { good = Node::holds(m.bytes(), 6); };
  ASSERT_EQ(c.send(b), Status::ok);
  b.reset();
  ASSERT_TRUE(until({&node}, [&] { return node.messages == 1; }));
  EXPECT_TRUE(good);
  ASSERT_EQ(c.close(), Status::ok);
  ASSERT_TRUE(until({&node}, [&] { return node.engine.stats().connections == 0; }));
  for (int i = 0; i < 8; ++i) (void)node.poll();
  EXPECT_EQ(node.closed.size(), 2u);
  node.expect_clean();
}

TEST(EngineHandshakes, SixthVersionOfTheInternetProtocol) {
  Node server;
  server.listen("[::1]:0");
  Node client;
  Ends ends = connect(client, server);
  EXPECT_EQ(ends.client.peer(), server.listener.address());
  EXPECT_EQ(ends.server.peer().rfind("[::1]:", 0), 0u) << ends.server.peer();
  finish(client, server);
}

}  // namespace
}  // namespace handshakes_test
