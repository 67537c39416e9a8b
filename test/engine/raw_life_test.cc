// Raw connections: how they begin and end, their limits, and peers without an engine.
#include <gtest/gtest.h>

#include "base/internals.h"
#include "engine/engine_core.h"
#include "engine/raw_ends.h"
#include "engine/rdma_cm_ends.h"

namespace raw_test {
namespace {

TEST(EngineRawLife, CloseFlushesTheReceivesAndSaysNothing) {
  Config config = watchful_config();
  config.connections.peer_timeout = 3s;
  RawPair p({}, config);
  for (int i = 0; i < 10; ++i) {
    ASSERT_EQ(p.at_a.post(p.a, p.at_client(8).slice()), Status::ok);
    ASSERT_EQ(p.at_b.post(p.b, p.at_server(8).slice()), Status::ok);
  }
  ASSERT_EQ(p.at_a.post(p.a, p.at_client(8).slice(), Post::defer), Status::ok);  // not posted yet
  ASSERT_EQ(p.a.close(), Status::ok);
  EXPECT_EQ(p.at_a.post(p.a, p.at_client(8).slice()), Status::not_connected);
  ASSERT_TRUE(p.until([&] { return p.client.closed.size() == 1; }));
  EXPECT_EQ(p.client.closed[0].status, Status::ok) << p.client.closed[0].message();
  EXPECT_EQ(p.at_a.flushed, 11u);
  // The other end detects it by its own operation.
  p.settle();
  EXPECT_TRUE(p.b.ready());
  EXPECT_EQ(p.at_b.ended, 0u);
  const Buffer& data = p.keep(p.server.filled(8, 1));
  ASSERT_EQ(p.server.tally.run([&](auto done) { return p.b.send_raw(data.slice(), done); }),
            Status::ok);
  ASSERT_TRUE(p.until([&] { return p.server.closed.size() == 1; }));
  EXPECT_EQ(p.server.closed[0].status, Status::peer_lost) << p.server.closed[0].message();
  EXPECT_EQ(p.server.tally.ended(Status::peer_lost), 1u);
  EXPECT_EQ(p.at_b.flushed, 10u);
  p.finish();
}

TEST(EngineRawLife, AnIdleConnectionSendsNothing) {
  std::uint64_t now = 1'000'000'000;
  RawPair p(raw_settings(), raw_settings(), small_config(), &now);
  p.settle(50);
  const auto sent = p.client.engine.stats().doorbells + p.server.engine.stats().doorbells;
  for (int i = 0; i < 100; ++i) {
    now += 500'000'000;
    p.settle(4);
  }
  EXPECT_EQ(p.client.engine.stats().doorbells + p.server.engine.stats().doorbells, sent);
  EXPECT_TRUE(p.a.ready() && p.b.ready());
  p.finish();
}

TEST(EngineRawLife, WhatIsUnansweredForTooLongEndsIt) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "its time is the test's";
  std::uint64_t now = 1'000'000'000;
  RawPair p(raw_settings(), raw_settings(), small_config(), &now);
  const Buffer& data = p.data(8, 1);
  ASSERT_EQ(p.client.tally.run([&](auto done) { return p.a.send_raw(data.slice(), done); }),
            Status::ok);
  for (int i = 0; i < 100 && p.client.closed.empty(); ++i) {
    now += 500'000'000;
    p.settle(4);
  }
  ASSERT_TRUE(p.until([&] { return p.client.closed.size() == 1; }));
  EXPECT_EQ(p.client.closed[0].status, Status::peer_lost);
  p.finish();
}

TEST(EngineRawLife, AMessageLongerThanItsReceiveEndsBothEnds) {
  RawPair p;
  const Buffer& data = p.data(64, 1);
  const Buffer& into = p.at_server(64);
  std::fill_n(into.data(), 64, std::byte{0xee});
  ASSERT_EQ(p.at_b.post(p.b, into.slice(0, 16)), Status::ok);
  ASSERT_EQ(p.at_b.post(p.b, into.slice(0, 16)), Status::ok);
  ASSERT_EQ(p.client.tally.run([&](auto done) { return p.a.send_raw(data.slice(), done); }),
            Status::ok);
  ASSERT_TRUE(p.until([&] { return p.client.closed.size() == 1 && p.server.closed.size() == 1; }));
  EXPECT_EQ(p.at_b[0].how.status, Status::message_too_long);
  EXPECT_EQ(p.at_b[0].how.bytes, 0u);
  EXPECT_EQ(p.at_b[1].how.status, Status::flushed);
  EXPECT_EQ(p.server.closed[0].status, Status::message_too_long) << p.server.closed[0].message();
  EXPECT_NE(p.client.closed[0].status, Status::ok);
  EXPECT_EQ(into.data()[16], std::byte{0xee});
  p.finish();
}

TEST(EngineRawLife, AFailedOperationFlushesTheReceivesOfBothEnds) {
  RawPair p;
  ASSERT_EQ(p.at_a.post(p.a, p.at_client(8).slice()), Status::ok);
  ASSERT_EQ(p.at_b.post(p.b, p.at_server(8).slice()), Status::ok);
  const Buffer& into = p.at_client(64);
  const RemoteRegion nowhere{0x1000, 64, 0xdead00, Access::remote_read_write};
  ASSERT_EQ(p.client.tally.run([&](auto done) { return p.a.read(into.slice(), nowhere, done); }),
            Status::ok);
  ASSERT_TRUE(p.until([&] { return p.client.closed.size() == 1 && p.server.closed.size() == 1; }));
  EXPECT_EQ(p.client.closed[0].status, Status::remote_access) << p.client.closed[0].message();
  EXPECT_NE(p.server.closed[0].status, Status::ok);
  EXPECT_EQ(p.at_a.flushed + p.at_b.flushed, 2u);
  p.finish();
}

TEST(EngineRawLife, TheEnginesEndFlushesWhatIsPosted) {
  Receives at_a;
  Tally tally;
  Buffer kept;
  {
    RawPair p;
    for (int i = 0; i < 5; ++i) ASSERT_EQ(at_a.post(p.a, p.at_client(8).slice()), Status::ok);
    const Buffer& data = p.data(8, 1);
    ASSERT_EQ(tally.run([&](auto done) { return p.a.send_raw(data.slice(), done); }), Status::ok);
    kept = p.client.filled(16, 3);
    ASSERT_EQ(at_a.post(p.a, kept.slice()), Status::ok);
  }
  at_a.expect_exact();
  EXPECT_EQ(at_a.flushed, 6u);
  tally.expect_exact();
  EXPECT_TRUE(Node::holds(kept.bytes(), 3));
}

TEST(EngineRawLife, AKilledPeerEndsWhatIsOutstandingOnce) {
  Child child([](int in, int out) {
    Node node;
    ListenOptions listen;
    listen.settings = raw_settings();
    Receives receives;
    const Buffer into = node.buffer(64);
    listen.on_accept = [&](Connection c) { (void)receives.post(c, into.slice()); };
    node.listener = std::move(*node.engine.listen("127.0.0.1:0", listen));
    write_line(out, node.listener.address());
    for (unsigned i = 0;; ++i) {
      (void)node.poll();
      if (i % 1024 == 0 && command(in) == 'q') return 0;
    }
  });
  const std::string address = child.line();
  Config config = small_config();
  config.queue_pair.rnr_retry = 7;
  Node client(config);
  ConnectOptions options;
  options.settings = raw_settings();
  options.handlers = client.handlers();
  Connection c = *client.engine.connect(address, options);
  Receives receives;
  Buffer data = client.filled(8, 1);
  Buffer into = client.buffer(8);
  for (int i = 0; i < 20; ++i) ASSERT_EQ(receives.post(c, into.slice()), Status::ok);
  ASSERT_TRUE(until({&client}, [&] { return c.ready(); }));
  for (int i = 0; i < 5; ++i) {  // only one of them has a receive
    ASSERT_EQ(client.tally.run([&](auto done) { return c.send_raw(data.slice(), done); }),
              Status::ok);
  }
  ASSERT_TRUE(until({&client}, [&] { return client.tally.ended(Status::ok) == 1; }));
  child.kill(SIGKILL);
  ASSERT_TRUE(until({&client}, [&] { return client.closed.size() == 1; }));
  EXPECT_EQ(client.closed[0].status, Status::peer_lost) << client.closed[0].message();
  EXPECT_EQ(client.tally.ended(Status::ok), 1u);
  EXPECT_EQ(client.tally.completed, 5u);
  EXPECT_EQ(receives.flushed, 20u);
  receives.expect_exact();
  data.reset();
  into.reset();
  client.expect_clean();
}

TEST(EngineRawLife, ReceivesOfAConnectionThatNeverCameToBeAreFlushed) {
  Node node;
  Receives receives;
  PrepareOptions options;
  options.settings = raw_settings();
  options.handlers = node.handlers();
  for (const bool told : {false, true}) {
    Connection c = *node.engine.prepare(options);
    Buffer into = node.buffer(8);
    ASSERT_EQ(receives.post(c, into.slice()), Status::ok);
    if (told) {
      ASSERT_TRUE(until({&node}, [&] { return c.endpoint().has_value(); }));
    }
    EXPECT_EQ(c.close(), Status::ok);
    into.reset();
    ASSERT_TRUE(until({&node}, [&] { return node.engine.stats().connections == 0; }));
    node.expect_clean();
  }
  EXPECT_EQ(receives.flushed, 2u);
  receives.expect_exact();
}

/// Which end is raw.
class RawMismatch : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Engine, RawMismatch, testing::Bool());

