// Calls when one end has no datagrams: all of them use connections.
#include <utility>

#include "base/internals.h"
#include "engine/rerun_tests.h"
#include "rpc/bare_engine.h"
#include "rpc/client_session.h"
#include "rpc/long_calls.h"
#include "rpc/server_session.h"
#include "rpc/transport/connection_transport.h"
#include "verbs/providers.h"

namespace rpc_transport_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::rpc::ClientSession;
using spinwire::verbs::Provider;

Config with(RpcTransport transport) { return over(transport, long_call_config()); }

/// The server soon forgets clients that lost their connections.
Config forgetful() {
  Config c = with(RpcTransport::connection);
  c.connections.keepalive_interval = 20ms * slowness();
  c.connections.peer_timeout = 200ms * slowness();
  return c;
}

/// The embedded device without datagrams.
const Provider& without_datagrams() {
  static const Provider provider = [] {
    Provider p = spinwire::verbs::softverbs_provider();
    p.create_qp = [](ibv_pd* pd, ibv_qp_init_attr* init) -> ibv_qp* {
      if (init->qp_type == IBV_QPT_RC)
        return spinwire::verbs::softverbs_provider().create_qp(pd, init);
      errno = EOPNOTSUPP;
      return nullptr;
    };
    return p;
  }();
  return provider;
}

/// Engines with reachable internals, polled in turn.
struct Bares {
  Bare& add(const Config& c, const Provider* device = nullptr) {
    return all.emplace_back(c, nullptr, device);
  }
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({}, [&] {
      for (const Bare& each : all) (void)each.core->poll();
      return done();
    });
  }
  std::deque<Bare> all;
};

/// Serves an echo, and opens sessions with others.
struct Peer {
  explicit Peer(Bare& bare) : core(*bare.core) {
    listener = core.listen("127.0.0.1:0", {}).value();
    EXPECT_TRUE(core.serve(kEcho, [](Request& r) { EXPECT_EQ(r.reply(r.bytes()), Status::ok); }));
  }
  Session open(const Peer& to) {
    SessionOptions options;
    options.on_closed = [this](Session, const Error& e) { closed.push_back(e); };
    auto made = core.open_session(to.listener.address(), options);
    EXPECT_TRUE(made) << made.error().message();
    return made ? *made : Session();
  }
  [[nodiscard]] RpcStats stats() const { return spinwire::rpc::stats(*core.calls); }
  /// The number of sessions and connections, of either side.
  [[nodiscard]] std::uint32_t held() const {
    return stats().sessions + stats().served_sessions + core.context.agents.size();
  }
  EngineCore& core;
  Listener listener;
  std::vector<Error> closed;
};

/// Calls until each of `count` calls has been answered.
void expect_echoes(Bares& all, Session session, int count) {
  int good = 0;
  for (int i = 0; i < count; ++i) {
    const Bytes bytes = filled(static_cast<std::size_t>(i) % kSlotPayloadBytes, 7);
    const auto done = [&good, &bytes](Reply& r) {
      good += r.status() == Status::ok && bytes_of(r.bytes()) == bytes ? 1 : 0;
    };
    const int before = good;
    ASSERT_EQ(session.call(kEcho, std::span<const std::byte>(bytes), done), Status::ok);
    ASSERT_TRUE(all.until([&] { return good == before + 1; }));
  }
}

