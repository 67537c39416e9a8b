#include "wire/rendezvous_messages.h"

#include <gtest/gtest.h>

#include <array>
#include <span>
#include <utility>
#include <vector>

namespace rendezvous_wire_test {
namespace {

using namespace spinwire::wire;

constexpr LocalOffer kGood{0x7f0000001000, 5000, 0xabcd, 65537, 77, true};

TEST(LocalOffers, KeepAllTheirFields) {
  LocalOffer read;
  ASSERT_TRUE(decode(encode(kGood), read));
  EXPECT_EQ(encode(read), encode(kGood));
  EXPECT_EQ(read.immediate, 77u);
  LocalOffer without = kGood;
  without.has_immediate = false;
  without.immediate = 0;
  ASSERT_TRUE(decode(encode(without), read));
  EXPECT_FALSE(read.has_immediate);
}

TEST(LocalOffers, AreRefusedWithFieldsThatCannotBe) {
  const auto with = [](auto change) {
    LocalOffer offer = kGood;
    change(offer);
    return offer;
  };
  const std::pair<const char*, LocalOffer> bad[] = {
      {"of nothing", with([](LocalOffer& o) { o.length = 0; })},
      {"beyond the end of memory", with([](LocalOffer& o) { o.address = ~std::uint64_t{0} - 9; })},
      {"an immediate that it has not", with([](LocalOffer& o) { o.has_immediate = false; })}};
  LocalOffer read;
  for (const auto& [what, offer] : bad) EXPECT_FALSE(decode(encode(offer), read)) << what;
}

TEST(LocalOffers, AreRefusedInAnotherSizeAndWithReservedBits) {
  const auto bytes = encode(kGood);
  LocalOffer read;
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_FALSE(decode(std::span(bytes).first(size), read)) << size;
  std::vector<std::byte> longer(bytes.begin(), bytes.end());
  longer.push_back(std::byte{0});
  EXPECT_FALSE(decode(longer, read));
  for (std::size_t at = 24; at < bytes.size(); ++at) {
    auto changed = bytes;
    changed[at] |= std::byte{2};
    EXPECT_FALSE(decode(changed, read)) << at;
  }
}

}  // namespace
}  // namespace rendezvous_wire_test
