// Engine::set_reply_writable_handler(): an answer that found no memory is told when there is some.
#include <algorithm>

#include "rpc/counted_exceptions.h"
#include "rpc/long_calls.h"

namespace rpc_reply_writable_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

struct Writable : LongCalls {
  explicit Writable(const Config& config = long_call_config()) : LongCalls(config) {
    EXPECT_EQ(server.engine.set_reply_writable_handler([this] {
      ++writable;
      if (on_writable) on_writable();
    }),
              Status::ok);
  }
  /// Takes all blocks of the server's send pool, at least one of them with `capacity`.
  void exhaust(std::size_t capacity = 256) {
    held.push_back(server.engine.allocate(capacity));
    for (std::size_t size = 1u << 20; size != 0; size /= 2) {
      while (Buffer b = server.engine.allocate(size)) held.push_back(std::move(b));
    }
  }
  /// Gives one of the blocks back that hold so many bytes, and no other.
  void give_back(std::size_t capacity) {
    const auto found = std::find_if(held.begin(), held.end(),
                                    [&](const Buffer& b) { return b.capacity() == capacity; });
    ASSERT_NE(found, held.end());
    held.erase(found);
  }
  /// A call that the server has deferred, over a datagram, or over a connection.
  PendingCall deferred(bool over_connection, const CallOptions& options = {}) {
    later.clear();
    EXPECT_EQ(begin(kLater, filled(over_connection ? 40'000 : 20, 1), options), Status::ok);
    EXPECT_TRUE(until([&] { return later.size() == 1; }));
    return later[0].call;
  }
  void poll_some() {
    for (int i = 0; i < 100; ++i) (void)(client.poll() + server.poll());
  }
  std::vector<Buffer> held;
  std::function<void()> on_writable;
  int writable = 0;
};

/// A way to answer. Each needs a block.
struct Way {
  const char* name;
  bool over_connection;
  Status (*answer)(PendingCall call, const BufferSlice& own);
};
const Way kWays[] = {
    {"a copy", false,
     [](PendingCall call, const BufferSlice&) { return call.reply(filled(200, 2)); }},
    {"a callback", false,
     [](PendingCall call, const BufferSlice& own) { return call.reply(own, [](Status) {}); }},
    {"a reserved reply", false,
     [](PendingCall call, const BufferSlice&) {
       return call.reserve_reply(200).empty() ? Status::no_buffer : call.commit_reply(200);
     }},
    {"a short copy over a connection", true,
     [](PendingCall call, const BufferSlice&) { return call.reply(filled(20, 2)); }},
    {"a refusal over a connection", true,
     [](PendingCall call, const BufferSlice&) { return call.refuse("no"); }},
    {"a refusal with a code over a connection", true,
     [](PendingCall call, const BufferSlice&) { return call.refuse(7, "no"); }},
};

TEST(RpcReplyWritable, RunsOnceWhenTheSendPoolHasABlock) {
  for (const Way& way : kWays) {
    SCOPED_TRACE(way.name);
    Writable t;
    const PendingCall call = t.deferred(way.over_connection);
    const Buffer own = t.server.buffer(200);
    t.exhaust();
    EXPECT_EQ(way.answer(call, own.slice()), Status::no_buffer);
    EXPECT_EQ(way.answer(call, own.slice()), Status::no_buffer);
    t.poll_some();
    EXPECT_EQ(t.writable, 0);
    Status answered = Status::no_buffer;
    t.on_writable = [&] { answered = way.answer(call, own.slice()); };
    t.held.clear();
    ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
    EXPECT_EQ(answered, Status::ok);
    EXPECT_EQ(t.writable, 1);
    t.poll_some();
    EXPECT_EQ(t.writable, 1);
  }
}

// It takes a block of just its length: the last one of its class may become free.
TEST(RpcReplyWritable, AReplyIntoTheClientsMemoryIsToldToo) {
  constexpr std::size_t kSize = 4096;
  Writable t;
  const Buffer room = t.room(kSize);
  const PendingCall call = t.deferred(false, t.into(room));
  t.exhaust(kSize);
  EXPECT_EQ(call.reply(filled(kSize, 3)), Status::no_buffer);
  t.on_writable = [&] { EXPECT_EQ(call.reply(filled(kSize, 3)), Status::ok); };
  t.give_back(kSize);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.writable, 1);
  EXPECT_EQ(t.ended[0].status, Status::ok);
}

// Blocks of other classes do not serve the shorter one.
TEST(RpcReplyWritable, ALongerAnswerDoesNotWaitForAShorterOne) {
  Writable t;
  const PendingCall call = t.deferred(true);
  t.exhaust(1024);
  EXPECT_EQ(call.reply(filled(20, 2)), Status::no_buffer);
  EXPECT_EQ(call.reply(filled(600, 2)), Status::no_buffer);
  t.poll_some();
  EXPECT_EQ(t.writable, 0);
  t.on_writable = [&] { EXPECT_EQ(call.reply(filled(600, 2)), Status::ok); };
  t.give_back(1024);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.writable, 1);
}

// Polls that look for a block are no allocations, neither served nor refused.
TEST(RpcReplyWritable, LookingForABlockCountsNothing) {
  Writable t;
  const PendingCall call = t.deferred(false);
  t.exhaust();
  EXPECT_EQ(call.reply(filled(200, 2)), Status::no_buffer);
  const auto count = [&t] {
    const spinwire::MemoryStats pool = t.server.engine.memory_stats(Pool::send);
    return std::pair(pool.allocations, pool.refusals);
  };
  const auto before = count();
  t.poll_some();
  EXPECT_EQ(count(), before);
  t.on_writable = [&] { EXPECT_EQ(call.reply(filled(200, 2)), Status::ok); };
  t.held.clear();
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
}

class RpcThrowingReplyWritable : public CountsThrownExceptions {};

TEST_F(RpcThrowingReplyWritable, RunsAgainForTheNextRefusalOnly) {
  Writable t;
  const PendingCall call = t.deferred(false);
  t.exhaust();
  EXPECT_EQ(call.reply(filled(200, 2)), Status::no_buffer);
  t.on_writable = [] { fail(); };
  t.held.clear();
  ASSERT_TRUE(t.until([&] { return t.writable == 1; }));
  t.poll_some();
  EXPECT_EQ(t.writable, 1);
  EXPECT_EQ(logged, 1);
  EXPECT_TRUE(t.session.ready());
  EXPECT_EQ(t.server.engine.rpc_stats().served_sessions, 1u);
  t.exhaust();
  EXPECT_EQ(call.reply(filled(200, 2)), Status::no_buffer);
  t.on_writable = [&] { EXPECT_EQ(call.reply(filled(200, 2)), Status::ok); };
  t.held.clear();
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.writable, 2);
  EXPECT_EQ(t.ended[0].status, Status::ok);
  t.later.clear();
  t.finish_long_calls();
}