TEST(RpcTransport, EnginesWithAndWithoutDatagramsCallEachOther) {
  Bares all;
  Peer with_them(all.add(with(RpcTransport::automatic)));
  Peer as_well(all.add(with(RpcTransport::datagram)));
  // On other devices datagrams cannot be removed, so the engine is told not to use them.
  const bool ours = device_name() == "softverbs";
  Peer without(all.add(with(ours ? RpcTransport::automatic : RpcTransport::connection),
                       ours ? &without_datagrams() : nullptr));
  EXPECT_TRUE(with_them.core.context.device->info().datagrams);
  EXPECT_EQ(without.core.context.device->info().datagrams, !ours);
  // Both kinds of sessions in one engine at the same time.
  Session datagrams = with_them.open(as_well);
  Session there = with_them.open(without);
  Session back = without.open(with_them);
  ASSERT_TRUE(all.until([&] { return datagrams.ready() && there.ready() && back.ready(); }));
  EXPECT_GT(there.max_inline_call(), kSlotPayloadBytes);
  EXPECT_LE(there.max_inline_call(), datagrams.max_inline_call());
  EXPECT_EQ(there.max_call(), datagrams.max_call());
  expect_echoes(all, datagrams, 20);
  EXPECT_EQ(with_them.stats().long_calls, 0u);
  expect_echoes(all, there, 20);
  EXPECT_EQ(with_them.stats().long_calls, 20u);
  expect_echoes(all, back, 20);
  EXPECT_EQ(without.stats().long_calls, 20u);
  expect_echoes(all, datagrams, 20);
  EXPECT_EQ(with_them.stats().long_calls, 20u);
  for (Session* each : {&datagrams, &there, &back}) EXPECT_EQ(each->close(), Status::ok);
  ASSERT_TRUE(all.until([&] { return with_them.held() + as_well.held() + without.held() == 0; }));
  for (const Peer* each : {&with_them, &without}) {
    for (const Error& e : each->closed) EXPECT_EQ(e.status, Status::ok) << e.message();
    EXPECT_EQ(each->stats().bad_datagrams + each->stats().bad_long_calls, 0u);
  }
  for (const Bare& each : all.all) each.expect_clean();
}

TEST(RpcTransport, AConnectionForLongCallsKeepsNoReceivesOfDatagrams) {
  Config c = with(RpcTransport::automatic);
  c.connections.credit_idle_timeout = c.connections.keepalive_interval = 20ms * slowness();
  Bares all;
  Peer server(all.add(c)), client(all.add(c));
  Session session = client.open(server);
  ASSERT_TRUE(all.until([&] { return session.ready(); }));
  expect_echoes(all, session, 1);
  const ClientSession& ours =
      *spinwire::rpc::find_client(*client.core.calls, spinwire::detail::Internals::name(session));
  const auto granted = [&] {
    return spinwire::rpc::find_server(*server.core.calls, ours.peer_session)->advertised_window;
  };
  EXPECT_EQ(granted(), c.rpc.window);
  Buffer b = spinwire::detail::make<Buffer>(
      client.core.context.arena->allocate(spinwire::memory::PoolId::send, 40000), 40000);
  bool done = false;
  ASSERT_TRUE(server.core.serve(kFold, [](Request& r) { (void)r.reply(fold_of(r.bytes())); }));
  ASSERT_EQ(session.call(kFold, b.slice(), [&done](Reply&) { done = true; }), Status::ok);
  ASSERT_TRUE(all.until([&] { return done; }));
  EXPECT_TRUE(all.until([&] { return granted() == 1; }));  // idle sessions return them
  EXPECT_EQ(session.close(), Status::ok);
  ASSERT_TRUE(all.until([&] { return client.held() + server.held() == 0; }));
  b.reset();
  for (const Bare& each : all.all) each.expect_clean();
}

TEST(RpcTransport, ADeviceWithoutDatagramsIsNamedWhereTheyAreAskedFor) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  const Bare bare(with(RpcTransport::datagram), nullptr, &without_datagrams());
  const auto served = bare.core->serve(kEcho, [](Request&) {});
  ASSERT_FALSE(served);
  EXPECT_EQ(served.error().status, Status::unsupported);
  for (const char* part : {"rpc.transport", "softverbs has no unreliable datagrams", "automatic"})
    EXPECT_NE(served.error().message().find(part), std::string::npos) << served.error().message();
}

TEST(RpcTransport, OverConnectionsAloneNothingIsTakenForDatagrams) {
  Config c = with(RpcTransport::connection);
  c.rpc.receive_depth = 32768;  // too many for the pool and the completion queue
  LongCalls t(c);
  EXPECT_EQ(t.call(kEcho, filled(9, 1)).bytes, filled(9, 1));
  EXPECT_EQ(t.client.engine.stats().connected, 1u);
  t.finish_long_calls();
}

