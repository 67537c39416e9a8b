#include "wire/cm_proof.h"

#include <algorithm>

#include "wire/codec.h"

namespace spinwire::wire {
namespace {

constexpr std::array<std::uint8_t, 4> magic_of(char last) noexcept {
  return {'S', 'P', 'N', static_cast<std::uint8_t>(last)};
}

using ProofLayout = Layout<constant<magic_of('1')>, &CmProof::key, &CmProof::message>;
using PartLayout = Layout<constant<magic_of('2')>, &CmPart::handshake, &CmPart::sealed>;
using ContinueLayout = Layout<constant<magic_of('3')>, &CmContinue::sealed>;
using AnswerLayout = Layout<constant<magic_of('4')>, &CmAnswer::sealed>;
using RefusalLayout = Layout<constant<magic_of('5')>, &CmRefusal::sealed>;
using MoreLayout = Layout<constant<magic_of('6')>, &CmMore::sealed>;
using LongAnswerLayout = Layout<constant<magic_of('7')>, &CmLongAnswer::sealed>;
static_assert(ProofLayout::kBytes == kCmRequestMax && PartLayout::kBytes == kCmRequestMax &&
              AnswerLayout::kBytes <= kCmAcceptMax && RefusalLayout::kBytes == kCmRejectMax &&
              MoreLayout::kBytes == kCmRejectMax && LongAnswerLayout::kBytes == kCmAcceptMax &&
              kHeaderBytes + kAuthenticatedBytes <= kCmRejectMax);

template <typename Layout, typename Struct>
std::optional<Struct> decode(std::span<const std::byte> data) noexcept {
  Struct got;
  if (data.size() < Layout::kBytes || !Layout::get(data.data(), got)) return std::nullopt;
  return got;
}

}  // namespace

std::array<std::byte, kCmRequestMax> encode(const CmProof& proof) noexcept {
  return ProofLayout::encode(proof);
}
std::array<std::byte, kCmRequestMax> encode(const CmPart& part) noexcept {
  return PartLayout::encode(part);
}
std::array<std::byte, kCmMagicBytes + sizeof(CmContinue::sealed)> encode(
    const CmContinue& answer) noexcept {
  return ContinueLayout::encode(answer);
}
std::array<std::byte, kCmMagicBytes + sizeof(CmAnswer::sealed)> encode(
    const CmAnswer& answer) noexcept {
  return AnswerLayout::encode(answer);
}
std::array<std::byte, kCmRejectMax> encode(const CmMore& more) noexcept {
  return MoreLayout::encode(more);
}
std::array<std::byte, kCmAcceptMax> encode(const CmLongAnswer& answer) noexcept {
  return LongAnswerLayout::encode(answer);
}
std::array<std::byte, kCmRejectMax> encode(const CmRefusal& refusal) noexcept {
  return RefusalLayout::encode(refusal);
}

std::optional<CmProof> decode_cm_proof(std::span<const std::byte> data) noexcept {
  return decode<ProofLayout, CmProof>(data);
}
std::optional<CmPart> decode_cm_part(std::span<const std::byte> data) noexcept {
  return decode<PartLayout, CmPart>(data);
}
std::optional<CmContinue> decode_cm_continue(std::span<const std::byte> data) noexcept {
  return decode<ContinueLayout, CmContinue>(data);
}
std::optional<CmAnswer> decode_cm_answer(std::span<const std::byte> data) noexcept {
  return decode<AnswerLayout, CmAnswer>(data);
}
std::optional<CmMore> decode_cm_more(std::span<const std::byte> data) noexcept {
  return decode<MoreLayout, CmMore>(data);
}
std::optional<CmLongAnswer> decode_cm_long_answer(std::span<const std::byte> data) noexcept {
  return decode<LongAnswerLayout, CmLongAnswer>(data);
}
std::optional<CmRefusal> decode_cm_sealed_refusal(std::span<const std::byte> data) noexcept {
  return decode<RefusalLayout, CmRefusal>(data);
}

std::optional<CmAuthenticated> decode_cm_authenticated(std::span<const std::byte> data) noexcept {
  constexpr std::size_t kBytes = kHeaderBytes + kAuthenticatedBytes;
  if (data.size() < kBytes) return std::nullopt;
  try {
    const auto header = decode_header(data);
    if (!header || header->kind != FrameKind::authenticated ||
        header->body_length != kAuthenticatedBytes)
      return std::nullopt;
    const auto frame = decode_authenticated(data.subspan(kHeaderBytes, kAuthenticatedBytes));
    if (!frame) return std::nullopt;
    CmAuthenticated got{{}, header->features, *frame};
    std::copy_n(data.begin(), kHeaderBytes, got.header.begin());
    return got;
  } catch (...) {  // memory for an error's text that nobody would see
    return std::nullopt;
  }
}

std::size_t encode_cm_piece(const PrivateData& data, std::size_t from,
                            std::span<std::byte> to) noexcept {
  const auto all = data.bytes();
  const auto room = to.subspan(2);
  const std::size_t count = std::min(all.size() - from, room.size());
  put_number(to.data(), static_cast<std::uint16_t>(all.size()));
  const auto end =
      std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(from), count, room.begin());
  std::fill(end, room.end(), std::byte{0});
  return count;
}

bool CmPieces::add(std::span<const std::byte> piece, bool is_last) noexcept {
  if (piece.size() < 2) return false;
  const auto length = get_number<std::uint16_t>(piece.data());
  const auto room = piece.subspan(2);
  if (length > kPrivateDataMax || (size_ != 0 && length != length_)) return false;
  const std::size_t left = length - size_;
  if (is_last ? left > room.size() : left <= kCmAnswerData) return false;
  const std::size_t count = std::min(left, room.size());
  const auto behind = room.subspan(count);
  if (std::any_of(behind.begin(), behind.end(), [](std::byte b) { return b != std::byte{0}; }))
    return false;
  length_ = length;
  std::copy_n(room.begin(), count, storage_.begin() + static_cast<std::ptrdiff_t>(size_));
  size_ += count;
  return true;
}

PrivateData CmPieces::data() const noexcept {
  PrivateData data;
  (void)data.assign(std::span(storage_).first(size_));  // within its limit
  return data;
}

}  // namespace spinwire::wire
