#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "base/internals.h"
#include "control/loopback.h"
#include "engine/harness.h"

namespace refusals_test {
namespace {

using namespace engine_test;  // the names of a test namespace

/// A pair, a second connection beside the misused one, and exposed memory at the server.
struct Bench : Pair {
  explicit Bench(const Config& c = watchful_config()) : Pair(c), other(connect(client, server)) {
    server.on_message = [this](Connection conn, Message&) {
      if (conn == other.server) ++others;
    };
    memory = server.buffer(4096, Pool::lease);
    region = server.engine.expose(memory.slice(), Access::remote_read_write).value();
  }
  /// Checks that the other connection still carries messages.
  void expect_others_work() {
    EXPECT_TRUE(other.client.ready());
    const std::uint64_t before = others;
    Buffer b = client.filled(100, 1);
    ASSERT_TRUE(until([&] { return other.client.send(b) == Status::ok; }));
    ASSERT_TRUE(until([&] { return others == before + 1; }));
    ASSERT_TRUE(until([&] { return other.client.stats().outstanding == 0; }));
  }
  void finish() {
    EXPECT_EQ(server.engine.revoke(region), Status::ok);
    memory.reset();
    Pair::finish();
  }
  Ends other;
  std::uint64_t others = 0;
  Buffer memory;
  RemoteRegion region;
};

TEST(EngineRefusals, MessagesAndSlicesOutOfBounds) {
  Bench b;
  Connection c = b.ends.client;
  Buffer buffer = b.client.filled(8192, 1);
  const auto outstanding = c.stats().outstanding;  // a keepalive on a slow machine
  EXPECT_EQ(c.send(buffer.slice(0, 4097)), Status::message_too_long);
  EXPECT_EQ(c.send_with_imm(buffer.slice(0, 4097), 1), Status::message_too_long);
  EXPECT_EQ(c.send_copy(buffer.slice(0, 4097).bytes()), Status::message_too_long);
  EXPECT_EQ(c.send(buffer.slice(1, 8192)), Status::out_of_bounds);
  EXPECT_EQ(c.send(buffer.slice(8193, 0)), Status::out_of_bounds);
  EXPECT_EQ(c.send(Buffer()), Status::out_of_bounds);
  EXPECT_EQ(c.send(BufferSlice()), Status::out_of_bounds);
  BufferSlice some = buffer.slice(0, 100);
  EXPECT_EQ(c.write(some, b.region.slice(4000, 97)), Status::out_of_bounds);
  EXPECT_EQ(c.write(some, b.region.slice(3997, 99)), Status::out_of_bounds);
  EXPECT_EQ(c.read(some, b.region.slice(0, 99)), Status::out_of_bounds);
  EXPECT_EQ(c.write_with_imm(some, RemoteRegion{}, 1), Status::out_of_bounds);
  EXPECT_EQ(c.write(buffer.slice(), b.region), Status::out_of_bounds);  // 8192 into 4096
  RemoteRegion readable = b.region;
  readable.access = Access::remote_read;
  EXPECT_EQ(c.write(some, readable), Status::remote_access);
  EXPECT_EQ(c.write_with_imm(some, readable, 1), Status::remote_access);
  RemoteRegion writable = b.region;
  writable.access = Access::remote_write;
  EXPECT_EQ(c.read(some, writable), Status::remote_access);
  EXPECT_EQ(c.stats().outstanding, outstanding);
  EXPECT_EQ(spinwire::detail::block_of(b.client.engine.allocate(0)), nullptr);
  EXPECT_EQ(b.client.engine.allocate_status(), Status::invalid_argument);
  EXPECT_FALSE(b.client.engine.allocate(std::size_t{1} << 40));
  EXPECT_EQ(b.client.engine.allocate_status(), Status::invalid_argument);
  EXPECT_TRUE(c.ready());
  b.expect_others_work();
  buffer.reset();
  some = {};
  b.finish();
}

/// A forged operation fails with remote_access and ends its connection; others go on.
void expect_violation(Bench& b,
                      const std::function<Status(Connection, CompletionCallback)>& forge) {
  Ends victim = connect(b.client, b.server);
  const std::size_t closed = b.client.closed.size();
  ASSERT_EQ(b.client.tally.run([&](CompletionCallback done) { return forge(victim.client, done); }),
            Status::ok);
  ASSERT_TRUE(b.until([&] { return b.client.tally.idle(); }));
  EXPECT_EQ(b.client.tally.ended(Status::remote_access), b.client.tally.accepted);
  ASSERT_TRUE(b.until([&] {
    return b.client.closed.size() == closed + 1 && victim.server.state() == ConnectionState::closed;
  }));
  EXPECT_EQ(b.client.closed.back().status, Status::remote_access)
      << b.client.closed.back().message();
  EXPECT_NE(b.server.closed.back().status, Status::ok);
  EXPECT_EQ(victim.client.send(b.memory), Status::not_connected);
  b.expect_others_work();
}

TEST(EngineRefusals, ForgedRemoteRegionsFailOnlyTheirConnection) {
  Bench b;
  Buffer local = b.client.filled(64, 7);
  std::memset(b.memory.data(), 0x22, 4096);
  Buffer neighbour = b.server.buffer(64, Pool::lease);
  std::memset(neighbour.data(), 0x33, 64);
  RemoteRegion beyond = b.region;
  beyond.address += 4096 - 32;
  RemoteRegion key = b.region;
  key.rkey ^= 1u << 20;
  RemoteRegion elsewhere = b.region;
  elsewhere.address = reinterpret_cast<std::uint64_t>(neighbour.data());
  auto readable = b.server.engine.expose(neighbour.slice(), Access::remote_read).value();
  RemoteRegion raised = readable;
  raised.access = Access::remote_read_write;
  for (const RemoteRegion& r : {beyond, key, elsewhere, raised}) {
    expect_violation(
        b, [&](Connection c, CompletionCallback done) { return c.write(local.slice(), r, done); });
    expect_violation(b, [&](Connection c, CompletionCallback done) {
      return c.write_with_imm(local.slice(), r, 5, done);
    });
  }
  for (const RemoteRegion& r : {beyond, key, elsewhere}) {
    expect_violation(
        b, [&](Connection c, CompletionCallback done) { return c.read(local.slice(), r, done); });
  }
  EXPECT_EQ(b.client.tally.accepted, 11u);
  EXPECT_EQ(neighbour.data()[0], std::byte{0x33});
  EXPECT_EQ(b.memory.data()[4095], std::byte{0x22});
  EXPECT_TRUE(Node::holds(local.bytes(), 7));
  EXPECT_EQ(b.server.engine.revoke(readable), Status::ok);
  local.reset();
  neighbour.reset();
  b.server.stale_allowed = b.client.stale_allowed = true;
  b.finish();
}

TEST(EngineRefusals, HandlesThatNameNothing) {
  Bench b;
  Buffer buffer = b.client.filled(10, 1);
  const Connection none;
  Connection stale = b.ends.client;
  ASSERT_EQ(stale.close(), Status::ok);
  EXPECT_EQ(stale.send(buffer), Status::not_connected);  // while it drains
  EXPECT_EQ(stale.close(), Status::not_connected);
  ASSERT_TRUE(b.until([&] { return b.client.closed.size() == 1; }));
  for (Connection c : {none, stale}) {
    EXPECT_EQ(c.send(buffer), Status::not_connected);
    EXPECT_EQ(c.send_copy(buffer.bytes()), Status::not_connected);
    EXPECT_EQ(c.send_with_imm(buffer.slice(), 1), Status::not_connected);
    EXPECT_EQ(c.write(buffer.slice(), b.region), Status::not_connected);
    EXPECT_EQ(c.write_with_imm(buffer.slice(), b.region, 1), Status::not_connected);
    EXPECT_EQ(c.read(buffer.slice(), b.region), Status::not_connected);
    EXPECT_EQ(c.flush(), Status::not_connected);
    EXPECT_EQ(c.close(), Status::not_connected);
    EXPECT_EQ(c.set_handlers({}), Status::not_connected);
    EXPECT_EQ(c.state(), ConnectionState::closed);
    EXPECT_EQ(c.max_message(), 0u);
    EXPECT_EQ(c.stats().messages_sent, 0u);
    EXPECT_EQ(c.peer(), "");
  }
  // A new connection in the same slot is another connection.
  const Ends next = connect(b.client, b.server);
  EXPECT_EQ(next.client.index(), stale.index());
  EXPECT_NE(next.client, stale);
  EXPECT_EQ(stale.send(buffer), Status::not_connected);
  b.expect_others_work();
  buffer.reset();
  b.finish();
}

TEST(EngineRefusals, CreditUsedUpTakesNothing) {
  Pair p;
  Buffer b = p.client.filled(10, 1);
  int sent = 0;
  Status s = Status::ok;
  for (; sent < 1000; ++sent) {
    s = p.client.tally.run([&](CompletionCallback done) { return p.ends.client.send(b, done); });
    if (s != Status::ok) break;
  }
  EXPECT_EQ(s, Status::would_block);
  EXPECT_EQ(sent, 1);                                  // the credit of an idle connection
  EXPECT_EQ(spinwire::detail::block_of(b)->refs, 2u);  // ours and the operation's
  EXPECT_EQ(p.ends.client.send_copy(b.bytes()), Status::would_block);
  EXPECT_EQ(p.client.engine.memory_stats(Pool::send).blocks_used, 1u);
  EXPECT_EQ(p.ends.client.stats().send_credits, 0u);
  ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  EXPECT_EQ(spinwire::detail::block_of(b)->refs, 1u);
  ASSERT_TRUE(p.until([&] { return p.ends.client.send(b) == Status::ok; }));
  ASSERT_TRUE(p.until([&] { return p.server.messages == 2; }));
  b.reset();
  p.finish();
}

TEST(EngineRefusals, SendQueueFullTakesNothingAndRecovers) {
  Config c = small_config();
  c.queues.send_depth = 16;
  Bench b(c);
  Buffer local = b.client.filled(64, 1);
  std::uint64_t taken = 0;
  const auto write = [&] {
    return b.client.tally.run([&](CompletionCallback done) {
      return b.ends.client.write(local.slice(), b.region, done, Post::defer);
    });
  };
  for (int round = 0; round < 3; ++round) {
    const std::uint64_t before = b.client.tally.accepted;
    while (write() == Status::ok) ASSERT_LT(++taken, 1000u);
    EXPECT_EQ(write(), Status::would_block);
    EXPECT_EQ(b.client.tally.accepted - before, 6u);  // all but the room for control requests
    EXPECT_EQ(spinwire::detail::block_of(local)->refs, 1u + 6u);
    b.expect_others_work();
    ASSERT_TRUE(b.until([&] { return b.client.tally.idle(); }));
    EXPECT_EQ(spinwire::detail::block_of(local)->refs, 1u);
  }
  EXPECT_EQ(b.client.tally.ended(Status::ok), 18u);
  local.reset();
  b.finish();
}

TEST(EngineRefusals, OperationLimitOfTheEngine) {
  Config c = small_config();
  c.queues.operations = 20;
  Bench b(c);
  Buffer local = b.client.filled(64, 1);
  std::array<Connection, 2> on = {b.ends.client, b.other.client};
  Status s = Status::ok;
  for (std::size_t i = 0; s == Status::ok && i < 100; ++i) {
    s = b.client.tally.run([&](CompletionCallback done) {
      return on[i % 2].write(local.slice(), b.region, done, Post::defer);
    });
  }
  EXPECT_EQ(s, Status::would_block);
  EXPECT_EQ(b.client.tally.accepted, 20u);
  ASSERT_TRUE(b.until([&] { return b.client.tally.idle(); }));
  b.expect_others_work();
  local.reset();
  b.finish();
}

TEST(EngineRefusals, SendPoolDry) {
  Bench b(without_direct_messages(watchful_config()));
  std::vector<Buffer> all;
  while (Buffer one = b.client.engine.allocate(4096)) all.push_back(std::move(one));
  EXPECT_EQ(b.client.engine.allocate_status(), Status::no_buffer);
  EXPECT_GT(all.size(), 400u);
  EXPECT_EQ(b.ends.client.send_copy(all[0].bytes()), Status::no_buffer);
  EXPECT_GE(b.client.engine.memory_stats(Pool::send).refusals, 2u);
  EXPECT_TRUE(b.client.engine.allocate(100, Pool::lease));  // another pool
  ASSERT_EQ(b.ends.client.send(all[0]), Status::ok);
  all.clear();
  EXPECT_TRUE(b.client.engine.allocate(4096));
  b.expect_others_work();
  b.finish();
}

/// The server keeps all messages until its receive pool is empty, then drops them.
TEST(EngineRefusals, ReceivePoolDryStopsNobodyForGood) {
  Pair p;
  std::vector<Ends> all = {p.ends};
  for (int i = 0; i < 3; ++i) all.push_back(connect(p.client, p.server));
  std::vector<Buffer> kept;
  bool keep = true;
  std::vector<std::uint64_t> arrived(4);
  p.server.on_message = [&](Connection conn, Message& m) {
    for (std::size_t i = 0; i < all.size(); ++i) arrived[i] += all[i].server == conn ? 1 : 0;
    if (keep) kept.push_back(m.take());
  };
  Buffer b = p.client.filled(500, 4);
  const auto push = [&] {
    for (Ends& e : all) {
      (void)p.client.tally.run([&](CompletionCallback done) { return e.client.send(b, done); });
    }
  };
  // Waits until no message arrives: the application holds every receive.
  std::uint64_t last = 0;
  ASSERT_TRUE(p.until([&] {
    last = p.server.messages;
    for (int i = 0; i < 300; ++i) {
      push();
      p.settle(1);
    }
    return p.server.messages == last;
  }));
  EXPECT_GT(kept.size(), 256u);
  EXPECT_LT(p.server.engine.stats().receives, 256u - 8u);
  for (Buffer& k : kept) ASSERT_TRUE(Node::holds(k.bytes(), 4));
  for (Ends& e : all) EXPECT_TRUE(e.client.ready() && e.server.ready());
  keep = false;
  kept.clear();
  const std::vector<std::uint64_t> before = arrived;
  ASSERT_TRUE(p.until([&] {
    push();
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (arrived[i] < before[i] + 500) return false;
    }
    return true;
  }));
  ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  b.reset();
  p.finish();
}

TEST(EngineRefusals, OtherThreads) {
  Bench b;
  Buffer local = b.client.filled(8, 1);
  BufferSlice slice = local.slice();
  std::vector<Status> got;
  Connection c = b.ends.client;
  std::thread([&] {
    got = {static_cast<Status>(-b.client.engine.poll()),
           static_cast<Status>(-b.client.engine.poll_control()),
           b.client.engine.flush(),
           b.client.engine.listen("127.0.0.1:0", {}).error().status,
           b.client.engine.connect(b.server.listener.address(), {}).error().status,
           b.client.engine.register_memory({}, Access::local).error().status,
           b.client.engine.expose(slice, Access::remote_read).error().status,
           b.client.engine.revoke({}),
           c.send(slice),
           c.send_copy(slice.bytes()),
           c.send_with_imm(slice, 1),
           c.write(slice, b.region),
           c.write_with_imm(slice, b.region, 1),
           c.read(slice, b.region),
           c.flush(),
           c.close(),
           c.set_handlers({})};
    EXPECT_FALSE(b.client.engine.allocate(8));
    got.push_back(b.client.engine.allocate_status());
  }).join();
  EXPECT_EQ(got, std::vector<Status>(18, Status::wrong_thread));
  EXPECT_EQ(b.client.engine.allocate_status(), Status::ok);  // the other thread wrote nothing
  EXPECT_TRUE(c.ready());
  b.expect_others_work();
  local.reset();
  slice = {};
  b.finish();
}

TEST(EngineRefusals, PollInsideACallback) {
  Pair p;
  std::vector<int> answers;
  p.server.on_message = [&](Connection, Message&) {
    answers = {p.server.engine.poll(), p.server.engine.poll_control()};
    EXPECT_EQ(p.server.engine.flush(), Status::ok);
    EXPECT_GE(p.client.engine.poll(), 0);  // another engine may be polled
  };
  Buffer b = p.client.filled(8, 1);
  ASSERT_EQ(p.ends.client.send(b), Status::ok);
  ASSERT_TRUE(p.until([&] { return answers.size() == 2; }));
  EXPECT_EQ(answers, std::vector<int>(2, -static_cast<int>(Status::reentrant)));
  b.reset();
  p.finish();
}

TEST(EngineRefusals, ForkedChildTouchesNothingOfItsParents) {
  Bench b;
  Buffer local = b.client.filled(8, 1);
  std::vector<std::byte> heap(4096);
  auto region = b.client.engine.register_memory(heap, Access::remote_read_write).value();
  Connection c = b.ends.client;
  Child child([&](int, int out) {
    const BufferSlice slice = local.slice();
    const std::vector<Status> got = {
        static_cast<Status>(-b.client.engine.poll()),
        static_cast<Status>(-b.client.engine.poll_control()),
        b.client.engine.flush(),
        b.client.engine.listen("127.0.0.1:0", {}).error().status,
        b.client.engine.connect(b.server.listener.address(), {}).error().status,
        b.client.engine.register_memory({}, Access::local).error().status,
        b.client.engine.revoke({}),
        c.send_copy({}),
        c.write(slice, b.region),
        c.flush(),
        c.close(),
        c.set_handlers({})};
    const bool refused = got == std::vector<Status>(got.size(), Status::forked_child) &&
                         !b.client.engine.allocate(8) &&
                         b.client.engine.allocate_status() == Status::forked_child;
    // Destructors that run in a child that does not just exit.
    b.server.listener = Listener();
    region = MemoryRegion();
    b.client.engine = Engine();
    b.server.engine = Engine();
    // The child may have its own engine and connect to its parent's peer.
    Node own;
    write_line(out, refused && own.engine ? "refused" : "not refused");
    return 0;
  });
  EXPECT_EQ(child.line(), "refused");
  EXPECT_EQ(child.wait(), 0);
  b.expect_others_work();
  // The registration still works, and the listener still accepts.
  Buffer back = b.server.filled(64, 9);
  ASSERT_EQ(b.server.tally.run([&](CompletionCallback done) {
    return b.ends.server.write(back.slice(), region.remote(), done);
  }),
            Status::ok);
  ASSERT_TRUE(b.until([&] { return b.server.tally.idle(); }));
  EXPECT_EQ(b.server.tally.ended(Status::ok), 1u);
  EXPECT_TRUE(Node::holds({heap.data(), 64}, 9));
  (void)connect(b.client, b.server);
  back.reset();
  local.reset();
  region = MemoryRegion();
  b.finish();
}

TEST(EngineRefusals, SetUpCallsSayWhatIsWrong) {
  Config c = small_config();
  c.device.name = "mlx5_99";
  Error e = Engine::open(c).error();
  EXPECT_EQ(e.status, Status::no_device);
  EXPECT_NE(e.asked.find("mlx5_99"), std::string::npos);
  EXPECT_NE(e.found.find("softverbs"), std::string::npos);
  c = small_config();
  c.device.port = 3;
  EXPECT_FALSE(Engine::open(c));
  c = small_config();
  c.queues.completion_depth = 64;
  EXPECT_EQ(Engine::open(c).error().status, Status::bad_config);

  Node node;
  node.listen();
  const std::string busy = node.listener.address();
  EXPECT_EQ(node.engine.listen(busy, {}).error().status, Status::in_use);
  for (const char* bad : {"", "nonsense", "127.0.0.1", "127.0.0.1:99999", "1.2.3:4", "[::1:5"}) {
    EXPECT_EQ(node.engine.listen(bad, {}).error().status, Status::invalid_argument) << bad;
    EXPECT_EQ(node.engine.connect(bad, {}).error().status, Status::invalid_argument) << bad;
  }
  EXPECT_EQ(node.engine.connect("127.0.0.1:0", {}).error().status, Status::invalid_argument);
  EXPECT_EQ(node.engine.revoke({1, 1, 12345, Access::remote_read}), Status::invalid_argument);
  EXPECT_EQ(node.engine.expose({}, Access::remote_read).error().status, Status::invalid_argument);
  EXPECT_EQ(node.engine.register_memory({}, Access::local).error().status,
            Status::invalid_argument);
  // No failed call left a connection behind.
  EXPECT_EQ(node.engine.stats().connections, 0u);
  node.expect_clean();
}

TEST(EngineRefusals, ConnectionLimitIsToldToTheClient) {
  Config servers = small_config();
  servers.connections.maximum = 2;
  Pair p(servers, small_config());
  (void)connect(p.client, p.server);
  const Connection third = p.client.begin(p.server);
  ASSERT_TRUE(p.until([&] { return p.client.closed.size() == 1; }));
  EXPECT_EQ(p.client.closed_connections[0], third);
  EXPECT_EQ(p.client.closed[0].status, Status::limit) << p.client.closed[0].message();
  EXPECT_NE(p.client.closed[0].found.find("2 connections"), std::string::npos)
      << p.client.closed[0].message();
  EXPECT_EQ(p.server.engine.stats().handshakes_refused, 1u);
  EXPECT_EQ(p.server.engine.stats().connections, 2u);
  // A freed slot is used again.
  ASSERT_EQ(p.ends.client.close(), Status::ok);
  ASSERT_TRUE(p.until([&] { return p.server.closed.size() == 1; }));
  (void)connect(p.client, p.server);
  // The client has a limit, too, and enforces it at once.
  Node few(servers);
  (void)few.begin(p.server);
  (void)few.begin(p.server);
  EXPECT_EQ(few.engine.connect(p.server.listener.address(), {}).error().status, Status::limit);
  ASSERT_TRUE(until({&few, &p.server, &p.client}, [&] { return few.closed.size() == 2; }));
  few.expect_clean();
  p.finish();
}

TEST(EngineRefusals, MissingHugepages) {
  Config c = small_config();
  c.memory.hugepages = HugepagePolicy::require;
  c.memory.send_bytes = std::uint64_t{1} << 39;
  const Error e = Engine::open(c).error();
  EXPECT_EQ(e.status, Status::no_memory);
  EXPECT_NE(e.remedy.find("nr_hugepages"), std::string::npos) << e.message();
}

TEST(EngineRefusals, LockedMemoryLimit) {
  if (!on_softverbs())
    GTEST_SKIP() << kSoftverbsOnly << "elsewhere what is registered counts as locked";
#if SPINWIRE_ASAN || SPINWIRE_TSAN
  GTEST_SKIP() << "under this sanitizer mlock does nothing";
#endif
  Child child([](int, int out) {
    rlimit low{1u << 20, 1u << 20};
    setrlimit(RLIMIT_MEMLOCK, &low);
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct data[2]{};
    syscall(SYS_capget, &header, data);
    data[0].effective &= ~(1u << CAP_IPC_LOCK);
    data[0].permitted &= ~(1u << CAP_IPC_LOCK);
    if (syscall(SYS_capset, &header, data) != 0) return 1;
    Config c = small_config();
    c.memory.lock = LockPolicy::require;
    const auto opened = Engine::open(c);
    if (opened) return 2;
    write_line(out, std::string(to_string(opened.error().status)) + " " + opened.error().message());
    c.memory.lock = LockPolicy::prefer;
    return Engine::open(c) ? 0 : 3;
  });
  const std::string line = child.line();
  EXPECT_EQ(line.rfind("no_memory", 0), 0u) << line;
  EXPECT_NE(line.find("1MiB soft"), std::string::npos) << line;
  EXPECT_EQ(child.wait(), 0);
}

}  // namespace
}  // namespace refusals_test