TEST(RpcTransport, AWindowAndABacklogAreTakenAtOnce) {
  Config c = with(RpcTransport::connection);
  c.rpc.backlog = 3;
  LongCalls t(c, nullptr, 4);
  CallOptions deferred;
  deferred.post = Post::defer;
  for (int i = 0; i < 7; ++i) ASSERT_EQ(t.begin(kLater, filled(4, 1), deferred), Status::ok) << i;
  EXPECT_EQ(t.begin(kLater, filled(4, 1), deferred), Status::would_block);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 4; }));
  for (int i = 0; i < 100; ++i) (void)(t.client.poll() + t.server.poll());
  EXPECT_EQ(t.later.size(), 4u);
  std::size_t answered = 0;
  ASSERT_TRUE(t.until([&] {
    for (; answered < t.later.size(); ++answered)
      EXPECT_EQ(t.later[answered].call.reply(t.later[answered].bytes), Status::ok);
    return t.all_ended();
  }));
  EXPECT_EQ(answered, 7u);
  t.finish_long_calls();
}

TEST(RpcTransport, MoreSessionsAreOpenedThanCanBeConnectedAtOnce) {
  Config c = with(RpcTransport::connection);
  c.connections.handshakes = 16;
  LongCalls t(c);
  std::vector<Session> more;
  for (int i = 0; i < 16; ++i) more.push_back(t.open());
  ASSERT_TRUE(t.until([&] {
    return !t.closed.empty() ||
           std::all_of(more.begin(), more.end(), [](const Session& s) { return s.ready(); });
  }));
  ASSERT_TRUE(t.closed.empty()) << t.closed[0].message();
  EXPECT_EQ(t.server.engine.stats().connections, 17u);
  for (Session& each : more) EXPECT_EQ(each.close(), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.closed.size() == 16; }));
  t.finish_long_calls();
}

TEST(RpcTransport, ASessionThatCannotBeConnectedIsNotOpened) {
  Config few = forgetful();
  few.connections.maximum = 1;
  LongCalls t(few);
  Node other(with(RpcTransport::connection));
  std::vector<Error> closed;
  SessionOptions options;
  options.on_closed = [&closed](Session, const Error& e) { closed.push_back(e); };
  ASSERT_TRUE(other.engine.open_session(t.server.listener.address(), options));
  ASSERT_TRUE(engine_test::until({&t.client, &t.server, &other}, [&] { return !closed.empty(); }));
  EXPECT_EQ(closed[0].status, Status::limit) << closed[0].message();
  EXPECT_EQ(t.server.engine.rpc_stats().served_sessions, 1u);
  // The limit of the client's own engine.
  (void)t.open();
  ASSERT_TRUE(t.until([&] { return t.closed.size() == 1; }));
  EXPECT_EQ(t.closed[0].status, Status::limit) << t.closed[0].message();
  EXPECT_EQ(t.call(kEcho, filled(9, 1)).bytes, filled(9, 1));
  other.expect_clean();
  EXPECT_EQ(t.session.close(), Status::ok);
  t.finish_long_calls();
}

