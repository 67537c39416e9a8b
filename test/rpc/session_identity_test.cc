// Sessions: what applications say of themselves when a session is opened, whom a server accepts,
// and what a request tells of its client.
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "agent/connecting.h"
#include "base/internals.h"
#include "control/key_files.h"
#include "engine/engine_core.h"
#include "engine/expect_made.h"
#include "rpc/rpc_ends.h"

namespace session_identity_test {
namespace {

using namespace rpc_test;  // the names of a test namespace
using key_files::KeyFile;
using key_files::line;
using spinwire::kPrivateDataMax;
using spinwire::PeerIdentity;
using spinwire::PeerRequest;
using spinwire::ServedSession;

Bytes text(std::string_view words) { return bytes_of(std::as_bytes(std::span(words))); }

/// What a handler has seen of its client.
struct Seen {
  std::string address, key;
  Bytes data;
  ServedSession session;
};

constexpr spinwire::Method kWho = 1;

struct Door {
  explicit Door(const Config& c = rpc_config(), const std::uint64_t* ticks = nullptr)
      : server(c, ticks), client(c, ticks) {
    EXPECT_TRUE(server.engine.serve(kWho, [this](Request& r) {
      const PeerIdentity peer = r.peer();
      seen.push_back({std::string(peer.address), std::string(peer.key), bytes_of(peer.private_data),
                      r.session()});
      EXPECT_EQ(r.reply(r.peer().private_data), Status::ok);
    }));
    ListenOptions options;
    options.on_session_request = [this](PeerRequest& request) {
      ++requests;
      address = request.peer().address;
      key = request.peer().key;
      data = bytes_of(request.peer().private_data);
      decide(request);
    };
    const Bytes ours = text("for all");
    options.private_data = ours;
    auto made = server.engine.listen("127.0.0.1:0", options);
    EXPECT_TRUE(made) << made.error().message();
    if (made) server.listener = std::move(*made);
  }
  Session open(const Bytes& private_data, const spinwire::Reconnect& reconnect = {}) {
    SessionOptions options;
    options.reconnect = reconnect;
    options.private_data = private_data;
    options.on_closed = [this](Session, const Error& e) { closed.push_back(e); };
    return expect_made(client.engine.open_session(server.listener.address(), options));
  }
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({&client, &server}, std::forward<Done>(done));
  }
  Session opened(const Bytes& private_data) {
    const Session session = open(private_data);
    EXPECT_TRUE(until([&] { return session.ready(); }));
    return session;
  }
  Bytes call(Session session) {
    bool ended = false;
    Bytes answer;
    EXPECT_EQ(session.call(kWho, std::span<const std::byte>(),
                           [&](Reply& r) {
                             ended = true;
                             EXPECT_EQ(r.status(), Status::ok);
                             answer = bytes_of(r.bytes());
                           }),
              Status::ok);
    EXPECT_TRUE(until([&] { return ended; }));
    return answer;
  }
  void finish(std::initializer_list<Session> sessions) {
    for (Session each : sessions) EXPECT_EQ(each.close(), Status::ok);
    EXPECT_TRUE(until([&] {
      return client.engine.rpc_stats().sessions == 0 &&
             server.engine.rpc_stats().served_sessions == 0 &&
             client.engine.stats().connections == 0 && server.engine.stats().connections == 0;
    }));
    for (int i = 0; i < 8; ++i) (void)(client.poll() + server.poll());
    client.expect_clean();
    server.expect_clean();
  }

