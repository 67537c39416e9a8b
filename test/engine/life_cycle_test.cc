#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "engine/harness.h"

namespace life_cycle_test {
namespace {

using namespace engine_test;  // names of a test namespace of its own

bool gone(const Node& n) { return n.engine.stats().connections == 0; }

/// Both ends told once, and regularly.
void expect_regular_end(Pair& p) {
  ASSERT_TRUE(p.until([&] { return gone(p.client) && gone(p.server); }));
  ASSERT_EQ(p.client.closed.size(), 1u);
  ASSERT_EQ(p.server.closed.size(), 1u);
  EXPECT_EQ(p.client.closed[0].status, Status::ok) << p.client.closed[0].message();
  EXPECT_EQ(p.server.closed[0].status, Status::ok) << p.server.closed[0].message();
  p.finish();
}

TEST(EngineEarlyMessage, AConnectionThatItsHandlerClosesStaysClosed) {
  Config steps = small_config();
  steps.engine.control = ControlMode::manual;
  Node server(steps), client;
  server.listen();
  client.on_ready = [](Connection c) { EXPECT_EQ(c.send_copy({}), Status::ok); };
  server.on_message = [](Connection c, Message&) { EXPECT_EQ(c.close(), Status::ok); };
  (void)client.begin(server);
  ASSERT_TRUE(until({&client}, [&] {
    if (client.ready.empty()) (void)server.poll();
    return !client.ready.empty();
  }));
  // The server takes no control step, so the message overtakes the last frame of the handshake.
  ASSERT_TRUE(until({&client}, [&] {
    (void)server.engine.poll();
    return server.messages == 1;
  }));
  EXPECT_EQ(server.ready.size(), 1u);
  EXPECT_TRUE(until({&client, &server}, [&] {
    return client.engine.stats().connections == 0 && server.engine.stats().connections == 0;
  }));
  EXPECT_EQ(server.ready.size(), 1u) << "it was ready a second time";
  finish(client, server);
}

TEST(EngineClose, FromEitherEnd) {
  for (const bool from_client : {true, false}) {
    Pair p;
    EXPECT_EQ((from_client ? p.ends.client : p.ends.server).close(), Status::ok);
    expect_regular_end(p);
  }
}

TEST(EngineClose, FromBothEndsAtOnce) {
  for (int lead = -3; lead <= 3; ++lead) {
    Pair p;
    Buffer b = p.client.filled(100, 1);
    (void)p.ends.client.send(b);
    EXPECT_EQ((lead < 0 ? p.ends.client : p.ends.server).close(), Status::ok);
    for (int i = 0; i < std::abs(lead); ++i) (void)(lead < 0 ? p.client : p.server).poll();
    EXPECT_EQ((lead < 0 ? p.ends.server : p.ends.client).close(), Status::ok);
    b.reset();
    expect_regular_end(p);
  }
}

TEST(EngineClose, AMessageThatThePeerTookEndsWell) {
  // Its answer comes with the goodbye, and the control step follows at once.
  Config c = small_config();
  c.engine.control = ControlMode::manual;
  Pair p(c);
  p.server.on_message = [](Connection conn, Message&) { EXPECT_EQ(conn.close(), Status::ok); };
  Buffer b = p.client.filled(32, 1);
  std::vector<Status> ends;
  ASSERT_EQ(p.ends.client.send(b, [&ends](const Completion& e) { ends.push_back(e.status); }),
            Status::ok);
  b.reset();
  expect_regular_end(p);
  EXPECT_EQ(ends, std::vector<Status>{Status::ok});
}

enum class Where { on_message, on_ready_server, on_ready_client, on_completion };

class EngineCloseInside : public testing::TestWithParam<Where> {};
TEST_P(EngineCloseInside, Callbacks) {
  Node server;
  Node client;
  server.listen();
  const Where where = GetParam();
  if (where == Where::on_message) {
    server.on_message = [](Connection c, Message&) { EXPECT_EQ(c.close(), Status::ok); };
  } else if (where == Where::on_ready_server) {
    server.on_ready = [](Connection c) { EXPECT_EQ(c.close(), Status::ok); };
  } else if (where == Where::on_ready_client) {
    client.on_ready = [](Connection c) { EXPECT_EQ(c.close(), Status::ok); };
  }
  Connection c = client.begin(server);
  ASSERT_TRUE(until({&client, &server}, [&] { return !client.ready.empty(); }));
  if (where == Where::on_message || where == Where::on_completion) {
    Buffer b = client.filled(100, 1);
    ASSERT_EQ(c.send(b,
                     [handle = &c, closes = where == Where::on_completion](const Completion& e) {
                       EXPECT_EQ(e.status, Status::ok);
                       if (closes) {
                         EXPECT_EQ(handle->close(), Status::ok);
                       }
                     }),
              Status::ok);
  }
  ASSERT_TRUE(until({&client, &server}, [&] {
    return gone(client) && gone(server) && !client.closed.empty() && !server.closed.empty();
  }));
  ASSERT_EQ(client.closed.size(), 1u);
  ASSERT_EQ(server.closed.size(), 1u);
  EXPECT_EQ(client.closed[0].status, Status::ok) << client.closed[0].message();
  EXPECT_EQ(server.closed[0].status, Status::ok) << server.closed[0].message();
  server.on_message = nullptr;
  server.on_ready = client.on_ready = nullptr;
  (void)connect(client, server);  // both engines go on
  finish(client, server);
}
INSTANTIATE_TEST_SUITE_P(Everywhere, EngineCloseInside,
                         testing::Values(Where::on_message, Where::on_ready_server,
                                         Where::on_ready_client, Where::on_completion));

TEST(EngineClose, InOnAcceptRefuses) {
  Node server;
  Node client;
  server.listen();
  server.on_accept = [](Connection c) { EXPECT_EQ(c.close(), Status::ok); };
  (void)client.begin(server);
  ASSERT_TRUE(until({&client, &server}, [&] { return client.closed.size() == 1 && gone(server); }));
  EXPECT_EQ(client.closed[0].status, Status::refused) << client.closed[0].message();
  EXPECT_TRUE(client.ready.empty());
  EXPECT_TRUE(server.ready.empty());
  EXPECT_EQ(server.closed.size(), 1u);
  EXPECT_EQ(server.engine.stats().handshakes_refused, 1u);
  finish(client, server);
}

TEST(EngineClose, OnAcceptSetsHandlersOfItsOwn) {
  Node server;
  Node client;
  server.listen();
  static int own;
  own = 0;
  server.on_accept = [](Connection c) {
    spinwire::ConnectionHandlers h;
    h.on_ready = [](Connection) { ++own; };
    EXPECT_EQ(c.set_handlers(h), Status::ok);
  };
  Connection c = client.begin(server);
  ASSERT_TRUE(until({&client, &server}, [&] { return own == 1 && c.ready(); }));
  EXPECT_TRUE(server.ready.empty());
  finish(client, server);
  EXPECT_TRUE(server.closed.empty());
}

TEST(EngineClose, OnClosedMayConnectAgain) {
  Node server;
  Node client;
  server.listen();
  int left = 5;
  client.on_closed = [&](Connection old, const Error&) {
    EXPECT_EQ(old.state(), ConnectionState::closed);
    if (left-- > 0) (void)client.begin(server);
  };
  client.on_ready = [&](Connection c) { EXPECT_EQ(c.close(), Status::ok); };
  (void)client.begin(server);
  ASSERT_TRUE(until({&client, &server}, [&] { return client.closed.size() == 6; }));
  EXPECT_EQ(client.ready.size(), 6u);
  finish(client, server);
}

TEST(EngineClose, OutstandingOperationsCompleteFirst) {
  Pair p;
  Buffer b = p.client.filled(3000, 1);
  ASSERT_TRUE(p.until([&] {
    (void)p.ends.client.send(b);
    return p.ends.client.stats().send_credits >= 20;
  }));
  ASSERT_TRUE(p.until([&] { return p.ends.client.stats().outstanding == 0; }));
  p.settle();
  const std::uint64_t before = p.server.messages;
  bool told = false;
  p.client.on_closed = [&](Connection, const Error&) { told = p.client.tally.idle(); };
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(p.client.tally.run([&](CompletionCallback done) {
      return p.ends.client.send(b, done, i % 2 == 0 ? Post::now : Post::defer);
    }),
              Status::ok);
  }
  ASSERT_EQ(p.ends.client.close(), Status::ok);
  EXPECT_EQ(p.ends.client.state(), ConnectionState::draining);
  ASSERT_TRUE(p.until([&] { return gone(p.client); }));
  EXPECT_TRUE(told);
  EXPECT_EQ(p.client.tally.ended(Status::ok), 20u);
  EXPECT_EQ(p.server.messages, before + 20);
  b.reset();
  expect_regular_end(p);
}

TEST(EngineClose, PeerThatDoesNotPollIsWaitedForUpToTheDeadline) {
  if (device_name() != "softverbs")
    GTEST_SKIP() << kSoftverbsOnly << "elsewhere a send ends when the peer's device has it";
  Config c = small_config();
  c.connections.close_timeout = 50ms;
  Pair p(c);
  Buffer b = p.client.filled(3000, 1);
  ASSERT_EQ(
      p.client.tally.run([&](CompletionCallback done) { return p.ends.client.send(b, done); }),
      Status::ok);
  const auto before = std::chrono::steady_clock::now();
  ASSERT_EQ(p.ends.client.close(), Status::ok);
  ASSERT_TRUE(until({&p.client}, [&] { return gone(p.client); }));
  EXPECT_GE(std::chrono::steady_clock::now() - before, 50ms);
  EXPECT_EQ(p.client.tally.ended(Status::flushed), 1u);
  ASSERT_EQ(p.client.closed.size(), 1u);
  p.client.stale_allowed = true;
  // The other end finds out by itself: by its keepalive, or by the message it cannot fetch.
  (void)p.ends.server.close();
  b.reset();
  p.server.stale_allowed = true;
  p.finish();
}

TEST(EngineClose, FlushInsideTheLastCompletions) {
  if (device_name() != "softverbs")
    GTEST_SKIP() << kSoftverbsOnly << "elsewhere a send ends when the peer's device has it";
  // The queue pair is gone already when these run.
  Config c = small_config();
  c.connections.close_timeout = 20ms;
  Pair p(c);
  Buffer b = p.client.filled(3000, 1);
  struct Context {
    Pair* pair;
    int ended = 0;
  } context{&p};
  const auto done = [x = &context](const Completion& e) {
    EXPECT_EQ(e.status, Status::flushed);
    ++x->ended;
    (void)x->pair->ends.client.flush();
    EXPECT_EQ(x->pair->client.engine.flush(), Status::ok);
    EXPECT_EQ(x->pair->ends.client.close(), Status::not_connected);
  };
  auto exposed = p.server.engine.register_memory(
      {reinterpret_cast<std::byte*>(&context), sizeof context}, Access::remote_read);
  ASSERT_EQ(p.ends.client.send(b, done), Status::ok);
  // Behind a message that is not acknowledged.
  Buffer into = p.client.buffer(8);
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(p.ends.client.read(into.slice(), exposed->remote(), done), Status::ok);
  }
  ASSERT_EQ(p.ends.client.close(), Status::ok);
  ASSERT_TRUE(until({&p.client}, [&] { return gone(p.client); }));
  EXPECT_EQ(context.ended, 4);
  *exposed = MemoryRegion();
  into.reset();
  b.reset();
  p.client.stale_allowed = p.server.stale_allowed = true;
  (void)p.ends.server.close();
  p.finish();
}

