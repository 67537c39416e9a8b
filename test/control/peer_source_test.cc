// What a peer's connections and sessions are counted for.
#include "control/peer_source.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>

#include "softverbs/context_gid.h"

namespace peer_source_test {
namespace {

namespace softverbs = spinwire::softverbs;
using spinwire::GidType;
using spinwire::control::Address;
using spinwire::control::event_source;
using spinwire::control::Source;
using spinwire::control::source_of;
using spinwire::control::source_text;
using Gid = std::array<std::uint8_t, 16>;

Address address(const char* text) { return *Address::parse(text); }
Gid bytes_of(const ibv_gid& gid) {
  Gid bytes;
  std::copy_n(gid.raw, bytes.size(), bytes.begin());
  return bytes;
}
Gid gid_of(std::uint32_t process, std::uint32_t fd = 5,
           softverbs::GidKind kind = softverbs::GidKind::context) {
  return bytes_of(softverbs::make_gid({process, fd, 4711}, kind));
}
Address local_source(const Gid& gid) {
  return source_of(address("127.0.0.1:7"), gid, GidType::embedded);
}

TEST(PeerSource, AProcessOfThisHostIsASource) {
  const Address one = local_source(gid_of(1234)), other = local_source(gid_of(1235));
  EXPECT_FALSE(one.is_loopback());
  EXPECT_NE(one.source(), other.source());
  EXPECT_EQ(source_text(one), "process 1234 of this host");
  // One process has one share, whichever of its devices, ports and addresses it names.
  EXPECT_EQ(one, local_source(gid_of(1234, 6)));
  EXPECT_EQ(one, local_source(gid_of(1234, 5, softverbs::GidKind::process)));
  EXPECT_EQ(one, local_source(bytes_of(softverbs::gid_of_port(softverbs::make_gid({1234, 5, 4711}),
                                                              softverbs::kPorts))));
  EXPECT_EQ(one, source_of(address("[::1]:9"), gid_of(1234), GidType::embedded));
  EXPECT_EQ(one.as_v6(), one.source()) << "one level of shares";
}

TEST(PeerSource, OthersAreCountedForTheirAddress) {
  const Address far = address("10.0.0.1:7"), near = address("127.0.0.1:7");
  EXPECT_EQ(source_of(far, gid_of(1234), GidType::embedded), far);
  EXPECT_EQ(source_text(far), "10.0.0.1:7");
  EXPECT_EQ(source_of(near, gid_of(1234), GidType::roce_v2), near);
  EXPECT_EQ(local_source(Gid{}), near);
  EXPECT_EQ(local_source(gid_of(0)), near);
  EXPECT_EQ(local_source(gid_of(static_cast<std::uint32_t>(getpid()))), near) << "our own process";
}

TEST(PeerSource, PeersWithoutAShareAreOneSourceOfEvents) {
  const Source here = event_source(address("127.0.0.1:7"));
  EXPECT_EQ(event_source(address("127.0.0.2:7")), here) << "a process has all of these addresses";
  EXPECT_EQ(event_source(address("[::1]:7")), here);
  EXPECT_NE(here, Source{}) << "not the engine itself";
  const Address process = local_source(gid_of(1234)), far = address("10.0.0.1:7");
  EXPECT_EQ(event_source(process), process.source());
  EXPECT_EQ(event_source(far), far.source());
}

TEST(PeerSource, AnAddressIsTheSourceThatItsGidIs) {
  const Source here = event_source(address("127.0.0.1:7"));
  for (const char* const text : {"[::]:7", "0.0.0.0:7", "[::ffff:0.0.0.0]:7"})
    EXPECT_EQ(event_source(address(text)), here) << text << ": connections to it stay here";
  EXPECT_EQ(event_source(address("[::ffff:127.0.0.1]:7")), here);
  EXPECT_EQ(event_source(address("[::ffff:10.0.0.1]:7")), event_source(address("10.0.0.1:7")));
  EXPECT_NE(event_source(address("[::5]:7")), Source{}) << "not the engine itself";
  for (const char* const text : {"[::]:7", "0.0.0.0:7", "[::1]:7", "127.0.0.1:7", "[::5]:7",
                                 "10.0.0.1:7", "[2001:db8::1]:7", "[fe80::1]:7"}) {
    EXPECT_EQ(event_source(address(text)), event_source(address(text).as_v6(), GidType::roce_v2))
        << text;
  }
}

TEST(PeerSource, TheSourceOfAnEndpointIsItsProcessOrAddress) {
  const auto of = [](const char* text, GidType type) {
    return event_source(address(text).as_v6(), type);
  };
  const Source here = event_source(address("127.0.0.1:7"));
  EXPECT_EQ(event_source(gid_of(1234), GidType::embedded), local_source(gid_of(1234)).source());
  EXPECT_EQ(event_source(gid_of(1234, 6), GidType::embedded), local_source(gid_of(1234)).source())
      << "a process makes as many GIDs as it likes";
  EXPECT_EQ(event_source(gid_of(static_cast<std::uint32_t>(getpid())), GidType::embedded), here);
  EXPECT_EQ(event_source(gid_of(0), GidType::embedded), here);
  EXPECT_EQ(of("10.0.0.1:7", GidType::roce_v2), address("10.0.0.1:7").source());
  EXPECT_NE(of("10.0.0.1:7", GidType::roce_v2), of("10.0.0.2:7", GidType::roce_v2));
  EXPECT_EQ(of("[2001:db8::1]:7", GidType::roce_v2), of("[2001:db8::2]:7", GidType::roce_v2));
  EXPECT_NE(of("[fe80::1]:7", GidType::roce_v1), of("[fe80::2]:7", GidType::roce_v1));
  EXPECT_NE(of("[fec0::1]:7", GidType::infiniband), of("[fec0::2]:7", GidType::infiniband))
      << "hosts of one subnet";
  EXPECT_NE(of("[::5]:7", GidType::roce_v2), Source{}) << "not the engine itself";
}

}  // namespace
}  // namespace peer_source_test
