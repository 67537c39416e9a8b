#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "engine/harness.h"

namespace out_of_band_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Endpoint;
using spinwire::GidType;
using spinwire::Nanoseconds;
using spinwire::PrepareOptions;

/// One end of a connection made out-of-band.
struct End {
  explicit End(const Config& config = small_config(), const std::uint64_t* ticks = nullptr)
      : node(config, ticks) {}
  Connection prepare(Nanoseconds timeout = {}) {
    PrepareOptions options;
    options.handlers = node.handlers();
    options.on_endpoint = [this](Connection c, const Endpoint& e) {
      ++told;
      endpoint = e;
      if (on_endpoint) on_endpoint(c, e);
    };
    options.timeout = timeout;
    auto made = node.engine.prepare(options);
    EXPECT_TRUE(made) << made.error().message();
    if (made) connection = *made;
    return connection;
  }
  std::function<void(Connection, const Endpoint&)> on_endpoint;
  int told = 0;
  Endpoint endpoint;
  Connection connection;
  Node node;
};

bool both_told(End& a, End& b) {
  return until({&a.node, &b.node}, [&] { return a.told == 1 && b.told == 1; });
}
bool both_ready(End& a, End& b) {
  return until({&a.node, &b.node}, [&] { return a.connection.ready() && b.connection.ready(); });
}
void expect_message(End& from, End& to, std::uint32_t seed) {
  const Buffer data = from.node.filled(8, seed);
  bool right = false;
  to.node.on_message = [&](Connection c, Message& m) {
    right = c == to.connection && m.size() == 8 && Node::holds(m.bytes(), seed);
  };
  EXPECT_EQ(from.node.tally.run([&](auto done) { return from.connection.send(data, done); }),
            Status::ok);
  EXPECT_TRUE(until({&from.node, &to.node}, [&] { return right && from.node.tally.idle(); }));
  to.node.on_message = {};
}

TEST(EngineOutOfBand, EndpointsBroughtAsTextConnect) {
  End a, b;
  a.prepare();
  b.prepare();
  EXPECT_EQ(a.connection.endpoint().error().status, Status::not_connected);
  ASSERT_TRUE(both_told(a, b));
  EXPECT_EQ(a.connection.state(), ConnectionState::exchanging);
  EXPECT_EQ(*a.connection.endpoint(), a.endpoint);
  ASSERT_TRUE(a.connection.join(*Endpoint::parse(b.endpoint.text())));
  ASSERT_TRUE(b.connection.join(*Endpoint::parse(a.endpoint.text())));
  ASSERT_TRUE(both_ready(a, b));
  EXPECT_EQ(a.node.ready.size(), 1u);
  EXPECT_NE(a.connection.peer().find("queue pair"), std::string::npos) << a.connection.peer();
  expect_message(a, b, 1);
  expect_message(b, a, 2);
  finish(a.node, b.node);
  EXPECT_EQ(a.node.closed.size(), 1u);
  EXPECT_EQ(a.node.closed[0].status, Status::ok);
  EXPECT_EQ(a.told + b.told, 2);
}

TEST(EngineOutOfBand, JoinedBeforeOurOwnEndIsThere) {
  End a, b;
  a.prepare();
  ASSERT_TRUE(until({&a.node}, [&] { return a.told == 1; }));
  b.prepare();
  ASSERT_TRUE(b.connection.join(a.endpoint));  // b has no queue pair yet
  ASSERT_TRUE(until({&b.node}, [&] { return b.told == 1 && b.connection.ready(); }));
  ASSERT_TRUE(a.connection.join(b.endpoint));
  ASSERT_TRUE(both_ready(a, b));
  expect_message(a, b, 3);
  finish(a.node, b.node);
}

TEST(EngineOutOfBand, JoinedFromTheCallback) {
  End a, b;
  a.prepare();
  ASSERT_TRUE(until({&a.node}, [&] { return a.told == 1; }));
  b.on_endpoint = [&](Connection c, const Endpoint& e) {
    EXPECT_TRUE(c.join(a.endpoint));
    EXPECT_TRUE(a.connection.join(e));
  };
  b.prepare();
  ASSERT_TRUE(both_ready(a, b));
  expect_message(b, a, 4);
  finish(a.node, b.node);
}

