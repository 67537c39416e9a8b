// Exceptions that leave callbacks: each is logged once, and gives up what the callback was to
// handle.
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <string_view>

#include "rpc/counted_exceptions.h"
#include "rpc/rpc_ends.h"

namespace thrown_exceptions_test {
namespace {

using namespace rpc_test;  // the names of a test namespace
using spinwire::Access;
using spinwire::Completion;
using spinwire::ConnectionState;
using spinwire::LeaseReply;
using spinwire::RawReceive;

class RpcExceptions : public CountsThrownExceptions {};

Config config() {
  Config c = rpc_config();
  c.memory.rendezvous_bytes = 4u << 20;
  c.connections.max_message_bytes = 1u << 16;
  return c;
}

/// Two engines, whose callbacks a case replaces.
struct Ground : Calls {
  Ground() : Calls(config()) {}
  void clear() {
    server.on_accept = server.on_ready = nullptr;
    server.on_message = nullptr;
    server.on_offer = nullptr;
    server.on_lease = nullptr;
    server.on_returned = nullptr;
    server.on_closed = nullptr;
    server.ready.clear();
    server.closed.clear();
    client.closed.clear();
  }
  /// Sends a message of this size, or of 0 bytes.
  void send(Connection c, std::size_t size) {
    const Buffer b = client.filled(size, 1);
    EXPECT_EQ(c.send(b), Status::ok);
  }
  /// Requests memory and releases it.
  void borrow(Connection c) {
    EXPECT_EQ(c.request_memory(64, {}, [](LeaseReply& r) { EXPECT_EQ(r.status, Status::ok); }),
              Status::ok);
  }
  void expect_others_work() {
    EXPECT_TRUE(session.ready());
    EXPECT_EQ(call(kEcho, filled(5, 1)).status, Status::ok);
    clear();
    Ends ends = connect(client, server);
    send(ends.client, 10);
    EXPECT_TRUE(until([&] { return server.messages != before_; }));
    before_ = server.messages;
    EXPECT_EQ(ends.client.close(), Status::ok);
    EXPECT_TRUE(until([&] { return !server.closed.empty() && !client.closed.empty(); }));
  }

