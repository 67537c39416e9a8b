// The memory of long messages: from which block to which they go, by where their sender runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/harness.h"

namespace resting_blocks_test {
namespace {

using namespace engine_test;  // the names of a test namespace

constexpr std::size_t kLength = std::size_t{64} << 10;
constexpr std::size_t kMessages = 8;

Config long_messages() {
  Config c = small_config();
  c.memory.send_bytes = 24u << 20;
  c.memory.rendezvous_bytes = 8u << 20;
  c.memory.windows = 32;
  c.connections.max_message_bytes = 1u << 20;
  return c;
}

/// A server that notes where its messages lie.
struct Server {
  Node node{long_messages()};
  std::vector<const std::byte*> places;

  Server() {
    node.on_message = [this](Connection, Message& m) {
      EXPECT_EQ(m.size(), kLength);
      EXPECT_TRUE(Node::holds(m.bytes(), static_cast<std::uint32_t>(places.size())));
      places.push_back(m.data());
    };
    node.listen();
  }
  /// How many places the messages had.
  [[nodiscard]] std::size_t different() const {
    std::vector<const std::byte*> sorted = places;
    std::sort(sorted.begin(), sorted.end());
    sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
    return sorted.size();
  }
};

class EngineRestingBlocks : public testing::Test {
 protected:
  void SetUp() override {
    if (!sends_directly())
      GTEST_SKIP() << kSoftverbsOnly << "adapters write what they receive to the newest block";
  }
};

/// Sends one message after another, each once the one before has ended.
template <typename Step>
void send_all(Node& client, Connection& to, Step&& step) {
  for (std::uint32_t i = 0; i < kMessages; ++i) {
    ASSERT_EQ(to.send(client.filled(kLength, i)), Status::ok);
    ASSERT_TRUE(step([&] { return to.stats().outstanding == 0; }));
  }
}

TEST_F(EngineRestingBlocks, MessagesOfThisProcessComeInOneBlock) {
  Server server;
  Node client(long_messages());
  Connection to = connect(client, server.node).client;
  send_all(client, to, [&](auto&& done) { return until({&client, &server.node}, done); });
  ASSERT_TRUE(until({&client, &server.node}, [&] { return server.places.size() == kMessages; }));
  EXPECT_EQ(server.different(), 1u);
}

TEST_F(EngineRestingBlocks, ThoseOfAnotherProcessComeInBlocksThatItHasNotReadOfLate) {
  Child serving([](int in, int out) {
    Server server;
    write_line(out, server.node.listener.address());
    const bool all = until({&server.node},
                           [&] { return server.places.size() == kMessages || command(in) != 0; });
    write_line(out, std::to_string(server.different()));
    return all && until({&server.node}, [&] { return command(in) != 0; }) ? 0 : 1;
  });
  Node client(long_messages());
  ConnectOptions options;
  options.handlers = client.handlers();
  Connection to = *client.engine.connect(serving.line(), options);
  ASSERT_TRUE(until({&client}, [&] { return to.ready(); }));
  send_all(client, to, [&](auto&& done) { return until({&client}, done); });
  EXPECT_EQ(serving.line(), std::to_string(kMessages));
  serving.tell('q');
  EXPECT_EQ(serving.wait(), 0);
}

}  // namespace
}  // namespace resting_blocks_test
