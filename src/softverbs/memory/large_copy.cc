#include "softverbs/memory/large_copy.h"

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>

#include "base/sanitizers.h"

namespace spinwire::softverbs {
namespace {

std::size_t read_cache_size() noexcept {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(
      std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "re"), &std::fclose);
  std::array<char, 32> text{};
  if (file == nullptr || std::fgets(text.data(), text.size(), file.get()) == nullptr) return 0;
  const unsigned long kibibytes = std::strtoul(text.data(), nullptr, 10);  // "32768K"
  return std::size_t{kibibytes} << 10;
}

/// Copies whole lines to an address that is a multiple of 64.
[[gnu::target("avx2")]] void stream_lines(std::byte* to, const std::byte* from,
                                          std::size_t lines) noexcept {
  for (; lines != 0; --lines, to += 64, from += 64) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), high);
  }
  _mm_sfence();  // these stores are not ordered with what tells others of the bytes
}

bool overlap(const std::byte* a, const std::byte* b, std::size_t length) noexcept {
  const auto at = reinterpret_cast<std::uintptr_t>(a);
  const auto other = reinterpret_cast<std::uintptr_t>(b);
  return (at < other ? other - at : at - other) < length;
}

}  // namespace

std::size_t third_level_cache_bytes() noexcept {
  static const std::size_t bytes = read_cache_size();
  return bytes;
}

void copy_past_cache(std::byte* to, const std::byte* from, std::size_t length) noexcept {
  // The thread sanitizer sees calls of memmove, and no such stores.
  if (SPINWIRE_TSAN || length < 128 || overlap(to, from, length) ||
      !__builtin_cpu_supports("avx2")) {
    std::memmove(to, from, length);
    return;
  }
  const std::size_t before = (64 - reinterpret_cast<std::uintptr_t>(to) % 64) % 64;
  const std::size_t lines = (length - before) / 64;
  const std::size_t done = before + 64 * lines;
  std::memcpy(to, from, before);
  stream_lines(to + before, from + before, lines);
  // Last, for programs that wait for the last byte.
  std::memcpy(to + done, from + done, length - done);
}

// All parts together are at least twice as large as the cache, so that copies that go round in more
// memory than the cache holds are seen to do so.
LargeCopies::LargeCopies(std::size_t cache) noexcept
    : cache_(cache),
      part_shift_(
          static_cast<unsigned>(std::bit_width(std::max(kLeast / 4, 2 * cache / kParts) - 1))) {}

bool LargeCopies::left_cache(const std::byte* to, std::size_t length) noexcept {
  // The first and the last part may also belong to a neighbour.
  const auto address = reinterpret_cast<std::uintptr_t>(to);
  const std::size_t first = ((address - 1) >> part_shift_) + 1;
  const std::size_t end = (address + length) >> part_shift_;
  copied_ += length;
  const auto now = static_cast<std::uint32_t>(copied_ / kUnit);
  std::uint32_t least = std::numeric_limits<std::uint32_t>::max();
  for (std::size_t i = first; i < end; ++i) least = std::min(least, now - parts_[index_of(i)]);
  for (std::size_t i = first; i < end; ++i) parts_[index_of(i)] = now;
  return first < end && cache_ != 0 && 2 * kUnit * least > cache_;
}

void LargeCopies::copy_many(std::byte* to, const std::byte* from, std::size_t length) noexcept {
  if (left_cache(to, length)) {
    copy_past_cache(to, from, length);
  } else {
    std::memmove(to, from, length);
  }
}

}  // namespace spinwire::softverbs
