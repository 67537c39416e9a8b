// What ends with an engine, and with a listener.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "engine/harness.h"

namespace engine_destruction_test {
namespace {

using namespace engine_test;  // the names of a test namespace

bool gone(const Node& n) { return n.engine.stats().connections == 0; }

// The goodbye of a connection that has nothing outstanding waits for the end of a poll, which does
// not come.
TEST(EngineDestruction, SendsTheGoodbyeOfAConnectionThatWasJustClosed) {
  if (!on_softverbs())
    GTEST_SKIP() << kSoftverbsOnly
                 << "an adapter may drop what was posted before its queue pair ends";
  Pair p;
  Error why;
  p.client.on_closed = [&](Connection, const Error& e) { why = e; };
  ASSERT_TRUE(p.until([&] { return p.ends.server.stats().outstanding == 0; }));
  p.settle();
  ASSERT_EQ(p.ends.server.close(), Status::ok);
  p.server.engine = Engine();
  ASSERT_TRUE(until({&p.client}, [&] { return gone(p.client); }));
  EXPECT_EQ(why.status, Status::ok) << why.message();
}

TEST(EngineDestruction, EndsConnectionsAndOperationsOnce) {
  Pair p(without_direct_messages());
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
  // On a real device they may complete before the engine is destroyed.
  EXPECT_EQ(tally.ended(Status::flushed) + (on_softverbs() ? 0 : tally.ended(Status::ok)), 6u);
  EXPECT_EQ(inside, Status::not_connected);
  EXPECT_EQ(again, Status::not_connected);
  EXPECT_EQ(polled, -static_cast<int>(Status::reentrant));
  // A buffer outlives its engine.
  EXPECT_TRUE(Node::holds(held.bytes(), 5));
  EXPECT_TRUE(Node::holds(kept.bytes(), 8));
  std::memset(held.data(), 1, held.size());
  held.reset();
  kept.reset();
  // The peer is notified.
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
  ASSERT_TRUE(until({&p.server}, [&] { return p.server.closed.size() == 1; }));
  // A peer that was lost would be reported otherwise.
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
  ASSERT_TRUE(region);
  const spinwire::BufferSlice whole = region.slice();
  ASSERT_EQ(whole.size(), heap.size());
  EXPECT_EQ(whole.data(), heap.data());
  region = MemoryRegion();  // the slice keeps it
  std::memset(whole.data(), 3, whole.size());
  EXPECT_EQ(heap, std::vector<std::byte>(heap.size(), std::byte{3}));
}

TEST(EngineListener, DroppedMeansNoMoreConnections) {
  Pair p;
  const std::string address = p.server.listener.address();
  p.server.listener = Listener();
  EXPECT_EQ(p.server.listener.address(), "");
  (void)p.client.begin(address);
  ASSERT_TRUE(p.until([&] { return p.client.closed.size() == 1; }));
  EXPECT_EQ(p.client.closed[0].status, Status::refused) << p.client.closed[0].message();
  // Its connection stays, and the address is free again.
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
  // Two wait at once: the second gets no server.
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

}  // namespace
}  // namespace engine_destruction_test
