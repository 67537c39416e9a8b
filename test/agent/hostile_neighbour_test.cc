// A neighbour is another peer of the same engine. It has found the key of an honest connection's
// credit cell and keeps writing there. The honest connection must neither end nor stand still.
#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/raw_peer.h"
#include "base/internals.h"
#include "base/owner_guard.h"
#include "engine/engine_core.h"
#include "engine/harness.h"
#include "verbs/providers.h"

namespace hostile_neighbour_test {
namespace {

using namespace engine_test;  // NOLINT: a test's helpers
using raw_peer::Bytes;
using raw_peer::Peer;
using spinwire::PrepareOptions;
using spinwire::agent::Agent;
using spinwire::detail::EngineCore;
using spinwire::verbs::Provider;

constexpr std::uint64_t kMillisecond = 1'000'000;
constexpr std::uint32_t kPeerTimeoutMs = 1000;

Config watchful() {
  Config c = small_config();
  c.device.name = "softverbs";
  c.connections.keepalive_interval = 100ms;
  c.connections.peer_timeout = std::chrono::milliseconds(kPeerTimeoutMs);
  c.connections.credit_idle_timeout = 500ms;
  return c;
}

/// Whether the device opens a credit cell to one queue pair, as softverbs does, or to all of the
/// engine's domain, as other devices do.
enum class Opens : std::uint8_t { to_one, to_all };

std::string name_of(const testing::TestParamInfo<Opens>& info) {
  return info.param == Opens::to_one ? "ToOne" : "ToAll";
}

/// An engine whose device opens credit cells as the test asks.
class Core {
 public:
  Core(Opens opens, const std::uint64_t* ticks) : provider_(spinwire::verbs::softverbs_provider()) {
    if (opens == Opens::to_all) provider_.reg_mr_for_qp = nullptr;
    engine = std::make_unique<EngineCore>(watchful(), Clock::manual(ticks),
                                          std::move(*spinwire::base::OwnerGuard::create()));
    const Provider* const all[] = {&provider_};
    const auto opened = engine->open({.providers = all});
    EXPECT_TRUE(opened) << opened.error().message();
  }
  [[nodiscard]] spinwire::ConnectionHandlers handlers() {
    spinwire::ConnectionHandlers h;
    h.on_ready = [this](Connection c) { ready.push_back(c); };
    h.on_message = [this](Connection, Message&) { ++messages; };
    h.on_closed = [this](Connection, const Error& e) { closed.push_back(e); };
    return h;
  }
  void poll() {
    (void)engine->poll();
    (void)engine->poll_control();
  }
  /// The first connection, which is the honest one.
  [[nodiscard]] const Agent& honest() const { return engine->context.agents.at(0); }

  std::vector<Connection> ready;
  std::vector<Error> closed;
  std::uint64_t messages = 0;
  std::unique_ptr<EngineCore> engine;

 private:
  Provider provider_;
};

/// A raw peer that writes into the credit cell of the engine's honest connection. An engine that
/// loses it takes another one.
class Neighbour {
 public:
  Neighbour(Core& core, const std::uint64_t* ticks) : core_(core), peer_(Clock::manual(ticks)) {}
  ~Neighbour() { peer_.close(); }

  /// True once it is connected.
  bool connected() {
    peer_.poll();
    peer_.control();
    if (joined_ && !peer_.dead() && connection_.ready()) return true;
    if (connection_.state() != ConnectionState::closed) {
      if (!joined_ && connection_.endpoint().has_value()) join();
      if (joined_ && peer_.dead()) (void)connection_.close();
      return false;
    }
    PrepareOptions options;
    auto made = core_.engine->prepare(options);
    if (made) connection_ = *made;
    joined_ = false;
    return false;
  }
  /// Overwrites part of the cell, in place of what was there.
  void write(const Bytes& bytes, std::size_t at = 0) {
    if (!connected()) return;
    const auto& cell = core_.honest().own_cell.region;
    if (peer_.send(bytes, {IBV_WR_RDMA_WRITE, 0, 0, cell.address + at, cell.rkey})) ++written_;
    peer_.poll();
    refused_ += peer_.dead() ? 1 : 0;
  }
  [[nodiscard]] std::uint64_t succeeded() const { return written_ - refused_; }
  [[nodiscard]] std::uint64_t refused() const { return refused_; }

 private:
  void join() {
    const auto mine = peer_.open();
    peer_.join(*connection_.endpoint());
    EXPECT_TRUE(connection_.join(mine));
    joined_ = true;
  }

