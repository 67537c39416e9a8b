// Common problems of users of RDMA libraries, by number: memory, the process and its machine.
// pain_points_test.cc says where the others are tested.
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"
#include "control/loopback.h"
#include "engine/engine_core.h"
#include "engine/harness.h"
#include "memory/hugepages.h"
#include "rpc/rpc_ends.h"
#include "softverbs/faults/fault_plan.h"

namespace pain_points_process_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Blocker;
using spinwire::softverbs::FaultPlan;

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

ibv_context* device_of(Node& node) {
  return spinwire::detail::core_of(node.engine)->context.device->context();
}

TEST(PainPoint6, MissingHugepagesAreNamedWithTheCommand) {
  Config config = small_config();
  config.memory.send_bytes = std::uint64_t{1} << 39;
  config.memory.hugepages = HugepagePolicy::require;
  const auto refused = Engine::open(config);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().status, Status::no_memory);
  EXPECT_TRUE(has(refused.error().remedy, "nr_hugepages")) << refused.error().message();
  // The other policies need none.
  for (const HugepagePolicy policy : {HugepagePolicy::prefer, HugepagePolicy::off}) {
    config = small_config();
    config.memory.hugepages = policy;
    EXPECT_TRUE(Engine::open(config)) << static_cast<int>(policy);
  }
}

std::uint64_t free_hugepage_bytes() {
  std::uint64_t bytes = 0;
  for (const auto& size : spinwire::memory::hugepage_sizes()) bytes += size.free * size.bytes;
  return bytes;
}

TEST(PainPoint6, HugepagesOfAKilledProcessComeBack) {
  Config config = small_config();
  config.memory.hugepages = HugepagePolicy::prefer;
  const std::uint64_t before = free_hugepage_bytes();
  if (before < (64u << 20))
    GTEST_SKIP() << "too few hugepages are free; Kill.VictimsHugepagesComeBack reserves some";
  Child child([&](int, int out) -> int {
    Node node(config);
    write_line(out, "open");
    for (;;) (void)node.poll();
  });
  ASSERT_EQ(child.line(), "open");
  EXPECT_LT(free_hugepage_bytes(), before);
  child.kill(SIGKILL);
  EXPECT_TRUE(until({}, [&] { return free_hugepage_bytes() >= before; }));
}

TEST(PainPoint7, AnEmptyPoolStopsNoOtherAndAllGoOnAfterIt) {
  Pair p(watchful_config());
  std::vector<Ends> all{p.ends};
  for (int i = 0; i < 3; ++i) all.push_back(connect(p.client, p.server));
  const Buffer theirs = p.server.filled(100, 1);
  std::vector<Buffer> taken;
  while (Buffer one = p.client.engine.allocate(4096)) taken.push_back(std::move(one));
  EXPECT_EQ(p.client.engine.allocate_status(), Status::no_buffer);
  // Receives, leases and the connections' own messages have memory of their own.
  for (const Ends& each : all) {
    Connection from = each.server;
    const std::uint64_t before = p.client.messages;
    ASSERT_TRUE(p.until([&] { return from.send(theirs) == Status::ok; }));
    ASSERT_TRUE(p.until([&] { return p.client.messages > before; }));
  }
  EXPECT_TRUE(p.client.engine.allocate(100, Pool::lease));
  taken.clear();
  const Buffer ours = p.client.filled(100, 2);
  for (const Ends& each : all) {
    Connection from = each.client;
    for (int i = 0; i < 50; ++i) {
      const std::uint64_t before = p.server.messages;
      ASSERT_TRUE(p.until([&] { return from.send(ours) == Status::ok; }));
      ASSERT_TRUE(p.until([&] { return p.server.messages > before; }));
    }
    EXPECT_TRUE(each.client.ready() && each.server.ready());
  }
}

