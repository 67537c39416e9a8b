#include "wire/cm_proof.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

namespace cm_proof_test {
namespace {

namespace wire = spinwire::wire;

/// Bytes that count up, for each array.
template <std::size_t size>
std::array<std::uint8_t, size> counted(std::uint8_t next) {
  std::array<std::uint8_t, size> bytes{};
  for (std::uint8_t& byte : bytes) byte = next++;
  return bytes;
}

/// Checks that exactly the whole struct, with or without padding, is one.
template <typename Struct, typename Decode>
void expect_round_trip(const Struct& made, Decode&& decode) {
  const auto encoded = wire::encode(made);
  const std::vector<std::byte> bytes(encoded.begin(), encoded.end());
  for (const std::size_t padding : {0u, 100u}) {
    std::vector<std::byte> padded = bytes;
    padded.resize(bytes.size() + padding);
    const auto got = decode(padded);
    ASSERT_TRUE(got);
    EXPECT_EQ(wire::encode(*got), encoded);
  }
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_FALSE(decode(std::span(bytes).first(size))) << size;
  for (std::size_t at = 0; at < 4; ++at) {
    std::vector<std::byte> other = bytes;
    other[at] ^= std::byte{0x20};
    EXPECT_FALSE(decode(other)) << at;
  }
}

TEST(CmProofWire, EachStructIsReadBack) {
  expect_round_trip(wire::CmProof{counted<4>(1), counted<48>(5)}, wire::decode_cm_proof);
  expect_round_trip(wire::CmHalf{counted<4>(1), counted<48>(5)}, wire::decode_cm_half);
  expect_round_trip(wire::CmContinue{counted<16>(1)}, wire::decode_cm_continue);
  expect_round_trip(wire::CmAnswer{counted<72>(1)}, wire::decode_cm_answer);
  expect_round_trip(wire::CmRefusal{counted<144>(1)}, wire::decode_cm_sealed_refusal);
}

TEST(CmProofWire, ARequestIsNoOtherStruct) {
  const auto plain = wire::encode_cm({});
  const auto proof = wire::encode(wire::CmProof());
  const auto half = wire::encode(wire::CmHalf());
  EXPECT_FALSE(wire::decode_cm_proof(plain) || wire::decode_cm_half(plain));
  EXPECT_FALSE(wire::decode_cm_proof(half) || wire::decode_cm_half(proof));
}

TEST(CmProofWire, AnAuthenticatedFrameIsReadFromARejection) {
  wire::Authenticated made;
  made.message = counted<sizeof made.message>(1);
  const wire::Frame frame = wire::encode(made);
  std::vector<std::byte> padded(frame.bytes().begin(), frame.bytes().end());
  padded.resize(wire::kCmRejectMax);
  const auto got = wire::decode_cm_authenticated(padded);
  ASSERT_TRUE(got);
  EXPECT_EQ(got->frame.message, made.message);
  EXPECT_TRUE(std::equal(got->header.begin(), got->header.end(), padded.begin()));
  EXPECT_FALSE(wire::decode_cm_authenticated(frame.bytes().first(frame.size - 1)));
  EXPECT_FALSE(wire::decode_cm_authenticated(wire::encode(wire::Ready{1}).bytes()));
  EXPECT_FALSE(wire::decode_cm_authenticated({}));
  for (const std::size_t at : {0, 1, 2, 3, 8, 9, 10, 11}) {  // its name, kind and length
    std::vector<std::byte> other = padded;
    other[at] ^= std::byte{0x7f};
    EXPECT_FALSE(wire::decode_cm_authenticated(other)) << at;
  }
}

}  // namespace
}  // namespace cm_proof_test
