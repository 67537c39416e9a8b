// Random numbers: secrets from the kernel, and others for packet sequence numbers, nonces and
// jitter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "spinwire/status.h"

namespace spinwire::base {

/// 64 bits that nobody can guess, not 0, for tokens. A SeedSource replaces them in simulations.
/// Errors: system (the kernel gives none: early in boot, or a filter of system calls forbids it).
/// Set-up: a system call.
Result<std::uint64_t> random_secret();

/// Fills at most 256 bytes, for keys, like random_secret(). All bits are random. Errors: those of
/// random_secret().
Result<void> random_bytes(std::span<std::byte> bytes);

/// 64 bits from the kernel's generator, not for secrets. If the kernel has none, a mix of time,
/// process and address that still differs between processes. A SeedSource replaces it in
/// simulations. Set-up: a system call.
[[nodiscard]] std::uint64_t random_seed() noexcept;

/// A SplitMix64 generator: one addition and a mixing function; any seed will do. Equal seeds give
/// equal sequences on every platform and version. One thread. Hot.
class Random {
 public:
  explicit constexpr Random(std::uint64_t seed) noexcept : state_(seed) {}

  constexpr std::uint64_t next() noexcept {
    state_ += 0x9e3779b97f4a7c15u;
    return mix(state_);
  }
  /// Evenly from [0, bound), but for a bias below bound / 2^64; 0 if `bound` is 0.
  constexpr std::uint64_t below(std::uint64_t bound) noexcept {
    return static_cast<std::uint64_t>((Wide{next()} * bound) >> 64);
  }
  /// True in about `parts` of a million calls.
  constexpr bool chance(std::uint32_t parts) noexcept { return below(1'000'000) < parts; }

  /// The mixing function: each changed bit of `x` changes about half of the result's bits.
  static constexpr std::uint64_t mix(std::uint64_t x) noexcept {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }

 private:
  __extension__ using Wide = unsigned __int128;

  std::uint64_t state_;
};

/// While it exists, random_seed() draws from it in this thread, so that one seed determines a whole
/// simulation. At most one per thread.
class SeedSource {
 public:
  explicit SeedSource(std::uint64_t seed) noexcept;
  SeedSource(const SeedSource&) = delete;
  SeedSource& operator=(const SeedSource&) = delete;
  ~SeedSource();
  /// Whether this thread has a SeedSource.
  [[nodiscard]] static bool there() noexcept;
  std::uint64_t next() noexcept { return random_.next(); }

 private:
  Random random_;
};

}  // namespace spinwire::base
