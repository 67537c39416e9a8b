// The choice of a GID, on tables of real users for which index 0 or a fixed 3 was wrong.
#include "verbs/gid.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace gid_test {

using spinwire::GidType;
using spinwire::LinkLayer;
using spinwire::verbs::best_gid;
using spinwire::verbs::gid_text;
using spinwire::verbs::GidEntry;
using spinwire::verbs::GidRank;
using spinwire::verbs::GidVerdict;
using spinwire::verbs::GidWish;
using spinwire::verbs::judge_gids;
using spinwire::verbs::parse_host_address;

constexpr GidType kV1 = GidType::roce_v1;
constexpr GidType kV2 = GidType::roce_v2;

ibv_gid gid(const std::string& text) {
  ibv_gid result{};
  if (text.find(':') != std::string::npos) {
    EXPECT_EQ(::inet_pton(AF_INET6, text.c_str(), result.raw), 1) << text;
  } else {
    result.raw[10] = result.raw[11] = 0xff;
    EXPECT_EQ(::inet_pton(AF_INET, text.c_str(), result.raw + 12), 1) << text;
  }
  return result;
}

GidEntry entry(int index, const std::string& text, GidType type, std::string netdev = "eth0",
               bool up = true) {
  return {index, gid(text), type, std::move(netdev), up};
}

using Table = std::vector<GidEntry>;

GidWish at(const std::string& address) { return {-1, parse_host_address(address)}; }

/// The chosen index, or -1; `reason` is that of the entry at `position`.
int taken(const Table& table, const GidWish& wish = {}, LinkLayer layer = LinkLayer::ethernet) {
  const std::vector<GidVerdict> verdicts = judge_gids(layer, table, wish);
  EXPECT_EQ(verdicts.size(), table.size());
  for (const GidVerdict& verdict : verdicts) EXPECT_FALSE(verdict.reason.empty());
  const int best = best_gid(verdicts);
  return best < 0 ? -1 : table[static_cast<std::size_t>(best)].index;
}

/// A port with one IPv4 address: link-local and routable, each in both versions.
Table usual() {
  return {entry(0, "fe80::268a:7ff:fe12:3456", kV1), entry(1, "fe80::268a:7ff:fe12:3456", kV2),
          entry(2, "10.1.2.3", kV1), entry(3, "10.1.2.3", kV2)};
}

TEST(Gid, TakesTheRoutableOneOfVersionTwoNotTheFirst) { EXPECT_EQ(taken(usual()), 3); }

/// Index 0 of an Ethernet port serves in none of these tables, whatever it holds.
TEST(PainPoint20, IndexZeroIsNotAssumed) {
  const GidEntry routable = entry(3, "10.1.2.3", kV2);
  const GidEntry zeroes[] = {
      entry(0, "::", kV1),                        // empty
      entry(0, "fe80::268a:7ff:fe12:3456", kV1),  // link-local, as on an adapter
      entry(0, "fe80::268a:7ff:fe12:3456", kV2),  // link-local, as on Soft-RoCE
      entry(0, "10.1.2.3", kV1),                  // the address, but of the other version
      entry(0, "127.0.0.1", kV2),                 // reaches this host only
      entry(0, "10.9.9.9", kV2, "eth1", false),   // of an interface that is down
  };
  for (const GidEntry& zero : zeroes) {
    SCOPED_TRACE(gid_text(zero.gid));
    EXPECT_EQ(taken({zero, routable}), 3);
  }
  EXPECT_EQ(taken({zeroes[0]}), -1) << "an empty entry is not taken because it is the only one";
}

TEST(Gid, FindsItWhereverALateAddressPutIt) {
  // The address was added after others were removed: 2 and 3 are empty; some drivers show zeroes.
  EXPECT_EQ(
      taken({entry(0, "fe80::1", kV1), entry(1, "fe80::1", kV2), entry(2, "::", kV1),
             entry(3, "::", kV2), entry(4, "192.168.7.9", kV1), entry(5, "192.168.7.9", kV2)}),
      5);
}

