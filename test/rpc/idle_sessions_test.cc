// Idle sessions: what they free, and datagrams that arrive late.
#include "base/internals.h"
#include "rpc/bare_engine.h"
#include "rpc/client_call.h"
#include "rpc/client_session.h"
#include "rpc/server_session.h"
#include "rpc/session_liveness.h"

namespace rpc_idle_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::memory::PoolId;
using spinwire::rpc::ClientSession;
using spinwire::rpc::ServerSession;
using spinwire::wire::RpcKind;

constexpr spinwire::Method kCopied = 10, kWritten = 11;
constexpr std::size_t kLong = 3000;

/// Two engines whose time advances by a microsecond per poll, or faster while idle.
struct Idle {
  explicit Idle(const Config& c = over(RpcTransport::datagram)) : server(c, &now), client(c, &now) {
    listener = server.core->listen("127.0.0.1:0", {}).value();
    serve(kEcho, [](Request& r) { EXPECT_EQ(r.reply(r.bytes()), Status::ok); });
    serve(kLater, [this](Request& r) { later.push_back(r.defer()); });
    serve(kCopied, [](Request& r) { EXPECT_EQ(r.reply(filled(kLong, 1)), Status::ok); });
    serve(kWritten, [](Request& r) {
      const std::span<std::byte> space = r.reserve_reply(kLong);
      ASSERT_EQ(space.size(), kLong);
      std::fill(space.begin(), space.end(), std::byte{2});
      EXPECT_EQ(r.commit_reply(kLong), Status::ok);
    });
    session = client.core->open_session(listener.address(), {}).value();
    EXPECT_TRUE(until([&] { return session.ready(); }));
  }
  void serve(spinwire::Method method, const spinwire::MethodHandler& handler) const {
    EXPECT_TRUE(server.core->serve(method, handler));
  }
  void poll() const {
    (void)client.core->poll();
    (void)server.core->poll();
  }
  template <typename Done>
  bool until(Done&& done) {
    for (int i = 0; i < 1'000'000 && !done(); ++i) {
      now += 1000;
      poll();
    }
    return done();
  }
  void rest(std::chrono::milliseconds time) {
    for (std::int64_t i = 0; i < time.count(); ++i) {
      now += 1'000'000;
      poll();
    }
  }
  Status begin(spinwire::Method method, const Bytes& bytes = {}) {
    return session.call(method, std::span<const std::byte>(bytes), [this](Reply& r) {
      ended.push_back(r.status());
      replies.push_back(bytes_of(r.bytes()));
    });
  }
  /// Makes as many calls at once as the window allows.
  void fill_window(spinwire::Method method) {
    const std::size_t all = ended.size() + ours().window;
    for (std::size_t i = ended.size(); i < all; ++i) ASSERT_EQ(begin(method), Status::ok);
    ASSERT_TRUE(until([&] { return ended.size() == all; }));
    EXPECT_EQ(std::count(ended.begin(), ended.end(), Status::ok), static_cast<long>(all));
  }
  /// Injects a datagram as if the client's port had sent it long ago.
  void arrives(RpcKind kind, std::uint32_t number, spinwire::Method method = 0) {
    static const std::byte nothing[kSlotPayloadBytes]{};
    auto& port = *client.core->calls->port;
    const ClientSession& c = ours();
    const bool proves = kind != RpcKind::request;
    const spinwire::wire::RpcHeader header =
        proves ? spinwire::wire::session_header(c.peer_session, number, kind,
                                                spinwire::wire::session_proof(c.token))
               : spinwire::wire::RpcHeader{c.peer_session, number, method, kind, 0, 0, 0};
    port.send(c.peer_address->destination, spinwire::wire::pack(header), 0, nothing);
    port.flush();
    for (int i = 0; i < 200; ++i) poll();
  }
  [[nodiscard]] std::uint64_t used() const {
    return server.core->context.arena->stats(PoolId::send).blocks_used;
  }
  [[nodiscard]] ClientSession& ours() const {
    return *spinwire::rpc::find_client(*client.core->calls,
                                       spinwire::detail::Internals::name(session));
  }
  [[nodiscard]] ServerSession& theirs() const {
    return *spinwire::rpc::find_server(*server.core->calls, ours().peer_session);
  }
  [[nodiscard]] RpcStats stats(const Bare& of) const {
    return spinwire::rpc::stats(*of.core->calls);
  }

