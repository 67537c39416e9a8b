// Engines on several threads that call each other. Each thread has its own engine; they share
// nothing.
#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "rpc/rpc_ends.h"

namespace rpc_threads_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

constexpr int kThreads = 3;
constexpr std::uint32_t kCalls = 500;

struct Shared {
  std::array<std::string, kThreads> addresses;
  std::atomic<int> listening = 0;
  std::atomic<int> finished = 0;
  std::atomic<int> good = 0;
};

/// Serves all others and calls each of them until all have finished.
void run_node(Shared& shared, std::size_t self) {
  Node node(rpc_config());
  node.listen();
  ASSERT_TRUE(node.engine.serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
  shared.addresses[self] = node.listener.address();
  shared.listening.fetch_add(1);
  while (shared.listening.load() != kThreads) (void)node.poll();
  std::vector<Session> sessions;
  for (std::size_t i = 0; i < kThreads; ++i) {
    if (i != self) sessions.push_back(node.engine.open_session(shared.addresses[i], {}).value());
  }
  std::uint32_t begun = 0, ended = 0;
  const auto timeout = std::chrono::steady_clock::now() + 60s;
  while (shared.finished.load() != kThreads && std::chrono::steady_clock::now() < timeout) {
    (void)node.poll();
    for (Session& s : sessions) {
      const Bytes bytes = filled(30, begun);
      const auto done = [&ended, number = begun](Reply& r) {
        const bool whole =
            r.status() == Status::ok && std::ranges::equal(r.bytes(), filled(30, number));
        ended += whole ? 1 : 0;
      };
      if (begun < kCalls && s.call(kEcho, std::span<const std::byte>(bytes), done) == Status::ok)
        ++begun;
    }
    if (ended == kCalls) {
      ended = 0;  // counted once
      shared.good.fetch_add(1);
      shared.finished.fetch_add(1);
    }
  }
}

TEST(ThreadsRpc, EachHasAnEngineAndCallsTheOthers) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "several engines at once";
  Shared shared;
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kThreads; ++i) threads.emplace_back([&, i] { run_node(shared, i); });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(shared.good.load(), kThreads);
}

/// What another thread sees of an engine that this thread polls meanwhile.
struct Seen {
  std::atomic<bool> empty = true;
  std::atomic<int> looks = 0;
};

/// Looks at the engine until it is told to stop.
void watch_engine(const Calls& t, const std::atomic<bool>& stop, Seen& seen) {
  const spinwire::Engine& engine = t.client.engine;
  while (!stop) {
    const bool empty =
        engine.stats().polls == 0 && engine.stats().connections == 0 &&
        engine.memory_stats(spinwire::Pool::send).pool_bytes == 0 &&
        engine.rpc_stats().calls == 0 && engine.config().rpc.sessions == Config().rpc.sessions &&
        engine.device().name.empty() && engine.device_name().empty() &&
        engine.clock().ticks_per_ns() > 0 && t.session.state() == SessionState::closed &&
        t.session.max_call() == 0 && t.server.listener.address().empty();
    if (!empty) seen.empty = false;
    ++seen.looks;
  }
}

TEST(ThreadsRpc, AnotherThreadSeesAnEmptyEngine) {
  Calls t;
  ASSERT_EQ(t.call(kEcho, filled(5, 1)).status, Status::ok);
  ASSERT_NE(t.client.engine.config().rpc.sessions, Config().rpc.sessions);
  std::atomic<bool> stop = false;
  Seen seen;
  std::thread other([&] { watch_engine(t, stop, seen); });
  std::uint32_t calls = 1;
  const auto timeout = std::chrono::steady_clock::now() + 120s;
  while ((calls <= 200 || seen.looks <= 100) && std::chrono::steady_clock::now() < timeout) {
    EXPECT_EQ(t.call(kEcho, filled(30, calls)).bytes, filled(30, calls));
    ++calls;
  }
  stop = true;
  other.join();
  EXPECT_TRUE(seen.empty);
  EXPECT_GT(seen.looks, 100);
  EXPECT_GT(t.client.engine.stats().polls, 0u);
  EXPECT_GT(t.client.engine.memory_stats(spinwire::Pool::send).pool_bytes, 0u);
  EXPECT_EQ(t.client.engine.rpc_stats().calls, calls);
  EXPECT_FALSE(t.client.engine.device_name().empty());
  t.finish();
}

