// The example of a trading gateway, as a user runs it.
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdint>
#include <limits>
#include <string>

#include "../../tools/examples/program.h"
#include "eventually.h"
#include "spinwire/spinwire.h"
#include "tools/programs.h"

namespace tools_test {

/// Runs the demonstration, with a key outside.
void expect_takeover(const char* idle) {
  const Folder folder;
  ASSERT_EQ(run("spinwire-keygen", {folder / "keys"}).code, 0);
  const Outcome o =
      run("gateway", {"demo", "--count", "200", "--idle", idle, "--key-file", folder / "keys"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find("200 orders in "), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("each filled once; 1 gateways lost"), std::string::npos) << o.out;
}

TEST_F(Tools, TheStandbyGoesOnForAGatewayThatDies) { expect_takeover("wait"); }

TEST_F(SlowTools, TheStandbyGoesOnWithEveryIdleStrategy) {
  for (const char* idle : {"spin", "pause", "yield"}) expect_takeover(idle);
}

TEST_F(Tools, AGatewayKeepsToItsLimitAfterTheOther) {
  // The first gateway takes 100 orders; the second knows their position.
  const Outcome o = run("gateway", {"demo", "--count", "200", "--limit", "150"});
  EXPECT_EQ(o.code, 1) << o.out;
  EXPECT_NE(o.err.find("order 151 exceeds the gateway's limit"), std::string::npos) << o.err;
}

// As in the example.
constexpr spinwire::Method kOrder = 1;
struct Order {
  std::uint64_t account;
  std::uint64_t number;
  std::int64_t quantity;
};
struct Fill {
  std::uint64_t number;
  std::int64_t quantity;
  std::int64_t position;
};

/// A trader that places one order at a time, again and again until it is answered.
class Trader {
 public:
  explicit Trader(const std::string& gateway) {
    spinwire::Config config = *spinwire::Config::load();
    config.engine.control = spinwire::ControlMode::automatic;
    config.memory.hugepages = spinwire::HugepagePolicy::off;
    engine_ = *spinwire::Engine::open(config);
    spinwire::SessionOptions options;
    options.when_not_ready = spinwire::WhenNotReady::wait;
    options.reconnect = {.attempts = ~0u};
    session_ = *engine_.open_session(gateway, options);
  }
  Trader(const Trader&) = delete;
  Trader& operator=(const Trader&) = delete;
  ~Trader() { engine_ = spinwire::Engine(); }

  Fill place(const Order& order) {
    fill_ = {};
    is_filled_ = false;
    // The call may outlive this function, if the time is over.
    const auto done = [this](spinwire::Reply& reply) {
      is_under_way_ = false;
      if (reply.status() == spinwire::Status::ok)
        is_filled_ = program::decode(reply.bytes(), fill_);
    };
    EXPECT_TRUE(waiting::eventually([&] {
      if (!is_under_way_ && !is_filled_)
        is_under_way_ =
            session_.call(kOrder, program::bytes_of(order), done) == spinwire::Status::ok;
      (void)engine_.poll();
      return is_filled_;
    }));
    return fill_;
  }

 private:
  Fill fill_{};
  bool is_under_way_ = false;
  bool is_filled_ = false;
  spinwire::Engine engine_;
  spinwire::Session session_;
};

void expect_fill(const Fill& fill, const Fill& expected) {
  EXPECT_EQ(fill.number, expected.number);
  EXPECT_EQ(fill.quantity, expected.quantity);
  EXPECT_EQ(fill.position, expected.position);
}

TEST_F(Tools, AGatewaysLimitHoldsForEveryQuantityAndNotForRepetitions) {
  Program exchange({bin() + "/gateway", "exchange", "127.0.0.1:0"});
  const std::string market = exchange.wait_for("listening on ");
  Program first({bin() + "/gateway", "serve", "127.0.0.1:0", market, "--limit", "150"});
  Program second({bin() + "/gateway", "serve", "127.0.0.1:0", market, "--limit", "150"});
  Trader one(first.wait_for("listening on "));
  Trader other(second.wait_for("listening on "));
  expect_fill(one.place({7, 1, -100}), {1, -100, -100});
  // The limit is reached exactly. The standby answers the same, although no more would be allowed.
  expect_fill(one.place({7, 2, 250}), {2, 250, 150});
  expect_fill(other.place({7, 2, 250}), {2, 250, 150});
  constexpr auto kLeast = std::numeric_limits<std::int64_t>::min();
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t quantity : {std::int64_t{1}, std::int64_t{-301}, kLeast, kMost})
    expect_fill(other.place({7, 3, quantity}), {3, 0, 150});
  expect_fill(one.place({8, 1, kLeast}), {1, 0, 0});
  expect_fill(other.place({7, 3, -300}), {3, -300, -150});
  // A gateway that has just begun learns the position before it passes an order on.
  Program third({bin() + "/gateway", "serve", "127.0.0.1:0", market, "--limit", "150"});
  Trader late(third.wait_for("listening on "));
  expect_fill(late.place({7, 4, -1}), {4, 0, -150});
}

TEST_F(Tools, AGatewayThatIsRefusedForGoodSaysSo) {
  // An echo server serves no calls.
  Program echo({bin() + "/echo", "server", "127.0.0.1:0"});
  const std::string other = echo.wait_for("listening on ");
  ASSERT_NE(other, "") << echo.err();
  Program gateway({bin() + "/gateway", "serve", "127.0.0.1:0", other});
  EXPECT_EQ(gateway.wait(), 1) << gateway.out();
  EXPECT_NE(gateway.err().find("no way to the exchange: "), std::string::npos) << gateway.err();
  // So does a trader whose gateway serves none.
  Program trader({bin() + "/gateway", "trade", other});
  EXPECT_EQ(trader.wait(), 1) << trader.out();
  EXPECT_NE(trader.err().find("no way to a gateway: "), std::string::npos) << trader.err();
}

TEST_F(SlowTools, AnExchangeThatIsRestartedIsFoundAgain) {
  Program first({bin() + "/gateway", "exchange", "127.0.0.1:0"});
  const std::string market = first.wait_for("listening on ");
  Program gateway({bin() + "/gateway", "serve", "127.0.0.1:0", market});
  Trader trader(gateway.wait_for("listening on "));
  expect_fill(trader.place({7, 1, 5}), {1, 5, 5});
  first.signal(SIGTERM);
  EXPECT_EQ(first.wait(), 0) << first.err();
  Program second({bin() + "/gateway", "exchange", market});
  ASSERT_EQ(second.wait_for("listening on "), market) << second.err();
  // The second exchange begins with no positions.
  expect_fill(trader.place({8, 1, 5}), {1, 5, 5});
  gateway.signal(SIGTERM);
  EXPECT_EQ(gateway.wait(), 0) << gateway.err();
}

TEST_F(SlowTools, AGatewayThatEndsGivesItsTradersToTheOther) {
  Program exchange({bin() + "/gateway", "exchange", "127.0.0.1:0"});
  const std::string market = exchange.wait_for("listening on ");
  ASSERT_NE(market, "") << exchange.err();
  Program first({bin() + "/gateway", "serve", "127.0.0.1:0", market});
  Program second({bin() + "/gateway", "serve", "127.0.0.1:0", market});
  const std::string one = first.wait_for("listening on ");
  const std::string other = second.wait_for("listening on ");
  Program trader({bin() + "/gateway", "trade", one, other, "--count", "4000"});
  EXPECT_EQ(trader.wait_for("trading through "), one);
  first.signal(SIGTERM);
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(trader.wait(), 0) << trader.err();
  EXPECT_NE(trader.out().find("trading through " + other), std::string::npos) << trader.out();
  EXPECT_NE(trader.out().find("4000 orders in "), std::string::npos) << trader.out();
  for (Program* rest : {&second, &exchange}) {
    rest->signal(SIGTERM);
    EXPECT_EQ(rest->wait(), 0) << rest->err();
  }
}

}  // namespace tools_test
