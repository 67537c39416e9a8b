// Forged datagrams: each is dropped and counted, and affects no session.
#include "base/internals.h"
#include "rpc/bare_engine.h"
#include "rpc/client_session.h"
#include "rpc/server_session.h"

namespace rpc_hostile_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::rpc::ClientSession;
using spinwire::rpc::ServerSession;
using spinwire::wire::RpcHeader;
using spinwire::wire::RpcKind;

/// A server, a client with an unanswered call, and an attacker with its own session, whose port
/// sends what a test wants.
class RpcHostile : public testing::Test {
 protected:
  RpcHostile() : RpcHostile(config()) {}
  explicit RpcHostile(const Config& servers)
      : server_(servers), client_(config()), other_(config()) {
    listener_ = std::move(*server_.core->listen("127.0.0.1:0", {}));
    EXPECT_TRUE(server_.core->serve(kLater, [this](Request& r) { later_.push_back(r.defer()); }));
    session_ = client_.core->open_session(listener_.address(), {}).value();
    theirs_ = other_.core->open_session(listener_.address(), {}).value();
    EXPECT_TRUE(run([&] { return session_.ready() && theirs_.ready(); }));
    EXPECT_EQ(session_.call(kLater, filled(9, 1),
                            [this](Reply& r) {
                              ++ended_;
                              status_ = r.status();
                              bytes_ = bytes_of(r.bytes());
                            }),
              Status::ok);
    EXPECT_TRUE(run([&] { return later_.size() == 1; }));
  }
  static Config config() {
    Config c = rpc_config();
    c.rpc.target_rtt = Nanoseconds(0);  // so that only the servers' windows count
    return c;
  }
  template <typename Done>
  bool run(Done&& done) {
    return until({}, [&] {
      for (const Bare* each : {&server_, &client_, &other_}) (void)each->core->poll();
      return done();
    });
  }
  void poll_some() {
    int left = 200;
    (void)run([&] { return left-- == 0; });
  }
  [[nodiscard]] static std::uint64_t bad(const Bare& node) {
    return spinwire::rpc::stats(*node.core->calls).bad_datagrams;
  }
  /// Sends from the attacker's port to the address of one of its routes or ours.
  void send(const spinwire::verbs::DatagramAddress& to, const RpcHeader& header) {
    static const std::byte nothing[kSlotPayloadBytes]{};
    other_.core->calls->port->send(to, spinwire::wire::pack(header), header.length, nothing);
    other_.core->calls->port->flush();
  }
  [[nodiscard]] spinwire::verbs::DatagramAddress to_server() {
    return spinwire::rpc::find_client(*other_.core->calls,
                                      spinwire::detail::Internals::name(theirs_))
        ->peer_address->destination;
  }
  /// The client's record of its session, and the server's.
  [[nodiscard]] const ClientSession& ours() {
    return *spinwire::rpc::find_client(*client_.core->calls,
                                       spinwire::detail::Internals::name(session_));
  }
  [[nodiscard]] ServerSession& victim() {
    return *spinwire::rpc::find_server(*server_.core->calls, ours().peer_session);
  }
  /// Sends the client a datagram without a payload from the server's port.
  void send_from_server(const RpcHeader& header) {
    static const std::byte nothing[kSlotPayloadBytes]{};
    spinwire::rpc::DatagramPort& port = *server_.core->calls->port;
    port.send(victim().peer_address->destination, spinwire::wire::pack(header), 0, nothing);
    port.flush();
  }
  /// Checks that the first call is still answered.
  void expect_unharmed() {
    EXPECT_EQ(ended_, 0);
    EXPECT_EQ(later_.size(), 1u);
    EXPECT_EQ(later_[0].reply(filled(7, 3)), Status::ok);
    EXPECT_TRUE(run([&] { return ended_ == 1; }));
    EXPECT_EQ(status_, Status::ok);
    EXPECT_EQ(bytes_, filled(7, 3));
    for (const Bare* each : {&server_, &client_, &other_}) each->expect_clean();
  }

  Bare server_, client_, other_;
  Listener listener_;
  Session session_, theirs_;
  std::vector<PendingCall> later_;
  int ended_ = 0;
  Status status_ = Status::system;
  Bytes bytes_;
};

