// Peers that hold up the work requests for their leases, or that ask for much memory: what others
// are leased does not wait for them. Control steps are counted, not time.
#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/connecting.h"
#include "agent/hostile_peer.h"

namespace stuck_leases_test {
namespace {

using namespace hostile_peer;  // NOLINT: a test's helpers
using spinwire::LeaseId;
using spinwire::LeaseOptions;
using spinwire::LeaseReply;
using spinwire::RemoteMemory;
using spinwire::Returned;
using spinwire::ReturnedBy;
using spinwire::agent::Agent;
using spinwire::agent::kLeaseRequests;
using spinwire::control::Address;
using State = spinwire::agent::LeaseGranted::State;

constexpr std::uint64_t kMiB = 1u << 20;
constexpr std::uint32_t kRequests = 12;  ///< of a peer, at once

inline Config lender_config() {
  Config c = hostile_config();
  c.engine.control = ControlMode::manual;
  c.connections.direct_messages = spinwire::DirectPath::off;  // a peer must consume each message
  c.connections.peer_timeout = 1h;  // a peer that consumes nothing is not lost
  c.memory.lease_bytes = 64 * kMiB;
  c.memory.windows = 1024;
  c.memory.receive_bytes = 16 * kMiB;
  c.queues.receive_depth = 1024;  // each peer gets credit for all of its requests
  c.leases.maximum = 1024;
  c.leases.count = 64;
  return c;
}

struct Borrower {
  Peer peer;
  Connection victim;
  std::uint32_t sent = 0;
  bool polls = true;  ///< else it consumes nothing
};

/// An engine that leases memory to raw peers and to an honest one.
struct Lender : Attacked {
  explicit Lender(const Config& c = lender_config()) : Attacked(c) {
    node.on_returned = [this](Connection, const Returned& r) { returned.push_back(r.how); };
  }
  ~Lender() { node.on_returned = nullptr; }

  template <typename Done>
  bool until(Done&& done) {
    return Attacked::until([&] {
      for (auto& each : borrowers) {
        if (each->polls) each->peer.poll();
        each->peer.control();
      }
      return done();
    });
  }
  void settle(int rounds = 200) {
    ASSERT_TRUE(until([&] { return rounds-- == 0; }));
  }
  Borrower& add() {
    borrowers.push_back(std::make_unique<Borrower>());
    Borrower& b = *borrowers.back();
    PrepareOptions options;
    options.handlers = node.handlers();
    b.victim = *node.engine.prepare(options);
    EXPECT_TRUE(until([&] { return b.victim.endpoint().has_value(); }));
    const Endpoint mine = b.peer.open();
    b.peer.join(*b.victim.endpoint());
    EXPECT_TRUE(b.victim.join(mine));
    EXPECT_TRUE(until([&] { return b.victim.ready(); }));
    // It earns credit by messages that want some.
    EXPECT_TRUE(until([&] {
      const std::uint32_t credits = b.peer.granted() - b.sent;
      if (credits == 0 || credits >= kRequests) return credits != 0;
      EXPECT_TRUE(b.peer.send(message(MessageKind::data, {}, wire::message_flag::kWantCredit)));
      ++b.sent;
      return false;
    }));
    return b;
  }
  /// A peer that consumes nothing, and asks for leases.
  Borrower& add_stuck() {
    Borrower& b = add();
    b.polls = false;
    for (std::uint32_t i = 0; i < kRequests; ++i) ask(b, 64);
    settle();
    EXPECT_EQ(agent_of(b).leases.bindings_outstanding, kLeaseRequests);
    EXPECT_GE(waiting(b), kRequests / 2);
    return b;
  }
  static void ask(Borrower& b, std::uint64_t size, std::uint64_t time = 60'000'000'000) {
    const wire::LeaseRequest request{size, time, b.sent++, 8, 3};
    ASSERT_TRUE(b.peer.send(message(MessageKind::lease_request, wire::encode(request))));
  }
  [[nodiscard]] spinwire::agent::EngineContext& context() {
    return spinwire::detail::core_of(node.engine)->context;
  }
  Agent& agent_of(const Borrower& b) {
    Agent* const a = spinwire::agent::find_by_qpn(context(), b.victim.endpoint()->qp_num);
    EXPECT_NE(a, nullptr);
    return *a;
  }
  std::uint32_t count(const Borrower& b, State state) {
    std::uint32_t found = 0;
    for (const auto& lease : agent_of(b).leases.granted) found += lease.state == state ? 1 : 0;
    return found;
  }
  std::uint32_t waiting(const Borrower& b) { return count(b, State::waiting); }

  /// Control steps of the engine until the honest peer has a lease of so many bytes.
  std::uint32_t steps_to_borrow(std::uint64_t size) {
    constexpr std::uint32_t kMost = 10'000;
    constexpr int kPollsPerStep = 64;
    RemoteMemory memory;
    EXPECT_EQ(honest.client.request_memory(size, {},
                                           [&](LeaseReply& r) {
                                             EXPECT_EQ(r.status, Status::ok);
                                             memory = std::move(r.memory);
                                           }),
              Status::ok);
    std::uint32_t steps = 0;
    for (; !memory && steps < kMost; ++steps) {
      for (int i = 0; i < kPollsPerStep && !memory; ++i) {
        (void)friendly.poll();
        (void)node.engine.poll();
      }
      if (memory) break;
      (void)node.engine.poll_control();
    }
    EXPECT_TRUE(memory);
    memory.release();
    settle();
    return steps;
  }
  void check() {
    const auto audit = node.engine.audit();
    EXPECT_TRUE(audit) << audit.error().message();
  }
  void leave() {
    check();
    for (auto& each : borrowers) each->peer.close();
    for (auto& each : borrowers) (void)each->victim.close();
    EXPECT_TRUE(until([&] { return node.engine.stats().connections == 1; }));
    EXPECT_EQ(node.engine.memory_stats(Pool::lease).blocks_used, 0u);
    finish();
  }

