// Blockers and outstanding work of a connection.
#include <gtest/gtest.h>

#include <thread>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/hostile_peer.h"
#include "base/internals.h"
#include "base/owner_guard.h"
#include "engine/engine_core.h"
#include "engine/harness.h"

namespace snapshot_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Blocker;

TEST(EngineSnapshot, TellsWhatIsOutstandingByKind) {
  Pair p(without_direct_messages());
  const bool atomics = p.client.engine.device().atomics;
  Buffer memory = p.server.buffer(64, Pool::lease);
  const auto region =
      p.server.engine
          .expose(memory.slice(), atomics ? Access::remote_all : Access::remote_read_write)
          .value();
  Connection c = p.ends.client;
  const Buffer b = p.client.filled(8, 1);
  EXPECT_EQ(c.snapshot().state, ConnectionState::ready);
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::nothing);
  ASSERT_EQ(c.send(b, {}, Post::defer), Status::ok);
  for (int i = 0; i < 2; ++i) ASSERT_EQ(c.write(b.slice(), region, {}, Post::defer), Status::ok);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(c.read(b.slice(), region, {}, Post::defer), Status::ok);
  const std::uint32_t swaps = atomics ? 4 : 0;
  for (std::uint32_t i = 0; i < swaps; ++i)
    ASSERT_EQ(c.fetch_add(region.slice(8, 8), 1, {}, Post::defer), Status::ok);
  const auto now = c.snapshot();
  EXPECT_EQ(now.messages, 1u);
  EXPECT_EQ(now.writes, 2u);
  EXPECT_EQ(now.reads, 3u);
  EXPECT_EQ(now.atomics, swaps);
  EXPECT_EQ(now.control, 0u);
  EXPECT_EQ(now.stats.outstanding, 6u + swaps);
  ASSERT_EQ(c.cancel(c.last_operation()), Status::ok);
  ASSERT_TRUE(p.until([&] { return c.stats().outstanding == 0; }));
  p.settle();
  const auto then = c.snapshot();
  EXPECT_EQ(then.messages + then.writes + then.reads + then.atomics + then.control, 0u);
  EXPECT_EQ(then.stats.messages_sent, 1u);
  EXPECT_EQ(then.stats.atomics + then.stats.reads, 2u + swaps);
}

TEST(EngineSnapshot, CountsAllThatTheConnectionSendsItself) {
  using spinwire::agent::OperationKind;
  Node peer;
  peer.listen();
  spinwire::detail::EngineCore core(small_config(), Clock::real(),
                                    std::move(*spinwire::base::OwnerGuard::create()));
  ASSERT_TRUE(core.open());
  Connection c = core.connect(peer.listener.address(), ConnectOptions{}).value();
  auto& a = *core.find(c.index(), spinwire::detail::Internals::generation(c));
  for (std::size_t i = 0; i < spinwire::agent::kOperationKinds; ++i) {
    const auto kind = static_cast<OperationKind>(i);
    spinwire::agent::count_begin(a, kind);
    const auto now = c.snapshot();
    const bool users = i < static_cast<std::size_t>(OperationKind::rendezvous_bind);
    const bool offer =
        kind == OperationKind::rendezvous_offer || kind == OperationKind::rendezvous_offer_imm;
    EXPECT_EQ(now.stats.outstanding, users ? 1u : 0u) << i;
    // An offer is the application's message; a cancelled operation counts as what it was.
    EXPECT_EQ(now.control, users || offer || kind == OperationKind::cancelled ? 0u : 1u) << i;
    --a.tallies[i].begun;
  }
  core.end();
}

