// Engines of several threads that call each other: each has its own, and they share nothing.
#include <atomic>
#include <thread>

#include "rpc/ends.h"

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

/// Serves all others and calls each of them, until all have finished.
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
      const auto done = [&ended, first = bytes[0]](Reply& r) {
        ended += r.status() == Status::ok && r.bytes()[0] == first ? 1 : 0;
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

}  // namespace
}  // namespace rpc_threads_test