TEST(ThreadsRpc, AHandleDroppedOnAnotherThreadReleasesNothing) {
  Node server(rpc_config()), client(rpc_config());
  server.listen();
  auto spare = server.engine.listen("127.0.0.1:0", {});
  ASSERT_TRUE(spare) << spare.error().message();
  const std::string address = spare->address();
  const Ends ends = engine_test::connect(client, server);
  Connection c = ends.client;
  spinwire::RemoteMemory memory;
  ASSERT_EQ(c.request_memory(64, {},
                             [&memory](spinwire::LeaseReply& r) { memory = std::move(r.memory); }),
            Status::ok);
  ASSERT_TRUE(engine_test::until({&client, &server}, [&] { return static_cast<bool>(memory); }));
  std::thread([&] {
    *spare = spinwire::Listener();
    memory = spinwire::RemoteMemory();
  }).join();
  EXPECT_FALSE(*spare);
  EXPECT_FALSE(memory);
  const auto again = server.engine.listen(address, {});
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().status, Status::in_use) << "it still listens";
  EXPECT_EQ(c.snapshot().leases_held, 1u);
  ASSERT_EQ(c.close(), Status::ok);
  ASSERT_TRUE(engine_test::until({&client, &server}, [&] {
    return server.engine.memory_stats(spinwire::Pool::lease).blocks_used == 0;
  })) << "the connection's end returns the memory";
  engine_test::finish(client, server);
}

TEST(ThreadsRpc, AnEngineMayBeDestroyedElsewhereOnceItsThreadHasEnded) {
  Node server(rpc_config());
  server.listen();
  ASSERT_TRUE(server.engine.serve(kLater, [](Request& r) { (void)r.defer(); }));
  const std::string address = server.listener.address();
  std::unique_ptr<Node> client;
  Connection connection;
  Session session;
  std::vector<Status> ended;
  Status inside = Status::ok;
  std::atomic<bool> is_over{false};
  std::thread owner([&] {
    client = std::make_unique<Node>(rpc_config());
    connection = client->begin(address);
    session = client->engine.open_session(address, {}).value();
    EXPECT_TRUE(
        engine_test::until({client.get()}, [&] { return connection.ready() && session.ready(); }));
    const auto done = [&](Reply& r) { ended.push_back(r.status()); };
    EXPECT_EQ(session.call(kLater, std::span<const std::byte>{}, done), Status::ok);
    const auto sent = [&](const Completion& c) {
      ended.push_back(c.status);
      inside = connection.send_copy({});
    };
    EXPECT_EQ(connection.send_copy({}, sent, Post::defer), Status::ok);
    is_over = true;
  });
  while (!is_over) (void)server.poll();
  owner.join();
  EXPECT_EQ(connection.send_copy({}), Status::wrong_thread) << "it cannot be used here";
  client->engine = Engine();
  ASSERT_EQ(ended.size(), 2u);
  EXPECT_EQ(ended[0], Status::flushed);
  // An adapter may have sent the message meanwhile.
  EXPECT_TRUE(ended[1] == Status::flushed || (!on_softverbs() && ended[1] == Status::ok))
      << to_string(ended[1]);
  EXPECT_EQ(inside, Status::wrong_thread);
  EXPECT_EQ(client->closed.size(), 1u);
  EXPECT_EQ(connection.send_copy({}), Status::not_connected);
  // The peers learn it at once.
  ASSERT_TRUE(engine_test::until({&server}, [&] {
    return server.closed.size() == 1 && server.engine.rpc_stats().served_sessions == 0;
  }));
  EXPECT_EQ(server.closed[0].status, Status::ok) << server.closed[0].message();
}

}  // namespace
}  // namespace rpc_threads_test
