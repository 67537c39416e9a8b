// Sessions that are opened again: after a server that died, was restarted, closed the session or
// has forgotten it. What becomes of their calls meanwhile.
#include "rpc/reconnecting_session.h"

namespace rpc_session_reconnect_test {
namespace {

TEST_F(RpcSessionReconnect, ARestartedServerIsFoundAgainUnderTheSameHandle) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(options()));
  const Session before = session_;
  for (std::uint32_t round = 1; round <= 3; ++round) {
    EXPECT_EQ(begin(kCount, filled(30, round)), Status::ok);
    ASSERT_TRUE(until([&] { return all_ended(); }));
    EXPECT_EQ(ended_.back().bytes, filled(30, round));
    ASSERT_NO_FATAL_FAILURE(interrupt());
    start(address_);
    ASSERT_TRUE(until([&] { return session_.ready(); }, kMillisecond));
    EXPECT_EQ(ready_, static_cast<int>(round) + 1);
  }
  EXPECT_EQ(session_, before);
  EXPECT_EQ(session_.peer(), address_);
  EXPECT_EQ(interrupted_.size(), 3u);
  EXPECT_TRUE(closed_.empty());
  finish();
}

TEST_F(RpcSessionReconnect, ADeadServersSessionLeavesReadyWithinAKeepalive) {
  if (by_work_requests()) GTEST_SKIP() << "only direct datagrams know the peer's process";
  start();
  ASSERT_NO_FATAL_FAILURE(open(options()));
  const std::uint64_t from = now_;
  ASSERT_NO_FATAL_FAILURE(interrupt());
  EXPECT_LE(now_ - from, 110 * kMillisecond);  // connections.peer_timeout is 10 s
  // With a call under way, a retransmission finds out.
  start(address_);
  ASSERT_TRUE(until([&] { return session_.ready(); }, kMillisecond));
  server_->silence();
  EXPECT_EQ(begin(kCount, filled(9, 1)), Status::ok);
  server_.reset();
  const std::uint64_t again = now_;
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  EXPECT_EQ(ended_[0].status, Status::peer_lost);
  EXPECT_LE(now_ - again, 30 * kMillisecond);
  runs_.clear();
  finish();
}

TEST_F(RpcSessionReconnect, CallsThatMayHaveBeenSentEndAndAreNeverSentAgain) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(WhenNotReady::wait));
  for (std::uint32_t i = 0; i < 12; ++i)
    ASSERT_EQ(begin(kLater, filled(20, i)), Status::ok);  // a window of 8, and 4 wait
  ASSERT_TRUE(until([&] { return server_->later.size() == 8; }));
  ASSERT_NO_FATAL_FAILURE(interrupt());
  for (std::uint32_t i = 0; i < 12; ++i) {
    EXPECT_EQ(ended_[i].times, i < 8 ? 1 : 0) << i;
    if (i < 8) {
      EXPECT_EQ(ended_[i].status, Status::peer_lost);
    }
  }
  start(address_);
  ASSERT_TRUE(until([&] { return answer_all(), all_ended(); }, kMillisecond));
  for (std::uint32_t i = 8; i < 12; ++i) EXPECT_EQ(ended_[i].status, Status::ok);
  EXPECT_EQ(runs_.size(), 12u);
  finish();  // each ran once
}

TEST_F(RpcSessionReconnect, CallsThatWaitAreSentInTheirOrder) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(options()));
  ASSERT_NO_FATAL_FAILURE(interrupt());
  std::uint64_t ready_at = 0;
  on_ready = [&](Session) {
    ready_at = now_;
    EXPECT_EQ(begin(kCount, filled(20, 99)), Status::ok);
  };
  std::vector<Bytes> expected;
  for (std::uint32_t i = 0; i < 14; ++i) {
    // Short ones, and ones that need a block.
    expected.push_back(filled(i % 2 == 0 ? 20 : 200, i));
    ASSERT_EQ(begin(kCount, expected.back(), waiting()), Status::ok);
  }
  expected.push_back(filled(20, 99));
  start(address_);
  ASSERT_TRUE(until([&] { return session_.ready() && all_ended(); }, kMillisecond));
  for (const Ended& e : ended_) EXPECT_EQ(e.status, Status::ok);
  EXPECT_EQ(server_->order, expected);
  EXPECT_LE(now_ - ready_at, 20 * kMillisecond);  // without waiting for a timer
  finish();
}

