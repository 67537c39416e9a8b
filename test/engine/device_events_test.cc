// The device's events reach the application with their type and connection.
#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <string>
#include <utility>
#include <vector>

#include "base/owner_guard.h"
#include "engine/engine_core.h"
#include "engine/harness.h"
#include "verbs/providers.h"

namespace device_events_test {

using engine_test::device_name;
using engine_test::kSoftverbsOnly;
using engine_test::Node;
using engine_test::on_softverbs;
using engine_test::Pair;
using spinwire::Access;
using spinwire::Connection;
using spinwire::ConnectionState;
using spinwire::DeviceEvent;
using spinwire::DeviceEventKind;
using spinwire::Pool;
using spinwire::Status;

struct Told {
  DeviceEventKind kind;
  int code;
  std::string text;
  std::string peer;
  ConnectionState state;
};

/// Writes with a key that the server never gave.
void violate(Pair& p) {
  auto memory = p.server.buffer(64, Pool::lease);
  auto region = p.server.engine.expose(memory.slice(), Access::remote_read).value();
  region.access = Access::remote_read_write;
  auto local = p.client.filled(64, 1);
  EXPECT_EQ(p.client.tally.run([&](auto done) {
    return p.ends.client.write_with_imm(local.slice(), region, 1, done);
  }),
            Status::ok);
  EXPECT_TRUE(p.until([&] { return p.client.closed.size() == 1 && p.server.closed.size() == 1; }));
  EXPECT_EQ(p.client.tally.ended(Status::remote_access), 1u);
  EXPECT_EQ(p.server.engine.revoke(region), Status::ok);
}

TEST(EngineDeviceEvents, AFailedConnectionIsNamedBeforeItEnds) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "Soft-RoCE tells of no refused access";
  Pair p;
  std::vector<Told> told;
  bool closed_before = false;
  auto tell = [&](const DeviceEvent& event) {
    closed_before = closed_before || !p.server.closed.empty();
    told.push_back({event.kind, event.code, std::string(event.text), event.connection.peer(),
                    event.connection.state()});
  };
  const auto* teller = &tell;
  ASSERT_EQ(p.server.engine.set_device_event_handler(
                [teller](const DeviceEvent& event) { (*teller)(event); }),
            Status::ok);
  const std::string peer = p.ends.server.peer();
  violate(p);
  ASSERT_FALSE(told.empty());
  EXPECT_FALSE(closed_before);
  EXPECT_EQ(told[0].kind, DeviceEventKind::connection_failed);
  EXPECT_EQ(told[0].code, IBV_EVENT_QP_ACCESS_ERR);
  EXPECT_EQ(told[0].text, ibv_event_type_str(IBV_EVENT_QP_ACCESS_ERR));
  EXPECT_EQ(told[0].peer, peer);
  EXPECT_EQ(told[0].state, ConnectionState::ready);
  EXPECT_NE(p.server.closed[0].found.find(told[0].text), std::string::npos);
  p.finish();
}

TEST(EngineDeviceEvents, AHandlerMayReplaceItself) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "Soft-RoCE tells of no refused access";
  Pair p;
  static int first, second;
  first = second = 0;
  auto* engine = &p.server.engine;
  static Status replaced;
  const spinwire::DeviceEventCallback once = [engine](const DeviceEvent&) {
    ++first;
    replaced = engine->set_device_event_handler([](const DeviceEvent&) { ++second; });
  };
  ASSERT_EQ(engine->set_device_event_handler(once), Status::ok);
  violate(p);
  EXPECT_EQ(first, 1);
  EXPECT_EQ(replaced, Status::ok);
  p.finish();
}

/// The embedded device, which fails on request.
struct Failing {
  explicit Failing(const spinwire::Config& config)
      : provider(spinwire::verbs::softverbs_provider()),
        core(config, spinwire::Clock::real(), std::move(*spinwire::base::OwnerGuard::create())) {
    fails = false;
    provider.get_async_event = [](ibv_context* context, ibv_async_event* event) {
      if (!std::exchange(fails, false))
        return spinwire::verbs::softverbs_provider().get_async_event(context, event);
      *event = {};
      event->event_type = IBV_EVENT_DEVICE_FATAL;
      return 0;
    };
    const spinwire::verbs::Provider* const all[] = {&provider};
    const auto opened = core.open({.providers = all});
    EXPECT_TRUE(opened) << opened.error().message();
  }
  spinwire::verbs::Provider provider;
  spinwire::detail::EngineCore core;
  static inline bool fails = false;
};

TEST(EngineDeviceEvents, AFailedDeviceEndsAllAndMakesNoConnection) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  Node peer;
  peer.stale_allowed = true;
  peer.listen();
  Failing failing(engine_test::small_config());
  auto& core = failing.core;
  const auto both = [&](auto&& done) {
    return engine_test::until({&peer}, [&] {
      (void)core.poll();
      return done();
    });
  };
  const auto listener = core.listen("127.0.0.1:0", {});
  ASSERT_TRUE(listener);
  spinwire::Error cause;
  spinwire::ConnectOptions options;
  options.handlers.on_closed = [&](Connection, const spinwire::Error& e) { cause = e; };
  options.reconnect.attempts = 1000;
  const auto lost = core.connect(peer.listener.address(), options);
  ASSERT_TRUE(lost);
  ASSERT_TRUE(both([&] { return lost->ready() && peer.ready.size() == 1; }));
  Failing::fails = true;
  // It is not reconnected, however many attempts were allowed.
  ASSERT_TRUE(both([&] { return cause.status != Status::ok && peer.closed.size() == 1; }));
  EXPECT_EQ(cause.status, Status::local_error) << cause.message();
  EXPECT_EQ(core.context.agents.size(), 0u);
  const auto connected = core.connect(peer.listener.address(), {});
  const auto listened = core.listen("127.0.0.1:0", {});
  const auto prepared = core.prepare({});
  ASSERT_FALSE(connected || listened || prepared);
  const spinwire::Error refusals[] = {connected.error(), listened.error(), prepared.error()};
  for (const spinwire::Error& refused : refusals) {
    EXPECT_EQ(refused.status, Status::no_device);
    EXPECT_NE(refused.found.find(ibv_event_type_str(IBV_EVENT_DEVICE_FATAL)), std::string::npos)
        << refused.message();
  }
  // A peer that connects to its listener is told as well.
  (void)peer.begin(listener->address());
  ASSERT_TRUE(both([&] { return peer.closed.size() == 2; }));
  EXPECT_EQ(peer.closed[1].status, Status::no_device) << peer.closed[1].message();
  EXPECT_NE(peer.closed[1].found.find("has failed"), std::string::npos);
  core.end();
}

TEST(EngineDeviceEvents, KindsHaveNames) {
  EXPECT_EQ(to_string(DeviceEventKind::connection_failed), "connection_failed");
  EXPECT_EQ(to_string(DeviceEventKind::gid_changed), "gid_changed");
  EXPECT_EQ(to_string(DeviceEventKind::other), "other");
  EXPECT_EQ(to_string(static_cast<DeviceEventKind>(99)), "unknown");
}

}  // namespace device_events_test