TEST(Gid, TakesTheOneOfTheAddressAskedFor) {
  Table table = usual();
  table.push_back(entry(4, "172.16.0.8", kV1, "eth0.70"));
  table.push_back(entry(5, "172.16.0.8", kV2, "eth0.70"));
  table.push_back(entry(6, "2001:db8::8", kV1));
  table.push_back(entry(7, "2001:db8::8", kV2));
  EXPECT_EQ(taken(table), 3);
  EXPECT_EQ(taken(table, at("172.16.0.8")), 5);
  EXPECT_EQ(taken(table, at("2001:db8::8")), 7);
  EXPECT_EQ(taken(table, at("::ffff:10.1.2.3")), 3);
  EXPECT_EQ(taken(table, at("fe80::268a:7ff:fe12:3456")), 1);
  EXPECT_EQ(taken(table, at("10.9.9.9")), 3) << "an address without GID is no obstacle";
}

TEST(Gid, ARoutableAddressIsPreferredToOneOfVersionOne) {
  EXPECT_EQ(taken({entry(0, "10.1.2.3", kV1), entry(1, "10.7.7.7", kV2)}, at("10.1.2.3")), 1);
}

TEST(Gid, PrefersGlobalIpv6ToLinkLocal) {
  // An interface without IPv4: the routable address is behind two link-local ones.
  EXPECT_EQ(taken({entry(0, "fe80::1", kV1), entry(1, "fe80::1", kV2),
                   entry(2, "2001:db8:1::5", kV1), entry(3, "2001:db8:1::5", kV2)}),
            3);
  EXPECT_EQ(taken({entry(0, "fe80::1", kV1), entry(1, "fd00:1::5", kV2)}), 1);
}

TEST(Gid, TakesLinkLocalWhenNothingElseIsThereAndVersionOneLast) {
  EXPECT_EQ(taken({entry(0, "fe80::1", kV1), entry(1, "fe80::1", kV2)}), 1);
  EXPECT_EQ(taken({entry(0, "10.1.2.3", kV1), entry(1, "fe80::1", kV2)}), 1);
  EXPECT_EQ(taken({entry(0, "fe80::1", kV2), entry(1, "169.254.3.4", kV2)}), 0);
  EXPECT_EQ(taken({entry(0, "10.1.2.3", kV1)}), 0);
  EXPECT_EQ(taken({entry(0, "fe80::1", kV1), entry(1, "127.0.0.1", kV2)}), 1);
}

TEST(Gid, LinkLocalIsFebfButNotFec0) {
  EXPECT_EQ(taken({entry(0, "febf::1", kV2), entry(1, "10.1.2.3", kV2)}), 1);
  EXPECT_EQ(taken({entry(0, "fec0::1", kV2), entry(1, "10.1.2.3", kV2)}), 0);
}

TEST(Gid, ThisHostOnlyComesAfterLinkLocal) {
  EXPECT_EQ(taken({entry(0, "127.0.0.1", kV2, "lo"), entry(1, "fe80::1", kV2)}), 1);
  EXPECT_EQ(taken({entry(0, "::1", kV2, "lo"), entry(1, "fe80::1", kV2)}), 1);
  EXPECT_EQ(taken({entry(0, "127.0.0.1", kV2, "lo"), entry(1, "fe80::1", kV2)}, at("127.0.0.1")),
            0);
}

TEST(Gid, SkipsInterfacesThatAreDown) {
  Table table = usual();
  table[3].netdev_up = false;
  EXPECT_EQ(taken(table), 1);
  const auto verdicts = judge_gids(LinkLayer::ethernet, table, {});
  EXPECT_EQ(verdicts[3].rank, GidRank::none);
  EXPECT_NE(verdicts[3].reason.find("eth0 is down"), std::string::npos) << verdicts[3].reason;
}

TEST(Gid, SoftRoceHasTheIpv4OneSecond) {
  EXPECT_EQ(taken({entry(0, "fe80::6c6e:9fff:fe39:884a", kV2, "dummy1"),
                   entry(1, "10.77.0.1", kV2, "dummy1")}),
            1);
}

