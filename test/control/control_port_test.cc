// A control port alone, without an engine.
#include "control/control_port.h"

#include <poll.h>

#include <cstring>

#include "control/control_port_fixture.h"
#include "engine/zero_cost.h"

namespace control_port_test {
namespace {

TEST_F(ControlPortTest, AConnectionIsMadeAtBothEnds) {
  const HandshakeId id = hello();
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  EXPECT_EQ(listener_->client.qp_num, 101u);
  server_.port.answer(listener_->handshake, endpoint(202, kServerIncarnation));
  ASSERT_TRUE(until([&] { return client_owner_.saw("accept 11"); }));
  EXPECT_EQ(client_owner_.peer.qp_num, 202u);
  client_.port.confirm(id, kServerIncarnation);
  ASSERT_TRUE(until([&] { return server_owner_.saw("confirmed 77"); }));
  EXPECT_TRUE(client_owner_.saw("confirmed 11"));
  EXPECT_EQ(client_.port.handshakes() + server_.port.handshakes(), 0u);
  EXPECT_EQ(server_.port.refusals(), 0u);
}

TEST_F(ControlPortTest, AnsweringAndConfirmingTwiceDoesNothingMore) {
  const HandshakeId id = hello();
  client_.port.ask(id, endpoint(103, kClientIncarnation));
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  server_.port.answer(listener_->handshake, endpoint(202, kServerIncarnation));
  server_.port.answer(listener_->handshake, endpoint(203, kServerIncarnation));
  ASSERT_TRUE(until([&] { return client_owner_.saw("accept 11"); }));
  client_.port.confirm(id, kServerIncarnation);
  client_.port.confirm(id, kServerIncarnation);
  ASSERT_TRUE(until([&] { return server_owner_.saw("confirmed 77"); }));
  EXPECT_EQ(client_owner_.events, (std::vector<std::string>{"accept 11", "confirmed 11"}));
  client_.port.confirm(id, kServerIncarnation);  // the handshake is over
  client_.port.refuse(id, {Status::refused, "", "", ""});
  client_.port.drop(id);
}

TEST_F(ControlPortTest, AListenersRefusalReachesTheClient) {
  listener_->refusal = Status::limit;
  hello();
  ASSERT_TRUE(until([&] { return client_owner_.saw("refused 11"); }));
  EXPECT_EQ(client_owner_.error.status, Status::limit);
  EXPECT_NE(client_owner_.error.found.find("not today"), std::string::npos);
  EXPECT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
  EXPECT_EQ(server_.port.refusals(), 1u);
  EXPECT_TRUE(server_owner_.events.empty());
}

TEST_F(ControlPortTest, TheClientMayRefuseTheAnswer) {
  client_owner_.accepts = false;
  hello();
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  server_.port.answer(listener_->handshake, endpoint(202, kServerIncarnation));
  ASSERT_TRUE(until([&] { return server_owner_.saw("refused 77"); }));
  EXPECT_EQ(server_owner_.error.status, Status::unsupported);
  EXPECT_TRUE(until([&] { return client_.port.handshakes() == 0; }));
  EXPECT_EQ(client_owner_.events, std::vector<std::string>{"accept 11"});
}

TEST_F(ControlPortTest, AnOwnerThatRefusesHearsNoMore) {
  const HandshakeId id = hello();
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  client_.port.refuse(id, {Status::timed_out, "connect", "too slow", ""});
  ASSERT_TRUE(until([&] { return server_owner_.saw("refused 77"); }));
  EXPECT_TRUE(until([&] { return client_.port.handshakes() == 0; }));
  EXPECT_TRUE(client_owner_.events.empty());
  EXPECT_EQ(server_.port.handshakes(), 0u);
}

TEST_F(ControlPortTest, AConfirmationOfAnotherIncarnationIsRefused) {
  const HandshakeId id = hello();
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  server_.port.answer(listener_->handshake, endpoint(202, kServerIncarnation));
  ASSERT_TRUE(until([&] { return client_owner_.saw("accept 11"); }));
  client_.port.confirm(id, kServerIncarnation + 1);
  ASSERT_TRUE(until([&] { return server_owner_.saw("failed 77"); }));
  EXPECT_EQ(server_owner_.error.status, Status::protocol);
}

TEST_F(ControlPortTest, AConfirmationBeforeTheAnswerIsAnError) {
  const UniqueFd early = plain_peer();
  say(early, wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
  say(early, wire::encode(wire::Ready{kServerIncarnation}).bytes());
  ASSERT_TRUE(until([&] { return server_owner_.saw("failed 77"); }));
  EXPECT_EQ(server_owner_.error.status, Status::protocol);
  EXPECT_EQ(server_owner_.events.size(), 1u);
}

TEST_F(ControlPortTest, AnAcceptBeforeTheHelloIsAnError) {
  auto hasty = loopback::listener();
  const auto id = client_.port.connect(hasty.local(), client_owner_);
  ASSERT_TRUE(id);
  client_.port.assign(*id, 11);
  const auto accepted = loopback::accept_one(hasty);
  ASSERT_TRUE(accepted);
  say(accepted->fd, wire::encode(wire::Accept{endpoint(202, 9)}).bytes());
  ASSERT_TRUE(until([&] { return client_owner_.saw("failed 11"); }));
  EXPECT_EQ(client_owner_.error.status, Status::protocol);
  EXPECT_EQ(client_owner_.events.size(), 1u);
}

/// Each way to end a handshake inside of its owner's call, whatever the call answers.
TEST_F(ControlPortTest, AnOwnerMayEndAHandshakeInsideOfItsOwnCall) {
  const Error no{Status::refused, "listen", "not today", ""};
  for (const Status answer : {Status::ok, Status::limit}) {
    for (int way = 0; way < 3; ++way) {
      listener_->refusal = answer;
      HandshakeId other;
      listener_->inside = [&] {
        way == 1 ? server_.port.refuse(listener_->offered, no)
                 : server_.port.drop(listener_->offered);
        // Takes the record that has become free.
        if (way == 2) other = *server_.port.connect(server_address(), client_owner_);
      };
      const UniqueFd peer = plain_peer();
      say(peer, wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
      EXPECT_TRUE(until([&] { return ended(peer); })) << way;
      listener_->inside = nullptr;
      EXPECT_EQ(server_.port.outbound_room(), way == 2 ? 3u : 4u);
      server_.port.drop(other);
      server_.pass(600ms);
      EXPECT_TRUE(until([&] { return server_.port.handshakes() == 0; })) << way;
      EXPECT_TRUE(server_owner_.events.empty()) << way;
    }
  }
}

TEST_F(ControlPortTest, APeerThatClosesHalfWayFailsItsOwners) {
  const HandshakeId id = hello();
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  client_.port.drop(id);
  ASSERT_TRUE(until([&] { return server_owner_.saw("failed 77"); }));
  EXPECT_EQ(server_owner_.error.status, Status::peer_lost);
  EXPECT_EQ(server_.port.handshakes(), 0u);

  hello();
  listener_->handshake = {};
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  server_.port.drop(listener_->handshake);
  ASSERT_TRUE(until([&] { return client_owner_.saw("failed 11"); }));
  EXPECT_EQ(client_owner_.error.status, Status::peer_lost);
}

TEST_F(ControlPortTest, AStoppedListenerRefusesPeersThatHaveNotSpoken) {
  const auto id = client_.port.connect(server_address(), client_owner_);
  ASSERT_TRUE(id);
  client_.port.assign(*id, 11);
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 1; }));
  server_.port.stop_listening(listening_);
  EXPECT_EQ(server_.port.address_of(listening_), "");
  client_.port.ask(*id, endpoint(101, kClientIncarnation));
  ASSERT_TRUE(until([&] { return client_owner_.saw("refused 11"); }));
  EXPECT_EQ(client_owner_.error.status, Status::refused);
}

TEST_F(ControlPortTest, AListenerMayBeStoppedInsideOfItsOwner) {
  const std::weak_ptr<ListenerRecord> owner = listener_;
  listener_->inside = [this] { server_.port.stop_listening(listening_); };
  const HandshakeId id = hello();
  listener_.reset();  // now only the port's handshake uses it
  ASSERT_TRUE(until([&] { return owner.expired(); }));
  EXPECT_EQ(server_.port.handshakes(), 1u);  // it goes on
  client_.port.drop(id);
  ASSERT_TRUE(until([&] { return server_owner_.saw("failed 77"); }));
}

TEST_F(ControlPortTest, SilentAndHalfOpenPeersTimeOut) {
  const UniqueFd silent = plain_peer();
  const UniqueFd half = plain_peer();
  const wire::Frame frame = wire::encode(wire::Hello{endpoint(1, 9)});
  say(half, frame.bytes().first(wire::kHeaderBytes + 5));
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 2; }));
  server_.pass(400ms);
  server_.step();
  EXPECT_EQ(server_.port.handshakes(), 2u);
  server_.pass(200ms);
  server_.step();
  EXPECT_EQ(server_.port.handshakes(), 0u);
  EXPECT_EQ(server_.port.refusals(), 2u);
  EXPECT_TRUE(loopback::eventually([&] { return ended(silent) && ended(half); }));
}