TEST(RpcReplyWritable, TheCallbackMayDestroyTheEngine) {
  Writable t;
  const PendingCall call = t.deferred(false);
  t.exhaust();
  EXPECT_EQ(call.reply(filled(200, 2)), Status::no_buffer);
  Status inside = Status::no_buffer;
  t.on_writable = [&] {
    t.server.engine = Engine();
    inside = call.reply(filled(200, 2));  // the engine ends when poll() returns
  };
  t.held.clear();
  ASSERT_TRUE(engine_test::until({&t.client, &t.server}, [&] { return t.writable == 1; }));
  EXPECT_EQ(inside, Status::ok);
  EXPECT_EQ(t.server.engine.poll(), -static_cast<int>(Status::not_connected));
  EXPECT_EQ(call.reply(filled(200, 2)), Status::not_connected);
  t.later.clear();
  t.client.stale_allowed = true;
  ASSERT_TRUE(engine_test::until(
      {&t.client}, [&] { return t.all_ended() && t.client.engine.rpc_stats().sessions == 0; }));
  EXPECT_EQ(t.writable, 1);
  t.client.expect_clean();
}

// The calls that wait for memory are in progress, so that they are answered.
TEST(RpcReplyWritable, TheCallbackMayCloseTheSession) {
  Config config = long_call_config();
  config.rpc.min_rto = 10ms;  // after which a client looks whether its last call is over
  for (const bool over_connection : {false, true}) {
    SCOPED_TRACE(over_connection);
    Writable t(config);
    const PendingCall call = t.deferred(over_connection);
    t.exhaust();
    EXPECT_EQ(call.reply(filled(200, 2)), Status::no_buffer);
    spinwire::ServedSession served;
    (void)t.server.engine.visit_served_sessions(
        0, 64, [to = &served](const spinwire::ServedSessionInfo& info) { *to = info.session; });
    t.on_writable = [&] {
      EXPECT_EQ(served.close({spinwire::GoodbyeReason::draining, 0ms}), Status::ok);
      EXPECT_EQ(call.reply(filled(200, 2)), Status::ok);
    };
    t.held.clear();
    ASSERT_TRUE(t.until([&] { return t.closed.size() == 1; }));
    EXPECT_EQ(t.writable, 1);
    EXPECT_EQ(t.ended[0].status, Status::ok);
    EXPECT_EQ(call.reply(filled(200, 2)), Status::not_connected);
    t.later.clear();
    ASSERT_TRUE(t.until([&] { return t.server.engine.rpc_stats().served_sessions == 0; }));
  }
}

