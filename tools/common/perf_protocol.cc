#include "common/perf_protocol.h"

#include <utility>

namespace spinwire::tools {
namespace {

/// The part between the stamps: [first, second).
std::pair<std::size_t, std::size_t> body(std::size_t size) noexcept {
  if (size <= 8) return {size, size};
  return {8, size >= 16 ? size - 8 : size};
}

/// Eight bytes of the pattern, unlike those at neighbouring offsets.
std::uint64_t word(std::uint64_t seed, std::size_t offset) noexcept {
  std::uint64_t x = seed + offset * 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 31)) * 0xd6e8feb86659fd93ull;
  return x ^ (x >> 32);
}

}  // namespace

std::string_view to_string(PerfTest test) noexcept {
  constexpr std::array<std::string_view, 4> kNames{"lat", "rate", "bw", "rpc"};
  return kNames[static_cast<std::size_t>(test)];
}

std::string_view to_string(PerfOp op) noexcept {
  constexpr std::array<std::string_view, 6> kNames{"send", "write", "read",
                                                   "pong", "call",  "atomic"};
  return kNames[static_cast<std::size_t>(op)];
}

std::string perf_shown(std::string_view text) {
  std::string shown(text);
  for (char& c : shown) {
    if (c < ' ' || c > '~') c = '?';
  }
  return shown;
}

std::string perf_text(const std::array<char, 172>& text) {
  return perf_shown({text.data(), ::strnlen(text.data(), text.size())});
}

void perf_set_text(std::array<char, 172>& out, std::string_view text) noexcept {
  out.fill('\0');
  std::copy_n(text.data(), std::min(text.size(), out.size() - 1), out.data());
}

void perf_fill(std::span<std::byte> bytes, std::uint64_t seed) noexcept {
  const auto [begin, end] = body(bytes.size());
  for (std::size_t i = begin; i < end; i += 8) {
    const std::uint64_t value = word(seed, i);
    std::memcpy(bytes.data() + i, &value, std::min<std::size_t>(8, end - i));
  }
}

std::size_t perf_find_wrong(std::span<const std::byte> bytes, std::uint64_t seed) noexcept {
  const auto [begin, end] = body(bytes.size());
  for (std::size_t i = begin; i < end; i += 8) {
    const std::uint64_t value = word(seed, i);
    const std::size_t length = std::min<std::size_t>(8, end - i);
    if (std::memcmp(bytes.data() + i, &value, length) != 0) return i;
  }
  return bytes.size();
}

}  // namespace spinwire::tools
