// Control ports with keys: what an attacker without a key, or between two ends that have it, can
// do.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "control/authentication_fixture.h"
#include "spinwire/log.h"

namespace authentication_test {
namespace {

TEST_F(Authentication, AConnectionIsMadeAndNothingOfItIsReadable) {
  use(kKey);
  Relay relay(server_address());
  connect_through(relay);
  EXPECT_TRUE(client_owner_.saw("confirmed 11"));
  EXPECT_TRUE(server_owner_.saw("confirmed 77"));
  EXPECT_EQ(listener_->client, endpoint(101, kClientIncarnation));
  EXPECT_EQ(client_owner_.peer, endpoint(202, kServerIncarnation));
  EXPECT_EQ(client_.port.authentication().authenticated, 1u);
  EXPECT_EQ(server_.port.authentication().authenticated, 1u);
  const std::vector<FrameKind> expected{FrameKind::authenticate, FrameKind::authenticated,
                                        FrameKind::sealed, FrameKind::sealed, FrameKind::sealed};
  std::vector<FrameKind> kinds;
  const auto gid = std::as_bytes(std::span(listener_->client.gid));
  for (const Passing& p : relay.passed()) {
    kinds.push_back(kind_of(p.frame));
    EXPECT_EQ(std::search(p.frame.begin(), p.frame.end(), gid.begin(), gid.end()), p.frame.end());
  }
  EXPECT_EQ(kinds, expected);
}

TEST_F(Authentication, EachHandshakeIsSealedByKeysOfItsOwn) {
  use(kKey);
  Relay first(server_address());
  connect_through(first);
  forget();
  Relay second(server_address());
  connect_through(second);
  ASSERT_EQ(first.passed().size(), second.passed().size());
  for (std::size_t i = 0; i < first.passed().size(); ++i)
    EXPECT_NE(first.passed()[i].frame, second.passed()[i].frame) << i;
}

TEST_F(Authentication, SessionsJoinsAndProbesAreAuthenticatedToo) {
  use(kKey);
  listener_->path_token = 4711;
  const auto opening = client_.port.open_session(
      server_address(), session_end(5, kClientIncarnation), client_owner_, 21);
  ASSERT_TRUE(opening);
  EXPECT_TRUE(until([&] { return server_owner_.saw("challenge 44"); }));
  client_.port.respond(*opening, server_owner_.challenge);
  EXPECT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
  EXPECT_TRUE(client_owner_.saw("opened 21"));
  EXPECT_TRUE(server_owner_.saw("validated 44"));

  const auto joining = client_.port.join_session(server_address(), client_owner_, {44, 99});
  ASSERT_TRUE(joining);
  client_.port.assign(*joining, 12);
  client_.port.ask(*joining, endpoint(102, kClientIncarnation));
  EXPECT_TRUE(until([&] { return listener_->joined.token == 99; }));
  client_.port.drop(*joining);

  ASSERT_TRUE(client_.port.probe(server_address(), kServerIncarnation, client_owner_, kNoLimit));
  ASSERT_TRUE(client_.port.probe(server_address(), 555, client_owner_, kNoLimit));
  EXPECT_TRUE(
      until([&] { return client_owner_.saw("alive 2") && client_owner_.saw("restarted 555"); }));
  EXPECT_EQ(server_.port.authentication().authenticated, 4u);
}

TEST_F(Authentication, ARefusalOfAnAuthenticatedPeerHasItsReason) {
  use(kKey);
  listener_->refusal = Status::limit;
  connect();
  EXPECT_TRUE(client_owner_.saw("refused 11"));
  EXPECT_EQ(client_owner_.error.status, Status::limit);
  EXPECT_NE(client_owner_.error.found.find("not today"), std::string::npos);
}

TEST_F(Authentication, AnotherKeyIsRefused) {
  use(kKey, line("2026", 'b'));
  connect();
  EXPECT_TRUE(client_owner_.saw("failed 11"));
  EXPECT_EQ(client_owner_.error.status, Status::unauthenticated);
  EXPECT_FALSE(server_owner_was_asked());
  EXPECT_EQ(failures(server_, AuthenticationFailure::unknown_key), 1u);
  EXPECT_EQ(failures(client_, AuthenticationFailure::unproven_server), 1u);
  EXPECT_EQ(server_.port.refusals(), 1u);
}

TEST_F(Authentication, AnotherNameOfTheKeyIsRefused) {
  use(kKey, line("2027", 'a'));
  connect();
  EXPECT_EQ(client_owner_.error.status, Status::unauthenticated);
  EXPECT_FALSE(server_owner_was_asked());
  EXPECT_EQ(failures(server_, AuthenticationFailure::wrong_proof), 1u);
}

TEST_F(Authentication, AClientWithoutAKeyIsRefused) {
  use("", kKey);
  connect();
  EXPECT_TRUE(client_owner_.saw("refused 11"));
  EXPECT_EQ(client_owner_.error.found, "authentication required");
  EXPECT_FALSE(server_owner_was_asked());
  EXPECT_EQ(failures(server_, AuthenticationFailure::no_proof), 1u);
}

TEST_F(Authentication, AServerWithoutAKeyIsRefused) {
  use(kKey, "");
  connect();
  EXPECT_TRUE(client_owner_.saw("failed 11"));
  EXPECT_EQ(client_owner_.error.status, Status::unauthenticated);
  EXPECT_NE(client_owner_.error.found.find("this end has none"), std::string::npos);
  EXPECT_FALSE(server_owner_was_asked());
  EXPECT_EQ(failures(client_, AuthenticationFailure::unproven_server), 1u);
}

TEST_F(Authentication, ProbesOfAServerThatProvesNothingFindNothing) {
  use(kKey, line("2026", 'b'));
  ASSERT_TRUE(client_.port.probe(server_address(), kServerIncarnation, client_owner_, kNoLimit));
  EXPECT_TRUE(until([&] { return client_owner_.saw("none 2"); }));
}

// The four states of two ends whose key is replaced.
TEST_F(Authentication, KeysAreReplacedOneEndAfterTheOther) {
  const std::string old = line("old", '1'), next = line("new", '2');
  for (const auto& [client, server] : std::vector<std::pair<std::string, std::string>>{
           {old, old + next}, {next + old, old + next}, {next, next + old}, {old, next + old}}) {
    use(client, server);
    Relay relay(server_address());
    connect_through(relay);
    EXPECT_TRUE(server_owner_.saw("confirmed 77")) << client << server;
    forget();
  }
  use(old, next);
  connect();
  EXPECT_EQ(client_owner_.error.status, Status::unauthenticated) << "the old key is gone";
}

// What a stranger gets: the same bytes for each frame, whatever it says.
TEST_F(Authentication, AStrangerGetsTheSameRefusalForEverything) {
  use("", kKey);
  const Bytes refusal =
      bytes_of(wire::encode(wire::make_refuse(Status::refused, "authentication required")));
  wire::Authenticate unknown, forged;
  forged.key = ring(kKey).first().id;
  wire::Capabilities newer{{1, 9}, 0xff}, other{{7, 9}, 0};
  const Endpoint e = endpoint(101, kClientIncarnation);
  std::vector<Bytes> said;
  for (const wire::Frame& frame :
       {wire::encode(wire::Hello{e}), wire::encode(wire::Accept{e}),
        wire::encode(wire::make_refuse(Status::limit, "no")),
        wire::encode(wire::Ready{kServerIncarnation}), wire::encode(wire::Ready{1}),
        wire::encode(wire::OpenSession{session_end(5, kClientIncarnation)}),
        wire::encode(wire::SessionOpened{session_end(5, kClientIncarnation)}),
        wire::encode(wire::JoinSession{e, 44, 99}), wire::encode(wire::PathResponse{4711}),
        wire::encode(unknown), wire::encode(forged), wire::encode(wire::Authenticated{}),
        wire::encode(wire::Hello{e}, newer), wire::encode(wire::Hello{e}, other)})
    said.push_back(bytes_of(frame));
  const wire::SealedFrame sealed = wire::begin_sealed(100);
  said.emplace_back(sealed.bytes().begin(), sealed.bytes().end());
  for (const Bytes& bytes : said) {
    const UniqueFd peer = plain_peer();
    say(peer, bytes);
    say(peer, bytes_of(wire::encode(wire::Hello{e})));  // and what it says after it
    Bytes got;
    EXPECT_TRUE(until([&] {
      std::array<std::byte, 512> part;
      const ssize_t size = ::recv(peer.get(), part.data(), part.size(), MSG_DONTWAIT);
      if (size > 0) got.insert(got.end(), part.begin(), part.begin() + size);
      return size == 0 || (size < 0 && errno != EAGAIN);
    }));
    EXPECT_EQ(got, refusal) << "after a frame of kind " << to_string(kind_of(bytes));
  }
  EXPECT_FALSE(server_owner_was_asked());
  EXPECT_EQ(server_.port.authentication().authenticated, 0u);
  EXPECT_EQ(failures(server_, AuthenticationFailure::unknown_key), 1u);
  EXPECT_EQ(failures(server_, AuthenticationFailure::wrong_proof), 1u);
  EXPECT_EQ(failures(server_, AuthenticationFailure::no_proof), said.size() - 2);
}

// The server draws random numbers for its part of a Diffie-Hellman operation, and for nothing else.
TEST_F(Authentication, AStrangerCostsNoDiffieHellmanOperation) {
  use("", kKey);
  spinwire::base::SeedSource source(7);
  for (const bool knows_the_key : {false, true}) {
    wire::Authenticate forged;
    if (knows_the_key) forged.key = ring(kKey).first().id;
    const UniqueFd peer = plain_peer();
    say(peer, bytes_of(wire::encode(forged)));
    EXPECT_TRUE(until([&] { return ended(peer); }));
  }
  EXPECT_EQ(source.next(), spinwire::base::Random(7).next());
}

TEST_F(Authentication, AReplayedHandshakeGetsNothing) {
  use(kKey);
  Relay relay(server_address());
  connect_through(relay);
  EXPECT_TRUE(server_owner_.saw("confirmed 77"));
  forget();
  const UniqueFd attacker = plain_peer();
  for (const Passing& p : relay.passed())
    if (p.from == From::client) say(attacker, p.frame);
  EXPECT_TRUE(
      until([&] { return failures(server_, AuthenticationFailure::unconfirmed_proof) == 1; }));
  EXPECT_FALSE(server_owner_was_asked());
  EXPECT_EQ(server_.port.handshakes(), 1u) << "the refusal lingers";
  EXPECT_EQ(server_.port.authentication().authenticated, 1u) << "that of the client";
}

// A peer that sends a recorded proof has not proved the key, whatever follows.
TEST_F(Authentication, AReplayedProofCountsAsNone) {
  use(kKey);
  Relay relay(server_address());
  connect_through(relay);
  const Bytes proof = relay.passed().at(0).frame;
  {
    const UniqueFd closes = plain_peer(), cuts = plain_peer(), stays = plain_peer();
    for (const UniqueFd* each : {&closes, &cuts, &stays}) say(*each, proof);
    say(cuts, std::span(proof).first(20));
    EXPECT_TRUE(until([&] {
      std::array<std::byte, 1> first;
      return ::recv(stays.get(), first.data(), 1, MSG_DONTWAIT | MSG_PEEK) == 1;
    }));
    ::shutdown(closes.get(), SHUT_WR);
    ::shutdown(cuts.get(), SHUT_WR);
    EXPECT_TRUE(
        until([&] { return failures(server_, AuthenticationFailure::unconfirmed_proof) == 2; }));
    server_.pass(1s);
    EXPECT_TRUE(
        until([&] { return failures(server_, AuthenticationFailure::unconfirmed_proof) == 3; }));
  }
  EXPECT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
  EXPECT_EQ(failures(server_, AuthenticationFailure::unconfirmed_proof), 3u);
  EXPECT_EQ(server_.port.authentication().authenticated, 1u);
}

TEST_F(Authentication, AClientIsNotLedToItsOwnListener) {
  use(kKey);
  const auto own = client_.port.listen(loopback::any_port(), listener_);
  ASSERT_TRUE(own);
  const auto own_address = *control::Address::parse(client_.port.address_of(*own));
  // The attacker's connection comes from another address.
  Relay relay(own_address);
  expect_failure_through(relay);
  EXPECT_EQ(client_owner_.error.status, Status::unauthenticated);
  EXPECT_FALSE(server_owner_was_asked());
  EXPECT_EQ(failures(client_, AuthenticationFailure::wrong_proof), 1u);
  EXPECT_EQ(client_.port.authentication().authenticated, 0u);
  forget();
  // An engine may connect to itself without one.
  (void)hello_to(own_address);
  EXPECT_TRUE(until([&] { return static_cast<bool>(listener_->offered); }));
  client_.port.close();
}

TEST_F(Authentication, APeerThatHasProvedTheKeyDoesNotGiveWayToStrangers) {
  use(kKey);
  const HandshakeId id = hello();
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->offered); }));
  server_.port.answer(listener_->offered, endpoint(202, kServerIncarnation));
  // From now on the client is silent. The strangers come from its own source.
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 3; ++i) strangers.push_back(plain_peer());
  const auto step = [&](auto&& done) {
    return loopback::eventually([&] {
      server_.step();
      return done();
    });
  };
  ASSERT_TRUE(step([&] { return server_.port.handshakes() == 4; }));
  for (std::uint64_t i = 1; i <= 8; ++i) {
    server_.pass_with_polls(20ms);
    strangers.push_back(plain_peer());
    ASSERT_TRUE(step([&] { return server_.port.refusals() == i; }));
    EXPECT_TRUE(server_owner_.events.empty()) << i;
  }
  EXPECT_TRUE(until([&] { return client_owner_.saw("accept 11"); }));
  client_.port.confirm(id, kServerIncarnation);
  EXPECT_TRUE(until([&] { return server_owner_.saw("confirmed 77"); }));
}

