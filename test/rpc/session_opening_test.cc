// Sessions that are closed while being opened leave nothing behind.
#include "base/internals.h"
#include "control/exchange.h"
#include "control/socket.h"
#include "engine/zero_cost.h"
#include "rpc/bare_engine.h"
#include "rpc/client_session.h"
#include "rpc/raw_datagrams.h"
#include "rpc/server_session.h"

namespace rpc_opening_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::control::Address;
using spinwire::control::Exchange;
using spinwire::control::ListenSocket;
using spinwire::control::Progress;
using spinwire::wire::FrameKind;
namespace rpc = spinwire::rpc;
namespace wire = spinwire::wire;

/// In ticks of a manual clock.
constexpr std::uint64_t kLongerThanAHandshake =
    spinwire::Nanoseconds(kHandshakeLimit + std::chrono::seconds(1)).count();

/// With a clock of the test, so that timeouts take no time.
struct Stepped : Calls {
  explicit Stepped(const Config& c = rpc_config()) : Calls(c, &now) {}
  template <typename Done>
  bool step_until(Done&& done, std::uint64_t step = 10'000) {
    return until([&] {
      now += step;
      return done();
    });
  }
  [[nodiscard]] std::uint32_t served() const { return server.engine.rpc_stats().served_sessions; }
  /// Opens a session and closes it once the server has it.
  void give_up_one() {
    const std::uint32_t before = served();
    Session s = client.engine.open_session(server.listener.address(), {}).value();
    // The client takes no step after the server has answered.
    ASSERT_TRUE(engine_test::until({&server}, [&] {
      now += 1000;
      if (served() == before) (void)client.poll();
      return served() != before;
    }));
    ASSERT_EQ(s.state(), SessionState::opening);
    EXPECT_EQ(s.close(), Status::ok);
  }

  inline static std::uint64_t now = 1'000'000'000;
};

TEST(RpcSessionOpening, APeerThatSaysNothingCostsNothingAfterTheTimeOut) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  Stepped t;
  const auto mute = ListenSocket::open(Address::parse("127.0.0.1:0").value(), 64);
  ASSERT_TRUE(mute) << mute.error().message();
  const std::string address(mute->local().text().view());
  const auto descriptors = engine_test::open_descriptors();
  const std::uint32_t most = rpc_config().connections.handshakes;
  std::uint32_t timed_out = 0;
  // Each timeout makes room for the next session, also inside its callback.
  struct Again {
    Stepped& t;
    const std::string& address;
    std::uint32_t& timed_out;
    std::uint32_t left;
    void open() {
      SessionOptions options;
      options.timeout = 10ms;
      options.on_closed = [this](Session, const Error& e) {
        EXPECT_EQ(e.status, Status::timed_out) << e.message();
        ++timed_out;
        if (left != 0) --left, open();
      };
      const auto made = t.client.engine.open_session(address, options);
      EXPECT_TRUE(made) << made.error().message();
    }
  } again{t, address, timed_out, 3 * most};
  for (std::uint32_t i = 0; i < most; ++i) again.open();
  EXPECT_FALSE(t.client.engine.open_session(address, {})) << "as many as may be under way";
  ASSERT_TRUE(t.step_until([&] { return timed_out == 4 * most; }, 1'000'000));
  EXPECT_EQ(engine_test::open_descriptors(), descriptors);
  const Session another = t.open();
  ASSERT_TRUE(t.step_until([&] { return another.ready(); }));
  EXPECT_EQ(Session(another).close(), Status::ok);
  ASSERT_TRUE(t.step_until([&] { return another.state() == SessionState::closed; }));
  t.finish();
}

TEST(RpcSessionOpening, ClosingOneThatIsBeingOpenedEndsItsExchange) {
  Calls t;
  const auto mute = ListenSocket::open(Address::parse("127.0.0.1:0").value(), 64);
  ASSERT_TRUE(mute) << mute.error().message();
  const std::string address(mute->local().text().view());
  const auto descriptors = engine_test::open_descriptors();
  for (std::uint32_t i = 0; i < 2 * rpc_config().connections.handshakes; ++i) {
    auto made = t.client.engine.open_session(address, {});
    ASSERT_TRUE(made) << i << ": " << made.error().message();
    EXPECT_EQ(made->close(), Status::ok);
  }
  EXPECT_EQ(engine_test::open_descriptors(), descriptors);
  t.finish();
}

TEST(RpcSessionOpening, AServerHearsThatAnOpeningWasGivenUp) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  Stepped t;
  const std::uint32_t most = rpc_config().rpc.sessions;
  for (std::uint32_t i = 0; i < 2 * most; ++i) {  // twice as many as it may serve
    t.give_up_one();
    ASSERT_TRUE(engine_test::until({&t.client, &t.server}, [&] { return t.served() == 1; })) << i;
  }
  EXPECT_EQ(t.client.engine.rpc_stats().sessions, 1u);
  EXPECT_EQ(t.call(kEcho, filled(9, 1)).bytes, filled(9, 1));
  t.finish();
}

