// Callbacks that destroy the engine that runs them: the engine ends with the poll, everything in
// flight ends once, and the peer goes on.
#include <gtest/gtest.h>

#include <functional>
#include <string_view>
#include <utility>

#include "rpc/rpc_ends.h"

namespace destroying_callbacks_test {
namespace {

using namespace rpc_test;  // the names of a test namespace
using spinwire::LeaseReply;
using spinwire::RawReceive;

Config config() {
  Config c = rpc_config();
  c.memory.rendezvous_bytes = 4u << 20;
  c.connections.max_message_bytes = 1u << 16;
  return c;
}

constexpr spinwire::Method kDestroys = 70;

/// Two engines with a connection, a session, and a call that is never answered. A callback destroys
/// one of them.
struct Ground : Calls {
  explicit Ground(bool of_server) : Calls(config()), victim(of_server ? server : client) {
    ends = connect(client, server);
    (void)call(kEcho, {});  // until its first reply, a session has one call in flight
    EXPECT_EQ(begin(kLater, filled(5, 1)), Status::ok);
    EXPECT_TRUE(until([&] { return later.size() == 1; }));
    EXPECT_TRUE(server.engine.serve(kDestroys, [this](Request&) { destroy(); }));
  }
  /// What the callback does.
  void destroy() {
    ++destroyed;
    victim.engine = Engine();
    EXPECT_FALSE(victim.engine);
    const Connection& own = &victim == &client ? ends.client : ends.server;
    if (own.state() != ConnectionState::closed) {
      EXPECT_NE(own.peer(), "") << "the handles answer until the end of the poll";
    }
  }
  void send(Connection from, Node& sender, std::size_t size = 10) {
    const Buffer b = sender.filled(size, 1);
    EXPECT_EQ(from.send(b), Status::ok);
  }
  /// Waits until the server may send this many messages.
  void gain_credit(std::uint32_t wanted) {
    ASSERT_TRUE(until([&] {
      if (ends.server.stats().send_credits < wanted)
        (void)ends.server.send_copy(std::as_bytes(std::span("x", 1)));
      return ends.server.stats().send_credits >= wanted && ends.server.stats().outstanding == 0;
    }));
    for (int i = 0; i < 200; ++i) (void)(client.poll() + server.poll());
  }
  /// Has the client connect to a further listener of the server.
  void connect_to(const ListenOptions& listen) {
    another_listener = server.engine.listen("127.0.0.1:0", listen).value_or(Listener());
    second = client.begin(another_listener.address());
  }
  void expect_ended();

