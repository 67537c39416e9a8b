// The control port's handling of frames whose addresses must be resolved first. The resolver here
// is a recorder; the one with rdma_cm is tested on Soft-RoCE.
#include "control/address_resolver.h"

#include <bit>
#include <new>

#include "control/control_port_fixture.h"

namespace control_port_test {
namespace {

using control::Gid;
using control::Resolution;

/// Answers when the test says so.
struct ResolverRecord : control::AddressResolver {
  std::vector<Resolution> begun;
  std::vector<Resolution> cancelled;
  Gid last{};
  int port = 0;         ///< of the last; 0: the engine's
  int known_from = -1;  ///< addresses are known there already
  bool knows = false;   ///< whether it has the address already
  bool has_route = true;
  bool has_memory = true;

  Result<bool> begin(const Resolution& what, const Gid& gid, GidType,
                     const verbs::Place* from) override {
    if (!has_memory) throw std::bad_alloc();
    port = from != nullptr ? from->port : 0;
    last = gid;
    if (!has_route) return tl::unexpected(unreachable());
    if (port == known_from) return true;
    if (!knows) begun.push_back(what);
    return knows;
  }
  void cancel(const Resolution& what) noexcept override { cancelled.push_back(what); }
  static Error unreachable() { return {Status::peer_lost, "reach", "nobody answers there", ""}; }
};

class AddressResolution : public ControlPortTest {
 protected:
  static ResolverRecord& record(ControlPort& port) {
    auto resolver = std::make_unique<ResolverRecord>();
    ResolverRecord& record = *resolver;
    port.set_resolver(std::move(resolver));
    return record;
  }
  void steps(int count = 20) {
    for (int i = 0; i < count; ++i) {
      client_.step();
      server_.step();
    }
  }
};

TEST_F(AddressResolution, AnOwnerSeesAHelloWhenItsAddressIsResolved) {
  ResolverRecord& resolver = record(server_.port);
  hello();
  ASSERT_TRUE(until([&] { return resolver.begun.size() == 1; }));
  EXPECT_EQ(resolver.last, endpoint(101, kClientIncarnation).gid);
  steps();
  EXPECT_FALSE(listener_->handshake);
  server_.port.on_resolved(resolver.begun[0], {});
  EXPECT_TRUE(listener_->handshake);
  EXPECT_EQ(listener_->client.qp_num, 101u);
  server_.port.answer(listener_->handshake, endpoint(202, kServerIncarnation));
  ASSERT_TRUE(until([&] { return client_owner_.saw("accept 11"); }));
  server_.port.on_resolved(resolver.begun[0], {});  // a second answer has no effect
  EXPECT_EQ(resolver.begun.size(), 1u);
}

verbs::Place place_on_port(std::uint8_t port) {
  verbs::Place place;
  place.port = port;
  return place;
}

TEST_F(AddressResolution, AnAddressIsSeenFromThePortThatTheConnectionUses) {
  ResolverRecord& servers = record(server_.port);
  ResolverRecord& clients = record(client_.port);
  listener_->place = place_on_port(2);
  client_owner_.place = place_on_port(3);
  hello();
  ASSERT_TRUE(until([&] { return servers.begun.size() == 1; }));
  EXPECT_EQ(servers.port, 2);
  server_.port.on_resolved(servers.begun[0], {});
  server_.port.answer(listener_->handshake, endpoint(202, kServerIncarnation));
  ASSERT_TRUE(until([&] { return clients.begun.size() == 1; }));
  EXPECT_EQ(clients.port, 3);
}

// Its connection, and its datagrams, use the engine's.
TEST_F(AddressResolution, ASessionsAddressIsSeenFromTheEnginesPort) {
  ResolverRecord& servers = record(server_.port);
  listener_->place = place_on_port(2);
  const auto joined = client_.port.join_session(server_address(), client_owner_, {1, 2});
  ASSERT_TRUE(joined);
  client_.port.assign(*joined, 12);
  client_.port.ask(*joined, endpoint(102, kClientIncarnation));
  ASSERT_TRUE(until([&] { return servers.begun.size() == 1; }));
  EXPECT_EQ(servers.port, 0);
  ASSERT_TRUE(client_.port.open_session(server_address(), session_end(5, 1), client_owner_, 13)
                  .has_value());
  ASSERT_TRUE(until([&] { return servers.begun.size() == 2; }));
  EXPECT_EQ(servers.port, 0);
}

/// Peers whose listener's owner chooses port 2 when it takes them.
class MovedPeers : public AddressResolution {
 protected:
  void move_to_port_2(std::vector<Result<bool>>& known) {
    listener_->inside = [this, &known] {
      const verbs::Place place = place_on_port(2);
      known.push_back(server_.port.resolve_again(listener_->offered, listener_->client, &place));
    };
  }
  /// The client's address is resolved at the listener's port, and is being resolved at the other.
  bool moves(ResolverRecord& servers, std::vector<Result<bool>>& known) {
    move_to_port_2(known);
    hello();
    if (!until([&] { return servers.begun.size() == 1; })) return false;
    server_.port.on_resolved(servers.begun[0], {});
    return servers.begun.size() == 2;
  }
  /// The same for strangers from this address.
  void strangers(int count, const char* from, ResolverRecord& servers) {
    for (int i = 0; i < count; ++i) {
      const std::size_t before = servers.begun.size();
      strangers_.push_back(plain_peer(from));
      say(strangers_.back(), wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
      ASSERT_TRUE(until([&] { return servers.begun.size() == before + 1; }));
      server_.port.on_resolved(servers.begun.back(), {});
      ASSERT_EQ(servers.begun.size(), before + 2);
    }
  }
  std::vector<UniqueFd> strangers_;
};

TEST_F(MovedPeers, AnOwnerThatChoosesAnotherPortHasTheAddressResolvedAgain) {
  ResolverRecord& servers = record(server_.port);
  std::vector<Result<bool>> known;
  ASSERT_TRUE(moves(servers, known));
  EXPECT_EQ(servers.port, 2);
  ASSERT_TRUE(known[0]);
  EXPECT_FALSE(*known[0]);
  EXPECT_FALSE(server_owner_.saw("resolved 77"));
  server_.port.on_resolved(servers.begun[1], {});
  EXPECT_TRUE(server_owner_.saw("resolved 77"));
  server_.port.answer(listener_->handshake, endpoint(202, kServerIncarnation));
  EXPECT_TRUE(until([&] { return client_owner_.saw("accept 11"); }));
}

TEST_F(MovedPeers, AnOwnerHearsThatAPeerIsOutOfReachOfTheOtherPort) {
  ResolverRecord& servers = record(server_.port);
  std::vector<Result<bool>> known;
  ASSERT_TRUE(moves(servers, known));
  server_.port.on_resolved(servers.begun.back(), tl::unexpected(ResolverRecord::unreachable()));
  EXPECT_TRUE(server_owner_.saw("not resolved 77"));
  server_.port.drop(listener_->handshake);
}

// Nobody may answer there, though somebody does at the listener's port.
TEST_F(MovedPeers, GiveWayToNewPeers) {
  ResolverRecord& servers = record(server_.port);
  std::vector<Result<bool>> known;
  move_to_port_2(known);
  strangers(4, nullptr, servers);
  server_.pass_with_polls(100ms);
  listener_->inside = nullptr;
  servers.knows = true;
  hello();
  ASSERT_TRUE(until([&] { return listener_->client.incarnation == kClientIncarnation; }));
  EXPECT_EQ(servers.cancelled.size(), 1u);
  EXPECT_TRUE(server_owner_.saw("failed 77"));
}

// A newcomer whose source has its share of connections.
TEST_F(MovedPeers, GiveWayToANewcomerOfTheirSource) {
  ResolverRecord& servers = record(server_.port);
  std::vector<Result<bool>> known;
  move_to_port_2(known);
  strangers(2, nullptr, servers);
  server_.pass_with_polls(100ms);
  listener_->inside = nullptr;
  servers.knows = true;
  listener_->has_room = false;
  listener_->needs_own_source = "127.0.0.1";
  listener_->asked.clear();
  hello();
  ASSERT_TRUE(until([&] { return !listener_->asked.empty(); }));
  server_.pass_with_polls(100ms);
  EXPECT_TRUE(until([&] { return server_owner_.saw("failed 77"); }));
  EXPECT_GE(servers.cancelled.size(), 1u) << "its address is not resolved any further";
}

TEST_F(AddressResolution, APeerWhoseAddressIsNotResolvedInTimeIsToldSo) {
  ResolverRecord& resolver = record(server_.port);
  hello();
  ASSERT_TRUE(until([&] { return resolver.begun.size() == 1; }));
  server_.pass(600ms);
  ASSERT_TRUE(until([&] { return client_owner_.saw("refused 11"); }));
  EXPECT_NE(client_owner_.error.found.find("nobody has answered there"), std::string::npos)
      << client_owner_.error.found;
  EXPECT_EQ(resolver.cancelled.size(), 1u);
}

TEST_F(AddressResolution, AnUnreachableAddressIsRefusedAndTheOwnerHearsNothing) {
  ResolverRecord& resolver = record(server_.port);
  hello();
  ASSERT_TRUE(until([&] { return resolver.begun.size() == 1; }));
  server_.port.on_resolved(resolver.begun[0], tl::unexpected(ResolverRecord::unreachable()));
  ASSERT_TRUE(until([&] { return client_owner_.saw("refused 11"); }));
  EXPECT_NE(client_owner_.error.found.find("nobody answers there"), std::string::npos);
  EXPECT_FALSE(listener_->handshake);
  EXPECT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
}

TEST_F(AddressResolution, AnAddressWithoutARouteIsRefusedAtOnce) {
  record(server_.port).has_route = false;
  hello();
  ASSERT_TRUE(until([&] { return client_owner_.saw("refused 11"); }));
  EXPECT_FALSE(listener_->handshake);
}

TEST_F(AddressResolution, ASessionWaitsAtBothEnds) {
  ResolverRecord& servers = record(server_.port);
  ResolverRecord& clients = record(client_.port);
  ASSERT_TRUE(client_.port.open_session(server_address(), session_end(5, 1), client_owner_, 12)
                  .has_value());
  ASSERT_TRUE(until([&] { return servers.begun.size() == 1; }));
  server_.port.on_resolved(servers.begun[0], {});
  ASSERT_TRUE(until([&] { return clients.begun.size() == 1; }));
  EXPECT_FALSE(client_owner_.saw("opened 12"));
  client_.port.on_resolved(clients.begun[0], {});
  EXPECT_TRUE(client_owner_.saw("opened 12"));
  EXPECT_TRUE(until([&] { return server_.port.handshakes() + client_.port.handshakes() == 0; }));
}

TEST_F(AddressResolution, AClientHearsThatItsServerIsUnreachable) {
  ResolverRecord& resolver = record(client_.port);
  ASSERT_TRUE(client_.port.open_session(server_address(), session_end(5, 1), client_owner_, 12)
                  .has_value());
  hello();
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  server_.port.answer(listener_->handshake, endpoint(202, kServerIncarnation));
  ASSERT_TRUE(until([&] { return resolver.begun.size() == 2; }));
  for (const Resolution& each : std::vector(resolver.begun))
    client_.port.on_resolved(each, tl::unexpected(ResolverRecord::unreachable()));
  EXPECT_TRUE(client_owner_.saw("open_failed 12"));
  EXPECT_TRUE(client_owner_.saw("failed 11"));
  EXPECT_FALSE(client_owner_.saw("accept 11"));
  EXPECT_EQ(client_owner_.error.status, Status::peer_lost);
}

/// A request through rdma_cm, of a peer that names an address.
std::unique_ptr<control::CmRequest> cm_request(ListenerId listener, const Gid& gid) {
  auto made = std::make_unique<control::CmRequest>();
  made->peer = *control::Address::parse("127.0.0.2:5");
  made->listener = listener;
  made->gid = gid;
  return made;
}

TEST_F(AddressResolution, ARequestThroughRdmaCmWaitsForItsAddress) {
  ResolverRecord& resolver = record(server_.port);
  server_.port.take_request(cm_request(listening_, Gid{7}));
  ASSERT_EQ(resolver.begun.size(), 1u);
  EXPECT_EQ(resolver.last, Gid{7});
  steps();
  EXPECT_FALSE(listener_->handshake);
  server_.port.on_resolved(resolver.begun[0], {});
  EXPECT_TRUE(listener_->handshake);
}

TEST_F(AddressResolution, ARequestThroughRdmaCmThatNobodyAnswersIsRefused) {
  ResolverRecord& resolver = record(server_.port);
  server_.port.take_request(cm_request(listening_, Gid{7}));
  ASSERT_EQ(resolver.begun.size(), 1u);
  server_.port.on_resolved(resolver.begun[0], tl::unexpected(ResolverRecord::unreachable()));
  server_.port.take_request(cm_request(listening_, Gid{8}));  // nobody answers in time
  server_.pass(600ms);
  server_.step();
  EXPECT_EQ(server_.port.refusals(), 2u);
  EXPECT_EQ(resolver.cancelled.size(), 1u);
  resolver.has_route = false;
  server_.port.take_request(cm_request(listening_, Gid{9}));
  EXPECT_EQ(server_.port.refusals(), 3u);
  EXPECT_FALSE(listener_->handshake);
  EXPECT_EQ(server_.port.handshakes(), 0u);
}

TEST_F(AddressResolution, WhoHasNoDatagramsHasNoAddressToResolve) {
  ResolverRecord& resolver = record(server_.port);
  wire::SessionEnd end = session_end(5, 1);
  end.qp_num = 0;
  ASSERT_TRUE(client_.port.open_session(server_address(), end, client_owner_, 12).has_value());
  ASSERT_TRUE(until([&] { return client_owner_.saw("opened 12"); }));
  EXPECT_TRUE(resolver.begun.empty());
}

TEST_F(AddressResolution, AHandshakeThatEndsMeanwhileIsCancelled) {
  ResolverRecord& resolver = record(server_.port);
  hello();
  ASSERT_TRUE(until([&] { return resolver.begun.size() == 1; }));
  server_.pass(600ms);  // the handshake timeout without an owner
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
  ASSERT_EQ(resolver.cancelled.size(), 1u);
  EXPECT_EQ(resolver.cancelled[0].handshake, resolver.begun[0].handshake);
  server_.port.on_resolved(resolver.begun[0], {});
  EXPECT_FALSE(listener_->handshake);
}

TEST_F(AddressResolution, ThosePendingGiveWayToNewPeers) {
  ResolverRecord& resolver = record(server_.port);
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 4; ++i) {
    strangers.push_back(plain_peer());
    say(strangers.back(), wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
  }
  ASSERT_TRUE(until([&] { return resolver.begun.size() == 4; }));
  resolver.knows = true;  // for the next address
  server_.pass_with_polls(100ms);
  hello();
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  EXPECT_EQ(resolver.cancelled.size(), 1u);
}

/// A port with room for many peers, each of which names an address that has to be resolved.
class ManyAddresses : public AddressResolution {
 protected:
  static constexpr auto kOfSource = control::ResolutionLimits::kOfSource;
  static constexpr auto kOfAll = control::ResolutionLimits::kOfAll;

