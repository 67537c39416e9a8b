// Peers that do not answer, or grant nothing, and so hold what all connections of an engine share.
#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/connecting.h"
#include "agent/hostile_peer.h"
#include "base/owner_guard.h"

namespace hostile_shares_test {
namespace {

using namespace hostile_peer;  // NOLINT: a test's helpers
using spinwire::agent::Agent;
using spinwire::control::Address;

/// A raw peer, and the engine's end of its connection.
struct Stranger {
  Peer peer;
  Connection victim;
};

/// An engine with an honest connection, and many to raw peers.
struct Besieged : Attacked {
  explicit Besieged(const Config& c = hostile_config()) : Attacked(c) {}

  template <typename Done>
  bool until(Done&& done) {
    return Attacked::until([&] {
      for (auto& each : strangers) {
        each->peer.poll();
        each->peer.control();
      }
      return done();
    });
  }
  /// Connects one more raw peer; `change` may change its endpoint.
  template <typename Change>
  Stranger& add(Change&& change) {
    auto made = std::make_unique<Stranger>();
    Stranger& s = *made;
    strangers.push_back(std::move(made));
    PrepareOptions options;
    options.handlers = node.handlers();
    s.victim = *node.engine.prepare(options);
    EXPECT_TRUE(until([&] { return s.victim.endpoint().has_value(); }));
    Endpoint mine = s.peer.open();
    change(mine);
    s.peer.join(*s.victim.endpoint());
    EXPECT_TRUE(s.victim.join(mine));
    EXPECT_TRUE(until([&] { return s.victim.ready(); }));
    return s;
  }
  Stranger& add() {
    return add([](Endpoint&) {});
  }
  Stranger& add_without_credit() {
    return add([](Endpoint& e) { e.credits = 1; });
  }
  /// Another raw peer of one and the same host of the network.
  Stranger& add_of_host() {
    Stranger& s = add();
    spinwire::agent::use_account_of(context(), agent_of(s), *Address::parse("10.0.0.1:7"));
    return s;
  }
  Agent& agent_of(const Stranger& s) {
    Agent* const a = spinwire::agent::find_by_qpn(context(), s.victim.endpoint()->qp_num);
    EXPECT_NE(a, nullptr);
    return *a;
  }
  /// Asks for memory that the engine refuses, so that it owes an answer.
  static bool ask(Stranger& s) {
    return s.peer.send(MessageKind::lease_request,
                       wire::encode(wire::LeaseRequest{1ull << 40, 1'000'000, 1, 8, 3}));
  }
  /// The first answer uses the only credit; the second waits.
  void ask_twice(Stranger& s) {
    ASSERT_TRUE(ask(s));
    ASSERT_TRUE(until([&] { return s.peer.granted() == 2; }));
    ASSERT_TRUE(ask(s));
  }
  [[nodiscard]] spinwire::agent::EngineContext& context() {
    return spinwire::detail::core_of(node.engine)->context;
  }
  /// Checks that the honest connection still gets answers to its control messages.
  void borrow() {
    std::optional<Status> got;
    spinwire::LeaseRefusal refusal{};
    ASSERT_TRUE(until([&] {
      return honest.client.request_memory(64, {}, [&](spinwire::LeaseReply& r) {
        got = r.status;
        refusal = r.refusal;
      }) == Status::ok;
    }));
    ASSERT_TRUE(until([&] { return got.has_value(); }));
    EXPECT_EQ(*got, Status::ok) << to_string(refusal);
  }
  void leave() {
    for (auto& each : strangers) each->peer.close();
    for (auto& each : strangers) (void)each->victim.close();
    EXPECT_TRUE(until([&] { return node.engine.stats().connections == 1; }));
    finish();
  }