TEST_F(ControlPortTest, MalformedFramesAreRefused) {
  const UniqueFd http = plain_peer();
  say(http, std::as_bytes(std::span(std::string_view("GET / HTTP/1.1\r\n\r\n"))));
  ASSERT_TRUE(until([&] { return server_.port.refusals() == 1; }));
  // A frame that may not come first.
  const UniqueFd misplaced = plain_peer();
  say(misplaced, wire::encode(wire::Accept{endpoint(1, 9)}).bytes());
  ASSERT_TRUE(until([&] { return server_.port.refusals() == 2; }));
  // An absurd value.
  const UniqueFd absurd = plain_peer();
  Endpoint bad = endpoint(1, 9);
  bad.mtu = 1;
  say(absurd, wire::encode(wire::Hello{bad}).bytes());
  ASSERT_TRUE(until([&] { return server_.port.refusals() == 3; }));
  EXPECT_FALSE(listener_->handshake);
  EXPECT_TRUE(until([&] { return ended(http) && ended(misplaced) && ended(absurd); }));
}

TEST_F(ControlPortTest, ARefusedPeerThatDoesNotCloseIsDropped) {
  listener_->refusal = Status::refused;
  const UniqueFd peer = plain_peer();
  say(peer, wire::encode(wire::Hello{endpoint(1, 9)}).bytes());
  ASSERT_TRUE(until([&] { return server_.port.refusals() == 1; }));
  EXPECT_EQ(server_.port.handshakes(), 1u);
  server_.pass(600ms);
  server_.step();
  EXPECT_EQ(server_.port.handshakes(), 0u);
  EXPECT_EQ(server_.port.refusals(), 1u);
}