TEST_F(RpcHostile, AnotherOnesSessionIsNotHisToUse) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  // Its queue pair number may be the same.
  EXPECT_EQ(other_.core->calls->port->qp_num(), client_.core->calls->port->qp_num());
  const std::uint32_t name = victim().name;
  send(to_server(), {name, 8 + 1, kLater, RpcKind::request, 0, 0, 0});
  send(to_server(), {name, 0, 0, RpcKind::close, 0, 0, 0});
  send(to_server(), {name, 0, 0, RpcKind::ping, 0, 0, 0});
  ASSERT_TRUE(run([&] { return bad(server_) == 3; }));
  EXPECT_EQ(spinwire::rpc::stats(*server_.core->calls).served_sessions, 2u);
  poll_some();
  expect_unharmed();
}

/// All records of the server are held but one.
class RpcNames : public RpcHostile {
 protected:
  RpcNames() : RpcHostile(two_sessions()) {}
  static Config two_sessions() {
    Config c = config();
    c.rpc.sessions = 2;
    return c;
  }
};

TEST_F(RpcNames, ThatComeAgainFitNothingOld) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  const std::uint32_t name = victim().name;
  const std::uint32_t number = victim().slots[0].number;
  PendingCall old = std::move(later_[0]);
  later_.clear();
  int uses = 0;
  do {
    EXPECT_EQ(session_.close(), Status::ok);
    ASSERT_TRUE(run([&] { return session_.state() == SessionState::closed; }));
    session_ = client_.core->open_session(listener_.address(), {}).value();
    ASSERT_TRUE(run([&] { return session_.ready(); }));
    ++uses;
  } while (victim().name != name && uses < 10'000);
  EXPECT_EQ(uses, 2047);
  EXPECT_EQ(ended_, 1);  // with its session
  ended_ = 0;
  EXPECT_EQ(session_.call(kLater, filled(9, 1),
                          [this](Reply& r) {
                            ++ended_;
                            status_ = r.status();
                            bytes_ = bytes_of(r.bytes());
                          }),
            Status::ok);
  ASSERT_TRUE(run([&] { return later_.size() == 1; }));
  EXPECT_NE(victim().slots[0].number, number);
  EXPECT_EQ(old.reply(filled(5, 5)), Status::not_connected);
  const std::uint64_t before = bad(server_);
  send(to_server(), {name, victim().slots[0].number + 8, kLater, RpcKind::request, 0, 0, 0});
  send(to_server(), {name, 0, 0, RpcKind::close, 0, 0, 0});
  ASSERT_TRUE(run([&] { return bad(server_) == before + 2; }));
  poll_some();
  expect_unharmed();
}

TEST_F(RpcHostile, WhatMakesNoSenseIsCounted) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  const auto to = to_server();
  const std::uint32_t name =
      spinwire::rpc::find_client(*other_.core->calls, spinwire::detail::Internals::name(theirs_))
          ->peer_session;
  const std::uint32_t first =
      spinwire::rpc::find_server(*server_.core->calls, name)->slots[0].number;
  const std::vector<RpcHeader> nonsense = {
      {0, 9, kLater, RpcKind::request, 0, 0, 0},                // unknown session
      {0xffffffff, 9, kLater, RpcKind::request, 0, 0, 0},       // beyond all records
      {name ^ 0x100000, 9, kLater, RpcKind::request, 0, 0, 0},  // an earlier use of the record
      {name, 9, kLater, RpcKind::request, 1, 0, 0},             // with a status
      {name, 9, kLater, RpcKind::request, 0, 0, 3},             // with a window
      {name, 9, 0, RpcKind::reply, 0, 0, 8},                    // a reply to a server
      {name, 9, 0, RpcKind{0}, 0, 0, 0},
      {name, 9, 0, RpcKind{200}, 0, 0, 0},
  };
  for (const RpcHeader& header : nonsense) send(to, header);
  ASSERT_TRUE(run([&] { return bad(server_) == nonsense.size(); }));
  // Like the second reply to a repeated close.
  send(to, {name, 9, 0, RpcKind::closed, 0, 0, 0});
  ASSERT_TRUE(run([&] { return spinwire::rpc::stats(*server_.core->calls).late_replies == 1; }));
  // Numbers from before the first call or far away: old, or a slot's next call.
  const std::uint64_t before = spinwire::rpc::stats(*server_.core->calls).duplicates;
  for (const std::uint32_t number : {0u, 1u, 0xfffffff8u, 0x80000000u})
    send(to, {name, first + number, kLater, RpcKind::request, 0, 0, 0});
  ASSERT_TRUE(
      run([&] { return spinwire::rpc::stats(*server_.core->calls).duplicates == before + 4; }));
  expect_unharmed();
}

