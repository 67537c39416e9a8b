// What the operations of connections do with memory, for checked accesses. Cold.
#pragma once

#include <infiniband/verbs.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace spinwire::agent {

struct EngineContext;

enum class MemoryUse : std::uint8_t { none, read, changed };

/// The bytes in question, and the most that was found to be done with any of them.
class MemorySearch {
 public:
  explicit MemorySearch(std::span<const std::byte> bytes) noexcept
      : begin_(reinterpret_cast<std::uint64_t>(bytes.data())), end_(begin_ + bytes.size()) {}

  void see(std::uint64_t address, std::uint64_t length, MemoryUse use) noexcept {
    if (length != 0 && address < end_ && begin_ < address + length) found_ = std::max(found_, use);
  }
  void see(const ibv_sge* sges, int count, MemoryUse use) noexcept {
    for (int i = 0; i < count; ++i) see(sges[i].addr, sges[i].length, use);
  }
  void see(const std::byte* data, std::uint64_t length, MemoryUse use) noexcept {
    see(reinterpret_cast<std::uint64_t>(data), length, use);
  }
  [[nodiscard]] MemoryUse found() const noexcept { return found_; }

 private:
  std::uint64_t begin_;
  std::uint64_t end_;
  MemoryUse found_ = MemoryUse::none;
};

/// Sees the memory of the operations that have not ended. Takes time in proportion to the
/// connections and their operations.
void see_operations(EngineContext& ctx, MemorySearch& search) noexcept;

}  // namespace spinwire::agent