// Another holder of the key cannot prove it before it has a place.
TEST_F(Authentication, PeersThatHaveProvedTheKeyAndAreSilentDoNotKeepOthersOut) {
  use(kKey);
  for (int i = 0; i < 4; ++i) {
    listener_->offered = {};
    (void)hello();
    ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->offered); })) << i;
    server_.port.answer(listener_->offered, endpoint(202, kServerIncarnation));
  }
  listener_->offered = {};
  Port other(3);
  other.port.set_keys(ring(kKey));
  Owner owner;
  const auto id = other.port.connect(server_address(), owner);
  ASSERT_TRUE(id);
  other.port.assign(*id, 12);
  other.port.ask(*id, endpoint(101, 3));
  const auto step = [&](auto&& done) {
    return loopback::eventually([&] {
      other.step();
      server_.step();
      return done();
    });
  };
  ASSERT_TRUE(step([&] { return server_.port.awaits_unannounced(); }));
  EXPECT_TRUE(server_owner_.events.empty()) << "none has had its time";
  server_.pass_with_polls(20ms);
  EXPECT_TRUE(step([&] { return static_cast<bool>(listener_->offered); }));
  // One has made room. Those that are left keep their places.
  EXPECT_EQ(server_owner_.events, std::vector<std::string>{"failed 77"});
  other.port.close();
}