  std::uint64_t now = 1'000'000'000;
  // Declared before the engines, whose destructors end calls.
  std::vector<Status> ended;
  std::vector<Bytes> replies;
  std::vector<PendingCall> later;
  Bare server, client;
  Listener listener;
  Session session;
};

TEST(RpcIdleSessions, ReceivesGoBackWhateverPingsAreSentMeanwhile) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  for (const auto keepalive : {20ms, 400ms, 1000ms}) {
    Config c = over(RpcTransport::datagram);
    c.connections.keepalive_interval = keepalive;
    c.connections.credit_idle_timeout = 1s;
    Idle t(c);
    ASSERT_EQ(t.begin(kEcho), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.ended.size() == 1; }));
    const std::uint32_t window = t.ours().window;
    EXPECT_EQ(t.server.core->calls->reserved_receives, window);
    EXPECT_EQ(t.ours().send_window, window);
    t.rest(900ms);
    EXPECT_EQ(t.server.core->calls->reserved_receives, window) << "it may call again";
    t.rest(20s);
    EXPECT_EQ(t.server.core->calls->reserved_receives, 0u) << keepalive.count() << " ms";
    EXPECT_TRUE(t.session.ready());
    EXPECT_EQ(t.stats(t.server).served_sessions, 1u);
    // The client has learned it.
    for (int i = 0; i < 2; ++i) ASSERT_EQ(t.begin(kEcho), Status::ok);
    EXPECT_EQ(t.ours().in_flight, 1u);
    ASSERT_TRUE(t.until([&] { return t.ended.size() == 3; }));
    EXPECT_EQ(t.ended, std::vector<Status>(3, Status::ok));
    EXPECT_EQ(t.server.core->calls->reserved_receives, window);
    t.client.expect_clean();
    t.server.expect_clean();
  }
}

TEST(RpcIdleSessions, RepliesAreKeptUntilTheClientIsIdle) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  Idle t;
  const std::uint32_t window = t.ours().window;
  for (const spinwire::Method method : {kCopied, kWritten, spinwire::Method{kEcho}}) {
    t.fill_window(kEcho);
    t.fill_window(kWritten);
    EXPECT_GE(t.used(), window);
    t.fill_window(method);
    t.rest(500ms);
    if (method != kEcho) {
      EXPECT_GE(t.used(), window);
    }
    t.rest(3s);
    EXPECT_EQ(t.used(), 0u) << method;
    t.rest(3s);
  }
  t.fill_window(kCopied);  // all calls still work
  for (std::size_t i = t.replies.size() - window; i < t.replies.size(); ++i)
    EXPECT_EQ(t.replies[i], filled(kLong, 1));
  EXPECT_EQ(t.stats(t.client).retransmitted_requests, 0u);
  t.client.expect_clean();
  t.server.expect_clean();
}

TEST(RpcIdleSessions, OverAConnectionToo) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  Idle t(over(RpcTransport::connection));
  const std::uint32_t window = t.ours().window;
  for (int i = 0; i < 2; ++i) {
    t.fill_window(kWritten);
    EXPECT_EQ(t.replies.back(), Bytes(kLong, std::byte{2}));
    EXPECT_GE(t.used(), window);
    t.rest(3s);
    EXPECT_EQ(t.used(), 0u);
  }
  // An unanswered call keeps its reply buffer.
  ASSERT_EQ(t.begin(kLater), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  const std::span<std::byte> space = t.later[0].reserve_reply(kLong);
  ASSERT_EQ(space.size(), kLong);
  t.rest(3s);
  std::fill(space.begin(), space.end(), std::byte{3});
  EXPECT_EQ(t.later[0].commit_reply(kLong), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.ended.size() == 2 * window + 1; }));
  EXPECT_EQ(t.replies.back(), Bytes(kLong, std::byte{3}));
  t.client.expect_clean();
  t.server.expect_clean();
}