  std::function<void(PeerRequest&)> decide = [](PeerRequest& r) { r.accept(); };
  int requests = 0;
  std::string address, key;
  Bytes data;
  std::vector<Seen> seen;
  std::vector<Error> closed;
  Node server, client;
};

class SessionIdentity : public testing::TestWithParam<RpcTransport> {
 protected:
  static Config config() {
    Config c = rpc_config();
    c.rpc.transport = GetParam();
    return c;
  }
};

TEST_P(SessionIdentity, EachEndReadsTheOthersPrivateData) {
  Door door(config());
  const Bytes asks(kPrivateDataMax, std::byte{3});
  const Session session = door.opened(asks);
  EXPECT_EQ(door.requests, 1) << "the connection of its calls is no session of its own";
  EXPECT_EQ(door.data, asks);
  EXPECT_EQ(bytes_of(session.peer_private_data()), text("for all"));
  EXPECT_EQ(session.peer_identity().address, door.server.listener.address());
  EXPECT_EQ(session.peer_identity().key, "");
  door.finish({session});
  EXPECT_TRUE(session.peer_private_data().empty());
}

TEST_P(SessionIdentity, ARequestTellsItsClient) {
  Door door(config());
  const Session a = door.opened(text("a")), b = door.opened(text("b"));
  EXPECT_EQ(door.call(a), text("a"));
  EXPECT_EQ(door.call(b), text("b"));
  EXPECT_EQ(door.call(a), text("a"));
  ASSERT_EQ(door.seen.size(), 3u);
  EXPECT_EQ(door.seen[0].session, door.seen[2].session);
  EXPECT_NE(door.seen[0].session, door.seen[1].session);
  EXPECT_EQ(door.seen[1].address, door.address);
  EXPECT_NE(door.seen[0].address, door.address);
  for (const Seen& each : door.seen) EXPECT_TRUE(each.session);
  EXPECT_EQ(bytes_of(door.seen[1].session.peer_identity().private_data), text("b"));
  door.finish({a, b});
  EXPECT_FALSE(door.seen[1].session);
  EXPECT_TRUE(door.seen[1].session.peer_identity().private_data.empty());
  EXPECT_TRUE(door.seen[1].session.peer_identity().address.empty());
}

INSTANTIATE_TEST_SUITE_P(Transports, SessionIdentity,
                         testing::Values(RpcTransport::automatic, RpcTransport::connection));

TEST(SessionIdentityKeys, TheKeyThatThePeerHasProvedIsNamed) {
  const KeyFile file(line("trading", 'c'));
  Config c = rpc_config();
  c.security.key_file = file.path();
  Door door(c);
  const Session session = door.opened(text("x"));
  EXPECT_EQ(door.key, "trading");
  EXPECT_EQ(session.peer_identity().key, "trading");
  (void)door.call(session);
  EXPECT_EQ(door.seen.at(0).key, "trading");
  door.finish({session});
}

TEST(SessionIdentityKeys, TheConnectionOfItsCallsIsNoStrangers) {
  const KeyFile file(line("trading", 'c'));
  Config c = over(RpcTransport::connection);
  c.security.key_file = file.path();
  Door door(c);
  const Session session = door.opened(text("x"));
  auto& context = spinwire::detail::core_of(door.server.engine)->context;
  ASSERT_EQ(context.agents.size(), 1u);
  for (const spinwire::agent::Agent& a : context.agents)
    EXPECT_EQ(spinwire::agent::peer_identity_of(a).key, "trading") << "it need not give way";
  door.finish({session});
}

TEST(SessionRefusals, ReachTheClientWithCodeAndText) {
  Door door;
  door.decide = [&](PeerRequest& r) {
    EXPECT_EQ(door.server.engine.rpc_stats().served_sessions, 0u) << "a record was taken";
    r.refuse(404, "nobody of that name");
  };
  const Session session = door.open(text("x"));
  ASSERT_TRUE(door.until([&] { return !door.closed.empty(); }));
  EXPECT_EQ(door.closed.at(0).status, Status::refused);
  EXPECT_EQ(door.closed.at(0).code, 404u);
  EXPECT_EQ(door.closed.at(0).found, "nobody of that name");
  EXPECT_EQ(session.state(), SessionState::closed);
  door.finish({});
}

TEST(SessionRefusals, WithATimeAskTheClientToComeBackThen) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a manual clock does not move the device";
  std::uint64_t now = 1'000'000'000;
  Door door(rpc_config(), &now);
  door.decide = [](PeerRequest& r) { r.refuse(503, "too busy", 400ms); };
  (void)door.open({});
  ASSERT_TRUE(door.until([&] { return !door.closed.empty(); }));
  EXPECT_EQ(door.closed.at(0).code, 503u);
  EXPECT_EQ(door.closed.at(0).goodbye,
            (spinwire::Goodbye{spinwire::GoodbyeReason::overloaded, 400ms}));

