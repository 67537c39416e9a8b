// Endpoints that prove a key, and the rule for engines without one.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "control/key_files.h"
#include "engine/engine_core.h"
#include "engine/harness.h"
#include "verbs/providers.h"

namespace out_of_band_authentication_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using key_files::KeyFile;
using key_files::line;
using spinwire::AuthenticationStats;
using spinwire::Endpoint;
using spinwire::PrepareOptions;
using spinwire::detail::EngineCore;

Config keyed(const KeyFile& file) {
  Config c = small_config();
  c.security.key_file = file.path();
  c.security.open = false;
  return c;
}

/// One end of a connection made out-of-band.
struct End {
  explicit End(const Config& config) : node(config) {}
  explicit End(const KeyFile& file) : End(keyed(file)) {}

  void prepare() {
    told = {};
    options.handlers = node.handlers();
    options.on_endpoint = [this](Connection, const Endpoint& e) { told.push_back(e); };
    auto made = node.engine.prepare(options);
    ASSERT_TRUE(made) << made.error().message();
    connection = *made;
    ASSERT_TRUE(until({&node}, [&] { return told.size() == 1; }));
  }
  /// The status of joining an endpoint that travels as text.
  Status join(const Endpoint& peer) {
    const auto read = Endpoint::parse(peer.text());
    EXPECT_TRUE(read) << read.error().message();
    const auto joined = connection.join(*read);
    if (!joined) why = joined.error();
    return joined ? Status::ok : joined.error().status;
  }
  [[nodiscard]] AuthenticationStats counts() const { return node.engine.stats().authentication; }

  Node node;
  PrepareOptions options;
  std::vector<Endpoint> told;
  Connection connection;
  Error why{Status::ok, {}, {}, {}};
};

bool both_ready(End& a, End& b) {
  return until({&a.node, &b.node}, [&] { return a.connection.ready() && b.connection.ready(); });
}

const std::string kKey = line("2026", 'a');

TEST(EndpointAuthentication, EndpointsThatProveTheKeyConnect) {
  const KeyFile file(kKey), both(line("2027", 'b') + kKey);
  End a(file), b(both);  // b proves another key than a, but knows a's
  a.prepare();
  b.prepare();
  EXPECT_EQ(a.join(b.told[0]), Status::unauthenticated);
  EXPECT_EQ(a.counts().unknown_key, 1u);
  End c(file);
  c.prepare();
  EXPECT_EQ(a.join(c.told[0]), Status::ok);
  EXPECT_EQ(c.join(a.told[0]), Status::ok);
  ASSERT_TRUE(both_ready(a, c));
  EXPECT_EQ(a.counts().authenticated, 1u);
  EXPECT_EQ(a.connection.peer_identity().key, "2026");
  finish(a.node, c.node);
}

TEST(EndpointAuthentication, AnEndpointWithoutAProofIsRefused) {
  const KeyFile file(kKey);
  End a(file), stranger(small_config());
  a.prepare();
  stranger.prepare();
  EXPECT_TRUE(stranger.told[0].proof.empty());
  EXPECT_EQ(a.join(stranger.told[0]), Status::unauthenticated);
  EXPECT_EQ(a.counts().no_proof, 1u);
  EXPECT_EQ(a.counts().authenticated, 0u);
  EXPECT_EQ(a.connection.state(), ConnectionState::exchanging);
}

TEST(EndpointAuthentication, AnotherNameOfTheKeyIsRefused) {
  const KeyFile file(kKey), renamed(line("2027", 'a'));
  End a(file), b(renamed);
  a.prepare();
  b.prepare();
  EXPECT_EQ(a.join(b.told[0]), Status::unauthenticated);
  EXPECT_EQ(a.counts().wrong_proof, 1u);
}

