// Messages without work requests between engines: what is kept, what is counted, and how they end.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "base/internals.h"
#include "base/owner_guard.h"
#include "base/random.h"
#include "engine/engine_core.h"
#include "engine/harness.h"
#include "engine/zero_cost.h"
#include "wire/lease_messages.h"

namespace direct_messages_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::DirectPath;
using spinwire::OperationId;
using spinwire::agent::Agent;
using spinwire::detail::EngineCore;
namespace wire = spinwire::wire;

std::vector<std::byte> bytes_of(std::size_t size, std::uint32_t seed) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = Node::pattern(seed, i);
  return bytes;
}

class EngineDirectMessages : public testing::Test {
 protected:
  void SetUp() override {
    if (!sends_directly()) GTEST_SKIP() << kSoftverbsOnly << "messages without work requests";
  }
  /// Sends so many messages that the peer has granted all credit.
  static void warm_up(Pair& p) {
    std::uint64_t sent = 0;
    ASSERT_TRUE(p.until([&] {
      while (sent < 500 && p.ends.client.send_copy(bytes_of(32, 1)) == Status::ok) ++sent;
      return sent == 500 && p.server.messages == sent;
    }));
    p.settle();
    p.server.messages = 0;
  }
};

TEST_F(EngineDirectMessages, TakenCopiesOutliveTheCallback) {
  Pair p;
  warm_up(p);
  std::vector<Buffer> kept;
  p.server.on_message = [&](Connection, Message& m) {
    EXPECT_TRUE(Node::holds(m.bytes(), static_cast<std::uint32_t>(kept.size())));
    kept.push_back(m.take());
    EXPECT_EQ(kept.back().size(), m.size());
    EXPECT_FALSE(m.take());  // the second call has nothing
    EXPECT_EQ(m.bytes().size(), m.size());
  };
  const auto posted = p.server.engine.stats().receives_posted;
  std::uint32_t sent = 0;
  ASSERT_TRUE(p.until([&] {
    if (sent < 100 && p.ends.client.send_copy(bytes_of(sent * 41, sent)) == Status::ok) ++sent;
    return kept.size() == 100;
  }));
  p.server.on_message = nullptr;
  std::uint32_t more = 0;  // the lane is written again
  ASSERT_TRUE(p.until([&] {
    if (more < 600 && p.ends.client.send_copy(bytes_of(3000, 7)) == Status::ok) ++more;
    return p.server.messages == 700;
  }));
  // No message takes a receive.
  EXPECT_EQ(p.server.engine.stats().receives_posted, posted);
  for (std::uint32_t i = 0; i < 100; ++i) {
    ASSERT_EQ(kept[i].size(), i * 41);
    EXPECT_TRUE(Node::holds({kept[i].data(), kept[i].size()}, i)) << i;
  }
  kept.clear();
  p.finish();
}

TEST_F(EngineDirectMessages, WhatIsTakenUntilThePoolIsEmptyIsNeverEmpty) {
  Pair p;
  std::deque<Buffer> kept;
  std::uint32_t sent = 0, seen = 0;
  p.server.on_message = [&](Connection, Message& m) {
    Buffer b = m.take();
    ASSERT_TRUE(b) << kept.size();
    ASSERT_TRUE(Node::holds({b.data(), b.size()}, seen++));
    kept.push_back(std::move(b));
  };
  const auto send = [&] {
    if (p.ends.client.send_copy(bytes_of(100, sent)) == Status::ok) ++sent;
  };
  for (int round = 0; round < 3; ++round) {
    std::uint32_t before = sent;
    int idle = 0;
    ASSERT_TRUE(p.until([&] {
      send();
      idle = std::exchange(before, sent) == sent ? idle + 1 : 0;
      return idle == 3000;
    }));
    EXPECT_GT(kept.size(), 200u);
    EXPECT_EQ(seen, sent) << "the sender has no credit for what the receiver cannot take";
    for (const Node* node : {&p.server, &p.client})
      EXPECT_TRUE(node->engine.audit()) << node->engine.audit().error().message();
    kept.clear();
    const std::uint32_t enough = sent + 2000;
    ASSERT_TRUE(p.until([&] {
      if (sent < enough) send();
      kept.clear();
      return sent == enough && seen == sent;
    }));
  }
  kept.clear();
  p.settle(2000);
  p.finish();
}