TEST_F(ControlPortTest, OldSilentPeersGiveWayToNewOnes) {
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 4; ++i) silent.push_back(plain_peer());
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 4; }));
  hello();
  for (int i = 0; i < 20; ++i) {
    client_.step();
    server_.step();
  }
  EXPECT_FALSE(listener_->handshake);  // they are not old enough
  server_.pass_with_polls(100ms);
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  EXPECT_EQ(server_.port.handshakes(), 4u);
  EXPECT_EQ(server_.port.refusals(), 1u);
}

TEST_F(ControlPortTest, WithoutRoomANewcomerKeepsNobodyAwake) {
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 4; ++i) silent.push_back(plain_peer());
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 4; }));
  EXPECT_FALSE(server_.port.awaits_unannounced());
  const UniqueFd newcomer = plain_peer("127.0.0.2:0");
  const auto is_readable = [&] {
    pollfd set{server_.port.descriptor(), POLLIN, 0};
    return ::poll(&set, 1, 0) == 1;
  };
  ASSERT_TRUE(until([&] { return server_.port.awaits_unannounced(); }));
  EXPECT_FALSE(is_readable());
  // It comes when there is room, and so do others.
  server_.pass_with_polls(10ms);
  EXPECT_EQ(server_.port.refusals(), 1u);
  EXPECT_EQ(server_.port.handshakes(), 4u);
  EXPECT_FALSE(server_.port.awaits_unannounced());
  const UniqueFd another = plain_peer("127.0.0.3:0");
  EXPECT_TRUE(loopback::eventually(is_readable));
}