/// A server, and a peer that sends the frames of an opening itself.
struct ByHand {
  ByHand() : server(rpc_config(), &now), client(rpc_config(), &now) {
    listener = server.core->listen("127.0.0.1:0", {}).value();
    EXPECT_TRUE(server.core->serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
  }
  [[nodiscard]] std::uint32_t served() const {
    return rpc::stats(*server.core->calls).served_sessions;
  }
  /// Polls without advancing the time.
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({}, [&] {
      (void)server.core->poll();
      (void)server.core->control_step(now);
      return done();
    });
  }
  void ask() {
    const auto expected = wire::kinds(FrameKind::session_opened, FrameKind::refuse);
    ASSERT_TRUE(stream.connect(Address::parse(listener.address()).value(), expected));
    ASSERT_EQ(stream.send(wire::encode(wire::OpenSession{datagrams.end(77)})), Status::ok);
  }
  /// The challenge, which arrives as a datagram. Advances the time.
  std::uint64_t challenge() {
    std::uint64_t token = 0;
    EXPECT_TRUE(until([&] {
      now += 10'000;
      (void)stream.advance();
      return (token = datagrams.challenge(77)) != 0;
    }));
    return token;
  }
  void open() {
    ask();
    ASSERT_EQ(stream.send(wire::encode(wire::PathResponse{challenge()})), Status::ok);
    Progress came = Progress::waiting;
    ASSERT_TRUE(until([&] { return (came = stream.advance()) != Progress::waiting; }));
    ASSERT_EQ(came, Progress::frame);
    const auto* opened = std::get_if<wire::SessionOpened>(&stream.received().body);
    ASSERT_NE(opened, nullptr);
    theirs = opened->end;
    EXPECT_EQ(served(), 1u);
  }
  void confirm(std::uint64_t incarnation) {
    ASSERT_EQ(stream.send(wire::encode(wire::Ready{incarnation})), Status::ok);
    EXPECT_EQ(stream.advance(), Progress::waiting);
  }

  /// The server closes the stream.
  void expect_stream_closed() {
    Progress came = Progress::waiting;
    EXPECT_TRUE(until([&] { return (came = stream.advance()) != Progress::waiting; }));
    EXPECT_EQ(came, Progress::closed);
  }
  /// The server keeps nothing of the session.
  void expect_forgotten() {
    EXPECT_TRUE(until([&] { return served() == 0; }));
    server.expect_clean();
  }

  std::uint64_t now = 1'000'000'000;
  Bare server, client;
  Listener listener;
  RawDatagrams datagrams{*client.core};
  Exchange stream;
  wire::SessionEnd theirs;
};

TEST(RpcSessionOpening, AnAddressThatWasNotShownToBeReachedIsToldNothing) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  ByHand t;
  t.ask();
  (void)t.challenge();
  EXPECT_EQ(t.served(), 1u);
  (void)t.challenge();  // it is repeated
  ASSERT_EQ(t.stream.send(wire::encode(wire::PathResponse{1})), Status::ok);
  t.now += kLongerThanAHandshake;
  t.expect_stream_closed();
  t.expect_forgotten();
}

TEST(RpcSessionOpening, AnEngineThatEndsTellsThoseWhoseAddressWasShownToBeReached) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  for (const bool shown : {true, false}) {
    ByHand t;
    if (shown) {
      t.open();
    } else {
      t.ask();
      (void)t.challenge();
    }
    ASSERT_EQ(t.served(), 1u);
    rpc::end(*t.server.core->calls, {});
    EXPECT_EQ(t.served(), 0u);
    int left = 50;
    EXPECT_EQ(t.until([&] { return t.datagrams.has(wire::RpcKind::closed, 77) || --left == 0; }) &&
                  left != 0,
              shown);
  }
}

TEST(RpcSessionOpening, AServerWithoutMemoryKeepsNothingOfASession) {
#if SPINWIRE_TEST_COUNTS_HEAP
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  ByHand t;
  rpc::Rpc& calls = *t.server.core->calls;
  const auto from = *Address::parse("10.0.0.1:5");
  auto end = t.datagrams.end(7);
  std::size_t failed = 0;
  for (std::uint32_t round = 0; round < 400; ++round) {
    ++end.incarnation;                            // another peer
    zero_cost_test::fail_every = 1 + round % 20;  // so each allocation is hit
    const auto made = calls.dialogues.accept({}, from, end, {});
    zero_cost_test::fail_every = 0;
    if (made) {
      calls.dialogues.on_unconfirmed(made->subject, made->opened_at);
    } else {
      ++failed;
      EXPECT_EQ(made.error().status, Status::no_memory);
    }
    ASSERT_EQ(calls.peer_addresses.size(), 0u) << round;
  }
  EXPECT_GT(failed, 20u);
  EXPECT_LT(failed, 400u);
  t.server.expect_clean();
#else
  GTEST_SKIP() << "a sanitizer's heap does not fail";
#endif
}

