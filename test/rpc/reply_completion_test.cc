// Replies with a callback: it runs once, when the library no longer uses the reply's bytes.
#include "base/internals.h"
#include "engine/engine_core.h"
#include "rpc/kept_replies.h"
#include "rpc/long_calls.h"
#include "rpc/rpc_ends.h"

namespace rpc_reply_completion_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::ReplyCompletionCallback;

constexpr spinwire::Method kAnswer = 9;
constexpr std::size_t kSize = 1000;  // more than a slot holds

/// A server whose replies come from one buffer, with a callback.
struct Answers : Calls {
  explicit Answers(const Config& c = rpc_config(), const std::uint64_t* ticks = nullptr)
      : Calls(c, ticks, 1), answer(server.buffer(kSize)) {
    EXPECT_TRUE(server.engine.serve(kAnswer, [this](Request& r) { reply(r); }));
  }
  template <typename Call>
  void reply(Call& call, std::size_t size = kSize) {
    is_replying = true;
    EXPECT_EQ(call.reply(answer.slice(0, size), callback()), Status::ok);
    is_replying = false;
  }
  ReplyCompletionCallback callback() {
    return [this](Status status) {
      EXPECT_FALSE(is_replying) << "inside reply()";
      was_unique = answer.unique();
      ended_as.push_back(status);
    };
  }
  spinwire::rpc::Rpc& calls() { return *spinwire::detail::core_of(server.engine)->calls; }

  Buffer answer;
  bool is_replying = false;
  bool was_unique = false;
  std::vector<Status> ended_as;
};
using Statuses = std::vector<Status>;

TEST(RpcReplyCompletion, RunsWhenTheClientsNextCallShowsThatItHasTheReply) {
  std::uint64_t ticks = 1;  // a client that is silent for long says which calls are over
  Answers t(rpc_config(), &ticks);
  t.each_turn = [&] { ticks += 1000; };
  EXPECT_EQ(t.call(kAnswer, {}).bytes.size(), kSize);
  for (int i = 0; i < 8; ++i) (void)(t.client.poll() + t.server.poll());
  EXPECT_EQ(t.ended_as, over_connections() ? Statuses{Status::ok} : Statuses{});
  EXPECT_EQ(t.answer.unique(), over_connections());  // otherwise it may be sent again
  EXPECT_EQ(t.call(kEcho, {}).status, Status::ok);
  ASSERT_TRUE(t.until([&] { return !t.ended_as.empty(); }));
  EXPECT_TRUE(t.was_unique) << "the callback may write to the buffer";
  EXPECT_EQ(t.call(kEcho, {}).status, Status::ok);
  EXPECT_EQ(t.ended_as, Statuses{Status::ok}) << "once";
  t.answer.reset();
  t.finish();
}

TEST(RpcReplyCompletion, RunsWhenAnIdleClientSaysWhichCallsAreOver) {
  if (over_connections()) GTEST_SKIP() << "datagrams";
  std::uint64_t ticks = 1;
  Answers t(rpc_config(), &ticks);
  t.each_turn = [&] { ticks += 1'000'000; };
  EXPECT_EQ(t.call(kAnswer, {}).bytes.size(), kSize);
  ASSERT_TRUE(t.until([&] { return !t.ended_as.empty(); }));
  EXPECT_EQ(t.ended_as, Statuses{Status::ok});
  EXPECT_TRUE(t.session.ready());
  t.answer.reset();
  t.finish();
}

TEST(RpcReplyCompletion, ACopiedReplyIsOverInTheNextPoll) {
  std::uint64_t ticks = 1;
  Answers t(rpc_config(), &ticks);
  t.each_turn = [&] { ticks += 1000; };
  ASSERT_EQ(t.begin(kLater, filled(9, 1)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  t.each_turn = nullptr;  // time stands still: no control step is due
  (void)t.server.poll();
  t.reply(t.later[0].call, kSlotPayloadBytes);
  EXPECT_EQ(t.ended_as, Statuses{});
  (void)t.server.engine.poll();
  EXPECT_EQ(t.ended_as, Statuses{Status::ok});
  t.each_turn = [&] { ticks += 1000; };
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.ended.back().bytes.size(), kSlotPayloadBytes);
  t.answer.reset();
  t.finish();
}

TEST(RpcReplyCompletion, ALongReplyIsOverWhenItIsWritten) {
  Answers t(long_call_config());
  Buffer into = t.client.engine.allocate(kSize, spinwire::Pool::lease);
  CallOptions options;
  options.reply_into = into.slice();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(t.call(kAnswer, {}, options).bytes.size(), kSize);
    ASSERT_TRUE(t.until([&] { return t.ended_as.size() == static_cast<std::size_t>(i) + 1; }));
    EXPECT_TRUE(t.was_unique);
  }
  EXPECT_EQ(t.ended_as, Statuses(3, Status::ok));
  options = {};
  into.reset();
  t.answer.reset();
  t.finish();
}