TEST_F(ControlPortTest, APauseOfThisProcessIsNoSilenceOfItsPeers) {
  std::vector<UniqueFd> peers;
  for (int i = 0; i < 4; ++i) peers.push_back(plain_peer());
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 4; }));
  const UniqueFd newcomer = plain_peer("127.0.0.2:0");
  server_.pass(100ms);
  for (int i = 0; i < 20; ++i) server_.step();
  EXPECT_EQ(server_.port.refusals(), 0u);
  for (const UniqueFd& peer : peers) EXPECT_FALSE(ended(peer));
  server_.pass_with_polls(10ms);
  EXPECT_EQ(server_.port.refusals(), 1u);
}

TEST_F(ControlPortTest, APeerThatIsSilentAfterItsHelloGivesWayToo) {
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 4; ++i) {
    silent.push_back(plain_peer());
    say(silent.back(), wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
    listener_->handshake = {};
    ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); })) << i;
    // The last one still waits for our answer, which is not the peer's fault.
    if (i < 3) server_.port.answer(listener_->handshake, endpoint(202, kServerIncarnation));
  }
  const HandshakeId unanswered = listener_->handshake;
  listener_->handshake = {};
  server_.pass_with_polls(100ms);
  hello();
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  EXPECT_EQ(server_owner_.events, std::vector<std::string>{"failed 77"});
  EXPECT_EQ(server_owner_.error.status, Status::limit);
  EXPECT_EQ(server_.port.handshakes(), 4u);
  for (int i = 0; i < 2; ++i) {
    server_.pass_with_polls(100ms);
    silent.push_back(plain_peer());
    ASSERT_TRUE(
        until([&] { return server_owner_.events.size() == static_cast<std::size_t>(i) + 2; }));
  }
  server_.port.answer(unanswered, endpoint(203, kServerIncarnation));
  EXPECT_TRUE(until([&] {
    std::array<std::byte, 1> first;
    return ::recv(silent[3].get(), first.data(), 1, MSG_DONTWAIT | MSG_PEEK) == 1;
  }));
}

TEST_F(ControlPortTest, ASourceThatHoldsMuchGivesWaySooner) {
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 4; ++i) silent.push_back(plain_peer());
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 4; }));
  server_.pass_with_polls(20ms);  // a shorter limit than for other sources
  hello();
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  EXPECT_EQ(server_.port.refusals(), 1u);
}

TEST_F(ControlPortTest, OfTwoSourcesTheOneThatHoldsMoreGivesWay) {
  const UniqueFd honest = plain_peer();  // silent for the longest time
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 1; }));
  server_.pass_with_polls(10ms);
  std::vector<UniqueFd> crowd;
  for (int i = 0; i < 3; ++i) crowd.push_back(plain_peer("127.0.0.2:0"));
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 4; }));
  server_.pass_with_polls(100ms);
  const UniqueFd newcomer = plain_peer("127.0.0.3:0");
  ASSERT_TRUE(until([&] { return server_.port.refusals() == 1; }));
  EXPECT_TRUE(
      loopback::eventually([&] { return ended(crowd[0]) || ended(crowd[1]) || ended(crowd[2]); }));
  EXPECT_FALSE(ended(honest));
  EXPECT_FALSE(ended(newcomer));
}

// A flood is never older than its time, since newcomers replace it.
TEST_F(ControlPortTest, ASlowClientStaysWhileAnotherSourceHoldsMuch) {
  const UniqueFd slow = plain_peer();
  say(slow, wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  server_.port.answer(listener_->handshake, endpoint(202, kServerIncarnation));
  std::vector<UniqueFd> flood;
  for (int i = 0; i < 3; ++i) flood.push_back(plain_peer("127.0.0.2:0"));
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 4; }));
  for (std::uint64_t i = 1; i <= 100; ++i) {
    flood.push_back(plain_peer("127.0.0.2:0"));
    // Each is let in as soon as one has had its time.
    for (int ms = 0; ms < 10 && server_.port.refusals() != i; ++ms) server_.pass_with_polls(1ms);
    ASSERT_TRUE(until([&] { return server_.port.refusals() == i; }));
  }
  EXPECT_TRUE(server_owner_.events.empty());
  EXPECT_FALSE(ended(slow));
}