  Core& core_;
  Peer peer_;
  Connection connection_;
  bool joined_ = false;
  std::uint64_t written_ = 0;
  std::uint64_t refused_ = 0;
};

Bytes word(std::uint64_t value) {
  Bytes bytes(sizeof value);
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

class HostileNeighbour : public testing::TestWithParam<Opens> {
 protected:
  void SetUp() override {
    if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "the neighbour is its own device";
    ListenOptions options;
    options.handlers = server_.handlers();
    auto listener = server_.engine->listen("127.0.0.1:0", options);
    ASSERT_TRUE(listener);
    listener_ = std::move(*listener);
    ConnectOptions connect;
    connect.handlers = client_.handlers();
    ends_.client = client_.engine->connect(listener_.address(), connect).value();
    for (int i = 0; i < 100000 && (client_.ready.empty() || server_.ready.empty()); ++i) poll();
    ASSERT_FALSE(client_.ready.empty() || server_.ready.empty());
    ends_.server = server_.ready[0];
    for (Neighbour* each : {&at_client_, &at_server_}) {
      bool there = false;
      for (int i = 0; i < 100000 && !there; ++i) {
        poll();
        there = each->connected();
      }
      ASSERT_TRUE(there);
    }
  }

  void poll() {
    client_.poll();
    server_.poll();
  }
  /// One millisecond. The neighbours write after each poll of the ends, so that no end ever sees
  /// what the other wrote.
  void pass(const std::vector<Neighbour*>& attackers, const Bytes& bytes, std::size_t at = 0) {
    ticks_ += kMillisecond;
    client_.poll();
    for (Neighbour* each : attackers) each->write(bytes, at);
    server_.poll();
    for (Neighbour* each : attackers) each->write(bytes, at);
  }
  /// Sends as many messages as the connection takes, up to `most` in all.
  static void stream(Core& from, Connection to, std::uint64_t& sent, std::uint64_t most) {
    for (; sent < most; ++sent) {
      auto* block = from.engine->context.arena->allocate(spinwire::memory::PoolId::send, 64);
      if (block == nullptr) return;
      if (to.send(spinwire::detail::make<Buffer>(block, std::size_t{64})) != Status::ok) return;
    }
  }
  void expect_both_ready() const {
    EXPECT_TRUE(ends_.client.ready());
    EXPECT_TRUE(ends_.server.ready());
    for (const Core* each : {&client_, &server_}) {
      for (const Error& e : each->closed) ADD_FAILURE() << e.message();
    }
  }
  void expect_attacked(const Neighbour& by) const {
    if (GetParam() == Opens::to_one) {
      EXPECT_EQ(by.succeeded(), 0u);
      EXPECT_GT(by.refused(), 3u);
    } else {
      EXPECT_GT(by.succeeded(), 1000u);
    }
  }
  void expect_sound() {
    for (Core* each : {&client_, &server_}) {
      const auto audit = each->engine->audit();
      EXPECT_TRUE(audit) << audit.error().message();
    }
  }

  std::uint64_t ticks_ = kMillisecond;
  Core server_{GetParam(), &ticks_};
  Core client_{GetParam(), &ticks_};
  Listener listener_;
  Ends ends_;
  Neighbour at_client_{client_, &ticks_};
  Neighbour at_server_{server_, &ticks_};
};

INSTANTIATE_TEST_SUITE_P(Cells, HostileNeighbour, testing::Values(Opens::to_one, Opens::to_all),
                         name_of);

TEST_P(HostileNeighbour, DoesNotEndAnIdleConnectionWhoseCellItHides) {
  for (const std::uint64_t value : {0xdeadbeefcafef00dull, 0ull, ~0ull}) {
    for (std::uint32_t i = 0; i < 4 * kPeerTimeoutMs; ++i) pass({&at_client_}, word(value));
  }
  expect_both_ready();
  expect_attacked(at_client_);
  expect_sound();
}

TEST_P(HostileNeighbour, DoesNotEndAnIdleConnectionWhoseCellsItHidesAtBothEnds) {
  for (std::uint32_t i = 0; i < 6 * kPeerTimeoutMs; ++i)
    pass({&at_client_, &at_server_}, word(0xdeadbeefcafef00d));
  expect_both_ready();
  expect_attacked(at_client_);
  expect_attacked(at_server_);
  expect_sound();
}

TEST_P(HostileNeighbour, DoesNotStopAStreamInOneDirectionWhoseGrantsItHides) {
  constexpr std::uint64_t kMessages = 5000;
  std::uint64_t sent = 0;
  for (std::uint32_t i = 0; i < 5 * kPeerTimeoutMs; ++i) {
    stream(client_, ends_.client, sent, kMessages);
    pass({&at_client_}, word(0));
  }
  EXPECT_EQ(server_.messages, kMessages);
  expect_both_ready();
  expect_attacked(at_client_);
  expect_sound();
}

TEST_P(HostileNeighbour, DoesNotStopStreamsInBothDirectionsWhoseGrantsItHides) {
  constexpr std::uint64_t kMessages = 5000;
  std::uint64_t from_client = 0, from_server = 0;
  for (std::uint32_t i = 0; i < 5 * kPeerTimeoutMs; ++i) {
    stream(client_, ends_.client, from_client, kMessages);
    if (i > 100) stream(server_, ends_.server, from_server, kMessages);
    pass({&at_client_, &at_server_}, word(0x1234));
  }
  EXPECT_EQ(server_.messages, kMessages);
  EXPECT_EQ(client_.messages, kMessages);
  expect_both_ready();
  expect_sound();
}

TEST_P(HostileNeighbour, DoesNotForgeACountByWritingPartOfAWord) {
  // What it leaves as it was is the true peer's, the proof of the word included.
  for (std::uint32_t i = 0; i < 200; ++i) {  // until the peer has written a word of its own
    ticks_ += kMillisecond;
    poll();
  }
  std::uint64_t sent = 0;
  for (std::size_t bytes = 1; bytes <= 4; ++bytes) {
    for (std::uint32_t i = 0; i < kPeerTimeoutMs; ++i) {
      stream(client_, ends_.client, sent, 100 * bytes);
      pass({&at_client_}, Bytes(bytes, std::byte{static_cast<std::uint8_t>(0x11 + i % 64)}));
    }
    EXPECT_EQ(server_.messages, 100 * bytes);
  }
  expect_both_ready();
  expect_sound();
}

}  // namespace
}  // namespace hostile_neighbour_test
