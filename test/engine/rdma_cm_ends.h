// Ends of connections through rdma_cm, with device and address from the environment.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>

#include "engine/harness.h"

namespace engine_test {

class ThroughRdmaCm : public testing::Test {
 protected:
  void SetUp() override {
    address_ = std::getenv("SPINWIRE_TEST_ADDRESS");
    if (std::getenv("SPINWIRE_TEST_DEVICE") == nullptr || address_ == nullptr)
      GTEST_SKIP() << "needs SPINWIRE_TEST_DEVICE and SPINWIRE_TEST_ADDRESS: a device of rdma_cm's";
  }
  void listen(Node& node, std::uint16_t port = 0,
              const spinwire::ConnectionSettings& settings = {}) {
    ListenOptions options;
    options.handlers = node.handlers();
    options.on_accept = [&node](Connection c) {
      ++node.accepts;
      if (node.on_accept) node.on_accept(c);
    };
    options.via = spinwire::Via::rdma_cm;
    options.settings = settings;
    auto made = node.engine.listen(std::string(address_) + ":" + std::to_string(port), options);
    ASSERT_TRUE(made) << made.error().message();
    node.listener = std::move(*made);
  }
  static Connection begin(Node& node, const std::string& address,
                          const spinwire::Reconnect& again = {},
                          const spinwire::ConnectionSettings& settings = {}) {
    ConnectOptions options;
    options.handlers = node.handlers();
    options.reconnect = again;
    options.via = spinwire::Via::rdma_cm;
    options.settings = settings;
    auto made = node.engine.connect(address, options);
    EXPECT_TRUE(made) << made.error().message();
    return made ? *made : Connection();
  }
  const char* address_ = nullptr;
};

}  // namespace engine_test