TEST_F(Authentication, WhatTheClientSaysDoesNotServeAsAnAnswer) {
  use(kKey);
  for (const bool as_answer : {false, true}) {
    Relay* self = nullptr;
    Relay relay(server_address(), [&](const Passing& p) -> std::vector<Bytes> {
      if (p.from == From::server) return {};
      Bytes back = p.frame;
      if (as_answer) back[8] = static_cast<std::byte>(FrameKind::authenticated);
      self->say(From::server, back);
      return {};
    });
    self = &relay;
    expect_failure_through(relay);
    EXPECT_FALSE(client_owner_.saw("accept 11"));
    EXPECT_EQ(relay.passed().size(), 1u) << "nothing but the proof was said";
    EXPECT_FALSE(server_owner_was_asked());
    forget();
    relay.cut();
    EXPECT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
  }
}

TEST_F(Authentication, SealedFramesAreNotAcceptedFromTheOtherDirection) {
  use(kKey);
  Relay* self = nullptr;
  Relay relay(server_address(), [&](const Passing& p) -> std::vector<Bytes> {
    if (p.from == From::server || p.number == 0) return {p.frame};
    self->say(From::server, p.frame);  // the hello goes back
    return {};
  });
  self = &relay;
  expect_failure_through(relay);
  EXPECT_EQ(client_owner_.error.status, Status::unauthenticated);
  EXPECT_EQ(failures(client_, AuthenticationFailure::altered_frame), 1u);
  EXPECT_FALSE(client_owner_.saw("accept 11"));
}