TEST(EndpointAuthentication, AnyOtherValueOfAnEndpointIsRefused) {
  const KeyFile file(kKey);
  End a(file), b(file);
  b.options.private_data = std::as_bytes(std::span("ticket"));
  a.prepare();
  b.prepare();
  const std::vector<std::function<void(Endpoint&)>> changes{
      [](Endpoint& e) { e.gid[15] ^= 1; },
      [](Endpoint& e) { e.lid ^= 1; },
      [](Endpoint& e) { e.qp_num ^= 1; },
      [](Endpoint& e) { e.psn ^= 1; },
      [](Endpoint& e) { e.mtu = e.mtu == 256 ? 512 : 256; },
      [](Endpoint& e) { e.max_message += 1; },
      [](Endpoint& e) { e.eager_bytes -= 1; },
      [](Endpoint& e) { e.credits -= 1; },
      [](Endpoint& e) { e.incarnation ^= 2; },
      [](Endpoint& e) { e.credit_cell_address += 8; },
      [](Endpoint& e) { e.credit_cell_rkey ^= 2; },
      [](Endpoint& e) { e.credit_cell_token ^= 2; },
      [](Endpoint& e) { e.peer_timeout_ms += 1; },
      [](Endpoint& e) { e.max_rd_atomic += 1; },
      [](Endpoint& e) { e.application_fields = !e.application_fields; },
      [](Endpoint& e) { e.goodbye_reasons = !e.goodbye_reasons; },
      [](Endpoint& e) { e.private_data = {}; },
      [](Endpoint& e) { e.proof.nonce[3] ^= 1; },
      [](Endpoint& e) { e.proof.answers[3] ^= 1; },
      [](Endpoint& e) { e.proof.code[31] ^= 1; },
  };
  for (std::size_t i = 0; i < changes.size(); ++i) {
    Endpoint other = b.told[0];
    changes[i](other);
    EXPECT_EQ(a.join(other), Status::unauthenticated) << i;
    EXPECT_EQ(a.counts().wrong_proof, i + 1) << i;
  }
  Endpoint other = b.told[0];
  other.proof.key[0] ^= 1;
  EXPECT_EQ(a.join(other), Status::unauthenticated);
  EXPECT_EQ(a.counts().unknown_key, 1u);
  EXPECT_EQ(a.join(b.told[0]), Status::ok);
}

TEST(EndpointAuthentication, OurOwnEndpointIsRefused) {
  const KeyFile file(kKey);
  End a(file);
  a.prepare();
  EXPECT_EQ(a.join(a.told[0]), Status::unauthenticated);
  EXPECT_NE(a.why.found.find("our own"), std::string::npos);
  EXPECT_EQ(a.counts().wrong_proof, 1u);
}

TEST(EndpointAuthentication, AnEndpointTakenAfterJoiningAnswersThePeers) {
  const KeyFile file(kKey);
  End a(file), b(file);
  a.options.peer_joins_first = true;
  a.prepare();
  b.prepare();
  EXPECT_EQ(b.join(a.told[0]), Status::ok);
  const Endpoint answer = *b.connection.endpoint();
  EXPECT_EQ(answer.proof.answers, a.told[0].proof.code);
  EXPECT_EQ(a.join(answer), Status::ok) << a.why.message();
  ASSERT_TRUE(both_ready(a, b));
  finish(a.node, b.node);
}

TEST(EndpointAuthentication, AnEndpointThatAnswersNobodyIsRefusedWhereAnAnswerIsDue) {
  const KeyFile file(kKey);
  End a(file), b(file);
  a.options.peer_joins_first = true;
  a.prepare();
  b.prepare();
  EXPECT_EQ(a.join(b.told[0]), Status::unauthenticated);
  EXPECT_NE(a.why.found.find("old"), std::string::npos);
  EXPECT_EQ(a.counts().unconfirmed_proof, 1u);
}

// The answer to an earlier connection's endpoint is an old one, in either way to prepare.
TEST(EndpointAuthentication, AnAnswerToAnEarlierEndpointIsRefused) {
  const KeyFile file(kKey);
  for (const bool due : {false, true}) {
    End a(file), b(file);
    a.options.peer_joins_first = due;
    a.prepare();
    b.prepare();
    EXPECT_EQ(b.join(a.told[0]), Status::ok);
    const Endpoint old = *b.connection.endpoint();
    EXPECT_EQ(a.connection.close(), Status::ok);
    a.prepare();
    EXPECT_EQ(a.join(old), Status::unauthenticated);
    EXPECT_EQ(a.counts().unconfirmed_proof, 1u);
  }
}

// An endpoint that answers nobody may be an old one. The end that joins it is ready, reaches nobody
// and loses its peer, whether the queue pair is gone or has another peer.
TEST(EndpointAuthentication, AnEndpointThatIsPlayedAgainReachesNobodyAndIsLost) {
  const KeyFile file(kKey);
  Config quick = keyed(file);
  quick.connections.keepalive_interval = 20ms;
  quick.queue_pair.ack_timeout = 8;
  for (const bool is_connected : {false, true}) {
    SCOPED_TRACE(is_connected);
    End a(quick), b(quick), late(quick);
    a.prepare();
    b.prepare();
    const Endpoint recorded = b.told[0];
    if (is_connected) {
      EXPECT_EQ(a.join(recorded), Status::ok);
      EXPECT_EQ(b.join(a.told[0]), Status::ok);
      ASSERT_TRUE(both_ready(a, b));
    } else {
      EXPECT_EQ(b.connection.close(), Status::ok);
      ASSERT_TRUE(
          until({&a.node, &b.node}, [&] { return b.node.engine.stats().connections == 0; }));
    }
    late.prepare();
    EXPECT_EQ(late.join(recorded), Status::ok) << "nothing tells it from a new one";
    ASSERT_TRUE(until({&a.node, &b.node, &late.node}, [&] { return late.node.ready.size() == 1; }));
    const Buffer data = late.node.filled(64, 1);
    (void)late.connection.send(data);
    ASSERT_TRUE(
        until({&a.node, &b.node, &late.node}, [&] { return late.node.closed.size() == 1; }));
    EXPECT_EQ(late.node.closed[0].status, Status::peer_lost) << late.node.closed[0].message();
    EXPECT_EQ(b.node.messages, 0u);
    if (!is_connected) continue;
    // The true peer has noticed nothing.
    const Buffer more = a.node.filled(64, 2);
    ASSERT_EQ(a.connection.send(more), Status::ok);
    ASSERT_TRUE(until({&a.node, &b.node}, [&] { return b.node.messages == 1; }));
    EXPECT_TRUE(a.connection.ready() && b.connection.ready());
  }
}

