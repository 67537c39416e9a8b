// Addresses of the RDMA network: a port's GIDs, and a device's GUID.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "spinwire/export.h"
#include "spinwire/status.h"

namespace spinwire {

/// A global identifier: an entry of a port's GID table. On RoCE it is an IP address. Plain data.
struct Gid {
  std::array<std::uint8_t, 16> raw{};  ///< network order; all zero: none

  /// A GID of 16 bytes, in network order.
  static constexpr Gid from_raw(const std::array<std::uint8_t, 16>& bytes) noexcept {
    return Gid{bytes};
  }
  /// The 16 bytes, in network order.
  [[nodiscard]] constexpr const std::array<std::uint8_t, 16>& as_raw() const noexcept {
    return raw;
  }
  /// The first 64 bits, in host order.
  [[nodiscard]] constexpr std::uint64_t subnet_prefix() const noexcept { return half(0); }
  /// The last 64 bits, in host order.
  [[nodiscard]] constexpr std::uint64_t interface_id() const noexcept { return half(8); }
  /// Whether there is a GID: not all bytes are 0.
  explicit constexpr operator bool() const noexcept { return raw != decltype(raw){}; }
  friend bool operator==(const Gid&, const Gid&) noexcept = default;

  /// An IPv6 address; a mapped IPv4 address, as RoCEv2 has it, as a.b.c.d. Set-up; any thread.
  [[nodiscard]] SPINWIRE_API std::string text() const;
  /// Parses the output of text(), and any other form of an IPv4 or IPv6 address. Set-up; any
  /// thread. Errors: invalid_argument.
  [[nodiscard]] SPINWIRE_API static Result<Gid> parse(std::string_view text);

 private:
  [[nodiscard]] constexpr std::uint64_t half(std::size_t from) const noexcept {
    std::uint64_t number = 0;
    for (std::size_t i = from; i < from + 8; ++i) number = number << 8 | raw[i];
    return number;
  }
};

/// A device's global identifier, which its maker gives it. Plain data.
struct Guid {
  std::uint64_t value = 0;  ///< in host order; 0: none, or not known
  /// Whether there is a GUID.
  explicit constexpr operator bool() const noexcept { return value != 0; }
  friend bool operator==(const Guid&, const Guid&) noexcept = default;

  /// "0011:2233:4455:6677", the form of ibv_devinfo. Set-up; any thread.
  [[nodiscard]] SPINWIRE_API std::string text() const;
};

}  // namespace spinwire
