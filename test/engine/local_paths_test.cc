// Connections that go on through another port of their engine's device.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "engine/engine_core.h"
#include "engine/harness.h"
#include "softverbs/faults/fault_plan.h"

namespace local_paths_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::LocalPath;
using spinwire::softverbs::LinkState;

class EngineLocalPaths : public testing::Test {
 protected:
  void SetUp() override {
    if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a device with two ports";
    client_.emplace(watchful_config());
    server_.emplace(watchful_config());
    server_->listen();
  }
  [[nodiscard]] ConnectOptions over(const std::vector<LocalPath>& paths) {
    ConnectOptions options;
    options.handlers = client_->handlers();
    options.handlers.on_interrupted = [this](Connection, const Error& e) {
      interrupted_.push_back(e);
    };
    options.reconnect = {1000, 1ms, 20ms};
    options.local_paths = paths;
    return options;
  }
  [[nodiscard]] spinwire::agent::EngineContext& context() {
    return spinwire::detail::core_of(client_->engine)->context;
  }
  void set_port(std::uint8_t port, LinkState state) {
    ASSERT_EQ(spinwire::softverbs::set_port(context().device->context(), port, state), 0);
  }
  [[nodiscard]] ibv_qp* queue_pair() { return context().agents.at(connection_.index()).qp; }
  /// The port that the device has for the connection's queue pair.
  [[nodiscard]] std::uint32_t real_port() {
    ibv_qp_attr attr{};
    ibv_qp_init_attr init{};
    EXPECT_EQ(context().device->provider().query_qp(queue_pair(), &attr, IBV_QP_PORT, &init), 0);
    return attr.port_num;
  }
  void connect(const ConnectOptions& options) {
    auto made = client_->engine.connect(server_->listener.address(), options);
    ASSERT_TRUE(made) << made.error().message();
    connection_ = *made;
  }
  [[nodiscard]] bool until_ready(std::size_t times) {
    return until({&*client_, &*server_},
                 [&] { return client_->ready.size() == times && connection_.ready(); });
  }
  /// The connection uses this port, and a message arrives.
  void expect_port(std::uint32_t port) {
    EXPECT_EQ(connection_.local_path().port, port);
    EXPECT_EQ(real_port(), port);
    const std::uint64_t before = server_->messages;
    const Buffer data = client_->filled(64, port);
    ASSERT_EQ(connection_.send(data), Status::ok);
    EXPECT_TRUE(until({&*client_, &*server_}, [&] { return server_->messages == before + 1; }));
  }
  void end() {
    EXPECT_EQ(connection_.close(), Status::ok);
    EXPECT_TRUE(until({&*client_, &*server_}, [&] {
      return client_->engine.stats().connections == 0 && server_->engine.stats().connections == 0;
    }));
    client_->expect_clean();
    server_->expect_clean();
  }

  std::optional<Node> client_, server_;
  std::vector<Error> interrupted_;
  Connection connection_;
};

TEST_F(EngineLocalPaths, AConnectionGoesOnThroughTheOtherPortWhenItsLinkFails) {
  connect(over({{1}, {2}}));
  ASSERT_TRUE(until_ready(1));
  expect_port(1);
  set_port(1, LinkState::down);
  ASSERT_TRUE(until_ready(2));
  ASSERT_EQ(interrupted_.size(), 1u);
  EXPECT_EQ(interrupted_[0].status, Status::local_error);
  EXPECT_NE(interrupted_[0].found.find("the link of local port 1 is down"), std::string::npos)
      << interrupted_[0].message();
  expect_port(2);
  // Nothing brings it back before that path fails, too.
  set_port(1, LinkState::up);
  for (int i = 0; i < 100; ++i) (void)client_->poll();
  expect_port(2);
  set_port(2, LinkState::down);
  ASSERT_TRUE(until_ready(3));
  expect_port(1);
  EXPECT_TRUE(client_->closed.empty());
  end();
}

// The link is up again when the event of its failure is read.
TEST_F(EngineLocalPaths, AnOldEventEndsNothing) {
  connect(over({{1}, {2}}));
  ASSERT_TRUE(until_ready(1));
  set_port(1, LinkState::down);
  set_port(1, LinkState::up);
  for (int i = 0; i < 100; ++i) (void)client_->poll();
  ASSERT_TRUE(interrupted_.empty());
  expect_port(1);
  EXPECT_EQ(client_->ready.size(), 1u);
  end();
}

