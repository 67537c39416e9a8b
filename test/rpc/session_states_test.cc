// Calls and answers where there can be none: before a session is ready and once it ends, in the
// callbacks that tell of that, and from another thread. And when an answer goes out.
#include <thread>

#include "rpc/ends.h"

namespace rpc_states_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

constexpr std::span<const std::byte> kNothing;

/// What calls of every kind answer.
std::vector<Status> call_all_ways(Calls& t, Session& s) {
  const auto done = [](Reply&) { ADD_FAILURE() << "a call that was refused has ended"; };
  const Buffer fits = t.client.buffer(300), longer = t.client.buffer(6000);
  return {s.call(kEcho, kNothing, done), s.call(kEcho, kNothing, done, CallOptions{}),
          s.call(kEcho, fits.slice(), done), s.call(kEcho, fits.slice(), done, CallOptions{}),
          s.call(kEcho, longer.slice(), done)};
}
const std::vector<Status> kRefused(5, Status::not_connected);

TEST(RpcSessionStates, NoCallIsMadeBeforeItsSessionIsReady) {
  Calls t;
  Session opening = t.open();
  EXPECT_EQ(opening.state(), SessionState::opening);
  EXPECT_EQ(call_all_ways(t, opening), kRefused);
  ASSERT_TRUE(t.until([&] { return opening.ready(); }));
  EXPECT_EQ(opening.close(), Status::ok);
  EXPECT_EQ(t.call(kEcho, filled(3, 1)).bytes, filled(3, 1));
  t.finish();
}

TEST(RpcSessionStates, NoCallIsMadeOnceItsSessionCloses) {
  Calls t;
  (void)t.call(kEcho, {});
  std::vector<Status> within;
  const auto done = [&](Reply& r) {
    EXPECT_EQ(r.status(), Status::flushed);
    within = call_all_ways(t, t.session);
  };
  ASSERT_EQ(t.session.call(kLater, kNothing, done), Status::ok);
  EXPECT_EQ(t.session.close(), Status::ok);
  EXPECT_EQ(t.session.state(), SessionState::closing);
  EXPECT_TRUE(within.empty());
  (void)t.client.poll();
  EXPECT_EQ(within, kRefused);
  EXPECT_EQ(call_all_ways(t, t.session), kRefused);
  t.finish();
}

