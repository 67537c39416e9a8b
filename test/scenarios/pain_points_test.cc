// Common problems of users of RDMA libraries, by number. "peers" and "process" are the files
// pain_points_peers_test.cc and pain_points_process_test.cc.
//
//    1 wrong GID index           Gid.*, Selection.*
//    2 peer death, restart       peers, PeerLoss.*, Kill.*
//    3 completions lost          here
//    4 errors that say nothing   here
//    5 limit on locked memory    EngineRefusals.LockedMemoryLimit, MemlockTest.*,
//                                MemlockRealTest.*, RegistrationTest.DeviceErrorsAreTranslated
//    6 hugepages                 process, HugepagesTest.*, Kill.VictimsHugepagesComeBack
//    7 pools that block others   process, EngineRefusals.SendPoolDry,
//                                EngineRefusals.ReceivePoolDryStopsNobodyForGood
//    8 RNR storms                here, Credits.NoMessageEverFindsNoReceive
//    9 send queue full           here, EngineRefusals.SendQueueFullTakesNothingAndRecovers
//   10 completion queue overrun  Scenario24.*, here
//   11 shutdown                  EngineClose.PeerThatDoesNotPollIsWaitedForUpToTheDeadline, here
//   12 calls by other threads    EngineRefusals.OtherThreads, EngineRefusals.PollInsideACallback
//   13 MTU not negotiated        here
//   14 reconnect storms          peers, EngineReconnect.*
//   15 unbounded waits           peers, OperationTimeouts.*
//   16 buffers in flight         process, ArenaTest.FreePayloadsArePoisoned
//   17 the library aborts        process, Attack*.*
//   18 processor use when idle   process, Waiting.*
//   19 device limits differ      DeviceLimits.*, ConfigConnectionAttributes.*
//   20 tests without hardware    process, and all tests of a machine without an adapter;
//                                PainPoint20.IndexZeroIsNotAssumed, beside Gid.*
//   21 async events              EngineDeviceEvents.*
//   22 why did it stop?          process, EngineSnapshot.*, ToolsStatSituations.*
//   23 fork                      process, EngineRefusals.ForkedChildTouchesNothingOfItsParents
//   24 handshake without proof   peers, Authentication.*
//   25 versions, GID types       peers, Handshake.VersionMismatchNamesBothSides
//
// Everything runs on the device that SPINWIRE_TEST_DEVICE names.
#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <algorithm>
#include <string>
#include <vector>

#include "agent/agent.h"
#include "base/internals.h"
#include "base/owner_guard.h"
#include "base/random.h"
#include "engine/engine_core.h"
#include "engine/harness.h"

namespace pain_points_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::detail::EngineCore;

/// An engine with reachable internals.
struct Open {
  explicit Open(const Config& config)
      : core(config, Clock::real(), std::move(*spinwire::base::OwnerGuard::create())) {
    const auto opened = core.open();
    EXPECT_TRUE(opened) << opened.error().message();
  }
  spinwire::agent::Agent* agent(Connection c) {
    return core.find(c.index(), spinwire::detail::Internals::generation(c));
  }
  ibv_qp_attr attributes(Connection c) {
    ibv_qp_attr attr{};
    ibv_qp_init_attr init{};
    EXPECT_EQ(core.context.device->provider().query_qp(agent(c)->qp, &attr, IBV_QP_PATH_MTU, &init),
              0);
    return attr;
  }
  Buffer buffer(std::size_t size, std::uint32_t seed) {
    Buffer b = spinwire::detail::make<Buffer>(
        core.context.arena->allocate(spinwire::memory::PoolId::send, size), size);
    for (std::size_t i = 0; i < size; ++i) b.data()[i] = Node::pattern(seed, i);
    return b;
  }
  EngineCore core;
};

template <typename Done>
bool until_both(Open& a, Open& b, Done&& done) {
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  while (!done()) {
    (void)(a.core.poll() + b.core.poll());
    if (std::chrono::steady_clock::now() > deadline) return done();
  }
  return true;
}

