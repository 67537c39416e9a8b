// Private memory for tables, in huge pages if the table is large and the system has some free. With
// ordinary pages, random access to thousands of records walks the page tables each time. Set-up.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "base/available_memory.h"

// Of the leak checker, which may watch a program whose Spinwire was built without it. Null where
// there is none.
extern "C" {
[[gnu::weak]] void __lsan_register_root_region(const void* begin, std::size_t bytes);
[[gnu::weak]] void __lsan_unregister_root_region(const void* begin, std::size_t bytes);
}

namespace spinwire::base {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

/// Memory of at least a huge page is mapped apart from the heap, so that its advice ends with it.
struct LargeDeleter {
  std::size_t alignment = 0;
  std::size_t mapped = 0;  ///< bytes; 0: of the heap
  void operator()(std::byte* memory) const noexcept {
    if (mapped != 0) {
      if (__lsan_unregister_root_region != nullptr) __lsan_unregister_root_region(memory, mapped);
      (void)::munmap(memory, mapped);
    } else {
      ::operator delete (memory, std::align_val_t{alignment});
    }
  }
};
/// Raw memory: it constructs and destroys no objects.
using LargeMemory = std::unique_ptr<std::byte, LargeDeleter>;

/// Maps `bytes` of zeroes, a multiple of kHugePage, aligned to kHugePage. The first `ordinary`
/// bytes are in ordinary pages. Throws NotEnoughMemory where the kernel would end a process when
/// the bytes are touched. May throw std::bad_alloc.
inline LargeMemory map_huge_pages(std::size_t bytes, std::size_t ordinary = 0) {
  if (ordinary == 0) require_record_memory(bytes);  // else most pages are never touched
  void* const mapped =
      ::mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | (ordinary != 0 ? MAP_NORESERVE : 0), -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* const begin = static_cast<std::byte*>(mapped);
  const std::size_t skipped = -reinterpret_cast<std::uintptr_t>(begin) % kHugePage;
  // Where the system refuses, for a limit of mappings, the rest costs address space only.
  if (skipped != 0) (void)::munmap(begin, skipped);
  (void)::munmap(begin + skipped + bytes, kHugePage - skipped);
  // Only hints.
  if (ordinary != 0) (void)::madvise(begin + skipped, ordinary, MADV_NOHUGEPAGE);
  (void)::madvise(begin + skipped + ordinary, bytes - ordinary, MADV_HUGEPAGE);
  // The records point to memory of the heap, which the leak checker would otherwise report.
  if (__lsan_register_root_region != nullptr) __lsan_register_root_region(begin + skipped, bytes);
  return LargeMemory(begin + skipped, LargeDeleter{kHugePage, bytes});
}

/// Allocates at least `bytes`, aligned to `alignment`. May throw std::bad_alloc.
inline LargeMemory large_memory(std::size_t bytes, std::size_t alignment) {
  const std::size_t unit = bytes >= kHugePage ? kHugePage : alignment;
  const std::size_t whole = (bytes + unit - 1) / unit * unit;
  if (bytes >= kHugePage) return map_huge_pages(whole);
  return LargeMemory(static_cast<std::byte*>(::operator new (whole, std::align_val_t{unit})),
                     LargeDeleter{unit});
}

/// Maps `bytes` of zeroes, which take memory when they are touched. A part of a huge page is
/// touched first without taking the whole. May throw std::bad_alloc.
inline LargeMemory sparse_memory(std::size_t bytes) {
  const std::size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  return map_huge_pages(whole, kHugePage);
}

/// An array of `count` objects, which it owns.
template <typename T>
class LargeArray {
 public:
  /// May throw std::bad_alloc, and any exception of T's constructor.
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
