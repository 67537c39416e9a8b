// Peers that complete a handshake over TCP, and say nothing over RDMA: which gives way, and when.
#include "agent/unheard_peers.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "agent/agent.h"
#include "agent/connecting.h"
#include "base/internals.h"
#include "base/owner_guard.h"
#include "base/unique_fd.h"
#include "control/loopback.h"
#include "engine/engine_core.h"
#include "engine/harness.h"
#include "wire/credit_word.h"
#include "wire/handshake.h"

namespace unheard_peers_test {
namespace {

using namespace engine_test;  // names of a test namespace of its own
using spinwire::agent::Agent;
using spinwire::agent::EngineContext;
namespace wire = spinwire::wire;

constexpr std::uint32_t kMaximum = 4;

/// Nothing is said later than at the end of a handshake.
Config quiet_config() {
  Config c = small_config();
  c.connections.keepalive_interval = 1h;
  c.connections.peer_timeout = 1h;
  return c;
}
Config server_config() {
  Config c = quiet_config();
  c.connections.maximum = kMaximum;
  return c;
}

EngineContext& context_of(Node& node) { return spinwire::detail::core_of(node.engine)->context; }

bool awaits_any(Node& node) { return spinwire::agent::find_unheard(context_of(node), nullptr).any; }

/// An endpoint of a device that is there, but belongs to no connection.
class Strangers {
 public:
  Strangers() {
    auto made = node_.engine.prepare({});
    EXPECT_TRUE(made) << made.error().message();
    EXPECT_TRUE(until({&node_}, [&] { return made->endpoint().has_value(); }));
    endpoint_ = *made->endpoint();
  }
  /// Sends a hello.
  spinwire::base::UniqueFd begin(const Node& server) const {
    auto fd = loopback::plain_client(*spinwire::control::Address::parse(server.listener.address()));
    say(fd, wire::encode(wire::Hello{endpoint_}));
    return fd;
  }
  static bool is_answered(const spinwire::base::UniqueFd& fd) {
    pollfd waiting{fd.get(), POLLIN, 0};
    return ::poll(&waiting, 1, 0) == 1;
  }
  /// Says that it is ready, once the server has answered.
  static void confirm(Node& server, const spinwire::base::UniqueFd& fd) {
    ASSERT_TRUE(until({&server}, [&] { return is_answered(fd); }));
    const std::size_t before = server.ready.size();
    say(fd, wire::encode(wire::Ready{context_of(server).incarnation}));
    ASSERT_TRUE(until({&server}, [&] { return server.ready.size() > before; }));
  }