TEST_F(EngineDirectMessages, AnIdNamesAnOperationThatEndsInALaterPoll) {
  Pair p;
  warm_up(p);
  Buffer b = p.client.filled(40, 1);
  // Without an id and a callback, it has ended.
  ASSERT_EQ(p.ends.client.send(b), Status::ok);
  EXPECT_EQ(p.ends.client.stats().outstanding, 0u);
  EXPECT_FALSE(p.ends.client.last_operation());
  // With an id, posted now: the device has it.
  OperationId id;
  ASSERT_EQ(p.ends.client.send(b, {}, Post::now, &id), Status::ok);
  EXPECT_TRUE(id);
  EXPECT_EQ(p.ends.client.stats().outstanding, 1u);
  EXPECT_EQ(p.ends.client.last_operation(), id);
  ASSERT_TRUE(until({&p.client}, [&] { return p.ends.client.stats().outstanding == 0; }));
  EXPECT_FALSE(p.ends.client.last_operation());
  EXPECT_NE(p.ends.client.cancel(id), Status::ok);
  // A deferred one can be cancelled, and was never sent.
  int ended = 0;
  const auto cancelled = [&](const Completion& c) {
    EXPECT_EQ(c.status, Status::cancelled);
    ++ended;
  };
  for (const bool calls_back : {false, true}) {
    const CompletionCallback done =
        calls_back ? CompletionCallback(cancelled) : CompletionCallback();
    ASSERT_EQ(p.ends.client.send(b, done, Post::defer, &id), Status::ok);
    EXPECT_TRUE(id);
    EXPECT_EQ(p.ends.client.cancel(id), Status::ok);
    ASSERT_EQ(p.ends.client.send_copy(bytes_of(8, 1), done, Post::defer, &id), Status::ok);
    EXPECT_EQ(p.ends.client.cancel(id), Status::ok);
  }
  p.settle();
  EXPECT_EQ(ended, 2);
  EXPECT_EQ(p.server.messages, 2u);
  EXPECT_EQ(p.ends.client.stats().outstanding, 0u);
  b.reset();
  EXPECT_EQ(p.ends.client.stats().messages_sent, 502u);
  p.finish();
}

TEST_F(EngineDirectMessages, ClosingRightBehindThemDeliversAll) {
  for (const bool deferred : {false, true}) {
    Pair p;
    warm_up(p);
    std::uint32_t sent = 0;
    while (p.ends.client.send_copy(bytes_of(sent % 200, sent), {},
                                   deferred ? Post::defer : Post::now) == Status::ok)
      ++sent;
    EXPECT_GT(sent, 30u);
    std::uint32_t seen = 0;
    p.server.on_message = [&](Connection, Message& m) {
      EXPECT_TRUE(m.size() == seen % 200 && Node::holds(m.bytes(), seen));
      ++seen;
    };
    EXPECT_EQ(p.ends.client.close(), Status::ok);
    ASSERT_TRUE(p.until([&] { return !p.server.closed.empty() && !p.client.closed.empty(); }));
    EXPECT_EQ(seen, sent);
    EXPECT_EQ(p.server.closed[0].status, Status::ok) << p.server.closed[0].message();
    EXPECT_EQ(p.client.closed[0].status, Status::ok) << p.client.closed[0].message();
    p.finish();
  }
}

/// Everything that keeps its order on one connection.
void mix(Pair& p, std::uint64_t seed) {
  spinwire::base::Random random(seed);
  std::uint32_t sent = 0, seen = 0, ended = 0, recorded = 0;
  p.server.on_message = [&](Connection, Message& m) {
    std::uint32_t number = 0;
    std::memcpy(&number, m.data(), sizeof number);
    ASSERT_EQ(number, seen++);
    if (number % 7 == 0) (void)m.take();
  };
  const auto send = [&] {
    const std::uint64_t kind = random.below(12);
    const std::size_t size = kind == 0 ? 20000 : 4 + random.below(kind < 3 ? 4000 : 60);
    const Post post = random.below(2) == 0 ? Post::defer : Post::now;
    CompletionCallback done;
    if (random.below(3) == 0)
      done = [&](const Completion& c) {
        EXPECT_EQ(c.status, Status::ok);
        ++ended;
      };
    const bool calls_back = static_cast<bool>(done);
    Status status = Status::would_block;
    if (kind == 0) {
      Buffer b = p.client.engine.allocate(size, Pool::rendezvous);
      if (!b) return;
      std::memcpy(b.data(), &sent, sizeof sent);
      status = p.ends.client.send(b, done, post);
    } else if (kind == 1) {
      Buffer b = p.client.engine.allocate(size);
      if (!b) return;
      std::memcpy(b.data(), &sent, sizeof sent);
      status = p.ends.client.send_with_imm(b, 7, done, post);
    } else {
      std::vector<std::byte> bytes(size);
      std::memcpy(bytes.data(), &sent, sizeof sent);
      status = p.ends.client.send_copy(bytes, done, post);
    }
    if (status != Status::ok) return;
    ++sent;
    recorded += calls_back ? 1 : 0;
  };
  const std::uint32_t all = amount(4000);
  ASSERT_TRUE(p.until([&] {
    for (std::uint64_t n = random.below(12); n != 0 && sent < all; --n) send();
    return sent >= all && seen == sent && ended == recorded;
  })) << sent
      << " sent, " << seen << " seen, " << ended << " of " << recorded << " ended";
}

