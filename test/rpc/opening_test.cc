// Sessions that are given up while they are being opened, and what is left of them: nothing.
#include "connect/socket.h"
#include "rpc/bare.h"

namespace rpc_opening_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::connect::Address;
using spinwire::connect::ListenSocket;

/// A clock of their own, so that time-outs take no time.
struct Stepped : Calls {
  explicit Stepped(const Config& c = rpc_config()) : Calls(c, &now) {}
  template <typename Done>
  bool step_until(Done&& done, std::uint64_t step = 10'000) {
    return until([&] {
      now += step;
      return done();
    });
  }

  inline static std::uint64_t now = 1'000'000'000;
};

TEST(RpcOpening, APeerThatSaysNothingCostsNothingAfterTheTimeOut) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  Stepped t;
  const auto mute = ListenSocket::open(Address::parse("127.0.0.1:0").value(), 64);
  ASSERT_TRUE(mute) << mute.error().message();
  const std::string address(mute->local().text().view());
  const auto descriptors = engine_test::open_descriptors();
  const std::uint32_t most = rpc_config().connections.handshakes;
  std::uint32_t timed_out = 0;
  // Each time-out makes room for the next, also inside its callback.
  struct Again {
    Stepped& t;
    const std::string& address;
    std::uint32_t& timed_out;
    std::uint32_t left;
    void open() {
      SessionOptions options;
      options.timeout = 10ms;
      options.on_closed = [this](Session, const Error& e) {
        EXPECT_EQ(e.status, Status::timed_out) << e.message();
        ++timed_out;
        if (left != 0) --left, open();
      };
      const auto made = t.client.engine.open_session(address, options);
      EXPECT_TRUE(made) << made.error().message();
    }
  } again{t, address, timed_out, 3 * most};
  for (std::uint32_t i = 0; i < most; ++i) again.open();
  EXPECT_FALSE(t.client.engine.open_session(address, {})) << "as many as may be under way";
  ASSERT_TRUE(t.step_until([&] { return timed_out == 4 * most; }, 1'000'000));
  EXPECT_EQ(engine_test::open_descriptors(), descriptors);
  const Session another = t.open();
  ASSERT_TRUE(t.step_until([&] { return another.ready(); }));
  EXPECT_EQ(Session(another).close(), Status::ok);
  ASSERT_TRUE(t.step_until([&] { return another.state() == SessionState::closed; }));
  t.finish();
}

TEST(RpcOpening, ClosingOneThatIsBeingOpenedEndsItsExchange) {
  Calls t;
  const auto mute = ListenSocket::open(Address::parse("127.0.0.1:0").value(), 64);
  ASSERT_TRUE(mute) << mute.error().message();
  const std::string address(mute->local().text().view());
  const auto descriptors = engine_test::open_descriptors();
  for (std::uint32_t i = 0; i < 2 * rpc_config().connections.handshakes; ++i) {
    auto made = t.client.engine.open_session(address, {});
    ASSERT_TRUE(made) << i << ": " << made.error().message();
    EXPECT_EQ(made->close(), Status::ok);
  }
  EXPECT_EQ(engine_test::open_descriptors(), descriptors);
  t.finish();
}

}  // namespace
}  // namespace rpc_opening_test