TEST(RpcTransport, RepliesOfLongCallsCanBeWrittenWhereTheyAreSentFrom) {
  LongCalls t;
  ASSERT_TRUE(t.server.engine.serve(9, [](Request& r) {
    const std::span<std::byte> space = r.reserve_reply(r.max_reply());
    ASSERT_EQ(space.size(), r.max_reply());
    const Bytes bytes = filled(space.size(), 3);
    std::copy(bytes.begin(), bytes.end(), space.begin());
    EXPECT_EQ(r.commit_reply(space.size()), Status::ok);
  }));
  const std::size_t longest = t.session.max_inline_call();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(t.call(9, filled(50000, 1)).bytes, filled(longest, 3));
  // The application's buffer is only read, at any offset.
  Buffer own = t.server.filled(500, 6);
  ASSERT_TRUE(t.server.engine.serve(9, [&own](Request& r) {
    (void)r.reserve_reply(100);
    EXPECT_EQ(r.reply(own.slice(spinwire::wire::kRpcMessageHeaderBytes, 300)), Status::ok);
  }));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(t.call(9, filled(50000, 1)).bytes.size(), 300u);
  EXPECT_TRUE(Node::holds(own.bytes().first(500), 6));
  own.reset();
  ASSERT_TRUE(t.server.engine.serve(9, [](Request& r) {
    EXPECT_TRUE(r.reserve_reply(1).empty()) << "the client has named the memory for it";
    EXPECT_EQ(r.reply(filled(10, 4)), Status::ok);
  }));
  t.expect_into(9, filled(9, 1), filled(10, 4));
  t.finish_long_calls();
}

/// A session over a connection, which the test breaks.
struct Losing {
  explicit Losing(const Config& c = with(RpcTransport::connection))
      : server(all.add(c)), client(all.add(c)) {
    EXPECT_TRUE(server.core.serve(kLater, [this](Request& r) { later.push_back(r.defer()); }));
    session = client.open(server);
    EXPECT_TRUE(all.until([&] { return session.ready(); }));
  }
  [[nodiscard]] ClientSession& record() const {
    return *spinwire::rpc::find_client(*client.core.calls,
                                       spinwire::detail::Internals::name(session));
  }
  /// Breaks the connection like a network failure.
  void lose(Status as = Status::peer_lost) const {
    spinwire::agent::Agent* const a =
        spinwire::rpc::agent_of(*client.core.calls, *record().connection);
    ASSERT_NE(a, nullptr);
    spinwire::agent::fail(client.core.context, *a, {as, "test", "cut", "none"});
  }
  void begin(spinwire::Method method) {
    const auto done = [this](Reply& r) { ended.push_back(r.status()); };
    ASSERT_EQ(session.call(method, std::span<const std::byte>(), done), Status::ok);
  }
  void expect_closed(Status status) {
    ASSERT_TRUE(all.until([&] { return client.closed.size() == 1; }));
    EXPECT_EQ(client.closed[0].status, status) << client.closed[0].message();
    ASSERT_TRUE(all.until([&] { return client.held() + server.held() == 0; }));
    for (const Bare& each : all.all) each.expect_clean();
  }

  Bares all;
  Peer server, client;
  Session session;
  std::vector<PendingCall> later;
  std::vector<Status> ended;
};

TEST(RpcTransport, AConnectionThatIsLostIsMadeAgain) {
  Losing t;
  t.begin(kLater);
  ASSERT_TRUE(t.all.until([&] { return t.later.size() == 1; }));
  t.lose();
  ASSERT_TRUE(t.all.until([&] { return t.ended.size() == 1; }));
  EXPECT_EQ(t.ended[0], Status::peer_lost);
  EXPECT_TRUE(t.session.ready());
  t.begin(kEcho);  // waits for the reconnect
  ASSERT_TRUE(t.all.until([&] { return t.ended.size() == 2; }));
  EXPECT_EQ(t.ended[1], Status::ok);
  EXPECT_EQ(t.later[0].reply(Bytes()), Status::not_connected);
  EXPECT_EQ(t.client.core.context.stats.connected, 2u);
  EXPECT_EQ(t.server.stats().served_sessions, 1u);
  EXPECT_EQ(t.session.close(), Status::ok);
  t.expect_closed(Status::ok);
}

TEST(RpcTransport, OneThatIsLostAtOnceAgainEndsTheSession) {
  Config c = forgetful();
  c.connections.close_timeout = 1min;  // bounds what follows
  Losing t(c);
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(t.session.ready());
    t.lose();
    t.begin(kEcho);
    ASSERT_TRUE(t.all.until([&] { return t.ended.size() == static_cast<std::size_t>(i) + 1; }));
  }
  EXPECT_EQ(t.ended, (std::vector<Status>{Status::ok, Status::peer_lost}));
  t.expect_closed(Status::peer_lost);
}

