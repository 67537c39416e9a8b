// Inline calls: each gets its reply once, or an error.
#include "base/internals.h"
#include "engine/engine_core.h"
#include "rpc/rpc_ends.h"

namespace rpc_calls_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

TEST(RpcCalls, BytesComeBackInEveryLength) {
  Calls t;
  const std::size_t longest = t.session.max_inline_call();
  EXPECT_GE(longest, 240u);
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, kSlotPayloadBytes - 1, kSlotPayloadBytes,
        kSlotPayloadBytes + 1, std::size_t{200}, longest - 1, longest}) {
    SCOPED_TRACE(size);
    const Bytes bytes = filled(size, static_cast<std::uint32_t>(size));
    const Ended e = t.call(kEcho, bytes);
    EXPECT_EQ(e.status, Status::ok) << to_string(e.status);
    EXPECT_EQ(e.bytes, bytes);
  }
  EXPECT_EQ(t.begin(kEcho, filled(t.session.max_call() + 1, 1)), Status::message_too_long);
  EXPECT_EQ(t.client.engine.rpc_stats().calls, 8u);
  EXPECT_EQ(t.server.engine.rpc_stats().served, 8u);
  t.finish();
}

TEST(RpcCalls, TheLongestTimeoutsDoNotPassAtOnce) {
  Calls t;
  for (const Nanoseconds timeout : {Nanoseconds::max(), Nanoseconds::max() - 1ns}) {
    CallOptions options;
    options.timeout = timeout;
    ASSERT_EQ(t.begin(kLater, filled(4, 1), options), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
    for (int i = 0; i < 1000; ++i) (void)(t.client.poll() + t.server.poll());
    EXPECT_EQ(t.ended.back().times, 0);
    EXPECT_EQ(t.later.back().call.reply(filled(4, 2)), Status::ok);
    EXPECT_TRUE(t.until([&] { return t.ended.back().times != 0; }));
    EXPECT_EQ(t.ended.back().status, Status::ok);
    t.later.clear();
  }
  t.finish();
}

TEST(RpcCalls, AWindowIsUnderWayAndABacklogWaits) {
  Calls t;
  const Config& c = t.client.engine.config();
  (void)t.call(kEcho, {});  // the server now has receives for the whole window
  std::uint32_t taken = 0;
  while (t.begin(kLater, filled(4, taken)) == Status::ok) ++taken;
  EXPECT_EQ(taken, c.rpc.window + c.rpc.backlog);
  ASSERT_TRUE(t.until([&] { return t.later.size() == c.rpc.window; }));
  for (int i = 0; i < 100; ++i) (void)(t.client.poll() + t.server.poll());
  EXPECT_EQ(t.later.size(), c.rpc.window);
  // Answered in reverse order, each with its own request.
  std::size_t answered = 0;
  ASSERT_TRUE(t.until([&] {
    for (; !t.later.empty(); ++answered) {
      EXPECT_EQ(t.later.back().call.reply(t.later.back().bytes), Status::ok);
      t.later.pop_back();
    }
    return t.all_ended();
  }));
  EXPECT_EQ(answered, taken);
  for (std::uint32_t i = 0; i < taken; ++i) EXPECT_EQ(t.ended[i + 1].bytes, filled(4, i)) << i;
  t.finish();
}

TEST(RpcCalls, EveryRefusalTellsItsReason) {
  Calls t;
  Ended e = t.call(kRefuse, filled(10, 1));
  EXPECT_EQ(e.status, Status::refused);
  EXPECT_EQ(e.text, "not on a Sunday");
  e = t.call(999, filled(10, 1));
  EXPECT_EQ(e.status, Status::unsupported);
  EXPECT_EQ(e.text, "no such method");
  e = t.call(kSilent, filled(10, 1));
  EXPECT_EQ(e.status, Status::refused);
  EXPECT_EQ(e.text, "the handler has not answered");
  EXPECT_TRUE(t.server.engine.serve(kRefuse, nullptr));
  EXPECT_EQ(t.call(kRefuse, {}).status, Status::unsupported);
  CallOptions never;
  never.timeout = Nanoseconds(-1);
  EXPECT_EQ(t.begin(kEcho, {}, never), Status::invalid_argument);
  EXPECT_EQ(t.session.call(kEcho, std::span<const std::byte>(), nullptr), Status::invalid_argument);
  EXPECT_EQ(t.session.call(kEcho, filled(t.session.max_call() + 1, 1), [](Reply&) {}),
            Status::message_too_long);
  t.finish();
}

TEST(RpcCalls, AnAnswerIsGivenOnceAndNotToACallThatIsOver) {
  Calls t;
  ASSERT_EQ(t.begin(kLater, filled(5, 1)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  const PendingCall call = t.later[0].call;
  EXPECT_EQ(call.reply(filled(5000, 1)), Status::message_too_long);
  EXPECT_EQ(call.reply(filled(7, 2)), Status::ok);
  EXPECT_EQ(call.reply(filled(7, 3)), Status::not_connected);
  EXPECT_EQ(call.refuse("too late"), Status::not_connected);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.ended[0].bytes, filled(7, 2));
  // A call whose client has given up: its slot serves the next call.
  ASSERT_EQ(t.begin(kLater, filled(6, 1)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 2; }));
  EXPECT_EQ(t.session.cancel(t.session.last_call()), Status::ok);
  (void)t.client.poll();
  EXPECT_EQ(t.ended[1].status, Status::cancelled);
  EXPECT_EQ(t.call(kEcho, filled(3, 4)).bytes, filled(3, 4));
  EXPECT_EQ(t.later[1].call.reply(filled(6, 6)), Status::not_connected);
  EXPECT_EQ(PendingCall().reply(Bytes()), Status::not_connected);
  t.finish();
}

TEST(RpcCalls, AnAnswerForASessionThatIsGoneComesToNobody) {
  Calls t;
  ASSERT_EQ(t.call(kEcho, {}).status, Status::ok);  // from now on the whole window is granted
  for (std::size_t i = 1; i <= 2; ++i) {
    ASSERT_EQ(t.begin(kLater, filled(5, 1)), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.later.size() == i; }));
  }
  EXPECT_EQ(t.session.close(), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.server.engine.rpc_stats().served_sessions == 0; }));
  for (const auto& later : {t.later[1], t.later[0]})
    EXPECT_EQ(later.call.reply(filled(5, 2)), Status::not_connected);
  t.session = t.open();  // in the same record
  ASSERT_TRUE(t.until([&] { return t.session.ready(); }));
  for (const auto& later : {t.later[1], t.later[0]})
    EXPECT_EQ(later.call.reply(filled(5, 3)), Status::not_connected);
  EXPECT_EQ(t.call(kEcho, filled(3, 4)).bytes, filled(3, 4));
  t.finish();
}

