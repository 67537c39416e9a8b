// The backlog of calls: its memory is allocated and freed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "rpc/rpc_ends.h"
#include "rpc/rpc_state.h"

namespace rpc_waiting_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

TEST(RpcBacklog, TakesItsRoomFromTheSendPoolWhileItIsNeeded) {
  std::uint64_t now = 1'000'000'000;
  Calls t(rpc_config(), &now);
  (void)t.call(kEcho, {});  // the server now has receives for the whole window
  const auto used = [&] { return t.client.engine.memory_stats(Pool::send).blocks_used; };
  EXPECT_EQ(used(), 0u);
  for (std::uint32_t i = 0; i < t.client.engine.config().rpc.window; ++i)
    ASSERT_EQ(t.begin(kLater, filled(4, i)), Status::ok);
  EXPECT_EQ(used(), 0u);
  // No memory is left: a call that cannot be sent at once is refused.
  std::vector<Buffer> all;
  for (std::size_t size = 512u << 10; size >= 256; size /= 2) {
    for (Buffer b; (b = t.client.engine.allocate(size));) all.push_back(std::move(b));
  }
  EXPECT_EQ(t.begin(kEcho, filled(4, 99)), Status::no_buffer);
  all.clear();
  ASSERT_EQ(t.begin(kEcho, filled(4, 99)), Status::ok);
  EXPECT_EQ(used(), 1u);
  ASSERT_TRUE(t.until([&] {
    for (const auto& each : t.later) (void)each.call.reply(each.bytes);
    return t.all_ended();
  }));
  EXPECT_EQ(t.ended.back().bytes, filled(4, 99));
  EXPECT_EQ(used(), 0u);  // only because no call waits
  EXPECT_TRUE(t.session.ready());
  t.finish();
}

TEST(RpcBacklog, WhatIsCancelledMakesRoomWithTheNextPoll) {
  Calls t;
  (void)t.call(kEcho, {});  // the server now has receives for the whole window
  const Config& c = t.client.engine.config();
  std::vector<CallId> names;
  while (t.begin(kLater, filled(4, 1)) == Status::ok) names.push_back(t.session.last_call());
  ASSERT_EQ(names.size(), c.rpc.window + c.rpc.backlog);
  // From the middle, so that calls wait before and after it.
  const std::size_t middle = c.rpc.window + c.rpc.backlog / 2;
  for (const std::size_t i : {middle, middle + 1, std::size_t{c.rpc.window}}) {
    ASSERT_EQ(t.session.cancel(names[i]), Status::ok);
    EXPECT_EQ(t.session.cancel(names[i]), Status::invalid_argument);
  }
  (void)t.client.poll();
  for (std::uint32_t i = 0; i < 3; ++i) ASSERT_EQ(t.begin(kEcho, filled(4, 90 + i)), Status::ok);
  EXPECT_EQ(t.begin(kEcho, filled(4, 99)), Status::would_block);
  ASSERT_TRUE(t.until([&] {
    for (const auto& each : t.later) (void)each.call.reply(each.bytes);
    return t.all_ended();
  }));
  const auto cancelled = std::count_if(
      t.ended.begin(), t.ended.end(), [](const Ended& e) { return e.status == Status::cancelled; });
  EXPECT_EQ(cancelled, 3);
  for (std::uint32_t i = 0; i < 3; ++i)
    EXPECT_EQ(t.ended[t.ended.size() - 3 + i].bytes, filled(4, 90 + i));
  t.finish();
}

TEST(RpcBacklog, CallbacksOfAClosingSessionFindOnlyWhatStillWaits) {
  Calls t(rpc_config(), nullptr, 1);
  (void)t.call(kEcho, {});
  // The backlog's old contents must not be taken for calls.
  {
    std::vector<Buffer> all;
    const std::size_t room =
        t.client.engine.config().rpc.backlog * sizeof(spinwire::rpc::BackloggedCall);
    while (Buffer b = t.client.engine.allocate(room)) {
      std::memset(b.data(), 0x41, b.size());
      all.push_back(std::move(b));
    }
  }
  std::vector<Status> ends;
  std::vector<CallId> names;
  constexpr CallId kStale{0x41414141};
  const auto one = [&] {
    const auto done = [&](Reply& r) {
      ends.push_back(r.status());
      EXPECT_EQ(t.session.cancel(kStale), Status::invalid_argument);
      for (const CallId& name : names) (void)t.session.cancel(name);
    };
    ASSERT_EQ(t.session.call(kLater, std::span<const std::byte>{}, done), Status::ok);
    names.push_back(t.session.last_call());
  };
  for (int i = 0; i < 5; ++i) one();
  EXPECT_EQ(t.session.close(), Status::ok);
  EXPECT_TRUE(ends.empty());
  (void)t.client.poll();
  EXPECT_EQ(ends, std::vector<Status>(5, Status::flushed));
  t.finish();
}

TEST(RpcBacklog, DeadlinesOfThoseThatWaitPassInAnyOrder) {
  std::uint64_t now = 1'000'000'000;
  Calls t(rpc_config(), &now, 1);
  (void)t.call(kEcho, {});
  ASSERT_EQ(t.begin(kLater, filled(4, 0)), Status::ok);
  for (const int ms : {900, 30, 700, 20, 800, 10}) {
    CallOptions options;
    options.timeout = std::chrono::milliseconds(ms);
    ASSERT_EQ(t.begin(kEcho, filled(4, 1), options), Status::ok);
  }
  const auto late = [&] {
    return std::count_if(t.ended.begin(), t.ended.end(), [](const Ended& e) {
      return e.times == 1 && e.status == Status::timed_out;
    });
  };
  ASSERT_TRUE(t.until([&] {
    now += 1'000'000;
    return late() == 3;
  }));
  EXPECT_LT(now, 1'500'000'000u);
  ASSERT_TRUE(t.until([&] {
    for (const auto& each : t.later) (void)each.call.reply(each.bytes);
    return t.all_ended();
  }));
  EXPECT_EQ(late(), 3);
  t.finish();
}

TEST(RpcBacklog, WhatTheSendQueueHasNoRoomForIsNotLost) {
  Config c = over(RpcTransport::datagram);
  c.rpc.direct_datagrams = spinwire::DirectPath::off;
  c.rpc.send_depth = 64;
  c.rpc.backlog = 64;
  Calls t(c, nullptr, 64);
  (void)t.call(kEcho, {});
  std::vector<Session> sessions{t.session, t.open(64)};
  ASSERT_TRUE(t.until([&] { return sessions[1].ready(); }));
  std::uint32_t begun = 0, ended = 0;
  const auto done = [&ended](Reply& r) {
    EXPECT_EQ(r.status(), Status::ok);
    ++ended;
  };
  // No poll handles completions, so more calls begin than fit. Each keeps its request in place.
  Buffer request = t.client.buffer(300);
  for (Session& s : sessions) {
    while (s.call(kEcho, request.slice(), done) == Status::ok) ++begun;
  }
  EXPECT_GT(begun, 2 * c.rpc.send_depth);
  EXPECT_EQ(t.client.engine.rpc_stats().send_queue_full, 0u);
  ASSERT_TRUE(t.until([&] { return ended == begun; }));
  EXPECT_EQ(t.client.engine.rpc_stats().send_queue_full, 0u);
  EXPECT_EQ(sessions[1].close(), Status::ok);
  request.reset();
  t.finish();
}

}  // namespace
}  // namespace rpc_waiting_test
