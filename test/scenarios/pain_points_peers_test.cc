// Common problems of users of RDMA libraries, by number: peers that die, do not answer, do not fit
// or are not welcome. pain_points_test.cc says where the others are tested.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "base/unique_fd.h"
#include "control/key_files.h"
#include "control/loopback.h"
#include "engine/harness.h"
#include "rpc/rpc_ends.h"
#include "wire/endpoints.h"
#include "wire/handshake.h"

namespace pain_points_peers_test {
namespace {

using namespace engine_test;  // the names of a test namespace
namespace wire = spinwire::wire;
using spinwire::Endpoint;
using spinwire::GidType;
using spinwire::Reconnect;
using spinwire::base::UniqueFd;
using spinwire::control::Address;
using spinwire::control::ListenSocket;

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

/// A peer whose handshake the test makes, frame by frame.
class PlainPeer {
 public:
  explicit PlainPeer(Node& server)
      : server_(server), fd_(loopback::plain_client(*Address::parse(server.listener.address()))) {}
  void say(const wire::Frame& frame) const {
    EXPECT_EQ(::send(fd_.get(), frame.bytes().data(), frame.bytes().size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(frame.bytes().size()));
  }
  /// What the server has said when it has said as many bytes, or has closed.
  std::string hear(std::size_t bytes) {
    EXPECT_TRUE(until({&server_}, [&] {
      std::array<char, 512> part{};
      const ssize_t got = ::recv(fd_.get(), part.data(), part.size(), MSG_DONTWAIT);
      if (got > 0) heard_.append(part.data(), static_cast<std::size_t>(got));
      has_ended_ = has_ended_ || got == 0 || (got < 0 && errno != EAGAIN);
      return has_ended_ || heard_.size() >= bytes;
    }));
    return heard_;
  }
  std::string hear_all() { return hear(std::string::npos); }
  [[nodiscard]] bool has_ended() const { return has_ended_; }

 private:
  Node& server_;
  UniqueFd fd_;
  std::string heard_;
  bool has_ended_ = false;
};

/// The endpoint of a connection that an application is about to make.
Endpoint prepared(Node& node) {
  Endpoint endpoint;
  int told = 0;
  spinwire::PrepareOptions options;
  options.handlers = node.handlers();
  options.on_endpoint = [&](Connection, const Endpoint& e) {
    endpoint = e;
    ++told;
  };
  EXPECT_TRUE(node.engine.prepare(options));
  EXPECT_TRUE(until({&node}, [&] { return told == 1; }));
  return endpoint;
}

TEST(PainPoint2, OperationsAtAKilledPeerEndOnceAndTellIt) {
  if (!on_softverbs())
    GTEST_SKIP() << kSoftverbsOnly << "elsewhere a send ends when the peer's device has it";
  Child victim([](int in, int out) { return echo_server(in, out, without_direct_messages()); });
  Node client(without_direct_messages());
  Connection c = client.begin(victim.line());
  ASSERT_TRUE(until({&client}, [&] { return c.ready(); }));
  victim.signal(SIGSTOP);
  const Buffer b = client.filled(100, 1);
  while (client.tally.run([&](auto done) { return c.send(b, done); }) == Status::ok) {
  }
  ASSERT_GT(client.tally.outstanding(), 0u);
  victim.kill(SIGKILL);
  ASSERT_TRUE(until({&client}, [&] { return client.closed.size() == 1; }));
  client.tally.expect_exact();
  EXPECT_EQ(client.closed[0].status, Status::peer_lost);
  EXPECT_GE(client.tally.ended(Status::peer_lost), 1u);
  EXPECT_EQ(client.tally.ended(Status::peer_lost) + client.tally.ended(Status::flushed),
            client.tally.accepted);
}

TEST(PainPoint2, AConfirmationForAnEarlierIncarnationIsRejected) {
  for (const bool is_stale : {true, false}) {
    Node server, client;
    server.listen();
    PlainPeer peer(server);
    peer.say(wire::encode(wire::Hello{prepared(client)}));
    const std::string accepted = peer.hear(wire::kHeaderBytes + 1);
    const auto frame = wire_test::decode_frame(std::as_bytes(std::span(accepted)));
    ASSERT_TRUE(frame) << frame.error().message();
    ASSERT_TRUE(std::holds_alternative<wire::Accept>(frame->body));
    const std::uint64_t incarnation = std::get<wire::Accept>(frame->body).endpoint.incarnation;
    peer.say(wire::encode(wire::Ready{is_stale ? incarnation ^ 1 : incarnation}));
    if (is_stale) {
      (void)peer.hear_all();
      EXPECT_TRUE(peer.has_ended());
      EXPECT_EQ(server.engine.stats().handshakes_refused, 1u);
      EXPECT_TRUE(server.ready.empty());
    } else {
      EXPECT_TRUE(until({&server}, [&] { return server.ready.size() == 1; }));
    }
  }
}

/// A server that closes each TCP connection, and how many it had.
class Unwelcoming {
 public:
  [[nodiscard]] std::string address() const { return socket_.local().str(); }
  std::size_t guests() {
    for (;;) {
      const auto guest = socket_.accept();
      EXPECT_TRUE(guest);
      if (!guest || !*guest) return guests_;
      ++guests_;
    }
  }