TEST(EngineDirectPaths, KeepTheOrderOfAllKindsOfMessages) {
  Config with = small_config();
  with.memory.rendezvous_bytes = 4u << 20;
  with.memory.windows = 8;
  with.connections.max_message_bytes = 1u << 20;
  with.queues.completion_depth = 8192;
  Config without = with;
  without.connections.direct_messages = DirectPath::off;
  for (const auto& [servers, clients] : {std::pair{with, with}, std::pair{with, without},
                                         std::pair{without, with}, std::pair{without, without}}) {
    Pair p(servers, clients);
    ASSERT_NO_FATAL_FAILURE(mix(p, 5));
    p.finish();
  }
}

// ---- credit -------------------------------------------------------------------------------------

/// A server, and an engine whose internals the test can reach.
class EngineDirectCredit : public EngineDirectMessages {
 protected:
  EngineDirectCredit()
      : core_(small_config(), Clock::real(), std::move(*spinwire::base::OwnerGuard::create())) {}
  void SetUp() override {
    EngineDirectMessages::SetUp();
    if (IsSkipped()) return;
    ASSERT_TRUE(core_.open());
    server_.listen();
  }
  void TearDown() override { core_.end(); }
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({&server_}, [&] {
      (void)core_.poll();
      return done();
    });
  }
  Connection connect(ConnectOptions options = {}) {
    const std::size_t before = server_.ready.size();
    const Connection c = core_.connect(server_.listener.address(), options).value();
    EXPECT_TRUE(until([&] { return c.ready() && server_.ready.size() > before; }));
    return c;
  }
  Agent& agent_of(const Connection& c) {
    return *core_.find(c.index(), spinwire::detail::Internals::generation(c));
  }

  Node server_;
  EngineCore core_;
};

TEST_F(EngineDirectCredit, ARefusedMessageAdvertisesNothing) {
  Connection c = connect();
  std::uint64_t sent = 0;
  ASSERT_TRUE(until([&] {
    while (sent < 500 && c.send_copy(bytes_of(8, 1)) == Status::ok) ++sent;
    return sent == 500 && server_.messages == sent;
  }));
  Agent& a = agent_of(c);
  // Neither the lane nor the send queue has room.
  spinwire::verbs::DirectMessages full = *core_.context.direct;
  full.send = [](ibv_qp*, std::uint64_t, const std::byte*, std::uint32_t, std::uint64_t) noexcept {
    return spinwire::verbs::Sent::refused;
  };
  const auto* const direct = std::exchange(core_.context.direct, &full);
  const std::uint32_t limit = std::exchange(a.send_queue.limit, 0);
  ++a.credit.granted;
  EXPECT_EQ(c.send_copy(bytes_of(8, 1)), Status::would_block);
  EXPECT_NE(a.credit.advertised, a.credit.granted);
  a.send_queue.limit = limit;
  const CompletionCallback done = [](const Completion&) {};
  EXPECT_EQ(c.send_copy(bytes_of(8, 1), done, Post::defer), Status::ok);  // by a work request
  EXPECT_EQ(a.credit.advertised, a.credit.granted);
  --a.credit.granted;
  core_.context.direct = direct;
  ASSERT_TRUE(until([&] { return server_.messages == 501; }));
}

