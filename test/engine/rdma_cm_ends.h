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
  /// Closes connections after each number of polls of both ends up to `most`, in steps.
  static void expect_closed_while_being_made(Node& client, Node& server, int most, int step) {
    for (int polls = 0; polls < most; polls += step) {
      Connection c = begin(client, server.listener.address());
      for (int i = 0; i < polls; ++i) (void)(client.poll() + server.poll());
      EXPECT_EQ(c.close(), Status::ok);
      ASSERT_TRUE(until({&client, &server}, [&] {
        return client.engine.stats().connections == 0 && server.engine.stats().connections == 0;
      })) << polls;
    }
    client.ready.clear();
    server.stale_allowed = client.stale_allowed = true;
    finish(client, server);
  }
  const char* address_ = nullptr;
};

}  // namespace engine_test