TEST(RpcCalls, AReplyThatComesAfterACancelIsDropped) {
  Calls t;
  ASSERT_EQ(t.begin(kLater, filled(5, 1)), Status::ok);
  const CallId id = t.session.last_call();
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  EXPECT_EQ(t.later[0].call.reply(filled(5, 2)), Status::ok);
  EXPECT_EQ(t.session.cancel(id), Status::ok);
  EXPECT_EQ(t.session.cancel(id), Status::invalid_argument);
  ASSERT_TRUE(t.until([&] { return t.client.engine.rpc_stats().late_replies == 1; }));
  EXPECT_EQ(t.ended[0].times, 1);
  EXPECT_EQ(t.ended[0].status, Status::cancelled);
  EXPECT_EQ(t.call(kEcho, filled(5, 3)).bytes, filled(5, 3));
  t.finish();
}

TEST(RpcCalls, TheLastCallIsTheNewestThatIsNotOver) {
  Calls t;
  EXPECT_FALSE(t.session.last_call()) << "there was none";
  EXPECT_EQ(t.session.cancel(t.session.last_call()), Status::invalid_argument);
  ASSERT_EQ(t.call(kEcho, {}).status, Status::ok);
  EXPECT_FALSE(t.session.last_call()) << "it has ended";
  const auto done = [](Reply&) {};
  constexpr std::span<const std::byte> kEmpty;
  std::vector<CallId> ids;
  CallId id;
  while (t.session.call(kLater, kEmpty, done, &id) == Status::ok) {
    EXPECT_TRUE(id && id == t.session.last_call());
    ids.push_back(id);
  }
  const Config& c = t.client.engine.config();
  ASSERT_EQ(ids.size(), c.rpc.window + c.rpc.backlog);
  EXPECT_EQ(t.session.last_call(), ids.back()) << "a refused call is none";
  // Those that wait, then those under way.
  while (!ids.empty()) {
    ASSERT_EQ(t.session.last_call(), ids.back());
    ASSERT_EQ(t.session.cancel(ids.back()), Status::ok);
    ids.pop_back();
  }
  EXPECT_FALSE(t.session.last_call());
  ASSERT_TRUE(t.until([&] { return t.session.call(kLater, kEmpty, done, &id) == Status::ok; }));
  EXPECT_EQ(t.session.last_call(), id);
  EXPECT_EQ(t.session.close(), Status::ok);
  t.finish();
  EXPECT_FALSE(t.session.last_call());
}