TEST_P(RawMismatch, IsRefusedAtBothEnds) {
  Node server, client;
  const ConnectionSettings raw = raw_settings();
  ListenOptions listen;
  listen.handlers = server.handlers();
  listen.settings = GetParam() ? raw : ConnectionSettings{};
  server.listener = std::move(*server.engine.listen("127.0.0.1:0", listen));
  ConnectOptions options;
  options.handlers = client.handlers();
  options.reconnect.attempts = 3;
  options.settings = GetParam() ? ConnectionSettings{} : raw;
  (void)*client.engine.connect(server.listener.address(), options);
  ASSERT_TRUE(until({&client, &server},
                    [&] { return client.closed.size() == 1 && server.closed.size() == 1; }));
  for (const Error* e : {&client.closed[0], &server.closed[0]}) {
    EXPECT_EQ(e->status, Status::unsupported) << e->message();
    EXPECT_NE(e->message().find("is not raw, the other is"), std::string::npos) << e->message();
  }
  EXPECT_TRUE(client.ready.empty() && server.ready.empty());
  ASSERT_TRUE(until({&client, &server}, [&] { return server.engine.stats().connections == 0; }));
  client.expect_clean();
  server.expect_clean();
}

TEST_P(RawMismatch, OutOfBandJoinRefusesIt) {
  Node node;
  PrepareOptions options;
  options.handlers = node.handlers();
  options.settings = GetParam() ? raw_settings() : ConnectionSettings{};
  Connection ours = *node.engine.prepare(options);
  options.settings = GetParam() ? ConnectionSettings{} : raw_settings();
  Connection theirs = *node.engine.prepare(options);
  ASSERT_TRUE(until({&node}, [&] { return ours.endpoint() && theirs.endpoint(); }));
  const auto joined = ours.join(*theirs.endpoint());
  ASSERT_FALSE(joined);
  EXPECT_EQ(joined.error().status, Status::unsupported) << joined.error().message();
  EXPECT_EQ(ours.state(), ConnectionState::exchanging);  // another join is possible
}

