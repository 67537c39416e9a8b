// The dialogue of spinwire-perf's two ends, and the bytes that they move.
//
//   client                     server
//   Request (what to measure)  →
//                              ← Offer (where to write or read, or a refusal)
//   the operations             ⇄ (echoes, if round trips are measured; a write for each write)
//   Finish                     →
//                              ← Verdict (whether everything arrived as it was sent)
//
// All numbers are little-endian, as on every machine that Spinwire runs on.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "spinwire/buffer.h"

namespace spinwire::tools {

static_assert(std::endian::native == std::endian::little);

enum class PerfTest : std::uint8_t { lat, rate, bw, rpc };  // rpc: see perf_rpc.h
enum class PerfOp : std::uint8_t { send, write, read, pong, call, atomic };
/// Bytes of an atomic.
inline constexpr std::uint64_t kAtomicBytes = 8;
std::string_view to_string(PerfTest test) noexcept;
std::string_view to_string(PerfOp op) noexcept;

/// The first bytes of every message of the dialogue.
struct PerfHead {
  static constexpr std::uint32_t kMagic = 0x46505753;  // "SWPF"
  static constexpr std::uint16_t kVersion = 3;

  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  std::uint16_t kind = 0;
};

struct PerfRequest {
  static constexpr std::uint16_t kKind = 1;
  static constexpr std::uint64_t kLongest = std::uint64_t{1} << 30;
  static constexpr std::uint32_t kWidest = 32768;

  PerfHead head{.kind = kKind};
  std::uint64_t size = 0;   ///< bytes per operation; 1 … kLongest
  std::uint64_t total = 0;  ///< operations, warm-up included
  std::uint64_t warmup = 0;
  std::uint64_t seed = 0;    ///< of the pattern
  std::uint32_t window = 0;  ///< operations in flight; 1 … kWidest
  PerfTest test = PerfTest::lat;
  PerfOp op = PerfOp::send;
  std::uint16_t unused = 0;
  RemoteRegion reply;  ///< pong: where the server writes back

  [[nodiscard]] bool valid() const noexcept {
    return size >= 1 && size <= kLongest && total >= 1 && window >= 1 && window <= kWidest &&
           test <= PerfTest::bw && (op <= PerfOp::pong || op == PerfOp::atomic) &&
           (op != PerfOp::pong || valid_pong()) && (op != PerfOp::atomic || size == kAtomicBytes);
  }
  [[nodiscard]] bool valid_pong() const noexcept {
    return test == PerfTest::lat && window == 1 && reply.length >= size;
  }
};

struct PerfOffer {
  static constexpr std::uint16_t kKind = 2;

  PerfHead head{.kind = kKind};
  RemoteRegion region;          ///< for one-sided operations
  std::uint32_t slots = 0;      ///< places in the region, each perf_stride() bytes; 0: refused
  std::array<char, 172> why{};  ///< reason of a refusal
};

struct PerfFinish {
  static constexpr std::uint16_t kKind = 3;

  PerfHead head{.kind = kKind};
};

struct PerfVerdict {
  static constexpr std::uint16_t kKind = 4;

  PerfHead head{.kind = kKind};
  std::uint32_t good = 0;
  std::array<char, 172> why{};  ///< reason, when not good
};

/// Decodes one message of the dialogue; false if it is another message or invalid.
template <typename T>
bool perf_decode(std::span<const std::byte> bytes, T& out) noexcept {
  if (bytes.size() != sizeof(T)) return false;
  std::memcpy(&out, bytes.data(), sizeof(T));
  return out.head.magic == PerfHead::kMagic && out.head.version == PerfHead::kVersion &&
         out.head.kind == T::kKind;
}
template <typename T>
std::span<const std::byte> perf_encode(const T& message) noexcept {
  return std::as_bytes(std::span(&message, 1));
}
/// A text of the peer as users see it: '?' for each byte that is not printable.
std::string perf_shown(std::string_view text);
/// As perf_shown(); the text may lack its terminator.
std::string perf_text(const std::array<char, 172>& text);
void perf_set_text(std::array<char, 172>& out, std::string_view text) noexcept;

// ---- the bytes --------------------------------------------------------------------------------

/// Distance between two places in a buffer.
constexpr std::uint64_t perf_stride(std::uint64_t size) noexcept { return (size + 63) & ~63ull; }

/// Stamps an operation's bytes with `value`: the first eight bytes and, from sixteen bytes on, the
/// last eight. Hot.
inline void perf_stamp(std::byte* at, std::size_t size, std::uint64_t value) noexcept {
  if (size < sizeof value) [[unlikely]] {
    std::memcpy(at, &value, size);
    return;
  }
  std::memcpy(at, &value, sizeof value);
  if (size >= 2 * sizeof value) std::memcpy(at + size - sizeof value, &value, sizeof value);
}
/// Whether the bytes carry that stamp. Hot.
inline bool perf_is_stamped(const std::byte* at, std::size_t size, std::uint64_t value) noexcept {
  if (size < sizeof value) [[unlikely]]
    return std::memcmp(at, &value, size) == 0;
  if (std::memcmp(at, &value, sizeof value) != 0) return false;
  return size < 2 * sizeof value ||
         std::memcmp(at + size - sizeof value, &value, sizeof value) == 0;
}

/// Fills the bytes between the stamps with a pattern of seed and offset.
void perf_fill(std::span<std::byte> bytes, std::uint64_t seed) noexcept;
/// Offset of the first byte that perf_fill() did not write; bytes.size() if there is none.
std::size_t perf_find_wrong(std::span<const std::byte> bytes, std::uint64_t seed) noexcept;

}  // namespace spinwire::tools
