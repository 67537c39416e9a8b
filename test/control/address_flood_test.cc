// Silent peers that come from many addresses, of which none holds much.
#include <string>
#include <vector>

#include "control/control_port_fixture.h"

namespace control_port_test {
namespace {

class FloodOfAddresses : public ControlPortTest {
 protected:
  static std::string source_of_flood(int i) { return "127.0.1." + std::to_string(1 + i) + ":0"; }
};

TEST_F(FloodOfAddresses, MakesRoomFasterUntilItEnds) {
  std::vector<UniqueFd> flood;
  for (int i = 0; i < 4; ++i) flood.push_back(plain_peer(source_of_flood(i).c_str()));
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 4; }));
  const auto milliseconds_until_room = [&](int i) {
    const std::uint64_t refused = server_.port.refusals();
    flood.push_back(plain_peer(source_of_flood(i).c_str()));
    int passed = 0;
    for (; passed < 200 && server_.port.refusals() == refused; ++passed)
      server_.pass_with_polls(1ms);
    return passed;
  };
  const int first = milliseconds_until_room(4);
  EXPECT_GT(first, 40);
  EXPECT_LT(first, 60);
  for (int i = 5; i < 60; ++i) EXPECT_LE(milliseconds_until_room(i), first);
  for (int i = 60; i < 64; ++i) EXPECT_LE(milliseconds_until_room(i), 6);
  flood.clear();
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
  server_.pass_with_polls(60ms);
  for (int i = 64; i < 68; ++i) flood.push_back(plain_peer(source_of_flood(i).c_str()));
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 4; }));
  EXPECT_GT(milliseconds_until_room(68), 40) << "the flood is over";
}

TEST_F(FloodOfAddresses, ThoseThatComeAgainGiveWayBeforeAClientThatComesOnce) {
  std::vector<UniqueFd> flood;
  const auto strike = [&](int i) {
    const std::uint32_t before = server_.port.handshakes();
    const std::uint64_t refused = server_.port.refusals();
    flood.push_back(plain_peer(source_of_flood(i % 8).c_str()));
    const auto is_in = [&] {
      return before == 4 ? server_.port.refusals() > refused : server_.port.handshakes() > before;
    };
    for (int ms = 0; ms < 60 && !is_in(); ++ms) server_.pass_with_polls(1ms);
    ASSERT_TRUE(is_in());
  };
  for (int i = 0; i < 80; ++i) strike(i);
  const std::uint64_t refused = server_.port.refusals();
  const UniqueFd slow = plain_peer();
  for (int ms = 0; ms < 6; ++ms) server_.pass_with_polls(1ms);
  ASSERT_EQ(server_.port.refusals(), refused + 1);
  for (int i = 80; i < 92; ++i) strike(i);
  EXPECT_FALSE(ended(slow));
}

}  // namespace
}  // namespace control_port_test