TEST(EngineClose, WhileConnecting) {
  Node server;
  Node client;
  server.listen();
  for (int polls = 0; polls < 40; polls += 3) {
    const std::size_t before = client.closed.size();
    Connection c = client.begin(server);
    for (int i = 0; i < polls; ++i) (void)(client.poll() + server.poll());
    EXPECT_EQ(c.close(), Status::ok);
    ASSERT_TRUE(until({&client, &server}, [&] {
      return client.closed.size() == before + 1 && gone(client) && gone(server);
    })) << polls;
    EXPECT_EQ(client.closed.back().status, Status::ok);
  }
  (void)connect(client, server);
  finish(client, server);
}

TEST(EngineDestruction, EndsConnectionsAndOperationsOnce) {
  Pair p;
  Tally tally;
  Buffer held;
  Buffer kept;
  p.client.on_message = [&](Connection, Message& m) { kept = m.take(); };
  int closed = 0;
  {
    const Buffer m = p.server.filled(2000, 8);
    ASSERT_EQ(p.ends.server.send(m), Status::ok);
    ASSERT_TRUE(p.until([&] { return static_cast<bool>(kept); }));
  }
  held = p.client.filled(3000, 5);
  Status inside = Status::ok;
  Status again = Status::ok;
  int polled = 0;
  std::string address = p.server.listener.address();
  p.client.on_closed = [&](Connection c, const Error& e) {
    ++closed;
    EXPECT_TRUE(tally.idle());
    EXPECT_EQ(e.status, Status::ok) << e.message();
    inside = c.send(held);
    polled = p.client.engine.poll();
    const auto made = p.client.engine.connect(address, {});
    again = made ? Status::ok : made.error().status;
  };
  auto exposed =
      p.server.engine.expose(p.server.buffer(64, Pool::lease).slice(), Access::remote_read_write)
          .value();
  for (int i = 0; i < 6; ++i) {
    (void)tally.run([&](CompletionCallback done) {
      return i == 0 ? p.ends.client.send(held, done)
                    : p.ends.client.write(held.slice(0, 64), exposed, done,
                                          i % 2 == 0 ? Post::now : Post::defer);
    });
  }
  EXPECT_EQ(tally.accepted, 6u);
  p.client.engine = Engine();
  EXPECT_EQ(closed, 1);
  EXPECT_EQ(tally.completed, 6u);
  // On a real device they may be done before the engine goes.
  EXPECT_EQ(tally.ended(Status::flushed) + (on_softverbs() ? 0 : tally.ended(Status::ok)), 6u);
  EXPECT_EQ(inside, Status::not_connected);
  EXPECT_EQ(again, Status::not_connected);
  EXPECT_EQ(polled, -static_cast<int>(Status::reentrant));
  // Memory outlives its engine.
  EXPECT_TRUE(Node::holds(held.bytes(), 5));
  EXPECT_TRUE(Node::holds(kept.bytes(), 8));
  std::memset(held.data(), 1, held.size());
  held.reset();
  kept.reset();
  // The peer learns.
  p.server.stale_allowed = true;
  ASSERT_TRUE(until({&p.server}, [&] { return p.server.closed.size() == 1; }));
  EXPECT_EQ(p.server.engine.revoke(exposed), Status::ok);
  for (int i = 0; i < 8; ++i) (void)p.server.poll();
  p.server.expect_clean();
}

