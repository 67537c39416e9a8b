// Scenarios 18, for rendezvous messages, and 21, raw messages, with both ends in one process.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "engine/harness.h"

namespace scenarios_raw_test {
namespace {

using namespace engine_test;  // the names of a test namespace

/// The memory of a cancelled message that was offered: its receiver may be about to pull it.
TEST(Scenario18Long, ALongMessagesBufferIsUsableAgainOnlyAfterTheAnswer) {
  Config config = small_config();
  config.memory.rendezvous_bytes = 2u << 20;
  config.memory.windows = 4;
  config.connections.max_message_bytes = 1u << 20;
  Pair p(config);
  bool right = false;
  p.server.on_message = [&](Connection, Message& m) { right = Node::holds(m.bytes(), 5); };
  Connection c = p.ends.client;
  Buffer ours = p.client.filled(600'000, 5);
  const std::byte* const abandoned = ours.data();
  ASSERT_EQ(p.client.tally.run([&](auto done) { return c.send(ours, done); }), Status::ok);
  ASSERT_EQ(c.cancel(c.last_operation()), Status::ok);
  for (int i = 0; i < 100; ++i) (void)p.client.poll();
  ASSERT_EQ(p.client.tally.ended(Status::cancelled), 1u);
  ours.reset();
  const auto reused = [&] {
    std::vector<Buffer> all;
    while (Buffer one = p.client.engine.allocate(600'000)) all.push_back(std::move(one));
    EXPECT_GT(all.size(), 1u);
    return std::any_of(all.begin(), all.end(), [&](auto& b) { return b.data() == abandoned; });
  };
  EXPECT_FALSE(reused());
  ASSERT_TRUE(p.until([&] { return c.stats().outstanding == 0; }));
  EXPECT_TRUE(right);
  EXPECT_TRUE(reused());
  EXPECT_EQ(p.client.tally.completed, 1u);
  p.finish();
}

TEST(Scenario21, RawMessagesTellTheirTrueLengthAfterThePost) {
  Node server, client;
  ListenOptions listen;
  listen.handlers = server.handlers();
  listen.settings.raw.emplace();
  server.listener = std::move(*server.engine.listen("127.0.0.1:0", listen));
  ConnectOptions options;
  options.handlers = client.handlers();
  options.settings = listen.settings;
  Connection from = *client.engine.connect(server.listener.address(), options);
  ASSERT_TRUE(until({&server, &client}, [&] { return from.ready() && server.ready.size() == 1; }));
  Connection to = server.ready[0];
  for (const std::optional<std::uint32_t> immediate :
       {std::optional<std::uint32_t>(), std::optional<std::uint32_t>(1)}) {
    std::vector<int> order;
    spinwire::RawReceive got;
    const Buffer into = server.buffer(64);
    ASSERT_EQ(to.post_receive(
                  into.slice(),
                  [&](const spinwire::RawReceive& r) {
                    order.push_back(2);
                    got = r;
                  },
                  [&] { order.push_back(1); }),
              Status::ok);
    ASSERT_TRUE(until({&server, &client}, [&] { return order.size() == 1; }));
    const Buffer ones = client.buffer(8);
    std::memset(ones.data(), 1, 8);
    ASSERT_EQ(client.tally.run([&](auto done) {
      return immediate ? from.send_raw_with_imm(ones.slice(), *immediate, done)
                       : from.send_raw(ones.slice(), done);
    }),
              Status::ok);
    ASSERT_TRUE(
        until({&server, &client}, [&] { return order.size() == 2 && client.tally.idle(); }));
    EXPECT_EQ(order, (std::vector<int>{1, 2}));
    EXPECT_EQ(got.status, Status::ok);
    EXPECT_EQ(got.bytes, 8u);  // of the 64 that there was room for
    EXPECT_EQ(got.immediate, immediate);
    EXPECT_EQ(std::vector<std::byte>(into.data(), into.data() + 8),
              std::vector<std::byte>(8, std::byte{1}));
  }
  EXPECT_EQ(to.close(), Status::ok);
  finish(client, server);
}

}  // namespace
}  // namespace scenarios_raw_test