/// A call tells that its connection was lost, whatever has broken it: `limit`, for example, would
/// say that the handler has run.
TEST(RpcTransport, TheErrorOfAConnectionIsNotThatOfItsCalls) {
  for (const Status error : {Status::local_error, Status::limit, Status::refused}) {
    Config c = forgetful();
    c.connections.close_timeout = 1min;  // bounds what follows
    Losing t(c);
    t.begin(kLater);
    ASSERT_TRUE(t.all.until([&] { return t.later.size() == 1; }));
    t.lose(error);
    ASSERT_TRUE(
        t.all.until([&] { return t.ended.size() == 1 && t.record().connection->was_ready; }));
    t.begin(kLater);
    ASSERT_TRUE(t.all.until([&] { return t.later.size() == 2; }));
    for (int i = 0; i < 20; ++i) t.begin(kEcho);  // more than the window
    t.lose(error);
    t.expect_closed(error);
    ASSERT_EQ(t.ended.size(), 22u);
    for (const Status status : t.ended) EXPECT_EQ(status, Status::peer_lost) << to_string(status);
  }
}

TEST(RpcTransport, ASessionCanBeClosedWhileItHasNoConnection) {
  Losing t(forgetful());
  t.lose();
  t.begin(kEcho);
  ASSERT_TRUE(t.all.until([&] { return !t.record().connection->was_ready; }));
  EXPECT_EQ(t.session.close(), Status::ok);
  EXPECT_TRUE(t.ended.empty());
  ASSERT_TRUE(t.all.until([&] { return !t.ended.empty(); }));
  EXPECT_EQ(t.ended, std::vector<Status>{Status::flushed});
  t.expect_closed(Status::ok);
}

TEST(RpcTransport, AServerThatIsGoneEndsTheSession) {
  Losing t;
  t.begin(kLater);
  ASSERT_TRUE(t.all.until([&] { return t.later.size() == 1; }));
  t.later.clear();
  t.server.core.control.stop_listening({0, 1});
  t.lose();
  ASSERT_TRUE(t.all.until([&] { return t.client.closed.size() == 1; }));
  EXPECT_EQ(t.client.closed[0].status, Status::peer_lost) << t.client.closed[0].message();
  EXPECT_EQ(t.ended, std::vector<Status>{Status::peer_lost});
}

/// Runs suites without the tests of datagrams and of sessions that exist before a connection.
void expect_passes(const std::string& suites, int least) {
  const std::string text =
      engine_test::run_again("SPINWIRE_TEST_TRANSPORT", "connections",
                             suites +
                                 "-RpcSessionSurvival.AHandlerThatIsSlowerThanTheTimeOut:"
                                 "RpcCallBuffers.RequestsAndRepliesThatAreKeptLieOnACacheline:"
                                 "RpcLongCalls.RequestsOfAnyLengthArriveWhole:RpcLongCalls."
                                 "WhatIsWrongWithACallIsToldAtOnce:"
                                 "RpcLongCalls.AWindowAndABacklogAreAllThatIsTaken:"
                                 "RpcLongCallsLoss.AConnectionThatCannotBeMadeEndsItsCalls");
  EXPECT_GE(engine_test::passed(text), least) << text << "too many were skipped";
}

TEST(RpcTransport, PassesTheSuitesOfShortCalls) {
  expect_passes(
      "RpcCalls.*:RpcCallBuffers.*:RpcSharedListeners.*:RpcZeroCost.*:RpcSessionSurvival.*:RpcLoss."
      "*",
      20);
}

TEST(SlowRpcTransport, PassesTheSuitesOfLongCalls) {
  expect_passes("RpcLongCalls.*:RpcLongCallsLoss.*:RpcLongCallsPackets.*:SlowRpcLongCalls*", 25);
}

}  // namespace
}  // namespace rpc_transport_test
