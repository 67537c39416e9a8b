// Test helpers: engines on a device that has direct datagrams.
#pragma once

#include "base/internals.h"
#include "rpc/bare_engine.h"
#include "rpc/client_call.h"
#include "softverbs/objects.h"

namespace rpc_test {

inline const spinwire::rpc::DatagramPort& port_of(const Node& node) {
  return *spinwire::detail::core_of(node.engine)->calls->port;
}
inline const spinwire::softverbs::Qp& queue_pair_of(const Node& node) {
  return *static_cast<const spinwire::softverbs::Qp*>(port_of(node).queue_pair());
}

class RpcDirect : public testing::Test {
 protected:
  void SetUp() override {
    if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "it has such a way";
    if (over_connections() || by_work_requests()) GTEST_SKIP() << "datagrams without work requests";
  }
};

}  // namespace rpc_test
