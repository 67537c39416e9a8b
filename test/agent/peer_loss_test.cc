#include <gtest/gtest.h>
#include <sys/wait.h>

#include <vector>

#include "engine/harness.h"

namespace peer_loss_test {
namespace {

using namespace engine_test;  // the names of a test namespace

constexpr std::uint64_t kMillisecond = 1'000'000;

Config timed_config() {
  Config c = small_config();
  c.connections.keepalive_interval = 100ms;
  c.connections.peer_timeout = 1000ms;
  c.connections.credit_idle_timeout = 500ms;
  return c;
}

/// Advances time by `ms`, in steps of a millisecond with a poll of each node.
void pass(std::uint64_t& ticks, std::uint64_t ms, std::initializer_list<Node*> nodes) {
  for (std::uint64_t i = 0; i < ms; ++i) {
    ticks += kMillisecond;
    for (Node* node : nodes) (void)node->poll();
  }
}

/// Closes the end of the server, which the client has lost.
void close_server(Pair& p, std::uint64_t& ticks) {
  p.server.stale_allowed = p.client.stale_allowed = true;
  (void)p.ends.server.close();
  ASSERT_TRUE(until({&p.client, &p.server}, [&] {
    ticks += kMillisecond / 10;
    return p.server.engine.stats().connections == 0 && p.client.engine.stats().connections == 0;
  }));
}

TEST(PeerLoss, SilentPeerThatPollsStays) {
  std::uint64_t ticks = kMillisecond;
  Pair p(timed_config(), &ticks);
  const std::uint64_t bells = p.client.engine.stats().doorbells;
  pass(ticks, 20000, {&p.client, &p.server});
  EXPECT_TRUE(p.ends.client.ready());
  EXPECT_TRUE(p.ends.server.ready());
  // Keepalives were sent, though, about one per interval.
  EXPECT_GE(p.client.engine.stats().doorbells - bells, 100u);
  EXPECT_LE(p.client.engine.stats().doorbells - bells, 220u);
  p.finish();
}

TEST(PeerLoss, PeerThatStopsPollingIsLostAfterTheTimeOut) {
  if (!on_softverbs())
    GTEST_SKIP() << kSoftverbsOnly << "elsewhere a send ends when the peer's device has it";
  std::uint64_t ticks = kMillisecond;
  Pair p(without_direct_messages(timed_config()), &ticks);
  Node other(timed_config(), &ticks);
  other.listen();
  Ends second = connect(p.client, other);
  Buffer b = p.client.filled(200, 1);
  ASSERT_EQ(
      p.client.tally.run([&](CompletionCallback done) { return p.ends.client.send(b, done); }),
      Status::ok);
  pass(ticks, 900, {&p.client, &other});
  EXPECT_TRUE(p.ends.client.ready());
  EXPECT_EQ(p.client.tally.completed, 0u);
  pass(ticks, 400, {&p.client, &other});
  EXPECT_EQ(p.client.tally.completed, 1u);
  EXPECT_EQ(p.client.tally.ended(Status::flushed), 1u);
  ASSERT_EQ(p.client.closed.size(), 1u);
  EXPECT_EQ(p.client.closed[0].status, Status::peer_lost) << p.client.closed[0].message();
  EXPECT_EQ(p.client.engine.stats().peers_lost, 1u);
  EXPECT_TRUE(second.client.ready());
  ASSERT_EQ(second.client.send(b), Status::ok);
  ASSERT_TRUE(until({&p.client, &other}, [&] { return other.messages == 1; }));
  b.reset();
  (void)second.client.close();
  (void)p.ends.server.close();
  p.server.stale_allowed = p.client.stale_allowed = true;
  ASSERT_TRUE(until({&p.client, &other, &p.server}, [&] {
    ticks += kMillisecond / 10;
    return other.engine.stats().connections == 0 && p.server.engine.stats().connections == 0;
  }));
  p.finish();
}

TEST(PeerLoss, AnIdlePeerThatStopsPollingIsLostThoughItsDeviceAnswers) {
  std::uint64_t ticks = kMillisecond;
  Pair p(timed_config(), &ticks);
  pass(ticks, 300, {&p.client, &p.server});
  pass(ticks, 900, {&p.client});
  EXPECT_TRUE(p.ends.client.ready());
  pass(ticks, 400, {&p.client});
  ASSERT_EQ(p.client.closed.size(), 1u);
  EXPECT_EQ(p.client.closed[0].status, Status::peer_lost);
  EXPECT_NE(p.client.closed[0].message().find("has not polled for 1000 ms"), std::string::npos)
      << p.client.closed[0].message();
  ASSERT_NO_FATAL_FAILURE(close_server(p, ticks));
  p.finish();
}

TEST(PeerLoss, IsNoticedThoughTheClockHasSteppedBack) {
  std::uint64_t ticks = 1'000'000 * kMillisecond;
  Pair p(timed_config(), &ticks);
  pass(ticks, 300, {&p.client, &p.server});
  ticks = kMillisecond;
  pass(ticks, 3000, {&p.client, &p.server});
  EXPECT_TRUE(p.ends.client.ready() && p.ends.server.ready()) << "both poll";
  pass(ticks, 1400, {&p.client});
  ASSERT_EQ(p.client.closed.size(), 1u);
  EXPECT_EQ(p.client.closed[0].status, Status::peer_lost);
  ASSERT_NO_FATAL_FAILURE(close_server(p, ticks));
  p.finish();
}

TEST(PeerLoss, OneSidedOperationsThatSucceedAreNoSignOfThePeersProcess) {
  std::uint64_t ticks = kMillisecond;
  Pair p(timed_config(), &ticks);
  Buffer there = p.server.filled(64, 1);
  auto region = p.server.engine.expose(there.slice(), spinwire::Access::remote_write);
  ASSERT_TRUE(region) << region.error().message();
  Buffer b = p.client.filled(64, 2);
  std::uint64_t done = 0;
  for (int i = 0; i < 1400 && p.client.closed.empty(); ++i) {
    (void)p.ends.client.write(
        b, *region, [&](const spinwire::Completion& c) { done += c.status == Status::ok ? 1 : 0; });
    pass(ticks, 1, {&p.client});
  }
  EXPECT_GT(done, 800u);
  ASSERT_EQ(p.client.closed.size(), 1u);
  EXPECT_EQ(p.client.closed[0].status, Status::peer_lost);
  ASSERT_NO_FATAL_FAILURE(close_server(p, ticks));
  there.reset();
  b.reset();
  EXPECT_EQ(p.server.engine.revoke(*region), Status::ok);
  p.finish();
}

TEST(PeerLoss, EachEndKeepsTheSilenceThatTheOtherAccepts) {
  // By its own configuration the server would send once an hour. The client accepts one second
  // only.
  Config slow = timed_config();
  slow.connections.keepalive_interval = std::chrono::hours(1);
  slow.connections.peer_timeout = std::chrono::hours(1);
  slow.connections.credit_idle_timeout = std::chrono::hours(1);
  std::uint64_t ticks = kMillisecond;
  Node server(slow, &ticks);
  Node client(timed_config(), &ticks);
  server.listen();
  const Ends ends = connect(client, server);
  pass(ticks, 10000, {&client, &server});
  EXPECT_TRUE(ends.client.ready());
  EXPECT_TRUE(ends.server.ready());
  finish(client, server);
}

TEST(PeerLoss, AStoppedProcess) {
  Config slow = timed_config();
  slow.connections.peer_timeout = 1h;  // of the victim: the client's time stands still at first
  Child victim([&](int in, int out) { return echo_server(in, out, slow); });
  std::uint64_t ticks = kMillisecond;
  Node client(timed_config(), &ticks);
  const std::string address = victim.line();
  ASSERT_NE(address, "");
  const Connection idle = client.begin(address);
  ASSERT_TRUE(until({&client}, [&] { return client.ready.size() == 1; }));
  victim.signal(SIGSTOP);
  int status = 0;
  ASSERT_EQ(waitpid(victim.pid(), &status, WUNTRACED), victim.pid());
  ASSERT_TRUE(WIFSTOPPED(status));
  pass(ticks, 900, {&client});
  EXPECT_TRUE(client.closed.empty()) << "too early";
  pass(ticks, 400, {&client});
  ASSERT_EQ(client.closed.size(), 1u) << "too late";
  EXPECT_EQ(client.closed[0].status, Status::peer_lost);
  EXPECT_NE(client.closed[0].message().find("has not polled"), std::string::npos)
      << client.closed[0].message();
  EXPECT_EQ(idle.state(), ConnectionState::closed);
  victim.kill(SIGKILL);
  client.stale_allowed = true;
  ASSERT_TRUE(until({&client}, [&] {
    ticks += kMillisecond / 10;
    return client.engine.stats().connections == 0;
  }));
}

TEST(PeerLoss, OurOwnPauseIsNotHeldAgainstThePeer) {
  std::uint64_t ticks = kMillisecond;
  Pair p(timed_config(), &ticks);
  pass(ticks, 500, {&p.client, &p.server});
  Buffer b = p.client.filled(200, 1);
  // Neither end polls for long; then both do, and one sends first.
  ticks += 60'000 * kMillisecond;
  ASSERT_EQ(
      p.client.tally.run([&](CompletionCallback done) { return p.ends.client.send(b, done); }),
      Status::ok);
  (void)p.client.poll();
  ticks += 60'000 * kMillisecond;
  (void)p.client.poll();
  pass(ticks, 50, {&p.client, &p.server});
  EXPECT_TRUE(p.ends.client.ready());
  EXPECT_EQ(p.client.tally.ended(Status::ok), 1u);
  b.reset();
  p.finish();
}

TEST(PeerLoss, KilledProcess) {
  if (!on_softverbs())
    GTEST_SKIP() << kSoftverbsOnly << "elsewhere a send ends when the peer's device has it";
  Config c = without_direct_messages();
  c.connections.peer_timeout = 1h;  // the device notices, or nobody
  Child victim([&](int in, int out) { return echo_server(in, out, c); });
  Node server;
  server.listen();
  Node client(c);
  Ends alive = connect(client, server);
  const std::string address = victim.line();
  ASSERT_NE(address, "");
  Connection busy = client.begin(address);
  Connection idle = client.begin(address);
  ASSERT_TRUE(until({&client}, [&] { return client.ready.size() == 3; }));
  Buffer b = client.filled(3000, 1);
  ASSERT_TRUE(until({&client}, [&] {
    (void)client.tally.run([&](CompletionCallback done) { return busy.send(b, done); });
    return client.messages > 1000;
  }));
  // Stopped, then killed, with operations in flight: sends until no answer returns.
  victim.signal(SIGSTOP);
  int refused = 0;
  ASSERT_TRUE(until({&client}, [&] {
    const bool taken =
        client.tally.run([&](CompletionCallback done) { return busy.send(b, done); }) == Status::ok;
    refused = taken ? 0 : refused + 1;
    return refused == 1000;
  }));
  EXPECT_FALSE(client.tally.idle());
  victim.kill(SIGKILL);
  ASSERT_TRUE(until({&client, &server}, [&] { return client.closed.size() == 2; }));
  EXPECT_TRUE(client.tally.idle());
  EXPECT_GE(client.tally.ended(Status::peer_lost), 1u);
  EXPECT_EQ(client.tally.ended(Status::ok) + client.tally.ended(Status::peer_lost) +
                client.tally.ended(Status::flushed),
            client.tally.accepted);
  for (const Error& e : client.closed) EXPECT_EQ(e.status, Status::peer_lost) << e.message();
  EXPECT_EQ(client.engine.stats().peers_lost, 2u);
  EXPECT_EQ(busy.state(), ConnectionState::closed);
  EXPECT_EQ(idle.state(), ConnectionState::closed);
  EXPECT_TRUE(alive.client.ready());
  const std::uint64_t before = server.messages;
  ASSERT_TRUE(until({&client, &server}, [&] { return alive.client.send(b) == Status::ok; }));
  ASSERT_TRUE(until({&client, &server}, [&] { return server.messages == before + 1; }));
  b.reset();
  client.stale_allowed = true;
  finish(client, server);
}

TEST(PeerLoss, KilledWhileShakingHands) {
  Config c = small_config();
  c.connections.keepalive_interval = 50ms;
  Node server(c);
  server.listen();
  const std::string address = server.listener.address();
  for (int polls = 1; polls < 60; polls += 7) {
    Child victim([&](int in, int out) {
      Node node;
      (void)node.begin(address);
      for (int i = 0; i < polls; ++i) (void)node.poll();
      write_line(out, "there");
      while (command(in) != 'q') {
      }
      return 0;
    });
    EXPECT_EQ(victim.line(), "there");
    for (int i = 0; i < polls; ++i) (void)server.poll();
    victim.kill(SIGKILL);
    ASSERT_TRUE(until({&server}, [&] { return server.engine.stats().connections == 0; }));
  }
  Node client;
  (void)connect(client, server);
  server.stale_allowed = true;
  finish(client, server);
}

}  // namespace
}  // namespace peer_loss_test
