// Engines with the configuration files in conf/: each opens, connects, and moves messages and a
// call.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "engine/harness.h"
#include "own_process.h"

namespace shipped_config_test {
namespace {

using namespace engine_test;  // the names of a test namespace

constexpr std::uint64_t kMiB = 1u << 20;

std::filesystem::path folder() {
  return std::filesystem::path(__FILE__).parent_path() / ".." / ".." / "conf";
}

std::uint64_t bytes_of_pools(const Config& c) {
  return c.memory.send_bytes + c.memory.receive_bytes + c.memory.lease_bytes +
         c.memory.rendezvous_bytes;
}

/// Files whose engines take seconds to open, because of their pools, or the others.
std::vector<std::string> shipped(bool are_large) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder())) {
    if (entry.path().extension() != ".toml") continue;
    const auto loaded = Config::load(entry.path());
    if ((loaded && bytes_of_pools(*loaded) > 512 * kMiB) == are_large)
      names.push_back(entry.path().stem());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::uint64_t available_bytes() {
  return own_process::number_in("/proc/meminfo", "MemAvailable").value_or(0) << 10;
}

class EngineShippedConfig : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(File, EngineShippedConfig, testing::ValuesIn(shipped(false)),
                         [](const auto& file) { return file.param; });
INSTANTIATE_TEST_SUITE_P(SlowFile, EngineShippedConfig, testing::ValuesIn(shipped(true)),
                         [](const auto& file) { return file.param; });

TEST_P(EngineShippedConfig, OpensConnectsAndMovesData) {
  auto loaded = Config::load(folder() / (GetParam() + ".toml"));
  ASSERT_TRUE(loaded) << loaded.error().message();
  Config config = *loaded;
  config.device.name = device_name();  // the named device may be missing here
  // This machine may be busy.
  config.connections.connect_timeout = config.connections.handshake_timeout = kHandshakeLimit;
  config.rpc.call_timeout = kHandshakeLimit;
  const std::uint64_t pools = bytes_of_pools(config);
  if (!on_softverbs() && 2 * pools + 256 * kMiB > available_bytes())
    GTEST_SKIP() << "two engines pin " << 2 * pools / kMiB << " MiB, which this machine lacks";
  if (config.memory.hugepages == HugepagePolicy::require) {
    // Without reserved hugepages the error says how many to reserve.
    if (const auto opened = Engine::open(config); !opened) {
      EXPECT_EQ(opened.error().status, Status::no_memory) << opened.error().message();
      EXPECT_NE(opened.error().remedy.find("nr_hugepages"), std::string::npos)
          << opened.error().message();
    }
    config.memory.hugepages = HugepagePolicy::prefer;
  }
  Pair p(config);
  ASSERT_TRUE(p.ends.server.ready());
  std::vector<std::size_t> arrived;
  p.server.on_message = [&](Connection, Message& m) {
    arrived.push_back(Node::holds(m.bytes(), 3) ? m.size() : 0);
  };
  const std::vector<std::size_t> sizes = {1, config.connections.eager_bytes,
                                          std::min<std::size_t>(p.ends.client.max_message(), kMiB)};
  for (const std::size_t size : sizes) {
    const Buffer b = p.client.filled(size, 3);
    const std::size_t before = arrived.size();
    ASSERT_TRUE(p.until([&] {
      return p.client.tally.accepted > before ||
             p.client.tally.run([&](const CompletionCallback& done) {
               return p.ends.client.send(b, done);
             }) == Status::ok;
    }));
    ASSERT_TRUE(p.until([&] { return arrived.size() > before && p.client.tally.idle(); })) << size;
  }
  EXPECT_EQ(arrived, sizes);

  std::vector<std::size_t> replied;
  const auto served =
      p.server.engine.serve(1, [](spinwire::Request& r) { (void)r.reply(r.bytes()); });
  ASSERT_TRUE(served) << served.error().message();
  auto session = p.client.engine.open_session(p.server.listener.address(), {});
  ASSERT_TRUE(session) << session.error().message();
  ASSERT_TRUE(p.until([&] { return session->ready(); }));
  const Buffer request = p.client.filled(session->max_inline_call(), 4);
  ASSERT_EQ(session->call(1, request.slice(),
                          [&](spinwire::Reply& r) {
                            replied.push_back(Node::holds(r.bytes(), 4) ? r.bytes().size() : 0);
                          }),
            Status::ok);
  ASSERT_TRUE(p.until([&] { return !replied.empty(); }));
  EXPECT_EQ(replied, std::vector<std::size_t>{session->max_inline_call()});
  EXPECT_EQ(session->close(), Status::ok);
  ASSERT_TRUE(p.until([&] { return p.client.engine.rpc_stats().sessions == 0; }));
}

}  // namespace
}  // namespace shipped_config_test
