// Calls and replies in states without calls: before a session is ready, while it ends, in the
// callbacks, and from another thread. Also when a reply is sent.
#include <thread>

#include "base/internals.h"
#include "engine/engine_core.h"
#include "rpc/rpc_ends.h"

namespace rpc_states_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::detail::CallRef;
using spinwire::detail::Transport;

constexpr std::span<const std::byte> kNothing;

/// The results of calls of every kind.
std::vector<Status> call_all_ways(Calls& t, Session& s) {
  const auto done = [](Reply&) { ADD_FAILURE() << "a call that was refused has ended"; };
  const Buffer fits = t.client.buffer(300), longer = t.client.buffer(40000);
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
  Calls t(over(RpcTransport::datagram));  // a lost connection would reconnect
  (void)t.call(kEcho, {});
  std::vector<Status> within;
  Status status = Status::ok;
  const auto done = [&](Reply& r) {
    status = r.status();
    within = call_all_ways(t, t.session);
  };
  ASSERT_EQ(t.session.call(kLater, kNothing, done), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  t.server.engine = Engine();  // which notifies the client
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

// Calls over both transports have the session's name, and their numbers may coincide.
TEST(RpcSessionStates, ACallIsOfItsTransport) {
  if (over_connections()) GTEST_SKIP() << "the call must be a datagram's";
  Calls t;
  ASSERT_EQ(t.begin(kLater, filled(5, 1)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  const auto& server = *spinwire::detail::core_of(t.server.engine)->calls;
  const spinwire::rpc::ServerSession& s = server.servers.at(0);
  std::uint32_t slot = 0;
  while (s.slots[slot].state != spinwire::rpc::ServerSlotState::running) ++slot;
  const auto with = [&](Transport by) {
    const CallRef call(s.name, by, s.slots[slot].number);
    return spinwire::detail::make<PendingCall>(server.context.slot, call);
  };
  const PendingCall other = with(Transport::connection);
  EXPECT_EQ(other.max_reply(), 0u);
  EXPECT_TRUE(other.reserve_reply(8).empty());
  EXPECT_EQ(other.reply(filled(3, 1)), Status::not_connected);
  const PendingCall same = with(Transport::datagram);
  EXPECT_NE(same.max_reply(), 0u);
  EXPECT_EQ(same.reply(filled(3, 2)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.ended[0].bytes, filled(3, 2));
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

TEST(RpcSessionStates, BytesOfAnyLengthAreCopied) {
  Calls t;
  constexpr spinwire::Method kCopy = 77;
  Bytes seen;
  ASSERT_TRUE(t.server.engine.serve(kCopy, [&seen](Request& r) {
    seen = bytes_of(r.bytes());
    EXPECT_EQ(r.reply(std::span<const std::byte>()), Status::ok);
  }));
  for (const std::size_t size :
       {kSlotPayloadBytes, kSlotPayloadBytes + 1, t.session.max_inline_call(),
        std::min(t.session.max_inline_call() + 1, t.session.max_call()), t.session.max_call()}) {
    for (const bool with_options : {false, true}) {
      Bytes request = filled(size, 1);
      std::optional<Status> ended;
      const auto done = [&](Reply& r) { ended = r.status(); };
      ASSERT_EQ(with_options ? t.session.call(kCopy, request, done, CallOptions{})
                             : t.session.call(kCopy, request, done),
                Status::ok);
      request.assign(size, std::byte{0xee});  // the memory is ours again
      ASSERT_TRUE(t.until([&] { return ended.has_value(); }));
      EXPECT_EQ(ended, Status::ok);
      EXPECT_EQ(seen, filled(size, 1)) << size;
    }
  }
  t.finish();
}

TEST(RpcSessionStates, WithoutABlockToCopyToNothingIsCalled) {
  Calls t;
  std::vector<Buffer> all;  // the blocks of the send pool, largest first
  for (std::size_t size = 1u << 20; size >= 64; size /= 2) {
    while (Buffer b = t.client.engine.allocate(size)) all.push_back(std::move(b));
  }
  const auto done = [](Reply&) { ADD_FAILURE() << "a call that was refused has ended"; };
  EXPECT_EQ(t.session.call(kEcho, filled(kSlotPayloadBytes + 1, 1), done), Status::no_buffer);
  EXPECT_EQ(t.session.call(kEcho, filled(kSlotPayloadBytes + 1, 1), done, CallOptions{}),
            Status::no_buffer);
  EXPECT_EQ(t.call(kEcho, filled(kSlotPayloadBytes, 1)).bytes, filled(kSlotPayloadBytes, 1));
  all.clear();
  EXPECT_EQ(t.call(kEcho, filled(kSlotPayloadBytes + 1, 1)).bytes,
            filled(kSlotPayloadBytes + 1, 1));
  t.finish();
}

TEST(RpcSessionStates, AnAnswerBetweenPollsGoesOutAtOnce) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "sent is there";
  Config c = rpc_config();
  c.memory.rendezvous_bytes = 4u << 20;
  Calls t(c);
  Buffer room = t.client.buffer(40000);
  CallOptions into;
  into.reply_into = room.slice();
  for (const std::size_t size : {std::size_t{9}, std::size_t{19000}}) {
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
