// Records of sessions, each directly followed by its slots. A small table, which stays in the
// caches, gives the address of a call's data, so that all of it can be prefetched at once.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/index_pool.h"
#include "base/large_memory.h"
#include "wire/handshake.h"

namespace spinwire::rpc {

/// A base::IndexPool that never returns memory to the system. A released record stays readable
/// until a session with as many places reuses it.
template <typename Session, typename Place>
class SessionTable {
 public:
  static_assert(std::is_trivially_destructible_v<Place> && alignof(Session) >= alignof(Place));
  static constexpr std::uint32_t kNone = base::IndexPool<Session>::kNone;

  /// May throw std::bad_alloc. Set-up.
  explicit SessionTable(std::uint32_t capacity) : entries_(capacity) {}
  SessionTable(const SessionTable&) = delete;
  SessionTable& operator=(const SessionTable&) = delete;
  ~SessionTable() {
    for (Session* record : made_) record->~Session();
  }

  /// A record with `window` new places, a power of two; kNone if all are in use. May throw
  /// std::bad_alloc. Set-up.
  [[nodiscard]] std::uint32_t acquire(std::uint32_t window) {
    const std::uint32_t index = entries_.acquire();
    if (index == kNone) return kNone;
    try {
      entries_.at(index) = {take(window), window};
    } catch (...) {
      entries_.release(index);
      throw;
    }
    return index;
  }
  void release(std::uint32_t index) noexcept {
    const Entry entry = std::exchange(entries_.at(index), {});
    void*& free = free_[list_of(entry.window)];
    *reinterpret_cast<void**>(places(*entry.record)) = free;
    free = entry.record;
    entries_.release(index);
  }

  /// The record at an index in use.
  [[nodiscard]] Session& at(std::uint32_t index) noexcept { return *entries_.at(index).record; }
  [[nodiscard]] const Session& at(std::uint32_t index) const noexcept {
    return *entries_.at(index).record;
  }
  /// Null if the index is not in use. Safe for any value, such as a peer's. Hot.
  [[nodiscard]] Session* find(std::uint32_t index) noexcept {
    return index < entries_.capacity() ? entries_.at(index).record : nullptr;
  }
  [[nodiscard]] static Place* places(Session& record) noexcept {
    return reinterpret_cast<Place*>(&record + 1);
  }
  /// Prefetches the record and the slot of a call, for any index and number. Hot.
  void prefetch(std::uint32_t index, std::uint32_t number) const noexcept {
    asm volatile("");  // g++ drops calls of functions without effect; this counts as one
    if (index >= entries_.capacity()) return;
    const Entry& entry = entries_.at(index);
    if (entry.record == nullptr) return;
    const auto* const record = reinterpret_cast<const std::byte*>(entry.record);
    const std::byte* const place =
        record + sizeof(Session) + (number & (entry.window - 1)) * sizeof(Place);
    for (std::size_t at = 0; at < Session::kHotBytes; at += 64) __builtin_prefetch(record + at);
    for (std::size_t at = 0; at < sizeof(Place); at += 64) __builtin_prefetch(place + at);
  }
  /// Runs `visit(record)` for each record in use; it may release records.
  template <typename Visit>
  void for_each(Visit&& visit) {
    for (std::uint32_t i = 0; i < capacity(); ++i) {
      if (in_use(i)) visit(at(i));
    }
  }
  [[nodiscard]] bool in_use(std::uint32_t index) const noexcept { return entries_.in_use(index); }
  [[nodiscard]] std::uint32_t generation(std::uint32_t index) const noexcept {
    return entries_.generation(index);
  }
  [[nodiscard]] std::uint32_t size() const noexcept { return entries_.size(); }
  [[nodiscard]] std::uint32_t capacity() const noexcept { return entries_.capacity(); }

 private:
  struct Entry {
    Session* record = nullptr;
    std::uint32_t window = 0;
  };
  static constexpr std::size_t kFirstChunk = std::size_t{16} << 10;

  static std::size_t list_of(std::uint32_t window) noexcept {
    return static_cast<std::size_t>(std::countr_zero(window));
  }
  Session* take(std::uint32_t window) {
    void*& free = free_[list_of(window)];
    Session* record = static_cast<Session*>(free);
    if (record != nullptr) {
      free = *reinterpret_cast<void**>(places(*record));
    } else {
      if (made_.size() == made_.capacity()) made_.reserve(2 * made_.size() + 1);
      record = new (carve(sizeof(Session) + window * sizeof(Place))) Session;
      made_.push_back(record);
    }
    std::uninitialized_value_construct_n(places(*record), window);
    return record;
  }
  std::byte* carve(std::size_t bytes) {
    if (bytes > left_) {
      // Few sessions take little memory; the memory of many lies in huge pages.
      const std::size_t chunk = std::clamp(total_, kFirstChunk, base::kHugePage);
      chunks_.reserve(chunks_.size() + 1);
      chunks_.push_back(base::large_memory(chunk, alignof(Session)));
      next_ = chunks_.back().get();
      left_ = chunk;
      total_ += chunk;
    }
    left_ -= bytes;
    return std::exchange(next_, next_ + bytes);
  }

  base::IndexPool<Entry> entries_;
  std::array<void*, std::countr_zero(wire::kSessionWindowMax) + 1> free_{};
  std::vector<Session*> made_;
  std::vector<base::LargeMemory> chunks_;
  std::byte* next_ = nullptr;
  std::size_t left_ = 0;
  std::size_t total_ = 0;
};

}  // namespace spinwire::rpc