TEST(PainPoint3, NothingIsLostWithAQueuePair) {
  Pair p;
  const Ends other = connect(p.client, p.server);
  const std::uint32_t posted = p.server.engine.stats().receives;
  const Buffer data = p.client.filled(1000, 1);
  RemoteRegion forged;
  forged.address = 4096;
  forged.length = 8;
  forged.rkey = 0x7fffff00;
  forged.access = Access::remote_read_write;
  Connection c = p.ends.client;
  // Operations behind the failed one are flushed, in both directions.
  for (int i = 0; i < 4; ++i)
    (void)p.client.tally.run([&](auto done) { return c.send(data, done, Post::defer); });
  (void)p.client.tally.run(
      [&](auto done) { return c.write(data.slice(0, 8), forged, done, Post::defer); });
  for (int i = 0; i < 12; ++i)
    (void)p.client.tally.run([&](auto done) { return c.write(data.slice(0, 8), forged, done); });
  EXPECT_GE(p.client.tally.accepted, 14u);
  ASSERT_TRUE(p.until([&] { return p.client.closed.size() == 1 && p.server.closed.size() == 1; }));
  p.settle();
  p.client.tally.expect_exact();
  EXPECT_EQ(p.client.tally.ended(Status::remote_access), 1u);
  EXPECT_EQ(p.client.engine.stats().operations, 0u);
  EXPECT_EQ(p.client.engine.stats().stale_completions, 0u);
  EXPECT_EQ(p.server.engine.stats().stale_completions, 0u);
  // Its receives are posted again, except an incomplete list.
  const std::uint32_t list = p.server.engine.config().queues.receive_postlist;
  EXPECT_GT(p.server.engine.stats().receives + list, posted);
  EXPECT_TRUE(other.client.ready());
}

TEST(PainPoint4, AnErrorNamesWhatIsNeeded) {
  Config c = watchful_config();
  c.queue_pair.retry_count = 3;
  Pair p(c);
  const Buffer data = p.client.filled(8, 1);
  RemoteRegion forged;
  forged.address = 4096;
  forged.length = 8;
  forged.rkey = 0x7fffff00;
  forged.access = Access::remote_read_write;
  const std::string server_gid = p.server.engine.device().gid.text();
  ASSERT_EQ(p.client.tally.run(
                [&](auto done) { return p.ends.client.write(data.slice(), forged, done); }),
            Status::ok);
  ASSERT_TRUE(p.until([&] { return !p.client.closed.empty(); }));
  const std::string text = p.client.closed[0].message();
  for (const std::string& part :
       {std::string("a WRITE on queue pair 0x"), p.client.engine.device().gid.text(), server_gid,
        p.server.listener.address(), std::string("completion status 10 (remote access error)"),
        std::string("vendor error"), std::string("ack_timeout 8, retry_count 3, rnr_retry 7"),
        std::string("the peer's memory was revoked")}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
  }
}

TEST(PainPoint8, FourTimesTheReceivesMeetCreditNotRnr) {
  Config c = small_config();
  c.queues.receive_depth = 48;
  c.queues.poll_batch = 64;  // one poll takes more than all receives before any is reposted
  c.connections.credits = 32;
  c.queue_pair.rnr_retry = 0;  // the first message without a receive ends its connection
  Pair p(c);
  std::vector<Ends> all{p.ends};
  for (int i = 0; i < 3; ++i) all.push_back(connect(p.client, p.server));
  const Buffer data = p.client.filled(32, 1);
  // The server polls seldom and sends less than the client.
  const std::uint64_t many = 4 * 48;
  std::uint64_t refused = 0;
  const auto burst = [&] {
    for (std::uint64_t i = 0; i < many; ++i) {
      for (Ends& e : all) {
        const Status status =
            p.client.tally.run([&](auto done) { return e.client.send(data, done); });
        if (status == Status::would_block) ++refused;
      }
    }
  };
  for (int round = 0; round < 50; ++round) {
    burst();
    (void)p.client.poll();
    if (round % 5 == 4) (void)p.server.poll();
  }
  EXPECT_GT(refused, many);
  ASSERT_TRUE(p.until(
      [&] { return p.client.tally.idle() && p.server.messages == p.client.tally.accepted; }));
  EXPECT_EQ(p.client.tally.ended(Status::ok), p.client.tally.accepted);
  for (const Ends& e : all) EXPECT_TRUE(e.client.ready() && e.server.ready());
}