  ManyAddresses() : resolver_(record(wide_.port)) {
    const auto id = wide_.port.listen(loopback::any_port(), listener_);
    EXPECT_TRUE(id);
    address_ = *control::Address::parse(wide_.port.address_of(*id));
  }
  ~ManyAddresses() override { wide_.port.close(); }
  void peers(std::uint32_t count, const char* source) {
    for (std::uint32_t i = 0; i < count; ++i) {
      peers_.push_back(loopback::plain_client(address_, source));
      say(peers_.back(), wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
    }
    ASSERT_TRUE(loopback::eventually([&] {
      wide_.step();
      return wide_.port.handshakes() == peers_.size();
    }));
    for (int i = 0; i < 20; ++i) wide_.step();
  }
  /// Ends what has begun and is not over, and lets others begin.
  void end(const Result<void>& outcome, bool is_answered = true) {
    for (const std::size_t all = resolver_.begun.size(); over_ < all; ++over_)
      wide_.port.on_resolved(resolver_.begun[over_], outcome, is_answered);
    for (int i = 0; i < 20; ++i) wide_.step();
  }
  void fail() { end(tl::unexpected(ResolverRecord::unreachable())); }

  Port wide_{3, 256};
  ResolverRecord& resolver_;
  control::Address address_;
  std::vector<UniqueFd> peers_;
  std::size_t over_ = 0;
};

TEST_F(ManyAddresses, OneSourceHasOnlySoManyResolvedAtOnce) {
  peers(kOfSource.at_once + 4, "127.0.0.2:0");
  EXPECT_EQ(resolver_.begun.size(), kOfSource.at_once);
  peers(1, "127.0.0.3:0");
  EXPECT_EQ(resolver_.begun.size(), kOfSource.at_once + 1) << "another source is not concerned";
  end({});
  EXPECT_EQ(resolver_.begun.size(), kOfSource.at_once + 5);
  EXPECT_EQ(wide_.port.refusals(), 0u);
}

TEST_F(ManyAddresses, OneThatHasAnsweredIsNotLimited) {
  const auto name = [&](std::uint8_t last) {
    Endpoint e = endpoint(101, 9);
    e.gid[15] = last;
    peers_.push_back(loopback::plain_client(address_, "127.0.0.2:0"));
    say(peers_.back(), wire::encode(wire::Hello{e}).bytes());
    const std::size_t before = resolver_.begun.size();
    for (int i = 0; i < 2000 && resolver_.begun.size() == before; ++i) wide_.step();
    return resolver_.begun.size() != before;
  };
  ASSERT_TRUE(name(200));
  end({});
  for (std::uint8_t i = 0; i < kOfSource.at_once; ++i) ASSERT_TRUE(name(i));
  EXPECT_FALSE(name(100)) << "the source has its share";
  EXPECT_TRUE(name(200));
  wide_.port.on_resolved(resolver_.begun.back(), tl::unexpected(ResolverRecord::unreachable()));
  EXPECT_FALSE(name(200)) << "it answers no more";
}

// It is another neighbour there, and may not answer.
TEST_F(ManyAddresses, OneThatHasAnsweredIsLimitedAtAnotherPort) {
  peers(1, "127.0.0.2:0");
  end({});
  listener_->place = place_on_port(2);
  peers(kOfSource.at_once + 4, "127.0.0.2:0");
  EXPECT_EQ(resolver_.begun.size(), 1 + kOfSource.at_once);
  fail();
  listener_->place.reset();
  const std::size_t before = resolver_.begun.size();
  peers(kOfSource.at_once + 4, "127.0.0.3:0");
  EXPECT_EQ(resolver_.begun.size(), before + kOfSource.at_once + 4) << "it has answered here";
}

TEST_F(ManyAddresses, TheListenersOwnIsNotLimited) {
  verbs::Place place = place_on_port(2);
  place.gid = std::bit_cast<ibv_gid>(endpoint(101, 9).gid);
  listener_->place = place;
  peers(kOfSource.at_once + 4, "127.0.0.2:0");
  EXPECT_EQ(resolver_.begun.size(), kOfSource.at_once + 4);
}

TEST_F(ManyAddresses, ThoseOfAnotherPortThatTheOwnerChoosesAreLimited) {
  std::vector<Result<bool>> known;
  const verbs::Place place = place_on_port(2);
  peers(1, "127.0.0.2:0");
  end({});
  listener_->inside = [&] {
    known.push_back(wide_.port.resolve_again(listener_->offered, listener_->client, &place));
  };
  resolver_.known_from = 0;
  peers(kOfSource.at_once + 1, "127.0.0.2:0");
  ASSERT_EQ(known.size(), kOfSource.at_once + 1);
  ASSERT_FALSE(known.back());
  EXPECT_EQ(known.back().error().status, Status::limit) << known.back().error().message();
  listener_->inside = nullptr;
}

TEST(AnsweredAddresses, OneSourceReplacesItsOwn) {
  control::AnsweredAddresses all;
  const auto gid = [](std::uint8_t n) { return Gid{n}; };
  all.add({1}, gid(1));
  for (std::uint8_t i = 10; i < 10 + 2 * control::AnsweredAddresses::kOfSource; ++i)
    all.add({2}, gid(i));
  EXPECT_TRUE(all.contains(gid(1)));
  EXPECT_FALSE(all.contains(gid(10)));
  EXPECT_TRUE(all.contains(gid(9 + 2 * control::AnsweredAddresses::kOfSource)));
  all.remove(gid(1));
  EXPECT_FALSE(all.contains(gid(1)));
}

TEST_F(ManyAddresses, UnansweredOnesAreLimitedPerTime) {
  peers(3 * kOfSource.burst, "127.0.0.2:0");
  for (int i = 0; i < 8; ++i) fail();
  EXPECT_EQ(resolver_.begun.size(), kOfSource.burst);
  peers(2, "127.0.0.3:0");
  EXPECT_EQ(resolver_.begun.size(), kOfSource.burst + 2) << "another source is not concerned";
  wide_.pass(kOfSource.interval);
  for (int i = 0; i < 20; ++i) wide_.step();
  EXPECT_EQ(resolver_.begun.size(), kOfSource.burst + 3);
}

TEST_F(ManyAddresses, AnsweredOnesAreNotLimitedPerTime) {
  peers(3 * kOfSource.burst, "127.0.0.2:0");
  for (int i = 0; i < 16; ++i) end({});
  EXPECT_EQ(resolver_.begun.size(), 3 * kOfSource.burst);
}

TEST_F(ManyAddresses, ThoseThatCouldNotBeAskedCountAsUnanswered) {
  peers(3 * kOfSource.burst, "127.0.0.2:0");
  for (int i = 0; i < 16; ++i) end({}, false);
  EXPECT_EQ(resolver_.begun.size(), kOfSource.burst);
  EXPECT_TRUE(listener_->handshake) << "the owner tries the verb";
}

TEST_F(ManyAddresses, ThoseThatEndMeanwhileCountAsUnanswered) {
  for (int round = 0; round < 4; ++round) {
    peers(kOfSource.at_once, "127.0.0.2:0");
    wide_.pass(20ms);
    for (UniqueFd& peer : peers_) peer.reset();
    peers_.clear();
    wide_.pass(480ms);  // their time-out
    ASSERT_TRUE(loopback::eventually([&] {
      wide_.step();
      return wide_.port.handshakes() == 0;
    }));
  }
  EXPECT_EQ(resolver_.cancelled.size(), resolver_.begun.size());
  // The burst, and one for each half second.
  EXPECT_LE(resolver_.begun.size(), kOfSource.burst + 4);
}

TEST_F(ManyAddresses, AllSourcesTogetherAreLimited) {
  const auto source = [](std::uint32_t i) { return "127.0.1." + std::to_string(i + 1) + ":0"; };
  std::uint32_t sources = 0;
  while (sources < 12) peers(kOfSource.at_once, source(sources++).c_str());
  // They leave some for sources that have none unanswered.
  EXPECT_GE(resolver_.begun.size(), kOfAll.at_once * 3 / 4);
  EXPECT_LE(resolver_.begun.size(), kOfAll.at_once * 3 / 4 + sources);
  while (resolver_.begun.size() < kOfAll.at_once) {
    const std::size_t before = resolver_.begun.size();
    peers(1, source(sources++).c_str());
    ASSERT_EQ(resolver_.begun.size(), before + 1);
  }
  peers(1, source(sources).c_str());
  EXPECT_EQ(resolver_.begun.size(), kOfAll.at_once);
  fail();
  EXPECT_EQ(resolver_.begun.size(), kOfAll.burst);
  // A peer that names the address it comes from needs no permission.
  Endpoint near = endpoint(102, 9);
  near.gid = control::Address::parse("127.0.0.9:0")->as_v6();
  const UniqueFd peer = loopback::plain_client(address_, "127.0.0.9:0");
  say(peer, wire::encode(wire::Hello{near}).bytes());
  ASSERT_TRUE(loopback::eventually([&] {
    wide_.step();
    return resolver_.begun.size() == kOfAll.burst + 1;
  }));
  EXPECT_EQ(resolver_.last, near.gid);
}

TEST_F(ManyAddresses, ThoseThatMemoryIsMissingForLeaveRoomForOthers) {
  resolver_.has_memory = false;
  const auto hello_from = [&](const std::string& source) {
    peers_.push_back(loopback::plain_client(address_, (source + ":0").c_str()));
    say(peers_.back(), wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
  };
  const auto steps_until = [&](auto&& done) {
    return loopback::eventually([&] {
      wide_.step();
      return done();
    });
  };
  constexpr std::uint32_t kSources = kOfAll.at_once / kOfSource.at_once;
  for (std::uint32_t i = 0; i < kOfAll.at_once; ++i)
    hello_from("127.0.1." + std::to_string(i % kSources + 1));
  ASSERT_TRUE(steps_until([&] { return wide_.port.refusals() == kOfAll.at_once; }))
      << "each is told at once";
  peers_.clear();
  ASSERT_TRUE(steps_until([&] { return wide_.port.handshakes() == 0; }));
  EXPECT_TRUE(resolver_.begun.empty());
  resolver_.has_memory = true;
  hello_from("127.0.1.1");
  ASSERT_TRUE(steps_until([&] { return resolver_.begun.size() == 1; })) << "of such a source";
  hello_from("127.0.2.1");
  ASSERT_TRUE(steps_until([&] { return resolver_.begun.size() == 2; })) << "of another source";
  end({});
  EXPECT_EQ(wide_.port.refusals(), kOfAll.at_once);
}

TEST_F(ManyAddresses, ARequestThatWaitsForTooLongIsRefused) {
  peers(kOfSource.at_once + 1, "127.0.0.2:0");
  wide_.pass(600ms);
  wide_.step();
  EXPECT_EQ(wide_.port.refusals(), kOfSource.at_once + 1);
  std::array<std::byte, 1> first;
  EXPECT_TRUE(loopback::eventually([&] {
    wide_.step();
    return ::recv(peers_.back().get(), first.data(), 1, MSG_DONTWAIT | MSG_PEEK) == 1;
  })) << "the last one is told why";
}

// Hellos and requests for sessions, each with an address of its own that nobody answers for, arrive
// at once. On a real device a poll that resolved one would sleep; here the test counts what a poll
// has the resolver do, which a busy machine does not change.
TEST_F(ManyAddresses, APollBeginsAndEndsFewWhateverStrangersName) {
  constexpr std::uint32_t kSources = 24, kAtOnce = 96, kWaves = 5;
  constexpr std::size_t kMostPerPoll = 2 * ControlPort::kFramesPerPoll;  // one may end another
  std::uint32_t named = 0;
  const auto name_one = [&](const UniqueFd& peer) {
    Endpoint e = endpoint(101, 9);
    wire::SessionEnd end = session_end(5, 1);
    e.gid[14] = end.gid[14] = static_cast<std::uint8_t>(named >> 8);
    e.gid[15] = end.gid[15] = static_cast<std::uint8_t>(named);
    const bool is_hello = named++ % 2 == 0;
    say(peer, is_hello ? wire::encode(wire::Hello{e}).bytes()
                       : wire::encode(wire::OpenSession{end}).bytes());
  };
  std::size_t most = 0;
  std::uint32_t polls = 0;
  for (std::uint32_t wave = 0; wave < kWaves; ++wave) {
    peers_.clear();
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      const std::string source = "127.0.0." + std::to_string(2 + i % kSources) + ":0";
      peers_.push_back(loopback::plain_client(address_, source.c_str()));
    }
    for (int i = 0; i < 100; ++i) wide_.step();  // all are accepted, and the last wave has left
    for (const UniqueFd& peer : peers_) name_one(peer);
    for (int i = 0; i < 20; ++i, ++polls) {
      const std::size_t before = resolver_.begun.size() + resolver_.cancelled.size();
      wide_.port.poll();
      most = std::max(most, resolver_.begun.size() + resolver_.cancelled.size() - before);
      wide_.pass(1ms);
    }
  }
  std::printf("a poll has begun and ended up to %zu\n", most);
  std::fflush(stdout);
  EXPECT_LE(most, kMostPerPoll);
  // What is begun is limited, however many are named.
  EXPECT_GE(resolver_.begun.size(), kOfAll.at_once * 3 / 4) << "no attack";
  const auto intervals = static_cast<std::size_t>(polls * 1ms / kOfAll.interval);
  EXPECT_LE(resolver_.begun.size(), kOfAll.burst + intervals + 1);
  EXPECT_FALSE(listener_->handshake) << "an owner has seen an address that nobody answers for";
}

TEST_F(AddressResolution, APeerThatClosesMeanwhileLeavesItsPlace) {
  ResolverRecord& resolver = record(server_.port);
  {
    const UniqueFd peer = plain_peer();
    say(peer, wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
    ASSERT_TRUE(until([&] { return resolver.begun.size() == 1; }));
  }
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
  server_.port.on_resolved(resolver.begun[0], {});  // of an answer that was on its way
  steps();
  EXPECT_TRUE(server_owner_.events.empty());
}

}  // namespace
}  // namespace control_port_test