TEST_F(Authentication, ARepeatedFrameIsNotTheNextOne) {
  use(kKey);
  Relay relay(server_address(), [&](const Passing& p) -> std::vector<Bytes> {
    if (p.from == From::client && p.number == 1) return {p.frame, p.frame};
    return {p.frame};
  });
  connect_through(relay);
  EXPECT_FALSE(server_owner_.saw("confirmed 77"));
  EXPECT_EQ(failures(server_, AuthenticationFailure::altered_frame), 1u);
}

TEST_F(Authentication, FramesThatComeByteByByteAreRead) {
  use(kKey);
  Relay* self = nullptr;
  Relay relay(server_address(), [&](const Passing& p) -> std::vector<Bytes> {
    for (const std::byte b : p.frame) {
      self->say(p.from, std::span(&b, 1));
      server_.step();
      client_.step();
    }
    return {};
  });
  self = &relay;
  connect_through(relay);
  EXPECT_TRUE(server_owner_.saw("confirmed 77"));
}

// Any host on the way could send a refusal in the clear, so it has no status of its own.
TEST_F(Authentication, ARefusalInTheClearIsNoRefusalOfTheServers) {
  use(kKey);
  Relay relay(server_address(), [&](const Passing& p) -> std::vector<Bytes> {
    if (p.from == From::client) return {p.frame};
    return {bytes_of(wire::encode(wire::make_refuse(Status::protocol, "go away")))};
  });
  expect_failure_through(relay);
  EXPECT_EQ(client_owner_.error.status, Status::unauthenticated);
  EXPECT_NE(client_owner_.error.found.find("go away"), std::string::npos);
}