TEST(RpcCalls, NoCallbackRunsInsideCancelOrClose) {
  Config config = rpc_config();
  config.rpc.min_rto = 10s;  // an audit takes longer than the default
  Calls t(config);
  ASSERT_EQ(t.call(kEcho, {}).status, Status::ok);
  std::vector<Status> ends;
  const auto done = [&](Reply& r) { ends.push_back(r.status()); };
  std::vector<CallId> ids;
  constexpr std::span<const std::byte> kEmpty;
  CallId id;
  EXPECT_FALSE(id);
  while (t.session.call(kLater, kEmpty, done, &id) == Status::ok) {
    EXPECT_TRUE(id && (ids.empty() || id != ids.back()));
    ids.push_back(id);
  }
  ASSERT_GT(ids.size(), 3u);
  EXPECT_EQ(id, ids.back()) << "a call that was refused leaves the id as it was";
  EXPECT_EQ(t.session.cancel({}), Status::invalid_argument);
  EXPECT_EQ(t.session.cancel(ids.front()), Status::ok);  // in flight
  EXPECT_EQ(t.session.cancel(ids.back()), Status::ok);   // in the backlog
  EXPECT_EQ(t.session.cancel(ids.front()), Status::invalid_argument);
  EXPECT_EQ(t.session.cancel(ids.back()), Status::invalid_argument);
  EXPECT_TRUE(t.client.engine.audit());
  EXPECT_TRUE(ends.empty());
  (void)t.client.poll();
  EXPECT_EQ(ends, (std::vector<Status>{Status::cancelled, Status::cancelled}));
  EXPECT_EQ(t.session.cancel(ids[1]), Status::ok);
  EXPECT_EQ(t.session.close(), Status::ok);
  EXPECT_TRUE(t.client.engine.audit());
  EXPECT_EQ(ends.size(), 2u);
  ASSERT_TRUE(t.until([&] { return t.session.state() == SessionState::closed; }));
  ASSERT_EQ(ends.size(), ids.size());
  EXPECT_EQ(std::count(ends.begin(), ends.end(), Status::cancelled), 3);
  EXPECT_EQ(std::count(ends.begin(), ends.end(), Status::flushed),
            static_cast<std::ptrdiff_t>(ids.size() - 3));
  t.finish();
}

TEST(RpcCalls, CancelledOnesEndOnceWithTheirEngine) {
  Calls t;
  ASSERT_EQ(t.call(kEcho, {}).status, Status::ok);
  std::vector<Status> ends;
  constexpr std::span<const std::byte> kEmpty;
  const auto done = [&](Reply& r) { ends.push_back(r.status()); };
  ASSERT_EQ(t.session.call(kLater, kEmpty, done), Status::ok);
  ASSERT_EQ(t.session.call(kLater, kEmpty, done), Status::ok);
  EXPECT_EQ(t.session.cancel(t.session.last_call()), Status::ok);
  t.client.engine = Engine();
  EXPECT_EQ(ends, (std::vector<Status>{Status::flushed, Status::cancelled}));
}

TEST(RpcCalls, WaitingOnesCanBeCancelled) {
  Calls t;
  (void)t.call(kEcho, {});
  std::vector<CallId> ids;
  while (t.begin(kLater, filled(60, 1)) == Status::ok) ids.push_back(t.session.last_call());
  const std::size_t taken = ids.size();
  EXPECT_EQ(t.session.cancel(ids.back()), Status::ok);
  EXPECT_EQ(t.session.cancel(ids[taken - 2]), Status::ok);
  EXPECT_EQ(t.ended[taken].times, 0);  // no callback runs inside cancel()
  (void)t.client.poll();
  EXPECT_EQ(t.ended[taken].status, Status::cancelled);
  std::size_t answered = 0;
  ASSERT_TRUE(t.until([&] {
    for (; !t.later.empty(); ++answered) {
      EXPECT_EQ(t.later.back().call.reply(t.later.back().bytes), Status::ok);
      t.later.pop_back();
    }
    return t.all_ended();
  }));
  EXPECT_EQ(answered, taken - 2);
  t.finish();
}