TEST(EngineOutOfBand, ClosedFromTheCallback) {
  End a;
  a.on_endpoint = [](Connection c, const Endpoint&) { EXPECT_EQ(c.close(), Status::ok); };
  a.prepare();
  ASSERT_TRUE(until({&a.node}, [&] { return !a.node.closed.empty(); }));
  EXPECT_EQ(a.node.closed[0].status, Status::ok);
  a.node.expect_clean();
}

TEST(EngineOutOfBand, SentBeforeThePeerJoinedArrivesOnce) {
  End a, b;
  a.prepare();
  b.prepare();
  ASSERT_TRUE(both_told(a, b));
  ASSERT_TRUE(a.connection.join(b.endpoint));
  ASSERT_TRUE(until({&a.node, &b.node}, [&] { return a.connection.ready(); }));
  Buffer data = a.node.filled(100, 9);
  ASSERT_EQ(a.node.tally.run([&](auto done) { return a.connection.send(data, done); }), Status::ok);
  data.reset();
  for (int i = 0; i < 200; ++i) (void)(a.node.poll() + b.node.poll());
  EXPECT_EQ(b.node.messages, 0u);
  EXPECT_FALSE(a.node.tally.idle());
  ASSERT_TRUE(b.connection.join(a.endpoint));
  ASSERT_TRUE(
      until({&a.node, &b.node}, [&] { return a.node.tally.idle() && b.node.messages == 1; }));
  EXPECT_EQ(a.node.tally.ended(Status::ok), 1u);
  ASSERT_TRUE(both_ready(a, b));
  finish(a.node, b.node);
}

TEST(EngineOutOfBand, AMessageBeforeOurLastStepMakesItReady) {
  Config manual = small_config();
  manual.engine.control = ControlMode::manual;
  End a, b(manual);
  b.node.listen();
  (void)connect(a.node, b.node);  // connects the two devices
  a.prepare();
  b.prepare();
  ASSERT_TRUE(both_told(a, b));
  ASSERT_TRUE(a.connection.join(b.endpoint));
  ASSERT_TRUE(b.connection.join(a.endpoint));
  ASSERT_GE(b.node.engine.poll_control(), 0);  // its queue pair can receive now, but not send
  ASSERT_TRUE(until({&a.node}, [&] { return a.connection.ready(); }));
  {
    const Buffer data = a.node.filled(100, 6);
    ASSERT_EQ(a.node.tally.run([&](auto done) { return a.connection.send(data, done); }),
              Status::ok);
  }
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  while (b.node.messages == 0 && std::chrono::steady_clock::now() < deadline) {
    (void)a.node.poll();
    (void)b.node.engine.poll();
  }
  EXPECT_EQ(b.node.messages, 1u);
  EXPECT_TRUE(b.connection.ready());
  EXPECT_EQ(b.node.ready.size(), 2u);
  expect_message(b, a, 8);
  finish(a.node, b.node);
}

TEST(EngineOutOfBand, WithoutAPeerItTimesOut) {
  std::uint64_t now = 1'000'000'000;
  End a(small_config(), &now);
  Connection c = a.prepare(std::chrono::milliseconds(300));
  ASSERT_TRUE(until({&a.node}, [&] { return a.told == 1; }));
  now += 299'000'000;
  for (int i = 0; i < 50; ++i) (void)a.node.poll();
  EXPECT_EQ(c.state(), ConnectionState::exchanging);
  now += 2'000'000;
  ASSERT_TRUE(until({&a.node}, [&] { return !a.node.closed.empty(); }));
  EXPECT_EQ(a.node.closed[0].status, Status::timed_out);
  EXPECT_NE(a.node.closed[0].message().find("join()"), std::string::npos)
      << a.node.closed[0].message();
  EXPECT_EQ(c.join(a.endpoint).error().status, Status::not_connected);
  a.node.expect_clean();
}