TEST(RpcSessionStates, NoCallIsMadeByTheCallbacksOfASessionThatIsLost) {
  Calls t(over(RpcTransport::datagram));  // a connection that is lost is made again
  (void)t.call(kEcho, {});
  std::vector<Status> within;
  Status status = Status::ok;
  const auto done = [&](Reply& r) {
    status = r.status();
    within = call_all_ways(t, t.session);
  };
  ASSERT_EQ(t.session.call(kLater, kNothing, done), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  t.server.engine = Engine();  // which tells the client
  ASSERT_TRUE(engine_test::until({&t.client}, [&] { return t.closed.size() == 1; }));
  EXPECT_NE(status, Status::ok);
  EXPECT_EQ(within, kRefused);
  EXPECT_EQ(t.client.engine.rpc_stats().sessions, 0u);
  t.client.expect_clean();
}

TEST(RpcSessionStates, ACallbackFindsItsOwnCallOver) {
  Calls t(rpc_config(), nullptr, 1);
  (void)t.call(kEcho, {});
  struct {
    int first = 0, second = 0;
    CallId id{};
    Status cancelled = Status::ok, again = Status::system;
  } seen;
  const auto done = [&t, &seen](Reply& r) {
    ++seen.first;
    EXPECT_EQ(r.status(), Status::ok);
    seen.cancelled = t.session.cancel(seen.id);
    seen.again = t.session.call(kEcho, kNothing, [&t, &seen](Reply& second) {
      ++seen.second;
      EXPECT_EQ(second.status(), Status::ok);
      EXPECT_EQ(t.session.close(), Status::ok);
    });
  };
  ASSERT_EQ(t.session.call(kEcho, kNothing, done), Status::ok);
  seen.id = t.session.last_call();
  ASSERT_TRUE(t.until([&] { return t.session.state() == SessionState::closed; }));
  EXPECT_EQ(seen.cancelled, Status::invalid_argument);
  EXPECT_EQ(seen.again, Status::ok);
  EXPECT_EQ(seen.first, 1);
  EXPECT_EQ(seen.second, 1);
  t.finish();
}

TEST(RpcSessionStates, OnlyTheEnginesThreadCallsAndAnswers) {
  Calls t;
  ASSERT_EQ(t.begin(kLater, filled(5, 1)), Status::ok);
  const CallId id = t.session.last_call();
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  const PendingCall pending = t.later[0].call;
  ASSERT_EQ(pending.reserve_reply(8).size(), 8u);
  BufferSlice slice = t.client.buffer(300).slice();
  BufferSlice answer = t.server.buffer(300).slice();
  std::vector<Status> got;
  std::thread([&] {
    const auto done = [](Reply&) {};
    got = {t.session.call(kEcho, kNothing, done),
           t.session.call(kEcho, kNothing, done, CallOptions{}),
           t.session.call(kEcho, slice, done),
           t.session.call(kEcho, slice, done, CallOptions{}),
           t.session.cancel(id),
           t.session.close(),
           t.client.engine.open_session(t.server.listener.address(), {}).error().status,
           t.server.engine.serve(kEcho, nullptr).error().status,
           pending.reply(filled(3, 1)),
           pending.reply(answer),
           pending.refuse("no"),
           pending.commit_reply(8)};
    EXPECT_EQ(t.session.max_inline_call(), 0u);
    EXPECT_EQ(pending.max_reply(), 0u);
    EXPECT_TRUE(pending.reserve_reply(8).empty());
  }).join();
  EXPECT_EQ(got, std::vector<Status>(12, Status::wrong_thread));
  slice = answer = {};
  EXPECT_EQ(pending.reply(filled(7, 2)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.ended[0].bytes, filled(7, 2));
  t.finish();
}

TEST(RpcSessionStates, WhatHasNoBufferIsShortWithOptionsAsWell) {
  Calls t;
  const Bytes longer = filled(kShortCall + 1, 1);
  const auto done = [](Reply&) { ADD_FAILURE() << "a call that was refused has ended"; };
  EXPECT_EQ(t.session.call(kEcho, longer, done), Status::message_too_long);
  EXPECT_EQ(t.session.call(kEcho, longer, done, CallOptions{}), Status::message_too_long);
  t.finish();
}

TEST(RpcSessionStates, AnAnswerBetweenPollsGoesOutAtOnce) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "sent is there";
  Config c = rpc_config();
  c.memory.rendezvous_bytes = 4u << 20;
  Calls t(c);
  Buffer room = t.client.buffer(8000);
  CallOptions into;
  into.reply_into = room.slice();
  for (const std::size_t size : {std::size_t{9}, std::size_t{7000}}) {
    ASSERT_EQ(t.begin(kLater, filled(1, 1), size > 1000 ? into : CallOptions{}), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
    const PendingCall call = t.later[0].call;
    t.later.clear();
    {
      const Bytes bytes = filled(size, 5);
      const Buffer b = t.server.buffer(size);
      std::copy(bytes.begin(), bytes.end(), b.data());
      EXPECT_EQ(call.reply(b.slice()), Status::ok);
    }
    // The server does not poll meanwhile.
    ASSERT_TRUE(engine_test::until({&t.client}, [&] { return t.all_ended(); }));
    EXPECT_EQ(t.ended.back().status, Status::ok);
    EXPECT_EQ(t.ended.back().bytes, filled(size, 5));
  }
  room.reset();
  into = {};
  t.finish();
}

}  // namespace
}  // namespace rpc_states_test