TEST(EngineRawLife, ConfigureMakesAConnectionRawOrNot) {
  for (const bool raw : {true, false}) {
    Node server, client;
    ListenOptions listen;
    listen.handlers = server.handlers();
    if (!raw) listen.settings = raw_settings();
    listen.on_accept = [&](Connection c) {
      const auto done = c.configure(raw ? raw_settings() : ConnectionSettings{});
      EXPECT_TRUE(done) << done.error().message();
    };
    server.listener = std::move(*server.engine.listen("127.0.0.1:0", listen));
    ConnectOptions options;
    options.handlers = client.handlers();
    if (raw) options.settings = raw_settings();
    Connection c = *client.engine.connect(server.listener.address(), options);
    ASSERT_TRUE(until({&client, &server}, [&] { return c.ready() && server.ready.size() == 1; }));
    EXPECT_EQ(server.ready[0].send_raw(Elements{}), raw ? Status::ok : Status::unsupported);
    Receives receives;
    if (raw) {
      ASSERT_EQ(receives.post(c, Elements{}), Status::ok);
    }
    EXPECT_TRUE(until({&client, &server}, [&] { return receives.ok == (raw ? 1u : 0u); }));
    EXPECT_EQ(c.close(), Status::ok);
    (void)server.ready[0].close();
    ASSERT_TRUE(until({&client, &server}, [&] {
      return client.engine.stats().connections == 0 && server.engine.stats().connections == 0;
    }));
    for (int i = 0; i < 8; ++i) (void)(client.poll() + server.poll());
    client.expect_clean();
    server.expect_clean();
  }
}