TEST(EngineSnapshot, TellsWhatBlocks) {
  Config config = small_config();
  config.queues.send_depth = 22;
  config.queues.operations = 20;
  Pair p(config);
  const Ends other = connect(p.client, p.server);
  Buffer memory = p.server.buffer(64, Pool::lease);
  const auto region = p.server.engine.expose(memory.slice(), Access::remote_write).value();
  Connection c = p.ends.client, second = other.client;
  const Buffer b = p.client.filled(8, 1);
  while (c.send(b, {}, Post::defer) == Status::ok) {
  }
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::credit);
  EXPECT_EQ(c.snapshot().stats.send_credits, 0u);
  EXPECT_EQ(second.snapshot().blocked_by, Blocker::nothing);
  while (c.write(b.slice(), region, {}, Post::defer) == Status::ok) {
  }
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::send_queue);
  while (second.write(b.slice(), region, {}, Post::defer) == Status::ok) {
  }
  EXPECT_EQ(second.snapshot().blocked_by, Blocker::operations);
  EXPECT_EQ(p.client.engine.stats().operations, 20u);
  ASSERT_TRUE(p.until([&] { return p.client.engine.stats().operations == 0; }));
  // The block is over, and the next send is accepted.
  ASSERT_TRUE(p.until([&] { return c.snapshot().blocked_by == Blocker::nothing; }));
  EXPECT_EQ(c.send(b), Status::ok);
  EXPECT_EQ(second.send(b), Status::ok);
  std::thread([&] { EXPECT_EQ(c.snapshot().blocked_by, Blocker::not_ready); }).join();
  ASSERT_EQ(c.close(), Status::ok);
  EXPECT_EQ(c.snapshot().state, ConnectionState::draining);
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::not_ready);
  EXPECT_EQ(Connection().snapshot().state, ConnectionState::closed);
  EXPECT_EQ(to_string(Blocker::send_queue), "send_queue");
  EXPECT_EQ(to_string(static_cast<Blocker>(99)), "unknown");
}

Config long_config(std::uint32_t windows) {
  Config c = small_config();
  c.memory.windows = windows;
  c.memory.rendezvous_bytes = 4u << 20;
  c.connections.max_message_bytes = 1u << 20;
  c.queues.completion_depth = 4096;
  return c;
}

/// Long messages are opened by keys.
Config with_keys(Config c) {
  c.connections.direct_messages = spinwire::DirectPath::off;
  return c;
}

TEST(EngineSnapshot, ALongMessageIsOneOperationWhateverItTakes) {
  for (const std::uint32_t windows : {8u, 0u}) {
    Pair p(with_keys(long_config(windows)));
    Connection c = p.ends.client;
    Buffer b = p.client.filled(300'000, 1);
    ASSERT_EQ(c.send(b, {}, Post::defer), Status::ok);
    const auto now = c.snapshot();
    EXPECT_EQ(now.stats.outstanding, 1u);
    EXPECT_EQ(now.messages, 1u);
    EXPECT_EQ(now.control, p.client.engine.device().memory_windows && windows != 0 ? 1u : 0u);
    EXPECT_GT(p.client.engine.stats().operations, 1u);
    // The peer has no such operation, but the READs and the answer are its connection's work.
    std::uint32_t most = 0;
    ASSERT_TRUE(p.until([&] {
      const auto theirs = p.ends.server.snapshot();
      EXPECT_EQ(theirs.stats.outstanding, 0u);
      most = std::max(most, theirs.control);
      EXPECT_LE(c.stats().outstanding, 1u);
      return c.stats().outstanding == 0;
    }));
    EXPECT_GE(most, 1u);
    EXPECT_EQ(spinwire::detail::block_of(b)->refs, 1u);
    ASSERT_TRUE(p.until([&] { return p.ends.server.snapshot().control == 0; }));
    EXPECT_EQ(p.server.messages, 1u);
    b.reset();
    p.finish();
  }
}

/// Waits until the client has this much credit.
void gather_credit(Pair& p, std::uint32_t wanted) {
  const Buffer b = p.client.filled(8, 1);
  ASSERT_TRUE(p.until([&] {
    (void)p.ends.client.send(b);
    return p.ends.client.stats().send_credits >= wanted;
  }));
  ASSERT_TRUE(p.until([&] { return p.ends.client.snapshot().stats.outstanding == 0; }));
  p.settle();
}

TEST(EngineSnapshot, TellsThatWindowsAreUsedUp) {
  Pair p(with_keys(long_config(3)));
  if (!p.client.engine.device().memory_windows) GTEST_SKIP() << "the device has no windows";
  gather_credit(p, 8);
  Connection c = p.ends.client;
  Buffer b = p.client.filled(20'000, 1);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(c.snapshot().blocked_by, Blocker::nothing);
    ASSERT_EQ(c.send(b, {}, Post::defer), Status::ok);
  }
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::windows);
  EXPECT_EQ(to_string(Blocker::windows), "windows");
  EXPECT_EQ(c.send(b, {}, Post::defer), Status::would_block);
  EXPECT_EQ(c.send(b.slice(0, 8), {}, Post::defer), Status::ok);
  ASSERT_TRUE(p.until([&] { return c.stats().outstanding == 0; }));
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::nothing);
  b.reset();
  p.finish();
}