 private:
  std::uint64_t before_ = 0;
};

TEST_F(RpcExceptions, CloseTheConnectionThatTheCallbackIsAbout) {
  struct Case {
    const char* callback;
    std::function<void(Ground&)> install;
    std::function<void(Ground&, Connection&)> provoke;  ///< with the client's end, which is ready
  };
  const std::size_t more_than_eager = config().connections.eager_bytes + 1;
  const Case cases[] = {
      {"on_accept", [](Ground& g) { g.server.on_accept = [](Connection) { fail(); }; }, nullptr},
      {"on_ready", [](Ground& g) { g.server.on_ready = [](Connection) { fail(); }; }, nullptr},
      {"on_message", [](Ground& g) { g.server.on_message = [](Connection, Message&) { fail(); }; },
       [](Ground& g, Connection& c) { g.send(c, 10); }},
      {"on_offer",
       [](Ground& g) { g.server.on_offer = [](Connection, spinwire::Offer&) { fail(); }; },
       [more_than_eager](Ground& g, Connection& c) { g.send(c, more_than_eager); }},
      {"on_lease",
       [](Ground& g) { g.server.on_lease = [](Connection, spinwire::RemoteMemory&) { fail(); }; },
       [](Ground& g, Connection& c) { EXPECT_EQ(c.lease(g.client.filled(8, 1), {}), Status::ok); }},
      {"on_returned",
       [](Ground& g) {
         g.server.on_returned = [](Connection, const spinwire::Returned&) { fail(); };
       },
       [](Ground& g, Connection& c) { g.borrow(c); }},
      {"on_memory_request",
       [](Ground& g) {
         spinwire::ConnectionHandlers h = g.server.handlers();
         h.on_memory_request = [](Connection, spinwire::MemoryRequest&) { fail(); };
         g.server.on_accept = [h](Connection c) { EXPECT_EQ(c.set_handlers(h), Status::ok); };
       },
       [](Ground&, Connection& c) {
         EXPECT_EQ(c.request_memory(64, {}, [](LeaseReply& r) { EXPECT_FALSE(r.memory); }),
                   Status::ok);
       }},
      {"on_writable",
       [](Ground& g) {
         spinwire::ConnectionHandlers h = g.server.handlers();
         h.on_writable = [](Connection) { fail(); };
         g.server.on_accept = [h](Connection c) { EXPECT_EQ(c.set_handlers(h), Status::ok); };
       },
       [](Ground& g, Connection&) {
         Connection c = g.server.ready[0];
         while (c.send_copy(std::as_bytes(std::span("hello", 5))) == Status::ok) {
         }
       }},
      {"on_closed",
       [](Ground& g) { g.server.on_closed = [](Connection, const Error&) { fail(); }; },
       [](Ground&, Connection& c) { EXPECT_EQ(c.close(), Status::ok); }},
  };
  Ground g;
  for (const Case& test : cases) {
    SCOPED_TRACE(test.callback);
    g.clear();
    logged = 0;
    test.install(g);
    const std::uint32_t before = g.server.engine.stats().connections;
    Connection c = g.client.begin(g.server);
    if (test.provoke) {
      ASSERT_TRUE(g.until([&] { return c.ready() && !g.server.ready.empty(); }));
      test.provoke(g, c);
    }
    ASSERT_TRUE(g.until([&] {
      return c.state() == ConnectionState::closed && !g.server.closed.empty() &&
             g.server.engine.stats().connections == before;
    })) << "it stays open";
    EXPECT_EQ(logged, 1);
    EXPECT_EQ(g.server.closed[0].status, Status::ok) << "as after close()";
    g.expect_others_work();
  }
  g.finish();
}

TEST_F(RpcExceptions, CloseAPreparedConnection) {
  Ground g;
  spinwire::PrepareOptions options;
  options.handlers = g.client.handlers();
  options.on_endpoint = [](Connection, const spinwire::Endpoint&) { fail(); };
  const auto c = g.client.engine.prepare(options);
  ASSERT_TRUE(c);
  ASSERT_TRUE(g.until([&] { return c->state() == ConnectionState::closed; }));
  EXPECT_EQ(logged, 1);
  g.expect_others_work();
  g.finish();
}

TEST_F(RpcExceptions, CloseAConnectionThatReconnects) {
  Ground g;
  g.client.stale_allowed = g.server.stale_allowed = true;
  ConnectOptions options;
  options.handlers = g.client.handlers();
  options.handlers.on_interrupted = [](Connection, const Error&) { fail(); };
  options.reconnect = {5, 1ms, 8ms};
  const Connection c =
      g.client.engine.connect(g.server.listener.address(), options).value_or(Connection());
  ASSERT_TRUE(g.until([&] { return c.ready() && g.server.ready.size() == 1; }));
  Buffer here = g.server.buffer(64);
  const RemoteRegion nowhere{0x1000, 64, 0x7777, Access::remote_read};
  EXPECT_EQ(g.server.ready[0].read(here, nowhere), Status::ok);
  ASSERT_TRUE(g.until([&] {
    return c.state() == ConnectionState::closed && !g.client.closed.empty() &&
           !g.server.closed.empty();
  }));
  EXPECT_EQ(logged, 1);
  here.reset();
  g.expect_others_work();
  g.finish();
}

TEST_F(RpcExceptions, DuringDestructionLeaveTheOtherCallbacksRunning) {
  Ground g;
  Connection c = connect(g.client, g.server).client;
  (void)connect(g.client, g.server);
  g.client.on_closed = [](Connection, const Error&) { fail(); };
  Buffer b = g.client.filled(10, 1);
  EXPECT_EQ(c.send(
                b, [](const Completion&) { fail(); }, Post::defer),
            Status::ok);
  EXPECT_EQ(g.session.call(kSilent, b, [](Reply&) { fail(); }), Status::ok);
  g.client.engine = Engine();
  EXPECT_EQ(logged, 4);
  EXPECT_EQ(g.client.closed.size(), 2u);
  EXPECT_EQ(g.closed.size(), 1u);
  EXPECT_TRUE(b.unique());
  b.reset();
  g.server.stale_allowed = true;
  ASSERT_TRUE(engine_test::until({&g.server}, [&] {
    return g.server.engine.stats().connections == 0 &&
           g.server.engine.rpc_stats().served_sessions == 0;
  }));
  g.server.expect_clean();
}

TEST_F(RpcExceptions, OfTheLogsCallbackAreDropped) {
  static int messages;
  messages = 0;
  Ground g;
  spinwire::set_log([](spinwire::LogLevel, std::string_view) {
    ++messages;
    fail();
  });
  const Ends ends = connect(g.client, g.server);
  Connection c = ends.client;
  g.server.on_message = [](Connection, Message&) { fail(); };
  g.send(c, 10);
  ASSERT_TRUE(g.until([&] { return !g.server.closed.empty() && !g.client.closed.empty(); }));
  EXPECT_GE(messages, 1) << "the exception of on_message was logged";
  SetUp();
  g.expect_others_work();
  g.finish();
}

TEST_F(RpcExceptions, OfReportsCloseNothing) {
  Ground g;
  const Ends ends = connect(g.client, g.server);
  Connection c = ends.client;
  Buffer b = g.client.filled(10, 1);
  EXPECT_EQ(c.send(b, [](const Completion&) { fail(); }), Status::ok);
  ASSERT_TRUE(g.until([&] { return logged == 1; })) << "a Completion";
  EXPECT_EQ(c.request_memory(64, {},
                             [](LeaseReply& r) {
                               EXPECT_EQ(r.status, Status::ok);
                               fail();
                             }),
            Status::ok);
  ASSERT_TRUE(g.until([&] { return logged == 2; })) << "a LeaseReply";
  ASSERT_TRUE(g.until([&] { return g.server.engine.memory_stats(Pool::lease).blocks_used == 0; }))
      << "its memory is released";
  EXPECT_EQ(g.session.call(kEcho, b, [](Reply&) { fail(); }), Status::ok);
  ASSERT_TRUE(g.until([&] { return logged == 3; })) << "a Reply";
  spinwire::CallId id;
  EXPECT_EQ(g.session.call(
                kSilent, b, [](Reply&) { fail(); }, &id),
            Status::ok);
  EXPECT_EQ(g.session.cancel(id), Status::ok);
  ASSERT_TRUE(g.until([&] { return logged == 4; })) << "the Reply of a cancelled call";
  for (int i = 0; i < 100; ++i) (void)(g.client.poll() + g.server.poll());
  EXPECT_EQ(logged, 4) << "each ran once";
  EXPECT_TRUE(c.ready());
  EXPECT_TRUE(g.session.ready());
  b.reset();
  EXPECT_EQ(c.close(), Status::ok);
  ASSERT_TRUE(g.until([&] { return !g.server.closed.empty() && !g.client.closed.empty(); }));
  g.expect_others_work();
  g.finish();
}

TEST_F(RpcExceptions, OfWhatConcernsTheEngineLeaveItAsItIs) {
  Ground g;
  const Session second =
      g.client.engine.open_session(g.server.listener.address(), {}).value_or(Session());
  ASSERT_TRUE(g.until([&] { return second.ready(); }));
  ASSERT_TRUE(g.server.engine.after(1ns, [] { fail(); }));
  ASSERT_TRUE(g.until([&] { return logged == 1; })) << "a timer";
  spinwire::Timer timer = g.server.engine.every(1us, [] { fail(); }).value();
  ASSERT_TRUE(g.until([&] { return logged >= 4; })) << "a timer that runs again";
  EXPECT_EQ(timer.cancel(), Status::ok);
  logged = 0;
  ASSERT_TRUE(g.server.engine.resolve("127.0.0.1:1", [](const auto&) { fail(); }));
  ASSERT_TRUE(g.until([&] { return logged == 1; })) << "a name";
  EXPECT_EQ(g.server.engine.visit_served_sessions(
                0, 64, [](const spinwire::ServedSessionInfo&) { fail(); }),
            0u);
  EXPECT_EQ(logged, 3) << "both sessions are visited";
  EXPECT_TRUE(g.server.engine.audit()) << "the visit is over";
  g.expect_others_work();
  EXPECT_EQ(logged, 3) << "each ran once";
  EXPECT_TRUE(g.server.engine.drain(60s, {.on_drained = [](const auto&) { fail(); }}));
  ASSERT_TRUE(g.until([&] { return g.server.engine.drained(); }));
  EXPECT_EQ(logged, 4);
  g.finish();
}

TEST_F(RpcExceptions, OfARenewalsEndLeaveTheConnection) {
  Ground g;
  Ends ends = connect(g.client, g.server);
  spinwire::RemoteMemory memory;
  g.client.on_lease = [&](Connection, spinwire::RemoteMemory& m) { memory = std::move(m); };
  spinwire::LeaseId lease;
  ASSERT_EQ(ends.server.lease(g.server.filled(8, 1), {}, {}, &lease), Status::ok);
  ASSERT_TRUE(g.until([&] { return static_cast<bool>(memory); }));
  ASSERT_EQ(memory.auto_renew(60s, [](LeaseReply&) { fail(); }), Status::ok);
  ASSERT_EQ(ends.server.recall(lease), Status::ok);
  ASSERT_TRUE(g.until([&] { return logged == 1; }));
  EXPECT_TRUE(ends.client.ready());
  EXPECT_EQ(ends.client.close(), Status::ok);
  ASSERT_TRUE(g.until([&] { return !g.server.closed.empty() && !g.client.closed.empty(); }));
  g.expect_others_work();
  EXPECT_EQ(logged, 1);
  g.finish();
}

TEST_F(RpcExceptions, OfARawReceiveCloseNothing) {
  Ground g;
  ListenOptions listen;
  listen.handlers = g.server.handlers();
  listen.settings.raw = spinwire::RawSettings{};
  const auto listener = g.server.engine.listen("127.0.0.1:0", listen);
  ASSERT_TRUE(listener) << listener.error().message();
  ConnectOptions options;
  options.settings.raw = spinwire::RawSettings{};
  Connection from = g.client.engine.connect(listener->address(), options).value_or(Connection());
  ASSERT_TRUE(g.until([&] { return from.ready() && g.server.ready.size() == 1; }));
  Connection to = g.server.ready[0];
  Buffer room = g.server.buffer(64);
  Buffer b = g.client.filled(10, 1);
  EXPECT_EQ(to.post_receive(
                room, [](const RawReceive&) { fail(); }, [] { fail(); }),
            Status::ok);
  EXPECT_EQ(from.send_raw(b), Status::ok);
  ASSERT_TRUE(g.until([&] { return logged == 2; })) << "one of each callback";
  EXPECT_TRUE(to.ready() && from.ready());
  room.reset();
  b.reset();
  EXPECT_EQ(to.close(), Status::ok);
  EXPECT_EQ(from.close(), Status::ok);
  ASSERT_TRUE(g.until([&] {
    return to.state() == ConnectionState::closed && from.state() == ConnectionState::closed;
  }));
  g.expect_others_work();
  g.finish();
}

TEST_F(RpcExceptions, OfADeviceEventLeaveTheEnginePolling) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "Soft-RoCE tells of no refused access";
  Ground g;
  ASSERT_EQ(g.server.engine.set_device_event_handler([](const spinwire::DeviceEvent&) { fail(); }),
            Status::ok);
  const Ends ends = connect(g.client, g.server);
  Connection c = ends.client;
  Buffer memory = g.server.buffer(64, Pool::lease);
  spinwire::RemoteRegion region =
      g.server.engine.expose(memory, Access::remote_read).value_or(spinwire::RemoteRegion{});
  region.access = Access::remote_read_write;
  Buffer b = g.client.filled(64, 1);
  g.client.stale_allowed = g.server.stale_allowed = true;
  ASSERT_EQ(c.write(b, region), Status::ok);
  ASSERT_TRUE(g.until([&] { return !g.server.closed.empty() && !g.client.closed.empty(); }));
  EXPECT_GE(logged, 1);
  EXPECT_EQ(g.server.engine.revoke(region), Status::ok);
  memory.reset();
  b.reset();
  g.expect_others_work();
  g.finish();
}

TEST_F(RpcExceptions, RefuseARequestThatWasNotAnswered) {
  constexpr spinwire::Method kThrows = 50, kAnswersAndThrows = 51;
  Ground g;
  ASSERT_TRUE(g.server.engine.serve(kThrows, [](Request&) { fail(); }));
  ASSERT_TRUE(g.server.engine.serve(kAnswersAndThrows, [](Request& r) {
    EXPECT_EQ(r.reply(r.bytes()), Status::ok);
    fail();
  }));
  EXPECT_EQ(g.call(kThrows, filled(5, 1)).status, Status::refused);
  EXPECT_EQ(logged, 1);
  const Ended answered = g.call(kAnswersAndThrows, filled(5, 2));
  EXPECT_EQ(answered.status, Status::ok);
  EXPECT_EQ(answered.bytes, filled(5, 2));
  EXPECT_EQ(logged, 2);
  g.expect_others_work();
  g.finish();
}

TEST_F(RpcExceptions, CloseTheSessionThatTheCallbackIsAbout) {
  Ground g;
  SessionOptions options;
  options.on_ready = [](Session) { fail(); };
  options.on_closed = [](Session, const Error& why) {
    EXPECT_EQ(why.status, Status::ok) << "as after close()";
    fail();
  };
  const Session second =
      g.client.engine.open_session(g.server.listener.address(), options).value_or(Session());
  ASSERT_TRUE(g.until([&] { return logged == 2; })) << "once each";
  EXPECT_EQ(second.state(), SessionState::closed);
  logged = 0;
  options.on_ready = [](Session s) {
    while (s.call(kEcho, std::span<const std::byte>(), [](Reply&) {}) == Status::ok) {
    }
  };
  options.on_closed = {};
  options.on_writable = [](Session) { fail(); };
  const Session third =
      g.client.engine.open_session(g.server.listener.address(), options).value_or(Session());
  ASSERT_TRUE(g.until([&] { return third.state() == SessionState::closed; }));
  EXPECT_EQ(logged, 1);
  g.expect_others_work();
  g.finish();
}

}  // namespace
}  // namespace thrown_exceptions_test
