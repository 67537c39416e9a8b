#include "wire/lease_messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "wire/region_token.h"

namespace lease_wire_test {
namespace {

namespace wire = spinwire::wire;
using wire::LeaseVerdict;

wire::LeaseRequest a_request() {
  wire::LeaseRequest r;
  r.bytes = 0x1122334455667788;
  r.time = 5'000'000'000;
  r.id = 0xa1b2c3d4;
  r.alignment = 4096;
  r.access = 3;
  return r;
}
wire::LeaseGrant a_grant() {
  wire::LeaseGrant g;
  g.address = 0x7f00'0000'1000;
  g.bytes = 8192;
  g.time = 60'000'000'000;
  g.id = 7;
  g.lease = 0x10002;
  g.rkey = 0xdeadbeef;
  g.access = 5;
  g.invalidate = true;
  return g;
}

/// Each of these changes must make the body malformed.
template <typename Body>
void expect_refused(const Body& good, const std::vector<std::pair<std::string, Body>>& bad) {
  Body out;
  ASSERT_TRUE(wire::decode(wire::encode(good), out));
  for (const auto& [what, body] : bad) EXPECT_FALSE(wire::decode(wire::encode(body), out)) << what;
}

/// Too short, too long, and with each of the last bytes [from, to) not zero.
template <typename Body>
void expect_exact(const Body& good, std::size_t from) {
  const auto bytes = wire::encode(good);
  Body out;
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_FALSE(wire::decode(std::span(bytes).first(size), out)) << size;
  std::vector<std::byte> longer(bytes.begin(), bytes.end());
  longer.push_back(std::byte{0});
  EXPECT_FALSE(wire::decode(longer, out));
  for (std::size_t at = from; at < bytes.size(); ++at) {
    auto bad = bytes;
    bad[at] = std::byte{1};
    EXPECT_FALSE(wire::decode(bad, out)) << at;
  }
}

TEST(LeaseWire, RequestsComeAsTheyWere) {
  const auto good = a_request();
  wire::LeaseRequest out;
  ASSERT_TRUE(wire::decode(wire::encode(good), out));
  EXPECT_EQ(out.bytes, good.bytes);
  EXPECT_EQ(out.time, good.time);
  EXPECT_EQ(out.id, good.id);
  EXPECT_EQ(out.alignment, good.alignment);
  EXPECT_EQ(out.access, good.access);
  expect_exact(good, 25);
  auto none = good;
  none.bytes = 0;
  expect_refused(good, {{"no bytes", none}});
  // Little-endian, on any machine.
  const auto bytes = wire::encode(good);
  EXPECT_EQ(bytes[0], std::byte{0x88});
  EXPECT_EQ(bytes[16], std::byte{0xd4});
}

TEST(LeaseWire, GrantsComeAsTheyWere) {
  const auto good = a_grant();
  wire::LeaseGrant out;
  ASSERT_TRUE(wire::decode(wire::encode(good), out));
  EXPECT_EQ(out.address, good.address);
  EXPECT_EQ(out.bytes, good.bytes);
  EXPECT_EQ(out.time, good.time);
  EXPECT_EQ(out.id, good.id);
  EXPECT_EQ(out.lease, good.lease);
  EXPECT_EQ(out.rkey, good.rkey);
  EXPECT_EQ(out.access, good.access);
  EXPECT_EQ(out.verdict, LeaseVerdict::granted);
  EXPECT_TRUE(out.invalidate);
  expect_exact(good, 39);
}

TEST(LeaseWire, GrantsOfWhatCannotBeAreMalformed) {
  const auto good = a_grant();
  std::vector<std::pair<std::string, wire::LeaseGrant>> bad;
  const auto with = [&](const char* what, auto change) {
    wire::LeaseGrant g = good;
    change(g);
    bad.emplace_back(what, g);
  };
  with("no bytes", [](auto& g) { g.bytes = 0; });
  with("beyond the end of memory", [](auto& g) { g.bytes = ~g.address + 1; });
  with("no key", [](auto& g) { g.rkey = 0; });
  with("no time", [](auto& g) { g.time = 0; });
  with("more than the longest time", [](auto& g) { g.time = wire::kLongestLease + 1; });
  with("no rights", [](auto& g) { g.access = 0; });
  with("unknown rights", [](auto& g) { g.access = 8; });
  with("an unknown verdict", [](auto& g) { g.verdict = static_cast<LeaseVerdict>(11); });
  expect_refused(good, bad);
  auto flags = wire::encode(good);
  flags[38] = std::byte{3};
  wire::LeaseGrant out;
  EXPECT_FALSE(wire::decode(flags, out));
  // In a refusal only the number and the reason count.
  wire::LeaseGrant refusal;
  refusal.id = 9;
  refusal.verdict = LeaseVerdict::too_many;
  EXPECT_TRUE(wire::decode(wire::encode(refusal), out));
  EXPECT_EQ(out.id, 9u);
}

TEST(LeaseWire, CallsAndRepliesComeAsTheyWere) {
  wire::LeaseCall call;
  call.time = 77;
  call.lease = 0x20001;
  call.id = 0x30002;
  call.action = wire::LeaseAction::recall;
  call.verdict = LeaseVerdict::closing;
  wire::LeaseCall out;
  ASSERT_TRUE(wire::decode(wire::encode(call), out));
  EXPECT_EQ(out.time, 77u);
  EXPECT_EQ(out.lease, call.lease);
  EXPECT_EQ(out.id, call.id);
  EXPECT_EQ(out.action, call.action);
  EXPECT_EQ(out.verdict, call.verdict);
  expect_exact(call, 18);
  auto action = call, verdict = call;
  action.action = static_cast<wire::LeaseAction>(5);
  verdict.verdict = static_cast<LeaseVerdict>(11);
  expect_refused(call, {{"action", action}, {"verdict", verdict}});

  wire::LeaseReply reply;
  reply.time = wire::kLongestLease;
  reply.id = 0x40003;
  reply.verdict = LeaseVerdict::over;
  wire::LeaseReply back;
  ASSERT_TRUE(wire::decode(wire::encode(reply), back));
  EXPECT_EQ(back.time, reply.time);
  EXPECT_EQ(back.id, reply.id);
  EXPECT_EQ(back.verdict, reply.verdict);
  expect_exact(reply, 13);
  auto late = reply, unknown = reply;
  late.time = wire::kLongestLease + 1;
  unknown.verdict = static_cast<LeaseVerdict>(255);
  expect_refused(reply, {{"time", late}, {"verdict", unknown}});
}

TEST(TokenWire, DamageAndNonsenseAreFound) {
  wire::Token token;
  token.address = 0x7f00'0000'1000;
  token.length = 64;
  token.incarnation = 0x0123456789abcdef;
  token.rkey = 77;
  token.qp_num = 5;
  token.access = 3;
  const auto good = wire::encode(token);
  wire::Token out;
  ASSERT_TRUE(wire::decode(good, out));
  EXPECT_EQ(out.address, token.address);
  EXPECT_EQ(out.length, token.length);
  EXPECT_EQ(out.incarnation, token.incarnation);
  EXPECT_EQ(out.rkey, token.rkey);
  EXPECT_EQ(out.qp_num, token.qp_num);
  EXPECT_EQ(out.access, token.access);
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    auto bad = good;
    bad[bit / 8] ^= std::byte{1} << bit % 8;
    EXPECT_FALSE(wire::decode(bad, out)) << bit;
  }
  EXPECT_FALSE(wire::decode(std::span(good).first(good.size() - 1), out));
  const auto refused = [&](auto change) {
    wire::Token bad = token;
    change(bad);
    return !wire::decode(wire::encode(bad), out);
  };
  EXPECT_TRUE(refused([](auto& t) { t.length = 0; }));
  EXPECT_TRUE(refused([](auto& t) { t.length = ~t.address + 1; }));
  EXPECT_TRUE(refused([](auto& t) { t.rkey = 0; }));
  EXPECT_TRUE(refused([](auto& t) { t.access = 0; }));
  EXPECT_TRUE(refused([](auto& t) { t.access = 8; }));
}

TEST(TokenWire, ADeadlineTravelsWhole) {
  wire::Token token;
  token.address = 0x7f00'0000'1000;
  token.length = 64;
  token.incarnation = 1;
  token.rkey = 77;
  token.qp_num = 5;
  token.access = 3;
  wire::Token out;
  for (const std::uint64_t deadline :
       {std::uint64_t{1}, std::uint64_t{1'900'000'000'000}, wire::kLatestTokenDeadline}) {
    token.deadline = deadline;
    const auto good = wire::encode(token);
    ASSERT_TRUE(wire::decode(good, out));
    EXPECT_EQ(out.deadline, deadline);
    EXPECT_EQ(out.address, token.address);
    EXPECT_EQ(out.qp_num, token.qp_num);
    for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
      auto bad = good;
      bad[bit / 8] ^= std::byte{1} << bit % 8;
      EXPECT_FALSE(wire::decode(bad, out)) << bit;
    }
  }
  // A token without a deadline leaves none of an earlier one behind.
  token.deadline = 0;
  ASSERT_TRUE(wire::decode(wire::encode(token), out));
  EXPECT_EQ(out.deadline, 0u);
}

}  // namespace
}  // namespace lease_wire_test
