// Scatter/gather elements of operations with more of them than their records have.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>

#include "base/large_memory.h"
#include "spinwire/buffer.h"

namespace spinwire::agent {

/// Most parts of an operation: the greatest queues.max_send_sge.
inline constexpr std::uint32_t kMaxParts = 64;

/// A list for each record of the application's operations, in memory that is taken when a list is
/// used for the first time.
class ElementLists {
 public:
  /// May throw std::bad_alloc.
  ElementLists(std::uint32_t records, std::uint32_t elements)
      : elements_(elements),
        memory_(base::sparse_memory(std::size_t{records} * elements * kElementBytes)) {}

  /// The elements of a record.
  [[nodiscard]] ibv_sge* elements(std::uint32_t record) const noexcept {
    return reinterpret_cast<ibv_sge*>(at(record));
  }
  /// The blocks of these elements; a header has none, so the last may be unused.
  [[nodiscard]] detail::Block** blocks(std::uint32_t record) const noexcept {
    return reinterpret_cast<detail::Block**>(at(record) + std::size_t{elements_} * sizeof(ibv_sge));
  }

 private:
  static constexpr std::size_t kElementBytes = sizeof(ibv_sge) + sizeof(detail::Block*);
  [[nodiscard]] std::byte* at(std::uint32_t record) const noexcept {
    return memory_.get() + std::size_t{record} * elements_ * kElementBytes;
  }

  std::uint32_t elements_;
  base::LargeMemory memory_;
};

}  // namespace spinwire::agent
