// Scenarios of an asynchronous framework's users, by number, where no other suite has them:
//
//   19 the state of a queue pair, cached and queried    here
//   20 endpoints swapped out of band                    EngineByHand.EndpointsBroughtAsTextConnect
//   22 16 bytes echoed through rdma_cm                  RdmaCm.MessagesGoBothWays
//   23 nothing moves unless polled                      here
//   24 a completion queue too small for a burst         here
//   25 more than there can be, of each capacity         here, and by connection
//                            EngineConnectionSettings.OutOfRangeNamesAskedAndAvailable
//   27 memory and connections of a protection domain    here, and EngineOwnDomain.*
//
// Everything runs on the device that SPINWIRE_TEST_DEVICE names.
#include <gtest/gtest.h>

#include <string>

#include "engine/harness.h"

namespace async_rdma_test {
namespace {

using namespace engine_test;  // names of a test namespace of its own
using spinwire::DeviceEvent;
using spinwire::DeviceEventKind;
using spinwire::Endpoint;
using spinwire::PrepareOptions;
using spinwire::QueuePairState;

/// One end of a connection made by hand.
struct End {
  Node node;
  Connection connection;
  Endpoint endpoint;
  bool told = false;
  void prepare() {
    PrepareOptions options;
    options.handlers = node.handlers();
    options.on_endpoint = [this](Connection, const Endpoint& e) {
      told = true;
      endpoint = e;
    };
    auto made = node.engine.prepare(options);
    ASSERT_TRUE(made) << made.error().message();
    connection = *made;
  }
};

TEST(Scenario19, StateIsCachedAndQueried) {
  End a, b;
  a.prepare();
  b.prepare();
  ASSERT_TRUE(until({&a.node, &b.node}, [&] { return a.told && b.told; }));
  for (const End* end : {&a, &b}) {
    EXPECT_EQ(end->connection.state(), ConnectionState::exchanging);
    ASSERT_TRUE(end->connection.query_state());
    EXPECT_EQ(*end->connection.query_state(), QueuePairState::init);
  }
  ASSERT_TRUE(a.connection.join(b.endpoint));
  ASSERT_TRUE(b.connection.join(a.endpoint));
  ASSERT_TRUE(
      until({&a.node, &b.node}, [&] { return a.connection.ready() && b.connection.ready(); }));
  for (const End* end : {&a, &b}) {
    ASSERT_TRUE(end->connection.query_state());
    EXPECT_EQ(*end->connection.query_state(), QueuePairState::rts);
  }
  // A key that opens nothing brings both ends to ERR; neither is `ready` then.
  const Buffer data = a.node.filled(8, 1);
  RemoteRegion forged;
  forged.address = 4096;
  forged.length = 8;
  forged.rkey = 0x7fffff00;
  forged.access = Access::remote_read_write;
  ASSERT_EQ(
      a.node.tally.run([&](auto done) { return a.connection.write(data.slice(), forged, done); }),
      Status::ok);
  bool wrong = false;
  int seen = 0;
  const auto look = [&](const Connection& c) {
    const auto state = c.query_state();
    if (!state || c.ready()) return;
    ++seen;
    wrong = wrong || *state != QueuePairState::err || c.state() != ConnectionState::draining;
  };
  ASSERT_TRUE(until({&a.node}, [&] {
    look(a.connection);
    return !a.node.closed.empty();
  }));
  EXPECT_GT(seen, 0);
  seen = 0;
  ASSERT_TRUE(until({&b.node, &a.node}, [&] {
    look(b.connection);
    return !b.node.closed.empty();
  }));
  EXPECT_FALSE(wrong);
  EXPECT_EQ(a.connection.state(), ConnectionState::closed);
  EXPECT_EQ(a.connection.query_state().error().status, Status::not_connected);
  EXPECT_EQ(a.node.tally.ended(Status::remote_access), 1u);
}

TEST(Scenario23, NothingMovesUnlessPolled) {
  Config manual = small_config();
  manual.engine.control = ControlMode::manual;
  Pair p(manual);
  p.settle();
  Buffer data = p.client.filled(8, 4);
  EXPECT_EQ(p.server.engine.poll(), 0);
  ASSERT_EQ(p.client.tally.run([&](auto done) { return p.ends.client.send(data, done); }),
            Status::ok);
  const auto before = p.server.engine.stats();
  // Time passes, and the other end polls: what is ours to do waits for us.
  for (int i = 0; i < 100; ++i) (void)p.client.engine.poll();
  EXPECT_EQ(p.server.messages, 0u);
  EXPECT_EQ(p.server.engine.stats().completions, before.completions);
  EXPECT_EQ(p.server.engine.stats().control_steps, before.control_steps);
  // On a network the message may be on its way; it is one event, whenever it is there.
  int events = 0;
  ASSERT_TRUE(until({&p.client}, [&] { return (events = p.server.engine.poll()) != 0; }));
  EXPECT_EQ(events, 1);
  EXPECT_EQ(p.server.messages, 1u);
  EXPECT_EQ(p.server.engine.stats().control_steps, before.control_steps);
  ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  p.settle();
  EXPECT_EQ(p.server.engine.poll(), 0);
  data.reset();
  p.finish();
}

TEST(Scenario24, ACompletionQueueOfOneIsRefusedWithNeedAndHave) {
  Config c = small_config();
  c.queues.completion_depth = 1;
  const Error tiny = Engine::open(c).error();
  EXPECT_EQ(tiny.status, Status::bad_config);
  EXPECT_EQ(tiny.message(),
            "queues.completion_depth: 1 is out of range; give a whole number in 64 .. 4194304 "
            "entries");
  // Room for everything that can complete at once is there before the first connection, or none is.
  const std::uint32_t need =
      c.queues.operations + c.queues.receive_depth + 4 * c.connections.maximum + 64;  // of leases
  c.queues.completion_depth = need - 1;
  const Error small = Engine::open(c).error();
  EXPECT_EQ(small.status, Status::bad_config);
  EXPECT_EQ(small.asked, "queues.completion_depth = " + std::to_string(need - 1));
  EXPECT_NE(small.message().find(std::to_string(need)), std::string::npos) << small.message();
}

TEST(Scenario24, ABurstThatFillsWhatIsAllowedIsSurvived) {
  Config c = small_config();
  c.queues.operations = 64;
  c.queues.receive_depth = 64;
  c.connections.maximum = 4;
  c.connections.handshakes = 4;
  c.connections.credits = 32;
  c.leases.maximum = 0;
  c.queues.completion_depth = 64 + 64 + 4 * 4;  // not one more than is needed
  Pair p(c);
  std::vector<Ends> all{p.ends};
  for (int i = 0; i < 3; ++i) all.push_back(connect(p.client, p.server));
  bool overrun = false;
  const auto watch = [&overrun](const DeviceEvent& e) {
    overrun = overrun || e.kind == DeviceEventKind::completion_queue_failed;
  };
  for (Node* node : {&p.client, &p.server})
    ASSERT_EQ(node->engine.set_device_event_handler(watch), Status::ok);
  const Buffer data = p.client.filled(100, 1);
  const Buffer answer = p.server.filled(100, 2);
  // Each end in turn posts all that it may before it looks at anything.
  ASSERT_TRUE(p.until([&] {
    for (Ends& e : all) {
      while (p.client.tally.run([&](auto done) { return e.client.send(data, done); }) ==
             Status::ok) {
      }
      while (p.server.tally.run([&](auto done) { return e.server.send(answer, done); }) ==
             Status::ok) {
      }
    }
    return p.server.messages > 5000 && p.client.messages > 5000;
  }));
  ASSERT_TRUE(p.until([&] { return p.client.tally.idle() && p.server.tally.idle(); }));
  EXPECT_FALSE(overrun);
  EXPECT_EQ(p.client.tally.ended(Status::ok), p.client.tally.accepted);
  ASSERT_TRUE(p.until([&] { return p.server.messages == p.client.tally.accepted; }));
  for (const Ends& e : all) EXPECT_TRUE(e.client.ready() && e.server.ready());
}

TEST(Scenario25, MoreThanThereCanBeNamesAskedAndAvailable) {
  constexpr std::uint32_t kMost = 0xffff'ffff;
  const struct {
    std::uint32_t Config::Queues::*member;
    const char* key;
    const char* range;
  } caps[] = {
      {&Config::Queues::send_depth, "queues.send_depth", "16 .. 32768"},
      {&Config::Queues::receive_depth, "queues.receive_depth", "16 .. 32768"},
      {&Config::Queues::completion_depth, "queues.completion_depth", "64 .. 4194304"},
      {&Config::Queues::inline_bytes, "queues.inline_bytes", "0 .. 1KiB"},
  };
  for (const auto& cap : caps) {
    Config c = small_config();
    c.queues.*cap.member = kMost;
    const auto refused = Engine::open(c);
    ASSERT_FALSE(refused) << cap.key;
    const Error& e = refused.error();
    EXPECT_EQ(e.asked, cap.key);
    EXPECT_NE(e.message().find(cap.range), std::string::npos) << e.message();
    EXPECT_NE(e.found.find("4294967295"), std::string::npos) << e.message();
  }
}

/// An engine is a protection domain: a second one on the same device is another.
TEST(Scenario27, AConnectionOfAnotherProtectionDomainMovesDataAndReachesNoOther) {
  Node first, second, client;
  first.listen();
  second.listen();
  Ends to_first = connect(client, first);
  Ends to_second = connect(client, second);
  Buffer secret = first.filled(64, 1);
  Buffer shared = second.filled(64, 2);
  const auto first_key = first.engine.expose(secret.slice(), Access::remote_read_write);
  const auto second_key = second.engine.expose(shared.slice(), Access::remote_read_write);
  ASSERT_TRUE(first_key && second_key);
  const Buffer ours = client.filled(64, 3);
  const Buffer got = client.buffer(64);
  const auto done_of = [&](auto call) {
    EXPECT_EQ(client.tally.run(call), Status::ok);
    EXPECT_TRUE(until({&client, &first, &second}, [&] { return client.tally.idle(); }));
  };
  done_of([&](auto done) { return to_second.client.write(ours.slice(), *second_key, done); });
  EXPECT_TRUE(Node::holds(shared.bytes(), 3));
  done_of([&](auto done) { return to_second.client.read(got.slice(), *second_key, done); });
  EXPECT_TRUE(Node::holds(got.bytes(), 3));
  done_of([&](auto done) { return to_second.client.send(ours, done); });
  ASSERT_TRUE(until({&client, &second}, [&] { return second.messages == 1; }));
  EXPECT_EQ(client.tally.ended(Status::ok), 3u);
  // The other domain's key is none here, whatever it says.
  done_of([&](auto done) { return to_second.client.write(ours.slice(), *first_key, done); });
  EXPECT_EQ(client.tally.ended(Status::remote_access), 1u);
  EXPECT_TRUE(Node::holds(secret.bytes(), 1));
  EXPECT_TRUE(to_first.client.ready());
  EXPECT_EQ(first.engine.revoke(*first_key), Status::ok);
  EXPECT_EQ(second.engine.revoke(*second_key), Status::ok);
}

/// A connection can have one of its own, and another of the same engine then does not reach into
/// it.
TEST(Scenario27, AConnectionWithItsOwnProtectionDomainMovesData) {
  Config config = small_config();
  config.connections.own_domains = 1;
  config.connections.credits = 16;
  Node server(config), client;
  server.listen();
  Ends sharing = connect(client, server);
  server.on_accept = [](Connection c) {
    spinwire::ConnectionSettings settings;
    settings.own_domain = true;
    const auto configured = c.configure(settings);
    ASSERT_TRUE(configured) << configured.error().message();
  };
  Ends owning = connect(client, server);
  ASSERT_EQ(server.engine.stats().own_domains, 1u);
  Buffer theirs = server.filled(64, 1);
  const auto key = owning.server.expose(theirs.slice(), Access::remote_read_write);
  ASSERT_TRUE(key);
  const Buffer ours = client.filled(64, 2);
  const Buffer got = client.buffer(64);
  const auto done_of = [&](auto call) {
    EXPECT_EQ(client.tally.run(call), Status::ok);
    EXPECT_TRUE(until({&client, &server}, [&] { return client.tally.idle(); }));
  };
  server.on_message = [&](Connection c, Message& m) {
    EXPECT_TRUE(Node::holds(m.bytes(), 2));
    EXPECT_EQ(c.send(m.take()), Status::ok);
  };
  client.on_message = [&](Connection, Message& m) { EXPECT_TRUE(Node::holds(m.bytes(), 2)); };
  done_of([&](auto done) { return owning.client.read(got.slice(), *key, done); });
  EXPECT_TRUE(Node::holds(got.bytes(), 1));
  done_of([&](auto done) { return owning.client.write(ours.slice(), *key, done); });
  EXPECT_TRUE(Node::holds(theirs.bytes(), 2));
  done_of([&](auto done) { return owning.client.send(ours, done); });
  ASSERT_TRUE(until({&client, &server}, [&] { return client.messages == 1; }));
  EXPECT_EQ(client.tally.ended(Status::ok), 3u);
  done_of([&](auto done) { return sharing.client.write(ours.slice(), *key, done); });
  EXPECT_EQ(client.tally.ended(Status::remote_access), 1u);
  EXPECT_TRUE(owning.client.ready());
}

}  // namespace
}  // namespace async_rdma_test