 private:
  static void say(const spinwire::base::UniqueFd& fd, const wire::Frame& frame) {
    EXPECT_EQ(::send(fd.get(), frame.bytes().data(), frame.bytes().size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(frame.bytes().size()));
  }

  Node node_{small_config()};
  spinwire::Endpoint endpoint_;
};

TEST(EngineUnheardPeers, AClientIsHeardAsSoonAsItIsReady) {
  Pair pair(quiet_config());
  EXPECT_TRUE(pair.until([&] { return !awaits_any(pair.server); }));
  finish(pair.client, pair.server);
}

TEST(EngineUnheardPeers, AClientIsHeardWhileItsApplicationIsBusy) {
  Node server(quiet_config()), client(quiet_config());
  server.listen();
  bool was_heard = false;
  client.on_ready = [&](Connection) {
    ASSERT_TRUE(until({&server}, [&] { return !server.ready.empty(); }));
    was_heard = until(
        {&server}, [&] { return !awaits_any(server); }, 5s);
  };
  (void)client.begin(server);
  ASSERT_TRUE(until({&client, &server}, [&] { return !client.ready.empty(); }));
  EXPECT_TRUE(was_heard);
  finish(client, server);
}

TEST(EngineUnheardPeers, AClientThatLacksARecordIsHeardAtTheEndOfAPoll) {
  Node server(quiet_config()), client(quiet_config());
  server.listen();
  (void)client.begin(server);
  auto& records = context_of(client).operations;
  std::vector<spinwire::agent::Operation*> taken;
  while (auto* const each = records.acquire_for_agent()) taken.push_back(each);
  ASSERT_TRUE(
      until({&client, &server}, [&] { return !client.ready.empty() && !server.ready.empty(); }));
  for (auto* const each : taken)
    records.release(*each, spinwire::agent::OperationKind::credit_write);
  EXPECT_TRUE(until(
      {&client, &server}, [&] { return !awaits_any(server); }, 5s));
  finish(client, server);
}

TEST(EngineUnheardPeers, OneGivesWayToANewPeerAndThoseThatWereHeardStay) {
  Node server(server_config()), client(quiet_config());
  server.listen();
  const Strangers strangers;
  const Ends heard = connect(client, server);
  std::vector<spinwire::base::UniqueFd> silent;
  for (std::uint32_t i = 1; i < kMaximum; ++i) {
    silent.push_back(strangers.begin(server));
    ASSERT_NO_FATAL_FAILURE(Strangers::confirm(server, silent.back()));
  }
  EXPECT_EQ(server.engine.stats().connections, kMaximum);
  EXPECT_TRUE(server.closed.empty());
  for (std::uint32_t i = 1; i < kMaximum; ++i) {
    const Connection next = client.begin(server);
    ASSERT_TRUE(until({&client, &server}, [&] { return next.ready() || !client.closed.empty(); }));
    ASSERT_TRUE(next.ready()) << client.closed.back().message();
    ASSERT_EQ(server.closed.size(), i);
    EXPECT_EQ(server.closed.back().status, Status::limit) << server.closed.back().message();
  }
  // Now all were heard, and nobody gives way any more.
  ASSERT_TRUE(until({&client, &server}, [&] { return !awaits_any(server); }));
  (void)client.begin(server);
  ASSERT_TRUE(until({&client, &server}, [&] { return !client.closed.empty(); }));
  EXPECT_EQ(client.closed.back().status, Status::limit) << client.closed.back().message();
  EXPECT_TRUE(heard.client.ready() && heard.server.ready());
  const auto audit = server.engine.audit();
  EXPECT_TRUE(audit) << audit.error().message();
}

TEST(EngineUnheardPeers, OneHasItsTimeFirst) {
  std::uint64_t ticks = 1'000'000'000;
  Node server(server_config(), &ticks);
  server.listen();
  const Strangers strangers;
  std::vector<spinwire::base::UniqueFd> silent;
  for (std::uint32_t i = 0; i < kMaximum; ++i) {
    silent.push_back(strangers.begin(server));
    ASSERT_NO_FATAL_FAILURE(Strangers::confirm(server, silent.back()));
  }
  const auto next = strangers.begin(server);
  ticks += 49'000'000;
  const auto& port = spinwire::detail::core_of(server.engine)->control;
  ASSERT_TRUE(until({&server}, [&] { return port.waiting_for_connections() == 1; }));
  for (int i = 0; i < 100; ++i) (void)server.poll();
  EXPECT_TRUE(server.closed.empty());
  EXPECT_FALSE(Strangers::is_answered(next));
  ticks += 1'000'000;
  ASSERT_TRUE(until({&server}, [&] {
    ticks += 100'000;  // the goodbye has its time
    return Strangers::is_answered(next);
  }));
  EXPECT_EQ(server.closed.size(), 1u);
}

TEST(EngineUnheardPeers, OneThatGivesWayIsToldToComeBack) {
  Pair pair(quiet_config());
  EngineContext& ctx = context_of(pair.server);
  for (Agent& a : ctx.agents) {
    spinwire::agent::give_way(ctx, a);
    break;
  }
  ASSERT_TRUE(
      pair.until([&] { return !pair.client.closed.empty() && !pair.server.closed.empty(); }));
  EXPECT_EQ(pair.client.closed[0].goodbye.reason, spinwire::GoodbyeReason::overloaded);
  EXPECT_EQ(pair.server.closed[0].status, Status::limit);
}

/// An engine with connections of several hosts, none of which says anything.
class EngineUnheardChoice : public testing::Test {
 protected:
  EngineUnheardChoice()
      : core_(config(), Clock::manual(&ticks_), std::move(*spinwire::base::OwnerGuard::create())) {
    EXPECT_TRUE(core_.open());
  }
  ~EngineUnheardChoice() override { core_.end(); }
  static Config config() {
    Config c = small_config();
    c.connections.maximum = 16;
    return c;
  }
  static Config large_config() {
    Config c = small_config();
    c.connections.maximum = 128;
    c.queues.receive_depth = 1024;
    c.queues.completion_depth = 4096;
    c.memory.receive_bytes = 8u << 20;
    return c;
  }
  static spinwire::control::Address address(const char* host) {
    return *spinwire::control::Address::parse(host);
  }
  Agent& add(const char* host) {
    Agent& a = **spinwire::agent::make(
        core_.context, {.peer = host, .attributes = core_.context.attributes}, "test");
    const std::uint64_t subject = spinwire::agent::subject_of(a);
    core_.connector.count(subject, address(host));
    a.setup.was_ready = true;
    core_.connector.on_confirmed(subject);
    a.activity.last_heard = ticks_;
    spinwire::agent::await_peer(core_.context, a);
    return a;
  }
  Agent* due(const spinwire::control::Address* of = nullptr) {
    return spinwire::agent::find_unheard(core_.context, of).due;
  }