TEST(PainPoint16, ABlockIsNotUsedAgainWhileTheDeviceHasIt) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "faults are injected";
  Pair p;
  constexpr std::size_t kBytes = 4000;
  const Buffer memory = p.server.buffer(kBytes, Pool::lease);
  const auto region = p.server.engine.expose(memory.slice(), Access::remote_write);
  ASSERT_TRUE(region);
  FaultPlan slow;
  slow.delay_min = slow.delay_max = 1h;
  ASSERT_TRUE(spinwire::softverbs::set_faults(device_of(p.client), slow));
  const std::byte* in_flight = nullptr;
  {
    const Buffer b = p.client.filled(kBytes, 7);
    in_flight = b.data();
    ASSERT_EQ(p.client.tally.run(
                  [&](auto done) { return p.ends.client.write(b.slice(), *region, done); }),
              Status::ok);
  }
  p.settle();
  EXPECT_EQ(p.client.tally.outstanding(), 1u);
  EXPECT_EQ(p.client.engine.memory_stats(Pool::send).blocks_used, 1u);
  std::vector<Buffer> others;
  while (Buffer one = p.client.engine.allocate(kBytes)) {
    EXPECT_NE(one.data(), in_flight);
    std::fill_n(one.data(), kBytes, std::byte{0xff});
    others.push_back(std::move(one));
  }
  others.clear();
  spinwire::softverbs::clear_faults(device_of(p.client));
  ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  EXPECT_TRUE(Node::holds(memory.bytes().first(kBytes), 7)) << "the bytes stayed until they left";
  EXPECT_EQ(p.client.engine.memory_stats(Pool::send).blocks_used, 0u);
}

/// What a process goes through that must not end it.
class Ordeal {
 public:
  Ordeal() : node_(watchful_config()), peer_(watchful_config()) {
    node_.listen();
    peer_.listen();
  }
  int run() {
    speak_nonsense();
    use_forged_key();
    kill_a_peer();
    run_out_of_descriptors();
    open_nonsense();
    throw_in_callback();
    if (device_name() == "softverbs") fail_port();
    return is_sound() ? 0 : 1;
  }

 private:
  void speak_nonsense() {
    const auto fd =
        loopback::plain_client(*spinwire::control::Address::parse(node_.listener.address()));
    const std::string text = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    EXPECT_EQ(::send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
    EXPECT_TRUE(until({&node_}, [&] { return node_.engine.stats().handshakes_refused == 1; }));
  }
  void use_forged_key() {
    Ends ends = connect(peer_, node_);
    const Buffer b = peer_.filled(8, 1);
    const RemoteRegion forged{4096, 8, 0x7fffff00, Access::remote_read_write};
    EXPECT_EQ(ends.client.write(b.slice(), forged), Status::ok);
    EXPECT_TRUE(until({&node_, &peer_}, [&] { return !node_.closed.empty(); }));
  }
  void kill_a_peer() {
    Child victim([](int in, int out) { return echo_server(in, out, small_config()); });
    const std::size_t before = node_.closed.size();
    const Connection c = node_.begin(victim.line());
    EXPECT_TRUE(until({&node_}, [&] { return c.ready(); }));
    victim.kill(SIGKILL);
    EXPECT_TRUE(until({&node_}, [&] { return node_.closed.size() > before; }));
  }
  void run_out_of_descriptors() {
    rlimit before{};
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    rlimit none = before;
    none.rlim_cur = 0;
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    EXPECT_FALSE(node_.engine.connect(peer_.listener.address(), {}));
    EXPECT_FALSE(node_.engine.listen("127.0.0.1:0", {}));
    EXPECT_FALSE(Engine::open(small_config()));
    for (int i = 0; i < 100; ++i) (void)(node_.poll() + peer_.poll());
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  }
  static void open_nonsense() {
    Config config = small_config();
    config.device.name = "no such device";
    EXPECT_FALSE(Engine::open(config));
    config = small_config();
    config.memory.send_bytes = 1;
    EXPECT_FALSE(Engine::open(config));
    config = small_config();
    config.observability.directory = "/proc";
    EXPECT_TRUE(Engine::open(config));
  }
  void throw_in_callback() {
    Ends ends = connect(peer_, node_);
    node_.on_message = [](Connection, Message&) { throw std::runtime_error("a user's mistake"); };
    const std::size_t before = node_.closed.size();
    const Buffer b = peer_.filled(8, 1);
    EXPECT_EQ(ends.client.send(b), Status::ok);
    EXPECT_TRUE(until({&node_, &peer_}, [&] { return node_.closed.size() > before; }));
    node_.on_message = {};
  }
  void fail_port() {
    using spinwire::softverbs::LinkState;
    for (const LinkState state : {LinkState::down, LinkState::up}) {
      EXPECT_EQ(spinwire::softverbs::set_port(device_of(peer_), 1, state), 0);
      for (int i = 0; i < 100; ++i) (void)(node_.poll() + peer_.poll());
    }
    spinwire::softverbs::clear_faults(device_of(peer_));
  }
  /// Whether the engine serves an honest peer as before.
  bool is_sound() {
    Ends ends = connect(peer_, node_);
    const Buffer b = peer_.filled(8, 1);
    const std::uint64_t before = node_.messages;
    EXPECT_EQ(ends.client.send(b), Status::ok);
    EXPECT_TRUE(until({&node_, &peer_}, [&] { return node_.messages > before; }));
    return node_.engine.audit().has_value() && peer_.engine.audit().has_value();
  }

  Node node_, peer_;
};

TEST(PainPoint17, NoFaultOfPeerNetworkOrEnvironmentEndsTheProcess) {
  Child child([](int, int) { return Ordeal().run(); });
  EXPECT_EQ(child.wait(), 0);
}

TEST(PainPoint18, PollAnswersZeroWhileNothingHappens) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "completions come when they like";
  std::uint64_t ticks = 1'000'000'000;
  Pair p(small_config(), &ticks);
  p.settle();
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(p.client.engine.poll(), 0);
    EXPECT_EQ(p.server.engine.poll(), 0);
  }
  const Buffer b = p.client.filled(8, 1);
  ASSERT_EQ(p.ends.client.send(b), Status::ok);
  int events = 0;
  ASSERT_TRUE(until({}, [&] {
    events += p.server.engine.poll();
    return p.server.messages == 1;
  }));
  EXPECT_GT(events, 0);
}

