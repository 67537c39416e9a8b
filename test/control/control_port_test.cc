// A control port alone, without an engine: its owners are recorders, its peers plain sockets or
// another port.
#include "control/control_port.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "control/loopback.h"

namespace control_port_test {
namespace {

namespace control = spinwire::control;
namespace wire = spinwire::wire;
using namespace std::chrono_literals;
using control::ControlPort;
using control::HandshakeId;
using control::ListenerId;
using spinwire::Endpoint;
using spinwire::Error;
using spinwire::GidType;
using spinwire::Nanoseconds;
using spinwire::Result;
using spinwire::Status;
using spinwire::base::UniqueFd;

Endpoint endpoint(std::uint32_t qp_num, std::uint64_t incarnation) {
  Endpoint e;
  e.gid.fill(0xfe);
  e.gid_type = GidType::embedded;
  e.qp_num = qp_num;
  e.mtu = 4096;
  e.max_message = e.eager_bytes = 4096;
  e.credits = 1;
  e.incarnation = incarnation;
  e.control_address = 4096;
  e.control_rkey = 9;
  e.control_token = 0x51de;
  e.peer_timeout_ms = 10000;
  e.max_rd_atomic = 1;
  return e;
}

wire::SessionEnd session_end(std::uint32_t name, std::uint64_t incarnation) {
  wire::SessionEnd end;
  end.gid.fill(0xfe);
  end.gid_type = GidType::embedded;
  end.qp_num = 5;
  end.qkey = 7;
  end.name = name;
  end.window = 8;
  end.mtu = 4096;
  end.incarnation = incarnation;
  return end;
}

/// Records what a port reports, in order, as "event subject".
struct Owner : control::ConnectionOwner,
               control::SessionOwner,
               control::ServedSessionOwner,
               control::ProbeOwner {
  std::vector<std::string> events;
  Endpoint peer;
  wire::SessionEnd server;
  Error error{Status::ok, {}, {}, {}};
  HandshakeId opened;
  ControlPort* confirms_with = nullptr;  ///< confirms sessions that are opened
  bool accepts = true;

  void add(const char* event, std::uint64_t subject) {
    events.push_back(std::string(event) + ' ' + std::to_string(subject));
  }
  [[nodiscard]] bool saw(std::string_view event) const {
    return std::find(events.begin(), events.end(), event) != events.end();
  }
  Result<void> on_accept(std::uint64_t subject, const Endpoint& from) override {
    add("accept", subject);
    peer = from;
    if (accepts) return {};
    return tl::unexpected(Error{Status::unsupported, "accept", "not to our liking", ""});
  }
  void on_confirmed(std::uint64_t subject) override { add("confirmed", subject); }
  void on_refused(std::uint64_t subject, const wire::Refuse& refusal) override {
    add("refused", subject);
    error = {refusal.status, "", std::string(refusal.message()), ""};
  }
  void on_failed(std::uint64_t subject, const Error& why) override {
    add("failed", subject);
    error = why;
  }
  void on_opened(std::uint64_t subject, HandshakeId handshake,
                 const wire::SessionEnd& end) override {
    add("opened", subject);
    server = end;
    if (confirms_with != nullptr) confirms_with->confirm(handshake, end.incarnation);
  }
  void on_open_refused(std::uint64_t subject, const wire::Refuse& refusal) override {
    add("open_refused", subject);
    error = {refusal.status, "", std::string(refusal.message()), ""};
  }
  void on_open_failed(std::uint64_t subject, const Error& why) override {
    add("open_failed", subject);
    error = why;
  }
  void on_unconfirmed(std::uint64_t subject, std::uint64_t opened_at) override {
    add("unconfirmed", subject);
    EXPECT_EQ(opened_at, 33u);
  }
  void on_peer_gone(std::uint64_t incarnation) override { add("gone", incarnation); }
};

/// Takes everything that peers ask for, or refuses with `refusal`.
struct ListenerRecord : control::ListenerOwner {
  explicit ListenerRecord(Owner& to) : owner(to) {}
  Owner& owner;
  Status refusal = Status::ok;
  HandshakeId handshake;
  Endpoint client;
  wire::JoinSession joined;
  std::function<void()> inside;  ///< runs inside of on_hello()

  Result<control::AcceptedConnection> take(HandshakeId id) {
    handshake = id;
    if (refusal != Status::ok) return tl::unexpected(Error{refusal, "listen", "not today", ""});
    return control::AcceptedConnection{&owner, 77};
  }
  Result<control::AcceptedConnection> on_hello(HandshakeId id, std::string_view peer,
                                               const Endpoint& from) override {
    EXPECT_EQ(peer.substr(0, 10), "127.0.0.1:");
    client = from;
    if (inside) inside();
    return take(id);
  }
  Result<control::AcceptedConnection> on_join_session(HandshakeId id, std::string_view,
                                                      const wire::JoinSession& join) override {
    joined = join;
    return take(id);
  }
  Result<control::AcceptedSession> on_open_session(const wire::SessionEnd& from) override {
    if (refusal != Status::ok) return tl::unexpected(Error{refusal, "listen", "not today", ""});
    wire::SessionEnd ours = session_end(44, 2);
    ours.first = from.first;
    ours.token = 99;
    return control::AcceptedSession{ours, &owner, 44, 33};
  }
  Result<void> on_cm_request(control::CmId&, const control::CmEvent&) override { return {}; }
};

constexpr std::uint64_t kClientIncarnation = 1, kServerIncarnation = 2;

/// A port with a clock of its own.
struct Port {
  explicit Port(std::uint64_t incarnation, std::uint32_t handshakes = 4)
      : timers(1, 0),
        port({handshakes, 500ms, incarnation}, spinwire::Clock::manual(&now), timers) {
    const auto opened = port.open();
    EXPECT_TRUE(opened);
  }
  void step() {
    port.poll();
    timers.advance(now, 64, [this](spinwire::base::Timer& timer) {
      EXPECT_EQ(timer.kind, control::kHandshakeTimer);
      port.on_timer(timer);
    });
  }