TEST_F(Authentication, FailuresAreLoggedOnceASecond) {
  use("", kKey);
  std::vector<std::string> said;
  spinwire::set_log(
      [&](spinwire::LogLevel level, std::string_view text) {
        if (level == spinwire::LogLevel::warning) said.emplace_back(text);
      },
      spinwire::LogLevel::info);
  const auto fail_once = [&] {
    const UniqueFd peer = plain_peer();
    say(peer, bytes_of(wire::encode(wire::Authenticate{})));
    EXPECT_TRUE(until([&] { return ended(peer); }));
  };
  for (int i = 0; i < 5; ++i) fail_once();
  EXPECT_EQ(said.size(), 1u);
  server_.pass(1s);
  fail_once();
  spinwire::set_log({});
  ASSERT_EQ(said.size(), 2u);
  EXPECT_NE(said[0].find("not in our key file"), std::string::npos) << said[0];
  EXPECT_NE(said[1].find("4 more"), std::string::npos) << said[1];
}

// A port scan, say.
TEST_F(Authentication, PeersThatSayNothingOfAProofAreCountedAndLoggedOnceASecond) {
  use("", kKey);
  std::vector<std::string> said;
  spinwire::set_log([&](spinwire::LogLevel, std::string_view text) { said.emplace_back(text); },
                    spinwire::LogLevel::info);
  const Bytes proof = bytes_of(wire::encode(wire::Authenticate{}));
  std::uint64_t count = 0;
  for (const std::size_t size : {0u, 3u, 20u}) {
    const UniqueFd closes = plain_peer();
    say(closes, std::span(proof).first(size));
    ::shutdown(closes.get(), SHUT_WR);
    ++count;
    EXPECT_TRUE(until([&] { return failures(server_, AuthenticationFailure::no_proof) == count; }));
    EXPECT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
  }
  const UniqueFd other = plain_peer();
  say(other, std::as_bytes(std::span("GET / HTTP/1.1")));
  ++count;
  EXPECT_TRUE(until([&] { return failures(server_, AuthenticationFailure::no_proof) == count; }));
  const UniqueFd silent = plain_peer();
  ++count;
  EXPECT_TRUE(until([&] { return server_.port.handshakes() == 1; }));
  server_.pass(600ms);
  EXPECT_TRUE(until([&] { return failures(server_, AuthenticationFailure::no_proof) == count; }));
  EXPECT_EQ(server_.port.handshakes(), 0u);
  spinwire::set_log({});
  EXPECT_EQ(said.size(), 1u) << testing::PrintToString(said);
  EXPECT_EQ(failures(server_, AuthenticationFailure::no_proof), count);
}

