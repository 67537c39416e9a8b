// Offers of memory by its local key: hostile ones, and what answers to them cost.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "agent/hostile_peer.h"
#include "config/queue_sizing.h"
#include "verbs/providers.h"

namespace local_offers_test {
namespace {

using namespace hostile_peer;  // NOLINT: a test's helpers
namespace sv = spinwire::softverbs;
using spinwire::detail::EngineCore;
using spinwire::verbs::Provider;
using wire::RendezvousVerdict;

constexpr std::uint32_t kBytes = 300'000;

/// The engine has direct messages, and so reads at once, or it has none.
class HostileLocalOffers : public HostilePeer, public testing::WithParamInterface<bool> {
 protected:
  static Config config() { return GetParam() ? hostile_config() : hostile_config_with_keys(); }
  static bool send(Attacked& t, const wire::LocalOffer& offer) {
    return t.peer.send(MessageKind::local_offer, wire::encode(offer));
  }
};
INSTANTIATE_TEST_SUITE_P(To, HostileLocalOffers, testing::Bool(), [](const auto& to) {
  return to.param ? "ReaderAtOnce" : "ReaderByWorkRequests";
});

TEST_P(HostileLocalOffers, OfWhatThePeerMayNotNameEndTheConnection) {
  Attacked t(config());
  const softverbs_test::Node& node = t.peer.node();
  const auto memory = node.bytes(Peer::kOffered, kBytes);
  std::vector<std::byte> own(kBytes);
  ibv_pd* const other = sv::alloc_pd(node.context);
  const auto registered = [](ibv_pd* domain, std::span<std::byte> bytes, int access) {
    ibv_mr* const region = sv::reg_mr(domain, bytes.data(), bytes.size(), access);
    softverbs_test::must(region != nullptr, "reg_mr");
    return region;
  };
  ibv_mr* const revoked = registered(node.pd, memory, IBV_ACCESS_LOCAL_WRITE);
  const std::uint32_t revoked_key = revoked->lkey;
  ASSERT_EQ(sv::dereg_mr(revoked), 0);
  ibv_mr* const foreign = registered(other, memory, IBV_ACCESS_LOCAL_WRITE);
  ibv_mr* const unwritable = registered(node.pd, memory, IBV_ACCESS_REMOTE_READ);
  ibv_mr* const hidden = registered(node.pd, own, IBV_ACCESS_LOCAL_WRITE);
  ibv_mr* const narrow = registered(node.pd, memory.first(kBytes - 1), IBV_ACCESS_LOCAL_WRITE);
  const struct {
    const char* name;
    std::uint32_t key;
    const std::byte* at;
  } cases[] = {{"no key", 0, memory.data()},
               {"a key of nothing", 0xffffff00, memory.data()},
               {"memory that was revoked", revoked_key, memory.data()},
               {"another domain", foreign->lkey, memory.data()},
               {"memory that its owner may not write", unwritable->lkey, memory.data()},
               {"memory that peers do not share", hidden->lkey, own.data()},
               {"a byte beyond the end", narrow->lkey, memory.data()},
               {"a byte before the start", narrow->lkey, memory.data() - 1}};
  for (const auto& one : cases) {
    SCOPED_TRACE(one.name);
    t.begin();
    wire::LocalOffer offer = t.peer.local_offer(kBytes, 1);
    offer.lkey = one.key;
    offer.address = reinterpret_cast<std::uint64_t>(one.at);
    ASSERT_TRUE(send(t, offer));
    t.expect_ended(Status::remote_access, "the READ of a rendezvous message", 1);
    EXPECT_EQ(t.delivered, 0u);
  }
  for (ibv_mr* const region : {foreign, unwritable, hidden, narrow})
    EXPECT_EQ(sv::dereg_mr(region), 0);
  EXPECT_EQ(sv::dealloc_pd(other), 0);
  t.finish();
}

TEST_P(HostileLocalOffers, OfTheSameMemoryAreMessagesOfTheirOwn) {
  Attacked t(config());
  t.expect_each_delivered([&t] { return send(t, t.peer.local_offer(kOfferedBytes, 9)); });
}

TEST_P(HostileLocalOffers, ToAnEndWithoutRendezvousMessagesEndTheConnection) {
  Config c = config();
  c.connections.max_message_bytes = c.connections.eager_bytes;
  Attacked t(c);
  for (const std::uint32_t length : {1u, c.connections.eager_bytes, kBytes}) {
    t.begin();
    ASSERT_TRUE(send(t, t.peer.local_offer(length, 1)));
    t.expect_refused("connections.max_message_bytes is no more than eager_bytes");
    EXPECT_EQ(t.delivered, 0u) << length;
  }
  t.finish();
}

/// How far the peer's first message is.
struct Progress {
  std::uint32_t requested = 0;
  std::uint32_t arrived = 0;
};
Progress progress(Attacked& t) {
  auto& context = spinwire::detail::core_of(t.node.engine)->context;
  auto* const a = spinwire::agent::find_by_qpn(context, t.victim.endpoint()->qp_num);
  if (a == nullptr || a->rendezvous.receives.empty()) return {};
  const auto& first = *a->rendezvous.receives.front();
  return {first.requested, first.arrived};
}

TEST_P(HostileLocalOffers, OfAPeerThatFailsBetweenTwoReadsDeliverNothing) {
  Attacked t(config());
  std::uint32_t in_between = 0;
  bool is_over = false;
  for (int polls = 0; polls < 60 && !is_over; ++polls) {
    SCOPED_TRACE(polls);
    t.begin();
    ASSERT_TRUE(send(t, t.peer.local_offer(kLongest, 1)));
    for (int i = 0; i < polls; ++i) (void)t.node.poll();
    const Progress now = progress(t);
    t.peer.fail();
    is_over = t.delivered != 0 || now.requested == kLongest;
    in_between += now.arrived != 0 && !is_over ? 1 : 0;
    ASSERT_TRUE(t.until([&] {
      (void)t.victim.send_copy(std::as_bytes(std::span("?", 1)));
      return !t.node.closed.empty();
    }));
    EXPECT_NE(t.node.closed[0].status, Status::ok);
    if (!is_over) {
      EXPECT_EQ(t.delivered, 0u);
    }
    t.expect_ended(t.node.closed[0].status, "", t.counted());
  }
  EXPECT_TRUE(is_over) << "the last one had time enough";
  EXPECT_GT(in_between, 0u);
  t.node.stale_allowed = true;
  t.finish();
}

/// The id of an offer of either kind.
std::uint32_t id_of(const raw_peer::Heard& heard) {
  wire::LocalOffer local;
  wire::RendezvousOffer opened;
  if (heard.header.kind == MessageKind::local_offer && wire::decode(heard.body, local))
    return local.id;
  EXPECT_TRUE(wire::decode(heard.body, opened));
  return opened.id;
}

TEST_P(HostileLocalOffers, ThatComeWhileWeCloseAreAnswered) {
  Attacked t(config());
  t.begin();
  ASSERT_TRUE(t.peer.send(message(MessageKind::data, {}, 1)));
  ASSERT_TRUE(t.until([&] { return t.peer.granted() > 8; }));
  {
    const Buffer b = t.node.filled(20000, 3);
    ASSERT_EQ(t.node.tally.run([&](auto done) { return t.victim.send(b, done); }), Status::ok);
  }
  ASSERT_TRUE(t.until([&] { return !t.peer.heard.empty(); }));
  const std::uint32_t ours = id_of(t.peer.heard.back());
  EXPECT_EQ(t.victim.close(), Status::ok);  // waits for the answer
  t.peer.heard.clear();
  ASSERT_TRUE(send(t, t.peer.local_offer(20000, 77)));
  ASSERT_TRUE(t.until([&] { return !t.peer.heard.empty(); }));
  wire::RendezvousAnswer answer;
  ASSERT_EQ(t.peer.heard[0].header.kind, MessageKind::rendezvous_answer);
  ASSERT_TRUE(wire::decode(t.peer.heard[0].body, answer));
  EXPECT_EQ(answer.id, 77u);
  EXPECT_EQ(answer.verdict, RendezvousVerdict::closing);
  EXPECT_EQ(t.victim.state(), ConnectionState::draining);
  ASSERT_TRUE(t.peer.send(MessageKind::rendezvous_answer,
                          wire::encode(wire::RendezvousAnswer{ours, RendezvousVerdict::received})));
  t.expect_ended(Status::ok, "", 0);
  EXPECT_EQ(t.delivered, 1u);
  EXPECT_EQ(t.node.tally.ended(Status::ok), 1u);
  t.finish();
}

// The engine has records of its own for answers. One that goes directly needs its record for a
// moment only.
TEST_P(HostileLocalOffers, ThatAreRefusedUseUpNoRecords) {
  Attacked t(config());
  bool refuses = true;
  t.node.on_offer = [&](Connection, Offer& o) {
    if (refuses) o.refuse();
  };
  const auto expect_sound = [&t] {
    const auto audit = t.node.engine.audit();
    ASSERT_TRUE(audit) << audit.error().message();
  };
  std::size_t answers = 0;
  const auto offer = [&](std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_TRUE(send(t, t.peer.local_offer(20000, 9)));
      ++answers;
      ASSERT_TRUE(t.until([&] { return t.peer.heard.size() == answers; }));
      ASSERT_TRUE(t.peer.grant(1));
      if (i % 64 != 0) continue;
      ASSERT_NO_FATAL_FAILURE(expect_sound());
    }
  };
  t.begin();
  // No record has served a READ before.
  const std::uint32_t records = spinwire::config::internal_operations(t.node.engine.config());
  ASSERT_NO_FATAL_FAILURE(offer(records + 64));
  EXPECT_EQ(t.delivered, 0u);
  refuses = false;
  ASSERT_NO_FATAL_FAILURE(offer(20));
  EXPECT_EQ(t.delivered, 20u);
  refuses = true;
  ASSERT_NO_FATAL_FAILURE(offer(20));
  ASSERT_TRUE(t.until([&] { return t.node.engine.stats().operations == 0; }));
  (void)t.victim.close();
  t.expect_ended(Status::ok, "", 0);
  t.finish();
}

// As an adapter's. An honest sender knows by its peer's device what that reads.
TEST_F(HostilePeer, ALocalOfferToADeviceThatDoesNotReadThemIsCalledSo) {
  if (!sends_directly()) GTEST_SKIP() << kSoftverbsOnly << "offers without keys";
  std::vector<Error> closed;
  std::vector<Connection> ready;
  Provider provider = spinwire::verbs::softverbs_provider();
  provider.direct_messages = nullptr;
  const Provider* const all[] = {&provider};
  EngineCore core(hostile_config(), Clock::real(),
                  std::move(*spinwire::base::OwnerGuard::create()));
  ASSERT_TRUE(core.open({.providers = all}));
  Node client(hostile_config());
  ListenOptions options;
  options.handlers.on_ready = [&](Connection c) { ready.push_back(c); };
  options.handlers.on_closed = [&](Connection, const Error& e) { closed.push_back(e); };
  Listener listener = core.listen("127.0.0.1:0", options).value();
  Connection c = client.begin(listener.address());
  const auto both = [&](auto&& done) {
    return until({&client}, [&] {
      (void)core.poll();
      return done();
    });
  };
  ASSERT_TRUE(both([&] { return c.ready() && !ready.empty(); }));
  {
    const Buffer b = client.filled(100'000, 1);
    ASSERT_EQ(client.tally.run([&](auto done) { return c.send(b, done); }), Status::ok);
  }
  ASSERT_TRUE(both([&] { return !closed.empty() && !client.closed.empty(); }));
  EXPECT_EQ(closed[0].status, Status::protocol);
  EXPECT_NE(closed[0].message().find("local key, which the device does not read"),
            std::string::npos)
      << closed[0].message();
  client.tally.expect_exact();
  EXPECT_EQ(client.tally.ended(Status::ok), 0u);
  listener = {};
  core.end();
}

}  // namespace
}  // namespace local_offers_test