TEST_F(EngineLocalPaths, APortThatReachesNobodyIsLeft) {
  connect(over({{1}, {2}}));
  ASSERT_TRUE(until_ready(1));
  // The device reports nothing: packets of this queue pair do not arrive any more.
  ASSERT_EQ(spinwire::softverbs::set_link(queue_pair(), LinkState::down), 0);
  ASSERT_TRUE(until_ready(2));
  ASSERT_EQ(interrupted_.size(), 1u);
  EXPECT_EQ(interrupted_[0].status, Status::peer_lost);
  expect_port(2);
  end();
}

TEST_F(EngineLocalPaths, TheFirstAttemptTakesTheFirstLinkThatIsUp) {
  set_port(1, LinkState::down);
  ConnectOptions options = over({{1}, {2}});
  options.reconnect = {};
  connect(options);
  ASSERT_TRUE(until_ready(1));
  expect_port(2);
  EXPECT_TRUE(interrupted_.empty());
  end();
}

TEST_F(EngineLocalPaths, WithoutALinkTheConnectionWaitsForOne) {
  connect(over({{1}, {2}}));
  ASSERT_TRUE(until_ready(1));
  set_port(2, LinkState::down);
  for (int i = 0; i < 100; ++i) (void)client_->poll();
  EXPECT_TRUE(interrupted_.empty()) << "another port than the one in use";
  set_port(1, LinkState::down);
  ASSERT_TRUE(until({&*client_, &*server_}, [&] { return interrupted_.size() == 1; }));
  // Attempts fail, which is not final.
  const auto begun = client_->engine.stats().control_steps;
  ASSERT_TRUE(until({&*client_, &*server_},
                    [&] { return client_->engine.stats().control_steps > begun + 100; }));
  const auto refused = client_->engine.connect(server_->listener.address(), over({{1}, {2}}));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().status, Status::system);
  EXPECT_NE(refused.error().message().find("use port 2"), std::string::npos)
      << refused.error().message();
  EXPECT_NE(refused.error().found.find("the port is DOWN"), std::string::npos)
      << refused.error().message();
  set_port(2, LinkState::up);
  ASSERT_TRUE(until_ready(2));
  expect_port(2);
  EXPECT_TRUE(client_->closed.empty());
  end();
}

TEST_F(EngineLocalPaths, WithoutAFurtherAttemptAConnectionWaitsOutTheLink) {
  ConnectOptions options = over({{1}, {2}});
  options.reconnect = {};
  connect(options);
  ASSERT_TRUE(until_ready(1));
  set_port(1, LinkState::down);
  for (int i = 0; i < 10; ++i) (void)client_->poll();
  set_port(1, LinkState::up);
  expect_port(1);
  EXPECT_TRUE(client_->closed.empty());
  end();
}

TEST_F(EngineLocalPaths, WhatDoesNotExistIsRefusedWithWhatThereIs) {
  const auto expect = [&](const ConnectOptions& options, Status status,
                          std::initializer_list<const char*> texts) {
    const auto refused = client_->engine.connect(server_->listener.address(), options);
    ASSERT_FALSE(refused);
    const std::string text = refused.error().message();
    EXPECT_EQ(refused.error().status, status) << text;
    for (const char* const part : texts) EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect(over({{1}, {3}}), Status::no_device,
         {"use the local path port 3", "softverbs has 2 ports", "an engine of its own"});
  expect(over({{0}}), Status::no_device, {"use the local path port 0", "counted from 1"});
  expect(over({{2, 900}}), Status::no_device,
         {"port 2, GID index 900", "the GID table of port 2", "entries"});
  ConnectOptions both = over({{1}, {2}});
  both.settings.port = 1;
  expect(both, Status::invalid_argument, {"2 local paths", "name a port", "local_paths only"});
  ConnectOptions by_cm = over({{1}, {2}});
  by_cm.via = spinwire::Via::rdma_cm;
  expect(by_cm, Status::invalid_argument, {"rdma_cm finds the port", "Via::tcp"});
  EXPECT_EQ(client_->engine.stats().connections, 0u);
  EXPECT_EQ(Connection().local_path(), LocalPath{});
}

}  // namespace
}  // namespace local_paths_test
