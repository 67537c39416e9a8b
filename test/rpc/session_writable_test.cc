// SessionOptions::on_writable: a call that found no room is told when there is room.
#include "rpc/long_calls.h"

namespace rpc_session_writable_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

struct Writing : LongCalls {
  Writing() : LongCalls(long_call_config()) {
    SessionOptions options;
    options.on_writable = [this](Session) {
      ++writable;
      if (on_writable) on_writable();
    };
    EXPECT_EQ(session.close(), Status::ok);
    session = client.engine.open_session(server.listener.address(), options).value();
    EXPECT_TRUE(until([&] { return session.ready(); }));
  }
  std::function<void()> on_writable;
  int writable = 0;
};

TEST(RpcSessionWritable, RunsOnceWhenTheBacklogHasRoom) {
  Writing t;
  Status status = Status::ok;
  while (status == Status::ok) status = t.begin(kLater, filled(20, 1));
  EXPECT_EQ(status, Status::would_block);
  EXPECT_EQ(t.begin(kLater, filled(20, 1)), Status::would_block);
  ASSERT_TRUE(t.until([&] { return !t.later.empty(); }));
  for (int i = 0; i < 100; ++i) (void)(t.client.poll() + t.server.poll());
  EXPECT_EQ(t.writable, 0);
  ASSERT_TRUE(t.until([&] {
    for (auto& each : t.later) (void)each.call.reply(Bytes());
    t.later.clear();
    return t.writable != 0;
  }));
  EXPECT_EQ(t.writable, 1);
  EXPECT_EQ(t.begin(kEcho, filled(20, 1)), Status::ok);
  ASSERT_TRUE(t.until([&] {
    for (auto& each : t.later) (void)each.call.reply(Bytes());
    t.later.clear();
    return t.all_ended();
  }));
  EXPECT_EQ(t.writable, 1);
  t.finish_long_calls();
}

TEST(RpcSessionWritable, ACallerNeedsNoQueueOfItsOwn) {
  Writing t;
  for (const std::size_t size : {20u, 40'000u}) {
    std::uint32_t begun = 0;
    const std::uint32_t goal = size == 20 ? 5000 : 200;
    const spinwire::Method method = size == 20 ? spinwire::Method{kEcho} : spinwire::Method{kFold};
    const int before = t.writable;
    const auto go_on = [&] {
      while (begun < goal) {
        if (const Status status = t.begin(method, filled(size, begun)); status != Status::ok) {
          EXPECT_EQ(status, Status::would_block);
          return;
        }
        ++begun;
      }
    };
    t.on_writable = go_on;
    go_on();
    ASSERT_TRUE(t.until([&] { return begun == goal && t.all_ended(); }));
    for (const Ended& e : t.ended) EXPECT_EQ(e.status, Status::ok);
    EXPECT_GT(t.writable - before, 5);
  }
  t.finish_long_calls();
}

TEST(RpcSessionWritable, ASessionThatEndsFirstIsNotWritable) {
  Writing t;
  while (t.begin(kLater, filled(20, 1)) == Status::ok) {
  }
  EXPECT_EQ(t.session.close(), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.writable, 0);
  t.later.clear();
  t.finish_long_calls();
}

}  // namespace
}  // namespace rpc_session_writable_test