TEST(EngineRawLife, ConfigureThatFindsNoReceiveChangesNothing) {
  Node server, client;
  auto& context = spinwire::detail::core_of(server.engine)->context;
  ListenOptions listen;
  listen.handlers = server.handlers();
  listen.settings = raw_settings();
  Error why;
  listen.on_accept = [&](Connection c) {
    const std::uint32_t before =
        std::exchange(context.reserved_receives, context.reservable_receives);
    const auto done = c.configure({});
    context.reserved_receives = before;
    ASSERT_FALSE(done);
    why = done.error();
  };
  server.listener = std::move(*server.engine.listen("127.0.0.1:0", listen));
  ConnectOptions options;
  options.handlers = client.handlers();
  options.settings = raw_settings();
  Connection c = *client.engine.connect(server.listener.address(), options);
  ASSERT_TRUE(until({&client, &server}, [&] {
    return (c.ready() && server.ready.size() == 1) || !client.closed.empty();
  }));
  EXPECT_EQ(why.status, Status::limit) << why.message();
  ASSERT_TRUE(client.closed.empty()) << client.closed[0].message();
  Receives receives;
  ASSERT_EQ(receives.post(c, Elements{}), Status::ok);
  EXPECT_EQ(server.ready[0].send_raw(Elements{}), Status::ok) << "the connection is still raw";
  EXPECT_TRUE(until({&client, &server}, [&] { return receives.ok == 1; }));
  EXPECT_EQ(c.close(), Status::ok);
  (void)server.ready[0].close();
  ASSERT_TRUE(until({&client, &server}, [&] {
    return client.engine.stats().connections == 0 && server.engine.stats().connections == 0;
  }));
  client.expect_clean();
  server.expect_clean();
}

TEST(EngineRawLife, WhatThereIsNotIsRefusedByName) {
  Node node;
  const std::uint32_t kMost = 0xffff'ffff;
  const struct {
    RawSettings sizes;
    Status status;
    const char* name;
  } cases[] = {
      {{0, 1, 1}, Status::invalid_argument, "raw.receive_depth = 0"},
      {{1, 0, 1}, Status::invalid_argument, "raw.max_send_sge = 0"},
      {{1, 1, 0}, Status::invalid_argument, "raw.max_recv_sge = 0"},
      {{kMost, 1, 1}, Status::limit, "raw.receive_depth = 4294967295"},
      {{1, kMost, 1}, Status::limit, "raw.max_send_sge = 4294967295"},
      {{1, 1, kMost}, Status::limit, "raw.max_recv_sge = 4294967295"},
      {{1, node.engine.device().max_sge + 1, 1}, Status::limit, "raw.max_send_sge"},
  };
  for (const auto& one : cases) {
    PrepareOptions options;
    options.settings = raw_settings(one.sizes);
    const auto made = node.engine.prepare(options);
    ASSERT_FALSE(made) << one.name;
    EXPECT_EQ(made.error().status, one.status) << made.error().message();
    EXPECT_NE(made.error().message().find(one.name), std::string::npos) << made.error().message();
  }
  node.expect_clean();
}