  Node& victim;
  Ends ends;
  Connection second;
  Connection raw;
  Buffer kept;
  Listener another_listener;
  spinwire::RemoteMemory memory;
  int destroyed = 0;
};

void Ground::expect_ended() {
  ASSERT_TRUE(until([&] { return destroyed != 0; }));
  EXPECT_EQ(destroyed, 1);
  const bool of_client = &victim == &client;
  EXPECT_EQ((of_client ? ends.client : ends.server).state(), ConnectionState::closed);
  EXPECT_EQ(victim.engine.poll(), -static_cast<int>(Status::not_connected));
  // on_closed has run for each connection, and for the session.
  EXPECT_GE(victim.closed.size(), 1u);
  if (of_client) {
    EXPECT_EQ(ended[1].times, 1);
    EXPECT_EQ(ended[1].status, Status::flushed);
    EXPECT_EQ(closed.size(), 1u);
    EXPECT_FALSE(session.ready());
  }
  kept.reset();
  later.clear();
  memory = {};
  // The peer hears of it and goes on.
  Node& peer = of_client ? server : client;
  peer.stale_allowed = true;
  (void)raw.close();  // an idle one does not notice
  ASSERT_TRUE(until([&] {
    const auto rpc = peer.engine.rpc_stats();
    return peer.engine.stats().connections == 0 && rpc.sessions == 0 && rpc.served_sessions == 0 &&
           peer.engine.memory_stats(Pool::lease).blocks_used == 0;
  }));
  for (int i = 0; i < 8; ++i) (void)peer.poll();
  EXPECT_TRUE(all_ended());
  peer.expect_clean();
}

struct Case {
  const char* callback;
  std::function<void(Ground&)> provoke;
};

void run(const Case& test, bool of_server) {
  SCOPED_TRACE(test.callback);
  Ground g(of_server);
  test.provoke(g);
  g.expect_ended();
}

TEST(RpcDestroyingCallbacks, OfOperationsAndCallsEndTheEngine) {
  const Case cases[] = {
      {"Completion",
       [](Ground& g) {
         g.kept = g.client.filled(10, 1);
         EXPECT_EQ(g.ends.client.send(g.kept, [&g](const Completion&) { g.destroy(); }),
                   Status::ok);
       }},
      {"Completion of a cancelled operation",
       [](Ground& g) {
         g.kept = g.client.filled(10, 1);
         spinwire::OperationId id;
         EXPECT_EQ(g.ends.client.send(
                       g.kept, [&g](const Completion&) { g.destroy(); }, Post::defer, &id),
                   Status::ok);
         EXPECT_EQ(g.ends.client.cancel(id), Status::ok);
       }},
      {"Reply",
       [](Ground& g) {
         EXPECT_EQ(
             g.session.call(kEcho, std::span<const std::byte>(), [&g](Reply&) { g.destroy(); }),
             Status::ok);
       }},
      {"Reply of a cancelled call",
       [](Ground& g) {
         CallId id;
         EXPECT_EQ(g.session.call(
                       kSilent, std::span<const std::byte>(), [&g](Reply&) { g.destroy(); }, &id),
                   Status::ok);
         EXPECT_EQ(g.session.cancel(id), Status::ok);
       }},
      {"LeaseReply",
       [](Ground& g) {
         EXPECT_EQ(g.ends.client.request_memory(64, {},
                                                [&g](LeaseReply& r) {
                                                  g.memory = std::move(r.memory);
                                                  g.destroy();
                                                }),
                   Status::ok);
       }},
  };
  for (const Case& test : cases) run(test, false);
}

TEST(RpcDestroyingCallbacks, OfConnectionsEndTheEngine) {
  const std::size_t more_than_eager = config().connections.eager_bytes + 1;
  const Case cases[] = {
      {"on_ready",
       [](Ground& g) {
         g.client.on_ready = [&g](Connection) { g.destroy(); };
         g.second = g.client.begin(g.server);
       }},
      {"on_message",
       [](Ground& g) {
         g.client.on_message = [&g](Connection, Message&) { g.destroy(); };
         g.send(g.ends.server, g.server);
       }},
      {"on_message, with others behind it",
       [](Ground& g) {
         g.gain_credit(5);
         g.client.on_message = [&g, before = g.client.messages](Connection, Message&) {
           if (g.client.messages == before + 2) g.destroy();
         };
         for (int i = 0; i < 5; ++i) g.send(g.ends.server, g.server, 2000);
       }},
      {"on_offer",
       [more_than_eager](Ground& g) {
         g.client.on_offer = [&g](Connection, spinwire::Offer&) { g.destroy(); };
         g.send(g.ends.server, g.server, more_than_eager);
       }},
      {"on_lease",
       [](Ground& g) {
         g.client.on_lease = [&g](Connection, spinwire::RemoteMemory& m) {
           g.memory = std::move(m);
           g.destroy();
         };
         EXPECT_EQ(g.ends.server.lease(g.server.filled(8, 1), {}), Status::ok);
       }},
      {"on_returned",
       [](Ground& g) {
         g.client.on_returned = [&g](Connection, const spinwire::Returned& r) {
           if (r.how != spinwire::ReturnedBy::end) g.destroy();
         };
         EXPECT_EQ(g.ends.server.request_memory(64, {}, [](LeaseReply&) {}), Status::ok);
       }},
      {"on_closed",
       [](Ground& g) {
         g.client.on_closed = [&g](Connection, const Error&) {
           if (g.destroyed == 0) g.destroy();
         };
         g.second = g.client.begin(g.server);
         EXPECT_EQ(g.second.close(), Status::ok);
       }},
      {"on_memory_request",
       [](Ground& g) {
         spinwire::ConnectionHandlers h = g.client.handlers();
         h.on_memory_request = [&g](Connection, spinwire::MemoryRequest&) { g.destroy(); };
         EXPECT_EQ(g.ends.client.set_handlers(h), Status::ok);
         EXPECT_EQ(g.ends.server.request_memory(64, {}, [](LeaseReply&) {}), Status::ok);
       }},
      {"on_memory_request, which accepts",
       [](Ground& g) {
         spinwire::ConnectionHandlers h = g.client.handlers();
         h.on_memory_request = [&g](Connection, spinwire::MemoryRequest& r) {
           r.accept();
           g.destroy();
         };
         EXPECT_EQ(g.ends.client.set_handlers(h), Status::ok);
         EXPECT_EQ(g.ends.server.request_memory(64, {}, [](LeaseReply&) {}), Status::ok);
       }},
      {"on_end of auto_renew()",
       [](Ground& g) {
         g.client.on_lease = [&g](Connection, spinwire::RemoteMemory& m) {
           g.memory = std::move(m);
         };
         spinwire::LeaseId lease;
         EXPECT_EQ(g.ends.server.lease(g.server.filled(8, 1), {}, {}, &lease), Status::ok);
         EXPECT_TRUE(g.until([&] { return static_cast<bool>(g.memory); }));
         EXPECT_EQ(g.memory.auto_renew(60s, [&g](LeaseReply&) { g.destroy(); }), Status::ok);
         EXPECT_EQ(g.ends.server.recall(lease), Status::ok);
       }},
      {"on_writable",
       [](Ground& g) {
         spinwire::ConnectionHandlers h = g.client.handlers();
         h.on_writable = [&g](Connection) { g.destroy(); };
         EXPECT_EQ(g.ends.client.set_handlers(h), Status::ok);
         Status status = Status::ok;
         while (status == Status::ok)
           status = g.ends.client.send_copy(std::as_bytes(std::span("hello", 5)));
         EXPECT_EQ(status, Status::would_block);
       }},
      {"on_interrupted",
       [](Ground& g) {
         g.client.stale_allowed = g.server.stale_allowed = true;
         ConnectOptions options;
         options.handlers.on_interrupted = [&g](Connection, const Error&) { g.destroy(); };
         options.reconnect = {5, 1ms, 8ms};
         g.second = g.client.engine.connect(g.server.listener.address(), options).value();
         EXPECT_TRUE(g.until([&] { return g.second.ready() && g.server.ready.size() == 2; }));
         g.kept = g.server.buffer(64);
         const RemoteRegion nowhere{0x1000, 64, 0x7777, Access::remote_read};
         EXPECT_EQ(g.server.ready[1].read(g.kept, nowhere), Status::ok);
       }},
      {"on_endpoint",
       [](Ground& g) {
         spinwire::PrepareOptions options;
         options.on_endpoint = [&g](Connection, const spinwire::Endpoint&) { g.destroy(); };
         EXPECT_TRUE(g.client.engine.prepare(options));
       }},
  };
  for (const Case& test : cases) run(test, false);
}

TEST(RpcDestroyingCallbacks, OfSessionsEndTheEngine) {
  const Case cases[] = {
      {"on_ready of a session",
       [](Ground& g) {
         SessionOptions options;
         options.on_ready = [&g](Session) { g.destroy(); };
         EXPECT_TRUE(g.client.engine.open_session(g.server.listener.address(), options));
       }},
      {"on_closed of a session",
       [](Ground& g) {
         SessionOptions options;
         options.on_ready = [](Session s) { EXPECT_EQ(s.close(), Status::ok); };
         options.on_closed = [&g](Session, const Error&) { g.destroy(); };
         EXPECT_TRUE(g.client.engine.open_session(g.server.listener.address(), options));
       }},
      {"on_writable of a session",
       [](Ground& g) {
         SessionOptions options;
         options.on_writable = [&g](Session) { g.destroy(); };
         options.on_ready = [](Session s) {
           while (s.call(kEcho, std::span<const std::byte>(), [](Reply&) {}) == Status::ok) {
           }
         };
         EXPECT_TRUE(g.client.engine.open_session(g.server.listener.address(), options));
       }},
  };
  for (const Case& test : cases) run(test, false);
}

TEST(RpcDestroyingCallbacks, OfTheEngineItselfEndIt) {
  const Case cases[] = {
      {"TimerCallback",
       [](Ground& g) { EXPECT_TRUE(g.client.engine.after(1ns, [&g] { g.destroy(); })); }},
      {"TimerCallback of every()",
       [](Ground& g) {
         EXPECT_TRUE(g.client.engine.every(1us, [&g] {
           if (g.destroyed == 0) g.destroy();
         }));
       }},
      {"ResolveCallback",
       [](Ground& g) {
         EXPECT_TRUE(g.client.engine.resolve("127.0.0.1:1", [&g](const auto&) { g.destroy(); }));
       }},
  };
  for (const Case& test : cases) run(test, false);
}

TEST(RpcDestroyingCallbacks, OfTheServerEndItsEngine) {
  const Case cases[] = {
      {"on_connect_request",
       [](Ground& g) {
         ListenOptions listen;
         listen.on_connect_request = [&g](spinwire::PeerRequest&) { g.destroy(); };
         g.connect_to(listen);
       }},
      {"on_connect_request, which accepts",
       [](Ground& g) {
         ListenOptions listen;
         listen.on_connect_request = [&g](spinwire::PeerRequest& r) {
           r.accept();
           g.destroy();
         };
         g.connect_to(listen);
       }},
      {"on_session_request",
       [](Ground& g) {
         ListenOptions listen;
         listen.on_session_request = [&g](spinwire::PeerRequest& r) {
           r.accept();
           g.destroy();
         };
         g.another_listener = g.server.engine.listen("127.0.0.1:0", listen).value();
         EXPECT_TRUE(g.client.engine.open_session(g.another_listener.address(), {}));
       }},
      {"a visitor of served sessions",
       [](Ground& g) {
         EXPECT_EQ(g.server.engine.visit_served_sessions(
                       0, 64, [&g](const spinwire::ServedSessionInfo&) { g.destroy(); }),
                   0u);
       }},
      {"a visitor of served sessions, inside a callback",
       [](Ground& g) {
         g.server.on_message = [&g](Connection, Message&) {
           const Engine& engine = g.server.engine;
           (void)engine.visit_served_sessions(
               0, 64, [&g](const spinwire::ServedSessionInfo&) { g.destroy(); });
         };
         g.send(g.ends.client, g.client);
       }},
      {"on_accept",
       [](Ground& g) {
         g.server.on_accept = [&g](Connection) { g.destroy(); };
         g.second = g.client.begin(g.server);
       }},
      {"a method's handler",
       [](Ground& g) { EXPECT_EQ(g.begin(kDestroys, filled(3, 3)), Status::ok); }},
      {"RawReceive",
       [](Ground& g) {
         ListenOptions listen;
         listen.settings.raw = spinwire::RawSettings{};
         listen.handlers.on_ready = [&g](Connection c) {
           const Buffer room = g.server.buffer(64);
           EXPECT_EQ(c.post_receive(room,
                                    [&g](const RawReceive& r) {
                                      if (r.status == Status::ok) g.destroy();
                                    }),
                     Status::ok);
         };
         g.another_listener = g.server.engine.listen("127.0.0.1:0", listen).value_or(Listener());
         ConnectOptions options;
         options.settings.raw = spinwire::RawSettings{};
         options.handlers.on_ready = [&g](Connection c) {
           const Buffer b = g.client.filled(8, 1);
           EXPECT_EQ(c.send_raw(b), Status::ok);
         };
         g.raw =
             g.client.engine.connect(g.another_listener.address(), options).value_or(Connection());
       }},
  };
  for (const Case& test : cases) run(test, true);
}

TEST(RpcDestroyingCallbacks, OfADeviceEventEndTheEngine) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "Soft-RoCE tells of no refused access";
  run({"a device event",
       [](Ground& g) {
         ASSERT_EQ(g.server.engine.set_device_event_handler([&g](const spinwire::DeviceEvent&) {
           if (g.destroyed == 0) g.destroy();
         }),
                   Status::ok);
         const Buffer memory = g.server.buffer(64, Pool::lease);
         RemoteRegion region =
             g.server.engine.expose(memory, Access::remote_read).value_or(RemoteRegion{});
         region.access = Access::remote_read_write;
         g.client.stale_allowed = true;
         const Buffer b = g.client.filled(64, 1);
         EXPECT_EQ(g.ends.client.write(b, region), Status::ok);
       }},
      true);
}

TEST(RpcDestroyingCallbacks, MayRunInPollControl) {
  Ground g(false);
  g.client.on_ready = [&g](Connection) { g.destroy(); };
  g.second = g.client.begin(g.server);
  const auto steps = [&] {
    (void)g.client.engine.poll_control();
    (void)g.server.poll();
    return g.destroyed != 0;
  };
  ASSERT_TRUE(engine_test::until({}, steps));
  g.expect_ended();
}

// on_closed runs in a poll that answers no event, after which arm() and wait() go on.
TEST(RpcDestroyingCallbacks, MayRunInArmAndWait) {
  for (const bool waits : {false, true}) {
    SCOPED_TRACE(waits ? "wait" : "arm");
    Ground g(false);
    g.client.on_closed = [&g](Connection, const Error&) {
      if (g.destroyed == 0) g.destroy();
    };
    g.second = g.client.begin("127.0.0.1:1");  // nothing listens there
    ASSERT_TRUE(engine_test::until({}, [&] {
      if (waits) {
        EXPECT_NE(g.client.engine.wait(std::chrono::microseconds(1)), Status::system);
      } else {
        EXPECT_FALSE(g.client.engine.arm() && g.destroyed != 0);
      }
      (void)g.server.poll();
      return g.destroyed != 0;
    }));
    g.expect_ended();
  }
}

TEST(RpcDestroyingCallbacks, MayRunInADestruction) {
  Ground g(false);
  g.client.on_closed = [&g](Connection, const Error&) { g.destroy(); };
  g.client.engine = Engine();
  g.expect_ended();
}

TEST(RpcDestroyingCallbacks, MayPutAnotherEngineInItsPlace) {
  Ground g(false);
  g.kept = g.client.filled(10, 1);
  EXPECT_EQ(g.ends.client.send(g.kept,
                               [&g](const Completion&) {
                                 ++g.destroyed;
                                 auto another = Engine::open(config());
                                 ASSERT_TRUE(another) << another.error().message();
                                 g.client.engine = std::move(*another);
                               }),
            Status::ok);
  ASSERT_TRUE(g.until([&] { return g.destroyed != 0; }));
  EXPECT_EQ(g.ends.client.state(), ConnectionState::closed);
  EXPECT_EQ(g.ended[1].status, Status::flushed);
  g.kept.reset();
  g.client.ready.clear();
  Ends again = connect(g.client, g.server);
  EXPECT_EQ(again.client.close(), Status::ok);
  g.later.clear();
  g.server.stale_allowed = true;
  g.finish();
}

TEST(RpcDestroyingCallbacks, MayMoveTheEngine) {
  Ground g(false);
  Engine other;
  g.kept = g.client.filled(10, 1);
  EXPECT_EQ(g.ends.client.send(g.kept,
                               [&g, &other](const Completion&) {
                                 ++g.destroyed;
                                 other = std::move(g.client.engine);
                               }),
            Status::ok);
  ASSERT_TRUE(g.until([&] { return g.destroyed != 0; }));
  EXPECT_TRUE(g.ends.client.ready());
  g.client.engine = std::move(other);
  g.kept.reset();
  EXPECT_EQ(g.later[0].call.reply(filled(1, 1)), Status::ok);
  EXPECT_EQ(g.ends.client.close(), Status::ok);
  ASSERT_TRUE(g.until([&] { return g.all_ended(); }));
  g.finish();
}

}  // namespace
}  // namespace destroying_callbacks_test
