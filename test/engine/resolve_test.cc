// Host names: at once, and by a thread that exists only meanwhile.
#include <gtest/gtest.h>
#include <netdb.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/internals.h"
#include "engine/engine_core.h"
#include "engine/harness.h"

namespace resolve_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Addresses;

/// Numbers of this process's threads.
std::set<std::string> threads() {
  std::set<std::string> all;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
    all.insert(task.path().filename());
  return all;
}

/// Each test waits for the threads that it started, which may outlive its engine.
class Resolve : public testing::Test {
 protected:
  /// Whether no thread of this test's is left. A thread of an earlier test may end meanwhile.
  [[nodiscard]] bool no_thread_is_left() const {
    return until({}, [this] { return std::ranges::includes(before_, threads()); });
  }
  void TearDown() override { EXPECT_TRUE(no_thread_is_left()); }

 private:
  std::set<std::string> before_ = threads();
};

TEST_F(Resolve, AnAddressIsItself) {
  EXPECT_EQ(spinwire::resolve("127.0.0.1:7777").value(), Addresses{"127.0.0.1:7777"});
  EXPECT_EQ(spinwire::resolve("[::1]:7777").value(), Addresses{"[::1]:7777"});
}

TEST_F(Resolve, ANameHasAddressesThatCanBeConnectedTo) {
  Node server;
  server.listen();
  const std::string port = server.listener.address().substr(server.listener.address().rfind(':'));
  const auto found = spinwire::resolve("localhost" + port);
  ASSERT_TRUE(found) << found.error().message();
  ASSERT_FALSE(found->empty());
  Node client;
  ConnectOptions options;
  options.handlers = client.handlers();
  options.alternatives.assign(found->begin() + 1, found->end());
  ASSERT_TRUE(client.engine.connect(found->front(), options));
  ASSERT_TRUE(until({&client, &server}, [&] { return client.ready.size() == 1; }));
}

TEST_F(Resolve, WhatIsNoNameIsRefused) {
  for (const char* wrong : {"", "localhost", "localhost:", ":1", "localhost:70000", "localhost:x",
                            "::1:1", "localhost:1 "}) {
    const auto found = spinwire::resolve(wrong);
    ASSERT_FALSE(found) << wrong;
    EXPECT_EQ(found.error().status, Status::invalid_argument) << found.error().message();
  }
}

TEST_F(Resolve, AnEngineReportsInAPollAndKeepsNoThread) {
  Node node;
  std::vector<Addresses> found;
  std::vector<Status> failed;
  const auto done = [&](const Result<Addresses>& r) {
    r ? found.push_back(*r) : failed.push_back(r.error().status);
  };
  ASSERT_TRUE(node.engine.resolve("localhost:1", done));
  ASSERT_TRUE(node.engine.resolve("nonsense", done));
  EXPECT_TRUE(found.empty() && failed.empty());
  ASSERT_TRUE(until({&node}, [&] { return found.size() + failed.size() == 2; }));
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0], spinwire::resolve("localhost:1").value());
  EXPECT_EQ(failed, std::vector<Status>{Status::invalid_argument});
  EXPECT_TRUE(no_thread_is_left());
}

/// A name service that answers when the test lets it: slow names wait.
struct SlowService {
  static inline std::atomic<int> asked, over;
  static inline std::atomic<bool> answers;

  explicit SlowService(Node& node) {
    asked = over = 0;
    answers = false;
    spinwire::detail::core_of(node.engine)->names.set_lookup(lookup);
  }
  /// A lookup that nobody ends, as its caller waits for it, fails at last.
  static int lookup(const char* host, const char*, const addrinfo*, addrinfo**) {
    ++asked;
    const std::string name = host;
    if (name.starts_with("slow"))
      (void)until(
          {}, [] { return std::this_thread::yield(), answers.load(); }, 20s);
    ++over;
    return name.ends_with("again") ? EAI_AGAIN : EAI_NONAME;
  }
};

TEST_F(Resolve, ASlowNameServiceDelaysNeitherTheCallNorPolls) {
  Pair p;
  SlowService service(p.client);
  std::vector<Status> slow, quick;
  ASSERT_TRUE(p.client.engine.resolve("slow-again:1",
                                      [&](const auto& r) { slow.push_back(r.error().status); }));
  EXPECT_EQ(service.over, 0) << "the call has waited for the name service";
  ASSERT_TRUE(p.until([&] { return service.asked == 1; }));
  // Messages come and go meanwhile, and a name that is asked for later is found before.
  p.server.on_message = [](Connection c, Message& m) { EXPECT_EQ(c.send(m.take()), Status::ok); };
  for (std::uint64_t i = 1; i <= 10; ++i) {
    const Buffer b = p.client.filled(10, 1);
    ASSERT_EQ(p.ends.client.send(b), Status::ok);
    ASSERT_TRUE(p.until([&] { return p.client.messages == i; }));
  }
  ASSERT_TRUE(p.client.engine.resolve("quick:1",
                                      [&](const auto& r) { quick.push_back(r.error().status); }));
  ASSERT_TRUE(p.until([&] { return !quick.empty(); }));
  EXPECT_EQ(quick, std::vector{Status::invalid_argument});
  EXPECT_TRUE(slow.empty());
  EXPECT_EQ(service.over, 1) << "polls have waited for the name service";
  service.answers = true;
  ASSERT_TRUE(p.until([&] { return !slow.empty(); }));
  EXPECT_EQ(slow, std::vector{Status::timed_out});
  p.finish();
}

TEST_F(Resolve, AnEngineThatGoesDoesNotWaitForTheNameService) {
  bool done = false;
  {
    Node node;
    SlowService service(node);
    ASSERT_TRUE(node.engine.resolve("slow:1", [&done](const auto&) { done = true; }));
    node.engine = Engine();
    EXPECT_EQ(service.over, 0) << "its end has waited";
  }
  SlowService::answers = true;
  ASSERT_TRUE(no_thread_is_left());
  EXPECT_EQ(SlowService::over, 1);
  EXPECT_FALSE(done);
}

TEST_F(Resolve, ASleepingEngineWakes) {
  Node node;
  bool done = false;
  ASSERT_TRUE(node.engine.resolve("localhost:1", [&done](const auto&) { done = true; }));
  ASSERT_TRUE(until({}, [&] {
    (void)node.engine.wait(std::chrono::hours(1));
    return done;
  }));
}

TEST_F(Resolve, NamesAreLimitedAndCallbacksNeeded) {
  Node node;
  const auto empty = node.engine.resolve("localhost:1", {});
  ASSERT_FALSE(empty);
  EXPECT_EQ(empty.error().status, Status::invalid_argument);
  int done = 0;
  const auto count = [&done](const auto&) { ++done; };
  for (int i = 0; i < 16; ++i) ASSERT_TRUE(node.engine.resolve("localhost:1", count));
  const auto more = node.engine.resolve("localhost:1", count);
  ASSERT_FALSE(more);
  EXPECT_EQ(more.error().status, Status::limit);
  ASSERT_TRUE(until({&node}, [&] { return done == 16; }));
  EXPECT_TRUE(node.engine.resolve("localhost:1", count));
}

TEST_F(Resolve, AnEngineMayGoMeanwhile) {
  bool done = false;
  {
    Node node;
    ASSERT_TRUE(node.engine.resolve("localhost:1", [&done](const auto&) { done = true; }));
  }
  ASSERT_TRUE(no_thread_is_left());
  EXPECT_FALSE(done);
}

}  // namespace
}  // namespace resolve_test
