// Peers that do not answer, or grant nothing, and so hold what all connections of an engine share.
#include <utility>
#include <vector>

#include "agent/besieged.h"
#include "base/owner_guard.h"

namespace hostile_shares_test {
namespace {

using namespace hostile_peer;  // NOLINT: a test's helpers

class HostileShares : public BesiegedEngine {};

/// Offers open windows, or name memory by its local key.
class HostileOfferKinds : public HostileShares, public testing::WithParamInterface<bool> {
 protected:
  void SetUp() override {
    HostileShares::SetUp();
    if (GetParam() && !sends_directly()) GTEST_SKIP() << kSoftverbsOnly << "offers without keys";
  }
};
INSTANTIATE_TEST_SUITE_P(Of, HostileOfferKinds, testing::Bool(),
                         [](const auto& of) { return of.param ? "NamedMemory" : "OpenedMemory"; });

/// Records of offers, where windows do not limit them.
constexpr std::uint32_t kOfferRecords = 256;

TEST_F(HostileShares, AnswersThatNobodyLetsGoEndTheirOwnConnection) {
  Besieged t;
  for (int i = 0; i < 4; ++i) t.add_without_credit();
  auto& records = t.context().control_messages;
  std::size_t turn = 0;
  ASSERT_TRUE(t.until([&] {
    if (!records.full()) (void)Besieged::ask(*t.strangers[turn++ % 4]);
    return records.full();
  }));
  t.node.closed.clear();
  t.borrow();
  EXPECT_TRUE(t.honest.server.ready());
  ASSERT_TRUE(t.until([&] { return !t.node.closed.empty(); }));
  EXPECT_EQ(t.node.closed[0].status, Status::protocol);
  EXPECT_NE(t.node.closed[0].message().find("grants none"), std::string::npos);
  const auto audit = t.node.engine.audit();
  EXPECT_TRUE(audit) << audit.error().message();
  t.leave();
}

TEST_F(HostileShares, AnswersOfOneHostEndNoConnectionOfAnother) {
  Besieged t;
  auto& records = t.context().control_messages;
  constexpr std::uint32_t kStrangers = 12;
  Stranger& other = t.add_without_credit();
  ASSERT_TRUE(t.until([&] {
    (void)Besieged::ask(other);
    return records.size() > records.capacity() / kStrangers;
  }));
  for (std::uint32_t i = 0; i < kStrangers; ++i) t.join_host(t.add_without_credit());
  // Each of the host's connections has fewer answers than the other, all together have most.
  std::size_t turn = 0;
  t.node.closed.clear();
  ASSERT_TRUE(t.until([&] {
    (void)Besieged::ask(*t.strangers[1 + turn++ % kStrangers]);
    return !t.node.closed.empty();
  }));
  EXPECT_EQ(t.node.closed[0].status, Status::protocol);
  EXPECT_TRUE(other.victim.ready());
  // So it is if the other needs the record.
  ASSERT_TRUE(t.until([&] {
    if (!records.full()) (void)Besieged::ask(*t.strangers[1 + turn++ % kStrangers]);
    return records.full();
  }));
  const std::size_t ended = t.node.closed.size();
  ASSERT_TRUE(Besieged::ask(other));
  ASSERT_TRUE(t.until([&] { return t.node.closed.size() > ended; }));
  EXPECT_TRUE(other.victim.ready());
  const auto audit = t.node.engine.audit();
  EXPECT_TRUE(audit) << audit.error().message();
  t.leave();
}

TEST_F(HostileShares, AnswersWaitForCreditNoLongerThanTheTimeout) {
  Besieged t(short_timeouts());
  Stranger& s = t.add_without_credit();
  t.node.closed.clear();
  t.ask_twice(s);
  expect_lost(t, s, 1, "no credit for the answers");
  t.leave();
}

TEST_F(HostileShares, APollLooksAtFewConnectionsThatWaitForCredit) {
  Besieged t;
  for (int i = 0; i < 12; ++i) {
    Stranger& s = t.add_without_credit();
    t.ask_twice(s);
    ASSERT_TRUE(t.until([&] { return t.context().control_messages.size() == i + 1u; }));
  }
  t.settle();
  EXPECT_LE(t.context().end_of_poll_list.count(), 4u);
  // Each gets its answer once there is credit.
  for (auto& each : t.strangers) ASSERT_TRUE(each->peer.grant(4));
  ASSERT_TRUE(t.until([&] { return t.context().control_messages.size() == 0; }));
  t.settle();
  EXPECT_EQ(t.context().end_of_poll_list.count(), 0u);
  const auto audit = t.node.engine.audit();
  EXPECT_TRUE(audit) << audit.error().message();
  t.leave();
}

/// Credit for more offers than there are records of.
constexpr std::uint32_t kMuchCredit = 300;

/// One peer's messages above the eager limit, until no more are accepted though there is credit.
std::uint32_t offer_all(Besieged& t, Stranger& s, const Buffer& message) {
  std::uint32_t count = 0;
  EXPECT_TRUE(t.until([&] {
    (void)s.peer.write_granted(Peer::kReceives + kMuchCredit);  // it is alive
    while (s.victim.send(message) == Status::ok) ++count;
    return s.victim.snapshot().blocked_by == spinwire::Blocker::windows;
  }));
  return count;
}

/// Strangers of one host, or a single one.
std::vector<Stranger*> add_some(Besieged& t, bool of_host) {
  if (!of_host) return {&t.add()};
  return {&t.add_of_host(), &t.add_of_host(), &t.add_of_host()};
}

class HostileHostShares : public HostileShares, public testing::WithParamInterface<bool> {
 protected:
  /// Offers open windows, or need none.
  void offer_more_than_a_share(const Config& config, std::uint32_t all) {
    Besieged t(config);
    Buffer message = t.node.filled(100'000, 1);
    std::uint32_t offered = 0;
    for (Stranger* const s : add_some(t, GetParam())) offered += offer_all(t, *s, message);
    EXPECT_GE(offered, all / 2);
    EXPECT_LE(offered, all * 3 / 4 + 1);
    const std::uint64_t before = t.friendly.messages;
    ASSERT_EQ(t.honest.server.send(message), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.friendly.messages == before + 1; }));
    message.reset();
    t.leave();
  }
};
INSTANTIATE_TEST_SUITE_P(Connections, HostileHostShares, testing::Bool(),
                         [](const auto& each) { return each.param ? "OfOneHost" : "Single"; });

TEST_P(HostileHostShares, OffersThatNobodyAnswersLeaveSomeForOthers) {
  const Config config = hostile_config_with_keys();
  offer_more_than_a_share(config, config.memory.windows);
}

TEST_P(HostileHostShares, LocalOffersThatNobodyAnswersLeaveSomeForOthers) {
  if (!sends_directly()) GTEST_SKIP() << kSoftverbsOnly << "offers without keys";
  offer_more_than_a_share(hostile_config(), kOfferRecords);
}

TEST_P(HostileOfferKinds, OffersWaitForAnAnswerNoLongerThanTheTimeout) {
  Config c = short_timeouts();
  if (!GetParam()) c.connections.direct_messages = spinwire::DirectPath::off;
  Besieged t(c);
  Stranger& s = t.add();
  Buffer message = t.node.filled(100'000, 1);
  t.node.closed.clear();
  (void)offer_all(t, s, message);
  expect_lost(t, s, Peer::kReceives + kMuchCredit, "answered no offer");
  message.reset();
  t.leave();
}

TEST_F(HostileShares, OperationsOfAPeerThatPollsCompleteInTime) {
  Config c = short_timeouts();
  c.connections.direct_messages = spinwire::DirectPath::off;
  Besieged t(c);
  Stranger& s = t.add();
  t.settle();
  LostRequests device(t, IBV_WR_SEND_WITH_IMM, 1);
  Buffer message = t.node.filled(100, 1);
  t.node.closed.clear();
  EXPECT_EQ(
      t.node.tally.run([&](auto done) { return s.victim.send_with_imm(message.slice(), 7, done); }),
      Status::ok);
  expect_lost(t, s, Peer::kReceives, "lets no operation complete");
  message.reset();
  t.leave();
}

TEST_F(HostileShares, ReadsThatNobodyAnswersDoNotStopTheMessagesOfOthers) {
  Config c = hostile_config();
  c.connections.peer_timeout = 1h;  // a silent peer is not lost
  c.memory.rendezvous_bytes = 16u << 20;
  c.connections.direct_messages = spinwire::DirectPath::off;  // which includes READs at once
  Besieged t(c);
  LostRequests device(t, IBV_WR_RDMA_READ, 2);
  for (int i = 0; i < 2; ++i) {
    Stranger& s = t.add();
    ASSERT_TRUE(
        s.peer.send(MessageKind::rendezvous_offer, wire::encode(s.peer.offer(kLongest, 1))));
  }
  ASSERT_TRUE(t.until([&] { return device.lost == 4; }));
  const std::uint64_t before = t.node.messages;
  Buffer message = t.friendly.filled(100'000, 1);
  ASSERT_EQ(t.honest.client.send(message), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.node.messages == before + 1; }));
  EXPECT_EQ(device.lost, 4u) << "a source has no more than its half";
  const auto audit = t.node.engine.audit();
  EXPECT_TRUE(audit) << audit.error().message();
  message.reset();
  t.leave();
}

TEST_F(HostileShares, ReadsOfOneHostLeaveHalfToOthersThatRead) {
  Config c = hostile_config();
  c.connections.peer_timeout = 1h;
  c.memory.rendezvous_bytes = 16u << 20;
  c.connections.direct_messages = spinwire::DirectPath::off;  // which includes READs at once
  Besieged t(c);
  LostRequests device(t, IBV_WR_RDMA_READ, 3);
  for (int i = 0; i < 3; ++i) device.dead.push_back(t.agent_of(t.add_of_host()).qp->qp_num);
  // All come before the engine polls.
  for (auto& s : t.strangers) {
    ASSERT_TRUE(
        s->peer.send(MessageKind::rendezvous_offer, wire::encode(s->peer.offer(kLongest, 1))));
  }
  Buffer message = t.friendly.filled(kLongest, 1);
  const std::uint64_t before = t.node.messages;
  ASSERT_EQ(t.honest.client.send(message), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.node.messages == before + 1; }));
  EXPECT_EQ(device.lost, 2u);
  message.reset();
  t.leave();
}

