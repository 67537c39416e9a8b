// Host names: at once, and by a thread that exists only meanwhile.
#include <gtest/gtest.h>

#include <filesystem>
#include <vector>

#include "engine/harness.h"

namespace resolve_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Addresses;

std::ptrdiff_t threads() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
}

TEST(Resolve, AnAddressIsItself) {
  EXPECT_EQ(spinwire::resolve("127.0.0.1:7777").value(), Addresses{"127.0.0.1:7777"});
  EXPECT_EQ(spinwire::resolve("[::1]:7777").value(), Addresses{"[::1]:7777"});
}

TEST(Resolve, ANameHasAddressesThatCanBeConnectedTo) {
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

TEST(Resolve, WhatIsNoNameIsRefused) {
  for (const char* wrong : {"", "localhost", "localhost:", ":1", "localhost:70000", "localhost:x",
                            "::1:1", "localhost:1 "}) {
    const auto found = spinwire::resolve(wrong);
    ASSERT_FALSE(found) << wrong;
    EXPECT_EQ(found.error().status, Status::invalid_argument) << found.error().message();
  }
}

TEST(Resolve, AnEngineReportsInAPollAndKeepsNoThread) {
  Node node;
  const std::ptrdiff_t before = threads();
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
  ASSERT_TRUE(until({&node}, [&] { return threads() == before; }));
}

TEST(Resolve, ASleepingEngineWakes) {
  Node node;
  bool done = false;
  ASSERT_TRUE(node.engine.resolve("localhost:1", [&done](const auto&) { done = true; }));
  ASSERT_TRUE(until({}, [&] {
    (void)node.engine.wait(std::chrono::hours(1));
    return done;
  }));
}

TEST(Resolve, NamesAreLimitedAndCallbacksNeeded) {
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

TEST(Resolve, AnEngineMayGoMeanwhile) {
  const std::ptrdiff_t before = threads();
  bool done = false;
  {
    Node node;
    ASSERT_TRUE(node.engine.resolve("localhost:1", [&done](const auto&) { done = true; }));
  }
  ASSERT_TRUE(until({}, [&] { return threads() == before; }));
  EXPECT_FALSE(done);
}

}  // namespace
}  // namespace resolve_test
