// Little-endian fields at explicit offsets of a byte range, bounds-checked. A field that does not
// lie wholly within the range is never touched; the reader or writer remembers and says so once, at
// the end, so that a decoder reads as a table. Neither allocates.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace spinwire::wire {

/// Reads fields. A field out of bounds reads as 0 and makes ok() false for good.
class Reader {
 public:
  explicit constexpr Reader(std::span<const std::byte> bytes) noexcept : bytes_(bytes) {}

  template <std::unsigned_integral T>
  [[nodiscard]] constexpr T get(std::size_t offset) noexcept {
    if (!within(offset, sizeof(T))) return 0;
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      value |= std::to_integer<std::uint64_t>(bytes_[offset + i]) << (8 * i);
    }
    return static_cast<T>(value);
  }
  /// Copies `out.size()` bytes that begin at `offset`; zeroes when they are not all there.
  void copy(std::size_t offset, std::span<std::uint8_t> out) noexcept {
    if (out.empty()) return;
    if (within(offset, out.size())) {
      std::memcpy(out.data(), bytes_.data() + offset, out.size());
    } else {
      std::memset(out.data(), 0, out.size());
    }
  }
  /// False once a field lay out of bounds.
  [[nodiscard]] constexpr bool ok() const noexcept { return ok_; }

 private:
  constexpr bool within(std::size_t offset, std::size_t size) noexcept {
    const bool inside = offset <= bytes_.size() && size <= bytes_.size() - offset;
    ok_ = ok_ && inside;
    return inside;
  }

  std::span<const std::byte> bytes_;
  bool ok_ = true;
};

/// Writes fields. A field out of bounds is left out and makes ok() false for good.
class Writer {
 public:
  explicit constexpr Writer(std::span<std::byte> bytes) noexcept : bytes_(bytes) {}

  template <std::unsigned_integral T>
  constexpr void put(std::size_t offset, T value) noexcept {
    if (!within(offset, sizeof(T))) return;
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      bytes_[offset + i] = static_cast<std::byte>(static_cast<std::uint64_t>(value) >> (8 * i));
    }
  }
  void copy(std::size_t offset, std::span<const std::uint8_t> in) noexcept {
    if (in.empty() || !within(offset, in.size())) return;
    std::memcpy(bytes_.data() + offset, in.data(), in.size());
  }
  /// False once a field lay out of bounds.
  [[nodiscard]] constexpr bool ok() const noexcept { return ok_; }

 private:
  constexpr bool within(std::size_t offset, std::size_t size) noexcept {
    const bool inside = offset <= bytes_.size() && size <= bytes_.size() - offset;
    ok_ = ok_ && inside;
    return inside;
  }

  std::span<std::byte> bytes_;
  bool ok_ = true;
};

}  // namespace spinwire::wire
