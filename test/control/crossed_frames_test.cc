// Two authenticated handshakes at once, and an attacker on the way who gives the frames of one to
// the ends of the other, in any order.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "control/control_port_fixture.h"
#include "control/key_files.h"
#include "control/relay.h"

namespace crossed_frames_test {
namespace {

using namespace control_port_test;  // the names of a test namespace
using control::AuthenticationFailure;
using control::KeyRing;
using relay_test::Bytes;
using relay_test::From;
using relay_test::Passing;
using relay_test::Relay;

/// One frame of a handshake.
struct Place {
  From from;
  std::size_t number;  ///< of the frames of that end

  [[nodiscard]] bool is(const Passing& p) const { return p.from == from && p.number == number; }
};

/// A client's handshake through the attacker.
struct Way {
  Way(std::uint64_t number, const control::Address& server, Relay::Hook hook)
      : subject(number), relay(server, std::move(hook)) {}
  [[nodiscard]] std::string event(const char* what) const {
    return std::string(what) + ' ' + std::to_string(subject);
  }
  std::uint64_t subject;
  Relay relay;
  HandshakeId id;
  bool is_confirmed = false;  ///< the client has confirmed
};

class CrossedFrames : public ControlPortTest {
 protected:
  CrossedFrames() {
    const std::string key = key_files::line("2026", 'a');
    for (Port* port : {&client_, &server_}) port->port.set_keys(*KeyRing::parse(key, "keys"));
  }
  void begin(Way& way) {
    const auto id = client_.port.connect(way.relay.address(), client_owner_);
    ASSERT_TRUE(id);
    way.id = *id;
    client_.port.assign(way.id, way.subject);
    client_.port.ask(way.id, endpoint(101, kClientIncarnation));
  }
  /// Moves what is there on one way, and answers like engines. Nothing passes on other ways.
  template <typename Done>
  bool until(Way& way, Done&& done) {
    return ControlPortTest::until([&] {
      way.relay.pump();
      if (!way.is_confirmed && client_owner_.saw(way.event("accept"))) {
        way.is_confirmed = true;
        client_.port.confirm(way.id, kServerIncarnation);
      }
      if (listener_->offered)
        server_.port.answer(std::exchange(listener_->offered, {}),
                            endpoint(202, kServerIncarnation));
      return done();
    });
  }
  /// The failure to authenticate that each end has counted more than `before`; none if it has
  /// counted none.
  struct Counted {
    AuthenticationFailure client = AuthenticationFailure::none;
    AuthenticationFailure server = AuthenticationFailure::none;
    bool operator==(const Counted&) const = default;
  };
  using Counts = std::array<std::uint64_t, control::kAuthenticationFailures>;
  static AuthenticationFailure counted(const Port& port, Counts& before) {
    const Counts now = port.port.authentication().failures;
    auto found = AuthenticationFailure::none;
    for (std::size_t i = 0; i < now.size(); ++i) {
      if (now[i] == before[i]) continue;
      EXPECT_EQ(now[i], before[i] + 1);
      EXPECT_EQ(found, AuthenticationFailure::none) << "one end has counted two reasons";
      found = static_cast<AuthenticationFailure>(i);
    }
    before = now;
    return found;
  }

  /// One handshake begins, and the attacker takes the frame `taken` from it. In a second handshake
  /// that frame comes in the place of `replaced`, and is refused. Then the first one goes on.
  Counted cross(const Place& taken, const Place& replaced) {
    Bytes frame;
    Way first(11, server_address(), [&](const Passing& p) -> std::vector<Bytes> {
      if (!taken.is(p)) return {p.frame};
      frame = p.frame;
      return {};
    });
    begin(first);
    EXPECT_TRUE(until(first, [&] { return !frame.empty(); }));
    bool is_crossed = false;
    Way second(12, server_address(), [&](const Passing& p) -> std::vector<Bytes> {
      if (!replaced.is(p)) return {p.frame};
      is_crossed = true;
      return {frame};
    });
    begin(second);
    EXPECT_TRUE(until(second, [&] {
      return is_crossed && server_.port.handshakes() == 1 &&
             (client_owner_.saw("failed 12") || client_owner_.saw("refused 12") ||
              client_owner_.saw("confirmed 12"));
    }));
    const Counted result{counted(client_, before_client_), counted(server_, before_server_)};
    // A client confirms before it can know whether that is heard.
    const bool last = replaced.from == From::client && replaced.number == 2;
    EXPECT_EQ(client_owner_.saw("confirmed 12"), last);
    EXPECT_FALSE(server_owner_.saw("confirmed 77"));
    first.relay.say(taken.from, frame);
    EXPECT_TRUE(until(
        first, [&] { return client_.port.handshakes() == 0 && server_.port.handshakes() == 0; }));
    EXPECT_TRUE(client_owner_.saw("confirmed 11"));
    EXPECT_TRUE(server_owner_.saw("confirmed 77"));
    EXPECT_EQ((Counted{counted(client_, before_client_), counted(server_, before_server_)}),
              Counted());
    client_owner_.events.clear();
    server_owner_.events.clear();
    return result;
  }

  Counts before_client_{}, before_server_{};
};

TEST_F(CrossedFrames, AreRefusedInAnyOrder) {
  using enum AuthenticationFailure;
  constexpr Place kProof{From::client, 0}, kHello{From::client, 1}, kReady{From::client, 2};
  constexpr Place kAnswer{From::server, 0}, kAccept{From::server, 1};
  const struct {
    Place taken;
    Place replaced;
    Counted counted;
  } cases[] = {
      // The server accepts a proof that is new to it, and the client no answer to another one's.
      {kProof, kProof, {unproven_server, unconfirmed_proof}},
      {kProof, kHello, {none, unconfirmed_proof}},
      {kProof, kReady, {none, none}},  // behind a proof a frame in the clear is a plain error
      {kHello, kProof, {unproven_server, no_proof}},
      {kHello, kHello, {none, unconfirmed_proof}},
      {kHello, kReady, {none, altered_frame}},
      {kReady, kProof, {unproven_server, no_proof}},
      {kReady, kHello, {none, unconfirmed_proof}},
      {kReady, kReady, {none, altered_frame}},
      {kAnswer, kAnswer, {unproven_server, unconfirmed_proof}},
      {kAnswer, kAccept, {none, none}},
      {kAccept, kAnswer, {unproven_server, unconfirmed_proof}},
      {kAccept, kAccept, {altered_frame, none}},
  };
  for (const auto& each : cases) {
    SCOPED_TRACE(testing::Message()
                 << (each.taken.from == From::client ? "the client's" : "the server's") << " frame "
                 << each.taken.number << " in the place of " << each.replaced.number);
    const Counted found = cross(each.taken, each.replaced);
    EXPECT_EQ(found.client, each.counted.client);
    EXPECT_EQ(found.server, each.counted.server);
  }
}

}  // namespace
}  // namespace crossed_frames_test
