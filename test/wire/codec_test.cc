#include "wire/codec.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace codec_test {

using spinwire::wire::constant;
using spinwire::wire::flag;
using spinwire::wire::get_number;
using spinwire::wire::Layout;
using spinwire::wire::part;
using spinwire::wire::put_number;
using spinwire::wire::zeros;

enum class Color : std::uint16_t { red = 0x0201 };

struct Inner {
  std::uint16_t number = 0;
};
struct Outer {
  std::uint64_t number = 0;
  Color color{};
  std::array<std::uint8_t, 3> bytes{};
  bool is_set = false;
  Inner inner;
};
using OuterLayout = Layout<constant<std::array<std::uint8_t, 2>{0xaa, 0xbb}>, &Outer::color,
                           &Outer::bytes, zeros<2>, flag<&Outer::is_set, std::uint16_t>,
                           part<&Outer::inner, Layout<&Inner::number>>, &Outer::number>;

constexpr Outer kOuter{0x1817161514131211, Color::red, {3, 4, 5}, true, {0x0706}};

TEST(Codec, NumbersAreLittleEndian) {
  std::array<std::byte, 8> bytes{};
  put_number<std::uint32_t>(bytes.data() + 1, 0x07060504);
  const std::array<unsigned, 8> expected{0, 4, 5, 6, 7, 0, 0, 0};
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_EQ(std::to_integer<unsigned>(bytes[i]), expected[i]) << "byte " << i;
  EXPECT_EQ(get_number<std::uint32_t>(bytes.data() + 1), 0x07060504u);
  EXPECT_EQ(get_number<std::uint16_t>(bytes.data() + 1), 0x0504u);
  EXPECT_EQ(get_number<std::uint64_t>(bytes.data()), 0x0706050400u);
}

TEST(Codec, FieldsFollowOneAnother) {
  static_assert(OuterLayout::kBytes == 21);
  const auto bytes = OuterLayout::encode(kOuter);
  const std::array<unsigned, 21> expected{
      0xaa, 0xbb, 1, 2, 3, 4, 5, 0, 0, 1, 0, 6, 7, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18};
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_EQ(std::to_integer<unsigned>(bytes[i]), expected[i]) << "byte " << i;
}

TEST(Codec, DecodesWhatWasEncoded) {
  Outer back;
  ASSERT_TRUE(OuterLayout::decode(OuterLayout::encode(kOuter), back));
  EXPECT_EQ(back.number, kOuter.number);
  EXPECT_EQ(back.color, kOuter.color);
  EXPECT_EQ(back.bytes, kOuter.bytes);
  EXPECT_TRUE(back.is_set);
  EXPECT_EQ(back.inner.number, kOuter.inner.number);
}

TEST(Codec, OtherSizesAreRefused) {
  const auto whole = OuterLayout::encode(kOuter);
  Outer out;
  for (std::size_t size = 0; size < whole.size(); ++size) {
    // A copy of its own, so that a sanitizer sees a read beyond its end.
    const std::vector<std::byte> cut(whole.begin(), whole.begin() + static_cast<long>(size));
    EXPECT_FALSE(OuterLayout::decode(cut, out)) << size;
  }
  std::vector<std::byte> longer(whole.begin(), whole.end());
  longer.push_back(std::byte{0});
  EXPECT_FALSE(OuterLayout::decode(longer, out));
}

TEST(Codec, ConstantsAndReservedBitsAreRefused) {
  const auto whole = OuterLayout::encode(kOuter);
  Outer out;
  for (const std::size_t at : {0, 1, 7, 8, 10}) {
    auto bad = whole;
    bad[at] ^= std::byte{2};
    EXPECT_FALSE(OuterLayout::decode(bad, out)) << at;
  }
  auto bits = whole;
  bits[9] = std::byte{3};
  EXPECT_FALSE(OuterLayout::decode(bits, out));
  bits[9] = std::byte{0};
  ASSERT_TRUE(OuterLayout::decode(bits, out));
  EXPECT_FALSE(out.is_set);
}

}  // namespace codec_test