TEST(EngineRawLife, ReceivesHaveRoomInTheCompletionQueue) {
  Config config = small_config();
  Node node(config);
  PrepareOptions options;
  options.handlers = node.handlers();
  options.settings = raw_settings({128, 1, 1});
  std::vector<Connection> made;
  for (;;) {
    const auto one = node.engine.prepare(options);
    if (!one) {
      EXPECT_EQ(one.error().status, Status::limit) << one.error().message();
      EXPECT_NE(one.error().message().find("queues.completion_depth"), std::string::npos)
          << one.error().message();
      break;
    }
    made.push_back(*one);
    ASSERT_LT(made.size(), 64u);
  }
  ASSERT_GE(made.size(), 2u);
  EXPECT_LE(made.size() * 128 + config.queues.operations + config.queues.receive_depth,
            config.queues.completion_depth);
  EXPECT_EQ(made[0].close(), Status::ok);  // leaves its place to others
  ASSERT_TRUE(until({&node}, [&] { return node.closed.size() == 1; }));
  EXPECT_TRUE(node.engine.prepare(options));
  EXPECT_FALSE(node.engine.prepare(options));
}

/// With and without shared receives on other connections.
class RawInADomain : public testing::TestWithParam<SharedReceiveQueue> {};
INSTANTIATE_TEST_SUITE_P(Engine, RawInADomain,
                         testing::Values(SharedReceiveQueue::automatic, SharedReceiveQueue::off));

TEST_P(RawInADomain, OfItsOwnReachesNoOther) {
  Config config = small_config();
  config.queues.shared_receive_queue = GetParam();
  config.queues.receive_depth = 1024;
  config.queues.completion_depth = 8192;
  config.memory.receive_bytes = 8u << 20;
  config.connections.maximum = 16;
  config.connections.own_domains = 1;
  ConnectionSettings settings = raw_settings();
  settings.own_domain = true;
  RawPair p(settings, settings, config);
  const Buffer& into = p.at_server(64);
  const Buffer& data = p.data(64, 6);
  ASSERT_EQ(p.at_b.post(p.b, into.slice()), Status::ok);
  std::vector<BufferSlice> parts = {data.slice(0, 30), data.slice(30, 34)};
  ASSERT_EQ(p.client.tally.run([&](auto done) { return p.a.send_raw(parts, done); }), Status::ok);
  ASSERT_TRUE(p.until([&] { return p.at_b.ok == 1 && p.client.tally.idle(); }));
  EXPECT_TRUE(Node::holds(into.bytes(), 6));
  std::vector<std::byte> own(64);
  {
    auto elsewhere = p.client.engine.register_memory(own, Access::local);
    ASSERT_TRUE(elsewhere);
    EXPECT_EQ(p.a.send_raw(elsewhere->slice()), Status::invalid_argument);
    EXPECT_EQ(p.at_a.post(p.a, elsewhere->slice()), Status::invalid_argument);
  }
  {
    auto here = p.b.register_memory(own, Access::remote_write);
    ASSERT_TRUE(here);
    ASSERT_EQ(p.at_b.post(p.b, here->slice()), Status::ok);
    ASSERT_EQ(p.at_b.post(p.b, Elements{}), Status::ok);
    ASSERT_EQ(p.client.tally.run([&](auto done) { return p.a.send_raw(parts, done); }), Status::ok);
    ASSERT_TRUE(p.until([&] { return p.at_b.ok == 2 && p.client.tally.idle(); }));
    EXPECT_TRUE(Node::holds(own, 6));
    std::fill(own.begin(), own.end(), std::byte{0});
    ASSERT_EQ(p.client.tally.run([&](auto done) {
      return p.a.write_with_imm(data.slice(), here->remote(), 4, done);
    }),
              Status::ok);
    ASSERT_TRUE(p.until([&] { return p.at_b.ok == 3 && p.client.tally.idle(); }));
    EXPECT_TRUE(Node::holds(own, 6));
  }
  parts.clear();
  p.finish();
}