TEST(EngineSnapshot, TellsThatNoMoreLongMessagesCanBeOffered) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "the peer is its own device";
  hostile_peer::Attacked t(long_config(0));
  t.begin();
  t.peer.grant(300);  // and sends no answer
  Connection c = t.victim;
  {
    const Buffer b = t.node.filled(20'000, 1);
    Status last = Status::ok;
    std::uint32_t accepted = 0;
    ASSERT_TRUE(t.until([&] {
      last = t.node.tally.run([&](auto done) { return c.send(b, done); });
      accepted += last == Status::ok ? 1 : 0;
      return accepted == 192;  // three quarters of the records
    }));
    ASSERT_TRUE(t.until([&] { return c.snapshot().blocked_by == Blocker::windows; }));
    EXPECT_EQ(c.send(b), Status::would_block);
    EXPECT_EQ(c.stats().outstanding, 192u);
    EXPECT_EQ(t.node.tally.run([&](auto done) { return c.send(b.slice(0, 8), done); }), Status::ok);
  }
  t.peer.fail();
  ASSERT_TRUE(t.until([&] {
    (void)c.send_copy(std::as_bytes(std::span("?", 1)));
    return !t.node.closed.empty();
  }));
  t.expect_ended(t.node.closed[0].status, "", 0);
  t.finish();
}

TEST(EngineSnapshot, TellsOfWhatLacksCreditOfTheConnectionsOwn) {
  Config config = without_direct_messages();
  config.memory.windows = 8;
  Pair p(config);
  Connection c = p.ends.client;
  Buffer b = p.client.filled(8, 1);
  Buffer memory = p.server.buffer(64, Pool::lease);
  const auto region = p.server.engine.expose(memory.slice(), Access::remote_write).value();
  while (c.send(b) == Status::ok) {
  }
  const std::uint32_t sent = c.stats().outstanding;
  EXPECT_GE(sent, 1u);
  EXPECT_EQ(c.snapshot().control, 0u);
  spinwire::RemoteMemory leased;
  ASSERT_EQ(
      c.request_memory(64, {}, [&](spinwire::LeaseReply& r) { leased = std::move(r.memory); }),
      Status::ok);
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::credit);
  EXPECT_EQ(c.snapshot().control, 1u);
  EXPECT_EQ(c.stats().outstanding, sent);
  EXPECT_EQ(c.write(b.slice(), region), Status::would_block);
  // The owner's side: a bind, then the grant behind it.
  Connection theirs = p.ends.server;
  while (theirs.snapshot().leased_out == 0) {
    (void)p.client.poll();
    (void)p.server.poll();
  }
  if (p.server.engine.device().memory_windows) {
    EXPECT_GE(theirs.snapshot().control, 2u);  // a credit message may be pending
    EXPECT_EQ(theirs.stats().outstanding, 0u);
  }
  ASSERT_TRUE(p.until([&] { return static_cast<bool>(leased); }));
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::nothing);
  leased.release();
  ASSERT_TRUE(p.until([&] {
    return theirs.snapshot().leased_out == 0 && theirs.snapshot().control == 0 &&
           c.snapshot().control == 0;
  }));
  EXPECT_EQ(p.server.engine.revoke(region), Status::ok);
  b.reset();
  memory.reset();
  p.finish();
}

TEST(EngineSnapshot, TellsHowLongThePeerIsSilent) {
  std::uint64_t ticks = 1'000'000'000;
  Pair p(small_config(), &ticks);
  p.settle();
  const Buffer ours = p.client.filled(8, 1), theirs = p.server.filled(8, 2);
  Connection c = p.ends.client;
  ASSERT_EQ(p.ends.server.send(theirs), Status::ok);
  ASSERT_TRUE(p.until([&] { return p.client.messages == 1; }));
  EXPECT_EQ(c.snapshot().since_last_heard, 0ns);
  ticks += 5'000;
  (void)p.client.engine.poll();
  EXPECT_EQ(c.snapshot().since_last_heard, 5us);
  // An acknowledgement by the peer's device shows nothing about the peer's process.
  ASSERT_EQ(c.send(ours), Status::ok);
  ASSERT_TRUE(p.until([&] { return c.stats().outstanding == 0; }));
  EXPECT_EQ(c.snapshot().since_last_heard, 5us);
  ASSERT_EQ(p.ends.server.send(theirs), Status::ok);
  ASSERT_TRUE(p.until([&] { return p.client.messages == 2; }));
  EXPECT_EQ(c.snapshot().since_last_heard, 0ns);
}

}  // namespace
}  // namespace snapshot_test