TEST(EngineDestruction, OfAnIdleConnectionIsAGoodbye) {
  Pair p;
  p.client.engine = Engine();
  ASSERT_EQ(p.client.closed.size(), 1u);
  ASSERT_TRUE(until(
      {&p.server}, [&] { return p.server.closed.size() == 1; }, 500ms));
  EXPECT_EQ(p.server.closed[0].status, Status::ok) << p.server.closed[0].message();
  p.server.expect_clean();
}

TEST(EngineDestruction, InEveryPhaseOfConnecting) {
  Node server;
  server.listen();
  for (int polls = 0; polls < 40; polls += 4) {
    Node client;
    (void)client.begin(server);
    for (int i = 0; i < polls; ++i) (void)(client.poll() + server.poll());
    client.engine = Engine();
    EXPECT_EQ(client.closed.size(), 1u);
  }
  ASSERT_TRUE(until({&server}, [&] { return gone(server); }));
  Node client;
  (void)connect(client, server);
  server.stale_allowed = true;
  finish(client, server);
}

TEST(EngineDestruction, MemoryRegionOutlivesItsEngine) {
  std::vector<std::byte> heap(4096);
  MemoryRegion region;
  {
    Node node;
    region = node.engine.register_memory(heap, Access::local).value();
  }
  std::memset(region.slice().data(), 3, region.slice().size());
}

