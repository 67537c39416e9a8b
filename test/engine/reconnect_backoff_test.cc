// A server that takes each connection and ends it at once is asked less and less often. One that
// has kept a connection for a while is asked soon again.
#include <gtest/gtest.h>

#include <string>

#include "engine/harness.h"

namespace reconnect_backoff_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Reconnect;

constexpr std::uint64_t kMillisecond = 1'000'000;
constexpr Reconnect kWay{~0u, 10ms, 1s};

enum class Ending : std::uint8_t { goodbye, loss };

class EngineReconnectBackoff : public testing::TestWithParam<Ending> {
 protected:
  void start(const Reconnect& way) {
    server_.on_ready = [this](Connection c) {
      if (ends_at_once_) end(c);
    };
    server_.listen();
    ConnectOptions options;
    options.handlers = client_.handlers();
    options.handlers.on_interrupted = [this](Connection, const Error&) { ++losses_; };
    options.reconnect = way;
    connection_ = client_.engine.connect(server_.listener.address(), options).value();
  }
  void end(Connection c) {
    if (GetParam() == Ending::goodbye) {
      EXPECT_EQ(c.close({spinwire::GoodbyeReason::overloaded, 0ns}), Status::ok);
      return;
    }
    const Buffer here = server_.buffer(64, Pool::lease);
    const RemoteRegion nowhere{0x1000, 64, 0x7777, Access::remote_read};
    EXPECT_EQ(c.read(here.slice(), nowhere), Status::ok);
  }
  void SetUp() override {
    if (GetParam() == Ending::loss && !on_softverbs())
      GTEST_SKIP() << kSoftverbsOnly << "there it takes time until an end is lost, and none passes";
  }
  /// Time passes only while the client waits for its next attempt: an attempt takes none.
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({}, [&] {
      const bool waits = client_.engine.stats().reserved_receives == 0;
      now_ += waits ? kMillisecond : 0;
      (void)(client_.poll() + server_.poll());
      return done();
    });
  }
  [[nodiscard]] bool is_made() const {
    return connection_.ready() && server_.engine.stats().connections == 1 && !server_.ready.empty();
  }
  /// The connection lives for so long, without work.
  void live(std::uint64_t time) {
    for (const std::uint64_t end = now_ + time; now_ < end;) {
      now_ += kMillisecond;
      (void)(client_.poll() + server_.poll());
    }
    ASSERT_TRUE(connection_.ready());
  }

  std::uint64_t now_ = 1'000'000'000;
  int losses_ = 0;
  bool ends_at_once_ = false;
  Node server_{watchful_config(), &now_}, client_{watchful_config(), &now_};
  Connection connection_;
};

std::string name_of(const testing::TestParamInfo<Ending>& of) {
  return of.param == Ending::goodbye ? "Goodbye" : "Loss";
}
INSTANTIATE_TEST_SUITE_P(Endings, EngineReconnectBackoff,
                         testing::Values(Ending::goodbye, Ending::loss), name_of);

TEST_P(EngineReconnectBackoff, GrowsWhileConnectionsEndAtOnce) {
  ends_at_once_ = true;
  start(kWay);
  ASSERT_TRUE(until([&] { return losses_ == 1; }));
  const std::uint64_t from = now_;
  ASSERT_TRUE(until([&] { return now_ - from >= 10'000 * kMillisecond || losses_ > 100; }));
  // Seven pauses double from 10 ms to 640 ms, the others are of 1 s, each less up to a half.
  EXPECT_GE(losses_, 14);
  EXPECT_LE(losses_, 28);
  EXPECT_EQ(client_.ready.size(), static_cast<std::size_t>(losses_) + connection_.ready());
}

TEST_P(EngineReconnectBackoff, BeginsAnewAfterAConnectionThatLasted) {
  ends_at_once_ = true;
  start(kWay);
  ASSERT_TRUE(until([&] { return losses_ == 8; }));
  ends_at_once_ = false;
  server_.ready.clear();
  ASSERT_TRUE(until([&] { return is_made(); }));
  for (int restarts = 0; restarts < 3; ++restarts) {
    ASSERT_NO_FATAL_FAILURE(live(1000 * kMillisecond));
    const int before = losses_;
    end(server_.ready.back());
    server_.ready.clear();
    ASSERT_TRUE(until([&] { return losses_ > before; }));
    const std::uint64_t lost_at = now_;
    ASSERT_TRUE(until([&] { return is_made(); }));
    EXPECT_LE(now_ - lost_at, 12 * kMillisecond) << "the pause before the first round";
  }
}

/// However often the peer restarts, its connections do not use the attempts up.
TEST_P(EngineReconnectBackoff, LastingConnectionsUseNoAttemptsUp) {
  start({2, 10ms, 100ms});
  ASSERT_TRUE(until([&] { return is_made(); }));
  for (int restarts = 1; restarts <= 5; ++restarts) {
    ASSERT_NO_FATAL_FAILURE(live(100 * kMillisecond));
    end(server_.ready.back());
    server_.ready.clear();
    ASSERT_TRUE(until([&] { return losses_ == restarts; }));
    ASSERT_TRUE(until([&] { return is_made(); }));
  }
  EXPECT_TRUE(client_.closed.empty());
}

}  // namespace
}  // namespace reconnect_backoff_test