TEST(RpcCalls, AHandlerMayCallOthers) {
  Calls t;
  // The server calls the client before it replies.
  t.client.listen();
  ASSERT_TRUE(t.client.engine.serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
  auto back = t.server.engine.open_session(t.client.listener.address(), {});
  ASSERT_TRUE(back);
  Session inner = *back;
  ASSERT_TRUE(t.until([&] { return inner.ready(); }));
  struct Nested {
    Session* inner;
    PendingCall outer;
  };
  static Nested nested;
  nested.inner = &inner;
  ASSERT_TRUE(t.server.engine.serve(50, [](Request& r) {
    nested.outer = r.defer();
    const spinwire::ReplyCallback pass_on = [](Reply& reply) {
      EXPECT_EQ(nested.outer.reply(reply.bytes()), Status::ok);
    };
    EXPECT_EQ(nested.inner->call(kEcho, r.bytes(), pass_on), Status::ok);
  }));
  for (std::uint32_t i = 0; i < 20; ++i) EXPECT_EQ(t.call(50, filled(20, i)).bytes, filled(20, i));
  EXPECT_EQ(inner.close(), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.server.engine.rpc_stats().sessions == 0; }));
  t.finish();
}

TEST(RpcCalls, RequestsAndRepliesCanBeKept) {
  Calls t;
  std::vector<BufferSlice> kept;
  // Bytes in the device's memory are copied when they are kept.
  const auto& port = spinwire::detail::core_of(t.client.engine)->calls->port;
  const bool in_place = port != nullptr && port->sends_directly();
  ASSERT_TRUE(t.server.engine.serve(60, [&kept, in_place](Request& r) {
    const std::byte* const arrived = r.bytes().data();
    kept.push_back(r.keep());
    EXPECT_TRUE(in_place || kept.back().data() == arrived);
    EXPECT_EQ(r.reply(kept.back()), Status::ok);
  }));
  for (std::uint32_t i = 0; i < 20; ++i) {
    const Bytes bytes = filled(100 + i, i);
    Buffer b = t.client.buffer(bytes.size());
    std::copy(bytes.begin(), bytes.end(), b.data());
    bool done = false;
    ASSERT_EQ(t.session.call(60, b.slice(),
                             [&](Reply& r) {
                               const std::byte* const arrived = r.bytes().data();
                               kept.push_back(r.keep());
                               EXPECT_TRUE(in_place || kept.back().data() == arrived);
                               done = true;
                             }),
              Status::ok);
    ASSERT_TRUE(t.until([&] { return done; }));
  }
  ASSERT_EQ(kept.size(), 40u);
  for (std::uint32_t i = 0; i < 40; ++i)
    EXPECT_EQ(bytes_of(kept[i].bytes()), filled(100 + i / 2, i / 2)) << i;
  kept.clear();
  t.finish();
}

TEST(RpcCalls, RepliesCanBeWrittenWhereTheyAreSentFrom) {
  Calls t;
  const std::size_t longest = t.session.max_inline_call();
  std::size_t size = 0;
  std::set<const std::byte*> places;
  const spinwire::MethodHandler write = [&](Request& r) {
    EXPECT_TRUE(r.reserve_reply(longest + 1).empty());
    const std::span<std::byte> space = r.reserve_reply(size);
    ASSERT_EQ(space.size(), size);
    const Bytes bytes = filled(size, 7);
    std::copy(bytes.begin(), bytes.end(), space.begin());
    places.insert(space.data());
    EXPECT_EQ(r.commit_reply(size), Status::ok);
    EXPECT_TRUE(r.reserve_reply(1).empty()) << "it is over";
  };
  const spinwire::MethodHandler rash = [](Request& r) {
    EXPECT_EQ(r.commit_reply(1), Status::invalid_argument) << "none was asked for";
    EXPECT_EQ(r.reply(std::span<const std::byte>{}), Status::ok);
  };
  const spinwire::Method method = 9;
  ASSERT_TRUE(t.server.engine.serve(method, rash));
  EXPECT_EQ(t.call(method, filled(3, 1)).status, Status::ok);
  ASSERT_TRUE(t.server.engine.serve(method, write));
  for (const std::size_t n : {std::size_t{0}, kSlotPayloadBytes, kSlotPayloadBytes + 1, longest}) {
    size = n;
    EXPECT_EQ(t.call(method, filled(3, 1)).bytes, filled(n, 7)) << n;
  }
  size = 100;
  const spinwire::MethodHandler greedy = [&](Request& r) {
    ASSERT_EQ(r.reserve_reply(size).size(), size);
    EXPECT_EQ(r.commit_reply(size + 1), Status::invalid_argument) << "more than was asked for";
    EXPECT_EQ(r.commit_reply(0), Status::ok);
  };
  ASSERT_TRUE(t.server.engine.serve(method, greedy));
  EXPECT_EQ(t.call(method, filled(3, 1)).bytes, Bytes{});
  // The contents that another call left in the buffer must not leak.
  ASSERT_TRUE(t.server.engine.serve(method, rash));
  for (int i = 0; i < 20; ++i) EXPECT_EQ(t.call(method, filled(3, 1)).status, Status::ok);
  // One call at a time uses one buffer, and others only while the device has the last.
  EXPECT_LE(places.size(), 3u);
  t.finish();
}