TEST(EngineListener, DroppedMeansNoMoreConnections) {
  Pair p;
  const std::string address = p.server.listener.address();
  p.server.listener = Listener();
  EXPECT_EQ(p.server.listener.address(), "");
  (void)p.client.begin(address);
  ASSERT_TRUE(p.until([&] { return p.client.closed.size() == 1; }));
  EXPECT_EQ(p.client.closed[0].status, Status::refused) << p.client.closed[0].message();
  // The connection made through it stays, and the address is free again.
  EXPECT_TRUE(p.ends.server.ready());
  p.server.listen(address);
  (void)connect(p.client, p.server);
  p.finish();
}

TEST(EngineListener, DroppedInsideItsOwnCallback) {
  Node server;
  Node client;
  server.listen();
  server.on_accept = [&](Connection) { server.listener = Listener(); };
  const std::string address = server.listener.address();
  // Two wait at once: the second finds nobody.
  (void)client.begin(address);
  (void)client.begin(address);
  ASSERT_TRUE(
      until({&client, &server}, [&] { return client.ready.size() + client.closed.size() == 2; }));
  EXPECT_GE(client.ready.size(), 1u);
  finish(client, server);
}

TEST(EngineListener, OutlivesItsEngine) {
  Listener listener;
  {
    Node node;
    node.listen();
    listener = std::move(node.listener);
    EXPECT_NE(listener.address(), "");
  }
  EXPECT_EQ(listener.address(), "");
  listener = Listener();
}

