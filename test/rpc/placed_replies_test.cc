// Replies that the client places in the memory of its calls, because both ends have direct
// messages: late ones, ones that are cut short, and servers that can offer less.
#include <algorithm>
#include <functional>

#include "agent/agent.h"
#include "base/internals.h"
#include "rpc/bare_engine.h"
#include "rpc/client_session.h"
#include "rpc/long_calls.h"
#include "rpc/transport/connection_transport.h"

namespace rpc_placed_replies_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::DirectPath;
using spinwire::agent::Agent;
using spinwire::rpc::ConnectionClient;

constexpr std::size_t kLong = 300'000;

/// A server that replies later, and a client with memory for the replies.
struct Placed : LongCalls {
  using LongCalls::LongCalls;
  [[nodiscard]] EngineCore& core(const Node& node) const {
    return *spinwire::detail::core_of(node.engine);
  }
  [[nodiscard]] bool places() const { return core(client).context.direct != nullptr; }
  [[nodiscard]] std::size_t max_eager() const {
    return client.engine.config().connections.eager_bytes;
  }
  /// The client's end of the connection for long calls.
  [[nodiscard]] ConnectionClient& end() const {
    return *spinwire::rpc::find_client(*core(client).calls,
                                       spinwire::detail::Internals::name(session))
                ->connection;
  }
  /// Begins a call whose memory is `b`, and whose handler answers later. The memory is filled when
  /// the call ends.
  void begin_later(const Buffer& b, CallOptions options = {}) {
    options.reply_into = b.slice();
    std::byte* const memory = b.data();
    const std::size_t size = b.size();
    const std::size_t calls = later.size();
    times = 0;
    const auto done = [this, memory, size](Reply& r) {
      ++times;
      status = r.status();
      std::fill_n(memory, size, std::byte{0x11});
    };
    ASSERT_EQ(session.call(kLater, std::span<const std::byte>(filled(9, 1)), done, options),
              Status::ok);
    ASSERT_TRUE(until([&] { return later.size() == calls + 1; }));
  }
  void settle(int rounds = 200) {
    (void)until([&] { return rounds-- == 0; });
  }
  static bool is_untouched(const Buffer& b) {
    return std::ranges::all_of(b.bytes(), [](std::byte x) { return x == std::byte{0x11}; });
  }
  int times = 0;  ///< of done()
  Status status = Status::system;
};
const char* const kNoPlaces = "the device opens the memory of replies";

