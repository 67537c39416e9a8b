// How the two ends of a handshake through rdma_cm seal what they say. Cold.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "control/cm_authentication.h"
#include "wire/codec.h"

namespace spinwire::control {

inline constexpr std::string_view kCmContext = "spinwire rdma_cm";

static_assert(sizeof(wire::CmProof::message) == kNoiseMessageBytes &&
              wire::kSealTagBytes == kNoiseTagBytes);

/// What a tag covers beside its text: the bytes of the struct that are in the clear, and the ends
/// where they are known.
struct CmAssociated {
  std::array<std::byte, 48> storage{};
  std::size_t size = 0;

  explicit CmAssociated(std::span<const std::byte> clear) noexcept { put(clear); }
  CmAssociated(std::span<const std::byte> clear, const CmEnds& ends) noexcept
      : CmAssociated(clear) {
    put(std::as_bytes(std::span(ends.client_gid)));
    put(std::as_bytes(std::span(ends.server_gid)));
    put(ends.client_qp);
  }
  void put(std::span<const std::byte> bytes) noexcept {
    std::memcpy(storage.data() + size, bytes.data(), bytes.size());
    size += bytes.size();
  }
  void put(std::uint32_t number) noexcept {
    wire::put_number(storage.data() + size, number);
    size += sizeof number;
  }
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {storage.data(), size}; }
};

/// The bytes in the clear of a struct whose sealed ones are still to be filled in.
template <std::size_t size, typename Struct>
std::array<std::byte, size> clear_bytes_of(const Struct& s) noexcept {
  std::array<std::byte, size> clear;
  std::copy_n(wire::encode(s).begin(), size, clear.begin());
  return clear;
}

inline std::span<const std::byte> sealed_of(const auto& s) noexcept {
  return std::as_bytes(std::span(s.sealed));
}

/// Without a key, a request's handshake is named by its client's engine, whose number is random.
std::array<std::uint8_t, 4> clear_handshake_of(const CmData& endpoint) noexcept;

}  // namespace spinwire::control
