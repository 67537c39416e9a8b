#include "wire/codec.h"

#include <gtest/gtest.h>

#include <array>

namespace codec_test {

using spinwire::wire::Reader;
using spinwire::wire::Writer;

TEST(Codec, WritesLittleEndianAtTheOffset) {
  std::array<std::byte, 12> bytes{};
  Writer w(bytes);
  w.put<std::uint8_t>(0, 0x01);
  w.put<std::uint16_t>(1, 0x0302);
  w.put<std::uint32_t>(3, 0x07060504);
  w.put<std::uint32_t>(8, 0x0c0b0a09);
  EXPECT_TRUE(w.ok());
  const std::array<unsigned, 12> expected{1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(std::to_integer<unsigned>(bytes[i]), expected[i]) << "byte " << i;
  }
}

TEST(Codec, ReadsBackEveryWidth) {
  std::array<std::byte, 32> bytes{};
  const std::array<std::uint8_t, 4> raw{9, 8, 7, 6};
  Writer w(bytes);
  w.put<std::uint64_t>(1, 0xfedcba9876543210u);
  w.put<std::uint32_t>(9, 0xdeadbeefu);
  w.put<std::uint16_t>(13, 0xa55au);
  w.put<std::uint8_t>(15, 0xffu);
  w.copy(28, raw);
  ASSERT_TRUE(w.ok());
  Reader r(bytes);
  EXPECT_EQ(r.get<std::uint64_t>(1), 0xfedcba9876543210u);
  EXPECT_EQ(r.get<std::uint32_t>(9), 0xdeadbeefu);
  EXPECT_EQ(r.get<std::uint16_t>(13), 0xa55au);
  EXPECT_EQ(r.get<std::uint8_t>(15), 0xffu);
  std::array<std::uint8_t, 4> back{};
  r.copy(28, back);
  EXPECT_EQ(back, raw);
  EXPECT_TRUE(r.ok());
}

TEST(Codec, ReaderRefusesWhatCrossesTheEnd) {
  std::array<std::byte, 8> bytes;
  bytes.fill(std::byte{0xff});
  for (const std::size_t offset : {std::size_t{5}, std::size_t{8}, std::size_t{9}, SIZE_MAX}) {
    Reader r(bytes);
    EXPECT_EQ(r.get<std::uint32_t>(offset), 0u) << offset;
    EXPECT_FALSE(r.ok()) << offset;
    EXPECT_EQ(r.get<std::uint32_t>(0), 0xffffffffu);
    EXPECT_FALSE(r.ok()) << "a later field that fits must not hide the failure";
  }
  Reader r(bytes);
  std::array<std::uint8_t, 4> out{1, 1, 1, 1};
  r.copy(6, out);
  EXPECT_FALSE(r.ok());
  EXPECT_EQ(out, (std::array<std::uint8_t, 4>{}));
}

TEST(Codec, WriterLeavesOutWhatCrossesTheEnd) {
  std::array<std::byte, 8> bytes{};
  const std::span<std::byte> six(bytes.data(), 6);
  Writer w(six);
  w.put<std::uint32_t>(3, 0xffffffffu);
  EXPECT_FALSE(w.ok());
  Writer other(six);
  other.copy(SIZE_MAX, std::array<std::uint8_t, 2>{1, 1});
  EXPECT_FALSE(other.ok());
  for (const std::byte b : bytes) EXPECT_EQ(b, std::byte{0});
}

}  // namespace codec_test