TEST(RpcReplyCompletion, AClientThatClosesInOrderNeedsNoReplyAnyMore) {
  Answers t;
  EXPECT_EQ(t.call(kAnswer, {}).bytes.size(), kSize);
  EXPECT_EQ(t.session.close(), Status::ok);
  ASSERT_TRUE(t.until([&] { return !t.ended_as.empty(); }));
  EXPECT_EQ(t.ended_as, Statuses{Status::ok});
  EXPECT_TRUE(t.was_unique);
  t.answer.reset();
  t.finish();
}

TEST(RpcReplyCompletion, ALostClientEndsTheReply) {
  if (over_connections()) GTEST_SKIP() << "a reply over a connection is over at once";
  std::uint64_t ticks = 1;
  Answers t(rpc_config(), &ticks);
  t.each_turn = [&] { ticks += 1000; };
  EXPECT_EQ(t.call(kAnswer, {}).bytes.size(), kSize);
  const std::uint64_t last = ticks;
  ASSERT_TRUE(engine_test::until({&t.server}, [&] {  // the client does not poll
    ticks += 10'000'000;
    return !t.ended_as.empty();
  }));
  EXPECT_GT(ticks - last,
            static_cast<std::uint64_t>(rpc_config().connections.peer_timeout.count()));
  EXPECT_EQ(t.ended_as, Statuses{Status::peer_lost});
  EXPECT_TRUE(t.was_unique);
  EXPECT_EQ(t.server.engine.rpc_stats().served_sessions, 0u);
  t.bad_allowed = true;  // the client is heard again
  ASSERT_TRUE(t.until([&] { return t.session.state() == SessionState::closed; }));
  t.answer.reset();
  t.finish();
}

TEST(RpcReplyCompletion, AServerThatEndsTheSessionEndsTheReply) {
  if (over_connections()) GTEST_SKIP() << "a reply over a connection is over at once";
  std::uint64_t ticks = 1;
  Answers t(rpc_config(), &ticks);
  t.each_turn = [&] { ticks += 1000; };
  EXPECT_EQ(t.call(kAnswer, {}).bytes.size(), kSize);
  spinwire::ServedSession served;
  (void)t.server.engine.visit_served_sessions(
      0, 8, [&](const spinwire::ServedSessionInfo& info) { served = info.session; });
  ASSERT_EQ(served.close({spinwire::GoodbyeReason::draining}, 1ms), Status::ok);
  ASSERT_TRUE(engine_test::until({&t.server}, [&] {  // the client does not poll
    ticks += 1'000'000;
    return !t.ended_as.empty();
  }));
  EXPECT_EQ(t.ended_as, Statuses{Status::flushed});
  t.bad_allowed = true;  // the client is heard again
  ASSERT_TRUE(t.until([&] { return t.session.state() == SessionState::closed; }));
  t.answer.reset();
  t.finish();
}