TEST(RpcSessionOpening, AClientThatEndsBeforeItConfirmsIsForgottenAtOnce) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  ByHand t;
  t.open();
  t.stream.reset();
  t.expect_forgotten();
}

TEST(RpcSessionOpening, AConfirmationForAnotherLifeOfTheServerIsNone) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  ByHand t;
  t.open();
  t.confirm(t.theirs.incarnation ^ 1);
  t.expect_forgotten();
}

TEST(RpcSessionOpening, WhatWasConfirmedOutlivesItsStream) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  ByHand t;
  t.open();
  t.confirm(t.theirs.incarnation);
  t.expect_stream_closed();
  t.stream.reset();
  int left = 50;
  EXPECT_TRUE(t.until([&] { return left-- == 0; }));
  EXPECT_EQ(t.served(), 1u);
  t.server.expect_clean();
}

TEST(RpcSessionOpening, AConfirmationThatNeverComesEndsTheSession) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  ByHand t;
  t.open();
  t.now += kLongerThanAHandshake;
  t.expect_stream_closed();
  t.expect_forgotten();
}

TEST(RpcSessionOpening, NamesThatComeAgainNameNothingOfBefore) {
  Bare server(rpc_config()), client(rpc_config());
  const auto listener = server.core->listen("127.0.0.1:0", {});
  ASSERT_TRUE(listener);
  std::vector<PendingCall> later;
  ASSERT_TRUE(server.core->serve(kLater, [&later](Request& r) { later.push_back(r.defer()); }));
  const auto until = [&](const auto& done) {
    return engine_test::until({}, [&] {
      (void)client.core->poll();
      (void)server.core->poll();
      return done();
    });
  };
  Session sessions[2];
  std::uint32_t served[2];
  std::vector<std::pair<Status, Bytes>> ended;
  for (int i = 0; i < 2; ++i) {
    sessions[i] = client.core->open_session(listener->address(), {}).value();
    ASSERT_TRUE(until([&] { return sessions[i].ready(); }));
    served[i] =
        rpc::find_client(*client.core->calls, spinwire::detail::Internals::name(sessions[i]))
            ->peer_session;
    ASSERT_EQ(sessions[i].call(
                  kLater, std::span<const std::byte>(),
                  [&ended](Reply& r) { ended.emplace_back(r.status(), bytes_of(r.bytes())); }),
              Status::ok);
    ASSERT_TRUE(until([&] { return later.size() == static_cast<std::size_t>(i) + 1; }));
    if (i == 1) break;
    EXPECT_EQ(sessions[i].close(), Status::ok);
    ASSERT_TRUE(until([&] {
      return rpc::stats(*server.core->calls).served_sessions == 0 &&
             rpc::stats(*client.core->calls).sessions == 0;
    }));
    const auto end = rpc::local_session_end(*client.core->calls, 5, 8, 0);
    const auto from = *spinwire::control::Address::parse("127.0.0.1:1");
    for (int k = 0; k < 2046; ++k) {
      rpc::PeerAddress* const route = rpc::acquire_peer_address(*server.core->calls, end).value();
      rpc::release_server_session(*server.core->calls,
                                  *rpc::accept_session(*server.core->calls, end, route, from),
                                  Status::ok);
    }
    for (int k = 0; k < 4094; ++k)
      rpc::end_session_in_order(*client.core->calls,
                                *rpc::make_client_session(*client.core->calls, 8));
  }
  ASSERT_EQ(served[0], served[1]);
  ASSERT_EQ(spinwire::detail::Internals::name(sessions[0]),
            spinwire::detail::Internals::name(sessions[1]));
  EXPECT_EQ(sessions[0].state(), SessionState::closed);
  EXPECT_EQ(sessions[0].close(), Status::not_connected);
  EXPECT_FALSE(sessions[0] == sessions[1]);
  EXPECT_EQ(later[0].max_reply(), 0u);
  EXPECT_EQ(later[0].reply(filled(9, 1)), Status::not_connected);
  EXPECT_EQ(later[1].reply(filled(9, 2)), Status::ok);
  ASSERT_TRUE(until([&] { return ended.size() == 2; }));
  EXPECT_EQ(ended[0].first, Status::flushed);
  EXPECT_EQ(ended[1].second, filled(9, 2));
  server.expect_clean();
  client.expect_clean();
}

}  // namespace
}  // namespace rpc_opening_test