  std::uint64_t ticks_ = 1'000'000'000;
  spinwire::detail::EngineCore core_;
};

TEST_F(EngineUnheardChoice, TheOldestThatWasNotHeardSince) {
  Agent& first = add("10.0.0.1:7");
  ticks_ += 1000;
  Agent& second = add("10.0.0.2:7");
  (void)add("10.0.0.2:8");
  EXPECT_EQ(due(), nullptr);
  ticks_ += 50'000'000;
  EXPECT_EQ(due(), &first);
  first.activity.messages_received = 1;
  EXPECT_EQ(due(), &second);
}

TEST_F(EngineUnheardChoice, WhileASourceHasAQuarterOnlyItsPeersGiveWay) {
  Agent& slow = add("10.0.0.1:7");
  ticks_ += 50'000'000;
  EXPECT_EQ(due(), &slow);
  std::vector<Agent*> heavy;
  for (int i = 0; i < 5; ++i) heavy.push_back(&add("10.0.0.2:7"));
  EXPECT_EQ(due(), nullptr);
  ticks_ += 5'000'000;
  EXPECT_EQ(due(), heavy[0]);
}

TEST_F(EngineUnheardChoice, ASourceThatHasItsShareMakesRoomItself) {
  (void)add("10.0.0.1:7");
  Agent& own = add("10.0.0.2:7");
  const auto source = address("10.0.0.2:9");
  EXPECT_EQ(due(&source), nullptr);
  ticks_ += 5'000'000;
  EXPECT_EQ(due(&source), &own);
  own.activity.messages_received = 1;
  EXPECT_FALSE(spinwire::agent::find_unheard(core_.context, &source).any);
}

TEST_F(EngineUnheardChoice, InAFloodPeersHaveLessTime) {
  Agent& first = add("10.0.0.1:7");
  ticks_ += 30'000'000;
  EXPECT_EQ(due(), nullptr);
  for (int i = 0; i < 10; ++i) core_.context.sources.grace.shorten(ticks_);
  EXPECT_EQ(due(), &first);
  ticks_ += 50'000'000;  // the flood is over
  spinwire::agent::stop_awaiting_peer(core_.context, first);
  (void)add("10.0.0.2:7");
  ticks_ += 49'000'000;
  EXPECT_EQ(due(), nullptr);
}

// One source has six connections, so that its next needs three free records of 16.
TEST_F(EngineUnheardChoice, ANewPeerWaitsForAsManyAsItsSourceLacks) {
  for (int i = 0; i < 6; ++i) add("10.0.0.1:7").activity.messages_received = 1;
  for (int i = 0; i < 7; ++i) add("10.0.0.3:7").activity.messages_received = 1;
  (void)add("10.0.0.2:7");
  (void)add("10.0.0.2:7");
  ticks_ += 50'000'000;
  for (int i = 0; i < 4; ++i) {
    const auto room = core_.connector.admit(address("10.0.0.1:9"), nullptr);
    ASSERT_TRUE(room) << room.error().message();
    EXPECT_FALSE(room->now);
  }
  EXPECT_EQ(core_.context.sources.unheard_count, 0u);
}

// Thousands may have come and been heard since the last search.
TEST_F(EngineUnheardChoice, ASearchRemovesOnlyFewThatWereHeard) {
  spinwire::detail::EngineCore large(large_config(), Clock::manual(&ticks_),
                                     std::move(*spinwire::base::OwnerGuard::create()));
  ASSERT_TRUE(large.open());
  const std::uint32_t count = large_config().connections.maximum;
  for (std::uint32_t i = 0; i < count; ++i) {
    Agent& a = **spinwire::agent::make(
        large.context, {.peer = "10.0.0.1:7", .attributes = large.context.attributes}, "test");
    spinwire::agent::await_peer(large.context, a);
    a.activity.messages_received = 1;
  }
  const auto search = [&] { return spinwire::agent::find_unheard(large.context, nullptr); };
  EXPECT_TRUE(search().any);
  EXPECT_GE(large.context.sources.unheard_count, count - 64);
  std::uint32_t searches = 1;
  while (search().any) {
    EXPECT_EQ(search().due, nullptr);
    ASSERT_LT(++searches, count);
  }
  EXPECT_EQ(large.context.sources.unheard_count, 0u);
  large.end();
}

TEST_F(EngineUnheardChoice, APeerWhoseCellSomebodyElseWroteHasItsTimeAnew) {
  Agent& a = add("10.0.0.1:7");
  spinwire::agent::CreditCell cell{0};
  a.credit.token = 4711;
  a.liveness.cell_word = wire::encode(wire::CreditWord{}, a.credit.token);
  a.credit.cell = &cell;  // its word was overwritten
  ticks_ += 50'000'000;
  EXPECT_EQ(due(), nullptr);
  EXPECT_EQ(a.credit.cell, nullptr);
  ticks_ += 49'000'000;
  EXPECT_EQ(due(), nullptr);
  a.credit.received = 1;  // by a message about credit
  EXPECT_FALSE(spinwire::agent::find_unheard(core_.context, nullptr).any);
}

}  // namespace
}  // namespace unheard_peers_test