TEST_F(RpcSessionReconnect, CallsWaitForTheFirstOpeningToo) {
  start();
  session_ = client_->core->open_session(address_, options()).value();
  ASSERT_EQ(begin(kCount, filled(20, 1), waiting()), Status::ok);
  ASSERT_EQ(begin(kCount, filled(2000, 2), waiting()), Status::ok);
  ASSERT_EQ(begin(kCount, filled(60'000, 3), waiting()), Status::ok);  // a long one
  EXPECT_EQ(begin(kCount, filled(20, 4)), Status::not_connected);
  ASSERT_TRUE(until([&] { return all_ended(); }));
  for (const Ended& e : ended_) EXPECT_EQ(e.status, Status::ok);
  EXPECT_EQ(runs_.size(), 3u);
  finish();
}

TEST_F(RpcSessionReconnect, CallsThatMayNotWaitAreRefusedAtOnce) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(WhenNotReady::fail));
  for (std::uint32_t i = 0; i < 10; ++i) ASSERT_EQ(begin(kLater, filled(20, i)), Status::ok);
  ASSERT_TRUE(until([&] { return server_->later.size() == 8; }));
  ASSERT_NO_FATAL_FAILURE(interrupt());
  ASSERT_TRUE(all_ended());
  // Those that were never sent are told apart.
  for (std::uint32_t i = 0; i < 10; ++i)
    EXPECT_EQ(ended_[i].status, i < 8 ? Status::peer_lost : Status::not_connected) << i;
  EXPECT_EQ(begin(kCount, filled(20, 1)), Status::not_connected);
  EXPECT_EQ(begin(kCount, filled(60'000, 1)), Status::not_connected);
  EXPECT_TRUE(is_retryable(Status::not_connected));
  CallOptions wait = waiting();
  EXPECT_EQ(begin(kCount, filled(20, 20), wait), Status::ok);
  start(address_);
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  EXPECT_EQ(ended_.back().status, Status::ok);
  finish();
}

TEST_F(RpcSessionReconnect, WaitingCallsAreBoundedTimedAndCancelled) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(WhenNotReady::wait));
  ASSERT_NO_FATAL_FAILURE(interrupt());
  CallOptions brief;
  brief.timeout = 50ms;
  CallId cancelled;
  ASSERT_EQ(begin(kCount, filled(20, 0), brief), Status::ok);
  ASSERT_EQ(begin(kCount, filled(20, 1), {}, &cancelled), Status::ok);
  ASSERT_EQ(begin(kCount, filled(60'000, 2), brief), Status::ok);
  for (std::uint32_t i = 3; i < 16; ++i) ASSERT_EQ(begin(kCount, filled(20, i)), Status::ok);
  EXPECT_EQ(begin(kCount, filled(20, 17)), Status::would_block);
  EXPECT_EQ(begin(kCount, filled(60'000, 17)), Status::would_block);
  EXPECT_EQ(session_.cancel(cancelled), Status::ok);
  EXPECT_EQ(ended_[1].times, 0);
  turn(10'000);
  EXPECT_EQ(ended_[1].status, Status::cancelled);
  const std::uint64_t from = now_;
  ASSERT_TRUE(until([&] { return ended_[0].times + ended_[2].times == 2; }, kMillisecond));
  EXPECT_EQ(ended_[0].status, Status::timed_out);
  EXPECT_EQ(ended_[2].status, Status::timed_out);
  EXPECT_GE(now_ - from, 40 * kMillisecond);
  EXPECT_LE(now_ - from, 60 * kMillisecond);
  EXPECT_FALSE(session_.ready());
  EXPECT_EQ(session_.close(), Status::ok);
  ASSERT_TRUE(until([&] { return closed_.size() == 1; }));
  EXPECT_TRUE(all_ended());
  for (std::uint32_t i = 3; i < 16; ++i) EXPECT_EQ(ended_[i].status, Status::flushed);
  EXPECT_EQ(closed_[0].status, Status::ok);
  EXPECT_TRUE(runs_.empty());
  client_->expect_clean();
}

TEST_F(RpcSessionReconnect, AfterTheLastAttemptTheFirstReasonIsTold) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(WhenNotReady::wait, {3, 10ms, 20ms}));
  ASSERT_NO_FATAL_FAILURE(interrupt());
  ASSERT_EQ(begin(kCount, filled(20, 0)), Status::ok);
  ASSERT_EQ(begin(kCount, filled(60'000, 1)), Status::ok);
  ASSERT_TRUE(until([&] { return closed_.size() == 1; }, kMillisecond));
  EXPECT_EQ(closed_[0].status, Status::peer_lost);
  EXPECT_NE(closed_[0].found.find("3 attempts to reconnect failed"), std::string::npos)
      << closed_[0].message();
  ASSERT_TRUE(all_ended());
  EXPECT_EQ(ended_[0].status, Status::not_connected);
  EXPECT_EQ(ended_[1].status, Status::not_connected);
  EXPECT_EQ(session_.state(), SessionState::closed);
  client_->expect_clean();
}

TEST_F(RpcSessionReconnect, PausesDouble) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(options({5, 100ms, 400ms})));
  ASSERT_NO_FATAL_FAILURE(interrupt());
  const spinwire::rpc::ClientSession& c = record();
  for (const std::uint64_t longest : {100u, 200u, 400u, 400u, 400u}) {
    ASSERT_TRUE(c.reconnect->backing_off);
    const std::uint64_t pause = c.deadline - now_;
    EXPECT_LE(pause, longest * kMillisecond);
    EXPECT_GE(pause + 2 * kMillisecond, longest * kMillisecond / 2);
    const std::uint64_t before = c.deadline;
    ASSERT_TRUE(until([&] { return !closed_.empty() || c.deadline != before; }, kMillisecond));
    // The attempt fails by itself, which takes real time but not the engine's.
    ASSERT_TRUE(until([&] { return !closed_.empty() || c.reconnect->backing_off; }));
  }
  EXPECT_EQ(closed_.size(), 1u);
}

TEST_F(RpcSessionReconnect, AServerThatClosesItIsCalledAgain) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(options()));
  ASSERT_EQ(begin(kLater, filled(20, 0)), Status::ok);
  ASSERT_TRUE(until([&] { return server_->later.size() == 1; }));
  server_->engine.core->end();
  server_.reset();
  ASSERT_TRUE(until([&] { return interrupted_.size() == 1; }));
  EXPECT_EQ(interrupted_[0].status, Status::flushed) << interrupted_[0].message();
  EXPECT_EQ(ended_[0].status, Status::flushed);
  start(address_);
  ASSERT_TRUE(until([&] { return session_.ready(); }, kMillisecond));
  finish();
}

TEST_F(RpcSessionReconnect, ACallEndsOnceWhileItsReplyIsBeingPlaced) {
  constexpr std::size_t kLong = 300'000;
  start();
  ASSERT_NO_FATAL_FAILURE(open(WhenNotReady::wait));
  if (client_->core->context.direct == nullptr) GTEST_SKIP() << "replies are written";
  auto* const block = client_->core->context.arena->allocate(spinwire::memory::PoolId::send, kLong);
  const Buffer memory = spinwire::detail::make<Buffer>(block, kLong);
  std::fill_n(memory.data(), kLong, std::byte{0xee});
  CallOptions into;
  into.reply_into = memory.slice();
  ASSERT_EQ(begin(kLater, filled(20, 0), into), Status::ok);
  ASSERT_TRUE(until([&] { return server_->later.size() == 1; }));
  spinwire::softverbs::FaultPlan plan;
  plan.delay_min = plan.delay_max = 20ms;
  client_->set(plan);
  EXPECT_EQ(server_->later[0].reply(Bytes(kLong, std::byte{0x33})), Status::ok);
  server_->later.clear();
  ASSERT_TRUE(until([&] { return memory.data()[0] == std::byte{0x33}; }, kMillisecond / 10));
  EXPECT_EQ(memory.data()[kLong - 1], std::byte{0xee}) << "the last part is on its way";
  EXPECT_EQ(ended_[0].times, 0);
  ASSERT_NO_FATAL_FAILURE(interrupt());
  EXPECT_EQ(ended_[0].times, 1);
  EXPECT_EQ(ended_[0].status, Status::peer_lost);
  client_->expect_clean();
  std::fill_n(memory.data(), kLong, std::byte{0x11});
  client_->set({});
  start(address_);
  ASSERT_TRUE(until([&] { return session_.ready(); }, kMillisecond));
  EXPECT_EQ(memory.data()[0], std::byte{0x11});
  EXPECT_EQ(memory.data()[kLong - 1], std::byte{0x11});
  ASSERT_EQ(begin(kLater, filled(20, 1), into), Status::ok);
  ASSERT_TRUE(until([&] { return server_->later.size() == 1; }));
  EXPECT_EQ(server_->later[0].reply(Bytes(kLong, std::byte{0x44})), Status::ok);
  ASSERT_TRUE(until([&] { return ended_[1].times == 1; }));
  EXPECT_EQ(ended_[1].bytes, Bytes(kLong, std::byte{0x44}));
  into = {};
  finish();
}

TEST_F(RpcSessionReconnect, AForgottenSessionIsOpenedAgain) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(WhenNotReady::wait));
  ASSERT_EQ(begin(kCount, filled(20, 0)), Status::ok);
  ASSERT_TRUE(until([&] { return all_ended(); }));
  for (int i = 0; i < 11'000; ++i) {  // while the client is stopped
    now_ += kMillisecond;
    (void)server_->engine.core->poll();
  }
  ASSERT_EQ(begin(kCount, filled(20, 1)), Status::ok);
  ASSERT_TRUE(until([&] { return interrupted_.size() == 1 && session_.ready(); }, kMillisecond));
  EXPECT_EQ(ended_[1].status, Status::peer_lost);
  ASSERT_EQ(begin(kCount, filled(20, 2)), Status::ok);
  ASSERT_TRUE(until([&] { return all_ended(); }));
  EXPECT_EQ(ended_[2].status, Status::ok);
  finish();
}

TEST_F(RpcSessionReconnect, AFinalRefusalEndsIt) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(options()));
  ASSERT_NO_FATAL_FAILURE(interrupt());
  Bare other(reconnect_config(), &now_);  // serves nothing
  const Listener listener = other.core->listen(address_, {}).value();
  ASSERT_TRUE(until(
      [&] {
        (void)other.core->poll();
        return !closed_.empty();
      },
      kMillisecond));
  EXPECT_EQ(closed_[0].status, Status::unsupported);
  EXPECT_NE(closed_[0].found.find("no method is served"), std::string::npos)
      << closed_[0].message();
  EXPECT_NE(closed_[0].found.find("before that: "), std::string::npos) << closed_[0].message();
}

TEST_F(RpcSessionReconnect, CallbacksMayCloseIt) {
  start();
  for (const bool by_call : {false, true}) {
    if (server_ == nullptr) start(address_);
    on_interrupted = nullptr;
    ASSERT_NO_FATAL_FAILURE(open(WhenNotReady::wait));
    if (by_call) {
      ASSERT_EQ(session_.call(kLater, std::span<const std::byte>(),
                              [this](Reply&) { EXPECT_EQ(session_.close(), Status::ok); }),
                Status::ok);
      ASSERT_EQ(begin(kLater, filled(20, 5)), Status::ok);
      ASSERT_TRUE(until([&] { return server_->later.size() == 2; }));
    } else {
      on_interrupted = [](Session s) { EXPECT_EQ(s.close(), Status::ok); };
    }
    closed_.clear();
    kill();
    ASSERT_TRUE(until([&] { return closed_.size() == 1; }, kMillisecond));
    EXPECT_EQ(closed_[0].status, Status::ok);
    EXPECT_EQ(session_.state(), SessionState::closed);
    client_->expect_clean();
  }
  EXPECT_EQ(ended_[0].status, Status::flushed);
}

TEST_F(RpcSessionReconnect, AnEngineGoesWhileASessionWaits) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(WhenNotReady::wait));
  ASSERT_NO_FATAL_FAILURE(interrupt());
  ASSERT_EQ(begin(kCount, filled(20, 0)), Status::ok);
  client_->core->end();
  client_.reset();
  ASSERT_EQ(closed_.size(), 1u);
  EXPECT_EQ(closed_[0].status, Status::ok);
  EXPECT_EQ(ended_[0].status, Status::flushed);
}