TEST(PainPoint18, AnIdleEngineThatSleepsTakesHardlyAnyProcessor) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "Soft-RoCE's own work is counted, too";
  Node node;
  Child peer([](int in, int out) { return echo_server(in, out, small_config()); });
  Connection c = node.begin(peer.line());
  ASSERT_TRUE(until({&node}, [&] { return c.ready(); }));
  const auto processor_time = [] {
    timespec time{};
    EXPECT_EQ(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time), 0);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  };
  // A busy machine makes the sleeps longer, and the processor's time no longer.
  spinwire::Idler idler(spinwire::IdleStrategy::wait);
  const auto before = processor_time();
  const auto begun = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begun < 1s)
    ASSERT_EQ(idler.idle(node.engine, node.engine.poll()), Status::ok);
  const auto asleep = std::chrono::steady_clock::now() - begun;
  EXPECT_LT((processor_time() - before).count() * 100, asleep.count() * slowness());
  // A message ends the sleep.
  const Buffer b = node.filled(8, 1);
  ASSERT_TRUE(until({&node}, [&] { return c.send(b) == Status::ok; }));
  EXPECT_TRUE(until({}, [&] {
    EXPECT_EQ(idler.idle(node.engine, node.engine.poll()), Status::ok);
    return node.messages != 0;
  }));
}

TEST(PainPoint20, EverythingRunsWithoutAnAdapter) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "this is about no adapter";
  rpc_test::Calls t;
  EXPECT_EQ(t.call(rpc_test::kEcho, rpc_test::filled(300, 1)).bytes, rpc_test::filled(300, 1));
  const Ends ends = connect(t.client, t.server);
  EXPECT_TRUE(ends.client.ready());
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    EXPECT_FALSE(target.starts_with("/dev/infiniband")) << target;
  }
}

TEST(PainPoint22, ASnapshotNamesWhatBlocks) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "the peer acts only when it is polled";
  Config config = small_config();
  config.queues.send_depth = 22;
  config.queues.operations = 20;
  std::uint64_t ticks = 1'000'000'000;
  Pair p(config, &ticks);
  const Ends other = connect(p.client, p.server);
  Connection first = p.ends.client, second = other.client;
  const Buffer memory = p.server.buffer(64, Pool::lease), b = p.client.filled(8, 1);
  const auto region = p.server.engine.expose(memory.slice(), Access::remote_write);
  ASSERT_TRUE(region);
  const auto expect_blocked = [&](Connection c, Blocker why) {
    EXPECT_EQ(c.snapshot().blocked_by, why);
    const std::string said = "blocked by " + std::string(to_string(why));
    EXPECT_TRUE(has(p.client.engine.describe(), said)) << p.client.engine.describe();
  };
  EXPECT_EQ(first.snapshot().blocked_by, Blocker::nothing);
  while (first.send(b, {}, Post::defer) == Status::ok) {
  }
  expect_blocked(first, Blocker::credit);
  while (first.write(b.slice(), *region, {}, Post::defer) == Status::ok) {
  }
  expect_blocked(first, Blocker::send_queue);
  while (second.write(b.slice(), *region, {}, Post::defer) == Status::ok) {
  }
  expect_blocked(second, Blocker::operations);
  std::vector<Buffer> taken;
  while (Buffer one = p.client.engine.allocate(4096)) taken.push_back(std::move(one));
  EXPECT_EQ(p.client.engine.allocate_status(), Status::no_buffer);
  EXPECT_GE(p.client.engine.snapshot().pools[static_cast<std::size_t>(Pool::send)].refusals, 1u);
  // The peer is silent.
  ticks += 5'000'000;
  (void)p.client.engine.poll();
  EXPECT_GE(first.snapshot().since_last_heard, 5ms);
}

