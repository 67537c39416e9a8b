// Finds records by a 32-bit key: a hash table whose chains run through an array by record index.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "base/random.h"

namespace spinwire::base {

/// The keys of the records of a table, for example of an IndexPool. Two records may have equal
/// keys. One thread. All calls but the constructor are hot: O(1) on average, no allocation.
class KeyMap {
 public:
  static constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

  /// For records 0 to `capacity` - 1. May throw std::bad_alloc. Set-up.
  explicit KeyMap(std::uint32_t capacity)
      : entries_(capacity), buckets_(std::bit_ceil(std::size_t{capacity} + 1), kNone) {}

  /// Gives a key to a record that has none.
  void insert(std::uint32_t key, std::uint32_t record) noexcept {
    entries_[record] = {key, std::exchange(buckets_[bucket_of(key)], record)};
  }
  /// Takes the key from a record that has one.
  void erase(std::uint32_t record) noexcept {
    std::uint32_t* link = &buckets_[bucket_of(entries_[record].key)];
    while (*link != record) link = &entries_[*link].next;
    *link = entries_[record].next;
  }
  void clear() noexcept { buckets_.assign(buckets_.size(), kNone); }

  /// The record with this key, the newest if there are several; kNone if there is none. Accepts any
  /// number, such as a peer's.
  [[nodiscard]] std::uint32_t find(std::uint32_t key) const noexcept {
    std::uint32_t record = buckets_[bucket_of(key)];
    while (record != kNone && entries_[record].key != key) record = entries_[record].next;
    return record;
  }
  /// The key of a record that has one.
  [[nodiscard]] std::uint32_t key(std::uint32_t record) const noexcept {
    return entries_[record].key;
  }
  /// Whether the record has this key and its chain leads to it. For audits: a broken chain ends the
  /// search.
  [[nodiscard]] bool holds(std::uint32_t key, std::uint32_t record) const noexcept {
    std::uint32_t at = buckets_[bucket_of(key)];
    for (std::size_t left = entries_.size(); at != record && left != 0; --left) {
      if (at >= entries_.size()) return false;
      at = entries_[at].next;
    }
    return at == record && entries_[record].key == key;
  }

 private:
  struct Entry {
    std::uint32_t key = 0;
    std::uint32_t next = kNone;  ///< record in the same bucket
  };
  [[nodiscard]] std::size_t bucket_of(std::uint32_t key) const noexcept {
    return Random::mix(key) & (buckets_.size() - 1);
  }

  std::vector<Entry> entries_;  ///< by record
  std::vector<std::uint32_t> buckets_;
};

}  // namespace spinwire::base