 private:
  ListenSocket socket_ = loopback::listener(64);
  std::size_t guests_ = 0;
};

TEST(PainPoint14, AStormOfReconnectsIsSpreadAndEndsWithTheFirstCause) {
  std::uint64_t now = 1'000'000'000;
  Node client(small_config(), &now);
  Unwelcoming server;
  constexpr std::size_t kConnections = 8;
  constexpr std::uint32_t kAttempts = 4;
  ConnectOptions options;
  options.handlers = client.handlers();
  options.reconnect = Reconnect{kAttempts, 100ms, 200ms};
  for (std::size_t i = 0; i < kConnections; ++i)
    ASSERT_TRUE(client.engine.connect(server.address(), options));
  // An attempt fails in real time, while the engine's time stands still.
  const auto settle = [&] {
    EXPECT_TRUE(until({&client}, [&] {
      (void)server.guests();
      return client.engine.stats().reserved_receives == 0;
    }));
  };
  settle();
  std::size_t most_at_once = 0;
  // At most 100 + 3 * 200 ms, and the resolution of timers. Without the cap it is 750 ms at least.
  for (int ms = 0; ms < 720 && client.closed.size() < kConnections; ++ms) {
    const std::size_t before = server.guests();
    now += 1'000'000;
    (void)client.poll();
    settle();
    most_at_once = std::max(most_at_once, server.guests() - before);
  }
  ASSERT_EQ(client.closed.size(), kConnections) << "a fault that stays ends the attempts";
  EXPECT_EQ(server.guests(), kConnections * (1 + kAttempts));
  EXPECT_LT(most_at_once, kConnections) << "the pauses differ";
  for (const Error& error : client.closed) {
    EXPECT_EQ(error.status, Status::peer_lost);
    EXPECT_TRUE(has(error.message(), "4 attempts to reconnect failed")) << error.message();
    EXPECT_TRUE(has(error.message(), "closed the TCP connection")) << error.message();
  }
}

TEST(PainPoint14, AFaultThatChangesIsToldByItsFirstCause) {
  std::uint64_t now = 1'000'000'000;
  Node client(small_config(), &now);
  std::optional<Unwelcoming> server(std::in_place);
  ConnectOptions options;
  options.handlers = client.handlers();
  options.reconnect = Reconnect{2, 100ms, 100ms};
  ASSERT_TRUE(client.engine.connect(server->address(), options));
  const auto has_failed = [&] { return client.engine.stats().reserved_receives == 0; };
  ASSERT_TRUE(until({&client}, [&] { return server->guests() == 1 && has_failed(); }));
  server.reset();  // nobody listens any more
  for (int ms = 0; ms < 1000 && client.closed.empty(); ++ms) {
    now += 1'000'000;
    (void)client.poll();
    ASSERT_TRUE(until({&client}, has_failed));
  }
  ASSERT_EQ(client.closed.size(), 1u);
  EXPECT_EQ(client.closed[0].status, Status::peer_lost);
  const std::string text = client.closed[0].message();
  const std::size_t last = text.find("2 attempts to reconnect failed, the last one: ");
  ASSERT_NE(last, std::string::npos) << text;
  EXPECT_TRUE(has(text.substr(0, last), "closed the TCP connection")) << text;
  EXPECT_FALSE(has(text.substr(last), "closed the TCP connection")) << text;
}

TEST(PainPoint15, AConnectThatNobodyAnswersEndsInTimeAndHoldsUpNothing) {
  Config config = small_config();
  config.connections.connect_timeout = 2s;
  std::uint64_t now = 1'000'000'000;
  Pair p(small_config(), config, &now);
  const ListenSocket silent = loopback::listener();
  const Connection never = p.client.begin(silent.local().str());
  const Buffer b = p.client.filled(8, 1);
  for (std::uint64_t i = 1; i <= 50; ++i) {
    ASSERT_TRUE(p.until([&] { return p.ends.client.send(b) == Status::ok; }));
    ASSERT_TRUE(p.until([&] { return p.server.messages == i; }));
  }
  EXPECT_EQ(never.state(), ConnectionState::exchanging);
  EXPECT_TRUE(p.client.closed.empty());
  for (int ms = 0; ms < 2100; ++ms) {
    now += 1'000'000;
    p.settle(1);
  }
  ASSERT_EQ(p.client.closed.size(), 1u);
  EXPECT_EQ(p.client.closed[0].status, Status::timed_out);
  EXPECT_TRUE(p.ends.client.ready());
}

TEST(PainPoint15, ARequestEndsInTimeAndItsLateReplyIsCounted) {
  rpc_test::Calls t;
  spinwire::CallOptions options;
  options.timeout = 1ms;
  ASSERT_EQ(t.begin(rpc_test::kLater, rpc_test::filled(5, 1), options), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.ended[0].times == 1 && t.later.size() == 1; }));
  EXPECT_EQ(t.ended[0].status, Status::timed_out);
  EXPECT_EQ(t.later[0].call.reply(rpc_test::filled(5, 2)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.client.engine.rpc_stats().late_replies >= 1; }));
  EXPECT_EQ(t.ended[0].times, 1);
  EXPECT_EQ(t.call(rpc_test::kEcho, rpc_test::filled(5, 3)).bytes, rpc_test::filled(5, 3));
}

