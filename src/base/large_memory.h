// Private memory of tables that may be large: then in huge pages, if the system has some to give
// away. A table of thousands of records that are used at random costs a walk of the page tables at
// each use otherwise. Set-up.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>

namespace spinwire::base {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

struct LargeDeleter {
  std::size_t alignment = 0;
  void operator()(std::byte* memory) const noexcept {
    ::operator delete (memory, std::align_val_t{alignment});
  }
};
/// Not initialised, and nobody's objects are ended with it.
using LargeMemory = std::unique_ptr<std::byte, LargeDeleter>;

/// At least `bytes`, aligned. May throw std::bad_alloc.
inline LargeMemory large_memory(std::size_t bytes, std::size_t alignment) {
  const bool large = bytes >= kHugePage;
  const std::size_t unit = large ? kHugePage : alignment;
  const std::size_t whole = (bytes + unit - 1) / unit * unit;
  LargeMemory memory(static_cast<std::byte*>(::operator new (whole, std::align_val_t{unit})),
                     LargeDeleter{unit});
  if (large) (void)::madvise(memory.get(), whole, MADV_HUGEPAGE);  // only a hint
  return memory;
}

/// `count` objects, made with it and ended with it.
template <typename T>
class LargeArray {
 public:
  /// May throw what making one does, and std::bad_alloc.
  explicit LargeArray(std::size_t count)
      : memory_(large_memory(count * sizeof(T), std::max(alignof(T), std::size_t{64}))),
        count_(count) {
    std::uninitialized_value_construct_n(begin(), count);
  }
  LargeArray(const LargeArray&) = delete;
  LargeArray& operator=(const LargeArray&) = delete;
  ~LargeArray() { std::destroy_n(begin(), count_); }

  [[nodiscard]] T* begin() const noexcept { return reinterpret_cast<T*>(memory_.get()); }
  [[nodiscard]] T& operator[](std::size_t i) const noexcept { return begin()[i]; }

 private:
  LargeMemory memory_;
  std::size_t count_;
};

}  // namespace spinwire::base