  std::vector<std::unique_ptr<Borrower>> borrowers;
  std::vector<ReturnedBy> returned;
};

class StuckLeases : public HostilePeer {};

TEST_F(StuckLeases, DelayNobodyElses) {
  Lender t;
  const std::uint32_t alone = t.steps_to_borrow(2 * kMiB);
  for (int i = 0; i < 12; ++i) t.add_stuck();
  EXPECT_EQ(t.steps_to_borrow(64), 0u);
  EXPECT_EQ(t.steps_to_borrow(2 * kMiB), alone);
  t.leave();
}

TEST_F(StuckLeases, GoOnOnceTheirPeerConsumesMessages) {
  Lender t;
  Borrower& b = t.add_stuck();
  t.check();
  b.polls = true;
  ASSERT_TRUE(t.until([&] { return t.count(b, State::open) == kRequests; }));
  t.leave();
}

TEST_F(StuckLeases, AreTakenBackAtOnceWhileTheyWait) {
  Lender t;
  Borrower& b = t.add_stuck();
  {
    const Buffer memory = t.node.filled(64, 1);
    std::optional<Status> told;
    LeaseId id;
    ASSERT_EQ(b.victim.lease(
                  memory.slice(), {}, [&](LeaseReply& r) { told = r.status; }, &id),
              Status::ok);
    ASSERT_EQ(b.victim.recall(id), Status::ok);
    EXPECT_FALSE(told) << "a callback inside of the call";
    t.check();
    ASSERT_TRUE(t.until([&] { return told.has_value(); }));
    EXPECT_EQ(told, Status::lease_expired);
    EXPECT_EQ(t.returned, std::vector{ReturnedBy::recall});
  }
  t.leave();
}

TEST_F(StuckLeases, EndWithTheConnectionWhenTheirKeysCannotBeClosed) {
  Config c = lender_config();
  c.connections.close_timeout = 50ms;
  c.queue_pair.ack_timeout = 8;
  Lender t(c);
  Borrower& b = t.add();
  Lender::ask(b, 64, 1'000'000'000);
  ASSERT_TRUE(t.until([&] { return !b.peer.heard.empty(); }));
  b.polls = false;
  for (std::uint32_t i = 1; i < kRequests; ++i) Lender::ask(b, 64);
  ASSERT_TRUE(t.until([&] { return !t.node.closed.empty(); }));
  EXPECT_EQ(t.node.closed[0].status, Status::peer_lost);
  EXPECT_NE(t.node.closed[0].message().find("does not end in time"), std::string::npos)
      << t.node.closed[0].message();
  t.leave();
}

/// Windows of a connection are unbound two at a time.
TEST_F(StuckLeases, ManyThatEndAtOnceHaveTimeAsLongAsOneAfterTheOtherDoes) {
  constexpr std::chrono::milliseconds kTimeout = 300ms;
  constexpr std::chrono::milliseconds kBetweenPolls = kTimeout / 4;
  Config c = lender_config();
  c.connections.close_timeout = kTimeout;
  Lender t(c);
  Borrower& b = t.add();
  for (std::uint32_t i = 0; i < kRequests; ++i) Lender::ask(b, 64);
  ASSERT_TRUE(t.until([&] { return t.count(b, State::open) == kRequests; }));
  const auto left = [&] { return t.count(b, State::closing) + t.count(b, State::unbinding); };
  std::vector<spinwire::agent::LeaseGranted*> all;
  for (auto& lease : t.agent_of(b).leases.granted) all.push_back(&lease);
  for (auto* lease : all) spinwire::agent::close_lease(t.context(), *lease, ReturnedBy::expiry);
  const auto began = std::chrono::steady_clock::now();
  auto due = began;
  while (b.victim.ready() && left() != 0) {
    b.peer.poll();
    (void)t.node.engine.poll();
    (void)t.node.engine.poll_control();
    for (due += kBetweenPolls; std::chrono::steady_clock::now() < due;) {
    }
  }
  if (!b.victim.ready()) {
    ASSERT_TRUE(t.until([&] { return !t.node.closed.empty(); }));
    FAIL() << t.node.closed[0].message();
  }
  EXPECT_GT(std::chrono::steady_clock::now() - began, kTimeout) << "too fast to show anything";
  t.leave();
}

TEST_F(StuckLeases, MemoryThatOneHostAsksForDelaysOthersByHalf) {
  Lender t;
  const std::uint32_t alone = t.steps_to_borrow(2 * kMiB);
  for (int i = 0; i < 3; ++i) {
    Borrower& b = t.add();
    spinwire::agent::use_account_of(t.context(), t.agent_of(b), *Address::parse("10.0.0.1:7"));
  }
  for (auto& b : t.borrowers) {
    for (int i = 0; i < 6; ++i) Lender::ask(*b, 3 * kMiB / 2);
  }
  for (int i = 0; i < 64; ++i) (void)t.node.engine.poll();  // without a control step
  for (auto& b : t.borrowers) EXPECT_EQ(t.waiting(*b), 6u);
  t.check();
  EXPECT_LE(t.steps_to_borrow(2 * kMiB), 2 * alone);
  t.leave();
}

}  // namespace
}  // namespace stuck_leases_test