// The peer answers the endpoint that it has got.
TEST(EndpointAuthentication, AnEndpointStaysValidWhenTheKeysAreReloaded) {
  for (const bool due : {false, true}) {
    const KeyFile file(kKey);
    End a(file), b(file);
    a.options.peer_joins_first = due;
    a.prepare();
    b.prepare();
    file.write(line("new", 'b') + kKey);
    ASSERT_TRUE(a.node.engine.reload_keys());
    EXPECT_EQ(*a.connection.endpoint(), a.told[0]);
    EXPECT_EQ(b.join(a.told[0]), Status::ok);
    ASSERT_TRUE(b.node.engine.reload_keys());
    EXPECT_EQ(a.join(*b.connection.endpoint()), Status::ok) << a.why.message();
    ASSERT_TRUE(both_ready(a, b));
    EXPECT_EQ(b.connection.peer_identity().key, "2026");
    EXPECT_EQ(a.connection.peer_identity().key, "new");
    finish(a.node, b.node);
  }
}

// The code covers all values, and the credits grow with each message.
TEST(EndpointAuthentication, AnEndpointStaysValidWhenMessagesHaveBeenExchanged) {
  const KeyFile file(kKey);
  End a(file), stranger(small_config()), late(file);
  a.options.peer_has_no_key = true;
  for (End* end : {&a, &stranger, &late}) end->prepare();
  EXPECT_EQ(a.join(stranger.told[0]), Status::ok);
  EXPECT_EQ(stranger.join(a.told[0]), Status::ok);
  ASSERT_TRUE(both_ready(a, stranger));
  for (std::uint64_t i = 1; i <= 100; ++i) {
    ASSERT_EQ(stranger.connection.send(stranger.node.filled(64, 1)), Status::ok);
    ASSERT_EQ(a.connection.send(a.node.filled(64, 1)), Status::ok);
    ASSERT_TRUE(until({&a.node, &stranger.node},
                      [&] { return a.node.messages == i && stranger.node.messages == i; }));
  }
  const auto again = a.connection.endpoint();
  ASSERT_TRUE(again);
  EXPECT_EQ(*again, a.told[0]);
  // The other end's endpoint has no proof, so it shows how the credits of both have grown.
  EXPECT_NE(stranger.connection.endpoint()->credits, stranger.told[0].credits);
  EXPECT_EQ(late.join(*again), Status::ok) << late.why.message();
}

// With a key at both ends, each endpoint answers the other's code.
TEST(EndpointAuthentication, EndpointsOfTwoEndsWithKeysStayValidWhenMessagesHaveBeenExchanged) {
  const KeyFile file(kKey);
  End a(file), b(file), judge(file);
  for (End* end : {&a, &b, &judge}) end->prepare();
  EXPECT_EQ(a.join(b.told[0]), Status::ok);
  EXPECT_EQ(b.join(a.told[0]), Status::ok);
  ASSERT_TRUE(both_ready(a, b));
  const Endpoint of_a = *a.connection.endpoint(), of_b = *b.connection.endpoint();
  EXPECT_EQ(of_a.proof.answers, b.told[0].proof.code);
  EXPECT_EQ(of_b.proof.answers, a.told[0].proof.code);
  for (std::uint64_t i = 1; i <= 100; ++i) {
    ASSERT_EQ(a.connection.send(a.node.filled(64, 1)), Status::ok);
    ASSERT_EQ(b.connection.send(b.node.filled(64, 1)), Status::ok);
    ASSERT_TRUE(
        until({&a.node, &b.node}, [&] { return a.node.messages == i && b.node.messages == i; }));
  }
  EXPECT_EQ(*a.connection.endpoint(), of_a);
  EXPECT_EQ(*b.connection.endpoint(), of_b);
  // Another end with the key finds nothing wrong with either, but that it answers somebody else.
  EXPECT_EQ(judge.join(*a.connection.endpoint()), Status::unauthenticated);
  EXPECT_EQ(judge.join(*b.connection.endpoint()), Status::unauthenticated);
  EXPECT_EQ(judge.counts().wrong_proof, 0u);
  EXPECT_EQ(judge.counts().unconfirmed_proof, 2u);
  finish(a.node, b.node);
}

