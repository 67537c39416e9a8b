// A server that opens each session and ends it at once is asked less and less often. One that has
// kept a session for a while is asked soon again.
#include "rpc/leaving_server.h"
#include "rpc/server_session.h"

namespace rpc_session_reconnect_test {
namespace {

constexpr Reconnect kWay{~0u, 10ms, 1s};

class RpcSessionBackoff : public RpcLeavingServer {
 protected:
  /// Time passes while the client waits for its next attempt. An attempt takes next to
  /// none, and so does the end of the former connection.
  template <typename Done>
  bool until_after_pauses(Done&& done) {
    return engine_test::until({}, [&] {
      const spinwire::rpc::ClientSession& c = record();
      const bool has_connection = c.connection != nullptr && c.connection->agent;
      turn(c.reconnect->backing_off && !has_connection ? kMillisecond : 10'000);
      return done();
    });
  }
  void end_sessions() const { send_goodbye({GoodbyeReason::overloaded, 0ms}); }
  void begin() {
    ASSERT_NO_FATAL_FAILURE(serve_at("127.0.0.1:0"));
    on_ready = [this](Session) {
      if (ends_at_once_) end_sessions();
    };
    session_ = client_->core->open_session(address_, options(kWay)).value();
  }

  bool ends_at_once_ = true;
};

INSTANTIATE_TEST_SUITE_P(Transports, RpcSessionBackoff,
                         testing::Values(RpcTransport::automatic, RpcTransport::connection),
                         name_of_transport);

TEST_P(RpcSessionBackoff, GrowsWhileSessionsEndAtOnce) {
  ASSERT_NO_FATAL_FAILURE(begin());
  ASSERT_TRUE(until_after_pauses([&] { return interrupted_.size() == 1; }));
  const std::uint64_t from = now_;
  ASSERT_TRUE(until_after_pauses(
      [&] { return now_ - from >= 10'000 * kMillisecond || interrupted_.size() > 100; }));
  // Seven pauses double from 10 ms to 640 ms, the others are of 1 s, each less up to a half.
  EXPECT_GE(interrupted_.size(), 14u);
  EXPECT_LE(interrupted_.size(), 28u);
}

TEST_P(RpcSessionBackoff, BeginsAnewAfterASessionThatLasted) {
  ASSERT_NO_FATAL_FAILURE(begin());
  ASSERT_TRUE(until_after_pauses([&] { return interrupted_.size() == 8; }));
  ends_at_once_ = false;
  for (std::size_t restarts = 0; restarts < 3; ++restarts) {
    ASSERT_TRUE(until_after_pauses([&] { return session_.ready(); }));
    turns(1000, kMillisecond);
    ASSERT_TRUE(session_.ready());
    end_sessions();
    ASSERT_TRUE(until_after_pauses([&] { return interrupted_.size() == 9 + restarts; }));
    const std::uint64_t lost_at = now_;
    ASSERT_TRUE(until_after_pauses([&] { return session_.ready(); }));
    // Of hundreds of milliseconds if it went on to grow. Time passes while the kernel delivers.
    EXPECT_LE(now_ - lost_at, 50 * kMillisecond) << "the pause before the first round";
  }
  finish();
}

}  // namespace
}  // namespace rpc_session_reconnect_test
