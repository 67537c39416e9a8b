// An engine with an honest connection and one to a raw peer, which may send anything.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/raw_peer.h"
#include "base/owner_guard.h"
#include "engine/engine_core.h"
#include "engine/harness.h"
#include "wire/lease_messages.h"

namespace hostile_peer {

using namespace engine_test;
using raw_peer::Bytes;
using raw_peer::How;
using raw_peer::message;
using raw_peer::Peer;
using spinwire::Endpoint;
using spinwire::Offer;
using spinwire::PrepareOptions;
namespace wire = spinwire::wire;
using wire::MessageKind;

inline constexpr std::uint32_t kLongest = 1u << 20;
inline constexpr std::uint32_t kOfferedBytes = 20000;

inline Config hostile_config() {
  Config c = small_config();
  c.memory.rendezvous_bytes = 4u << 20;
  c.memory.windows = 16;
  c.connections.max_message_bytes = kLongest;
  c.connections.rendezvous_timeout = 20s;  // nothing expires unless a test moves time
  c.leases.maximum = 64;
  c.leases.count = 4;
  c.queues.completion_depth = 8192;
  return c;
}

/// For what only messages show that are opened by keys.
inline Config hostile_config_with_keys() {
  Config c = hostile_config();
  c.connections.direct_messages = spinwire::DirectPath::off;
  return c;
}

/// An engine with an honest connection, and one to a raw peer at a time.
struct Attacked {
  explicit Attacked(const Config& c = hostile_config()) : node(c), friendly(c) {
    node.listen();
    node.on_message = [this](Connection from, Message& m) {
      if (from == honest.server) return (void)from.send(m.take());
      ++delivered;
      bytes += m.size();
    };
    honest = connect(friendly, node);
    talk();
    node.ready.clear();
  }
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({&node, &friendly}, [&] {
      peer.poll();
      peer.control();
      return done();
    });
  }
  void settle(int rounds = 100) {
    int left = rounds;
    ASSERT_TRUE(until([&] { return left-- == 0; }));
  }
  /// Connects to the raw peer, which grants `credits`.
  void begin(std::uint32_t credits = Peer::kReceives) {
    PrepareOptions options;
    options.handlers = node.handlers();
    auto made = node.engine.prepare(options);
    ASSERT_TRUE(made) << made.error().message();
    victim = *made;
    ASSERT_TRUE(until([&] { return victim.endpoint().has_value(); }));
    Endpoint mine = peer.open();
    mine.credits = credits;
    peer.join(*victim.endpoint());
    ASSERT_TRUE(victim.join(mine));
    ASSERT_TRUE(until([&] { return victim.ready(); }));
    node.closed.clear();
    delivered = bytes = 0;
    bad = node.engine.stats().bad_messages;
  }
  [[nodiscard]] std::uint64_t counted() const { return node.engine.stats().bad_messages - bad; }
  /// Checks that the honest connection still carries messages.
  void talk() {
    const std::uint64_t before = friendly.messages;
    const Buffer b = friendly.filled(300, 1);
    ASSERT_TRUE(until([&] { return honest.client.send(b) == Status::ok; }));
    ASSERT_TRUE(until([&] { return friendly.messages == before + 1; }));
  }
  /// Checks that only the raw peer's connection has ended, with `status` and a reason that contains
  /// `words`, after `bad_messages` bad messages, and that nothing of it is left.
  void expect_ended(Status status, const char* words, std::uint64_t bad_messages) {
    ASSERT_TRUE(until([&] { return !node.closed.empty(); }));
    EXPECT_EQ(node.closed[0].status, status) << node.closed[0].message();
    EXPECT_NE(node.closed[0].message().find(words), std::string::npos) << node.closed[0].message();
    EXPECT_EQ(counted(), bad_messages);
    EXPECT_EQ(victim.state(), ConnectionState::closed);
    peer.close();
    talk();
    EXPECT_TRUE(honest.server.ready());
    EXPECT_EQ(node.closed.size(), 1u);
    EXPECT_EQ(node.engine.stats().connections, 1u);
    ASSERT_TRUE(until([&] { return node.engine.stats().windows_free == windows(); }));
    EXPECT_EQ(node.engine.memory_stats(Pool::rendezvous).blocks_used, 0u);
    EXPECT_EQ(node.engine.memory_stats(Pool::lease).blocks_used, 0u);
    const auto audit = node.engine.audit();
    EXPECT_TRUE(audit) << audit.error().message();
  }
  void expect_refused(const char* words) { expect_ended(Status::protocol, words, 1); }
  [[nodiscard]] std::uint32_t windows() const { return node.engine.config().memory.windows; }
  /// Makes 20 offers of kOfferedBytes by `offer`, each of which is a message. Finishes.
  template <typename Offering>
  void expect_each_delivered(Offering&& offer) {
    begin();
    for (std::uint64_t i = 1; i <= 20; ++i) {
      ASSERT_TRUE(offer());
      ASSERT_TRUE(until([&] { return delivered == i; }));
      peer.grant(1);
      EXPECT_EQ(node.engine.memory_stats(Pool::rendezvous).blocks_used, 0u);
    }
    ASSERT_TRUE(until([&] { return peer.heard.size() == 20; }));
    EXPECT_EQ(bytes, 20u * kOfferedBytes);
    (void)victim.close();
    expect_ended(Status::ok, "", 0);
    finish();
  }
  void finish() {
    peer.close();
    node.ready.clear();
    friendly.ready = {honest.client};
    engine_test::finish(friendly, node);
  }

  Node node;
  Node friendly;
  Peer peer;
  Ends honest;
  Connection victim;
  std::uint64_t delivered = 0;
  std::uint64_t bytes = 0;
  std::uint64_t bad = 0;
};

class HostilePeer : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "the raw peer is its own device";
  }
};

/// A message that is refused at once, whatever came before.
struct Bad {
  const char* name;
  Bytes bytes;
  const char* words;
  How how{};
};

inline Bytes header(std::uint8_t kind, std::uint8_t flags, std::uint32_t length,
                    std::size_t payload) {
  return message({static_cast<MessageKind>(kind), flags, 0, length}, Bytes(payload));
}
inline constexpr const char* kNoHeader = "no valid header";

}  // namespace hostile_peer
