// Numeric socket addresses: "a.b.c.d:port" and "[v6]:port". Set-up code. Parsing does not resolve
// names and never blocks.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "spinwire/status.h"

namespace spinwire::control {

/// An address as text, kept in place.
struct AddressText {
  std::array<char, 72> text{};  ///< 1 + 45 + 1 + 10 + 2 + 5 characters at most
  std::uint8_t length = 0;
  [[nodiscard]] std::string_view view() const noexcept { return {text.data(), length}; }
};

/// A peer's origin, for limits: its IPv4 address, or the upper half of its IPv6 address, because
/// one host may have all of the lower half. A link-local address counts as a whole: all links have
/// one upper half.
using Source = std::array<std::uint8_t, 16>;
/// Number of items that each source holds.
using SourceCounts = std::map<Source, std::uint32_t>;

/// An IPv4 or IPv6 address and port; 0.0.0.0:0 by default.
class Address {
 public:
  Address() noexcept;

  /// Parses the two forms above. An IPv6 address may have a scope, by name or number:
  /// "[fe80::1%eth0]:1". Errors: invalid_argument (says what is wrong and how to write it).
  static Result<Address> parse(std::string_view text);
  /// Converts an address of the system. Errors: unsupported for another family, invalid_argument if
  /// too short.
  static Result<Address> from(const sockaddr* address, socklen_t size);

  /// The inverse of as_v6(), with port 0. `scope`: the interface of a link-local address.
  static Address from_v6(const std::array<std::uint8_t, 16>& bytes, std::uint32_t scope) noexcept;

  [[nodiscard]] const sockaddr* data() const noexcept { return &storage_.any; }
  [[nodiscard]] socklen_t size() const noexcept;
  [[nodiscard]] int family() const noexcept { return storage_.any.sa_family; }
  [[nodiscard]] std::uint16_t port() const noexcept;
  /// Whether a listener at this address accepts connections on every interface.
  [[nodiscard]] bool is_any() const noexcept;
  /// In network order; an IPv4 address in its mapped form ::ffff:a.b.c.d, like RoCEv2 GIDs.
  [[nodiscard]] std::array<std::uint8_t, 16> as_v6() const noexcept;

  [[nodiscard]] Source source() const noexcept;
  /// Whether the address stays within this host.
  [[nodiscard]] bool is_loopback() const noexcept;

  /// "a.b.c.d:port" or "[v6]:port", scope as a number; parse() reads it back. No heap.
  [[nodiscard]] AddressText text() const noexcept;
  [[nodiscard]] std::string str() const { return std::string(text().view()); }

  friend bool operator==(const Address& a, const Address& b) noexcept;

 private:
  union Storage {
    sockaddr any;
    sockaddr_in v4;
    sockaddr_in6 v6;
  } storage_;
};

}  // namespace spinwire::control