TEST(EngineRawLife, APeerWithoutTheRightToWriteCannot) {
  ConnectionSettings closed = raw_settings();
  closed.access = Access::remote_read;
  RawPair p(closed, raw_settings(), small_config());
  Buffer memory = p.server.filled(64, 1);
  // The key allows it, but the queue pair does not.
  const auto region = p.server.engine.expose(memory.slice(), Access::remote_read_write);
  ASSERT_TRUE(region);
  const Buffer& data = p.data(64, 2);
  ASSERT_EQ(p.client.tally.run([&](auto done) { return p.a.write(data.slice(), *region, done); }),
            Status::ok);
  ASSERT_TRUE(p.until([&] { return p.client.closed.size() == 1; }));
  EXPECT_NE(p.client.closed[0].status, Status::ok);
  EXPECT_EQ(p.client.tally.ended(Status::ok), 0u);
  EXPECT_TRUE(Node::holds(memory.bytes(), 1));
  EXPECT_EQ(p.server.engine.revoke(*region), Status::ok);
  memory.reset();
  p.finish();
}

TEST(EngineRawLife, MadeAgainItHasReceivesFromTheFirstMoment) {
  auto server = std::make_unique<Node>();
  ListenOptions listen;
  listen.settings = raw_settings();
  listen.on_accept = [&](Connection c) { EXPECT_EQ(c.post_receive(Elements{}), Status::ok); };
  Node* target = server.get();
  listen.handlers.on_ready = [&target](Connection c) {
    const Buffer data = target->filled(8, 1);
    EXPECT_EQ(c.send_raw(data.slice()), Status::ok);
  };
  server->listener = std::move(*server->engine.listen("127.0.0.1:0", listen));
  const std::string address = server->listener.address();
  Node client;
  Receives receives;
  Buffer into = client.buffer(8);
  ConnectOptions options;
  options.settings = raw_settings();
  options.handlers = client.handlers();
  options.reconnect = {100, 1ms, 20ms};
  int interrupted = 0;
  options.handlers.on_interrupted = [&](Connection c, const Error&) {
    ++interrupted;
    EXPECT_EQ(receives.flushed, 3u);
    EXPECT_EQ(receives.post(c, into.slice()), Status::ok);
  };
  Connection c = *client.engine.connect(address, options);
  for (int i = 0; i < 4; ++i) ASSERT_EQ(receives.post(c, into.slice()), Status::ok);
  ASSERT_TRUE(until({&client, server.get()}, [&] { return receives.ok == 1; }));
  server->listener = {};
  server = std::make_unique<Node>();
  target = server.get();
  server->listener = std::move(*server->engine.listen(address, listen));
  EXPECT_EQ(c.send_raw(Elements{}), Status::ok);  // the peer no longer receives it
  ASSERT_TRUE(until({&client, server.get()}, [&] { return receives.ok == 2; }));
  EXPECT_EQ(interrupted, 1);
  EXPECT_EQ(c.close(), Status::ok);
  into.reset();
  ASSERT_TRUE(until({&client, server.get()}, [&] { return client.closed.size() == 1; }));
  receives.expect_exact();
  client.expect_clean();
}