  const Session session = door.open({}, {.attempts = 1, .first_delay = 1us, .max_delay = 1us});
  ASSERT_TRUE(door.until([&] { return door.requests == 2; }));
  door.decide = [](PeerRequest& r) { r.accept(); };
  const auto poll = [&] {
    for (int i = 0; i < 300; ++i) (void)(door.client.poll() + door.server.poll());
  };
  poll();  // the refusal arrives
  now += 399'000'000;
  poll();
  EXPECT_EQ(door.requests, 2) << "it was to come after 400 ms";
  now += 2'000'000;
  ASSERT_TRUE(door.until([&] {
    now += 1000;  // for the client's answer to the challenge
    return session.ready();
  }));
  EXPECT_EQ(door.closed.size(), 1u);
  (void)door.call(session);
  EXPECT_EQ(Session(session).close(), Status::ok);
}

// A refused client must not replace a session that its host has not used yet, nor use up its share.
TEST(SessionRefusals, TakeNothingFromOthers) {
  Config c = rpc_config();
  c.rpc.sessions = 2;
  Door door(c);
  const Session first = door.opened(text("1")), second = door.opened(text("2"));
  door.decide = [](PeerRequest& r) { r.refuse(1, "full"); };
  Config more = rpc_config();
  Node other(more);
  for (std::size_t i = 1; i <= 5; ++i) {
    std::optional<Error> why;
    SessionOptions options;
    options.on_closed = [&](Session, const Error& e) { why = e; };
    ASSERT_TRUE(other.engine.open_session(door.server.listener.address(), options));
    ASSERT_TRUE(
        engine_test::until({&door.client, &door.server, &other}, [&] { return why.has_value(); }));
    EXPECT_EQ(why->code, 1u);
  }
  EXPECT_EQ(door.server.engine.rpc_stats().served_sessions, 2u);
  EXPECT_EQ(door.call(first), text("1"));
  EXPECT_EQ(door.call(second), text("2"));
  door.finish({first, second});
}

TEST(SessionRefusals, AClientThatIsNotAcceptedIsRefused) {
  Door door;
  const std::function<void(PeerRequest&)> kDecisions[] = {
      [](PeerRequest&) {}, [](PeerRequest&) { throw std::runtime_error("thrown"); }};
  for (const auto& decision : kDecisions) {
    door.closed.clear();
    door.decide = decision;
    (void)door.open({});
    ASSERT_TRUE(door.until([&] { return !door.closed.empty(); }));
    EXPECT_EQ(door.closed.at(0).status, Status::refused);
    EXPECT_EQ(door.closed.at(0).code, 0u);
  }
  door.finish({});
}

TEST(SessionRefusals, TooMuchPrivateDataIsRefused) {
  Door door;
  const Bytes more(kPrivateDataMax + 1);
  SessionOptions options;
  options.private_data = more;
  const auto made = door.client.engine.open_session(door.server.listener.address(), options);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().status, Status::invalid_argument);
  EXPECT_EQ(made.error().found, "private data of 257 bytes");
  EXPECT_EQ(door.client.engine.rpc_stats().sessions, 0u);
}

TEST(SessionHandles, EmptyOnesAnswerNothing) {
  EXPECT_FALSE(ServedSession());
  EXPECT_TRUE(ServedSession().peer_identity().address.empty());
  EXPECT_FALSE(PendingCall().session());
  EXPECT_TRUE(PendingCall().peer().private_data.empty());
  EXPECT_TRUE(Session().peer_private_data().empty());
}

}  // namespace
}  // namespace session_identity_test