TEST(RpcPlacedReplies, LateOnesAreNoFault) {
  std::uint64_t now = 1'000'000'000;
  Placed t(long_call_config(), &now);
  if (!t.places()) GTEST_SKIP() << kNoPlaces;
  Buffer b = t.room(kLong);
  std::uint64_t late = 0;
  enum class End : std::uint8_t { cancelled_before, cancelled_after, timed_out };
  for (const End end : {End::cancelled_before, End::cancelled_after, End::timed_out}) {
    for (const std::size_t size :
         {t.max_eager() - 32, t.max_eager() - 31, t.max_eager(), t.max_eager() + 1}) {
      SCOPED_TRACE(size);
      CallOptions options;
      if (end == End::timed_out) options.timeout = 5ms;
      t.begin_later(b, options);
      if (end == End::timed_out) {
        now += 6'000'000;
      } else {
        EXPECT_EQ(t.session.cancel(t.session.last_call()), Status::ok);
      }
      const auto ends = [&] { return until({&t.client}, [&] { return t.times != 0; }); };
      if (end != End::cancelled_before) {
        ASSERT_TRUE(ends());
      }
      EXPECT_EQ(t.times, end == End::cancelled_before ? 0 : 1);
      EXPECT_EQ(t.later.back().call.reply(filled(size, 1)), Status::ok) << "it does not know";
      for (int i = 0; i < 4; ++i) (void)t.server.poll();
      ASSERT_TRUE(ends());
      EXPECT_EQ(t.status, end == End::timed_out ? Status::timed_out : Status::cancelled);
      t.settle();
      EXPECT_EQ(t.client.engine.rpc_stats().late_replies, ++late);
      EXPECT_EQ(t.times, 1);
      EXPECT_TRUE(Placed::is_untouched(b));
      EXPECT_EQ(t.call(kFold, filled(kLong, 2)).bytes, fold_of(filled(kLong, 2)));
      t.expect_into(kMake, number(20'000), filled(20'000, 20'000));
      EXPECT_EQ(t.client.engine.stats().connected, 1u);
    }
  }
  b.reset();
  t.finish_long_calls();
}

struct Ticks {
  std::uint64_t now = 1'000'000'000;
};

/// A client whose READs take 20 ms each, which the test lets pass. It has two at once.
struct Held : Ticks, Placed {
  Held() : Placed(config(), &now) {
    each_turn = [this] { now += 100'000; };
  }
  static Config config() {
    Config c = long_call_config();
    c.connections.peer_timeout = 100s;
    c.connections.connect_timeout = c.connections.handshake_timeout = 1000s;
    return c;
  }
  void delay(Nanoseconds time) const {
    spinwire::softverbs::FaultPlan plan;
    plan.delay_min = plan.delay_max = time;
    const auto set = spinwire::softverbs::set_faults(core(client).context.device->context(), plan);
    EXPECT_TRUE(set) << set.error().message();
  }
  /// Begins a call, of whose reply two parts have come, and the third has not.
  void cut(const Buffer& b, const CallOptions& options = {}) {
    begin_later(b, options);
    delay(20ms);
    Buffer reply = server.buffer(kLong);
    std::ranges::fill(reply.bytes(), std::byte{0x33});
    EXPECT_EQ(later.back().call.reply(reply.slice()), Status::ok);
    ASSERT_TRUE(until([&] { return b.data()[0] == std::byte{0x33}; }));
    EXPECT_EQ(b.data()[kLong - 1], std::byte{0xee});
    EXPECT_EQ(times, 0);
    expect_consistent();
  }
  void expect_consistent() const {
    for (const Node* const node : {&client, &server}) {
      if (!node->engine) continue;
      const auto good = core(*node).audit();
      EXPECT_TRUE(good) << good.error().message();
    }
  }
  /// Waits for the end of the call. Its memory does not change afterwards.
  void expect_end(const Buffer& b, Status expected) {
    ASSERT_TRUE(until([&] {
      expect_consistent();
      return times != 0;
    }));
    expect_over(b, expected);
  }
  void expect_over(const Buffer& b, Status expected) {
    settle(1000);
    EXPECT_EQ(times, 1);
    EXPECT_EQ(status, expected) << to_string(status);
    EXPECT_TRUE(is_untouched(b)) << "the memory has changed since the call ended";
  }
  void finish_held(Buffer& b) {
    delay(0ms);
    b.reset();
    finish_long_calls();
  }
};

TEST(RpcPlacedReplies, ACancelledCallEndsWhenItsReplyHasCome) {
  Held t;
  if (!t.places()) GTEST_SKIP() << kNoPlaces;
  Buffer b = t.room(kLong);
  t.cut(b);
  EXPECT_EQ(t.session.cancel(t.session.last_call()), Status::ok);
  t.expect_end(b, Status::cancelled);
  EXPECT_EQ(t.client.engine.stats().connected, 1u);
  t.finish_held(b);
}

TEST(RpcPlacedReplies, ACallThatTimesOutEndsWhenItsReplyHasCome) {
  Held t;
  if (!t.places()) GTEST_SKIP() << kNoPlaces;
  Buffer b = t.room(kLong);
  CallOptions options;
  options.timeout = 30ms;
  t.cut(b, options);
  t.expect_end(b, Status::timed_out);
  EXPECT_EQ(t.client.engine.stats().connected, 1u);
  t.finish_held(b);
}

// The time for a server that does not answer does not count while our own READs take long.
TEST(RpcPlacedReplies, ACallThatTimesOutWaitsForAReplyThatComesSlowly) {
  Held t;
  if (!t.places()) GTEST_SKIP() << kNoPlaces;
  t.each_turn = [&t] { t.now += 5'000'000; };
  const Nanoseconds close = t.client.engine.config().connections.close_timeout;
  Buffer b = t.room(kLong);
  CallOptions options;
  options.timeout = 30ms;
  t.begin_later(b, options);
  t.delay(3 * close);  // of each of two READs, one after the other
  Buffer reply = t.server.buffer(kLong);
  EXPECT_EQ(t.later.back().call.reply(reply.slice()), Status::ok);
  const std::uint64_t begun = t.now;
  ASSERT_TRUE(t.until([&] { return t.times != 0; }));
  EXPECT_GT(t.now - begun, static_cast<std::uint64_t>(Nanoseconds(3 * close).count()));
  t.expect_over(b, Status::timed_out);
  EXPECT_EQ(t.client.engine.stats().connected, 1u);
  reply.reset();
  t.finish_held(b);
}

TEST(RpcPlacedReplies, AnAbandonedCallEndsWhenItsReplyCannotCome) {
  enum class Way : std::uint8_t { session_closes, server_ends, connection_is_lost };
  for (const Way way : {Way::session_closes, Way::server_ends, Way::connection_is_lost}) {
    SCOPED_TRACE(static_cast<int>(way));
    Held t;
    if (!t.places()) GTEST_SKIP() << kNoPlaces;
    Buffer b = t.room(kLong);
    t.cut(b);
    if (way == Way::session_closes) {
      EXPECT_EQ(t.session.close(), Status::ok);
    } else if (way == Way::server_ends) {
      t.later.clear();
      t.server.engine = Engine();
    } else {
      auto& calls = *t.core(t.client).calls;
      Agent* const a = spinwire::rpc::agent_of(calls, t.end());
      ASSERT_NE(a, nullptr);
      spinwire::agent::fail(calls.context, *a, {Status::peer_lost, "test", "cut", "none"});
    }
    if (way == Way::server_ends) {
      ASSERT_TRUE(until({&t.client}, [&] {
        t.now += 100'000;
        return t.times != 0;
      }));
      EXPECT_TRUE(t.status == Status::peer_lost || t.status == Status::flushed)
          << to_string(t.status);
      for (int i = 0; i < 1000; ++i) {
        t.now += 100'000;
        (void)t.client.poll();
      }
      EXPECT_EQ(t.times, 1);
      EXPECT_TRUE(Placed::is_untouched(b)) << "the memory has changed since the call ended";
      continue;
    }
    t.expect_end(b, way == Way::session_closes ? Status::flushed : Status::peer_lost);
    t.delay(0ms);
    if (way == Way::connection_is_lost) {
      t.expect_into(kMake, number(kLong), filled(kLong, kLong));
    }
    t.server.stale_allowed = t.client.stale_allowed = true;
    t.finish_held(b);
  }
}

TEST(RpcPlacedReplies, AnEngineThatEndsLeavesTheMemoryAlone) {
  Held t;
  if (!t.places()) GTEST_SKIP() << kNoPlaces;
  Buffer b = t.room(kLong);
  t.cut(b);
  t.client.engine = Engine();
  EXPECT_EQ(t.times, 1);
  EXPECT_EQ(t.status, Status::flushed) << to_string(t.status);
  for (int i = 0; i < 1000; ++i) {
    t.now += 100'000;
    (void)t.server.poll();
  }
  EXPECT_EQ(t.times, 1);
  EXPECT_TRUE(Placed::is_untouched(b)) << "the memory has changed since the call ended";
}

Config without_remote_read(Config c = long_call_config()) {
  c.queue_pair.access = spinwire::Access::remote_write;
  return c;
}
Config without_direct_messages(Config c = long_call_config()) {
  c.connections.direct_messages = DirectPath::off;
  return c;
}

TEST(RpcPlacedReplies, AServerThatLetsNobodyReadOffersMemoryOfItsPools) {
  Placed t(without_remote_read(), long_call_config());
  if (!t.places()) GTEST_SKIP() << kNoPlaces;
  for (const std::uint32_t size : {0u, 1u, 5000u, 300'000u})
    t.expect_into(kMake, number(size), filled(size, size));
  t.finish_long_calls();
}

TEST(RpcPlacedReplies, AServerThatCanOfferNothingSaysSo) {
  Placed t(without_direct_messages(without_remote_read()), long_call_config());
  if (!t.places()) GTEST_SKIP() << kNoPlaces;
  Buffer b = t.room(kLong);
  for (const std::size_t more : {0u, 1u}) {
    t.begin_later(b);
    const PendingCall& call = t.later.back().call;
    EXPECT_EQ(call.max_reply(), t.max_eager());
    EXPECT_EQ(call.reply(filled(t.max_eager() + 1, 1)), Status::message_too_long);
    EXPECT_EQ(call.reply(filled(t.max_eager() - more, 1)), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.times == 1; }));
    EXPECT_EQ(t.status, Status::ok);
  }
  b.reset();
  t.finish_long_calls();
}

TEST(RpcPlacedReplies, OneEndMayDoWithoutDirectMessages) {
  for (const bool server : {true, false}) {
    SCOPED_TRACE(server);
    Placed t(server ? without_direct_messages() : long_call_config(),
             server ? long_call_config() : without_direct_messages());
    const auto eager = static_cast<std::uint32_t>(t.max_eager());
    for (const std::uint32_t size : {0u, 1u, eager - 32, eager - 31, eager, eager + 1, 300'000u}) {
      t.expect_into(kMake, number(size), filled(size, size));
    }
    t.expect_into(kBack, filled(kLong, 5), filled(kLong, 5));
    EXPECT_EQ(t.client.engine.stats().connected, 1u);
    t.finish_long_calls();
  }
}

TEST(RpcPlacedReplies, MemoryOfTheApplicationsOwnIsFetched) {
  std::vector<std::byte> own = filled(kLong, 7);
  Placed t;
  MemoryRegion region = *t.server.engine.register_memory(own, spinwire::Access::local);
  EXPECT_TRUE(t.server.engine.serve(
      20, [&](Request& r) { EXPECT_EQ(r.reply(region.slice(0, kLong)), Status::ok); }));
  t.expect_into(20, filled(9, 1), own);
  region = {};
  t.finish_long_calls();
}

TEST(RpcPlacedReplies, AReplyThatCannotBeOfferedIsRefused) {
  std::vector<std::byte> own = filled(kLong, 7);
  Placed t(without_remote_read(), long_call_config());
  if (!t.places()) GTEST_SKIP() << kNoPlaces;
  MemoryRegion region = *t.server.engine.register_memory(own, spinwire::Access::local);
  Buffer b = t.room(kLong);
  t.begin_later(b);
  EXPECT_EQ(t.later.back().call.reply(region.slice(0, kLong)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.times == 1; }));
  EXPECT_EQ(t.status, Status::limit);
  t.expect_into(kMake, number(kLong), filled(kLong, kLong));
  EXPECT_EQ(t.client.engine.stats().connected, 1u);
  region = {};
  b.reset();
  t.finish_long_calls();
}

TEST(RpcPlacedReplies, AReplyComesOnceItsRegistrationHasRoom) {
  std::vector<std::byte> own = filled(kLong, 7);
  std::vector<MemoryRegion> others;
  Placed t;
  if (!t.places()) GTEST_SKIP() << kNoPlaces;
  MemoryRegion region = *t.server.engine.register_memory(own, spinwire::Access::local);
  Buffer b = t.room(kLong);
  t.begin_later(b);
  while (auto made =
             t.server.engine.register_memory(std::span(own).first(64), spinwire::Access::local))
    others.push_back(std::move(*made));
  EXPECT_EQ(t.later.back().call.reply(region.slice(0, kLong)), Status::ok);
  t.settle();
  EXPECT_EQ(t.times, 0) << "no registration has room";
  others.clear();
  ASSERT_TRUE(t.until([&] { return t.times == 1; }));
  EXPECT_EQ(t.status, Status::ok);
  region = {};
  b.reset();
  t.finish_long_calls();
}

}  // namespace
}  // namespace rpc_placed_replies_test
