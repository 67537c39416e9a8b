// Scenarios of users of an asynchronous framework: setting up and driving an engine, by number.
// scenarios_together_test.cc has the table. With a peer, it is in another process.
//
// Everything runs on the device that SPINWIRE_TEST_DEVICE names.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <string>

#include "scenarios/scenario_driver.h"

namespace async_rdma_test {
namespace {

using namespace scenarios;  // names of the scenarios' own
using spinwire::DeviceEvent;
using spinwire::DeviceEventKind;
using spinwire::Endpoint;
using spinwire::PrepareOptions;
using spinwire::QueuePairState;
using spinwire::Via;

/// One end of a connection made out-of-band.
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

/// Watches a closing connection: whether it is ever seen as broken, and otherwise never, by our
/// state and the device's.
struct Watch {
  int seen = 0;
  bool wrong = false;
  void look(const Connection& c) {
    const auto state = c.query_state();
    if (!state || c.ready()) return;
    ++seen;
    wrong = wrong || *state != QueuePairState::err || c.state() != ConnectionState::draining;
  }
  [[nodiscard]] bool right() const { return seen > 0 && !wrong; }
};
void expect_states(const Connection& c, ConnectionState cached, QueuePairState queried) {
  EXPECT_EQ(c.state(), cached) << to_string(c.state());
  const auto state = c.query_state();
  ASSERT_TRUE(state) << state.error().message();
  EXPECT_EQ(*state, queried) << to_string(*state);
}
/// Uses an invalid key, which brings both ends to ERR.
void use_a_forged_key(End& end) {
  RemoteRegion forged;
  forged.address = 4096;
  forged.length = 8;
  forged.rkey = 0x7fffff00;
  forged.access = Access::remote_read_write;
  const Buffer data = end.node.filled(8, 1);
  ASSERT_EQ(end.node.tally.run(
                [&](auto done) { return end.connection.write(data.slice(), forged, done); }),
            Status::ok);
}
void expect_broken(End& end) {
  Watch watch;
  ASSERT_TRUE(until({&end.node}, [&] {
    watch.look(end.connection);
    return !end.node.closed.empty();
  }));
  EXPECT_TRUE(watch.right());
  EXPECT_EQ(end.connection.state(), ConnectionState::closed);
  EXPECT_EQ(end.connection.query_state().error().status, Status::not_connected);
}

TEST(Scenario19, StateIsCachedAndQueried) {
  End a, b;
  a.prepare();
  b.prepare();
  ASSERT_TRUE(until({&a.node, &b.node}, [&] { return a.told && b.told; }));
  for (const End* end : {&a, &b})
    expect_states(end->connection, ConnectionState::exchanging, QueuePairState::init);
  ASSERT_TRUE(a.connection.join(b.endpoint));
  ASSERT_TRUE(b.connection.join(a.endpoint));
  ASSERT_TRUE(
      until({&a.node, &b.node}, [&] { return a.connection.ready() && b.connection.ready(); }));
  for (const End* end : {&a, &b})
    expect_states(end->connection, ConnectionState::ready, QueuePairState::rts);
  use_a_forged_key(a);
  expect_broken(a);
  Watch watch;
  ASSERT_TRUE(until({&b.node, &a.node}, [&] {
    watch.look(b.connection);
    return !b.node.closed.empty();
  }));
  EXPECT_TRUE(watch.right());
  EXPECT_EQ(a.node.tally.ended(Status::remote_access), 1u);
}

/// The end in another process. Endpoints travel as lines of text. It echoes messages until the
/// connection ends, and fails if the end was not as expected.
int far_end(int in, int out, bool breaks) {
  End end;
  end.node.on_message = [](Connection c, Message& m) { (void)c.send(m.take()); };
  end.prepare();
  if (!until({&end.node}, [&] { return end.told; })) return 1;
  expect_states(end.connection, ConnectionState::exchanging, QueuePairState::init);
  write_line(out, end.endpoint.text());
  std::string theirs;
  for (char c = 0; read(in, &c, 1) == 1 && c != '\n';) theirs += c;
  const auto endpoint = Endpoint::parse(theirs);
  if (!endpoint || !end.connection.join(*endpoint)) return 2;
  if (!until({&end.node}, [&] { return end.connection.ready(); })) return 3;
  expect_states(end.connection, ConnectionState::ready, QueuePairState::rts);
  write_line(out, "ready");
  Watch watch;
  const bool closed = until({&end.node}, [&] {
    if (breaks) watch.look(end.connection);
    return !end.node.closed.empty();
  });
  if (!closed) return 4;
  EXPECT_EQ(end.node.closed[0].status == Status::ok, !breaks) << end.node.closed[0].message();
  EXPECT_EQ(watch.right(), breaks);
  EXPECT_TRUE(end.node.engine.audit());
  return 0;
}
void join(End& end, Child& other) {
  end.prepare();
  ASSERT_TRUE(until({&end.node}, [&] { return end.told; }));
  expect_states(end.connection, ConnectionState::exchanging, QueuePairState::init);
  const auto theirs = Endpoint::parse(other.line());
  ASSERT_TRUE(theirs) << theirs.error().message();
  for (const char c : end.endpoint.text() + "\n") other.tell(c);
  ASSERT_TRUE(end.connection.join(*theirs));
  ASSERT_TRUE(until({&end.node}, [&] { return end.connection.ready(); }));
  EXPECT_EQ(other.line(), "ready");
  expect_states(end.connection, ConnectionState::ready, QueuePairState::rts);
}
/// Sends bytes of 1 and expects them back.
void expect_echo(End& end, std::size_t size = 8) {
  Bytes got;
  end.node.on_message = [&got](Connection, Message& m) {
    got.assign(m.bytes().begin(), m.bytes().end());
  };
  const Bytes ones = all_of(1, size);
  ASSERT_EQ(end.node.tally.run([&](auto done) { return end.connection.send_copy(ones, done); }),
            Status::ok);
  ASSERT_TRUE(until({&end.node}, [&] { return end.node.messages == 1 && end.node.tally.idle(); }));
  EXPECT_EQ(got, ones);
  end.node.on_message = {};
}

TEST(Scenario19, StateIsCachedAndQueriedInTwoProcesses) {
  Child other([](int in, int out) { return far_end(in, out, true); });
  End ours;
  join(ours, other);
  use_a_forged_key(ours);
  expect_broken(ours);
  EXPECT_EQ(ours.node.tally.ended(Status::remote_access), 1u);
  EXPECT_EQ(other.wait(), 0) << "see what the other process said";
}

TEST(Scenario20, EndpointsSwappedOutOfBandConnectTwoProcesses) {
  Child other([](int in, int out) { return far_end(in, out, false); });
  End ours;
  join(ours, other);
  expect_echo(ours);
  EXPECT_EQ(ours.connection.close(), Status::ok);
  ASSERT_TRUE(until({&ours.node}, [&] { return !ours.node.closed.empty(); }));
  EXPECT_EQ(ours.node.closed[0].status, Status::ok) << ours.node.closed[0].message();
  EXPECT_EQ(other.wait(), 0) << "see what the other process said";
  ours.node.expect_clean();
}

TEST(Scenario22, SixteenBytesAreEchoedByAnotherProcessThroughRdmaCm) {
  const char* address = std::getenv("SPINWIRE_TEST_ADDRESS");
  if (std::getenv("SPINWIRE_TEST_DEVICE") == nullptr || address == nullptr)
    GTEST_SKIP() << "needs SPINWIRE_TEST_DEVICE and SPINWIRE_TEST_ADDRESS: a device of rdma_cm's";
  Child other([address](int, int out) {
    Node node;
    node.on_message = [](Connection c, Message& m) { (void)c.send(m.take()); };
    ListenOptions options;
    options.handlers = node.handlers();
    options.via = Via::rdma_cm;
    auto listener = node.engine.listen(std::string(address) + ":0", options);
    if (!listener) return 1;
    write_line(out, listener->address());
    if (!until({&node}, [&] { return !node.closed.empty(); })) return 2;
    EXPECT_EQ(node.closed[0].status, Status::ok) << node.closed[0].message();
    EXPECT_EQ(node.messages, 1u);
    EXPECT_TRUE(node.engine.audit());
    return 0;
  });
  const std::string there = other.line();
  End ours;
  ConnectOptions options;
  options.handlers = ours.node.handlers();
  options.via = Via::rdma_cm;
  const auto made = ours.node.engine.connect(there, options);
  ASSERT_TRUE(made) << made.error().message();
  ours.connection = *made;
  ASSERT_TRUE(until({&ours.node}, [&] { return ours.connection.ready(); }));
  expect_echo(ours, 16);
  EXPECT_EQ(ours.connection.close(), Status::ok);
  ASSERT_TRUE(until({&ours.node}, [&] { return !ours.node.closed.empty(); }));
  EXPECT_EQ(ours.node.closed[0].status, Status::ok) << ours.node.closed[0].message();
  EXPECT_EQ(other.wait(), 0) << "see what the other process said";
  ours.node.expect_clean();
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
  // Time passes and the other end polls, but our work waits for our poll.
  for (int i = 0; i < 100; ++i) (void)p.client.engine.poll();
  EXPECT_EQ(p.server.messages, 0u);
  EXPECT_EQ(p.server.engine.stats().completions, before.completions);
  EXPECT_EQ(p.server.engine.stats().control_steps, before.control_steps);
  // On a network the message may be in flight. It is one event whenever it arrives.
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

TEST(Scenario23, NothingMovesUnlessPolledWhateverAnotherProcessDoes) {
  ScenarioDriver::Setup setup;
  setup.ours.engine.control = ControlMode::manual;
  ScenarioDriver b(Where::two_processes, setup);
  const Connection line = b.open_line();
  b.quiet(line);
  const Command send{.what = Do::send, .seed = 1, .length = 8};
  Peer& peer = b.peer();
  peer.answer.reset();
  ASSERT_EQ(peer.control.send_copy(std::as_bytes(std::span(&send, 1))), Status::ok);
  const auto before = b.node.engine.stats();
  ASSERT_TRUE(peer.has_sent());
  EXPECT_TRUE(b.came.empty());
  EXPECT_EQ(b.node.engine.stats().completions, before.completions);
  EXPECT_EQ(b.node.engine.stats().control_steps, before.control_steps);
  EXPECT_EQ(b.node.engine.stats().messages_received, before.messages_received);
  ASSERT_TRUE(b.until([&] { return !b.came.empty() && peer.answer.has_value(); }));
  EXPECT_EQ(b.came[0].bytes, filled(8, 1));
  b.finish();
}

TEST(Scenario24, ACompletionQueueOfOneIsRefusedWithNeedAndHave) {
  Config c = small_config();
  c.queues.completion_depth = 1;
  const Error tiny = Engine::open(c).error();
  EXPECT_EQ(tiny.status, Status::bad_config);
  EXPECT_EQ(tiny.message(),
            "queues.completion_depth: 1 is out of range; give a whole number in 64 .. 4194304 "
            "entries");
  // The completion queue must fit everything that can complete at once, before the first
  // connection.
  const std::uint32_t need =
      c.queues.operations + c.queues.receive_depth + 4 * c.connections.maximum + 64;  // of leases
  c.queues.completion_depth = need - 1;
  const Error small = Engine::open(c).error();
  EXPECT_EQ(small.status, Status::bad_config);
  EXPECT_EQ(small.asked, "queues.completion_depth = " + std::to_string(need - 1));
  EXPECT_NE(small.message().find(std::to_string(need)), std::string::npos) << small.message();
}

/// Has exactly as many entries as needed.
Config tight_config() {
  Config c = small_config();
  c.leases.maximum = 0;
  c.queues.operations = 64;
  c.queues.receive_depth = 64;
  c.connections.maximum = 4;
  c.connections.maximum_per_source = 4;  // one client has all
  c.connections.handshakes = 4;
  c.connections.credits = 32;
  c.queues.completion_depth = 64 + 64 + 4 * 4;
  return c;
}

TEST(Scenario24, ABurstThatFillsWhatIsAllowedIsSurvived) {
  Pair p(tight_config());
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
  // Each end in turn posts all that it may before it polls.
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

TEST(Scenario24, ABurstIntoAnotherProcessThatDoesNotLookIsSurvived) {
  ScenarioDriver::Setup setup;
  setup.ours = setup.theirs = tight_config();
  ScenarioDriver b(Where::two_processes, setup);
  std::array<Connection, 3> lines;
  for (Connection& line : lines) line = b.open_line();
  constexpr std::uint32_t kRounds = 4;
  std::uint32_t seed = 0;
  for (std::uint32_t round = 0; round < kRounds; ++round) {
    // Sends all that is accepted while the other process is stopped, ten messages per line.
    b.peer().pause();
    std::vector<std::pair<std::uint32_t, std::uint32_t>> sent;  // line, seed
    for (int i = 0; i < 10; ++i) {
      for (std::uint32_t line = 0; line < lines.size(); ++line) {
        const Bytes data = filled(100, ++seed);
        const Status status =
            b.node.tally.run([&](const auto& done) { return lines[line].send_copy(data, done); });
        EXPECT_TRUE(status == Status::ok || status == Status::would_block) << to_string(status);
        if (status == Status::ok) sent.emplace_back(line + 1, seed);
      }
    }
    EXPECT_GE(sent.size(), lines.size());
    b.peer().resume();
    // Each line in order; lines in any order.
    std::stable_sort(sent.begin(), sent.end(),
                     [](const auto& x, const auto& y) { return x.first < y.first; });
    std::vector<Event> seen;
    for (std::size_t i = 0; i < sent.size(); ++i) seen.push_back(b.next_of_any(Saw::message));
    std::stable_sort(seen.begin(), seen.end(),
                     [](const Event& x, const Event& y) { return x.line < y.line; });
    for (std::size_t i = 0; i < sent.size(); ++i) {
      EXPECT_EQ(seen[i].line, sent[i].first);
      expect_bytes(seen[i], filled(100, sent[i].second));
    }
  }
  ASSERT_TRUE(b.until([&] { return b.node.tally.idle(); }));
  EXPECT_EQ(b.node.tally.ended(Status::ok), b.node.tally.accepted);
  for (const Connection& line : lines) EXPECT_TRUE(line.ready());
  b.finish();
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

}  // namespace
}  // namespace async_rdma_test
