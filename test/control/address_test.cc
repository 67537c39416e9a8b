#include "control/address.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <net/if.h>

#include <string>

namespace address_test {

using spinwire::Status;
using spinwire::control::Address;

TEST(Address, NumericTextComesBackAsWritten) {
  for (const std::string text :
       {"127.0.0.1:0", "0.0.0.0:65535", "255.255.255.255:1", "10.1.2.3:18515", "[::]:0", "[::1]:80",
        "[2001:db8::ff00:42:8329]:7471", "[fe80::1%7]:9", "[::ffff:1.2.3.4]:5"}) {
    const auto address = Address::parse(text);
    ASSERT_TRUE(address) << address.error().message();
    EXPECT_EQ(address->str(), text);
  }
  const auto longest = Address::parse("[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff%4294967295]:65535");
  ASSERT_TRUE(longest);
  EXPECT_EQ(longest->str(), "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff%4294967295]:65535");
}

TEST(Address, PartsAreWhatTheTextSays) {
  const auto v4 = Address::parse("192.0.2.7:4660");
  ASSERT_TRUE(v4);
  EXPECT_EQ(v4->family(), AF_INET);
  EXPECT_EQ(v4->size(), sizeof(sockaddr_in));
  EXPECT_EQ(v4->port(), 4660);
  EXPECT_FALSE(v4->is_any());
  EXPECT_EQ(v4->as_v6(),
            (std::array<std::uint8_t, 16>{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 7}));
  const auto v6 = Address::parse("[2001:db8::1]:1");
  ASSERT_TRUE(v6);
  EXPECT_EQ(v6->family(), AF_INET6);
  EXPECT_EQ(v6->size(), sizeof(sockaddr_in6));
  EXPECT_EQ(v6->as_v6()[0], 0x20);
  EXPECT_EQ(v6->as_v6()[15], 1);
  EXPECT_TRUE(Address::parse("0.0.0.0:1")->is_any());
  EXPECT_TRUE(Address::parse("[::]:1")->is_any());
  EXPECT_EQ(Address().str(), "0.0.0.0:0");
}

TEST(Address, ScopeMayBeAnInterfaceName) {
  const unsigned loopback = if_nametoindex("lo");
  if (loopback == 0) GTEST_SKIP() << "no interface named lo";
  const auto address = Address::parse("[fe80::1%lo]:5");
  ASSERT_TRUE(address) << address.error().message();
  EXPECT_EQ(address->str(), "[fe80::1%" + std::to_string(loopback) + "]:5");
}

TEST(Address, MalformedTextIsRefusedWithAReason) {
  struct Case {
    std::string text;
    std::string found;
  };
  for (const auto& c :
       {Case{"", "it is empty"},
        Case{"127.0.0.1", "it has no port"},
        Case{"127.0.0.1:", "the port is not a number"},
        Case{"127.0.0.1:+1", "the port is not a number"},
        Case{"127.0.0.1:1x", "the port is not a number"},
        Case{"127.0.0.1: 1", "the port is not a number"},
        Case{"127.0.0.1:65536", "the port is above 65535"},
        Case{"127.0.0.1:99999999999999999999", "the port is above 65535"},
        Case{":80", "it has no host"},
        Case{"::1:80", "it has several colons"},
        Case{"256.0.0.1:80", "the host is no IPv4 address"},
        Case{"1.2.3:80", "the host is no IPv4 address"},
        Case{"1.2.3.04:80", "the host is no IPv4 address"},
        Case{"1.2.3.4.5:80", "the host is no IPv4 address"},
        Case{"[::1:80", "'[' has no ']'"},
        Case{"[::1]", "no ':port' follows ']'"},
        Case{"[::1]80", "no ':port' follows ']'"},
        Case{"[::1]:", "the port is not a number"},
        Case{"[]:1", "what the brackets hold is no IPv6 address, or its scope no interface"},
        Case{"[1.2.3.4]:1", "what the brackets hold is no IPv6 address, or its scope no interface"},
        Case{"[fe80::1%]:1",
             "what the brackets hold is no IPv6 address, or its scope no interface"},
        Case{"[fe80::1%no-such-if0]:1",
             "what the brackets hold is no IPv6 address, or its scope no interface"},
        Case{"[fe80::1%an-interface-name-too-long]:1",
             "what the brackets hold is no IPv6 address, or its scope no interface"}}) {
    const auto address = Address::parse(c.text);
    ASSERT_FALSE(address) << c.text;
    EXPECT_EQ(address.error().status, Status::invalid_argument) << c.text;
    EXPECT_EQ(address.error().found, c.found) << c.text;
    EXPECT_FALSE(address.error().remedy.empty());
  }
  EXPECT_FALSE(Address::parse(std::string_view("127.0.0.1\0:80", 13)));
  EXPECT_FALSE(Address::parse(std::string_view("127.0.0.1:80\0", 13)));
  EXPECT_FALSE(Address::parse(std::string_view("[::1%lo\0x]:80", 13)));
}

TEST(Address, NamesAreSentToTheResolver) {
  const auto address = Address::parse("localhost:80");
  ASSERT_FALSE(address);
  EXPECT_EQ(address.error().found, "the host is a name, not an address");
  EXPECT_NE(address.error().remedy.find("resolve it first"), std::string::npos);
}

TEST(Address, ErrorsQuoteHostileTextSafely) {
  const auto address = Address::parse(std::string(5000, '\x1b') + ":80");
  ASSERT_FALSE(address);
  EXPECT_LT(address.error().asked.size(), 200u);
  EXPECT_EQ(address.error().asked.find('\x1b'), std::string::npos);
}

TEST(Address, SystemAddressesAreChecked) {
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(77);
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const auto* raw = reinterpret_cast<const sockaddr*>(&v4);
  const auto address = Address::from(raw, sizeof(v4));
  ASSERT_TRUE(address);
  EXPECT_EQ(address->str(), "127.0.0.1:77");
  EXPECT_EQ(Address::from(raw, sizeof(v4) - 1).error().status, Status::invalid_argument);
  EXPECT_EQ(Address::from(raw, 1).error().status, Status::invalid_argument);
  v4.sin_family = AF_UNIX;
  EXPECT_EQ(Address::from(raw, sizeof(v4)).error().status, Status::unsupported);
}

TEST(Address, EqualityCoversEveryPart) {
  const auto of = [](std::string_view text) { return *Address::parse(text); };
  EXPECT_EQ(of("1.2.3.4:5"), of("1.2.3.4:5"));
  EXPECT_NE(of("1.2.3.4:5"), of("1.2.3.4:6"));
  EXPECT_NE(of("1.2.3.4:5"), of("1.2.3.5:5"));
  EXPECT_NE(of("1.2.3.4:5"), of("[::ffff:1.2.3.4]:5"));
  EXPECT_EQ(of("[fe80::1%2]:5"), of("[fe80::1%2]:5"));
  EXPECT_NE(of("[fe80::1%1]:5"), of("[fe80::1%2]:5"));
}

}  // namespace address_test