TEST_F(ControlPortTest, OutboundHandshakesHaveALimitOfTheirOwn) {
  loopback::DeadPort nobody;
  auto silent = loopback::listener();
  std::vector<HandshakeId> ids;
  for (int i = 0; i < 4; ++i) {
    const auto id = client_.port.connect(silent.local(), client_owner_);
    ASSERT_TRUE(id);
    ids.push_back(*id);
  }
  EXPECT_EQ(client_.port.outbound_room(), 0u);
  const auto more = client_.port.connect(silent.local(), client_owner_);
  ASSERT_FALSE(more);
  EXPECT_EQ(more.error().status, Status::limit);
  for (const HandshakeId id : ids) client_.port.drop(id);
  EXPECT_EQ(client_.port.outbound_room(), 4u);
  const auto id = client_.port.connect(nobody.address(), client_owner_);
  ASSERT_TRUE(id);
  client_.port.assign(*id, 12);
  ASSERT_TRUE(until([&] { return client_owner_.saw("failed 12"); }));
  EXPECT_EQ(client_owner_.error.status, Status::refused);
}

TEST_F(ControlPortTest, ASessionIsOpenedAndConfirmed) {
  const auto id = client_.port.open_session(server_address(), session_end(3, kClientIncarnation),
                                            client_owner_, 3);
  ASSERT_TRUE(id);
  ASSERT_TRUE(until([&] { return client_owner_.saw("opened 3"); }));
  EXPECT_EQ(client_owner_.server.name, 44u);
  EXPECT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
  EXPECT_TRUE(server_owner_.events.empty());
  EXPECT_EQ(client_.port.handshakes(), 0u);
}

TEST_F(ControlPortTest, AnUnconfirmedSessionIsReported) {
  client_owner_.confirms_with = nullptr;
  ASSERT_TRUE(client_.port.open_session(server_address(), session_end(3, kClientIncarnation),
                                        client_owner_, 3));
  ASSERT_TRUE(until([&] { return server_owner_.saw("unconfirmed 44"); }));
  EXPECT_EQ(client_.port.handshakes(), 0u);
}

TEST_F(ControlPortTest, ARefusedSessionTellsWhy) {
  listener_->refusal = Status::unsupported;
  ASSERT_TRUE(client_.port.open_session(server_address(), session_end(3, kClientIncarnation),
                                        client_owner_, 3));
  ASSERT_TRUE(until([&] { return client_owner_.saw("open_refused 3"); }));
  EXPECT_EQ(client_owner_.error.status, Status::unsupported);
  EXPECT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
}

TEST_F(ControlPortTest, AHelloMayJoinASession) {
  const auto id = client_.port.join_session(server_address(), client_owner_, {44, 3});
  ASSERT_TRUE(id);
  client_.port.assign(*id, 11);
  client_.port.ask(*id, endpoint(101, kClientIncarnation));
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  EXPECT_EQ(listener_->joined.session, 44u);
  EXPECT_EQ(listener_->joined.token, 3u);
  EXPECT_EQ(listener_->joined.endpoint.qp_num, 101u);
  server_.port.answer(listener_->handshake, endpoint(202, kServerIncarnation));
  ASSERT_TRUE(until([&] { return client_owner_.saw("accept 11"); }));
}

TEST_F(ControlPortTest, ProbesTellWhatIsAtTheAddress) {
  ASSERT_TRUE(client_.port.probe(server_address(), kServerIncarnation, client_owner_, kNoLimit));
  ASSERT_TRUE(
      client_.port.probe(server_address(), kServerIncarnation + 5, client_owner_, kNoLimit));
  ASSERT_TRUE(until([&] { return client_.port.handshakes() + server_.port.handshakes() == 0; }));
  EXPECT_TRUE(client_owner_.saw("alive 2"));
  EXPECT_TRUE(client_owner_.saw("restarted 7"));
  // A hung process: its kernel accepts the connection.
  auto silent = loopback::listener();
  ASSERT_TRUE(client_.port.probe(silent.local(), 5, client_owner_, kNoLimit));
  client_.step();
  client_.pass(600ms);
  client_.step();
  EXPECT_EQ(client_.port.handshakes(), 0u);
  EXPECT_TRUE(client_owner_.saw("silent 5"));
  ASSERT_TRUE(client_.port.probe(silent.local(), 8, client_owner_, 20ms));
  client_.step();
  client_.pass(30ms);
  client_.step();
  EXPECT_TRUE(client_owner_.saw("silent 8"));
  const control::Address gone = silent.local();
  silent = {};
  ASSERT_TRUE(client_.port.probe(gone, 6, client_owner_, kNoLimit));
  EXPECT_TRUE(until([&] { return client_owner_.saw("no_listener 6"); }));
  EXPECT_EQ(client_owner_.events.size(), 5u);
}

