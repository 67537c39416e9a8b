// Before a session is opened, the client proves that it receives what is sent to its address.
#include "control/control_port_fixture.h"
#include "control/resolution_limits.h"

namespace control_port_test {
namespace {

class PathValidation : public ControlPortTest {
 protected:
  static constexpr std::uint64_t kToken = 0x1122334455667788;
  PathValidation() { listener_->path_token = kToken; }
  HandshakeId open() {
    const auto id = client_.port.open_session(server_address(), session_end(3, kClientIncarnation),
                                              client_owner_, 3);
    EXPECT_TRUE(id);
    EXPECT_TRUE(until([&] { return server_owner_.saw("challenge 44"); }));
    EXPECT_EQ(server_owner_.challenge, kToken);
    return *id;
  }
  [[nodiscard]] std::ptrdiff_t challenges() const {
    return std::count(server_owner_.events.begin(), server_owner_.events.end(), "challenge 44");
  }
};

TEST_F(PathValidation, TheTokenOpensTheSession) {
  const HandshakeId id = open();
  client_.port.respond(id, kToken);
  ASSERT_TRUE(until([&] { return client_owner_.saw("opened 3"); }));
  EXPECT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
  EXPECT_TRUE(server_owner_.saw("validated 44"));
  EXPECT_FALSE(server_owner_.saw("unconfirmed 44"));
}

TEST_F(PathValidation, AnotherTokenDoesNotAndTheTrueOneStillDoes) {
  const HandshakeId id = open();
  for (const std::uint64_t wrong : {std::uint64_t{1}, kToken ^ 1, kToken << 1}) {
    client_.port.respond(id, wrong);
    for (int i = 0; i < 20; ++i) {
      client_.step();
      server_.step();
    }
    EXPECT_TRUE(client_owner_.events.empty());
    EXPECT_FALSE(server_owner_.saw("validated 44"));
  }
  client_.port.respond(id, kToken);
  ASSERT_TRUE(until([&] { return client_owner_.saw("opened 3"); }));
}

TEST_F(PathValidation, TheTokenMayComeMoreThanOnce) {
  (void)open();
  auto client = plain_peer();
  say(client, wire::encode(wire::OpenSession{session_end(3, kClientIncarnation)}).bytes());
  ASSERT_TRUE(until([&] { return challenges() == 2; }));
  for (int i = 0; i < 3; ++i) say(client, wire::encode(wire::PathResponse{kToken}).bytes());
  for (int i = 0; i < 20; ++i) server_.step();
  EXPECT_FALSE(server_owner_.saw("unconfirmed 44"));
  say(client, wire::encode(wire::Ready{kServerIncarnation}).bytes());
  EXPECT_TRUE(until([&] { return server_.port.handshakes() == 1; }));
  EXPECT_FALSE(server_owner_.saw("unconfirmed 44"));
}

TEST_F(PathValidation, ALostChallengeIsRepeatedLessAndLessOften) {
  (void)open();
  for (int ms = 0; ms < 100; ++ms) {
    server_.pass(1ms);
    server_.step();
  }
  EXPECT_GE(challenges(), 4);
  EXPECT_LE(challenges(), 8);
}

TEST_F(PathValidation, WithoutAnAnswerTheSessionEndsAfterTheTimeOut) {
  (void)open();
  server_.pass(499ms);
  server_.step();
  EXPECT_FALSE(server_owner_.saw("unconfirmed 44"));
  server_.pass(2ms);
  EXPECT_TRUE(until([&] { return server_owner_.saw("unconfirmed 44"); }));
  EXPECT_TRUE(until([&] { return client_owner_.saw("open_failed 3"); }));
  EXPECT_EQ(server_.port.handshakes(), 0u);
}

TEST_F(PathValidation, AClientThatLeavesIsForgotten) {
  client_.port.drop(open());
  EXPECT_TRUE(until([&] { return server_owner_.saw("unconfirmed 44"); }));
}

TEST_F(PathValidation, ItGivesWayToOthers) {
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 3; ++i) {
    silent.push_back(plain_peer());
    say(silent.back(), wire::encode(wire::OpenSession{session_end(3, kClientIncarnation)}).bytes());
  }
  ASSERT_TRUE(until([&] { return challenges() == 3; }));
  server_.pass_with_polls(100ms);  // each peer has some undisturbed time
  for (int i = 0; i < 3; ++i) silent.push_back(plain_peer());
  EXPECT_TRUE(until([&] { return server_owner_.saw("unconfirmed 44"); }));
}

/// A port with room for many handshakes, whose clients name addresses that nobody answers for.
class ManyChallenges : public testing::Test {
 protected:
  static constexpr auto kOfSource = control::ResolutionLimits::kChallengesOfSource;
  static constexpr const char *kHostile = "127.0.0.2:0", *kHonest = "127.0.0.3:0";
  static constexpr std::uint64_t kToken = 0x1122334455667788;