/// One operation of a random kind.
Status random_operation(spinwire::base::Random& random, Connection c, const BufferSlice& data,
                        const RemoteRegion& region, const CompletionCallback& done) {
  const Post post = random.below(2) == 0 ? Post::defer : Post::now;
  const BufferSlice part = data.slice(0, random.below(200));
  switch (random.below(6)) {
    case 0:
      return c.send(part, done, post);
    case 1:
      return c.send_with_imm(part, 7, done, post);
    case 2:
      return c.write(part, region, done, post);
    case 3:
      return c.write_with_imm(part, region, 9, done, post);
    case 4:
      return c.read(data.slice(200, part.size()), region, done, post);
    default:
      return c.send_copy(part.bytes(), done, post);
  }
}

TEST(PainPoint9, NoRandomLoadOverfillsASendQueue) {
  Config c = small_config();
  c.queues.send_depth = 16;  // four of them are the engine's own
  c.connections.credit_idle_timeout = 1ms;
  c.connections.keepalive_interval = 1ms;
  Pair p(c);
  std::vector<Ends> all{p.ends};
  for (int i = 0; i < 3; ++i) all.push_back(connect(p.client, p.server));
  const Buffer memory = p.server.buffer(400, Pool::lease);
  const auto region = p.server.engine.expose(memory.slice(), Access::remote_read_write);
  const Buffer theirs = p.client.buffer(400, Pool::lease);
  const auto back = p.client.engine.expose(theirs.slice(), Access::remote_read_write);
  ASSERT_TRUE(region && back);
  const Buffer a = p.client.filled(400, 1), b = p.server.filled(400, 2);
  spinwire::base::Random random(9);
  std::uint64_t refused = 0;
  for (int i = 0; i < 10000; ++i) {
    Ends& e = all[random.below(all.size())];
    const bool ours = random.below(2) == 0;
    Node& node = ours ? p.client : p.server;
    const Status status = node.tally.run([&](const CompletionCallback& done) {
      return random_operation(random, ours ? e.client : e.server, (ours ? a : b).slice(),
                              ours ? *region : *back, done);
    });
    if (status == Status::would_block) ++refused;
    if (random.below(40) == 0) (void)p.client.poll();
    if (random.below(40) == 0) (void)p.server.poll();
  }
  // A list that the device refused would have ended its connection with a local error.
  ASSERT_TRUE(p.until([&] {
    (void)p.client.engine.flush();
    (void)p.server.engine.flush();
    return p.client.tally.idle() && p.server.tally.idle();
  }));
  EXPECT_GT(refused, 50u);
  EXPECT_EQ(p.client.tally.ended(Status::ok), p.client.tally.accepted);
  EXPECT_EQ(p.server.tally.ended(Status::ok), p.server.tally.accepted);
  for (const Ends& e : all) EXPECT_TRUE(e.client.ready() && e.server.ready());
  EXPECT_EQ(p.server.engine.revoke(*region), Status::ok);
  EXPECT_EQ(p.client.engine.revoke(*back), Status::ok);
}

