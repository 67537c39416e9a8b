// Engine::describe(): what is in it, and that it is bounded.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine_description.h"
#include "engine/harness.h"
#include "engine/lease_ends.h"
#include "rpc/rpc_ends.h"

namespace description_test {
namespace {

using engine_test::Node;
using engine_test::Pair;
using spinwire::Config;
using spinwire::Status;
using namespace std::chrono_literals;  // NOLINT

bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}
std::size_t lines_with(const std::string& text, std::string_view begin) {
  std::size_t count = text.starts_with(begin) ? 1 : 0;
  const std::string within = "\n" + std::string(begin);
  for (std::size_t at = text.find(within); at != std::string::npos; at = text.find(within, at + 1))
    ++count;
  return count;
}

TEST(EngineDescription, HasListenersTimersSettingsAndADrain) {
  std::uint64_t ticks = 1'000'000'000;
  Pair p(engine_test::small_config(), &ticks);
  spinwire::Engine& engine = p.server.engine;
  const auto once = engine.after(2s, [] {});
  const auto again = engine.every(500ms, [] {});
  ASSERT_TRUE(once && again);
  const std::string text = engine.describe();
  EXPECT_TRUE(has(text, "listener at tcp " + p.server.listener.address() + "\n")) << text;
  EXPECT_TRUE(has(text, ": in 2.000000 s\n")) << text;
  EXPECT_TRUE(has(text, ": in 0.500000 s, every 0.500000 s\n")) << text;
  EXPECT_TRUE(has(text, "\nsetting connections.maximum = 64 ")) << text;
  EXPECT_FALSE(has(text, "setting queues.poll_batch")) << "it is the default: " << text;
  EXPECT_FALSE(has(text, "drain:")) << text;
  ASSERT_TRUE(engine.drain(3s, {}));
  EXPECT_TRUE(has(engine.describe(), "\ndrain: waits for served sessions, 3.000 s until"))
      << engine.describe();
  ASSERT_TRUE(p.until([&] { return has(engine.describe(), "\ndrain: over"); }));
}

TEST(EngineDescription, HasLeasesOfBothEnds) {
  leases::Leases t;
  const spinwire::RemoteMemory memory = t.request(4096);
  ASSERT_TRUE(memory);
  const std::string held = t.client.engine.describe();
  EXPECT_TRUE(has(held, "\nlease held ")) << held;
  EXPECT_TRUE(has(held, ": 4096 bytes, held, ")) << held;
  const std::string granted = t.server.engine.describe();
  EXPECT_TRUE(has(granted, "\nlease granted ")) << granted;
  EXPECT_TRUE(has(granted, " bytes, open, ")) << granted;
  EXPECT_TRUE(has(granted, "leases granted 1 (4096 bytes), held 0")) << granted;
}

/// The seconds that are left of the only lease.
double time_left(const std::string& text) {
  const std::size_t end = text.find(" s left");
  EXPECT_NE(end, std::string::npos) << text;
  return end != std::string::npos ? std::stod(text.substr(text.rfind(' ', end - 1))) : -1;
}

/// Nobody polls meanwhile: a debugger may look at an engine that hangs.
TEST(EngineDescription, TellsTheTimeThatIsLeftOfLeasesNow) {
  std::uint64_t ticks = 1'000'000'000;
  leases::Leases t(leases::lease_config(), &ticks);
  const spinwire::RemoteMemory memory = t.request(4096, {.duration = 10s});
  ASSERT_TRUE(memory);
  for (Node* const node : {&t.client, &t.server}) {
    const double before = time_left(node->engine.describe());
    ticks += 4'000'000'000;
    EXPECT_NEAR(time_left(node->engine.describe()), before - 4, 0.0015);
  }
}

TEST(EngineDescription, HasSixtyFourLinesOfEachKindAndTheBlockedOnesFirst) {
  if (engine_test::device_name() != "softverbs")
    GTEST_SKIP() << engine_test::kSoftverbsOnly
                 << "70 connections take long on an emulated machine";
  constexpr std::size_t kMany = spinwire::engine::kDescribedOfEach + 6;
  Config config = engine_test::small_config();
  config.connections.maximum = kMany + 1;
  config.queues.completion_depth = 32768;
  Pair p(config);
  std::vector<engine_test::Ends> more;
  while (more.size() + 1 < kMany) more.push_back(engine_test::connect(p.client, p.server));
  std::vector<spinwire::Timer> timers;
  while (timers.size() < kMany) timers.push_back(p.client.engine.after(1h, [] {}).value());
  spinwire::Connection last = more.back().client;
  const spinwire::Buffer b = p.client.filled(8, 1);
  while (last.send(b, {}, spinwire::Post::defer) == Status::ok) {
  }
  const std::string text = p.client.engine.describe();
  EXPECT_EQ(lines_with(text, "connection "), spinwire::engine::kDescribedOfEach) << text;
  EXPECT_TRUE(has(text, "\nand 6 more connections\n")) << text;
  EXPECT_EQ(lines_with(text, "timer "), spinwire::engine::kDescribedOfEach) << text;
  EXPECT_TRUE(has(text, "\nand 6 more timers of the application\n")) << text;
  const std::size_t first = text.find("\nconnection ");
  const std::string line = text.substr(first + 1, text.find('\n', first + 1) - first);
  EXPECT_TRUE(line.starts_with("connection " + std::to_string(last.index()) + '-')) << line;
  EXPECT_TRUE(has(line, "blocked by credit")) << line;
}

}  // namespace
}  // namespace description_test