  std::vector<std::unique_ptr<Stranger>> strangers;
};

class HostileShares : public HostilePeer {
 protected:
  /// A victim with short time-outs.
  static Config short_timeouts() {
    Config c = hostile_config();
    c.connections.peer_timeout = 50ms;
    c.connections.keepalive_interval = 10ms;
    c.connections.rendezvous_timeout = 50ms;
    return c;
  }
  /// The stranger's process is alive, since it grants what is granted already. Its connection ends
  /// all the same, because of what it holds up.
  static void expect_lost(Besieged& t, Stranger& s, std::uint32_t granted, const char* why) {
    ASSERT_TRUE(t.until([&] {
      (void)s.peer.write_granted(granted);
      return !t.node.closed.empty();
    }));
    EXPECT_EQ(t.node.closed[0].status, Status::peer_lost);
    EXPECT_NE(t.node.closed[0].message().find(why), std::string::npos)
        << t.node.closed[0].message();
  }
};

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

/// One peer's messages above the eager limit, until no more are accepted.
std::uint32_t offer_all(Connection c, const Buffer& message) {
  std::uint32_t count = 0;
  while (c.send(message) == Status::ok) ++count;
  return count;
}

/// Strangers of one host, or a single one.
std::vector<Stranger*> add_some(Besieged& t, bool of_host) {
  if (!of_host) return {&t.add()};
  return {&t.add_of_host(), &t.add_of_host(), &t.add_of_host()};
}

class HostileHostShares : public HostileShares, public testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(Connections, HostileHostShares, testing::Bool(),
                         [](const auto& each) { return each.param ? "OfOneHost" : "Single"; });

TEST_P(HostileHostShares, OffersThatNobodyAnswersLeaveSomeForOthers) {
  Besieged t;
  Buffer message = t.node.filled(100'000, 1);
  std::uint32_t offered = 0;
  for (Stranger* const s : add_some(t, GetParam())) offered += offer_all(s->victim, message);
  EXPECT_GE(offered, t.windows() / 2);
  EXPECT_LE(offered, t.windows() * 3 / 4 + 1);
  const std::uint64_t before = t.friendly.messages;
  ASSERT_EQ(t.honest.server.send(message), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.friendly.messages == before + 1; }));
  message.reset();
  t.leave();
}

TEST_F(HostileShares, OffersWaitForAnAnswerNoLongerThanTheTimeout) {
  Besieged t(short_timeouts());
  Stranger& s = t.add();
  Buffer message = t.node.filled(100'000, 1);
  t.node.closed.clear();
  (void)offer_all(s.victim, message);
  expect_lost(t, s, Peer::kReceives, "answered no offer");
  message.reset();
  t.leave();
}

/// Loses all requests of some queue pairs from the first of a kind on, as adapters of peers that
/// never answer.
struct LostRequests {
  LostRequests(Besieged& t, ibv_wr_opcode of, std::uint32_t most)
      : ops(t.context().device->context()->ops), opcode(of), limit(most) {
    self = this;
    plain = std::exchange(ops.post_send, [](ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad) {
      return self->loses(qp->qp_num, wr) ? 0 : self->plain(qp, wr, bad);
    });
  }
  LostRequests(const LostRequests&) = delete;
  LostRequests& operator=(const LostRequests&) = delete;
  ~LostRequests() { ops.post_send = plain; }
  bool loses(std::uint32_t qp_num, const ibv_send_wr* wr) {
    const bool is_dead = std::find(dead.begin(), dead.end(), qp_num) != dead.end();
    if (!is_dead && (wr->opcode != opcode || dead.size() == limit)) return false;
    if (!is_dead) dead.push_back(qp_num);
    for (; wr != nullptr; wr = wr->next) lost += wr->opcode == opcode ? 1 : 0;
    return true;
  }
  ibv_context_ops& ops;
  ibv_wr_opcode opcode;
  std::size_t limit;
  int (*plain)(ibv_qp*, ibv_send_wr*, ibv_send_wr**) = nullptr;
  std::vector<std::uint32_t> dead;
  std::uint32_t lost = 0;
  static inline LostRequests* self = nullptr;
};

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