TEST(PainPoint24, AStrangerLearnsNothingAndCostsNothing) {
  const key_files::KeyFile keys(key_files::line("ours", 'a'));
  Config config = small_config();
  config.security.key_file = keys.path();
  config.security.open = false;
  Node server(config), other;
  server.listen();
  const auto before = server.engine.stats();
  PlainPeer stranger(server);
  stranger.say(wire::encode(wire::Hello{prepared(other)}));
  const std::string heard = stranger.hear_all();
  const auto frame = wire_test::decode_frame(std::as_bytes(std::span(heard)));
  ASSERT_TRUE(frame) << frame.error().message();
  ASSERT_TRUE(std::holds_alternative<wire::Refuse>(frame->body)) << "no endpoint, no remote key";
  EXPECT_EQ(heard.size(), wire::kHeaderBytes + frame->header.body_length);
  EXPECT_EQ(std::get<wire::Refuse>(frame->body).message(), "authentication required");
  const auto after = server.engine.stats();
  EXPECT_EQ(after.connections, 0u);
  EXPECT_EQ(after.reserved_receives, before.reserved_receives);
  EXPECT_EQ(after.handshakes_refused, 1u);
  EXPECT_EQ(after.authentication.no_proof, 1u);
}

TEST(PainPoint24, PacketSequenceNumbersCannotBeGuessed) {
  Node node;
  std::set<std::uint32_t> numbers, steps;
  std::uint32_t last = 0;
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t psn = prepared(node).psn;
    numbers.insert(psn);
    steps.insert(psn - last);
    last = psn;
  }
  EXPECT_GE(numbers.size(), 7u);
  EXPECT_GE(steps.size(), 7u);
}