TEST_F(RpcHostile, AReplyThatIsShorterThanItsHeaderSaysNothing) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  const ServerSession& s = victim();
  spinwire::rpc::DatagramPort& port = *server_.core->calls->port;
  static const std::byte nothing[kSlotPayloadBytes]{};
  // Lengths a few bytes shorter than the header's, modulo the field's size.
  for (const std::uint16_t less : {std::uint16_t{1}, std::uint16_t{2}}) {
    const auto length = static_cast<std::uint16_t>(-less);
    const RpcHeader header{s.peer_session, s.slots[0].number, 0, RpcKind::reply, 0, length, 1};
    port.send(s.peer_address->destination, spinwire::wire::pack(header), std::uint32_t{0} - less,
              nothing);
  }
  port.flush();
  ASSERT_TRUE(run([&] { return bad(client_) == 2 || ended_ != 0; }));
  expect_unharmed();
}

TEST_F(RpcHostile, AReplyThatAllowsNoCallsIsNone) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  const ClientSession& to = ours();
  send_from_server({to.name, to.slots[0].number, 0, RpcKind::reply, 0, 0, 0});
  ASSERT_TRUE(run([&] { return ended_ != 0 || bad(client_) == 1; }));
  EXPECT_GE(to.server_window, 1u);
  expect_unharmed();
}

TEST_F(RpcHostile, ARefusalWithoutTheCodeThatItNamesIsNone) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  const ClientSession& to = ours();
  constexpr std::uint8_t kRefused =
      static_cast<std::uint8_t>(Status::refused) | spinwire::wire::kHasCode;
  send_from_server({to.name, to.slots[0].number, 0, RpcKind::reply, kRefused, 0, 1});
  ASSERT_TRUE(run([&] { return ended_ != 0 || bad(client_) == 1; }));
  expect_unharmed();
}

TEST_F(RpcHostile, NoReplyAllowsMoreCallsThanThereArePlaces) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  const ClientSession& to = ours();
  send_from_server({to.name, to.slots[0].number, 0, RpcKind::reply, 0, 0, 65535});
  ASSERT_TRUE(run([&] { return ended_ != 0; }));
  std::uint32_t more = 0;
  const auto done = [](Reply&) {};
  while (session_.call(kLater, Bytes(), done) == Status::ok) ++more;
  EXPECT_EQ(to.in_flight, to.window);
  EXPECT_EQ(more, to.window + client_.core->context.config.rpc.backlog);
  for (const Bare* each : {&server_, &client_, &other_}) each->expect_clean();
}

TEST_F(RpcHostile, AReplyToACallThatIsYetToBeMadeIsLate) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  const ClientSession& to = ours();
  ASSERT_EQ(to.free_slots & 3, 2u);
  for (const std::uint32_t number : {to.slots[1].number, to.slots[0].number + to.window})
    send_from_server({to.name, number, 0, RpcKind::reply, 0, 0, 1});
  ASSERT_TRUE(run(
      [&] { return ended_ != 0 || spinwire::rpc::stats(*client_.core->calls).late_replies == 2; }));
  EXPECT_EQ(to.in_flight, 1u);
  expect_unharmed();
}

/// A host that makes a network show another source than its own still lacks the token of the
/// session.
class RpcForgedSource : public RpcHostile {
 protected:
  /// Sends a datagram without a payload to the server, as if from the client.
  void send_as_client(const RpcHeader& header) {
    static const std::byte nothing[kSlotPayloadBytes]{};
    spinwire::rpc::DatagramPort& port = *client_.core->calls->port;
    port.send(ours().peer_address->destination, spinwire::wire::pack(header), 0, nothing);
    port.flush();
  }
};