TEST(EndpointAuthentication, AProofByAKeyThatWasRemovedIsRefused) {
  const KeyFile file(kKey);
  End a(file), b(file);
  a.prepare();
  b.prepare();
  file.write(line("new", 'b'));
  ASSERT_TRUE(a.node.engine.reload_keys());
  EXPECT_EQ(a.join(b.told[0]), Status::unauthenticated);
  EXPECT_EQ(a.counts().unknown_key, 1u);
}

TEST(EndpointAuthentication, EachConnectionsEndpointHasANonceOfItsOwn) {
  const KeyFile file(kKey);
  End a(file), b(file);
  a.prepare();
  b.prepare();
  EXPECT_NE(a.told[0].proof.nonce, b.told[0].proof.nonce);
  EXPECT_EQ(*a.connection.endpoint(), a.told[0]);
}

TEST(EndpointAuthentication, APeerWithoutAKeyIsTakenIfTheApplicationSaysSo) {
  const KeyFile file(kKey);
  End a(file), stranger(small_config());
  a.options.peer_has_no_key = true;
  a.prepare();
  stranger.prepare();
  EXPECT_EQ(a.join(stranger.told[0]), Status::ok);
  EXPECT_EQ(stranger.join(a.told[0]), Status::ok);
  ASSERT_TRUE(both_ready(a, stranger));
  EXPECT_EQ(a.connection.peer_identity().key, "");
  finish(a.node, stranger.node);
  // But a proof that is there must be right.
  End other(file);
  a.prepare();
  other.prepare();
  Endpoint wrong = other.told[0];
  wrong.proof.code[0] ^= 1;
  EXPECT_EQ(a.join(wrong), Status::unauthenticated);
}

// ---- without a key ----

/// What an engine whose device reaches other hosts says to each way without TCP: the embedded
/// device, as if it did.
struct Answers {
  Status prepared, connected, listening;
  friend bool operator==(const Answers&, const Answers&) = default;
};
Answers answers_of(const Config& config) {
  auto provider = spinwire::verbs::softverbs_provider();
  provider.reaches_other_hosts = true;
  EngineCore engine(config, Clock::real(), std::move(*spinwire::base::OwnerGuard::create()));
  const spinwire::verbs::Provider* const all[] = {&provider};
  const auto opened = engine.open({.providers = all});
  EXPECT_TRUE(opened) << opened.error().message();
  const auto status = [](const auto& result) {
    return result ? Status::ok : result.error().status;
  };
  ConnectOptions connecting;
  connecting.via = spinwire::Via::rdma_cm;
  ListenOptions listening;
  listening.via = spinwire::Via::rdma_cm;
  return {status(engine.connector.prepare({})),
          status(engine.connector.connect("127.0.0.1:1", connecting)),
          status(engine.connector.listen("127.0.0.1:0", listening, nullptr))};
}

TEST(EndpointAuthentication, WithoutAKeyADeviceThatReachesOtherHostsConnectsOverTcpAlone) {
  Config c = small_config();
  c.device.name = "softverbs";
  c.security.open = false;
  EXPECT_EQ(answers_of(c),
            (Answers{Status::unauthenticated, Status::unauthenticated, Status::unauthenticated}));
  c.security.open = true;
  const Answers open = answers_of(c);
  EXPECT_EQ(open.prepared, Status::ok);
  EXPECT_NE(open.connected, Status::unauthenticated);  // whether there is an rdma_cm or not
  EXPECT_NE(open.listening, Status::unauthenticated);
  const KeyFile file(kKey);
  c.security = {.key_file = file.path()};
  const Answers with_key = answers_of(c);
  EXPECT_EQ(with_key.prepared, Status::ok);
  EXPECT_NE(with_key.connected, Status::unauthenticated);
  EXPECT_NE(with_key.listening, Status::unauthenticated);
}

TEST(EndpointAuthentication, WithoutAKeyTheEmbeddedDeviceConnects) {
  Config c = small_config();
  c.device.name = "softverbs";
  c.security.open = false;
  End a(c), b(c);
  a.prepare();
  b.prepare();
  EXPECT_EQ(a.join(b.told[0]), Status::ok);
  EXPECT_EQ(b.join(a.told[0]), Status::ok);
  ASSERT_TRUE(both_ready(a, b));
}

}  // namespace
}  // namespace out_of_band_authentication_test
