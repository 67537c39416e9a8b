// The example of a trading gateway, as a user runs it.
#include <gtest/gtest.h>
#include <signal.h>

#include <string>

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