TEST(RpcCalls, ASpaceForTheReplyIsACallsUntilItIsOver) {
  Calls t(rpc_config(), nullptr, 1);
  std::vector<PendingCall> calls;
  ASSERT_TRUE(t.server.engine.serve(9, [&](Request& r) {
    const auto space = r.reserve_reply(200);
    ASSERT_EQ(space.size(), 200u);
    std::fill(space.begin(), space.end(), r.bytes()[0]);
    calls.push_back(r.defer());
  }));
  ASSERT_EQ(t.begin(9, filled(1, 1)), Status::ok);
  ASSERT_TRUE(t.until([&] { return calls.size() == 1; }));
  EXPECT_NE(calls[0].max_reply(), 0u);
  EXPECT_EQ(t.session.cancel(t.session.last_call()), Status::ok);
  ASSERT_EQ(t.begin(9, filled(1, 2)), Status::ok);
  ASSERT_TRUE(t.until([&] { return calls.size() == 2; }));
  // For a call whose slot belongs to another call now.
  EXPECT_EQ(calls[0].max_reply(), 0u);
  EXPECT_TRUE(calls[0].reserve_reply(200).empty());
  EXPECT_EQ(calls[0].commit_reply(200), Status::not_connected);
  EXPECT_EQ(calls[1].commit_reply(201), Status::invalid_argument);
  EXPECT_EQ(calls[1].commit_reply(200), Status::ok);
  EXPECT_EQ(calls[1].commit_reply(200), Status::not_connected);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.ended.back().bytes, Bytes(200, filled(1, 2)[0]));
  t.finish();
}

