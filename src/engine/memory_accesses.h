// The checked accesses of the application to memory: see spinwire/memory_access.h. Set-up.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace spinwire::engine {

class MemoryAccesses {
 public:
  /// Whether an access has any of the bytes that excludes another of this kind.
  [[nodiscard]] bool has_conflict(std::span<const std::byte> bytes, bool exclusive) const noexcept {
    return std::any_of(all_.begin(), all_.end(), [&](const Access& each) {
      return (each.exclusive || exclusive) && each.bytes.data() < bytes.data() + bytes.size() &&
             bytes.data() < each.bytes.data() + each.bytes.size();
    });
  }
  /// Names the access. May throw std::bad_alloc.
  std::uint64_t add(std::span<const std::byte> bytes, bool exclusive) {
    all_.push_back({++last_, bytes, exclusive});
    return last_;
  }
  /// Returns whether the access was exclusive.
  bool remove(std::uint64_t id) noexcept {
    const auto at =
        std::find_if(all_.begin(), all_.end(), [id](const Access& each) { return each.id == id; });
    if (at == all_.end()) return false;
    const bool exclusive = at->exclusive;
    *at = all_.back();
    all_.pop_back();
    return exclusive;
  }

 private:
  struct Access {
    std::uint64_t id;
    std::span<const std::byte> bytes;
    bool exclusive;
  };
  std::vector<Access> all_;
  std::uint64_t last_ = 0;
};

}  // namespace spinwire::engine