TEST_F(EngineDirectCredit, IsStoredAndWrittenOnlyWhereThatFails) {
  using spinwire::verbs::DirectMessages;
  static std::uint32_t stored;
  static const DirectMessages* device;
  const Agent& a = agent_of(connect());
  Connection sender = server_.ready.back();
  stored = 0;
  device = core_.context.direct;
  DirectMessages counted = *device;
  counted.write_word = [](ibv_qp* qp, std::uint64_t to, std::uint32_t key,
                          std::uint64_t word) noexcept {
    const bool done = device->write_word(qp, to, key, word);
    stored += done ? 1 : 0;
    return done;
  };
  core_.context.direct = &counted;
  std::uint64_t sent = 0;
  const auto stream = [&](std::uint64_t count) {
    const std::uint64_t all = sent + count;
    return until([&] {
      while (sent < all && sender.send_copy(bytes_of(8, 1)) == Status::ok) ++sent;
      return a.activity.messages_received == all;
    });
  };
  const auto written = [&] {
    return spinwire::agent::tally(a, spinwire::agent::OperationKind::credit_write).begun;
  };
  ASSERT_TRUE(stream(5000));
  EXPECT_GT(stored, 50u);
  EXPECT_LT(stored, 1000u);  // in steps, not for each message
  // Keepalives are written, however long this takes.
  const std::uint64_t keepalives = written();
  EXPECT_LT(keepalives, stored);
  counted.write_word = [](ibv_qp*, std::uint64_t, std::uint32_t, std::uint64_t) noexcept {
    return false;
  };
  const std::uint32_t before = stored;
  ASSERT_TRUE(stream(5000));
  EXPECT_EQ(stored, before);
  EXPECT_GT(written(), keepalives + 50);
  core_.context.direct = device;
}

// The peer's older grant, which it does not know yet, is all that it can get.
TEST_F(EngineDirectCredit, APeerThatAsksLearnsOfAnOlderGrant) {
  Agent& a = agent_of(connect());
  ASSERT_TRUE(until([&] { return a.credit.advertised == a.credit.granted; }));
  --a.credit.advertised;
  spinwire::agent::grant_credit(core_.context, a);
  EXPECT_FALSE(a.credit.in_end_of_poll_list);
  a.credit.peer_needs_credit = true;
  spinwire::agent::grant_credit(core_.context, a);
  EXPECT_TRUE(a.credit.in_end_of_poll_list);
  (void)core_.poll();
  EXPECT_EQ(a.credit.advertised, a.credit.granted);
}