TEST(RpcIdleSessions, ACallThatTheClientHasGivenUpIsOver) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  Idle t;
  ASSERT_EQ(t.begin(kEcho), Status::ok);  // from now on it may send many at once
  ASSERT_TRUE(t.until([&] { return t.ended.size() == 1; }));
  for (int i = 0; i < 2; ++i) ASSERT_EQ(t.begin(kLater), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 2; }));
  const PendingCall call = t.later[0];
  EXPECT_EQ(call.reserve_reply(kLong).size(), kLong);
  EXPECT_EQ(t.session.cancel({t.session.last_call().value - 1}), Status::ok);
  t.rest(3s);
  EXPECT_NE(call.max_reply(), 0u) << "the client has another one under way, and says nothing";
  EXPECT_EQ(t.later[1].reply(Bytes()), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.ended.size() == 3; }));
  t.rest(3s);
  EXPECT_EQ(call.max_reply(), 0u);
  EXPECT_TRUE(call.reserve_reply(kLong).empty());
  EXPECT_EQ(call.commit_reply(kLong), Status::not_connected);
  EXPECT_EQ(call.reply(Bytes(5)), Status::not_connected);
  EXPECT_EQ(t.used(), 0u);
  for (int i = 0; i < 200; ++i) t.poll();
  EXPECT_EQ(t.stats(t.client).late_replies, 0u);
}

TEST(RpcIdleSessions, WhatComesLateRunsNothingAndTakesNothingAway) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  Idle t;
  const std::uint32_t window = t.ours().window;
  const std::uint32_t first = t.ours().slots[0].number;
  for (int i = 0; i < 3; ++i) {  // one after another: all in the first slot
    ASSERT_EQ(t.begin(kCopied), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.ended.size() == static_cast<std::size_t>(i) + 1; }));
  }
  t.rest(3s);
  const RpcStats before = t.stats(t.server);
  EXPECT_EQ(before.served, 3u);
  // A duplicate of the last request, whose reply is gone, and a cancelled one of another slot.
  t.arrives(RpcKind::request, first + 2 * window, kCopied);
  t.arrives(RpcKind::request, first + 1, kCopied);
  RpcStats after = t.stats(t.server);
  EXPECT_EQ(after.duplicates, before.duplicates + 2);
  EXPECT_EQ(after.served, before.served);
  EXPECT_EQ(after.retransmitted_replies, 0u);
  // A ping sent before a call arrives after it: the reply may be needed again.
  t.fill_window(kCopied);
  const std::uint64_t kept = t.used();
  EXPECT_GT(kept, 1u);
  t.arrives(RpcKind::ping, first + 3 * window);
  EXPECT_EQ(t.used(), kept);
  t.arrives(RpcKind::request, first + 3 * window + 1, kCopied);
  after = t.stats(t.server);
  EXPECT_EQ(after.served, 3u + window);
  EXPECT_EQ(after.retransmitted_replies, 1u);
  EXPECT_EQ(t.stats(t.client).late_replies, 1u);
  t.rest(3s);
  EXPECT_EQ(t.used(), 0u);
  t.fill_window(kEcho);
  t.client.expect_clean();
  t.server.expect_clean();
}

TEST(RpcIdleSessions, PlacesThatWereUsedVeryDifferentlyGoOn) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  // As after many calls with few in flight, which use the first slots.
  for (const std::uint32_t uses : {1u << 20, 1u << 30, 3u << 29, 1u << 31, 3u << 30, ~0u << 20}) {
    SCOPED_TRACE(uses);
    Idle t;
    t.fill_window(kEcho);
    for (std::uint32_t slot = 0; slot < t.ours().window; ++slot) {
      t.ours().slots[slot].number += slot * uses;
      t.theirs().slots[slot].number += slot * uses;
    }
    for (int i = 0; i < 3; ++i) {
      t.rest(3s);
      t.fill_window(kCopied);
    }
    EXPECT_EQ(t.stats(t.server).duplicates, 0u);
    t.client.expect_clean();
    t.server.expect_clean();
  }
}

TEST(RpcIdleSessions, AClockThatStepsBackAddsNoSilence) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  Idle t;
  auto& calls = *t.server.core->calls;
  ServerSession& s = t.theirs();
  const auto check_at = [&](std::uint64_t tick) {
    t.now = tick;
    calls.context.timers.cancel(s.timer);
    spinwire::rpc::on_server_timer(calls, s);
  };
  const std::uint64_t from = t.now + 5'000'000;
  check_at(from);
  ASSERT_EQ(s.liveness.silent_ticks, 0u);
  check_at(from + 1'000'000);
  EXPECT_EQ(s.liveness.silent_ticks, 1'000'000u);
  check_at(from);
  EXPECT_EQ(s.liveness.silent_ticks, 1'000'000u);
  check_at(from + 2'000'000);
  EXPECT_EQ(s.liveness.silent_ticks, 3'000'000u);
}

}  // namespace
}  // namespace rpc_idle_test