/// With and without datagrams that the send queue still holds when the engine goes.
TEST(RpcReplyCompletion, AnEngineThatGoesEndsTheReply) {
  for (const auto direct : {spinwire::DirectPath::automatic, spinwire::DirectPath::off}) {
    Config c = rpc_config();
    c.rpc.direct_datagrams = direct;
    Answers t(c);
    ASSERT_EQ(t.begin(kLater, filled(9, 1)), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
    t.reply(t.later[0].call);
    EXPECT_EQ(t.ended_as, Statuses{});
    t.server.listener = {};
    t.server.engine = Engine();
    const Status as = over_connections() ? Status::ok : Status::flushed;
    EXPECT_EQ(t.ended_as, Statuses{as});
    EXPECT_TRUE(t.was_unique);
    t.answer.reset();
  }
}

TEST(RpcReplyCompletion, NothingRunsForAReplyThatIsNotAccepted) {
  Answers t;
  ASSERT_EQ(t.begin(kLater, filled(9, 1)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  PendingCall call = t.later[0].call;
  EXPECT_EQ(call.reply(t.answer, ReplyCompletionCallback()), Status::invalid_argument);
  Buffer foreign = t.client.buffer(kSize);
  EXPECT_EQ(call.reply(foreign, t.callback()), Status::invalid_argument);
  Buffer huge = t.server.buffer(100'000);
  EXPECT_EQ(call.reply(huge, t.callback()), Status::message_too_long);
  EXPECT_TRUE(huge.unique());
  EXPECT_EQ(PendingCall().reply(t.answer, t.callback()), Status::not_connected);
  t.reply(call, 8);
  EXPECT_EQ(call.reply(t.answer, t.callback()), Status::not_connected) << "it was answered";
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  ASSERT_TRUE(t.until([&] { return !t.ended_as.empty(); }));
  EXPECT_EQ(t.session.close(), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.session.state() == SessionState::closed; }));
  EXPECT_EQ(call.reply(t.answer, t.callback()), Status::not_connected) << "its session has ended";
  EXPECT_EQ(t.ended_as, Statuses{Status::ok});
  EXPECT_TRUE(t.answer.unique());
  EXPECT_TRUE(foreign.unique());
  for (Buffer* each : {&t.answer, &foreign, &huge}) each->reset();
  t.finish();
}

TEST(RpcReplyCompletion, AReplyThatTheServerDropsIsOver) {
  if (over_connections() || by_work_requests() || !engine_test::on_softverbs())
    GTEST_SKIP() << "datagrams that no send queue holds";
  Answers t;
  EXPECT_EQ(t.call(kAnswer, {}).bytes.size(), kSize);
  t.calls().servers.for_each([&](spinwire::rpc::ServerSession& s) {
    spinwire::rpc::drop_kept_inline_replies(t.calls(), s);
  });
  EXPECT_TRUE(t.answer.unique()) << "the memory is free at once";
  EXPECT_EQ(t.ended_as, Statuses{}) << "a callback waits for a poll";
  ASSERT_TRUE(t.until([&] { return !t.ended_as.empty(); }));
  EXPECT_EQ(t.ended_as, Statuses{Status::ok});
  t.answer.reset();
  t.finish();
}

TEST(RpcReplyCompletion, TwoRepliesFromOneBufferAreOverOneByOne) {
  if (over_connections()) GTEST_SKIP() << "datagrams";
  std::uint64_t ticks = 1;  // a session that is silent for long says which calls are over
  Answers t(rpc_config(), &ticks);
  t.each_turn = [&] { ticks += 1000; };
  Session other = t.open(1);
  ASSERT_TRUE(t.until([&] { return other.ready(); }));
  EXPECT_EQ(t.call(kAnswer, {}).bytes.size(), kSize);
  std::swap(t.session, other);
  EXPECT_EQ(t.call(kAnswer, {}).bytes.size(), kSize);
  EXPECT_EQ(t.call(kEcho, {}).status, Status::ok);
  ASSERT_TRUE(t.until([&] { return !t.ended_as.empty(); }));
  EXPECT_FALSE(t.was_unique) << "the other reply still has the buffer";
  EXPECT_EQ(other.close(), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.ended_as.size() == 2; }));
  EXPECT_TRUE(t.was_unique);
  t.answer.reset();
  t.finish();
}

/// A callback may answer further calls, whose callbacks wait for the next poll.
TEST(RpcReplyCompletion, ACallbackMayReplyAgain) {
  Answers t;
  ASSERT_EQ(t.begin(kLater, filled(9, 1)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  struct Chain {
    Answers& t;
    int callbacks = 0;
    Status second = Status::system;
  } chain{t};
  const auto answer_echo = [](Chain& c) {
    const auto again = [&c](Status) { ++c.callbacks; };
    c.second = c.t.later[1].call.reply(c.t.answer.slice(0, 8), again);
  };
  Session other = t.open(1);
  ASSERT_TRUE(t.until([&] { return other.ready(); }));
  std::swap(t.session, other);
  ASSERT_EQ(t.begin(kLater, filled(9, 2)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 2; }));
  const auto first = [&chain, answer_echo](Status) {
    ++chain.callbacks;
    answer_echo(chain);
    EXPECT_EQ(chain.callbacks, 1) << "not inside reply()";
  };
  ASSERT_EQ(t.later[0].call.reply(t.answer.slice(0, 8), first), Status::ok);
  ASSERT_TRUE(t.until([&] { return chain.callbacks == 2 && t.all_ended(); }));
  EXPECT_EQ(chain.second, Status::ok);
  EXPECT_EQ(other.close(), Status::ok);
  t.answer.reset();
  t.finish();
}

}  // namespace
}  // namespace rpc_reply_completion_test
