// Peers that do not answer, or grant nothing, and so hold what all connections of an engine share.
#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "agent/hostile_peer.h"

namespace hostile_shares_test {
namespace {

using namespace hostile_peer;  // NOLINT: a test's helpers

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
  Stranger& add_without_credit() {
    return add([](Endpoint& e) { e.credits = 1; });
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
    ASSERT_TRUE(until([&] {
      return honest.client.request_memory(
                 64, {}, [&](spinwire::LeaseReply& r) { got = r.status; }) == Status::ok;
    }));
    ASSERT_TRUE(until([&] { return got.has_value(); }));
    EXPECT_EQ(*got, Status::ok);
  }
  void leave() {
    for (auto& each : strangers) each->peer.close();
    for (auto& each : strangers) (void)each->victim.close();
    EXPECT_TRUE(until([&] { return node.engine.stats().connections == 1; }));
    finish();
  }

  std::vector<std::unique_ptr<Stranger>> strangers;
};

class HostileShares : public HostilePeer {};

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
  Config c = hostile_config();
  c.connections.peer_timeout = 50ms;
  c.connections.keepalive_interval = 10ms;
  Besieged t(c);
  Stranger& s = t.add_without_credit();
  t.node.closed.clear();
  t.ask_twice(s);
  // Its process is alive: it grants what is granted already.
  ASSERT_TRUE(t.until([&] {
    (void)s.peer.write_granted(1);
    return !t.node.closed.empty();
  }));
  EXPECT_EQ(t.node.closed[0].status, Status::peer_lost);
  EXPECT_NE(t.node.closed[0].message().find("no credit for the answers"), std::string::npos)
      << t.node.closed[0].message();
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

}  // namespace
}  // namespace hostile_shares_test
