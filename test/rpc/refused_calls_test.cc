// Calls that a server has refused because it ends the session: they have not run, and wait for the
// next server.
#include "rpc/refused_calls.h"

#include "base/internals.h"
#include "rpc/leaving_server.h"

namespace rpc_session_reconnect_test {
namespace {

namespace rpc = spinwire::rpc;
using spinwire::SessionBlocker;

class RpcRefusedCalls : public RpcLeavingServer {
 protected:
  /// Serves a session, over a connection if it needs one for long calls.
  void begin_session(WhenNotReady meanwhile) {
    serve_at("127.0.0.1:0");
    ASSERT_NO_FATAL_FAILURE(open(meanwhile));
    ASSERT_EQ(begin(kCount, filled(60'000, 999)), Status::ok);
    ASSERT_TRUE(until([&] { return all_ended(); }));
    ASSERT_EQ(ended_[0].status, Status::ok);
    ended_.clear();
    runs_.clear();
    server_->order.clear();
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, RpcRefusedCalls,
                         testing::Values(RpcTransport::automatic, RpcTransport::connection),
                         name_of_transport);

TEST_P(RpcRefusedCalls, GoToTheNextServerInTheirOrderAndNotTooEarly) {
  ASSERT_NO_FATAL_FAILURE(begin_session(WhenNotReady::wait));
  ASSERT_NO_FATAL_FAILURE(begin_drain());
  // Stored in the slot, and copied.
  std::vector<Bytes> made = {filled(20, 2), filled(48, 3), filled(2000, 4), filled(20, 5)};
  for (const Bytes& bytes : made) ASSERT_EQ(begin(kCount, bytes), Status::ok);
  ASSERT_EQ(begin(kCount, filled(60'000, 6)), Status::ok);
  turns(30);
  EXPECT_EQ(session_.snapshot().backlog, 5u);
  EXPECT_EQ(session_.snapshot().blocked_by, SessionBlocker::not_ready);
  EXPECT_EQ(session_.state(), SessionState::opening);
  ASSERT_EQ(begin(kCount, filled(20, 7)), Status::ok);  // waits behind them
  made.push_back(filled(20, 7));
  for (const Ended& e : ended_) EXPECT_EQ(e.times, 0) << to_string(e.status);
  EXPECT_TRUE(server_->order.empty()) << "it takes no calls";
  client_->expect_clean();
  ASSERT_NO_FATAL_FAILURE(replace_server());
  ASSERT_TRUE(until([&] { return session_.ready(); }, kMillisecond));
  EXPECT_GE(now_ - interrupted_at_, 300 * kMillisecond);
  ASSERT_TRUE(until([&] { return all_ended(); }));
  for (const Ended& e : ended_) EXPECT_EQ(e.status, Status::ok) << to_string(e.status);
  std::erase(server_->order, filled(60'000, 6));  // long calls are not ordered with others
  EXPECT_EQ(server_->order, made);
  EXPECT_EQ(interrupted_.size(), 1u);
  finish();
}

/// The library reads the application's memory again: it makes no copy.
TEST_P(RpcRefusedCalls, KeepTheirBuffersAndTheMemoryOfTheirReplies) {
  ASSERT_NO_FATAL_FAILURE(begin_session(WhenNotReady::wait));
  ASSERT_NO_FATAL_FAILURE(begin_drain());
  std::vector<Status> statuses;
  Bytes written;
  const Buffer request = buffer(30'000);
  const Buffer reply = buffer(4000);
  const Bytes bytes = filled(30'000, 3);
  std::copy(bytes.begin(), bytes.end(), request.data());
  CallOptions into;
  into.reply_into = reply.slice();
  for (const std::size_t size : {1000u, 30'000u}) {
    const auto done = [&statuses](Reply& r) { statuses.push_back(r.status()); };
    ASSERT_EQ(session_.call(kCount, request.slice(0, size), done, {}), Status::ok);
  }
  const auto done = [&](Reply& r) {
    statuses.push_back(r.status());
    written = bytes_of(r.bytes());
  };
  ASSERT_EQ(session_.call(kCount, request.slice(0, 1500), done, into), Status::ok);
  turns(30);
  EXPECT_TRUE(statuses.empty());
  EXPECT_FALSE(request.unique()) << "the library holds it";
  ASSERT_NO_FATAL_FAILURE(replace_server());
  ASSERT_TRUE(until([&] { return statuses.size() == 3; }, kMillisecond));
  EXPECT_EQ(statuses, std::vector<Status>(3, Status::ok));
  EXPECT_EQ(written, Bytes(bytes.begin(), bytes.begin() + 1500));
  EXPECT_EQ(runs_.count(Bytes(bytes.begin(), bytes.begin() + 1000)), 1u);
  EXPECT_EQ(runs_.count(bytes), 1u);
  finish();
  EXPECT_TRUE(request.unique());
}

TEST_P(RpcRefusedCalls, GoToAnotherAddressAtOnce) {
  ASSERT_NO_FATAL_FAILURE(serve_at("127.0.0.1:0"));
  second_ = std::make_unique<Server>("127.0.0.1:0", runs_, &now_, server_config());
  SessionOptions how = options();
  how.when_not_ready = WhenNotReady::wait;
  how.alternatives = {second_->listener.address()};
  ASSERT_NO_FATAL_FAILURE(open(how));
  ASSERT_NO_FATAL_FAILURE(begin_drain());
  ASSERT_EQ(begin(kCount, filled(20, 2)), Status::ok);
  turns(30);
  answer_all();
  const std::uint64_t from = now_;
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond / 10));
  EXPECT_LT(now_ - from, 200 * kMillisecond) << "the first server asked for more time";
  EXPECT_EQ(ended_[1].status, Status::ok);
  EXPECT_EQ(second_->order.size(), 1u);
  EXPECT_EQ(session_.peer(), second_->listener.address());
  finish();
}

TEST_P(RpcRefusedCalls, EndWhenTheirTimeIsOver) {
  ASSERT_NO_FATAL_FAILURE(begin_session(WhenNotReady::wait));
  ASSERT_NO_FATAL_FAILURE(begin_drain());
  CallOptions brief;
  brief.timeout = 50ms;
  const std::uint64_t from = now_;
  ASSERT_EQ(begin(kCount, filled(20, 2), brief), Status::ok);
  ASSERT_EQ(begin(kCount, filled(60'000, 3), brief), Status::ok);
  ASSERT_EQ(begin(kCount, filled(20, 4)), Status::ok);
  turns(30);
  ASSERT_EQ(session_.snapshot().backlog, 3u);
  ASSERT_TRUE(until([&] { return ended_[1].times + ended_[2].times == 2; }, kMillisecond));
  EXPECT_EQ(ended_[1].status, Status::timed_out);
  EXPECT_EQ(ended_[2].status, Status::timed_out);
  EXPECT_GE(now_ - from, 50 * kMillisecond);
  EXPECT_LE(now_ - from, 70 * kMillisecond);
  EXPECT_TRUE(interrupted_.empty()) << "a call is in progress";
  ASSERT_NO_FATAL_FAILURE(replace_server());
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  EXPECT_EQ(ended_[3].status, Status::ok);
  EXPECT_EQ(runs_.size(), 2u);
  finish();
}

TEST_P(RpcRefusedCalls, CanBeCancelled) {
  ASSERT_NO_FATAL_FAILURE(begin_session(WhenNotReady::wait));
  ASSERT_NO_FATAL_FAILURE(begin_drain());
  CallId first, second;
  ASSERT_EQ(begin(kCount, filled(20, 2), {}, &first), Status::ok);
  ASSERT_EQ(begin(kCount, filled(60'000, 3), {}, &second), Status::ok);
  ASSERT_EQ(begin(kCount, filled(20, 4)), Status::ok);
  turns(30);
  ASSERT_EQ(session_.snapshot().backlog, 3u);
  EXPECT_EQ(session_.cancel(first), Status::ok);
  EXPECT_EQ(session_.cancel(second), Status::ok);
  EXPECT_EQ(session_.cancel(second), Status::invalid_argument);
  EXPECT_EQ(ended_[1].times + ended_[2].times, 0);
  turn(0);
  EXPECT_EQ(ended_[1].status, Status::cancelled);
  EXPECT_EQ(ended_[2].status, Status::cancelled);
  ASSERT_NO_FATAL_FAILURE(replace_server());
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  EXPECT_EQ(ended_[3].status, Status::ok);
  EXPECT_EQ(runs_.size(), 2u);
  finish();
}

TEST_P(RpcRefusedCalls, WaitOnlyIfTheyMay) {
  for (const WhenNotReady usual : {WhenNotReady::wait, WhenNotReady::fail}) {
    ASSERT_NO_FATAL_FAILURE(begin_session(usual));
    interrupted_.clear();
    ASSERT_NO_FATAL_FAILURE(begin_drain());
    std::vector<Status> expected = {Status::ok};
    const auto add = [&](std::optional<WhenNotReady> asked, std::size_t size) {
      CallOptions how;
      how.when_not_ready = asked;
      ASSERT_EQ(begin(kCount, filled(size, static_cast<std::uint32_t>(ended_.size() + 1)), how),
                Status::ok);
      const bool waits = asked.value_or(usual) == WhenNotReady::wait;
      expected.push_back(waits ? Status::ok : Status::not_connected);
    };
    for (const std::size_t size : {20u, 60'000u}) {
      add({}, size);
      add(WhenNotReady::wait, size);
      add(WhenNotReady::fail, size);
    }
    turns(30);
    for (std::size_t i = 1; i < ended_.size(); ++i)
      EXPECT_EQ(ended_[i].times, expected[i] == Status::ok ? 0 : 1) << i;
    ASSERT_NO_FATAL_FAILURE(replace_server());
    ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
    for (std::size_t i = 0; i < ended_.size(); ++i) EXPECT_EQ(ended_[i].status, expected[i]) << i;
    finish();
    closed_.clear();
    ended_.clear();
  }
}

/// The memory is used up when the refusals come. Inline calls need some to wait, calls over a
/// connection do not.
TEST_P(RpcRefusedCalls, EndIfThereIsNoMemoryToKeepThem) {
  ASSERT_NO_FATAL_FAILURE(begin_session(WhenNotReady::wait));
  const bool needs_memory = record().transport == rpc::Transport::datagram;
  ASSERT_NO_FATAL_FAILURE(begin_drain());
  std::vector<Buffer> all;
  for (std::size_t size = 512u << 10; size >= 256; size /= 2) {
    for (Buffer b; (b = buffer(size));) all.push_back(std::move(b));
  }
  ASSERT_EQ(begin(kCount, filled(20, 2)), Status::ok);
  ASSERT_EQ(begin(kCount, filled(20, 3)), Status::ok);
  turns(30);
  EXPECT_EQ(session_.state(), SessionState::opening);
  EXPECT_EQ(session_.snapshot().backlog, needs_memory ? 0u : 2u);
  for (std::size_t i = 1; i <= 2; ++i) {
    EXPECT_EQ(ended_[i].times, needs_memory ? 1 : 0);
    if (needs_memory) {
      EXPECT_EQ(ended_[i].status, Status::not_connected) << to_string(ended_[i].status);
    }
  }
  EXPECT_EQ(begin(kCount, filled(20, 4)), needs_memory ? Status::no_buffer : Status::ok);
  client_->expect_clean();
  all.clear();
  ASSERT_EQ(begin(kCount, filled(20, 5)), Status::ok);
  ASSERT_NO_FATAL_FAILURE(replace_server());
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  EXPECT_EQ(ended_.back().status, Status::ok);
  EXPECT_EQ(server_->order.size(), needs_memory ? 1u : 4u);
  finish();
}

/// A connection loses and repeats nothing.
TEST_P(RpcRefusedCalls, WaitOnceIfTheirRefusalIsLostOrComesTwice) {
  for (const bool is_lost : {true, false}) {
    SCOPED_TRACE(is_lost);
    ASSERT_NO_FATAL_FAILURE(begin_session(WhenNotReady::wait));
    if (record().transport != rpc::Transport::datagram) GTEST_SKIP() << "datagrams alone";
    refuse_without_goodbye();
    const rpc::Rpc& calls = *client_->core->calls;
    const auto late = calls.stats.late_replies, again = calls.stats.retransmitted_requests;
    spinwire::softverbs::FaultPlan plan;
    (is_lost ? plan.drop : plan.duplicate) = 1;
    server_->engine.set(plan);
    ASSERT_EQ(begin(kCount, filled(20, 2)), Status::ok);
    const auto faults = [&] {
      return spinwire::softverbs::fault_statistics(server_->engine.core->context.device->context());
    };
    ASSERT_TRUE(until([&] { return faults().dropped + faults().duplicated != 0; }));
    EXPECT_EQ(session_.snapshot().backlog, 0u) << "the client has not polled since";
    server_->engine.set({});
    ASSERT_TRUE(until([&] { return session_.snapshot().backlog == 1; }));
    turns(300);
    EXPECT_EQ(session_.snapshot().backlog, 1u);
    EXPECT_EQ(session_.snapshot().in_flight, 0u);
    EXPECT_EQ(calls.stats.retransmitted_requests > again, is_lost);
    EXPECT_EQ(calls.stats.late_replies > late, !is_lost);
    client_->expect_clean();
    send_goodbye({GoodbyeReason::overloaded, 300ms});
    ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
    EXPECT_EQ(ended_[0].status, Status::ok);
    EXPECT_EQ(ended_[0].times, 1);
    EXPECT_EQ(runs_[filled(20, 2)], 1);
    finish();
    closed_.clear();
    ended_.clear();
  }
}

/// The window and the backlog are full when the server drains.
TEST_P(RpcRefusedCalls, FitBesideAFullBacklog) {
  ASSERT_NO_FATAL_FAILURE(begin_session(WhenNotReady::wait));
  drain(server_->engine);
  std::uint32_t made = 0;
  while (begin(kCount, filled(20, made)) == Status::ok) ++made;
  ASSERT_EQ(made, 24u) << "the window and rpc.backlog";
  ASSERT_TRUE(until([&] { return !interrupted_.empty(); }));
  EXPECT_EQ(session_.snapshot().backlog, 24u);
  EXPECT_TRUE(session_.snapshot().backlog_full);
  EXPECT_EQ(begin(kCount, filled(20, 100)), Status::would_block);
  client_->expect_clean();
  ASSERT_NO_FATAL_FAILURE(replace_server());
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  for (const Ended& e : ended_) EXPECT_EQ(e.status, Status::ok);
  ASSERT_EQ(server_->order.size(), 24u);
  for (std::uint32_t i = 0; i < 24; ++i) EXPECT_EQ(server_->order[i], filled(20, i)) << i;
  finish();
}

TEST_P(RpcRefusedCalls, EndIfTheirOwnEngineDrains) {
  ASSERT_NO_FATAL_FAILURE(begin_session(WhenNotReady::wait));
  ASSERT_NO_FATAL_FAILURE(begin_drain());
  ASSERT_EQ(begin(kCount, filled(20, 2)), Status::ok);
  ASSERT_EQ(begin(kCount, filled(60'000, 3)), Status::ok);
  turns(30);
  EXPECT_EQ(session_.snapshot().backlog, 2u);
  EXPECT_EQ(ended_[1].times + ended_[2].times, 0) << "they wait";
  client_->core->drain.begin(1h, {});
  ASSERT_TRUE(until([&] { return ended_[1].times + ended_[2].times == 2; }));
  EXPECT_EQ(ended_[1].status, Status::not_connected);
  EXPECT_EQ(ended_[2].status, Status::not_connected);
  answer_all();
  ASSERT_TRUE(until([&] { return !closed_.empty(); }));
  EXPECT_EQ(closed_[0].status, Status::ok);
  EXPECT_EQ(runs_.size(), 1u);
}

/// A refusal that overtakes the goodbye does not send the call to the same server again.
TEST_P(RpcRefusedCalls, WaitForTheGoodbye) {
  ASSERT_NO_FATAL_FAILURE(begin_session(WhenNotReady::wait));
  refuse_without_goodbye();
  ASSERT_EQ(begin(kCount, filled(20, 2)), Status::ok);
  turns(30);
  EXPECT_TRUE(session_.ready());
  EXPECT_EQ(session_.snapshot().blocked_by, SessionBlocker::not_ready);
  ASSERT_EQ(begin(kCount, filled(20, 3)), Status::ok);
  ASSERT_EQ(begin(kCount, filled(60'000, 4)), Status::ok);
  turns(30);
  EXPECT_EQ(session_.snapshot().backlog, 3u);
  EXPECT_EQ(session_.snapshot().in_flight + session_.snapshot().long_calls, 0u);
  send_goodbye({GoodbyeReason::overloaded, 300ms});
  ASSERT_TRUE(until([&] { return !interrupted_.empty(); }));
  const std::uint64_t from = now_;
  EXPECT_EQ(interrupted_[0].goodbye, (Goodbye{GoodbyeReason::overloaded, 300ms}));
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  EXPECT_GE(now_ - from, 300 * kMillisecond);
  for (const Ended& e : ended_) EXPECT_EQ(e.status, Status::ok);
  finish();
}

/// Alternatives alone are tried only until the first success, so the goodbye is final.
TEST_P(RpcRefusedCalls, EndWithTheSession) {
  ASSERT_NO_FATAL_FAILURE(serve_at("127.0.0.1:0"));
  ASSERT_NO_FATAL_FAILURE(open(options_for_one_opening()));
  ASSERT_NO_FATAL_FAILURE(begin_long_work());
  send_goodbye({GoodbyeReason::overloaded, 0ms});
  ASSERT_EQ(begin(kCount, filled(20, 2)), Status::ok);
  ASSERT_EQ(begin(kCount, filled(20, 3)), Status::ok);
  ASSERT_TRUE(until([&] { return ended_[1].times + ended_[2].times == 2; }));
  EXPECT_EQ(ended_[1].status, Status::not_connected);
  EXPECT_EQ(ended_[2].status, Status::not_connected);
  EXPECT_TRUE(closed_.empty()) << "a call is in progress";
  answer_all();
  ASSERT_TRUE(until([&] { return !closed_.empty(); }));
  EXPECT_EQ(ended_[0].status, Status::ok);
  EXPECT_TRUE(interrupted_.empty());
  EXPECT_EQ(runs_.size(), 1u);
}

/// A session that is not opened again goes on, without the call that was refused.
TEST_P(RpcRefusedCalls, EndAtOnceWithoutANextServer) {
  ASSERT_NO_FATAL_FAILURE(serve_at("127.0.0.1:0"));
  ASSERT_NO_FATAL_FAILURE(open(options_for_one_opening()));
  ASSERT_EQ(begin(kCount, filled(20, 999)), Status::ok);  // the first reply opens the whole window
  ASSERT_TRUE(until([&] { return all_ended(); }));
  ended_.clear();
  ASSERT_NO_FATAL_FAILURE(begin_long_work());
  refuse_without_goodbye();
  CallOptions longest;
  longest.timeout = 1h;
  ASSERT_EQ(begin(kCount, filled(20, 2), longest), Status::ok);
  const std::uint64_t from = now_;
  ASSERT_TRUE(until([&] { return ended_[1].times == 1; }));
  EXPECT_LT(now_ - from, 100 * kMillisecond);
  EXPECT_EQ(ended_[1].status, Status::not_connected);
  turns(2500, kMillisecond);
  EXPECT_TRUE(session_.ready());
  answer_all();
  ASSERT_TRUE(until([&] { return ended_[0].times == 1; }));
  EXPECT_EQ(ended_[0].status, Status::ok);
  finish();
}

/// A call of a few bytes shows its peer the rest of the slot, too.
TEST_P(RpcRefusedCalls, LeaveNoAddressInTheirSlots) {
  ASSERT_NO_FATAL_FAILURE(begin_session(WhenNotReady::wait));
  if (record().transport != rpc::Transport::datagram)
    GTEST_SKIP() << "its calls are no direct datagrams";
  ASSERT_NO_FATAL_FAILURE(begin_drain());
  ASSERT_EQ(begin(kCount, filled(2000, 2)), Status::ok);
  const rpc::ClientSession& c = record();
  std::uint32_t slot = 0;
  while (slot < c.window && c.slots[slot].size != 2000) ++slot;
  ASSERT_LT(slot, c.window) << "it was not sent";
  EXPECT_NE(c.slots[slot].payload.in.data, nullptr);
  turns(30);
  ASSERT_EQ(session_.snapshot().backlog, 1u);
  EXPECT_EQ(c.slots[slot].payload.in.data, nullptr);
  EXPECT_EQ(c.slots[slot].payload.in.is_copy, 0);
  ASSERT_NO_FATAL_FAILURE(replace_server());
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  finish();
}

/// Nothing else wakes the session meanwhile.
TEST_P(RpcRefusedCalls, GiveTheirServerUpInTimeIfKeepalivesAreRare) {
  Config config = reconnect_config();
  config.connections.keepalive_interval = 30s;
  config.connections.peer_timeout = 300s;
  client_ = std::make_unique<Bare>(config, &now_);
  ASSERT_NO_FATAL_FAILURE(begin_session(WhenNotReady::wait));
  refuse_without_goodbye();
  CallOptions longest;
  longest.timeout = 1h;
  ASSERT_EQ(begin(kCount, filled(20, 2), longest), Status::ok);
  const std::uint64_t from = now_;
  ASSERT_TRUE(until([&] { return !interrupted_.empty(); }, kMillisecond));
  EXPECT_LE(now_ - from, static_cast<std::uint64_t>(config.connections.close_timeout.count()) +
                             100 * kMillisecond);
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  EXPECT_EQ(ended_[0].status, Status::ok);
  finish();
}

/// The server refuses all calls, and says no goodbye, whenever the session is opened again.
TEST_P(RpcRefusedCalls, AreNotSentInALoopToAServerThatSaysNoGoodbye) {
  bool refuses = true;
  on_ready = [&](Session) {
    if (refuses) refuse_without_goodbye();
  };
  ASSERT_NO_FATAL_FAILURE(serve_at("127.0.0.1:0"));
  SessionOptions how = options();
  how.when_not_ready = WhenNotReady::wait;
  ASSERT_NO_FATAL_FAILURE(open(how));
  const Nanoseconds close_timeout = reconnect_config().connections.close_timeout;
  const auto limit = static_cast<std::uint64_t>(close_timeout.count());
  CallOptions options;
  options.timeout = 4 * close_timeout;
  const std::uint64_t from = now_;
  ASSERT_EQ(begin(kCount, filled(20, 2), options), Status::ok);
  ASSERT_EQ(begin(kCount, filled(20, 3), options), Status::ok);
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  EXPECT_EQ(ended_[0].status, Status::timed_out);
  EXPECT_EQ(ended_[1].status, Status::timed_out);
  EXPECT_GE(now_ - from, 4 * limit);
  EXPECT_LE(now_ - from, 4 * limit + 100 * kMillisecond);
  EXPECT_GE(interrupted_.size(), 2u);
  EXPECT_LE(interrupted_.size(), 4u);
  for (const Error& e : interrupted_) {
    EXPECT_EQ(e.status, Status::peer_lost);
    EXPECT_NE(e.found.find("says no goodbye"), std::string::npos) << e.message();
  }
  refuses = false;
  ASSERT_EQ(begin(kCount, filled(20, 4)), Status::ok);
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  EXPECT_EQ(ended_[2].status, Status::ok);
  finish();
}

/// The server ends each session at once, and asks the client to come back.
TEST_P(RpcRefusedCalls, AreNotSentInALoopToAServerThatAlwaysSaysGoodbye) {
  ASSERT_NO_FATAL_FAILURE(serve_at("127.0.0.1:0"));
  on_ready = [this](Session) { send_goodbye({GoodbyeReason::overloaded, 0ms}); };
  SessionOptions how = options();
  how.when_not_ready = WhenNotReady::wait;
  session_ = client_->core->open_session(address_, how).value();
  CallOptions options;
  options.timeout = 3s;
  const std::uint64_t from = now_;
  for (std::uint32_t i = 0; i < 8; ++i)
    ASSERT_EQ(begin(kCount, filled(20, i), options), Status::ok);
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  for (const Ended& e : ended_) EXPECT_EQ(e.status, Status::timed_out);
  EXPECT_GE(now_ - from, 3000 * kMillisecond);
  EXPECT_LE(now_ - from, 3100 * kMillisecond);
  // Pauses of at least 50 ms, but for the first ones.
  EXPECT_GE(interrupted_.size(), 10u);
  EXPECT_LE(interrupted_.size(), 65u);
  EXPECT_TRUE(runs_.empty());
}

/// A client calls all the time, while its server is replaced again and again.
TEST_P(RpcRefusedCalls, RunOnceWhateverServersDrain) {
  ASSERT_NO_FATAL_FAILURE(begin_session(WhenNotReady::wait));
  std::uint32_t made = 0;
  const auto call = [&] {
    const std::size_t size = made % 7 == 6 ? 30'000 : 20 + made % 3 * 400;
    const Status status = begin(kCount, filled(size, made));
    if (status == Status::ok) ++made;
    ASSERT_TRUE(status == Status::ok || status == Status::would_block) << to_string(status);
  };
  for (int round = 0; round < 6; ++round) {
    interrupted_.clear();
    for (int i = 0; i < 40 + 7 * round; ++i) {
      ASSERT_NO_FATAL_FAILURE(call());
      if (i % 3 == 0) turn(10'000);
    }
    drain(server_->engine);
    for (int i = 0; i < 20; ++i) {
      ASSERT_NO_FATAL_FAILURE(call());
      if (i % 5 == 0) turn(10'000);
    }
    ASSERT_NO_FATAL_FAILURE(replace_server());
    ASSERT_TRUE(until([&] { return session_.ready(); }, kMillisecond));
  }
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  for (const Ended& e : ended_) EXPECT_EQ(e.status, Status::ok) << to_string(e.status);
  EXPECT_EQ(runs_.size(), made);
  finish();
}

}  // namespace
}  // namespace rpc_session_reconnect_test