TEST(EngineRawLife, ItsEndpointIsALineOfText) {
  Node node;
  PrepareOptions options;
  options.settings = raw_settings();
  Connection c = *node.engine.prepare(options);
  ASSERT_TRUE(until({&node}, [&] { return c.endpoint().has_value(); }));
  Endpoint e = *c.endpoint();
  EXPECT_TRUE(e.raw);
  EXPECT_EQ(e.credits, 0u);
  EXPECT_EQ(e.credit_cell_rkey, 0u);
  const std::string text = e.text();
  EXPECT_NE(text.find(" raw "), std::string::npos) << text;
  EXPECT_EQ(text.find("cell"), std::string::npos) << text;
  const auto parsed = Endpoint::parse(text);
  ASSERT_TRUE(parsed) << parsed.error().message();
  e.incarnation = 0;  // invalid for the other end
  EXPECT_EQ(*parsed, e);
  // Without the word `raw`, the text lacks fields that other connections need.
  std::string without = text;
  without.erase(without.find(" raw"), 4);
  EXPECT_EQ(Endpoint::parse(without).error().status, Status::invalid_argument);
  EXPECT_EQ(Endpoint::parse(text + " raw").error().status, Status::invalid_argument);
}

TEST(EngineRawPlain, AProgramForVerbsIsAPeerLikeAnyOther) {
  Node node;
  PlainEnd plain(node.engine);
  PrepareOptions options;
  options.handlers = node.handlers();
  options.settings = raw_settings({8, 4, 4});
  Connection c = *node.engine.prepare(options);
  Receives receives;
  Buffer into = node.buffer(256);
  ASSERT_EQ(receives.post(c, std::array{into.slice(0, 10), into.slice(100, 100)}), Status::ok);
  ASSERT_EQ(receives.post(c, into.slice(0, 64)), Status::ok);
  ASSERT_EQ(receives.post(c, Elements{}), Status::ok);
  ASSERT_TRUE(until({&node}, [&] { return c.endpoint().has_value(); }));
  plain.join(*c.endpoint());
  ASSERT_TRUE(c.join(plain.endpoint()));
  const auto next = [&] {
    std::optional<ibv_wc> wc;
    EXPECT_TRUE(until({&node}, [&] { return (wc = plain.poll()).has_value(); }));
    const ibv_wc found = wc.value_or(ibv_wc{});
    EXPECT_EQ(found.status, IBV_WC_SUCCESS) << ibv_wc_status_str(found.status);
    return found;
  };
  ASSERT_TRUE(until({&node}, [&] {
    (void)plain.poll();
    return c.ready();
  }));
  // To us: a message in two parts, one with an immediate, and a write with immediate.
  for (std::size_t i = 0; i < 30; ++i) plain.bytes(0, 30)[i] = Node::pattern(1, i);
  plain.send(0, 30, IBV_WR_SEND);
  (void)next();
  plain.send(0, 30, IBV_WR_SEND_WITH_IMM, 12345);
  (void)next();
  Buffer memory = node.buffer(64, Pool::lease);
  const auto region = node.engine.expose(memory.slice(), Access::remote_write);
  ASSERT_TRUE(region);
  plain.send(0, 30, IBV_WR_RDMA_WRITE_WITH_IMM, 6, *region);
  (void)next();
  ASSERT_TRUE(until({&node}, [&] { return receives.ok == 3; }));
  EXPECT_EQ(receives[0].how.bytes, 30u);
  EXPECT_FALSE(receives[0].how.immediate);
  EXPECT_TRUE(Node::holds(memory.bytes().first(30), 1));
  EXPECT_EQ(into.data()[100], Node::pattern(1, 10));
  EXPECT_EQ(receives[1].how.immediate, 12345u);
  EXPECT_TRUE(Node::holds(into.bytes().first(30), 1));
  EXPECT_TRUE(receives[2].how.is_write);
  EXPECT_EQ(receives[2].how.immediate, 6u);
  // From us: exactly our bytes, without a header.
  const auto run = [&](auto call) {
    EXPECT_EQ(node.tally.run(call), Status::ok);
    EXPECT_TRUE(until({&node}, [&] { return node.tally.idle() || plain.poll().has_value(); }));
  };
  plain.receive(1000, 4000);
  Buffer data = node.filled(2000, 2);
  ASSERT_EQ(node.tally.run([&](auto done) {
    return c.send_raw_with_imm(std::array{data.slice(0, 700), data.slice(700, 1300)}, 99, done);
  }),
            Status::ok);
  const ibv_wc got = next();
  EXPECT_EQ(got.opcode, IBV_WC_RECV);
  EXPECT_EQ(got.byte_len, 2000u);
  EXPECT_EQ(be32toh(got.imm_data), 99u);
  EXPECT_NE(got.wc_flags & IBV_WC_WITH_IMM, 0u);
  EXPECT_TRUE(Node::holds(plain.bytes(1000, 2000), 2));
  ASSERT_TRUE(until({&node}, [&] {
    (void)plain.poll();
    return node.tally.idle();
  }));
  run([&](auto done) { return c.write(data.slice(0, 500), plain.region(), done); });
  ASSERT_TRUE(until({&node}, [&] { return node.tally.idle(); }));
  EXPECT_TRUE(Node::holds(plain.bytes(0, 500), 2));
  EXPECT_EQ(node.tally.ended(Status::ok), 2u);
  EXPECT_EQ(c.close(), Status::ok);
  EXPECT_EQ(node.engine.revoke(*region), Status::ok);
  into.reset();
  memory.reset();
  data.reset();
  ASSERT_TRUE(until({&node}, [&] { return node.closed.size() == 1; }));
  EXPECT_EQ(node.closed[0].status, Status::ok) << node.closed[0].message();
  receives.expect_exact();
  node.expect_clean();
}

