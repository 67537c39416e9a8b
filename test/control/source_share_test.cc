// How much of a limited number of things one source may have.
#include "control/source_share.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace source_share_test {
namespace {

using spinwire::control::Address;
using spinwire::control::SourceShare;

/// Things that are handed out until the share says no.
struct Things {
  explicit Things(std::uint32_t all, std::uint32_t of_one = 0) : maximum(all), share(all, of_one) {}
  bool take(const std::string& from) {
    const Address peer = *Address::parse(from);
    if (places.size() == maximum || !share.admits(peer, free())) return false;
    places.push_back(share.add(peer));
    return true;
  }
  std::uint32_t take_all(const std::string& from) {
    std::uint32_t count = 0;
    while (take(from)) ++count;
    return count;
  }
  [[nodiscard]] std::uint32_t free() const {
    return maximum - static_cast<std::uint32_t>(places.size());
  }
  std::uint32_t maximum;
  SourceShare share;
  std::vector<SourceShare::Place> places;
};

TEST(SourceShare, OneSourceHasThreeQuartersAtMost) {
  Things t(1024);
  EXPECT_EQ(t.take_all("10.0.0.1:5"), 768u);
  EXPECT_EQ(t.share.used_by(*Address::parse("10.0.0.1:6")), 768u);
  EXPECT_TRUE(t.take("10.0.0.2:5"));
}

TEST(SourceShare, HoweverManySourcesThereAreAnotherOneFindsRoom) {
  Things t(1024);
  for (int round = 0; round < 1024; ++round) {
    for (int source = 1; source <= 20; ++source)
      (void)t.take("10.0.0." + std::to_string(source) + ":5");
  }
  EXPECT_GE(t.free(), 1024u / 61);
  for (std::uint32_t i = t.free(), source = 1; i != 0; --i, ++source)
    EXPECT_TRUE(t.take("10.1.0." + std::to_string(source) + ":5")) << i;
}

TEST(SourceShare, WhatOneGivesBackOthersMayHave) {
  Things t(8);
  EXPECT_EQ(t.take_all("10.0.0.1:5"), 6u);
  t.share.remove(t.places.back());
  t.share.remove(t.places.back());  // counts once
  t.places.pop_back();
  EXPECT_EQ(t.share.used_by(*Address::parse("10.0.0.1:6")), 5u);
  EXPECT_TRUE(t.take("10.0.0.1:5"));
}

TEST(SourceShare, ANetworkOfIpv6IsOneSource) {
  Things t(1024);
  std::uint32_t taken = 0;
  for (int host = 1; host <= 2000; ++host)
    taken += t.take("[2001:db8::" + std::to_string(host) + "]:5") ? 1 : 0;
  EXPECT_EQ(taken, 768u);
  EXPECT_TRUE(t.take("[2001:db8:0:1::1]:5"));
}

TEST(SourceShare, AHostLeavesRoomForOthersOfItsNetwork) {
  Things t(1024);
  const std::uint32_t first = t.take_all("[2001:db8::1]:5");
  EXPECT_GE(first, 512u);
  EXPECT_LT(first, 768u);
  EXPECT_GE(t.take_all("[2001:db8::2]:5"), 64u);
  EXPECT_TRUE(t.take("[2001:db8::3]:5"));
}

TEST(SourceShare, LinkLocalAddressesAreHosts) {
  Things t(1024);
  EXPECT_EQ(t.take_all("[fe80::1]:5"), 768u);
  EXPECT_GE(t.take_all("[fe80::2]:5"), 191u);
}

TEST(SourceShare, ASettingIsALimitToo) {
  Things few(1024, 2);
  EXPECT_EQ(few.take_all("10.0.0.1:5"), 2u);
  EXPECT_EQ(few.take_all("[2001:db8::1]:5"), 2u);
  Things all(1024, 1024);
  EXPECT_EQ(all.take_all("10.0.0.1:5"), 1024u) << "the user wants one source to have all";
}

TEST(SourceShare, ThisHostIsNotLimited) {
  Things t(16);
  EXPECT_EQ(t.take_all("127.0.0.1:5"), 16u);
  EXPECT_EQ(t.share.used_by(*Address::parse("127.0.0.1:5")), 0u);
}

}  // namespace
}  // namespace source_share_test