TEST(PainPoint24, WithoutAKeyOnlyThisHostIsReached) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "other hosts reach an adapter";
  Config config = small_config();
  config.security.open = false;
  Node node(config);
  const auto listener = node.engine.listen("0.0.0.0:0", {});
  ASSERT_FALSE(listener);
  EXPECT_EQ(listener.error().status, Status::unauthenticated);
  EXPECT_TRUE(has(listener.error().message(), "security.key_file")) << listener.error().message();
  EXPECT_TRUE(node.engine.listen("127.0.0.1:0", {}));
}

TEST(PainPoint24, ARemoteKeyGivesNoMoreThanWasExposed) {
  Pair p;
  const Buffer memory = p.server.filled(64, 1), b = p.client.filled(64, 2);
  auto region = p.server.engine.expose(memory.slice(), Access::remote_read);
  ASSERT_TRUE(region);
  const Buffer got = p.client.buffer(64);
  ASSERT_EQ(
      p.client.tally.run([&](auto done) { return p.ends.client.read(got.slice(), *region, done); }),
      Status::ok);
  ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  EXPECT_TRUE(Node::holds(got.bytes(), 1));
  RemoteRegion forged = *region;
  forged.access = Access::remote_read_write;
  ASSERT_EQ(
      p.client.tally.run([&](auto done) { return p.ends.client.write(b.slice(), forged, done); }),
      Status::ok);
  ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  EXPECT_EQ(p.client.tally.ended(Status::remote_access), 1u);
  EXPECT_TRUE(Node::holds(memory.bytes(), 1));
}

constexpr wire::Capabilities kLater{{7, 9}, 0};

TEST(PainPoint25, AServerNamesBothVersionsInItsFirstAnswer) {
  Node server;
  server.listen();
  PlainPeer later(server);
  later.say(wire::encode(wire::Hello{wire_test::valid_endpoint()}, kLater));
  const std::string heard = later.hear_all();
  EXPECT_TRUE(has(heard, "version 7 to 9")) << heard;
  EXPECT_TRUE(has(heard, "we speak version 1")) << heard;
  EXPECT_EQ(server.engine.stats().connections, 0u);
}

TEST(PainPoint25, AClientNamesBothVersionsAfterTheFirstAnswer) {
  Node client;
  ListenSocket server = loopback::listener();
  const Connection c = client.begin(server.local().str());
  std::optional<spinwire::control::Accepted> accepted;
  ASSERT_TRUE(until({&client}, [&] {
    auto guest = server.accept();
    if (guest && *guest) accepted = std::move(**guest);
    return accepted.has_value();
  }));
  const wire::Frame answer = wire::encode(wire::Accept{wire_test::valid_endpoint()}, kLater);
  EXPECT_EQ(::send(accepted->fd.get(), answer.bytes().data(), answer.bytes().size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(answer.bytes().size()));
  ASSERT_TRUE(until({&client}, [&] { return client.closed.size() == 1; }));
  const std::string text = client.closed[0].message();
  EXPECT_EQ(client.closed[0].status, Status::unsupported);
  EXPECT_TRUE(has(text, "version 7 to 9")) << text;
  EXPECT_TRUE(has(text, "we speak version 1")) << text;
  EXPECT_EQ(c.state(), ConnectionState::closed);
}

TEST(PainPoint25, AGidOfAnotherTypeIsNamedWithOurs) {
  Node server, client;
  server.listen();
  Endpoint endpoint = prepared(client);
  const GidType ours = server.engine.device().gid_type;
  endpoint.gid_type = ours == GidType::roce_v1 ? GidType::roce_v2 : GidType::roce_v1;
  PlainPeer peer(server);
  peer.say(wire::encode(wire::Hello{endpoint}));
  const std::string heard = peer.hear_all();
  EXPECT_TRUE(has(heard, to_string(ours))) << heard;
  EXPECT_TRUE(has(heard, to_string(endpoint.gid_type))) << heard;
}

}  // namespace
}  // namespace pain_points_peers_test
