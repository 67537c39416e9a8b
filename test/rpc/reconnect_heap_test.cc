// What reconnecting takes from the heap at the client's end. Only an attempt takes any: neither the
// pause before it does, nor what other connections and sessions do in the same polls.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "engine/zero_cost.h"
#include "rpc/rpc_ends.h"

namespace reconnect_heap_test {
namespace {

using namespace rpc_test;  // the names of a test namespace
using spinwire::Reconnect;

/// A client whose connection and session lose their server again and again, and which has another
/// connection and session with another server.
class RpcReconnectHeap : public testing::Test {
 protected:
  void SetUp() override {
#if !SPINWIRE_TEST_COUNTS_HEAP
    GTEST_SKIP() << "this sanitizer has a heap of its own";
#endif
    if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "other devices allocate as they like";
  }
  void start(const Reconnect& way) {
    for (Node* const server : {&lost_, &kept_}) {
      server->listen();
      EXPECT_TRUE(server->engine.serve(
          kEcho, [](Request& r) { EXPECT_EQ(r.reply(r.bytes()), Status::ok); }));
    }
    connection_ = connect(lost_, way);
    session_ = open(lost_, way);
    other_connection_ = connect(kept_, {});
    other_session_ = open(kept_, {});
    ASSERT_TRUE(until([&] { return is_made() && other_connection_.ready(); }));
    ASSERT_TRUE(until([&] { return other_session_.ready(); }));
  }
  Connection connect(const Node& to, const Reconnect& way) {
    ConnectOptions options;
    options.handlers.on_interrupted = [this](Connection, const Error&) { ++losses_; };
    options.reconnect = way;
    return client_.engine.connect(to.listener.address(), options).value();
  }
  Session open(const Node& to, const Reconnect& way) {
    SessionOptions options;
    options.on_interrupted = [this](Session, const Error&) { ++losses_; };
    options.reconnect = way;
    return client_.engine.open_session(to.listener.address(), options).value();
  }
  [[nodiscard]] bool is_made() const {
    return connection_.ready() && session_.ready() && !lost_.ready.empty() &&
           lost_.engine.rpc_stats().served_sessions == 1;
  }
  /// A poll of each engine. With `works`, the other connection and session work in the client's.
  void turn(bool works) {
    now_ += 10'000;
    (void)(lost_.poll() + kept_.poll());
    zero_cost_test::armed = true;
    if (works) {
      const auto bytes = std::as_bytes(std::span("x", 1));
      sent_ += other_connection_.send_copy(bytes) == Status::ok ? 1 : 0;
      (void)other_session_.call(kEcho, bytes,
                                [this](Reply& r) { replies_ += r.status() == Status::ok; });
    }
    (void)client_.poll();
    zero_cost_test::armed = false;
  }
  template <typename Done>
  bool until(Done&& done, bool works = false) {
    return engine_test::until({}, [&] {
      turn(works);
      return done();
    });
  }
  void drop_connection() {
    const Buffer here = lost_.buffer(64, Pool::lease);
    const RemoteRegion nowhere{0x1000, 64, 0x7777, Access::remote_read};
    EXPECT_EQ(lost_.ready.back().read(here.slice(), nowhere), Status::ok);
    lost_.ready.clear();
    lost_.closed.clear();
    lost_.closed_connections.clear();
  }
  void drop_session() {
    (void)lost_.engine.visit_served_sessions(0, 64, [](const spinwire::ServedSessionInfo& s) {
      EXPECT_EQ(s.session.close({spinwire::GoodbyeReason::overloaded, 0ns}), Status::ok);
    });
  }
  /// How often the client takes from the heap or gives back in one cycle: the loss, the pause, the
  /// attempt, and the first message and call. Of fifty cycles the least, because an attempt may
  /// fail.
  template <typename Drop>
  std::uint64_t heap_calls_of_a_cycle(Drop&& drop, bool works) {
    std::uint64_t least = ~std::uint64_t{0};
    for (int cycle = -10; cycle < 50; ++cycle) {
      zero_cost_test::heap_calls = 0;
      const int before = losses_;
      drop();
      EXPECT_TRUE(until([&] { return losses_ > before && is_made(); }, works));
      bool replied = false;
      const auto bytes = std::as_bytes(std::span("x", 1));
      EXPECT_EQ(connection_.send_copy(bytes), Status::ok);
      EXPECT_EQ(session_.call(kEcho, bytes, [&](Reply& r) { replied = r.status() == Status::ok; }),
                Status::ok);
      EXPECT_TRUE(until([&] { return replied; }, works));
      for (int i = 0; i < 50; ++i) turn(works);
      if (cycle >= 0) least = std::min(least, zero_cost_test::heap_calls.load());
    }
    EXPECT_GT(least, 0u) << "nothing was counted";
    return least;
  }
  /// A cycle takes as much when others work in its polls, and no more than is documented.
  template <typename Drop>
  void expect_that_others_take_nothing(Drop&& drop, std::uint64_t most) {
    const std::uint64_t alone = heap_calls_of_a_cycle(drop, false);
    const std::uint64_t beside = heap_calls_of_a_cycle(drop, true);
    EXPECT_LE(alone, most);
    EXPECT_EQ(beside, alone);
    EXPECT_GT(sent_, 1000u);
    EXPECT_GT(replies_, 1000u);
  }

  std::uint64_t now_ = 1'000'000'000;
  int losses_ = 0;
  std::uint64_t sent_ = 0, replies_ = 0;
  Node lost_{rpc_config(), &now_}, kept_{rpc_config(), &now_}, client_{rpc_config(), &now_};
  Connection connection_, other_connection_;
  Session session_, other_session_;
};

constexpr Reconnect kSoon{~0u, 1ms, 2ms};

// Half of these calls give back.

TEST_F(RpcReconnectHeap, OthersTakeNothingWhileAConnectionIsMadeAgain) {
  ASSERT_NO_FATAL_FAILURE(start(kSoon));
  expect_that_others_take_nothing([this] { drop_connection(); }, 40);
}

TEST_F(RpcReconnectHeap, OthersTakeNothingWhileASessionIsOpenedAgain) {
  ASSERT_NO_FATAL_FAILURE(start(kSoon));
  expect_that_others_take_nothing([this] { drop_session(); }, 40);
}

TEST_F(RpcReconnectHeap, APauseTakesNothing) {
  ASSERT_NO_FATAL_FAILURE(start({~0u, 1h, 1h}));
  drop_connection();
  drop_session();
  ASSERT_TRUE(until([&] { return losses_ == 2; }));
  for (int i = 0; i < 500; ++i) turn(true);
  zero_cost_test::heap_calls = 0;
  for (int i = 0; i < 5000; ++i) turn(true);
  EXPECT_EQ(zero_cost_test::heap_calls, 0u);
  EXPECT_FALSE(connection_.ready() || session_.ready());
  EXPECT_GT(replies_, 1000u);
}

}  // namespace
}  // namespace reconnect_heap_test
