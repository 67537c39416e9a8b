// Writing to an engine's file so that readers recognise what was being written while they read.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace spinwire::observe {

inline std::atomic_ref<std::uint64_t> word_at(std::byte* at) noexcept {
  return std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(at));
}
/// Stores consecutive words; returns the place behind them.
inline std::byte* store_words(std::byte* at, std::span<const std::uint64_t> words) noexcept {
  for (const std::uint64_t each : words) {
    word_at(at).store(each, std::memory_order_relaxed);
    at += sizeof each;
  }
  return at;
}
/// Runs `store`, which stores what follows the word at `at`. That word is odd meanwhile, and then
/// has an even number that no other write has. `sequence` is the last of these numbers.
template <typename Store>
void write_whole(std::byte* at, std::uint64_t& sequence, Store&& store) noexcept {
  word_at(at).store(sequence + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  store(at + sizeof(std::uint64_t));
  word_at(at).store(sequence += 2, std::memory_order_release);
}

}  // namespace spinwire::observe