TEST(RpcReplyWritable, AHandlerDefersWhatItCannotAnswer) {
  Writable t;
  std::deque<PendingCall> waiting;
  const auto answer_waiting = [&waiting] {
    while (!waiting.empty() && waiting.front().reply(filled(200, 2)) == Status::ok)
      waiting.pop_front();
  };
  t.on_writable = answer_waiting;
  ASSERT_TRUE(t.server.engine.serve(7, [&](Request& request) {
    if (request.reply(filled(200, 2)) != Status::ok) waiting.push_back(request.defer());
  }));
  // The first reply opens the window.
  ASSERT_EQ(t.begin(kEcho, filled(20, 1)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  t.exhaust();
  for (int i = 0; i < 8; ++i) ASSERT_EQ(t.begin(7, filled(20, 1)), Status::ok);
  ASSERT_TRUE(t.until([&] { return waiting.size() == 8; }));
  EXPECT_EQ(t.writable, 0);
  // One block, and later all.
  t.held.pop_back();
  ASSERT_TRUE(t.until([&] { return t.writable == 1; }));
  t.held.clear();
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  for (const Ended& e : t.ended) EXPECT_EQ(e.status, Status::ok);
  EXPECT_GE(t.writable, 1);
  EXPECT_LE(t.writable, 8);
  t.finish_long_calls();
}

TEST(RpcReplyWritable, AnEngineWithoutAHandlerWaitsForNothing) {
  Writable t;
  const PendingCall call = t.deferred(false);
  t.exhaust();
  EXPECT_EQ(call.reply(filled(200, 2)), Status::no_buffer);
  EXPECT_EQ(t.server.engine.set_reply_writable_handler({}), Status::ok);
  EXPECT_EQ(call.reply(filled(200, 2)), Status::no_buffer);
  t.held.clear();
  t.poll_some();
  EXPECT_EQ(t.writable, 0);
  EXPECT_EQ(call.reply(filled(200, 2)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  t.later.clear();
  t.finish_long_calls();
}

TEST(RpcReplyWritable, ACallThatIsOverIsToldAndNotAnswered) {
  Writable t;
  const PendingCall call = t.deferred(false);
  t.exhaust();
  EXPECT_EQ(call.reply(filled(200, 2)), Status::no_buffer);
  EXPECT_EQ(t.session.close(), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.server.engine.rpc_stats().served_sessions == 0; }));
  Status answered = Status::ok;
  t.on_writable = [&] { answered = call.reply(filled(200, 2)); };
  t.held.clear();
  ASSERT_TRUE(t.until([&] { return t.writable == 1; }));
  EXPECT_EQ(answered, Status::not_connected);
}

TEST(RpcReplyWritable, TheCallbackMaySetAnother) {
  Writable t;
  const PendingCall call = t.deferred(false);
  t.exhaust();
  EXPECT_EQ(call.reply(filled(200, 2)), Status::no_buffer);
  t.on_writable = [&] {
    EXPECT_EQ(t.server.engine.set_reply_writable_handler({}), Status::ok);
    EXPECT_EQ(call.reply(filled(200, 2)), Status::ok);
  };
  t.held.clear();
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.writable, 1);
}

}  // namespace
}  // namespace rpc_reply_writable_test