TEST(RpcCalls, AReplyThatFailsIsNoAnswer) {
  Calls t;
  auto& server = t.server.engine;
  const auto fail = [](Request& r) {
    EXPECT_EQ(r.reply(Bytes(r.max_reply() + 1)), Status::message_too_long);
    EXPECT_EQ(r.commit_reply(1), Status::invalid_argument);
  };
  ASSERT_TRUE(server.serve(9, fail));
  Ended e = t.call(9, filled(4, 1));
  EXPECT_EQ(e.status, Status::refused);
  EXPECT_EQ(e.text, "the handler has not answered");
  ASSERT_TRUE(server.serve(9, [&fail](Request& r) {
    fail(r);
    EXPECT_EQ(r.refuse("too long"), Status::ok);
    EXPECT_EQ(r.reply(r.bytes()), Status::not_connected);
  }));
  EXPECT_EQ(t.call(9, filled(4, 2)).text, "too long");
  // A deferred call can still be answered.
  ASSERT_TRUE(server.serve(9, [&](Request& r) {
    t.later.push_back({r.defer(), bytes_of(r.bytes())});
    fail(r);
  }));
  ASSERT_EQ(t.begin(9, filled(4, 3)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  EXPECT_EQ(t.later[0].call.reply(t.later[0].bytes), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.ended.back().bytes, filled(4, 3));
  t.finish();
}

TEST(RpcCalls, ABufferThatGoesToManyHasItsHeadersApart) {
  Config config = rpc_config();
  config.rpc.min_rto = 10s;  // nothing is sent again as time is short
  Calls t(config);
  const Bytes bytes = filled(150, 4);
  int good = 0;
  {
    Buffer b = t.client.buffer(bytes.size());
    std::copy(bytes.begin(), bytes.end(), b.data());
    for (int i = 0; i < 4; ++i) {
      const auto done = [&](Reply& r) { good += bytes_of(r.bytes()) == bytes ? 1 : 0; };
      CallOptions wait;
      wait.post = spinwire::Post::defer;  // in one list; the first header is in the headroom
      ASSERT_EQ(t.session.call(kEcho, b.slice(), done, wait), Status::ok);
    }
  }
  ASSERT_TRUE(t.until([&] { return good == 4; }));
  // If a header were overwritten by another, that call would arrive twice and its own not at all.
  if (on_softverbs()) {
    EXPECT_EQ(t.client.engine.rpc_stats().retransmitted_requests, 0u);
    EXPECT_EQ(t.server.engine.rpc_stats().duplicates, 0u);
  }
  t.finish();
}

TEST(RpcCalls, ALateReplyTellsThatTheServerIsThere) {
  if (over_connections()) GTEST_SKIP() << "a connection finds that out by itself";
  std::uint64_t now = 1'000'000'000;
  Calls t(rpc_config(), &now);
  ASSERT_EQ(t.begin(kLater, filled(5, 1)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  EXPECT_EQ(t.session.cancel(t.session.last_call()), Status::ok);
  now += 1000;
  EXPECT_EQ(t.later[0].call.reply(filled(5, 2)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.client.engine.rpc_stats().late_replies == 1; }));
  EXPECT_EQ(spinwire::detail::core_of(t.client.engine)->calls->clients.find(0)->last_heard, now);
  t.finish();
}

TEST(RpcCalls, DeadlinesPassThoughTheClockHasSteppedBack) {
  std::uint64_t now = 3'600'000'000'000;
  Calls t(rpc_config(), &now);
  CallOptions options;
  options.timeout = 1s;
  ASSERT_EQ(t.begin(kLater, filled(5, 1), options), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  now = 1000;  // as in a restored virtual machine
  ASSERT_TRUE(t.until([&] {
    now += 1'000'000;
    return t.ended[0].times == 1;
  }));
  EXPECT_EQ(t.ended[0].status, Status::timed_out);
  EXPECT_GE(now, 900'000'000u);
  EXPECT_LT(now, 1'100'000'000u);
  EXPECT_EQ(t.call(kEcho, filled(5, 2)).status, Status::ok);
  t.finish();
}

TEST(RpcCalls, DeadlinesEndCallsAndTheSessionGoesOn) {
  std::uint64_t now = 1'000'000'000;
  Calls t(rpc_config(), &now);
  CallOptions short_one, long_one;
  short_one.timeout = 1s;
  long_one.timeout = 100s;
  ASSERT_EQ(t.begin(kLater, filled(5, 1), short_one), Status::ok);
  ASSERT_EQ(t.begin(kLater, filled(5, 2), long_one), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() >= 1; }));
  ASSERT_TRUE(t.until([&] {
    now += 1'000'000;
    return t.ended[0].times == 1;
  }));
  EXPECT_EQ(t.ended[0].status, Status::timed_out);
  EXPECT_GE(now, 2'000'000'000u);
  EXPECT_LT(now, 2'100'000'000u);
  ASSERT_TRUE(t.until([&] {
    now += 1'000'000;
    return t.later.size() == 2;
  }));
  EXPECT_EQ(t.later[1].call.reply(filled(5, 9)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.ended[1].bytes, filled(5, 9));
  EXPECT_EQ(t.server.engine.rpc_stats().served, 2u);
  t.finish();
}

TEST(RpcCalls, MethodsHaveNumbersOfSixteenBitsAndCanBeReplaced) {
  Calls t;
  auto& server = t.server.engine;
  const Bytes one = filled(1, 1), two = filled(2, 2);
  for (const spinwire::Method method : {spinwire::Method{0}, spinwire::Method{65535}}) {
    ASSERT_TRUE(server.serve(method, [&one](Request& r) { (void)r.reply(one); }));
    EXPECT_EQ(t.call(method, {}).bytes, one);
    ASSERT_TRUE(server.serve(method, [&two](Request& r) { (void)r.reply(two); }));
    EXPECT_EQ(t.call(method, {}).bytes, two);
  }
  EXPECT_EQ(t.call(65534, {}).status, Status::unsupported);
  ASSERT_TRUE(server.serve(0, nullptr));
  EXPECT_EQ(t.call(0, {}).status, Status::unsupported);
  t.finish();
}

}  // namespace
}  // namespace rpc_calls_test
