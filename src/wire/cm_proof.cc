#include "wire/cm_proof.h"

#include <algorithm>

#include "wire/codec.h"

namespace spinwire::wire {
namespace {

constexpr std::array<std::uint8_t, 4> magic_of(char last) noexcept {
  return {'S', 'P', 'N', static_cast<std::uint8_t>(last)};
}

using ProofLayout = Layout<constant<magic_of('1')>, &CmProof::key, &CmProof::message>;
using HalfLayout = Layout<constant<magic_of('2')>, &CmHalf::handshake, &CmHalf::sealed>;
using ContinueLayout = Layout<constant<magic_of('3')>, &CmContinue::sealed>;
using AnswerLayout = Layout<constant<magic_of('4')>, &CmAnswer::sealed>;
using RefusalLayout = Layout<constant<magic_of('5')>, &CmRefusal::sealed>;
static_assert(ProofLayout::kBytes == kCmRequestMax && HalfLayout::kBytes == kCmRequestMax &&
              AnswerLayout::kBytes <= kCmAcceptMax && RefusalLayout::kBytes == kCmRejectMax &&
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
std::array<std::byte, kCmRequestMax> encode(const CmHalf& half) noexcept {
  return HalfLayout::encode(half);
}
std::array<std::byte, kCmMagicBytes + sizeof(CmContinue::sealed)> encode(
    const CmContinue& answer) noexcept {
  return ContinueLayout::encode(answer);
}
std::array<std::byte, kCmMagicBytes + sizeof(CmAnswer::sealed)> encode(
    const CmAnswer& answer) noexcept {
  return AnswerLayout::encode(answer);
}
std::array<std::byte, kCmRejectMax> encode(const CmRefusal& refusal) noexcept {
  return RefusalLayout::encode(refusal);
}

std::optional<CmProof> decode_cm_proof(std::span<const std::byte> data) noexcept {
  return decode<ProofLayout, CmProof>(data);
}
std::optional<CmHalf> decode_cm_half(std::span<const std::byte> data) noexcept {
  return decode<HalfLayout, CmHalf>(data);
}
std::optional<CmContinue> decode_cm_continue(std::span<const std::byte> data) noexcept {
  return decode<ContinueLayout, CmContinue>(data);
}
std::optional<CmAnswer> decode_cm_answer(std::span<const std::byte> data) noexcept {
  return decode<AnswerLayout, CmAnswer>(data);
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
    CmAuthenticated got{{}, *frame};
    std::copy_n(data.begin(), kHeaderBytes, got.header.begin());
    return got;
  } catch (...) {  // memory for an error's text that nobody would see
    return std::nullopt;
  }
}

}  // namespace spinwire::wire