// A header has the low bits of a count. While one lies unread, the credit cell must not go on so
// far that the header passes for a newer one.
TEST_F(EngineDirectCredit, AHeaderThatIsReadLateGrantsNothing) {
  Connection c = connect();
  Connection there = server_.ready.back();
  ASSERT_EQ(there.send_copy(bytes_of(8, 1)), Status::ok);
  std::uint64_t sent = 0;
  std::uint32_t polls = 0;
  const auto send = [&](std::uint64_t count) {
    for (std::uint64_t tries = 0; sent < count;) {
      if (c.send_copy(bytes_of(8, 1)) == Status::ok) {
        ++sent;
        tries = 0;
      } else if (++tries < 20) {
        (void)server_.poll();
      } else {  // the sender polls only if that alone can help
        (void)core_.poll();
        ++polls;
        tries = 0;
      }
    }
  };
  send(50'000);
  EXPECT_GT(polls, 3u);
  EXPECT_LE(c.stats().send_credits, 64u);  // connections.credits
  send(52'000);
  ASSERT_TRUE(until([&] { return server_.messages == sent; }));
  EXPECT_EQ(agent_of(c).activity.messages_received, 1u);
  EXPECT_TRUE(c.ready());
  EXPECT_TRUE(core_.audit()) << core_.audit().error().message();
  EXPECT_TRUE(server_.engine.audit());
}

TEST_F(EngineDirectCredit, MessagesWaitForControlMessagesThatLackCredit) {
  Connection c;
  Status in_callback = Status::system;
  ConnectOptions options;
  options.handlers.on_message = [&](Connection from, Message&) {
    in_callback = from.send_copy(bytes_of(8, 1));
  };
  c = connect(options);
  Agent& a = agent_of(c);
  while (c.send_copy(bytes_of(8, 1)) == Status::ok) {
  }
  wire::LeaseRequest request;
  request.id = 1;
  request.time = 1'000'000'000;
  request.access = 3;
  request.bytes = 4096;
  spinwire::agent::queue_control_message(
      core_.context, a,
      spinwire::agent::make_control_message(wire::MessageKind::lease_request,
                                            wire::encode(request)));
  for (int i = 0; i < 10; ++i) (void)core_.poll();
  ASSERT_EQ(a.control_counts.waiting, 1u);
  EXPECT_EQ(a.send_queue.direct_limit, 0u);
  // The server's message brings credit, but the control message goes first.
  server_.on_message = [&](Connection from, Message&) { (void)from.send_copy(bytes_of(8, 1)); };
  ASSERT_TRUE(until([&] { return in_callback != Status::system; }));
  EXPECT_EQ(in_callback, Status::would_block);
  ASSERT_TRUE(
      until([&] { return a.control_counts.waiting == 0 && a.send_queue.direct_limit != 0; }));
}

/// An exchange of direct messages of all sizes, half of which are kept for a while.
class DirectLoad {
 public:
  explicit DirectLoad(zero_cost_test::Turns turns) : turns_(turns) {
    ListenOptions options;
    options.handlers.on_message = [this](Connection c, Message& m) {
      ++received_;
      kept_[received_ % kept_.size()] = m.take();
      (void)c.send_copy(m.bytes());
    };
    server_.listener = std::move(*server_.engine.listen("127.0.0.1:0", options));
    ConnectOptions connecting;
    connecting.handlers.on_message = [this](Connection, Message&) { ++answered_; };
    connection_ = *client_.engine.connect(server_.listener.address(), connecting);
    EXPECT_TRUE(until({&server_, &client_},
                      [&] { return connection_.ready() && server_.engine.stats().accepted == 1; }));
  }
  void run(int polls) {
    for (int i = 0; i < polls; ++i) {
      const std::size_t size = static_cast<std::size_t>(i) * 37 % (i % 8 == 0 ? bytes_.size() : 64);
      const std::span<const std::byte> some(bytes_.data(), size);
      const CompletionCallback done =
          i % 4 == 0 ? CompletionCallback([this](const Completion&) { ++done_; })
                     : CompletionCallback();
      if (connection_.send_copy(some, done, i % 2 == 0 ? Post::now : Post::defer) == Status::ok)
        ++sent_;
      zero_cost_test::turn(turns_, server_.engine, client_.engine);
    }
  }
  [[nodiscard]] bool worked() {
    for (int i = 0; i < 10'000 && answered_ != sent_; ++i)
      zero_cost_test::turn(turns_, server_.engine, client_.engine);
    return received_ == sent_ && answered_ == sent_ && sent_ > 50'000 / slowness() &&
           done_ > sent_ / 8;
  }

 private:
  static Config manual_config() {
    Config c = small_config();
    c.engine.control = ControlMode::manual;
    return c;
  }
  Node server_{manual_config()}, client_{manual_config()};
  zero_cost_test::Turns turns_;
  Connection connection_;
  std::array<Buffer, 16> kept_;
  std::array<std::byte, 4000> bytes_{};
  std::uint64_t sent_ = 0, received_ = 0, answered_ = 0, done_ = 0;
};

// ---- peers that end -----------------------------------------------------------------------------

TEST_F(EngineDirectMessages, APeerThatIsKilledBeforeItTookThemIsLostAtOnce) {
  Config c = small_config();  // nothing else would notice before the wait below ends
  c.connections.keepalive_interval = 600s;
  c.connections.peer_timeout = 600s;
  Child child([&](int in, int out) { return echo_server(in, out, c); });
  Node client(c);
  Connection to = client.begin(child.line());
  ASSERT_TRUE(until({&client}, [&] { return to.ready(); }));
  std::uint64_t sent = 0;
  ASSERT_TRUE(until({&client}, [&] {
    if (sent < 300 && to.send_copy(bytes_of(8, 1)) == Status::ok) ++sent;
    return client.messages == 300;
  }));
  child.signal(SIGSTOP);
  ASSERT_EQ(to.send_copy(bytes_of(8, 1)), Status::ok);
  child.kill(SIGKILL);
  ASSERT_TRUE(until({&client}, [&] { return !client.closed.empty(); }));
  EXPECT_EQ(client.closed[0].status, Status::peer_lost) << client.closed[0].message();
  EXPECT_EQ(client.closed.size(), 1u);
  client.stale_allowed = true;
  for (int i = 0; i < 100; ++i) (void)client.poll();
  client.expect_clean();
}

#if SPINWIRE_TEST_COUNTS_HEAP
TEST_F(EngineDirectMessages, TakeNoHeap) { zero_cost_test::expect_no_heap<DirectLoad>(); }
#endif
TEST_F(EngineDirectMessages, MakeNoSystemCalls) {
  zero_cost_test::expect_no_system_calls<DirectLoad>();
}

}  // namespace
}  // namespace direct_messages_test
