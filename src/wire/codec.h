// The layout of a struct on the wire: its fields in order, little-endian, without padding. One list
// of fields serves the encoder and the decoder. Neither allocates.
//
//   using ReplyLayout = Layout<&Reply::time, &Reply::id, zeros<3>>;
//
// A field is a member, whose size on the wire is its own, or one of the objects below: constant,
// zeros, flag, part.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace spinwire::wire {

/// Writes a number or an enumerator, little-endian.
template <typename T>
constexpr void put_number(std::byte* at, T value) noexcept {
  const auto number = static_cast<std::uint64_t>(value);
  for (std::size_t i = 0; i < sizeof(T); ++i) at[i] = static_cast<std::byte>(number >> (8 * i));
}
template <typename T>
constexpr T get_number(const std::byte* at) noexcept {
  std::uint64_t number = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i)
    number |= std::to_integer<std::uint64_t>(at[i]) << (8 * i);
  return static_cast<T>(number);
}

/// A member: a number, an enumerator, or an array of bytes.
template <auto member>
struct Member;
template <typename Value, typename Struct, Value Struct::*member>
struct Member<member> {
  static constexpr std::size_t kBytes = sizeof(Value);
  static constexpr void put(const Struct& from, std::byte* at) noexcept {
    if constexpr (std::is_class_v<Value>) {
      for (const std::uint8_t byte : from.*member) *at++ = std::byte{byte};
    } else {
      put_number(at, from.*member);
    }
  }
  static constexpr bool get(const std::byte* at, Struct& to) noexcept {
    if constexpr (std::is_class_v<Value>) {
      for (std::uint8_t& byte : to.*member) byte = std::to_integer<std::uint8_t>(*at++);
    } else {
      to.*member = get_number<Value>(at);
    }
    return true;
  }
};

/// Bytes that are always the same; others are refused.
template <auto bytes>
struct Constant {
  static constexpr std::size_t kBytes = bytes.size();
  static constexpr void put(const auto&, std::byte* at) noexcept {
    for (const std::uint8_t byte : bytes) *at++ = std::byte{byte};
  }
  static constexpr bool get(const std::byte* at, auto&) noexcept {
    return std::equal(bytes.begin(), bytes.end(), at,
                      [](std::uint8_t a, std::byte b) { return std::byte{a} == b; });
  }
};
template <auto bytes>
inline constexpr Constant<bytes> constant;
/// Reserved bytes: later versions can use them.
template <std::size_t count>
inline constexpr Constant<std::array<std::uint8_t, count>{}> zeros;

/// A Boolean as the lowest bit of a T. The other bits are reserved.
template <auto member, typename T>
struct Flag {
  static constexpr std::size_t kBytes = sizeof(T);
  static constexpr void put(const auto& from, std::byte* at) noexcept {
    put_number(at, T{from.*member});
  }
  static constexpr bool get(const std::byte* at, auto& to) noexcept {
    const T bits = get_number<T>(at);
    to.*member = (bits & 1) != 0;
    return bits <= 1;
  }
};
template <auto member, typename T>
inline constexpr Flag<member, T> flag;

/// A member with a layout of its own.
template <auto member, typename Layout>
struct Part {
  static constexpr std::size_t kBytes = Layout::kBytes;
  static constexpr void put(const auto& from, std::byte* at) noexcept {
    Layout::put(from.*member, at);
  }
  static constexpr bool get(const std::byte* at, auto& to) noexcept {
    return Layout::get(at, to.*member);
  }
};
template <auto member, typename Layout>
inline constexpr Part<member, Layout> part;

template <auto field>
struct FieldOf : decltype(field) {};
template <typename Value, typename Struct, Value Struct::*member>
struct FieldOf<member> : Member<member> {};

template <auto... fields>
struct Layout {
  static constexpr std::size_t kBytes = (FieldOf<fields>::kBytes + ...);

  /// Writes kBytes.
  static constexpr void put(const auto& from, std::byte* at) noexcept {
    ((FieldOf<fields>::put(from, at), at += FieldOf<fields>::kBytes), ...);
  }
  /// Reads kBytes. False if a constant differs.
  static constexpr bool get(const std::byte* at, auto& to) noexcept {
    bool good = true;
    ((good &= FieldOf<fields>::get(at, to), at += FieldOf<fields>::kBytes), ...);
    return good;
  }

  static constexpr std::array<std::byte, kBytes> encode(const auto& from) noexcept {
    std::array<std::byte, kBytes> bytes{};
    put(from, bytes.data());
    return bytes;
  }
  /// False if `bytes` has another size, or a constant differs. Reads nothing beyond `bytes`. The
  /// caller checks what the fields mean.
  static constexpr bool decode(std::span<const std::byte> bytes, auto& to) noexcept {
    return bytes.size() == kBytes && get(bytes.data(), to);
  }
};

}  // namespace spinwire::wire
