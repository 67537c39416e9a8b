// Before a session is opened, the client proves that it receives what is sent to its address.
#include "control/control_port_fixture.h"

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
  server_.pass(100ms);  // each peer has some undisturbed time
  for (int i = 0; i < 3; ++i) silent.push_back(plain_peer());
  EXPECT_TRUE(until([&] { return server_owner_.saw("unconfirmed 44"); }));
}

}  // namespace
}  // namespace control_port_test
