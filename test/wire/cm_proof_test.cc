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
  expect_round_trip(wire::CmPart{counted<4>(1), counted<48>(5)}, wire::decode_cm_part);
  expect_round_trip(wire::CmContinue{counted<16>(1)}, wire::decode_cm_continue);
  expect_round_trip(wire::CmAnswer{counted<72>(1)}, wire::decode_cm_answer);
  expect_round_trip(wire::CmRefusal{counted<144>(1)}, wire::decode_cm_sealed_refusal);
  expect_round_trip(wire::CmMore{counted<144>(1)}, wire::decode_cm_more);
  expect_round_trip(wire::CmLongAnswer{counted<192>(1)}, wire::decode_cm_long_answer);
}

TEST(CmProofWire, ARequestIsNoOtherStruct) {
  const auto plain = wire::encode_cm({});
  const auto proof = wire::encode(wire::CmProof());
  const auto half = wire::encode(wire::CmPart());
  EXPECT_FALSE(wire::decode_cm_proof(plain) || wire::decode_cm_part(plain));
  EXPECT_FALSE(wire::decode_cm_proof(half) || wire::decode_cm_part(proof));
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

spinwire::PrivateData counted_data(std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i | 1);
  spinwire::PrivateData data;
  EXPECT_EQ(data.assign(bytes), spinwire::Status::ok);
  return data;
}
std::vector<std::byte> piece_of(const spinwire::PrivateData& data, std::size_t from,
                                std::size_t room) {
  std::vector<std::byte> piece(2 + room, std::byte{0xff});
  EXPECT_EQ(wire::encode_cm_piece(data, from, piece), std::min(room, data.bytes().size() - from));
  return piece;
}

TEST(CmPieces, PutTogetherWhatWasTakenApart) {
  for (std::size_t size = 0; size <= spinwire::kPrivateDataMax; ++size) {
    const auto data = counted_data(size);
    wire::CmPieces pieces;
    std::size_t told = 0;
    for (; size - told > wire::kCmAnswerData; told += std::min(wire::kCmMoreData, size - told)) {
      EXPECT_TRUE(pieces.add(piece_of(data, told, wire::kCmMoreData), false)) << size;
      EXPECT_FALSE(pieces.empty());
    }
    EXPECT_TRUE(pieces.add(piece_of(data, told, wire::kCmAnswerData), true)) << size;
    EXPECT_EQ(pieces.data(), data);
  }
}

TEST(CmPieces, RefuseWhatContradictsThem) {
  const auto data = counted_data(256);
  const auto first = piece_of(data, 0, wire::kCmMoreData);
  wire::CmPieces pieces;
  EXPECT_FALSE(pieces.add({}, true));
  EXPECT_FALSE(pieces.add(std::span(first).first(1), true));
  EXPECT_FALSE(pieces.add(first, true)) << "more is left than the last piece has";
  EXPECT_FALSE(pieces.add(piece_of(counted_data(118), 0, wire::kCmMoreData), false))
      << "an answer has room for that";
  auto other = first;
  other[0] = std::byte{1};
  EXPECT_FALSE(pieces.add(other, false)) << "257 bytes";
  EXPECT_TRUE(pieces.empty());
  EXPECT_TRUE(pieces.add(first, false));
  EXPECT_FALSE(pieces.add(piece_of(counted_data(255), 126, wire::kCmMoreData), false))
      << "another length";
  auto behind = piece_of(counted_data(3), 0, 8);
  wire::CmPieces small;
  behind.back() = std::byte{1};
  EXPECT_FALSE(small.add(behind, true)) << "bytes behind";
  behind.back() = std::byte{0};
  EXPECT_TRUE(small.add(behind, true));
}

TEST(CmPieces, ThePartsOfAClientAreAsManyAsItNeeds) {
  EXPECT_EQ(wire::cm_parts(0), 2u);
  EXPECT_EQ(wire::cm_parts(6), 2u);
  EXPECT_EQ(wire::cm_parts(7), 3u);
  EXPECT_EQ(wire::cm_parts(38), 3u);
  EXPECT_EQ(wire::kCmPartsMax, 10u);
}

}  // namespace
}  // namespace cm_proof_test