TEST(EngineReconnect, ManyTimesLeavesNothingBehind) {
  Node server;
  Node client;
  server.listen();
  std::size_t descriptors = 0;
  std::size_t maps = 0;
  Buffer b = client.filled(500, 3);
  for (int i = 0; i < 200; ++i) {
    Ends ends = connect(client, server);
    const std::uint64_t before = server.messages;
    ASSERT_EQ(ends.client.send(b), Status::ok);
    ASSERT_TRUE(until({&client, &server}, [&] { return server.messages == before + 1; }));
    ASSERT_EQ((i % 2 == 0 ? ends.client : ends.server).close(), Status::ok);
    ASSERT_TRUE(until({&client, &server}, [&] { return gone(client) && gone(server); }));
    if (i == 20) {
      descriptors = open_descriptors();
      maps = mappings();
    }
  }
  EXPECT_EQ(open_descriptors(), descriptors);
  EXPECT_LE(mappings(), maps + kHeapMappings);
  EXPECT_EQ(server.engine.stats().accepted, 200u);
  EXPECT_EQ(server.engine.stats().closed, 200u);
  EXPECT_EQ(client.engine.stats().connected, 200u);
  EXPECT_EQ(server.engine.stats().peers_lost, 0u);
  b.reset();
  finish(client, server);
}

Config crowd_config() {
  Config c = small_config();
  c.connections.maximum = 128;
  c.connections.handshakes = 128;
  return c;
}

/// Median ticks of an idle poll without the control step.
std::uint64_t idle_ticks(Node& node) {
  std::vector<std::uint64_t> each(2001);
  const Clock clock = Clock::real();
  for (std::uint64_t& ticks : each) {
    const std::uint64_t before = clock.now();
    (void)node.engine.poll();
    ticks = clock.now() - before;
  }
  std::nth_element(each.begin(), each.begin() + 1000, each.end());
  return each[1000];
}