// Another engine may accept at that socket: its sessions must not be given up, and their clients
// are asked to come here.
TEST_F(ControlPortTest, AListenerWhoseSocketIsSharedSaysSo) {
  ASSERT_TRUE(
      client_.port.probe(server_address(), kServerIncarnation + 5, client_owner_, kNoLimit));
  ASSERT_TRUE(until([&] { return client_owner_.saw("restarted 7"); }));
  ASSERT_TRUE(server_.port.descriptor_of(listening_));
  ASSERT_TRUE(
      client_.port.probe(server_address(), kServerIncarnation + 6, client_owner_, kNoLimit));
  ASSERT_TRUE(until([&] { return client_owner_.saw("handed_over 8"); }));
  ASSERT_TRUE(client_.port.probe(server_address(), kServerIncarnation, client_owner_, kNoLimit));
  ASSERT_TRUE(until([&] { return client_owner_.saw("alive 2"); }));

  for (const Status refusal : {Status::limit, Status::refused}) {
    listener_->refusal = refusal;
    const auto id = client_.port.join_session(server_address(), client_owner_, {44, 3});
    ASSERT_TRUE(id);
    client_.port.assign(*id, 11);
    Endpoint ours = endpoint(101, kClientIncarnation);
    ours.goodbye_reasons = true;
    client_.port.ask(*id, ours);
    client_owner_.events.clear();
    ASSERT_TRUE(until([&] { return client_owner_.saw("refused 11"); }));
    EXPECT_EQ(client_owner_.error.status, refusal);
    EXPECT_EQ(client_owner_.error.goodbye.invites_back(), refusal == Status::refused);
  }
}

TEST_F(ControlPortTest, DescriptorsOfOthersAreWatched) {
  struct Reader : control::DescriptorOwner {
    int fd = -1;
    int count = 0;
    void on_readable() override {
      std::array<char, 8> bytes;
      (void)!::read(fd, bytes.data(), bytes.size());
      ++count;
    }
  } reader;
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  const UniqueFd read_end(ends[0]), write_end(ends[1]);
  reader.fd = ends[0];
  ASSERT_TRUE(server_.port.watch(ends[0], reader));
  server_.step();
  EXPECT_EQ(reader.count, 0);
  ASSERT_EQ(::write(ends[1], "x", 1), 1);
  server_.step();
  EXPECT_EQ(reader.count, 1);
  server_.port.unwatch(ends[0]);
  ASSERT_EQ(::write(ends[1], "x", 1), 1);
  server_.step();
  EXPECT_EQ(reader.count, 1);
}

TEST_F(ControlPortTest, AnOwnerWhoseDescriptorCannotBeWatchedIsNotKept) {
#if SPINWIRE_TEST_COUNTS_HEAP
  struct Reader : control::DescriptorOwner {
    void on_readable() override {}
  } reader;
  const auto watch_in_vain = [&] {
    for (int i = 0; i < 1000; ++i) EXPECT_FALSE(server_.port.watch(-1, reader));
  };
  zero_cost_test::heap_bytes = 0;
  zero_cost_test::armed = true;
  watch_in_vain();
  zero_cost_test::armed = false;
  EXPECT_LT(zero_cost_test::heap_bytes, 1000);  // bytes for each are at least those of a pointer
#else
  GTEST_SKIP() << "a sanitizer has its own heap";
#endif
}

}  // namespace
}  // namespace control_port_test