  ManyChallenges() {
    listener_ = std::make_shared<ListenerRecord>(owner_);
    listener_->path_token = kToken;
    listening_ = server_.port.listen(loopback::any_port(), listener_).value();
  }
  ~ManyChallenges() override { server_.port.close(); }
  void open(const char* from, std::uint32_t count = 1,
            const wire::SessionEnd& client = session_end(3, kClientIncarnation)) {
    const auto address = *control::Address::parse(server_.port.address_of(listening_));
    const auto frame = wire::encode(wire::OpenSession{client});
    for (std::uint32_t i = 0; i < count; ++i) {
      peers_.push_back(loopback::plain_client(address, from));
      say(peers_.back(), frame);
    }
    const std::uint32_t all = server_.port.handshakes() + count;
    ASSERT_TRUE(until([&] { return server_.port.handshakes() == all; }));
    for (int i = 0; i < 50; ++i) server_.step();
  }
  static void say(const UniqueFd& peer, const wire::Frame& frame) {
    EXPECT_EQ(::send(peer.get(), frame.bytes().data(), frame.bytes().size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(frame.bytes().size()));
  }
  template <typename Done>
  bool until(Done&& done) {
    return loopback::eventually([&] {
      server_.step();
      return done();
    });
  }
  [[nodiscard]] std::uint32_t challenges() const {
    return static_cast<std::uint32_t>(
        std::count(owner_.events.begin(), owner_.events.end(), "challenge 44"));
  }

  Owner owner_;
  Port server_{kServerIncarnation, 256};
  std::shared_ptr<ListenerRecord> listener_;
  ListenerId listening_;
  std::vector<UniqueFd> peers_;
};

TEST_F(ManyChallenges, OfOneSourceAreLimitedAndOthersAreChallenged) {
  open(kHostile, kOfSource.at_once + 20);
  EXPECT_EQ(challenges(), kOfSource.at_once);
  open(kHonest);
  EXPECT_EQ(challenges(), kOfSource.at_once + 1);
}

TEST_F(ManyChallenges, OnADeviceThatReachesNoOtherHostNobodyIsProtected) {
  server_.port.set_reach(false, {});
  open(kHostile, kOfSource.at_once + 20);
  EXPECT_EQ(challenges(), kOfSource.at_once + 20);
}

TEST_F(ManyChallenges, AnAddressThatTheClientHasIsNotLimited) {
  open(kHostile, kOfSource.at_once + 1);
  ASSERT_EQ(challenges(), kOfSource.at_once);
  // It comes from there.
  wire::SessionEnd near = session_end(3, kClientIncarnation);
  near.gid = control::Address::parse(kHostile)->as_v6();
  open(kHostile, 1, near);
  EXPECT_EQ(challenges(), kOfSource.at_once + 1);
}

TEST_F(ManyChallenges, TheAddressOfThisHostIsNotLimited) {
  wire::SessionEnd here = session_end(3, kClientIncarnation);
  here.gid[15] ^= 1;
  server_.port.set_reach(true, here.gid);
  open(kHostile, kOfSource.at_once + 1);
  ASSERT_EQ(challenges(), kOfSource.at_once);
  open(kHostile, 1, here);
  EXPECT_EQ(challenges(), kOfSource.at_once + 1);
}

TEST_F(ManyChallenges, AnAddressThatWasConfirmedIsNotLimited) {
  wire::SessionEnd honest = session_end(3, kClientIncarnation);
  honest.gid[15] ^= 1;
  open(kHostile, 1, honest);
  say(peers_.back(), wire::encode(wire::PathResponse{kToken}));
  ASSERT_TRUE(until([&] { return owner_.saw("validated 44"); }));
  open(kHostile, kOfSource.at_once + 1);
  ASSERT_EQ(challenges(), kOfSource.at_once + 1);
  open(kHostile, 1, honest);
  EXPECT_EQ(challenges(), kOfSource.at_once + 2);
  // Another source that names it could mean harm to it.
  open(kHonest, kOfSource.at_once + 1, honest);
  EXPECT_EQ(challenges(), 2 * kOfSource.at_once + 2);
}

TEST_F(ManyChallenges, AnsweredOnesMakeRoomForOthers) {
  open(kHostile, kOfSource.at_once + 20);
  for (const UniqueFd& peer : peers_) say(peer, wire::encode(wire::PathResponse{kToken}));
  EXPECT_TRUE(until([&] { return challenges() >= kOfSource.at_once + 20; }));
}

TEST_F(ManyChallenges, ThatNobodyAnswersAreLimitedPerTime) {
  open(kHostile, kOfSource.at_once);
  peers_.clear();
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
  const std::uint32_t before = challenges();
  open(kHostile, 10);
  EXPECT_EQ(challenges(), before);
  server_.pass(2 * kOfSource.interval);
  ASSERT_TRUE(until([&] { return challenges() >= before + 2; }));
  EXPECT_EQ(challenges(), before + 2);
}

}  // namespace
}  // namespace control_port_test