TEST(Gid, AnIndexAskedForIsTakenWhateverItsType) {
  EXPECT_EQ(taken(usual(), {0, std::nullopt}), 0);
  EXPECT_EQ(taken(usual(), {2, parse_host_address("10.1.2.3")}), 2);
  EXPECT_EQ(taken(usual(), {4, std::nullopt}), -1);
  EXPECT_EQ(taken({entry(0, "::", kV2)}, {0, std::nullopt}), -1) << "an empty slot is none";
}

TEST(Gid, InfinibandTakesIndexZero) {
  const Table table{entry(0, "fe80::2:c903:1d:5f1", GidType::infiniband, ""),
                    entry(1, "fe80::2:c903:1d:5f2", GidType::infiniband, "")};
  EXPECT_EQ(taken(table, {}, LinkLayer::infiniband), 0);
  EXPECT_EQ(taken(table, at("10.1.2.3"), LinkLayer::infiniband), 0);
  EXPECT_EQ(taken(table, {1, std::nullopt}, LinkLayer::infiniband), 1);
}

TEST(Gid, NoneServesInAnEmptyTable) {
  EXPECT_EQ(taken({}), -1);
  EXPECT_EQ(taken({entry(0, "::", kV1), entry(1, "::", kV2)}), -1);
  EXPECT_EQ(taken({entry(0, "0.0.0.0", kV2)}), -1) << "a mapped address of nothing";
  EXPECT_EQ(taken({entry(0, "10.1.2.3", GidType::unknown)}), -1);
}

TEST(Gid, TextAndAddresses) {
  EXPECT_EQ(gid_text(gid("10.1.2.3")), "10.1.2.3");
  EXPECT_EQ(gid_text(gid("2001:db8::8")), "2001:db8::8");
  EXPECT_EQ(parse_host_address("10.1.2.3"), parse_host_address("::ffff:10.1.2.3"));
  for (const char* none : {"", "0.0.0.0", "::", "10.1.2", "10.1.2.3:7", "eth0", "::ffff:0.0.0.0"})
    EXPECT_FALSE(parse_host_address(none)) << none;
}

TEST(GidValue, HasItsHalvesInHostOrderAndIsItsBytes) {
  const std::array<std::uint8_t, 16> bytes{0xfe, 0x80, 0, 0, 0, 0,    0, 1,
                                           0x02, 0xc9, 3, 0, 0, 0x1d, 5, 0xf1};
  const auto value = spinwire::Gid::from_raw(bytes);
  EXPECT_EQ(value.as_raw(), bytes);
  EXPECT_EQ(value.subnet_prefix(), 0xfe80'0000'0000'0001u);
  EXPECT_EQ(value.interface_id(), 0x02c9'0300'001d'05f1u);
  EXPECT_TRUE(value);
  EXPECT_FALSE(spinwire::Gid{});
}

TEST(GidValue, IsWrittenAsAnAddressAndReadAgain) {
  for (const char* text : {"10.1.2.3", "2001:db8::8", "fe80::1:2c9:300:1d:5f1", "::"}) {
    const auto value = spinwire::Gid::parse(text);
    ASSERT_TRUE(value) << text;
    EXPECT_EQ(value->text(), text);
  }
  const auto mapped = spinwire::Gid::parse("::ffff:10.1.2.3");
  ASSERT_TRUE(mapped);
  EXPECT_EQ(*mapped, *spinwire::Gid::parse("10.1.2.3"));
  EXPECT_EQ(mapped->interface_id(), 0xffff'0a01'0203u);
  for (const char* wrong : {"", "10.1.2", "10.1.2.3:7", "fe80::1%eth0", "eth0"}) {
    const auto value = spinwire::Gid::parse(wrong);
    ASSERT_FALSE(value) << wrong;
    EXPECT_EQ(value.error().status, spinwire::Status::invalid_argument);
  }
}

TEST(GidValue, AGuidIsWrittenAsIbvDevinfoDoes) {
  EXPECT_EQ(spinwire::Guid{0x0011'2233'4455'6677u}.text(), "0011:2233:4455:6677");
  EXPECT_EQ(spinwire::Guid{0x2c9}.text(), "0000:0000:0000:02c9");
  EXPECT_FALSE(spinwire::Guid{});
}

}  // namespace gid_test