TEST_F(RpcSessionReconnect, LongCallsWaitAndTheirMemoryIsTheirs) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(WhenNotReady::wait));
  ASSERT_EQ(begin(kCount, filled(60'000, 1)), Status::ok);
  ASSERT_TRUE(until([&] { return all_ended(); }));
  ASSERT_EQ(begin(kLater, filled(60'000, 2)), Status::ok);
  ASSERT_TRUE(until([&] { return server_->later.size() == 1; }));
  ASSERT_NO_FATAL_FAILURE(interrupt());
  ASSERT_EQ(begin(kCount, filled(60'000, 3)), Status::ok);
  start(address_);
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  EXPECT_EQ(ended_[0].status, Status::ok);
  EXPECT_EQ(ended_[1].status, Status::peer_lost);
  EXPECT_EQ(ended_[2].status, Status::ok);
  EXPECT_EQ(ended_[2].bytes.size(), 2000u);
  finish();
}

TEST_F(RpcSessionReconnect, OverConnectionsAlone) {
  const Config config = over(RpcTransport::connection, reconnect_config());
  client_ = std::make_unique<Bare>(config, &now_);
  start("127.0.0.1:0", config);
  ASSERT_NO_FATAL_FAILURE(open(WhenNotReady::wait));
  for (std::uint32_t i = 0; i < 10; ++i) ASSERT_EQ(begin(kLater, filled(20, i)), Status::ok);
  ASSERT_TRUE(until([&] { return server_->later.size() == 8; }));
  ASSERT_NO_FATAL_FAILURE(interrupt());
  ASSERT_EQ(begin(kLater, filled(20, 10)), Status::ok);
  start(address_, config);
  ASSERT_TRUE(until([&] { return answer_all(), all_ended(); }, kMillisecond));
  for (std::uint32_t i = 0; i < 11; ++i)
    EXPECT_EQ(ended_[i].status, i < 8 ? Status::peer_lost : Status::ok) << i;
  // The server ends in order.
  server_->engine.core->end();
  server_.reset();
  ASSERT_TRUE(until([&] { return interrupted_.size() == 2; }, kMillisecond));
  EXPECT_EQ(interrupted_[1].status, Status::flushed);
  start(address_, config);
  ASSERT_TRUE(until([&] { return session_.ready(); }, kMillisecond));
  finish();
}

TEST_F(RpcSessionReconnect, TheNextServerMayUseAnotherTransport) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(WhenNotReady::wait));
  ASSERT_NO_FATAL_FAILURE(interrupt());
  for (std::uint32_t i = 0; i < 10; ++i)
    ASSERT_EQ(begin(kCount, filled(i % 2 == 0 ? 20 : 2000, i)), Status::ok);
  start(address_, over(RpcTransport::connection, reconnect_config()));
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  for (const Ended& e : ended_) EXPECT_EQ(e.status, Status::ok);
  ASSERT_NO_FATAL_FAILURE(interrupt());
  for (std::uint32_t i = 10; i < 20; ++i)
    ASSERT_EQ(begin(kCount, filled(i % 2 == 0 ? 20 : 2000, i)), Status::ok);
  start(address_);
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  for (const Ended& e : ended_) EXPECT_EQ(e.status, Status::ok);
  EXPECT_EQ(runs_.size(), 20u);
  finish();
}

/// Inline calls that have waited for the connection of a server without datagrams need none at the
/// next server, which has no listener any more.
TEST_F(RpcSessionReconnect, WaitingCallsDoNotKeepTheTransportOfTheFormerServer) {
  start("127.0.0.1:0", over(RpcTransport::connection, reconnect_config()));
  ASSERT_NO_FATAL_FAILURE(open(WhenNotReady::wait));
  for (std::uint32_t i = 0; i < 8; ++i) ASSERT_EQ(begin(kLater, filled(20, i)), Status::ok);
  ASSERT_TRUE(until([&] { return server_->later.size() == 8; }));
  const auto size = [](std::uint32_t i) -> std::size_t { return i % 2 == 0 ? 20 : 2000; };
  for (std::uint32_t i = 8; i < 13; ++i) ASSERT_EQ(begin(kCount, filled(size(i), i)), Status::ok);
  CallId cancelled;
  ASSERT_EQ(begin(kCount, filled(20, 13), {}, &cancelled), Status::ok);
  const std::uint64_t sent = spinwire::rpc::stats(*client_->core->calls).long_calls;
  ASSERT_NO_FATAL_FAILURE(interrupt());
  for (std::uint32_t i = 14; i < 20; ++i) ASSERT_EQ(begin(kCount, filled(size(i), i)), Status::ok);
  ASSERT_EQ(session_.cancel(cancelled), Status::ok);
  on_ready = [this](Session) { server_->listener = Listener(); };
  start(address_);
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  std::vector<Bytes> order;
  for (std::uint32_t i = 8; i < 20; ++i) {
    EXPECT_EQ(ended_[i].status, i == 13 ? Status::cancelled : Status::ok) << i;
    if (i != 13) order.push_back(filled(size(i), i));
  }
  EXPECT_EQ(server_->order, order);
  EXPECT_EQ(spinwire::rpc::stats(*client_->core->calls).long_calls, sent);
  EXPECT_EQ(client_->core->context.agents.size(), 0u);
  finish();
}

TEST_F(RpcSessionReconnect, AlternativesAreTriedInTurn) {
  start();
  const std::string first = address_;
  second_ = std::make_unique<Server>("127.0.0.1:0", runs_, &now_);
  const std::string second = second_->listener.address();
  SessionOptions how = options();
  how.alternatives = {second};
  ASSERT_NO_FATAL_FAILURE(open(how));
  EXPECT_EQ(session_.peer(), first);
  for (int round = 0; round < 2; ++round) {
    ASSERT_NO_FATAL_FAILURE(interrupt());
    ASSERT_TRUE(until([&] { return session_.ready(); }, kMillisecond));
    EXPECT_EQ(session_.peer(), second);
    start(first);
    second_->silence();
    second_.reset();
    ASSERT_TRUE(until([&] { return !session_.ready(); }, kMillisecond));
    ASSERT_TRUE(until([&] { return session_.ready(); }, kMillisecond));
    EXPECT_EQ(session_.peer(), first);
    second_ = std::make_unique<Server>(second, runs_, &now_);
  }
  EXPECT_EQ(interrupted_.size(), 4u);
  finish();
}

TEST_F(RpcSessionReconnect, WithoutReconnectingAlternativesServeTheFirstOpening) {
  second_ = std::make_unique<Server>("127.0.0.1:0", runs_, &now_);
  start();
  const std::string deserted = address_;
  server_.reset();
  SessionOptions how = options({});
  how.alternatives = {deserted, second_->listener.address()};
  ASSERT_NO_FATAL_FAILURE(open(how));
  EXPECT_EQ(session_.peer(), second_->listener.address());
  second_->silence();
  second_.reset();
  ASSERT_TRUE(until([&] { return !closed_.empty(); }, kMillisecond));
  EXPECT_EQ(closed_[0].status, Status::peer_lost);
  EXPECT_TRUE(interrupted_.empty());
}

TEST_F(RpcSessionReconnect, OptionsAreChecked) {
  for (const Reconnect& wrong :
       {Reconnect{1, 0ns, 1s}, Reconnect{1, 2s, 1s}, Reconnect{1, 1s, 2h}}) {
    const auto made = client_->core->open_session("127.0.0.1:1", options(wrong));
    ASSERT_FALSE(made);
    EXPECT_EQ(made.error().status, Status::invalid_argument);
  }
  SessionOptions how = options();
  how.alternatives = {"somewhere"};
  const auto made = client_->core->open_session("127.0.0.1:1", how);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().status, Status::invalid_argument);
}

/// A long call finds that nobody listens. The session asks once, and not with each call.
TEST_F(RpcSessionReconnect, LongCallsToADeadServerDoNotFailInARow) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(options({})));
  server_->silence();
  // The device must not know: another engine has the process.
  server_->listener = Listener();
  std::uint32_t accepted = 0;
  const std::uint64_t from = now_;
  while (closed_.empty() && now_ - from < 20'000 * kMillisecond) {
    accepted += begin(kCount, filled(60'000, accepted)) == Status::ok ? 1 : 0;
    now_ += kMillisecond;
    (void)client_->core->poll();
  }
  ASSERT_EQ(closed_.size(), 1u);
  EXPECT_EQ(closed_[0].status, Status::peer_lost) << closed_[0].message();
  EXPECT_LE(now_ - from, 500 * kMillisecond);  // connections.peer_timeout is 10 s
  EXPECT_LE(accepted, 17u);
  ASSERT_TRUE(all_ended());
}

/// A server that listens no more, but answers datagrams, keeps its sessions.
TEST_F(RpcSessionReconnect, AServerWithoutAListenerIsNotLost) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(options()));
  server_->listener = Listener();
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(begin(kCount, filled(60'000, 1)), Status::ok);
    ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
    EXPECT_EQ(ended_.back().status, Status::not_connected);
    ASSERT_EQ(begin(kCount, filled(20, static_cast<std::uint32_t>(i) + 2)), Status::ok);
    ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
    EXPECT_EQ(ended_.back().status, Status::ok);
  }
  EXPECT_TRUE(session_.ready());
  EXPECT_TRUE(interrupted_.empty());
  finish();
}

}  // namespace
}  // namespace rpc_session_reconnect_test
