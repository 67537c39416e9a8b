// Identifies a datagram's sender by its routing header.
#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <array>
#include <cstring>

#include "rpc/peer_address.h"
#include "rpc/transport/datagram_port.h"

namespace rpc_origin_test {
namespace {

using spinwire::GidType;
using spinwire::rpc::kGrhBytes;
using spinwire::rpc::make_source_filter;
using spinwire::rpc::SourceFilter;
using spinwire::wire::SessionEnd;

using RouteBytes = std::array<std::byte, kGrhBytes>;

SessionEnd peer(GidType type, const std::array<std::uint8_t, 16>& gid) {
  SessionEnd e;
  e.gid = gid;
  e.gid_type = type;
  e.lid = 9;
  e.qp_num = 77;
  return e;
}
ibv_wc completion(std::uint32_t src_qp, bool routed, std::uint16_t slid = 0) {
  ibv_wc wc{};
  wc.src_qp = src_qp;
  wc.slid = slid;
  wc.wc_flags = routed ? unsigned{IBV_WC_GRH} : 0u;
  return wc;
}

TEST(RpcSourceFilter, IsTheWholeGidAndTheQueuePair) {
  const std::array<std::uint8_t, 16> gid{0x20, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const SourceFilter origin = make_source_filter(peer(GidType::roce_v2, gid));
  ibv_grh grh{};
  std::memcpy(grh.sgid.raw, gid.data(), gid.size());
  RouteBytes route;
  std::memcpy(route.data(), &grh, sizeof grh);
  EXPECT_TRUE(origin.matches(completion(77, true), route.data()));
  EXPECT_FALSE(origin.matches(completion(78, true), route.data()));
  for (std::size_t i = 8; i < 24; ++i) {
    RouteBytes other = route;
    other[i] ^= std::byte{1};
    EXPECT_FALSE(origin.matches(completion(77, true), other.data())) << i;
  }
}

TEST(RpcSourceFilter, IsTheAddressWhereTheHeaderIsThatOfIpv4) {
  const SourceFilter origin = make_source_filter(
      peer(GidType::roce_v2, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 1}));
  RouteBytes route;
  route.fill(std::byte{0xee});  // the first half is undefined
  const std::array<std::uint8_t, 4> address{10, 77, 0, 1};
  std::memcpy(route.data() + 20 + 12, address.data(), address.size());
  EXPECT_TRUE(origin.matches(completion(77, true), route.data()));
  EXPECT_FALSE(origin.matches(completion(76, true), route.data()));
  for (std::size_t i = 32; i < 36; ++i) {
    RouteBytes other = route;
    other[i] ^= std::byte{1};
    EXPECT_FALSE(origin.matches(completion(77, true), other.data())) << i;
  }
}

TEST(RpcSourceFilter, IsTheLidWhereNothingLiesInFront) {
  const SourceFilter origin = make_source_filter(peer(GidType::infiniband, {0xfe, 0x80, 1}));
  const RouteBytes route{};
  EXPECT_TRUE(origin.matches(completion(77, false, 9), route.data()));
  EXPECT_FALSE(origin.matches(completion(77, false, 8), route.data()));
  EXPECT_FALSE(origin.matches(completion(77, true, 9), route.data())) << "another GID";
}

}  // namespace
}  // namespace rpc_origin_test