// There a loopback address stands for all devices.
TEST_F(Authentication, RdmaCmNeedsAKeyOrConsent) {
  for (const char* text : {"127.0.0.1:0", "[::1]:0"}) {
    const auto listening = client_.port.listen_cm(*control::Address::parse(text), listener_);
    ASSERT_FALSE(listening);
    EXPECT_EQ(listening.error().status, Status::unauthenticated) << listening.error().message();
  }
  EXPECT_EQ(client_.port.make_cm_id().error().status, Status::unauthenticated);
  EXPECT_EQ(client_.port.check_adapter("prepare", "").error().status, Status::unauthenticated);
  client_.port.set_keys(ring(kKey));
  EXPECT_TRUE(client_.port.check_cm());
  EXPECT_TRUE(client_.port.check_adapter("prepare", ""));
  Port open(3, 4, true);
  EXPECT_TRUE(open.port.check_cm());
  EXPECT_TRUE(open.port.check_adapter("prepare", ""));
}

TEST_F(Authentication, WithoutAKeyOtherHostsAreNotReached) {
  const auto any = *control::Address::parse("0.0.0.0:0");
  const auto host = *control::Address::parse("192.0.2.1:7");  // a documentation address
  const auto listening = client_.port.listen(any, listener_);
  ASSERT_FALSE(listening);
  EXPECT_EQ(listening.error().status, Status::unauthenticated);
  EXPECT_NE(listening.error().remedy.find("security.key_file"), std::string::npos);
  EXPECT_FALSE(client_.port.listen(*control::Address::parse("[::]:0"), listener_));
  EXPECT_EQ(client_.port.connect(host, client_owner_).error().status, Status::unauthenticated);
  EXPECT_EQ(client_.port.join_session(host, client_owner_, {1, 2}).error().status,
            Status::unauthenticated);
  EXPECT_EQ(client_.port.open_session(host, session_end(1, 2), client_owner_, 1).error().status,
            Status::unauthenticated);
  EXPECT_EQ(client_.port.probe(host, 5, client_owner_, kNoLimit).error().status,
            Status::unauthenticated);
  EXPECT_EQ(client_.port.handshakes(), 0u);
  client_.port.set_keys(ring(kKey));
  const auto keyed = client_.port.listen(any, listener_);
  ASSERT_TRUE(keyed);
  client_.port.stop_listening(*keyed);
}

}  // namespace
}  // namespace authentication_test