TEST(PainPoint10, OneConnectionTooManyLeavesTheOthers) {
  Config c = small_config();
  c.connections.maximum = 2;
  Node server(small_config()), client(c);
  server.listen();
  Ends first = connect(client, server);
  const Ends second = connect(client, server);
  const auto third = client.engine.connect(server.listener.address(), {});
  ASSERT_FALSE(third);
  EXPECT_EQ(third.error().status, Status::limit);
  EXPECT_EQ(third.error().found.rfind("2 connections, 2 of ", 0), 0u) << third.error().message();
  const Buffer data = client.filled(8, 1);
  ASSERT_EQ(client.tally.run([&](auto done) { return first.client.send(data, done); }), Status::ok);
  ASSERT_TRUE(until({&client, &server}, [&] { return server.messages == 1; }));
  EXPECT_TRUE(second.client.ready());
}

TEST(PainPoint11, LateCompletionsAreCounted) {
  Open engine(small_config());
  auto& context = engine.core.context;
  ibv_wc late[3]{};
  // Receives of a destroyed queue pair, in two states, and a send.
  late[0].wr_id = spinwire::agent::receive_id(0);
  late[0].status = IBV_WC_SUCCESS;
  late[0].opcode = IBV_WC_RECV;
  late[0].qp_num = 0x123456;
  late[1] = late[0];
  late[1].wr_id = spinwire::agent::receive_id(1);
  late[1].status = IBV_WC_WR_FLUSH_ERR;
  late[2].wr_id = std::uint64_t{77} << 32 | 6;
  late[2].status = IBV_WC_WR_FLUSH_ERR;
  late[2].qp_num = 0x123456;
  const std::uint32_t posted = context.posted_receives;
  const std::uint32_t chained = context.receives.count();
  (void)spinwire::agent::process_completions(context, late, 3);
  EXPECT_EQ(context.stats.stale_completions, 3u);
  // Their receives are not lost.
  EXPECT_EQ(context.posted_receives + context.receives.count(), posted + chained);
  EXPECT_EQ(context.receives.count(), chained + 2);
}

TEST(PainPoint13, BothEndsTakeTheSmallerMtu) {
  Config large = small_config(), little = small_config();
  large.connections.mtu = 4096;
  little.connections.mtu = 1024;
  for (const bool listens_large : {true, false}) {
    Open server(listens_large ? large : little), client(listens_large ? little : large);
    Connection at_server;
    ListenOptions listen;
    listen.handlers.on_ready = [&](Connection c) { at_server = c; };
    auto listener = server.core.listen("127.0.0.1:0", listen);
    ASSERT_TRUE(listener);
    auto at_client = client.core.connect(listener->address(), {});
    ASSERT_TRUE(at_client);
    ASSERT_TRUE(
        until_both(server, client, [&] { return at_client->ready() && at_server.ready(); }));
    EXPECT_EQ(server.attributes(at_server).path_mtu, IBV_MTU_1024);
    EXPECT_EQ(client.attributes(*at_client).path_mtu, IBV_MTU_1024);
    constexpr std::size_t kBytes = 100'000;
    const Buffer theirs = server.buffer(kBytes, 1);
    const auto region =
        server.core.context.registrations->expose(theirs.slice(), Access::remote_read_write);
    ASSERT_TRUE(region);
    const Buffer ours = client.buffer(kBytes, 2), got = client.buffer(kBytes, 3);
    int ended = 0;
    const CompletionCallback done = [&ended](const Completion& c) {
      ended += c.status == Status::ok ? 1 : 100;
    };
    ASSERT_EQ(at_client->read(got.slice(), *region, done), Status::ok);
    ASSERT_TRUE(until_both(server, client, [&] { return ended != 0; }));
    EXPECT_TRUE(Node::holds(got.bytes(), 1));
    ASSERT_EQ(at_client->write(ours.slice(), *region, done), Status::ok);
    ASSERT_TRUE(until_both(server, client, [&] { return ended != 1; }));
    EXPECT_EQ(ended, 2);
    EXPECT_TRUE(Node::holds(theirs.bytes(), 2));
    server.core.end();
    client.core.end();
  }
}

}  // namespace
}  // namespace pain_points_test