/// Asks for one more lease if there is credit.
bool ask_for_lease(Stranger& s, std::uint64_t bytes, std::uint32_t& sent) {
  if (s.peer.granted() <= sent ||
      !s.peer.send(message(MessageKind::lease_request,
                           wire::encode(wire::LeaseRequest{bytes, 1'000'000'000, sent, 8, 3}),
                           wire::message_flag::kWantCredit)))
    return false;
  ++sent;
  return true;
}

TEST_P(HostileHostShares, LeasesLeaveRecordsAndMemoryForOthers) {
  for (const std::uint64_t bytes : {64u, 256u << 10}) {
    Config c = hostile_config();
    c.leases.count = c.leases.maximum;
    c.memory.lease_bytes = 8u << 20;
    Besieged t(c);
    SCOPED_TRACE(bytes);
    for (Stranger* const s : add_some(t, GetParam())) {
      std::uint32_t sent = 0;
      ASSERT_TRUE(t.until([&] {
        if (sent < c.leases.maximum && ask_for_lease(*s, bytes, sent)) (void)s->peer.grant(1);
        return s->peer.heard.size() >= c.leases.maximum;
      }));
    }
    const auto& records = t.context().leases->granted;
    EXPECT_LE(records.size(), records.capacity() * 3 / 4);
    EXPECT_LE(t.context().sources.lease_bytes, c.memory.lease_bytes * 3 / 4);
    t.borrow();
    t.leave();
  }
}

TEST_F(HostileShares, LeasesAreZeroedWithinABudget) {
  Config c = hostile_config();
  c.leases.count = c.leases.maximum;
  c.engine.control = ControlMode::manual;
  Besieged t(c);
  Stranger& s = t.add();
  constexpr std::uint32_t kCount = 12;
  std::uint32_t sent = 0;
  for (int i = 0; i < 2000; ++i) {  // without a control step
    s.peer.poll();
    if (sent < kCount) (void)ask_for_lease(s, 64u << 10, sent);
    (void)t.node.engine.poll();
  }
  EXPECT_EQ(sent, kCount);
  EXPECT_LE(s.peer.heard.size(), 4u) << "256 KiB";
  ASSERT_TRUE(t.until([&] { return s.peer.heard.size() == kCount; }));
  t.leave();
}

TEST_F(HostileShares, HostsTakeTurnsAtSetUp) {
  spinwire::detail::EngineCore core(small_config(), Clock::real(),
                                    std::move(*spinwire::base::OwnerGuard::create()));
  ASSERT_TRUE(core.open());
  auto& ctx = core.context;
  const auto make = [&](const char* from) {
    Agent* const a =
        *spinwire::agent::make(ctx, {.peer = from, .attributes = ctx.attributes}, "test");
    spinwire::agent::use_account_of(ctx, *a, *Address::parse(from));
    return a;
  };
  std::vector<Agent*> flood;
  for (int i = 0; i < 8; ++i) flood.push_back(make("10.0.0.1:7"));
  Agent* const other = make("10.0.0.2:7");
  EXPECT_EQ(spinwire::agent::pop_setup_queue(ctx), flood[0]);
  EXPECT_EQ(spinwire::agent::pop_setup_queue(ctx), other);
  EXPECT_EQ(spinwire::agent::pop_setup_queue(ctx), flood[1]);
  for (Agent* const a : {flood[0], other, flood[1]}) spinwire::agent::queue_setup(ctx, *a);
  const auto audit = spinwire::agent::audit(ctx);
  EXPECT_TRUE(audit) << audit.error().message();
  core.end();
}

}  // namespace
}  // namespace hostile_shares_test
