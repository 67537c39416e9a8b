// Requests that wait at the control port until their listener has room for a connection, and
// requests through rdma_cm, which the tests make without an identifier.
#include <netinet/in.h>

#include "control/control_port_fixture.h"

namespace control_port_test {
namespace {

class HeldHandshakes : public ControlPortTest {
 protected:
  void steps(int count = 20) {
    for (int i = 0; i < count; ++i) server_.step();
  }
  /// A peer that is silent after its hello, which has been answered.
  void half_open(const char* source = nullptr) {
    peers_.push_back(plain_peer(source));
    say(peers_.back(), wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
    listener_->handshake = {};
    ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
    server_.port.answer(listener_->handshake, endpoint(202, kServerIncarnation));
    listener_->handshake = {};
  }
  /// A peer whose hello finds no room.
  void held(const char* source = nullptr) {
    const std::size_t before = listener_->asked.size();
    peers_.push_back(plain_peer(source));
    say(peers_.back(), wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
    ASSERT_TRUE(until([&] { return listener_->asked.size() > before; }));
  }
  void request(const char* from) {
    auto made = std::make_unique<control::CmRequest>();
    made->peer = *control::Address::parse(from);
    made->listener = listening_;
    server_.port.take_request(std::move(made));
  }

  std::vector<UniqueFd> peers_;
};

TEST_F(HeldHandshakes, ANewcomerWithoutRoomEndsAHalfOpenConnectionAndGoesOn) {
  half_open();
  listener_->has_room = false;
  hello();
  ASSERT_TRUE(until([&] { return listener_->asked.size() > 1; }));
  steps();
  EXPECT_TRUE(server_owner_.events.empty()) << "it has not had its time";
  server_.pass_with_polls(100ms);
  server_.step();
  EXPECT_EQ(server_owner_.events, std::vector<std::string>{"failed 77"});
  EXPECT_EQ(server_owner_.error.status, Status::limit);
  EXPECT_FALSE(listener_->handshake);
  EXPECT_EQ(server_.port.handshakes(), 1u);  // the newcomer
  listener_->has_room = true;
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  server_.port.answer(listener_->handshake, endpoint(202, kServerIncarnation));
  EXPECT_TRUE(until([&] { return client_owner_.saw("accept 11"); }));
}

TEST_F(HeldHandshakes, NothingAnnouncesThatTheyCanGoOn) {
  EXPECT_FALSE(server_.port.awaits_unannounced());
  listener_->has_room = false;
  held();
  EXPECT_TRUE(server_.port.awaits_unannounced());
  EXPECT_FALSE(server_.port.can_go_on()) << "there is no room";
  listener_->has_room = true;
  steps();
  EXPECT_FALSE(server_.port.awaits_unannounced());
}

TEST_F(HeldHandshakes, ASourceWithoutRoomEndsAHalfOpenConnectionOfItsOwn) {
  half_open("127.0.0.2:0");
  listener_->has_room = false;
  listener_->needs_own_source = "127.0.0.";
  held("127.0.0.3:0");
  server_.pass_with_polls(100ms);
  steps();
  EXPECT_TRUE(server_owner_.events.empty()) << "it is of another source";
  listener_->asked.clear();
  held("127.0.0.2:0");
  server_.pass_with_polls(100ms);
  steps();
  EXPECT_EQ(server_owner_.events, std::vector<std::string>{"failed 77"});
}

TEST_F(HeldHandshakes, ASourceWithoutRoomKeepsNoOtherWaiting) {
  listener_->has_room = false;
  listener_->needs_own_source = "127.0.0.";
  held("127.0.0.2:0");
  held("127.0.0.3:0");
  held("127.0.0.3:0");
  listener_->asked.clear();
  server_.step();
  EXPECT_EQ(listener_->asked.size(), 3u);
}

// There are more of them than a poll asks.
TEST_F(HeldHandshakes, SourcesWithoutRoomDoNotHaveAllTurns) {
  Port many(kServerIncarnation, 16);
  const auto id = many.port.listen(loopback::any_port(), listener_);
  ASSERT_TRUE(id);
  listener_->has_room = false;
  listener_->needs_own_source = "127.0.0.";
  const auto add = [&](const std::string& source) {
    const std::size_t before = listener_->asked.size();
    const auto at = *control::Address::parse(many.port.address_of(*id));
    peers_.push_back(loopback::plain_client(at, source.c_str()));
    say(peers_.back(), wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
    ASSERT_TRUE(loopback::eventually([&] {
      many.step();
      return listener_->asked.size() > before;
    }));
  };
  for (int i = 2; i < 8; ++i) ASSERT_NO_FATAL_FAILURE(add("127.0.0." + std::to_string(i) + ":0"));
  for (int i = 0; i < 2; ++i) ASSERT_NO_FATAL_FAILURE(add("127.0.1.1:0"));
  listener_->asked.clear();
  for (int i = 0; i < 4; ++i) many.step();
  EXPECT_TRUE(std::any_of(listener_->asked.begin(), listener_->asked.end(),
                          [](const std::string& peer) { return peer.starts_with("127.0.1.1:"); }));
  many.port.close();
}

TEST_F(HeldHandshakes, NoMoreEndThanThereAreNewcomers) {
  half_open();
  half_open();
  server_.pass_with_polls(4ms);  // they have nearly had their time
  listener_->has_room = false;
  hello();
  ASSERT_TRUE(until([&] { return listener_->asked.size() > 2; }));
  server_.pass(2ms);
  server_.step();
  EXPECT_EQ(server_owner_.events.size(), 1u);
  listener_->ending = 1;  // its record takes some steps to become free
  steps();
  EXPECT_EQ(server_owner_.events.size(), 1u);
}

TEST_F(HeldHandshakes, OneThatWaitsForOurOwnVerbsStays) {
  peers_.push_back(plain_peer());
  say(peers_.back(), wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  listener_->has_room = false;
  hello();
  ASSERT_TRUE(until([&] { return listener_->asked.size() > 1; }));
  server_.pass_with_polls(200ms);
  steps();
  EXPECT_TRUE(server_owner_.events.empty());
}

TEST_F(HeldHandshakes, TheSourceWithTheFewestGoesFirst) {
  listener_->has_room = false;
  for (int i = 0; i < 3; ++i) held("127.0.0.2:0");
  held("127.0.0.3:0");
  listener_->asked.clear();
  server_.step();
  ASSERT_FALSE(listener_->asked.empty());
  EXPECT_EQ(listener_->asked[0].substr(0, 10), "127.0.0.3:");
  EXPECT_EQ(listener_->asked.size(), 1u) << "where it finds no room, no other does";
  listener_->has_room = true;
  listener_->asked.clear();
  server_.step();
  EXPECT_EQ(listener_->asked.size(), 4u);
}

TEST_F(HeldHandshakes, ThoseThatWaitForAConnectionKeepHalfOfThePlaces) {
  listener_->has_room = false;
  held("127.0.0.2:0");
  held("127.0.0.3:0");
  for (const char* const source : {"127.0.0.4:0", "127.0.0.5:0", "127.0.0.6:0", "127.0.0.7:0"}) {
    peers_.push_back(plain_peer(source));
    server_.pass_with_polls(100ms);
  }
  EXPECT_EQ(server_.port.refusals(), 2u) << "of the silent ones";
  EXPECT_EQ(server_.port.waiting_for_connections(), 2u);
  say(peers_[4], wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
  ASSERT_TRUE(until([&] { return server_.port.waiting_for_connections() == 3; }));
  peers_.push_back(plain_peer("127.0.0.8:0"));
  server_.pass_with_polls(100ms);
  EXPECT_EQ(server_.port.waiting_for_connections(), 2u);
  EXPECT_EQ(server_.port.refusals(), 3u);
}

TEST_F(HeldHandshakes, HeldOnesOfAHeavySourceGiveWayToNewPeers) {
  listener_->has_room = false;
  for (int i = 0; i < 4; ++i) held("127.0.0.2:0");
  server_.pass_with_polls(20ms);
  held("127.0.0.3:0");
  EXPECT_EQ(server_.port.handshakes(), 4u);
  EXPECT_EQ(server_.port.refusals(), 1u);
}

TEST_F(HeldHandshakes, OneThatWaitsForTooLongIsRefused) {
  listener_->has_room = false;
  hello();
  ASSERT_TRUE(until([&] { return !listener_->asked.empty(); }));
  server_.pass(600ms);
  ASSERT_TRUE(until([&] { return client_owner_.saw("refused 11"); }));
  EXPECT_EQ(client_owner_.error.status, Status::limit);
  EXPECT_NE(client_owner_.error.found.find("half-open"), std::string::npos);
}

TEST_F(HeldHandshakes, APeerThatClosesMeanwhileLeavesItsPlace) {
  listener_->has_room = false;
  held("127.0.0.2:0");
  held("127.0.0.3:0");
  peers_.erase(peers_.begin());
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 1; }));
  EXPECT_EQ(server_.port.waiting_for_connections(), 1u);
  EXPECT_TRUE(server_owner_.events.empty()) << "its owner has not heard of it";
  listener_->has_room = true;
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  EXPECT_EQ(server_.port.handshakes(), 1u) << "the other one goes on";
}

TEST_F(HeldHandshakes, BytesThatComeMeanwhileAreNotRead) {
  listener_->has_room = false;
  held();
  say(peers_.back(), wire::encode(wire::Ready{kServerIncarnation}).bytes());
  steps();
  EXPECT_EQ(server_.port.waiting_for_connections(), 1u);
  const pollfd quiet{server_.port.descriptor(), POLLIN, 0};
  pollfd now = quiet;
  EXPECT_EQ(::poll(&now, 1, 0), 0) << "and keep nobody awake";
}

TEST_F(HeldHandshakes, ARequestIsAnInboundHandshakeUntilItIsDropped) {
  request("10.0.0.1:5");
  EXPECT_EQ(listener_->asked, std::vector<std::string>{"10.0.0.1:5"});
  ASSERT_TRUE(listener_->handshake);
  EXPECT_EQ(server_.port.handshakes(), 1u);
  server_.port.drop(listener_->handshake);
  EXPECT_EQ(server_.port.handshakes(), 0u);
  EXPECT_TRUE(server_owner_.events.empty());
}

TEST_F(HeldHandshakes, RequestsOfOneSourceAreLimitedAndTheOldestGivesWay) {
  for (int i = 0; i < 4; ++i) {
    request("10.0.0.1:5");
    server_.port.on_cm_answered(listener_->handshake);
    server_.pass_with_polls(1ms);
  }
  const HandshakeId last = listener_->handshake;
  request("10.0.0.1:6");
  server_.step();
  EXPECT_TRUE(server_owner_.events.empty()) << "none has had its time";
  EXPECT_EQ(listener_->handshake, last);
  server_.pass_with_polls(5ms);
  server_.step();
  EXPECT_EQ(server_owner_.events, std::vector<std::string>{"failed 77"});
  EXPECT_EQ(server_owner_.error.status, Status::limit);
  EXPECT_EQ(server_.port.handshakes(), 4u);
  EXPECT_NE(listener_->handshake, last);
}

TEST_F(HeldHandshakes, RequestsWithoutAHandshakeWaitInABacklog) {
  for (int i = 0; i < 4 + 512; ++i) request("10.0.0.1:5");  // none is answered
  EXPECT_EQ(server_.port.handshakes(), 4u);
  EXPECT_EQ(server_.port.refusals(), 0u);
  request("10.0.0.1:5");
  EXPECT_EQ(server_.port.refusals(), 1u) << "the backlog is full";
  listener_->asked.clear();
  server_.port.drop(listener_->handshake);
  server_.step();
  EXPECT_EQ(listener_->asked.size(), 1u);
  EXPECT_EQ(server_.port.handshakes(), 4u);
  server_.pass(600ms);
  server_.step();
  EXPECT_EQ(server_.port.refusals(), 1u + 511u) << "they have waited for too long";
}

TEST_F(HeldHandshakes, TheBacklogGoesOnWithTheSourceThatHasTheFewest) {
  for (int i = 0; i < 2; ++i) request("10.0.0.1:5");
  for (int i = 0; i < 2; ++i) request("10.0.0.2:5");
  const HandshakeId last = listener_->handshake;
  for (int i = 0; i < 3; ++i) request("10.0.0.1:6");
  request("10.0.0.2:6");
  server_.port.drop(last);  // of the second source
  listener_->asked.clear();
  server_.step();
  EXPECT_EQ(listener_->asked, std::vector<std::string>{"10.0.0.2:6"});
}

TEST_F(HeldHandshakes, ARequestOfAnotherSourceIsTakenAtOnce) {
  for (int i = 0; i < 4; ++i) request("10.0.0.1:5");  // all wait for our own verbs
  const HandshakeId before = listener_->handshake;
  request("10.0.0.2:5");
  EXPECT_NE(listener_->handshake, before);
  EXPECT_EQ(server_owner_.events, std::vector<std::string>{"failed 77"});
  EXPECT_EQ(server_.port.handshakes(), 4u);
  // Sources with as much as the newcomer would have keep what they have.
  request("10.0.0.2:6");
  request("10.0.0.2:7");
  EXPECT_EQ(server_owner_.events.size(), 2u);
  EXPECT_EQ(server_.port.refusals(), 2u);
}

TEST_F(HeldHandshakes, ARequestWithoutRoomIsHeldAndEndsAHalfOpenOne) {
  request("10.0.0.1:5");
  server_.port.on_cm_answered(listener_->handshake);
  listener_->handshake = {};
  listener_->has_room = false;
  request("10.0.0.2:5");
  EXPECT_FALSE(listener_->handshake);
  server_.pass_with_polls(100ms);
  server_.step();
  EXPECT_EQ(server_owner_.events, std::vector<std::string>{"failed 77"});
  listener_->has_room = true;
  server_.step();
  EXPECT_TRUE(listener_->handshake);
  listener_->has_room = false;
  request("10.0.0.3:5");
  server_.pass_with_polls(600ms);
  server_.step();
  EXPECT_EQ(server_.port.handshakes(), 1u);
}

TEST_F(HeldHandshakes, ARequestForAListenerThatIsGoneIsRefused) {
  server_.port.stop_listening(listening_);
  request("10.0.0.1:5");
  EXPECT_EQ(server_.port.handshakes(), 0u);
  EXPECT_EQ(server_.port.refusals(), 1u);
}

}  // namespace
}  // namespace control_port_test
