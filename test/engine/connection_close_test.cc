// How connections are closed.
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "engine/harness.h"

namespace connection_close_test {
namespace {

using namespace engine_test;  // the names of a test namespace

bool gone(const Node& n) { return n.engine.stats().connections == 0; }

/// Checks that both ends got one on_closed, without an error.
void expect_regular_end(Pair& p) {
  ASSERT_TRUE(p.until([&] { return gone(p.client) && gone(p.server); }));
  ASSERT_EQ(p.client.closed.size(), 1u);
  ASSERT_EQ(p.server.closed.size(), 1u);
  EXPECT_EQ(p.client.closed[0].status, Status::ok) << p.client.closed[0].message();
  EXPECT_EQ(p.server.closed[0].status, Status::ok) << p.server.closed[0].message();
  p.finish();
}

TEST(EngineEarlyMessage, AConnectionThatItsHandlerClosesStaysClosed) {
  Config steps = small_config();
  steps.engine.control = ControlMode::manual;
  Node server(steps), client;
  server.listen();
  client.on_ready = [](Connection c) { EXPECT_EQ(c.send_copy({}), Status::ok); };
  server.on_message = [](Connection c, Message&) { EXPECT_EQ(c.close(), Status::ok); };
  (void)client.begin(server);
  ASSERT_TRUE(until({&client}, [&] {
    if (client.ready.empty()) (void)server.poll();
    return !client.ready.empty();
  }));
  // The server takes no control step, so the message arrives before the last handshake frame.
  ASSERT_TRUE(until({&client}, [&] {
    (void)server.engine.poll();
    return server.messages == 1;
  }));
  EXPECT_EQ(server.ready.size(), 1u);
  EXPECT_TRUE(until({&client, &server}, [&] {
    return client.engine.stats().connections == 0 && server.engine.stats().connections == 0;
  }));
  EXPECT_EQ(server.ready.size(), 1u) << "it was ready a second time";
  finish(client, server);
}

TEST(EngineClose, FromEitherEnd) {
  for (const bool from_client : {true, false}) {
    Pair p;
    EXPECT_EQ((from_client ? p.ends.client : p.ends.server).close(), Status::ok);
    expect_regular_end(p);
  }
}

TEST(EngineClose, FromBothEndsAtOnce) {
  for (int lead = -3; lead <= 3; ++lead) {
    Pair p;
    Buffer b = p.client.filled(100, 1);
    (void)p.ends.client.send(b);
    EXPECT_EQ((lead < 0 ? p.ends.client : p.ends.server).close(), Status::ok);
    for (int i = 0; i < std::abs(lead); ++i) (void)(lead < 0 ? p.client : p.server).poll();
    EXPECT_EQ((lead < 0 ? p.ends.server : p.ends.client).close(), Status::ok);
    b.reset();
    expect_regular_end(p);
  }
}

TEST(EngineClose, AMessageThatThePeerTookEndsWell) {
  // Its answer comes with the goodbye, and the control step follows at once.
  Config c = small_config();
  c.engine.control = ControlMode::manual;
  Pair p(c);
  p.server.on_message = [](Connection conn, Message&) { EXPECT_EQ(conn.close(), Status::ok); };
  Buffer b = p.client.filled(32, 1);
  std::vector<Status> ends;
  ASSERT_EQ(p.ends.client.send(b, [&ends](const Completion& e) { ends.push_back(e.status); }),
            Status::ok);
  b.reset();
  expect_regular_end(p);
  EXPECT_EQ(ends, std::vector<Status>{Status::ok});
}

enum class Where { on_message, on_ready_server, on_ready_client, on_completion };

class EngineCloseInside : public testing::TestWithParam<Where> {};
TEST_P(EngineCloseInside, Callbacks) {
  Node server;
  Node client;
  server.listen();
  const Where where = GetParam();
  if (where == Where::on_message) {
    server.on_message = [](Connection c, Message&) { EXPECT_EQ(c.close(), Status::ok); };
  } else if (where == Where::on_ready_server) {
    server.on_ready = [](Connection c) { EXPECT_EQ(c.close(), Status::ok); };
  } else if (where == Where::on_ready_client) {
    client.on_ready = [](Connection c) { EXPECT_EQ(c.close(), Status::ok); };
  }
  Connection c = client.begin(server);
  ASSERT_TRUE(until({&client, &server}, [&] { return !client.ready.empty(); }));
  if (where == Where::on_message || where == Where::on_completion) {
    Buffer b = client.filled(100, 1);
    ASSERT_EQ(c.send(b,
                     [handle = &c, closes = where == Where::on_completion](const Completion& e) {
                       EXPECT_EQ(e.status, Status::ok);
                       if (closes) {
                         EXPECT_EQ(handle->close(), Status::ok);
                       }
                     }),
              Status::ok);
  }
  ASSERT_TRUE(until({&client, &server}, [&] {
    return gone(client) && gone(server) && !client.closed.empty() && !server.closed.empty();
  }));
  ASSERT_EQ(client.closed.size(), 1u);
  ASSERT_EQ(server.closed.size(), 1u);
  EXPECT_EQ(client.closed[0].status, Status::ok) << client.closed[0].message();
  EXPECT_EQ(server.closed[0].status, Status::ok) << server.closed[0].message();
  server.on_message = nullptr;
  server.on_ready = client.on_ready = nullptr;
  (void)connect(client, server);  // both engines go on
  finish(client, server);
}
INSTANTIATE_TEST_SUITE_P(Everywhere, EngineCloseInside,
                         testing::Values(Where::on_message, Where::on_ready_server,
                                         Where::on_ready_client, Where::on_completion));

TEST(EngineClose, InOnAcceptRefuses) {
  Node server;
  Node client;
  server.listen();
  server.on_accept = [](Connection c) { EXPECT_EQ(c.close(), Status::ok); };
  (void)client.begin(server);
  ASSERT_TRUE(until({&client, &server}, [&] { return client.closed.size() == 1 && gone(server); }));
  EXPECT_EQ(client.closed[0].status, Status::refused) << client.closed[0].message();
  EXPECT_TRUE(client.ready.empty());
  EXPECT_TRUE(server.ready.empty());
  EXPECT_EQ(server.closed.size(), 1u);
  EXPECT_EQ(server.engine.stats().handshakes_refused, 1u);
  finish(client, server);
}

TEST(EngineClose, OnAcceptSetsHandlersOfItsOwn) {
  Node server;
  Node client;
  server.listen();
  static int own;
  own = 0;
  server.on_accept = [](Connection c) {
    spinwire::ConnectionHandlers h;
    h.on_ready = [](Connection) { ++own; };
    EXPECT_EQ(c.set_handlers(h), Status::ok);
  };
  Connection c = client.begin(server);
  ASSERT_TRUE(until({&client, &server}, [&] { return own == 1 && c.ready(); }));
  EXPECT_TRUE(server.ready.empty());
  finish(client, server);
  EXPECT_TRUE(server.closed.empty());
}

TEST(EngineClose, OnClosedMayConnectAgain) {
  Node server;
  Node client;
  server.listen();
  int left = 5;
  client.on_closed = [&](Connection old, const Error&) {
    EXPECT_EQ(old.state(), ConnectionState::closed);
    if (left-- > 0) (void)client.begin(server);
  };
  client.on_ready = [&](Connection c) { EXPECT_EQ(c.close(), Status::ok); };
  (void)client.begin(server);
  ASSERT_TRUE(until({&client, &server}, [&] { return client.closed.size() == 6; }));
  EXPECT_EQ(client.ready.size(), 6u);
  finish(client, server);
}

TEST(EngineClose, OutstandingOperationsCompleteFirst) {
  Pair p;
  Buffer b = p.client.filled(3000, 1);
  ASSERT_TRUE(p.until([&] {
    (void)p.ends.client.send(b);
    return p.ends.client.stats().send_credits >= 20;
  }));
  ASSERT_TRUE(p.until([&] { return p.ends.client.stats().outstanding == 0; }));
  p.settle();
  const std::uint64_t before = p.server.messages;
  bool told = false;
  p.client.on_closed = [&](Connection, const Error&) { told = p.client.tally.idle(); };
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(p.client.tally.run([&](CompletionCallback done) {
      return p.ends.client.send(b, done, i % 2 == 0 ? Post::now : Post::defer);
    }),
              Status::ok);
  }
  ASSERT_EQ(p.ends.client.close(), Status::ok);
  EXPECT_EQ(p.ends.client.state(), ConnectionState::draining);
  ASSERT_TRUE(p.until([&] { return gone(p.client); }));
  EXPECT_TRUE(told);
  EXPECT_EQ(p.client.tally.ended(Status::ok), 20u);
  EXPECT_EQ(p.server.messages, before + 20);
  b.reset();
  expect_regular_end(p);
}

TEST(EngineClose, PeerThatDoesNotPollIsWaitedForUpToTheDeadline) {
  if (device_name() != "softverbs")
    GTEST_SKIP() << kSoftverbsOnly << "elsewhere a send ends when the peer's device has it";
  Config c = without_direct_messages();
  c.connections.close_timeout = 50ms;
  Pair p(c);
  Buffer b = p.client.filled(3000, 1);
  ASSERT_EQ(
      p.client.tally.run([&](CompletionCallback done) { return p.ends.client.send(b, done); }),
      Status::ok);
  const auto before = std::chrono::steady_clock::now();
  ASSERT_EQ(p.ends.client.close(), Status::ok);
  ASSERT_TRUE(until({&p.client}, [&] { return gone(p.client); }));
  EXPECT_GE(std::chrono::steady_clock::now() - before, 50ms);
  EXPECT_EQ(p.client.tally.ended(Status::flushed), 1u);
  ASSERT_EQ(p.client.closed.size(), 1u);
  p.client.stale_allowed = true;
  // The other end detects it by its keepalive, or by the message that it cannot pull.
  (void)p.ends.server.close();
  b.reset();
  p.server.stale_allowed = true;
  p.finish();
}

TEST(EngineClose, FlushInsideTheLastCompletions) {
  if (device_name() != "softverbs")
    GTEST_SKIP() << kSoftverbsOnly << "elsewhere a send ends when the peer's device has it";
  // The queue pair no longer exists when these callbacks run.
  Config c = without_direct_messages();
  c.connections.close_timeout = 20ms;
  Pair p(c);
  Buffer b = p.client.filled(3000, 1);
  struct Context {
    Pair* pair;
    int ended = 0;
  } context{&p};
  const auto done = [x = &context](const Completion& e) {
    EXPECT_EQ(e.status, Status::flushed);
    ++x->ended;
    (void)x->pair->ends.client.flush();
    EXPECT_EQ(x->pair->client.engine.flush(), Status::ok);
    EXPECT_EQ(x->pair->ends.client.close(), Status::not_connected);
  };
  auto exposed = p.server.engine.register_memory(
      {reinterpret_cast<std::byte*>(&context), sizeof context}, Access::remote_read);
  ASSERT_EQ(p.ends.client.send(b, done), Status::ok);
  // Behind a message that is not acknowledged.
  Buffer into = p.client.buffer(8);
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(p.ends.client.read(into.slice(), exposed->remote(), done), Status::ok);
  }
  ASSERT_EQ(p.ends.client.close(), Status::ok);
  ASSERT_TRUE(until({&p.client}, [&] { return gone(p.client); }));
  EXPECT_EQ(context.ended, 4);
  *exposed = MemoryRegion();
  into.reset();
  b.reset();
  p.client.stale_allowed = p.server.stale_allowed = true;
  (void)p.ends.server.close();
  p.finish();
}

TEST(EngineClose, WhileConnecting) {
  Node server;
  Node client;
  server.listen();
  for (int polls = 0; polls < 40; polls += 3) {
    const std::size_t before = client.closed.size();
    Connection c = client.begin(server);
    for (int i = 0; i < polls; ++i) (void)(client.poll() + server.poll());
    EXPECT_EQ(c.close(), Status::ok);
    ASSERT_TRUE(until({&client, &server}, [&] {
      return client.closed.size() == before + 1 && gone(client) && gone(server);
    })) << polls;
    EXPECT_EQ(client.closed.back().status, Status::ok);
  }
  (void)connect(client, server);
  finish(client, server);
}

}  // namespace
}  // namespace connection_close_test