  void pass(Nanoseconds time) { now += static_cast<std::uint64_t>(time.count()); }

  std::uint64_t now = 0;
  spinwire::base::TimerWheel timers;
  ControlPort port;
};

class ControlPortTest : public testing::Test {
 protected:
  ControlPortTest() {
    listener_ = std::make_shared<ListenerRecord>(server_owner_);
    const auto id = server_.port.listen(loopback::any_port(), listener_);
    EXPECT_TRUE(id);
    if (id) listening_ = *id;
    client_owner_.confirms_with = &client_.port;
  }
  ~ControlPortTest() override {
    server_.port.close();
    EXPECT_EQ(server_.port.handshakes(), 0u);
    EXPECT_EQ(server_.timers.size(), 0u);
  }
  [[nodiscard]] control::Address server_address() const {
    return *control::Address::parse(server_.port.address_of(listening_));
  }
  template <typename Done>
  bool until(Done&& done) {
    return loopback::eventually([&] {
      client_.step();
      server_.step();
      return done();
    });
  }
  /// An outbound handshake of subject 11 that has said hello.
  HandshakeId hello() {
    const auto id = client_.port.connect(server_address(), client_owner_);
    EXPECT_TRUE(id);
    client_.port.assign(*id, 11);
    client_.port.ask(*id, endpoint(101, kClientIncarnation));
    return *id;
  }
  UniqueFd plain_peer() { return loopback::plain_client(server_address()); }
  static void say(const UniqueFd& fd, std::span<const std::byte> bytes) {
    EXPECT_EQ(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  /// Whether the port has closed the connection; drops bytes that it has sent.
  static bool ended(const UniqueFd& fd) {
    std::array<char, 512> bytes;
    for (;;) {
      const ssize_t got = ::recv(fd.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (got == 0 || (got < 0 && errno != EAGAIN)) return true;
      if (got < 0) return false;
    }
  }

  Owner client_owner_, server_owner_;
  Port client_{kClientIncarnation}, server_{kServerIncarnation};
  std::shared_ptr<ListenerRecord> listener_;
  ListenerId listening_;
};

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
  client_.port.confirm(id, kServerIncarnation);  // it is over
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
  ListenerRecord& record = *listener_;
  listener_.reset();  // the port's handshake alone keeps it
  ASSERT_TRUE(until([&] { return owner.expired(); }));
  (void)record;
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
  server_.pass(100ms);
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  EXPECT_EQ(server_.port.handshakes(), 4u);
  EXPECT_EQ(server_.port.refusals(), 1u);
}

TEST_F(ControlPortTest, APeerThatIsSilentAfterItsHelloGivesWayToo) {
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 4; ++i) {
    silent.push_back(plain_peer());
    say(silent.back(), wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
    listener_->handshake = {};
    ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); })) << i;
    // The last one still waits for an answer of ours: that is not its fault.
    if (i < 3) server_.port.answer(listener_->handshake, endpoint(202, kServerIncarnation));
  }
  const HandshakeId unanswered = listener_->handshake;
  listener_->handshake = {};
  server_.pass(100ms);
  hello();
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  EXPECT_EQ(server_owner_.events, std::vector<std::string>{"failed 77"});
  EXPECT_EQ(server_owner_.error.status, Status::limit);
  EXPECT_EQ(server_.port.handshakes(), 4u);
  for (int i = 0; i < 2; ++i) {
    server_.pass(100ms);
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
  server_.pass(20ms);  // less than other sources have
  hello();
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  EXPECT_EQ(server_.port.refusals(), 1u);
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

TEST_F(ControlPortTest, ProbesTellAnotherIncarnation) {
  ASSERT_TRUE(client_.port.probe(server_address(), kServerIncarnation, client_owner_));
  ASSERT_TRUE(client_.port.probe(server_address(), kServerIncarnation + 5, client_owner_));
  ASSERT_TRUE(until([&] { return client_.port.handshakes() + server_.port.handshakes() == 0; }));
  EXPECT_EQ(client_owner_.events, std::vector<std::string>{"gone 7"});
  // One that nobody answers ends without a word.
  auto silent = loopback::listener();
  ASSERT_TRUE(client_.port.probe(silent.local(), 5, client_owner_));
  client_.step();
  client_.pass(600ms);
  client_.step();
  EXPECT_EQ(client_.port.handshakes(), 0u);
  EXPECT_EQ(client_owner_.events.size(), 1u);
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

}  // namespace
}  // namespace control_port_test