/// `count` connections to one engine, opened together, used and closed, `rounds` times.
void crowd(std::size_t count, int rounds) {
  Config manual = crowd_config();
  manual.engine.control = ControlMode::manual;
  Node server(manual);
  Node client(crowd_config());
  server.listen();
  const std::uint64_t alone = idle_ticks(server);
  std::size_t descriptors = 0;
  std::size_t maps = 0;
  Buffer b = client.filled(700, 9);
  std::vector<std::uint32_t> seen;
  bool good = true;
  server.on_message = [&](Connection c, Message& m) {
    ++seen[c.index()];
    good = good && Node::holds(m.bytes(), 9);
  };
  for (int round = 0; round < rounds; ++round) {
    seen.assign(128, 0);
    client.ready.clear();
    server.ready.clear();
    for (std::size_t i = 0; i < count; ++i) (void)client.begin(server);
    ASSERT_TRUE(until({&client, &server}, [&] {
      return client.ready.size() == count && server.ready.size() == count;
    }));
    EXPECT_GE(server.engine.stats().credits_granted, count);
    if (round == 0) {
      EXPECT_LE(idle_ticks(server), alone * 3 + 200);
    }
    for (Connection c : client.ready) {
      ASSERT_EQ(client.tally.run([&](CompletionCallback done) { return c.send(b, done); }),
                Status::ok);
    }
    ASSERT_TRUE(until({&client, &server}, [&] { return client.tally.idle(); }));
    for (Connection c : server.ready) ASSERT_EQ(seen[c.index()], 1u);
    for (std::size_t i = 0; i < count; ++i) {
      (void)(i % 2 == 0 ? client.ready : server.ready)[i].close();
      (void)(i % 2 == 1 ? client.ready : server.ready)[i].close();
    }
    ASSERT_TRUE(until({&client, &server}, [&] { return gone(client) && gone(server); }));
    EXPECT_EQ(server.engine.stats().credits_granted, 0u);
    EXPECT_EQ(server.engine.memory_stats(Pool::send).blocks_used, 0u);
    if (round == 0) {
      descriptors = open_descriptors();
      maps = mappings();
    }
  }
  EXPECT_TRUE(good);
  EXPECT_EQ(open_descriptors(), descriptors);
  EXPECT_LE(mappings(), maps + kHeapMappings);
  EXPECT_EQ(server.engine.stats().peers_lost, 0u);
  EXPECT_EQ(server.closed.size(), count * static_cast<std::size_t>(rounds));
  b.reset();
  finish(client, server);
}

TEST(EngineCrowd, ThirtyConnectionsOpenedAndClosedThreeTimes) { crowd(30, 3); }
TEST(SlowEngineCrowd, HundredConnectionsOpenedAndClosedHundredTimes) { crowd(100, 100); }

TEST(SlowEngineCrowd, ManyEnginesComeAndGoAtOneServer) {
  Config c = crowd_config();
  Node server(c);
  server.listen();
  std::size_t descriptors = 0;
  std::size_t maps = 0;
  for (int round = 0; round < 12; ++round) {
    std::deque<std::optional<Node>> clients(12);
    for (auto& client : clients) {
      client.emplace();
      Ends ends = connect(*client, server);
      const Buffer b = client->filled(5, 1);
      ASSERT_EQ(ends.client.send(b), Status::ok);
    }
    const std::uint64_t wanted = 12u * (static_cast<unsigned>(round) + 1);
    ASSERT_TRUE(until({&server}, [&] { return server.messages == wanted; }));
    clients.clear();
    ASSERT_TRUE(until({&server}, [&] { return gone(server); }));
    // Peers and lanes of engines that went are given up by the control step, bit by bit.
    if (round == 3) {
      for (int i = 0; i < 5000; ++i) (void)server.engine.poll_control();
      descriptors = open_descriptors();
      maps = mappings();
    }
  }
  EXPECT_TRUE(until({&server}, [&] { return open_descriptors() == descriptors; }));
  EXPECT_TRUE(until({&server}, [&] { return mappings() <= maps + kHeapMappings; }));
  server.stale_allowed = true;
  server.expect_clean();
}

}  // namespace
}  // namespace life_cycle_test
