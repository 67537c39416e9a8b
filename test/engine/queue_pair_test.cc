// The attributes of queue pairs: the device gets what the configuration says.
#include <endian.h>
#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <thread>

#include "config/connection_attributes.h"
#include "engine/devices.h"
#include "engine/harness.h"

namespace queue_pair_test {

using engine_test::Pair;
using engine_test::small_config;
using spinwire::Config;
using spinwire::Connection;
using spinwire::Engine;
using spinwire::QueuePairState;
using spinwire::Status;

TEST(EngineQueuePair, StateIsCachedAndQueried) {
  EXPECT_EQ(Connection().query_state().error().status, Status::not_connected);
  Pair p;
  const Connection c = p.ends.client;
  ASSERT_TRUE(c.query_state());
  EXPECT_EQ(*c.query_state(), QueuePairState::rts);
  EXPECT_EQ(*p.ends.server.query_state(), QueuePairState::rts);
  Status elsewhere = Status::ok;
  std::thread([&] { elsewhere = c.query_state().error().status; }).join();
  EXPECT_EQ(elsewhere, Status::wrong_thread);
  // While closing it is in ERR; then it is gone.
  bool error = false;
  Connection server = p.ends.server;
  EXPECT_EQ(server.close(), Status::ok);
  EXPECT_TRUE(p.until([&] {
    const auto state = server.query_state();
    error = error || (state && *state == QueuePairState::err);
    return !state;
  }));
  EXPECT_TRUE(error);
  EXPECT_EQ(server.query_state().error().status, Status::not_connected);
  p.finish();
}

TEST(EngineQueuePair, SettingsBecomeAttributes) {
  Config config = small_config();
  config.queue_pair.initiator_depth = 3;
  config.queue_pair.responder_depth = 5;
  config.queue_pair.service_level = 5;
  config.queue_pair.traffic_class = 106;
  config.queue_pair.flow_label = 0xabcde;
  config.queue_pair.hop_limit = 64;
  const auto options = spinwire::engine::device_options(config, spinwire::Clock::real());
  const auto device = spinwire::verbs::Device::open(options);
  ASSERT_TRUE(device);
  const auto made = spinwire::config::default_attributes(config, **device).queue_pair;
  EXPECT_EQ(made.path.service_level, 5);
  EXPECT_EQ(made.path.traffic_class, 106);
  EXPECT_EQ(made.path.flow_label, 0xabcdeu);
  EXPECT_EQ(made.path.hop_limit, 64);
  EXPECT_EQ(made.initiator_depth, 3);
  EXPECT_EQ(made.responder_depth, 5);
  Pair p(config);
  EXPECT_EQ(p.client.engine.device().initiator_depth, 3u);
  EXPECT_EQ(p.client.engine.device().responder_depth, 5u);
  EXPECT_EQ(*p.ends.client.query_state(), QueuePairState::rts);
  p.finish();
}

TEST(EngineQueuePair, APartitionKeyThatIsNotThereIsRefused) {
  Config config = small_config();
  config.queue_pair.pkey_index = 65535;
  const auto refused = Engine::open(config);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().status, Status::limit);
  EXPECT_EQ(refused.error().asked, "queue_pair.pkey_index = 65535");
}

TEST(EngineDevice, TellsItsGuidAndItsGid) {
  const auto options = spinwire::engine::device_options(small_config(), spinwire::Clock::real());
  const auto device = spinwire::verbs::Device::open(options);
  ASSERT_TRUE(device);
  ibv_device_attr attr{};
  ASSERT_EQ((*device)->provider().query_device((*device)->context(), &attr), 0);
  const spinwire::DeviceInfo& info = (*device)->info();
  EXPECT_TRUE(info.guid);
  EXPECT_EQ(info.guid.value, be64toh(attr.node_guid));
  EXPECT_EQ(std::memcmp(info.gid.as_raw().data(), (*device)->place().gid.raw, 16), 0);
  EXPECT_EQ(info.gid.interface_id(), be64toh((*device)->place().gid.global.interface_id));
  EXPECT_EQ(info.gid.subnet_prefix(), be64toh((*device)->place().gid.global.subnet_prefix));
}

TEST(EngineQueuePair, StatesHaveNames) {
  EXPECT_EQ(to_string(QueuePairState::reset), "reset");
  EXPECT_EQ(to_string(QueuePairState::err), "err");
  EXPECT_EQ(to_string(static_cast<QueuePairState>(200)), "unknown");
}

}  // namespace queue_pair_test