class RdmaCmRaw : public ThroughRdmaCm {};

TEST_F(RdmaCmRaw, BytesGoAsTheyAre) {
  Node server, client;
  listen(server, 0, raw_settings());
  Connection c = begin(client, server.listener.address(), {}, raw_settings());
  Receives receives;
  Buffer into = client.buffer(64);
  ASSERT_EQ(receives.post(c, into.slice()), Status::ok);
  ASSERT_TRUE(until({&client, &server}, [&] { return c.ready() && server.ready.size() == 1; }));
  {
    const Buffer data = server.filled(40, 8);
    ASSERT_EQ(server.ready[0].send_raw_with_imm(data.slice(), 3), Status::ok);
  }
  ASSERT_TRUE(until({&client, &server}, [&] { return receives.ok == 1; }));
  EXPECT_EQ(receives[0].how.bytes, 40u);
  EXPECT_EQ(receives[0].how.immediate, 3u);
  EXPECT_TRUE(Node::holds(into.bytes().first(40), 8));
  into.reset();
  EXPECT_EQ(c.close(), Status::ok);
  ASSERT_TRUE(until({&client, &server},
                    [&] { return client.closed.size() == 1 && server.closed.size() == 1; }));
  EXPECT_EQ(client.closed[0].status, Status::ok) << client.closed[0].message();
  EXPECT_EQ(server.closed[0].status, Status::peer_lost) << server.closed[0].message();
  client.expect_clean();
  server.expect_clean();
}

TEST_F(RdmaCmRaw, AMismatchIsRefusedAtBothEnds) {
  for (const bool servers : {true, false}) {
    Node server, client;
    listen(server, 0, servers ? raw_settings() : ConnectionSettings{});
    (void)begin(client, server.listener.address(), {},
                servers ? ConnectionSettings{} : raw_settings());
    ASSERT_TRUE(until({&client, &server},
                      [&] { return client.closed.size() == 1 && server.closed.size() == 1; }));
    for (const Error* e : {&client.closed[0], &server.closed[0]}) {
      EXPECT_EQ(e->status, Status::unsupported) << e->message();
      EXPECT_NE(e->message().find("is not raw, the other is"), std::string::npos) << e->message();
    }
  }
}

}  // namespace
}  // namespace raw_test