TEST_F(RpcForgedSource, EndsNoSessionAtTheServer) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  const std::uint32_t name = victim().name;
  const std::uint32_t proof = spinwire::wire::session_proof(victim().token);
  const std::uint32_t far = victim().slots[0].number + (1u << 20);
  for (const std::uint32_t wrong : {0u, proof ^ 1, proof ^ 0x80000000})
    send_as_client(spinwire::wire::session_header(name, 0, RpcKind::close, wrong));
  // A ping would say that later calls are over.
  send_as_client(spinwire::wire::session_header(name, far, RpcKind::ping, proof ^ 2));
  ASSERT_TRUE(run([&] { return bad(server_) == 4; }));
  EXPECT_EQ(spinwire::rpc::stats(*server_.core->calls).served_sessions, 2u);
  expect_unharmed();
}

TEST_F(RpcForgedSource, EndsNoSessionAtTheClient) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  const std::uint32_t proof = spinwire::wire::session_proof(victim().token);
  for (const RpcKind kind : {RpcKind::closed, RpcKind::unknown, RpcKind::pong})
    send_from_server(spinwire::wire::session_header(ours().name, victim().name, kind, proof ^ 1));
  ASSERT_TRUE(run([&] { return bad(client_) == 3; }));
  EXPECT_TRUE(session_.ready());
  expect_unharmed();
}

TEST_F(RpcForgedSource, SaysNoGoodbyeToTheClient) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  const std::uint32_t proof = spinwire::wire::session_proof(victim().token);
  const auto send_goodbye = [&](RpcKind kind, std::uint32_t number, std::uint32_t shown) {
    send_from_server(spinwire::wire::session_header(ours().name, number, kind, shown));
  };
  send_goodbye(RpcKind::goodbye, 2, proof ^ 1);
  // From the server, but malformed: an unknown reason, too long a time, a bit of connections.
  for (const RpcKind kind : {RpcKind::goodbye, RpcKind::closed}) {
    for (const std::uint32_t number : {1u, 9u, 3'600'001u << 8 | 2u, 1u << 31 | 2u})
      send_goodbye(kind, number, proof);
  }
  ASSERT_TRUE(run([&] { return bad(client_) == 9; }));
  EXPECT_TRUE(session_.ready());
  expect_unharmed();
}

TEST_F(RpcForgedSource, GetsNoAnswerToAChallengeOfItsOwn) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  const Session opening = client_.core->open_session(listener_.address(), {}).value();
  const std::uint32_t name = spinwire::detail::Internals::name(opening);
  const ClientSession& c = *spinwire::rpc::find_client(*client_.core->calls, name);
  const auto challenge = [&](std::uint32_t proof) {
    const RpcHeader header =
        spinwire::wire::session_header(name, 0, RpcKind::path_challenge, proof);
    const std::byte token[kSlotPayloadBytes]{std::byte{7}};
    spinwire::rpc::DatagramPort& port = *server_.core->calls->port;
    port.send(victim().peer_address->destination, spinwire::wire::pack(header), header.length,
              token);
    port.flush();
  };
  challenge(spinwire::wire::session_proof(c.token) ^ 1);
  ASSERT_TRUE(run([&] { return bad(client_) == 1; }));
  ASSERT_TRUE(run([&] { return opening.ready(); }));
  expect_unharmed();
}

TEST_F(RpcHostile, TheQKeyDoesNotFollowFromWhatPeersKnow) {
  const Bare engine(config());
  // It is a secret that nothing else has shown: Random.SecretsAreTheKernelsOrAnError says of what
  // origin secrets are.
  const spinwire::base::SeedSource secrets(7);
  ASSERT_TRUE(engine.core->open_calls());
  const auto secret = static_cast<std::uint32_t>(spinwire::base::Random(7).next() >> 32);
  EXPECT_EQ(engine.core->calls->local.qkey, secret & 0x7fffffffu);
}

TEST_F(RpcHostile, NobodyIsTheServerOfASessionThatIsBeingOpened) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  const Session opening = client_.core->open_session(listener_.address(), {}).value();
  for (const RpcKind kind : {RpcKind::reply, RpcKind::pong, RpcKind::closed})
    send_from_server({spinwire::detail::Internals::name(opening), 0, 0, kind, 0, 0, 1});
  ASSERT_TRUE(until({}, [&] {  // the server does not answer meanwhile
    (void)client_.core->poll();
    return bad(client_) == 3;
  }));
  EXPECT_EQ(opening.state(), spinwire::SessionState::opening);
  ASSERT_TRUE(run([&] { return opening.ready(); }));
  expect_unharmed();
}

}  // namespace
}  // namespace rpc_hostile_test
