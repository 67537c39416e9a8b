// The table of kv-store: an array of buckets that the server writes and clients READ at any time.
// The server does not notice the READs, so each slot shows by itself whether it is whole:
//
//   - its version is odd from before the server changes the first byte until after the last;
//   - its checksum is XXH3 over all following bytes, seeded with the version.
//
// The version alone is not enough: a READ copies bytes in any order, so the version may be older or
// newer than the rest. Bytes of two writes do not match either checksum. A reader that finds an odd
// version or a wrong checksum reads again, so it accepts only the bytes of one write.
#pragma once

#include <xxhash.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace kv {

inline constexpr std::size_t kKeyBytes = 40;
inline constexpr std::size_t kValueBytes = 448;
inline constexpr std::size_t kWays = 4;  ///< slots of a bucket; a key can be in any of them

struct Slot {
  std::uint64_t version;  ///< 0: never written; odd: being written
  std::uint64_t checksum;
  std::uint32_t key_size;  ///< 0: the slot is free
  std::uint32_t value_size;
  std::array<char, kKeyBytes> key;
  std::array<char, kValueBytes> value;
};
static_assert(sizeof(Slot) == 512);
using Bucket = std::array<Slot, kWays>;

inline std::uint64_t bucket_of(std::string_view key, std::uint64_t buckets) {
  return XXH3_64bits(key.data(), key.size()) & (buckets - 1);
}
inline std::uint64_t checksum_of(const Slot& s, std::uint64_t version) {
  constexpr std::size_t kBehind = offsetof(Slot, key_size);
  return XXH3_64bits_withSeed(reinterpret_cast<const std::byte*>(&s) + kBehind, sizeof s - kBehind,
                              version);
}
inline bool holds(const Slot& s, std::string_view key) {
  return s.key_size == key.size() && std::memcmp(s.key.data(), key.data(), key.size()) == 0;
}

// ---- the only writer ----------------------------------------------------------------------------

/// The key's slot, or one that it can take; null if the bucket is full. A key never moves while it
/// is present, so no reader can miss it.
inline Slot* place_of(Bucket& bucket, std::string_view key) {
  Slot* free = nullptr;
  for (Slot& slot : bucket) {
    if (holds(slot, key)) return &slot;
    if (slot.key_size == 0 && free == nullptr) free = &slot;
  }
  return free;
}

/// Key and value have at most kKeyBytes and kValueBytes. Two empty ones free the slot.
inline void write(Slot& slot, std::string_view key, std::string_view value) {
  const std::atomic_ref<std::uint64_t> version(slot.version);
  const std::uint64_t next = version.load(std::memory_order_relaxed) + 2;
  version.store(next - 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // odd before any byte changes
  slot.key_size = static_cast<std::uint32_t>(key.size());
  slot.value_size = static_cast<std::uint32_t>(value.size());
  key.copy(slot.key.data(), key.size());
  value.copy(slot.value.data(), value.size());
  slot.checksum = checksum_of(slot, next);
  version.store(next, std::memory_order_release);  // even after all bytes have changed
}

// ---- readers, each with a copy ------------------------------------------------------------------

inline bool is_whole(const Slot& s) {
  return s.version % 2 == 0 && s.key_size <= kKeyBytes && s.value_size <= kValueBytes &&
         s.checksum == checksum_of(s, s.version);
}

enum class Look : std::uint8_t {
  there,
  absent,
  torn,  ///< the key may be in a slot that is being written: read again
};
/// Looks for a key in a copy of a bucket. `value` points into the copy; `version` is the slot's.
inline Look look(const Bucket& bucket, std::string_view key, std::string_view& value,
                 std::uint64_t& version) {
  Look found = Look::absent;
  for (const Slot& slot : bucket) {
    if (slot.version == 0) continue;  // not yet written at the time of the READ
    if (!is_whole(slot)) {
      found = Look::torn;
    } else if (slot.key_size != 0 && holds(slot, key)) {
      value = {slot.value.data(), slot.value_size};
      version = slot.version;
      return Look::there;
    }
  }
  return found;
}

}  // namespace kv