TEST(PainPoint22, ASnapshotNamesThatNoWindowIsFree) {
  Config config = small_config();
  config.memory.windows = 3;
  config.memory.rendezvous_bytes = 4u << 20;
  config.connections.max_message_bytes = 1u << 20;
  config.queues.completion_depth = 4096;
  config.connections.direct_messages = spinwire::DirectPath::off;  // so that windows are used
  Pair p(config);
  if (!p.client.engine.device().memory_windows) GTEST_SKIP() << "the device has no windows";
  const Buffer little = p.client.filled(8, 1), b = p.client.filled(20'000, 1);
  Connection c = p.ends.client;
  ASSERT_TRUE(p.until([&] {
    (void)c.send(little);
    return c.stats().send_credits >= 8;
  }));
  ASSERT_TRUE(p.until([&] { return c.stats().outstanding == 0; }));
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::nothing);
  while (c.send(b, {}, Post::defer) == Status::ok) {
  }
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::windows);
  EXPECT_TRUE(has(p.client.engine.describe(), "blocked by windows")) << p.client.engine.describe();
  ASSERT_TRUE(p.until([&] { return c.stats().outstanding == 0; }));
  EXPECT_EQ(c.snapshot().blocked_by, Blocker::nothing);
}

TEST(PainPoint23, AForkedChildIsRefusedAndHarmsNothing) {
  Pair p;
  const Buffer b = p.client.filled(100, 1);
  Child child([&](int, int) {
    const bool refused = p.client.engine.poll() == -static_cast<int>(Status::forked_child) &&
                         p.ends.client.send(b) == Status::forked_child &&
                         !p.client.engine.allocate(8) &&
                         p.client.engine.connect(p.server.listener.address(), {}).error().status ==
                             Status::forked_child;
    p.client.engine = Engine();  // its destructor, in the child
    return refused ? 0 : 1;
  });
  EXPECT_EQ(child.wait(), 0);
  ASSERT_TRUE(p.until([&] { return p.ends.client.send(b) == Status::ok; }));
  ASSERT_TRUE(p.until([&] { return p.server.messages == 1; }));
}

TEST(PainPoint23, SystemInTheParentCorruptsNothing) {
  Pair p;
  const Buffer memory = p.server.buffer(4000, Pool::lease);
  const auto region = p.server.engine.expose(memory.slice(), Access::remote_read_write);
  ASSERT_TRUE(region);
  const Buffer back = p.client.buffer(4000);
  for (std::uint32_t i = 0; i < 20; ++i) {
    const Buffer b = p.client.filled(4000, i);
    const auto run = [&](auto&& operation) {
      ASSERT_EQ(p.client.tally.run(operation), Status::ok);
      // The child's copy of the pages must not become the device's.
      ASSERT_EQ(::system("true"), 0);
      ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
    };
    ASSERT_NO_FATAL_FAILURE(
        run([&](auto done) { return p.ends.client.write(b.slice(), *region, done); }));
    EXPECT_TRUE(Node::holds(memory.bytes().first(4000), i));
    ASSERT_NO_FATAL_FAILURE(
        run([&](auto done) { return p.ends.client.read(back.slice(), *region, done); }));
    EXPECT_TRUE(Node::holds(back.bytes().first(4000), i));
  }
  EXPECT_EQ(p.client.tally.ended(Status::ok), 40u);
}

}  // namespace
}  // namespace pain_points_process_test