TEST(EngineOutOfBand, RefusedEndpointsChangeNothing) {
  End a, b;
  a.prepare();
  b.prepare();
  ASSERT_TRUE(both_told(a, b));
  Endpoint wrong = b.endpoint;
  wrong.mtu = 77;
  EXPECT_EQ(a.connection.join(wrong).error().status, Status::protocol);
  wrong = b.endpoint;
  wrong.gid_type = b.endpoint.gid_type == GidType::roce_v1 ? GidType::roce_v2 : GidType::roce_v1;
  EXPECT_EQ(a.connection.join(wrong).error().status, Status::unsupported);
  wrong = b.endpoint;
  wrong.credits = 0;
  EXPECT_EQ(a.connection.join(wrong).error().status, Status::protocol);
  ASSERT_TRUE(a.connection.join(b.endpoint));
  EXPECT_EQ(a.connection.join(b.endpoint).error().status, Status::invalid_argument);  // twice
  ASSERT_TRUE(b.connection.join(a.endpoint));
  ASSERT_TRUE(both_ready(a, b));
  EXPECT_EQ(b.connection.join(a.endpoint).error().status, Status::invalid_argument);
  expect_message(a, b, 5);
  finish(a.node, b.node);
}

TEST(EngineOutOfBand, OnlyPreparedConnectionsJoin) {
  Pair pair;
  const auto mine = pair.ends.client.endpoint();
  ASSERT_FALSE(mine);
  Endpoint any;
  const auto joined = pair.ends.client.join(any);
  ASSERT_FALSE(joined);
  EXPECT_EQ(joined.error().status, Status::invalid_argument);
  EXPECT_NE(joined.error().message().find("prepare()"), std::string::npos);
  EXPECT_EQ(Connection().join(any).error().status, Status::not_connected);
  pair.finish();
}

TEST(EngineOutOfBand, OtherThreadsAndLimitsAreRefused) {
  Config config = small_config();
  config.connections.maximum = 1;
  End a(config);
  Status elsewhere = Status::ok;
  std::thread([&] { elsewhere = a.node.engine.prepare({}).error().status; }).join();
  EXPECT_EQ(elsewhere, Status::wrong_thread);
  a.prepare();
  EXPECT_EQ(a.node.engine.prepare({}).error().status, Status::limit);
  PrepareOptions options;
  options.timeout = std::chrono::nanoseconds(-1);
  EXPECT_EQ(a.node.engine.prepare(options).error().status, Status::invalid_argument);
  ASSERT_TRUE(until({&a.node}, [&] { return a.told == 1; }));
  std::thread([&] { elsewhere = a.connection.join(a.endpoint).error().status; }).join();
  EXPECT_EQ(elsewhere, Status::wrong_thread);
  EXPECT_EQ(a.connection.close(), Status::ok);
  ASSERT_TRUE(until({&a.node}, [&] { return !a.node.closed.empty(); }));
  a.node.expect_clean();
}

TEST(EngineOutOfBand, OnTheSameEngineBothEnds) {
  Node node;
  Connection ends[2];
  PrepareOptions options;
  options.handlers = node.handlers();
  ends[0] = *node.engine.prepare(options);
  ends[1] = *node.engine.prepare(options);
  ASSERT_TRUE(until({&node}, [&] { return ends[0].endpoint() && ends[1].endpoint(); }));
  ASSERT_TRUE(ends[0].join(*ends[1].endpoint()));
  ASSERT_TRUE(ends[1].join(*ends[0].endpoint()));
  ASSERT_TRUE(until({&node}, [&] { return ends[0].ready() && ends[1].ready(); }));
  Buffer data = node.filled(64, 7);
  ASSERT_EQ(node.tally.run([&](auto done) { return ends[0].send(data, done); }), Status::ok);
  EXPECT_TRUE(until({&node}, [&] { return node.messages == 1 && node.tally.idle(); }));
  EXPECT_EQ(ends[0].close(), Status::ok);
  EXPECT_TRUE(until({&node}, [&] { return node.engine.stats().connections == 0; }));
}

}  // namespace
}  // namespace out_of_band_test
